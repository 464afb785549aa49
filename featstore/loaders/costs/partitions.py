"""What training from partitions would cost: random collections of them, loaded whole."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from featstore.errors import BudgetError, FeatstoreError, SourceError
from featstore.loaders.costs.result import ModeCost
from featstore.loaders.costs.world import World
from featstore.loaders.mega.loading import Loading, grouped
from featstore.loaders.mega.schedule import Schedule
from featstore.plan.extents import plan_runs
from featstore.storage.relations import graph_of
from featstore.units import PAGE_BYTES, format_bytes

_CHANGES = "leaves out neighbours outside the partitions in memory"
_BUILD_SECONDS = 4e-9  # of a core, for each edge that is looked at


def partitions_cost(world: World, seeds: object, graph: str | None, memory_bytes: int) -> ModeCost:
    """The forecast for a loader without options, which samples by itself: ``memory_bytes`` are all its own.
    ``seeds``: None where mini-batches were given."""
    if seeds is None:
        return ModeCost(
            "partitions", False, "it samples by itself: give seeds= and fanouts= instead of batches", _CHANGES
        )
    try:
        loading = _loading(world, seeds, graph, memory_bytes)
    except BudgetError as error:
        needed = error.needed_bytes
        reason = f"needs {format_bytes(needed)} of memory: {error.what}"
        return ModeCost("partitions", False, reason, _CHANGES, memory_needed_bytes=needed)
    except SourceError as error:
        return ModeCost("partitions", False, str(error), _CHANGES)
    try:
        return _cost(world, loading, _least(world, seeds, graph))
    finally:
        loading.reader.close()


def _loading(world: World, seeds: object, graph: str | None, memory_bytes: int) -> Loading:
    return Loading(
        world.store, graph_of(world.store, graph), memory_bytes=memory_bytes, train=seeds, hubs=None,
        resident=None, replaced=None, seed=0, allocate=False, **world.reading,
    )  # fmt: skip


def _least(world: World, seeds: object, graph: str | None) -> int | None:
    try:
        _loading(world, seeds, graph, 1).reader.close()
    except BudgetError as error:
        return error.needed_bytes
    except FeatstoreError:
        return None
    return None


def _cost(world: World, loading: Loading, least: int | None) -> ModeCost:
    sizes, table = loading.sizes, loading.table
    schedule = Schedule(loading.partitions, sizes.resident, sizes.replaced, 0, 0)
    read = np.zeros(2)  # reads, bytes
    edges = 0
    for index in range(schedule.steps):
        runs = loading.runs(schedule.step(index))
        for number, (name, part) in enumerate(runs.items()):
            lists = number >= 2  # of neighbours: read in blocks
            edges += int((part[:, 1] - part[:, 0]).sum()) if lists else 0
            for block in _blocks(part, sizes.block_edges) if lists else [part]:
                layout = world.store.table(name).layout
                found = plan_runs(block, None, layout, loading.reader.budget.extent_bytes_max)
                read += len(found.page), PAGE_BYTES * int(found.pages.sum())
    hubs = len(loading.hub_rows) * table.row_bytes
    once = schedule.steps == 1  # all of it fits, and stays
    count = world.batches
    sampling = count * (world.seen.batch_seconds + world.asked_bytes * world.copy_byte_seconds)
    stages = {
        "read": 0.0 if once else world.busy(*read),
        "build": 0.0 if once else edges * _BUILD_SECONDS,
        "sample": sampling,
        "train": count * world.train_seconds,
    }
    cores = stages["build"] + sampling + stages["train"]
    return ModeCost(
        "partitions", True, "all partitions fit, and are read once" if once else
        f"{schedule.resident} of {len(loading.partitions)} partitions in memory at a time",
        "" if once else _CHANGES, prepare_seconds=world.busy(*read) if once else world.busy(0, hubs),
        epoch_seconds=world.epoch(stages, cores, stages["read"]), seconds=stages,
        bytes_read=0 if once else int(read[1]), reads=0 if once else int(read[0]),
        prepare_bytes_read=hubs + (int(read[1]) if once else 0), memory_needed_bytes=least,
        extrapolated=False,
    )  # fmt: skip


def _blocks(runs: NDArray[np.int64], block_edges: int) -> list[NDArray[np.int64]]:
    """The same runs in the blocks in which they are read."""
    groups = grouped([("", int(low), int(high)) for low, high in runs], block_edges)
    return [np.array([(low, high) for _, low, high in group]) for group in groups]
