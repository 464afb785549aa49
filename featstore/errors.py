"""The whole error tree.

Every error that featstore raises on purpose derives from :class:`FeatstoreError`, says *what* is wrong, *where*
(path, offset, table, id) and *what to do*. Where Python has a fitting built-in (``IndexError`` for an id out of range,
``OSError`` for a device), the class derives from it as well, so that generic handlers keep working.
"""

from __future__ import annotations

import errno as _errno
import os

__all__ = [
    "BudgetError",
    "CancelledError",
    "ClosedError",
    "CorruptionError",
    "DeviceError",
    "DiskFullError",
    "FeatstoreError",
    "FormatError",
    "FormatVersionError",
    "IdError",
    "IncompleteStoreError",
    "SourceError",
    "StaleError",
    "StoreExistsError",
    "StoreLockedError",
]


class FeatstoreError(Exception):
    """Base of all errors that featstore raises on purpose."""


class SourceError(FeatstoreError, ValueError):
    """Input to a pack (features, graph, order, arrays) cannot be used as it is."""


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


class CancelledError(FeatstoreError):
    """The result of a cancelled request was asked for."""


class CorruptionError(FeatstoreError):
    """Stored bytes are not what was written: a checksum, a size or a digest does not match.

    Attributes: ``path``, ``offset`` (bytes from the file's start, or None for a whole file), ``expected``, ``actual``.
    """

    def __init__(
        self, path: str | os.PathLike[str], offset: int | None, expected: object, actual: object, advice: str = ""
    ) -> None:
        self.path = os.fspath(path)
        self.offset = offset
        self.expected = expected
        self.actual = actual
        where = self.path if offset is None else f"{self.path} at byte {offset}"
        advice = advice or "restore the file from a copy or pack again; `featstore verify` lists every bad page"
        super().__init__(f"corrupt data in {where}: expected {expected}, found {actual}; {advice}")
        self._args = (os.fspath(path), offset, expected, actual, advice)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._args


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
        advice = "check the device (dmesg, SMART) and permissions"
        if errno in (_errno.EMFILE, _errno.ENFILE):
            advice = "raise the limit of open files (ulimit -n): a reader holds every chunk file of its tables open"
        elif errno == _errno.EAGAIN:
            advice = "the system is out of threads or memory; try again, or raise its limits"
        message = f"cannot {doing} {where}: {os.strerror(errno)} ({name}); {advice}"
        OSError.__init__(self, errno, message)
        self.filename = self.path

    def __str__(self) -> str:
        return str(self.strerror)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.errno, self.path, self.offset, self.doing)


class DiskFullError(FeatstoreError, OSError):
    """The disk has, or came to have, too little room. Attributes: ``path``, ``needed_bytes``, ``available_bytes``."""

    def __init__(self, path: str | os.PathLike[str], needed_bytes: int, available_bytes: int) -> None:
        self.path = os.fspath(path)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        message = (
            f"not enough disk space under {self.path}: {needed_bytes:,} bytes needed, {available_bytes:,} available; "
            "free some space or pack to another disk"
        )
        OSError.__init__(self, _errno.ENOSPC, message)

    def __str__(self) -> str:
        return str(self.strerror)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self.needed_bytes, self.available_bytes)


class BudgetError(FeatstoreError, ValueError):
    """A memory budget is too small. Attributes: ``needed_bytes`` (the smallest that works), ``given_bytes``, ``what``."""

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
