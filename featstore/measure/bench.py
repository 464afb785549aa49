"""Bench: how fast one store's rows are read on one disk, through one engine, cold, verified.

Four ways of reading, each a run of requests of one reader for about a given time:

- *random rows*: distinct random ids, at full queue depth: what online sampling without a cache costs;
- *half of the pages*: one row on each of half of a region's pages, where skipping and reading through
  compete;
- *scan*: all rows in store order;
- *rows in memory*: random rows of a static tier, no read at all.

Each is held against a limit measured in the same run: reads against the same engine's bare rate of single
pages or of longest reads (:class:`featstore.measure.lane_bench.LaneBench`: no planning, no requests), rows in
memory against NumPy's ``take``; and against the planner's forecast. Random rows may beat their limit, which
is one read a row: neighbours share reads. With direct I/O the page cache is not involved; otherwise the files
are dropped from it before each request.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.progress import OnStep
from featstore.errors import SourceError
from featstore.measure.lane_bench import LaneBench, drop_cached
from featstore.reader.reader import Reader
from featstore.storage.store import OpenStore, Table
from featstore.units import EXTENT_BYTES_MAX, PAGE_BYTES, parse_bytes

RANDOM_ROWS = 32_768
_RANDOM_ROWS_MIN = 1024
_REGION_BYTES = 64 * 2**20
_OUT_BYTES_MAX = 256 * 2**20
_LIMIT_BYTES = 192 * 2**20  # read to find a limit, in reads of ...
_LIMIT_READS_MAX = 16_384


@dataclass(frozen=True)
class Case:
    """One way of reading: rates a second; ``forecast_ratio`` is forecast over measured time; ``limit_ratio``
    the share of ``limit`` reached.

    ``row_bytes_per_second`` counts the rows delivered, ``read_bytes_per_second`` what was read from the
    device for them.
    """

    name: str
    requests: int
    rows: int
    reads: int
    seconds: float
    rows_per_second: float
    row_bytes_per_second: float
    read_bytes_per_second: float
    reads_per_second: float
    forecast_ratio: float | None
    limit: str
    limit_ratio: float | None


@dataclass(frozen=True)
class BenchReport:
    """What :func:`bench` measured, and under which circumstances."""

    store: str
    uuid: str
    table: str
    rows: int
    row_bytes: int
    bytes: int
    engine: str
    engine_because: str
    access: str
    cache_state: str
    queue_depth: int
    verified: bool
    calibrated: bool
    seconds: float
    cases: tuple[Case, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def bench(
    store: OpenStore,
    table: str,
    *,
    engine: str = "auto",
    seconds: float = 2.0,
    memory: int | str = "1GiB",
    progress: OnStep | None = None,
) -> BenchReport:
    """Measure the four ways of reading ``table``, about ``seconds`` each, within a reader's ``memory``.

    Raises what a reader raises, and SourceError for a table without rows.
    """
    begin = time.perf_counter()
    run = _Bench(store, store.tables[table], engine, seconds, parse_bytes(memory))
    tell = progress or (lambda stage, done, total: None)
    cases, stages = [], (run.random_rows, run.half_of_pages, run.scan, run.in_memory)
    for k, stage in enumerate(stages):
        tell(stage.__name__.replace("_", " "), k, len(stages))
        cases.append(stage())
    t = run.table
    return BenchReport(
        str(store.path),
        store.uuid,
        t.name,
        t.rows,
        t.row_bytes,
        t.data_bytes,
        run.engine,
        run.engine_because,
        run.access,
        run.cache_state(),
        run.queue_depth,
        True,
        run.calibrated,
        time.perf_counter() - begin,
        tuple(cases),
    )


class _Bench:
    """One run: the table, how it is read, and the limits measured so far."""

    def __init__(
        self, store: OpenStore, table: Table, engine: str, seconds: float, memory_bytes: int
    ) -> None:
        if table.rows == 0:
            raise SourceError(f"table {table.name!r} has no rows to read")
        self.store = store
        self.table = table
        self.seconds = seconds
        self.memory_bytes = memory_bytes
        self._random = np.random.default_rng(0)
        self._nodes = table.node_of_row()
        with self._reader(engine) as reader:  # also compiles what there is to compile
            reader.read({table.name: np.zeros(1, np.int64)})
            self.engine, self.engine_because = reader.engine.name, reader.engine.because
            self.access, self.access_because = reader.access, reader.access_because
            self.calibrated = reader.model.calibrated
            self.queue_depth = reader.queue_depth
            self._budget = reader.budget
        self._limits: dict[int, float] = {}

    def cache_state(self) -> str:
        if self.access == "direct":
            return "cold: direct I/O, past the page cache"
        why = f" ({self.access_because})" if self.access_because else ""
        return (
            f"{self.access}{why}: dropped from the page cache before each request, as far as the system "
            "lets go of it"
        )

    def random_rows(self) -> Case:
        count = self._fits(_few(self.table.rows))
        return self._reads(
            "random rows", None, lambda: self._random.choice(self.table.rows, count, replace=False)
        )

    def half_of_pages(self) -> Case:
        """One row on each of half of the pages of a region (or every second row, where a row is longer than a
        page)."""
        rows_apart = max(1, PAGE_BYTES // self.table.row_bytes)
        places = -(-self.table.rows // rows_apart)
        count = self._fits(max(1, min(places, 8 * _REGION_BYTES // PAGE_BYTES) // 2))
        region = min(places, 2 * count)

        def ids() -> NDArray[np.int64]:
            first = int(self._random.integers(0, places - region + 1))
            rows = (first + self._random.choice(region, count, replace=False)) * rows_apart
            return self._nodes_of(np.minimum(rows, self.table.rows - 1))

        return self._reads("half of the pages", EXTENT_BYTES_MAX, ids)

    def scan(self) -> Case:
        count = self._fits(min(self.table.rows, max(1, 2 * _REGION_BYTES // self.table.row_bytes)))
        next_row = 0

        def ids() -> NDArray[np.int64]:
            nonlocal next_row
            if next_row + count > self.table.rows:
                next_row = 0
            rows = np.arange(next_row, next_row + count)
            next_row += count
            return self._nodes_of(rows)

        return self._reads("scan", EXTENT_BYTES_MAX, ids)

    def in_memory(self) -> Case:
        """Rows of a static tier as large as the budget allows, against ``numpy.take`` on as many rows."""
        t = self.table
        index_bytes = t.rows // 8 + t.rows // 64 + PAGE_BYTES
        held = self._fits(max(1, min(t.rows, (self._budget.tier_bytes - index_bytes) // (2 * t.row_bytes))))
        count = min(held, RANDOM_ROWS)
        members = self._random.choice(t.rows, held, replace=False)
        out = np.zeros((count, *t.row_shape), t.dtype)
        with self._reader(self.engine, static={t.name: members}) as reader:

            def ids() -> NDArray[np.int64]:
                return members[self._random.integers(0, held, count)]

            case = self._run("rows in memory", lambda: reader, ids, out, None)
        rows = np.ones((held, t.row_bytes), np.uint8)  # not zeros: those would all be one and the same page
        flat, times = out.reshape(-1).view(np.uint8).reshape(count, t.row_bytes), []
        for _ in range(max(3, min(case.requests, 20))):
            places = self._random.integers(0, held, count)
            begin = time.perf_counter()
            np.take(rows, places, axis=0, out=flat, mode="clip")
            times.append(time.perf_counter() - begin)
        return _with_limit(case, "NumPy's take", case.rows_per_second * statistics.median(times) / count)

    def _fits(self, rows: int) -> int:
        return max(1, min(rows, _OUT_BYTES_MAX // self.table.row_bytes))

    def _nodes_of(self, rows: NDArray[Any]) -> NDArray[np.int64]:
        return rows.astype(np.int64) if self._nodes is None else self._nodes[rows].astype(np.int64)

    def _reader(self, engine: str, static: Any = None) -> Reader:
        return Reader(
            self.store, memory=self.memory_bytes, tables=[self.table.name], engine=engine, static=static
        )

    def _reads(self, name: str, limit_bytes: int | None, ids: Callable[[], NDArray[np.int64]]) -> Case:
        """A case that reads, with its limit: bytes a second in reads of ``limit_bytes``; None: reads a
        second, as many as rows take.
        """
        readers = self._readers()
        sample = ids()
        out = np.zeros((len(sample), *self.table.row_shape), self.table.dtype)
        try:
            case = self._run(name, lambda: next(readers), ids, out, 0.0)
        finally:
            readers.close()
        size = (
            min(EXTENT_BYTES_MAX, -(-self.table.row_bytes // PAGE_BYTES) * PAGE_BYTES)
            if limit_bytes is None
            else limit_bytes
        )
        rate = self._limit(size)
        if not rate:
            return case  # the table is too small for a read of this size
        if limit_bytes is None:
            reads = -(-self.table.row_bytes // EXTENT_BYTES_MAX)  # of a row
            return _with_limit(case, f"{rate:,.0f} reads/s", reads * case.rows_per_second / rate)
        return _with_limit(case, f"{rate * size / 1e6:,.0f} MB/s", case.read_bytes_per_second / (rate * size))

    def _readers(self) -> Generator[Reader, None, None]:
        """The reader for each request: always the same with direct I/O; else a new one, because mapped pages
        cannot be dropped.
        """
        if self.access == "direct":
            with self._reader(self.engine) as reader:
                while True:
                    yield reader
        while True:
            for chunk in range(self.table.layout.chunks):
                drop_cached(self.store.path / self.table.entry.chunk_path(chunk))
            with self._reader(self.engine) as reader:
                yield reader

    def _run(
        self,
        name: str,
        reader_for: Callable[[], Reader],
        ids: Callable[[], NDArray[np.int64]],
        out: NDArray[Any],
        forecast: float | None,
    ) -> Case:
        """Requests until the time is over, at least two; only the reads are timed."""
        requests = rows = reads = read_bytes = 0
        spent = 0.0
        until = time.perf_counter() + self.seconds
        while requests < 2 or time.perf_counter() < until:
            reader, wanted = reader_for(), ids()
            if forecast is not None:
                forecast += reader.plan({self.table.name: wanted}).forecast_seconds
            before = reader.stats()
            begin = time.perf_counter()
            reader.read({self.table.name: wanted}, out={self.table.name: out[: len(wanted)]})
            spent += time.perf_counter() - begin
            done = reader.stats().since(before)
            requests, rows = requests + 1, rows + len(wanted)
            reads, read_bytes = reads + done.reads, read_bytes + done.bytes_read
        return Case(
            name,
            requests,
            rows,
            reads,
            spent,
            rows / spent,
            rows * self.table.row_bytes / spent,
            read_bytes / spent,
            reads / spent,
            forecast / spent if forecast else None,
            "",
            None,
        )

    def _limit(self, read_bytes: int) -> float:
        """Bare reads of this size a second; 0 where the table has no room for one."""
        if read_bytes not in self._limits:
            lanes = LaneBench(self.store, self.table, self.engine)
            try:
                reads = min(_LIMIT_READS_MAX, _LIMIT_BYTES // read_bytes, lanes.places(read_bytes))
                self._limits[read_bytes] = (
                    statistics.median(reads / lanes.run(read_bytes, reads) for _ in range(3))
                    if reads
                    else 0.0
                )
            finally:
                lanes.close()
        return self._limits[read_bytes]


def _few(rows: int) -> int:
    """How many random rows of a table to ask for at once: not so many that they are most of it."""
    return min(rows, RANDOM_ROWS, max(_RANDOM_ROWS_MIN, rows // 32))


def _with_limit(case: Case, limit: str, ratio: float) -> Case:
    return replace(case, limit=limit, limit_ratio=ratio)
