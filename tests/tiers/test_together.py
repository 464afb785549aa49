"""Tables of a request take slots together, and ask for what they lack at once: nobody waits for ever for what
another has not asked for yet, however few slots there are, and whatever fails below."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import FeatstoreError
from featstore.testing import ArraySource, check_source
from featstore.tiers.buffer_tier import Buffer

ROWS = 300
SECONDS = 60.0
TABLES = 11  # more than may wait for rows at once


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    return {f"t{n}": rng.standard_normal((ROWS, 1 + n % 3), np.float32) for n in range(TABLES)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, pack: Any, arrays: Any) -> Any:
    with pack(tmp_path_factory.mktemp("together") / "s", arrays) as made:
        yield made


class Later(ArraySource):
    """Ends requests one after the other, in a thread of its own, and counts those of several tables."""

    def __init__(self, store: Any, arrays: Any) -> None:
        super().__init__(store, arrays)
        self.held, self.several, self.alone = True, 0, 0
        self.fails_every = 0
        self._ended = 0

    def submit(self, ids: Any, *, out: Any, at: Any = None) -> Any:
        self.several += len(ids) > 1
        self.alone += len(ids) == 1
        return super().submit(ids, out=out, at=at)

    def end_one(self) -> None:
        self._ended += bool(self._open)
        self.error = OSError("the disk") if self.fails_every and self._ended % self.fails_every == 1 else None
        self.let_go(1)

    @contextmanager
    def ending(self) -> Iterator[None]:
        stop = threading.Event()

        def end() -> None:
            while not stop.wait(0.0002):
                self.end_one()

        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(SECONDS)


def tier_of(name: str, disk: Later) -> Any:
    tables = list(disk.store.tables.values())
    if name == "device":
        pytest.importorskip("torch")
        spec: Any = featstore.Device("cpu", f"{TABLES * 100 * 12}")
    else:
        spec = Buffer(name)
    return spec.over(disk, spec.least_bytes(tables) + 4000)


@pytest.mark.parametrize("name", ["lru", "s3-fifo", "auto", "device"])
def test_many_who_want_few_slots_of_many_tables_get_their_rows(store: Any, arrays: Any, name: str) -> None:
    disk = Later(store, arrays)
    with disk.ending():
        tier = tier_of(name, disk)
        try:
            check_source(tier, arrays, requests=4, threads=10, ids_max=120)
        finally:
            tier.close()
    assert disk.several > 10


@pytest.mark.parametrize("name", ["lru", "auto", "device"])
def test_what_fails_below_fails_alone(store: Any, arrays: Any, name: str) -> None:
    """Some requests below fail: who asks gets all rows, or that error, and nobody waits for ever."""
    disk, outcomes = Later(store, arrays), list[str]()
    disk.fails_every = 40
    with disk.ending():
        tier = tier_of(name, disk)
        try:

            def ask(seed: int) -> None:
                rng = np.random.default_rng(seed)
                for _ in range(8):
                    some = rng.choice(TABLES, rng.integers(1, TABLES + 1), replace=False)
                    ids = {f"t{n}": rng.integers(0, ROWS, rng.integers(0, 60)) for n in some}
                    try:
                        found = tier.submit(ids, out=None).result(SECONDS)
                    except (OSError, FeatstoreError) as error:
                        outcomes.append(str(error))
                        continue
                    for table, wanted in ids.items():
                        assert np.array_equal(np.asarray(found[table]), arrays[table][wanted])
                    outcomes.append("rows")

            threads = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(SECONDS)
        finally:
            tier.close()
    assert len(outcomes) == 8 * 8
    assert set(outcomes) == {"rows", "the disk"}


def test_a_device_asks_for_two_tables_of_two_requests_at_once(store: Any, arrays: Any) -> None:
    pytest.importorskip("torch")
    disk, names = Later(store, arrays), ["t0", "t1"]
    tier = featstore.Device("cpu", "1MiB").over(disk, 64 << 20)
    try:
        asked = [{name: np.arange(low, low + 20) for name in names} for low in (0, 50)]
        requests = [tier.submit(ids, out=None) for ids in asked]
        give_up = time.monotonic() + SECONDS
        while disk.several < 2 and time.monotonic() < give_up:
            time.sleep(0.001)
        assert (disk.several, disk.alone) == (2, 0)
        assert not any(request.done() for request in requests)
        with disk.ending():
            for request, ids in zip(requests, asked, strict=True):
                for name, rows in request.result(SECONDS).items():
                    assert np.array_equal(np.asarray(rows), arrays[name][ids[name]])
            one = {"t0": np.arange(3), "t1": np.arange(50, 55)}  # of which the first is there
            tier.submit({"t0": np.arange(3), "t1": np.arange(100, 105)}, out=None).result(SECONDS)
            tier.submit(one, out=None).result(SECONDS)  # and all of it
        assert (disk.several, disk.alone) == (2, 1)
    finally:
        with disk.ending():
            tier.close()


def test_a_request_for_all_tables_is_as_few_below_as_may_be(store: Any, arrays: Any) -> None:
    """Four tables are one request, so that another can be under way meanwhile."""
    disk = Later(store, arrays)
    with disk.ending():
        spec = Buffer("lru")
        tier = spec.over(disk, spec.least_bytes(list(store.tables.values())) + (1 << 20))
        try:
            tier.submit({name: np.arange(20) for name in arrays}, out=None).result(SECONDS)
            assert (disk.several, disk.alone) == (3, 0)
            tier.submit({name: np.arange(20) for name in arrays}, out=None).result(SECONDS)
            assert (disk.several, disk.alone) == (3, 0)  # all are there
        finally:
            tier.close()
