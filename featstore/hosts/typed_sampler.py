"""Sampling over edge types where topology is split, too; see :mod:`featstore.hosts.sampler`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import known_name
from featstore.hosts.neighbours import ASKING_BYTES, AskedHop, Neighbours
from featstore.hosts.sampler import OverHosts
from featstore.sampling.growing import EdgeArrays, Growing, Grown, Relation
from featstore.sampling.options import SamplingOptions
from featstore.sampling.picking import empty_picks, enter_hop, make_room, table_size
from featstore.sampling.typed import TypedSubgraph, subgraph_of, typed_fanouts
from featstore.sampling.typed_store import by_edge_type, typed_graphs
from featstore.storage.edge_types import EdgeType, joined_name
from featstore.units import parse_bytes

if TYPE_CHECKING:
    from featstore.hosts.split_store import WholeStore

_NONE = np.empty(0, np.int64)
_SLOT_BYTES = 8


class _GrowingOverHosts(Growing):
    """One mini-batch at a time, with the ``neighbours`` that hosts have."""

    def __init__(
        self, types: Mapping[str, int], relations: Sequence[Relation], neighbours: Neighbours
    ) -> None:
        super().__init__(types, relations, SamplingOptions(), {})
        self._neighbours = neighbours
        self._asked: dict[str | None, AskedHop] = {}

    def forget(self) -> None:
        """Give back what has come for a mini-batch that came to nothing."""
        self._asked.clear()

    def _begin_hop(
        self, found: Grown, hop: int, spans: Sequence[tuple[int, int]], keys: Sequence[np.uint64]
    ) -> None:
        """Have the neighbours of all relations, asked for at the same time."""
        self._asked.clear()
        for relation, (begin, end), key in zip(self.relations, spans, keys, strict=True):
            if begin < end and relation.fanouts[hop]:
                assert relation.name is not None
                nodes = found.nodes[relation.target][begin:end].copy()
                self._asked[relation.name] = self._neighbours.hop(
                    relation.name, nodes, relation.fanouts[hop], key
                )
        self._neighbours.have(list(self._asked.values()), _held_bytes(found))

    def _hop(
        self, found: Grown, relation: Relation, fanout: int, span: tuple[int, int], key: np.uint64,
        bounds: tuple[NDArray[np.int64], NDArray[np.int64]],
    ) -> EdgeArrays:  # fmt: skip
        hop = self._asked.get(relation.name)
        if hop is None:
            return _NONE, _NONE, _NONE
        source = relation.source
        edges, count, total = hop.edges, found.count[source], self.types[source]
        bound, picks = min(count + edges, total), max(1, min(fanout, hop.degree_max))
        needed = _held_bytes(found) + sum(one.held_bytes for one in self._asked.values())
        needed += 16 * table_size(picks) + 24 * edges + 8 * bound + _SLOT_BYTES * table_size(bound)
        self._neighbours.reserve(needed, f"sample hop {len(found.hops[source])}")
        row, col, edge = (np.empty(edges, np.int64) for _ in range(3))
        hop.lay_out(span[0], empty_picks(fanout, hop.degree_max), row, col, edge)
        del self._asked[relation.name]
        found.nodes[source], found.slots[source] = make_room(
            found.nodes[source], found.slots[source], count, bound
        )
        counted = int(enter_hop(found.slots[source], found.nodes[source], count, row, total))
        if counted < 0:
            place = -counted - 1
            raise hop.no_node(row[place], found.nodes[relation.target][col[place]], edge[place])
        found.count[source] = counted
        return row, col, edge


def _held_bytes(found: Grown) -> int:
    """What a mini-batch under way takes; its edges twice, while they are joined."""
    held = [*found.nodes.values(), *found.slots.values()]
    parts = [array for of in found.parts for part in of for array in part]
    return sum(array.nbytes for array in held) + 2 * sum(array.nbytes for array in parts)


class TypedHostsSampler(OverHosts):
    """Uniform neighbour sampler without replacement over all edge types of a store, with seeds of
    ``node_type``, whose lists are on several hosts. A context manager; safe to use from several threads,
    which take turns. It belongs to the process that opened the store.

    ``fanouts``: as for :class:`~featstore.sampling.typed_stored.TypedStoredSampler`. ``memory``: of
    mini-batches under way, bytes or ``"256MiB"``; finished ones are the caller's. Raises BudgetError,
    ArgumentError, UnknownNameError, SourceError for fan-outs that no message could hold, PeerError where a
    host is gone.
    """

    def __init__(
        self, store: WholeStore, node_type: str, fanouts: Sequence[int] | Mapping[Any, Sequence[int]], *,
        memory: int | str, seed: int = 0,
    ) -> None:  # fmt: skip
        graphs = typed_graphs(store)
        self.node_type = known_name(node_type, store.node_types, "node_type: the store has no type of nodes")
        self.fanouts: dict[EdgeType, tuple[int, ...]] = typed_fanouts(
            by_edge_type(graphs, fanouts), list(graphs)
        )
        self.nodes = {name: store.tables[name].rows for name in store.node_types}
        all_fanouts = [one for hops in self.fanouts.values() for one in hops]
        memory_bytes = parse_bytes(memory, "memory")
        super().__init__(store, seed, Neighbours(store, graphs.values(), all_fanouts, memory_bytes))
        relations = [Relation(of[0], of[2], _NONE, _NONE, self.fanouts[of], joined_name(of)) for of in graphs]
        self._growing = _GrowingOverHosts(self.nodes, relations, self._neighbours)

    @property
    def node_count(self) -> int:
        """Number of nodes of the seeds' type."""
        return self.nodes[self.node_type]

    def sample(self, seeds: NDArray[Any], batch_index: int = 0, *, epoch: int = 0) -> TypedSubgraph:
        """The mini-batch around ``seeds`` (ids of nodes of the seeds' type, any integer dtype [b], no
        duplicates), whoever owns them: that of
        :meth:`featstore.sampling.typed_stored.TypedStoredSampler.sample` over the store that was split,
        ``edge_id`` included.

        Raises IdError, BudgetError, PeerError, CorruptionError, DeviceError, FormatError, ClosedError.
        """
        nodes, key = self._begun(seeds, batch_index, epoch)
        with self._lock:
            self.check_room(len(nodes))
            try:
                found = self._growing.sample({self.node_type: nodes}, key, None)
            finally:
                self._growing.forget()
            self._batches += 1
            self._edges_asked += sum(len(part[2]) for parts in found.parts for part in parts)
            found.slots.clear()
            return subgraph_of(
                found, list(self.nodes), list(self.fanouts), "directional", {},
                node=lambda name: found.node(name).copy(), numbers=lambda of, edges: None,
            )  # fmt: skip

    def check_room(self, seeds: int) -> None:
        asking = sum(of[2] == self.node_type and hops[0] != 0 for of, hops in self.fanouts.items())
        slots = table_size(seeds) + (len(self.nodes) - 1) * table_size(0)
        needed = (ASKING_BYTES * max(1, asking) + 8) * seeds + _SLOT_BYTES * slots
        self._neighbours.reserve(needed, "begin the sampling")

    def __repr__(self) -> str:
        return f"<TypedHostsSampler of {self.store!r}, {self.node_type!r}>"
