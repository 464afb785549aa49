"""The graph of a pack: CSC of incoming edges, from whatever a user has it in.

What is given, and how it is understood:

- ``.npz`` of `scipy.sparse`: ``A[source, target]``, in csc, csr or coo layout
- ``.npz`` with indptr, indices: CSC of incoming edges already; the sources of v are
  ``indices[indptr[v]:indptr[v + 1]]``
- ``.npz`` with adj_indptr ...: CSR of ``A[source, target]`` (``adj_indptr, adj_indices``;
  ``key`` names another)
- ``.npz``, ``.npy`` with an edge list: ``edge_index``, or the member ``key``: [2, edges] or
  [edges, 2], but not [2, 2]
- ``.csv``, ``.tsv``, ``.txt``, ``.el`` (``.gz``): two integer columns; see `featstore.packing.graphs.edges`
- ``.parquet .arrow .feather``: columns src and dst (source, target ...), or the only two of integers
- a folder of OGB: its ``edge.csv.gz``
- ``.pt``: a tensor [2, edges], or the one under ``key``
- an array, tensor or PyG `Data`: ``edge_index``
- ``(indptr, indices)``: CSC of incoming edges
- a SciPy sparse matrix: ``A[source, target]``

``edge_index[0]`` are sources, ``edge_index[1]`` targets. Values of a matrix are not looked at: a stored zero
is an edge. Nothing is symmetrised, duplicates and self-loops stay. Edge lists become CSC with sources
ascending within each target (`featstore.packing.graphs.build`); what is CSC already keeps its order.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.folders import real_path
from featstore.base.ids import unmasked
from featstore.base.system import is_directory, is_regular
from featstore.errors import SourceError
from featstore.packing.graphs.archives import open_npz
from featstore.packing.graphs.build import Building, EdgeStream
from featstore.packing.graphs.columns import left_out
from featstore.packing.graphs.csc import (
    CHECK_ITEMS,
    CscGraph,
    array_source,
    csc_graph,
    csc_indptr,
    matrix_nodes,
    wrong_nodes,
)
from featstore.packing.graphs.edges import ArrayEdges, ArrowEdges, CsrEdges, NpyEdges, edge_axis
from featstore.packing.graphs.text_edges import TextEdges
from featstore.packing.keys.edges import frame_ends, key_edges
from featstore.packing.keys.translate import Ends
from featstore.packing.sources.arrays import tensor_to_numpy
from featstore.packing.sources.base import file_fingerprint, stat_of
from featstore.packing.sources.frames import is_frame
from featstore.packing.sources.pyg import PygEdges, edges_by_relation, node_and_edge_stores
from featstore.packing.sources.shards import shard_paths
from featstore.packing.sources.tables import ARROW_SUFFIXES
from featstore.packing.sources.text import CsvRows, ogb_folder

__all__ = ["CscGraph", "open_graph"]

TEXT_SUFFIXES = (".csv", ".tsv", ".txt", ".el")


def open_graph(
    spec: Any,
    *,
    nodes: int | None = None,
    memory_bytes: int | None = None,
    scratch_dir: Path | None = None,
    key: str | None = None,
    edge_ids: bool = False,
    source_nodes: int | None = None,
    ends: Ends | None = None,
) -> CscGraph:
    """The graph that ``spec`` describes (see the module's text), validated.

    Args:
        spec: a path, array, tensor, pair, sparse matrix or PyG `Data`.
        nodes: number of nodes, if known (the rows of the features). Edge lists without it end at the greatest
            id.
        memory_bytes: bound on what is allocated here, index pointers included; None: as much as it takes.
        scratch_dir: where indices that take more than their share of it go; the caller removes it after the
            pack.
        key: member of an archive, or ``"source,target"``: columns of Parquet, Arrow or text.
        edge_ids: keep the number of each edge: its place in the list of edges, in ``indices``, or among the
            values of the matrix that ``spec`` is.
        source_nodes: number of nodes that sources are of, where these are others than the ``nodes``, which
            are the targets; then a matrix is ``[source_nodes, nodes]``.
        ends: the keys of its nodes: those at the ends of a list of edges are then keys. Matrices, CSC and
            PyG's edges speak of node ids all the same, which are their places.

    Raises SourceError (unreadable, ids out of range, index pointers that do not ascend, another number of
    nodes), BudgetError, DiskFullError, DeviceError.
    """
    scratch_dir = None if scratch_dir is None else real_path(scratch_dir)
    _refuse_shards(spec)
    building = Building(memory_bytes, scratch_dir, edge_ids, source_nodes, ends)
    if ends is not None and (ends.textual or isinstance(spec, Mapping)):
        kinds = tuple(None if spool is None else spool.kind for spool in (ends.sources, ends.targets))
        found = key_edges(spec, key, (kinds[0], kinds[1]))
        if found is not None:
            return building.keyed(found[0], nodes, found[1])
    if isinstance(spec, (str, os.PathLike)):
        return _open_path(Path(spec), nodes, building, key)
    if is_frame(spec):
        sources, targets = frame_ends(spec, key)
        return building.listed(
            ArrayEdges(sources, targets, "<edges>"), nodes, array_source("frame", sources, targets)
        )
    if key is not None:
        raise SourceError(f"key={key!r} is for files; this is a {type(spec).__name__}")
    if isinstance(spec, tuple):
        if len(spec) != 2:
            raise SourceError(f"a graph as a tuple is (indptr, indices), not {len(spec)} things")
        indptr, indices = (_array_of(part, "graph") for part in spec)
        source = array_source("csc", indptr, indices)
        return csc_graph(indptr, indices, nodes, source, "<indptr, indices>", source_nodes)
    if hasattr(spec, "tocsc") and type(spec).__module__.partition(".")[0] == "scipy":
        return _from_scipy(spec, nodes, building)
    edge_index = _array_of(spec, "edge_index")
    axis = edge_axis(edge_index.shape, "<edge_index>", ends_first=isinstance(edge_index, PygEdges))
    sources, targets = (edge_index[0], edge_index[1]) if axis == 0 else (edge_index[:, 0], edge_index[:, 1])
    stream = ArrayEdges(sources, targets, "<edge_index>")
    source = array_source("edge_index", np.moveaxis(edge_index, axis, 1))
    places = isinstance(edge_index, PygEdges)
    return (building.graph if places else building.listed)(stream, nodes, source)


def _array_of(spec: Any, name: str) -> NDArray[Any]:
    from featstore.packing.sources.pyg import edge_index_of, is_pyg

    if isinstance(spec, np.ndarray):
        return unmasked(spec, name, "edges have no masks; give those that count")
    if is_pyg(spec):
        if hasattr(spec, "edge_types"):
            raise SourceError(
                "a HeteroData has several graphs; name one relation, such as data['paper', 'cites', 'paper']"
            )
        found = edge_index_of(spec._store, name)
        if found is None:
            raise SourceError("the PyG data has neither edge_index nor adj_t; there is no graph in it")
        return found
    if hasattr(spec, "untyped_storage"):
        return tensor_to_numpy(spec, name)
    raise SourceError(
        f"cannot read a graph from a {type(spec).__name__}; give a path, an edge_index [2, edges], "
        "(indptr, indices), a SciPy matrix or a PyG Data"
    )


def _from_scipy(matrix: Any, nodes: int | None, building: Building) -> CscGraph:
    name = "<sparse matrix>"
    rows, nodes = matrix_nodes(matrix.shape, nodes, building.source_nodes, name)
    ordered = matrix.format in ("csc", "csr", "coo")
    if building.edge_ids and not ordered:
        raise SourceError(
            f"{name}: the edges of a matrix in {matrix.format!r} layout have no order that could number "
            "them; give it as csc, csr or coo, or pack without edge ids"
        )
    values = matrix.data if ordered else matrix.tocoo().data
    if any((values[low : low + CHECK_ITEMS] != 1).any() for low in range(0, len(values), CHECK_ITEMS)):
        left_out(name, ["its values"])
    if matrix.format == "csc":
        source = array_source("csc", matrix.indptr, matrix.indices)
        return csc_graph(matrix.indptr, matrix.indices, nodes, source, name, building.source_nodes)
    if matrix.format == "csr":
        indptr = csc_indptr(matrix.indptr, matrix.indices.size, rows, name)
        stream: EdgeStream = CsrEdges(indptr, matrix.indices, name)
        source = array_source("csr", matrix.indptr, matrix.indices)
    else:
        coo = matrix.tocoo()
        stream = ArrayEdges(coo.row, coo.col, name)
        source = array_source("coo", coo.row, coo.col)
    return building.graph(stream, nodes, source)


def _refuse_shards(spec: Any) -> None:
    """Raise SourceError for several files."""
    if (
        isinstance(spec, str | os.PathLike)
        and is_directory(Path(spec))
        and ogb_folder(Path(spec), "edge.csv.gz")
    ):
        return
    paths = shard_paths(spec)
    if paths:
        raise SourceError(
            f"the edges are in {len(paths):,} files, {paths[0]} first: a graph is read from one; put them "
            "into one Parquet, Arrow, .npy or text file, in their order"
        )


def _open_path(path: Path, nodes: int | None, building: Building, key: str | None) -> CscGraph:
    stat_of(path)
    if is_directory(path):
        folder = ogb_folder(path, "edge.csv.gz")
        if folder is None:
            raise SourceError(
                f"{path}: no edge.csv.gz in it or in its raw folder; give the file with the edges"
            )
        if key is not None:
            raise SourceError(
                f"{path}: the edges of an OGB folder have no key; leave it out, or give it by graph"
            )
        return _open_ogb(folder, nodes, building)
    plain = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    suffix = plain.suffix.lower()
    stream: EdgeStream
    if suffix == ".npz":
        return open_npz(path, nodes, building, key)
    if suffix in ARROW_SUFFIXES:
        stream = ArrowEdges(path, key)
    elif suffix == ".pt":
        from featstore.packing.sources.foreign import load_tensor

        tensor, _ = load_tensor(path, key)
        edge_index = tensor_to_numpy(tensor, str(path))
        axis = edge_axis(edge_index.shape, str(path))
        sources, targets = np.moveaxis(edge_index, axis, 0)  # views: the file is mapped
        stream = ArrayEdges(sources, targets, str(path))
    elif suffix in TEXT_SUFFIXES:
        stream = TextEdges(path, key)
    elif key is not None:
        raise SourceError(
            f"{path}: a {suffix or 'plain'} file holds one list of edges, no {key!r}; leave key out"
        )
    elif suffix == ".npy":
        stream = NpyEdges(path)
    else:
        raise SourceError(
            f"{path}: {suffix or 'no suffix'} is no known kind of graph; give .npz, .npy, .csv, .tsv, "
            ".parquet, .arrow or .feather"
        )
    source = file_fingerprint(suffix[1:], path, key=key or "")
    return building.listed(stream, nodes, source)


def _open_ogb(folder: Path, nodes: int | None, building: Building) -> CscGraph:
    counts = folder / "num-node-list.csv.gz"
    if is_regular(counts) and building.source_nodes is None:
        sizes = np.concatenate([block[:, 0].copy() for block in CsvRows(counts, dtype=np.int64).blocks()])
        if sizes.size != 1:
            raise SourceError(
                f"{folder}: holds {sizes.size} graphs, each with ids of its own; a pack takes one graph"
            )
        if nodes is not None and nodes != int(sizes[0]):
            raise wrong_nodes(str(counts), int(sizes[0]), nodes)
        nodes = int(sizes[0])
    path = folder / "edge.csv.gz"
    return building.graph(TextEdges(path), nodes, file_fingerprint("ogb", path))


def pyg_graphs(
    data: Any, *, memory_bytes: int | None = None, scratch_dir: Path | None = None
) -> dict[str, CscGraph]:
    """Graphs by name of the table, or of a `HeteroData` by joined edge type. ``memory_bytes`` None: as much
    memory as it takes."""
    nodes = {kind or "features": store.num_nodes for kind, store in node_and_edge_stores(data)[0]}
    graphs = {}
    for key, edges in edges_by_relation(data, nodes).items():
        source, target = (key[0], key[2]) if isinstance(key, tuple) else (None, key)
        graphs["__".join(key) if isinstance(key, tuple) else key] = open_graph(
            edges, nodes=nodes[target], source_nodes=None if source is None else nodes[source],
            memory_bytes=memory_bytes, scratch_dir=scratch_dir,
        )  # fmt: skip
    return graphs
