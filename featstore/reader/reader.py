"""The reader: tiers, plan and engine behind one call.

For each piece of a request (:mod:`featstore.reader.lookup`) the reader maps ids to rows, lets its tiers serve
what they hold, plans the reads for the rest and hands them to the engine; while the engine reads one piece,
the next is planned. Planning is done by the reader's own thread; only a small request that the tiers hold
whole is answered in the caller's. Several requests may be under way, from several threads; they share the
engine's queue.

A reader belongs to one process. After a fork it opens its own engine when it is first used; when pickled it
is made anew from its store and options.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_flag, as_table_names
from featstore.base.buffers import populate
from featstore.base.called import called, unusual
from featstore.base.compilation import announce_compilation
from featstore.base.environment import MEMORY
from featstore.base.ids import parse_ids
from featstore.base.sheets import Sheet, Shown
from featstore.base.system import available_cores
from featstore.base.threads import Permits, Wake, close_later, closed_later, shut_down, thread_pool
from featstore.engine import counters as C
from featstore.engine import engine_class, make
from featstore.engine.base import Engine
from featstore.engine.files import Access
from featstore.engine.request import Request
from featstore.errors import ClosedError, IdError, NotInMemoryError
from featstore.plan.budget import Budget
from featstore.plan.cost import DeviceModel, reading_model
from featstore.plan.extents import cut_extents
from featstore.reader.feeder import Feeder, MakeLane
from featstore.reader.lookup import NONE, Part, TableState, find_small, held_rows, table_need
from featstore.reader.options import as_static_bytes, check_reading, chosen_engine, memory_said
from featstore.reader.planner import Planner
from featstore.reader.report import Counts, Plan, ReaderStats
from featstore.reader.requests import as_tables, parse_request, parse_run_request
from featstore.reader.sheets import reader_sheet
from featstore.reader.static_rows import StaticIds, static_members
from featstore.storage.store import OpenStore, as_store, check_on_disk
from featstore.tiers.static import StaticRows
from featstore.tiers.team import Team
from featstore.units import PAGE_BYTES, parse_bytes

QUEUE_DEPTH = 128
#: Bytes that ``submit`` copies itself where all are in memory: to hand them over takes about as long.
_SUBMITTED_BYTES_MAX = 8 << 20
#: Requests of ``submit`` that may wait or be under way; a further one blocks.
IN_FLIGHT_MAX = 16

_starting = threading.Lock()  # held while a forked child opens its own engine
_open_readers: weakref.WeakSet[Reader] = weakref.WeakSet()


def _close_all() -> None:
    """Close what a program left open, before the interpreter stops the engines' threads: joining them later
    would hang."""
    closed_later()
    for reader in list(_open_readers):
        reader.close()


atexit.register(_close_all)


def _renew_lock() -> None:
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class Reader(Shown):
    """Reads rows of a store's tables; made by :meth:`featstore.Store.reader`. A context manager.

    Args:
        store: the open store.
        memory: budget for all that the reader holds (maps, checksums, staging, scratch, tiers), bytes or
            ``"2GiB"``; by default as ``FEATSTORE_MEMORY`` says, or 1 GiB. Results come on top.
        static: rows to keep in memory: ``"degree"`` for those of the highest degree, as many as the budget
            allows; node ids (or a mapping of table names to node ids); None for no static tier; ``"auto"``
            for ``"degree"`` where the store knows degrees.
        static_memory: for these rows, of ``memory``, bytes or a size; 0 for a reader without any. By default
            what is left over.
        tables: the names of the tables to read; all by default.
        engine: ``"uring"``, ``"threads"``, ``"mmap"``, or ``"auto"``: as ``FEATSTORE_ENGINE`` says, else the
            calibrated one; without, or where ``threads`` or ``model`` is given, the first that works.
        queue_depth: reads under way at most.
        threads: that read, verify and copy rows, at most; by default as many as the device model says, for
            engine ``"uring"``, and up to 32 for ``"threads"``. Each reads through a ring of its own.
        verify: check the checksum of every page read; with ``engine="mmap"`` when it has come into memory.
        model: the device model to plan with; by default the calibrated one of this device.
        by_row: ids are row numbers, positions in the order on disk; no map is held.

    Raises ArgumentError, BudgetError, CorruptionError, DeviceError, FormatError; EngineError where the engine
    asked for does not work here.
    """

    def __init__(
        self, store: OpenStore, *, memory: int | str = MEMORY, static: StaticIds = "auto",
        static_memory: int | str | None = None, tables: Sequence[str] | None = None, engine: str = "auto",
        queue_depth: int = QUEUE_DEPTH, verify: bool = True, model: DeviceModel | None = None,
        by_row: bool = False, threads: int | None = None,
    ) -> None:  # fmt: skip
        said = {
            "memory": (memory := memory_said(memory)[0]), "static": static, "tables": tables,
            "static_memory": static_memory, "engine": engine, "queue_depth": queue_depth, "verify": verify,
            "model": model, "by_row": by_row, "threads": threads,
        }  # fmt: skip
        self.given = unusual(Reader, said) | {"memory": memory}  # the options that make another such reader
        self._states: dict[str, TableState] = {}  # first: closing what was never opened looks here
        check_reading(engine, queue_depth, verify, model, threads)
        queue_depth, verify, by_row = int(queue_depth), bool(verify), as_flag(by_row, "by_row")
        self.store = as_store(store)
        self._closed = False
        self._engine: Engine | None = None
        names = list(store.tables) if tables is None else as_table_names(tables, "tables")
        for name in names:
            check_on_disk(store.table(name))
        self._needs = [table_need(store.table(n), verify, by_row) for n in names]
        self.budget = Budget.split(parse_bytes(memory, "memory"), self._needs, as_static_bytes(static_memory))
        announce_compilation(cut_extents)
        self.engine = chosen_engine(store.path, engine, model, threads)
        access = engine_class(self.engine.name).access
        try:
            for name in names:
                self._states[name] = TableState(store.table(name), verify, access, by_row)
            self.access, self.access_because = self._access(access)
            self.model = reading_model(store.path, self.engine.name, self.access, model)
            self.queue_depth, self._threads = queue_depth, threads
            self._start_process()
            self._fill_static(static)
            self._load_kernels()
            _open_readers.add(self)
        except BaseException:
            self.close()
            raise
        self._counts.clear()

    def _access(self, wanted: Access) -> tuple[Access, str]:
        for state in self._states.values():
            if state.files.access != wanted:
                return state.files.access, state.files.buffered_because
        return wanted, ""

    def _start_process(self) -> None:
        """Open what belongs to this process: the engine, threads, locks."""
        closed_later()
        self._counts = Counts()
        threads = self._threads or (self.model.threads if self.engine.name == "uring" else None)
        sizes = self.queue_depth, self.budget.staging_bytes, self.budget.extent_bytes_max
        helpers = min(4, available_cores(), self._threads or 4) - 1
        self._helpers, self._team = thread_pool(max(1, helpers), "featstore-copy"), Team(helpers)
        self._planner = Planner(self.model, self.budget, self._counts, self._helpers)
        self._requests, engine = Permits(IN_FLIGHT_MAX), make(self.engine.name, *sizes, threads)
        self._feeder = Feeder(engine, self._counts, self.store.path)
        # at last, the process after the engine: who closes, or reads in a child, finds all of them or none
        self._engine, self._pid = engine, os.getpid()

    def _load_kernels(self) -> None:
        """Load all that a read runs, by reading nothing; see ``load_kernels`` of ``TableState``."""
        for state in self._states.values():
            state.load_kernels(self._team)
            done = Wake()
            lane = self._planner.empty_lane(state, lambda _: done.set())  # noqa: B023
            assert self._engine is not None
            self._engine.start(lane)
            done.wait()

    def _ready(self) -> Engine:
        if self._closed:
            raise ClosedError("the reader is closed; make another with store.reader()")
        if self._pid != os.getpid():  # after a fork: the parent's threads and ring are not ours
            with _starting:
                if self._pid != os.getpid():
                    self._start_process()
        assert self._engine is not None
        return self._engine

    def _opened(self) -> dict[str, TableState]:
        """What a request is made of: closing meanwhile does not change it."""
        states = self._states
        if self._closed and not states:
            raise ClosedError("the reader is closed; make another with store.reader()")
        return states

    # Reading.

    @property
    def tables(self) -> list[str]:
        """Names of the tables that it reads."""
        return list(self._states)

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[Any]:
        raise NotInMemoryError("a reader is no array in memory: read rows with reader.read(ids)")

    def read(self, ids: Any, *, out: Any = None) -> Any:
        """Rows of ``ids``, in the order asked; duplicates are fine.

        ``ids``: integers of any dtype and shape, NumPy, torch or a list; or a mapping of table names to ids,
        which reads several tables at once and returns a dict. A store of one table needs no name. The result
        has the shape of the ids followed by that of a row: a NumPy array, or a CPU tensor where the ids were
        a tensor. ``out``: a C-contiguous array or tensor to fill and return instead (or a mapping of them).

        Raises IdError, CorruptionError, DeviceError, ClosedError.
        """
        self._ready()
        states = self._opened()
        rows = held_rows(states, ids, out, self._counts, self._team)
        if rows is not None:
            return rows
        finish, parts = parse_request(states, ids, out, copy=False)
        if self._from_tiers(parts):
            return finish()
        return self._wait(
            Request(finish), self._planner.pieces(parts), [part.out for part in parts] if out is None else []
        )

    def _wait(self, request: Request, pieces: Iterator[MakeLane], fresh: list[NDArray[np.uint8]]) -> Any:
        """The result of a request; memory that is ``fresh`` is provided by the system meanwhile."""
        try:
            self._feeder.feed(request, pieces)
            for rows in fresh:
                populate(rows)
            return request.result()
        except BaseException:
            request.abandon()
            raise

    def submit(self, ids: Any, *, out: Any = None, at: Any = None) -> Request:
        """Like :meth:`read`, but returns at once with a :class:`~featstore.engine.request.Request`. ``ids``
        may be changed afterwards; ``out`` belongs to the request until it is done: a small one of rows in
        memory is when this returns. Blocks while too many requests are under way.

        With ``at``, integers as many as ids (or a mapping of such), row i goes to ``out[at[i]]``, and ``out``
        may be longer: so several tables can fill one array. Two ids must not go to the same place."""
        self._ready()
        finish, parts = parse_request(self._opened(), ids, out, copy=True, at=at)
        request, byte_count = Request(finish), sum(len(p.ids) * p.state.table.row_bytes for p in parts)
        if byte_count > _SUBMITTED_BYTES_MAX or not self._answered(request, parts):
            self._submit(request, self._planner.pieces(parts))
        return request

    def _answered(self, request: Request, parts: list[Part]) -> bool:
        """End a small request whose rows are all in the tiers, or of which an id is none."""
        try:
            if not self._from_tiers(parts):
                return False
            request.answer(None)
        except IdError as error:
            self._counts.add(requests=1)
            request.answer(error)
        return True

    def _submit(self, request: Request, pieces: Iterator[MakeLane]) -> Request:
        limit = self._requests
        limit.acquire()
        request.add_done_callback(lambda _: limit.release())
        try:
            self._feeder.feed(request, pieces)
        except BaseException:
            request.abandon()
            raise
        return request

    def _from_tiers(self, parts: list[Part]) -> bool:
        """Answer a small request whose rows are all in the tiers in the caller's thread."""
        begin = time.perf_counter()
        if not all(find_small(part, self.budget.piece_ids_max, self._helpers) for part in parts):
            return False
        for part in parts:
            assert part.found is not None
            self._planner.count_piece(part.state, part.found, 0.0, begin)
            begin = time.perf_counter()
        self._counts.add(requests=1)
        return True

    def read_runs(self, runs: Any, *, out: Any = None, at: Any = None) -> Any:
        """Runs of rows whole, as they stand on disk: what partitions are read with. Tiers are not asked.

        ``runs``: [n, 2] row numbers (not node ids), the first of each run and its end; or a mapping of table
        names to such. Returns an array of shape ``[rows of all runs, *row shape]``, run after run, or fills
        and returns ``out`` of that shape. With ``at``, int64 [n] (or a mapping of such), run i goes to the
        rows of ``out`` from ``at[i]`` on, and ``out`` may be longer. Raises IdError for a run outside the
        table, CorruptionError, DeviceError, ClosedError.
        """
        self._ready()
        finish, parts = parse_run_request(self._opened(), runs, out, at)
        fresh = [part.out for part in parts] if out is None else []
        return self._wait(Request(finish), self._planner.run_pieces(parts), fresh)

    def submit_runs(self, runs: Any, *, out: Any = None, at: Any = None) -> Request:
        """Like :meth:`read_runs`, but returns at once; ``out`` belongs to the request until it is done.
        Blocks while too many requests are under way."""
        self._ready()
        finish, parts = parse_run_request(self._opened(), runs, out, at)
        return self._submit(Request(finish), self._planner.run_pieces(parts))

    def read_pages(self, name: str, pages: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Whole pages of a table's files: page ``pages[i]``, int64 [n], ascending, into the 4 KiB ``out[i]``;
        zero bytes where its file ends before. Raises CorruptionError, DeviceError, ClosedError."""
        self._ready()
        assert out.flags.c_contiguous and out.nbytes == len(pages) * PAGE_BYTES  # noqa: PT018
        pieces = self._planner.page_pieces(self._opened()[name].files, pages, out.reshape(-1).view(np.uint8))
        self._wait(Request(lambda: None), pieces, [])

    # The static tier.

    def _fill_static(self, static: StaticIds) -> None:
        given = "static_memory" in self.given
        members = static_members(self._states, static, self.budget, self._needs, given, self._helpers)
        for name, rows in members.items():
            state = self._states[name]
            if len(rows) == 0:
                continue
            tier = StaticRows(rows, state.table.rows, state.table.row_bytes)
            request = Request(lambda: None)
            self._feeder.feed(request, self._planner.pieces([Part(state, rows, NONE, tier.data.reshape(-1))]))
            request.result()
            state.tiers.append(tier)

    # Explaining.

    def plan(self, ids: Any) -> Plan:
        """What :meth:`read` would do for these ids: hits, pages, reads, bytes, forecast. Reads nothing.
        Raises IdError."""
        self._ready()
        states = self._opened()
        asked = as_tables(states, ids).items()
        tables = tuple(self._planner.plan_table(states[n], parse_ids(value).values) for n, value in asked)
        forecast = sum(table.forecast_seconds for table in tables)
        return Plan(tables, self.engine.name, self.model.calibrated, forecast)

    def stats(self) -> ReaderStats:
        """What has been counted since the reader was opened (the filling of the static tier is not in the
        requests)."""
        counted = self._ready().counters()
        buckets = [b for b in range(C.LATENCY_BUCKETS) if counted[C.LATENCY + b]]
        histogram = tuple((C.latency_edge(b), int(counted[C.LATENCY + b])) for b in buckets)
        return self._counts.stats(
            engine=self.engine.name, access=self.access, reads=int(counted[C.READS]),
            bytes_read=int(counted[C.BYTES_READ]), short_reads=int(counted[C.SHORT_READS]),
            seconds_waiting=int(counted[C.NS_WAIT]) / 1e9, seconds_verifying=int(counted[C.NS_VERIFY]) / 1e9,
            seconds_copying=int(counted[C.NS_COPY]) / 1e9, latency_histogram=histogram,
        )  # fmt: skip

    def memory(self) -> dict[str, int]:
        """Bytes of the budget, by use: what is held, and ``unused``."""
        return self.budget.uses(sum(t.memory_bytes for s in self._states.values() for t in s.tiers))

    # Ending.

    def close(self) -> None:
        """Wait for what is under way, then give everything back. May be called more than once."""
        self._closed = True  # no request begins any more; an interrupted close can be called again
        if self._engine is not None and self._pid == os.getpid():
            self._feeder.close()
            shut_down(self._helpers)
            self._team.close()
            self._engine.close()
        for state in self._states.values():
            state.files.close()
        self._states = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_states", None) and not sys.is_finalizing():
            close_later(self.close)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.store, self.given)

    def _sheet(self) -> Sheet:
        return reader_sheet(self)

    def __repr__(self) -> str:
        return called(f"{self.store!r}.reader", **self.given)


def _reopen(store: OpenStore, options: dict[str, Any]) -> Reader:
    return Reader(store, **options)
