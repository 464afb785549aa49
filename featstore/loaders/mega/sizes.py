"""How many partitions fit: the memory of mega-batches and of the mini-batches drawn from them, as a sum, and
the largest mega-batch within a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featstore.errors import BudgetError, SourceError
from featstore.loaders.mega.induce import Places
from featstore.sampling.picking import table_size

BLOCK_EDGES_MAX = 1 << 19
BLOCK_EDGES_MIN = 1 << 14
PLACES_MAX = 2**31 - 1  # local ids are int32
_PARTITION_BYTES = 160  # of tables by partition, those that live for a step included
_FIXED_BYTES = 1 << 20
_TURNS = 30  # of taking the least budget that may work for the next to try
_SEED_BYTES = 48  # of a training node: its local id in two mega-batches and their orders, and to find it
HELD_BATCHES = 2  # mini-batches that exist at once: the loop's, and the one made ahead of it


_DEVICE_NODE_BYTES = 80  # of a node whose row a device tier puts together: its row's number, its slots


@dataclass(frozen=True)
class LargestDrawn:
    """Mini-batches of ``batch_size`` seeds, with so many neighbours per node and hop (-1: all), as large as
    they can be. ``device_bytes``: where a device tier puts their rows together, the host memory that it
    takes for that; else these are gathered in host memory. ``edge_bytes``: of an edge's number and
    row."""

    batch_size: int
    fanouts: tuple[int, ...]
    device_bytes: int | None = None
    edge_bytes: int = 0

    def nodes_and_edges(self, places: int, edges: int) -> tuple[int, int]:
        """Its nodes and edges at most, in a mega-batch of so many."""
        nodes = new = min(self.batch_size, places)
        drawn = 0
        for fanout in self.fanouts:
            of_hop = edges if fanout < 0 else min(edges, new * fanout)
            drawn, new = drawn + of_hop, min(of_hop, places - nodes)
            nodes += new
        return nodes, drawn

    def memory_bytes(self, places: int, edges: int, row_bytes: int) -> int:
        """Of those that exist at once, and of sampling one."""
        nodes, drawn = self.nodes_and_edges(places, edges)
        sampling = 24 * nodes + 12 * table_size(nodes) + 48 * drawn
        if self.device_bytes is not None:
            row_bytes, sampling = 0, sampling + self.device_bytes + _DEVICE_NODE_BYTES * nodes
        held = nodes * (row_bytes + 16) + (20 + self.edge_bytes) * drawn  # ids twice; ends, and weights
        return HELD_BATCHES * held + sampling


@dataclass(frozen=True)
class Needs:
    """What the sizes of a loader follow from.

    ``partition_rows``, ``partition_edges`` int64 [partitions]: rows of each, and edges that it can bring into
    the subgraph: its own lists, and those of hubs that come from it. ``hub_edges``: edges between hubs.
    ``held_bytes``: reader, maps, training nodes, of which there are ``train``. ``drawn``: the mini-batches
    that are drawn, or None where there are none. ``id_bytes``: of an edge's number, 0 where there are none.
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
    train: int = 0
    drawn: LargestDrawn | None = None
    id_bytes: int = 0


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
    rows = resident * slot_rows
    drawn = 0 if needs.drawn is None else needs.drawn.memory_bytes(needs.hubs + rows, edges, needs.row_bytes)
    total = (
        needs.held_bytes
        + places * (needs.row_bytes + needs.node_bytes + 1)  # 1: which are hubs, for weights
        + buffers * (8 * (places + 1) + (4 + needs.id_bytes) * (edges + 1))
        + 2 * (needs.source_bytes + needs.id_bytes) * block_edges
        + drawn
        + _SEED_BYTES * min(needs.train, rows)
        + 8 * (rows + resident)  # offsets of the lists
        + Places.memory_bytes(needs.rows, needs.hubs, rows)
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
    if needs.drawn is not None:
        what += ", and two mini-batches (of fewer seeds or neighbours they need less)"
    raise BudgetError(smallest, memory_bytes, what)


def budget_that_works(
    needs: Callable[[int], Needs], needed_bytes: int, resident: int | None, replaced: int | None
) -> int:
    """A budget that works where what is needed grows with it: tried from ``needed_bytes`` on."""
    turn = 0
    while True:
        try:
            fit(needs(needed_bytes), needed_bytes, resident, replaced)
            return needed_bytes
        except BudgetError as error:
            turn += 1
            needed_bytes = error.needed_bytes if turn < _TURNS else needed_bytes * 5 // 4


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
