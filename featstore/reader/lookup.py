"""From ids to rows: cutting a request into pieces, the map, the tiers.

A request of many ids is cut into pieces, so that planning needs a fixed amount of memory whatever the
request's size: not by position but by ranges of rows, so that what lies together on disk is still planned
together. A histogram of the rows gives the ranges; each costs one pass over the ids.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import empty_rows
from featstore.base.dtypes import dtype_from_name
from featstore.base.ids import check_out, finished, parse_ids, unshared
from featstore.base.system import submitted
from featstore.engine.files import Access, TableFiles
from featstore.errors import IdError
from featstore.plan.budget import TableNeed
from featstore.plan.extents import (
    RANGE_BINS,
    RowRange,
    ascending,
    cut_ranges,
    row_histogram,
    rows_of_ids,
    select_rows,
)
from featstore.reader.report import Counts
from featstore.storage.store import Table
from featstore.tiers.static import StaticRows
from featstore.tiers.team import Team

_ALONE_BYTES = 2 * 2**20  # from here on, looking up and copying are shared with the helper threads,
_SHARE_BYTES, _SHARES_PER_THREAD = 2**18, 4  # in such shares
_ID_BYTES = 64  # what looking up one id weighs in that
_SMALL_IDS = 2**14  # up to here, handing a request to another thread costs more than it saves
_SAMPLED_IDS = 2**8  # of a larger request, that are looked up to see whether the tier has them all
_STEP_IDS = 2**18
_RANGES_MAX = 16  # ranges that ids are cut into at once: each costs one pass over them
NONE = np.empty(0, np.int32)
_UNSERVED = np.empty(0, np.uint8)
_NOWHERE = np.empty(0, np.uint8)


def table_need(table: Table, verify: bool, by_row: bool = False) -> TableNeed:
    """What a reader holds for a table whatever its budget."""
    order = table.entry.order
    map_bytes = (
        0
        if by_row or order.row_of_node is None
        else table.rows * dtype_from_name(order.row_of_node.dtype).itemsize
    )
    return TableNeed(map_bytes, 4 * table.layout.pages if verify else 0, table.row_bytes)


class TableState:
    """What a reader holds for one table: the map, the open files with their checksums, the tiers."""

    def __init__(self, table: Table, verify: bool, access: Access, by_row: bool = False) -> None:
        self.table = table
        table.store.check_held()
        row_map = None if by_row else table.row_of_node()
        self.row_map: NDArray[Any] = NONE if row_map is None else row_map
        store = table.store
        checksums = store.load(table.entry.page_checksums) if verify else None
        paths = [store.path / table.entry.chunk_path(chunk) for chunk in range(table.layout.chunks)]
        self.files = TableFiles(paths, table.layout, checksums, access)
        self.tiers: list[StaticRows] = []

    def load_kernels(self, team: Team) -> None:
        """Run every kernel of a lookup on nothing, so that numba loads (or compiles) it now and not in the
        middle of a read: a process that forks while another of its threads holds numba's lock leaves a child
        that can never take it."""
        part = Part(self, np.empty(0, np.int64), self.row_map, np.empty(0, np.uint8))
        piece = Piece(part, RowRange(0, 0, 0, 0))
        found = Found(piece)
        rows = self.table.rows
        ascending(part.ids)
        rows_of_ids(part.ids, part.row_map, rows, found.rows)
        row_histogram(part.ids, part.row_map, rows, 0, np.zeros(RANGE_BINS, np.int64))
        select_rows(part.ids, part.row_map, rows, 0, 0, 0, found.rows, found.positions)
        for tier in self.tiers:
            tier.serve(found.rows, found.positions, found.served, _NOWHERE)
            tier.serve_ids(part.ids, part.row_map, rows, _NOWHERE, team)
            team.load_kernels()


class Part:
    """Ids of one table and where their rows go: the row of ids[i] to places[i] of ``out``, or to i where
    ``places`` is empty. ``row_map`` is empty where the ids are rows. ``found`` is its lookup, where that has
    been done already."""

    def __init__(
        self, state: TableState, ids: NDArray[np.int64], row_map: NDArray[Any], out: NDArray[np.uint8],
        places: NDArray[np.int32] = NONE,
    ) -> None:  # fmt: skip
        self.state = state
        self.ids = ids
        self.row_map = row_map
        self.out = out
        self.places = places
        self.found: Found | None = None

    @property
    def out_rows(self) -> int:
        """Rows that ``out`` has room for; none where there is no destination."""
        return len(self.out) // self.state.table.row_bytes

    def slice(self, begin: int, end: int) -> Part:
        """The part that ids[begin:end] are."""
        if begin == 0 and end >= len(self.ids):
            return self
        row_bytes = self.state.table.row_bytes
        if len(self.places):
            return Part(self.state, self.ids[begin:end], self.row_map, self.out, self.places[begin:end])
        return Part(
            self.state, self.ids[begin:end], self.row_map, self.out[begin * row_bytes : end * row_bytes]
        )


@dataclass(frozen=True)
class RunPart:
    """Runs of rows of one table, int64 [n, 2], where in ``out`` they go, int64 [n] or None for one after the
    other, and out."""

    state: TableState
    runs: NDArray[np.int64]
    places: NDArray[np.int64] | None
    out: NDArray[np.uint8]


class Piece:
    """What is planned at once: all ids of a part, or those whose rows are in ``range``."""

    def __init__(self, part: Part, range_: RowRange | None) -> None:
        self.part = part
        self.range = range_
        self.count = len(part.ids) if range_ is None else range_.count


class Found:
    """A piece after its lookup: rows, the positions they go to (empty: in order), which are served, hits of
    each tier."""

    def __init__(self, piece: Piece) -> None:
        tiers = piece.part.state.tiers
        self.rows = np.empty(piece.count, np.int64)
        self.positions = piece.part.places if piece.range is None else np.empty(piece.count, np.int32)
        self.served = np.zeros(piece.count, np.uint8) if tiers else _UNSERVED
        self.hits = dict.fromkeys((tier.name for tier in tiers), 0)


def pieces_of(part: Part, ids_max: int) -> Iterator[Piece]:
    """Cut a part's ids into pieces of at most ``ids_max``. Raises IdError for a bad id of a part that needs
    cutting."""
    rows = part.state.table.rows
    if len(part.ids) > ids_max and len(part.row_map) == 0 and ascending(part.ids):
        for at in range(0, len(part.ids), ids_max):  # what lies together is together already
            yield Piece(part.slice(at, at + ids_max), None)
        return
    shift = max(0, (rows - 1).bit_length() - (RANGE_BINS.bit_length() - 1))
    step = ids_max * _RANGES_MAX
    for at in range(0, len(part.ids), step):
        run = part.slice(at, at + step)
        if len(run.ids) <= ids_max:
            yield Piece(run, None)
            continue
        counts = np.zeros(RANGE_BINS, np.int64)
        _check(run, row_histogram(run.ids, run.row_map, rows, shift, counts))
        for rows_range in cut_ranges(counts, shift, ids_max):
            yield Piece(run, rows_range)


def _check(part: Part, bad: int) -> None:
    """Raise IdError where a kernel found a bad id."""
    if bad >= 0:
        table = part.state.table
        raise IdError(
            f"node id {part.ids[bad]} is out of range: table {table.name!r} has {table.rows:,} rows "
            + (f"(ids 0 to {table.rows - 1:,})" if table.rows else "(none)")
        )


def _is_mapping(value: Any) -> bool:
    return value is not None and type(value) is not np.ndarray and isinstance(value, Mapping)


def held_rows(states: Mapping[str, TableState], ids: Any, out: Any, counts: Counts, team: Team) -> Any:
    """The rows of a request of the one table there is, if its one tier has them all: found and copied in one
    go, by a team. None for any other request. Raises what :func:`parse_ids` and :func:`check_out` do."""
    started = time.perf_counter()
    if len(states) != 1 or _is_mapping(ids) or _is_mapping(out):
        return None
    (state,) = states.values()
    if len(state.tiers) != 1:
        return None
    table, parsed = state.table, parse_ids(ids)
    count = len(parsed.values)
    if count == 0:
        return None
    tier, what = state.tiers[0], (state.row_map, table.rows)
    if count > _SMALL_IDS and not tier.has(parsed.values[:: count // _SAMPLED_IDS].copy(), *what, team):
        return None  # before there is memory for them all
    shape = (*parsed.shape, *table.row_shape)
    rows = empty_rows(count, table.row_bytes) if out is None else check_out(out, shape, table.dtype)
    if out is not None and unshared(parsed, [rows]) is not parsed:
        return None  # before rows are put over the ids
    for begin in range(0, count, _STEP_IDS):  # an interrupt comes through between
        ids = parsed.values[begin : begin + _STEP_IDS]
        to = rows[begin * table.row_bytes : (begin + len(ids)) * table.row_bytes]
        if not tier.serve_ids(ids, *what, to, team):
            return None
    counts.add_held(tier.name, count, count * table.row_bytes, time.perf_counter() - started)
    return finished(rows, shape, table.dtype, parsed.tensor) if out is None else out


def find_small(part: Part, ids_max: int, helpers: ThreadPoolExecutor) -> bool:
    """Serve a small part from the tiers in the caller's thread, copying included; True if they held all of
    it. What they did not hold is left in ``part.found`` for the planning. Raises IdError."""
    if not part.state.tiers or len(part.ids) > min(_SMALL_IDS, ids_max):
        return False
    part.found = find(Piece(part, None), helpers, deliver=True)
    return sum(part.found.hits.values()) == len(part.ids)


def find(piece: Piece, helpers: ThreadPoolExecutor, *, deliver: bool) -> Found:
    """Map a piece's ids to rows and ask the tiers; with ``deliver``, what they hold is copied out. Raises
    IdError."""
    part, state = piece.part, piece.part.state
    if part.found is not None:
        return part.found
    found = Found(piece)
    if piece.range is not None:
        r = piece.range
        rows_max = state.table.rows
        got = select_rows(
            part.ids, part.row_map, rows_max, r.low, r.high, r.skip, found.rows, found.positions
        )
        if got != piece.count:
            raise IdError(
                "the node ids were changed while they were being read; pass a copy, or wait for the result"
            )
        if len(part.places):
            found.positions[:] = part.places[found.positions]
    lock = threading.Lock()

    def work(begin: int, end: int) -> None:
        rows = found.rows[begin:end]
        if piece.range is None:
            bad = rows_of_ids(part.ids[begin:end], part.row_map, state.table.rows, rows)
            _check(part, bad if bad < 0 else begin + bad)
        out = part.out if len(found.positions) else part.out[begin * state.table.row_bytes :]
        for tier in state.tiers:
            hits = tier.serve(
                rows, found.positions[begin:end], found.served[begin:end], out if deliver else _NOWHERE
            )
            with lock:
                found.hits[tier.name] += hits

    weight = _ID_BYTES + (state.table.row_bytes if deliver and state.tiers else 0)
    _in_parallel(work, piece.count, weight, helpers)
    return found


def _in_parallel(
    work: Callable[[int, int], None], n: int, weight_bytes: int, helpers: ThreadPoolExecutor
) -> None:
    """work(begin, end) over [0, n), on the helper threads too where it is worth it.

    Whoever has time takes the next share, so a helper that wakes late holds nobody up. When this returns,
    also by an exception or an interrupt, no helper works on it any more: they write into the caller's memory.
    """
    threads = helpers._max_workers + 1
    share = max(1, _SHARE_BYTES // weight_bytes, -(-n // (_SHARES_PER_THREAD * threads)))
    if n * weight_bytes < _ALONE_BYTES:
        work(0, n)
        return
    shares = [(begin, min(n, begin + share)) for begin in range(0, n, share)]
    errors: list[BaseException] = []

    def take_shares(busy: threading.RLock) -> None:
        if not busy.acquire(blocking=False):
            return  # the caller has left already
        try:
            while True:
                try:
                    begin, end = shares.pop()
                except IndexError:
                    return
                work(begin, end)
        except BaseException as error:
            errors.append(error)
            shares.clear()
        finally:
            busy.release()

    # taken again by who has it, where an interrupt came between taking it and knowing that
    busy, interrupted = [threading.RLock() for _ in range(threads)], None
    try:
        with suppress(RuntimeError):  # a reader that is being closed: this thread does it all
            for lock in busy[1:]:
                submitted(helpers, take_shares, lock)
        take_shares(busy[0])
    finally:
        while True:
            try:
                shares.clear()
                for lock in busy:
                    lock.acquire()
                break
            except KeyboardInterrupt as error:
                interrupted = error
    if errors:
        raise errors[0]
    if interrupted is not None:
        raise interrupted
