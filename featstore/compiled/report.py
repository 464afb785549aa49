"""What a loader of a compiled trace tells of itself: per stage busy and waiting time, bytes by tier, forecast and measurement."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from featstore.compiled.records import TableRecord

if TYPE_CHECKING:
    from featstore.compiled.loader import CompiledLoader
    from featstore.request import Request

_SOURCES = ("hit", "packed", "shared", "base", "copy", "device")


@dataclass(frozen=True)
class LoaderReport:
    """Seconds by stage (``read``: at least one read of rows under way; ``assemble``, ``graph``, ``hand over``: busy; ``train``: the loop
    is at work; waits: ``read wait``, ``room wait`` of the loader, ``wait`` of the loop), bytes of rows by where they came from, reads and
    bytes read from disk, forecast seconds of reading."""

    batches: int
    seconds: dict[str, float]
    row_bytes: dict[str, int]
    bytes_read: int
    reads: int
    forecast_seconds: float

    @property
    def slowest(self) -> str:
        """The stage that is busy longest."""
        return max(("read", "assemble", "graph", "hand over", "train"), key=lambda s: self.seconds.get(s, 0.0))

    def to_dict(self) -> dict[str, Any]:
        return {
            "batches": self.batches, "seconds": self.seconds, "row_bytes": self.row_bytes, "bytes_read": self.bytes_read,
            "reads": self.reads, "forecast_seconds": self.forecast_seconds, "slowest": self.slowest,
        }  # fmt: skip


class Stages:
    """Counts for a report; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = defaultdict(float)
        self._bytes: Counter[str] = Counter()
        self._batches = 0
        self._under_way = 0
        self._since = 0.0

    def add(self, stage: str, seconds: float) -> None:
        with self._lock:
            self._seconds[stage] += seconds
            self._batches += stage == "wait"

    def rows(self, table: str, record: TableRecord, row_bytes: int) -> None:
        """Count where a mini-batch's rows came from."""
        with self._lock:
            for source in _SOURCES:
                self._bytes[source] += len(getattr(record, f"{source}_place")) * row_bytes

    def reading(self, request: Request) -> None:
        """A read of rows has begun; its end is noticed by itself."""
        with self._lock:
            if self._under_way == 0:
                self._since = time.perf_counter()
            self._under_way += 1
        request._future.add_done_callback(self._read)

    def _read(self, _: object) -> None:
        with self._lock:
            self._under_way -= 1
            if self._under_way == 0:
                self._seconds["read"] += time.perf_counter() - self._since

    def report(self, loader: CompiledLoader) -> LoaderReport:
        stats = [r.stats() for r in (loader._pack, loader._base) if r is not None]
        with self._lock:
            return LoaderReport(
                self._batches, {k: round(v, 6) for k, v in sorted(self._seconds.items())}, dict(self._bytes),
                sum(s.bytes_read for s in stats), sum(s.reads for s in stats),
                loader.compiled.forecast_seconds * self._batches / max(1, loader.compiled.entry.batches),
            )  # fmt: skip
