"""Sampling over edge types where topology is split, too; see :mod:`featstore.hosts.sampler`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_flag, as_mapping, known_name
from featstore.hosts.sampler import OverHosts
from featstore.sampling.growing import Grown, Relation
from featstore.sampling.neighbors import as_options
from featstore.sampling.options import SamplingOptions
from featstore.sampling.reverse import reverses
from featstore.sampling.typed import TypedSubgraph, subgraph_of, typed_fanouts
from featstore.sampling.typed_store import by_edge_type, typed_graphs
from featstore.storage.edge_types import EdgeType, joined_name

if TYPE_CHECKING:
    from featstore.hosts.split_store import WholeStore

_NONE = np.empty(0, np.int64)


class TypedHostsSampler(OverHosts):
    """Neighbour sampler over all edge types of a store, with seeds of ``node_type``, whose lists are on
    several hosts. A context manager; safe to use from several threads, which take turns. It belongs to the
    process that opened the store.

    ``fanouts``, ``edge_ids``, ``options``: as of
    :class:`~featstore.sampling.typed_stored.TypedStoredSampler`, but for induced subgraphs and times of
    nodes. ``memory``: of mini-batches under way, bytes or ``"256MiB"``; finished ones are the caller's.
    Raises BudgetError, ArgumentError, UnknownNameError, SourceError for fan-outs that no message could hold,
    and options that owners cannot draw by, PeerError where a host is gone.
    """

    def __init__(
        self, store: WholeStore, node_type: str, fanouts: Sequence[int] | Mapping[Any, Sequence[int]], *,
        memory: int | str, seed: int = 0, options: SamplingOptions | None = None,
        edge_ids: bool | None = None,
    ) -> None:  # fmt: skip
        graphs = typed_graphs(store)
        self.node_type: str = known_name(
            node_type, store.node_types, "node_type: the store has no type of nodes"
        )
        self.fanouts: dict[EdgeType, tuple[int, ...]] = typed_fanouts(
            by_edge_type(graphs, fanouts), list(graphs)
        )
        self.nodes = {name: store.tables[name].rows for name in store.node_types}
        bidirectional = as_options(options).subgraph == "bidirectional"
        self._reverses = reverses(graphs) if bidirectional else {}
        relations = [Relation(of[0], of[2], _NONE, _NONE, self.fanouts[of], joined_name(of)) for of in graphs]
        numbered = None if edge_ids is None or as_flag(edge_ids, "edge_ids") else False
        super().__init__(store, seed, self.nodes, relations, list(graphs.values()), memory, options, numbered)

    @property
    def node_count(self) -> int:
        """Number of nodes of the seeds' type."""
        return self.nodes[self.node_type]

    @property
    def seed_type(self) -> str:
        """The type of the seeds."""
        return self.node_type

    def sample(
        self, seeds: NDArray[Any], batch_index: int = 0, *, epoch: int = 0,
        seed_times: NDArray[Any] | None = None,
    ) -> TypedSubgraph:  # fmt: skip
        """The mini-batch around ``seeds`` (ids of nodes of the seeds' type, any integer dtype [b], no
        duplicates, unless each has a subgraph of its own), whoever owns them: that of
        :meth:`featstore.sampling.typed_stored.TypedStoredSampler.sample` over the store that was split,
        ``edge_id`` and ``e_id`` included. ``seed_times``: int64 [b], what edges may not be later than.

        Raises IdError, ArgumentError for times that are missing, BudgetError, PeerError, CorruptionError,
        DeviceError, FormatError, ClosedError.
        """
        given = None if seed_times is None else {self.node_type: seed_times}
        return self.sample_types({self.node_type: seeds}, batch_index, epoch=epoch, seed_times=given)

    def sample_types(
        self, seeds: Mapping[str, NDArray[Any]], batch_index: int = 0, *, epoch: int = 0,
        seed_times: Mapping[str, NDArray[Any]] | None = None,
    ) -> TypedSubgraph:  # fmt: skip
        """The mini-batch around seeds of several types, as the ends of links are. Raises the same."""
        given = {
            known_name(name, self.nodes, "seeds: the graph has no type"): one
            for name, one in as_mapping(seeds, "seeds", "types to node ids").items()
        }
        made: TypedSubgraph = self._made(given, batch_index, epoch, seed_times)
        return made

    def _result(self, found: Grown) -> TypedSubgraph:
        return subgraph_of(
            found, list(self.nodes), list(self.fanouts), self.options.subgraph, self._reverses,
            node=lambda name: found.node(name).copy(),
            numbers=lambda of, _: self._growing.numbers(joined_name(of)),
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<TypedHostsSampler of {self.store!r}, {self.node_type!r}>"
