"""Rows in slots: how much memory they take, and moving them to the slots of another map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import shown
from featstore.base.ids import as_integers
from featstore.errors import ArgumentError, BudgetError
from featstore.storage.store import Table
from featstore.tiers.slots import layout
from featstore.tiers.slots import slots as sl

_MOVED_BYTES = 1 << 20  # of rows moved at once
#: What :func:`switch_policy` takes of memory for each slot while it works; and what rows kept for good take.
SWITCH_BYTES, KEPT_BYTES = 12, 4


def check_memory(memory: Any, name: str) -> NDArray[np.uint8]:
    """Memory that rows can be put in. Raises ArgumentError."""
    plain = type(memory) is np.ndarray and memory.dtype == np.uint8 and memory.ndim == 1
    if not plain or not memory.flags.c_contiguous or not memory.flags.writeable:
        raise ArgumentError(
            f"{name} must be a NumPy array of uint8, one-dimensional, contiguous and writable, not "
            f"{shown(memory)}"
        )
    found: NDArray[np.uint8] = memory
    return found


def parse_uses(next_use: Any, batches: int) -> NDArray[np.int32]:
    """For MIN the mini-batch of a trace that uses each row next, int32. Raises ArgumentError for what is
    neither the number of one nor NEVER."""
    uses = as_integers(next_use, "next uses must be integers", ArgumentError).reshape(-1)
    wrong = (uses < 0) | ((uses >= max(1, batches)) & (uses != layout.NEVER))
    if wrong.any():
        raise ArgumentError(
            f"a next use is the number of a mini-batch, up to {batches - 1:,}, or NEVER, not "
            f"{uses[np.argmax(wrong)]}"
        )
    return uses.astype(np.int32)


def buffer_bytes(slots: int, row_bytes: int, policy: int, batches: int = 0) -> int:
    """Memory of a feature buffer: the rows and the slot map."""
    return slots * row_bytes + layout.slot_map_bytes(slots, policy, batches)


def slots_for(memory_bytes: int, row_bytes: int, policy: int, batches: int = 0) -> int:
    """How many slots fit in so much memory, BUFFER_ROWS_MAX at most. Raises BudgetError where none does."""
    low, high = 0, min(memory_bytes // max(1, row_bytes), layout.BUFFER_ROWS_MAX)
    while low < high:
        middle = (low + high + 1) // 2
        if buffer_bytes(middle, row_bytes, policy, batches) <= memory_bytes:
            low = middle
        else:
            high = middle - 1
    if low == 0:
        raise BudgetError(
            buffer_bytes(1, row_bytes, policy, batches), memory_bytes, "make a feature buffer of one row"
        )
    return low


class SlotCost(NamedTuple):
    """What slots take where a buffer may have any of these ``policies``, by number, with so many bytes of
    each slot ``beside`` row and slot map."""

    policies: Sequence[int]
    beside: int = 0

    def bytes_of(self, slots: int, row_bytes: int) -> int:
        """Memory of so many slots."""
        return max(buffer_bytes(slots, row_bytes + self.beside, policy) for policy in self.policies)

    def slots_within(self, memory_bytes: int, row_bytes: int) -> int:
        """How many slots fit. Raises BudgetError where none does."""
        return min(slots_for(memory_bytes, row_bytes + self.beside, policy) for policy in self.policies)


def least_slots(table: Table, least: int = 1) -> int:
    """Slots that a table must have: so many, or as many as it has rows."""
    return max(1, min(table.rows, least))


def least_bytes(tables: Sequence[Table], cost: SlotCost, least: int = 1) -> int:
    """Memory of a buffer of each table that has the slots it must have."""
    return sum(cost.bytes_of(least_slots(table, least), table.row_bytes) for table in tables)


def share_slots(tables: Sequence[Table], memory_bytes: int, cost: SlotCost, least: int = 1) -> dict[str, int]:
    """Slots by table, in so much memory as :func:`least_bytes` at least: by the tables' sizes, and what one
    that fits whole leaves over is for the others."""
    slots: dict[str, int] = {}
    ordered = sorted(tables, key=lambda table: table.data_bytes)
    for at, table in enumerate(ordered):
        total = sum(max(1, one.data_bytes) for one in ordered[at:])
        share = memory_bytes * max(1, table.data_bytes) // total
        kept = least_bytes(ordered[at + 1 :], cost, least)
        share = min(max(share, least_bytes([table], cost, least)), memory_bytes - kept)
        slots[table.name] = max(1, min(table.rows, cost.slots_within(share, table.row_bytes)))
        memory_bytes -= cost.bytes_of(slots[table.name], table.row_bytes)
    return slots


def switch_policy(
    x: NDArray[Any], old: layout.SlotMap, policy: int, memory: NDArray[np.uint8], row_bytes: int
) -> layout.SlotMap:
    """A slot map of another policy in the same memory, with the rows that are there, which move in ``x`` to
    their new slots. The old map is gone, and nobody may use its slots; what its policy knew of the rows and
    what was counted is forgotten.

    In pieces, because what is known of rows takes memory. Slots are given away from the first on, so rows
    only move towards it.
    """
    present = np.flatnonzero((old.slots["status"] == layout.PRESENT) & (old.slots["row"] >= 0)).astype(
        np.int32
    )
    rows = old.slots["row"][present]
    m = layout.make_slot_map(len(x), policy, memory=memory)
    step = max(1, _MOVED_BYTES // max(16, row_bytes))
    for low in range(0, len(rows), step):
        some = rows[low : low + step]
        slots, missed, waits = (np.empty(len(some), np.int32) for _ in range(3))
        sl.acquire(m, some, slots, missed, waits, sl.NO_NEXT_USE)
        x[slots] = x[present[low : low + step]]
        sl.complete(m, slots)
        sl.release(m, slots)
    return m
