"""Engines on plain threads: ``preadv``-style reads, and memory mappings.

Each of a fixed number of threads runs one GIL-free kernel that takes the lane's next extent with an atomic
addition, reads it into the thread's own staging, verifies and delivers it, until the lane is exhausted. When
a thread finds no more extents in one lane it takes the next lane from the queue, so the device stays busy
between requests. The threads engine works wherever Linux does and is the fallback for io_uring; its system
calls are ``pread`` (``preadv`` of one buffer).

The mapped engine delivers straight from the page cache through ``mmap``. It needs no staging and is the
fastest when the whole table is warm in memory; cold, every page is a fault. A device error or a file
truncated *during* a read raises SIGBUS, which ends the process: sizes are checked before each lane, but the
race remains. Prefer the other engines.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import aligned_buffer
from featstore.base.clock import CLOCK_GETTIME, now_ns
from featstore.base.compilation import njit
from featstore.base.native import (
    address_of,
    atomic_add,
    call_i64,
    call_pread,
    function_address,
    libc,
    load_i32,
    load_i64,
    memzero,
    prefetch,
)
from featstore.base.system import no_thread, submitted
from featstore.base.threads import shut_down, thread_pool
from featstore.engine import counters as C
from featstore.engine import lane as L
from featstore.engine.base import Engine, new_counters
from featstore.engine.deliver import (
    copy_extent,
    count_read,
    deliver,
    report_error,
    verify_extent,
)
from featstore.engine.files import Access
from featstore.engine.lane import Lane
from featstore.errors import ClosedError, CorruptionError
from featstore.units import PAGE_BYTES

THREADS_MAX = 32
MAPPED_THREADS_MAX = 8
_PAGES_AT_ONCE = 128  # about so many, in extents of a mapping, a thread takes together
_SHORT_ROW_BYTES = 1024  # up to here rows are fetched before they are copied
_EXTENTS_AHEAD = 3  # of which one line is fetched, so that the processor knows by then where the page is

_PREAD = function_address(libc(), "pread64") or function_address(libc(), "pread")
_ERRNO = function_address(libc(), "__errno_location")


@njit(nogil=True)
def _pread_extent(
    pread: Any,
    errno_location: Any,
    handle: Any,
    staging: Any,
    wanted: Any,
    expected: Any,
    offset: Any,
    counters: Any,
) -> Any:
    """Read an extent whole. Returns bytes read (short only at the end of the file), or a negative errno."""
    got = np.int64(0)
    while got < expected:
        r = call_pread(pread, np.int32(handle), staging + got, wanted - got, offset + got)
        if r < 0:
            error = np.int64(load_i32(call_i64(errno_location)))
            if error == 4 or error == 11:  # EINTR, EAGAIN
                counters[C.SHORT_READS] += 1
                continue
            return -error
        if r == 0:
            break
        got += r
        if got < expected:
            # The rest must start at a page again for direct I/O: go back to the last whole one.
            counters[C.SHORT_READS] += 1
            if r < PAGE_BYTES:
                break
            got -= got % PAGE_BYTES
    return got


@njit(cache=True, nogil=True)
def _work(
    lane: int,
    mapped: bool,
    staging: int,
    pread: int,
    errno_location: int,
    clock: int,
    scratch: int,
    counters: NDArray[np.int64],
) -> None:
    """Take extents of a lane until there are none."""
    extents = load_i64(lane + L.EXTENTS * 8)
    pages_per_file = load_i64(lane + L.PAGES_PER_FILE * 8)
    file_bytes = load_i64(lane + L.FILE_BYTES * 8)
    while load_i64(lane + L.CANCEL * 8) == 0 and load_i64(lane + L.ERROR_CLAIM * 8) == 0:
        extent = atomic_add(lane + L.NEXT * 8, 1)
        if extent >= extents:
            return
        page = load_i64(load_i64(lane + L.EXTENT_PAGE * 8) + 8 * extent)
        pages = np.int64(load_i32(load_i64(lane + L.EXTENT_PAGES * 8) + 4 * extent))
        file = page // pages_per_file
        offset = (page - file * pages_per_file) * PAGE_BYTES
        handle = load_i64(load_i64(lane + L.FILE_HANDLE * 8) + 8 * file)
        expected = min(pages * PAGE_BYTES, file_bytes - offset)
        begin = now_ns(clock, scratch)
        if mapped:
            data = handle + offset
        else:
            data = staging
            got = _pread_extent(
                pread, errno_location, handle, staging, pages * PAGE_BYTES, expected, offset, counters
            )
            if got < 0:
                report_error(lane, got, page, 0, 0)
                return
            if got < expected:
                report_error(lane, np.int64(L.ERROR_TRUNCATED), page, expected, got)
                return
            memzero(staging + expected, pages * PAGE_BYTES - expected)
        end = now_ns(clock, scratch)
        counters[C.NS_WAIT] += end - begin
        count_read(counters, expected, end - begin)
        if not deliver(lane, extent, data, clock, scratch, counters):
            return
        atomic_add(lane + L.DONE * 8, 1)


@njit(nogil=True)
def _mapped_at(lane: Any, extent: Any) -> Any:
    """The address of an extent's first page."""
    page = load_i64(load_i64(lane + L.EXTENT_PAGE * 8) + 8 * extent)
    pages_per_file = load_i64(lane + L.PAGES_PER_FILE * 8)
    file = page // pages_per_file
    return (
        load_i64(load_i64(lane + L.FILE_HANDLE * 8) + 8 * file) + (page - file * pages_per_file) * PAGE_BYTES
    )


@njit(cache=True, nogil=True)
def _take_mapped(lane: int, at_once: int, clock: int, scratch: int, counters: NDArray[np.int64]) -> None:
    """Take extents of a lane of keys, so many at once, until there are none: what a clock and a counter
    shared by threads cost is spread over them, and each can be fetched into the caches while those before it
    are verified or copied."""
    extents = load_i64(lane + L.EXTENTS * 8)
    checked = load_i64(lane + L.CHECKSUMS * 8) != 0
    short = load_i64(lane + L.ROW_BYTES * 8) <= _SHORT_ROW_BYTES
    pages_of = load_i64(lane + L.EXTENT_PAGES * 8)
    first_of = load_i64(lane + L.EXTENT_PAGE * 8)
    file_pages = load_i64(lane + L.PAGES_PER_FILE * 8)
    file_bytes = load_i64(lane + L.FILE_BYTES * 8)
    while load_i64(lane + L.CANCEL * 8) == 0 and load_i64(lane + L.ERROR_CLAIM * 8) == 0:
        first = atomic_add(lane + L.NEXT * 8, at_once)
        if first >= extents:
            return
        last = min(first + at_once, extents)
        t0 = now_ns(clock, scratch)
        if checked:
            data = _mapped_at(lane, first)
            for extent in range(first, last):
                following = _mapped_at(lane, min(extent + 1, last - 1))
                prefetch(_mapped_at(lane, min(extent + _EXTENTS_AHEAD, last - 1)))
                if not verify_extent(lane, extent, data, following):
                    return
                data = following
        t1 = now_ns(clock, scratch)
        keys_end = np.int64(load_i32(load_i64(lane + L.EXTENT_FIRST * 8) + 4 * last)) if short else 0
        for extent in range(first, last):
            copy_extent(lane, extent, _mapped_at(lane, extent), keys_end)
            offset = load_i64(first_of + 8 * extent) % file_pages * PAGE_BYTES
            pages = np.int64(load_i32(pages_of + 4 * extent))
            count_read(counters, min(pages * PAGE_BYTES, file_bytes - offset), np.int64(0))
        counters[C.NS_VERIFY] += t1 - t0
        counters[C.NS_COPY] += now_ns(clock, scratch) - t1
        atomic_add(lane + L.DONE * 8, last - first)


class PoolEngine(Engine):
    """Threads that read, as many as ``threads`` at most; see the module's text."""

    mapped: ClassVar[bool]

    def __init__(
        self, queue_depth: int, staging_bytes: int, extent_bytes_max: int, threads: int | None = None
    ) -> None:
        limit = MAPPED_THREADS_MAX if self.mapped else min(THREADS_MAX, staging_bytes // extent_bytes_max)
        count = max(1, min(queue_depth, limit, threads or limit))
        super().__init__(count, 0 if self.mapped else staging_bytes, extent_bytes_max, count)
        self._staging = aligned_buffer(self.staging_bytes)
        self._counters = new_counters(self.threads)
        self._scratch = np.zeros((self.threads, 8), np.int64)  # a cache line each
        self._free = list(range(self.threads))
        self._lock = threading.Lock()
        self._closed = False
        self._pool = thread_pool(self.threads, f"featstore-{self.name}")

    def start(self, lane: Lane) -> None:
        self.check(lane)
        if self._closed:
            raise ClosedError("the engine is closed")
        if self.mapped:
            try:
                lane.files.check_sizes()
            except CorruptionError as error:
                lane.failure = error
                submitted(self._pool, lane.on_done, lane)
                return
        workers = min(self.threads, max(1, lane.extents))
        left = [workers]
        for started in range(workers):
            try:
                self._pool.submit(self._run, lane, left)
            except RuntimeError as error:  # no more threads: those there are do the work
                with self._lock:
                    left[0] -= workers - started
                    nobody = left[0] == 0
                if nobody:
                    if started:  # they were through already
                        lane.on_done(lane)
                        return
                    raise no_thread(error) from error
                return

    def _run(self, lane: Lane, left: list[int]) -> None:
        with self._lock:
            k = self._free.pop()
        try:
            scratch, counters = address_of(self._scratch[k]), self._counters[k]
            by_key = self.mapped and not lane.fields[L.SPANS]
            if by_key:
                fitting = _PAGES_AT_ONCE * lane.extents // max(1, lane.pages)
                at_once = max(1, min(fitting, lane.extents // (4 * self.threads)))
                _take_mapped(lane.address, at_once, CLOCK_GETTIME, scratch, counters)
            if not by_key or not lane.extents:  # what reads nothing loads both
                staging = address_of(self._staging) + k * self.extent_bytes_max
                _work(
                    lane.address, self.mapped, staging, _PREAD, _ERRNO, CLOCK_GETTIME, scratch, counters
                )  # fmt: skip
        except BaseException as error:  # the kernel could not be run: whoever waits must hear of it
            lane.failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
        finally:
            with self._lock:
                self._free.append(k)
                left[0] -= 1
                last = left[0] == 0
        if last:
            lane.on_done(lane)

    def counters(self) -> NDArray[np.int64]:
        total: NDArray[np.int64] = self._counters.sum(axis=0)
        return total

    def close(self) -> None:
        self._closed = True
        shut_down(self._pool)


class ThreadsEngine(PoolEngine):
    """Blocking reads on up to 32 threads."""

    name = "threads"
    access: ClassVar[Access] = "direct"
    mapped = False


class MappedEngine(PoolEngine):
    """Reads through memory mappings."""

    name = "mmap"
    access: ClassVar[Access] = "mapped"
    mapped = True
