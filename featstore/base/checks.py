"""Numbers that come from files, checked once, before any kernel follows them.

A kernel that takes an index from a file reads and writes wherever that index points, and a store may come
from a stranger: digests and checksums find accidents, not lies. So whatever is loaded to be used as an index
goes through one of these first. Each is one pass (a few passes for very long maps), and none takes more
memory than ``MARKS_BYTES``, about what loading an array takes anyway.

Comparisons are made between the numbers themselves: a difference of two of them may wrap around.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.errors import FormatError

__all__ = ["check_distinct", "check_inverse", "check_offsets", "check_range"]

#: Memory for marking rows, at most.
MARKS_BYTES = 4 * 2**20
_ADVICE = "run `featstore verify` on it, and restore it from a copy or make it again"


@njit(cache=True, nogil=True)
def find_fall(offsets: NDArray[Any]) -> int:
    """The first index whose number is smaller than the one before it, or -1."""
    falls = 0
    for i in range(1, offsets.shape[0]):  # without a way out, this is done several at a time
        falls += offsets[i] < offsets[i - 1]
    if falls == 0:
        return -1
    i = 1
    while offsets[i] >= offsets[i - 1]:
        i += 1
    return i


@njit(cache=True, nogil=True)
def find_outside(values: NDArray[Any], end: int) -> int:
    """The first index whose number is not from 0 to ``end`` - 1, or -1."""
    outside = 0
    for i in range(values.shape[0]):  # without a way out, this is done several at a time
        outside += (values[i] < 0) | (values[i] >= end)
    if outside == 0:
        return -1
    i = 0
    while values[i] >= 0 and values[i] < end:
        i += 1
    return i


@njit(cache=True, nogil=True)
def find_repeated(values: NDArray[Any], low: int, high: int, marks: NDArray[np.uint64]) -> int:
    """The first index whose number from ``low`` to ``high`` - 1 stood there before, or -1. ``marks``: a zero
    bit for each of these."""
    for i in range(values.shape[0]):
        value = np.int64(values[i])
        if value >= low and value < high:
            at = value - low
            bit = np.uint64(1) << np.uint64(at & 63)
            if marks[at >> 6] & bit:
                return i
            marks[at >> 6] |= bit
    return -1


@njit(cache=True, nogil=True)
def find_stray(there: NDArray[Any], back: NDArray[Any]) -> int:
    """The first index i with ``back[there[i]]`` other than i, or -1. Both of one length, numbers in range."""
    for i in range(there.shape[0]):
        if back[there[i]] != i:
            return i
    return -1


def check_offsets(offsets: NDArray[Any], begin: int, end: int, what: str) -> None:
    """Raise FormatError unless ``offsets`` (integers [n], n at least 1) go from ``begin`` to ``end`` and
    never fall."""
    first, last = int(offsets[0]), int(offsets[-1])
    if first != begin or last != end:
        raise FormatError(
            f"{what} do not run from {begin:,} to {end:,}, but from {first:,} to {last:,}: {_ADVICE}"
        )
    bad = int(find_fall(offsets))
    if bad >= 0:
        raise FormatError(
            f"{what} do not run from {begin:,} to {end:,}: number {bad:,} falls from "
            f"{int(offsets[bad - 1]):,} to {int(offsets[bad]):,}; {_ADVICE}"
        )


def check_range(values: NDArray[Any], end: int, what: str) -> None:
    """Raise FormatError unless all of ``values`` (integers [n]) are from 0 to ``end`` - 1."""
    bad = int(find_outside(values, end))
    if bad >= 0:
        raise FormatError(
            f"{what} points outside the {end:,} rows: number {bad:,} is {int(values[bad]):,}; {_ADVICE}"
        )


def check_distinct(values: NDArray[Any], end: int, what: str) -> None:
    """Raise FormatError unless ``values`` (integers [n]) are from 0 to ``end`` - 1, and none stands there
    twice: where n is ``end``, a permutation."""
    check_range(values, end, what)
    window = 8 * MARKS_BYTES
    for low in range(0, end if len(values) else 0, window):
        high = min(end, low + window)
        bad = int(find_repeated(values, low, high, np.zeros(-(-(high - low) // 64), np.uint64)))
        if bad >= 0:
            raise FormatError(
                f"{what} has row {int(values[bad]):,} twice, the second time as number {bad:,}; {_ADVICE}"
            )


def check_inverse(there: NDArray[Any], back: NDArray[Any], what: str) -> None:
    """Raise FormatError unless two maps of one length are permutations, each the other's inverse."""
    for values in (there, back):
        check_range(values, len(values), what)
    bad = int(find_stray(there, back))
    if bad >= 0:
        raise FormatError(
            f"{what} do not belong together: {bad:,} leads to {int(there[bad]):,}, and that back to "
            f"{int(back[there[bad]]):,}; {_ADVICE}"
        )
