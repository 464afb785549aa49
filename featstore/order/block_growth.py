"""The growth of BGL's blocks: breadth-first search from random sources, all blocks at once.

:mod:`featstore.order.blocks` says what a pass does, and what becomes of the blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.order.chances import next_random, random_of_pass
from featstore.order.stream import (
    BLOCK_EDGES,
    GraphLike,
    bad_edge_error,
    checked_indptr,
    edge_blocks,
    node_count,
)

ROUNDS = 3
LEVELS = 8
PASSES_PER_ROUND = 16
QUIET_SHARE = 1e-3  # a round ends with a pass that gives a block to at most this share of all nodes

# Positions in the state of a growing pass, int64: what it must remember when edges end inside a node's.
_NODE, _TOUCHED, _GROWN, _BLOCKS, _BIN = range(5)
_STATE_SIZE = 5


@njit(cache=True, nogil=True)
def draw_sources(indptr: Any, block_of: Any, sizes: Any, first: int, limit: int, random: Any) -> int:
    """Sources for one in ``limit`` nodes with edges and no block (Knuth's selection sampling, 3.4.2 S). The
    next block."""
    left = 0
    for node in range(block_of.size):
        left += block_of[node] < 0 and indptr[node + 1] > indptr[node]
    end = first + (left + limit - 1) // limit
    for node in range(block_of.size):
        if first < end and block_of[node] < 0 and indptr[node + 1] > indptr[node]:
            if np.int64((next_random(random) >> np.uint64(20)) % np.uint64(left)) < end - first:
                block_of[node] = first
                sizes[first] = 1
                first += 1
            left -= 1
    return int(first)


@njit(cache=True, nogil=True)
def chosen_block(sizes: Any, counts: Any, touched: Any, touched_count: int, limit: int) -> int:
    """The open block most counted (ties: the smaller, then the lower number), or -1; clears ``counts``."""
    best = np.int64(-1)
    best_count = 0
    for i in range(touched_count):
        b = np.int64(touched[i])
        count = counts[b]
        counts[b] = 0
        if sizes[b] >= limit or count < best_count:
            continue
        if count > best_count or sizes[b] < sizes[best] or (sizes[b] == sizes[best] and b < best):
            best = b
            best_count = count
    return int(best)


@njit(cache=True, nogil=True)
def grow_block(
    indptr: Any, block: Any, first_edge: int, block_of: Any, sizes: Any, counts: Any, touched: Any,
    state: Any, limit: int, at_once: bool, last: bool,
) -> int:  # fmt: skip
    """One block of edges of a growing pass. The first bad position among the edges looked at, or -1.

    ``block_of`` int32 [nodes]: -1 = none, -2 - b = block b from the next pass on; ``sizes``, ``counts``,
    ``touched`` int32 [blocks]; ``state`` int64 [STATE_SIZE]. ``at_once``: new blocks count in this pass;
    ``last``: all get one.
    """
    nodes = block_of.size
    end_edge = first_edge + block.size
    node = state[_NODE]
    touched_count = state[_TOUCHED]
    while node < nodes:
        if block_of[node] == -1:
            for edge in range(max(indptr[node], first_edge), min(indptr[node + 1], end_edge)):
                source = block[edge - first_edge]
                if source < 0 or source >= nodes:
                    return edge - first_edge
                b = block_of[source]
                if b < 0:
                    continue
                if counts[b] == 0:
                    touched[touched_count] = b
                    touched_count += 1
                counts[b] += 1
        if indptr[node + 1] > end_edge:
            break
        if block_of[node] == -1:
            new = np.int64(chosen_block(sizes, counts, touched, touched_count, limit))
            touched_count = 0
            if new < 0 and last:
                # A new one once this is half full, so that neighbours can follow.
                if state[_BIN] < 0 or sizes[state[_BIN]] * 2 >= limit:
                    state[_BIN] = state[_BLOCKS]
                    state[_BLOCKS] += 1
                new = state[_BIN]
            if new >= 0:
                sizes[new] += 1
                block_of[node] = new if at_once else -2 - new
                state[_GROWN] += 1
        node += 1
    state[_NODE] = node
    state[_TOUCHED] = touched_count
    return -1


@njit(cache=True, nogil=True)
def settle(block_of: Any) -> None:
    """End of a pass: what it assigned counts from now on."""
    for node in range(block_of.size):
        if block_of[node] < -1:
            block_of[node] = -2 - block_of[node]


def most_blocks(nodes: int, limit: int) -> int:
    """The most blocks that can come about: a source for each ``limit`` nodes left in each round, and
    half-full rest."""
    return min(nodes, (ROUNDS + 2) * -(-nodes // limit) + 1)


def grow_blocks(
    graph: GraphLike, limit: int, *, seed: int, block_edges: int = BLOCK_EDGES
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(block of each node int32 [nodes], size of each block int32 [blocks]) by BFS; none has more than
    ``limit`` nodes.

    Every node has a block and no block is empty. Raises SourceError for a bad graph, as far as it looks at
    edges.
    """
    indptr = checked_indptr(graph)
    nodes = node_count(graph)
    most = most_blocks(nodes, limit)
    block_of = np.full(nodes, -1, np.int32)
    sizes, counts = np.zeros(most, np.int32), np.zeros(most, np.int32)
    touched = np.empty(most, np.int32)
    state = np.zeros(_STATE_SIZE, np.int64)
    state[_BIN] = -1

    def run_pass(at_once: bool, last: bool) -> int:
        """Returns how many nodes got a block. A function, so that its edges are gone before the next pass has
        some."""
        state[_NODE] = state[_TOUCHED] = state[_GROWN] = 0
        for first, block in edge_blocks(graph, block_edges):
            bad = grow_block(
                indptr, block, first, block_of, sizes, counts, touched, state, limit, at_once or last, last
            )
            if bad >= 0:
                raise bad_edge_error(graph, first + bad)
        settle(block_of)
        return int(state[_GROWN])

    for number in range(ROUNDS):
        blocks = int(state[_BLOCKS])
        state[_BLOCKS] = draw_sources(indptr, block_of, sizes, blocks, limit, random_of_pass(seed, number))
        if state[_BLOCKS] == blocks:
            break
        for level in range(PASSES_PER_ROUND):
            if run_pass(level >= LEVELS, False) <= QUIET_SHARE * nodes:
                break
    run_pass(True, True)
    return block_of, sizes[: int(state[_BLOCKS])]
