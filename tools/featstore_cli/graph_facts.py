"""What a look at every edge of a stored graph tells: degrees, hubs, and edges between partitions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Groups of partitions, at most, between which edges are told apart.
GROUPS_MAX = 32
_BLOCK_EDGES = 1 << 20
_READER_BYTES = 32 << 20
_BLOCK_BYTES = 64 * _BLOCK_EDGES  # a block and what is counted of it
#: Nodes of which each edge's end is counted, sorted, and added up.
_NODE_BYTES = 3 * 8


@dataclass(frozen=True)
class GraphFacts:
    """Of one graph.

    Attributes:
        degrees: int64 [nodes], ends of edges at each node, highest first: of the table's rows, or where
            sources are of another table, of the rows of both.
        hubs: (table, node id, degree) of the first of them.
        between: float64 [groups of source partitions, groups of target partitions], shares of all edges.
        cut: share of edges whose ends are in two partitions; None where these are of two tables.
    """

    degrees: Any
    hubs: list[tuple[str, int, int]]
    between: Any
    cut: float | None

    def covered(self) -> Any:
        """float64 [nodes]: which share of the ends of edges the first nodes have, from one to all."""
        import numpy as np

        return np.cumsum(self.degrees) / max(1, int(self.degrees.sum()))


def look_at_graph(graph: Any, memory_bytes: int, tell: Any, hubs: int = 10) -> GraphFacts:
    """Read every edge once. Raises BudgetError where the nodes do not fit, and what reading raises."""
    import numpy as np

    from featstore.base.checks import check_range
    from featstore.errors import BudgetError
    from featstore.reader.graphs import read_offsets
    from featstore.reader.reader import Reader

    ends = [graph.table] if graph.source_table is graph.table else [graph.source_table, graph.table]
    nodes = sum(table.rows for table in ends)
    needed = _READER_BYTES + _BLOCK_BYTES + 8 * graph.table.rows + _NODE_BYTES * nodes
    if needed > memory_bytes:
        raise BudgetError(needed, memory_bytes, f"look at {graph.where()}")
    offsets, lists = read_offsets(graph), f"{graph.name}/sources"
    degrees = np.zeros(nodes, np.int64)
    degrees[nodes - graph.table.rows :] = np.diff(offsets)
    parts = graph.source_table.partition_offsets, graph.table.partition_offsets
    groups = [_groups(len(part) - 1) for part in parts]
    # Edges stand by their targets' rows: those of a partition are a run of them.
    runs = offsets[parts[1]]
    between = np.zeros((max(1, int(groups[0][-1]) + 1), max(1, int(groups[1][-1]) + 1)), np.int64)
    cut = 0
    with Reader(graph.store, tables=[lists], memory=_READER_BYTES, static=None, by_row=True) as reader:
        for first in range(0, graph.edges, _BLOCK_EDGES):
            end = min(graph.edges, first + _BLOCK_EDGES)
            sources = reader.read_runs({lists: [(first, end)]})[lists]
            check_range(sources, graph.source_table.rows, f"a source of {graph.where()}")
            np.add.at(degrees, sources, 1)
            of_source = np.searchsorted(parts[0], sources, "right") - 1
            of_target = np.searchsorted(runs, np.arange(first, end), "right") - 1
            cut += int(np.count_nonzero(of_source != of_target))
            np.add.at(between, (groups[0][of_source], groups[1][of_target]), 1)
            tell("looking at edges", end, graph.edges)
    first_nodes = np.argsort(-degrees, kind="stable")[:hubs]
    found = [_node(ends, int(row), int(degrees[row])) for row in first_nodes]
    degrees[::-1].sort()
    shares = between / max(1, graph.edges)
    return GraphFacts(degrees, found, shares, None if len(ends) > 1 else cut / max(1, graph.edges))


def _groups(parts: int) -> Any:
    """Which group each of so many partitions is of."""
    import numpy as np

    return np.arange(max(1, parts)) * min(GROUPS_MAX, max(1, parts)) // max(1, parts)


def _node(tables: list[Any], row: int, degree: int) -> tuple[str, int, int]:
    """A row of these tables, one after the other, by its node id."""
    for table in tables:
        if row < table.rows:
            node_of_row = table.node_of_row()
            return table.name, row if node_of_row is None else int(node_of_row[row]), degree
        row -= table.rows
    raise AssertionError(row)
