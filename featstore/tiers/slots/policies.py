"""Policies: which row leaves the buffer when another needs its slot?

A policy is a number in the slot map and a few branches in the functions below, which the kernels of
:mod:`featstore.tiers.slots.acquisition` call, and ``on_idle`` and ``on_remove`` those of
:mod:`featstore.tiers.slots.slots`: the branch goes the same way every time and costs nothing beside a cache
miss, and one compiled kernel serves all policies. A policy is told of

- ``on_batch``: a mini-batch begins; its rows will be told of one by one, first all that are found, then all
  that are read;
- ``on_hit``: a row was asked for and needs no read, once for each time it occurs;
- ``on_pin``: a row that nobody used comes into use (before ``on_hit``);
- ``on_insert``: a row was given a slot (it is pinned, and its read about to begin);
- ``on_idle``: a row's last pin has gone;
- ``on_remove``: a row that nobody uses is dropped because it could not be read.

``victim`` picks a slot without pins that holds a row, and forgets it. There is always one when it is called,
and never an empty slot left.

Here are FIFO and CLOCK, which need a hand alone: it goes round over the slots and passes by those that are
pinned. *FIFO* takes the next slot; BGL's choice (NSDI'23, section 3.2.3), because it costs least. *STATIC* is
FIFO; the rows of a static set are pinned for good, so the hand always passes them by. *CLOCK* takes marks
away, which hits set, and the first slot without one (second chance; a new row has no mark).
"""

from __future__ import annotations

import numpy as np

from featstore.base.compilation import njit
from featstore.base.native import INLINED
from featstore.tiers.slots import policies_ghosts as ghosts
from featstore.tiers.slots.layout import (
    CLOCK,
    HAND,
    IDLE,
    LENGTH,
    LRU,
    MIN,
    S3FIFO,
    SCORE,
    SIEVE,
    SLOTS,
    SlotMap,
)
from featstore.tiers.slots.policies_min import min_idle, min_victim
from featstore.tiers.slots.policies_queues import (
    FREQUENCY_MAX,
    STANDBY,
    pop,
    push,
    s3_insert,
    s3_victim,
    sieve_insert,
    sieve_victim,
)
from featstore.tiers.slots.policies_score import score_batch, score_hit, score_insert, score_remove


@njit(**INLINED)
def before_insert(m: SlotMap, policy: int, row: int) -> None:
    """A row will be given a slot soon: prefetch what ``on_insert`` needs."""
    if policy == S3FIFO or policy == SCORE:
        ghosts.prefetch_bucket(m.ghosts.ctypes.data, m.ghosts, row)


@njit(**INLINED)
def on_batch(m: SlotMap, policy: int) -> None:
    if policy == SCORE:
        score_batch(m)


@njit(**INLINED)
def on_hit(m: SlotMap, policy: int, slot: int) -> None:
    if policy == CLOCK or policy == SIEVE:
        m.slots[slot].mark = 1
    elif policy == S3FIFO:
        m.slots[slot].mark = min(m.slots[slot].mark + 1, FREQUENCY_MAX)
    elif policy == SCORE:
        score_hit(m, slot)


@njit(**INLINED)
def on_pin(m: SlotMap, policy: int, slot: int) -> None:
    held = m.slots[slot]
    if policy == S3FIFO:
        m.counts[IDLE + held.queue] -= 1
    elif policy == LRU or policy == MIN or (policy == SCORE and held.queue == 0):
        held.place = -1  # it leaves its queue


@njit(**INLINED)
def on_insert(m: SlotMap, policy: int, slot: int, records: int) -> None:
    if policy == SIEVE:
        sieve_insert(m, slot, records)
    elif policy == S3FIFO:
        s3_insert(m, slot)
    elif policy == SCORE:
        score_insert(m, slot)


@njit(**INLINED)
def on_idle(m: SlotMap, policy: int, slot: int) -> None:
    held = m.slots[slot]
    if policy == S3FIFO:
        m.counts[IDLE + held.queue] += 1
    elif policy == LRU or (policy == SCORE and held.queue == 0):
        push(m, STANDBY, slot)
    elif policy == MIN:
        min_idle(m, slot)


@njit(**INLINED)
def on_remove(m: SlotMap, policy: int, slot: int) -> None:
    held = m.slots[slot]
    if policy == SIEVE:
        held.place = -1
        m.counts[LENGTH] += 1
    elif policy == S3FIFO:
        held.place = -1
        m.counts[LENGTH + held.queue] -= 1
    elif policy == SCORE:
        score_remove(m, slot)


@njit(**INLINED)
def _hand_victim(m: SlotMap) -> np.int64:
    """The next slot without pin and mark."""
    slots = m.counts[SLOTS]
    slot = m.counts[HAND]
    while m.slots[slot].pins > 0 or m.slots[slot].mark != 0:
        if m.slots[slot].pins == 0:
            m.slots[slot].mark = 0
        slot = slot + 1 if slot + 1 < slots else np.int64(0)
    m.counts[HAND] = slot + 1 if slot + 1 < slots else np.int64(0)
    return np.int64(slot)


@njit(**INLINED)
def victim(m: SlotMap, policy: int, records: int) -> np.int64:
    """A slot whose row leaves; ``records``: the address of the slots, for prefetching."""
    slot = np.int64(-1)
    if policy == SIEVE:
        slot = sieve_victim(m, records)
    elif policy == S3FIFO:
        slot = s3_victim(m, records)
    elif policy == MIN:
        slot = min_victim(m, records)
    elif policy == LRU or policy == SCORE:
        slot = pop(m, STANDBY, records)
    if slot < 0:
        slot = _hand_victim(m)
        if policy == SCORE:
            score_remove(m, slot)
    return slot
