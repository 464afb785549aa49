"""Placement: which missed rows are packed, which are shared by a group of mini-batches, and which are left in
the base table?

A limit on disk space is spent where it saves the most time. Each missed row of each mini-batch is one of

* **packed**: a copy of its own in the mini-batch's run of the packed table. The run is read whole, so a row
  costs its bytes and nothing else. One row of disk for every mini-batch that misses it.
* **shared**: one copy for a group of G consecutive mini-batches, in the group's region of the shared table,
  ordered so that what one mini-batch reads lies together (:mod:`featstore.compile.groups`). One row of disk
  for the group.
* **base**: read from the base table, at no disk.

How a row is placed depends on G and on how many mini-batches of the group miss it, c. That is fine enough,
because c is what a row's disk space and its neighbours in the region depend on, and it keeps a placement to a
handful of numbers that hold for rows nobody has looked at yet. One class c may be split: rows whose hash is
below a bound go the better way, so that the limit is used to the last 256th of the class.

The search (:mod:`featstore.compile.search`) estimates from a sample; what a placement takes on disk is
counted here, over all lists, and :func:`forecast` plans every read of it as the reader will.

DiskGNN (SIGMOD 2025, 5.1) packs rows of c = 1, shares all others, orders by MinHash and takes the smallest G
that fits; it never looks at reads. See ``benchmarks/yardsticks.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.hashing import GOLDEN
from featstore.compile.groups import Group, GroupWork, group_of, shared_order
from featstore.compile.row_lists import RowLists
from featstore.errors import ArgumentError
from featstore.layout import TableLayout
from featstore.plan.cost import DeviceModel
from featstore.plan.extents import plan_extents
from featstore.units import PAGE_BYTES

#: A split takes so many 256ths of a class.
SPLIT_STEPS = 256

_SWEEP = 4  # from so many ids on (a 4th of the table's rows), looking at every row is quicker
_EMPTY_POSITIONS = np.empty(0, np.int32)
_EMPTY_SERVED = np.empty(0, np.uint8)

#: Rows by class and split step, counted or estimated: [G + 1, SPLIT_STEPS].
Tally = NDArray[np.int64] | NDArray[np.float64]

RegionOrder = Callable[[Group, NDArray[np.bool_]], NDArray[np.int64]]


class Location(IntEnum):
    """Where a missed row is read from."""

    BASE = 0
    PACKED = 1
    SHARED = 2


@dataclass(frozen=True)
class Placement:
    """Where each missed row goes, by how many mini-batches of its group miss it.

    ``choice``: by that count c, at index c - 1; counts beyond its end take its last. ``split_count``: the
    class that is split (0: none), of which the share ``split_fraction``, by a hash of the row, takes
    ``split_choice`` instead.
    """

    group_size: int
    choice: tuple[int, ...]
    split_count: int = 0
    split_fraction: float = 0.0
    split_choice: int = int(Location.BASE)

    @property
    def all_packed(self) -> bool:
        """Whether every missed row is packed."""
        return self.choice == (int(Location.PACKED),) and self.split_count == 0

    def choices(self, rows: NDArray[np.int64], counts: NDArray[np.uint16]) -> NDArray[np.uint8]:
        """The Location of each row, given how many mini-batches of the group miss it."""
        out = np.empty(len(rows), np.uint8)
        steps = round(self.split_fraction * SPLIT_STEPS)
        decide(rows, counts, np.array(self.choice, np.uint8), self.split_count, steps, self.split_choice, out)
        return out


@dataclass(frozen=True)
class Forecast:
    """What it takes to read all missed rows of all mini-batches once.

    ``packed_rows``, ``shared_rows``: rows on disk (each packed row is read once). ``shared_reads_rows``,
    ``base_rows``: how often a row is wanted from a shared region, from the base table. ``seconds``: by the
    device model, without what a request costs once.
    """

    seconds: float
    packed_rows: int
    shared_rows: int
    shared_reads_rows: int
    base_rows: int
    disk_bytes: int
    bytes_read: int
    reads: int


def make_forecast(
    reads: float, pages: float, packed_rows: int, shared_rows: int, shared_reads_rows: int, base_rows: int,
    row_bytes: int, model: DeviceModel,
) -> Forecast:  # fmt: skip
    """The forecast of so many reads and pages."""
    seconds = reads * model.read_seconds + pages * PAGE_BYTES * model.byte_seconds
    disk_bytes, bytes_read = (packed_rows + shared_rows) * row_bytes, round(pages * PAGE_BYTES)
    return Forecast(
        seconds, packed_rows, shared_rows, shared_reads_rows, base_rows, disk_bytes, bytes_read, round(reads)
    )


@njit(cache=True, nogil=True)
def split_step(row: Any) -> Any:
    """The 256th of its class that a row belongs to (Fibonacci hashing: neighbours lie far apart)."""
    return np.uint64(row) * GOLDEN >> np.uint64(56)


@njit(cache=True, nogil=True)
def decide(
    rows: NDArray[np.int64],
    counts: NDArray[np.uint16],
    choice: NDArray[np.uint8],
    split_count: int,
    split_steps: int,
    split_choice: int,
    out: NDArray[np.uint8],
) -> None:
    """out[i] = the choice of row i; see :class:`Placement`."""
    last = choice.shape[0] - 1
    for i in range(rows.shape[0]):
        count = np.int64(counts[i])
        out[i] = choice[min(count - 1, last)]
        if count == split_count and split_step(rows[i]) < split_steps:
            out[i] = split_choice


# What a placement takes on disk, exactly.


@njit(cache=True, nogil=True)
def count_list(ids: NDArray[Any], counts: NDArray[np.uint16]) -> bool:
    """Add a list to the counts of a group. False for a row that the table does not have."""
    for i in range(ids.shape[0]):
        row = np.int64(ids[i])
        if row < 0 or row >= counts.shape[0]:
            return False
        counts[np.uint64(row)] += np.uint16(1)
    return True


@njit(cache=True, nogil=True)
def tally_list(ids: NDArray[Any], counts: NDArray[np.uint16], tally: NDArray[np.int64]) -> None:
    """tally[c, step] += 1 for each row of the list that the group's other lists have not brought yet; its
    count becomes 0."""
    for i in range(ids.shape[0]):
        row = np.uint64(ids[i])
        tally[min(np.int64(counts[row]), tally.shape[0] - 1), split_step(row)] += 1
        counts[row] = 0


@njit(cache=True, nogil=True)
def tally_all(counts: NDArray[np.uint16], tally: NDArray[np.int64]) -> None:
    """As :func:`tally_list`, for all rows of the table, those that nobody misses as well (a branch would cost
    more)."""
    for row in range(counts.shape[0]):
        tally[min(np.uint64(counts[row]), np.uint64(tally.shape[0] - 1)), split_step(row)] += 1
    counts[:] = 0


def tally_classes(misses: RowLists, group_size: int, table_rows: int) -> NDArray[np.int64]:
    """Rows by how many mini-batches of a group miss them and by their split step, over all groups: int64 [G +
    1, SPLIT_STEPS]."""
    counts, tally = np.zeros(table_rows, np.uint16), np.zeros((group_size + 1, SPLIT_STEPS), np.int64)
    for first in range(0, len(misses), group_size):
        last = min(first + group_size, len(misses))
        for index in range(first, last):
            if not count_list(misses[index], counts):
                raise ArgumentError(
                    f"mini-batch {index} misses a row that the table of {table_rows:,} rows does not have"
                )
        if _SWEEP * int(misses.offsets[last] - misses.offsets[first]) > table_rows:
            tally_all(counts, tally)
        else:
            for index in range(first, last):
                tally_list(misses[index], counts, tally)
    tally[0] = 0
    return tally


def class_rows(placement: Placement, tally: Tally) -> Tally:
    """Rows by Location and count, [3, G + 1], from :func:`tally_classes` or an estimate of it."""
    counts: Any = tally.sum(axis=1)
    place = np.resize(np.array(placement.choice, np.uint8)[-1:], len(tally))
    place[1 : len(placement.choice) + 1] = placement.choice[: len(tally) - 1]
    rows: Any = np.zeros((len(Location), len(tally)), tally.dtype)
    rows[place[1:], np.arange(1, len(tally))] = counts[1:]
    split = placement.split_count
    if 0 < split < len(tally):
        moved = tally[split, : round(placement.split_fraction * SPLIT_STEPS)].sum()
        rows[place[split], split] -= moved
        rows[placement.split_choice, split] += moved
    result: Tally = rows
    return result


def disk_rows(placement: Placement, tally: Tally) -> int:
    """Rows that a placement has on disk: packed for each mini-batch, shared for each group."""
    rows: Any = class_rows(placement, tally)
    return int(rows[Location.PACKED] @ np.arange(len(tally)) + rows[Location.SHARED].sum())


# Reads, exactly.


@njit(cache=True, nogil=True)
def publish(rows: NDArray[np.int64], choices: NDArray[np.uint8], words: NDArray[np.uint64]) -> None:
    """words[row] = its choice."""
    for i in range(rows.shape[0]):
        words[rows[i]] = choices[i]


@njit(cache=True, nogil=True)
def publish_region(region: NDArray[np.int64], start: int, words: NDArray[np.uint64]) -> None:
    """words[row] += its place in the shared table, above the two bits of its choice."""
    for i in range(region.shape[0]):
        words[region[i]] |= np.uint64(start + i) << np.uint64(2)


@njit(cache=True, nogil=True)
def part_list(
    ids: NDArray[Any], words: NDArray[np.uint64], base: NDArray[np.int64], shared: NDArray[np.int64]
) -> Any:
    """Part a list: the rows of the base table, the places in the shared table. Returns how many base, shared
    and packed."""
    in_base, in_shared, packed = 0, 0, 0
    for i in range(ids.shape[0]):
        word = words[np.uint64(ids[i])]
        choice = word & np.uint64(3)
        if choice == np.uint64(0):
            base[in_base] = ids[i]
            in_base += 1
        elif choice == np.uint64(2):
            shared[in_shared] = np.int64(word >> np.uint64(2))
            in_shared += 1
        else:
            packed += 1
    return in_base, in_shared, packed


class Reads:
    """Plans and adds up the reads of one group after the other, as the reader will make them.

    Packed runs lie one after the other in the order of the mini-batches, regions in that of the groups. That
    reads end where a file of these tables ends is left out. ``base_layout``: of the base table, whose row
    size the other tables have.
    """

    def __init__(self, base_layout: TableLayout, model: DeviceModel, extent_bytes_max: int) -> None:
        self._base, self._model, self._extent_bytes_max = base_layout, model, extent_bytes_max
        self._reads = self._pages = 0
        self._packed_rows = self._shared_rows = self._shared_reads_rows = self._base_rows = 0

    def add(
        self, group: Group, lists: Iterable[NDArray[Any]], placement: Placement, work: GroupWork,
        order: RegionOrder = shared_order
    ) -> None:  # fmt: skip
        """A group, whose mini-batches miss ``lists``. ``order`` gives the rows of its region (of those in a
        mask) in order."""
        choices = placement.choices(group.rows, group.counts)
        region = order(group, choices == Location.SHARED)
        publish(group.rows, choices, work.words)
        publish_region(region, self._shared_rows, work.words)
        self._shared_rows += len(region)
        shared_layout = TableLayout(self._shared_rows, self._base.row_bytes, max(1, self._shared_rows))
        for ids in lists:
            rows, places = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
            in_base, in_shared, packed = part_list(ids, work.words, rows, places)
            self._scattered(rows[:in_base], self._base)
            self._scattered(places[:in_shared], shared_layout)
            self.run(packed)
            self._base_rows += in_base
            self._shared_reads_rows += in_shared
        publish(group.rows, np.zeros(len(group.rows), np.uint8), work.words)

    def _scattered(self, rows: NDArray[np.int64], layout: TableLayout) -> None:
        if len(rows):
            extents = plan_extents(
                rows, _EMPTY_POSITIONS, _EMPTY_SERVED, len(rows), layout, self._model, self._extent_bytes_max
            )
            self._reads += extents.reads
            self._pages += extents.read_pages

    def run(self, rows: int) -> None:
        """The next run of packed rows; its reads begin at multiples of the longest one, see
        :func:`featstore.plan.extents.plan_runs`."""
        if rows:
            begin, end = (
                self._packed_rows * self._base.row_bytes,
                (self._packed_rows + rows) * self._base.row_bytes,
            )
            step = self._extent_bytes_max // PAGE_BYTES * PAGE_BYTES
            self._reads += (end - 1) // step - begin // step + 1
            self._pages += -(-end // PAGE_BYTES) - begin // PAGE_BYTES
            self._packed_rows += rows

    def forecast(self) -> Forecast:
        """All that was added."""
        rows = (self._packed_rows, self._shared_rows, self._shared_reads_rows, self._base_rows)
        return make_forecast(self._reads, self._pages, *rows, self._base.row_bytes, self._model)


def forecast(
    placement: Placement, misses: RowLists, table_rows: int, base_layout: TableLayout, model: DeviceModel, *,
    extent_bytes_max: int, order: RegionOrder = shared_order,
) -> Forecast:  # fmt: skip
    """Plan every read of every mini-batch: exact, but for reads that end where a file of the packed or shared
    table ends."""
    work, reads = GroupWork(table_rows), Reads(base_layout, model, extent_bytes_max)
    for first in range(0, len(misses), placement.group_size):
        last = min(first + placement.group_size, len(misses))
        group = group_of(misses, first, last, table_rows, work)
        reads.add(group, (misses[index] for index in range(first, last)), placement, work, order)
    return reads.forecast()
