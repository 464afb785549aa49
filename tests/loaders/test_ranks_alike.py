"""What ranks with loaders of their own have alike, and by what number the loop knows its mini-batches."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import ArgumentError, FeatstoreWarning
from featstore.loaders.online.epoch import OnlineEpoch
from featstore.sampling.batches import RankedBatches, open_sampler

NODES = 500


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Path:
    rng = np.random.default_rng(0)
    made, links = tmp_path_factory.mktemp("made") / "s", rng.integers(0, NODES, (2, 59))
    graph = rng.integers(0, NODES, (2, 3000))
    pack(made, rng.random((NODES, 4), np.float32), graph=graph, arrays={"links": links}).close()
    return made


@pytest.fixture
def store(path: Path) -> Any:
    with featstore.open(path) as opened:
        yield opened


@pytest.mark.parametrize(("world", "steps", "dropped"), [(1, 5, 9), (2, 2, 19), (5, 1, 9)])
def test_links_left_over_after_whole_steps_are_dropped(
    store: Any, world: int, steps: int, dropped: int
) -> None:
    """Each link is in the mini-batch of one rank at most, and what is left out is told; as where they share a
    loader."""
    pyg = pytest.importorskip("featstore.adapters.pyg_links")
    given: dict[str, Any] = {"batch_size": 10, "drop_last": True, "memory": "32MiB"}
    seen, made = list[int](), list[Any]()
    for rank in range(world):
        with pyg.LinkNeighborLoader(store, [2], "links", rank=rank, world_size=world, **given) as loader:
            assert len(loader) == steps
            of_rank = [batch.input_id.tolist() for batch in loader]
            assert [len(ids) for ids in of_rank] == [10] * steps
            seen += [link for ids in of_rank for link in ids]
            made.append(of_rank)
            report = loader.loader.report()
            assert (report.padded, report.dropped) == (0, dropped)
    assert len(set(seen)) == len(seen) == 59 - dropped
    sampler = pyg.LinkSampler(open_sampler(store, [2], memory="32MiB"))
    shared = pyg.LinkBatches(
        sampler, store.arrays["links"], 10, drop_last=True, ranks=range(world), world_size=world
    )
    assert shared.dropped == dropped
    assert [shared[k]["input_id"].tolist() for k in range(len(shared))] == [
        made[k % world][k // world] for k in range(steps * world)
    ]


def test_fewer_mini_batches_than_ranks_are_told(store: Any) -> None:
    with pytest.raises(ArgumentError, match="drop_last= leaves no mini-batch: there are 2, fewer than the 3"):
        store.loader([np.arange(5)] * 2, rank=0, world_size=3, drop_last=True, memory="32MiB")


@pytest.mark.parametrize("kind", ["arrays", "data"])
def test_who_overtakes_keeps_its_number(store: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Whoever looks up more of a mini-batch by its number gets what belongs to it."""
    assemble = OnlineEpoch._assemble_next

    def youngest_first(self: OnlineEpoch, under_way: deque[Any]) -> bool:
        under_way.reverse()
        try:
            return assemble(self, under_way)
        finally:
            under_way.reverse()

    monkeypatch.setattr(OnlineEpoch, "_assemble_next", youngest_first)
    ids = [np.arange(k, k + 7) for k in range(0, 400, 9)]
    batches: list[Any] = ids
    if kind == "data":
        torch = pytest.importorskip("torch")
        data = pytest.importorskip("torch_geometric.data")
        batches = [data.Data(n_id=torch.from_numpy(one), num_nodes=7) for one in ids]
    with store.loader(batches, mode="online", overtake=True, memory="32MiB") as loader:
        for _ in range(2):
            found = [(batch.index, np.asarray(batch.n_id)) for batch in loader]
            assert sorted(index for index, _ in found) == list(range(len(ids)))
            assert all((n_id == ids[index]).all() for index, n_id in found)
            assert [index for index, _ in found] != list(range(len(ids))), "none has overtaken"
    with store.loader(batches, mode="online", memory="32MiB") as loader:
        assert [batch.index for batch in loader] == list(range(len(ids)))


def test_no_rank_takes_a_mode_by_its_own_clock(store: Any) -> None:
    given: dict[str, Any] = {"seeds": np.arange(NODES), "fanouts": (2,), "memory": "32MiB"}
    with pytest.warns(FeatstoreWarning, match="disk=, repeat= have no effect: mode='auto' is online here"):
        loader = store.loader(mode="auto", disk="3x", repeat=True, rank=1, world_size=2, **given)
    with loader:
        assert loader.mode == "online"
        assert "only where it is asked for" in loader.mode_because


def test_the_epoch_of_a_ranks_mini_batches_is_never_seen_half_made(store: Any) -> None:
    """Another thread may look while they are divided."""
    seen = []

    class Looked(RankedBatches):
        def _share(self, *given: Any) -> Any:
            if hasattr(self, "train"):
                seen.append((self.epoch, self.train.shape, self.steps))
            return super()._share(*given)

    with open_sampler(store, [2], memory="32MiB") as sampler:
        batches = Looked(sampler, np.arange(100), 10, ranks=(0, 1), world_size=2)
        batches.set_epoch(1)
    assert seen == [(0, (2, 50), 5)] * 2


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"device_policy": "lru"}, "device_policy= is of rows kept on a device"),
        ({"mode": "auto", "repeat": True}, "repeat= is of what is laid out on disk"),
        ({"mode": "auto", "epochs": 3}, "epochs= is of what is laid out on disk"),
        ({"mode": "auto", "train_seconds": 0.1}, "train_seconds= is of what is laid out on disk"),
    ],
)
def test_options_without_effect_are_refused(store: Any, given: dict[str, Any], told: str) -> None:
    sampled: dict[str, Any] = {"seeds": np.arange(NODES), "fanouts": (2,), "memory": "32MiB"}
    with pytest.raises(ArgumentError, match=told):
        store.loader(**{"mode": "online"} | sampled | given)


def test_a_seed_is_of_sampling_and_shuffling(store: Any, tmp_path: Path) -> None:
    batches = [np.arange(k, k + 9) for k in range(0, 90, 9)]
    compiled: dict[str, Any] = {"mode": "compiled", "memory": "32MiB", "name": "once", "residency": "fixed"}
    with store.loader(batches, **compiled) as loader:
        assert len(list(loader)) == 10
    with pytest.raises(ArgumentError, match="seed= is for sampling"):
        store.loader(reuse=True, seed=3, **compiled)
    with store.loader(reuse=True, seed=3, shuffle=True, **compiled) as loader:
        assert len(list(loader)) == 10


LEFT_OPEN = """
import sys, time
import numpy as np
import featstore

def batches(epoch):
    for k in range(400):
        time.sleep(0.2 if epoch else 0)
        yield np.arange(k, k + 5)

loader = featstore.open(sys.argv[1]).loader(batches, mode="rolling", name="open", memory="32MiB")
next(iter(loader))
print("over", flush=True)
"""


def test_a_program_ends_that_leaves_a_rolling_loader_open(path: Path) -> None:
    """Though its next epoch takes long to come."""
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN, str(path)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
