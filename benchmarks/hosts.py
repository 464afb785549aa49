"""Training on several hosts, and what of other hosts' rows each keeps.

    python benchmarks/hosts.py --dir /a/directory/on/the/ssd
    python benchmarks/hosts.py --dir /a/directory/on/the/ssd --graph ogbn_arxiv_tape40.npz
    python benchmarks/hosts.py --dir /a/directory/on/the/ssd --namespaces   # takes root
    python benchmarks/hosts.py --dir /a/directory/on/the/ssd --training     # on a machine of many cores

Processes of this machine stand for hosts, each with a part of the store, a memory of its own, and lines to
the others over loopback: bare, and with the latency and bandwidth of a slow network, which the sender adds.
With ``--namespaces`` each is in a network namespace of its own, and the kernel's token bucket (tbf) bounds
all that it sends, gradients included; the latency is still the sender's.

*Kept rows.* Mini-batches are recorded, and for each host it is counted which rows of others it would ask
for: with no buffer (each mini-batch's remote rows are fetched, as DistDGL does), with MassiveGNN's buffer
without eviction, at the best of the paper's grid of delta and gamma, looking ahead (``halo=`` as a size), and
with Belady's MIN, which knows all the future. All at the same bytes a host: with two ranks a host,
MassiveGNN has a buffer for each, of half the size. In MassiveGNN's way a rank asks by itself; ranks that
share a loader ask for a row once a step.

*Training.* The same, run: GraphSAGE with DistributedDataParallel, whose gradients no sender slows down. Rows
of other hosts come beside the training, or in the loop, when it comes to the mini-batch, which is DistDGL's
way; and from copies of the halo. "waits" is how long the loop had no mini-batch. The model takes so
long on one core that a gigabit a second is not what binds; a tenth of it stands for a model that is ten times
as fast, a fortieth for one of forty times. ``--training`` does this alone, the exchange, and the costs of an
id: where each host has cores of its own, as hosts do.
"""

from __future__ import annotations

import os
import statistics
import time
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
from graphs import generate, of_file
from harness import Claim, Report, Settings, note, shared_options
from hosts_kept import (
    COLUMNS,
    DELTAS,
    FANOUTS,
    GAMMAS,
    Kept,
    Recorded,
    kept,
    kept_by_share,
    record,
    seconds_of_ahead,
)
from hosts_training import EPOCHS, SHARE, run_hosts, train_all, train_with_copies

import featstore
from featstore.hosts.massivegnn import HaloScores
from featstore.hosts.owners import Owners

EXCHANGED = 10_000  # rows
_WIRE = 125e6  # bytes a second: 1 Gbit/s


def lookup_nanoseconds(one: Recorded, narrow: featstore.Store, rounds: int = 5) -> dict[str, float]:
    """Of an id, the median of some rounds after the first: finding its owner; MassiveGNN's lookup and scores;
    looking ahead alone, and with finding rows that stay, and choosing which do. Ids of a mini-batch are in no
    order."""
    rng, nodes = np.random.default_rng(0), narrow.table("features").rows
    stream = [rng.permutation(wanted) for wanted in one.streams[0]]
    owners = Owners("features", (np.arange(nodes) % 2).astype(np.uint8), 0, 2)

    def find() -> tuple[float, int]:
        begin = time.perf_counter()
        for wanted in stream:
            owners.own_and_others(wanted)
        return time.perf_counter() - begin, sum(map(len, stream))

    def score() -> tuple[float, int]:
        scores = HaloScores(one.halo, nodes, SHARE, 0.995, 64)
        begin = time.perf_counter()
        for wanted in stream:
            scores.score(*scores.look(wanted))
        return time.perf_counter() - begin, sum(map(len, stream))

    spent: dict[str, list[float]] = {}

    def note_spent(what: str, seconds: float, ids: int) -> None:
        spent.setdefault(what, []).append(seconds / ids * 1e9)

    for _ in range(rounds + 1):
        note_spent("finding its owner", *find())
        note_spent("MassiveGNN's lookup and scores", *score())
        looked, seconds, ids = seconds_of_ahead(one, narrow, one.slots(SHARE), rng)
        note_spent("looking ahead", looked, ids)
        note_spent("looking ahead, finding rows that stay, and choosing", seconds, ids)
    return {what: statistics.median(some[1:]) for what, some in spent.items()}


@click.command()
@click.option("--graph", type=click.Path(exists=True, path_type=Path), help="A real graph, .npz.")
@click.option("--namespaces", "shaped", is_flag=True, help="A network namespace a host; takes root.")
@click.option(
    "--training",
    "only_training",
    is_flag=True,
    help="Only what trains, the exchange, and the costs of an id.",
)
@shared_options("128MiB", "16MiB", rounds=1)
def main(settings: Settings, graph: Path | None, shaped: bool, only_training: bool) -> None:
    workspace, quick = settings.workspace, settings.quick
    nodes = settings.size_bytes // (4 * COLUMNS)
    if graph is None:
        files = generate(workspace / f"hosts-{nodes}", nodes, 12 * nodes, COLUMNS)
    else:
        files = of_file(workspace / f"hosts-{graph.stem}", graph, COLUMNS, train_share=0.5)
    nodes, batch, epochs = files.nodes, 100 if quick else 500, 2 if quick else 8
    arrays = {"train": files.load("train"), "label": files.load("labels")}
    store = featstore.pack(
        workspace / "hosts.fs", files.path("features"), graph=(files.load("indptr"), files.load("indices")),
        arrays=arrays, memory="4GiB", partitions=256 if not quick else 32, overwrite=True,
    )  # fmt: skip
    named = [("_real", graph is not None), ("_namespaces", shaped), ("_training", only_training)]
    report = Report(
        "hosts" + "".join(name for name, given in named if given),
        "Several hosts" + (", a namespace each" if shaped else "") + (f": {graph.stem}" if graph else ""),
        {"nodes": nodes, "edges": 12 * nodes, "row_bytes": 4 * COLUMNS, "fanouts": FANOUTS, "batch": batch,
         "recorded_epochs": epochs, "trained_epochs": EPOCHS, "namespaces": shaped}
        | ({"machine_cores": os.cpu_count()} if only_training else {}),
        workspace,
    )  # fmt: skip
    found: dict[tuple[int, int, float], Kept] = {}
    splits: dict[int, Path] = {}
    short: dict[tuple[int, int], Any] = {}  # as long as is trained
    best: dict[tuple[int, int], Kept] = {}
    for hosts, ranks in product((2,) if quick else (2, 4, 8), (1, 2)):
        if hosts not in splits:
            splits[hosts] = workspace / f"hosts-{hosts}.parts"
            begin = time.perf_counter()
            featstore.split(store, hosts, splits[hosts], train="train", memory="2GiB", overwrite=True)
            note(f"split by {hosts} in {time.perf_counter() - begin:.1f} s")
        key = hosts, ranks
        if not only_training:
            recorded = record(store, splits[hosts], hosts, ranks, batch // ranks, epochs)
            for share, one in kept_by_share(recorded, store.path).items():
                found[(*key, share)] = one
                shares = f"{one.share('best'):.3f} {one.share('ahead'):.3f}"
                note(f"{hosts} hosts, {ranks} ranks, {share}: {shares}")
        short[key] = record(store, splits[hosts], hosts, ranks, batch // ranks, EPOCHS)
        best[key] = kept(short[key], store, SHARE)
    if not only_training:
        _kept_tables(report, found)
    train_all(report, settings, splits, short, best, nodes, batch, shaped)
    train_with_copies(report, settings, store, splits[2], batch, shaped)
    _exchange(report, workspace, splits[2], quick)
    if shaped:
        _exchange_over_wire(report, workspace, splits[2], quick)
    narrow = featstore.pack(
        workspace / "hosts-narrow.fs", np.zeros((nodes, 1), np.float32), order="given", overwrite=True
    )
    for what, spent in lookup_nanoseconds(short[2, 1][0], narrow).items():
        report.claims.append(Claim(f"nanoseconds of an id: {what}", spent, 40, "<="))
    report.notes.append(
        "All hosts are processes of one machine, which share its cores. Each reads its own rows through "
        "mappings, from the page cache: as in the paper, they are in memory, and no disk binds."
    )
    narrow.close()
    store.close()
    report.save(settings.out, quick)


def _kept_tables(report: Report, found: dict[tuple[int, int, float], Kept]) -> None:
    report.table(
        "Rows asked of other hosts, over those without a buffer",
        ["hosts", "ranks each", "of the halo", "MassiveGNN, no eviction", "MassiveGNN, best of its grid",
         "its delta, gamma", "looking ahead", "over MassiveGNN", "MIN", "MIN over MassiveGNN"],
        [[h, r, f"{f:.0%}", k.share("no eviction"), k.share("best"),
          f"{k.best_of[0]}, {k.best_of[1]}" if k.evicts else "any that never evicts", k.share("ahead"),
          k.share("ahead") / k.share("best"), k.share("least"), k.share("least") / k.share("best")]
         for (h, r, f), k in found.items()],
    )  # fmt: skip
    one = found[2, 1, SHARE]
    steps = len(one.counts["best"])
    report.table(
        f"MassiveGNN's grid: two hosts of a rank, {SHARE:.0%} of the halo, {steps} mini-batches; rows over "
        "those without a buffer",
        ["delta", *(f"gamma {gamma}" for gamma in GAMMAS)],
        [[str(delta), *(one.grid[delta, gamma] for gamma in GAMMAS)] for delta in DELTAS],
    )
    names = {"MassiveGNN, no eviction": "no eviction", "MassiveGNN, best of its grid": "best",
             "looking ahead": "ahead", "MIN": "least"}  # fmt: skip
    report.table(
        f"Hit rate by tenths of the mini-batches: two hosts of a rank, {SHARE:.0%} of the halo",
        ["kept", *(f"{tenth}." for tenth in range(1, 11))],
        [[name, *one.hit_rates(key)] for name, key in names.items()],
    )
    idle = sum(not k.evicts for k in found.values())
    report.notes.append(
        f"In {idle} of {len(found)} cells the best of MassiveGNN's grid is one that never evicts within "
        f"these mini-batches ({steps} a rank of two hosts): it asks for what no eviction asks for. What "
        f"trains ({EPOCHS} epochs) has the best of the grid for as many mini-batches."
    )
    for ranks in (1, 2):
        of = [k.share("ahead") / k.share("best") for (_, r, _), k in found.items() if r == ranks]
        text = f"rows asked of other hosts, over MassiveGNN at its best, {ranks} ranks a host (median)"
        report.claims.append(Claim(text, statistics.median(of), 0.75, "<="))


_EXCHANGE = (
    f"{EXCHANGED:,} rows of {4 * COLUMNS} B either way, over a bare all_to_all_single of the same bytes"
)


def _exchanged(told: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of an exchange, by what was exchanged how: medians of the rounds after the first three."""
    rounds = told["exchange"][3:]
    return {name: 1000 * statistics.median(one[name] for one in rounds) for name in rounds[0]}


def _exchange_over_wire(report: Report, workspace: Path, parts: Path, quick: bool) -> None:
    """The same where a line binds, which shapes the bare collective as well."""
    took = _exchanged(
        run_hosts(
            workspace, parts, 2, exchange=EXCHANGED, rounds=10 if quick else 60, slow=(0.0, _WIRE),
            shaped=True, serving="512MiB",
        )[0]
    )  # fmt: skip
    report.claims.append(Claim(f"{_EXCHANGE}, 1 Gbit/s", took["ours"] / took["bare"], 1.3, "<="))
    report.notes.append(
        f"Over 1 Gbit/s the exchange took {took['ours']:.1f} ms, the bare one {took['bare']:.1f}; the bytes "
        f"alone, at the line's rate, {1000 * EXCHANGED * 4 * COLUMNS / _WIRE:.1f}."
    )


def _exchange(report: Report, workspace: Path, parts: Path, quick: bool) -> None:
    told = run_hosts(
        workspace, parts, 2, exchange=EXCHANGED, rounds=10 if quick else 60, slow=None, serving="512MiB"
    )[0]
    stages, took = told["stages"], _exchanged(told)
    report.claims.append(Claim(_EXCHANGE, took["ours"] / took["bare"], 1.3, "<="))
    alike = took["bare"] + took["gather"] + took["put"]
    text = "the same, over that collective with torch's index_select before it and index_copy_ after it"
    report.claims.append(Claim(text, took["ours"] / alike, 1.3, "<="))
    least = took["bare, cpu"] + took["gather, cpu"] + took["put, cpu"]
    text = "the same, a host's core: its time with rows gathered and put in their places, over the bare time"
    report.claims.append(Claim(text, least / took["bare"]))
    report.table(
        "That exchange, by stages, in ms: of one host, which asks and is asked at the same time",
        ["stage", "ms"], [[name, 1000 * spent] for name, spent in stages.items()],
    )  # fmt: skip
    report.notes.append(
        f"Over loopback that exchange took {took['ours']:.1f} ms ({took['ours, cpu']:.1f} of them a host's "
        f"core), the bare one {took['bare']:.1f} ({took['bare, cpu']:.1f}), whose rows nobody has gathered "
        f"before, checked, or put in their places after: torch gathers so many within "
        f"{took['gather, cpu']:.1f} ms of a core, and puts them in their places within "
        f"{took['put, cpu']:.1f}. Rows were served from memory, and put into memory that was there before."
    )


if __name__ == "__main__":
    main()
