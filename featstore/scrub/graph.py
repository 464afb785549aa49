"""Scrubbing a graph: what its numbers mean, after every page of them has been found to be as it was written.

Offsets run from 0 to the number of edges and never descend; sources are rows of their table; edge ids, where
there are any, are the numbers from 0 on, each once (of a part of a graph, some of them); weights are finite
and not negative; times ascend in each list; hubs are distinct rows; and the hubs' lists, and all that is kept
of their edges, are those that they copy. All but the last are one pass each; that each edge id is there once
is seen by the sum of their hashes, which knows no order. For the last, hubs are
taken by windows: the lists of a window are read from the copy in its order and from ``sources`` in the order
of rows, both forwards and piece by piece, and each list is boiled down to a sum of hashes of (place in the
list, source), which must be the same. That a row is a hub only once is seen by marking rows, a range of them
at a time. So memory is bounded (some 48 MiB) whatever the graph, and no pass is a random one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from featstore.base.checks import find_fall
from featstore.base.hashing import mix64
from featstore.scrub.numbers import Numbers
from featstore.scrub.report import Findings
from featstore.storage.manifest import GraphEntry, HubsEntry, edge_parts

_WINDOW = 1 << 19  # hubs compared in one go
_MARKS = 1 << 24  # rows marked in one go


class _GraphScrub:
    """The checks of one graph."""

    def __init__(
        self, findings: Findings, entry: GraphEntry, rows: int, source_rows: int, whole_edges: int | None
    ) -> None:
        self._findings = findings
        self._rows, self._source_rows, self._whole_edges = rows, source_rows, whole_edges
        self._entry = entry
        self._offsets = Numbers(findings.store, entry.offsets)
        self._sources = Numbers(findings.store, entry.sources)

    def run(self) -> None:
        ascend = self._ascend(self._offsets, self._entry.edges)
        lists = ascend & self._in_range(self._sources, "sources", self._source_rows)
        own = {"sources": self._sources} | self._parts(ascend)
        hubs = self._entry.hubs
        if hubs is None:
            return
        rows, ends = Numbers(self._findings.store, hubs.rows), Numbers(self._findings.store, hubs.offsets)
        copy = Numbers(self._findings.store, hubs.sources)
        sound = (
            self._ascend(ends, copy.count)
            & self._in_range(rows, "hubs", self._rows)
            & self._in_range(copy, "sources", self._source_rows)
        )
        if not (sound and self._distinct(rows) and lists):
            return
        found = {part: Numbers(self._findings.store, table) for part, table in edge_parts(hubs).items()}
        copies = {"sources": copy} | {part: one for part, one in found.items() if self._intact(one)}
        for first in range(0, rows.count, _WINDOW):
            window = rows.read(first, _WINDOW).astype(np.int64)
            for part in copies.keys() & own.keys():
                self._window(hubs, first, window, ends, copies[part], own[part], part.replace("_", " "))

    def _parts(self, ascend: bool) -> dict[str, Numbers]:
        """What is kept of each edge, where it is what it should be; ``ascend``: offsets are."""
        checks = {"edge_ids": self._edge_ids, "weights": self._weights, "times": self._times}
        parts = {p: Numbers(self._findings.store, t) for p, t in edge_parts(self._entry).items()}
        return {p: one for p, one in parts.items() if (p != "times" or ascend) and checks[p](one)}

    def _intact(self, numbers: Numbers) -> bool:
        return all(map(self._findings.intact, numbers.paths))

    def _say(self, numbers: Numbers, index: int, expected: str, actual: object) -> bool:
        path, offset = numbers.place(index)
        self._findings.problem("graph", path, expected, actual, offset)
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

    def _in_range(self, numbers: Numbers, what: str, end: int) -> bool:
        if not self._intact(numbers):
            return False
        for first, values in numbers.pieces():
            for at in np.flatnonzero((values < 0) | (values >= end))[:1].tolist():
                return self._say(numbers, first + at, f"{what} from 0 to {end - 1:,}", values[at])
        return True

    def _edge_ids(self, ids: Numbers) -> bool:
        of_all = self._entry.edges if self._whole_edges is None else self._whole_edges
        if not self._in_range(ids, "edge ids", of_all) or self._whole_edges is not None:
            return False  # of a part there are only some, and no copies
        left = 0
        for first, values in ids.pieces():
            numbers = np.arange(first, first + len(values), dtype=np.uint64)
            left += int(mix64(values.astype(np.uint64)).sum()) - int(mix64(numbers).sum())
        left %= 2**64  # as the sums are
        if left != 0:
            end = f"{self._entry.edges - 1:,}"
            self._findings.problem(
                "graph", ids.paths[0], f"edge ids 0 to {end}, each once", "one stands twice"
            )
        return left == 0

    def _weights(self, weights: Numbers) -> bool:
        if not self._intact(weights):
            return False
        for first, values in weights.pieces():
            for at in np.flatnonzero(~(np.isfinite(values) & (values >= 0)))[:1].tolist():
                return self._say(weights, first + at, "finite weights of at least 0", values[at])
        return True

    def _times(self, times: Numbers) -> bool:
        """Whether times fall nowhere but where a list begins."""
        if not self._intact(times):
            return False
        begins, pieces = np.zeros(1, np.int64), self._offsets.pieces()
        last = np.empty(0, np.int64)
        for first, values in times.pieces():
            while begins[-1] < first + len(values) and (piece := next(pieces, None)) is not None:
                begins = np.unique(np.concatenate([begins[begins >= first], piece[1]]))
            joined = np.concatenate([last, values])
            falls = first - len(last) + 1 + np.flatnonzero(joined[1:] < joined[:-1])
            for at in falls[~np.isin(falls, begins)][:1].tolist():
                return self._say(times, at, "times that ascend in a list", values[at - first])
            last = values[-1:]
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
        self, hubs: HubsEntry, first: int, rows: NDArray[np.int64], ends: Numbers, copy: Numbers,
        numbers: Numbers, what: str,
    ) -> None:  # fmt: skip
        """Compare the lists of some hubs, of which ``first`` is the first, with those of ``numbers`` that
        they copy."""
        limits = ends.read(first, len(rows) + 1).astype(np.int64)
        copied = _list_digests(copy, limits[:-1], np.diff(limits))
        order = np.argsort(rows)
        begins, stops = self._offsets.take(rows[order]), self._offsets.take(rows[order] + 1)
        own = np.empty_like(copied)
        own[order] = _list_digests(numbers, begins, stops - begins)
        degrees = np.empty_like(limits[:-1])
        degrees[order] = stops - begins
        for h in np.flatnonzero((own != copied) | (degrees != np.diff(limits)))[:1].tolist():
            expected = f"in hub {first + h} the list of row {rows[h]}, {degrees[h]:,} {what}"
            actual = f"another list, {limits[h + 1] - limits[h]:,} {what}"
            if limits[h] < copy.count:
                self._say(copy, int(limits[h]), expected, actual)
            else:
                self._findings.problem("graph", hubs.sources.path, expected, actual)


def _list_digests(
    numbers: Numbers, begins: NDArray[np.int64], degrees: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """uint64 [lists]: for each list the sum of the hashes of (place in the list, element). ``begins``
    ascend."""
    digests = np.zeros(len(begins), np.uint64)
    ends = np.cumsum(degrees)
    for low in range(0, int(ends[-1]) if len(ends) else 0, Numbers.PIECE):
        index = np.arange(low, min(low + Numbers.PIECE, int(ends[-1])))
        which = np.searchsorted(ends, index, side="right")
        within = index - (ends[which] - degrees[which])
        values = numbers.take(begins[which] + within)
        hashes = mix64(mix64(within.astype(np.uint64)) + values.astype(np.uint64))
        starts = np.flatnonzero(np.diff(which, prepend=-1))
        digests[which[starts]] += np.add.reduceat(hashes, starts)
    return digests


def scrub_graph(
    findings: Findings, entry: GraphEntry, rows: int, source_rows: int, whole_edges: int | None = None
) -> None:
    """Report what is wrong with a graph over a table of ``rows`` rows, whose sources are rows of a table of
    ``source_rows``; see the module's text. ``whole_edges``: of the graph of which these are some lists, whose
    edge ids are then some of its edges'. What holds faulty or unreadable files is left out: that has been
    said, and what follows from it is not known."""
    _GraphScrub(findings, entry, rows, source_rows, whole_edges).run()
