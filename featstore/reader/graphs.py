"""A stored graph read whole, for what holds it in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.checks import check_offsets, check_range
from featstore.base.memory import check_machine
from featstore.errors import SourceError
from featstore.reader.reader import Reader
from featstore.storage.store import StoredGraph, places_by_node, rows_to_nodes

_WHOLE_BYTES = 16 * 2**20  # of a reader that reads a table whole, its checksums besides


def read_offsets(graph: StoredGraph) -> NDArray[np.int64]:
    """int64 [rows + 1], all of it: 8 bytes a row. Raises BudgetError, CorruptionError, DeviceError,
    FormatError."""
    offsets: NDArray[np.int64] = read_whole(graph, "offsets")
    check_offsets(offsets, 0, graph.edges, f"the offsets of {graph.where()}")
    return offsets


def read_csc(graph: StoredGraph) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The topology by node id: (indptr int64 [nodes + 1], indices [edges]), each list in the order in which
    it is stored. Raises BudgetError, CorruptionError, DeviceError, FormatError."""
    sources = read_whole(graph, "sources")
    check_range(sources, graph.table.rows, f"a source of {graph.where()}")
    return rows_to_nodes(read_offsets(graph), sources, graph.table.maps())


def read_edge_ids(graph: StoredGraph, *, by_node: bool = False) -> NDArray[Any]:
    """The user's numbers of the edges, [edges], as they are stored, or in the order of :func:`read_csc`.
    Raises SourceError where none are kept; BudgetError, CorruptionError, DeviceError, FormatError."""
    if not graph.has_edge_ids:
        raise SourceError(
            f"{graph.where()} does not keep the numbers of its edges: pack it with edge_ids=True (--edge-ids)"
        )
    ids = read_whole(graph, "edge_ids")
    check_range(ids, graph.edges, f"an edge id of {graph.where()}")
    row_of_node = graph.table.row_of_node() if by_node else None
    return ids if row_of_node is None else ids[places_by_node(read_offsets(graph), row_of_node)[1]]


def read_whole(graph: StoredGraph, part: str) -> NDArray[Any]:
    """All of one of the graph's tables, ``offsets``, ``sources`` or ``edge_ids``, unchecked but for its
    checksums."""
    table = graph.store.table(f"{graph.name}/{part}")
    check_machine(table.data_bytes, f"load the {part} of {graph.where()}")
    memory = _WHOLE_BYTES + 4 * table.layout.pages
    with Reader(graph.store, tables=[table.name], memory=memory, static=None) as reader:
        values: NDArray[Any] = reader.read_runs([(0, table.rows)])
    return values
