"""How many threads are to read: reads a second by their number, in turns."""

from __future__ import annotations

from collections.abc import Mapping

from featstore.base.progress import OnStep
from featstore.base.system import available_cores
from featstore.engine import EngineName
from featstore.measure.lane_bench import LaneBench
from featstore.storage.store import OpenStore, Table
from featstore.units import PAGE_BYTES

#: Twice as many threads are to be so much faster to be taken: they are training's, too.
_PAYS = 1.15
_THREAD_ROUNDS = 3
_PILOT_READS = 256


def measure_threads(
    store: OpenStore, table: Table, engine: EngineName, seconds: float, tell: OnStep
) -> tuple[int, dict[int, float]]:
    """How many threads are to read, and reads of a page a second by their number, the best of some rounds in
    turns. Twice as many are taken where they are faster by more than :data:`_PAYS`."""
    if engine != "uring":
        return 1, {}
    cores = available_cores()
    counts = [1 << k for k in range(cores.bit_length()) if 1 << k <= cores]
    if len(counts) == 1:
        return 1, {}
    benches = {count: LaneBench(store, table, engine, threads=count) for count in counts}
    try:
        reads = min(_PILOT_READS, benches[1].places(PAGE_BYTES))
        benches[1].run(PAGE_BYTES, reads)  # which compiles and wakes what there is
        each = seconds / (len(counts) * _THREAD_ROUNDS)
        reads = int(reads / benches[1].run(PAGE_BYTES, reads) * each)
        reads = max(1, min(benches[1].places(PAGE_BYTES), reads))
        rates = dict.fromkeys(counts, 0.0)
        for turn in range(_THREAD_ROUNDS):
            for count, bench in benches.items():
                rates[count] = max(rates[count], reads / bench.run(PAGE_BYTES, reads))
            tell("measure threads", turn + 1, _THREAD_ROUNDS)
    finally:
        for bench in benches.values():
            bench.close()
    return chosen_threads(rates), rates


def chosen_threads(rates: Mapping[int, float]) -> int:
    """The number of threads of which twice as many do not pay, by reads a second."""
    best = 1
    for count in sorted(rates):
        if count > 1 and rates[count] < rates[best] * _PAYS:
            break
        best = count
    return best
