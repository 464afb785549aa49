"""Which graph of a store is meant where nobody says so, and which tables are of nodes, which of edges
(:mod:`featstore.storage.edge_types`). Ids of nodes never mean a table of edges unless it is named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from featstore.arguments import known_name
from featstore.errors import SourceError
from featstore.storage.edge_types import EDGE_FEATURES, is_edge_table, node_tables, typed_name

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore, StoredGraph

__all__ = [
    "EDGE_FEATURES", "check_over_one_table", "feature_tables", "graph_of", "graph_of_array", "graph_of_rows",
    "is_edge_table", "node_tables", "type_of_array",
]  # fmt: skip


def check_over_one_table(graph: StoredGraph) -> None:
    """Raise SourceError for a graph between two tables."""
    if graph.entry.table_of_sources != graph.entry.table:
        raise SourceError(
            f"{graph.where()} joins nodes of {graph.entry.table_of_sources!r} to nodes of "
            f"{graph.entry.table!r}, and a graph over one table is needed here"
        )


def edge_tables(store: OpenStore) -> list[str]:
    """The tables of edges."""
    family = store.manifest.family
    others = {*store.node_types, *(family.copies if family else ())}
    return [name for name in store.tables if name not in others]


def feature_tables(store: OpenStore) -> list[str]:
    """The tables whose rows are features of nodes."""
    return [name for name in store.node_types if name not in store.featureless]


def graph_of_rows(store: OpenStore, table: str) -> StoredGraph | None:
    """The graph of whose edges a table has the rows, by the numbers that the store keeps of them: row e is
    that of edge e. None for other tables, and where no numbers are kept."""
    if store.edge_types:
        found = store.graphs.get(table)
    else:
        alone = table == EDGE_FEATURES and len(store.graphs) == 1
        found = next(iter(store.graphs.values())) if alone else None
    if found is None or not found.has_edge_ids or found.edges != store.tables[table].rows:
        return None
    return found


def graph_of(store: OpenStore, name: str | None) -> StoredGraph:
    """The store's graph of that name; without one, the only graph of a store with one type of nodes and of
    edges.

    Raises SourceError where there is no graph, or several could be meant: one graph beside several types of
    nodes or edges may be one relation of several; and for an edge type between two types of nodes, which is
    no graph over one table. Raises KeyError for a name that no graph has.
    """
    known = ", ".join(map(repr, store.graphs))
    if not store.graphs:
        raise SourceError(
            f"the store {store.path} holds no graph: pack it with one (featstore pack --graph ... --topology)"
        )
    if name is not None:
        named = store.graphs[known_name(name, store.graphs, f"the store {store.path} has no graph")]
        check_over_one_table(named)
        return named
    if len(store.graphs) > 1:
        raise SourceError(
            f"the store {store.path} holds {len(store.graphs)} graphs; say which: graph= one of {known}"
        )
    only = next(iter(store.graphs.values()))
    check_over_one_table(only)
    typed = [name for name in edge_tables(store) if name != EDGE_FEATURES]
    if len(store.node_types) > 1 or typed:
        raise SourceError(
            f"the store {store.path} has the tables {', '.join(map(repr, store.tables))}, and its "
            f"graph {only.name!r} joins the nodes of {only.table.name!r} alone, which may be one "
            f"relation of several: pass graph={only.name!r} (--graph) to use that one"
        )
    return only


def type_of_array(store: OpenStore, name: str) -> tuple[str, str]:
    """(TYPE, NAME) of an array called ``TYPE.NAME``, where TYPE is a type of nodes or of edges."""
    return typed_name(name, [*store.node_types, *store.graphs])


def graph_of_array(store: OpenStore, name: str) -> StoredGraph | None:
    """The graph of which an array of the store has a value for each edge: ``TYPE.NAME`` of the edge type
    ``TYPE``, or in a store without types an array with as many values as its only graph has
    edges. Where it has as many nodes, the array is of edges if its name begins with ``edge``, as PyG
    decides it. None for another array."""
    shape = store.manifest.arrays[name].shape
    if store.edge_types:
        of, rest = type_of_array(store, name)
        found = store.graphs[of] if rest and of in store.graphs else None
        return found if found is not None and shape[:1] == [found.edges] else None
    if len(store.graphs) != 1:
        return None
    found = next(iter(store.graphs.values()))
    same = found.edges == found.table.rows and not name.startswith("edge")
    return found if shape[:1] == [found.edges] and not same else None
