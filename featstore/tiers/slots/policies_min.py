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
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.native import INLINED, PART, prefetch
from featstore.tiers.slots.chains import borrowed, chain_of, prefetch_chain, prefetch_first, slot_of_row
from featstore.tiers.slots.layout import BATCHES_MAX, END, FAR, NEVER, RECORD_BYTES, SHIFT, SLOTS, SlotMap

_FIND_AHEAD = 16  # rows whose chains are prefetched ahead, and half of it their records
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


@njit(cache=True, nogil=True)
def count_by_use(m: SlotMap, counts: NDArray[np.int64]) -> None:
    """How many slots that nobody uses have each next use, ``counts`` int64 [batches + 1], at the end those of
    rows that are not used again, and the slots that are empty."""
    counts[:] = 0
    for slot in range(m.slots.shape[0]):
        held = m.slots[slot]
        if held.pins == 0:
            use = np.int64(held.stamp) if held.row >= 0 else np.int64(counts.shape[0])
            counts[min(use, counts.shape[0] - 1)] += 1


@njit(**INLINED)
def min_idle(m: SlotMap, slot: int) -> None:
    if m.counts[END] == 2 * m.counts[SLOTS]:
        _squeeze(m)
    _append(m, m.counts[END], slot)
    m.counts[END] += 1


@njit(cache=True, nogil=True)
def shift_uses(m: SlotMap, shift: int) -> None:
    """Uses count from so many batches later: those before are over. Afterwards :func:`list_anew` lists them
    so."""
    for slot in range(m.slots.shape[0]):
        use = np.int64(m.slots[slot].stamp)
        m.slots[slot].stamp = NEVER if use < shift or use == NEVER else use - shift


@njit(cache=True, nogil=True)
def bring_uses_forward(
    m: SlotMap, ids: NDArray[np.int64], offsets: NDArray[np.int64], first: int, rows: int, use: int
) -> None:
    """Rows that are there and wanted, by ``ids`` from one of ``offsets`` to the next in the batch ``use``, to
    the next in the one after it, and so on, are used next then, unless they are used before. Of ids ``rows``
    from ``first`` on are of this map, by their numbers from there on. Afterwards :func:`list_anew` lists them
    so."""
    m = borrowed(m)
    shift, heads, records = m.counts[SHIFT], m.heads.ctypes.data, m.slots.ctypes.data
    last = offsets[-1] - 1
    for step in range(offsets.shape[0] - 1):
        for i in range(offsets[step], offsets[step + 1]):
            prefetch_chain(heads, chain_of(ids[min(i + _FIND_AHEAD, last)] - first, shift))
            prefetch_first(m, chain_of(ids[min(i + _FIND_AHEAD // 2, last)] - first, shift), records)
            row = ids[i] - first
            if row < 0 or row >= rows:
                continue
            slot = slot_of_row(m, row, shift)
            if slot >= 0 and m.slots[slot].stamp > use + step:
                m.slots[slot].stamp = use + step


@njit(cache=True, nogil=True)
def list_anew(m: SlotMap) -> None:
    """Next uses have changed of many."""
    _squeeze(m)


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
