"""The io_uring engine: rings with a thread each, direct I/O, and queues that never drain while there is work.

The kernel :func:`featstore.engine.ring_loop.drive` holds a ring's whole loop: take the next extent of the
oldest lane that has one, find room for it in the staging arena, queue the read; wait for completions; look at
every result; verify, deliver, free the room; go on. There is no barrier between batches, and since up to
``LANES_MAX`` lanes are open at once there is none between requests either. It returns to Python only when
nothing is left to do for a lane, when a new one waits and the open ones have nothing left to start, or when
the ring itself fails.

One ring in one thread keeps up with a few hundred thousand reads a second. For devices that do more there may
be several, each with its part of the queue depth and of the arena; pages are verified and delivered by the
thread whose ring they arrived in. A lane of many extents is opened by several rings, a small one by whichever
comes first. It is done when the last of those that opened it has left.

liburing's functions come from :mod:`featstore.engine.liburing`.
"""

from __future__ import annotations

import errno
import os
import threading
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
from featstore.engine.ring_loop import (
    CHUNK,
    CLAIM_END,
    CLAIMED,
    IN_FLIGHT,
    LANE,
    LANES_MAX,
    OPEN_FIELDS,
    drive,
)
from featstore.errors import ClosedError, DeviceError
from featstore.units import PAGE_BYTES

RING_EXTENTS_MIN = 32  # a lane has a further ring for so many extents more
_CHUNK_MAX = 16  # extents that a ring claims at once of a lane that it shares
_RING_DEPTH_MIN = 8


class _Shared:
    """A lane that rings have opened, or may: ``rings`` of them at most."""

    def __init__(self, lane: Lane, rings: int) -> None:
        self.lane, self.rings = lane, rings
        self.opened = 0  # by so many so far
        self.inside = 0  # have opened it and not left
        self.chunk = lane.extents if rings == 1 else max(1, min(_CHUNK_MAX, lane.extents // (4 * rings)))

    @property
    def wants_more(self) -> bool:
        """Whether another ring would find something to do."""
        return self.opened < self.rings and not self.taken and not self.stopped

    @property
    def taken(self) -> bool:
        """All of its extents are."""
        return bool(self.lane.fields[L.NEXT] >= self.lane.fields[L.EXTENTS])

    @property
    def stopped(self) -> bool:
        f = self.lane.fields
        return bool(f[L.CANCEL] or f[L.ERROR_CLAIM])


class _Ring:
    """What belongs to one ring: its thread's memory, and the lanes that it has open."""

    def __init__(self, number: int, depth: int, arena: NDArray[np.uint8]) -> None:
        self.number, self.depth, self.arena = number, depth, arena
        self.open: list[_Shared] = []
        self.lanes = np.zeros((0, OPEN_FIELDS), np.int64)
        self.waiting = np.zeros(8, np.int64)  # a cache line; the first: lanes that this ring could open
        self.state = np.zeros(8, np.int64)
        self.slots = np.zeros((4 * depth, 6), np.int64)
        self.completions = np.zeros(depth, np.int64)
        self.scratch = np.zeros(8, np.int64)

    def enter(self, shared: _Shared) -> None:
        shared.opened += 1
        shared.inside += 1
        self.open.append(shared)
        row = np.zeros((1, OPEN_FIELDS), np.int64)
        row[0, LANE], row[0, CHUNK] = shared.lane.address, shared.chunk
        self.lanes = np.concatenate([self.lanes, row])

    def nothing_left(self) -> list[bool]:
        """Of each open lane, whether there is nothing to do for it here any more."""
        return [
            not row[IN_FLIGHT] and (one.stopped or (row[CLAIMED] >= row[CLAIM_END] and one.taken))
            for one, row in zip(self.open, self.lanes, strict=True)
        ]

    def leave(self, gone: list[bool]) -> list[_Shared]:
        """Take out those of the open lanes that are marked."""
        left = [one for one, away in zip(self.open, gone, strict=True) if away]
        self.open = [one for one, away in zip(self.open, gone, strict=True) if not away]
        self.lanes = np.ascontiguousarray(self.lanes[~np.array(gone, bool)])
        return left


class UringEngine(Engine):
    """Reads through io_uring; see the module's text. ``threads``: as many rings at most, one by default, and
    no more than there is depth and staging for. Raises OSError where a ring cannot be opened."""

    name = "uring"
    access: ClassVar[Access] = "direct"

    def __init__(
        self, queue_depth: int, staging_bytes: int, extent_bytes_max: int, threads: int | None = None
    ) -> None:
        room = min(queue_depth // _RING_DEPTH_MIN, staging_bytes // (2 * extent_bytes_max))
        rings = max(1, min(threads or 1, room))
        super().__init__(queue_depth, staging_bytes, extent_bytes_max, rings)
        self._library = library()
        arena = aligned_buffer(staging_bytes)
        part = staging_bytes // rings // PAGE_BYTES * PAGE_BYTES
        self._rings = [_Ring(k, queue_depth // rings, arena[k * part : (k + 1) * part]) for k in range(rings)]
        self._counters = new_counters(rings)
        self._queue: list[_Shared] = []  # lanes that further rings may open
        self._condition = threading.Condition()
        self._closing = False
        self._failure: OSError | None = None
        opened = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        try:
            for ring in self._rings:
                thread = threading.Thread(
                    target=self._run, args=(ring, opened), name=f"featstore-uring-{ring.number}", daemon=True
                )
                self._threads.append(started(thread))
            for _ in self._rings:
                opened.acquire()
            if self._failure is not None:
                raise refusal(
                    self._failure, "io_uring", "set up a ring (io_uring_setup) of"
                ) from self._failure
        except BaseException:
            self.close()
            raise

    def start(self, lane: Lane) -> None:
        self.check(lane)
        shared = _Shared(lane, max(1, min(self.threads, lane.extents // RING_EXTENTS_MIN)))
        with self._condition:
            if self._closing:
                raise ClosedError("the engine is closed")
            self._queue.append(shared)
            self._told()
            self._condition.notify(shared.rings)

    def _told(self) -> None:
        """Tell each ring how many lanes it could open; within the lock."""
        for ring in self._rings:
            ring.waiting[0] = sum(one not in ring.open for one in self._queue)

    # A ring's thread.

    def _run(self, ring: _Ring, opened: threading.Semaphore) -> None:
        try:
            self._loop(ring, opened)
        except BaseException as error:  # whoever waits, for the ring or for rows, must hear of it
            self._break(
                error
                if isinstance(error, OSError)
                else OSError(errno.EIO, f"the reading thread ended: {error!r}")
            )
            with self._condition:
                self._closing = True
            self._end(ring, [True] * len(ring.open))
            self._refuse()
        finally:
            opened.release()

    def _loop(self, ring: _Ring, opened: threading.Semaphore) -> None:
        made = self._library.open_ring(max(8, ring.depth))
        opened.release()
        broken = False
        while True:
            with self._condition:
                while not (ring.waiting[0] or ring.open or self._closing):
                    self._condition.wait()
                if self._failure is None:
                    self._enter(ring)
            if self._failure is not None:
                self._refuse()
            if not ring.open:
                if self._closing:
                    break
                continue
            if broken:
                # The kernel must not run again: it would look at lanes that are gone. Reads still under way
                # end in the arena.
                self._end(ring, [True] * len(ring.open))
                continue
            r = drive(
                self._library.functions, address_of(made), ring.depth, ring.lanes, address_of(ring.waiting),
                ring.state, ring.slots, address_of(ring.arena), len(ring.arena) // PAGE_BYTES,
                ring.completions, CLOCK_GETTIME, address_of(ring.scratch), self._counters[ring.number],
            )  # fmt: skip
            if r < 0:
                broken = True
                self._break(OSError(-r, f"io_uring_enter: {os.strerror(-r)}"))
                self._end(ring, [True] * len(ring.open))
            else:
                self._end(ring, ring.nothing_left())
        self._library.close_ring(made)

    def _enter(self, ring: _Ring) -> None:
        """Open lanes that wait, the oldest first; within the lock."""
        for shared in [one for one in self._queue if one not in ring.open]:
            if len(ring.open) == LANES_MAX:
                break
            if shared.wants_more or not shared.opened:
                ring.enter(shared)
            if not shared.wants_more:
                self._queue.remove(shared)
        self._told()

    def _end(self, ring: _Ring, gone: list[bool]) -> None:
        """Leave lanes, and call back for those that nobody has open any more: a waiting thread must not keep
        a caller's rows alive."""
        if not any(gone):
            return
        with self._condition:
            left = ring.leave(gone)
            for shared in left:
                shared.inside -= 1
                if shared in self._queue and not shared.wants_more:
                    self._queue.remove(shared)
            done = [one for one in left if not one.inside and one not in self._queue]
            self._told()
        for shared in done:
            shared.lane.on_done(shared.lane)

    # A ring that is broken: what is under way and all that comes after it fails with the reason.

    def _break(self, failure: OSError) -> None:
        with self._condition:
            self._failure = self._failure or failure
            for ring in self._rings:
                for shared in ring.open:
                    self._fail(shared)
            self._condition.notify_all()

    def _refuse(self) -> None:
        """Fail the lanes that nobody has opened."""
        with self._condition:
            refused = [one for one in self._queue if not one.inside]
            self._queue = []
            for shared in refused:
                self._fail(shared)
            self._told()
        for shared in refused:
            shared.lane.on_done(shared.lane)

    def _fail(self, shared: _Shared) -> None:
        assert self._failure is not None
        lane = shared.lane
        lane.cancel()
        lane.failure = lane.failure or DeviceError(
            self._failure.errno or 5, lane.files.paths[0], None, "read through io_uring"
        )

    # All of them.

    def counters(self) -> NDArray[np.int64]:
        total: NDArray[np.int64] = self._counters.sum(axis=0)
        return total

    def close(self) -> None:
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        for thread in self._threads:
            if threading.current_thread() is not thread:
                thread.join()
