"""Policies that keep slots in queues: LRU with a standby list, SIEVE and S3-FIFO.

A queue is a log: slots are appended at its end, and an entry is valid as long as its slot's ``place`` names it. Taking a slot
out of the middle is so one store into a record that is in the cache anyway, where a linked list would touch two others; and as
entries lie in order, the records of those to come can be prefetched. Stale entries are skipped, and squeezed out when the log
is full, which is at most once for as many entries as there are slots.

*LRU* (GNNDrive, ICPP'24, section 4.2): the queue holds the slots that nobody uses, the *standby list*. A row that is asked for
leaves it, a row whose last pin goes joins its end, the victim is its first. Pinned slots are never looked at.

*SIEVE* (Zhang et al., NSDI'24): all rows in the order in which they came. A hit marks. The hand moves from the oldest towards
the newest, takes marks away, and evicts the first row without one; unlike CLOCK's it leaves survivors where they are. Pinned
rows are passed by as they are.

*S3-FIFO* (Yang et al., SOSP'23): a new row enters a small queue; one that is hit at least twice there moves on to the main
queue, the others leave for the list of ghosts; a row that comes back while it is a ghost enters the main queue at once. In the
main queue a row goes round once more for each of up to three hits. Rows in use cannot leave, which the paper need not say: a
pinned row at the head of a queue goes to its end, and a queue of pinned rows alone is not asked. Ghosts are fingerprints
(:mod:`featstore.online.policies_ghosts`).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from featstore.native import prefetch
from featstore.online import policies_ghosts as ghosts
from featstore.online.slot_layout import (
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

SMALL, MAIN = 0, 1
_FREQUENCY_MAX = 3
_AHEAD = 16


@njit(nogil=True, forceinline=True)
def _squeeze(m: SlotMap, q: int) -> None:
    """Drop a queue's stale entries."""
    c = m.counts
    to = first = 2 * c[SLOTS] * q
    hand = np.int64(m.log[c[CURSOR]]) if c[CURSOR] >= 0 else np.int64(-1)
    for at in range(c[BEGIN + q], c[END + q]):
        slot = m.log[at]
        if m.slots[slot].place == at:
            m.log[to] = slot
            m.slots[slot].place = to
            to += 1
    c[BEGIN + q], c[END + q] = first, to
    if hand >= 0:
        c[CURSOR] = m.slots[hand].place


@njit(nogil=True, forceinline=True)
def push(m: SlotMap, q: int, slot: int) -> None:
    """Put a slot at the end of queue q."""
    c = m.counts
    if c[END + q] == 2 * c[SLOTS] * (q + 1):
        _squeeze(m, q)
    end = c[END + q]
    m.log[end] = slot
    m.slots[slot].place = end
    c[END + q] = end + 1


@njit(nogil=True, forceinline=True)
def take_out(m: SlotMap, slot: int) -> None:
    """Take a slot out of the queue it is in."""
    m.slots[slot].place = -1


@njit(nogil=True, forceinline=True)
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


@njit(nogil=True, forceinline=True)
def lru_victim(m: SlotMap, records: int) -> np.int64:
    return np.int64(pop(m, 0, records))


# SIEVE. CURSOR is the valid entry that the hand looks at next, or -1 for the oldest.


@njit(nogil=True, forceinline=True)
def _sieve_advance(m: SlotMap, at: int) -> None:
    """The hand moves to the first valid entry from ``at`` on."""
    end = m.counts[END]
    while at < end and m.slots[m.log[at]].place != at:
        at += 1
    m.counts[CURSOR] = at if at < end else -1


@njit(nogil=True, forceinline=True)
def sieve_remove(m: SlotMap, slot: int) -> None:
    place = np.int64(m.slots[slot].place)
    m.slots[slot].place = -1
    if m.counts[CURSOR] == place:
        _sieve_advance(m, place)


@njit(nogil=True, forceinline=True)
def sieve_victim(m: SlotMap, records: int) -> np.int64:
    at, begin, end = m.counts[CURSOR], m.counts[BEGIN], m.counts[END]
    if at < 0:
        at = begin
    while True:
        prefetch(records + RECORD_BYTES * np.int64(m.log[min(at + _AHEAD, end - 1)]))
        slot = np.int64(m.log[at])
        if m.slots[slot].place == at and m.slots[slot].pins == 0:
            if m.slots[slot].mark == 0:
                break
            m.slots[slot].mark = 0
        at = at + 1 if at + 1 < end else begin
    m.slots[slot].place = -1
    _sieve_advance(m, at + 1)
    return slot


# S3-FIFO. ``mark`` is how often a row was hit, up to three; LENGTH + q and IDLE + q count a queue's slots and those without pins.


@njit(nogil=True, forceinline=True)
def s3_enter(m: SlotMap, slot: int, q: int) -> None:
    """A row, pinned or not, goes to the end of a queue."""
    m.slots[slot].queue = q
    push(m, q, slot)
    m.counts[LENGTH + q] += 1
    if m.slots[slot].pins == 0:
        m.counts[IDLE + q] += 1


@njit(nogil=True, forceinline=True)
def s3_leave(m: SlotMap, slot: int) -> None:
    q = np.int64(m.slots[slot].queue)
    m.slots[slot].place = -1
    m.counts[LENGTH + q] -= 1
    if m.slots[slot].pins == 0:
        m.counts[IDLE + q] -= 1


@njit(nogil=True, forceinline=True)
def s3_insert(m: SlotMap, slot: int) -> None:
    known = ghosts.forget(m.ghosts, m.slots[slot].row, m.counts[GHOST_CLOCK] - m.counts[GHOST_MAX])
    s3_enter(m, slot, MAIN if known else SMALL)


@njit(nogil=True, forceinline=True)
def s3_hit(m: SlotMap, slot: int) -> None:
    m.slots[slot].mark = min(m.slots[slot].mark + 1, _FREQUENCY_MAX)


@njit(nogil=True, forceinline=True)
def s3_victim(m: SlotMap, records: int) -> np.int64:
    c = m.counts
    entries = m.ghosts.ctypes.data
    while True:
        q = SMALL if c[IDLE + MAIN] == 0 or (c[LENGTH + SMALL] >= c[SMALL_MAX] and c[IDLE + SMALL] > 0) else MAIN
        if q == SMALL:  # the record is there by now
            soon = m.log[min(c[BEGIN + q] + _AHEAD // 2, c[END + q] - 1)]
            ghosts.prefetch_bucket(entries, m.ghosts, m.slots[soon].row)
        slot = pop(m, q, records)
        frequency = m.slots[slot].mark
        if m.slots[slot].pins > 0:
            push(m, q, slot)
        elif q == SMALL and frequency > 1:
            s3_leave(m, slot)
            m.slots[slot].mark = 0
            s3_enter(m, slot, MAIN)
        elif q == MAIN and frequency > 0:
            m.slots[slot].mark = frequency - 1
            push(m, q, slot)
        else:
            s3_leave(m, slot)
            if q == SMALL:
                c[GHOST_CLOCK] += 1
                ghosts.remember(m.ghosts, m.slots[slot].row, c[GHOST_CLOCK])
            return np.int64(slot)
