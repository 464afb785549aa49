"""Kernels of what a host draws from the lists of its own nodes, by numbers of the store that was split."""

from __future__ import annotations

from typing import Any

import numpy as np

from featstore.base.compilation import njit
from featstore.sampling.picking import pick_edges


@njit(cache=True, nogil=True)
def begin_of(row: Any, offsets: Any, run_rows: Any, run_edges: Any) -> Any:
    """Where the list of a part's row begins in the store that was split."""
    run = np.searchsorted(run_rows, row, side="right") - 1
    return run_edges[run] + offsets[row] - offsets[run_rows[run]]


@njit(cache=True, nogil=True)
def begins_of(rows: Any, offsets: Any, run_rows: Any, run_edges: Any, begins: Any) -> None:
    """The same of some rows."""
    for i in range(rows.shape[0]):
        begins[i] = begin_of(rows[i], offsets, run_rows, run_edges)


@njit(cache=True, nogil=True)
def pick_own(
    offsets: Any, rows: Any, run_rows: Any, run_edges: Any, nodes: Any, fanout: Any, key: Any, skip: Any,
    picks: Any, degrees: Any, begins: Any, positions: Any,
) -> Any:  # fmt: skip
    """Pick among the lists of a host's ``nodes``, which are ``rows`` of its own store: positions of edges
    into ``positions``, as many as fit where ``fanout`` is -1. ``degrees`` and ``begins`` are filled for each
    node. ``skip``: edges of the first node that are left out, of fan-out -1.

    Returns how many positions there are, or -1 - i for a node whose list cannot be.
    """
    filled = 0
    for i in range(nodes.shape[0]):
        low = offsets[rows[i]]
        degree = offsets[rows[i] + 1] - low
        if degree >= 4294967296:
            return -1 - i
        degrees[i] = degree
        begins[i] = begin_of(rows[i], offsets, run_rows, run_edges)
        if fanout < 0:
            first = skip if i == 0 else 0
            for place in range(first, min(degree, first + positions.shape[0] - filled)):
                positions[filled] = low + place
                filled += 1
        else:
            filled += pick_edges(key, nodes[i], low, degree, fanout, picks, i, positions[filled:])
    return filled


@njit(cache=True, nogil=True)
def close_drawn(
    offsets: Any, rows: Any, at: Any, taken: Any, edge: Any, skip: Any, positions: Any, places: Any
) -> Any:
    """Let what ``rows`` drew, from ``edge[at]`` on, stand side by side in ``positions``, as far as there is
    room, but for the first ``skip`` of the first row; and where it is in the list in ``places``. Returns how
    many there are."""
    filled = 0
    for i in range(rows.shape[0]):
        for drawn in range(at[i] + (skip if i == 0 else 0), at[i] + taken[i]):
            if filled == positions.shape[0]:
                return filled
            positions[filled] = edge[drawn]
            places[filled] = edge[drawn] - offsets[rows[i]]
            filled += 1
    return filled


@njit(cache=True, nogil=True)
def longest_of(offsets: Any) -> Any:
    """The length of the longest list."""
    longest = np.int64(0)
    for row in range(offsets.shape[0] - 1):
        longest = max(longest, offsets[row + 1] - offsets[row])
    return longest
