"""What placements are measured against: DiskGNN's own, and the best of all that can be tried.

**DiskGNN** (SIGMOD 2025, 5.1): mini-batches are cut into groups (its segments); rows that one mini-batch of a
group misses are packed for it, all others shared by the group; the smallest group that keeps the limit is
taken, because smaller groups amplify less and packed rows not at all. Reads are not looked at. Regions are
ordered by MinHash: each row is given the smallest of its mini-batches' numbers under two random permutations,
and rows are sorted by the first and then the second (Algorithm 1). The paper's limits leave room for one copy
of every row; where there is less, the largest group is taken and the rows that the fewest miss are left in
the base table.

**Brute force** tries, for each group size, every way to cut the classes of rows (missed by 1, 2, 3 ...
mini-batches of the group) into three ranges and to give each range a place, and plans every read of each.
Whatever is left of the limit then goes to a part of one more class, as long as that helps, again by trying
all. For small cases only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.compile.allotment import most_wanted, smallest_fit
from featstore.compile.groups import GROUP_SIZE_MAX, Group, GroupWork, group_of
from featstore.compile.placement import (
    SPLIT_STEPS,
    Forecast,
    Location,
    Placement,
    Reads,
    RegionOrder,
    disk_rows,
    forecast,
    tally_classes,
)
from featstore.compile.row_lists import RowLists
from featstore.compile.search import PAPER, SHARED_WRITES
from featstore.layout import TableLayout
from featstore.plan.cost import DeviceModel


def paper_choice(misses: RowLists, table_rows: int, row_bytes: int, disk_bytes: int | None) -> Placement:
    """DiskGNN's placement under a limit of packed and shared rows; distinct rows are counted exactly."""
    limit = misses.total if disk_bytes is None else disk_bytes // row_bytes
    packed = Placement(1, (int(Location.PACKED),))
    if misses.total <= limit:
        return packed
    largest = min(len(misses), GROUP_SIZE_MAX)

    @cache
    def rows(size: int) -> int:
        return int(tally_classes(misses, size, table_rows).sum())

    size = smallest_fit(rows, largest, limit)
    return Placement(size, PAPER) if size else most_wanted(tally_classes(misses, largest, table_rows), limit)


@njit(cache=True, nogil=True)
def take_minima(
    ids: NDArray[np.int64],
    first: int,
    second: int,
    minima: NDArray[np.int64],
    minima_second: NDArray[np.int64],
) -> None:
    """A mini-batch's numbers under the two permutations, to the rows that it misses, where they are
    smaller."""
    for i in range(ids.shape[0]):
        row = ids[i]
        minima[row] = min(minima[row], first)
        minima_second[row] = min(minima_second[row], second)


def minhash_order(misses: RowLists, table_rows: int, seed: int = 0) -> RegionOrder:
    """DiskGNN's order of a region: by the two MinHash values of a row's mini-batches (rows of equal values
    ascending)."""
    batches = len(misses)
    generator = np.random.default_rng(seed)
    permutations = generator.permutation(batches), generator.permutation(batches)

    def order(group: Group, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        minima = np.full((2, table_rows), batches, np.int64)
        for index in range(group.first, group.last):
            numbers = int(permutations[0][index]), int(permutations[1][index])
            take_minima(misses[index].astype(np.int64), *numbers, minima[0], minima[1])
        rows = group.rows[mask]
        keys = minima[0, rows] * batches + minima[1, rows]
        return rows[np.argsort(keys, kind="stable")]

    return order


def paper_forecast(
    placement: Placement, misses: RowLists, table_rows: int, base_layout: TableLayout, model: DeviceModel, *,
    extent_bytes_max: int, seed: int = 0,
) -> Forecast:  # fmt: skip
    """The exact forecast of a placement whose regions are in DiskGNN's order."""
    order = minhash_order(misses, table_rows, seed)
    return forecast(
        placement, misses, table_rows, base_layout, model, extent_bytes_max=extent_bytes_max, order=order
    )


class BruteForce:
    """All placements of some group sizes, tried once for any number of limits. Holds all lists in memory."""

    def __init__(
        self, misses: RowLists, table_rows: int, base_layout: TableLayout, model: DeviceModel, *,
        extent_bytes_max: int, group_sizes: Sequence[int],
    ) -> None:  # fmt: skip
        self._layout, self._model, self._extent_bytes_max = base_layout, model, extent_bytes_max
        self._work = GroupWork(table_rows)
        self._lists = [misses[index] for index in range(len(misses))]
        self._groups = {
            size: [
                group_of(misses, first, min(first + size, len(misses)), table_rows, self._work)
                for first in range(0, len(misses), size)
            ]
            for size in group_sizes
        }
        self._tallies = {size: tally_classes(misses, size, table_rows) for size in group_sizes}
        self._tried = [
            (placement, self._forecast(placement))
            for size in group_sizes
            for placement in self._placements(size)
        ]

    def _placements(self, size: int) -> list[Placement]:
        """Every choice of places for up to three ranges of classes; a row that one mini-batch misses is not
        shared."""
        top = int(np.flatnonzero(self._tallies[size].sum(axis=1)).max(initial=1))
        places = [int(place) for place in Location]
        choices = set()
        for first, second in itertools.combinations_with_replacement(range(top + 1), 2):
            for low, middle, high in itertools.permutations(places):
                choice = (low,) * first + (middle,) * (second - first) + (high,) * (top - second)
                if choice[0] != Location.SHARED:
                    choices.add(choice)
        return [Placement(size, choice) for choice in sorted(choices)]

    def _forecast(self, placement: Placement) -> Forecast:
        reads = Reads(self._layout, self._model, self._extent_bytes_max)
        for group in self._groups[placement.group_size]:
            reads.add(group, self._lists[group.first : group.last], placement, self._work)
        return reads.forecast()

    def best(self, disk_bytes: int, written_byte_seconds: float = 0.0) -> tuple[Placement, Forecast]:
        """The placement of the least time, of writing too, within a limit."""

        def worth(tried: tuple[Placement, Forecast]) -> float:
            rows = tried[1].packed_rows + SHARED_WRITES * tried[1].shared_rows
            return tried[1].seconds + rows * self._layout.row_bytes * written_byte_seconds

        found: list[tuple[Placement, Forecast]] = []
        for size in self._groups:
            fits = [t for t in self._tried if t[0].group_size == size and t[1].disk_bytes <= disk_bytes]
            placement, expected = min(fits, key=worth)
            splits = [
                (p, self._forecast(p)) for p in self._splits(placement, disk_bytes // self._layout.row_bytes)
            ]
            found.append(min([(placement, expected), *splits], key=worth))
        return min(found, key=worth)

    def _splits(self, placement: Placement, limit: int) -> list[Placement]:
        """A part of each class, as large as fits, given each other place."""
        tally, splits = self._tallies[placement.group_size], []
        for count, place in itertools.product(range(1, len(tally)), Location):
            if count > 1 or place != Location.SHARED:
                for steps in range(SPLIT_STEPS, 0, -1):
                    split = replace(
                        placement,
                        split_count=count,
                        split_fraction=steps / SPLIT_STEPS,
                        split_choice=int(place),
                    )
                    if disk_rows(split, tally) <= limit:
                        splits.append(split)
                        break
        return splits


def brute_force(
    misses: RowLists, table_rows: int, base_layout: TableLayout, model: DeviceModel, disk_bytes: int, *,
    extent_bytes_max: int, group_sizes: Sequence[int],
) -> tuple[Placement, Forecast]:  # fmt: skip
    """The best placement of these group sizes within a limit; see the module's text."""
    force = BruteForce(
        misses, table_rows, base_layout, model, extent_bytes_max=extent_bytes_max, group_sizes=group_sizes
    )
    return force.best(disk_bytes)
