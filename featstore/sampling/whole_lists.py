"""Lists that are read whole: what weights, times and induced subgraphs ask for.

A draw by weight looks at every weight of a list, what time allows is searched in its times. So a hop has the
lists of its nodes read whole, of the tables that it needs, in the order of rows: by whole pages, each once,
as many nodes at a time as there is scratch for. The pages of a list stand side by side, so that it lies in
one piece where they were read to, and nothing is copied. Lists whose values are in memory are looked at
there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from featstore.reader.reader import Reader
from featstore.sampling.list_draws import list_pages
from featstore.units import PAGE_BYTES

_PAGE_BYTES = PAGE_BYTES + 8  # and its number
_NONE = np.empty(0, np.int64)


class Held(Protocol):
    """A table with a value for each edge, of which the ``first`` are in memory."""

    first: NDArray[Any]
    table: str


class ListView(NamedTuple):
    """Some lists of a table: of flat ``values``, where each begins, int64."""

    values: NDArray[Any]
    begins: NDArray[np.int64]


class WholeLists:
    """The lists of ``rows`` (int64 [n], ascending, each as often as wanted), as ``offsets`` bound them, of
    ``tables``; None for one that is not wanted, whose views are empty."""

    def __init__(
        self, offsets: NDArray[np.int64], rows: NDArray[np.int64], tables: Sequence[Held | None]
    ) -> None:
        self._rows, self._tables = rows, tables
        self._lows, self._highs = offsets[rows], offsets[rows + 1]
        wanted = [one for one in tables if one is not None]
        self._slack_bytes = _PAGE_BYTES * len(wanted)  # pages that the piece before had, too
        #: Of each table, how many of the lists are in memory: the first ones.
        self._held = [int(np.searchsorted(self._highs, len(one.first), side="right")) for one in wanted]
        self._ends_bytes = np.zeros(len(rows), np.int64)
        each = np.zeros(len(rows), np.int64)
        for one, held in zip(wanted, self._held, strict=True):
            first, last = self._pages(one, slice(held, None))
            self._ends_bytes[held:] += _new_pages(first, last)
            each[held:] += np.maximum(0, last - first + 1)
        self._ends_bytes = np.cumsum(self._ends_bytes) * _PAGE_BYTES
        #: What the longest list alone takes.
        self.least_bytes = int(each.max(initial=0)) * _PAGE_BYTES

    @property
    def most_bytes(self) -> int:
        """What reading all at once takes."""
        return int(self._ends_bytes[-1]) + self._slack_bytes if len(self._rows) else 0

    def _pages(self, table: Held, some: slice) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first and the last page of lists; the last is before the first where one is empty."""
        shift = _page_shift(table)
        lows, highs = self._lows[some], self._highs[some]
        return lows >> shift, np.where(highs > lows, (highs - 1) >> shift, (lows >> shift) - 1)

    def pieces(self, room_bytes: int, reader: Reader) -> Iterator[tuple[slice, list[ListView]]]:
        """Some of the rows after the other, each with a view of each table, by reading pages of no more than
        ``room_bytes``, or of one list. Raises CorruptionError, DeviceError, ClosedError."""
        begin, count = 0, len(self._rows)
        while begin < count or count == 0:
            end = self._end(begin, room_bytes) if count else 0
            some = slice(begin, end)
            yield some, [self._view(one, some, reader) for one in self._tables]
            begin = end
            if begin == count:
                return

    def _end(self, begin: int, room_bytes: int) -> int:
        """Where the piece ends that begins there: all of it is in memory, or is read, of each table."""
        before = int(self._ends_bytes[begin - 1]) if begin else 0
        fits = before + max(0, room_bytes - self._slack_bytes)
        end = int(np.searchsorted(self._ends_bytes, fits, side="right"))
        end = max(end, int(np.searchsorted(self._rows, self._rows[begin], side="right")))
        return min([end, *(held for held in self._held if held > begin)])

    def _view(self, table: Held | None, some: slice, reader: Reader) -> ListView:
        lows, highs = self._lows[some], self._highs[some]
        if table is None:
            return ListView(_NONE, np.zeros(len(lows), np.int64))
        if len(lows) == 0 or highs[-1] <= len(table.first):
            return ListView(table.first, lows)
        first, last = self._pages(table, some)
        pages, begins = np.empty(int(_new_pages(first, last).sum()), np.int64), np.empty_like(lows)
        pages = pages[: list_pages(lows, highs, _page_shift(table), pages, begins)]
        values = np.empty(len(pages) * (PAGE_BYTES // table.first.itemsize), table.first.dtype)
        reader.read_pages(table.table, pages, values)
        return ListView(values, begins)


def held_of(tables: Sequence[Held | None]) -> list[int]:
    """How many values of each table are in memory now."""
    return [0 if one is None else len(one.first) for one in tables]


def _page_shift(table: Held) -> int:
    return (PAGE_BYTES // table.first.itemsize).bit_length() - 1


def _new_pages(first: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [n]: of the pages of each list, how many those before it do not have."""
    before = np.concatenate([[-1], np.maximum.accumulate(last)])[:-1]
    new: NDArray[np.int64] = np.maximum(0, last - np.maximum(first, before + 1) + 1)
    return new
