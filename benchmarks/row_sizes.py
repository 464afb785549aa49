"""Rows from 8 bytes to 40 kB: what a random row costs where it is smaller than a sector, and where it is
larger than a page.

    python benchmarks/row_sizes.py --dir /a/directory/on/the/ssd

For each size a table of the same number of bytes is read (a) by a reader, cold, in mini-batches that are
sparse in the table, once with the planner's choice of gaps and once without reading through any; and (b) by
an online loader in a tenth of the table's size. What was read is held against what cannot be avoided, the
distinct pages of 4 KiB (and, for comparison, sectors of 512 bytes) on which the wanted rows lie, and against
the planner's rule, both computed here by plain Python from the ids alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import click
import msgspec
import numpy as np
from harness import (
    HERE,
    Claim,
    Contender,
    Report,
    Sample,
    Series,
    Settings,
    measure_rounds,
    note,
    shared_options,
)
from harness import paired_ratio as ratio
from numpy.typing import NDArray
from peers import fio
from system import ALLOCATOR, cpu_seconds, free_memory_bytes, run_child, touch_memory
from tables import PAGE_BYTES, check_rows, remove, true_rows

import featstore
from featstore.layout import TableLayout
from featstore.measure.calibrate import measure
from featstore.plan.cost import DeviceModel
from featstore.units import format_bytes

ROW_BYTES = (8, 100, 512, 4096, 40_000)
SECTOR_BYTES = 512
DENSITY = 16  # pages of the table for each page that a mini-batch wants
FIO_SECONDS, GATHER_SECONDS = 2.0, 0.7  # of a sample, at least
DEPTH = 128
MEMORY_SHARE = 0.1
# the loader's mini-batches: of the table, at most, and how many
BATCH_SHARE, BATCH_ROWS, BATCHES = 1 / 128, 4096, 128
NO_CACHE = "cold (direct I/O)"
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class Twin:
    """What ids want and what the planner's rule reads for them, in bytes."""

    sector_bytes: int
    page_bytes: int
    read_bytes: int


def touched(rows: NDArray[np.int64], row_bytes: int, unit_bytes: int) -> int:
    """Bytes of the distinct units of so many bytes on which rows (ascending, distinct) lie."""
    first, last = rows * row_bytes // unit_bytes, ((rows + 1) * row_bytes - 1) // unit_bytes
    seen = np.concatenate([[-1], last[:-1]])  # a unit may have been counted with the row before
    return int((last - np.maximum(first, seen + 1) + 1).sum()) * unit_bytes


def twin_of(ids: NDArray[np.int64], layout: TableLayout, gap_pages: int, extent_bytes_max: int) -> Twin:
    """Pages apart by at most so many others are read as one, unless the read would be too long or leave its
    file."""
    rows = np.unique(ids)
    begin = rows * layout.row_bytes // PAGE_BYTES
    end = ((rows + 1) * layout.row_bytes - 1) // PAGE_BYTES + 1
    read, low, high, file = 0, 0, 0, -1  # pages of the reads before, the present read, its file
    for first, last in zip(begin.tolist(), end.tolist(), strict=True):
        its_file = first // layout.pages_per_chunk
        if its_file != file or first > high + gap_pages or last - low > extent_bytes_max // PAGE_BYTES:
            read, low, file = read + high - low, first, its_file
        high = last
    pages = touched(rows, layout.row_bytes, PAGE_BYTES)
    return Twin(touched(rows, layout.row_bytes, SECTOR_BYTES), pages, (read + high - low) * PAGE_BYTES)


class Size:
    """The table of one size of rows, and what is measured on it."""

    def __init__(self, row_bytes: int, settings: Settings) -> None:
        self.row_bytes, self.settings, self.columns = row_bytes, settings, row_bytes // 4
        self.rows = settings.size_bytes // row_bytes
        self.path = settings.workspace / f"rows_{row_bytes}.store"
        self.name = f"{row_bytes:,} B"
        step = max(1, _BLOCK_BYTES // row_bytes)
        note(f"writing {self.rows:,} rows of {self.name}")
        remove(self.path)
        blocks = (
            true_rows(np.arange(k, min(k + step, self.rows)), self.columns) for k in range(0, self.rows, step)
        )
        featstore.pack(self.path, blocks, memory="256MiB").close()
        self.store = featstore.open(self.path)
        self.table = self.store.tables["features"]
        self.count = max(1, int(self.table.layout.data_bytes / DENSITY / max(row_bytes, PAGE_BYTES)))
        self.out = np.zeros((self.count, self.columns), np.float32)
        self._readers: list[featstore.Reader] = []

    def gather(self, name: str, model: DeviceModel, seed: int) -> Contender:
        """Mini-batches one after the other, each of other rows."""
        reader = self.store.reader(memory="64MiB", static=None, engine="auto", queue_depth=DEPTH, model=model)
        self._readers.append(reader)
        rng = np.random.default_rng(seed)

        def run(_: int) -> Sample:
            amount, seconds, cpu, twins = 0, 0.0, 0.0, []
            before = reader.stats()
            while seconds < GATHER_SECONDS:
                ids = rng.integers(0, self.rows, self.count)
                cpu_begin, begin = cpu_seconds(), time.perf_counter()
                reader.read(ids, out=self.out)
                seconds += time.perf_counter() - begin
                cpu += cpu_seconds() - cpu_begin
                amount += self.count
                check_rows(ids, self.out, len(ids))
                twins.append(
                    twin_of(ids, self.table.layout, model.gap_pages_max, reader.budget.extent_bytes_max)
                )
            done = reader.stats().since(before)
            found = {
                name: sum(getattr(twin, name) for twin in twins)
                for name in ("sector_bytes", "page_bytes", "read_bytes")
            }
            return Sample(amount, seconds, cpu, found | {"reads": done.reads, "bytes_read": done.bytes_read})

        run(0)  # compiles; not counted
        return Contender(f"{self.name}: {name}", "rows/s", NO_CACHE, run)

    def fio(self, name: str, block_bytes: int) -> Contender:
        """Random reads of so many bytes each, and nothing else."""
        files = [self.path / self.table.entry.chunk_path(chunk) for chunk in range(self.table.layout.chunks)]

        def run(number: int) -> Sample:
            done = fio.random_read(files, FIO_SECONDS, block_bytes, depth=DEPTH, seed=number + 1)
            return Sample(done.operations, done.seconds, done.cpu_seconds, {"bytes_read": done.bytes})

        return Contender(f"{self.name}: {name}", "reads/s", NO_CACHE, run)

    @property
    def row_pages(self) -> int:
        """Pages that a row lies on, on average, rounded."""
        ids = np.arange(min(self.rows, PAGE_BYTES))
        spans = ((ids + 1) * self.row_bytes - 1) // PAGE_BYTES - ids * self.row_bytes // PAGE_BYTES + 1
        return max(1, round(float(spans.mean())))

    def online(self, model: DeviceModel) -> dict[str, Any]:
        """An epoch through a loader in a tenth of the table's size, by another process."""
        budget = int(MEMORY_SHARE * self.table.layout.data_bytes)
        return run_child(HERE / "child_row_sizes.py", {
            "path": str(self.path), "model": msgspec.structs.asdict(model), "memory_bytes": budget,
            "batches": BATCHES, "batch_rows": max(1, min(BATCH_ROWS, int(BATCH_SHARE * self.rows))),
        }, environment=ALLOCATOR) | {"budget_bytes": budget}  # fmt: skip

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        self.store.close()
        remove(self.path)


@dataclass(frozen=True)
class Found:
    """All that was measured of one size."""

    size: Size
    planned: Series
    single: Series
    limit: Series
    sectors: Series
    online: dict[str, Any]


def total(series: Series, key: str) -> float:
    return float(sum(sample.extra[key] for sample in series.samples))


def worst(claim: str, values: dict[str, float], bar: float | None, direction: Any = "<=") -> Claim:
    """A claim of all sizes by the one that is furthest from it."""
    name = (max if direction == "<=" else min)(values, key=lambda name: values[name])
    return Claim(f"{claim} (the worst: {name})", values[name], bar, direction)


def claims(found: list[Found]) -> list[Claim]:
    def each(value: Any) -> dict[str, float]:
        return {one.size.name: value(one) for one in found}

    smallest = found[0]
    return [
        worst(
            "cold, no gaps: bytes read over the distinct pages wanted",
            each(lambda one: total(one.single, "bytes_read") / total(one.single, "page_bytes")),
            1.0,
        ),
        worst(
            "cold, as planned: bytes read over those of the planner's rule",
            each(lambda one: total(one.planned, "bytes_read") / total(one.planned, "read_bytes")),
            1.0,
        ),
        worst(
            "online: bytes read over those of the planner's rule for what was missed",
            each(lambda one: one.online["bytes_read"] / one.online["twin_bytes"]),
            1.0,
        ),
        worst(
            "online: peak memory over the budget",
            each(lambda one: one.online["peak_bytes"] / one.online["budget_bytes"]),
            1.0,
        ),
        worst(
            "cold, as planned: rows/s over fio's reads/s of a row's pages",
            each(lambda one: ratio(one.planned, one.limit)),
            0.9,
            ">=",
        ),
        worst(
            "cold: rows/s as planned over no gaps",
            each(lambda one: ratio(one.planned, one.single)),
            None,
            ">=",
        ),
        Claim("fio's reads/s of a page over those of a sector", ratio(smallest.limit, smallest.sectors)),
    ]


def tables(report: Report, found: list[Found]) -> None:
    rows = []
    for one in found:
        count = sum(sample.amount for sample in one.single.samples)
        wanted = [total(one.single, key) / count for key in ("sector_bytes", "page_bytes", "bytes_read")]
        planned = total(one.planned, "bytes_read") / count
        rows.append([
            one.size.name, *wanted, planned, planned / one.size.row_bytes, one.single.rate, one.planned.rate,
            ratio(one.single, one.limit), ratio(one.planned, one.limit),
        ])  # fmt: skip
    report.table("A random row, cold: bytes and speed", [
        "row", "its sectors, B a row", "its pages, B a row", "read, no gaps, B a row",
        "read, planned, B a row", "planned, of the row", "rows/s, no gaps", "rows/s, planned",
        "rows/s of fio's reads/s, no gaps", "planned",
    ], rows)  # fmt: skip
    rows = []
    for one in found:
        o, row_bytes = one.online, one.size.row_bytes
        rows.append([
            one.size.name, o["rows"] / o["seconds"], o["hits"] / (o["hits"] + o["misses"]),
            o["slots"] / one.size.rows, o["slots"] * row_bytes / o["budget_bytes"],
            o["bytes_read"] / (o["rows"] * row_bytes), o["bytes_read"] / o["page_bytes"],
            o["peak_bytes"] / o["budget_bytes"],
        ])  # fmt: skip
    report.table("Online, in a tenth of the table", [
        "row", "rows/s", "found in the buffer", "slots, of the table's rows", "rows, of the budget",
        "bytes read, of those asked", "bytes read, of the missed rows' pages", "peak memory, of the budget",
    ], rows)  # fmt: skip


def measured(size: Size, model: DeviceModel, settings: Settings) -> Found:
    single = msgspec.structs.replace(model, gap_pages=0)
    contenders = [
        size.fio("fio", size.row_pages * PAGE_BYTES),
        size.gather("featstore, no gaps", single, 1),
        size.gather("featstore", model, 2),
    ]
    if size.row_bytes == ROW_BYTES[0]:
        contenders.append(size.fio("fio, sectors", SECTOR_BYTES))
    series = list(measure_rounds(contenders, settings.rounds).values())
    return Found(
        size, series[2], series[1], series[0], series[3] if len(series) > 3 else series[0], size.online(model)
    )


@click.command()
@shared_options(size="256MiB", quick_size="128MiB", rounds=3)
def main(settings: Settings) -> None:
    """Rows smaller than a sector and larger than a page, cold and through an online loader."""
    touch_memory(min(free_memory_bytes() // 2, 4 * settings.size_bytes))
    report = Report("row_sizes", "Rows of any size", {
        "table_bytes": settings.size_bytes, "row_bytes": list(ROW_BYTES), "pages_per_wanted_page": DENSITY,
        "queue_depth": DEPTH, "memory_share": MEMORY_SHARE, "batches": BATCHES, "rounds": settings.rounds,
    }, settings.workspace)  # fmt: skip
    model = measure(settings.workspace, "uring", seconds=2 * settings.seconds).model
    found = []
    for row_bytes in ROW_BYTES:
        size = Size(row_bytes, settings)
        try:
            found.append(measured(size, model, settings))
        finally:
            size.close()
        note(f"{size.name}: {found[-1].online}")
        report.series += [found[-1].limit, found[-1].single, found[-1].planned]
    report.series.insert(1, found[0].sectors)
    report.claims = claims(found)
    tables(report, found)
    report.notes = [
        f"Tables of {format_bytes(settings.size_bytes)}; a mini-batch wants one page in {DENSITY}. "
        "Every value that came back was checked. The planner reads through gaps of up to "
        f"{model.gap_pages_max} pages here, which costs bytes and saves reads.",
        "fio reads in any order, featstore in ascending order, which helps where reads are longer than "
        "a page; tables of this size may come from a cache below the machine, for both of them.",
        "A page of 4 KiB is the least that is read, because it is what a checksum covers: up to eight "
        "sectors for one. fio's reads of a sector and of a page tell what that costs.",
        f"Online: mini-batches of {format_bytes(int(BATCH_SHARE * settings.size_bytes))} or "
        f"{BATCH_ROWS:,} rows, skewed: a tenth of the rows is asked for 46 % of the times. A slot "
        "takes 48 to 72 bytes beside its row, so a buffer holds few rows of 8 bytes.",
    ]
    report.save(settings.out, settings.quick)


if __name__ == "__main__":
    main()
