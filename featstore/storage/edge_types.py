"""Types of edges, and names that tell tables of edges from tables of nodes.

An edge type is (source type, relation, target type), as PyG has it; a node type is the name of a table of
nodes. Joined by ``__`` an edge type names the graph of its edges, and the table of their rows. A store whose
graphs have edge types says so in its manifest. In others packing names the tables of edges: a PyG ``Data``
has ``edge_features`` beside its nodes' ``features``, a ``HeteroData`` has ``src__rel__dst``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

__all__ = [
    "EDGE_FEATURES", "EdgeType", "is_edge_table", "joined_name", "node_tables", "node_types", "split_joined",
    "typed_name",
]  # fmt: skip

EdgeType = tuple[str, str, str]
EDGE_FEATURES = "edge_features"


def joined_name(edge_type: EdgeType) -> str:
    """The name of an edge type's graph, and of the table of its edges' rows."""
    return "__".join(edge_type)


def split_joined(name: str, types: Collection[str]) -> list[EdgeType]:
    """The edge types between node types that a name may be of: none, one, or, where names hold ``__``
    themselves, several."""
    ends = [(a, b) for a in types for b in types if name.startswith(f"{a}__") and name.endswith(f"__{b}")]
    relations = ((a, name[len(a) + 2 : -len(b) - 2], b) for a, b in ends if len(name) >= len(a) + len(b) + 4)
    return [edge_type for edge_type in relations if joined_name(edge_type) == name and edge_type[1]]


def is_edge_table(name: str, tables: Collection[str]) -> bool:
    """Whether ``name`` is the table of an edge type, as packing names it, among a store's ``tables``."""
    ends = [t for t in tables if t != name and (name.startswith(f"{t}__") or name.endswith(f"__{t}"))]
    return name == EDGE_FEATURES or (name.count("__") >= 2 and len(ends) > 0)


def node_tables(tables: Collection[str]) -> list[str]:
    """The names in ``tables`` that are no edge tables, by name alone."""
    return [name for name in tables if not is_edge_table(name, tables)]


def node_types(tables: Collection[str], edge_types: Iterable[EdgeType]) -> list[str]:
    """The tables of nodes of a store whose graphs have these edge types; by name alone where it has none."""
    named = {joined_name(edge_type) for edge_type in edge_types}
    return [name for name in tables if name not in named] if named else node_tables(tables)


def typed_name(name: str, kinds: Iterable[str]) -> tuple[str, str]:
    """(TYPE, NAME) of ``TYPE.NAME``, where TYPE is one of ``kinds``, the longest that fits, as types may have
    dots; else what stands before the first dot, and the rest."""
    known = [kind for kind in kinds if name.startswith(f"{kind}.")]
    kind = max(known, key=len) if known else name.partition(".")[0]
    return kind, name[len(kind) + 1 :]
