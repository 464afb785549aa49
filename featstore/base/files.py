"""The door for reads outside the engine: regular files of a known size, read whole."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featstore.base.system import is_there, mapped_memory, refusal
from featstore.errors import CorruptionError, DeviceError, FeatstoreError, IncompleteStoreError
from featstore.units import PAGE_BYTES

_GENERATION = re.compile(r"g[0-9]{6,}")


def open_regular(path: Path, expected_bytes: int, flags: int = 0) -> int:
    """A read-only descriptor of a regular file of exactly this size.

    Raises CorruptionError where the file is missing, is not a regular file (a link included) or has another
    size, and DeviceError where the system refuses.
    """
    try:
        if stat.S_ISFIFO(os.lstat(path).st_mode):  # opening a pipe would wait for a writer
            raise CorruptionError(
                path, None, f"a file of {expected_bytes:,} bytes", "something that is not a regular file"
            )
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags)
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(path, expected_bytes) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CorruptionError(path, None, "a regular file", "a symbolic link") from None
        raise refusal(error, path, "open") from error
    try:
        status = os.fstat(descriptor)
    except OSError as error:
        os.close(descriptor)
        raise refusal(error, path, "look at") from error
    if not stat.S_ISREG(status.st_mode) or status.st_size != expected_bytes:
        os.close(descriptor)
        found = (
            f"{status.st_size:,} bytes"
            if stat.S_ISREG(status.st_mode)
            else "something that is not a regular file"
        )
        raise CorruptionError(path, None, f"a file of {expected_bytes:,} bytes", found)
    return descriptor


def _missing(path: Path, expected_bytes: int) -> FeatstoreError:
    """The error for a file that is not there: it alone, or the whole store."""
    for folder in path.parents:
        if _GENERATION.fullmatch(folder.name) and not is_there(folder):
            return IncompleteStoreError(
                f"{folder} is gone with all its files: the store at {folder.parent} was moved or "
                "removed, or packed anew, since it was opened; open it again, where it is now"
            )
    return CorruptionError(path, None, f"a file of {expected_bytes:,} bytes", "no file")


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


def read_fully(descriptor: int, out: NDArray[np.uint8], offset: int, path: Path) -> int:
    """Fill ``out`` from a file; returns the bytes read, fewer only at its end. Raises DeviceError."""
    done = 0
    while done < len(out):
        try:
            got = os.preadv(descriptor, [out[done:]], offset + done)  # type: ignore[list-item]
        except OSError as error:
            raise refusal(error, path, "read", offset + done) from error
        if got == 0:
            break
        done += got
    return done
