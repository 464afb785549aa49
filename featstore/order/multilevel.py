"""A multilevel partitioner that never loads the graph: about METIS's cut in a fraction of its memory.

LDG (:mod:`featstore.order.ldg`) needs four bytes a node but sees no further than a node's neighbours; METIS
sees the whole, but holds some 130 bytes an edge. Here METIS sees a small picture of the graph and LDG does
the rest:

1. *Coarsen.* Four passes of size-constrained label propagation (:mod:`featstore.order.propagate`) find
   clusters of at most ``nodes / (parts * 8)`` nodes: small enough for METIS to balance the parts.
2. *Contract.* One pass counts the edges between clusters (:mod:`featstore.order.coarsen`), in tables for a
   fortieth as many pairs as the graph has edges, fewer if memory is short; the lightest pairs make room for
   others. Where METIS has no room for as many clusters, they are merged along the heaviest of these edges, in
   memory, and the edges between them are counted once more, three times at most. What then remains is merged
   once more, as far as clusters may grow, which leaves METIS a tenth of the work and cuts no worse.
3. *Cut* the weighted coarse graph by METIS, by recursive bisection: with some eight vertices to a part its
   k-way method has nothing to coarsen, and takes three times as long to cut as well. It refines once where it
   would ten times, for single nodes are moved after it: a fifth to a quarter less time, and
   cuts that differ by 0.2 %.
4. *Refine.* Nodes take the part of their cluster, and nine passes of LDG, at low heat, move single nodes.
   The score of a part is eased (it vanishes a little above the capacity), which lets sizes differ where that
   saves edges. The first pass brings METIS's parts down to the capacity.

All in all 14 passes over the edges (up to 17 where memory is short), all of them sequential, and shared by
threads but for METIS (:mod:`featstore.order.chunks`). After Meyerhenke, Sanders & Schulz, "Partitioning
complex networks via size-constrained clustering" (SEA'14), whose refinement is label propagation too. That
cuts ogbn-arxiv as well, but only at a heat that tears meshes; LDG's balance term does well on both at one low
heat. These constants were chosen on the graphs they were measured on, with one to three seeds. Twice as many
clusters and four times as many pairs made METIS take three times as long on 4 M nodes, and the cut one
percent larger; thirty passes of refinement take three times as long as nine or ten, for half a percent.

What it cannot do: on square meshes of 40,000 to a million nodes it stays 12 to 28 % behind METIS in 32 parts
or more, and up to 70 % in 8 or 16 (means of six seeds): clusters as large as that are ragged. And it uses the
slack, parts up to 5 % above the mean, where METIS keeps to 3 %, so that a comparison of cuts favours it a
little.

Memory: twelve bytes a node while clusters are sought, four from then on, beside which stands METIS with the
coarse graph. The least is :func:`multilevel_memory_bytes`; with less room than wanted there are fewer
clusters and pairs. In directed graphs clusters and refinement see a node's in-neighbours alone, as LDG does;
the coarse graph sees both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.system import available_cores
from featstore.errors import BudgetError, SourceError
from featstore.order.coarsen import (
    MERGE_VERTEX_BYTES,
    CoarseGraph,
    contract,
    contract_bytes,
    contract_vertices,
    count_nodes,
    merge_vertices,
    number_clusters,
    vertices_max,
)
from featstore.order.ldg import SLACK, ldg_memory_bytes, ldg_partition
from featstore.order.metis import cut_adjacency, metis_installed, metis_memory_bytes
from featstore.order.propagate import propagate, propagate_bytes
from featstore.order.stream import (
    BLOCK_EDGES,
    GraphLike,
    bad_edge_error,
    checked_indptr,
    cut_block,
    edge_blocks,
    edge_count,
    node_count,
)

NODES_END = 2**31  # for fewer nodes
CLUSTERS_PER_PART = 8
COARSEN_PASSES = 4
TIE_HEAT = 0.5
REFINE_PASSES = 9
REFINE_HEAT = 0.2
REFINE_EASE = 1.05

MERGE_LEVELS = 3
EDGES_PER_PAIR = 40
PAIRS_PER_VERTEX_MIN = 3
"""A table holds at most a pair for each so many edges, but at least so many pairs a vertex."""

_FIXED_BYTES = 1 << 18


def cluster_limit(nodes: int, parts: int) -> int:
    """The most nodes in a cluster."""
    return max(1, nodes // (parts * CLUSTERS_PER_PART))


@njit(cache=True, nogil=True)
def project_parts(label: Any, part: Any) -> None:
    """Give each node the part of its cluster, in place."""
    for node in range(label.size):
        label[node] = part[label[node]]


def _clusters(
    graph: GraphLike,
    indptr: NDArray[np.int64],
    parts: int,
    seed: int,
    wanted: int,
    block_edges: int,
    threads: int,
) -> tuple[NDArray[np.int32], int]:
    """(cluster of each node int32 [nodes], how many there are, at most ``wanted``)."""
    nodes = node_count(graph)
    limit = cluster_limit(nodes, parts)
    label, sizes = np.arange(nodes, dtype=np.int32), np.ones(nodes, np.int32)
    for number in range(COARSEN_PASSES if limit > 1 else 0):
        last = number == COARSEN_PASSES - 1
        propagate(
            graph, indptr, label, sizes, limit=limit, heat=0.0 if last else TIE_HEAT, seed=seed,
            number=number, bins=last, block_edges=block_edges, threads=threads,
        )  # fmt: skip
    return label, number_clusters(label, sizes, limit, wanted)


def _merge(
    graph: GraphLike,
    indptr: NDArray[np.int64],
    label: NDArray[np.int32],
    vertices: int,
    *,
    limit: int,
    wanted: int,
    memory_bytes: int,
    block_edges: int,
    threads: int,
) -> int:
    """Merge clusters in ``label``, in place, along the edges between them, to at most ``wanted``; how many
    are left."""
    for _ in range(MERGE_LEVELS):
        if vertices <= wanted:
            break
        pairs_max = _pairs_within(_merge_bytes, graph, vertices, memory_bytes, block_edges)
        coarse = contract(
            graph, indptr, label, vertices, pairs_max=pairs_max, block_edges=block_edges, threads=threads
        )
        merged, vertices = merge_vertices(coarse, limit, wanted)
        project_parts(label, merged)
    if vertices <= wanted:
        return vertices
    sizes = np.zeros(vertices, np.int32)
    count_nodes(label, sizes)
    return number_clusters(label, sizes, limit, wanted)


def _cut(coarse: CoarseGraph, parts: int, seed: int) -> NDArray[np.int32]:
    """Part of each vertex, int32 [vertices]."""
    if coarse.adjacency.size == 0:
        # Clusters without an edge between them: fill the parts with them in turn.
        before = np.cumsum(coarse.vertex_weights) - coarse.vertex_weights
        return (before * parts // int(coarse.vertex_weights.sum())).astype(np.int32)
    return cut_adjacency(
        coarse.xadj, coarse.adjacency, parts, seed,
        vertex_weights=coarse.vertex_weights, edge_weights=coarse.edge_weights, halving=True,
    )  # fmt: skip


def _check_edges(graph: GraphLike, indptr: NDArray[np.int64], block_edges: int) -> None:
    part, node = np.zeros(node_count(graph), np.int8), 0
    for first, block in edge_blocks(graph, block_edges):
        _, node, bad = cut_block(indptr, block, first, node, part)
        if bad >= 0:
            raise bad_edge_error(graph, first + bad)


def multilevel_partition(
    graph: GraphLike,
    parts: int,
    *,
    seed: int,
    memory_bytes: int,
    slack: float = SLACK,
    block_edges: int = BLOCK_EDGES,
    threads: int | None = None,
) -> NDArray[np.int32]:
    """Part of each node, int32 [nodes], from clusters, METIS and LDG; the same for equal arguments and
    pymetis, whatever ``threads`` is (None: as many as there are cores, and as the memory allows).

    No part holds more than ``max(ceil(nodes / parts), floor((1 + slack) * nodes / parts))`` nodes. With as
    many parts as nodes, or more, each node has its own; without edges parts are even ranges of node ids.
    Reads the edges 14 to 17 times from first to last, ``block_edges`` at once, and allocates at most
    ``memory_bytes``. Results depend on ``memory_bytes`` and ``block_edges`` only where memory is short for
    what they take.

    Raises SourceError when pymetis is missing (``pip install 'featstore[metis]'``), for a bad graph and for
    arguments out of range, BudgetError below :func:`multilevel_memory_bytes`. After Meyerhenke, Sanders &
    Schulz (SEA'14).
    """
    if not metis_installed():
        raise SourceError(
            "method 'multilevel' needs pymetis, which is not installed: pip install "
            "'featstore[metis]', or use method 'ldg'"
        )
    indptr, nodes = checked_indptr(graph), node_count(graph)
    if not 1 <= parts < 2**31 or not 0 <= seed < 2**31 or not 0 <= slack < float("inf"):
        raise SourceError(
            f"parts must be from 1, seed from 0, both below 2**31, slack from 0, not parts={parts}, "
            f"seed={seed}, slack={slack}"
        )
    if nodes >= NODES_END:
        raise SourceError(
            f"method 'multilevel' is made for fewer than 2**31 nodes, not {nodes:,}; use method 'ldg'"
        )
    smallest = multilevel_memory_bytes(nodes, parts, block_edges)
    if memory_bytes < smallest:
        raise BudgetError(
            smallest, memory_bytes, f"partition {nodes:,} nodes in {parts:,} parts by clusters and METIS"
        )
    if parts == 1 or parts >= nodes or edge_count(graph) == 0:
        _check_edges(graph, indptr, block_edges)
        return _ranges(nodes, parts)
    wanted = _vertices_within(nodes, parts, memory_bytes, block_edges)
    mergeable = _most_within(
        lambda most: _merge_bytes(nodes, most, PAIRS_PER_VERTEX_MIN * most, block_edges) <= memory_bytes
    )
    most = available_cores() if threads is None else max(1, threads)
    while most > 1 and _passes_bytes(nodes, parts, block_edges, most) > memory_bytes:
        most -= 1
    label, vertices = _clusters(graph, indptr, parts, seed, max(wanted, mergeable), block_edges, most)
    vertices = _merge(
        graph, indptr, label, vertices, limit=cluster_limit(nodes, parts), wanted=wanted,
        memory_bytes=memory_bytes, block_edges=block_edges, threads=most,
    )  # fmt: skip
    pairs_max = _pairs_within(_coarse_bytes, graph, vertices, memory_bytes, block_edges)
    coarse = contract(
        graph, indptr, label, vertices, pairs_max=pairs_max, block_edges=block_edges, threads=most
    )
    merged, vertices = merge_vertices(coarse, cluster_limit(nodes, parts), CLUSTERS_PER_PART * parts)
    coarse = contract_vertices(coarse, merged, vertices)
    project_parts(merged, _cut(coarse, parts, seed))
    del coarse
    project_parts(label, merged)
    return ldg_partition(
        graph, parts, seed=seed, passes=REFINE_PASSES, slack=slack, block_edges=block_edges, start=label,
        heat=REFINE_HEAT, ease=REFINE_EASE, threads=most,
    )  # fmt: skip


def _passes_bytes(nodes: int, parts: int, block_edges: int, threads: int) -> int:
    """What the passes hold that find clusters, and those that move single nodes."""
    clusters_bytes = 12 * nodes + propagate_bytes(nodes, threads) + 8 * block_edges + _FIXED_BYTES
    return max(clusters_bytes, ldg_memory_bytes(nodes, parts, block_edges, threads))


def _ranges(nodes: int, parts: int) -> NDArray[np.int32]:
    """Even ranges of node ids, made in blocks."""
    part = np.empty(nodes, np.int32)
    for first in range(0, nodes, 1 << 12):
        piece = part[first : first + (1 << 12)]
        piece[:] = np.arange(first, first + piece.size, dtype=np.int64) * parts // nodes
    return part


def _coarse_bytes(nodes: int, vertices: int, pairs: int, block_edges: int) -> int:
    """From contraction to projection: labels, the coarse graph, and either the table or METIS with what it
    holds."""
    graph_bytes = 24 * (vertices + 1) + 32 * pairs
    table_bytes = contract_bytes(vertices, pairs, block_edges)
    cut_bytes = graph_bytes + metis_memory_bytes(vertices, 2 * pairs, symmetric=True)
    return 4 * nodes + max(table_bytes, cut_bytes) + _FIXED_BYTES


def _merge_bytes(nodes: int, vertices: int, pairs: int, block_edges: int) -> int:
    """While clusters are merged: labels, the coarse graph and its table, and what merging holds."""
    table_bytes = contract_bytes(vertices, pairs, block_edges)
    return 4 * nodes + table_bytes + MERGE_VERTEX_BYTES * vertices + _FIXED_BYTES


def _pairs_within(
    bytes_of: Callable[[int, int, int, int], int],
    graph: GraphLike,
    vertices: int,
    memory_bytes: int,
    block_edges: int,
) -> int:
    """How many pairs to count: as many as are wanted, but no more than fit."""
    nodes = node_count(graph)
    wanted = max(edge_count(graph) // EDGES_PER_PAIR, PAIRS_PER_VERTEX_MIN * vertices)
    return min(
        wanted, _most_within(lambda pairs: bytes_of(nodes, vertices, pairs, block_edges) <= memory_bytes)
    )


def _most_within(fits: Callable[[int], bool]) -> int:
    """The largest number from 0 that fits, by halving the interval; what fits at a number fits below it."""
    low, high = 0, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _vertices_within(nodes: int, parts: int, memory_bytes: int, block_edges: int) -> int:
    """The most clusters that leave room for the pairs they must have; never fewer than can be promised."""
    least = vertices_max(nodes, cluster_limit(nodes, parts))
    room = _most_within(
        lambda most: _coarse_bytes(nodes, most, PAIRS_PER_VERTEX_MIN * most, block_edges) <= memory_bytes
    )
    return max(least, min(nodes, room))


def multilevel_memory_bytes(nodes: int, parts: int, block_edges: int = BLOCK_EDGES) -> int:
    """The least memory with which :func:`multilevel_partition` works, and an upper bound of what it then
    takes, in bytes.

    Above the graph itself; machine code is not counted. METIS's share is that of :func:`metis_memory_bytes`,
    an upper estimate for a coarse graph of three pairs a vertex.
    """
    vertices = vertices_max(nodes, cluster_limit(nodes, parts))
    coarse_bytes = _coarse_bytes(nodes, vertices, PAIRS_PER_VERTEX_MIN * vertices, block_edges)
    return max(_passes_bytes(nodes, parts, block_edges, 1), coarse_bytes)
