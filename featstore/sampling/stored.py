"""Sampling from disk: the neighbours of a mini-batch, read from the graph in the store.

:class:`StoredSampler` gives, for the same seed, epoch, batch and seeds, the very mini-batches that
:class:`featstore.sampling.neighbors.NeighborSampler` gives over the same graph in memory. It can, because
randomness is counted there: which places of a list are picked follows from the node and the length of the
list, not from what the list holds. So each hop first picks the positions of its edges, from offsets in
memory, and then reads just those, as single rows of the table ``GRAPH/sources``, all in one request. The
reader merges the positions that share a page, reads through short gaps and keeps its queue full; a short list
is thus read whole, and of a hub with a million neighbours only the pages of the picked ones.

**Rows inside, node ids outside.** Lists hold rows, so sampling goes from row to row; ``row_of_node`` is asked
for the seeds, ``node_of_row`` for the hash of each node that asks and for the nodes that come out.

**The neighbour cache** holds the lists of the most wanted hubs, which the store has side by side a second
time (``GRAPH/hubs``): a bitmap with ranks (:mod:`featstore.tiers.static`) tells who is in it, and it is
filled by one sequential read. (Ginex, VLDB 2022, too keeps the lists that are asked most.) Expect no wonders
of it: a hub is asked often, but of its long list only ``fanout`` places each time, so on an undirected graph
a cache of a tenth of all lists serves about a tenth of the edges, and less of large mini-batches, which ask
each hub once. Where the fan-out is -1 it serves more than its share.

**Memory** is one budget for the offsets (8 bytes a row), the two maps, what the reader takes, the scratch of
a mini-batch and the cache. What a mini-batch needs is known at each of its hops before it is taken: when it
needs more than is left, the least wanted hubs leave the cache for good, so the cache ends as large as the
largest mini-batch allows; when even that is not enough, a BudgetError tells what is. The mini-batch that
comes out is the caller's and comes on top.

Mini-batches are made one at a time, whatever the number of threads that ask: the reads of one hop fill the
device's queue.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_fanouts, as_integer
from featstore.base.bitmap import set_bits
from featstore.base.checks import check_offsets, check_range
from featstore.base.dtypes import node_dtype
from featstore.base.hashing import batch_key, hop_key
from featstore.errors import BudgetError, ClosedError, FormatError
from featstore.plan.budget import Budget
from featstore.reader.lookup import table_need
from featstore.reader.options import check_reading
from featstore.reader.reader import QUEUE_DEPTH, Reader
from featstore.reader.report import ReaderStats
from featstore.sampling.neighbors import (
    MiniBatch,
    _table_size,
    checked_seeds,
    empty_picks,
    enter_hop,
    hop_size,
    make_room,
    pick_hop,
    seed_table,
)
from featstore.storage.relations import graph_of
from featstore.storage.store import as_store
from featstore.tiers.static import MEMBERS_MAX, StaticRows
from featstore.units import parse_bytes

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore, StoredGraph

__all__ = ["SamplerStats", "StoredSampler"]

#: Scratch that is kept free of the cache from the beginning.
SCRATCH_BYTES_MIN = 2 * 2**20
_HUB_BYTES = 64  # of the cache for each hub, beside its list, also while the index is made
_LOADING_BYTES = 5 * 2**20  # what loading an array takes besides the array
_NO_MAP = np.empty(0, np.int32)

_renewing = threading.Lock()  # held while a forked child makes its own locks


def _renew_lock() -> None:
    global _renewing
    _renewing = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


@dataclass(frozen=True)
class HubIndex:
    """Which lists a cache holds and where: ``rows``, the most wanted first; ``bits`` and ``ranks`` find a row
    among them in ascending order, and the list of the i-th in that order begins at ``starts[i]``."""

    rows: NDArray[Any]
    bits: NDArray[np.uint64]
    ranks: NDArray[np.int32]
    starts: NDArray[np.int64]


_NO_HUBS = HubIndex(_NO_MAP, np.empty(0, np.uint64), np.empty(0, np.int32), np.empty(0, np.int64))


class HubCache:
    """The lists of the most wanted hubs, one after the other in ``lists``. It is filled once and can only
    become smaller."""

    def __init__(self, graph: StoredGraph, offsets: NDArray[np.int64]) -> None:
        self._graph = graph
        self._offsets = offsets
        # while it is made anew, there are two
        self._index_bytes = 2 * StaticRows.index_bytes(graph.table.rows)
        self.lists = np.empty(0, node_dtype(graph.table.rows))
        self.index = _NO_HUBS

    @property
    def memory_bytes(self) -> int:
        """What the cache takes, also while it is being cut."""
        hubs = len(self.index.rows)
        return self.lists.nbytes + hubs * _HUB_BYTES + self._index_bytes if hubs else 0

    def fill(self, reader: Reader, room_bytes: int) -> None:
        """Take the most wanted hubs, as many as fit into ``room_bytes``. Raises CorruptionError, DeviceError,
        FormatError."""
        hubs = self._graph.entry.hubs
        if hubs is None:
            return
        loading_bytes = min(_LOADING_BYTES, 8 * (self._graph.hubs + 1))
        count_max = min(
            self._graph.hubs, MEMBERS_MAX, (room_bytes - self._index_bytes - loading_bytes) // _HUB_BYTES
        )
        if count_max <= 0:
            return
        store, name = reader.store, self._graph.name
        ends = store.load(hubs.offsets, count_max + 1)
        if ends[-1] > hubs.sources.rows:
            raise FormatError(
                f"the offsets of the hubs of graph {name!r} contradict themselves; pack the store again"
            )
        check_offsets(ends, 0, int(ends[-1]), f"the offsets of the hubs of graph {name!r} of {store.path}")
        count = self._fitting(ends, room_bytes)
        rows = store.load(hubs.rows, count)
        check_range(rows, self._graph.table.rows, f"a hub of graph {name!r} of {store.path}")
        if not np.array_equal(self._ends(rows), ends[: count + 1]):
            raise FormatError(
                f"the hubs of graph {name!r} have lists of another length there; pack the store again"
            )
        ends = ends[: count + 1].copy()
        index = self._index(rows)
        lists = np.empty(ends[-1], self.lists.dtype)
        table = f"{name}/hubs"
        reader.read_runs({table: [(0, len(lists))]}, out={table: lists})
        self.lists, self.index = lists, index

    def cut(self, room_bytes: int) -> None:
        """Keep the most wanted hubs that fit into ``room_bytes``."""
        rows = self.index.rows
        ends = self._ends(rows)
        count = self._fitting(ends, room_bytes)
        # The index first: whatever interrupts, it never names a list that is gone.
        self.index = self._index(rows[:count].copy())
        self.lists.resize(ends[count], refcheck=False)

    def _fitting(self, ends: NDArray[np.int64], room_bytes: int) -> int:
        """How many hubs fit, whose lists end at ``ends[1:]``."""
        cost = np.arange(len(ends)) * _HUB_BYTES
        cost += ends * self.lists.itemsize
        return max(0, int(np.searchsorted(cost, room_bytes - self._index_bytes, side="right")) - 1)

    def _ends(self, rows: NDArray[Any]) -> NDArray[np.int64]:
        """int64 [rows + 1]: where the list of each row begins and ends, when they stand one after the
        other."""
        ends = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(self._offsets[rows + 1] - self._offsets[rows], out=ends[1:])
        return ends

    def _index(self, rows: NDArray[Any]) -> HubIndex:
        if len(rows) == 0:
            return _NO_HUBS
        words = -(-self._graph.table.rows // 64)
        bits, ranks = np.zeros(words, np.uint64), np.zeros(words, np.int32)
        if set_bits(rows.astype(np.int64), bits, ranks) != len(rows):
            raise FormatError(f"a hub of graph {self._graph.name!r} stands there twice; pack the store again")
        return HubIndex(rows, bits, ranks, self._ends(rows)[np.argsort(rows)])


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


class StoredSampler:
    """Uniform neighbour sampler without replacement over a graph in a store; made by
    :meth:`featstore.Store.sampler`.

    A context manager; safe to use from several threads; survives fork, and reopens when it is pickled, like a
    reader.

    Args:
        store: the open store.
        fanouts: neighbours per node and hop, from the seeds outwards; -1 takes all.
        memory: budget for all that the sampler holds, bytes or ``"2GiB"``. Mini-batches are the caller's and
            come on top.
        seed: any integer.
        graph: the name of a graph of the store; needed where it has several, or where a graph may be one
            relation of several: beside tables of other types of nodes or edges.
        engine, queue_depth, verify: as for :class:`featstore.reader.reader.Reader`.

    Raises BudgetError, CorruptionError, DeviceError, FormatError; SourceError for fan-outs that cannot be
    used and for a store without a graph; KeyError for a graph that it has not.
    """

    def __init__(
        self, store: OpenStore, fanouts: Sequence[int], *, memory: int | str, seed: int = 0,
        graph: str | None = None, engine: str = "auto", queue_depth: int = QUEUE_DEPTH, verify: bool = True,
    ) -> None:  # fmt: skip
        self.fanouts = as_fanouts(fanouts)
        self.seed = as_integer(seed, "seed")
        self.store = as_store(store)
        check_reading(engine, queue_depth, verify)
        self.graph = graph_of(store, graph)
        self._options = {
            "memory": memory,
            "seed": seed,
            "graph": graph,
            "engine": engine,
            "queue_depth": queue_depth,
            "verify": verify,
        }
        self._sources, self._hubs, self._offsets_table = (
            f"{self.graph.name}/{part}" for part in ("sources", "hubs", "offsets")
        )
        names = [self._sources, self._offsets_table] + [self._hubs] * (self.graph.entry.hubs is not None)
        table, nodes = self.graph.table, self.graph.table.rows
        self._memory_bytes = parse_bytes(memory, "memory")
        self._map_bytes = sum(
            0 if entry is None else nodes * node_dtype(nodes).itemsize
            for entry in (table.entry.order.row_of_node, table.entry.order.node_of_row)
        )
        self._held_bytes = self._map_bytes + 8 * (nodes + 1)
        self._needs = [table_need(store.table(name), verify) for name in names]
        smallest = self._smallest(SCRATCH_BYTES_MIN)
        if self._memory_bytes < smallest:
            raise BudgetError(
                smallest, self._memory_bytes, "sample from this graph (offsets, maps, reading, scratch)"
            )
        self._row_of_node: NDArray[Any]
        self._node_of_row: NDArray[Any]
        self._row_of_node, self._node_of_row = table.maps() or (_NO_MAP, _NO_MAP)
        self._reader = Reader(
            store,
            memory=self._memory_bytes - self._held_bytes,
            static=None,
            tables=names,
            engine=engine,
            queue_depth=queue_depth,
            verify=verify,
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
        self._offsets: NDArray[np.int64] = self._reader.read_runs({self._offsets_table: [(0, nodes + 1)]})[
            self._offsets_table
        ]
        check_offsets(
            self._offsets,
            0,
            self.graph.edges,
            f"the offsets of graph {self.graph.name!r} of {self.store.path}",
        )
        self._cache = HubCache(self.graph, self._offsets)
        self._cache.fill(self._reader, self._free_bytes - SCRATCH_BYTES_MIN)
        self._start_process()
        self._sample(np.empty(0, np.int64), 0)
        self._start_process()
        self._before = self._reader.stats()

    def _start_process(self) -> None:
        """Make what belongs to this process: the lock, and counts from zero, as the reader's are after a
        fork."""
        self._lock = threading.Lock()
        self._batches = self._edges_asked = self._edges_cached = 0
        self._before = ReaderStats()
        self._pid = os.getpid()

    def _own_lock(self) -> threading.Lock:
        if self._pid != os.getpid():  # after a fork: a thread of the parent may have held the lock
            with _renewing:
                if self._pid != os.getpid():
                    self._start_process()
        return self._lock

    @property
    def node_count(self) -> int:
        """Number of nodes of the graph."""
        return self.graph.table.rows

    @property
    def engine(self) -> str:
        """The engine that reads."""
        return self._reader.engine.name

    def _smallest(self, free_bytes: int) -> int:
        """The smallest budget that leaves so much for scratch and cache."""
        return self._held_bytes + Budget.smallest(self._needs, free_bytes)

    # Sampling.

    def sample(self, seeds: NDArray[Any], batch_index: int = 0, *, epoch: int = 0) -> MiniBatch:
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
            raise ClosedError("the sampler is closed")
        with self._own_lock():
            if self._closed:
                raise ClosedError("the sampler is closed")
            return self._sample(
                node, batch_key(self.seed, as_integer(epoch, "epoch"), as_integer(batch_index, "batch_index"))
            )

    def _sample(self, seeds: NDArray[np.int64], key: int) -> MiniBatch:
        count = len(seeds)
        dtype = node_dtype(self.node_count)
        self._reserve(dtype.itemsize * _table_size(count) + 16 * count, "begin this mini-batch")
        rows = seeds if len(self._row_of_node) == 0 else self._row_of_node[seeds].astype(np.int64)
        walk = _Walk(rows, seed_table(rows, seeds, dtype))
        counts, begin = [count], 0
        for hop, fanout in enumerate(self.fanouts):
            begin, count = count, self._hop(walk, begin, count, hop, fanout, hop_key(key, hop))
            counts.append(count - begin)
        edge_counts = tuple(map(len, walk.edge))
        self._batches += 1
        walk.slots = _NO_MAP
        rows = walk.rows[:count]
        return MiniBatch(
            node=rows.copy()
            if len(self._node_of_row) == 0
            else self._node_of_row[rows].astype(np.int64, copy=False),
            row=_joined(walk.row),
            col=_joined(walk.col),
            edge_id=_joined(walk.edge),
            num_sampled_nodes=tuple(counts),
            num_sampled_edges=edge_counts,
        )

    def _hop(self, walk: _Walk, begin: int, count: int, hop: int, fanout: int, key: np.uint64) -> int:
        """Sample the neighbours of ``walk.rows[begin:count]``; returns the number of rows with those that are
        new."""
        edge_count, degree_max = hop_size(self._offsets, self.graph.edges, walk.rows, begin, count, fanout)
        if edge_count < 0:
            bad = int(walk.rows[-edge_count - 1])
            low, high = self._offsets[bad], self._offsets[bad + 1]
            raise self._contradiction(
                f"the offsets give row {bad} the edges {low:,} to {high:,} of {self.graph.edges:,}"
            )
        bound = min(count + edge_count, self.node_count)
        self._reserve(
            self._hop_bytes(walk, count, bound, edge_count, min(fanout, degree_max)), f"sample hop {hop + 1}"
        )
        walk.rows, walk.slots = make_room(walk.rows, walk.slots, count, bound)
        row, col, edge = (
            np.empty(edge_count, np.int64),
            np.empty(edge_count, np.int64),
            np.empty(edge_count, np.int64),
        )
        hubs = self._cache.index
        misses = pick_hop(
            self._offsets, self._node_of_row, walk.rows, begin, count, fanout, key, hubs.bits, hubs.ranks,
            hubs.starts, self._cache.lists, empty_picks(fanout, degree_max), row, col, edge,
        )  # fmt: skip
        self._edges_asked += edge_count
        self._edges_cached += edge_count - misses
        self._read(row, edge, misses)
        found = int(enter_hop(walk.slots, walk.rows, count, row, self.node_count))
        if found < 0:
            place = -found - 1
            raise self._contradiction(
                f"edge {edge[place]:,} comes from row {row[place]} of {self.node_count:,}"
            )
        walk.row.append(row)
        walk.col.append(col)
        walk.edge.append(edge)
        return found

    def _contradiction(self, what: str) -> FormatError:
        return FormatError(f"graph {self.graph.name!r} of {self.store.path}: {what}; pack the store again")

    def _read(self, row: NDArray[np.int64], edge: NDArray[np.int64], misses: int) -> None:
        """Read the neighbours that the cache did not hold: the negative ones in ``row``."""
        if misses == len(row):
            row[:] = self._reader.read({self._sources: edge})[self._sources]
        elif misses:
            missing = row < 0
            row[missing] = self._reader.read({self._sources: edge[missing]})[self._sources]

    def _hop_bytes(self, walk: _Walk, count: int, bound: int, edge_count: int, picks: int) -> int:
        """What a hop takes beyond what will be the result: at most, whatever the cache holds."""
        neighbour_bytes = self._cache.lists.itemsize
        # The table and the rows grow into new ones; the old ones go afterwards.
        room_bytes = 8 * (bound + count) + _table_size(bound) * walk.slots.itemsize * 3 // 2
        # Missing edges: which they are, their positions, what was read. Later the parts of all hops are
        # joined, one by one.
        reading_bytes = edge_count * (1 + 8 + neighbour_bytes) + 16 * _table_size(max(1, picks))
        joining_bytes = 8 * (edge_count + sum(map(len, walk.edge)))
        return room_bytes + max(reading_bytes, joining_bytes)

    def _reserve(self, scratch_bytes: int, what: str) -> None:
        """Have so much free of the cache. Raises BudgetError."""
        if scratch_bytes > self._free_bytes:
            raise BudgetError(
                self._smallest(scratch_bytes), self._memory_bytes, f"{what} (or pass fewer seeds)"
            )
        if scratch_bytes + self._cache.memory_bytes > self._free_bytes:
            self._cache.cut(self._free_bytes - scratch_bytes)

    # Explaining, ending.

    def stats(self) -> SamplerStats:
        """What has been counted since the sampler was opened."""
        if self._closed:
            raise ClosedError("the sampler is closed")
        self._own_lock()
        read = self._reader.stats().since(self._before)
        return SamplerStats(self._batches, self._edges_asked, self._edges_cached, read.reads, read.bytes_read)

    def memory(self) -> dict[str, int]:
        """Bytes of the budget, by use: what is held, and ``unused``, of which the scratch of a mini-batch is
        taken."""
        if self._closed:
            raise ClosedError("the sampler is closed")
        reader = self._reader.memory()
        held = {
            "offsets": self._offsets.nbytes, "maps": self._map_bytes,
            "page_checksums": reader["page_checksums"], "staging": reader["staging"],
            "planning": reader["scratch"], "neighbour_cache": self._cache.memory_bytes,
        }  # fmt: skip
        return held | {"unused": self._memory_bytes - sum(held.values())}

    def close(self) -> None:
        """Wait for the mini-batch under way, then give everything back. May be called more than once."""
        if not self._closed:
            with self._own_lock():
                self._closed = True
        self._reader.close()
        self._offsets, self._row_of_node, self._node_of_row = np.zeros(1, np.int64), _NO_MAP, _NO_MAP
        self._cache = HubCache(self.graph, self._offsets)

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


@dataclass
class _Walk:
    """A mini-batch under way: its rows with room for more, the table that finds them, and the edges of each
    hop."""

    rows: NDArray[np.int64]
    slots: NDArray[Any]
    row: list[NDArray[np.int64]] = field(default_factory=list)
    col: list[NDArray[np.int64]] = field(default_factory=list)
    edge: list[NDArray[np.int64]] = field(default_factory=list)


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The parts as one array; they are given back."""
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    parts.clear()
    return whole


def _reopen(store: OpenStore, fanouts: Sequence[int], options: dict[str, Any]) -> StoredSampler:
    return StoredSampler(store, fanouts, **options)
