"""The lists of a graph in the order of the rows, in memory: each core takes runs of rows of its own.

What does not fit is sorted out of core instead (:mod:`featstore.packing.graphs.build`), with the same result.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.dtypes import node_dtype
from featstore.base.system import submitted
from featstore.errors import SourceError
from featstore.packing.graphs.csc import CscGraph, release_pages

_BLOCK_EDGES = 1 << 20
_RUNS_PER_THREAD = 4  # so that none ends long before the others


@njit(cache=True, nogil=True)
def take_lists(
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    node_of_row: NDArray[Any],
    row_of_node: NDArray[Any],
    offsets: NDArray[np.int64],
    first: int,
    last: int,
    out: NDArray[Any],
) -> bool:
    """The lists of rows ``first`` to ``last``, as rows, ascending by node id: that of a row goes to
    ``out[offsets[row]:offsets[row + 1]]``. False where one has what is no node."""
    nodes = row_of_node.shape[0]
    for row in range(first, last):
        low, begin, end = indptr[node_of_row[row]], offsets[row], offsets[row + 1]
        ascends = True
        for place in range(begin, end):
            node = indices[low + place - begin]
            if node < 0 or node >= nodes:
                return False
            out[place] = node
            ascends = ascends and (place == begin or out[place - 1] <= out[place])
        if not ascends:
            out[begin:end].sort()
        for place in range(begin, end):
            out[place] = row_of_node[out[place]]
    return True


def lists_bytes(graph: CscGraph) -> int:
    """What :func:`lists_by_row` takes, at most: the lists twice, where the graph's are a mapped file, their
    offsets, and the nodes of the rows."""
    mapped = graph.indices.nbytes + 4 * _BLOCK_EDGES if isinstance(graph.indices, np.memmap) else 0
    itemsize = node_dtype(graph.nodes).itemsize
    return mapped + itemsize * graph.edges + (2 * itemsize + 24) * (graph.nodes + 1)


def _in_memory(graph: CscGraph) -> NDArray[Any]:
    """The graph's indices; of a mapped file read once, in order."""
    if not isinstance(graph.indices, np.memmap):
        return graph.indices
    out = np.empty(graph.edges, graph.indices.dtype)
    for low in range(0, graph.edges, _BLOCK_EDGES):
        high = min(low + _BLOCK_EDGES, graph.edges)
        out[low:high] = graph.indices[low:high]
        release_pages(graph.indices, low, high)
    return out


def lists_by_row(
    graph: CscGraph, row_of_node: NDArray[Any], threads: int
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """(offsets int64 [rows + 1], sources as rows [edges]): the lists in the order of the rows, each ascending
    by node id. The same whatever the ``threads``. Raises SourceError where the graph changes meanwhile."""
    node_of_row = np.empty_like(row_of_node)
    node_of_row[row_of_node] = np.arange(graph.nodes, dtype=row_of_node.dtype)
    offsets = np.zeros(graph.nodes + 1, np.int64)
    np.cumsum(np.diff(graph.indptr)[node_of_row], out=offsets[1:])
    out = np.empty(graph.edges, node_dtype(graph.nodes))
    runs = _RUNS_PER_THREAD * threads if threads > 1 else 1
    cuts = np.searchsorted(offsets, np.linspace(0, graph.edges, runs + 1)[1:-1]).tolist()
    bounds = [0, *cuts, graph.nodes]
    arguments = (graph.indptr, _in_memory(graph), node_of_row, row_of_node, offsets)
    with ThreadPoolExecutor(threads, "featstore-topology") as pool:
        done = [submitted(pool, take_lists, *arguments, first, last, out) for first, last in pairwise(bounds)]
        good = all(one.result() for one in done)
    if not good:
        raise SourceError("the graph: it changed while it was packed")
    return offsets, out
