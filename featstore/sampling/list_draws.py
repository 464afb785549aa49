"""Kernels of sampling from lists on disk, by the draws of :mod:`featstore.sampling.choosing`.

Nodes are rows here; what one draws follows from its node id. Lists are read in the order of rows, some at a
time, so each node has a place of its own for what it draws, and the places are closed up afterwards. A
table's part that is at hand is flat, with where in it each list begins: whole pages (:func:`list_pages`), or
the first values of the table.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from featstore.base.bitmap import slot_of
from featstore.base.compilation import njit
from featstore.sampling.choosing import draw_from_list, find_in_tree, time_run

#: What may be wrong with a value of an edge, as :func:`draw_lists` and :func:`induce_lists` say it.
BAD_SOURCE, BAD_WEIGHT, BAD_TIME = 1, 2, 3


@njit(cache=True, nogil=True)
def list_pages(lows: Any, highs: Any, page_shift: Any, pages: Any, begins: Any) -> Any:
    """The distinct pages, of ``1 << page_shift`` values, that have the lists ``lows`` to ``highs``, which
    ascend and are the same or apart, and in ``begins`` where each begins when these pages stand one after the
    other. Returns how many."""
    count, last = 0, np.int64(-1)
    for i in range(len(lows)):
        begins[i] = 0
        if highs[i] <= lows[i]:
            continue
        first, end = lows[i] >> page_shift, (highs[i] - 1) >> page_shift
        at = count if first > last else count - (last - first + 1)
        begins[i] = (at << page_shift) + (lows[i] & ((1 << page_shift) - 1))
        for page in range(max(first, last + 1), end + 1):
            pages[count] = page
            count += 1
        last = max(last, end)
    return count


@njit(cache=True, nogil=True)
def list_times(times: Any, begin: Any, degree: Any, sources: Any, source_begin: Any, node_times: Any) -> Any:
    """The times of a list and the order in which they ascend, empty where they do as they stand: those of
    edges, or of nodes by ``sources``. Returns also the place in the list of the first that is wrong, -1 where
    none is, and how."""
    none = np.empty(0, np.int64)
    if node_times.shape[0] == 0:
        own = times[begin : begin + degree] if times.shape[0] > 0 else times
        for place in range(1, own.shape[0]):
            if own[place] < own[place - 1]:
                return own, none, place, BAD_TIME
        return own, none, -1, 0
    own = np.empty(degree, np.int64)
    falls = False
    for place in range(degree):
        source = sources[source_begin + place]
        if source < 0 or source >= node_times.shape[0]:
            return own, none, place, BAD_SOURCE
        own[place] = node_times[source]
        falls = falls or (place > 0 and own[place] < own[place - 1])
    return own, np.argsort(own, kind="mergesort") if falls else none, -1, 0


@njit(cache=True, nogil=True)
def bad_weight(weights: Any) -> Any:
    """The first that is negative or not finite; -1 where none is."""
    for place in range(weights.shape[0]):
        if not 0 <= weights[place] < np.inf:
            return place
    return -1


@njit(cache=True, nogil=True)
def draw_lists(
    offsets: Any, nodes: Any, rows: Any, trees: Any, some: Any, fanout: Any, key: Any, replace: Any,
    last: Any, has_trees: Any, weights: Any, weights_at: Any, times: Any, times_at: Any, sources: Any,
    sources_at: Any, node_times: Any, lows: Any, highs: Any, picks: Any, keys: Any, places: Any, row: Any,
    edge: Any, taken: Any,
) -> Any:  # fmt: skip
    """Draw the edges of ``rows[some]``, which are the ``nodes[some]``, and whose values begin at
    ``weights_at``, ``times_at``, ``sources_at`` of the flat ones, where there are any. What node ``p`` draws
    goes to ``edge`` from ``places[p]`` on, positions in the table of lists, and where ``sources`` are there
    also into ``row``; ``taken[p]`` is how many.

    ``node_times``: by row of the sources, where times are those of nodes. ``lows``, ``highs``: of each row,
    the first and the last time that its tree allows. All else: see
    :func:`featstore.sampling.choosing.draw_hop`. Returns (0, 0), or what is wrong and at which position of
    the table.
    """
    for i in range(len(some)):
        at = some[i]
        low, tree = offsets[rows[at]], trees[at] if has_trees else np.int64(0)
        degree = offsets[rows[at] + 1] - low
        own = weights[weights_at[i] : weights_at[i] + degree] if weights.shape[0] > 0 else weights
        wrong = bad_weight(own)
        if wrong >= 0:
            return BAD_WEIGHT, low + wrong
        when, order, wrong, how = list_times(times, times_at[i], degree, sources, sources_at[i], node_times)
        if wrong >= 0:
            return how, low + wrong
        place = places[at]
        earliest = lows[at] if when.shape[0] > 0 else np.int64(0)
        latest = highs[at] if when.shape[0] > 0 else np.int64(0)
        taken[at] = draw_from_list(
            key, nodes[at], tree, np.int64(0), degree, fanout, replace, last, has_trees, own, order, when,
            order[:0], earliest, latest, picks, at, keys, edge[place:],
        )  # fmt: skip
        for drawn in range(place, place + taken[at]):
            if sources.shape[0] > 0:
                row[drawn] = sources[sources_at[i] + edge[drawn]]
            edge[drawn] += low
    return 0, np.int64(0)


@njit(cache=True, nogil=True)
def close_up(places: Any, taken: Any, begin: Any, row: Any, col: Any, edge: Any) -> Any:
    """Let what nodes ``begin``, ``begin + 1`` and so on drew stand side by side, with who asked in ``col``.
    Returns how many there are."""
    filled = 0
    for at in range(len(places)):
        for place in range(places[at], places[at] + taken[at]):
            row[filled], col[filled], edge[filled] = row[place], begin + at, edge[place]
            filled += 1
    return filled


@njit(cache=True, nogil=True)
def find_held(
    offsets: Any, rows: Any, bits: Any, ranks: Any, starts: Any, lists: Any, first: Any, row: Any, col: Any,
    edge: Any,
) -> Any:  # fmt: skip
    """Write into ``row`` the neighbour of each of ``edge``, of the list of ``rows[col]``, where a
    :class:`featstore.sampling.cache.NeighbourCache` holds it, else -1. Returns how many are negative."""
    misses = 0
    for place in range(len(edge)):
        asking = rows[col[place]]
        slot = slot_of(asking, bits, ranks) if bits.shape[0] > 0 else np.int64(-1)
        if slot >= 0:
            row[place] = lists[starts[slot] + edge[place] - offsets[asking]]
        elif edge[place] < first.shape[0]:
            row[place] = first[edge[place]]
        else:
            row[place] = -1
        misses += row[place] < 0
    return misses


@njit(cache=True, nogil=True)
def enter_trees(
    slots: Any, nodes: Any, trees: Any, count: Any, row: Any, col: Any, target_trees: Any, row_total: Any
) -> Any:
    """As :func:`featstore.sampling.picking.enter_hop`, into the tree of who asked, ``target_trees[col]``."""
    for place in range(len(row)):
        neighbour = row[place]
        if neighbour < 0 or neighbour >= row_total:
            return -1 - place
        tree = target_trees[col[place]]
        local = find_in_tree(slots, nodes, trees, count, neighbour, tree, True)
        if local == count:
            count += 1
        row[place] = local
    return count


@njit(cache=True, nogil=True)
def induce_lists(
    offsets: Any, rows: Any, row_trees: Any, some: Any, slots: Any, nodes: Any, node_trees: Any, times: Any,
    times_at: Any, sources: Any, sources_at: Any, node_times: Any, lows: Any, highs: Any, row: Any, col: Any,
    edge: Any,
) -> Any:  # fmt: skip
    """All edges into ``rows[some]`` that come from ``nodes`` of the same tree, in the order of the lists,
    into ``row``, ``col`` and ``edge`` as far as these reach. Returns (how many there are, 0), or what is
    wrong, as a negative number, and at which position of the table."""
    filled = 0
    for i in range(len(some)):
        at = some[i]
        low, tree = offsets[rows[at]], row_trees[at]
        degree = offsets[rows[at] + 1] - low
        when, order, wrong, how = list_times(times, times_at[i], degree, sources, sources_at[i], node_times)
        if wrong >= 0:
            return -how, low + wrong
        begin, end = np.int64(0), degree
        if when.shape[0] > 0:
            begin, end = time_run(begin, end, lows[tree], highs[tree], order, when, order[:0])
        for place in range(begin, end):
            found = np.int64(place) if order.shape[0] == 0 else order[place]
            source = np.int64(sources[sources_at[i] + found])
            local = find_in_tree(slots, nodes, node_trees, 0, source, tree, False)
            if local < 0:
                continue
            if filled < row.shape[0]:
                row[filled], col[filled], edge[filled] = local, at, low + found
            filled += 1
    return filled, np.int64(0)
