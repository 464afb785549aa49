"""The graph of a pack: CSC of incoming edges, from whatever a user has it in.

===============================  ================================================================================
what is given                    how it is understood
===============================  ================================================================================
``.npz`` of `scipy.sparse`       ``A[source, target]``, in csc, csr or coo layout
``.npz`` with indptr, indices    CSC of incoming edges already: the sources of v are indices[indptr[v]:indptr[v+1]]
``.npz`` with adj_indptr ...     CSR of ``A[source, target]`` (``adj_indptr, adj_indices``; ``key`` names another)
``.npz``, ``.npy`` edge list     ``edge_index``, or the member ``key``: [2, edges] or [edges, 2]; 2 x 2 is [2, edges]
``.csv .tsv .txt .el`` (.gz)     two integer columns; see `featstore.packing.graphs_edges`
``.parquet``                     columns src and dst (source, target ...), or the first two of integers
folder of OGB                    its ``edge.csv.gz``
``.pt``                          a tensor [2, edges], or the one under ``key``
array, tensor, PyG `Data`        ``edge_index``
``(indptr, indices)``            CSC of incoming edges
SciPy sparse matrix              ``A[source, target]``
===============================  ================================================================================

``edge_index[0]`` are sources, ``edge_index[1]`` targets. Values of a matrix are not looked at: a stored zero is an
edge. Nothing is symmetrised, duplicates and self-loops stay. Edge lists become CSC with sources ascending within each
target (`featstore.packing.graphs_build`); what is CSC already keeps its order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.errors import BudgetError, SourceError
from featstore.packing.graphs_build import EdgeStream, ScratchFile, build_csc
from featstore.packing.graphs_edges import (
    ArrayEdges,
    CsrEdges,
    NpyEdges,
    NpzEdges,
    ParquetEdges,
    TextEdges,
    edge_axis,
    require_integers,
)
from featstore.packing.sources_base import dtype_text, file_fingerprint, sample_crc32, stat_of
from featstore.packing.sources_memory import tensor_to_numpy
from featstore.packing.sources_npz import MemberReader, member_names, read_member
from featstore.packing.sources_text import CsvRows, ogb_folder

__all__ = ["Graph", "open_graph"]

CHECK_ITEMS = 1 << 20
TEXT_SUFFIXES = (".csv", ".tsv", ".txt", ".el")


@dataclass(frozen=True)
class Graph:
    """CSC of incoming edges: the sources of v's in-edges are ``indices[indptr[v]:indptr[v + 1]]``.

    Attributes:
        indptr: int64 ``[nodes + 1]``, in memory.
        indices: int32 or int64 ``[edges]``, in memory, or a read-only `np.memmap` of a scratch file: read it in order.
        source: what identifies the graph when a killed pack resumes.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32] | NDArray[np.int64]
    source: dict[str, str | int]

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.indptr.size - 1

    @property
    def edges(self) -> int:
        """Number of edges."""
        return int(self.indices.size)

    def blocks(
        self, block_edges: int
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int32] | NDArray[np.int64]]]:
        """Runs of whole nodes in order: first node, index pointers of the run (from 0), and its indices.

        A run has at most ``block_edges`` edges and at most ``block_edges`` nodes, but at least one node: a node with
        more edges comes alone. Pages of a mapped file are given back when the next run is asked for.
        """
        if block_edges < 1:
            raise ValueError(f"block_edges must be at least 1, not {block_edges}")
        node = 0
        while node < self.nodes:
            limit = int(self.indptr[node]) + block_edges
            ahead = self.indptr[node + 1 : node + 1 + block_edges]
            end = node + max(1, int(np.searchsorted(ahead, limit, side="right")))
            low, high = int(self.indptr[node]), int(self.indptr[end])
            run: NDArray[Any] = np.asarray(self.indices[low:high])
            yield node, self.indptr[node : end + 1] - low, run
            release(self.indices, low, high)
            node = end


def release(array: NDArray[Any], low: int, high: int) -> None:
    """Give back the pages of ``array[low:high]``, if it is a read-only mapping of a file: they count as resident."""
    mapped = getattr(array, "_mmap", None)
    if not isinstance(array, np.memmap) or mapped is None or array.mode != "r" or array.offset or high <= low:
        return
    import mmap

    page = mmap.PAGESIZE
    first, end = low * array.itemsize // page * page, high * array.itemsize
    mapped.madvise(mmap.MADV_DONTNEED, first, min(end, len(mapped)) - first)


def open_graph(
    spec: Any,
    *,
    nodes: int | None = None,
    memory_bytes: int | None = None,
    scratch_dir: Path | None = None,
    key: str | None = None,
) -> Graph:
    """The graph that ``spec`` describes (see the module's table), validated.

    Args:
        spec: a path, array, tensor, pair, sparse matrix or PyG `Data`.
        nodes: number of nodes, if known (the rows of the features). Edge lists without it end at the greatest id.
        memory_bytes: bound on what is allocated here, index pointers included; None: as much as it takes.
        scratch_dir: where indices that take more than their share of it go; the caller removes it after the pack.
        key: member of an archive, or ``"source,target"`` columns of a Parquet file.

    Raises SourceError (unreadable, ids out of range, index pointers that do not ascend, another number of nodes),
    BudgetError, DiskFullError, DeviceError.
    """
    if isinstance(spec, (str, os.PathLike)):
        return _open_path(Path(spec), nodes, memory_bytes, scratch_dir, key)
    if key is not None:
        raise SourceError(f"key={key!r} is for files; this is a {type(spec).__name__}")
    if isinstance(spec, tuple):
        if len(spec) != 2:
            raise SourceError(f"a graph as a tuple is (indptr, indices), not {len(spec)} things")
        indptr, indices = (part if isinstance(part, np.ndarray) else _array_of(part, "graph") for part in spec)
        return _csc(indptr, indices, nodes, array_source("csc", indptr, indices), "<indptr, indices>")
    if hasattr(spec, "tocsc") and type(spec).__module__.partition(".")[0] == "scipy":
        return _from_scipy(spec, nodes, memory_bytes, scratch_dir)
    edge_index = _array_of(spec, "edge_index")
    axis = edge_axis(edge_index.shape, "<edge_index>")
    sources, targets = (edge_index[0], edge_index[1]) if axis == 0 else (edge_index[:, 0], edge_index[:, 1])
    stream = ArrayEdges(sources, targets, "<edge_index>")
    source = array_source("edge_index", np.moveaxis(edge_index, axis, 1))
    return Graph(*build_csc(stream, nodes, memory_bytes, scratch_dir), source)


def _array_of(spec: Any, name: str) -> NDArray[Any]:
    from featstore.packing.sources_pyg import edge_index_of, is_pyg

    if isinstance(spec, np.ndarray):
        return spec
    if is_pyg(spec):
        if hasattr(spec, "edge_types"):
            raise SourceError("a HeteroData has several graphs; take one of featstore.packing.sources.pyg_graphs(data)")
        found = edge_index_of(spec._store, name)
        if found is None:
            raise SourceError("the PyG data has neither edge_index nor adj_t; there is no graph in it")
        return found
    if hasattr(spec, "untyped_storage"):
        return tensor_to_numpy(spec, name)
    raise SourceError(
        f"cannot read a graph from a {type(spec).__name__}; give a path, an edge_index [2, edges], (indptr, indices), "
        "a "
        "SciPy matrix or a PyG Data"
    )


def array_source(kind: str, *arrays: NDArray[Any]) -> dict[str, str | int]:
    """Fingerprint of arrays in memory: shapes, dtypes, and a CRC of some of their values."""
    crc = 0
    for array in arrays:
        crc = (crc * 31 + sample_crc32(array)) & 0xFFFFFFFF
    shape = " ".join(",".join(map(str, array.shape)) for array in arrays)
    return {"kind": kind, "shape": shape, "dtype": dtype_text(arrays[-1].dtype), "sample_crc32": crc}


def _from_scipy(matrix: Any, nodes: int | None, memory_bytes: int | None, scratch_dir: Path | None) -> Graph:
    name = "<sparse matrix>"
    size = _square(matrix.shape, name)
    if nodes is not None and nodes != size:
        raise _wrong_nodes(name, size, nodes)
    if matrix.format == "csc":
        return _csc(matrix.indptr, matrix.indices, size, array_source("csc", matrix.indptr, matrix.indices), name)
    if matrix.format == "csr":
        indptr = _checked_indptr(matrix.indptr, matrix.indices.size, size, name)
        stream: EdgeStream = CsrEdges(indptr, matrix.indices, name)
        source = array_source("csr", matrix.indptr, matrix.indices)
    else:
        coo = matrix.tocoo()
        stream = ArrayEdges(coo.row, coo.col, name)
        source = array_source("coo", coo.row, coo.col)
    return Graph(*build_csc(stream, size, memory_bytes, scratch_dir), source)


def _open_path(
    path: Path, nodes: int | None, memory_bytes: int | None, scratch_dir: Path | None, key: str | None
) -> Graph:
    stat_of(path)
    if path.is_dir():
        folder = ogb_folder(path, "edge.csv.gz")
        if folder is None:
            raise SourceError(f"{path}: no edge.csv.gz in it or in its raw folder; give the file with the edges")
        return _open_ogb(folder, nodes, memory_bytes, scratch_dir)
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    suffix = plain.suffix.lower()
    stream: EdgeStream
    if suffix == ".npz":
        return _open_npz(path, nodes, memory_bytes, scratch_dir, key)
    if suffix == ".parquet":
        stream = ParquetEdges(path, key)
    elif suffix == ".pt":
        from featstore.packing.sources_foreign import load_tensor

        tensor, _ = load_tensor(path, key)
        edge_index = tensor_to_numpy(tensor, str(path))
        axis = edge_axis(edge_index.shape, str(path))
        stream = ArrayEdges(edge_index.take(0, axis), edge_index.take(1, axis), str(path))
    elif key is not None:
        raise SourceError(f"{path}: a {suffix or 'plain'} file holds one list of edges, no {key!r}; leave key out")
    elif suffix == ".npy":
        stream = NpyEdges(path)
    elif suffix in TEXT_SUFFIXES:
        stream = TextEdges(path)
    else:
        raise SourceError(
            f"{path}: {suffix or 'no suffix'} is no known kind of graph; give .npz, .npy, .csv, .tsv or .parquet"
        )
    source = file_fingerprint(suffix[1:], path, key=key or "")
    return Graph(*build_csc(stream, nodes, memory_bytes, scratch_dir), source)


def _open_ogb(folder: Path, nodes: int | None, memory_bytes: int | None, scratch_dir: Path | None) -> Graph:
    counts = folder / "num-node-list.csv.gz"
    if counts.is_file():
        sizes = np.concatenate([block[:, 0].copy() for block in CsvRows(counts, dtype=np.int64).blocks()])
        if sizes.size != 1:
            raise SourceError(f"{folder}: holds {sizes.size} graphs, each with ids of its own; a pack takes one graph")
        if nodes is not None and nodes != int(sizes[0]):
            raise _wrong_nodes(str(counts), int(sizes[0]), nodes)
        nodes = int(sizes[0])
    path = folder / "edge.csv.gz"
    return Graph(*build_csc(TextEdges(path), nodes, memory_bytes, scratch_dir), file_fingerprint("ogb", path))


def _open_npz(
    path: Path, nodes: int | None, memory_bytes: int | None, scratch_dir: Path | None, key: str | None
) -> Graph:
    keys = set(member_names(path))
    stream: EdgeStream
    source = file_fingerprint("npz", path, key=key or "")
    if key is None and {"format", "shape"} <= keys:
        layout = read_member(path, "format").tobytes().replace(b"\0", b"").decode("ascii", "replace")
        size = _square(tuple(int(n) for n in read_member(path, "shape").reshape(-1)), str(path))
        if nodes is not None and nodes != size:
            raise _wrong_nodes(str(path), size, nodes)
        if layout == "csc":
            return _csc_npz(path, "", size, memory_bytes, scratch_dir, source)
        if layout not in ("csr", "coo"):
            raise SourceError(f"{path}: a sparse matrix in {layout!r} layout; save it as csc, csr or coo")
        nodes = size
        stream = NpzEdges(path, ("row", "col")) if layout == "coo" else _csr_npz(path, "", nodes, memory_bytes)
    elif key is None and {"indptr", "indices"} <= keys:
        return _csc_npz(path, "", nodes, memory_bytes, scratch_dir, source)
    elif key is not None and key in keys:
        stream = NpzEdges(path, (key,))
    elif key is None and "edge_index" in keys:
        stream = NpzEdges(path, ("edge_index",))
    elif {f"{key or 'adj'}_indptr", f"{key or 'adj'}_indices"} <= keys:
        matrix = _csr_npz(path, f"{key or 'adj'}_", nodes, memory_bytes)
        stream, nodes = matrix, matrix.nodes
    else:
        raise SourceError(
            f"{path}: no graph {key or ''} in it (indptr and indices, edge_index, adj_indptr, or a SciPy matrix); give "
            "key=, "
            f"one of: {', '.join(sorted(keys))}"
        )
    return Graph(*build_csc(stream, nodes, memory_bytes, scratch_dir), source)


def _csr_npz(path: Path, prefix: str, nodes: int | None, memory_bytes: int | None) -> CsrEdges:
    indptr, edges = _indptr_npz(path, prefix, nodes, memory_bytes, copies=3)
    with MemberReader(path, prefix + "indices") as reader:
        require_integers(reader.header.dtype, reader.name)
    checked = _checked_indptr(indptr, edges, nodes, str(path))
    return CsrEdges(checked, (path, prefix + "indices"), str(path))


def _csc_npz(
    path: Path,
    prefix: str,
    nodes: int | None,
    memory_bytes: int | None,
    scratch_dir: Path | None,
    source: dict[str, str | int],
) -> Graph:
    """CSC members of an archive; indices that are larger than a quarter of the memory go to a scratch file."""
    indptr, _ = _indptr_npz(path, prefix, nodes, memory_bytes, copies=2)
    with MemberReader(path, prefix + "indices") as reader:
        head = reader.header
        require_integers(head.dtype, reader.name)
        if memory_bytes is None or head.data_bytes <= memory_bytes // 4:
            indices = reader.read(head.values)
        elif scratch_dir is None:
            raise BudgetError(
                4 * head.data_bytes, memory_bytes, "hold the graph in memory; give scratch_dir to hold it on disk"
            )
        else:
            dtype = index_dtype(head.dtype)
            with ScratchFile(scratch_dir, "graph-indices-", keep=True) as file:
                for low in range(0, head.values, CHECK_ITEMS):
                    file.write(reader.read(min(CHECK_ITEMS, head.values - low)).astype(dtype))
            indices = np.memmap(file.path, dtype=dtype, mode="r", shape=(head.values,))
    return _csc(indptr, indices, nodes, source, str(path))


def _indptr_npz(
    path: Path, prefix: str, nodes: int | None, memory_bytes: int | None, copies: int
) -> tuple[NDArray[Any], int]:
    """Index pointers, read whole, and the number of indices. BudgetError when they alone are too much."""
    with MemberReader(path, prefix + "indptr") as reader, MemberReader(path, prefix + "indices") as indices:
        needed = copies * 8 * reader.header.values
        if memory_bytes is not None and needed > memory_bytes:
            raise BudgetError(needed, memory_bytes, "hold the index pointers of the graph")
        if nodes is not None and reader.header.values != nodes + 1:
            raise _wrong_nodes(str(path), reader.header.values - 1, nodes)
        return reader.read(reader.header.values), indices.header.values


def index_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """int32 for what is int32 or narrower, int64 for all else."""
    return np.dtype(np.int32 if np.can_cast(dtype, np.int32) else np.int64)


def _csc(
    indptr: NDArray[Any], indices: NDArray[Any], nodes: int | None, source: dict[str, str | int], name: str
) -> Graph:
    require_integers(indices.dtype, name)
    if indices.ndim != 1:
        raise SourceError(f"{name}: indices have shape {indices.shape}; one dimension is needed")
    checked = _checked_indptr(indptr, indices.size, nodes, name)
    wanted = index_dtype(indices.dtype)
    held: NDArray[Any] = indices if indices.dtype == wanted else indices.astype(wanted)
    for low in range(0, held.size, CHECK_ITEMS):
        part = np.asarray(held[low : low + CHECK_ITEMS])
        if int(part.min()) < 0 or int(part.max()) >= checked.size - 1:
            place = low + int(np.flatnonzero((part < 0) | (part >= checked.size - 1))[0])
            target = int(np.searchsorted(checked, place, side="right")) - 1
            raise SourceError(
                f"{name}: edge {place:,} goes from node {int(held[place])} to {target}, but node ids are "
                f"0 to {checked.size - 2}; check that features and graph belong together"
            )
        release(held, low, low + part.size)
    return Graph(checked, held, source)


def _checked_indptr(indptr: NDArray[Any], edges: int, nodes: int | None, name: str) -> NDArray[np.int64]:
    """Index pointers as int64, found to start at 0, to ascend, and to end at the number of edges."""
    require_integers(indptr.dtype, name)
    if indptr.ndim != 1 or indptr.size == 0:
        raise SourceError(f"{name}: index pointers have shape {indptr.shape}; [nodes + 1] is needed")
    if nodes is not None and indptr.size != nodes + 1:
        raise _wrong_nodes(name, indptr.size - 1, nodes)
    checked = np.ascontiguousarray(indptr, dtype=np.int64)
    if int(checked[0]) != 0:
        raise SourceError(f"{name}: index pointers start at {int(checked[0])}, not at 0")
    for low in range(0, checked.size - 1, CHECK_ITEMS):
        falls = np.flatnonzero(np.diff(checked[low : low + CHECK_ITEMS + 1]) < 0)
        if falls.size:
            raise SourceError(f"{name}: index pointers fall after node {low + int(falls[0]):,}; they must ascend")
    if int(checked[-1]) != edges:
        raise SourceError(f"{name}: index pointers end at {int(checked[-1]):,}, but there are {edges:,} indices")
    return checked


def _square(shape: tuple[int, ...], name: str) -> int:
    if len(shape) != 2 or shape[0] != shape[1]:
        raise SourceError(f"{name}: an adjacency matrix is square, not {shape}; both sides are the nodes of one table")
    return int(shape[0])


def _wrong_nodes(name: str, found: int, wanted: int) -> SourceError:
    return SourceError(
        f"{name}: a graph of {found:,} nodes, but the features have {wanted:,} rows; they must be the same nodes"
    )
