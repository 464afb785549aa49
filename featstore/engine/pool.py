"""Engines on plain threads: ``preadv``-style reads, and memory mappings.

Each of a fixed number of threads runs one GIL-free kernel that takes the lane's next extent with an atomic
addition, reads it into the thread's own staging, verifies and delivers it, until the lane is exhausted. When
a thread finds no more extents in one lane it takes the next lane from the queue, so the device stays busy
between requests. The threads engine works wherever Linux does and is the fallback for io_uring; its system
calls are ``pread`` (``preadv`` of one buffer).

The mapped engine delivers straight from the page cache through ``mmap``. It needs no staging and is the
fastest when the whole table is warm in memory; cold, every page is a fault. After a lane whose pages were all
in memory, the next has a thread a core: more would take turns, and each other's caches.

Through a mapping a page is checked when it has come into memory, and not again as long as it has stayed
there. It has where no thread of the reader had to wait for, or to look up, any page of its mappings since
(the system counts both for each thread): the first such page, whichever it is, ends the trust in all. Bits
for pages that were checked take the memory that other engines stage pages in; tables of more pages than that
has bits are checked at each read.

A device error or a file
truncated *during* a read raises SIGBUS, which ends the process: sizes are checked before each lane, but the
race remains. Prefer the other engines.
"""

from __future__ import annotations

import resource
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
    load_shared,
    load_u64,
    memzero,
    prefetch,
)
from featstore.base.page_faults import GETRUSAGE, page_faults
from featstore.base.system import available_cores, no_thread, submitted
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
from featstore.engine.files import Access, Checked
from featstore.engine.lane import Lane
from featstore.errors import ClosedError, CorruptionError
from featstore.units import PAGE_BYTES

THREADS_MAX = 32
MAPPED_THREADS_MAX = 8
_PAGES_AT_ONCE = 128  # about so many, in extents of a mapping, a thread takes together
_SHORT_ROW_BYTES = 1024  # up to here rows are fetched before they are copied
_FAULTS_SHARE = 256  # where one in so many extents was not in memory, threads wait more than they work
_EXTENTS_AHEAD = 3  # of which one line is fetched, so that the processor knows by then where the page is
_ROWS_AHEAD = 8  # the same of pages that need not be checked: the line that is wanted
_USAGE = 64  # where in a thread's scratch there is room for what page_faults counts
_SCRATCH_BYTES = 256

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


@njit(nogil=True)
def _note_faults(lane: Any, faults: Any) -> None:
    """Some pages of the mappings were not in memory: what was checked before may not be what is there now."""
    atomic_add(lane + L.FAULTS * 8, faults)
    atomic_add(load_i64(lane + L.ALL_FAULTS * 8), faults)


@njit(cache=True, nogil=True)
def _work(
    lane: int,
    mapped: bool,
    staging: int,
    pread: int,
    getrusage: int,
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
        before = np.int64(0)
        if mapped:
            data = handle + offset
            before = page_faults(getrusage, scratch + _USAGE)[1]
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
        right = deliver(lane, extent, data, clock, scratch, counters)
        if mapped:
            faults = page_faults(getrusage, scratch + _USAGE)[1] - before
            if faults > 0:  # some may be of where the rows go
                _note_faults(lane, faults)
        if not right:
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


@njit(nogil=True)
def _expect_row_of(lane: Any, extent: Any) -> None:
    """The first row of an extent will be looked at soon."""
    keys = load_i64(lane + L.KEYS * 8)
    first = np.int64(load_i32(load_i64(lane + L.EXTENT_FIRST * 8) + 4 * extent))
    row = np.int64(load_u64(keys + 8 * first) >> np.uint64(load_i64(lane + L.POSITION_BITS * 8)))
    page = load_i64(load_i64(lane + L.EXTENT_PAGE * 8) + 8 * extent)
    prefetch(_mapped_at(lane, extent) + row * load_i64(lane + L.ROW_BYTES * 8) - page * PAGE_BYTES)


@njit(nogil=True)
def _verify_extents(lane: Any, first: Any, last: Any, checked: Any, trusted: Any) -> Any:
    """Check the pages of some extents; those that are noted in the bits at ``checked`` are looked at where
    they are ``trusted``. Returns whether all are right."""
    data = _mapped_at(lane, first)
    for extent in range(first, last):
        following = _mapped_at(lane, min(extent + 1, last - 1))
        if trusted:
            _expect_row_of(lane, min(extent + _ROWS_AHEAD, last - 1))
        else:
            prefetch(_mapped_at(lane, min(extent + _EXTENTS_AHEAD, last - 1)))
        if not verify_extent(lane, extent, data, following, checked, trusted):
            return False
        data = following
    return True


@njit(cache=True, nogil=True)
def _take_mapped(
    lane: int, at_once: int, getrusage: int, clock: int, scratch: int, counters: NDArray[np.int64]
) -> None:
    """Take extents of a lane of keys, so many at once, until there are none: what a clock and a counter
    shared by threads cost is spread over them, and each can be fetched into the caches while those before it
    are verified or copied."""
    extents = load_i64(lane + L.EXTENTS * 8)
    verified = load_i64(lane + L.CHECKSUMS * 8) != 0
    checked, all_faults = load_i64(lane + L.CHECKED * 8), load_i64(lane + L.ALL_FAULTS * 8)
    trusted_at = load_i64(lane + L.TRUSTED_AT * 8)
    short = load_i64(lane + L.ROW_BYTES * 8) <= _SHORT_ROW_BYTES
    pages_of = load_i64(lane + L.EXTENT_PAGES * 8)
    first_of = load_i64(lane + L.EXTENT_PAGE * 8)
    file_pages = load_i64(lane + L.PAGES_PER_FILE * 8)
    file_bytes = load_i64(lane + L.FILE_BYTES * 8)
    waited = np.int64(0)
    while load_i64(lane + L.CANCEL * 8) == 0 and load_i64(lane + L.ERROR_CLAIM * 8) == 0:
        first = atomic_add(lane + L.NEXT * 8, at_once)
        if first >= extents:
            return
        last = min(first + at_once, extents)
        t0 = now_ns(clock, scratch)
        if verified:
            trusted = checked != 0 and load_shared(all_faults) == trusted_at
            before = page_faults(getrusage, scratch + _USAGE)[1]
            right = _verify_extents(lane, first, last, checked, trusted)
            waited, faults = page_faults(getrusage, scratch + _USAGE)
            if faults > before:  # also of a page before a wrong one
                _note_faults(lane, faults - before)
                right = right and (not trusted or _verify_extents(lane, first, last, checked, False))
            if not right:
                return
        t1 = now_ns(clock, scratch)
        keys_end = np.int64(load_i32(load_i64(lane + L.EXTENT_FIRST * 8) + 4 * last)) if short else 0
        for extent in range(first, last):
            copy_extent(lane, extent, _mapped_at(lane, extent), keys_end)
            offset = load_i64(first_of + 8 * extent) % file_pages * PAGE_BYTES
            pages = np.int64(load_i32(pages_of + 4 * extent))
            count_read(counters, min(pages * PAGE_BYTES, file_bytes - offset), np.int64(0))
        if verified:
            faults = page_faults(getrusage, scratch + _USAGE)[0] - waited
            if faults > 0:  # where the rows go there is nothing to wait for
                _note_faults(lane, faults)
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
        self._checked_bytes = staging_bytes if self.mapped else 0  # that bits for pages may still take
        self._scratch = np.zeros((self.threads, _SCRATCH_BYTES // 8), np.int64)
        self._free = list(range(self.threads))
        self._lock = threading.Lock()
        self._closed = False
        self._waits = True  # whether a thread waits, so that more than there are cores are of use
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
            checked = lane.checked = lane.files.checked
            lane.fields[L.ALL_FAULTS] = address_of(lane.files.faults)
            if checked is not None:
                lane.fields[L.CHECKED], lane.fields[L.TRUSTED_AT] = address_of(checked.bits), checked.faults
        threads = self.threads if self._waits else min(self.threads, available_cores())
        workers = min(threads, max(1, lane.extents))
        left = [workers, 0]
        for started in range(workers):
            try:
                self._pool.submit(self._run, lane, left)
            except RuntimeError as error:  # there is no thread at all, or the pool has been shut down since
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
        """``left``: threads that have not come back, and pages that those that have waited for."""
        with self._lock:
            k = self._free.pop()
        faults = -_major_faults()
        try:
            scratch, counters = address_of(self._scratch[k]), self._counters[k]
            by_key = self.mapped and not lane.fields[L.SPANS]
            if by_key:
                fitting = _PAGES_AT_ONCE * lane.extents // max(1, lane.pages)
                at_once = max(1, min(fitting, lane.extents // (4 * self.threads)))
                _take_mapped(lane.address, at_once, GETRUSAGE, CLOCK_GETTIME, scratch, counters)
            if not by_key or not lane.extents:  # what reads nothing loads both
                staging = address_of(self._staging) + k * self.extent_bytes_max
                _work(
                    lane.address, self.mapped, staging, _PREAD, GETRUSAGE, _ERRNO, CLOCK_GETTIME, scratch,
                    counters,
                )  # fmt: skip
        except BaseException as error:  # the kernel could not be run: whoever waits must hear of it
            lane.failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
        finally:
            with self._lock:
                self._free.append(k)
                left[0] -= 1
                left[1] += faults + _major_faults()
                last = left[0] == 0
                if last and self.mapped:
                    self._waits = left[1] * _FAULTS_SHARE > lane.extents
                    self._note_checked(lane)
        if last:
            lane.on_done(lane)

    def _note_checked(self, lane: Lane) -> None:
        """A lane is over: pages that are checked from now on are noted where all of its were in memory, and
        forgotten where some were not."""
        files, pages = lane.files, 0 if lane.files.checksums is None else len(lane.files.checksums)
        if lane.fields[L.FAULTS]:
            if files.checked is not None:
                files.checked = None
                self._checked_bytes += Checked.bytes_for(pages)
        elif files.checked is None and lane.extents and 0 < Checked.bytes_for(pages) <= self._checked_bytes:
            files.checked = Checked(pages, int(files.faults[0]))
            self._checked_bytes -= Checked.bytes_for(pages)

    def counters(self) -> NDArray[np.int64]:
        total: NDArray[np.int64] = self._counters.sum(axis=0)
        return total

    def close(self) -> None:
        self._closed = True
        shut_down(self._pool)


def _major_faults() -> int:
    """Of this thread: pages of mappings that it had to wait for."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


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
