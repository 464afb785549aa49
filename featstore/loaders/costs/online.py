"""What training online would cost: rows read as mini-batches come, through a buffer."""

from __future__ import annotations

from featstore.errors import BudgetError
from featstore.loaders.costs.result import ModeCost
from featstore.loaders.costs.world import World
from featstore.loaders.online.budget import BudgetSplit, Shares
from featstore.loaders.online.extraction import EXTRACTED
from featstore.tiers.chosen import FIRST_POLICY
from featstore.tiers.slots.choose import CANDIDATES
from featstore.units import format_bytes

_CLAIM_SECONDS = 1e-7  # of a core, for an id that a buffer finds or gives a slot, and later lets go


def online_cost(world: World) -> ModeCost:
    """The forecast for a loader without options."""
    try:
        shares = _shares(world, world.memory_bytes)
    except BudgetError as error:
        needed = world.whole_memory(error.needed_bytes)
        return ModeCost(
            "online",
            False,
            f"needs {format_bytes(needed)} of memory: {error.what}",
            memory_needed_bytes=needed,
        )
    choosing = "choosing a policy" in shares.memory
    hits = asked = reads = bytes_read = 0.0
    whole = True
    for name, table in world.tables.items():
        slots, rows = shares.slots[name], world.uses[name].batch_rows
        rate = 1.0
        if slots < table.rows:
            whole = False
            rate = world.uses[name].buffer_hit_rate(slots, CANDIDATES if choosing else (FIRST_POLICY,))
        found = world.scattered(name, 1 - rate)
        reads, bytes_read = reads + found.reads, bytes_read + found.bytes_read
        hits, asked = hits + rate * rows * table.row_bytes, asked + rows * table.row_bytes
    count = world.batches
    stages = {
        "sample": count * world.seen.batch_seconds,
        "read": world.busy(count * reads, count * bytes_read),
        "assemble": count * world.asked_bytes * world.copy_byte_seconds + world.handing_seconds,
        "train": count * world.train_seconds,
    }
    reading = world.prices.cpu(count * reads, count * bytes_read)
    cores = count * world.seen.batch_cpu_seconds + reading + stages["assemble"] + stages["train"]
    cores += _CLAIM_SECONDS * count * sum(world.uses[name].batch_rows for name in world.tables)
    return ModeCost(
        "online", True, "all rows fit: the first epoch reads them once" if whole else "",
        epoch_seconds=world.epoch(stages, cores, stages["read"] + world.sampling_device), seconds=stages,
        cpu_seconds=cores,
        bytes_read=round(count * bytes_read), reads=round(count * reads), hit_rate=hits / max(1.0, asked),
        memory_needed_bytes=world.whole_memory(_least(world)), extrapolated=not whole,
    )  # fmt: skip


def _shares(world: World, memory_bytes: int) -> Shares:
    rows = {name: max(asked) for name, asked in world.seen.asked.items()}
    split = BudgetSplit(
        world.store, memory_bytes, policy="auto", extracted=EXTRACTED, reader_bytes=None,
        verify=world.reading["verify"], devices=0, device_memory=0, device_policy=FIRST_POLICY,
    )  # fmt: skip
    return split.of(split.demand(rows, world.seen.held_bytes), {})


def _least(world: World) -> int:
    try:
        _shares(world, 1)
    except BudgetError as error:
        return error.needed_bytes
    return 1
