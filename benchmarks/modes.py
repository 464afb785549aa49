"""The same loop under every mode, in little memory: GraphSAGE over rows of 4 KiB, in a memory cgroup of the
bare process and a tenth of the features, against the same model with everything in memory.

    python benchmarks/modes.py --dir /a/directory/on/the/ssd
    python benchmarks/modes.py --graph FILE.npz     # of a real graph: indptr, indices (CSC), labels
    python benchmarks/modes.py --zram --size 512MiB # on compressed RAM as a block device; takes root

What is compared with is a plain loop that samples, gathers and trains by turns, all rows and the graph in
memory, without a cgroup; and that loop over np.memmap in the cgroup. All ways have a process of their own
in each round, in turns, and the same number of torch's threads (one, so that the loop and what is beside it
have a core each where there are two; another line has all cores for a loop in memory); the page cache is
dropped before each, and reads are direct but for np.memmap's. Of a loader, one epoch does not count
(buffers fill, what is compiled is compiled), one is loaded and not trained on, and the others are timed. An
epoch is held against its slowest stage alone, too: loading without training, or the model alone as the
plain loop's clock has it. *The disk's bound* is what fio would take for as many bytes, in pages at random
for online and for rows in the base table, in sequence for all others, in the same run. *Where the time
goes*: what stages are busy for, or wait, in seconds of all their
threads: in an epoch that is trained on, and in one that is not.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import click
from graphs import GraphFiles, generate, of_file
from harness import HERE, Claim, Report, Settings, note, shared_options
from peers import fio
from system import compressed_ram, drop_caches, free_memory_bytes, memory_group, run_child, touch_memory
from tables import remove

import featstore
from featstore.base.system import available_cores
from featstore.measure.calibrate import calibrate
from featstore.units import format_bytes

COLUMNS, EDGES_A_NODE = 1024, 15
FANOUTS, BATCH = (10, 5), 64
MEMORY_SHARE = 0.1
PARTITIONS = 512
QUICK_ALLOWED_BYTES = 96 << 20
SLACK_BYTES = 5 << 20  # fragments, training nodes and labels
STAGE_BAR = 1.15
FIO_SECONDS = 3.0
MEMORY, MEMMAP, ADVISED = "all in memory", "np.memmap", "np.memmap, MADV_RANDOM"
ALL_CORES = "all in memory, torch on all cores"
#: By name: mode, order of seeds, options, bar of the epoch over that in memory.
WAYS: dict[str, tuple[str, str, dict[str, Any], float]] = {
    "compiled": ("compiled", "random", {"disk": "1000x", "name": "bench"}, 1.0),
    "partitions": ("partitions", "random", {}, 1.0),
    "rolling": ("rolling", "random", {"disk": "1000x", "name": "bench"}, 1.3),
    "online, partition order": ("online", "partition", {}, 1.1),
    "online, random order": ("online", "random", {}, 1.3),
}
#: Stages of a report, and what they are called in a table.
STAGES = {
    "sample": "sample", "prepare": "prepare an episode", "lookup": "look up and plan",
    "plan": "plan a mini-batch",
    "read": "read (any under way)", "load": "load partitions", "check": "check", "copy": "copy",
    "gather": "gather", "assemble": "assemble", "build": "build", "train": "the loop",
    "wait": "the loop waits",
}  # fmt: skip
ROOM = 24.0  # of a device of compressed RAM, over the rows' size: a compiled epoch, and two rolling ones
ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "2", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "1048576",
}  # fmt: skip


class Runs:
    """Children in cgroups of what the bare process has and a tenth of the features."""

    def __init__(
        self, files: GraphFiles, store: Path, settings: Settings, threads: int, seconds: float
    ) -> None:
        self.files, self.store = files, store
        self.given: dict[str, Any] = {
            "workspace": str(settings.workspace), "folder": str(files.folder), "nodes": files.nodes,
            "columns": files.columns, "labels": str(files.path("labels")), "train": str(files.path("train")),
            "store": str(store), "threads": threads, "fanouts": FANOUTS, "batch_size": BATCH,
            "seconds_max": seconds, "epochs": 1 if settings.quick else 2,
        }  # fmt: skip
        self.child(None, mode="bare")
        with memory_group(free_memory_bytes()) as group:
            self.child(group, mode="bare")
            self.bare_bytes = group.peak_bytes()
        self.step = self.child(None, mode="step")
        self.allowed_bytes = max(
            int(MEMORY_SHARE * files.nodes * files.row_bytes), QUICK_ALLOWED_BYTES if settings.quick else 0
        )
        self.memory_bytes = self.allowed_bytes - self.step["step_bytes"] - SLACK_BYTES
        note(
            f"bare {format_bytes(self.bare_bytes)}, beyond it {format_bytes(self.allowed_bytes)}, of which a "
            f"loader has {format_bytes(self.memory_bytes)}; largest mini-batch "
            f"{format_bytes(self.step['batch_bytes'])}, a step {format_bytes(self.step['step_bytes'])}"
        )

    def child(self, group: Any, **given: Any) -> dict[str, Any]:
        return run_child(HERE / "child_modes.py", self.given | given, group, ENVIRONMENT)

    def measure(self, name: str, bounded: bool = True) -> dict[str, Any]:
        """A way, once. ``bounded``: in its cgroup, if it has one."""
        mode = {MEMORY: "memory", ALL_CORES: "memory", MEMMAP: "memmap", ADVISED: "advised"}.get(name)
        given: dict[str, Any] = {"mode": mode}
        if name == ALL_CORES:
            given["threads"] = available_cores()
        if mode is None:
            mode, order, options, _ = WAYS[name]
            given = {"mode": mode, "order": order, "options": options, "memory_bytes": self.memory_bytes}
        names = ("features", "indptr", "indices")
        drop_caches([*(self.files.path(one) for one in names), *_row_files(self.store)])
        self.child(None, mode="bare")  # libraries are in the page cache, as they are for all
        if mode == "memory" or not bounded:
            return self.child(None, **given | ({} if bounded else {"epochs": 0}), seconds_max=1e9)
        with memory_group(self.bare_bytes + self.allowed_bytes) as group:
            try:
                found = self.child(group, **given)
            except subprocess.CalledProcessError as error:
                return {"failed": f"ended with status {error.returncode}"}
            return found | {"charged_bytes": group.peak_bytes()}


def pack(files: GraphFiles, path: Path) -> None:
    """The store, where it is not made yet."""
    if not (path / "featstore.json").exists():
        note("packing")
        graph = files.load("indptr", mapped=True), files.load("indices", mapped=True)
        options: dict[str, Any] = {"order": "ldg", "partitions": PARTITIONS, "memory": "1GiB"}
        featstore.pack(path, files.path("features"), graph=graph, **options).close()


def _row_files(path: Path) -> list[Path]:
    with featstore.open(path) as store:
        table = store.tables["features"]
        return [path / table.entry.chunk_path(chunk) for chunk in range(table.layout.chunks)]


def rates(path: Path) -> dict[str, float]:
    """Bytes a second that fio reads of the rows' files, in sequence and in pages at random."""
    files = _row_files(path)
    sequential, random = fio.sequential_read(files), fio.random_read(files, FIO_SECONDS)
    return {"sequential": sequential.bytes_per_second, "random": random.bytes_per_second}


def seconds_of(run: dict[str, Any], batches: int) -> float:
    """Of an epoch that was trained on; extrapolated where not all of it was."""
    return float(median(one["seconds"] / one["batches"] for one in run["epochs"]) * batches)


def bound(run: dict[str, Any], mode: str, rates: dict[str, float]) -> float:
    """Seconds that fio takes for as many bytes: at random online, and for what is left in the base table."""
    rows = run["report"]["row_bytes"]
    read = sum(rows.get(source, 0) for source in ("packed", "shared", "base"))
    scattered = 1.0 if mode == "online" else rows.get("base", 0) / max(1, read)
    return float(run["bytes_read"] * (scattered / rates["random"] + (1 - scattered) / rates["sequential"]))


def tell(report: Report, rounds: list[dict[str, dict[str, Any]]], runs: Runs, batches: int) -> None:
    """Claims, each the median over the rounds of a ratio within one; and the table."""
    model = [median(one["model_seconds"] for one in of[MEMORY]["epochs"]) for of in rounds]
    rows = []
    for name in (MEMORY, ALL_CORES, *WAYS, ADVISED, MEMMAP):
        found = [of[name] for of in rounds]
        if any("failed" in one for one in found):
            report.notes.append(f"{name}: {next(one['failed'] for one in found if 'failed' in one)}")
            continue
        seconds = [seconds_of(one, batches) for one in found]
        ratio = median(s / seconds_of(of[MEMORY], batches) for s, of in zip(seconds, rounds, strict=True))
        line: list[Any] = [
            name,
            median(seconds),
            ratio,
            *[None] * 5,
            format_bytes(max(one["peak_bytes"] for one in found)),
            None,
        ]
        if "charged_bytes" in found[0]:
            line[-1] = format_bytes(max(one["charged_bytes"] for one in found))
        if name in WAYS:
            mode, _, _, bar = WAYS[name]
            alone = [seconds_of({"epochs": [one["alone"]]}, batches) for one in found]
            stage = median(s / max(a, m) for s, a, m in zip(seconds, alone, model, strict=True))
            bounds = [bound(one, mode, of["rates"]) for one, of in zip(found, rounds, strict=True)]
            of_limit = median(b / a for b, a in zip(bounds, alone, strict=True))
            line[3:8] = (
                median(alone),
                median(bounds),
                of_limit,
                format_bytes(int(median(one["bytes_read"] for one in found))),
                median(one["open_seconds"] + one["first"]["seconds"] for one in found),
            )
            report.claims += [
                Claim(f"{name}: epoch over that with everything in memory", ratio, bar, "<="),
                Claim(f"{name}: epoch over its slowest stage alone", stage, STAGE_BAR, "<="),
            ]
        rows.append(line)
    report.table("An epoch of GraphSAGE", [
        "rows from", "s, training", "over memory", "s, nobody trains", "s, the disk's bound",
        "of fio's rate, nobody trains", "bytes read",
        "s, before the first epoch that counts", "peak RSS", "peak charged",
    ], rows)  # fmt: skip
    for title, key in (("", "stages"), (" that nobody trains on", "alone_stages")):
        report.table(f"Where the time goes, seconds of an epoch{title}", ["rows from", *STAGES.values()], [
            [name, *(median(of[name][key].get(stage, 0.0) for of in rounds) or None for stage in STAGES)]
            for name in WAYS if all("failed" not in of[name] for of in rounds)
        ])  # fmt: skip
    measured = min(
        (
            one["epochs"][0]["batches"]
            for of in rounds
            for name, one in of.items()
            if name in (MEMMAP, ADVISED) and "failed" not in one
        ),
        default=0,
    )
    of_largest = runs.memory_bytes / runs.step["batch_bytes"]
    report.notes.append(
        f"The model alone takes {median(model):.1f} s of an epoch of {batches} mini-batches. Within the "
        f"cgroup: {format_bytes(runs.bare_bytes)} of the bare process and "
        f"{format_bytes(runs.allowed_bytes)}, of which a loader has {format_bytes(runs.memory_bytes)}: "
        f"{of_largest:.1f} of the largest mini-batches. np.memmap is extrapolated from at least "
        f"{measured:.1f} mini-batches."
    )


@click.command()
@click.option("--threads", default=1, show_default=True, help="Of torch.")
@click.option("--seconds", default=20.0, show_default=True, help="Time limit of np.memmap.")
@click.option(
    "--graph",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A graph that there is, in place of one that is generated; its features are noise.",
)
@click.option("--zram", is_flag=True, help="Make a block device of compressed RAM for it.")
@shared_options(size="1GiB", quick_size="256MiB", rounds=2)
def main(settings: Settings, threads: int, seconds: float, graph: Path | None, zram: bool) -> None:
    """Every mode in a tenth of the memory, against everything in memory."""
    with ExitStack() as stack:
        if zram:
            at = settings.workspace / "zram"
            at = stack.enter_context(compressed_ram(int(settings.size_bytes * ROOM), at))
            settings = replace(settings, workspace=at)
            os.environ["FEATSTORE_CACHE"] = str(at / "cache")  # calibrated for it alone
        go(settings, threads, seconds, graph, zram)


def go(settings: Settings, threads: int, seconds: float, graph: Path | None, zram: bool) -> None:
    """All of it, in a workspace."""
    nodes = settings.size_bytes // (4 * COLUMNS)
    if graph is None:
        files = generate(settings.workspace / f"modes-{nodes}", nodes, nodes * EDGES_A_NODE, COLUMNS)
    else:
        files = of_file(settings.workspace / f"modes-{graph.stem}", graph, COLUMNS)
        nodes = files.nodes
    touch_memory(min(free_memory_bytes() // 2, 4 << 30))
    path = files.folder.with_suffix(".store")
    pack(files, path)
    if zram:
        note("calibrating")
        calibrate(path)
    runs = Runs(files, path, settings, threads, seconds)
    for name in WAYS:  # kernels that are compiled for the first time take memory that no epoch takes
        try:
            runs.measure(name, bounded=False)
        except subprocess.CalledProcessError as error:
            note(f"{name} cannot work in so little memory (status {error.returncode}); see above")
    rounds: list[dict[str, dict[str, Any]]] = []
    names = [MEMORY, ALL_CORES, *WAYS, ADVISED, MEMMAP]
    for number in range(settings.rounds):
        found: dict[str, Any] = {"rates": rates(path)}
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            found[name] = runs.measure(name)
            note(f"round {number + 1}/{settings.rounds}: {name}: {found[name]}")
        again = rates(path)  # a shared disk: the better of before and after counts
        found["rates"] = {how: max(rate, again[how]) for how, rate in found["rates"].items()}
        rounds.append(found)
    name, of = ("modes", "") if graph is None else ("modes_real", f": {graph.stem}")
    if zram:
        name, of = f"{name}_fast", f"{of}, on compressed RAM"
    report = Report(name, f"One loop, every mode, in a tenth of the memory{of}", {
        "nodes": nodes, "edges_a_node": len(files.load("indices", mapped=True)) / nodes,
        "row_bytes": 4 * COLUMNS, "fanouts": list(FANOUTS), "batch_size": BATCH,
        "memory_share": MEMORY_SHARE, "threads": threads, "rounds": settings.rounds, "zram": zram,
    }, settings.workspace)  # fmt: skip
    batches = rounds[0][MEMORY]["epochs"][0]["batches"]
    tell(report, rounds, runs, batches)
    if not settings.keep:
        remove(path)
    report.save(settings.out, settings.quick)


if __name__ == "__main__":
    main()
