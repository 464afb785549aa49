"""Policies: which row leaves the buffer when another needs its slot?

A policy is a number in the slot map and a few branches in the functions below, which the kernels of
:mod:`featstore.online.slots` call: the branch goes the same way every time and costs nothing beside a cache miss, and one
compiled kernel serves all policies. A policy is told of

- ``on_batch``: a mini-batch begins; its rows will be told of one by one, first all that are found, then all that are read;
- ``on_hit``: a row was asked for and needs no read, once for each time it occurs;
- ``on_pin``: a row that nobody used comes into use (before ``on_hit``);
- ``on_insert``: a row was given a slot (it is pinned, and its read about to begin);
- ``on_idle``: a row's last pin has gone;
- ``on_remove``: a row that nobody uses is dropped because it could not be read.

``victim`` picks a slot without pins that holds a row, and forgets it. There is always one when it is called, and never an empty
slot left.

Here are FIFO and CLOCK, which need a hand alone: it goes round over the slots and passes by those that are pinned.
*FIFO* takes the next slot; BGL's choice (NSDI'23, section 3.2.3), because it costs least.
*STATIC* is FIFO; the rows of a static set are pinned for good, so the hand always passes them by.
*CLOCK* takes marks away, which hits set, and the first slot without one (second chance; a new row has no mark).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from featstore.online import policies_ghosts as ghosts
from featstore.online.policies_min import min_idle, min_victim
from featstore.online.policies_queues import (
    lru_victim,
    push,
    s3_hit,
    s3_insert,
    s3_leave,
    s3_victim,
    sieve_remove,
    sieve_victim,
    take_out,
)
from featstore.online.policies_score import (
    score_batch,
    score_hit,
    score_idle,
    score_insert,
    score_pin,
    score_remove,
    score_victim,
)
from featstore.online.slot_layout import CLOCK, HAND, IDLE, LRU, MIN, S3FIFO, SCORE, SIEVE, SLOTS, SlotMap


@njit(nogil=True, forceinline=True)
def before_insert(m: SlotMap, policy: int, row: int) -> None:
    """A row will be given a slot soon: prefetch what ``on_insert`` needs."""
    if policy == S3FIFO or policy == SCORE:
        ghosts.prefetch_bucket(m.ghosts.ctypes.data, m.ghosts, row)


@njit(nogil=True, forceinline=True)
def on_batch(m: SlotMap, policy: int) -> None:
    if policy == SCORE:
        score_batch(m)


@njit(nogil=True, forceinline=True)
def on_hit(m: SlotMap, policy: int, slot: int) -> None:
    if policy == CLOCK or policy == SIEVE:
        m.slots[slot].mark = 1
    elif policy == S3FIFO:
        s3_hit(m, slot)
    elif policy == SCORE:
        score_hit(m, slot)


@njit(nogil=True, forceinline=True)
def on_pin(m: SlotMap, policy: int, slot: int) -> None:
    if policy == LRU or policy == MIN:
        take_out(m, slot)
    elif policy == S3FIFO:
        m.counts[IDLE + m.slots[slot].queue] -= 1
    elif policy == SCORE:
        score_pin(m, slot)


@njit(nogil=True, forceinline=True)
def on_insert(m: SlotMap, policy: int, slot: int) -> None:
    if policy == SIEVE:
        push(m, 0, slot)
    elif policy == S3FIFO:
        s3_insert(m, slot)
    elif policy == SCORE:
        score_insert(m, slot)


@njit(nogil=True, forceinline=True)
def on_idle(m: SlotMap, policy: int, slot: int) -> None:
    if policy == LRU:
        push(m, 0, slot)
    elif policy == S3FIFO:
        m.counts[IDLE + m.slots[slot].queue] += 1
    elif policy == SCORE:
        score_idle(m, slot)
    elif policy == MIN:
        min_idle(m, slot)


@njit(nogil=True, forceinline=True)
def on_remove(m: SlotMap, policy: int, slot: int) -> None:
    if policy == SIEVE:
        sieve_remove(m, slot)
    elif policy == S3FIFO:
        m.counts[IDLE + m.slots[slot].queue] += 1  # its last pin has gone, and on_idle was not told
        s3_leave(m, slot)
    elif policy == SCORE:
        score_remove(m, slot)


@njit(nogil=True, forceinline=True)
def hand_victim(m: SlotMap) -> np.int64:
    """FIFO and CLOCK: the next slot without pin and mark."""
    slots = m.counts[SLOTS]
    slot = m.counts[HAND]
    while m.slots[slot].pins > 0 or m.slots[slot].mark != 0:
        if m.slots[slot].pins == 0:
            m.slots[slot].mark = 0
        slot = slot + 1 if slot + 1 < slots else 0
    m.counts[HAND] = slot + 1 if slot + 1 < slots else 0
    return np.int64(slot)


@njit(nogil=True, forceinline=True)
def victim(m: SlotMap, policy: int, records: int) -> np.int64:
    """A slot whose row leaves; ``records``: the address of the slots, for prefetching."""
    if policy == LRU:
        return np.int64(lru_victim(m, records))
    if policy == SIEVE:
        return np.int64(sieve_victim(m, records))
    if policy == S3FIFO:
        return np.int64(s3_victim(m, records))
    if policy == SCORE:
        return np.int64(score_victim(m, records))
    if policy == MIN:
        return np.int64(min_victim(m, records))
    return np.int64(hand_victim(m))
