"""PyG's `Data` and `HeteroData` taken apart: tables to pack, graphs to order them by, small arrays to keep
beside them.

A homogeneous `Data` gives the table ``features`` (``x``) and, if it has ``edge_attr``, ``edge_features``,
whose row e belongs to column e of ``edge_index``. A `HeteroData` gives a table for each node type, under its
name (where it has no ``x``, the number of its nodes), a graph for each edge type, called ``src__rel__dst``,
and a table of that name for each edge type with ``edge_attr``. Tensors are shared, not copied.

A `HeteroData` is stored whole, or refused. What of a `Data` is not stored, and rows of edges that no stored
graph numbers, are warned of.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.errors import SourceError
from featstore.packing.sources.arrays import tensor_to_numpy
from featstore.packing.sources.whole import WholeData

__all__ = [
    "edge_values", "edges_of_relation", "is_pyg", "is_relation", "pyg_arrays", "pyg_inputs",
    "pyg_tables", "relation_of", "unnumbered",
]  # fmt: skip

_OF_NODES, _OF_EDGES = ("x",), ("edge_index", "edge_attr", "adj_t")  # that are tables and graphs


def is_pyg(data: Any) -> bool:
    """Whether an object is a PyG `Data` or `HeteroData` (without importing PyG)."""
    return any(c.__module__.startswith("torch_geometric.data") for c in type(data).__mro__) and hasattr(
        data, "stores"
    )


def pyg_tables(data: Any) -> dict[str, NDArray[Any]]:
    """Tables of a `Data` or `HeteroData`: name -> ``[rows, ...]``. Raises SourceError when there is no
    feature."""
    nodes, edges = node_and_edge_stores(data)
    tables = {}
    for stores, attribute, plain in ((nodes, "x", "features"), (edges, "edge_attr", "edge_features")):
        for kind, store in stores:
            value = store.get(attribute)
            if value is not None:
                tables[kind or plain] = _as_array(value, f"{kind or 'data'}.{attribute}")
    if not tables:
        raise SourceError("the PyG data has neither x nor edge_attr; there is nothing to pack")
    return tables


def pyg_arrays(data: Any) -> dict[str, NDArray[Any]]:
    """All else that is an array (``y``, ``train_mask`` ...): ``y``, or ``paper.y`` for the node type
    ``paper``."""
    arrays = {}
    for kind, store in _all_stores(data):
        taken = _taken(data, kind)
        for key, value in store.items():
            if key not in taken and (isinstance(value, np.ndarray) or hasattr(value, "untyped_storage")):
                name = f"{kind}.{key}" if kind else key
                arrays[name] = _as_array(value, name)
    return arrays


def _taken(data: Any, kind: str) -> tuple[str, ...]:
    """What of a type is a table or a graph: of nodes and of edges other things, and of none nothing."""
    if not _is_hetero(data):
        return (*_OF_NODES, *_OF_EDGES)
    return _OF_NODES if kind in data.node_types else _OF_EDGES if kind else ()


def pyg_inputs(data: Any, graph_given: bool, typed: bool) -> WholeData:
    """What is taken of PyG data. ``typed``: graphs have edge types, and types of nodes may be without
    features. Raises SourceError for what the store would not have of a `HeteroData`."""
    arrays = pyg_arrays(data)
    hetero = _is_hetero(data)
    bare = [kind for kind in data.node_types if data[kind].get("x") is None] if hetero else []
    edges: dict[Any, NDArray[Any]] = {}
    if not hetero:
        tables: dict[str, Any] = dict(pyg_tables(data))
        edges = {} if graph_given else dict(edges_by_relation(data, tables))
    else:
        if not graph_given:
            edges = dict(edges_by_relation(data, {}))
        typed = typed or bool(edges)
        counts = {kind: _number_of_nodes(data[kind], kind) for kind in bare} if typed else {}
        tables = pyg_tables(data) if len(counts) < len(data.node_types) or not typed else _edge_tables(data)
        tables = {kind: tables.get(kind, counts.get(kind)) for kind in (*data.node_types, *tables)}
        tables = {kind: table for kind, table in tables.items() if table is not None}
    warnings = [*_not_stored(data), *([] if graph_given else _of_none(data, arrays))]
    if bare and not typed:
        warnings.append(
            f"not stored of the PyG data: the types of nodes {', '.join(map(repr, bare))}, which have no x: "
            "nodes without features are kept where graphs have edge types"
        )
    relations = ["__".join(kind) for kind in edges] if hetero else [""] * bool(edges)
    return WholeData(tables, edges, arrays, warnings, _edge_rows(data, tables, arrays), relations)


def _edge_tables(data: Any) -> dict[str, Any]:
    """Tables of edges alone, of a `HeteroData` whose nodes have no features."""
    found = {kind: store.get("edge_attr") for kind, store in node_and_edge_stores(data)[1]}
    return {k: _as_array(value, f"{k}.edge_attr") for k, value in found.items() if value is not None}


def _number_of_nodes(store: Any, kind: str) -> int:
    """How many nodes there are of a type without ``x``. Raises SourceError where that would be a guess."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyG's guess is not taken
        number = store.get("num_nodes")
        if number is None and any("edge" not in key for key in store):
            number = store.num_nodes
    if number is None:
        raise SourceError(
            f"the PyG data has no x of the nodes {kind!r}, and does not say how many there are: set "
            f"data[{kind!r}].num_nodes"
        )
    return int(number)


def edge_values(data: Any, attribute: str) -> dict[str, NDArray[Any]]:
    """An attribute of the edges, by relation, ``src__rel__dst``, "" of a `Data`; of those that have it."""
    stores = node_and_edge_stores(data)[1]
    found = {kind: store.get(attribute) for kind, store in stores}
    return {
        kind: _as_array(value, f"{kind or 'data'}.{attribute}")
        for kind, value in found.items()
        if value is not None
    }


class PygEdges(np.ndarray[Any, Any]):
    """Edges as PyG has them: ``[2, edges]``, also where there are two."""


def edges_by_relation(data: Any, tables: Mapping[str, Any]) -> dict[Any, NDArray[Any]]:
    """The edges, ``[2, edges]``: of a `Data` those of its table of nodes, of a `HeteroData` by edge type."""
    if _is_hetero(data):
        relations = {kind: edge_index_of(data[kind], "__".join(kind)) for kind in data.edge_types}
        for kind, found in relations.items():
            if found is None:
                raise SourceError(f"the relation {kind} of the HeteroData has neither edge_index nor adj_t")
        return {kind: found for kind, found in relations.items() if found is not None}
    edges = edge_index_of(data._store, "edge_index")
    if edges is not None and "features" not in tables:
        raise SourceError(
            "the PyG data has edges, but no x: there is no table of nodes that the graph could belong "
            "to; give graph={} to pack without it"
        )
    return {} if edges is None else {"features": edges}


def _not_stored(data: Any) -> list[str]:
    """Warnings of what is no array and of what of an adjacency matrix is not kept."""
    lost, found = [], []
    for kind, store in _all_stores(data):
        prefix, taken = f"{kind}." if kind else "", _taken(data, kind)
        for key, value in store.items():
            plain = isinstance(value, np.ndarray) or hasattr(value, "untyped_storage")
            if key not in taken and key != "num_nodes" and value is not None and not plain:
                lost.append(f"{prefix}{key} ({type(value).__name__})")
        adjacency = store.get("adj_t")
        if adjacency is not None and store.get("edge_index") is not None:
            lost.append(f"{prefix}adj_t (edge_index is stored)")
        elif hasattr(adjacency, "crow_indices") and bool((adjacency.values() != 1).any()):
            raise SourceError(
                f"cannot be stored of the PyG data: {prefix}adj_t's values, which are of edges: give the "
                "edges as edge_index, and the values beside them as edge_weight or edge_attr"
            )
    if lost and _is_hetero(data):
        raise SourceError(
            f"cannot be stored of the HeteroData: {', '.join(lost)}; a HeteroData is stored whole: delete "
            "what is not needed, and give what is as tensors"
        )
    if lost:
        found.append(
            f"not stored of the PyG data: {', '.join(lost)}; what is needed of it can be given as an array, "
            "arrays={name: values}"
        )
    return found


def _of_none(data: Any, arrays: Mapping[str, Any]) -> list[str]:
    """A warning of arrays of a `Data` that are neither of its nodes nor of its edges."""
    if _is_hetero(data) or data.get("x") is None:
        return []
    counts = {len(data.x), data.num_edges}
    names = [name for name, array in arrays.items() if array.ndim == 0 or len(array) not in counts]
    if not names:
        return []
    return [
        f"{', '.join(map(repr, names))}: stored, but not in mini-batches, which have the arrays with a value "
        "for each node or for each edge"
    ]


def _edge_rows(data: Any, tables: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, str]:
    """The tables and arrays of edges, and of which relation: ``src__rel__dst``, "" of a `Data`."""
    if _is_hetero(data):
        kinds = sorted(("__".join(kind) for kind in data.edge_types), key=len)
        return {n: kind for n in (*tables, *arrays) for kind in kinds if f"{n}.".startswith(f"{kind}.")}
    names = [name for name in arrays if data.is_edge_attr(name)]
    return dict.fromkeys(names + ["edge_features"] * ("edge_features" in tables), "")


def unnumbered(edge_rows: Mapping[str, str], numbered: Collection[str]) -> list[str]:
    """A warning of features and arrays of edges that are of none of the ``numbered`` relations: they are
    stored, but no stored graph numbers edges so."""
    rows = [name for name, relation in edge_rows.items() if relation not in numbered]
    if not rows:
        return []
    return [
        f"{', '.join(map(repr, rows))}: row e belongs to column e of edge_index as it was given, and no "
        "stored graph has these numbers of its edges, so e_id of samplers and loaders does not name these "
        "rows. Store that graph with the ids of its edges (topology=True, and not edge_ids=False), or keep "
        "edge_index"
    ]


def is_relation(spec: Any) -> bool:
    """Whether something is one relation of a `HeteroData` (a mapping of its attributes, too)."""
    ours = type(spec).__module__.startswith("torch_geometric.data")
    return ours and isinstance(getattr(spec, "_key", None), tuple)


def relation_of(spec: Any) -> tuple[str, str, str]:
    """Which relation of a `HeteroData` one is: source, relation, target."""
    kind: tuple[str, str, str] = spec._key
    return kind


def edges_of_relation(spec: Any, table: str | None) -> Any:
    """The edges of one relation, ``data['a', 'r', 'a']``, as ``[2, edges]``; anything else as it is.

    ``table``: the type of nodes that it must join, where that is known. Raises SourceError.
    """
    if not is_relation(spec):
        return spec
    kind = relation_of(spec)
    if kind[0] != kind[2] or (table is not None and kind[0] != table):
        raise SourceError(
            f"graph: the relation {kind} joins nodes of {kind[0]!r} and {kind[2]!r}, and the graph of a "
            f"table {'' if table is None else repr(table) + ' '}joins nodes of that table; give it by its "
            f"edge type, graph={{{kind}: ...}}"
        )
    edges = edge_index_of(spec, "__".join(kind))
    if edges is None:
        raise SourceError(f"graph: the relation {kind} has neither edge_index nor adj_t")
    return edges


def edge_index_of(store: Any, name: str) -> NDArray[Any] | None:
    """``edge_index`` of a PyG store, ``[2, edges]``; from ``adj_t`` (torch sparse CSR) if it has that
    instead."""
    import torch

    edge_index = store.get("edge_index")
    if edge_index is not None:
        return _as_array(edge_index, name).view(PygEdges)
    adjacency = store.get("adj_t")
    if adjacency is None:
        return None
    if not isinstance(adjacency, torch.Tensor) or adjacency.layout != torch.sparse_csr:
        raise SourceError(
            f"{name}: adj_t is a {type(adjacency).__name__}; give edge_index, or adj_t as torch sparse CSR"
        )
    # adj_t is the transposed adjacency matrix: its rows are targets, its columns sources.
    indptr, sources = adjacency.crow_indices().numpy(), adjacency.col_indices().numpy()
    targets = np.repeat(np.arange(indptr.size - 1), np.diff(indptr))
    return np.stack([sources, targets]).view(PygEdges)


def _is_hetero(data: Any) -> bool:
    return hasattr(data, "node_types") and hasattr(data, "_global_store")


def node_and_edge_stores(data: Any) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Node and edge stores with the names of their tables; a homogeneous `Data` has a single store, without
    name."""
    if not is_pyg(data):
        raise SourceError(f"a {type(data).__name__} is no PyG Data or HeteroData")
    if not _is_hetero(data):
        return [("", data._store)], [("", data._store)]
    names = {edge_type: "__".join(edge_type) for edge_type in data.edge_types}
    return [(t, data[t]) for t in data.node_types], [(names[e], data[e]) for e in data.edge_types]


def _all_stores(data: Any) -> list[tuple[str, Any]]:
    """Every store once, with the prefix of its arrays."""
    nodes, edges = node_and_edge_stores(data)
    return [("", data._global_store), *nodes, *edges] if _is_hetero(data) else nodes


def _as_array(value: Any, name: str) -> NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    if not hasattr(value, "untyped_storage"):
        raise SourceError(f"{name}: is a {type(value).__name__}, not a tensor; convert it first")
    return tensor_to_numpy(value, name)
