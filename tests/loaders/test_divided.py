"""Epochs divided among ranks: mini-batches that are given, and going on with another number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore.errors import ArgumentError
from featstore.loaders.divided import GivenShare

NODES, EPOCH = 900, 23
TRAIN = np.arange(0, NODES, 4)  # 225
FEATURES = np.random.default_rng(0).standard_normal((NODES, 5)).astype(np.float32)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import featstore

    edges = np.random.default_rng(1).integers(0, NODES, (2, 6000))
    path = tmp_path_factory.mktemp("ranks") / "s"
    with featstore.pack(path, FEATURES, graph=edges, topology=True, order="ldg", partitions=6) as made:
        yield made


def number(epoch: int, index: int) -> np.ndarray:
    """Mini-batch ``index``: its number first."""
    return np.concatenate([[index], np.random.default_rng([epoch, index]).integers(0, NODES, 9)])


def as_list(epoch: int) -> list[np.ndarray]:
    return [number(epoch, index) for index in range(EPOCH)]


def as_stream(epoch: int) -> Iterator[np.ndarray]:
    """Anything but a sequence, and with memory that is used again."""
    used = np.empty(10, np.int64)
    for batch in as_list(epoch):
        used[:] = batch
        yield used


@given(
    count=st.integers(0, 12), world=st.integers(1, 5), over=st.integers(0, 6), drop_last=st.booleans(),
)  # fmt: skip
@settings(max_examples=35, deadline=None)
def test_streams_and_sequences_are_divided_alike(count: int, world: int, over: int, drop_last: bool) -> None:
    shares: dict[str, list[list[int]]] = {}
    for kind, make in (("list", list), ("stream", iter)):
        divided = [GivenShare(lambda _, m=make: m(range(count)), k, world, drop_last) for k in range(world)]  # type: ignore[misc]
        for one in divided:
            one.begin_at(3, over)
        shares[kind] = [list(one.epoch(3)) for one in divided]
        assert [list(one.epoch(4))[:1] for one in divided] == [
            list(GivenShare(lambda _: list(range(count)), k, world, drop_last).epoch(4))[:1]
            for k in range(world)
        ], "another epoch is whole"
    assert shares["list"] == shares["stream"]
    left = list(range(over, count))
    steps = {len(share) for share in shares["list"]}
    assert len(steps) == 1
    seen = [index for share in shares["list"] for index in share]
    if drop_last:
        assert sorted(seen) == left[: len(left) - len(left) % world]
    else:
        assert set(seen) == set(left)
        assert len(seen) == len(left) + -len(left) % world * bool(left)


@pytest.mark.parametrize("make", [as_list, as_stream])
@pytest.mark.parametrize("mode", ["online", "compiled", "rolling"])
def test_mini_batches_that_are_given_are_divided(store: Any, mode: str, make: Any) -> None:
    for drop_last in (False, True):
        options = {"mode": mode, "memory": "64MiB", "world_size": 3, "drop_last": drop_last}
        loaders = [store.loader(make, rank=rank, **options) for rank in range(3)]
        for epoch in range(2):
            of = 0 if mode == "compiled" else epoch
            steps = [list(loader) for loader in loaders]
            assert [len(batches) for batches in steps] == [7 if drop_last else 8] * 3
            for rank, batches in enumerate(steps):
                for step, batch in enumerate(batches):
                    index = (3 * step + rank) % EPOCH
                    np.testing.assert_array_equal(batch.n_id, number(of, index))
                    np.testing.assert_array_equal(batch.x, FEATURES[batch.n_id])
        if mode == "online":
            report = loaders[2].report()
            assert (report.padded, report.dropped) == ((0, 2) if drop_last else (1, 0))
        for loader in loaders:
            loader.close()


def seeds_of(batches: list[Any]) -> list[int]:
    return [int(node) for batch in batches for node in batch.n_id[: batch.batch_size]]


@pytest.mark.parametrize("mode", ["online", "rolling"])
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (1, 2), (3, 1)])
def test_it_goes_on_with_another_number_of_ranks(store: Any, mode: str, before: int, after: int) -> None:
    """Together, each seed once; what follows is a whole epoch again. What was saved goes on, too."""
    options = {"seeds": TRAIN, "fanouts": (3, 2), "memory": "64MiB", "mode": mode, "batch_size": 20}

    def ranks(world: int, size: int = 20) -> list[Any]:
        more = {} if mode == "online" else {"name": f"w{world}"}
        made = options | {"batch_size": size, "world_size": world} | more
        return [store.loader(rank=rank, **made) for rank in range(world)]

    first = ranks(before)
    for loader in first:
        assert len(list(loader)) == len(loader)
    halves = [list(islice(iter(loader), 2)) for loader in first]
    states = [loader.state_dict() for loader in first]
    seen = [node for half in halves for node in seeds_of(half)]
    assert len(set(seen)) == 40 * before
    for loader in first:
        loader.close()
    second = ranks(after, 17)
    for loader in second:
        loader.load_state_dict(states[0])
        assert loader.epoch == 1
    begun = [list(islice(iter(loader), 1)) for loader in second]
    again = [loader.state_dict() for loader in second]
    seen += [node for half in begun for node in seeds_of(half)]
    for loader in second:
        loader.close()
    third = ranks(after, 17)
    for loader, state in zip(third, again, strict=True):
        loader.load_state_dict(state)
    rest = [list(loader) for loader in third]
    assert len({len(batches) for batches in rest}) == 1
    seen += [node for half in rest for node in seeds_of(half)]
    assert set(seen) == set(TRAIN.tolist())
    assert len(seen) - len(TRAIN) == -(len(TRAIN) - 40 * before) % after, "padded once"
    whole = [node for loader in third for node in seeds_of(list(loader))]
    assert set(whole) == set(TRAIN.tolist())
    third[0].load_state_dict(again[0])
    third[0].set_epoch(1)  # as a loop does in each epoch
    assert [batch.n_id.tolist() for batch in third[0]] == [batch.n_id.tolist() for batch in rest[0]]
    third[0].set_epoch(1)  # from its beginning
    assert len(list(third[0])) == len(third[0])
    for loader in third:
        loader.close()


def test_what_cannot_be_divided_anew_says_so(store: Any) -> None:
    options = {"seeds": TRAIN, "fanouts": (3, 2), "memory": "64MiB", "batch_size": 20}
    for mode in ("compiled", "partitions"):
        own = {"name": "three"} if mode == "compiled" else {}
        with store.loader(mode=mode, rank=0, world_size=3, **options, **own) as loader:
            list(islice(iter(loader), 2))
            state = loader.state_dict()
            list(loader)
            between = loader.state_dict()
        own = {"name": "two"} if mode == "compiled" else {}
        with store.loader(mode=mode, rank=0, world_size=2, **options, **own) as loader:
            if mode == "compiled":  # 2 steps of 3 ranks are 3 of 2
                loader.load_state_dict(state)
                assert len(list(loader)) == len(loader) - 3
                state = state | {"next": 1}
            with pytest.raises(ArgumentError, match=r"set_epoch\(|begin the"):
                loader.load_state_dict(state)
            loader.load_state_dict(between)
            assert loader.epoch == between["epoch"]
            assert seeds_of(list(loader))


@pytest.mark.parametrize(
    ("there", "here", "says"),
    [
        ({"shuffle": True}, {"shuffle": True}, "in another order"),
        ({"shuffle": True}, {}, "in another order"),
        ({}, {"shuffle": True}, "in another order"),
        ({"recorded_epochs": 2}, {}, "epoch 1 repeats another of the recorded epochs"),
        ({}, {"recorded_epochs": 2}, "epoch 1 repeats another of the recorded epochs"),
        ({}, {}, ""),
    ],
)
def test_what_is_compiled_goes_on_in_the_same_order_alone(
    store: Any, there: dict[str, Any], here: dict[str, Any], says: str
) -> None:
    """So many whole mini-batches of half the size are over only where these are the first ones here, too."""
    options = {
        "seeds": TRAIN, "fanouts": (3, 2), "memory": "64MiB", "mode": "compiled", "residency": "fixed"
    }  # fmt: skip
    with store.loader(batch_size=40, name="there", **options, **there) as loader:
        loader.set_epoch(1)
        seen = list(islice(iter(loader), 2))
        state = loader.state_dict()
    with store.loader(batch_size=20, name="here", **options, **here) as loader:
        if says:
            with pytest.raises(ArgumentError, match=rf"{says}.*set_epoch\(2\)"):
                loader.load_state_dict(state)
            return
        in_mode = state["at"]["in_mode"]
        of = {name: value for name, value in in_mode["of"].items() if name != "epochs"}
        with pytest.raises(
            ArgumentError, match=r"does not say how many epochs were recorded.*set_epoch\(2\)"
        ):
            loader.load_state_dict(state | {"at": state["at"] | {"in_mode": in_mode | {"of": of}}})
        loader.load_state_dict(state)
        assert set(seeds_of(seen)) | set(seeds_of(list(loader))) == set(TRAIN.tolist())


def test_what_is_compiled_goes_on_without_what_it_was_compiled_of(store: Any) -> None:
    """It is the same, whether mini-batches are given or not; of other ranks nobody knows what is over."""
    some = [np.arange(10 * k, 10 * k + 20) for k in range(8)]
    options = {"mode": "compiled", "memory": "64MiB", "name": "alone"}
    with store.loader(some, **options) as loader:
        list(islice(iter(loader), 3))
        given = loader.state_dict()
    with store.loader(reuse=True, **options) as loader:
        list(islice(iter(loader), 3))
        alone = loader.state_dict()
        loader.load_state_dict(given)
        assert [batch.n_id.tolist() for batch in loader] == [ids.tolist() for ids in some[3:]]
        with pytest.raises(ArgumentError, match=r"is not known.*set_epoch\(1\)"):
            loader.load_state_dict(given | {"at": given["at"] | {"ranks": 2, "step": 2}})
    with store.loader(some, reuse=True, **options) as loader:
        loader.load_state_dict(alone)
        assert [batch.n_id.tolist() for batch in loader] == [ids.tolist() for ids in some[3:]]


class Halves(Sequence[np.ndarray]):
    """Mini-batches that divide themselves among ranks, a block to each."""

    num_replicas = 2

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < 4:
            raise IndexError
        return np.arange(10 * number, 10 * number + 20)


def test_of_mini_batches_that_divide_themselves_nobody_knows_what_is_over(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for mode in ("online", "rolling", "compiled"):
        more = {"memory": "64MiB", "mode": mode} | ({} if mode == "online" else {"name": f"halves{mode}"})
        with store.loader(Halves(), **more) as loader:
            list(islice(iter(loader), 2))
            state = loader.state_dict()
            loader.load_state_dict(state)
            assert len(list(loader)) == 2
            with pytest.raises(ArgumentError, match="these divide themselves"):
                loader.load_state_dict(state | {"at": state["at"] | {"ranks": 1, "step": 4}})


def test_a_state_beyond_the_end_of_other_ranks_is_no_empty_epoch(store: Any) -> None:
    some = [np.arange(10 * k, 10 * k + 20) for k in range(10)]
    with store.loader(some, mode="online", memory="32MiB") as loader:
        list(islice(iter(loader), 8))
        state = loader.state_dict()
    for few, left in ((some[:5], None), (some[:7], None), (some[:8], 0), (some, 1)):
        with store.loader(few, mode="online", memory="32MiB", rank=0, world_size=2) as loader:
            if left is None:
                with pytest.raises(
                    ArgumentError, match=f"8 mini-batches or more, and this one has {len(few)}"
                ):
                    loader.load_state_dict(state)
            else:
                loader.load_state_dict(state)
                assert len(list(loader)) == left
