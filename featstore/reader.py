"""The reader: tiers, plan and engine behind one call.

A request of many ids is cut into pieces, so that planning needs a fixed amount of memory whatever the request's size: not by
position but by ranges of rows, so that what lies together on disk is still planned together. For each piece the reader maps ids to rows, lets its tiers deliver what they hold, plans the reads for the rest and hands them to the engine;
while the engine reads one piece, the next is planned. ``read`` plans in the caller's thread, ``submit`` in the reader's own.
Several requests may be under way, from several threads; they share the engine's queue.

A reader belongs to one process. After a fork it opens its own engine when it is first used; when pickled it is made anew
from its store and options.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore import plan
from featstore.budget import PIECES_IN_FLIGHT, Budget, TableNeed
from featstore.cost import DeviceModel, device_key, load_model
from featstore.dtypes import dtype_from_name
from featstore.engine import choose, make
from featstore.engine import counters as C
from featstore.engine.base import Engine
from featstore.engine.files import Access, TableFiles
from featstore.engine.lane import Lane
from featstore.errors import BudgetError, ClosedError, IdError, SourceError
from featstore.ids import Ids, check_out, empty_rows, finished, parse_ids
from featstore.plan import RANGE_BINS, Extents, RowRange, cut_ranges, plan_extents, row_histogram, rows_of_ids, select_rows
from featstore.report import Plan, ReaderStats, TablePlan
from featstore.request import Request
from featstore.store import Store, Table
from featstore.tiers import Tier
from featstore.tiers.static import StaticTier
from featstore.units import parse_bytes

QUEUE_DEPTH = 128
#: Requests of ``submit`` that may wait or be under way; a further one blocks.
IN_FLIGHT_MAX = 16
_SPLIT_BYTES = 2 * 2**20  # from this many bytes on, looking up and copying use a second thread
_ID_BYTES = 64  # what looking up one id weighs in that
_RANGES_MAX = 16  # ranges a request is cut into; each costs one pass over its ids
_NONE = np.empty(0, np.int32)

_starting = threading.Lock()  # held while a forked child opens its own engine


def _renew_lock() -> None:
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)

Static = str | None | Mapping[str, Any] | NDArray[Any] | Sequence[int]


class _TableState:
    """What a reader holds for one table."""

    def __init__(self, table: Table, verify: bool, access: Access) -> None:
        self.table = table
        row_map = table.row_of_node()
        self.row_map: NDArray[Any] = np.empty(0, np.int32) if row_map is None else row_map
        store = table._store
        checksums = store.load(table.entry.page_checksums) if verify else None
        paths = [store.path / table.entry.chunk_path(chunk) for chunk in range(table.layout.chunks)]
        self.files = TableFiles(paths, table.layout, checksums, access)
        self.tiers: list[Tier] = []


class _Part:
    """Ids of one table and where their rows go; ``row_map`` is empty where the ids are rows."""

    def __init__(self, state: _TableState, ids: NDArray[np.int64], row_map: NDArray[Any], out: NDArray[np.uint8]) -> None:
        self.state = state
        self.ids = ids
        self.row_map = row_map
        self.out = out


class _Piece:
    """What is planned at once: all ids of a part, or those whose rows are in ``range``."""

    def __init__(self, part: _Part, range_: RowRange | None) -> None:
        self.part = part
        self.range = range_
        self.count = len(part.ids) if range_ is None else range_.count


class _Found:
    """A piece after its lookup: rows, the positions they go to (empty: in order), their slots, hits of each tier."""

    def __init__(self, piece: _Piece, tiers: list[Tier]) -> None:
        self.rows = np.empty(piece.count, np.int64)
        self.positions = _NONE if piece.range is None else np.empty(piece.count, np.int32)
        self.slots = np.empty(piece.count, np.int32) if tiers else _NONE
        self.hits = dict.fromkeys((tier.name for tier in tiers), 0)


def _need(table: Table, verify: bool) -> TableNeed:
    order = table.entry.order
    map_bytes = 0 if order.row_of_node is None else table.rows * dtype_from_name(order.row_of_node.dtype).itemsize
    return TableNeed(map_bytes, 4 * table.layout.pages if verify else 0, table.row_bytes)


class Reader:
    """Reads rows of a store's tables; made by :meth:`featstore.Store.reader`. A context manager.

    Args:
        store: the open store.
        memory: budget for all that the reader holds (maps, checksums, staging, scratch, tiers), bytes or ``"2GiB"``.
            Results are the caller's and come on top.
        static: rows to keep in memory: ``"degree"`` for those of the highest degree, as many as the budget allows;
            node ids (or a mapping of table names to node ids); None for no static tier; ``"auto"`` for ``"degree"`` where
            the store knows degrees.
        tables: the names of the tables to read; all by default.
        engine: ``"uring"``, ``"threads"``, ``"mmap"``, or ``"auto"`` for the first that works.
        queue_depth: reads under way at most.
        verify: check the checksum of every page read.
        model: the device model to plan with; by default the calibrated one of this device.

    Raises BudgetError, CorruptionError, DeviceError, FormatError; OSError where the engine asked for does not work here.
    """

    def __init__(
        self, store: Store, *, memory: int | str = "1GiB", static: Static = "auto", tables: Sequence[str] | None = None,
        engine: str = "auto", queue_depth: int = QUEUE_DEPTH, verify: bool = True, model: DeviceModel | None = None,
    ) -> None:  # fmt: skip
        self._options = {
            "memory": memory, "static": static, "tables": tables, "engine": engine, "queue_depth": queue_depth,
            "verify": verify, "model": model,
        }  # fmt: skip
        if queue_depth < 1:
            raise ValueError(f"queue_depth must be at least 1, not {queue_depth}")
        self.store = store
        self._closed = False
        self._engine: Engine | None = None
        self._states: dict[str, _TableState] = {}
        names = list(store.tables) if tables is None else list(tables)
        for name in names:
            if name not in store.tables:
                raise KeyError(f"the store has no table {name!r}; it has {', '.join(map(repr, store.tables))}")
        self._needs = [_need(store.tables[n], verify) for n in names]
        self.budget = Budget.split(parse_bytes(memory), self._needs)
        _announce_compilation()
        self.engine = choose(engine)
        access: Access = "mapped" if self.engine.name == "mmap" else "direct"
        try:
            for name in names:
                self._states[name] = _TableState(store.tables[name], verify, access)
            self.access, self.access_because = self._access(access)
            self.model = model or load_model(device_key(store.path, self.engine.name, self.access))
            self._queue_depth = queue_depth
            self._start_process()
            self._fill_static(static)
        except BaseException:
            self.close()
            raise
        self._counts = _Counts()

    def _access(self, wanted: Access) -> tuple[Access, str]:
        for state in self._states.values():
            if state.files.access != wanted:
                return state.files.access, state.files.buffered_because
        return wanted, ""

    def _start_process(self) -> None:
        """Open what belongs to this process: the engine, threads, locks."""
        self._counts = _Counts()
        self._engine = make(self.engine.name, self._queue_depth, self.budget.staging_bytes, self.budget.extent_bytes_max)
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="featstore-plan")
        self._helpers = ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1) - 1), thread_name_prefix="featstore-copy")
        self._pieces = threading.BoundedSemaphore(PIECES_IN_FLIGHT)
        self._requests = threading.BoundedSemaphore(IN_FLIGHT_MAX)
        self._idle = threading.Condition()
        self._open_requests = 0
        self._pid = os.getpid()

    def _ready(self) -> Engine:
        if self._closed:
            raise ClosedError("the reader is closed")
        if self._pid != os.getpid():  # after a fork: the parent's threads and ring are not ours
            with _starting:
                if self._pid != os.getpid():
                    self._start_process()
        assert self._engine is not None
        return self._engine

    # Reading.

    def read(self, ids: Any, *, out: Any = None) -> Any:
        """Rows of ``ids``, in the order asked; duplicates are fine.

        ``ids``: integers of any dtype and shape, NumPy, torch or a list; or a mapping of table names to ids, which reads
        several tables at once and returns a dict. A store of one table needs no name. The result has the shape of the ids
        followed by that of a row: a NumPy array, or a CPU tensor where the ids were a tensor. ``out``: a C-contiguous
        array or tensor to fill and return instead (or a mapping of them).

        Raises IdError, CorruptionError, DeviceError, ClosedError.
        """
        self._ready()
        request, parts = self._request(ids, out, copy=False)
        self._begin()
        self._feed(request, parts)
        return request.result()

    def submit(self, ids: Any, *, out: Any = None) -> Request:
        """Like :meth:`read`, but returns at once with a :class:`~featstore.request.Request`. ``ids`` may be changed
        afterwards; ``out`` belongs to the request until it is done. Blocks while too many requests are under way."""
        self._ready()
        request, parts = self._request(ids, out, copy=True)
        limit = self._requests
        limit.acquire()
        try:
            self._begin()
        except BaseException:
            limit.release()
            raise
        request._future.add_done_callback(lambda _: limit.release())
        self._planner.submit(self._feed, request, parts)
        return request

    def _begin(self) -> None:
        with self._idle:
            if self._closed:  # close() waits for what has begun; nothing may begin after that
                raise ClosedError("the reader is closed")
            self._open_requests += 1
        self._counts.add(requests=1)

    def _end(self, _: Future[Any]) -> None:
        with self._idle:
            self._open_requests -= 1
            self._idle.notify_all()

    def _by_table(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Mapping):
            for name in value:
                if name not in self._states:
                    raise KeyError(f"this reader has no table {name!r}; it has {', '.join(map(repr, self._states))}")
            return dict(value)
        if len(self._states) != 1:
            raise IdError(f"this reader has {len(self._states)} tables; say which: {{'{next(iter(self._states), 'table')}': ids}}")
        return {next(iter(self._states)): value}

    def _request(self, ids: Any, out: Any, *, copy: bool) -> tuple[Request, list[_Part]]:
        by_table = self._by_table(ids)
        outs = {} if out is None else self._by_table(out)
        for name in outs:
            if name not in by_table:
                raise ValueError(f"out is given for table {name!r}, ids are not")
        given_as: dict[str, tuple[Ids, tuple[int, ...], NDArray[np.uint8], Any]] = {}
        parts: list[_Part] = []
        for name, value in by_table.items():
            table, parsed = self._states[name].table, parse_ids(value, copy=copy)
            shape = (*parsed.shape, *table.row_shape)
            given = outs.get(name)
            rows = empty_rows(len(parsed.values), table.row_bytes) if given is None else check_out(given, shape, table.dtype)
            given_as[name] = (parsed, shape, rows, given)
            parts.append(_Part(self._states[name], parsed.values, self._states[name].row_map, rows))

        def finish() -> Any:
            done = {
                name: finished(rows, shape, self._states[name].table.dtype, parsed.tensor) if given is None else given
                for name, (parsed, shape, rows, given) in given_as.items()
            }
            return done if isinstance(ids, Mapping) else next(iter(done.values()))

        request = Request(finish)
        request._future.add_done_callback(self._end)
        return request, parts

    def _pieces_of(self, part: _Part) -> Iterator[_Piece]:
        """Cut a part's ids into pieces of at most ``budget.piece_ids_max``."""
        limit, row_bytes, rows = self.budget.piece_ids_max, part.state.table.row_bytes, part.state.table.rows
        shift = max(0, (rows - 1).bit_length() - (RANGE_BINS.bit_length() - 1))
        step = limit * _RANGES_MAX
        for at in range(0, len(part.ids), step):
            run = _Part(part.state, part.ids[at : at + step], part.row_map, part.out[at * row_bytes : (at + step) * row_bytes])
            if len(run.ids) <= limit:
                yield _Piece(run, None)
                continue
            counts = np.zeros(RANGE_BINS, np.int64)
            self._check(run, row_histogram(run.ids, run.row_map, rows, shift, counts))
            for rows_range in cut_ranges(counts, shift, limit):
                yield _Piece(run, rows_range)

    def _check(self, part: _Part, bad: int) -> None:
        """Raise IdError where a kernel found a bad id."""
        if bad >= 0:
            table = part.state.table
            raise IdError(
                f"node id {part.ids[bad]} is out of range: table {table.name!r} has {table.rows:,} rows "
                + (f"(ids 0 to {table.rows - 1:,})" if table.rows else "(none)")
            )

    def _feed(self, request: Request, parts: list[_Part]) -> None:
        """Plan and start every piece of a request."""
        error: BaseException | None = None
        try:
            for part in parts:
                for piece in self._pieces_of(part):
                    if not self._feed_piece(request, piece):
                        break
        except BaseException as failure:
            error = failure
        request.close_piece(None, error)

    def _feed_piece(self, request: Request, piece: _Piece) -> bool:
        """Plan and start a piece, as soon as there is room for it; False where the request has stopped."""
        self._pieces.acquire()
        lane = None
        try:
            if request.stopped():
                return False
            lane = self._plan_piece(request, piece)
        finally:
            if lane is None:
                self._pieces.release()
        if lane is not None:
            request.open_piece(lane)
            assert self._engine is not None
            try:
                self._engine.start(lane)
            except BaseException as failure:
                self._pieces.release()
                request.close_piece(lane, failure)
                return False
        return True

    def _plan_piece(self, request: Request, piece: _Piece) -> Lane | None:
        """Deliver what the tiers hold; the lane that reads the rest, or None if nothing is missing."""
        begin = time.perf_counter()
        part = piece.part
        found = self._find(piece, deliver=True)
        lane = None
        forecast = 0.0
        if sum(found.hits.values()) < piece.count:
            extents = self._extents(part, found)
            forecast = self.model.seconds(extents.reads, extents.bytes_read)
            pieces = self._pieces

            def on_done(lane: Lane) -> None:
                pieces.release()
                request.close_piece(lane, lane.error())

            lane = Lane(
                part.state.files, extents.page, extents.pages, extents.first, extents.keys, extents.position_bits, part.out, on_done
            )
        self._counts.add(
            rows_asked=piece.count, bytes_asked=piece.count * part.state.table.row_bytes, hits=found.hits,
            forecast_seconds=forecast, seconds_planning=time.perf_counter() - begin,
        )  # fmt: skip
        return lane

    def _extents(self, part: _Part, found: _Found) -> Extents:
        return plan_extents(
            found.rows, found.positions, found.slots, len(part.ids), part.state.table.layout, self.model,
            self.budget.extent_bytes_max,
        )  # fmt: skip

    def _find(self, piece: _Piece, *, deliver: bool) -> _Found:
        """Map a piece's ids to rows and ask the tiers; with ``deliver``, copy out what they hold."""
        part, state = piece.part, piece.part.state
        tiers = state.tiers
        found = _Found(piece, tiers)
        if piece.range is not None:
            r = piece.range
            select_rows(part.ids, part.row_map, r.low, r.high, r.skip, found.rows, found.positions)
        lock = threading.Lock()

        def work(begin: int, end: int) -> None:
            rows = found.rows[begin:end]
            if piece.range is None:
                bad = rows_of_ids(part.ids[begin:end], part.row_map, state.table.rows, rows)
                self._check(part, bad if bad < 0 else begin + bad)
            out = part.out if piece.range is not None else part.out[begin * state.table.row_bytes :]
            for tier in tiers:
                slots = found.slots[begin:end]
                hits = tier.find(rows, slots)
                with lock:
                    found.hits[tier.name] += hits
                if deliver and hits:
                    tier.take(slots, found.positions[begin:end], out)

        weight = _ID_BYTES + (state.table.row_bytes if deliver and tiers else 0)
        self._in_parallel(work, piece.count, weight)
        return found

    def _in_parallel(self, work: Callable[[int, int], None], n: int, weight_bytes: int) -> None:
        """work(begin, end) over [0, n), on the helper threads too where it is worth it."""
        if n * weight_bytes < _SPLIT_BYTES:
            work(0, n)
            return
        shares = self._helpers._max_workers + 1
        cuts = [n * k // shares for k in range(shares + 1)]
        others = [self._helpers.submit(work, a, b) for a, b in zip(cuts[1:-1], cuts[2:], strict=True)]
        try:
            work(cuts[0], cuts[1])
        finally:
            wait(others)  # also after an error: they write into the caller's memory
        for other in others:
            other.result()

    # The static tier.

    def _fill_static(self, static: Static) -> None:
        members = self._static_members(static)
        for name, rows in members.items():
            state = self._states[name]
            if len(rows) == 0:
                continue
            tier = StaticTier(rows, state.table.rows, state.table.row_bytes)
            request = Request(lambda: None)
            request._future.add_done_callback(self._end)
            self._begin()
            self._feed(request, [_Part(state, rows, _NONE, tier.data.reshape(-1))])
            request.result()
            state.tiers.append(tier)

    def _static_members(self, static: Static) -> dict[str, NDArray[np.int64]]:
        """Rows (ascending, distinct) to keep of each table, within the budget."""
        known = {n: s.table for n, s in self._states.items() if s.table.entry.order.rows_by_degree is not None}
        if static is None or (isinstance(static, str) and static == "auto" and not known):
            return {}
        if isinstance(static, str):
            if static not in ("auto", "degree"):
                raise ValueError(f"static must be 'degree', 'auto', None or node ids, not {static!r}")
            if not known:
                raise SourceError("static='degree' needs degrees, and the store was packed without a graph; pack it with one, or give node ids")
            return self._highest_degrees(known)
        chosen = {}
        needed = 0
        for name, ids in self._by_table(static).items():
            state, parsed = self._states[name], parse_ids(ids)
            part = _Part(state, parsed.values, state.row_map, np.empty(0, np.uint8))
            chosen[name] = np.unique(self._find(_Piece(part, None), deliver=False).rows)
            needed += len(chosen[name]) * state.table.row_bytes + StaticTier.index_bytes(state.table.rows)
        if needed > self.budget.tier_bytes:
            smallest = Budget.smallest(self._needs, needed)
            raise BudgetError(smallest, self.budget.memory_bytes, "hold the static rows asked for")
        return chosen

    def _highest_degrees(self, tables: dict[str, Table]) -> dict[str, NDArray[np.int64]]:
        """The budget for tiers, shared by the tables' sizes; the highest degrees that fit into each share."""
        total = sum(t.data_bytes for t in tables.values())
        chosen = {}
        for name, table in tables.items():
            share = self.budget.tier_bytes * table.data_bytes // max(1, total) - StaticTier.index_bytes(table.rows)
            count = max(0, min(table.rows, share // table.row_bytes))
            ranked = table.rows_by_degree(count) if count else None
            chosen[name] = np.empty(0, np.int64) if ranked is None else np.sort(ranked.astype(np.int64))
        return chosen

    # Explaining.

    def plan(self, ids: Any) -> Plan:
        """What :meth:`read` would do for these ids: hits, pages, reads, bytes, forecast. Reads nothing. Raises IdError."""
        self._ready()
        tables, forecast = [], 0.0
        for name, value in self._by_table(ids).items():
            state, parsed = self._states[name], parse_ids(value)
            tables.append(self._plan_table(state, parsed.values))
            forecast += tables[-1].forecast_seconds
        return Plan(tuple(tables), self.engine.name, self.model.calibrated, forecast)

    def _plan_table(self, state: _TableState, ids: NDArray[np.int64]) -> TablePlan:
        hits: dict[str, int] = dict.fromkeys((t.name for t in state.tiers), 0)
        distinct = pages = reads = read_bytes = missed = 0
        part = _Part(state, ids, state.row_map, np.empty(0, np.uint8))
        for piece in self._pieces_of(part):
            found = self._find(piece, deliver=False)
            extents = self._extents(piece.part, found)
            hits = {k: v + found.hits[k] for k, v in hits.items()}
            missed += len(extents.keys)
            distinct += extents.distinct_rows
            pages += extents.wanted_pages
            reads += extents.reads
            read_bytes += extents.bytes_read
        row_bytes = state.table.row_bytes
        return TablePlan(
            state.table.name, len(ids), hits, missed, distinct, pages, reads, len(ids) * row_bytes, read_bytes,
            read_bytes / (distinct * row_bytes) if distinct else 0.0, self.model.seconds(reads, read_bytes), self.model.gap_pages_max,
        )  # fmt: skip

    def stats(self) -> ReaderStats:
        """What has been counted since the reader was opened (the filling of the static tier is not in the requests)."""
        counted = self._ready().counters()
        histogram = tuple(
            (round(2.0**b * 1.024, 3), int(counted[C.LATENCY + b])) for b in range(C.LATENCY_BUCKETS) if counted[C.LATENCY + b]
        )
        return self._counts.stats(
            engine=self.engine.name, access=self.access, reads=int(counted[C.READS]), bytes_read=int(counted[C.BYTES_READ]),
            short_reads=int(counted[C.SHORT_READS]), seconds_waiting=counted[C.NS_WAIT] / 1e9,
            seconds_verifying=counted[C.NS_VERIFY] / 1e9, seconds_copying=counted[C.NS_COPY] / 1e9, latency_histogram=histogram,
        )  # fmt: skip

    def memory(self) -> dict[str, int]:
        """Bytes of the budget, by use: what is held, and ``unused``."""
        b = self.budget
        tiers = sum(tier.memory_bytes for state in self._states.values() for tier in state.tiers)
        held = {
            "row_maps": b.row_map_bytes, "page_checksums": b.checksum_bytes, "staging": b.staging_bytes, "scratch": b.scratch_bytes,
            "tiers": tiers,
        }  # fmt: skip
        return held | {"unused": b.memory_bytes - sum(held.values())}

    # Ending.

    def close(self) -> None:
        """Wait for what is under way, then give everything back. May be called more than once."""
        if self._closed:
            return
        self._closed = True
        if self._engine is not None and self._pid == os.getpid():
            with self._idle:
                while self._open_requests:
                    self._idle.wait()
            self._planner.shutdown()
            self._helpers.shutdown()
            self._engine.close()
        for state in self._states.values():
            state.files.close()
        self._states = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.store, self._options)

    def __repr__(self) -> str:
        return f"<Reader of {str(self.store.path)!r} through {self.engine.name}, {self.budget.memory_bytes:,} bytes>"


def _reopen(store: Store, options: dict[str, Any]) -> Reader:
    return Reader(store, **options)


class _Counts:
    """Counts that the reader keeps itself; the engine keeps the others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._hits: dict[str, int] = {}

    def add(self, hits: Mapping[str, int] | None = None, **values: float) -> None:
        with self._lock:
            for key, value in values.items():
                self._values[key] = self._values.get(key, 0) + value
            for tier, count in (hits or {}).items():
                self._hits[tier] = self._hits.get(tier, 0) + count

    def stats(self, **engine: Any) -> ReaderStats:
        with self._lock:
            return ReaderStats(hits=dict(self._hits), **self._values, **engine)  # type: ignore[arg-type]


_announced = False


def _announce_compilation() -> None:
    """Say on stderr, once, when kernels are about to be compiled: that takes some seconds."""
    global _announced
    if _announced or plan.cut_extents.stats.cache_hits or _compiled(plan.cut_extents):
        return
    _announced = True
    print("featstore: compiling its kernels for this processor; this happens once and takes some seconds", file=sys.stderr)


def _compiled(kernel: Any) -> bool:
    """Whether numba has a compiled form of a kernel in memory or on disk."""
    folder = kernel._cache.cache_path
    prefix = f"{kernel.py_func.__module__.rpartition('.')[2]}.{kernel.__name__}-"
    return bool(kernel.signatures) or (os.path.isdir(folder) and any(name.startswith(prefix) for name in os.listdir(folder)))
