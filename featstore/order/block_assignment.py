"""BGL's assignment of blocks to parts: to the part that draws a block most and is not full yet.

:mod:`featstore.order.blocks` has the formula.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from featstore.base.compilation import njit

# Positions in a part's room, int64 [3]: how many nodes, training nodes and others it may hold.
ALL, TRAIN, OTHER = range(3)


@njit(cache=True, nogil=True)
def has_room(p: int, size: int, train: int, sizes: Any, trains: Any, room: Any) -> bool:
    """Whether ``size`` more nodes, ``train`` of them for training, fit into part ``p``; ``room`` int64
    [3]."""
    if sizes[p] + size > room[ALL]:
        return False
    if room[TRAIN] == 0:
        return True
    return bool(trains[p] + train <= room[TRAIN] and sizes[p] - trains[p] + size - train <= room[OTHER])


@njit(cache=True, nogil=True)
def least_loaded(size: int, train: int, sizes: Any, trains: Any, room: Any) -> int:
    """The part with room that is least full of nodes and training nodes together, or -1."""
    best = -1
    least = 3.0
    for p in range(sizes.size):
        load = sizes[p] / room[ALL] + (trains[p] / room[TRAIN] if room[TRAIN] > 0 else 0.0)
        if load < least and has_room(p, size, train, sizes, trains, room):
            best = p
            least = load
    return best


@njit(cache=True, nogil=True)
def add_share(p: int, share: float, score: Any, touched: Any, count: int) -> int:
    """Add to the score of part ``p`` (-1: none yet) and note each part once; how many are noted."""
    if p < 0:
        return count
    if score[p] == 0.0:
        touched[count] = p
        count += 1
    score[p] += share
    return count


@njit(cache=True, nogil=True)
def drawn_score(
    block: int, keys: Any, weights: Any, totals: Any, part_of: Any, score: Any, touched: Any
) -> int:
    """Where walks of one and two steps from a block end: shares in ``score`` float64 [parts]; how many
    ``touched``."""
    count = 0
    for slot in range(keys.shape[1]):
        if weights[block, slot] == 0:
            continue
        near = keys[block, slot]
        share = weights[block, slot] / totals[block]
        count = add_share(part_of[near], share, score, touched, count)
        for step in range(keys.shape[1]):
            if weights[near, step] > 0:
                walk = share * (weights[near, step] / totals[near])
                count = add_share(part_of[keys[near, step]], walk, score, touched, count)
    return count


@njit(cache=True, nogil=True)
def assign_blocks(
    order: Any, block_sizes: Any, block_trains: Any, keys: Any, weights: Any, totals: Any, part_of: Any,
    sizes: Any, trains: Any, room: Any, score: Any, touched: Any,
) -> None:  # fmt: skip
    """Fill ``part_of`` int32 [blocks], given as -1, block after block in ``order``; -1 stays where none has
    room.

    ``sizes``, ``trains`` int64 [parts]: nodes and training nodes in each part; ``room`` int64 [3]. The first
    blocks, one for each part, seed the parts: else every block is drawn, however weakly, by the few parts
    begun.
    """
    for i in range(order.size):
        block = order[i]
        size, train = block_sizes[block], block_trains[block]
        best = np.int64(-1)
        best_score = 0.0
        for j in range(drawn_score(block, keys, weights, totals, part_of, score, touched)):
            p = np.int64(touched[j])
            value = score[p] * (1.0 - sizes[p] / room[ALL])
            score[p] = 0.0
            if not has_room(p, size, train, sizes, trains, room):
                continue
            if room[TRAIN] > 0:
                value *= 1.0 - trains[p] / room[TRAIN]
            if value > best_score or (value == best_score and p < best):
                best = p
                best_score = value
        if i < sizes.size:
            best = np.int64(i if has_room(i, size, train, sizes, trains, room) else -1)
        elif best < 0:
            best = np.int64(least_loaded(size, train, sizes, trains, room))
        if best >= 0:
            part_of[block] = best
            sizes[best] += size
            trains[best] += train


@njit(cache=True, nogil=True)
def uncoarsen(block_of: Any, train: Any, part_of: Any, sizes: Any, trains: Any, room: Any) -> None:
    """Replace each node's block by its part; nodes of split blocks fill what room is left, part by part.

    ``train`` bool [nodes], or of size 0 for none; the rest as in :func:`assign_blocks`.
    """
    # The next part with room for a node, for a training node, and, where neither is left, for any.
    cursors = np.zeros(3, np.int64)
    for node in range(block_of.size):
        p = np.int64(part_of[block_of[node]])
        if p < 0:
            kind = np.int64(train.size > 0 and train[node])
            while cursors[kind] < sizes.size and not has_room(cursors[kind], 1, kind, sizes, trains, room):
                cursors[kind] += 1
            while cursors[kind] == sizes.size and sizes[cursors[2]] >= room[ALL]:
                cursors[2] += 1
            p = cursors[kind if cursors[kind] < sizes.size else 2]
            sizes[p] += 1
            trains[p] += kind
        block_of[node] = p
