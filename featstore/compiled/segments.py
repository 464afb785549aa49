"""Batched packing: rows of the base table, read once and in order, appended to many segments at once.

DiskGNN's batched packing (section 5.2): not mini-batch by mini-batch, which would read the table at random as often as training does, but
slab by slab of the base table; from each slab every segment takes its rows. A segment is a run of rows in a table that is being
written, and has its rows in the order of the base table, so all reads and, thanks to a buffer for each segment, all writes
are long and sequential. Where the buffers would become too small for that, the segments are packed in several episodes, each
a pass over the table.

Segments follow each other without gaps, so the page in which one ends and the next begins belongs to both: such pages wait in memory until
they are whole.

At a checkpoint every segment's rows so far are written, the unfinished last pages too. What a segment has at that point follows
from the slab alone, so a resumed pass needs to know no more than that: it reads the unfinished pages back and goes on.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import numpy as np
from numba import njit
from numpy.typing import NDArray

from featstore.compiled.lists import RowLists
from featstore.engine.base import aligned_buffer
from featstore.errors import BudgetError, CorruptionError, DeviceError
from featstore.layout import TableLayout
from featstore.native import address_of, memcpy
from featstore.packing.writer import TableWriter
from featstore.reader import Reader
from featstore.units import PAGE_BYTES

BUFFER_BYTES_MAX = 2**20
BUFFER_BYTES_MIN = 64 * 2**10
SLAB_BYTES_MAX = 16 * 2**20
CHECKPOINT_BYTES = 2 * 2**30  # written between two
WRITE_THREADS = 4  # segments' buffers are short, and their writes wait for the device one by one
_SPARE_BUFFERS = WRITE_THREADS + 2  # being written while others fill


@njit(cache=True, nogil=True)
def append_rows(
    slab: int,
    first_row: int,
    row_bytes: int,
    rows: NDArray[np.int64],
    begin: int,
    buffer: int,
    fill: int,
    capacity: int,
) -> tuple[int, int]:
    """Copy rows[begin:] from a slab of the table that starts with ``first_row`` to a buffer, until it has no room for another.

    Returns (the index after the last row copied, bytes now in the buffer).
    """
    for i in range(begin, rows.shape[0]):
        if fill + row_bytes > capacity:
            return i, fill
        memcpy(buffer + fill, slab + (rows[i] - first_row) * row_bytes, row_bytes)
        fill += row_bytes
    return rows.shape[0], fill


@contextmanager
def _reading(path: Path) -> Iterator[BufferedReader]:
    """A file that is being written, to read back. Raises CorruptionError where it is gone, DeviceError."""
    try:
        with open(path, "rb") as file:
            yield file
    except FileNotFoundError:
        raise CorruptionError(path, None, "a file", "none", "start the pack anew with --overwrite") from None
    except OSError as error:
        raise DeviceError(error.errno or 5, path) from error


class Target:
    """A table that segments are written into: its writer, its layout and where its files are (to read pages back)."""

    def __init__(self, writer: TableWriter, layout: TableLayout, chunk_path: Callable[[int], Path]) -> None:
        self.writer = writer
        self.layout = layout
        self._chunk_path = chunk_path
        self._edges: dict[int, tuple[NDArray[np.uint8], int]] = {}

    def page_bytes(self, page: int) -> int:
        """Bytes of rows in a page: all of it, but for the table's last one."""
        return min(PAGE_BYTES, self.layout.data_bytes - page * PAGE_BYTES)

    def add(self, page: int, offset: int, data: NDArray[np.uint8]) -> None:
        """Put a piece of a page in its place; the page is written when it is whole."""
        if len(data) == 0:
            return
        buffer, held = self._edges.pop(page, (None, 0))
        if buffer is None:
            buffer = aligned_buffer(PAGE_BYTES)
        buffer[offset : offset + len(data)] = data
        held += len(data)
        if held == self.page_bytes(page):
            self.writer.write(page, buffer, lambda: None)
        else:
            self._edges[page] = buffer, held

    def write_unfinished(self, segments: list[Segment]) -> None:
        """Write the pages that are not whole yet as they are, with what ``segments`` have of them in their buffers, durably."""
        pages: dict[int, NDArray[np.uint8]] = {}
        for number, (buffer, _) in self._edges.items():
            pages[number] = aligned_buffer(PAGE_BYTES)
            pages[number][:] = buffer
        for segment in segments:
            low = max(0, segment.begin_byte - segment.page * PAGE_BYTES)
            if segment.buffer is not None and segment.fill > low:
                page = pages.setdefault(segment.page, aligned_buffer(PAGE_BYTES))
                page[low : segment.fill] = segment.buffer[low : segment.fill]
        for number, page in pages.items():
            self.writer.write(number, page, lambda: None)
        self.writer.checkpoint()

    def page_written(self, page: int) -> NDArray[np.uint8]:
        """A page as a checkpoint left it. Raises CorruptionError."""
        chunk, within = divmod(page, self.layout.pages_per_chunk)
        path = self._chunk_path(chunk)
        with _reading(path) as file:
            file.seek(within * PAGE_BYTES)
            data = file.read(PAGE_BYTES)
        if len(data) < self.page_bytes(page):
            wanted = f"{self.page_bytes(page)} bytes"
            raise CorruptionError(
                path, within * PAGE_BYTES, wanted, f"{len(data)}", "start the pack anew with --overwrite"
            )
        out = aligned_buffer(PAGE_BYTES)
        out[: len(data)] = np.frombuffer(data, np.uint8)
        return out

    def rows_written(self, first: int, count: int) -> NDArray[np.uint8]:
        """The bytes of rows that have been written. Raises CorruptionError."""
        begin, end = first * self.layout.row_bytes, (first + count) * self.layout.row_bytes
        out, chunk_bytes = np.empty(end - begin, np.uint8), self.layout.pages_per_chunk * PAGE_BYTES
        at = begin
        while at < end:
            chunk, within = divmod(at, chunk_bytes)
            path, size = self._chunk_path(chunk), min(end - at, chunk_bytes - within)
            with _reading(path) as file:
                file.seek(within)
                if file.readinto(out[at - begin : at - begin + size]) != size:  # type: ignore[arg-type]
                    raise CorruptionError(
                        path, within, f"{size} bytes", "fewer", "start the pack anew with --overwrite"
                    )
            at += size
        return out


class Segment:
    """A run of rows of a target, in the making: rows ``first_row`` to ``first_row + rows``, in the order of the base table."""

    def __init__(self, target: Target, first_row: int, rows: int) -> None:
        self.target = target
        row_bytes = target.layout.row_bytes
        self.begin_byte = first_row * row_bytes
        self.end_byte = (first_row + rows) * row_bytes
        self.page = self.begin_byte // PAGE_BYTES  # where the buffer's content begins
        self.fill = self.begin_byte - self.page * PAGE_BYTES
        self.buffer: NDArray[np.uint8] | None = None

    def resume(self, rows_done: int, buffer: Callable[[], NDArray[np.uint8]]) -> None:
        """Go on after ``rows_done`` rows that a checkpoint wrote: bring back what pages that were not whole have of them."""
        if rows_done == 0:
            return
        first, head = divmod(self.begin_byte, PAGE_BYTES)
        at = self.begin_byte + rows_done * self.target.layout.row_bytes
        self.page, self.fill = divmod(at, PAGE_BYTES)
        if head:
            high = min(PAGE_BYTES, at - first * PAGE_BYTES)
            self.target.add(first, head, self.target.page_written(first)[head:high])
            self.begin_byte = max(self.begin_byte, min(at, (first + 1) * PAGE_BYTES))  # what is before is the edge's
        if self.fill == 0 or (head and self.page == first):
            return
        page = self.target.page_written(self.page)
        if at == self.end_byte:
            self.target.add(self.page, 0, page[: self.fill])
        else:
            self.buffer = buffer()
            self.buffer[: self.fill] = page[: self.fill]


class Packing:
    """Segments that are packed together; see the module's text."""

    def __init__(self, row_bytes: int, buffer_bytes: int, buffers: int) -> None:
        self._row_bytes = row_bytes
        self._buffer_bytes = buffer_bytes
        self._free: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()
        self._unmade = buffers

    def buffer(self) -> NDArray[np.uint8]:
        """A free buffer; waits for one that is being written."""
        if self._free.empty() and self._unmade:
            self._unmade -= 1
            return aligned_buffer(self._buffer_bytes)
        return self._free.get()

    def append(self, segment: Segment, slab: NDArray[np.uint8], first_row: int, rows: NDArray[np.int64]) -> None:
        """Append ``rows`` (ascending), which lie in a slab of the base table that starts with ``first_row``."""
        at = 0
        while at < len(rows):
            if segment.buffer is None:
                segment.buffer = self.buffer()
            at, segment.fill = append_rows(
                address_of(slab),
                first_row,
                self._row_bytes,
                rows,
                at,
                address_of(segment.buffer),
                segment.fill,
                self._buffer_bytes,
            )
            if at < len(rows) or segment.page * PAGE_BYTES + segment.fill == segment.end_byte:
                self.flush(segment)

    def flush(self, segment: Segment) -> None:
        """Write a segment's whole pages; pages that it shares with others, and at its end the last one, become edges."""
        buffer, target = segment.buffer, segment.target
        if buffer is None:
            return
        begin, end = segment.page * PAGE_BYTES, segment.page * PAGE_BYTES + segment.fill
        first = segment.page
        if begin < segment.begin_byte:  # the first page has another segment's rows too
            low, high = segment.begin_byte - begin, min(PAGE_BYTES, segment.fill)
            if high < PAGE_BYTES and end < segment.end_byte:
                return  # it will have more of this one's
            target.add(first, low, buffer[low:high])
            first += 1
        last = max(first, end // PAGE_BYTES)
        tail = buffer[(last - segment.page) * PAGE_BYTES : segment.fill]
        if end == segment.end_byte:
            target.add(last, 0, tail)
            segment.buffer, segment.fill = None, 0
        else:
            segment.buffer = self.buffer()
            segment.buffer[: len(tail)] = tail
            segment.fill = len(tail)
        low = (first - segment.page) * PAGE_BYTES
        segment.page = last
        if last > first:
            pages = buffer[low : low + (last - first) * PAGE_BYTES]
            target.writer.write(first, pages, lambda: self._free.put(buffer))
        else:
            self._free.put(buffer)


@dataclass(frozen=True)
class Route:
    """What goes to one target: list i of ``rows`` (ascending rows of the base table) is the segment of the target from row
    ``first_rows[i]`` on."""

    rows: RowLists
    first_rows: NDArray[np.int64]
    target: Target


@dataclass(frozen=True)
class Plan:
    """How to pack: rows a slab, the size of a buffer, and episodes, each a list of (route, list) numbers."""

    slab_rows: int
    buffer_bytes: int
    buffers: int
    episodes: tuple[tuple[tuple[int, int], ...], ...]


def _smallest_buffer(row_bytes: int) -> int:
    return -(-max(BUFFER_BYTES_MIN, 2 * row_bytes + PAGE_BYTES) // PAGE_BYTES) * PAGE_BYTES


def needed_bytes(row_bytes: int) -> int:
    """The memory in which :func:`plan_packing` always finds a way: two slabs take a quarter of it, or are of one row each."""
    return ((_SPARE_BUFFERS + 1) * (_smallest_buffer(row_bytes) + PAGE_BYTES) + 2 * row_bytes) * 4 // 3 + 1


def plan_packing(routes: list[Route], row_bytes: int, memory_bytes: int) -> Plan:
    """Buffers as large as the memory allows, in as few episodes. Raises BudgetError."""
    slab_rows = max(1, min(SLAB_BYTES_MAX, memory_bytes // 8) // row_bytes)
    left = memory_bytes - 2 * slab_rows * row_bytes
    segments = [(r, int(i)) for r, route in enumerate(routes) for i in np.flatnonzero(route.rows.lengths())]
    smallest = _smallest_buffer(row_bytes)
    at_once = min(len(segments), left // (smallest + PAGE_BYTES) - _SPARE_BUFFERS)
    if segments and at_once < 1:
        raise BudgetError(
            needed_bytes(row_bytes), memory_bytes, "hold a slab of the table and a buffer for each of a few segments"
        )
    episodes = -(-len(segments) // max(1, at_once))
    per_episode = -(-len(segments) // max(1, episodes))
    each = left // max(1, per_episode + _SPARE_BUFFERS) - PAGE_BYTES
    size = max(smallest, min(BUFFER_BYTES_MAX, each) // PAGE_BYTES * PAGE_BYTES)
    cut = tuple(tuple(segments[at : at + per_episode]) for at in range(0, len(segments), max(1, per_episode)))
    return Plan(slab_rows, size, per_episode + _SPARE_BUFFERS, cut)


def bounds_of(route: Route, segments: list[int], starts: NDArray[np.int64]) -> NDArray[np.int32]:
    """int32 [segments, starts]: how many rows of each list lie before each of ``starts``."""
    out = np.empty((len(segments), len(starts)), np.int32)
    for at, index in enumerate(segments):
        out[at] = np.searchsorted(route.rows[index], starts)
    return out


def pack_episode(
    reader: Reader, table: str, routes: list[Route], plan: Plan, episode: int, begin_slab: int, save: Callable[[int], None],
    tick: Callable[[str, int], None],
) -> None:  # fmt: skip
    """Pack one episode's segments, from slab ``begin_slab`` of the base table on. ``save(slab)`` is called now and then, and at the end,
    when all that lies before a slab is durable. Raises what reading and writing raise."""
    base, row_bytes = reader.store.table(table), routes[0].target.layout.row_bytes
    slabs = -(-base.rows // plan.slab_rows)
    starts = np.minimum(np.arange(slabs + 1, dtype=np.int64) * plan.slab_rows, base.rows)
    packing, chosen = Packing(row_bytes, plan.buffer_bytes, plan.buffers), plan.episodes[episode]
    segments = [segment_of(routes, r, i) for r, i in chosen]
    bounds = np.concatenate(
        [bounds_of(route, [i for q, i in chosen if q == r], starts) for r, route in enumerate(routes)]
    )
    for segment, bound in zip(segments, bounds, strict=True):
        segment.resume(int(bound[begin_slab]), packing.buffer)
    wanted = [s for s in range(begin_slab, slabs) if (bounds[:, s + 1] > bounds[:, s]).any()]
    since = 0
    for slab, data in _slabs(reader, table, starts, wanted, plan.slab_rows * row_bytes):
        tick("read", len(data))
        for (r, i), segment, bound in zip(chosen, segments, bounds, strict=True):
            low, high = int(bound[slab]), int(bound[slab + 1])
            if low < high:
                offset = int(routes[r].rows.offsets[i])
                rows = routes[r].rows.part(offset + low, offset + high).astype(np.int64, copy=False)
                packing.append(segment, data, int(starts[slab]), rows)
        written = int((bounds[:, slab + 1] - bounds[:, slab]).sum()) * row_bytes
        tick("write", written)
        since += written
        if since >= CHECKPOINT_BYTES or slab == wanted[-1]:
            since = 0
            for segment in segments:
                packing.flush(segment)
            for route in routes:
                route.target.write_unfinished([s for s in segments if s.target is route.target])
            save(slab + 1)


def segment_of(routes: list[Route], route: int, index: int) -> Segment:
    """The segment of a list."""
    r = routes[route]
    return Segment(r.target, int(r.first_rows[index]), int(r.rows.offsets[index + 1] - r.rows.offsets[index]))


def _slabs(
    reader: Reader, table: str, starts: NDArray[np.int64], wanted: list[int], slab_bytes: int
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(number, bytes) of the slabs asked for; the next is read while one is in use."""
    row_shape = reader.store.table(table).row_shape
    dtype, row_bytes = reader.store.table(table).dtype, reader.store.table(table).row_bytes
    buffers = [aligned_buffer(slab_bytes) for _ in range(2)]

    def submit(turn: int) -> tuple[object, NDArray[np.uint8]]:
        low, high = int(starts[wanted[turn]]), int(starts[wanted[turn] + 1])
        data = buffers[turn % 2][: (high - low) * row_bytes]
        out = data.view(dtype).reshape(high - low, *row_shape)
        return reader.submit_runs({table: [(low, high)]}, out={table: out}), data

    ahead = submit(0) if wanted else None
    for turn, slab in enumerate(wanted):
        assert ahead is not None
        request, data = ahead
        request.result()  # type: ignore[attr-defined]
        ahead = submit(turn + 1) if turn + 1 < len(wanted) else None
        yield slab, data
