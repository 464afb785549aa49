"""Neighbours that are read: those of a hop in the order in which they stand on disk, and whole pages of
them.

A hop asks for single places of lists, all over the table. Sorted, those of one page stand side by side, so
that each page is read once in a hop however the reader cuts the request, and pages that are held are found by
going along both once. What a hop read whole serves the hops after it: no list is asked for twice, but lists
share pages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.sort import radix_sort
from featstore.plan.extents import key_bits
from featstore.reader.reader import Reader
from featstore.units import PAGE_BYTES

#: Of a missing neighbour while it is read: its key and room to sort it in, which then has its position.
MISSING_BYTES = 16
#: Of a page that is kept, beside its bytes: its number.
_PAGE_NUMBER_BYTES = 8


class Missing:
    """The neighbours of a hop that are not there yet: those negative in ``row`` (int64 [k]), at the positions
    ``edge`` (int64 [k]) of a table of ``total`` rows of ``dtype``. ``count``: how many there are."""

    def __init__(
        self, row: NDArray[np.int64], edge: NDArray[np.int64], count: int, total: int, dtype: np.dtype[Any]
    ) -> None:
        self._row, self.dtype = row, dtype
        self._bits = key_bits(total, len(row), "sample: the edges of a hop")
        self._page_shift = self._bits + (PAGE_BYTES // dtype.itemsize).bit_length() - 1
        keys, spare = np.empty(count, np.uint64), np.empty(count, np.uint64)
        missing_keys(row, edge, self._bits, keys)
        edge_bits = max(1, (total - 1).bit_length())
        swapped = radix_sort(keys, spare, self._bits, self._bits + edge_bits)
        self._keys, self._spare = (spare, keys) if swapped else (keys, spare)

    def __len__(self) -> int:
        return len(self._keys)

    def first_pages(self, pages_max: int, gap_pages_max: int) -> NDArray[np.int64]:
        """int64 [n], ascending: the pages that have them, and those between that are read through, as many
        as that."""
        pages = np.empty(min(pages_max, (gap_pages_max + 1) * len(self._keys)), np.int64)
        return pages[: first_pages(self._keys, self._page_shift, gap_pages_max, pages)]

    def take(self, kept: KeptPages) -> None:
        """Have those that are on pages that are held."""
        left = take_kept(self._keys, self._bits, self._page_shift, kept.pages, kept.neighbours, self._row)
        self._keys = self._keys[:left]

    def read(self, reader: Reader, table: str) -> None:
        """Read the rest. Raises CorruptionError, DeviceError, ClosedError."""
        count = len(self._keys)
        if count == 0:
            return
        edges = self._spare[:count].view(np.int64)
        np.right_shift(self._keys, np.uint64(self._bits), out=self._spare[:count])
        place_all(self._keys, self._bits, reader.read({table: edges})[table], self._row)
        self._keys = self._keys[:0]


class KeptPages:
    """Whole pages of the table of neighbours: ``pages`` int64 [n], ascending; ``neighbours`` [n, of a
    page]."""

    def __init__(self, reader: Reader, table: str, pages: NDArray[np.int64], dtype: np.dtype[Any]) -> None:
        self.pages = pages
        self.neighbours = np.empty((len(pages), PAGE_BYTES // dtype.itemsize), dtype)
        reader.read_pages(table, pages, self.neighbours)

    @staticmethod
    def bytes_of(pages: int) -> int:
        """What so many take."""
        return pages * (PAGE_BYTES + _PAGE_NUMBER_BYTES)

    @classmethod
    def fitting(cls, room_bytes: int) -> int:
        """How many pages fit."""
        return max(0, room_bytes) // cls.bytes_of(1)

    @property
    def memory_bytes(self) -> int:
        """What is held."""
        return self.pages.nbytes + self.neighbours.nbytes


def load_page_kernels(dtype: np.dtype[Any]) -> None:
    """Run every kernel on nothing: a child forked while numba holds its lock could never load one."""
    none = np.empty(0, np.int64)
    missing = Missing(none, none, 0, 1, dtype)
    missing.first_pages(0, 0)
    nothing = KeptPages.__new__(KeptPages)
    nothing.pages, nothing.neighbours = none, np.empty((0, PAGE_BYTES // dtype.itemsize), dtype)
    missing.take(nothing)
    place_all(np.empty(0, np.uint64), 1, np.empty(0, dtype), none)


@njit(cache=True, nogil=True)
def missing_keys(row: Any, edge: Any, bits: Any, keys: Any) -> None:
    """``edge << bits | place`` of each place with a negative ``row``, in order."""
    count = 0
    for place in range(row.shape[0]):
        if row[place] < 0:
            keys[count] = np.uint64(edge[place]) << np.uint64(bits) | np.uint64(place)
            count += 1


@njit(cache=True, nogil=True)
def first_pages(keys: Any, page_shift: Any, gap_pages_max: Any, pages: Any) -> Any:
    """The distinct pages of ascending keys, with gaps of so many pages filled, as many as ``pages`` has room
    for; returns how many."""
    count = 0
    for i in range(keys.shape[0]):
        page = np.int64(keys[i] >> np.uint64(page_shift))
        near = count > 0 and page - pages[count - 1] <= gap_pages_max + 1
        for one in range(pages[count - 1] + 1 if near else page, page + 1):
            if count == pages.shape[0]:
                return count
            pages[count] = one
            count += 1
    return count


@njit(cache=True, nogil=True)
def take_kept(keys: Any, bits: Any, page_shift: Any, pages: Any, neighbours: Any, row: Any) -> Any:
    """Write the neighbours of ascending keys that are on held ``pages`` into ``row``. The other keys move to
    the front; returns how many they are."""
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    within = np.uint64(neighbours.shape[1] - 1)
    held, left = 0, 0
    for i in range(keys.shape[0]):
        page = np.int64(keys[i] >> np.uint64(page_shift))
        while held < pages.shape[0] and pages[held] < page:
            held += 1
        if held < pages.shape[0] and pages[held] == page:
            row[keys[i] & mask] = neighbours[held, (keys[i] >> np.uint64(bits)) & within]
        else:
            keys[left] = keys[i]
            left += 1
    return left


@njit(cache=True, nogil=True)
def place_all(keys: Any, bits: Any, neighbours: Any, row: Any) -> None:
    """``neighbours``, one for each key, to their places in ``row``."""
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for i in range(keys.shape[0]):
        row[keys[i] & mask] = neighbours[i]
