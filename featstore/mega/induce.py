"""The subgraph that a set of partitions and the hubs induce, built from lists of rows as they come from disk.

Local ids are places in the buffer of rows: the hubs first, in the order in which they are wanted, then a slot for each partition.
Whether a source is in memory, and where, takes its partition (from a table of hints, one for each 64 rows) and, for one that is
not resident, a bit of the hubs' bitmap; no hash, and nothing but hints and bits grows with the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from featstore.tiers.static import set_bits, slot_of

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
def induce_block(
    offsets: NDArray[np.int64],
    block: NDArray[Any],
    first_edge: int,
    hints: NDArray[np.int32],
    partition_offsets: NDArray[np.int64],
    local_base: NDArray[np.int64],
    bits: NDArray[np.uint64],
    ranks: NDArray[np.int32],
    hub_local: NDArray[np.int32],
    wanted: NDArray[np.bool_],
    state: NDArray[np.int64],
    ends: NDArray[np.int64],
    indices: NDArray[np.int32],
) -> int:
    """Append the local ids of those sources in a block that are in memory; the first bad position, or -1.

    ``offsets`` int64 [targets + 1]: the lists, as positions in the file, of which the block begins at ``first_edge``.
    ``ends`` int64 [targets]: where each target's list ends in ``indices``. ``local_base`` int64 [partitions]: local id minus row, or
    less than minus the number of rows where a partition is not resident. ``wanted`` bool [targets]: lists to leave empty are False.
    ``state``: int64 [2], to go on with.
    """
    targets = ends.shape[0]
    rows = partition_offsets[-1]
    target, filled = state[TARGET], state[FILLED]
    end_edge = first_edge + block.shape[0]
    while target < targets:
        if wanted[target]:
            for edge in range(max(offsets[target], first_edge), min(offsets[target + 1], end_edge)):
                source = np.int64(block[edge - first_edge])
                if source < 0 or source >= rows:
                    return edge - first_edge
                base = local_base[_partition_of(source, hints, partition_offsets)]
                local = base + source
                if local < 0:
                    rank = slot_of(source, bits, ranks)
                    if rank < 0:
                        continue
                    local = np.int64(hub_local[rank])
                indices[filled] = local
                filled += 1
        if offsets[target + 1] > end_edge:
            break
        ends[target] = filled
        target += 1
    state[TARGET], state[FILLED] = target, filled
    return -1


@njit(cache=True, nogil=True)
def count_by_partition(
    block: NDArray[Any],
    hints: NDArray[np.int32],
    partition_offsets: NDArray[np.int64],
    bits: NDArray[np.uint64],
    ranks: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> int:
    """Add to ``counts`` int64 [partitions + 1] the block's sources by partition, hubs in the last place besides; the first bad
    position, or -1."""
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
    local: NDArray[np.int64],
    hubs: int,
    slot_rows: int,
    always: NDArray[np.bool_],
    chance: float,
    weights: NDArray[np.float32],
) -> None:
    """Weights of sampled edges (positions ``row`` and ``col`` in ``local``, int64 [nodes]), which stand grouped by target.

    A source in the target's own partition, or a hub, is there whenever the target is; any other only with probability
    ``chance``, so it stands for 1 / chance of its kind (Horvitz and Thompson, 1952). Weights of a target's edges are scaled to the mean 1.
    ``always`` bool [places]: which local ids are hubs, in their own place or in that of their partition.
    """
    first = 0
    while first < row.shape[0]:
        last, total = first, 0.0
        target = local[col[first]]
        own = -1 if target < hubs else (target - hubs) // slot_rows
        while last < row.shape[0] and col[last] == col[first]:
            source = local[row[last]]
            sure = always[source] or (source - hubs) // slot_rows == own
            weights[last] = 1.0 if sure else 1.0 / chance
            total += weights[last]
            last += 1
        for edge in range(first, last):
            weights[edge] *= (last - first) / total
        first = last


@dataclass(frozen=True)
class Places:
    """Where rows are in memory. ``local_base`` is that of one mega-batch, the rest of all."""

    hints: NDArray[np.int32]
    partition_offsets: NDArray[np.int64]
    bits: NDArray[np.uint64]
    ranks: NDArray[np.int32]
    hub_local: NDArray[np.int32]

    @classmethod
    def of(cls, partition_offsets: NDArray[np.int64], hub_rows: NDArray[Any]) -> Places:
        """``hub_rows``: the most wanted first, distinct."""
        rows = int(partition_offsets[-1])
        hints = np.empty(-(-rows // 64), np.int32)
        partition_hints(partition_offsets, hints)
        words = -(-rows // 64)
        bits, ranks = np.zeros(words, np.uint64), np.zeros(words, np.int32)
        set_bits(hub_rows.astype(np.int64), bits, ranks)
        return cls(hints, partition_offsets, bits, ranks, np.argsort(hub_rows, kind="stable").astype(np.int32))

    @staticmethod
    def memory_bytes(rows: int, hubs: int) -> int:
        """What :meth:`of` holds and, for the hubs, needs besides."""
        return 16 * -(-rows // 64) + 28 * hubs

    def local_base(self, partitions: NDArray[np.int64], locals_: NDArray[np.int64]) -> NDArray[np.int64]:
        """``induce_block``'s argument of that name: partition p begins at local id ``locals_[i]`` where p is ``partitions[i]``."""
        rows = int(self.partition_offsets[-1])
        base = np.full(len(self.partition_offsets) - 1, -rows - 1, np.int64)
        base[partitions] = locals_ - self.partition_offsets[partitions]
        return base
