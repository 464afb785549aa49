"""After what failed, or was refused, a loop goes on where it stood: no mini-batch is left out, or comes of
another epoch than its name says."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import ArgumentError, ClosedError, DeviceError, IdError, SourceError
from featstore.loaders.divided import GivenShare
from featstore.loaders.host import service as host_service
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


def epochs_and_states(loader: Any) -> tuple[list[list[Any]], list[Any]]:
    """Of three epochs the nodes of each mini-batch, and the state at each."""
    epochs, states = list[list[Any]](), list[Any]()
    for _ in range(3):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(batch.n_id.tolist())
            states.append(loader.state_dict())
    return epochs, states


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


@pytest.mark.parametrize("mode", MODES)
def test_a_state_at_the_last_mini_batch(store: Any, mode: str) -> None:
    """Of that epoch nothing is left, and then the next one comes, under its name."""
    with store.loader(**options_of(mode, "last")) as loader:
        epochs, states = epochs_and_states(loader)
    with store.loader(**options_of(mode, "lastagain")) as loader:
        for epoch in (0, 1):
            loader.load_state_dict(states[len(epochs[0]) * (epoch + 1) - 1])
            assert loader.epoch == epoch
            assert nodes_of(loader) == []
            assert loader.epoch == epoch + 1
            assert nodes_of(loader) == epochs[epoch + 1]
        loader.load_state_dict(states[len(epochs[0]) - 1])
        again = loader.state_dict()  # as where a program is ended before it has begun
        loader.set_epoch(1)
        loader.load_state_dict(again)
        assert loader.state_dict() == states[len(epochs[0]) - 1]
        loader.set_epoch(0)
        assert nodes_of(loader) == []
        loader.set_epoch(1)
        assert nodes_of(loader) == epochs[1]
        loader.load_state_dict(states[len(epochs[0]) - 1])
        loader.load_state_dict(states[1])  # of what is loaded last
        assert nodes_of(loader) == epochs[0][2:]


@pytest.mark.parametrize("mode", ["online", "rolling", "compiled"])
def test_a_mini_batch_that_did_not_come_to_the_loop_comes_again(
    store: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another host is gone when this one's was there already, and then the state is saved."""
    with store.loader(**options_of(mode, "uncounted")) as loader:
        whole = nodes_of(loader)
        loader.set_epoch(0)
        batches = iter(loader)
        assert nodes_of(islice(batches, 3)) == whole[:3]

        def check() -> None:
            raise ConnectionError("another is gone")

        monkeypatch.setattr(loader._mode, "check", check)
        with pytest.raises(ConnectionError):
            next(batches)
        state = loader.state_dict()
        monkeypatch.undo()
        loader.load_state_dict(state)
        assert nodes_of(loader) == whole[3:]
        loader.load_state_dict(state)
        monkeypatch.setattr(loader._mode, "check", check)
        with pytest.raises(ConnectionError):
            next(iter(loader))
        monkeypatch.undo()
        loader.set_epoch(0)  # as a loop does that tries the epoch again
        assert nodes_of(loader) == whole[3:]


@pytest.mark.parametrize("mode", ["online", "rolling", "compiled"])
def test_a_state_at_the_last_mini_batch_of_ranks_that_share(store: Any, mode: str, tmp_path: Path) -> None:
    """The same, and of another number of ranks."""

    def made(rank: int, ranks: int, line: str) -> Any:
        own = featstore.open(store.path)
        more = {"name": line} if mode != "online" else {}
        return own.loader(
            rank=rank, world_size=ranks, mode=mode, shared=str(tmp_path / line), **SAMPLED, **more
        )

    def resumed(loader: Any, state: Any) -> Any:
        loader.load_state_dict(state)
        return [nodes_of(loader) for _ in range(3)], loader.epoch

    with ThreadPoolExecutor(2) as pool:
        loaders = list(pool.map(made, range(2), [2] * 2, ["one"] * 2))
        before = list(pool.map(epochs_and_states, loaders))
        list(pool.map(lambda loader: loader.close(), loaders))
        loaders = list(pool.map(made, range(2), [2] * 2, ["two"] * 2))
        after = list(pool.map(resumed, loaders, [states[len(epochs[0]) - 1] for epochs, states in before]))
        list(pool.map(lambda loader: loader.close(), loaders))
    for (epochs, _), (found, epoch) in zip(before, after, strict=True):
        assert found == [[], epochs[1], epochs[2]]
        assert epoch == 3


@pytest.mark.parametrize("mode", ["online", "rolling"])
def test_of_an_epoch_nothing_is_left_for_other_ranks(store: Any, mode: str) -> None:
    with store.loader(rank=0, world_size=2, **options_of(mode, "two")) as loader:
        for batch in loader:
            state = loader.state_dict()
            del batch
    with store.loader(**options_of(mode, "one")) as loader:
        epochs = [nodes_of(loader) for _ in range(2)]
        loader.load_state_dict(state)
        assert nodes_of(loader) == []
        assert loader.epoch == 1
        assert nodes_of(loader) == epochs[1]


@pytest.mark.parametrize("mode", ["online", "rolling", "partitions"])
def test_an_epoch_that_is_set_at_the_last_mini_batch(store: Any, mode: str) -> None:
    """The iteration that it ends says so; the next one is of that epoch."""
    with store.loader(**options_of(mode, "set")) as loader:
        first, second = nodes_of(loader), nodes_of(loader)
        assert first != second
        loader.set_epoch(0)
        batches = iter(loader)
        assert nodes_of(islice(batches, len(first))) == first
        loader.set_epoch(0)
        with pytest.raises(ClosedError):
            next(batches)
        assert loader.epoch == 0
        assert nodes_of(loader) == first


@pytest.mark.parametrize("mode", ["online", "rolling"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_epoch_that_fails_as_it_begins(
    store: Any, mode: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comes again where it was to begin, of as many ranks as then and of others."""
    plainly, broken = RankedBatches.__getitem__, list[int]()

    def once(self: Any, index: Any) -> Any:
        if broken:
            broken.clear()
            raise DeviceError(5, "/dev/x")
        return plainly(self, index)

    with store.loader(rank=0, world_size=ranks, **options_of(mode, "begun")) as loader:
        list(islice(iter(loader), 3))
        state = loader.state_dict()
    with store.loader(**options_of(mode, "expected")) as loader:
        loader.load_state_dict(state)
        expected = nodes_of(loader), nodes_of(loader)
    monkeypatch.setattr(RankedBatches, "__getitem__", once)
    with store.loader(**options_of(mode, "failed")) as loader:
        loader.load_state_dict(state)
        broken.append(0)
        with pytest.raises(DeviceError):
            list(loader)
        assert (nodes_of(loader), nodes_of(loader)) == expected


def test_mini_batches_that_divide_themselves_go_on_among_as_many_ranks() -> None:
    """What of them is over, of all ranks', is another number where there are more."""
    share = GivenShare([np.arange(3)] * 4, divided=4)
    assert share.per_step == 4
    assert GivenShare([np.arange(3)] * 4, world_size=4).per_step == 4


def test_mini_batches_that_divide_themselves_have_no_rest() -> None:
    """Which of them are over, of all ranks', nobody knows."""
    share = GivenShare([np.arange(3)] * 4, rank=1, divided=2)
    share.begin_at(2, 0)
    with pytest.raises(ArgumentError, match="divide themselves"):
        share.begin_at(2, 4)
    assert len(list(share.epoch(2))) == 4


def test_ranks_that_share_a_loader_save_what_its_buffers_hold(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and begin with it."""

    monkeypatch.setattr(host_service, "_SAVE_SECONDS", 0.1)

    def read(rank: int, warm: str | None) -> int:
        own = featstore.open(store.path)
        line = str(tmp_path / f"line {warm}")
        with own.loader(
            rank=rank, world_size=2, mode="online", shared=line, warm=warm, policy="lru", **SAMPLED
        ) as loader:
            for number, batch in enumerate(loader):
                np.testing.assert_array_equal(batch.x, FEATURES[batch.n_id])
                if rank == number == 0:
                    with pytest.raises(ArgumentError, match="for between epochs"):
                        loader.save_cache("within")
            loader.save_cache("shared")
            return loader.report().buffers["features"].misses

    with ThreadPoolExecutor(2) as pool:
        cold = list(pool.map(read, range(2), [None] * 2))
        assert [path.name for path in (store.path / "caches").glob("shared*")] == ["shared.cache"]
        warm = list(pool.map(read, range(2), ["shared"] * 2))
    assert cold[0] > NODES // 2
    assert warm[0] == 0


# What is of something else.


@pytest.mark.parametrize("mode", MODES)
def test_a_state_of_other_mini_batches_is_refused(store: Any, mode: str) -> None:
    """Of another seed, other seeds, other fan-outs or options; of another size of mini-batches it goes on."""
    with store.loader(**options_of(mode, "whose")) as loader:
        list(islice(iter(loader), 2))
        state = loader.state_dict()
        list(loader)
        between = loader.state_dict()
    seeds = np.arange(NODES) >= NODES // 2
    for other in ({"seed": 1}, {"seeds": seeds}, {"fanouts": (4, 2)}, {"replace": True}):
        with store.loader(**options_of(mode, "other") | other) as loader:
            for one in (state, between):
                with pytest.raises(ArgumentError, match="has a digest of seeds or links, seed, fanouts"):
                    loader.load_state_dict(one)
    alike = {"seeds": np.ones(NODES, bool), "seed": 0, "fanouts": [4, 3], "batch_size": 16}
    alike |= {"seeds": np.arange(NODES, dtype=np.int32)}  # however they are given
    with store.loader(**options_of(mode, "alike") | alike) as loader:
        loader.load_state_dict(between)
        assert loader.epoch == 2


def test_what_is_found_of_other_seeds_or_ranks_is_refused(store: Any) -> None:
    """By how many mini-batches an epoch has; ranks of other runs have names of their own."""
    given = options_of("compiled", "found")
    with store.loader(**given) as loader:
        steps = len(loader)
    with store.loader(reuse=True, **given) as loader:
        assert len(loader) == steps
    with pytest.raises(ArgumentError, match=rf"finds epochs of {steps} mini-batches .* for have 5"):
        store.loader(reuse=True, **given | {"seeds": np.arange(NODES // 2)})
    with store.loader(rank=0, world_size=4, **given) as loader:
        quarter = len(loader)
    with store.loader(rank=0, world_size=2, reuse=True, **given) as loader:
        assert len(loader) > quarter


def test_passes_of_partitions_by_the_clock_have_no_number(store: Any) -> None:
    """And are gone through all the same."""
    with store.loader(mode="partitions", passes="auto", **SAMPLED) as loader:
        assert len(list(loader)) >= NODES // BATCH


def test_a_state_beyond_the_end_is_refused(store: Any) -> None:
    with store.loader([np.arange(5)] * 4, mode="rolling", name="many", memory="32MiB") as loader:
        list(islice(iter(loader), 3))
        state = loader.state_dict()
    with store.loader([np.arange(5)] * 2, mode="rolling", name="few", memory="32MiB") as loader:
        loader.load_state_dict(state)
        with pytest.raises(ArgumentError, match="mini-batch 3 of 2"):
            list(loader)


def test_drop_last_leaves_something_or_says_so(store: Any) -> None:
    """And what it leaves out is counted, around links as around nodes."""
    from featstore.sampling.links import LinkSampler

    few = {"seeds": np.arange(0, NODES, 100), "batch_size": BATCH, "drop_last": True}
    with (
        store.loader(**options_of("partitions", "few") | few) as loader,
        pytest.raises(ArgumentError, match="drop_last= leaves no mini-batch"),
    ):
        list(loader)
    sampler = LinkSampler(open_sampler(store, (4, 3), memory="32MiB", in_memory=True))
    links = np.arange(60).reshape(2, 30)
    with pytest.raises(ArgumentError, match="drop_last= leaves no mini-batch of 31 links"):
        LinkBatches(sampler, links, 31, drop_last=True)
    with store.loader(LinkBatches(sampler, links, 7, drop_last=True), memory="32MiB") as loader:
        assert len(list(loader)) == 4
        assert loader.report().dropped == 2


@pytest.mark.parametrize("mode", ["online", "rolling"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_share_go_on_in_the_middle(store: Any, mode: str, ranks: int, tmp_path: Path) -> None:
    """Wherever that is: where all ranks together have gone through as many as one has in an epoch, too."""

    def made(rank: int, name: str) -> Any:
        more = {"name": name} if mode != "online" else {}
        return featstore.open(store.path).loader(
            rank=rank, world_size=ranks, mode=mode, shared=str(tmp_path / name), **SAMPLED, **more
        )

    def resumed(loader: Any, state: Any) -> Any:
        loader.load_state_dict(state)
        return nodes_of(loader)

    def all_of(name: str, work: Any, *given: Any) -> list[Any]:
        with ThreadPoolExecutor(ranks) as pool:
            loaders = list(pool.map(made, range(ranks), [name] * ranks))
            found = list(pool.map(work, loaders, *given))
            list(pool.map(lambda loader: loader.close(), loaders))
        return found

    before = all_of("first", epochs_and_states)
    steps = len(before[0][0][0])
    for at in (steps // 2, 1):
        rest = all_of(f"at-{at}", resumed, [states[at - 1] for _, states in before])
        assert rest == [epochs[0][at:] for epochs, _ in before]


def test_of_given_mini_batches_nothing_is_left_for_other_ranks(store: Any) -> None:
    batches = [np.arange(k, k + 5) for k in range(4)]
    for mode in ("online", "rolling"):
        more = {"mode": mode, "memory": "32MiB"} | ({"name": "given"} if mode == "rolling" else {})
        with store.loader(batches, rank=0, world_size=2, **more) as loader:
            for batch in loader:
                state = loader.state_dict()
                del batch
        with store.loader(batches, **more) as loader:
            loader.load_state_dict(state)
            assert nodes_of(loader) == []
            assert nodes_of(loader) == [one.tolist() for one in batches]


def test_an_iteration_that_was_left_behind_ends_nothing_of_the_next(store: Any) -> None:
    """Its loader is not that of the one that goes on, whose mini-batches the report counts."""
    with store.loader(**options_of("rolling", "left")) as loader:
        left = iter(loader)
        next(left)
        counted = []
        for number, _ in enumerate(loader):
            if number == 1:
                del left
                gc.collect()
            counted.append(loader.report().batches)
        assert counted == sorted(counted)
        assert counted[-1] >= counted[0] + len(counted) - 1


def test_closing_that_was_interrupted_is_gone_on_with(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left has been given back by the second close()."""
    from featstore.loaders.online.loader import OnlineLoader

    own, calls = OnlineLoader.close, []

    def interrupted(self: Any) -> None:
        calls.append(self)
        if len(calls) == 1:
            raise KeyboardInterrupt
        own(self)

    monkeypatch.setattr(OnlineLoader, "close", interrupted)
    loader = store.loader(**options_of("online", "none"))
    next(iter(loader))
    with pytest.raises(KeyboardInterrupt):
        loader.close()
    with pytest.raises(ClosedError):
        next(iter(loader))
    assert len(calls) == 1
    loader.close()
    loader.close()
    assert len(calls) == 2
    assert not calls[0].extraction.buffers or calls[0].extraction._reader._closed


def test_a_state_beyond_the_end_is_no_empty_epoch(store: Any) -> None:
    some = [np.arange(10 * k, 10 * k + 20) for k in range(10)]
    with store.loader(some, mode="online", memory="32MiB") as loader:
        batches = iter(loader)
        for _ in range(8):
            next(batches)
        state = loader.state_dict()
        del batches
    for given in (some[:5], lambda _: iter(some[:5])):
        with store.loader(given, mode="online", memory="32MiB") as loader:
            loader.load_state_dict(state)
            with pytest.raises(ArgumentError, match="8 mini-batches or more, and this one has 5"):
                next(iter(loader))


def test_a_generator_that_is_broken_off_ends_with_the_loader(store: Any) -> None:
    ended = []

    def epoch(_: int) -> Iterator[Any]:
        try:
            yield from (np.arange(20) for _ in range(50))
        finally:
            ended.append(True)

    loader = store.loader(epoch, mode="online", memory="32MiB")
    for _ in loader:
        break
    loader.close()
    assert ended
    del loader


def test_edges_that_have_no_number_have_no_values(tmp_path: Path, pack: Any) -> None:
    """The last of all would be taken for them."""
    edges = np.random.default_rng(1).integers(0, NODES, (2, 30))
    with pack(
        tmp_path / "s", FEATURES, graph=edges, edge_ids=True, arrays={"w": np.arange(30.0)}
    ) as store:  # fmt: skip
        for number in (-1, 30):
            one = {"n_id": np.arange(3), "row": [0, 1], "col": [1, 2], "e_id": np.array([5, number])}
            with (
                store.loader([one], mode="online", memory="32MiB", attach="w") as loader,
                pytest.raises(SourceError, match=f"an e_id of these mini-batches is {number}"),
            ):
                next(iter(loader))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of who imports PyG first
@pytest.mark.parametrize("mode", ["online", "compiled", "rolling"])
def test_edges_of_other_nodes_make_no_object_of_pygs(store: Any, mode: str) -> None:
    given = options_of(mode, f"pyg-{mode}")
    with store.loader(**given, nodes=lambda s: np.sort(s.node)) as loader:
        for batch in loader:
            np.testing.assert_array_equal(batch.x, FEATURES[batch.n_id])
            with pytest.raises(SourceError, match="nodes= gave this mini-batch other rows"):
                batch.pyg()
    if mode == "compiled":  # and found again
        with store.loader(**given, reuse=True) as loader, pytest.raises(SourceError, match="nodes= gave"):
            next(iter(loader)).pyg()
    given = options_of(mode, f"same-{mode}")
    with store.loader(**given, nodes=lambda s: s.node.copy()) as loader:
        batch = next(iter(loader))
        np.testing.assert_array_equal(batch.pyg().x, FEATURES[batch.n_id])


def test_a_sampler_from_disk_reads_as_it_is_told(
    tmp_path: Path, pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from featstore.sampling.stored import StoredSampler

    edges = np.random.default_rng(1).integers(0, 3000, (2, 3_000_000))
    told, own = [], StoredSampler.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        told.append({name: options.get(name) for name in ("engine", "threads", "queue_depth", "verify")})
        own(self, *args, **options)

    monkeypatch.setattr(StoredSampler, "__init__", init)
    reading = {"engine": "threads", "threads": 2, "queue_depth": 8, "verify": False}
    with (
        pack(tmp_path / "s", np.ones((3000, 4), np.float32), graph=edges) as store,
        store.loader(seeds=np.arange(20), fanouts=(2,), mode="online", memory="30MiB", **reading) as loader,
    ):
        next(iter(loader))
    assert told[-1] == reading, "others ask what is needed at least"
