"""Fingerprints of rows that are not in the buffer: S3-FIFO's ghosts and the access scores of MassiveGNN, in
memory by slots.

A row belongs to one bucket of four entries, an int64 each: an odd fingerprint of 24 bits below a number, 0
for an empty entry. A full bucket gives up the entry with the smallest number. So a lookup is one cache miss;
a row is taken for another once in some two million lookups, which costs a wrong guess about a row's future
and nothing else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.native import INLINED, prefetch
from featstore.tiers.slots.layout import WAYS

FINGERPRINT_BITS = 24
FINGERPRINT_MASK = (1 << FINGERPRINT_BITS) - 1
MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)


@njit(**INLINED)
def _hash(row: Any) -> Any:
    h = np.uint64(row) * MULTIPLIER
    h ^= h >> np.uint64(32)
    return h * MULTIPLIER


@njit(**INLINED)
def _place(entries: NDArray[np.int64], row: int) -> tuple[np.int64, np.int64]:
    """The first entry of a row's bucket, and its fingerprint, from 1 on."""
    h = _hash(row)
    bucket = np.int64(h >> np.uint64(32)) & (entries.shape[0] // WAYS - 1)
    return np.int64(bucket * WAYS), np.int64(h & np.uint64(FINGERPRINT_MASK)) | 1


@njit(**INLINED)
def remember(entries: NDArray[np.int64], row: int, number: int) -> None:
    """Enter a row with a number, at the cost of the smallest of its bucket."""
    first, fingerprint = _place(entries, row)
    least = first
    for at in range(first + 1, first + WAYS):
        if entries[at] >> FINGERPRINT_BITS < entries[least] >> FINGERPRINT_BITS:
            least = at
    entries[least] = (np.int64(number) << FINGERPRINT_BITS) | fingerprint


@njit(**INLINED)
def forget(entries: NDArray[np.int64], row: int, above: int) -> np.int64:
    """Take a row out. Returns its number if it was there with one greater than ``above``, else 0."""
    first, fingerprint = _place(entries, row)
    for at in range(first, first + WAYS):
        if entries[at] & FINGERPRINT_MASK == fingerprint:
            number = entries[at] >> FINGERPRINT_BITS
            entries[at] = 0
            return np.int64(number if number > above else 0)
    return np.int64(0)


@njit(**INLINED)
def prefetch_bucket(address: int, entries: NDArray[np.int64], row: int) -> None:
    """A row's bucket will be looked at soon; ``address``: of the entries."""
    prefetch(address + 8 * _place(entries, row)[0])
