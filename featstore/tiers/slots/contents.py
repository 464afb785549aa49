"""What is in a slot map: the rows that are there, in the order in which they would leave, as far as the
policy has an order.

All come in pieces, because a map may have very many slots: whoever goes through them needs memory for one
piece. Nothing may be changed in the map meanwhile, or a row may be found twice or not at all.

The order is that of the hand where one goes over the slots, and that of the queues where there are some, the
small one before the main one; SIEVE's hand goes over a queue, and what is behind it has survived. A queue is
a log, of which only those entries count that their slots name (:mod:`featstore.tiers.slots.policies_queues`),
so it is gone through as it lies. Slots that are in no queue come last: with LRU those in use.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.tiers.slots import layout
from featstore.tiers.slots.chains import slot_of_row

PIECE = 1 << 13  # slots that are looked at together


def present_slots(m: layout.SlotMap) -> Iterator[NDArray[np.int64]]:
    """int64, the slots whose rows are there, in pieces of at most :data:`PIECE`, none empty; those that would
    leave first come first."""
    for slots in _in_order(m):
        there = (m.slots["status"][slots] == layout.PRESENT) & (m.slots["row"][slots] >= 0)
        if there.any():
            yield slots[there]


def present_ids(m: layout.SlotMap) -> Iterator[NDArray[np.int64]]:
    """int64, the rows in the slots of :func:`present_slots`."""
    for slots in present_slots(m):
        yield m.slots["row"][slots]


def joined(pieces: Iterator[NDArray[np.int64]]) -> NDArray[np.int64]:
    """int64, all pieces in one array."""
    return np.concatenate([np.empty(0, np.int64), *pieces])


@njit(cache=True, nogil=True)
def find_present(m: layout.SlotMap, rows: NDArray[np.int64], slots: NDArray[np.int32]) -> None:
    """The slot of each row (int64 [n], not negative), -1 where it is not there."""
    shift = m.counts[layout.SHIFT]
    for i in range(rows.shape[0]):
        slot = slot_of_row(m, rows[i], shift)
        slots[i] = slot if slot >= 0 and m.slots[slot].status == layout.PRESENT else -1


def are_present(m: layout.SlotMap, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool [n], which of these rows (int64 [n], not negative) are there."""
    slots = np.empty(len(rows), np.int32)
    find_present(m, rows, slots)
    found: NDArray[np.bool_] = slots >= 0
    return found


def _in_order(m: layout.SlotMap) -> Iterator[NDArray[np.int64]]:
    """Pieces of all slots, each once; but for empty ones, which may be left out."""
    c, policy = m.counts, int(m.counts[layout.POLICY])
    if policy == layout.SIEVE:
        hand, end = max(0, int(c[layout.CURSOR])), int(c[layout.END])
        queues = [(hand, end), (0, hand)]
    elif policy in (layout.LRU, layout.S3FIFO):
        numbers = (0, 1) if policy == layout.S3FIFO else (0,)
        queues = [(int(c[layout.BEGIN + q]), int(c[layout.END + q])) for q in numbers]
    else:
        hand = int(c[layout.HAND]) if policy in (layout.FIFO, layout.CLOCK, layout.SCORE) else 0
        yield from _pieces(hand, len(m.slots))
        yield from _pieces(0, hand)
        return
    for begin, end in queues:
        for at in _pieces(begin, end):
            yield _named(m, at)
    for slots in _pieces(0, len(m.slots)):
        places = m.slots["place"][slots].astype(np.int64)
        queued = np.zeros(len(slots), bool)
        for begin, end in queues:
            queued |= (places >= begin) & (places < end)
        queued[queued] = m.log[places[queued]] == slots[queued]
        yield slots[~queued]


def _named(m: layout.SlotMap, at: NDArray[np.int64]) -> NDArray[np.int64]:
    """The slots in those entries of the log that their slots name."""
    slots = m.log[at[0] : at[-1] + 1].astype(np.int64)
    at, slots = at[slots >= 0], slots[slots >= 0]
    named: NDArray[np.int64] = slots[m.slots["place"][slots] == at]
    return named


def _pieces(begin: int, end: int) -> Iterator[NDArray[np.int64]]:
    for low in range(begin, end, PIECE):
        yield np.arange(low, min(end, low + PIECE))
