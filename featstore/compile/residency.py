"""Residency: which rows are in memory when?

With the mini-batches known, two answers, both computed in passes over the row lists at a few nanoseconds an
element:

- *fixed*: the rows that most mini-batches want, for good (DiskGNN, section 4). The mini-batches may then come
  in any order.
- *min*: Belady's MIN (IBM Systems Journal 5(2), 1966) at the granularity of mini-batches. Every row that was
  just read or served is kept if its next use is nearer than that of some row in memory; the row with the
  farthest next use goes. No choice reads fewer rows for that order of mini-batches. Ginex (VLDB 2022)
  schedules its cache like this; here the schedule also decides what is packed.

For MIN, a backward pass writes down when each row is used next. Rows in memory hang in one bucket for each
next use, so the farthest is found without a heap: a pointer to the last bucket that is not empty moves down
when rows are dropped, and up only when a row is put farther away. A mini-batch's own bucket is exactly what
it finds in memory, and is emptied as a whole.

A trace that is trained on again and again is a circle: the next use of a row may be in the next round. The
schedule is that of the second round; what is in memory at its begin is what the first round left, and is
loaded before the first mini-batch. Where the second round ends with other rows than it began with, the
difference is brought back between two rounds. What a round leaves is decided by its last mini-batches, so of
the first round only those are gone through that ask for 32 times the rows that memory holds. (With a tenth of
a power-law graph in memory that is a quarter of an epoch; it then misses and brings back 0.02 % more rows
than after a whole round, and 0.07 % more with half as much.)

All state is dense: 8 bytes for each row of the table, and 12 for each row that memory can hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.compile.row_lists import RowLists, RowListsWriter

#: The next use of a row that is not used again.
NO_NEXT_BATCH = np.int32(2**31 - 1)
_NONE = np.int32(-1)
#: How often the first round asks for as many rows as memory holds, before the second one begins.
ROUND_CAPACITIES = 32


@njit(cache=True, nogil=True)
def wrap_uses(
    rows: NDArray[Any], next_use: NDArray[np.int32], first_use: NDArray[np.int32], batches: int
) -> None:
    """The next use of a row that is not used again in this round is its first use in the next one,
    ``batches`` mini-batches on."""
    for i in range(rows.shape[0]):
        if next_use[i] == NO_NEXT_BATCH:
            next_use[i] = first_use[np.uint64(rows[i])] + batches


@njit(cache=True, nogil=True)
def min_step(
    batch: int,
    rows: NDArray[Any],
    next_use: NDArray[np.int32],
    slot_of_row: NDArray[np.int32],
    row_of_slot: NDArray[np.int64],
    head: NDArray[np.int32],
    after: NDArray[np.int32],
    state: NDArray[np.int64],
    moves: NDArray[np.int32],
) -> tuple[int, int]:
    """One mini-batch of MIN: ``moves``, see :class:`Residency`, of its rows.

    ``head``: first slot of each bucket, ``after``: the next slot of the same bucket (or of the free ones), -1
    for none. ``state``: the first free slot, and the last bucket that may not be empty. A slot may be given
    away in the mini-batch that reads it. Returns the numbers of hits and of admissions.
    """
    hits = admitted = 0
    free, far = state[0], state[1]
    head[batch] = -1  # all that is in it is used now, and finds another bucket
    for i in range(rows.shape[0]):  # by itself, without a branch, so that many are fetched at once
        moves[i] = slot_of_row[np.uint64(rows[i])]
    for i in range(rows.shape[0]):
        slot = moves[i]
        if slot >= 0:
            hits += 1
            use = next_use[i]
            if use == NO_NEXT_BATCH:
                slot_of_row[rows[i]] = -1
                row_of_slot[slot] = -1
                after[slot] = free
                free = slot
            else:
                after[slot] = head[use]
                head[use] = slot
                far = max(far, use)
    for i in range(rows.shape[0]):
        use = next_use[i]
        if moves[i] >= 0 or use == NO_NEXT_BATCH:
            continue
        if free >= 0:
            slot = free
            free = after[slot]
        else:
            while far >= 0 and head[far] < 0:
                far -= 1
            if far <= use:
                continue
            slot = head[far]
            head[far] = after[slot]
            slot_of_row[row_of_slot[slot]] = -1
        row_of_slot[slot] = rows[i]
        slot_of_row[rows[i]] = slot
        after[slot] = head[use]
        head[use] = slot
        far = max(far, use)
    for i in range(rows.shape[0]):
        slot = slot_of_row[np.uint64(rows[i])]  # what was admitted may have been dropped again
        to = np.int32(-2) - slot if slot >= 0 else np.int32(-1)
        admitted += int((moves[i] < 0) & (slot >= 0))
        moves[i] = moves[i] if moves[i] >= 0 else to
    state[0], state[1] = free, far
    return hits, admitted


@njit(cache=True, nogil=True)
def take_missed(rows: NDArray[Any], moves: NDArray[np.int32], out: NDArray[Any]) -> int:
    """The rows that no slot holds; ``out`` has room for all. Returns how many."""
    count = 0
    for i in range(rows.shape[0]):
        out[np.uint64(count)] = rows[i]
        count += int(moves[i] < 0)
    return count


def missed_of(rows: NDArray[Any], moves: NDArray[np.int32]) -> NDArray[Any]:
    """The rows that no slot holds."""
    out = np.empty_like(rows)
    return out[: take_missed(rows, moves, out)]


class MinCache:
    """MIN's state: what is in which slot, and when it is used next.

    ``uses_end``: next uses are below that, or NEVER.
    """

    def __init__(self, table_rows: int, capacity_rows: int, uses_end: int) -> None:
        self.slot_of_row = np.full(table_rows, _NONE, np.int32)
        self.row_of_slot = np.full(capacity_rows, -1, np.int64)
        self._head = np.full(max(1, uses_end), _NONE, np.int32)
        self._after = np.arange(1, capacity_rows + 1, dtype=np.int32)  # all slots are free, in order
        self._after[-1:] = _NONE
        self._state = np.array([0 if capacity_rows else -1, -1], np.int64)

    @staticmethod
    def memory_bytes(table_rows: int, capacity_rows: int, uses_end: int) -> int:
        return 4 * table_rows + 12 * capacity_rows + 4 * uses_end

    def step(
        self, batch: int, rows: NDArray[Any], next_use: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], int, int]:
        """Serve a mini-batch's distinct rows: (their moves, hits, admissions); see :func:`min_step`."""
        moves = np.empty(len(rows), np.int32)
        hits, admitted = min_step(
            batch,
            rows,
            next_use,
            self.slot_of_row,
            self.row_of_slot,
            self._head,
            self._after,
            self._state,
            moves,
        )
        return moves, int(hits), int(admitted)

    def turn(self, by: int) -> None:
        """Begin a new round: all next uses, which lie in it, come ``by`` nearer."""
        self._head[:-by] = self._head[by:]
        self._head[-by:] = _NONE
        self._state[1] -= by


@dataclass(frozen=True)
class Residency:
    """What is in memory when. Slots are places for a row in memory.

    ``moves``: int32 lists by mini-batch, for each of its distinct rows the slot s that holds it; -1 for a row
    that is missed; -2 - s for one that is missed and goes to slot s after the mini-batch is assembled.
    ``misses``: lists of the rows missed, in the same order. ``admitted``: int64 [mini-batches], how many rows
    go to slots. ``start``: int64 [capacity], the row in each slot before the first mini-batch, -1 for none.
    ``turn``: int32 [capacity], where the row of ``start`` is after the last mini-batch; -1: nowhere, it must
    be brought back.
    """

    method: str
    moves: RowLists
    misses: RowLists
    admitted: NDArray[np.int64]
    start: NDArray[np.int64]
    turn: NDArray[np.int32]
    missed_rows: int
    hit_rows: int

    @property
    def restored_rows(self) -> int:
        """Rows to be brought back before another round."""
        return int(((self.turn < 0) & (self.start >= 0)).sum())


def most_used(uses: NDArray[np.uint32], count: int) -> NDArray[np.int64]:
    """The rows of the most uses, ``count`` at most and used at all, ascending. Of equals, those of the lowest
    rows."""
    used = np.flatnonzero(uses)
    if len(used) <= count:
        return used
    if count == 0:
        return used[:0]
    limit = np.partition(uses[used], len(used) - count)[len(used) - count]
    above = used[uses[used] > limit]
    level = used[uses[used] == limit][: count - len(above)]
    return np.sort(np.concatenate([above, level]))


def keep_fixed(
    rows: RowLists,
    uses: NDArray[np.uint32],
    capacity_rows: int,
    moves: RowListsWriter,
    misses: RowListsWriter,
) -> Residency:
    """Keep the rows of the most uses."""
    start = most_used(uses, capacity_rows)
    slot_of_row = np.full(len(uses), _NONE, np.int32)
    slot_of_row[start] = np.arange(len(start), dtype=np.int32)
    for index in range(len(rows)):
        values = rows[index]
        slots = slot_of_row[values]
        moves.append(slots)
        misses.append(missed_of(values, slots))
    own, missed = np.arange(len(start), dtype=np.int32), misses.finish()
    none = np.zeros(len(rows), np.int64)
    return Residency(
        "fixed", moves.finish(), missed, none, start, own, missed.total, rows.total - missed.total
    )


def _begin(rows: RowLists, capacity_rows: int) -> int:
    """The mini-batch from which on a round asks for ROUND_CAPACITIES times what memory holds."""
    asked = max(0, rows.total - ROUND_CAPACITIES * capacity_rows)
    return max(0, int(np.searchsorted(rows.offsets, asked, side="right")) - 1)


def keep_min(
    rows: RowLists,
    next_use: RowLists,
    first_use: NDArray[np.int32],
    capacity_rows: int,
    moves: RowListsWriter,
    misses: RowListsWriter,
) -> Residency:
    """Keep by next use, for a trace that is gone through again and again. ``next_use`` and ``first_use``: see
    :func:`featstore.compile.scan.scan`."""
    batches = len(rows)
    capacity_rows = min(capacity_rows, int((first_use != NO_NEXT_BATCH).sum()))
    cache = MinCache(len(first_use), capacity_rows, 2 * batches)
    admitted = np.zeros(batches, np.int64)

    def served(index: int) -> tuple[NDArray[Any], NDArray[np.int32]]:
        values, ahead = rows[index], next_use[index]
        wrap_uses(values, ahead, first_use, batches)
        found, _, admitted[index] = cache.step(index, values, ahead)
        return values, found

    begin = _begin(rows, capacity_rows)
    for index in range(begin, batches):
        served(index)
    if begin and (cache.row_of_slot < 0).any():  # that end of the trace has too few different rows
        del cache  # before there is another one
        cache = MinCache(len(first_use), capacity_rows, 2 * batches)
        for index in range(batches):
            served(index)
    cache.turn(batches)
    start = cache.row_of_slot.copy()
    for index in range(batches):
        values, found = served(index)
        moves.append(found)
        misses.append(missed_of(values, found))
    turn = np.where(start >= 0, cache.slot_of_row[np.maximum(start, 0)], _NONE).astype(np.int32)
    missed = misses.finish()
    return Residency(
        "min", moves.finish(), missed, admitted, start, turn, missed.total, rows.total - missed.total
    )
