"""Kernels of neighbour sampling: which edges a node picks, and the table that turns node ids into local ids.

:mod:`featstore.sampling.neighbors` has the theory: randomness that is counted, memory that follows the
mini-batch, and trust.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.bitmap import slot_of
from featstore.base.compilation import njit
from featstore.base.hashing import GOLDEN, draw_below, mix64
from featstore.errors import IdError


def table_size(entries: int) -> int:
    """Slots of a hash table for ``entries``: a power of two, at least twice as many."""
    return 1 << max(4, (2 * entries - 1).bit_length())


def seed_table(labels: NDArray[np.int64], seeds: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A hash table of ``dtype`` that holds the label of each seed. Raises IdError where a seed stands
    twice."""
    slots = np.full(table_size(len(labels)), -1, dtype=dtype)
    duplicate = fill_table(slots, labels, len(labels))
    if duplicate >= 0:
        raise IdError(
            f"seed {seeds[duplicate]} stands twice in one mini-batch; pass each seed once (np.unique)"
        )
    return slots


def empty_picks(fanout: int, degree_max: int) -> NDArray[np.int64]:
    """The hash set of :func:`pick_distinct`, empty, for nodes of at most ``degree_max`` neighbours."""
    return np.full((2, table_size(min(fanout, degree_max) if fanout > 0 else 1)), -1, dtype=np.int64)


def make_room(
    node: NDArray[np.int64], slots: NDArray[Any], count: int, bound: int
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """``node`` with room for ``bound`` ids and a table that stays half empty with them."""
    if bound > len(node):
        room = np.empty(bound, dtype=np.int64)
        room[:count] = node[:count]
        node = room
    if table_size(bound) > len(slots):
        slots = np.full(table_size(bound), -1, dtype=slots.dtype)
        fill_table(slots, node, count)
    return node, slots


@njit(cache=True, nogil=True)
def find_or_add(slots: Any, node: Any, count: Any, node_id: Any) -> Any:
    """Local id of ``node_id``; one that is new becomes ``node[count]`` (so a result equal to ``count`` means:
    new)."""
    mask = np.uint64(len(slots) - 1)
    slot = mix64(np.uint64(node_id)) & mask
    while True:
        local = slots[slot]
        if local < 0:
            slots[slot] = count
            node[count] = node_id
            return count
        if node[local] == node_id:
            return local
        slot = (slot + np.uint64(1)) & mask


@njit(cache=True, nogil=True)
def fill_table(slots: Any, node: Any, count: Any) -> Any:
    """Enter ``node[:count]`` into an empty table. Returns -1, or the position of the first id that stands
    twice."""
    for position in range(count):
        if find_or_add(slots, node, position, node[position]) != position:
            return position
    return -1


@njit(cache=True, nogil=True)
def hop_size(indptr: Any, edge_total: Any, node: Any, begin: Any, end: Any, fanout: Any) -> Any:
    """Edges that ``node[begin:end]`` will sample and their largest degree; (-1 - position, 0) where offsets
    are wrong."""
    edge_count = 0
    degree_max = 0
    for position in range(begin, end):
        low = indptr[node[position]]
        high = indptr[node[position] + 1]
        if low < 0 or high < low or high > edge_total or high - low >= 4294967296:
            return -1 - position, 0
        degree = high - low
        degree_max = max(degree_max, degree)
        edge_count += degree if fanout < 0 else min(degree, fanout)
    return edge_count, degree_max


@njit(cache=True, nogil=True)
def pick_distinct(key: Any, degree: Any, fanout: Any, picks: Any, stamp: Any, out: Any) -> None:
    """Floyd's algorithm: ``fanout`` distinct numbers below ``degree`` into ``out``, each set equally likely.

    ``picks``: int64[2, power of two], a hash set: row 0 the stamp of who entered the number in row 1, so that
    the next node with another stamp finds it empty.
    """
    mask = np.uint64(picks.shape[1] - 1)
    for draw in range(fanout):
        top = degree - fanout + draw
        word = mix64(key + np.uint64(draw + 1) * GOLDEN)
        pick = np.int64(draw_below(word, np.uint64(top + 1)))
        slot = mix64(np.uint64(pick)) & mask
        while picks[0, slot] == stamp:
            if picks[1, slot] == pick:
                # Taken already. `top` cannot be: all earlier numbers are below it.
                pick = top
                slot = mix64(np.uint64(pick)) & mask
            else:
                slot = (slot + np.uint64(1)) & mask
        picks[0, slot] = stamp
        picks[1, slot] = pick
        out[draw] = pick


@njit(cache=True, nogil=True)
def draw_again(key: Any, degree: Any, fanout: Any, out: Any) -> None:
    """With replacement: ``fanout`` numbers below ``degree``, which is not 0, into ``out``."""
    for draw in range(fanout):
        out[draw] = np.int64(draw_below(mix64(key + np.uint64(draw + 1) * GOLDEN), np.uint64(degree)))


@njit(cache=True, nogil=True)
def pick_edges(
    key: Any, node_id: Any, low: Any, degree: Any, fanout: Any, picks: Any, stamp: Any, out: Any
) -> Any:
    """The picked ones among the edges ``low`` to ``low + degree`` of a node, into the front of ``out``;
    returns how many.

    ``key`` is that of the hop; ``picks`` and ``stamp`` are those of :func:`pick_distinct`.
    """
    if fanout < 0 or degree <= fanout:
        for draw in range(degree):
            out[draw] = low + draw
        return degree
    pick_distinct(mix64(key ^ mix64(np.uint64(node_id))), degree, fanout, picks, stamp, out)
    for draw in range(fanout):
        out[draw] += low
    return fanout


@njit(cache=True, nogil=True)
def pick_edges_again(key: Any, node_id: Any, low: Any, degree: Any, fanout: Any, out: Any) -> Any:
    """As :func:`pick_edges`, with replacement: ``fanout`` of a node that has any."""
    if degree == 0:
        return 0
    draw_again(mix64(key ^ mix64(np.uint64(node_id))), degree, fanout, out)
    for draw in range(fanout):
        out[draw] += low
    return fanout


@njit(cache=True, nogil=True)
def count_asking(offsets: Any, rows: Any, begin: Any, end: Any) -> Any:
    """How many of ``rows[begin:end]`` have any edges."""
    count = 0
    for position in range(begin, end):
        count += offsets[rows[position] + 1] > offsets[rows[position]]
    return count


@njit(cache=True, nogil=True)
def sample_hop(
    indptr: Any, indices: Any, source_total: Any, targets: Any, begin: Any, end: Any, fanout: Any, key: Any,
    slots: Any, node: Any, count: Any, picks: Any, row: Any, col: Any, edge: Any,
) -> Any:  # fmt: skip
    """Sample the neighbours of ``targets[begin:end]``, write their edges, and append new nodes from
    ``node[count]`` on. ``targets`` and ``node`` are the same array where both ends of edges are of one type.

    Returns how many nodes there are now, or -1 - e where ``indices[e]`` is none of ``source_total``. Sizes
    and offsets: see :func:`hop_size`.
    """
    filled = 0
    for position in range(begin, end):
        low = indptr[targets[position]]
        degree = indptr[targets[position] + 1] - low
        taken = pick_edges(key, targets[position], low, degree, fanout, picks, position, edge[filled:])
        for place in range(filled, filled + taken):
            neighbour = np.int64(indices[edge[place]])
            if neighbour < 0 or neighbour >= source_total:
                return -1 - edge[place]
            local = find_or_add(slots, node, count, neighbour)
            if local == count:
                count += 1
            row[place] = local
            col[place] = position
        filled += taken
    return count


@njit(cache=True, nogil=True)
def pick_hop(
    offsets: Any, node_of_row: Any, rows: Any, begin: Any, end: Any, fanout: Any, replace: Any, key: Any,
    bits: Any, ranks: Any, starts: Any, lists: Any, first: Any, picks: Any, row: Any, col: Any, edge: Any,
) -> Any:  # fmt: skip
    """Pick the edges of ``rows[begin:end]``: their positions into ``edge``, who asks into ``col``, and into
    ``row`` the neighbour where the cache holds it, else -1. Returns how many of ``row`` are negative.

    ``node_of_row`` is empty where row = node id; ``bits``, ``ranks``, ``starts``, ``lists`` and ``first`` are
    those of :class:`featstore.sampling.cache.NeighbourCache`, empty where nothing is cached. ``replace``:
    with replacement. Sizes and offsets: see :func:`hop_size`.
    """
    identity = node_of_row.shape[0] == 0
    cached = bits.shape[0] > 0
    filled = 0
    misses = 0
    for position in range(begin, end):
        asking = rows[position]
        low = offsets[asking]
        node_id = asking if identity else np.int64(node_of_row[asking])
        degree = offsets[asking + 1] - low
        if replace and fanout >= 0:
            taken = pick_edges_again(key, node_id, low, degree, fanout, edge[filled:])
        else:
            taken = pick_edges(key, node_id, low, degree, fanout, picks, position, edge[filled:])
        slot = slot_of(asking, bits, ranks) if cached else np.int64(-1)
        for place in range(filled, filled + taken):
            col[place] = position
            if slot >= 0:
                row[place] = lists[starts[slot] + edge[place] - low]
            elif edge[place] < first.shape[0]:
                row[place] = first[edge[place]]
            else:
                row[place] = -1
            misses += row[place] < 0
        filled += taken
    return misses


@njit(cache=True, nogil=True)
def enter_hop(slots: Any, rows: Any, count: Any, row: Any, row_total: Any) -> Any:
    """Turn the neighbours in ``row`` into local ids, in order; new ones become ``rows[count]`` and so on.

    Returns how many rows there are now, or -1 - place for the first that is none of ``row_total`` rows.
    """
    for place in range(len(row)):
        neighbour = row[place]
        if neighbour < 0 or neighbour >= row_total:
            return -1 - place
        local = find_or_add(slots, rows, count, neighbour)
        if local == count:
            count += 1
        row[place] = local
    return count
