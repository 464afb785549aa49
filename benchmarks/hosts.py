"""Training on several hosts, and what of other hosts' rows each keeps.

    python benchmarks/hosts.py --dir /a/directory/on/the/ssd
    python benchmarks/hosts.py --dir /a/directory/on/the/ssd --graph ogbn_arxiv_tape40.npz
    python benchmarks/hosts.py --dir /a/directory/on/the/ssd --namespaces   # takes root

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
of other hosts come beside the training; "waits" is how long the loop had no mini-batch. The model takes so
long on one core that a gigabit a second is not what binds; a tenth of it stands for a model that is ten times
as fast.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from graphs import generate, of_file
from harness import HERE, Claim, Report, Settings, note, shared_options
from network import INTERFACE, namespaces
from numpy.typing import NDArray

import featstore
from featstore.hosts.ahead import Ahead
from featstore.hosts.massivegnn import Halo, HaloScores
from featstore.hosts.owners import Owners
from featstore.sampling.batches import RankedBatches, open_sampler
from featstore.testing import ArraySource

FANOUTS = (10, 5)
SHARES = (0.15, 0.25, 0.5)
DELTAS, GAMMAS = (16, 32, 64, 128, 512, 1024), (0.95, 0.995, 0.9995)
NEVER = 2**20  # mini-batches from one replacement to the next: there is none
#: Seconds of latency, and bytes a second out of each host.
SLOWEST = (0.001, 12.5e6)
NETWORKS = {
    "loopback": None, "0.1 ms, 1 Gbit/s": (0.0001, 125e6), "1 ms, 1 Gbit/s": (0.001, 125e6),
    "1 ms, 100 Mbit/s": SLOWEST,
}  # fmt: skip
COLUMNS = 128
EXCHANGED = 10_000  # rows


class Recorded(NamedTuple):
    """Of a host: its halo, and of each rank the remote rows of each mini-batch, ascending."""

    halo: Halo
    streams: list[list[NDArray[np.int64]]]

    @property
    def asked(self) -> int:
        return sum(len(one) for stream in self.streams for one in stream)


def record(
    store: featstore.Store, parts: Path, hosts: int, ranks: int, batch: int, epochs: int
) -> list[Recorded]:
    """What each host's mini-batches want of others."""
    with featstore.open(parts / "topology") as topology, topology.reader(memory="256MiB") as reader:
        owner = reader.read(np.arange(topology.table("features").rows))
    degrees = np.diff(store.graphs["features"].csc()[0])
    sampler = open_sampler(store, FANOUTS, memory="4GiB", in_memory=True)
    made = []
    for host in range(hosts):
        with featstore.open(parts / f"host-{host}") as part:
            ids = part.arrays["features.halo_ids"].astype(np.int64)
        own = range(host * ranks, (host + 1) * ranks)
        batches = RankedBatches(
            sampler, store.arrays["train"], batch, ranks=tuple(own), world_size=hosts * ranks, owner=owner,
            hosts=hosts,
        )  # fmt: skip
        streams: list[list[NDArray[np.int64]]] = [[] for _ in own]
        for epoch in range(epochs):
            batches.set_epoch(epoch)
            for index in range(len(batches)):
                nodes = batches[index].node
                streams[index % ranks].append(np.sort(nodes[owner[nodes] != host]))
        made.append(Recorded(Halo(ids, degrees[ids]), streams))
    return made


def of_massivegnn(one: Recorded, nodes: int, share: float, gamma: float, delta: int) -> int:
    """Rows that a host asks for: a buffer for each rank, together of so large a share of the halo."""
    asked = 0
    for stream in one.streams:
        scores = HaloScores(one.halo, nodes, share / len(one.streams), gamma, delta)
        asked += scores.slots
        for wanted in stream:
            in_halo, found = scores.look(wanted)
            _, coming = scores.score(in_halo, found)
            extra = np.setdiff1d(one.halo.ids[coming], wanted[found < 0], assume_unique=True)
            asked += int((found < 0).sum()) + len(extra)
    return asked


def steps_of(one: Recorded) -> list[NDArray[np.int64]]:
    """What all ranks of a host want in each step."""
    return [np.unique(np.concatenate(step)) for step in zip(*one.streams, strict=True)]


def of_ahead(one: Recorded, store: featstore.Store, slots: int) -> tuple[int, float]:
    """Rows that a host asks for which looks ahead, in as many bytes as MassiveGNN takes for so many rows; and
    the seconds that it takes to know what is wanted when, and to choose what stays."""
    steps, table = steps_of(one), store.table("features")
    memory = slots * table.row_bytes + HaloScores.bytes_for(table.rows, len(one.halo.ids), slots)
    ahead = Ahead(table, memory)
    disk = ArraySource(store, {"features": np.zeros((table.rows, COLUMNS), np.float32)})
    tier, seconds = ahead.over(disk, memory), 0.0
    try:
        for step, wanted in enumerate(steps):
            begin = time.perf_counter()
            while ahead.uses.added < step + ahead.uses.wanted_ahead:
                number = ahead.uses.added
                ahead.uses.add(steps[number] if number < len(steps) else steps[0][:0])
            ahead.begin(step)
            seconds += time.perf_counter() - begin
            tier.submit({"features": wanted}, out=None).result()
    finally:
        tier.close()
    return disk.asked, seconds


def of_min(one: Recorded, nodes: int, slots: int) -> int:
    """Rows that a host asks for which knows all that will be wanted: of what is there, what is wanted soonest
    stays."""
    steps = steps_of(one)
    never = len(steps)
    following, uses = np.full(nodes, never, np.int64), []
    for step in range(len(steps) - 1, -1, -1):
        uses.append(following[steps[step]].copy())
        following[steps[step]] = step
    due, kept, asked = np.full(nodes, never, np.int64), np.empty(0, np.int64), 0
    there = np.zeros(nodes, bool)
    for wanted, following_uses in zip(steps, reversed(uses), strict=True):
        asked += int((~there[wanted]).sum())
        due[wanted] = following_uses
        both = np.union1d(kept, wanted)
        both = both[due[both] < never]
        there[kept] = False
        kept = both[np.argsort(due[both], kind="stable")[:slots]]
        there[kept] = True
    return asked


class Kept(NamedTuple):
    """Rows asked of other hosts, of all hosts together, over those without a buffer."""

    no_eviction: float
    best: float
    best_of: tuple[int, float]
    ahead: float
    least: float


def kept(recorded: list[Recorded], store: featstore.Store, share: float) -> Kept:
    nodes = store.table("features").rows
    total = sum(one.asked for one in recorded)
    grid = {
        (delta, gamma): sum(of_massivegnn(one, nodes, share, gamma, delta) for one in recorded)
        for delta, gamma in product(DELTAS, GAMMAS)
    }
    best = min(grid, key=lambda key: grid[key])
    slots = [int(share * len(one.halo.ids)) for one in recorded]
    never = sum(of_massivegnn(one, nodes, share, 0.95, NEVER) for one in recorded)
    ours = sum(of_ahead(one, store, n)[0] for one, n in zip(recorded, slots, strict=True))
    least = sum(of_min(one, nodes, n) for one, n in zip(recorded, slots, strict=True))
    return Kept(never / total, grid[best] / total, best, ours / total, least / total)


def train(
    workspace: Path, parts: Path, hosts: int, *, slow: tuple[float, float] | None, shaped: bool = False,
    **said: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """Run the hosts, in a network that is so ``slow``, by namespaces if it is ``shaped``; what each tells."""
    if not shaped or slow is None:
        return _run(workspace, parts, [[]] * hosts, {}, slow=slow, **said)
    with namespaces(hosts, slow[1]) as inside:
        environment = {"GLOO_SOCKET_IFNAME": INTERFACE}
        return _run(workspace, parts, inside, environment, slow=(slow[0], float("inf")), **said)


def _run(
    workspace: Path, parts: Path, inside: list[list[str]], environment: dict[str, str], **said: Any
) -> list[dict[str, Any]]:
    """A process for each of the words that come before its command."""
    running, hosts = [], len(inside)
    meeting = workspace / "meeting"
    meeting.unlink(missing_ok=True)
    for rank, before in enumerate(inside):
        asked = said | {
            "rank": rank, "hosts": hosts, "parts": str(parts), "meeting": str(meeting),
            "told": str(workspace / f"told-{rank}.json"),
        }  # fmt: skip
        command = [*before, sys.executable, str(HERE / "child_hosts.py"), json.dumps(asked)]
        running.append(
            subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, cwd=HERE)
        )
    try:
        for process in running:
            if process.wait(1800):
                raise RuntimeError("a host has failed, see above")
    finally:
        for process in running:
            process.kill()
    return [json.loads((workspace / f"told-{rank}.json").read_text()) for rank in range(hosts)]


def lookup_nanoseconds(one: Recorded, store: featstore.Store) -> dict[str, float]:
    """Of an id: finding its owner; MassiveGNN's lookup and scores; looking ahead, and choosing what stays."""
    stream, table = one.streams[0], store.table("features")
    nodes = table.rows
    count = sum(map(len, stream))
    owners = Owners("features", (np.arange(nodes) % 2).astype(np.uint8), 0, 2)
    scores = HaloScores(one.halo, nodes, 0.25, 0.995, 64)
    begin = time.perf_counter()
    for wanted in stream:
        owners.own_and_others(wanted)
    owned = time.perf_counter()
    for wanted in stream:
        scores.score(*scores.look(wanted))
    scored = time.perf_counter()
    slots = int(0.25 * len(one.halo.ids))
    of_ahead(one, store, slots)  # loads the kernels
    _, looked = of_ahead(one, store, slots)
    return {
        "finding its owner": (owned - begin) / count * 1e9,
        "MassiveGNN's lookup and scores": (scored - owned) / count * 1e9,
        "looking ahead, and choosing what stays": looked / count * 1e9,
    }


@click.command()
@click.option("--graph", type=click.Path(exists=True, path_type=Path), help="A real graph, .npz.")
@click.option("--namespaces", "shaped", is_flag=True, help="A network namespace a host; takes root.")
@shared_options("128MiB", "16MiB", rounds=1)
def main(settings: Settings, graph: Path | None, shaped: bool) -> None:
    workspace, quick = settings.workspace, settings.quick
    nodes = settings.size_bytes // (4 * COLUMNS)
    if graph is None:
        files = generate(workspace / f"hosts-{nodes}", nodes, 12 * nodes, COLUMNS)
    else:
        files = of_file(workspace / f"hosts-{graph.stem}", graph, COLUMNS, train_share=0.5)
    nodes, batch, epochs = files.nodes, 100 if quick else 500, 2 if quick else 3
    arrays = {"train": files.load("train"), "label": files.load("labels")}
    store = featstore.pack(
        workspace / "hosts.fs", files.path("features"), graph=(files.load("indptr"), files.load("indices")),
        arrays=arrays, memory="4GiB", partitions=256 if not quick else 32, overwrite=True,
    )  # fmt: skip
    report = Report(
        "hosts" + ("" if graph is None else "_real") + ("_namespaces" if shaped else ""),
        "Several hosts" + (", a namespace each" if shaped else "") + (f": {graph.stem}" if graph else ""),
        {"nodes": nodes, "edges": 12 * nodes, "row_bytes": 4 * COLUMNS, "fanouts": FANOUTS, "batch": batch,
         "epochs": epochs, "namespaces": shaped},
        workspace,
    )  # fmt: skip
    found, splits, recorded_two = {}, {}, None
    for hosts, ranks in product((2,) if quick else (2, 4, 8), (1, 2)):
        parts = splits.get(hosts)
        if parts is None:
            parts = splits[hosts] = workspace / f"hosts-{hosts}.parts"
            begin = time.perf_counter()
            featstore.split(store, hosts, parts, train="train", memory="2GiB", overwrite=True)
            note(f"split by {hosts} in {time.perf_counter() - begin:.1f} s")
        recorded = record(store, parts, hosts, ranks, batch // ranks, epochs)
        recorded_two = recorded if (hosts, ranks) == (2, 1) else recorded_two
        for share in SHARES:
            found[hosts, ranks, share] = kept(recorded, store, share)
            note(f"{hosts} hosts, {ranks} ranks, {share}: {found[hosts, ranks, share]}")
    assert recorded_two is not None
    report.table(
        "Rows asked of other hosts, over those without a buffer",
        ["hosts", "ranks each", "of the halo", "MassiveGNN, no eviction", "MassiveGNN, best of its grid",
         "its delta, gamma", "looking ahead", "over MassiveGNN", "MIN", "MIN over MassiveGNN"],
        [[h, r, f"{f:.0%}", k.no_eviction, k.best, f"{k.best_of[0]}, {k.best_of[1]}", k.ahead,
          k.ahead / k.best, k.least, k.least / k.best] for (h, r, f), k in found.items()],
    )  # fmt: skip
    for ranks in (1, 2):
        ratio = statistics.median(k.ahead / k.best for (_, r, _), k in found.items() if r == ranks)
        text = f"rows asked of other hosts, over MassiveGNN at its best, {ranks} ranks a host (median)"
        report.claims.append(Claim(text, ratio, 0.75, "<="))
    _training(report, settings, splits[2], recorded_two, found[2, 1, 0.25], nodes, batch, shaped)
    told = train(
        workspace, splits[2], 2, exchange=EXCHANGED, rounds=10 if quick else 60, slow=None, serving="512MiB"
    )[0]["exchange"][3:]
    took = {name: 1000 * statistics.median(one[name] for one in told) for name in told[0]}
    text = (
        f"{EXCHANGED:,} rows of {4 * COLUMNS} B either way, over a bare all_to_all_single of the same bytes"
    )
    report.claims.append(Claim(text, took["ours"] / took["bare"], 1.3, "<="))
    least = took["bare, cpu"] + took["gather, cpu"] + took["put, cpu"]
    text = "the same, a host's core: its time with rows gathered and put in their places, over the bare time"
    report.claims.append(Claim(text, least / took["bare"]))
    report.notes.append(
        f"That exchange took {took['ours']:.1f} ms ({took['ours, cpu']:.1f} of them a host's core), the bare "
        f"one {took['bare']:.1f} ({took['bare, cpu']:.1f}), whose rows nobody has gathered before, checked, "
        f"or put in their places after: torch gathers so many within {took['gather, cpu']:.1f} ms of a core, "
        f"and puts them in new memory within {took['put, cpu']:.1f}. Rows were served from memory."
    )
    for what, spent in lookup_nanoseconds(recorded_two[0], store).items():
        report.claims.append(Claim(f"nanoseconds of an id: {what}", spent, 40, "<="))
    report.notes.append(
        "All hosts are processes of one machine, which share its cores. Each reads its own rows through "
        "mappings, from the page cache: as in the paper, they are in memory, and no disk binds."
    )
    store.close()
    report.save(settings.out, quick)


def _training(
    report: Report,
    settings: Settings,
    parts: Path,
    recorded: list[Recorded],
    best: Kept,
    nodes: int,
    batch: int,
    shaped: bool,
) -> None:
    """Two hosts train, over loopback and over a slow network."""
    halo_rows = int(0.25 * min(len(one.halo.ids) for one in recorded))
    delta, gamma = best.best_of
    scores = HaloScores.bytes_for(nodes, max(len(one.halo.ids) for one in recorded), halo_rows)
    halo_bytes = halo_rows * 4 * COLUMNS + scores  # what MassiveGNN takes is what all have
    base = (24 if settings.quick else 160) << 20
    contenders: dict[str, tuple[Any, int]] = {
        "no buffer": (None, base),
        "MassiveGNN, no eviction": ({"share": 0.25, "delta": NEVER}, base + halo_bytes + (1 << 20)),
        "MassiveGNN, best of its grid": (
            {"share": 0.25, "delta": delta, "gamma": gamma}, base + halo_bytes + (1 << 20),
        ),
        "looking ahead": (halo_bytes, base + halo_bytes + (1 << 20)),
    }  # fmt: skip
    rows = []
    seconds: dict[tuple[str, str], float] = {}
    wire: dict[str, float] = {}
    for net, slow in NETWORKS.items():
        for name, (halo, memory) in contenders.items():
            told = train(
                settings.workspace, parts, 2, halo=halo, memory=memory, slow=slow, shaped=shaped,
                fanouts=FANOUTS, batch=batch, epochs=2 if settings.quick else 3, serving="128MiB",
            )  # fmt: skip
            epoch = max(statistics.median(one["epochs"][1:]) for one in told)
            wait = max(statistics.median(one["waits"][1:]) for one in told)
            asked = sum(statistics.median(one["rows"][1:]) for one in told)
            seconds[net, name] = epoch
            most = max(statistics.median(one["rows"][1:]) for one in told) * 4 * COLUMNS
            wire[net] = most / slow[1] if slow else 0.0  # of the last one, which looks ahead
            rows.append([
                net, name, epoch, wait, asked, asked * 4 * COLUMNS / 2**20, max(one["setup"] for one in told),
                max(one["peak_bytes"] for one in told) / 2**20, told[0]["loss"],
            ])  # fmt: skip
            note(f"{net}, {name}: {epoch:.2f} s, waits {wait:.2f}, {asked:,.0f} rows")
    report.table(
        "Two hosts train, a quarter of the halo kept: an epoch",
        ["network", "kept", "seconds", "waits", "rows of others", "MiB of others", "set-up, s", "peak MiB",
        "loss"], rows,
    )  # fmt: skip
    losses = {round(row[-1], 4) for row in rows}
    if len(losses) > 1:
        report.notes.append(f"Losses differ: {sorted(losses)}.")
    for net, slow in NETWORKS.items():
        none, text = seconds[net, "no buffer"], f"{net}: time of an epoch, over no buffer"
        massive = min(spent for (at, name), spent in seconds.items() if at == net and "MassiveGNN" in name)
        report.claims.append(Claim(f"{text}: MassiveGNN, the better of both", massive / none))
        report.claims.append(Claim(f"{text}: looking ahead", seconds[net, "looking ahead"] / none))
        if slow == SLOWEST:
            text = f"{net}, looking ahead: time of an epoch, over what its rows take on the wire"
            report.claims.append(Claim(text, seconds[net, "looking ahead"] / wire[net], 1.15, "<="))


if __name__ == "__main__":
    main()
