"""Whether a record can be followed: before a kernel does, each index is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.native import INLINED
from featstore.layout.records import Limits, TableRecord, bad_record

_FAULTS = (
    "",
    "more rows through host memory than there are",
    "an index outside of what it points into",
    "places for another number of rows",
    "a slot that takes two rows",
    "a run that is not of the packed rows",
    "places that are not each of {r.host_count} rows once",
    "a copy of a copy",
    "a row to keep that was in memory already",
    "a row to keep in two slots",
    "places that are not each of {r.count} rows once",
)
(_OK, _HOST, _INDEX, _LENGTHS, _SLOT_TWICE, _RUN, _PLACES, _COPY, _KEPT_HIT, _KEPT_TWICE,
 _ALL_PLACES) = range(len(_FAULTS))  # fmt: skip


def check_record(record: TableRecord, limits: Limits, path: Path) -> None:
    """Raise CorruptionError, which names ``path``, unless every index of a record stays inside what it points
    into, every row is filled once, and no slot takes two rows."""
    r = record
    numbers = (r.count, r.host_count, r.packed_first)
    limited = (limits.packed_rows, limits.shared_rows, limits.base_rows, limits.slots, limits.device_slots)
    fault = _fault(
        numbers, limited, r.hit_place, r.hit_slot, r.packed_place, r.shared_place, r.shared_row,
        r.base_place, r.base_row, r.copy_place, r.copy_from, r.admit_place, np.sort(r.admit_slot),
        r.device_place, r.device_slot, r.host_place,
    )  # fmt: skip
    if fault:
        raise bad_record(path, _FAULTS[fault].format(r=r))


@njit(**INLINED)
def _outside(values: NDArray[Any], limit: int) -> bool:
    for value in values:  # noqa: SIM110
        if value < 0 or value >= limit:
            return True
    return False


@njit(**INLINED)
def _new(seen: NDArray[np.uint8], places: NDArray[Any]) -> bool:
    """Mark places; whether each was there and not marked before."""
    for place in places:
        if place < 0 or place >= seen.shape[0] or seen[place]:
            return False
        seen[place] = 1
    return True


@njit(cache=True)  # with the lock: it takes less time than to come by it again
def _fault(
    numbers: Any, limits: Any, hit_place: NDArray[Any], hit_slot: NDArray[Any], packed_place: NDArray[Any],
    shared_place: NDArray[Any], shared_row: NDArray[Any], base_place: NDArray[Any], base_row: NDArray[Any],
    copy_place: NDArray[Any], copy_from: NDArray[Any], admit_place: NDArray[Any],
    admit_slots: NDArray[Any], device_place: NDArray[Any], device_slot: NDArray[Any],
    host_place: NDArray[Any],
) -> int:  # fmt: skip
    """What is wrong, a number of ``_FAULTS``. ``admit_slots`` are sorted."""
    count, host_count, packed_first = numbers
    packed_rows, shared_rows, base_rows, slots, device_slots = limits
    if host_count < 0 or host_count > count:
        return _HOST
    if (
        _outside(hit_slot, slots)
        or _outside(admit_slots, slots)
        or _outside(shared_row, shared_rows)
        or _outside(base_row, base_rows)
        or _outside(admit_place, host_count)
        or _outside(copy_from, host_count)
        or _outside(device_slot, device_slots)
    ):
        return _INDEX
    if (
        hit_place.shape[0] != hit_slot.shape[0]
        or shared_place.shape[0] != shared_row.shape[0]
        or base_place.shape[0] != base_row.shape[0]
        or copy_place.shape[0] != copy_from.shape[0]
        or admit_place.shape[0] != admit_slots.shape[0]
        or device_place.shape[0] != device_slot.shape[0]
    ):
        return _LENGTHS
    for i in range(1, admit_slots.shape[0]):
        if admit_slots[i] == admit_slots[i - 1]:
            return _SLOT_TWICE
    if packed_first < 0 or packed_first > packed_rows - packed_place.shape[0]:
        return _RUN
    # So many places at most as there are indices: what a record says is not believed before it is counted.
    brought = packed_place.shape[0] + shared_place.shape[0] + base_place.shape[0]
    if hit_place.shape[0] + brought + copy_place.shape[0] != host_count:
        return _PLACES
    seen = np.zeros(host_count, np.uint8)
    if not (
        _new(seen, hit_place)
        and _new(seen, packed_place)
        and _new(seen, shared_place)
        and _new(seen, base_place)
        and _new(seen, copy_place)
    ):
        return _PLACES
    fault: int = _fault_of_copies(host_count, hit_place, copy_place, copy_from, admit_place)
    if fault:
        return fault
    if host_count < count or host_place.shape[0]:
        if device_place.shape[0] + host_place.shape[0] != count:
            return _ALL_PLACES
        everywhere = np.zeros(count, np.uint8)
        if not (_new(everywhere, device_place) and _new(everywhere, host_place)):
            return _ALL_PLACES
    return _OK


@njit(**INLINED)
def _fault_of_copies(
    host_count: int, hit_place: NDArray[Any], copy_place: NDArray[Any], copy_from: NDArray[Any],
    admit_place: NDArray[Any],
) -> int:  # fmt: skip
    """What is wrong with copies and rows to keep, where every place is known to be right."""
    origin = np.arange(host_count)
    for i in range(copy_place.shape[0]):
        origin[copy_place[i]] = copy_from[i]
    for i in range(copy_from.shape[0]):
        if origin[copy_from[i]] != copy_from[i] or copy_from[i] == copy_place[i]:
            return _COPY
    kept = np.zeros(host_count, np.uint8)  # 1: in memory already, 2: stays
    for place in hit_place:
        kept[place] = 1
    for place in admit_place:
        if kept[origin[place]] == 1:
            return _KEPT_HIT
        if kept[origin[place]] == 2:
            return _KEPT_TWICE
        kept[origin[place]] = 2
    return _OK
