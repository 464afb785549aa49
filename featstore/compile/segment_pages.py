"""Targets: tables that segments are written into, while they are being written.

Segments follow each other without gaps, so the page in which one ends and the next begins belongs to both:
such pages wait in memory until they are whole. A checkpoint writes them as they are, and what it left is read
back from the files.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import aligned_buffer
from featstore.base.files import RegularFile
from featstore.layout import TableLayout
from featstore.storage.table_writer import TableWriter
from featstore.units import PAGE_BYTES

PAGE_WRITE_THREADS = 4  # segments' buffers are short, and their writes wait for the device one by one
_WRITES_AHEAD = 4 * PAGE_WRITE_THREADS
_ANEW = "start the pack anew with --overwrite"


def page_buffers(count: int, byte_count: int) -> list[NDArray[np.uint8]]:
    """Buffers of whole pages, one after the other, so that large pages serve small ones, too."""
    whole = aligned_buffer(count * byte_count)
    return [whole[i * byte_count : (i + 1) * byte_count] for i in range(count)]


class Target:
    """A table that segments are written into: its writer, its layout and where its files are (to read pages
    back)."""

    def __init__(self, writer: TableWriter, layout: TableLayout, chunk_path: Callable[[int], Path]) -> None:
        self.writer = writer
        self.layout = layout
        self._chunk_path = chunk_path
        self._edges: dict[int, tuple[NDArray[np.uint8], int]] = {}
        self._turns: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(_WRITES_AHEAD):
            self._turns.put(None)

    def write(
        self, page: int, pages: NDArray[np.uint8], on_written: Callable[[], None] = lambda: None
    ) -> None:
        """Write pages soon, as the writer does, but not more than a few ahead: with each write, it looks at
        all that are under way."""

        def written() -> None:
            on_written()
            self._turns.put(None)

        self._turns.get()
        self.writer.write(page, pages, written)

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
            self.write(page, buffer)
        else:
            self._edges[page] = buffer, held

    def write_unfinished(self, held: Iterable[tuple[int, int, NDArray[np.uint8]]]) -> None:
        """Write the pages that are not whole yet as they are, with what others ``held`` of them, durably.

        ``held``: page, byte within it, and the bytes, uint8.
        """
        pages: dict[int, NDArray[np.uint8]] = {}
        for number, (buffer, _) in self._edges.items():
            pages[number] = aligned_buffer(PAGE_BYTES)
            pages[number][:] = buffer
        for number, low, content in held:
            page = pages.setdefault(number, aligned_buffer(PAGE_BYTES))
            page[low : low + len(content)] = content
        for number, page in pages.items():
            self.write(number, page)
        self.writer.checkpoint()

    def page_written(self, page: int) -> NDArray[np.uint8]:
        """A page as a checkpoint left it. Raises CorruptionError."""
        chunk, within = divmod(page, self.layout.pages_per_chunk)
        path = self._chunk_path(chunk)
        out = aligned_buffer(PAGE_BYTES)
        with RegularFile(path, advice=_ANEW) as file:
            file.read_into(out, within * PAGE_BYTES, self.page_bytes(page))
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
