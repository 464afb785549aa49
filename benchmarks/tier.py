"""Rows from the static tier, and planning: what a request costs before and beside its reads.

    python benchmarks/tier.py

*Tier*: a request whose rows are all in the static tier, against ``torch.index_select`` on a matrix that holds
the same rows. torch is told where in the matrix each row is; featstore is given node ids and has to find out.
Both fill an array made before. *Planning*: ``reader.plan`` for 500,000 ids, in nanoseconds an id: with no
tier at all, with a tier that holds none of the rows and with one that holds half of them; on a table in the
order given and on one under a random permutation, where each id has to be looked up in a map.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import click
import numpy as np
from harness import (
    Claim,
    Contender,
    Report,
    Sample,
    Settings,
    measure_rounds,
    note,
    paired_ratio,
    shared_options,
)
from numpy.typing import NDArray
from peers.torch_select import IndexSelect
from system import cpu_seconds, free_memory_bytes, touch_memory
from tables import COLUMNS, ROW_BYTES, Tables, check_rows, remove, true_rows

import featstore

REQUESTS = (1_000, 10_000, 100_000, 500_000)
PLANNED_IDS = 500_000
SAMPLE_ROWS = 1_000_000  # small requests are repeated until a sample has so many rows
SMALL_ROWS, SMALL_ROW_VALUES = 4_000_000, 4
IN_MEMORY = "rows in memory"


def tier_contenders(tables: Tables, store: featstore.Store, members: NDArray[np.int64]) -> list[Contender]:
    """featstore and torch on the same rows, one pair for each size of request."""
    reader = store.reader(memory=f"{tables.rows * ROW_BYTES // 2 * 5 // 4 + (256 << 20)}", static=members)
    held = true_rows(members)
    torch_rows = IndexSelect(held)
    out = np.zeros((max(REQUESTS), COLUMNS), np.float32)
    found = []
    for count in REQUESTS:
        repeats = max(1, SAMPLE_ROWS // count)

        def run_ours(number: int, count: int = count, repeats: int = repeats) -> Sample:
            seconds = cpu = 0.0
            for repeat in range(repeats):
                ids = members[_positions(len(members), count, number, repeat)]
                cpu_begin, begin = cpu_seconds(), time.perf_counter()
                reader.read(ids, out=out[:count])
                seconds, cpu = seconds + time.perf_counter() - begin, cpu + cpu_seconds() - cpu_begin
                check_rows(ids, out[:count], 20)
            return Sample(count * repeats, seconds, cpu)

        def run_torch(number: int, count: int = count, repeats: int = repeats) -> Sample:
            seconds = cpu = 0.0
            for repeat in range(repeats):
                positions = _positions(len(members), count, number, repeat)
                cpu_begin, begin = cpu_seconds(), time.perf_counter()
                torch_rows.read(positions, out[:count])
                seconds, cpu = seconds + time.perf_counter() - begin, cpu + cpu_seconds() - cpu_begin
                check_rows(members[positions], out[:count], 20)
            return Sample(count * repeats, seconds, cpu)

        for name, run in (
            (f"static tier, {count:,} ids", run_ours),
            (f"torch.index_select, {count:,} ids", run_torch),
        ):
            run(0)
            found.append(Contender(name, "rows/s", IN_MEMORY, run))
    return found


def _positions(members: int, count: int, number: int, repeat: int) -> NDArray[np.int64]:
    return np.random.default_rng([number, repeat]).integers(0, members, count)


def planning_contenders(name: str, store: featstore.Store) -> list[Contender]:
    """Planning for ids that no tier holds, without a tier and with one, and for ids of which a tier holds
    half."""
    rows = store.tables["features"].rows
    tier_bytes = rows // 2 * store.tables["features"].row_bytes
    even = np.arange(0, rows, 2)  # what the tier holds
    plain = store.reader(memory="512MiB", static=None)
    tiered = store.reader(memory=tier_bytes * 5 // 4 + (512 << 20), static=even)

    def contender(label: str, reader: featstore.Reader, ids: NDArray[np.int64], missing: int) -> Contender:
        def run(_: int) -> Sample:
            cpu, begin = cpu_seconds(), time.perf_counter()
            plan = reader.plan(ids)
            seconds, cpu = time.perf_counter() - begin, cpu_seconds() - cpu
            if plan.tables[0].rows_missed != missing:
                raise AssertionError(f"the plan misses {plan.tables[0].rows_missed:,} rows of {missing:,}")
            return Sample(len(ids), seconds, cpu)

        run(0)
        return Contender(f"plan, {name}, {label}", "ids/s", IN_MEMORY, run)

    ids = np.random.default_rng(0).integers(0, rows, PLANNED_IDS)
    odd, half = ids | 1, int((ids & 1).sum())
    return [
        contender("no tier", plain, ids, len(ids)),
        contender("tier holds none", tiered, odd, len(odd)),
        contender("tier holds half", tiered, ids, half),
    ]


def permuted_store(path: Path) -> featstore.Store:
    """A table of small rows under a random permutation: planning does not depend on what is in the rows."""
    remove(path)
    rows = np.arange(SMALL_ROWS * SMALL_ROW_VALUES, dtype=np.float32).reshape(SMALL_ROWS, SMALL_ROW_VALUES)
    order = np.random.default_rng(0).permutation(SMALL_ROWS)
    return featstore.pack(path, rows, order="permutation", permutation=order, memory="1GiB")


@click.command()
@shared_options(size="2GiB", quick_size="256MiB", rounds=7)
def main(settings: Settings) -> None:
    """Rows from the static tier against torch.index_select, and the cost of planning."""
    tables = Tables.of_size(settings.workspace, settings.size_bytes)
    touch_memory(min(free_memory_bytes() // 2, 3 * settings.size_bytes))
    members = np.sort(np.random.default_rng(1).choice(tables.rows, tables.rows // 2, replace=False))
    report = Report("tier", "Static tier and planning", {
        "table_bytes": tables.rows * ROW_BYTES, "row_bytes": ROW_BYTES, "tier_rows": len(members),
        "rounds": settings.rounds, "planned_ids": PLANNED_IDS, "permuted_rows": SMALL_ROWS,
    }, settings.workspace)  # fmt: skip
    with (
        featstore.open(tables.store()) as store,
        permuted_store(settings.workspace / "permuted.store") as permuted,
    ):
        note("filling the tier")
        contenders = tier_contenders(tables, store, members)
        contenders += planning_contenders("as given", store) + planning_contenders("permuted", permuted)
        series = measure_rounds(contenders, settings.rounds)
    report.series = list(series.values())
    for count in REQUESTS:
        ratio = paired_ratio(
            series[f"static tier, {count:,} ids"], series[f"torch.index_select, {count:,} ids"]
        )
        report.claims.append(Claim(f"static tier over torch.index_select, {count:,} ids", ratio, 1.0))
    for name, one in series.items():
        if name.startswith("plan, "):
            nanoseconds = median(s.seconds / s.amount for s in one.samples) * 1e9
            bar = 60.0 if "half" not in name else None
            report.claims.append(Claim(f"{name}, {PLANNED_IDS:,} ids", nanoseconds, bar, "<=", "ns an id"))
    import torch

    report.notes = [
        f"The tier holds a random half of the table ({len(members):,} rows). torch uses "
        f"{torch.get_num_threads()} threads and is given positions, featstore node ids. Both matrices "
        "are NumPy's memory, which asks for huge pages.",
    ]
    report.save(settings.out, settings.quick)


if __name__ == "__main__":
    main()
