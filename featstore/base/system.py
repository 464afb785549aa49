"""What the operating system refuses, as errors that say what, where and what to do.

One rule for the whole package: an ``OSError`` of a call that featstore makes on its own behalf leaves as
DiskFullError or DeviceError with the path in question. Where a call is made, it is made :func:`asking`;
threads are started by :func:`started`, and large memory comes by :func:`mapped_memory`. What the user's own
code raises is not touched, nor are MemoryError and KeyboardInterrupt.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from featstore.errors import DeviceError, DiskFullError, FeatstoreError

Result = TypeVar("Result")

_FILES_AT_ONCE = 64  # fewer than that there is room for, mostly
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def refusal(
    error: OSError, path: str | os.PathLike[str], doing: str, offset: int | None = None, needed_bytes: int = 0
) -> FeatstoreError:
    """The error to raise for one of the system: ``doing`` and ``path`` say what was asked for. One of ours
    stays as it is."""
    if isinstance(error, FeatstoreError):
        return error
    if error.errno in NO_SPACE:
        return DiskFullError(path, needed_bytes, free_bytes(Path(path).parent), error.errno)
    return DeviceError(error.errno or errno.EIO, path, offset, doing)


@contextmanager
def asking(path: str | os.PathLike[str], doing: str, offset: int | None = None) -> Iterator[None]:
    """What is inside asks the system for something: raises DiskFullError, DeviceError where it is refused."""
    try:
        yield
    except FeatstoreError:
        raise
    except OSError as error:
        raise refusal(error, path, doing, offset) from error


def free_bytes(directory: Path) -> int:
    """Bytes that may still be written under a directory; 0 where nobody can tell."""
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return 0


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def status_of(path: Path) -> os.stat_result | None:
    """What is at a path, or where a link leads to; None where nothing is. Raises DeviceError where the device
    cannot tell."""
    with asking(path, "look at"):
        try:
            return os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None


def is_there(path: Path) -> bool:
    """Whether there is anything at a path. Raises DeviceError where the device cannot tell."""
    return status_of(path) is not None


def is_directory(path: Path) -> bool:
    """Whether there is a directory at a path. Raises DeviceError where the device cannot tell."""
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def is_regular(path: Path) -> bool:
    """Whether there is a regular file at a path. Raises DeviceError where the device cannot tell."""
    status = status_of(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def room_for_files(count: int) -> None:
    """So many more files will be opened soon: the limit of open files that goes for now (``ulimit -n``, often
    1024) is raised within the one that goes for good."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or count < _FILES_AT_ONCE:
        return
    with suppress(OSError, ValueError):  # then it is as it was, and opening says what is lacking
        wanted = len(os.listdir("/proc/self/fd")) + 2 * count + _FILES_AT_ONCE
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if most > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def started(thread: threading.Thread) -> threading.Thread:
    """Start a thread. Raises DeviceError where there can be no more of them."""
    try:
        thread.start()
    except RuntimeError as error:
        raise no_thread(error) from error
    return thread


def no_thread(error: BaseException) -> DeviceError:
    """The error where the system has no room for another thread."""
    return DeviceError(errno.EAGAIN, "the limits of this process", None, f"start a thread ({error}) within")


def submitted(pool: ThreadPoolExecutor, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
    """Have a pool do some work. Raises DeviceError where it needs another thread, and there can be no more of
    them."""
    try:
        return pool.submit(work, *arguments)
    except RuntimeError as error:
        if "new thread" not in str(error):
            raise  # the pool is closed: a mistake of ours
        raise no_thread(error) from error


class Turn:
    """Who goes on with something: whoever takes it first. Asked again it says the same, so that nothing is
    lost to an interrupt between the answer and what follows from it."""

    def __init__(self) -> None:
        self._taken: dict[int, str] = {}

    def is_of(self, who: str) -> bool:
        """Take it, unless another has."""
        return self._taken.setdefault(0, who) == who


POOL, CALLER = "pool", "caller"  # who takes turns


def handed(
    pool: ThreadPoolExecutor, work: Callable[[], object], refused: Callable[[BaseException], object],
    turn: Turn,
) -> None:  # fmt: skip
    """Have a pool do some work, or say why it does not, and never will: to ``refused``, which may be called
    more than once. Raises interrupts, after that. ``turn``: where the CALLER has taken it, nobody does the
    work."""

    def step() -> None:
        if turn.is_of(POOL):
            work()

    try:
        submitted(pool, step)
    except BaseException as error:
        if turn.is_of(CALLER):  # else a thread does it
            refused(error)
        if not isinstance(error, Exception):
            raise


def mapped_memory(byte_count: int) -> mmap.mmap:
    """Anonymous memory of this process. Raises DeviceError where there is none left."""
    with asking(f"{byte_count:,} bytes of memory", "map"):
        return mmap.mmap(-1, max(byte_count, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
