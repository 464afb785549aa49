"""Which tables of a store are of nodes and which of edges, and which graph is meant where nobody says so.

Format v1 does not tell tables of nodes from tables of edges, but packing names those of edges: a PyG ``Data``
has ``edge_features`` beside its nodes' ``features``, a ``HeteroData`` has ``src__rel__dst``. Ids of nodes
never mean such a table unless it is named.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from featstore.arguments import known_name
from featstore.errors import SourceError

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore, StoredGraph

__all__ = ["EDGE_FEATURES", "graph_of", "is_edge_table", "node_tables"]

EDGE_FEATURES = "edge_features"


def is_edge_table(name: str, tables: Collection[str]) -> bool:
    """Whether ``name`` is the table of an edge type, as packing names it, among a store's ``tables``."""
    ends = [t for t in tables if t != name and (name.startswith(f"{t}__") or name.endswith(f"__{t}"))]
    return name == EDGE_FEATURES or (name.count("__") >= 2 and len(ends) > 0)


def node_tables(tables: Collection[str]) -> list[str]:
    """The names in ``tables`` that are no edge tables."""
    return [name for name in tables if not is_edge_table(name, tables)]


def graph_of(store: OpenStore, name: str | None) -> StoredGraph:
    """The store's graph of that name; without one, the only graph of a store with one type of nodes and of
    edges.

    Raises SourceError where there is no graph, or several could be meant: one graph beside several types of
    nodes or edges may be one relation of several. Raises KeyError for a name that no graph has.
    """
    known = ", ".join(map(repr, store.graphs))
    if not store.graphs:
        raise SourceError(
            f"the store {store.path} holds no graph: pack it with one (featstore pack --graph ... --topology)"
        )
    if name is not None:
        return store.graphs[known_name(name, store.graphs, f"the store {store.path} has no graph")]
    if len(store.graphs) > 1:
        raise SourceError(
            f"the store {store.path} holds {len(store.graphs)} graphs; say which: graph= one of {known}"
        )
    only = next(iter(store.graphs.values()))
    nodes = node_tables(store.tables)
    typed = [t for t in store.tables if t not in nodes and t != EDGE_FEATURES]
    if len(nodes) > 1 or typed:
        raise SourceError(
            f"the store {store.path} has the tables {', '.join(map(repr, store.tables))}, and its "
            f"graph {only.name!r} joins the nodes of {only.table.name!r} alone, which may be one "
            f"relation of several: pass graph={only.name!r} (--graph) to use that one; graphs of "
            "several types of nodes are not sampled yet"
        )
    return only
