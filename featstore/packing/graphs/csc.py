"""A graph as CSC arrays, by target, and what must hold of them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.errors import ArgumentError, SourceError
from featstore.packing.graphs.edges import require_integers
from featstore.packing.sources.base import dtype_text, sample_crc32

CHECK_ITEMS = 1 << 20
NO_IDS = np.empty(0, np.int64)

#: Gives the ids of edges ``low`` to ``high``.
EdgeIds = Callable[[int, int], NDArray[Any]]


def numbers_between(low: int, high: int) -> NDArray[np.int64]:
    """Ids of edges that are numbered as they come."""
    return np.arange(low, high)


class AsGiven:
    """Of edges: they are numbered by their places."""


AS_GIVEN = AsGiven()


@dataclass(frozen=True)
class CscGraph:
    """CSC of incoming edges: the sources of v's in-edges are ``indices[indptr[v]:indptr[v + 1]]``.

    Attributes:
        indptr: int64 ``[nodes + 1]``, in memory.
        indices: int32 or int64 ``[edges]``, in memory, or a read-only `np.memmap` of a scratch file: read it
            in order, and bring it into memory for anything else.
        source: what identifies the graph when a killed pack resumes.
        edge_ids: the numbers that the user knows the edges by, int32 or int64 ``[edges]``, as ``indices``
            are; `AS_GIVEN` where they are places in ``indices``; None where nobody knows them.
        other_nodes: how many nodes the sources are of, where they are others than the targets.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32] | NDArray[np.int64]
    source: dict[str, str | int]
    edge_ids: NDArray[Any] | AsGiven | None = None
    other_nodes: int | None = None

    @property
    def nodes(self) -> int:
        """Number of nodes that have lists: the targets."""
        return self.indptr.size - 1

    @property
    def source_nodes(self) -> int:
        """Number of nodes that sources are of."""
        return self.nodes if self.other_nodes is None else self.other_nodes

    @property
    def edges(self) -> int:
        """Number of edges."""
        return int(self.indices.size)

    @property
    def held_bytes(self) -> int:
        """Memory of its arrays."""
        held = (a for a in (self.indptr, self.indices, self.edge_ids) if isinstance(a, np.ndarray))
        return sum(a.nbytes for a in held if not isinstance(a, np.memmap))

    def ids_between(self, low: int, high: int) -> NDArray[Any]:
        """Ids of edges ``low`` to ``high``. Pages of a mapped file before them are given back."""
        if isinstance(self.edge_ids, AsGiven):
            return numbers_between(low, high)
        assert self.edge_ids is not None
        release_pages(self.edge_ids, max(0, low - CHECK_ITEMS), low)
        return self.edge_ids[low:high]

    def blocks(
        self, block_edges: int
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int32] | NDArray[np.int64]]]:
        """Runs of whole nodes in order: first node, index pointers of the run (from 0), and its indices.

        A run has at most ``block_edges`` edges and at most ``block_edges`` nodes, but at least one node: a
        node with more edges comes alone. Pages of a mapped file are given back when the next run is asked
        for.
        """
        if block_edges < 1:
            raise ArgumentError(f"block_edges must be at least 1, not {block_edges}")
        node = 0
        while node < self.nodes:
            limit = int(self.indptr[node]) + block_edges
            ahead = self.indptr[node + 1 : node + 1 + block_edges]
            end = node + max(1, int(np.searchsorted(ahead, limit, side="right")))
            low, high = int(self.indptr[node]), int(self.indptr[end])
            run: NDArray[Any] = np.asarray(self.indices[low:high])
            yield node, self.indptr[node : end + 1] - low, run
            release_pages(self.indices, low, high)
            node = end


def release_pages(array: NDArray[Any], low: int, high: int) -> None:
    """Give back the pages of ``array[low:high]``, if it is a read-only mapping of a file: they count as
    resident."""
    mapped = getattr(array, "_mmap", None)
    if not isinstance(array, np.memmap) or mapped is None or array.mode != "r" or array.offset or high <= low:
        return

    page = mmap.PAGESIZE
    first, end = low * array.itemsize // page * page, high * array.itemsize
    mapped.madvise(mmap.MADV_DONTNEED, first, min(end, len(mapped)) - first)


def array_source(kind: str, *arrays: NDArray[Any]) -> dict[str, str | int]:
    """Fingerprint of arrays in memory: shapes, dtypes, and a CRC of some of their values."""
    crc = 0
    for array in arrays:
        crc = (crc * 31 + sample_crc32(array)) & 0xFFFFFFFF
    shape = " ".join(",".join(map(str, array.shape)) for array in arrays)
    return {"kind": kind, "shape": shape, "dtype": dtype_text(arrays[-1].dtype), "sample_crc32": crc}


def index_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """int32 for what is int32 or narrower, int64 for all else."""
    return np.dtype(np.int32 if np.can_cast(dtype, np.int32) else np.int64)


def csc_graph(
    indptr: NDArray[Any], indices: NDArray[Any], nodes: int | None, source: dict[str, str | int], name: str,
    source_nodes: int | None = None,
) -> CscGraph:  # fmt: skip
    require_integers(indices.dtype, name)
    if indices.ndim != 1:
        raise SourceError(f"{name}: indices have shape {indices.shape}; one dimension is needed")
    checked = csc_indptr(indptr, indices.size, nodes, name)
    wanted = index_dtype(indices.dtype)
    held: NDArray[Any] = indices if indices.dtype == wanted else indices.astype(wanted)
    end = checked.size - 1 if source_nodes is None else source_nodes
    for low in range(0, held.size, CHECK_ITEMS):
        part = np.asarray(held[low : low + CHECK_ITEMS])
        if int(part.min()) < 0 or int(part.max()) >= end:
            place = low + int(np.flatnonzero((part < 0) | (part >= end))[0])
            target = int(np.searchsorted(checked, place, side="right")) - 1
            raise SourceError(
                f"{name}: edge {place:,} goes from node {int(held[place])} to {target}, but node ids are "
                f"{ids_text(checked.size - 1, source_nodes)}; check that features and graph belong together"
            )
        release_pages(held, low, low + part.size)
    return CscGraph(checked, held, source, AS_GIVEN, source_nodes)


def ids_text(nodes: int, source_nodes: int | None) -> str:
    """Which ids there are, for messages."""
    if source_nodes is None:
        return f"0 to {nodes - 1}"
    return f"0 to {source_nodes - 1} of sources and 0 to {nodes - 1} of targets"


def csc_indptr(indptr: NDArray[Any], edges: int, nodes: int | None, name: str) -> NDArray[np.int64]:
    """Index pointers as int64, found to start at 0, to ascend, and to end at the number of edges."""
    require_integers(indptr.dtype, name)
    if indptr.ndim != 1 or indptr.size == 0:
        raise SourceError(f"{name}: index pointers have shape {indptr.shape}; [nodes + 1] is needed")
    if nodes is not None and indptr.size != nodes + 1:
        raise wrong_nodes(name, indptr.size - 1, nodes)
    checked = np.ascontiguousarray(indptr, dtype=np.int64)
    if int(checked[0]) != 0:
        raise SourceError(f"{name}: index pointers start at {int(checked[0])}, not at 0")
    for low in range(0, checked.size - 1, CHECK_ITEMS):
        run = checked[low : low + CHECK_ITEMS + 1]
        falls = np.flatnonzero(run[1:] < run[:-1])  # a difference might wrap around
        if falls.size:
            raise SourceError(
                f"{name}: index pointers fall after node {low + int(falls[0]):,}; they must ascend"
            )
    if int(checked[-1]) != edges:
        raise SourceError(
            f"{name}: index pointers end at {int(checked[-1]):,}, but there are {edges:,} indices"
        )
    return checked


def matrix_nodes(
    shape: tuple[int, ...], nodes: int | None, source_nodes: int | None, name: str
) -> tuple[int, int]:
    """(sources, targets): the sides of an adjacency matrix, which are those that are wanted. Both are the
    nodes of one table unless ``source_nodes`` is given."""
    if source_nodes is not None:
        if tuple(shape) != (source_nodes, nodes):
            raise SourceError(
                f"{name}: an adjacency matrix [sources, targets] of {source_nodes:,} and {nodes:,} nodes is "
                f"needed, not {shape}"
            )
        return source_nodes, int(shape[1])
    if len(shape) != 2 or shape[0] != shape[1]:
        raise SourceError(
            f"{name}: an adjacency matrix is square, not {shape}; both sides are the nodes of one table"
        )
    if nodes is not None and nodes != shape[0]:
        raise wrong_nodes(name, int(shape[0]), nodes)
    return int(shape[0]), int(shape[0])


def wrong_nodes(name: str, found: int, wanted: int) -> SourceError:
    return SourceError(
        f"{name}: a graph of {found:,} nodes, but the features have {wanted:,} rows; they must be the "
        "same nodes"
    )
