"""``featstore explain``: what a request would read; with ``--run``, the forecast against the clock."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from featstore.base.environment import MEMORY
from featstore_cli.options import (
    SIZE,
    chosen_table,
    engine_option,
    is_given,
    json_option,
    read_ids,
    shared_options,
)
from featstore_cli.output import facts, print_json, rate_text, remark, seconds_text, show


@click.command("explain", context_settings={"show_default": True})
@click.argument("store", type=click.Path(path_type=Path))
@click.option(
    "--ids",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Node ids: .npy, or text with one a line.",
)
@click.option(
    "--random",
    "count",
    type=click.IntRange(1),
    help="As many distinct random ids instead.  [default: 1024]",
    show_default=False,
)
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of --random.")
@click.option("--table", metavar="NAME", help="The table, where the store has several.")
@click.option("--memory", type=SIZE, default=MEMORY, help="The reader's memory budget.")
@click.option(
    "--static", type=click.Choice(["auto", "degree", "none"]), default="auto", help="Rows to keep in memory."
)
@engine_option
@click.option(
    "--run", "execute", is_flag=True, help="Read the rows, too, and compare the time with the forecast."
)
@json_option
@shared_options
def command(
    store: Path,
    ids: Path | None,
    count: int | None,
    seed: int,
    table: str | None,
    memory: int,
    static: str,
    engine: str,
    execute: bool,
    as_json: bool,
) -> None:
    """Show how STORE's reader would serve a request: hits, pages, reads, bytes, and the time it should
    take."""
    if ids is not None and count is not None:
        raise click.UsageError("--ids and --random contradict each other")
    if ids is not None and is_given("seed"):
        raise click.UsageError("--seed is of --random, and --ids gives the ids")
    import featstore

    with featstore.open(store) as opened:
        target = chosen_table(opened, table)
        wanted = _random_ids(target, 1024 if count is None else count, seed) if ids is None else read_ids(ids)
        options = {
            "memory": memory,
            "tables": [target.name],
            "engine": engine,
            "static": None if static == "none" else static,
        }
        with opened.reader(**options) as reader:
            plan = reader.plan({target.name: wanted})
            held = {use: size for use, size in reader.memory().items() if size}
            reading = {
                "engine": reader.engine.name,
                "engine_because": reader.engine.because,
                "access": reader.access,
            }
            run = _run(reader, target, wanted, plan.forecast_seconds) if execute else None
    if as_json:
        print_json(
            "featstore.explain/1",
            {"store": str(opened.path), "plan": plan.to_dict(), "memory": held, **reading, "run": run},
        )
        return
    show(str(plan))
    if run is not None:
        show("", _render(run))
        if run["access"] != "direct":
            remark(
                "featstore: these reads go through the page cache; what is in it already comes faster "
                "than the forecast"
            )


def _random_ids(table: Any, count: int, seed: int) -> Any:
    """Distinct ids in random order; a usage error where the table has fewer."""
    import numpy as np

    if count > table.rows:
        raise click.BadParameter(
            f"table {table.name!r} has {table.rows:,} rows, fewer than {count:,}", param_hint="--random"
        )
    return np.random.default_rng(seed).choice(table.rows, count, replace=False)


def _run(reader: Any, table: Any, ids: Any, forecast: float) -> dict[str, Any]:
    """Read once, into memory that is there already, after a first small read has woken everything."""
    import numpy as np

    out = np.zeros((len(ids), *table.row_shape), table.dtype)
    reader.read({table.name: ids[:1]})
    before = reader.stats()
    begin = time.perf_counter()
    reader.read({table.name: ids}, out={table.name: out})
    seconds = time.perf_counter() - begin
    stats = reader.stats().since(before)
    return {
        "seconds": seconds,
        "forecast_seconds": forecast,
        "forecast_ratio": forecast / seconds if seconds else 0.0,
        "rows_per_second": len(ids) / seconds,
        "bytes_read_per_second": stats.bytes_read / seconds,
        "access": reader.access,
        "stats": stats.to_dict(),
    }


def _render(run: dict[str, Any]) -> Any:
    stats = run["stats"]
    return facts(
        [
            (
                "measured",
                f"{seconds_text(run['seconds'])}; the forecast is {run['forecast_ratio']:.2f} of that",
            ),
            ("rows", f"{run['rows_per_second']:,.0f}/s"),
            (
                "reads",
                f"{stats['reads']:,}, {rate_text(run['bytes_read_per_second'])}, amplification "
                f"{stats['amplification']:.2f} ({stats['hit_rate']:.0%} of the rows from tiers)",
            ),
            ("planning", seconds_text(stats["seconds_planning"])),
            (
                "waiting",
                f"{seconds_text(stats['seconds_waiting'])} for the device, over all of the engine's threads",
            ),
            ("verifying", seconds_text(stats["seconds_verifying"])),
            ("copying", seconds_text(stats["seconds_copying"])),
        ]
    )
