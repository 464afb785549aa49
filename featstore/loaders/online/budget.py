"""How an online loader's budget is divided: the reader, rows of mini-batches handed over, what is known of
those under way, and what chooses a policy; all the rest is slots, shared by the tables by the bytes that a
mini-batch asks of each. The memory of devices is a budget of its own, whose slot maps lie in the host's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from featstore.base.buffers import ALIGNMENT
from featstore.errors import BudgetError
from featstore.plan.budget import TableNeed, own_bytes
from featstore.reader.lookup import table_need
from featstore.tiers.slots import layout
from featstore.tiers.slots.choose import CANDIDATES
from featstore.tiers.slots.rows import KEPT_BYTES, SWITCH_BYTES, buffer_bytes, slots_for

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore, Table

SAMPLED = 2  # mini-batches that wait to be extracted
DEPTH = 3  # mini-batches that exist at once with their rows, the loop's own among them
CHOOSING_BYTES = 6 << 20  # of what tries policies for one table
_CHOOSING_SHARE = 12  # of the budget that all of these may take
_BYTES_PER_ID = 40  # of mini-batches under way: ids, slots, what was missed
BESIDE_KEPT = 2  # mini-batches for which there are slots beside rows kept for good
_ROWS_LEAST = 1024  # of a table, for which slots are made whatever the first mini-batch has


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
        self._reader_bytes, self._verify = reader_bytes, verify
        self._devices, self._device_memory, self._device_policy = devices, device_memory, device_policy

    def _map_bytes(self, table: str, slots: int) -> int:
        """Memory of a buffer of so many slots; with room for the slot map of any policy that may be
        chosen."""
        names = CANDIDATES if self._policy == "auto" else (self._policy,)
        return max(buffer_bytes(slots, self._slot_bytes(table), layout.POLICIES[name]) for name in names)

    def _slot_bytes(self, table: str) -> int:
        """Memory of a slot beside the slot map: the row, and what changing the policy or keeping rows for
        good takes."""
        beside = {"auto": SWITCH_BYTES, "static": KEPT_BYTES}.get(self._policy, 0)
        return self._store.tables[table].row_bytes + beside

    def reader_memory(self, tables: Mapping[str, Table]) -> int:
        """The reader's part of the budget."""
        return own_bytes(self._memory_bytes, self._needs(tables), self._reader_bytes)

    def _needs(self, tables: Mapping[str, Table]) -> list[TableNeed]:
        return [table_need(t, self._verify, by_row=False) for t in tables.values()]

    def of(self, tables: Mapping[str, Table], rows: Mapping[str, int], kept: Mapping[str, int]) -> Shares:
        """The shares, where a mini-batch has so many ``rows`` of each table, and so many as ``kept`` says are
        kept for good. Raises BudgetError with the smallest budget that works."""
        device_slots = self._of_devices(tables, rows) if self._device_memory else {}
        needs = self._needs(tables)
        # A node type that hardly occurs in the first mini-batch may occur more in others.
        weights = {n: max(rows[n], min(t.rows, _ROWS_LEAST)) * t.row_bytes for n, t in tables.items()}

        def fixed(memory_bytes: int) -> dict[str, int]:
            reader = own_bytes(memory_bytes, needs, self._reader_bytes)
            under_way = (SAMPLED + self._extracted) * _BYTES_PER_ID * sum(rows.values())
            parts = {"reader": reader, "handed over": DEPTH * self.bytes_of(rows), "under way": under_way}
            if device_slots:
                parts["slot maps of devices"] = sum(map(self._device_map_bytes, device_slots.values()))
            choosing = CHOOSING_BYTES * len(tables)
            if self._policy == "auto" and choosing <= memory_bytes // _CHOOSING_SHARE:
                parts["choosing a policy"] = choosing + sum(
                    self.uses_bytes(t, memory_bytes) for t in tables.values()
                )
            return parts

        parts = fixed(self._memory_bytes)
        rest = self._memory_bytes - sum(parts.values())
        total = sum(weights.values())
        least = {n: rows[n] + (kept[n] + rows[n] * (BESIDE_KEPT - 1) if kept.get(n) else 0) for n in tables}
        smallest = max(
            -(-self._map_bytes(n, min(least[n], t.rows)) * total // weights[n]) for n, t in tables.items()
        )
        if rest < smallest:
            needed = sum(parts.values()) + smallest
            while sum(fixed(needed).values()) + smallest > needed:  # more memory has a larger reader, too
                needed = sum(fixed(needed).values()) + smallest
            one_more = (
                f"{BESIDE_KEPT} more and the static rows asked for" if any(kept.values()) else "one more"
            )
            raise BudgetError(
                needed, self._memory_bytes, f"hold the reader, three mini-batches and a buffer of {one_more}"
            )
        slots = {}
        # What a table that fits whole leaves over is for the others.
        for name in sorted(tables, key=lambda n: self._map_bytes(n, tables[n].rows) / weights[n]):
            table = tables[name]
            slots[name] = min(table.rows, self._slots_within(name, rest * weights[name] // total))
            rest, total = rest - self._map_bytes(name, slots[name]), total - weights[name]
        return Shares(
            slots, device_slots, parts | {f"buffer of {n}": self._map_bytes(n, s) for n, s in slots.items()}
        )

    def _of_devices(self, tables: Mapping[str, Table], rows: Mapping[str, int]) -> dict[str, int]:
        """Slots of each device, by table. Raises BudgetError with the smallest memory of a device that
        works."""
        weights = {name: rows[name] * t.row_bytes for name, t in tables.items()}
        total, needed = (
            sum(weights.values()),
            {n: self._device_rows(min(rows[n], t.rows)) for n, t in tables.items()},
        )
        slots = {
            name: self._device_memory * weights[name] // total // t.row_bytes for name, t in tables.items()
        }
        if any(slots[name] < needed[name] for name in tables):
            smallest = max(-(-needed[n] * t.row_bytes * total // weights[n]) for n, t in tables.items())
            raise BudgetError(
                smallest, self._device_memory, "hold a mini-batch's rows on its devices (device_memory=)"
            )
        return {name: min(slots[name], -(-t.rows // self._devices)) for name, t in tables.items()}

    def _device_rows(self, batch_rows: int) -> int:
        """Rows of a mini-batch that belong on one device, about: ids are not spread evenly."""
        count = self._devices
        return batch_rows if count == 1 else -(-batch_rows // count) + 4 * math.isqrt(batch_rows)

    def _device_map_bytes(self, slots: int) -> int:
        return self._devices * layout.slot_map_bytes(slots, layout.POLICIES[self._device_policy])

    def _slots_within(self, table: str, memory_bytes: int) -> int:
        names = CANDIDATES if self._policy == "auto" else (self._policy,)
        return min(slots_for(memory_bytes, self._slot_bytes(table), layout.POLICIES[name]) for name in names)

    def bytes_of(self, rows: Mapping[str, int]) -> int:
        """Bytes of a mini-batch of so many rows by table."""
        return sum(self.padded(name, count) for name, count in rows.items())

    def padded(self, table: str, rows: int) -> int:
        """Bytes of so many rows, and what keeps those of the next table aligned."""
        return -(-rows * self._store.tables[table].row_bytes // ALIGNMENT) * ALIGNMENT

    def uses_bytes(self, table: Table, memory_bytes: int) -> int:
        """Memory in which the uses of each row are counted, where that is a small part of a budget: a static
        set needs it."""
        return 2 * table.rows if 2 * table.rows <= memory_bytes // _CHOOSING_SHARE else 0
