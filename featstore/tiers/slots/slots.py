"""The slot map: which row is in which slot of a feature buffer, who uses it, and who reads it.

A mini-batch passes through four kernels. :func:`acquire` finds its rows and pins them; rows that are in no
slot get one, and the caller must read them. :func:`complete` says that they are there. :func:`release` takes
the mini-batch's pins away; a row without pins stays where it is, and can be found, until its slot is needed.
Which slot that is, the policy says (:mod:`featstore.tiers.slots.policies`).

*All or nothing.* Before anything changes, ``acquire`` makes sure that there are slots enough: a mini-batch of
n rows takes at most as many slots that nobody uses, so mostly a comparison is enough; where memory is tight,
the distinct rows that need a slot are counted. A mini-batch that does not fit changes nothing.

*Found first, read second.* All rows that are in the buffer are pinned before the first slot is given away, so
a mini-batch never evicts what it wants itself.

*A read has a pin of its own.* So a slot that is read into is never given away, even when all who wanted its
row have lost interest.

*Nobody waits for ever.* When a read fails, :func:`abandon` marks its slots FAILED. A row that nobody wants
any more is dropped. Otherwise it stays where it is, and the next who looks at it reads it into the same slot:
either one who asks for the row (it is a miss), or one who already waits for it (:func:`look_again`).

*Rows that occur twice.* Each occurrence pins. The first occurrence of a row that must be read is a miss,
every other one is a hit.

*Memory is waited for together.* Chains and records of ids to come are prefetched
(:mod:`featstore.tiers.slots.chains`), and missed rows are given slots in groups, in passes each of which asks
for the memory that the next one looks at.

*Once.* The functions that take pins away do so once for each ``once`` array they are given, whatever
interrupts their caller.

Counters (``counts``): HITS and MISSES by occurrence, WAITS (hits of rows that were on their way), EVICTIONS,
BATCHES.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.native import INLINED, PART, prefetch
from featstore.errors import ArgumentError, IdError
from featstore.tiers.slots.chains import borrowed, chain_of, prefetch_chain, prefetch_first, relink
from featstore.tiers.slots.layout import (
    BATCHES,
    EMPTY,
    EVICTIONS,
    FAILED,
    FREE,
    FRESH,
    HITS,
    IN_FLIGHT,
    MIN,
    MISSES,
    POLICY,
    PRESENT,
    RECORD_BYTES,
    SHIFT,
    UNPINNED,
    WAITS,
    SlotMap,
)
from featstore.tiers.slots.policies import (
    before_insert,
    on_batch,
    on_hit,
    on_idle,
    on_insert,
    on_pin,
    on_remove,
    victim,
)

# How many ids ahead of the one that is served records are prefetched, and their chains twice as far: as many
# as memory needs. What takes a pin away does less for an id, and looks farther ahead.
_AHEAD = 40
_AHEAD_UNPIN = 64
_GROUP = 512  # missed rows that are given slots together, so that memory is waited for together
KEEP = -1  # a status that leaves a slot's as it is
NO_NEXT_USE = np.empty(0, np.int32)


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


@njit(**INLINED)
def _drop(m: SlotMap, policy: int, slot: int) -> None:
    """Empty the slot of a row that could not be read and that nobody uses."""
    on_remove(m, policy, slot)
    held = m.slots[slot]
    relink(m, m.heads, chain_of(held.row, m.counts[SHIFT]), np.int64(slot), np.int64(held.next))
    held.row = -1
    held.status = EMPTY
    held.next = m.counts[FREE]
    m.counts[FREE] = slot


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


def acquire(
    m: SlotMap, rows: NDArray[np.int64], slots_out: NDArray[np.int32], missed_out: NDArray[np.int32],
    waits_out: NDArray[np.int32], next_use: NDArray[np.int32] = NO_NEXT_USE,
    outcome: NDArray[np.int64] | None = None,
) -> tuple[int, int]:  # fmt: skip
    """Pin a mini-batch's rows, and give slots to those that are in none.

    Args:
        rows: int64 [n], not negative.
        slots_out: int32 [n], becomes the slot of each row.
        missed_out: int32 [n], its first ``reads`` elements become the positions in ``rows`` of what the
            caller must read, and then :func:`complete` or :func:`abandon`; each row once.
        waits_out: int32 [n], its first ``waits`` elements become the positions of rows that others are
            reading.
        next_use: int32 [n], for MIN alone: the mini-batch that uses each row next, or NEVER.
        outcome: int64 [3], becomes (reads, waits, 1), or (-short, unchanged, unchanged). The kernel writes
            it, so who is interrupted finds here what has happened.

    Returns (reads, waits); or (-short, 0) where so many slots more would have to be without pins, and nothing
    has changed. Raises IdError for more rows than positions, which are int32, can number.
    """
    if len(rows) >= 2**31:
        raise IdError(
            f"a mini-batch asks for {len(rows):,} rows of a table, at most {2**31 - 1:,} can be: make "
            "it smaller"
        )
    if (m.counts[POLICY] == MIN) != (len(next_use) == len(rows)) and len(rows):
        raise ArgumentError("the policy min needs the next use of each row; other policies take none")
    if len(next_use) and next_use.min() < 0:
        raise ArgumentError(
            f"the next use of a row is the number of a mini-batch or NEVER, not {next_use.min()}"
        )
    outcome = np.zeros(3, np.int64) if outcome is None else outcome
    acquire_rows(m, rows, next_use, slots_out, missed_out, waits_out, outcome)
    return int(outcome[0]), int(outcome[1])


@njit(cache=True, nogil=True, no_cfunc_wrapper=True)
def unpin(m: SlotMap, slots: NDArray[np.int32], status: int, once: NDArray[np.int64]) -> None:
    """Take a pin from each slot, and set its status unless that is KEEP. Does nothing where ``once`` (its
    last element) is 0, and makes it 0."""
    if once[-1] == 0:
        return
    once[-1] = 0
    m = borrowed(m)
    policy, records = m.counts[POLICY], m.slots.ctypes.data
    for i in range(slots.shape[0]):
        prefetch(records + RECORD_BYTES * np.int64(slots[min(i + _AHEAD_UNPIN, slots.shape[0] - 1)]))
        slot = np.int64(slots[i])
        held = m.slots[slot]
        if status != KEEP:
            held.status = status
        held.pins -= 1
        if held.pins == 0:
            m.counts[UNPINNED] += 1
            if held.status == FAILED:
                _drop(m, policy, slot)
            else:
                on_idle(m, policy, slot)


def _once() -> NDArray[np.int64]:
    return np.ones(1, np.int64)


def complete(m: SlotMap, slots: NDArray[np.int32], once: NDArray[np.int64] | None = None) -> None:
    """Rows have been read into these slots (int32, each once): they are present."""
    unpin(m, slots, PRESENT, _once() if once is None else once)


def abandon(m: SlotMap, slots: NDArray[np.int32], once: NDArray[np.int64] | None = None) -> None:
    """The read of these slots (int32, each once) has failed. Who waits for them learns of it by
    :func:`look_again`."""
    unpin(m, slots, FAILED, _once() if once is None else once)


def release(m: SlotMap, slots: NDArray[np.int32], once: NDArray[np.int64] | None = None) -> None:
    """Take one pin from each of these slots, which a mini-batch acquired (int32, as ``slots_out`` was
    filled)."""
    unpin(m, slots, KEEP, _once() if once is None else once)


@njit(cache=True, nogil=True, no_cfunc_wrapper=True)
def look_again(
    m: SlotMap, slots: NDArray[np.int32], waits: NDArray[np.int32], missed_out: NDArray[np.int32]
) -> tuple[int, int]:
    """Which of the rows that a mini-batch waits for are still on their way?

    ``slots``: int32 [n], its slots; ``waits``: int32, positions in these. Those still in flight are moved to
    its front. Rows whose read failed are the caller's to read from now on, their positions put into
    ``missed_out``. Returns the numbers (waits, reads).
    """
    still = reads = 0
    for j in range(waits.shape[0]):
        i = waits[j]
        held = m.slots[slots[i]]
        if held.status == FAILED:
            held.status = IN_FLIGHT
            held.pins += 1
            m.counts[MISSES] += 1
            missed_out[reads] = i
            reads += 1
        elif held.status == IN_FLIGHT:
            waits[still] = i
            still += 1
    return still, reads


def load_kernels(m: SlotMap) -> None:
    """Run every kernel on nothing, so that numba loads or compiles it now: not in the middle of a read, nor
    while a process forks."""
    none, no_rows = np.empty(0, np.int32), np.empty(0, np.int64)
    acquire_rows(m, no_rows, none, none, none, none, np.zeros(3, np.int64))
    m.counts[BATCHES] = 0
    complete(m, none)
    look_again(m, none, none, none)
