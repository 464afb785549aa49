"""Sets of rows as bits with ranks: which slot is a row in?"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.native import load_i32, load_u64, popcount


@njit(cache=True, nogil=True)
def set_bits(rows: NDArray[np.int64], bits: NDArray[np.uint64], ranks: NDArray[np.int32]) -> int:
    """Make the bitmap of a set of rows, and the number of members before each word. Returns the number of
    members."""
    for i in range(rows.shape[0]):
        bits[rows[i] >> 6] |= np.uint64(1) << np.uint64(rows[i] & 63)
    total = 0
    for word in range(bits.shape[0]):
        ranks[word] = total
        total += popcount(bits[word])
    return total


@njit(nogil=True)
def slot_of(row: Any, bits: Any, ranks: Any) -> Any:
    """Rank of a row in the set, or -1."""
    word = bits[row >> 6]
    bit = np.uint64(1) << np.uint64(row & 63)
    if word & bit == 0:
        return np.int64(-1)
    return np.int64(ranks[row >> 6]) + popcount(word & (bit - np.uint64(1)))


@njit(nogil=True)
def slot_at(row: Any, bits: Any, ranks: Any) -> Any:
    """As :func:`slot_of`, of a set at two addresses."""
    word = load_u64(bits + 8 * (row >> 6))
    bit = np.uint64(1) << np.uint64(row & 63)
    if word & bit == 0:
        return np.int64(-1)
    return np.int64(load_i32(ranks + 4 * (row >> 6))) + popcount(word & (bit - np.uint64(1)))
