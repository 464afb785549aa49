"""Is ``featstore tune``'s choice the best? A brute-force sweep over the same space, each configuration
measured for real.

    python benchmarks/tune.py --dir /a/directory/on/the/ssd

A generated graph, neighbours sampled from it in memory, rows through an online loader in a quarter of the
table's size or so. Two workloads: GraphSAGE on the cores that sample and read, too, and a step that takes its
time elsewhere, as on an accelerator. For each, ``tune`` chooses first; then every combination of sampler
workers, training threads, engine and queue depth trains for a short piece of an epoch, in rounds, one loader
and so one warm buffer for each way of reading. Every piece is of an epoch of its own, so that no
configuration finds rows in the buffer because another has just trained on the same mini-batches.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from itertools import product
from typing import Any

import click
import numpy as np
from graphs import GraphFiles, generate
from harness import Claim, Contender, Report, Sample, Settings, measure_rounds, note, shared_options
from harness import paired_ratio as ratio

import featstore
from featstore.base.system import available_cores
from featstore.engine import choose
from featstore.loaders.online.loader import OnlineLoader
from featstore.sampling.batches import open_sampler
from featstore.tune.allocation import Choice, Reading
from featstore.tune.profiling import MakeBatches, Switch, TrainStep, set_threads, threads_restored
from featstore.tune.tuning import Tuning, tune
from featstore.tune.workload import neighbour_batches, stand_in
from featstore.units import format_bytes, parse_bytes

COLUMNS = 128
EDGES_A_NODE = 15
FANOUTS = (10, 5)
BATCH = 256
DEPTHS = (128, 32)
BAR = 1.10
MEASURE_SECONDS = 0.8
SKIPPED = 3  # mini-batches of each piece before its pace is steady, and two for each worker


def packed(files: GraphFiles, path: Any) -> featstore.Store:
    if not (path / "featstore.json").exists():
        note("packing")
        graph = files.load("indptr", mapped=True), files.load("indices", mapped=True)
        featstore.pack(path, files.path("features"), graph=graph, order="ldg", memory="1GiB").close()
    return featstore.open(path)


def space(cores: int) -> list[Choice]:
    """All that is swept."""
    engines = [choose("auto").name, *(["threads"] if choose("auto").name != "threads" else [])]
    readings = [Reading(engine, depth) for engine, depth in product(engines, DEPTHS)]
    workers, threads = [0, *counts(cores)], counts(cores)
    return [Choice(*one) for one in product(workers, threads, readings)]


def counts(cores: int) -> list[int]:
    """Powers of two up to the number of cores."""
    return [1 << k for k in range(cores.bit_length())]


def name_of(choice: Choice) -> str:
    reading = choice.reading
    more = f", {reading.extracted} mini-batches" if reading.extracted else ""
    more += f", reader {format_bytes(reading.reader_bytes)}" if reading.reader_bytes else ""
    return (
        f"{choice.workers} workers, {choice.train_threads} threads, {reading.engine} "
        f"{reading.queue_depth}{more}"
    )


def check(loader: Any, files: GraphFiles) -> None:
    """The rows of one mini-batch are those of the source."""
    features = files.load("features", mapped=True)
    with closing(iter(loader)) as walk:
        batch = next(walk)
        ids = np.asarray(batch.n_id)
        if not np.array_equal(np.asarray(batch.x), features[ids]):
            raise click.ClickException("the loader handed out rows that are not those of the source")


def piece(
    loader: Any, switch: Switch, batches: Any, choice: Choice, step: TrainStep, seconds: float
) -> Sample:
    """Train for so long with a choice."""
    switch.now = batches
    set_threads(choice.train_threads)
    trained, spent = 0, 0.0
    while spent < seconds:
        counted, begin = 0, time.perf_counter()
        with closing(iter(loader)) as walk:
            for number, batch in enumerate(walk):
                step(batch)
                del batch
                if number < SKIPPED + 2 * choice.workers:
                    begin = time.perf_counter()
                    continue
                counted += 1
                if spent + time.perf_counter() - begin >= seconds:
                    break
            passed = time.perf_counter() - begin
        if counted == 0:
            raise click.ClickException("an epoch has too few mini-batches; give a larger --size")
        trained, spent = trained + counted, spent + passed
    return Sample(trained, spent)


def sweep(
    store: featstore.Store,
    make: MakeBatches,
    step: TrainStep,
    choices: list[Choice],
    memory: int,
    files: GraphFiles,
    settings: Settings,
) -> dict[str, Any]:
    """Series by name of each choice, of mini-batches a second."""
    made: dict[int, Any] = {}
    seconds = 0.2 if settings.quick else MEASURE_SECONDS
    with ExitStack() as stack, threads_restored():
        loaders: dict[Reading, tuple[Any, Switch]] = {}
        for choice in choices:
            made.setdefault(choice.workers, make(choice.workers))
            if choice.reading in loaders:
                continue
            reading, switch = choice.reading, Switch(make(0))
            given = {} if reading.extracted is None else {"extracted": reading.extracted}
            given |= {} if reading.reader_bytes is None else {"reader_memory": reading.reader_bytes}
            loader = OnlineLoader(
                store, switch, memory=memory, engine=reading.engine, queue_depth=reading.queue_depth, **given
            )
            loaders[reading] = stack.enter_context(loader), switch
            check(loader, files)
            for _ in range(2):  # warms the buffer
                piece(loader, switch, made[0], Choice(0, 1, reading), lambda batch: None, seconds)

        def run(choice: Choice) -> Sample:
            return piece(*loaders[choice.reading], made[choice.workers], choice, step, seconds)

        contenders = [
            Contender(name_of(c), "mini-batches/s", "direct I/O, warm buffer", lambda _, c=c: run(c))
            for c in choices
        ]
        return measure_rounds(contenders, settings.rounds)


def tell(report: Report, title: str, series: dict[str, Any], tuning: Tuning, choices: list[Choice]) -> None:
    """A claim and a table."""
    chosen = series[name_of(tuning.choice)]
    order = sorted(series.values(), key=lambda one: -one.rate)
    default = next(series[name_of(c)] for c in choices if c == tuning.before.choice)
    report.claims += [
        Claim(
            f"{title}: a mini-batch by tune's choice over the best of the sweep",
            ratio(order[0], chosen),
            BAR,
            "<=",
        ),
        Claim(f"{title}: speed by tune's choice over that without options", ratio(chosen, default)),
        Claim(f"{title}: the best of the sweep over its worst", ratio(order[0], order[-1])),
        Claim(
            f"{title}: the model's forecast over measured, tune's choice", tuning.after.seconds * chosen.rate
        ),
    ]
    notes = {chosen.name: "tune's choice", default.name: "without options"}
    report.table(
        f"{title}: the sweep, {len(choices)} configurations",
        ["", "mini-batches/s", "of the best", ""],
        [[one.name, round(one.rate, 2), one.rate / order[0].rate, notes.get(one.name, "")] for one in order],
    )


@click.command()
@click.option("--memory", help="Budget of the loader. [default: a quarter of the table, at least 64MiB]")
@click.option("--step-ms", default=15.0, show_default=True, help="What the step takes that runs elsewhere.")
@shared_options(size="256MiB", quick_size="64MiB", rounds=3)
def main(settings: Settings, memory: str | None, step_ms: float) -> None:
    """tune's choice against the best of a brute-force sweep."""
    nodes = settings.size_bytes // (4 * COLUMNS)
    files = generate(settings.workspace / f"graph-{nodes}", nodes, nodes * EDGES_A_NODE, COLUMNS)
    given = parse_bytes(memory) if memory else max(64 * 2**20, settings.size_bytes // 4)
    cores = available_cores()
    choices = space(cores)
    steps: dict[str, TrainStep] = {
        "GraphSAGE on the same cores": stand_in(COLUMNS, FANOUTS),
        f"a step of {step_ms:g} ms elsewhere": lambda batch: time.sleep(step_ms / 1000),
    }
    with packed(files, settings.workspace / f"tune-{nodes}.store") as store:
        report = Report("tune", "Tuning against a brute-force sweep", {
            "nodes": nodes, "edges": store.graphs["features"].edges, "row_bytes": 4 * COLUMNS,
            "memory": format_bytes(given), "fanouts": list(FANOUTS), "batch_size": BATCH, "cores": cores,
            "rounds": settings.rounds, "configurations": len(choices),
        }, settings.workspace)  # fmt: skip
        sampler = open_sampler(store, FANOUTS, in_memory=True)
        for title, step in steps.items():
            make = neighbour_batches(sampler, files.load("train"), BATCH)
            begin = time.perf_counter()
            tuning = tune(
                store, make, step, memory=given, cores=cores, workers=sorted({c.workers for c in choices}),
                seconds=3.0 if settings.quick else 20.0,
                engines=list(dict.fromkeys(c.reading.engine for c in choices)), queue_depths=DEPTHS,
            )  # fmt: skip
            note(f"{title}: tune chose {name_of(tuning.choice)} in {time.perf_counter() - begin:.0f} s")
            swept = choices + [c for c in (tuning.choice, tuning.before.choice) if c not in choices]
            series = sweep(store, make, step, list(dict.fromkeys(swept)), given, files, settings)
            tell(report, title, series, tuning, list(dict.fromkeys(swept)))
            for one in series.values():
                one.name = f"{title}: {one.name}"
            report.series += series.values()
    report.notes = [
        "Each configuration trains for a little less than a second in each round, after the first "
        "mini-batches of the piece; ratios are medians of ratios within rounds. The best of the sweep "
        "is picked by the same figures, so a part of its lead is luck.",
    ]
    report.save(settings.out, settings.quick)


if __name__ == "__main__":
    main()
