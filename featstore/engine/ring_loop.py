"""The loop of the io_uring engine, one kernel: reads queued, completions looked at, pages verified and
delivered.

The arena is a ring buffer in pages: room is taken at the head, and given back at the tail once the oldest
read has ended. There are more slots than reads under way, so that one slow read does not hold up the others
behind it.

Long reads are handed over a few at a time, and what has ended by then is delivered before more are started.
Where the device reads while it is asked, as one of compressed RAM does, pages are so delivered from the
core's own cache, and the next ones take their room.

Several rings may work on a lane: each claims some of its extents at a time, by an atomic addition, and that
is all they share.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.clock import now_ns
from featstore.base.compilation import njit
from featstore.base.native import (
    atomic_add,
    call_i32_i64,
    call_i32_i64_u32,
    call_i64_i64,
    call_prep_read,
    call_prep_read_fixed,
    call_u32_i64_i64_u32,
    call_void_i64_u32,
    call_void_i64_u64,
    load_i32,
    load_i64,
    memzero,
)
from featstore.engine import counters as C
from featstore.engine import lane as L
from featstore.engine.deliver import count_read, deliver, report_error
from featstore.engine.liburing import (
    CQ_ADVANCE,
    GET_SQE,
    PEEK_BATCH,
    PREP_READ,
    PREP_READ_FIXED,
    SET_DATA,
    SUBMIT,
    SUBMIT_AND_GET_EVENTS,
    SUBMIT_AND_WAIT,
)
from featstore.units import PAGE_BYTES

LANES_MAX = 16

# Fields of the ring's state between two runs of the kernel.
READS_IN_FLIGHT, SLOT_HEAD, SLOT_TAIL, ARENA_HEAD, ARENA_TAIL = range(5)
# Fields of an open lane, of one ring: its address; the extents that this ring has claimed of it and not
# started yet; how many it claims at once; its reads under way; with how many of them it claims no more.
LANE, CLAIMED, CLAIM_END, AT_ONCE, UNDER_WAY, SHARE = range(6)
OPEN_FIELDS = 6
# Fields of a slot.
_S_LANE, _S_EXTENT, _S_PAGE, _S_BEGIN, _S_OPEN, _S_TRIES = range(6)
_TRIES_MAX = 8

#: What :func:`_fill` left off for.
_NOTHING, _ROOM, _STEP = range(3)
_STEP_BYTES = 256 * 1024  # of long reads that are handed over at once: a part of a core's second cache
_LONG_PAGES = 16

_EINTR, _EAGAIN, _EBUSY = -4, -11, -16


@njit(nogil=True)
def _room(state: Any, slots: Any, pages: Any, arena_pages: Any) -> Any:
    """First page of free room in the arena, or -1."""
    if state[SLOT_HEAD] == state[SLOT_TAIL]:
        state[ARENA_HEAD] = 0
        state[ARENA_TAIL] = 0
        return 0 if pages <= arena_pages else -1
    if state[SLOT_HEAD] - state[SLOT_TAIL] >= slots.shape[0]:
        return -1
    head, tail = state[ARENA_HEAD], state[ARENA_TAIL]
    if head > tail:
        if arena_pages - head >= pages:
            return head
        return 0 if tail > pages else -1
    return head if tail - head > pages else -1


@njit(nogil=True)
def _queue_read(
    functions: Any, ring: Any, fixed: Any, lane: Any, extent: Any, address: Any, slot: Any
) -> Any:  # fmt: skip
    """Queue the read of an extent. Returns False where the submission queue is full."""
    sqe = call_i64_i64(functions[GET_SQE], ring)
    if sqe == 0:
        return False
    page = load_i64(load_i64(lane + L.EXTENT_PAGE * 8) + 8 * extent)
    pages = load_i32(load_i64(lane + L.EXTENT_PAGES * 8) + 4 * extent)
    pages_per_file = load_i64(lane + L.PAGES_PER_FILE * 8)
    file = page // pages_per_file
    handle = load_i64(load_i64(lane + L.FILE_HANDLE * 8) + 8 * file)
    offset = (page - file * pages_per_file) * PAGE_BYTES
    read_bytes = np.uint32(np.int64(pages) * PAGE_BYTES)
    if fixed:
        call_prep_read_fixed(
            functions[PREP_READ_FIXED], sqe, np.int32(handle), address, read_bytes, np.uint64(offset),
            np.int32(0),
        )  # fmt: skip
    else:
        call_prep_read(
            functions[PREP_READ], sqe, np.int32(handle), address, read_bytes, np.uint64(offset)
        )  # fmt: skip
    call_void_i64_u64(functions[SET_DATA], sqe, np.uint64(slot))
    return True


@njit(nogil=True)
def _stopped(lane: Any) -> Any:
    return load_i64(lane + L.CANCEL * 8) != 0 or load_i64(lane + L.ERROR_CLAIM * 8) != 0


@njit(nogil=True)
def _claim(open_lane: Any) -> Any:
    """Take the next extents of a lane for this ring, unless it has some left. Returns whether there are."""
    if open_lane[CLAIMED] < open_lane[CLAIM_END]:
        return True
    if open_lane[UNDER_WAY] >= open_lane[SHARE]:
        return False
    lane = open_lane[LANE]
    extents = load_i64(lane + L.EXTENTS * 8)
    if load_i64(lane + L.NEXT * 8) >= extents:
        return False
    first = atomic_add(lane + L.NEXT * 8, open_lane[AT_ONCE])
    open_lane[CLAIMED] = min(first, extents)
    open_lane[CLAIM_END] = min(first + open_lane[AT_ONCE], extents)
    return first < extents


@njit(nogil=True)
def _fill(
    functions: Any,
    ring: Any,
    fixed: Any,
    depth: Any,
    lanes: Any,
    state: Any,
    slots: Any,
    arena: Any,
    arena_pages: Any,
    now: Any,
) -> Any:
    """Queue reads until the queue, the arena or the work is exhausted, or there is enough to hand over.
    Returns for which of them it left off."""
    queued_bytes: Any = 0
    for i in range(lanes.shape[0]):
        lane = lanes[i, LANE]
        while not _stopped(lane) and _claim(lanes[i]):
            if state[READS_IN_FLIGHT] >= depth:
                return _ROOM
            extent = lanes[i, CLAIMED]
            pages = np.int64(load_i32(load_i64(lane + L.EXTENT_PAGES * 8) + 4 * extent))
            page = _room(state, slots, pages, arena_pages)
            if page < 0:
                return _ROOM
            slot = state[SLOT_HEAD] % slots.shape[0]
            if not _queue_read(functions, ring, fixed, lane, extent, arena + page * PAGE_BYTES, slot):
                return _ROOM
            slots[slot, _S_LANE] = lane
            slots[slot, _S_EXTENT] = extent
            slots[slot, _S_PAGE] = page
            slots[slot, _S_BEGIN] = now
            slots[slot, _S_OPEN] = 1
            slots[slot, _S_TRIES] = 0
            state[SLOT_HEAD] += 1
            state[ARENA_HEAD] = page + pages
            state[READS_IN_FLIGHT] += 1
            lanes[i, CLAIMED] += 1
            lanes[i, UNDER_WAY] += 1
            queued_bytes += pages * PAGE_BYTES
            if queued_bytes >= _STEP_BYTES and pages >= _LONG_PAGES:
                return _STEP
    return _NOTHING


@njit(nogil=True)
def _complete(
    functions: Any,
    ring: Any,
    fixed: Any,
    lanes: Any,
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
        ended = not _queue_read(functions, ring, fixed, lane, extent, data, slot)
        if ended:
            report_error(lane, np.int64(_EBUSY), page, 0, 0)
    elif result >= 0:
        report_error(lane, np.int64(L.ERROR_TRUNCATED), page, expected, np.int64(result))
    else:
        report_error(lane, np.int64(result), page, 0, 0)
    if ended:
        slots[slot, _S_OPEN] = 0
        atomic_add(lane + L.DONE * 8, 1)
        for i in range(lanes.shape[0]):
            if lanes[i, LANE] == lane:
                lanes[i, UNDER_WAY] -= 1
        return 1
    return 0


@njit(nogil=True)
def _left(open_lane: Any) -> Any:
    """Whether this ring has nothing to do for a lane any more: no read under way, and none to start."""
    if open_lane[UNDER_WAY] > 0:
        return False
    if _stopped(open_lane[LANE]):
        return True
    if open_lane[CLAIMED] < open_lane[CLAIM_END]:
        return False
    return load_i64(open_lane[LANE] + L.NEXT * 8) >= load_i64(open_lane[LANE] + L.EXTENTS * 8)


@njit(cache=True, nogil=True)
def drive(
    functions: NDArray[np.int64],
    ring: int,
    fixed: bool,
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

    ``fixed``: the arena is the ring's registered buffer 0. ``lanes``: int64 [open lanes, 6], of this ring
    alone, see above. ``waiting`` is the address of an int64 that is not 0 while a further lane waits to be
    opened; ``completions`` int64 [depth] is scratch.
    """
    while True:
        now = now_ns(clock, scratch)
        left_off = _fill(functions, ring, fixed, depth, lanes, state, slots, arena, arena_pages, now)
        ended = state[READS_IN_FLIGHT] == 0
        for i in range(lanes.shape[0]):
            ended = ended or _left(lanes[i])
        if ended or (left_off == _NOTHING and load_i64(waiting) != 0 and lanes.shape[0] < LANES_MAX):
            r = call_i32_i64(functions[SUBMIT], ring)
            return int(r) if r < 0 and r != _EINTR and r != _EAGAIN and r != _EBUSY else 0
        if left_off == _STEP:
            r = call_i32_i64(functions[SUBMIT_AND_GET_EVENTS], ring)
        else:
            # Wake for an eighth of what is under way: fewer switches, and the queue stays seven eighths full.
            wait = np.uint32(max(1, state[READS_IN_FLIGHT] // 8))
            r = call_i32_i64_u32(functions[SUBMIT_AND_WAIT], ring, wait)
        if r < 0 and r != _EINTR and r != _EAGAIN and r != _EBUSY:
            return int(r)
        begin = now
        now = now_ns(clock, scratch)
        counters[C.NS_WAIT] += now - begin
        got = call_u32_i64_i64_u32(
            functions[PEEK_BATCH], ring, completions.ctypes.data, np.uint32(completions.shape[0])
        )
        for k in range(np.int64(got)):
            # struct io_uring_cqe { u64 user_data; s32 res; u32 flags; }
            slot, result = load_i64(completions[k]), np.int64(load_i32(completions[k] + 8))
            state[READS_IN_FLIGHT] -= _complete(
                functions, ring, fixed, lanes, slots, slot, result, arena, now, clock, scratch, counters
            )
        call_void_i64_u32(functions[CQ_ADVANCE], ring, np.uint32(got))
        while state[SLOT_TAIL] < state[SLOT_HEAD] and slots[state[SLOT_TAIL] % slots.shape[0], _S_OPEN] == 0:
            state[SLOT_TAIL] += 1
        if state[SLOT_TAIL] < state[SLOT_HEAD]:
            state[ARENA_TAIL] = slots[state[SLOT_TAIL] % slots.shape[0], _S_PAGE]
