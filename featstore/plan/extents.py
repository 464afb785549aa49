"""Planning: which reads bring the rows that no tier holds? Pure; no I/O.

A request's misses become 64-bit keys, ``row << position_bits | position``, so that one radix sort brings
equal rows, rows of one page and neighbouring pages together while each key still knows where its row goes. A
single pass over the sorted keys then cuts extents: a row that begins at most ``gap_pages_max`` pages after
the last wanted page joins the extent (see :mod:`featstore.plan.cost` for why that is the cheapest choice),
unless the extent would grow beyond ``extent_pages_max`` or leave its chunk file. Duplicates, page merging,
gap bridging and the turn into a scan are all this one rule.

Every kernel has a NumPy twin in ``tests/plan/test_plan.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.sort import radix_sort
from featstore.errors import SourceError
from featstore.layout import TableLayout
from featstore.units import PAGE_BYTES

if TYPE_CHECKING:
    from featstore.plan.cost import DeviceModel

#: Memory of planning, in bytes for each id of a piece: rows 8, positions 4, served 1, keys 8 + 8, extents 8 +
#: 4 + 4 (rounded up).
PLANNING_BYTES_PER_ID = 48
#: What of it stays while the piece is read: one copy of the keys, and the extents.
READING_BYTES_PER_ID = 24

#: Bins of the histogram by which large requests are cut.
RANGE_BINS = 4096


@njit(cache=True, nogil=True)
def rows_of_ids(ids: NDArray[np.int64], row_of_node: NDArray[Any], rows: int, out: NDArray[np.int64]) -> int:
    """out[i] = row of ids[i] (int64); an empty ``row_of_node`` is the identity. Returns the first bad index,
    or -1."""
    identity = row_of_node.shape[0] == 0
    for i in range(ids.shape[0]):
        node = ids[i]
        if node < 0 or node >= rows:
            return i
        out[i] = node if identity else np.int64(row_of_node[node])
    return -1


@njit(cache=True, nogil=True)
def row_histogram(
    ids: NDArray[np.int64], row_of_node: NDArray[Any], rows: int, shift: int, counts: NDArray[np.int64]
) -> int:
    """counts[row >> shift] += 1 for the row of each id. Returns the first bad index, or -1."""
    identity = row_of_node.shape[0] == 0
    for i in range(ids.shape[0]):
        node = ids[i]
        if node < 0 or node >= rows:
            return i
        row = node if identity else np.int64(row_of_node[node])
        counts[row >> shift] += 1
    return -1


@njit(cache=True, nogil=True)
def select_rows(
    ids: NDArray[np.int64],
    row_of_node: NDArray[Any],
    rows: int,
    low: int,
    high: int,
    skip: int,
    out: NDArray[np.int64],
    positions: NDArray[np.int32],
) -> int:
    """Rows in [low, high) and where in ``ids`` they are asked for: after ``skip`` of them, as many as ``out``
    holds.

    Returns how many, or -1 for a bad id (ids may have been changed since they were counted).
    """
    identity = row_of_node.shape[0] == 0
    count = 0
    for i in range(ids.shape[0]):
        node = ids[i]
        if node < 0 or node >= rows:
            return -1
        row = node if identity else np.int64(row_of_node[node])
        if row >= low and row < high:
            if skip > 0:
                skip -= 1
                continue
            if count == out.shape[0]:
                return count
            out[count] = row
            positions[count] = i
            count += 1
    return count


@dataclass(frozen=True)
class RowRange:
    """A piece of a request: rows in [low, high), after the first ``skip`` of them, ``count`` of them."""

    low: int
    high: int
    skip: int
    count: int


def cut_ranges(counts: NDArray[np.int64], shift: int, count_max: int) -> list[RowRange]:
    """Cut a request into ranges of rows of at most ``count_max`` ids each, so that what lies together is
    planned together.

    ``counts`` is the request's :func:`row_histogram`. A bin that is too full by itself (many duplicates) is
    cut by ``skip``.
    """
    ranges: list[RowRange] = []
    low, held = 0, 0
    for bin_index, count in enumerate(int(c) for c in counts):
        if held and held + count > count_max:
            ranges.append(RowRange(low, bin_index << shift, 0, held))
            low, held = bin_index << shift, 0
        if count > count_max:
            high = (bin_index + 1) << shift
            ranges += [
                RowRange(low, high, at, min(count_max, count - at)) for at in range(0, count, count_max)
            ]
            low = high
        else:
            held += count
    if held:
        ranges.append(RowRange(low, len(counts) << shift, 0, held))
    return ranges


@njit(cache=True, nogil=True)
def ascending(values: NDArray[Any]) -> bool:
    """Whether none is smaller than the one before it."""
    i = 1
    while i < values.shape[0] and values[i - 1] <= values[i]:
        i += 1
    return bool(i >= values.shape[0])


@njit(cache=True, nogil=True)
def make_keys(
    rows: NDArray[np.int64],
    positions: NDArray[np.int32],
    served: NDArray[np.uint8],
    position_bits: int,
    keys: NDArray[np.uint64],
) -> int:
    """Keys of the rows that no tier has served (0 in ``served``, or all where it is empty). Returns how many.

    Row i goes to positions[i], or to i where ``positions`` is empty.
    """
    everything = served.shape[0] == 0
    in_order = positions.shape[0] == 0
    bits = np.uint64(position_bits)
    count = 0
    for i in range(rows.shape[0]):
        if everything or served[i] == 0:
            position = np.uint64(i) if in_order else np.uint64(positions[i])
            keys[count] = np.uint64(rows[i]) << bits | position
            count += 1
    return count


@njit(cache=True, nogil=True)
def cut_extents(
    keys: NDArray[np.uint64],
    position_bits: int,
    row_bytes: int,
    pages_per_file: int,
    gap_pages_max: int,
    extent_pages_max: int,
    extent_page: NDArray[np.int64],
    extent_pages: NDArray[np.int32],
    extent_first: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> int:
    """Cut sorted keys into extents; returns their number. ``counts``: distinct rows, distinct wanted pages,
    pages read."""
    bits = np.uint64(position_bits)
    extents = 0
    first_page, last_page, file_end = 0, -1, 0
    wanted_end = 0
    last_row = np.int64(-1)
    distinct_rows, wanted_pages, read_pages = 0, 0, 0
    for k in range(keys.shape[0]):
        row = np.int64(keys[k] >> bits)
        if row == last_row:
            continue
        last_row = row
        distinct_rows += 1
        byte = int(row * row_bytes)
        begin, end = byte // PAGE_BYTES, (byte + row_bytes - 1) // PAGE_BYTES + 1
        wanted_pages += end - max(begin, wanted_end)
        wanted_end = end
        if (
            extents == 0
            or begin >= file_end
            or begin - last_page > gap_pages_max + 1
            or end - first_page > extent_pages_max
        ):
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


def key_bits(rows: int, places: int, what: str) -> int:
    """How many bits the place has in keys ``row << bits | place`` of a table of ``rows`` rows. Raises
    SourceError, which says ``what`` there are too many of, where row and place need more than 64."""
    room = 64 - max(1, (rows - 1).bit_length())
    bits = max(1, (places - 1).bit_length())
    if bits > room:
        raise SourceError(
            f"cannot {what} may be {1 << room:,} at most with a table of {rows:,} rows, not {places:,}"
        )
    return bits


@dataclass(frozen=True)
class Extents:
    """The reads that bring a set of rows of one table: arrays as :class:`featstore.engine.lane.Lane` takes
    them."""

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
    rows: NDArray[np.int64], positions: NDArray[np.int32], served: NDArray[np.uint8], positions_end: int,
    layout: TableLayout, model: DeviceModel, extent_bytes_max: int,
) -> Extents:  # fmt: skip
    """Plan the reads for those ``rows`` (int64 [n], in range) that no tier has served.

    ``served`` is uint8 [n], or empty when no tier was asked. Row i goes to ``positions[i]`` <
    ``positions_end`` of the destination, or to i where ``positions`` is empty. No read is longer than
    ``extent_bytes_max`` bytes; the caller makes sure that a row fits.
    """
    n = len(rows)
    position_bits = key_bits(layout.rows, positions_end, "read: the rows of the destination")
    keys = np.empty(n, np.uint64)
    misses = make_keys(rows, positions, served, position_bits, keys)
    keys = keys[:misses]
    if not ascending(keys):
        spare = np.empty(misses, np.uint64)
        row_bits = max(1, (layout.rows - 1).bit_length())
        if radix_sort(keys, spare, position_bits, position_bits + row_bits):
            keys = spare
        del spare
    page, pages = np.empty(misses, np.int64), np.empty(misses, np.int32)
    first, counts = np.empty(misses + 1, np.int32), np.zeros(3, np.int64)
    reads = cut_extents(
        keys, position_bits, layout.row_bytes, layout.pages_per_chunk, model.gap_pages_max,
        extent_bytes_max // PAGE_BYTES, page, pages, first, counts,
    )  # fmt: skip
    return Extents(
        page[:reads],
        pages[:reads],
        first[: reads + 1],
        keys,
        position_bits,
        int(counts[0]),
        int(counts[1]),
        int(counts[2]),
    )


@dataclass(frozen=True)
class RunExtents:
    """The reads that bring runs of rows whole, one span of bytes each."""

    page: NDArray[np.int64]
    pages: NDArray[np.int32]
    spans: NDArray[np.int64]

    @property
    def reads(self) -> int:
        return len(self.page)

    @property
    def bytes_read(self) -> int:
        return int(self.pages.sum()) * PAGE_BYTES


def plan_runs(
    runs: NDArray[np.int64], places: NDArray[np.int64] | None, layout: TableLayout, extent_bytes_max: int
) -> RunExtents:
    """Plan the reads for ``runs`` of rows, int64 [n, 2] (first, end). Run i goes to the rows of the
    destination from ``places[i]`` on; without ``places`` they go one after the other.

    Runs that follow each other on disk and in the destination are read as one. Reads begin at multiples of
    the longest read, so that all but the first and last of a run are as long as can be, and none crosses the
    end of a file.
    """
    lengths = runs[:, 1] - runs[:, 0]
    starts = np.cumsum(lengths) - lengths if places is None else places
    wanted = np.flatnonzero(lengths)
    begin, end, to = (a[wanted] * layout.row_bytes for a in (runs[:, 0], runs[:, 1], starts))
    if len(wanted) == 0:
        return RunExtents(np.empty(0, np.int64), np.empty(0, np.int32), np.empty((0, 3), np.int64))
    follows = (begin[1:] == end[:-1]) & (to[1:] == to[:-1] + end[:-1] - begin[:-1])
    first, last = np.concatenate([[True], ~follows]), np.concatenate([~follows, [True]])
    begin, end, to = begin[first], end[last], to[first]
    file_bytes, step = layout.pages_per_chunk * PAGE_BYTES, extent_bytes_max // PAGE_BYTES * PAGE_BYTES
    long = (begin // file_bytes != (end - 1) // file_bytes) | (
        begin % file_bytes // step != (end - 1) % file_bytes // step
    )
    spans = np.stack([begin, end, to], axis=1)
    if long.any():
        cuts = [_cut(low, high, at, file_bytes, step) for low, high, at in spans[long].tolist()]
        counts = np.ones(len(spans), np.int64)
        counts[long] = [len(one) for one in cuts]
        spans = np.repeat(spans, counts, axis=0)
        spans[np.repeat(long, counts)] = np.concatenate(cuts)
    page = spans[:, 0] // PAGE_BYTES
    pages = (-(-spans[:, 1] // PAGE_BYTES) - page).astype(np.int32)
    return RunExtents(page, pages, spans)


def _cut(begin: int, end: int, to: int, file_bytes: int, step: int) -> NDArray[np.int64]:
    """A run of bytes cut at the ends of files and, within each, at multiples of ``step``: int64 [n, 3]."""
    cuts = []
    for file in range(begin // file_bytes, (end - 1) // file_bytes + 1):
        low, high = max(begin, file * file_bytes), min(end, (file + 1) * file_bytes)
        within = low - file * file_bytes
        inner = (
            np.arange((within // step + 1) * step, high - file * file_bytes, step, dtype=np.int64)
            + file * file_bytes
        )
        cuts.append(np.concatenate([[low], inner]))
    first = np.concatenate(cuts).astype(np.int64)
    last = np.concatenate([first[1:], [end]])
    return np.stack([first, last, first - begin + to], axis=1)
