"""Helpers that share the copying of small requests, without the interpreter.

To find and copy a thousand rows takes a tenth of a millisecond: waking up another thread through the
interpreter takes as long. A team's helpers are in a kernel of their own, where they wait for the next request
for a moment, awake, if the one before came as quickly; so a program that asks for little and often has all
its cores, and one that trains for a while between two requests has helpers that sleep meanwhile. Sleeping
helpers are woken, through an eventfd, for what is worth it.

A request is cut into shares, which whoever has time takes by an atomic addition, so a helper that wakes up
late holds nobody up. It has said that it is active before it looks whether the request is still open, and the
caller closes it before it looks whether somebody is active: then nobody writes into the caller's memory any
more. One request at a time has the team; another that comes meanwhile is served by its caller alone.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.bitmap import slot_at
from featstore.base.clock import CLOCK_GETTIME, now_ns
from featstore.base.compilation import njit
from featstore.base.native import (
    PART,
    STREAM_BYTES,
    address_of,
    atomic_add,
    call_i64,
    call_read,
    fence,
    function_address,
    libc,
    load_i32,
    load_i64,
    load_shared,
    memcpy,
    store_i64,
)
from featstore.base.rows import STREAMED_BYTES_MIN, expect_row, stream_row
from featstore.base.threads import Worker
from featstore.errors import DeviceError

_AHEAD = 16  # rows looked up and prefetched ahead of the copy; a power of two

_AWAKE_NS = 200_000  # requests that come so soon after the last find helpers awake
_PATIENT_NS = 20_000  # after so long, whoever waits for the others' last shares lets other threads run
_SHARED_BYTES = 2**16  # what is less is served alone,
_WOKEN_BYTES = 2**20  # and what is less is not worth waking anybody up
# A share: rows of so many bytes at least, a third of what one would have, and not more than so many ids but
# where one would have 16 such shares: each begins with rows that nobody has prefetched.
_SHARE_BYTES, _SHARES_MIN, _SHARE_IDS, _SHARES_MAX = 2**15, 3, 2**9, 16
_ID_BYTES = 64  # what looking up one id weighs in that

# Places of int64 in a team's memory. What threads of both sides write stands on lines of its own.
_EPOCH, _OPEN, _NEXT, _ACTIVE, _SLEEPERS, _BUSY, _STOP, _MISSED = (64 * line for line in range(8))
_IDS, _COUNT, _MAP, _MAP_BYTES, _ROWS, _BITS, _RANKS, _DATA = (512 + 8 * place for place in range(8))
_ROW_BYTES, _OUT, _SHARE, _STREAMING, _GAP, _ENDED, _CLOCK = (576 + 8 * place for place in range(7))
_LINES = 11  # the clock takes two places

_READ, _WRITE, _YIELD = (function_address(libc(), name) for name in ("read", "write", "sched_yield"))


@njit(**PART)
def _slot_of_id(node: Any, row_map: Any, map_bytes: Any, rows: Any, bits: Any, ranks: Any) -> Any:
    """The slot of a node id, through a map of int32 or int64 at an address (``map_bytes`` 4, 8, or 0: ids are
    rows); -1 for one that has none, or is not of the table."""
    if node < 0 or node >= rows:
        return np.int64(-1)
    row = node
    if map_bytes == 4:
        row = np.int64(load_i32(row_map + 4 * node))
    elif map_bytes == 8:
        row = load_i64(row_map + 8 * node)
    return slot_at(row, bits, ranks)


def _serving(copy_row: Any) -> Any:
    """The kernel that serves ids by such a copy of a row: one for each, as a test of which within its loop
    costs a third of the time."""

    @njit(**PART)
    def serve(
        ids: Any, count: Any, row_map: Any, map_bytes: Any, rows: Any, bits: Any, ranks: Any, data: Any,
        row_bytes: Any, out: Any,
    ) -> Any:  # fmt: skip
        """Copy the rows of ids, in order, as long as they are members. How many were."""
        slots = np.full(_AHEAD, -1, np.int64)  # of ids i to i + _AHEAD - 1, at i & (_AHEAD - 1)
        for step in range(count + _AHEAD):
            at, i = step & (_AHEAD - 1), step - _AHEAD
            if i >= 0:
                if slots[at] < 0:
                    return i
                copy_row(out + i * row_bytes, data + slots[at] * row_bytes, row_bytes)
            if step < count:
                slot = _slot_of_id(load_i64(ids + 8 * step), row_map, map_bytes, rows, bits, ranks)
                slots[at] = slot
                if slot >= 0:
                    expect_row(data + slot * row_bytes, row_bytes)
        return count

    return serve


_serve_cached, _serve_streamed = _serving(memcpy), _serving(stream_row)


@njit(**PART)
def _serve(
    ids: Any, count: Any, row_map: Any, map_bytes: Any, rows: Any, bits: Any, ranks: Any, data: Any,
    row_bytes: Any, out: Any, streaming: Any,
) -> Any:  # fmt: skip
    if not streaming:
        return _serve_cached(ids, count, row_map, map_bytes, rows, bits, ranks, data, row_bytes, out)
    served = _serve_streamed(ids, count, row_map, map_bytes, rows, bits, ranks, data, row_bytes, out)
    fence()
    return served


@njit(**PART)
def _take_shares(team: Any) -> None:
    """Serve shares of the open request until there are none, or one has an id that is no member."""
    ids, count, row_map = load_i64(team + _IDS), load_i64(team + _COUNT), load_i64(team + _MAP)
    map_bytes, rows = load_i64(team + _MAP_BYTES), load_i64(team + _ROWS)
    bits, ranks, data = load_i64(team + _BITS), load_i64(team + _RANKS), load_i64(team + _DATA)
    row_bytes, out, share = load_i64(team + _ROW_BYTES), load_i64(team + _OUT), load_i64(team + _SHARE)
    while load_shared(team + _MISSED) == 0:
        begin = atomic_add(team + _NEXT, share)
        if begin >= count:
            return
        size = min(share, count - begin)
        served = _serve(
            ids + 8 * begin, size, row_map, map_bytes, rows, bits, ranks, data, row_bytes,
            out + begin * row_bytes, load_i64(team + _STREAMING) != 0,
        )  # fmt: skip
        if served < size:
            atomic_add(team + _MISSED, 1)


@njit(cache=True, nogil=True)
def _help(team: int, event: int, read: int, clock: int, scratch: int) -> None:
    """A helper's life: until it is told to stop."""
    seen, awake_ns = load_shared(team + _EPOCH), np.int64(0)
    while True:
        begin = now_ns(clock, scratch)
        while load_shared(team + _EPOCH) == seen and load_shared(team + _STOP) == 0:
            if now_ns(clock, scratch) - begin < awake_ns:
                continue
            atomic_add(team + _SLEEPERS, 1)
            if load_shared(team + _EPOCH) == seen and load_shared(team + _STOP) == 0:
                call_read(read, np.int32(event), scratch, np.int64(8))
            atomic_add(team + _SLEEPERS, -1)
        if load_shared(team + _STOP) != 0:
            return
        seen = load_shared(team + _EPOCH)
        atomic_add(team + _ACTIVE, 1)
        if load_shared(team + _OPEN) != 0:
            _take_shares(team)
        atomic_add(team + _ACTIVE, -1)
        awake_ns = np.int64(_AWAKE_NS) if load_shared(team + _GAP) < _AWAKE_NS else np.int64(0)


@njit(cache=True, nogil=True)
def serve_together(
    team: int, threads: int, event: int, functions: NDArray[np.int64], ids: NDArray[np.int64],
    row_of_node: NDArray[Any], rows: int, bits: NDArray[np.uint64], ranks: NDArray[np.int32], data: int,
    row_bytes: int, rows_out: NDArray[np.uint8],
) -> bool:  # fmt: skip
    """The lookup of ids (an empty ``row_of_node`` is the identity, of so many rows) and their copy in one go,
    to ``rows_out`` in order, by a team of ``threads`` (its address; 0: alone). Whether all were
    members: if not, ``rows_out`` holds some of them. ``functions``: the addresses of write, clock_gettime,
    sched_yield."""
    count, map_bytes, out = ids.shape[0], np.int64(0), np.int64(rows_out.ctypes.data)
    if row_of_node.shape[0] != 0:
        map_bytes = np.int64(row_of_node.itemsize)
    weight = count * (row_bytes + _ID_BYTES)
    streaming = count * row_bytes >= STREAMED_BYTES_MIN and (row_bytes | out) % STREAM_BYTES == 0
    alone = team == 0 or weight < _SHARED_BYTES
    if not alone and atomic_add(team + _BUSY, 1) != 0:
        atomic_add(team + _BUSY, -1)
        alone = True
    if alone:
        return bool(
            _serve(
                np.int64(ids.ctypes.data), count, np.int64(row_of_node.ctypes.data), map_bytes, rows,
                np.int64(bits.ctypes.data), np.int64(ranks.ctypes.data), data, row_bytes, out, streaming,
            )
            == count
        )  # fmt: skip
    write, clock, pause = functions[0], functions[1], functions[2]
    store_i64(team + _IDS, np.int64(ids.ctypes.data))
    store_i64(team + _COUNT, count)
    store_i64(team + _MAP, np.int64(row_of_node.ctypes.data))
    store_i64(team + _MAP_BYTES, map_bytes)
    store_i64(team + _ROWS, rows)
    store_i64(team + _BITS, np.int64(bits.ctypes.data))
    store_i64(team + _RANKS, np.int64(ranks.ctypes.data))
    store_i64(team + _DATA, data)
    store_i64(team + _ROW_BYTES, row_bytes)
    store_i64(team + _OUT, out)
    store_i64(team + _STREAMING, np.int64(streaming))
    least = max(1, _SHARE_BYTES // (row_bytes + _ID_BYTES))
    share = max(least, min(count // (_SHARES_MIN * threads), _SHARE_IDS), count // (_SHARES_MAX * threads))
    store_i64(team + _SHARE, share)
    store_i64(team + _NEXT, 0)
    store_i64(team + _MISSED, 0)
    gap = now_ns(clock, team + _CLOCK) - load_i64(team + _ENDED)
    store_i64(team + _GAP, gap)
    atomic_add(team + _OPEN, 1)
    atomic_add(team + _EPOCH, 1)
    sleepers = load_shared(team + _SLEEPERS)
    if sleepers > 0 and (weight >= _WOKEN_BYTES or gap < _AWAKE_NS):
        store_i64(team + _CLOCK, sleepers)
        call_read(write, np.int32(event), team + _CLOCK, np.int64(8))
    _take_shares(team)
    atomic_add(team + _OPEN, -1)
    begin = now_ns(clock, team + _CLOCK)
    while load_shared(team + _ACTIVE) != 0:
        if now_ns(clock, team + _CLOCK) - begin > _PATIENT_NS:
            call_i64(pause)
    everything = load_shared(team + _MISSED) == 0
    store_i64(team + _ENDED, now_ns(clock, team + _CLOCK))
    atomic_add(team + _BUSY, -1)
    return bool(everything)


class Team:
    """``helpers`` threads beside the caller's; none are started before they are needed. Belongs to one
    process. With no helpers, and where the system has no more threads, callers serve alone."""

    def __init__(self, helpers: int) -> None:
        self._helpers = max(0, helpers)
        self._workers: list[Worker] | None = None
        raw = np.zeros(8 * _LINES + 8, np.int64)
        self._memory = raw[-address_of(raw) % 64 // 8 :]
        self._address = address_of(self._memory)
        self._functions = np.array([_WRITE, CLOCK_GETTIME, _YIELD], np.int64)
        self._event: _Event | None = None
        self._starting = threading.Lock()

    def serve(
        self, ids: NDArray[np.int64], row_of_node: NDArray[Any], rows: int,
        members: tuple[NDArray[np.uint64], NDArray[np.int32]], data: int, row_bytes: int,
        out: NDArray[np.uint8],
    ) -> bool:  # fmt: skip
        """Copy the rows of these ids to ``out``, in order: see :func:`serve_together`."""
        if self._workers is None and len(ids) * (row_bytes + _ID_BYTES) >= _SHARED_BYTES:
            with self._starting:
                if self._workers is None:
                    self._begin()
        team = self._address if self._workers else 0
        event = -1 if self._event is None else self._event.descriptor
        return bool(
            serve_together(
                team, self._helpers + 1, event, self._functions, ids, row_of_node, rows, *members, data,
                row_bytes, out,
            )
        )  # fmt: skip

    def load_kernels(self) -> None:
        """Run what helpers run, which ends at once, so that it is loaded (or compiled) now."""
        memory = np.zeros_like(self._memory)
        memory[_STOP // 8] = 1
        _help(address_of(memory), -1, _READ, CLOCK_GETTIME, address_of(self._memory) + _CLOCK)

    def _begin(self) -> None:
        self._workers = []
        if self._helpers == 0:
            return
        try:
            self._event = _Event()
            for number in range(self._helpers):
                worker = Worker(partial(_live, self._memory, self._event), f"featstore-team-{number}")
                worker.start()
                self._workers.append(worker)
        except (OSError, DeviceError):
            return  # with those that there are

    def _stop(self) -> list[Worker]:
        self._memory[_STOP // 8] = 1
        workers, self._workers = self._workers or [], []
        if workers and self._event is not None:
            os.eventfd_write(self._event.descriptor, len(workers))
        return workers

    def close(self) -> None:
        """End the helpers. Callers serve alone from now on."""
        for worker in self._stop():
            worker.end()

    def __del__(self) -> None:
        if hasattr(self, "_event"):
            self._stop()  # and not wait: see close_later


class _Event:
    """An eventfd, which is there as long as a helper may look at it."""

    def __init__(self) -> None:
        self.descriptor = -1
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def _live(memory: NDArray[np.int64], event: _Event) -> None:
    """The thread of a helper, which keeps the memory and the event."""
    scratch = np.zeros(2, np.int64)
    _help(address_of(memory), event.descriptor, _READ, CLOCK_GETTIME, address_of(scratch))
