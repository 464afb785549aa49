"""Hosts that are processes train, over emulated networks: of ``hosts.py``."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import HERE, Claim, Report, Settings, note
from hosts_kept import COLUMNS, FANOUTS, NEVER, Kept, Recorded
from network import INTERFACE, namespaces

import featstore
from featstore.hosts.massivegnn import HaloScores

#: Seconds of latency, and bytes a second out of each host.
SLOW, SLOWEST = "1 ms, 100 Mbit/s", "1 ms, 25 Mbit/s"
NETWORKS = {
    "loopback": None, "0.1 ms, 1 Gbit/s": (0.0001, 125e6), "1 ms, 1 Gbit/s": (0.001, 125e6),
    SLOW: (0.001, 12.5e6), SLOWEST: (0.001, 3.125e6),
}  # fmt: skip
SHARE = 0.25  # of the halo, that is kept
IN_LOOP, NO_BUFFER = "fetched in the loop", "no buffer"
NO_EVICTION, MASSIVEGNN, AHEAD = "MassiveGNN, no eviction", "MassiveGNN, best of its grid", "looking ahead"
EPOCHS = 3
_GAIN = 0.85  # of the time, at most, what MassiveGNN's paper has over fetching in the loop
_TIMES = 3  # that two hosts train over a slow network, of which the median is told
_BASE_MIB = {2: 160, 4: 112, 8: 112}  # of a loader's memory, beside what is kept, by hosts
#: Of the loader's stages, what other threads do beside the loop; own rows are looked up, checked and copied.
_OWN_READS = ("lookup", "check", "copy")
_STAGES = ("sample", "read", *_OWN_READS, "gather", "assemble", "hand over", "train", "wait", "read wait")


class Cell(NamedTuple):
    """Who trains over what: ``kept`` of the contenders, on so many ``hosts`` of so many ``ranks``."""

    hosts: int
    ranks: int
    net: str
    kept: str


class Trained(NamedTuple):
    """What it took, an epoch, of the slowest host or rank; ``rows``: of all. Of the stages the median."""

    seconds: float
    rows: float
    setup: float
    peak_bytes: float
    stages: dict[str, float]
    bounds: dict[str, float]  # what an epoch takes at least, by what may bind
    losses: list[list[str]]  # float.hex() of each step, by rank

    @property
    def binds(self) -> str:
        return max(_ASKED_BOUNDS, key=lambda name: self.bounds[name])

    @property
    def over_slowest(self) -> float:
        return self.seconds / self.bounds[self.binds]


#: What an epoch is held against: the slowest of these. The cores' time is of hosts that share a machine.
_ASKED_BOUNDS = ("model", "wire", "sampling", "own reads")


def run_hosts(
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
    workspace: Path, parts: Path, inside: list[list[str]], environment: dict[str, str], ranks: int = 1,
    child: str = "child_hosts.py", **said: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """``ranks`` processes, of the script ``child``, for each of the words that come before their command."""
    running, hosts = [], len(inside)
    meeting = workspace / "meeting"
    meeting.unlink(missing_ok=True)
    told = [workspace / f"told-{rank}.json" for rank in range(hosts * ranks)]
    for rank, file in enumerate(told):
        file.unlink(missing_ok=True)
        asked = said | {
            "rank": rank, "hosts": hosts, "ranks": ranks, "parts": str(parts), "meeting": str(meeting),
            "told": str(file),
        }  # fmt: skip
        command = [*inside[rank // ranks], sys.executable, str(HERE / child), json.dumps(asked)]
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
    return [json.loads(file.read_text()) for file in told]


def contenders(recorded: list[Recorded], best: Kept, nodes: int, base: int) -> dict[str, tuple[Any, int]]:
    """Of each what it keeps, and its loader's memory: what MassiveGNN takes is what all have."""
    halo_rows = min(one.slots(SHARE) for one in recorded)
    scores = HaloScores.bytes_for(nodes, max(len(one.halo.ids) for one in recorded), halo_rows)
    halo_bytes = halo_rows * 4 * COLUMNS + scores
    delta, gamma = best.best_of
    more = base + halo_bytes + (1 << 20)
    return {
        IN_LOOP: (None, base),
        NO_BUFFER: (None, base),
        NO_EVICTION: ({"share": SHARE, "delta": NEVER}, more),
        MASSIVEGNN: ({"share": SHARE, "delta": delta, "gamma": gamma}, more),
        AHEAD: (halo_bytes, more),
    }


def cells(quick: bool) -> list[Cell]:
    """All that is trained: two hosts over every network; more of them, and two ranks a host, over the fastest
    and a slow one, and eight or more processes over that alone. What fetches in the loop has one rank a
    host."""
    names = (IN_LOOP, NO_BUFFER, NO_EVICTION, MASSIVEGNN, AHEAD)
    found = [Cell(2, 1, net, name) for net in NETWORKS for name in names]
    for hosts, ranks in ((2, 2),) if quick else ((2, 2), (4, 1), (4, 2), (8, 1), (8, 2)):
        for net in ("loopback", SLOW) if hosts * ranks < 8 else (SLOW,):
            left_out = (NO_EVICTION, IN_LOOP) if ranks > 1 else (NO_EVICTION,)
            found += [Cell(hosts, ranks, net, name) for name in names if name not in left_out]
    return found


def train(
    settings: Settings, cell: Cell, parts: Path, kept: tuple[Any, int], batch: int, shaped: bool,
    fanouts: Sequence[int] = FANOUTS,
) -> Trained:  # fmt: skip
    halo, memory = kept
    slow = NETWORKS[cell.net]
    told = run_hosts(
        settings.workspace, parts, cell.hosts, ranks=cell.ranks, halo=halo, memory=memory, slow=slow,
        shaped=shaped, fanouts=fanouts, batch=batch // cell.ranks, epochs=EPOCHS, serving="64MiB",
        in_loop=cell.kept == IN_LOOP,
    )  # fmt: skip

    def most(of: Any) -> float:
        """Of the host or rank that has most, the median of all epochs but the first."""
        return max(statistics.median(of(epoch) for epoch in one["epochs"][1:]) for one in told)

    def stage(name: str) -> float:
        return most(lambda epoch: epoch["stages"].get(name, 0.0))

    cpu = sum(statistics.median(epoch["cpu"] for epoch in one["epochs"][1:]) for one in told)
    leaders = told[:: cell.ranks]
    return Trained(
        seconds=most(lambda epoch: epoch["seconds"]),
        rows=sum(statistics.median(epoch["rows"] for epoch in one["epochs"][1:]) for one in leaders),
        setup=max(one["setup"] for one in told),
        peak_bytes=max(one["peak_bytes"] for one in told),
        stages={name: stage(name) for name in _STAGES},
        bounds={
            "model": max(one["model"] * one["epochs"][-1]["steps"] for one in told),
            "wire": most(lambda epoch: epoch["sent_bytes"]) / slow[1] if slow else 0.0,
            "sampling": stage("sample"),
            "own reads": most(lambda epoch: sum(epoch["stages"].get(name, 0.0) for name in _OWN_READS)),
            "cores": cpu / (os.cpu_count() or 1),
        },
        losses=[one["losses"] for one in told],
    )


def middle(runs: list[Trained]) -> Trained:
    """The run of the median time."""
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


def check_losses(cell: Cell, runs: list[Trained], expected: dict[tuple[int, int], Any]) -> None:
    """Mini-batches are the same whatever the network is, and whatever is kept: so are losses, to the bit."""
    for run in runs:
        first = expected.setdefault((cell.hosts, cell.ranks), run.losses)
        if run.losses != first:
            rank, step = next(
                (rank, step)
                for rank, (here, there) in enumerate(zip(run.losses, first, strict=True))
                for step in range(max(len(here), len(there)))
                if here[step : step + 1] != there[step : step + 1]
            )
            raise RuntimeError(
                f"{cell}: the loss of rank {rank} in step {step} is not what it was with other rows kept: "
                f"{run.losses[rank][step : step + 1]}, not {first[rank][step : step + 1]}"
            )


def train_all(
    report: Report, settings: Settings, splits: dict[int, Path], recorded: dict[tuple[int, int], Any],
    best: dict[tuple[int, int], Kept], nodes: int, batch: int, shaped: bool,
) -> None:  # fmt: skip
    """Train in all cells, and tell of it."""
    found: dict[Cell, Trained] = {}
    losses: dict[tuple[int, int], Any] = {}
    for cell in cells(settings.quick):
        key = cell.hosts, cell.ranks
        base = (24 if settings.quick else _BASE_MIB[cell.hosts]) << 20
        kept = contenders(recorded[key], best[key], nodes, base)[cell.kept]
        often = _TIMES if cell.net == SLOW and cell.hosts == 2 and not settings.quick else 1
        runs = [train(settings, cell, splits[cell.hosts], kept, batch, shaped) for _ in range(often)]
        check_losses(cell, runs, losses)
        found[cell] = one = middle(runs)
        note(
            f"{cell}: {one.seconds:.2f} s of {[round(run.seconds, 2) for run in runs]}, {one.rows:,.0f} rows"
            f", {one.binds} {one.bounds[one.binds]:.2f}"
        )
    _tables(report, found)
    _claims(report, found)


def _tables(report: Report, found: dict[Cell, Trained]) -> None:
    report.table(
        "Hosts train, a quarter of the halo kept: an epoch",
        ["hosts", "ranks each", "network", "kept", "seconds", "rows of others", "MiB of others", "set-up, s",
         "peak MiB of a process", "last loss"],
        [[*cell[:3], cell.kept, one.seconds, round(one.rows), one.rows * 4 * COLUMNS / 2**20, one.setup,
          one.peak_bytes / 2**20, float.fromhex(one.losses[0][-1])] for cell, one in found.items()],
    )  # fmt: skip
    names = (*_ASKED_BOUNDS, "cores")
    report.table(
        "What an epoch takes at least, in seconds: the model, with its gradients exchanged; what a host "
        "sent, at the line's rate; sampling; own rows looked up, checked and copied; the machine's cores, "
        "which all hosts share",
        ["hosts", "ranks each", "network", "kept", *names, "slowest but for cores", "epoch over it",
         "epoch over cores"],
        [[*cell[:3], cell.kept, *(one.bounds[name] for name in names), one.binds, one.over_slowest,
          one.seconds / one.bounds["cores"]] for cell, one in found.items()],
    )  # fmt: skip
    report.table(
        "Stages of an epoch, in seconds, each of the host that has most: all but the last three are beside "
        "the loop",
        ["hosts", "ranks each", "network", "kept", "epoch", *_STAGES],
        [[*cell[:3], cell.kept, one.seconds, *(one.stages[name] for name in _STAGES)]
         for cell, one in found.items()],
    )  # fmt: skip


def train_with_copies(
    report: Report, settings: Settings, store: featstore.Store, parts: Path, batch: int, shaped: bool
) -> None:
    """Two hosts train with rows of others' from the network, and with copies of their halo on their own
    disks, around neighbours of one hop, which are the halo, and of two, of which some are farther."""
    copied = settings.workspace / "hosts-2-copies.parts"
    featstore.split(store, 2, copied, train="train", memory="2GiB", halo_disk="16x", overwrite=True)
    cell, found = Cell(2, 1, SLOW, NO_BUFFER), []
    base = (24 if settings.quick else _BASE_MIB[2]) << 20
    for fanouts in (FANOUTS[:1], FANOUTS):
        for where, place in (("none", parts), ("the halo", copied)):
            one = train(settings, cell, place, (None, base), batch, shaped, fanouts)
            found.append([len(fanouts), where, one.seconds, round(one.rows), one.rows * 4 * COLUMNS / 2**20])
            if len(fanouts) == 1 and place == copied:
                text = "rows asked of other hosts for neighbours of one hop, the halo copied"
                report.claims.append(Claim(text, one.rows, 0, "<="))
    report.table(
        f"Copies of the halo on a host's own disk: two hosts, {SLOW}, no buffer; an epoch",
        ["hops", "copies", "seconds", "rows of others", "MiB of others"], found,
    )  # fmt: skip
    shutil.rmtree(copied)


def _claims(report: Report, found: dict[Cell, Trained]) -> None:
    for ranks in (1, 2):
        of = [
            one.rows / found[cell._replace(kept=MASSIVEGNN)].rows
            for cell, one in found.items()
            if cell.kept == AHEAD and cell.ranks == ranks and cell.net == SLOW
        ]
        text = (
            f"rows asked of other hosts while {EPOCHS} epochs train, over MassiveGNN at its best, "
            f"{ranks} ranks a host (median)"
        )
        report.claims.append(Claim(text, statistics.median(of), 0.75, "<="))
    for cell, one in found.items():
        if cell.kept != AHEAD:
            continue
        there = f"{cell.hosts} hosts of {cell.ranks} ranks, {cell.net}"
        same = [(c.kept, t) for c, t in found.items() if c[:3] == cell[:3]]
        none = dict(same)[NO_BUFFER].seconds
        massive = min(t.seconds for kept, t in same if "MassiveGNN" in kept)
        if cell.ranks == 1:
            base = dict(same)[IN_LOOP]
            slowest = max(base.bounds, key=lambda name: base.bounds[name])
            bar = (_GAIN, "<=") if cell.net in (SLOW, SLOWEST) else ()  # whatever else may bind there
            text = f"{there}: time of an epoch, over fetching in the loop (slowest: {slowest})"
            report.claims.append(Claim(f"{text}: MassiveGNN, at its best", massive / base.seconds, *bar))
            report.claims.append(Claim(f"{text}: looking ahead", one.seconds / base.seconds))
        text = f"{there}: time of an epoch, over no buffer"
        report.claims.append(Claim(f"{text}: MassiveGNN, at its best", massive / none))
        report.claims.append(Claim(f"{text}: looking ahead", one.seconds / none))
        text = f"{there}, looking ahead: time of an epoch, over its slowest stage ({one.binds})"
        report.claims.append(Claim(text, one.over_slowest, 1.15, "<="))
        binds = max(one.bounds, key=lambda name: one.bounds[name])
        text = f"{there}, looking ahead: the same, the cores that all hosts share being a stage ({binds})"
        report.claims.append(Claim(text, one.seconds / one.bounds[binds], 1.15, "<="))
    report.notes.append(
        f"What is {IN_LOOP} has no stages but sampling, waiting for that, and waiting for rows."
    )
    report.notes.append(
        "Losses of all contenders, over all networks, are the same to the last bit in every step, on as many "
        "hosts and ranks; that is checked, and fails where it is not so."
    )
