"""What ``inspect`` and ``pack`` say of a store: plain data for JSON, and the same for people."""

from __future__ import annotations

from typing import Any

from featstore_cli.output import facts, table


def describe_store(store: Any) -> dict[str, Any]:
    """Identity, tables, keys, graphs, arrays, files and provenance of an open store, as plain data."""
    manifest = store.manifest
    files = manifest.files
    return {
        "store": str(store.path),
        "uuid": manifest.uuid,
        "format_version": manifest.version,
        "generation": manifest.generation,
        "tables": {name: describe_table(t) for name, t in store.tables.items()},
        "keys": {name: describe_keys(k) for name, k in manifest.keys.items()},
        "graphs": {name: describe_graph(g) for name, g in store.graphs.items()},
        "arrays": {name: {"shape": list(a.shape), "dtype": a.dtype} for name, a in manifest.arrays.items()},
        "files": {"count": len(files), "bytes": sum(f.bytes for f in files)},
        "read_only_because": manifest.read_only_because,
        "provenance": manifest.provenance,
        "family": describe_family(store),
    }


def describe_family(store: Any) -> dict[str, Any] | None:
    """Which part of which split a store is; None for one that is of none."""
    from featstore.storage.manifest import edge_parts

    family = store.manifest.family
    if family is None:
        return None
    return {
        "uuid": family.uuid or store.uuid,
        "host": family.host,
        "hosts": family.hosts,
        "base_uuid": family.base_uuid,
        "first_rows": family.first_rows,
        "remote_edges": family.remote_edges,
        "split_graphs": {
            name: {
                "table": graph.table,
                "edges": graph.edges,
                "own_edges": graph.lists and graph.lists.sources.rows,
                "edge_parts": graph.lists and {n: t.dtype for n, t in edge_parts(graph.lists).items()},
            }
            for name, graph in family.split_graphs.items()
        },
    }


def render_family(family: dict[str, Any]) -> list[tuple[str, str]]:
    """The same, for people."""
    host, hosts, remote = family["host"], family["hosts"], family["remote_edges"]
    what = "the topology" if host is None else f"host {host}"
    rows = [
        (
            "split",
            f"{what} of the split {family['uuid']} of {hosts:,} hosts, of the store {family['base_uuid']}",
        )
    ]
    for name, counts in remote.items():
        number = sum(counts) if host is None else counts[host]
        rows.append((f"  graph {name!r}", f"{number:,} edges come from other hosts' nodes"))
    for name, graph in family["split_graphs"].items():
        own, edges = graph["own_edges"], f"{graph['edges']:,} edges"
        there = "in the parts" if own is None else f"{own:,} of them in whole lists of this host's nodes"
        if graph["edge_parts"]:
            there += f", with their {', '.join(graph['edge_parts']).replace('_', ' ')}"
        rows.append((f"  graph {name!r}", f"is split, too: {edges}, {there}"))
    return rows


def describe_table(t: Any) -> dict[str, Any]:
    """One table as plain data. Reads its partition offsets, nothing larger."""
    import numpy as np

    entry, layout = t.entry, t.layout
    sizes = np.diff(t.partition_offsets)
    parameters = dict(entry.order.parameters)
    because = parameters.pop("chosen_because", "")

    def spread(unit: int) -> dict[str, int]:
        if len(sizes) == 0:
            return {"min": 0, "median": 0, "max": 0}
        low, middle, high = int(sizes.min()), int(np.median(sizes)), int(sizes.max())
        return {"min": low * unit, "median": middle * unit, "max": high * unit}

    statistics = dict(entry.statistics)
    return {
        "rows": t.rows,
        "row_shape": list(t.row_shape),
        "dtype": entry.dtype,
        "row_bytes": t.row_bytes,
        "bytes": t.data_bytes,
        "chunks": {"count": layout.chunks, "rows": layout.rows_per_chunk, "bytes": layout.chunk_bytes},
        "checksums": {"kind": "crc32c", "pages": layout.pages, "page_bytes": 4096, "bytes": 4 * layout.pages},
        "order": {
            "method": entry.order.method,
            "because": because,
            "edge_cut": parameters.pop("edge_cut", None),
            "parameters": parameters,
            "degrees_known": entry.order.rows_by_degree is not None,
        },
        "partitions": {"count": len(sizes), "rows": spread(1), "bytes": spread(t.row_bytes)},
        "statistics": statistics,
        "featureless": t.name in t.store.featureless,
    }


def describe_keys(keys: Any) -> dict[str, Any]:
    """The keys of one table as plain data. ``bytes`` are those of all their tables, the index included."""
    return {
        "kind": keys.kind,
        "count": keys.hashes.rows,
        "key_bytes": keys.values.rows * keys.values.row_bytes,
        "bytes": sum(part.rows * part.row_bytes for part in keys.parts.values()),
    }


def render_keys(name: str, keys: dict[str, Any]) -> Any:
    """Described keys, for people."""
    from featstore.units import format_bytes

    what = "strings" if keys["kind"] == "utf8" else "whole numbers"
    own, all_of_it = format_bytes(keys["key_bytes"]), format_bytes(keys["bytes"])
    return facts([(f"keys of {name!r}", f"{keys['count']:,} {what}, {own}, {all_of_it} with their index")])


def describe_graph(g: Any) -> dict[str, Any]:
    """One graph as plain data, from the manifest alone. ``bytes`` are those of all its tables, hubs' copies
    included."""
    from featstore.storage.manifest import edge_parts

    entry, parts = g.entry, edge_parts(g.entry)

    def size(table: Any) -> int:
        return int(table.rows * table.row_bytes)

    hubs = None
    if entry.hubs is not None:
        copied = entry.hubs.sources.rows
        hubs = {
            "method": entry.hubs.method,
            "count": g.hubs,
            "edges": copied,
            "edge_share": copied / g.edges if g.edges else 0.0,
            "bytes": size(entry.hubs.sources) + sum(map(size, edge_parts(entry.hubs).values())),
        }
    own, order = [entry.offsets, entry.sources, *parts.values()], g.table.entry.order.parameters
    of_several = "types" in order and len(g.table.store.graphs) > 1
    return {
        "table": entry.table,
        "nodes": g.table.rows,
        "edge_type": g.edge_type,
        "source_nodes": g.source_table.rows,
        "edges": g.edges,
        "dtype": entry.sources.dtype,
        **{part: parts[part].dtype if part in parts else None for part in ("edge_ids", "weights", "times")},
        "bytes": sum(map(size, own)) + (hubs["bytes"] if hubs else 0),
        "edge_cut": None if of_several else order.get("edge_cut"),  # of all of them together
        "hubs": hubs,
    }


def render_graph(name: str, g: dict[str, Any]) -> Any:
    """One described graph, for people."""
    from featstore.units import format_bytes

    hubs = g["hubs"]
    between = f"between {g['nodes']:,} rows of table {g['table']!r}"
    if g["edge_type"] is not None:
        source, relation, target = g["edge_type"]
        between = (
            f"of type {relation!r} from {g['source_nodes']:,} rows of table {source!r} to {g['nodes']:,} of "
            f"{target!r}"
        )
    text = f"{g['edges']:,} edges {between}, {g['dtype']}, {format_bytes(g['bytes'])}"
    rows = [(f"graph {name!r}", text)]
    if g["edge_ids"] is not None:
        rows.append(("  edge ids", f"{g['edge_ids']}: mini-batches know which edges they have (e_id)"))
    if g["weights"] is not None:
        rows.append(("  weights", str(g["weights"])))
    if g["times"] is not None:
        rows.append(("  times", f"{g['times']}: each list ascends by them"))
    rows += _edge_cut(g["edge_cut"])
    if hubs is not None:
        rows.append(
            (
                "  hubs",
                f"{hubs['count']:,} by {hubs['method']}: {hubs['edges']:,} edges in their lists "
                f"({hubs['edge_share']:.1%}), stored twice, {format_bytes(hubs['bytes'])}",
            )
        )
    return facts(rows)


def render_table(name: str, t: dict[str, Any], source: dict[str, Any] | None = None) -> Any:
    """One described table, for people. ``source``: what the manifest says of where its rows came from."""
    from featstore.units import format_bytes

    shape = "x".join(map(str, t["row_shape"])) or "1"
    chunks, sums, order, parts = t["chunks"], t["checksums"], t["order"], t["partitions"]
    rows = [
        (
            f"table {name!r}",
            f"{t['rows']:,} rows of {shape} {t['dtype']}, {t['row_bytes']:,} B each, "
            f"{format_bytes(t['bytes'])}",
        ),
        ("  order", _order_text(order)),
        ("  partitions", f"{parts['count']:,}"),
        (
            "  chunk files",
            f"{chunks['count']:,} of {format_bytes(chunks['bytes'])} ({chunks['rows']:,} rows)",
        ),
        ("  checksums", f"CRC-32C of {sums['pages']:,} pages of 4 KiB, {format_bytes(sums['bytes'])}"),
    ]
    if parts["count"] > 1:
        low, middle, high = (
            f"{parts['rows'][k]:,} rows ({format_bytes(parts['bytes'][k])})" for k in ("min", "median", "max")
        )
        rows[2] = ("  partitions", f"{parts['count']:,}: smallest {low}, median {middle}, largest {high}")
    rows[3:3] = _edge_cut(order["edge_cut"])
    if t["featureless"]:
        rows.append(("  features", "none: these are nodes by number and order alone"))
    else:
        rows += [(f"  {what}", text) for what, text in _values(t["statistics"])]
    if isinstance(source, dict) and "columns" in source:
        rows.append(("  columns", str(source["columns"])))
        if "left_out" in source:
            rows.append(("  left out", str(source["left_out"])))
        rows.append(("  node ids", f"by {source.get('placed_by')}"))
    return facts(rows)


def _order_text(order: dict[str, Any]) -> str:
    text = str(order["method"])
    if order["because"]:
        text += f", because {order['because']}"
    if order["parameters"]:
        text += " (" + ", ".join(f"{k} = {v}" for k, v in order["parameters"].items()) + ")"
    return text


def _edge_cut(share: Any) -> list[tuple[str, str]]:
    return (
        [] if share is None else [("  edge cut", f"{_number(share, '.1%')} of the edges join two partitions")]
    )


def _number(value: Any, form: str) -> str:
    """A number as people read it; what another writer put in its place as it is."""
    if isinstance(value, int | float):
        return format(value, form)
    return "unknown" if value is None else repr(value)


def _values(statistics: dict[str, Any]) -> list[tuple[str, str]]:
    rows, known = [], statistics.get
    if "nan" in statistics:
        text = f"{_number(known('nan'), ',')} NaN, {_number(known('inf'), ',')} infinite"
        rows.append(("values", text + (" (look at the source)" if known("nan") or known("inf") else "")))
    if "minimum" in statistics:
        rows.append(("range", f"{_number(known('minimum'), 'g')} to {_number(known('maximum'), 'g')}"))
    if "cast_from" in statistics:
        over, under = (_number(known(key), ",") for key in ("overflowed", "underflowed"))
        text = f"from {known('cast_from')}: {over} values overflowed to infinity, {under} underflowed to zero"
        rows.append(("cast", text))
    return rows


def render_arrays(arrays: dict[str, Any]) -> Any:
    """The small arrays, for people."""
    return table(
        ["array", "dtype", "shape"],
        [[n, a["dtype"], "x".join(map(str, a["shape"])) or "scalar"] for n, a in arrays.items()],
        left=2,
    )
