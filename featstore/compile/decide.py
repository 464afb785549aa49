"""Deciding about one table: what of each mini-batch comes from where.

The passes over the row lists, each out of core: which rows are on the accelerator, which are in memory when
(:mod:`residency`), and what becomes of the others (:mod:`placement`). Records and segments follow from that
(:mod:`featstore.compile.routing`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.dtypes import node_dtype
from featstore.compile.choose import choose_placement
from featstore.compile.groups import Group, shared_order
from featstore.compile.placement import Forecast, Placement
from featstore.compile.residency import NO_NEXT_BATCH, Residency, keep_fixed, keep_min, most_used
from featstore.compile.row_lists import RowLists, RowListsWriter
from featstore.compile.scan import NodeRows, scan
from featstore.plan.cost import DeviceModel
from featstore.storage.disk import Disk
from featstore.storage.store import Table
from featstore.trace.trace import Trace


@dataclass(frozen=True)
class Policy:
    """Who decides what is packed, and who orders the regions of shared rows: ours, or another design to
    compare it with.

    ``choose`` and ``order`` are called as :func:`featstore.compile.choose.choose_placement` and
    :func:`featstore.compile.groups.shared_order` are.
    """

    name: str
    choose: Callable[..., tuple[Placement, Forecast]]
    order: Callable[[Group, NDArray[np.bool_]], NDArray[np.int64]]


OURS = Policy("modelled time", choose_placement, shared_order)


@dataclass(frozen=True)
class TableOptions:
    """How one table is compiled. ``slots``: rows that host memory holds, ``device_slots``: that the
    accelerator holds; ``disk_bytes``: limit on what is written, None for no limit; ``memory_bytes``: of
    compiling."""

    slots: int
    device_slots: int
    disk_bytes: int | None
    residency: str
    extent_bytes_max: int
    memory_bytes: int
    seed: int
    policy: Policy
    written_byte_seconds: float  # what writing takes, for each time that all is read


@dataclass(frozen=True)
class TableDecision:
    """What was decided for one table, its lists being in scratch files."""

    table: Table
    node_type: str
    nodes: NodeRows
    rows: RowLists
    host: RowLists  # the rows that are not on the accelerator: the same lists where none is
    device: NDArray[np.int64]  # rows on the accelerator, ascending
    residency: Residency
    start: NDArray[np.int64]  # rows in memory before the first mini-batch, ascending: in slot order
    turn: NDArray[np.int32]
    slot_of_slot: NDArray[np.int32]  # the residency's slots, as slots of ``start``
    placement: Placement
    forecast: Forecast
    policy: Policy

    def close(self) -> None:
        """Let the scratch files go."""
        for lists in (self.rows, self.host, self.residency.moves, self.residency.misses):
            lists.close()

    @property
    def asked_rows(self) -> int:
        return self.rows.total


@njit(cache=True, nogil=True)
def drop_rows(
    rows: NDArray[Any], next_use: NDArray[np.int32], slot_of_row: NDArray[np.int32], left: NDArray[Any],
    ahead: NDArray[np.int32]
) -> int:  # fmt: skip
    """The rows that have no slot, and with them (unless it is empty) ``next_use``. Returns how many."""
    count, uses = 0, next_use.shape[0] > 0
    for i in range(rows.shape[0]):
        if slot_of_row[rows[i]] < 0:
            left[count] = rows[i]
            if uses:
                ahead[count] = next_use[i]
            count += 1
    return count


def plan_table(
    trace: Trace, node_type: str, table: Table, options: TableOptions, model: DeviceModel, disk: Disk,
    scratch: Path
) -> TableDecision:  # fmt: skip
    """Decide everything about one table. Raises IdError, BudgetError, DeviceError, DiskFullError."""
    dtype, ids = node_dtype(table.rows), int(trace.counts[node_type].sum())

    def writer(name: str, of: object = dtype, most: int | None = None) -> RowListsWriter:
        return RowListsWriter(disk, scratch / f"{table.name}.{name}", of, most)

    fixed, nodes = options.residency == "fixed", NodeRows(table)
    uses = np.zeros(table.rows if fixed or options.device_slots else 0, np.uint32)
    ahead = None if fixed else writer("next", np.int32, ids)
    rows, next_use, first_use = scan(trace, node_type, nodes, uses, writer("rows", most=ids), ahead)
    device, host = most_used(uses, options.device_slots), rows
    if len(device):
        uses[device], first_use[device] = 0, NO_NEXT_BATCH
        left = writer("host"), None if fixed else writer("ahead", np.int32)
        host, next_use = _without(rows, next_use, host_slots(table.rows, device), *left)
    moves, misses = writer("moves", np.int32), writer("misses")
    if next_use is None:
        residency = keep_fixed(host, uses, options.slots, moves, misses)
    else:
        residency = keep_min(host, next_use, first_use, options.slots, moves, misses)
        next_use.close()
    del uses, first_use
    placement, forecast = options.policy.choose(
        residency.misses, table.rows, table.row_bytes, table.layout, model, options.disk_bytes,
        extent_bytes_max=options.extent_bytes_max, memory_bytes=options.memory_bytes, seed=options.seed,
        written_byte_seconds=options.written_byte_seconds,
    )  # fmt: skip
    held = np.flatnonzero(residency.start >= 0)
    order = held[np.argsort(residency.start[held])]
    slot_of_slot = np.full(len(residency.start), -1, np.int32)
    slot_of_slot[order] = np.arange(len(order), dtype=np.int32)
    slot_of_slot[slot_of_slot < 0] = np.arange(len(order), len(slot_of_slot), dtype=np.int32)
    turn = residency.turn[order]
    turn = np.where(turn >= 0, slot_of_slot[turn], turn).astype(np.int32)
    return TableDecision(
        table, node_type, nodes, rows, host, device, residency, residency.start[order], turn, slot_of_slot,
        placement, forecast, options.policy,
    )  # fmt: skip


def host_slots(table_rows: int, members: NDArray[np.int64]) -> NDArray[np.int32]:
    """int32 [table_rows]: the slot of each of the members, in their order; -1 for all others."""
    slot_of_row = np.full(table_rows, -1, np.int32)
    slot_of_row[members] = np.arange(len(members), dtype=np.int32)
    return slot_of_row


def _without(
    rows: RowLists, next_use: RowLists | None, slot_of_row: NDArray[np.int32], out: RowListsWriter,
    ahead: RowListsWriter | None
) -> tuple[RowLists, RowLists | None]:  # fmt: skip
    """The lists without the rows that have a slot."""
    for batch in range(len(rows)):
        values = rows[batch]
        uses = np.empty(0, np.int32) if next_use is None else next_use[batch]
        left, later = np.empty_like(values), np.empty_like(uses)
        count = drop_rows(values, uses, slot_of_row, left, later)
        out.append(left[:count])
        if ahead is not None:
            ahead.append(later[:count])
    if next_use is not None:
        next_use.close()
    return out.finish(), None if ahead is None else ahead.finish()
