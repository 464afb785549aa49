"""SCORE: rows kept by two scores, after MassiveGNN (Sarkar et al., CLUSTER'24), with what an engine that
reads from a disk has to do differently.

A share of the slots is *resident*. A resident row has an eviction score S_E, multiplied by gamma in each
mini-batch that does not use it. A row that is not resident has an access score S_A, the number of times it
was missed. Every delta mini-batches, residents with S_E below alpha lose their place, and rows with the
highest S_A take it, with S_A as their new S_E (the paper's swap). Between these rounds residents do not
change; all other missed rows pass through the transient slots, of which the one that was released first goes
first.

*Lazily.* S_E only ever shrinks by one factor, so instead of it a slot holds the mini-batch in which it will
be below alpha (``due``), one later for every mini-batch that uses the row. No mini-batch touches rows that it
does not use.

What differs from the paper:

- Replacements are not fetched at the round. The round finds the least score that rows need to fill the places
  that came free (``THRESHOLD``), and such a row becomes resident when it is missed next: no read is made for
  a row that is perhaps not wanted again.
- S_A lies in a table of fingerprints with as many entries as there are slots
  (:mod:`featstore.tiers.slots.policies_ghosts`); a full bucket forgets its smallest count. It is an integer
  up to 255. The S_E of a row that leaves, which is below alpha, is not kept as its S_A; it begins at 0.
- At the start residents are the first rows that come, not those of the highest degree.
- A transient row that is still in its slot is a hit, and no miss is counted for it. Where no transient slot
  is free, a resident gives way (a hand goes round), so that residents never make a mini-batch fail.
"""

from __future__ import annotations

import numpy as np

from featstore.base.compilation import njit
from featstore.base.native import INLINED, PART
from featstore.tiers.slots import policies_ghosts as ghosts
from featstore.tiers.slots.layout import (
    BATCHES,
    COUNT_MAX,
    DELTA,
    FRESH,
    RESIDENT,
    RESIDENT_MAX,
    THRESHOLD,
    SlotMap,
)
from featstore.tiers.slots.policies_queues import STANDBY, push


@njit(**PART)
def score_batch(m: SlotMap) -> None:
    """A mini-batch begins: every delta of them, residents that are due lose their place, and the threshold is
    found anew."""
    c = m.counts
    if c[BATCHES] % c[DELTA] != 0:
        return
    for slot in range(c[FRESH]):
        held = m.slots[slot]
        if held.queue == 1 and held.due < c[BATCHES]:
            held.queue = 0
            c[RESIDENT] -= 1
            if held.pins == 0:
                push(m, STANDBY, slot)
    rows_of_count = np.zeros(COUNT_MAX + 1, np.int64)
    for at in range(m.ghosts.shape[0]):
        rows_of_count[m.ghosts[at] >> ghosts.FINGERPRINT_BITS] += 1
    threshold, rows = COUNT_MAX, rows_of_count[COUNT_MAX]
    while threshold > 1 and rows < c[RESIDENT_MAX] - c[RESIDENT]:
        threshold -= 1
        rows += rows_of_count[threshold]
    c[THRESHOLD] = threshold


@njit(**INLINED)
def score_hit(m: SlotMap, slot: int) -> None:
    held = m.slots[slot]
    if held.queue == 1 and held.last_use != m.counts[BATCHES]:
        held.last_use = m.counts[BATCHES]
        held.due += 1


@njit(**INLINED)
def score_insert(m: SlotMap, slot: int) -> None:
    c, held = m.counts, m.slots[slot]
    misses = min(ghosts.forget(m.ghosts, held.row, np.int64(0)) + 1, COUNT_MAX)
    if c[RESIDENT] < c[RESIDENT_MAX] and misses >= c[THRESHOLD]:
        held.queue = 1
        c[RESIDENT] += 1
        held.last_use = c[BATCHES]
        held.due = c[BATCHES] + m.table[misses]
    else:
        held.queue = 0
        ghosts.remember(m.ghosts, held.row, misses)


@njit(**INLINED)
def score_remove(m: SlotMap, slot: int) -> None:
    if m.slots[slot].queue == 1:
        m.slots[slot].queue = 0
        m.counts[RESIDENT] -= 1
