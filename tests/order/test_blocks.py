"""BFS blocks: every kernel's work against a plain twin, balance, equal results for any block size, promised
memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from order_support import MASK, Csc, Draws, csc, graphs, planted_edges

from featstore.errors import SourceError
from featstore.order import block_growth, blocks, edge_cut
from featstore.order.block_growth import grow_blocks
from featstore.order.blocks import bfs_memory_bytes, bfs_partition


def planted(nodes: int, groups: int, degree: int, inside: float, seed: int) -> Csc:
    sources, targets, _ = planted_edges(nodes, groups, degree, inside, seed)
    ends = np.concatenate([sources, targets]), np.concatenate([targets, sources])
    return csc(nodes, *ends, ascending=False)


class Twin:
    """The module in plain Python: lists and dictionaries, no blocks of edges, no kernels."""

    def __init__(self, graph: Csc, parts: int, seed: int, train: np.ndarray | None) -> None:
        self.nodes = graph.indptr.size - 1
        self.parts = parts
        edges = [graph.indices[graph.indptr[v] : graph.indptr[v + 1]].tolist() for v in range(self.nodes)]
        self.limit = max(1, min(self.nodes // (parts * blocks.BLOCKS_PER_PART), blocks.BLOCK_NODES_MAX))
        self.grow(edges, seed)
        self.grown = list(self.block_of)
        if self.sizes:
            self.merge(self.link(edges), Draws(seed, block_growth.ROUNDS))
        self.train = [] if train is None else train.tolist()
        self.part = self.assign(self.link(edges))

    def grow(self, edges: list[list[int]], seed: int) -> None:
        self.block_of, self.sizes = [-1] * self.nodes, []
        for number in range(block_growth.ROUNDS):
            left = [v for v in range(self.nodes) if self.block_of[v] < 0 and edges[v]]
            if not left:
                break
            random, wanted = Draws(seed, number), -(-len(left) // self.limit)
            for i, v in enumerate(left):
                if wanted and random.below(len(left) - i) < wanted:
                    self.block_of[v] = len(self.sizes)
                    self.sizes.append(1)
                    wanted -= 1
            for level in range(block_growth.PASSES_PER_ROUND):
                if (
                    self.grow_pass(edges, level >= block_growth.LEVELS, False)
                    <= block_growth.QUIET_SHARE * self.nodes
                ):
                    break
        self.grow_pass(edges, True, True)

    def grow_pass(self, edges: list[list[int]], at_once: bool, last: bool) -> int:
        before = self.block_of if at_once else list(self.block_of)
        grown, rest = 0, -1
        for v in range(self.nodes):
            if self.block_of[v] >= 0:
                continue
            near = [before[u] for u in edges[v] if before[u] >= 0]
            choices = [(-near.count(b), self.sizes[b], b) for b in set(near) if self.sizes[b] < self.limit]
            if choices:
                b = min(choices)[2]
            elif last:
                if rest < 0 or self.sizes[rest] * 2 >= self.limit:
                    rest = len(self.sizes)
                    self.sizes.append(0)
                b = rest
            else:
                continue
            self.block_of[v] = b
            self.sizes[b] += 1
            grown += 1
        return grown

    def link(self, edges: list[list[int]]) -> list[dict[tuple[int, int], list[int]]]:
        """For each block its slots: {(set, way): [neighbour, weight]}."""
        ways, sets = blocks.SET_WAYS, blocks.slots_of(self.limit) // blocks.SET_WAYS
        rows: list[dict[tuple[int, int], list[int]]] = [{} for _ in self.sizes]
        for v in range(self.nodes):
            for u in edges[v]:
                row, key = rows[self.block_of[v]], self.block_of[u]
                if key == self.block_of[v]:
                    continue
                s = ((key * 0x9E3779B97F4A7C15 & MASK) >> 32) % sets
                slots = [row.setdefault((s, way), [0, 0]) for way in range(ways)]
                same = [slot for slot in slots if slot[1] and slot[0] == key]
                slot = same[0] if same else min(slots, key=lambda slot: slot[1])
                if slot[1] == 0:
                    slot[0] = key
                slot[1] += 1 if slot[0] == key else -1
        return [{at: row[at] for at in sorted(row) if row[at][1]} for row in rows]

    def merge(self, rows: list[dict[tuple[int, int], list[int]]], random: Draws) -> None:
        large = sorted(self.sizes)[int(0.9 * len(self.sizes))]
        into, lonely = list(range(len(self.sizes))), []
        for b, row in enumerate(rows):
            if self.sizes[b] > int(0.25 * self.limit) or self.sizes[b] >= large:
                continue
            most = max(self.limit, int(blocks.MERGED_SHARE * self.limit))
            fits = [
                (-w, t)
                for t, w in row.values()
                if self.sizes[t] >= large and self.sizes[t] + self.sizes[b] <= most
            ]
            if fits:
                self.move(into, b, min(fits)[1])
            else:
                lonely.append(b)
        group = -1
        while lonely:
            j = random.below(len(lonely))
            b, lonely[j] = lonely[j], lonely[-1]
            lonely.pop()
            if group >= 0 and self.sizes[group] + self.sizes[b] <= self.limit:
                self.move(into, b, group)
            else:
                group = b
        kept = [b for b in range(len(into)) if into[b] == b]
        self.block_of = [kept.index(into[b]) for b in self.block_of]
        self.sizes = [self.sizes[b] for b in kept]

    def move(self, into: list[int], b: int, target: int) -> None:
        into[b] = target
        self.sizes[target] += self.sizes[b]
        self.sizes[b] = 0

    def fits(self, p: int, size: int, train: int) -> bool:
        room = self.held[p] + size <= self.room[0]
        if self.room[1] == 0:
            return room
        others = self.held[p] - self.trained[p] + size - train
        return room and self.trained[p] + train <= self.room[1] and others <= self.room[2]

    def put(self, p: int, size: int, train: int) -> int:
        self.held[p] += size
        self.trained[p] += train
        return p

    def load(self, p: int) -> float:
        return self.held[p] / self.room[0] + (self.trained[p] / self.room[1] if self.room[1] else 0.0)

    def assign(self, rows: list[dict[tuple[int, int], list[int]]]) -> list[int]:
        all_train = sum(self.train)
        counts = (self.nodes, all_train, self.nodes - all_train)
        self.room = [max(-(-n // self.parts), int(1.05 * n / self.parts)) for n in counts]
        self.held, self.trained = [0] * self.parts, [0] * self.parts
        trains = [0] * len(self.sizes)
        for v, b in enumerate(self.block_of):
            trains[b] += bool(self.train) and self.train[v]
        totals = [sum(w for _, w in row.values()) for row in rows]
        part_of = [-1] * len(self.sizes)
        for i, b in enumerate(sorted(range(len(self.sizes)), key=lambda b: -self.sizes[b])):
            part_of[b] = self.part_for(i, b, trains[b], rows, totals, part_of)
            if part_of[b] >= 0:
                self.put(part_of[b], self.sizes[b], trains[b])
        return [self.node_part(v, part_of[b]) for v, b in enumerate(self.block_of)]

    def part_for(self, i: int, b: int, train: int, rows: Any, totals: list[int], part_of: list[int]) -> int:
        size = self.sizes[b]
        if i < self.parts:
            return i if self.fits(i, size, train) else -1
        score: dict[int, float] = {}
        for near, weight in rows[b].values():
            share = weight / totals[b]
            ends = [(near, share)] + [(far, share * (w / totals[near])) for far, w in rows[near].values()]
            for end, walk in ends:
                if part_of[end] >= 0:
                    score[part_of[end]] = score.get(part_of[end], 0.0) + walk
        found = []
        for p in score:
            value = score[p] * (1.0 - self.held[p] / self.room[0])
            if self.room[1]:
                value *= 1.0 - self.trained[p] / self.room[1]
            if value > 0 and self.fits(p, size, train):
                found.append((-value, p))
        if found:
            return min(found)[1]
        rest = [(self.load(p), p) for p in range(self.parts) if self.fits(p, size, train)]
        return min(rest)[1] if rest else -1

    def node_part(self, v: int, p: int) -> int:
        if p >= 0:
            return p
        train = int(bool(self.train) and self.train[v])
        rooms = [p for p in range(self.parts) if self.fits(p, 1, train)]
        return self.put((rooms or [p for p in range(self.parts) if self.held[p] < self.room[0]])[0], 1, train)


@settings(max_examples=35, deadline=None)
@given(
    graphs(90, 300, ascending=False),
    st.integers(1, 100),
    st.integers(0, 2**40),
    st.integers(1, 50),
    st.sampled_from([0.0, 0.3, 1.0, None]),
)
@example(Csc(np.zeros(1, np.int64), np.zeros(0, np.int32)), 3, 0, 1, None)
@example(csc(60, np.arange(60).repeat(2) // 2 * 2, np.zeros(120, np.int64)), 1, 0, 7, 0.3)
def test_blocks_are_their_twin_cover_and_keep_the_balance(
    graph: Csc, parts: int, seed: int, block_edges: int, share: float | None
) -> None:
    nodes = graph.indptr.size - 1
    train = None if share is None else np.random.default_rng(seed).random(nodes) < share
    part = bfs_partition(graph, parts, seed=seed, train=train, block_edges=block_edges)
    assert part.dtype == np.int32
    assert part.tolist() == Twin(graph, parts, seed, train).part
    sizes = np.bincount(part, minlength=parts)
    assert sizes.size == parts
    assert sizes.max() <= max(-(-nodes // parts), 1.05 * nodes / parts)


@pytest.mark.parametrize(("parts", "share"), [(1, None), (2, 0.4), (3, None), (5, 0.1)])
def test_blocks_of_many_nodes_are_their_twin(parts: int, share: float | None) -> None:
    graph = planted(1200, 6, 6, 0.9, seed=parts)
    train = None if share is None else np.random.default_rng(1).random(1200) < share
    twin = Twin(graph, parts, 5, train)
    assert twin.limit > 8
    assert bfs_partition(graph, parts, seed=5, train=train, block_edges=101).tolist() == twin.part


@pytest.mark.parametrize("merged_share", [1.0, 1.05, 9.0])
def test_merging_stops_at_its_bound(merged_share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse graph leaves many small pockets beside large blocks, which compete for the room in them."""
    monkeypatch.setattr(blocks, "MERGED_SHARE", merged_share)
    monkeypatch.setattr(blocks, "BLOCKS_PER_PART", 30)
    graph = planted(1200, 6, 3, 0.5, seed=2)
    twin = Twin(graph, 1, 0, None)
    assert len(twin.sizes) < max(twin.grown)
    assert max(twin.sizes) <= merged_share * twin.limit
    assert (max(twin.sizes) > 1.05 * twin.limit) == (merged_share > 1.05)
    monkeypatch.setattr(blocks, "uncoarsen", lambda *_: None)
    assert bfs_partition(graph, 1, seed=0, block_edges=53).tolist() == twin.block_of


def test_a_pass_over_full_slots_keeps_the_heavy_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a single set of slots most neighbours of a block find it full; twin and kernel agree on who
    stays."""
    monkeypatch.setattr(blocks, "NEIGHBOR_SLOTS_MAX", blocks.SET_WAYS)
    graph = planted(1200, 6, 12, 0.5, seed=1)
    assert bfs_partition(graph, 2, seed=0, block_edges=64).tolist() == Twin(graph, 2, 0, None).part


@settings(max_examples=25, deadline=None)
@given(graphs(90, 300, ascending=False), st.integers(1, 30), st.integers(0, 99), st.integers(1, 50))
def test_grown_blocks_keep_their_limit_and_their_number(
    graph: Csc, limit: int, seed: int, block_edges: int
) -> None:
    nodes = graph.indptr.size - 1
    block_of, sizes = grow_blocks(graph, limit, seed=seed, block_edges=block_edges)
    np.testing.assert_array_equal(np.bincount(block_of, minlength=sizes.size), sizes)
    assert sizes.size <= block_growth.most_blocks(nodes, limit)
    assert ((sizes >= 1) & (sizes <= limit)).all()


def test_long_paths_are_cut_into_pieces() -> None:
    """A path has as many BFS levels as nodes: passes that count at once must get through it."""
    node = np.arange(3999)
    graph = csc(4000, np.concatenate([node, node + 1]), np.concatenate([node + 1, node]))
    part = bfs_partition(graph, 8, seed=0)
    assert np.bincount(part).max() <= 525
    assert edge_cut(graph, part) < 0.1


def test_blocks_recover_planted_groups_better_than_chance() -> None:
    graph = planted(8000, 16, 12, 0.95, seed=1)
    chance = edge_cut(graph, np.random.default_rng(0).permutation(8000).astype(np.int32) % 16)
    assert edge_cut(graph, bfs_partition(graph, 16, seed=0)) < 0.75 * chance


def test_training_nodes_are_balanced_where_they_are_given() -> None:
    graph = planted(8000, 16, 12, 0.95, seed=1)
    train = np.zeros(8000, np.bool_)
    train[np.argsort(bfs_partition(graph, 16, seed=9), kind="stable")[:2000]] = True
    blind, seeing = bfs_partition(graph, 16, seed=0), bfs_partition(graph, 16, seed=0, train=train)
    assert np.bincount(blind[train], minlength=16).max() > 1.2 * 125
    assert np.bincount(seeing[train], minlength=16).max() <= 131
    assert np.bincount(seeing).max() <= 525


def test_blocks_repeat_for_equal_seeds_and_differ_for_others() -> None:
    graph = planted(1000, 10, 10, 0.7, seed=3)
    first = bfs_partition(graph, 10, seed=11)
    np.testing.assert_array_equal(first, bfs_partition(graph, 10, seed=11))
    assert (first != bfs_partition(graph, 10, seed=12)).any()


def test_memory_mapped_edges_give_the_same_parts(tmp_path: Path) -> None:
    graph = planted(600, 6, 8, 0.8, seed=4)
    np.save(tmp_path / "indices.npy", graph.indices)
    mapped = Csc(graph.indptr, np.load(tmp_path / "indices.npy", mmap_mode="r"))
    np.testing.assert_array_equal(
        bfs_partition(mapped, 6, seed=1, block_edges=100), bfs_partition(graph, 6, seed=1)
    )


@pytest.mark.parametrize(
    "bad", [{"parts": 0}, {"parts": 2**31}, {"seed": -1}, {"block_edges": 0}, {"train": 3}]
)
def test_blocks_refuse_arguments_out_of_range(bad: dict[str, Any]) -> None:
    graph = planted(100, 2, 4, 0.8, seed=0)
    if "train" in bad:
        bad = {"train": np.zeros(bad["train"], np.bool_)}
    with pytest.raises(SourceError, match=next(iter(bad))):
        bfs_partition(graph, **{"parts": 2, "seed": 0, **bad})


def test_blocks_name_a_bad_edge() -> None:
    for indices, message in (([0, 1], r"indices\[1\] is 1"), ([-1, 0], r"indices\[0\] is -1")):
        with pytest.raises(SourceError, match=message):
            bfs_partition(Csc(np.array([0, 2], np.int64), np.array(indices, np.int32)), 1, seed=0)


@pytest.mark.parametrize(
    ("nodes", "parts", "block_edges"), [(40000, 4, 50_000), (40000, 900, 5000), (3000, 6000, 100)]
)
def test_blocks_allocate_no_more_than_they_say(nodes: int, parts: int, block_edges: int) -> None:
    graph = planted(nodes, 20, 10, 0.8, seed=6)
    graph = Csc(graph.indptr, graph.indices.astype(np.int64))
    train = np.arange(nodes) % 3 == 0
    bfs_partition(graph, parts, seed=0, train=train)
    tracemalloc.start()
    bfs_partition(graph, parts, seed=0, train=train, block_edges=block_edges)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 4 * nodes + 8 * block_edges < peak_bytes <= bfs_memory_bytes(nodes, parts, block_edges)
