"""One cache for all processes: epochs read by a torch DataLoader through a shared buffer, with no workers and
with two, and what memory that takes in all processes together.

    python benchmarks/online_workers.py --dir /a/directory/on/the/ssd

Memory is the kernel's own account (``/proc/PID/smaps_rollup`` and ``smaps``). *Pss* is a process's share: a
page that several processes have mapped counts once, divided among them; so what exists twice counts twice in
the sum over all processes, and what is shared, once.
"""

from __future__ import annotations

from typing import Any

import click
from harness import HERE, Claim, Contender, Report, Sample, Settings, measure_rounds, shared_options
from system import ALLOCATOR, free_memory_bytes, run_child, touch_memory
from tables import ROW_BYTES, Tables

from featstore.units import format_bytes

WORKERS = (0, 2)
CACHE_SHARE, BAR = 0.5, 1.05
BATCH_ROWS = 4096


def pss(memory: list[dict[str, int]], *kinds: str) -> int:
    """Bytes of some kinds in all processes together."""
    return sum(one[kind] for one in memory for kind in kinds)


def run(tables: Tables, workers: int, number: int) -> Sample:
    """Rows of the second epoch, by a fresh process and its workers."""
    found = run_child(HERE / "child_workers.py", {
        "path": str(tables.store()), "rows": tables.rows, "batch_rows": BATCH_ROWS, "workers": workers,
        "seed": number, "memory_bytes": int(tables.rows * ROW_BYTES * CACHE_SHARE),
    }, environment=ALLOCATOR)  # fmt: skip
    shared = found["shared"]
    return Sample(shared["rows"], shared["seconds"], None, found)


def excess_bytes(found: dict[str, Any]) -> int:
    """What all processes have beyond bare ones, but for files (whose share depends on who else runs)."""
    return sum(
        sign * pss(found[which]["memory"], "Pss_Anon", "Pss_Shmem")
        for which, sign in (("shared", 1), ("bare", -1))
    )


def claims(workers: int, found: dict[str, Any], budget_bytes: int) -> list[Claim]:
    cache_bytes = found["shared"]["cache_bytes"]
    return [
        Claim(f"{workers} workers: Pss of the cache's rows in all processes over the cache",
              pss(found["shared"]["memory"], "rows") / cache_bytes, BAR, "<="),
        Claim(f"{workers} workers: Pss of all processes beyond bare ones, over the buffer's budget",
              excess_bytes(found) / budget_bytes),
    ]  # fmt: skip


def cells(workers: int, found: dict[str, Any]) -> list[list[Any]]:
    """A row for each process, and for all together."""
    shared, bare = found["shared"]["memory"], found["bare"]["memory"]
    rows = []
    names = ["owner, reads itself" if not workers else "owner", *(f"worker {k + 1}" for k in range(workers))]
    for name, one, without in zip(names, shared, bare, strict=True):
        rows.append([
            f"{workers} workers: {name}", *(format_bytes(size) for size in (
                without["Rss"], without["Pss"], one["Rss"], one["Pss"],
                one["Shared_Clean"] + one["Shared_Dirty"], one["Pss_Shmem"], one["rows"])),
        ])  # fmt: skip
    rows.append([
        f"{workers} workers: all", "", format_bytes(pss(bare, "Pss")), "", format_bytes(pss(shared, "Pss")),
        "", format_bytes(pss(shared, "Pss_Shmem")), format_bytes(pss(shared, "rows")),
    ])  # fmt: skip
    return rows


@click.command()
@shared_options(size="512MiB", quick_size="64MiB", rounds=3)
def main(settings: Settings) -> None:
    """No second copy of the cache: a shared buffer read by a DataLoader without and with workers."""
    tables = Tables.of_size(settings.workspace, settings.size_bytes)
    tables.store()
    touch_memory(min(free_memory_bytes() // 2, 4 * settings.size_bytes))
    budget_bytes = int(tables.rows * ROW_BYTES * CACHE_SHARE)
    report = Report("online_workers", "One cache for all processes", {
        "table_bytes": tables.rows * ROW_BYTES, "row_bytes": ROW_BYTES, "batch_rows": BATCH_ROWS,
        "budget_bytes": budget_bytes, "rounds": settings.rounds, "workers": list(WORKERS),
    }, settings.workspace)  # fmt: skip
    series = measure_rounds(
        [
            Contender(
                f"{workers} workers",
                "rows/s",
                "cold (direct I/O)",
                lambda number, workers=workers: run(tables, workers, number),
            )
            for workers in WORKERS
        ],
        settings.rounds,
    )
    report.series = list(series.values())
    table: list[list[Any]] = []
    for workers, one in zip(WORKERS, report.series, strict=True):
        worst = max(
            (s.extra for s in one.samples),
            key=lambda e: pss(e["shared"]["memory"], "rows") / e["shared"]["cache_bytes"],
        )
        report.claims += claims(workers, worst, budget_bytes)
        table += cells(workers, worst)
    columns = [
        "",
        "bare: RSS",
        "bare: Pss",
        "RSS",
        "Pss",
        "of RSS shared",
        "Pss, shared memory",
        "of it the cache's rows",
    ]
    report.table("Memory after an epoch", columns, table)
    cache_bytes = report.series[0].samples[0].extra["shared"]["cache_bytes"]
    report.notes = [
        f"A table of {format_bytes(tables.rows * ROW_BYTES)}, read once an epoch in random order; a "
        f"budget of {format_bytes(budget_bytes)}, of which {format_bytes(cache_bytes)} are rows. "
        "Rows/s are those of the second epoch.",
        "Bare: the same processes and loader, whose rows are zeros. Where the owner reads itself, it "
        "has the rows mapped twice, as owner and as client, so they count twice in its RSS.",
        "Pss of files depends on which other programs have torch loaded, so what is beyond bare "
        "processes is Pss of anonymous and shared memory. Of the rounds the one with the largest share "
        "of the cache is shown.",
    ]
    report.save(settings.out, settings.quick)


if __name__ == "__main__":
    main()
