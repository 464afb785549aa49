"""Compiling one table: what of each mini-batch comes from where, and the segments that have to be packed for it.

The passes over the row lists, each out of core: which rows are on the accelerator, which are in memory when (:mod:`residency`), what
becomes of the others (:mod:`placement`), and, group by group, the lists of rows of every segment and each mini-batch's part of its record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from featstore.compiled.groups import Group, GroupWork, group_of, shared_order
from featstore.compiled.lists import RowLists, RowListsWriter
from featstore.compiled.placement import Choice, Forecast, Placement, choose
from featstore.compiled.records import TableRecord
from featstore.compiled.residency import Residency, keep_fixed, keep_min, most_used
from featstore.compiled.scan import NodeRows, Places, new_counts, scan
from featstore.cost import DeviceModel
from featstore.disk import Disk
from featstore.order.parts import node_dtype
from featstore.store import Table
from featstore.trace import Trace

_BASE, _PACKED = -1, -2


@dataclass(frozen=True)
class Policy:
    """Who decides what is packed, and who orders the regions of shared rows: ours, or another design to compare it with.

    ``choose`` and ``order`` are called as :func:`featstore.compiled.placement.choose` and :func:`featstore.compiled.groups.shared_order`
    are.
    """

    name: str
    choose: Callable[..., tuple[Placement, Forecast]]
    order: Callable[[Group, NDArray[np.bool_]], NDArray[np.int64]]


OURS = Policy("modelled time", choose, shared_order)


@dataclass(frozen=True)
class TableOptions:
    """How one table is compiled. ``slots``: rows that host memory holds, ``device_slots``: that the accelerator holds;
    ``disk_bytes``: limit on what is written, None for no limit; ``memory_bytes``: of compiling."""

    slots: int
    device_slots: int
    disk_bytes: int | None
    residency: str
    extent_bytes_max: int
    memory_bytes: int
    seed: int
    policy: Policy


@dataclass(frozen=True)
class TablePlan:
    """What was decided for one table, its lists being in scratch files."""

    table: Table
    node_type: str
    nodes: NodeRows
    rows: RowLists
    device: NDArray[np.int64]  # rows on the accelerator, ascending
    residency: Residency
    start: NDArray[np.int64]  # rows in memory before the first mini-batch, ascending: in slot order
    turn: NDArray[np.int32]
    slot_of_slot: NDArray[np.int32]  # the residency's slots, as slots of ``start``
    misses: RowLists
    placement: Placement
    forecast: Forecast
    policy: Policy

    def close(self) -> None:
        """Let the scratch files go."""
        for lists in (self.rows, self.residency.hits, self.residency.admits, self.misses):
            if lists is not None:
                lists.close()

    @property
    def asked_rows(self) -> int:
        return self.rows.total


@njit(cache=True, nogil=True)
def drop_rows(rows: NDArray[np.int64], slot_of_row: NDArray[np.int32], out: NDArray[np.int64]) -> int:
    """The rows that have no slot. Returns how many."""
    count = 0
    for i in range(rows.shape[0]):
        if slot_of_row[rows[i]] < 0:
            out[count] = rows[i]
            count += 1
    return count


def plan_table(
    trace: Trace, node_type: str, table: Table, options: TableOptions, model: DeviceModel, disk: Disk, scratch: Path
) -> TablePlan:  # fmt: skip
    """Decide everything about one table. Raises IdError, BudgetError, DeviceError, DiskFullError."""

    def writer(name: str, dtype: object) -> RowListsWriter:
        return RowListsWriter(disk, scratch / f"{table.name}.{name}", dtype)

    dtype = node_dtype(table.rows)
    nodes = NodeRows(table)
    uses, first_use = new_counts(table.rows)
    rows = scan(trace, node_type, nodes, uses, first_use, writer("rows", dtype))
    device = most_used(uses, options.device_slots)
    host = rows
    if len(device):
        uses[device] = 0
        first_use[device] = np.iinfo(np.int32).max
        host = _without(rows, _slots(table.rows, device), writer("host", dtype))
    if options.residency == "fixed":
        residency = keep_fixed(host, uses, options.slots, writer("hits", np.int32))
    else:
        residency = keep_min(
            host,
            first_use,
            options.slots,
            writer("next", np.int32),
            writer("hits", np.int32),
            writer("admits", np.int32),
        )
    del uses, first_use
    misses = _missed(host, residency.hits, writer("misses", dtype))
    placement, forecast = options.policy.choose(
        misses, table.rows, table.row_bytes, table.layout, model, options.disk_bytes, extent_bytes_max=options.extent_bytes_max,
        memory_bytes=options.memory_bytes, seed=options.seed,
    )  # fmt: skip
    held = np.flatnonzero(residency.start >= 0)
    order = held[np.argsort(residency.start[held])]
    slot_of_slot = np.full(len(residency.start), -1, np.int32)
    slot_of_slot[order] = np.arange(len(order), dtype=np.int32)
    slot_of_slot[slot_of_slot < 0] = np.arange(len(order), len(slot_of_slot), dtype=np.int32)
    turn = residency.turn[order]
    turn = np.where(turn >= 0, slot_of_slot[turn], turn).astype(np.int32)
    return TablePlan(
        table, node_type, nodes, rows, device, residency, residency.start[order], turn, slot_of_slot, misses, placement, forecast,
        options.policy,
    )  # fmt: skip


def _slots(table_rows: int, members: NDArray[np.int64]) -> NDArray[np.int32]:
    slot_of_row = np.full(table_rows, -1, np.int32)
    slot_of_row[members] = np.arange(len(members), dtype=np.int32)
    return slot_of_row


def _without(rows: RowLists, slot_of_row: NDArray[np.int32], out: RowListsWriter) -> RowLists:
    for batch in range(len(rows)):
        values = rows[batch].astype(np.int64, copy=False)
        left = np.empty(len(values), np.int64)
        out.append(left[: drop_rows(values, slot_of_row, left)])
    return out.finish()


def _missed(rows: RowLists, hits: RowLists, out: RowListsWriter) -> RowLists:
    for batch in range(len(rows)):
        out.append(rows[batch][hits[batch] < 0])
    return out.finish()


@dataclass
class Segments:
    """What has to be packed for a table: ``packed``, a list for each mini-batch; ``shared``, the rows of all groups' regions, a list
    for each, in region order."""

    packed: RowListsWriter
    shared: RowListsWriter


def table_records(plan: TablePlan, trace: Trace, segments: Segments) -> Iterator[TableRecord]:
    """Each mini-batch's part of its record, in order; on the way the lists of all segments are written."""
    table, size = plan.table, max(1, plan.placement.group_size)
    work = GroupWork(table.rows)
    where = np.empty(
        table.rows, np.int32 if plan.misses.total < 2**31 else np.int64
    )  # row of the shared table, or one of:
    device_slot = _slots(table.rows, plan.device) if len(plan.device) else None
    packed_first = shared_first = 0
    for first in range(0, len(plan.misses), size):
        last = min(first + size, len(plan.misses))
        group = group_of(plan.misses, first, last, table.rows, work)
        choices = plan.placement.choices(group.rows, group.counts)
        region = plan.policy.order(group, choices == Choice.SHARED)
        where[group.rows] = np.where(choices == Choice.PACKED, _PACKED, _BASE)
        where[region] = np.arange(shared_first, shared_first + len(region))
        segments.shared.append(region)
        shared_first += len(region)
        for batch in range(first, last):
            record, packed = _record(plan, trace, batch, where, packed_first, device_slot)
            segments.packed.append(packed)
            packed_first += len(packed)
            yield record


def _record(
    plan: TablePlan, trace: Trace, batch: int, where: NDArray[Any], packed_first: int,
    device_slot: NDArray[np.int32] | None,
) -> tuple[TableRecord, NDArray[np.int64]]:  # fmt: skip
    """A mini-batch's part of its record, and the rows of its own segment, ascending."""
    ids = trace.ids(batch)[plan.node_type]
    p = plan.nodes.places(ids, batch)
    host_count = len(ids)
    on_device: dict[str, NDArray[np.int32]] = {}
    if device_slot is not None:
        p, on_device = _beside_device(p, len(ids), device_slot)
        host_count = len(on_device["host_place"])
    hit, admit = plan.residency.hits[batch], None if plan.residency.admits is None else plan.residency.admits[batch]
    hits, missed = hit >= 0, hit < 0
    missed_rows, missed_place = p.rows[missed], p.place[missed]
    found = where[missed_rows]
    packed = np.flatnonzero(found == _PACKED)
    packed = packed[np.argsort(missed_rows[packed])]
    shared, base = found >= 0, found == _BASE
    admitted = np.empty(0, np.int64) if admit is None else np.flatnonzero(admit >= 0)
    admit_slot = np.empty(0, np.int32) if admit is None else plan.slot_of_slot[admit[admitted]]
    record = TableRecord(
        len(ids), host_count, packed_first, p.place[hits], plan.slot_of_slot[hit[hits]], missed_place[packed], missed_place[shared],
        found[shared], missed_place[base], missed_rows[base], p.copy_place, p.copy_from, p.place[admitted],
        admit_slot, **on_device,
    )  # fmt: skip
    return record, missed_rows[packed]


def _beside_device(
    p: Places, count: int, device_slot: NDArray[np.int32]
) -> tuple[Places, dict[str, NDArray[np.int32]]]:
    """What of a mini-batch passes through host memory, places counted among those alone, and what is on the accelerator."""
    rows = np.empty(count, np.int64)
    rows[p.place] = p.rows
    rows[p.copy_place] = rows[p.copy_from]
    slot = device_slot[rows]
    there = slot >= 0
    rank = (np.cumsum(~there) - 1).astype(np.int32)
    own, copies = ~there[p.place], ~there[p.copy_place]
    host = Places(p.rows[own], rank[p.place[own]], rank[p.copy_place[copies]], rank[p.copy_from[copies]])
    device_place = np.flatnonzero(there).astype(np.int32)
    return host, {
        "device_place": device_place,
        "device_slot": slot[device_place],
        "host_place": np.flatnonzero(~there).astype(np.int32),
    }
