"""How rows are found in a slot map: a hash with chains, and the map as kernels hold it.

A chain begins in ``heads`` and goes on by the ``next`` of each slot's record; -1 ends it. While
:func:`featstore.tiers.slots.slots.acquire` is at work, a chain may also hold a missed row that has no slot
yet, as -2 - its position in the mini-batch; what comes after it is kept in an array beside (``follow``).

Lookups are latency, not work: whoever goes through many rows asks for the chains of those to come well before
they are needed, and then, when their beginnings are there, for the first record of each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.hashing import GOLDEN
from featstore.base.native import INLINED, borrow, prefetch
from featstore.tiers.slots.layout import RECORD_BYTES, SlotMap

_HEAD_BYTES = 4


@njit(**INLINED)
def borrowed(m: SlotMap) -> SlotMap:
    """The same map, as arrays that nobody owns; see :func:`featstore.base.native.borrow`."""
    return SlotMap(
        borrow(m.counts),
        borrow(m.heads),
        borrow(m.slots),
        borrow(m.log),
        borrow(m.ghosts),
        borrow(m.table),
    )


@njit(**INLINED)
def chain_of(row: Any, shift: Any) -> Any:
    """The place in ``heads`` of a row's chain; ``shift``: the map's SHIFT."""
    return np.int64((np.uint64(row) * GOLDEN) >> np.uint64(shift))


@njit(**INLINED)
def prefetch_chain(heads: int, chain: int) -> None:
    """The beginning of a chain will be looked at; ``heads``: their address."""
    prefetch(heads + _HEAD_BYTES * chain)


@njit(**INLINED)
def prefetch_first(m: SlotMap, chain: int, records: int) -> None:
    """The first record of a chain will be looked at, its beginning is there; ``records``: the address of the
    slots."""
    prefetch(records + RECORD_BYTES * max(np.int64(m.heads[chain]), np.int64(0)))


@njit(**INLINED)
def slot_of_row(m: SlotMap, row: int, shift: Any) -> np.int64:
    """The slot of a row, -1 where it has none; between calls of ``acquire``."""
    slot = np.int64(m.heads[chain_of(row, shift)])
    while slot >= 0 and m.slots[slot].row != row:
        slot = np.int64(m.slots[slot].next)
    return slot


@njit(**INLINED)
def relink(m: SlotMap, follow: NDArray[np.int32], chain: int, node: int, by: int) -> None:
    """In a chain, let what points to ``node`` point to ``by`` instead."""
    at = np.int64(m.heads[chain])
    if at == node:
        m.heads[chain] = by
        return
    while True:
        after = np.int64(m.slots[at].next) if at >= 0 else np.int64(follow[-2 - at])
        if after == node:
            break
        at = after
    if at >= 0:
        m.slots[at].next = by
    else:
        follow[-2 - at] = by
