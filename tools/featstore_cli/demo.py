"""``featstore demo``: a GNN trained from a store and from memory, to the same bits; or by mega-batches, to
about the same accuracy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from featstore_cli.options import SIZE, engine_option, json_option, settings, shared_options
from featstore_cli.output import print_json, progress, show


@click.command("demo", context_settings={"show_default": True})
@click.option(
    "--mode",
    type=click.Choice(["batch", "mega"]),
    default="batch",
    help="Rows for each mini-batch, or partitions for many (mega-batches).",
)
@click.option(
    "--memory",
    type=SIZE,
    help="The memory budget of reader or loader.  [default: 32MiB; 96MiB in mode mega]",
)
@click.option(
    "--data",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A graph in an .npz file.  [default: one is made up]",
)
@click.option(
    "--workdir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to keep the store, as 'store'.  [default: nowhere]",
)
@click.option("--epochs", type=click.IntRange(1), help="Epochs to train.  [default: by the graph's size]")
@click.option(
    "--batch-size", type=click.IntRange(1), help="Seeds of a mini-batch.  [default: by the rows' size]"
)
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of graph, sampling and training.")
@engine_option
@json_option
@shared_options
@click.pass_context
def command(
    ctx: click.Context,
    mode: str,
    memory: int | None,
    data: Path | None,
    workdir: Path | None,
    epochs: int | None,
    batch_size: int | None,
    seed: int,
    engine: str,
    as_json: bool,
) -> None:
    """Pack a graph's features, train GraphSAGE from the store within --memory and again from memory, and
    compare.

    Both runs must give the same rows, losses and accuracies to the last bit; exits with 1 where they do not.

    With --mode mega, whole partitions are loaded instead, and mini-batches drawn from what is in memory.
    Losses differ then; exits with 1 where the test accuracy falls short by more than a few points.
    """
    from featstore_demo import render, render_mega, run, run_mega

    with progress("starting", unit="steps") as tell:
        options: dict[str, Any] = {} if memory is None else {"memory": memory}
        report: Any = (run if mode == "batch" else run_mega)(
            **options,
            data=None if data is None else os.fspath(data),
            workdir=workdir,
            epochs=epochs,
            batch_size=batch_size,
            seed=seed,
            engine=None if engine == "auto" else engine,
            progress=tell,
        )
    good = report.identical if mode == "batch" else report.agrees
    if as_json:
        found = report.to_json()
        print_json(found.pop("schema"), found)
    elif not (settings().quiet and good):
        show((render if mode == "batch" else render_mega)(report))
    if not good:
        ctx.exit(1)
