"""Sampling over edge types from disk: the relations' lists are read from the store, within one memory.

:class:`TypedStoredSampler` gives, for the same seed, epoch, batch and seeds, the very mini-batches that
:class:`featstore.sampling.typed_store.TypedInMemory` gives over the same store. The loop over hops and
relations is that of samplers in memory (:class:`featstore.sampling.growing.Growing`); only what a relation
does in a hop is another: it picks positions from offsets in memory, and has just those read
(:mod:`featstore.sampling.lists_on_disk`), as :mod:`featstore.sampling.stored` does for a graph without types.
Inside there are rows, of each type of nodes its own; node ids are asked for hashes, and come out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_flag, as_integer, known_name
from featstore.base.dtypes import node_dtype
from featstore.base.hashing import batch_key
from featstore.errors import ArgumentError
from featstore.reader.options import check_reading
from featstore.reader.reader import QUEUE_DEPTH, Reader
from featstore.sampling.disk_sampler import DiskSampler
from featstore.sampling.edge_ids import FINDING_BYTES
from featstore.sampling.growing import EdgeArrays, Growing, Grown, Relation
from featstore.sampling.lists_on_disk import ListsOnDisk
from featstore.sampling.neighbors import as_options, checked_seeds
from featstore.sampling.options import SamplingOptions
from featstore.sampling.picking import empty_picks, enter_hop, make_room, seed_table, table_size
from featstore.sampling.reverse import reverses
from featstore.sampling.stored_hops import HopPages, hop_bytes
from featstore.sampling.typed import TypedSubgraph, subgraph_of, typed_fanouts
from featstore.sampling.typed_store import by_edge_type, typed_graphs
from featstore.sampling.under_way import Scratch
from featstore.storage.edge_types import EdgeType, joined_name
from featstore.storage.store import OpenStore, as_store

_REVERSING_BYTES = 100  # of each edge and each reverse, while they are sorted
_NONE = np.empty(0, np.int64)

__all__ = ["TypedStoredSampler"]


class TypedStoredSampler(DiskSampler):
    """Uniform neighbour sampler over all edge types of a store, with seeds of ``node_type``, that reads their
    lists from disk.

    Args:
        store: the open store.
        node_type: the type of the seeds.
        fanouts: as for :class:`~featstore.sampling.typed.TypedNeighborSampler`; relations may be named as
            graphs are, ``a__r__b``.
        memory: budget for all that the sampler holds, bytes or ``"2GiB"``. Mini-batches are the caller's and
            come on top.
        seed: any integer.
        options: ``replace`` and ``subgraph="bidirectional"``; all others are of graphs in memory.
        edge_ids: mini-batches have ``e_id`` of the relations whose graphs keep the numbers of edges, unless
            it is False.
        engine, queue_depth, threads, verify: as for :class:`featstore.reader.reader.Reader`.

    Raises BudgetError, CorruptionError, DeviceError, FormatError; SourceError for a store without edge types;
    ArgumentError, UnknownNameError for what the store has not, and options that are of graphs in memory.
    """

    def __init__(
        self, store: OpenStore, node_type: str, fanouts: Sequence[int] | Mapping[Any, Sequence[int]], *,
        memory: int | str, seed: int = 0, options: SamplingOptions | None = None,
        edge_ids: bool | None = None, engine: str = "auto", queue_depth: int = QUEUE_DEPTH,
        verify: bool = True, threads: int | None = None,
    ) -> None:  # fmt: skip
        graphs = typed_graphs(as_store(store))
        check_reading(engine, queue_depth, verify, threads=threads)
        self.node_type = known_name(node_type, store.node_types, "node_type: the store has no type of nodes")
        self.fanouts = typed_fanouts(by_edge_type(graphs, fanouts), list(graphs))
        self.seed, self.options = as_integer(seed, "seed"), as_options(options)
        if refused := of_memory(self.options):
            raise ArgumentError(
                f"{', '.join(refused)}: lists on disk are sampled uniformly; hold the graphs in memory "
                "(TypedInMemory), or leave it out"
            )
        bidirectional = self.options.subgraph == "bidirectional"
        self._reverses = reverses(graphs) if bidirectional else {}
        self.nodes = {name: store.tables[name].rows for name in store.node_types}
        self._relations = [
            Relation(of[0], of[2], _NONE, _NONE, self.fanouts[of], joined_name(of)) for of in graphs
        ]
        numbered = None if edge_ids is None or as_flag(edge_ids, "edge_ids") else False
        reading: dict[str, Any] = {
            "memory": memory, "engine": engine, "queue_depth": queue_depth, "verify": verify,
            "threads": threads,
        }  # fmt: skip
        said = {**reading, "seed": seed, "options": options, "edge_ids": edge_ids}
        super().__init__(
            store, [ListsOnDisk(graph, numbered) for graph in graphs.values()],
            {name: store.tables[name] for name in store.node_types}, **reading,
            given=((store, node_type, fanouts), said),
        )  # fmt: skip

    @property
    def node_count(self) -> int:
        """Number of nodes of the seeds' type."""
        return self.nodes[self.node_type]

    @property
    def edge_types(self) -> list[EdgeType]:
        """The relations, in their order."""
        return list(self.fanouts)

    def sample(self, seeds: NDArray[Any], batch_index: int = 0, *, epoch: int = 0) -> TypedSubgraph:
        """The mini-batch around ``seeds`` (ids of nodes of the seeds' type, any integer dtype [b], no
        duplicates); ``edge_id`` is the position of the edge in the stored ``GRAPH/sources``.

        Raises IdError for seeds that are no nodes or stand twice, BudgetError where the mini-batch needs more
        scratch than the budget leaves, CorruptionError, DeviceError, FormatError, ClosedError.
        """
        node = checked_seeds(seeds, self.node_count)
        self._here()
        key = batch_key(self.seed, as_integer(epoch, "epoch"), as_integer(batch_index, "batch_index"))
        made: TypedSubgraph = self._made(node, key)
        return made

    def _sample(self, seeds: NDArray[np.int64], key: int, scratch: Scratch) -> TypedSubgraph:
        begun = {**dict.fromkeys(self.nodes, 0), self.node_type: len(seeds)}
        tables = sum(node_dtype(self.nodes[name]).itemsize * table_size(n) for name, n in begun.items())
        scratch.reserve(tables + 16 * len(seeds), "begin this mini-batch")
        node_of_row = {name: maps[1] for name, maps in self._maps.items()}
        growing = _Growing(
            self.nodes, self._relations, self.options, self._lists, node_of_row, self._reader, scratch
        )
        growing.seeds[self.node_type] = seeds
        found = growing.sample({self.node_type: self._rows_of(self.node_type, seeds)}, key, None)
        found.slots.clear()
        self._reserve_result(found, scratch)
        self._count_batch(growing.reading)
        lists = dict(zip(self.fanouts, self._lists, strict=True))

        def numbers(edge_type: EdgeType, edges: NDArray[np.int64]) -> NDArray[np.int64] | None:
            ids = lists[edge_type].ids
            return None if ids is None else ids.of(self._reader, edges)

        return subgraph_of(
            found, list(self.nodes), self.edge_types, self.options.subgraph, self._reverses,
            node=lambda name: self._nodes_of(name, found.node(name)), numbers=numbers,
        )  # fmt: skip

    def _reserve_result(self, found: Grown, scratch: Scratch) -> None:
        """Have scratch for what becomes the result: rows beside nodes, and of one relation after the other
        the parts of its hops beside the whole, the numbers of its edges, and their reverse."""
        nodes_bytes = 2 * sum(nodes.nbytes for nodes in found.nodes.values())
        edges = sorted(sum(len(part[2]) for part in parts) for parts in found.parts)
        most = FINDING_BYTES * edges[-1]
        if self._reverses:
            most += _REVERSING_BYTES * 2 * sum(edges[-2:])
        scratch.reserve(nodes_bytes + most, "find the numbers of its edges")

    def __repr__(self) -> str:
        return f"<TypedStoredSampler of {self.store!r}, {self.node_type!r}, {self._memory_bytes:,} bytes>"


def of_memory(options: SamplingOptions) -> list[str]:
    """Which options lists on disk cannot be sampled with."""
    said = {
        "weights=": options.weights is not None, "node_times=": options.node_times is not None,
        "edge_times=": options.edge_times is not None, "disjoint=": options.disjoint,
        "subgraph='induced'": options.subgraph == "induced",
    }  # fmt: skip
    return [name for name, one in said.items() if one]


class _Growing(Growing):
    """One mini-batch, whose nodes are rows. ``lists`` are those of ``relations``; ``seeds``: node ids of the
    seeds by type, for errors."""

    def __init__(
        self, types: Mapping[str, int], relations: Sequence[Relation], options: SamplingOptions,
        lists: Sequence[ListsOnDisk], node_of_row: Mapping[str, NDArray[Any]], reader: Reader,
        scratch: Scratch,
    ) -> None:  # fmt: skip
        super().__init__(types, relations, options, {})
        self._lists = {relation.name: one for relation, one in zip(relations, lists, strict=True)}
        self._numbers = {relation.name: number for number, relation in enumerate(relations)}
        self._node_of_row, self._reader = node_of_row, reader
        self.reading = HopPages(scratch)
        self.seeds: dict[str, NDArray[np.int64]] = {}

    def _enter(self, found: Grown) -> None:
        for name, rows in found.nodes.items():
            found.slots[name] = seed_table(rows, self.seeds.get(name, rows), node_dtype(self.types[name]))

    def _hop(
        self, found: Grown, relation: Relation, fanout: int, span: tuple[int, int], key: np.uint64,
        bounds: tuple[NDArray[np.int64], NDArray[np.int64]],
    ) -> EdgeArrays:  # fmt: skip
        if fanout == 0:
            return _NONE, _NONE, _NONE
        (begin, end), source, lists = span, relation.source, self._lists[relation.name]
        hop, replace = len(found.parts[self._numbers[relation.name]]), self.options.replace
        edges, degree_max = lists.size(found.nodes[relation.target], begin, end, fanout, replace)
        count = found.count[source]
        bound = min(count + edges, self.types[source])
        self._reserve(found, relation, hop, bound, edges, min(fanout, degree_max))
        found.nodes[source], found.slots[source] = make_room(
            found.nodes[source], found.slots[source], count, bound
        )
        row, col, edge = (np.empty(edges, np.int64) for _ in range(3))
        misses = lists.pick(
            self._node_of_row[relation.target], found.nodes[relation.target], begin, end, fanout, replace,
            key, empty_picks(fanout, degree_max), row, col, edge,
        )  # fmt: skip
        self.reading.asked += edges
        self.reading.cached += edges - misses
        if misses:
            last = not any(relation.fanouts[hop + 1 :])
            lists.read(self.reading, self._reader, row, edge, misses, last=last)
        counted = int(enter_hop(found.slots[source], found.nodes[source], count, row, self.types[source]))
        if counted < 0:
            raise lists.bad_source(-counted - 1, row, edge)
        found.count[source] = counted
        return row, col, edge

    def _reserve(
        self, found: Grown, relation: Relation, hop: int, bound: int, edges: int, picks: int
    ) -> None:
        """Have scratch for a relation's hop, beside the nodes and tables of the other types."""
        source, item = relation.source, self._lists[relation.name].graph.entry.sources.row_bytes
        others = [name for name in self.types if name != source]
        beside = sum(found.nodes[name].nbytes + found.slots[name].nbytes for name in others)
        slot_bytes = found.slots[source].itemsize
        needed = hop_bytes(found.count[source], bound, slot_bytes, edges, picks, item)
        self.reading.reserve(hop, beside + needed)
