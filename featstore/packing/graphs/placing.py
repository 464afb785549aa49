"""Kernels that bring edges to their targets: counted, placed, and sorted within each target.

Where edges have ids, the numbers that the user knows them by, each goes wherever its source goes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit

_INSERTED_MAX = 24


@njit(cache=True, nogil=True)
def count_targets(
    sources: NDArray[np.int64],
    targets: NDArray[np.int64],
    source_nodes: int,
    nodes: int,
    degrees: NDArray[np.int64],
) -> int:
    """Add one to ``degrees[target]`` per edge. Returns the place of the first edge with an id out of range,
    or -1."""
    for edge in range(targets.size):
        source, target = sources[edge], targets[edge]
        if source < 0 or source >= source_nodes or target < 0 or target >= nodes:
            return edge
        degrees[target] += 1
    return -1


@njit(cache=True, nogil=True)
def place_sources(
    sources: NDArray[np.int64],
    targets: NDArray[np.int64],
    edge_ids: NDArray[np.int64],
    first_node: int,
    cursors: NDArray[np.int64],
    indices: NDArray[Any],
    ids: NDArray[Any],
) -> bool:
    """Put each source, and its edge's id into ``ids`` where there are any, at its target's cursor (of
    ``target - first_node``) and move the cursor on.

    Returns False, having stopped, when an edge has no place: the stream gave other edges than when it was
    counted.
    """
    numbered = edge_ids.size > 0
    for edge in range(targets.size):
        node = targets[edge] - first_node
        if node < 0 or node >= cursors.size or cursors[node] >= indices.size:
            return False
        indices[cursors[node]] = sources[edge]
        if numbered:
            ids[cursors[node]] = edge_ids[edge]
        cursors[node] += 1
    return True


@njit(cache=True, nogil=True)
def sort_with_ids(values: NDArray[Any], ids: NDArray[Any]) -> None:
    """Sort pairs of value and id, in place, and without more memory: short runs by insertion, others by
    heapsort (Williams, CACM 7(6), 1964)."""
    size = values.size
    if size <= _INSERTED_MAX:
        for place in range(1, size):
            value, number, at = values[place], ids[place], place
            while at > 0 and (values[at - 1] > value or (values[at - 1] == value and ids[at - 1] > number)):
                values[at], ids[at] = values[at - 1], ids[at - 1]
                at -= 1
            values[at], ids[at] = value, number
        return
    begin, end = size // 2, size
    while end > 1:
        if begin > 0:  # the heap is made
            begin -= 1
        else:  # the greatest goes behind it
            end -= 1
            values[0], values[end] = values[end], values[0]
            ids[0], ids[end] = ids[end], ids[0]
        value, number, at = values[begin], ids[begin], begin
        child = 2 * at + 1
        while child < end:
            other = child + 1
            if other < end and (
                values[other] > values[child] or (values[other] == values[child] and ids[other] > ids[child])
            ):
                child = other
            if value > values[child] or (value == values[child] and number >= ids[child]):
                break
            values[at], ids[at] = values[child], ids[child]
            at, child = child, 2 * child + 1
        values[at], ids[at] = value, number


@njit(cache=True, nogil=True)
def sort_runs(indptr: NDArray[np.int64], base: int, indices: NDArray[Any], ids: NDArray[Any]) -> None:
    """Sort ``indices[indptr[v] - base : indptr[v + 1] - base]`` for each v, and ``ids``, where there are any,
    with them; runs that ascend already are left alone."""
    for node in range(indptr.size - 1):
        low, high = indptr[node] - base, indptr[node + 1] - base
        for place in range(low + 1, high):
            if indices[place] < indices[place - 1]:
                if ids.size > 0:
                    sort_with_ids(indices[low:high], ids[low:high])
                else:
                    indices[low:high].sort()
                break
