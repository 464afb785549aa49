"""The engine's contract: take lanes, read their extents, verify, deliver, call back. Every engine passes the same tests."""

from __future__ import annotations

import mmap
import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from featstore.engine.counters import COUNTERS
from featstore.engine.files import Access
from featstore.engine.lane import Lane
from featstore.units import PAGE_BYTES

#: The longest single read; bandwidth no longer grows beyond it.
EXTENT_BYTES_MAX = 512 * 1024


class Engine(ABC):
    """Performs planned reads. Belongs to one process; :meth:`start` may be called from any thread of it.

    ``queue_depth`` is the largest number of reads under way, ``staging_bytes`` the memory for pages on their way, of which a
    single read takes up to ``extent_bytes_max``.
    """

    name: ClassVar[str]
    access: ClassVar[Access]

    def __init__(self, queue_depth: int, staging_bytes: int, extent_bytes_max: int) -> None:
        self.queue_depth = queue_depth
        self.staging_bytes = staging_bytes
        self.extent_bytes_max = extent_bytes_max

    def check(self, lane: Lane) -> None:
        """Raise ValueError for a lane whose extents the engine has no room for (a mistake in planning)."""
        if lane.extent_pages_max * PAGE_BYTES > self.extent_bytes_max:
            raise ValueError(
                f"an extent of {lane.extent_pages_max} pages does not fit {self.extent_bytes_max} bytes of staging"
            )

    @abstractmethod
    def start(self, lane: Lane) -> None:
        """Begin a lane; returns at once. ``lane.on_done(lane)`` is called from a thread of the engine when every read it
        started has ended, well or not; ``lane.error()`` then tells which."""

    @abstractmethod
    def counters(self) -> NDArray[np.int64]:
        """Sum of what has been counted so far, as in :mod:`featstore.engine.counters`."""

    @abstractmethod
    def close(self) -> None:
        """Finish the lanes that were started, then give everything back. May be called more than once."""


def shut_down(pool: ThreadPoolExecutor) -> None:
    """End a pool's threads and wait for them, unless one of them is asking (the last reference may be dropped in any thread)."""
    pool.shutdown(wait=threading.current_thread() not in pool._threads)


def aligned_buffer(byte_count: int) -> NDArray[np.uint8]:
    """Writable zeroed memory that starts at a page, as direct I/O needs it; it counts in RSS once touched.

    In large pages, where the system has them: what is read or written directly is then one piece of memory to the device, not one for
    every 4 KiB, which by itself makes reads of some pages a tenth to a third faster. It goes back to the system with the last view of it,
    where an allocator would keep it.
    """
    memory = mmap.mmap(-1, max(byte_count, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # advice: a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, byte_count)


def new_counters(threads: int) -> NDArray[np.int64]:
    return np.zeros((threads, COUNTERS), np.int64)
