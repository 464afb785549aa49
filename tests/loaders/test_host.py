"""One loader for the ranks of a host: each rank gets what a loader of its own would give it, rows are held
once, and whoever ends, nobody hangs. Ranks are forked processes here; under ``torchrun`` see
test_torchrun.py."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import in_child

import featstore
import featstore.storage.store
from featstore.base.dtypes import bfloat16
from featstore.base.threads import closed_later
from featstore.errors import ArgumentError, BudgetError, ClosedError, CorruptionError, FeatstoreError, IdError
from featstore.loaders.host import line
from featstore.loaders.host.place import fingerprint
from featstore.loaders.host.slots import SharedSlots, Slots
from featstore.loaders.modes import Mode
from featstore.loaders.options import MODES
from featstore.loaders.whole import Whole

NODES, WIDTH, RANKS = 3000, 9, 3
TRAIN = np.arange(1, NODES, 5)
FEATURES = np.random.default_rng(0).standard_normal((NODES, WIDTH)).astype(np.float32)
SAMPLED = {"seeds": TRAIN, "fanouts": (4, 3), "batch_size": 40, "memory": "96MiB"}
SECONDS = 120.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Path:
    path = tmp_path_factory.mktemp("made") / "s"
    edges = np.random.default_rng(1).integers(0, NODES, (2, 25_000))
    pack(path, FEATURES, graph=edges, order="ldg", partitions=12).close()
    return path


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "s", symlinks=True))


def options_of(mode: str, **more: Any) -> dict[str, Any]:
    return SAMPLED | ({"resident": 4} if mode == "partitions" else {}) | {"mode": mode} | more


def drawn(batch: Any) -> tuple[Any, ...]:
    assert (np.asarray(batch.x) == FEATURES[batch.n_id]).all(), "rows are the source's"
    return batch.index, batch.n_id.tolist(), batch.row.tolist(), batch.col.tolist(), batch.batch_size


class Rank:
    """A forked process, what it gave or raised, and a way to speak with it."""

    def __init__(self, work: Callable[[int, Any], Any], rank: int) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(
            target=self._run, args=(work, rank, theirs)
        )
        self.process.start()
        theirs.close()

    @staticmethod
    def _run(work: Callable[[int, Any], Any], rank: int, pipe: Any) -> None:
        try:
            pipe.send(("gave", work(rank, pipe)))
        except BaseException as error:
            pipe.send(("raised", error))

    def told(self, seconds: float = SECONDS) -> Any:
        assert self.pipe.poll(seconds), "it hangs"
        return self.pipe.recv()

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


@pytest.fixture
def start() -> Iterator[Callable[..., list[Rank]]]:
    """Start ranks that do some work."""
    begun: list[Rank] = []

    def start(work: Callable[[int, Any], Any], count: int = RANKS) -> list[Rank]:
        begun.extend(Rank(work, rank) for rank in range(count))
        return begun

    yield start
    for one in begun:
        one.end()


def shared_loader(path: Path, rank: int, mode: str, **more: Any) -> Any:
    options = {"world_size": RANKS, "shared": str(path)} | more
    return featstore.open(path).loader(rank=rank, **options_of(mode, **options))


def alone(path: Path, mode: str, epochs: int) -> list[list[list[Any]]]:
    """By rank and epoch: what loaders of their own give."""
    found = []
    with featstore.open(path) as store:
        for rank in range(RANKS):
            with store.loader(rank=rank, world_size=RANKS, **options_of(mode)) as loader:
                found.append([[drawn(batch) for batch in loader] for _ in range(epochs)])
    return found


@pytest.mark.parametrize("mode", MODES)
def test_each_rank_gets_what_it_would_have_alone(path: Path, start: Any, mode: str) -> None:
    """Three epochs; then the same once more, from the middle of an epoch. The state is that of a rank with a
    loader of its own (compiled: but for the trace, which is another)."""
    stop = 2

    def work(rank: int, pipe: Any) -> Any:
        with shared_loader(path, rank, mode) as loader:
            epochs = [[drawn(batch) for batch in loader] for _ in range(3)]
            report = loader.report()
            loader.set_epoch(1)
            begun = iter(loader)
            again = [drawn(batch) for batch in islice(begun, stop)]
            state = pickle.loads(pickle.dumps(loader.state_dict()))
            begun.close()
        assert mode == "compiled" or state == own_state(path, mode, stop)
        with shared_loader(path, rank, mode) as loader:
            loader.load_state_dict(state)
            rest = [[drawn(batch) for batch in loader] for _ in range(2)]
        return epochs, report, again + rest[0], rest[1]

    expected = alone(path, mode, 3)
    bytes_read = set()
    for rank, one in enumerate(start(work)):
        kind, found = one.told()
        assert kind == "gave", found
        epochs, report, again, after = found
        assert epochs == expected[rank]
        assert again == expected[rank][1]
        assert after == expected[rank][2]
        assert report.batches == sum(map(len, epochs))
        assert report.seconds["wait"] > 0
        assert report.padded == 0 or mode == "partitions", "seeds come out even"
        bytes_read.add(report.bytes_read)
    assert len(bytes_read) == 1 or mode == "partitions", "the host's; partitions are loaded ahead meanwhile"


def own_state(path: Path, mode: str, stop: int) -> dict[str, Any]:
    """The state of a rank with a loader of its own, in epoch 1; it is the same in every rank."""
    name = {"name": f"own{os.getpid()}"} if mode == "rolling" else {}
    with featstore.open(path).loader(rank=1, world_size=RANKS, **options_of(mode, **name)) as loader:
        loader.set_epoch(1)
        begun = iter(loader)
        for _ in range(stop):
            next(begun)
        state: dict[str, Any] = loader.state_dict()
        begun.close()
        return state


@pytest.mark.parametrize("mode", MODES)
def test_breaking_off(path: Path, start: Any, mode: str) -> None:
    """All ranks at one step, then one of them alone, while the others go on to the end."""

    def work(rank: int, pipe: Any) -> Any:
        with shared_loader(path, rank, mode) as loader:
            first = [drawn(batch) for batch in islice(iter(loader), 2)]
            second = [drawn(batch) for batch in islice(iter(loader), 1 if rank == 1 else None)]
            third = [drawn(batch) for batch in loader]
            return first, second, third

    expected = alone(path, mode, 3)
    for rank, one in enumerate(start(work)):
        kind, found = one.told()
        assert kind == "gave", found
        first, second, third = found
        assert first == expected[rank][0][:2]
        assert second == (expected[rank][1][:1] if rank == 1 else expected[rank][1])
        assert third == expected[rank][2]


def test_a_loop_may_keep_what_it_had_when_it_broke_off(path: Path, start: Any) -> None:
    """In every rank the last two, which is as many as there are places for: they stay the loop's, and the
    next epochs begin."""

    def work(rank: int, pipe: Any) -> Any:
        with shared_loader(path, rank, "online") as loader:
            kept, epochs = [], []
            for _ in range(2):
                begun = iter(loader)
                kept += [next(begun), next(begun)]
                begun.close()
                epochs.append([drawn(batch) for batch in loader])
            return [drawn(batch) for batch in kept], epochs

    expected = alone(path, "online", 4)
    for rank, one in enumerate(start(work)):
        kind, found = one.told()
        assert kind == "gave", found
        kept, epochs = found
        assert kept == expected[rank][0][:2] + expected[rank][2][:2]
        assert epochs == [expected[rank][1], expected[rank][3]]


def test_a_signal_that_closes_ends_a_loop_that_waits(path: Path, start: Any) -> None:
    """In the rank that reads for others, and in another one: the third never begins."""

    def work(rank: int, pipe: Any) -> Any:
        loader = shared_loader(path, rank, "online")
        if rank == 2:
            time.sleep(2)
            return None
        signal.signal(signal.SIGALRM, lambda *_: loader.close())
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(ClosedError):
            next(iter(loader))
        return "ended"

    for rank, one in enumerate(start(work)):
        assert one.told() == ("gave", None if rank == 2 else "ended")


def test_one_that_is_dropped_is_closed(path: Path, start: Any) -> None:
    """With its threads, and what it holds, when all ranks have dropped theirs; and others can be made."""

    def work(rank: int, pipe: Any) -> Any:
        before = len(os.listdir("/proc/self/fd"))  # what the test's process has open, too
        for _ in range(2):
            loader = shared_loader(path, rank, "online")
            assert sum(1 for _ in loader) > 1
            del loader
            gc.collect()
            end = time.monotonic() + SECONDS
            while names := [t.name for t in threading.enumerate() if t.name.startswith("featstore-host")]:
                assert time.monotonic() < end, names
                time.sleep(0.01)
        return len(os.listdir("/proc/self/fd")) - before

    for one in start(work):
        kind, found = one.told()
        assert kind == "gave", found
        assert found < 30


def test_a_report_that_was_broken_off_is_not_taken_for_the_next_one(path: Path, start: Any) -> None:
    def work(rank: int, pipe: Any) -> Any:
        with shared_loader(path, rank, "online") as loader:
            mode, hear = loader._mode, loader._mode._hear

            def interrupted(seconds: Any) -> Any:
                mode._hear = hear
                raise KeyboardInterrupt

            mode._hear = interrupted
            with pytest.raises(KeyboardInterrupt):
                loader.report()
            list(loader)
            return loader.report().buffers, loader.report().buffers

    for one in start(work):
        kind, found = one.told()
        assert kind == "gave", found
        assert found[0] == found[1]


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_one_that_is_killed_ends_the_others(path: Path, start: Any, mode: str, killed: int) -> None:
    def work(rank: int, pipe: Any) -> Any:
        with shared_loader(path, rank, mode) as loader:
            for _ in loader:
                pipe.send("has one")
                if rank == killed:
                    time.sleep(SECONDS)
            pipe.send("has all")
            return [drawn(batch) for batch in loader]

    ranks = start(work)
    assert ranks[killed].told() == "has one"
    os.kill(ranks[killed].process.pid or 0, signal.SIGKILL)
    begun = time.monotonic()
    for rank in {0, 1, 2} - {killed}:
        said = ranks[rank].told()
        while said in ("has one", "has all"):
            said = ranks[rank].told(20)
        kind, error = said
        assert kind == "raised"
        assert type(error) is ClosedError
        assert f"local rank {killed}" in str(error)
        assert "died" in str(error)
    assert time.monotonic() - begun < 20


def test_an_error_of_the_loader_reaches_every_rank(path: Path, start: Any) -> None:
    """Of rows that are corrupt: those before are given, the epoch ends with the error, the next has it
    again."""
    data = max(path.glob("**/c/*"), key=lambda file: file.stat().st_size, default=None) or max(
        (file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size
    )
    spoiled = bytearray(data.read_bytes())
    spoiled[::4096] = bytes(b ^ 1 for b in spoiled[::4096])
    data.write_bytes(spoiled)

    def work(rank: int, pipe: Any) -> Any:
        with shared_loader(path, rank, "online") as loader:
            found = []
            for _ in range(2):
                with pytest.raises(CorruptionError) as raised:
                    list(loader)
                found.append((raised.value.path, raised.value.offset))
            return found

    for one in start(work):
        kind, found = one.told()
        assert kind == "gave", found
        assert all(name.startswith(str(path)) for name, _ in found)


@pytest.mark.parametrize("mode", ["online", "partitions"])
@pytest.mark.parametrize("failing", [2, RANKS + 2])
def test_ranks_stand_where_all_of_them_were_after_an_error_in_a_step(
    path: Path, start: Any, mode: str, failing: int
) -> None:
    """One rank has its mini-batch of a step of which another one's fails: it stands before that step, too,
    and all go on together from there, or with the next epoch where there was a step before."""
    whole, calls = Whole.batch, [0]

    def fails_once(self: Whole, made: Any) -> Any:
        calls[0] += 1
        if calls[0] == failing:
            raise OSError("no such device")
        return whole(self, made)

    def work(rank: int, pipe: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Whole, "batch", fails_once)  # local rank 0 makes mini-batches whole
            with shared_loader(path, rank, mode) as loader:
                begun = []
                with pytest.raises(FeatstoreError, match="no such device"):
                    begun.extend(drawn(batch) for batch in loader)
                state = loader.state_dict()
                after = [drawn(batch) for batch in loader]
                loader.load_state_dict(state)
                calls[0] = failing - 2  # again in the first step after a state was loaded
                with pytest.raises(FeatstoreError, match="no such device"):
                    list(loader)
                return begun, state, after, [drawn(batch) for batch in loader]

    steps = (failing - 1) // RANKS
    expected = alone(path, mode, 2)
    for rank, one in enumerate(start(work)):
        kind, found = one.told()
        assert kind == "gave", found
        begun, state, after, rest = found
        assert (state["epoch"], state["next"]) == (0, steps)
        assert begun == expected[rank][0][: steps + (rank < (failing - 1) % RANKS)]
        assert after == expected[rank][min(steps, 1)]
        assert rest == expected[rank][0][steps:]


def test_a_budget_that_is_too_small_says_how_much_is_needed(path: Path, start: Any) -> None:
    """Of the host's memory, whether the loader or a mini-batch handed over needs more; and that works."""

    def work(rank: int, pipe: Any) -> Any:
        memory, refused = 8 << 20, []
        while True:
            try:
                with shared_loader(path, rank, "online", memory=memory) as loader:
                    return refused, [drawn(batch) for batch in loader]
            except BudgetError as error:
                assert error.given_bytes == memory
                assert error.needed_bytes > memory
                refused.append(error.what)
                memory = error.needed_bytes

    expected = alone(path, "online", 1)
    for rank, one in enumerate(start(work)):
        kind, found = one.told()
        assert kind == "gave", found
        assert found[1] == expected[rank][0]
        assert 1 <= len(found[0]) <= 4


@pytest.mark.parametrize("attach", [(), "label"])
def test_a_mini_batch_that_is_larger_than_the_first_says_what_the_host_needs(
    tmp_path: Path, pack: Any, start: Any, attach: Any
) -> None:
    """Of all the memory, whoever has which share of it, and arrays beside them; and that works."""
    nodes = 9000
    ends = np.random.default_rng(3).integers(0, nodes, 150_000)
    edges = np.stack([ends, np.repeat(np.arange(30, 180), 1000)])
    arrays = {"label": np.arange(nodes)}
    rows = np.arange(64 * nodes, dtype=np.float32).reshape(nodes, 64)
    pack(tmp_path / "s", rows, graph=edges, order="ldg", partitions=12, arrays=arrays).close()
    said: dict[str, Any] = {"seeds": np.arange(180), "fanouts": (-1,), "batch_size": 10, "attach": attach}
    said |= {"seeds_in_order": True, "world_size": RANKS, "shared": str(tmp_path)}

    def work(rank: int, pipe: Any) -> Any:
        memory, refused = 14 << 20, []
        while True:
            try:
                with featstore.open(tmp_path / "s").loader(rank=rank, memory=memory, **said) as loader:
                    return refused, [(np.asarray(b.x) == rows[b.n_id]).all() for b in loader]
            except BudgetError as error:
                assert error.given_bytes == memory, (error.given_bytes, memory, error.what)
                assert error.needed_bytes > memory, error.what
                refused.append((error.what, memory))
                memory = error.needed_bytes

    for one in start(work):
        kind, found = one.told()
        assert kind == "gave", found
        assert len(found[1]) == 6
        assert all(found[1])
        assert 2 <= len(found[0]) <= 6, found[0]  # some are larger still


def all_raise(ranks: list[Rank], kind: type[Exception], says: str) -> None:
    for one in ranks:
        how, error = one.told()
        assert how == "raised", error
        assert type(error) is kind
        assert says in str(error)


def test_ranks_that_do_not_go_alike_are_told(path: Path, start: Any) -> None:
    """Other options when it is made; other epochs; one that has closed."""

    def options(rank: int, pipe: Any) -> Any:
        shared_loader(path, rank, "online", batch_size=41 if rank == 2 else 40, seeds=TRAIN.copy())

    ranks = start(options)
    all_raise(ranks, ArgumentError, "batch_size= of local rank 2")
    ranks.clear()

    def epochs(rank: int, pipe: Any) -> Any:
        with shared_loader(path, rank, "online") as loader:
            loader.set_epoch(rank)
            next(iter(loader))

    ranks = start(epochs)
    all_raise(ranks, ArgumentError, "begin epochs 0 from mini-batch 0 on, 1 from")
    ranks.clear()

    def closed(rank: int, pipe: Any) -> Any:
        with shared_loader(path, rank, "online") as loader:
            if rank == 2:
                loader.close()
            next(iter(loader))

    ranks = start(closed)
    all_raise(ranks[2:], ClosedError, "the loader is closed")
    all_raise(ranks[:2], ClosedError, "has closed its loader: all ranks of a host")  # 2, or 1 for that


def test_one_rank_alone_does_not_wait_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "MEET_SECONDS", 0.3)
    with pytest.raises(featstore.errors.WaitTimeoutError, match="of 3 ranks of this host 1 have"):
        shared_loader(path, 0, "online")
    with pytest.raises(featstore.errors.WaitTimeoutError, match="local rank 0 has not"):
        shared_loader(path, 1, "online")
    begin = time.monotonic()  # where several hosts open a store, it may come as much later
    with pytest.raises(featstore.errors.WaitTimeoutError, match="within 1 seconds"):
        line.line_to("\0nobody", lambda late: None, 1)
    assert 1 < time.monotonic() - begin < 20


def test_where_an_iteration_begins_is_told_as_the_loop_counts(
    path: Path, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epoch and step, and how many mini-batches a rank has had before: what hosts compare."""

    def work(rank: int, pipe: Any) -> Any:
        told: list[Any] = []
        monkeypatch.setattr(Mode, "begin", lambda _, *at, handed=None: told.append((*at, handed)))
        with shared_loader(path, rank, "partitions") as loader:
            steps = sum(1 for _ in loader)
            begun = iter(loader)
            assert len(list(islice(begun, 3))) == 3
            begun.close()
            state = loader.state_dict()
            loader.load_state_dict(state)
            for _ in loader:
                pass
        return told, steps

    for rank, one in enumerate(start(work)):
        kind, found = one.told()
        assert kind == "gave", found
        told, steps = found
        expected = [(0, 0, 0), (1, 0, steps), (1, 3, steps + 3)] if rank == 0 else []
        assert told == expected


def test_the_owner_closes_first(path: Path, start: Any) -> None:
    """After an epoch: the others have all of it. In the middle of one: they have as many mini-batches as the
    owner took, and then an error that says why; what they have stays, and so does the last report."""

    def work(rank: int, pipe: Any) -> Any:
        loader = shared_loader(path, rank, "online")
        epoch = [drawn(batch) for batch in (loader if rank == 0 else slowly(loader))]
        begun, taken = iter(loader), []
        if rank == 0:
            taken = [next(begun), next(begun)]
            loader.close()
        else:
            with pytest.raises(ClosedError, match=r"local rank 0, which reads .*, has closed"):
                taken.extend(slowly(begun))
        report = loader.report()
        loader.close()
        return epoch, [drawn(batch) for batch in taken], report

    expected = alone(path, "online", 2)
    for rank, one in enumerate(start(work)):
        kind, found = one.told()
        assert kind == "gave", found
        epoch, taken, report = found
        assert epoch == expected[rank][0]
        assert len(taken) >= 2
        assert taken == expected[rank][1][: len(taken)]
        assert report.batches == len(epoch) + len(taken)
        assert report.bytes_read > 0


def slowly(batches: Any) -> Iterator[Any]:
    for batch in batches:
        time.sleep(0.05)
        yield batch


def test_mini_batches_may_be_kept_and_written_to(path: Path, start: Any) -> None:
    def work(rank: int, pipe: Any) -> Any:
        with shared_loader(path, rank, "online") as loader:
            kept = [batch for _ in range(3) for batch in loader]
        found = [drawn(batch) for batch in kept]
        for batch in kept:
            batch.x += 1
            assert (batch.x == FEATURES[batch.n_id] + 1).all()
        return found

    expected = alone(path, "online", 3)
    for rank, one in enumerate(start(work)):
        kind, found = one.told()
        assert kind == "gave", found
        assert found == [batch for epoch in expected[rank] for batch in epoch]


def test_a_forked_child_has_no_loader(path: Path, start: Any) -> None:
    """It is told so, and takes nothing away from its parent."""

    def work(rank: int, pipe: Any) -> Any:
        with shared_loader(path, rank, "online") as loader:
            begun = iter(loader)
            next(begun)

            def use() -> bool:
                for one in (
                    lambda: next(begun),
                    lambda: next(iter(loader)),
                    loader.report,
                    loader.state_dict,
                ):
                    with pytest.raises(ClosedError, match="process that made it"):
                        one()
                loader.close()
                return True

            assert in_child(use) == 0
            with pytest.raises((TypeError, AttributeError)):
                pickle.dumps(loader)
            return len(list(begun))

    for one in start(work):
        assert one.told() == ("gave", len(TRAIN) // RANKS // 40 - 1)


def test_what_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = featstore.open(path)
    for options, says in (
        ({"shared": True}, "shared='my-run'"),
        ({"shared": "x", "device": "cpu"}, "device= is of one process"),
        ({"shared": "x", "overtake": True}, "leave one of overtake= and shared= out"),
        ({"shared": ""}, "shared"),
    ):
        with pytest.raises(ArgumentError, match=says):
            store.loader(rank=0, world_size=3, **options_of("online", **options))
    with pytest.raises(ArgumentError, match="shared= is for the store to sample"):
        store.loader([np.arange(3)], shared="x")
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ArgumentError, match="LOCAL_RANK=5"):
        store.loader(rank=0, world_size=3, shared="x", **options_of("online"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with store.loader(rank=2, world_size=3, shared=True, **options_of("online")) as loader:
        assert "Host" not in type(loader._mode).__name__, "alone on its host"


def test_slots_give_back_what_was_put_in() -> None:
    """Every dtype and order, empty ones, one object named twice; what is larger says the memory it needs."""
    slots = Slots(4 << 20, 2)
    other = SharedSlots(os.dup(slots.file), slots.bytes)
    rng = np.random.default_rng(0)
    made: list[Any] = [
        rng.random((30, 7)).astype(np.float32), rng.random(5).astype("<M8[us]"), np.zeros((0, 3), np.int8),
        np.asfortranarray(rng.random((4, 9))), rng.random((20, 8))[::2, ::3], np.float16(3), {"a": (1, None)},
        rng.random(6).astype(bfloat16()), np.ones(3, [("a", "<i4"), ("b", "<f8")]), np.array(["x", None]),
    ]  # fmt: skip
    made.append(made[0])
    gone: list[int] = []
    slot = slots.take()
    found = other.read(slot, slots.write(slot, made), lambda: gone.append(1))
    for mine, theirs in zip(made, found, strict=True):
        assert type(mine) is type(theirs)
        if isinstance(mine, np.ndarray):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            np.testing.assert_array_equal(mine, theirs)
    assert found[0] is found[-1]
    last = found[0][3:].T
    del found, theirs
    assert not gone
    del last
    assert gone == [1]
    with pytest.raises(BudgetError) as raised:
        slots.write(slot, np.zeros(slots.bytes, np.uint8))
    assert Slots(raised.value.needed_bytes, 2).write(slot, np.zeros(slots.bytes, np.uint8))
    slots.close()


@pytest.mark.parametrize("mode", ["online", "partitions"])
def test_the_rows_are_in_memory_once(tmp_path: Path, pack: Any, start: Any, mode: str) -> None:
    """What all processes take together (Pss, all read at one time: a page counts whole among those that map
    it, and what one gives up falls to the others) beyond what they took before stays within ``memory``."""
    nodes, memory = 60_000, 96 << 20
    features = np.random.default_rng(0).standard_normal((nodes, 256)).astype(np.float32)  # 59 MiB
    edges = np.random.default_rng(1).integers(0, nodes, (2, 120_000))
    pack(tmp_path / "s", features, graph=edges, order="ldg", partitions=12).close()
    del features

    def work(rank: int, pipe: Any) -> Any:
        how: dict[str, Any] = {"seeds": np.arange(nodes), "fanouts": (2,), "batch_size": 500, "mode": mode}
        store = featstore.open(tmp_path / "s")
        how |= {"rank": rank, "world_size": RANKS, "memory": memory, "shared": str(tmp_path)}
        with store.loader(**how | {"seeds": np.arange(500)}) as loader:
            list(loader)  # kernels and libraries are there
        del loader
        gc.collect()
        closed_later()
        pipe.send("ready")
        pipe.recv()
        count = 0
        with store.loader(**how) as loader:
            for batch in loader:
                count += 1
                del batch
            pipe.send(count)
            pipe.recv()

    ranks = start(work)
    assert [one.told(90) for one in ranks] == ["ready"] * RANKS
    before = together(ranks)
    for one in ranks:
        one.pipe.send("go")
    taken, until = [], time.monotonic() + 90
    while not all(one.pipe.poll() for one in ranks):
        taken.append(together(ranks) - before)
        assert time.monotonic() < until, "it hangs"
        time.sleep(0.01)
    taken.append(together(ranks) - before)  # all loaders are still open
    assert all(one.told() >= nodes // 500 // RANKS for one in ranks)
    for one in ranks:
        one.pipe.send("end")
    assert [one.told(90) for one in ranks] == [("gave", None)] * RANKS
    assert max(taken) < memory * 1.1
    assert max(taken) > memory * 0.15, "there is something to be held"


def together(ranks: list[Rank]) -> int:
    """Bytes that all of the ranks' processes take."""
    return sum(pss(one.process.pid) for one in ranks)


def pss(process: int) -> int:
    """Bytes of a process, of shared memory its share."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    return 1024 * int(next(one for one in text.splitlines() if one.startswith("Pss:")).split()[1])


@pytest.mark.parametrize("tensors", [False, True])
def test_arrays_are_held_by_local_rank_0_alone(
    tmp_path: Path, pack: Any, start: Any, monkeypatch: pytest.MonkeyPatch, tensors: bool
) -> None:
    """And values of nodes and edges come to all, as arrays, or tensors."""
    edges = np.random.default_rng(1).integers(0, NODES, (2, 9000))
    arrays = {"label": np.arange(NODES) % 7, "edge_age": np.arange(9000) * 3}
    with pack(tmp_path / "s", FEATURES, graph=edges, arrays=arrays, edge_ids=True):
        pass
    load = featstore.storage.store.load_array

    def work(rank: int, pipe: Any) -> Any:
        def loaded(root: Path, entry: Any, *more: Any, **said: Any) -> Any:
            assert not rank or not entry.path.endswith(("label", "edge_age")), "it is here a second time"
            return load(root, entry, *more, **said)

        monkeypatch.setattr(featstore.storage.store, "load_array", loaded)
        given: dict[str, Any] = {"attach": ["label", "edge_age"], "tensors": tensors}
        with shared_loader(tmp_path / "s", rank, "online", **given) as loader:
            for batch in loader:
                drawn(batch)
                assert type(batch.label) is type(batch.x)
                assert (np.asarray(batch.label) == batch.n_id % 7).all()
                assert (np.asarray(batch.edge_age) == 3 * batch.e_id).all()
        return "all"

    for one in start(work):
        assert one.told() == ("gave", "all")


def test_other_options_in_pairs_are_seen(path: Path, start: Any) -> None:
    """Arrays inside of others are compared whole, not by how they are shown; whether progress is shown is
    each rank's own affair."""
    one, other = (np.zeros(5000, bool) for _ in range(2))
    one[2500] = other[2501] = True
    prints = [fingerprint({"seeds": ("paper", mask), "nodes": len}) for mask in (one, one.copy(), other)]
    assert prints[0] == prints[1] != prints[2]

    def work(rank: int, pipe: Any) -> Any:
        with shared_loader(path, rank, "online", progress=rank == 0) as loader:
            return sum(1 for _ in loader)

    assert len({one.told() for one in start(work)}) == 1


@pytest.mark.parametrize("option", [{"attach": "label"}, {"replace": True}, {"seeds_in_order": True}])
def test_options_that_another_rank_alone_gives_are_seen(
    tmp_path: Path, pack: Any, start: Any, option: dict[str, Any]
) -> None:
    edges = np.random.default_rng(1).integers(0, NODES, (2, 9000))
    pack(tmp_path / "s", FEATURES, graph=edges, arrays={"label": np.arange(NODES)}).close()

    def work(rank: int, pipe: Any) -> Any:
        return shared_loader(tmp_path / "s", rank, "online", **(option if rank == 1 else {}))

    all_raise(start(work), ArgumentError, f"{next(iter(option))}= of local rank 1 differ")


def test_a_loader_to_validate_with_is_shared_too(path: Path, start: Any) -> None:
    """What was set aside is the host's; mini-batches that are given have a part of it on each rank."""

    def work(rank: int, pipe: Any) -> Any:
        given = {"validation_memory": "32MiB"}
        with shared_loader(path, rank, "online", **given) as loader:
            with loader.validation(seeds=TRAIN[:90], fanouts=(4,), rank=rank, world_size=RANKS) as other:
                made = type(other._mode).__name__, sum(batch.batch_size for batch in other)
            assert sum(1 for _ in loader)
        with shared_loader(path, rank, "online", **given) as loader:
            batches = [np.arange(k, k + 20) for k in range(6)]
            with loader.validation(batches, rank=rank, world_size=RANKS) as other:
                return *made, other.memory_bytes, sum(1 for _ in other)

    for one in start(work):
        assert one.told() == ("gave", ("HostMode", 30, (32 << 20) // RANKS, 2))


@pytest.mark.parametrize("own", [False, True], ids=["as the one it is of", "alone"])
def test_a_loader_to_validate_with_has_its_part_of_what_was_set_aside(
    path: Path, start: Any, own: bool
) -> None:
    """It is of the same ranks, or has what is left for a rank."""

    def work(rank: int, pipe: Any) -> Any:
        with shared_loader(path, rank, "online", validation_memory="33MiB") as loader:
            said: dict[str, Any] = {"world_size": 1} if own else {}
            with loader.validation(seeds=TRAIN[:90], fanouts=(4,), **said) as other:
                seen = sum(batch.batch_size for batch in other)
                return type(other._mode).__name__, other.memory_bytes >> 20, seen, other.world_size

    for one in start(work):
        assert one.told() == ("gave", ("Mode", 11, 90, 1) if own else ("HostMode", 33, 30, RANKS))


def test_what_was_compiled_is_validated_with_by_each_rank(path: Path, start: Any) -> None:
    """Nobody has asked for it to be shared."""
    with featstore.open(path) as store:
        for rank in range(RANKS):
            given = options_of("compiled", rank=rank, world_size=RANKS)
            store.loader(**given, name="kept").close()

    def work(rank: int, pipe: Any) -> Any:
        with shared_loader(path, rank, "online", validation_memory="48MiB") as loader:
            said: dict[str, Any] = {"rank": rank, "world_size": RANKS, "name": "kept", "reuse": True}
            with loader.validation(mode="compiled", **said) as other:
                return other.memory_bytes >> 20, sum(drawn(batch)[-1] for batch in other)

    for one in start(work):
        assert one.told() == ("gave", (16, len(TRAIN) // RANKS))


def test_of_a_rank_alone_the_environment_says_something_else(path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ArgumentError, match="leave shared= out, or rank= and world_size="):
        shared_loader(path, 0, "online", world_size=1)


def test_what_was_compiled_is_not_shared_without_seeds(path: Path) -> None:
    """Which mini-batch is whose would not be known."""
    with featstore.open(path) as store:
        store.loader(**options_of("compiled"), name="alone").close()
        with pytest.raises(ArgumentError, match="shared= is for sampling, and what was compiled is taken as"):
            store.loader(
                mode="compiled", reuse=True, name="alone", shared=str(path), rank=0, world_size=RANKS
            )


# Around links.


def around_links(path: Path, rank: int, **more: Any) -> Any:
    links = np.random.default_rng(2).integers(0, NODES, (2, 131))
    given: dict[str, Any] = {
        "num_neighbors": [3, 2], "edge_label_index": links, "batch_size": 10, "neg_sampling": "binary",
        "shuffle": True, "memory": "96MiB", "rank": rank, "world_size": RANKS,
    }  # fmt: skip
    pyg = pytest.importorskip("featstore.adapters.pyg_links")
    return pyg.LinkNeighborLoader(featstore.open(path), **given | more)


def linked(batch: Any) -> dict[str, Any]:
    assert (batch.x.numpy() == FEATURES[batch.n_id]).all(), "rows are the source's"
    return {name: np.asarray(value).tolist() for name, value in batch.to_dict().items() if name != "x"}


@pytest.mark.parametrize("mode", ["online", "compiled", "rolling"])
def test_around_links_each_rank_gets_what_it_would_have_alone(path: Path, start: Any, mode: str) -> None:
    """From the middle of an epoch on, too; each hands the state of a rank with a loader of its own."""
    pytest.importorskip("torch_geometric")

    def work(rank: int, pipe: Any) -> Any:
        with around_links(path, rank, mode=mode, shared=str(path)) as loader:
            epochs = [[linked(batch) for batch in loader] for _ in range(2)]
            report, all_links = loader.report(), len(loader.dataset)
            loader.set_epoch(1)
            begun = iter(loader)
            again = [linked(batch) for batch in islice(begun, 2)]
            state = loader.loader.state_dict()
            begun.close()
        with around_links(path, rank, mode=mode, shared=str(path)) as loader:
            loader.loader.load_state_dict(state)
            rest = [linked(batch) for batch in loader]
        return epochs, again + rest, report.padded, all_links

    ranks = start(work)
    expected = []
    for rank in range(RANKS):
        with around_links(path, rank, mode="online") as loader:
            expected.append([[linked(batch) for batch in loader] for _ in range(2)])
            padded = loader.report().padded
    for rank, one in enumerate(ranks):
        kind, found = one.told()
        assert kind == "gave", found
        epochs, again, its_padded, all_links = found
        assert epochs[0] == expected[rank][0]
        assert epochs[1] == expected[rank][0 if mode == "compiled" else 1]  # which is repeated
        assert again == epochs[1]
        assert (its_padded, all_links) == (padded, 131)


@pytest.mark.parametrize(
    "other",
    [{"batch_size": 20}, {"seed": 1}, {"num_neighbors": [3]}, {"shuffle": False}, {"links": 1}],
    ids=str,
)
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_a_state_is_of_the_same_links(path: Path, start: Any, other: Any, shared: bool) -> None:
    """Else links would be passed over, or come again, without a word."""
    links = {"edge_label_index": np.arange(262).reshape(2, 131)} if "links" in other else dict(other)

    def work(rank: int, pipe: Any) -> Any:
        said: dict[str, Any] = {"shared": str(path)} if shared else {"world_size": 1}
        with around_links(path, rank, mode="online", **said) as loader:
            for _ in islice(loader, 3):
                pass
            state = loader.loader.state_dict()
        with around_links(path, rank, **said, **links) as loader:
            try:
                loader.loader.load_state_dict(state)
            except ArgumentError as error:
                return "links" in str(error) and "other mini-batches would follow" in str(error)

    for one in start(work, RANKS if shared else 1):
        assert one.told() == ("gave", True)


@pytest.mark.parametrize("shared", [None, ""])
def test_what_is_no_name_is_not_taken_for_one(path: Path, shared: Any) -> None:
    with pytest.raises(ArgumentError, match="shared, unless True or False, "):
        around_links(path, 0, shared=shared)


def test_a_shared_loader_around_links_says_what_it_is(path: Path) -> None:
    with around_links(path, 0, shared="mine", world_size=1) as loader:
        assert "loader(<LinksOfRanks>" in repr(loader)
        assert len(repr(loader)) < 400


def test_ranks_give_the_same_links(path: Path, start: Any) -> None:
    pytest.importorskip("torch_geometric")

    def work(rank: int, pipe: Any) -> Any:
        links = np.arange(20).reshape(2, 10) + (rank == 1)
        return around_links(path, rank, edge_label_index=links, batch_size=2 + (rank == 2), shared=str(path))

    for one in start(work):
        kind, error = one.told()
        assert kind == "raised"
        assert isinstance(error, ArgumentError)
        assert "edge_label_index= of local rank 1" in str(error) or "batch_size= of local rank 2" in str(
            error
        )


@pytest.mark.parametrize("shared", [False, "mine"])
def test_links_that_are_none_are_told_as_such(path: Path, shared: Any) -> None:
    for links in ([[0, 1, 2], [3, 4]], [1, 2], [[1], [NODES]]):
        with pytest.raises(IdError, match=r"links must be|is no node"):
            around_links(path, 0, edge_label_index=links, shared=shared, world_size=1)


def test_a_single_rank_may_say_that_it_shares(path: Path) -> None:
    """Then it has what any loader has, in the memory it was given."""
    given = {"rank": 0, "world_size": 1}
    with around_links(path, **given) as alone, around_links(path, shared="mine", **given) as loader:
        assert len(loader) == len(alone) == 14
        for mine, its in zip(loader, alone, strict=True):
            assert linked(mine) == linked(its)
    with pytest.raises(BudgetError, match="a memory budget of 1,000 bytes is too small") as caught:
        around_links(path, shared="mine", memory=1000, **given)
    needed = caught.value.needed_bytes
    with around_links(path, shared="mine", memory=needed, **given) as loader:
        next(iter(loader))
    with pytest.raises(BudgetError):
        around_links(path, shared="mine", memory=needed - 4096, **given)
