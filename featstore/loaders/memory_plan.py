"""Where the memory of a loader in mode online will go, by numbers alone: before anything is packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from featstore.loaders.online.budget import SAMPLES_EXIST
from featstore.loaders.shares import SAMPLER_SHARE, edges_at_most, rows_at_most
from featstore.plan.budget import Budget, TableNeed, own_bytes
from featstore.reader.lookup import table_need
from featstore.sampling.batches import bytes_in_memory, graph_bytes
from featstore.storage.store import StoredGraph, Table
from featstore.units import PAGE_BYTES

_SLOT_BYTES = 72  # beside the row, of the default policy
_EDGE_BYTES = 24 * SAMPLES_EXIST  # of a mini-batch, an edge: its ends and its place
_BESIDE_ROW_BYTES = 24  # of a mini-batch, a node: its id, and what is planned with it


@dataclass(frozen=True)
class PlannedSizes:
    """Of a table and a graph over it: ``nodes``, ``edges`` (0: no graph), ``row_bytes``; what a reader holds
    for the table whatever its memory; ``graph_bytes`` of the graph in memory."""

    nodes: int
    edges: int
    row_bytes: int
    need: TableNeed
    graph_bytes: int

    @classmethod
    def of_numbers(
        cls, nodes: int, row_bytes: int, edges: int = 0, *, as_given: bool = False
    ) -> PlannedSizes:
        """Of a store that is not there yet; ``as_given``: its rows lie in the order of their ids."""
        item = 4 if nodes < 2**31 else 8
        pages = -(-nodes * row_bytes // PAGE_BYTES)
        need = TableNeed(0 if as_given else item * nodes, 4 * pages, row_bytes)
        graph = graph_bytes(nodes, edges, item, as_given=as_given) if edges else 0
        return cls(nodes, edges, row_bytes, need, graph)

    @classmethod
    def of_store(cls, table: Table, graph: StoredGraph | None) -> PlannedSizes:
        """Of a table of a store, and a graph over it, if there is one."""
        edges, held = (0, 0) if graph is None else (graph.edges, bytes_in_memory(graph))
        return cls(table.rows, edges, table.row_bytes, table_need(table, verify=True), held)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of ``memory_bytes``, by use.

    ``reader``: of a reader that has all of it. ``loader``: of a loader in mode online; ``kept rows`` is
    what is left for rows asked for lately, negative where the memory is too small for such mini-batches.
    ``graph``: "in memory", "from disk" or "none". ``batch_nodes_most``: nodes of a mini-batch whose
    neighbours are all different; real ones have fewer, and fewer edges. ``kept_share``: of all rows.
    """

    memory_bytes: int
    smallest_reader_bytes: int
    reader: dict[str, int]
    graph: str
    loader: dict[str, int]
    batch_nodes_most: int
    kept_share: float

    def to_dict(self) -> dict[str, Any]:
        """Values of JSON."""
        return asdict(self)


def plan_memory(
    sizes: PlannedSizes, memory_bytes: int, fanouts: Sequence[int], batch_size: int
) -> MemoryPlan:
    """See :class:`MemoryPlan`. Raises BudgetError below the smallest reader."""
    need, tables = sizes.need, [sizes.need]
    budget = Budget.split(memory_bytes, tables)
    reader = {
        "row_maps": need.row_map_bytes, "page_checksums": need.checksum_bytes,
        "staging": budget.staging_bytes, "planning": budget.scratch_bytes,
        "rows that stay": budget.tier_bytes,
    }  # fmt: skip
    on_disk = 8 * sizes.nodes + 2 * need.row_map_bytes  # offsets and maps, without which nothing is sampled
    share = max(memory_bytes // SAMPLER_SHARE, min(on_disk, sizes.graph_bytes))
    sampler, graph = (share, "from disk") if sizes.graph_bytes > share else (sizes.graph_bytes, "in memory")
    nodes = rows_at_most(batch_size, fanouts, sizes.nodes)
    edges = edges_at_most(batch_size, fanouts, sizes.nodes, sizes.edges)
    loader = {
        "graph": sampler, "reader": own_bytes(memory_bytes - sampler, tables),
        "two mini-batches": 2 * (nodes * (sizes.row_bytes + _BESIDE_ROW_BYTES) + edges * _EDGE_BYTES),
    }  # fmt: skip
    loader["kept rows"] = memory_bytes - sum(loader.values())
    slot_bytes = sizes.row_bytes + _SLOT_BYTES
    kept = max(0.0, loader["kept rows"] / max(1, sizes.nodes * slot_bytes))
    return MemoryPlan(
        memory_bytes, Budget.smallest(tables, 0), reader, graph if sizes.edges else "none", loader, nodes,
        min(1.0, kept),
    )  # fmt: skip
