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
from featstore.base.hashing import batch_key
from featstore.reader.options import check_reading
from featstore.reader.reader import QUEUE_DEPTH
from featstore.sampling.cache import NeighbourCache
from featstore.sampling.disk_sampler import DiskSampler, SamplerStats
from featstore.sampling.growing import Grown, Relation
from featstore.sampling.neighbors import SampledSubgraph, as_options, checked_seeds, subgraph_of_one
from featstore.sampling.options import SamplingOptions
from featstore.storage.relations import graph_of
from featstore.storage.store import as_store

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore

_NONE = np.empty(0, np.int64)

__all__ = ["SamplerStats", "StoredSampler"]


class StoredSampler(DiskSampler):
    """Neighbour sampler over a graph in a store, uniform and without replacement unless options say
    otherwise; made by :meth:`featstore.Store.sampler`. A context manager; safe to use from several threads;
    survives fork, and reopens when it is pickled, like a reader.

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
        options: what else there is to say; weights and times of edges are those that the graph keeps,
            :data:`~featstore.sampling.options.KEPT`.
        engine, queue_depth, threads, verify: as for :class:`featstore.reader.reader.Reader`.

    Raises BudgetError, CorruptionError, DeviceError, FormatError; SourceError for impossible fan-outs, and
    a store without a graph, weights or times; KeyError for a graph that it has not.
    """

    def __init__(
        self, store: OpenStore, fanouts: Sequence[int], *, memory: int | str, seed: int = 0,
        graph: str | None = None, engine: str = "auto", queue_depth: int = QUEUE_DEPTH, verify: bool = True,
        threads: int | None = None, edge_ids: bool | None = None, options: SamplingOptions | None = None,
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
        named = {"seed": seed, "graph": graph, "edge_ids": edge_ids, "options": options}
        self._type = self.graph.table.name
        super().__init__(
            store, [self.graph], [Relation(self._type, self._type, _NONE, _NONE, self.fanouts)],
            {self._type: self.graph.table}, options=as_options(options), numbered=edge_ids,
            **reading, given=((store, self.fanouts), reading | named),
        )  # fmt: skip

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

    def sample(
        self, seeds: NDArray[Any], batch_index: int = 0, *, epoch: int = 0,
        seed_times: NDArray[Any] | None = None,
    ) -> SampledSubgraph:  # fmt: skip
        """The mini-batch around ``seeds`` (node ids, any integer dtype [b], no duplicates, unless each has a
        subgraph of its own). ``seed_times``: int64 [b], what neighbours may not be later than; where nodes
        have times, by default the seeds' own.

        The result depends on the graph, the fan-outs, the options, ``seed``, ``epoch``, ``batch_index``,
        ``seeds`` and their times alone and is that of a
        :class:`~featstore.sampling.neighbors.NeighborSampler` over ``store.graphs[...].csc()``, except that
        ``edge_id`` is the position of the edge in the stored ``GRAPH/sources``, whose lists stand in the
        order of the rows.

        Raises IdError for seeds that are no nodes or stand twice, ArgumentError for times that are missing,
        BudgetError where the mini-batch needs more scratch than the budget leaves, CorruptionError,
        DeviceError, FormatError, ClosedError.
        """
        node = checked_seeds(seeds, self.node_count)
        self._here()
        key = batch_key(self.seed, as_integer(epoch, "epoch"), as_integer(batch_index, "batch_index"))
        given = None if seed_times is None else {self._type: seed_times}
        made: SampledSubgraph = self._made({self._type: node}, key, given)
        return made

    def _result(self, found: Grown) -> SampledSubgraph:
        node = self._nodes_of(self._type, found.node(self._type))
        return subgraph_of_one(found, self._type, self.options.subgraph, node=node, numbers=self._ids_of)

    def _ids_of(
        self, node: NDArray[np.int64], col: NDArray[np.int64], edge: NDArray[np.int64]
    ) -> NDArray[np.int64] | None:
        ids = self._lists[0].ids
        return None if ids is None else ids.of(self._reader, edge)

    def __repr__(self) -> str:
        return (
            f"<StoredSampler of {self.graph!r}, fanouts {list(self.fanouts)}, {self._memory_bytes:,} bytes>"
        )
