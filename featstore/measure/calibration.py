"""What a calibration found: the model, and the measurements that it was made from."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from featstore.engine import EngineName
from featstore.engine.files import Access
from featstore.measure.engine_rates import EngineRate
from featstore.plan.cost import DeviceModel


@dataclass(frozen=True)
class Sample:
    """One size of reads: ``seconds`` holds the time per read of each round; ``seconds_per_read`` is their
    median."""

    extent_bytes: int
    reads: int
    seconds: tuple[float, ...]

    @property
    def seconds_per_read(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median of the rounds: large where something else uses the device."""
        return (max(self.seconds) - min(self.seconds)) / self.seconds_per_read


@dataclass(frozen=True)
class GapSample:
    """The dense pattern read with one longest gap: what it came to, and the seconds of each round."""

    gap_pages: int
    reads: int
    bytes_read: int
    seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Calibration:
    """A measured device model and what it was made from. ``key`` is what it is kept under
    (:mod:`featstore.plan.cost`); ``rates``: reads of a page a second by engine and number of rings;
    ``open_because``: why the engine or the number of rings is left open, "" where it is not."""

    key: str
    auto_key: str
    engine: EngineName
    access: Access
    access_because: str
    model: DeviceModel
    samples: tuple[Sample, ...]
    gaps: tuple[GapSample, ...]
    rates: tuple[EngineRate, ...]
    open_because: str
    temporary: bool
    seconds: float

    @property
    def left_open(self) -> str:
        """What is left open, why, and what to do; "" where nothing is."""
        if not self.open_because:
            return ""
        return (
            f"which engine and how many rings are the fastest is left open: {self.open_because}; readers go "
            "by how busy their cores are, and take the engine that they took before. Calibrate again when "
            "the machine is idle"
        )

    @property
    def error(self) -> float:
        """Largest relative error of the model over the sizes measured."""
        m = self.model
        return max(
            abs(m.read_seconds + s.extent_bytes * m.byte_seconds - s.seconds_per_read) / s.seconds_per_read
            for s in self.samples
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        m = self.model
        return {
            "key": self.key,
            "engine": self.engine,
            "access": self.access,
            "access_because": self.access_because,
            "model": {
                "read_seconds": m.read_seconds,
                "byte_seconds": m.byte_seconds,
                "request_seconds": m.request_seconds,
                "write_byte_seconds": m.write_byte_seconds,
                "threads": m.threads,
                "read_cpu_seconds": m.read_cpu_seconds,
                "engine": m.engine,
            },
            "rates": [one.to_dict() for one in self.rates],
            "open_because": self.open_because,
            "gap_pages_max": m.gap_pages_max,
            "error": self.error,
            "temporary": self.temporary,
            "seconds": self.seconds,
            "gaps": [
                {
                    "gap_pages": g.gap_pages,
                    "reads": g.reads,
                    "bytes_read": g.bytes_read,
                    "seconds": g.median_seconds,
                }
                for g in self.gaps
            ],
            "samples": [
                {
                    "extent_bytes": s.extent_bytes,
                    "reads": s.reads,
                    "seconds_per_read": s.seconds_per_read,
                    "spread": s.spread,
                }
                for s in self.samples
            ],
        }
