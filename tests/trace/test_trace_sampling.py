"""Mini-batches sampled from a store to be recorded: the same wherever the graph is, however often, from
wherever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_support import record

from featstore.errors import IdError, SourceError
from featstore.sampling.batches import SampledBatches, fingerprint_of, open_sampler, sample_batches, shuffled
from featstore.sampling.neighbors import NeighborSampler
from featstore.sampling.recorded_epochs import RecordedEpochs

NODES = 300


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Iterator[Any]:
    rng = np.random.default_rng(8)
    edges = np.stack([rng.integers(0, NODES, 3000), (rng.random(3000) ** 2 * NODES).astype(np.int64)])
    features = rng.random((NODES, 4)).astype(np.float32)
    order = {"order": "permutation", "permutation": rng.permutation(NODES)}
    with pack(tmp_path_factory.mktemp("sampled") / "s", features, graph=edges, **order) as store:
        yield store


TRAIN = np.arange(0, NODES, 2)


def assert_same_batches(one: Any, other: Any) -> None:
    for ours, theirs in zip(one, other, strict=True):
        for name in ("node", "row", "col", "edge_id", "num_sampled_nodes", "num_sampled_edges"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name


def test_mini_batches_do_not_depend_on_where_the_graph_is(stored: Any) -> None:
    options: dict[str, Any] = {"fanouts": [4, 3], "batch_size": 40, "seed": 6, "epoch": 2}
    with (
        sample_batches(stored, TRAIN, in_memory=True, **options) as near,
        sample_batches(stored, TRAIN, in_memory=False, memory="4MiB", **options) as far,
    ):
        assert len(near) == 4
        assert_same_batches(near, far)
        assert_same_batches(near, near)
        assert_same_batches(near[1:3], [near[1], near[2]])
        assert_same_batches(sample_batches(near.sampler, TRAIN, **options), far)
        assert [b.num_sampled_nodes[0] for b in near] == [40, 40, 40, 30]
        seeds = np.concatenate([b.node[: b.num_sampled_nodes[0]] for b in near])
        assert sorted(seeds) == TRAIN.tolist()
        rows = stored.table("features").node_of_row()
        with stored.reader(tables=["features/sources"], memory="4MiB", static=None) as reader:
            stored_rows = reader.read(near[0].edge_id)
        assert np.array_equal(rows[stored_rows], near[0].node[near[0].row]), (
            "an edge's number is its place in the store"
        )


def test_epochs_differ_and_repeat(stored: Any) -> None:
    sampler = open_sampler(stored, [3], seed=1)
    assert isinstance(sampler, NeighborSampler), "300 nodes fit a gigabyte"
    first, second = SampledBatches(sampler, TRAIN, 50, 0), SampledBatches(sampler, TRAIN, 50, 1)
    assert not np.array_equal(first.train, second.train)
    assert np.array_equal(first.train, SampledBatches(sampler, TRAIN, 50, 0).train)
    mask = np.zeros(NODES, bool)
    mask[TRAIN] = True
    assert np.array_equal(SampledBatches(sampler, mask, 50, 1).train, second.train)


@pytest.mark.parametrize(("count", "seed", "epoch"), [(1, 0, 0), (50, 7, 3), (50, -7, 2**40)])
def test_the_order_of_an_epoch(count: int, seed: int, epoch: int) -> None:
    def mix(word: int) -> int:
        word %= 2**64
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        return word ^ (word >> 31)

    golden, key = 0x9E3779B97F4A7C15, 0
    for word in (seed, epoch, -1):
        key = mix(key + golden + word)
    wanted = sorted(range(count), key=lambda k: mix(key + golden * (k + 1)))
    assert shuffled(count, seed, epoch).tolist() == wanted


def test_training_nodes_that_cannot_be_used(stored: Any) -> None:
    sampler = open_sampler(stored, [3])
    for train, error in (
        ([0.5], SourceError),
        ([], SourceError),
        ([[1]], SourceError),
        ([1, 1], IdError),
        ([-1], IdError),
        ([NODES], IdError),
        ([True], SourceError),
    ):
        with pytest.raises(error):
            SampledBatches(sampler, np.array(train), 4)
    for numbers in (np.int64, np.uint8):
        with pytest.raises(IdError, match="is it a mask"):
            SampledBatches(sampler, (np.arange(NODES) % 2).astype(numbers), 4)
    with pytest.raises(SourceError, match=rf"a mask of {NODES:,} nodes; the mask given has the shape \[7\]"):
        SampledBatches(sampler, np.ones(7, bool), 4)
    with pytest.raises(SourceError, match="batch_size"):
        SampledBatches(sampler, TRAIN, 0)
    with pytest.raises(SourceError, match="fan-outs"):
        sample_batches(sampler, TRAIN, [4], 8)
    with pytest.raises(SourceError, match="seed"):
        sample_batches(sampler, TRAIN, [3], 8, seed=1)
    with pytest.raises(KeyError):
        sample_batches(stored, TRAIN, [3], 8, graph="none")


def test_sampled_mini_batches_make_a_trace(stored: Any, tmp_path: Path) -> None:
    sampler = open_sampler(stored, [4, 3], seed=2)
    epochs = RecordedEpochs(sampler, TRAIN, 64, 3)
    fingerprint = fingerprint_of(stored, stored.graphs["features"], sampler, TRAIN, 64, 3)
    with record(epochs, tmp_path / "t", fingerprint=fingerprint) as trace:
        assert len(trace) == 9 == len(epochs)
        assert trace.fingerprint == fingerprint
        sample: Any
        for number, (ids, sample) in enumerate(trace):
            assert sample["epoch"] == number // 3
            assert sample["batch_size"] == (22 if number % 3 == 2 else 64)
            assert_same_batches(
                [sample["batch"]], [SampledBatches(sampler, TRAIN, 64, number // 3)[number % 3]]
            )
            assert np.array_equal(ids[""], sample["batch"].node)
    other = fingerprint_of(stored, stored.graphs["features"], sampler, TRAIN[::-1], 64, 3)
    assert other["train_sha256"] != fingerprint["train_sha256"]
