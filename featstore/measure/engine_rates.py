"""How is to be read, and by how many threads: reads a second by engine and by number of rings, in turns.

Engines and numbers take turns over some rounds, and a ratio is looked at within each round. Twice as many
rings, or another engine than io_uring, are taken where they are faster by :data:`_PAYS` in all rounds but
one: cores are training's, too. Where the rounds do not agree, or other programs had the cores meanwhile, the
question stays open, and :attr:`Decision.open_because` says so: a choice that a busy machine makes would be
kept for as long as the calibration.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from featstore.base.memory import busy_core_seconds
from featstore.base.progress import OnStep
from featstore.base.system import available_cores
from featstore.engine import EngineName
from featstore.measure.lane_bench import LaneBench
from featstore.storage.store import OpenStore, Table
from featstore.units import PAGE_BYTES

#: So much faster is more to be, to be taken.
_PAYS = 1.15
_ENGINE_ROUNDS = 5
_PILOT_READS = 256
_OTHERS_CORES = 0.25  # that other programs may have, of those that all rings would take


@dataclass(frozen=True)
class EngineRate:
    """Reads of a page a second in each round, and the time of the cores that one read took (the median), with
    its checksum and copying its row. ``threads``: rings of io_uring; None for what another engine takes."""

    engine: EngineName
    threads: int | None
    rates: tuple[float, ...]
    cpu_seconds: float

    @property
    def reads_per_second(self) -> float:
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """(fastest - slowest) / median of the rounds."""
        return (max(self.rates) - min(self.rates)) / self.reads_per_second

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "engine": self.engine, "threads": self.threads, "reads_per_second": self.reads_per_second,
            "read_cpu_seconds": self.cpu_seconds, "spread": self.spread,
        }  # fmt: skip


@dataclass(frozen=True)
class Decision:
    """What was found to be best. ``threads`` None: as many as are busy. ``open_because``: why something is
    left open; "" where nothing is."""

    best: EngineRate
    threads: int | None
    open_because: str = ""


def measure_engines(
    store: OpenStore, table: Table, engines: Sequence[EngineName], seconds: float, tell: OnStep
) -> tuple[tuple[EngineRate, ...], float]:
    """Rates by engine, and for io_uring by the number of rings, 1, 2, 4 ... up to the cores; and how many
    cores other programs had meanwhile."""
    benches: dict[tuple[EngineName, int | None], LaneBench] = {}
    try:
        for engine in engines:
            for count in _counts() if engine == "uring" else [None]:
                bench = benches[engine, count] = LaneBench(store, table, engine, threads=count)
                if count is not None and bench.threads != count:  # there is no room for more
                    benches.pop((engine, count)).close()
                    break
        each = seconds / (len(benches) * _ENGINE_ROUNDS)
        reads = {way: _pilot(bench, each) for way, bench in benches.items()}
        rates: dict[tuple[EngineName, int | None], list[float]] = {way: [] for way in benches}
        cpu: dict[tuple[EngineName, int | None], list[float]] = {way: [] for way in benches}
        own, everybody, begin = time.process_time(), busy_core_seconds(), time.perf_counter()
        for turn in range(_ENGINE_ROUNDS):
            for way, bench in benches.items():
                rates[way].append(reads[way] / bench.run(PAGE_BYTES, reads[way]))
                cpu[way].append(bench.cpu_seconds / reads[way])
            tell("measure engines", turn + 1, _ENGINE_ROUNDS)
        wall = time.perf_counter() - begin
        others = max(0.0, busy_core_seconds() - everybody - (time.process_time() - own)) / wall
    finally:
        for bench in benches.values():
            bench.close()
    found = (EngineRate(*way, tuple(rates[way]), statistics.median(cpu[way])) for way in benches)
    return tuple(found), others


def decide_engine(found: Sequence[EngineRate], others_cores: float) -> Decision:
    """The engine to take and how many threads, of what was measured in turns."""
    rings = sorted((one for one in found if one.engine == "uring"), key=lambda one: one.threads or 0)
    rest = [one for one in found if one.engine != "uring"]
    best = rings[0] if rings else rest[0]
    if len(found) == 1:
        return Decision(best, best.threads)
    cores = os.cpu_count() or 1
    threads_most = max((one.threads or 1 for one in rings), default=1)
    if others_cores > max(0, cores - threads_most) + _OTHERS_CORES:
        return Decision(best, None, f"other programs had {others_cores:.1f} of {cores} cores meanwhile")
    threads, open_because = best.threads, ""
    for one in rings[1:]:
        more = pays(one, best)
        if more is None:
            threads = None
            open_because = f"in some rounds {one.threads} rings were faster than {best.threads}, in some not"
        if not more:
            break
        best, threads = one, one.threads
    for one in rest if rings else rest[1:]:
        more = pays(one, best)
        if more is None and not open_because:
            open_because = f"in some rounds engine {one.engine} was faster than {best.engine}, in some not"
        if more:
            best, threads = one, None
    return Decision(best, threads, open_because)


def pays(more: EngineRate, less: EngineRate) -> bool | None:
    """Whether it is so much faster that it is to be taken, in all rounds but one; None where they differ."""
    faster = [a >= _PAYS * b for a, b in zip(more.rates, less.rates, strict=True)]
    if len(faster) - 1 > sum(faster) > 1:
        return None
    return 2 * sum(faster) > len(faster)


def _counts() -> list[int | None]:
    cores = available_cores()
    return [1 << k for k in range(cores.bit_length()) if 1 << k <= cores]


def _pilot(bench: LaneBench, seconds: float) -> int:
    """How many reads fill the time; this also compiles, wakes what there is, and rings find their number."""
    most = bench.places(PAGE_BYTES)
    reads = min(_PILOT_READS, most)
    bench.run(PAGE_BYTES, reads)
    return max(1, min(most, int(reads / bench.run(PAGE_BYTES, reads) * seconds)))
