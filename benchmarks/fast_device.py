"""A device that outruns a core: random, dense and sequential reads against fio's best over its number of
processes.

    python benchmarks/fast_device.py --zram                    # a block device of compressed RAM; takes root
    python benchmarks/fast_device.py --dir /a/directory/on/a/fast/disk

Rows of 512 B, each on a page of its own; the limit is fio, 4 KiB random direct reads from the very files of
the store, each process with the queue depth that our reader has altogether; and 512 KiB sequential ones.
Pinned to one core both have one process and one ring. The engine is the one that is picked by itself, not
calibrated for how many rings it may take: it goes by how busy its cores are. The longest gap to read through
is calibrated. Checksums are verified but where a line says otherwise.

fio runs as it does where nothing more is said. Beside it stands fio with registered buffers, as our rings
have them: without a bar, for what then arrives has been neither checked nor put where it is wanted.

Where the device's reads are themselves work of the cores, as on compressed RAM, fio's rate leaves none for
what fio does not do. Dense and sequential reads are measured without checksums, too, without a bar: what they
reach beyond those with checksums is the checksums' price. And fio leaves what it reads in its buffers, in the
caches, where our rows go to memory: what both together could reach is told from fio with registered buffers
and from a bare copy, by every core, from its cache to memory and past the caches.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median
from typing import Any

import click
import msgspec
import numpy as np
from harness import Claim, Contender, Report, Sample, Series, Settings, measure_rounds, note, shared_options
from peers import fio
from system import compressed_ram, cpu_seconds, free_memory_bytes, touch_memory
from tables import COLUMNS, ROW_BYTES, Tables, check_rows, isolated_ids, random_page_ids

import featstore
from featstore.base.compilation import njit
from featstore.base.native import STREAM_BYTES, address_of, fence
from featstore.base.rows import stream_row
from featstore.engine import uring
from featstore.measure.calibrate import measure
from featstore.reader.report import ReaderStats

DEPTH = 128
APART_PAGES = 3
CACHE = "cold (direct I/O)"
NO_CHECKS = ", checksums off"
EXTRAPOLATED_CORES, EXTRAPOLATED_DISKS = (1, 16, 64), (1e5, 1e6, 3e6)
LATENCY = 80e-6  # of a read of 4 KiB, as disks of a million reads a second have it
COPY = "copy from cache to memory"
COPIED_BYTES = 1 << 18  # at once: they stay in a core's second cache
ROOM = 2.4  # of the device, over the table's size: rows that are given one by one are written twice


def fio_name(what: str, processes: int, registered: bool = False) -> str:
    more = ", registered buffers" * registered
    return f"fio {what}, {processes} process{'es' * (processes > 1)}{more}"


@njit(nogil=True)
def copy_to_memory(source: int, target: int, copies: int) -> None:
    """Bytes that stay in the core's cache to ``copies`` places one after the other, past the caches."""
    for k in range(copies):
        stream_row(target + k * COPIED_BYTES, source, COPIED_BYTES)
    fence()


class Fast:
    """The contenders; ``close`` gives back what they hold."""

    def __init__(self, tables: Tables, settings: Settings) -> None:
        self.tables, self.settings = tables, settings
        self.count = tables.pages // (2 * APART_PAGES + 4)
        self.out = np.ones((tables.pages, COLUMNS), np.float32)
        self.whole = np.ones((tables.rows, COLUMNS), np.float32)  # its memory is there
        self.cores = sorted(os.sched_getaffinity(0))
        self.processes = [1 << k for k in range(len(self.cores).bit_length()) if 1 << k <= len(self.cores)]
        self.contenders: list[Contender] = []
        self._closing = ExitStack()
        self._readers: list[featstore.Reader] = []
        self._store = self._closing.enter_context(featstore.open(tables.store()))
        # of the table itself: there is no room beside it
        model = measure(tables.store(), "uring", seconds=settings.seconds, data_bytes_min=0).model
        self.model = msgspec.structs.replace(model, threads=None)

    def reader(self, **options: Any) -> featstore.Reader:
        reader = self._store.reader(
            memory="512MiB", static=None, queue_depth=DEPTH, model=self.model, **options
        )
        self._closing.callback(reader.close)
        self._readers.append(reader)
        for _ in range(3):  # compiles, wakes what there is, and lets the rings find their number
            reader.read(isolated_ids(self.tables, self.count, seed=1, apart_pages=APART_PAGES))
        return reader

    @property
    def rings_max(self) -> int:
        """That a reader has room for, however many cores there are."""
        budget = self._readers[0].budget
        return uring.rings_max(DEPTH, budget.staging_bytes, budget.extent_bytes_max)

    def add(self, name: str, unit: str, run: Callable[[int], Sample]) -> None:
        self.contenders.append(Contender(name, unit, CACHE, run))

    def fio(self, processes: int, pinned: bool = False, registered: bool = False) -> None:
        files = self.tables.chunk_files()

        def random(number: int) -> Sample:
            with self.on_one_core(pinned):
                found = fio.random_read(
                    files, self.settings.seconds, depth=DEPTH, seed=number + 1, processes=processes,
                    registered=registered,
                )  # fmt: skip
            return Sample(found.operations, found.seconds)

        def sequential(_: int) -> Sample:
            found = fio.sequential_read(
                files, self.settings.seconds, processes=processes, registered=registered
            )
            return Sample(found.bytes / 1e6, found.seconds)

        self.add(fio_name("random" + ", pinned" * pinned, processes, registered), "reads/s", random)
        if not pinned:
            self.add(fio_name("sequential", processes, registered), "MB/s", sequential)

    def on_one_core(self, pinned: bool) -> ExitStack:
        stack = ExitStack()
        if pinned:
            os.sched_setaffinity(0, self.cores[:1])
            stack.callback(os.sched_setaffinity, 0, self.cores)
        return stack

    def random(self, name: str, pinned: bool = False, **options: Any) -> None:
        with self.on_one_core(pinned):
            reader = self.reader(**options)
        warm = reader.stats()  # what kernels take to load does not count as planning

        def run(number: int) -> Sample:
            amount, seconds, cpu = 0, 0.0, 0.0
            with self.on_one_core(pinned):
                for request in range(3):
                    seed = 3 * number + request
                    ids = isolated_ids(self.tables, self.count, seed=seed, apart_pages=APART_PAGES)
                    out = self.out[: len(ids)]
                    cpu_begin, begin = cpu_seconds(), time.perf_counter()
                    reader.read(ids, out=out)
                    seconds += time.perf_counter() - begin
                    cpu += cpu_seconds() - cpu_begin
                    amount += len(ids)
                    check_rows(ids, out)
            stats = reader.stats()
            planning = (stats.seconds_planning - warm.seconds_planning) / (stats.rows_asked - warm.rows_asked)
            rings = getattr(reader._engine, "_working", None)
            return Sample(amount, seconds, cpu, {"rings": rings, "planning_seconds": planning})

        self.add(name, "reads/s", run)

    def dense(self, verify: bool = True) -> None:
        reader = self.reader(verify=verify)
        less = "" if verify else NO_CHECKS
        for name, share in (("featstore, half of all pages", 0.5), ("featstore, every page", 1.0)):

            def run(number: int, share: float = share) -> Sample:
                ids = random_page_ids(self.tables, round(self.tables.pages * share), seed=number)
                out, reads = self.out[: len(ids)], reader.plan(ids).bytes_read
                before, cpu, begin = reader.stats(), cpu_seconds(), time.perf_counter()
                reader.read(ids, out=out)
                seconds = time.perf_counter() - begin
                check_rows(ids, out)
                spent = cpu_seconds() - cpu
                return Sample(reads / 1e6, seconds, spent, own_work(before, reader.stats(), reads / 1e6))

            self.add(name + less, "MB/s", run)
        whole = self.whole

        def runs(_: int) -> Sample:
            before, cpu, begin = reader.stats(), cpu_seconds(), time.perf_counter()
            reader.read_runs({"features": [(0, self.tables.rows)]}, out={"features": whole})
            seconds = time.perf_counter() - begin
            check_rows(np.arange(self.tables.rows), whole)
            amount, spent = whole.nbytes / 1e6, cpu_seconds() - cpu
            return Sample(amount, seconds, spent, own_work(before, reader.stats(), amount))

        self.add("featstore, all rows in order" + less, "MB/s", runs)

    def copies(self) -> None:
        threads = self._closing.enter_context(ThreadPoolExecutor(len(self.cores)))
        sources = np.ones((len(self.cores), COPIED_BYTES + STREAM_BYTES), np.uint8)
        share = self.whole.nbytes // len(self.cores) // COPIED_BYTES - 1
        targets = [address_of(self.whole) + k * (share + 1) * COPIED_BYTES for k in range(len(self.cores))]

        def aligned(address: int) -> int:
            return -(-address // STREAM_BYTES) * STREAM_BYTES

        def run(_: int) -> Sample:
            begin = time.perf_counter()
            list(threads.map(
                copy_to_memory, [aligned(address_of(source)) for source in sources], map(aligned, targets),
                [share] * len(self.cores),
            ))  # fmt: skip
            return Sample(len(self.cores) * share * COPIED_BYTES / 1e6, time.perf_counter() - begin)

        run(0)
        self.contenders.append(Contender(COPY, "MB/s", "no reads", run))

    def close(self) -> None:
        self._closing.close()


def own_work(before: ReaderStats, after: ReaderStats, megabytes: float) -> dict[str, Any]:
    """Seconds of a core that a megabyte takes us besides reading."""
    return {
        "verify": (after.seconds_verifying - before.seconds_verifying) / megabytes,
        "copy": (after.seconds_copying - before.seconds_copying) / megabytes,
    }


def core_seconds(ours: Series) -> list[float]:
    """Medians over the rounds, of a gigabyte: seconds of the cores that verifying takes, copying, and all."""
    samples = ours.samples
    spent = [(s.extra["verify"], s.extra["copy"], (s.cpu_seconds or 0.0) / s.amount) for s in samples]
    return [1e3 * median(one[k] for one in spent) for k in range(3)]


def over_best(ours: Series, series: dict[str, Series], names: list[str]) -> float:
    """Median over the rounds of our rate over the best of the others in the same round."""
    rounds = range(len(ours.samples))
    return median(ours.samples[r].rate / max(series[n].samples[r].rate for n in names) for r in rounds)


def over_reads_and_copy(ours: Series, series: dict[str, Series], reads: list[str]) -> float:
    """Median over the rounds of our rate over that of the best of the reads, then copied to memory."""
    seconds = [
        min(1 / series[n].samples[r].rate for n in reads) + 1 / series[COPY].samples[r].rate
        for r in range(len(ours.samples))
    ]
    return median(sample.rate * spent for sample, spent in zip(ours.samples, seconds, strict=True))


def extrapolated(series: dict[str, Series], most: int) -> list[list[Any]]:
    """Rows a second that cores and disks should give, and what would bind: a ring's rate times rings, of
    which there are ``most`` at most, less what a second ring was short of twice as much, for each doubling;
    and the one thread that plans."""
    several, one = series["featstore"], series["featstore, one ring"]
    rings_measured = median(sample.extra["rings"] for sample in several.samples)
    ring = median(sample.rate for sample in one.samples)
    doubling = 1.0
    if rings_measured > 1:
        doubling = min(1.0, median(s.rate for s in several.samples) / ring / rings_measured) ** (
            1 / math.log2(rings_measured)
        )
    planning = 1 / median(sample.extra["planning_seconds"] for sample in several.samples)
    rows = []
    for cores in EXTRAPOLATED_CORES:
        rings = min(cores, most)
        limits = {f"{rings} ring{'s' * (rings > 1)}": ring * rings * doubling ** math.log2(rings)}
        if cores == 1:
            limits = {"the core": median(sample.rate for sample in series["featstore, pinned"].samples)}
        else:
            limits["planning, on one core"] = planning
        for disk in EXTRAPOLATED_DISKS:
            binds, rate = min({**limits, "the disk": disk}.items(), key=lambda limit: limit[1])
            rows.append([cores, disk, rate, binds, rate * LATENCY])
    return rows


@click.command()
@shared_options(size="1GiB", quick_size="128MiB", rounds=7)
@click.option("--zram", is_flag=True, help="Make a block device of compressed RAM for it.")
def main(settings: Settings, zram: bool) -> None:
    """Reads from a device that is faster than one core."""
    with ExitStack() as stack:
        place = settings.workspace
        if zram:
            at = settings.workspace / "zram"
            place = stack.enter_context(compressed_ram(int(settings.size_bytes * ROOM) + (64 << 20), at))
        tables = Tables.of_size(place, settings.size_bytes)
        touch_memory(min(free_memory_bytes() // 2, 2 * settings.size_bytes))
        fast = Fast(tables, settings)
        stack.callback(fast.close)
        note("warming up")
        for registered in (False, True):
            for processes in fast.processes:
                fast.fio(processes, registered=registered)
            fast.fio(1, pinned=True, registered=registered)
        fast.random("featstore")
        fast.random("featstore, one ring", threads=1)
        fast.random("featstore, engine threads", engine="threads")
        fast.random("featstore, pinned", pinned=True)
        fast.dense()
        fast.dense(verify=False)
        fast.copies()
        report = Report("fast_device", "A device that outruns a core", {
            "table_bytes": tables.rows * ROW_BYTES, "row_bytes": ROW_BYTES, "rows_per_request": fast.count,
            "queue_depth": DEPTH, "pages_apart_min": APART_PAGES, "rounds": settings.rounds, "zram": zram,
            "fio_processes": fast.processes, "checksums": "on, but where a line says that they are off",
        }, settings.workspace)  # fmt: skip
        series = measure_rounds(fast.contenders, settings.rounds)
        report.series = list(series.values())
        random = [fio_name("random", n) for n in fast.processes]
        sequential = [fio_name("sequential", n) for n in fast.processes]
        report.claims = [
            Claim("random rows/s over fio's reads/s, its best number of processes",
                  over_best(series["featstore"], series, random), 0.95),
            Claim("the same with one ring", over_best(series["featstore, one ring"], series, random)),
            Claim("the same of the engine threads",
                  over_best(series["featstore, engine threads"], series, random)),
            Claim("both pinned to one core: rows/s over fio's reads/s",
                  over_best(series["featstore, pinned"], series, [fio_name("random, pinned", 1)]), 1.0),
            *(Claim(f"{name.removeprefix('featstore, ')}: bytes/s over fio's sequential, its best",
                    over_best(series[name], series, sequential), None if name.endswith(NO_CHECKS) else 0.9)
              for name in series if name.startswith("featstore") and series[name].unit == "MB/s"),
        ]  # fmt: skip
        for name, text in (
            ("featstore", "random rows/s"), ("featstore, pinned", "both pinned to one core: rows/s"),
            ("featstore, every page", "every page: bytes/s"),
        ):  # fmt: skip
            kinds = {"featstore": "random", "featstore, pinned": "random, pinned"}
            counts = [1] if name == "featstore, pinned" else fast.processes
            best = [fio_name(kinds.get(name, "sequential"), n, registered=True) for n in counts]
            text = f"{text} over fio's where its buffers are registered"
            report.claims.append(Claim(text, over_best(series[name], series, best)))
        registered_reads = [fio_name("sequential", n, registered=True) for n in fast.processes]
        report.claims.append(Claim(
            "all rows in order: bytes/s over fio's where its buffers are registered, copied to memory",
            over_reads_and_copy(series["featstore, all rows in order"], series, registered_reads),
        ))  # fmt: skip
        report.table("Reads of runs: seconds of the cores for a gigabyte, summed over threads", [
            "reads", "over fio's sequential rate", "verify", "copy", "all, reads included",
        ], [
            [name.removeprefix("featstore, "), over_best(one, series, sequential), *core_seconds(one)]
            for name, one in series.items() if name.startswith("featstore") and one.unit == "MB/s"
        ])  # fmt: skip
        report.table("Extrapolated from these slopes, measured nowhere: rows of 512 B, one on a page", [
            "cores", "disk, reads/s", "rows/s", "bound by", f"reads under way, at {LATENCY * 1e6:.0f} µs",
        ], extrapolated(series, fast.rings_max))  # fmt: skip
        rings = [sample.extra["rings"] for sample in series["featstore"].samples]
        report.notes = [
            f"Rings at work in the rounds: {', '.join(map(str, rings))}.",
            f"A queue depth of {DEPTH} has room for {fast.rings_max} rings. Where more reads have to be "
            "under way than that, it is the limit before the others: `queue_depth=` asks for more.",
        ]
        report.save(settings.out, settings.quick)


if __name__ == "__main__":
    main()
