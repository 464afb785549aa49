"""Does repeating recorded epochs keep the accuracy of fresh ones?

    python benchmarks/replay_accuracy.py --data FOLDER --sets cora
    python benchmarks/replay_accuracy.py --data FOLDER --resume          # go on where it was stopped

What mode ``compiled`` does, in memory: epoch e takes the mini-batches, seeds and neighbours, of epoch e mod
N, of 1, 3 or 10 that were recorded, as they were or in an order drawn anew (``shuffle=True``). Graphs, models
and training are those of ``mega_accuracy.py``; what is reported is the test accuracy at the best validation,
mean and standard error over the seeds, and differences with the standard error of two independent means;
where that is above 0.2 points, more seeds are trained.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import click
import numpy as np
from harness import RESULTS, Claim, Settings, note, shared_options
from mega_accuracy import (
    EVERY,
    AccuracyReport,
    data_option,
    difference,
    found,
    mean_and_error,
    more_seeds,
    resume_option,
    train,
    with_rows,
)
from mega_plans import PLANS, Data, Plan, load

KIND, FANOUTS = "SAGE", (5, 5)  # few neighbours, so that fresh ones are others
SETS = ("cora", "computers", "arxiv")


@dataclass(frozen=True)
class Replay:
    """``recorded`` epochs take turns; 0: every one is fresh. ``shuffle``: their mini-batches in another order
    each time."""

    title: str
    recorded: int
    shuffle: bool = False


REPLAYS = {
    "fresh": Replay("fresh every epoch", 0),
    "one": Replay("1 recorded epoch", 1),
    "one_shuffled": Replay("1 recorded epoch, shuffled", 1, shuffle=True),
    "three": Replay("3 recorded epochs", 3),
    "ten": Replay("10 recorded epochs", 10),
}


def epochs(data: Data, plan: Plan, replay: Replay, seed: int) -> Iterator[tuple[int, Iterator[Any]]]:
    """(1 pass over the training nodes, its mini-batches), again and again."""
    import torch

    from featstore.sampling.neighbors import NeighborSampler

    sampler, x = NeighborSampler(data.indptr, data.indices, plan.fanouts, seed), torch.from_numpy(data.x)

    def batches(epoch: int) -> Iterator[Any]:
        of = epoch % replay.recorded if replay.recorded else epoch
        order = np.random.default_rng([seed, of]).permutation(data.train)
        numbers = np.arange(-(-len(order) // plan.batch_size))
        if replay.shuffle:
            numbers = np.random.default_rng([seed, epoch, 1]).permutation(numbers)
        for number in numbers.tolist():
            low = number * plan.batch_size
            yield with_rows(sampler.sample(order[low : low + plan.batch_size], number, epoch=of), x)

    for epoch in itertools.count():
        yield 1, batches(epoch)


def trained_as(plan: Plan, replay: Replay) -> int:
    """A fingerprint of all that a run's result depends on but its seed."""
    given = {
        "plan": asdict(replace(plan, title="")), "replay": asdict(replace(replay, title="")), "kind": KIND,
        "every": EVERY,
    }  # fmt: skip
    return zlib.crc32(json.dumps(given, sort_keys=True).encode())


def measure(
    report: AccuracyReport, name: str, plan: Plan, folder: Path, seeds: int, out: Path | None, quick: bool
) -> None:
    """All runs of a data set that are not there yet; the file is written at the end of each seed's."""
    from mega_models import WholeGraph

    data = load(folder, plan)
    whole = WholeGraph(KIND, data.indptr, data.indices, plan.fanouts[0])

    def fulfil(key: str, seed: int) -> None:
        run, replay = f"{name}|{KIND}|{key}|{seed}", REPLAYS[key]
        if report.lacks(run):
            result = train(KIND, plan, data, epochs(data, plan, replay, seed), whole, seed)
            report.keep(run, result | {"trained_as": trained_as(plan, replay)}, out)
            note(f"{name} {key} seed {seed}: {result['test']:.4f}, {result['seconds']:.1f} s")

    for seed in range(seeds):
        for key in REPLAYS:
            fulfil(key, seed)
    if seeds > 1 and not quick:
        for key, seed in more_seeds(report, name, KIND, [k for k in REPLAYS if k != "fresh"], "fresh"):
            fulfil(key, seed)


def fill(report: AccuracyReport, plans: dict[str, Plan]) -> None:
    """Claims and tables from the runs."""
    for name, plan in plans.items():
        rows = []
        for key, replay in REPLAYS.items():
            runs = found(report, name, KIND, key)
            if not runs:
                continue
            value, error = mean_and_error([r["test"] for r in runs])
            against = None if key == "fresh" else difference(report, name, KIND, key, "fresh")
            rows.append([
                replay.title, f"{value:.2f} ± {error:.2f}",
                "" if against is None else f"{against[0]:+.2f} ± {against[1]:.2f}",
                round(mean(r["steps"] for r in runs)), len(runs),
            ])  # fmt: skip
            if against is not None:
                text = f"{plan.title}: {replay.title} minus fresh (± {against[1]:.2f})"
                report.claims.append(Claim(text, round(against[0], 3), unit="points"))
        columns = ("mini-batches", "test accuracy, %", "minus fresh, points", "steps", "seeds")
        if rows:
            report.table(f"{plan.title}: {plan.batch_size} a mini-batch, {plan.rounds} epochs", columns, rows)


@click.command()
@data_option
@click.option("--sets", "names", multiple=True, type=click.Choice(SETS), help="[default: all of them]")
@resume_option
@shared_options(size="1", quick_size="1", rounds=5)
def main(settings: Settings, folder: Path, names: tuple[str, ...], resume: bool) -> None:
    """Accuracy of repeating recorded epochs. A round is a seed; --size means nothing here."""
    import torch

    torch.set_num_threads(1)
    plans = {n: replace(PLANS[n], fanouts=FANOUTS, variants_of_all=()) for n in names or SETS}
    if settings.quick:
        plans = {n: replace(p, rounds=EVERY) for n, p in plans.items()}
    out = settings.out or (None if settings.quick else RESULTS / "replay_accuracy.json")
    report = AccuracyReport("replay_accuracy", "Accuracy of repeating recorded epochs", {
        "seeds": settings.rounds, "evaluated_every_epochs": EVERY,
        "plans": {n: asdict(p) for n, p in plans.items()},
        "replays": {n: asdict(r) for n, r in REPLAYS.items()},
    }, settings.workspace)  # fmt: skip
    if resume and out is not None:
        report.resume(out, plans, REPLAYS, trained_as)
    for seeds in (1, settings.rounds):  # the first ones prove what was kept
        for name, plan in plans.items():
            measure(report, name, plan, folder, seeds, out, settings.quick)
    report.notes = [
        f"Two layers of GraphSAGE with 64 hidden units, fan-outs {list(FANOUTS)}; test accuracy at the best "
        "validation, mean and standard error over the seeds (of models, orders and neighbours)."
    ]
    fill(report, plans)
    report.save(out, settings.quick)


if __name__ == "__main__":
    main()
