"""The whole error tree.

Every error that featstore raises on purpose derives from :class:`FeatstoreError`, says *what* is wrong,
*where* (path, offset, table, id) and *what to do*. Where Python has a fitting built-in (``IndexError`` for an
id out of range, ``OSError`` for a device), the class derives from it as well, so that generic handlers keep
working.
"""

from __future__ import annotations

import errno as _errno
import os

__all__ = [
    "ArgumentError",
    "BudgetError",
    "CancelledError",
    "ClosedError",
    "CorruptionError",
    "DeviceError",
    "DiskFullError",
    "EngineError",
    "FeatstoreError",
    "FeatstoreWarning",
    "FormatError",
    "FormatVersionError",
    "IdError",
    "IncompleteStoreError",
    "MissingPackageError",
    "NotInMemoryError",
    "PeerError",
    "SourceError",
    "StaleError",
    "StoreExistsError",
    "StoreLockedError",
    "UnknownNameError",
    "WaitTimeoutError",
]


class FeatstoreError(Exception):
    """Base of all errors that featstore raises on purpose."""


class FeatstoreWarning(UserWarning):
    """What featstore warns of: something is not as it may seem, and the message says what to do."""


class SourceError(FeatstoreError, ValueError):
    """What was given (features, a graph, an order, arrays, mini-batches, options) cannot be used as it is."""


class ArgumentError(SourceError, TypeError):
    """An argument of a public function is of another type, range, shape or size than it takes, or has another
    name. The message names the argument. A ValueError and a TypeError, whichever of the two is the matter."""


class UnknownNameError(ArgumentError, KeyError):
    """A store, reader or graph has nothing of that name."""

    def __str__(self) -> str:  # KeyError's own is the message's repr
        return str(self.args[0]) if self.args else ""


class MissingPackageError(FeatstoreError, ImportError):
    """A package is needed that is not installed; the message says which extra brings it."""


class EngineError(FeatstoreError, OSError):
    """The engine asked for cannot work here."""


class WaitTimeoutError(FeatstoreError, TimeoutError):
    """What was waited for did not come in time. It is still on its way."""


class IdError(FeatstoreError, IndexError):
    """A requested node id is out of range, or the ids are not integers."""


class FormatError(FeatstoreError):
    """Metadata of a store is malformed, contradicts itself, or must not be trusted."""


class FormatVersionError(FormatError):
    """The store needs a newer featstore (format version or reader feature flag)."""


class IncompleteStoreError(FeatstoreError):
    """The directory holds no committed store, only the remains of an unfinished pack, or nothing at all."""


class StaleError(FeatstoreError):
    """A compiled trace was made for another state of its base store."""


class StoreExistsError(FeatstoreError):
    """The target of a pack already holds a store and replacing it was not asked for."""


class StoreLockedError(FeatstoreError):
    """Another process is writing to the store."""


class ClosedError(FeatstoreError, ValueError):
    """A reader or store was used after it was closed."""


class NotInMemoryError(FeatstoreError, TypeError):
    """A table of a store was used as if it were an array in memory."""


class PeerError(FeatstoreError, ConnectionError):
    """Another host of a training run is gone, late, or has said what cannot be.

    Attributes: ``host`` (its number in the split store; of one that has not come, that of its machine in the
    run), ``rank`` (its rank in the run), ``what``.
    """

    def __init__(self, host: int, rank: int, what: str) -> None:
        self.host, self.rank, self.what = host, rank, what
        super().__init__(
            f"host {host} (rank {rank}) {what}; its rows cannot be had any more: start all ranks again, "
            "from the last state that was saved"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.host, self.rank, self.what)


class CancelledError(FeatstoreError):
    """The result of a cancelled request was asked for."""


class CorruptionError(FeatstoreError):
    """Stored bytes are not what was written: a checksum, a size or a digest does not match.

    Attributes: ``path``, ``offset`` (bytes from the file's start, or None for a whole file), ``expected``,
    ``actual``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        offset: int | None,
        expected: object,
        actual: object,
        advice: str = "",
    ) -> None:
        self.path = os.fspath(path)
        self.offset = offset
        self.expected = expected
        self.actual = actual
        where = self.path if offset is None else f"{self.path} at byte {offset}"
        advice = (
            advice or "restore the file from a copy or pack again; `featstore verify` lists every bad page"
        )
        super().__init__(f"corrupt data in {where}: expected {expected}, found {actual}; {advice}")
        self._args = (os.fspath(path), offset, expected, actual, advice)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._args


_FILES = "raise the limit of open files (ulimit -n): a reader holds every chunk file of its tables open"
_PATH = "check the path"
#: What to do about what the system says.
_ADVICE = {
    _errno.EMFILE: _FILES,
    _errno.ENFILE: _FILES,
    _errno.EAGAIN: "the system is out of threads or memory; try again, or raise its limits (ulimit -u)",
    _errno.ENOMEM: (
        "the system has no memory left for this process: give a smaller memory=, or raise the "
        "limit (ulimit -v, the container's)"
    ),
    _errno.EACCES: "check the permissions, also of the directories above",
    _errno.EPERM: "check the permissions, also of the directories above",
    _errno.EROFS: "the file system is mounted read-only: give a path on another one, or mount it for writing",
    _errno.ENOENT: _PATH,
    _errno.ENOTDIR: _PATH,
    _errno.EISDIR: _PATH,
    _errno.ELOOP: _PATH + ": symbolic links go round in circles, or stand where none may",
    _errno.ENAMETOOLONG: _PATH + ": a name in it is too long",
}


class DeviceError(FeatstoreError, OSError):
    """The operating system could not perform a read or write.

    Attributes: ``errno``, ``path`` (also ``filename``), ``offset`` (bytes from the file's start, or None).
    """

    def __init__(
        self, errno: int, path: str | os.PathLike[str], offset: int | None = None, doing: str = "read"
    ) -> None:
        self.path = os.fspath(path)
        self.offset = offset
        self.doing = doing
        name = _errno.errorcode.get(errno, str(errno))
        where = self.path if offset is None else f"{self.path} at byte {offset}"
        advice = _ADVICE.get(errno, "check the device (dmesg, SMART) and permissions")
        message = f"cannot {doing} {where}: {os.strerror(errno)} ({name}); {advice}"
        OSError.__init__(self, errno, message)
        self.filename = self.path

    def __str__(self) -> str:
        return str(self.strerror)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.errno, self.path, self.offset, self.doing)


class DiskFullError(FeatstoreError, OSError):
    """The disk has, or came to have, too little room, or a quota or limit allows no more.

    Attributes: ``path``, ``needed_bytes`` (0: not known), ``available_bytes``, ``errno``, ``filename``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        needed_bytes: int,
        available_bytes: int,
        errno: int = _errno.ENOSPC,
    ) -> None:
        self.path = os.fspath(path)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        needed = f"{needed_bytes:,} bytes needed, " if needed_bytes else ""
        why, advice = "not enough disk space", "free some space or pack to another disk"
        if errno == _errno.EDQUOT:
            why, advice = (
                "the disk quota is used up",
                "free some space, have the quota raised, or use another disk",
            )
        elif errno == _errno.EFBIG:
            why, advice = (
                "a file would become larger than it may",
                "raise the limit of file sizes (ulimit -f)",
            )
        message = f"{why} under {self.path}: {needed}{available_bytes:,} available; {advice}"
        OSError.__init__(self, errno, message)
        self.filename = self.path

    def __str__(self) -> str:
        return str(self.strerror)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self.needed_bytes, self.available_bytes, self.errno)


#: Ends what is said of a budget that is that of an open store, whoever's mini-batches met it.
OF_STORE = "(memory= of open_split)"


class BudgetError(FeatstoreError, ValueError):
    """A memory budget is too small. Attributes: ``needed_bytes`` (the smallest that works), ``given_bytes``,
    ``what``."""

    def __init__(self, needed_bytes: int, given_bytes: int, what: str) -> None:
        self.needed_bytes = needed_bytes
        self.given_bytes = given_bytes
        self.what = what
        super().__init__(
            f"a memory budget of {given_bytes:,} bytes is too small to {what}: "
            f"the smallest that works is {needed_bytes:,} bytes"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.needed_bytes, self.given_bytes, self.what)
