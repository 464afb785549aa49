"""PyG's `Data` and `HeteroData` taken apart: tables to pack, graphs to order them by, small arrays to keep beside them.

A homogeneous `Data` gives the table ``features`` (``x``) and, if it has ``edge_attr``, ``edge_features``, whose row e
belongs to column e of ``edge_index``. A `HeteroData` gives a table for each node type, under its name, and one for each
edge type with ``edge_attr``, called ``src__rel__dst``. Tensors are shared, not copied.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.errors import SourceError
from featstore.packing.sources_memory import tensor_to_numpy

if TYPE_CHECKING:
    from featstore.packing.graphs import Graph

__all__ = ["is_pyg", "pyg_arrays", "pyg_graphs", "pyg_tables"]

TAKEN = ("x", "edge_index", "edge_attr", "adj_t")


def is_pyg(data: Any) -> bool:
    """Whether an object is a PyG `Data` or `HeteroData` (without importing PyG)."""
    return any(c.__module__.startswith("torch_geometric.data") for c in type(data).__mro__) and hasattr(data, "stores")


def pyg_tables(data: Any) -> dict[str, NDArray[Any]]:
    """Tables of a `Data` or `HeteroData`: name -> ``[rows, ...]``. Raises SourceError when there is no feature."""
    nodes, edges = _stores(data)
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
    """All else that is an array (``y``, ``train_mask`` ...): ``y``, or ``paper.y`` for the node type ``paper``."""
    nodes, edges = _stores(data)
    arrays = {}
    loose = [("", data._global_store)] if _is_hetero(data) else []
    for kind, store in [*loose, *nodes, *(edges if _is_hetero(data) else [])]:
        for key, value in store.items():
            if key not in TAKEN and (isinstance(value, np.ndarray) or hasattr(value, "untyped_storage")):
                name = f"{kind}.{key}" if kind else key
                arrays[name] = _as_array(value, name)
    return arrays


def pyg_graphs(data: Any, *, memory_bytes: int | None = None, scratch_dir: Path | None = None) -> dict[str, Graph]:
    """Table name -> graph. In a `HeteroData` the relations of a node type with itself are put together.

    Types without such a relation are left out. ``memory_bytes`` None: as much memory as it takes.
    """
    from featstore.packing.graphs import open_graph

    nodes, edges = _stores(data)
    graphs = {}
    for kind, store in nodes:
        if _is_hetero(data):
            own = [s for (_, s), (source, _, target) in zip(edges, data.edge_types) if source == target == kind]
        else:
            own = [store]
        parts = [edge_index_of(s, f"{kind or 'data'}.edge_index") for s in own]
        found = [part for part in parts if part is not None]
        if not found:
            continue
        edge_index = found[0] if len(found) == 1 else np.concatenate(found, axis=1)
        count = store.num_nodes
        graphs[kind or "features"] = open_graph(
            edge_index, nodes=None if count is None else int(count), memory_bytes=memory_bytes, scratch_dir=scratch_dir
        )
    return graphs


def edge_index_of(store: Any, name: str) -> NDArray[Any] | None:
    """``edge_index`` of a PyG store, ``[2, edges]``; from ``adj_t`` (torch sparse CSR) if it has that instead."""
    import torch

    edge_index = store.get("edge_index")
    if edge_index is not None:
        return _as_array(edge_index, name)
    adjacency = store.get("adj_t")
    if adjacency is None:
        return None
    if not isinstance(adjacency, torch.Tensor) or adjacency.layout != torch.sparse_csr:
        raise SourceError(
            f"{name}: adj_t is a {type(adjacency).__name__}; give edge_index, or adj_t as torch sparse CSR"
        )
    # adj_t is the transposed adjacency matrix: its rows are targets, its columns sources.
    indptr, sources = adjacency.crow_indices().numpy(), adjacency.col_indices().numpy()
    return np.stack([sources, np.repeat(np.arange(indptr.size - 1), np.diff(indptr))])


def _is_hetero(data: Any) -> bool:
    return hasattr(data, "node_types") and hasattr(data, "_global_store")


def _stores(data: Any) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Node and edge stores with the names of their tables; a homogeneous `Data` has a single store, without name."""
    if not is_pyg(data):
        raise SourceError(f"a {type(data).__name__} is no PyG Data or HeteroData")
    if not _is_hetero(data):
        return [("", data._store)], [("", data._store)]
    names = {edge_type: "__".join(edge_type) for edge_type in data.edge_types}
    return [(t, data[t]) for t in data.node_types], [(names[e], data[e]) for e in data.edge_types]


def _as_array(value: Any, name: str) -> NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    if not hasattr(value, "untyped_storage"):
        raise SourceError(f"{name}: is a {type(value).__name__}, not a tensor; convert it first")
    return tensor_to_numpy(value, name)
