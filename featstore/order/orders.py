"""The order of rows on disk, and the choice of one.

An :class:`Order` says which node stands in which row, where partitions begin, and how it came about; the last
goes into the manifest, so that a store can say how it was made and be made again. :func:`make_order` is the
door for packing: it takes a method or chooses one, and stays within the memory it is given.

"auto" chooses by what is known: without a graph the order stays as given; a table of one partition needs no
order; METIS where it is installed and its memory fits; the multilevel partitioner where only METIS is
installed; restreamed LDG otherwise. The reason goes into the parameters.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.dtypes import node_dtype
from featstore.errors import BudgetError, SourceError
from featstore.order.ldg import PASSES, SLACK, ldg_memory_bytes, ldg_partition
from featstore.order.metis import metis_installed, metis_memory_bytes, metis_partition, survey_graph
from featstore.order.multilevel import (
    CLUSTERS_PER_PART,
    REFINE_PASSES,
    multilevel_memory_bytes,
    multilevel_partition,
)
from featstore.order.parts import order_of_parts, order_of_parts_bytes
from featstore.order.stream import (
    BLOCK_EDGES,
    GraphLike,
    NodeIds,
    degree_counts,
    edge_count,
    edge_cut,
    node_count,
)
from featstore.storage.manifest import PARTITIONS_OF_FEW_ROWS
from featstore.units import EXTENT_BYTES_MAX, format_bytes

METHODS = ("auto", "given", "permutation", "degree", "metis", "multilevel", "ldg", "bfs")

PARTITION_ROWS_MIN = 64
PARTITION_ROWS_MOST = 4096
PARTITIONS_FREE = 1024
"""Up to so many partitions are made whatever their rows; beyond that they are of PARTITION_ROWS_MOST."""

_BLOCK_EDGES_MIN = 1 << 12
_CHECK_ROWS = 1 << 20
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
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
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
    for first in range(0, rows, _CHECK_ROWS):
        # Above 2**63 a uint64 turns negative, which is as much out of range.
        block = given[first : first + _CHECK_ROWS].astype(np.int64)
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


def _first_row(given: NDArray[Any], node: int) -> int:
    for first in range(0, given.size, _CHECK_ROWS):
        found = np.flatnonzero(given[first : first + _CHECK_ROWS] == node)
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
            f"nodes are ranked by degree where there are fewer than 2**32 of them, not {nodes:,}: use "
            "method 'ldg', and no hubs"
        )


def ranked_by_count(counts: NDArray[np.uint32]) -> NodeIds:
    """Positions by falling count, ties by position: int32 or int64 [n], n < 2**32. Needs 12 or 16 bytes a
    position."""
    check_rankable(counts.size)
    # Sort (complement of the count, position) packed into one integer: in place, and no two are equal.
    keys = counts.astype(np.uint64)
    np.subtract(np.uint64(2**32 - 1), keys, out=keys)
    np.left_shift(keys, np.uint64(32), out=keys)
    for first in range(0, counts.size, _CHECK_ROWS):
        piece = keys[first : first + _CHECK_ROWS]
        piece |= np.arange(first, first + piece.size, dtype=np.uint64)
    keys.sort()
    np.bitwise_and(keys, np.uint64(2**32 - 1), out=keys)
    return keys.astype(node_dtype(counts.size))


def degree_memory_bytes(nodes: int, block_edges: int = BLOCK_EDGES) -> int:
    """The most :func:`degree_order` allocates, in bytes, above the graph itself."""
    return (8 + node_dtype(nodes).itemsize) * nodes + 8 * max(block_edges, _CHECK_ROWS) + _FIXED_BYTES


def default_partitions(rows: int, row_bytes: int) -> int:
    """As many partitions as can each be read at the speed of sequential reads, but for large tables no more
    than needed.

    After HierBatching (ICLR 2023 submission, appendix B): a partition is no smaller than S_opt, the size of a
    read that gets the sequential bandwidth, here 512 KiB (``EXTENT_BYTES_MAX``), so N_p <= rows * row_bytes /
    S_opt; and has several thousand nodes: where that gives more than 1024 partitions, they have at least 4096
    rows each. None has fewer than 64 rows, and there is at least one.
    """
    sequential = rows * row_bytes // EXTENT_BYTES_MAX
    several_thousand = max(PARTITIONS_FREE, rows // PARTITION_ROWS_MOST)
    return max(1, min(sequential, several_thousand, rows // PARTITION_ROWS_MIN))


def _partition_memory_bytes(nodes: int, parts: int, partitioner_bytes: int) -> int:
    """Parts are found first and sorted after; the part numbers live through both."""
    return max(partitioner_bytes, 4 * nodes + order_of_parts_bytes(nodes, parts) + 8 * _BLOCK_EDGES_MIN)


def _ldg_order(graph: GraphLike, parts: int, seed: int, memory_bytes: int) -> Order:
    nodes = node_count(graph)
    smallest = _partition_memory_bytes(nodes, parts, ldg_memory_bytes(nodes, parts, _BLOCK_EDGES_MIN))
    if memory_bytes < smallest:
        raise BudgetError(smallest, memory_bytes, f"order {nodes:,} nodes in {parts:,} partitions by LDG")
    spare_edges = (memory_bytes - ldg_memory_bytes(nodes, parts, 0)) // 8
    block_edges = min(spare_edges, BLOCK_EDGES)
    part = ldg_partition(graph, parts, seed=seed, block_edges=block_edges)
    return _order_of_part(
        "ldg", graph, part, parts, block_edges, {"seed": seed, "passes": PASSES, "slack": SLACK}
    )


def _multilevel_order(graph: GraphLike, parts: int, seed: int, memory_bytes: int) -> Order:
    nodes = node_count(graph)
    smallest = _multilevel_needed_bytes(nodes, parts)
    if memory_bytes < smallest:
        what = (
            f"order {nodes:,} nodes in {parts:,} partitions by clusters and METIS (method 'ldg' needs less)"
        )
        raise BudgetError(smallest, memory_bytes, what)
    block_edges = BLOCK_EDGES
    while (
        block_edges > _BLOCK_EDGES_MIN and multilevel_memory_bytes(nodes, parts, block_edges) > memory_bytes
    ):
        block_edges //= 2
    part = multilevel_partition(graph, parts, seed=seed, memory_bytes=memory_bytes, block_edges=block_edges)
    parameters = {
        "seed": seed,
        "clusters_per_part": CLUSTERS_PER_PART,
        "passes": REFINE_PASSES,
        "slack": SLACK,
    }
    return _order_of_part(
        "multilevel", graph, part, parts, block_edges, {**parameters, "pymetis": _pymetis_version()}
    )


def _bfs_order(
    graph: GraphLike, parts: int, seed: int, train: NDArray[np.bool_] | None, memory_bytes: int
) -> Order:
    from featstore.order.blocks import bfs_memory_bytes, bfs_partition

    nodes = node_count(graph)
    smallest = _partition_memory_bytes(nodes, parts, bfs_memory_bytes(nodes, parts, _BLOCK_EDGES_MIN))
    if memory_bytes < smallest:
        raise BudgetError(smallest, memory_bytes, f"order {nodes:,} nodes in {parts:,} partitions by blocks")
    block_edges = min((memory_bytes - bfs_memory_bytes(nodes, parts, 0)) // 8, BLOCK_EDGES)
    part = bfs_partition(graph, parts, seed=seed, train=train, block_edges=block_edges)
    parameters: dict[str, int | float | str] = {"seed": seed}
    if train is not None:
        parameters["train_nodes"] = int(np.count_nonzero(train))
    return _order_of_part("bfs", graph, part, parts, block_edges, parameters)


def _order_of_part(
    method: str,
    graph: GraphLike,
    part: NDArray[np.int32],
    parts: int,
    block_edges: int,
    parameters: dict[str, int | float | str],
) -> Order:
    cut = edge_cut(graph, part, block_edges=block_edges)
    node_of_row, offsets = order_of_parts(part, parts)
    return Order(method, node_of_row, offsets, {"parts": parts, **parameters, "edge_cut": cut})


def _pymetis_version() -> str:
    import pymetis

    return str(pymetis.version)


def _multilevel_needed_bytes(nodes: int, parts: int) -> int:
    return _partition_memory_bytes(nodes, parts, multilevel_memory_bytes(nodes, parts, _BLOCK_EDGES_MIN))


def _metis_order(graph: GraphLike, parts: int, seed: int, memory_bytes: int, needed_bytes: int) -> Order:
    nodes = node_count(graph)
    if memory_bytes < needed_bytes:
        what = (
            f"order {nodes:,} nodes and {edge_count(graph):,} edges by METIS (methods 'multilevel' and "
            "'ldg' need far less)"
        )
        raise BudgetError(needed_bytes, memory_bytes, what)
    part = metis_partition(graph, parts, seed)
    return _order_of_part(
        "metis", graph, part, parts, BLOCK_EDGES, {"seed": seed, "pymetis": _pymetis_version()}
    )


def _metis_needed_bytes(graph: GraphLike, parts: int, memory_bytes: int) -> int:
    """METIS's memory. Where a directed graph would not fit, a pass over the edges sees whether it is one."""
    nodes, edges = node_count(graph), edge_count(graph)
    needed_bytes = metis_memory_bytes(nodes, edges)
    if memory_bytes < needed_bytes:
        block_edges = max(_BLOCK_EDGES_MIN, min(memory_bytes // 16, BLOCK_EDGES))
        symmetric = survey_graph(graph, block_edges=block_edges).symmetric
        needed_bytes = metis_memory_bytes(nodes, edges, symmetric=symmetric)
    return _partition_memory_bytes(nodes, parts, needed_bytes)


def _choose(graph: GraphLike | None, parts: int, permutation: object, memory_bytes: int) -> tuple[str, str]:
    """(method, why) for "auto"."""
    if permutation is not None:
        return "permutation", "a permutation was given"
    if graph is None:
        return "given", "there is no graph to order by"
    if parts == 1:
        return "given", "the rows fit one partition"
    if not metis_installed():
        return "ldg", "pymetis is not installed"
    needed_bytes = _metis_needed_bytes(graph, parts, memory_bytes)
    needed, budget = format_bytes(needed_bytes), format_bytes(memory_bytes)
    if needed_bytes <= memory_bytes:
        return "metis", f"METIS needs up to {needed} and the memory budget is {budget}"
    why = f"METIS may need {needed}, more than the memory budget of {budget}"
    least_bytes = _multilevel_needed_bytes(node_count(graph), parts)
    if least_bytes <= memory_bytes:
        return "multilevel", why
    return "ldg", f"{why}, and METIS on clusters {format_bytes(least_bytes)}"


def make_order(
    method: str,
    graph: GraphLike | None,
    *,
    rows: int,
    row_bytes: int,
    parts: int | None = None,
    permutation: NDArray[Any] | str | os.PathLike[str] | None = None,
    seed: int = 0,
    memory_bytes: int,
    train: NDArray[np.bool_] | None = None,
) -> Order:
    """The order of ``rows`` rows of ``row_bytes`` bytes, by ``method`` ("auto" chooses), within
    ``memory_bytes``.

    ``parts`` is the number of partitions for "metis", "multilevel", "ldg" and "bfs" (None:
    :func:`default_partitions`); ``permutation`` goes with "permutation" (or "auto"), ``graph`` with "degree"
    and those that make partitions; ``train`` bool [rows], the nodes trained on, which "bfs" balances and the
    others do not look at. ``memory_bytes`` covers what the order takes above the graph, and block sizes
    follow it. ``parameters["chosen_because"]`` says why this method.

    Raises SourceError for an unknown method, and for a graph or permutation that is missing, superfluous, or
    does not fit the rows; BudgetError with the smallest memory that works.
    """
    if method not in METHODS:
        raise SourceError(f"unknown order method {method!r}; the methods are {', '.join(METHODS)}")
    if permutation is not None and method not in ("auto", "permutation"):
        raise SourceError(
            f"a permutation was given, but the order method is {method!r}; use method 'permutation'"
        )
    if graph is not None and node_count(graph) != rows:
        raise SourceError(
            f"the graph has {node_count(graph):,} nodes, but there are {rows:,} rows of features"
        )
    if parts is not None and not 1 <= parts < 2**31:
        raise SourceError(f"the number of partitions must be from 1 to 2**31 - 1, not {parts}")
    if parts is not None and parts > max(rows, PARTITIONS_OF_FEW_ROWS):
        raise SourceError(
            f"{parts:,} partitions for {rows:,} rows: give at most "
            f"{max(rows, PARTITIONS_OF_FEW_ROWS):,}, or nearly all are empty"
        )
    if train is not None and (train.shape != (rows,) or train.dtype != np.bool_):
        raise SourceError(f"train must be bool of shape ({rows},), not {train.dtype} of shape {train.shape}")
    partitions = default_partitions(rows, row_bytes) if parts is None else parts
    why = "it was asked for"
    if method == "auto":
        method, why = _choose(graph, partitions, permutation, memory_bytes)
    order = _order_by(method, graph, rows, partitions, permutation, seed, memory_bytes, train)
    return Order(
        order.method, order.node_of_row, order.partition_offsets, {**order.parameters, "chosen_because": why}
    )


def _order_by(
    method: str,
    graph: GraphLike | None,
    rows: int,
    parts: int,
    permutation: Any,
    seed: int,
    memory_bytes: int,
    train: NDArray[np.bool_] | None,
) -> Order:
    if method == "given":
        return given_order(rows)
    if method == "permutation":
        if permutation is None:
            raise SourceError(
                "order method 'permutation' needs a permutation: an integer array or a .npy file"
            )
        needed_bytes = (
            node_dtype(rows).itemsize * rows + rows // 8 + 8 * min(rows, _CHECK_ROWS) + _FIXED_BYTES
        )
        if memory_bytes < needed_bytes:
            raise BudgetError(needed_bytes, memory_bytes, f"check a permutation of {rows:,} rows")
        return permutation_order(permutation, rows)
    if graph is None:
        raise SourceError(f"order method {method!r} needs a graph; give one, or use method 'given'")
    if method == "degree":
        needed_bytes = degree_memory_bytes(rows)
        if memory_bytes < needed_bytes:
            raise BudgetError(needed_bytes, memory_bytes, f"order {rows:,} nodes by degree")
        return degree_order(graph)
    if method == "metis":
        return _metis_order(graph, parts, seed, memory_bytes, _metis_needed_bytes(graph, parts, memory_bytes))
    if method == "multilevel":
        return _multilevel_order(graph, parts, seed, memory_bytes)
    if method == "bfs":
        return _bfs_order(graph, parts, seed, train, memory_bytes)
    return _ldg_order(graph, parts, seed, memory_bytes)
