"""What a pack is given by edge type: graphs, values of edges, and types of nodes without features."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_count, shown
from featstore.errors import SourceError
from featstore.packing.graphs.values import EdgeValues
from featstore.packing.sources.base import FeatureSource
from featstore.packing.sources.opening import is_text, open_rows
from featstore.packing.sources.pyg import edge_index_of, edge_values, is_pyg, is_relation, relation_of
from featstore.storage.edge_types import EdgeType, joined_name, split_joined
from featstore.storage.manifest import ROWS_MAX, check_name


class NoFeatures(FeatureSource):
    """The rows of nodes without features: a zero each."""

    def __init__(self, name: str, nodes: Any) -> None:
        rows = as_count(nodes, f"the number of nodes of {name!r}", 0, ROWS_MAX)
        super().__init__(f"{rows} nodes of {name!r}", rows, (), np.dtype(np.uint8))

    def _blocks(self, start: int, block_rows: int) -> Iterator[NDArray[Any]]:
        for first in range(start, self.rows or 0, block_rows):
            yield self._empty(self._block_rows_used(first, block_rows))

    def fingerprint(self) -> dict[str, str | int]:
        return {"kind": "nodes", "rows": self.rows or 0}


def is_number_of_nodes(spec: Any) -> bool:
    """Whether a table is given as no more than its number of nodes."""
    return isinstance(spec, int | np.integer) and not isinstance(spec, bool)


def edge_type_of(key: Any, tables: Collection[str]) -> EdgeType | None:
    """The edge type that a key of ``graph=`` names, as a triple or joined; None for the name of a table.
    Raises SourceError for one whose nodes are not packed, or that may be several."""
    if isinstance(key, tuple):
        if len(key) != 3 or not all(isinstance(part, str) for part in key):
            raise SourceError(
                f"graph: an edge type is (source type, relation, target type), not {shown(key)}"
            )
        source, relation, target = key
        for end in (source, target):
            if end not in tables:
                raise SourceError(
                    f"graph: the edge type {key} joins nodes of {end!r}, which are not packed; give their "
                    f"features, or where they have none their number, features={{{end!r}: 5000}}; there "
                    f"are {', '.join(map(repr, tables))}"
                )
        return source, relation, target
    found = split_joined(key, [name for name in tables if name != key]) if isinstance(key, str) else []
    if len(found) > 1:
        raise SourceError(
            f"graph: {key!r} may be the edge type {' or '.join(map(str, found))}: give the triple"
        )
    return found[0] if found else None


def graphs_by_type(
    given: Mapping[Any, Any], tables: Collection[str]
) -> tuple[dict[str, Any], dict[str, EdgeType]]:
    """(graphs by name, the edge types of those that have one). Raises SourceError where some have one and
    some have not."""
    graphs: dict[str, Any] = {}
    types: dict[str, EdgeType] = {}
    for key, spec in given.items():
        edge_type = edge_type_of(key, tables)
        name = key if edge_type is None else joined_name(edge_type)
        if name in graphs:
            raise SourceError(f"graph: the edge type {edge_type} is given twice")
        graphs[name] = spec
        if edge_type is not None:
            check_name(name, "graph", SourceError)
            types[name], graphs[name] = edge_type, edges_of_type(spec, edge_type)
    plain = [name for name in graphs if name not in types]
    if types and plain:
        raise SourceError(
            f"graph: {', '.join(map(repr, plain))} have no edge type, and {', '.join(map(repr, types))} "
            "have: give each as (source type, relation, target type)"
        )
    ends = {end for source, _, target in types.values() for end in (source, target)}
    if ends & types.keys():
        raise SourceError(f"graph: {min(ends & types.keys())!r} is a type of nodes, and of edges")
    return graphs, types


def edges_of_type(spec: Any, edge_type: EdgeType) -> Any:
    """The edges of one relation of a `HeteroData`, as ``[2, edges]``; anything else as it is."""
    if not is_relation(spec):
        return spec
    if relation_of(spec) != edge_type:
        raise SourceError(f"graph: the relation {relation_of(spec)} is given for the edge type {edge_type}")
    edges = edge_index_of(spec, joined_name(edge_type))
    if edges is None:
        raise SourceError(f"graph: the relation {edge_type} has neither edge_index nor adj_t")
    return edges


def by_graph(value: Any, graphs: Mapping[str, Any], what: str) -> dict[str, Any]:
    """An option that may be given once for all graphs, or by the names or edge types of graphs."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        if len(graphs) > 1:
            raise SourceError(
                f"there are several graphs; say whose {what} it is: {what}={{{next(iter(graphs))!r}: ...}}"
            )
        if not graphs:
            raise SourceError(f"{what} is given, and no graph that it could be of; give graph= as well")
        return dict.fromkeys(graphs, value)
    found = {}
    for key, one in value.items():
        name = joined_name(key) if isinstance(key, tuple) and all(isinstance(k, str) for k in key) else key
        if name not in graphs:
            raise SourceError(
                f"{what} is given for a graph {shown(key)} that is not packed; there are "
                f"{', '.join(map(repr, graphs)) or 'none'}"
            )
        found[name] = one
    return found


def values_by_graph(
    given: Mapping[str, Any], graphs: Mapping[str, Any], data: Any
) -> tuple[dict[str, list[EdgeValues]], set[str]]:
    """(the values of the edges of each graph, arrays of PyG data that these are). ``given``: by part,
    ``weights`` and ``times``; of PyG ``data`` also the name of an attribute."""
    found: dict[str, list[EdgeValues]] = {}
    taken: set[str] = set()
    for part, value in given.items():
        what = f"edge_{part}"
        if is_pyg(data) and isinstance(value, str) and not os.path.exists(_path_and_column(value)[0]):
            own = edge_values(data, value)
            specs: dict[str, Any] = {}
            for relation, array in own.items():
                name = relation or next(iter(graphs), "")
                if name in graphs:
                    specs[name] = array
                    taken.add(f"{relation}.{value}" if relation else value)
            if not specs:
                raise SourceError(
                    f"{what}: no edges of the PyG data that are packed have an attribute {value!r}, and no "
                    "file has that name"
                )
        else:
            specs = by_graph(value, graphs, what)
        for name, spec in specs.items():
            label = None if isinstance(spec, str | os.PathLike) else f"<{what} of {name!r}>"
            spec, column = _path_and_column(spec)
            whole = "int64" if part == "times" and is_text(spec) else None  # text has no dtype of its own
            source = open_rows(spec, dtype=whole, key=column, name=label)
            found.setdefault(name, []).append(EdgeValues(part, source))
    return found, taken


def _path_and_column(spec: Any) -> tuple[Any, str | None]:
    """``PATH:COLUMN`` as (path, column), where there is no such file, but one of the path alone; anything
    else as it is."""
    if not isinstance(spec, str | os.PathLike) or os.path.exists(spec):
        return spec, None
    path, _, column = os.fspath(spec).rpartition(":")
    return (path, column) if column and os.path.exists(path) else (spec, None)
