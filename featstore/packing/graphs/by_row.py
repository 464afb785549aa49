"""The lists of a graph in the order of the rows, in memory: each core takes runs of rows of its own.

What does not fit is sorted out of core instead (:mod:`featstore.packing.graphs.build`), with the same result.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.dtypes import node_dtype
from featstore.base.native import prefetch
from featstore.base.system import submitted
from featstore.base.threads import thread_pool
from featstore.errors import SourceError
from featstore.packing.graphs.csc import NO_IDS, CscGraph, release_pages
from featstore.packing.graphs.placing import sort_with_ids

_BLOCK_EDGES = 1 << 20
_ROWS_AHEAD = 8
_RUNS_PER_THREAD = 4  # so that none ends long before the others


@njit(cache=True, nogil=True)
def take_lists(
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    edge_ids: NDArray[Any],
    node_of_row: NDArray[Any],
    row_of_source: NDArray[Any],
    source_nodes: int,
    offsets: NDArray[np.int64],
    first: int,
    last: int,
    out: NDArray[Any],
    out_ids: NDArray[Any],
) -> bool:
    """The lists of rows ``first`` to ``last``, as rows, ascending by node id: that of a row goes to
    ``out[offsets[row]:offsets[row + 1]]``, and the ids of its edges to the same places of ``out_ids``, if
    that has any; without ``edge_ids`` they are places in ``indices``. A source's row is that of
    ``row_of_source``, or its number where that is empty. False where a list has what is no node."""
    numbered, given, moved = out_ids.shape[0] > 0, edge_ids.shape[0] > 0, row_of_source.shape[0] > 0
    for row in range(first, last):
        # Lists and rows lie all over memory: what is wanted soon is asked for now.
        if row + 2 * _ROWS_AHEAD < last:
            prefetch(indptr.ctypes.data + 8 * np.int64(node_of_row[row + 2 * _ROWS_AHEAD]))
            soon = indptr[node_of_row[row + _ROWS_AHEAD]]
            prefetch(indices.ctypes.data + indices.itemsize * soon)
        low, begin, end = indptr[node_of_row[row]], offsets[row], offsets[row + 1]
        ascends = True
        for place in range(begin, end):
            node = indices[low + place - begin]
            if node < 0 or node >= source_nodes:
                return False
            out[place] = node
            if moved:
                prefetch(row_of_source.ctypes.data + row_of_source.itemsize * np.int64(node))
            if numbered:
                out_ids[place] = edge_ids[low + place - begin] if given else low + place - begin
            ascends = ascends and (place == begin or out[place - 1] <= out[place])
        if not ascends and numbered:
            sort_with_ids(out[begin:end], out_ids[begin:end])
        elif not ascends:
            out[begin:end].sort()
        for place in range(begin, end if moved else begin):
            out[place] = row_of_source[out[place]]
    return True


def lists_bytes(graph: CscGraph, edge_ids: bool) -> int:
    """What :func:`lists_by_row` takes, at most: the lists, and the ids of their edges, twice, where the
    graph's are a mapped file, their offsets, and the nodes of the rows."""
    held = [graph.indices, graph.edge_ids] if edge_ids else [graph.indices]
    mapped = sum(array.nbytes + 4 * _BLOCK_EDGES for array in held if isinstance(array, np.memmap))
    itemsize = node_dtype(max(graph.nodes, graph.source_nodes)).itemsize
    ids = node_dtype(graph.edges).itemsize if edge_ids else 0
    return mapped + (itemsize + ids) * graph.edges + (2 * itemsize + 24) * (graph.nodes + 1)


def _in_memory(array: NDArray[Any]) -> NDArray[Any]:
    """The array; of a mapped file read once, in order."""
    if not isinstance(array, np.memmap):
        return array
    out = np.empty(len(array), array.dtype)
    for low in range(0, len(array), _BLOCK_EDGES):
        high = min(low + _BLOCK_EDGES, len(array))
        out[low:high] = array[low:high]
        release_pages(array, low, high)
    return out


def lists_by_row(
    graph: CscGraph,
    row_of_node: NDArray[Any],
    row_of_source: NDArray[Any] | None,
    threads: int,
    edge_ids: bool,
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]:
    """(offsets int64 [rows + 1], sources as rows [edges], ids of their edges, [0] without ``edge_ids``): the
    lists in the order of the rows, each ascending by node id, then by id. ``row_of_source`` None: sources
    stand in the rows of their ids. The same whatever the ``threads``.
    Raises SourceError where the graph changes meanwhile."""
    node_of_row = np.empty_like(row_of_node)
    node_of_row[row_of_node] = np.arange(graph.nodes, dtype=row_of_node.dtype)
    offsets = np.zeros(graph.nodes + 1, np.int64)
    np.cumsum(np.diff(graph.indptr)[node_of_row], out=offsets[1:])
    out = np.empty(graph.edges, node_dtype(graph.source_nodes))
    out_ids = np.empty(graph.edges, node_dtype(graph.edges)) if edge_ids else NO_IDS
    given = graph.edge_ids if edge_ids and isinstance(graph.edge_ids, np.ndarray) else NO_IDS
    runs = _RUNS_PER_THREAD * threads if threads > 1 else 1
    cuts = np.searchsorted(offsets, np.linspace(0, graph.edges, runs + 1)[1:-1]).tolist()
    bounds = [0, *cuts, graph.nodes]
    lists = _in_memory(graph.indices), _in_memory(given)
    moved = NO_IDS if row_of_source is None else row_of_source
    arguments = (graph.indptr, *lists, node_of_row, moved, graph.source_nodes, offsets)
    with thread_pool(threads, "featstore-topology") as pool:
        done = [
            submitted(pool, take_lists, *arguments, first, last, out, out_ids)
            for first, last in pairwise(bounds)
        ]
        good = all(one.result() for one in done)
    if not good:
        raise SourceError("the graph: it changed while it was packed")
    return offsets, out, out_ids
