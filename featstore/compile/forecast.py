"""What compiling a trace will give, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from featstore.compile.decide import TableDecision
from featstore.trace.trace import Trace


@dataclass(frozen=True)
class CompileForecast:
    """What compiling a trace will give, before anything is written. Seconds: of reading all mini-batches
    once.

    ``tables``: by table, what its rows cost (see :class:`featstore.compile.placement.Forecast`) and how they
    are spread.
    """

    batches: int
    seconds: float
    bytes_read: int
    disk_bytes: int
    record_bytes: int
    tables: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, trace: Trace, plans: Sequence[TableDecision]) -> CompileForecast:
        """Of what was decided about each table."""
        record_bytes = int(np.sum(trace.sample_sizes)) + sum(12 * p.rows.total for p in plans)
        return cls(
            len(trace), sum(p.forecast.seconds for p in plans), sum(p.forecast.bytes_read for p in plans),
            sum(p.forecast.disk_bytes for p in plans), record_bytes,
            {p.table.name: described(p) for p in plans},
        )  # fmt: skip


def described(plan: TableDecision) -> dict[str, Any]:
    """What a table's rows cost, and how they are spread."""
    r = plan.residency
    found: dict[str, Any] = msgspec.to_builtins(plan.forecast)
    return found | {
        "asked_rows": plan.asked_rows, "hit_rows": r.hit_rows, "missed_rows": r.missed_rows,
        "restored_rows": r.restored_rows, "resident_rows": len(plan.start), "device_rows": len(plan.device),
        "row_bytes": plan.table.row_bytes, "table_bytes": plan.table.data_bytes,
    }  # fmt: skip
