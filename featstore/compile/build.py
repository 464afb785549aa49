"""Compiling a trace: from mini-batches known beforehand to a store that holds their rows as they will be
read.

What is written is a store of its own, in ``STORE/packs/NAME``: tables of packed and shared rows, what is in
memory before the first mini-batch, and the records. So commit, checksums, locks, verification and copying are
those of every store (:mod:`featstore.storage.generations`). Its manifest names the base store's uuid, which
is derived from all that is in it.

First everything is decided, table by table (:mod:`featstore.compile.decide`); these passes over the trace are
the same each time, so an interrupted compilation goes through them again. Then the base table is read, once
and in order, and every segment gets its rows (:mod:`featstore.compile.segments`); how far that is stands in
the journal. Rows of shared regions lie in another order than the base table's: they go through a spill file
that is cut into buckets, each of which fits in memory and is brought into order there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_callback, as_choice, as_count, as_flag, as_path, as_text, shown
from featstore.base.progress import watched
from featstore.compile.budget import LoaderBudget, extent_bytes_max, parse_disk
from featstore.compile.choose import packed_byte_seconds
from featstore.compile.decide import OURS, Policy, TableDecision, TableOptions, plan_table
from featstore.compile.forecast import CompileForecast
from featstore.compile.gather import Gathering
from featstore.compile.limits import check_sizes
from featstore.compile.options import CompileOptions, batches_of_epochs, size_or_nothing
from featstore.compile.record_table import write_records
from featstore.compile.routing import Routes
from featstore.compile.row_lists import RowLists
from featstore.compile.scan import tables_of
from featstore.compile.write_table import PARTS, TablePacking, table_needed_bytes
from featstore.errors import ArgumentError, BudgetError, FeatstoreError
from featstore.hosts.split_store import WholeStore
from featstore.layout.records import encode_record, record_offsets
from featstore.packing.packing import Progress
from featstore.plan.cost import DeviceModel, device_model
from featstore.storage.belongings import NOTHING, STORE
from featstore.storage.disk import Disk
from featstore.storage.generations import current, names, writer_lock
from featstore.storage.journal import TableProgress
from featstore.storage.manifest import (
    COMPILED_FEATURE,
    GATHERED_FEATURE,
    ArrayEntry,
    CompiledEntry,
    CompiledTable,
    TableEntry,
    check_name,
)
from featstore.storage.packs import (
    FORECAST,
    check_no_episode,
    check_pack_name,
    packs_directory,
    packs_to_write,
)
from featstore.storage.store import OpenStore, Table
from featstore.storage.table_writer import write_array
from featstore.storage.transaction import Transaction, write_generation
from featstore.trace.told_ids import opened_with_ids
from featstore.trace.trace import Trace
from featstore.units import parse_bytes

_BLOCK_BYTES = 2**20
_DISK_SLACK_BYTES = 1 << 20
# Of deciding, for each row: the map and places of every table; uses and slots, or keys and places in regions,
# of one table.
_MAP_BYTES, _STATE_BYTES = 8, 16


@watched
def compile_trace(
    store: OpenStore | str | os.PathLike[str], trace: Trace | str | os.PathLike[str], name: str = "default",
    *, memory: int | str = "1GiB", disk: int | str | None = None, train_memory: int | str | None = None,
    cache: int | str | None = None, device_memory: int | str = 0, residency: str = "min", seed: int = 0,
    resume: bool = False, overwrite: bool = False, dry_run: bool = False,
    progress: bool | Callable[[Progress], None] | None = None, disk_door: Disk | None = None,
    policy: Policy = OURS, model: DeviceModel | None = None, epoch_batches: Sequence[int] | None = None,
    read_times: int | None = None, sampled_by: str | None = None,
) -> Path | CompileForecast:  # fmt: skip
    """Compile a trace for a store, and return the path of what was written (``featstore.compile_trace`` opens
    it); with ``dry_run``, forecast it and write nothing that stays.

    Args:
        store: the base store, or its path.
        trace: the trace, or its path.
        name: of the compiled trace; it is written to ``STORE/packs/NAME``.
        memory: budget of compiling, in bytes or as ``"512MiB"``.
        disk: limit on the bytes of rows laid out for mini-batches (those that stay in memory come on top):
            bytes, ``"20GiB"``, or ``"3x"`` for three times the tables
            of the store; None: no limit.
        train_memory: the loader's budget, ``memory`` by default.
        cache: what of it holds rows from mini-batch to mini-batch; by default all that its buffers leave.
        device_memory: bytes of rows to keep on the accelerator.
        residency: ``"min"``: rows stay by next use, which needs the mini-batches in this order; ``"fixed"``:
            the most used stay, and the order is free.
        seed: of the choice which rows use up the last of the disk limit.
        policy: another design's way of placing rows, to compare with.
        model: of the device that will be read in training, where it is not the store's; by default the
            calibrated one of the store's device.
        resume, overwrite, progress: as for :func:`featstore.pack`.
        epoch_batches: how many mini-batches each of the epochs has that were recorded one after the other; by
            default all of them are one epoch.
        read_times: how often the mini-batches will be gone through: a row is written only where that takes
            less time than reading it from the base table so often. By default writing costs nothing.
        sampled_by: tells the mini-batches from others, for a loader's ``reuse=True``.

    Raises SourceError, IdError, BudgetError, DiskFullError, DeviceError, CorruptionError, StoreExistsError,
    StoreLockedError.
    """
    for flag, value in (("resume", resume), ("overwrite", overwrite), ("dry_run", dry_run)):
        as_flag(value, flag)
    if dry_run and resume:
        raise ArgumentError("dry_run= writes nothing that stays, and goes on with nothing: leave resume= out")
    progress = as_callback(progress, "progress")
    if not isinstance(policy, Policy):
        raise ArgumentError(f"policy must be a Policy, not {shown(policy)}")
    if not isinstance(model, DeviceModel | None):
        raise ArgumentError(f"model must be a DeviceModel or None, not {shown(model)}")
    as_choice(residency, "residency", ("min", "fixed"))
    as_count(seed, "seed", 0)
    check_pack_name(name)
    with ExitStack() as stack:
        if dry_run and isinstance(store, WholeStore):
            raise ArgumentError(
                "dry_run= forecasts for a store on one disk, not for one that is split by hosts"
            )
        base = (
            store if isinstance(store, OpenStore) else stack.enter_context(OpenStore(as_path(store, "store")))
        )
        recorded = trace if isinstance(trace, Trace) else stack.enter_context(Trace(as_path(trace, "trace")))
        if (with_ids := opened_with_ids(recorded)) is not None:
            recorded = stack.enter_context(with_ids)
        of_type = {t: base.table(n).rows for t, n in tables_of(base, recorded).items()}
        check_sizes(of_type, recorded.counts, len(recorded))
        options = CompileOptions(
            parse_bytes(memory, "memory"), parse_disk(disk, base),
            parse_bytes(memory if train_memory is None else train_memory, "train_memory"),
            None if cache is None else size_or_nothing(cache, "cache"),
            size_or_nothing(device_memory, "device_memory"), residency, seed, policy.name,
            batches_of_epochs(epoch_batches, len(recorded)),
            None if read_times is None else as_count(read_times, "read_times"),
            None if sampled_by is None else as_text(sampled_by, "sampled_by"),
        )  # fmt: skip
        return _compile(
            base, recorded, name, options, policy, model, resume=resume, overwrite=overwrite, dry_run=dry_run,
            progress=progress, door=disk_door or Disk(),
        )  # fmt: skip


def _compile(
    base: OpenStore, recorded: Trace, name: str, options: CompileOptions, policy: Policy,
    model: DeviceModel | None, *, resume: bool, overwrite: bool, dry_run: bool,
    progress: Callable[[Progress], None] | None, door: Disk,
) -> Path | CompileForecast:  # fmt: skip
    """Decide and write, with what was said looked at."""
    root = packs_to_write(base) / (f"{name}{FORECAST}" if dry_run else name)
    check_no_episode(root.parent, name)
    for directory in (root.parent, root):
        door.mkdir(directory)
        door.fsync_dir(directory.parent)
    with writer_lock(root):
        try:
            check_no_episode(root.parent, name)  # such a loader may have begun since
            with (
                write_generation(
                    root, door, resume=resume, overwrite=overwrite or dry_run, worth=_worth
                ) as transaction,
                closing(
                    _Compiling(transaction, base, recorded, options, policy, model, progress)
                ) as compiling,
            ):
                if dry_run:
                    return compiling.forecast()
                compiling.run()
        finally:
            if current(root) is None and not names(root):  # nothing was achieved, or asked for
                with suppress(FeatstoreError, OSError):
                    door.rmtree(root, STORE)
                    door.rmtree(root.parent, NOTHING)
    return packs_directory(base) / name


def deciding_bytes(tables: Mapping[str, Table]) -> int:
    """The smallest budget of compiling: to decide where the rows of these tables go, and to pack them."""
    rows = [t.rows for t in tables.values()]
    state = _MAP_BYTES * sum(rows) + _STATE_BYTES * max(rows, default=0)
    return max(state + 2 * _BLOCK_BYTES, *(table_needed_bytes(t.rows, t.row_bytes) for t in tables.values()))


def _worth(progress: TableProgress, error: BaseException) -> bool:
    """What was packed stays for ``--resume``."""
    return bool(progress.slab or progress.episode or progress.done)


class _Compiling:
    """One compilation: the state that its steps share."""

    def __init__(
        self, transaction: Transaction, base: OpenStore, trace: Trace, options: CompileOptions,
        policy: Policy, model: DeviceModel | None, progress: Callable[[Progress], None] | None,
    ) -> None:  # fmt: skip
        self.base, self.trace, self.options, self.policy = base, trace, options, policy
        self.transaction, self.disk, self.catalogue = transaction, transaction.disk, transaction.catalogue
        self.generation = transaction.generation
        self.model = model or device_model(base.on_disk.path)
        times = options.read_times
        self._written_byte_seconds = 0.0 if times is None else packed_byte_seconds(self.model) / times
        self._progress = progress
        self._done_bytes = self._total_bytes = 0
        self._plans: list[TableDecision] = []
        self._segments: dict[str, tuple[RowLists, RowLists]] = {}  # by table: of mini-batches, of groups
        self._tables: dict[str, TableEntry] = {}
        self._gathering: Gathering | None = None  # of a store that is split by hosts
        self._rows = base  # where rows are read
        self._arrays: dict[str, ArrayEntry] = {}

    @property
    def scratch(self) -> Path:
        return self.generation.spill

    def run(self) -> None:
        known = {"base": self.base.uuid, "trace": self.trace.uuid, "device model": self.model}
        known["written byte"] = self._written_byte_seconds
        self.transaction.start(msgspec.to_builtins(known) | msgspec.to_builtins(self.options))
        forecast = self.decide()
        self._check_space(forecast)
        if self._gathering is not None:
            self._rows = self._gathering.brought()
        name = self.generation.name
        offsets = self._write_records()
        compiled = {p.table.name: self._pack(p) for p in self._plans}
        self._arrays["offsets"] = write_array(self.catalogue, f"{name}/arrays/offsets", offsets)
        for array, values in self.options.arrays().items():
            self._arrays[array] = write_array(self.catalogue, f"{name}/arrays/{array}", values)
        foretold, features = msgspec.to_builtins(forecast), [COMPILED_FEATURE]
        if self._gathering is not None:
            foretold |= self._gathering.asked
            features.append(GATHERED_FEATURE)
            self._tables |= {n: table.entry for n, table in self._gathering.tables.items()}
        entry = CompiledEntry(
            self.base.on_disk.uuid, self.trace.uuid, self.options.residency,  # type: ignore[arg-type]
            len(self.trace), self.options.train_bytes, "records", "offsets", compiled, foretold,
        )  # fmt: skip
        self.transaction.commit(
            ["arrays"], tables=self._tables, arrays=self._arrays, features=features, compiled=entry,
            provenance={"seed": self.options.seed, "trace": self.trace.fingerprint},
        )  # fmt: skip

    def forecast(self) -> CompileForecast:
        """Decide, and leave nothing."""
        try:
            return self.decide()
        finally:
            with suppress(FeatstoreError, OSError):  # an error that brought us here is the one to tell
                self.transaction.discard()

    def close(self) -> None:
        """Let the scratch files go."""
        for plan in self._plans:
            plan.close()
        for lists in self._segments.values():
            for one in lists:
                one.close()
        if self._rows is not self.base:
            self._rows.close()

    # Deciding.

    def decide(self) -> CompileForecast:
        """Decide everything about every table."""
        self.disk.mkdir(self.scratch)
        self.disk.fsync_dir(self.scratch.parent)
        types = tables_of(self.base, self.trace)
        for name in types.values():
            for part in PARTS:
                check_name(f"{name}.{part}", "compiled table")
        o, tables, disk_bytes = self.options, *self._tables_to_read(types)
        needed = o.memory_bytes - self._memory_bytes + deciding_bytes(tables)
        try:
            budget = LoaderBudget.split(
                o.train_bytes, o.cache_bytes, o.device_bytes, disk_bytes, self.trace, tables
            )
        except BudgetError as error:
            if o.train_bytes != o.memory_bytes:
                raise
            raise BudgetError(max(needed, error.needed_bytes), o.memory_bytes, error.what) from None
        if needed > o.memory_bytes:
            raise BudgetError(needed, o.memory_bytes, "decide where the rows of a trace go, and pack them")
        limits = self._disk_limits(tables, disk_bytes)
        extent_bytes = extent_bytes_max(o.train_bytes, tables.values())
        for node_type, table in tables.items():
            options = TableOptions(
                budget.slots[node_type], budget.device_slots[node_type], limits[node_type],
                o.residency, extent_bytes, self._memory_bytes, o.seed, self.policy,
                self._written_byte_seconds,
            )  # fmt: skip
            self._plans.append(
                plan_table(self.trace, node_type, table, options, self.model, self.disk, self.scratch)
            )
            self._tell("deciding", table.name, 0)
        return CompileForecast.of(self.trace, self._plans)

    def _tables_to_read(self, types: Mapping[str, str]) -> tuple[dict[str, Table], int | None]:
        """The tables whose rows will be read, by node type, and the limit on disk space for what is made of
        them: rows of several hosts are gathered first."""
        limit = self.options.disk_bytes
        if not isinstance(self.base, WholeStore):
            return {t: self.base.table(n) for t, n in types.items()}, limit
        self._gathering = Gathering(
            self.base, self.trace, types, self.options.memory_bytes, self.transaction, self._tell
        )
        return {t: self._gathering.tables[n] for t, n in types.items()}, self._gathering.disk_left(limit)

    @property
    def _memory_bytes(self) -> int:
        """What is left of the memory as long as node ids of several hosts are to be found."""
        return self.options.memory_bytes - (self._gathering.held_bytes if self._gathering is not None else 0)

    def _disk_limits(self, tables: Mapping[str, Table], limit: int | None) -> dict[str, int | None]:
        """The limit on disk space, divided by the bytes that the trace asks of each table."""
        if limit is None:
            return dict.fromkeys(tables)
        asked = {t: int(self.trace.counts[t].sum()) * table.row_bytes for t, table in tables.items()}
        return {t: limit * asked[t] // max(1, sum(asked.values())) for t in tables}

    def _check_space(self, forecast: CompileForecast) -> None:
        """Raise DiskFullError before the first row is packed if the disk cannot hold what will be written."""
        spill = sum(p.forecast.shared_rows * p.table.row_bytes for p in self._plans)
        resident = sum((len(p.start) + len(p.device)) * p.table.row_bytes for p in self._plans)
        rows_bytes = forecast.disk_bytes + (0 if self._gathering is None else self._gathering.data_bytes)
        needed = (
            rows_bytes + rows_bytes // 1024 + spill + resident + 2 * forecast.record_bytes + _DISK_SLACK_BYTES
        )
        self.transaction.check_space(needed - self.transaction.bytes_there(self.generation.directory))

    # Records.

    def _write_records(self) -> NDArray[np.int64]:
        """Write the table of records, and the lists of all segments; returns where each record begins, int64
        [mini-batches + 1]."""
        routes = [Routes(p, self.trace, self.disk, self.scratch) for p in self._plans]
        samples = np.array(self.trace.sample_sizes, np.int64)
        offsets = record_offsets([one.lengths for one in routes], samples)
        parts = [one.records() for one in routes]
        records = (
            encode_record([next(part) for part in parts], self.trace.sample_bytes(batch))
            for batch in range(len(self.trace))
        )
        base = f"{self.generation.name}/tables/records"
        self._tables["records"] = write_records(self.catalogue, base, records, offsets)
        for plan, one in zip(self._plans, routes, strict=True):
            self._segments[plan.table.name] = one.finish()
        return offsets

    # Rows.

    def _pack(self, plan: TableDecision) -> CompiledTable:
        """Pack all segments of one table."""
        name, journal = plan.table.name, self.transaction.journal
        progress = journal.table(name)
        packing = TablePacking(
            self.disk, self._rows, plan, self.catalogue, self.generation, self._segments[name],
            self._memory_bytes, progress, journal.save, lambda stage,
            count: self._tell(stage, name, count),
        )  # fmt: skip
        self._total_bytes += packing.total_bytes
        names = {part: f"{name}.{part}" for part in PARTS}
        for part, entry in packing.run().items():
            self._tables[names[part]] = entry
        self._arrays[f"{name}.turn"] = write_array(
            self.catalogue, f"{self.generation.name}/arrays/{name}.turn", plan.turn
        )
        return CompiledTable(
            **names, turn=f"{name}.turn", base_rows=plan.table.rows,
            placement=msgspec.to_builtins(plan.placement),
            batch_rows_max=int(self.trace.counts[plan.node_type].max(initial=0)),
        )  # fmt: skip

    def _tell(self, stage: str, table: str, count: int) -> None:
        if isinstance(self.base, WholeStore):
            self.base.check_peers()
        self._done_bytes += count
        if self._progress is not None:
            self._progress(Progress(stage, table, self._done_bytes, max(self._total_bytes, self._done_bytes)))
