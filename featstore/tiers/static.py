"""The static host tier: a fixed set of rows, kept for good.

Power-law graphs ask for a few nodes again and again; keeping the rows of the nodes with the highest degree (or of any given
set) is the oldest cache of graph training (PaGraph, SoCC'20; HierBatching's static cache; DiskGNN's host level). The set is a
bitmap over all rows with a running count for each 512 bits, so a lookup is a bit test and at most eight population counts
at 0.16 bytes a row of the table; a member's slot is its rank, so rows lie in the tier in row order and fill it sequentially.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from featstore.native import address_of, memcpy, popcount, prefetch

_BLOCK_BITS = 512
_WORDS_PER_BLOCK = _BLOCK_BITS // 64
_AHEAD = 8  # rows prefetched ahead of the copy


@njit(cache=True, nogil=True)
def set_bits(rows: NDArray[np.int64], bits: NDArray[np.uint64], ranks: NDArray[np.int32]) -> int:
    """Make the bitmap of a set of rows, and the number of members before each block. Returns the number of members."""
    for i in range(rows.shape[0]):
        bits[rows[i] >> 6] |= np.uint64(1) << np.uint64(rows[i] & 63)
    total = 0
    for block in range(ranks.shape[0]):
        ranks[block] = total
        for word in range(block * _WORDS_PER_BLOCK, min((block + 1) * _WORDS_PER_BLOCK, bits.shape[0])):
            total += popcount(bits[word])
    return total


@njit(cache=True, nogil=True)
def find_slots(rows: NDArray[np.int64], bits: NDArray[np.uint64], ranks: NDArray[np.int32], slots: NDArray[np.int32]) -> int:
    """slots[i] = rank of rows[i] in the set, or -1. Returns the number of members among the rows."""
    hits = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        word = bits[row >> 6]
        bit = np.uint64(row & 63)
        if (word >> bit) & np.uint64(1):
            rank = np.int64(ranks[row >> 9])
            for before in range((row >> 9) * _WORDS_PER_BLOCK, row >> 6):
                rank += popcount(bits[before])
            rank += popcount(word & ((np.uint64(1) << bit) - np.uint64(1)))
            slots[i] = rank
            hits += 1
        else:
            slots[i] = -1
    return hits


@njit(cache=True, nogil=True)
def take_rows(slots: NDArray[np.int32], positions: NDArray[np.int32], data: int, row_bytes: int, out: int) -> None:
    """Copy row slots[i] to row positions[i] of out (row i where there are no positions), for every slot that is not negative.
    ``data`` and ``out`` are addresses."""
    n = slots.shape[0]
    in_order = positions.shape[0] == 0
    for i in range(n):
        if i + _AHEAD < n and slots[i + _AHEAD] >= 0:
            ahead = data + np.int64(slots[i + _AHEAD]) * row_bytes
            for line in range(0, min(row_bytes, 1024), 64):
                prefetch(ahead + line)
        if slots[i] >= 0:
            to = i if in_order else np.int64(positions[i])
            memcpy(out + to * row_bytes, data + np.int64(slots[i]) * row_bytes, row_bytes)


class StaticTier:
    """A fixed set of rows of one table; see the module's text.

    ``members``: int64, ascending, distinct. The caller fills ``data`` (uint8 [members, row_bytes]) in that order before
    the tier is asked for the first time.
    """

    name = "static"

    def __init__(self, members: NDArray[np.int64], table_rows: int, row_bytes: int) -> None:
        words = -(-table_rows // 64)
        self._bits = np.zeros(words, np.uint64)
        self._ranks = np.zeros(-(-words // _WORDS_PER_BLOCK), np.int32)
        self.rows = set_bits(members, self._bits, self._ranks)
        if self.rows != len(members):
            raise ValueError("the rows of a static tier must be distinct")
        self.row_bytes = row_bytes
        self.data = np.empty((self.rows, row_bytes), np.uint8)

    @staticmethod
    def index_bytes(table_rows: int) -> int:
        """Memory of the structures that find rows, for a table of so many rows."""
        words = -(-table_rows // 64)
        return 8 * words + 4 * -(-words // _WORDS_PER_BLOCK)

    @property
    def memory_bytes(self) -> int:
        return self.data.nbytes + self._bits.nbytes + self._ranks.nbytes

    def find(self, rows: NDArray[np.int64], slots: NDArray[np.int32]) -> int:
        return int(find_slots(rows, self._bits, self._ranks, slots))

    def take(self, slots: NDArray[np.int32], positions: NDArray[np.int32], out: NDArray[Any]) -> None:
        take_rows(slots, positions, address_of(self.data), self.row_bytes, address_of(out))
