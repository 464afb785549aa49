"""A stored graph read whole, for what holds it in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.checks import check_offsets, check_range
from featstore.base.memory import check_machine
from featstore.errors import FormatError, SourceError
from featstore.reader.reader import Reader
from featstore.storage.store import StoredGraph, Table

_WHOLE_BYTES = 16 * 2**20  # of a reader that reads a table whole, its checksums besides, at most
_LEAST_BYTES = 2 * 2**20  # without which there is none
_STEP_EDGES = 2**20  # that become links at a time


def read_offsets(graph: StoredGraph) -> NDArray[np.int64]:
    """int64 [rows + 1], all of it: 8 bytes a row. Raises BudgetError, CorruptionError, DeviceError,
    FormatError."""
    offsets: NDArray[np.int64] = read_whole(graph, "offsets")
    check_offsets(offsets, 0, graph.edges, f"the offsets of {graph.where()}")
    return offsets


def degrees_of(graph: StoredGraph, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [n], the lengths of these nodes' lists. Raises CorruptionError, DeviceError, FormatError."""
    rows, found = graph.table.row_of_node(), np.empty(len(ids), np.int64)
    table = graph.store.table(f"{graph.name}/offsets")
    with Reader(graph.store, tables=[table.name], memory=whole_bytes(table), static=None) as reader:
        for low in range(0, len(ids), _STEP_EDGES):
            some = ids[low : low + _STEP_EDGES]
            first = some if rows is None else rows[some].astype(np.int64)
            both = np.concatenate([first, first + 1])
            begin, end = np.split(reader.read({table.name: both})[table.name], 2)
            found[low : low + len(some)] = end - begin
    if len(found) and (found.min() < 0 or found.max() > graph.edges):
        raise FormatError(f"the offsets of {graph.where()} do not ascend, or beyond its edges")
    return found


def read_csc(graph: StoredGraph) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The topology by node id: (indptr int64 [nodes + 1], indices [edges]), each list in the order in which
    it is stored. Raises BudgetError, CorruptionError, DeviceError, FormatError."""
    sources = read_whole(graph, "sources")
    check_range(sources, graph.source_table.rows, f"a source of {graph.where()}")
    offsets, maps = read_offsets(graph), graph.table.maps()
    node_of_row = graph.source_table.node_of_row() if graph.source_table is not graph.table else None
    if maps is not None:
        offsets, place = places_by_node(offsets, maps[0])
        sources = sources[place]
        if graph.source_table is graph.table:
            node_of_row = maps[1]
    return offsets, sources if node_of_row is None else node_of_row[sources]


def read_edge_ids(graph: StoredGraph, *, by_node: bool = False) -> NDArray[Any]:
    """The user's numbers of the edges, [edges], as they are stored, or in the order of :func:`read_csc`.
    Raises SourceError where none are kept; BudgetError, CorruptionError, DeviceError, FormatError."""
    if not graph.has_edge_ids:
        raise SourceError(
            f"{graph.where()} does not keep the numbers of its edges: pack it with edge_ids=True (--edge-ids)"
        )
    ids = read_whole(graph, "edge_ids")
    check_range(ids, graph.edges, f"an edge id of {graph.where()}")
    return _by_node(graph, ids) if by_node else ids


def read_weights(graph: StoredGraph) -> NDArray[Any]:
    """The edges' weights, float32 or float64 [edges], in the order of :func:`read_csc`. Raises SourceError
    where there are none, FormatError for one that is not finite, or negative; BudgetError, CorruptionError,
    DeviceError."""
    if not graph.has_weights:
        raise SourceError(f"{graph.where()} has no weights: pack it with edge_weights= (--edge-weights)")
    weights = read_whole(graph, "weights")
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise FormatError(
            f"a weight of {graph.where()} is not finite, or negative: featstore verify says which"
        )
    return _by_node(graph, weights)


def read_times(graph: StoredGraph) -> NDArray[np.int64]:
    """The edges' times, int64 [edges], in the order of :func:`read_csc`: those of each list ascend. Raises
    SourceError where there are none; BudgetError, CorruptionError, DeviceError, FormatError."""
    if not graph.has_times:
        raise SourceError(f"{graph.where()} has no times: pack it with edge_times= (--edge-times)")
    times = read_whole(graph, "times")
    falls = np.flatnonzero(times[1:] < times[:-1]) + 1
    if not np.isin(falls, read_offsets(graph)).all():
        raise FormatError(
            f"the times of a list of {graph.where()} do not ascend: featstore verify says which"
        )
    return _by_node(graph, times)


def _by_node(graph: StoredGraph, values: NDArray[Any]) -> NDArray[Any]:
    """Values of edges in the order of :func:`read_csc`."""
    row_of_node = graph.table.row_of_node()
    return values if row_of_node is None else values[places_by_node(read_offsets(graph), row_of_node)[1]]


def places_by_node(
    offsets: NDArray[np.int64], row_of_node: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(indptr int64 [nodes + 1] by node id, of each edge in that order its place in the order of rows, int64
    [edges])."""
    degrees = np.diff(offsets)[row_of_node]
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(degrees, dtype=np.int64)])
    place = np.repeat(offsets[row_of_node] - indptr[:-1], degrees)
    place += np.arange(len(place))
    return indptr, place


def read_links(graph: StoredGraph) -> NDArray[np.int64]:
    """All edges, int64 [2, edges]: node ids of sources above those of targets, by the user's numbers of edges
    where the graph keeps these, else in the order of :func:`read_csc`. Read some at a time. Raises
    BudgetError, CorruptionError, DeviceError, FormatError."""
    check_machine(16 * graph.edges, f"hold all edges of {graph.where()}")
    links, offsets, maps = np.empty((2, graph.edges), np.int64), read_offsets(graph), graph.table.maps()
    of_source, of_target = graph.source_table.node_of_row(), None if maps is None else maps[1]
    shift = None  # from the order of rows to that of nodes
    if maps is not None:
        ends = np.cumsum(np.diff(offsets)[maps[0]])
        shift = ends[maps[1]] - offsets[1:]
    names = [f"{graph.name}/sources"] + [f"{graph.name}/edge_ids"] * graph.has_edge_ids
    memory = _WHOLE_BYTES + 4 * sum(graph.store.table(name).layout.pages for name in names)
    with Reader(graph.store, tables=names, memory=memory, static=None) as reader:
        for low in range(0, graph.edges, _STEP_EDGES):
            places = np.arange(low, min(low + _STEP_EDGES, graph.edges))
            read = reader.read_runs({name: [(low, low + len(places))] for name in names})
            rows = np.searchsorted(offsets, places, side="right") - 1
            sources = read[names[0]]
            check_range(sources, graph.source_table.rows, f"a source of {graph.where()}")
            if graph.has_edge_ids:
                places = read[names[1]]
                check_range(places, graph.edges, f"an edge id of {graph.where()}")
            elif shift is not None:
                places = places + shift[rows]
            links[0, places] = sources if of_source is None else of_source[sources]
            links[1, places] = rows if of_target is None else of_target[rows]
    return links


def whole_bytes(table: Table) -> int:
    """What a reader takes that reads all of a table, beside the rows: no more than these are worth."""
    return min(_WHOLE_BYTES, _LEAST_BYTES + 2 * table.data_bytes) + 4 * table.layout.pages


def read_whole(graph: StoredGraph, part: str) -> NDArray[Any]:
    """All of one of the graph's tables, ``offsets``, ``sources``, ``edge_ids`` and so on, unchecked but for
    its checksums."""
    table = graph.store.table(f"{graph.name}/{part}")
    check_machine(table.data_bytes, f"load the {part} of {graph.where()}")
    with Reader(graph.store, tables=[table.name], memory=whole_bytes(table), static=None) as reader:
        values: NDArray[Any] = reader.read_runs([(0, table.rows)])
    return values
