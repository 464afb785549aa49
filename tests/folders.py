"""Where tests write: those that are about files on a device on the disk of TMPDIR, all others in memory,
where there is room."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")
ROOM_BYTES = 12 << 30  # of memory that nobody uses; all tests together leave some 3 GiB
_PREFIX = "featstore-tests-"


def memory_folder() -> Path | None:
    """A new folder in memory, of this process; None where there is too little of it. What processes have
    left that were killed is removed."""
    if not os.access(MEMORY, os.W_OK) or not room():
        return None
    for left in MEMORY.glob(f"{_PREFIX}*"):
        process = left.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", process).exists():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=MEMORY))


def room() -> bool:
    free = os.statvfs(MEMORY)
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    return min(free.f_bavail * free.f_frsize, available) >= ROOM_BYTES


class TemporaryFolders:
    """As ``pytest.TempPathFactory``: folders in ``memory``, unless that is None, or ``on_disk`` says that
    what runs is about files on a device."""

    def __init__(
        self, disk: pytest.TempPathFactory, memory: Path | None, on_disk: Callable[[], bool]
    ) -> None:
        self._disk, self._memory, self._on_disk = disk, memory, on_disk
        self._made = 0

    def getbasetemp(self) -> Path:
        if self._memory is None or self._on_disk():
            return self._disk.getbasetemp()
        return self._memory

    def mktemp(self, basename: str, numbered: bool = True) -> Path:
        if self._memory is None or self._on_disk():
            return self._disk.mktemp(basename, numbered)
        self._made += numbered
        path = self._memory / (f"{basename}{self._made}" if numbered else basename)
        path.mkdir()
        return path
