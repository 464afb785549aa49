"""What training from partitions would cost: random collections of them, loaded whole."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.errors import BudgetError, FeatstoreError, SourceError
from featstore.loaders.costs.result import ModeCost
from featstore.loaders.costs.world import World
from featstore.loaders.mega.largest import LargestDrawn
from featstore.loaders.mega.loader import PartitionsLoader
from featstore.loaders.mega.loading import Loading
from featstore.loaders.mega.parts import Parts
from featstore.loaders.mega.schedule import Schedule, grouped
from featstore.loaders.report import NOTHING_YET
from featstore.plan.extents import plan_runs
from featstore.units import format_bytes

_CHANGES = "leaves out neighbours outside the partitions in memory"
_POPULATE_SECONDS = 0.5e-9  # for a byte of memory that is taken for the first time
_TIMED = 4  # mini-batches at least, the first of which does not count
_STAGES = ("load", "build", "sample", "gather")


class OwnSampling(NamedTuple):
    """What the mode samples by itself."""

    seeds: Any
    fanouts: Sequence[int]
    batch_size: int
    graph: str | None


def partitions_cost(world: World, own: OwnSampling | None, memory_bytes: int, seconds: float) -> ModeCost:
    """The forecast for a loader without options, which samples by itself: ``memory_bytes`` are all its own.
    One mega-batch is loaded, and sampled from, where that takes no longer than about ``seconds``. ``own``:
    None where mini-batches were given."""
    if own is None:
        reason = "it samples by itself: give seeds= and fanouts= instead of batches"
        if world.store.edge_types:
            return not_told("what it costs over several types")
        return ModeCost("partitions", False, reason, _CHANGES)
    try:
        loading = _loading(world, own, memory_bytes)
    except BudgetError as error:
        needed = error.needed_bytes
        reason = f"needs {format_bytes(needed)} of memory: {error.what}"
        return ModeCost("partitions", False, reason, _CHANGES, memory_needed_bytes=needed)
    except SourceError as error:
        return ModeCost("partitions", False, str(error), _CHANGES)
    try:
        found = _reads(world, loading)
    finally:
        loading.reader.close()
    return _cost(world, loading, found, own, memory_bytes, seconds)


def not_told(what: str) -> ModeCost:
    """The cost of the mode where nobody knows it beforehand."""
    return ModeCost(
        "partitions", False, f"{what} is not told beforehand: try it, mode='partitions'", _CHANGES
    )


def _loading(world: World, own: OwnSampling, memory_bytes: int, resident: int | None = None) -> Loading:
    parts = Parts(world.store, own.graph)
    edges = parts.drawn(parts.fanouts(own.fanouts))
    return Loading(
        world.store, parts, memory_bytes=memory_bytes, train=own.seeds, hubs=None, resident=resident,
        replaced=None, seed=0, drawn=LargestDrawn(own.batch_size, parts.seed_table(own.seeds), edges),
        allocate=False, **world.reading,
    )  # fmt: skip


def _least(world: World, own: OwnSampling, resident: int | None = None) -> int | None:
    """The smallest memory that works; with so many partitions in memory at a time."""
    try:
        _loading(world, own, 1, resident).reader.close()
    except BudgetError as error:
        return error.needed_bytes
    except FeatstoreError:
        return None
    return None


class _Reads(NamedTuple):
    """Of all steps of an epoch."""

    steps: int
    resident: int
    reads: int
    bytes_read: int


def _reads(world: World, loading: Loading) -> _Reads:
    sizes = loading.sizes
    schedule = Schedule(loading.partitions, sizes.resident, sizes.replaced, 0, 0)
    reads = bytes_read = 0
    for index in range(schedule.steps):
        for name, part, in_blocks in loading.runs(schedule.step(index)):
            layout = world.store.table(name).layout
            for block in _blocks(part, sizes.block_edges) if in_blocks else [part]:
                found = plan_runs(block, None, layout, loading.reader.budget.extent_bytes_max)
                reads, bytes_read = reads + found.reads, bytes_read + found.bytes_read
    return _Reads(schedule.steps, schedule.resident, reads, bytes_read)


def _cost(
    world: World, loading: Loading, found: _Reads, own: OwnSampling, memory_bytes: int, seconds: float
) -> ModeCost:  # fmt: skip
    once, count = found.steps == 1, world.batches  # once: all of it fits, and stays
    prices = world.prices_beside(loading.staging_bytes)
    reading = prices.busy(found.reads, found.bytes_read)
    hubs = sum(one.hubs * loading.parts.row_bytes(name) for name, one in loading.rows.items())
    remark = (
        "all partitions fit, and are read once" if once
        else f"{found.resident} of {len(loading.partitions)} partitions in memory at a time"
    )  # fmt: skip
    half = -(-len(loading.partitions) // 2)
    if found.resident < half and (needed := _least(world, own, half)) is not None:
        remark += f"; less accurate than half of them, which take {needed:,} bytes"
    trial = 2 * reading / found.steps + memory_bytes * _POPULATE_SECONDS
    if trial <= seconds:
        load, build, batch = _tried(world, own, memory_bytes, seconds)
        reading = reading if load is None else found.steps * load
    else:
        build, batch = 0.0, world.seen.batch_seconds + world.asked_bytes * world.copy_byte_seconds
        remark += "; sampling in them takes at most as long as online"
    stages = {
        "read": 0.0 if once else reading, "build": 0.0 if once else found.steps * build,
        "sample": count * batch, "train": count * world.train_seconds,
    }  # fmt: skip
    cores = stages["build"] + stages["sample"] + stages["train"]
    cores += 0.0 if once else prices.cpu(found.reads, found.bytes_read)
    return ModeCost(
        "partitions", True, remark, "" if once else _CHANGES,
        prepare_seconds=reading + build if once else prices.busy(0, hubs),
        epoch_seconds=world.epoch(stages, cores, stages["read"]), seconds=stages, cpu_seconds=cores,
        bytes_read=0 if once else found.bytes_read, reads=0 if once else found.reads,
        prepare_bytes_read=hubs + (found.bytes_read if once else 0),
        memory_needed_bytes=_least(world, own), extrapolated=False,
    )  # fmt: skip


def _tried(
    world: World, own: OwnSampling, memory_bytes: int, seconds: float
) -> tuple[float | None, float, float]:
    """Seconds in which a mega-batch after the first is loaded (None where there was no time for one), one's
    graph built, and a mini-batch of it sampled and gathered."""
    made, begin, first = 0, time.perf_counter(), NOTHING_YET
    drawn = sets = 0  # in the first mega-batch, in which memory is touched for the first time
    with PartitionsLoader(
        world.store, own.fanouts, batch_size=own.batch_size, memory=memory_bytes, train=own.seeds,
        graph=own.graph, **world.reading,
    ) as loader:  # fmt: skip
        for _ in loader:
            made += 1
            if loader.sets_begun > 1 and not sets:
                first, drawn, sets = loader.report(), made, loader.sets_begun
            if time.perf_counter() - begin > seconds / 2 and made >= _TIMED:
                break
        spent, begun = loader.report().seconds, loader.sets_begun
    alone = begun == sets or made == drawn
    if alone:
        first, drawn, sets = NOTHING_YET, -1, 0  # one is made ahead
    took = {name: spent.get(name, 0.0) - first.seconds.get(name, 0.0) for name in _STAGES}
    sets, drawn = max(1, begun - sets), made - drawn
    load = None if alone or not took["load"] else took["load"] / sets
    return load, took["build"] / sets, (took["sample"] + took["gather"]) / drawn


def _blocks(runs: NDArray[np.int64], block_edges: int) -> list[NDArray[np.int64]]:
    """The same runs in the blocks in which they are read."""
    groups = grouped([("", int(low), int(high)) for low, high in runs], block_edges)
    return [np.array([(low, high) for _, low, high in group]) for group in groups]
