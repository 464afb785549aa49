"""BGL's partitions (Liu et al., NSDI'23): grow blocks by breadth-first search, assign whole blocks to parts.

A block grown by BFS holds a neighbourhood of several hops, which is what sampling reads; the assignment
brings blocks together that are one or two steps apart, and balances training nodes as well.

1. *Growth.* Random sources get a block each. A pass over the edges is one BFS level for all blocks at once: a
   node without a block takes the open block that most of its in-neighbours have (ties: the smaller, then the
   lower number). A block closes at its limit. What a pass assigns counts from the next pass on; after
   ``LEVELS`` passes at once, so that long thin graphs converge too. When a pass brings little, new sources
   are drawn among the nodes left, ``ROUNDS`` times. A last pass puts the rest, isolated nodes and small
   components, many to one block.
2. *Block graph.* One pass counts each block's edges from other blocks. A block has a fixed number of slots,
   in sets of ``SET_WAYS``: a neighbour is counted in the set of its hash, and where that is full it takes one
   from the lightest (Misra & Gries 1982). So heavy neighbours stay, and memory is bounded whatever the graph.
3. *Merging*, BGL's multi-level step. A small block goes into the large neighbour (large: the top 10 % by
   size) from which it has most edges; small blocks without one are merged at random. The block graph is then
   counted again.
4. *Assignment*, largest block first, to the part with the highest
   ``(hop 1 + hop 2) * (1 - nodes / capacity) * (1 - training nodes / capacity)``. The paper counts neighbour
   blocks; we weigh them: hop j is the share of walks of j steps from the block, along counted edges, that
   ends in the part. The first blocks seed the parts, one each. A block drawn nowhere goes to the least loaded
   part; one that fits nowhere is split. With training nodes, these and the others each have a capacity, so
   that both come out even.

State is four bytes a node and the block graph; edges are never held. A node sees those it gathers from, as in
LDG: symmetrise directed graphs first. Equal arguments give equal parts, whatever the size of edge blocks. It
is quick and can balance training nodes, but not as local: ogbn-arxiv in 64 parts is cut at .64 of its edges,
by LDG at .35.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.hashing import GOLDEN
from featstore.errors import SourceError
from featstore.order.block_assignment import assign_blocks, uncoarsen
from featstore.order.block_growth import ROUNDS, grow_blocks, most_blocks
from featstore.order.chances import next_random, random_of_pass
from featstore.order.ldg import SLACK, part_capacity
from featstore.order.stream import (
    BLOCK_EDGES,
    GraphLike,
    bad_edge_error,
    checked_indptr,
    edge_blocks,
    node_count,
)

BLOCKS_PER_PART = 16
BLOCK_NODES_MAX = 100_000  # BGL's threshold

LARGE_SHARE = 0.1
SMALL_SHARE = 0.25  # of the limit: up to here a block is small
MERGED_SHARE = 1.5  # of the limit: merging makes none larger

SET_WAYS = 8
NEIGHBOR_SLOTS_MIN = 16
NEIGHBOR_SLOTS_MAX = 128

_WEIGHT_MAX = 2**31 - 1
_BLOCK_BYTES = 64
_PART_BYTES = 32
_FIXED_BYTES = 1 << 18


@njit(cache=True, nogil=True)
def link_block(
    indptr: Any, block: Any, first_edge: int, node: int, block_of: Any, keys: Any, weights: Any
) -> Any:
    """Count a block of edges into the block graph: (node of the last edge, first bad position or -1).

    ``keys``, ``weights`` int32 [blocks, slots]; a slot of weight 0 is free.
    """
    sets = np.uint64(keys.shape[1] // SET_WAYS)
    for i in range(block.size):
        while indptr[node + 1] <= first_edge + i:
            node += 1
        source = block[i]
        if source < 0 or source >= block_of.size:
            return node, i
        row = block_of[node]
        key = block_of[source]
        if row == key:
            continue
        begin = np.int64(((np.uint64(key) * GOLDEN) >> np.uint64(32)) % sets) * SET_WAYS
        best = begin
        for way in range(SET_WAYS):
            slot = begin + way
            if weights[row, slot] > 0 and keys[row, slot] == key:
                best = slot
                break
            if weights[row, slot] < weights[row, best]:
                best = slot
        if weights[row, best] == 0:
            keys[row, best] = key
        if keys[row, best] != key:
            weights[row, best] -= 1
        elif weights[row, best] < _WEIGHT_MAX:
            weights[row, best] += 1
    return node, -1


@njit(cache=True, nogil=True)
def merge_small(
    sizes: Any, keys: Any, weights: Any, into: Any, lonely: Any, large: int, small: int, limit: int,
    most: int, random: Any,
) -> int:  # fmt: skip
    """Merge blocks of at most ``small`` nodes; the number of blocks left.

    Those of ``large`` nodes or more are large; merging makes none larger than ``most`` (into large ones) or
    ``limit``. ``into`` int32 [blocks]: new number of each; ``sizes`` becomes that of the new blocks;
    ``lonely`` is scratch.
    """
    blocks = sizes.size
    count = 0
    for b in range(blocks):
        into[b] = b
        if sizes[b] > small or sizes[b] >= large:
            continue
        best = np.int64(-1)
        best_weight = 0
        for slot in range(keys.shape[1]):
            weight = weights[b, slot]
            t = np.int64(keys[b, slot])
            if weight == 0 or sizes[t] < large or sizes[t] + sizes[b] > most:
                continue
            if weight > best_weight or (weight == best_weight and t < best):
                best = t
                best_weight = weight
        if best >= 0:
            into[b] = best
            sizes[best] += sizes[b]
            sizes[b] = 0
        else:
            lonely[count] = b
            count += 1
    group = np.int64(-1)
    for i in range(count - 1, -1, -1):
        # Fisher & Yates' shuffle: each lonely block is as likely to be next.
        j = np.int64((next_random(random) >> np.uint64(20)) % np.uint64(i + 1))
        one = np.int64(lonely[j])
        lonely[j] = lonely[i]
        if group >= 0 and sizes[group] + sizes[one] <= limit:
            into[one] = group
            sizes[group] += sizes[one]
            sizes[one] = 0
        else:
            group = one
    # Those merged point at blocks that stayed: number these first. Sizes move down, never past one still to
    # be read.
    left = 0
    for b in range(blocks):
        if into[b] == b:
            lonely[b] = left
            sizes[left] = sizes[b]
            left += 1
    for b in range(blocks):
        into[b] = lonely[into[b]]
    return left


@njit(cache=True, nogil=True)
def relabel(block_of: Any, into: Any, train: Any, trains: Any) -> None:
    """Replace each block number by ``into`` of it; count each block's training nodes into ``trains`` int64
    [blocks]."""
    for node in range(block_of.size):
        block_of[node] = into[block_of[node]]
        if train.size > 0 and train[node]:
            trains[block_of[node]] += 1


def block_limit(nodes: int, parts: int) -> int:
    """The most nodes a growing block may have: small enough for parts to balance."""
    return max(1, min(nodes // (parts * BLOCKS_PER_PART), BLOCK_NODES_MAX))


def slots_of(limit: int) -> int:
    """Slots for a block's neighbours: half as many as it has nodes, so that the block graph stays in
    proportion."""
    return min(max(NEIGHBOR_SLOTS_MIN, 1 << (limit // 2).bit_length()), NEIGHBOR_SLOTS_MAX)


def _link_blocks(
    graph: GraphLike, block_of: NDArray[np.int32], keys: Any, weights: Any, block_edges: int
) -> None:
    """Count the block graph into ``keys`` and ``weights``, as :func:`link_block`."""
    indptr = checked_indptr(graph)
    weights.fill(0)
    node = 0
    for first, block in edge_blocks(graph, block_edges):
        node, bad = link_block(indptr, block, first, node, block_of, keys, weights)
        if bad >= 0:
            raise bad_edge_error(graph, first + bad)


def _merge(sizes: Any, keys: Any, weights: Any, into: NDArray[np.int32], limit: int, seed: int) -> int:
    """Merge small blocks, as :func:`merge_small`; the number of blocks left."""
    if sizes.size == 0:
        return 0
    place = int((1 - LARGE_SHARE) * sizes.size)
    large = int(np.partition(sizes, place)[place])
    small, most = int(SMALL_SHARE * limit), max(limit, int(MERGED_SHARE * limit))
    lonely, random = np.empty(sizes.size, np.int32), random_of_pass(seed, ROUNDS)
    return int(merge_small(sizes, keys, weights, into, lonely, large, small, limit, most, random))


def bfs_partition(
    graph: GraphLike,
    parts: int,
    *,
    seed: int,
    train: NDArray[np.bool_] | None = None,
    block_edges: int = BLOCK_EDGES,
) -> NDArray[np.int32]:
    """Part of each node, int32 [nodes], from BGL's blocks; deterministic for equal arguments.

    ``train``: bool [nodes], training nodes to be balanced (None: do not look at them). No part holds more
    than ``max(ceil(nodes / parts), floor(1.05 * nodes / parts))`` nodes; from 20 training nodes and 20 others
    a part on, the same rule holds for training nodes. Reads the edges at most 51 times from first to last,
    usually 10 to 25 times, ``block_edges`` at once, and allocates at most :func:`bfs_memory_bytes`.

    Raises SourceError for a bad graph and for arguments out of range. After Liu et al., "BGL: GPU-efficient
    GNN training by optimizing graph data I/O and preprocessing" (NSDI'23), section 3.3; see the module for
    what differs.
    """
    checked_indptr(graph)
    nodes = node_count(graph)
    if not 1 <= parts < 2**31 or seed < 0:
        raise SourceError(f"need parts from 1 to 2**31 - 1 and seed >= 0, not parts={parts}, seed={seed}")
    if train is not None and (train.shape != (nodes,) or train.dtype != np.bool_):
        raise SourceError(f"train must be bool of shape ({nodes},), not {train.dtype} of shape {train.shape}")
    limit = block_limit(nodes, parts)
    if most_blocks(nodes, limit) >= 2**31 - 2:
        raise SourceError(
            f"{nodes:,} nodes in {parts:,} parts make more blocks than 2**31; use fewer parts, or LDG"
        )
    block_of, sizes = grow_blocks(graph, limit, seed=seed, block_edges=block_edges)
    keys = np.zeros((sizes.size, slots_of(limit)), np.int32)
    weights = np.zeros_like(keys)
    _link_blocks(graph, block_of, keys, weights, block_edges)
    into, trains = np.empty(sizes.size, np.int32), np.zeros(sizes.size, np.int64)
    left = _merge(sizes, keys, weights, into, limit, seed)
    is_train = np.zeros(0, np.bool_) if train is None else train
    relabel(block_of, into, is_train, trains)
    sizes, trains, keys, weights = sizes[:left], trains[:left], keys[:left], weights[:left]
    _link_blocks(graph, block_of, keys, weights, block_edges)
    all_trains = int(trains.sum())
    room = np.array(
        [part_capacity(count, parts, SLACK) for count in (nodes, all_trains, nodes - all_trains)], np.int64
    )
    part_sizes, part_trains = np.zeros(parts, np.int64), np.zeros(parts, np.int64)
    part_of = np.full(sizes.size, -1, np.int32)
    assign_blocks(
        np.argsort(-sizes, kind="stable"), sizes, trains, keys, weights, weights.sum(axis=1, dtype=np.int64),
        part_of, part_sizes, part_trains, room, np.zeros(parts), np.empty(parts, np.int32),
    )  # fmt: skip
    uncoarsen(block_of, is_train, part_of, part_sizes, part_trains, room)
    return block_of


def bfs_memory_bytes(nodes: int, parts: int, block_edges: int = BLOCK_EDGES) -> int:
    """The most :func:`bfs_partition` allocates, in bytes, above the graph itself (machine code is not
    counted)."""
    limit = block_limit(nodes, parts)
    blocks = most_blocks(nodes, limit)
    block_bytes = _BLOCK_BYTES + 8 * slots_of(limit)
    return 4 * nodes + block_bytes * blocks + _PART_BYTES * parts + 8 * block_edges + _FIXED_BYTES
