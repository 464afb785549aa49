"""Counting pairs of clusters in tables of bounded size: see :mod:`featstore.order.coarsen`.

Pairs are spread over :data:`PAIR_TABLES` hash tables by the upper bits of their hash, so that several threads
can count at once: each goes over all edges and counts the pairs of the tables that are its own. What a table
holds follows from its own pairs in the order of the edges, so it does not matter whose it is.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.hashing import mix64
from featstore.base.native import address_of, load_i32, load_i64, prefetch, store_i32, store_i64
from featstore.order.stream import PREFETCH_EDGES

PAIR_BYTES = 12
"""A slot of a table: the pair, int64, and its count, int32."""

PAIR_TABLES = 8
_PAIRS_ALONE = 1 << 15  # so few pairs are in one table
SLOTS_FIRST = 1 << 12
_AT_ONCE = 32  # edges whose pairs are looked for together
HISTOGRAM_SIZE = 1 << 10

# Columns of a table's description, int64: addresses of keys and counts, slots - 1, pairs, and how many there
# may be.
_KEYS, _COUNTS, _MASK, _PAIRS, _ROOM = range(5)

# Positions in the kernel's state, int64.
_NODE, _BAD, _FULL = range(3)


@njit(cache=True, nogil=True)
def home_slot(key: int, slots: int) -> Any:
    """Where a pair belongs, if that slot is free; ``slots`` is a power of two."""
    return np.int64(mix64(np.uint64(key)) & np.uint64(slots - 1))


@njit(cache=True, nogil=True)
def count_pairs(
    indptr: Any, block: Any, first_edge: int, begin: int, label: Any, vertices: int, tables: Any, shift: int,
    low_table: int, high_table: int, state: Any,
) -> int:  # fmt: skip
    """Count the block's edges between clusters, from position ``begin``, whose pairs belong to the tables
    from ``low_table`` to below ``high_table``; where a new pair had no room (in table ``state[FULL]``), or
    -1.

    An edge to a node that does not exist ends it as well, and sets ``state[BAD]``. Edges are looked at a few
    at a time, so that the memory of their pairs is asked for before it is needed.

    ``tables`` int64 [tables, 5]: keys int64, -1 = free, counts int32, and the rest; the upper bits of a
    pair's hash above ``shift`` say which (64: there is one); ``state`` int64 [3].
    """
    node = state[_NODE]
    labels = label.ctypes.data
    pairs, places = np.empty(_AT_ONCE, np.int64), np.empty(_AT_ONCE, np.int64)
    which = np.empty(_AT_ONCE, np.int64)
    for low in range(begin, block.size, _AT_ONCE):
        high = min(low + _AT_ONCE, block.size)
        bad = high
        found = 0
        for i in range(low, high):
            if i + PREFETCH_EDGES < block.size:
                prefetch(labels + 4 * np.int64(block[i + PREFETCH_EDGES]))
            while indptr[node + 1] <= first_edge + i:
                node += 1
            if block[i] < 0 or block[i] >= label.size:
                bad = i
                break
            a, b = np.int64(label[block[i]]), np.int64(label[node])
            which[i - low] = -1
            if a == b:
                continue
            key = a * vertices + b if a < b else b * vertices + a
            hashed = mix64(np.uint64(key))
            t = np.int64(0) if shift >= 64 else np.int64(hashed >> np.uint64(shift))
            if t < low_table or t >= high_table:
                continue
            slot = np.int64(hashed) & tables[t, _MASK]
            prefetch(tables[t, _KEYS] + 8 * slot)
            prefetch(tables[t, _COUNTS] + 4 * slot)
            pairs[i - low], places[i - low], which[i - low] = key, slot, t
            found += 1
        for i in range(low, bad if found else low):
            t = which[i - low]
            if t < 0:
                continue
            key, slot = pairs[i - low], places[i - low]
            keys, counts, mask = tables[t, _KEYS], tables[t, _COUNTS], tables[t, _MASK]
            there = load_i64(keys + 8 * slot)
            while there != key and there >= 0:
                slot = (slot + 1) & mask
                there = load_i64(keys + 8 * slot)
            if there < 0:
                if tables[t, _PAIRS] >= tables[t, _ROOM]:
                    state[_FULL] = t
                    return int(i)
                store_i64(keys + 8 * slot, key)
                store_i32(counts + 4 * slot, np.int32(0))
                tables[t, _PAIRS] += 1
            count = load_i32(counts + 4 * slot)
            if count < 2147483647:
                store_i32(counts + 4 * slot, np.int32(count + 1))
        if bad < high:
            state[_BAD] = 1
            return int(bad)
        state[_NODE] = node
    return -1


@njit(cache=True, nogil=True)
def move_pairs(keys: Any, counts: Any, new_keys: Any, new_counts: Any) -> None:
    """Enter all pairs into a larger, empty table."""
    mask = new_keys.size - 1
    for i in range(keys.size):
        if keys[i] >= 0:
            slot = home_slot(keys[i], new_keys.size)
            while new_keys[slot] >= 0:
                slot = (slot + 1) & mask
            new_keys[slot] = keys[i]
            new_counts[slot] = counts[i]


@njit(cache=True, nogil=True)
def lightest_weights(keys: Any, counts: Any, histogram: Any) -> Any:
    """The weight up to which pairs must go so that half of them go; ``histogram`` int64 is used up."""
    histogram[:] = 0
    pairs = 0
    for i in range(keys.size):
        if keys[i] >= 0:
            histogram[min(counts[i], histogram.size - 1)] += 1
            pairs += 1
    below = 0
    for weight in range(histogram.size):
        below += histogram[weight]
        if 2 * below >= pairs:
            return weight
    return histogram.size - 1


@njit(cache=True, nogil=True)
def drop_pairs(keys: Any, counts: Any, weight: int, turn: int, most: int) -> Any:
    """Take out pairs lighter than ``weight`` and a pseudorandom half of those of it; (pairs, weight) gone,
    integers.

    Weights above ``most`` count as that. The pair that follows moves up into a slot that comes free, so no
    search ends too soon (Knuth 6.4, algorithm R).
    """
    mask = keys.size - 1
    pairs, gone = 0, 0
    i = 0
    while i < keys.size:
        coin = home_slot(keys[i] + np.int64(turn) * 0x2545F4914F6CDD1D, 2)
        heavy = min(counts[i], most)
        if keys[i] < 0 or heavy > weight or (heavy == weight and coin == 0):
            i += 1
            continue
        gone += counts[i]
        pairs += 1
        hole = i
        slot = (hole + 1) & mask
        while keys[slot] >= 0:
            home = home_slot(keys[slot], keys.size)
            if ((slot - home) & mask) >= ((slot - hole) & mask):
                keys[hole] = keys[slot]
                counts[hole] = counts[slot]
                hole = slot
            slot = (slot + 1) & mask
        keys[hole] = -1
    return pairs, gone


def pair_slots(pairs: int) -> int:
    """Slots of a table for so many pairs: a power of two, filled to three quarters at most."""
    slots = SLOTS_FIRST
    while 3 * slots < 4 * pairs:
        slots *= 2
    return slots


def pair_table_count(pairs_max: int) -> int:
    """How many tables so many pairs are spread over: a power of two."""
    return PAIR_TABLES if pairs_max > _PAIRS_ALONE else 1


def pair_tables_bytes(pairs_max: int) -> int:
    """The most that the tables take once they have grown."""
    count = pair_table_count(pairs_max)
    return count * PAIR_BYTES * pair_slots(-(-pairs_max // count))


class PairTable:
    """Pairs and how often they were counted, at most ``pairs_max`` of them; ``dropped``: edges that found no
    room."""

    def __init__(self, pairs_max: int) -> None:
        self.keys, self.counts = np.full(SLOTS_FIRST, -1, np.int64), np.zeros(SLOTS_FIRST, np.int32)
        self.dropped = 0
        self._pairs_max, self._turn = pairs_max, 0
        self._histogram = np.zeros(HISTOGRAM_SIZE, np.int64)

    def describe(self, row: NDArray[np.int64]) -> None:
        """Fill in all of a table's description but its number of pairs."""
        row[_KEYS], row[_COUNTS] = address_of(self.keys), address_of(self.counts)
        row[_MASK], row[_ROOM] = self.keys.size - 1, min(self._pairs_max, 3 * self.keys.size // 4)

    def make_room(self, row: NDArray[np.int64]) -> None:
        """Grow while that is allowed; else drop the lightest half of the pairs."""
        if row[_ROOM] < self._pairs_max:
            keys, counts = np.full(2 * self.keys.size, -1, np.int64), np.zeros(2 * self.keys.size, np.int32)
            move_pairs(self.keys, self.counts, keys, counts)
            self.keys, self.counts = keys, counts
        else:
            weight = lightest_weights(self.keys, self.counts, self._histogram)
            pairs, gone = drop_pairs(self.keys, self.counts, weight, self._turn, HISTOGRAM_SIZE - 1)
            row[_PAIRS] -= pairs
            self.dropped += int(gone)
            self._turn += 1
        self.describe(row)


class PairCounter:
    """Counts the pairs of clusters that edges are between; a context manager. ``tables`` has them."""

    def __init__(
        self, indptr: NDArray[np.int64], label: NDArray[np.int32], vertices: int, pairs_max: int, threads: int
    ) -> None:
        self._indptr, self._label, self._vertices = indptr, label, vertices
        count = pair_table_count(pairs_max)
        self.tables = [PairTable(pairs_max // count) for _ in range(count)]
        self._rows = np.zeros((count, 5), np.int64)
        for table, row in zip(self.tables, self._rows, strict=True):
            table.describe(row)
        self._shift = 64 - (count.bit_length() - 1)
        threads = max(1, min(threads, count))
        self._bounds = [count * one // threads for one in range(threads + 1)]
        self._states = np.zeros((threads, 3), np.int64)
        self._pool = ThreadPoolExecutor(threads - 1, "featstore-order") if threads > 1 else None

    def __enter__(self) -> PairCounter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def count(self, first_edge: int, block: NDArray[Any]) -> int:
        """Count a block of edges, the one after the last. The position of a bad one, or -1."""
        if self._pool is None:
            return self._count(0, first_edge, block)
        threads = range(1, len(self._states))
        others = [self._pool.submit(self._count, thread, first_edge, block) for thread in threads]
        try:
            found = [self._count(0, first_edge, block)]
        finally:
            rest = [other.result() for other in others]
        return max(found + rest)  # a bad edge is one for all of them, at the same place

    def _count(self, thread: int, first_edge: int, block: NDArray[Any]) -> int:
        begin, state = 0, self._states[thread]
        while True:
            begin = int(count_pairs(
                self._indptr, block, first_edge, begin, self._label, self._vertices, self._rows, self._shift,
                self._bounds[thread], self._bounds[thread + 1], state,
            ))  # fmt: skip
            if begin < 0 or state[_BAD]:
                return begin
            full = int(state[_FULL])
            self.tables[full].make_room(self._rows[full])
