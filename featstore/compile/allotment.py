"""Classes of rows on their places, under a limit on disk: the steps along the convex hull, taken in order.

:mod:`featstore.compile.search` says why that is the best choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.compile.placement import SPLIT_STEPS, Location, Placement, Tally, disk_rows

Floats = NDArray[np.float64]


def allot(
    tally: Tally, seconds: Floats, row_bytes: int, disk_bytes: int, leave_base: bool = True
) -> Placement | None:
    """The placement that takes the least time under a limit on disk.

    ``tally``: rows by class and split step, see :func:`~featstore.compile.placement.tally_classes`.
    ``seconds``: for each time that a row of a class is read, float64 [3, G + 1], by Location. Without
    ``leave_base``, no row stays in the base table; None if the limit is too small for that. Classes without
    rows go where the class before goes.
    """
    rows, size = tally.sum(axis=1), len(tally) - 1
    counts = np.arange(size + 1)
    choice = np.full(size + 1, Location.BASE, np.uint8)
    limit = disk_bytes // row_bytes
    if not leave_base:
        choice[1:] = np.where(counts[1:] >= 2, Location.SHARED, Location.PACKED)
        limit -= rows[1:].sum()
        if limit < 0:
            return None
    taken, places, copies = _steps(seconds * counts, rows, leave_base)
    used = np.cumsum(copies * rows[taken])
    fit = int(np.searchsorted(used, limit, side="right"))
    for count, place in zip(taken[:fit].tolist(), places[:fit].tolist(), strict=True):
        choice[count] = place
    for count in np.flatnonzero(rows[2:] == 0).tolist():
        choice[count + 2] = choice[count + 1]
    placement = Placement(size, _trim(choice[1:].tolist()))
    if fit == len(taken):
        return placement
    return split_class(placement, tally, disk_bytes // row_bytes, int(taken[fit]), Location(int(places[fit])))


def split_class(placement: Placement, tally: Tally, limit: int, count: int, place: Location) -> Placement:
    """The placement with as large a part of class ``count`` at ``place`` as a limit of rows on disk
    allows."""
    copies = {Location.BASE: 0, Location.PACKED: count, Location.SHARED: 1}
    before = Location(placement.choice[min(count, len(placement.choice)) - 1])
    parts = np.cumsum(tally[count]) * (copies[place] - copies[before])
    left = limit - disk_rows(placement, tally)
    steps = int(np.count_nonzero(parts <= left))
    if steps == 0 or parts[steps - 1] == 0:
        return placement
    return replace(placement, split_count=count, split_fraction=steps / SPLIT_STEPS, split_choice=int(place))


def _steps(
    seconds: Floats, rows: NDArray[Any], leave_base: bool
) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]:
    """The classes' steps along their hulls, the most seconds saved for a copy on disk first: class, new
    place, copies more of each row.

    ``seconds``: of all reads of a row, by place and class.
    """
    base, packed, shared = seconds
    counts = np.arange(len(rows))
    several, apart = counts >= 2, np.maximum(counts - 1, 1)
    to_packed = several & (packed < shared)
    steps = [(to_packed, Location.PACKED, (shared - packed) / apart, apart)]
    if leave_base:
        to_shared = several & (shared < base) & (base - shared > (shared - packed) / apart)
        past_shared = ~to_shared & (packed < base)
        steps = [
            (to_shared, Location.SHARED, base - shared, np.ones_like(counts)),
            (to_shared & to_packed, Location.PACKED, (shared - packed) / apart, apart),
            (past_shared, Location.PACKED, (base - packed) / np.maximum(counts, 1), counts),
        ]
    at = [np.flatnonzero(mask & (rows > 0)) for mask, _, _, _ in steps]
    order = np.argsort(
        -np.concatenate([saved[a] for a, (_, _, saved, _) in zip(at, steps, strict=True)]), kind="stable"
    )
    places = np.concatenate(
        [np.full(len(a), place, np.uint8) for a, (_, place, _, _) in zip(at, steps, strict=True)]
    )
    copies = np.concatenate([more[a] for a, (_, _, _, more) in zip(at, steps, strict=True)])
    return np.concatenate(at)[order], places[order], copies[order]


def smallest_fit(rows: Callable[[int], float], largest: int, limit: float) -> int | None:
    """The smallest group, up to ``largest``, of which all groups together have at most ``limit`` distinct
    rows; ``rows`` counts them."""
    low, high = 1, largest
    few, many = max(1.0, rows(high)), max(1.0, rows(low))
    if few > limit:
        return None
    while low < high:  # rows fall about as a power of the size
        power = np.log(many / max(limit, 1.0)) / max(np.log(many / few), 1e-9)
        size = min(high - 1, max(low, int(low * (high / low) ** power)))
        count = max(1.0, rows(size))
        if count <= limit:
            high, few = size, count
        else:
            low, many = size + 1, count
    return low


def most_wanted(tally: Tally, limit: int) -> Placement:
    """DiskGNN's choice where not all rows can be shared: those that most mini-batches of a group miss,
    ``limit`` of them."""
    rows = tally.sum(axis=1)
    several = np.cumsum(rows[::-1])[::-1]  # rows that so many or more mini-batches miss
    fewest = int(np.searchsorted(-several[1:], -limit)) + 1  # of those that are shared whole
    choice = [Location.BASE] * (fewest - 1) + [
        Location.SHARED if c > 1 else Location.PACKED for c in range(fewest, len(tally))
    ]
    placement = Placement(len(tally) - 1, _trim([int(place) for place in choice]))
    if fewest == 1:
        return placement
    return split_class(
        placement, tally, limit, fewest - 1, Location.SHARED if fewest > 2 else Location.PACKED
    )


def _trim(choice: Sequence[int]) -> tuple[int, ...]:
    """Without the end that only repeats."""
    end = len(choice)
    while end > 1 and choice[end - 2] == choice[-1]:
        end -= 1
    return tuple(choice[:end])
