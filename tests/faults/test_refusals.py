"""Whatever the system refuses, and at whichever call: what leaves is one of this package's errors, and it
names the place.

The N-th call that concerns a directory fails, for N = 0, 1, 2 ... until a run is clean, as SQLite's tests do.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from processes import in_child
from refusals import Refusals, refusing

import featstore
from featstore.engine import ENGINES
from featstore.engine import lane as L
from featstore.errors import (
    DeviceError,
    DiskFullError,
    FeatstoreError,
    FormatError,
    IncompleteStoreError,
    StoreLockedError,
)
from featstore.loaders.mega.sets import PartitionSets
from featstore.loaders.online.loader import OnlineLoader
from featstore.loaders.rolling import RollingLoader
from featstore.order import orders  # noqa: F401  (loaded before anything fails)
from featstore.plan.cost import DEFAULT, load_models, save_model
from featstore.storage.disk import Disk
from featstore.storage.generations import writer_lock

NUMBERS = (errno.EIO, errno.EMFILE, errno.ENOMEM, errno.ENOSPC, errno.EACCES, errno.EROFS)
SECONDS = 2.0  # for which new places are looked for, in all parts of a run alike

ROWS = 300
GRAPH = (np.arange(0, 3 * ROWS + 1, 3), np.random.default_rng(0).integers(0, ROWS, 3 * ROWS))


def batches(_: int = 0) -> Iterator[np.ndarray]:
    for k in range(5):
        yield np.arange(20 * k, 20 * k + 40)


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((ROWS, 100), np.float32)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, pack: Any, x: np.ndarray) -> Path:
    root = tmp_path_factory.mktemp("refused")
    pack(root / "s", x, graph=GRAPH, order="ldg", partitions=3, topology=True).close()
    np.save(root / "x.npy", x)
    return root


def read(root: Path, disk: Disk) -> None:
    for engine in ("auto", "mmap"):
        with featstore.open(root / "s") as store, store.reader(memory="4MiB", engine=engine) as reader:
            reader.read([1, 2])


def sample(root: Path, disk: Disk) -> None:
    with featstore.open(root / "s") as store, store.sampler([3, 2], memory="32MiB") as sampler:
        sampler.sample(np.arange(5), 0)


def mega(root: Path, disk: Disk) -> None:
    with featstore.open(root / "s") as store, PartitionSets(store, memory="32MiB") as loader:
        assert len(list(loader)) > 0


def online(root: Path, disk: Disk) -> None:
    with featstore.open(root / "s") as store, OnlineLoader(store, batches, memory="6MiB") as loader:
        assert len(list(loader)) == 5


def verify(root: Path, disk: Disk) -> None:
    from featstore.scrub.store import verify

    verify(root / "s")


def record(root: Path, disk: Disk) -> None:
    featstore.Trace.record(batches(), root / "new" / "t", disk=disk).close()


def pack_anew(root: Path, disk: Disk) -> None:
    featstore.pack(root / "new" / "s", root / "x.npy", graph=GRAPH, order="degree", disk=disk).close()


def save_cache(root: Path, disk: Disk) -> None:
    from featstore.tiers.saved import SavedCache, save

    with featstore.open(root / "s") as store:
        save(store, "c", {"features": lambda: iter([np.arange(9)])}, disk=disk)
        SavedCache(store, "c").close() if hasattr(SavedCache, "close") else SavedCache(store, "c")


def model(root: Path, disk: Disk) -> None:
    save_model("key", DEFAULT)
    assert load_models() == {"key": DEFAULT}


def calibrate(root: Path, disk: Disk) -> None:
    from featstore.measure.calibrate import measure

    result = measure(root / "new", "threads", seconds=0.02, data_bytes_min=1 << 20)
    save_model(result.key, result.model)
    assert [path.name for path in (root / "new").iterdir()] == ["devices.json"]


def bench(root: Path, disk: Disk) -> None:
    from featstore.measure.bench import bench

    with featstore.open(root / "s") as store:
        bench(store, "features", seconds=0.02, memory="32MiB")


def tune(root: Path, disk: Disk) -> None:
    from featstore.tune.tuning import tune

    with featstore.open(root / "s") as store:
        tune(
            store, lambda workers: list(batches()), memory="8MiB", workers=[0], cores=1, seconds=0.2, trials=1
        )


WORK = [read, sample, mega, online, verify, record, pack_anew, save_cache, model, calibrate, bench, tune]


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_the_nth_call_is_refused(
    made: Path, pack: Any, monkeypatch: pytest.MonkeyPatch, work: Callable[[Path, Disk], None]
) -> None:
    disk, threads = pack.keywords["disk"], threading.active_count()
    monkeypatch.setenv("FEATSTORE_CACHE", str(made / "new"))

    def run() -> None:
        shutil.rmtree(made / "new", ignore_errors=True)
        (made / "new").mkdir()
        work(made, disk)

    run()
    with refusing(made) as refusals:
        shutil.rmtree(made / "new")
        (made / "new").mkdir()
        refusals.restart(10**9)
        work(made, disk)
        calls = refusals.count
        refusals.restart(-1)
        assert calls > 3
        end, step = time.monotonic() + SECONDS, max(1, calls // 30)
        rng = np.random.default_rng()  # other places each time: a failure names its own
        places = np.concatenate([rng.permutation(range(k, calls, step)) for k in (0, 1)]).tolist()
        for n in places:
            shutil.rmtree(made / "new", ignore_errors=True)
            (made / "new").mkdir()
            refusals.restart(n, NUMBERS[n % len(NUMBERS)])
            try:
                work(made, disk)
            except FeatstoreError as error:
                assert not isinstance(error, OSError) or error.filename, n
            except BaseException as error:
                error.add_note(f"call {n:,} of {calls:,} was refused")
                raise
            finally:
                where = refusals.failed
                refusals.restart(-1)
            assert where or n >= calls - 20, "how many calls there are may differ by a few"
            if time.monotonic() > end:
                break
    run()
    assert threading.active_count() <= threads + 1, "no thread is left behind"


# The disk is full.


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Refusals]:
    with refusing(tmp_path) as refusals:
        yield refusals


def fails_at_some_write(
    full: Refusals, work: Callable[[], Any], at: int, number: int = errno.ENOSPC
) -> DiskFullError:
    """From this write on, there is no room."""
    full.restart(at, number, for_good=True, writes=True)
    try:
        with pytest.raises(DiskFullError) as caught:
            work()
    finally:
        full.restart(-1)
    assert caught.value.filename
    return caught.value


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_in_the_middle_of_a_recording(tmp_path: Path, full: Refusals, number: int) -> None:
    """What was recorded stays, and is gone on with."""
    rng = np.random.default_rng(0)
    big = [rng.integers(0, 10**6, 300_000) for _ in range(40)]  # more than is held back
    for at in (0, 4, 8) if number == errno.ENOSPC else (4,):
        path = tmp_path / f"t{at}"
        error = fails_at_some_write(full, lambda path=path: featstore.Trace.record(big, path), at, number)  # type: ignore[misc]
        assert str(tmp_path) in str(error)
        assert not (path / "trace.bin").exists()
        resume = (path / "recording.log").exists()
        with featstore.Trace.record(big, path, resume=resume) as trace:
            assert len(trace) == len(big)
            np.testing.assert_array_equal(trace.ids(39)[""], big[39])


def test_in_the_middle_of_a_pack(tmp_path: Path, full: Refusals, x: np.ndarray, pack: Any) -> None:
    """The old store stays; the new one is gone on with, or begun anew."""
    store = tmp_path / "s"
    pack(store, x[:50]).close()
    old = (store / "featstore.json").read_bytes()
    for at in (1, 6, 14):
        fails_at_some_write(full, lambda: pack(store, x, overwrite=True), at)
        assert (store / "featstore.json").read_bytes() == old
        with featstore.open(store) as opened, opened.reader(memory="4MiB") as reader:
            np.testing.assert_array_equal(reader.read([49]), x[[49]])
        resume = any(store.glob("g*.journal"))
        with (
            pack(store, x, overwrite=not resume, resume=resume) as opened,
            opened.reader(memory="4MiB") as reader,
        ):
            np.testing.assert_array_equal(reader.read([299]), x[[299]])
        shutil.rmtree(store)
        pack(store, x[:50]).close()
        old = (store / "featstore.json").read_bytes()


def test_in_the_middle_of_an_epoch_that_writes(
    tmp_path: Path, full: Refusals, x: np.ndarray, pack: Any
) -> None:
    """The episode that trains is whole; the next one's turn raises, the loop does not hang, and goes on when
    there is room."""
    with (
        pack(tmp_path / "s", x) as store,
        RollingLoader(store, batches, memory="32MiB") as loader,
    ):
        under_way = iter(loader)
        first = next(under_way)  # the next episode is prepared from here on
        np.testing.assert_array_equal(first.x, x[:40])
        prepared = loader._episodes[1]
        prepared.result(20)
        seen = [first]
        fails_at_some_write(full, lambda: [seen.append(batch) for batch in under_way], 0)
        assert len(seen) == 10, "two episodes were whole"
        assert all(
            np.array_equal(batch.x, x[ids]) for batch, ids in zip(seen, [*batches(), *batches()], strict=True)
        )
        again = iter(loader)
        assert [np.array_equal(next(again).x, x[ids]) for ids in batches()] == [True] * 5


def test_while_a_trace_is_compiled(tmp_path: Path, full: Refusals, x: np.ndarray, pack: Any) -> None:
    with pack(tmp_path / "s", x) as store:
        options: Any = {"mode": "compiled", "memory": "32MiB", "name": "a"}
        store.loader(list(batches()), **options).close()
        before = (tmp_path / "s" / "packs" / "a" / "featstore.json").read_bytes()
        for at in (0, 5, 25, 60):
            fails_at_some_write(full, lambda: store.loader(list(batches()), **options), at)
            assert (tmp_path / "s" / "packs" / "a" / "featstore.json").read_bytes() == before
        with store.loader(list(batches()), **options) as loader:
            assert [np.array_equal(b.x, x[ids]) for b, ids in zip(loader, batches(), strict=True)] == [
                True
            ] * 5


def test_while_a_model_or_a_cache_is_saved(
    tmp_path: Path, full: Refusals, x: np.ndarray, pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEATSTORE_CACHE", str(tmp_path / "models"))
    save_model("key", DEFAULT)
    fails_at_some_write(full, lambda: save_model("other", DEFAULT), 1)
    assert list(load_models()) == ["key"]
    assert [p.name for p in (tmp_path / "models").iterdir()] == ["devices.json"]
    with pack(tmp_path / "s", x) as store, OnlineLoader(store, batches, memory="6MiB") as loader:
        list(loader)
        loader.save_cache("c")
        before = (tmp_path / "s" / "caches" / "c.cache").read_bytes()
        fails_at_some_write(full, lambda: loader.save_cache("c"), 1)
        assert (tmp_path / "s" / "caches" / "c.cache").read_bytes() == before
        assert len(list(loader)) == 5, "training goes on"


@pytest.mark.parametrize("number", [errno.ENOSPC, pytest.param(errno.EDQUOT, marks=pytest.mark.thorough)])
def test_while_a_device_is_measured(
    tmp_path: Path, full: Refusals, pack: Any, x: np.ndarray, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """What was measured before stays, and nothing is left beside the store."""
    import featstore.measure.calibrate as measuring

    monkeypatch.setenv("FEATSTORE_CACHE", str(tmp_path / "models"))
    monkeypatch.setattr(measuring, "DATA_BYTES_MIN", 1 << 20)
    monkeypatch.setattr(measuring, "WRITTEN_BYTES", (1 << 20, 2 << 20))
    monkeypatch.setattr(measuring, "WRITE_ROUNDS", 1)
    (tmp_path / "store").mkdir()
    pack(tmp_path / "store" / "s", x).close()
    save_model("key", DEFAULT)
    real = measuring.measure
    monkeypatch.setattr(measuring, "measure", lambda *a, **k: real(*a, **k | {"data_bytes_min": 1 << 20}))

    def calibrate() -> None:
        measuring.calibrate(tmp_path / "store" / "s", "threads", seconds=0.02)

    full.restart(10**9, writes=True)
    calibrate()
    writes = full.count
    full.restart(-1)
    save_model("key", DEFAULT)
    before = (tmp_path / "models" / "devices.json").read_bytes()
    assert writes > 20
    for at in [*range(0, writes - 5, 13), *range(writes - 5, writes)]:
        fails_at_some_write(full, calibrate, at, number)
        if at < writes - 1:  # the last makes the new file's name durable
            assert (tmp_path / "models" / "devices.json").read_bytes() == before
        assert load_models()["key"] == DEFAULT
        assert [p.name for p in (tmp_path / "models").iterdir()] == ["devices.json"]
        assert [p.name for p in (tmp_path / "store").iterdir()] == ["s"], "the temporary store is gone"
    cli = pytest.importorskip("featstore_cli.main").cli
    full.restart(writes // 2, number, for_good=True, writes=True)
    given = ["calibrate", str(tmp_path / "store" / "s"), "--engine", "threads", "--seconds", "0.1"]
    result = CliRunner().invoke(cli, given)
    full.restart(-1)
    assert result.exit_code == 1
    assert "disk space" in result.stderr or "quota" in result.stderr, result.stderr
    assert "Traceback" not in result.stderr
    calibrate()


@pytest.mark.parametrize("work", [bench, tune], ids=lambda work: work.__name__)
def test_what_only_reads_needs_no_room(
    made: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[Path, Any], None]
) -> None:
    monkeypatch.setenv("FEATSTORE_CACHE", str(made / "models"))
    with refusing(made) as refusals:
        refusals.restart(0, errno.ENOSPC, for_good=True, writes=True)
        work(made, None)
        assert not refusals.failed


# Limits of the process, and what is not what it was.


def test_no_more_threads(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with featstore.open(made / "s") as store:
        for engine in ENGINES:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", refuse)
                with pytest.raises(
                    DeviceError, match=r"cannot start a thread .* within the limits.*ulimit -u"
                ):
                    store.reader(memory="4MiB", engine=engine)
        with OnlineLoader(store, batches, memory="6MiB") as loader, monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(DeviceError, match="start a thread"):
                next(iter(loader))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(DeviceError, match="start a thread"):
                store.loader(batches, memory="8MiB", mode="rolling", name="again")
        store.loader(batches, memory="8MiB", mode="rolling", name="again").close()  # the name is free


@pytest.mark.parametrize("engine", ["threads", "mmap"])
def test_with_a_few_threads_all_rows_come(made: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """A limit on threads leaves the reader fewer: those do all the work, and are waited for."""
    start, left = threading.Thread.start, [1]

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(f"featstore-{engine}") and not left:
            raise RuntimeError("can't start new thread")
        if thread.name.startswith(f"featstore-{engine}"):
            left.pop()
        start(thread)

    real, ended = L.Lane.error, []

    def error(lane: Any) -> Any:
        ended.append((int(lane.fields[L.DONE]), lane.extents))
        return real(lane)

    with featstore.open(made / "s") as store:
        rng, (name, *_) = np.random.default_rng(0), store.tables
        with store.table(name, memory="64MiB") as table:
            truth = np.asarray(table)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        monkeypatch.setattr(L.Lane, "error", error)
        with store.reader(memory="4MiB", engine=engine, static=None) as reader:
            for number in range(40):
                left[:] = [1] * (number % 3)  # now and then there is room for another
                asked = [rng.integers(0, len(truth), rng.integers(1, 2000)) for _ in range(4)]
                requests = [reader.submit({name: ids}) for ids in asked]
                for request, ids in zip(requests, asked, strict=True):
                    np.testing.assert_array_equal(request.result(30)[name], truth[ids])
    assert ended
    assert all(done == extents for done, extents in ended)


def test_the_limit_of_open_files_is_raised_for_what_needs_it(tmp_path: Path, small_chunks: None) -> None:
    """The soft one, for a table of many chunk files; the hard one stays."""
    rows = np.random.default_rng(0).integers(0, 256, (600, 4096), np.uint8)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def work() -> bool:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
        permutation = np.arange(600)[::-1].copy()
        with (
            featstore.pack(tmp_path / "s", rows, order="permutation", permutation=permutation) as store,
            store.reader(memory="8MiB", static=None) as reader,
        ):
            same = bool((reader.read(np.arange(600)) == rows).all())
            many = store.tables["features"].layout.chunks > 120
        return same and many and resource.getrlimit(resource.RLIMIT_NOFILE)[1] == hard

    assert in_child(work) == 0


def test_no_more_memory(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mmap

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with featstore.open(made / "s") as store, monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refuse)
        for engine in ("uring", "threads"):
            with pytest.raises(DeviceError, match=r"bytes of memory: Cannot allocate.*smaller memory="):
                store.reader(memory="4MiB", engine=engine)


def test_a_store_that_was_moved_is_not_called_corrupt(own: Path) -> None:
    with featstore.open(own) as store:
        own.rename(own.with_name("elsewhere"))
        with pytest.raises(IncompleteStoreError, match=r"was moved or removed.*open it again"):
            store.reader(memory="4MiB")
    with featstore.open(own.with_name("elsewhere")) as store, store.reader(memory="4MiB") as reader:
        reader.read([1])


def test_a_pipe_as_a_lock_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises((DeviceError, FormatError), match=str(tmp_path / "lock")), writer_lock(tmp_path):
        pass


def test_a_lost_race_is_no_unfinished_pack(tmp_path: Path, pack: Any, x: np.ndarray) -> None:
    from click.testing import CliRunner
    from featstore_cli.main import cli

    np.save(tmp_path / "x.npy", x)
    store = tmp_path / "s"
    pack(store, x).close()
    (store / "g000007.journal").write_text("{")  # of the pack that won
    with writer_lock(store):
        result = CliRunner().invoke(cli, ["pack", str(store), "--features", str(tmp_path / "x.npy")])
    assert result.exit_code == 1
    assert "is being written by process" in result.stderr
    assert "--resume" not in result.stderr


def test_the_commands_error_handler_survives_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner
    from featstore_cli.main import cli

    np.save(tmp_path / "x.npy", np.zeros((3, 3), np.float32))
    with refusing(tmp_path / "s") as refusals:
        refusals.restart(0, errno.EIO, for_good=True)
        result = CliRunner().invoke(cli, ["pack", str(tmp_path / "s"), "--features", str(tmp_path / "x.npy")])
        refusals.restart(-1)
    assert result.exit_code == 1, result.exception
    assert "featstore: error: cannot look at" in result.stderr
    assert "EIO" in result.stderr


def test_the_lock_of_another_is_named(tmp_path: Path) -> None:
    with (
        writer_lock(tmp_path),
        pytest.raises(StoreLockedError, match=str(os.getpid())),
        writer_lock(tmp_path),
    ):
        pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads
def test_real_limits_of_a_process(made: Path, tmp_path: Path, pack: Any) -> None:
    x = np.zeros((8000, 100), np.float32)

    def limited(what: int, limit: int, work: Callable[[], Any], words: str) -> bool:
        resource.setrlimit(what, (limit, resource.getrlimit(what)[1]))
        try:
            work()
        except (DeviceError, DiskFullError) as error:
            return words in str(error)
        return False

    def read_without_descriptors() -> None:
        with featstore.open(made / "s") as store:
            with suppress(OSError):
                taken = [os.dup(0) for _ in range(2000)]
                del taken  # numbers: they stay open
            store.reader(memory="4MiB")

    assert (
        in_child(lambda: limited(resource.RLIMIT_FSIZE, 10**6, lambda: pack(tmp_path / "s", x), "ulimit -f"))
        == 0
    )
    assert in_child(lambda: limited(resource.RLIMIT_NOFILE, 1000, read_without_descriptors, "ulimit -n")) == 0
