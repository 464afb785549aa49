"""What of a store mega-batches are of: tables of nodes, the graphs between them, and the hubs of each table.

Without types that is one graph over one table. With types it is all of them: partitions were made of all
types together, so that partition p of every type belongs together, and a mega-batch is a set of their
numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_fanouts
from featstore.base.training_nodes import checked_train
from featstore.errors import ArgumentError, FormatError, SourceError
from featstore.loaders.mega.largest import DrawnEdges
from featstore.sampling.typed import typed_fanouts
from featstore.sampling.typed_store import TypedSeeds, by_edge_type, typed_graphs
from featstore.storage.relations import graph_of

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore, StoredGraph, Table

_HUB_BYTES = 64  # of a hub: entries of tables


class Parts:
    """``graphs`` and ``tables`` by name; ``typed``: there are types, and all graphs that have one are meant.
    ``tables`` are those of nodes that edges lead to or from; ``others`` what else there is of nodes.

    ``graph``: the name of one, which may be an edge type over one table. Raises SourceError for a store
    without a graph, or whose types of nodes were not partitioned together; UnknownNameError.
    """

    def __init__(self, store: OpenStore, graph: str | None) -> None:
        self.store, self.typed = store, graph is None and bool(store.edge_types)
        found = list(typed_graphs(store).values()) if self.typed else [graph_of(store, graph)]
        self.graphs: dict[str, StoredGraph] = {one.name: one for one in found}
        ends = {table.name for one in found for table in (one.table, one.source_table)}
        self.tables: dict[str, Table] = {n: table for n, table in store.tables.items() if n in ends}
        self.others = [name for name in store.node_types if name not in ends] if self.typed else []
        self.featureless = frozenset(store.manifest.featureless)
        counts = {name: len(table.partition_offsets) - 1 for name, table in self.tables.items()}
        if len(set(counts.values())) > 1:
            raise SourceError(
                "mode partitions loads partition p of all types of nodes together, and those of "
                f"{store.path} were not partitioned together: "
                + ", ".join(f"{name!r} has {count:,}" for name, count in counts.items())
                + "; pack it with one partitioner's order for all types, such as order='multilevel'"
            )

    def row_bytes(self, name: str) -> int:
        """Of a row of a table, 0 where it has no features."""
        return 0 if name in self.featureless else self.tables[name].row_bytes

    def fanouts(self, given: Any) -> dict[str, tuple[int, ...]]:
        """Neighbours per node and hop by graph. Raises ArgumentError."""
        if not self.typed:
            return dict.fromkeys(self.graphs, as_fanouts(given))
        types = {one.edge_type: one.name for one in self.graphs.values() if one.edge_type is not None}
        by_type = typed_fanouts(by_edge_type(typed_graphs(self.store), given), list(types))
        return {types[edge_type]: hops for edge_type, hops in by_type.items()}

    def drawn(self, fanouts: Mapping[str, tuple[int, ...]]) -> dict[str, DrawnEdges]:
        """What can be drawn of each graph."""
        return {
            name: DrawnEdges(one.source_table.name, one.table.name, fanouts[name])
            for name, one in self.graphs.items()
        }

    def empty_rows(self) -> dict[str, NDArray[Any]]:
        """Rows of no nodes, of the tables without edges that have features: mini-batches have none of
        theirs."""
        others = [self.store.tables[name] for name in self.others if name not in self.featureless]
        return {table.name: np.empty((0, *table.row_shape), table.dtype) for table in others}

    def as_seeds(self, train: Any) -> Any:
        """Training nodes as they were given; with types, as :class:`TypedSeeds`. Raises ArgumentError,
        IdError, UnknownNameError."""
        if not self.typed or isinstance(train, TypedSeeds):
            return train
        seeds = TypedSeeds.of(self.store, train)
        if seeds.node_type not in self.tables:
            raise ArgumentError(
                f"seeds of type {seeds.node_type!r}: no edges lead to or from these nodes, and mode "
                "'partitions' has none of them: take mode='online'"
            )
        return seeds

    def seed_table(self, train: Any) -> str:
        """The table of training nodes, as :meth:`as_seeds` gives them."""
        return train.node_type if isinstance(train, TypedSeeds) else next(iter(self.tables))

    def seed_ids(self, train: Any) -> NDArray[np.int64] | None:
        """Their ids, each once, of those of :meth:`as_seeds`; None for all nodes there are. Raises
        ArgumentError, IdError, UnknownNameError."""
        if train is None or isinstance(train, TypedSeeds):
            return None if train is None else train.ids
        ids = self.store.arrays[train] if isinstance(train, str) else train
        return checked_train(ids, self.tables[self.seed_table(train)].rows)


class Hubs:
    """The nodes that are to stay in memory, of each table: those of the most sources first, whose lists are
    stored a second time. Of a table into which no edges lead as large a share is kept as of others."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._graph_of: dict[str, StoredGraph] = {}
        for graph in parts.graphs.values():
            self._graph_of.setdefault(graph.table.name, graph)
        share = max((one.hubs / max(1, one.table.rows) for one in self._graph_of.values()), default=0.0)
        self.most = {
            name: self._graph_of[name].hubs if name in self._graph_of else _ranked(table, share)
            for name, table in parts.tables.items()
        }

    def counts(self, wanted: int | None, memory_bytes: int) -> dict[str, int]:
        """How many of each table: as ``wanted``, or all there are, at most; by default as many of each as
        take no more than ``memory_bytes`` in all. Raises SourceError where there are not as many of any."""
        most = max(self.most.values())
        if wanted is not None:
            if wanted > most:
                raise SourceError(
                    f"{wanted:,} hubs were asked for, but the store has the lists of {most:,}: pack with "
                    "more hubs"
                )
            return {name: min(wanted, count) for name, count in self.most.items()}
        # A hub takes its row, entries of tables, and its lists, at most, in both buffers of the subgraph.
        needed = np.zeros(most + 1, np.int64)
        for name, count in self.most.items():
            of = np.minimum(np.arange(most + 1), count)
            needed += of * (self._parts.row_bytes(name) + _HUB_BYTES)
            for graph in self._parts.graphs.values():
                if graph.table.name == name:
                    needed += 8 * graph.hub_rows()[1][of]
        found = int(np.searchsorted(needed, memory_bytes, side="right")) - 1
        return {name: min(found, count) for name, count in self.most.items()}

    def rows(self, name: str, count: int) -> NDArray[Any]:
        """[count], rows of a table's hubs, the most wanted first. Raises FormatError."""
        if name not in self._graph_of:
            ranked = self._parts.tables[name].rows_by_degree(count) if count else None
            return np.empty(0, np.int32) if ranked is None else ranked
        rows = self._graph_of[name].hub_rows(count)[0]
        for graph in self._parts.graphs.values():
            if graph.table.name == name and not np.array_equal(graph.hub_rows(count)[0], rows):
                raise FormatError(
                    f"{graph.where()} has other hubs than graph {self._graph_of[name].name!r}, which leads "
                    f"into the same nodes, {name!r}: pack the store again"
                )
        return rows

    def edges(self, graph: StoredGraph, count: int) -> int:
        """Edges of the lists of so many hubs of a graph."""
        return int(graph.hub_rows(count)[1][-1])


def _ranked(table: Table, share: float) -> int:
    """How many rows are this share of a table, where it knows which are wanted most."""
    return 0 if table.entry.order.rows_by_degree is None else int(np.ceil(share * table.rows))
