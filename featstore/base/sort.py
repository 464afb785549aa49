"""Sorting of 64-bit keys."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit

_RADIX_BITS = 11


@njit(cache=True, nogil=True)
def radix_sort(keys: NDArray[np.uint64], spare: NDArray[np.uint64], low_bit: int, high_bit: int) -> bool:
    """Sort by the bits [low_bit, high_bit), stable, least significant digit first. Returns True if the result
    is in ``spare``."""
    n = keys.shape[0]
    counts = np.empty(1 << _RADIX_BITS, np.int64)
    source, target, swapped = keys, spare, False
    shift = low_bit
    while shift < high_bit:
        digit_bits = min(_RADIX_BITS, high_bit - shift)
        mask = np.uint64((1 << digit_bits) - 1)
        by = np.uint64(shift)
        counts[:] = 0
        for i in range(n):
            counts[(source[i] >> by) & mask] += 1
        begin = 0
        for digit in range(1 << digit_bits):
            count = counts[digit]
            counts[digit] = begin
            begin += count
        for i in range(n):
            digit = (source[i] >> by) & mask
            target[counts[digit]] = source[i]
            counts[digit] += 1
        source, target = target, source
        swapped = not swapped
        shift += digit_bits
    return swapped
