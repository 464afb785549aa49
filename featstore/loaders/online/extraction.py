"""Extraction: the reader and the feature buffers behind a loader, inside one budget, which is divided by what
mini-batches have asked for so far (:mod:`featstore.loaders.online.budget`): anew for one that finds no room.

A mini-batch has slots for all of its rows at once, so that its reads go on while others are handed over. One
with more rows than slots goes through them in pieces, straight to where its rows are handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.bell import Bell
from featstore.base.buffers import ALIGNMENT, Outputs, aligned_buffer
from featstore.errors import BudgetError, SourceError
from featstore.hosts.kept_halo import KeptHalo
from featstore.hosts.source import HostsRows
from featstore.hosts.split_store import reader_of
from featstore.loaders.online.budget import BESIDE_KEPT, DEPTH, SAMPLES_UNDER_WAY, BudgetSplit, Demand
from featstore.loaders.online.caches import cached_pieces, go_on, load_rows
from featstore.loaders.online.content import Content
from featstore.loaders.online.options import check_extraction, static_ids, static_rows
from featstore.loaders.online.pieces import InPieces, PieceTicket
from featstore.loaders.online.report import Counted
from featstore.reader.reader import Reader
from featstore.sampling.minibatch import Ids, table_of
from featstore.tiers import saved
from featstore.tiers.buffer import FeatureBuffer
from featstore.tiers.bundle import Bundle
from featstore.tiers.chosen import FIRST_POLICY, Choices, choosing_bytes
from featstore.tiers.slots.choose import CANDIDATES, STATIC_SPARE
from featstore.tiers.tickets import Ticket

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore, Table
    from featstore.tiers import TierSpec
    from featstore.tiers.device import DeviceBuffer, DeviceTicket

#: What a mini-batch holds, by table.
Tickets = Mapping[str, "Ticket | DeviceTicket"]

EXTRACTED = 3  # so many are extracted at once, unless said otherwise


class Extraction:
    """Claims slots and reads for mini-batches; the arguments are those of
    :class:`featstore.loaders.online.loader.OnlineLoader`."""

    def __init__(
        self, store: OpenStore, memory_bytes: int, *, policy: str, static: Any, warm: str | None,
        extracted: int, reader_memory: int | None, devices: Sequence[Any], device_memory: int,
        device_policy: str, reader: dict[str, Any], halo: TierSpec | None = None,
    ) -> None:  # fmt: skip
        check_extraction(
            store, policy=policy, static=static, devices=devices, device_memory=device_memory,
            device_policy=device_policy, reader=reader, halo=halo,
        )  # fmt: skip
        self.store, self.memory_bytes, self.policy = store, memory_bytes, policy
        self.extracted = extracted
        self._static, self._reader_options = static, reader
        self._devices, self._device_policy = devices, device_policy
        self._halo = None if halo is None else KeptHalo(halo, store)
        self.output_memory: Callable[[int], NDArray[np.uint8]] = aligned_buffer  # for rows copied out
        self._split = BudgetSplit(
            store, memory_bytes, policy=policy, extracted=extracted, reader_bytes=reader_memory,
            verify=reader.get("verify", True), devices=len(devices), device_memory=device_memory,
            device_policy=device_policy,
        )  # fmt: skip
        self._warm, self._warmed = warm, False
        if warm is not None:
            saved.SavedCache(store, warm).close()  # so that one that is damaged is known now
            if self._halo is not None:
                self._halo.check(warm)
        self.buffers: dict[str, FeatureBuffer] = {}
        self.on_devices: dict[str, DeviceBuffer] = {}  # levels above these
        self.table_of: dict[str, str] = {}
        self.on_change: Callable[[], None] = lambda: None
        self._changed = Bell(lambda: self.on_change())
        self._choices = Choices()
        self._reader: Reader | HostsRows | None = None
        self._bundle: Bundle | None = None  # over it
        self._memory: dict[str, int] = {}
        self._asked = Demand({})
        self._piece_bytes, self._piece_room, self._outputs = 0, 0, Outputs(ALIGNMENT, 0)
        self._types: dict[str, str] = {}  # tables of node types that have come, by type
        self._device_slots: dict[str, int] = {}
        self._kept: Mapping[str, NDArray[np.int64]] | None = None
        self._before = Counted()  # by reader and buffers that were let go

    # Opening.

    def open(self, one: Content, *, index: int | None = None, held_bytes: int = 0) -> None:
        """Make reader and buffers for mini-batches that ask for as much as those so far, and as this one.
        No ticket may be held.

        ``index``: the number of a mini-batch that finds no room, or whose tables are new, after others, of
        which the loop has one that needs ``held_bytes`` of room. What was there goes, the rows in the buffers
        and what policies knew of them too; the halo stays where no table is new. Raises BudgetError, and then
        nothing has changed.
        """
        table_of_type = self._types | self._named(one.ids)
        own = self._asked_by(one, table_of_type)
        asked = self._asked.or_more(own).or_more(Demand(dict.fromkeys(self._tables_kept(), 0)))
        if self._kept is None:
            self._kept = static_rows(self._static, {name: self.store.table(name) for name in asked.rows})
        kept = {name: len(rows) for name, rows in self._kept.items()}
        pair_bytes = 0 if index is None else held_bytes + own.room_bytes
        shares = self._split.of(asked, kept, index=index, pair_bytes=pair_bytes)
        self._let_go()
        self.table_of, self._asked, self._memory = table_of_type, asked, shares.memory
        self._types, self._device_slots = table_of_type, shares.device_slots
        self._piece_bytes, self._piece_room = own.row_bytes, own.room_bytes
        self._outputs = Outputs(self._piece_bytes, DEPTH, self.output_memory)
        try:
            self._reader = reader_of(
                self.store, tables=list(shares.slots), memory=shares.memory["reader"], static=None,
                static_memory=0, halo=self._halo, **self._reader_options,
            )  # fmt: skip
            bundle = self._bundle = Bundle(self._reader)
            for name, count in shares.slots.items():
                self.buffers[name] = self._buffer(bundle, name, count, asked.expected(name))
            self._open_devices()
            if self._warm is not None and not self._warmed:
                if self._halo is not None:  # first, as what is loaded next may be there then
                    self._halo.load(self._warm)
                self._load(self._warm)
                self._warmed = True
        except BaseException:
            self._let_go()
            raise

    def skip(self, one: Content) -> int:
        """Take note of a mini-batch that is let go, so that whoever goes on in the middle of an epoch has
        seen what one has seen who went through it; how much of the room it would take."""
        self._types = self._types | self._named(one.ids)
        own = self._asked_by(one, self._types)
        self._asked = self._asked.or_more(own)
        return own.room_bytes

    def _named(self, ids: Ids) -> dict[str, str]:
        """Tables of the node types of a mini-batch."""
        return {node_type: table_of(self.store, node_type, "the mini-batches have") for node_type in ids}

    def _asked_by(self, one: Content, table_of_type: Mapping[str, str]) -> Demand:
        rows = {table_of_type[node_type]: len(ids) for node_type, ids in one.ids.items()}
        return self._split.demand(rows, one.sample_bytes)

    def _tables_kept(self) -> Sequence[str]:
        return list(self._static) if isinstance(self._static, Mapping) else ()

    def _let_go(self) -> None:
        """Close reader and buffers, and give back their memory."""
        before = self._before.plus(self._reader, self.buffers, self.on_devices)
        levels = self.buffers, self.on_devices, self._reader
        self._before, self.buffers, self.on_devices = before, {}, {}
        self._reader = self._bundle = None
        _close_levels(*levels)  # which nobody asks any more what they have counted
        self._choices, self._memory = Choices(), {}
        self._outputs.shrink()
        self._outputs = Outputs(ALIGNMENT, 0)

    @property
    def room_bytes(self) -> int:
        """What mini-batches with rows, the loop's too, may take at once; 0 before there are any."""
        return self._memory.get("handed over", 0)

    def knows(self, ids: Ids) -> bool:
        """Whether there are buffers for all of these node types."""
        return bool(self.buffers) and all(node_type in self.table_of for node_type in ids)

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

    def _buffer(self, bundle: Bundle, table: str, slots: int, batch_rows: int) -> FeatureBuffer:
        static = (
            static_ids(self.store, self._static, self._kept, table, slots - BESIDE_KEPT * batch_rows)
            if self.policy == "static" and slots < self.store.tables[table].rows
            else None
        )
        first, others = self._first_policy(), CANDIDATES if self.policy == "auto" else ()
        buffer = FeatureBuffer(bundle, table, slots=slots, policy=first, policies=others, static=static)
        if "choosing a policy" in self._memory:
            tables = [self.store.tables[name] for name in self._asked.rows]
            self._choices.add(table, buffer, choosing_bytes(tables, self.memory_bytes)[table])
        buffer.on_change = self._changed.ring
        return buffer

    # Mini-batches.

    def begin(self, asked: Content, under_way: Sequence[Content]) -> Tickets | None:
        """Tickets by table of a mini-batch, given those whose tickets are held; None where it has to wait for
        these. What is missing is asked for at once."""
        ids = asked.ids
        if under_way:
            samples = asked.sample_bytes + sum(other.sample_bytes for other in under_way)
            if samples > self._memory.get(SAMPLES_UNDER_WAY, 0):
                return None
            for node_type, one in ids.items():
                free = self.buffers[self.table_of[node_type]].slots_unkept
                pinned = len(one) + sum(len(other.ids.get(node_type, ())) for other in under_way)
                if pinned > BudgetSplit.PINNED_SHARE * free:
                    return None
        assert self._bundle is not None
        tickets: dict[str, Ticket | DeviceTicket] = {}
        try:
            # what is given back where there are too few slots is nothing to begin it again for
            with self._changed.silent(), self._bundle.together():
                for node_type, one in ids.items():
                    table = self.table_of[node_type]
                    begun = (self.on_devices.get(table) or self.buffers[table]).begin(one)
                    if begun is None:
                        self._cancel(tickets)
                        return None
                    tickets[table] = begun
        except BaseException:
            self._cancel(tickets)
            raise
        for table, ticket in tickets.items():
            self._observe(table, ticket)
        return tickets

    def _observe(self, table: str, ticket: Ticket | DeviceTicket) -> None:
        self._choices.observe(table, ticket.ids if isinstance(ticket, Ticket) else ticket.asked_of_host)

    def fits(self, asked: Content) -> bool:
        """Whether there are slots for all rows of a mini-batch at once, if no other holds any, and room
        beside one as large as the largest of late."""
        if self.own_room(asked) + self._piece_room > self.room_bytes:
            return False
        return all(self._slots_for(self.table_of[t], ids) for t, ids in asked.ids.items())

    def _slots_for(self, table: str, ids: NDArray[np.int64]) -> bool:
        if len(ids) > self.buffers[table].slots_unkept:
            return False
        slots, count = self._device_slots.get(table, len(ids)), len(self._devices)
        return len(ids) <= slots or int(np.bincount(ids % count).max()) <= slots

    def would_fit(self, one: Content, index: int, held_bytes: int) -> bool:
        """Whether there would be slots for all rows of a mini-batch, the largest so far, if the budget were
        divided anew."""
        own = self._asked_by(one, self.table_of)
        if (asked := self._asked.or_more(own)) == self._asked:
            return False
        kept = {name: len(rows) for name, rows in (self._kept or {}).items()}
        try:
            shares = self._split.of(asked, kept, index=index, pair_bytes=held_bytes + own.room_bytes)
        except BudgetError:
            return False  # for now: it is the error of who finds no room
        return all(
            shares.slots[n] - kept.get(n, 0) >= count <= shares.device_slots.get(n, count)
            for n, count in own.rows.items()
        )

    @staticmethod
    def _cancel(tickets: Tickets) -> None:
        for ticket in tickets.values():
            ticket.cancel()

    @property
    def undecided(self) -> bool:
        """A policy is to be chosen, for the first time; no mini-batch may be under way."""
        return self._choices.undecided

    def decide(self) -> None:
        """Go on with the policies that hit most on what was seen since the last time."""
        self._choices.decide()

    def gather(self, asked: Content, tickets: Tickets) -> dict[str, Any]:
        """The rows of a mini-batch by table, copied out: arrays, or tensors on a device that keeps rows. Its
        slots are given back."""
        try:
            return self._gather(self._output(asked), tickets)
        except BaseException:
            self._cancel(tickets)
            raise

    def _gather(self, raw: NDArray[np.uint8], tickets: Tickets) -> dict[str, Any]:
        at, out = 0, dict[str, Any]()
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

    def gather_in_pieces(self, asked: Content, arrived: Callable[[PieceTicket], bool]) -> dict[str, Any]:
        """The rows of a mini-batch by table, as :meth:`gather` gives them, through few slots. No other ticket
        may be held. ``arrived`` waits for one, and says whether to go on; else there are no rows."""
        at, raw, out = 0, self._output(asked), dict[str, Any]()
        for node_type, one in asked.ids.items():
            name = self.table_of[node_type]
            buffer, device = self.buffers[name], self.on_devices.get(name)
            end = at + len(one) * buffer.row_bytes
            slots = min(buffer.slots_unkept, self._device_slots.get(name, buffer.slots))
            pieces = InPieces(buffer, device, slots, partial(self._observe, name))
            rows = pieces.gather(one, raw[at:end], arrived)
            if rows is None:
                return {}
            out[name] = rows
            at += self._split.padded(name, len(one))
        return out

    def output_room(self, one: Content, *, alone: bool = False) -> int:
        """The room that a mini-batch takes: that of the largest of late, whose memory it has, or its own."""
        own = self._asked_by(one, self.table_of)
        if alone or own.row_bytes > self._piece_bytes:
            self._outputs.shrink()
            self._piece_bytes = own.row_bytes
            self._outputs = Outputs(own.row_bytes, DEPTH, self.output_memory)
        self._piece_room = own.room_bytes if alone else max(self._piece_room, own.room_bytes)
        return self._piece_room

    def own_room(self, one: Content) -> int:
        """How much of the room a mini-batch takes where none is left over."""
        return self._asked_by(one, self.table_of).room_bytes

    def _output(self, one: Content) -> NDArray[np.uint8]:
        """Memory for the rows of a mini-batch."""
        own = self._asked_by(one, self.table_of)
        self._asked = self._asked.or_more(own)
        return self._outputs.take(self._split.bytes_of(own.rows))

    # Caches on disk.

    def save(self, name: str) -> None:
        """Write down which rows are in the buffers."""
        if not self.buffers:
            raise SourceError("there is nothing to save before the first mini-batch")
        if self._halo is not None:
            self._halo.check_name(name)
        for buffer in self.buffers.values():
            buffer.settle()
        policies = (
            {t: buffer.policy_name for t, buffer in self.buffers.items()} if self.policy == "auto" else {}
        )
        # Where the caller has said what is to be kept, that is loaded anyway.
        pieces = {
            table: partial(cached_pieces, buffer, self.on_devices.get(table), self.policy == "auto")
            for table, buffer in self.buffers.items()
        }
        saved.save(self.store, name, pieces, policies=policies)
        if self._halo is not None:
            self._halo.save(name)

    def _load(self, name: str) -> None:
        """Read the rows that were saved, as many as fit."""
        with saved.SavedCache(self.store, name) as cache:
            for table, buffer in self.buffers.items():
                above, choice = self.on_devices.get(table), self._choices.get(table)
                spare = STATIC_SPARE * self._asked.expected(table)
                if choice is None or above is not None or not go_on(cache, table, buffer, choice, spare):
                    load_rows(cache, table, buffer, above, partial(self._outputs.take, self._piece_bytes))

    # The rest.

    def memory(self) -> dict[str, int]:
        """Bytes of the budget by what they are for."""
        return dict(self._memory)

    def counted(self) -> Counted:
        """What reader and buffers have counted, those that were let go too."""
        return self._before.plus(self._reader, self.buffers, self.on_devices)

    def close(self) -> None:
        """Begin nothing more."""
        _close_levels(self.buffers, self.on_devices, self._reader)
        if self._halo is not None:
            self._halo.close()


def _close_levels(buffers: Mapping[str, Any], on_devices: Mapping[str, Any], reader: Any) -> None:
    for level in (*buffers.values(), *on_devices.values()):
        level.close()
    if reader is not None:
        reader.close()
