"""Writing a graph into the store: CSC of incoming edges in the order of the rows, and a second copy of the
hubs' lists.

Rows of one partition stand together, so the lists of a partition are one run of ``sources``, read in one go
by whoever trains on partitions (HierBatching, appendix C.1). Hubs, the rows that most lists name, are wanted
in every such run; their own lists lie scattered, so they are copied once more, one after the other, the most
wanted hub first: the first k of them are one run too.

``sources`` holds rows, not node ids: what lies together in the file then has neighbouring numbers, and
telling whether a source is in memory takes a look at its partition. Lists that were brought into another
order ascend by node id; as given they stay. Beside them stand, where they were asked for, ``edge_ids``: the
numbers that the user knows the edges by, and weights and times, where edges have them
(:mod:`featstore.packing.graphs.values`): lists with times ascend by these.

Of an edge type, lists stand in the order of the targets' rows, and ``sources`` are rows of another table.

Lists that fit in memory are taken row by row, by every core (:mod:`featstore.packing.graphs.by_row`); the
edges of others are passed over sequentially and sorted by target row out of core
(:mod:`featstore.packing.graphs.build`), all within the memory given. Hubs are ranked by how often they are a
source ("degree"), or a source in another partition ("external": Eq. 3 of HierBatching, whose expected degree
inside a mega-batch is the degree inside the own partition and a constant share of the rest).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.dtypes import node_dtype
from featstore.base.system import available_cores
from featstore.errors import BudgetError, DiskFullError, SourceError
from featstore.order.permutation import check_rankable, ranked_by_count
from featstore.packing.graphs.build import build_csc, smallest_bytes
from featstore.packing.graphs.by_row import lists_by_row, lists_bytes
from featstore.packing.graphs.csc import NO_IDS, AsGiven, CscGraph, numbers_between, release_pages
from featstore.packing.graphs.edges import CsrEdges
from featstore.packing.graphs.values import EdgeValues, by_time
from featstore.packing.memory import of_share
from featstore.storage.edge_types import EdgeType
from featstore.storage.manifest import GraphEntry, HubsEntry, TableEntry
from featstore.storage.table_writer import Catalogue, write_array, write_vector

HUB_RANKS = ("degree", "external")
HUB_SHARE = 0.01  # of the nodes; what HierBatching trains with
_BLOCK_EDGES = 1 << 20
_BLOCK_EDGES_MIN = 1 << 12
_BLOCK_EDGE_BYTES = 96  # what the buffers between source and disk take for one edge of a block


@dataclass(frozen=True)
class TopologyJob:
    """A graph to write: in ``scratch_dir`` within ``memory_bytes`` beyond the graph and the maps, under
    ``base``. ``row_of_node``: of the targets, ``row_of_source``: of the sources, None where rows are node
    ids. ``edge_type``: None for a graph over one table."""

    catalogue: Catalogue
    base: str
    table: str
    graph: CscGraph
    row_of_node: NDArray[Any] | None
    row_of_source: NDArray[Any] | None
    partition_offsets: NDArray[np.int64]
    rows_by_degree: NDArray[Any]
    hub_share: float
    hub_rank: str
    edge_ids: bool
    memory_bytes: int
    scratch_dir: Path
    values: Sequence[EdgeValues] = ()
    edge_type: EdgeType | None = None

    @property
    def numbered(self) -> bool:
        """Whether the numbers of edges are wanted, to be kept or to find their values."""
        return self.edge_ids or bool(self.values)

    @property
    def block_edges(self) -> int:
        return max(_BLOCK_EDGES_MIN, min(_BLOCK_EDGES, self.memory_bytes // (4 * _BLOCK_EDGE_BYTES)))


@dataclass(frozen=True)
class _Lists:
    """The lists in the order of the rows: ``offsets`` int64 [rows + 1], ``sources`` [edges], as rows or node
    ids, and the ids of their edges: none, or places where they are as given; and values of edges, by part."""

    offsets: NDArray[np.int64]
    sources: NDArray[Any]
    edge_ids: NDArray[Any] | AsGiven
    values: dict[str, NDArray[Any]] = field(default_factory=dict)


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
    if job.numbered and job.graph.edge_ids is None:
        raise SourceError("the graph does not know the ids of its edges: open_graph(..., edge_ids=True)")
    rows = len(job.graph.indptr) - 1
    least = topology_memory_bytes(rows, job.hub_rank, permuted=job.row_of_node is not None)
    least *= 2 if job.values else 1  # half of it is for the values
    if job.memory_bytes < least:
        raise BudgetError(least, job.memory_bytes, "bring the graph into the order of the rows")
    for values in job.values:
        values.check_edges(job.graph.edges)
    edge_bytes = node_dtype(job.graph.source_nodes).itemsize + sum(
        values.dtype.itemsize for values in job.values
    )
    edge_bytes += node_dtype(job.graph.edges).itemsize if job.numbered else 0
    needed, free = int(edge_bytes * job.graph.edges * 2), job.catalogue.disk.free_bytes(job.scratch_dir)
    if needed > free:
        raise DiskFullError(job.scratch_dir, needed, free)
    cores = available_cores()  # one sorts edges faster than it takes lists from all over memory
    taken = lists_bytes(job.graph, job.numbered)
    if job.values:
        taken *= 2  # half of the memory is for the values
    if job.row_of_node is not None and taken + _block_bytes(job) <= job.memory_bytes and cores > 1:
        lists = _Lists(*lists_by_row(job.graph, job.row_of_node, job.row_of_source, cores, job.numbered))
        job = replace(job, row_of_source=None)  # they are rows already
    else:
        lists = _in_row_order(job)
    scratch: list[Any] = [lists.sources, lists.edge_ids]
    if job.values:
        lists = _with_values(job, lists, scratch)
    written = write_vector(
        job.catalogue,
        f"{job.base}/offsets",
        (lists.offsets[a : a + _BLOCK_EDGES] for a in _steps(len(lists.offsets))),
        rows + 1,
        np.dtype(np.int64),
    )
    edges = job.graph.edges
    sources = _written(job, "sources", _as_rows(job, lists.sources, 0, edges), edges)
    parts: dict[str, Any] = {
        part: _written(job, part, blocks(0, edges), edges) for part, blocks in _parts(job, lists).items()
    }
    hubs = _write_hubs(job, lists)
    for made in scratch:
        if isinstance(made, np.memmap) and made is not job.graph.indices and made is not job.graph.edge_ids:
            job.catalogue.disk.unlink(Path(str(made.filename)))
    entry = GraphEntry(job.table, edges, written, sources, hubs, **parts)
    if job.edge_type is None:
        return entry
    return msgspec.structs.replace(entry, source_table=job.edge_type[0], relation=job.edge_type[1])


def _written(job: TopologyJob, name: str, blocks: Iterator[NDArray[Any]], edges: int) -> TableEntry:
    part = name.removeprefix("hub_")
    dtypes = {"sources": node_dtype(job.graph.source_nodes), "edge_ids": node_dtype(job.graph.edges)}
    dtypes |= {"hubs": dtypes["sources"]} | {values.part: values.dtype for values in job.values}
    return write_vector(job.catalogue, f"{job.base}/{name}", blocks, edges, dtypes[part])


def _parts(job: TopologyJob, lists: _Lists) -> dict[str, Callable[[int, int], Iterator[NDArray[Any]]]]:
    """What is stored of each edge beside its source, by name: gives blocks of edges from one to another."""
    kept: dict[str, NDArray[Any] | AsGiven] = {"edge_ids": lists.edge_ids} if job.edge_ids else {}
    return {part: partial(_blocks, job, values) for part, values in (kept | lists.values).items()}


def _with_values(job: TopologyJob, lists: _Lists, scratch: list[Any]) -> _Lists:
    """The lists with the values of their edges, and in ascending time where there are times. What was made in
    scratch files is added to ``scratch``."""
    held = lists.offsets.nbytes if lists.offsets is not job.graph.indptr else 0
    held += sum(a.nbytes for a in scratch if isinstance(a, np.ndarray) and not isinstance(a, np.memmap))
    memory = max(job.memory_bytes - held, job.memory_bytes // 2)
    ids, edges = lists.edge_ids, job.graph.edges
    values = {v.part: v.in_order(ids, edges, memory, job.scratch_dir) for v in job.values}
    scratch += values.values()
    if "times" not in values:
        return replace(lists, values=values)
    times = values.pop("times")
    others = {"sources": lists.sources, "edge_ids": ids, **values}
    found = by_time(lists.offsets, times, others, memory, job.scratch_dir)
    scratch += found.values()
    return _Lists(lists.offsets, found.pop("sources"), found.pop("edge_ids"), found)


def _block_bytes(job: TopologyJob) -> int:
    return job.block_edges * _BLOCK_EDGE_BYTES


def _steps(count: int) -> range:
    return range(0, count, _BLOCK_EDGES)


def _in_row_order(job: TopologyJob) -> _Lists:
    """The lists in the order of the rows, their sources as node ids."""
    graph = job.graph
    if job.row_of_node is None:
        return _Lists(graph.indptr, graph.indices, NO_IDS if graph.edge_ids is None else graph.edge_ids)
    stream = _ListsByRow(graph, job.row_of_node)
    ids = graph.ids_between if job.numbered else None
    parts = 2 if job.values else 1
    memory = job.memory_bytes // parts
    try:
        with of_share(memory, job.memory_bytes, parts):
            built = build_csc(stream, graph.nodes, memory, job.scratch_dir, ids, graph.other_nodes)
        return _Lists(*built)
    except BudgetError as error:
        raise BudgetError(
            error.needed_bytes, error.given_bytes, "bring the graph into the order of the rows"
        ) from None


def _as_rows(job: TopologyJob, lists: NDArray[Any], low: int, high: int) -> Iterator[NDArray[Any]]:
    """Blocks of ``lists[low:high]``, as rows in the dtype they are stored in."""
    dtype = node_dtype(job.graph.source_nodes)
    for begin in range(low, high, job.block_edges):
        end = min(begin + job.block_edges, high)
        block = np.asarray(lists[begin:end])
        yield (block if job.row_of_source is None else job.row_of_source[block]).astype(dtype, copy=False)
        release_pages(lists, begin, end)


def _blocks(job: TopologyJob, values: NDArray[Any] | AsGiven, low: int, high: int) -> Iterator[NDArray[Any]]:
    """Blocks of the values, or numbers, of edges ``low`` to ``high``."""
    for begin in range(low, high, job.block_edges):
        end = min(begin + job.block_edges, high)
        if isinstance(values, AsGiven):
            yield numbers_between(begin, end)
        else:
            yield np.asarray(values[begin:end])
            release_pages(values, begin, end)


def _write_hubs(job: TopologyJob, lists: _Lists) -> HubsEntry | None:
    count = int(np.ceil(job.hub_share * job.graph.nodes))
    if count == 0:
        return None
    rows = job.rows_by_degree if job.hub_rank == "degree" else _rank_external(job, lists)
    rows = rows[:count]
    hub_offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lists.offsets[rows + 1] - lists.offsets[rows], out=hub_offsets[1:])
    edges = int(hub_offsets[-1])

    def runs() -> Iterator[tuple[int, int]]:
        return ((int(lists.offsets[row]), int(lists.offsets[row + 1])) for row in rows)

    pieces = (piece for run in runs() for piece in _as_rows(job, lists.sources, *run))
    parts: dict[str, Any] = {}
    for part, blocks in _parts(job, lists).items():
        copies = (piece for run in runs() for piece in blocks(*run))
        parts[part] = _written(job, f"hub_{part}", _gathered(copies, job.block_edges), edges)
    return HubsEntry(
        job.hub_rank,
        write_array(job.catalogue, f"{job.base}/hub_rows", rows.astype(node_dtype(job.graph.nodes))),
        write_array(job.catalogue, f"{job.base}/hub_offsets", hub_offsets),
        _written(job, "hubs", _gathered(pieces, job.block_edges), edges),
        **parts,
    )


def _gathered(pieces: Iterator[NDArray[Any]], block_edges: int) -> Iterator[NDArray[Any]]:
    """The pieces, which may be short, in blocks."""
    held: list[NDArray[Any]] = []
    held_edges = 0
    for piece in pieces:
        held.append(piece.copy())  # it may be of a mapped file, whose pages are about to be given back
        held_edges += len(piece)
        if held_edges >= block_edges:
            yield np.concatenate(held)
            held, held_edges = [], 0
    if held:
        yield np.concatenate(held)


def _rank_external(job: TopologyJob, lists: _Lists) -> NDArray[Any]:
    """Rows by falling number of occurrences as a source in another partition; ties by row."""
    check_rankable(job.graph.nodes)
    counts = np.zeros(job.graph.nodes, np.uint32)
    first, row, partition = 0, 0, 0
    for block in _as_rows(job, lists.sources, 0, job.graph.edges):
        row, partition = count_external(
            lists.offsets, block, first, row, partition, job.partition_offsets, counts
        )
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
