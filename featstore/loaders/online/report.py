"""What an online loader counts: mini-batches whose reads have begun, and what its reader and buffers count,
also those that were let go when the budget was divided anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from featstore.loaders.prefetch import Stages
from featstore.loaders.report import LoaderReport, reading_latencies, reading_seconds
from featstore.reader.report import ReaderStats
from featstore.tiers.tickets import BufferStats

if TYPE_CHECKING:
    from featstore.hosts.source import HostsRows
    from featstore.reader.reader import Reader
    from featstore.tiers.buffer import FeatureBuffer
    from featstore.tiers.device import DeviceBuffer


@dataclass(frozen=True)
class Counted:
    """Bytes and reads of readers; of buffers in host memory and on devices what they count, by table."""

    bytes_read: int = 0
    reads: int = 0
    forecast_seconds: float = 0.0
    remote_rows: int = 0
    remote_bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=lambda: reading_seconds(()))
    buffers: Mapping[str, BufferStats] = field(default_factory=dict)
    devices: Mapping[str, BufferStats] = field(default_factory=dict)
    latencies: Mapping[float, int] = field(default_factory=dict)

    def plus(
        self,
        reader: Reader | HostsRows | None,
        buffers: Mapping[str, FeatureBuffer],
        devices: Mapping[str, DeviceBuffer],
    ) -> Counted:
        """These, and what these readers and buffers count now."""
        stats = ReaderStats() if reader is None else reader.stats()
        now = reading_seconds([stats])
        return Counted(
            self.bytes_read + stats.bytes_read,
            self.reads + stats.reads,
            self.forecast_seconds + stats.forecast_seconds,
            self.remote_rows + getattr(reader, "remote_rows", 0),
            self.remote_bytes + getattr(reader, "remote_bytes", 0),
            {stage: before + now[stage] for stage, before in self.seconds.items()},
            _both(self.buffers, {name: one.stats() for name, one in list(buffers.items())}),
            _both(self.devices, {name: one.stats() for name, one in list(devices.items())}),
            reading_latencies([stats], self.latencies),
        )


def _both(before: Mapping[str, BufferStats], now: Mapping[str, BufferStats]) -> dict[str, BufferStats]:
    names = dict.fromkeys([*before, *now])
    return {n: BufferStats.sum(one[n] for one in (before, now) if n in one) for n in names}


class OnlineStages(Stages):
    """Counts for a report."""

    def begun(self) -> None:
        """A mini-batch's reads have begun."""
        self.read_begins()

    def ended(self) -> None:
        """A mini-batch's rows are there."""
        self.read_ends()

    def report(self, counted: Counted) -> LoaderReport:
        """``counted``: by reader and buffers."""
        batches, seconds, _ = self.snapshot()
        return LoaderReport(
            batches, seconds | dict(counted.seconds), counted.bytes_read, counted.reads,
            buffers=counted.buffers, devices=counted.devices, forecast_seconds=counted.forecast_seconds,
            remote_rows=counted.remote_rows, remote_bytes=counted.remote_bytes, latencies=counted.latencies,
        )  # fmt: skip
