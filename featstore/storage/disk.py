"""The one door for writes.

Everything that featstore writes into a store goes through a :class:`Disk`: eight operations, so that a test can record
them (and replay every crash state) or make the N-th one fail. The real disk turns a full disk into DiskFullError and any other
failure into DeviceError, writes whole buffers or raises, and treats a failed fsync as fatal: after one, the kernel may have
dropped the dirty pages and a second fsync would lie, so nothing is retried on that descriptor.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featstore.errors import DeviceError, DiskFullError, FeatstoreError
from featstore.units import PAGE_BYTES

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _error(error: OSError, path: Path, offset: int | None, doing: str, needed_bytes: int = 0) -> FeatstoreError:
    if error.errno in _NO_SPACE:
        try:
            available = shutil.disk_usage(path.parent).free
        except OSError:
            available = 0
        return DiskFullError(path, needed_bytes, available)
    return DeviceError(error.errno or errno.EIO, path, offset, doing)


class File:
    """A file being written. ``direct`` tells whether aligned writes go past the page cache."""

    def __init__(self, path: Path, descriptor: int, direct: bool) -> None:
        self.path = path
        self.descriptor = descriptor
        self.direct = direct


class Disk:
    """The real disk. Paths are absolute; every operation raises DiskFullError or DeviceError."""

    def mkdir(self, path: Path) -> None:
        """Make a directory; its parent exists, and one that is there already is fine."""
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise _error(error, path, None, "create directory") from error

    def create(self, path: Path, *, keep: bool = False, direct: bool = False) -> File:
        """Open a file for writing: emptied, or with ``keep`` as it is. ``direct`` asks for direct I/O if the file system has it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if keep else os.O_TRUNC)
        try:
            if direct:
                try:
                    return File(path, os.open(path, flags | os.O_DIRECT, 0o644), True)
                except OSError as error:
                    if error.errno != errno.EINVAL:  # EINVAL: no direct I/O on this file system; the page cache serves
                        raise
            return File(path, os.open(path, flags, 0o644), False)
        except OSError as error:
            raise _error(error, path, None, "create") from error

    def write(self, file: File, offset: int, data: NDArray[np.uint8] | bytes) -> None:
        """Write all of ``data`` at a byte offset. A direct file takes whole aligned pages directly and the rest through the cache."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        if file.direct and (offset % PAGE_BYTES or len(view) % PAGE_BYTES or _address(data) % PAGE_BYTES):
            self._leave_direct(file)
        done = 0
        while done < len(view):
            try:
                done += os.pwrite(file.descriptor, view[done:], offset + done)
            except OSError as error:
                raise _error(error, file.path, offset + done, "write", len(view) - done) from error
            if file.direct and done % PAGE_BYTES:
                done -= done % PAGE_BYTES

    def _leave_direct(self, file: File) -> None:
        flags = fcntl.fcntl(file.descriptor, fcntl.F_GETFL)
        fcntl.fcntl(file.descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        file.direct = False

    def truncate(self, file: File, size_bytes: int) -> None:
        """Set a file's size; what is added reads as zeros."""
        try:
            os.ftruncate(file.descriptor, size_bytes)
        except OSError as error:
            raise _error(error, file.path, size_bytes, "resize") from error

    def fsync(self, file: File) -> None:
        """Make a file's bytes durable. A failure is fatal for what was written through this descriptor."""
        try:
            os.fsync(file.descriptor)
        except OSError as error:
            raise _error(error, file.path, None, "fsync") from error

    def close(self, file: File) -> None:
        try:
            os.close(file.descriptor)
        except OSError as error:
            raise _error(error, file.path, None, "close") from error

    def fsync_dir(self, path: Path) -> None:
        """Make the names in a directory durable."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _error(error, path, None, "fsync directory") from error

    def rename(self, source: Path, target: Path) -> None:
        """Replace ``target`` by ``source`` in one step."""
        try:
            os.replace(source, target)
        except OSError as error:
            raise _error(error, target, None, "rename to") from error

    def unlink(self, path: Path) -> None:
        """Remove a file; one that is not there is fine."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise _error(error, path, None, "remove") from error

    def rmtree(self, path: Path) -> None:
        """Remove a directory and all in it (what an unfinished pack left, an old generation)."""
        try:
            if path.exists():
                shutil.rmtree(path)
        except OSError as error:
            raise _error(error, path, None, "remove") from error

    def free_bytes(self, path: Path) -> int:
        """Bytes that may still be written under a directory."""
        return shutil.disk_usage(path).free

    def write_file(self, path: Path, data: bytes | NDArray[np.uint8] | Iterator[bytes | NDArray[np.uint8]]) -> None:
        """Create a file whole, of the data or of an iterator's pieces, and make its bytes durable (its name is not, until the
        directory is fsynced)."""
        file, offset = self.create(path), 0
        try:
            for piece in data if isinstance(data, Iterator) else (data,):
                self.write(file, offset, piece)
                offset += len(piece)
            self.fsync(file)
        finally:
            self.close(file)

    def replace_file(self, path: Path, data: bytes | Iterator[bytes | NDArray[np.uint8]]) -> None:
        """Write a file under another name, fsync, rename over ``path``, fsync the directory: all or nothing after a crash. What
        fails leaves nothing under the other name, as far as it can be removed."""
        temporary = path.with_name(path.name + ".tmp")
        try:
            self.write_file(temporary, data)
            self.rename(temporary, path)
        except BaseException:
            with suppress(FeatstoreError):
                self.unlink(temporary)
            raise
        self.fsync_dir(path.parent)


def _address(data: NDArray[np.uint8] | bytes) -> int:
    return int(data.ctypes.data) if isinstance(data, np.ndarray) else 1
