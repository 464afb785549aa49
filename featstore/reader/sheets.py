"""What a reader, its plans and a table as an array show of themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from featstore.base.sheets import Grid, Sheet, bars_of
from featstore.errors import ClosedError
from featstore.units import format_bytes


def reader_sheet(reader: Any) -> Sheet:
    """How it reads, what it holds in memory, and what it has done."""
    facts, grids = {"store": str(reader.store.path)}, []
    try:
        stats, memory = reader.stats(), reader.memory()
    except ClosedError:
        return Sheet("Reader", facts | {"state": "closed"})
    if through := getattr(reader, "through", ""):
        facts["through"] = through
    facts |= {"tables": ", ".join(reader.tables), "memory": format_bytes(sum(memory.values()))}
    grids.append(bars_of("memory by use", {use: size for use, size in memory.items() if size}))
    return Sheet("Reader", facts | counted_facts(stats), grids)


def counted_facts(stats: Any) -> dict[str, str]:
    """What a reader has counted, as facts."""
    facts = {"engine": f"{stats.engine}, {stats.access}"} if stats.engine else {}
    if not stats.requests:
        return facts | {"so far": "no request"}
    hits = {tier: f"{count:,}" for tier, count in stats.hits.items()}
    return facts | {
        "so far": f"{stats.requests:,} requests, {stats.rows_asked:,} rows "
        f"({format_bytes(stats.bytes_asked)})",
        "hits": f"{stats.hit_rate:.1%}" + "".join(f", {n} from the {tier} tier" for tier, n in hits.items()),
        "read": f"{format_bytes(stats.bytes_read)} in {stats.reads:,} reads, amplification "
        f"{stats.amplification:.2f}",
    }


def plan_sheet(plan: Any) -> Sheet:
    """What a request would read, by table."""
    columns = ("table", "ids", "from tiers", "rows missed", "pages", "reads", "bytes", "amplification")
    rows = [
        [
            t.table, f"{t.ids:,}", f"{sum(t.hits.values()):,}", f"{t.rows_missed:,}", f"{t.pages:,}",
            f"{t.reads:,}", format_bytes(t.bytes_read), f"{t.amplification:.2f}",
        ]
        for t in plan.tables
    ]  # fmt: skip
    if plan.elsewhere:
        facts = {"forecast": "none: what is missed is read by the owner of the shared buffer"}
    else:
        model = "calibrated" if plan.calibrated else "not calibrated: run `featstore calibrate`"
        facts = {"forecast": f"{plan.forecast_seconds * 1e3:.2f} ms through {plan.engine} ({model})"}
    return Sheet(
        "Plan",
        facts | {"policies": _policies(plan.policies)} if plan.policies else facts,
        [Grid(columns, rows)],
    )


def _policies(policies: Mapping[str, Mapping[str, tuple[str, str]]]) -> str:
    return "; ".join(
        f"{tier} tier of {table}: {name}, {because}"
        for tier, of in policies.items()
        for table, (name, because) in of.items()
    )


def array_sheet(array: Any) -> Sheet:
    """Its shape, and what reads its rows."""
    try:
        held = array.memory()
        memory = format_bytes(sum(held.values())) if held else "none: another process has it"
    except ClosedError:
        memory = "none: closed"
    shape = "x".join(map(str, array.shape))
    size = format_bytes(array.shape[0] * array.row_bytes)
    facts = {
        "shape": f"{shape} {array.dtype}, {size} on disk",
        "memory": memory,
        "through": getattr(array.source, "through", "a reader"),
    }
    return Sheet(f"Table {array.name} as an array", facts)


def stats_sheet(stats: Any) -> Sheet:
    """What a reader has counted, and how long its reads took."""
    return Sheet("What a reader has counted", counted_facts(stats), latency_grids(stats.latency_histogram))


def latency_grids(reads: Iterable[tuple[float, int]]) -> list[Grid]:
    """Reads by the upper edge of what they took, in microseconds; none where there were none."""
    named = {f"up to {edge:,.0f} us": float(count) for edge, count in reads}
    return [bars_of("reads by latency", named, "{:,.0f}".format)] if named else []
