"""Sampler: which neighbours does a mini-batch look at?

Multi-hop uniform neighbour sampling without replacement, as in GraphSAGE (Hamilton et al., NeurIPS 2017), over a
graph in memory in CSC form: the sources of the edges into node ``v`` are ``indices[indptr[v]:indptr[v + 1]]``. What
comes out is what PyG's ``NeighborLoader(replace=False)`` gives: hop ``h`` looks only at the nodes that hop ``h - 1``
found first, edges point from the neighbour (``row``) to the node that asked (``col``), a node stands once in
``node``, the seeds stand first, and nodes and edges come grouped by hop. PyG's own sampler needs a compiled extension
(pyg-lib or torch-sparse) that has no wheel on PyPI; this one needs numba alone.

**Randomness is counted, not drawn.** There is no generator with a state. The key of a node is a hash (the finaliser
of SplitMix64: Steele, Lea, Flood, OOPSLA 2014) of seed, epoch, batch index, hop and node id, and the j-th random
number of that node is a hash of the key and j. A mini-batch thus depends on those alone: not on the worker that made
it, nor on what was sampled before. Of ``degree`` neighbours ``fanout`` are picked by Floyd's algorithm (CACM 30(9),
1987), which draws exactly ``fanout`` numbers. A number below n is the upper half of a 64 x 64 bit product, so the
bias is under n / 2**64.

**Memory** follows the mini-batch, not the graph: each hop first counts its edges, which bounds the new nodes, and then
sizes its arrays and the hash table (open addressing, at most half full) that turns node ids into local ids.

**Trust.** The arrays may be a memory map of a file from a stranger. A pass over all of it would cost more than an
epoch, so the kernels check each offset and each id as they meet it and stop with its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from featstore.errors import IdError, SourceError
from featstore.tiers.static import slot_of

__all__ = ["MiniBatch", "NeighborSampler", "fold_ids"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = 2**64


@dataclass(frozen=True)
class MiniBatch:
    """One sampled mini-batch of ``m`` nodes and ``k`` edges.

    ``node``: int64[m], node ids, seeds first, no duplicates. ``row``, ``col``: int64[k], positions in ``node`` of
    each edge's source (the neighbour) and target (the node that asked). ``edge_id``: int64[k], position of the edge
    in ``indices``. ``num_sampled_nodes``: new nodes per hop, the seeds as hop 0 (length hops + 1).
    ``num_sampled_edges``: edges per hop.
    """

    node: NDArray[np.int64]
    row: NDArray[np.int64]
    col: NDArray[np.int64]
    edge_id: NDArray[np.int64]
    num_sampled_nodes: tuple[int, ...]
    num_sampled_edges: tuple[int, ...]


class NeighborSampler:
    """Uniform neighbour sampler without replacement over a CSC graph in memory (or a memory map of one).

    ``indptr``: int64[n + 1]. ``indices``: int32 or int64 [e], the sources of the edges into each node. ``fanouts``:
    neighbours per node and hop, from the seeds outwards; -1 takes all. ``seed``: any integer. Arrays are used as they
    are, not copied.

    Raises SourceError if the graph or the fan-outs cannot be used. Safe to use from several threads: nothing is
    written.
    """

    def __init__(self, indptr: NDArray[Any], indices: NDArray[Any], fanouts: Sequence[int], seed: int = 0) -> None:
        self.indptr = _graph_array("indptr", indptr, (np.int64,))
        self.indices = _graph_array("indices", indices, (np.int32, np.int64))
        if len(self.indptr) == 0 or self.indptr[0] != 0 or self.indptr[-1] != len(self.indices):
            raise SourceError(
                f"indptr must hold n + 1 offsets, the first 0, the last the number of edges ({len(self.indices):,}); "
                "pass the CSC arrays of the incoming edges"
            )
        self.fanouts = checked_fanouts(fanouts)
        self.seed = int(seed)

    @property
    def node_count(self) -> int:
        """Number of nodes of the graph."""
        return len(self.indptr) - 1

    def sample(self, seeds: NDArray[Any], batch_index: int = 0, *, epoch: int = 0) -> MiniBatch:
        """The mini-batch around ``seeds`` (any integer dtype [b], no duplicates).

        The result depends on the graph, the fan-outs, ``seed``, ``epoch``, ``batch_index`` and ``seeds`` alone.
        Raises IdError for seeds that are no nodes or stand twice, SourceError where the graph's arrays contradict
        themselves.
        """
        node = checked_seeds(seeds, self.node_count)
        slots = seed_table(node, node, np.dtype(np.int64))
        count = len(node)
        key = batch_key(self.seed, epoch, batch_index)
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
            f"indptr gives node {node_id} the edges {low:,} to {high:,} of {len(self.indices):,}: offsets must rise "
            "and stay inside indices; build the CSC arrays again"
        )

    def _raise_bad_neighbour(self, edge: int) -> None:
        raise SourceError(
            f"indices[{edge}] is {self.indices[edge]}, no node of a graph of {self.node_count:,}; "
            "build the CSC arrays again"
        )


def _graph_array(name: str, array: NDArray[Any], dtypes: tuple[type, ...]) -> NDArray[Any]:
    """``array`` as a plain contiguous ndarray (a memory map stays a view of its file), or SourceError."""
    plain = np.asarray(array)
    if plain.ndim != 1 or plain.dtype not in [np.dtype(dtype) for dtype in dtypes]:
        names = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise SourceError(f"{name} must be a one-dimensional {names} array, not {plain.dtype} of shape {plain.shape}")
    return np.ascontiguousarray(plain)


def _table_size(entries: int) -> int:
    """Slots of a hash table for ``entries``: a power of two, at least twice as many."""
    return 1 << max(4, (2 * entries - 1).bit_length())


def checked_fanouts(fanouts: Sequence[int]) -> tuple[int, ...]:
    """``fanouts`` as a tuple. Raises SourceError for anything but one number per hop."""
    given = tuple(int(fanout) for fanout in fanouts)
    if not given or any(fanout < -1 or fanout == 0 for fanout in given):
        raise SourceError(f"fanouts {list(fanouts)} must be one number per hop: at least 1, or -1 for all of them")
    return given


def checked_seeds(seeds: NDArray[Any], node_count: int) -> NDArray[np.int64]:
    """A copy of ``seeds`` as int64 [b]. Raises IdError for seeds that are no nodes of a graph of ``node_count``."""
    given = np.asarray(seeds)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise IdError(f"seeds must be a one-dimensional integer array, not {given.dtype} of shape {given.shape}")
    if len(given) and (int(given.min()) < 0 or int(given.max()) >= node_count):
        bad = given[(given < 0) | (given >= node_count)][0]
        raise IdError(f"seed {bad} is no node: the graph has nodes 0 to {node_count - 1:,}")
    return given.astype(np.int64)


def seed_table(labels: NDArray[np.int64], seeds: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A hash table of ``dtype`` that holds the label of each seed. Raises IdError where a seed stands twice."""
    slots = np.full(_table_size(len(labels)), -1, dtype=dtype)
    duplicate = fill_table(slots, labels, len(labels))
    if duplicate >= 0:
        raise IdError(f"seed {seeds[duplicate]} stands twice in one mini-batch; pass each seed once (np.unique)")
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


def _mix(word: int) -> int:
    """The finaliser of SplitMix64 on Python integers (modulo 2**64)."""
    word %= _WORD
    word = (word ^ (word >> 30)) * int(_MIX_A) % _WORD
    word = (word ^ (word >> 27)) * int(_MIX_B) % _WORD
    return word ^ (word >> 31)


def batch_key(seed: int, epoch: int, batch_index: int) -> int:
    """A 64-bit key of seed, epoch and batch; each step is mixed, so that neighbouring numbers share nothing."""
    key = 0
    for word in (seed, epoch, batch_index):
        key = _mix(key + int(_GOLDEN) + word)
    return key


def hop_key(key: int, hop: int) -> np.uint64:
    """The key of a hop of the mini-batch whose key is ``key``."""
    return np.uint64(_mix(key + hop))


@njit(cache=True, nogil=True)
def mix64(word: Any) -> Any:
    """The finaliser of SplitMix64 (uint64 to uint64, a bijection)."""
    word = (word ^ (word >> np.uint64(30))) * _MIX_A
    word = (word ^ (word >> np.uint64(27))) * _MIX_B
    return word ^ (word >> np.uint64(31))


@njit(cache=True, nogil=True)
def fold_ids(ids: Any) -> Any:
    """A 63-bit fingerprint of int64 ids and their order: the batch index of a loader that does not tell its own."""
    key = _GOLDEN
    for position in range(len(ids)):
        key = mix64(key ^ np.uint64(ids[position])) + _GOLDEN
    return np.int64(mix64(key) >> np.uint64(1))


@njit(cache=True, nogil=True)
def draw_below(word: Any, limit: Any) -> Any:
    """``word * limit >> 64`` (both uint64, limit < 2**32): a random word turned into a number below ``limit``."""
    return ((word >> _HALF) * limit + (((word & _LOW) * limit) >> _HALF)) >> _HALF


@njit(cache=True, nogil=True)
def find_or_add(slots: Any, node: Any, count: Any, node_id: Any) -> Any:
    """Local id of ``node_id``; one that is new becomes ``node[count]`` (so a result equal to ``count`` means: new)."""
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
    """Enter ``node[:count]`` into an empty table. Returns -1, or the position of the first id that stands twice."""
    for position in range(count):
        if find_or_add(slots, node, position, node[position]) != position:
            return position
    return -1


@njit(cache=True, nogil=True)
def hop_size(indptr: Any, edge_total: Any, node: Any, begin: Any, end: Any, fanout: Any) -> Any:
    """Edges that ``node[begin:end]`` will sample and their largest degree; (-1 - position, 0) where offsets are
    wrong."""
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

    ``picks``: int64[2, power of two], a hash set: row 0 the stamp of who entered the number in row 1, so that the
    next node with another stamp finds it empty.
    """
    mask = np.uint64(picks.shape[1] - 1)
    for draw in range(fanout):
        top = degree - fanout + draw
        word = mix64(key + np.uint64(draw + 1) * _GOLDEN)
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
def pick_edges(key: Any, node_id: Any, low: Any, degree: Any, fanout: Any, picks: Any, stamp: Any, out: Any) -> Any:
    """The picked ones among the edges ``low`` to ``low + degree`` of a node, into the front of ``out``; returns how many.

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
    """Sample the neighbours of ``node[begin:end]``, write their edges, and append new nodes from ``node[end]`` on.

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
    """Pick the edges of ``rows[begin:end]``: their positions into ``edge``, who asks into ``col``, and into ``row`` the
    neighbour where the cache holds it, else -1. Returns how many of ``row`` are negative.

    ``node_of_row`` is empty where row = node id; ``bits``, ``ranks``, ``starts`` and ``lists`` are those of
    :class:`featstore.stored_sampling.HubCache`, empty where nothing is cached. Sizes and offsets:
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
        taken = pick_edges(key, node_id, low, offsets[asking + 1] - low, fanout, picks, position, edge[filled:])
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
