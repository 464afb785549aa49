"""Counting pairs of clusters in tables of bounded size: see :mod:`featstore.order.coarsen`.

Pairs are spread over :data:`PAIR_TABLES` hash tables by the upper bits of their hash, so that several threads
can count at once. Edges are taken in pieces: each thread names the pairs of its share of a piece, by table,
and counts those that all have found in the piece before of the tables that are its own. What a table holds
follows from its own pairs in the order of the edges, so it does not matter whose it is.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.hashing import mix64
from featstore.base.native import address_of, load_i32, load_i64, prefetch, store_i32, store_i64
from featstore.order.crew import Crew, apart
from featstore.order.stream import PREFETCH_EDGES, GraphLike, edge_count

PAIR_BYTES = 12
"""A slot of a table: the pair, int64, and its count, int32."""

PIECE_EDGES = 1 << 16
PAIR_TABLES = 8
_PAIRS_ALONE = 1 << 15  # so few pairs are in one table
SLOTS_FIRST = 1 << 12
_AHEAD = 16  # pairs
HISTOGRAM_SIZE = 1 << 10

# Columns of a table's description, int64: addresses of keys and counts, slots - 1, pairs, and how many there
# may be.
_KEYS, _COUNTS, _MASK, _PAIRS, _ROOM = range(5)


@njit(cache=True, nogil=True)
def home_slot(key: int, slots: int) -> Any:
    """Where a pair belongs, if that slot is free; ``slots`` is a power of two."""
    return np.int64(mix64(np.uint64(key)) & np.uint64(slots - 1))


@njit(cache=True, nogil=True)
def name_pairs(
    indptr: Any, block: Any, first_edge: int, node: int, label: Any, vertices: int, shift: int, pairs: Any,
    found: Any,
) -> int:  # fmt: skip
    """The pairs of clusters that the block's edges are between, by table: ``pairs`` int64 [tables, edges], of
    which ``found`` int64 [tables] are of a table. The position of an edge to a node that does not exist, or
    -1.

    ``node``: that of the first edge. The upper bits of a pair's hash above ``shift`` say which table it
    belongs to (64: there is one).
    """
    labels = label.ctypes.data
    found[:] = 0
    for i in range(block.size):
        if i + PREFETCH_EDGES < block.size:
            prefetch(labels + 4 * np.int64(block[i + PREFETCH_EDGES]))
        while indptr[node + 1] <= first_edge + i:
            node += 1
        if block[i] < 0 or block[i] >= label.size:
            return i
        a, b = np.int64(label[block[i]]), np.int64(label[node])
        if a == b:
            continue
        pair = a * vertices + b if a < b else b * vertices + a
        t = np.int64(0) if shift >= 64 else np.int64(mix64(np.uint64(pair)) >> np.uint64(shift))
        pairs[t, found[t]] = pair
        found[t] += 1
    return -1


@njit(cache=True, nogil=True)
def count_pairs(pairs: Any, begin: int, table: Any) -> int:
    """Count pairs of a table, from position ``begin``; where a new one had no room, or -1.

    ``table`` int64 [5]: addresses of keys int64, -1 = free, and counts int32, and the rest. Slots are asked
    for some pairs before they are looked at.
    """
    keys, counts, mask = table[_KEYS], table[_COUNTS], table[_MASK]
    for i in range(begin - _AHEAD, pairs.size):
        if i + _AHEAD < pairs.size:
            slot = np.int64(mix64(np.uint64(pairs[i + _AHEAD]))) & mask
            prefetch(keys + 8 * slot)
            prefetch(counts + 4 * slot)
        if i < begin:
            continue
        key = pairs[i]
        slot = np.int64(mix64(np.uint64(key))) & mask
        there = load_i64(keys + 8 * slot)
        while there != key and there >= 0:
            slot = (slot + 1) & mask
            there = load_i64(keys + 8 * slot)
        if there < 0:
            if table[_PAIRS] >= table[_ROOM]:
                return int(i)
            store_i64(keys + 8 * slot, key)
            store_i32(counts + 4 * slot, np.int32(0))
            table[_PAIRS] += 1
        count = load_i32(counts + 4 * slot)
        if count < 2147483647:
            store_i32(counts + 4 * slot, np.int32(count + 1))
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
    """Counts the pairs of clusters that a graph's edges are between; a context manager. ``tables`` has
    them."""

    def __init__(
        self, graph: GraphLike, indptr: NDArray[np.int64], label: NDArray[np.int32], vertices: int,
        pairs_max: int, threads: int, block_edges: int,
    ) -> None:  # fmt: skip
        self._graph, self._indptr, self._label, self._vertices = graph, indptr, label, vertices
        count = pair_table_count(pairs_max)
        self.tables = [PairTable(pairs_max // count) for _ in range(count)]
        self._rows = apart(count, 5, np.int64)
        for table, row in zip(self.tables, self._rows, strict=True):
            table.describe(row)
        self._shift = 64 - (count.bit_length() - 1)
        self._threads = max(1, min(threads, count))
        self._share = -(-min(PIECE_EDGES, block_edges) // self._threads)
        self._blocks = np.empty((self._threads, self._share), graph.indices.dtype)
        # Of two pieces: one is counted while the other is named.
        self._pairs = np.empty((2, self._threads, count, self._share), np.int64)
        self._found = [apart(self._threads, count, np.int64) for _ in range(2)]
        self._crew = Crew(self._threads, "featstore-order")

    def __enter__(self) -> PairCounter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._crew.__exit__(kind, error, trace)

    def count(self) -> int:
        """Count all edges. The position of a bad one, or -1."""
        step, bad = self._threads * self._share, [-1] * self._threads
        for number, first in enumerate(range(0, edge_count(self._graph) + step, step)):

            def turn(thread: int, first: int = first, side: int = number % 2) -> None:
                bad[thread] = self._turn(first, side, thread)

            self._crew.run(turn)
            if max(bad) >= 0:
                return min(one for one in bad if one >= 0)
        return -1

    def _turn(self, first: int, side: int, thread: int) -> int:
        """Count a thread's tables of the piece before, and name its share of the one from edge ``first``."""
        for number in range(thread, len(self.tables), self._threads):
            table, row = self.tables[number], self._rows[number]
            named = zip(self._pairs[1 - side, :, number], self._found[1 - side][:, number], strict=True)
            for pairs, found in named:
                begin = 0
                while (begin := int(count_pairs(pairs[:found], begin, row))) >= 0:
                    table.make_room(row)
        first += thread * self._share
        block = self._blocks[thread, : max(0, min(self._share, edge_count(self._graph) - first))]
        np.copyto(block, self._graph.indices[first : first + block.size])
        node = int(np.searchsorted(self._indptr, first, "right")) - 1
        bad = int(name_pairs(
            self._indptr, block, first, node, self._label, self._vertices, self._shift,
            self._pairs[side, thread], self._found[side][thread],
        ))  # fmt: skip
        return bad if bad < 0 else first + bad
