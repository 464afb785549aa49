"""Does training by mega-batches keep the accuracy of neighbour sampling in memory? After HierBatching's table
2 and appendix D.2.

    python benchmarks/mega_accuracy.py --data FOLDER --dir /a/directory/on/the/ssd
    python benchmarks/mega_accuracy.py --data FOLDER --resume          # go on where it was stopped

The folder holds ``ogbn_arxiv_tape40.npz``, ``amazon_computers.npz`` and ``cora_planetoid.npz``: ``indptr``
and ``indices``, the CSC of incoming edges; ``features``, or ``feat_data``, ``feat_indices``, ``feat_indptr``
and ``feat_shape``; ``labels`` and the three splits.

Everything is trained by the same code, on an iterator of mini-batches; only where these come from differs: a
sampler over the graph in memory (NS), or mega-batches of a store. Two passes over a mega-batch count as two
over the training nodes, so that all take as many steps of as many seeds, and are evaluated as often, on the
whole graph in memory. What is reported is the test accuracy at the best validation, mean and standard error
over the seeds (of models, partitions and mini-batches; the store's partitions are the same). Differences have
the standard error of two independent means; where that is above 0.2 points, more seeds are trained, of the
line that adds more to it, until it is not.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import click
import numpy as np
from harness import RESULTS, Claim, Report, Settings, git_commit, note, shared_options
from mega_plans import PLANS, VARIANTS, Data, Plan, Variant, load, trained_as
from numpy.typing import NDArray

EVERY = 2  # passes over the training nodes between evaluations
HUBS = 0.01  # of the nodes
MEMORY = "1GiB"
LOWEST_POINTS = -0.5
LARGEST_ERROR = 0.2  # points, of a difference that is held against neighbour sampling
MOST_SEEDS = 250
STANDARD = ("hb", "hb_4", "hb_2")  # what is held against neighbour sampling
COLUMNS = (
    "model",
    "mini-batches from",
    "test accuracy, %",
    "minus NS, points",
    "steps",
    "edges kept, %",
    "seeds",
)


class Stores:
    """The stores of one data set, by how their hubs are ranked; packed when first asked for."""

    def __init__(self, workspace: Path, name: str, plan: Plan, data: Data) -> None:
        self._workspace, self._name, self._plan, self._data = workspace, name, plan, data
        self._open: dict[str, Any] = {}
        self._sliding: tuple[int, int] | None = None

    def store(self, hub_rank: str) -> Any:
        if hub_rank not in self._open:
            import featstore

            self._open[hub_rank] = featstore.pack(
                self._workspace / f"{self._name}-{hub_rank}.fs", {"x": self._data.x},
                graph=(self._data.indptr, self._data.indices), order="metis",
                partitions=self._plan.partitions, hubs=HUBS, hub_rank=hub_rank, overwrite=True,
            )  # fmt: skip
        return self._open[hub_rank]

    def loader(self, variant: Variant, seed: int) -> Any:
        resident = self._plan.partitions // variant.share
        if variant.sliding:
            count, replaced = self._sliding_sizes(resident)
            return self._loader(variant, seed, count, replaced)
        return self._loader(variant, seed, resident, None)

    def _loader(self, variant: Variant, seed: int, resident: int, replaced: int | None) -> Any:
        from featstore.loaders.mega.sets import PartitionSets

        return PartitionSets(
            self.store(variant.hub_rank), memory=MEMORY, train=self._data.train,
            hubs=None if variant.hubs else 0, resident=resident, replaced=replaced, seed=seed,
        )  # fmt: skip

    def _sliding_sizes(self, resident: int) -> tuple[int, int]:
        """How many partitions fit, a quarter of them replaced, into the memory of ``resident`` that all
        are."""
        if self._sliding is None:
            with self._loader(VARIANTS["hb"], 0, resident, None) as loader:
                limit_bytes = loader.memory()["planned"]
            for count in range(8 * resident // 5, 0, -1):  # 5/4 of it are as many slots as twice resident
                with self._loader(VARIANTS["hb"], 0, count, max(1, count // 4)) as loader:
                    planned_bytes = loader.memory()["planned"]
                if planned_bytes <= limit_bytes:
                    break
            self._sliding = count, max(1, count // 4)
        return self._sliding

    def close(self) -> None:
        for store in self._open.values():
            store.close()


@dataclass
class Facts:
    """What is noted while training: ``kept``, shares of the partitions' edges that are in memory, by
    mega-batch."""

    kept: list[float] = field(default_factory=list)


def evenly(seeds: int, batch_size: int) -> int:
    """The batch size next to ``batch_size`` that divides ``seeds`` evenly: else more mega-batches would mean
    more steps."""
    return max(1, -(-seeds // max(1, round(seeds / batch_size))))


def with_rows(sample: Any, x: Any) -> Any:
    """A mini-batch for :func:`train`: a sample of the whole graph and the rows of its nodes out of ``x``, a
    tensor."""
    import torch

    return of_rows(sample, x[torch.from_numpy(sample.node)])


def of_rows(sample: Any, rows: Any) -> Any:
    """The same, of the rows themselves."""
    from featstore.loaders.batch import Batch
    from featstore.loaders.mega.drawing import LocalSample

    local = LocalSample(
        sample.node, sample.row, sample.col, sample.num_sampled_nodes[0], sample.num_sampled_nodes,
        sample.num_sampled_edges, {}, None,
    )  # fmt: skip
    return Batch(0, sample.node, rows, local)


class Memory:
    """Mini-batches from the graph and the features in memory."""

    def __init__(self, data: Data, plan: Plan, seed: int) -> None:
        import torch

        from featstore.sampling.neighbors import NeighborSampler

        self._plan, self._seed, self._x = plan, seed, torch.from_numpy(data.x)
        self._sampler = NeighborSampler(data.indptr, data.indices, plan.fanouts, seed)

    def batches(self, nodes: NDArray[np.int64], turn: int) -> Iterator[Any]:
        """Of all ``nodes``, in a random order that ``turn`` tells."""
        order = np.random.default_rng([self._seed, turn]).permutation(nodes)
        size = evenly(len(order), self._plan.batch_size)
        for number, low in enumerate(range(0, len(order), size)):
            seeds = order[low : low + size]
            yield with_rows(self._sampler.sample(seeds, number, epoch=turn), self._x)


def from_memory(data: Data, plan: Plan, seed: int) -> Iterator[tuple[int, Iterator[Any]]]:
    """(passes over the training nodes, their mini-batches), again and again, sampled from the whole graph."""
    memory = Memory(data, plan, seed)
    for epoch in itertools.count():
        yield 1, memory.batches(data.train, epoch)


def from_store(
    loader: Any, data: Data, plan: Plan, variant: Variant, seed: int, facts: Facts
) -> Iterator[tuple[int, Iterator[Any]]]:
    """(passes over the training nodes, their mini-batches), again and again, sampled inside mega-batches."""
    memory, turns = Memory(data, plan, seed) if variant.whole else None, itertools.count()

    def batches() -> Iterator[Any]:
        for mega in loader:
            facts.kept.append(1.0 if variant.whole else mega.kept_share)
            if len(mega.seeds) == 0:
                continue
            if memory is None:
                size = evenly(len(mega.seeds), plan.batch_size)
                yield from drawn(loader.parts, mega, plan.fanouts, size, variant)
            else:
                for _ in range(variant.passes):
                    node = mega.rows["features"].node[mega.seeds].astype(np.int64)
                    yield from memory.batches(node, next(turns))

    while True:
        yield variant.passes, batches()


def drawn(
    parts: Any, mega: Any, fanouts: tuple[int, int], batch_size: int, variant: Variant
) -> Iterator[Any]:
    """The mini-batches of a mega-batch."""
    import torch

    from featstore.base.buffers import Outputs
    from featstore.loaders.batch import Batch
    from featstore.loaders.mega.drawing import Drawing, DrawOptions, Sampling
    from featstore.loaders.mega.options import DrawnWith

    options = DrawOptions(parts.fanouts(fanouts), batch_size, variant.weights)
    sampling = Sampling(mega, parts, "features", options, DrawnWith(parts))
    drawing = Drawing(sampling, options, {"features": Outputs(mega.rows["features"].x.nbytes, 2)})
    for pass_ in range(variant.passes):
        order = drawing.order(pass_)
        for number in range(drawing.per_pass):
            sample = drawing.sample(order, pass_, number)
            yield Batch(number, sample.node, torch.from_numpy(drawing.gather(sample)["features"]), sample)


def check(batch: Any, data: Data) -> None:
    """Raise ClickException unless a mini-batch has the rows of its nodes, and edges of the graph alone."""
    if not np.array_equal(batch.x.numpy(), data.x[batch.node]):
        raise click.ClickException("a mini-batch has wrong rows")
    nodes = len(data.x)
    # ascending, as the lists are
    edges = np.repeat(np.arange(nodes), np.diff(data.indptr)) * nodes + data.indices
    wanted = batch.node[batch.col] * nodes + batch.node[batch.row]
    if not np.array_equal(edges[np.minimum(np.searchsorted(edges, wanted), len(edges) - 1)], wanted):
        raise click.ClickException("a mini-batch has edges that are none of the graph")


def train(
    kind: str, plan: Plan, data: Data, epochs: Iterator[tuple[int, Iterator[Any]]], whole: Any, seed: int,
    hosts: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Train; what the best validation gave, and how it went. ``hosts``: processes of ``torch.distributed``,
    each with its own mini-batches, between which gradients are averaged."""
    import torch
    from mega_models import Edges, Net

    torch.manual_seed(seed)
    net = Net(kind, data.x.shape[1], plan.width, int(data.labels.max()) + 1)
    model: torch.nn.Module = net
    if hosts > 1:
        model = torch.nn.parallel.DistributedDataParallel(net)
        torch.manual_seed(seed * hosts + torch.distributed.get_rank())  # each drops out what it will
    optimiser = torch.optim.Adam(net.parameters(), lr=plan.learning_rate, weight_decay=plan.weight_decay)
    x, labels = torch.from_numpy(data.x), torch.from_numpy(data.labels)
    val, test = torch.from_numpy(data.val), torch.from_numpy(data.test)
    steps, seen, passed, curve, begin = 0, 0, 0, [], time.perf_counter()
    for passes, batches in epochs:
        net.train()
        for number, batch in enumerate(batches):
            if number == 0:
                check(batch, data)
            # of one, which few seeds in a mega-batch can give, BatchNorm has no variance
            if batch.batch_size < 2:
                continue
            (first, second), edges = np.cumsum(batch.num_sampled_nodes)[:2], batch.num_sampled_edges[0]
            weight = batch.sample.weight
            hops = [
                Edges(batch.row, batch.col, int(second), len(batch.node), weight),
                Edges(
                    batch.row[:edges],
                    batch.col[:edges],
                    int(first),
                    int(second),
                    None if weight is None else weight[:edges],
                ),
            ]
            left = 1 - seen / (plan.rounds * len(data.train))  # the learning rate falls linearly, as is usual
            optimiser.param_groups[0]["lr"] = plan.learning_rate * max(0.01, left)
            optimiser.zero_grad()
            found = model(batch.x, hops)
            torch.nn.functional.cross_entropy(found, labels[batch.node[: batch.batch_size]]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            steps, seen = steps + 1, seen + hosts * batch.batch_size
        passed += passes
        if passed % EVERY == 0:
            right = whole.classes(net, x) == labels
            curve.append([passed, float(right[val].float().mean()), float(right[test].float().mean())])
        if passed >= plan.rounds:
            break
    best = max(curve, key=lambda point: point[1])
    return {
        "test": best[2], "val": best[1], "best_round": best[0], "steps": steps,
        "seconds": round(time.perf_counter() - begin, 2),
        "curve": [[a, round(b, 4), round(c, 4)] for a, b, c in curve],
    }  # fmt: skip


def run(
    kind: str, plan: Plan, data: Data, stores: Stores, variant: Variant, whole: Any, seed: int
) -> dict[str, Any]:
    """One training run."""
    if variant.share == 0:
        return train(kind, plan, data, from_memory(data, plan, seed), whole, seed)
    with stores.loader(variant, seed) as loader:
        facts = Facts()
        result = train(kind, plan, data, from_store(loader, data, plan, variant, seed, facts), whole, seed)
        return result | {
            "kept_share": round(mean(facts.kept), 4), "planned_bytes": loader.memory()["planned"],
            "resident": loader.resident, "mega_batches": loader.steps,
        }  # fmt: skip


@dataclass
class AccuracyReport(Report):
    """A report that keeps every run, by set, model, variant and seed, so that an interrupted benchmark can go
    on. Of what is kept of earlier code, the first seed is trained again, and must learn the same."""

    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    unproven: set[str] = field(default_factory=set)  # first seeds of earlier code, to be trained again
    kept: int = 0  # runs of earlier code

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"runs": self.runs}

    def resume(
        self, out: Path, plans: Mapping[str, Plan], variants: Mapping[str, Any],
        trained_as: Callable[[Plan, Any], int],
    ) -> None:  # fmt: skip
        """Keep the runs of a results file that were trained as they would be now."""
        self.runs = runs_before(out, plans, variants, trained_as)
        if self.runs and json.loads(out.read_text())["commit"] != git_commit():
            self.unproven = {key for key in self.runs if key.endswith("|0")}
            self.kept = len(self.runs)

    def lacks(self, key: str) -> bool:
        """Whether a run is still to be trained."""
        return key not in self.runs or key in self.unproven

    def keep(self, key: str, run: dict[str, Any], out: Path | None) -> None:
        """Add a run, and write all there are to ``out``. Raises ClickException where it is not what the same
        one was before."""
        if key in self.unproven and run["curve"] != self.runs[key]["curve"]:
            raise click.ClickException(
                f"{key} learned otherwise before, {self.runs[key]['curve']}, than now, {run['curve']}: what "
                "was kept is of other code; run without --resume"
            )
        self.unproven.discard(key)
        if self.unproven:  # the file stays what it is until all of it has been proven
            out = None
        self.runs[key] = run
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def save(self, out: Path | None, quick: bool = False) -> None:
        if self.unproven:
            raise click.ClickException(
                f"kept runs of earlier code are not proven: {', '.join(sorted(self.unproven))}; run all sets"
            )
        if self.kept:
            self.notes.append(
                f"{self.kept} runs are kept from an earlier commit; the first seed of each line was trained "
                "again at this one, and learned the same, to the last bit."
            )
        super().save(out, quick)


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """In points: mean and standard error (0 of a single one)."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return 100 * mean(values), 100 * error


def found(report: AccuracyReport, name: str, kind: str, variant: str) -> list[dict[str, Any]]:
    prefix = f"{name}|{kind}|{variant}|"
    return [run for key, run in report.runs.items() if key.startswith(prefix)]


def difference(
    report: AccuracyReport, name: str, kind: str, variant: str, base: str
) -> tuple[float, float] | None:
    """Points of test accuracy and their standard error; None where either has not been measured."""
    one, other = found(report, name, kind, variant), found(report, name, kind, base)
    if not one or not other:
        return None
    (a, error_a), (b, error_b) = (
        mean_and_error([r["test"] for r in one]),
        mean_and_error([r["test"] for r in other]),
    )
    return a - b, math.hypot(error_a, error_b)


def more_seeds(
    report: AccuracyReport, name: str, kind: str, variants: Sequence[str], base: str
) -> Iterator[tuple[str, int]]:
    """(variant, seed) of runs to be trained, one after the other, until no difference of ``variants`` to
    ``base`` has an error above LARGEST_ERROR. Which they are depends on results, but on errors alone."""
    for variant in variants:
        while (against := difference(report, name, kind, variant, base)) and against[1] > LARGEST_ERROR:
            lines = [[run["test"] for run in found(report, name, kind, key)] for key in (variant, base)]
            short = max((0, 1), key=lambda one: mean_and_error(lines[one])[1])
            seed = len(lines[short])
            if seed >= MOST_SEEDS:
                raise click.ClickException(f"{name} {kind} {variant}: {seed} seeds, error {against[1]:.2f}")
            yield (variant, base)[short], seed


def fill(report: AccuracyReport, names: tuple[str, ...]) -> None:
    """Claims and tables from the runs so far."""
    from mega_models import MODELS

    report.claims, report.tables = [], []
    worst: tuple[float, str] = (math.inf, "")
    for name in names:
        rows = []
        for kind in MODELS:
            for key, variant in VARIANTS.items():
                rows += [r] if (r := row_of(report, name, kind, key, variant)) else []
            for key in STANDARD:
                against = difference(report, name, kind, key, "ns")
                if against is not None:
                    text = (
                        f"{PLANS[name].title}, {kind}, {VARIANTS[key].title}: minus neighbour sampling (± "
                        f"{against[1]:.2f})"
                    )
                    report.claims.append(Claim(text, round(against[0], 3), LOWEST_POINTS, ">=", "points"))
            without = difference(report, name, kind, "hb_no_hubs", "hb")
            if without is not None:
                worst = min(worst, (without[0], f"{PLANS[name].title}, {kind}, ± {without[1]:.2f}"))
        if rows:
            report.table(PLANS[name].title, COLUMNS, rows)
    if worst[1]:
        text = f"without hubs minus with them, where it costs most ({worst[1]})"
        report.claims.append(Claim(text, round(worst[0], 3), LOWEST_POINTS, "<=", "points"))


def row_of(report: AccuracyReport, name: str, kind: str, key: str, variant: Variant) -> list[Any] | None:
    runs = found(report, name, kind, key)
    if not runs:
        return None
    value, error = mean_and_error([r["test"] for r in runs])
    against = difference(report, name, kind, key, "ns")
    kept = [r["kept_share"] for r in runs if "kept_share" in r]
    minus = "" if key == "ns" or against is None else f"{against[0]:+.2f} ± {against[1]:.2f}"
    return [
        kind, variant.title, f"{value:.2f} ± {error:.2f}", minus, round(mean(r["steps"] for r in runs)),
        f"{100 * mean(kept):.0f}" if kept else "100", len(runs),
    ]  # fmt: skip


def cells(plan: Plan, seeds: int) -> list[tuple[str, str, int]]:
    """(model, variant, seed) of a plan, seed by seed, so that what is interrupted has all with fewer
    seeds."""
    from mega_models import MODELS

    kinds = [(kind, key) for kind in MODELS for key in plan.variants_of_all]
    kinds += [("SAGE", key) for key in plan.variants_of_sage if key not in plan.variants_of_all]
    return [(kind, key, seed) for seed in range(seeds) for kind, key in kinds]


def measure(
    report: AccuracyReport, name: str, folder: Path, settings: Settings, plan: Plan, out: Path | None,
    seeds: int,
) -> None:  # fmt: skip
    """All runs of a data set that are not there yet: so many seeds, and where they are several, as many more
    as errors ask for. The file is written after each."""
    from mega_models import MODELS, WholeGraph

    data = load(folder, plan)
    stores = Stores(settings.workspace, name, plan, data)
    wholes: dict[str, Any] = {}

    def fulfil(kind: str, key: str, seed: int) -> None:
        if not report.lacks(f"{name}|{kind}|{key}|{seed}"):
            return
        if kind not in wholes:
            wholes[kind] = WholeGraph(kind, data.indptr, data.indices, plan.fanouts[0])
        result = run(kind, plan, data, stores, VARIANTS[key], wholes[kind], seed)
        result["trained_as"] = trained_as(plan, VARIANTS[key])
        report.keep(f"{name}|{kind}|{key}|{seed}", result, out)
        note(f"{name} {kind} {key} seed {seed}: {result['test']:.4f} in {result['seconds']:.1f} s")

    try:
        for kind, key, seed in cells(plan, seeds):
            fulfil(kind, key, seed)
        for kind in () if seeds == 1 or settings.quick else MODELS:
            for key, seed in more_seeds(report, name, kind, STANDARD, "ns"):
                fulfil(kind, key, seed)
    finally:
        stores.close()


def runs_before(
    out: Path, plans: Mapping[str, Plan], variants: Mapping[str, Any], trained_as: Callable[[Plan, Any], int]
) -> dict[str, dict[str, Any]]:
    """The runs of a results file that were trained as they would be now."""
    before: dict[str, dict[str, Any]] = json.loads(out.read_text())["runs"] if out.exists() else {}
    kept = {}
    for key, run_before in before.items():
        name, _, variant, _ = key.split("|")
        known = name in plans and variant in variants
        if known and run_before["trained_as"] == trained_as(plans[name], variants[variant]):
            kept[key] = run_before
    return kept


data_option = click.option("--data", "folder", required=True, help="The folder of the data sets.",
                           type=click.Path(path_type=Path, file_okay=False, exists=True))  # fmt: skip
resume_option = click.option(
    "--resume",
    is_flag=True,
    help="Keep the runs of the results file that were trained alike; the first of each must learn the same.",
)


@click.command()
@data_option
@click.option("--sets", "names", multiple=True, type=click.Choice(list(PLANS)), help="[default: all of them]")
@resume_option
@shared_options(size="1", quick_size="1", rounds=5)
def main(settings: Settings, folder: Path, names: tuple[str, ...], resume: bool) -> None:
    """Accuracy of training by mega-batches. A round is a seed; --size means nothing here."""
    import torch
    from mega_models import check_attention

    torch.set_num_threads(1)
    check_attention()
    names = names or (("cora",) if settings.quick else tuple(PLANS))
    out = settings.out or (None if settings.quick else RESULTS / "mega_accuracy.json")
    report = AccuracyReport("mega_accuracy", "Accuracy of training by mega-batches", {
        "seeds": settings.rounds, "hubs": HUBS, "evaluated_every_passes": EVERY,
        "plans": {n: asdict(p) for n, p in PLANS.items()},
        "variants": {n: asdict(v) for n, v in VARIANTS.items()},
    }, settings.workspace)  # fmt: skip
    if resume and out is not None:
        report.resume(out, PLANS, VARIANTS, trained_as)
    plans = {n: replace(PLANS[n], rounds=2 * EVERY) if settings.quick else PLANS[n] for n in names}
    for seeds in (1, settings.rounds):  # the first ones prove what was kept
        for name, plan in plans.items():
            measure(report, name, folder, settings, plan, out, seeds)
    report.notes = [
        "Test accuracy (micro F1) at the best validation, mean and standard error over the seeds. "
        "Graph and rows of neighbour sampling, and the evaluation, are in memory.",
        "Mega-batches hold an eighth of METIS's partitions, and 1 % of the nodes as hubs, and are gone "
        "through twice, unless said otherwise. Edges kept: of those into a mega-batch's partitions.",
        "The features of arxiv are another model's guesses of the class, which alone give 73.5 %; "
        "hiding them makes neighbours matter.",
    ]
    fill(report, tuple(PLANS))
    report.save(out, settings.quick)


if __name__ == "__main__":
    main()
