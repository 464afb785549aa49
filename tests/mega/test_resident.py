"""Partitions in memory as a tier, and rows on devices over them: every row is the source's, mini-batches are
the same with and without, and the budget holds. ``"cpu"`` stands for the device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.errors import ArgumentError, BudgetError
from featstore.loaders.mega.loader import PartitionsLoader
from featstore.loaders.mega.resident import ResidentTier
from featstore.loaders.mega.sets import PartitionSets
from featstore.testing import ArraySource, check_source
from featstore.tiers.buffer_tier import BUFFER_POLICIES

NODES, WIDTH, PARTITIONS = 2000, 24, 16
FEATURES = np.random.default_rng(5).standard_normal((NODES, WIDTH), np.float32)
TRAIN = np.random.default_rng(1).permutation(NODES)[:700]
DRAWN: dict[str, Any] = {"fanouts": [4, 3], "batch_size": 60, "memory": "32MiB", "train": TRAIN, "seed": 3}
WAYS: dict[str, dict[str, Any]] = {
    "full": {"resident": 5},
    "sliding": {"resident": 5, "replaced": 2, "weights": True},
    "without hubs": {"resident": 4, "hubs": 0},
    "twice": {"resident": 6, "passes": 2},
    "all": {"resident": PARTITIONS},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Any:
    rng = np.random.default_rng(0)
    near = np.arange(NODES).repeat(5)
    source = np.concatenate(
        [near // 50 * 50 + rng.integers(0, 50, len(near)), rng.integers(0, 30, 3000) * 60]
    )
    target = np.concatenate([near, rng.integers(0, NODES, 3000)])
    options: dict[str, Any] = {"order": "ldg", "partitions": PARTITIONS, "hubs": 0.02, "memory": "128MiB"}
    edges = np.stack([source, target])
    with pack(tmp_path_factory.mktemp("resident") / "s", FEATURES, graph=edges, **options) as made:
        yield made


def by_row(sets: PartitionSets) -> np.ndarray:
    """The features in the order of rows."""
    node_of_row = sets.store.tables["features"].node_of_row()
    return FEATURES if node_of_row is None else FEATURES[node_of_row]


def all_of(batch: Any) -> Any:
    weight = None if batch.sample.weight is None else batch.sample.weight.tolist()
    return (
        batch.index, batch.node.tolist(), batch.row.tolist(), batch.col.tolist(), weight,
        np.asarray(batch.x).tobytes(),
    )  # fmt: skip


@pytest.mark.parametrize("way", ["full", "sliding", "without hubs", "all"])
def test_the_rows_of_a_mega_batch_are_a_tier(store: featstore.Store, way: str) -> None:
    options = {name: value for name, value in WAYS[way].items() if name != "weights"}
    with PartitionSets(store, memory="32MiB", seed=1, **options) as sets:
        rows, name = by_row(sets), "features"
        below = ArraySource(store, {name: rows})
        tier = ResidentTier(below, [(store.tables[name], sets.hub_rows[name])])
        assert not tier.holds(name, np.arange(NODES)).any()
        check_source(tier, {name: rows}, threads=1)
        disk = sets.as_tier()
        for _ in range(2):
            for mega in sets:
                tier.hold(mega)
                disk.hold(mega)
                here = mega.rows[name]
                places = here.places
                held = tier.rows_of(name, places)
                assert held.dtype == np.int64
                assert here.x is not None
                np.testing.assert_array_equal(rows[held], here.x[places])
                inside = np.isin(np.arange(NODES), held)
                np.testing.assert_array_equal(tier.holds(name, np.arange(NODES)), inside)
                for one in (tier, disk):
                    check_source(one, {name: rows}, seed=mega.step, requests=5, threads=1)
                asked, hits = below.asked, tier.hits()
                tier.submit({name: np.arange(NODES)}, out=None).result(60)
                assert below.asked - asked == NODES - inside.sum()
                assert tier.hits() - hits == inside.sum()
        tier.close()


@settings(max_examples=6)
@given(
    way=st.sampled_from(list(WAYS)), device=st.sampled_from(["cpu", ["cpu", "cpu"]]),
    memory=st.sampled_from([2 * 4 * WIDTH, "8KiB", "60KiB", "1MiB"]), policy=st.sampled_from(BUFFER_POLICIES),
    seed=st.integers(0, 3),
)  # fmt: skip
def test_mini_batches_are_the_same_with_rows_on_devices(
    store: featstore.Store, way: str, device: Any, memory: Any, policy: str, seed: int
) -> None:
    options = DRAWN | WAYS[way] | {"seed": seed}
    with PartitionsLoader(store, **options) as plain:
        wanted = [all_of(batch) for _ in range(2) for batch in plain]
        read = plain.report().bytes_read
    more = {"device": device, "device_memory": memory, "device_policy": policy}
    with PartitionsLoader(store, **options, **more) as loader:
        found = []
        for _ in range(2):
            for batch in loader:
                assert isinstance(batch.x, torch.Tensor)
                found.append(all_of(batch))
        assert found == wanted
        report = loader.report()
        counted = report.devices["features"]
        assert counted.hits + counted.misses == sum(len(one[1]) for one in found)
        assert report.bytes_read <= read * 1.5, "what misses on devices is in memory, and not read"
        assert loader.memory()["unused"] >= 0
        if memory == "1MiB":
            assert counted.misses <= NODES, "all rows fit, and are copied once"
            assert counted.hits > 0


def test_nothing_is_read_for_rows_that_devices_miss(
    store: featstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What mini-batches want is in memory: the disk below is never asked for it."""
    made: list[ResidentTier] = []
    honest = PartitionSets.as_tier

    def as_tier(self: PartitionSets) -> ResidentTier:
        made.append(honest(self))
        made[0]._below.submit = None  # type: ignore[method-assign, assignment]
        return made[0]

    monkeypatch.setattr(PartitionSets, "as_tier", as_tier)
    with PartitionsLoader(store, **DRAWN, resident=4, device="cpu", device_memory="4KiB") as loader:
        for _ in range(2):
            for batch in loader:
                np.testing.assert_array_equal(batch.x, FEATURES[batch.node])
    assert made[0].hits() > 0


def test_a_state_goes_on_with_and_without_devices(store: featstore.Store) -> None:
    options = DRAWN | WAYS["twice"]
    with PartitionsLoader(store, **options) as loader:
        wanted = [all_of(batch) for batch in loader]
    with PartitionsLoader(store, **options, device="cpu", device_memory="20KiB") as loader:
        found = [all_of(batch) for batch in islice(loader, 5)]
        state = loader.state()
    for more in ({}, {"device": "cpu", "device_memory": "9KiB"}):
        with PartitionsLoader(store, **options, **more) as loader:
            loader.load_state(state)
            assert found + [all_of(batch) for batch in loader] == wanted


def test_through_the_one_loader(store: featstore.Store) -> None:
    sampled: dict[str, Any] = {"seeds": TRAIN, "fanouts": [4, 3], "batch_size": 60, "mode": "partitions"}

    def made(**more: Any) -> Iterator[Any]:
        with store.loader(**sampled, memory="32MiB", **more) as loader:
            for batch in loader:
                yield batch.n_id.tolist(), np.asarray(batch.x).tobytes()

    with_device = {"device": ["cpu"], "device_memory": "50KiB", "device_policy": "lru"}
    assert list(made(**with_device)) == list(made())


@pytest.mark.parametrize("memory", ["8KiB", "256KiB"])
def test_the_budget_that_an_error_names_works(store: featstore.Store, memory: str) -> None:
    options: dict[str, Any] = DRAWN | {"device": "cpu", "device_memory": memory}
    with pytest.raises(BudgetError) as found:
        PartitionsLoader(store, **options | {"memory": 1})
    with PartitionsLoader(store, **options | {"memory": found.value.needed_bytes}) as loader:
        assert loader.memory()["unused"] >= 0
        assert len(next(iter(loader)).node)
    with PartitionsLoader(store, **DRAWN | {"memory": found.value.needed_bytes}) as plain:
        # the device's own bytes are no part of this: only what host memory it takes
        assert plain.sets.resident >= loader.sets.resident


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"device_memory": "1MiB"}, ArgumentError, "say on which, with device="),
        ({"device": "cpu", "device_policy": "lru"}, ArgumentError, "say in how much device_memory="),
        ({"device": ["cpu", "cpu"]}, ArgumentError, "device"),
        ({"device": [], "device_memory": "1MiB"}, ArgumentError, "at least one"),
        ({"device": "cpu", "device_memory": 10}, BudgetError, "one row of each table"),
        ({"device": "cpu", "device_memory": "1MiB", "device_policy": "static"}, ArgumentError, "policy"),
    ],
)
def test_what_is_refused(store: featstore.Store, options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        PartitionsLoader(store, **DRAWN, **options)
