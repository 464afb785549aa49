"""The engine's contract: take lanes, read their extents, verify, deliver, call back. Every engine passes the
same tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from featstore.engine.counters import COUNTERS
from featstore.engine.files import Access
from featstore.engine.lane import Lane
from featstore.errors import ArgumentError
from featstore.units import PAGE_BYTES


class Engine(ABC):
    """Performs planned reads. Belongs to one process; :meth:`start` may be called from any thread of it.

    ``queue_depth`` is the largest number of reads under way, ``staging_bytes`` the memory for pages on their
    way, of which a single read takes up to ``extent_bytes_max``. ``threads`` read, verify and deliver.
    """

    name: ClassVar[str]
    access: ClassVar[Access]

    def __init__(self, queue_depth: int, staging_bytes: int, extent_bytes_max: int, threads: int) -> None:
        self.queue_depth = queue_depth
        self.threads = threads
        self.staging_bytes = staging_bytes
        self.extent_bytes_max = extent_bytes_max

    def check(self, lane: Lane) -> None:
        """Raise ValueError for a lane whose extents the engine has no room for (a mistake in planning)."""
        if lane.extent_pages_max * PAGE_BYTES > self.extent_bytes_max:
            raise ArgumentError(
                f"an extent of {lane.extent_pages_max} pages does not fit {self.extent_bytes_max} "
                "bytes of staging"
            )

    @abstractmethod
    def start(self, lane: Lane) -> None:
        """Begin a lane; returns at once. ``lane.on_done(lane)`` is called from a thread of the engine when
        every read it started has ended, well or not; ``lane.error()`` then tells which."""

    @abstractmethod
    def counters(self) -> NDArray[np.int64]:
        """Sum of what has been counted so far, as in :mod:`featstore.engine.counters`."""

    @abstractmethod
    def close(self) -> None:
        """Finish the lanes that were started, then give everything back. May be called more than once."""


def new_counters(threads: int) -> NDArray[np.int64]:
    return np.zeros((threads, COUNTERS), np.int64)
