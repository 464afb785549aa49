"""``featstore demo``: a GNN trained from memory, by np.memmap and in every mode of a store, in one table."""

from __future__ import annotations

import os
from pathlib import Path

import click

from featstore_cli.options import SIZE, engine_option, json_option, settings, shared_options
from featstore_cli.output import print_json, progress, remark, show


@click.command("demo", context_settings={"show_default": True})
@click.option(
    "--mode",
    "ways",
    type=click.Choice(["np.memmap", "online", "compiled", "rolling", "partitions"]),
    multiple=True,
    help="Train in this way, beside memory; may be given several times.  [default: all]",
)
@click.option("--memory", type=SIZE, default="96MiB", help="The memory of each of them.")
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
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the table and a picture here, as one page that needs nothing else.",
)
@click.option("--overwrite", is_flag=True, help="Replace what --html names.")
@engine_option
@json_option
@shared_options
@click.pass_context
def command(
    ctx: click.Context,
    ways: tuple[str, ...],
    memory: int,
    data: Path | None,
    workdir: Path | None,
    epochs: int | None,
    batch_size: int | None,
    seed: int,
    html: Path | None,
    overwrite: bool,
    engine: str,
    as_json: bool,
) -> None:
    """Pack a graph, train GraphSAGE on it from memory, by np.memmap and in every mode of the store's loader,
    each within --memory and by the same loop, and compare.

    All rows must be those of the source, and where mini-batches are the same, all losses those of memory to
    the last bit; where they are not, accuracy may be a few points less. Exits with 1 where it is otherwise.
    """
    from featstore_demo import render, run

    from featstore.storage.whole_files import check_writable, write_whole

    if overwrite and html is None:
        raise click.UsageError("--overwrite goes with --html")
    if html is not None:
        check_writable(html, overwrite)  # before the work
    with progress("starting", unit="steps") as tell:
        report = run(
            ways=ways,
            memory=memory,
            data=None if data is None else os.fspath(data),
            workdir=workdir,
            epochs=epochs,
            batch_size=batch_size,
            seed=seed,
            engine=None if engine == "auto" else engine,
            progress=tell,
            say=remark,
        )
    if html is not None:
        from featstore_cli.demo_page import page

        write_whole(html, page(report).encode(), overwrite)
        remark(f"wrote {html}")
    if as_json:
        found = report.to_json()
        print_json(found.pop("schema"), found)
    elif not (settings().quiet and report.good):
        show(render(report))
    if not report.good:
        ctx.exit(1)
