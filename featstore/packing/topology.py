"""Writing a graph into the store: CSC of incoming edges in the order of the rows, and a second copy of the
hubs' lists.

Rows of one partition stand together, so the lists of a partition are one run of ``sources``, read in one go
by whoever trains on partitions (HierBatching, appendix C.1). Hubs, the rows that most lists name, are wanted
in every such run; their own lists lie scattered, so they are copied once more, one after the other, the most
wanted hub first: the first k of them are one run too.

``sources`` holds rows, not node ids: what lies together in the file then has neighbouring numbers, and
telling whether a source is in memory takes a look at its partition. Lists that were brought into another
order ascend by node id; as given they stay.

Lists that fit in memory are taken row by row, by every core (:mod:`featstore.packing.graphs.by_row`); the
edges of others are passed over sequentially and sorted by target row out of core
(:mod:`featstore.packing.graphs.build`), all within the memory given. Hubs are ranked by how often they are a
source ("degree"), or a source in another partition ("external": Eq. 3 of HierBatching, whose expected degree
inside a mega-batch is the degree inside the own partition and a constant share of the rest).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.dtypes import node_dtype
from featstore.base.system import available_cores
from featstore.errors import BudgetError, DiskFullError, SourceError
from featstore.order.permutation import check_rankable, ranked_by_count
from featstore.packing.graphs.build import build_csc, smallest_bytes
from featstore.packing.graphs.by_row import lists_by_row, lists_bytes
from featstore.packing.graphs.csc import CscGraph, release_pages
from featstore.packing.graphs.edges import CsrEdges
from featstore.storage.manifest import GraphEntry, HubsEntry
from featstore.storage.table_writer import Catalogue, write_array, write_vector

HUB_RANKS = ("degree", "external")
HUB_SHARE = 0.01  # of the nodes; what HierBatching trains with
_BLOCK_EDGES = 1 << 20
_BLOCK_EDGES_MIN = 1 << 12
_BLOCK_EDGE_BYTES = 96  # what the buffers between source and disk take for one edge of a block


@dataclass(frozen=True)
class TopologyJob:
    """A graph to write: in ``scratch_dir`` within ``memory_bytes`` beyond the graph and the maps, under
    ``base``."""

    catalogue: Catalogue
    base: str
    table: str
    graph: CscGraph
    row_of_node: NDArray[Any] | None
    partition_offsets: NDArray[np.int64]
    rows_by_degree: NDArray[Any]
    hub_share: float
    hub_rank: str
    memory_bytes: int
    scratch_dir: Path

    @property
    def block_edges(self) -> int:
        return max(_BLOCK_EDGES_MIN, min(_BLOCK_EDGES, self.memory_bytes // (4 * _BLOCK_EDGE_BYTES)))


@njit(cache=True, nogil=True)
def count_external(
    offsets: NDArray[np.int64],
    block: NDArray[Any],
    first_edge: int,
    row: int,
    partition: int,
    partition_offsets: NDArray[np.int64],
    counts: NDArray[np.uint32],
) -> tuple[int, int]:
    """Add one to ``counts`` [rows] for each source of the block that lies outside its target's partition;
    they stop at 2**32 - 1.

    ``row`` and ``partition`` are those of the last edge before the block; returns those of its own last edge.
    """
    most = np.uint32(0xFFFFFFFF)
    for i in range(block.size):
        while offsets[row + 1] <= first_edge + i:
            row += 1
        while partition_offsets[partition + 1] <= row:
            partition += 1
        source = block[i]
        outside = source < partition_offsets[partition] or source >= partition_offsets[partition + 1]
        if outside and counts[source] != most:
            counts[source] += np.uint32(1)
    return row, partition


class _ListsByRow:
    """The edges of a graph, each target as the row that it stands in: an `EdgeStream`."""

    def __init__(self, graph: CscGraph, row_of_node: NDArray[Any]) -> None:
        self.name = "the graph"
        self._graph = graph
        self._row_of_node = row_of_node
        self._edges = CsrEdges(graph.indptr, graph.indices, self.name)

    def blocks(self, block_edges: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        done = 0
        for targets, sources in self._edges.blocks(block_edges):
            yield sources, self._row_of_node[targets].astype(np.int64, copy=False)
            release_pages(self._graph.indices, done, done + len(sources))
            done += len(sources)

    def where(self, edge: int) -> str:
        return self._edges.where(edge)


def write_topology(job: TopologyJob) -> GraphEntry:
    """Write the graph's tables, durably, and return its entry.

    Raises SourceError for a bad share or rank of hubs, BudgetError, DiskFullError, DeviceError.
    """
    if job.hub_rank not in HUB_RANKS:
        raise SourceError(f"hub_rank must be one of {', '.join(HUB_RANKS)}, not {job.hub_rank!r}")
    if not 0 <= job.hub_share <= 1:
        raise SourceError(f"hubs must be a share of the nodes, from 0 to 1, not {job.hub_share}")
    rows = len(job.graph.indptr) - 1
    dtype = node_dtype(rows)
    least = topology_memory_bytes(rows, job.hub_rank, permuted=job.row_of_node is not None)
    if job.memory_bytes < least:
        raise BudgetError(least, job.memory_bytes, "bring the graph into the order of the rows")
    needed, free = int(dtype.itemsize * job.graph.edges * 2), job.catalogue.disk.free_bytes(job.scratch_dir)
    if needed > free:
        raise DiskFullError(job.scratch_dir, needed, free)
    cores = available_cores()  # one sorts edges faster than it takes lists from all over memory
    fits = lists_bytes(job.graph) + _block_bytes(job) <= job.memory_bytes
    if job.row_of_node is not None and fits and cores > 1:
        offsets, lists = lists_by_row(job.graph, job.row_of_node, cores)
        job = replace(job, row_of_node=None)  # they are rows already
    else:
        offsets, lists = _in_row_order(job)
    written = write_vector(
        job.catalogue,
        f"{job.base}/offsets",
        (offsets[a : a + _BLOCK_EDGES] for a in _steps(len(offsets))),
        rows + 1,
        np.dtype(np.int64),
    )
    sources = write_vector(job.catalogue, f"{job.base}/sources", _as_rows(job, lists), job.graph.edges, dtype)
    hubs = _write_hubs(job, offsets, lists, dtype)
    if isinstance(lists, np.memmap) and lists is not job.graph.indices:
        job.catalogue.disk.unlink(Path(str(lists.filename)))
    return GraphEntry(job.table, job.graph.edges, written, sources, hubs)


def _block_bytes(job: TopologyJob) -> int:
    return job.block_edges * _BLOCK_EDGE_BYTES


def _steps(count: int) -> range:
    return range(0, count, _BLOCK_EDGES)


def _in_row_order(job: TopologyJob) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """(offsets int64 [rows + 1], sources as node ids [edges]): the lists in the order of the rows."""
    if job.row_of_node is None:
        return job.graph.indptr, job.graph.indices
    stream = _ListsByRow(job.graph, job.row_of_node)
    try:
        return build_csc(stream, job.graph.nodes, job.memory_bytes, job.scratch_dir)
    except BudgetError as error:
        raise BudgetError(
            error.needed_bytes, error.given_bytes, "bring the graph into the order of the rows"
        ) from None


def _as_rows(
    job: TopologyJob, lists: NDArray[Any], low: int = 0, high: int | None = None
) -> Iterator[NDArray[Any]]:
    """Blocks of ``lists[low:high]``, as rows in the dtype they are stored in."""
    end = len(lists) if high is None else high
    dtype = node_dtype(job.graph.nodes)
    for begin in range(low, end, job.block_edges):
        block = np.asarray(lists[begin : min(begin + job.block_edges, end)])
        yield (block if job.row_of_node is None else job.row_of_node[block]).astype(dtype, copy=False)
        release_pages(lists, begin, min(begin + job.block_edges, end))


def _write_hubs(
    job: TopologyJob, offsets: NDArray[np.int64], lists: NDArray[Any], dtype: np.dtype[Any]
) -> HubsEntry | None:
    count = int(np.ceil(job.hub_share * job.graph.nodes))
    if count == 0:
        return None
    rows = (
        job.rows_by_degree[:count]
        if job.hub_rank == "degree"
        else _rank_external(job, offsets, lists)[:count]
    )
    degrees = offsets[rows + 1] - offsets[rows]
    hub_offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(degrees, out=hub_offsets[1:])
    return HubsEntry(
        job.hub_rank,
        write_array(job.catalogue, f"{job.base}/hub_rows", rows.astype(dtype)),
        write_array(job.catalogue, f"{job.base}/hub_offsets", hub_offsets),
        write_vector(
            job.catalogue,
            f"{job.base}/hubs",
            _hub_lists(job, rows, offsets, lists),
            int(hub_offsets[-1]),
            dtype,
        ),
    )


def _hub_lists(
    job: TopologyJob, rows: NDArray[Any], offsets: NDArray[np.int64], lists: NDArray[Any]
) -> Iterator[NDArray[Any]]:
    held: list[NDArray[Any]] = []
    held_edges = 0
    for row in rows:
        for piece in _as_rows(job, lists, int(offsets[row]), int(offsets[row + 1])):
            held.append(piece)
            held_edges += len(piece)
            if held_edges >= job.block_edges:
                yield np.concatenate(held)
                held, held_edges = [], 0
    if held:
        yield np.concatenate(held)


def _rank_external(job: TopologyJob, offsets: NDArray[np.int64], lists: NDArray[Any]) -> NDArray[Any]:
    """Rows by falling number of occurrences as a source in another partition; ties by row."""
    check_rankable(job.graph.nodes)
    counts = np.zeros(job.graph.nodes, np.uint32)
    first, row, partition = 0, 0, 0
    for block in _as_rows(job, lists):
        row, partition = count_external(offsets, block, first, row, partition, job.partition_offsets, counts)
        first += len(block)
    return ranked_by_count(counts)


def topology_memory_bytes(rows: int, hub_rank: str, *, permuted: bool) -> int:
    """The least that :func:`write_topology` needs beyond the graph and the maps, but for the lists of the
    largest hub."""
    offsets = 8 * (rows + 1) if permuted else 0
    ranking = (4 + 8 + node_dtype(rows).itemsize) * rows if hub_rank == "external" else 0
    return max(
        smallest_bytes(2 * offsets + 16) if permuted else 0,
        offsets + ranking + 4 * _BLOCK_EDGES_MIN * _BLOCK_EDGE_BYTES,
    )
