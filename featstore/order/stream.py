"""A graph read in sequential blocks of edges.

A graph is the CSC of its incoming edges: ``indices[indptr[v]:indptr[v + 1]]`` are the nodes that node ``v``
gathers from. ``indptr`` is in memory, ``indices`` may be a memory map far larger than memory. So everything
here passes over ``indices`` from its first edge to its last, copying one block after the other into one
buffer: a disk sees large sequential reads, and beside the results only one block is held. (Pages of a memory
map that were passed over stay in the page cache, from which the kernel takes them back whenever it needs
room.)

A block may end in the middle of a node's edges, as a hub can have more of them than a block. Kernels
therefore keep a cursor, the node they stand at, and each edge is looked at as it comes; results do not depend
on the block size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.native import prefetch
from featstore.base.system import available_cores
from featstore.base.threads import thread_pool
from featstore.errors import SourceError

BLOCK_EDGES = 1 << 20
"""Edges in a block unless told otherwise: 4 or 8 MiB, large enough for any disk's sequential speed."""

PREFETCH_EDGES = 48
"""What stands at an edge's source is asked for so many edges ahead: without, a pass waits for memory."""

_CHECK_NODES = 1 << 16
_SHARED_MIN = 1 << 19  # nodes, or edges, that several threads share

NodeIds = NDArray[np.int32] | NDArray[np.int64]


class GraphLike(Protocol):
    """Anything with the CSC of incoming edges: ``indptr`` int64 [nodes + 1], ``indices`` int32 or int64
    [edges]."""

    @property
    def indptr(self) -> NDArray[np.int64]: ...

    @property
    def indices(self) -> NDArray[Any]: ...


def node_count(graph: GraphLike) -> int:
    """The number of nodes."""
    return int(graph.indptr.size) - 1


def edge_count(graph: GraphLike) -> int:
    """The number of stored edges (an undirected edge is usually stored twice)."""
    return int(graph.indices.size)


def checked_indptr(graph: GraphLike) -> NDArray[np.int64]:
    """``graph.indptr`` as a plain array, after checking it against itself and against the size of
    ``indices``.

    Raises SourceError when shapes, dtypes or the offsets cannot be those of a graph. Works in blocks of
    nodes.
    """
    indptr, indices = graph.indptr, graph.indices
    if indptr.ndim != 1 or indptr.size == 0 or indptr.dtype != np.int64:
        raise SourceError(
            f"graph.indptr must be int64 of shape [nodes + 1], not {indptr.dtype} of shape {indptr.shape}"
        )
    if indices.ndim != 1 or indices.dtype not in (np.int32, np.int64):
        raise SourceError(
            f"graph.indices must be int32 or int64 of shape [edges], not {indices.dtype} of shape "
            f"{indices.shape}"
        )
    if indptr[0] != 0 or indptr[-1] != indices.size:
        raise SourceError(
            f"graph.indptr must run from 0 to the number of edges, {indices.size}, "
            f"not from {indptr[0]} to {indptr[-1]}; the two arrays do not belong together"
        )
    for first in range(0, indptr.size - 1, _CHECK_NODES):
        piece = np.asarray(indptr[first : first + _CHECK_NODES + 1])
        falling = np.flatnonzero(piece[1:] < piece[:-1])
        if falling.size:
            node = first + int(falling[0])
            raise SourceError(f"graph.indptr falls at node {node}: {indptr[node]} then {indptr[node + 1]}")
    return np.asarray(indptr)


def edge_blocks(
    graph: GraphLike, block_edges: int = BLOCK_EDGES, begin: int = 0, end: int | None = None
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield (position of the first edge, block of ``indices``) in order, of the edges from ``begin`` to
    ``end``, by default all; at least one block, if need be an empty one.

    All blocks share one buffer of at most ``block_edges`` edges: use a block before asking for the next.
    Raises SourceError for a block size below one.
    """
    if block_edges < 1:
        raise SourceError(f"block_edges must be at least 1, not {block_edges}")
    end = edge_count(graph) if end is None else end
    buffer: NDArray[Any] = np.empty(min(block_edges, end - begin), graph.indices.dtype)
    for first in range(begin, max(end, begin + 1), block_edges):
        block = buffer[: min(block_edges, end - first)]
        np.copyto(block, graph.indices[first : first + block.size])
        yield first, block


def bad_edge_error(graph: GraphLike, edge: int) -> SourceError:
    """The error for an edge whose source is not a node."""
    return SourceError(
        f"graph.indices[{edge}] is {int(graph.indices[edge])}, but the graph has nodes 0 to "
        f"{node_count(graph) - 1}; repair the edge list or give the right number of nodes"
    )


def _shares(count: int, threads: int) -> list[tuple[int, int]]:
    """Even shares of so many, for as many threads; one for all where there are few."""
    threads = threads if count >= _SHARED_MIN else 1
    return [(count * one // threads, count * (one + 1) // threads) for one in range(threads)]


@njit(cache=True, nogil=True)
def count_block(block: Any, counts: Any, low: int, high: int) -> int:
    """Add the block's sources from ``low`` to below ``high`` to ``counts``, uint32 [nodes], which stops at
    its maximum; the first bad position, or -1."""
    most = np.uint32(0xFFFFFFFF)
    address = counts.ctypes.data
    for i in range(block.size):
        if i + PREFETCH_EDGES < block.size:
            soon = block[i + PREFETCH_EDGES]
            if soon >= low and soon < high:
                prefetch(address + 4 * np.int64(soon))
        source = block[i]
        if source < 0 or source >= counts.size:
            return i
        if source >= low and source < high and counts[source] != most:
            counts[source] += np.uint32(1)
    return -1


@njit(cache=True, nogil=True)
def cut_block(indptr: Any, block: Any, first_edge: int, node: int, part: Any) -> tuple[int, int, int]:
    """Count the block's edges between parts: (edges cut, node of the block's last edge, first bad position or
    -1)."""
    cut = 0
    address = part.ctypes.data
    for i in range(block.size):
        if i + PREFETCH_EDGES < block.size:
            prefetch(address + part.itemsize * np.int64(block[i + PREFETCH_EDGES]))
        while indptr[node + 1] <= first_edge + i:
            node += 1
        source = block[i]
        if source < 0 or source >= part.size:
            return cut, node, i
        if part[source] != part[node]:
            cut += 1
    return cut, node, -1


def degree_counts(graph: GraphLike, *, block_edges: int = BLOCK_EDGES) -> NDArray[np.uint32]:
    """How often each node occurs as a source, uint32 [nodes]: the more often, the likelier sampling asks for
    it.

    Counts stop at 2**32 - 1. One pass; holds 4 bytes a node and one block. Raises SourceError for a bad
    graph.
    """
    checked_indptr(graph)
    counts = np.zeros(node_count(graph), np.uint32)
    shares = _shares(counts.size, available_cores())
    with thread_pool(len(shares), "featstore-degrees") as pool:  # each counts nodes of its own
        for first, block in edge_blocks(graph, block_edges):
            bad = list(pool.map(lambda share, of=block: count_block(of, counts, *share), shares))
            if bad[0] >= 0:
                raise bad_edge_error(graph, first + bad[0])
    return counts


def edge_cut(graph: GraphLike, part: NDArray[np.int32], *, block_edges: int = BLOCK_EDGES) -> float:
    """The fraction of stored edges whose ends are in different parts (0.0 for a graph without edges).

    ``part`` is int32 [nodes]. One pass; holds one block. Raises SourceError for a bad graph or a wrong number
    of parts.
    """
    indptr = checked_indptr(graph)
    if part.shape != (node_count(graph),):
        raise SourceError(
            f"part must have one entry for each of {node_count(graph)} nodes, not shape {part.shape}"
        )

    def cut_between(begin: int, end: int) -> int:
        cut, node = 0, max(0, int(np.searchsorted(indptr, begin, "right")) - 1)
        for first, block in edge_blocks(graph, block_edges // len(shares) or block_edges, begin, end):
            block_cut, node, bad = cut_block(indptr, block, first, node, part)
            if bad >= 0:
                raise bad_edge_error(graph, first + bad)
            cut += block_cut
        return cut

    shares = _shares(edge_count(graph), available_cores())
    with thread_pool(len(shares), "featstore-cut") as pool:
        found = [pool.submit(cut_between, *share) for share in shares]
    return sum(one.result() for one in found) / max(edge_count(graph), 1)
