"""Does ``store.loader_costs`` forecast what then happens? Every mode, forecast and measured, in one run.

    python benchmarks/loader_costs.py --dir /a/directory/on/the/ssd

A generated store that is larger than the loader's memory. The device is calibrated first (into a cache of its
own). Then each mode is forecast, gone through in rounds, without a training step, so that what loading takes
is all there is to see, and forecast again: the machine may have changed meanwhile, and the mean of both
forecasts counts. The first epoch of each, in which buffers fill and kernels load, does not count.
Bytes are held against the forecast as well: they tell whether the model of what is read is right, whatever
else the machine does meanwhile. A second table says which part of a forecast was off: its stages and the time
of the cores, forecast and measured, and what others took of the device and of the cores meanwhile.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from harness import note

import featstore
from featstore.loaders.costs.result import ModeCost
from featstore.loaders.options import MODES
from featstore.measure.calibrate import calibrate

BAR = 0.25
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


def stages_line(mode: str, cost: ModeCost, found: Epochs) -> str:
    """Forecast/measured of each stage, seconds."""
    cells = [f"cores {cost.cpu_seconds:.2f}/{found.cpu_seconds:.2f}"]
    for stage, parts in STAGES.items():
        measured = sum(found.stages.get(part, 0.0) for part in parts)
        if stage in cost.seconds or measured:
            cells.append(f"{stage} {cost.seconds.get(stage, 0.0):.2f}/{measured:.2f}")
    waits = [f"{n} {s:.2f}" for n, s in found.stages.items() if n.endswith("wait")]
    others = f"others: {found.others_cores:.2f} cores, {found.others_bytes / 1e6:.0f} MB/s"
    return f"{mode:12}{', '.join(cells)}; {', '.join(waits)}; {others}"


@click.command()
@click.option("--dir", "directory", default=".", type=click.Path(path_type=Path, file_okay=False))
@click.option("--nodes", default=200_000, show_default=True)
@click.option("--columns", default=256, show_default=True)
@click.option("--memory", default="96MiB", show_default=True)
@click.option("--rounds", default=3, show_default=True)
def main(directory: Path, nodes: int, columns: int, memory: str, rounds: int) -> None:
    """Print forecast over measured for each mode."""
    how: dict[str, Any] = {"seeds": "train", "fanouts": (8, 4), "batch_size": 256, "memory": memory}
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        os.environ["FEATSTORE_CACHE"] = str(Path(folder) / "cache")
        number = os.stat(folder).st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        with packed(Path(folder) / "store", nodes, columns) as store:
            note("calibrating")
            print(calibrate(store.path))
            store.loader_costs(**how, disk="64GiB")  # kernels load
            costs = store.loader_costs(**how, disk="64GiB")
            print(costs)
            print(f"{'mode':12}{'forecast':>10}{'measured':>10}{'ratio':>8}{'bytes':>8}{'prepare':>9}")
            missed, parts = [], []
            for mode in (one for one in MODES if costs.modes[one].possible):
                note(mode)
                begin = time.perf_counter()
                disk = {} if mode in ("online", "partitions") else {"disk": "64GiB"}
                with store.loader(mode=mode, **how, **disk) as loader:
                    made = time.perf_counter() - begin
                    found = epochs(loader, rounds, device)
                again = store.loader_costs(**how, disk="64GiB")
                cost, costs = between(costs.modes[mode], again.modes[mode]), again
                # A rolling loader counts what it trains on, not what preparing reads.
                read = cost.bytes_read - (cost.prepare_bytes_read if mode == "rolling" else 0)
                prepared = cost.prepare_seconds / made if mode == "compiled" else float("nan")
                ratio = cost.epoch_seconds / found.seconds
                missed += [mode] * (abs(ratio - 1) > BAR)
                parts.append(stages_line(mode, cost, found))
                print(
                    f"{mode:12}{cost.epoch_seconds:9.2f}s{found.seconds:9.2f}s{ratio:8.2f}"
                    f"{read / found.bytes_read:8.2f}{prepared:9.2f}"
                )
            print("seconds of an epoch, forecast/measured:", *parts, sep="\n")
            print(f"the bar is {BAR:.0%}; missed: {', '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
