"""Samplers' options in mode partitions over a graph without types: what is drawn of a collection of
partitions keeps to them, edge by edge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import ArgumentError, BudgetError, FeatstoreError, SourceError

NODES, EDGES, LATEST, FANOUTS = 600, 6000, 50, (3, 2)


class World:
    """A graph whose edges have numbers, weights (a third of them 0) and times; and nodes have times."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.edges = rng.integers(0, NODES, (2, EDGES))
        self.weights = np.where(rng.random(EDGES) < 1 / 3, 0, rng.random(EDGES)).astype(np.float32)
        self.times = rng.integers(0, LATEST, EDGES)
        self.since = rng.integers(0, LATEST, NODES)
        self.rows = rng.standard_normal((NODES, 5), np.float32)
        self.train = np.sort(rng.permutation(NODES)[:200])
        self.when = rng.integers(0, LATEST, len(self.train))

    def pack(self, path: Path, **how: Any) -> featstore.Store:
        given: dict[str, Any] = {"edge_weights": self.weights, "edge_times": self.times, "edge_ids": True}
        return featstore.pack(
            path, self.rows, graph=self.edges, order="ldg", partitions=8,
            arrays={"since": self.since, "value": self.weights.astype(np.float64)}, **given | how,
        )  # fmt: skip


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.fixture(scope="module")
def store(world: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with world.pack(tmp_path_factory.mktemp("options") / "store") as store:
        yield store


def loader_of(store: featstore.Store, world: World, **said: Any) -> featstore.Loader:
    how: dict[str, Any] = {"resident": 4, "batch_size": 48, "memory": "16MiB", "edge_table": None}
    if "input_time" not in said and said.get("time_attr") == "times":
        said["input_time"] = world.when
    return store.loader(seeds=world.train, fanouts=FANOUTS, mode="partitions", **how | said)


OPTIONS: dict[str, dict[str, Any]] = {
    "replace": {"replace": True},
    "disjoint": {"disjoint": True},
    "weights": {"weight_attr": "weights"},
    "weights, replace": {"weight_attr": "weights", "replace": True},
    "times": {"time_attr": "times"},
    "times, last": {"time_attr": "times", "temporal_strategy": "last"},
    "times, window": {"time_attr": "times", "time_window": 5},
    "times of nodes": {"time_attr": "since"},
    "induced": {"subgraph_type": "induced"},
    "bidirectional": {"subgraph_type": "bidirectional"},
    "all": {"disjoint": True, "weight_attr": "weights", "time_attr": "times", "replace": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_mini_batches_keep_to_their_options(
    options: dict[str, Any], store: featstore.Store, world: World
) -> None:
    """Two epochs, the second the same when it is loaded again."""
    when_of = dict(zip(world.train.tolist(), world.when.tolist(), strict=True))
    with loader_of(store, world, **options) as loader:
        for epoch in range(2):
            seen: list[int] = []
            for batch in loader:
                sample, node = batch.sample, batch.n_id
                np.testing.assert_array_equal(batch.x, world.rows[node])
                sources, targets = node[sample.row], node[sample.col]
                ends = world.edges[:, sample.e_id]
                same = (ends == [sources, targets]).all(0)
                if options.get("subgraph_type") == "bidirectional":  # the reverse has the same number
                    same |= (ends == [targets, sources]).all(0)
                assert same.all()
                seeds = node[: batch.batch_size].tolist()
                if options.get("weight_attr"):
                    assert (world.weights[sample.e_id] > 0).all()
                trees = options.get("disjoint") or options.get("time_attr")
                assert (sample.batch is not None) == bool(trees)
                if trees:
                    tree = sample.batch[sample.col]
                    np.testing.assert_array_equal(tree, sample.batch[sample.row])
                    of_seeds = np.array([when_of[seed] for seed in seeds])
                    if options.get("time_attr") == "times":
                        times = world.times[sample.e_id]
                        assert (times <= of_seeds[tree]).all()
                        assert (times >= of_seeds[tree] - options.get("time_window", LATEST)).all()
                    elif options.get("time_attr") == "since":
                        assert (world.since[sources] <= world.since[node[tree]]).all()
                if options.get("subgraph_type") == "induced":
                    pairs = set(zip(sources.tolist(), targets.tolist(), strict=True))
                    inside = np.isin(world.edges, node).all(0)
                    kept = {tuple(pair) for pair in world.edges[:, inside].T.tolist()}
                    assert pairs <= kept
                    assert len(pairs) > sum(sample.num_sampled_nodes[1:]), "more than drew the nodes"
                seen += seeds
            assert sorted(seen) == world.train.tolist(), f"epoch {epoch}"


def test_what_is_said_changes_what_is_drawn(store: featstore.Store, world: World) -> None:
    """With all partitions in memory nothing is left out: with replacement each node with a list asks for as
    many neighbours as were wanted, without for as many as it has; of the last ones in time the last."""
    degrees = np.bincount(world.edges[1], minlength=NODES)
    for replace in (True, False):
        with loader_of(store, world, resident=8, replace=replace) as loader:
            for batch in loader:
                seeds = batch.n_id[: batch.batch_size]
                asked = np.bincount(
                    batch.sample.col[: batch.sample.num_sampled_edges[0]], minlength=len(seeds)
                )
                wanted = np.where(degrees[seeds] > 0, 3, 0) if replace else np.minimum(degrees[seeds], 3)
                np.testing.assert_array_equal(asked[: len(seeds)], wanted)
    with loader_of(store, world, resident=8, time_attr="times", temporal_strategy="last") as loader:
        when_of = dict(zip(world.train.tolist(), world.when.tolist(), strict=True))
        for batch in loader:
            first = batch.sample.num_sampled_edges[0]
            for place, seed in enumerate(batch.n_id[: batch.batch_size].tolist()):
                own = world.times[(world.edges[1] == seed) & (world.times <= when_of[seed])]
                drawn = world.times[batch.sample.e_id[:first][batch.sample.col[:first] == place]]
                assert sorted(drawn.tolist()) == sorted(own.tolist())[-3:]


def test_what_cannot_be_is_refused(store: featstore.Store, world: World, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="'value': pack them with edge_weights="):
        loader_of(store, world, weight_attr="value")
    with pytest.raises(ArgumentError, match="times of the seeds, input_time="):
        store.loader(seeds=world.train, fanouts=FANOUTS, mode="partitions", time_attr="times")
    with pytest.raises(SourceError, match="one for each of 200 seeds"):
        loader_of(store, world, time_attr="times", input_time=world.when[1:])
    with (
        world.pack(tmp_path / "plain", edge_weights=None, edge_times=None) as plain,
        pytest.raises(FeatstoreError, match="weights"),
    ):
        loader_of(plain, world, weight_attr="weights")


@pytest.mark.parametrize("name", ["replace", "disjoint", "times", "induced", "all"])
def test_the_budget_that_the_error_names_works(name: str, store: featstore.Store, world: World) -> None:
    with pytest.raises(BudgetError) as caught:
        loader_of(store, world, memory=1, **OPTIONS[name])
    with loader_of(store, world, memory=caught.value.needed_bytes, **OPTIONS[name]) as loader:
        assert sum(batch.batch_size for batch in loader) == len(world.train)


def test_rows_larger_than_what_a_reader_has_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rows of some MiB are; and the memory that the error names works."""
    for name in ("_READER_BYTES_MIN", "_READER_BYTES_MAX"):
        monkeypatch.setattr(f"featstore.loaders.mega.loading.{name}", 700 << 10)
    rows = np.random.default_rng(0).integers(0, 256, (48, 1 << 18), np.uint8)
    ring = np.stack([np.arange(48), (np.arange(48) + 1) % 48])
    how: dict[str, Any] = {"mode": "partitions", "seeds": np.arange(48), "fanouts": (2,), "batch_size": 8}
    with featstore.pack(tmp_path / "s", rows, graph=ring, order="ldg", partitions=8) as store:
        with pytest.raises(BudgetError) as error:
            store.loader(**how, memory="4MiB")
        for memory in (error.value.needed_bytes, "1GiB"):
            with store.loader(**how, memory=memory) as loader:
                for batch in loader:
                    assert (batch.x == rows[batch.n_id]).all()
