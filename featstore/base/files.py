"""The one door for reads outside the engine.

What featstore has written is opened as a :class:`RegularFile`: it is no link, it has the size that is
promised where one is, and where it ends too early an error names file and byte. What a person has given may
be anything that a path leads to (:func:`open_given`, :func:`load_given` for arrays of NumPy). Small files are
read whole by :func:`read_small`, scratch files mapped by :func:`map_values`.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import stat
import zipfile
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.native import address_of, call_pread, function_address, libc
from featstore.base.system import asking, is_there, mapped_memory, refusal
from featstore.errors import (
    CorruptionError,
    DeviceError,
    FeatstoreError,
    FormatError,
    IncompleteStoreError,
    SourceError,
)
from featstore.units import PAGE_BYTES

_PREAD = function_address(libc(), "pread")
_GENERATION = re.compile(r"g[0-9]{6,}")


@njit(cache=True, nogil=True)
def read_parts(
    pread: int, descriptor: int, offsets: NDArray[np.int64], byte_counts: NDArray[np.int64], address: int
) -> int:
    """Read parts of a file to an address, one after the other, until one is not there as a whole; returns how
    many were. ``pread``: the function's address."""
    for i in range(offsets.shape[0]):
        if call_pread(pread, np.int32(descriptor), address, byte_counts[i], offsets[i]) != byte_counts[i]:
            return i
        address += byte_counts[i]
    return len(offsets)


class RegularFile:
    """A regular file, open for reading; a context manager.

    ``expected_bytes``: its size, where that is known. ``direct``: read past the page cache, into buffers of
    whole pages; the attribute turns False where the file system has no such reads, and the page cache serves.
    ``advice``: what to do where the file ends too early. ``size_bytes``: its size when it was opened.

    Raises as :func:`open_regular`. It may be read by several threads at once.
    """

    def __init__(
        self, path: Path, expected_bytes: int | None = None, *, direct: bool = False, advice: str = ""
    ) -> None:
        self._descriptor = -1
        self.path, self.direct = path, direct
        self._advice = advice
        try:
            self._descriptor = open_regular(path, expected_bytes, os.O_DIRECT if direct else 0, advice)
        except DeviceError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            self.direct = False  # the file system knows no direct reads
            self._descriptor = open_regular(path, expected_bytes, 0, advice)
        try:
            with asking(path, "look at"):
                self.size_bytes = os.fstat(self._descriptor).st_size
        except BaseException:
            self.close()
            raise

    def read_into(self, out: NDArray[Any], offset: int, least: int | None = None) -> int:
        """Fill a C-contiguous array from byte ``offset`` on; returns the bytes read.

        Raises CorruptionError where the file ends before ``least`` bytes, by default all of them, and
        DeviceError.
        """
        assert out.flags.c_contiguous
        view = out.reshape(-1).view(np.uint8)
        least = len(view) if least is None else least
        try:
            got = read_fully(self._descriptor, view, offset, self.path, direct=self.direct)
        except DeviceError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            self._leave_direct()  # it takes the flag and refuses the read
            got = read_fully(self._descriptor, view, offset, self.path)
        if got < least:
            expected, found = f"{least - got:,} bytes more", "the end of the file"
            raise CorruptionError(self.path, offset + got, expected, found, self._advice)
        return got

    def read_parts(
        self, out: NDArray[Any], offsets: NDArray[np.int64], byte_counts: NDArray[np.int64]
    ) -> int:
        """Fill a C-contiguous array with parts of the file, one after the other: ``byte_counts[i]`` bytes
        from ``offsets[i]`` on. Returns how many could be read whole; where one could not, :meth:`read_into`
        says why."""
        assert out.flags.c_contiguous
        assert out.nbytes == byte_counts.sum()
        return int(read_parts(_PREAD, self._descriptor, offsets, byte_counts, address_of(out)))

    def read_at(self, offset: int, size: int) -> NDArray[np.uint8]:
        """Bytes of the file, in memory of their own. Raises as :meth:`read_into`."""
        out = np.empty(size, np.uint8)
        self.read_into(out, offset)
        return out

    def _leave_direct(self) -> None:
        with asking(self.path, "leave direct reading of"):
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False

    def advise(self, advice: int, offset: int = 0, size: int = 0) -> None:
        """Tell the system what will be read, or will not be any more (``os.POSIX_FADV_...``)."""
        with asking(self.path, "advise the system of reads of", offset):
            os.posix_fadvise(self._descriptor, offset, size, advice)

    def close(self) -> None:
        """Give the descriptor back. May be called more than once."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:  # an error came between
            self.close()


def open_regular(path: Path, expected_bytes: int | None, flags: int = 0, advice: str = "") -> int:
    """A read-only descriptor of a regular file, of exactly this size where one is given.

    Raises CorruptionError where the file is missing, is not a regular file (a link included) or has another
    size, and DeviceError where the system refuses.
    """
    wanted = "a file" if expected_bytes is None else f"a file of {expected_bytes:,} bytes"
    try:
        if stat.S_ISFIFO(os.lstat(path).st_mode):  # opening a pipe would wait for a writer
            raise CorruptionError(path, None, wanted, "something that is not a regular file", advice)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags)
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(path, wanted, advice) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CorruptionError(path, None, "a regular file", "a symbolic link", advice) from None
        raise refusal(error, path, "open") from error
    try:
        status = os.fstat(descriptor)
    except OSError as error:
        os.close(descriptor)
        raise refusal(error, path, "look at") from error
    regular = stat.S_ISREG(status.st_mode)
    if not regular or expected_bytes not in (None, status.st_size):
        os.close(descriptor)
        found = f"{status.st_size:,} bytes" if regular else "something that is not a regular file"
        raise CorruptionError(path, None, wanted, found, advice)
    return descriptor


def _missing(path: Path, wanted: str, advice: str) -> FeatstoreError:
    """The error for a file that is not there: it alone, or the whole store."""
    for folder in path.parents:
        if _GENERATION.fullmatch(folder.name) and not is_there(folder):
            return IncompleteStoreError(
                f"{folder} is gone with all its files: the store at {folder.parent} was moved or "
                "removed, or packed anew, since it was opened; open it again, where it is now"
            )
    return CorruptionError(path, None, wanted, "no file", advice)


def direct_refusal(path: Path, expected_bytes: int) -> str | None:
    """Why this file cannot be read with direct I/O; None if it can."""
    try:
        descriptor = open_regular(path, expected_bytes, os.O_DIRECT)
    except DeviceError as error:
        if error.errno == errno.EINVAL:
            return "the file system refuses O_DIRECT"
        raise
    try:
        with mapped_memory(PAGE_BYTES) as page:
            os.preadv(descriptor, [page], 0)
    except FeatstoreError:
        raise
    except OSError as error:
        if error.errno == errno.EINVAL:
            return "the file system refuses direct reads of 4 KiB"
        raise refusal(error, path, "read", 0) from error
    finally:
        os.close(descriptor)
    return None


def read_fully(
    descriptor: int, out: NDArray[np.uint8], offset: int, path: Path, *, direct: bool = False
) -> int:
    """Fill ``out`` from a file; returns the bytes read, fewer only at its end. Raises DeviceError."""
    done = 0
    while done < len(out):
        try:
            got = os.preadv(descriptor, [out[done:]], offset + done)  # type: ignore[list-item]
        except OSError as error:
            raise refusal(error, path, "read", offset + done) from error
        done += got
        # A direct read cannot go on within a page, and needs not to: there it met the end of the file.
        if got == 0 or (direct and done % PAGE_BYTES):
            break
    return done


def open_given(path: Path) -> int:
    """A read-only descriptor of whatever the path of a person leads to, through links, too. Raises
    DeviceError."""
    with asking(path, "open"):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def open_stream(path: Path) -> io.BufferedReader:
    """What the path of a person leads to, for a library that reads from file objects. Raises DeviceError."""
    with asking(path, "open"):
        return open(path, "rb")


def read_small(path: Path, bytes_max: int) -> bytes:
    """The bytes of a small regular file, links followed; where it is larger, one byte more than
    ``bytes_max``, so that it shows.

    Raises FileNotFoundError, FormatError for what is no regular file, and DeviceError.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FormatError(f"{path} is not a regular file")
        with open(path, "rb") as file:
            # a read takes room for all that it asks for
            return file.read(min(os.fstat(file.fileno()).st_size, bytes_max) + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise refusal(error, path, "read") from error


def load_given(path: str | os.PathLike[str], *, mapped: bool = False) -> Any:
    """What NumPy reads of a file of arrays that a person gave, without unpickling; ``mapped``: read-only and
    as it is looked at. An ``.npz`` gives its archive, open. Raises SourceError where it was cut off; OSError
    and ValueError, in NumPy's words. Who calls says which file it is."""
    with open(path, "rb") as file:
        if file.read(2) == b"PK" and not zipfile.is_zipfile(path):  # NumPy would leave it open
            raise SourceError("the archive is damaged or cut off")
    try:
        return np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except EOFError as error:
        raise SourceError(str(error)) from error


def map_values(path: Path, dtype: np.dtype[Any], count: int) -> np.memmap[Any, Any]:
    """The first values of a scratch file, read-only and as they are looked at; ``count`` is 1 or more.
    Raises DeviceError."""
    with asking(path, "map"):
        return np.memmap(path, dtype=dtype, mode="r", shape=(count,))
