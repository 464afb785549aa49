"""``compiled.py``, the parts that train: the same losses as in memory, the loop's time by stage, and an epoch
in little memory."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from child_compiled import load_kernels
from compiled_data import NARROW, TRAIN_MEMORY, WIDE, Built, Data, PaperPolicy
from compiled_storage import CACHE_SHARE, OURS, PAPER
from harness import HERE, Claim, Report, Settings, note
from system import drop_caches, free_memory_bytes, memory_group, run_child

import featstore
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.rolling import RollingLoader
from featstore.units import format_bytes

STAGE_BAR, ROLLING_BAR = 1.15, 1.25
ROLLING_EPOCHS = 4
MEMORY_SHARES, DISK_LIMITS = (0.05, 0.1, 0.2, 0.5), ("2x", "3x", "5x", "unlimited")
CURVE_SECONDS = 12.0  # of an epoch that is a point of a curve; extrapolated where it is longer
MAIN_SHARE, UNLIMITED = 0.1, "unlimited"
ONLINE = "online reader"
MEMMAP, ADVISED = "np.memmap", "np.memmap, MADV_RANDOM"
THREADS = {
    "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_MMAP_THRESHOLD_": "1048576",
}  # fmt: skip
SLACK_BYTES = 4 << 20  # of a training process beyond what was measured: fragments, the trace's index
QUICK_ALLOWED_BYTES = 48 << 20


# Training.


def measure_training(report: Report, data: Data, settings: Settings) -> None:
    """Losses bit by bit, the loop against its slowest stage, and rolling episodes."""
    import torch
    from compiled_model import Training

    torch.set_num_threads(1)
    trace, labels = data.trace(WIDE), data.files.load("labels")
    built = data.compile(
        trace, "training", train_memory=TRAIN_MEMORY, cache=int(CACHE_SHARE * data.table_bytes)
    )
    try:
        with CompiledLoader(built.compiled, memory=TRAIN_MEMORY, tensors=False) as loader:
            drop_caches(built.files())
            training = Training(data.files.columns, labels)
            begin = time.perf_counter()
            for batch in loader:
                training.step(batch.x, batch.sample)
                del batch
            seconds = time.perf_counter() - begin
            stages = loader.report()
    finally:
        built.remove()
    note(f"compiled: {seconds:.1f} s, {stages.to_dict()}")
    memory = in_memory(data, trace, Training(data.files.columns, labels))
    same = sum(a == b for a, b in zip(training.losses, memory.losses, strict=True))
    slowest = stages.seconds[stages.slowest]
    report.claims += [
        Claim(
            "steps whose loss is bit by bit that of a run in memory, of all", same / len(memory.losses), 1.0
        ),
        Claim(
            f"time of an epoch over its slowest stage ({stages.slowest})", seconds / slowest, STAGE_BAR, "<="
        ),
    ]
    report.table("Stages of an epoch, one thread of torch", ["stage", "s"], [
        ["epoch", seconds],
        *[[name, value] for name, value in sorted(stages.seconds.items(), key=lambda item: -item[1])],
        ["in memory: model alone", memory.seconds],
    ])  # fmt: skip
    rolling(report, data, settings, seconds, labels)


def in_memory(data: Data, trace: featstore.Trace, training: Any) -> Any:
    """The same steps with rows from memory."""
    x = data.files.load("features")
    for ids, sample in trace:
        training.step(x[next(iter(ids.values()))], sample)
    return training


def rolling(report: Report, data: Data, settings: Settings, compiled_seconds: float, labels: Any) -> None:
    """Epochs of fresh mini-batches, each packed while the one before trains."""
    from compiled_data import pairs
    from compiled_model import Training

    training, sampler = Training(data.files.columns, labels), data.sampler()
    count, epochs, waits = len(data.batches(WIDE, 0, sampler)), [], []
    loader = RollingLoader(
        data.store, lambda k: pairs(data.batches(WIDE, k, sampler)), memory=2 * TRAIN_MEMORY,
        cache=int(CACHE_SHARE * data.table_bytes), loader={"tensors": False},
    )  # fmt: skip
    with loader:
        begin = time.perf_counter()
        for number, batch in enumerate(loader):
            training.step(batch.x, batch.sample)
            del batch
            if (number + 1) % count == 0:
                now = time.perf_counter()
                epochs.append(now - begin)
                waits.append(loader.waiting_seconds[-1])
                begin = now
                note(f"rolling epoch {len(epochs)}: {epochs[-1]:.1f} s, of which waiting {waits[-1]:.1f} s")
                if len(epochs) == (2 if settings.quick else ROLLING_EPOCHS):
                    break
        prepared = list(loader.preparing_seconds)
    report.claims += [
        Claim(
            "rolling episodes, epochs two and later over the compiled epoch, worst",
            max(epochs[1:]) / compiled_seconds,
            ROLLING_BAR,
            "<=",
        ),
        Claim(
            "mini-batches that have the same seeds but other neighbours in another epoch, of all",
            fresh_share(data, sampler),
            1.0,
        ),
    ]
    report.table(
        "Rolling episodes",
        ["epoch", "s", "of which waiting for its packing, s", "its packing, s"],
        [
            [k + 1, seconds, wait, prepared[k] if k < len(prepared) else None]
            for k, (seconds, wait) in enumerate(zip(epochs, waits, strict=True))
        ],
    )


def fresh_share(data: Data, sampler: Any, batches: int = 20) -> float:
    """Of mini-batches around the same seeds, how many have other nodes in the next epoch."""
    first, differ = data.batches(WIDE, 0, sampler), 0
    numbers = np.linspace(0, len(first) - 1, min(batches, len(first))).astype(int)
    for number in numbers:
        seeds = first.seeds(int(number))
        one, other = (np.sort(sampler.sample(seeds, int(number), epoch=epoch).node) for epoch in (0, 1))
        differ += not np.array_equal(one, other)
    return differ / len(numbers)


# End to end.


class EndToEnd:
    """Epochs in memory cgroups. ``points``: results by what was measured, those that are there are kept."""

    def __init__(
        self,
        data: Data,
        settings: Settings,
        points: dict[str, Any],
        seconds_max: float,
        save: Callable[[], None],
    ) -> None:
        self.data, self.settings, self.points, self.seconds_max, self._save = (
            data,
            settings,
            points,
            seconds_max,
            save,
        )
        self.path = data.workspace / f"compiled-{data.nodes}-{NARROW}.trace"
        if "record_seconds" not in points or not self.path.exists():
            points["record_seconds"] = data.record(NARROW, self.path)
        self.given = {
            "workspace": str(settings.workspace), "columns": data.files.columns,
            "store": str(data.store.path), "trace": str(self.path), "labels": str(data.files.path("labels")),
            "folder": str(data.files.folder), "nodes": data.nodes, "threads": 1,
        }  # fmt: skip
        load_kernels(settings.workspace, data.files.columns)
        if "bare" not in points:
            points["bare"] = self._bare()

    def child(self, **given: Any) -> dict[str, Any]:
        return run_child(HERE / "child_compiled.py", self.given | given, None, THREADS)

    def _bare(self) -> dict[str, Any]:
        """What a process takes with imports and kernels, and what a step on the largest mini-batch takes
        beyond its rows."""
        self.child(mode="bare")  # libraries are in the page cache then, as they are before each measurement
        with memory_group(free_memory_bytes()) as group:
            bare = run_child(HERE / "child_compiled.py", self.given | {"mode": "bare"}, group, THREADS)
            charged = group.peak_bytes()
        step = self.child(mode="step")
        found = {
            "charged_bytes": charged,
            "peak_bytes": bare["peak_bytes"],
            "step_bytes": step["step_bytes"],
            "batch_bytes": step["batch_bytes"],
        }
        note(f"bare process: {found}")
        return found

    def allowed(self, share: float) -> int:
        """Bytes that a process has beyond the bare one."""
        return max(int(share * self.data.table_bytes), QUICK_ALLOWED_BYTES if self.settings.quick else 0)

    def budget(self, share: float) -> int:
        """What of them is left for a loader."""
        return self.allowed(share) - int(self.points["bare"]["step_bytes"]) - SLACK_BYTES

    def point(self, design: str, share: float, disk: str = UNLIMITED) -> dict[str, Any]:
        """A design's epochs within memory and disk, measured unless they have been."""
        key = f"{design}|{share}|{disk if design in (OURS, PAPER) else UNLIMITED}"
        if key not in self.points:
            note(f"{key} ...")
            self.points[key] = self._measure(design, share, disk)
            note(f"{key}: {self.points[key]}")
            self._save()
        found: dict[str, Any] = self.points[key]
        return found

    def _measure(self, design: str, share: float, disk: str) -> dict[str, Any]:
        budget = self.budget(share)
        if design in (OURS, PAPER):
            try:
                with featstore.Trace(self.path) as trace:
                    built = self._compile(trace, design, share, disk)
            except featstore.errors.BudgetError as error:
                return {
                    "failed": (
                        f"needs a budget of {format_bytes(error.needed_bytes)}, has {format_bytes(budget)}"
                    )
                }
            try:
                told = {"compile_seconds": built.seconds, "compile_memory_bytes": built.memory_bytes,
                        "forecast_seconds": built.forecast_seconds,
                        "disk_bytes": built.forecast["disk_bytes"],
                        "missed_rows": built.forecast["missed_rows"],
                        "asked_rows": built.forecast["asked_rows"]}  # fmt: skip
                limit = 1e9 if (share, disk) == (MAIN_SHARE, UNLIMITED) else CURVE_SECONDS
                return (
                    self._run(share, mode="compiled", name=built.compiled.pack.path.name, seconds_max=limit)
                    | told
                )
            finally:
                built.remove()
        if design == ONLINE:
            limit = self.seconds_max if share == MAIN_SHARE else CURVE_SECONDS
            return self._run(share, mode="online", memory_bytes=budget, seconds_max=limit)
        return self._run(
            share, mode="advised" if design == ADVISED else "memmap", seconds_max=self.seconds_max
        )

    def _compile(self, trace: featstore.Trace, design: str, share: float, disk: str) -> Built:
        options: dict[str, Any] = {"train_memory": self.budget(share), "memory": self.allowed(share)}
        if disk != UNLIMITED:
            options["disk"] = int(disk.removesuffix("x")) * self.data.table_bytes
        if design == PAPER:
            options |= {"residency": "fixed", "policy": PaperPolicy().policy}
        return self.data.compile(trace, "end", **options)

    def _run(self, share: float, **given: Any) -> dict[str, Any]:
        """A child in its cgroup; all that was cached dropped, but for the libraries."""
        limit = int(self.points["bare"]["charged_bytes"]) + self.allowed(share)
        drop_caches([self.data.files.path("features"), *self.data.base_files()])
        self.child(mode="bare")
        with memory_group(limit) as group:
            try:
                found = run_child(HERE / "child_compiled.py", self.given | given, group, THREADS)
            except subprocess.CalledProcessError as error:
                return {"failed": f"ended with status {error.returncode} in {format_bytes(limit)}"}
            return found | {"charged_bytes": group.peak_bytes(), "limit_bytes": limit}


def epoch_seconds(point: dict[str, Any], what: str, batches: int) -> float | None:
    """Seconds of an epoch, extrapolated where a part was measured; None where it does not work."""
    return None if "failed" in point else float(point[what]["seconds"] / point[what]["batches"] * batches)


def measure_end(
    report: Report,
    data: Data,
    settings: Settings,
    points: dict[str, Any],
    seconds_max: float,
    save: Callable[[], None],
) -> None:
    """Epochs in a memory cgroup of the bare process and a share of the features."""
    end = EndToEnd(data, settings, points, seconds_max, save)
    shares = MEMORY_SHARES[1:2] if settings.quick else MEMORY_SHARES
    limits = DISK_LIMITS[2:] if settings.quick else DISK_LIMITS
    mains = {design: end.point(design, MAIN_SHARE) for design in (OURS, PAPER, ONLINE, ADVISED, MEMMAP)}
    by_memory = {d: [end.point(d, share) for share in shares] for d in (OURS, PAPER, ONLINE)}
    by_disk = {d: [end.point(d, MAIN_SHARE, disk) for disk in limits] for d in (OURS, PAPER, ONLINE)}
    batches = len(data.batches(NARROW))
    tell_end(report, points, mains, batches)
    curve(report, "memory", [f"{s:.0%}" for s in shares], by_memory, batches)
    curve(report, "disk", list(limits), by_disk, batches)


def tell_end(report: Report, points: dict[str, Any], mains: dict[str, Any], batches: int) -> None:
    """The claims and the table of an epoch in a tenth of the memory."""
    ours = mains[OURS]
    if "failed" in ours:
        report.notes.append(f"ours: {ours['failed']}")
        return
    trained, loaded = (epoch_seconds(ours, what, batches) or 0.0 for what in ("train", "load"))
    before = {d: points["record_seconds"] + mains[d].get("compile_seconds", 0.0) for d in (OURS, PAPER)}
    rows: list[list[Any]] = []
    for design, point in mains.items():
        if "failed" in point:
            rows.append([design, None, None, None, point["failed"], None, None, None, None])
            continue
        train, load = (
            epoch_seconds(point, "train", batches) or 0.0,
            epoch_seconds(point, "load", batches) or 0.0,
        )
        of = point["train"]["batches"]
        pays = None
        if design != OURS:
            saved, extra = train - trained, before[OURS] - before.get(design, 0.0)
            pays = max(0.0, extra / saved) if saved > 0 else None
            report.claims += [
                Claim(
                    f"epoch over {design} over ours, in a cgroup of the bare process + {MAIN_SHARE:.0%}",
                    train / trained,
                ),
                Claim(f"the same where nobody trains, {design}", load / loaded),
            ]
        rows.append(
            [
                design,
                train,
                load,
                point["train"]["model_seconds"] / of * batches,
                f"{of:.1f} of {batches}",
                before.get(design, 0.0),
                pays,
                format_bytes(point["peak_bytes"]),
                format_bytes(point["charged_bytes"]),
            ]
        )
    report.table(
        f"An epoch of GraphSAGE in the bare process + {MAIN_SHARE:.0%} of the features",
        [
            "rows from",
            "s, training",
            "s, nobody trains",
            "s, model",
            "mini-batches measured",
            "s, beforehand",
            "epochs until ours pays",
            "peak RSS",
            "peak charged",
        ],
        rows,
    )
    bare = points["bare"]
    report.notes.append(
        "Bare process (Python, numpy, torch, featstore and its kernels): RSS "
        f"{format_bytes(bare['peak_bytes'])}, charged to its cgroup "
        f"{format_bytes(bare['charged_bytes'])}. Of what is allowed beyond it, "
        f"{format_bytes(bare['step_bytes'] + SLACK_BYTES)} are left to the model; loaders have the "
        "rest, mini-batches included. Mini-batches' graphs come from the same trace in all. "
        "Beforehand: recording and compiling."
    )


def curve(
    report: Report, name: str, places: list[str], found: dict[str, list[dict[str, Any]]], batches: int
) -> None:
    """A table of times against memory or disk, from which the plot is made."""
    columns, rows = [name], [[place] for place in places]
    for design, points in found.items():
        for what, text in (("train", "s, training"), ("load", "s, nobody trains")):
            columns.append(f"{design}, {text}")
            for row, point in zip(rows, points, strict=True):
                row.append(epoch_seconds(point, what, batches))  # type: ignore[arg-type]
    report.table(f"An epoch against {name}", columns, rows)
