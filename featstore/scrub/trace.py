"""Verifying a trace: every byte read once and held against the checksums.

Head, index and tail are looked at as in opening a trace; then every frame: its own two checksums, those that
the index repeats, and what the index says of its length and its ids. Between frames there is nothing. It
holds one mini-batch.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from featstore.arguments import as_choice, as_function
from featstore.base.system import asking
from featstore.engine.files import Access
from featstore.errors import CorruptionError, DeviceError
from featstore.trace.filling import TraceProgress
from featstore.trace.log_file import TRACE_NAME, read_frame
from featstore.trace.trace import Trace
from featstore.units import format_bytes

#: So many problems are listed; all are counted.
PROBLEMS_MAX = 1000


@dataclass(frozen=True)
class TraceProblem:
    """Something that is not as it should be. ``batch``: the mini-batch, or None for head, index and tail."""

    batch: int | None
    offset: int | None
    expected: str
    actual: str

    def __str__(self) -> str:
        where = "the file" if self.batch is None else f"mini-batch {self.batch}"
        at = "" if self.offset is None else f" (byte {self.offset:,})"
        return f"{where}{at}: expected {self.expected}, found {self.actual}"


@dataclass(frozen=True)
class TraceReport:
    """What was seen. ``problems`` lists the first 1000 of ``problem_count``. ``uuid`` is empty, and no
    mini-batch was read, where head, index or tail are bad. ``access``: "direct" where the device was asked,
    "buffered" where the page cache could answer."""

    path: str
    uuid: str
    batches: int
    ids: int
    bytes: int
    access: Access
    ok: bool
    problem_count: int
    problems: tuple[TraceProblem, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self) | {"problems": [asdict(p) for p in self.problems]}

    def __str__(self) -> str:
        verdict = "sound" if self.ok else f"{self.problem_count:,} problems"
        seen = f"{self.batches:,} mini-batches, {self.ids:,} node ids, {format_bytes(self.bytes)}"
        return "\n".join([f"{self.path}: {verdict} ({seen})", *map(str, self.problems)])


def verify_trace(
    path: str | os.PathLike[str],
    *,
    progress: Callable[[TraceProgress], None] | None = None,
    access: Access = "direct",
) -> TraceReport:
    """Read a whole finished trace; see the module's text. ``access``: "direct" has the page cache let go of
    the file before.

    Raises IncompleteStoreError where there is no finished trace, FormatError where it cannot be trusted,
    DeviceError, and ValueError for another access.
    """
    as_choice(access, "access", ("direct", "buffered"))
    if progress is not None:
        as_function(progress, "progress")
    where = Path(os.path.abspath(path))
    try:
        trace = Trace(where)
    except CorruptionError as error:
        with asking(where / TRACE_NAME, "look at"):
            size = (where / TRACE_NAME).stat().st_size
        return _report(
            str(where),
            "",
            0,
            0,
            size,
            access,
            [TraceProblem(None, error.offset, str(error.expected), str(error.actual))],
        )
    with trace:
        if access == "direct":
            os.posix_fadvise(trace._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        problems = _frames(trace, progress)
        ids = sum(int(counts.sum()) for counts in trace.counts.values())
        return _report(str(where), trace.uuid, len(trace), ids, trace.bytes, access, problems)


def _report(
    path: str, uuid: str, batches: int, ids: int, size: int, access: Access, problems: list[TraceProblem]
) -> TraceReport:
    return TraceReport(
        path, uuid, batches, ids, size, access, not problems, len(problems), tuple(problems[:PROBLEMS_MAX])
    )


def _frames(trace: Trace, progress: Callable[[TraceProgress], None] | None) -> list[TraceProblem]:
    problems: list[TraceProblem] = []
    id_max = dict.fromkeys(trace.node_types, -1)
    for number in range(len(trace)):
        offset = int(trace._index.offsets[number])
        try:
            _frame(trace, number, offset, id_max)
        except CorruptionError as error:
            problems.append(TraceProblem(number, error.offset, str(error.expected), str(error.actual)))
        except DeviceError as error:
            if error.errno != errno.EIO:
                raise
            problems.append(TraceProblem(number, error.offset, "readable bytes", "an error of the device"))
        if progress is not None:
            progress(TraceProgress(number + 1, len(trace), int(trace._index.offsets[number + 1])))
    if not problems and id_max != trace.id_max:
        problems.append(TraceProblem(None, None, f"the largest ids {trace.id_max}", f"{id_max}"))
    return problems


def _frame(trace: Trace, number: int, offset: int, id_max: dict[str, int]) -> None:
    """Raise CorruptionError unless a frame is as the index says. Raises the largest ids seen."""
    index, path = trace._index, trace._file
    end = int(index.offsets[number + 1])
    front, block, sample = read_frame(trace._descriptor, path, offset, end, number, list(trace.node_types))
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
