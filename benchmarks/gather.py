"""Cold random gather: rows of 512 B, each on a page of its own, from a table that is not in memory.

    python benchmarks/gather.py --dir /a/directory/on/the/ssd

The limit is fio: 4 KiB random direct reads at the same queue depth from the very files of the store. The
peers answer the same ids in the same rounds: Lance ``take``, 32 threads of ``preadv``, and ``np.memmap`` with
a cold cache, with a warm one, and in a memory cgroup that the table does not fit. featstore verifies the
checksum of every page; no peer does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
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
    paired_cpu_ratio,
    paired_ratio,
    shared_options,
)
from numpy.typing import NDArray
from peers import fio, lance_take
from peers.memmap import Memmap
from peers.preadv_threads import CompiledThreads, PythonThreads
from system import (
    can_drop_caches,
    cpu_seconds,
    drop_caches,
    free_memory_bytes,
    memory_group,
    run_child,
    touch_memory,
    warm_cache,
)
from tables import COLUMNS, ROW_BYTES, Tables, check_rows, isolated_ids, random_page_ids

import featstore
from featstore.measure.calibrate import measure

DEPTH = 128
REQUESTS = 3  # of a sample, where no page cache has to be emptied between them
THREADS = 32
GROUP_BYTES = 300 * 2**20
GROUP_SECONDS = 10.0
APART_PAGES = 8
NO_CACHE = "cold (direct I/O)"
WARM = "warm (all in memory and mapped)"
#: Our lines that are warm, and their bars over np.memmap's.
MAPPED = {"featstore mmap, warm": 0.5, "featstore mmap, warm, checksums off": 0.9}
#: Over peers that come near the device's own rate.
DEVICE_BOUND = 1.2
IDS = Callable[[int, int], NDArray[np.int64]]


def timed(
    requests: Sequence[NDArray[np.int64]],
    read: Callable[[NDArray[np.int64]], NDArray[Any]],
    extra: dict[str, Any] | None = None,
) -> Sample:
    """Measure gathers, one after the other, and hold their rows against the truth (outside the measured
    time)."""
    amount, seconds, cpu = 0, 0.0, 0.0
    for ids in requests:
        cpu_begin, begin = cpu_seconds(), time.perf_counter()
        rows = read(ids)
        seconds += time.perf_counter() - begin
        cpu += cpu_seconds() - cpu_begin
        amount += len(ids)
        check_rows(ids, rows)
    return Sample(amount, seconds, cpu, extra or {})


class Gather:
    """The contenders of one run; ``close`` gives back what they hold."""

    def __init__(self, tables: Tables, settings: Settings) -> None:
        self.tables, self.settings = tables, settings
        self.count = tables.pages // (2 * APART_PAGES + 4)
        self.out = np.zeros((self.count, COLUMNS), np.float32)
        self._closing: list[Callable[[], None]] = []
        self.contenders: list[Contender] = []

    def ids(self, number: int, request: int = 0) -> NDArray[np.int64]:
        return isolated_ids(
            self.tables, self.count, seed=REQUESTS * number + request, apart_pages=APART_PAGES
        )

    def random_ids(self, number: int, request: int = 0) -> NDArray[np.int64]:
        return random_page_ids(self.tables, self.count, seed=REQUESTS * number + request)

    def add(self, name: str, cache: str, run: Callable[[int], Sample], unit: str = "rows/s") -> None:
        note(f"warming up {name}")
        run(-1 & 0xFFFF)  # compiles, opens, checks; not counted
        self.contenders.append(Contender(name, unit, cache, run))

    def fio(self) -> None:
        files = self.tables.chunk_files()

        def run(number: int) -> Sample:
            result = fio.random_read(files, self.settings.seconds, depth=DEPTH, seed=number + 1)
            return Sample(result.operations, result.seconds, result.cpu_seconds)

        self.add("fio 4 KiB random", NO_CACHE, run, "reads/s")

    def featstore(
        self,
        name: str,
        engine: str,
        cache: str,
        ids: IDS,
        before: Callable[[], None] = lambda: None,
        verify: bool = True,
    ) -> None:
        path = self.tables.store()
        model = measure(path, engine, seconds=self.settings.seconds).model
        store = featstore.open(path)
        reader = store.reader(
            memory="512MiB", static=None, engine=engine, queue_depth=DEPTH, model=model, verify=verify
        )
        self._closing += [reader.close, store.close]

        def run(number: int) -> Sample:
            wanted = [ids(number, request) for request in range(REQUESTS)]
            reads = sum(reader.plan(request).reads for request in wanted)
            before()
            if cache == WARM:  # through this very mapping, as np.memmap's are
                step, rows = len(self.out), store.tables["features"].rows
                for begin in range(0, rows, step):
                    some = np.arange(begin, min(begin + step, rows))
                    reader.read(some, out=self.out[: len(some)])
            return timed(wanted, lambda i: reader.read(i, out=self.out), {"reads": reads})

        self.add(name, cache, run)

    def lance(self, scheme: str) -> None:
        path = self.tables.lance()
        dataset = lance_take.LanceTake(path, scheme)
        files = list((path / "data").iterdir())

        def run(number: int) -> Sample:
            wanted = self.ids(number)
            drop_caches(files)
            return timed([wanted], dataset.take)

        self.add(f"Lance take, {scheme}", "cold (cache dropped)", run)

    def preadv(self, name: str, make: Callable[[Path], PythonThreads | CompiledThreads]) -> None:
        threads = make(self.tables.flat())
        self._closing.append(threads.close)

        def read(ids: NDArray[np.int64]) -> NDArray[Any]:
            threads.read(ids, self.out.view(np.uint8))
            return self.out

        self.add(name, NO_CACHE, lambda number: timed([self.ids(number, k) for k in range(REQUESTS)], read))

    def memmap(self, name: str, cache: str, before: Callable[[], object], mapped: bool = False) -> None:
        """``mapped``: every page has been touched through this very mapping."""
        path = self.tables.flat()

        def run(number: int) -> Sample:
            wanted = self.ids(number)
            before()
            # anew each time: what any process has mapped cannot be dropped from the page cache
            rows = Memmap(path)
            if mapped:
                rows.touch()

            def read(ids: NDArray[np.int64]) -> NDArray[Any]:
                rows.read(ids, self.out)
                return self.out

            return timed([wanted], read)

        self.add(name, cache, run)

    def grouped(self, name: str, script: str, path: Path) -> None:
        """A contender in a process of its own, in a memory cgroup that the table does not fit."""
        ids_file, out_file = self.settings.workspace / "ids.npy", self.settings.workspace / "rows.npy"
        seconds = GROUP_SECONDS if not self.settings.quick else 2.0

        def run(number: int) -> Sample:
            ids = self.ids(number)
            np.save(ids_file, ids)
            drop_caches([self.tables.flat()])
            given = {
                "ids": str(ids_file),
                "path": str(path),
                "out": str(out_file),
                "columns": COLUMNS,
                "seconds": seconds,
            }
            with memory_group(GROUP_BYTES) as group:
                result = run_child(HERE / script, given, group)
            check_rows(ids[: result["rows"]], np.load(out_file))
            return Sample(result["rows"], result["seconds"])

        self.add(name, f"cold, memory cgroup of {GROUP_BYTES >> 20} MiB", run)

    def close(self) -> None:
        for close in self._closing:
            close()


def contend(gather: Gather, peers: bool) -> None:
    """Set up everything that takes part."""
    gather.fio()
    gather.featstore("featstore uring", "uring", NO_CACHE, gather.ids)
    gather.featstore("featstore threads", "threads", NO_CACHE, gather.ids)
    gather.featstore("featstore uring, pages from all", "uring", NO_CACHE, gather.random_ids)
    if not peers:
        return
    gather.lance("file")
    gather.lance("file+uring")
    gather.preadv(
        f"{THREADS} Python threads of preadv", lambda path: PythonThreads(path, ROW_BYTES, threads=THREADS)
    )
    gather.preadv(
        f"{THREADS} compiled threads of pread", lambda path: CompiledThreads(path, ROW_BYTES, threads=THREADS)
    )
    gather.preadv(
        f"{THREADS} compiled threads of pread, sorted",
        lambda path: CompiledThreads(path, ROW_BYTES, threads=THREADS, sort=True),
    )
    flat, chunks = gather.tables.flat(), gather.tables.chunk_files()
    gather.memmap("np.memmap, cold", "cold (cache dropped)", lambda: drop_caches([flat]))
    if gather.settings.size_bytes * 2 < free_memory_bytes():
        gather.memmap("np.memmap, warm", WARM, lambda: warm_cache([flat]), mapped=True)
        gather.memmap(
            "np.memmap, warm, mapped anew", "warm (all in the page cache)", lambda: warm_cache([flat])
        )
        for name in MAPPED:
            verify = not name.endswith("checksums off")
            gather.featstore(name, "mmap", WARM, gather.ids, lambda: warm_cache(chunks), verify)
    if can_drop_caches():
        gather.grouped("np.memmap in a cgroup", "peers/memmap.py", flat)
        gather.grouped("featstore in a cgroup", "child_gather.py", gather.tables.store())


def claims(series: dict[str, Series]) -> list[Claim]:
    """The ratios, each within its round."""
    limit, ours, threads = series["fio 4 KiB random"], series["featstore uring"], series["featstore threads"]
    found = [
        Claim("rows/s of uring over fio's reads/s", paired_ratio(ours, limit), 0.95),
        Claim("CPU time of a row over fio's of a read", paired_cpu_ratio(ours, limit), 0.75, "<="),
        Claim("rows/s of threads over fio's reads/s", paired_ratio(threads, limit), 0.65),
    ]
    bars = {
        "Lance take, file": 1.3, "Lance take, file+uring": DEVICE_BOUND,
        f"{THREADS} Python threads of preadv": DEVICE_BOUND,
        f"{THREADS} compiled threads of pread": DEVICE_BOUND,
    }  # fmt: skip
    against = [
        (name, bars.get(name))
        for name in series
        if not name.startswith(("fio", "featstore")) and "cgroup" not in name
    ]
    found += [Claim(f"uring over {name}", paired_ratio(ours, series[name]), bar) for name, bar in against]
    for name, bar in against:
        if bar == DEVICE_BOUND:
            text = f"the device (fio) over {name}: about the most that a reader can have"
            found.append(Claim(text, paired_ratio(limit, series[name])))
    for name, bar in MAPPED.items():
        if name in series:
            ratio = paired_ratio(series[name], series["np.memmap, warm"])
            found.append(Claim(f"{name.removeprefix('featstore ')}: over np.memmap, warm", ratio, bar))
    if "featstore in a cgroup" in series:
        ratio = paired_ratio(series["featstore in a cgroup"], series["np.memmap in a cgroup"])
        found.append(Claim("in a cgroup: uring over np.memmap", ratio))
    return found


def by_round(series: dict[str, Series]) -> list[list[Any]]:
    """Rates of the warm lines, and ours over np.memmap's, round by round: a machine that drifts shows."""
    theirs = series["np.memmap, warm"].samples
    rows: list[list[Any]] = []
    for number, sample in enumerate(theirs):
        ours = [series[name].samples[number].rate for name in MAPPED]
        rows.append([number + 1, sample.rate, *ours, *(rate / sample.rate for rate in ours)])
    return rows


@click.command()
@shared_options(size="4GiB", quick_size="256MiB", rounds=10)
@click.option("--no-peers", is_flag=True, help="Only fio and featstore.")
def main(settings: Settings, no_peers: bool) -> None:
    """Cold random gather against fio, Lance, preadv and np.memmap."""
    tables = Tables.of_size(settings.workspace, settings.size_bytes)
    touch_memory(min(free_memory_bytes() // 2, 2 * settings.size_bytes))
    gather = Gather(tables, settings)
    report = Report("gather", "Cold random gather", {
        "table_bytes": tables.rows * ROW_BYTES, "row_bytes": ROW_BYTES, "rows_per_request": gather.count,
        "requests_per_sample": REQUESTS, "pages_apart_min": APART_PAGES, "queue_depth": DEPTH,
        "threads": THREADS, "rounds": settings.rounds, "checksums": "on", "group_bytes": GROUP_BYTES,
    }, settings.workspace)  # fmt: skip
    try:
        contend(gather, peers=not no_peers)
        series = measure_rounds(gather.contenders, settings.rounds)
    finally:
        gather.close()
    report.series = list(series.values())
    report.claims = claims(series)
    if "np.memmap, warm" in series:
        names = [name.removeprefix("featstore ") for name in MAPPED]
        report.table("Warm, round by round, rows/s", [
            "round", "np.memmap", *names, *(f"{name}: over np.memmap" for name in names),
        ], by_round(series))  # fmt: skip
    merged = [s.extra["reads"] / s.amount for s in series["featstore uring, pages from all"].samples]
    single = [s.extra["reads"] / s.amount for s in series["featstore uring"].samples]
    report.notes = [
        f"Pages lie at least {APART_PAGES} apart, so that every row costs a read ({min(single):.2f} "
        "reads a row); in the line "
        '"pages from all" they are drawn from the whole table and neighbours are read together '
        f"({np.median(merged):.2f} reads a row).",
        "fio's CPU time is usr + sys of its job for each read; featstore's is that of the process for "
        "each row, with planning, checksums and copying.",
        "featstore through io_uring and threads is always cold (direct I/O): against lines that are "
        "warm it reads from the disk what the peer has in memory.",
    ]
    report.save(settings.out, settings.quick)


if __name__ == "__main__":
    main()
