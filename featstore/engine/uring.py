"""The io_uring engine: one ring, one thread, direct I/O, and a queue that never drains while there is work.

The kernel :func:`_drive` holds the whole loop: take the next extent of the oldest lane that has one, find
room for it in the staging arena, queue the read; wait for completions; look at every result; verify, deliver,
free the room; go on. There is no barrier between batches, and since up to ``LANES_MAX`` lanes are open at
once there is none between requests either. It returns to Python only when a lane has ended, when a new one
waits and the open ones have nothing left to start, or when the ring itself fails.

The arena is a ring buffer in pages: room is taken at the head, and given back at the tail once the oldest
read has ended. There are more slots than reads under way, so that one slow read does not hold up the others
behind it.

liburing's functions come from the PyPI wheel ``liburing``, whose shared object exports them; they are called
through a table of addresses, each probed. Ring flags: SINGLE_ISSUER and DEFER_TASKRUN where the kernel knows
them (Linux 6.1), else none.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import threading
from collections import deque
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import aligned_buffer
from featstore.base.compilation import njit
from featstore.base.native import (
    address_of,
    call_i32_i64,
    call_i32_i64_u32,
    call_i64_i64,
    call_prep_read,
    call_u32_i64_i64_u32,
    call_void_i64_u32,
    call_void_i64_u64,
    function_address,
    load_i32,
    load_i64,
    memzero,
    store_i64,
)
from featstore.base.system import refusal, started
from featstore.engine import counters as C
from featstore.engine import lane as L
from featstore.engine.base import Engine, new_counters
from featstore.engine.deliver import CLOCK, count_read, deliver, now_ns, report_error
from featstore.engine.files import Access
from featstore.engine.lane import Lane
from featstore.errors import ClosedError, DeviceError, EngineError
from featstore.units import PAGE_BYTES

LANES_MAX = 16
_RING_BYTES = 512  # room for struct io_uring (216 bytes in liburing 2.9)
_SETUP_FLAGS = (1 << 12) | (1 << 13)  # IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN

# The table of functions.
_FUNCTIONS = (
    "io_uring_get_sqe",
    "io_uring_prep_read",
    "io_uring_sqe_set_data64",
    "io_uring_submit_and_wait",
    "io_uring_peek_batch_cqe",
    "io_uring_cq_advance",
    "io_uring_submit",
)
_GET_SQE, _PREP_READ, _SET_DATA, _SUBMIT_AND_WAIT, _PEEK_BATCH, _CQ_ADVANCE, _SUBMIT = range(len(_FUNCTIONS))
_SETUP = ("io_uring_queue_init", "io_uring_queue_exit")

# Fields of the ring's state between two runs of the kernel.
_IN_FLIGHT, _SLOT_HEAD, _SLOT_TAIL, _ARENA_HEAD, _ARENA_TAIL = range(5)
# Fields of a slot.
_S_LANE, _S_EXTENT, _S_PAGE, _S_BEGIN, _S_OPEN, _S_TRIES = range(6)
_TRIES_MAX = 8

_EINTR, _EAGAIN, _EBUSY = -4, -11, -16


def _library_path() -> Path | None:
    try:
        spec = importlib.util.find_spec("liburing")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "liburing.so"
    return path if path.exists() else None


class _Library:
    """liburing, loaded, with the addresses of the functions that the kernel calls."""

    def __init__(self) -> None:
        path = _library_path()
        if path is None:
            raise EngineError(
                "the package 'liburing' is not installed (it has wheels for x86-64 glibc Linux)"
            )
        self.handle = ctypes.CDLL(str(path))
        self.functions = np.array([function_address(self.handle, name) for name in _FUNCTIONS], np.int64)
        missing = [n for n, a in zip(_FUNCTIONS, self.functions, strict=True) if a == 0]
        missing += [name for name in _SETUP if function_address(self.handle, name) == 0]
        if missing:
            raise EngineError(
                f"the installed liburing lacks {', '.join(missing)}; install the version featstore asks for"
            )

    def open_ring(self, entries: int) -> NDArray[np.uint8]:
        """A ring; raises OSError with the kernel's reason."""
        ring = np.zeros(_RING_BYTES, np.uint8)
        for flags in (_SETUP_FLAGS, 0):
            r = int(
                self.handle.io_uring_queue_init(
                    ctypes.c_uint(entries), ctypes.c_void_p(ring.ctypes.data), ctypes.c_uint(flags)
                )
            )
            if r == 0:
                return ring
            if r != -22:  # EINVAL: the kernel does not know the flags
                break
        # Whoever asked for a ring makes an error of ours of it, and says what it was for.
        raise OSError(-r, f"io_uring_setup: {os.strerror(-r)}")

    def close_ring(self, ring: NDArray[np.uint8]) -> None:
        self.handle.io_uring_queue_exit(ctypes.c_void_p(ring.ctypes.data))


_library: _Library | None = None


def library() -> _Library:
    """liburing, loaded once a process. Raises OSError where it cannot be."""
    global _library
    if _library is None:
        _library = _Library()
    return _library


def probe() -> None:
    """Open a small ring and close it again. Raises OSError with the reason where io_uring cannot be used."""
    lib = library()
    lib.close_ring(lib.open_ring(4))


@njit(nogil=True)
def _room(state: Any, slots: Any, pages: Any, arena_pages: Any) -> Any:
    """First page of free room in the arena, or -1."""
    if state[_SLOT_HEAD] == state[_SLOT_TAIL]:
        state[_ARENA_HEAD] = 0
        state[_ARENA_TAIL] = 0
        return 0 if pages <= arena_pages else -1
    if state[_SLOT_HEAD] - state[_SLOT_TAIL] >= slots.shape[0]:
        return -1
    head, tail = state[_ARENA_HEAD], state[_ARENA_TAIL]
    if head > tail:
        if arena_pages - head >= pages:
            return head
        return 0 if tail > pages else -1
    return head if tail - head > pages else -1


@njit(nogil=True)
def _queue_read(functions: Any, ring: Any, lane: Any, extent: Any, address: Any, slot: Any) -> Any:
    """Queue the read of an extent. Returns False where the submission queue is full."""
    sqe = call_i64_i64(functions[_GET_SQE], ring)
    if sqe == 0:
        return False
    page = load_i64(load_i64(lane + L.EXTENT_PAGE * 8) + 8 * extent)
    pages = load_i32(load_i64(lane + L.EXTENT_PAGES * 8) + 4 * extent)
    pages_per_file = load_i64(lane + L.PAGES_PER_FILE * 8)
    file = page // pages_per_file
    handle = load_i64(load_i64(lane + L.FILE_HANDLE * 8) + 8 * file)
    offset = (page - file * pages_per_file) * PAGE_BYTES
    call_prep_read(
        functions[_PREP_READ],
        sqe,
        np.int32(handle),
        address,
        np.uint32(np.int64(pages) * PAGE_BYTES),
        np.uint64(offset),
    )
    call_void_i64_u64(functions[_SET_DATA], sqe, np.uint64(slot))
    return True


@njit(nogil=True)
def _stopped(lane: Any) -> Any:
    return load_i64(lane + L.CANCEL * 8) != 0 or load_i64(lane + L.ERROR_CLAIM * 8) != 0


@njit(nogil=True)
def _fill(
    functions: Any,
    ring: Any,
    depth: Any,
    lanes: Any,
    state: Any,
    slots: Any,
    arena: Any,
    arena_pages: Any,
    now: Any,
) -> Any:
    """Start reads until the queue, the arena or the work is exhausted. Returns whether work is left."""
    for i in range(lanes.shape[0]):
        lane = lanes[i]
        next_extent = load_i64(lane + L.NEXT * 8)
        extents = load_i64(lane + L.EXTENTS * 8)
        while next_extent < extents and not _stopped(lane):
            if state[_IN_FLIGHT] >= depth:
                return True
            pages = np.int64(load_i32(load_i64(lane + L.EXTENT_PAGES * 8) + 4 * next_extent))
            page = _room(state, slots, pages, arena_pages)
            if page < 0:
                return True
            slot = state[_SLOT_HEAD] % slots.shape[0]
            if not _queue_read(functions, ring, lane, next_extent, arena + page * PAGE_BYTES, slot):
                return True
            slots[slot, _S_LANE] = lane
            slots[slot, _S_EXTENT] = next_extent
            slots[slot, _S_PAGE] = page
            slots[slot, _S_BEGIN] = now
            slots[slot, _S_OPEN] = 1
            slots[slot, _S_TRIES] = 0
            state[_SLOT_HEAD] += 1
            state[_ARENA_HEAD] = page + pages
            state[_IN_FLIGHT] += 1
            next_extent += 1
            _set(lane, L.NEXT, next_extent)
    return False


@njit(nogil=True)
def _set(lane: Any, field: Any, value: Any) -> None:
    store_i64(lane + field * 8, value)


@njit(nogil=True)
def _complete(
    functions: Any,
    ring: Any,
    slots: Any,
    slot: Any,
    result: Any,
    arena: Any,
    now: Any,
    clock: Any,
    scratch: Any,
    counters: Any,
) -> Any:
    """Look at a completion. Returns 1 when the slot's read has ended, 0 when it was issued again."""
    lane, extent = slots[slot, _S_LANE], slots[slot, _S_EXTENT]
    page = load_i64(load_i64(lane + L.EXTENT_PAGE * 8) + 8 * extent)
    pages = np.int64(load_i32(load_i64(lane + L.EXTENT_PAGES * 8) + 4 * extent))
    pages_per_file = load_i64(lane + L.PAGES_PER_FILE * 8)
    expected = min(pages * PAGE_BYTES, load_i64(lane + L.FILE_BYTES * 8) - page % pages_per_file * PAGE_BYTES)
    data = arena + slots[slot, _S_PAGE] * PAGE_BYTES
    ended = True
    if result == expected:
        count_read(counters, expected, now - slots[slot, _S_BEGIN])
        if not _stopped(lane):
            memzero(data + expected, pages * PAGE_BYTES - expected)
            deliver(lane, extent, data, clock, scratch, counters)
    elif (result >= 0 or result == _EINTR or result == _EAGAIN) and slots[slot, _S_TRIES] < _TRIES_MAX:
        # Cut short or asked to repeat: read the extent again from its start, which keeps direct I/O aligned.
        counters[C.SHORT_READS] += 1
        slots[slot, _S_TRIES] += 1
        ended = not _queue_read(functions, ring, lane, extent, data, slot)
        if ended:
            report_error(lane, np.int64(_EBUSY), page, 0, 0)
    elif result >= 0:
        report_error(lane, np.int64(L.ERROR_TRUNCATED), page, expected, np.int64(result))
    else:
        report_error(lane, np.int64(result), page, 0, 0)
    if ended:
        slots[slot, _S_OPEN] = 0
        _set(lane, L.DONE, load_i64(lane + L.DONE * 8) + 1)
        return 1
    return 0


@njit(nogil=True)
def _ended(lane: Any) -> Any:
    started = load_i64(lane + L.NEXT * 8)
    if load_i64(lane + L.DONE * 8) < started:
        return False
    return started >= load_i64(lane + L.EXTENTS * 8) or _stopped(lane)


@njit(cache=True, nogil=True)
def _drive(
    functions: NDArray[np.int64],
    ring: int,
    depth: int,
    lanes: NDArray[np.int64],
    waiting: int,
    state: NDArray[np.int64],
    slots: NDArray[np.int64],
    arena: int,
    arena_pages: int,
    completions: NDArray[np.int64],
    clock: int,
    scratch: int,
    counters: NDArray[np.int64],
) -> int:
    """Run the ring until Python is needed: see the module's text. Returns 0, or a negative errno of the ring
    itself.

    ``waiting`` is the address of an int64 that is not 0 while a further lane waits to be opened;
    ``completions`` int64 [depth] is scratch.
    """
    while True:
        now = now_ns(clock, scratch)
        more = _fill(functions, ring, depth, lanes, state, slots, arena, arena_pages, now)
        ended = state[_IN_FLIGHT] == 0
        for i in range(lanes.shape[0]):
            ended = ended or _ended(lanes[i])
        if ended or (not more and load_i64(waiting) != 0 and lanes.shape[0] < LANES_MAX):
            r = call_i32_i64(functions[_SUBMIT], ring)
            return int(r) if r < 0 and r != _EINTR and r != _EAGAIN and r != _EBUSY else 0
        # Wake for an eighth of what is under way: fewer switches, and the queue stays seven eighths full.
        r = call_i32_i64_u32(functions[_SUBMIT_AND_WAIT], ring, np.uint32(max(1, state[_IN_FLIGHT] // 8)))
        if r < 0 and r != _EINTR and r != _EAGAIN and r != _EBUSY:
            return int(r)
        begin = now
        now = now_ns(clock, scratch)
        counters[C.NS_WAIT] += now - begin
        got = call_u32_i64_i64_u32(
            functions[_PEEK_BATCH], ring, completions.ctypes.data, np.uint32(completions.shape[0])
        )
        for k in range(np.int64(got)):
            # struct io_uring_cqe { u64 user_data; s32 res; u32 flags; }
            slot, result = load_i64(completions[k]), np.int64(load_i32(completions[k] + 8))
            state[_IN_FLIGHT] -= _complete(
                functions, ring, slots, slot, result, arena, now, clock, scratch, counters
            )
        call_void_i64_u32(functions[_CQ_ADVANCE], ring, np.uint32(got))
        while (
            state[_SLOT_TAIL] < state[_SLOT_HEAD] and slots[state[_SLOT_TAIL] % slots.shape[0], _S_OPEN] == 0
        ):
            state[_SLOT_TAIL] += 1
        if state[_SLOT_TAIL] < state[_SLOT_HEAD]:
            state[_ARENA_TAIL] = slots[state[_SLOT_TAIL] % slots.shape[0], _S_PAGE]


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
            r = _drive(
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
                CLOCK,
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
