"""The open chunk files of one table, as an engine wants them: direct descriptors, buffered descriptors, or mappings.

Opening checks what the manifest says (a regular file, not a link, of the right size). Direct I/O is tried with a real read
and given up, with the reason kept for people to see, where the file system refuses it.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from featstore.errors import CorruptionError, DeviceError
from featstore.layout import TableLayout
from featstore.units import PAGE_BYTES

Access = Literal["direct", "buffered", "mapped"]


def open_regular(path: Path, expected_bytes: int, flags: int = 0) -> int:
    """A read-only descriptor of a regular file of exactly this size.

    Raises CorruptionError where the file is missing, is not a regular file (a link included) or has another size, and
    DeviceError where the system refuses.
    """
    try:
        if stat.S_ISFIFO(os.lstat(path).st_mode):  # opening a pipe would wait for a writer
            raise CorruptionError(
                path, None, f"a file of {expected_bytes:,} bytes", "something that is not a regular file"
            )
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags)
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptionError(path, None, f"a file of {expected_bytes:,} bytes", "no file") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CorruptionError(path, None, "a regular file", "a symbolic link") from None
        raise DeviceError(error.errno or errno.EIO, path, None, "open") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size != expected_bytes:
        os.close(descriptor)
        found = f"{status.st_size:,} bytes" if stat.S_ISREG(status.st_mode) else "something that is not a regular file"
        raise CorruptionError(path, None, f"a file of {expected_bytes:,} bytes", found)
    return descriptor


def direct_refusal(path: Path, expected_bytes: int) -> str | None:
    """Why this file cannot be read with direct I/O; None if it can."""
    try:
        descriptor = open_regular(path, expected_bytes, os.O_DIRECT)
    except DeviceError as error:
        if error.errno == errno.EINVAL:
            return "the file system refuses O_DIRECT"
        raise
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.preadv(descriptor, [page], 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return "the file system refuses direct reads of 4 KiB"
        raise DeviceError(error.errno or errno.EIO, path, 0) from error
    finally:
        os.close(descriptor)
    return None


class TableFiles:
    """The chunk files of a table, open. ``handles`` is int64 [files]: descriptors, or addresses of mappings.

    ``checksums`` is uint32 [pages], or None where reads are not verified. Close it when no lane uses it any more.
    """

    def __init__(
        self, paths: Sequence[Path], layout: TableLayout, checksums: NDArray[np.uint32] | None, access: Access
    ) -> None:
        self.paths = list(paths)
        self.layout = layout
        self.checksums = checksums
        self.access: Access = access
        self.buffered_because = ""
        self._descriptors: list[int] = []
        self._maps: list[tuple[mmap.mmap, NDArray[np.uint8]]] = []
        if len(self.paths) != layout.chunks:
            raise ValueError(f"{len(self.paths)} paths for a table of {layout.chunks} chunks")
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
        flags = os.O_DIRECT if self.access == "direct" else 0
        for k, path in enumerate(self.paths):
            descriptor = open_regular(path, self.layout.chunk_bytes, flags)
            self._descriptors.append(descriptor)
            if self.access == "mapped":
                mapping = mmap.mmap(descriptor, self.layout.chunk_bytes, prot=mmap.PROT_READ)
                mapping.madvise(mmap.MADV_RANDOM)
                view = np.frombuffer(mapping, np.uint8)
                self._maps.append((mapping, view))
                self.handles[k] = view.ctypes.data
            else:
                if self.access == "buffered":
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
                self.handles[k] = descriptor

    def check_sizes(self) -> None:
        """Raise CorruptionError where a file has been cut since it was opened (a mapping would die with SIGBUS)."""
        for path, descriptor in zip(self.paths, self._descriptors, strict=True):
            size = os.fstat(descriptor).st_size
            if size != self.layout.chunk_bytes:
                raise CorruptionError(path, None, f"a file of {self.layout.chunk_bytes:,} bytes", f"{size:,} bytes")

    def close(self) -> None:
        """Give the descriptors and mappings back. May be called more than once."""
        self._maps.clear()  # views first, then mappings: both go with the tuples
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)
