"""Routing: from what was decided about a table to the records of its mini-batches and the lists of rows of
its segments.

How long each record is must be known before the first one is written, because the layout of a table follows
from its size. Where all that is missed is packed, the lists say it. Elsewhere a pass over the groups comes
first: it orders their regions and notes of each missed row what becomes of it. The pass that makes the
records then goes straight through all lists and looks nothing up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.sort import radix_sort
from featstore.compile.decide import TableDecision, host_slots
from featstore.compile.groups import GroupWork, group_of
from featstore.compile.placement import Location
from featstore.compile.row_lists import RowLists, RowListsWriter
from featstore.compile.scan import DistinctRows
from featstore.layout.records import Lengths, TableRecord
from featstore.plan.extents import key_bits
from featstore.storage.disk import Disk
from featstore.trace.trace import Trace

_BASE, _PACKED = -1, -2


@njit(cache=True, nogil=True)
def look_up_places(rows: NDArray[Any], where: NDArray[Any], found: NDArray[Any]) -> tuple[int, int]:
    """found[i] = where[rows[i]]. Returns how many of them are packed, and how many in the base table."""
    packed = base = 0
    for i in range(rows.shape[0]):
        at = where[np.uint64(rows[i])]
        found[i] = at
        packed += int(at == _PACKED)
        base += int(at == _BASE)
    return packed, base


@njit(cache=True, nogil=True)
def route_rows(
    rows: NDArray[Any], place: NDArray[np.int32], moves: NDArray[np.int32], found: NDArray[Any],
    slot_of_slot: NDArray[np.int32], hit_place: NDArray[np.int32], hit_slot: NDArray[np.int32],
    packed: NDArray[np.uint64], shared_place: NDArray[np.int32], shared_row: NDArray[np.int64],
    base_place: NDArray[np.int32], base_row: NDArray[np.int64], admit_place: NDArray[np.int32],
    admit_slot: NDArray[np.int32], place_bits: int,
) -> None:  # fmt: skip
    """Part a mini-batch's rows by where they come from, and note which of them stay.

    An empty ``place`` is the identity. ``found``: of each missed row, see :class:`Routes`; empty if all are
    packed. ``packed`` becomes ``row << place_bits | place``. All outputs have the lengths they need.
    """
    identity, all_packed, bits = place.shape[0] == 0, found.shape[0] == 0, np.uint64(place_bits)
    hits = packs = shared = base = admitted = missed = 0
    for i in range(rows.shape[0]):
        at = np.int32(i) if identity else place[i]
        move = moves[i]
        if move >= 0:
            hit_place[hits] = at
            hit_slot[hits] = slot_of_slot[move]
            hits += 1
            continue
        if move < -1:
            admit_place[admitted] = at
            admit_slot[admitted] = slot_of_slot[-2 - move]
            admitted += 1
        there = np.int64(_PACKED) if all_packed else np.int64(found[missed])
        missed += 1
        if there == _PACKED:
            packed[packs] = np.uint64(rows[i]) << bits | np.uint64(at)
            packs += 1
        elif there >= 0:
            shared_place[shared], shared_row[shared] = at, there
            shared += 1
        else:
            base_place[base], base_row[base] = at, rows[i]
            base += 1


@dataclass(frozen=True)
class OnDevice:
    """What of a mini-batch is on the accelerator, and the places of all else; int32, see
    :mod:`featstore.layout.records`."""

    device_place: NDArray[np.int32]
    device_slot: NDArray[np.int32]
    host_place: NDArray[np.int32]


class Routes:
    """Where the missed rows of a table go, and how long its parts of the records are. Of a missed row,
    ``found`` says: its row of the shared table, _BASE or _PACKED; None if all are packed. ``shared``: the
    rows of all groups' regions, a list for each, in region order.

    ``lengths``: see :class:`~featstore.layout.records.Lengths`.
    """

    def __init__(self, plan: TableDecision, trace: Trace, disk: Disk, scratch: Path) -> None:
        self._plan, self._trace = plan, trace
        most = int(trace.counts[plan.node_type].max(initial=0))
        self._place_bits = key_bits(plan.table.rows, most, "compile mini-batches: their ids")
        self._packed = RowListsWriter(disk, scratch / f"{plan.table.name}.packed", plan.host.dtype)
        shared = RowListsWriter(disk, scratch / f"{plan.table.name}.shared", plan.host.dtype)
        self._device_slot = host_slots(plan.table.rows, plan.device) if len(plan.device) else None
        self._found: RowLists | None = None
        misses = plan.residency.misses
        packed, base = misses.lengths(), np.zeros(len(misses), np.int64)
        if not plan.placement.all_packed:
            wide = np.int32 if misses.total < 2**31 else np.int64
            self._found = self._locate(
                RowListsWriter(disk, scratch / f"{plan.table.name}.found", wide), shared, packed, base
            )
        self.shared = shared.finish()
        self.lengths = self._measure(packed, base)

    def _locate(
        self,
        found: RowListsWriter,
        shared: RowListsWriter,
        packed: NDArray[np.int64],
        base: NDArray[np.int64],
    ) -> RowLists:
        """Go through the groups: order their regions, look up each missed row, count."""
        plan, misses = self._plan, self._plan.residency.misses
        rows, size = plan.table.rows, plan.placement.group_size
        work, where, shared_first = GroupWork(rows), np.empty(rows, found.dtype), 0
        for first in range(0, len(misses), size):
            last = min(first + size, len(misses))
            group = group_of(misses, first, last, rows, work)
            choices = plan.placement.choices(group.rows, group.counts)
            region = plan.policy.order(group, choices == Location.SHARED)
            where[group.rows] = np.where(choices == Location.PACKED, _PACKED, _BASE)
            where[region] = np.arange(shared_first, shared_first + len(region))
            shared.append(region)
            shared_first += len(region)
            for batch in range(first, last):
                values = misses[batch]
                there = np.empty(len(values), found.dtype)
                packed[batch], base[batch] = look_up_places(values, where, there)
                found.append(there)
        return found.finish()

    def _measure(self, packed: NDArray[np.int64], base: NDArray[np.int64]) -> Lengths:
        plan = self._plan
        misses, host = plan.residency.misses.lengths(), plan.host.lengths()
        count = self._trace.counts[plan.node_type]
        copies, device = count - plan.rows.lengths(), plan.rows.lengths() - host
        if self._device_slot is not None:
            for batch in np.flatnonzero(copies).tolist():  # which of the copies are there is to be looked up
                p, there = self._placed(batch, self._device_slot)
                copies[batch], device[batch] = len(p.copy_place), len(there.device_place)
        host_place = count - device if self._device_slot is not None else np.zeros_like(count)
        return Lengths(
            hit=host - misses, packed=packed, shared=misses - packed - base, base=base, copy=copies,
            admit=plan.residency.admitted, device=device, host=host_place,
        )  # fmt: skip

    def _places(self, batch: int) -> DistinctRows:
        """The places of a mini-batch's rows."""
        plan = self._plan
        rows = plan.rows[batch]
        if len(rows) < int(self._trace.counts[plan.node_type][batch]):
            return plan.nodes.places(self._trace.ids(batch)[plan.node_type], batch)
        none = np.empty(0, np.int32)
        return DistinctRows(rows, none, none, none)

    def _placed(self, batch: int, device_slot: NDArray[np.int32]) -> tuple[DistinctRows, OnDevice]:
        """What of a mini-batch passes through host memory, places counted among those alone, and what is on
        the accelerator."""
        p, count = self._places(batch), int(self._trace.counts[self._plan.node_type][batch])
        place = p.place if len(p.place) else np.arange(count, dtype=np.int32)
        rows = np.empty(count, np.int64)
        rows[place] = p.rows
        rows[p.copy_place] = rows[p.copy_from]
        slot = device_slot[rows]
        there = slot >= 0
        rank = (np.cumsum(~there) - 1).astype(np.int32)
        own, copies = ~there[place], ~there[p.copy_place]
        host = DistinctRows(
            p.rows[own], rank[place[own]], rank[p.copy_place[copies]], rank[p.copy_from[copies]]
        )
        device_place = np.flatnonzero(there).astype(np.int32)
        return host, OnDevice(device_place, slot[device_place], np.flatnonzero(~there).astype(np.int32))

    def records(self) -> Iterator[TableRecord]:
        """Each mini-batch's part of its record, in order; on the way the lists of packed rows are written."""
        packed_first = 0
        for batch in range(len(self._trace)):
            if self._device_slot is None:
                record, packed = self._record(batch, self._places(batch), packed_first)
            else:
                p, there = self._placed(batch, self._device_slot)
                record, packed = self._record(batch, p, packed_first)
                record = replace(
                    record, host_count=len(there.host_place), device_place=there.device_place,
                    device_slot=there.device_slot, host_place=there.host_place,
                )  # fmt: skip
            self._packed.append(packed)
            packed_first += len(packed)
            yield record

    def _record(
        self, batch: int, p: DistinctRows, packed_first: int
    ) -> tuple[TableRecord, NDArray[np.uint64]]:
        """A mini-batch's part of its record, but for the accelerator, and the rows of its own segment,
        ascending."""
        plan, lengths = self._plan, self.lengths

        def empty(length: NDArray[np.int64], dtype: type[np.generic]) -> NDArray[Any]:
            return np.empty(int(length[batch]), dtype)

        hit_place, hit_slot = empty(lengths.hit, np.int32), empty(lengths.hit, np.int32)
        keys, spare = empty(lengths.packed, np.uint64), empty(lengths.packed, np.uint64)
        shared_place, shared_row = empty(lengths.shared, np.int32), empty(lengths.shared, np.int64)
        base_place, base_row = empty(lengths.base, np.int32), empty(lengths.base, np.int64)
        admit_place, admit_slot = empty(lengths.admit, np.int32), empty(lengths.admit, np.int32)
        found = np.empty(0, np.int32) if self._found is None else self._found[batch]
        route_rows(
            p.rows, p.place, plan.residency.moves[batch], found, plan.slot_of_slot, hit_place, hit_slot, keys,
            shared_place, shared_row, base_place, base_row, admit_place, admit_slot, self._place_bits,
        )  # fmt: skip
        row_bits = max(1, (plan.table.rows - 1).bit_length())
        if radix_sort(keys, spare, self._place_bits, self._place_bits + row_bits):
            keys = spare
        places = (keys & np.uint64((1 << self._place_bits) - 1)).astype(np.int32)
        count = int(self._trace.counts[plan.node_type][batch])
        record = TableRecord(
            count, count, packed_first, hit_place, hit_slot, places, shared_place, shared_row, base_place,
            base_row, p.copy_place, p.copy_from, admit_place, admit_slot,
        )  # fmt: skip
        return record, keys >> np.uint64(self._place_bits)

    def finish(self) -> tuple[RowLists, RowLists]:
        """The rows of each mini-batch's own segment, ascending, and those of each group's region, in its
        order."""
        if self._found is not None:
            self._found.close()
        return self._packed.finish(), self.shared
