"""Failing reads: each of the first N in turn, once and for good; short, interrupted and refused ones; a
broken ring."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import CorruptionError, DeviceError
from featstore.plan.cost import DeviceModel
from featstore.reader.reader import Reader

PAGE = 4096
#: Plans single pages and short runs.
MODEL = DeviceModel(PAGE * 1e-9, 1e-9, 0.0)


@pytest.fixture(params=["uring", "threads"])
def reader(request: pytest.FixtureRequest, packed: Any, faults: Any) -> Iterator[Reader]:
    with (
        featstore.open(packed) as store,
        store.reader(memory="4MiB", engine=request.param, model=MODEL, static=None) as made,
    ):
        yield made


def right(reader: Reader, features: np.ndarray, ids: np.ndarray) -> None:
    np.testing.assert_array_equal(reader.read(ids), features[ids])


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODATA, errno.ETIMEDOUT, errno.EOPNOTSUPP])
@pytest.mark.parametrize("for_good", [False, True])
def test_the_nth_read_fails(
    reader: Reader, features: np.ndarray, faults: Any, number: int, for_good: bool
) -> None:
    """N = 0, 1, 2 ... until a request is clean, as SQLite's tests do; nothing is remembered from one request
    to the next."""
    ids = np.arange(0, 1000, 60)
    reads = reader.plan(ids).reads
    assert reads > 5
    for n in range(reads + 1):
        faults.restart(lambda k, result, n=n: -number if k == n or (for_good and k > n) else result)
        if n == reads:
            right(reader, features, ids)
            continue
        with pytest.raises(DeviceError) as caught:
            reader.read(ids)
        assert caught.value.errno == number
        assert "/rows/c." in caught.value.path
        assert caught.value.offset % PAGE == 0
        assert caught.value.path in str(caught.value)
    faults.restart(lambda k, result: result)
    right(reader, features, ids)


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
def test_interrupted_reads_are_repeated(
    reader: Reader, features: np.ndarray, faults: Any, number: int
) -> None:
    faults.restart(lambda k, result: -number if k % 3 == 0 else result)
    right(reader, features, np.arange(0, 1000, 7))
    assert reader.stats().short_reads > 0


def test_short_reads_are_completed(reader: Reader, features: np.ndarray, faults: Any) -> None:
    """A read that ends early, at a page or within one, is not the end of the file."""
    for cut in (0.5, 0.9, 1.0):
        faults.restart(
            lambda k, result, cut=cut: int(result * cut) if k % 4 == 1 and result > PAGE else result
        )
        right(reader, features, np.arange(1000))
    faults.restart(lambda k, result: result // 2 // PAGE * PAGE if k < 8 and result > PAGE else result)
    before = reader.stats().short_reads
    right(reader, features, np.arange(1000))
    assert reader.stats().short_reads > before


def test_reads_that_never_bring_anything_are_an_error(
    reader: Reader, features: np.ndarray, faults: Any
) -> None:
    faults.restart(lambda k, result: 0)
    with pytest.raises(CorruptionError, match="before the end of the file") as caught:
        reader.read([5])
    assert caught.value.offset is not None
    faults.restart(lambda k, result: result)
    right(reader, features, np.array([5]))


def test_requests_under_way_fail_alone(reader: Reader, features: np.ndarray, faults: Any) -> None:
    """Of many requests at once, those whose read failed say so and the others are right."""
    faults.restart(lambda k, result: -errno.EIO if k % 40 == 7 else result)
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, 1000, 12) for _ in range(60)]
    requests = [reader.submit(ids) for ids in batches]
    failed = 0
    for ids, request in zip(batches, requests, strict=True):
        if request.exception(20) is None:
            np.testing.assert_array_equal(request.result(), features[ids])
        else:
            assert isinstance(request.exception(), DeviceError)
            failed += 1
    assert 0 < failed < 60
    faults.restart(lambda k, result: result)
    right(reader, features, np.arange(1000))


def test_a_large_request_stops_at_its_first_error(reader: Reader, features: np.ndarray, faults: Any) -> None:
    """Pieces not planned yet are not read."""
    ids = np.random.default_rng(0).permutation(np.repeat(np.arange(1000), 300))
    reads = reader.plan(ids).reads
    faults.restart(lambda k, result: -errno.EIO if k == 0 else result)
    with pytest.raises(DeviceError):
        reader.read(ids)
    assert faults.count < max(reads, 200)
    faults.restart(lambda k, result: result)
    right(reader, features, ids)


def test_a_failed_fill_of_the_static_tier_opens_no_reader(packed: Any, faults: Any, engine: str) -> None:
    if engine == "mmap":
        engine = "threads"
    faults.restart(lambda k, result: -errno.EIO)
    with featstore.open(packed) as store:
        with pytest.raises(DeviceError, match="EIO"):
            store.reader(memory="4MiB", engine=engine, static=np.arange(100))
        faults.restart(lambda k, result: result)
        store.reader(memory="4MiB", engine=engine, static=np.arange(100)).close()


def test_a_broken_ring_fails_what_is_under_way_and_all_that_follows(
    packed: Any, features: np.ndarray, faults: Any
) -> None:
    with featstore.open(packed) as store:
        with store.reader(memory="4MiB", engine="uring", static=None) as reader:
            right(reader, features, np.arange(10))
            faults.enter = -errno.EBADF
            requests = [reader.submit([k]) for k in range(10)]
            for request in requests:
                error = request.exception(20)
                assert isinstance(error, DeviceError)
                assert error.errno == errno.EBADF
            faults.enter = 0
            # latched: what the ring holds is not known any more
            with pytest.raises(DeviceError, match="io_uring"):
                reader.read([1])
        with store.reader(memory="4MiB", engine="uring", static=None) as reader:
            right(reader, features, np.arange(1000))


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN, errno.EBUSY])
def test_a_ring_that_is_busy_for_a_while(packed: Any, features: np.ndarray, faults: Any, number: int) -> None:
    with featstore.open(packed) as store, store.reader(memory="4MiB", engine="uring", static=None) as reader:
        faults.enter = -number
        request = reader.submit(np.arange(1000))
        with pytest.raises(TimeoutError):
            request.result(0.1)
        faults.enter = 0
        np.testing.assert_array_equal(request.result(20), features)
