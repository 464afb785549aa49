"""Mode compiled with several recorded epochs, and in another order every epoch."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from featstore.errors import ArgumentError, ClosedError, CorruptionError

NODES, WIDTH, BATCH = 2000, 50, 70
TRAIN = np.arange(1, NODES, 5)
STEPS = -(-len(TRAIN) // BATCH)
FEATURES = np.random.default_rng(0).standard_normal((NODES, WIDTH)).astype(np.float32)
SAMPLED: dict[str, Any] = {
    "seeds": TRAIN, "fanouts": (4, 3), "batch_size": BATCH, "memory": "64MiB", "mode": "compiled",
}  # fmt: skip
RECORDED = 3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Iterator[Any]:
    edges = np.random.default_rng(1).integers(0, NODES, (2, 16_000))
    path = tmp_path_factory.mktemp("recorded") / "s"
    with pack(path, FEATURES, graph=edges, arrays={"train": TRAIN}) as made:
        yield made


def drawn(loader: Any) -> list[tuple[Any, ...]]:
    """What is left of an epoch; its rows are the source's, and its numbers follow each other."""
    found = []
    for batch in loader:
        np.testing.assert_array_equal(np.asarray(batch.x), FEATURES[batch.n_id])
        found.append((batch.n_id.tolist(), batch.row.tolist(), batch.col.tolist()))
    return found


@pytest.fixture(scope="module")
def fresh(store: Any) -> list[list[tuple[Any, ...]]]:
    """The epochs as they are sampled."""
    with store.loader(**SAMPLED | {"mode": "online"}) as loader:
        return [drawn(loader) for _ in range(RECORDED)]


def test_recorded_epochs_take_turns(store: Any, fresh: Any) -> None:
    """In little memory, too, where mini-batches are read one by one."""
    for residency, memory in (("min", "64MiB"), ("min", "14MiB"), ("fixed", "64MiB")):
        options = SAMPLED | {"residency": residency, "memory": memory}
        with store.loader(recorded_epochs=RECORDED, **options) as loader:
            for epoch in range(2 * RECORDED + 1):
                assert loader.epoch == epoch
                assert drawn(loader) == fresh[epoch % RECORDED]
            report = loader.report()
            assert report.recorded_epochs == RECORDED
            assert report.batches == (2 * RECORDED + 1) * STEPS
            for epoch in (7, 1, 1, 2, 0):
                loader.set_epoch(epoch)
                assert drawn(loader) == fresh[epoch % RECORDED]
            assert drawn(loader) == fresh[1]


def test_an_epoch_that_could_not_be_set_changes_nothing(
    store: Any, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one follows, and has its own mini-batches."""
    with store.loader(recorded_epochs=RECORDED, name="not-set", **SAMPLED) as loader:
        assert drawn(loader) == fresh[0]
        slots = type(loader._mode.loader._slots)

        def none(_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(slots, "load", none)
            with pytest.raises(KeyboardInterrupt):
                loader.set_epoch(RECORDED)
        assert drawn(loader) == fresh[1]
        assert drawn(loader) == fresh[2 % RECORDED]


@pytest.mark.parametrize("epoch", [0, 1, 2, 4, 5])
def test_it_goes_on_where_it_was(store: Any, fresh: Any, epoch: int) -> None:
    name = {"name": f"resumed{epoch}"}
    with store.loader(recorded_epochs=RECORDED, **name, **SAMPLED) as loader:
        loader.set_epoch(epoch)
        states = [loader.state_dict()]
        for _ in loader:
            states.append(loader.state_dict())
        states.append(loader.state_dict())
    with store.loader(recorded_epochs=RECORDED, reuse=True, **name, **SAMPLED) as loader:
        for done, state in enumerate(states):
            loader.load_state_dict(pickle.loads(pickle.dumps(state)))
            if done <= STEPS:
                assert drawn(loader) == fresh[epoch % RECORDED][done:]
            assert loader.epoch == epoch + 1
            assert drawn(loader) == fresh[(epoch + 1) % RECORDED]
        state = states[2]
        at, in_mode = state["at"], state["at"]["in_mode"]
        for wrong, says in (
            ({"of": in_mode["of"] | {"shuffle": "0"}}, "the state has shuffle = '0'"),
            ({"of": in_mode["of"] | {"trace": "another"}}, "the state has trace = 'another'"),
        ):
            with pytest.raises(ArgumentError, match=says):
                loader.load_state_dict(state | {"at": at | {"in_mode": in_mode | wrong}})
        with pytest.raises(ArgumentError, match="next of the state"):
            loader.load_state_dict(state | {"next": STEPS + 1})
        before = {name: value for name, value in in_mode["of"].items() if name != "epochs"}
        loader.load_state_dict(state | {"at": at | {"in_mode": in_mode | {"of": before}}})  # as they were
        assert drawn(loader) == fresh[epoch % RECORDED][2:]


def test_an_epoch_that_is_broken_off(store: Any, fresh: Any) -> None:
    with store.loader(recorded_epochs=RECORDED, **SAMPLED) as loader:
        for epoch in range(5):
            assert [b.n_id.tolist() for b in islice(loader, 3)] == [
                one[0] for one in fresh[epoch % RECORDED][:3]
            ]
        assert drawn(loader) == fresh[5 % RECORDED]
        loader.set_epoch(1)
        stale = iter(loader)
        next(stale)
        loader.set_epoch(2)
        with pytest.raises(ClosedError, match="state"):
            next(stale)
        assert drawn(loader) == fresh[2]
        stale, last = iter(loader), None
        for _ in range(STEPS):
            next(stale)
            last = loader.state_dict()
        loader.set_epoch(1)
        stale = iter(loader)
        next(stale)
        loader.load_state_dict(last)  # of which nothing is left
        with pytest.raises(ClosedError, match="state"):
            next(stale)
        assert drawn(loader) == []
        assert drawn(loader) == fresh[4 % RECORDED]


def test_a_read_that_fails_leaves_the_epochs_as_they_are(store: Any, fresh: Any) -> None:
    with store.loader(recorded_epochs=RECORDED, name="broken", **SAMPLED) as loader:
        pack = loader._mode.loader.compiled.pack
        path = pack.path / pack.tables["records"].entry.chunk_path(0)
        assert drawn(loader) == fresh[0]
        assert drawn(loader) == fresh[1]
        loader.set_epoch(1)
        whole = path.read_bytes()
        path.write_bytes(bytes(len(whole)))
        with pytest.raises(CorruptionError):
            drawn(loader)
        path.write_bytes(whole)
        begun = loader._next > 0  # then that epoch was broken off
        assert drawn(loader) == fresh[1 + begun]


class OfOtherLengths:
    """A user's mini-batches, of which every epoch has another number."""

    lengths = (3, 0, 5)

    def __call__(self, epoch: int) -> list[np.ndarray]:
        random = np.random.default_rng(epoch)
        return [random.integers(0, NODES, 40) for _ in range(self.lengths[epoch])]


def test_epochs_of_other_lengths(store: Any) -> None:
    made = OfOtherLengths()
    options = {"recorded_epochs": 3, "mode": "compiled", "memory": "64MiB", "name": "lengths"}
    with store.loader(made, **options) as loader:
        for epoch in range(7):
            found = [batch.n_id.tolist() for batch in loader]
            assert found == [ids.tolist() for ids in made(epoch % 3)]
        loader.set_epoch(5)
        walk = iter(loader)
        next(walk)
        state = loader.state_dict()
    with store.loader(made, reuse=True, **options) as loader:
        loader.load_state_dict(state)
        assert [b.n_id.tolist() for b in loader] == [ids.tolist() for ids in made(2)[1:]]
        assert [b.n_id.tolist() for b in loader] == [ids.tolist() for ids in made(0)]


@pytest.mark.parametrize("recorded", [1, 2])
def test_shuffled(store: Any, fresh: Any, recorded: int) -> None:
    """Every epoch has the mini-batches of a recorded one, in an order that epoch and seed tell."""
    options = SAMPLED | {
        "residency": "fixed", "shuffle": True, "recorded_epochs": recorded, "name": f"shuffled{recorded}",
    }  # fmt: skip
    with store.loader(**options) as loader:
        epochs = [drawn(loader) for _ in range(5)]
        loader.set_epoch(3)
        assert drawn(loader) == epochs[3]
        loader.set_epoch(2)
        assert len([*islice(loader, 2)]) == 2
        state = loader.state_dict()
    for number, epoch in enumerate(epochs):
        assert sorted(epoch) == sorted(fresh[number % recorded])
    assert len({str(epoch) for epoch in epochs}) == 5, "another order every epoch"
    with store.loader(reuse=True, **options) as loader:
        loader.load_state_dict(state)
        assert drawn(loader) == epochs[2][2:]
        assert drawn(loader) == epochs[3]
    with store.loader(**options | {"seed": -5, "name": "other"}) as loader:
        other = drawn(loader)
    assert sorted(str(one[0]) for one in other) != [str(one[0]) for one in other]
    with store.loader(**options | {"shuffle": False, "reuse": True}) as loader:
        assert drawn(loader) == fresh[0]
        with pytest.raises(ArgumentError, match="shuffle"):
            loader.load_state_dict(state)


def test_what_is_refused(store: Any) -> None:
    name = {"name": "refused"}
    for options, says in (
        ({"shuffle": True, **name}, "shuffle=True needs residency='fixed'"),
        ({"shuffle": True, "residency": "min", **name}, "shuffle=True needs residency='fixed'"),
        ({"recorded_epochs": 0, **name}, "recorded_epochs"),
        ({"mode": "online", "recorded_epochs": 2}, "recorded_epochs= is of mode 'compiled'"),
        ({"mode": "rolling", "shuffle": True}, "shuffle= is of mode 'compiled'"),
    ):
        with pytest.raises(ArgumentError, match=says):
            store.loader(**SAMPLED | options)
    assert not (Path(store.path) / "packs/refused").exists(), "before anything is recorded"
    store.loader(recorded_epochs=2, name="two", **SAMPLED).close()
    for said in ({"recorded_epochs": 3}, {}):
        with pytest.raises(ArgumentError, match=r"2 recorded epochs .* not recorded_epochs="):
            store.loader(name="two", reuse=True, **SAMPLED, **said)
    with pytest.raises(ArgumentError, match="needs residency='fixed'"):
        store.loader(recorded_epochs=2, name="two", reuse=True, shuffle=True, residency="fixed", **SAMPLED)


@pytest.mark.parametrize(
    "other",
    [{"fanouts": (4, 2)}, {"seeds": TRAIN + 1}, {"replace": True}, {"batch_size": BATCH - 1}],
    ids=["fanouts", "seeds", "option", "batch_size"],
)
def test_what_was_sampled_otherwise_is_not_taken(store: Any, other: dict[str, Any]) -> None:
    """Though there are as many mini-batches; what another number draws of the same is."""
    options = SAMPLED | {"name": "told"}
    with store.loader(**options) as loader:
        first = drawn(loader)
    with store.loader(reuse=True, **options | {"seed": 3, "memory": "48MiB"}) as loader:
        assert drawn(loader) == first
    with pytest.raises(ArgumentError, match=r"under the name 'told' that were sampled otherwise: .*fanouts"):
        store.loader(reuse=True, **options | other)
    for same in ({"seeds": "train"}, {"seeds": np.isin(np.arange(NODES), TRAIN)}, {"fanouts": [4, 3]}):
        with store.loader(reuse=True, **options | same) as loader:
            assert drawn(loader) == first
    with store.loader(mode="compiled", reuse=True, name="told", memory="48MiB") as loader:  # whatever it is
        assert drawn(loader) == first


@pytest.mark.parametrize("way", ["nodes", "seeds_in_order"])
def test_nor_what_was_recorded_in_another_way(store: Any, way: str) -> None:
    """Rows of other nodes would stand beside the edges; or seeds come in a fixed order."""
    options, said = SAMPLED | {"name": way}, {"nodes": lambda s: np.sort(s.node), "seeds_in_order": True}
    with store.loader(**options, **{way: said[way]}) as loader:
        first = [batch.n_id.tolist() for batch in loader]
    if way == "nodes":  # those that were recorded are found again
        with store.loader(reuse=True, **options) as loader:
            assert [batch.n_id.tolist() for batch in loader] == first
    else:
        with pytest.raises(ArgumentError, match="sampled otherwise"):
            store.loader(reuse=True, **options)
    with store.loader(reuse=True, **options, **{way: said[way]}) as loader:
        assert [batch.n_id.tolist() for batch in loader] == first
    store.loader(**options | {"name": f"no {way}".replace(" ", "-")}).close()
    with pytest.raises(ArgumentError, match="sampled otherwise"):
        store.loader(reuse=True, **options | {"name": f"no-{way}"}, **{way: said[way]})


def test_links_that_are_others_are_not_taken(store: Any) -> None:
    pyg = pytest.importorskip("featstore.adapters.pyg_links")
    links = np.arange(200).reshape(2, 100)
    given: dict[str, Any] = {"mode": "compiled", "name": "links", "memory": "64MiB", "batch_size": 20}
    with pyg.LinkNeighborLoader(store, [3], links, **given) as loader:
        first = [batch.input_id.tolist() for batch in loader]
    plain: dict[str, Any] = {"replace": False, "subgraph_type": "directional", "weight_attr": None}
    for same, said in ((links, {}), (links.tolist(), plain), (links.astype(np.int32), {"graph": "features"})):
        with pyg.LinkNeighborLoader(store, [3], same, reuse=True, **given, **said) as loader:
            assert [batch.input_id.tolist() for batch in loader] == first
    for fanouts, some in (([2], links), ([3], links[::-1])):
        with pytest.raises(ArgumentError, match="sampled otherwise: of other seeds or links"):
            pyg.LinkNeighborLoader(store, fanouts, some, reuse=True, **given)


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_each_epoch(store: Any, shuffle: bool) -> None:
    options = SAMPLED | {"batch_size": 30, "world_size": 2, "recorded_epochs": 2, "name": "ranked"}
    options |= {"residency": "fixed", "shuffle": True} if shuffle else {}
    loaders = [store.loader(rank=rank, **options) for rank in range(2)]
    for _ in range(3):
        epochs = [list(loader) for loader in loaders]
        assert len({len(epoch) for epoch in epochs}) == 1
        seen = np.concatenate([b.n_id[: b.batch_size] for epoch in epochs for b in epoch])
        np.testing.assert_array_equal(np.unique(seen), TRAIN)
        assert len(seen) == len(TRAIN) + loaders[0].report().padded
    for loader in loaders:
        loader.close()
