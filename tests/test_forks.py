"""What was made before a fork and is used in the child: the rows, or an error at once, and never a wait for
threads that stayed in the parent.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import Gate
from processes import child, exit_code

import featstore
from featstore.errors import ClosedError
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.mega.sets import PartitionSets
from featstore.loaders.online.loader import OnlineLoader
from featstore.loaders.rolling import RollingLoader
from featstore.loaders.train import compiled_once
from featstore.reader.reader import Reader
from featstore.tiers.buffer import FeatureBuffer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads

SECONDS = 5.0  # after which a child hangs


def refused(action: Callable[[], Any]) -> bool:
    """Whether this is refused, with words for what to do."""
    try:
        action()
    except ClosedError as error:
        return "process" in str(error)
    return False


def in_child(work: Callable[[], Any]) -> int:
    return exit_code(child(work), SECONDS)


@pytest.fixture
def reader(store: featstore.Store) -> Iterator[Reader]:
    with store.reader(memory="4MiB") as made:
        yield made


@pytest.fixture
def held(reader: Reader) -> Iterator[Reader]:
    """The reader, whose reads come to no end while the test lasts."""
    gate = Gate(reader)
    yield reader
    gate.open()


async def awaited(request: Any) -> Any:
    return await request


def test_a_request_under_way_has_failed_in_the_child(held: Reader) -> None:
    request = held.submit(np.arange(10))

    def work() -> bool:
        return (
            refused(request.result)
            and refused(lambda: asyncio.run(awaited(request)))
            and request.done()
            and isinstance(request.exception(), ClosedError)
            and "before a fork" in str(request.exception())
            and not request.cancel()
            and not request.cancelled()
        )

    assert in_child(work) == 0
    assert not request.done()


def test_a_request_that_was_done_is_done_in_the_child(reader: Reader, features: np.ndarray) -> None:
    request, failed = reader.submit(np.arange(10)), reader.submit([1000])
    request.result(10)
    assert isinstance(failed.exception(10), featstore.errors.IdError)
    with request._condition:  # as if another thread looked at it while this one forks
        done = threading.Event()
        pid: list[int] = []

        def fork() -> None:
            def work() -> bool:
                wrong = isinstance(failed.exception(), featstore.errors.IdError)
                return wrong and np.array_equal(request.result(), features[:10])

            pid.append(child(work))
            done.set()

        threading.Thread(target=fork).start()
        done.wait(10)
    assert exit_code(pid[0], SECONDS) == 0


def test_every_request_that_waits_is_refused(held: Reader) -> None:
    """Also those for which the reader had no room yet, and what a reader that is closed in the child was
    asked."""
    requests = [held.submit(np.arange(k, k + 50)) for k in range(8)]

    def work() -> bool:
        held.close()
        return all(refused(request.result) for request in requests)

    assert in_child(work) == 0


def test_a_feature_buffer_and_its_tickets(reader: Reader) -> None:
    gate = Gate(reader)
    with FeatureBuffer(reader, slots=100) as buffer:
        ticket, second = buffer.begin(np.arange(20)), buffer.begin(np.arange(10, 30))

        def work() -> bool:
            good = all(
                map(refused, (ticket.result, second.result, lambda: buffer.gather(ticket), buffer.stats))
            )
            good = good and all(map(refused, (buffer.cached_ids, buffer.settle, lambda: buffer.begin([1]))))
            good = good and ticket.done() and refused(lambda: buffer.switch("fifo"))
            ticket.cancel()
            second.release()
            buffer.close()
            return good

        with buffer._lock:  # as if another thread had it while this one forks
            code = in_child(work)
        gate.open()
        assert code == 0
        assert len(second.result(10)) == 20


def batches(_: int) -> Iterator[np.ndarray]:
    for k in range(12):
        yield np.arange(10 * k, 10 * k + 50)


def goes_on(loader: Any) -> bool:
    """In a child: an iteration begun in the parent, a new one, and the end."""
    good = refused(lambda: next(iter(loader)))
    loader.close()
    return good


def test_iterators_of_an_online_loader(store: featstore.Store) -> None:
    with OnlineLoader(store, batches, memory="6MiB") as loader:
        under_way = iter(loader)
        next(under_way)
        loader.report_stages._lock.acquire()  # as above
        try:
            assert in_child(lambda: refused(lambda: next(under_way)) and goes_on(loader)) == 0
        finally:
            loader.report_stages._lock.release()
        assert len(list(under_way)) == 11


def test_iterators_of_compiled_and_rolling_loaders(own: Path) -> None:
    with featstore.open(own) as store:
        compiled_once(store, batches, "train", memory="32MiB")
        with store.compiled("train") as compiled:
            for made in (CompiledLoader(compiled), RollingLoader(store, batches, memory="32MiB")):
                with made as loader:
                    under_way = iter(loader)
                    next(under_way)
                    assert in_child(lambda: refused(lambda: next(under_way)) and goes_on(loader)) == 0  # noqa: B023
                    assert len([next(under_way) for _ in range(11)]) == 11


def test_iterators_of_the_one_loader(own: Path) -> None:
    with featstore.open(own) as store:
        for mode in ("online", "compiled", "rolling"):
            with store.loader(batches, mode=mode, memory="32MiB") as loader:
                under_way = iter(loader)
                next(under_way)
                assert in_child(lambda: refused(lambda: next(under_way)) and goes_on(loader)) == 0  # noqa: B023
                assert len(list(under_way)) == 11


def test_iterators_of_mega_batches(tmp_path: Path, pack: Any) -> None:
    edges = np.random.default_rng(0).integers(0, 900, 4000)
    graph = (np.linspace(0, 4000, 901).astype(np.int64), edges)
    options: dict[str, Any] = {
        "graph": graph,
        "topology": True,
        "order": "ldg",
        "partitions": 9,
        "memory": "64MiB",
    }
    with (
        pack(tmp_path / "s", np.zeros((900, 30), np.float32), **options) as store,
        PartitionSets(store, memory="32MiB", resident=3) as loader,
    ):
        under_way = iter(loader)
        next(under_way)
        gate = Gate(loader._loading.reader)
        try:
            assert in_child(lambda: refused(lambda: next(under_way)) and goes_on(loader)) == 0
        finally:
            gate.open()
        assert len(list(under_way)) == 2
        drawing: Any = {"seeds": np.arange(900), "fanouts": [3], "batch_size": 50, "mode": "partitions"}
        with store.loader(memory="32MiB", resident=3, **drawing) as loader:
            count = len(list(loader))
            under_way = iter(loader)
            next(under_way)
            assert in_child(lambda: refused(lambda: next(under_way)) and goes_on(loader)) == 0
            assert len(list(under_way)) >= 17
            assert count >= 18
