"""Extraction: the reader and the feature buffers behind a loader, inside one budget, which is divided by what
the first mini-batch asks for (:mod:`featstore.loaders.online.budget`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import Outputs
from featstore.errors import SourceError
from featstore.loaders.online.budget import BESIDE_KEPT, CHOOSING_BYTES, DEPTH, BudgetSplit
from featstore.loaders.online.options import check_extraction, static_rows
from featstore.reader.reader import Reader
from featstore.sampling.minibatch import Ids, table_of
from featstore.tiers import saved
from featstore.tiers.buffer import FeatureBuffer
from featstore.tiers.slots.choose import CANDIDATES, STATIC_SPARE, PolicyChoice
from featstore.tiers.tickets import Ticket

if TYPE_CHECKING:
    from featstore.reader.reader import Reader
    from featstore.reader.report import ReaderStats
    from featstore.storage.store import OpenStore, Table
    from featstore.tiers.device import DeviceBuffer, DeviceTicket

#: What a mini-batch holds, by table.
Tickets = Mapping[str, "Ticket | DeviceTicket"]

EXTRACTED = 3  # so many are extracted at once, unless said otherwise
_UNITS = 8  # of room, in which one of the expected size is counted
ROOM = DEPTH * _UNITS
LARGEST = ROOM // 2  # of a mini-batch: the loop holds one until it has the next
SPARE = 1.25  # a mini-batch may be larger than the first by so much, before it takes the room of two
FIRST_POLICY = "s3-fifo"  # of "auto", until it is known better; and in small budgets
_PINNED_SHARE = 0.75  # of the slots: further mini-batches are extracted beside one only up to that


class Extraction:
    """Claims slots and reads for mini-batches; the arguments are those of
    :class:`featstore.loaders.online.loader.OnlineLoader`."""

    def __init__(
        self,
        store: OpenStore,
        memory_bytes: int,
        *,
        policy: str,
        static: Any,
        warm: str | None,
        batch_rows: int | Mapping[str, int] | None,
        extracted: int,
        reader_memory: int | None,
        devices: Sequence[Any],
        device_memory: int,
        device_policy: str,
        reader: dict[str, Any],
    ) -> None:
        check_extraction(
            store, policy=policy, static=static, batch_rows=batch_rows, devices=devices,
            device_memory=device_memory, device_policy=device_policy, reader=reader,
        )  # fmt: skip
        self.store, self.memory_bytes, self.policy = store, memory_bytes, policy
        self.extracted = extracted
        self._static, self._batch_rows, self._reader_options = static, batch_rows, reader
        self._devices, self._device_policy = devices, device_policy
        self._split = BudgetSplit(
            store, memory_bytes, policy=policy, extracted=extracted, reader_bytes=reader_memory,
            verify=reader.get("verify", True), devices=len(devices), device_memory=device_memory,
            device_policy=device_policy,
        )  # fmt: skip
        self._warm = warm
        if warm is not None:
            saved.SavedCache(store, warm).close()  # so that one that is damaged is known now
        self.buffers: dict[str, FeatureBuffer] = {}
        self.on_devices: dict[str, DeviceBuffer] = {}  # levels above these
        self.table_of: dict[str, str] = {}
        self.on_change: Callable[[], None] = lambda: None
        self._choices: dict[str, PolicyChoice] = {}
        self._decided = False
        self._reader: Reader | None = None
        self._memory: dict[str, int] = {}

    # Opening.

    def open(self, first: Ids) -> None:
        """Make reader and buffers, given the first mini-batch's ids by node type."""
        _check_types(first)
        self.table_of = {
            node_type: table_of(self.store, node_type, "the mini-batches have") for node_type in first
        }
        asked = {self.table_of[t]: len(ids) for t, ids in first.items()}
        said = self._batch_rows if isinstance(self._batch_rows, Mapping) else {}
        tables = {name: self.store.table(name) for name in dict.fromkeys([*asked, *said])}
        rows = self._rows = {name: self._rows_expected(name, asked.get(name, 0)) for name in tables}
        self._piece_bytes = self._split.bytes_of(rows)
        self._kept = static_rows(self._static, tables)
        kept = {name: len(ids) for name, ids in self._kept.items()}
        slots, self._device_slots, self._memory = self._split.of(tables, rows, kept)
        self._outputs = Outputs(self._piece_bytes, DEPTH)
        self._reader = Reader(
            self.store,
            tables=list(tables),
            memory=self._split.reader_memory(tables),
            static=None,
            static_memory=0,
            **self._reader_options,
        )
        try:
            for name, count in slots.items():
                self.buffers[name] = self._buffer(name, count, rows[name])
            self._open_devices()
            if self._warm is not None:
                self._load(self._warm)
        except BaseException:
            self.close()
            self.buffers, self.on_devices, self._choices, self._reader = {}, {}, {}, None
            raise

    def _rows_expected(self, table: str, first: int) -> int:
        """Rows of a mini-batch, at most, as was said or as the first one suggests; one that occurs twice
        counts twice."""
        given = self._batch_rows.get(table) if isinstance(self._batch_rows, Mapping) else self._batch_rows
        return int(SPARE * first) + 1 if given is None else max(1, first, given)

    def _first_policy(self) -> str:
        return FIRST_POLICY if self.policy == "auto" else self.policy

    def _open_devices(self) -> None:
        if self._device_slots:
            from featstore.tiers.device import DeviceBuffer

            for name, slots in self._device_slots.items():
                host = self.buffers[name]
                self.on_devices[name] = DeviceBuffer(
                    host, self._devices, slots=slots, policy=self._device_policy
                )

    def _buffer(self, table: str, slots: int, batch_rows: int) -> FeatureBuffer:
        assert self._reader is not None
        static = (
            self._static_ids(table, slots - BESIDE_KEPT * batch_rows)
            if self.policy == "static" and slots < self.store.tables[table].rows
            else None
        )
        first, rows = self._first_policy(), self.store.tables[table].rows
        others = CANDIDATES if self.policy == "auto" else ()
        buffer = FeatureBuffer(self._reader, table, slots=slots, policy=first, policies=others, static=static)
        if "choosing a policy" in self._memory and slots < rows:
            limit = CHOOSING_BYTES + self._split.uses_bytes(self.store.tables[table], self.memory_bytes)
            self._choices[table] = PolicyChoice(slots, rows, policy=first, memory_bytes=limit)
        buffer.on_change = lambda: self.on_change()
        return buffer

    def _static_ids(self, table: str, most: int) -> NDArray[Any] | None:
        """Node ids of the rows that stay: those given, for which there are slots, or of the highest
        degree."""
        if self._static is not None:
            return self._kept[table]
        ranked = self.store.tables[table].rows_by_degree(max(0, most))
        if ranked is None:
            raise SourceError(
                f"the policy 'static' keeps the rows of the highest degree, which table {table!r} does "
                "not know: pack with a graph, or say which rows with static="
            )
        node_of_row = self.store.tables[table].node_of_row()
        return ranked if node_of_row is None else node_of_row[ranked]

    # Mini-batches.

    def begin(self, ids: Ids, under_way: Sequence[Ids]) -> Tickets | None:
        """Tickets by table of a mini-batch, given the ids of those whose tickets are held; None where it has
        to wait for these."""
        _check_types(ids)
        for node_type, one in ids.items():
            if node_type not in self.table_of:
                self._add_type(node_type)
            self._check_fits(self.table_of[node_type], one)
        if under_way:
            for node_type, one in ids.items():
                free = self.buffers[self.table_of[node_type]].slots_unkept
                pinned = len(one) + sum(len(other.get(node_type, ())) for other in under_way)
                if pinned > _PINNED_SHARE * free:
                    return None
        tickets: dict[str, Ticket | DeviceTicket] = {}
        try:
            for node_type, one in ids.items():
                table = self.table_of[node_type]
                begun = (self.on_devices.get(table) or self.buffers[table]).begin(one)
                if begun is None:
                    break
                tickets[table] = begun
        except BaseException:
            self._cancel(tickets)
            raise
        if len(tickets) < len(ids):
            self._cancel(tickets)
            return None
        for table, choice in self._choices.items():
            if table in tickets:
                ticket = tickets[table]
                choice.observe(ticket.ids if isinstance(ticket, Ticket) else ticket.asked_of_host)
        return tickets

    def _check_fits(self, table: str, ids: NDArray[np.int64]) -> None:
        """Raise BudgetError, or SourceError where the memory would do, for a mini-batch that has no room,
        whatever else is under way."""
        free, count = self.buffers[table].slots_unkept, len(self._devices)
        on_devices = self._device_slots.get(table, len(ids))
        if len(ids) <= min(free, on_devices):
            return
        distinct = np.unique(ids)
        if len(distinct) <= free and (
            table not in self._device_slots or np.bincount(distinct % count).max() <= on_devices
        ):
            return
        rows = self._rows | {table: len(ids)}
        kept = {name: len(ids) for name, ids in self._kept.items()}
        self._split.of({name: self.store.tables[name] for name in rows}, rows, kept)
        given = rows if len(rows) > 1 else rows[table]
        raise SourceError(
            f"a mini-batch has {len(distinct):,} rows of table {table!r}, where slots were made for "
            f"fewer, judging by the first: give batch_rows={given}, or that of the largest mini-batch"
        )

    def _add_type(self, node_type: str) -> None:
        """A node type that the first mini-batch had not. Raises SourceError where there is no buffer for
        it."""
        table = table_of(self.store, node_type, "the mini-batches have")
        if table not in self.buffers:
            raise SourceError(
                f"this mini-batch has nodes of table {table!r}, which the first one had not: give "
                f"batch_rows={{{table!r}: ...}} with the most rows of it that a mini-batch has, and "
                "the same of other tables that may be missing from the first"
            )
        self.table_of[node_type] = table

    @staticmethod
    def _cancel(tickets: Tickets) -> None:
        for ticket in tickets.values():
            ticket.cancel()

    @property
    def undecided(self) -> bool:
        """A policy is to be chosen, now that enough has been seen for the first time; no mini-batch may be
        under way."""
        return not self._decided and any(choice.full for choice in self._choices.values())

    def decide(self) -> None:
        """Go on with the policies that hit most on what was seen since the last time."""
        for table, choice in self._choices.items():
            buffer = self.buffers[table]
            policy = choice.decide()
            # Whoever was interrupted while rows were loaded to be kept has none.
            if policy != buffer.policy_name or (policy == "static" and buffer.slots_unkept == buffer.slots):
                buffer.switch(policy, choice.static_ids() if policy == "static" else None)
            self._decided = self._decided or bool(choice.hit_rates)

    def gather(self, tickets: Tickets) -> dict[str, Any]:
        """The rows of a mini-batch by table, copied out: arrays, or tensors on a device that keeps rows. Its
        slots are given back."""
        try:
            return self._gather(tickets)
        except BaseException:
            self._cancel(tickets)
            raise

    def _gather(self, tickets: Tickets) -> dict[str, Any]:
        out: dict[str, Any] = {}
        at = 0
        raw = self._outputs.take(
            self._split.bytes_of({name: len(ticket.ids) for name, ticket in tickets.items()})
        )
        for name, ticket in tickets.items():
            table, buffer = self.store.tables[name], self.buffers[name]
            end = at + len(ticket.ids) * table.row_bytes
            if isinstance(ticket, Ticket):
                out[name] = self._on_host(buffer, ticket, table, raw[at:end])
            else:
                out[name] = self.on_devices[name].gather(ticket, raw[at:end])
            at += self._split.padded(name, len(ticket.ids))
        return out

    @staticmethod
    def _on_host(buffer: FeatureBuffer, ticket: Ticket, table: Table, raw: NDArray[np.uint8]) -> NDArray[Any]:
        rows = raw.view(buffer.dtype).reshape(len(ticket.ids), *table.row_shape)
        buffer.gather(ticket, rows)
        ticket.release()
        return rows

    def units(self, ids: Ids) -> int:
        """How much of ``ROOM`` a mini-batch takes."""
        return -(-self._batch_bytes(ids) * _UNITS // self._piece_bytes)

    def _batch_bytes(self, ids: Ids) -> int:
        return self._split.bytes_of({self.table_of[t]: len(one) for t, one in ids.items()})

    def too_large(self, ids: Ids, index: int) -> SourceError:
        """The error for a mini-batch that has no room even beside one other."""
        found = {self.table_of[t]: len(one) for t, one in ids.items()}
        rows = next(iter(found.values())) if len(found) == 1 else found
        return SourceError(
            f"mini-batch {index} has rows of {self._batch_bytes(ids):,} bytes, where room was made for "
            f"{self._piece_bytes:,}, judging by the first: give batch_rows={rows}, or that of the "
            "largest mini-batch"
        )

    # Caches on disk.

    def save(self, name: str) -> None:
        """Write down which rows are in the buffers."""
        if not self.buffers:
            raise SourceError("there is nothing to save before the first mini-batch")
        for buffer in self.buffers.values():
            buffer.settle()
        policies = (
            {t: buffer.policy_name for t, buffer in self.buffers.items()} if self.policy == "auto" else {}
        )
        pieces = {table: partial(self._cached_pieces, table) for table in self.buffers}
        saved.save(self.store, name, pieces, policies=policies)

    def _cached_pieces(self, table: str) -> Iterator[NDArray[np.int64]]:
        """Those kept for good at the end, and those on devices last: they are wanted most. Where the caller
        has said what is to be kept, that is loaded anyway."""
        above, buffer = self.on_devices.get(table), self.buffers[table]
        for ids in chain(buffer.cached_pieces(), buffer.kept_pieces() if self.policy == "auto" else ()):
            yield ids if above is None else ids[~above.holds(ids)]
        if above is not None:
            yield from above.cached_pieces()

    def _load(self, name: str) -> None:
        """Read the rows that were saved into the buffers: the last ones, as many as fit, and of those that do
        not fit on devices the last ones into the host's buffer."""
        with saved.SavedCache(self.store, name) as cache:
            for table, buffer in self.buffers.items():
                ids, left = partial(cache.ids, table), cache.counts.get(table, 0)
                above = self.on_devices.get(table)
                others = ids()
                if table in self._choices and above is None and self._go_on(table, cache):
                    continue
                if above is not None:
                    staging = self._outputs.take(self._piece_bytes)
                    for wanted, _ in above.last_that_fit(ids):
                        above.load(wanted, staging, uses=saved.USES)
                        left -= len(wanted)
                    others = (rest for _, rest in above.last_that_fit(ids))
                spare = max(0, left - buffer.slots_unkept)
                for piece in others:
                    buffer.load(piece[spare:], uses=saved.USES)
                    spare -= min(spare, len(piece))

    def _go_on(self, table: str, cache: saved.SavedCache) -> bool:
        """Begin with the policy that had been chosen when the cache was saved; whether all rows were loaded
        with that."""
        policy, buffer = cache.policies.get(table), self.buffers[table]
        if policy not in CANDIDATES:
            return False
        self._choices[table].policy = policy
        if policy != "static":
            buffer.switch(policy)
            return False
        first = max(0, cache.counts[table] - max(0, buffer.slots - STATIC_SPARE * self._rows[table]))

        def kept() -> Iterator[NDArray[np.int64]]:
            before = first
            for piece in cache.ids(table):
                yield piece[before:]
                before -= min(before, len(piece))

        buffer.switch(policy, kept())
        return True

    # The rest.

    def memory(self) -> dict[str, int]:
        """Bytes of the budget by what they are for."""
        return dict(self._memory)

    def reader_stats(self) -> ReaderStats | None:
        return None if self._reader is None else self._reader.stats()

    def close(self) -> None:
        for buffer in self.buffers.values():
            buffer.close()
        if self._reader is not None:
            self._reader.close()


def _check_types(ids: Ids) -> None:
    """Raise SourceError for a mini-batch without any node type."""
    if not ids:
        raise SourceError("a mini-batch has no node type at all: nodes= must return ids, or {table: ids}")
