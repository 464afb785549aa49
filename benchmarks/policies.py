"""What a feature buffer's slot map costs: nanoseconds an id for each policy, beside copying the same rows.

    python benchmarks/policies.py

A mini-batch of 500,000 distinct ids is looked up, pinned, given slots for what is missing, completed and
released, on one core: all that the map does for a mini-batch, reading excepted. Ids are drawn from a skewed
distribution over four times as many rows as there are slots. Each policy has its own map, which is filled
before the first round and sees the same mini-batches. In the same rounds ``torch.index_select`` copies the
rows of 512 B in the slots that the mini-batch was given, on one thread: what a mini-batch costs at least when
all its rows are in memory.
"""

from __future__ import annotations

import time
from statistics import median

import click
import numpy as np
from harness import Claim, Contender, Report, Sample, Settings, measure_rounds, note, shared_options
from numpy.typing import NDArray
from peers.torch_select import IndexSelect
from system import cpu_seconds

from featstore.tiers.slots import layout
from featstore.tiers.slots import slots as sl

ROW_BYTES = 512
IDS = 500_000
TABLE_ROWS_PER_SLOT = 4
FILLING = 6  # mini-batches before the first round
DELTA = 4  # SCORE: so that its rounds are in the measurement
BARS = {"fifo": 40.0, "clock": 40.0, "sieve": 40.0}
OTHER_BAR = 80.0
IN_MEMORY = "rows in memory"
TORCH = "torch.index_select"

Trace = list[NDArray[np.int64]]


def skewed_trace(rows: int, batches: int, ids: int) -> Trace:
    """Mini-batches of distinct rows, few of which are wanted much more than the others."""
    rng = np.random.default_rng(0)
    names = rng.permutation(rows)
    made = []
    for _ in range(batches):
        drawn = np.unique((rng.power(0.35, 3 * ids) * rows).astype(np.int64))
        if len(drawn) < ids:
            raise AssertionError(f"{len(drawn):,} distinct rows of {ids:,}")
        made.append(names[rng.permutation(drawn)[:ids]])
    return made


def next_uses(trace: Trace, rows: int) -> list[NDArray[np.int32]]:
    """For each mini-batch the mini-batch that uses each of its rows next, or NEVER."""
    later = np.full(rows, layout.NEVER, np.int32)
    found = []
    for batch in range(len(trace) - 1, -1, -1):
        found.append(later[trace[batch]])
        later[trace[batch]] = batch
    return found[::-1]


class Runner:
    """One policy's map, which goes through the trace."""

    def __init__(self, name: str, slots: int, trace: Trace, uses: list[NDArray[np.int32]]) -> None:
        options = {"batches": len(trace)} if name == "min" else {"delta": DELTA} if name == "score" else {}
        self.map = layout.make_slot_map(slots, layout.POLICIES[name], **options)
        sl.load_kernels(self.map)
        self.name, self.trace, self.uses = name, trace, uses
        ids = len(trace[0])
        self.slots, self.missed, self.waits = (np.zeros(ids, np.int32) for _ in range(3))
        for batch in range(FILLING):
            self.step(batch)
        self.map.counts[[layout.HITS, layout.MISSES]] = 0

    def step(self, batch: int) -> Sample:
        rows, uses = self.trace[batch], self.uses[batch] if self.name == "min" else sl.NO_NEXT_USE
        cpu, begin = cpu_seconds(), time.perf_counter()
        reads, _ = sl.acquire(self.map, rows, self.slots, self.missed, self.waits, uses)
        acquired = time.perf_counter()
        sl.complete(self.map, self.slots[self.missed[:reads]])
        sl.release(self.map, self.slots)
        seconds, cpu = time.perf_counter() - begin, cpu_seconds() - cpu
        if reads < 0 or not (self.map.slots["row"][self.slots] == rows).all():
            raise AssertionError(f"{self.name}: a row is not in its slot")
        return Sample(len(rows), seconds, cpu, {"acquire_seconds": acquired - begin, "reads": reads})

    def hit_rate(self) -> float:
        hits, misses = (int(self.map.counts[at]) for at in (layout.HITS, layout.MISSES))
        return hits / (hits + misses)


def torch_contender(slots: int, runner: Runner) -> Contender:
    """Copy the rows in the slots that ``runner`` was given last."""
    import torch

    torch.set_num_threads(1)
    rows = np.zeros((slots, ROW_BYTES // 4), np.float32)
    rows[:, 0] = np.arange(slots) % 2**20
    select, out = IndexSelect(rows), np.zeros((len(runner.slots), ROW_BYTES // 4), np.float32)

    def run(_: int) -> Sample:
        positions = runner.slots.astype(np.int64)
        cpu, begin = cpu_seconds(), time.perf_counter()
        select.read(positions, out)
        seconds, cpu = time.perf_counter() - begin, cpu_seconds() - cpu
        if not (out[:, 0] == positions % 2**20).all():
            raise AssertionError("a wrong row")
        return Sample(len(positions), seconds, cpu)

    run(0)
    return Contender(TORCH, "rows/s", IN_MEMORY, run)


@click.command()
@shared_options(size="512MiB", quick_size="64MiB", rounds=9)
def main(settings: Settings) -> None:
    """The cost of lookup and update for each policy of the feature buffer."""
    slots = settings.size_bytes // ROW_BYTES
    ids, rows = min(IDS, slots // 2), slots * TABLE_ROWS_PER_SLOT
    note("drawing mini-batches")
    trace = skewed_trace(rows, FILLING + settings.rounds, ids)
    uses = next_uses(trace, rows)
    runners = {name: Runner(name, slots, trace, uses) for name in layout.POLICIES}
    report = Report("policies", "Policies of the feature buffer", {
        "slots": slots, "row_bytes": ROW_BYTES, "table_rows": rows, "ids": ids, "rounds": settings.rounds,
        "filling": FILLING, "delta": DELTA,
    }, settings.workspace)  # fmt: skip
    contenders = [
        Contender(name, "ids/s", IN_MEMORY, lambda number, runner=runner: runner.step(FILLING + number))
        for name, runner in runners.items()
    ]
    series = measure_rounds([*contenders, torch_contender(slots, runners["fifo"])], settings.rounds)
    report.series = list(series.values())

    def nanoseconds(name: str) -> float:
        return median(s.seconds / s.amount for s in series[name].samples) * 1e9

    for name in runners:
        bar = BARS.get(name, OTHER_BAR)
        report.claims.append(Claim(f"{name}: lookup and update", nanoseconds(name), bar, "<=", "ns an id"))
    report.claims.append(Claim(f"{TORCH} of the same rows", nanoseconds(TORCH), None, "<=", "ns a row"))
    report.table(
        "One mini-batch",
        ["policy", "acquire, ns an id", "all, ns an id", "of index_select", "hit rate", "map, bytes a slot"],
        [
            [
                name,
                round(median(s.extra["acquire_seconds"] / s.amount for s in series[name].samples) * 1e9, 1),
                round(nanoseconds(name), 1),
                f"{nanoseconds(name) / nanoseconds(TORCH):.2f}",
                f"{runner.hit_rate():.3f}",
                round(layout.slot_map_bytes(slots, layout.POLICIES[name], len(trace)) / slots, 1),
            ]
            for name, runner in runners.items()
        ],
    )
    report.notes = [
        "One core each; torch copies with one thread. All: acquire, complete and release of a "
        "mini-batch. Policies see the ids alone, but for min, which is told each row's next use.",
    ]
    report.save(settings.out, settings.quick)


if __name__ == "__main__":
    main()
