"""A reader of several tiers: each over the next, and the disk under all of them.

A request goes to the fastest tier, which asks the one below for what it does not hold, and so on down to the
:class:`~featstore.reader.reader.Reader`, which reads the disk, or to a shared buffer, whose owner does. One
budget covers all of them: the reader has what it needs, tiers that name their memory have that, and the
others share what is left evenly.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_table_names, check_options, options_of
from featstore.base.called import called
from featstore.base.dtypes import dtype_from_name
from featstore.base.environment import MEMORY
from featstore.base.ids import (
    Ids,
    finished,
    flat_out,
    is_tensor,
    parse_ids,
    parse_row_places,
    rows_of,
)
from featstore.base.sheets import Sheet, Shown
from featstore.base.threads import close_later, closed_later
from featstore.engine.request import Request, chained
from featstore.errors import ArgumentError, BudgetError, ClosedError, IdError, NotInMemoryError
from featstore.plan.budget import TableNeed, own_bytes
from featstore.reader.lookup import table_need
from featstore.reader.options import memory_said
from featstore.reader.reader import Reader
from featstore.reader.report import Plan, ReaderStats, TablePlan, plan_elsewhere
from featstore.reader.requests import ByTable, as_tables
from featstore.reader.sheets import reader_sheet
from featstore.storage.store import OpenStore, Table, as_store
from featstore.tiers import PolicyNow, RowSource, SourceSpec, Tier, TierSpec, as_tiers, is_source_spec
from featstore.tiers.buffer_tier import Buffer
from featstore.tiers.static_tier import Static
from featstore.units import parse_bytes


class TieredReader(Shown):
    """Reads rows through a stack of tiers; made by :meth:`featstore.Store.reader`. A context manager.

    Args:
        store: the open store.
        tiers: what stands over the disk, the fastest first: :class:`~featstore.tiers.device_tier.Device`,
            :class:`~featstore.tiers.buffer_tier.Buffer`, :class:`~featstore.tiers.static_tier.Static`, or
            anything else that is a :class:`~featstore.tiers.TierSpec`. The last may be
            :class:`~featstore.shared.tier.Shared`: then there is no disk below, but the buffer's owner.
        memory: budget of host memory for all that is held, bytes or ``"2GiB"``. Results are the caller's and
            come on top; what devices hold is said by each.
        reader: further options of :class:`featstore.Reader`, which reads the disk; with ``Shared`` only
            ``tables``, by default those of the buffer.

    It belongs to the process that made it; when pickled it is made anew from its store and options.

    Raises what :class:`featstore.Reader` and the tiers raise; ArgumentError for two tiers of one name.
    """

    def __init__(
        self, store: OpenStore, tiers: Sequence[TierSpec], *, memory: int | str = MEMORY, **reader: Any
    ) -> None:
        self.given = {"tiers": tiers, "memory": (memory := memory_said(memory)[0]), **reader}
        self.tiers: tuple[Tier, ...] = ()
        self._disk: Reader | None = None  # none where the last tier has every row
        self._top: RowSource | None = None
        self._pid = os.getpid()
        self.store, self.memory_bytes = as_store(store), parse_bytes(memory, "memory")
        specs = as_tiers(tiers)
        try:
            self._open(specs, reader)
        except BaseException:
            self.close()
            raise
        self._counting = threading.Lock()
        self._requests = self._rows_asked = self._bytes_asked = 0
        self._before = self._hits()
        self.through = " over ".join([*self._before] + ["disk"] * (self._disk is not None))

    def _open(self, specs: list[TierSpec], options: dict[str, Any]) -> None:
        closed_later()
        check_options(options, [*options_of(Reader), "tiers"], "a reader of tiers")
        if options.get("by_row"):
            raise ArgumentError("by_row is of a reader without tiers over it: these know rows by node ids")
        for spec in specs[:-1]:
            if is_source_spec(spec):
                raise ArgumentError(
                    f"{type(spec).__name__} must be the last of tiers=: it has every row, and what stands "
                    "below it would never be asked"
                )
        last = specs[-1] if specs and is_source_spec(specs[-1]) else None
        given_names, there = options.get("tables"), list(self.store.tables)
        if last is not None:
            there = _without_disk(last, self.store, options)
        names = there if given_names is None else as_table_names(given_names, "tables")
        tables = [self.store.table(name) for name in names]
        verify = options.get("verify", True)
        needs = None if last is not None else [table_need(table, verify) for table in tables]
        own, given = self._shares(specs, tables, needs)
        top: RowSource
        if last is not None:
            tier = last.as_source(self.store, names, given.pop())
            specs.pop()
            self.tiers, top = (tier,), tier
        else:
            top = self._open_disk(specs, own, given, options)
        for spec, memory_bytes in reversed(list(zip(specs, given, strict=True))):
            tier = spec.over(top, memory_bytes)
            if tier.name in [other.name for other in self.tiers]:
                tier.close()
                raise ArgumentError(
                    f"two tiers are called {tier.name!r}: plans and statistics tell them by name"
                )
            self.tiers = (tier, *self.tiers)
            top = tier
        self._top = top

    def _open_disk(
        self, specs: list[TierSpec], own: int, given: list[int], options: dict[str, Any]
    ) -> RowSource:
        """The reader of the disk; static rows over it are its own, and leave ``specs`` and ``given``."""
        static, static_bytes = None, 0
        if specs and isinstance(specs[-1], Static):
            static, static_bytes = specs[-1].rows, given.pop()
            specs.pop()
        self._disk = Reader(
            self.store, memory=own + static_bytes, static=static, static_memory=static_bytes, **options
        )
        return self._disk

    def _shares(
        self, specs: list[TierSpec], tables: list[Table], needs: list[TableNeed] | None
    ) -> tuple[int, list[int]]:
        """The memory of the reader, which has these ``needs`` (none: there is no reader), and that of each
        tier. Raises BudgetError with the smallest budget that works."""

        def reader(memory_bytes: int) -> int:
            return 0 if needs is None else own_bytes(memory_bytes, needs)

        wanted = [spec.host_bytes(tables) for spec in specs]
        least = [spec.least_bytes(tables) for spec in specs]
        fixed, sharing = sum(n or 0 for n in wanted), wanted.count(None)
        share = max((n for n, said in zip(least, wanted, strict=True) if said is None), default=0)
        own = reader(self.memory_bytes)
        rest = self.memory_bytes - own - fixed
        if rest < sharing * share:
            needed = own + fixed + sharing * share
            while (more := reader(needed) + fixed + sharing * share) > needed:
                needed = more  # a larger budget has a larger reader, too
            raise BudgetError(needed, self.memory_bytes, "hold the reader and these tiers")
        return own, [rest // sharing if n is None else n for n in wanted]

    def _check_open(self) -> RowSource:
        """The first source to be asked."""
        if self._top is None:
            raise ClosedError("the reader is closed; make another with store.reader()")
        if self._pid != os.getpid():
            raise ClosedError(
                "a reader of several tiers belongs to the process that made it; make one in each"
            )
        return self._top

    # Reading.

    @property
    def tables(self) -> list[str]:
        """Names of the tables that it reads."""
        return self._check_open().tables

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[Any]:
        raise NotInMemoryError("a reader is no array in memory: read rows with reader.read(ids)")

    def read(self, ids: Any, *, out: Any = None) -> Any:
        """Rows of ``ids``, in the order asked; duplicates are fine. As :meth:`featstore.Reader.read`; but
        where the first tier is on a device, the rows are a tensor there (``out`` may be in host memory all
        the same).

        Raises IdError, CorruptionError, DeviceError, ClosedError.
        """
        request = self._submit(ids, out, None, waited_for=True)
        try:
            return request.result()
        except BaseException:
            request.abandon()
            raise

    def submit(self, ids: Any, *, out: Any = None, at: Any = None) -> Request:
        """Like :meth:`read`, but returns at once with a :class:`~featstore.engine.request.Request`; as
        :meth:`featstore.Reader.submit`."""
        return self._submit(ids, out, at, waited_for=False)

    def _submit(self, ids: Any, out: Any, at: Any, waited_for: bool) -> Request:
        top = self._check_open()
        # tiers look at ids again after they were checked: a caller who changes them must not be heard
        by_table = ByTable.parse(self.tables, ids, out, at, copy=True)
        asked, outs = by_table.ids, by_table.out
        rows = 0
        for name, parsed in asked.items():
            self._check_ids(name, parsed.values)
            rows += len(parsed.values)
        flat = {name: self._flat(name, outs[name], parsed, at) for name, parsed in asked.items() if outs}
        to = {
            name: parse_row_places(places, len(asked[name].values), rows_of(flat[name]))
            for name, places in by_table.at.items()
        }
        # a source may serve who waits for it in his own thread, which saves waking up another
        submit = getattr(top, "submit_waiting", top.submit) if waited_for else top.submit
        below: Request = submit(
            {name: parsed.values for name, parsed in asked.items()}, out=flat or None, at=to or None
        )

        def finish() -> Any:
            made = outs or {name: self._shaped(name, below.result()[name], asked[name]) for name in asked}
            return made if isinstance(ids, Mapping) else next(iter(made.values()))

        try:
            row_bytes = {name: self.store.table(name).row_bytes for name in asked}
            with self._counting:
                self._requests += 1
                self._rows_asked += rows
                self._bytes_asked += sum(len(p.values) * row_bytes[n] for n, p in asked.items())
            return chained(below, finish)
        except BaseException:  # an interrupt: nobody else knows of it
            below.abandon()
            raise

    def _flat(self, name: str, out: Any, parsed: Ids, at: Any) -> Any:
        """A caller's ``out`` as [rows, *row shape]; the tier on its device looks at one there."""
        table, device = self.store.table(name), getattr(self._top, "device", None)
        return flat_out(out, parsed, at, table.row_shape, dtype_from_name(table.entry.dtype), device)

    def _shaped(self, name: str, rows: Any, parsed: Ids) -> Any:
        """Rows as the ids were given: their shape, and a tensor for a tensor."""
        table = self.store.table(name)
        shape = (*parsed.shape, *table.row_shape)
        if is_tensor(rows):
            return rows.reshape(shape)
        return finished(rows.reshape(-1).view(np.uint8), shape, rows.dtype, parsed.tensor)

    def _check_ids(self, name: str, ids: NDArray[np.int64]) -> None:
        rows = self.store.table(name).rows
        for bad in (ids.min(), ids.max()) if len(ids) else ():
            if not 0 <= bad < rows:
                raise IdError(f"node id {bad} is out of range: table {name!r} has {rows:,} rows")

    # Explaining.

    def plan(self, ids: Any) -> Plan:
        """What :meth:`read` would do for these ids now: hits of each tier, and pages, reads, bytes and
        forecast for what comes from the disk; for what the owner of a shared buffer reads, only how many rows
        that are. Reads nothing. Raises IdError, ClosedError."""
        self._check_open()
        tables = []
        for name, value in as_tables(self.tables, ids).items():
            left = parse_ids(value).values
            self._check_ids(name, left)
            asked, hits = len(left), {}
            for tier in self.tiers:
                held = tier.holds(name, left)
                hits[tier.name] = int(held.sum())
                left = left[~held]
            below = (
                plan_elsewhere(name, left) if self._disk is None else self._disk.plan({name: left}).tables[0]
            )
            tables.append(self._over(below, asked, hits))
        forecast = sum(table.forecast_seconds for table in tables)
        policies = self._policies()
        if self._disk is None:
            return Plan(
                tuple(tables), self.tiers[-1].name, False, forecast, elsewhere=True, policies=policies
            )
        disk = self._disk
        return Plan(tuple(tables), disk.engine.name, disk.model.calibrated, forecast, policies=policies)

    def _policies(self) -> dict[str, dict[str, PolicyNow]]:
        """Of tiers that a cache policy rules which one that is, by table."""
        ruled = {tier.name: getattr(tier, "policies", None) for tier in self.tiers}
        return {name: policies() for name, policies in ruled.items() if policies is not None}

    def _over(self, plan: TablePlan, asked: int, hits: dict[str, int]) -> TablePlan:
        """A plan of the reader's with what the tiers over it hold."""
        bytes_asked = asked * self.store.table(plan.table).row_bytes
        return replace(
            plan, ids=asked, hits=hits | dict(plan.hits), bytes_asked=bytes_asked,
            amplification=plan.bytes_read / bytes_asked if bytes_asked else 0.0,
        )  # fmt: skip

    def stats(self) -> ReaderStats:
        """What has been counted since the reader was opened; hits by tier. What the owner of a shared buffer
        has read is not in it: see :meth:`featstore.SharedBuffer.reader_stats`."""
        self._check_open()
        reads: Any = self.tiers[-1] if self._disk is None else self._disk  # of hosts, their own disk
        below = reads.stats() if hasattr(reads, "stats") else ReaderStats(engine=reads.name)
        hits = {name: count - self._before.get(name, 0) for name, count in self._hits().items()}
        policies = {
            tier: {table: policy.name for table, policy in of.items()}
            for tier, of in self._policies().items()
        }
        with self._counting:
            return replace(
                below, hits=hits | dict(below.hits), requests=self._requests, rows_asked=self._rows_asked,
                bytes_asked=self._bytes_asked, policies=policies,
            )  # fmt: skip

    def _hits(self) -> dict[str, int]:
        return {tier.name: tier.hits() for tier in self.tiers}

    def memory(self) -> dict[str, int]:
        """Bytes of the budget, by use: what is held, and ``unused``."""
        self._check_open()
        held = {} if self._disk is None else self._disk.memory()
        held.pop("unused", None)
        held |= {f"{tier.name} tier": tier.memory_bytes for tier in self.tiers}
        return held | {"unused": self.memory_bytes - sum(held.values())}

    # Ending.

    def close(self) -> None:
        """Wait for what is under way, then give everything back. May be called more than once."""
        if self._pid != os.getpid():
            return
        for tier in self.tiers:
            tier.close()
        if self._disk is not None:
            self._disk.close()
        self._top = None

    def __del__(self) -> None:
        if getattr(self, "_top", None) is not None and not sys.is_finalizing():
            close_later(self.close)

    def __enter__(self) -> TieredReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.store, self.given)

    def _sheet(self) -> Sheet:
        return reader_sheet(self)

    def __repr__(self) -> str:
        return called(f"{self.store!r}.reader", **self.given)


def _without_disk(last: SourceSpec, store: OpenStore, options: Mapping[str, Any]) -> list[str]:
    """The tables of a last tier that has every row. Raises ArgumentError for options of a reader of the disk,
    which is not there."""
    for name in options:
        if name != "tables":
            raise ArgumentError(
                f"{name}= says how the disk is read, which the owner of the shared buffer does: give it to "
                "featstore.SharedBuffer"
            )
    return last.tables_of(store)


def short(
    store: OpenStore, policy: str | None, device: Any, device_memory: int | str | None,
    device_policy: str | None, options: dict[str, Any],
) -> list[TierSpec]:  # fmt: skip
    """The tiers that the short forms of :meth:`featstore.Store.reader` ask for; takes ``static`` out of the
    options."""
    tiers: list[TierSpec] = []
    if device is not None:
        from featstore.tiers.device_tier import Device

        if device_memory is None:
            raise ArgumentError("device= keeps rows there: say in how much memory, with device_memory=")
        device_bytes = parse_bytes(device_memory, "device_memory")
        tiers.append(
            Device(device, device_bytes, **({} if device_policy is None else {"policy": device_policy}))
        )
    elif device_memory is not None or device_policy is not None:
        raise ArgumentError("device_memory= and device_policy= are of a device: say which, with device=")
    if policy is not None:
        tiers.append(Buffer(policy))
    static = options.pop("static", None)
    if static is not None and not (isinstance(static, str) and static == "auto"):
        tiers.append(Static(static))
    return tiers


def _reopen(store: OpenStore, options: dict[str, Any]) -> TieredReader:
    return TieredReader(store, **options)
