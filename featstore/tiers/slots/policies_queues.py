"""Policies that keep slots in queues: LRU with a standby list, SIEVE and S3-FIFO.

A queue is a log: slots are appended at its end, and an entry is valid as long as its slot's ``place`` names
it. Taking a slot out of the middle is so one store into a record that is in the cache anyway, where a linked
list would touch two others; and as entries lie in order, the records of those to come can be prefetched.
Stale entries are skipped, and squeezed out when the log is full, which is at most once for as many entries as
there are slots. SIEVE's rows leave where the hand stands, so there the entry itself is made stale (-1), and
no record is looked at to find that out.

*LRU* (GNNDrive, ICPP'24, section 4.2): the queue holds the slots that nobody uses, the *standby list*. A row
that is asked for leaves it, a row whose last pin goes joins its end, the victim is its first. Pinned slots
are never looked at.

*SIEVE* (Zhang et al., NSDI'24): all rows in the order in which they came. A hit marks. The hand moves from
the oldest towards the newest, takes marks away, and evicts the first row without one; unlike CLOCK's it
leaves survivors where they are. Pinned rows are passed by as they are.

*S3-FIFO* (Yang et al., SOSP'23): a new row enters a small queue; one that is hit at least twice there moves
on to the main queue, the others leave for the list of ghosts; a row that comes back while it is a ghost
enters the main queue at once. In the main queue a row goes round once more for each of up to three hits. Rows
in use cannot leave, which the paper need not say: a pinned row at the head of a queue goes to its end, and a
queue of pinned rows alone is not asked. Ghosts are fingerprints
(:mod:`featstore.tiers.slots.policies_ghosts`).
"""

from __future__ import annotations

import numpy as np

from featstore.base.compilation import njit
from featstore.base.native import INLINED, PART, prefetch
from featstore.tiers.slots import policies_ghosts as ghosts
from featstore.tiers.slots.layout import (
    BEGIN,
    CURSOR,
    END,
    GHOST_CLOCK,
    GHOST_MAX,
    IDLE,
    LENGTH,
    RECORD_BYTES,
    SLOTS,
    SMALL_MAX,
    SlotMap,
)

# Queues by number, typed, so that numba compiles no second version for a literal.
SMALL, MAIN = np.int64(0), np.int64(1)
STANDBY = np.int64(0)
FREQUENCY_MAX = 3
_AHEAD = 64  # entries whose records are prefetched ahead of the one that is looked at


@njit(**PART)
def _squeeze(m: SlotMap, q: int, records: int) -> None:
    """Drop a queue's stale entries."""
    c = m.counts
    to = first = 2 * c[SLOTS] * q
    end = c[END + q]
    for at in range(c[BEGIN + q], end):
        prefetch(records + RECORD_BYTES * np.int64(m.log[min(at + _AHEAD, end - 1)]))
        slot = m.log[at]
        if m.slots[slot].place == at:
            m.log[to] = slot
            m.slots[slot].place = to
            to += 1
    c[BEGIN + q], c[END + q] = first, to


@njit(**INLINED)
def push(m: SlotMap, q: int, slot: int) -> None:
    """Put a slot at the end of queue q."""
    c = m.counts
    if c[END + q] == 2 * c[SLOTS] * (q + 1):
        _squeeze(m, q, m.slots.ctypes.data)
    end = c[END + q]
    m.log[end] = slot
    m.slots[slot].place = end
    c[END + q] = end + 1


@njit(**INLINED)
def pop(m: SlotMap, q: int, records: int) -> np.int64:
    """Take the first slot out of queue q; -1 if it is empty."""
    at, end = m.counts[BEGIN + q], m.counts[END + q]
    found = np.int64(-1)
    while at < end and found < 0:
        prefetch(records + RECORD_BYTES * np.int64(m.log[min(at + _AHEAD, end - 1)]))
        slot = np.int64(m.log[at])
        if m.slots[slot].place == at:
            m.slots[slot].place = -1
            found = slot
        at += 1
    m.counts[BEGIN + q] = at
    return found


# SIEVE. CURSOR is the entry that the hand looks at next, of a row that is there, or -1 for the oldest.
# ``place`` names the entry; it is -1 for a slot that was emptied since a row came last, and LENGTH counts
# these: their entries are blotted out, all at once, when the next row comes, which is put into one of these
# slots.


@njit(**INLINED)
def _sieve_advance(m: SlotMap, at: int) -> None:
    """The hand moves to the first row's entry from ``at`` on."""
    end = m.counts[END]
    while at < end and m.log[at] < 0:
        at += 1
    m.counts[CURSOR] = at if at < end else -1


@njit(**PART)
def _sieve_squeeze(m: SlotMap, records: int) -> None:
    """Drop the entries whose rows have left."""
    c = m.counts
    to, end, hand = np.int64(0), c[END], c[CURSOR]
    for at in range(end):
        prefetch(records + RECORD_BYTES * np.int64(m.log[min(at + _AHEAD, end - 1)]))
        slot = np.int64(m.log[at])
        if at == hand:
            c[CURSOR] = to
        if slot >= 0:
            m.log[to] = slot
            m.slots[slot].place = to
            to += 1
    c[END] = to


@njit(**PART)
def _sieve_blot(m: SlotMap, records: int) -> None:
    """Blot out the entries of slots that were emptied."""
    c = m.counts
    for at in range(c[END]):
        prefetch(records + RECORD_BYTES * np.int64(m.log[min(at + _AHEAD, c[END] - 1)]))
        slot = np.int64(m.log[at])
        if slot >= 0 and m.slots[slot].place < 0:
            m.log[at] = -1
    c[LENGTH] = 0
    if c[CURSOR] >= 0:
        _sieve_advance(m, c[CURSOR])


@njit(**INLINED)
def sieve_insert(m: SlotMap, slot: int, records: int) -> None:
    c = m.counts
    if c[LENGTH] > 0:
        _sieve_blot(m, records)
    if c[END] == 2 * c[SLOTS]:
        _sieve_squeeze(m, records)
    end = c[END]
    m.log[end] = slot
    m.slots[slot].place = end
    c[END] = end + 1


@njit(**INLINED)
def sieve_victim(m: SlotMap, records: int) -> np.int64:
    at, end = m.counts[CURSOR], m.counts[END]
    if at < 0:
        at = np.int64(0)
    while True:
        prefetch(records + RECORD_BYTES * np.int64(m.log[min(at + _AHEAD, end - 1)]))
        slot = np.int64(m.log[at])
        if slot >= 0 and m.slots[slot].pins == 0:
            if m.slots[slot].mark == 0:
                break
            m.slots[slot].mark = 0
        at = at + 1 if at + 1 < end else np.int64(0)
    m.log[at] = -1
    _sieve_advance(m, at + 1)
    return slot


# S3-FIFO. ``mark`` is how often a row was hit, up to three; LENGTH + q and IDLE + q count a queue's slots and
# those without pins.


@njit(**INLINED)
def s3_insert(m: SlotMap, slot: int) -> None:
    held = m.slots[slot]
    known = ghosts.forget(m.ghosts, held.row, m.counts[GHOST_CLOCK] - m.counts[GHOST_MAX])
    q = MAIN if known else SMALL
    held.queue = q
    m.counts[LENGTH + q] += 1
    push(m, q, slot)


@njit(**INLINED)
def s3_victim(m: SlotMap, records: int) -> np.int64:
    c = m.counts
    entries = m.ghosts.ctypes.data
    while True:
        q = (
            SMALL
            if c[IDLE + MAIN] == 0 or (c[LENGTH + SMALL] >= c[SMALL_MAX] and c[IDLE + SMALL] > 0)
            else MAIN
        )
        if q == SMALL:  # the record is there by now
            soon = m.log[min(c[BEGIN + q] + _AHEAD // 2, c[END + q] - 1)]
            ghosts.prefetch_bucket(entries, m.ghosts, m.slots[soon].row)
        slot = pop(m, q, records)
        held = m.slots[slot]
        if held.pins == 0:
            if held.mark <= np.int64(q == SMALL):
                break
            if q == SMALL:
                held.mark = 0
                held.queue = MAIN
                for count in (LENGTH, IDLE):
                    c[count + SMALL] -= 1
                    c[count + MAIN] += 1
                q = MAIN
            else:
                held.mark -= 1
        push(m, q, slot)
    c[LENGTH + q] -= 1
    c[IDLE + q] -= 1
    if q == SMALL:
        c[GHOST_CLOCK] += 1
        ghosts.remember(m.ghosts, held.row, c[GHOST_CLOCK])
    return np.int64(slot)
