"""What a loader tells of itself, the same for every way to train."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from featstore.base.sheets import Sheet, Shown, bars_of
from featstore.loaders.counters import counters, openmetrics
from featstore.reader.report import ReaderStats
from featstore.reader.sheets import latency_grids
from featstore.storage.whole_files import save_json
from featstore.tiers.tickets import BufferStats
from featstore.units import format_bytes

#: Stages that are busy, not waiting.
_BUSY = ("sample", "prepare", "read", "load", "build", "gather", "assemble", "graph", "hand over", "train")
#: Sources of rows that are no reads.
_IN_MEMORY = ("hit", "copy", "device")


@dataclass(frozen=True)
class LoaderReport(Shown):
    """What has been measured so far.

    Attributes:
        batches: mini-batches handed out.
        seconds: by stage. Busy: ``sample``, ``graph`` (decoding a recorded sample), ``read`` (at least one
            read of rows under way), ``claim``, ``gather``, ``assemble``, ``hand over``, ``load`` and
            ``build`` (of collections of partitions), ``prepare`` (of rolling episodes), ``train`` (the loop
            is at work). Of the reader's threads, a part of those: ``lookup`` (rows looked up, reads planned),
            ``check`` (checksums) and ``copy`` (rows to where they are wanted). Waiting: ``wait`` (the loop),
            ``read wait``, ``record wait``, ``room wait``, ``load wait``, ``episode wait`` (the loader).
        bytes_read, reads: from disk.
        row_bytes: bytes of rows by where they came from, of compiled mini-batches.
        buffers, devices: what buffers in host memory, and on devices above them or above partitions in
            memory, have counted by table.
        buffer_hits: rows of the base store that a buffer over it had, of compiled mini-batches.
        forecast_seconds: of reading, by the device model: of compiled mini-batches as forecast when they were
            compiled, else for the reads that were planned. To be held against ``read``, or ``load``.
        remote_rows, remote_bytes: rows asked of other hosts, of a store that is split by hosts; of compiled
            mini-batches those that came when these were compiled.
        recorded_epochs: how many are repeated, of compiled mini-batches.
        padded, dropped: seeds, or links, of an epoch that stand twice, or are left out, so that ranks have
            equal steps; in mode partitions of a store that is split by hosts those of this host.
        edges_stored, edges_kept: of the collections of partitions that were trained on, the edges into their
            nodes, and those of them whose source was in memory, too.
        latencies: reads by how long they took: by the upper edge of each power of two that occurred, in
            microseconds.
    """

    batches: int
    seconds: Mapping[str, float]
    bytes_read: int
    reads: int
    row_bytes: Mapping[str, int] = field(default_factory=dict)
    buffers: Mapping[str, BufferStats] = field(default_factory=dict)
    devices: Mapping[str, BufferStats] = field(default_factory=dict)
    buffer_hits: int = 0
    forecast_seconds: float = 0.0
    remote_rows: int = 0
    remote_bytes: int = 0
    recorded_epochs: int = 0
    padded: int = 0
    dropped: int = 0
    edges_stored: int = 0
    edges_kept: int = 0
    latencies: Mapping[float, int] = field(default_factory=dict)

    @property
    def slowest(self) -> str:
        """The stage that is busy longest."""
        return max(_BUSY, key=lambda stage: self.seconds.get(stage, 0.0))

    @property
    def hit_rate(self) -> float:
        """Of all rows asked for, the share that was in memory, or on its way there."""
        if self.row_bytes:
            total = sum(self.row_bytes.values())
            return sum(self.row_bytes.get(name, 0) for name in _IN_MEMORY) / max(1, total)
        # Of each table the devices, where there are some, are asked first.
        asked = sum(b.hits + b.misses for b in {**self.buffers, **self.devices}.values())
        return 1 - sum(b.misses for b in self.buffers.values()) / max(1, asked)

    @property
    def kept_share(self) -> float:
        """Of the neighbours of nodes in memory, the share that mini-batches could be drawn from."""
        return self.edges_kept / self.edges_stored if self.edges_stored else 1.0

    def plus(self, other: LoaderReport) -> LoaderReport:
        """Both of two loaders, one after the other. Only sums: of no buffers."""
        added: dict[str, Any] = {}
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if isinstance(mine, Mapping):
                names = (*mine, *(n for n in theirs if n not in mine))
                added[one.name] = {n: mine.get(n, 0) + theirs.get(n, 0) for n in names}
            else:
                added[one.name] = mine + theirs
        return replace(self, **added)

    def counters(self) -> dict[str, float]:
        """Flat names and numbers, ``{"batches": 12, "seconds/read": 0.3, "buffers/features/hits": 9, ...}``:
        what TensorBoard's ``add_scalar`` and the like take."""
        return counters(self._facts())

    def openmetrics(self, **labels: str) -> str:
        """The counters as OpenMetrics text, which Prometheus scrapes; ``labels`` stand on every line
        (``rank="0"``). ``latencies`` are a histogram, ``featstore_loader_read_latency_seconds``. Raises
        ArgumentError for a label that cannot be one."""
        return openmetrics(self._facts(), labels)

    def _facts(self) -> dict[str, Any]:
        return asdict(self) | {"hit_rate": self.hit_rate, "kept_share": self.kept_share}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self) | {"slowest": self.slowest, "hit_rate": round(self.hit_rate, 6)}

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write it as JSON, as ``featstore inspect --html --stats`` reads it: :meth:`to_dict` and a
        ``schema``, ``featstore.loader-report/1``. Returns the path. Raises StoreExistsError for a file that
        is there already, unless ``overwrite``; DiskFullError, DeviceError."""
        return save_json(path, "featstore.loader-report/1", self.to_dict(), overwrite)

    def _sheet(self) -> Sheet:
        return report_sheet(self)


def report_sheet(report: LoaderReport) -> Sheet:
    """Where rows came from, and what took how long."""
    facts = {
        "mini-batches": f"{report.batches:,}",
        "hit rate": f"{report.hit_rate:.1%}",
        "read": f"{format_bytes(report.bytes_read)} in {report.reads:,} reads",
    }
    if report.seconds:
        facts["slowest stage"] = report.slowest
    if report.remote_rows:
        facts["of other hosts"] = f"{report.remote_rows:,} rows, {format_bytes(report.remote_bytes)}"
    if report.edges_stored:
        facts["neighbours kept"] = f"{report.kept_share:.1%}"
    grids = []
    longest = sorted(report.seconds.items(), key=lambda one: -one[1])
    if seconds := {stage: s for stage, s in longest if s}:
        grids.append(bars_of("seconds by stage", seconds, "{:,.3f} s".format, max(seconds.values())))
    if report.row_bytes:
        grids.append(bars_of("rows by source", report.row_bytes))
    for what, buffers in (("buffer", report.buffers), ("device", report.devices)):
        rates = {name: one.hit_rate for name, one in buffers.items()}
        if rates:
            grids.append(bars_of(f"hit rate of the {what} by table", rates, "{:.1%}".format, 1))
    grids += latency_grids(report.latencies.items())
    return Sheet("What a loader has measured", facts, grids)


NOTHING_YET = LoaderReport(0, {}, 0, 0)


def reading_seconds(stats: Iterable[ReaderStats]) -> dict[str, float]:
    """What the threads of readers were busy with, by stage."""
    found = {"lookup": 0.0, "check": 0.0, "copy": 0.0}
    for one in stats:
        found["lookup"] += one.seconds_planning
        found["check"] += one.seconds_verifying
        found["copy"] += one.seconds_copying
    return found


def reading_latencies(stats: Iterable[ReaderStats], before: Mapping[float, int] = {}) -> dict[float, int]:
    """Reads of readers, and those ``before``, by the upper edge of what they took, in microseconds."""
    found = dict(before)
    for one in stats:
        for edge, reads in one.latency_histogram:
            found[edge] = found.get(edge, 0) + reads
    return dict(sorted(found.items()))
