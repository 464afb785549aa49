"""One training loop under every mode: whatever the mode, the rows are the source's, an epoch has every seed
once, and an interrupted one goes on with the same mini-batches."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore import PartitionOrder
from featstore.errors import ArgumentError, BudgetError, ClosedError, SourceError
from featstore.loaders.batch import Batch
from featstore.loaders.options import MODES
from featstore.loaders.said import SAMPLED_BY
from featstore.sampling.neighbors import NeighborSampler

NODES, WIDTH, BATCH = 3000, 9, 130
TRAIN = np.arange(1, NODES, 5)
STEPS = -(-len(TRAIN) // BATCH)
FEATURES = np.random.default_rng(0).standard_normal((NODES, WIDTH)).astype(np.float32)
SAMPLED = {"seeds": TRAIN, "fanouts": (4, 3), "batch_size": BATCH, "memory": "64MiB"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Path:
    path = tmp_path_factory.mktemp("made") / "s"
    edges = np.random.default_rng(1).integers(0, NODES, (2, 25_000))
    pack(path, FEATURES, graph=edges, order="ldg", partitions=12, arrays={"train": TRAIN}).close()
    return path


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Iterator[Any]:
    with featstore.open(shutil.copytree(made, tmp_path / "s", symlinks=True)) as opened:
        yield opened


def epoch_of(loader: Any) -> list[Batch]:
    return list(loader)


def check(batches: list[Batch], seeds: np.ndarray = TRAIN) -> None:
    """An epoch of the store's own sampling."""
    for index, batch in enumerate(batches):
        assert batch.index == index
        np.testing.assert_array_equal(np.asarray(batch.x), FEATURES[batch.n_id])
        assert batch.batch_size == batch.num_sampled_nodes[0]
        assert sum(batch.num_sampled_nodes) == len(batch.n_id)
        row, col = batch.edge_index
        assert len(row) == sum(batch.num_sampled_edges)
        np.testing.assert_array_equal(row, batch.row)
        np.testing.assert_array_equal(col, batch.col)
        assert max(row.max(), col.max()) < len(batch.n_id)
    seen = np.concatenate([batch.n_id[: batch.batch_size] for batch in batches])
    np.testing.assert_array_equal(np.sort(seen), seeds)


def drawn(batch: Batch) -> tuple[Any, ...]:
    return batch.n_id.tolist(), batch.row.tolist(), batch.col.tolist(), np.asarray(batch.x).sum()


@pytest.mark.parametrize("mode", [*MODES, "auto"])
def test_rows_are_the_source_s(store: Any, mode: str) -> None:
    with store.loader(mode=mode, **SAMPLED) as loader:
        epochs = [epoch_of(loader) for _ in range(3)]
        for epoch in epochs:
            check(epoch)
        assert loader.epoch == 3
        report = loader.report()
        assert report.batches == sum(map(len, epochs))
        assert report.bytes_read > 0
        assert report.seconds["train"] > 0
        assert 0 <= report.hit_rate <= 1
        assert report.to_dict()["slowest"] == report.slowest
        orders = [[batch.n_id[0] for batch in epoch] for epoch in epochs]
        repeated = loader.mode == "compiled"
        assert (orders[0] == orders[1] == orders[2]) == repeated, "fresh, but where one epoch is repeated"


def test_modes_that_leave_mini_batches_as_they_are_agree(store: Any) -> None:
    """Online and rolling give the same mini-batches in every epoch; compiled those of epoch 0."""
    found = {}
    for mode in ("online", "compiled", "rolling"):
        with store.loader(mode=mode, **SAMPLED) as loader:
            found[mode] = [[drawn(batch) for batch in loader] for _ in range(2)]
    assert found["online"] == found["rolling"]
    assert found["compiled"] == [found["online"][0]] * 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stop", [0, 1, STEPS - 1])
def test_it_goes_on_where_it_was(store: Any, mode: str, stop: int) -> None:
    with store.loader(mode=mode, **SAMPLED) as loader:
        expected = [[drawn(batch) for batch in loader] for _ in range(3)]
    with store.loader(mode=mode, **SAMPLED) as loader:
        assert [drawn(batch) for batch in loader] == expected[0]
        taken = [drawn(batch) for batch in islice(iter(loader), stop)]
        assert taken == expected[1][:stop]
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        assert (state["epoch"], state["next"]) == (1, stop)
    with store.loader(mode=mode, **SAMPLED) as loader:
        loader.load_state_dict(state)
        assert loader.epoch == 1
        assert [drawn(batch) for batch in loader] == expected[1][stop:]
        assert [drawn(batch) for batch in loader] == expected[2]


@pytest.mark.parametrize("mode", MODES)
def test_breaking_off_begins_the_next_epoch(store: Any, mode: str) -> None:
    with store.loader(mode=mode, **SAMPLED) as loader:
        expected = [[drawn(batch) for batch in loader] for _ in range(2)]
    with store.loader(mode=mode, **SAMPLED) as loader:
        for batch in loader:
            assert drawn(batch) == expected[0][0]
            break
        assert [drawn(batch) for batch in loader] == expected[1]
        assert loader.epoch == 2


@pytest.mark.parametrize("mode", MODES)
def test_an_epoch_can_be_set(store: Any, mode: str) -> None:
    with store.loader(mode=mode, **SAMPLED) as loader:
        expected = [[drawn(batch) for batch in loader] for _ in range(3)]
    with store.loader(mode=mode, **SAMPLED) as loader:
        loader.set_epoch(2)
        assert [drawn(batch) for batch in loader] == expected[2]


class Epochs:
    """Mini-batches of a user's, which hear of the epoch."""

    def __init__(self, make: Callable[[int, int], Any]) -> None:
        self._make, self.epoch = make, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        return (self._make(self.epoch, index) for index in range(4))


def ids_of(epoch: int, index: int) -> np.ndarray:
    return np.random.default_rng([epoch, index]).integers(0, NODES, 50)


@pytest.mark.parametrize("mode", ["online", "compiled", "rolling"])
def test_a_user_s_mini_batches(store: Any, mode: str) -> None:
    """Ids alone; ids and fields; a mapping; with ``nodes=``. Duplicates are fine."""
    kinds: dict[str, Callable[[int, int], Any]] = {
        "ids": ids_of,
        "pairs": lambda e, k: (ids_of(e, k), {"label": np.array([e, k]), "batch_size": 7}),
        "mapping": lambda e, k: {"n_id": ids_of(e, k), "label": np.array([e, k]), "batch_size": 7},
    }
    for number, (kind, make) in enumerate(kinds.items()):
        name = {} if mode == "online" else {"name": f"kind{number}"}
        with store.loader(Epochs(make), mode=mode, memory="64MiB", **name) as loader:
            for epoch in range(2):
                for index, batch in enumerate(loader):
                    of = 0 if mode == "compiled" else epoch
                    np.testing.assert_array_equal(batch.n_id, ids_of(of, index))
                    np.testing.assert_array_equal(batch.x, FEATURES[batch.n_id])
                    if kind != "ids":
                        assert batch.label.tolist() == [of, index]
                        assert batch.batch_size == 7
                assert index == 3
    picked = {"nodes": lambda made: made["mine"], "memory": "64MiB"}
    with store.loader(Epochs(lambda e, k: {"mine": ids_of(e, k)}), mode=mode, **picked) as loader:
        for batch in loader:
            np.testing.assert_array_equal(batch.x, FEATURES[batch.n_id])


@pytest.mark.parametrize("mode", ["online", "compiled", "rolling"])
def test_pyg_mini_batches(store: Any, mode: str) -> None:
    torch = pytest.importorskip("torch")
    loader_module = pytest.importorskip("torch_geometric.loader")
    from torch_geometric.data import Data

    from featstore.adapters.pyg import FeatstoreSampler

    graph = Data(edge_index=torch.from_numpy(np.random.default_rng(1).integers(0, NODES, (2, 25_000))))
    graph.num_nodes = NODES
    sampler = NeighborSampler(*store.graphs["features"].csc(), (4, 3))
    neighbours = loader_module.NodeLoader(
        graph, node_sampler=FeatstoreSampler(sampler), input_nodes=TRAIN,
        batch_size=BATCH,
    )  # fmt: skip
    with store.loader(neighbours, mode=mode, memory="64MiB") as loader:
        count = 0
        for batch in loader:
            data = batch.pyg()
            assert data is batch.sample
            assert torch.equal(data.x, torch.from_numpy(FEATURES)[data.n_id])
            assert torch.equal(batch.x, data.x)
            assert torch.equal(batch.edge_index, data.edge_index)
            assert batch.batch_size == data.batch_size
            count += 1
        assert count == STEPS


def test_pyg_s_object_of_our_own_sampling(store: Any) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch_geometric")
    for mode in MODES:
        with store.loader(mode=mode, tensors=True, **SAMPLED) as loader:
            batch = next(iter(loader))
            data = batch.pyg()
            assert torch.equal(data.x, torch.from_numpy(FEATURES)[data.n_id])
            assert torch.equal(data.edge_index, torch.as_tensor(batch.edge_index))
            assert data.batch_size == batch.batch_size
            assert sum(data.num_sampled_nodes) == len(data.n_id)


@pytest.mark.parametrize("mode", MODES)
def test_tensors_on_a_device(store: Any, mode: str) -> None:
    """The CPU is one, too; what is in the mini-batches is the same."""
    torch = pytest.importorskip("torch")
    with store.loader(mode=mode, **SAMPLED) as loader:
        expected = [drawn(batch) for batch in loader]
    name = {} if mode in ("online", "partitions") else {"name": "other"}
    with store.loader(mode=mode, device="cpu", **SAMPLED, **name) as loader:
        for batch, wanted in zip(loader, expected, strict=True):
            assert isinstance(batch.x, torch.Tensor)
            assert isinstance(batch.edge_index, torch.Tensor)
            assert drawn(batch) == wanted


@pytest.mark.parametrize("world", [3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_ranks_share_each_epoch(store: Any, mode: str, drop_last: bool, world: int) -> None:
    """Equal steps; together every seed once, but for those that the report counts."""
    train = TRAIN[:-1]  # which come out even neither over ranks nor over mini-batches
    options = SAMPLED | {"mode": mode, "batch_size": 39, "drop_last": drop_last, "world_size": world}
    options["seeds"] = train
    if mode == "partitions":
        options |= {"batch_size": 10, "resident": 4}
    loaders = [store.loader(rank=rank, **options) for rank in range(world)]
    for _ in range(2):
        epochs = [epoch_of(loader) for loader in loaders]
        assert len({tuple(b.batch_size for b in epoch) for epoch in epochs}) == 1
        seen = np.concatenate([batch.n_id[: batch.batch_size] for epoch in epochs for batch in epoch])
        for epoch in epochs:
            for batch in epoch:
                np.testing.assert_array_equal(batch.x, FEATURES[batch.n_id])
        report = loaders[0].report()
        assert len(seen) == len(train) + report.padded - report.dropped
        assert len(np.unique(seen)) == len(train) - report.dropped
        times = 3 if mode == "partitions" else 1  # that an epoch's seeds are divided
        assert report.padded < world * times
        assert report.dropped < options["batch_size"] * world * times
        assert not (report.padded if drop_last else report.dropped)
        assert (report.dropped if drop_last else report.padded) or mode == "partitions"
    for loader in loaders:
        loader.close()


def test_ranks_of_the_environment(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with (
        store.loader(mode="online", **SAMPLED) as told,
        store.loader(mode="online", rank=1, world_size=3, **SAMPLED) as said,
    ):
        assert [drawn(a) for a in told] == [drawn(b) for b in said]


def test_names_that_a_mini_batch_lacks(store: Any) -> None:
    with store.loader(mode="online", **SAMPLED) as loader:
        batch = next(iter(loader))
        with pytest.raises(AttributeError, match="no 'edge_attr'"):
            _ = batch.edge_attr
        with pytest.raises(AttributeError, match="in the sampler's own order"):
            _ = batch.e_id
        batch.mine = 3
        assert batch.mine == 3
        copied = pickle.loads(pickle.dumps(batch))
        assert drawn(copied) == drawn(batch)


def test_what_is_refused(store: Any) -> None:
    arrays = [np.arange(5)]
    for options, says in (
        ({}, "give batches, or seeds="),
        ({"seeds": TRAIN}, "seeds= and fanouts="),
        ({"batches": arrays, "seeds": TRAIN}, "not both"),
        ({"batches": arrays, "fanouts": (3,)}, "not both"),
        ({"batches": arrays, "mode": "partitions"}, "give seeds= and fanouts= instead"),
        ({"batches": arrays, "mode": "compile"}, "mode"),
        ({"batches": arrays, "recorded_epochs": 2}, "recorded_epochs= is of mode 'compiled', not of 'auto'"),
        ({"batches": arrays, "name": "mine"}, "name= is of what is laid out on disk"),
        ({"batches": arrays, "reuse": True}, "reuse= is of mode 'compiled', not of 'auto'"),
        ({"batches": arrays, "mode": "online", "disk": "2x"}, "disk= is of mode"),
        ({"batches": arrays, "mode": "compiled", "policy": "lru"}, "policy= is of mode 'online'"),
        ({**SAMPLED, "mode": "partitions", "device_memory": "1MiB"}, "say on which, with device="),
        ({**SAMPLED, "mode": "rolling", "reuse": True}, "reuse= is of mode"),
        ({**SAMPLED, "bach_size": 3}, "bach_size"),
        ({**SAMPLED, "batch_size": 0}, "batch_size"),
        ({**SAMPLED, "world_size": 2}, "which this is, rank="),
        ({**SAMPLED, "world_size": 2, "rank": 2}, "rank"),
        ({**SAMPLED, "mode": "partitions", "rank": 0, "world_size": 2, "passes": "auto"}, "own clock"),
        ({**SAMPLED, "batch_size": 500, "drop_last": True, "rank": 0, "world_size": 2}, "no mini-batch"),
    ):
        with pytest.raises(ArgumentError, match=says):
            store.loader(**options)
    with pytest.raises(SourceError, match="only once"):
        store.loader(iter(arrays), memory="64MiB")
    for mode in MODES:
        with (
            pytest.raises(BudgetError),
            store.loader(**SAMPLED | {"mode": mode, "memory": "10KiB"}) as loader,
        ):
            next(iter(loader))


@pytest.mark.parametrize("mode", MODES)
def test_states_have_one_shape(store: Any, mode: str) -> None:
    """The loader's, the mode's within it, and that of an order of training nodes."""
    shape = ["version", "of", "epoch", "next", "at"]
    order = PartitionOrder(store, TRAIN, batch_size=BATCH)
    with store.loader(mode=mode, **SAMPLED) as loader:
        assert loader.state_dict()["at"]["in_mode"] is None, "an epoch begins as it does"
        next(iter(loader))
        state = loader.state_dict()
        assert list(state) == list(state["at"]["in_mode"]) == list(order.state_dict()) == shape
        assert json.loads(json.dumps(state)) == state
        samples = state["of"].pop(SAMPLED_BY)
        assert len(samples) == 16
        assert state["of"] == {"store": store.uuid, "mode": mode}


@pytest.mark.parametrize("mode", MODES)
def test_states_that_do_not_fit_and_closing(store: Any, mode: str) -> None:
    loader = store.loader(mode=mode, **SAMPLED)
    other = next(name for name in MODES if name != mode)
    begun = iter(loader)
    next(begun)
    state = loader.state_dict()
    begun.close()
    of, at = state["of"], state["at"]
    for wrong in (
        {"of": of | {"store": "other"}}, {"of": of | {"mode": other}}, {"of": of | {"more": 1}}, {"of": None},
        {"at": None}, {"at": at | {"more": 1}}, {"at": at | {"in_mode": None}}, {"at": at | {"over": -1}},
        {"next": -1}, {"epoch": "1"}, {"version": 2},
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match="state"):
            loader.load_state_dict(state | wrong)
    loader.close()
    loader.close()
    for use in (lambda: next(iter(loader)), loader.state_dict, lambda: loader.set_epoch(1)):
        with pytest.raises(ClosedError):
            use()


def test_seeds_by_the_name_of_an_array_and_as_a_mask(store: Any) -> None:
    mask = np.zeros(NODES, bool)
    mask[TRAIN] = True
    for mode in ("online", "partitions"):
        for seeds in ("train", mask):
            with store.loader(mode=mode, **SAMPLED | {"seeds": seeds}) as loader:
                check(epoch_of(loader))


@pytest.mark.parametrize("mode", ["online", "compiled", "rolling"])
def test_seeds_come_in_the_order_given(store: Any, mode: str) -> None:
    """In every epoch, of one rank or of two together."""
    given = np.random.default_rng(2).permutation(TRAIN)
    options = SAMPLED | {"seeds": given, "seeds_in_order": True, "mode": mode}
    with store.loader(**options) as loader:
        for _ in range(2):
            seen = [batch.n_id[: batch.batch_size] for batch in epoch_of(loader)]
            np.testing.assert_array_equal(np.concatenate(seen), given)
    seen = []
    for rank in range(2):
        with store.loader(**options, rank=rank, world_size=2) as loader:
            seen.append(np.concatenate([batch.n_id[: batch.batch_size] for batch in epoch_of(loader)]))
    np.testing.assert_array_equal(np.stack(seen, 1).reshape(-1)[: len(given)], given)


def test_a_state_of_another_order_of_seeds_does_not_fit(store: Any) -> None:
    with store.loader(mode="online", **SAMPLED) as loader:
        state = loader.state_dict()
    with store.loader(mode="online", **SAMPLED, seeds_in_order=True) as loader:
        with pytest.raises(ArgumentError):
            loader.load_state_dict(state)
        own = loader.state_dict()
        loader.load_state_dict(own)
    with store.loader(mode="online", **SAMPLED) as loader, pytest.raises(ArgumentError):
        loader.load_state_dict(own)


def test_partitions_have_no_order_of_seeds(store: Any) -> None:
    with pytest.raises(ArgumentError, match="seeds_in_order= is not of mode 'partitions'"):
        store.loader(mode="partitions", **SAMPLED, seeds_in_order=True)


def test_a_compiled_one_is_used_again(store: Any) -> None:
    with store.loader(mode="compiled", name="mine", **SAMPLED) as loader:
        expected = [drawn(batch) for batch in loader]
    before = (store.path / "packs" / "mine" / "featstore.json").stat().st_ino
    with store.loader(mode="compiled", name="mine", reuse=True, **SAMPLED) as loader:
        assert [drawn(batch) for batch in loader] == expected
    assert (store.path / "packs" / "mine" / "featstore.json").stat().st_ino == before


@pytest.mark.parametrize("mode", MODES)
def test_epochs_set_by_a_training_loop(store: Any, mode: str) -> None:
    """As with samplers of torch, each epoch is said; one that was broken off, or is past, may be said too."""
    with store.loader(mode=mode, **SAMPLED) as loader:
        expected = [[drawn(batch) for batch in loader] for _ in range(3)]
    with store.loader(mode=mode, **SAMPLED) as loader:
        for epoch in (0, 1, 2, 0):
            loader.set_epoch(epoch)
            assert [drawn(batch) for batch in loader] == expected[epoch]
        loader.set_epoch(1)
        held = iter(loader)
        assert drawn(next(held)) == expected[1][0]
        loader.set_epoch(1)
        assert [drawn(batch) for batch in loader] == expected[1]


@pytest.mark.parametrize("mode", ["auto", "online"])
def test_who_shuffles_seeds_is_told_that_they_are(store: Any, mode: str) -> None:
    with pytest.raises(ArgumentError, match=r"every epoch; seeds_in_order=True leaves them"):
        store.loader(seeds=np.arange(4), fanouts=(2,), shuffle=True, mode=mode)
