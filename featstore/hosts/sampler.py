"""Sampling where topology is split, too: each host has the lists of its own nodes.

Hop by hop the neighbours of a mini-batch's nodes come from who owns these
(:mod:`featstore.hosts.neighbours`); then the hop is complete, and the next one begins. Mini-batches are those
that :class:`featstore.sampling.stored.StoredSampler` samples from the whole topology, edge by edge; of edge
types those of :class:`featstore.sampling.typed_stored.TypedStoredSampler`.

**Memory** is one budget for the scratch of mini-batches: neighbours under way and the hop that they become. A
mini-batch that needs more is a BudgetError. Lists, and what serves other hosts, are of the store.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_fanouts, as_integer
from featstore.base.dtypes import node_dtype
from featstore.base.hashing import batch_key
from featstore.base.process import OneProcess
from featstore.errors import FormatError
from featstore.hosts.neighbours import ASKING_BYTES, Neighbours
from featstore.sampling.cache import NO_MAP
from featstore.sampling.hops import Hops, HopSampler
from featstore.sampling.neighbors import SampledSubgraph, checked_seeds
from featstore.sampling.picking import enter_hop, seed_table, table_size
from featstore.storage.relations import graph_of
from featstore.units import parse_bytes

if TYPE_CHECKING:
    from featstore.hosts.split_store import WholeStore

_NO_OFFSETS = np.zeros(1, np.int64)


@dataclass(frozen=True)
class HostsSamplerStats:
    """Counts of a sampler. ``edges_asked``: edges of the mini-batches. ``nodes_remote``: nodes whose
    neighbours were asked of other hosts. ``exchanges``: times that other hosts were waited for."""

    batches: int = 0
    edges_asked: int = 0
    nodes_remote: int = 0
    exchanges: int = 0


class OverHosts(OneProcess, ABC):
    """What samplers over the lists of several hosts have in common: whom they ask, and what they count."""

    called = "the sampler of a split store"

    def __init__(self, store: WholeStore, seed: int, neighbours: Neighbours) -> None:
        super().__init__()
        self.store, self.seed, self._neighbours = store, as_integer(seed, "seed"), neighbours
        self._lock = threading.Lock()
        self._batches = self._edges_asked = 0

    @property
    @abstractmethod
    def node_count(self) -> int:
        """Number of nodes that may be seeds, of all hosts."""

    @abstractmethod
    def check_room(self, seeds: int) -> None:
        """Raises BudgetError where the memory cannot hold even the beginning of a mini-batch of so many
        seeds."""

    def _begun(self, seeds: NDArray[Any], batch_index: int, epoch: int) -> tuple[NDArray[np.int64], int]:
        """The seeds of a mini-batch, checked, and its key."""
        self.check_open()
        self.store.check_open()
        nodes = checked_seeds(seeds, self.node_count)
        return nodes, batch_key(self.seed, as_integer(epoch, "epoch"), as_integer(batch_index, "batch_index"))

    def stats(self) -> HostsSamplerStats:
        """What has been counted so far."""
        of = self._neighbours
        return HostsSamplerStats(self._batches, self._edges_asked, of.nodes_remote, of.exchanges)

    def close(self) -> None:
        """Nothing is sampled any more. May be called more than once."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class HostsSampler(OverHosts, HopSampler):
    """Uniform neighbour sampler without replacement over a graph whose lists are on several hosts; made by
    :meth:`featstore.SplitStore.sampler`. A context manager; safe to use from several threads, which take
    turns. It belongs to the process that opened the store.

    ``memory``: of mini-batches under way, bytes or ``"256MiB"``; finished ones are the caller's. Raises
    BudgetError, SourceError for fan-outs that no message could hold, PeerError where a host is gone.
    """

    def __init__(
        self, store: WholeStore, fanouts: Sequence[int], *, memory: int | str, seed: int = 0,
        graph: str | None = None,
    ) -> None:  # fmt: skip
        self.fanouts, self.graph = as_fanouts(fanouts), graph_of(store, graph)
        memory_bytes = parse_bytes(memory, "memory")
        super().__init__(store, seed, Neighbours(store, [self.graph], self.fanouts, memory_bytes))
        self._item = node_dtype(self.node_count)

    @property
    def node_count(self) -> int:
        """Number of nodes of the whole graph."""
        return self.graph.table.rows

    def sample(self, seeds: NDArray[Any], batch_index: int = 0, *, epoch: int = 0) -> SampledSubgraph:
        """The mini-batch around ``seeds`` (node ids, any integer dtype [b], no duplicates), whoever owns
        them: that of :meth:`featstore.sampling.stored.StoredSampler.sample` over the store that was split,
        ``edge_id`` included.

        Raises IdError, BudgetError, PeerError, CorruptionError, DeviceError, FormatError, ClosedError.
        """
        nodes, key = self._begun(seeds, batch_index, epoch)
        with self._lock:
            self.check_room(len(nodes))
            hops = Hops(nodes, seed_table(nodes, nodes, self._item))
            self._go(hops, _NO_OFFSETS, 0, key)
            self._batches, self._edges_asked = self._batches + 1, self._edges_asked + hops.edge_count
            hops.slots, count = NO_MAP, sum(hops.counts)
            return SampledSubgraph(node=hops.nodes[:count].copy(), **hops.joined())

    def check_room(self, seeds: int) -> None:
        of = self._neighbours
        of.reserve(self._item.itemsize * table_size(seeds) + 16 * seeds, "begin the sampling")
        of.reserve(ASKING_BYTES * seeds, "ask for the neighbours of a hop")

    # A hop.

    def _count(
        self, hops: Hops, offsets: NDArray[np.int64], edge_total: int, begin: int, end: int, fanout: int,
        key: np.uint64,
    ) -> tuple[int, int]:  # fmt: skip
        """Have the neighbours of a hop, from all hosts."""
        self._hop = hop = self._neighbours.hop(self.graph.name, hops.nodes[begin:end], fanout, key)
        self._neighbours.have([hop])
        return hop.edges, hop.degree_max

    def _fill(
        self, hops: Hops, begin: int, end: int, fanout: int, key: np.uint64, picks: NDArray[np.int64],
        row: NDArray[np.int64], col: NDArray[np.int64], edge: NDArray[np.int64],
    ) -> int:  # fmt: skip
        hop = self._hop
        hop.lay_out(begin, picks, row, col, edge)
        del self._hop
        hop.come.clear()
        found = int(enter_hop(hops.slots, hops.nodes, end, row, self.node_count))
        if found < 0:
            place = -found - 1
            raise hop.no_node(row[place], hops.nodes[col[place]], edge[place])
        return found

    def _bad_offsets(self, node: int) -> FormatError:  # the owners look at them
        return FormatError(f"the list of node {node} cannot be")

    def _reserve_hop(self, hops: Hops, hop: int, nodes_max: int, edges: int, picks: int) -> None:
        room_bytes = 8 * (nodes_max + sum(hops.counts)) + table_size(nodes_max) * hops.slots.itemsize * 3 // 2
        come_bytes = self._hop.held_bytes + 16 * table_size(max(1, picks))
        joining_bytes = 8 * (edges + hops.edge_count)
        self._neighbours.reserve(room_bytes + max(come_bytes, joining_bytes), f"sample hop {hop + 1}")

    def __repr__(self) -> str:
        return f"<HostsSampler of {self.graph!r}, fanouts {list(self.fanouts)}>"
