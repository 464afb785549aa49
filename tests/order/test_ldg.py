"""LDG and METIS partitions: they cover, stay balanced, cut little, repeat; kernels against plain twins."""

from __future__ import annotations

import subprocess
import sys
from bisect import bisect
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from order_support import MASK, Csc, Draws, csc, cut_into, graphs, planted_edges, ranges

from featstore.errors import SourceError
from featstore.order import (
    chunks,
    edge_cut,
    ldg,
    ldg_memory_bytes,
    ldg_partition,
    metis,
    metis_memory_bytes,
    metis_partition,
    multilevel,
)


def symmetric(nodes: int, sources: np.ndarray, targets: np.ndarray) -> Csc:
    keep = sources != targets
    sources, targets = sources[keep], targets[keep]
    pairs = np.unique(np.concatenate([sources * nodes + targets, targets * nodes + sources]))
    return csc(nodes, pairs % nodes, pairs // nodes)


def planted(nodes: int, groups: int, degree: int, inside: float, seed: int) -> tuple[Csc, np.ndarray]:
    sources, targets, group = planted_edges(nodes, groups, degree, inside, seed)
    return symmetric(nodes, sources, targets), group


def dense_cut(graph: Csc, part: np.ndarray) -> float:
    targets = np.repeat(np.arange(graph.indptr.size - 1), np.diff(graph.indptr))
    return float((part[targets] != part[graph.indices]).mean()) if targets.size else 0.0


class Twin:
    """LDG as the module describes it, in plain Python: no blocks, no kernels, no threads; chunk after
    chunk."""

    def __init__(
        self, graph: Csc, parts: int, seed: int, passes: int, slack: float, chunk: int | None = None,
        groups: list[int] | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.parts, self.nodes = graph, parts, graph.indptr.size - 1
        self.groups = groups or [0, self.nodes]
        self.part = [-1] * self.nodes
        self.sizes = [Counter[int]() for _ in self.groups[1:]]
        self.slack = slack
        chunk = chunk or max(1, self.nodes)
        for number in range(passes):
            self.draws, ending = Draws(seed, number), Draws(seed, number)
            ending.ending()
            self.heat = 0.0 if passes < 8 else 1.25 * max(0.0, 1.0 - (number + 1) / passes / 0.95)
            end_cursor = 0
            for batch in ranges(0, self.nodes, 16 * chunk):
                before, sizes, moves = list(self.part), self.sizes, {}
                for nodes in ranges(batch.start, batch.stop, chunk):
                    self.draws.chunk(nodes.start // chunk)
                    self.part, self.cursor = list(before), 0
                    self.sizes = [one.copy() for one in sizes]
                    self.then, self.others = sizes, -(-len(batch) // chunk) - 1
                    for node in nodes:
                        self.move(node)
                    moves |= {node: self.part[node] for node in nodes}
                self.part, self.sizes, self.cursor = before, sizes, end_cursor
                self.draws, ending = ending, self.draws
                for node, new in moves.items():
                    self.end(node, new)
                self.draws, ending, end_cursor = ending, self.draws, self.cursor

    def group(self, node: int) -> tuple[int, int]:
        """Which a node is of, and the most of it that a part may hold."""
        group = bisect(self.groups, node) - 1
        count = self.groups[group + 1] - self.groups[group]
        return group, max(-(-count // self.parts), int((1 + self.slack) * count / self.parts))

    def end(self, node: int, new: int) -> None:
        """A move, if there is still room."""
        old = self.part[node]
        if old == new:
            return
        group, capacity = self.group(node)
        sizes = self.sizes[group]
        if old >= 0:
            sizes[old] -= 1
        if sizes[new] >= capacity:
            new = old if old >= 0 and sizes[old] < capacity else self.any_part(sizes, capacity)
        sizes[new] += 1
        self.part[node] = new

    def move(self, node: int) -> None:
        counts: dict[int, int] = {}
        for source in self.graph.indices[self.graph.indptr[node] : self.graph.indptr[node + 1]].tolist():
            if source != node and self.part[source] >= 0:
                counts[self.part[source]] = counts.get(self.part[source], 0) + 1
        old = self.part[node]
        group, capacity = self.group(node)
        sizes = self.sizes[group]
        if old >= 0:
            sizes[old] -= 1
        scored = []
        for p, count in counts.items():
            own = sizes[p] - self.then[group][p] + (p == old)
            size = sizes[p] + self.others * own * abs(own) / (abs(own) + 1)
            if size < capacity:
                score = count * (1.0 - size / capacity)
                if self.heat > 0:
                    score += self.heat * self.draws.unit()
                scored.append((-(score + (1e-3 if p == old else 0.0)), p))
        new = min(scored)[1] if scored else old
        if new < 0:
            new = self.any_part(sizes, capacity)
        sizes[new] += 1
        self.part[node] = new

    def any_part(self, sizes: Counter[int], capacity: int) -> int:
        drawn = [self.draws.below(self.parts) for _ in range(8)]
        emptiest = min(drawn, key=lambda p: sizes[p])
        if sizes[emptiest] < capacity:
            return emptiest
        while sizes[self.cursor] >= capacity:
            self.cursor = (self.cursor + 1) % self.parts
        return self.cursor


@settings(max_examples=50, deadline=None)
@given(
    graphs(40, 120),
    st.integers(1, 60),
    st.integers(0, 2**40),
    st.sampled_from([1, 2, 9]),
    st.sampled_from([0.0, 0.05, 1.0]),
    st.integers(1, 50),
    st.sampled_from([None, 1, 2, 7]),
    st.integers(1, 3),
    st.lists(st.floats(0, 1), max_size=3),
)
def test_ldg_is_its_twin_covers_and_keeps_the_balance(
    graph: Csc, parts: int, seed: int, passes: int, slack: float, block_edges: int, chunk: int | None,
    threads: int, cuts: list[float],
) -> None:  # fmt: skip
    """Of every group of nodes by itself, where there are several."""
    nodes = graph.indptr.size - 1
    groups = [0, *sorted(round(cut * nodes) for cut in cuts), nodes]
    with cut_into(chunk):
        part = ldg_partition(
            graph, parts, seed=seed, passes=passes, slack=slack, block_edges=block_edges, threads=threads,
            groups=groups if cuts else None,
        )  # fmt: skip
    twin = Twin(graph, parts, seed, passes, slack, chunk, groups)
    assert part.dtype == np.int32
    assert part.tolist() == twin.part
    for low, high in pairwise(groups):
        sizes = np.bincount(part[low:high], minlength=parts)
        assert sizes.size == parts
        assert sizes.max() <= max(-(-(high - low) // parts), (1 + slack) * (high - low) / parts)


def test_groups_of_a_start_that_is_uneven_are_made_even() -> None:
    """All of one group in one part: as where a type's nodes belong together and are few."""
    graph, group = planted(4000, 16, 12, 0.9, seed=1)
    start = group.astype(np.int32)
    start[3000:] = 5
    part = ldg_partition(graph, 16, seed=0, start=start.copy(), groups=[0, 3000, 4000], passes=9, heat=0.2)
    for low, high in ((0, 3000), (3000, 4000)):
        assert np.bincount(part[low:high], minlength=16).max() <= 1.05 * (high - low) / 16
    assert edge_cut(graph, part) < edge_cut(graph, start)


@pytest.mark.parametrize("groups", [[0, 5], [1, 10], [0, 7, 3, 10]])
def test_groups_that_are_none(groups: list[int]) -> None:
    graph = csc(10, np.zeros(0, np.int64), np.zeros(0, np.int64))
    with pytest.raises(SourceError, match="groups must ascend from 0 to 10"):
        ldg_partition(graph, 2, seed=0, groups=groups)


@pytest.mark.parametrize("chunk", [None, 10])
def test_ldg_twin_on_a_warm_graph_with_many_moves(chunk: int | None) -> None:
    graph, _ = planted(400, 8, 10, 0.7, seed=5)
    with cut_into(chunk):
        part = ldg_partition(graph, 8, seed=3, passes=12, block_edges=97, threads=2)
    assert part.tolist() == Twin(graph, 8, 3, 12, 0.05, chunk).part


@pytest.mark.parametrize("method", ["ldg", "multilevel"])
def test_threads_and_blocks_change_nothing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real chunks: one of several batches."""
    monkeypatch.setattr(chunks, "ALONE_NODES", 1 << 14)
    graph, _ = planted(40_000, 16, 10, 0.8, seed=6)
    assert chunks.batch_chunks(40_000) > 1
    assert chunks.batch_nodes(40_000) < 40_000 // 4

    def partition(threads: int, block_edges: int) -> np.ndarray:
        if method == "ldg":
            return ldg_partition(graph, 16, seed=1, passes=10, block_edges=block_edges, threads=threads)
        pytest.importorskip("pymetis")
        return multilevel.multilevel_partition(
            graph, 16, seed=1, memory_bytes=1 << 30, block_edges=block_edges, threads=threads
        )

    alone = partition(1, 1 << 20)
    for threads, block_edges in ((2, 1 << 20), (5, 1 << 20), (2, 5000), (1, 1000), (16, 20_000)):
        np.testing.assert_array_equal(partition(threads, block_edges), alone)
    assert np.bincount(alone).max() <= 1.05 * 40_000 / 16


def test_ldg_recovers_planted_groups() -> None:
    graph, group = planted(8000, 16, 12, 0.9, seed=1)
    part = ldg_partition(graph, 16, seed=0)
    random_cut = edge_cut(graph, np.random.default_rng(0).permutation(8000).astype(np.int32) % 16)
    assert random_cut > 0.9
    assert edge_cut(graph, part) < 0.2
    assert edge_cut(graph, part) < edge_cut(graph, group.astype(np.int32)) + 0.08


def test_annealing_cuts_less_than_a_few_cold_passes() -> None:
    graph, _ = planted(8000, 16, 12, 0.6, seed=2)
    cold = edge_cut(graph, ldg_partition(graph, 16, seed=0, passes=7))
    warm = edge_cut(graph, ldg_partition(graph, 16, seed=0))
    assert warm < 0.9 * cold


def test_ldg_repeats_for_equal_seeds_and_differs_for_others() -> None:
    graph, _ = planted(1000, 10, 10, 0.7, seed=3)
    first = ldg_partition(graph, 10, seed=11)
    np.testing.assert_array_equal(first, ldg_partition(graph, 10, seed=11))
    assert (first != ldg_partition(graph, 10, seed=12)).any()


def test_ldg_golden_value_holds_on_every_machine() -> None:
    """Provenance says seed and passes: the same numbers must give the same store elsewhere and later."""
    node = np.arange(100)
    square, next_node = node * node % 100, (node + 7) % 100
    graph = csc(100, np.concatenate([square, node, next_node]), np.concatenate([node, square, node]))
    part = ldg_partition(graph, 4, seed=7)
    assert "".join(map(str, part)) == GOLDEN


GOLDEN = (
    "0133313023001201001200322120332120023210302211333221331102130110213022003321233201203121300122130311"
)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_memory_mapped_edges_give_the_same_parts(tmp_path: Path, dtype: Any) -> None:
    graph, _ = planted(600, 6, 8, 0.8, seed=4)
    np.save(tmp_path / "indices.npy", graph.indices.astype(dtype))
    np.save(tmp_path / "indptr.npy", graph.indptr)
    mapped = Csc(
        np.load(tmp_path / "indptr.npy", mmap_mode="r"), np.load(tmp_path / "indices.npy", mmap_mode="r")
    )
    part = ldg_partition(graph, 6, seed=1)
    np.testing.assert_array_equal(ldg_partition(mapped, 6, seed=1, block_edges=100), part)
    np.testing.assert_array_equal(metis_partition(mapped, 6, 1), metis_partition(graph, 6, 1))
    assert edge_cut(mapped, part, block_edges=77) == edge_cut(graph, part) == dense_cut(graph, part)


@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        (np.array([0, 2], np.int64), np.array([0, 1], np.int32), r"indices\[1\] is 1"),
        (np.array([0, 1], np.int64), np.array([-1], np.int64), r"indices\[0\] is -1"),
        (np.array([0, 1], np.int32), np.array([0], np.int32), "indptr must be int64"),
        (np.zeros(0, np.int64), np.zeros(0, np.int32), "indptr must be int64"),
        (np.array([0, 1], np.int64), np.array([0.0]), "indices must be int32 or int64"),
        (np.array([0, 2], np.int64), np.array([0], np.int32), "do not belong together"),
        (np.array([0, 3, 1, 2], np.int64), np.array([0, 1], np.int32), "falls at node 1: 3 then 1"),
    ],
)
@pytest.mark.parametrize("partition", ["ldg", "metis"])
def test_a_bad_graph_is_named(indptr: Any, indices: Any, message: str, partition: str) -> None:
    graph = Csc(indptr, indices)
    find_parts = {
        "ldg": lambda: ldg_partition(graph, 1, seed=0),
        "metis": lambda: metis_partition(graph, 1, 0),
    }
    with pytest.raises(SourceError, match=message):
        find_parts[partition]()


@pytest.mark.parametrize(
    "bad",
    [
        {"parts": 0},
        {"parts": 2**31},
        {"passes": 0},
        {"seed": -1},
        {"slack": -0.1},
        {"slack": float("nan")},
        {"slack": float("inf")},
        {"block_edges": 0},
    ],
)
def test_ldg_refuses_arguments_out_of_range(bad: dict[str, Any]) -> None:
    graph, _ = planted(100, 2, 4, 0.8, seed=0)
    with pytest.raises(SourceError, match=next(iter(bad))):
        ldg_partition(graph, **{"parts": 2, "seed": 0, **bad})


def test_heat_falls_to_nothing() -> None:
    heats = [ldg.heat_of_pass(number, 40) for number in range(40)]
    assert heats == sorted(heats, reverse=True)
    assert 1.2 < heats[0] < 1.25
    assert heats[36] > 0
    assert heats[37:] == [0.0] * 3
    assert [ldg.heat_of_pass(number, 7) for number in range(7)] == [0.0] * 7


def test_ldg_allocates_no_more_than_it_says() -> None:
    import tracemalloc

    graph, _ = planted(20000, 16, 10, 0.8, seed=6)
    graph = Csc(graph.indptr, graph.indices.astype(np.int64))
    ldg_partition(graph, 16, seed=0, passes=1)
    tracemalloc.start()
    ldg_partition(graph, 16, seed=0, passes=3, block_edges=100_000)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 4 * 20000 + 8 * 100_000 < peak_bytes <= ldg_memory_bytes(20000, 16, 100_000)


# --- METIS
# ------------------------------------------------------------------------------------------------------------


def neighbour_sets(nodes: int, xadj: np.ndarray, adjacency: np.ndarray) -> list[list[int]]:
    return [sorted(adjacency[xadj[v] : xadj[v + 1]].tolist()) for v in range(nodes)]


@settings(max_examples=35, deadline=None)
@given(graphs(40, 120), st.sampled_from([np.int32, np.int64]))
def test_the_adjacency_for_metis_is_that_of_a_dense_model(graph: Csc, dtype: Any) -> None:
    nodes = graph.indptr.size - 1
    dense = np.zeros((nodes, nodes), np.int64)
    targets = np.repeat(np.arange(nodes), np.diff(graph.indptr))
    np.add.at(dense, (targets, graph.indices), 1)
    survey = metis.survey_graph(graph)
    assert survey.symmetric == bool((dense == dense.T).all())
    assert survey.loops == dense.trace()
    assert survey.ascending == bool((dense <= 1).all())
    either = (dense + dense.T) > 0
    np.fill_diagonal(either, False)
    xadj, adjacency = metis.metis_adjacency(graph, dtype)
    assert xadj.dtype == adjacency.dtype == dtype
    assert adjacency.size == xadj[-1]
    built = adjacency if adjacency.base is None else adjacency.base
    assert built.size <= graph.indices.size * (1 if survey.symmetric else 2)
    assert neighbour_sets(nodes, xadj, adjacency) == [np.flatnonzero(row).tolist() for row in either]


def test_the_edge_hash_is_its_twin() -> None:
    def twin(u: int, v: int) -> int:
        h = (u + 0x9E3779B97F4A7C15) & MASK
        for _ in range(2):
            h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & MASK
            h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & MASK
            h = ((h ^ (h >> 31)) + v) & MASK
        return ((h ^ (h >> 32)) * 0xBF58476D1CE4E5B9) & MASK

    pairs = [(0, 0), (0, 1), (1, 0), (5, 2**31), (2**40, 3)]
    hashes = [int(metis.edge_hash(np.int64(u), np.int64(v))) for u, v in pairs]
    assert hashes == [twin(u, v) for u, v in pairs]
    assert len(set(hashes)) == len(pairs)


def test_metis_repeats_for_equal_seeds_and_recovers_planted_groups() -> None:
    graph, group = planted(8000, 16, 12, 0.9, seed=1)
    first = metis_partition(graph, 16, 5)
    assert first.dtype == np.int32
    np.testing.assert_array_equal(first, metis_partition(graph, 16, 5))
    assert (first != metis_partition(graph, 16, 6)).any()
    assert edge_cut(graph, first) < edge_cut(graph, group.astype(np.int32)) + 0.05


def test_metis_takes_directed_graphs() -> None:
    whole, _ = planted(2000, 8, 12, 0.9, seed=1)
    targets = np.repeat(np.arange(2000), np.diff(whole.indptr))
    kept = targets < whole.indices
    upper = csc(2000, whole.indices[kept], targets[kept])
    np.testing.assert_array_equal(np.bincount(metis_partition(upper, 8, 0), minlength=8) > 150, True)
    assert edge_cut(upper, metis_partition(upper, 8, 0)) < 0.25


@pytest.mark.parametrize(
    ("nodes", "edges", "parts"),
    [
        (0, 0, 1),
        (0, 0, 4),
        (3, 0, 2),
        (5, 0, 9),
        (4, 6, 4),
        (4, 6, 50),
        (9, 4, 1),
    ],
)
def test_metis_at_the_edges(nodes: int, edges: int, parts: int) -> None:
    rng = np.random.default_rng(0)
    graph = csc(nodes, rng.integers(0, max(nodes, 1), edges), rng.integers(0, max(nodes, 1), edges))
    part = metis_partition(graph, parts, 0)
    sizes = np.bincount(part, minlength=parts)
    assert part.size == sizes.sum() == nodes
    assert sizes.size == parts
    assert sizes.max() <= -(-nodes // parts)


def test_metis_counts_no_further_than_its_integers() -> None:
    graph, _ = planted(200, 2, 4, 0.8, seed=0)
    with pytest.raises(SourceError, match="more than this pymetis can count"):
        metis.metis_adjacency(graph, np.int8)


@pytest.mark.parametrize(("parts", "seed"), [(0, 0), (2, -1), (2, 2**31)])
def test_metis_refuses_arguments_out_of_range(parts: int, seed: int) -> None:
    graph, _ = planted(100, 2, 4, 0.8, seed=0)
    with pytest.raises(SourceError, match="parts must be from 1, seed from 0"):
        metis_partition(graph, parts, seed)


def test_metis_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metis, "metis_installed", lambda: False)
    graph, _ = planted(100, 2, 4, 0.8, seed=0)
    with pytest.raises(SourceError, match=r"featstore\[metis\]"):
        metis_partition(graph, 2, 0)


MEASURE = """
import sys, numpy as np
sys.path.insert(0, sys.argv[1])
from types import SimpleNamespace
from featstore.order import metis_memory_bytes, metis_partition
def status(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))
rng = np.random.default_rng(0)
nodes, edges = 20000, 200000
keys = np.unique(rng.integers(0, nodes * nodes, edges))
indptr = np.zeros(nodes + 1, np.int64)
np.cumsum(np.bincount(keys // nodes, minlength=nodes), out=indptr[1:])
graph = SimpleNamespace(indptr=indptr, indices=(keys % nodes).astype(np.int32))
import pymetis
tiny = SimpleNamespace(indptr=np.array([0, 1, 1]), indices=np.array([1], np.int32))
metis_partition(tiny, 1, 0)  # machine code is not counted
base = status("VmRSS")
metis_partition(graph, 64, 0)
print(status("VmHWM") - base, metis_memory_bytes(nodes, keys.size))
"""


def test_metis_memory_is_an_upper_estimate() -> None:
    """On a directed random graph, the kind on which METIS takes most; in a process of its own."""
    root = Path(metis.__file__).parents[2]
    command = [sys.executable, "-c", MEASURE, str(root)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    peak_bytes, estimate_bytes = map(int, run.stdout.split())
    assert 20e6 < peak_bytes < estimate_bytes
    assert metis_memory_bytes(10, 20, symmetric=True) < metis_memory_bytes(10, 20)
