"""What a pack makes of a table's graph: the order of its rows, and the graph in that order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.checks import check_distinct, check_inverse, check_offsets
from featstore.base.dtypes import node_dtype
from featstore.errors import BudgetError, FormatError, SourceError
from featstore.layout import TableLayout
from featstore.order import Order, make_order
from featstore.order.permutation import check_rankable, degree_memory_bytes, degree_order
from featstore.packing.graphs.csc import CscGraph
from featstore.packing.graphs.opening import open_graph
from featstore.packing.inputs import Inputs, node_mask
from featstore.packing.keys.packed import PackedKeys
from featstore.packing.memory import of_share
from featstore.packing.progress import PackStages
from featstore.packing.request import Options
from featstore.packing.row_ids import inverse
from featstore.packing.topology import TopologyJob, topology_memory_bytes, write_topology
from featstore.storage.arrays import load_array
from featstore.storage.edge_types import EDGE_FEATURES, EdgeType
from featstore.storage.entry_checks import check_order
from featstore.storage.journal import TableProgress
from featstore.storage.manifest import ArrayEntry, OrderEntry, array_chunk
from featstore.storage.table_writer import Catalogue, write_array
from featstore.storage.transaction import Transaction


def load(catalogue: Catalogue, entry: ArrayEntry | None) -> NDArray[Any] | None:
    """A small array that has just been written; None for none."""
    if entry is None:
        return None
    chunk = array_chunk(entry)
    return load_array(catalogue.root, entry, None if chunk is None else catalogue.files[chunk])


def check_edge_rows(edges: int, rows: int | None, table: str = EDGE_FEATURES) -> None:
    """Raise SourceError where a graph's edges cannot number the rows of the table of edges."""
    if rows not in (None, edges):
        raise SourceError(
            f"table {table!r} has {rows:,} rows, and the graph {edges:,} edges: row e is to be "
            "that of edge e. Give the edges that the rows are of; or edge_ids=False, and the numbers of "
            "edges are not kept"
        )


class Orders:
    """Makes the orders of a pack's tables, and writes them and the graphs, durably.

    ``keys``: those of the tables' nodes; ``edge_rows``: of the table whose rows the edges of the graph
    number, None where there is none, or nobody knows yet.
    """

    def __init__(
        self, transaction: Transaction, inputs: Inputs, options: Options, stages: PackStages,
        keys: PackedKeys, edge_rows: int | None = None,
    ) -> None:  # fmt: skip
        self._edge_rows = edge_rows
        self.transaction, self.catalogue = transaction, transaction.catalogue
        self.generation = transaction.generation
        self.inputs = inputs
        self.graphs = {} if inputs.types else inputs.graphs  # by table
        self.options = options
        self._stages = stages
        self._keys = keys

    def check(self, name: str, rows: int, progress: TableProgress) -> None:
        """Raise FormatError, CorruptionError unless the order in the journal is one: kernels follow it."""
        order, what = progress.order, f"table {name!r}"
        assert order is not None
        files = {file.path: file for file in progress.order_files}
        with self.transaction.resuming():
            check_order(what, order, rows, self.generation.name, files)
            if name in self.inputs.ordered and order.rows_by_degree is None:
                raise FormatError(f"{what} has a graph, and its rows by degree are not listed")
            for file in files.values():
                self.catalogue.add(file.path, file.bytes, file.digest)
            offsets = load(self.catalogue, order.partition_offsets)
            assert offsets is not None
            check_offsets(offsets, 0, rows, f"the partition offsets of {what}")
            by_degree = load(self.catalogue, order.rows_by_degree)
            if by_degree is not None:
                check_distinct(by_degree, rows, f"rows_by_degree of {what}")
            del by_degree  # the budget is for two maps
            row_of_node = load(self.catalogue, order.row_of_node)
            node_of_row = load(self.catalogue, order.node_of_row)
            if row_of_node is not None and node_of_row is not None:
                check_inverse(row_of_node, node_of_row, f"row_of_node and node_of_row of {what}")

    def prepare(self, layouts: Mapping[str, TableLayout]) -> None:
        """Make what is of several tables at once: nothing, where graphs have no edge types."""

    def make(self, name: str, base: str, layout: TableLayout, progress: TableProgress) -> None:
        """What is made of the table's graph, which is gone again before its rows are written."""
        self._stages.begin("graph" if name in self.graphs else "order", name)
        graph = self._graph(name, layout.rows)
        if graph is not None:
            check_edge_rows(graph.edges, self._edge_rows)
        if progress.order is None:
            if graph is not None:
                for values in self.inputs.values.get(name, ()):
                    values.check(graph.edges)  # before the order, which may take long
            self._stages.begin("order", name)
            self._make_order(name, base, layout, progress, graph)
        else:
            for file in progress.order_files:
                self.catalogue.add(file.path, file.bytes, file.digest)
        if graph is not None and self.options.topology:
            self._stages.begin("topology", name)
            self._write_topology(name, graph)

    def _write_topology(
        self, name: str, graph: CscGraph, edge_type: EdgeType | None = None, beside_bytes: int = 0
    ) -> None:
        """Write a graph, between the nodes of its edge type, or of the table of its name. ``beside_bytes``:
        what is held meanwhile."""
        journal = self.transaction.journal
        source, _, target = edge_type or (name, "", name)
        order, of_sources, progress = (
            journal.table(target).order,
            journal.table(source).order,
            journal.table(name),
        )
        assert order is not None and of_sources is not None  # noqa: PT018
        row_of_node = load(self.catalogue, order.row_of_node)
        row_of_source = row_of_node if source == target else load(self.catalogue, of_sources.row_of_node)
        by_degree = load(self.catalogue, order.rows_by_degree)
        offsets = load(self.catalogue, order.partition_offsets)
        assert offsets is not None and by_degree is not None  # noqa: PT018
        maps = {id(one): one.nbytes for one in (row_of_node, row_of_source) if one is not None}
        held = beside_bytes + graph.held_bytes + by_degree.nbytes + sum(maps.values())
        before = set(self.catalogue.files)
        job = TopologyJob(
            self.catalogue, f"{self.generation.name}/graphs/{name}", target, graph, row_of_node,
            row_of_source, offsets, by_degree, self.options.hubs, self.options.hub_rank,
            self.options.edge_ids, self.options.memory_bytes - held, self.generation.spill,
            self.inputs.values.get(name, ()), edge_type,
        )  # fmt: skip
        try:
            progress.graph = write_topology(job)
        except BudgetError as error:
            raise BudgetError(error.needed_bytes + held, self.options.memory_bytes, error.what) from None
        progress.graph_files = [f for path, f in self.catalogue.files.items() if path not in before]
        self.catalogue.fsync_directories()
        self.transaction.journal.save()

    def _make_order(
        self, name: str, base: str, layout: TableLayout, progress: TableProgress, graph: CscGraph | None
    ) -> None:
        """Find the table's order, and its rows by descending degree where there is a graph; write both,
        durably."""
        memory = self.options.memory_bytes
        if graph is not None:  # what comes next must not find the order made for nothing
            check_rankable(layout.rows)
            held = graph.held_bytes
            maps = 2 * node_dtype(layout.rows).itemsize * layout.rows
            needed = held + degree_memory_bytes(layout.rows)
            needed += maps if self.options.order[name] != "given" else 0
            if self.options.topology:
                least = topology_memory_bytes(layout.rows, self.options.hub_rank, permuted=True)
                needed = max(needed, held + maps + least)
            if needed > memory:
                raise BudgetError(needed, memory, f"hold the graph of table {name!r} and rank its nodes")
            memory -= held
        order = make_order(
            self.options.order[name], graph, rows=layout.rows, row_bytes=layout.row_bytes,
            parts=self.options.partitions.get(name), permutation=self.options.permutation.get(name),
            seed=self.options.seed, memory_bytes=memory, train=self._train(name, layout.rows),
        )  # fmt: skip
        row_of_node = None if order.node_of_row is None else inverse(order.node_of_row)
        by_degree = None
        if graph is not None:
            nodes = degree_order(graph).node_of_row
            by_degree = nodes if row_of_node is None or nodes is None else row_of_node[nodes]
        self.write(name, base, order, row_of_node, by_degree)
        self.catalogue.fsync_directories()
        self.transaction.journal.save()

    def _train(self, name: str, rows: int) -> NDArray[np.bool_] | None:
        """The training nodes of a table as a mask, bool [rows]."""
        given = self.options.train.get(name)
        if given is None:
            return None
        arrays = self.inputs.arrays
        if isinstance(given, str) and given not in arrays:
            raise SourceError(
                f"train names the array {given!r}, which is not among those given: "
                f"{', '.join(map(repr, arrays)) or 'none'}"
            )
        return node_mask(arrays[given] if isinstance(given, str) else given, rows)

    def _numbered(self, name: str) -> bool:
        """Whether the numbers of a graph's edges are wanted."""
        return self.options.edge_ids or name in self.inputs.values

    def _graph(self, name: str, rows: int) -> CscGraph | None:
        if name not in self.graphs:
            return None
        spec = self.graphs[name]
        if isinstance(spec, CscGraph):
            if spec.nodes != rows:
                raise SourceError(
                    f"the graph of table {name!r} has {spec.nodes:,} nodes, its features {rows:,} rows"
                )
            return spec
        memory = self.options.memory_bytes // 2
        with of_share(memory, self.options.memory_bytes, parts=2):
            return open_graph(
                spec, nodes=rows, memory_bytes=memory, scratch_dir=self.generation.spill,
                key=self.options.graph_key.get(name), edge_ids=self._numbered(name),
                ends=self._keys.ends(name, name),
            )  # fmt: skip

    def write(
        self, name: str, base: str, order: Order, row_of_node: NDArray[Any] | None,
        by_degree: NDArray[Any] | None,
    ) -> None:  # fmt: skip
        """Write an order in the directory ``base``, and what it consists of into the journal's state."""
        before = set(self.catalogue.files)

        def maybe(name: str, values: NDArray[Any] | None) -> ArrayEntry | None:
            return None if values is None else write_array(self.catalogue, f"{base}/{name}", values)

        progress = self.transaction.journal.table(name)
        progress.order = OrderEntry(
            method=order.method,
            parameters=dict(order.parameters),
            partition_offsets=write_array(
                self.catalogue, f"{base}/partition_offsets", order.partition_offsets
            ),
            row_of_node=maybe("row_of_node", row_of_node),
            node_of_row=maybe("node_of_row", order.node_of_row),
            rows_by_degree=maybe("rows_by_degree", by_degree),
        )
        progress.order_files = [f for path, f in self.catalogue.files.items() if path not in before]
