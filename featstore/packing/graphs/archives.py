"""Graphs in `.npz` archives: CSC and CSR arrays, lists of edges, SciPy matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from featstore.base.files import map_values
from featstore.errors import BudgetError, SourceError
from featstore.packing.graphs.build import Building, EdgeStream, ScratchFile
from featstore.packing.graphs.columns import left_out
from featstore.packing.graphs.csc import (
    CHECK_ITEMS,
    CscGraph,
    csc_graph,
    csc_indptr,
    index_dtype,
    matrix_nodes,
    wrong_nodes,
)
from featstore.packing.graphs.edges import CsrEdges, NpzEdges, require_integers
from featstore.packing.sources.base import file_fingerprint
from featstore.packing.sources.npz import MemberReader, member_headers, member_names, read_member


def open_npz(path: Path, nodes: int | None, building: Building, key: str | None) -> CscGraph:
    keys = set(member_names(path))
    stream: EdgeStream
    memory_bytes = building.memory_bytes
    source = file_fingerprint("npz", path, key=key or "")
    if key is None:
        left_out(str(path), _of_edges(path, nodes))
    left_out(str(path), _values_beside(path, keys, key))
    if key is None and {"format", "shape"} <= keys:
        layout = read_member(path, "format").tobytes().replace(b"\0", b"").decode("ascii", "replace")
        shape = tuple(int(n) for n in read_member(path, "shape").reshape(-1))
        rows, nodes = matrix_nodes(shape, nodes, building.source_nodes, str(path))
        if layout == "csc":
            return _csc_npz(path, "", nodes, building, source)
        if layout not in ("csr", "coo"):
            raise SourceError(f"{path}: a sparse matrix in {layout!r} layout; save it as csc, csr or coo")
        stream = NpzEdges(path, ("row", "col")) if layout == "coo" else _csr_npz(path, "", rows, memory_bytes)
    elif key is None and {"indptr", "indices"} <= keys:
        return _csc_npz(path, "", nodes, building, source)
    elif key is not None and key in keys:
        return building.listed(NpzEdges(path, (key,)), nodes, source)
    elif key is None and "edge_index" in keys:
        return building.listed(NpzEdges(path, ("edge_index",)), nodes, source)
    elif {f"{key or 'adj'}_indptr", f"{key or 'adj'}_indices"} <= keys:
        rows_of = nodes if building.source_nodes is None else building.source_nodes
        matrix = _csr_npz(path, f"{key or 'adj'}_", rows_of, memory_bytes)
        stream, nodes = matrix, matrix.nodes if building.source_nodes is None else nodes
    else:
        raise SourceError(
            f"{path}: no graph {key or ''} in it (indptr and indices, edge_index, adj_indptr, or a "
            f"SciPy matrix); give key=, one of: {', '.join(sorted(keys))}"
        )
    return building.graph(stream, nodes, source)


def _of_edges(path: Path, nodes: int | None) -> list[str]:
    """Members that are data of edges: by their name, or because they have a row for each edge, and not for
    each node."""
    headers = {name: one for name, one in member_headers(path).items() if not isinstance(one, SourceError)}
    ends = next((one for one in ("edge_index", "indices", "row", "adj_indices") if one in headers), None)
    own = {"edge_index", "indptr", "indices", "row", "col", "data", "format", "shape"}
    edges = None if ends is None else max(headers[ends].shape, default=0)
    return sorted(
        name for name, header in headers.items()
        if name not in own and not name.startswith("adj_")
        and (name.startswith("edge_") or (edges not in (None, 0, nodes) and header.shape[:1] == (edges,)))
    )  # fmt: skip


def _values_beside(path: Path, keys: set[str], key: str | None) -> list[str]:
    """The values of the sparse matrix that is taken, where it has others than 1."""
    prefix = "" if key is None and {"indptr", "indices"} <= keys else f"{key or 'adj'}_"
    if key is None and {"format", "shape"} <= keys:
        prefix = ""
    has = f"{prefix}data" in keys and (f"{prefix}indices" in keys or {"format", "row"} <= keys)
    return [f"{prefix}data (its values)"] if has and _has_values(path, f"{prefix}data") else []


def _has_values(path: Path, member: str) -> bool:
    """Whether a sparse matrix in an archive has other values than 1."""
    with MemberReader(path, member) as reader:
        left = reader.header.values
        while left:
            count = min(CHECK_ITEMS, left)
            if (reader.read(count) != 1).any():
                return True
            left -= count
    return False


def _csr_npz(path: Path, prefix: str, nodes: int | None, memory_bytes: int | None) -> CsrEdges:
    indptr, edges = _indptr_npz(path, prefix, nodes, memory_bytes, copies=3)
    with MemberReader(path, prefix + "indices") as reader:
        require_integers(reader.header.dtype, reader.name)
    checked = csc_indptr(indptr, edges, nodes, str(path))
    return CsrEdges(checked, (path, prefix + "indices"), str(path))


def _csc_npz(
    path: Path, prefix: str, nodes: int | None, building: Building, source: dict[str, str | int]
) -> CscGraph:
    """CSC members of an archive; indices that are larger than a quarter of the memory go to a scratch
    file."""
    memory_bytes, scratch_dir = building.memory_bytes, building.scratch_dir
    indptr, _ = _indptr_npz(path, prefix, nodes, memory_bytes, copies=2)
    with MemberReader(path, prefix + "indices") as reader:
        head = reader.header
        require_integers(head.dtype, reader.name)
        if memory_bytes is None or head.data_bytes <= memory_bytes // 4:
            indices = reader.read(head.values)
        elif scratch_dir is None:
            raise BudgetError(
                4 * head.data_bytes,
                memory_bytes,
                "hold the graph in memory; give scratch_dir to hold it on disk",
            )
        else:
            dtype = index_dtype(head.dtype)
            with ScratchFile(scratch_dir, "graph-indices-", keep=True) as file:
                for low in range(0, head.values, CHECK_ITEMS):
                    file.write(reader.read(min(CHECK_ITEMS, head.values - low)).astype(dtype))
            indices = map_values(file.path, dtype, head.values)
    return csc_graph(indptr, indices, nodes, source, str(path), building.source_nodes)


def _indptr_npz(
    path: Path, prefix: str, nodes: int | None, memory_bytes: int | None, copies: int
) -> tuple[NDArray[Any], int]:
    """Index pointers, read whole, and the number of indices. BudgetError when they alone are too much."""
    with MemberReader(path, prefix + "indptr") as reader, MemberReader(path, prefix + "indices") as indices:
        needed = copies * 8 * reader.header.values
        if memory_bytes is not None and needed > memory_bytes:
            raise BudgetError(needed, memory_bytes, "hold the index pointers of the graph")
        if nodes is not None and reader.header.values != nodes + 1:
            raise wrong_nodes(str(path), reader.header.values - 1, nodes)
        return reader.read(reader.header.values), indices.header.values
