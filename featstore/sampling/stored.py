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

**Memory**, and several mini-batches at once: :mod:`featstore.sampling.disk_sampler`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_fanouts, as_integer
from featstore.base.dtypes import node_dtype
from featstore.base.hashing import batch_key
from featstore.reader.options import check_reading
from featstore.reader.reader import QUEUE_DEPTH
from featstore.sampling.cache import NO_MAP, NeighbourCache
from featstore.sampling.disk_sampler import DiskSampler, SamplerStats
from featstore.sampling.edge_ids import FINDING_BYTES
from featstore.sampling.hops import Hops, HopSampler
from featstore.sampling.lists_on_disk import ListsOnDisk
from featstore.sampling.neighbors import SampledSubgraph, checked_seeds
from featstore.sampling.picking import enter_hop, seed_table, table_size
from featstore.sampling.stored_hops import StoredHops
from featstore.sampling.under_way import Scratch
from featstore.storage.relations import graph_of
from featstore.storage.store import as_store

if TYPE_CHECKING:
    from featstore.errors import FormatError
    from featstore.storage.store import OpenStore

__all__ = ["SamplerStats", "StoredSampler"]


class StoredSampler(DiskSampler, HopSampler):
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
        as_store(store)
        check_reading(engine, queue_depth, verify, threads=threads)
        self.graph = graph_of(store, graph)
        reading: dict[str, Any] = {
            "memory": memory, "engine": engine, "queue_depth": queue_depth, "verify": verify,
            "threads": threads,
        }  # fmt: skip
        options = {**reading, "seed": seed, "graph": graph, "edge_ids": edge_ids}
        lists, table = ListsOnDisk(self.graph, edge_ids), self.graph.table
        super().__init__(
            store, [lists], {table.name: table}, **reading, given=((store, self.fanouts), options)
        )

    @property
    def node_count(self) -> int:
        """Number of nodes of the graph."""
        return self.graph.table.rows

    @property
    def _cache(self) -> NeighbourCache:
        return self._lists[0].cache

    @property
    def _offsets(self) -> NDArray[np.int64]:
        return self._lists[0].offsets

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
        self._here()
        key = batch_key(self.seed, as_integer(epoch, "epoch"), as_integer(batch_index, "batch_index"))
        made: SampledSubgraph = self._made(node, key)
        return made

    def _sample(self, seeds: NDArray[np.int64], key: int, scratch: Scratch) -> SampledSubgraph:
        dtype, lists, table = node_dtype(self.node_count), self._lists[0], self.graph.table.name
        scratch.reserve(dtype.itemsize * table_size(len(seeds)) + 16 * len(seeds), "begin this mini-batch")
        rows = self._rows_of(table, seeds)
        hops = StoredHops(rows, seed_table(rows, seeds, dtype), scratch)
        self._go(hops, lists.offsets, self.graph.edges, key)
        hops.slots, rows = NO_MAP, hops.nodes[: sum(hops.counts)]
        joined, ids = hops.joined(), None
        if lists.ids is not None:
            edges = joined["edge_id"]
            scratch.reserve(FINDING_BYTES * len(edges), "find the numbers of its edges")
            ids = lists.ids.of(self._reader, edges)
        node = self._nodes_of(table, rows)
        self._count_batch(hops.reading)
        return SampledSubgraph(node=node, **joined, e_id=ids)

    def _fill(
        self, hops: Hops, begin: int, end: int, fanout: int, key: np.uint64, picks: NDArray[np.int64],
        row: NDArray[np.int64], col: NDArray[np.int64], edge: NDArray[np.int64],
    ) -> int:  # fmt: skip
        assert isinstance(hops, StoredHops)
        lists, reading = self._lists[0], hops.reading
        node_of_row = self._maps[self.graph.table.name][1]
        misses = lists.pick(node_of_row, hops.nodes, begin, end, fanout, False, key, picks, row, col, edge)
        reading.asked, reading.cached = reading.asked + len(edge), reading.cached + len(edge) - misses
        if misses:
            self._read(hops, row, edge, misses)
        found = int(enter_hop(hops.slots, hops.nodes, end, row, self.node_count))
        if found < 0:
            raise lists.bad_source(-found - 1, row, edge)
        return found

    def _bad_offsets(self, node: int) -> FormatError:
        return self._lists[0].bad_offsets(node)

    def _read(self, hops: StoredHops, row: NDArray[np.int64], edge: NDArray[np.int64], misses: int) -> None:
        """Read the neighbours that the cache did not hold: the negative ones in ``row``."""
        last = len(hops.row) == len(self.fanouts) - 1
        self._lists[0].read(hops.reading, self._reader, row, edge, misses, last=last)

    def _reserve_hop(self, hops: Hops, hop: int, nodes_max: int, edges: int, picks: int) -> None:
        assert isinstance(hops, StoredHops)
        hops.reserve(hop, nodes_max, edges, picks, self.graph.entry.sources.row_bytes)

    def __repr__(self) -> str:
        return (
            f"<StoredSampler of {self.graph!r}, fanouts {list(self.fanouts)}, {self._memory_bytes:,} bytes>"
        )
