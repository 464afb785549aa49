"""How mini-batches grow hop by hop over lists that several hosts have, with the options that owners draw by:
the loop is that of samplers in memory (:class:`featstore.sampling.growing.Growing`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from featstore.hosts.neighbours import AskedHop, Neighbours
from featstore.hosts.questions import Draw, OfNodes
from featstore.sampling.growing import Bounds, EdgeArrays, Growing, Grown, Relation
from featstore.sampling.options import SamplingOptions
from featstore.sampling.picking import table_size

_NONE = np.empty(0, np.int64)
SLOT_BYTES = 8


class GrowingOverHosts(Growing):
    """One mini-batch at a time, with the ``neighbours`` that hosts have. ``graphs``: the name of each
    relation's graph."""

    def __init__(
        self, types: Mapping[str, int], relations: Sequence[Relation], options: SamplingOptions,
        graphs: Mapping[str | None, str], neighbours: Neighbours,
    ) -> None:  # fmt: skip
        super().__init__(types, relations, options, {})
        self._graphs, self._neighbours = graphs, neighbours
        self._asked: dict[str | None, AskedHop] = {}
        self._known: dict[str | None, list[NDArray[np.int64]]] = {}  # the user's numbers of edges, by hop

    def forget(self) -> None:
        """Give back what has come for a mini-batch."""
        self._asked.clear()
        self._known.clear()

    def numbers(self, relation: str | None) -> NDArray[np.int64] | None:
        """int64 [k]: the user's numbers of a relation's edges, of all hops; None where they are not
        wanted."""
        if not self._neighbours.draw(self._graphs[relation]) & Draw.NUMBERS:
            return None
        return np.concatenate([_NONE, *self._known.pop(relation, [])])

    def _begin_hop(
        self, found: Grown, hop: int, spans: Sequence[tuple[int, int]], keys: Sequence[np.uint64],
        bounds: Bounds,
    ) -> None:  # fmt: skip
        """Have the neighbours of all relations, asked for at the same time."""
        self._asked.clear()
        for relation, (begin, end), key in zip(self.relations, spans, keys, strict=True):
            if begin == end or not relation.fanouts[hop]:
                continue
            name, nodes = self._graphs[relation.name], found.nodes[relation.target][begin:end].copy()
            draw = self._neighbours.draw(name)
            trees = found.trees[relation.target][begin:end].copy() if draw & Draw.TREES else _NONE
            times = (one[trees] for one in bounds) if draw & Draw.TIMES else (_NONE, _NONE)
            of = OfNodes(nodes, trees, *times)
            self._asked[relation.name] = self._neighbours.hop(name, of, relation.fanouts[hop], key)
        self._neighbours.have(list(self._asked.values()), self._held_bytes(found))

    def _hop(
        self, found: Grown, relation: Relation, fanout: int, span: tuple[int, int], key: np.uint64,
        bounds: Bounds,
    ) -> EdgeArrays:  # fmt: skip
        hop = self._asked.get(relation.name)
        if hop is None:
            return _NONE, _NONE, _NONE
        source, edges = relation.source, hop.edges
        count, total = found.count[source], self.types[source]
        bound = min(count + edges, total) if self._plain else count + edges
        needed = self._held_bytes(found) + sum(one.held_bytes for one in self._asked.values())
        needed += 16 * table_size(hop.picks) + 32 * edges + SLOT_BYTES * table_size(bound)
        needed += (8 if self._plain else 16) * bound
        self._neighbours.reserve(needed, f"sample hop {len(found.hops[source])}")
        row, col, edge = (np.empty(edges, np.int64) for _ in range(3))
        numbers = hop.lay_out(span[0], row, col, edge)
        del self._asked[relation.name]
        if numbers is not None:
            self._known.setdefault(relation.name, []).append(numbers)
        bad = self._enter_rows(found, relation, row, col, not self._plain)
        if bad >= 0:
            raise hop.no_node(row[bad], found.nodes[relation.target][col[bad]], edge[bad])
        return row, col, edge

    def _held_bytes(self, found: Grown) -> int:
        """What a mini-batch under way takes; its edges twice, while they are joined."""
        held = [*found.nodes.values(), *found.slots.values(), *found.trees.values()]
        edges = [array for of in found.parts for part in of for array in part]
        edges += [array for of in self._known.values() for array in of]
        return sum(array.nbytes for array in held) + 2 * sum(array.nbytes for array in edges)
