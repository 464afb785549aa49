"""Locks: files that say, as long as somebody holds an ``flock`` on them, that what they stand for is in use.

A lock file holds a number of a process, for messages; nothing else is ever taken for one. It is opened
without following a link, and after the lock is got, the path is looked at again: a holder that ends may have
removed the file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from pathlib import Path

from featstore.base.folders import a_link, folder, mode_of
from featstore.base.system import NO_SPACE, asking, is_there, refusal
from featstore.errors import CorruptionError, DeviceError, FormatError, StoreLockedError

_CONTENT = re.compile(rb"(featstore )?([0-9]*)[0-9\n]*")
_MARK = b"featstore "
_TRIES = 100


class Lock:
    """An exclusive lock on a file, held from the beginning on until :meth:`release`, or the end of the
    process.

    ``path``: of the file, absolute, resolved. ``what``: what one who finds it held is told. ``advice``: what
    to do then. ``make``: make the file where there is none. ``look``: make none, and write nothing into the
    one there is. ``marked``: the file names featstore in its content, not a process alone; a fresh one does
    from :meth:`mark` on.

    ``fresh``: whether there was no such file before, or an empty one.

    Raises StoreLockedError where another holds it, FormatError where the file is none of featstore's locks,
    FileNotFoundError without ``make`` and with ``look``, DeviceError.
    """

    def __init__(
        self,
        path: Path,
        what: str,
        advice: str,
        *,
        make: bool = True,
        look: bool = False,
        marked: bool = False,
    ) -> None:
        self.path = path
        self._descriptor, self._look = -1, look
        for _ in range(_TRIES):
            if self._take(what, advice, make and not look, marked):
                return
        raise StoreLockedError(f"{what}: {path} changes hands all the time; {advice}")

    def _take(self, what: str, advice: str, make: bool, marked: bool) -> bool:
        try:
            with folder(self.path.parent) as above:
                descriptor = self._open(above, make)
                try:
                    self._lock(descriptor, what, advice)
                    try:
                        there = os.stat(self.path.name, dir_fd=above, follow_symlinks=False)
                    except FileNotFoundError:
                        there = None
                    if there is None or not os.path.samestat(there, os.fstat(descriptor)):
                        return False
                    self._claim(descriptor, marked)
                    self._descriptor, descriptor = descriptor, -1
                    return True
                finally:
                    if descriptor >= 0:
                        os.close(descriptor)
        except FileNotFoundError:
            if not make:
                raise
            raise DeviceError(errno.ENOENT, self.path, None, "lock") from None
        except OSError as error:
            raise refusal(error, self.path, "lock") from error

    def _open(self, above: int, make: bool) -> int:
        mode = mode_of(self.path.name, above)
        if mode is not None and stat.S_ISLNK(mode):
            raise a_link(self.path)
        if mode is not None and not stat.S_ISREG(mode):
            raise self._foreign("no regular file")
        flags = (os.O_RDONLY if self._look else os.O_RDWR) | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        flags |= os.O_CREAT if make else 0
        descriptor = os.open(self.path.name, flags, 0o644, dir_fd=above)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise self._foreign("no regular file")
        return descriptor

    def _lock(self, descriptor: int, what: str, advice: str) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _CONTENT.fullmatch(os.pread(descriptor, 64, 0))
            number = holder.group(2).decode() if holder and holder.group(2) else "unknown"
            process = f"process {number}" + (" (this one)" if number == str(os.getpid()) else "")
            raise StoreLockedError(f"{what} by {process}; {advice}") from None

    def _claim(self, descriptor: int, marked: bool) -> None:
        content = os.pread(descriptor, 64, 0)
        if not _CONTENT.fullmatch(content) or (marked and content and not content.startswith(_MARK)):
            raise self._foreign("not what featstore writes there")
        self.fresh = not content
        if not (self._look or (marked and self.fresh)):
            try:
                _write(descriptor, _MARK if marked else b"")
            except OSError as error:
                # the number is for messages; one may want to make room on a full disk
                if error.errno not in NO_SPACE:
                    raise

    def mark(self, *, durably: bool = False) -> None:
        """Write into a marked lock that is fresh what tells it from a foreign file: from here on, it counts,
        after a crash only where that is done ``durably``."""
        try:
            _write(self._descriptor, _MARK)
            if durably:
                os.fsync(self._descriptor)
                with folder(self.path.parent, listed=True) as above:
                    os.fsync(above)
        except OSError as error:
            raise refusal(error, self.path, "write") from error

    def _foreign(self, why: str) -> FormatError:
        return FormatError(
            f"{self.path} is no lock of featstore's ({why}) and is left alone: move it away, or give "
            "another place"
        )

    def release(self, *, remove: bool = False) -> None:
        """Let go, with ``remove`` of the file, too. May be called more than once."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        try:
            if remove:
                with folder(self.path.parent) as above:
                    os.unlink(self.path.name, dir_fd=above)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise refusal(error, self.path, "remove") from error
        finally:
            try:
                with asking(self.path, "unlock"):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may hold the same descriptor
            finally:
                os.close(descriptor)

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", -1)
        if descriptor >= 0:
            self._descriptor = -1
            os.close(descriptor)


def _write(descriptor: int, mark: bytes) -> None:
    content = mark + f"{os.getpid()}\n".encode()
    os.pwrite(descriptor, content, 0)
    os.ftruncate(descriptor, len(content))


def is_lock(path: Path) -> bool:
    """Whether there is a lock file of featstore's, held or not."""
    try:
        with folder(path.parent) as above:
            mode = mode_of(path.name, above)
            if mode is None or not stat.S_ISREG(mode):
                return False
            descriptor = os.open(
                path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=above
            )
            try:
                return bool(_CONTENT.fullmatch(os.pread(descriptor, 64, 0)))
            finally:
                os.close(descriptor)
    except OSError as error:
        raise refusal(error, path, "look at") from error


def held_with_others(directory: Path) -> int | None:
    """A descriptor that holds a directory (no link to one) against collecting, beside others that hold it so;
    None where it is gone, or goes meanwhile. Raises CorruptionError where it is none, DeviceError."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(directory, flags)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise CorruptionError(directory, None, "the generation's directory", "something else") from None
    except OSError as error:
        raise refusal(error, directory, "open") from error
    try:
        with asking(directory, "hold"):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if is_held(descriptor, directory):
                return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def is_held(descriptor: int, directory: Path) -> bool:
    """Whether a directory is the one that a descriptor holds. Raises DeviceError."""
    with asking(directory, "look at"):
        return is_there(directory) and os.path.samestat(os.fstat(descriptor), os.stat(directory))


def held_alone(path: Path, *, directory: bool = False) -> int | None:
    """A descriptor that holds a file or directory alone, reached through no link; None where another process
    holds it, or it is gone. Raises FormatError for a link on the way, DeviceError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_DIRECTORY if directory else 0)
    with asking(path, "hold"):
        try:
            with folder(path.parent) as above:
                descriptor = os.open(path.name, flags, dir_fd=above)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return None
            raise
        return descriptor
