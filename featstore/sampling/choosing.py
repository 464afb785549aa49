"""Kernels of sampling with options: with replacement, by weights, within time, and one subgraph a seed.

Randomness is counted as in :mod:`featstore.sampling.neighbors`: what a node draws follows from its key and
the number of the draw, or of the edge in its list.

**Weights.** Without replacement each edge gets an exponential variate over its weight, and those with the
smallest are taken: the keys of Efraimidis and Spirakis (Information Processing Letters 97(5), 2006) in
logarithms. They come in the order in which they would be drawn one after the other. With replacement a draw
is a place in the running sum of the weights. Both look at the whole list. The logarithm is made of sums,
products and quotients here, whose bits are the same on every machine, as those of a system's own are not.

**Time.** Lists stand in ascending time, or are looked at through an ``order`` in which they do, so that what
time allows is one run of a list, found by halving.

**Trees.** Where each seed has a subgraph of its own, a node is known by its id and the number of the seed,
its ``tree``; without that all have tree 0.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.hashing import GOLDEN, mix64
from featstore.sampling.picking import draw_again, pick_distinct, table_size

_LN2 = math.log(2.0)
_SQRT_HALF = math.sqrt(0.5)
_SERIES = tuple(1.0 / odd for odd in range(23, 0, -2))  # of the area hyperbolic tangent


@njit(cache=True, nogil=True)
def exponential(word: Any) -> Any:
    """A random word (uint64) as an exponential variate: -log of a multiple of 2**-53 in (0, 1]."""
    fraction, exponent = math.frexp(np.float64((word >> np.uint64(11)) + np.uint64(1)))
    if fraction < _SQRT_HALF:
        fraction *= 2.0
        exponent -= 1
    part = (fraction - 1.0) / (fraction + 1.0)
    square = part * part
    series = 0.0
    for factor in _SERIES:
        series = series * square + factor
    return (53 - exponent) * _LN2 - 2.0 * part * series


@njit(cache=True, nogil=True)
def edge_at(place: Any, order: Any) -> Any:
    """The edge at a place of a list in ascending time."""
    return np.int64(place) if order.shape[0] == 0 else order[place]


@njit(cache=True, nogil=True)
def time_at(place: Any, order: Any, times: Any, sources: Any) -> Any:
    """The time at a place of a list; ``sources``: of each edge, where times are those of nodes, else
    empty."""
    edge = edge_at(place, order)
    return times[edge] if sources.shape[0] == 0 else times[sources[edge]]


@njit(cache=True, nogil=True)
def time_run(low: Any, high: Any, first: Any, last: Any, order: Any, times: Any, sources: Any) -> Any:
    """The run of the places ``low`` to ``high`` of a list whose times are from ``first`` to ``last``."""
    begin, end = low, high
    while begin < end:
        middle = (begin + end) >> 1
        if time_at(middle, order, times, sources) < first:
            begin = middle + 1
        else:
            end = middle
    low, end = begin, high
    while begin < end:
        middle = (begin + end) >> 1
        if time_at(middle, order, times, sources) <= last:
            begin = middle + 1
        else:
            end = middle
    return low, begin


@njit(cache=True, nogil=True)
def sift_down(keys: Any, edges: Any, count: Any, at: Any) -> None:
    """Let what stands at ``at`` sink in a heap of ``count`` whose largest key, then edge, is on top."""
    while True:
        child = 2 * at + 1
        if child >= count:
            return
        if child + 1 < count and (
            keys[child + 1] > keys[child]
            or (keys[child + 1] == keys[child] and edges[child + 1] > edges[child])
        ):
            child += 1
        if keys[at] > keys[child] or (keys[at] == keys[child] and edges[at] > edges[child]):
            return
        keys[at], keys[child] = keys[child], keys[at]
        edges[at], edges[child] = edges[child], edges[at]
        at = child


@njit(cache=True, nogil=True)
def pick_weighted(
    key: Any, first: Any, low: Any, high: Any, fanout: Any, order: Any, weights: Any, keys: Any, out: Any
) -> Any:
    """Without replacement: up to ``fanout`` edges of weight above 0 from the places ``low`` to ``high`` of
    the list that begins at ``first``, into ``out``, those drawn first in front. Returns how many."""
    count = 0
    if fanout < 0 or high - low <= fanout:
        for place in range(low, high):
            edge = edge_at(place, order)
            if weights[edge] > 0:
                out[count] = edge
                count += 1
        return count
    for place in range(low, high):
        edge = edge_at(place, order)
        if weights[edge] <= 0:
            continue
        drawn = exponential(mix64(key + np.uint64(edge - first + 1) * GOLDEN)) / np.float64(weights[edge])
        if count < fanout:
            keys[count], out[count] = drawn, edge
            count += 1
            if count == fanout:
                for at in range(count // 2 - 1, -1, -1):
                    sift_down(keys, out, count, at)
        elif drawn < keys[0] or (drawn == keys[0] and edge < out[0]):
            keys[0], out[0] = drawn, edge
            sift_down(keys, out, count, 0)
    if count < fanout:
        for at in range(count // 2 - 1, -1, -1):
            sift_down(keys, out, count, at)
    for rest in range(count - 1, 0, -1):
        keys[0], keys[rest] = keys[rest], keys[0]
        out[0], out[rest] = out[rest], out[0]
        sift_down(keys, out, rest, 0)
    return count


@njit(cache=True, nogil=True)
def pick_weighted_again(
    key: Any, low: Any, high: Any, fanout: Any, order: Any, weights: Any, sums: Any, out: Any
) -> Any:
    """With replacement: ``fanout`` edges from the places ``low`` to ``high``, into ``out``. Returns how many:
    none where all weights are 0."""
    total = 0.0
    for place in range(low, high):
        total += np.float64(weights[edge_at(place, order)])
        sums[place - low] = total
    if not total > 0.0:
        return 0
    for draw in range(fanout):
        word = mix64(key + np.uint64(draw + 1) * GOLDEN)
        limit = np.float64(word >> np.uint64(11)) * (1.0 / 9007199254740992.0) * total
        begin, end = 0, high - low - 1
        while begin < end:
            middle = (begin + end) >> 1
            if sums[middle] > limit:
                end = middle
            else:
                begin = middle + 1
        out[draw] = edge_at(low + begin, order)
    return fanout


@njit(cache=True, nogil=True)
def pick_uniform(
    key: Any, low: Any, high: Any, fanout: Any, replace: Any, order: Any, picks: Any, stamp: Any, out: Any
) -> Any:
    """Edges from the places ``low`` to ``high``, each as likely, into ``out``. Returns how many. ``picks``
    and ``stamp``: see :func:`featstore.sampling.picking.pick_distinct`."""
    degree = high - low
    taken = fanout
    if fanout < 0 or (degree <= fanout and not replace):
        taken = degree
        for draw in range(taken):
            out[draw] = draw
    elif degree == 0:
        return 0
    elif replace:
        draw_again(key, degree, fanout, out)
    else:
        pick_distinct(key, degree, fanout, picks, stamp, out)
    for draw in range(taken):
        out[draw] = edge_at(low + out[draw], order)
    return taken


@njit(cache=True, nogil=True)
def find_in_tree(slots: Any, nodes: Any, trees: Any, count: Any, node: Any, tree: Any, add: Any) -> Any:
    """Local id of a node of a tree. One that is new becomes number ``count`` where it is to be added, else
    -1."""
    mask = np.uint64(len(slots) - 1)
    slot = mix64(np.uint64(node) + mix64(np.uint64(tree))) & mask
    while True:
        local = slots[slot]
        if local < 0:
            if not add:
                return np.int64(-1)
            slots[slot] = count
            nodes[count] = node
            trees[count] = tree
            return np.int64(count)
        if nodes[local] == node and trees[local] == tree:
            return np.int64(local)
        slot = (slot + np.uint64(1)) & mask


@njit(cache=True, nogil=True)
def fill_trees(slots: Any, nodes: Any, trees: Any, count: Any) -> Any:
    """Enter the first ``count`` nodes into an empty table. Returns -1, or the first that stands twice."""
    for position in range(count):
        if find_in_tree(slots, nodes, trees, position, nodes[position], trees[position], True) != position:
            return position
    return -1


@njit(cache=True, nogil=True)
def draw_from_list(
    key: Any, node: Any, tree: Any, first: Any, high: Any, fanout: Any, replace: Any, last: Any,
    has_trees: Any, weights: Any, order: Any, times: Any, sources: Any, earliest: Any, latest: Any,
    picks: Any, stamp: Any, keys: Any, out: Any,
) -> Any:  # fmt: skip
    """What a node draws of its list, the places ``first`` to ``high``, into the front of ``out``; returns how
    many. ``key`` is that of the hop; ``earliest`` and ``latest``: the times that its tree allows, where there
    are any. All else: see :func:`draw_hop`, and for ``picks`` and ``stamp``
    :func:`featstore.sampling.picking.pick_distinct`."""
    low = first
    if times.shape[0] > 0:
        low, high = time_run(low, high, earliest, latest, order, times, sources)
    if last and fanout >= 0:
        low = max(low, high - fanout)
    own = mix64(key + np.uint64(tree + 1) * GOLDEN) if has_trees else key
    own = mix64(own ^ mix64(np.uint64(node)))
    if weights.shape[0] == 0:
        return pick_uniform(own, low, high, fanout, replace, order, picks, stamp, out)
    if replace and fanout >= 0:
        return pick_weighted_again(own, low, high, fanout, order, weights, keys, out)
    return pick_weighted(own, first, low, high, fanout, order, weights, keys, out)


@njit(cache=True, nogil=True)
def draw_hop(
    indptr: Any, indices: Any, source_total: Any, targets: Any, target_trees: Any, begin: Any, end: Any,
    fanout: Any, key: Any, slots: Any, nodes: Any, trees: Any, count: Any, replace: Any, last: Any,
    has_trees: Any, weights: Any, order: Any, times: Any, sources: Any, lows: Any, highs: Any, picks: Any,
    keys: Any, row: Any, col: Any, edge: Any,
) -> Any:  # fmt: skip
    """As :func:`featstore.sampling.picking.sample_hop`, with options. ``weights`` and ``times`` are empty
    where there are none; ``lows`` and ``highs``: of each tree, the first and the last time that it allows;
    ``keys``: scratch of as many as a node draws, with replacement as its list has.

    Returns (how many nodes there are now, or -1 - e where ``indices[e]`` is no node; edges).
    """
    filled = 0
    for position in range(begin, end):
        node, tree = targets[position], target_trees[position]
        earliest = lows[tree] if times.shape[0] > 0 else np.int64(0)
        latest = highs[tree] if times.shape[0] > 0 else np.int64(0)
        taken = draw_from_list(
            key, node, tree, indptr[node], indptr[node + 1], fanout, replace, last, has_trees, weights, order,
            times, sources, earliest, latest, picks, position, keys, edge[filled:],
        )  # fmt: skip
        for place in range(filled, filled + taken):
            source = np.int64(indices[edge[place]])
            if source < 0 or source >= source_total:
                return -1 - edge[place], 0
            local = find_in_tree(slots, nodes, trees, count, source, tree, True)
            if local == count:
                count += 1
            row[place] = local
            col[place] = position
        filled += taken
    return count, filled


@njit(cache=True, nogil=True)
def induce_edges(
    indptr: Any, indices: Any, targets: Any, target_trees: Any, count: Any, slots: Any, nodes: Any,
    trees: Any, order: Any, times: Any, sources: Any, lows: Any, highs: Any, row: Any, col: Any, edge: Any,
) -> Any:  # fmt: skip
    """All edges into the first ``count`` of ``targets`` that come from ``nodes`` of the same tree, in the
    order of the lists, into ``row``, ``col`` and ``edge`` as far as these reach. Returns how many there
    are."""
    filled = 0
    for position in range(count):
        node, tree = targets[position], target_trees[position]
        low, high = indptr[node], indptr[node + 1]
        if times.shape[0] > 0:
            low, high = time_run(low, high, lows[tree], highs[tree], order, times, sources)
        for place in range(low, high):
            found = edge_at(place, order)
            local = find_in_tree(slots, nodes, trees, 0, np.int64(indices[found]), tree, False)
            if local < 0:
                continue
            if filled < row.shape[0]:
                row[filled] = local
                col[filled] = position
                edge[filled] = found
            filled += 1
    return filled


def room_in_trees(
    nodes: NDArray[np.int64], trees: NDArray[np.int64], slots: NDArray[np.int64], count: int, bound: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Nodes and trees with room for ``bound``, and a table that stays half empty with them."""
    if bound > len(nodes):
        room = np.empty((2, bound), np.int64)
        room[0, :count], room[1, :count] = nodes[:count], trees[:count]
        nodes, trees = room
    if table_size(bound) > len(slots):
        slots = np.full(table_size(bound), -1, np.int64)
        fill_trees(slots, nodes, trees, count)
    return nodes, trees, slots


def order_in_time(
    indptr: NDArray[np.int64], times: NDArray[np.int64], sources: NDArray[Any]
) -> NDArray[np.int64]:
    """int64 [edges]: the order in which each list ascends in time, those of one time as they stand; empty
    where they all ascend as they are."""
    of_edges = times[sources] if len(sources) else times
    falls = np.flatnonzero(of_edges[1:] < of_edges[:-1]) + 1
    begins = np.zeros(len(of_edges) + 1, bool)
    begins[indptr] = True
    if begins[falls].all():
        return np.empty(0, np.int64)
    targets = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    return np.lexsort((of_edges, targets))
