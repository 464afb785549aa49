"""Each epoch has neighbours of its own, whatever the loader and however the sampler is wrapped; and a resumed
one has the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.loaders.online.loader import OnlineLoader
from featstore.loaders.prefetch import epoch_of, pass_epoch
from featstore.loaders.rolling import RollingLoader
from featstore.sampling.batches import sample_batches
from featstore.sampling.neighbors import NeighborSampler

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # PyG's own, on import
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import Data
    from torch_geometric.loader import NodeLoader

    from featstore.adapters.pyg import FeatstoreSampler

NODES, DEGREE, SEEDS, PER_EPOCH = 2000, 20, 60, 3
INDPTR = np.arange(0, NODES * DEGREE + 1, DEGREE)
INDICES = np.random.default_rng(1).integers(0, NODES, NODES * DEGREE)
X = np.random.default_rng(2).standard_normal((NODES, 8)).astype(np.float32)
MEMORY = "64MiB"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[featstore.Store]:
    path = tmp_path_factory.mktemp("epochs") / "s"
    with featstore.pack(path, X, graph=(INDPTR, INDICES), topology=True, order="given") as made:
        yield made


OPENED: list[Any] = []


@pytest.fixture(autouse=True)
def close_samplers() -> Iterator[None]:
    """What a test opened is closed after it: later tests fork."""
    yield
    while OPENED:
        OPENED.pop().close()


class Recorder:
    """Notes the epochs that it was told."""

    def __init__(self, **parts: Any) -> None:
        self.epochs: list[int] = []
        self.__dict__.update(parts)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def own() -> NeighborSampler:
    return NeighborSampler(INDPTR, INDICES, [3, 3], seed=4)


def node_loader(sampler: Any, **options: Any) -> Any:
    data = Data(edge_index=torch.empty((2, 0), dtype=torch.long), num_nodes=NODES)
    return NodeLoader(
        data, FeatstoreSampler(sampler), input_nodes=torch.arange(SEEDS), batch_size=20, **options
    )


def in_memory(_: Any) -> Any:
    return node_loader(own())


def stored(store: featstore.Store) -> Any:
    sampler = store.sampler([3, 3], memory="16MiB", seed=4)
    OPENED.append(sampler)
    return node_loader(sampler)


def persistent_workers(_: Any) -> Any:
    return node_loader(
        own(),
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="fork",
        filter_per_worker=False,
        timeout=60,
    )


def by_function(_: Any) -> Any:
    loader = node_loader(own())
    return lambda _: loader


def sampled(_: Any) -> Any:
    return sample_batches(own(), np.arange(SEEDS), [3, 3], 20, seed=4)


def sampled_from_the_store(store: featstore.Store) -> Any:
    return sample_batches(store, np.arange(SEEDS), [3, 3], 20, seed=4)


def sampled_by_workers(_: Any) -> Any:
    return torch.utils.data.DataLoader(
        sampled(None), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=60
    )


def ids_of(batch: Any) -> list[int]:
    found = batch.n_id
    return [int(one) for one in (found.tolist() if hasattr(found, "tolist") else found)]


SAMPLERS = [
    in_memory,
    stored,
    persistent_workers,
    by_function,
    sampled,
    sampled_from_the_store,
    sampled_by_workers,
]


@pytest.mark.parametrize("make", SAMPLERS)
def test_online_epochs_differ_and_can_be_resumed(store: featstore.Store, make: Callable[[Any], Any]) -> None:
    with OnlineLoader(store, make(store), memory=MEMORY) as loader:
        epochs = [[ids_of(batch) for batch in loader] for _ in range(3)]
        assert [len(one) for one in epochs] == [PER_EPOCH] * 3
        for a, b in ((0, 1), (1, 2), (0, 2)):
            assert all(one != other for one, other in zip(epochs[a], epochs[b], strict=True))
        loader.set_epoch(1)
        for number, batch in enumerate(loader):
            assert ids_of(batch) == epochs[1][number]
            if number == 1:
                state = loader.state()
                break
        assert ids_of(next(iter(loader))) == epochs[2][0], "broken off: the next epoch begins"
    with OnlineLoader(store, make(store), memory=MEMORY) as again:
        again.load_state(state)
        assert [ids_of(batch) for batch in again] == epochs[1][2:]
        assert [ids_of(batch) for batch in again] == epochs[2]


@pytest.mark.parametrize("mode", ["compiled", "rolling"])
def test_all_modes_have_the_same_epochs(store: featstore.Store, mode: str) -> None:
    with OnlineLoader(store, in_memory(store), memory=MEMORY) as online:
        expected = [[ids_of(batch) for batch in online] for _ in range(4)]
    assert all(one != other for a, b in pairwise(expected) for one, other in zip(a, b, strict=True))
    if mode == "compiled":
        expected = expected[:1] * 4  # the first one, again and again
    with store.loader(in_memory(store), mode=mode, memory=MEMORY, name=mode) as loader:
        assert [[ids_of(batch) for batch in loader] for _ in range(3)] == expected[:3]
        under_way = iter(loader)
        assert ids_of(next(under_way)) == expected[3][0]
        state = loader.state_dict()
        assert [ids_of(batch) for batch in under_way] == expected[3][1:]
    options: Any = {"mode": mode, "memory": MEMORY, "name": mode if mode == "compiled" else "again"}
    with store.loader(in_memory(store), reuse=True if mode == "compiled" else None, **options) as loader:
        loader.load_state_dict(state)
        assert [ids_of(batch) for batch in loader] == expected[3][1:]


def test_rolling_episodes_are_told(store: featstore.Store) -> None:
    loader = in_memory(store)
    with RollingLoader(store, lambda _: loader, memory=MEMORY, name="rolled") as rolling:
        found = [ids_of(batch) for batch in islice(rolling, 2 * PER_EPOCH)]
    assert all(a != b for a, b in zip(found[:PER_EPOCH], found[PER_EPOCH:], strict=True))


def test_an_epoch_that_was_given_stays(store: featstore.Store) -> None:
    with sample_batches(own(), np.arange(SEEDS), [3, 3], 20, seed=4, epoch=5) as batches:
        expected = [batch.node.tolist() for batch in batches]
        with OnlineLoader(store, batches, memory=MEMORY) as loader:
            assert [[ids_of(batch) for batch in loader] for _ in range(2)] == [expected, expected]


def test_everything_is_told_once_and_the_outside_last() -> None:
    inner = Recorder()
    batch_sampler = Recorder(sampler=inner)
    loader = Recorder(node_sampler=inner, batch_sampler=batch_sampler, dataset=Recorder(dataset=Recorder()))
    outer = Recorder(loader=loader)
    loader.loader = outer  # goes round
    pass_epoch(outer, 7)
    told = [inner, batch_sampler, loader, loader.dataset, loader.dataset.dataset, outer]  # type: ignore[attr-defined]
    assert [one.epochs for one in told] == [[7]] * 6

    class Shifts:
        loader = Recorder()

        def set_epoch(self, epoch: int) -> None:
            self.loader.set_epoch(epoch + 100)

    shifts = Shifts()
    pass_epoch(shifts, 1)
    assert shifts.loader.epochs[-1] == 101

    class Collate(Recorder):
        def collate(self, items: Any) -> Any:
            return items

    collate = Collate()
    list(epoch_of(torch.utils.data.DataLoader(range(3), collate_fn=collate.collate), 2))  # type: ignore[arg-type]
    assert collate.epochs == [2]
