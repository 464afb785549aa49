"""Whole mini-batches of several types of nodes and edges: what is a thing of one type in the others is here a
dictionary, by node type or by edge type, ``(source type, relation, target type)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from featstore import arguments as args
from featstore.errors import ArgumentError, SourceError
from featstore.loaders.batch import Batch, check_numbered, ids_of, of_pyg
from featstore.loaders.prefetch import Sampler
from featstore.loaders.whole import (
    WantedRows,
    Whole,
    as_batch,
    field_of,
    name_taken,
    put_values,
    values_of,
    with_recorded_ids,
)
from featstore.sampling.minibatch import Ids
from featstore.storage.edge_types import EdgeType, joined_name
from featstore.storage.relations import type_of_array
from featstore.storage.store import OpenStore, StoredGraph
from featstore.trace.told_ids import has_recorded_ids


class TypedWhole(Whole):
    """Makes mini-batches of a store with edge types whole.

    ``edge_table``: a name or several, of tables of edges, whose rows ``edge_attr`` has by edge type, found by
    ``e_id``. ``attach``: names of arrays, ``TYPE.NAME``, each with a value for each node of that type, or for
    each edge of the edge type, by its number: the mini-batch has them as ``NAME``, by type. Rows of nodes
    without features are not read. ``named``: ``nodes=`` says whose rows are wanted. Raises ArgumentError,
    UnknownNameError, SourceError.
    """

    def __init__(self, store: OpenStore, edge_table: Any, attach: Any, *, named: bool = False) -> None:
        super().__init__(store, None, ())
        self._named = named
        self.featureless = frozenset(store.featureless)
        self.edge_types = _edge_tables(store, edge_table)
        self._edge_type_of = {joined_name(edge_type): edge_type for edge_type in store.edge_types}
        nodes = [name for name in store.node_types if name not in self.featureless]
        self._tables = [*nodes, *self.edge_types]
        if not self._tables:
            raise SourceError(f"no nodes of {store.path} have features: there are no rows to load")
        self._kinds: dict[str, tuple[str, str]] = {}  # of arrays: (TYPE, NAME)
        for name in _names(attach, "attach", "names of arrays"):
            args.known_name(name, store.manifest.arrays, "attach: the store has no array")
            self._kinds[name] = node_type, rest = type_of_array(store, name)
            shape = store.manifest.arrays[name].shape
            fits = node_type in store.node_types and shape[:1] == [store.tables[node_type].rows]
            if not rest.isidentifier() or not (fits or self._is_of_edges(store, name)):
                raise ArgumentError(
                    f"attach: array {name!r} has the shape {list(shape)}; of a store with several types of "
                    "nodes an array is attached that is called TYPE.NAME and has a value for each node of "
                    f"that type, or for each edge of an edge type; types are "
                    f"{', '.join(map(repr, store.node_types))}"
                )
            self.attached.append(name)

    def check_sampled(self, graph: StoredGraph) -> None:
        """What is wrong with edge tables was found when they were named."""

    def wanted(
        self, batches: Sampler, nodes: Callable[[Any], Any] | None, recorded: bool,
        check: Callable[[], None] | None,
    ) -> TypedRows:  # fmt: skip
        """Mini-batches as pairs of the ids wanted by table, and the sample."""
        return TypedRows(self, batches, nodes, recorded, check)

    @property
    def wanted_edge_tables(self) -> list[str]:
        """The tables of edges whose rows mini-batches have."""
        return list(self.edge_types)

    def batch(self, made: Any) -> Batch:
        """One mini-batch; PyG's objects bring their rows along."""
        batch = as_batch(made)
        named = self._named or batch.told_ids
        known = ids_of(batch.sample) if isinstance(field_of(batch.sample, "row"), Mapping) else None
        if isinstance(known, Mapping):  # sampled here, around nodes or links, or as that is
            given = batch.n_id
            asked = given if named and isinstance(given, Mapping) else known
            if not isinstance(batch.x, Mapping):
                batch.x = {self._only_of(asked): batch.x}
            if named and not isinstance(given, Mapping):
                given = dict.fromkeys(batch.x, given)
            own = given if isinstance(given, Mapping) else {}  # those that were asked for, whose rows x has
            batch.n_id = {**known, **{n: ids for n, ids in own.items() if n not in self.edge_types}}
        elif isinstance(batch.n_id, Mapping) and not isinstance(batch.x, Mapping):
            batch.x = {self._only_of(batch.n_id): batch.x}
        if not isinstance(batch.x, Mapping):  # of ids without a type
            return self._plain(batch)
        if not isinstance(batch.n_id, Mapping):  # beside rows of edges
            batch.n_id = {n: batch.n_id for n in batch.x if n not in self.edge_types}
        found = {of: batch.x[name] for name, of in self.edge_types.items() if name in batch.x}
        if found:
            batch.edge_attr = found
            batch.x = {name: rows for name, rows in batch.x.items() if name not in self.edge_types}
            batch.n_id = {name: ids for name, ids in batch.n_id.items() if name not in self.edge_types}
        by_name: dict[str, dict[Any, Any]] = {}
        like = next(iter((batch.x or batch.edge_attr).values()))
        for name, array in self.arrays.items():
            kind, rest = self._kinds[name]
            if name in self.of_edges:
                edge_type = self._edge_type_of[kind]
                ids = _numbers(batch.sample, edge_type, f"attach: {name!r}")
                by_name.setdefault(rest, {})[edge_type] = values_of(array, ids, like, name, edges=True)
            elif kind in batch.n_id:
                by_name.setdefault(rest, {})[kind] = values_of(array, batch.n_id[kind], like, name)
        for name, by_type in by_name.items():
            self._attach(batch, name, by_type)
        return batch

    def _only_of(self, ids: Mapping[str, Any]) -> str:
        """The table whose rows came alone: that of whose nodes there are."""
        there = [name for name in self._tables if len(ids.get(name, ()))]
        return (there or [name for name in self._tables if name in ids] or self._tables)[0]

    def _plain(self, batch: Batch) -> Batch:
        """A mini-batch without types, of the only type of nodes."""
        for name, array in self.arrays.items():
            kind, rest = self._kinds[name]
            if name in self.of_edges:
                raise ArgumentError(
                    f"attach: {name!r} has values of the edges {kind!r}, and these mini-batches do not say "
                    "of which type their edges are: leave it out"
                )
            put_values(batch, rest, values_of(array, batch.n_id, batch.x, name))
        return batch

    def _attach(self, batch: Batch, name: str, by_type: dict[Any, Any]) -> None:
        if of_pyg(batch.sample):
            for node_type, values in by_type.items():
                if name in batch.sample[node_type]:
                    raise name_taken(name)
                batch.sample[node_type][name] = values
        elif hasattr(batch, name):
            raise name_taken(name)
        setattr(batch, name, by_type)


def whole_of(store: OpenStore, edge_table: Any, attach: Any, *, named: bool) -> Whole:
    """What makes mini-batches of a store whole, whether it has edge types or not. ``named``: ``nodes=`` says
    whose rows are wanted."""
    if store.edge_types:
        return TypedWhole(store, edge_table, attach, named=named)
    return Whole(store, edge_table, attach)


class TypedRows(WantedRows):
    """Mini-batches of several types as pairs of the ids wanted by table, and the sample."""

    def __init__(
        self, whole: TypedWhole, batches: Sampler, nodes: Callable[[Any], Any] | None, recorded: bool,
        check: Callable[[], None] | None,
    ) -> None:  # fmt: skip
        super().__init__(batches, nodes, None, recorded, check)
        self._whole = whole

    def of(self, made: Any) -> tuple[Ids, Any]:
        ids, sample = super().of(made)
        inner = sample["sample"] if has_recorded_ids(sample) else sample
        wanted = {name: one for name, one in ids.items() if name not in self._whole.featureless}
        if len(wanted) < len(ids) and not self._kept_by(sample):  # what has no rows would be gone
            sample = with_recorded_ids(sample, {name: one.copy() for name, one in ids.items()})
        for table, edge_type in self._whole.edge_types.items():
            wanted[table] = _numbers(inner, edge_type, f"edge_table={table!r}")
        return wanted, sample

    def _kept_by(self, sample: Any) -> bool:
        """Whether the ids of all types are found in a sample afterwards."""
        own = self._nodes is None and isinstance(field_of(sample, "row"), Mapping)
        return own or of_pyg(sample) or has_recorded_ids(sample)


def _numbers(made: Any, edge_type: EdgeType, what: str) -> Any:
    """The user's numbers of the edges of one type. Raises SourceError."""
    if of_pyg(made) and hasattr(made, "edge_types"):
        found = made[edge_type].get("e_id") if edge_type in made.edge_types else None
    else:
        by_type = field_of(made, "e_id")
        found = by_type.get(edge_type) if isinstance(by_type, Mapping) else None
    if found is None:
        raise SourceError(
            f"{what} is read by e_id, the numbers of edges that it was packed "
            f"with, which these mini-batches do not have of {edge_type}: PyG's loaders bring it, so does the "
            "store's own sampling where edge ids were packed"
        )
    numbers = np.asarray(found.cpu() if hasattr(found, "cpu") else found)
    check_numbered(numbers, what, edge_type)
    return numbers


def _names(given: Any, name: str, what: str) -> list[str]:
    return [given] if isinstance(given, str) else list(args.as_sequence(given or (), name, what))


def _edge_tables(store: OpenStore, given: Any) -> dict[str, EdgeType]:
    """The edge types of the tables of edges that were named."""
    known = {joined_name(edge_type): edge_type for edge_type in store.edge_types}
    found: dict[str, EdgeType] = {}
    for name in _names(given, "edge_table", "names of tables of edges"):
        args.known_name(name, store.tables, "edge_table: the store has no table")
        if name not in known:
            raise ArgumentError(
                f"edge_table: {name!r} is a table of nodes; those of edges are called as their graphs are: "
                f"{', '.join(map(repr, known))}"
            )
        graph, rows = store.graphs[name], store.tables[name].rows
        if rows != graph.edges or not graph.has_edge_ids:
            why = (
                f"has {graph.edges:,} edges, and the table {rows:,} rows"
                if graph.has_edge_ids
                else "does not keep the numbers of its edges: pack it with edge_ids=True (--edge-ids)"
            )
            raise SourceError(f"edge_table={name!r} is read by e_id, and {graph.where()} {why}")
        found[name] = known[name]
    return found
