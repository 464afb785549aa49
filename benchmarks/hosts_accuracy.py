"""Does training on several hosts keep the accuracy of training on one?

    python benchmarks/hosts_accuracy.py --data FOLDER
    python benchmarks/hosts_accuracy.py --data FOLDER --resume          # go on where it was stopped

The folder holds the data sets of ``order_accuracy.py``, which are trained on as there. Hosts are processes of
this machine, each with its part of a store (``featstore.split``, ``open_split``) and the whole topology: a
host's loader draws mini-batches around training nodes that it owns, takes the rows of others from their
processes, and DistributedDataParallel averages gradients. One host has the whole store, in one process. Every
step has as many seeds, divided among the hosts, and every run as many epochs; hosts that own unequal numbers
of training nodes have some twice (``featstore.sampling.ranked``), so there are a few more steps.

The first host evaluates, on the whole graph in memory, every other epoch. It is an error where an epoch
leaves out a training node, where rows or edges are wrong (of the first mini-batch of each epoch), or where
hosts come to different models. What is reported is the test accuracy at the best validation, mean and
standard error over the seeds (of models, orders and neighbours; the split is the same). Differences have the
standard error of two independent means.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import click
import numpy as np
from harness import RESULTS, Claim, Settings, note, shared_options
from hosts_training import run_hosts
from mega_accuracy import (
    EVERY,
    AccuracyReport,
    data_option,
    difference,
    found,
    mean_and_error,
    resume_option,
)
from mega_plans import Data, Plan, load
from order_accuracy import KIND, LOWEST_POINTS, WIDEST, narrow
from order_accuracy import PLANS as ORDER_PLANS

#: Of a host's loader: less than all rows take, so that some are asked for again in every epoch.
MEMORY = {"arxiv": "32MiB", "computers": "16MiB", "physics": "16MiB"}
PARTITIONS = 128
COLUMNS = (
    "hosts",
    "test accuracy, %",
    "minus one host, points",
    "rows an epoch",
    "of these asked of other hosts",
    "steps",
    "seeds",
)


@dataclass(frozen=True)
class Hosts:
    """How many train together."""

    title: str
    count: int


HOSTS = {"one": Hosts("one host", 1), "two": Hosts("two hosts", 2), "four": Hosts("four hosts", 4)}
_MOST = max(one.count for one in HOSTS.values())
#: With as many seeds in a step of any number of hosts.
PLANS = {
    name: replace(plan, batch_size=-(-plan.batch_size // _MOST) * _MOST, partitions=PARTITIONS)
    for name, plan in ORDER_PLANS.items()
}


def trained_as(plan: Plan, hosts: Hosts) -> int:
    """A fingerprint of all that a run's result depends on but its seed."""
    given = {
        "plan": asdict(replace(plan, title="")), "kind": KIND, "hosts": hosts.count, "every": EVERY,
        "widest": WIDEST,
    }  # fmt: skip
    return zlib.crc32(json.dumps(given, sort_keys=True).encode())


def stored(folder: Path, data: Data, plan: Plan) -> dict[str, Path]:
    """The whole store for one host, and its parts for more, by how many they are."""
    import featstore

    paths = {key: folder / key for key in HOSTS}
    with featstore.pack(
        paths["one"], data.x, graph=(data.indptr, data.indices), partitions=plan.partitions,
        arrays={"train": data.train}, memory="4GiB",
    ) as store:  # fmt: skip
        for key, hosts in HOSTS.items():
            if hosts.count > 1:
                featstore.split(store, hosts.count, paths[key], train="train", memory="4GiB")
    return paths


def measure(
    report: AccuracyReport, name: str, plan: Plan, folder: Path, settings: Settings, out: Path | None
) -> None:
    """All runs of a data set that are not there yet; the file is written after those of so many hosts."""

    def cell(key: str, seed: int) -> str:
        return f"{name}|{KIND}|{key}|{seed}"

    todo = {key: [s for s in range(settings.rounds) if report.lacks(cell(key, s))] for key in HOSTS}
    if not any(todo.values()):
        return
    data = narrow(load(folder, plan))
    with tempfile.TemporaryDirectory(dir=settings.workspace) as temporary:
        workspace = Path(temporary)
        paths = stored(workspace, data, plan)
        np.savez(workspace / "data.npz", **vars(data))
        for key, seeds in todo.items():
            if not seeds:
                continue
            told: Any = run_hosts(
                workspace, paths[key], HOSTS[key].count, slow=None, child="child_hosts_accuracy.py",
                data=str(workspace / "data.npz"), plan=asdict(plan), kind=KIND, memory=MEMORY[name],
                seeds=seeds,
            )  # fmt: skip
            for seed, result in zip(seeds, told[0], strict=True):
                result["trained_as"] = trained_as(plan, HOSTS[key])
                report.keep(cell(key, seed), result, out)
                note(f"{name} {key} seed {seed}: {result['test']:.4f}, {result['seconds']:.1f} s")


def fill(report: AccuracyReport, plans: dict[str, Plan]) -> None:
    """Claims and tables from the runs."""
    for name, plan in plans.items():
        rows = []
        for key, hosts in HOSTS.items():
            runs = found(report, name, KIND, key)
            if not runs:
                continue
            value, error = mean_and_error([r["test"] for r in runs])
            against = None if key == "one" else difference(report, name, KIND, key, "one")
            rows.append([
                hosts.title, f"{value:.2f} ± {error:.2f}",
                "" if against is None else f"{against[0]:+.2f} ± {against[1]:.2f}",
                round(mean(r["rows_an_epoch"] for r in runs)),
                round(mean(r["remote_rows_an_epoch"] for r in runs)), round(mean(r["steps"] for r in runs)),
                len(runs),
            ])  # fmt: skip
            if against is not None:
                text = f"{plan.title}: {hosts.title} minus one host (± {against[1]:.2f})"
                report.claims.append(Claim(text, round(against[0], 3), LOWEST_POINTS, ">=", "points"))
        if rows:
            title = (
                f"{plan.title}: {plan.batch_size} seeds in a step of all hosts, {plan.rounds} epochs; "
                f"{MEMORY[name]} for a host's loader"
            )
            report.table(title, COLUMNS, rows)


@click.command()
@data_option
@click.option("--sets", "names", multiple=True, type=click.Choice(list(PLANS)), help="[default: all of them]")
@resume_option
@shared_options(size="1", quick_size="1", rounds=5)
def main(settings: Settings, folder: Path, names: tuple[str, ...], resume: bool) -> None:
    """Accuracy of training on several hosts. A round is a seed; --size means nothing here."""
    names = names or (("computers",) if settings.quick else tuple(PLANS))
    out = settings.out or (None if settings.quick else RESULTS / "hosts_accuracy.json")
    report = AccuracyReport("hosts_accuracy", "Accuracy of training on several hosts", {
        "seeds": settings.rounds, "evaluated_every_epochs": EVERY, "widest": WIDEST, "memory": MEMORY,
        "plans": {n: asdict(p) for n, p in PLANS.items()},
        "hosts": {n: asdict(h) for n, h in HOSTS.items()},
    }, settings.workspace)  # fmt: skip
    if resume and out is not None:
        report.resume(out, PLANS, HOSTS, trained_as)
    plans = {n: replace(p, rounds=EVERY) if settings.quick else p for n, p in PLANS.items()}
    for name in names:
        measure(report, name, plans[name], folder, settings, out)
    report.notes = [
        "Two layers of GraphSAGE with 64 hidden units, fan-outs [10, 5]; Adam, its learning rate falling "
        "linearly. Test accuracy at the best validation, mean and standard error over the seeds. Rows an "
        "epoch: different rows of each mini-batch, summed over the hosts.",
        "The features of arxiv are another model's guesses of the class, which alone give 73.5 %. Those of "
        f"computers and physics are {WIDEST} random projections of bags of words.",
    ]
    fill(report, plans)
    report.save(out, settings.quick)


if __name__ == "__main__":
    main()
