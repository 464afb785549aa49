"""Ranks whose mini-batches were given are told, once a process, that they share them; those that say so, or
whose mini-batches divide themselves, are left alone."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import FeatstoreWarning
from featstore.loaders import ranks
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.mega.sets import PartitionSets
from featstore.loaders.online.loader import OnlineLoader
from featstore.loaders.rolling import RollingLoader

ROWS = 400
BATCHES = [np.arange(20 * k, 20 * k + 20) for k in range(4)]
WARNED = r"one of 2 ranks.* one in 2 of the mini-batches.*world_size=1.*memory= is that of one process"
MODES = ["online", "compiled", "rolling"]  # that take mini-batches


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[featstore.Store]:
    rng = np.random.default_rng(0)
    edges, x = rng.integers(0, ROWS, (2, 3000)), rng.standard_normal((ROWS, 8)).astype(np.float32)
    path = tmp_path_factory.mktemp("ranks") / "s"
    with featstore.pack(path, x, graph=edges, topology=True, order="ldg", partitions=4) as made:
        yield made


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun says, in a process that was not told yet."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(ranks, "_said", False)


def ids_of(store: featstore.Store, batches: Any = BATCHES, **options: Any) -> list[list[int]]:
    """The ids of each mini-batch of an epoch. A warning that no test expects is an error."""
    with store.loader(batches, memory="64MiB", **options) as loader:
        return [np.asarray(batch.n_id).tolist() for batch in loader]


def expected(of: list[np.ndarray]) -> list[list[int]]:
    return [ids.tolist() for ids in of]


@pytest.mark.parametrize("mode", MODES)
def test_ranks_are_told_once_that_they_share(store: featstore.Store, mode: str) -> None:
    with pytest.warns(FeatstoreWarning, match=WARNED) as caught:
        loader = store.loader(BATCHES, mode=mode, memory="64MiB")
    assert len(caught) == 1
    assert caught[0].filename == inspect.getfile(test_ranks_are_told_once_that_they_share), (
        "it points at the user's line"
    )
    with loader:
        assert (loader.rank, loader.world_size) == (1, 2)
        assert [batch.n_id.tolist() for batch in loader] == expected(BATCHES[1::2])
    for other in MODES:  # a second warning would be an error here
        assert ids_of(store, mode=other) == expected(BATCHES[1::2])


@pytest.mark.parametrize("mode", MODES)
def test_who_says_so_is_not_told(store: featstore.Store, mode: str) -> None:
    assert ids_of(store, mode=mode, world_size=1) == expected(BATCHES), "each rank was given its own"
    assert ids_of(store, mode=mode, rank=1, world_size=2) == expected(BATCHES[1::2])
    assert ids_of(store, mode=mode, world_size=2) == expected(BATCHES[1::2]), "as the environment says"
    assert ids_of(store, mode=mode, rank=0, world_size=4) == expected(BATCHES[::4])


def test_a_rank_without_how_many_is_told(store: featstore.Store) -> None:
    with pytest.warns(FeatstoreWarning, match=WARNED):
        assert ids_of(store, rank=0) == expected(BATCHES[::2])


@pytest.mark.parametrize("mode", [*MODES, "partitions"])
def test_ranks_of_which_the_store_samples_are_not_told(store: featstore.Store, mode: str) -> None:
    store.loader(seeds=np.arange(40), fanouts=[2], mode=mode, memory="64MiB").close()


def test_one_process_alone_is_not_told(store: featstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ("1", "", "two"):
        monkeypatch.setenv("WORLD_SIZE", size)
        assert ids_of(store) == expected(BATCHES)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK")
    assert ids_of(store) == expected(BATCHES)


def test_a_process_group_is_seen(store: featstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    with pytest.warns(FeatstoreWarning, match=WARNED):
        assert ids_of(store) == expected(BATCHES[::2])


def distributed(**options: Any) -> Any:
    torch = pytest.importorskip("torch")
    sampler = torch.utils.data.DistributedSampler(range(ROWS), num_replicas=2, rank=1, shuffle=False)
    return torch.utils.data.DataLoader(range(ROWS), sampler=sampler, batch_size=20, **options)


@pytest.mark.parametrize("mode", MODES)
def test_what_divides_itself_is_left_as_it_is(store: featstore.Store, mode: str) -> None:
    loader = distributed()
    own = np.arange(1, ROWS, 2).reshape(-1, 20).tolist()
    assert ids_of(store, loader, mode=mode) == own

    class Wrapper:
        def __init__(self, loader: Any) -> None:
            self.loader = loader

        def __iter__(self) -> Iterator[Any]:
            return iter(self.loader)

    assert ids_of(store, Wrapper(loader), mode=mode) == own


def test_a_sampler_of_all_is_divided(store: featstore.Store) -> None:
    torch = pytest.importorskip("torch")
    sampler = torch.utils.data.DistributedSampler(range(ROWS), num_replicas=1, rank=0, shuffle=False)
    with pytest.warns(FeatstoreWarning, match=WARNED):
        found = ids_of(store, torch.utils.data.DataLoader(range(ROWS), sampler=sampler, batch_size=20))
    assert found == np.arange(ROWS).reshape(-1, 20)[1::2].tolist()


def test_the_loaders_inside_say_nothing(store: featstore.Store) -> None:
    """They go through what they are given."""
    OnlineLoader(store, BATCHES, memory="64MiB").close()
    RollingLoader(store, BATCHES, memory="64MiB").close()
    PartitionSets(store, memory="64MiB").close()
    ids_of(store, mode="compiled", name="kept", world_size=1)
    with store.compiled("kept") as trace:
        CompiledLoader(trace).close()


def test_it_can_be_silenced_as_it_says(store: featstore.Store) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "this process is one of")
        assert ids_of(store) == expected(BATCHES[1::2])


@pytest.mark.parametrize("mode", MODES)
def test_a_warning_that_is_an_error_leaves_nothing_behind(store: featstore.Store, mode: str) -> None:
    before = sorted(store.path.rglob("*"))
    with pytest.raises(FeatstoreWarning):
        ids_of(store, mode=mode, name=f"e-{mode}" if mode != "online" else None)
    assert sorted(store.path.rglob("*")) == before
    assert ids_of(store, mode=mode) == expected(BATCHES[1::2])
