"""``featstore pack STORE --trace``: compile a trace for a store; and what ``inspect`` shows of compiled
traces."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from featstore_cli.options import SIZE, is_given, settings
from featstore_cli.output import facts, print_json, progress, seconds_text, show, table

F = TypeVar("F", bound=Callable[..., Any])
_OF_A_PACK = ("topology", "edge_ids", "hubs", "hub_rank")  # and options that may be given for each table
_OWN = ("name", "disk", "train_memory", "cache", "device_memory", "residency", "dry_run")


def trace_options(function: F) -> F:
    """The options that go with ``--trace``."""
    options = [
        click.option(
            "--trace", type=click.Path(path_type=Path), help="Compile this trace for the store OUT."
        ),
        click.option(
            "--name", help="With --trace: of the compiled trace.  [default: default]", show_default=False
        ),
        click.option(
            "--disk",
            metavar="SIZE|Nx",
            help="With --trace: limit on the rows written, such as 20GiB or 3x the tables.",
        ),
        click.option(
            "--train-memory",
            type=SIZE,
            help="With --trace: memory of training.  [default: as --memory]",
            show_default=False,
        ),
        click.option(
            "--cache",
            type=SIZE,
            help="With --trace: what of it holds rows.  [default: what is left]",
            show_default=False,
        ),
        click.option(
            "--device-memory",
            type=SIZE,
            help="With --trace: rows to keep on the accelerator.",
            show_default=False,
        ),
        click.option(
            "--residency",
            type=click.Choice(["min", "fixed"]),
            show_default=False,
            help="With --trace: rows stay by next use, or the most used for good.  [default: min]",
        ),
        click.option("--dry-run", is_flag=True, help="With --trace: forecast, and write nothing."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def check_alone(trace: Path | None, own: dict[str, Any], given: dict[str, Any]) -> None:
    """A usage error where options of the two kinds of packing are mixed."""
    if trace is None:
        for name in _OWN:
            if own.get(name):
                raise click.UsageError(f"--{name.replace('_', '-')} goes with --trace")
        if not given["features"] and not given["nodes"]:
            raise click.UsageError("give --features to pack a store, or --trace to compile a trace for one")
        return
    given = given | {name: True for name in _OF_A_PACK if is_given(name)}
    for name, values in given.items():
        if values and not (name == "order" and values == ("auto",)):
            raise click.UsageError(
                f"--{name.replace('_', '-')} does not go with --trace: the store is packed already"
            )


def compile_command(
    store: Path, trace: Path, own: dict[str, Any], *, memory: int, seed: int, resume: bool, overwrite: bool,
    as_json: bool
) -> None:  # fmt: skip
    """Compile, and tell what came of it."""
    import featstore
    from featstore.front.compiling import compile_trace
    from featstore.storage.packs import packs_directory

    dry_run, name = bool(own.pop("dry_run")), own.pop("name") or "default"
    options = {key: value for key, value in own.items() if value is not None}
    begin = time.perf_counter()
    with featstore.open(store) as base, featstore.Trace(trace) as recorded:
        if not dry_run:
            settings().packing, settings().what = packs_directory(base) / name, "the compiled trace"
        with progress("deciding") as tell:
            found = compile_trace(
                base, recorded, name, memory=memory, seed=seed, resume=resume, overwrite=overwrite,
                dry_run=dry_run, **options,
                progress=lambda p: tell(f"{p.table}: {p.stage}", p.done_bytes, p.total_bytes),
            )  # fmt: skip
        if dry_run:
            from msgspec import to_builtins

            data = {"store": str(store), "name": name, "dry_run": True, "forecast": to_builtins(found)}
        else:
            settings().packing = None
            with base.compiled(name) as compiled:
                data = describe_compiled(compiled) | {"dry_run": False}
    seconds = time.perf_counter() - begin
    if as_json:
        print_json("featstore.pack-trace/1", data | {"seconds": seconds})
    elif not settings().quiet:
        show(render_compiled(data))
        verb = "would be written; decided" if dry_run else "packed"
        show(facts([("compiled trace", f"{name!r} {verb} in {seconds_text(seconds)}")]))


def describe_compiled(compiled: Any) -> dict[str, Any]:
    """A compiled trace as plain data."""
    entry, pack = compiled.entry, compiled.pack
    return {
        "store": str(compiled.base.path),
        "name": pack.path.name,
        "uuid": pack.uuid,
        "trace_uuid": entry.trace_uuid,
        "residency": entry.residency,
        "memory_bytes": entry.memory_bytes,
        "files": {"count": len(pack.manifest.files), "bytes": sum(f.bytes for f in pack.manifest.files)},
        "segments": {
            name: {
                "packed": {"rows": pack.tables[t.packed].rows, "mini_batches": entry.batches},
                "shared": {
                    "rows": pack.tables[t.shared].rows,
                    "groups": -(-entry.batches // max(1, int(t.placement.get("group_size", entry.batches)))),
                },
                "resident_rows": pack.tables[t.resident].rows,
                "device_rows": pack.tables[t.device].rows,
                "placement": t.placement,
            }
            for name, t in entry.tables.items()
        },
        "forecast": entry.forecast,
    }


def compiled_of(store: Any) -> list[dict[str, Any]]:
    """What a store has of compiled traces, stale and broken ones with the reason."""
    from featstore.errors import FeatstoreError
    from featstore.loaders.compiled.trace import CompiledTrace
    from featstore.storage.packs import packs_directory

    folder, found = packs_directory(store), []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not path.is_dir() or path.suffix in (".trace", ".forecast"):
            continue
        try:
            with CompiledTrace(store, path.name) as compiled:
                found.append(describe_compiled(compiled))
        except FeatstoreError as error:
            found.append({"name": path.name, "because": str(error)})
    return found


def render_compiled(data: dict[str, Any]) -> Any:
    """One compiled trace for people: where rows come from, and what that costs."""
    from featstore.units import format_bytes

    if "because" in data:
        return facts([("compiled trace", f"{data['name']}: {data['because']}")])
    forecast = data["forecast"]
    if "tables" not in forecast:
        return facts(
            [("compiled trace", f"{data['name']!r}, by a writer that says nothing of what it expects")]
        )
    rows = []
    for name, t in forecast["tables"].items():
        asked = max(1, t["asked_rows"])
        device = asked - t["hit_rows"] - t["missed_rows"]
        shares = [device, t["hit_rows"], t["packed_rows"], t["shared_reads_rows"], t["base_rows"]]
        times = f"{t['disk_bytes'] / max(1, t['table_bytes']):.2f}x"
        parts = [f"{share / asked:.1%}" for share in shares]
        rows.append([name, f"{asked:,}", *parts, format_bytes(t["disk_bytes"]), times])
    title = f"compiled trace {data['name']!r}: {forecast['batches']:,} mini-batches"
    columns = ["table", "rows asked", "device", "memory", "packed", "shared", "base", "on disk", "of table"]
    lines = [table(columns, rows, title=title)]
    reading = (
        f"{seconds_text(forecast['seconds'])} to read {format_bytes(forecast['bytes_read'])} in a round, "
        "as forecast"
    )
    more = [("reading", reading), ("records", format_bytes(forecast["record_bytes"]))]
    if "residency" in data:
        order = "in the trace's order" if data["residency"] == "min" else "in any order"
        more.append(
            (
                "residency",
                f"{data['residency']}: mini-batches {order}; {format_bytes(data['memory_bytes'])} for "
                "the loader",
            )
        )
        more.append(("files", f"{data['files']['count']:,}, {format_bytes(data['files']['bytes'])}"))
    from rich.console import Group

    return Group(*lines, facts(more))
