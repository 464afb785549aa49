"""What a loader of a compiled trace tells of itself: per stage busy and waiting time, bytes by tier, forecast
and measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from featstore.layout.records import TableRecord
from featstore.loaders.prefetch import Stages
from featstore.reader.report import ReaderStats

_SOURCES = ("hit", "packed", "shared", "base", "copy", "device")


@dataclass(frozen=True)
class LoaderReport:
    """Seconds by stage (``read``: at least one read of rows under way; ``assemble``, ``graph``,
    ``hand over``: busy; ``train``: the loop is at work; waits: ``read wait``, ``room wait`` of the loader,
    ``wait`` of the loop), bytes of rows by where they came from, rows of the base store that a buffer over it
    had, reads and bytes read from disk, forecast seconds of reading."""

    batches: int
    seconds: dict[str, float]
    row_bytes: dict[str, int]
    bytes_read: int
    reads: int
    forecast_seconds: float
    buffer_hits: int

    @property
    def slowest(self) -> str:
        """The stage that is busy longest."""
        return max(
            ("read", "assemble", "graph", "hand over", "train"), key=lambda s: self.seconds.get(s, 0.0)
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "batches": self.batches, "seconds": self.seconds, "row_bytes": self.row_bytes,
            "bytes_read": self.bytes_read, "reads": self.reads, "buffer_hits": self.buffer_hits,
            "forecast_seconds": self.forecast_seconds, "slowest": self.slowest,
        }  # fmt: skip


class CompiledStages(Stages):
    """Counts for a report."""

    def rows(self, table: str, record: TableRecord, row_bytes: int) -> None:
        """Count where a mini-batch's rows came from."""
        for source in _SOURCES:
            self.count(source, len(getattr(record, f"{source}_place")) * row_bytes)

    def report(self, stats: list[ReaderStats], forecast_seconds: float, buffer_hits: int = 0) -> LoaderReport:
        """``stats``: of the readers; ``forecast_seconds``: of reading one mini-batch."""
        batches, seconds, row_bytes = self.snapshot()
        return LoaderReport(
            batches, seconds, row_bytes, sum(s.bytes_read for s in stats), sum(s.reads for s in stats),
            forecast_seconds * batches, buffer_hits,
        )  # fmt: skip
