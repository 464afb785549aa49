"""How many partitions fit: the memory of mega-batches and of the mini-batches drawn from them, as a sum, and
the largest mega-batch within a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featstore.errors import BudgetError, SourceError
from featstore.loaders.mega.induce import Places
from featstore.loaders.mega.largest import LargestDrawn

BLOCK_EDGES_MAX = 1 << 19
BLOCK_EDGES_MIN = 1 << 14
PLACES_MAX = 2**31 - 1  # local ids are int32
_PARTITION_BYTES = 160  # of tables by partition, those that live for a step included
_FIXED_BYTES = 1 << 20
_TURNS = 30  # of taking the least budget that may work for the next to try
_SEED_BYTES = 48  # of a training node: its local id in two mega-batches and their orders, and to find it


@dataclass(frozen=True)
class RowNeeds:
    """Of one type of nodes: ``rows`` of ``row_bytes``, 0 where none are loaded; ``node_bytes`` of what else
    each place has; ``partition_rows`` int64 [partitions]; how many are ``hubs``."""

    rows: int
    row_bytes: int
    node_bytes: int
    partition_rows: NDArray[np.int64]
    hubs: int

    @property
    def slot_rows(self) -> int:
        """Rows of the largest partition."""
        return int(self.partition_rows.max(initial=0))


@dataclass(frozen=True)
class ListNeeds:
    """Of one graph, whose edges lead into nodes of the type ``target``.

    ``source_bytes``: of a stored source. ``value_bytes``: of an edge's number, weight and time, 0 where there
    are none. ``partition_edges`` int64 [partitions]: edges that each can bring into the subgraph, its own
    lists, and those of hubs that come from it. ``hub_edges``: edges between hubs. ``order_bytes``: of an
    edge, while lists are put in the order of time.
    """

    target: str
    source_bytes: int
    value_bytes: int
    partition_edges: NDArray[np.int64]
    hub_edges: int
    order_bytes: int = 0

    def edges_max(self, resident: int) -> int:
        """Edges of the subgraph of so many partitions, at most."""
        return int(np.sort(self.partition_edges)[::-1][:resident].sum()) + self.hub_edges


@dataclass(frozen=True)
class Needs:
    """What the sizes of a loader follow from: types of nodes, and graphs between them, by name.

    ``seeds``: the type of the training nodes, of which there are ``train``. ``held_bytes``: reader, maps,
    training nodes. ``drawn``: the mini-batches that are drawn, or None where there are none.
    """

    rows: Mapping[str, RowNeeds]
    lists: Mapping[str, ListNeeds]
    seeds: str
    held_bytes: int
    train: int = 0
    drawn: LargestDrawn | None = None

    @property
    def with_rows(self) -> int:
        """Partitions that hold any rows."""
        return int(np.any([one.partition_rows > 0 for one in self.rows.values()], axis=0).sum())

    @property
    def source_bytes(self) -> int:
        return max(one.source_bytes for one in self.lists.values())

    @property
    def block_edge_bytes(self) -> int:
        """Of an edge of any graph while a block of lists is looked at."""
        return self.source_bytes + max(one.value_bytes for one in self.lists.values())


@dataclass(frozen=True)
class Sizes:
    """A loader's buffers: ``slots`` for ``resident`` and ``replaced`` partitions of ``slot_rows`` rows, by
    type, ``edges_max`` for the subgraph of each graph."""

    resident: int
    replaced: int
    slots: int
    slot_rows: Mapping[str, int]
    edges_max: Mapping[str, int]
    block_edges: int
    memory_bytes: int

    @property
    def buffers(self) -> int:
        """Subgraphs that there is room for."""
        return 1 if self.slots == self.resident else 2


def sizes_of(needs: Needs, resident: int, replaced: int, block_edges: int) -> Sizes:
    """The sizes for so many partitions at once."""
    count = needs.with_rows
    resident = min(resident, count)
    replaced = min(replaced, resident)
    slots = resident if resident == count else resident + replaced
    buffers = 1 if resident == count else 2  # of the subgraph
    types, graphs = needs.rows, needs.lists
    slot_rows = {name: one.slot_rows for name, one in types.items()}
    rows = {name: resident * size for name, size in slot_rows.items()}
    edges = {name: one.edges_max(resident) for name, one in graphs.items()}
    places = {name: one.hubs + slots * slot_rows[name] for name, one in types.items()}
    drawn = 0
    if needs.drawn is not None:
        used = {name: one.hubs + rows[name] for name, one in types.items()}
        drawn = needs.drawn.memory_bytes(used, edges, {name: one.row_bytes for name, one in types.items()})
    total = (
        needs.held_bytes
        + sum(
            places[name] * (one.row_bytes + one.node_bytes + 1)  # 1: which are hubs, for weights
            + Places.memory_bytes(one.rows, one.hubs, rows[name]) + 9 * one.hubs
            for name, one in types.items()
        )
        + sum(
            buffers * (8 * (places[one.target] + 1) + (4 + one.value_bytes) * (edges[name] + 1))
            + one.order_bytes * edges[name]
            + 8 * (rows[one.target] + resident)  # offsets of the lists
            for name, one in graphs.items()
        )
        + 2 * needs.block_edge_bytes * block_edges
        + drawn
        + _SEED_BYTES * min(needs.train, rows[needs.seeds])
        + _PARTITION_BYTES * len(types[needs.seeds].partition_rows) * max(len(types), len(graphs))
        + _FIXED_BYTES
    )  # fmt: skip
    return Sizes(resident, replaced, slots, slot_rows, edges, block_edges, total)


def fit(needs: Needs, memory_bytes: int, resident: int | None, replaced: int | None) -> Sizes:
    """The largest mega-batch within ``memory_bytes``, or the one asked for.

    ``replaced``: partitions exchanged from step to step; None for all of them. Raises BudgetError with the
    smallest budget that works, and SourceError where no budget would do: local ids are int32.
    """
    wanted = max(BLOCK_EDGES_MIN, min(BLOCK_EDGES_MAX, memory_bytes // (64 * needs.source_bytes)))
    count = max(1, needs.with_rows)
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


def _places(needs: Needs, sizes: Sizes) -> int:
    """Places of a mega-batch, its local ids, of the type that has most."""
    return max(one.hubs + sizes.slots * sizes.slot_rows[name] for name, one in needs.rows.items())


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
