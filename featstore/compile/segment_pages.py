"""Targets: tables that segments are written into, while they are being written.

Segments follow each other without gaps, so the page in which one ends and the next begins belongs to both:
such pages wait in memory until they are whole. A checkpoint writes them as they are, and what it left is read
back from the files.

A page that was not whole at a checkpoint may have been made whole between that and the process's end, so its
checksum is of the bytes alone that it had then, the others counted as zero; the journal keeps it. What was
whole has the checksum that was written beside it.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import aligned_buffer
from featstore.base.checksum import crc_pages
from featstore.base.files import RegularFile
from featstore.errors import CorruptionError
from featstore.layout import TableLayout
from featstore.storage.journal import UnfinishedPage
from featstore.storage.table_writer import TableWriter
from featstore.units import PAGE_BYTES

PAGE_WRITE_THREADS = 4  # segments' buffers are short, and their writes wait for the device one by one
_WRITES_AHEAD = 4 * PAGE_WRITE_THREADS
_ANEW = "start the pack anew with --overwrite"


def _lengths(page: UnfinishedPage) -> list[int]:
    """Bytes of each run of a page."""
    return [high - low for low, high in zip(page.runs[::2], page.runs[1::2], strict=False)]


def _check_unfinished(known: UnfinishedPage, page: NDArray[np.uint8], path: Path, offset: int) -> None:
    """Raise CorruptionError unless a page, read back from ``path`` at ``offset``, has what a checkpoint had
    written of it."""
    own = np.zeros(PAGE_BYTES, np.uint8)
    for low, high in zip(known.runs[::2], known.runs[1::2]):
        own[low:high] = page[low:high]
    found = int(crc_pages(own)[0])
    if found != known.checksum:
        expected = f"checksum {known.checksum:08x} of what was written of the 4 KiB page"
        raise CorruptionError(path, offset, expected, f"{found:08x}", _ANEW)


class _Edge:
    """A page in the making, uint8 ``buffer``, which has ``held`` bytes so far."""

    def __init__(self) -> None:
        self.buffer, self.held = aligned_buffer(PAGE_BYTES), 0
        self._runs: list[tuple[int, int]] = []

    def put(self, offset: int, data: NDArray[np.uint8]) -> None:
        self.buffer[offset : offset + len(data)] = data
        self.held += len(data)
        self._runs.append((offset, offset + len(data)))

    def copy(self) -> _Edge:
        other = _Edge()
        other.buffer[:], other.held, other._runs = self.buffer, self.held, list(self._runs)
        return other

    def described(self, number: int) -> UnfinishedPage:
        """What a checkpoint has of it."""
        runs: list[int] = []
        for low, high in sorted(self._runs):
            if runs and runs[-1] == low:
                runs[-1] = high
            else:
                runs += [low, high]
        return UnfinishedPage(number, runs, int(crc_pages(self.buffer)[0]))


class Target:
    """A table that segments are written into: its writer, its layout and where its files are (to read pages
    back)."""

    def __init__(self, writer: TableWriter, layout: TableLayout, chunk_path: Callable[[int], Path]) -> None:
        self.writer = writer
        self.layout = layout
        self._chunk_path = chunk_path
        self._edges: dict[int, _Edge] = {}
        self._left: dict[int, UnfinishedPage] = {}
        self._missing: dict[int, int] = {}  # bytes of these that have not been brought back after a resume
        self._turns: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(_WRITES_AHEAD):
            self._turns.put(None)

    def write_runs(
        self, memory: NDArray[np.uint8], runs: NDArray[np.int64], on_written: Callable[[], None]
    ) -> None:
        """Write runs of pages soon, as the writer does, but not more than a few calls ahead."""

        def written() -> None:
            on_written()
            self._turns.put(None)

        self._turns.get()
        self.writer.write_runs(memory, runs, written)

    def _write_page(self, number: int, edge: _Edge) -> None:
        self.write_runs(edge.buffer, np.array([[number, 0, 1]]), lambda: None)

    def page_bytes(self, page: int) -> int:
        """Bytes of rows in a page: all of it, but for the table's last one."""
        return min(PAGE_BYTES, self.layout.data_bytes - page * PAGE_BYTES)

    def add(self, page: int, offset: int, data: NDArray[np.uint8]) -> None:
        """Put a piece of a page in its place; the page is written when it is whole."""
        if len(data) == 0:
            return
        edge = self._edges.pop(page, None) or _Edge()
        edge.put(offset, data)
        if edge.held == self.page_bytes(page):
            self._write_page(page, edge)
        else:
            self._edges[page] = edge

    def write_unfinished(self, held: Iterable[tuple[int, int, NDArray[np.uint8]]]) -> None:
        """Write the pages that are not whole yet as they are, with what others ``held`` of them, durably.

        ``held``: page, byte within it, and the bytes, uint8.
        """
        pages = {number: edge.copy() for number, edge in self._edges.items()}
        for number, low, content in held:
            pages.setdefault(number, _Edge()).put(low, content)
        self._left = {number: page.described(number) for number, page in pages.items()}
        for number, page in pages.items():
            self._write_page(number, page)
        self.writer.checkpoint()

    @property
    def unfinished(self) -> list[UnfinishedPage]:
        """The pages that were not whole at the latest checkpoint, for the journal."""
        return list(self._left.values())

    def resume(self, unfinished: Iterable[UnfinishedPage]) -> None:
        """Go on after the checkpoint at which these pages were not whole."""
        self._left = {page.number: page for page in unfinished}
        self._missing = {number: sum(_lengths(page)) for number, page in self._left.items()}

    def bring_back(self, page: int, low: int, high: int) -> NDArray[np.uint8]:
        """Bytes ``low`` to ``high`` of a page as the latest checkpoint left it. Raises CorruptionError."""
        if page in self._missing:
            self._missing[page] -= high - low
        return self.page_written(page)[low:high]

    def check_resumed(self) -> None:
        """Raise CorruptionError unless all bytes of the pages that were not whole, and no others, have been
        brought back, now that all segments go on: how far the journal says that these are is then true."""
        for number, left in self._missing.items():
            if left:
                chunk, within = divmod(number, self.layout.pages_per_chunk)
                raise CorruptionError(
                    self._chunk_path(chunk), within * PAGE_BYTES, "a page as far as the journal says",
                    f"one of {abs(left):,} bytes {'more' if left > 0 else 'less'}", _ANEW,
                )  # fmt: skip
        self._missing = {}

    def page_written(self, page: int) -> NDArray[np.uint8]:
        """A page as the latest checkpoint left it. Raises CorruptionError."""
        chunk, within = divmod(page, self.layout.pages_per_chunk)
        path, at = self._chunk_path(chunk), within * PAGE_BYTES
        out = aligned_buffer(PAGE_BYTES)
        with RegularFile(path, advice=_ANEW) as file:
            file.read_into(out, at, self.page_bytes(page))
        if page in self._left:
            _check_unfinished(self._left[page], out, path, at)
        else:
            self.writer.check_written(page, out, path, at)
        return out

    def rows_written(
        self, first: int, count: int, buffer: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """The bytes of rows of a table that is finished, in ``buffer``, which starts at a page and has
        :meth:`pages_bytes` for them.

        Raises CorruptionError, DeviceError.
        """
        begin, end = first * self.layout.row_bytes, (first + count) * self.layout.row_bytes
        low, chunk_bytes = begin // PAGE_BYTES * PAGE_BYTES, self.layout.pages_per_chunk * PAGE_BYTES
        out = aligned_buffer(self.pages_bytes(count)) if buffer is None else buffer
        at = low
        while at < end:
            chunk, within = divmod(at, chunk_bytes)
            path, wanted = self._chunk_path(chunk), min(end - at, chunk_bytes - within)
            pages = out[at - low : at - low - (-wanted // PAGE_BYTES * PAGE_BYTES)]
            with RegularFile(path, direct=True, advice=_ANEW) as file:  # past the page cache: read once
                got = file.read_into(pages, within, wanted)
            pages[got:] = 0
            self.writer.check_written(at // PAGE_BYTES, pages, path, within)
            at += wanted
        return out[begin - low : end - low]

    def pages_bytes(self, count: int) -> int:
        """Bytes of the pages that so many rows lie on, wherever they begin."""
        return (-(-count * self.layout.row_bytes // PAGE_BYTES) + 1) * PAGE_BYTES
