"""What a loader tells of itself, the same for every way to train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from featstore.loaders.counters import counters, openmetrics
from featstore.reader.report import ReaderStats
from featstore.tiers.tickets import BufferStats

#: Stages that are busy, not waiting.
_BUSY = ("sample", "prepare", "read", "load", "build", "gather", "assemble", "graph", "hand over", "train")
#: Sources of rows that are no reads.
_IN_MEMORY = ("hit", "copy", "device")


@dataclass(frozen=True)
class LoaderReport:
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
        padded, dropped: seeds of an epoch that stand twice, or are left out, so that ranks have equal steps;
            in mode partitions of a store that is split by hosts those of this host.
        edges_stored, edges_kept: of the collections of partitions that were trained on, the edges into their
            nodes, and those of them whose source was in memory, too.
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
        (``rank="0"``). Raises ArgumentError for a label that cannot be one."""
        return openmetrics(self._facts(), labels)

    def _facts(self) -> dict[str, Any]:
        return asdict(self) | {"hit_rate": self.hit_rate, "kept_share": self.kept_share}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self) | {"slowest": self.slowest, "hit_rate": round(self.hit_rate, 6)}


NOTHING_YET = LoaderReport(0, {}, 0, 0)


def reading_seconds(stats: Iterable[ReaderStats]) -> dict[str, float]:
    """What the threads of readers were busy with, by stage."""
    found = {"lookup": 0.0, "check": 0.0, "copy": 0.0}
    for one in stats:
        found["lookup"] += one.seconds_planning
        found["check"] += one.seconds_verifying
        found["copy"] += one.seconds_copying
    return found
