"""Sampling where topology is split, too: each host has the lists of its own nodes.

Hop by hop the neighbours of a mini-batch's nodes come from who owns these
(:mod:`featstore.hosts.neighbours`), of all relations at once; then the hop is complete, and the next one
begins. Mini-batches are those that :class:`featstore.sampling.stored.StoredSampler` samples from the whole
topology, edge by edge, with the same options; of edge types those of
:class:`featstore.sampling.typed_stored.TypedStoredSampler`.

**Memory** is one budget for the scratch of mini-batches: neighbours under way and the hop that they become. A
mini-batch that needs more is a BudgetError. Lists, and what serves other hosts, are of the store.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_fanouts, as_integer
from featstore.base.hashing import batch_key
from featstore.base.process import OneProcess
from featstore.errors import SourceError
from featstore.hosts.growing import SLOT_BYTES, GrowingOverHosts
from featstore.hosts.neighbours import ASKING_BYTES, Neighbours
from featstore.hosts.questions import Draw
from featstore.sampling.disk_sampler import REVERSING_BYTES
from featstore.sampling.edge_ids import wants_edge_ids
from featstore.sampling.growing import Grown, Relation
from featstore.sampling.lists_on_disk import check_kept, wanted_of
from featstore.sampling.neighbors import SampledSubgraph, as_options, checked_seeds, subgraph_of_one
from featstore.sampling.options import SamplingOptions
from featstore.sampling.picking import table_size
from featstore.storage.relations import graph_of
from featstore.units import parse_bytes

if TYPE_CHECKING:
    from featstore.hosts.split_store import WholeStore
    from featstore.storage.store import StoredGraph

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class HostsSamplerStats:
    """Counts of a sampler. ``edges_asked``: edges of the mini-batches. ``nodes_remote``: nodes whose
    neighbours were asked of other hosts. ``exchanges``: times that other hosts were waited for."""

    batches: int = 0
    edges_asked: int = 0
    nodes_remote: int = 0
    exchanges: int = 0


def draws_of(
    graphs: Sequence[StoredGraph], options: SamplingOptions, edge_ids: bool | None
) -> list[tuple[StoredGraph, Draw]]:
    """How owners draw from the lists of graphs. Raises ArgumentError, SourceError for what they cannot."""
    if options.subgraph == "induced":
        raise SourceError(
            "subgraph_type='induced' looks at whole lists, which owners keep for themselves: take "
            "'directional' or 'bidirectional', or split with split_topology=False"
        )
    if options.node_times is not None:
        raise SourceError(
            "times of nodes are those of neighbours, whom others own: where topology is split, owners go by "
            "times of edges (pack with edge_times=, and say input_time=); or split with split_topology=False"
        )
    found = []
    for graph, weights, times in wanted_of(options, graphs):
        check_kept(graph, weights=weights, times=times)
        numbers = wants_edge_ids(graph, edge_ids)
        found.append((graph, Draw.of(options, weights=weights, times=times, numbers=numbers)))
    return found


class OverHosts(OneProcess, ABC):
    """What samplers over the lists of several hosts have in common: whom they ask, how mini-batches grow, and
    what they count. ``types``: nodes of each."""

    called = "the sampler of a split store"

    def __init__(
        self, store: WholeStore, seed: int, types: Mapping[str, int], relations: Sequence[Relation],
        graphs: Sequence[StoredGraph], memory: int | str, options: SamplingOptions | None,
        edge_ids: bool | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.store, self.seed, self.options = store, as_integer(seed, "seed"), as_options(options)
        draws = draws_of(graphs, self.options, edge_ids)
        fanouts = [one for relation in relations for one in relation.fanouts]
        self._neighbours = Neighbours(store, draws, fanouts, parse_bytes(memory, "memory"))
        names = {relation.name: graph.name for relation, graph in zip(relations, graphs, strict=True)}
        self._growing = GrowingOverHosts(types, relations, self.options, names, self._neighbours)
        self._lock = threading.Lock()
        self._batches = self._edges_asked = 0

    @property
    @abstractmethod
    def node_count(self) -> int:
        """Number of nodes that may be seeds, of all hosts."""

    @property
    @abstractmethod
    def seed_type(self) -> str:
        """Their type."""

    @abstractmethod
    def _result(self, found: Grown) -> Any:
        """What was found, as a mini-batch."""

    def _made(
        self, seeds: Mapping[str, NDArray[Any]], batch_index: int, epoch: int,
        seed_times: Mapping[str, NDArray[Any]] | None,
    ) -> Any:  # fmt: skip
        """The mini-batch around seeds by type."""
        self.check_open()
        self.store.check_open()
        nodes = {of: checked_seeds(some, self._growing.types[of]) for of, some in seeds.items()}
        key = batch_key(self.seed, as_integer(epoch, "epoch"), as_integer(batch_index, "batch_index"))
        with self._lock:
            self.check_room({of: len(some) for of, some in nodes.items()})
            try:
                found = self._growing.sample(nodes, key, seed_times)
                edges = sum(len(part[2]) for parts in found.parts for part in parts)
                if self.options.subgraph == "bidirectional":
                    self._neighbours.reserve(2 * REVERSING_BYTES * edges, "have the reverse of edges")
                found.slots.clear()
                made = self._result(found)
            finally:
                self._growing.forget()
            self._batches, self._edges_asked = self._batches + 1, self._edges_asked + edges
            return made

    def check_room(self, seeds: Mapping[str, int]) -> None:
        """Raises BudgetError where the memory cannot hold even the beginning of a mini-batch of so many seeds
        of each type."""
        growing, needed = self._growing, 0
        for of in growing.types:
            count = seeds.get(of, 0)
            asking = sum(one.target == of and one.fanouts[0] != 0 for one in growing.relations)
            needed += (ASKING_BYTES * max(1, asking) + 8) * count + SLOT_BYTES * table_size(count)
        self._neighbours.reserve(needed, "begin the sampling")

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


class HostsSampler(OverHosts):
    """Neighbour sampler over a graph whose lists are on several hosts, uniform and without replacement unless
    options say otherwise; made by :meth:`featstore.SplitStore.sampler`. A context manager; safe to use from
    several threads, which take turns. It belongs to the process that opened the store.

    ``memory``: of mini-batches under way, bytes or ``"256MiB"``; finished ones are the caller's.
    ``edge_ids``, ``options``: as of :class:`~featstore.sampling.stored.StoredSampler`, but for induced
    subgraphs and times of nodes. Raises BudgetError, ArgumentError, SourceError for fan-outs that no message
    could hold, and options that owners cannot draw by, PeerError where a host is gone.
    """

    def __init__(
        self, store: WholeStore, fanouts: Sequence[int], *, memory: int | str, seed: int = 0,
        graph: str | None = None, edge_ids: bool | None = None, options: SamplingOptions | None = None,
    ) -> None:  # fmt: skip
        self.fanouts, self.graph = as_fanouts(fanouts), graph_of(store, graph)
        self._type = self.graph.table.name
        relation = Relation(self._type, self._type, _NONE, _NONE, self.fanouts)
        types = {self._type: self.node_count}
        super().__init__(store, seed, types, [relation], [self.graph], memory, options, edge_ids)

    @property
    def node_count(self) -> int:
        """Number of nodes of the whole graph."""
        return self.graph.table.rows

    @property
    def seed_type(self) -> str:
        """The table of the graph's nodes."""
        return self._type

    def sample(
        self, seeds: NDArray[Any], batch_index: int = 0, *, epoch: int = 0,
        seed_times: NDArray[Any] | None = None,
    ) -> SampledSubgraph:  # fmt: skip
        """The mini-batch around ``seeds`` (node ids, any integer dtype [b], no duplicates, unless each has a
        subgraph of its own), whoever owns them: that of
        :meth:`featstore.sampling.stored.StoredSampler.sample` over the store that was split, ``edge_id`` and
        ``e_id`` included. ``seed_times``: int64 [b], what edges may not be later than.

        Raises IdError, ArgumentError for times that are missing, BudgetError, PeerError, CorruptionError,
        DeviceError, FormatError, ClosedError.
        """
        times = None if seed_times is None else {self._type: seed_times}
        made: SampledSubgraph = self._made({self._type: seeds}, batch_index, epoch, times)
        return made

    def _result(self, found: Grown) -> SampledSubgraph:
        return subgraph_of_one(
            found, self._type, self.options.subgraph, node=found.node(self._type).copy(),
            numbers=lambda *_: self._growing.numbers(None),
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<HostsSampler of {self.graph!r}, fanouts {list(self.fanouts)}>"
