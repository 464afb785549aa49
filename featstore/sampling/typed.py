"""Neighbour sampling over graphs of several types of nodes and edges, in memory.

A relation ``(source type, name, target type)`` is a CSC graph of its own: of each node of its target type,
the list of its sources. What comes out is laid out as PyG's sampler of heterogeneous graphs lays it out: hop
by hop, relations in their order, nodes in the order in which they were found, by type
(:mod:`featstore.sampling.growing`). What a node draws follows from seed, epoch, mini-batch, hop, node and the
relation's name: not from which other relations there are, nor from their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_count, as_fanouts, as_integer, as_mapping, as_sequence, known_name, shown
from featstore.base.hashing import batch_key
from featstore.errors import ArgumentError, SourceError
from featstore.sampling.growing import Grown, grow_over
from featstore.sampling.neighbors import as_options, checked_seeds, edge_numbers, graph_arrays
from featstore.sampling.options import SamplingOptions, by_key
from featstore.sampling.reverse import reverses, with_reverse
from featstore.storage.edge_types import EdgeType

__all__ = ["EdgeType", "TypedNeighborSampler", "TypedSubgraph"]

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class TypedSubgraph:
    """What a sampler gives for one mini-batch of a graph with types, without rows.

    ``node``: int64 [m] by type of nodes, ids, seeds first, no duplicates (within a seed's subgraph, where
    these are disjoint). By relation: ``row``, ``col``: int64 [k], positions of each edge's source and target
    in ``node`` of their types; ``edge_id``: int64 [k], position of the edge in the relation's ``indices``, -1
    for the reverse of an edge of another relation; ``e_id``: the user's numbers of the edges, -1 likewise, of
    the relations where they are known, or None where of none. ``num_sampled_nodes``: new nodes per hop, the
    seeds as hop 0; ``num_sampled_edges``: edges per hop, empty of bidirectional and induced subgraphs, whose
    edges are of no hop. ``batch``: int64 [m] by type, the number of the seed whose subgraph each node is in,
    where these are disjoint; seeds of several types are numbered one type after the other. ``input_id``:
    int64 [b], of seeds of a list in which nodes may stand several times, their numbers in it.
    """

    node: dict[str, Ids]
    row: dict[EdgeType, Ids]
    col: dict[EdgeType, Ids]
    edge_id: dict[EdgeType, Ids]
    e_id: dict[EdgeType, Ids] | None
    num_sampled_nodes: dict[str, tuple[int, ...]]
    num_sampled_edges: dict[EdgeType, tuple[int, ...]]
    batch: dict[str, Ids] | None
    input_id: Ids | None = None


class TypedNeighborSampler:
    """Neighbour sampler over relations in memory (or memory maps of them).

    Args:
        graphs: of each relation ``(indptr int64 [targets + 1], indices int32 or int64 [edges])``, the sources
            of the edges into each node of its target type. Their order is that in which a hop goes through
            them.
        nodes: number of nodes by type, of all types that relations have.
        fanouts: neighbours per node and hop of every relation, or those of each, as many hops of all; -1
            takes all, 0 none.
        seed: any integer.
        options: what else there is to say, by type or relation where it is of these.
        edge_ids: int32 or int64 [edges] by relation, the user's numbers of edges, for mini-batches that have
            ``e_id``.

    Arrays are used as they are. Raises SourceError, ArgumentError for what does not fit. Safe to use from
    several threads.
    """

    def __init__(
        self, graphs: Mapping[EdgeType, tuple[NDArray[Any], NDArray[Any]]], nodes: Mapping[str, int],
        fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]], seed: int = 0, *,
        options: SamplingOptions | None = None, edge_ids: Mapping[EdgeType, NDArray[Any]] | None = None,
    ) -> None:  # fmt: skip
        counts = as_mapping(nodes, "nodes", "types of nodes to how many there are")
        self.nodes = {name: as_count(count, "each of nodes", 0) for name, count in counts.items()}
        self.graphs = {
            edge_type: _relation(edge_type, given, self.nodes)
            for edge_type, given in as_mapping(graphs, "graphs", "relations to (indptr, indices)").items()
        }
        if not self.graphs:
            raise ArgumentError("graphs must have at least one relation")
        self.fanouts = typed_fanouts(fanouts, list(self.graphs))
        self.seed = as_integer(seed, "seed")
        self.options = as_options(options)
        self.edge_ids = {
            edge_type: edge_numbers(one, len(self.graphs[edge_type][1]))
            for edge_type, one in by_key(edge_ids, list(self.graphs), "edge_ids").items()
        }
        bidirectional = self.options.subgraph == "bidirectional"
        self._reverses = reverses(self.graphs) if bidirectional else {}
        self.shifts: dict[EdgeType, Ids] = {}  # see subgraph_of
        self._growing = grow_over(self.nodes, self.graphs, self.fanouts, self.options, named=True)

    @property
    def edge_types(self) -> list[EdgeType]:
        """The relations, in their order."""
        return list(self.graphs)

    def sample(
        self, seed_type: str, seeds: NDArray[Any], batch_index: int = 0, *, epoch: int = 0,
        seed_times: NDArray[Any] | None = None,
    ) -> TypedSubgraph:  # fmt: skip
        """The mini-batch around ``seeds`` of one type (any integer dtype [b], no duplicates, unless each has
        a subgraph of its own). ``seed_times``: int64 [b], as for
        :meth:`featstore.sampling.neighbors.NeighborSampler.sample`, which raises the same."""
        known_name(seed_type, self.nodes, "seed_type: the graph has no type")
        times = None if seed_times is None else {seed_type: seed_times}
        return self.sample_types({seed_type: seeds}, batch_index, epoch=epoch, seed_times=times)

    def sample_types(
        self, seeds: Mapping[str, NDArray[Any]], batch_index: int = 0, *, epoch: int = 0,
        seed_times: Mapping[str, NDArray[Any]] | None = None,
    ) -> TypedSubgraph:  # fmt: skip
        """The mini-batch around seeds of several types, as the ends of links are."""
        given = {
            known_name(name, self.nodes, "seeds: the graph has no type"): checked_seeds(one, self.nodes[name])
            for name, one in as_mapping(seeds, "seeds", "types to node ids").items()
        }
        key = batch_key(self.seed, as_integer(epoch, "epoch"), as_integer(batch_index, "batch_index"))
        found = self._growing.sample(given, key, seed_times)
        return subgraph_of(
            found, list(self.nodes), self.edge_types, self.options.subgraph, self._reverses,
            node=found.node, numbers=self._numbers, shifts=self.shifts,
        )  # fmt: skip

    def _numbers(self, edge_type: EdgeType, edges: Ids) -> Ids | None:
        ids = self.edge_ids.get(edge_type)
        return None if ids is None else ids[edges].astype(np.int64, copy=False)


def subgraph_of(
    found: Grown, node_types: Sequence[str], edge_types: Sequence[EdgeType], subgraph: str,
    back: Mapping[EdgeType, EdgeType], *, node: Callable[[str], Ids],
    numbers: Callable[[EdgeType, Ids], Ids | None], shifts: Mapping[EdgeType, Ids] | None = None,
) -> TypedSubgraph:  # fmt: skip
    """What was found as a mini-batch of the kind ``subgraph``. ``back``: of each relation the one that leads
    back, where edges get their reverse; ``node``: the nodes of a type; ``numbers``: of a relation's edges at
    these positions, where they are known; ``shifts``: what is added to positions in the list of each node of
    the relation's target type, where they are to be those of another order."""
    per_hop: dict[EdgeType, tuple[int, ...]] = {
        edge_type: tuple(len(part[2]) for part in found.parts[number])
        for number, edge_type in enumerate(edge_types)
    }
    edges = {edge_type: found.edges(number) for number, edge_type in enumerate(edge_types)}
    known = {edge_type: numbers(edge_type, one[2]) for edge_type, one in edges.items()}
    nodes = {name: node(name) for name in node_types}
    for name, shift in (shifts or {}).items():
        rows, cols, positions = edges[name]
        edges[name] = rows, cols, positions + shift[nodes[name[2]][cols]]
    e_id = {edge_type: one for edge_type, one in known.items() if one is not None}
    row, col, edge_id = ({name: one[k] for name, one in edges.items()} for k in range(3))
    for name, other in back.items():
        ends = None if other == name else edges[other][:2]
        row[name], col[name], edge_id[name], ids = with_reverse(*edges[name], e_id.get(name), ends)
        if ids is not None:
            e_id[name] = ids
    if subgraph != "directional":
        per_hop = dict.fromkeys(edge_types, ())
    batch = {name: one for name in node_types if (one := found.batch(name)) is not None}
    hops = {name: tuple(counts) for name, counts in found.hops.items()}
    return TypedSubgraph(nodes, row, col, edge_id, e_id or None, hops, per_hop, batch or None)


def _relation(edge_type: Any, given: Any, nodes: Mapping[str, int]) -> tuple[Ids, NDArray[Any]]:
    """A relation's arrays, checked. Raises ArgumentError, SourceError."""
    if not (isinstance(edge_type, tuple) and len(edge_type) == 3 and all(type(o) is str for o in edge_type)):
        raise ArgumentError(f"graphs: a relation is (source type, name, target type), not {shown(edge_type)}")
    for name in (edge_type[0], edge_type[2]):
        known_name(name, nodes, f"nodes: {edge_type} has nodes of a type that is not there,")
    if not isinstance(given, tuple) or len(given) != 2:
        raise ArgumentError(f"graphs: {edge_type} must be (indptr, indices), not {shown(given)}")
    indptr, indices = graph_arrays(*given)
    if len(indptr) != nodes[edge_type[2]] + 1:
        raise SourceError(
            f"indptr of {edge_type} is of {len(indptr) - 1:,} nodes, and there are {nodes[edge_type[2]]:,} "
            f"of type {edge_type[2]!r}"
        )
    return indptr, indices


def typed_fanouts(given: Any, edge_types: Sequence[EdgeType]) -> dict[EdgeType, tuple[int, ...]]:
    """Neighbours per node and hop of each relation, 0 for none. Raises ArgumentError."""
    if isinstance(given, Mapping):
        for edge_type in given:
            known_name(edge_type, edge_types, "fanouts: the graph has no relation")
        missing = [edge_type for edge_type in edge_types if edge_type not in given]
        if missing:
            raise ArgumentError(f"fanouts has nothing for {', '.join(map(str, missing))}: say 0 for none")
    by_type = given if isinstance(given, Mapping) else dict.fromkeys(edge_types, as_fanouts(given))
    found = {}
    for edge_type in edge_types:
        numbers = as_sequence(by_type[edge_type], "fanouts", "numbers, one per hop")
        found[edge_type] = tuple(as_integer(one, "each of fanouts", -1, 2**31 - 1) for one in numbers)
    hops = {len(one) for one in found.values()}
    if len(hops) != 1 or hops == {0}:
        raise ArgumentError(
            f"fanouts must have one number per hop, for as many hops of every relation, not {sorted(hops)}"
        )
    return found
