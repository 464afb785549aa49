"""A survey of the lists: one pass over them that keeps, of a sample of rows, every mini-batch that misses
them.

The best placement is looked for among many group sizes, and building every group of each of them would take
longer than packing. What the survey keeps is enough for all of them:

* Rows drawn by a hash of their number. How many rows are missed by c mini-batches of a group follows for
  every group size from one walk over them.
* All rows of a few mini-batches, the probes: see :mod:`featstore.compile.probes`. G mini-batches in a row are
  as good a group as any other G, so each probe is given a group in which it has a place of its own: the first
  of them at the beginning, where the rows that nearly all mini-batches miss lie, the others ever farther
  apart, as blocks get smaller. Their blocks count as many times as there are blocks nearest to them.

If probes are a small part of very many lists, or have nearly all rows in common with the others, only a
window of lists around the middle is kept for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.hashing import mix64
from featstore.base.sort import radix_sort
from featstore.compile.groups import GROUP_SIZE_MAX
from featstore.compile.probes import Lists, Probe, look_at
from featstore.compile.row_lists import RowLists

#: Ids of the rows drawn by hash, and of the probes: what is cheap to look at, and gives counts and costs
#: within a percent or two. What is quickly packed is looked at less: one in SAMPLED ids for each, but not
#: less than a third of that.
DRAWN_IDS = 1 << 17
PROBE_IDS = 150_000
SAMPLED_IDS = 160
#: Small lists make for many probes of little use.
PROBES_MAX = 64
#: All ids kept, at most, and their memory: pairs and their copy while they are sorted, then rows, offsets,
#: members, and what is looked at.
PAIRS_MAX = 6 << 20
BYTES_PER_PAIR = 40


@njit(cache=True, nogil=True)
def draw_rows(table_rows: int, salt: int, below: int, bitmap: NDArray[np.uint64]) -> None:
    """Set the bits of the rows whose salted 32-bit hash is smaller than ``below``."""
    limit, half, add = np.uint64(below), np.uint64(32), np.uint64(salt)
    for row in range(table_rows):
        drawn = np.uint64(mix64(np.uint64(row) + add) >> half < limit)
        bitmap[row >> 6] |= drawn << np.uint64(row & 63)


@njit(cache=True, nogil=True)
def mark_rows(ids: NDArray[Any], table_rows: int, bitmap: NDArray[np.uint64]) -> bool:
    """Set the bits of these rows. False if one is not in the table."""
    for i in range(ids.shape[0]):
        row = np.int64(ids[i])
        if row < 0 or row >= table_rows:
            return False
        bitmap[row >> 6] |= np.uint64(1) << np.uint64(row & 63)
    return True


@njit(cache=True, nogil=True)
def collect_pairs(
    ids: NDArray[Any],
    index: int,
    index_bits: int,
    table_rows: int,
    bitmap: NDArray[np.uint64],
    pairs: NDArray[np.uint64],
    known: int,
) -> int:
    """Append ``row << index_bits | index`` for each row whose bit is set in ``bitmap``.

    ``pairs`` has room for all ids and one more. Returns how many there are now, or -1 for a row that the
    table does not have.
    """
    bits = np.uint64(index_bits)
    for i in range(ids.shape[0]):
        row = np.int64(ids[i])
        if row < 0 or row >= table_rows:
            return -1
        pairs[np.uint64(known)] = np.uint64(row) << bits | np.uint64(index)
        known += int(bitmap[np.uint64(row >> 6)] >> np.uint64(row & 63) & np.uint64(1))
    return known


@njit(cache=True, nogil=True)
def index_pairs(
    pairs: NDArray[np.uint64],
    index_bits: int,
    rows: NDArray[np.int64],
    starts: NDArray[np.int64],
    members: NDArray[np.int32],
) -> int:
    """Sorted pairs as distinct rows, where each one's mini-batches begin, and the mini-batches. Returns how
    many rows."""
    bits = np.uint64(index_bits)
    mask = (np.uint64(1) << bits) - np.uint64(1)
    found = 0
    for i in range(pairs.shape[0]):
        row = np.int64(pairs[i] >> bits)
        if found == 0 or rows[found - 1] != row:
            rows[found] = row
            starts[found] = i
            found += 1
        members[i] = pairs[i] & mask
    starts[found] = pairs.shape[0]
    return found


@njit(cache=True, nogil=True)
def find_probes(
    starts: NDArray[np.int64],
    members: NDArray[np.int32],
    probe_of: NDArray[np.int16],
    ends: NDArray[np.int64],
    places: NDArray[np.int64],
) -> None:
    """The places of the rows of each probe, ascending, from ``ends[probe]`` on; ``ends`` becomes their ends.

    ``probe_of``: each mini-batch's number as a probe, or -1.
    """
    for place in range(starts.shape[0] - 1):
        for i in range(starts[place], starts[place + 1]):
            probe = probe_of[members[i]]
            if probe >= 0:
                places[ends[probe]] = place
                ends[probe] += 1


@njit(cache=True, nogil=True)
def count_groups(
    starts: NDArray[np.int64],
    members: NDArray[np.int32],
    group_of_member: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> None:
    """counts[c] += 1 for each group that misses a row c times. Row i is missed by
    ``members[starts[i]:starts[i + 1]]``, ascending."""
    for place in range(starts.shape[0] - 1):
        group, count = np.int32(-1), 0
        for i in range(starts[place], starts[place + 1]):
            own = group_of_member[members[i]]
            if own != group:
                counts[count] += 1
                count = 0
                group = own
            count = min(count + 1, counts.shape[0] - 1)
        counts[count] += 1
    counts[0] = 0


def spread(offsets: NDArray[np.int64], first: int, last: int, count: int) -> list[int]:
    """About ``count`` of the lists [first, last) that have elements, at the places of :func:`_part` in terms
    of elements; or all of them."""
    if count >= last - first:
        return [first + int(i) for i in np.flatnonzero(np.diff(offsets[first : last + 1]))]
    begin, total = int(offsets[first]), int(offsets[last] - offsets[first])
    elements = [begin + _part(k, count, total) for k in range(count)]
    return sorted({int(i) - 1 for i in np.searchsorted(offsets, elements, side="right")})


def _part(k: int, count: int, size: int) -> int:
    """Where in a group of ``size`` the k-th of ``count`` probes stands: the first at its beginning (what all
    mini-batches miss lies in the first block), the others ever farther apart, at cubes of equal steps."""
    return (2 * k) ** 3 * size // (2 * count - 1) ** 3


def _weight(k: int, count: int) -> float:
    """How many of a group's blocks, in ``count``-ths, are nearest to that of the k-th probe, by the cube
    roots of their places."""
    low, high = max(0, 2 * k - 1), 2 * k + 1
    return count * (high**3 - low**3) / (2 * count - 1) ** 3


def _sample(most: int, total: int) -> int:
    """How many of ``total`` ids to look at."""
    return max(most // 3, min(most, total // SAMPLED_IDS))


class Survey:
    """One pass over the lists; see the module's text. Raises ValueError for a list with a row that the table
    does not have.

    ``misses``: not all empty. ``size_max``: the largest group that can be asked for. ``pairs_max``: ids that
    are kept, about (BYTES_PER_PAIR each).
    """

    def __init__(self, misses: RowLists, table_rows: int, seed: int, pairs_max: int) -> None:
        self._misses, self._table_rows = misses, table_rows
        share = min(1.0, min(_sample(DRAWN_IDS, misses.total), pairs_max // 2) / max(1, misses.total))
        drawn = np.zeros(-(-table_rows // 64), np.uint64)
        draw_rows(table_rows, seed % 2**62, int(share * 2**32), drawn)
        self._first, self._last, probes = self._choose_probes(pairs_max // 2)
        bitmap = drawn.copy()
        for index in probes:
            self._mark(index, bitmap)
        lists = self._index(self._collect(drawn, bitmap, share))
        is_drawn = drawn[lists.rows >> 6] >> (lists.rows & 63).astype(np.uint64) & np.uint64(1)
        self._drawn = lists.at(np.flatnonzero(is_drawn)) if is_drawn.any() else lists
        self._probes = self._find_probes(lists, probes)

    @property
    def size_max(self) -> int:
        return self._last - self._first

    def _bad(self, index: int) -> ValueError:
        return ValueError(
            f"mini-batch {index} misses a row that the table of {self._table_rows:,} rows does not have"
        )

    def _mark(self, index: int, bitmap: NDArray[np.uint64]) -> None:
        if not mark_rows(self._misses[index], self._table_rows, bitmap):
            raise self._bad(index)

    def _choose_probes(self, pairs_max: int) -> tuple[int, int, list[int]]:
        """The window of mini-batches kept for probes, around the middle, and the probes.

        How many ids a probe brings is what other mini-batches have in common with one, times their number.
        """
        misses, batches = self._misses, len(self._misses)
        middle = int(np.searchsorted(misses.offsets, misses.total // 2, side="right")) - 1
        bitmap = np.zeros(-(-self._table_rows // 64), np.uint64)
        self._mark(middle, bitmap)
        others = [misses[int(i)] for i in np.linspace(0, batches - 1, min(batches, 4)).astype(int)]
        room = np.empty(max(len(o) for o in others) + 1, np.uint64)
        met = [collect_pairs(o, 0, 0, self._table_rows, bitmap, room, 0) for o in others]
        common = max(1.0, sum(met) / len(met))
        size = max(1, min(batches, GROUP_SIZE_MAX, int(pairs_max / common)))
        wanted = min(
            PROBES_MAX, _sample(PROBE_IDS, misses.total) * batches / misses.total, pairs_max / (common * size)
        )
        first = max(0, min(middle - size // 2, batches - size))
        self._all = wanted >= size
        self._pairs_expected = int(1.2 * max(1, int(wanted)) * common * size) + (1 << 16)
        return first, first + size, spread(misses.offsets, first, first + size, max(1, int(wanted)))

    def _collect(
        self, drawn: NDArray[np.uint64], bitmap: NDArray[np.uint64], share: float
    ) -> NDArray[np.uint64]:
        self._index_bits = max(1, (len(self._misses) - 1).bit_length())
        pairs, known = np.empty(int(self._misses.total * share) + self._pairs_expected, np.uint64), 0
        for index in range(len(self._misses)):
            ids = self._misses[index]
            if len(pairs) <= known + len(ids):
                pairs = np.concatenate([pairs, np.empty(len(pairs) // 2 + len(ids) + 1, np.uint64)])
            bits = bitmap if self._first <= index < self._last else drawn
            known = collect_pairs(ids, index, self._index_bits, self._table_rows, bits, pairs, known)
            if known < 0:
                raise self._bad(index)
        return pairs[:known]

    def _index(self, pairs: NDArray[np.uint64]) -> Lists:
        spare, bits = np.empty(len(pairs), np.uint64), self._index_bits
        if radix_sort(pairs, spare, bits, bits + max(1, (self._table_rows - 1).bit_length())):
            pairs, spare = spare, pairs
        rows, starts, members = (
            spare.view(np.int64),
            np.empty(len(pairs) + 1, np.int64),
            np.empty(len(pairs), np.int32),
        )
        found = index_pairs(pairs, bits, rows, starts, members)
        return Lists(rows[:found], starts[: found + 1], members)

    def _find_probes(self, lists: Lists, probes: list[int]) -> list[tuple[int, Lists]]:
        probe_of = np.full(len(self._misses), -1, np.int16)
        probe_of[probes] = np.arange(len(probes))
        ends = np.concatenate([[0], np.cumsum(self._misses.lengths()[probes])])
        places = np.empty(ends[-1], np.int64)
        find_probes(lists.starts, lists.members, probe_of, ends[:-1].copy(), places)
        return [(index, lists.at(places[ends[k] : ends[k + 1]])) for k, index in enumerate(probes)]

    def counts(self, size: int) -> NDArray[np.float64]:
        """How many rows are missed c times by a group of ``size``, over all groups: float64 [size + 1],
        scaled to all ids."""
        counts = np.zeros(size + 1, np.int64)
        count_groups(
            self._drawn.starts,
            self._drawn.members,
            np.arange(len(self._misses), dtype=np.int32) // size,
            counts,
        )
        ids = float(counts @ np.arange(size + 1))
        return counts.astype(np.float64) * (self._misses.total / max(ids, 1.0))

    def largest_group(self, rows_max: int) -> int:
        """The largest group that has at most ``rows_max`` distinct rows, about, with a fifth to spare; 1 at
        least."""

        def rows(size: int) -> float:
            return 1.2 * float(self.counts(size)[1:].sum()) / max(1.0, len(self._misses) / size)

        low, high = 1, self.size_max
        if rows(high) <= rows_max:
            return high
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if rows(middle) <= rows_max else (low, middle - 1)
        return low

    def look(self, size: int) -> list[Probe]:
        """The probes in groups of ``size`` (at most ``size_max``)."""
        looks, count = [], len(self._probes)
        for k, (index, lists) in enumerate(self._probes):
            weight = 1.0 if self._all else _weight(k, count)
            first = index - (index - self._first) % size if self._all else index - _part(k, count, size)
            first = max(self._first, min(first, self._last - size))
            looks.append(look_at(lists, index, first, first + size, weight))
        return looks
