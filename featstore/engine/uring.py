"""The io_uring engine: rings with a thread each, direct I/O, and queues that never drain while there is work.

The kernel :func:`featstore.engine.ring_loop.drive` holds a ring's whole loop: take the next extent of the
oldest lane that has one, find room for it in the staging arena, queue the read; wait for completions; look at
every result; verify, deliver, free the room; go on. There is no barrier between batches, and since up to
``LANES_MAX`` lanes are open at once there is none between requests either. It returns to Python only when
nothing is left to do for a lane, when a new one waits and the open ones have nothing left to start, or when
the ring itself fails.

One ring in one thread keeps up with a few hundred thousand reads a second. For devices that do more there are
several, each with its part of the queue depth and of the arena; pages are verified and delivered by the
thread whose ring they arrived in. A lane of many extents is opened by several rings, a small one by whichever
comes first. It is done when the last of those that opened it has left.

How many rings work follows the load: one more where the last of them keeps its core busy all the time that it
has something to read, one fewer where it is mostly waiting. So a slow device has one, and so has one whose
cores are wanted by others: a thread that has to wait for its core is not busy. It is changed while no lane is
open, and lanes wait for that.

A ring that has read for a while has the arena registered with the kernel, which then looks up no pages: a
read of a page takes an eighth less of a core, a long one a twelfth. Forked children have none of it.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import private_buffer
from featstore.base.clock import CLOCK_GETTIME
from featstore.base.native import address_of
from featstore.base.system import available_cores, refusal, started
from featstore.base.threads import SafeCondition, Wake
from featstore.engine import lane as L
from featstore.engine.base import Engine, new_counters
from featstore.engine.files import Access
from featstore.engine.lane import Lane
from featstore.engine.liburing import library
from featstore.engine.ring_count import WINDOW_NS, RingCount, told_of_fewer, worth_rings
from featstore.engine.ring_loop import (
    AT_ONCE,
    CLAIM_END,
    CLAIMED,
    LANE,
    LANES_MAX,
    OPEN_FIELDS,
    SHARE,
    UNDER_WAY,
    drive,
)
from featstore.errors import ClosedError, DeviceError, FeatstoreWarning
from featstore.units import PAGE_BYTES

_CHUNK_MAX = 16  # extents that a ring claims at once of a lane that it shares
_RING_DEPTH_MIN = 8


def rings_max(queue_depth: int, staging_bytes: int, extent_bytes_max: int) -> int:
    """How many rings there is room for: each has 8 reads under way, and staging for two of the longest."""
    return max(1, min(queue_depth // _RING_DEPTH_MIN, staging_bytes // (2 * extent_bytes_max)))


class _Shared:
    """A lane that rings have opened, or may: ``rings`` of them at most."""

    def __init__(self, lane: Lane, rings: int) -> None:
        self.lane, self.rings = lane, rings
        self.opened = 0  # by so many so far
        self.inside = 0  # have opened it and not left
        self.chunk = lane.extents if rings == 1 else max(1, min(_CHUNK_MAX, lane.extents // (4 * rings)))
        self.share = -(-lane.extents // rings)  # under way in one ring, so that the others find some

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
    """What belongs to one ring: its thread and that thread's memory, and the lanes that it has open."""

    def __init__(self, number: int, queue_depth: int, lock: threading.Lock) -> None:
        self.number = number
        self.thread: threading.Thread | None = None
        self.wake, self.idle = SafeCondition(lock), False
        self.depth, self.arena = queue_depth, np.empty(0, np.uint8)  # its part of them
        self.open: list[_Shared] = []
        self.lanes = np.zeros((0, OPEN_FIELDS), np.int64)
        self.waiting = np.zeros(8, np.int64)  # a cache line; the first: lanes that this ring could open
        self.cpu_ns = self.driven_ns = 0  # of the window

    def prepare(self, queue_depth: int) -> None:
        """Memory for what is under way: a ring that never works has none."""
        self.state = np.zeros(8, np.int64)
        self.slots = np.zeros((4 * queue_depth, 6), np.int64)
        self.completions = np.zeros(queue_depth, np.int64)
        self.scratch = np.zeros(8, np.int64)

    def enter(self, shared: _Shared) -> None:
        shared.opened += 1
        shared.inside += 1
        self.open.append(shared)
        row = np.zeros((1, OPEN_FIELDS), np.int64)
        row[0, LANE], row[0, AT_ONCE], row[0, SHARE] = shared.lane.address, shared.chunk, shared.share
        self.lanes = np.concatenate([self.lanes, row])

    def nothing_left(self) -> list[bool]:
        """Of each open lane, whether there is nothing to do for it here any more."""
        return [
            not row[UNDER_WAY] and (one.stopped or (row[CLAIMED] >= row[CLAIM_END] and one.taken))
            for one, row in zip(self.open, self.lanes, strict=True)
        ]

    def leave(self, gone: list[bool]) -> list[_Shared]:
        """Take out those of the open lanes that are marked."""
        left = [one for one, away in zip(self.open, gone, strict=True) if away]
        self.open = [one for one, away in zip(self.open, gone, strict=True) if not away]
        self.lanes = np.ascontiguousarray(self.lanes[~np.array(gone, bool)])
        return left


class UringEngine(Engine):
    """Reads through io_uring; see the module's text. ``threads``: as many rings work at most, by default as
    many as there are cores; never more than there is depth and staging for. Raises OSError where a ring
    cannot be opened; a further one that cannot is told by a warning."""

    name = "uring"
    access: ClassVar[Access] = "direct"

    def __init__(
        self, queue_depth: int, staging_bytes: int, extent_bytes_max: int, threads: int | None = None
    ) -> None:
        room = rings_max(queue_depth, staging_bytes, extent_bytes_max)
        rings = min(threads or available_cores(), room)
        super().__init__(queue_depth, staging_bytes, extent_bytes_max, rings)
        self._library = library()
        self._arena = private_buffer(staging_bytes)
        self._lock = threading.Lock()
        self._rings = [_Ring(k, queue_depth, self._lock) for k in range(rings)]
        self._counters = new_counters(rings)
        self._queue: list[_Shared] = []  # lanes that rings may open
        self._working = self._wanted = 0  # rings: those that work, and how many are to
        self._count = RingCount()
        self._closing = False
        self._failure: OSError | None = None
        self._told: FeatstoreWarning | None = None
        self._opened = Wake()
        try:
            with self._lock:
                self._set_wanted(1)
            self._opened.wait()
            if self._failure is not None:
                raise refusal(
                    self._failure, "io_uring", "set up a ring (io_uring_setup) of"
                ) from self._failure
        except BaseException:
            self.close()
            raise

    def start(self, lane: Lane) -> None:
        self.check(lane)
        with self._lock:
            if self._closing:
                raise ClosedError("the engine is closed")
            told, self._told = self._told, None
            if told is not None:
                raise told
            shared = _Shared(lane, min(max(1, self._working), worth_rings(lane)))
            self._queue.append(shared)
            try:
                self._tell()
            except BaseException:  # a ring cannot be started: nobody may read this later
                self._queue.remove(shared)
                raise

    def _set_wanted(self, wanted: int) -> None:
        self._wanted = wanted
        self._tell()

    def _tell(self) -> None:
        """Tell each ring how many lanes it could open, and wake as many as have something to do."""
        if self._wanted != self._working and not any(ring.open for ring in self._rings):
            self._divide()
        changing = self._wanted != self._working
        wanted = sum(max(1, one.rings - one.opened) for one in self._queue)
        for ring in self._rings:
            able = not changing and ring.number < self._working
            ring.waiting[0] = sum(one not in ring.open for one in self._queue) if able else 0
            if ring.idle and (self._closing or (ring.waiting[0] and wanted > 0)):
                ring.idle = False
                ring.wake.notify()
                wanted -= 1

    def _divide(self) -> None:
        """Have as many rings work as are wanted, each with its part of the depth and of the arena."""
        for ring in self._rings[: self._wanted]:
            if ring.thread is None and not self._started(ring):
                self._wanted = ring.number
                break
        self._working = self._wanted
        part = self.staging_bytes // max(1, self._working) // PAGE_BYTES * PAGE_BYTES
        for ring in self._rings[: self._working]:
            ring.depth = self.queue_depth // self._working
            ring.arena = self._arena[ring.number * part : (ring.number + 1) * part]
            ring.cpu_ns = ring.driven_ns = 0

    def _started(self, ring: _Ring) -> bool:
        """Start a ring's thread; a further one that cannot be is done without."""
        ring.prepare(self.queue_depth)
        thread = threading.Thread(
            target=self._run, args=(ring,), name=f"featstore-uring-{ring.number}", daemon=True
        )
        try:
            ring.thread = started(thread)
        except OSError as error:
            if ring.number == 0:
                raise
            self._do_without(ring, error)
            return False
        return True

    def _do_without(self, ring: _Ring, error: OSError) -> None:
        self.threads = ring.number
        self._told = told_of_fewer(ring.number, error)  # an error of who starts the next lane

    def _weigh(self, ring: _Ring) -> None:
        """Look at the load of the last ring that works."""
        driven = ring.driven_ns  # which another thread may reset
        if driven < WINDOW_NS:
            return
        load = ring.cpu_ns / driven
        ring.cpu_ns = ring.driven_ns = 0
        with self._lock:
            if self._closing or ring.number != self._working - 1 or self._wanted != self._working:
                return
            step = self._count.step(load, driven, self._working, self.threads)
            if step:
                self._set_wanted(self._working + step)

    # A ring's thread.

    def _run(self, ring: _Ring) -> None:
        try:
            try:
                made = self._library.open_ring(max(8, self.queue_depth))
            except OSError as error:
                if ring.number == 0:
                    raise
                with self._lock:
                    self._do_without(ring, error)
                    self._set_wanted(min(self._wanted, ring.number))
                return
            self._opened.set()
            self._loop(ring, made)
            self._library.close_ring(made)
        except BaseException as error:  # whoever waits, for the ring or for rows, must hear of it
            self._break(
                error
                if isinstance(error, OSError)
                else OSError(errno.EIO, f"the reading thread ended: {error!r}")
            )
            with self._lock:
                self._closing = True
                self._tell()
            self._end(ring, [True] * len(ring.open))
            self._refuse()
        finally:
            self._opened.set()

    def _loop(self, ring: _Ring, made: NDArray[np.uint8]) -> None:
        broken, fixed, read_ns = False, False, 0
        while self._has_lanes(ring):
            if broken:
                # The kernel must not run again: it would look at lanes that are gone. Reads still under way
                # end in the arena.
                self._end(ring, [True] * len(ring.open))
                continue
            cpu, begin = time.thread_time_ns(), time.perf_counter_ns()
            r = drive(
                self._library.functions, address_of(made), fixed, ring.depth, ring.lanes,
                address_of(ring.waiting), ring.state, ring.slots, address_of(ring.arena),
                len(ring.arena) // PAGE_BYTES, ring.completions, CLOCK_GETTIME, address_of(ring.scratch),
                self._counters[ring.number],
            )  # fmt: skip
            ring.driven_ns += (driven := time.perf_counter_ns() - begin)
            if read_ns <= WINDOW_NS < (read_ns := read_ns + driven):
                fixed = self._library.register(made, self._arena)
            ring.cpu_ns += time.thread_time_ns() - cpu
            if r < 0:
                broken = True
                self._break(OSError(-r, f"io_uring_enter: {os.strerror(-r)}"))
                self._end(ring, [True] * len(ring.open))
            else:
                self._end(ring, ring.nothing_left())
                self._weigh(ring)

    def _has_lanes(self, ring: _Ring) -> bool:
        """Open lanes that wait, the oldest first; wait for some where there are none. False at the end."""
        while True:
            with self._lock:
                if self._failure is None:
                    self._enter(ring)
                if ring.open:
                    return True
                if self._failure is None or not self._queue:
                    if self._closing and not ring.waiting[0]:
                        return False
                    ring.idle = True
                    ring.wake.wait()
                    continue
            self._refuse()

    def _enter(self, ring: _Ring) -> None:
        if not ring.waiting[0]:
            return
        for shared in [one for one in self._queue if one not in ring.open]:
            if len(ring.open) == LANES_MAX:
                break
            if shared.wants_more or not shared.opened:
                ring.enter(shared)
            if not shared.wants_more:
                self._queue.remove(shared)
        self._tell()

    def _end(self, ring: _Ring, gone: list[bool]) -> None:
        """Leave lanes, and call back for those that nobody has open any more: a waiting thread must not keep
        a caller's rows alive."""
        if not any(gone):
            return
        with self._lock:
            left = ring.leave(gone)
            for shared in left:
                shared.inside -= 1
                if shared in self._queue and not shared.wants_more:
                    self._queue.remove(shared)
            done = [one for one in left if not one.inside and one not in self._queue]
            self._tell()
        for shared in done:
            shared.lane.on_done(shared.lane)

    # A ring that is broken: what is under way and all that comes after it fails with the reason.

    def _break(self, failure: OSError) -> None:
        with self._lock:
            self._failure = self._failure or failure
            for ring in self._rings:
                for shared in ring.open:
                    self._fail(shared)
                if ring.idle:
                    ring.idle = False
                    ring.wake.notify()

    def _refuse(self) -> None:
        """Fail the lanes that nobody has opened."""
        with self._lock:
            refused = [one for one in self._queue if not one.inside]
            self._queue = []
            for shared in refused:
                self._fail(shared)
            self._tell()
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
        with self._lock:
            self._closing = True
            self._set_wanted(self._working)
        for ring in self._rings:
            if ring.thread is not None and threading.current_thread() is not ring.thread:
                ring.thread.join()
