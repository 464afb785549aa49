"""The one door for writes.

Everything that featstore writes into a store goes through a :class:`Disk`: ten operations, so that a test
can record them (and replay every crash state) or make the N-th one fail. The real disk turns a full disk into
DiskFullError and any other failure into DeviceError, writes whole buffers or raises, and treats a failed
fsync as fatal: after one, the kernel may have dropped the dirty pages and a second fsync would lie, so
nothing is retried on that descriptor.

It follows no symbolic link on the way to where it acts (:mod:`featstore.base.folders`): a path that a person
has given is resolved before. And it removes of a directory what is featstore's own
(:mod:`featstore.storage.belongings`), and nothing else.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featstore.base.checksum import crc_page, crc_pages
from featstore.base.compilation import njit
from featstore.base.folders import a_link, folder, mode_of
from featstore.base.native import address_of, call_i64, call_pread, function_address, libc, load_i32
from featstore.base.system import asking, refusal
from featstore.errors import FeatstoreError, FormatError
from featstore.storage.belongings import Belongings, Surveyed, remove
from featstore.units import PAGE_BYTES

_LIBC = libc()
_FUNCTIONS = np.array([function_address(_LIBC, n) for n in ("pwrite", "__errno_location")], np.int64)
_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


@njit(cache=True, nogil=True)
def crc_and_write(
    functions: NDArray[np.int64], memory: int, descriptors: NDArray[np.int32], runs: NDArray[np.int64],
    checksums: NDArray[np.uint32], sums_descriptor: int, done: NDArray[np.int64],
) -> int:  # fmt: skip
    """Write runs of pages, one after the other, each with the checksums of its pages after it. ``runs``,
    int64 [n, 4]: byte of the file ``descriptors[n]``, byte from the address ``memory`` on, pages, byte of the
    file of checksums; ``checksums``, uint32, has room for those of all pages, and is filled in.

    ``done``, int64 [n, 2], from 0 on: how many bytes of each are written, whole pages. It ends where the
    system wrote less than was asked for. Returns the errno, 0 where it did not refuse. ``functions``
    int64 [2]: the addresses of pwrite and of what says where errno is.
    """
    first = 0
    for i in range(runs.shape[0]):
        address, pages = memory + runs[i, 1], runs[i, 2]
        for page in range(pages):
            at = address + page * PAGE_BYTES
            checksums[first + page] = crc_page(at, at + PAGE_BYTES)
        byte_count = pages * PAGE_BYTES
        while done[i, 0] < byte_count:
            # of the same signature: descriptor, buffer, bytes, offset
            count = call_pread(
                functions[0], np.int32(descriptors[i]), address + done[i, 0], byte_count - done[i, 0],
                runs[i, 0] + done[i, 0],
            )  # fmt: skip
            if count < PAGE_BYTES:
                return load_i32(call_i64(functions[1])) if count < 0 else 0
            done[i, 0] += count - count % PAGE_BYTES
        count = call_pread(
            functions[0], np.int32(sums_descriptor), checksums[first:].ctypes.data, 4 * pages, runs[i, 3]
        )
        done[i, 1] = max(np.int64(0), count)
        if count < 4 * pages:
            return load_i32(call_i64(functions[1])) if count < 0 else 0
        first += pages
    return 0


class File:
    """A file being written. ``direct`` tells whether aligned writes go past the page cache."""

    def __init__(self, path: Path, descriptor: int, direct: bool) -> None:
        self.path = path
        self.descriptor = descriptor
        self.direct = direct


class Disk:
    """The real disk. Paths are absolute and lead through no link; every operation raises DiskFullError,
    DeviceError, or FormatError where a link or something else stands in the way."""

    def mkdir(self, path: Path) -> None:
        """Make a directory; its parent exists, and one that is there already is fine."""
        with asking(path, "create directory"), folder(path.parent) as above:
            try:
                os.mkdir(path.name, dir_fd=above)
            except FileExistsError:
                mode = mode_of(path.name, above) or 0
                if stat.S_ISLNK(mode):
                    raise a_link(path) from None
                if not stat.S_ISDIR(mode):
                    raise

    def create(self, path: Path, *, keep: bool = False, direct: bool = False) -> File:
        """Open a file for writing: emptied, or with ``keep`` as it is. ``direct`` asks for direct I/O if the
        file system has it."""
        flags = os.O_RDWR | os.O_CREAT | (0 if keep else os.O_TRUNC)
        with asking(path, "create"):
            if direct:
                try:
                    return self._open(path, flags | os.O_DIRECT, True)
                except OSError as error:
                    # EINVAL: no direct I/O on this file system; the page cache serves
                    if error.errno != errno.EINVAL:
                        raise
            return self._open(path, flags, False)

    def create_scratch(self, path: Path) -> File:
        """A new file, which nobody else may open."""
        with asking(path, "create"):
            return self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, False, 0o600)

    @staticmethod
    def _open(path: Path, flags: int, direct: bool, mode_bits: int = 0o644) -> File:
        """A regular file, opened for writing and reached through no link."""
        with folder(path.parent) as above:
            mode = mode_of(path.name, above)
            if mode is not None and stat.S_ISLNK(mode):
                raise a_link(path)
            if mode is not None and not stat.S_ISREG(mode):
                raise FormatError(f"{path} is no regular file, and is left alone: move it away")
            flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            return File(path, os.open(path.name, flags, mode_bits, dir_fd=above), direct)

    def write(self, file: File, offset: int, data: NDArray[np.uint8] | bytes) -> None:
        """Write all of ``data`` at a byte offset. A direct file takes whole aligned pages directly and the
        rest through the cache."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        if file.direct and (offset % PAGE_BYTES or len(view) % PAGE_BYTES or _address(data) % PAGE_BYTES):
            self._leave_direct(file)
        done = 0
        while done < len(view):
            try:
                done += os.pwrite(file.descriptor, view[done:], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and file.direct:
                    # Where a limit of file sizes cuts a direct write in the middle of a page, this is all the
                    # system says.
                    self._leave_direct(file)
                    continue
                raise refusal(error, file.path, "write", offset + done, len(view) - done) from error
            if file.direct and done % PAGE_BYTES:
                done -= done % PAGE_BYTES

    def write_pages(
        self, memory: NDArray[np.uint8], files: Sequence[File], runs: NDArray[np.int64], sums: File
    ) -> None:
        """Write runs of whole pages, each into one of ``files``, and the checksum of each page, uint32, into
        ``sums``: as two writes a run, but all in one step that holds no lock of the interpreter. ``runs``,
        int64 [n, 4]: byte of the file, byte of ``memory``, pages, byte of ``sums``."""
        checksums, done = np.empty(int(runs[:, 2].sum()), np.uint32), np.zeros((len(runs), 2), np.int64)
        number, watched = 0, type(self).write is not Disk.write  # who watches sees each write
        if not watched and not _address(memory) % PAGE_BYTES:
            descriptors = np.array([file.descriptor for file in files], np.int32)
            number = crc_and_write(
                _FUNCTIONS, address_of(memory), descriptors, runs, checksums, sums.descriptor, done
            )
            if number == 0 and done[-1, 1] == 4 * runs[-1, 2]:
                return
        first = 0
        for file, (offset, at, count, sums_at), (bytes_done, sums_done) in zip(
            files, runs.tolist(), done.tolist(), strict=True
        ):
            pages, own = memory[at : at + count * PAGE_BYTES], checksums[first : first + count]
            first += count
            if bytes_done == len(pages) and sums_done == own.nbytes:
                continue
            if number not in (0, errno.EINTR, errno.EINVAL):
                where, byte = (file, offset + bytes_done) if bytes_done < len(pages) else (sums, sums_at)
                left = (len(pages) - bytes_done) or own.nbytes
                raise refusal(OSError(number, os.strerror(number)), where.path, "write", byte, left)
            if bytes_done < len(pages):  # less was written than was asked for, or nothing yet
                self.write(file, offset + bytes_done, pages[bytes_done:])
            self.write(sums, sums_at, crc_pages(pages, own).view(np.uint8))

    def _leave_direct(self, file: File) -> None:
        with asking(file.path, "leave direct writing to"):
            flags = fcntl.fcntl(file.descriptor, fcntl.F_GETFL)
            fcntl.fcntl(file.descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        file.direct = False

    def allocate(self, file: File, size_bytes: int) -> None:
        """Give a file's first bytes their place on the disk, where the file system can: those that were not
        there read as zeros. Direct writes to what is allocated pass each other; others wait in line."""
        while size_bytes > 0 and _LIBC.fallocate(file.descriptor, 0, 0, size_bytes):
            error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                return
            if error.errno != errno.EINTR:
                raise refusal(error, file.path, "allocate", 0, size_bytes) from error

    def truncate(self, file: File, size_bytes: int) -> None:
        """Set a file's size; what is added reads as zeros."""
        with asking(file.path, "resize", size_bytes):
            os.ftruncate(file.descriptor, size_bytes)

    def fsync(self, file: File) -> None:
        """Make a file's bytes durable. A failure is fatal for what was written through this descriptor."""
        with asking(file.path, "fsync"):
            os.fsync(file.descriptor)

    def close(self, file: File) -> None:
        with asking(file.path, "close"):
            os.close(file.descriptor)

    def fsync_dir(self, path: Path) -> None:
        """Make the names in a directory durable."""
        with asking(path, "fsync directory"), folder(path, listed=True) as descriptor:
            os.fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Replace ``target`` by ``source`` in one step."""
        with asking(target, "rename to"), folder(source.parent) as old, folder(target.parent) as new:
            os.replace(source.name, target.name, src_dir_fd=old, dst_dir_fd=new)

    def unlink(self, path: Path) -> None:
        """Remove a file; one that is not there is fine."""
        try:
            with folder(path.parent) as above:
                os.unlink(path.name, dir_fd=above)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise refusal(error, path, "remove") from error

    def rmtree(self, path: Path, own: Belongings) -> Surveyed:
        """Remove from a directory what is featstore's own (what an unfinished pack left, an old generation),
        and the directory if it is empty then. One that is not there is fine. Returns what was removed, and
        what is foreign and stays."""
        with asking(path, "remove"):
            return remove(path, own)

    def free_bytes(self, path: Path) -> int:
        """Bytes that may still be written under a directory."""
        with asking(path, "look for free space in"):
            return shutil.disk_usage(path).free

    def write_file(
        self, path: Path, data: bytes | NDArray[np.uint8] | Iterator[bytes | NDArray[np.uint8]]
    ) -> None:
        """Create a file whole, of the data or of an iterator's pieces, and make its bytes durable (its name
        is not, until the directory is fsynced)."""
        file = self.create(path)
        try:
            self._fill(file, data)
        finally:
            self.close(file)

    def _fill(
        self, file: File, data: bytes | NDArray[np.uint8] | Iterator[bytes | NDArray[np.uint8]]
    ) -> None:
        offset = 0
        try:
            for piece in data if isinstance(data, Iterator) else (data,):
                self.write(file, offset, piece)
                offset += len(piece)
        finally:  # a traceback would keep it, and what it holds
            getattr(data, "close", lambda: None)()
        self.fsync(file)

    def _temporary(self, path: Path) -> File:
        """A new file beside ``path``, locked as long as it is open: one that is not is left from a killed
        process, and collected."""
        while True:
            file = self.create(path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp"))
            try:
                with asking(file.path, "lock"):
                    fcntl.flock(file.descriptor, fcntl.LOCK_EX)
                    there = os.fstat(file.descriptor).st_nlink
            except BaseException:
                with suppress(FeatstoreError):
                    self.unlink(file.path)
                self.close(file)
                raise
            if there:  # else it was collected before it was locked
                return file
            self.close(file)

    def replace_file(self, path: Path, data: bytes | Iterator[bytes | NDArray[np.uint8]]) -> None:
        """Write a file under another name, fsync, rename over ``path``, fsync the directory: all or nothing
        after a crash. What fails leaves nothing under the other name, as far as it can be removed. Nobody
        else has that name: two that replace one file at once do not write into each other's, and the last
        one's stands."""
        file = self._temporary(path)
        try:
            try:
                self._fill(file, data)
                self.rename(file.path, path)
            except BaseException:
                with suppress(FeatstoreError):
                    self.unlink(file.path)
                raise
        finally:
            self.close(file)
        self.fsync_dir(path.parent)


def _address(data: NDArray[np.uint8] | bytes) -> int:
    return int(data.ctypes.data) if isinstance(data, np.ndarray) else 1
