"""``featstore tune``: threads, workers and the way of reading by which online training is fastest here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from featstore.base.environment import MEMORY
from featstore_cli.options import SIZE, chosen_table, json_option, shared_options
from featstore_cli.output import facts, print_json, progress, remark, seconds_text, show, table
from featstore_cli.sample import Fanouts, chosen_graph, train_nodes


@click.command("tune", context_settings={"show_default": True})
@click.argument("store", type=click.Path(path_type=Path))
@click.option(
    "--fanouts",
    metavar="N,N...",
    type=Fanouts(),
    required=True,
    help="Neighbours per node, hop by hop; -1 takes all.",
)
@click.option("--batch-size", type=click.IntRange(1), default=1024, help="Training nodes of a mini-batch.")
@click.option("--memory", type=SIZE, default=MEMORY, help="The online loader's memory budget.")
@click.option(
    "--train",
    metavar="NAME|FILE",
    help="Training nodes: an array of the store, a .npy file, or text.  [default: all nodes]",
)
@click.option(
    "--step-ms",
    type=click.FloatRange(0),
    help="A training step takes so long, elsewhere than on these cores.",
)
@click.option(
    "--hidden",
    type=click.IntRange(1),
    help="Width of the GraphSAGE that stands in for your model.  [default: 256]",
    show_default=False,
)
@click.option("--policy", default="auto", help="Of the feature buffer.")
@click.option(
    "--cores", type=click.IntRange(1), help="Cores to use.  [default: all that the process may run on]"
)
@click.option("--seconds", type=click.FloatRange(1, 3600), default=20.0, help="How long to measure, about.")
@click.option(
    "--trials", type=click.IntRange(0), default=4, help="Choices tried out; with 0 the forecast is trusted."
)
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Of the order and of the neighbours."
)
@click.option("--table", "table_name", metavar="NAME", help="The table, where the store has several.")
@click.option(
    "--graph", metavar="NAME", help="The graph, where the store has several, or tables of several types."
)
@click.option(
    "--graph-memory", type=SIZE, default="1GiB", help="Memory for the graph, or for reading it from disk."
)
@click.option(
    "--in-memory/--from-disk",
    default=None,
    help="Where the graph is while it is sampled.  [default: in memory if it fits]",
)
@json_option
@shared_options
def command(
    store: Path, fanouts: tuple[int, ...], batch_size: int, memory: int, train: str | None,
    step_ms: float | None, hidden: int | None, policy: str, cores: int | None, seconds: float, trials: int,
    seed: int, table_name: str | None, graph: str | None, graph_memory: int, in_memory: bool | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Profile online training from STORE on this machine, and choose sampler workers, training threads and
    how to read.

    \b
    featstore tune store --fanouts 10,5 --batch-size 1024 --memory 1GiB --train train
    featstore tune store --fanouts 10,5 --train train --step-ms 12

    Without --step-ms a GraphSAGE stands in for the model, on these cores (it needs torch). Let nothing else
    run meanwhile.
    """
    import numpy as np

    import featstore
    from featstore.sampling.batches import open_sampler
    from featstore.sampling.stored import StoredSampler
    from featstore.storage.relations import is_edge_table
    from featstore.tune.tuning import tune
    from featstore.tune.workload import WORKER_SECONDS_MAX, can_have_workers, neighbour_batches, stand_in

    if hidden is not None and step_ms is not None:
        raise click.UsageError(
            "--hidden is of the GraphSAGE that stands in for a model; --step-ms takes none"
        )
    with featstore.open(store) as opened, progress("tuning", unit="steps") as tell:
        chosen = chosen_graph(opened, graph)
        target = chosen.table if table_name is None else chosen_table(opened, table_name)
        if target.rows != chosen.table.rows or is_edge_table(target.name, opened.tables):
            raise click.BadParameter(
                f"table {target.name!r} ({target.rows:,} rows) is not of the {chosen.table.rows:,} nodes of "
                f"the graph, which are those of table {chosen.table.name!r}",
                param_hint="--table",
            )
        nodes = np.arange(chosen.table.rows) if train is None else train_nodes(opened, train)
        step = (
            _sleeper(step_ms)
            if step_ms is not None
            else stand_in(int(np.prod(target.row_shape)), fanouts, 256 if hidden is None else hidden)
        )
        sampler = open_sampler(
            opened, fanouts, seed=seed, graph=chosen.name, memory=graph_memory, in_memory=in_memory
        )
        workers = None if can_have_workers(sampler) else (0,)
        batches = neighbour_batches(sampler, nodes, batch_size, max(WORKER_SECONDS_MAX, seconds))
        try:
            result = tune(
                opened, batches, step, memory=memory, cores=cores, workers=workers, seconds=seconds,
                trials=trials, progress=tell, policy=policy,
                nodes=lambda batch: {target.name: batch["n_id"]},
            )  # fmt: skip
        finally:
            if isinstance(sampler, StoredSampler):
                sampler.close()
    data = {"store": str(store.absolute()), "table": target.name} | result.to_dict()
    if as_json:
        print_json("featstore.tune/1", data)
        return
    _render(data)
    if data["left_out"]:
        remark(
            f"featstore: {seconds:g} seconds were too few for {'; '.join(data['left_out'])}: give more "
            "--seconds"
        )
    if data["filling"]:
        remark(
            "featstore: the buffer was still filling when the profile ended: its hit rate will be "
            "better; give more --seconds"
        )
    if not workers_were_considered(data):
        remark("featstore: sampling from disk, or without torch, has no workers")


def workers_were_considered(data: dict[str, Any]) -> bool:
    """Whether sampling was profiled with any worker."""
    return len(data["profile"]["sample"]) > 1


def _sleeper(milliseconds: float) -> Any:
    return lambda batch: time.sleep(milliseconds / 1000)


def _render(data: dict[str, Any]) -> None:
    rows = [
        [
            one["stage"], one["setting_before"], one["setting"],
            seconds_text(one["before"]["seconds"]), seconds_text(one["after"]["seconds"]),
            seconds_text(one["before"]["cpu_seconds"]), seconds_text(one["after"]["cpu_seconds"]),
        ]
        for one in data["stages"]
    ]  # fmt: skip
    rows.append(
        [
            "a mini-batch",
            data["slowest_before"],
            data["slowest"],
            seconds_text(data["forecast_seconds_before"]),
            seconds_text(data["forecast_seconds"]),
            "",
            "",
        ]
    )
    show(
        table(
            ["stage", "before", "after", "seconds, before", "after", "CPU, before", "after"],
            rows,
            left=3,
            title=(
                "What a mini-batch takes in each stage, measured alone; and of all at once, by the "
                "model, with what is slowest"
            ),
        )
    )
    if data["tried"]:
        tried = [
            [_name(t["choice"]), seconds_text(t["forecast_seconds"]), seconds_text(t["seconds"])]
            for t in data["tried"]
        ]
        show(table(["tried out", "forecast", "measured"], tried))
    _render_choice(data)


def _render_choice(data: dict[str, Any]) -> None:
    from featstore.units import format_bytes

    points = [
        [
            format_bytes(p["buffer_bytes"]),
            f"{p['hit_rate']:.1%}",
            seconds_text(p["read_seconds"]),
            seconds_text(p["seconds"]),
        ]
        for p in data["curve"]
    ]
    show(table(["buffer of", "hit rate", "reading", "a mini-batch"], points, left=0))
    options = ", ".join(f"{key}={value!r}" for key, value in data["loader_options"].items())
    epoch = "" if data["epoch_seconds"] is None else f"; an epoch {seconds_text(data['epoch_seconds'])}"
    show(
        facts(
            [
                ("choice", _name(data["choice"])),
                (
                    "a mini-batch",
                    f"{seconds_text(data['seconds_before'])} before, {seconds_text(data['seconds'])} "
                    f"after{epoch}",
                ),
                ("in Python", f'store.loader(batches, mode="online", {options})'),
                (
                    "",
                    f"DataLoader(num_workers={data['choice']['workers']}), "
                    f"torch.set_num_threads({data['choice']['train_threads']})",
                ),
            ]
        )
    )


def _name(choice: dict[str, Any]) -> str:
    reading = choice["reading"]
    return (
        f"{choice['workers']} sampler workers, {choice['train_threads']} training threads, "
        f"{reading['engine']} {reading['queue_depth']} deep"
    )
