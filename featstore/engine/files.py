"""The open chunk files of one table, as an engine wants them: direct descriptors, buffered descriptors, or
mappings.

Opening checks what the manifest says (a regular file, not a link, of the right size). Direct I/O is tried
with a real read and given up, with the reason kept for people to see, where the file system refuses it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from featstore.base.files import direct_refusal, open_regular
from featstore.base.system import asking, room_for_files
from featstore.errors import ArgumentError, CorruptionError
from featstore.layout import TableLayout

Access = Literal["direct", "buffered", "mapped"]


class Checked:
    """Which pages of a table's mappings have been checked, and need not be again: ``bits``, uint8
    [ceil(pages / 8)]. They say nothing any more once other than ``faults`` have been counted."""

    def __init__(self, pages: int, faults: int) -> None:
        self.bits, self.faults = np.empty(self.bytes_for(pages), np.uint8), faults
        self.bits.fill(0)  # is in memory then: what is counted later are pages of mappings

    @staticmethod
    def bytes_for(pages: int) -> int:
        return -(-pages // 8)


class TableFiles:
    """The chunk files of a table, open. ``handles`` is int64 [files]: descriptors, or addresses of mappings.

    ``checksums`` is uint32 [pages], or None where reads are not verified. ``checked`` and ``faults`` are the
    engine's. Close it when no lane uses it any more.
    """

    def __init__(
        self, paths: Sequence[Path], layout: TableLayout, checksums: NDArray[np.uint32] | None, access: Access
    ) -> None:
        self.paths = list(paths)
        self.layout = layout
        self.checksums = checksums
        self.access: Access = access
        self.checked: Checked | None = None
        self.faults = np.zeros(1, np.int64)  # of pages of mappings, of all lanes
        self.buffered_because = ""
        self._descriptors: list[int] = []
        self._maps: list[tuple[mmap.mmap, NDArray[np.uint8]]] = []
        if len(self.paths) != layout.chunks:
            raise ArgumentError(f"{len(self.paths)} paths for a table of {layout.chunks} chunks")
        if access == "direct" and self.paths:
            self.buffered_because = direct_refusal(self.paths[0], layout.chunk_bytes) or ""
            if self.buffered_because:
                self.access = "buffered"
        self.handles = np.zeros(len(self.paths), np.int64)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        room_for_files(len(self.paths))
        flags = os.O_DIRECT if self.access == "direct" else 0
        for k, path in enumerate(self.paths):
            descriptor = open_regular(path, self.layout.chunk_bytes, flags)
            self._descriptors.append(descriptor)
            if self.access == "mapped":
                with asking(path, "map"):
                    mapping = mmap.mmap(descriptor, self.layout.chunk_bytes, prot=mmap.PROT_READ)
                    mapping.madvise(mmap.MADV_RANDOM)
                view = np.frombuffer(mapping, np.uint8)
                self._maps.append((mapping, view))
                self.handles[k] = view.ctypes.data
            else:
                if self.access == "buffered":
                    with asking(path, "advise the system of reads of"):
                        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
                self.handles[k] = descriptor

    def check_sizes(self) -> None:
        """Raise CorruptionError where a file has been cut since it was opened (a mapping would die with
        SIGBUS)."""
        for path, descriptor in zip(self.paths, self._descriptors, strict=True):
            with asking(path, "look at"):
                size = os.fstat(descriptor).st_size
            if size != self.layout.chunk_bytes:
                raise CorruptionError(
                    path, None, f"a file of {self.layout.chunk_bytes:,} bytes", f"{size:,} bytes"
                )

    def close(self) -> None:
        """Give the descriptors and mappings back. May be called more than once."""
        self._maps.clear()  # views first, then mappings: both go with the tuples
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)
