"""Hosts that have too much of something exchange partitions with others, those that cost the fewest cut
edges."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore.packing.split import evenness
from featstore.packing.split.evenness import best_swap, mend, most_of


def graph_of(rng: np.random.Generator, count: int) -> Any:
    """Weights of edges between any two vertices, of which some have none; and as lists."""
    dense = np.triu(rng.integers(0, 9, (count, count)) * (rng.random((count, count)) < 0.5), 1)
    dense = dense + dense.T
    xadj = np.concatenate([[0], np.cumsum((dense > 0).sum(axis=1))])
    lists = SimpleNamespace(xadj=xadj, adjacency=np.nonzero(dense)[1], edge_weights=dense[dense > 0])
    return dense, lists


def beyond(loads: np.ndarray, most: np.ndarray) -> float:
    return float(np.maximum(loads - most, 0).sum())


def loads_of(part: np.ndarray, weights: np.ndarray, hosts: int) -> np.ndarray:
    return np.stack([weights[part == host].sum(axis=0) for host in range(hosts)])


def cut_of(dense: np.ndarray, part: np.ndarray) -> int:
    return int(dense[part[:, None] != part].sum()) // 2


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20), count=st.integers(2, 9), hosts=st.integers(2, 4), kinds=st.integers(1, 3),
    hard=st.integers(0, 2),
)  # fmt: skip
def test_the_best_pair_is_that_of_all_pairs(seed: int, count: int, hosts: int, kinds: int, hard: int) -> None:
    rng = np.random.default_rng(seed)
    dense, lists = graph_of(rng, count)
    weights = rng.integers(0, 9, (count, kinds)).astype(float)
    part = rng.integers(0, hosts, count).astype(np.int32)
    most, crowded = 1.1 * weights.sum(axis=0) / hosts, int(part[0])
    loads = loads_of(part, weights, hosts)
    prices = {}
    for u in np.flatnonzero(part == crowded):
        for v in np.flatnonzero(part != crowded):
            after = part.copy()
            after[[u, v]] = part[[v, u]]
            then = loads_of(after, weights, hosts)
            worse = (then > np.maximum(loads, most) + 1e-9)[:, :hard].any()
            relief = beyond(loads, most) - beyond(then, most)
            if relief > 1e-9 and not worse:
                cut = cut_of(dense, after) - cut_of(dense, part)
                prices[int(u), int(v)] = cut / relief if cut > 0 else cut * relief
    found = best_swap(
        lists.xadj, lists.adjacency, lists.edge_weights, weights, part, loads, most, crowded, hard
    )
    if not prices:
        assert found == (-1, -1)
    else:
        assert prices[found] <= min(prices.values()) + 1e-9


def test_pairs_change_places_where_no_move_brings_evenness() -> None:
    """Two hosts with as many rows, of which one has most training nodes."""
    _, lists = graph_of(np.random.default_rng(1), 8)
    rows, train = np.full(8, 100), np.array([60, 70, 50, 60, 40, 45, 35, 40])
    part = np.array([0, 0, 0, 0, 1, 1, 1, 1], np.int32)
    assert mend(lists, [rows, train], part, 2)
    assert np.bincount(part).tolist() == [4, 4]
    assert max(np.bincount(part, train)) <= 1.05 * 200


def test_few_pairs_do_where_no_edge_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that bring most evenness, and not the first that bring any."""
    monkeypatch.setattr(evenness, "_SWAPS_MAX", 4)
    none, count = np.zeros(0, np.int64), 20
    lists: Any = SimpleNamespace(xadj=np.zeros(count + 1, np.int64), adjacency=none, edge_weights=none)
    part = (np.arange(count) % 2).astype(np.int32)
    train = np.where(part == 0, 100 + np.arange(count), 50 - np.arange(count))
    assert mend(lists, [np.full(count, 100), train], part, 2)
    assert np.bincount(part).tolist() == [10, 10]
    assert max(np.bincount(part, train)) <= 1.05 * train.sum() / 2


def test_nothing_is_even() -> None:
    none = np.zeros(0, np.int64)
    lists: Any = SimpleNamespace(xadj=np.zeros(1, np.int64), adjacency=none, edge_weights=none)
    assert mend(lists, [none], np.zeros(0, np.int32), 2)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**20), hosts=st.integers(2, 6))
def test_none_has_more_of_anything_than_before_or_than_it_may(seed: int, hosts: int) -> None:
    rng = np.random.default_rng(seed)
    count = 12 * hosts
    _, lists = graph_of(rng, count)
    amounts = [rng.integers(50, 150, count), rng.integers(0, 100, count)]
    part = rng.integers(0, hosts, count).astype(np.int32)
    weights = np.stack(amounts, axis=1).astype(float)
    most = np.array([most_of(int(one.sum()), hosts) for one in amounts])
    means = weights.sum(axis=0) / hosts
    before = beyond(loads_of(part, weights, hosts) / means, most / means)
    even = mend(lists, amounts, part, hosts)
    loads = loads_of(part, weights, hosts)
    assert even == bool((loads <= most + 1e-6).all())
    assert beyond(loads / means, most / means) <= before + 1e-9
    assert set(part) <= set(range(hosts))
