"""From part numbers to rows: a stable counting sort.

Rows of one part stand together, parts stand in the order of their numbers, and inside a part node ids ascend;
so equal partitions give equal stores, byte for byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.dtypes import node_dtype
from featstore.errors import SourceError
from featstore.order.stream import NodeIds


@njit(cache=True, nogil=True)
def count_parts(part: Any, offsets: Any) -> int:
    """Fill ``offsets`` int64 [parts + 1] with where each part begins; the first node of no such part, or
    -1."""
    parts = offsets.size - 1
    for node in range(part.size):
        p = part[node]
        if p < 0 or p >= parts:
            return node
        offsets[p + 1] += 1
    for p in range(parts):
        offsets[p + 1] += offsets[p]
    return -1


@njit(cache=True, nogil=True)
def place_nodes(part: Any, cursors: Any, node_of_row: Any) -> None:
    """Write each node at its part's cursor, which moves on."""
    for node in range(part.size):
        p = part[node]
        node_of_row[cursors[p]] = node
        cursors[p] += 1


def order_of_parts(part: NDArray[np.int32], parts: int) -> tuple[NodeIds, NDArray[np.int64]]:
    """(``node_of_row`` int32 or int64 [nodes], ``partition_offsets`` int64 [parts + 1]) of ``part`` int32
    [nodes].

    Holds 4 or 8 bytes a node and 16 a part. Raises SourceError for a part number outside 0 to parts - 1.
    """
    if parts < 1:
        raise SourceError(f"parts must be at least 1, not {parts}")
    offsets = np.zeros(parts + 1, np.int64)
    bad = count_parts(part, offsets)
    if bad >= 0:
        raise SourceError(f"node {bad} is in part {int(part[bad])}, but parts are 0 to {parts - 1}")
    node_of_row = np.empty(part.size, node_dtype(part.size))
    place_nodes(part, offsets[:-1].copy(), node_of_row)
    return node_of_row, offsets


@njit(cache=True, nogil=True)
def count_start(part: Any, groups: Any, parts: int, sizes: Any) -> int:
    """Add the nodes of each group in each part to ``sizes``; the first node of no such part, or -1."""
    for group in range(groups.size - 1):
        for node in range(groups[group], groups[group + 1]):
            if part[node] < 0 or part[node] >= parts:
                return node
            sizes[group * parts + part[node]] += 1
    return -1


def part_sizes(start: NDArray[np.int32], groups: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """Nodes of each group in each part, int64 [groups * parts], of parts to go on from. Raises
    SourceError."""
    nodes, sizes = int(groups[-1]), np.zeros(parts * (len(groups) - 1), np.int64)
    if start.shape != (nodes,) or start.dtype != np.int32:
        raise SourceError(
            f"start must be int32 of shape ({nodes},), not {start.dtype} of shape {start.shape}"
        )
    bad = count_start(start, groups, parts, sizes)
    if bad >= 0:
        raise SourceError(f"start has node {bad} in part {int(start[bad])}, but parts are 0 to {parts - 1}")
    return sizes


def order_of_parts_bytes(nodes: int, parts: int) -> int:
    """What :func:`order_of_parts` allocates, in bytes, beside the part numbers it is given."""
    return node_dtype(nodes).itemsize * nodes + 16 * (parts + 1)
