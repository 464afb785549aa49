"""What a loader of a compiled trace counts: bytes by where they came from."""

from __future__ import annotations

from featstore.layout.records import TableRecord
from featstore.loaders.prefetch import Stages
from featstore.loaders.report import LoaderReport, reading_latencies, reading_seconds
from featstore.reader.report import ReaderStats

_SOURCES = ("hit", "packed", "shared", "base", "copy", "device")


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
            batches, seconds | reading_seconds(stats), sum(s.bytes_read for s in stats),
            sum(s.reads for s in stats),
            row_bytes=row_bytes, buffer_hits=buffer_hits, forecast_seconds=forecast_seconds * batches,
            latencies=reading_latencies(stats),
        )  # fmt: skip
