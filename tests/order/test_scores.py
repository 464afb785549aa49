"""Scores of partitions, against brute force; what is drawn is distinct and uniform; promised memory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from order_support import Csc, Draws, csc

from featstore.errors import SourceError
from featstore.order import scores
from featstore.order.chances import random_of_pass
from featstore.order.scores import FANOUT, score_parts, scores_memory_bytes


def random_graph(nodes: int, edges: int, seed: int, skew: int = 1, dtype: Any = np.int32) -> Csc:
    rng = np.random.default_rng(seed)
    sources, targets = (nodes * rng.random((2, edges)) ** skew).astype(np.int64)
    return csc(nodes, sources, targets, dtype, ascending=False)


class Twin:
    """Roots and edges as they are drawn, in plain Python."""

    def __init__(self, graph: Csc, seed: int) -> None:
        self.graph = graph
        self.draws = Draws(seed, 0)

    def roots(self, candidates: list[int], wanted: int) -> list[int]:
        found: list[int] = []
        for i, node in enumerate(candidates):
            if len(found) < wanted and self.draws.below(len(candidates) - i) < wanted - len(found):
                found.append(node)
        return found

    def near(self, node: int) -> list[int]:
        edges = self.graph.indices[self.graph.indptr[node] : self.graph.indptr[node + 1]].tolist()
        if len(edges) <= FANOUT:
            return edges
        drawn: list[int] = []
        for j in range(len(edges) - FANOUT, len(edges)):
            at = self.draws.below(j + 1)
            drawn.append(j if at in drawn else at)
        return [edges[at] for at in drawn]


def mean_share(roots: list[int], reached: list[list[int]], part: list[int]) -> float | None:
    shares = []
    for root, nodes in zip(roots, reached):
        others = [part[node] == part[root] for node in nodes if node != root]
        if others:
            shares.append(sum(others) / len(others))
    return sum(shares) / len(shares) if shares else None


def balance(counts: np.ndarray) -> float:
    return float(counts.max() / counts.mean()) if counts.any() else 1.0


@settings(max_examples=35, deadline=None)
@given(
    st.integers(0, 40),
    st.integers(0, 300),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 3]),
    st.integers(1, 9),
    st.integers(1, 60),
    st.integers(1, 50),
    st.booleans(),
)
def test_scores_are_those_of_brute_force(
    nodes: int, edges: int, seed: int, skew: int, parts: int, samples: int, block_edges: int, trained: bool
) -> None:
    graph = random_graph(nodes, edges if nodes else 0, seed, skew)
    rng = np.random.default_rng(seed)
    part = rng.integers(0, parts, nodes).astype(np.int32)
    train = rng.random(nodes) < 0.5 if trained else None
    found = score_parts(graph, part, parts, train=train, samples=samples, seed=seed, block_edges=block_edges)

    twin = Twin(graph, seed)
    candidates = list(range(nodes)) if train is None else np.flatnonzero(train).tolist()
    roots = twin.roots(candidates, min(samples, len(candidates)))
    hop1 = [twin.near(root) for root in roots]
    hop2 = [[far for near in reached for far in twin.near(near)] for reached in hop1]
    targets = np.repeat(np.arange(nodes), np.diff(graph.indptr))
    assert found.roots == len(roots)
    assert found.edge_cut == (float((part[targets] != part[graph.indices]).mean()) if targets.size else 0.0)
    assert found.node_balance == pytest.approx(balance(np.bincount(part, minlength=parts)))
    assert found.edge_balance == pytest.approx(balance(np.bincount(part[targets], minlength=parts)))
    if train is None:
        assert found.train_balance is None
    else:
        assert found.train_balance == pytest.approx(balance(np.bincount(part[train], minlength=parts)))
    for share, expected in ((found.hop1, hop1), (found.hop2, hop2)):
        wanted = mean_share(roots, expected, part.tolist())
        assert share is None if wanted is None else share == pytest.approx(wanted)


def test_a_small_graph_by_hand() -> None:
    """0 gathers from 1 and 2, these from 0 and 3; node 3 gathers from nobody."""
    graph = Csc(np.array([0, 2, 4, 6, 6]), np.array([1, 2, 0, 3, 0, 3], np.int32))
    train = np.array([True, False, False, False])
    found = score_parts(graph, np.array([0, 0, 1, 1], np.int32), 2, train=train)
    assert found.to_dict() == {
        "parts": 2,
        "edge_cut": 3 / 6,
        "node_balance": 1.0,
        "edge_balance": 4 / 3,
        "train_balance": 2.0,
        "hop1": 0.5,
        "hop2": 0.0,
        "roots": 1,
    }
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def test_edges_are_drawn_uniformly_and_never_twice() -> None:
    """A hub of 40 edges drawn from many times, between two nodes whose edges are all taken."""
    indptr = np.array([0, 3, 43, 43 + FANOUT], np.int64)
    nodes = np.tile(np.array([0, 1, 2], np.int64), 2000)
    positions, owners = np.empty((2, nodes.size * FANOUT), np.int64)
    count = scores.draw_edges(indptr, nodes, FANOUT, positions, owners, random_of_pass(0, 0))
    assert count == 2000 * (3 + 2 * FANOUT)
    assert np.unique(owners[:count] * 1000 + positions[:count]).size == count
    drawn = np.bincount(positions[:count], minlength=43 + FANOUT)
    assert (drawn[:3] == 2000).all()
    assert (drawn[43:] == 2000).all()
    assert np.abs(drawn[3:43] - 2000 * FANOUT / 40).max() < 5 * np.sqrt(2000 * 0.4 * 0.6)


def test_roots_are_drawn_uniformly_and_ascend() -> None:
    train = np.arange(50) % 2 == 0
    random, hits = random_of_pass(3, 0), np.zeros(50, np.int64)
    for _ in range(2000):
        roots = np.full(5, -1, np.int64)
        scores.draw_roots(train, 50, 25, roots, random)
        assert (np.diff(roots) > 0).all()
        hits[roots] += 1
    assert (hits[1::2] == 0).all()
    assert np.abs(hits[::2] - 400).max() < 5 * np.sqrt(2000 * 0.2 * 0.8)


def test_memory_mapped_edges_score_the_same(tmp_path: Path) -> None:
    graph = random_graph(500, 6000, 1, 2)
    np.save(tmp_path / "indices.npy", graph.indices)
    mapped = Csc(graph.indptr, np.load(tmp_path / "indices.npy", mmap_mode="r"))
    part = (np.arange(500) % 4).astype(np.int32)
    assert score_parts(mapped, part, 4, samples=50, block_edges=99) == score_parts(graph, part, 4, samples=50)
    assert score_parts(graph, part, 4, samples=50, seed=1) != score_parts(graph, part, 4, samples=50)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"parts": 0}, "parts >= 1"),
        ({"samples": 0}, "samples >= 1"),
        ({"seed": -1}, "seed >= 0"),
        ({"block_edges": 0}, "block_edges"),
        ({"parts": 2}, "node 2 is in part 2"),
        ({"part": np.zeros(9, np.int32)}, "for each of 10 nodes"),
        ({"train": np.zeros(10, np.int8)}, "train must be bool"),
        ({"graph": Csc(np.arange(11), np.full(10, 10, np.int32))}, r"indices\[0\] is 10"),
    ],
)
def test_scores_refuse_what_they_cannot_use(bad: dict[str, Any], message: str) -> None:
    arguments = {"graph": random_graph(10, 30, 0), "part": (np.arange(10) % 3).astype(np.int32), "parts": 3}
    with pytest.raises(SourceError, match=message):
        score_parts(**{**arguments, **bad})


@pytest.mark.parametrize(("samples", "block_edges"), [(1000, 1000), (10, 100_000)])
def test_scores_allocate_no_more_than_they_say(samples: int, block_edges: int) -> None:
    graph = random_graph(5000, 400_000, 0, dtype=np.int64)
    part = (np.arange(5000) % 7).astype(np.int32)
    train = np.ones(5000, np.bool_)
    score_parts(graph, part, 7, train=train)
    tracemalloc.start()
    score_parts(graph, part, 7, train=train, samples=samples, block_edges=block_edges)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 32 * samples * FANOUT**2 < peak_bytes <= scores_memory_bytes(7, samples, block_edges)
