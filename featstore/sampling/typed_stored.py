"""Sampling over edge types from disk: the relations' lists are read from the store, within one memory.

:class:`TypedStoredSampler` gives, for the same seed, epoch, batch and seeds, the very mini-batches that
:class:`featstore.sampling.typed_store.TypedInMemory` gives over the same store, with the same options
(:mod:`featstore.sampling.growing_stored`), as :mod:`featstore.sampling.stored` does for a graph without
types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_flag, as_integer, as_mapping, known_name
from featstore.base.hashing import batch_key
from featstore.reader.options import check_reading
from featstore.reader.reader import QUEUE_DEPTH
from featstore.sampling.disk_sampler import DiskSampler
from featstore.sampling.growing import Grown, Relation
from featstore.sampling.neighbors import as_options, checked_seeds
from featstore.sampling.options import SamplingOptions
from featstore.sampling.reverse import reverses
from featstore.sampling.typed import TypedSubgraph, subgraph_of, typed_fanouts
from featstore.sampling.typed_store import by_edge_type, typed_graphs
from featstore.storage.edge_types import EdgeType, joined_name
from featstore.storage.store import OpenStore, as_store

_NONE = np.empty(0, np.int64)

__all__ = ["TypedStoredSampler"]


class TypedStoredSampler(DiskSampler):
    """Neighbour sampler over all edge types of a store, with seeds of ``node_type``, that reads their
    lists from disk.

    Args:
        store: the open store.
        node_type: the type of the seeds.
        fanouts: as for :class:`~featstore.sampling.typed.TypedNeighborSampler`; relations may be named as
            graphs are, ``a__r__b``.
        memory: budget for all that the sampler holds, bytes or ``"2GiB"``. Mini-batches are the caller's and
            come on top.
        seed: any integer.
        options: what else there is to say; weights and times of edges are those that graphs keep,
            :data:`~featstore.sampling.options.KEPT`, by edge type.
        edge_ids: mini-batches have ``e_id`` of the relations whose graphs keep the numbers of edges, unless
            it is False.
        engine, queue_depth, threads, verify: as for :class:`featstore.reader.reader.Reader`.

    Raises BudgetError, CorruptionError, DeviceError, FormatError; SourceError for a store without edge types,
    weights or times; ArgumentError, UnknownNameError for what the store has not.
    """

    def __init__(
        self, store: OpenStore, node_type: str, fanouts: Sequence[int] | Mapping[Any, Sequence[int]], *,
        memory: int | str, seed: int = 0, options: SamplingOptions | None = None,
        edge_ids: bool | None = None, engine: str = "auto",
        queue_depth: int = QUEUE_DEPTH, verify: bool = True, threads: int | None = None,
    ) -> None:  # fmt: skip
        graphs = typed_graphs(as_store(store))
        check_reading(engine, queue_depth, verify, threads=threads)
        self.node_type = known_name(node_type, store.node_types, "node_type: the store has no type of nodes")
        self.fanouts = typed_fanouts(by_edge_type(graphs, fanouts), list(graphs))
        self.seed = as_integer(seed, "seed")
        said = as_options(options)
        self._reverses = reverses(graphs) if said.subgraph == "bidirectional" else {}
        tables = {name: store.tables[name] for name in store.node_types}
        self.nodes = {name: table.rows for name, table in tables.items()}
        relations = [Relation(of[0], of[2], _NONE, _NONE, self.fanouts[of], joined_name(of)) for of in graphs]
        numbered = None if edge_ids is None or as_flag(edge_ids, "edge_ids") else False
        reading: dict[str, Any] = {
            "memory": memory, "engine": engine, "queue_depth": queue_depth, "verify": verify,
            "threads": threads,
        }  # fmt: skip
        named = {"seed": seed, "options": options, "edge_ids": edge_ids}
        super().__init__(
            store, list(graphs.values()), relations, tables, options=said, numbered=numbered,
            **reading, given=((store, node_type, fanouts), reading | named),
        )  # fmt: skip

    @property
    def node_count(self) -> int:
        """Number of nodes of the seeds' type."""
        return self.nodes[self.node_type]

    @property
    def edge_types(self) -> list[EdgeType]:
        """The relations, in their order."""
        return list(self.fanouts)

    def sample(
        self, seeds: NDArray[Any], batch_index: int = 0, *, epoch: int = 0,
        seed_times: NDArray[Any] | None = None,
    ) -> TypedSubgraph:  # fmt: skip
        """The mini-batch around ``seeds`` (ids of nodes of the seeds' type, any integer dtype [b], no
        duplicates, unless each has a subgraph of its own); ``edge_id`` is the position of the edge in the
        stored ``GRAPH/sources``. ``seed_times``: int64 [b], as for
        :meth:`featstore.sampling.neighbors.NeighborSampler.sample`.

        Raises IdError for seeds that are no nodes or stand twice, ArgumentError for times that are missing,
        BudgetError where the mini-batch needs more scratch than the budget leaves, CorruptionError,
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
            known_name(name, self.nodes, "seeds: the graph has no type"): checked_seeds(one, self.nodes[name])
            for name, one in as_mapping(seeds, "seeds", "types to node ids").items()
        }
        self._here()
        key = batch_key(self.seed, as_integer(epoch, "epoch"), as_integer(batch_index, "batch_index"))
        made: TypedSubgraph = self._made(given, key, seed_times)
        return made

    def _result(self, found: Grown) -> TypedSubgraph:
        lists = dict(zip(self.fanouts, self._lists, strict=True))

        def numbers(edge_type: EdgeType, edges: NDArray[np.int64]) -> NDArray[np.int64] | None:
            ids = lists[edge_type].ids
            return None if ids is None else ids.of(self._reader, edges)

        return subgraph_of(
            found, list(self.nodes), self.edge_types, self.options.subgraph, self._reverses,
            node=lambda name: self._nodes_of(name, found.node(name)), numbers=numbers,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<TypedStoredSampler of {self.store!r}, {self.node_type!r}, {self._memory_bytes:,} bytes>"
