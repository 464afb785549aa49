"""How an online loader's budget is divided: the reader, rows of mini-batches handed over, what is known of
those under way, and what chooses a policy; all the rest is slots, shared by the tables by the bytes that a
mini-batch asks of each. The memory of devices is a budget of its own, whose slot maps lie in the host's.

Where there is memory, nearly four of the largest mini-batches so far may be handed over at once, and each has
its slots all at once, two beside each other. With less there are fewer handed over, then no two that have
slots, and with less still they go through few slots in pieces. The least is a small reader, room for two
mini-batches, the loop's and the one that is being made, and the slots of two small pieces.

What is named as the smallest budget depends on nothing but the largest demand so far. A loader with that
much is refused none of the mini-batches that were seen, however it went through them; and what is refused
later depends on the mini-batch and the one before it, never on how the budget happened to be divided. So
whoever gives what was named, and begins anew, is not refused again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from featstore.base.buffers import ALIGNMENT
from featstore.errors import BudgetError
from featstore.hosts.split_store import WholeStore
from featstore.plan.budget import TableNeed, own_bytes
from featstore.reader.lookup import table_need
from featstore.tiers.chosen import choosing_bytes, slot_cost
from featstore.tiers.slots import layout
from featstore.units import format_bytes

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore, Table

SAMPLED = 2  # mini-batches that wait to be extracted
DEPTH = 3  # mini-batches that exist at once with their rows, at most, the loop's own among them
_SPARE = 1.25  # later mini-batches may be larger by so much; where there is memory, it is set aside
_ROOMS = (DEPTH * _SPARE, 2 * _SPARE)  # in mini-batches, where each has its slots all at once
_EXIST = (SAMPLED + 1 + DEPTH) // 2  # mini-batches that exist for each that has room; two have all there is
_BYTES_PER_ID = 8 * _EXIST
SAMPLES_EXIST = _EXIST + 1  # the same of samples, and the copy of edges that the loop or a device has
SAMPLES_UNDER_WAY = "samples under way"  # of the parts, edges and the like of those that have slots
_CLAIM_BYTES_PER_ID = 40  # of those under way: ids, slots, what was missed
_ASKED_BYTES_PER_ID = 48  # the same, of rows that are asked of another host
BESIDE_KEPT = 2  # mini-batches for which there are slots beside rows kept for good
_ROWS_LEAST = 1024  # of a table, for which slots are made whatever mini-batches have had of it
_PIECES_BYTES = 1 << 20  # of slots through which mini-batches go in pieces, at least
PIECES = 2  # that have slots at once: one is read while the one before is copied out


class Demand(NamedTuple):
    """The most that a mini-batch has asked for: ``rows`` of each table; ``row_bytes`` and ``ids`` of all
    tables together; ``sample_bytes`` of what was sampled beside these; ``room_bytes``: of all that, what it
    takes of the room for mini-batches."""

    rows: dict[str, int]
    row_bytes: int = 0
    ids: int = 0
    sample_bytes: int = 0
    room_bytes: int = 0

    def or_more(self, other: Demand) -> Demand:
        """The most of both."""
        names = dict.fromkeys([*self.rows, *other.rows])
        rows = {name: max(self.rows.get(name, 0), other.rows.get(name, 0)) for name in names}
        pairs = zip(self[1:], other[1:], strict=True)
        return Demand(rows, *(max(one) for one in pairs))

    def expected(self, table: str) -> int:
        """Rows of a later mini-batch, at most, as these suggest."""
        return int(_SPARE * self.rows[table]) + 1


class Shares(NamedTuple):
    """``slots``, and ``device_slots`` of each device, by table; ``memory``: bytes of the host's budget by
    what they are for."""

    slots: dict[str, int]
    device_slots: dict[str, int]
    memory: dict[str, int]


class BudgetSplit:
    """Divides a budget; see the module's text.

    Args:
        memory_bytes: the host's budget.
        policy: a name, or ``"auto"``.
        extracted: how many mini-batches are extracted at once.
        reader_bytes: what the reader takes beyond maps and checksums; None for the usual.
        verify: whether the reader holds checksums.
        devices, device_memory, device_policy: how many devices keep rows, in how much memory each, by which
            policy.
    """

    PINNED_SHARE = 0.75  # of the slots: further mini-batches are extracted beside one only up to that

    def __init__(
        self, store: OpenStore, memory_bytes: int, *, policy: str, extracted: int, reader_bytes: int | None,
        verify: bool, devices: int, device_memory: int, device_policy: str,
    ) -> None:  # fmt: skip
        self._store, self._memory_bytes, self._policy, self._extracted = (
            store,
            memory_bytes,
            policy,
            extracted,
        )
        self._cost = slot_cost(policy)
        several = isinstance(store, WholeStore) and store.place.hosts > 1
        self._claim_bytes = _CLAIM_BYTES_PER_ID + _ASKED_BYTES_PER_ID * several
        self._reader_bytes, self._verify = reader_bytes, verify
        self._devices, self._device_memory, self._device_policy = devices, device_memory, device_policy

    def _map_bytes(self, table: str, slots: int, claim_bytes: int = 0) -> int:
        """Memory of a buffer of so many slots; with room for the slot map of any policy that may be
        chosen."""
        return self._cost.bytes_of(slots, self._store.tables[table].row_bytes + claim_bytes)

    def _slots_within(self, table: str, memory_bytes: int, claim_bytes: int) -> int:
        return self._cost.slots_within(memory_bytes, self._store.tables[table].row_bytes + claim_bytes)

    def of(
        self, asked: Demand, kept: Mapping[str, int], *, index: int | None = None, pair_bytes: int = 0
    ) -> Shares:
        """The shares, where mini-batches ask for so much, and so many rows as ``kept`` says are kept for
        good.

        ``index``: the number of a mini-batch that finds no room; it and the one that the loop has take
        ``pair_bytes`` of room, which will do where there is none for two of the largest, and then tables
        have slots for a few rows at least. Raises BudgetError with the smallest budget that has room for two.
        """
        tables = {name: self._store.tables[name] for name in asked.rows}
        devices = self._of_devices(tables, asked.rows, index is None) if self._device_memory else {}
        whole = {n: self._least_slots(t, asked, kept, asked.expected(n)) for n, t in tables.items()}
        # That one is read while another is counts for more than that more of them are handed over.
        pairs = {n: self._pair_slots(t, asked, kept) for n, t in tables.items()}
        for least, room in product((pairs, whole) if self._extracted > 1 else (whole,), _ROOMS):
            parts = self._parts(tables, asked, devices, room, whole=True)
            if self._left(parts, least, 0) >= 0:
                return self._filled(asked, whole, devices, parts, 0)
        parts = self._parts(tables, asked, devices, 2, whole=False)
        claim = self._claim_bytes  # what goes in pieces is known while it has slots, which none kept has
        parts["under way"] -= claim * sum(kept.values())
        least = self._piece_slots(tables, asked, kept, _PIECES_BYTES)
        left = self._left(parts, least, claim)
        needed = self._memory_bytes - left
        if pair_bytes and left < 0:
            parts["handed over"] = min(pair_bytes, parts["handed over"])
            left = self._left(parts, least, claim)
        if pair_bytes and left < 0:
            least = self._piece_slots(tables, asked, kept, 0)
            left = self._left(parts, least, claim)
        if left < 0:
            raise BudgetError(needed, self._memory_bytes, _held_at_least(asked, index, any(kept.values())))
        reader = own_bytes(self._memory_bytes, self._needs(tables), self._reader_bytes)
        parts["reader"] += min(reader - parts["reader"], left // 4)
        parts["handed over"] += min(asked.room_bytes // 2, left // 4)
        return self._filled(asked, least, devices, parts, claim)

    def _least_slots(self, table: Table, asked: Demand, kept: Mapping[str, int], rows: int) -> int:
        """Slots for so many rows of a mini-batch at once, or as many as one has."""
        rows, keeps = max(PIECES, min(rows, asked.expected(table.name))), kept.get(table.name, 0)
        return _at_most(table, rows + (keeps + rows * (BESIDE_KEPT - 1) if keeps else 0))

    def _pair_slots(self, table: Table, asked: Demand, kept: Mapping[str, int]) -> int:
        """Slots with which two mini-batches have theirs at once."""
        beside = math.ceil(2 * asked.rows[table.name] / self.PINNED_SHARE) + kept.get(table.name, 0)
        whole = self._least_slots(table, asked, kept, asked.expected(table.name))
        return max(whole, _at_most(table, beside))

    def _piece_slots(
        self, tables: Mapping[str, Table], asked: Demand, kept: Mapping[str, int], piece_bytes: int
    ) -> dict[str, int]:
        """Slots for pieces of so many bytes of each table, or of a row each."""
        return {
            n: self._least_slots(t, asked, kept, max(PIECES, piece_bytes // t.row_bytes))
            for n, t in tables.items()
        }

    def _needs(self, tables: Mapping[str, Table]) -> list[TableNeed]:
        here = [one for table in tables.values() for one in table.tables_on_disk]
        return [table_need(table, self._verify, by_row=False) for table in here]

    def _parts(
        self, tables: Mapping[str, Table], asked: Demand, devices: Mapping[str, int], room: float, *,
        whole: bool,
    ) -> dict[str, int]:  # fmt: skip
        """Bytes of all but the slots, with room for so many mini-batches. Not ``whole``: they go through the
        slots in pieces; then the reader is as small as can be, and no policy is chosen."""
        memory_bytes = self._memory_bytes
        claims = self._claim_bytes * self._extracted * whole
        parts = {
            "reader": own_bytes(memory_bytes if whole else 1, self._needs(tables), self._reader_bytes),
            "handed over": int(room * asked.room_bytes),
            "under way": int(claims * asked.ids * room / 2),  # each may be half as large as all the room
        }
        if whole and asked.sample_bytes:  # in pieces there is one under way, which the others' room is for
            parts[SAMPLES_UNDER_WAY] = int(self._extracted * asked.sample_bytes * room / 2)
        if devices:
            parts["slot maps of devices"] = sum(map(self._device_map_bytes, devices.values()))
        choosing = choosing_bytes(list(tables.values()), memory_bytes)
        if whole and self._policy == "auto" and choosing:
            parts["choosing a policy"] = sum(choosing.values())
        return parts

    def _left(self, parts: Mapping[str, int], least: Mapping[str, int], claim_bytes: int) -> int:
        """Bytes that these parts and so many slots leave over."""
        slots = sum(self._map_bytes(name, count, claim_bytes) for name, count in least.items())
        return self._memory_bytes - sum(parts.values()) - slots

    def _filled(
        self, asked: Demand, least: Mapping[str, int], devices: dict[str, int], parts: dict[str, int],
        claim_bytes: int,
    ) -> Shares:  # fmt: skip
        """Slots with all the rest, at least so many of each table."""
        rest = self._memory_bytes - sum(parts.values())
        tables = {name: self._store.tables[name] for name in least}
        # A node type that hardly occurs in the first mini-batch may occur more in others.
        weights = {
            n: max(asked.expected(n), _at_most(t, _ROWS_LEAST)) * t.row_bytes for n, t in tables.items()
        }
        total, slots = sum(weights.values()), {}
        others = {name: self._map_bytes(name, count, claim_bytes) for name, count in least.items()}
        # What a table that fits whole leaves over is for the others.
        whole = {n: _at_most(t, layout.BUFFER_ROWS_MAX) for n, t in tables.items()}
        for name in sorted(tables, key=lambda n: self._map_bytes(n, whole[n]) / weights[n]):
            own = others.pop(name)
            share = min(max(own, rest * weights[name] // total), rest - sum(others.values()))
            slots[name] = _at_most(tables[name], self._slots_within(name, share, claim_bytes))
            rest -= self._map_bytes(name, slots[name], claim_bytes)
            total -= weights[name]
        parts["under way"] += claim_bytes * sum(slots.values())
        return Shares(
            slots, devices, parts | {f"buffer of {n}": self._map_bytes(n, s) for n, s in slots.items()}
        )

    def _of_devices(
        self, tables: Mapping[str, Table], rows: Mapping[str, int], first: bool
    ) -> dict[str, int]:
        """Slots of each device, by table. Raises BudgetError with the smallest memory of a device that
        works, for the first mini-batch: later ones may go through in pieces."""
        weights = {name: max(1, rows[name]) * t.row_bytes for name, t in tables.items()}
        total, needed = (
            sum(weights.values()),
            {n: self._device_rows(min(rows[n], t.rows)) for n, t in tables.items()},
        )
        slots = {
            name: self._device_memory * weights[name] // total // t.row_bytes for name, t in tables.items()
        }
        needed = needed if first else dict.fromkeys(tables, PIECES)
        if any(slots[name] < min(needed[name], t.rows) for name, t in tables.items()):
            smallest = max(-(-needed[n] * t.row_bytes * total // weights[n]) for n, t in tables.items())
            raise BudgetError(
                smallest, self._device_memory, "hold a mini-batch's rows on its devices (device_memory=)"
            )
        most = {n: min(-(-t.rows // self._devices), layout.BUFFER_ROWS_MAX) for n, t in tables.items()}
        return {name: max(1, min(slots[name], most[name])) for name in tables}

    def _device_rows(self, batch_rows: int) -> int:
        """Rows of a mini-batch that belong on one device, about: ids are not spread evenly."""
        count = self._devices
        return batch_rows if count == 1 else -(-batch_rows // count) + 4 * math.isqrt(batch_rows)

    def _device_map_bytes(self, slots: int) -> int:
        return self._devices * layout.slot_map_bytes(slots, layout.POLICIES[self._device_policy])

    def demand(self, rows: Mapping[str, int], sample_bytes: int = 0) -> Demand:
        """Of a mini-batch of so many rows by table, one that occurs twice counts twice; and so much that was
        sampled beside their ids."""
        row_bytes, ids = max(ALIGNMENT, self.bytes_of(rows)), sum(rows.values())
        room_bytes = row_bytes + _BYTES_PER_ID * ids + SAMPLES_EXIST * sample_bytes
        return Demand(dict(rows), row_bytes, ids, sample_bytes, room_bytes)

    def bytes_of(self, rows: Mapping[str, int]) -> int:
        """Bytes of a mini-batch of so many rows by table."""
        return sum(self.padded(name, count) for name, count in rows.items())

    def padded(self, table: str, rows: int) -> int:
        """Bytes of so many rows, and what keeps those of the next table aligned."""
        return -(-rows * self._store.tables[table].row_bytes // ALIGNMENT) * ALIGNMENT


def _at_most(table: Table, slots: int) -> int:
    """So many slots, or as many as a table has rows; one where it has none."""
    return max(1, min(table.rows, slots))


def _held_at_least(asked: Demand, index: int | None, kept: bool) -> str:
    """What the smallest budget is for, in words."""
    which = "mini-batches" if index is None else f"mini-batches as large as number {index}"
    size = format_bytes(asked.row_bytes)
    size += f" and {format_bytes(asked.sample_bytes)} of edges" if asked.sample_bytes else ""
    rows = f"of {size} each, less with fewer seeds or neighbours" if asked.row_bytes else "without rows"
    static = " and the static rows asked for" if kept else ""
    return f"hold the reader, two {which} ({rows}), a few slots{static}"
