"""``featstore loader-costs``: what each mode of a loader would cost here."""

from __future__ import annotations

from pathlib import Path

import click

from featstore.base.environment import MEMORY
from featstore_cli.options import SIZE, engine_option, json_option, shared_options
from featstore_cli.output import print_json, show
from featstore_cli.sample import Fanouts, chosen_graph, train_nodes


@click.command("loader-costs", context_settings={"show_default": True})
@click.argument("store", type=click.Path(path_type=Path))
@click.option(
    "--fanouts",
    metavar="N,N...",
    type=Fanouts(),
    required=True,
    help="Neighbours per node, hop by hop; -1 takes all.",
)
@click.option("--batch-size", type=click.IntRange(1), default=1024, help="Training nodes of a mini-batch.")
@click.option("--memory", type=SIZE, default=MEMORY, help="The loader's memory budget.")
@click.option(
    "--disk", metavar="SIZE|Nx", help="Disk that may be taken: a size, or a multiple of the tables."
)
@click.option(
    "--train",
    metavar="NAME|FILE",
    help="Training nodes: an array of the store, a .npy file, or text.  [default: all nodes]",
)
@click.option("--epochs", type=click.IntRange(1), default=10, help="Over which preparing once is spread.")
@click.option("--repeat", is_flag=True, help="The same mini-batches in every epoch will do.")
@click.option("--step-ms", type=click.FloatRange(0), help="A training step takes so long.")
@click.option(
    "--seconds", type=click.FloatRange(0.1, 3600), default=2.0, help="Look at mini-batches so long."
)
@click.option(
    "--share",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.05,
    help="Of an epoch to look at, at most.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Of the order and of the neighbours."
)
@click.option("--graph", metavar="NAME", help="The graph, where the store has several.")
@engine_option
@json_option
@shared_options
def command(
    store: Path, fanouts: tuple[int, ...], batch_size: int, memory: int, disk: str | None, train: str | None,
    epochs: int, repeat: bool, step_ms: float | None, seconds: float, share: float, seed: int,
    graph: str | None, engine: str, as_json: bool,
) -> None:  # fmt: skip
    """Forecast what training from STORE would cost in each mode of a loader: seconds, bytes, disk, memory.

    \b
    featstore loader-costs store --fanouts 10,5 --train train --memory 2GiB --disk 3x
    """
    import numpy as np

    import featstore

    with featstore.open(store) as opened:
        chosen = chosen_graph(opened, graph)
        nodes = np.arange(chosen.table.rows) if train is None else train_nodes(opened, train)
        costs = opened.loader_costs(
            seeds=nodes, fanouts=fanouts, batch_size=batch_size, memory=memory, disk=disk, epochs=epochs,
            repeat=repeat, train_seconds=None if step_ms is None else step_ms / 1000, seconds=seconds,
            share=share, seed=seed, graph=chosen.name, engine=engine,
        )  # fmt: skip
    if as_json:
        print_json("featstore.loader-costs/1", {"store": str(store.absolute())} | costs.to_dict())
    else:
        show(str(costs))
