"""The lists of a host's nodes, whole: what each host has of the topology where that is split, too.

Lists stand in the order of the part's rows, as in the base store, with its node ids in place of its rows:
what samples from them needs no map of all nodes; and what is kept of each edge stands beside them, as there.
An edge keeps the position that it has in the base store, which follows from where the runs of rows that stand
side by side there begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.dtypes import node_dtype
from featstore.packing.split.family_store import FamilyStore, pieces
from featstore.packing.split.lists import PASS_EDGES, need_row, stretches
from featstore.storage.manifest import SplitGraphEntry, WholeListsEntry, edge_parts
from featstore.storage.store import StoredGraph, Table

_NO_MAP = np.empty(0, np.int32)


@njit(cache=True, nogil=True)
def keep_whole(
    offsets: NDArray[np.int64], block: NDArray[Any], first_edge: int, at: int, host_of_row: NDArray[Any],
    host: int, node_of_row: NDArray[Any], total: int, out: NDArray[Any],
) -> tuple[int, int, int]:  # fmt: skip
    """Of a block of sources, rows of ``total``, those in the lists of the rows of ``host``, as node ids into
    ``out``. ``node_of_row`` of the sources is empty where row = node id; ``at``: the row of the edge before.

    Returns (edges kept, row of the last edge, first position of no row, or -1).
    """
    kept = 0
    for i in range(block.size):
        while offsets[at + 1] <= first_edge + i:
            at += 1
        if host_of_row[at] != host:
            continue
        source = block[i]
        if source < 0 or source >= total:
            return kept, at, i
        out[kept] = source if node_of_row.size == 0 else node_of_row[source]
        kept += 1
    return kept, at, -1


@njit(cache=True, nogil=True)
def keep_beside(
    offsets: NDArray[np.int64], values: NDArray[Any], first_edge: int, at: int, host_of_row: NDArray[Any],
    host: int, out: NDArray[Any],
) -> tuple[int, int]:  # fmt: skip
    """The same of ``values`` that stand beside sources; (values kept, row of the last edge)."""
    kept = 0
    for i in range(values.size):
        while offsets[at + 1] <= first_edge + i:
            at += 1
        if host_of_row[at] == host:
            out[kept] = values[i]
            kept += 1
    return kept, at


def write_whole_lists(
    member: FamilyStore, graph: StoredGraph, host: int, halo_ids: NDArray[Any], beside_bytes: int
) -> tuple[SplitGraphEntry, NDArray[np.int64]]:
    """(the lists of a host's rows, how many edges go to each node of the halo of the graph's table);
    ``beside_bytes``: what else is in memory."""
    plan, total = member.plan, graph.source_table.rows
    own = plan.rows_of(graph.entry.table, host)
    needed = plan.lists_bytes(graph) + 40 * own + beside_bytes
    needed += sum(
        table.rows * (2 + 2 * node_dtype(table.rows).itemsize)
        for table in {graph.table.name: graph.table, graph.source_table.name: graph.source_table}.values()
    )
    plan.need(needed + 16 * len(halo_ids), f"hold the whole lists of host {host} in graph {graph.name!r}")
    host_of_row, offsets = plan.host_of_row[graph.entry.table], plan.offsets(graph)
    row_of_node = graph.table.row_of_node()
    halo = halo_ids if row_of_node is None else row_of_node[halo_ids]
    halo_degrees = offsets[halo + 1] - offsets[halo]
    del row_of_node, halo
    rows = np.flatnonzero(host_of_row == host)
    ends = np.zeros(own + 1, np.int64)
    np.cumsum(offsets[rows + 1] - offsets[rows], out=ends[1:])
    runs = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    base = f"graphs/{graph.name}/lists"
    sources = member.vector(
        f"{base}/sources", _whole(member, graph, rows, offsets, host), int(ends[-1]), node_dtype(total)
    )
    parts = {}
    for part in edge_parts(graph.entry):
        table = plan.store.table(f"{graph.name}/{part}")
        blocks = _beside(member, table, rows, offsets, host_of_row, host)
        parts[part] = member.vector(f"{base}/{part}", blocks, int(ends[-1]), table.dtype)
    lists = WholeListsEntry(
        member.vector(f"{base}/offsets", pieces(ends), own + 1, np.dtype(np.int64)), sources,
        member.array(f"{base}/run_rows", runs), member.array(f"{base}/run_edges", offsets[rows[runs]]),
        **parts,
    )  # fmt: skip
    return replace(member.plan.split_entry(graph), lists=lists), halo_degrees


def _whole(
    member: FamilyStore, graph: StoredGraph, rows: NDArray[np.int64], offsets: NDArray[np.int64], host: int
) -> Iterator[NDArray[Any]]:
    """Blocks of the sources of a host's rows, as node ids, each only lent."""
    plan, node_of_row, total = member.plan, graph.source_table.node_of_row(), graph.source_table.rows
    known = _NO_MAP if node_of_row is None else node_of_row
    out = np.empty(PASS_EDGES, node_dtype(total))
    with plan.reader(plan.store.table(f"{graph.name}/sources")) as reader:
        for first, end in stretches(offsets, rows):
            at = first
            for low in range(int(offsets[first]), int(offsets[end]), PASS_EDGES):
                block = reader.read_runs([(low, min(low + PASS_EDGES, int(offsets[end])))])
                kept, at, bad = keep_whole(
                    offsets, block, low, at, plan.host_of_row[graph.entry.table], host, known, total, out
                )
                need_row(bad, low, graph.where())
                yield out[:kept]


def _beside(
    member: FamilyStore, table: Table, rows: NDArray[np.int64], offsets: NDArray[np.int64],
    host_of_row: NDArray[Any], host: int,
) -> Iterator[NDArray[Any]]:  # fmt: skip
    """Blocks of what a table has of the edges into a host's rows, each only lent."""
    out = np.empty(PASS_EDGES, table.dtype)
    with member.plan.reader(table) as reader:
        for first, end in stretches(offsets, rows):
            at = first
            for low in range(int(offsets[first]), int(offsets[end]), PASS_EDGES):
                block = reader.read_runs([(low, min(low + PASS_EDGES, int(offsets[end])))])
                kept, at = keep_beside(offsets, block, low, at, host_of_row, host, out)
                yield out[:kept]
