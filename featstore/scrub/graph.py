"""Scrubbing a graph: what its numbers mean, after every page of them has been found to be as it was written.

Offsets run from 0 to the number of edges and never descend; sources are rows of the table; hubs are distinct
rows; and the hubs' lists are those that they copy. The first three are one pass each. For the last, hubs are
taken by windows: the lists of a window are read from the copy in its order and from ``sources`` in the order
of rows, both forwards and piece by piece, and each list is boiled down to a sum of hashes of (place in the
list, source), which must be the same. That a row is a hub only once is seen by marking rows, a range of them
at a time. So memory is bounded (some 48 MiB) whatever the graph, and no pass is a random one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from featstore.base.checks import find_fall
from featstore.base.dtypes import dtype_from_name
from featstore.base.hashing import mix64
from featstore.base.system import asking, open_plain
from featstore.errors import CorruptionError
from featstore.storage.manifest import ArrayEntry, GraphEntry, HubsEntry, TableEntry, array_chunk

_PIECE = 1 << 17  # numbers looked at together
_WINDOW = 1 << 19  # hubs compared in one go
_MARKS = 1 << 24  # rows marked in one go


class Scrub(Protocol):
    """What is needed of the scrub that this is part of."""

    store: Path
    readable: set[str]
    faulty: set[str]

    def problem(
        self, what: str, path: str, expected: object, actual: object, offset: int | None = None
    ) -> None: ...


class Numbers:
    """A vector on disk, a table of numbers or a small array, read by runs of elements."""

    def __init__(self, store: Path, entry: TableEntry | ArrayEntry) -> None:
        self.dtype = dtype_from_name(entry.dtype)
        self._store = store
        if isinstance(entry, TableEntry):
            self.count, self._per_file = entry.rows, entry.rows_per_chunk
            self.paths = [entry.chunk_path(chunk) for chunk in range(entry.layout.chunks)]
        else:
            self.count, self._per_file = entry.shape[0], max(1, entry.shape[0])
            self.paths = [path for path in [array_chunk(entry)] if path is not None]

    def place(self, index: int) -> tuple[str, int]:
        """The file and the byte of an element."""
        file, within = divmod(index, self._per_file)
        return self.paths[file], within * self.dtype.itemsize

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Elements [first, first + count), or as many of them as there are."""
        count = min(count, self.count - first)
        out = np.empty(max(0, count), self.dtype)
        done = 0
        while done < count:
            path, offset = self.place(first + done)
            run = min(count - done, self._per_file - (first + done) % self._per_file)
            with asking(self._store / path, "read", offset), open_plain(self._store / path) as file:
                view = memoryview(out[done : done + run].view(np.uint8))  # type: ignore[arg-type]
                got = os.preadv(file.fileno(), [view], offset)
            if got != len(view):
                raise CorruptionError(
                    self._store / path,
                    offset,
                    f"{len(view):,} bytes",
                    f"{got:,}",
                    "it was changed meanwhile; verify again",
                )
            done += run
        return out

    def pieces(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """(first element, elements), in order."""
        for first in range(0, self.count, _PIECE):
            yield first, self.read(first, _PIECE)

    def take(self, ascending: NDArray[np.int64]) -> NDArray[np.int64]:
        """The elements of these numbers, which ascend: the pieces that hold any are read once, in order."""
        out = np.empty(len(ascending), np.int64)
        piece = ascending // _PIECE
        starts = np.flatnonzero(np.diff(piece, prepend=-1)).tolist()
        for low, high in pairwise([*starts, len(piece)]):
            first, last = int(ascending[low]), int(ascending[high - 1])
            out[low:high] = self.read(first, last - first + 1)[ascending[low:high] - first]
        return out


class _GraphScrub:
    """The checks of one graph."""

    def __init__(self, scrub: Scrub, entry: GraphEntry, rows: int) -> None:
        self._scrub = scrub
        self._rows = rows
        self._entry = entry
        self._offsets = Numbers(scrub.store, entry.offsets)
        self._sources = Numbers(scrub.store, entry.sources)

    def run(self) -> None:
        lists = self._ascend(self._offsets, self._entry.edges) & self._in_range(self._sources, "sources")
        hubs = self._entry.hubs
        if hubs is None:
            return
        rows, ends = Numbers(self._scrub.store, hubs.rows), Numbers(self._scrub.store, hubs.offsets)
        copy = Numbers(self._scrub.store, hubs.sources)
        sound = (
            self._ascend(ends, copy.count) & self._in_range(rows, "hubs") & self._in_range(copy, "sources")
        )
        if sound and self._distinct(rows) and lists:
            for first in range(0, rows.count, _WINDOW):
                self._window(hubs, first, rows.read(first, _WINDOW).astype(np.int64), ends, copy)

    def _intact(self, numbers: Numbers) -> bool:
        return all(p in self._scrub.readable and p not in self._scrub.faulty for p in numbers.paths)

    def _say(self, numbers: Numbers, index: int, expected: str, actual: object) -> bool:
        path, offset = numbers.place(index)
        self._scrub.problem("graph", path, expected, actual, offset)
        return False

    def _ascend(self, numbers: Numbers, end: int) -> bool:
        """Whether offsets run from 0 to ``end`` and never descend; the first that does not is reported."""
        if not self._intact(numbers):
            return False
        last = 0
        for first, values in numbers.pieces():
            if first == 0 and values[0] != 0:
                return self._say(numbers, 0, "offsets that begin with 0", values[0])
            at = 0 if int(values[0]) < last else int(find_fall(values))
            if at >= 0:
                before = int(values[at - 1]) if at else last
                return self._say(numbers, first + at, f"an offset of {before:,} or more", values[at])
            last = int(values[-1])
        return last == end or self._say(numbers, numbers.count - 1, f"offsets that end with {end:,}", last)

    def _in_range(self, numbers: Numbers, what: str) -> bool:
        if not self._intact(numbers):
            return False
        for first, values in numbers.pieces():
            for at in np.flatnonzero((values < 0) | (values >= self._rows))[:1].tolist():
                return self._say(numbers, first + at, f"{what} from 0 to {self._rows - 1:,}", values[at])
        return True

    def _distinct(self, numbers: Numbers) -> bool:
        for low in range(0, self._rows, _MARKS):
            marked = np.zeros(min(_MARKS, self._rows - low), bool)
            for first, values in numbers.pieces():
                here = np.flatnonzero((values >= low) & (values < low + len(marked)))
                rows = values[here].astype(np.int64) - low
                order = np.argsort(rows, kind="stable")
                again = marked[rows]
                again[order[1:]] |= rows[order[1:]] == rows[order[:-1]]
                for at in here[again][:1].tolist():
                    return self._say(numbers, first + at, "distinct hubs", f"row {values[at]} a second time")
                marked[rows] = True
        return True

    def _window(
        self, hubs: HubsEntry, first: int, rows: NDArray[np.int64], ends: Numbers, copy: Numbers
    ) -> None:
        """Compare the lists of some hubs, of which ``first`` is the first, with those that they copy."""
        limits = ends.read(first, len(rows) + 1).astype(np.int64)
        copied = _list_digests(copy, limits[:-1], np.diff(limits))
        order = np.argsort(rows)
        begins, stops = self._offsets.take(rows[order]), self._offsets.take(rows[order] + 1)
        own = np.empty_like(copied)
        own[order] = _list_digests(self._sources, begins, stops - begins)
        degrees = np.empty_like(limits[:-1])
        degrees[order] = stops - begins
        for h in np.flatnonzero((own != copied) | (degrees != np.diff(limits)))[:1].tolist():
            expected = f"in hub {first + h} the list of row {rows[h]}, {degrees[h]:,} sources"
            actual = f"another list, {limits[h + 1] - limits[h]:,} sources"
            if limits[h] < copy.count:
                self._say(copy, int(limits[h]), expected, actual)
            else:
                self._scrub.problem("graph", hubs.sources.path, expected, actual)


def _list_digests(
    numbers: Numbers, begins: NDArray[np.int64], degrees: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """uint64 [lists]: for each list the sum of the hashes of (place in the list, element). ``begins``
    ascend."""
    digests = np.zeros(len(begins), np.uint64)
    ends = np.cumsum(degrees)
    for low in range(0, int(ends[-1]) if len(ends) else 0, _PIECE):
        index = np.arange(low, min(low + _PIECE, int(ends[-1])))
        which = np.searchsorted(ends, index, side="right")
        within = index - (ends[which] - degrees[which])
        values = numbers.take(begins[which] + within)
        hashes = mix64(mix64(within.astype(np.uint64)) + values.astype(np.uint64))
        starts = np.flatnonzero(np.diff(which, prepend=-1))
        digests[which[starts]] += np.add.reduceat(hashes, starts)
    return digests


def scrub_graph(scrub: Scrub, entry: GraphEntry, rows: int) -> None:
    """Report what is wrong with a graph over a table of ``rows`` rows; see the module's text. What holds
    faulty or unreadable files is left out: that has been said, and what follows from it is not known."""
    _GraphScrub(scrub, entry, rows).run()
