"""Sampling from disk: the neighbours of a mini-batch, read from the graph in the store.

:class:`StoredSampler` gives, for the same seed, epoch, batch and seeds, the very mini-batches that
:class:`featstore.sampling.neighbors.NeighborSampler` gives over the same graph in memory. It can, because
randomness is counted there: which places of a list are picked follows from the node and the length of the
list, not from what the list holds. So each hop first picks the positions of its edges, from offsets in
memory, and then reads just those: sorted, so that the pages that have them are read in one go, and of a hub
with a million neighbours only those of the picked ones. What a hop but the last reads are whole pages, and
they are kept for the hops after it, as far as an eighth of the memory has room: so a page is read once
(:mod:`featstore.sampling.pages`).

**Rows inside, node ids outside.** Lists hold rows, so sampling goes from row to row; ``row_of_node`` is asked
for the seeds, ``node_of_row`` for the hash of each node that asks and for the nodes that come out.

**Cache.** Neighbours are held in memory as far as there is room: all, or the lists of the most wanted hubs
and of the first rows (:mod:`featstore.sampling.cache`).

**Memory** is one budget for the offsets (8 bytes a row), the two maps, what the reader takes, the scratch of
mini-batches and the cache. What one needs is known at each of its hops before it is taken: when that is more
than is left, neighbours leave the cache for good; when even that is not enough, a BudgetError tells what is.
The mini-batch that comes out is the caller's and comes on top.

**Several at once.** Threads that ask at the same time have their mini-batches made at the same time, as many
as there is room for (:mod:`featstore.sampling.under_way`): the device reads for one while others compute.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_fanouts, as_integer
from featstore.base.checks import check_offsets
from featstore.base.dtypes import node_dtype
from featstore.base.hashing import batch_key
from featstore.errors import BudgetError, ClosedError, FormatError
from featstore.plan.budget import Budget
from featstore.reader.lookup import table_need
from featstore.reader.options import check_reading
from featstore.reader.reader import QUEUE_DEPTH, Reader
from featstore.reader.report import ReaderStats
from featstore.sampling.cache import NO_MAP, NeighbourCache
from featstore.sampling.edge_ids import FINDING_BYTES, StoredEdgeIds, wants_edge_ids
from featstore.sampling.hops import Hops, HopSampler
from featstore.sampling.neighbors import SampledSubgraph, checked_seeds
from featstore.sampling.pages import Missing, load_page_kernels
from featstore.sampling.picking import enter_hop, pick_hop, seed_table, table_size
from featstore.sampling.stored_hops import StoredHops
from featstore.sampling.under_way import HeldInMemory, MadeAgain, Scratch, UnderWayNow
from featstore.storage.relations import graph_of
from featstore.storage.store import as_store
from featstore.units import parse_bytes

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore

__all__ = ["SamplerStats", "StoredSampler"]

#: Scratch that is kept free of the cache from the beginning.
SCRATCH_BYTES_MIN = 2 * 2**20

_renewing = threading.Lock()  # held while a forked child makes its own locks


def _renew_lock() -> None:
    global _renewing
    _renewing = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


@dataclass(frozen=True)
class SamplerStats:
    """Counts of a sampler since it was opened; its opening is not in them. After a fork, the child counts
    anew.

    ``edges_asked``: edges of the mini-batches. ``edges_cached``: those of them whose neighbour the cache
    held. ``reads``, ``bytes_read``: what the device was asked for the rest.
    """

    batches: int = 0
    edges_asked: int = 0
    edges_cached: int = 0
    reads: int = 0
    bytes_read: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the edges that the cache held; 0 before the first mini-batch."""
        return self.edges_cached / self.edges_asked if self.edges_asked else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self) | {"hit_rate": self.hit_rate}


class StoredSampler(HopSampler):
    """Uniform neighbour sampler without replacement over a graph in a store; made by
    :meth:`featstore.Store.sampler`. A context manager; safe to use from several threads; survives fork, and
    reopens when it is pickled, like a reader.

    Args:
        store: the open store.
        fanouts: neighbours per node and hop, from the seeds outwards; -1 takes all.
        memory: budget for all that the sampler holds, bytes or ``"2GiB"``. Mini-batches are the caller's and
            come on top.
        seed: any integer.
        graph: the name of a graph of the store; needed where it has several, or where a graph may be one
            relation of several: beside tables of other types of nodes or edges.
        edge_ids: mini-batches have the numbers of their edges, ``e_id``, which takes a read more where these
            are not in memory; by default where the store keeps them.
        engine, queue_depth, threads, verify: as for :class:`featstore.reader.reader.Reader`.

    Raises BudgetError, CorruptionError, DeviceError, FormatError; SourceError for impossible fan-outs and
    a store without a graph; KeyError for a graph that it has not.
    """

    def __init__(
        self, store: OpenStore, fanouts: Sequence[int], *, memory: int | str, seed: int = 0,
        graph: str | None = None, engine: str = "auto", queue_depth: int = QUEUE_DEPTH, verify: bool = True,
        threads: int | None = None, edge_ids: bool | None = None,
    ) -> None:  # fmt: skip
        self.fanouts = as_fanouts(fanouts)
        self.seed = as_integer(seed, "seed")
        self.store = as_store(store)
        check_reading(engine, queue_depth, verify, threads=threads)
        self.graph = graph_of(store, graph)
        self._options = {
            "memory": memory,
            "seed": seed,
            "graph": graph,
            "engine": engine,
            "queue_depth": queue_depth,
            "verify": verify,
            "threads": threads,
            "edge_ids": edge_ids,
        }
        self._ids = StoredEdgeIds(self.graph) if wants_edge_ids(self.graph, edge_ids) else None
        self._sources, self._hubs, self._offsets_table = (
            f"{self.graph.name}/{part}" for part in ("sources", "hubs", "offsets")
        )
        names = [self._sources, self._offsets_table] + [self._hubs] * (self.graph.entry.hubs is not None)
        ids = [] if self._ids is None else [self._ids.table]
        table, nodes = self.graph.table, self.graph.table.rows
        self._memory_bytes = parse_bytes(memory, "memory")
        self._map_bytes = sum(
            0 if entry is None else nodes * node_dtype(nodes).itemsize
            for entry in (table.entry.order.row_of_node, table.entry.order.node_of_row)
        )
        self._held_bytes = self._map_bytes + 8 * (nodes + 1)
        self._needs = [table_need(store.table(name), verify) for name in [*names, *ids]]
        smallest = self._smallest(SCRATCH_BYTES_MIN)
        if self._memory_bytes < smallest:
            raise BudgetError(
                smallest, self._memory_bytes, "sample from this graph (offsets, maps, reading, scratch)"
            )
        self._row_of_node: NDArray[Any]
        self._node_of_row: NDArray[Any]
        self._row_of_node, self._node_of_row = table.maps() or (NO_MAP, NO_MAP)
        # A reader as small as can be, where all neighbours fit beside it and beside no other: unless a large
        # mini-batch takes their room, there is nothing to read.
        left = self._memory_bytes - self._smallest(0)
        usual = Budget.split(self._memory_bytes - self._held_bytes, self._needs).tier_bytes
        edge_bytes = sum(store.table(name).row_bytes for name in (self._sources, *ids))
        squeezed = usual < edge_bytes * self.graph.edges + SCRATCH_BYTES_MIN <= left
        self._reader = Reader(
            store,
            memory=self._memory_bytes - self._held_bytes,
            static=None,
            static_memory=left if squeezed else None,
            tables=[*names, *ids],
            engine=engine,
            queue_depth=queue_depth,
            verify=verify,
            threads=threads,
        )
        self._closed = False
        try:
            self._open()
        except BaseException:
            self._reader.close()
            raise

    def _open(self) -> None:
        """Fill what is held in memory, and load all kernels: a child forked while numba holds its lock could
        never."""
        nodes = self.node_count
        # the reader has no tiers: scratch and cache share it
        self._free_bytes = self._reader.budget.tier_bytes
        table = self._offsets_table
        self._offsets: NDArray[np.int64] = self._reader.read_runs({table: [(0, nodes + 1)]})[table]
        check_offsets(
            self._offsets,
            0,
            self.graph.edges,
            f"the offsets of graph {self.graph.name!r} of {self.store.path}",
        )
        self._cache = NeighbourCache(self.graph, self._offsets)
        self._cache.fill(self._reader, self._free_bytes - SCRATCH_BYTES_MIN)
        if self._ids is not None:
            room_bytes = self._free_bytes - SCRATCH_BYTES_MIN - self._cache.memory_bytes
            self._ids.fill(self._reader, room_bytes)
        self._held, given = HeldInMemory(self._cache, self._ids), self._memory_bytes
        room = self._held, self._free_bytes, SCRATCH_BYTES_MIN, given, self._smallest
        self._under_way = UnderWayNow(*room)
        self._start_process()
        load_page_kernels(self._cache.first.dtype)
        self._made(np.empty(0, np.int64), 0)
        self._start_process()
        self._before = self._reader.stats()

    def _start_process(self) -> None:
        """Begin with what belongs to this process: none under way, and counts from zero, as the reader's are
        after a fork."""
        self._under_way.renew()
        self._batches = self._edges_asked = self._edges_cached = 0
        self._before = ReaderStats()
        self._pid = os.getpid()

    def _here(self) -> None:
        if self._pid != os.getpid():  # after a fork: a thread of the parent may have held the lock
            with _renewing:
                if self._pid != os.getpid():
                    self._start_process()

    @property
    def node_count(self) -> int:
        """Number of nodes of the graph."""
        return self.graph.table.rows

    @property
    def engine(self) -> str:
        """The engine that reads."""
        return self._reader.engine.name

    @property
    def reads(self) -> bool:
        """Whether mini-batches have to be read: not all is held in memory."""
        return not self._held.whole

    def _smallest(self, free_bytes: int) -> int:
        """The smallest budget that leaves so much for scratch and cache."""
        return self._held_bytes + Budget.smallest(self._needs, free_bytes)

    # Sampling.

    def sample(self, seeds: NDArray[Any], batch_index: int = 0, *, epoch: int = 0) -> SampledSubgraph:
        """The mini-batch around ``seeds`` (node ids, any integer dtype [b], no duplicates).

        The result depends on the graph, the fan-outs, ``seed``, ``epoch``, ``batch_index`` and ``seeds``
        alone and is that of a :class:`~featstore.sampling.neighbors.NeighborSampler` over
        ``store.graphs[...].csc()``, except that ``edge_id`` is the position of the edge in the stored
        ``GRAPH/sources``, whose lists stand in the order of the rows.

        Raises IdError for seeds that are no nodes or stand twice, BudgetError where the mini-batch needs more
        scratch than the budget leaves, CorruptionError, DeviceError, FormatError, ClosedError.
        """
        node = checked_seeds(seeds, self.node_count)
        if self._closed:
            raise ClosedError("the sampler is closed; make another with store.sampler()")
        self._here()
        key = batch_key(self.seed, as_integer(epoch, "epoch"), as_integer(batch_index, "batch_index"))
        return self._made(node, key)

    def _made(self, seeds: NDArray[np.int64], key: int) -> SampledSubgraph:
        """A mini-batch, made beside others, or alone where there is no room beside them."""
        alone = False
        while True:
            scratch = Scratch(self._under_way)
            try:
                self._under_way.begin(scratch, alone)
                return self._sample(seeds, key, scratch)
            except MadeAgain:
                alone = True
            finally:
                self._under_way.end(scratch)

    def _sample(self, seeds: NDArray[np.int64], key: int, scratch: Scratch) -> SampledSubgraph:
        dtype = node_dtype(self.node_count)
        scratch.reserve(dtype.itemsize * table_size(len(seeds)) + 16 * len(seeds), "begin this mini-batch")
        rows = seeds if len(self._row_of_node) == 0 else self._row_of_node[seeds].astype(np.int64)
        hops = StoredHops(rows, seed_table(rows, seeds, dtype), scratch)
        self._go(hops, self._offsets, self.graph.edges, key)
        hops.slots, rows = NO_MAP, hops.nodes[: sum(hops.counts)]
        joined, ids = hops.joined(), None
        if self._ids is not None:
            edges = joined["edge_id"]
            scratch.reserve(FINDING_BYTES * len(edges), "find the numbers of its edges")
            ids = self._ids.of(self._reader, edges)
        identity = len(self._node_of_row) == 0
        node = rows.copy() if identity else self._node_of_row[rows].astype(np.int64, copy=False)
        with self._under_way.lock:
            self._batches += 1
            self._edges_asked += hops.asked
            self._edges_cached += hops.cached
        return SampledSubgraph(node=node, **joined, e_id=ids)

    def _fill(
        self, hops: Hops, begin: int, end: int, fanout: int, key: np.uint64, picks: NDArray[np.int64],
        row: NDArray[np.int64], col: NDArray[np.int64], edge: NDArray[np.int64],
    ) -> int:  # fmt: skip
        hubs = self._cache.index
        misses = pick_hop(
            self._offsets, self._node_of_row, hops.nodes, begin, end, fanout, key, hubs.bits, hubs.ranks,
            hubs.starts, self._cache.lists, self._cache.first, picks, row, col, edge,
        )  # fmt: skip
        assert isinstance(hops, StoredHops)
        hops.asked, hops.cached = hops.asked + len(edge), hops.cached + len(edge) - misses
        if misses:
            self._read(hops, row, edge, misses)
        found = int(enter_hop(hops.slots, hops.nodes, end, row, self.node_count))
        if found < 0:
            place = -found - 1
            raise self._contradiction(
                f"edge {edge[place]:,} comes from row {row[place]} of {self.node_count:,}"
            )
        return found

    def _bad_offsets(self, node: int) -> FormatError:
        low, high = self._offsets[node], self._offsets[node + 1]
        return self._contradiction(
            f"the offsets give row {node} the edges {low:,} to {high:,} of {self.graph.edges:,}"
        )

    def _contradiction(self, what: str) -> FormatError:
        return FormatError(f"graph {self.graph.name!r} of {self.store.path}: {what}; pack the store again")

    def _read(self, hops: StoredHops, row: NDArray[np.int64], edge: NDArray[np.int64], misses: int) -> None:
        """Read the neighbours that the cache did not hold: the negative ones in ``row``."""
        missing = Missing(row, edge, misses, self.graph.edges, self._cache.first.dtype)
        hops.read(missing, self._reader, self._sources, last=len(hops.row) == len(self.fanouts) - 1)

    def _reserve_hop(self, hops: Hops, hop: int, nodes_max: int, edges: int, picks: int) -> None:
        assert isinstance(hops, StoredHops)
        hops.reserve(hop, nodes_max, edges, picks, self.graph.entry.sources.row_bytes)

    @property
    def least_bytes(self) -> int:
        """The budget for mini-batches half as large again as the largest so far."""
        return self._smallest(self._under_way.most_bytes * 3 // 2)

    # Explaining, ending.

    def stats(self) -> SamplerStats:
        """What has been counted since the sampler was opened."""
        if self._closed:
            raise ClosedError("the sampler is closed; make another with store.sampler()")
        self._here()
        read = self._reader.stats().since(self._before)
        return SamplerStats(self._batches, self._edges_asked, self._edges_cached, read.reads, read.bytes_read)

    def memory(self) -> dict[str, int]:
        """Bytes of the budget, by use: what is held, and ``unused``, of which the scratch of a mini-batch is
        taken."""
        if self._closed:
            raise ClosedError("the sampler is closed; make another with store.sampler()")
        reader = self._reader.memory()
        held = {
            "offsets": self._offsets.nbytes, "maps": self._map_bytes,
            "page_checksums": reader["page_checksums"], "staging": reader["staging"],
            "planning": reader["scratch"], "neighbour_cache": self._cache.memory_bytes,
            **({} if self._ids is None else {"edge_ids": self._ids.memory_bytes}),
        }  # fmt: skip
        return held | {"unused": self._memory_bytes - sum(held.values())}

    def close(self) -> None:
        """Wait for the mini-batches under way, then give everything back. May be called more than once."""
        self._here()
        self._under_way.close()
        self._closed = True
        self._reader.close()
        self._offsets, self._row_of_node, self._node_of_row = np.zeros(1, np.int64), NO_MAP, NO_MAP
        self._cache = self._held.cache = NeighbourCache(self.graph, self._offsets)
        if self._ids is not None:
            self._ids.cut(0)

    def __enter__(self) -> StoredSampler:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.store, self.fanouts, self._options)

    def __repr__(self) -> str:
        return (
            f"<StoredSampler of {self.graph!r}, fanouts {list(self.fanouts)}, {self._memory_bytes:,} bytes>"
        )


def _reopen(store: OpenStore, fanouts: Sequence[int], options: dict[str, Any]) -> StoredSampler:
    return StoredSampler(store, fanouts, **options)
