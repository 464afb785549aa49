"""A mini-batch's rows are found and pinned, and the others given slots: the kernel of ``acquire``.

:mod:`featstore.tiers.slots.slots` has the theory: all or nothing, found first and read second, memory waited
for together.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.native import INLINED, PART
from featstore.tiers.slots.chains import borrowed, chain_of, prefetch_chain, prefetch_first, relink
from featstore.tiers.slots.layout import (
    BATCHES,
    EVICTIONS,
    FAILED,
    FREE,
    FRESH,
    HITS,
    IN_FLIGHT,
    MIN,
    MISSES,
    POLICY,
    SHIFT,
    UNPINNED,
    WAITS,
    SlotMap,
)
from featstore.tiers.slots.policies import before_insert, on_batch, on_hit, on_insert, on_pin, victim

# How many ids ahead of the one that is served records are prefetched, and their chains twice as far: as many
# as memory needs.
_AHEAD = 40
_GROUP = 512  # missed rows that are given slots together, so that memory is waited for together


@njit(**INLINED)
def _take_slot(m: SlotMap, policy: int, records: int) -> np.int64:
    """An empty slot, or one whose row leaves for it."""
    c = m.counts
    c[UNPINNED] -= 1
    slot = c[FREE]
    if slot >= 0:
        c[FREE] = m.slots[slot].next
        return np.int64(slot)
    slot = c[FRESH]
    if slot < m.slots.shape[0]:
        c[FRESH] = slot + 1
        return np.int64(slot)
    c[EVICTIONS] += 1
    return np.int64(victim(m, policy, records))


@njit(**PART)
def _slots_needed(m: SlotMap, rows: NDArray[np.int64]) -> np.int64:
    """How many slots that nobody uses a mini-batch takes: its distinct rows that are in no slot, or in one
    without pins."""
    bits = 1
    while (1 << bits) < 2 * rows.shape[0]:
        bits += 1
    seen = np.empty(1 << bits, np.int64)
    seen[:] = -1
    shift = m.counts[SHIFT]
    needed = np.int64(0)
    for i in range(rows.shape[0]):
        row = rows[i]
        slot = np.int64(m.heads[chain_of(row, shift)])
        while slot >= 0 and m.slots[slot].row != row:
            slot = np.int64(m.slots[slot].next)
        if slot >= 0 and m.slots[slot].pins > 0:
            continue
        at = chain_of(row, np.int64(64 - bits))
        while seen[at] >= 0 and seen[at] != row:
            at = (at + 1) & ((1 << bits) - 1)
        if seen[at] < 0:
            seen[at] = row
            needed += 1
    return needed


@njit(**INLINED)
def _hit(m: SlotMap, policy: int, slot: int, i: int, next_use: NDArray[np.int32]) -> None:
    """Pin a row that is in a slot."""
    held = m.slots[slot]
    if held.pins == 0:
        m.counts[UNPINNED] -= 1
        on_pin(m, policy, slot)
    held.pins += 1
    if policy == MIN:
        held.stamp = next_use[i]
    on_hit(m, policy, slot)


@njit(**INLINED)
def _pin_found(
    m: SlotMap, rows: NDArray[np.int64], next_use: NDArray[np.int32], slots_out: NDArray[np.int32],
    missed_out: NDArray[np.int32], waits_out: NDArray[np.int32],
) -> tuple[int, int, int]:  # fmt: skip
    """Pin the rows that are in a slot, and put the others into their chains, as -2 - position, without a
    slot.

    A row that failed to be read and is still in its slot is missed, too; its position i is written as ~i.
    Positions of rows that occur again are put at the end of ``waits_out``, and in ``slots_out`` where they
    occurred first. Returns the numbers of missed rows, of rows on their way, and of these.
    """
    c = m.counts
    policy, shift, last = c[POLICY], c[SHIFT], rows.shape[0] - 1
    heads, records = m.heads.ctypes.data, m.slots.ctypes.data
    missed = waits = again = 0
    for i in range(rows.shape[0]):
        prefetch_chain(heads, chain_of(rows[min(i + 2 * _AHEAD, last)], shift))
        prefetch_first(m, chain_of(rows[min(i + _AHEAD, last)], shift), records)
        row = rows[i]
        chain = chain_of(row, shift)
        node = np.int64(m.heads[chain])
        while node != -1:
            if node >= 0:
                if m.slots[node].row == row:
                    break
                node = np.int64(m.slots[node].next)
            else:
                if rows[-2 - node] == row:
                    break
                node = np.int64(slots_out[-2 - node])
        if node >= 0:
            held = m.slots[node]
            slots_out[i] = node
            if held.status != FAILED:
                _hit(m, policy, node, i, next_use)
                if held.status == IN_FLIGHT:
                    waits_out[waits] = i
                    waits += 1
            else:
                held.status = IN_FLIGHT
                held.pins += 2
                if policy == MIN:
                    held.stamp = next_use[i]
                missed_out[missed] = ~i
                missed += 1
        elif node == -1:
            slots_out[i] = m.heads[chain]
            m.heads[chain] = -2 - i
            missed_out[missed] = i
            missed += 1
        else:
            slots_out[i] = node
            waits_out[last - again] = i
            again += 1
    return missed, waits, again


@njit(**INLINED)
def _place_missed(
    m: SlotMap, rows: NDArray[np.int64], next_use: NDArray[np.int32], slots_out: NDArray[np.int32],
    missed: NDArray[np.int32],
) -> None:  # fmt: skip
    """Give a slot to each missed row. In groups: take the slots, take the rows that leave out of their
    chains, and put the new ones in."""
    c = m.counts
    policy, shift = c[POLICY], c[SHIFT]
    heads, records = m.heads.ctypes.data, m.slots.ctypes.data
    taken, leaving = np.empty(_GROUP, np.int64), np.empty(_GROUP, np.int64)
    for begin in range(0, missed.shape[0], _GROUP):
        count = min(_GROUP, missed.shape[0] - begin)
        for j in range(count):
            i = np.int64(missed[begin + j])
            before_insert(m, policy, rows[max(i, ~i)])
        for j in range(count):
            i = np.int64(missed[begin + j])
            taken[j] = leaving[j] = -1
            if i < 0:
                missed[begin + j] = ~i
                continue
            slot = _take_slot(m, policy, records)
            held = m.slots[slot]
            leaving[j], taken[j] = held.row, slot
            if leaving[j] >= 0:
                prefetch_chain(heads, chain_of(leaving[j], shift))
            prefetch_chain(heads, chain_of(rows[i], shift))
            held.row = rows[i]
            held.status = IN_FLIGHT
            held.pins = 2
            held.mark = 0
            if policy == MIN:
                held.stamp = next_use[i]
            on_insert(m, policy, slot, records)
        for j in range(count):
            if leaving[j] >= 0:
                prefetch_first(m, chain_of(leaving[j], shift), records)
        for j in range(count):
            if leaving[j] >= 0:
                relink(m, slots_out, chain_of(leaving[j], shift), taken[j], np.int64(m.slots[taken[j]].next))
        for j in range(count):
            if taken[j] >= 0:
                i = np.int64(missed[begin + j])
                m.slots[taken[j]].next = slots_out[i]
                relink(m, slots_out, chain_of(rows[i], shift), -2 - i, taken[j])
                slots_out[i] = taken[j]


@njit(cache=True, nogil=True, no_cfunc_wrapper=True)
def acquire_rows(
    m: SlotMap, rows: NDArray[np.int64], next_use: NDArray[np.int32], slots_out: NDArray[np.int32],
    missed_out: NDArray[np.int32], waits_out: NDArray[np.int32], outcome: NDArray[np.int64],
) -> None:  # fmt: skip
    """See :func:`acquire`."""
    m = borrowed(m)
    c = m.counts
    if rows.shape[0] > c[UNPINNED]:
        short = _slots_needed(m, rows) - c[UNPINNED]
        if short > 0:
            outcome[0] = -short
            return
    c[BATCHES] += 1
    on_batch(m, c[POLICY])
    reads, waits, again = _pin_found(m, rows, next_use, slots_out, missed_out, waits_out)
    _place_missed(m, rows, next_use, slots_out, missed_out[:reads])
    for j in range(rows.shape[0] - 1, rows.shape[0] - 1 - again, -1):  # in the order of the mini-batch
        i = np.int64(waits_out[j])
        slot = np.int64(slots_out[-2 - slots_out[i]])
        slots_out[i] = slot
        _hit(m, c[POLICY], slot, i, next_use)
    c[HITS] += rows.shape[0] - reads
    c[MISSES] += reads
    c[WAITS] += waits + again
    outcome[0], outcome[1], outcome[2] = reads, waits, 1
