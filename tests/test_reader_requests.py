"""Requests under way: in flight, awaited, cancelled, failing; and the end of a reader."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gates import Gate

import featstore
import featstore.reader.reader
from featstore.engine.request import Request, chained
from featstore.errors import ArgumentError, CancelledError, ClosedError, IdError
from featstore.reader.reader import IN_FLIGHT_MAX, Reader

MEMORY = "4MiB"


@pytest.fixture
def reader(store: featstore.Store, engine: str) -> Any:
    with store.reader(memory=MEMORY, engine=engine) as made:
        yield made


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


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


def test_a_failed_start_fails_the_request(
    monkeypatch: pytest.MonkeyPatch, reader: Reader, features: np.ndarray
) -> None:
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


@contextmanager
def fed(reader: Reader) -> Iterator[list[Any]]:
    """Requests that are handed to the thread that plans."""
    found, feed = [], reader._feeder.feed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader._feeder, "feed", lambda *given: (found.append(given[0]), feed(*given)))
        yield found


def test_at_may_be_used_again_while_rows_come(store: featstore.Store, features: np.ndarray) -> None:
    out, at = np.zeros_like(features), np.arange(1000, dtype=np.int32)[::-1].copy()
    with store.reader(memory=MEMORY, static=None) as reader:
        gate = Gate(reader)
        for _ in range(2):  # as many as are planned at once
            reader.submit([0])
        placed, places = at.copy(), at.copy()
        waiting = reader.submit(np.arange(1000), out=out, at=placed)
        placed[:] = 0
        gate.open()
        waiting.result(20)
    np.testing.assert_array_equal(out[places], features)


@pytest.mark.parametrize("static", [None, np.arange(600)])
@pytest.mark.parametrize("policy", [None, "lru"])
def test_rows_may_be_put_over_the_ids_that_are_asked_for(
    tmp_path: Path, pack: Any, static: Any, policy: str | None
) -> None:
    labels = np.random.default_rng(0).permutation(1000)
    asked = np.concatenate([np.arange(500), [900, 30, 999], np.arange(500)])
    with (
        pack(tmp_path / "s", labels) as store,
        store.reader(memory="8MiB", static=static, policy=policy) as reader,
    ):
        ids = asked.copy()
        assert reader.read(ids, out=ids) is ids
        np.testing.assert_array_equal(ids, labels[asked])
        tensor = torch.from_numpy(asked.copy())
        np.testing.assert_array_equal(reader.read(tensor, out=tensor).numpy(), labels[asked])


def test_out_on_the_device_has_the_shape_of_what_is_asked_for(
    store: featstore.Store, features: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a device that has no memory, as none is needed to refuse."""
    with store.reader(memory="8MiB", device="cpu", device_memory="1MiB") as reader:
        monkeypatch.setattr(reader._top, "device", torch.device("meta"))
        width = features.shape[1]
        for shape in ((4, width), (3, 2 * width), (0, width), (3 * width,)):
            wrong = torch.empty(shape, device="meta")
            with pytest.raises(ArgumentError, match=r"out must be .* for these ids"):
                reader.read([1, 2, 3], out=wrong)
        with pytest.raises(ArgumentError, match="out must be"):
            reader.submit([1, 2], out=torch.empty((9, 1), device="meta"), at=[3, 4])


def test_a_small_request_of_rows_in_memory_is_done_when_it_was_made(
    store: featstore.Store, features: np.ndarray
) -> None:
    out, at = np.zeros_like(features), np.arange(1000)[::-1]
    with store.reader(memory=MEMORY, static=np.arange(900)) as reader, fed(reader) as handed_on:
        done = reader.submit([3, 899, 3])
        assert done.done()
        np.testing.assert_array_equal(done.result(0), features[[3, 899, 3]])
        placed = reader.submit(np.arange(900), out=out, at=at[:900])
        assert placed.done()
        np.testing.assert_array_equal(out[at[:900]], features[:900])
        wrong = reader.submit([3, 1000])
        assert wrong.done()
        with pytest.raises(IdError, match="1000"):
            wrong.result(0)
        assert handed_on == []
        missing = reader.submit([3, 900])
        assert handed_on == [missing]
        np.testing.assert_array_equal(missing.result(20), features[[3, 900]])
        stats = reader.stats()
        assert (stats.requests, stats.rows_asked) == (4, 3 + 900 + 2)
        assert sum(stats.hits.values()) == 3 + 900 + 1


def test_a_large_request_of_rows_in_memory_is_not_copied_by_who_submits_it(
    store: featstore.Store, features: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(featstore.reader.reader, "_SUBMITTED_BYTES_MAX", 900 * features[0].nbytes)
    with store.reader(memory=MEMORY, static=np.arange(900)) as reader, fed(reader) as handed_on:
        for count, large in ((900, False), (901, True), (2**15, True)):
            ids = np.arange(count) % 900
            request = reader.submit({"features": ids})
            assert (request in handed_on) == large
            np.testing.assert_array_equal(request.result(20)["features"], features[ids])


def test_close_waits_for_requests_under_way(
    store: featstore.Store, features: np.ndarray, engine: str
) -> None:
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


def test_close_against_readers_in_other_threads(
    store: featstore.Store, features: np.ndarray, engine: str
) -> None:
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
    assert eventually(
        lambda: (len(os.listdir("/proc/self/fd")), threading.active_count()) == (descriptors, threads)
    )


def test_failing_to_open_leaves_nothing(store: featstore.Store) -> None:
    gc.collect()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for options in (
        {"memory": 1000},
        {"static": [10_000]},
        {"static": "degree"},
        {"engine": "no"},
        {"tables": ["no"]},
    ):
        with pytest.raises((ValueError, KeyError, IdError)):
            store.reader(**options)
    gc.collect()
    assert eventually(
        lambda: (len(os.listdir("/proc/self/fd")), threading.active_count()) == (descriptors, threads)
    )


def test_readers_outlive_their_store(store: featstore.Store, features: np.ndarray, engine: str) -> None:
    with store.reader(memory=MEMORY, engine=engine) as reader:
        store.close()
        np.testing.assert_array_equal(reader.read([3]), features[[3]])


@pytest.mark.parametrize("step", ["begin", "open_piece", "add_done_callback", "close_piece"])
def test_what_lies_below_is_abandoned_where_chaining_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Nothing may go on to write into rows that the caller has back."""
    below = Request(lambda: None)
    below.begin()
    cancelled: list[bool] = []

    class Piece:
        def cancel(self) -> None:
            cancelled.append(True)
            below.close_piece(self, CancelledError())

    piece = Piece()
    below.open_piece(piece)
    below.close_piece(None, None)
    own, count = getattr(Request, step), [0]

    def interrupted(self: Any, *args: Any) -> Any:
        count[0] += 1
        if count[0] == 1:
            raise KeyboardInterrupt
        return own(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Request, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            chained(below, lambda: None)
    assert cancelled
    assert below.done()
