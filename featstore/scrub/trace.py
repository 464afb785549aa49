"""Verifying a trace: every byte read once and held against the checksums.

Head, index and tail are looked at as in opening a trace; then every frame: its own two checksums, those that
the index repeats, and what the index says of its length and its ids. Between frames there is nothing. It
holds one mini-batch.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from featstore.arguments import as_callback, as_choice
from featstore.base.system import asking
from featstore.engine.files import Access
from featstore.errors import CorruptionError, DeviceError
from featstore.scrub.report import Progress, TraceProblem, TraceReport, listed
from featstore.trace.log_file import TRACE_NAME, read_frame
from featstore.trace.trace import Trace
from featstore.units import PAGE_BYTES


def verify_trace(
    path: str | os.PathLike[str],
    *,
    progress: Callable[[Progress], None] | None = None,
    access: Access = "direct",
) -> TraceReport:
    """Read a whole finished trace; see the module's text. ``access``: "direct" has the page cache let go of
    the file before.

    Raises IncompleteStoreError where there is no finished trace, FormatError where it cannot be trusted,
    DeviceError, and ArgumentError for another access.
    """
    as_choice(access, "access", ("direct", "buffered"))
    progress = as_callback(progress, "progress")
    where = Path(os.path.abspath(path))
    try:
        trace = Trace(where)
    except CorruptionError as error:
        with asking(where / TRACE_NAME, "look at"):
            size = (where / TRACE_NAME).stat().st_size
        bad = _problem(None, error.offset, error.expected, error.actual)
        return _report(where, "", 0, 0, size, access, [bad])
    with trace:
        if access == "direct":
            os.posix_fadvise(trace.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        problems = _frames(trace, progress)
        ids = sum(int(counts.sum()) for counts in trace.counts.values())
        return _report(where, trace.uuid, len(trace), ids, trace.bytes, access, problems)


def _report(
    path: Path, uuid: str, batches: int, ids: int, size: int, access: Access, problems: list[TraceProblem]
) -> TraceReport:
    return TraceReport(
        path=str(path), uuid=uuid, batches=batches, ids=ids, bytes=size, access=access, ok=not problems,
        problem_count=len(problems), problems=listed(problems),
    )  # fmt: skip


def _problem(batch: int | None, offset: int | None, expected: object, actual: object) -> TraceProblem:
    page = None if offset is None else offset // PAGE_BYTES
    return TraceProblem(TRACE_NAME, page, offset, str(expected), str(actual), "trace", batch)


def _frames(trace: Trace, progress: Callable[[Progress], None] | None) -> list[TraceProblem]:
    problems: list[TraceProblem] = []
    id_max = dict.fromkeys(trace.node_types, -1)
    for number in range(len(trace)):
        offset = int(trace.index.offsets[number])
        try:
            _frame(trace, number, offset, id_max)
        except CorruptionError as error:
            problems.append(_problem(number, error.offset, error.expected, error.actual))
        except DeviceError as error:
            if error.errno != errno.EIO:
                raise
            problems.append(_problem(number, error.offset, "readable bytes", "an error of the device"))
        if progress is not None:
            progress(Progress(TRACE_NAME, int(trace.index.offsets[number + 1]), trace.bytes))
    if not problems and id_max != trace.id_max:
        problems.append(_problem(None, None, f"the largest ids {trace.id_max}", id_max))
    return problems


def _frame(trace: Trace, number: int, offset: int, id_max: dict[str, int]) -> None:
    """Raise CorruptionError unless a frame is as the index says. Raises the largest ids seen."""
    index, path = trace.index, trace.file
    end = int(index.offsets[number + 1])
    front, block, sample = read_frame(trace.descriptor, path, offset, end, number, list(trace.node_types))
    found = (front.crc, front.sample_crc, len(block), len(sample), *(len(one) for one in front.ids.values()))
    said = (
        int(index.front_crcs[number]), int(index.sample_crcs[number]), int(index.front_bytes[number]),
        int(index.sample_bytes[number]), *index.counts[:, number].tolist(),
    )  # fmt: skip
    if found != said:
        raise CorruptionError(path, offset, f"what the index says, {said}", f"{found}")
    for name, ids in front.ids.items():
        if len(ids):
            id_max[name] = max(id_max[name], int(np.max(ids)))
            if int(np.min(ids)) < 0:
                raise CorruptionError(path, offset, "node ids from 0 on", f"{int(np.min(ids))}")
