"""Ranks that would all train on the same are warned, once a process; those that evidently do not are left
alone."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import FeatstoreWarning
from featstore.loaders import ranks
from featstore.loaders.rolling import RollingLoader

ROWS = 400
BATCHES = [np.arange(20), np.arange(20, 40)]
WARNED = r"one of 2 ranks.*train\[rank::2\].*DistributedSampler.*memory= is that of one process"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[featstore.Store]:
    rng = np.random.default_rng(0)
    edges, x = rng.integers(0, ROWS, (2, 3000)), rng.standard_normal((ROWS, 8)).astype(np.float32)
    path = tmp_path_factory.mktemp("ranks") / "s"
    with featstore.pack(path, x, graph=edges, topology=True, order="ldg", partitions=4) as made:
        yield made


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun says, in a process that was not warned yet."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(ranks, "_said", False)


def online(store: featstore.Store, batches: Any = BATCHES) -> None:
    featstore.OnlineLoader(store, batches, memory="64MiB").close()


def rolling(store: featstore.Store, batches: Any = BATCHES) -> None:
    RollingLoader(store, batches, memory="64MiB").close()


def one_line(store: featstore.Store, batches: Any = BATCHES) -> None:
    featstore.train_loader(store, batches, memory="64MiB", name="line").close()


def one_line_fresh(store: featstore.Store, batches: Any = BATCHES) -> None:
    featstore.train_loader(store, batches, memory="64MiB", fresh=True, name="fresh").close()


def compiled(store: featstore.Store, **options: Any) -> None:
    with store.compiled("kept") as trace:
        trace.loader(**options).close()


@pytest.fixture(scope="module")
def kept(store: featstore.Store) -> None:
    with pytest.MonkeyPatch.context() as alone:
        alone.delenv("WORLD_SIZE", raising=False)
        options: Any = {"memory": "64MiB", "name": "kept", "residency": "fixed"}
        featstore.train_loader(store, BATCHES, **options).close()


@pytest.mark.parametrize("make", [online, rolling, one_line, one_line_fresh, compiled])
def test_each_loader_warns_once(store: featstore.Store, kept: None, make: Callable[..., None]) -> None:
    with pytest.warns(FeatstoreWarning, match=WARNED) as caught:
        make(store)
    assert len(caught) == 1
    assert caught[0].filename == inspect.getfile(test_each_loader_warns_once), "it points at the user's line"
    make(store)  # a second warning would be an error here
    online(store)


def test_one_process_alone_is_not_warned(store: featstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ("1", "", "two"):
        monkeypatch.setenv("WORLD_SIZE", size)
        online(store)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK")
    online(store)


def test_a_process_group_is_seen(store: featstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.warns(FeatstoreWarning, match=WARNED):
        online(store)


def distributed(**options: Any) -> Any:
    torch = pytest.importorskip("torch")
    sampler = torch.utils.data.DistributedSampler(range(ROWS), num_replicas=2, rank=1)
    return torch.utils.data.DataLoader(range(ROWS), sampler=sampler, batch_size=20, **options)


@pytest.mark.parametrize("make", [online, rolling, one_line, one_line_fresh])
def test_what_divides_itself_is_not_warned_of(store: featstore.Store, make: Callable[..., None]) -> None:
    loader = distributed()
    assert ranks.divides_itself(loader)
    make(store, loader)

    class Wrapper:
        def __init__(self, loader: Any) -> None:
            self.loader = loader

        def __iter__(self) -> Iterator[Any]:
            return iter(self.loader)

    make(store, Wrapper(loader))


def test_a_part_of_a_trace_is_not_warned_of(store: featstore.Store, kept: None) -> None:
    compiled(store, order=[1])


def test_a_sampler_of_all_is_warned_of(store: featstore.Store) -> None:
    torch = pytest.importorskip("torch")
    sampler = torch.utils.data.DistributedSampler(range(ROWS), num_replicas=1, rank=0)
    with pytest.warns(FeatstoreWarning, match=WARNED):
        online(store, torch.utils.data.DataLoader(range(ROWS), sampler=sampler))


def test_it_can_be_silenced_as_it_says(store: featstore.Store) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "this process is one of")
        online(store)


def test_a_warning_that_is_an_error_leaves_nothing_behind(store: featstore.Store) -> None:
    with pytest.raises(FeatstoreWarning):
        online(store)
    online(store)
