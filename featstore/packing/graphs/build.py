"""From a stream of edges to CSC: in memory when it fits, by way of buckets on disk when it does not.

Both ways begin with one pass that counts in-degrees, so every edge's place is known to within its target
before any edge is stored. In memory a second pass puts each source where its target's run stands, and each
run is sorted. Out of core the nodes are cut into ranges whose edges fit into memory (a distribution sort, as
in the partitioning step of GraphChi's sharder); since the counts are known, the ranges' regions in one
scratch file are exact, and no range can turn out too large however skewed the degrees are. The second pass
appends each edge to its range's region; then one range after another is read, placed, sorted and appended to
the file of indices, which is mapped read-only at the end.

The two give the same result, bit by bit: sources ascend within each target, duplicates and self-loops stay.
Where edge ids are asked for, the numbers that the user knows the edges by, each goes wherever its source
goes; equal sources stand in the order of their ids.
"""

from __future__ import annotations

import bisect
import itertools
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from featstore.base.dtypes import node_dtype
from featstore.base.files import map_values
from featstore.base.system import asking, refusal
from featstore.errors import BudgetError, DiskFullError, SourceError
from featstore.packing.graphs.csc import NO_IDS, CscGraph, EdgeIds, ids_text, numbers_between
from featstore.packing.graphs.placing import count_targets, place_sources, sort_runs
from featstore.packing.keys.translate import Ends, KeyEdges, NumberEdges, edges_in_ids
from featstore.packing.sources.base import FileReader, bytes_of
from featstore.storage.disk import Disk

__all__ = ["Building", "EdgeStream", "ScratchFile", "build_csc"]

SORTED_EDGES_MAX = 1 << 18
SORTED_EDGES_MIN = 1 << 10
# Working memory for one edge of a block: int64 source, target and id, as read and as sorted by range, and the
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


@dataclass(frozen=True)
class Building:
    """How a graph is built: within ``memory_bytes`` (None: as much as it takes), what does not fit in
    ``scratch_dir``; ``edge_ids``: with the places of its edges in the stream; ``source_nodes``: how many
    nodes its sources are of, where they are others than the targets; ``ends``: the keys of its nodes."""

    memory_bytes: int | None = None
    scratch_dir: Path | None = None
    edge_ids: bool = False
    source_nodes: int | None = None
    ends: Ends | None = None

    def listed(self, stream: EdgeStream, nodes: int | None, source: dict[str, str | int]) -> CscGraph:
        """The graph of a list of edges, whose ends are keys where the nodes have such."""
        return (
            self.graph(stream, nodes, source)
            if self.ends is None
            else self.keyed(NumberEdges(stream), nodes, source)
        )

    def keyed(self, stream: KeyEdges, nodes: int | None, source: dict[str, str | int]) -> CscGraph:
        """The graph of a list of edges whose ends are keys."""
        assert self.ends is not None
        assert self.scratch_dir is not None
        memory_bytes = 2**62 if self.memory_bytes is None else self.memory_bytes
        edges = edges_in_ids(stream, self.ends, memory_bytes, self.scratch_dir, "graph")
        try:
            return self.graph(edges, nodes, source)
        finally:
            edges.close()

    def graph(self, stream: EdgeStream, nodes: int | None, source: dict[str, str | int]) -> CscGraph:
        """The graph of a stream of edges."""
        numbered = numbers_between if self.edge_ids else None
        indptr, indices, ids = build_csc(
            stream, nodes, self.memory_bytes, self.scratch_dir, numbered, self.source_nodes
        )
        return CscGraph(indptr, indices, source, ids if self.edge_ids else None, self.source_nodes)


def build_csc(
    stream: EdgeStream, nodes: int | None, memory_bytes: int | None, scratch_dir: Path | None,
    edge_ids: EdgeIds | None = None, source_nodes: int | None = None,
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]:  # fmt: skip
    """``(indptr, indices, ids)`` of incoming edges: int64 ``[nodes + 1]``, int32 (int64 beyond 2^31 nodes)
    ``[edges]``, and the same (int64 beyond 2^31 edges) of their ids, empty without ``edge_ids``.

    ``nodes`` None: one more than the greatest id, which costs another pass. ``source_nodes``: how many
    nodes sources are of, where they are others. ``memory_bytes`` None: as much as
    it takes. ``edge_ids(low, high)`` gives the ids of edges ``low`` to ``high`` of the stream. Indices and
    ids that do not fit are read-only `np.memmap` of files in ``scratch_dir``, which the caller removes.

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
    indptr = _count(stream, nodes, source_nodes, block_edges)
    form = _Form.of(max(nodes, source_nodes or 0), int(indptr[-1]), edge_ids)
    if memory_bytes is None or fixed_bytes + 8 * nodes + form.edge_bytes * form.edges <= memory_bytes:
        indices, ids = form.empty(form.edges)
        cursors = indptr[:-1].copy()
        for sources, targets, given in _with_ids(stream, block_edges, edge_ids):
            _placed(place_sources(sources, targets, given, 0, cursors, indices, ids), stream)
        _placed(bool((cursors == indptr[1:]).all()), stream)
        sort_runs(indptr, 0, indices, ids)
        return indptr, indices, ids
    if scratch_dir is None:
        needed = fixed_bytes + 8 * nodes + form.edge_bytes * form.edges
        raise BudgetError(
            needed, memory_bytes, "build a graph in memory; give scratch_dir to build it on disk"
        )
    return indptr, *_build_on_disk(stream, indptr, form, block_edges, memory_bytes, scratch_dir)


@dataclass(frozen=True)
class _Form:
    """What is kept of each of ``edges``: a source of ``dtype`` and, where they are given, an id of
    ``id_dtype``."""

    edges: int
    dtype: np.dtype[Any]
    edge_ids: EdgeIds | None
    id_dtype: np.dtype[Any]

    @classmethod
    def of(cls, nodes: int, edges: int, edge_ids: EdgeIds | None) -> _Form:
        return cls(edges, np.dtype(np.int32 if nodes <= 2**31 else np.int64), edge_ids, node_dtype(edges))

    @property
    def edge_bytes(self) -> int:
        return self.dtype.itemsize + (0 if self.edge_ids is None else self.id_dtype.itemsize)

    @property
    def unsorted(self) -> tuple[int, np.dtype[Any]]:
        """Numbers that an edge is on its way to its range, and their dtype: source, target, id."""
        if self.edge_ids is None:
            return 2, self.dtype
        return 3, np.promote_types(self.dtype, self.id_dtype)

    def empty(self, edges: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Room for the sources of so many edges, and their ids."""
        ids = NO_IDS if self.edge_ids is None else np.empty(edges, self.id_dtype)
        return np.empty(edges, self.dtype), ids


def _with_ids(
    stream: EdgeStream, block_edges: int, edge_ids: EdgeIds | None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Runs of a stream's edges: sources, targets, and their ids, none where none are given."""
    done = 0
    for sources, targets in stream.blocks(block_edges):
        end = done + targets.size
        yield sources, targets, NO_IDS if edge_ids is None else np.array(edge_ids(done, end), np.int64)
        done = end


def smallest_bytes(held_bytes: int) -> int:
    """The budget that leaves ``held_bytes`` beside a block of edges, which grows to an eighth of the
    budget."""
    block_bytes_min, block_bytes_max = (
        BLOCK_EDGE_BYTES * SORTED_EDGES_MIN,
        BLOCK_EDGE_BYTES * SORTED_EDGES_MAX,
    )
    return max(held_bytes + block_bytes_min, min(-(-8 * held_bytes // 7), held_bytes + block_bytes_max))


def _count(stream: EdgeStream, nodes: int, source_nodes: int | None, block_edges: int) -> NDArray[np.int64]:
    end = nodes if source_nodes is None else source_nodes
    indptr = np.zeros(nodes + 1, dtype=np.int64)
    done = 0
    for sources, targets in stream.blocks(block_edges):
        bad = int(count_targets(sources, targets, end, nodes, indptr[1:]))
        if bad >= 0:
            raise SourceError(
                f"{stream.name}: {stream.where(done + bad)} goes from node {int(sources[bad])} to "
                f"{int(targets[bad])}, but node ids are {ids_text(nodes, source_nodes)}; check that features "
                "and graph belong together"
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
    form: _Form,
    block_edges: int,
    memory_bytes: int,
    scratch_dir: Path,
) -> tuple[NDArray[Any], NDArray[Any]]:
    fixed_bytes = indptr.nbytes + BLOCK_EDGE_BYTES * block_edges
    bounds = range_bounds(indptr, form.edge_bytes, memory_bytes - fixed_bytes)
    if bounds is None:
        most = max(
            int(np.diff(indptr[i : i + block_edges + 1]).max())
            for i in range(0, indptr.size - 1, block_edges)
        )
        needed = smallest_bytes(indptr.nbytes + form.edge_bytes * most + 8)
        raise BudgetError(needed, memory_bytes, "hold the in-edges of one node")
    with asking(scratch_dir, "make scratch files in"):
        scratch_dir.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(scratch_dir).free
    width, wide = form.unsorted
    needed = (form.edge_bytes + width * wide.itemsize) * form.edges
    if needed > free:
        raise DiskFullError(scratch_dir, needed, free)
    numbered = form.edge_ids is not None
    with ExitStack() as stack:
        out = stack.enter_context(ScratchFile(scratch_dir, "graph-indices-", keep=True))
        out_ids = stack.enter_context(ScratchFile(scratch_dir, "graph-ids-", keep=True)) if numbered else None
        unsorted = stack.enter_context(ScratchFile(scratch_dir, "graph-edges-", keep=False))
        _distribute(stream, indptr, np.asarray(bounds, dtype=np.int64), form, block_edges, unsorted)
        with FileReader(unsorted.path) as reader:
            for low, high in itertools.pairwise(bounds):
                indices, ids = _sorted_range(reader, indptr[low : high + 1], low, form, block_edges, stream)
                out.write(indices)
                if out_ids is not None:
                    out_ids.write(ids)
                del indices, ids  # or there would be two ranges at once
    if form.edges == 0:
        return form.empty(0)
    ids = NO_IDS if out_ids is None else map_values(out_ids.path, form.id_dtype, form.edges)
    return map_values(out.path, form.dtype, form.edges), ids


def _distribute(
    stream: EdgeStream,
    indptr: NDArray[np.int64],
    bounds: NDArray[np.int64],
    form: _Form,
    block_edges: int,
    out: ScratchFile,
) -> None:
    """Append each edge, as source, target and id, to the region of its target's range."""
    width, wide = form.unsorted
    ends = indptr[bounds]
    cursors = ends[:-1].copy()
    for parts in _with_ids(stream, block_edges, form.edge_ids):
        targets = parts[1]
        ranges = np.searchsorted(bounds, targets, side="right") - 1
        _placed(bool(((ranges >= 0) & (ranges < cursors.size)).all()), stream)
        order = np.argsort(ranges, kind="stable")
        edges = np.empty((targets.size, width), dtype=wide)
        for column in range(width):
            edges[:, column] = parts[column][order]
        ranges = ranges[order]
        for low in np.flatnonzero(np.diff(ranges, prepend=-1)):
            number = ranges[low]
            high = np.searchsorted(ranges, number, side="right")
            _placed(bool(cursors[number] + high - low <= ends[number + 1]), stream)
            out.write(edges[low:high], int(cursors[number]) * width * wide.itemsize)
            cursors[number] += high - low
    _placed(bool((cursors == ends[1:]).all()), stream)


def _sorted_range(
    reader: FileReader,
    indptr: NDArray[np.int64],
    first_node: int,
    form: _Form,
    block_edges: int,
    stream: EdgeStream,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The indices of one range of nodes, and their ids, from its region of edges."""
    width, wide = form.unsorted
    base, end = int(indptr[0]), int(indptr[-1])
    indices, ids = form.empty(end - base)
    cursors = indptr[:-1] - base
    edges = np.empty((min(block_edges, max(1, end - base)), width), dtype=wide)
    for low in range(base, end, block_edges):
        part = edges[: min(block_edges, end - low)]
        reader.read_into(part, low * width * wide.itemsize)
        sources, targets = part[:, 0].astype(np.int64), part[:, 1].astype(np.int64)
        given = part[:, 2].astype(np.int64) if width == 3 else NO_IDS
        _placed(place_sources(sources, targets, given, first_node, cursors, indices, ids), stream)
    sort_runs(indptr, base, indices, ids)
    return indices, ids
