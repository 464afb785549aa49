"""Batched packing: rows of the base table, read once and in order, appended to many segments at once.

DiskGNN's batched packing (section 5.2): not mini-batch by mini-batch, which would read the table at random as
often as training does, but slab by slab of the base table; from each slab every segment takes its rows. A
segment is a run of rows in a table that is being written, and has its rows in the order of the base table, so
all reads and, thanks to a buffer for each segment, all writes are long and sequential. Where the buffers
would become too small for that, the segments are packed in several episodes, each a pass over the table.

At a checkpoint every segment's rows so far are written, the unfinished last pages too. What a segment has at
that point follows from the slab alone, so a resumed pass needs to know no more than that: it reads the
unfinished pages back and goes on.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import aligned_buffer
from featstore.base.compilation import njit
from featstore.base.native import address_of, memcpy
from featstore.compile.row_lists import RowLists
from featstore.compile.segment_pages import PAGE_WRITE_THREADS, Target, page_buffers
from featstore.errors import BudgetError
from featstore.reader.reader import Reader
from featstore.units import PAGE_BYTES

BUFFER_BYTES_MAX = 2**20
BUFFER_BYTES_MIN = 64 * 2**10
SLAB_BYTES_MAX = 16 * 2**20
INDEX_ROWS = 2**15  # row numbers that are held at once
SEGMENTS_CHECKPOINT_BYTES = 2 * 2**30  # written between two
_SPARE_BUFFERS = PAGE_WRITE_THREADS + 2  # being written while others fill


@njit(cache=True, nogil=True)
def append_rows(
    slab: int,
    first_row: int,
    row_bytes: int,
    rows: NDArray[Any],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    buffers: NDArray[np.int64],
    fills: NDArray[np.int64],
    capacity: int,
    turn: int,
) -> int:
    """Copy rows from a slab of the table that starts with ``first_row`` to the buffers of segments, from
    segment ``turn`` on: of segment i rows[begins[i]:ends[i]], to buffers[i] + fills[i]. ``begins`` and
    ``fills`` move on.

    Stops at a segment whose buffer has no room for another row. Returns its number; after the last one, how
    many there are.
    """
    for i in range(turn, buffers.shape[0]):
        at, fill = begins[i], fills[i]
        while at < ends[i] and fill + row_bytes <= capacity:
            memcpy(buffers[i] + fill, slab + (np.int64(rows[at]) - first_row) * row_bytes, row_bytes)
            fill += row_bytes
            at += 1
        begins[i], fills[i] = at, fill
        if at < ends[i]:
            return i
    return len(buffers)


class Segment:
    """A run of rows of a target, in the making: rows ``first_row`` to ``first_row + rows``, in the order of
    the base table."""

    def __init__(self, target: Target, first_row: int, rows: int) -> None:
        self.target = target
        row_bytes = target.layout.row_bytes
        self.begin_byte = first_row * row_bytes
        self.end_byte = (first_row + rows) * row_bytes
        self.page = self.begin_byte // PAGE_BYTES  # where the buffer's content begins
        self.fill = self.begin_byte - self.page * PAGE_BYTES
        self.buffer: NDArray[np.uint8] | None = None
        self.address = 0

    def hold(self, buffer: NDArray[np.uint8]) -> None:
        """Fill this buffer from now on."""
        self.buffer, self.address = buffer, address_of(buffer)

    def begun(self) -> bool:
        """Whether its buffer has rows of the page under way."""
        return self.buffer is not None and self.fill > max(0, self.begin_byte - self.page * PAGE_BYTES)

    def unfinished(self) -> tuple[int, int, NDArray[np.uint8]]:
        """What its buffer has of the page under way: the page, the byte within it, and the bytes, uint8."""
        assert self.buffer is not None
        low = max(0, self.begin_byte - self.page * PAGE_BYTES)
        return self.page, low, self.buffer[low : self.fill]

    def resume(self, rows_done: int, buffer: Callable[[], NDArray[np.uint8]]) -> None:
        """Go on after ``rows_done`` rows that a checkpoint wrote: bring back what pages that were not whole
        have of them."""
        if rows_done == 0:
            return
        first, head = divmod(self.begin_byte, PAGE_BYTES)
        at = self.begin_byte + rows_done * self.target.layout.row_bytes
        self.page, self.fill = divmod(at, PAGE_BYTES)
        if head:
            high = min(PAGE_BYTES, at - first * PAGE_BYTES)
            self.target.add(first, head, self.target.bring_back(first, head, high))
            # what is before is the edge's
            self.begin_byte = max(self.begin_byte, min(at, (first + 1) * PAGE_BYTES))
        if self.fill == 0 or (head and self.page == first):
            return
        content = self.target.bring_back(self.page, 0, self.fill)
        if at == self.end_byte:
            self.target.add(self.page, 0, content)
        else:
            whole = buffer()
            whole[: self.fill] = content
            self.hold(whole)


class Packing:
    """Segments that are packed together; see the module's text."""

    def __init__(self, row_bytes: int, buffer_bytes: int, buffers: int) -> None:
        self._row_bytes = row_bytes
        self._buffer_bytes = buffer_bytes
        self._free: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()
        self._unused = page_buffers(buffers, buffer_bytes)

    def buffer(self) -> NDArray[np.uint8]:
        """A free buffer; waits for one that is being written."""
        if self._free.empty() and self._unused:
            return self._unused.pop()
        return self._free.get()

    def append(
        self, segments: list[Segment], slab: NDArray[np.uint8], first_row: int, rows: NDArray[Any],
        ends: NDArray[np.int64]
    ) -> None:  # fmt: skip
        """Append to segment i the next rows up to ``ends[i]`` of ``rows`` (ascending for each, and at least
        one for each), which lie in a slab of the base table that starts with ``first_row``."""
        begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        for segment in segments:
            if segment.buffer is None:
                segment.hold(self.buffer())
        buffers = np.array([segment.address for segment in segments], np.int64)
        fills = np.array([segment.fill for segment in segments], np.int64)
        turn, at, row_bytes, capacity = 0, address_of(slab), self._row_bytes, self._buffer_bytes
        while turn < len(segments):
            turn = append_rows(at, first_row, row_bytes, rows, begins, ends, buffers, fills, capacity, turn)
            if turn < len(segments):
                segment = segments[turn]
                segment.fill = int(fills[turn])
                self.flush(segment)
                buffers[turn], fills[turn] = segment.address, segment.fill
        for segment, fill in zip(segments, fills.tolist(), strict=True):
            segment.fill = fill
            if segment.page * PAGE_BYTES + fill == segment.end_byte:
                self.flush(segment)

    def flush(self, segment: Segment) -> None:
        """Write a segment's whole pages; pages that it shares with others, and at its end the last one,
        become edges."""
        buffer, target = segment.buffer, segment.target
        if buffer is None:
            return
        begin, end = segment.page * PAGE_BYTES, segment.page * PAGE_BYTES + segment.fill
        first = segment.page
        if begin < segment.begin_byte:  # the first page has another segment's rows too
            low, high = segment.begin_byte - begin, min(PAGE_BYTES, segment.fill)
            if high < PAGE_BYTES and end < segment.end_byte:
                return  # it will have more of this one's
            target.add(first, low, buffer[low:high])
            first += 1
        last = max(first, end // PAGE_BYTES)
        tail = buffer[(last - segment.page) * PAGE_BYTES : segment.fill]
        if end == segment.end_byte:
            target.add(last, 0, tail)
            segment.buffer, segment.fill = None, 0
        else:
            following = self.buffer()
            following[: len(tail)] = tail
            segment.hold(following)
            segment.fill = len(tail)
        low = (first - segment.page) * PAGE_BYTES
        segment.page = last
        if last > first:
            pages = buffer[low : low + (last - first) * PAGE_BYTES]
            target.write(first, pages, lambda: self._free.put(buffer))
        else:
            self._free.put(buffer)


@dataclass(frozen=True)
class Route:
    """What goes to one target: list i of ``rows`` (ascending rows of the base table) is the segment of the
    target from row ``first_rows[i]`` on."""

    rows: RowLists
    first_rows: NDArray[np.int64]
    target: Target


@dataclass(frozen=True)
class SegmentPlan:
    """How to pack: rows a slab, the size of a buffer, and episodes, each a list of (route, list) numbers."""

    slab_rows: int
    buffer_bytes: int
    buffers: int
    episodes: tuple[tuple[tuple[int, int], ...], ...]


def _smallest_buffer(row_bytes: int) -> int:
    return -(-max(BUFFER_BYTES_MIN, 2 * row_bytes + PAGE_BYTES) // PAGE_BYTES) * PAGE_BYTES


def needed_bytes(row_bytes: int) -> int:
    """The memory in which :func:`plan_packing` always finds a way: two slabs take a quarter of it, or are of
    one row each."""
    return ((_SPARE_BUFFERS + 1) * (_smallest_buffer(row_bytes) + PAGE_BYTES) + 2 * row_bytes) * 4 // 3 + 1


class PackingSizes(NamedTuple):
    """Rows a slab, the size of a buffer, segments that are packed at once, and how often the table is gone
    through."""

    slab_rows: int
    buffer_bytes: int
    per_episode: int
    episodes: int


def packing_sizes(segments: int, row_bytes: int, memory_bytes: int) -> PackingSizes:
    """Buffers as large as the memory allows, for so many segments in as few episodes. Raises BudgetError."""
    slab_rows = max(1, min(SLAB_BYTES_MAX, memory_bytes // 8) // row_bytes)
    left = memory_bytes - 2 * slab_rows * row_bytes
    smallest = _smallest_buffer(row_bytes)
    at_once = min(segments, left // (smallest + PAGE_BYTES) - _SPARE_BUFFERS)
    if segments and at_once < 1:
        raise BudgetError(
            needed_bytes(row_bytes),
            memory_bytes,
            "hold a slab of the table and a buffer for each of a few segments",
        )
    episodes = -(-segments // max(1, at_once))
    per_episode = -(-segments // max(1, episodes))
    each = left // max(1, per_episode + _SPARE_BUFFERS) - PAGE_BYTES
    size = max(smallest, min(BUFFER_BYTES_MAX, each) // PAGE_BYTES * PAGE_BYTES)
    return PackingSizes(slab_rows, size, per_episode, episodes)


def plan_packing(routes: list[Route], row_bytes: int, memory_bytes: int) -> SegmentPlan:
    """How to pack all lists of these routes. Raises BudgetError."""
    segments = [(r, int(i)) for r, route in enumerate(routes) for i in np.flatnonzero(route.rows.lengths())]
    sizes = packing_sizes(len(segments), row_bytes, memory_bytes)
    step = max(1, sizes.per_episode)
    cut = tuple(tuple(segments[at : at + step]) for at in range(0, len(segments), step))
    return SegmentPlan(sizes.slab_rows, sizes.buffer_bytes, sizes.per_episode + _SPARE_BUFFERS, cut)


def bounds_of(route: Route, segments: list[int], starts: NDArray[np.int64]) -> NDArray[Any]:
    """[segments, starts]: how many rows of each list lie before each of ``starts``; int32, or int64 for
    longer lists."""
    longest = max((int(route.rows.offsets[i + 1] - route.rows.offsets[i]) for i in segments), default=0)
    out = np.empty((len(segments), len(starts)), bounds_dtype(longest))
    for at, index in enumerate(segments):
        out[at] = np.searchsorted(route.rows[index], starts)
    return out


def bounds_dtype(longest: int) -> np.dtype[Any]:
    """Of numbers up to the length of the longest list."""
    return np.dtype(np.int32 if longest < 2**31 else np.int64)


def pack_episode(
    reader: Reader, table: str, routes: list[Route], plan: SegmentPlan, episode: int, begin_slab: int,
    save: Callable[[int], None], tick: Callable[[str, int], None],
) -> None:  # fmt: skip
    """Pack one episode's segments, from slab ``begin_slab`` of the base table on. ``save(slab)`` is called
    now and then, and at the end, when all that lies before a slab is durable. Raises what reading and writing
    raise."""
    base, row_bytes = reader.store.table(table), routes[0].target.layout.row_bytes
    slabs = -(-base.rows // plan.slab_rows)
    starts = np.minimum(np.arange(slabs + 1, dtype=np.int64) * plan.slab_rows, base.rows)
    packing, chosen = Packing(row_bytes, plan.buffer_bytes, plan.buffers), plan.episodes[episode]
    segments = [segment_of(routes, r, i) for r, i in chosen]
    bounds = np.concatenate(
        [bounds_of(route, [i for q, i in chosen if q == r], starts) for r, route in enumerate(routes)]
    )
    for segment, bound in zip(segments, bounds, strict=True):
        segment.resume(int(bound[begin_slab]), packing.buffer)
    for route in routes:
        route.target.check_resumed()
    wanted = [s for s in range(begin_slab, slabs) if (bounds[:, s + 1] > bounds[:, s]).any()]
    since = 0
    for slab, data in _slabs(reader, table, starts, wanted, plan.slab_rows * row_bytes):
        tick("read", len(data))
        for turns, rows, ends in _rows_of_slab(routes, chosen, bounds[:, slab], bounds[:, slab + 1]):
            packing.append([segments[turn] for turn in turns], data, int(starts[slab]), rows, ends)
        written = int((bounds[:, slab + 1] - bounds[:, slab]).sum()) * row_bytes
        tick("write", written)
        since += written
        if since >= SEGMENTS_CHECKPOINT_BYTES or slab == wanted[-1]:
            since = 0
            for segment in segments:
                packing.flush(segment)
            for route in routes:
                route.target.write_unfinished(
                    s.unfinished() for s in segments if s.target is route.target and s.begun()
                )
            save(slab + 1)


def segment_of(routes: list[Route], route: int, index: int) -> Segment:
    """The segment of a list."""
    r = routes[route]
    return Segment(r.target, int(r.first_rows[index]), int(r.rows.offsets[index + 1] - r.rows.offsets[index]))


def _rows_of_slab(
    routes: list[Route], chosen: tuple[tuple[int, int], ...], lows: NDArray[Any], highs: NDArray[Any]
) -> Iterator[tuple[list[int], NDArray[Any], NDArray[np.int64]]]:
    """What of their lists (from ``lows`` to ``highs``) the chosen segments want of a slab, for several of one
    route at a time, as many as have about INDEX_ROWS: (their numbers, the rows of all, where those of each
    end)."""
    counts = (highs - lows).astype(np.int64)
    for r, route in enumerate(routes):
        mine = [turn for turn in np.flatnonzero(counts).tolist() if chosen[turn][0] == r]
        ends = np.cumsum(counts[mine])
        begin = 0
        while begin < len(mine):
            before = int(ends[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, before + INDEX_ROWS, side="right")))
            rows = np.empty(int(ends[end - 1]) - before, route.rows.dtype)
            at = 0
            for turn in mine[begin:end]:
                first, count = int(route.rows.offsets[chosen[turn][1]]) + int(lows[turn]), int(counts[turn])
                route.rows.read(first, rows[at : at + count])
                at += count
            yield mine[begin:end], rows, ends[begin:end] - before
            begin = end


def _slabs(
    reader: Reader, table: str, starts: NDArray[np.int64], wanted: list[int], slab_bytes: int
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(number, bytes) of the slabs asked for; the next is read while one is in use."""
    row_shape = reader.store.table(table).row_shape
    dtype, row_bytes = reader.store.table(table).dtype, reader.store.table(table).row_bytes
    buffers = [aligned_buffer(slab_bytes) for _ in range(2)]

    def submit(turn: int) -> tuple[object, NDArray[np.uint8]]:
        low, high = int(starts[wanted[turn]]), int(starts[wanted[turn] + 1])
        data = buffers[turn % 2][: (high - low) * row_bytes]
        out = data.view(dtype).reshape(high - low, *row_shape)
        return reader.submit_runs({table: [(low, high)]}, out={table: out}), data

    ahead = submit(0) if wanted else None
    for turn, slab in enumerate(wanted):
        assert ahead is not None
        request, data = ahead
        request.result()  # type: ignore[attr-defined]
        ahead = submit(turn + 1) if turn + 1 < len(wanted) else None
        yield slab, data
