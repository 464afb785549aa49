"""The choice of a placement: packed whole where there is room, else the best of the search."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from featstore.base.system import available_cores
from featstore.compile.groups import GROUP_BYTES_PER_ROW, GroupWork
from featstore.compile.placement import Forecast, Location, Placement, Reads, forecast, tally_classes
from featstore.compile.row_lists import RowLists
from featstore.compile.search import Search, estimate
from featstore.compile.survey import BYTES_PER_PAIR, PAIRS_MAX, Survey
from featstore.errors import BudgetError
from featstore.layout import TableLayout
from featstore.plan.cost import DeviceModel
from featstore.plan.extents import PLANNING_BYTES_PER_ID

#: Up to so many ids (a list counts as some more), candidates are compared by planning every read: the best
#: few, and so many ids in all. Up to so many ids times group sizes, every group size is looked at.
EXACT_IDS = 1 << 17


_EXACT_MAX = 40


_EXACT_WORK = 1 << 20


_IDS_PER_LIST = 256


#: Memory for each id of the longest list: the list, its rows by place, and planning.
_LIST_BYTES_PER_ID = 24 + PLANNING_BYTES_PER_ID


_SPARE_BYTES = 1 << 20


_PACKING_SECONDS = 1.5e-9  # of a core for each byte: copied to its segment, and written


def packed_byte_seconds(model: DeviceModel) -> float:
    """What packing a byte takes, where a training loop has a core: of the device, and of the other cores."""
    return model.written_byte_seconds + _PACKING_SECONDS / max(1, available_cores() - 1)


def choose_placement(
    misses: RowLists, table_rows: int, row_bytes: int, base_layout: TableLayout, model: DeviceModel,
    disk_bytes: int | None, *, extent_bytes_max: int, memory_bytes: int, seed: int = 0,
    written_byte_seconds: float = 0.0,
) -> tuple[Placement, Forecast]:  # fmt: skip
    """The placement that reads all lists in the least time with packed and shared rows of at most
    ``disk_bytes`` (None: no limit).

    ``misses``: for each mini-batch the rows that it must get from disk, distinct, in any order. The group
    size is kept so small that a group can be built in ``memory_bytes``. ``written_byte_seconds``: what a byte
    of these takes to be written, for each time that the lists are read. Disk use is exact; the time is
    estimated from a sample, or exact up to EXACT_IDS ids. Raises BudgetError with the smallest budget that
    works, ValueError for lists with rows that the table does not have.
    """
    longest = int(misses.lengths().max(initial=0))
    free = memory_bytes - GroupWork.needed_bytes(table_rows) - longest * _LIST_BYTES_PER_ID - _SPARE_BYTES
    if free < longest * GROUP_BYTES_PER_ROW:
        needed = memory_bytes - free + longest * GROUP_BYTES_PER_ROW
        raise BudgetError(needed, memory_bytes, "choose what is packed and what is shared")
    if disk_bytes is None:
        disk_bytes = misses.total * row_bytes
    if misses.total * row_bytes <= disk_bytes and not (written_byte_seconds and misses.total):
        reads = Reads(base_layout, model, extent_bytes_max)
        for length in misses.lengths().tolist():
            reads.run(length)
        return Placement(1, (int(Location.PACKED),)), reads.forecast()
    survey = Survey(
        misses, table_rows, seed, min(PAIRS_MAX, (memory_bytes - table_rows // 4) // BYTES_PER_PAIR)
    )
    size_max = survey.largest_group(free // GROUP_BYTES_PER_ROW)
    search = Search(
        survey, len(misses), size_max, base_layout, model, extent_bytes_max, disk_bytes,
        written_byte_seconds * row_bytes,
    )  # fmt: skip
    tallies: dict[int, NDArray[np.int64]] = {}
    found: list[tuple[Placement, Forecast]] = []
    work = misses.total + len(misses) * _IDS_PER_LIST
    exact = work <= EXACT_IDS
    sizes = range(1, size_max + 1) if work * size_max <= EXACT_IDS else ()
    for candidate in search.run(sizes)[: min(_EXACT_MAX, _EXACT_WORK // work) if exact else 1]:
        size = candidate.placement.group_size
        if size not in tallies:
            tallies[size] = tally_classes(misses, size, table_rows)
        placement = search.fitted(candidate, tallies[size])
        if exact:
            expected = forecast(
                placement, misses, table_rows, base_layout, model, extent_bytes_max=extent_bytes_max
            )
        else:
            expected = estimate(placement, tallies[size], candidate.costs, row_bytes, model)
        found.append((placement, expected))
    return min(found, key=lambda pair: search.worth(pair[1]))
