"""``featstore inspect``: what a store consists of, and how it would be read here."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from featstore_cli.options import json_option, shared_options
from featstore_cli.output import facts, print_json, seconds_text, show, table


@click.command("inspect")
@click.argument("store", type=click.Path(path_type=Path))
@click.option("--partitions", is_flag=True, help="List every partition.")
@json_option
@shared_options
def command(store: Path, partitions: bool, as_json: bool) -> None:
    """Show tables, graphs, partitions, statistics and files of STORE, and how it would be read on this machine."""
    import featstore
    from featstore_cli.describe import describe_store

    with featstore.open(store) as opened:
        data = describe_store(opened) | {"reading": _reading(opened)}
        if partitions:
            for name, t in opened.tables.items():
                data["tables"][name]["partitions"]["offsets"] = t.partition_offsets.tolist()
    if as_json:
        print_json("featstore.inspect/1", data)
    else:
        _render(data, partitions)


def _reading(store: Any) -> dict[str, Any]:
    """Engine, access and device model that a reader would use here, and why."""
    from featstore.cost import device_key, load_model
    from featstore.engine import choose
    from featstore.engine.files import direct_refusal

    engine = choose("auto")
    paths = [
        (store.path / t.entry.chunk_path(0), t.layout.chunk_bytes) for t in store.tables.values() if t.layout.chunks
    ]
    refusal = direct_refusal(*paths[0]) if paths else None
    access = "buffered" if refusal else "direct"
    model = load_model(device_key(store.path, engine.name, access))
    return {
        "engine": engine.name,
        "engine_because": engine.because,
        "access": access,
        "access_because": refusal or "the file system allows it",
        "model": {
            "calibrated": model.calibrated,
            "read_seconds": model.read_seconds,
            "byte_seconds": model.byte_seconds,
            "request_seconds": model.request_seconds,
            "gap_pages_max": model.gap_pages_max,
        },
    }


def _render(data: dict[str, Any], partitions: bool) -> None:
    from featstore.units import format_bytes
    from featstore_cli.describe import render_arrays, render_graph, render_table

    reading, files = data["reading"], data["files"]
    model = reading["model"]
    known = "calibrated" if model["calibrated"] else "default numbers: run `featstore calibrate` for this device's own"
    identity = f"{data['uuid']}, format {data['format_version']}, generation {data['generation']}"
    if data["read_only_because"]:
        identity += f"; read-only: {data['read_only_because']}"
    show(
        facts(
            [
                ("store", data["store"]),
                ("identity", identity),
                ("files", f"{files['count']:,}, {format_bytes(files['bytes'])}"),
            ]
        )
    )
    for name, t in data["tables"].items():
        show("", render_table(name, t))
        if partitions:
            show(_partitions(t))
    for name, g in data["graphs"].items():
        show("", render_graph(name, g))
    if data["arrays"]:
        show("", render_arrays(data["arrays"]))
    provenance = [(f"  {key}", str(value)) for key, value in data["provenance"].items() if key != "sources"]
    provenance += [(f"  source of {n}", _source(s)) for n, s in data["provenance"].get("sources", {}).items()]
    cost = f"{seconds_text(model['read_seconds'])} a read + {1e-9 / model['byte_seconds']:.2f} GB/s ({known})"
    show(
        "",
        facts(
            [
                ("reading here", f"through {reading['engine']}: {reading['engine_because']}"),
                ("  access", f"{reading['access']}: {reading['access_because']}"),
                ("  device model", f"{cost}; gaps of up to {model['gap_pages_max']} pages are read through"),
                ("packed", ""),
                *provenance,
            ]
        ),
    )


def _source(source: Any) -> str:
    if isinstance(source, dict) and {"name", "dtype", "shape"} <= source.keys():
        return f"{source['name']}: {'x'.join(map(str, source['shape']))} {source['dtype']}"
    return str(source)


def _partitions(t: dict[str, Any]) -> Any:
    from featstore.units import format_bytes

    offsets = t["partitions"]["offsets"]
    rows = [
        [f"{k:,}", f"{a:,}", f"{b - a:,}", format_bytes((b - a) * t["row_bytes"])]
        for k, (a, b) in enumerate(pairwise(offsets))
    ]
    return table(["partition", "first row", "rows", "bytes"], rows, left=0)
