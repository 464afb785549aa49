"""Does training in proximity or partition order keep the accuracy of random order? After BGL's section 5.4.

    python benchmarks/order_accuracy.py --data FOLDER
    python benchmarks/order_accuracy.py --data FOLDER --resume          # go on where it was stopped

The folder holds ``ogbn_arxiv_tape40.npz`` and ``coauthor_physics.npz``, as ``mega_accuracy.py`` wants them;
the training itself is that benchmark's as well: two layers of GraphSAGE, a learning rate that falls linearly,
evaluation on the whole graph every other epoch.

*By owner* is what ranks of several hosts do (``featstore.split``, ``open_split``): the nodes are split among
hosts as the command does it, and a step has as many seeds of each host, drawn at random from those that it
owns; where hosts own unequal numbers, some stand twice. Gradients are averaged over all seeds of a step, as
DistributedDataParallel does.

Only the order differs in which the training nodes go through the mini-batches. All orders have as many
mini-batches of as many seeds, whose neighbours are drawn from the whole graph in memory, and the number of
sequences is found by the test on the labels. What is reported is the test accuracy at the best validation,
mean and standard error over the seeds (of models, orders and neighbours; METIS's partitions are the same).
Differences have the standard error of two independent means.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import zlib
from collections.abc import Callable, Iterator
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
    resume_option,
    train,
    with_rows,
)
from mega_plans import Data, Plan, load
from numpy.typing import NDArray

from featstore.sampling.ranked import owned_share

KIND = "SAGE"
WIDEST = 256  # features; of what has more, random projections are trained on
LOWEST_POINTS = -0.3
PARTITION_SEED = 1
COLUMNS = (
    "order",
    "sequences",
    "test accuracy, %",
    "minus random order, points",
    "rows an epoch",
    "steps",
    "seeds",
)
PLANS = {
    "arxiv": Plan("ogbn_arxiv_tape40", "ogbn_arxiv_tape40", "official", 1024, 1024, 8, 0.01, fanouts=(10, 5)),
    "computers": Plan(
        "amazon_computers", "amazon_computers", "official", 512, 86, 24, 0.005, fanouts=(10, 5)
    ),
    "physics": Plan("coauthor_physics", "coauthor_physics", "official", 256, 64, 8, 0.01, fanouts=(10, 5)),
}


@dataclass(frozen=True)
class Order:
    """An order of the training nodes. ``sequences``: 0 for as many as the test on the labels finds.
    ``hosts``: of training by owner."""

    title: str
    kind: str
    sequences: int = 0
    hosts: int = 0


ORDERS = {
    "random": Order("random", "random"),
    "proximity": Order("proximity", "proximity"),
    "partition": Order("partition", "partition"),
    "owner_2": Order("by owner, two hosts", "owner", hosts=2),
    "owner_4": Order("by owner, four hosts", "owner", hosts=4),
}


class Orders:
    """Makes the orders of a data set; its partitions are made when first asked for."""

    def __init__(self, data: Data, plan: Plan) -> None:
        self._data, self._plan = data, plan
        self._partitions: NDArray[np.int32] | None = None

    def make(self, order: Order, seed: int) -> tuple[Callable[[int], NDArray[np.int64]], int]:
        """The function that gives the training nodes of an epoch in order, and the number of sequences (0:
        random)."""
        import featstore

        data = self._data
        if order.kind == "random":
            return lambda epoch: np.random.default_rng([seed, epoch]).permutation(data.train), 0
        if order.kind == "owner":
            owner = self._owners(order.hosts)
            return lambda epoch: self._by_owner(owner, order.hosts, [seed, epoch]), 0
        given: dict[str, Any] = {"batch_size": self._plan.batch_size, "seed": seed, "labels": data.labels}
        given["sequences"] = order.sequences or "auto"
        made: featstore.ProximityOrder | featstore.PartitionOrder
        if order.kind == "proximity":
            made = featstore.ProximityOrder((data.indptr, data.indices), data.train, **given)
        else:
            made = featstore.PartitionOrder(self._of_nodes(), data.train, **given)

        def nodes(epoch: int) -> NDArray[np.int64]:
            made.set_epoch(epoch)
            return made.nodes()

        return nodes, made.sequences

    def _by_owner(self, owner: NDArray[Any], hosts: int, seed: list[int]) -> NDArray[np.int64]:
        """The seeds of all hosts, step by step."""
        shuffled = np.random.default_rng(seed).permutation(self._data.train)
        each = self._plan.batch_size // hosts
        shares = [owned_share(shuffled, owner, each, host, 1, hosts).seeds for host in range(hosts)]
        steps = -(-len(shares[0]) // each)
        return np.concatenate([share[step * each :][:each] for step in range(steps) for share in shares])

    def _owners(self, hosts: int) -> NDArray[Any]:
        """The host of each node, as ``featstore.split`` has it."""
        import featstore

        data = self._data
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            rows, graph = np.zeros((len(data.indptr) - 1, 1), np.uint8), (data.indptr, data.indices)
            with featstore.pack(
                path / "s",
                rows,
                graph=graph,
                partitions=32 * hosts,
                arrays={"train": data.train},
                memory="4GiB",
            ) as store:
                featstore.split(store, hosts, path / "parts", train="train", memory="4GiB")
            with featstore.open(path / "parts" / "topology") as topology, topology.reader() as reader:
                return reader.read(np.arange(len(rows)))

    def _of_nodes(self) -> NDArray[np.int32]:
        if self._partitions is None:
            from featstore.order.metis import metis_partition

            self._partitions = metis_partition(self._data, self._plan.partitions, PARTITION_SEED)
        return self._partitions


def narrow(data: Data) -> Data:
    """The data with at most WIDEST features, each of mean 0 and variance 1 where they are random
    projections."""
    if data.x.shape[1] <= WIDEST:
        return data
    weights = np.random.default_rng(0).standard_normal((data.x.shape[1], WIDEST), np.float32)
    x = data.x @ weights
    return replace(data, x=(x - x.mean(0)) / x.std(0))


def epochs(
    data: Data, plan: Plan, nodes: Callable[[int], NDArray[np.int64]], seed: int, rows: list[int]
) -> Iterator[tuple[int, Iterator[Any]]]:
    """(1 pass over the training nodes, its mini-batches), again and again; how many rows they need goes into
    ``rows``."""
    import torch

    from featstore.sampling.neighbors import NeighborSampler

    sampler, x = NeighborSampler(data.indptr, data.indices, plan.fanouts, seed), torch.from_numpy(data.x)

    def batches(epoch: int) -> Iterator[Any]:
        order = nodes(epoch)
        if not np.array_equal(np.unique(order), np.sort(data.train)):
            raise click.ClickException(f"epoch {epoch} has not every training node")
        for number, low in enumerate(range(0, len(order), plan.batch_size)):
            sample = sampler.sample(order[low : low + plan.batch_size], number, epoch=epoch)
            rows.append(len(sample.node))
            yield with_rows(sample, x)

    for epoch in itertools.count():
        yield 1, batches(epoch)


def run(data: Data, plan: Plan, orders: Orders, order: Order, whole: Any, seed: int) -> dict[str, Any]:
    """One training run."""
    rows: list[int] = []
    nodes, sequences = orders.make(order, seed)
    result = train(KIND, plan, data, epochs(data, plan, nodes, seed, rows), whole, seed)
    return result | {"sequences": sequences, "rows_an_epoch": round(sum(rows) / plan.rounds)}


def trained_as(plan: Plan, order: Order) -> int:
    """A fingerprint of all that a run's result depends on but its seed."""
    given = {
        "plan": asdict(replace(plan, title="")), "kind": KIND,
        "order": {k: v for k, v in asdict(replace(order, title="")).items() if k != "hosts" or v},
        "every": EVERY, "widest": WIDEST, "partition_seed": PARTITION_SEED,
    }  # fmt: skip
    return zlib.crc32(json.dumps(given, sort_keys=True).encode())


def measure(
    report: AccuracyReport, name: str, plan: Plan, folder: Path, settings: Settings, out: Path | None
) -> None:
    """All runs of a data set that are not there yet; the file is written after each."""
    from mega_models import WholeGraph

    todo = [
        (key, s) for s in range(settings.rounds) for key in ORDERS if report.lacks(f"{name}|{KIND}|{key}|{s}")
    ]
    if not todo:
        return
    data = narrow(load(folder, plan))
    orders, whole = Orders(data, plan), WholeGraph(KIND, data.indptr, data.indices, plan.fanouts[0])
    for key, seed in todo:
        result = run(data, plan, orders, ORDERS[key], whole, seed)
        result["trained_as"] = trained_as(plan, ORDERS[key])
        report.keep(f"{name}|{KIND}|{key}|{seed}", result, out)
        note(
            f"{name} {key} seed {seed}: {result['test']:.4f}, {result['sequences']} sequences, "
            f"{result['seconds']:.1f} s"
        )


def fill(report: AccuracyReport, plans: dict[str, Plan]) -> None:
    """Claims and tables from the runs."""
    for name, plan in plans.items():
        rows = []
        for key, order in ORDERS.items():
            runs = found(report, name, KIND, key)
            against = None if key == "random" else difference(report, name, KIND, key, "random")
            if not runs:
                continue
            value, error = mean_and_error([r["test"] for r in runs])
            sequences = sorted({r["sequences"] for r in runs})
            spread = " to ".join(f"{s:,}" for s in dict.fromkeys((sequences[0], sequences[-1])))
            rows.append([
                order.title, spread if sequences[0] else "", f"{value:.2f} ± {error:.2f}",
                "" if against is None else f"{against[0]:+.2f} ± {against[1]:.2f}",
                round(mean(r["rows_an_epoch"] for r in runs)), round(mean(r["steps"] for r in runs)),
                len(runs),
            ])  # fmt: skip
            if against is not None:
                text = f"{plan.title}: {order.title} order minus random order (± {against[1]:.2f})"
                report.claims.append(Claim(text, round(against[0], 3), LOWEST_POINTS, ">=", "points"))
        if rows:
            title = (
                f"{plan.title}: {plan.batch_size} a mini-batch, {plan.rounds} epochs, {plan.partitions} "
                "partitions by METIS"
            )
            report.table(title, COLUMNS, rows)


@click.command()
@data_option
@click.option("--sets", "names", multiple=True, type=click.Choice(list(PLANS)), help="[default: all of them]")
@resume_option
@shared_options(size="1", quick_size="1", rounds=5)
def main(settings: Settings, folder: Path, names: tuple[str, ...], resume: bool) -> None:
    """Accuracy of training by order of the training nodes. A round is a seed; --size means nothing here."""
    import torch

    torch.set_num_threads(1)
    names = names or (("physics",) if settings.quick else tuple(PLANS))
    out = settings.out or (None if settings.quick else RESULTS / "order_accuracy.json")
    report = AccuracyReport("order_accuracy", "Accuracy by order of the training nodes", {
        "seeds": settings.rounds, "evaluated_every_epochs": EVERY, "widest": WIDEST,
        "plans": {n: asdict(p) for n, p in PLANS.items()},
        "orders": {n: asdict(o) for n, o in ORDERS.items()},
    }, settings.workspace)  # fmt: skip
    if resume and out is not None:
        report.resume(out, PLANS, ORDERS, trained_as)
    plans = {n: replace(p, rounds=EVERY) if settings.quick else p for n, p in PLANS.items()}
    for name in names:
        measure(report, name, plans[name], folder, settings, out)
    report.notes = [
        "Two layers of GraphSAGE with 64 hidden units, fan-outs [10, 5]; Adam, its learning rate "
        "falling linearly. Test accuracy at the best validation, mean and standard error over the "
        "seeds. Rows an epoch: different rows of each mini-batch, summed.",
        "The features of arxiv are another model's guesses of the class, which alone give 73.5 %. "
        f"Those of physics are {WIDEST} random projections of its bags of words.",
    ]
    fill(report, plans)
    report.save(out, settings.quick)


if __name__ == "__main__":
    main()
