"""What a store and a table show of themselves, from the manifest alone: nothing is read for it."""

from __future__ import annotations

from typing import Any

from featstore.base.sheets import Grid, Sheet
from featstore.units import format_bytes


def row_text(table: Any) -> str:
    """The shape and type of a row: ``128 float32``."""
    return f"{'x'.join(map(str, table.row_shape)) or '1'} {table.entry.dtype}"


def store_sheet(store: Any) -> Sheet:
    """Which store it is, its tables, graphs and arrays."""
    files = store.manifest.files
    facts = {
        "identity": f"{store.uuid}, format {store.manifest.version}, generation {store.manifest.generation}",
        "files": f"{len(files):,}, {format_bytes(sum(f.bytes for f in files))}",
    }
    if store.manifest.read_only_because:
        facts["read-only"] = store.manifest.read_only_because
    whole = sum(t.data_bytes for t in store.tables.values())
    grids = [
        Grid(
            ("table", "row", "rows", "bytes"),
            [
                [name, row_text(t), f"{t.rows:,}", format_bytes(t.data_bytes)]
                for name, t in store.tables.items()
            ],
            left=2,
            bars=[t.data_bytes / max(1, whole) for t in store.tables.values()],
        )
    ]
    if store.graphs:
        graphs = [
            [name, g.source_table.name, g.table.name, f"{g.edges:,}", f"{g.hubs:,}"]
            for name, g in store.graphs.items()
        ]
        grids.append(Grid(("graph", "from", "to", "edges", "hubs"), graphs, left=3))
    if store.manifest.arrays:
        arrays = [[name, *array_text(a).rsplit(" ", 1)] for name, a in store.manifest.arrays.items()]
        grids.append(Grid(("array", "dtype", "shape"), arrays, left=2))
    return Sheet(f"Store {store.path}", facts, grids)


def array_text(entry: Any) -> str:
    """The type and shape of a small array: ``int64 500``."""
    return f"{entry.dtype} {'x'.join(map(str, entry.shape)) or 'scalar'}"


def graph_sheet(graph: Any) -> Sheet:
    """What it joins, and what is kept of its edges."""
    values = {"numbers": graph.has_edge_ids, "weights": graph.has_weights, "times": graph.has_times}
    kept = [name for name, has in values.items() if has] or ["no values"]
    facts = {
        "from": f"{graph.source_table.rows:,} nodes of {graph.source_table.name}",
        "to": f"{graph.table.rows:,} nodes of {graph.table.name}",
        "edges": f"{graph.edges:,}, with {' and '.join(kept)}",
        "hubs": f"{graph.hubs:,}",
    }
    if graph.edge_type is not None:
        facts["edge type"] = " -> ".join(graph.edge_type)
    return Sheet(f"Graph {graph.name} of {graph.store.path}", facts)


def table_sheet(table: Any) -> Sheet:
    """Its rows, their order, files and values."""
    layout, order, values = table.layout, table.entry.order, table.entry.statistics
    facts = {
        "rows": f"{table.rows:,} of {row_text(table)}, {table.row_bytes:,} B each, "
        f"{format_bytes(table.data_bytes)}",
        "order": str(order.method),
        "partitions": f"{max(0, order.partition_offsets.shape[0] - 1):,}",
        "files": f"{layout.chunks:,} of {format_bytes(layout.chunk_bytes)}, {layout.pages:,} pages with "
        "checksums",
        "read rows": f"store.reader(memory=...).read(ids), or store.table({table.name!r}, memory=...)[ids]",
    }
    facts |= {name: str(values[name]) for name in ("minimum", "maximum", "nan", "inf") if name in values}
    return Sheet(f"Table {table.name} of {table.store.path}", facts)
