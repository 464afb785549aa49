"""Files as a scrub reads them: whole, block after block, and on past pages that cannot be read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import aligned_buffer
from featstore.base.checksum import crc_pages
from featstore.base.files import RegularFile
from featstore.base.system import submitted
from featstore.base.threads import thread_pool
from featstore.engine.files import Access
from featstore.errors import CorruptionError, DeviceError
from featstore.scrub.report import Findings, Progress
from featstore.storage.manifest import FileEntry
from featstore.units import PAGE_BYTES

BLOCK_BYTES = 4 * 2**20


class Blocks:
    """Reads the listed files of a store: two buffers, and a thread that fills one while the other is looked
    at. A context manager.

    ``margin``: bytes before each block that are the caller's. ``access`` turns to "buffered" where the file
    system has no direct reads. ``done_bytes``: what was read so far.
    """

    def __init__(
        self,
        findings: Findings,
        entries: Mapping[str, FileEntry],
        margin: int,
        access: Access,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.margin = margin
        self.access: Access = access
        self.done_bytes = self.total_bytes = 0
        self._findings = findings
        self._entries = entries
        self._progress = progress
        self._pool = thread_pool(1, "featstore-verify")
        self._buffers = [aligned_buffer(margin + BLOCK_BYTES) for _ in range(2)]

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()

    def of(self, path: str) -> Iterator[tuple[int, NDArray[np.uint8], list[int]]]:
        """(offset, a buffer that holds the file from ``margin`` on, offsets of unreadable pages), in file
        order.

        The next block is read while this one is looked at. Unreadable pages are reported here.
        """
        size, findings = self._entries[path].bytes, self._findings
        file = self._open(path)
        if file is None:
            return
        future = None
        try:
            for turn, offset in enumerate(range(0, size, BLOCK_BYTES)):
                want = min(BLOCK_BYTES, size - offset)
                buffer, other = self._buffers[turn % 2], self._buffers[(turn + 1) % 2]
                bad = future.result() if future else self._fill(file, buffer[self.margin :], offset, want)
                after = offset + BLOCK_BYTES
                if after < size:
                    rest = min(BLOCK_BYTES, size - after)
                    future = submitted(self._pool, self._fill, file, other[self.margin :], after, rest)
                for at, why in bad:
                    findings.readable.discard(path)
                    findings.problem("unreadable page", path, "a page that can be read", why, at)
                yield offset, buffer[: self.margin + want], [at for at, _ in bad]
                self.done_bytes += want
                if self._progress is not None:
                    self._progress(Progress(path, self.done_bytes, self.total_bytes))
        finally:
            if future is not None:
                future.exception()
            file.close()

    def _open(self, path: str) -> RegularFile | None:
        """The file; None, and a problem, where it cannot be had."""
        try:
            file = RegularFile(self._findings.store / path, direct=self.access == "direct")
        except (CorruptionError, DeviceError) as error:
            why = error.actual if isinstance(error, CorruptionError) else os.strerror(error.errno or 0)
            self._findings.readable.discard(path)
            self._findings.problem("unreadable file", path, "a file that can be opened", why)
            return None
        if not file.direct:
            self.access = "buffered"
        return file

    def _fill(
        self, file: RegularFile, block: NDArray[np.uint8], offset: int, want: int
    ) -> list[tuple[int, str]]:
        """Read ``want`` bytes; returns offset and reason of each page that cannot be read; it is zero in
        ``block``."""
        pages = block[: -(-want // PAGE_BYTES) * PAGE_BYTES]
        bad: list[tuple[int, str]] = []
        try:
            got = file.read_into(pages, offset, 0)
        except DeviceError:
            got = 0  # page by page: which one is it?
        for at in range(got // PAGE_BYTES * PAGE_BYTES if got < want else want, want, PAGE_BYTES):
            page, least = pages[at : at + PAGE_BYTES], min(PAGE_BYTES, want - at)
            try:
                why = "" if file.read_into(page, offset + at, 0) >= least else "end of file"
            except DeviceError as error:
                why = os.strerror(error.errno or 0)
            if why:
                bad.append((offset + at, why))
                page[:] = 0
        if not file.direct:
            self.access = "buffered"
        return bad

    def digest(self, path: str) -> None:
        """A whole file against its digest."""
        digest = hashlib.sha256()
        for _, buffer, _ in self.of(path):
            digest.update(crc_pages(buffer[self.margin :]).tobytes())
        wanted = self._entries[path].digest
        if path in self._findings.readable and digest.hexdigest() != wanted:
            self._findings.problem("file digest", path, wanted, digest.hexdigest())
