"""np.memmap on equal terms: bounded by a memory cgroup to the memory that the other ways have, of a file that
the page cache does not hold at the begin, and without reading ahead."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["advise_random", "forget", "join", "memory_group"]

_ROOT = Path("/sys/fs/cgroup")


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[tuple[Path | None, str]]:
    """A memory cgroup for processes to :func:`join`: its directory; or None, and why there is none. What a
    process takes after it has joined counts, the page cache of what it reads included. It goes at the end,
    when no process may be in it."""
    v1 = (_ROOT / "memory" / "memory.limit_in_bytes").exists()
    parent, limit = (_ROOT / "memory", "memory.limit_in_bytes") if v1 else (_ROOT, "memory.max")
    directory = parent / f"featstore-demo-{os.getpid()}"
    try:
        directory.mkdir()
    except OSError as error:
        yield None, f"no memory cgroup can be made in {parent} ({error.strerror}); root often can"
        return
    try:
        try:
            (directory / limit).write_text(str(limit_bytes))
            why = ""
        except OSError as error:
            why = f"no limit can be set in {directory} ({error.strerror}): is there a memory controller?"
        yield (None if why else directory), why
    finally:
        directory.rmdir()


def join(group: Path) -> None:
    """Move this process into a memory cgroup; what it holds by now stays on the account of the one before."""
    (group / "cgroup.procs").write_text(str(os.getpid()))


def forget(path: Path) -> None:
    """Have the page cache drop a file, as far as the kernel does."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def advise_random(rows: Any) -> None:
    """Tell the kernel that a memory-mapped array is read here and there: else it reads far ahead at each
    row."""
    base = rows
    while not isinstance(base, mmap.mmap):
        base = base.obj if isinstance(base, memoryview) else base.base
    base.madvise(mmap.MADV_RANDOM)
