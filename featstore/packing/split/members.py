"""Writing the stores of a family: the topology, which knows all nodes and no features, and a part for each
host.

Rows of a part come from the store in its order, by reads that go through the file once and are verified; what
was interrupted goes on from the last checkpoint of its rows. All else of a store is small beside them, and is
written anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from featstore.base.dtypes import node_dtype
from featstore.packing.permute import RowMaps
from featstore.packing.row_ids import inverse
from featstore.packing.sources.memory import ArrayRows
from featstore.packing.split.family_store import FamilyStore, StoredRows, pieces
from featstore.packing.split.lists import PASS_EDGES, local_lists, local_values
from featstore.packing.split.plan import SplitPlan
from featstore.packing.split.sources import NodesOfSource, in_order_of
from featstore.packing.split.whole_lists import write_whole_lists
from featstore.reader.reader import Reader
from featstore.storage.manifest import (
    HALO,
    HALO_DEGREES,
    HALO_IDS,
    HALO_NODES,
    HALO_USES,
    GraphEntry,
    HubsEntry,
    TableEntry,
    edge_parts,
)
from featstore.storage.store import StoredGraph, Table
from featstore.storage.transaction import Transaction

_BY_NODE = {"chosen_because": "owners are looked up by node id"}
_BECAUSE = {"chosen_because": "it is the order of the store that was split"}
_OFFSETS_AT_ONCE = 1 << 19
_NO_USES = np.empty(0, np.uint32)


def write_topology_store(plan: SplitPlan, transaction: Transaction, provenance: dict[str, Any]) -> None:
    """All graphs as they are, unless they are split, over tables that say which host owns a row, and all
    small arrays."""
    member = FamilyStore(plan, transaction, "topology")
    tables = {}
    for name, table in plan.store.tables.items():
        width = node_dtype(table.rows).itemsize
        memory = plan.need(2 * width * table.rows, f"hold the maps of table {name!r}")
        if plan.split_topology:
            tables[name] = _owners_by_node(member, table, memory)
            continue
        entry = table.entry.order
        order = member.order(
            name, entry.method, dict(entry.parameters), table.partition_offsets,
            row_of_node=table.row_of_node(), rows_by_degree=table.rows_by_degree(),
            node_of_row=(node_of_row := table.node_of_row()),
        )  # fmt: skip
        source = ArrayRows(plan.host_of_row[name], name=f"the hosts of table {name!r}")
        maps = RowMaps(node_of_source=node_of_row, node_of_row=node_of_row)
        tables[name] = member.table(name, source, order, maps, memory)
    graphs, split = {}, {}
    for name, graph in plan.store.graphs.items():
        if plan.split_topology:
            split[name] = plan.split_entry(graph)
        else:
            graphs[name] = _copied(member, graph)
    arrays = {}
    for name, array in plan.store.manifest.arrays.items():
        values = plan.store.arrays[name]
        plan.need(values.nbytes, f"hold the array {name!r}")
        arrays[name] = member.array(f"arrays/{name}", values)
        del values, array
    member.commit(tables, graphs, arrays, plan.family(split_graphs=split), provenance)


def _owners_by_node(member: FamilyStore, table: Table, memory_bytes: int) -> TableEntry:
    """Which host owns each node, in the order of node ids: nothing else of all nodes, no map for one."""
    row_of_node, hosts = table.row_of_node(), member.plan.host_of_row[table.name]
    if row_of_node is not None:
        hosts = hosts[row_of_node]
    order = member.order(table.name, "given", dict(_BY_NODE), np.array([0, table.rows], np.int64))
    source = ArrayRows(hosts, name=f"the hosts of table {table.name!r}")
    return member.table(table.name, source, order, RowMaps(), memory_bytes)


def _copied(member: FamilyStore, graph: StoredGraph) -> GraphEntry:
    """A graph as it is: with all that there is of its edges, and its hubs."""
    store, entry, base = member.plan.store, graph.entry, f"graphs/{graph.name}"

    def copied(part: str, step: int = PASS_EDGES) -> TableEntry:
        table = store.table(f"{graph.name}/{part}")
        return member.vector(f"{base}/{part}", member.blocks(table, step), table.rows, table.dtype)

    def parts(of: GraphEntry | HubsEntry, prefix: str = "") -> dict[str, Any]:
        return {part: copied(f"{prefix}{part}") for part in edge_parts(of)}

    found: dict[str, Any] = {
        "offsets": copied("offsets", _OFFSETS_AT_ONCE), "sources": copied("sources"), **parts(entry),
    }  # fmt: skip
    if entry.hubs is not None:
        rows, ends = graph.hub_rows()
        found["hubs"] = HubsEntry(
            entry.hubs.method, member.array(f"{base}/hub_rows", rows),
            member.array(f"{base}/hub_offsets", ends), copied("hubs"), **parts(entry.hubs, "hub_"),
        )  # fmt: skip
    return msgspec.structs.replace(entry, **found)


def write_part(
    plan: SplitPlan, transaction: Transaction, host: int, uuid: str, provenance: dict[str, Any]
) -> None:
    """The rows of one host, and the lists among them."""
    member = FamilyStore(plan, transaction, f"host-{host}")
    tables, graphs, arrays, split = {}, {}, {}, {}
    for name, table in plan.store.tables.items():
        tables[name] = _own_rows(member, table, host)
    named: dict[str, list[tuple[NDArray[Any], NDArray[np.uint32]]]] = {}
    halo_bytes = 0
    for name, graph in plan.store.graphs.items():
        graphs[name], halo_ids, halo_uses = _own_lists(member, graph, host, halo_bytes)
        for what, values in ((HALO_IDS, halo_ids), (HALO_USES, halo_uses)):
            arrays[f"{name}.{what}"] = member.array(f"arrays/{name}.{what}", values)
        if plan.split_topology or plan.halo_disk is not None:
            named.setdefault(graph.source_table.name, []).append((halo_ids, halo_uses))
            halo_bytes += halo_ids.nbytes + halo_uses.nbytes
    for name, graph in plan.store.graphs.items() if plan.split_topology else ():
        own = [ids for ids, _ in named.get(graph.table.name, ())]
        plan.need(halo_bytes + 3 * sum(ids.nbytes for ids in own), f"hold the halo of {graph.table.name!r}")
        halo = np.unique(np.concatenate(own)) if own else np.empty(0, np.int64)
        split[name], degrees = write_whole_lists(member, graph, host, halo, halo_bytes)
        arrays[f"{name}.{HALO_DEGREES}"] = member.array(f"arrays/{name}.{HALO_DEGREES}", degrees)
    named = {name: halos for name, halos in named.items() if name not in plan.store.featureless}
    named = named if plan.halo_disk is not None else {}
    wanted = {name: _distinct(plan, halos, halo_bytes) for name, halos in named.items()}
    limits = plan.copies_bytes(host, wanted)
    for name, halos in named.items():
        most = limits[name] // plan.row_bytes(plan.store.tables[name])
        tables[f"{name}.{HALO}"], nodes = _copies(
            member, plan.store.tables[name], host, halos, most, halo_bytes
        )
        arrays[f"{name}.{HALO_NODES}"] = member.array(f"arrays/{name}.{HALO_NODES}", nodes)
    featureless = plan.store.featureless
    member.commit(tables, graphs, arrays, plan.family(uuid, host, split), provenance, featureless)


def _own_rows(member: FamilyStore, table: Table, host: int) -> TableEntry:
    plan, name = member.plan, table.name
    width, own = node_dtype(table.rows).itemsize, plan.rows_of(name, host)
    needed = table.rows * (2 + width) + own * (16 + 3 * width) + plan.reader_bytes(table)
    needed += 0 if plan.sources is None else 16 * own + plan.sources[name].held_bytes
    memory = plan.need(needed, f"find the rows of host {host} in table {name!r}")
    rows = np.flatnonzero(plan.host_of_row[name] == host)
    row_of_node, node_of_row = _local_maps(table, rows)
    order = member.order(
        name, table.entry.order.method, dict(_BECAUSE),
        _own_partitions(table, rows, plan.partitions_of(table, host, rows)),
        row_of_node=row_of_node, node_of_row=node_of_row,
        rows_by_degree=_own_by_degree(table, rows, plan.host_of_row[name], host),
    )  # fmt: skip
    if plan.sources is not None:
        all_nodes = table.node_of_row()
        nodes = rows if all_nodes is None else np.sort(all_nodes[rows])
        del all_nodes
        checksums = _checksums(member, table, rows)
        if checksums is not None and row_of_node is not None:
            checksums = checksums[row_of_node]
        source = NodesOfSource(plan.sources[name], nodes, checksums)
        return member.table(name, source, order, RowMaps.of(row_of_node, node_of_row, None), memory)
    del row_of_node
    with plan.reader(table) as reader:
        maps = RowMaps(node_of_source=node_of_row, node_of_row=node_of_row)
        return member.table(name, StoredRows(reader, table, rows), order, maps, memory)


def _checksums(member: FamilyStore, table: Table, rows: NDArray[np.int64]) -> NDArray[np.uint32] | None:
    """uint32 [rows], what the store of the order has of these rows; None where they have no features."""
    if table.name in member.plan.store.featureless:
        return None
    found = np.empty(len(rows), np.uint32)
    with member.plan.reader(table) as reader:
        for low in range(0, len(rows), PASS_EDGES):
            some = rows[low : low + PASS_EDGES]
            reader.read(some, out=found[low : low + len(some)])
    return found


def _distinct(
    plan: SplitPlan, halos: list[tuple[NDArray[Any], NDArray[np.uint32]]], beside_bytes: int
) -> int:  # fmt: skip
    """How many nodes there are in halos of several graphs."""
    if len(halos) == 1:
        return len(halos[0][0])
    plan.need(3 * sum(ids.nbytes for ids, _ in halos) + beside_bytes, "count the nodes of the halo")
    return len(np.unique(np.concatenate([ids for ids, _ in halos])))


def _copies(
    member: FamilyStore, table: Table, host: int, halos: list[tuple[NDArray[Any], NDArray[np.uint32]]],
    most: int, beside_bytes: int,
) -> tuple[TableEntry, NDArray[Any]]:  # fmt: skip
    """Rows of other hosts that the host's lists name most often, ``most`` at most, in the store's order; and
    the nodes that they are of. ``beside_bytes``: what else is in memory."""
    plan, name = member.plan, f"{table.name}.{HALO}"
    count = sum(len(ids) for ids, _ in halos)
    needed = (
        beside_bytes + 56 * count + table.rows * node_dtype(table.rows).itemsize + plan.reader_bytes(table)
    )
    memory = plan.need(needed, f"find the halo of host {host} in table {table.name!r}")
    nodes, inverse_of = np.unique(np.concatenate([ids for ids, _ in halos]), return_inverse=True)
    uses = np.bincount(inverse_of, np.concatenate([uses for _, uses in halos]), len(nodes))
    kept = nodes[np.lexsort((nodes, -uses))[:most]]  # ties by node id
    row_of_node = table.row_of_node()
    rows = np.sort(kept if row_of_node is None else row_of_node[kept]).astype(np.int64)
    del row_of_node
    order = member.order(name, "given", dict(_BECAUSE), np.array([0, len(rows)], np.int64))
    node_of_row = table.node_of_row()
    own = rows if node_of_row is None else node_of_row[rows].astype(np.int64)
    del node_of_row
    if plan.sources is not None:
        place = np.argsort(own)  # of the copies in the order in which the source has them
        checksums = _checksums(member, table, rows)
        checksums = None if checksums is None else checksums[place]
        source = NodesOfSource(plan.sources[table.name], own[place], checksums)
        entry = member.table(name, source, order, in_order_of(place), memory)
    else:
        with plan.reader(table) as reader:
            entry = member.table(name, StoredRows(reader, table, rows), order, RowMaps(), memory)
    return entry, own.astype(node_dtype(table.rows))


def _local_maps(table: Table, rows: NDArray[np.int64]) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
    """(row_of_node, node_of_row) of a host's ``rows``: a node's local id is its rank among them."""
    node_of_row = table.node_of_row()
    if node_of_row is None:
        return None, None
    row_of_node = np.argsort(node_of_row[rows], kind="stable").astype(node_dtype(len(rows)))
    return row_of_node, inverse(row_of_node)


def _own_partitions(
    table: Table, rows: NDArray[np.int64], kept: NDArray[np.bool_]
) -> NDArray[np.int64]:  # fmt: skip
    """Where the partitions that are ``kept`` begin among a host's ``rows``, and end at last."""
    begins = np.searchsorted(rows, table.partition_offsets[:-1][kept])
    return np.append(begins if len(begins) else 0, len(rows)).astype(np.int64)


def _own_by_degree(
    table: Table, rows: NDArray[np.int64], host_of_row: NDArray[Any], host: int
) -> NDArray[Any] | None:
    ranked = table.rows_by_degree()
    if ranked is None:
        return None
    own: NDArray[Any] = np.searchsorted(rows, ranked[host_of_row[ranked] == host])
    return own.astype(node_dtype(len(rows)))


def _own_lists(
    member: FamilyStore, graph: StoredGraph, host: int, beside_bytes: int
) -> tuple[GraphEntry, NDArray[Any], NDArray[np.uint32]]:
    """(the graph among a host's rows, ids of the nodes of others that its lists name, how often);
    ``beside_bytes``: what else is in memory."""
    plan, lists = member.plan, member.plan.store.table(f"{graph.name}/sources")
    total, own = graph.table.rows, plan.rows_of(graph.table.name, host)
    others, remote = graph.source_table.rows, plan.remote_edges[graph.name][host]
    own_sources = plan.rows_of(graph.source_table.name, host)
    dtype, base = node_dtype(own_sources), f"graphs/{graph.name}"
    needed = others * (4 + 2 * node_dtype(others).itemsize) + total + (own + own_sources) * 24
    needed += beside_bytes
    needed += 0 if graph.source_table is graph.table else total * node_dtype(own).itemsize
    plan.need(
        needed + 20 * min(others - own_sources, remote) + plan.lists_bytes(graph) + plan.values_bytes(graph),
        f"hold the lists of host {host} in graph {graph.name!r}",
    )
    host_of_row, host_of_source = (plan.host_of_row[t.name] for t in (graph.table, graph.source_table))
    rows, offsets = np.flatnonzero(host_of_row == host), plan.offsets(graph)
    local_row = _local_rows(host_of_source, host, own_sources)
    place = local_row if graph.source_table is graph.table else _local_rows(host_of_row, host, own)
    degrees, uses = np.zeros(own, np.int64), np.zeros(others, np.uint32)
    edges = int((offsets[rows + 1] - offsets[rows]).sum()) - remote
    with plan.reader(lists) as reader:
        blocks = local_lists(
            _sources(reader), offsets, rows, host_of_row, place, host, host_of_source, local_row, degrees,
            uses, graph.where(),
        )  # fmt: skip
        if edges == 0:  # nothing to write, and yet nodes of others to count
            for _ in blocks:
                pass
        sources = member.vector(f"{base}/sources", blocks, edges, dtype)
    parts = _own_values(
        member, graph, graph.entry, "", edges, offsets, rows, host_of_row, host, host_of_source
    )
    del offsets, rows
    ends = np.zeros(own + 1, np.int64)
    np.cumsum(degrees, out=ends[1:])
    found: dict[str, Any] = {
        "offsets": member.vector(f"{base}/offsets", pieces(ends), own + 1, np.dtype(np.int64)),
        "sources": sources, "hubs": _own_hubs(member, graph, host, place, local_row, degrees),
    }  # fmt: skip
    halo = np.flatnonzero(uses)
    uses, node_of_row = uses[halo], graph.source_table.node_of_row()
    nodes = halo if node_of_row is None else node_of_row[halo]
    order = np.argsort(nodes, kind="stable")
    return (
        msgspec.structs.replace(graph.entry, edges=edges, **found, **parts),
        nodes[order].astype(node_dtype(others)),
        uses[order],
    )


def _local_rows(host_of_row: NDArray[Any], host: int, own: int) -> NDArray[Any]:
    """[rows], which of a host's ``own`` rows each of its rows is; of others zero."""
    local_row = np.zeros(len(host_of_row), node_dtype(own))
    local_row[host_of_row == host] = np.arange(own, dtype=local_row.dtype)
    return local_row


def _sources(reader: Reader) -> Callable[[int, int], NDArray[Any]]:
    return lambda low, high: reader.read_runs([(low, high)])


def _own_hubs(
    member: FamilyStore, graph: StoredGraph, host: int, place: NDArray[Any], local_row: NDArray[Any],
    degrees: NDArray[np.int64],
) -> HubsEntry | None:  # fmt: skip
    """The store's hubs that the host owns, with their lists among its rows; None where there are none.
    ``place``, ``local_row``: which of the host's rows a target, and a source, is."""
    if graph.entry.hubs is None:
        return None
    plan, base = member.plan, f"graphs/{graph.name}"
    host_of_source, copies = plan.host_of_row[graph.source_table.name], plan.store.table(f"{graph.name}/hubs")
    hub_rows, hub_offsets = graph.hub_rows()
    owner = plan.host_of_row[graph.table.name][hub_rows]
    mine = np.flatnonzero(owner == host)
    if len(mine) == 0:
        return None
    rows = place[hub_rows[mine]]
    ends = np.zeros(len(mine) + 1, np.int64)
    np.cumsum(degrees[rows], out=ends[1:])
    place_of_hub, counted = np.zeros(len(owner), np.int64), np.zeros(len(mine), np.int64)
    place_of_hub[mine] = np.arange(len(mine))
    with plan.reader(copies) as reader:
        blocks = local_lists(
            _sources(reader), hub_offsets, mine, owner, place_of_hub, host, host_of_source, local_row,
            counted, _NO_USES, f"the hubs of {graph.where()}",
        )  # fmt: skip
        sources = member.vector(f"{base}/hubs", blocks, int(ends[-1]), local_row.dtype)
    parts = _own_values(
        member, graph, graph.entry.hubs, "hub_", int(ends[-1]), hub_offsets, mine, owner, host, host_of_source
    )
    return HubsEntry(
        graph.entry.hubs.method, member.array(f"{base}/hub_rows", rows),
        member.array(f"{base}/hub_offsets", ends), sources, **parts,
    )  # fmt: skip


def _own_values(
    member: FamilyStore, graph: StoredGraph, entry: GraphEntry | HubsEntry, prefix: str, edges: int,
    offsets: NDArray[np.int64], lists: NDArray[np.int64], host_of_list: NDArray[Any], host: int,
    host_of_source: NDArray[Any],
) -> dict[str, Any]:  # fmt: skip
    """Weights and times of the edges among a host's rows, ``edges`` of them; their numbers, which are of rows
    that may be anywhere, are in the topology alone."""
    plan, found = member.plan, dict[str, Any]()
    for part in edge_parts(entry):
        if part == "edge_ids":
            found[part] = msgspec.UNSET
            continue
        name = f"{prefix}{part}"
        table = plan.store.table(f"{graph.name}/{name}")
        beside = plan.store.table(f"{graph.name}/{'hubs' if prefix else 'sources'}")
        with plan.reader(beside) as reader, plan.reader(table) as values:
            blocks = local_values(
                _sources(reader), _sources(values), table.dtype, offsets, lists, host_of_list, host,
                host_of_source,
            )  # fmt: skip
            found[part] = member.vector(f"graphs/{graph.name}/{name}", blocks, edges, table.dtype)
    return found
