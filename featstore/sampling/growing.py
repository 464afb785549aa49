"""How mini-batches grow hop by hop over relations between types of nodes, in memory, with any options.

In a hop each relation in turn looks at those nodes of its target type that the hop before found first, and
appends the new ones to its source type: the layout of PyG's sampler of heterogeneous graphs. A graph without
types is one relation of one type. Whatever may be said, :class:`SamplingOptions` has it, and the kernels are
in :mod:`featstore.sampling.choosing`; with nothing said they are those of
:mod:`featstore.sampling.picking`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import shown
from featstore.base.checks import find_fall, find_outside
from featstore.base.hashing import hop_key, relation_key
from featstore.errors import ArgumentError, IdError, SourceError
from featstore.sampling.choosing import draw_hop, fill_trees, induce_edges, order_in_time, room_in_trees
from featstore.sampling.hops import join_parts
from featstore.sampling.list_draws import enter_trees
from featstore.sampling.options import SamplingOptions, by_key, checked_times, checked_weights
from featstore.sampling.picking import (
    empty_picks,
    enter_hop,
    hop_size,
    make_room,
    sample_hop,
    seed_table,
    table_size,
)
from featstore.storage.edge_types import EdgeType

#: Row, col and position in ``indices``, int64 [k] each.
EdgeArrays = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
#: The first and the last time that each tree allows, int64 [trees], or [0].
Bounds = tuple[NDArray[np.int64], NDArray[np.int64]]

_NO_IDS = np.empty(0, np.int64)
_NO_WEIGHTS = np.empty(0, np.float64)
_EARLIEST, _LATEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Relation:
    """EdgeArrays from one type of nodes to another, as a sampler looks at them.

    ``indptr`` int64 [targets + 1] and ``indices`` [edges]: lists of sources. ``fanouts``: by hop. ``name``:
    what its draws follow from; None for those of a graph without types. ``times``: int64, of nodes where
    ``sources`` has each edge's source, else of edges; empty where there are none. ``order``: see
    :func:`featstore.sampling.choosing.order_in_time`.
    """

    source: str
    target: str
    indptr: NDArray[np.int64]
    indices: NDArray[Any]
    fanouts: tuple[int, ...]
    name: str | None = None
    weights: NDArray[Any] = field(default_factory=lambda: _NO_WEIGHTS)
    times: NDArray[np.int64] = field(default_factory=lambda: _NO_IDS)
    sources: NDArray[Any] = field(default_factory=lambda: _NO_IDS)
    order: NDArray[np.int64] = field(default_factory=lambda: _NO_IDS)

    def where(self) -> str:
        """Which relation, in a message."""
        return "" if self.name is None else f" of {self.name}"


class Grown:
    """A mini-batch under way. By type: ``nodes`` and ``trees`` with room for more, of which there are
    ``count``, and ``hops``, how many each hop found. By relation: ``row``, ``col`` and ``edge`` of each
    hop."""

    def __init__(
        self, types: Mapping[str, int], relations: int, seeds: Mapping[str, NDArray[np.int64]],
        has_trees: bool,
    ) -> None:  # fmt: skip
        self.has_trees = has_trees
        self.nodes = {**seeds, **{name: _NO_IDS for name in types if name not in seeds}}
        self.count = {name: len(nodes) for name, nodes in self.nodes.items()}
        self.hops: dict[str, list[int]] = {name: [count] for name, count in self.count.items()}
        self.trees: dict[str, NDArray[np.int64]] = {}
        self.slots: dict[str, NDArray[np.int64]] = {}
        self.parts: list[list[EdgeArrays]] = [[] for _ in range(relations)]

    def node(self, name: str) -> NDArray[np.int64]:
        """int64 [m]: the nodes of a type."""
        nodes, count = self.nodes[name], self.count[name]
        return nodes if len(nodes) == count else nodes[:count].copy()

    def batch(self, name: str) -> NDArray[np.int64] | None:
        """int64 [m]: the tree that each node of a type is in; None where there is one alone."""
        return self.trees[name][: self.count[name]].copy() if self.has_trees else None

    def edges(self, relation: int) -> EdgeArrays:
        """(row, col, edge) of a relation, of all hops; its parts are given back."""
        parts, self.parts[relation] = self.parts[relation], []
        if len(parts) == 1:
            return parts[0]
        row, col, edge = (list(one) for one in zip(*parts))
        parts.clear()
        return join_parts(row), join_parts(col), join_parts(edge)


class Growing:
    """Samples over ``relations`` between ``types`` (nodes of each). Writes to nothing: safe to use from
    several threads. Raises SourceError for options that do not fit the graph."""

    def __init__(
        self, types: Mapping[str, int], relations: Sequence[Relation], options: SamplingOptions,
        node_times: Mapping[str, NDArray[np.int64]],
    ) -> None:  # fmt: skip
        self.types, self.relations, self.options = dict(types), list(relations), options
        self.node_times = node_times
        self._plain = options.is_plain

    def sample(
        self, seeds: Mapping[str, NDArray[np.int64]], key: int, seed_times: Mapping[str, Any] | None
    ) -> Grown:
        """The nodes and edges around ``seeds``, int64 by type; ``key`` is the mini-batch's. Raises IdError
        for seeds that stand twice in one tree, ArgumentError for times that are missing."""
        found = Grown(self.types, len(self.relations), seeds, self.options.has_trees)
        for name, times in (seed_times or {}).items():
            if name not in seeds and (name not in self.types or len(times)):
                raise ArgumentError(f"seed_times={_of(name)} are of no seeds: there are none of that type")
        lows, highs = self._bounds(found, seed_times)
        self._enter(found)
        keys = [key if one.name is None else relation_key(key, one.name) for one in self.relations]
        begins = dict.fromkeys(self.types, 0)
        for hop in range(len(self.relations[0].fanouts)):
            ends = dict(found.count)
            spans = [(begins[one.target], ends[one.target]) for one in self.relations]
            keys_here = [hop_key(one, hop) for one in keys]
            self._begin_hop(found, hop, spans, keys_here, (lows, highs))
            for number, relation in enumerate(self.relations):
                part = self._hop(
                    found, relation, relation.fanouts[hop], spans[number], keys_here[number], (lows, highs)
                )
                found.parts[number].append(part)
            begins = ends
            for name, counts in found.hops.items():
                counts.append(found.count[name] - ends[name])
        if self.options.subgraph == "induced":
            self._induce(found, (lows, highs))
        return found

    def _bounds(self, found: Grown, given: Mapping[str, Any] | None) -> Bounds:
        """Of each tree, the first and the last time that it allows."""
        if not self.options.timed:
            if given is not None:
                raise ArgumentError("seed_times= has no effect without node_times= or edge_times=")
            return _NO_IDS, _NO_IDS
        parts = []
        for name, count in found.count.items():
            one = (given or {}).get(name)
            if count and one is None:
                if name not in self.node_times:
                    raise ArgumentError(f"seed_times= is needed: seeds{_of(name)} have no times of their own")
                one = self.node_times[name][found.nodes[name]]
            parts.append(_NO_IDS if one is None else checked_times(one, count, "seed_times", "seeds"))
        lasts, window = np.concatenate(parts), self.options.window
        if window is None:
            return np.full(len(lasts), _EARLIEST), lasts
        return np.where(lasts < _EARLIEST + window, _EARLIEST, lasts - window), lasts

    def _enter(self, found: Grown) -> None:
        """The seeds into tables; those of several types are trees one after the other."""
        begin = 0
        for name, nodes in found.nodes.items():
            if self._plain:
                found.slots[name] = seed_table(nodes, nodes, np.dtype(np.int64))
                continue
            trees = np.zeros(len(nodes), np.int64)
            if self.options.has_trees:
                trees += np.arange(begin, begin + len(nodes))
            slots = np.full(table_size(len(nodes)), -1, np.int64)
            twice = int(fill_trees(slots, nodes, trees, len(nodes)))
            if twice >= 0:
                raise IdError(
                    f"seed {nodes[twice]} stands twice in one mini-batch; pass each seed once (np.unique)"
                )
            found.trees[name], found.slots[name] = trees, slots
            begin += len(nodes)

    def _begin_hop(
        self, found: Grown, hop: int, spans: Sequence[tuple[int, int]], keys: Sequence[np.uint64],
        bounds: Bounds,
    ) -> None:  # fmt: skip
        """A hop begins, of the nodes ``spans`` of each relation's target type, which draws with its key."""

    def _hop(
        self, found: Grown, relation: Relation, fanout: int, span: tuple[int, int], key: np.uint64,
        bounds: Bounds,
    ) -> EdgeArrays:  # fmt: skip
        """Sample a relation's edges into the nodes ``span`` of its target type."""
        (begin, end), source = span, relation.source
        if begin == end or fanout == 0:
            return _NO_IDS, _NO_IDS, _NO_IDS
        options, targets = self.options, found.nodes[relation.target]
        edges, degree_max = self._size(relation, targets, begin, end, -1 if options.replace else fanout)
        if options.replace and fanout > 0:
            edges = fanout * (end - begin)
        count, total = found.count[source], self.types[source]
        row, col, edge = (np.empty(edges, np.int64) for _ in range(3))
        if self._plain:
            nodes, slots = make_room(
                found.nodes[source], found.slots[source], count, min(count + edges, total)
            )
            found.nodes[source], found.slots[source] = nodes, slots
            counted = sample_hop(
                relation.indptr, relation.indices, total, found.nodes[relation.target], begin, end, fanout,
                key, slots, nodes, count, empty_picks(fanout, degree_max), row, col, edge,
            )  # fmt: skip
        else:
            found.nodes[source], found.trees[source], found.slots[source] = room_in_trees(
                found.nodes[source], found.trees[source], found.slots[source], count, count + edges
            )
            weighted = len(relation.weights) > 0
            scratch = (degree_max if options.replace else min(fanout, degree_max)) if weighted else 0
            counted, edges = draw_hop(
                relation.indptr, relation.indices, total, found.nodes[relation.target],
                found.trees[relation.target], begin, end, fanout, key, found.slots[source],
                found.nodes[source], found.trees[source], count, options.replace,
                options.temporal == "last" and len(relation.times) > 0, options.has_trees,
                relation.weights, relation.order, relation.times, relation.sources, *bounds,
                empty_picks(fanout, degree_max), np.empty(max(0, scratch)), row, col, edge,
            )  # fmt: skip
            if counted >= 0 and edges < len(row):
                row, col, edge = (part[:edges].copy() for part in (row, col, edge))
        if counted < 0:
            bad = -int(counted) - 1
            raise SourceError(
                f"indices[{bad}]{relation.where()} is {relation.indices[bad]}, no node of {total:,}; build "
                "the CSC arrays again"
            )
        found.count[source] = int(counted)
        return row, col, edge

    def _enter_rows(
        self, found: Grown, relation: Relation, row: NDArray[np.int64], col: NDArray[np.int64], in_trees: bool
    ) -> int:
        """Turn what a relation's edges come from, in ``row``, into local ids, in order; new ones are new
        nodes, of the trees of who asked, ``col``. Returns -1, or the place of one that is no node."""
        source, total = relation.source, self.types[relation.source]
        count = found.count[source]
        if in_trees:
            found.nodes[source], found.trees[source], found.slots[source] = room_in_trees(
                found.nodes[source], found.trees[source], found.slots[source], count, count + len(row)
            )
            counted = enter_trees(
                found.slots[source], found.nodes[source], found.trees[source], count, row, col,
                found.trees[relation.target], total,
            )  # fmt: skip
        else:
            found.nodes[source], found.slots[source] = make_room(
                found.nodes[source], found.slots[source], count, min(count + len(row), total)
            )
            counted = enter_hop(found.slots[source], found.nodes[source], count, row, total)
        if counted < 0:
            return -int(counted) - 1
        found.count[source] = int(counted)
        return -1

    def _size(
        self, relation: Relation, targets: NDArray[np.int64], begin: int, end: int, fanout: int
    ) -> tuple[int, int]:
        """EdgeArrays that nodes will have, at most, and their largest degree."""
        edges, degree_max = hop_size(relation.indptr, len(relation.indices), targets, begin, end, fanout)
        if edges < 0:
            node = int(targets[-edges - 1])
            raise bad_offsets(relation.indptr, relation.indices, node, relation.where())
        return edges, degree_max

    def _induce(self, found: Grown, bounds: Bounds) -> None:
        """All edges among the nodes, in place of those that were drawn."""
        for number, relation in enumerate(self.relations):
            targets, count = found.nodes[relation.target], found.count[relation.target]
            self._size(relation, targets, 0, count, -1)
            row, col, edge = _NO_IDS, _NO_IDS, _NO_IDS
            for _ in range(2):  # counted, then written
                edges = int(
                    induce_edges(
                        relation.indptr, relation.indices, targets, found.trees[relation.target], count,
                        found.slots[relation.source], found.nodes[relation.source],
                        found.trees[relation.source], relation.order, relation.times, relation.sources,
                        *bounds, row, col, edge,
                    )
                )  # fmt: skip
                if edges == len(row):
                    break
                row, col, edge = (np.empty(edges, np.int64) for _ in range(3))
            found.parts[number] = [(row, col, edge)]


def grow_over(
    types: Mapping[str, int], graphs: Mapping[EdgeType, tuple[NDArray[np.int64], NDArray[Any]]],
    fanouts: Mapping[EdgeType, tuple[int, ...]], options: SamplingOptions, *, named: bool,
) -> Growing:  # fmt: skip
    """What samples over ``graphs``, checked CSC arrays, with options by edge type. ``named``: draws follow
    from the relations' names, too. Raises ArgumentError, SourceError for options that do not fit."""
    edge_types = list(graphs)
    weights = by_key(options.weights, edge_types, "weights")
    edge_times = by_key(options.edge_times, edge_types, "edge_times")
    node_times = {
        name: checked_times(one, types[name], "node_times", "nodes")
        for name, one in by_key(options.node_times, list(types), "node_times").items()
    }
    relations = []
    for edge_type, (indptr, indices) in graphs.items():
        source, _, target = edge_type
        parts: dict[str, Any] = {}
        if edge_type in weights:
            parts["weights"] = checked_weights(weights[edge_type], len(indices), "weights")
        if edge_type in edge_times:
            parts["times"] = checked_times(edge_times[edge_type], len(indices), "edge_times", "edges")
        elif source in node_times:
            parts |= {"times": node_times[source], "sources": indices}
        if "times" in parts and len(indices):
            _check_lists(indptr, indices, types[source])
            parts["order"] = order_in_time(indptr, parts["times"], parts.get("sources", _NO_IDS))
        name = "__".join(edge_type) if named else None
        relations.append(Relation(source, target, indptr, indices, fanouts[edge_type], name, **parts))
    return Growing(types, relations, options, node_times)


def bad_offsets(indptr: NDArray[np.int64], indices: NDArray[Any], node: int, where: str = "") -> SourceError:
    """What is wrong with the offsets of a node."""
    low, high = int(indptr[node]), int(indptr[node + 1])
    return SourceError(
        f"indptr{where} gives node {node} the edges {low:,} to {high:,} of {len(indices):,}: offsets must "
        "rise and stay inside indices; build the CSC arrays again"
    )


def _check_lists(indptr: NDArray[np.int64], indices: NDArray[Any], total: int) -> None:
    """Raise SourceError for lists that cannot be looked at in the order of time."""
    fall = int(find_fall(indptr))
    if fall >= 0:
        raise bad_offsets(indptr, indices, fall - 1)
    bad = int(find_outside(indices, total))
    if bad >= 0:
        raise SourceError(
            f"indices[{bad}] is {indices[bad]}, no node of a graph of {total:,}; build the CSC arrays again"
        )


def _of(name: str) -> str:
    return f" of {shown(name)}" if name else ""
