"""Planning: which reads bring the rows that no tier holds? Pure; no I/O.

A request's misses become 64-bit keys, ``row << position_bits | position``, so that one radix sort brings equal rows, rows of
one page and neighbouring pages together while each key still knows where its row goes. A single pass over the sorted keys
then cuts extents: a row that begins at most ``gap_pages_max`` pages after the last wanted page joins the extent (see
:mod:`featstore.cost` for why that is the cheapest choice), unless the extent would grow beyond ``extent_pages_max`` or leave
its chunk file. Duplicates, page merging, gap bridging and the turn into a scan are all this one rule.

Every kernel has a NumPy twin in ``tests/test_plan.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from featstore.layout import TableLayout
from featstore.units import PAGE_BYTES

if TYPE_CHECKING:
    from featstore.cost import DeviceModel

#: Scratch memory of planning, in bytes for each id of a piece: rows 8, slots 4, keys 8 + 8, extents 8 + 4 + 4 (and one spare).
SCRATCH_BYTES_PER_ID = 48

_RADIX_BITS = 11


@njit(cache=True, nogil=True)
def rows_of_ids(ids: NDArray[np.int64], row_of_node: NDArray[Any], rows: int, out: NDArray[np.int64]) -> int:
    """out[i] = row of ids[i] (int64); an empty ``row_of_node`` is the identity. Returns the first bad index, or -1."""
    identity = row_of_node.shape[0] == 0
    for i in range(ids.shape[0]):
        node = ids[i]
        if node < 0 or node >= rows:
            return i
        out[i] = node if identity else np.int64(row_of_node[node])
    return -1


@njit(cache=True, nogil=True)
def make_keys(
    rows: NDArray[np.int64], slots: NDArray[np.int32], position_bits: int, keys: NDArray[np.uint64]
) -> int:
    """Keys of the positions whose slot is negative (a miss); an empty ``slots`` makes every row a miss. Returns how many."""
    everything = slots.shape[0] == 0
    bits = np.uint64(position_bits)
    count = 0
    for i in range(rows.shape[0]):
        if everything or slots[i] < 0:
            keys[count] = np.uint64(rows[i]) << bits | np.uint64(i)
            count += 1
    return count


@njit(cache=True, nogil=True)
def radix_sort(keys: NDArray[np.uint64], spare: NDArray[np.uint64], low_bit: int, high_bit: int) -> bool:
    """Sort by the bits [low_bit, high_bit), stable, least significant digit first. Returns True if the result is in ``spare``."""
    n = keys.shape[0]
    counts = np.empty(1 << _RADIX_BITS, np.int64)
    source, target, swapped = keys, spare, False
    shift = low_bit
    while shift < high_bit:
        digit_bits = min(_RADIX_BITS, high_bit - shift)
        mask = np.uint64((1 << digit_bits) - 1)
        by = np.uint64(shift)
        counts[:] = 0
        for i in range(n):
            counts[(source[i] >> by) & mask] += 1
        begin = 0
        for digit in range(1 << digit_bits):
            count = counts[digit]
            counts[digit] = begin
            begin += count
        for i in range(n):
            digit = (source[i] >> by) & mask
            target[counts[digit]] = source[i]
            counts[digit] += 1
        source, target = target, source
        swapped = not swapped
        shift += digit_bits
    return swapped


@njit(cache=True, nogil=True)
def cut_extents(
    keys: NDArray[np.uint64], position_bits: int, row_bytes: int, pages_per_file: int, gap_pages_max: int,
    extent_pages_max: int, extent_page: NDArray[np.int64], extent_pages: NDArray[np.int32], extent_first: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> int:
    """Cut sorted keys into extents; returns their number. ``counts``: distinct rows, distinct wanted pages, pages read."""
    bits = np.uint64(position_bits)
    extents = 0
    first_page, last_page, file_end = np.int64(0), np.int64(-1), np.int64(0)
    wanted_end, last_row = np.int64(0), np.int64(-1)
    distinct_rows, wanted_pages, read_pages = 0, 0, 0
    for k in range(keys.shape[0]):
        row = np.int64(keys[k] >> bits)
        if row == last_row:
            continue
        last_row = row
        distinct_rows += 1
        byte = row * row_bytes
        begin, end = byte // PAGE_BYTES, (byte + row_bytes - 1) // PAGE_BYTES + 1
        wanted_pages += end - max(begin, wanted_end)
        wanted_end = end
        if extents == 0 or begin >= file_end or begin - last_page > gap_pages_max + 1 or end - first_page > extent_pages_max:
            if extents > 0:
                extent_pages[extents - 1] = last_page + 1 - first_page
                read_pages += last_page + 1 - first_page
            extent_page[extents] = begin
            extent_first[extents] = k
            extents += 1
            first_page = begin
            if begin >= file_end:
                file_end = (begin // pages_per_file + 1) * pages_per_file
        last_page = end - 1
    if extents > 0:
        extent_pages[extents - 1] = last_page + 1 - first_page
        read_pages += last_page + 1 - first_page
        extent_first[extents] = keys.shape[0]
    counts[0], counts[1], counts[2] = distinct_rows, wanted_pages, read_pages
    return extents


@dataclass(frozen=True)
class Extents:
    """The reads that bring a set of rows of one table: arrays as :class:`featstore.engine.lane.Lane` takes them."""

    page: NDArray[np.int64]
    pages: NDArray[np.int32]
    first: NDArray[np.int32]
    keys: NDArray[np.uint64]
    position_bits: int
    distinct_rows: int
    wanted_pages: int
    read_pages: int

    @property
    def reads(self) -> int:
        return len(self.page)

    @property
    def bytes_read(self) -> int:
        return self.read_pages * PAGE_BYTES


def plan_extents(
    rows: NDArray[np.int64], slots: NDArray[np.int32], layout: TableLayout, model: DeviceModel, extent_bytes_max: int
) -> Extents:
    """Plan the reads for ``rows`` (int64 [n], in range) at the positions whose ``slots`` entry is negative.

    ``slots`` is int32 [n], or empty when no tier is asked. Two rows never share a read beyond ``extent_bytes_max`` bytes;
    a single row that is larger gets an extent of its own.
    """
    n = len(rows)
    position_bits = max(1, (n - 1).bit_length())
    keys, spare = np.empty(n, np.uint64), np.empty(n, np.uint64)
    misses = make_keys(rows, slots, position_bits, keys)
    row_bits = max(1, (layout.rows - 1).bit_length())
    if radix_sort(keys[:misses], spare[:misses], position_bits, position_bits + row_bits):
        keys, spare = spare, keys
    keys = keys[:misses]
    del spare
    page, pages = np.empty(misses, np.int64), np.empty(misses, np.int32)
    first, counts = np.empty(misses + 1, np.int32), np.zeros(3, np.int64)
    reads = cut_extents(
        keys, position_bits, layout.row_bytes, layout.pages_per_chunk, model.gap_pages_max, extent_bytes_max // PAGE_BYTES,
        page, pages, first, counts,
    )  # fmt: skip
    return Extents(
        page[:reads], pages[:reads], first[: reads + 1], keys, position_bits, int(counts[0]), int(counts[1]), int(counts[2])
    )
