"""What a split is of: the store, how many hosts, and which host owns which row of each table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.checks import check_offsets, check_range
from featstore.base.dtypes import host_dtype, node_dtype
from featstore.errors import BudgetError, FormatError
from featstore.packing.compare_orders import StoredLists, StoredTopology
from featstore.packing.memory import of_share
from featstore.packing.progress import PackStages
from featstore.packing.sources.base import FeatureSource
from featstore.packing.split.assignment import DealtRows, assign, count_hosts, equal_runs
from featstore.packing.split.lists import PASS_EDGES, count_remote, need_row
from featstore.packing.split.union import targets_between, union_of
from featstore.reader.reader import Reader
from featstore.storage.manifest import FamilyEntry, SplitGraphEntry, edge_parts
from featstore.storage.relations import graph_of_rows
from featstore.storage.store import OpenStore, StoredGraph, Table
from featstore.units import multiple_bytes

_READER_BYTES_MIN, _READER_BYTES_MAX = 4 * 2**20, 32 * 2**20


@dataclass
class SplitPlan:
    """A split under way. ``train``: masks of nodes by table. ``memory_bytes``: what is handed out of the
    budget. ``halo_disk``: limit on copies of the halo. ``split_topology``: graphs are split, too.
    ``sources``: where rows come from, by node, if not from the store. ``host_of_row``, ``remote_edges``: as
    they become known, by table and graph."""

    store: OpenStore
    hosts: int
    train: Mapping[str, NDArray[np.bool_]]
    seed: int
    memory_bytes: int
    stages: PackStages
    host_of_row: dict[str, NDArray[Any]] = field(default_factory=dict)
    remote_edges: dict[str, list[int]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    halo_disk: int | str | None = None
    split_topology: bool = False
    sources: Mapping[str, FeatureSource] | None = None

    @property
    def held_bytes(self) -> int:
        """What the hosts of all tables' rows take."""
        return sum(table.rows for table in self.store.tables.values()) * host_dtype(self.hosts).itemsize

    def need(self, needed_bytes: int, what: str) -> int:
        """The memory left when so much is taken beside the hosts of rows. Raises BudgetError."""
        needed = self.held_bytes + needed_bytes
        if needed > self.memory_bytes:
            raise BudgetError(needed, self.memory_bytes, what)
        return self.memory_bytes - needed

    @contextmanager
    def reader(self, table: Table) -> Iterator[Reader]:
        """A reader of a table's rows by their numbers, for sequential passes; see :meth:`reader_bytes`."""
        with Reader(
            self.store, tables=[table.name], memory=self.reader_bytes(table), static=None, by_row=True
        ) as reader:
            yield reader

    def reader_bytes(self, table: Table) -> int:
        """Memory of a :meth:`reader`: room for two blocks, and for a row if it is large."""
        own = max(_READER_BYTES_MIN, min(_READER_BYTES_MAX, self.memory_bytes // 8), 8 * table.row_bytes)
        return own + 4 * table.layout.pages

    def row_bytes(self, table: Table) -> int:
        """Of a row of the parts."""
        return table.row_bytes if self.sources is None else self.sources[table.name].row_bytes

    def graphs_of(self, table: str) -> list[StoredGraph]:
        return [graph for graph in self.store.graphs.values() if graph.entry.table == table]

    def offsets(self, graph: StoredGraph) -> NDArray[np.int64]:
        """The offsets of a graph's lists, int64 [rows + 1], all of them. Raises FormatError."""
        table = self.store.table(f"{graph.name}/offsets")
        with self.reader(table) as reader:
            offsets: NDArray[np.int64] = reader.read_runs([(0, table.rows)])
        check_offsets(offsets, 0, graph.edges, f"the offsets of {graph.where()}")
        return offsets

    def lists_bytes(self, graph: StoredGraph) -> int:
        """Memory of passing over a graph's lists, or what stands beside them: the offsets, a reader, and two
        blocks."""
        parts = "offsets", "sources", *edge_parts(graph.entry)
        tables = [self.store.table(f"{graph.name}/{part}") for part in parts]
        readers = max(self.reader_bytes(table) for table in tables)
        return 8 * (graph.table.rows + 1) + readers + 16 * PASS_EDGES

    def values_bytes(self, graph: StoredGraph) -> int:
        """And of passing over weights or times of its edges, beside their sources."""
        parts = edge_parts(graph.entry).keys() - {"edge_ids"}
        tables = [self.store.table(f"{graph.name}/{part}") for part in parts]
        return max((self.reader_bytes(table) + 16 * PASS_EDGES for table in tables), default=0)

    @staticmethod
    def split_entry(graph: StoredGraph) -> SplitGraphEntry:
        """A graph that is split, too, without lists."""
        entry = graph.entry
        return SplitGraphEntry(
            entry.table, graph.edges, relation=entry.relation, source_table=entry.source_table
        )

    def first_rows(self, table: str) -> list[int]:
        """int [hosts + 1]: how many rows the hosts before each have."""
        return [0, *np.cumsum(count_hosts(self.host_of_row[table], self.hosts)).tolist()]

    def rows_of(self, table: str, host: int) -> int:
        """How many rows a host has."""
        first = self.first_rows(table)
        return first[host + 1] - first[host]

    def partitions_of(self, table: Table, host: int, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool [partitions], those in which a host has rows (of this table ``rows``), or any type that edges
        join to it and that was partitioned with it has: partition p of each belongs together."""
        count = len(table.partition_offsets)
        together = self.joined() if self.store.edge_types else []
        together = [one for one in together if len(one.partition_offsets) == count]
        found = np.zeros(count - 1, bool)
        for one in together if table in together else [table]:
            own = rows
            if one is not table:
                maps = 2 * node_dtype(len(rows)).itemsize  # of the rows, which their part holds
                needed = one.rows + 8 * self.rows_of(one.name, host) + (8 + maps) * len(rows)
                self.need(needed, f"find the partitions of host {host} in table {one.name!r}")
                own = np.flatnonzero(self.host_of_row[one.name] == host)
            found |= np.diff(np.searchsorted(own, one.partition_offsets)) > 0
        return found

    def copies_bytes(self, host: int, wanted: Mapping[str, int]) -> dict[str, int]:
        """By table, how many bytes of copies of other hosts' rows a host may have, of so many ``wanted``
        rows: where not all have room, each table has as much of the room as of what is wanted."""
        if self.halo_disk is None:
            return dict.fromkeys(wanted, 0)
        row_bytes = {name: self.row_bytes(self.store.tables[name]) for name in wanted}
        own = sum(self.rows_of(name, host) * row_bytes[name] for name in wanted)
        needed = {name: count * row_bytes[name] for name, count in wanted.items()}
        limit, total = multiple_bytes(self.halo_disk, own, "halo_disk"), sum(needed.values())
        return needed if total <= limit else {name: limit * one // total for name, one in needed.items()}

    def family(
        self, uuid: str | None = None, host: int | None = None,
        split_graphs: Mapping[str, SplitGraphEntry] | None = None,
    ) -> FamilyEntry:  # fmt: skip
        return FamilyEntry(
            self.hosts, self.store.uuid, {name: self.first_rows(name) for name in self.store.tables},
            self.remote_edges, uuid, host, dict(split_graphs or {}),
        )  # fmt: skip

    # Who owns what.

    def assign(self, scratch_dir: Path) -> None:
        """Find the host of each row of each table, and count edges between hosts. ``scratch_dir``: for what
        has no room in memory."""
        together = self.joined() if self.store.edge_types else []
        if together:
            self.stages.begin("hosts", ", ".join(table.name for table in together))
            self._by_union(together, scratch_dir)
        beside = []
        for table in self.store.tables.values():
            if graph := graph_of_rows(self.store, table.name):
                beside.append((table, graph))
            elif table not in together:
                self.stages.begin("hosts", table.name)
                self.host_of_row[table.name] = self._alone(table)
        for table, graph in beside:
            self.host_of_row[table.name] = self._beside_targets(table, graph)
        for name, graph in self.store.graphs.items():
            self.remote_edges[name] = self._count_remote(graph)

    def joined(self) -> list[Table]:
        """The tables that graphs join."""
        ends = {end.name for one in self.store.graphs.values() for end in (one.table, one.source_table)}
        return [table for name, table in self.store.tables.items() if name in ends]

    def _alone(self, table: Table) -> NDArray[Any]:
        """The hosts of a table's rows, by its own graph, or in equal runs."""
        graphs = self.graphs_of(table.name)
        if not graphs:
            self.need(
                2 * node_dtype(table.rows).itemsize * table.rows, f"look up the nodes of table {table.name!r}"
            )
            return equal_runs(table.node_of_row(), table.rows, self.hosts)
        first = max(graphs, key=lambda graph: graph.edges)
        if len(graphs) > 1:
            self.warnings.append(
                f"table {table.name!r} has {len(graphs)} graphs; its hosts were chosen by {first.name!r}, "
                "which has the most edges, and the edges of the others are cut as it comes"
            )
        return self._by_graph(table, first)

    def _beside_targets(self, table: Table, graph: StoredGraph) -> NDArray[Any]:
        """The hosts of the rows of a graph's edges: each is where the node is that its edge leads to, whose
        list is sampled there. In equal runs what is of no edge."""
        numbers = self.store.table(f"{graph.name}/edge_ids")
        self.stages.begin("hosts", table.name, numbers.data_bytes)
        maps = 2 * node_dtype(table.rows).itemsize * table.rows
        self.need(maps + self.lists_bytes(graph), f"look up the edges of table {table.name!r}")
        out, host_of_row = (
            equal_runs(table.node_of_row(), table.rows, self.hosts), self.host_of_row[graph.table.name]
        )  # fmt: skip
        row_of_id, offsets = table.row_of_node(), self.offsets(graph)
        with self.reader(numbers) as reader:
            for low in range(0, graph.edges, PASS_EDGES):
                ids = reader.read_runs([(low, min(low + PASS_EDGES, graph.edges))])
                check_range(ids, table.rows, f"the edge ids of {graph.where()}")
                hosts = host_of_row[targets_between(offsets, low, low + len(ids))]
                out[ids if row_of_id is None else row_of_id[ids]] = hosts
                self.stages.add(ids.nbytes)
        return out

    def _by_graph(self, table: Table, graph: StoredGraph) -> NDArray[Any]:
        needed = self.lists_bytes(graph) + self._train_bytes(table) + self._edges_bytes(table)
        dealt = [self._dealt(table, needed)]
        lists = self.store.table(f"{graph.name}/sources")
        with self.reader(lists) as reader:
            stored: Any = StoredTopology(
                self.offsets(graph), StoredLists(reader, lists.name, graph.edges, lists.dtype)
            )
            memory = self.need(needed, f"hold the offsets of graph {graph.name!r}")
            return self._assigned(stored, dealt, memory)

    def _by_union(self, tables: Sequence[Table], scratch_dir: Path) -> None:
        """Deal out several tables together, by the graph over all their nodes."""
        first, nodes = {}, 0
        for table in tables:
            first[table.name], nodes = nodes, nodes + table.rows
        graphs = list(self.store.graphs.values())
        beside = max(map(self.lists_bytes, graphs))
        memory = self.need(beside, "pass over the graphs")
        with (
            of_share(memory // 2, self.memory_bytes, parts=2),
            union_of(graphs, first, nodes, self._lists, memory // 2, scratch_dir) as union,
        ):
            held = union.held_bytes + sum(map(self._train_bytes, tables))
            held += sum(map(self._edges_bytes, tables))
            dealt = [self._dealt(table, held) for table in tables]
            memory = self.need(held, "hold the graph over the nodes of all types")
            hosts = self._assigned(union, dealt, memory)
        for table in tables:
            self.host_of_row[table.name] = hosts[first[table.name] :][: table.rows]

    @contextmanager
    def _lists(self, graph: StoredGraph) -> Iterator[tuple[NDArray[np.int64], Callable[..., NDArray[Any]]]]:
        """A graph's offsets, and what reads its sources."""
        with self.reader(self.store.table(f"{graph.name}/sources")) as reader:
            yield self.offsets(graph), lambda low, high: reader.read_runs([(low, high)])

    def _train_bytes(self, table: Table) -> int:
        """Memory for a table's training nodes, in the order of its rows."""
        train = self.train.get(table.name)
        return 0 if train is None else 2 * table.rows + 12 * int(np.count_nonzero(train))

    def _dealt(self, table: Table, beside: int) -> DealtRows:
        """A table's rows, with its training nodes in their order; ``beside``: what is held meanwhile."""
        train = self.train.get(table.name)
        map_bytes = node_dtype(table.rows).itemsize * table.rows
        self.need(map_bytes + beside, f"look up the nodes of table {table.name!r}")
        if train is not None and (node_of_row := table.node_of_row()) is not None:
            train = train[node_of_row]
        edges = {edges: np.diff(self.offsets(graph)) for edges, graph in self._edges_to(table)}
        return DealtRows(table.name, table.partition_offsets, train, edges)

    def _edges_to(self, table: Table) -> list[tuple[str, StoredGraph]]:
        """The tables with rows of edges that lead to a table's nodes, and their graphs."""
        found = ((name, graph_of_rows(self.store, name)) for name in self.store.tables)
        return [
            (name, graph) for name, graph in found if graph is not None and graph.table.name == table.name
        ]

    def _edges_bytes(self, table: Table) -> int:
        """Memory for how many rows of edges go where each row of a table goes, and the offsets meanwhile."""
        to = len(self._edges_to(table))
        return 8 * (to + 1) * (table.rows + 1) if to else 0

    def _assigned(self, graph: Any, dealt: Sequence[DealtRows], memory: int) -> NDArray[Any]:
        with of_share(memory, self.memory_bytes):
            found = assign(graph, dealt, self.hosts, seed=self.seed, memory_bytes=memory)
        self.warnings.extend(found.warnings)
        return found.host_of_row

    def _count_remote(self, graph: StoredGraph) -> list[int]:
        """Edges to each host's rows from those of other hosts."""
        lists = self.store.table(f"{graph.name}/sources")
        self.need(self.lists_bytes(graph), f"hold the offsets of graph {graph.name!r}")
        self.stages.begin("count", graph.name, lists.data_bytes)
        remote, row, offsets = np.zeros(self.hosts, np.int64), 0, self.offsets(graph)
        hosts = [self.host_of_row[one.name] for one in (graph.table, graph.source_table)]
        with self.reader(lists) as reader:
            for low in range(0, graph.edges, PASS_EDGES):
                block = reader.read_runs([(low, min(low + PASS_EDGES, graph.edges))])
                row, bad = count_remote(offsets, block, low, row, *hosts, remote)
                need_row(bad, low, graph.where())
                self.stages.add(block.nbytes)
        return remote.tolist()

    def read_hosts(self, topology: OpenStore) -> None:
        """Take over what a finished topology says."""
        family = topology.manifest.family
        assert family is not None
        self.remote_edges = {name: list(counts) for name, counts in family.remote_edges.items()}
        for name, table in topology.tables.items():
            self.need(0, f"hold the hosts of table {name!r}")
            with Reader(
                topology, tables=[name], memory=self.reader_bytes(table), static=None, by_row=True
            ) as reader:
                hosts = reader.read_runs([(0, table.rows)])
            check_range(hosts, self.hosts, f"the hosts of table {name!r} of {topology.path}")
            if self.split_topology:  # which has them by node
                width = node_dtype(table.rows).itemsize
                self.need(width * table.rows, f"look up the nodes of table {name!r}")
                node_of_row = self.store.tables[name].node_of_row()
                hosts = hosts if node_of_row is None else hosts[node_of_row]
            self.host_of_row[name] = hosts
            if self.first_rows(name) != family.first_rows[name]:
                raise FormatError(
                    f"{topology.path} says which host owns a row of table {name!r}, and counts otherwise: "
                    "run "
                    "`featstore verify` on it, and split anew with --overwrite"
                )
