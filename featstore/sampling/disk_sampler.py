"""What samplers that read lists from a store have in common: one reader over the tables of all their graphs,
one budget for it, for what is held in memory, and for the scratch of several mini-batches under way.

**Memory** is one budget for the offsets (8 bytes a row), the maps, what the reader takes, the scratch of
mini-batches and the cache. What one needs is known at each of its hops before it is taken: when that is more
than is left, neighbours leave the cache for good; when even that is not enough, a BudgetError tells what is.
The mini-batch that comes out is the caller's and comes on top. Of several graphs those with the fewest bytes
are held first: a hop asks each for about as many edges, so that a byte of a small one serves more of them.
Times of nodes are held whole, 8 bytes a node, and as much again where rows are not in the order of the ids.

**Several at once.** Threads that ask at the same time have their mini-batches made at the same time, as many
as there is room for (:mod:`featstore.sampling.under_way`): the device reads for one while others compute.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from featstore.base.dtypes import node_dtype
from featstore.errors import BudgetError, ClosedError
from featstore.plan.budget import Budget
from featstore.reader.lookup import table_need
from featstore.reader.reader import Reader
from featstore.reader.report import ReaderStats
from featstore.sampling.cache import NO_MAP, NeighbourCache
from featstore.sampling.edge_ids import FINDING_BYTES
from featstore.sampling.first_values import FirstValues
from featstore.sampling.growing import Grown, Relation
from featstore.sampling.growing_stored import GrowingOnDisk
from featstore.sampling.lists_on_disk import lists_with
from featstore.sampling.options import SamplingOptions, by_key, checked_times
from featstore.sampling.pages import load_page_kernels
from featstore.sampling.picking import table_size
from featstore.sampling.stored_hops import HopPages
from featstore.sampling.under_way import HeldInMemory, MadeAgain, Scratch, UnderWayNow
from featstore.units import parse_bytes

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore, StoredGraph, Table

#: Scratch that is kept free of the cache from the beginning.
SCRATCH_BYTES_MIN = 2 * 2**20
REVERSING_BYTES = 100  # of each edge and each reverse, while they are sorted

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


class DiskSampler(ABC):
    """Samples over the lists of ``graphs``, one for each of ``relations``, whose nodes are rows of
    ``tables``, within ``memory``. ``options``: weights and times of edges are
    :data:`featstore.sampling.options.KEPT`. ``numbered``: edges have their numbers, see
    :func:`~featstore.sampling.edge_ids.wants_edge_ids`. ``given``: what a pickle makes it of again, the
    arguments and the options.

    A context manager; safe to use from several threads; survives fork, and reopens when it is pickled, like a
    reader. Raises BudgetError, CorruptionError, DeviceError, FormatError.
    """

    def __init__(
        self, store: OpenStore, graphs: Sequence[StoredGraph], relations: Sequence[Relation],
        tables: Mapping[str, Table], *, options: SamplingOptions, numbered: bool | None,
        memory: int | str, engine: str, queue_depth: int, verify: bool,
        threads: int | None, given: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:  # fmt: skip
        self.store, self.options, self._given = store, options, given
        self._relations, self._rows = list(relations), {name: one.rows for name, one in tables.items()}
        node_times = {
            name: checked_times(one, self._rows[name], "node_times", "nodes")
            for name, one in by_key(options.node_times, list(tables), "node_times").items()
        }
        self._lists = lists = lists_with(options, graphs, node_times, numbered)
        self._memory_bytes = parse_bytes(memory, "memory")
        self._map_bytes = sum(map(_map_bytes, tables.values()))
        self._time_bytes = sum(
            times.nbytes * (1 if tables[name].entry.order.node_of_row is None else 2)
            for name, times in node_times.items()
        )
        self._held_bytes = self._map_bytes + self._time_bytes + sum(one.offsets_bytes for one in lists)
        names = [name for one in lists for name in one.tables]
        self._needs = [table_need(store.table(name), verify) for name in names]
        smallest = self._smallest(SCRATCH_BYTES_MIN)
        if self._memory_bytes < smallest:
            raise BudgetError(
                smallest, self._memory_bytes, f"sample from {self._whose()} (offsets, maps, reading, scratch)"
            )
        #: By table: row_of_node, node_of_row; both empty where row = node id.
        self._maps = {name: table.maps() or (NO_MAP, NO_MAP) for name, table in tables.items()}
        #: By type of nodes, those of each row.
        self._node_times = {
            name: times if len(self._maps[name][1]) == 0 else times[self._maps[name][1]]
            for name, times in node_times.items()
        }
        # A reader as small as can be, where all neighbours fit beside it and beside no other: unless a large
        # mini-batch takes their room, there is nothing to read.
        left = self._memory_bytes - self._smallest(0)
        usual = Budget.split(self._memory_bytes - self._held_bytes, self._needs).tier_bytes
        squeezed = usual < sum(one.whole_bytes for one in lists) + SCRATCH_BYTES_MIN <= left
        self._reader = Reader(
            store,
            memory=self._memory_bytes - self._held_bytes,
            static=None,
            static_memory=left if squeezed else None,
            tables=names,
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

    def _whose(self) -> str:
        """Whose lists, in a message."""
        return "this graph" if len(self._lists) == 1 else "these graphs"

    def _open(self) -> None:
        """Fill what is held in memory, and load all kernels: a child forked while numba holds its lock could
        never."""
        # the reader has no tiers: scratch and cache share it
        self._free_bytes = self._reader.budget.tier_bytes
        for one, relation in zip(self._lists, self._relations, strict=True):
            one.open(self._reader)
            if one.by_node_times:
                one.node_times = self._node_times[relation.source]
        ordered = sorted(self._lists, key=lambda one: one.whole_bytes)
        caches, values = [one.cache for one in ordered], [part for one in ordered for part in one.values]
        room_bytes = self._free_bytes - SCRATCH_BYTES_MIN
        parts: list[NeighbourCache | FirstValues] = [*caches, *values]
        for part in parts:
            part.fill(self._reader, room_bytes)
            room_bytes -= part.memory_bytes
        self._held, given = HeldInMemory(parts), self._memory_bytes
        room = self._held, self._free_bytes, SCRATCH_BYTES_MIN, given, self._smallest
        self._under_way = UnderWayNow(*room)
        self._start_process()
        for dtype in {cache.first.dtype for cache in caches}:
            load_page_kernels(dtype)
        self._made({}, 0, None)
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
        if self._closed:
            raise ClosedError("the sampler is closed; make another with store.sampler()")
        self._renewed()

    def _renewed(self) -> None:
        if self._pid != os.getpid():  # after a fork: a thread of the parent may have held the lock
            with _renewing:
                if self._pid != os.getpid():
                    self._start_process()

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

    @property
    def least_bytes(self) -> int:
        """The budget for mini-batches half as large again as the largest so far."""
        return self._smallest(self._under_way.most_bytes * 3 // 2)

    # Sampling.

    @abstractmethod
    def sample(self, seeds: NDArray[Any], batch_index: int = 0, *, epoch: int = 0) -> Any:
        """The mini-batch around ``seeds``."""

    @abstractmethod
    def _result(self, found: Grown) -> Any:
        """What was found, as a mini-batch."""

    def with_memory(self, memory: int | str) -> Self:
        """The same sampler within another budget, opened anew."""
        arguments, options = self._given
        return type(self)(*arguments, **options | {"memory": memory})

    def _made(
        self, seeds: Mapping[str, NDArray[np.int64]], key: int, times: Mapping[str, NDArray[Any]] | None
    ) -> Any:
        """A mini-batch around seeds by type, made beside others, or alone where there is no room beside
        them."""
        alone = False
        while True:
            scratch = Scratch(self._under_way)
            try:
                self._under_way.begin(scratch, alone)
                return self._sample(seeds, key, times, scratch)
            except MadeAgain:
                alone = True
            finally:
                self._under_way.end(scratch)

    def _sample(
        self, seeds: Mapping[str, NDArray[np.int64]], key: int, times: Mapping[str, NDArray[Any]] | None,
        scratch: Scratch,
    ) -> Any:  # fmt: skip
        """The mini-batch around checked seeds. Raises MadeAgain."""
        begun = dict.fromkeys(self._rows, 0) | {name: len(one) for name, one in seeds.items()}
        tables_bytes = sum(8 * table_size(count) for count in begun.values())
        scratch.reserve(tables_bytes + 64 * sum(begun.values()), "begin this mini-batch")
        node_of_row = {name: maps[1] for name, maps in self._maps.items()}
        growing = GrowingOnDisk(
            self._rows, self._relations, self.options, self._lists, node_of_row, self._reader, scratch, seeds,
            self._node_times,
        )  # fmt: skip
        rows = {name: self._rows_of(name, one) for name, one in seeds.items()}
        found = growing.sample(rows, key, times)
        found.slots.clear()
        self._reserve_result(found, scratch)
        self._count_batch(growing.reading)
        return self._result(found)

    def _reserve_result(self, found: Grown, scratch: Scratch) -> None:
        """Have scratch for what becomes the result: rows beside nodes, and of one relation after the other
        the parts of its hops beside the whole, the numbers of its edges, and their reverse."""
        most = 2 * sum(nodes.nbytes for nodes in found.nodes.values())
        most += sum(trees.nbytes for trees in found.trees.values())
        edges = sorted(sum(len(part[2]) for part in parts) for parts in found.parts)
        most += (8 if all(one.ids is None for one in self._lists) else FINDING_BYTES) * edges[-1]
        if self.options.subgraph == "bidirectional":
            most += REVERSING_BYTES * 2 * sum(edges[-2:])
        scratch.reserve(most, "find the numbers of its edges")

    def _count_batch(self, reading: HopPages) -> None:
        with self._under_way.lock:
            self._batches += 1
            self._edges_asked += reading.asked
            self._edges_cached += reading.cached

    def _rows_of(self, table: str, nodes: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64: the rows of nodes; the nodes themselves where these are the same."""
        row_of_node = self._maps[table][0]
        return nodes if len(row_of_node) == 0 else row_of_node[nodes].astype(np.int64)

    def _nodes_of(self, table: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64, an array of its own: the nodes of rows."""
        node_of_row = self._maps[table][1]
        return rows.copy() if len(node_of_row) == 0 else node_of_row[rows].astype(np.int64, copy=False)

    # Explaining, ending.

    def stats(self) -> SamplerStats:
        """What has been counted since the sampler was opened."""
        self._here()
        read = self._reader.stats().since(self._before)
        return SamplerStats(self._batches, self._edges_asked, self._edges_cached, read.reads, read.bytes_read)

    def memory(self) -> dict[str, int]:
        """Bytes of the budget, by use: what is held, and ``unused``, of which the scratch of a mini-batch is
        taken."""
        self._here()
        reader = self._reader.memory()
        ids = [one.ids for one in self._lists if one.ids is not None]
        values = [part for one in self._lists for part in (one.weights, one.times) if part is not None]
        held = {
            "offsets": sum(one.offsets.nbytes for one in self._lists), "maps": self._map_bytes,
            "page_checksums": reader["page_checksums"], "staging": reader["staging"],
            "planning": reader["scratch"],
            "neighbour_cache": sum(one.cache.memory_bytes for one in self._lists),
            **({"edge_ids": sum(one.memory_bytes for one in ids)} if ids else {}),
            **({"edge_values": sum(one.memory_bytes for one in values)} if values else {}),
            **({"node_times": self._time_bytes} if self._time_bytes else {}),
        }  # fmt: skip
        return held | {"unused": self._memory_bytes - sum(held.values())}

    def close(self) -> None:
        """Wait for the mini-batches under way, then give everything back. May be called more than once."""
        self._renewed()
        self._under_way.close()
        self._closed = True
        self._reader.close()
        self._maps = dict.fromkeys(self._maps, (NO_MAP, NO_MAP))
        self._held.parts, self._node_times = [], {}
        for one in self._lists:
            one.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (type(self), *self._given)


def _reopen(sampler: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return sampler(*arguments, **options)


def _map_bytes(table: Table) -> int:
    order, item = table.entry.order, node_dtype(table.rows).itemsize
    return sum(0 if one is None else table.rows * item for one in (order.row_of_node, order.node_of_row))
