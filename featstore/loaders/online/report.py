"""What an online loader counts: mini-batches whose reads have begun."""

from __future__ import annotations

from featstore.loaders.prefetch import Stages
from featstore.loaders.report import LoaderReport
from featstore.reader.report import ReaderStats
from featstore.tiers.tickets import BufferStats


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
    ) -> LoaderReport:
        """``stats``: of the reader; of the buffers and device levels by table."""
        batches, seconds, _ = self.snapshot()
        read = (0, 0) if stats is None else (stats.bytes_read, stats.reads)
        forecast = 0.0 if stats is None else stats.forecast_seconds
        return LoaderReport(
            batches, seconds, *read, buffers=buffers, devices=devices, forecast_seconds=forecast
        )
