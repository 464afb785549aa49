"""MIN (Belady, IBM Systems Journal 5(2), 1966): with the next use of each row known, the row with the
farthest next use goes.

Rows that nobody uses lie in one list for each next use, the row that was released last first. All lists are
in one log, as the queues are (:mod:`featstore.tiers.slots.policies_queues`): rows are appended, an entry is
valid as long as its slot's ``place`` names it, and each entry names the one before it in its list. A pointer
to the last list that may not be empty (FAR) moves down when rows leave, and up only when a row is put farther
away, so no heap is needed.
"""

from __future__ import annotations

import numpy as np

from featstore.base.compilation import njit
from featstore.base.native import INLINED, PART, prefetch
from featstore.tiers.slots.layout import BATCHES_MAX, END, FAR, RECORD_BYTES, SLOTS, SlotMap

_AHEAD = 64  # entries whose records are prefetched ahead while stale ones are dropped


@njit(**INLINED)
def _append(m: SlotMap, at: int, slot: int) -> None:
    """Write the entry of a slot at a place of the log: it becomes the first of its list."""
    use = min(np.int64(m.slots[slot].stamp), m.counts[BATCHES_MAX])
    m.log[at] = slot
    m.log[2 * m.counts[SLOTS] + at] = m.table[use]
    m.table[use] = at
    m.slots[slot].place = at
    m.counts[FAR] = max(m.counts[FAR], use)


@njit(**PART)
def _squeeze(m: SlotMap) -> None:
    """Drop the stale entries."""
    for use in range(m.table.shape[0]):
        m.table[use] = -1
    m.counts[FAR] = -1
    to = np.int64(0)
    records, last = m.slots.ctypes.data, m.counts[END] - 1
    for at in range(last + 1):
        prefetch(records + RECORD_BYTES * np.int64(m.log[min(at + _AHEAD, last)]))
        slot = np.int64(m.log[at])
        if m.slots[slot].place == at:
            _append(m, to, slot)
            to += 1
    m.counts[END] = to


@njit(**INLINED)
def min_idle(m: SlotMap, slot: int) -> None:
    if m.counts[END] == 2 * m.counts[SLOTS]:
        _squeeze(m)
    _append(m, m.counts[END], slot)
    m.counts[END] += 1


@njit(**INLINED)
def min_victim(m: SlotMap, records: int) -> np.int64:
    links = 2 * m.counts[SLOTS]
    far = m.counts[FAR]
    at = np.int64(m.table[far])
    while True:
        if at < 0:
            m.table[far] = -1
            far -= 1
            at = np.int64(m.table[far])
            continue
        ahead = at
        for _ in range(4):
            ahead = max(np.int64(m.log[links + ahead]), np.int64(0))
        prefetch(records + RECORD_BYTES * np.int64(m.log[ahead]))
        slot = np.int64(m.log[at])
        following = np.int64(m.log[links + at])
        if m.slots[slot].place == at:
            break
        at = following
    m.table[far] = following
    m.counts[FAR] = far
    m.slots[slot].place = -1
    return slot
