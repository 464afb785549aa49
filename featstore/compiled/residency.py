"""Residency: which rows are in memory when?

With the mini-batches known, two answers, both computed in passes over the row lists at a few nanoseconds an element:

- *fixed*: the rows that most mini-batches want, for good (DiskGNN, section 4). The mini-batches may then come in any order.
- *min*: Belady's MIN (IBM Systems Journal 5(2), 1966) at the granularity of mini-batches. Every row that was just read or served is kept
if its
  next use is nearer than that of some row in memory; the row with the farthest next use goes. No choice reads fewer rows for
  that order of mini-batches. Ginex (VLDB 2022) schedules its cache like this; here the schedule also decides what is packed.

For MIN, a backward pass writes down when each row is used next. Rows in memory hang in one bucket for each next use, so the
farthest is found without a heap: a pointer to the last bucket that is not empty moves down when rows are dropped, and up only when a
row is put farther away. A mini-batch's own bucket is exactly what it finds in memory, and is emptied as a whole.

A trace that is trained on again and again is a circle: the next use of a row may be in the next round. The schedule is that of the
second round; what is in memory at its begin is what the first round left, and is loaded before the first mini-batch. Where the second
round ends with other rows than it began with, the difference is brought back between two rounds.

All state is dense: 4 bytes for each row of the table, and 12 for each row that memory can hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from featstore.compiled.lists import RowLists, RowListsWriter

#: The next use of a row that is not used again.
NEVER = np.int32(2**31 - 1)
_NONE = np.int32(-1)


@njit(cache=True, nogil=True)
def count_uses(rows: NDArray[np.int64], batch: int, uses: NDArray[np.uint32], first_use: NDArray[np.int32]) -> None:
    """Count a mini-batch's distinct rows in ``uses``; note in ``first_use`` (NEVER before) the mini-batch that has a row first."""
    for i in range(rows.shape[0]):
        row = rows[i]
        uses[row] += np.uint32(1)
        if first_use[row] == NEVER:
            first_use[row] = batch


@njit(cache=True, nogil=True)
def next_uses(rows: NDArray[np.int64], batch: int, next_use: NDArray[np.int32], out: NDArray[np.int32]) -> None:
    """out[i] = when rows[i] is used next after this mini-batch; then notes this use. Called for the last mini-batch first."""
    for i in range(rows.shape[0]):
        row = rows[i]
        out[i] = next_use[row]
        next_use[row] = batch


@njit(cache=True, nogil=True)
def min_step(
    batch: int,
    rows: NDArray[np.int64],
    next_use: NDArray[np.int32],
    slot_of_row: NDArray[np.int32],
    row_of_slot: NDArray[np.int64],
    head: NDArray[np.int32],
    after: NDArray[np.int32],
    state: NDArray[np.int64],
    hit_slot: NDArray[np.int32],
    admit_slot: NDArray[np.int32],
) -> int:
    """One mini-batch of MIN: hit_slot[i], the slot that holds rows[i], or -1; admit_slot[i], where rows[i] goes afterwards, or -1.

    ``head``: first slot of each bucket, ``after``: the next slot of the same bucket (or of the free ones), -1 for none. ``state``: the
    first free slot, and the last bucket that may not be empty. A slot may be given away in the mini-batch that reads it.
    Returns the number of hits.
    """
    hits = 0
    free, far = state[0], state[1]
    head[batch] = -1  # all that is in it is used now, and finds another bucket
    for i in range(rows.shape[0]):
        slot = slot_of_row[rows[i]]
        hit_slot[i] = slot
        if slot >= 0:
            hits += 1
            use = next_use[i]
            if use == NEVER:
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
        if hit_slot[i] >= 0 or use == NEVER:
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
        admit_slot[i] = -1 if hit_slot[i] >= 0 else slot_of_row[rows[i]]
    state[0], state[1] = free, far
    return hits


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
        self, batch: int, rows: NDArray[np.int64], next_use: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
        """Serve a mini-batch's distinct rows: (slots of hits or -1, slots of admissions or -1, hits); see :func:`min_step`."""
        hit, admit = np.empty(len(rows), np.int32), np.empty(len(rows), np.int32)
        hits = min_step(
            batch, rows, next_use, self.slot_of_row, self.row_of_slot, self._head, self._after, self._state, hit, admit
        )
        return hit, admit, int(hits)

    def turn(self, by: int) -> None:
        """Begin a new round: all next uses, which lie in it, come ``by`` nearer."""
        self._head[:-by] = self._head[by:]
        self._head[-by:] = _NONE
        self._state[1] -= by


@dataclass(frozen=True)
class Residency:
    """What is in memory when. Slots are places for a row in memory.

    ``hits`` and ``admits``: int32 lists by mini-batch, for each of its distinct rows the slot that holds it, or -1, and the slot that it
    goes to after the mini-batch is assembled, or -1. ``start``: int64 [capacity], the row in each slot before the first mini-batch, -1
    for none. ``turn``: int32 [capacity], where the row of ``start`` is after the last mini-batch; -1: nowhere, it must be brought back.
    """

    method: str
    hits: RowLists
    admits: RowLists | None
    start: NDArray[np.int64]
    turn: NDArray[np.int32]
    missed_rows: int
    hit_rows: int

    @property
    def restored_rows(self) -> int:
        """Rows to be brought back before another round."""
        return int(((self.turn < 0) & (self.start >= 0)).sum())


def most_used(uses: NDArray[np.uint32], count: int) -> NDArray[np.int64]:
    """The rows of the most uses, ``count`` at most and used at all, ascending. Of equals, those of the lowest rows."""
    used = np.flatnonzero(uses)
    if len(used) <= count:
        return used
    if count == 0:
        return used[:0]
    limit = np.partition(uses[used], len(used) - count)[len(used) - count]
    above = used[uses[used] > limit]
    level = used[uses[used] == limit][: count - len(above)]
    return np.sort(np.concatenate([above, level]))


def keep_fixed(rows: RowLists, uses: NDArray[np.uint32], capacity_rows: int, hits: RowListsWriter) -> Residency:
    """Keep the rows of the most uses."""
    start = most_used(uses, capacity_rows)
    slot_of_row = np.full(len(uses), _NONE, np.int32)
    slot_of_row[start] = np.arange(len(start), dtype=np.int32)
    found = 0
    for index in range(len(rows)):
        slots = slot_of_row[rows[index]]
        found += int((slots >= 0).sum())
        hits.append(slots)
    own = np.arange(len(start), dtype=np.int32)
    return Residency("fixed", hits.finish(), None, start, own, rows.total - found, found)


def keep_min(
    rows: RowLists,
    first_use: NDArray[np.int32],
    capacity_rows: int,
    next_use: RowListsWriter,
    hits: RowListsWriter,
    admits: RowListsWriter,
) -> Residency:
    """Keep by next use, for a trace that is gone through again and again. ``first_use`` is used up."""
    batches = len(rows)
    capacity_rows = min(capacity_rows, int((first_use != NEVER).sum()))
    first_use[first_use != NEVER] += batches  # the use after the last one is in the next round
    for index in range(batches - 1, -1, -1):
        values = rows[index].astype(np.int64, copy=False)
        out = np.empty(len(values), np.int32)
        next_uses(values, index, first_use, out)
        next_use.put(index, rows.offsets, out)
    nexts = next_use.finish(rows.offsets)
    cache = MinCache(len(first_use), capacity_rows, 2 * batches)
    for index in range(batches):
        cache.step(index, rows[index].astype(np.int64, copy=False), nexts[index])
    cache.turn(batches)
    start = cache.row_of_slot.copy()
    found = 0
    for index in range(batches):
        hit, admit, count = cache.step(index, rows[index].astype(np.int64, copy=False), nexts[index])
        hits.append(hit)
        admits.append(admit)
        found += count
    nexts.close()
    turn = np.where(start >= 0, cache.slot_of_row[np.maximum(start, 0)], _NONE).astype(np.int32)
    return Residency("min", hits.finish(), admits.finish(), start, turn, rows.total - found, found)
