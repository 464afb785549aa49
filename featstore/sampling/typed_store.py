"""A store's graphs of all edge types in memory, for mini-batches around seeds of one type of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_flag, known_name, shown
from featstore.base.training_nodes import checked_train
from featstore.errors import ArgumentError, SourceError
from featstore.reader.graphs import read_csc, read_edge_ids, read_offsets, whole_bytes
from featstore.sampling.options import SamplingOptions
from featstore.sampling.typed import TypedNeighborSampler, TypedSubgraph
from featstore.storage.edge_types import EdgeType, joined_name
from featstore.storage.relations import type_of_array
from featstore.storage.store import OpenStore, StoredGraph

_PARTS = ("offsets", "sources", "edge_ids", "weights", "times")

__all__ = ["TypedInMemory", "TypedSeeds", "typed_bytes"]


@dataclass(frozen=True)
class TypedSeeds:
    """Seeds of one type: ``ids`` int64, each once, unless they may be repeated. ``masked``: they were given
    as a mask."""

    node_type: str
    ids: NDArray[np.int64]
    masked: bool = False

    @classmethod
    def of(cls, store: OpenStore, given: Any, *, repeated: bool = False) -> TypedSeeds:
        """``given``: a pair of a node type and its ids, a mask, the name of an array, or None for all nodes;
        or the name of an array ``TYPE.NAME``. Raises ArgumentError, UnknownNameError, IdError."""
        node_type: Any
        if isinstance(given, str):
            node_type, rest = type_of_array(store, given)
            if not rest:
                raise ArgumentError(
                    f"seeds={given!r}: the store has several types of nodes; give (type, ids), or the name "
                    "of an array TYPE.NAME"
                )
            ids: Any = given
        elif isinstance(given, tuple) and len(given) == 2:
            node_type, ids = given
        else:
            raise ArgumentError(
                f"the store has several types of nodes: seeds= is a pair (type, ids), not {shown(given)}"
            )
        known_name(node_type, store.node_types, "seeds: the store has no type of nodes")
        rows = store.tables[node_type].rows
        if isinstance(ids, str):
            ids = store.arrays[known_name(ids, store.manifest.arrays, "seeds: the store has no array")]
        ids = np.arange(rows) if ids is None else ids
        masked = str(getattr(ids, "dtype", "")).endswith("bool")
        return cls(node_type, checked_train(ids, rows, repeated=repeated), masked)


def typed_graphs(store: OpenStore) -> dict[EdgeType, StoredGraph]:
    """The store's graphs that have edge types. Raises SourceError where there are none."""
    found = {graph.edge_type: graph for graph in store.graphs.values() if graph.edge_type is not None}
    if not found:
        raise SourceError(f"the store {store.path} holds no graph with edge types")
    return found


def by_edge_type(graphs: Mapping[EdgeType, StoredGraph], fanouts: Any) -> Any:
    """``fanouts`` whose relations may be named as graphs are, by edge type where it is a mapping."""
    if not isinstance(fanouts, Mapping):
        return fanouts
    names = {joined_name(edge_type): edge_type for edge_type in graphs}
    return {names.get(key, key): one for key, one in fanouts.items()}


def typed_bytes(store: OpenStore) -> int:
    """What it takes to bring all graphs with edge types into memory by node id, at most."""
    held = most = reading = 0
    for graph in typed_graphs(store).values():
        parts = [f"{graph.name}/{part}" for part in _PARTS]
        tables = [graph.store.table(part) for part in parts if part in graph.store.manifest.all_tables]
        reading = max(reading, *(2 * whole_bytes(table) for table in tables))
        item = graph.entry.sources.row_bytes
        ids = graph.store.table(f"{graph.name}/edge_ids").row_bytes if graph.has_edge_ids else 0
        permuted = graph.table.entry.order.row_of_node is not None
        held += (8 + 8 * permuted) * (graph.table.rows + 1) + (item + ids) * graph.edges
        most = max(most, 40 * graph.table.rows + (16 + 2 * item + ids) * graph.edges)
    return reading + held + most


class TypedInMemory:
    """A neighbour sampler over all edge types of a store, with seeds of ``node_type``.

    ``fanouts``: as for :class:`~featstore.sampling.typed.TypedNeighborSampler`; relations may be named as
    graphs are, ``a__r__b``. Mini-batches have ``e_id`` of the relations whose graphs keep the numbers of
    edges (unless ``edge_ids`` is False). ``sampler``: what samples.
    """

    def __init__(
        self, store: OpenStore, node_type: str, fanouts: Sequence[int] | Mapping[Any, Sequence[int]],
        seed: int = 0, *, edge_ids: bool | None = None, options: SamplingOptions | None = None,
    ) -> None:  # fmt: skip
        graphs = typed_graphs(store)
        fanouts = by_edge_type(graphs, fanouts)
        numbered = True if edge_ids is None else as_flag(edge_ids, "edge_ids")
        ids = {t: read_edge_ids(g, by_node=True) for t, g in graphs.items() if numbered and g.has_edge_ids}
        self.node_type, self.seed = node_type, seed
        self.sampler = TypedNeighborSampler(
            {edge_type: read_csc(graph) for edge_type, graph in graphs.items()},
            {name: store.tables[name].rows for name in store.node_types},
            fanouts, seed, options=options, edge_ids=ids,
        )  # fmt: skip
        self.fanouts = self.sampler.fanouts
        self.sampler.shifts = {
            edge_type: read_offsets(graph)[row_of_node] - self.sampler.graphs[edge_type][0][:-1]
            for edge_type, graph in graphs.items()
            if (row_of_node := graph.table.row_of_node()) is not None
        }

    @property
    def nodes(self) -> dict[str, int]:
        """Number of nodes by type."""
        return self.sampler.nodes

    @property
    def options(self) -> SamplingOptions:
        """What else was said."""
        return self.sampler.options

    @property
    def node_count(self) -> int:
        """Number of nodes of the seeds' type."""
        return self.sampler.nodes[self.node_type]

    def sample(
        self, seeds: NDArray[Any], batch_index: int = 0, *, epoch: int = 0,
        seed_times: NDArray[Any] | None = None,
    ) -> TypedSubgraph:  # fmt: skip
        """The mini-batch around seeds of the type, whose ``edge_id`` are positions in the stored
        ``GRAPH/sources``; ``seed_times``: int64 [b]; raises what the sampler raises."""
        times = None if seed_times is None else {self.node_type: seed_times}
        return self.sample_types({self.node_type: seeds}, batch_index, epoch=epoch, seed_times=times)

    def sample_types(
        self, seeds: Mapping[str, NDArray[Any]], batch_index: int = 0, *, epoch: int = 0,
        seed_times: Mapping[str, NDArray[Any]] | None = None,
    ) -> TypedSubgraph:  # fmt: skip
        """The same around seeds of several types, as the ends of links are."""
        return self.sampler.sample_types(seeds, batch_index, epoch=epoch, seed_times=seed_times)
