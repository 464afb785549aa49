"""BGL's proximity-aware order: training nodes as breadth-first searches meet them.

Liu et al., NSDI 2023, section 3.2.2: where training nodes follow each other as a search of the graph meets
them, mini-batches close in time look at the same region. Two kinds of randomness keep training what it was: a
mini-batch takes its nodes in turn from several searches that began at random nodes, and each sequence is
shifted round by a random number in each epoch, so that neither its beginning nor the small components at its
end always stand at the same place. How many sequences: :mod:`featstore.sampling.shuffling`.

**Growing sequences together.** BGL searches the whole graph once per sequence; every training node then
stands in every sequence and is skipped wherever it comes late, which tears up the ends. Here all sequences
grow at the same time and share what they have seen: they take turns, and in its turn a sequence searches on
until it has met one more training node. Each training node is thus in exactly one sequence, lengths differ by
one at most, the order in which nodes are met is already the round-robin order, and one pass over the graph
does for any number of sequences. A sequence with nowhere left to go, walled in by the others or at the end of
a component, goes on from a random training node that none has met. The search follows ``indices``, from a
node to the sources of its edges, which is where its features come from when it is sampled.

**Memory** while sequences are drawn: 8 bytes a node (16 from 2**31 nodes on) and about 40 a training node,
besides the graph; between epochs 16 a training node. A graph in memory is used as it is, and of a memory map
the system keeps as much as it likes. One in a store is read whole for each draw and let go again: 8 bytes a
node, and 4 or 8 an edge. ``redraw=False`` draws once and then only shifts: 24 bytes a training node, and no
more reading.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_flag
from featstore.base.compilation import njit
from featstore.base.dtypes import node_dtype
from featstore.base.hashing import draw_below, random_words
from featstore.base.training_nodes import checked_train
from featstore.errors import SourceError
from featstore.reader.graphs import read_offsets, read_whole
from featstore.sampling.neighbors import graph_arrays
from featstore.sampling.orders import ROOTS, SHIFTS, TrainingOrder, lengths_of
from featstore.storage.relations import check_over_one_table, graph_of
from featstore.storage.store import OpenStore, StoredGraph

__all__ = ["ProximityOrder"]

_UNMET, _LAST = -2, -1  # in `links`: no sequence has met this row; it is the last in its queue
_BAD_OFFSETS, _BAD_SOURCE = 1, 2


class ProximityOrder(TrainingOrder):
    """BGL's proximity-aware order; see the module's text.

    Args:
        graph: (indptr int64 [nodes + 1], indices int32 or int64 [edges]), the sources of the edges into each
            node, arrays or memory maps; or a store's graph (``store.graphs[...]``), or a store with one
            graph.
        train: node ids of the training nodes, or a mask of the nodes.
        sequences: how many. ``"auto"``: the smallest number that the labels allow, or without labels 128;
            never more than ``batch_size``. Fewer share more rows, more shuffle better.
        labels: integers [nodes], by node id.
        batch_size: of the mini-batches that the order is cut into.
        seed: equal seeds give equal orders.
        redraw: draw new sequences for each epoch (BGL); else keep the first ones, and only shift them.
        trainers: how many train at the same time on mini-batches of their own.

    Raises SourceError and IdError, and what reading raises.
    """

    def __init__(
        self, graph: Any, train: Any, *, sequences: int | str = "auto", labels: Any = None, batch_size: int,
        seed: int = 0, redraw: bool = True, trainers: int = 1,
    ) -> None:  # fmt: skip
        self._graph = _graph_given(graph)
        self._mark = _mark_of(self._graph)
        nodes = self._graph.table.rows if isinstance(self._graph, StoredGraph) else len(self._graph[0]) - 1
        super().__init__(checked_train(train, nodes), nodes, batch_size, labels, seed, trainers)
        self.redraw = as_flag(redraw, "redraw")
        self._met: NDArray[np.int64] | None = None  # where sequences are kept
        self.sequences = self._choose(sequences)

    def _trials(self) -> Callable[[int], NDArray[np.int64]]:
        topology = self._topology()
        return lambda sequences: self._order_of(self._meet(topology, sequences, 0), sequences, 0)

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        if self.redraw:
            return self._order_of(self._meet(self._topology(), self.sequences, epoch), self.sequences, epoch)
        if self._met is None:
            self._met = self._meet(self._topology(), self.sequences, 0)
        return self._order_of(self._met, self.sequences, epoch)

    def _topology(self) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.int64]]:
        """(offsets, sources, row of each training node); in a store the search goes from row to row."""
        if not isinstance(self._graph, StoredGraph):
            return *self._graph, self.train
        rows = self._graph.table.row_of_node()
        train = self.train if rows is None else rows[self.train].astype(np.int64)
        return read_offsets(self._graph), read_whole(self._graph, "sources"), train

    def _meet(
        self, topology: tuple[NDArray[np.int64], NDArray[Any], NDArray[np.int64]], sequences: int, epoch: int
    ) -> NDArray[np.int64]:
        """Positions of the training nodes as ``sequences`` searches in turn meet them, int64 [n]."""
        offsets, sources, rows = topology
        roots = rows[np.argsort(random_words(self._key(ROOTS, epoch), len(rows)), kind="stable")]
        dtype = node_dtype(self.node_count)
        position_of = np.full(self.node_count, -1, dtype)
        position_of[rows] = np.arange(len(rows))
        met = np.empty(len(rows), np.int64)
        links = np.full(self.node_count, _UNMET, dtype)
        fault, where = grow_sequences(offsets, sources, position_of, roots, sequences, links, met)
        if fault == _BAD_OFFSETS:
            raise SourceError(
                f"the offsets of the graph are wrong at {where}: they must not fall, nor pass its edges"
            )
        if fault == _BAD_SOURCE:
            raise SourceError(f"edge {where:,} of the graph comes from {sources[where]}, which is no node")
        return met

    def _order_of(self, met: NDArray[np.int64], sequences: int, epoch: int) -> NDArray[np.int64]:
        """The round-robin order after the epoch's shifts."""
        words = random_words(self._key(SHIFTS, epoch), sequences)
        order = np.empty_like(met)
        for number, length in enumerate(lengths_of(len(met), sequences)):
            shift = int(draw_below(words[number], np.uint64(length)))
            order[number::sequences] = np.roll(met[number::sequences], -shift)
        return order

    def _identity(self) -> dict[str, Any]:
        own = {"order": "proximity", "nodes": self.node_count, "redraw": self.redraw}
        return own | {"graph": self._mark} | super()._identity()


def _mark_of(graph: StoredGraph | tuple[NDArray[np.int64], NDArray[Any]]) -> str:
    """What tells a graph from others."""
    if isinstance(graph, StoredGraph):
        return f"{graph.table.store.uuid} {graph.name}"
    some = [
        part[np.linspace(0, max(0, len(part) - 1), min(4096, len(part))).astype(np.int64)] for part in graph
    ]
    return f"{len(graph[1])} edges {zlib.crc32(b''.join(one.astype(np.int64).tobytes() for one in some))}"


def _graph_given(graph: Any) -> StoredGraph | tuple[NDArray[np.int64], NDArray[Any]]:
    """A graph as :class:`ProximityOrder` takes it, checked as far as can be without going through it."""
    if isinstance(graph, OpenStore):
        graph = graph_of(graph, None)
    if isinstance(graph, StoredGraph):
        check_over_one_table(graph)
        return graph
    try:
        indptr, indices = graph
    except (TypeError, ValueError, RuntimeError):
        raise SourceError(
            f"graph must be (indptr, indices), a store or its graph, not {type(graph).__name__}"
        ) from None
    return graph_arrays(indptr, indices)


@njit(cache=True, nogil=True)
def grow_sequences(
    offsets: Any, sources: Any, position_of: Any, roots: Any, sequences: Any, links: Any, met: Any
) -> Any:
    """Breadth-first searches that take turns; in its turn each goes on until it has met one training row
    more.

    ``position_of``: [rows], the position of a training row, else -1. ``roots``: int64 [n], the training rows,
    shuffled. ``links``: [rows], all -2; becomes each row's successor in its sequence's queue. ``met``: int64
    [n], becomes the positions in the order in which they were met; number i belongs to sequence
    ``i % sequences``. Returns (0, 0), or the fault and where it is.
    """
    heads = np.full(sequences, -1, np.int64)
    tails = np.full(sequences, -1, np.int64)
    places = np.zeros(sequences, np.int64)  # the next edge of the head
    next_root = 0
    for turn in range(len(met)):
        s = turn % sequences
        position = np.int64(-1)
        while position < 0:
            row = heads[s]
            if row < 0:
                # A training row is met when it is seen, so one that has not been met has not been seen: there
                # is a root.
                while links[roots[next_root]] != _UNMET:
                    next_root += 1
                row = roots[next_root]
                links[row] = _LAST
                heads[s] = tails[s] = row
                places[s] = offsets[row]
                position = np.int64(position_of[row])
                continue
            place = places[s]
            end = offsets[row + 1]
            if place < 0 or end < offsets[row] or end > len(sources):
                return _BAD_OFFSETS, row
            while place < end and position < 0:
                source = np.int64(sources[place])
                if source < 0 or source >= len(links):
                    return _BAD_SOURCE, place
                if links[source] == _UNMET:
                    links[source] = _LAST
                    links[tails[s]] = source
                    tails[s] = source
                    position = np.int64(position_of[source])
                place += 1
            places[s] = place
            if place == end and position < 0:
                heads[s] = links[row]
                if heads[s] >= 0:
                    places[s] = offsets[heads[s]]
        met[turn] = position
    return 0, 0
