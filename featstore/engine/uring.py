"""The io_uring engine: one ring, one thread, direct I/O, and a queue that never drains while there is work.

The kernel :func:`featstore.engine.ring_loop.drive` holds the whole loop: take the next extent of the oldest
lane that has one, find room for it in the staging arena, queue the read; wait for completions; look at every
result; verify, deliver, free the room; go on. There is no barrier between batches, and since up to
``LANES_MAX`` lanes are open at once there is none between requests either. It returns to Python only when a
lane has ended, when a new one waits and the open ones have nothing left to start, or when the ring itself
fails.

liburing's functions come from :mod:`featstore.engine.liburing`.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import aligned_buffer
from featstore.base.native import (
    address_of,
)
from featstore.base.system import refusal, started
from featstore.engine import lane as L
from featstore.engine.base import Engine, new_counters
from featstore.engine.deliver import CLOCK_GETTIME
from featstore.engine.files import Access
from featstore.engine.lane import Lane
from featstore.engine.liburing import (
    library,
)
from featstore.engine.ring_loop import LANES_MAX, drive
from featstore.errors import ClosedError, DeviceError
from featstore.units import PAGE_BYTES


class UringEngine(Engine):
    """Reads through io_uring; see the module's text. Raises OSError where the ring cannot be opened."""

    name = "uring"
    access: ClassVar[Access] = "direct"

    def __init__(self, queue_depth: int, staging_bytes: int, extent_bytes_max: int) -> None:
        super().__init__(queue_depth, staging_bytes, extent_bytes_max)
        self._library = library()
        self._arena = aligned_buffer(staging_bytes)
        self._counters = new_counters(1)
        self._queue: deque[Lane] = deque()
        self._waiting = np.zeros(1, np.int64)
        self._condition = threading.Condition()
        self._closing = False
        self._failure: OSError | None = None
        opened = threading.Event()
        self._thread = started(
            threading.Thread(target=self._run, args=(opened,), name="featstore-uring", daemon=True)
        )
        opened.wait()
        if self._failure is not None:
            raise refusal(self._failure, "io_uring", "set up a ring (io_uring_setup) of") from self._failure

    def start(self, lane: Lane) -> None:
        self.check(lane)
        with self._condition:
            if self._closing:
                raise ClosedError("the engine is closed")
            self._queue.append(lane)
            self._waiting[0] = len(self._queue)
            self._condition.notify()

    def _run(self, opened: threading.Event) -> None:
        active: list[Lane] = []
        try:
            self._loop(opened, active)
        except BaseException as error:  # whoever waits, for the ring or for rows, must hear of it
            self._failure = self._failure or (
                error
                if isinstance(error, OSError)
                else OSError(errno.EIO, f"the reading thread ended: {error!r}")
            )
            with self._condition:
                self._closing = True
                active += self._queue
                self._queue.clear()
            self._fail(active)
        finally:
            opened.set()

    def _loop(self, opened: threading.Event, active: list[Lane]) -> None:
        ring = self._library.open_ring(max(8, self.queue_depth))
        opened.set()
        state = np.zeros(8, np.int64)
        slots = np.zeros((4 * self.queue_depth, 6), np.int64)
        completions = np.zeros(self.queue_depth, np.int64)
        scratch = np.zeros(2, np.int64)
        while True:
            with self._condition:
                while not self._queue and not active and not self._closing:
                    self._condition.wait()
                while self._queue and len(active) < LANES_MAX:
                    active.append(self._queue.popleft())
                self._waiting[0] = len(self._queue)
            if not active:
                break
            if self._failure is not None:
                self._fail(active)
                continue
            lanes = np.array([lane.address for lane in active], np.int64)
            r = drive(
                self._library.functions,
                address_of(ring),
                self.queue_depth,
                lanes,
                address_of(self._waiting),
                state,
                slots,
                address_of(self._arena),
                self.staging_bytes // PAGE_BYTES,
                completions,
                CLOCK_GETTIME,
                address_of(scratch),
                self._counters[0],
            )
            if r < 0:
                self._failure = OSError(-r, f"io_uring_enter: {os.strerror(-r)}")
                self._fail(active)
            _hand_over(active)
        self._library.close_ring(ring)

    def _fail(self, active: list[Lane]) -> None:
        """The ring itself is broken: what is under way and all that comes after it fails with the reason.

        The kernel must not run again: it would look at lanes that are gone. Reads still under way end in the
        arena.
        """
        assert self._failure is not None
        for lane in active:
            lane.failure = DeviceError(
                self._failure.errno or 5, lane.files.paths[0], None, "read through io_uring"
            )
            lane.on_done(lane)
        active.clear()

    def counters(self) -> NDArray[np.int64]:
        total: NDArray[np.int64] = self._counters.sum(axis=0)
        return total

    def close(self) -> None:
        with self._condition:
            self._closing = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _lane_ended(lane: Lane) -> bool:
    f = lane.fields
    if f[L.DONE] < f[L.NEXT]:
        return False
    return bool(f[L.NEXT] >= f[L.EXTENTS] or f[L.CANCEL] or f[L.ERROR_CLAIM])


def _hand_over(active: list[Lane]) -> None:
    """Call back for the lanes that have ended, and forget them: a waiting thread must not keep a caller's
    rows alive."""
    for lane in [lane for lane in active if _lane_ended(lane)]:
        active.remove(lane)
        lane.on_done(lane)
