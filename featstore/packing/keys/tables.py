"""Keys in memory, to look others up: an open-addressing table over the keys of one range of hashes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.dtypes import node_dtype
from featstore.base.keys import KeyBlock
from featstore.packing.keys.spool import HashRange, KeySpool

__all__ = ["TABLE_KEY_BYTES", "KeyTable"]

#: Memory of a key in a table beside its own bytes: where they begin, hash, id, and up to three slots.
TABLE_KEY_BYTES = 40
_EMPTY = -1


@njit(cache=True, nogil=True)
def fill_slots(hashes: NDArray[np.uint64], slots: NDArray[np.int32]) -> None:
    """Enter keys 0, 1, ..., which differ, by their hashes. ``slots``: a power of two of them, empty."""
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(hashes.shape[0]):
        at = hashes[i] & mask
        while slots[at] >= 0:
            at = (at + np.uint64(1)) & mask
        slots[at] = i


@njit(cache=True, nogil=True)
def find_keys(
    wanted_hashes: NDArray[np.uint64], wanted: NDArray[np.uint8], wanted_ends: NDArray[np.int64],
    slots: NDArray[np.int32], hashes: NDArray[np.uint64], data: NDArray[np.uint8], ends: NDArray[np.int64],
    ids: NDArray[Any], out: NDArray[np.int64],
) -> None:  # fmt: skip
    """Of each wanted key that is in the table its id; ``out`` of others stays. Keys are compared byte by
    byte."""
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(wanted_hashes.shape[0]):
        at = wanted_hashes[i] & mask
        length = wanted_ends[i + 1] - wanted_ends[i]
        while slots[at] >= 0:
            key = slots[at]
            if hashes[key] == wanted_hashes[i] and ends[key + 1] - ends[key] == length:
                k = 0
                while k < length and data[ends[key] + k] == wanted[wanted_ends[i] + k]:
                    k += 1
                if k == length:
                    out[i] = ids[key]
                    break
            at = (at + np.uint64(1)) & mask


class KeyTable:
    """The keys of a spool whose hashes are in a range."""

    def __init__(self, spool: KeySpool, within: HashRange) -> None:
        text = spool.kind == "utf8"
        self._data = np.empty(within.key_bytes, np.uint8)
        self._ends = np.zeros(within.keys + 1, np.int64)
        self._hashes = np.empty(within.keys, np.uint64)
        self._ids = np.empty(within.keys, node_dtype(len(spool)))
        key = byte = 0
        for first, block, hashes in spool.blocks():
            taken = np.flatnonzero(within.has(hashes))
            if len(taken) < len(block):
                block, hashes = block.take(taken), hashes[taken]
            data, ends = block.as_bytes()
            self._data[byte : byte + len(data)] = data
            self._ends[key + 1 : key + 1 + len(block)] = ends[1:] + byte
            self._hashes[key : key + len(block)] = hashes
            self._ids[key : key + len(block)] = first + taken
            key, byte = key + len(block), byte + len(data)
        assert (key, byte) == (within.keys, within.key_bytes), text
        self._slots = np.full(1 << max(3, (3 * within.keys // 2).bit_length()), _EMPTY, np.int32)
        fill_slots(self._hashes, self._slots)

    def find(self, block: KeyBlock, hashes: NDArray[np.uint64], out: NDArray[np.int64]) -> None:
        """Put the id of each of these keys that is here into ``out``, int64 [n]; leave the others'."""
        find_keys(
            hashes, *block.as_bytes(), self._slots, self._hashes, self._data, self._ends, self._ids, out
        )
