"""What every engine does with pages that have arrived: verify them, then copy their rows to where they are
wanted.

:func:`deliver` runs inside the engines' kernels, on addresses. A row may lie across pages; each page that
holds a byte of a wanted row is verified once per read, pages that were read only to bridge a gap are not
looked at.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from featstore.base.checksum import crc_page
from featstore.base.clock import now_ns
from featstore.base.compilation import njit
from featstore.base.native import (
    STREAM_BYTES,
    atomic_add,
    fence,
    load_i32,
    load_i64,
    load_shared,
    load_u8,
    load_u32,
    load_u64,
    memcpy,
    store_i64,
    store_u8,
    stream_vector,
)
from featstore.base.rows import expect_row
from featstore.engine import counters as C
from featstore.engine import lane as L
from featstore.units import PAGE_BYTES

_TIMED_PAGES = 8  # of a span, of which the check of one is timed
_STREAMED_MIN = 64 * 2**10  # bytes of a span that is copied past the caches
_ROWS_AHEAD = 4  # whose places are fetched into the caches before they are copied

_EXTENT_PAGE, _EXTENT_FIRST, _KEYS, _POSITION_BITS = (
    L.EXTENT_PAGE * 8,
    L.EXTENT_FIRST * 8,
    L.KEYS * 8,
    L.POSITION_BITS * 8,
)
_SPANS = L.SPANS * 8
_OUT, _ROW_BYTES, _CHECKSUMS = L.OUT * 8, L.ROW_BYTES * 8, L.CHECKSUMS * 8
_ERROR, _ERROR_PAGE, _ERROR_EXPECTED = L.ERROR * 8, L.ERROR_PAGE * 8, L.ERROR_EXPECTED * 8
_ERROR_ACTUAL, _ERROR_CLAIM = L.ERROR_ACTUAL * 8, L.ERROR_CLAIM * 8


@njit(nogil=True)
def report_error(lane: Any, code: Any, page: Any, expected: Any, actual: Any) -> None:
    """Note an error in a lane; the first one stays."""
    if atomic_add(lane + _ERROR_CLAIM, 1) == 0:
        store_i64(lane + _ERROR_PAGE, page)
        store_i64(lane + _ERROR_EXPECTED, expected)
        store_i64(lane + _ERROR_ACTUAL, actual)
        store_i64(lane + _ERROR, code)


@njit(nogil=True)
def _verify_page(lane: Any, page: Any, data: Any, following: Any, checked: Any) -> Any:
    """Check the page at ``data`` while the one at ``following`` is fetched; the bit of a right one is set at
    ``checked``, where that is not 0. Returns whether it is right."""
    actual = crc_page(data, following)
    expected = load_u32(load_i64(lane + _CHECKSUMS) + 4 * page)
    if actual != expected:
        report_error(lane, np.int64(L.ERROR_CORRUPT), page, np.int64(expected), np.int64(actual))
        return False
    if checked != 0:  # another thread may set a bit beside it at the same time, and one is lost: no harm
        at = checked + (page >> 3)
        store_u8(at, load_u8(at) | np.uint8(1 << (page & 7)))
    return True


@njit(nogil=True)
def _verify(
    lane: Any, extent_page: Any, first: Any, last: Any, data: Any, following: Any, checked: Any, trusted: Any
) -> Any:
    """Check every page that holds wanted rows. Returns whether all are right.

    ``checked``: 0, or the address of bits, of which those of right pages are set. ``trusted``: what has its
    bit is not checked but looked at.
    """
    keys = load_i64(lane + _KEYS)
    bits = np.uint64(load_i64(lane + _POSITION_BITS))
    row_bytes = load_i64(lane + _ROW_BYTES)
    base = data - extent_page * PAGE_BYTES
    seen = held = np.int64(-1)  # the page to check as soon as it is known which one follows
    for k in range(first, last):
        begin = np.int64(load_u64(keys + 8 * k) >> bits) * row_bytes
        page = max(seen + 1, begin // PAGE_BYTES)
        while page <= (begin + row_bytes - 1) // PAGE_BYTES:
            seen = page
            if trusted and load_u8(checked + (page >> 3)) >> np.uint8(page & 7) & 1:
                load_shared(base + max(begin, page * PAGE_BYTES) // 8 * 8)
            else:
                if held >= 0 and not _verify_page(
                    lane, held, base + held * PAGE_BYTES, base + page * PAGE_BYTES, checked
                ):
                    return False
                held = page
            page += 1
    return held < 0 or _verify_page(lane, held, base + held * PAGE_BYTES, following, checked)


@njit(nogil=True)
def _stream(to: Any, source: Any, byte_count: Any) -> None:
    """Copy bytes past the caches: the lines they go to are not read first."""
    at = min(-to & (STREAM_BYTES - 1), byte_count)
    memcpy(to, source, at)
    while at + STREAM_BYTES <= byte_count:
        stream_vector(to + at, source + at)
        at += STREAM_BYTES
    memcpy(to + at, source + at, byte_count - at)


@njit(nogil=True)
def _deliver_span(
    lane: Any, extent: Any, extent_page: Any, data: Any, clock: Any, scratch: Any, counters: Any
) -> Any:
    """Verify and copy the one span of bytes that is wanted of an extent, page by page, so that one is copied
    from the nearest cache while the next comes from memory; a long span past the caches. Of a few pages the
    last is looked at by the clock, to tell what checking takes."""
    span = load_i64(lane + _SPANS) + 24 * extent
    begin, end, to = load_i64(span), load_i64(span + 8), load_i64(span + 16)
    out, base = load_i64(lane + _OUT) + to - begin, data - extent_page * PAGE_BYTES
    checked, streamed = load_i64(lane + _CHECKSUMS) != 0, end - begin >= _STREAMED_MIN
    t0 = now_ns(clock, scratch)
    while begin < end:
        first = begin // PAGE_BYTES
        last = min(first + _TIMED_PAGES, (end - 1) // PAGE_BYTES + 1) - 1
        verify_ns = np.int64(0)
        for page in range(first, last + 1):
            if checked:
                at = base + page * PAGE_BYTES
                if page == last:
                    verify_ns = -now_ns(clock, scratch)
                if not _verify_page(lane, page, at, at + PAGE_BYTES, 0):
                    return False
                if page == last:
                    verify_ns += now_ns(clock, scratch)
            upto = min(end, (page + 1) * PAGE_BYTES)
            if streamed:
                _stream(out + begin, base + begin, upto - begin)
            else:
                memcpy(out + begin, base + begin, upto - begin)
            begin = upto
        t1 = now_ns(clock, scratch)
        verify_ns = min(verify_ns * (last + 1 - first), t1 - t0)
        counters[C.NS_VERIFY] += verify_ns
        counters[C.NS_COPY] += t1 - t0 - verify_ns
        t0 = t1
    if streamed:
        fence()
    return True


@njit(nogil=True)
def _scatter(lane: Any, extent_page: Any, first: Any, last: Any, data: Any, keys_end: Any) -> None:
    keys = load_i64(lane + _KEYS)
    bits = np.uint64(load_i64(lane + _POSITION_BITS))
    row_bytes = load_i64(lane + _ROW_BYTES)
    out = load_i64(lane + _OUT)
    mask = (np.uint64(1) << bits) - np.uint64(1)
    base = data - extent_page * PAGE_BYTES
    for k in range(first, last):
        if k + _ROWS_AHEAD < keys_end:
            key = load_u64(keys + 8 * (k + _ROWS_AHEAD))
            expect_row(base + np.int64(key >> bits) * row_bytes, row_bytes)
            expect_row(out + np.int64(key & mask) * row_bytes, row_bytes)
        key = load_u64(keys + 8 * k)
        memcpy(out + np.int64(key & mask) * row_bytes, base + np.int64(key >> bits) * row_bytes, row_bytes)


@njit(nogil=True)
def verify_extent(lane: Any, extent: Any, data: Any, following: Any, checked: Any, trusted: Any) -> Any:
    """Verify the pages of an extent of keys, which lie at ``data``; the next page that will be is that at
    ``following``. ``checked``, ``trusted``: see :func:`_verify`. Returns False after an error, which is then
    noted in the lane."""
    first = np.int64(load_i32(load_i64(lane + _EXTENT_FIRST) + 4 * extent))
    last = np.int64(load_i32(load_i64(lane + _EXTENT_FIRST) + 4 * extent + 4))
    page = load_i64(load_i64(lane + _EXTENT_PAGE) + 8 * extent)
    return _verify(lane, page, first, last, data, following, checked, trusted)


@njit(nogil=True)
def copy_extent(lane: Any, extent: Any, data: Any, keys_end: Any) -> None:
    """Copy the rows of an extent of keys, which lies at ``data``, to where they are wanted. Those of keys
    before ``keys_end`` lie as in the file (0: only this extent does) and are copied next."""
    first = np.int64(load_i32(load_i64(lane + _EXTENT_FIRST) + 4 * extent))
    last = np.int64(load_i32(load_i64(lane + _EXTENT_FIRST) + 4 * extent + 4))
    _scatter(lane, load_i64(load_i64(lane + _EXTENT_PAGE) + 8 * extent), first, last, data, keys_end)


@njit(nogil=True)
def deliver(lane: Any, extent: Any, data: Any, clock: Any, scratch: Any, counters: Any) -> Any:
    """Verify the pages of one extent, which lie at ``data``, and copy its rows out.

    The counters grow by the nanoseconds spent verifying and copying. Returns False after an error, which is
    then noted in the lane.
    """
    extent_page = load_i64(load_i64(lane + _EXTENT_PAGE) + 8 * extent)
    if load_i64(lane + _SPANS) != 0:
        return _deliver_span(lane, extent, extent_page, data, clock, scratch, counters)
    t0 = now_ns(clock, scratch)
    if load_i64(lane + _CHECKSUMS) != 0 and not verify_extent(lane, extent, data, data, 0, False):
        return False
    t1 = now_ns(clock, scratch)
    copy_extent(lane, extent, data, 0)
    counters[C.NS_VERIFY] += t1 - t0
    counters[C.NS_COPY] += now_ns(clock, scratch) - t1
    return True


@njit(nogil=True)
def count_read(counters: Any, read_bytes: Any, latency_ns: Any) -> None:
    """Count one finished read and its latency."""
    counters[C.READS] += 1
    counters[C.BYTES_READ] += read_bytes
    bucket = 0
    left = latency_ns >> 10
    while left > 0 and bucket < C.LATENCY_BUCKETS - 1:
        left >>= 1
        bucket += 1
    counters[C.LATENCY + bucket] += 1
