"""What a pack makes of a typed graph: the orders of its types of nodes, and each edge type's lists.

Orders that partitioners make are made together: of one graph over the nodes of all types, in which each edge
leads both ways. So partition p of one type belongs to partition p of any other, and all have as many. A type
whose order is another (given, a permutation, by degree) is left out of that graph. How often sampling asks
for a node is how often it is a source in any edge type.

Each edge list is brought into memory, or into scratch files, once. What memory has no room for while others
are looked at, index pointers too, stands in scratch files meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.dtypes import node_dtype
from featstore.base.files import map_values
from featstore.errors import BudgetError
from featstore.layout import TableLayout
from featstore.order import Order, make_order
from featstore.order.permutation import check_rankable, given_order, ranked_by_count
from featstore.order.stream import count_block, edge_blocks
from featstore.packing.graphs.build import ScratchFile, build_csc
from featstore.packing.graphs.csc import CscGraph, release_pages
from featstore.packing.graphs.edges import CsrEdges
from featstore.packing.graphs.opening import open_graph
from featstore.packing.inputs import WITHOUT_PARTITIONS
from featstore.packing.memory import of_share
from featstore.packing.ordering import Orders, check_edge_rows
from featstore.packing.row_ids import inverse

_HELD_SHARE = 4  # of the memory, at most, is for graphs that wait


@dataclass
class _UnionEdges:
    """The edges of several edge types, each both ways, between nodes that are numbered from one type to the
    next: an `EdgeStream`. ``graphs``: with the first numbers of their sources and targets."""

    graphs: Sequence[tuple[CscGraph, int, int]]
    name: str = "the typed graph"

    def blocks(self, block_edges: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        for kept, first_source, first_target in self.graphs:
            graph, done = taken_back(kept), 0
            for targets, sources in CsrEdges(graph.indptr, graph.indices, self.name).blocks(block_edges):
                ends = sources + first_source, targets + first_target
                yield ends
                yield ends[::-1]
                release_pages(graph.indices, done, done + len(sources))
                done += len(sources)

    def where(self, edge: int) -> str:
        return f"edge {edge // 2:,}"


def taken_back(graph: CscGraph) -> CscGraph:
    """The graph with its index pointers in memory."""
    if not isinstance(graph.indptr, np.memmap):
        return graph
    loaded = replace(graph, indptr=np.array(graph.indptr))
    release_pages(graph.indptr, 0, len(graph.indptr))
    return loaded


def put_away(graph: CscGraph, scratch_dir: Path) -> CscGraph:
    """The graph with its arrays in mapped scratch files."""

    def mapped(array: Any, prefix: str) -> Any:
        if not isinstance(array, np.ndarray) or isinstance(array, np.memmap) or not array.size:
            return array
        with ScratchFile(scratch_dir, prefix, keep=True) as file:
            file.write(array)
        return map_values(file.path, array.dtype, len(array))

    return replace(
        graph, indptr=mapped(graph.indptr, "graph-indptr-"), indices=mapped(graph.indices, "graph-indices-"),
        edge_ids=mapped(graph.edge_ids, "graph-ids-"),
    )  # fmt: skip


def of_one_type(order: Order, first: int, rows: int, types: Iterable[str]) -> Order:
    """What an order of all types' nodes is for the type whose nodes are ``first`` and so on."""
    parameters = {**order.parameters, "types": ", ".join(types)}
    if order.node_of_row is None:
        return Order(order.method, None, np.array([0, rows], np.int64), parameters)
    mine = (order.node_of_row >= first) & (order.node_of_row < first + rows)
    node_of_row = order.node_of_row[mine]
    node_of_row -= node_of_row.dtype.type(first)
    bounds = order.partition_offsets
    counts = [np.count_nonzero(mine[low:high]) for low, high in pairwise(bounds)]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
    parameters["balance"] = round(float(max(counts) * len(counts) / max(1, rows)), 3)
    return Order(order.method, node_of_row.astype(node_dtype(rows), copy=False), offsets, parameters)


class TypedOrders(Orders):
    """Makes the orders of all types of nodes that edge types join, and the graphs of these; all else as
    `Orders`."""

    def prepare(self, layouts: Mapping[str, TableLayout]) -> None:
        """Make what there is not yet; ``layouts``: of all types of nodes."""
        types, journal = self.inputs.types, self.transaction.journal
        ends = [name for name in self.inputs.tables if name in self.inputs.ordered]
        ordered = all(journal.table(name).order is not None for name in ends)
        wanted = [name for name in types if journal.table(name).graph is None and self.options.topology]
        for name in ends if ordered else ():
            self.check(name, layouts[name].rows, journal.table(name))
        counts = {} if ordered else {name: np.zeros(layouts[name].rows, np.uint32) for name in ends}
        graphs = self._opened(wanted if ordered else list(types), layouts, counts)
        if not ordered:
            self._make_orders(ends, layouts, graphs, counts)
        counts.clear()
        for name in wanted:
            self._stages.begin("topology", name)
            graph = graphs.pop(name)
            beside = sum(other.held_bytes for other in graphs.values())
            self._write_topology(name, taken_back(graph), types[name], beside)
            self._drop(graph)

    def _opened(
        self, names: list[str], layouts: Mapping[str, TableLayout], counts: Mapping[str, NDArray[np.uint32]]
    ) -> dict[str, CscGraph]:
        """The graphs, and how often each node is a source added to ``counts``, where there are any."""
        memory = self.options.memory_bytes - sum(count.nbytes for count in counts.values())
        scratch, held, away, graphs = self.generation.spill, 0, 0, {}
        for name in names:
            self._stages.begin("graph", name)
            source, _, target = self.inputs.types[name]
            share = (memory - held) // 2
            # of more memory some that were put away would stay
            with of_share(share, self.options.memory_bytes, 2, away):
                graph = open_graph(
                    self.inputs.graphs[name], nodes=layouts[target].rows, source_nodes=layouts[source].rows,
                    memory_bytes=share, scratch_dir=scratch, key=self.options.graph_key.get(name),
                    edge_ids=self._numbered(name), ends=self._keys.ends(source, target),
                )  # fmt: skip
            self.check_edges(name, graph.edges)
            if counts:
                for _, block in edge_blocks(graph, min(1 << 20, max(1, memory // 64))):
                    count_block(block, counts[source], 0, len(counts[source]))
                release_pages(graph.indices, 0, graph.edges)
            if held + graph.held_bytes > memory // _HELD_SHARE:
                away += graph.held_bytes
                graph = put_away(graph, scratch)
            held += graph.held_bytes
            graphs[name] = graph
        return graphs

    def check_edges(self, name: str, edges: int) -> None:
        """Raise SourceError where there are not as many rows, or values, as an edge type has edges."""
        table = self.inputs.tables.get(name)
        if table is not None and self.options.edge_ids:
            check_edge_rows(edges, table.rows, name)
        for values in self.inputs.values.get(name, ()):
            values.check(edges)

    def _make_orders(
        self, ends: list[str], layouts: Mapping[str, TableLayout], graphs: Mapping[str, CscGraph],
        counts: dict[str, NDArray[np.uint32]],
    ) -> None:  # fmt: skip
        """Find the orders of all types, and their rows by descending degree; write both, durably."""
        self._stages.begin("order", ", ".join(ends))
        held = sum(graph.held_bytes for graph in graphs.values())
        held += sum(count.nbytes for count in counts.values())
        for name in ends:
            check_rankable(layouts[name].rows)
        together = [name for name in ends if self._partitioned(name)]
        orders = self._together(together, layouts, graphs, held)
        for name in ends:
            rows = layouts[name].rows
            needed = held + rows * (8 + 3 * node_dtype(rows).itemsize)
            if needed > self.options.memory_bytes:
                raise BudgetError(needed, self.options.memory_bytes, f"rank the nodes of table {name!r}")
            nodes = ranked_by_count(counts.pop(name))
            order = orders.pop(name, None) or self._alone(name, layouts[name], nodes)
            row_of_node = None if order.node_of_row is None else inverse(order.node_of_row)
            by_degree = nodes if row_of_node is None else row_of_node[nodes]
            self.write(name, f"{self.generation.name}/tables/{name}", order, row_of_node, by_degree)
        self.catalogue.fsync_directories()
        self.transaction.journal.save()

    def _partitioned(self, name: str) -> bool:
        method = self.options.order[name]
        return method not in WITHOUT_PARTITIONS and not (
            method == "auto" and name in self.options.permutation
        )

    def _alone(self, name: str, layout: TableLayout, by_degree: NDArray[Any]) -> Order:
        """An order that is not made with those of other types."""
        if self.options.order[name] == "degree":
            offsets = given_order(layout.rows).partition_offsets
            return Order("degree", by_degree, offsets, {"chosen_because": "it was asked for"})
        return make_order(
            self.options.order[name], None, rows=layout.rows, row_bytes=layout.row_bytes,
            permutation=self.options.permutation.get(name), memory_bytes=self.options.memory_bytes,
        )  # fmt: skip

    def _together(
        self, names: list[str], layouts: Mapping[str, TableLayout], graphs: Mapping[str, CscGraph], held: int
    ) -> dict[str, Order]:
        """The orders of several types, of the graph over the nodes of all of them."""
        if not names:
            return {}
        first, rows = {}, 0
        for name in names:
            first[name], rows = rows, rows + layouts[name].rows
        types = self.inputs.types
        between = [
            (graphs[graph], first[source], first[target])
            for graph, (source, _, target) in types.items()
            if source in first and target in first
        ]
        memory = self.options.memory_bytes - held
        stream, scratch = _UnionEdges(between), self.generation.spill
        # beside it the index pointers of one of the graphs are in memory
        beside = max((g.indptr.nbytes for g, _, _ in between if isinstance(g.indptr, np.memmap)), default=0)
        share = (memory - beside) // 2
        with of_share(share, self.options.memory_bytes, parts=2):
            indptr, indices, _ = build_csc(stream, rows, share, scratch)
        union = CscGraph(indptr, indices, {})
        row_bytes = -(-sum(layouts[name].rows * layouts[name].row_bytes for name in names) // max(1, rows))
        order = make_order(
            self.options.order[names[0]], union, rows=rows, row_bytes=max(1, row_bytes),
            parts=self.options.partitions.get(names[0]), seed=self.options.seed,
            memory_bytes=memory - union.held_bytes, train=self._train_of_all(first, rows, layouts),
            groups=[*first.values(), rows],
        )  # fmt: skip
        self._drop(union)
        return {name: of_one_type(order, first[name], layouts[name].rows, names) for name in names}

    def _train_of_all(
        self, first: Mapping[str, int], rows: int, layouts: Mapping[str, TableLayout]
    ) -> NDArray[np.bool_] | None:
        given = {name: self._train(name, layouts[name].rows) for name in first}
        if all(mask is None for mask in given.values()):
            return None
        train = np.zeros(rows, bool)
        for name, mask in given.items():
            if mask is not None:
                train[first[name] : first[name] + len(mask)] = mask
        return train

    def _drop(self, graph: CscGraph) -> None:
        """Remove the scratch files of a graph."""
        for array in (graph.indptr, graph.indices, graph.edge_ids):
            path = Path(str(array.filename)) if isinstance(array, np.memmap) else None
            if path is not None and path.parent == self.generation.spill:
                self.catalogue.disk.unlink(path)
