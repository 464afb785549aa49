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
from featstore.base.native import INLINED, prefetch
from featstore.errors import ArgumentError, IdError
from featstore.tiers.slots.acquisition import acquire_rows
from featstore.tiers.slots.chains import borrowed, chain_of, relink
from featstore.tiers.slots.layout import (
    BATCHES,
    EMPTY,
    FAILED,
    FREE,
    IN_FLIGHT,
    MIN,
    MISSES,
    POLICY,
    PRESENT,
    RECORD_BYTES,
    SHIFT,
    UNPINNED,
    SlotMap,
)
from featstore.tiers.slots.policies import (
    on_idle,
    on_remove,
)

_AHEAD_UNPIN = 64  # ids; what takes a pin away does less for an id, and looks farther ahead
KEEP = -1  # a status that leaves a slot's as it is
NO_NEXT_USE = np.empty(0, np.int32)


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
