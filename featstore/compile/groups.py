"""Groups of consecutive mini-batches: which of them miss a row, and in which order the rows of a shared
region lie.

A group's region holds each shared row once, and every mini-batch of the group reads its own rows out of it,
so what counts is that the rows of one mini-batch lie together. A row is ordered by the ascending list of the
mini-batches that miss it: first by the first of them, so that each mini-batch has one block that it reads
whole, then by the second, and so on. Rows missed by the same mini-batches are neighbours, what one misses
alone is one run, pairs are runs inside a block. DiskGNN orders by two MinHash values, which keep the smallest
members of the list under two random permutations; here the permutation is the order of the mini-batches
itself, one key holds as many members as 54 bits take (5 in groups of 1023), and no hash is needed.

In most groups, blocks are ordered by how many mini-batches miss a row (1, 2, 3, 4 or more) before the second
of them (:func:`counts_apart`). That keeps pairs and triples, which lie in runs, apart from what is missed
more often and does not.

Measured on independent mini-batches of a power law (36,000 of 2 M rows each, the default device), as seconds
to read all rows shared over seconds to read them packed, groups of 16, 64 and 128:

    rows of 128 B: MinHash 5.60, 13.6, 30.8; lists 1.20, 5.91, 14.9; counts, then lists 1.16, 4.78, 11.9
    rows of 512 B: MinHash 3.61, 7.98, 16.5; lists 1.08, 3.27, 7.55; counts, then lists 1.05, 2.97, 7.29
    rows of 4 KiB: MinHash 1.33, 1.89, 2.92; lists 1.01, 1.30, 1.83; counts, then lists 1.01, 1.31, 1.86

Lists alone are 2 to 8 % better where pairs have few rows, and where so many mini-batches miss a row that
there is no structure to keep. Keeping all counts apart (not only up to 4) is worse from groups of 64 on;
reversing every other list (as Gray codes do) changes nothing; the count before the first mini-batch is no
better than after it and costs large rows.

While the lists are read, one mini-batch after the other, a row is one word: its members from the top bit down
in 54 bits, and how many they are in the other 10. Words are dense (8 bytes for each row of the table) and
reused: after that, a group costs time and memory in its own rows only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.native import address_of, prefetch
from featstore.base.sort import radix_sort
from featstore.compile.row_lists import RowLists
from featstore.errors import ArgumentError

#: The largest group: its members' number takes 10 bits, and a key holds five of them.
GROUP_SIZE_MAX = 1023
#: Memory of a group for each of its distinct rows, at most: the group itself (18), the region being put in
#: order, choices and masks.
GROUP_BYTES_PER_ROW = 28

_COUNT_BITS = 10
_CLASS_BITS = 2  # how many members: 1, 2, 3, or more
_DIGIT_BITS = 8
_SMALL = 48  # rows that are sorted by insertion
_AHEAD = 16  # ids whose words are fetched ahead
_DENSE = 16  # from a 16th of the table's rows on, looking at every word is quicker than sorting


class GroupWork:
    """The words groups are built in, all zero between groups: 8 bytes for each row of the table."""

    def __init__(self, table_rows: int) -> None:
        self.words = np.zeros(table_rows, np.uint64)

    @staticmethod
    def needed_bytes(table_rows: int) -> int:
        return 8 * table_rows


@dataclass(frozen=True)
class Group:
    """Mini-batches ``[first, last)`` and the rows they miss.

    ``rows``: int64, ascending, distinct. ``counts``: uint16, how many of the group's mini-batches miss each.
    ``keys``: uint64, by which a region is ordered (see the module's text): the first member, the count, the
    other members; rows of equal keys lie in ascending order.
    """

    first: int
    last: int
    rows: NDArray[np.int64]
    counts: NDArray[np.uint16]
    keys: NDArray[np.uint64]

    @property
    def size(self) -> int:
        """Mini-batches of the group."""
        return self.last - self.first


@njit(cache=True, nogil=True)
def add_list(
    ids: NDArray[Any],
    member: int,
    bits: int,
    words: NDArray[np.uint64],
    address: int,
    touched: NDArray[np.uint64],
    known: int,
) -> int:
    """Enter mini-batch ``member`` (from 1) of a group into its rows' words (at ``address``), as long as there
    is room for members.

    Rows seen for the first time go to ``touched`` from ``known`` on. Returns how many are known now; -1 where
    a list names a row that the table does not have, or more rows than ``touched`` takes.
    """
    end, last = ids.shape[0], ids.shape[0] - 1
    width, room = np.uint64(bits), np.uint64(64 - _COUNT_BITS)
    count_mask = np.uint64((1 << _COUNT_BITS) - 1)
    for i in range(end):
        prefetch(address + 8 * np.int64(ids[min(i + _AHEAD, last)]))
        row = np.int64(ids[i])
        if row < 0 or row >= words.shape[0] or known >= touched.shape[0]:
            return -1
        word = words[np.uint64(row)]
        used = (word & count_mask) * width + width
        # No branch that depends on the word: they would be guessed wrong half of the time.
        touched[np.uint64(known)] = np.uint64(row)
        known += int(word == np.uint64(0))
        added = np.uint64(member) << (np.uint64(64) - min(used, room))
        words[np.uint64(row)] = word + np.uint64(1) | (added if used <= room else np.uint64(0))
    return known


@njit(cache=True, nogil=True)
def key_of(word: Any, bits: Any) -> Any:
    """The key of a row from its word: the first member, the class of its count, the other members."""
    low, by_class = np.uint64(64 - bits), np.uint64(_CLASS_BITS)
    count = word & np.uint64((1 << _COUNT_BITS) - 1)
    members = word ^ count
    first = members >> low << low
    many = min(count, np.uint64(1 << _CLASS_BITS)) - np.uint64(1)
    return first | many << (low - by_class) | (members ^ first) >> by_class


@njit(cache=True, nogil=True)
def take_rows(
    rows: NDArray[np.uint64],
    bits: int,
    words: NDArray[np.uint64],
    keys: NDArray[np.uint64],
    counts: NDArray[np.uint16],
) -> None:
    """Take the rows' keys and counts out of their words, leaving zeros."""
    for i in range(rows.shape[0]):
        word = words[rows[i]]
        keys[i] = key_of(word, bits)
        counts[i] = word & np.uint64((1 << _COUNT_BITS) - 1)
        words[rows[i]] = 0


@njit(cache=True, nogil=True)
def find_rows(words: NDArray[np.uint64], rows: NDArray[np.uint64]) -> int:
    """The rows whose word is not zero, ascending. Returns how many; ``rows`` holds one more."""
    found = 0
    for row in range(words.shape[0]):
        rows[found] = row
        found += int(words[row] != np.uint64(0))
        if found == rows.shape[0]:
            return found
    return found


def group_of(misses: RowLists, first: int, last: int, table_rows: int, work: GroupWork) -> Group:
    """The group of mini-batches ``[first, last)``, at most GROUP_SIZE_MAX of them.

    Raises ArgumentError for a list with a row that the table does not have; ``work`` is not to be used again
    then.
    """
    size = last - first
    if not 1 <= size <= GROUP_SIZE_MAX:
        raise ArgumentError(f"a group has 1 to {GROUP_SIZE_MAX} mini-batches, not {size}")
    ids = int(misses.offsets[last] - misses.offsets[first])
    touched = np.empty(min(ids, table_rows) + 1, np.uint64)
    known, bits = 0, size.bit_length()
    for index in range(first, last):
        known = add_list(
            misses[index], index - first + 1, bits, work.words, address_of(work.words), touched, known
        )
        if known < 0:
            raise ArgumentError(
                f"mini-batch {index} misses a row that the table of {table_rows:,} rows does not have"
            )
    if known * _DENSE > table_rows:
        find_rows(work.words, touched)
        touched = touched[:known]
    else:
        touched = touched[:known]
        spare = np.empty(known, np.uint64)
        if radix_sort(touched, spare, 0, max(1, (table_rows - 1).bit_length())):
            touched = spare
    keys, counts = np.empty(known, np.uint64), np.empty(known, np.uint16)
    take_rows(touched, bits, work.words, keys, counts)
    return Group(first, last, touched.view(np.int64), counts, keys)


@njit(cache=True, nogil=True)
def scatter_blocks(
    keys: NDArray[np.uint64], mask: NDArray[np.bool_], bits: int, places: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Bring the places of the keys in ``mask`` into blocks by their first member, ascending. Returns where
    blocks begin, by member."""
    low = np.uint64(64 - bits)
    starts = np.zeros((1 << bits) + 1, np.int64)
    for i in range(keys.shape[0]):
        if mask[i]:
            starts[(keys[i] >> low) + np.uint64(1)] += 1
    for block in range(1 << bits):
        starts[block + 1] += starts[block]
    at = starts.copy()
    for i in range(keys.shape[0]):
        if mask[i]:
            block = keys[i] >> low
            places[at[block]] = i
            at[block] += 1
    return starts


@njit(cache=True, nogil=True)
def _insert(keys: Any, rows: Any, low: Any, high: Any) -> None:
    for i in range(low + 1, high):
        key, row = keys[i], rows[i]
        j = i
        while j > low and keys[j - 1] > key:
            keys[j], rows[j] = keys[j - 1], rows[j - 1]
            j -= 1
        keys[j], rows[j] = key, row


@njit(cache=True, nogil=True)
def _spread(
    keys: Any, rows: Any, low: Any, high: Any, shift: Any, spare_keys: Any, spare_rows: Any, ends: Any
) -> None:
    """Sort ``[low, high)`` by one digit, stable; ``ends`` becomes where each digit's rows end."""
    by, digit_mask = np.uint64(shift), np.uint64((1 << _DIGIT_BITS) - 1)
    ends[:] = 0
    for i in range(low, high):
        ends[keys[i] >> by & digit_mask] += 1
    at = low
    for digit in range(1 << _DIGIT_BITS):
        count = ends[digit]
        ends[digit] = at
        at += count
    for i in range(low, high):
        digit = keys[i] >> by & digit_mask
        spare_keys[ends[digit] - low], spare_rows[ends[digit] - low] = keys[i], rows[i]
        ends[digit] += 1
    for i in range(low, high):
        keys[i], rows[i] = spare_keys[i - low], spare_rows[i - low]


@njit(cache=True, nogil=True)
def sort_block(
    keys: NDArray[np.uint64],
    rows: NDArray[Any],
    low: int,
    high: int,
    top_bit: int,
    spare_keys: NDArray[np.uint64],
    spare_rows: NDArray[Any],
) -> None:
    """Sort ``keys[low:high]``, equal above ``top_bit``, and ``rows`` with them; stable, most significant
    digit first.

    Most lists differ early, so that a digit or two and insertion settle them. The spare arrays hold
    ``high - low``.
    """
    stack = np.empty(((64 // _DIGIT_BITS + 1) << _DIGIT_BITS, 3), np.int64)
    ends = np.empty(1 << _DIGIT_BITS, np.int64)
    stack[0, 0], stack[0, 1], stack[0, 2] = low, high, top_bit
    depth = 1
    while depth > 0:
        depth -= 1
        low, high, top_bit = stack[depth, 0], stack[depth, 1], stack[depth, 2]
        if high - low <= _SMALL:
            _insert(keys, rows, low, high)
            continue
        shift = max(top_bit - _DIGIT_BITS, 0)
        _spread(keys, rows, low, high, shift, spare_keys, spare_rows, ends)
        if shift == 0:
            continue
        for digit in range(1 << _DIGIT_BITS):
            if ends[digit] - low > 1:
                stack[depth, 0], stack[depth, 1], stack[depth, 2] = low, ends[digit], shift
                depth += 1
            low = ends[digit]


@njit(cache=True, nogil=True)
def sort_blocks(
    starts: NDArray[np.int64],
    bits: int,
    rows: NDArray[np.int64],
    keys: NDArray[np.uint64],
    key_mask: np.uint64,
    places: NDArray[np.int64],
    own_keys: NDArray[np.uint64],
    spare_keys: NDArray[np.uint64],
    spare_places: NDArray[np.int64],
) -> None:
    """Sort each block of :func:`scatter_blocks` by the bits in ``key_mask`` of the keys at its places, and
    put the rows into their places.

    ``own_keys`` and the spare arrays hold the largest block.
    """
    for block in range(starts.shape[0] - 1):
        n = starts[block + 1] - starts[block]
        own = places[starts[block] : starts[block + 1]]
        for i in range(n):
            own_keys[i] = keys[own[i]] & key_mask
        sort_block(own_keys, own, 0, n, 64 - bits, spare_keys, spare_places)
        for i in range(n):
            own[i] = rows[own[i]]


def counts_apart(size: int, rows: float, reads: float) -> bool:
    """Whether a region of so many rows, read so many times in all by a group of ``size``, is ordered by
    counts before the second mini-batch: if pairs have sixteen rows or more, and less than a sixth of the
    group misses a row."""
    return rows >= 8 * size**2 and 6 * reads < size * rows


def key_mask(size: int, apart: bool) -> np.uint64:
    """The bits of the keys of a group of ``size`` that rows are ordered by; see :func:`counts_apart`."""
    count_bits = ((1 << _CLASS_BITS) - 1) << (64 - size.bit_length() - _CLASS_BITS)
    return np.uint64((1 << 64) - 1 - (0 if apart else count_bits))


def shared_order(group: Group, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The rows of the group's region in order: those of ``group.rows`` in ``mask`` (bool, one for each),
    int64."""
    bits, places = group.size.bit_length(), np.empty(int(np.count_nonzero(mask)), np.int64)
    reads = int(np.sum(group.counts, where=mask, dtype=np.int64))
    ordered_by = key_mask(group.size, counts_apart(group.size, len(places), reads))
    starts = scatter_blocks(group.keys, mask, bits, places)
    largest = int(np.diff(starts).max())
    spare = np.empty(largest, np.uint64), np.empty(largest, np.uint64), np.empty(largest, np.int64)
    sort_blocks(starts, bits, group.rows, group.keys, ordered_by, places, *spare)
    return places
