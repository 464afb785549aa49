"""Rows that stay by MIN where no mini-batch holds them: served, and put there, in one go each.

Whoever asks for rows here copies those that are there at once, and holds none; so rows come with no pins, in
place of such as are wanted later, and a row that would be the first to go does not come at all.

How many slots have each next use is counted (``idle``, int64 [batches + 1], as of
:func:`featstore.tiers.slots.policies_min.count_by_use`), and kept up here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.native import INLINED, PART
from featstore.base.rows import move_rows
from featstore.tiers.slots.acquisition import acquire_rows
from featstore.tiers.slots.chains import borrowed, chain_of, prefetch_chain, prefetch_first, slot_of_row
from featstore.tiers.slots.layout import PRESENT, SHIFT, UNPINNED, SlotMap
from featstore.tiers.slots.policies_min import min_idle

_AHEAD = 24  # ids whose chains are prefetched ahead, and half of it their records


@njit(**INLINED)
def _find(
    m: SlotMap, ids: NDArray[np.int64], slots: NDArray[np.int32], here: NDArray[np.int32],
    left: NDArray[np.int32],
) -> Any:  # fmt: skip
    """The ``slots`` of the rows that are there, their positions ``here``, and those of the others, ``left``;
    all of as many places as there are ids. Returns how many are there."""
    shift, heads, records = m.counts[SHIFT], m.heads.ctypes.data, m.slots.ctypes.data
    last, count = ids.shape[0] - 1, np.int64(0)
    for i in range(ids.shape[0]):  # without a branch by what is there, which could not be foreseen
        prefetch_chain(heads, chain_of(ids[min(i + _AHEAD, last)], shift))
        prefetch_first(m, chain_of(ids[min(i + _AHEAD // 2, last)], shift), records)
        slot = slot_of_row(m, ids[i], shift)
        slots[count], here[count], left[i - count] = slot, i, i
        count += slot >= 0
    return count


@njit(**INLINED)
def _note_uses(
    m: SlotMap, slots: NDArray[np.int32], here: NDArray[np.int32], uses: NDArray[np.int32],
    idle: NDArray[np.int64],
) -> None:  # fmt: skip
    """Rows in these slots are used next then: of all ``uses`` those at the positions ``here``."""
    last = np.int64(idle.shape[0] - 1)
    for i in range(slots.shape[0]):
        held, use = m.slots[slots[i]], uses[here[i]]
        idle[min(np.int64(held.stamp), last)] -= 1
        idle[min(np.int64(use), last)] += 1
        held.stamp = use
        min_idle(m, np.int64(slots[i]))


@njit(cache=True, nogil=True)
def serve_soonest(
    m: SlotMap, ids: NDArray[np.int64], uses: NDArray[np.int32], idle: NDArray[np.int64], rows: int,
    row_bytes: int, target: int, to: NDArray[Any], left: NDArray[np.int32],
) -> Any:  # fmt: skip
    """Copy the rows that are there from their slots (``rows``: the address of slot 0) to their places ``to``
    at an address; they are used next in ``uses``. Positions of the others go to ``left``; returns how
    many."""
    m = borrowed(m)
    slots, here = np.empty(ids.shape[0], np.int32), np.empty(ids.shape[0], np.int32)
    count = _find(m, ids, slots, here, left)
    if count > 0:
        slots, here = slots[:count], here[:count]
        _note_uses(m, slots, here, uses, idle)
        move_rows(rows, slots, target, to[here], row_bytes)
    return ids.shape[0] - count


@njit(**PART)
def _choose(
    uses: NDArray[np.int32], some: NDArray[np.int32], idle: NDArray[np.int64], chosen: NDArray[np.int32]
) -> np.int64:
    """Of rows at the positions ``some``, which are used next in ``uses``, those that come: as many as there
    are slots that are wanted later than they. Their positions go to ``chosen``; returns how many."""
    last = np.int64(idle.shape[0] - 1)
    coming = np.zeros(last + 1, np.int64)
    for i in some:
        coming[min(np.int64(uses[i]), last)] += 1
    soon, come, leave = np.int64(0), np.int64(0), idle.sum() - idle[0]
    while soon < last and come + coming[soon] <= leave:
        come += coming[soon]
        soon += 1
        leave -= idle[soon]
    room = max(np.int64(0), leave - come) if soon < last else np.int64(0)  # for those wanted in that step
    count = np.int64(0)
    for i in some:
        if uses[i] < soon or (uses[i] == soon and room > 0):
            room -= uses[i] == soon
            chosen[count] = i
            count += 1
    return count


@njit(**PART)
def _exchange(uses: NDArray[np.int32], idle: NDArray[np.int64]) -> None:
    """Rows have come that are used next then, in place of as many that were used last: in ``idle``."""
    last = np.int64(idle.shape[0] - 1)
    far = last
    for _ in range(uses.shape[0]):
        while idle[far] == 0:
            far -= 1
        idle[far] -= 1
    for use in uses:
        idle[min(np.int64(use), last)] += 1


@njit(cache=True, nogil=True)
def keep_soonest(
    m: SlotMap, ids: NDArray[np.int64], uses: NDArray[np.int32], idle: NDArray[np.int64], source: int,
    places: NDArray[Any], row_bytes: int, rows: int,
) -> Any:  # fmt: skip
    """Have rows that lie at ``places`` at an address here (``rows``: the address of slot 0), those that are
    used soonest, in place of rows that are used later. Returns how many slots were lacking, which is a
    mistake, and then nothing came."""
    m = borrowed(m)
    slots, here = np.empty(ids.shape[0], np.int32), np.empty(ids.shape[0], np.int32)
    left = np.empty(ids.shape[0], np.int32)
    count = _find(m, ids, slots, here, left)
    _note_uses(m, slots[:count], here[:count], uses, idle)  # these have come meanwhile
    left = left[: ids.shape[0] - count]
    chosen = np.empty(left.shape[0], np.int32)
    chosen = chosen[: _choose(uses, left, idle, chosen)]
    if chosen.shape[0] == 0:
        return np.int64(0)
    coming, soon = ids[chosen], uses[chosen]
    taken, missed = np.empty(chosen.shape[0], np.int32), np.empty(chosen.shape[0], np.int32)
    waits, outcome = np.empty(chosen.shape[0], np.int32), np.zeros(3, np.int64)
    acquire_rows(m, coming, soon, taken, missed, waits, outcome)
    if outcome[0] < 0:
        return -outcome[0]
    new = missed[: outcome[0]]
    move_rows(source, places[chosen[new]], rows, taken[new], row_bytes)
    # Each has a pin of who reads it, and one each time that it was asked for.
    for slot in taken:
        m.slots[slot].pins -= 1
    for slot in taken[new]:
        held = m.slots[slot]
        held.status = PRESENT
        held.pins -= 1
        m.counts[UNPINNED] += 1
        min_idle(m, np.int64(slot))
    _exchange(soon[new], idle)
    return np.int64(0)
