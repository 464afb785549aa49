"""Does ``store.loader_costs`` forecast what then happens? Every mode, forecast and measured, in one run.

    python benchmarks/loader_costs.py --dir /a/directory/on/the/ssd
    python benchmarks/loader_costs.py --zram        # on compressed RAM as a block device; takes root

A generated store that is larger than the loader's memory. The device is calibrated first (into a cache of its
own). Then, in rounds, each mode is forecast, gone through without a training step, so that what loading takes
is all there is to see, and forecast again: the machine may have changed meanwhile, and the mean of both
forecasts counts. The first epoch of each, in which buffers fill and kernels load, does not count. A ratio is
the median of those of the rounds. Bytes are held against the forecast as well: they tell whether the model of
what is read is right, whatever else the machine does meanwhile. The last column says which part of a forecast
was off: its stages and the time of the cores, forecast and measured, and what others took of the device and
of the cores meanwhile.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from harness import Claim, Report, Settings, note, shared_options
from system import compressed_ram

import featstore
from featstore.loaders.costs.result import ModeCost
from featstore.loaders.options import MODES
from featstore.measure.calibrate import calibrate

BAR = 0.2
ROW_BYTES = 1024
DISK = "64GiB"
EPOCHS = 2  # of each mode in each round
#: Stages as a forecast has them, and those of a report that they stand for.
STAGES = {
    "read": ("read", "load"), "sample": ("sample",), "build": ("build",), "prepare": ("prepare",),
    "bring back": (), "assemble": ("claim", "gather", "assemble", "graph", "hand over"),
}  # fmt: skip


def packed(path: Path, nodes: int, columns: int) -> featstore.Store:
    """A random graph whose sources are wanted by a power law."""
    random = np.random.default_rng(0)
    wanted = np.arange(1, nodes + 1) ** -0.6
    source = random.permutation(nodes)[random.choice(nodes, 10 * nodes, p=wanted / wanted.sum())]
    edges = np.stack([source, random.integers(0, nodes, 10 * nodes)])
    rows = random.standard_normal((nodes, columns), np.float32)
    featstore.pack(
        path, rows, graph=edges, order="ldg", topology=True, partitions=64, memory="1GiB",
        arrays={"train": np.sort(random.permutation(nodes)[: nodes // 10])},
    ).close()  # fmt: skip
    return featstore.open(path)


@dataclass(frozen=True)
class Clocks:
    """Seconds by the clock, of this process's cores, of all cores; bytes read of the device by anybody, and
    by this process."""

    wall: float
    own_cpu: float
    all_cpu: float
    all_bytes: int
    own_bytes: int

    @classmethod
    def now(cls, device: str) -> Clocks:
        busy = [int(one) for one in Path("/proc/stat").read_text().split()[1:8]]
        cpu = (sum(busy) - busy[3] - busy[4]) / os.sysconf("SC_CLK_TCK")  # but idle, and waiting
        lines = [line.split() for line in Path("/proc/diskstats").read_text().splitlines()]
        read = next((int(line[5]) for line in lines if ":".join(line[:2]) == device), 0)
        own = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return cls(time.perf_counter(), time.process_time(), cpu, 512 * read, int(own["read_bytes"]))


@dataclass(frozen=True)
class Epochs:
    """Of an epoch: median ``seconds``, ``bytes_read``, seconds by ``stages`` and of this process's cores;
    cores that others had, and bytes a second that they read."""

    seconds: float
    bytes_read: float
    stages: Mapping[str, float]
    cpu_seconds: float
    others_cores: float
    others_bytes: float


def epochs(loader: Any, rounds: int, device: str) -> Epochs:
    """Go through so many, after a first one."""
    sum(1 for _ in loader)
    before, began, seconds = loader.report(), Clocks.now(device), []
    for _ in range(rounds):
        begin = time.perf_counter()
        sum(1 for _ in loader)
        seconds.append(time.perf_counter() - begin)
    after, ended = loader.report(), Clocks.now(device)
    wall, own_cpu = ended.wall - began.wall, ended.own_cpu - began.own_cpu
    others = ended.all_bytes - began.all_bytes - (ended.own_bytes - began.own_bytes)
    stages = {n: (s - before.seconds.get(n, 0.0)) / rounds for n, s in after.seconds.items()}
    return Epochs(
        statistics.median(seconds), (after.bytes_read - before.bytes_read) / rounds, stages, own_cpu / rounds,
        (ended.all_cpu - began.all_cpu - own_cpu) / wall, max(0, others) / wall,
    )  # fmt: skip


def between(before: ModeCost, after: ModeCost) -> ModeCost:
    """The mean of two forecasts."""
    pairs = {n: (s + after.seconds[n]) / 2 for n, s in before.seconds.items()}
    return replace(
        before, epoch_seconds=(before.epoch_seconds + after.epoch_seconds) / 2, seconds=pairs,
        cpu_seconds=(before.cpu_seconds + after.cpu_seconds) / 2,
    )  # fmt: skip


def stages_line(cost: ModeCost, found: Epochs) -> str:
    """Forecast/measured of each stage, seconds."""
    cells = [f"cores {cost.cpu_seconds:.2f}/{found.cpu_seconds:.2f}"]
    for stage, parts in STAGES.items():
        measured = sum(found.stages.get(part, 0.0) for part in parts)
        if stage in cost.seconds or measured:
            cells.append(f"{stage} {cost.seconds.get(stage, 0.0):.2f}/{measured:.2f}")
    waits = [f"{n} {s:.2f}" for n, s in found.stages.items() if n.endswith("wait")]
    others = f"others: {found.others_cores:.2f} cores, {found.others_bytes / 1e6:.0f} MB/s"
    return "; ".join([", ".join(cells), *([", ".join(waits)] if waits else []), others])


@dataclass(frozen=True)
class Turn:
    """A mode in a round: its forecast, what was measured, and seconds until the loader was there."""

    cost: ModeCost
    found: Epochs
    made_seconds: float

    @property
    def ratio(self) -> float:
        return self.cost.epoch_seconds / self.found.seconds

    def bytes_ratio(self, mode: str) -> float:
        # A rolling loader counts what it trains on, not what preparing reads.
        read = self.cost.bytes_read - (self.cost.prepare_bytes_read if mode == "rolling" else 0)
        return read / max(1.0, self.found.bytes_read)  # nothing is read where all fits memory


def measured(store: featstore.Store, how: dict[str, Any], rounds: int, device: str) -> dict[str, list[Turn]]:
    """Every mode that is possible, in turns."""
    store.loader_costs(**how, disk=DISK)  # kernels load
    costs = store.loader_costs(**how, disk=DISK)
    turns: dict[str, list[Turn]] = {mode: [] for mode in MODES if costs.modes[mode].possible}
    for number in range(rounds):
        for mode in turns:
            disk = {} if mode in ("online", "partitions") else {"disk": DISK}
            begin = time.perf_counter()
            with store.loader(mode=mode, **how, **disk) as loader:
                made = time.perf_counter() - begin
                found = epochs(loader, EPOCHS, device)
            again = store.loader_costs(**how, disk=DISK)
            turn = Turn(between(costs.modes[mode], again.modes[mode]), found, made)
            costs = again
            turns[mode].append(turn)
            note(f"round {number + 1}/{rounds}: {mode}: {turn.ratio:.2f}; {stages_line(turn.cost, found)}")
    return turns


@click.command()
@click.option("--memory", default="96MiB", show_default=True)
@click.option("--zram", is_flag=True, help="Make a block device of compressed RAM for it.")
@shared_options(size="150MiB", quick_size="20MiB", rounds=5)
def main(settings: Settings, memory: str, zram: bool) -> None:
    """Forecast over measured for each mode."""
    with ExitStack() as stack:
        if zram:
            at = stack.enter_context(compressed_ram(8 << 30, settings.workspace / "zram"))
            settings = replace(settings, workspace=at)
        go(settings, memory, zram)


def go(settings: Settings, memory: str, zram: bool) -> None:
    """All of it, in a workspace."""
    how: dict[str, Any] = {"seeds": "train", "fanouts": (8, 4), "batch_size": 256, "memory": memory}
    nodes = settings.size_bytes // ROW_BYTES
    name, where = ("loader_costs_fast", ", on compressed RAM") if zram else ("loader_costs", "")
    report = Report(name, f"Forecasts of a loader{where}", {
        "nodes": nodes, "row_bytes": ROW_BYTES, "memory": memory, "fanouts": [8, 4], "batch_size": 256,
        "epochs": EPOCHS, "rounds": settings.rounds, "zram": zram,
    }, settings.workspace)  # fmt: skip
    with tempfile.TemporaryDirectory(dir=settings.workspace) as folder:
        os.environ["FEATSTORE_CACHE"] = str(Path(folder) / "cache")
        number = os.stat(folder).st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        with packed(Path(folder) / "store", nodes, ROW_BYTES // 4) as store:
            note("calibrating")
            note(str(calibrate(store.path)))
            found = measured(store, how, settings.rounds, device)
    rows: list[list[Any]] = []
    for mode, turns in found.items():
        middle = sorted(turns, key=lambda turn: turn.ratio)[len(turns) // 2]
        ratios = [turn.ratio for turn in turns]
        off = abs(statistics.median(ratios) - 1)
        report.claims.append(Claim(f"{mode}: forecast of an epoch over measured, off by", off, BAR, "<="))
        prepare = [t.cost.prepare_seconds / t.made_seconds for t in turns] if mode == "compiled" else [None]
        rows.append([
            mode, middle.cost.epoch_seconds, middle.found.seconds, statistics.median(ratios),
            f"{min(ratios):.2f} to {max(ratios):.2f}",
            statistics.median(turn.bytes_ratio(mode) for turn in turns),
            statistics.median(prepare) if prepare[0] is not None else None,
            stages_line(middle.cost, middle.found),
        ])  # fmt: skip
    columns = (
        "mode", "forecast, s", "measured, s", "forecast over measured", "range", "the same of bytes read",
        "of preparing", "stages of the middle round: seconds, forecast/measured",
    )  # fmt: skip
    report.table("An epoch of loading, forecast and measured", columns, rows)
    report.save(settings.out, settings.quick)


if __name__ == "__main__":
    main()
