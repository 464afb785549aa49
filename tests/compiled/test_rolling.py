"""Rolling episodes: endless, fresh, resumed to the mini-batch, within the disk limit; by themselves, and as
a mode of the one loader."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled_support import QuickDisk, rows_of
from processes import own_threads

import featstore
from featstore.compile import choose
from featstore.errors import BudgetError, ClosedError, FeatstoreError, SourceError
from featstore.loaders import rolling as module
from featstore.loaders.rolling import RollingLoader

ROWS, BATCHES = 300, 4
FEATURES = rows_of(ROWS, (300,), np.float32, 1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power cuts."""
    monkeypatch.setattr(module, "Disk", QuickDisk)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[featstore.Store]:
    permutation = np.random.default_rng(0).permutation(ROWS)
    with featstore.pack(
        tmp_path / "s", FEATURES, order="permutation", permutation=permutation, disk=QuickDisk()
    ) as made:
        yield made


def ids_of(episode: int, batch: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([episode, batch]).integers(0, ROWS, 40 + episode % 3)


def sampled(episode: int) -> Iterator[tuple[Any, dict[str, int]]]:
    for batch in range(BATCHES):
        yield ids_of(episode, batch), {"episode": episode, "batch": batch}


def rolling(store: featstore.Store, episode: Callable[[int], Any] = sampled, **options: Any) -> RollingLoader:
    return RollingLoader(store, episode, **({"memory": "64MiB", "disk_door": QuickDisk()} | options))


def check(batches: Iterator[Any], begin: int, count: int) -> None:
    """These are the next ``count`` mini-batches from number ``begin`` on, counted through all episodes."""
    seen = 0
    for number, batch in enumerate(islice(batches, count), begin):
        episode, index = divmod(number, BATCHES)
        assert batch.sample == {"episode": episode, "batch": index}
        assert batch.index == index
        assert batch.x.tobytes() == FEATURES[ids_of(episode, index)].tobytes()
        seen += 1
    assert seen == count


def left(store: featstore.Store) -> list[str]:
    packs = store.path / "packs"
    return sorted(p.name for p in packs.iterdir()) if packs.exists() else []


@pytest.mark.parametrize("residency", ["min", "fixed"])
def test_it_never_ends_and_never_repeats(store: featstore.Store, residency: str) -> None:
    threads = own_threads()
    with rolling(store, residency=residency, cache=30_000, disk="3x") as loader:
        check(iter(loader), 0, 5 * BATCHES + 2)
        assert len(loader.waiting_seconds) == 6
        assert len(loader.preparing_seconds) >= 6
    assert left(store) == []
    assert own_threads() == threads


def test_each_episode_is_sampled_once_and_two_ahead(store: featstore.Store) -> None:
    asked: list[int] = []

    def counted(episode: int) -> Iterator[Any]:
        asked.append(episode)
        return sampled(episode)

    with rolling(store, counted) as loader:
        walk = iter(loader)
        check(walk, 0, 2)
        loader._episodes[1].result()
        loader._traces[2].result()
        assert asked == [0, 1, 2]
        check(walk, 2, 3)
        loader._episodes[2].result()
        loader._traces[3].result()
        assert asked == [0, 1, 2, 3]
        walk.close()
        check(iter(loader), 5, 2 * BATCHES)  # going on samples nothing again
        assert sorted(set(asked)) == asked


def test_the_next_episode_is_sampled_beside_packing(
    store: featstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [threading.Event() for _ in range(8)]
    real = module.compile_trace

    def told(episode: int) -> Iterator[Any]:
        asked[episode].set()
        return sampled(episode)

    @functools.wraps(real)
    def compile_trace(store: Any, trace: Any, name: str, **options: Any) -> Any:
        assert asked[int(packed[0]) + 1].wait(20), "the next one is sampled only when this one is packed"
        packed[0] += 1
        return real(store, trace, name, **options)

    packed = [0]
    monkeypatch.setattr(module, "compile_trace", compile_trace)
    with rolling(store, told) as loader:
        check(iter(loader), 0, 2 * BATCHES + 1)
    assert packed[0] >= 3


def test_breaking_off_goes_on_where_it_was(store: featstore.Store) -> None:
    with rolling(store) as loader:
        done = 0
        for count in (1, 3, 1, 6, 4, 2):
            check(iter(loader), done, count)
            done += count
            gc.collect()
        for batch in loader:
            assert batch.sample["batch"] == done % BATCHES
            break


def test_a_second_iteration_ends_the_first(store: featstore.Store) -> None:
    with rolling(store) as loader:
        first = iter(loader)
        check(first, 0, 2)
        second = iter(loader)
        check(second, 2, 1)
        with pytest.raises(ClosedError):
            next(first)
        check(second, 3, 3)


def test_resuming_at_any_point(store: featstore.Store) -> None:
    states = []
    with rolling(store) as loader:
        states.append(loader.state())
        for _ in islice(loader, 2 * BATCHES + 1):
            states.append(loader.state())
    for done, state in enumerate(states):
        if done in (0, 1, BATCHES - 1, BATCHES, BATCHES + 1, 2 * BATCHES):
            with rolling(store) as loader:
                loader.load_state(state)
                assert loader.state() == state
                check(iter(loader), done, BATCHES)


def test_states_that_do_not_fit(store: featstore.Store) -> None:
    with rolling(store) as loader:
        state = loader.state()
        with pytest.raises(SourceError, match="the state has store = 'nothing'"):
            loader.load_state(state | {"of": {"store": "nothing"}})
        begun = iter(loader)
        check(begun, 0, 2)
        loader.load_state(state)
        with pytest.raises(ClosedError):
            next(begun)
        check(iter(loader), 0, 3)


def test_after_a_kill_it_goes_on_over_what_was_left(store: featstore.Store) -> None:
    """Files of a process that ended in the middle of everything are no obstacle."""
    with rolling(store) as loader:
        check(iter(loader), 0, BATCHES + 1)
        loader._episodes[2].result()
        loader._traces[3].result()
        shutil.copytree(store.path / "packs", store.path / "kept")
        state = loader.state()
    (store.path / "packs").rmdir()
    shutil.move(store.path / "kept", store.path / "packs")
    assert left(store) == ["rolling-0", "rolling-1", "rolling-1.trace", "rolling.rolling"]
    for pack in (store.path / "packs").iterdir():  # one whole, one unfinished
        if pack.name.endswith("-0"):
            (pack / "featstore.json").unlink()
            (pack / "g000001.journal").write_text("{}")
    (store.path / "packs/rolling-1.trace/recording.log").write_bytes(b"\0" * 100)
    with rolling(store) as loader:
        loader.load_state(state)
        check(iter(loader), BATCHES + 1, BATCHES)


def test_an_error_of_the_sampler_comes_at_its_turn(store: featstore.Store) -> None:
    class Mistake(Exception):
        pass

    wrong = [True]

    def failing(episode: int) -> Iterator[Any]:
        for number, batch in enumerate(sampled(episode)):
            if episode == 2 and number == 3 and wrong[0]:
                raise Mistake("in the sampler")
            yield batch

    with rolling(store, failing) as loader:
        walk = iter(loader)
        check(walk, 0, 2 * BATCHES)
        for _ in range(2):
            with pytest.raises(Mistake, match="in the sampler"):
                next(iter(loader))
        wrong[0] = False
        check(iter(loader), 2 * BATCHES, BATCHES + 1)

    def empty(episode: int) -> Iterator[Any]:
        return sampled(episode) if episode == 0 else iter(())

    with rolling(store, empty) as loader:
        walk = iter(loader)
        check(walk, 0, BATCHES)
        with pytest.raises(SourceError, match="nothing to record"):
            next(walk)
    assert left(store) == []


@pytest.mark.parametrize("count", [0, 1, BATCHES])
def test_closing_in_the_middle(store: featstore.Store, count: int) -> None:
    gc.collect()
    threads, files = own_threads(), len(os.listdir("/proc/self/fd"))
    loader = rolling(store)
    walk = iter(loader)
    check(walk, 0, count)
    loader.close()
    loader.close()
    assert left(store) == []
    assert own_threads() == threads
    for late in (walk, iter(loader)):
        with pytest.raises(ClosedError):
            next(late)
    del walk, late, loader
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files


def test_closing_does_not_wait_for_a_long_preparation(store: featstore.Store) -> None:
    sampling = threading.Event()

    def slow(episode: int) -> Iterator[Any]:
        while episode:
            sampling.set()
            time.sleep(0.01)
            yield ids_of(episode, 0)
        yield from (ids for ids, _ in sampled(episode))

    loader = rolling(store, slow)
    next(iter(loader))
    assert sampling.wait(20)
    begin = time.monotonic()
    loader.close()
    assert time.monotonic() - begin < 10
    assert left(store) == []


def test_an_interrupt_while_waiting(store: featstore.Store) -> None:
    import _thread

    def slow(episode: int) -> Iterator[Any]:
        time.sleep(0.3)
        yield from sampled(episode)

    with rolling(store, slow) as loader:
        timer = threading.Timer(0.1, _thread.interrupt_main)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            timer.start()
            next(iter(loader))
        check(iter(loader), 0, BATCHES + 2)


def test_both_episodes_are_within_the_disk_limit(
    store: featstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every moment, what there is of rows in both episodes' files."""
    limit = FEATURES.nbytes
    most = 0

    def rows_on_disk() -> int:
        total = 0
        for part in ("packed", "shared"):
            total += sum(
                p.stat().st_size for p in (store.path / "packs").glob(f"rolling-*/g*/tables/*.{part}/rows/c*")
            )
        return total

    class Watching(QuickDisk):
        def fsync_dir(self, path: Path) -> None:
            nonlocal most
            most = max(most, rows_on_disk())

    with rolling(store, disk="1x", cache=0, disk_door=Watching()) as loader:
        check(iter(loader), 0, 4 * BATCHES + 1)
    assert 0.5 * limit < most <= limit + 4 * 4096  # the last page of a file is written whole


@pytest.mark.parametrize(("columns", "packed"), [(30, True), (2048, False)])
def test_rows_are_written_where_that_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int, packed: bool
) -> None:
    """Small ones, of which a random read brings a page each; not rows of pages, on a machine of few cores."""
    monkeypatch.setattr(choose, "available_cores", lambda: 2)
    features = rows_of(4000, (columns,), np.float32, 2)
    episodes = [[np.random.default_rng([e, k]).integers(0, 4000, 50) for k in range(4)] for e in range(3)]
    with (
        featstore.pack(tmp_path / "s", features, disk=QuickDisk()) as store,
        rolling(store, episodes.__getitem__, cache=0) as loader,
    ):
        walk, written = iter(loader), []
        for number in range(12):
            batch = next(walk)
            np.testing.assert_array_equal(batch.x, features[episodes[number // 4][number % 4]])
            files = [n for at, _, n in os.walk(store.path / "packs") if at.endswith("features.packed/rows")]
            written.append(sum(name.startswith("c") for names in files for name in names))
        walk.close()
    assert (max(written) > 0) is packed


def test_no_disk_at_all(store: featstore.Store) -> None:
    for disk in (0, 1, "0x"):
        with rolling(store, disk=disk) as loader:
            check(iter(loader), 0, BATCHES + 1)


def test_too_little_memory(store: featstore.Store) -> None:
    with rolling(store, memory="2MiB") as loader, pytest.raises(BudgetError):
        next(iter(loader))
    assert left(store) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads
def test_a_forked_child_removes_nothing(store: featstore.Store) -> None:
    with rolling(store) as loader:
        walk = iter(loader)
        check(walk, 0, 1)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with pytest.raises(ClosedError):
                    next(walk)
                with pytest.raises(ClosedError):
                    next(iter(loader))
                loader.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        check(walk, 1, BATCHES)


# As a mode of the one loader, beside its sibling that is compiled once.


def batches_of(episode: int) -> list[Any]:
    return list(sampled(episode))


def test_one_epoch_laid_out_and_repeated(store: featstore.Store) -> None:
    with store.loader(batches_of, mode="compiled", memory="64MiB", disk="2x", name="once") as loader:
        assert len(loader) == BATCHES
        for _ in range(2):
            check(iter(loader), 0, BATCHES)
    assert left(store) == ["once"]


def test_fresh_epochs_laid_out(store: featstore.Store) -> None:
    with store.loader(sampled, mode="rolling", memory="64MiB", disk="2x") as loader:
        check((batch for _ in range(3) for batch in loader), 0, 3 * BATCHES)
    assert left(store) == []


def test_what_is_compiled_is_used_again(store: featstore.Store) -> None:
    options: dict[str, Any] = {"mode": "compiled", "memory": "64MiB", "reuse": True}
    store.loader(batches_of(0), **(options | {"reuse": False})).close()
    with store.loader(**options) as loader:
        check(iter(loader), 0, BATCHES)
    (store.path / "packs/unfinished").mkdir()
    with store.loader(batches_of(0), name="unfinished", **options) as loader:
        check(iter(loader), 0, BATCHES)


@pytest.mark.parametrize("mode", ["compiled", "rolling"])
def test_a_sampler_that_is_iterable_and_callable_is_gone_through(store: featstore.Store, mode: str) -> None:
    """PyG's loaders are both; called, they sample for the nodes they are given."""

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            return sampled(0)

        def __call__(self, nodes: Any) -> Any:
            raise AssertionError("called")

    with store.loader(Loader(), mode=mode, memory="64MiB") as loader:
        for _ in range(2):
            check(iter(loader), 0, BATCHES)


@pytest.mark.parametrize("mode", ["compiled", "rolling"])
def test_what_is_refused_leaves_nothing(store: featstore.Store, mode: str) -> None:
    with pytest.raises(SourceError, match="only once"):
        store.loader(sampled(0), mode=mode, memory="64MiB")
    with pytest.raises(SourceError, match="device="):
        store.loader(batches_of(0), mode=mode, memory="64MiB", device_memory=1000)
    with pytest.raises(FeatstoreError, match="not allowed"):
        store.loader(batches_of(0), mode=mode, memory="64MiB", name="../x")
    assert left(store) == []


def test_mini_batches_of_pyg_are_compiled(tmp_path: Path) -> None:
    pyg = pytest.importorskip("torch_geometric.data")
    torch = pytest.importorskip("torch")
    edges = torch.from_numpy(np.random.default_rng(0).integers(0, ROWS, (2, 900)))
    data = pyg.Data(x=torch.from_numpy(np.nan_to_num(FEATURES)), edge_index=edges, y=torch.arange(ROWS))
    batches = [pyg.Data(n_id=torch.from_numpy(ids_of(0, k)), edge_index=edges[:, :k]) for k in range(BATCHES)]
    with (
        featstore.pack(tmp_path / "s", data) as store,
        store.loader(batches, mode="compiled", memory="64MiB") as loader,
    ):
        for _ in range(2):
            for k, batch in enumerate(loader):
                assert type(batch.sample) is pyg.Data
                assert torch.equal(batch.x, data.x[batches[k].n_id])
                assert torch.equal(batch.edge_index, edges[:, :k])


def test_closing_that_is_interrupted_is_gone_on_with(
    store: featstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = rolling(store, name="again")
    check(iter(loader), 0, BATCHES)
    real, calls = loader._sampler.end, []

    def end() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real()

    monkeypatch.setattr(loader._sampler, "end", end)
    with pytest.raises(KeyboardInterrupt):
        loader.close()
    loader.close()
    loader.close()
    assert len(calls) == 2
    assert not [path for path in (store.path / "packs").iterdir() if path.name.startswith("again")]
    rolling(store, name="again").close()  # the name is free


def test_two_threads_that_close_at_once(store: featstore.Store) -> None:
    """As a rank's loop and the thread that hears that another rank has died."""
    for _ in range(5):
        loader = rolling(store, name="twice")
        check(iter(loader), 0, 1)
        errors: list[BaseException] = []

        def close(loader: RollingLoader = loader, errors: list[BaseException] = errors) -> None:
            try:
                loader.close()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=close) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert errors == []
        assert not [path for path in (store.path / "packs").iterdir() if path.name.startswith("twice")]
