"""The graph over the nodes of all types that the graphs of a store join: what types are dealt out by.

Nodes are the rows of one table after the other, and each edge leads both ways, as when a typed graph is
packed (:mod:`featstore.packing.typed`). The stored lists are passed over in their order and sorted by
:func:`featstore.packing.graphs.build.build_csc`, in memory or by way of scratch files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.packing.graphs.build import build_csc
from featstore.packing.graphs.csc import CscGraph
from featstore.packing.split.lists import need_row
from featstore.storage.disk import Disk
from featstore.storage.store import StoredGraph


class UnionEdges:
    """The edges of several stored graphs, each both ways: an
    :class:`~featstore.packing.graphs.build.EdgeStream`. ``first``: of each table, the number of its first
    row's node. ``lists(graph)`` is a context manager that gives (offsets, a function that reads sources)."""

    name = "the graphs of the store"

    def __init__(
        self, graphs: Sequence[StoredGraph], first: Mapping[str, int], lists: Callable[[StoredGraph], Any]
    ) -> None:  # fmt: skip
        self._graphs, self._first, self._lists = graphs, first, lists

    def blocks(self, block_edges: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        for graph in self._graphs:
            first_source, first_target = (self._first[t.name] for t in (graph.source_table, graph.table))
            with self._lists(graph) as (offsets, read):
                for low in range(0, graph.edges, block_edges):
                    high = min(low + block_edges, graph.edges)
                    sources = read(low, high).astype(np.int64)
                    wrong = np.flatnonzero((sources < 0) | (sources >= graph.source_table.rows))
                    need_row(int(wrong[0]) if len(wrong) else -1, low, graph.where())
                    ends = sources + first_source, targets_between(offsets, low, high) + first_target
                    yield ends
                    yield ends[::-1]

    def where(self, edge: int) -> str:
        return f"edge {edge // 2:,}"


def targets_between(offsets: NDArray[np.int64], low: int, high: int) -> NDArray[np.int64]:
    """The rows whose lists have the edges ``low`` to ``high``."""
    first = int(np.searchsorted(offsets, low, side="right")) - 1
    last = int(np.searchsorted(offsets, high, side="left"))
    ends = np.clip(offsets[first : last + 1], low, high)
    return np.repeat(np.arange(first, last), np.diff(ends))


@contextmanager
def union_of(
    graphs: Sequence[StoredGraph], first: Mapping[str, int], nodes: int,
    lists: Callable[[StoredGraph], Any], memory_bytes: int, scratch_dir: Path,
) -> Iterator[CscGraph]:  # fmt: skip
    """The graph over all ``nodes``, as long as it is wanted. Raises FormatError, BudgetError, DiskFullError,
    DeviceError."""
    indptr, indices, _ = build_csc(UnionEdges(graphs, first, lists), nodes, memory_bytes, scratch_dir)
    try:
        yield CscGraph(indptr, indices, {})
    finally:
        if isinstance(indices, np.memmap):
            Disk().unlink(Path(str(indices.filename)))
