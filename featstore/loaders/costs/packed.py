"""What training from mini-batches laid out beforehand would cost: compiled, once for all epochs, and rolling,
anew for each.

Where a whole epoch was looked at, it is recorded and :func:`featstore.compile_trace` decides it as it would
for real (``dry_run``), so that its bytes are exact. Else the rows that a schedule by next use misses are
counted on mini-batches drawn from what was seen; what of them a disk limit leaves in the store's tables is
read there, row by row, and that mini-batches may share rows on disk is not counted: the limit is then a bound
of the time from above.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featstore.compile.budget import DEPTH_MIN, LoaderBudget, extent_bytes_max, readers_bytes
from featstore.compile.build import deciding_bytes
from featstore.compile.choose import packed_byte_seconds
from featstore.compile.forecast import CompileForecast
from featstore.compile.placement import Forecast, Reads
from featstore.compile.segment_plan import packing_sizes
from featstore.compile.write_table import packing_reader_bytes
from featstore.errors import BudgetError
from featstore.layout import TableLayout
from featstore.loaders.costs.prices import Curve, Prices
from featstore.loaders.costs.result import ModeCost
from featstore.loaders.costs.world import World
from featstore.loaders.rolling import TRAIN_SHARE
from featstore.plan.cost import DeviceModel, device_model
from featstore.plan.extents import Extents, plan_extents
from featstore.storage.store import Table
from featstore.units import EXTENT_BYTES_MAX, format_bytes

_RECORD_BYTES_PER_ID = 12  # of a row in a record, about
# Of a core, to compile: for each id (scanning, schedule, placement, records), for each mini-batch (its record
# and pages), and for each episode (its files).
_ID_SECONDS, _BATCH_SECONDS, _EPISODE_SECONDS = 60e-9, 0.4e-3, 0.05
_RECORDED_BYTE_SECONDS = 1.8e-9  # of a core, for a byte of a trace: hashed, checked and written,
_PACKED_BYTE_SECONDS = 0.8e-9  # and for one of what is packed: checked and written
# What reads ask of cores that prepare meanwhile, over what they ask of idle ones: caches are shared. Measured
# where both of two cores were busy: 1.2 to 1.25, of which one thread that sorts makes 1.06.
_BESIDE_PREPARING = 1.2


@dataclass(frozen=True)
class Laid:
    """An epoch laid out: what reading it takes, and what it takes on disk. ``rows``: that were asked for, by
    table, ``missed``: of them, those not in memory. ``depth``: mini-batches that exist at once."""

    bytes_read: float
    reads: float
    packed_bytes: float
    resident_bytes: float
    record_bytes: float
    hit_rate: float
    exact: bool
    depth: int
    back_reads: float  # of all reads and bytes, those of rows brought back before the first mini-batch,
    back_bytes: float
    run_reads: float  # and those of packed rows and records, which lie together
    run_bytes: float
    prices: Prices
    remark: str = ""

    @property
    def disk_bytes(self) -> float:
        return self.packed_bytes + self.resident_bytes + self.record_bytes

    def priced(self, curve_of: Callable[[Prices], Curve]) -> float:
        """Seconds of what is read of mini-batches, by the clock or of the cores. Of runs all that is read is
        wanted, checked and copied: they are as the longest reads whose price was measured, whatever their
        length."""
        reads = self.reads - self.back_reads - self.run_reads
        byte_count = self.bytes_read - self.back_bytes - self.run_bytes
        curve = curve_of(self.prices)
        return curve.of(reads, byte_count) + curve.of(0, self.run_bytes)

    def reading_cores(self) -> float:
        """Seconds of the cores for all that is read."""
        return self.priced(lambda p: p.cores) + self.prices.cpu(self.back_reads, self.back_bytes)


@dataclass(frozen=True)
class _Counted:
    """The sizes of an epoch's mini-batches, as those of a trace."""

    counts: dict[str, NDArray[np.int64]]
    sample_sizes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sample_sizes)


def compiled_cost(world: World, exact: CompileForecast | str | None) -> ModeCost:
    """The mini-batches of epoch 0 in every epoch. ``exact``: as decided for a whole epoch, or why it was
    not."""
    try:
        laid = _laid(world, world.memory_bytes, world.disk_bytes, exact)
    except BudgetError as error:
        return _too_small("compiled", world, error, world.whole_memory(error.needed_bytes))
    if laid.disk_bytes > world.free_bytes:
        return _no_room("compiled", world, laid.disk_bytes, _least(world))
    stages = _reading(world, laid)
    prepared = _prepared(world, laid, world.memory_bytes)
    reading = laid.reading_cores()
    cores = reading + stages["assemble"] + stages["train"]
    return ModeCost(
        "compiled", True, laid.remark, "repeats the mini-batches of epoch 0",
        prepare_seconds=prepared.seconds,
        epoch_seconds=_epoch(world, laid, stages, cores, 0.0),
        seconds=stages, cpu_seconds=cores, bytes_read=round(laid.bytes_read), reads=round(laid.reads),
        prepare_bytes_read=round(prepared.bytes_read), prepare_bytes_written=round(prepared.bytes_written),
        disk_bytes=round(laid.disk_bytes), memory_needed_bytes=_least(world), hit_rate=laid.hit_rate,
        extrapolated=not laid.exact,
    )  # fmt: skip


def rolling_cost(world: World) -> ModeCost:
    """The same, of fresh mini-batches: the next epoch is prepared beside each."""
    train_bytes = _train_bytes(world)
    limit = None if world.disk_bytes is None else world.disk_bytes // 2
    least = world.whole_memory(_least_train_bytes(world) + deciding_bytes(world.tables))
    try:
        laid = _laid(world, train_bytes, limit, None, world.memory_bytes - train_bytes, once=True)
    except BudgetError as error:
        return _too_small("rolling", world, error, least)
    disk = 2 * laid.disk_bytes
    if disk > world.free_bytes:
        return _no_room("rolling", world, disk, least)
    stages = _reading(world, laid)
    prepared = _prepared(world, laid, world.memory_bytes - train_bytes)
    stages["sample"], stages["prepare"] = prepared.sampling, prepared.seconds - prepared.sampling
    reading = laid.reading_cores() * _BESIDE_PREPARING
    cores = reading + stages["assemble"] + stages["train"] + prepared.cores
    return ModeCost(
        "rolling", True, laid.remark, prepare_seconds=prepared.seconds,
        epoch_seconds=_epoch(world, laid, stages, cores, prepared.device + world.sampling_device),
        seconds=stages, cpu_seconds=cores,
        bytes_read=round(laid.bytes_read + prepared.bytes_read),
        reads=round(laid.reads + prepared.bytes_read / EXTENT_BYTES_MAX),
        bytes_written=round(prepared.bytes_written), prepare_bytes_read=round(prepared.bytes_read),
        prepare_bytes_written=round(prepared.bytes_written), disk_bytes=round(disk),
        memory_needed_bytes=least, hit_rate=laid.hit_rate,
    )  # fmt: skip


def _reading(world: World, laid: Laid) -> dict[str, float]:
    """The stages of an epoch's loading."""
    count = world.batches
    copied = laid.hit_rate * world.asked_bytes * count + laid.record_bytes
    return {
        "bring back": world.busy(laid.back_reads, laid.back_bytes),
        "read": laid.priced(lambda p: p.clock),
        "assemble": copied * world.copy_byte_seconds + world.handing_seconds,
        "train": count * world.train_seconds,
    }


def _epoch(world: World, laid: Laid, stages: dict[str, float], cores: float, prepared_device: float) -> float:
    """Seconds of an epoch: rows are brought back before it begins. Where two mini-batches exist at once, the
    loop's and another, the other is read and then assembled, and nothing is read meanwhile."""
    work = {n: seconds for n, seconds in stages.items() if n != "bring back"}
    if laid.depth == DEPTH_MIN:
        work["read"] += work.pop("assemble")
    return stages["bring back"] + world.epoch(work, cores, stages["read"] + prepared_device)


# What is read.


def _laid(
    world: World, train_bytes: int, disk_bytes: int | None, exact: CompileForecast | str | None,
    compile_bytes: int | None = None, once: bool = False,
) -> Laid:  # fmt: skip
    """An epoch laid out for a loader of ``train_bytes``; with ``once``, to be read once, so that rows may
    stay in the store's tables though there is room. Raises BudgetError."""
    budget = LoaderBudget.split(train_bytes, None, 0, disk_bytes, _sizes(world), world.tables)
    needed, given = (
        deciding_bytes(world.tables),
        world.memory_bytes if compile_bytes is None else compile_bytes,
    )
    if needed > given:
        raise BudgetError(needed, given, "decide where the rows of a trace go, and pack them")
    if isinstance(exact, CompileForecast):
        return _decided(world, exact, budget.depth)
    model = device_model(world.store.path)
    asked = {n: world.seen.mean_asked(n) * t.row_bytes for n, t in world.tables.items()}
    count, total = world.batches, max(1.0, sum(asked.values()))
    tables = world.tables.values()
    half, longest = readers_bytes(train_bytes, tables) // 2, extent_bytes_max(train_bytes, tables)
    found: list[tuple[float, ...]] = []
    for name, table in world.tables.items():
        uses, slots = world.uses[name], budget.slots[name]
        hit, back = uses.scheduled(slots) if slots else (0.0, 0.0)
        missed = (1 - hit) * uses.batch_rows
        limit = None if disk_bytes is None else disk_bytes * asked[name] / total
        packed = missed if limit is None else min(missed, limit / table.row_bytes / count)
        run = _runs(packed, count, table, model, longest)
        left = world.scattered(name, (missed - packed) / max(1.0, uses.batch_rows), half)
        if once and packed:
            scattered = world.scattered(name, missed / max(1.0, uses.batch_rows), half)
            written = packed * count * table.row_bytes * packed_byte_seconds(model)
            kept = model.busy_seconds(count * left.reads, count * left.bytes_read) + run.seconds + written
            if model.busy_seconds(count * scattered.reads, count * scattered.bytes_read) < kept:
                packed, run, left = 0.0, _runs(0.0, count, table, model, longest), scattered
        held = min(slots, table.rows)
        again = _restored(held, round(back * held), table.row_bytes, model)
        found.append(
            (
                run.bytes_read + count * left.bytes_read + again.bytes_read,
                run.reads + count * left.reads + again.reads,
                packed * count * table.row_bytes, held * table.row_bytes,
                hit * uses.batch_rows * table.row_bytes,
                uses.batch_rows * table.row_bytes, left.reads, again.reads, again.bytes_read,
                run.reads, run.bytes_read,
            )
        )  # fmt: skip
    (
        bytes_read, reads, packed_bytes, resident_bytes, hits, rows_bytes, based, back_reads, back_bytes,
        run_reads, run_bytes,
    ) = map(sum, zip(*found, strict=True))  # fmt: skip
    records = _record_bytes(world)
    left_there = 1 - packed_bytes / max(1.0, count * (rows_bytes - hits))
    who = "reading them once, or disk=," if once else "disk="
    remark = (
        f"at most: {who} leaves {left_there:.0%} of the rows missed in the store's tables, if mini-batches "
        "share none"
        if based
        else ""
    )
    return Laid(
        bytes_read + records, reads + count, packed_bytes, resident_bytes, records,
        hits / max(1.0, rows_bytes), False, budget.depth, back_reads, back_bytes,
        run_reads + count, run_bytes + records, world.prices_beside(half if based else None), exact or remark,
    )  # fmt: skip


def _runs(packed: float, count: int, table: Table, model: DeviceModel, longest: int) -> Forecast:
    """Reads of so many packed rows of each mini-batch, of ``longest`` bytes at most."""
    runs = Reads(table.layout, model, longest)
    for number in range(count):
        runs.run(int(packed * (number + 1)) - int(packed * number))
    return runs.forecast()


def _record_bytes(world: World) -> float:
    ids = sum(world.seen.mean_asked(n) for n in world.tables)
    return world.batches * (float(np.mean(world.seen.sample_bytes)) + _RECORD_BYTES_PER_ID * ids)


def _decided(world: World, exact: CompileForecast, depth: int) -> Laid:
    """As :func:`featstore.compile_trace` has decided."""
    tables = exact.tables.values()
    resident = sum((t["resident_rows"] + t["device_rows"]) * t["row_bytes"] for t in tables)
    asked = sum(t["asked_rows"] * t["row_bytes"] for t in tables)
    hits = sum(t["hit_rows"] * t["row_bytes"] for t in tables)
    model = device_model(world.store.path)
    back = [_restored(t["resident_rows"], t["restored_rows"], t["row_bytes"], model) for t in tables]
    reads = sum(t["reads"] for t in tables) + exact.batches + sum(one.reads for one in back)
    bytes_read = exact.bytes_read + exact.record_bytes + sum(one.bytes_read for one in back)
    packed = sum(t["packed_rows"] * t["row_bytes"] for t in tables)
    runs = packed / extent_bytes_max(world.memory_bytes, world.tables.values())
    half = readers_bytes(world.memory_bytes, world.tables.values()) // 2
    return Laid(
        bytes_read, reads, exact.disk_bytes, resident, exact.record_bytes,
        hits / max(1, asked), True, depth, sum(one.reads for one in back),
        sum(one.bytes_read for one in back),
        min(runs, sum(t["reads"] for t in tables)) + exact.batches, packed + exact.record_bytes,
        world.prices_beside(half if any(t["base_rows"] for t in tables) else None),
    )  # fmt: skip


def _restored(resident: int, restored: int, row_bytes: int, model: DeviceModel) -> Extents:
    """Reads of the rows that are brought back before an epoch, anywhere among those in memory at first."""
    rows = np.sort(np.random.default_rng(0).permutation(resident)[:restored]).astype(np.int64)
    layout = TableLayout(max(1, resident), row_bytes, max(1, resident))
    nothing = np.empty(0, np.int32), np.empty(0, np.uint8)
    return plan_extents(rows, *nothing, max(1, len(rows)), layout, model, EXTENT_BYTES_MAX)


def _sizes(world: World) -> _Counted:
    """Sizes of all mini-batches of an epoch, those looked at again and again."""
    count = world.batches
    counts = {n: np.resize(np.array(asked, np.int64), count) for n, asked in world.seen.asked.items()}
    return _Counted(counts, np.resize(np.array(world.seen.sample_bytes, np.int64), count))


def _least(world: World) -> int:
    """The smallest memory of a loader of mini-batches laid out, which prepares before it trains."""
    return world.whole_memory(max(_least_train_bytes(world), deciding_bytes(world.tables)))


def _least_train_bytes(world: World) -> int:
    try:
        LoaderBudget.split(1, None, 0, world.disk_bytes, _sizes(world), world.tables)
    except BudgetError as error:
        return error.needed_bytes
    return 1


def _train_bytes(world: World) -> int:
    """What a rolling loader trains in: its share, or less where preparing needs the rest, or what it
    needs."""
    train = int(world.memory_bytes * TRAIN_SHARE)
    deciding = deciding_bytes(world.tables)
    if world.memory_bytes - train < deciding:
        return max(1, world.memory_bytes - deciding)
    return min(max(train, _least_train_bytes(world)), world.memory_bytes - deciding)


# Preparing.


@dataclass(frozen=True)
class _Prepared:
    """Sampling, recording and packing an epoch. ``seconds``: one after the other, of them ``sampling``; of
    the ``device`` and the ``cores``."""

    seconds: float
    sampling: float
    device: float
    cores: float
    bytes_read: float
    bytes_written: float


def _prepared(world: World, laid: Laid, memory_bytes: int) -> _Prepared:
    asked = {n: world.seen.mean_asked(n) * t.row_bytes for n, t in world.tables.items()}
    total, scanned = max(1.0, sum(asked.values())), 0.0
    for name, table in world.tables.items():
        inner = memory_bytes - packing_reader_bytes(memory_bytes, table.row_bytes)
        sizes = packing_sizes(world.batches, table.rows, table.row_bytes, inner)
        scanned += sizes.episodes * table.data_bytes if asked[name] / total * laid.packed_bytes > 0 else 0
    reads = scanned / EXTENT_BYTES_MAX
    ids = world.batches * sum(world.seen.mean_asked(n) for n in world.tables)
    trace = 8 * ids + world.batches * float(np.mean(world.seen.sample_bytes))
    written = trace + laid.disk_bytes
    device = world.busy(reads, scanned) + world.written(written)
    recording = trace * _RECORDED_BYTE_SECONDS
    sampling = world.batches * world.seen.batch_seconds + recording
    deciding = ids * _ID_SECONDS + world.batches * _BATCH_SECONDS + _EPISODE_SECONDS
    copying = (laid.packed_bytes + laid.record_bytes) * world.copy_byte_seconds
    packing = copying + laid.disk_bytes * _PACKED_BYTE_SECONDS
    reading = world.prices.cpu(reads, scanned)
    cores = world.batches * world.seen.batch_cpu_seconds + recording + reading + deciding + packing
    seconds = sampling + deciding + max(device, packing)
    return _Prepared(seconds, sampling, device, cores, scanned, written)


# What cannot be.


def _too_small(mode: str, world: World, error: BudgetError, needed: int) -> ModeCost:
    return ModeCost(
        mode, False, f"needs {format_bytes(needed)} of memory: {error.what}", memory_needed_bytes=needed
    )


def _no_room(mode: str, world: World, needed: float, memory: int) -> ModeCost:
    reason = (
        f"needs {format_bytes(needed)} of disk, where {format_bytes(world.free_bytes)} are free: disk= says "
        "how much to take"
    )
    return ModeCost(mode, False, reason, disk_bytes=round(needed), memory_needed_bytes=memory)
