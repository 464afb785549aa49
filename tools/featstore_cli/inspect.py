"""``featstore inspect``: what a store consists of, and how it would be read here."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from featstore_cli.options import SIZE, is_given, json_option, shared_options
from featstore_cli.output import facts, print_json, progress, remark, seconds_text, show, table

_RUN_BYTES_MAX = 2**24


@click.command("inspect")
@click.argument("store", type=click.Path(path_type=Path))
@click.option("--partitions", is_flag=True, help="List every partition.")
@click.option(
    "--orders",
    is_flag=True,
    help="Score the store's partitions beside those that each partitioner would make.",
)
@click.option("--train", metavar="ARRAY", help="With --orders: the store's array of training nodes.")
@click.option("--graph", metavar="NAME", help="With --orders: which graph, where there are several.")
@click.option(
    "--memory", type=SIZE, default="1GiB", help="With --orders and --html: what may be held in memory."
)
@click.option("--html", type=click.Path(path_type=Path), help="Write a report as one page to this file.")
@click.option(
    "--stats",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With --html: a run, as report().save() of a loader or stats().save() of a reader wrote it.",
)
@click.option("--overwrite", is_flag=True, help="With --html: replace a file that is there already.")
@json_option
@shared_options
def command(
    store: Path,
    partitions: bool,
    orders: bool,
    train: str | None,
    graph: str | None,
    memory: int,
    html: Path | None,
    stats: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Show tables, graphs, partitions, statistics and files of STORE, and how it would be read on this
    machine.

    Of a trace: its mini-batches, node ids, bytes and fingerprint, and whether it is complete.

    --html writes a page with charts, which every edge of the graphs is read for.
    """
    import featstore
    from featstore.storage.whole_files import check_writable
    from featstore.trace.trace import is_trace
    from featstore_cli.compiled import compiled_of
    from featstore_cli.describe import describe_store

    if (train or graph) and not orders:
        raise click.UsageError("--train and --graph go with --orders")
    if is_given("memory") and not orders and html is None:
        raise click.UsageError("--memory goes with --orders and --html")
    if (stats or overwrite) and html is None:
        raise click.UsageError("--stats and --overwrite go with --html")
    if html is not None and not as_json:
        for name, asked in (("--partitions", partitions), ("--orders", orders)):
            if asked:
                raise click.UsageError(
                    f"{name} is not on the page of --html: give --json, too, or ask without"
                )
    if is_trace(store):
        of_store = {"--html": html is not None, "--partitions": partitions, "--orders": orders}
        for name, asked in of_store.items():
            if asked:
                raise click.UsageError(f"{name} is of a store, and this is a trace")
        from featstore_cli.sample import inspect_trace

        inspect_trace(store, as_json)
        return
    if html is not None:
        check_writable(html, overwrite)  # before the work
    with featstore.open(store) as opened:
        if train is not None and train not in opened.arrays:
            known = ", ".join(opened.arrays) or "none"
            raise click.BadParameter(
                f"the store has no array {train!r}; it has {known}", param_hint="--train"
            )
        data = describe_store(opened) | {"reading": _reading(opened), "compiled": compiled_of(opened)}
        if partitions:
            for name, t in opened.tables.items():
                data["tables"][name]["partitions"]["offsets"] = t.partition_offsets.tolist()
        if orders:
            data["orders"] = _orders(opened, graph, train, memory)
        if html is not None:
            _write_report(opened, data, html, stats, memory, overwrite)
    if as_json:
        print_json("featstore.inspect/1", data)
    elif html is None:
        _render(data, partitions)


def _write_report(
    store: Any, data: dict[str, Any], to: Path, stats: Path | None, memory: int, overwrite: bool
) -> None:
    from featstore.storage.whole_files import write_whole
    from featstore_cli.html_report import page

    run = None if stats is None else _saved_run(stats)
    with progress("looking", unit="steps") as tell:
        text = page(store, data, run, memory, tell)
    write_whole(to, text.encode(), overwrite)
    remark(f"wrote {to}")


def _saved_run(path: Path) -> Any:
    """The report of a loader, or the counts of a reader, that were saved."""
    import msgspec

    from featstore.base.files import read_small
    from featstore.loaders.report import LoaderReport
    from featstore.reader.report import ReaderStats
    from featstore.storage.manifest import NOT_JSON

    kinds = {"featstore.loader-report/1": LoaderReport, "featstore.reader-stats/1": ReaderStats}
    text = read_small(path, _RUN_BYTES_MAX)
    try:
        schema = msgspec.json.decode(text, type=dict[str, Any]).get("schema")
        if schema in kinds:
            return msgspec.json.decode(text, type=kinds[schema])
        why = f"its schema is {schema!r}, none of {', '.join(kinds)}"
    except (*NOT_JSON, TypeError) as error:
        why = str(error)
    raise click.BadParameter(
        f"{path} is no run as report().save() of a loader or stats().save() of a reader writes it: {why}",
        param_hint="--stats",
    )


def _orders(store: Any, graph: str | None, train: str | None, memory: int) -> list[dict[str, Any]]:
    from featstore.packing.compare_orders import compare_orders

    found = compare_orders(store, graph=graph, train=train, memory_bytes=memory)
    return [
        {
            "method": c.method,
            "seconds": c.seconds,
            "because": c.because,
            "scores": c.scores and c.scores.to_dict(),
        }
        for c in found
    ]


def _reading(store: Any) -> dict[str, Any]:
    """Engine, access and device model that a reader would use here, and why."""
    from featstore.base.environment import MEMORY
    from featstore.base.files import direct_refusal
    from featstore.engine import engine_class
    from featstore.plan.cost import reading_model
    from featstore.reader.options import as_memory, chosen_engine, memory_said

    engine = chosen_engine(store.path, "auto", None, None)
    paths = [
        (store.path / t.entry.chunk_path(0), t.layout.chunk_bytes)
        for t in store.tables.values()
        if t.layout.chunks
    ]
    access, because = engine_class(engine.name).access, "as the engine reads"
    if access == "direct":
        refusal = direct_refusal(*paths[0]) if paths else None
        access = "buffered" if refusal else "direct"
        because = refusal or "the file system allows it"
    model = reading_model(store.path, engine.name, access, None)
    return {
        "engine": engine.name,
        "engine_because": engine.because,
        "memory_bytes": as_memory(MEMORY),
        "memory_because": memory_said(MEMORY)[1],
        "access": access,
        "access_because": because,
        "model": {
            "calibrated": model.calibrated,
            "read_seconds": model.read_seconds,
            "byte_seconds": model.byte_seconds,
            "request_seconds": model.request_seconds,
            "gap_pages_max": model.gap_pages_max,
            "threads": model.threads,
            "read_cpu_seconds": model.read_cpu_seconds,
        },
    }


def _render(data: dict[str, Any], partitions: bool) -> None:
    from featstore.units import format_bytes
    from featstore_cli.compiled import render_compiled
    from featstore_cli.describe import render_arrays, render_family, render_graph, render_keys, render_table

    reading, files = data["reading"], data["files"]
    model = reading["model"]
    known = (
        "calibrated"
        if model["calibrated"]
        else "default numbers: run `featstore calibrate` for this device's own"
    )
    identity = f"{data['uuid']}, format {data['format_version']}, generation {data['generation']}"
    if data["read_only_because"]:
        identity += f"; read-only: {data['read_only_because']}"
    show(
        facts(
            [
                ("store", data["store"]),
                ("identity", identity),
                ("files", f"{files['count']:,}, {format_bytes(files['bytes'])}"),
                *(render_family(data["family"]) if data["family"] else []),
            ]
        )
    )
    sources = data["provenance"].get("sources")
    sources = sources if isinstance(sources, dict) else {}  # what another writer says there may be anything
    for name, t in data["tables"].items():
        show("", render_table(name, t, sources.get(name)))
        if partitions:
            show(_partitions(t))
    for name, keys in data["keys"].items():
        show("", render_keys(name, keys))
    for name, g in data["graphs"].items():
        show("", render_graph(name, g))
    for compiled in data["compiled"]:
        show("", render_compiled(compiled))
    if "orders" in data:
        show("", _order_scores(data["orders"]))
    if data["arrays"]:
        show("", render_arrays(data["arrays"]))
    provenance = [(f"  {k}", str(v)) for k, v in data["provenance"].items() if k != "sources" or not sources]
    provenance += [(f"  source of {name}", _source(source)) for name, source in sources.items()]
    cost = f"{seconds_text(model['read_seconds'])} a read + {1e-9 / model['byte_seconds']:.2f} GB/s ({known})"
    show(
        "",
        facts(
            [
                ("reading here", f"through {reading['engine']}: {reading['engine_because']}"),
                ("  memory", f"{format_bytes(reading['memory_bytes'])}: {reading['memory_because']}"),
                ("  access", f"{reading['access']}: {reading['access_because']}"),
                ("  device model", f"{cost}; gaps of up to {model['gap_pages_max']} pages are read through"),
                ("  threads", _threads(model, reading["engine"])),
                ("packed", ""),
                *provenance,
            ]
        ),
    )


def _threads(model: dict[str, Any], engine: str) -> str:
    """How many threads read, why so many, and what a read takes of them."""
    cpu = model["read_cpu_seconds"]
    each = "" if cpu is None else f"; a read of a page takes {seconds_text(cpu)} of a core"
    if engine != "uring":
        return f"as many as the engine takes, up to 32{each}"
    if model["threads"] is None:
        open_text = "left open when calibrated" if model["calibrated"] else "`featstore calibrate` measures"
        return f"as many as are busy; how many are faster: {open_text}{each}"
    why = "more were not faster" if model["threads"] == 1 else "as many as were measured to be faster"
    return f"{model['threads']} read{'s' * (model['threads'] == 1)}: {why}{each}"


def _source(source: Any) -> str:
    if (
        isinstance(source, dict)
        and {"name", "dtype", "shape"} <= source.keys()
        and isinstance(source["shape"], list)
    ):
        return f"{source['name']}: {'x'.join(map(str, source['shape']))} {source['dtype']}"
    return str(source)


def _order_scores(orders: list[dict[str, Any]]) -> Any:
    """Partitioners side by side; balance is the largest part over the mean, locality the share of neighbours
    in the own part."""
    rows = []
    for order in orders:
        scores = order["scores"]
        if scores is None:
            rows.append([order["method"], order["because"], *[""] * 7])
            continue
        balance = [scores[f"{kind}_balance"] for kind in ("node", "edge", "train")]
        local = [scores["hop1"], scores["hop2"]]
        rows.append(
            [order["method"], f"{scores['parts']:,}", f"{scores['edge_cut']:.3f}"]
            + ["" if b is None else f"{b:.2f}" for b in balance]
            + ["" if share is None else f"{share:.1%}" for share in local]
            + [seconds_text(order["seconds"]) if order["seconds"] else ""]
        )
    columns = ["order", "parts", "edge cut", "nodes", "edges", "training", "1 hop", "2 hops", "time"]
    return table(columns, rows, title="partitions: edge cut, balance, locality")


def _partitions(t: dict[str, Any]) -> Any:
    from featstore.units import format_bytes

    offsets = t["partitions"]["offsets"]
    rows = [
        [f"{k:,}", f"{a:,}", f"{b - a:,}", format_bytes((b - a) * t["row_bytes"])]
        for k, (a, b) in enumerate(pairwise(offsets))
    ]
    return table(["partition", "first row", "rows", "bytes"], rows, left=0)
