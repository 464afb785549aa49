"""How many partitions fit: the memory of a mega-batch loader, as a sum, and the largest mega-batch within a
budget."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featstore.errors import BudgetError, SourceError
from featstore.loaders.mega.induce import Places

BLOCK_EDGES_MAX = 1 << 19
BLOCK_EDGES_MIN = 1 << 14
PLACES_MAX = 2**31 - 1  # local ids are int32
_PARTITION_BYTES = 160  # of tables by partition, those that live for a step included
_FIXED_BYTES = 1 << 20


@dataclass(frozen=True)
class Needs:
    """What the sizes of a loader follow from.

    ``partition_rows``, ``partition_edges`` int64 [partitions]: rows of each, and edges that it can bring into
    the subgraph: its own lists, and those of hubs that come from it. ``hub_edges``: edges between hubs.
    ``held_bytes``: reader, maps, training nodes.
    """

    rows: int
    row_bytes: int
    node_bytes: int
    source_bytes: int
    partition_rows: NDArray[np.int64]
    partition_edges: NDArray[np.int64]
    hubs: int
    hub_edges: int
    held_bytes: int


@dataclass(frozen=True)
class Sizes:
    """A loader's buffers: ``slots`` for ``resident`` and ``replaced`` partitions of ``slot_rows`` rows,
    ``edges_max`` for a subgraph."""

    resident: int
    replaced: int
    slots: int
    slot_rows: int
    edges_max: int
    block_edges: int
    memory_bytes: int

    @property
    def partition_places(self) -> int:
        return self.slots * self.slot_rows


def sizes_of(needs: Needs, resident: int, replaced: int, block_edges: int) -> Sizes:
    """The sizes for so many partitions at once."""
    count = int((needs.partition_rows > 0).sum())
    resident = min(resident, count)
    replaced = min(replaced, resident)
    slots = resident if resident == count else resident + replaced
    slot_rows = int(needs.partition_rows.max(initial=0))
    edges = int(np.sort(needs.partition_edges)[::-1][:resident].sum()) + needs.hub_edges
    places = needs.hubs + slots * slot_rows
    buffers = 1 if resident == count else 2  # of the subgraph
    total = (
        needs.held_bytes
        + places * (needs.row_bytes + needs.node_bytes + 1)  # 1: which are hubs, for weights
        + buffers * (8 * (places + 1) + 4 * (edges + 1))
        + 2 * needs.source_bytes * block_edges
        + 8 * (resident * (slot_rows + 1))  # offsets of the lists
        + Places.memory_bytes(needs.rows, needs.hubs, resident * slot_rows)
        + 9 * needs.hubs
        + _PARTITION_BYTES * len(needs.partition_rows)
        + _FIXED_BYTES
    )
    return Sizes(resident, replaced, slots, slot_rows, edges, block_edges, total)


def fit(needs: Needs, memory_bytes: int, resident: int | None, replaced: int | None) -> Sizes:
    """The largest mega-batch within ``memory_bytes``, or the one asked for.

    ``replaced``: partitions exchanged from step to step; None for all of them. Raises BudgetError with the
    smallest budget that works, and SourceError where no budget would do: local ids are int32.
    """
    wanted = max(BLOCK_EDGES_MIN, min(BLOCK_EDGES_MAX, memory_bytes // (64 * needs.source_bytes)))
    count = _count(needs)
    # Of all partitions none is ever exchanged: they may fit where a few less would not.
    ranges = [(count, count), (1, count - 1)] if resident is None else [(resident, resident)]
    for at_least, at_most in ranges:
        for block_edges in (wanted, BLOCK_EDGES_MIN):
            found = _largest(needs, memory_bytes, at_least, at_most, replaced, block_edges)
            if found is not None:
                return found
    choices = (1, count) if resident is None else (resident,)
    made = [_exchanged(needs, n, replaced, BLOCK_EDGES_MIN) for n in choices]
    numbered = [sizes for sizes in made if _places(needs, sizes) <= PLACES_MAX]
    if not numbered:
        raise SourceError(
            "a mega-batch numbers its rows with 32 bits, and the smallest one asked for has "
            f"{_places(needs, made[0]):,} places, more than {PLACES_MAX:,}: ask for fewer partitions "
            "(resident=, replaced=) or hubs, or pack with more partitions"
        )
    smallest = min(sizes.memory_bytes for sizes in numbered)
    what = (
        "hold one partition and load another (smaller partitions or fewer hubs need less)"
        if resident is None
        else f"hold mega-batches of {resident} partitions"
    )
    raise BudgetError(smallest, memory_bytes, what)


def _count(needs: Needs) -> int:
    return max(1, int((needs.partition_rows > 0).sum()))


def _places(needs: Needs, sizes: Sizes) -> int:
    """Places of a mega-batch, its local ids."""
    return needs.hubs + sizes.partition_places


def _exchanged(needs: Needs, resident: int, replaced: int | None, block_edges: int) -> Sizes:
    return sizes_of(needs, resident, resident if replaced is None else min(replaced, resident), block_edges)


def _largest(
    needs: Needs, memory_bytes: int, at_least: int, at_most: int, replaced: int | None, block_edges: int
) -> Sizes | None:
    """The most partitions from ``at_least`` to ``at_most`` with blocks of this size; None where none of that
    fits."""

    def sized(resident: int) -> Sizes | None:
        found = _exchanged(needs, resident, replaced, block_edges)
        return found if found.memory_bytes <= memory_bytes and _places(needs, found) <= PLACES_MAX else None

    low, high = at_least, at_most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sized(middle) is not None else (low, middle - 1)
    return sized(low) if low <= at_most else None
