"""What an online loader tells of itself: per stage busy and waiting time, hits and misses, bytes read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from featstore.loaders.prefetch import Stages
from featstore.reader.report import ReaderStats
from featstore.tiers.tickets import BufferStats


@dataclass(frozen=True)
class OnlineReport:
    """Seconds by stage (``sample``, ``claim``, ``gather``, ``hand over``: busy; ``read``: the rows of at
    least one mini-batch are on their way; ``train``: the loop is at work; ``wait``: the loop waits), what
    each table's buffer has counted (``buffers``), and the devices above it (``devices``), reads and bytes
    read from disk."""

    batches: int
    seconds: dict[str, float]
    buffers: dict[str, BufferStats]
    bytes_read: int
    reads: int
    devices: dict[str, BufferStats]

    @property
    def slowest(self) -> str:
        """The stage that is busy longest."""
        return max(("sample", "read", "gather", "train"), key=lambda s: self.seconds.get(s, 0.0))

    @property
    def hit_rate(self) -> float:
        """Of all rows asked for, the share that was on a device, in a host's buffer, or on its way."""
        asked = sum(
            b.hits + b.misses for b in (self.buffers | self.devices).values()
        )  # the devices, where there are some, are asked first
        return 1 - sum(b.misses for b in self.buffers.values()) / max(1, asked)

    def to_dict(self) -> dict[str, Any]:
        return {
            "batches": self.batches, "seconds": self.seconds, "slowest": self.slowest,
            "hit_rate": round(self.hit_rate, 6),
            "buffers": {name: asdict(b) for name, b in self.buffers.items()},
            "devices": {name: asdict(b) for name, b in self.devices.items()}, "bytes_read": self.bytes_read,
            "reads": self.reads,
        }  # fmt: skip


class OnlineStages(Stages):
    """Counts for a report."""

    def begun(self, tickets: object) -> None:
        """A mini-batch's reads have begun."""
        self.read_begins()

    def ended(self, tickets: object) -> None:
        """A mini-batch's rows are there."""
        self.read_ends()

    def report(
        self, stats: ReaderStats | None, buffers: dict[str, BufferStats], devices: dict[str, BufferStats]
    ) -> OnlineReport:
        """``stats``: of the reader; of the buffers and device levels by table."""
        batches, seconds, _ = self.snapshot()
        return OnlineReport(
            batches,
            seconds,
            buffers,
            0 if stats is None else stats.bytes_read,
            0 if stats is None else stats.reads,
            devices,
        )
