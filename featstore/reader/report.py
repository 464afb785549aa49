"""What a reader says of itself: plans before a read, statistics after it."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import shown
from featstore.base.sheets import Sheet, Shown
from featstore.errors import ArgumentError
from featstore.reader.sheets import plan_sheet, stats_sheet
from featstore.storage.whole_files import save_json
from featstore.units import format_bytes


@dataclass(frozen=True)
class TablePlan:
    """The plan for the ids of one table. ``amplification`` is bytes read over bytes asked for, as in
    :class:`ReaderStats`: what tiers hold, and what is asked for twice, counts as asked and is not read, so
    that it may be below 1."""

    table: str
    ids: int
    hits: Mapping[str, int]
    rows_missed: int
    distinct_rows: int
    pages: int
    reads: int
    bytes_asked: int
    bytes_read: int
    amplification: float
    forecast_seconds: float
    gap_pages_max: int


def plan_elsewhere(table: str, missed: NDArray[np.int64]) -> TablePlan:
    """A plan of rows that another process reads."""
    return TablePlan(
        table, ids=len(missed), hits={}, rows_missed=len(missed), distinct_rows=len(np.unique(missed)),
        pages=0, reads=0, bytes_asked=0, bytes_read=0, amplification=0.0,
        forecast_seconds=math.nan if len(missed) else 0.0, gap_pages_max=0,
    )  # fmt: skip


def _unread(t: TablePlan) -> str:
    """Which bytes asked for need no read of their own."""
    tiers, again = t.ids - t.rows_missed, t.rows_missed - t.distinct_rows
    parts = [f"{tiers / t.ids:.0%} of them from tiers"] * (tiers > 0) + [
        f"{again / t.ids:.0%} asked for again"
    ] * (again > 0)
    return f", {' and '.join(parts)}, without a read" if parts else ""


def _known(number: float) -> float | None:
    return None if math.isnan(number) else number


@dataclass(frozen=True)
class Plan(Shown):
    """What a request would read, and how long that should take; ``print(plan)`` explains.

    ``forecast_seconds`` is the time of the reads; ``calibrated`` tells whether the device model behind it was
    measured. ``policies``: of tiers that a cache policy rules, by tier and table which one it is now and why.
    ``elsewhere``: what is missed is read by another process, the owner of a shared buffer; then
    there are no ``reads`` here, and where something is missed the forecast is NaN (None in :meth:`to_dict`).
    """

    tables: tuple[TablePlan, ...]
    engine: str
    calibrated: bool
    forecast_seconds: float
    elsewhere: bool = False
    policies: Mapping[str, Mapping[str, tuple[str, str]]] = field(default_factory=dict)

    @property
    def reads(self) -> int:
        return sum(t.reads for t in self.tables)

    @property
    def bytes_read(self) -> int:
        return sum(t.bytes_read for t in self.tables)

    @property
    def bytes_asked(self) -> int:
        return sum(t.bytes_asked for t in self.tables)

    @property
    def pages(self) -> int:
        return sum(t.pages for t in self.tables)

    @property
    def hits(self) -> dict[str, int]:
        """Hits of each tier, over all tables."""
        out: dict[str, int] = {}
        for table in self.tables:
            for tier, count in table.hits.items():
                out[tier] = out.get(tier, 0) + count
        return out

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "engine": self.engine,
            "calibrated": self.calibrated,
            "forecast_seconds": _known(self.forecast_seconds),
            "tables": [
                {f.name: getattr(t, f.name) for f in fields(t)}
                | {"hits": dict(t.hits), "forecast_seconds": _known(t.forecast_seconds)}
                for t in self.tables
            ],
            "policies": {
                tier: {table: {"name": name, "because": because} for table, (name, because) in of.items()}
                for tier, of in self.policies.items()
            },
        }

    def _sheet(self) -> Sheet:
        return plan_sheet(self)

    def __str__(self) -> str:
        lines = []
        for t in self.tables:
            hits = ", ".join(f"{count:,} from the {tier} tier" for tier, count in t.hits.items()) or "no tier"
            lines.append(
                f"table {t.table!r}: {t.ids:,} ids ({format_bytes(t.bytes_asked)}); {hits}; "
                f"{t.rows_missed:,} missed"
            )
            for tier, of in self.policies.items():
                if t.table in of:
                    lines.append(f"  the {tier} tier goes by {': '.join(of[t.table])}")
            if t.reads:
                lines.append(
                    f"  {t.distinct_rows:,} distinct rows on {t.pages:,} pages -> {t.reads:,} reads of "
                    f"{format_bytes(t.bytes_read / t.reads)} on average, {format_bytes(t.bytes_read)} in all "
                    f"(gaps of up to {t.gap_pages_max} pages are read through)\n"
                    f"  amplification {t.amplification:.2f}: bytes read for each byte asked for{_unread(t)}"
                )
        if self.elsewhere:
            lines.append(
                "no forecast: what is missed is read by the owner of the shared buffer, in its own process"
            )
            return "\n".join(lines)
        model = "calibrated" if self.calibrated else "not calibrated: run `featstore calibrate`"
        lines.append(f"forecast: {self.forecast_seconds * 1e3:.2f} ms through {self.engine} ({model})")
        return "\n".join(lines)


@dataclass(frozen=True)
class ReaderStats(Shown):
    """Counts of a reader since it was opened. Times are in seconds, summed over the engine's threads.

    ``latency_histogram``: (upper edge in microseconds, reads) for each power of two that occurred.
    ``policies``: of tiers that a cache policy rules, its name now by tier and table.
    ``seconds_waiting`` is time in which an engine's thread had nothing to do but wait for the device.
    """

    engine: str = ""
    access: str = ""
    requests: int = 0
    rows_asked: int = 0
    bytes_asked: int = 0
    hits: Mapping[str, int] = field(default_factory=dict)
    reads: int = 0
    bytes_read: int = 0
    short_reads: int = 0
    seconds_planning: float = 0.0
    seconds_waiting: float = 0.0
    seconds_verifying: float = 0.0
    seconds_copying: float = 0.0
    forecast_seconds: float = 0.0
    latency_histogram: tuple[tuple[float, int], ...] = ()
    policies: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Share of the rows asked for that came from a tier; 0 before the first request."""
        return sum(self.hits.values()) / self.rows_asked if self.rows_asked else 0.0

    @property
    def amplification(self) -> float:
        """Bytes read over bytes asked for, rows from tiers included; 0 before the first request."""
        return self.bytes_read / self.bytes_asked if self.bytes_asked else 0.0

    def since(self, before: ReaderStats) -> ReaderStats:
        """What has been counted since an earlier snapshot of the same reader."""
        if not isinstance(before, ReaderStats):
            raise ArgumentError(f"before must be ReaderStats, not {shown(before)}")
        changed: dict[str, Any] = {}
        for f in fields(self):
            now, then = getattr(self, f.name), getattr(before, f.name)
            if f.name == "hits":
                changed[f.name] = {k: v - then.get(k, 0) for k, v in now.items()}
            elif f.name == "latency_histogram":
                old = dict(then)
                changed[f.name] = tuple(
                    (edge, n - old.get(edge, 0)) for edge, n in now if n > old.get(edge, 0)
                )
            elif not isinstance(now, str | Mapping):
                changed[f.name] = now - then
            else:
                changed[f.name] = now
        return ReaderStats(**changed)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        out["hits"] = dict(self.hits)
        out["policies"] = {tier: dict(of) for tier, of in self.policies.items()}
        out["latency_histogram"] = [list(pair) for pair in self.latency_histogram]
        return out | {"hit_rate": self.hit_rate, "amplification": self.amplification}

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write them as JSON, as ``featstore inspect --html --stats`` reads them: :meth:`to_dict` and a
        ``schema``, ``featstore.reader-stats/1``. Returns the path. Raises StoreExistsError for a file that is
        there already, unless ``overwrite``; DiskFullError, DeviceError."""
        return save_json(path, "featstore.reader-stats/1", self.to_dict(), overwrite)

    def _sheet(self) -> Sheet:
        return stats_sheet(self)


class Counts:
    """What a reader counts itself (its engine counts the rest). Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._hits: dict[str, int] = {}

    def add(self, hits: Mapping[str, int] | None = None, **values: float) -> None:
        """Add to the fields of :class:`ReaderStats` of these names."""
        with self._lock:
            for key, value in values.items():
                self._values[key] = self._values.get(key, 0) + value
            for tier, count in (hits or {}).items():
                self._hits[tier] = self._hits.get(tier, 0) + count

    def add_held(self, tier: str, rows: int, byte_count: int, seconds: float) -> None:
        """A request whose rows one tier has all: what :meth:`add` would do, in less than half of its time."""
        values, hits = self._values, self._hits
        with self._lock:
            values["requests"] = values.get("requests", 0) + 1
            values["rows_asked"] = values.get("rows_asked", 0) + rows
            values["bytes_asked"] = values.get("bytes_asked", 0) + byte_count
            values["seconds_planning"] = values.get("seconds_planning", 0) + seconds
            hits[tier] = hits.get(tier, 0) + rows

    def clear(self) -> None:
        """Begin anew."""
        with self._lock:
            self._values.clear()
            self._hits.clear()

    def stats(self, **engine: Any) -> ReaderStats:
        """The counts as they are now, with the engine's."""
        with self._lock:
            return ReaderStats(hits=dict(self._hits), **self._values, **engine)  # type: ignore[arg-type]
