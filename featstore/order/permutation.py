"""An order of rows, and the orders that take no partitioner: as given, a permutation, by degree.

An :class:`Order` says which node stands in which row, where partitions begin, and how it came about; the last
goes into the manifest, so that a store can say how it was made and be made again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.dtypes import node_dtype
from featstore.base.files import load_given
from featstore.errors import SourceError
from featstore.order.stream import BLOCK_EDGES, GraphLike, NodeIds, degree_counts, node_count

CHECK_ROWS = 1 << 20
_FIXED_BYTES = 1 << 16


@dataclass(frozen=True, eq=False)
class Order:
    """Which node stands in which row.

    ``method``: "given", "permutation", "degree", "metis", "multilevel", "ldg" or "bfs". ``node_of_row``:
    int32 or int64 [rows], or None where every node stands in the row of its own number.
    ``partition_offsets``: int64 [parts + 1], the rows at which partitions begin, and the number of rows; [0,
    rows] where there are no partitions. ``parameters``: provenance.
    """

    method: str
    node_of_row: NodeIds | None
    partition_offsets: NDArray[np.int64]
    parameters: dict[str, int | float | str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.partition_offsets[-1])

    @property
    def parts(self) -> int:
        """The number of partitions, of which some may be empty."""
        return int(self.partition_offsets.size) - 1


def _one_partition(rows: int) -> NDArray[np.int64]:
    return np.array([0, rows], np.int64)


def given_order(rows: int) -> Order:
    """Each node in the row of its own number. Raises SourceError for a negative number of rows."""
    if rows < 0:
        raise SourceError(f"the number of rows must not be negative, not {rows}")
    return Order("given", None, _one_partition(rows))


@njit(cache=True, nogil=True)
def find_fault(ids: Any, seen: Any, rows: int) -> int:
    """Mark ``ids`` in the bitmap ``seen``, uint8; the first position out of range or seen before, or -1."""
    for i in range(ids.size):
        node = ids[i]
        if node < 0 or node >= rows:
            return i
        bit = np.uint8(1 << (node & 7))
        if seen[node >> 3] & bit:
            return i
        seen[node >> 3] |= bit
    return -1


def _load_permutation(path: str | os.PathLike[str]) -> NDArray[Any]:
    try:
        loaded = load_given(path, mapped=True)
    except (OSError, ValueError) as error:
        raise SourceError(
            f"cannot read a permutation from {os.fspath(path)}: {error}; give a .npy file"
        ) from error
    if not isinstance(loaded, np.ndarray):
        loaded.close()
        raise SourceError(
            f"{os.fspath(path)} holds several arrays; give a .npy file with the permutation alone"
        )
    return loaded


def permutation_order(array_or_path: NDArray[Any] | str | os.PathLike[str], rows: int) -> Order:
    """The order in which node ``array[row]`` stands in ``row``; from an integer array [rows] or a ``.npy``
    file of one.

    Holds the result (4 or 8 bytes a row), a bitmap, and one block. Raises SourceError when it is no
    permutation of 0 to rows - 1, and names the first row whose node is out of range or stands in an earlier
    row.
    """
    is_array = isinstance(array_or_path, np.ndarray)
    given: NDArray[Any] = (
        array_or_path if isinstance(array_or_path, np.ndarray) else _load_permutation(array_or_path)
    )
    name = "the permutation" if is_array else f"the permutation in {array_or_path}"
    if given.shape != (rows,) or given.dtype.kind not in "iu":
        raise SourceError(
            f"{name} must be integers of shape ({rows},), not {given.dtype} of shape {given.shape}"
        )
    node_of_row = np.empty(rows, node_dtype(rows))
    seen = np.zeros(-(-rows // 8), np.uint8)
    for first in range(0, rows, CHECK_ROWS):
        # Above 2**63 a uint64 turns negative, which is as much out of range.
        block = given[first : first + CHECK_ROWS].astype(np.int64)
        fault = find_fault(block, seen, rows)
        if fault >= 0:
            row, node = first + fault, int(given[first + fault])
            if not 0 <= node < rows:
                raise SourceError(f"{name} has node {node} in row {row}, but nodes are 0 to {rows - 1}")
            raise SourceError(
                f"{name} has node {node} twice, in row {_first_row(given, node)} and in row {row}"
            )
        node_of_row[first : first + block.size] = block
    return Order("permutation", node_of_row, _one_partition(rows))


def permutation_memory_bytes(rows: int) -> int:
    """The most :func:`permutation_order` allocates, in bytes."""
    return node_dtype(rows).itemsize * rows + rows // 8 + 8 * min(rows, CHECK_ROWS) + _FIXED_BYTES


def _first_row(given: NDArray[Any], node: int) -> int:
    for first in range(0, given.size, CHECK_ROWS):
        found = np.flatnonzero(given[first : first + CHECK_ROWS] == node)
        if found.size:
            return first + int(found[0])
    raise AssertionError(f"node {node} was seen before")


def degree_order(graph: GraphLike) -> Order:
    """Nodes by falling number of occurrences as a source, which is how often sampling asks for them; ties by
    node id.

    The order of Data Tiering (Min et al., KDD'22) and of static caches. Needs 12 or 16 bytes a node and one
    block; see :func:`degree_memory_bytes`. Raises SourceError for a bad graph and for 2**32 nodes or more.
    """
    nodes = node_count(graph)
    check_rankable(nodes)
    return Order("degree", ranked_by_count(degree_counts(graph)), _one_partition(nodes))


def check_rankable(nodes: int) -> None:
    """Raise SourceError for more nodes than keys of count and position, 32 bits each, have room for."""
    if nodes >= 2**32:
        raise SourceError(
            f"nodes are ranked by degree where there are fewer than 2**32 of them, not {nodes:,}, and so are "
            "those of every graph that is packed: pack the rows without a graph"
        )


def ranked_by_count(counts: NDArray[np.uint32]) -> NodeIds:
    """Positions by falling count, ties by position: int32 or int64 [n], n < 2**32. Needs 12 or 16 bytes a
    position."""
    check_rankable(counts.size)
    # Sort (complement of the count, position) packed into one integer: in place, and no two are equal.
    keys = counts.astype(np.uint64)
    np.subtract(np.uint64(2**32 - 1), keys, out=keys)
    np.left_shift(keys, np.uint64(32), out=keys)
    for first in range(0, counts.size, CHECK_ROWS):
        piece = keys[first : first + CHECK_ROWS]
        piece |= np.arange(first, first + piece.size, dtype=np.uint64)
    keys.sort()
    np.bitwise_and(keys, np.uint64(2**32 - 1), out=keys)
    return keys.astype(node_dtype(counts.size))


def degree_memory_bytes(nodes: int, block_edges: int = BLOCK_EDGES) -> int:
    """The most :func:`degree_order` allocates, in bytes, above the graph itself."""
    return (8 + node_dtype(nodes).itemsize) * nodes + 8 * max(block_edges, CHECK_ROWS) + _FIXED_BYTES
