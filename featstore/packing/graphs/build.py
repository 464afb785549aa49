"""From a stream of edges to CSC: in memory when it fits, by way of buckets on disk when it does not.

Both ways begin with one pass that counts in-degrees, so every edge's place is known to within its target
before any edge is stored. In memory a second pass puts each source where its target's run stands, and each
run is sorted. Out of core the nodes are cut into ranges whose edges fit into memory (a distribution sort, as
in the partitioning step of GraphChi's sharder); since the counts are known, the ranges' regions in one
scratch file are exact, and no range can turn out too large however skewed the degrees are. The second pass
appends each edge to its range's region; then one range after another is read, placed, sorted and appended to
the file of indices, which is mapped read-only at the end.

The two give the same result, bit by bit: sources ascend within each target, duplicates and self-loops stay.
"""

from __future__ import annotations

import bisect
import itertools
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.files import map_values
from featstore.base.system import asking, refusal
from featstore.errors import BudgetError, DiskFullError, SourceError
from featstore.packing.sources.base import FileReader, bytes_of
from featstore.storage.disk import Disk

__all__ = ["EdgeStream", "ScratchFile", "build_csc", "count_targets", "place_sources", "sort_runs"]

SORTED_EDGES_MAX = 1 << 18
SORTED_EDGES_MIN = 1 << 10
# Working memory for one edge of a block: int64 source and target, as read and as sorted by range, and the
# order.
BLOCK_EDGE_BYTES = 96


class EdgeStream(Protocol):
    """Edges in the user's order, read by passes: each pass gives the same edges."""

    name: str

    def blocks(self, block_edges: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Runs of at most ``block_edges`` edges: sources and targets."""
        ...

    def where(self, edge: int) -> str:
        """How a message names an edge, for example ``line 17``."""
        ...


@njit(cache=True, nogil=True)
def count_targets(
    sources: NDArray[np.int64], targets: NDArray[np.int64], nodes: int, degrees: NDArray[np.int64]
) -> int:
    """Add one to ``degrees[target]`` per edge. Returns the place of the first edge with an id out of range,
    or -1."""
    for edge in range(targets.size):
        source, target = sources[edge], targets[edge]
        if source < 0 or source >= nodes or target < 0 or target >= nodes:
            return edge
        degrees[target] += 1
    return -1


@njit(cache=True, nogil=True)
def place_sources(
    sources: NDArray[np.int64],
    targets: NDArray[np.int64],
    first_node: int,
    cursors: NDArray[np.int64],
    indices: NDArray[Any],
) -> bool:
    """Put each source at its target's cursor (of ``target - first_node``) and move the cursor on.

    Returns False, having stopped, when an edge has no place: the stream gave other edges than when it was
    counted.
    """
    for edge in range(targets.size):
        node = targets[edge] - first_node
        if node < 0 or node >= cursors.size or cursors[node] >= indices.size:
            return False
        indices[cursors[node]] = sources[edge]
        cursors[node] += 1
    return True


@njit(cache=True, nogil=True)
def sort_runs(indptr: NDArray[np.int64], base: int, indices: NDArray[Any]) -> None:
    """Sort ``indices[indptr[v] - base : indptr[v + 1] - base]`` for each v; runs that ascend already are left
    alone."""
    for node in range(indptr.size - 1):
        low, high = indptr[node] - base, indptr[node + 1] - base
        for place in range(low + 1, high):
            if indices[place] < indices[place - 1]:
                indices[low:high].sort()
                break


class ScratchFile:
    """A temporary file that is written in order or by regions, with this project's errors. Unlinked when not
    kept."""

    def __init__(self, folder: Path, prefix: str, *, keep: bool) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise refusal(error, folder, "create a scratch file in") from error
        self.path = folder / f"{prefix}{secrets.token_hex(8)}.bin"
        self._disk = Disk()
        self._file = self._disk.create_scratch(self.path)
        self._keep = keep
        self._end = 0

    def __enter__(self) -> ScratchFile:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._disk.close(self._file)
        if not self._keep or kind is not None:
            self._disk.unlink(self.path)

    def write(self, values: NDArray[Any], offset: int | None = None) -> None:
        """Write an array at a byte offset, or behind what `write` without offset wrote before."""
        at = self._end if offset is None else offset
        data = bytes_of(np.ascontiguousarray(values))
        self._disk.write(self._file, at, data)
        if offset is None:
            self._end += len(data)


def build_csc(
    stream: EdgeStream, nodes: int | None, memory_bytes: int | None, scratch_dir: Path | None
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """``(indptr, indices)`` of incoming edges: int64 ``[nodes + 1]``, int32 (int64 beyond 2^31 nodes)
    ``[edges]``.

    ``nodes`` None: one more than the greatest id, which costs another pass. ``memory_bytes`` None: as much as
    it takes. Indices that do not fit are a read-only `np.memmap` of a file in ``scratch_dir``, which the
    caller removes.

    Raises SourceError (an id out of range, a stream that changes between passes), BudgetError, DiskFullError
    and DeviceError.
    """
    block_edges = SORTED_EDGES_MAX
    if memory_bytes is not None:
        block_edges = max(SORTED_EDGES_MIN, min(SORTED_EDGES_MAX, memory_bytes // (8 * BLOCK_EDGE_BYTES)))
    if nodes is None:
        nodes = 0
        for sources, targets in stream.blocks(block_edges):
            nodes = max(nodes, int(sources.max()) + 1, int(targets.max()) + 1)
    fixed_bytes = 8 * (nodes + 1) + BLOCK_EDGE_BYTES * block_edges
    if memory_bytes is not None and fixed_bytes > memory_bytes:
        raise BudgetError(smallest_bytes(8 * (nodes + 1) + 16), memory_bytes, "build a graph")
    indptr = _count(stream, nodes, block_edges)
    dtype = np.dtype(np.int32 if nodes <= 2**31 else np.int64)
    edges = int(indptr[-1])
    if memory_bytes is None or fixed_bytes + 8 * nodes + dtype.itemsize * edges <= memory_bytes:
        indices = np.empty(edges, dtype=dtype)
        cursors = indptr[:-1].copy()
        for sources, targets in stream.blocks(block_edges):
            _placed(place_sources(sources, targets, 0, cursors, indices), stream)
        _placed(bool((cursors == indptr[1:]).all()), stream)
        sort_runs(indptr, 0, indices)
        return indptr, indices
    if scratch_dir is None:
        needed = fixed_bytes + 8 * nodes + dtype.itemsize * edges
        raise BudgetError(
            needed, memory_bytes, "build a graph in memory; give scratch_dir to build it on disk"
        )
    return indptr, _build_on_disk(stream, indptr, dtype, block_edges, memory_bytes, scratch_dir)


def smallest_bytes(held_bytes: int) -> int:
    """The budget that leaves ``held_bytes`` beside a block of edges, which grows to an eighth of the
    budget."""
    block_bytes_min, block_bytes_max = (
        BLOCK_EDGE_BYTES * SORTED_EDGES_MIN,
        BLOCK_EDGE_BYTES * SORTED_EDGES_MAX,
    )
    return max(held_bytes + block_bytes_min, min(-(-8 * held_bytes // 7), held_bytes + block_bytes_max))


def _count(stream: EdgeStream, nodes: int, block_edges: int) -> NDArray[np.int64]:
    indptr = np.zeros(nodes + 1, dtype=np.int64)
    done = 0
    for sources, targets in stream.blocks(block_edges):
        bad = int(count_targets(sources, targets, nodes, indptr[1:]))
        if bad >= 0:
            raise SourceError(
                f"{stream.name}: {stream.where(done + bad)} goes from node {int(sources[bad])} to "
                f"{int(targets[bad])}, but node ids are 0 to {nodes - 1}; check that features and "
                "graph belong together"
            )
        done += targets.size
    np.cumsum(indptr, out=indptr)
    return indptr


def _placed(good: bool, stream: EdgeStream) -> None:
    if not good:
        raise SourceError(
            f"{stream.name}: gave other edges in a second pass; it must not change while a graph is built"
        )


def range_bounds(indptr: NDArray[np.int64], itemsize: int, available_bytes: int) -> list[int] | None:
    """First node of each range, and the end; each range fits the memory. None when the edges of one node do
    not."""

    def cost(node: int) -> int:
        return int(indptr[node]) * itemsize + 8 * node

    nodes = indptr.size - 1
    bounds = [0]
    while bounds[-1] < nodes:
        limit = cost(bounds[-1]) + available_bytes
        end = bisect.bisect_right(range(nodes + 1), limit, lo=bounds[-1], key=cost) - 1
        if end == bounds[-1]:
            return None
        bounds.append(end)
    return bounds


def _build_on_disk(
    stream: EdgeStream,
    indptr: NDArray[np.int64],
    dtype: np.dtype[Any],
    block_edges: int,
    memory_bytes: int,
    scratch_dir: Path,
) -> NDArray[Any]:
    fixed_bytes = indptr.nbytes + BLOCK_EDGE_BYTES * block_edges
    bounds = range_bounds(indptr, dtype.itemsize, memory_bytes - fixed_bytes)
    if bounds is None:
        most = max(
            int(np.diff(indptr[i : i + block_edges + 1]).max())
            for i in range(0, indptr.size - 1, block_edges)
        )
        needed = smallest_bytes(indptr.nbytes + dtype.itemsize * most + 8)
        raise BudgetError(needed, memory_bytes, "hold the in-edges of one node")
    edges = int(indptr[-1])
    with asking(scratch_dir, "make scratch files in"):
        scratch_dir.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(scratch_dir).free
    if 3 * edges * dtype.itemsize > free:
        raise DiskFullError(scratch_dir, 3 * edges * dtype.itemsize, free)
    with (
        ScratchFile(scratch_dir, "graph-indices-", keep=True) as out,
        ScratchFile(scratch_dir, "graph-edges-", keep=False) as pairs,
    ):
        _distribute(stream, indptr, np.asarray(bounds, dtype=np.int64), dtype, block_edges, pairs)
        with FileReader(pairs.path) as reader:
            for low, high in itertools.pairwise(bounds):
                out.write(_sorted_range(reader, indptr[low : high + 1], low, dtype, block_edges, stream))
    return map_values(out.path, dtype, edges) if edges else np.zeros(0, dtype=dtype)


def _distribute(
    stream: EdgeStream,
    indptr: NDArray[np.int64],
    bounds: NDArray[np.int64],
    dtype: np.dtype[Any],
    block_edges: int,
    out: ScratchFile,
) -> None:
    """Append each edge, as a pair of source and target, to the region of its target's range."""
    ends = indptr[bounds]
    cursors = ends[:-1].copy()
    for sources, targets in stream.blocks(block_edges):
        ranges = np.searchsorted(bounds, targets, side="right") - 1
        _placed(bool(((ranges >= 0) & (ranges < cursors.size)).all()), stream)
        order = np.argsort(ranges, kind="stable")
        pairs = np.empty((targets.size, 2), dtype=dtype)
        pairs[:, 0] = sources[order]
        pairs[:, 1] = targets[order]
        ranges = ranges[order]
        for low in np.flatnonzero(np.diff(ranges, prepend=-1)):
            number = ranges[low]
            high = np.searchsorted(ranges, number, side="right")
            _placed(bool(cursors[number] + high - low <= ends[number + 1]), stream)
            out.write(pairs[low:high], int(cursors[number]) * 2 * dtype.itemsize)
            cursors[number] += high - low
    _placed(bool((cursors == ends[1:]).all()), stream)


def _sorted_range(
    reader: FileReader,
    indptr: NDArray[np.int64],
    first_node: int,
    dtype: np.dtype[Any],
    block_edges: int,
    stream: EdgeStream,
) -> NDArray[Any]:
    """The indices of one range of nodes, from its region of pairs."""
    base, end = int(indptr[0]), int(indptr[-1])
    indices = np.empty(end - base, dtype=dtype)
    cursors = indptr[:-1] - base
    pairs = np.empty((min(block_edges, max(1, end - base)), 2), dtype=dtype)
    for low in range(base, end, block_edges):
        part = pairs[: min(block_edges, end - low)]
        reader.read_into(part, low * 2 * dtype.itemsize)
        sources, targets = part[:, 0].astype(np.int64), part[:, 1].astype(np.int64)
        _placed(place_sources(sources, targets, first_node, cursors, indices), stream)
    sort_runs(indptr, base, indices)
    return indices
