"""``compiled.py``, the parts that are about bytes: what an epoch reads, where rows are put under a disk
limit, and packing."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import yardsticks
from compiled_data import (
    FANOUTS,
    TABLE,
    TRAIN_MEMORY,
    WIDE,
    Built,
    Data,
    PaperPolicy,
    Timed,
    check_epoch,
    files_of,
    fio_read,
    load_epoch,
    missed_by_min,
)
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
    paired_ratio,
)
from numpy.typing import NDArray
from peers import fio
from system import drop_caches, run_child
from tables import remove

import featstore
from featstore.base.buffers import aligned_buffer
from featstore.compile.build import packs_directory
from featstore.compile.choose import choose_placement
from featstore.compile.row_lists import RowListsWriter
from featstore.layout import TableLayout
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.measure.calibrate import measure
from featstore.plan.cost import DeviceModel, device_key, save_model
from featstore.storage.disk import Disk
from featstore.units import EXTENT_BYTES_MAX, PAGE_BYTES, format_bytes

CACHE_SHARE = 0.1
BOUND_BAR, DESIGN_BAR, SPEED_BAR = 1.05, 0.85, 0.85
LIMITS, QUICK_LIMITS = (2, 3, 5), (0.3, 0.5, 0.8)
MEASURED_SHARE = 4  # under limits, of the mini-batches one in so many is measured
BEST_BAR, SEARCH_BAR = 1.1, 0.02
PACK_SPEED_BAR, PACK_FIO_BAR, RSS_SLACK_BYTES = 5.0, 0.5, 150 * 2**20
BUDGETS = (0.05, 0.1, 0.25)
ALONE_SHARE = 8  # of the mini-batches one in so many is packed on its own
OURS, PAPER, MIXED = "ours", "the paper's design", "the paper's placement, our residency"
DIRECT = "direct I/O, page cache dropped"


def beside_other(data: Data, contenders: list[Contender]) -> list[Contender]:
    """The contenders, with a pass over another file after each."""
    turns = [
        (c, Contender(f"fio, sequential, another file, {k}", "MB/s", DIRECT, lambda _: data.other()))
        for k, c in enumerate(contenders)
    ]
    return [one for turn in turns for one in turn]


def loading(name: str, loader: Any, cold: list[Path], batches: int | None = None) -> Contender:
    return Contender(name, "MB/s", DIRECT, lambda _: load_epoch(loader, cold, batches))


# Bytes.


def measure_bytes(report: Report, data: Data, settings: Settings, folder: Path | None) -> None:
    """Bytes an epoch reads, against MIN and the paper's design; and how fast."""
    trace, cache = data.trace(WIDE), int(CACHE_SHARE * data.table_bytes)
    options = {"train_memory": TRAIN_MEMORY, "cache": cache}
    ours = data.compile(trace, "ours", **options)
    paper = data.compile(trace, "paper", residency="fixed", **options)
    try:
        bound = ours.forecast["missed_rows"] * data.row_bytes
        rows = [next(iter(trace.ids(i).values())).astype(np.int64) for i in range(len(trace))]
        checked = sum(len(m) for m in missed_by_min(rows, data.nodes, cache // data.row_bytes))
        note(f"rows missed under MIN: {ours.forecast['missed_rows']:,}; by plain NumPy {checked:,}")
        with (
            CompiledLoader(ours.compiled, memory=TRAIN_MEMORY, tensors=False) as loader,
            CompiledLoader(paper.compiled, memory=TRAIN_MEMORY, tensors=False) as other,
        ):
            check_epoch(loader, trace, data.files)
            check_epoch(other, trace, data.files)
            files = ours.files()
            contenders = [
                loading(f"an epoch, {OURS}", loader, files),
                loading(f"an epoch, {PAPER}", other, paper.files()),
                Contender(
                    "fio, sequential, 512 KiB, the same files", "MB/s", DIRECT, lambda _: fio_read(files)
                ),
            ]
            series = measure_rounds(beside_other(data, contenders), settings.rounds)
        tell_bytes(report, data, ours, paper, [series[c.name] for c in contenders], bound, checked)
        report.series = list(series.values())
    finally:
        ours.remove()
        paper.remove()
    if folder is not None:
        small_graph(report, folder, settings.workspace)


def tell_bytes(
    report: Report, data: Data, ours: Built, paper: Built, series: list[Series], bound: int, checked_rows: int
) -> None:
    """The claims of bytes and speed. Bytes are the kernel's count for the process; what of them are records
    is known to the page."""
    read = [int(median(s.extra["read_bytes"] for s in one.samples)) for one in series[:2]]
    records = [built.record_pages_bytes() for built in (ours, paper)]
    of_rows = [a - b for a, b in zip(read, records, strict=True)]
    report.claims += [
        Claim(
            "bytes of rows read in an epoch over the lower bound (MIN)", of_rows[0] / bound, BOUND_BAR, "<="
        ),
        Claim(
            "the same over the paper's design (fixed set, all packed)",
            of_rows[0] / of_rows[1],
            DESIGN_BAR,
            "<=",
        ),
        Claim(
            "rows missed, by a plain NumPy MIN over the compiler's",
            checked_rows / ours.forecast["missed_rows"],
            1.0,
            "<=",
        ),
        Claim("all bytes (records too) over the lower bound", read[0] / bound),
        Claim("all bytes over the paper's design", read[0] / read[1]),
        Claim(
            "speed of an epoch that nobody trains on over fio's",
            paired_ratio(series[0], series[2]),
            SPEED_BAR,
        ),
        Claim(
            "time of such an epoch over the paper's design",
            median(a.seconds / b.seconds for a, b in zip(series[0].samples, series[1].samples, strict=True)),
        ),
    ]
    report.table(
        f"An epoch, with {CACHE_SHARE:.0%} of the table in memory",
        ["", OURS, PAPER],
        [
            ["mini-batches", len(ours.compiled), len(paper.compiled)],
            [
                "rows a mini-batch, of the table",
                *[b.forecast["asked_rows"] / len(b.compiled) / data.nodes for b in (ours, paper)],
            ],
            [
                "rows missed, of those asked",
                *[b.forecast["missed_rows"] / b.forecast["asked_rows"] for b in (ours, paper)],
            ],
            [
                "rows on disk, of the table",
                *[b.forecast["disk_bytes"] / data.table_bytes for b in (ours, paper)],
            ],
            ["bytes of rows read", *map(format_bytes, of_rows)],
            ["bytes of records read", *map(format_bytes, records)],
            ["seconds", *[median(s.seconds for s in one.samples) for one in series[:2]]],
            ["seconds, forecast (rows alone)", ours.forecast_seconds, paper.forecast_seconds],
        ],
    )


def small_graph(report: Report, folder: Path, workspace: Path) -> None:
    """The same counts on a graph of which a mini-batch touches most."""
    from featstore.sampling.batches import SampledBatches
    from featstore.sampling.neighbors import NeighborSampler

    file = np.load(folder / "ogbn_arxiv_tape40.npz")
    path = workspace / "arxiv"
    remove(path)
    path.mkdir()
    x = file["features"].astype(np.float32)
    sampler = NeighborSampler(file["indptr"], file["indices"], FANOUTS, 0)
    batches = SampledBatches(sampler, file["train_idx"].astype(np.int64), 1024)
    nodes = [(batches[i].node, {}) for i in range(len(batches))]
    with (
        featstore.pack(path / "store", x, memory="256MiB") as store,
        featstore.Trace.record(nodes, path / "trace") as trace,
    ):
        cache = int(CACHE_SHARE * x.nbytes)
        found = {
            residency: featstore.compile_trace(
                store, trace, cache=cache, residency=residency, dry_run=True
            ).tables[TABLE]
            for residency in ("min", "fixed")
        }
    remove(path)
    bound = found["min"]["missed_rows"] * x.nbytes // len(x)
    report.table(
        "ogbn_arxiv_tape40, whose mini-batches touch much of it, forecast",
        ["", OURS, PAPER],
        [
            [
                "rows a mini-batch, of the table",
                *[f["asked_rows"] / len(batches) / len(x) for f in found.values()],
            ],
            ["rows missed, of those asked", *[f["missed_rows"] / f["asked_rows"] for f in found.values()]],
            ["bytes read over the lower bound", *[f["bytes_read"] / bound for f in found.values()]],
            ["rows on disk, of the table", *[f["disk_bytes"] / x.nbytes for f in found.values()]],
        ],
    )


# Disk.


class UnderLimits:
    """Placement under disk limits: forecast and measurement against the paper's. ``points``: what was found,
    by limit; those that are there are kept."""

    def __init__(
        self, data: Data, settings: Settings, points: dict[str, Any], save: Callable[[], None]
    ) -> None:
        self.data, self.settings, self.points, self._save = data, settings, points, save

    @property
    def limits(self) -> tuple[float, ...]:
        """In tables."""
        return QUICK_LIMITS if self.settings.quick else LIMITS

    def measure(self, report: Report) -> None:
        """Measure what is missing, and tell it all."""
        if any(f"{times}x" not in self.points for times in self.limits):  # the search's kernels load
            limit = int(self.limits[0] * self.data.table_bytes)
            self.data.compile(self.data.trace(WIDE), "warm", train_memory=TRAIN_MEMORY, disk=limit).remove()
        with calibrated(
            self.data.store.path, 2.0 if self.settings.quick else 8.0, self.points.get("model")
        ) as model:
            self.points["model"] = msgspec.to_builtins(model)
            for times in self.limits:
                key = f"{times}x"
                if key not in self.points:
                    self.points[key] = under_limit(self.data, times, self.settings.rounds)
                    self._save()
            if "small" not in self.points:
                self.points["small"] = small_case(model)
                self._save()
        self._tell(report)

    def _tell(self, report: Report) -> None:
        rows, ratios, shares = [], [], []
        for times in self.limits:
            found = self.points[f"{times}x"]
            for name, f in found.items():
                f["measured_seconds"] = median(f["seconds"])
                rows.append(
                    [
                        f"{times}x",
                        name,
                        f["forecast_seconds"],
                        f["measured_seconds"],
                        f["disk_bytes"] / self.data.table_bytes,
                        f["placement"]["group_size"],
                        f["packed_rows"] / self.data.nodes,
                        f["shared_rows"] / self.data.nodes,
                        f["base_rows"] / max(1, f["missed_rows"]),
                        f["search_seconds"],
                        f["compile_seconds"],
                    ]
                )
            ours = found[OURS]
            shares.append(ours["search_seconds"] / ours["compile_seconds"])
            for name in (PAPER, MIXED):
                measured = median(a / b for a, b in zip(ours["seconds"], found[name]["seconds"], strict=True))
                ratios.append(
                    [f"{times}x", name, ours["forecast_seconds"] / found[name]["forecast_seconds"], measured]
                )
        for name in (PAPER, MIXED):
            report.claims += [
                Claim(
                    f"{what} time over {name}, worst of the limits",
                    max(r[k] for r in ratios if r[1] == name),
                    1.0,
                    "<=",
                )
                for k, what in ((2, "modelled"), (3, "measured"))
            ]
        small = self.points["small"]
        report.claims += [
            Claim(
                "modelled time over brute force on a small case, worst limit",
                max(r[2] for r in small["rows"]),
                BEST_BAR,
                "<=",
            ),
            Claim("search, of the time of compiling, worst limit", max(shares), SEARCH_BAR, "<="),
        ]
        report.table(
            "Under a limit on disk",
            [
                "limit",
                "design",
                "s, forecast",
                "s, measured",
                "tables on disk",
                "group",
                "tables packed",
                "tables shared",
                "read from the base, of misses",
                "s, search",
                "s, compiling",
            ],
            rows,
        )
        report.table("Time over that of others", ["limit", "ours over", "modelled", "measured"], ratios)
        report.table(small["title"], small["columns"], small["rows"])
        model = self.points["model"]
        report.notes.append(
            f"The device model was calibrated at the start: {model['read_seconds'] * 1e6:.1f} µs a "
            f"read, {1e-9 / model['byte_seconds']:.2f} GB/s, gaps of up to {model['gap_pages']} pages "
            "are read through. Times are of all mini-batches, measured on the first "
            f"1/{MEASURED_SHARE} of them, direct I/O, page cache dropped, in turns."
        )


@contextmanager
def calibrated(path: Path, seconds: float, known: Any) -> Iterator[DeviceModel]:
    """The device model of this device, measured now unless it is known, for as long as this lasts."""
    if known is None:
        note("calibrating")
        model = measure(path, "uring", seconds=seconds).model
    else:
        model = msgspec.convert(known, DeviceModel)
    before, folder = os.environ.get("FEATSTORE_CACHE"), path.parent / "compiled-models"
    os.environ["FEATSTORE_CACHE"] = str(folder)
    try:
        save_model(device_key(path, "uring", "direct"), model)
        yield model
    finally:
        remove(folder)
        if before is None:
            del os.environ["FEATSTORE_CACHE"]
        else:
            os.environ["FEATSTORE_CACHE"] = before


def under_limit(data: Data, times: float, rounds: int) -> dict[str, Any]:
    """Compile for all designs within a limit and measure their epochs in turns; what was found, by design."""
    trace = data.trace(WIDE)
    options = {
        "train_memory": TRAIN_MEMORY,
        "cache": int(CACHE_SHARE * data.table_bytes),
        "disk": int(times * data.table_bytes),
    }
    designs = (
        (OURS, Timed(), "min"), (PAPER, Timed(PaperPolicy().policy), "fixed"),
        (MIXED, Timed(PaperPolicy().policy), "min"),
    )  # fmt: skip
    built: dict[str, Built] = {}
    found: dict[str, Any] = {}
    for name, policy, residency in designs:
        built[name] = data.compile(
            trace, f"limit-{len(built)}", residency=residency, policy=policy.policy, **options
        )
        found[name] = built[name].forecast | {
            "placement": built[name].compiled.entry.tables[TABLE].placement, "search_seconds": policy.seconds,
            "compile_seconds": built[name].seconds, "forecast_seconds": built[name].forecast_seconds,
        }  # fmt: skip
    loaders = {
        name: CompiledLoader(one.compiled, memory=TRAIN_MEMORY, tensors=False) for name, one in built.items()
    }
    count = len(trace) // MEASURED_SHARE
    try:
        for loader in loaders.values():
            check_epoch(loader, trace, data.files, 5)
        contenders = [
            loading(name, loader, built[name].files() + data.base_files(), count)
            for name, loader in loaders.items()
        ]
        series = measure_rounds(beside_other(data, contenders), rounds)
        for name in found:
            found[name]["seconds"] = [s.seconds * len(trace) / count for s in series[name].samples]
            found[name]["megabytes"] = [s.amount * len(trace) / count for s in series[name].samples]
        return found
    finally:
        for loader in loaders.values():
            loader.close()
        for one in built.values():
            one.remove()


def small_case(model: DeviceModel) -> dict[str, Any]:
    """Forecasts against the best of all placements that can be tried, where they are few: a table of them."""
    table_rows, batches, row_bytes = 2000, 24, 512
    rng, rows = np.random.default_rng(0), []
    weights = rng.permutation(np.arange(1, table_rows + 1) ** -0.8)
    weights /= weights.sum()
    with tempfile.TemporaryDirectory() as folder:
        writer = RowListsWriter(Disk(), Path(folder) / "misses", np.int64)
        for _ in range(batches):
            writer.append(np.sort(rng.choice(table_rows, 120, replace=False, p=weights)))
        misses = writer.finish()
        layout = TableLayout.choose(table_rows, row_bytes)
        force = yardsticks.BruteForce(
            misses,
            table_rows,
            layout,
            model,
            extent_bytes_max=EXTENT_BYTES_MAX,
            group_sizes=range(1, batches + 1),
        )
        for share in (0.2, 0.4, 0.6, 0.8):
            limit = int(share * misses.total * row_bytes)
            best = force.best(limit)[1].seconds
            ours = choose_placement(
                misses,
                table_rows,
                row_bytes,
                layout,
                model,
                limit,
                extent_bytes_max=EXTENT_BYTES_MAX,
                memory_bytes=2**28,
            )[1].seconds
            paper = yardsticks.paper_forecast(
                yardsticks.paper_choice(misses, table_rows, row_bytes, limit), misses, table_rows, layout,
                model, extent_bytes_max=EXTENT_BYTES_MAX,
            ).seconds  # fmt: skip
            rows.append([share, best * 1e3, ours / best, paper / best])
        misses.close()
    return {
        "title": f"A small case ({table_rows:,} rows, {batches} mini-batches), modelled",
        "columns": ["limit, of all rows packed", "best of all, ms", "ours over it", "the paper's over it"],
        "rows": rows,
    }  # fmt: skip


# Packing.


def measure_packing(report: Report, data: Data, settings: Settings) -> None:
    """Batched packing against packing each mini-batch on its own, against fio, and its memory."""
    trace, cache = data.trace(WIDE), int(CACHE_SHARE * data.table_bytes)
    ids = [next(iter(trace.ids(i).values())).astype(np.int64) for i in range(len(trace))]
    missed = missed_by_min(ids, data.nodes, cache // data.row_bytes)
    del ids
    total = sum(len(m) for m in missed)
    chosen = missed[:: 1 if settings.quick else ALONE_SHARE]
    del missed
    given = {
        "workspace": str(settings.workspace), "columns": data.files.columns, "mode": "pack",
        "store": str(data.store.path), "trace": str(trace.path), "name": "packing",
    }  # fmt: skip

    def batched(share: float) -> Sample:
        drop_caches(data.base_files())
        remove(packs_directory(data.store) / "packing")
        budget = int(share * data.table_bytes)
        if settings.quick:
            budget = max(budget, 64 << 20)
        options = {"memory": budget, "train_memory": TRAIN_MEMORY, "cache": cache}
        result = run_child(HERE / "child_compiled.py", given | {"options": options}) | {
            "budget_bytes": budget
        }
        if "needed_bytes" in result:
            note(f"{share:.0%}: {result['failed']}")
            result |= run_child(
                HERE / "child_compiled.py", given | {"options": options | {"memory": result["needed_bytes"]}}
            )
        return Sample(
            total * data.row_bytes / 1e6, result["seconds"], result["cpu_seconds"], result | {"share": share}
        )

    contenders = [
        Contender(
            "batched packing (all of compiling)",
            "MB/s of rows",
            "page cache dropped",
            lambda _: batched(BUDGETS[-1]),
        ),
        Contender(
            "each mini-batch on its own",
            "MB/s of rows",
            DIRECT,
            lambda _: pack_alone(data, chosen, total, int(BUDGETS[-1] * data.table_bytes)),
        ),
        Contender(
            "fio, reads the table, writes the rows", "MB/s of rows", DIRECT, lambda _: fio_pack(data, total)
        ),
    ]
    batched(BUDGETS[-1])  # compiles kernels
    series = measure_rounds(contenders, settings.rounds)
    ours, alone, limit = (series[c.name] for c in contenders)
    others = [batched(share) for share in BUDGETS[:-1]]
    remove(packs_directory(data.store) / "packing")
    report.series = list(series.values())
    report.claims += [
        Claim(
            "batched packing (with deciding) over packing each mini-batch on its own",
            paired_ratio(ours, alone),
            PACK_SPEED_BAR,
        ),
        Claim(
            "fio's time for the bytes needed over that of the pass over the base table",
            median(
                b.seconds / a.extra["pass_seconds"] for a, b in zip(ours.samples, limit.samples, strict=True)
            ),
            PACK_FIO_BAR,
        ),
        Claim("the same over that of all of compiling (deciding and records too)", paired_ratio(ours, limit)),
    ]
    tell_memory(report, data, [*others, ours.samples[-1]])
    report.notes.append(
        f"On its own: one mini-batch in {ALONE_SHARE} was packed, and the time of all follows from "
        "that. The next one's rows are asked for before one's are written; the reader has the same "
        "budget as batched packing."
    )


def tell_memory(report: Report, data: Data, samples: list[Sample]) -> None:
    rows = []
    for sample in samples:
        e = sample.extra
        given = e.get("needed_bytes", e["budget_bytes"])
        beyond = e["peak_bytes"] - e["base_bytes"] - given
        rows.append(
            [
                e["share"],
                format_bytes(e["budget_bytes"]),
                format_bytes(given),
                sample.seconds,
                e["pass_seconds"],
                e["read_bytes"] / data.table_bytes,
                e["write_bytes"] / data.table_bytes,
                format_bytes(e["base_bytes"]),
                format_bytes(e["peak_bytes"]),
                beyond / 2**20,
            ]
        )
        report.claims += [
            Claim(
                f"peak RSS beyond budget and bare process, budget of {e['share']:.0%}",
                beyond / 2**20,
                RSS_SLACK_BYTES / 2**20,
                "<=",
                "MiB",
            ),
            Claim(
                f"memory that was needed over that budget of {e['share']:.0%}",
                given / e["budget_bytes"],
                1.0,
                "<=",
            ),
        ]
    report.table(
        "Compiling within a budget",
        [
            "budget, of the table",
            "budget",
            "given",
            "s",
            "of which packing",
            "tables read",
            "tables written",
            "bare process",
            "peak RSS",
            "MiB beyond both",
        ],
        rows,
    )


def pack_alone(data: Data, chosen: list[NDArray[np.int64]], total_rows: int, memory_bytes: int) -> Sample:
    """Read each mini-batch's missed rows and append them to one file, the next ones being read meanwhile;
    extrapolated to all rows."""
    drop_caches(data.base_files())
    target = data.workspace / "alone.out"
    size = -(-max(len(m) for m in chosen) * data.row_bytes // PAGE_BYTES) * PAGE_BYTES
    buffers = [aligned_buffer(size) for _ in range(2)]
    with data.store.reader(memory=max(memory_bytes, 64 << 20), static=None, tables=[TABLE]) as reader:

        def ask(turn: int) -> tuple[Any, NDArray[np.uint8]]:
            buffer, ids = buffers[turn % 2], chosen[turn]
            out = buffer[: len(ids) * data.row_bytes].view(np.float32).reshape(len(ids), -1)
            return reader.submit(ids, out=out), buffer

        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        try:
            begin = time.perf_counter()
            ahead, at = ask(0), 0
            for turn, ids in enumerate(chosen):
                request, buffer = ahead
                request.result()
                if turn + 1 < len(chosen):
                    ahead = ask(turn + 1)
                end = -(-len(ids) * data.row_bytes // PAGE_BYTES) * PAGE_BYTES
                at += os.pwrite(descriptor, buffer[:end].data, at)
            os.fsync(descriptor)
            seconds = time.perf_counter() - begin
        finally:
            os.close(descriptor)
            remove(target)
    return Sample(total_rows * data.row_bytes / 1e6, seconds * total_rows / sum(map(len, chosen)))


def fio_pack(data: Data, total_rows: int) -> Sample:
    """fio reads the table, then writes so many rows."""
    target = data.workspace / "fio.out"
    drop_caches(data.base_files())
    read = fio.sequential_read(files_of(data.store, TABLE))
    write = fio.sequential_write(target, -(-total_rows * data.row_bytes // 2**20) * 2**20)
    remove(target)
    return Sample(total_rows * data.row_bytes / 1e6, read.seconds + write.seconds)
