"""Sampler: which neighbours does a mini-batch look at?

Multi-hop uniform neighbour sampling without replacement, as in GraphSAGE (Hamilton et al., NeurIPS 2017),
over a graph in memory in CSC form: the sources of the edges into node ``v`` are
``indices[indptr[v]:indptr[v + 1]]``. What comes out is what PyG's ``NeighborLoader(replace=False)`` gives:
hop ``h`` looks only at the nodes that hop ``h - 1`` found first, edges point from the neighbour (``row``) to
the node that asked (``col``), a node stands once in ``node``, the seeds stand first, and nodes and edges come
grouped by hop. PyG's own sampler needs a compiled extension (pyg-lib or torch-sparse) that has no wheel on
PyPI; this one needs numba alone.

**Randomness is counted, not drawn.** There is no generator with a state. The key of a node is a hash (the
finaliser of SplitMix64: Steele, Lea, Flood, OOPSLA 2014) of seed, epoch, batch index, hop and node id, and
the j-th random number of that node is a hash of the key and j. A mini-batch thus depends on those alone: not
on the worker that made it, nor on what was sampled before. Of ``degree`` neighbours ``fanout`` are picked by
Floyd's algorithm (CACM 30(9), 1987), which draws exactly ``fanout`` numbers. A number below n is the upper
half of a 64 x 64 bit product, so the bias is under n / 2**64.

**Memory** follows the mini-batch, not the graph: each hop first counts its edges, which bounds the new nodes,
and then sizes its arrays and the hash table (open addressing, at most half full) that turns node ids into
local ids.

**Trust.** The arrays may be a memory map of a file from a stranger. A pass over all of it would cost more
than an epoch, so the kernels check each offset and each id as they meet it and stop with its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_fanouts, as_integer
from featstore.base.bitmap import slot_of
from featstore.base.compilation import njit
from featstore.base.hashing import GOLDEN, batch_key, draw_below, hop_key, mix64
from featstore.base.ids import as_integers, plain_array
from featstore.errors import IdError, SourceError


@dataclass(frozen=True)
class MiniBatch:
    """One sampled mini-batch of ``m`` nodes and ``k`` edges.

    ``node``: int64[m], node ids, seeds first, no duplicates. ``row``, ``col``: int64[k], positions in
    ``node`` of each edge's source (the neighbour) and target (the node that asked). ``edge_id``: int64[k],
    position of the edge in the sampler's ``indices``, no number of the user's. ``num_sampled_nodes``: new
    nodes per hop, the seeds as hop 0 (length hops + 1). ``num_sampled_edges``: edges per hop.
    """

    node: NDArray[np.int64]
    row: NDArray[np.int64]
    col: NDArray[np.int64]
    edge_id: NDArray[np.int64]
    num_sampled_nodes: tuple[int, ...]
    num_sampled_edges: tuple[int, ...]


class NeighborSampler:
    """Uniform neighbour sampler without replacement over a CSC graph in memory (or a memory map of one).

    ``indptr``: int64[n + 1]. ``indices``: int32 or int64 [e], the sources of the edges into each node.
    ``fanouts``: neighbours per node and hop, from the seeds outwards; -1 takes all. ``seed``: any integer.
    Arrays are used as they are, not copied.

    Raises SourceError if the graph or the fan-outs cannot be used. Safe to use from several threads: nothing
    is written.
    """

    def __init__(
        self, indptr: NDArray[Any], indices: NDArray[Any], fanouts: Sequence[int], seed: int = 0
    ) -> None:
        self.indptr, self.indices = graph_arrays(indptr, indices)
        self.fanouts = as_fanouts(fanouts)
        self.seed = as_integer(seed, "seed")

    @property
    def node_count(self) -> int:
        """Number of nodes of the graph."""
        return len(self.indptr) - 1

    def sample(self, seeds: NDArray[Any], batch_index: int = 0, *, epoch: int = 0) -> MiniBatch:
        """The mini-batch around ``seeds`` (any integer dtype [b], no duplicates).

        The result depends on the graph, the fan-outs, ``seed``, ``epoch``, ``batch_index`` and ``seeds``
        alone. Raises IdError for seeds that are no nodes or stand twice, SourceError where the graph's arrays
        contradict themselves.
        """
        node = checked_seeds(seeds, self.node_count)
        slots = seed_table(node, node, np.dtype(np.int64))
        count = len(node)
        key = batch_key(self.seed, as_integer(epoch, "epoch"), as_integer(batch_index, "batch_index"))
        node_counts, edge_counts = [count], []
        rows, cols, edges = [], [], []
        begin = 0
        for hop, fanout in enumerate(self.fanouts):
            edge_count, degree_max = hop_size(self.indptr, len(self.indices), node, begin, count, fanout)
            if edge_count < 0:
                self._raise_bad_offsets(int(node[-edge_count - 1]))
            node, slots = make_room(node, slots, count, min(count + edge_count, self.node_count))
            picks = empty_picks(fanout, degree_max)
            row, col, edge = (np.empty(edge_count, dtype=np.int64) for _ in range(3))
            new_count = sample_hop(
                self.indptr, self.indices, self.node_count, node, begin, count, fanout, hop_key(key, hop),
                slots, picks, row, col, edge,
            )  # fmt: skip
            if new_count < 0:
                self._raise_bad_neighbour(-new_count - 1)
            begin, count = count, new_count
            node_counts.append(count - begin)
            edge_counts.append(edge_count)
            rows.append(row)
            cols.append(col)
            edges.append(edge)
        return MiniBatch(
            node=node[:count].copy() if len(node) > count else node,
            row=np.concatenate(rows),
            col=np.concatenate(cols),
            edge_id=np.concatenate(edges),
            num_sampled_nodes=tuple(node_counts),
            num_sampled_edges=tuple(edge_counts),
        )

    def _raise_bad_offsets(self, node_id: int) -> None:
        low, high = int(self.indptr[node_id]), int(self.indptr[node_id + 1])
        raise SourceError(
            f"indptr gives node {node_id} the edges {low:,} to {high:,} of {len(self.indices):,}: "
            "offsets must rise and stay inside indices; build the CSC arrays again"
        )

    def _raise_bad_neighbour(self, edge: int) -> None:
        raise SourceError(
            f"indices[{edge}] is {self.indices[edge]}, no node of a graph of {self.node_count:,}; "
            "build the CSC arrays again"
        )


def graph_arrays(indptr: Any, indices: Any) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """CSC arrays, checked as far as can be without going through them. Raises SourceError."""
    offsets = _graph_array("indptr", indptr, (np.int64,))
    sources = _graph_array("indices", indices, (np.int32, np.int64))
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(sources):
        raise SourceError(
            f"indptr must hold n + 1 offsets, the first 0, the last the number of edges ({len(sources):,}); "
            "pass the CSC arrays of the incoming edges"
        )
    return offsets, sources


def _graph_array(name: str, array: NDArray[Any], dtypes: tuple[type, ...]) -> NDArray[Any]:
    """``array`` as a plain contiguous ndarray (a memory map stays a view of its file), or SourceError."""
    plain = plain_array(array, name)
    if plain.ndim != 1 or plain.dtype not in [np.dtype(dtype) for dtype in dtypes]:
        names = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise SourceError(
            f"{name} must be a one-dimensional {names} array, not {plain.dtype} of shape {plain.shape}"
        )
    return np.ascontiguousarray(plain)


def _table_size(entries: int) -> int:
    """Slots of a hash table for ``entries``: a power of two, at least twice as many."""
    return 1 << max(4, (2 * entries - 1).bit_length())


def checked_seeds(seeds: NDArray[Any], node_count: int) -> NDArray[np.int64]:
    """A copy of ``seeds`` as int64 [b]. Raises IdError for seeds that are no nodes of a graph of
    ``node_count``."""
    given = as_integers(seeds, "seeds must be a one-dimensional integer array")
    if given.ndim != 1:
        raise IdError(
            f"seeds must be a one-dimensional integer array, not {given.dtype} of shape {given.shape}"
        )
    if len(given) and (int(given.min()) < 0 or int(given.max()) >= node_count):
        bad = given[(given < 0) | (given >= node_count)][0]
        raise IdError(f"seed {bad} is no node: the graph has nodes 0 to {node_count - 1:,}")
    return given.astype(np.int64)


def seed_table(labels: NDArray[np.int64], seeds: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A hash table of ``dtype`` that holds the label of each seed. Raises IdError where a seed stands
    twice."""
    slots = np.full(_table_size(len(labels)), -1, dtype=dtype)
    duplicate = fill_table(slots, labels, len(labels))
    if duplicate >= 0:
        raise IdError(
            f"seed {seeds[duplicate]} stands twice in one mini-batch; pass each seed once (np.unique)"
        )
    return slots


def empty_picks(fanout: int, degree_max: int) -> NDArray[np.int64]:
    """The hash set of :func:`pick_distinct`, empty, for nodes of at most ``degree_max`` neighbours."""
    return np.full((2, _table_size(min(fanout, degree_max) if fanout > 0 else 1)), -1, dtype=np.int64)


def make_room(
    node: NDArray[np.int64], slots: NDArray[Any], count: int, bound: int
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """``node`` with room for ``bound`` ids and a table that stays half empty with them."""
    if bound > len(node):
        room = np.empty(bound, dtype=np.int64)
        room[:count] = node[:count]
        node = room
    if _table_size(bound) > len(slots):
        slots = np.full(_table_size(bound), -1, dtype=slots.dtype)
        fill_table(slots, node, count)
    return node, slots


@njit(cache=True, nogil=True)
def find_or_add(slots: Any, node: Any, count: Any, node_id: Any) -> Any:
    """Local id of ``node_id``; one that is new becomes ``node[count]`` (so a result equal to ``count`` means:
    new)."""
    mask = np.uint64(len(slots) - 1)
    slot = mix64(np.uint64(node_id)) & mask
    while True:
        local = slots[slot]
        if local < 0:
            slots[slot] = count
            node[count] = node_id
            return count
        if node[local] == node_id:
            return local
        slot = (slot + np.uint64(1)) & mask


@njit(cache=True, nogil=True)
def fill_table(slots: Any, node: Any, count: Any) -> Any:
    """Enter ``node[:count]`` into an empty table. Returns -1, or the position of the first id that stands
    twice."""
    for position in range(count):
        if find_or_add(slots, node, position, node[position]) != position:
            return position
    return -1


@njit(cache=True, nogil=True)
def hop_size(indptr: Any, edge_total: Any, node: Any, begin: Any, end: Any, fanout: Any) -> Any:
    """Edges that ``node[begin:end]`` will sample and their largest degree; (-1 - position, 0) where offsets
    are wrong."""
    edge_count = 0
    degree_max = 0
    for position in range(begin, end):
        low = indptr[node[position]]
        high = indptr[node[position] + 1]
        if low < 0 or high < low or high > edge_total or high - low >= 4294967296:
            return -1 - position, 0
        degree = high - low
        degree_max = max(degree_max, degree)
        edge_count += degree if fanout < 0 else min(degree, fanout)
    return edge_count, degree_max


@njit(cache=True, nogil=True)
def pick_distinct(key: Any, degree: Any, fanout: Any, picks: Any, stamp: Any, out: Any) -> None:
    """Floyd's algorithm: ``fanout`` distinct numbers below ``degree`` into ``out``, each set equally likely.

    ``picks``: int64[2, power of two], a hash set: row 0 the stamp of who entered the number in row 1, so that
    the next node with another stamp finds it empty.
    """
    mask = np.uint64(picks.shape[1] - 1)
    for draw in range(fanout):
        top = degree - fanout + draw
        word = mix64(key + np.uint64(draw + 1) * GOLDEN)
        pick = np.int64(draw_below(word, np.uint64(top + 1)))
        slot = mix64(np.uint64(pick)) & mask
        while picks[0, slot] == stamp:
            if picks[1, slot] == pick:
                # Taken already. `top` cannot be: all earlier numbers are below it.
                pick = top
                slot = mix64(np.uint64(pick)) & mask
            else:
                slot = (slot + np.uint64(1)) & mask
        picks[0, slot] = stamp
        picks[1, slot] = pick
        out[draw] = pick


@njit(cache=True, nogil=True)
def pick_edges(
    key: Any, node_id: Any, low: Any, degree: Any, fanout: Any, picks: Any, stamp: Any, out: Any
) -> Any:
    """The picked ones among the edges ``low`` to ``low + degree`` of a node, into the front of ``out``;
    returns how many.

    ``key`` is that of the hop; ``picks`` and ``stamp`` are those of :func:`pick_distinct`.
    """
    if fanout < 0 or degree <= fanout:
        for draw in range(degree):
            out[draw] = low + draw
        return degree
    pick_distinct(mix64(key ^ mix64(np.uint64(node_id))), degree, fanout, picks, stamp, out)
    for draw in range(fanout):
        out[draw] += low
    return fanout


@njit(cache=True, nogil=True)
def sample_hop(
    indptr: Any, indices: Any, node_total: Any, node: Any, begin: Any, end: Any, fanout: Any, key: Any,
    slots: Any, picks: Any, row: Any, col: Any, edge: Any,
) -> Any:  # fmt: skip
    """Sample the neighbours of ``node[begin:end]``, write their edges, and append new nodes from
    ``node[end]`` on.

    Returns how many nodes there are now, or -1 - e where ``indices[e]`` is no node. Sizes and offsets: see
    :func:`hop_size`.
    """
    count = end
    filled = 0
    for position in range(begin, end):
        low = indptr[node[position]]
        degree = indptr[node[position] + 1] - low
        taken = pick_edges(key, node[position], low, degree, fanout, picks, position, edge[filled:])
        for place in range(filled, filled + taken):
            neighbour = np.int64(indices[edge[place]])
            if neighbour < 0 or neighbour >= node_total:
                return -1 - edge[place]
            local = find_or_add(slots, node, count, neighbour)
            if local == count:
                count += 1
            row[place] = local
            col[place] = position
        filled += taken
    return count


@njit(cache=True, nogil=True)
def pick_hop(
    offsets: Any, node_of_row: Any, rows: Any, begin: Any, end: Any, fanout: Any, key: Any,
    bits: Any, ranks: Any, starts: Any, lists: Any, picks: Any, row: Any, col: Any, edge: Any,
) -> Any:  # fmt: skip
    """Pick the edges of ``rows[begin:end]``: their positions into ``edge``, who asks into ``col``, and into
    ``row`` the neighbour where the cache holds it, else -1. Returns how many of ``row`` are negative.

    ``node_of_row`` is empty where row = node id; ``bits``, ``ranks``, ``starts`` and ``lists`` are those of
    :class:`featstore.sampling.stored.HubCache`, empty where nothing is cached. Sizes and offsets:
    see :func:`hop_size`.
    """
    identity = node_of_row.shape[0] == 0
    cached = bits.shape[0] > 0
    filled = 0
    misses = 0
    for position in range(begin, end):
        asking = rows[position]
        low = offsets[asking]
        node_id = asking if identity else np.int64(node_of_row[asking])
        taken = pick_edges(
            key, node_id, low, offsets[asking + 1] - low, fanout, picks, position, edge[filled:]
        )
        slot = slot_of(asking, bits, ranks) if cached else np.int64(-1)
        for place in range(filled, filled + taken):
            col[place] = position
            row[place] = lists[starts[slot] + edge[place] - low] if slot >= 0 else -1
            misses += row[place] < 0
        filled += taken
    return misses


@njit(cache=True, nogil=True)
def enter_hop(slots: Any, rows: Any, count: Any, row: Any, row_total: Any) -> Any:
    """Turn the neighbours in ``row`` into local ids, in order; new ones become ``rows[count]`` and so on.

    Returns how many rows there are now, or -1 - place for the first that is none of ``row_total`` rows.
    """
    for place in range(len(row)):
        neighbour = row[place]
        if neighbour < 0 or neighbour >= row_total:
            return -1 - place
        local = find_or_add(slots, rows, count, neighbour)
        if local == count:
            count += 1
        row[place] = local
    return count
