"""Mini-batches that are sampled ahead, to know which rows of other hosts they want, are kept until their turn
as far as there is memory for them: they are the same, and each is sampled once.

Hosts are threads, as in ``test_split_topology.py``."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_split_topology import each, graph_of, hosts, split

from featstore.errors import OF_STORE, BudgetError, ClosedError, FeatstoreError
from featstore.loaders import samplers as samplers_module
from featstore.loaders.shares import MemoryShares
from featstore.sampling.batches import SampledBatches

NODES, HOSTS = 160, 2


def write_parts(made: Path, pack: Any, *, edge_ids: bool) -> Path:
    """``whole``, ``split`` and ``types``: of two hosts, with whole topology, with split, and of types; the
    stores are ``s`` and ``t``."""
    features = np.arange(3 * NODES, dtype=np.float32).reshape(NODES, 3)
    edges = np.random.default_rng(1).integers(0, NODES, (2, 900))
    with pack(
        made / "s", features, graph=graph_of(NODES, 5, 3), order="ldg", partitions=8, edge_ids=edge_ids
    ) as store:
        for name, topology in (("whole", False), ("split", True)):
            split(store, HOSTS, made / name, split_topology=topology)
    types = {"a": features, "b": features[:, :2].copy()}
    graph = {("a", "r", "b"): edges, ("b", "s", "a"): edges}
    with pack(made / "t", types, graph=graph, order="given") as store:
        split(store, HOSTS, made / "types", split_topology=False)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Path:
    return write_parts(tmp_path_factory.mktemp("sampled-ahead"), pack, edge_ids=True)


def run(place: Path, plan: Any, monkeypatch: pytest.MonkeyPatch, ahead_from: int, **said: Any) -> Any:
    """(what mini-batches had, by host and epoch; how many of these epochs each host sampled: how far it has
    looked beyond the last one when it ends goes by the clock)."""
    counts, epochs = dict[int, int](), {epoch for epoch, _ in plan}
    plainly = SampledBatches.__getitem__

    def counted(self: Any, index: Any) -> Any:
        if index < len(self) and self.epoch in epochs:
            counts[id(self.drawn_by)] = counts.get(id(self.drawn_by), 0) + 1
        return plainly(self, index)

    def train(store: Any) -> list[list[Any]]:
        options: dict[str, Any] = {"rank": store.place.host, "world_size": HOSTS, "seed": 3, **said}
        seeds = options.pop("seeds", np.arange(NODES))
        with store.loader(seeds=seeds, fanouts=(3, 2), batch_size=8, memory="32MiB", **options) as loader:
            found = []
            for epoch, most in plan:
                loader.set_epoch(epoch)
                found.append([])
                for batch in loader:
                    found[-1].append(
                        [as_arrays(getattr(batch, name)) for name in ("n_id", "edge_index", "x")]
                    )
                    if len(found[-1]) == most:
                        break
            return found

    with monkeypatch.context() as patch:
        patch.setattr(SampledBatches, "__getitem__", counted)
        patch.setattr(samplers_module, "AHEAD_FROM", ahead_from)
        with hosts(place, HOSTS, memory="24MiB") as (stores, _):
            made = each(stores, train)
    for one in made:
        assert not isinstance(one, Exception), one
    return made, sorted(counts.values())


def as_arrays(value: Any) -> Any:
    return {k: np.array(v) for k, v in value.items()} if isinstance(value, dict) else np.array(value)


PLANS = [[(0, 99), (1, 99), (2, 99)], [(0, 3), (1, 99), (0, 99), (0, 5), (4, 99)]]


@pytest.mark.parametrize("plan", PLANS, ids=["all", "some"])
@pytest.mark.parametrize("kind", ["whole", "split", "types", "disjoint"])
def test_they_are_the_same_and_sampled_once(
    folder: Path, kind: str, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one epoch to the next, after an epoch that was left, and one that comes again."""
    said: dict[str, Any] = {"halo": "256KiB"}
    said |= {"seeds": ("b", np.arange(NODES))} if kind == "types" else {}
    said |= {"disjoint": True} if kind == "disjoint" else {}
    place = folder / ("whole" if kind == "disjoint" else kind)
    kept, few = run(place, plan, monkeypatch, 1 << 20, **said)
    again, many = run(place, plan, monkeypatch, 1 << 40, **said)
    del said["halo"]
    plain, _ = run(place, plan, monkeypatch, 1 << 40, **said)
    for one, two, three in zip(kept, again, plain, strict=True):
        np.testing.assert_equal(one, two)
        np.testing.assert_equal(one, three)
    if plan is PLANS[0]:  # once but those that were trained on before they were looked at, as the first ones
        trained = sum(len(epoch) for host in kept for epoch in host)
        assert 0.8 * trained <= sum(many) - sum(few) <= trained, (few, many)


@pytest.mark.parametrize("kind", ["whole", "split"])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_mini_batch_that_fails_does_so_at_its_turn(
    folder: Path, kind: str, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before it are handed out, and an epoch is whole in which it is not."""
    plainly, bad = SampledBatches.__getitem__, (1, 4)

    def failing(self: Any, index: Any) -> Any:
        if (self.epoch, index) == bad:
            raise BudgetError(2, 1, "sample this one")
        return plainly(self, index)

    def train(store: Any) -> list[int]:
        options: dict[str, Any] = {"rank": store.place.host, "world_size": HOSTS, "memory": "32MiB"}
        found = []
        with store.loader(
            seeds=np.arange(NODES), fanouts=(3, 2), batch_size=8, halo="256KiB", **options
        ) as loader:
            for epoch in (0, 1, 2):
                loader.set_epoch(epoch)
                found.append(0)
                try:
                    for _ in loader:
                        found[-1] += 1
                except BudgetError as error:
                    assert epoch == bad[0]
                    assert "sample this one" in str(error)
        return found

    monkeypatch.setattr(SampledBatches, "__getitem__", failing)
    monkeypatch.setattr(samplers_module, "AHEAD_FROM", 1 << (20 if keeps else 40))
    with hosts(folder / kind, HOSTS, memory="24MiB") as (stores, _):
        whole = NODES // 8 // HOSTS
        assert each(stores, train) == [[whole, bad[1], whole]] * HOSTS


def test_a_loader_that_failed_on_one_host_is_made_again(folder: Path) -> None:
    """There alone: hosts count those that were made."""

    def train(store: Any) -> Any:
        options: dict[str, Any] = {"rank": store.place.host, "world_size": HOSTS, "memory": "32MiB"}
        options |= {"seeds": np.arange(NODES), "fanouts": (3, 2), "batch_size": 8}
        if store.place.host == 1:
            with pytest.raises(FeatstoreError, match="nothing"):
                store.loader(warm="nothing", **options)
        with store.loader(**options) as loader:
            for _ in range(20):
                for batch in loader:
                    del batch
                time.sleep(0.01)

    with hosts(folder / "whole", HOSTS, memory="24MiB") as (stores, _):
        for found in each(stores, train):
            assert found is None, found


def test_closing_does_not_wait_for_what_was_to_be_looked_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 mini-batches, before the first is handed out."""
    plainly, sampled = SampledBatches.__getitem__, []

    def slowly(self: Any, index: Any) -> Any:
        time.sleep(0.05)
        sampled.append(index)
        return plainly(self, index)

    monkeypatch.setattr(SampledBatches, "__getitem__", slowly)

    def train(store: Any) -> Any:
        options: dict[str, Any] = {"rank": store.place.host, "world_size": HOSTS, "memory": "32MiB"}
        loader = store.loader(seeds=np.arange(NODES), fanouts=(3,), batch_size=2, halo="256KiB", **options)
        with loader, ThreadPoolExecutor(1) as pool:
            begun = pool.submit(lambda: next(iter(loader)))
            while len(sampled) < 3 * HOSTS:
                time.sleep(0.01)
            loader.close()
            return begun.exception()

    with hosts(folder / "whole", HOSTS, memory="24MiB") as (stores, _):
        for error in each(stores, train):
            assert isinstance(error, ClosedError), error
    assert len(sampled) < 40 * HOSTS


def test_what_has_no_room_is_sampled_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory for some of those that are ahead, as many are kept."""
    said = {"halo": "256KiB"}
    some, counts = run(folder / "whole", PLANS[0], monkeypatch, (32 << 20) - (15 << 20), **said)
    plain, _ = run(folder / "whole", PLANS[0], monkeypatch, 1 << 40)
    np.testing.assert_equal(some, plain)
    monkeypatch.setattr("featstore.loaders.online.lookahead._OBJECT_BYTES", 1 << 16)
    few, more = run(folder / "whole", PLANS[0], monkeypatch, (32 << 20) - (15 << 20), **said)
    np.testing.assert_equal(few, plain)
    assert sum(counts) < sum(more)


@pytest.mark.parametrize("batches", [[], [np.arange(5)]], ids=["none", "too few"])
def test_an_epoch_without_mini_batches_ends(folder: Path, batches: list[Any]) -> None:
    """An empty list: there is nothing to look ahead at. One that ``drop_last`` leaves empty is refused."""

    def train(store: Any) -> list[int]:
        options: dict[str, Any] = {"rank": store.place.host, "world_size": HOSTS, "drop_last": True}
        with store.loader(batches, memory="16MiB", halo="256KiB", **options) as loader:
            return [len(list(loader)) for _ in range(3)]

    with hosts(folder / "whole", HOSTS, memory="24MiB") as (stores, _):
        made = each(stores, train)
    assert (
        made == [[0, 0, 0]] * HOSTS
        if not batches
        else all("leaves no mini-batch" in str(one) for one in made)
    )


@given(
    memory=st.integers(1 << 20, 1 << 34), needed=st.integers(1, 1 << 35),
    beyond=st.integers(1 << 20, 1 << 33),
)  # fmt: skip
def test_what_rows_need_is_said_of_all_of_the_memory(memory: int, needed: int, beyond: int) -> None:
    """What an error names is the least that leaves so much for the rows, beside what is kept ahead; that has
    nothing of what rows need."""
    shares = MemoryShares(memory, ahead_from_bytes=beyond)
    assert shares.ahead_bytes == max(0, memory - beyond) // 8
    assert shares.rows_bytes >= min(memory, beyond)
    if needed <= shares.rows_bytes:
        return
    with pytest.raises(BudgetError) as told, shares.told_of_all():
        raise BudgetError(needed, shares.rows_bytes, "test")
    least = told.value.needed_bytes
    assert MemoryShares(least, ahead_from_bytes=beyond).rows_bytes >= needed
    assert MemoryShares(least - 2, ahead_from_bytes=beyond).rows_bytes < needed


def test_the_budget_of_a_store_is_not_taken_for_that_of_a_loader() -> None:
    shares = MemoryShares(1 << 30, graph_bytes=1 << 30)
    for given_bytes in (shares.sampler_bytes, shares.rows_bytes, 5):
        with pytest.raises(BudgetError) as told, shares.told_of_all():
            raise BudgetError(1 << 32, given_bytes, f"look at a list {OF_STORE}")
        assert (told.value.needed_bytes, told.value.given_bytes) == (1 << 32, given_bytes)
