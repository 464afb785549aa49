"""How mini-batches grow hop by hop over lists on disk, with any options.

The loop over hops and relations is that of samplers in memory (:class:`featstore.sampling.growing.Growing`);
only what a relation does in a hop is another. Where what is drawn follows from the lengths of lists alone,
offsets in memory say which positions, and just those are read. Weights and times ask for whole lists
(:mod:`featstore.sampling.whole_lists`), of these values: of the sources again only those that were drawn.
Inside there are rows, of each type of nodes its own; node ids are asked for hashes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.dtypes import node_dtype
from featstore.reader.reader import Reader
from featstore.sampling.growing import Bounds, EdgeArrays, Growing, Grown, Relation
from featstore.sampling.list_draws import close_up, induce_lists
from featstore.sampling.lists_on_disk import (
    ASKING_NODE_BYTES,
    LONGEST_BYTES,
    Asking,
    DrawnHow,
    ListRoom,
    ListsOnDisk,
)
from featstore.sampling.options import SamplingOptions
from featstore.sampling.picking import empty_picks, seed_table
from featstore.sampling.stored_hops import HopPages, hop_bytes
from featstore.sampling.under_way import MadeAgain, Scratch
from featstore.sampling.whole_lists import ListView, held_of

#: Of an edge that may be drawn, beside what it becomes.
_DRAWN_BYTES = 24
#: Of an edge that is found among some nodes, while it is brought into order.
_INDUCED_BYTES = 64
_INDUCED = "have all edges among the nodes"
_NONE = np.empty(0, np.int64)


class GrowingOnDisk(Growing):
    """One mini-batch, whose nodes are rows. ``lists`` are those of ``relations``; ``seeds``: node ids of the
    seeds by type, for errors; ``node_times``: of those types of nodes that have any, by row."""

    def __init__(
        self, types: Mapping[str, int], relations: Sequence[Relation], options: SamplingOptions,
        lists: Sequence[ListsOnDisk], node_of_row: Mapping[str, NDArray[Any]], reader: Reader,
        scratch: Scratch, seeds: Mapping[str, NDArray[np.int64]], node_times: Mapping[str, NDArray[np.int64]],
    ) -> None:  # fmt: skip
        super().__init__(types, relations, options, node_times)
        self._lists = {relation.name: one for relation, one in zip(relations, lists, strict=True)}
        self._numbers = {relation.name: number for number, relation in enumerate(relations)}
        self._node_of_row, self._reader, self._seeds = node_of_row, reader, seeds
        self._in_trees = options.has_trees or options.subgraph == "induced"
        self.reading = HopPages(scratch)

    def _enter(self, found: Grown) -> None:
        if not self.options.has_trees:  # else a seed may stand there as often as it likes
            for name, rows in found.nodes.items():
                seeds = self._seeds.get(name, rows)
                found.slots[name] = seed_table(rows, seeds, node_dtype(self.types[name]))
        if self._in_trees:
            super()._enter(found)

    # A hop of a relation.

    def _hop(
        self, found: Grown, relation: Relation, fanout: int, span: tuple[int, int], key: np.uint64,
        bounds: Bounds,
    ) -> EdgeArrays:  # fmt: skip
        if fanout == 0:
            return _NONE, _NONE, _NONE
        (begin, end), lists = span, self._lists[relation.name]
        targets, hop = found.nodes[relation.target], len(found.parts[self._numbers[relation.name]])
        edges, degree_max = lists.size(targets, begin, end, fanout, self.options.replace)
        self._reserve(found, relation, hop, span, edges, fanout, degree_max)
        if lists.is_plain and not self._in_trees:
            row, col, edge = (np.empty(edges, np.int64) for _ in range(3))
            misses = lists.pick(
                self._node_of_row[relation.target], targets, begin, end, fanout, self.options.replace, key,
                empty_picks(fanout, degree_max), row, col, edge,
            )  # fmt: skip
        else:
            row, col, edge = self._draw(found, relation, fanout, span, key, bounds, edges, degree_max)
            if lists.by_node_times:  # whose lists of sources were at hand
                misses = int(np.count_nonzero(edge >= len(lists.cache.first)))
            else:
                misses = lists.find(targets, row, col, edge)
        self.reading.asked += len(edge)
        self.reading.cached += len(edge) - misses
        if misses and not lists.by_node_times:
            last = not any(relation.fanouts[hop + 1 :])
            lists.read(self.reading, self._reader, row, edge, misses, last=last)
        bad = self._enter_rows(found, relation, row, col, self._in_trees)
        if bad >= 0:
            raise lists.bad_source(bad, row, edge)
        return row, col, edge

    def _draw(
        self, found: Grown, relation: Relation, fanout: int, span: tuple[int, int], key: np.uint64,
        bounds: Bounds, edges: int, degree_max: int,
    ) -> EdgeArrays:  # fmt: skip
        """What the nodes ``span`` draw of their lists; their neighbours in the first array only where lists
        of sources are read."""
        (begin, end), lists = span, self._lists[relation.name]
        rows, trees = found.nodes[relation.target][begin:end], found.trees.get(relation.target, _NONE)
        trees = trees[begin:end]
        hop = len(found.parts[self._numbers[relation.name]])
        places = lists.places(rows, fanout, self.options.replace)
        row, col, edge = (np.empty(edges, np.int64) for _ in range(3))
        taken, node_of_row = np.zeros(len(rows), np.int64), self._node_of_row[relation.target]
        nodes = rows if len(node_of_row) == 0 else node_of_row[rows].astype(np.int64)
        times = (one[trees] if len(one) else _NONE for one in bounds)
        of_nodes, options = lists.by_node_times, self.options
        by_last = options.temporal == "last" and (of_nodes or lists.times is not None)
        tables = lists.weights, lists.times, lists.cache if of_nodes else None
        lists.draw(
            Asking(rows, nodes, trees, *times), fanout, key,
            DrawnHow(options.replace, by_last, options.has_trees), degree_max, tables, self._reader,
            self._room(f"sample hop {hop + 1}"), places, row, edge, taken,
        )  # fmt: skip
        count = int(close_up(places, taken, begin, row, col, edge))
        if count == edges:
            return row, col, edge
        return row[:count].copy(), col[:count].copy(), edge[:count].copy()

    def _room(self, of: str) -> ListRoom:
        """Scratch for lists, of ``of`` what, for errors."""
        return lambda least, most: self.reading.reserve_lists(of, least, most)

    def _reserve(
        self, found: Grown, relation: Relation, hop: int, span: tuple[int, int], edges: int, fanout: int,
        degree_max: int,
    ) -> None:  # fmt: skip
        """Have scratch for a relation's hop, beside the nodes and tables of the other types."""
        source, lists = relation.source, self._lists[relation.name]
        count, total = found.count[source], self.types[source]
        bound = count + edges if self._in_trees else min(count + edges, total)
        needed = self._held_bytes(found, source) + hop_bytes(
            count, bound, found.slots[source].itemsize, edges, min(fanout, degree_max),
            lists.graph.entry.sources.row_bytes,
        )  # fmt: skip
        if self._in_trees:
            needed += 8 * (count + bound) + found.trees[source].nbytes
        if not lists.is_plain or self._in_trees:
            needed += ASKING_NODE_BYTES * (span[1] - span[0]) + _DRAWN_BYTES * edges
        if not lists.is_plain:
            needed += LONGEST_BYTES * degree_max
        self.reading.reserve(f"sample hop {hop + 1}", needed)

    def _held_bytes(self, found: Grown, but: str | None = None) -> int:
        """What nodes, trees and tables of all types take, but of one."""
        return sum(
            found.nodes[name].nbytes + found.slots[name].nbytes + found.trees.get(name, _NONE).nbytes
            for name in self.types if name != but
        )  # fmt: skip

    # All edges among the nodes.

    def _induce(self, found: Grown, bounds: Bounds) -> None:
        self.reading.end()
        for number, relation in enumerate(self.relations):
            lists, rows = self._lists[relation.name], found.nodes[relation.target]
            rows = rows[: found.count[relation.target]]
            _, degree_max = lists.size(rows, 0, len(rows), -1, False)
            held_bytes = self._held_bytes(found) + ASKING_NODE_BYTES * len(rows) + LONGEST_BYTES * degree_max
            self.reading.reserve(_INDUCED, held_bytes)
            parts = [
                self._induced(found, relation, bounds, *piece)
                for piece in lists.pieces(
                    rows, (None, lists.times, lists.cache), self._reader, self._room(_INDUCED)
                )
            ]
            row, col, edge = (np.concatenate(one) for one in zip(*parts))
            order = np.argsort(col, kind="stable")
            found.parts[number] = [(row[order], col[order], edge[order])]

    def _induced(
        self, found: Grown, relation: Relation, bounds: Bounds, some: NDArray[np.int64], _: ListView,
        times: ListView, sources: ListView,
    ) -> EdgeArrays:  # fmt: skip
        """Those of some nodes of the relation's target type."""
        lists, target, source = self._lists[relation.name], relation.target, relation.source
        row, col, edge = _NONE, _NONE, _NONE
        tables = lists.times, lists.cache
        while True:  # counted, then written
            edges, at = induce_lists(
                lists.offsets, found.nodes[target], found.trees[target], some, found.slots[source],
                found.nodes[source], found.trees[source], *times, *sources, lists.node_times, *bounds, row,
                col, edge,
            )  # fmt: skip
            if edges < 0:
                raise lists.bad_value(-edges, at)
            if edges == len(row):
                return row, col, edge
            held = held_of(tables)
            self.reading.reserve_more(_INDUCED, _INDUCED_BYTES * edges)
            if held_of(tables) != held:  # the views are of memory that has been cut for that
                raise MadeAgain
            row, col, edge = (np.empty(edges, np.int64) for _ in range(3))
