"""The sampler's kernels against a plain Python twin, its statistics, and what it refuses."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore.base import hashing
from featstore.errors import IdError, SourceError
from featstore.sampling import picking
from featstore.sampling.neighbors import NeighborSampler, SampledSubgraph

GOLDEN, MIX_A, MIX_B, WORD = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 2**64


def mix_twin(word: int) -> int:
    word = (word ^ (word >> 30)) * MIX_A % WORD
    word = (word ^ (word >> 27)) * MIX_B % WORD
    return word ^ (word >> 31)


def floyd_twin(key: int, degree: int, fanout: int) -> list[int]:
    taken: list[int] = []
    for draw in range(fanout):
        top = degree - fanout + draw
        word = mix_twin((key + (draw + 1) * GOLDEN) % WORD)
        pick = word * (top + 1) >> 64
        taken.append(top if pick in taken else pick)
    return taken


def sample_twin(
    indptr: Any, indices: Any, fanouts: Sequence[int], seed: int, seeds: Any, batch_index: int, epoch: int
) -> SampledSubgraph:
    key = 0
    for word in (seed, epoch, batch_index):
        key = mix_twin((key + GOLDEN + word) % WORD)
    node = [int(one) for one in seeds]
    local = {one: position for position, one in enumerate(node)}
    row: list[int] = []
    col: list[int] = []
    edge: list[int] = []
    node_counts, edge_counts = [len(node)], []
    begin, end = 0, len(node)
    for hop, fanout in enumerate(fanouts):
        hop_key = mix_twin((key + hop) % WORD)
        edges_before = len(edge)
        for position in range(begin, end):
            low, high = int(indptr[node[position]]), int(indptr[node[position] + 1])
            picks: Sequence[int] = range(high - low)
            if 0 <= fanout < high - low:
                picks = floyd_twin(mix_twin(hop_key ^ mix_twin(node[position])), high - low, fanout)
            for pick in picks:
                neighbour = int(indices[low + pick])
                if neighbour not in local:
                    local[neighbour] = len(node)
                    node.append(neighbour)
                row.append(local[neighbour])
                col.append(position)
                edge.append(low + pick)
        begin, end = end, len(node)
        node_counts.append(end - begin)
        edge_counts.append(len(edge) - edges_before)
    arrays = (np.array(values, dtype=np.int64) for values in (node, row, col, edge))
    return SampledSubgraph(*arrays, tuple(node_counts), tuple(edge_counts))


def random_graph(node_count: int, edge_count: int, seed: int, dtype: type = np.int32) -> tuple[Any, Any]:
    """A CSC multigraph with skewed degrees, self-loops, and nodes without neighbours."""
    rng = np.random.default_rng(seed)
    target = np.sort((rng.random(edge_count) ** 3 * node_count).astype(np.int64))
    indptr = np.searchsorted(target, np.arange(node_count + 1)).astype(np.int64)
    return indptr, rng.integers(0, node_count, edge_count).astype(dtype)


def assert_same(left: SampledSubgraph, right: SampledSubgraph) -> None:
    for name in ("node", "row", "col", "edge_id"):
        ours, theirs = getattr(left, name), getattr(right, name)
        assert ours.dtype == theirs.dtype == np.int64
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
    assert left.num_sampled_nodes == right.num_sampled_nodes
    assert left.num_sampled_edges == right.num_sampled_edges


@settings(max_examples=35, deadline=None)
@given(
    node_count=st.integers(1, 300),
    edges_per_node=st.integers(0, 12),
    fanouts=st.lists(st.sampled_from([-1, 1, 2, 5, 40]), min_size=1, max_size=3),
    seed=st.integers(-(2**70), 2**70),
    batch_index=st.integers(0, 2**40),
    epoch=st.integers(0, 1000),
    wide=st.booleans(),
)
def test_kernel_equals_twin(
    node_count: int,
    edges_per_node: int,
    fanouts: list[int],
    seed: int,
    batch_index: int,
    epoch: int,
    wide: bool,
) -> None:
    dtype = np.int64 if wide else np.int32
    indptr, indices = random_graph(node_count, node_count * edges_per_node, seed % 2**32, dtype)
    seeds = np.random.default_rng(epoch).permutation(node_count)[: 1 + batch_index % 40]
    ours = NeighborSampler(indptr, indices, fanouts, seed).sample(seeds, batch_index, epoch=epoch)
    assert_same(ours, sample_twin(indptr, indices, fanouts, seed, seeds, batch_index, epoch))


@settings(max_examples=100, deadline=None)
@given(word=st.integers(0, WORD - 1), limit=st.integers(1, 2**32 - 1))
def test_words(word: int, limit: int) -> None:
    assert int(hashing.mix64(np.uint64(word))) == mix_twin(word) == hashing._mix(word)
    assert int(hashing.draw_below(np.uint64(word), np.uint64(limit))) == word * limit >> 64


@settings(max_examples=20, deadline=None)
@given(words=st.lists(st.integers(0, WORD - 1), max_size=20), key=st.integers(0, WORD - 1))
def test_arrays_of_words(words: list[int], key: int) -> None:
    assert hashing.mix64(np.array(words, np.uint64)).tolist() == [mix_twin(word) for word in words]
    assert hashing.random_words(np.uint64(key), len(words)).tolist() == [
        mix_twin((key + k * GOLDEN) % WORD) for k in range(1, len(words) + 1)
    ]


@settings(max_examples=30, deadline=None)
@given(ids=st.lists(st.integers(0, 2**63 - 1), max_size=20))
def test_fold_ids_equals_twin(ids: list[int]) -> None:
    key = GOLDEN
    for one in ids:
        key = (mix_twin(key ^ one) + GOLDEN) % WORD
    assert hashing.fold_ids(np.array(ids, dtype=np.int64)) == mix_twin(key) >> 1
    assert hashing.fold_ids(np.array([1, 2])) != hashing.fold_ids(np.array([2, 1]))


@settings(max_examples=35, deadline=None)
@given(
    key=st.integers(0, WORD - 1),
    degree=st.integers(1, 3000),
    fanout=st.integers(1, 200),
    stamp=st.integers(0, 5),
)
def test_pick_distinct_equals_twin(key: int, degree: int, fanout: int, stamp: int) -> None:
    fanout = min(fanout, degree)
    picks = np.full((2, picking.table_size(fanout)), -1, dtype=np.int64)
    out = np.empty(fanout, dtype=np.int64)
    picking.pick_distinct(np.uint64(key), degree, fanout, picks, stamp, out)
    assert out.tolist() == floyd_twin(key, degree, fanout)
    assert len(set(out.tolist())) == fanout
    # Another stamp finds the set empty again.
    picking.pick_distinct(np.uint64(key), degree, fanout, picks, stamp + 1, out)
    assert out.tolist() == floyd_twin(key, degree, fanout)


def test_table_finds_adds_and_names_duplicates() -> None:
    ids = np.random.default_rng(1).permutation(5000)[:1000].astype(np.int64)
    slots = np.full(picking.table_size(1000), -1, dtype=np.int64)
    assert picking.fill_table(slots, ids, 1000) == -1
    room = np.append(ids, -1)
    assert [picking.find_or_add(slots, room, 1000, one) for one in ids] == list(range(1000))
    assert picking.find_or_add(slots, room, 1000, 5001) == 1000
    assert room[1000] == 5001
    twice = np.array([4, 9, 4], dtype=np.int64)
    assert picking.fill_table(np.full(16, -1, dtype=np.int64), twice, 3) == 2


def test_hop_size_equals_twin() -> None:
    indptr, indices = random_graph(100, 900, 3)
    node = np.arange(100, dtype=np.int64)
    degrees = np.diff(indptr)[20:70]
    assert picking.hop_size(indptr, 900, node, 20, 70, 4) == (np.minimum(degrees, 4).sum(), degrees.max())
    assert picking.hop_size(indptr, 900, node, 20, 70, -1) == (degrees.sum(), degrees.max())
    assert len(indices) == 900


def test_structure_is_that_of_neighbor_loader() -> None:
    indptr, indices = random_graph(500, 5000, 7)
    seeds = np.arange(0, 500, 25)
    batch = NeighborSampler(indptr, indices, [4, 3, 2], seed=5).sample(seeds, 2)
    np.testing.assert_array_equal(batch.node[: len(seeds)], seeds)
    assert len(np.unique(batch.node)) == len(batch.node) == sum(batch.num_sampled_nodes)
    assert len(batch.row) == sum(batch.num_sampled_edges)
    # Each edge is an edge of the graph: source as indices say, target the column whose range holds the
    # position.
    np.testing.assert_array_equal(batch.node[batch.row], indices[batch.edge_id])
    np.testing.assert_array_equal(
        batch.node[batch.col], np.searchsorted(indptr, batch.edge_id, side="right") - 1
    )
    assert len(np.unique(batch.edge_id)) == len(batch.edge_id)
    # Hop by hop: only the nodes that the hop before found first are asked, each min(degree, fanout) times.
    node_ends, edge_ends = np.cumsum(batch.num_sampled_nodes), np.cumsum((0, *batch.num_sampled_edges))
    begin = 0
    for hop, fanout in enumerate((4, 3, 2)):
        asked = batch.node[begin : node_ends[hop]]
        targets = batch.col[edge_ends[hop] : edge_ends[hop + 1]] - begin
        expected = np.minimum(indptr[asked + 1] - indptr[asked], fanout)
        np.testing.assert_array_equal(np.bincount(targets, minlength=len(asked)), expected)
        assert (batch.row[edge_ends[hop] : edge_ends[hop + 1]] < node_ends[hop + 1]).all()
        begin = node_ends[hop]


def test_nodes_without_neighbours_and_no_seeds() -> None:
    indptr = np.array([0, 0, 2, 2, 2], dtype=np.int64)
    indices = np.array([0, 3], dtype=np.int32)
    sampler = NeighborSampler(indptr, indices, [5, 5])
    alone = sampler.sample(np.array([0, 2]))
    assert alone.node.tolist() == [0, 2]
    assert alone.num_sampled_nodes == (2, 0, 0)
    assert alone.num_sampled_edges == (0, 0)
    assert sampler.sample(np.array([1])).node.tolist() == [1, 0, 3]
    empty = sampler.sample(np.array([], dtype=np.int64))
    assert len(empty.node) == len(empty.row) == 0
    assert NeighborSampler(np.array([0], dtype=np.int64), indices[:0], [2]).node_count == 0


def test_neighbours_are_drawn_uniformly() -> None:
    """Chi-squared over 20,000 batches: single neighbours, and pairs, of a node with 12 neighbours and fan-out
    4."""
    degree, fanout, rounds = 12, 4, 20_000
    indptr = np.array([0, degree] + [degree] * degree, dtype=np.int64)
    indices = np.arange(1, degree + 1, dtype=np.int32)
    sampler = NeighborSampler(indptr, indices, [fanout], seed=11)
    seeds = np.zeros(1, dtype=np.int64)
    picked = np.zeros((rounds, degree))
    for index in range(rounds):
        picked[index, sampler.sample(seeds, index).edge_id] = 1
    assert (picked.sum(axis=1) == fanout).all()
    share = fanout / degree
    # Counts of a draw without replacement vary less than the multinomial, by the factor (1 - share) * d / (d
    # - 1).
    expected = rounds * share
    chi_singles = (((picked.sum(axis=0) - expected) ** 2) / expected).sum() / (
        (1 - share) * degree / (degree - 1)
    )
    assert chi_singles < 31.3, "11 degrees of freedom: 31.3 is passed once in a thousand"
    together = picked.T @ picked
    pairs = together[np.triu_indices(degree, 1)]
    expected_pairs = rounds * share * (fanout - 1) / (degree - 1)
    assert (np.abs(pairs - expected_pairs) < 5 * np.sqrt(expected_pairs)).all()
    # Batches one after another are independent: the overlap of two draws has mean fanout * share.
    overlap = (picked[1:] * picked[:-1]).sum(axis=1).mean()
    assert abs(overlap - fanout * share) < 0.03


def test_nothing_but_seed_epoch_batch_and_seeds_matters() -> None:
    indptr, indices = random_graph(2000, 40_000, 13)
    sampler = NeighborSampler(indptr, indices, [6, 4], seed=3)
    rng = np.random.default_rng(0)
    jobs = [(rng.permutation(2000)[:64], index % 9, index // 9) for index in range(36)]
    first = [sampler.sample(seeds, index, epoch=epoch) for seeds, index, epoch in jobs]
    for position in reversed(range(len(jobs))):
        seeds, index, epoch = jobs[position]
        other = NeighborSampler(indptr, indices.astype(np.int64), [6, 4], seed=3)
        assert_same(other.sample(seeds.astype(np.int32), index, epoch=epoch), first[position])
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        again = list(pool.map(lambda job: sampler.sample(job[0], job[1], epoch=job[2]), jobs))
    for left, right in zip(first, again):
        assert_same(left, right)


@pytest.mark.parametrize(("seed", "epoch", "batch_index"), [(4, 0, 0), (3, 1, 0), (3, 0, 1)])
def test_each_part_of_the_key_matters(seed: int, epoch: int, batch_index: int) -> None:
    indptr, indices = random_graph(2000, 40_000, 13)
    seeds = np.arange(64)
    base = NeighborSampler(indptr, indices, [6], seed=3).sample(seeds)
    other = NeighborSampler(indptr, indices, [6], seed=seed).sample(seeds, batch_index, epoch=epoch)
    assert not np.array_equal(base.edge_id, other.edge_id)


def test_read_only_memory_map(tmp_path: Any) -> None:
    indptr, indices = random_graph(300, 3000, 17)
    for name, array in (("indptr", indptr), ("indices", indices)):
        np.save(tmp_path / name, array)
    mapped = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("indptr", "indices")]
    batch = NeighborSampler(*mapped, [3, 3], seed=1).sample(np.arange(10), 4)
    assert_same(batch, NeighborSampler(indptr, indices, [3, 3], seed=1).sample(np.arange(10), 4))


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        (np.array([0, 300]), "seed 300 is no node"),
        (np.array([-1]), "seed -1 is no node"),
        (np.array([5, 7, 5]), "seed 5 stands twice"),
        (np.array([0.0]), "integer array"),
        (np.array([[0]]), "one-dimensional"),
    ],
)
def test_bad_seeds(seeds: Any, message: str) -> None:
    indptr, indices = random_graph(300, 3000, 17)
    with pytest.raises(IdError, match=message):
        NeighborSampler(indptr, indices, [3]).sample(seeds)


def test_bad_graphs_and_fanouts() -> None:
    indptr, indices = random_graph(30, 300, 17)
    for bad_indptr, bad_indices, fanouts, message in (
        (indptr.astype(np.int32), indices, [3], "indptr must be a one-dimensional int64 array"),
        (indptr, indices.astype(np.float32), [3], "indices must be a one-dimensional int32 or int64 array"),
        (indptr, indices.reshape(30, 10), [3], "one-dimensional"),
        (indptr, indices[:-1], [3], "number of edges"),
        (indptr[1:], indices, [3], "the first 0"),
        (indptr[:0], indices, [3], "n \\+ 1 offsets"),
        (indptr, indices, [], "one number per hop"),
        (indptr, indices, [3, 0], "at least 1"),
        (indptr, indices, [-2], "at least 1"),
    ):
        if message == "the first 0":
            bad_indptr = bad_indptr.copy()
            bad_indptr[0] = 5
        with pytest.raises(SourceError, match=message):
            NeighborSampler(bad_indptr, bad_indices, fanouts)


def test_arrays_that_contradict_themselves_stop_with_the_place() -> None:
    indptr = np.array([0, 2, 1, 4, 4], dtype=np.int64)
    indices = np.array([1, 2, 9, 3], dtype=np.int32)
    sampler = NeighborSampler(indptr, indices, [5])
    with pytest.raises(SourceError, match="node 1 the edges 2 to 1 of 4"):
        sampler.sample(np.array([3, 1]))
    with pytest.raises(SourceError, match=r"indices\[2\] is 9, no node of a graph of 4"):
        sampler.sample(np.array([2]))
    far = NeighborSampler(np.array([0, 9, 4], dtype=np.int64), indices, [1])
    with pytest.raises(SourceError, match="node 0 the edges 0 to 9 of 4"):
        far.sample(np.array([0]))
