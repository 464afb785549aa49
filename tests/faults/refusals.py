"""The system refuses its N-th call: a stand-in for what a failing device, a full disk or a limit does to a
program.

Every function by which Python asks the system for something is replaced by one that counts the calls that
concern a directory (by path, or by a descriptor or file that was opened in it), and fails one of them.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from plain_writes import write_plainly

#: By path, or by the descriptor in the first place.
FUNCTIONS = (
    "open", "stat", "lstat", "fstat", "listdir", "scandir", "mkdir", "rmdir", "unlink", "remove", "rename",
    "replace", "readlink", "preadv", "pread", "pwrite", "pwritev", "read", "write", "fsync", "fdatasync",
    "ftruncate", "posix_fadvise", "statvfs", "access",
)  # fmt: skip
_WRITES = {"mkdir", "rename", "replace", "pwrite", "pwritev", "write", "fsync", "ftruncate"}


class Refusals:
    """``at``: the number of the call that fails, from 0, or -1; ``number``: the errno; ``for_good``: all
    after it that write fail, too."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self.restart(-1)

    def restart(
        self, at: int, number: int = errno.EIO, *, for_good: bool = False, writes: bool = False
    ) -> None:
        self.at, self.number, self.for_good, self.writes = at, number, for_good, writes
        self.count = 0
        self.failed = ""

    def concerns(self, what: Any) -> bool:
        if isinstance(what, int):
            try:
                what = os_readlink(f"/proc/self/fd/{what}")
            except OSError:
                return False
        try:
            path = os.fspath(what)
        except TypeError:
            return False
        return os.fsdecode(path).startswith(self._root)

    def look(self, name: str, what: Any) -> None:
        if self.at < 0 and not self.failed:
            return
        if (self.writes and name not in _WRITES) or not self.concerns(what):
            return
        n, self.count = self.count, self.count + 1
        if n == self.at or (self.for_good and n > self.at):
            self.failed = self.failed or f"{name} {what}"
            raise OSError(self.number, os.strerror(self.number), what if isinstance(what, str) else None)


os_readlink = os.readlink


@contextmanager
def refusing(root: Path) -> Iterator[Refusals]:
    """Refusals of calls that concern what is below a directory."""
    made = Refusals(root)
    with pytest.MonkeyPatch.context() as patch:

        def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(what: Any = ".", *arguments: Any, **options: Any) -> Any:
                made.look(name, what)
                return real(what, *arguments, **options)

            return call

        write_plainly(patch)
        for name in FUNCTIONS:
            patch.setattr(os, name, wrapped(name, getattr(os, name)))
        opened = wrapped("open", io.open)
        patch.setattr(builtins, "open", opened)
        patch.setattr(io, "open", opened)
        patch.setattr(shutil, "disk_usage", wrapped("disk_usage", shutil.disk_usage))
        patch.setattr(fcntl, "flock", wrapped("flock", fcntl.flock))
        real_mmap = mmap.mmap

        class Mapping(real_mmap):  # type: ignore[valid-type, misc]
            def __new__(cls, descriptor: int, *arguments: Any, **options: Any) -> Any:
                made.look("mmap", descriptor)
                return real_mmap.__new__(cls, descriptor, *arguments, **options)

        patch.setattr(mmap, "mmap", Mapping)
        yield made
