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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import aligned_buffer
from featstore.base.compilation import njit
from featstore.base.native import address_of, memcpy
from featstore.compile.segment_pages import Target
from featstore.compile.segment_plan import WRITES_TOGETHER, Route, SegmentPlan
from featstore.reader.reader import Reader
from featstore.units import PAGE_BYTES

INDEX_ROWS = 2**15  # row numbers that are held at once
SEGMENTS_CHECKPOINT_BYTES = 2 * 2**30  # written between two

#: What is known of a segment while it is made, in an array of int64, [these, segments]: bytes of the target's
#: address space, the page where its buffer's content begins, how many bytes the buffer has of it, and the
#: buffer's number (NO_BUFFER before its first row and after its last).
BEGIN_BYTE, END_BYTE, PAGE, FILL, BUFFER = range(5)
NO_BUFFER = -1
#: What append_rows counts: free buffers, and writes that it has made out.
FREE_BUFFERS, WRITES_MADE = range(2)


@njit(cache=True, nogil=True)
def append_rows(
    slab: int,
    first_row: int,
    row_bytes: int,
    rows: NDArray[Any],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    chosen: NDArray[np.int64],
    state: NDArray[np.int64],
    buffers: int,
    capacity: int,
    free: NDArray[np.int64],
    writes: NDArray[np.int64],
    counts: NDArray[np.int64],
    turn: int,
) -> int:
    """Copy rows from a slab of the table that starts with ``first_row`` to the buffers of segments, from turn
    ``turn`` on: rows[begins[t]:ends[t]] go to segment chosen[t]. ``begins`` and ``state`` move on.

    Buffers lie one after the other from an address on, each of ``capacity`` bytes; ``free`` has the numbers
    of those that are free. One that is full is exchanged for a free one: ``writes`` (int64 [n, 3]) says which
    page of the target its whole pages begin at, how many there are, and in which buffer; what is left over
    goes on in the new one.

    Returns the turn at which a buffer is needed that is not there, at which there is no room for another
    write, or at which a full buffer begins with a page that another segment has a part of; after the last
    one, how many there are.
    """
    for t in range(turn, chosen.shape[0]):
        i = chosen[t]
        while begins[t] < ends[t]:
            if state[BUFFER, i] == NO_BUFFER:
                if counts[FREE_BUFFERS] == 0:
                    return t
                counts[FREE_BUFFERS] -= 1
                state[BUFFER, i] = free[counts[FREE_BUFFERS]]
            at, fill, buffer = begins[t], state[FILL, i], buffers + state[BUFFER, i] * capacity
            while at < ends[t] and fill + row_bytes <= capacity:
                memcpy(buffer + fill, slab + (np.int64(rows[at]) - first_row) * row_bytes, row_bytes)
                fill += row_bytes
                at += 1
            begins[t], state[FILL, i] = at, fill
            if at < ends[t]:
                if state[PAGE, i] * PAGE_BYTES < state[BEGIN_BYTE, i]:
                    return t
                if counts[FREE_BUFFERS] == 0 or counts[WRITES_MADE] == writes.shape[0]:
                    return t
                counts[FREE_BUFFERS] -= 1
                following, pages = free[counts[FREE_BUFFERS]], fill // PAGE_BYTES
                left = fill - pages * PAGE_BYTES
                memcpy(buffers + following * capacity, buffer + pages * PAGE_BYTES, left)
                write = writes[counts[WRITES_MADE]]
                write[0], write[1], write[2] = state[PAGE, i], pages, state[BUFFER, i]
                counts[WRITES_MADE] += 1
                state[PAGE, i] += pages
                state[FILL, i], state[BUFFER, i] = left, following
    return len(chosen)


class Packing:
    """Segments that are packed together, by turn (see the module's text): the lists ``chosen`` of ``routes``,
    each a run of rows of its route's target, with so many ``buffers``."""

    def __init__(
        self,
        routes: list[Route],
        chosen: tuple[tuple[int, int], ...],
        buffer_bytes: int = 0,
        buffers: int = 0,
    ) -> None:
        self._routes, self._chosen = routes, chosen
        self._row_bytes = routes[0].target.layout.row_bytes
        first = np.array([routes[r].first_rows[i] for r, i in chosen], np.int64)
        lengths = [route.rows.lengths() for route in routes]
        rows = np.array([lengths[r][i] for r, i in chosen], np.int64)
        self._state = np.empty((5, len(chosen)), np.int64)
        self._state[BEGIN_BYTE], self._state[END_BYTE] = (
            first * self._row_bytes,
            (first + rows) * self._row_bytes,
        )
        self._state[PAGE], self._state[FILL] = np.divmod(self._state[BEGIN_BYTE], PAGE_BYTES)
        self._state[BUFFER] = NO_BUFFER
        self._size, self._memory = buffer_bytes, aligned_buffer(buffers * buffer_bytes)
        self._free = np.arange(buffers, dtype=np.int64)
        self._writes = np.empty((min(WRITES_TOGETHER, max(1, buffers // 16)), 3), np.int64)
        self._counts = np.array([buffers, 0], np.int64)
        # Numbers of buffers that are free again.
        self._written: queue.SimpleQueue[NDArray[np.int64]] = queue.SimpleQueue()

    def _target(self, turn: int) -> Target:
        return self._routes[self._chosen[turn][0]].target

    def _buffer(self, turn: int) -> NDArray[np.uint8]:
        """The buffer of a segment that has one, uint8."""
        number = int(self._state[BUFFER, turn])
        return self._memory[number * self._size : (number + 1) * self._size]

    def _take(self, turn: int) -> NDArray[np.uint8]:
        """Give a segment a free buffer; there is one, or one that is being written."""
        self._take_back(wait=self._counts[FREE_BUFFERS] == 0)
        self._counts[FREE_BUFFERS] -= 1
        self._state[BUFFER, turn] = self._free[self._counts[FREE_BUFFERS]]
        return self._buffer(turn)

    def _take_back(self, wait: bool) -> None:
        while wait or not self._written.empty():
            numbers, wait = self._written.get(), False
            free = int(self._counts[FREE_BUFFERS])
            self._free[free : free + len(numbers)] = numbers
            self._counts[FREE_BUFFERS] += len(numbers)

    def _write(self, target: Target, writes: NDArray[np.int64]) -> None:
        """Write whole pages of buffers, soon. ``writes``, int64 [n, 3]: page of the target, where in the
        buffers' memory, how many pages."""
        numbers = writes[:, 1] // self._size
        target.write_runs(self._memory, writes, lambda: self._written.put(numbers))

    def _hand_over(self, target: Target) -> None:
        """Have written what append_rows has made out."""
        count = int(self._counts[WRITES_MADE])
        if count:
            page, pages, buffer = self._writes[:count].T
            self._write(target, np.stack([page, buffer * self._size, pages], axis=1))
            self._counts[WRITES_MADE] = 0

    def append(
        self, turns: NDArray[np.int64], slab: NDArray[np.uint8], first_row: int, rows: NDArray[Any],
        ends: NDArray[np.int64]
    ) -> None:  # fmt: skip
        """Append to segment turns[i] the next rows up to ``ends[i]`` of ``rows`` (ascending for each, and at
        least one for each), which lie in a slab of the base table that starts with ``first_row``. All are of
        one route."""
        begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        target, turn, at, buffers = self._target(int(turns[0])), 0, address_of(slab), address_of(self._memory)
        while turn < len(turns):
            self._take_back(wait=False)
            turn = append_rows(
                at, first_row, self._row_bytes, rows, begins, ends, turns, self._state, buffers, self._size,
                self._free, self._writes, self._counts, turn,
            )  # fmt: skip
            self._hand_over(target)
            if turn < len(turns):
                page, begin = self._state[PAGE, turns[turn]], self._state[BEGIN_BYTE, turns[turn]]
                if page * PAGE_BYTES < begin and self._state[BUFFER, turns[turn]] != NO_BUFFER:
                    self.flush(int(turns[turn]))
                else:
                    self._take_back(wait=self._counts[FREE_BUFFERS] == 0)
        state = self._state[:, turns]
        for turn in turns[state[PAGE] * PAGE_BYTES + state[FILL] == state[END_BYTE]].tolist():
            self.flush(turn)

    def flush(self, turn: int) -> None:
        """Write a segment's whole pages; pages that it shares with others, and at its end the last one,
        become edges."""
        own, target = self._state[:, turn], self._target(turn)
        number = int(own[BUFFER])
        if number == NO_BUFFER:
            return
        buffer, fill, first = self._buffer(turn), int(own[FILL]), int(own[PAGE])
        begin, end = first * PAGE_BYTES, first * PAGE_BYTES + fill
        if begin < own[BEGIN_BYTE]:  # the first page has another segment's rows too
            low, high = int(own[BEGIN_BYTE]) - begin, min(PAGE_BYTES, fill)
            if high < PAGE_BYTES and end < own[END_BYTE]:
                return  # it will have more of this one's
            target.add(first, low, buffer[low:high])
            first += 1
        last = max(first, end // PAGE_BYTES)
        tail = buffer[last * PAGE_BYTES - begin : fill]
        if end == own[END_BYTE]:
            target.add(last, 0, tail)
            own[BUFFER], own[FILL] = NO_BUFFER, 0
        else:
            self._take(turn)[: len(tail)] = tail
            own[FILL] = len(tail)
        own[PAGE] = last
        if last > first:
            where = number * self._size + first * PAGE_BYTES - begin
            self._write(target, np.array([[first, where, last - first]]))
        else:
            self._written.put(np.array([number]))

    def checkpoint(self) -> None:
        """Write all that is whole, and the pages that are not as they are, durably."""
        for turn in range(len(self._chosen)):
            self.flush(turn)
        for route in self._routes:
            route.target.write_unfinished(
                self._unfinished(turn)
                for turn in range(len(self._chosen))
                if self._target(turn) is route.target and self._begun(turn)
            )

    def _begun(self, turn: int) -> bool:
        """Whether a segment's buffer has rows of the page under way."""
        begin, _, page, fill, buffer = self._state[:, turn].tolist()
        return bool(buffer != NO_BUFFER and fill > max(0, begin - page * PAGE_BYTES))

    def _unfinished(self, turn: int) -> tuple[int, int, NDArray[np.uint8]]:
        """What a segment's buffer has of the page under way: the page, the byte within it, and the bytes,
        uint8."""
        begin, _, page, fill, _ = self._state[:, turn].tolist()
        low = max(0, begin - page * PAGE_BYTES)
        return page, low, self._buffer(turn)[low:fill]

    def resume(self, turn: int, rows_done: int | None = None) -> None:
        """Go on with a segment after ``rows_done`` rows (all) that a checkpoint wrote: bring back what pages
        that were not whole have of them."""
        own, target = self._state[:, turn], self._target(turn)
        begin, end = int(own[BEGIN_BYTE]), int(own[END_BYTE])
        at = end if rows_done is None else begin + rows_done * self._row_bytes
        if at == begin:
            return
        first, head = divmod(begin, PAGE_BYTES)
        page, fill = divmod(at, PAGE_BYTES)
        own[PAGE], own[FILL] = page, fill
        if head:
            high = min(PAGE_BYTES, at - first * PAGE_BYTES)
            target.add(first, head, target.bring_back(first, head, high))
            # what is before is the edge's
            own[BEGIN_BYTE] = max(begin, min(at, (first + 1) * PAGE_BYTES))
        if fill == 0 or (head and page == first):
            return
        content = target.bring_back(page, 0, fill)
        if at == end:
            target.add(page, 0, content)
        else:
            self._take(turn)[:fill] = content


def bounds_of(
    routes: list[Route], chosen: tuple[tuple[int, int], ...], starts: NDArray[np.int64]
) -> NDArray[Any]:
    """[chosen lists of routes, starts]: how many rows of each list lie before each of ``starts``; int32, or
    int64 for longer lists."""
    lengths = [route.rows.lengths() for route in routes]
    longest = max((int(lengths[r][i]) for r, i in chosen), default=0)
    out = np.empty((len(chosen), len(starts)), bounds_dtype(longest))
    for at, (r, i) in enumerate(chosen):
        out[at] = np.searchsorted(routes[r].rows[i], starts)
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
    chosen = plan.episodes[episode]
    packing = Packing(routes, chosen, plan.buffer_bytes, plan.buffers)
    bounds = bounds_of(routes, chosen, starts)
    for turn, bound in enumerate(bounds):
        packing.resume(turn, int(bound[begin_slab]))
    for route in routes:
        route.target.check_resumed()
    wanted = [s for s in range(begin_slab, slabs) if (bounds[:, s + 1] > bounds[:, s]).any()]
    of_route = np.searchsorted([r for r, _ in chosen], np.arange(len(routes) + 1))
    offsets = np.array([routes[r].rows.offsets[i] for r, i in chosen], np.int64)
    since = 0
    for slab, data in _slabs(reader, table, starts, wanted, plan.slab_rows * row_bytes):
        tick("read", len(data))
        counts = (bounds[:, slab + 1] - bounds[:, slab]).astype(np.int64)
        for r, route in enumerate(routes):
            turns = np.flatnonzero(counts[of_route[r] : of_route[r + 1]]) + of_route[r]
            for some, rows, ends in _rows_of(route, turns, offsets + bounds[:, slab], counts):
                packing.append(some, data, int(starts[slab]), rows, ends)
        written = int(counts.sum()) * row_bytes
        tick("write", written)
        since += written
        if since >= SEGMENTS_CHECKPOINT_BYTES or slab == wanted[-1]:
            since = 0
            packing.checkpoint()
            save(slab + 1)


def _rows_of(
    route: Route, turns: NDArray[np.int64], firsts: NDArray[np.int64], counts: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[Any], NDArray[np.int64]]]:
    """What segments of one route, ``turns``, want of a slab, for several at a time, as many as have about
    INDEX_ROWS: (their numbers, the rows of all, where those of each end). By turn: ``firsts``, where in the
    route's lists those of a segment begin, and ``counts``."""
    ends, begin = np.cumsum(counts[turns]), 0
    while begin < len(turns):
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + INDEX_ROWS, side="right")))
        some = turns[begin:end]
        yield some, route.rows.parts(firsts[some], counts[some]), ends[begin:end] - before
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
