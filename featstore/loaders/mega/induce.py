"""The subgraph that a set of partitions and the hubs induce, built from lists of rows as they come from disk.

Local ids are places in the buffer of rows: the hubs first, in the order in which they are wanted, then a slot
for each partition. Of the rows in memory a bitmap is made for each mega-batch, with the number of members
before each word and, by rank, the members' local ids: whether a source is there, and where, takes no branch
and no hash, and nothing but the bitmaps grows with the graph.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.bitmap import slot_of
from featstore.base.compilation import njit
from featstore.base.native import popcount

# Positions in a kernel's state, int64: what it must remember when a block ends inside a list.
TARGET, FILLED = range(2)


@njit(cache=True, nogil=True)
def partition_hints(partition_offsets: NDArray[np.int64], hints: NDArray[np.int32]) -> None:
    """hints[i] becomes the partition of row 64 * i."""
    partition = 0
    for i in range(hints.shape[0]):
        while partition_offsets[partition + 1] <= 64 * i:
            partition += 1
        hints[i] = partition


@njit(nogil=True)
def _partition_of(row: Any, hints: Any, partition_offsets: Any) -> Any:
    partition = hints[row >> 6]
    while partition_offsets[partition + 1] <= row:
        partition += 1
    return partition


@njit(cache=True, nogil=True)
def mark_here(
    partition_offsets: NDArray[np.int64],
    partitions: NDArray[np.int64],
    starts: NDArray[np.int64],
    hub_rows: NDArray[np.int64],
    hub_local: NDArray[np.int32],
    bits: NDArray[np.uint64],
    ranks: NDArray[np.int32],
    local: NDArray[np.int32],
) -> None:
    """Make the bitmap of the hubs and of the rows of ``partitions``, the ranks, and the local ids by rank.
    Partition ``partitions[i]`` begins at local id ``starts[i]``; a hub in it is found there."""
    one = np.uint64(1)
    bits[:] = np.uint64(0)
    for row in hub_rows:
        bits[row >> 6] |= one << np.uint64(row & 63)
    for partition in partitions:
        for row in range(partition_offsets[partition], partition_offsets[partition + 1]):
            bits[row >> 6] |= one << np.uint64(row & 63)
    total = 0
    for word in range(bits.shape[0]):
        ranks[word] = total
        total += popcount(bits[word])
    for i in range(hub_rows.shape[0]):
        local[slot_of(hub_rows[i], bits, ranks)] = hub_local[i]
    for i in range(partitions.shape[0]):
        low, high = partition_offsets[partitions[i]], partition_offsets[partitions[i] + 1]
        if low < high:
            rank = slot_of(low, bits, ranks)
            for row in range(low, high):
                local[rank + row - low] = starts[i] + row - low


@njit(cache=True, nogil=True)
def induce_block(
    offsets: NDArray[np.int64],
    block: NDArray[Any],
    first_edge: int,
    rows: int,
    bits: NDArray[np.uint64],
    ranks: NDArray[np.int32],
    local: NDArray[np.int32],
    wanted: NDArray[np.bool_],
    state: NDArray[np.int64],
    ends: NDArray[np.int64],
    indices: NDArray[np.int32],
) -> int:
    """Append the local ids of those sources in a block that are in memory; the first bad position, or -1.

    ``offsets`` int64 [targets + 1]: the lists, as positions in the file, of which the block begins at
    ``first_edge``. ``ends`` int64 [targets]: where each target's list ends in ``indices``, which has one
    place more than all of them need. The ``block`` is written over: it begins with the positions in it of
    the edges that were kept, for :func:`copy_kept`. ``bits``, ``ranks``, ``local``: of :func:`mark_here`.
    ``wanted`` bool [targets]: lists to leave empty are False. ``state``: int64 [2], to go on with.
    """
    targets = ends.shape[0]
    one = np.uint64(1)
    target, filled, kept = state[TARGET], state[FILLED], np.int64(0)
    end_edge = first_edge + block.shape[0]
    while target < targets:
        if wanted[target]:
            for edge in range(max(offsets[target], first_edge), min(offsets[target + 1], end_edge)):
                source = np.int64(block[edge - first_edge])
                if source < 0 or source >= rows:
                    return edge - first_edge
                word, bit = bits[source >> 6], np.uint64(source & 63)
                indices[filled] = local[np.int64(ranks[source >> 6]) + popcount(word & ((one << bit) - one))]
                block[kept] = edge - first_edge  # no later than what has been looked at
                here = np.int64((word >> bit) & one)
                filled += here  # what is not here is written over
                kept += here
        if offsets[target + 1] > end_edge:
            break
        ends[target] = filled
        target += 1
    state[TARGET], state[FILLED] = target, filled
    return -1


@njit(cache=True, nogil=True)
def copy_kept(kept: NDArray[Any], values: NDArray[Any], out: NDArray[Any]) -> None:
    """``out[i] = values[kept[i]]``: values of the edges that :func:`induce_block` kept of a block."""
    for i in range(out.shape[0]):
        out[i] = values[kept[i]]


@njit(cache=True, nogil=True)
def count_by_partition(
    block: NDArray[Any],
    hints: NDArray[np.int32],
    partition_offsets: NDArray[np.int64],
    bits: NDArray[np.uint64],
    ranks: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> int:
    """Add to ``counts`` int64 [partitions + 1] the block's sources by partition, hubs in the last place
    besides; the first bad position, or -1."""
    rows = partition_offsets[-1]
    for i in range(block.shape[0]):
        source = np.int64(block[i])
        if source < 0 or source >= rows:
            return i
        counts[_partition_of(source, hints, partition_offsets)] += 1
        if slot_of(source, bits, ranks) >= 0:
            counts[-1] += 1
    return -1


@njit(cache=True, nogil=True)
def border_weights(
    row: NDArray[np.int64],
    col: NDArray[np.int64],
    sources: NDArray[np.int64],
    targets: NDArray[np.int64],
    source_slots: tuple[int, int],
    target_slots: tuple[int, int],
    always: NDArray[np.bool_],
    chance: float,
    weights: NDArray[np.float32],
) -> None:
    """Weights of sampled edges (positions ``row`` in ``sources`` and ``col`` in ``targets``, local ids of
    nodes), which stand grouped by target.

    A source in the target's own partition, or a hub, is there whenever the target is; any other only with
    probability ``chance``, so it stands for 1 / chance of its kind (Horvitz and Thompson, 1952). Weights of a
    target's edges are scaled to the mean 1. ``source_slots``, ``target_slots``: hubs of each type, and rows
    of its slots. ``always`` bool [places]: which local ids of sources are hubs, in their own place or in that
    of their partition.
    """
    first = 0
    (source_hubs, source_rows), (target_hubs, target_rows) = source_slots, target_slots
    while first < row.shape[0]:
        last, total = first, 0.0
        target = targets[col[first]]
        own = -1 if target < target_hubs else (target - target_hubs) // target_rows
        while last < row.shape[0] and col[last] == col[first]:
            source = sources[row[last]]
            sure = always[source] or (source - source_hubs) // source_rows == own
            weights[last] = 1.0 if sure else 1.0 / chance
            total += weights[last]
            last += 1
        for edge in range(first, last):
            weights[edge] *= (last - first) / total
        first = last


class Places:
    """Where rows are in memory.

    Args:
        partition_offsets: int64 [partitions + 1], the first row of each partition.
        hub_rows: rows of the hubs, the most wanted first, distinct.
    """

    def __init__(self, partition_offsets: NDArray[np.int64], hub_rows: NDArray[Any]) -> None:
        self.rows, self.partition_offsets = int(partition_offsets[-1]), partition_offsets
        words = -(-self.rows // 64)
        self.hints = np.empty(words, np.int32)
        partition_hints(partition_offsets, self.hints)
        self._hub_local = np.argsort(hub_rows, kind="stable").astype(np.int32)
        self._hub_rows = hub_rows[self._hub_local].astype(np.int64)
        self._bits, self._ranks = np.zeros(words, np.uint64), np.zeros(words, np.int32)
        self._local = np.zeros(0, np.int32)

    @staticmethod
    def memory_bytes(rows: int, hubs: int, resident_rows: int) -> int:
        """What is held for mega-batches of so many rows and, for the hubs, needed besides."""
        return 16 * -(-rows // 64) + 28 * hubs + 4 * (hubs + resident_rows + 1)

    def here(
        self, partitions: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint64], NDArray[np.int32], NDArray[np.int32]]:
        """``induce_block``'s bits, ranks and local ids where ``partitions[i]`` begins at local id
        ``starts[i]``; until the next call."""
        offsets = self.partition_offsets
        most = len(self._hub_rows) + int((offsets[partitions + 1] - offsets[partitions]).sum()) + 1
        if len(self._local) < most:  # one more: the rank after the last, of what is not here
            self._local = np.zeros(most, np.int32)
        mark_here(
            self.partition_offsets,
            partitions,
            starts,
            self._hub_rows,
            self._hub_local,
            self._bits,
            self._ranks,
            self._local,
        )
        return self._bits, self._ranks, self._local
