"""The reader: what it accepts and returns, requests under way, ending, and life in other threads and processes."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import featstore
from featstore import reader as reader_module
from featstore.cost import DeviceModel
from featstore.errors import BudgetError, CancelledError, ClosedError, IdError
from featstore.reader import IN_FLIGHT_MAX, Reader

MEMORY = "4MiB"


@pytest.fixture
def reader(store: featstore.Store, engine: str) -> Any:
    with store.reader(memory=MEMORY, engine=engine) as made:
        yield made


class Gate:
    """Holds an engine's lanes back until it is opened, so that a test can look at requests under way."""

    def __init__(self, reader: Reader) -> None:
        engine = reader._engine
        assert engine is not None
        self._start: Callable[[Any], None] = engine.start
        self._held: list[Any] = []
        self._open = False
        self._lock = threading.Lock()
        self.arrived = threading.Semaphore(0)
        engine.start = self.start  # type: ignore[method-assign]

    def start(self, lane: Any) -> None:
        with self._lock:
            if not self._open:
                self._held.append(lane)
                self.arrived.release()
                return
        self._start(lane)

    def open(self) -> None:
        with self._lock:
            self._open = True
        for lane in self._held:
            self._start(lane)


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


# What goes in and comes out.


@pytest.mark.parametrize(
    "ids",
    [[], [[]], 7, [7], [7, 7, 7], [999, 0, 500, 0], np.arange(1000), np.arange(1000)[::-3], np.arange(24).reshape(2, 3, 4), range(5, 9)],
)
def test_results_have_the_shape_of_the_ids(reader: Reader, features: np.ndarray, ids: Any) -> None:
    got = reader.read(ids)
    expected = features[np.asarray(ids, np.int64)]
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert got.flags.c_contiguous
    assert got.flags.writeable
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(reader.submit(ids).result(10), expected)


def test_tensors_give_tensors(reader: Reader, features: np.ndarray) -> None:
    ids = torch.tensor([[3, 1], [1, 999]])
    got = reader.read(ids)
    assert isinstance(got, torch.Tensor)
    assert got.dtype == torch.float32
    assert torch.equal(got, torch.from_numpy(features[ids.numpy()]))
    assert got.data_ptr() % 64 == 0
    assert reader.read(torch.empty(0, dtype=torch.int64)).shape == (0, 100)


def test_out_is_filled_and_returned(reader: Reader, features: np.ndarray) -> None:
    ids = np.array([5, 5, 999])
    out = np.zeros((3, 100), np.float32)
    assert reader.read(ids, out=out) is out
    np.testing.assert_array_equal(out, features[ids])
    tensor = torch.zeros(3, 100)
    assert reader.read(ids, out=tensor) is tensor
    assert torch.equal(tensor, torch.from_numpy(features[ids]))
    larger = np.zeros((10, 100), np.float32)
    reader.read(ids, out=larger[4:7])
    np.testing.assert_array_equal(larger[4:7], features[ids])
    assert not larger[:4].any()
    assert not larger[7:].any()
    with pytest.raises(ValueError, match="out must be"):
        reader.read(ids, out=np.zeros((2, 100), np.float32))


@pytest.mark.parametrize("bad", [[1000], [-1], [0, 5, 2**40], np.array([2**63], np.uint64), -(2**63)])
def test_ids_out_of_range(reader: Reader, features: np.ndarray, bad: Any) -> None:
    with pytest.raises(IdError, match="out of range"):
        reader.read(bad)
    with pytest.raises(IdError, match="out of range"):
        reader.submit(bad).result(10)
    with pytest.raises(IdError, match="out of range"):
        reader.plan(bad)
    with pytest.raises(IndexError):
        reader.read(bad)
    np.testing.assert_array_equal(reader.read([1]), features[[1]])


def test_the_error_names_id_and_table(reader: Reader) -> None:
    with pytest.raises(IdError, match=r"node id 1000 is out of range: table 'features' has 1,000 rows \(ids 0 to 999\)"):
        reader.read([5, 1000, 2000])
    huge = np.zeros(200_000, np.int64)  # cut into ranges
    huge[150_000] = -3
    with pytest.raises(IdError, match="node id -3 "):
        reader.read(huge)


@pytest.mark.parametrize("bad", [[1.5], [True], ["a"], None])
def test_what_is_no_id(reader: Reader, bad: Any) -> None:
    for call in (reader.read, reader.submit, reader.plan):
        with pytest.raises(IdError, match="must be integers"):
            call(bad)


@pytest.fixture
def two_tables(tmp_path: Path, small_chunks: None, pack: Any) -> Any:
    rng = np.random.default_rng(5)
    data = {
        "paper": rng.standard_normal((700, 64), np.float32),
        "author": rng.standard_normal((300, 3, 5)).astype(ml_dtypes.bfloat16),
        "none": np.empty((0, 4), np.int8),
    }
    order = {"paper": "permutation"}
    with pack(tmp_path / "many", data, order=order, permutation={"paper": rng.permutation(700)}) as store:
        yield store, data


def test_several_tables_at_once(two_tables: Any, engine: str) -> None:
    store, data = two_tables
    with store.reader(memory=MEMORY, engine=engine) as reader:
        ids = {"paper": [699, 0, 0], "author": np.array([[299], [1]]), "none": []}
        got = reader.read(ids)
        assert list(got) == list(ids)
        for name, wanted in ids.items():
            np.testing.assert_array_equal(got[name], data[name][np.asarray(wanted, np.int64)])
        mixed = reader.read({"author": torch.tensor([2, 3]), "paper": [1]})
        assert mixed["author"].dtype == torch.bfloat16
        assert torch.equal(mixed["author"].view(torch.int16), torch.from_numpy(data["author"][[2, 3]].view(np.int16)))
        assert isinstance(mixed["paper"], np.ndarray)
        out = {"paper": np.zeros((1, 64), np.float32)}
        got = reader.read({"author": [0], "paper": [4]}, out=out)
        assert got["paper"] is out["paper"]
        np.testing.assert_array_equal(out["paper"], data["paper"][[4]])
        assert reader.read({}) == {}
        plan = reader.plan({"paper": [1, 2], "author": [3]})
        assert [t.table for t in plan.tables] == ["paper", "author"]
        assert plan.reads == sum(t.reads for t in plan.tables)


def test_tables_must_be_named_and_known(two_tables: Any) -> None:
    store, data = two_tables
    with store.reader(memory=MEMORY) as reader:
        with pytest.raises(IdError, match=r"3 tables; say which: \{'paper': ids\}"):
            reader.read([1])
        with pytest.raises(KeyError, match="no table 'venue'; it has 'paper', 'author', 'none'"):
            reader.read({"venue": [1]})
        with pytest.raises(ValueError, match="'author'"):
            reader.read({"paper": [1]}, out={"author": np.zeros((1, 3, 5), ml_dtypes.bfloat16)})
        with pytest.raises(IdError, match=r"table 'none' has 0 rows \(none\)"):
            reader.read({"none": [0]})
    with store.reader(memory=MEMORY, tables=["author"]) as reader:
        np.testing.assert_array_equal(reader.read([7]), data["author"][[7]])
        with pytest.raises(KeyError, match="no table 'paper'"):
            reader.read({"paper": [1]})
    with pytest.raises(KeyError, match="no table 'venue'"):
        store.reader(tables=["venue"])


@pytest.mark.parametrize("options", [{"queue_depth": 0}, {"engine": "aio"}, {"memory": "lots"}, {"memory": 0}, {"static": "warm"}])
def test_bad_options(store: featstore.Store, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        store.reader(**options)


# Plans and statistics.


def test_a_plan_says_what_a_read_then_does(store: featstore.Store, engine: str) -> None:
    model = DeviceModel(2 * 4096e-9, 1e-9, 1e-4)
    with store.reader(memory=MEMORY, engine=engine, model=model, static=np.arange(50)) as reader:
        for ids in (np.arange(1000), np.array([1, 1, 700]), np.arange(0, 1000, 90), np.arange(50), np.repeat(np.arange(1000), 60)):
            plan, before = reader.plan(ids), reader.stats()
            reader.read(ids)
            stats = reader.stats().since(before)
            assert (plan.reads, plan.bytes_read) == (stats.reads, stats.bytes_read)
            assert plan.hits == dict(stats.hits) == {"static": int((ids < 50).sum())}
            assert stats.rows_asked == len(ids)
            assert stats.bytes_asked == plan.bytes_asked == len(ids) * 400
            assert stats.requests == 1
            if len(ids) < 50_000:
                assert stats.forecast_seconds == pytest.approx(plan.forecast_seconds)
            table = plan.tables[0]
            assert table.rows_missed == len(ids) - plan.hits["static"]
            assert table.distinct_rows == len(np.unique(ids[ids >= 50]))
            assert "forecast" in str(plan)
            assert plan.to_dict()["tables"][0]["reads"] == plan.reads
        assert sum(n for _, n in reader.stats().latency_histogram) == reader.stats().reads
        assert 0 < reader.stats().hit_rate < 1


def test_large_requests_read_each_page_once(store: featstore.Store) -> None:
    """Cut by ranges of rows, a request of many pieces reads hardly more than the table."""
    with store.reader(memory="700KiB") as reader:
        assert reader.budget.piece_ids_max == 1024
        ids = np.random.default_rng(0).permutation(np.repeat(np.arange(1000), 12))
        plan = reader.plan(ids)
        assert plan.bytes_read < 1.5 * 400_000
        assert plan.reads < 200


# Requests under way.


def test_many_requests_from_several_threads(reader: Reader, features: np.ndarray) -> None:
    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        waiting = []
        for _ in range(25):
            ids = rng.integers(0, 1000, rng.integers(0, 400))
            waiting.append((ids.copy(), reader.submit(ids)))
            ids[:] = 0  # the request has its own copy
        for ids, request in waiting:
            np.testing.assert_array_equal(request.result(20), features[ids])
            assert request.done()
            assert request.exception() is None
            assert not request.cancel()
            assert not request.cancelled()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_concurrent_reads(reader: Reader, features: np.ndarray) -> None:
    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(25):
            ids = rng.integers(0, 1000, rng.integers(1, 3000))
            np.testing.assert_array_equal(reader.read(ids), features[ids])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert reader.stats().requests == 100


def test_timeouts(store: featstore.Store, features: np.ndarray) -> None:
    with store.reader(memory=MEMORY) as reader:
        gate = Gate(reader)
        request = reader.submit([1, 2])
        for wait in (request.result, request.exception):
            with pytest.raises(TimeoutError):
                wait(0.01)
        assert not request.done()
        gate.open()
        np.testing.assert_array_equal(request.result(10), features[[1, 2]])


def test_cancel_before_a_request_is_planned(store: featstore.Store, features: np.ndarray) -> None:
    with store.reader(memory=MEMORY) as reader:
        gate = Gate(reader)
        requests = [reader.submit([k]) for k in range(8)]  # more than may be under way: the last ones wait
        for request in requests[2:]:
            assert request.cancel()
        assert not requests[7].cancelled()  # not before it is done
        gate.open()
        for k in (0, 1):
            np.testing.assert_array_equal(requests[k].result(10), features[[k]])
        for request in requests[2:]:
            with pytest.raises(CancelledError):
                request.result(10)
            assert isinstance(request.exception(1), CancelledError)
            assert request.cancelled()
            assert request.done()
        np.testing.assert_array_equal(reader.read([5]), features[[5]])


def test_cancel_while_reads_are_under_way(reader: Reader, features: np.ndarray) -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        ids = rng.integers(0, 1000, 60_000)
        kept, dropped = reader.submit(ids[:3000]), reader.submit(ids)
        dropped.cancel()
        assert isinstance(dropped.exception(20), CancelledError | None)
        assert dropped.cancelled() == (dropped.exception() is not None)
        np.testing.assert_array_equal(kept.result(20), features[ids[:3000]])
    np.testing.assert_array_equal(reader.read(ids), features[ids])


def test_await(reader: Reader, features: np.ndarray) -> None:
    async def main() -> None:
        requests = [reader.submit([k, k + 1]) for k in range(10)]
        for k, rows in enumerate(await asyncio.gather(*requests)):
            np.testing.assert_array_equal(rows, features[[k, k + 1]])
        again = await requests[0]
        np.testing.assert_array_equal(again, features[[0, 1]])
        with pytest.raises(IdError):
            await reader.submit([1000])

    asyncio.run(main())


def test_a_cancelled_await_cancels_the_request(store: featstore.Store, features: np.ndarray) -> None:
    """A timeout in asyncio must not end the request before its reads: they still write into its rows."""
    with store.reader(memory=MEMORY) as reader:
        gate = Gate(reader)

        async def main() -> featstore.Request:
            request = reader.submit([1, 2, 3])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(request, 0.05)
            return request

        request = asyncio.run(main())
        assert not request.done()
        gate.open()
        assert isinstance(request.exception(10), CancelledError)
        assert request.cancelled()
        np.testing.assert_array_equal(reader.read([4]), features[[4]])


def test_submit_blocks_when_too_many_are_under_way(store: featstore.Store) -> None:
    with store.reader(memory=MEMORY) as reader:
        gate = Gate(reader)
        requests = [reader.submit([k]) for k in range(IN_FLIGHT_MAX)]
        more: list[Any] = []
        thread = threading.Thread(target=lambda: more.append(reader.submit([0])))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        gate.open()
        thread.join(10)
        assert not thread.is_alive()
        for request in [*requests, *more]:
            request.result(10)


def test_a_failed_start_fails_the_request(monkeypatch: pytest.MonkeyPatch, reader: Reader, features: np.ndarray) -> None:
    """Whatever goes wrong in an engine's start, the request ends with it, and the next one is served."""
    def fail(lane: Any) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(reader._engine, "start", fail)
        for _ in range(5):
            with pytest.raises(RuntimeError, match="no"):
                reader.submit([1]).result(10)
    np.testing.assert_array_equal(reader.read([1]), features[[1]])


# Ending.


def test_use_after_close(store: featstore.Store, engine: str) -> None:
    reader = store.reader(memory=MEMORY, engine=engine)
    reader.close()
    reader.close()
    for call in (reader.read, reader.submit, reader.plan):
        with pytest.raises(ClosedError, match="closed"):
            call([1])
    with pytest.raises(ClosedError):
        reader.stats()
    with pytest.raises(ValueError):
        reader.read([1])


def test_close_waits_for_requests_under_way(store: featstore.Store, features: np.ndarray, engine: str) -> None:
    for _ in range(5):
        reader = store.reader(memory=MEMORY, engine=engine)
        ids = np.random.default_rng(0).integers(0, 1000, 20_000)
        requests = [reader.submit(ids) for _ in range(10)]
        reader.close()
        assert all(request.done() for request in requests)
        for request in requests:
            np.testing.assert_array_equal(request.result(0), features[ids])


def test_close_while_a_submit_blocks(store: featstore.Store) -> None:
    reader = store.reader(memory=MEMORY)
    gate = Gate(reader)
    requests = [reader.submit([k]) for k in range(IN_FLIGHT_MAX)]
    outcome: list[Any] = []

    def blocked() -> None:
        try:
            outcome.append(reader.submit([0]))
        except ClosedError as error:
            outcome.append(error)

    thread, closer = threading.Thread(target=blocked), threading.Thread(target=reader.close)
    thread.start()
    closer.start()
    assert eventually(lambda: reader._closed)
    gate.open()
    for waiting in (thread, closer):
        waiting.join(10)
        assert not waiting.is_alive()
    assert all(request.done() for request in requests)
    assert isinstance(outcome[0], ClosedError)


def test_close_against_readers_in_other_threads(store: featstore.Store, features: np.ndarray, engine: str) -> None:
    """Every read either gives right rows or says that the reader is closed; none hangs."""
    for round_ in range(10):
        reader = store.reader(memory=MEMORY, engine=engine)
        failed: list[BaseException] = []

        def work(seed: int, reader: Reader = reader, failed: list[BaseException] = failed) -> None:
            ids = np.random.default_rng(seed).integers(0, 1000, 200)
            try:
                while True:
                    np.testing.assert_array_equal(reader.read(ids), features[ids])
                    np.testing.assert_array_equal(reader.submit(ids).result(10), features[ids])
            except ClosedError:
                pass
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.002 * round_)
        reader.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert not failed


def test_a_forgotten_reader_closes_itself(store: featstore.Store, engine: str) -> None:
    gc.collect()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        reader = store.reader(memory=MEMORY, engine=engine)
        reader.submit([1, 2, 3]).result(10)
        del reader
        gc.collect()
    assert eventually(lambda: (len(os.listdir("/proc/self/fd")), threading.active_count()) == (descriptors, threads))


def test_failing_to_open_leaves_nothing(store: featstore.Store) -> None:
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for options in ({"memory": 1000}, {"static": [10_000]}, {"static": "degree"}, {"engine": "no"}, {"tables": ["no"]}):
        with pytest.raises((ValueError, KeyError, IdError)):
            store.reader(**options)
    gc.collect()
    assert eventually(lambda: (len(os.listdir("/proc/self/fd")), threading.active_count()) == (descriptors, threads))


def test_readers_outlive_their_store(store: featstore.Store, features: np.ndarray, engine: str) -> None:
    with store.reader(memory=MEMORY, engine=engine) as reader:
        store.close()
        np.testing.assert_array_equal(reader.read([3]), features[[3]])


# Memory.


@pytest.mark.parametrize("memory", ["700KiB", "4MiB", "1GiB"])
@pytest.mark.parametrize("static", [None, [1, 2, 3]])
def test_memory_sums_to_the_budget(store: featstore.Store, memory: str, static: Any) -> None:
    with store.reader(memory=memory, static=static) as reader:
        uses = reader.memory()
        assert sum(uses.values()) == reader.budget.memory_bytes
        assert min(uses.values()) >= 0
        assert uses["row_maps"] == 4000
        assert uses["page_checksums"] == 4 * store.tables["features"].layout.pages
        assert (uses["tiers"] > 0) == (static is not None)


@pytest.mark.parametrize("verify", [True, False])
def test_too_small_a_budget_names_the_smallest_that_works(store: featstore.Store, features: np.ndarray, verify: bool, engine: str) -> None:
    with pytest.raises(BudgetError) as caught:
        store.reader(memory=1, verify=verify)
    needed = caught.value.needed_bytes
    assert f"{needed:,} bytes" in str(caught.value)
    with pytest.raises(BudgetError):
        store.reader(memory=needed - 1, verify=verify)
    with store.reader(memory=needed, verify=verify, engine=engine) as reader:
        ids = np.random.default_rng(0).integers(0, 1000, 5000)
        np.testing.assert_array_equal(reader.read(ids), features[ids])
        assert sum(reader.memory().values()) == needed


# Other processes.


def child_reads(reader: Reader, ids: np.ndarray, expected: np.ndarray) -> int:
    return int(np.array_equal(reader.read(ids), expected) and np.array_equal(reader.submit(ids).result(20), expected))


def wait_for(pid: int, seconds: float = 20.0) -> int:
    """The child's exit status; a child that hangs is ended and counts as -1."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -1


def in_child(work: Callable[[], Any]) -> int:
    """0 if ``work`` ran in a forked child and gave something true."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return wait_for(pid)


def test_a_forked_child_reads_and_so_does_its_parent(reader: Reader, features: np.ndarray) -> None:
    ids = np.array([999, 0, 5, 5])
    expected = features[ids]
    for before in (True, False):
        if before:
            reader.read([0])
        assert in_child(lambda: child_reads(reader, ids, expected)) == 0
        np.testing.assert_array_equal(reader.read(ids), expected)

    def closes() -> bool:
        reader.read(ids)
        reader.close()
        return True

    assert in_child(closes) == 0
    np.testing.assert_array_equal(reader.read(ids), expected)


def test_a_child_forked_while_requests_are_under_way(store: featstore.Store, features: np.ndarray) -> None:
    ids = np.arange(100)
    with store.reader(memory=MEMORY) as reader:
        gate = Gate(reader)
        requests = [reader.submit(ids) for _ in range(6)]
        assert gate.arrived.acquire(timeout=10)
        assert in_child(lambda: child_reads(reader, ids, features[ids])) == 0

        def closes() -> bool:
            reader.close()  # unused in the child: nothing to wait for
            return True

        assert in_child(closes) == 0
        gate.open()
        for request in requests:
            np.testing.assert_array_equal(request.result(10), features[ids])


def test_threads_of_a_forked_child_share_one_engine(reader: Reader, features: np.ndarray) -> None:
    ids = np.arange(200)

    def work() -> bool:
        barrier = threading.Barrier(6)

        def read(_: int) -> bool:
            barrier.wait()
            return bool(child_reads(reader, ids, features[ids]))

        with ThreadPoolExecutor(6) as pool:
            return all(pool.map(read, range(6)))

    assert in_child(work) == 0


def test_pickles(store: featstore.Store, features: np.ndarray, engine: str) -> None:
    with store.reader(memory=MEMORY, engine=engine, static=[1, 2]) as reader, pickle.loads(pickle.dumps(reader)) as copy:
        assert copy.engine.name == engine
        assert copy.memory() == reader.memory()
        np.testing.assert_array_equal(copy.read([1, 999]), features[[1, 999]])
    with pickle.loads(pickle.dumps(store)) as again:
        assert again.uuid == store.uuid
        assert again.manifest == store.manifest


def serve(reader: Reader, jobs: Any, results: Any) -> None:
    while (ids := jobs.get()) is not None:
        results.put((ids, reader.read(ids)))
    reader.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_two_workers_as_of_a_data_loader(store: featstore.Store, features: np.ndarray, method: str) -> None:
    context = multiprocessing.get_context(method)
    with store.reader(memory=MEMORY, static=[0, 1]) as reader:
        jobs, results = context.SimpleQueue(), context.SimpleQueue()
        workers = [context.Process(target=serve, args=(reader, jobs, results)) for _ in range(2)]
        for worker in workers:
            worker.start()
        batches = [np.random.default_rng(k).integers(0, 1000, 50) for k in range(10)]
        for batch in [*batches, None, None]:
            jobs.put(batch)
        for _ in batches:
            ids, rows = results.get()
            np.testing.assert_array_equal(rows, features[ids])
        for worker in workers:
            worker.join(20)
            assert worker.exitcode == 0


# Access.


def test_a_file_system_without_direct_reads_is_said(monkeypatch: pytest.MonkeyPatch, store: featstore.Store, features: np.ndarray) -> None:
    monkeypatch.setattr("featstore.engine.files.direct_refusal", lambda path, size: "the file system refuses O_DIRECT")
    for engine in ("uring", "threads", "mmap"):
        with store.reader(memory=MEMORY, engine=engine) as reader:
            if engine == "mmap":
                assert (reader.access, reader.access_because) == ("mapped", "")
            else:
                assert (reader.access, reader.access_because) == ("buffered", "the file system refuses O_DIRECT")
                assert reader.stats().access == "buffered"
            np.testing.assert_array_equal(reader.read(np.arange(1000)), features)


def test_a_store_in_memory(features: np.ndarray, tmp_path: Path, engine: str, pack: Any) -> None:
    shm = Path("/dev/shm")
    folder = (shm if shm.is_dir() and os.access(shm, os.W_OK) else tmp_path) / f"featstore-test-{os.getpid()}-{engine}"
    try:
        with pack(folder, features) as store, store.reader(memory=MEMORY, engine=engine) as reader:
            assert reader.access in ("direct", "buffered", "mapped")
            assert bool(reader.access_because) == (reader.access == "buffered")
            np.testing.assert_array_equal(reader.read([999, 3]), features[[999, 3]])
    finally:
        import shutil

        shutil.rmtree(folder)


def test_the_engine_says_why(monkeypatch: pytest.MonkeyPatch, store: featstore.Store, features: np.ndarray) -> None:
    def refuse() -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr("featstore.engine.uring.probe", refuse)
    with store.reader(memory=MEMORY) as reader:
        assert reader.engine.name == "threads"
        assert "Operation not permitted" in reader.engine.because
        np.testing.assert_array_equal(reader.read([4]), features[[4]])
    with pytest.raises(OSError, match="not permitted"):
        store.reader(memory=MEMORY, engine="uring")


def test_large_lookups_use_helper_threads(
    monkeypatch: pytest.MonkeyPatch, store: featstore.Store, features: np.ndarray, engine: str
) -> None:
    monkeypatch.setattr(reader_module, "_SPLIT_BYTES", 1)
    with store.reader(memory=MEMORY, engine=engine, static=np.arange(0, 1000, 3)) as reader:
        for ids in (np.arange(1000), np.array([1]), np.repeat(np.arange(1000), 40)):
            np.testing.assert_array_equal(reader.read(ids), features[ids])
        for at in (0, 499, 999):
            bad = np.arange(1000)
            bad[at] = 1000
            with pytest.raises(IdError, match="node id 1000 "):
                reader.read(bad)
