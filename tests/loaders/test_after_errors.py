"""After what failed, or was refused, a loop goes on where it stood: no mini-batch is left out, or comes of
another epoch than its name says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import ArgumentError, DeviceError, IdError
from featstore.loaders.divided import GivenShare
from featstore.loaders.options import MODES
from featstore.sampling.batches import RankedBatches, SampledBatches, open_sampler
from featstore.sampling.link_batches import LinkBatches

NODES, BATCH = 400, 40
FEATURES = np.arange(3 * NODES, dtype=np.float32).reshape(NODES, 3)
SAMPLED = {"seeds": np.arange(NODES), "fanouts": (4, 3), "batch_size": BATCH, "memory": "32MiB"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Iterator[Any]:
    edges = np.random.default_rng(1).integers(0, NODES, (2, 3000))
    with pack(
        tmp_path_factory.mktemp("after-errors") / "s", FEATURES, graph=edges, order="ldg", partitions=12
    ) as made:
        yield made


def nodes_of(batches: Any) -> list[Any]:
    return [batch.n_id.tolist() for batch in batches]


def options_of(mode: str, name: str) -> dict[str, Any]:
    more = {"name": name} if mode in ("compiled", "rolling") else {}
    return {"mode": mode, **SAMPLED, **more}


# IdError is an IndexError, which Python takes for the end of a sequence.


def test_what_cannot_be_sampled_is_no_end(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of mini-batches around nodes, whoever goes through them; around links; and of a user's own sequence."""

    def third_fails(plainly: Any) -> Any:
        def failing(self: Any, index: Any) -> Any:
            if index == 2:
                raise IdError("there is no such node")
            return plainly(self, index)

        return failing

    class Own(Sequence[np.ndarray]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: Any) -> Any:
            return np.arange(3)

    for kind in (SampledBatches, LinkBatches, Own):
        monkeypatch.setattr(kind, "__getitem__", third_fails(kind.__getitem__))
    sampler = open_sampler(store, (4, 3), memory="32MiB", in_memory=True)
    with pytest.raises(IdError, match="no such node"):
        list(SampledBatches(sampler, np.arange(NODES), BATCH))
    for mode in ("online", "rolling", "compiled"):
        with pytest.raises(IdError, match="no such node"), store.loader(**options_of(mode, "ends")) as loader:
            list(loader)
    with pytest.raises(IdError, match="no such node"), store.loader(Own(), memory="32MiB") as loader:
        list(loader)


def test_of_links(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from featstore.sampling.links import LinkSampler

    def fails(*_: Any, **__: Any) -> Any:
        raise IdError("there is no such node")

    sampler = LinkSampler(open_sampler(store, (4, 3), memory="32MiB", in_memory=True))
    links = LinkBatches(sampler, np.arange(40).reshape(2, 20), 4)
    assert len(list(links)) == 5
    monkeypatch.setattr(LinkSampler, "sample", fails)
    with pytest.raises(IdError, match="no such node"):
        list(links)


# What failed comes again.


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("mode", ["online", "rolling"])
def test_an_epoch_that_failed(
    store: Any, mode: str, failing: int, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it began, it comes again; later, the next one does, or it again where that is asked for."""
    plainly, broken = RankedBatches.__getitem__, [(1, failing)]

    def once(self: Any, index: Any) -> Any:
        if (self.epoch, index) in broken:
            broken.remove((self.epoch, index))
            raise DeviceError(5, "/dev/x")
        return plainly(self, index)

    with store.loader(**options_of(mode, "plain")) as loader:
        expected = [nodes_of(loader) for _ in range(4)]
    monkeypatch.setattr(RankedBatches, "__getitem__", once)
    with store.loader(**options_of(mode, f"failed{failing}{told}")) as loader:
        assert nodes_of(loader) == expected[0]
        with pytest.raises(DeviceError):
            list(loader)
        assert not broken
        if told:
            loader.set_epoch(1)
        follows = 1 if told or loader.state_dict()["next"] == 0 else 2
        assert nodes_of(loader) == expected[follows]
        assert loader.epoch == follows + 1
        assert nodes_of(loader) == expected[follows + 1]


@pytest.mark.parametrize("mode", MODES)
def test_a_state_that_is_refused_changes_nothing(store: Any, mode: str) -> None:
    """Not before the first epoch, and not after one; what is asked for then comes."""
    with store.loader(**options_of(mode, "refused")) as loader:
        first, second, third, fourth = (nodes_of(loader) for _ in range(4))
        list(islice(iter(loader), 2))
        state = loader.state_dict()
        loader.set_epoch(0)
        with pytest.raises(ArgumentError):
            loader.load_state_dict(state | {"at": state["at"] | {"in_mode": {"epoch": 3}}})
        assert nodes_of(loader) == first
        with pytest.raises(ArgumentError):
            loader.load_state_dict(state | {"at": state["at"] | {"in_mode": {"epoch": 3}}})
        loader.set_epoch(1)
        assert nodes_of(loader) == second
        assert nodes_of(loader) == third
        assert nodes_of(loader) == fourth


@pytest.mark.parametrize("mode", ["online", "rolling"])
def test_an_epoch_whose_rest_was_gone_through_is_whole_again(store: Any, mode: str) -> None:
    """Also where it is the next one that is asked for, or a state of it is loaded."""
    with store.loader(rank=0, world_size=2, **options_of(mode, "two")) as loader:
        list(islice(iter(loader), 2))
        halves = loader.state_dict()
    with store.loader(**options_of(mode, "one")) as loader:
        whole = nodes_of(loader)
        loader.set_epoch(0)
        list(islice(iter(loader), 3))
        own = loader.state_dict()
        for after, follows in (("set", whole), ("state", whole[3:])):
            loader.load_state_dict(halves)
            assert len(list(loader)) == len(whole) - 4
            if after == "set":
                loader.set_epoch(0)
            else:
                loader.load_state_dict(own)
            assert nodes_of(loader) == follows
        loader.load_state_dict(halves)
        loader.load_state_dict(own)  # and at once
        assert nodes_of(loader) == whole[3:]


def test_mini_batches_that_divide_themselves_have_no_rest() -> None:
    """Which of them are over, of all ranks', nobody knows."""
    share = GivenShare([np.arange(3)] * 4, rank=1, divided=True)
    share.begin_at(2, 0)
    with pytest.raises(ArgumentError, match="divide themselves"):
        share.begin_at(2, 4)
    assert len(list(share.epoch(2))) == 4


def test_ranks_that_share_a_loader_save_no_cache(store: Any, tmp_path: Path) -> None:
    def make(rank: int) -> Any:
        own = featstore.open(store.path)
        return own.loader(rank=rank, world_size=2, mode="online", shared=str(tmp_path / "line"), **SAMPLED)

    with ThreadPoolExecutor(2) as pool:
        loaders = list(pool.map(make, range(2)))
        for loader in loaders:
            with pytest.raises(ArgumentError, match="share a loader"):
                loader.save_cache()
        list(pool.map(lambda loader: loader.close(), loaders))
