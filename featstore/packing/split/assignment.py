"""Which host owns which row of a table.

A table with a graph is cut so that few edges lead from one host to another: its partitions are the vertices
of a small graph, whose edges weigh as many edges as there are between two of them
(:func:`featstore.order.coarsen.contract`, one pass over the stored lists), and METIS cuts that. Vertices
weigh their rows; where training nodes are to be even too, rows and training nodes, each as a share of all.
What METIS leaves uneven is mended: the partition goes to another host that costs the fewest cut edges for
the evenness that it brings, or, where none brings any, changes places with one of another host. Where the
table has too few partitions for that, or too coarse ones, it is first cut into finer parts. Rows of edges
stay beside the nodes that their edges lead to, and are to be even as far as nothing else becomes uneven by
that. Another table without a graph is dealt out in equal runs of ids.

Types of nodes that edges of several types join are cut together, as one graph over the nodes of all:
partition p of every type is one vertex, which weighs the share of each type in it, and each is to be even.

Nothing here depends on the memory or the cores: what does not fit is a BudgetError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.dtypes import host_dtype
from featstore.base.system import available_cores
from featstore.errors import BudgetError, SourceError
from featstore.order.coarsen import CoarseGraph, contract, contract_bytes
from featstore.order.metis import cut_adjacency, metis_installed, metis_memory_bytes, metis_partition
from featstore.order.multilevel import multilevel_memory_bytes, multilevel_partition
from featstore.order.stream import GraphLike, edge_count, node_count
from featstore.packing.split.evenness import BALANCE, mend, most_of

#: A table's own partitions are dealt out where each host gets so many, on average.
PARTITIONS_PER_HOST = 8
#: Finer parts, made where they are too few or too uneven.
FINER_PER_HOST = 32
_METIS_EDGES_MAX = 1_000_000  # stored edges: METIS makes finer parts of no more, in some 260 MB
_PAIRS_PER_PARTITION = 64
_BLOCK_EDGES = 1 << 18
_BLOCK_ROWS = 1 << 20
_SHARE = 1_000_000  # a weight of two shares: whole numbers for METIS


@dataclass(frozen=True, eq=False)
class DealtRows:
    """Rows of a table that are dealt out: partitions begin where ``partition_offsets`` says; ``train`` bool
    [rows], training nodes, where they are to be even; ``edges`` int64 [rows] each, by table of edges: how
    many of its rows go where each row goes."""

    table: str
    partition_offsets: NDArray[np.int64]
    train: NDArray[np.bool_] | None = None
    edges: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return int(self.partition_offsets[-1])


@dataclass(frozen=True)
class Assignment:
    """``host_of_row`` uint8 or uint16 [rows of all tables], and what is to be told of it."""

    host_of_row: NDArray[Any]
    warnings: tuple[str, ...] = ()


def equal_runs(node_of_row: NDArray[Any] | None, rows: int, hosts: int) -> NDArray[Any]:
    """The host of each row, where host h owns the ids from ``rows * h // hosts`` on."""
    bounds = np.array([rows * host // hosts for host in range(1, hosts)], np.int64)
    out = np.empty(rows, host_dtype(hosts))
    for low in range(0, rows, _BLOCK_ROWS):
        high = min(low + _BLOCK_ROWS, rows)
        ids = np.arange(low, high) if node_of_row is None else node_of_row[low:high]
        out[low:high] = np.searchsorted(bounds, ids, side="right")
    return out


def count_hosts(host_of_row: NDArray[Any], hosts: int) -> NDArray[np.int64]:
    """How many rows each host has, int64 [hosts]."""
    counts = np.zeros(hosts, np.int64)
    for low in range(0, len(host_of_row), _BLOCK_ROWS):
        counts += np.bincount(host_of_row[low : low + _BLOCK_ROWS], minlength=hosts)
    return counts


def assign(
    graph: GraphLike, tables: Sequence[DealtRows], hosts: int, *, seed: int, memory_bytes: int
) -> Assignment:  # fmt: skip
    """The hosts of the rows of ``tables``, by the graph over them, in which those of one table stand behind
    those of the table before.

    Within ``memory_bytes`` above the graph's offsets and the training nodes. Raises SourceError where pymetis
    is missing, and for a bad graph, BudgetError.
    """
    rows, name = node_count(graph), ", ".join(repr(one.table) for one in tables)
    if hosts == 1:
        return Assignment(np.zeros(rows, np.uint8))
    if not metis_installed():
        raise SourceError(
            f"cutting table {name} for {hosts} hosts needs pymetis: pip install 'featstore[metis]'"
        )
    host_of_row = None
    for label, vertices in _labels(graph, tables, hosts, name, seed, memory_bytes):
        part, even = _cut(graph, label, vertices, hosts, tables, name, seed, memory_bytes)
        host_of_row = part.astype(host_dtype(hosts))[label]
        if even:
            break
    assert host_of_row is not None
    return Assignment(host_of_row, tuple(_uneven(host_of_row, tables, hosts)))


def _uneven(host_of_row: NDArray[Any], tables: Sequence[DealtRows], hosts: int) -> Iterator[str]:
    """What is to be told of hosts that have too much."""
    for one, first in zip(tables, _first_rows(tables), strict=False):
        own = host_of_row[first : first + one.rows]
        shares = [(one.table, "rows", count_hosts(own, hosts))]
        if one.train is not None:
            shares.append((one.table, "training nodes", count_hosts(own[one.train], hosts)))
        found = (
            "no cut was found that is within",
            "that host will be the slowest; take fewer hosts where that matters",
        )
        beside = (
            "no whole partitions beside rows and training nodes are within",
            "its disk needs so much more",
        )
        counted = [(*share, found) for share in shares]
        counted += [(name, "rows", _sums(own, degrees, hosts), beside) for name, degrees in one.edges.items()]
        for table, what, counts, (none, so) in counted:
            top = int(counts.argmax())
            if counts[top] > most_of(int(counts.sum()), hosts):
                yield (
                    f"table {table!r}: host {top} has {counts[top]:,} {what}, "
                    f"{counts[top] * hosts / counts.sum():.2f} times the mean of {hosts} hosts, and {none} "
                    f"{BALANCE:g}: {so}"
                )


def _sums(label: NDArray[Any], degrees: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The degrees of the rows of each label, int64 [count]."""
    sums = np.zeros(count, np.int64)
    for low in range(0, len(label), _BLOCK_ROWS):
        some = slice(low, low + _BLOCK_ROWS)
        sums += np.bincount(label[some], degrees[some], count).astype(np.int64)  # below 2**53
    return sums


def _first_rows(tables: Sequence[DealtRows]) -> list[int]:
    """Where the rows of each table begin among those of all, and where all end."""
    return [0, *np.cumsum([one.rows for one in tables]).tolist()]


def own_partitions(tables: Sequence[DealtRows]) -> tuple[NDArray[np.int32], int]:
    """(partition of each row int32 [rows of all tables], how many have any): partition p of tables that have
    as many partitions is one."""
    begins: dict[int, int] = {}  # of the partitions of tables that have so many
    count = 0
    for one in tables:
        parts = len(one.partition_offsets) - 1
        if parts not in begins:
            begins[parts], count = count, count + parts
    used = np.zeros(count, bool)
    for one in tables:
        sizes = np.diff(one.partition_offsets)
        used[begins[len(sizes)] + np.flatnonzero(sizes)] = True
    number, first = np.cumsum(used, dtype=np.int32) - 1, _first_rows(tables)
    label = np.empty(first[-1], np.int32)
    for one, begin in zip(tables, first, strict=False):
        numbers = number[begins[len(one.partition_offsets) - 1] :]
        for part, (low, high) in enumerate(pairwise((one.partition_offsets + begin).tolist())):
            label[low:high] = numbers[part]
    return label, int(used.sum())


def _labels(
    graph: GraphLike, tables: Sequence[DealtRows], hosts: int, name: str, seed: int, memory_bytes: int
) -> Iterator[tuple[NDArray[np.int32], int]]:
    """(part of each row int32 [rows], how many there are): the tables' own partitions, then finer ones."""
    rows = node_count(graph)
    if 4 * rows > memory_bytes:
        raise BudgetError(4 * rows, memory_bytes, f"hold the partitions of table {name}")
    label, own = own_partitions(tables)
    enough = own >= PARTITIONS_PER_HOST * hosts
    if enough:
        yield label, own
    del label
    if own < rows or not enough:
        parts = min(rows, FINER_PER_HOST * hosts)
        yield _finer(graph, parts, seed, memory_bytes, name), parts


def _finer(graph: GraphLike, parts: int, seed: int, memory_bytes: int, name: str) -> NDArray[np.int32]:
    """Parts of nodes, whatever the order of the rows: int32 [rows]."""
    rows, edges = node_count(graph), edge_count(graph)
    small = edges <= _METIS_EDGES_MAX
    needed = 4 * rows + (
        metis_memory_bytes(rows, edges) if small else multilevel_memory_bytes(rows, parts, _BLOCK_EDGES)
    )
    if needed > memory_bytes:
        raise BudgetError(
            needed, memory_bytes, f"cut table {name}, which has few partitions, into finer ones"
        )
    if small:
        return metis_partition(graph, parts, seed)
    return multilevel_partition(
        graph, parts, seed=seed, memory_bytes=needed - 4 * rows, block_edges=_BLOCK_EDGES
    )


def _cut(
    graph: GraphLike, label: NDArray[np.int32], vertices: int, hosts: int, tables: Sequence[DealtRows],
    name: str, seed: int, memory_bytes: int,
) -> tuple[NDArray[np.int32], bool]:  # fmt: skip
    """(host of each part int32 [vertices], whether rows and training nodes of each table are even, but for
    rows of edges)."""
    pairs = max(1, min(vertices * (vertices - 1) // 2, max(_PAIRS_PER_PARTITION * vertices, 1 << 14)))
    needed = label.nbytes + max(
        contract_bytes(vertices, pairs, _BLOCK_EDGES),
        24 * vertices + 32 * pairs + metis_memory_bytes(vertices, 2 * pairs, symmetric=True),
    )
    if needed > memory_bytes:
        raise BudgetError(needed, memory_bytes, f"deal the {vertices:,} partitions of table {name} to hosts")
    coarse = contract(
        graph, graph.indptr, label, vertices, pairs_max=pairs, block_edges=_BLOCK_EDGES,
        threads=available_cores(),
    )  # fmt: skip
    hard = list(_amounts(label, vertices, tables))
    soft = [
        _sums(label[first : first + one.rows], degrees, vertices)
        for one, first in zip(tables, _first_rows(tables), strict=False) for degrees in one.edges.values()
    ]  # fmt: skip
    if soft:
        part = _parts(coarse, hard + soft, vertices, hosts, seed)
        if mend(coarse, hard + soft, part, hosts):
            return part, True
    part = _parts(coarse, hard, vertices, hosts, seed)
    even = mend(coarse, hard, part, hosts)
    if even and soft:  # as even as may be without making others uneven
        mend(coarse, hard + soft, part, hosts, len(hard))
    return part, even


def _parts(
    coarse: CoarseGraph, amounts: list[NDArray[np.int64]], vertices: int, hosts: int, seed: int
) -> NDArray[np.int32]:
    """The host of each vertex, before what is uneven of the ``amounts`` is mended: int32 [vertices]."""
    vertex_weights = coarse.vertex_weights
    if len(amounts) > 1:
        shares = [amount * _SHARE // max(1, int(amount.sum())) for amount in amounts]
        vertex_weights = np.sum(shares, axis=0) + 1
    if vertices <= hosts:
        return np.arange(vertices, dtype=np.int32)
    if coarse.adjacency.size == 0:
        before = np.cumsum(vertex_weights) - vertex_weights
        return (before * hosts // int(vertex_weights.sum())).astype(np.int32)
    return cut_adjacency(
        coarse.xadj, coarse.adjacency, hosts, seed, vertex_weights=vertex_weights,
        edge_weights=coarse.edge_weights,
    )  # fmt: skip


def _amounts(
    label: NDArray[np.int32], vertices: int, tables: Sequence[DealtRows]
) -> Iterator[NDArray[np.int64]]:
    """What is to be even, int64 [vertices] each: the rows of each table, and its training nodes."""
    for one, first in zip(tables, _first_rows(tables), strict=False):
        own, counts = label[first : first + one.rows], np.zeros(vertices, np.int64)
        for low in range(0, len(own), _BLOCK_ROWS):
            counts += np.bincount(own[low : low + _BLOCK_ROWS], minlength=vertices)
        yield counts
        if one.train is not None:
            yield np.bincount(own[one.train], minlength=vertices)
