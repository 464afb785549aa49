"""Rows from one place in memory to another: the one kernel that gathers, scatters and moves them.

Rows lie anywhere, so that each costs the latency of memory unless it was asked for before: those a few places
ahead are prefetched. Of long rows only the beginning is, for the processor follows once it reads on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.native import STREAM_BYTES, memcpy, prefetch, stream_vector

#: Instead of places of rows: they lie one after the other.
IN_ORDER = np.empty(0, np.int32)

#: Results from this size on are written past the caches.
STREAMED_BYTES_MIN = 8 * 2**20

_AHEAD = 12  # rows
_PREFETCH_BYTES = 1024  # of each; of rows of less, half as much, or all where they are shorter still
_HALF_BYTES = 512
_LINE_BYTES = 64


@njit(nogil=True, inline="always")
def expect_row(row: int, row_bytes: int) -> None:
    """The row at an address will be read soon."""
    # Loops of a known length become straight code: with the one below alone, two threads take a fifth longer.
    if row_bytes >= _HALF_BYTES:
        for line in range(0, _HALF_BYTES, _LINE_BYTES):
            prefetch(row + line)
        if row_bytes >= _PREFETCH_BYTES:
            for line in range(_HALF_BYTES, _PREFETCH_BYTES, _LINE_BYTES):
                prefetch(row + line)
    else:
        for line in range(0, row_bytes, _LINE_BYTES):
            prefetch(row + line)


@njit(nogil=True)
def stream_row(to: Any, source: Any, row_bytes: Any) -> None:
    """Copy a row past the caches: its size and its place are multiples of STREAM_BYTES. Call ``fence`` after
    the last one."""
    for at in range(0, row_bytes, STREAM_BYTES):
        stream_vector(to + at, source + at)


@njit(cache=True, nogil=True)
def move_rows(
    source: int, source_rows: NDArray[Any], target: int, target_rows: NDArray[Any], row_bytes: int
) -> None:
    """target[target_rows[i]] = source[source_rows[i]] for each i in turn; rows of ``row_bytes`` at two
    addresses.

    ``source_rows``, ``target_rows``: integers [rows]; :data:`IN_ORDER`, or any that are empty, on a side
    where rows lie one after the other. Where both are empty, there are none.
    """
    # Three loops, and in none of them a test that comes out the same for each row: short rows would feel it.
    if source_rows.shape[0] == 0:
        for i in range(target_rows.shape[0]):
            memcpy(target + np.int64(target_rows[i]) * row_bytes, source + i * row_bytes, row_bytes)
    elif target_rows.shape[0] == 0:
        for i in range(source_rows.shape[0]):
            if i + _AHEAD < source_rows.shape[0]:
                expect_row(source + np.int64(source_rows[i + _AHEAD]) * row_bytes, row_bytes)
            memcpy(target + i * row_bytes, source + np.int64(source_rows[i]) * row_bytes, row_bytes)
    else:
        for i in range(source_rows.shape[0]):
            if i + _AHEAD < source_rows.shape[0]:
                expect_row(source + np.int64(source_rows[i + _AHEAD]) * row_bytes, row_bytes)
            memcpy(
                target + np.int64(target_rows[i]) * row_bytes,
                source + np.int64(source_rows[i]) * row_bytes,
                row_bytes,
            )
