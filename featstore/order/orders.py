"""The choice of an order of rows on disk, and those that come of partitions.

:func:`make_order` is the door for packing: it takes a method or chooses one, and stays within the memory it
is given.

"auto" chooses by what is known: without a graph the order stays as given; a table of one partition needs no
order; METIS where it is installed, its memory fits and edges are few (:data:`METIS_EDGES_MAX`); the
multilevel partitioner where METIS is installed; restreamed LDG otherwise. The reason goes into the
parameters.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.system import available_cores
from featstore.errors import BudgetError, SourceError
from featstore.order.ldg import PASSES, SLACK, ldg_memory_bytes, ldg_partition, part_capacity
from featstore.order.metis import metis_installed, metis_memory_bytes, metis_partition, survey_graph
from featstore.order.multilevel import (
    CLUSTERS_PER_PART,
    NODES_END,
    REFINE_EASE,
    REFINE_HEAT,
    REFINE_PASSES,
    multilevel_memory_bytes,
    multilevel_partition,
)
from featstore.order.parts import count_start, order_of_parts, order_of_parts_bytes
from featstore.order.permutation import (
    Order,
    degree_memory_bytes,
    degree_order,
    given_order,
    permutation_memory_bytes,
    permutation_order,
)
from featstore.order.stream import (
    BLOCK_EDGES,
    GraphLike,
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

METIS_EDGES_MAX = 5_000_000  # stored edges, up to which METIS takes seconds and is chosen by itself
_BLOCK_EDGES_MIN = 1 << 12
#: Of a group of nodes a part may hold so much above the mean. Of a typed graph a twentieth, as for all nodes,
#: costs 2 to 15 % more cut edges than a fifth does.
GROUP_SLACK = 0.2
#: Where there are several groups of nodes, the first node of each and the number of all.
Groups = Sequence[int] | None


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


def _ldg_needed_bytes(nodes: int, parts: int, groups: Groups) -> int:
    kinds = 1 if groups is None else len(groups) - 1
    return _partition_memory_bytes(nodes, parts, ldg_memory_bytes(nodes, parts, _BLOCK_EDGES_MIN, 1, kinds))


def _by_ldg(
    graph: GraphLike, parts: int, seed: int, memory_bytes: int, groups: Groups, **how: Any
) -> tuple[NDArray[np.int32], int]:
    """(parts by LDG, edges of a block), with as many threads as the memory has room for."""
    nodes, kinds = node_count(graph), 1 if groups is None else len(groups) - 1
    block_edges = min((memory_bytes - ldg_memory_bytes(nodes, parts, 0, 1, kinds)) // 8, BLOCK_EDGES)
    threads = available_cores()
    while threads > 1 and ldg_memory_bytes(nodes, parts, block_edges, threads, kinds) > memory_bytes:
        threads -= 1
    part = ldg_partition(
        graph, parts, seed=seed, block_edges=block_edges, threads=threads, groups=groups, **how
    )
    return part, block_edges


def _ldg_order(graph: GraphLike, parts: int, seed: int, memory_bytes: int, groups: Groups) -> Order:
    nodes = node_count(graph)
    smallest = _ldg_needed_bytes(nodes, parts, groups)
    if memory_bytes < smallest:
        raise BudgetError(smallest, memory_bytes, f"order {nodes:,} nodes in {parts:,} partitions by LDG")
    part, block_edges = _by_ldg(graph, parts, seed, memory_bytes, None)
    part = _evened(graph, part, parts, seed, memory_bytes, groups)
    return _order_of_part(
        "ldg", graph, part, parts, block_edges, {"seed": seed, "passes": PASSES, "slack": SLACK}
    )


def _evened(
    graph: GraphLike, part: NDArray[np.int32], parts: int, seed: int, memory_bytes: int, groups: Groups
) -> NDArray[np.int32]:
    """The parts, in none of which there is more of a group than :data:`GROUP_SLACK` allows: partitioners take
    all nodes alike. Passes of LDG, at low heat as after clusters, move single nodes. (LDG that had to keep
    groups even from its first pass on would cut a tenth more.)"""
    if groups is None or _even(part, parts, groups):
        return part
    return _by_ldg(
        graph, parts, seed, memory_bytes, groups, start=part, passes=REFINE_PASSES, heat=REFINE_HEAT,
        ease=REFINE_EASE, slack=GROUP_SLACK,
    )[0]  # fmt: skip


def _even(part: NDArray[np.int32], parts: int, groups: Sequence[int]) -> bool:
    bounds = np.array(groups, np.int64)
    sizes = np.zeros((len(bounds) - 1) * parts, np.int64)
    count_start(part, bounds, parts, sizes)
    allowed = [part_capacity(int(count), parts, GROUP_SLACK) for count in np.diff(bounds)]
    return bool((sizes.reshape(-1, parts).max(axis=1) <= allowed).all())


def _multilevel_order(graph: GraphLike, parts: int, seed: int, memory_bytes: int, groups: Groups) -> Order:
    nodes = node_count(graph)
    smallest = max(_multilevel_needed_bytes(nodes, parts), _ldg_needed_bytes(nodes, parts, groups))
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
    part = _evened(graph, part, parts, seed, memory_bytes, groups)
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
    graph: GraphLike, parts: int, seed: int, train: NDArray[np.bool_] | None, memory_bytes: int,
    groups: Groups,
) -> Order:  # fmt: skip
    from featstore.order.blocks import bfs_memory_bytes, bfs_partition

    nodes = node_count(graph)
    smallest = _partition_memory_bytes(nodes, parts, bfs_memory_bytes(nodes, parts, _BLOCK_EDGES_MIN))
    smallest = max(smallest, _ldg_needed_bytes(nodes, parts, groups))
    if memory_bytes < smallest:
        raise BudgetError(smallest, memory_bytes, f"order {nodes:,} nodes in {parts:,} partitions by blocks")
    block_edges = min((memory_bytes - bfs_memory_bytes(nodes, parts, 0)) // 8, BLOCK_EDGES)
    part = bfs_partition(graph, parts, seed=seed, train=train, block_edges=block_edges)
    part = _evened(graph, part, parts, seed, memory_bytes, groups)
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


def _metis_order(
    graph: GraphLike, parts: int, seed: int, memory_bytes: int, needed_bytes: int, groups: Groups
) -> Order:
    nodes = node_count(graph)
    needed_bytes = max(needed_bytes, _ldg_needed_bytes(nodes, parts, groups))
    if memory_bytes < needed_bytes:
        what = (
            f"order {nodes:,} nodes and {edge_count(graph):,} edges by METIS (methods 'multilevel' and "
            "'ldg' need far less)"
        )
        raise BudgetError(needed_bytes, memory_bytes, what)
    part = _evened(graph, metis_partition(graph, parts, seed), parts, seed, memory_bytes, groups)
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
    if edge_count(graph) > METIS_EDGES_MAX:
        why = f"METIS takes several times as long for {edge_count(graph):,} edges, for about the same cut"
    else:
        needed_bytes = _metis_needed_bytes(graph, parts, memory_bytes)
        needed, budget = format_bytes(needed_bytes), format_bytes(memory_bytes)
        if needed_bytes <= memory_bytes:
            return "metis", f"METIS needs up to {needed} and the memory budget is {budget}"
        why = f"METIS may need {needed}, more than the memory budget of {budget}"
    nodes = node_count(graph)
    least_bytes = _multilevel_needed_bytes(nodes, parts)
    if nodes >= NODES_END:
        return "ldg", f"{why}, and METIS on clusters is made for fewer than 2**31 nodes"
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
    groups: Groups = None,
) -> Order:
    """The order of ``rows`` rows of ``row_bytes`` bytes, by ``method`` ("auto" chooses), within
    ``memory_bytes``.

    ``parts`` is the number of partitions for "metis", "multilevel", "ldg" and "bfs" (None:
    :func:`default_partitions`); ``permutation`` goes with "permutation" (or "auto"), ``graph`` with "degree"
    and those that make partitions; ``train`` bool [rows], the nodes trained on, which "bfs" balances and the
    others do not look at; ``groups``, where there are several kinds of nodes, the first node of each and the
    number of all: no partition holds more of one than a fifth above the mean. ``memory_bytes`` covers what
    the order takes above the graph, and block sizes follow it. ``parameters["chosen_because"]`` says why this
    method.

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
    order = _order_by(method, graph, rows, partitions, permutation, seed, memory_bytes, train, groups)
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
    groups: Groups,
) -> Order:
    if method == "given":
        return given_order(rows)
    if method == "permutation":
        if permutation is None:
            raise SourceError(
                "order method 'permutation' needs a permutation: an integer array or a .npy file"
            )
        needed_bytes = permutation_memory_bytes(rows)
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
        needed_bytes = _metis_needed_bytes(graph, parts, memory_bytes)
        return _metis_order(graph, parts, seed, memory_bytes, needed_bytes, groups)
    if method == "multilevel":
        return _multilevel_order(graph, parts, seed, memory_bytes, groups)
    if method == "bfs":
        return _bfs_order(graph, parts, seed, train, memory_bytes, groups)
    return _ldg_order(graph, parts, seed, memory_bytes, groups)
