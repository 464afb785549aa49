"""From clusters to a small weighted graph, in one pass over the edges and a table of fixed size.

Clusters (:mod:`featstore.order.propagate`) become the vertices of a coarse graph. The weight of an edge
between two of them is the number of stored edges from a node of one to a node of the other, in either
direction. These are counted in an open-addressing hash table of pairs, which doubles while it may. Once it is
as large as the memory allows, the lightest pairs make room for new ones (lossy counting, Manku & Motwani,
VLDB'02): between clusters that belong together edges are many and come back, while those that are dropped are
the single edges of the graph's noise, of which each says next to nothing. So a coarse graph can be had in any
memory, and where it holds all pairs nothing is lost.

Where there are more clusters than METIS has room for, they are merged along the heaviest edges of the coarse
graph, by label propagation in memory with the same limit. Where that does not get down to the number wanted,
the smallest are packed together, whatever their edges: clusters of at most ``t`` nodes in the order of their
labels, for ``t`` = 1, 2, 4 ... until few enough are left. Two successive packs hold more than ``limit`` nodes
together, which bounds their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.hashing import mix64
from featstore.order.stream import GraphLike, bad_edge_error, edge_blocks

PAIR_BYTES = 12
"""A slot of the table: the pair, int64, and its count, int32."""

SLOTS_FIRST = 1 << 12
HISTOGRAM_SIZE = 1 << 10

MERGE_PASSES = 5
MERGE_VERTEX_BYTES = 20

# Positions in the kernel's state, int64.
_NODE, _PAIRS, _BAD = range(3)


@dataclass(frozen=True, eq=False)
class CoarseGraph:
    """Clusters and the edges between them, symmetric and without loops, as METIS takes them.

    ``xadj`` int64 [vertices + 1], ``adjacency`` and ``edge_weights`` int64 [edges], ``vertex_weights`` int64
    [vertices]. ``dropped``: stored edges between clusters that found no room.
    """

    xadj: NDArray[np.int64]
    adjacency: NDArray[np.int64]
    edge_weights: NDArray[np.int64]
    vertex_weights: NDArray[np.int64]
    dropped: int


def vertices_max(nodes: int, limit: int) -> int:
    """To how many clusters of at most ``limit`` nodes :func:`number_clusters` can always come down."""
    return min(nodes, 2 * nodes // (limit + 1) + 1)


@njit(cache=True, nogil=True)
def pack_clusters(sizes: Any, most: int, limit: int) -> int:
    """How many clusters are left once those of at most ``most`` nodes are packed together up to ``limit``."""
    left = 0
    room = 0
    for i in range(sizes.size):
        size = sizes[i]
        if size == 0:
            continue
        if size > most:
            left += 1
        elif size <= room:
            room -= size
        else:
            left += 1
            room = limit - size
    return left


@njit(cache=True, nogil=True)
def renumber_clusters(label: Any, sizes: Any, most: int, limit: int) -> None:
    """Pack as :func:`pack_clusters` does, and number what is left from 0 in ``label``; ``sizes`` is used
    up."""
    left = 0
    room = 0
    pack = 0
    for i in range(sizes.size):
        size = sizes[i]
        if size == 0:
            continue
        if size > most:
            sizes[i] = left
            left += 1
        elif size <= room:
            sizes[i] = pack
            room -= size
        else:
            sizes[i] = pack = left
            left += 1
            room = limit - size
    for node in range(label.size):
        label[node] = sizes[label[node]]


def number_clusters(label: NDArray[np.int32], sizes: NDArray[np.int32], limit: int, wanted: int) -> int:
    """Number the clusters of ``label`` int32 [nodes] from 0, in place, packing the smallest so that
    ``wanted`` remain.

    ``sizes`` int32 [nodes], the nodes of each label, none above ``limit``, is used up. ``wanted`` must be at
    least :func:`vertices_max`. Returns how many clusters there are. Allocates nothing.
    """
    most = 0
    while pack_clusters(sizes, most, limit) > wanted:
        most = max(1, 2 * most)
    count = int(pack_clusters(sizes, most, limit))
    renumber_clusters(label, sizes, most, limit)
    return count


@njit(cache=True, nogil=True)
def home_slot(key: int, slots: int) -> Any:
    """Where a pair belongs, if that slot is free; ``slots`` is a power of two."""
    return np.int64(mix64(np.uint64(key)) & np.uint64(slots - 1))


@njit(cache=True, nogil=True)
def count_pairs(
    indptr: Any, block: Any, first_edge: int, begin: int, label: Any, vertices: int, keys: Any, counts: Any,
    state: Any, pairs_max: int,
) -> int:  # fmt: skip
    """Count the block's edges between clusters, from position ``begin``; where a new pair had no room, or -1.

    An edge to a node that does not exist ends it as well, and sets ``state[BAD]``.

    ``keys`` int64 [slots], -1 = free; ``counts`` int32 [slots]; ``state`` int64 [3].
    """
    node = state[_NODE]
    mask = keys.size - 1
    for i in range(begin, block.size):
        while indptr[node + 1] <= first_edge + i:
            node += 1
        if block[i] < 0 or block[i] >= label.size:
            state[_BAD] = 1
            return i
        a, b = np.int64(label[block[i]]), np.int64(label[node])
        if a == b:
            continue
        key = a * vertices + b if a < b else b * vertices + a
        slot = home_slot(key, keys.size)
        while keys[slot] != key and keys[slot] >= 0:
            slot = (slot + 1) & mask
        if keys[slot] < 0:
            if state[_PAIRS] >= pairs_max:
                state[_NODE] = node
                return i
            keys[slot] = key
            counts[slot] = 0
            state[_PAIRS] += 1
        if counts[slot] < 2147483647:
            counts[slot] += 1
    state[_NODE] = node
    return -1


@njit(cache=True, nogil=True)
def move_pairs(keys: Any, counts: Any, new_keys: Any, new_counts: Any) -> None:
    """Enter all pairs into a larger, empty table."""
    mask = new_keys.size - 1
    for i in range(keys.size):
        if keys[i] >= 0:
            slot = home_slot(keys[i], new_keys.size)
            while new_keys[slot] >= 0:
                slot = (slot + 1) & mask
            new_keys[slot] = keys[i]
            new_counts[slot] = counts[i]


@njit(cache=True, nogil=True)
def lightest_weights(keys: Any, counts: Any, histogram: Any) -> Any:
    """The weight up to which pairs must go so that half of them go; ``histogram`` int64 is used up."""
    histogram[:] = 0
    pairs = 0
    for i in range(keys.size):
        if keys[i] >= 0:
            histogram[min(counts[i], histogram.size - 1)] += 1
            pairs += 1
    below = 0
    for weight in range(histogram.size):
        below += histogram[weight]
        if 2 * below >= pairs:
            return weight
    return histogram.size - 1


@njit(cache=True, nogil=True)
def drop_pairs(keys: Any, counts: Any, weight: int, turn: int, most: int) -> Any:
    """Take out pairs lighter than ``weight`` and a pseudorandom half of those of it; (pairs, weight) gone,
    integers.

    Weights above ``most`` count as that. The pair that follows moves up into a slot that comes free, so no
    search ends too soon (Knuth 6.4, algorithm R).
    """
    mask = keys.size - 1
    pairs, gone = 0, 0
    i = 0
    while i < keys.size:
        coin = home_slot(keys[i] + np.int64(turn) * 0x2545F4914F6CDD1D, 2)
        heavy = min(counts[i], most)
        if keys[i] < 0 or heavy > weight or (heavy == weight and coin == 0):
            i += 1
            continue
        gone += counts[i]
        pairs += 1
        hole = i
        slot = (hole + 1) & mask
        while keys[slot] >= 0:
            home = home_slot(keys[slot], keys.size)
            if ((slot - home) & mask) >= ((slot - hole) & mask):
                keys[hole] = keys[slot]
                counts[hole] = counts[slot]
                hole = slot
            slot = (slot + 1) & mask
        keys[hole] = -1
    return pairs, gone


@njit(cache=True, nogil=True)
def count_vertex_edges(keys: Any, vertices: int, xadj: Any) -> None:
    """Fill ``xadj`` int64 [vertices + 1], zeros, with where each vertex' edges begin."""
    for i in range(keys.size):
        if keys[i] >= 0:
            xadj[keys[i] // vertices + 1] += 1
            xadj[keys[i] % vertices + 1] += 1
    for v in range(vertices):
        xadj[v + 1] += xadj[v]


@njit(cache=True, nogil=True)
def place_vertex_edges(
    keys: Any, counts: Any, vertices: int, cursors: Any, adjacency: Any, weights: Any
) -> None:
    """Write each pair as two edges at the cursors, which move on."""
    for i in range(keys.size):
        if keys[i] >= 0:
            a, b = keys[i] // vertices, keys[i] % vertices
            adjacency[cursors[a]] = b
            weights[cursors[a]] = counts[i]
            cursors[a] += 1
            adjacency[cursors[b]] = a
            weights[cursors[b]] = counts[i]
            cursors[b] += 1


@njit(cache=True, nogil=True)
def merge_pass(
    xadj: Any, adjacency: Any, weights: Any, vertex_weights: Any, label: Any, sizes: Any, counts: Any,
    touched: Any, limit: int,
) -> None:  # fmt: skip
    """Give each vertex in turn the label to which its edges are heaviest, if it has room (ties: the first
    met).

    ``label`` int32 [vertices]; ``sizes`` int32, ``counts`` int64, zeros, and ``touched`` int32 [vertices].
    """
    for v in range(label.size):
        found = 0
        for i in range(xadj[v], xadj[v + 1]):
            name = label[adjacency[i]]
            if counts[name] == 0:
                touched[found] = name
                found += 1
            counts[name] += weights[i]
        weight = np.int32(vertex_weights[v])
        best = label[v]
        most = counts[best]
        for i in range(found):
            name = touched[i]
            if counts[name] > most and name != label[v] and sizes[name] + weight <= limit:
                best, most = name, counts[name]
            counts[name] = 0
        sizes[label[v]] -= weight
        sizes[best] += weight
        label[v] = best


def merge_vertices(coarse: CoarseGraph, limit: int, wanted: int) -> tuple[NDArray[np.int32], int]:
    """(cluster of each vertex int32 [vertices], how many): at most ``limit`` nodes in each, about ``wanted``
    of them.

    No fewer passes than needed, no more than :data:`MERGE_PASSES`. Holds 20 bytes a vertex:
    :data:`MERGE_VERTEX_BYTES`.
    """
    vertices = coarse.vertex_weights.size
    label, sizes = np.arange(vertices, dtype=np.int32), coarse.vertex_weights.astype(np.int32)
    counts, touched = np.zeros(vertices, np.int64), np.empty(vertices, np.int32)
    for _ in range(MERGE_PASSES):
        merge_pass(
            coarse.xadj, coarse.adjacency, coarse.edge_weights, coarse.vertex_weights, label, sizes, counts,
            touched, limit
        )  # fmt: skip
        if pack_clusters(sizes, 0, limit) <= wanted:
            break
    return label, number_clusters(label, sizes, limit, vertices)


def pair_slots(pairs: int) -> int:
    """Slots of a table for so many pairs: a power of two, filled to three quarters at most."""
    slots = SLOTS_FIRST
    while 3 * slots < 4 * pairs:
        slots *= 2
    return slots


def contract(
    graph: GraphLike,
    indptr: NDArray[np.int64],
    label: NDArray[np.int32],
    vertices: int,
    *,
    pairs_max: int,
    block_edges: int,
) -> CoarseGraph:
    """The coarse graph of the clusters ``label`` int32 [nodes], 0 to ``vertices`` - 1, with at most
    ``pairs_max`` edges.

    One pass over the edges. Raises SourceError for one to a node that does not exist. Holds the table, while
    it grows also half of that, and the result: :func:`contract_bytes`.
    """
    keys = np.full(SLOTS_FIRST, -1, np.int64)
    counts = np.zeros(SLOTS_FIRST, np.int32)
    histogram = np.zeros(HISTOGRAM_SIZE, np.int64)
    state = np.zeros(3, np.int64)
    dropped, turn = 0, 0
    for first, block in edge_blocks(graph, block_edges):
        begin = 0
        while True:
            room = min(pairs_max, 3 * keys.size // 4)
            begin = count_pairs(indptr, block, first, begin, label, vertices, keys, counts, state, room)
            if begin < 0:
                break
            if state[_BAD]:
                raise bad_edge_error(graph, first + begin)
            if room < pairs_max:
                new_keys, new_counts = np.full(2 * keys.size, -1, np.int64), np.zeros(2 * keys.size, np.int32)
                move_pairs(keys, counts, new_keys, new_counts)
                keys, counts = new_keys, new_counts
                del new_keys, new_counts
                continue
            weight = lightest_weights(keys, counts, histogram)
            pairs, gone = drop_pairs(keys, counts, weight, turn, HISTOGRAM_SIZE - 1)
            state[_PAIRS] -= pairs
            dropped += int(gone)
            turn += 1
    del block
    return _coarse_graph(keys, counts, label, vertices, dropped)


def _coarse_graph(
    keys: NDArray[np.int64], counts: NDArray[np.int32], label: NDArray[np.int32], vertices: int, dropped: int
) -> CoarseGraph:
    xadj = np.zeros(vertices + 1, np.int64)
    count_vertex_edges(keys, vertices, xadj)
    adjacency, weights = np.empty(int(xadj[-1]), np.int64), np.empty(int(xadj[-1]), np.int64)
    place_vertex_edges(keys, counts, vertices, xadj[:-1].copy(), adjacency, weights)
    vertex_weights = np.zeros(vertices, np.int64)
    count_nodes(label, vertex_weights)
    return CoarseGraph(xadj, adjacency, weights, vertex_weights, dropped)


@njit(cache=True, nogil=True)
def count_nodes(label: Any, sizes: Any) -> None:
    """Add the nodes of each label to ``sizes``."""
    for node in range(label.size):
        sizes[label[node]] += 1


def contract_bytes(vertices: int, pairs_max: int, block_edges: int) -> int:
    """The most :func:`contract` allocates, in bytes, result and all, beside the labels."""
    table = PAIR_BYTES * pair_slots(pairs_max)
    return (
        max(8 * block_edges + table + table // 2, table + 32 * pairs_max)
        + 24 * (vertices + 1)
        + 8 * HISTOGRAM_SIZE
    )
