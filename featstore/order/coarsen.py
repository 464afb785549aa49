"""From clusters to a small weighted graph, in one pass over the edges and a table of fixed size.

Clusters (:mod:`featstore.order.propagate`) become the vertices of a coarse graph. The weight of an edge
between two of them is the number of stored edges from a node of one to a node of the other, in either
direction. These are counted in open-addressing hash tables of pairs (:mod:`featstore.order.pairs`), which
double while they may. Once one is as large as the memory allows, its lightest pairs make room for new ones
(lossy counting, Manku & Motwani, VLDB'02): between clusters that belong together edges are many and come
back, while those that are dropped are the single edges of the graph's noise, of which each says next to
nothing. So a coarse graph can be had in any memory, and where it holds all pairs nothing is lost.

Clusters are then merged along the heaviest edges of the coarse graph, by label propagation in memory with the
same limit, and the coarse graph of what they have become follows from the first one
(:func:`contract_vertices`). Where that does not get down to the number that METIS has room for, the smallest
are packed together, whatever their edges: clusters of at most ``t`` nodes in the order of their labels, for
``t`` = 1, 2, 4 ... until few enough are left. Two successive packs hold more than ``limit`` nodes together,
which bounds their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.order.pairs import (
    HISTOGRAM_SIZE,
    PAIR_TABLES,
    PIECE_EDGES,
    PairCounter,
    PairTable,
    pair_table_count,
    pair_tables_bytes,
)
from featstore.order.stream import GraphLike, bad_edge_error

MERGE_PASSES = 5
MERGE_VERTEX_BYTES = 20


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
def count_vertex_edges(keys: Any, vertices: int, xadj: Any) -> None:
    """Add to ``xadj`` int64 [vertices + 1] each vertex' edges, behind it."""
    for i in range(keys.size):
        if keys[i] >= 0:
            xadj[keys[i] // vertices + 1] += 1
            xadj[keys[i] % vertices + 1] += 1


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


@njit(cache=True, nogil=True)
def contract_rows(
    xadj: Any, adjacency: Any, weights: Any, label: Any, members: Any, bounds: Any, places: Any,
    new_xadj: Any, new_adjacency: Any, new_weights: Any,
) -> int:  # fmt: skip
    """Write the edges of merged vertices, those between two of them summed up; how many there are.

    ``members`` int64 [vertices], by what they became, from ``bounds`` int64 [merged + 1]; ``places`` int64
    [merged], all -1; ``new_xadj`` int64 [merged + 1], ``new_adjacency`` and ``new_weights`` int64 [edges].
    """
    kept = 0
    new_xadj[0] = 0
    for merged in range(bounds.size - 1):
        begin = kept
        for at in range(bounds[merged], bounds[merged + 1]):
            vertex = members[at]
            for i in range(xadj[vertex], xadj[vertex + 1]):
                other = label[adjacency[i]]
                if other == merged:
                    continue
                if places[other] < begin:
                    places[other] = kept
                    new_adjacency[kept] = other
                    new_weights[kept] = 0
                    kept += 1
                new_weights[places[other]] += weights[i]
        new_xadj[merged + 1] = kept
    return kept


def contract_vertices(coarse: CoarseGraph, label: NDArray[np.int32], vertices: int) -> CoarseGraph:
    """The coarse graph of merged vertices, ``label`` int32 [vertices of ``coarse``], 0 to ``vertices`` - 1.

    Holds as much as ``coarse`` and 24 bytes a vertex.
    """
    sizes = np.bincount(label, minlength=vertices)
    bounds = np.zeros(vertices + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    weights = np.zeros(vertices, np.int64)
    np.add.at(weights, label, coarse.vertex_weights)
    xadj, places = np.empty(vertices + 1, np.int64), np.full(vertices, -1, np.int64)
    adjacency, edge_weights = np.empty_like(coarse.adjacency), np.empty_like(coarse.edge_weights)
    edges = contract_rows(
        coarse.xadj, coarse.adjacency, coarse.edge_weights, label, np.argsort(label, kind="stable"), bounds,
        places, xadj, adjacency, edge_weights,
    )  # fmt: skip
    return CoarseGraph(xadj, adjacency[:edges], edge_weights[:edges], weights, coarse.dropped)


def contract(
    graph: GraphLike,
    indptr: NDArray[np.int64],
    label: NDArray[np.int32],
    vertices: int,
    *,
    pairs_max: int,
    block_edges: int,
    threads: int = 1,
) -> CoarseGraph:
    """The coarse graph of the clusters ``label`` int32 [nodes], 0 to ``vertices`` - 1, with at most
    ``pairs_max`` edges; the same whatever ``threads`` are.

    One pass over the edges. Raises SourceError for one to a node that does not exist. Holds the table, while
    it grows also half of that, and the result: :func:`contract_bytes`.
    """
    with PairCounter(graph, indptr, label, vertices, pairs_max, threads, block_edges) as counter:
        bad = counter.count()
    if bad >= 0:
        raise bad_edge_error(graph, bad)
    tables = counter.tables
    del counter
    return _coarse_graph(tables, label, vertices)


def _coarse_graph(tables: list[PairTable], label: NDArray[np.int32], vertices: int) -> CoarseGraph:
    xadj = np.zeros(vertices + 1, np.int64)
    for table in tables:
        count_vertex_edges(table.keys, vertices, xadj)
    np.cumsum(xadj, out=xadj)
    adjacency, weights = np.empty(int(xadj[-1]), np.int64), np.empty(int(xadj[-1]), np.int64)
    cursors = xadj[:-1].copy()
    for table in tables:
        place_vertex_edges(table.keys, table.counts, vertices, cursors, adjacency, weights)
    vertex_weights = np.zeros(vertices, np.int64)
    count_nodes(label, vertex_weights)
    return CoarseGraph(xadj, adjacency, weights, vertex_weights, sum(table.dropped for table in tables))


@njit(cache=True, nogil=True)
def count_nodes(label: Any, sizes: Any) -> None:
    """Add the nodes of each label to ``sizes``."""
    for node in range(label.size):
        sizes[label[node]] += 1


def contract_bytes(vertices: int, pairs_max: int, block_edges: int) -> int:
    """The most :func:`contract` allocates, in bytes, result and all, beside the labels."""
    table = pair_tables_bytes(pairs_max)
    counting = (8 + 2 * 8 * pair_table_count(pairs_max)) * (min(PIECE_EDGES, block_edges) + 64)
    return (
        max(counting + table + table // 2, table + 32 * pairs_max)
        + 24 * (vertices + 1)
        + 8 * HISTOGRAM_SIZE * PAIR_TABLES
    )
