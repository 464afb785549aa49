"""Does ``store.loader_costs`` forecast what then happens? Every mode, forecast and measured, in one run.

    python benchmarks/loader_costs.py --dir /a/directory/on/the/ssd

A generated store that is larger than the loader's memory. The device is calibrated first (into a cache of its
own). Then each mode is forecast, and gone through, in rounds, without a training step, so that what loading
takes is all there is to see; the first epoch of each, in which buffers fill and kernels load, does not count.
Bytes are held against the forecast as well: they tell whether the model of what is read is right, whatever
else the machine does meanwhile.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from harness import note

import featstore
from featstore.loaders.options import MODES
from featstore.measure.calibrate import calibrate

BAR = 0.25


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


def epochs(loader: Any, rounds: int) -> tuple[float, float]:
    """Median seconds of an epoch, and bytes read in one, after a first one."""
    sum(1 for _ in loader)
    before, seconds = loader.report().bytes_read, []
    for _ in range(rounds):
        begin = time.perf_counter()
        sum(1 for _ in loader)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds), (loader.report().bytes_read - before) / rounds


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
        with packed(Path(folder) / "store", nodes, columns) as store:
            note("calibrating")
            print(calibrate(store.path))
            store.loader_costs(**how, disk="64GiB")  # kernels load
            costs = store.loader_costs(**how, disk="64GiB")
            print(costs)
            print(f"{'mode':12}{'forecast':>10}{'measured':>10}{'ratio':>8}{'bytes':>8}{'prepare':>9}")
            missed = []
            for mode in (one for one in MODES if costs.modes[one].possible):
                note(mode)
                begin, disk = (
                    time.perf_counter(),
                    {} if mode in ("online", "partitions") else {"disk": "64GiB"},
                )
                with store.loader(mode=mode, **how, **disk) as loader:
                    made = time.perf_counter() - begin
                    took, bytes_read = epochs(loader, rounds)
                cost = costs.modes[mode]
                # A rolling loader counts what it trains on, not what preparing reads.
                read = cost.bytes_read - (cost.prepare_bytes_read if mode == "rolling" else 0)
                prepared = cost.prepare_seconds / made if mode == "compiled" else float("nan")
                ratio = cost.epoch_seconds / took
                missed += [mode] * (abs(ratio - 1) > BAR)
                print(
                    f"{mode:12}{cost.epoch_seconds:9.2f}s{took:9.2f}s{ratio:8.2f}{read / bytes_read:8.2f}"
                    f"{prepared:9.2f}"
                )
            print(f"the bar is {BAR:.0%}; missed: {', '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
