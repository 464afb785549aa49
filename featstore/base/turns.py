"""Processes that take turns at compiling a kernel.

Ranks, workers of a data loader and hosts begin together, and each would compile what the others compile, on
the same cores. Locks of ranges of a file are the process's own: no child inherits them, and they are gone
with it. A turn saves work and no more: where the folder knows no locks, or whoever has the turn takes too
long, the process compiles the kernel itself.

Who compiles a kernel waits for the turn of one that it calls, never the other way round, so that no two
processes wait for each other; those of names that share a place might, and give up in time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
import zlib

FILE = "featstore-compiling.lock"
TURN_SECONDS = 60.0
_POLL_SECONDS = 0.01

#: Open file of each folder. None is closed: that would end the process's turns there.
_files: dict[str, int] = {}


def _place(name: str) -> int:
    return zlib.crc32(name.encode()) >> 1


def _file(folder: str) -> int:
    if folder not in _files:
        os.makedirs(folder, exist_ok=True)
        _files[folder] = os.open(os.path.join(folder, FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    return _files[folder]


def take_turn(folder: str, name: str) -> bool:
    """Wait until no other process has the turn of ``name``, and take it; whether there was one to wait for.

    Raises OSError where there are no locks. Interrupts end it without the turn."""
    file, place, waited = _file(folder), _place(name), False
    end = time.monotonic() + TURN_SECONDS
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            return waited
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
        if time.monotonic() > end:
            return waited
        waited = True
        time.sleep(_POLL_SECONDS)


def end_turn(folder: str, name: str) -> None:
    """Give the turn of ``name`` on, if this process has it."""
    if folder in _files:
        fcntl.lockf(_files[folder], fcntl.LOCK_UN, 1, _place(name))
