"""How many rings of io_uring work: as many as are busy, never more than there is something for."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_engines import Bench

from featstore.engine import choose, ring_count, uring
from featstore.engine.counters import READS
from featstore.engine.liburing import library
from featstore.engine.ring_count import PATIENCE_MAX_NS, WINDOW_NS, RingCount
from featstore.engine.uring import UringEngine
from featstore.errors import FeatstoreWarning

pytestmark = pytest.mark.skipif(choose().name != "uring", reason="io_uring does not work here")


class Load:
    """What the threads of rings are told of their processor time: a share of the time that goes by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
        self.share, self._cpu, self._seen = share, {}, {}  # type: ignore[var-annotated]
        monkeypatch.setattr(uring.time, "thread_time_ns", self._time)

    def _time(self) -> int:
        own, now = threading.get_ident(), time.perf_counter_ns()
        since = now - self._seen.get(own, now)
        self._seen[own] = now
        self._cpu[own] = self._cpu.get(own, 0) + int(since * self.share)
        return int(self._cpu[own])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[UringEngine]:
    monkeypatch.setattr(uring, "available_cores", lambda: 4)
    monkeypatch.setattr(uring, "WINDOW_NS", 1)
    monkeypatch.setattr(ring_count, "RING_EXTENTS_MIN", 2)  # each lane is something for all rings
    engine = UringEngine(64, 2**20, 64 * 1024)
    yield engine
    engine.close()


def read_some(bench: Bench, engine: UringEngine, times: int = 1) -> None:
    for seed in range(times):
        rows = np.random.default_rng(seed).integers(0, len(bench.rows), 600)
        lane = bench.lane(rows, extent_bytes_max=64 * 1024)
        engine.start(lane.lane)
        lane.check()


def test_memory_is_registered_once_a_ring_has_read_for_a_while(
    tmp_path: Path, made: UringEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the kernel's refusal is told, after which reads are as before."""
    found: list[bool] = []
    register = type(library()).register

    def seen(self: Any, ring: Any, memory: Any) -> bool:
        refused = np.empty(0, np.uint8) if found else memory  # of the second ring on
        found.append(register(self, ring, refused))
        return found[-1]

    monkeypatch.setattr(type(library()), "register", seen)
    Load(monkeypatch, 1.0)  # so that more rings work
    bench = Bench(tmp_path / "table", 1000, 400, "direct")
    with caplog.at_level("INFO", "featstore"):
        read_some(bench, made, 60)
    assert found[0]
    assert 2 <= len(found) <= 4
    assert not any(found[1:])
    assert "not registered with io_uring" in caplog.text


def test_registered_memory_is_empty_in_forked_children_and_theirs_alone(
    made: UringEngine, tmp_path: Path
) -> None:
    """Nothing else may lie where it was: the object that the child has of it gives back what is there."""
    read_some(Bench(tmp_path / "table", 1000, 400, "direct"), made, 3)
    arena = made._arena
    assert arena.any()
    begin, end = arena.ctypes.data, arena.ctypes.data + arena.nbytes
    child = os.fork()
    if child == 0:
        new = [np.ones(2**20, np.uint8) for _ in range(16)]
        apart = all(one.ctypes.data >= end or one.ctypes.data + one.nbytes <= begin for one in new)
        os._exit(0 if apart and not arena.any() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert arena.any()


def test_busy_rings_get_help_and_idle_ones_leave(
    tmp_path: Path, made: UringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Load(monkeypatch, 1.0)
    bench = Bench(tmp_path / "table", 4000, 400, "direct")
    assert (made.threads, made._working) == (4, 1)
    read_some(bench, made, 12)
    assert made._working == 4
    counted = (made._counters[:, 0] > 0).sum()
    assert counted > 1, "and several read"
    load.share = 0.1
    deadline = time.monotonic() + 20
    while made._working > 1 and time.monotonic() < deadline:  # the last one must have a part in a lane
        read_some(bench, made, 4)
    assert made._working == 1
    load.share = 0.6  # between the two nothing changes
    read_some(bench, made, 4)
    assert made._working == 1


def test_few_long_extents_are_shared_too(
    tmp_path: Path, made: UringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By pages, and no ring takes them all before the others have looked."""
    Load(monkeypatch, 1.0)
    bench = Bench(tmp_path / "table", 4000, 400, "direct")
    read_some(bench, made, 12)
    assert made._working == 4
    monkeypatch.setattr(ring_count, "RING_EXTENTS_MIN", 1000)
    monkeypatch.setattr(ring_count, "RING_PAGES_MIN", 64)
    before = made._counters.copy()
    for _ in range(20):
        lane = bench.lane(np.arange(len(bench.rows)), extent_bytes_max=64 * 1024)
        assert ring_count.worth_rings(lane.lane) >= 4
        made.start(lane.lane)
        lane.check()
    reads = (made._counters - before)[:, READS]
    assert reads.sum() == 20 * lane.lane.extents
    assert (reads > 0).sum() > 1


@pytest.mark.parametrize(
    ("extents", "pages", "rings"), [(0, 0, 1), (1, 32, 1), (63, 63, 1), (64, 64, 2), (8, 256, 4), (2, 512, 2)]
)
def test_a_lane_is_worth_rings_by_reads_or_by_bytes(extents: int, pages: int, rings: int) -> None:
    class Asked:
        pass

    asked: Any = Asked()
    asked.extents, asked.pages = extents, pages
    assert ring_count.worth_rings(asked) == rings


def test_a_ring_that_waits_stays_alone(
    tmp_path: Path, made: UringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    Load(monkeypatch, 0.1)  # far from busy also where this thread stands still between two clocks
    bench = Bench(tmp_path / "table", 4000, 400, "direct")
    read_some(bench, made, 10)
    assert made._working == 1
    assert [ring.thread is not None for ring in made._rings] == [True, False, False, False]


def test_depth_and_staging_are_divided(
    tmp_path: Path, made: UringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together rings never have more than one would, and one alone has all of it."""
    assert (made._rings[0].depth, len(made._rings[0].arena)) == (64, 2**20)
    Load(monkeypatch, 1.0)
    read_some(Bench(tmp_path / "table", 4000, 400, "direct"), made, 12)
    assert [ring.depth for ring in made._rings] == [16] * 4
    begins = [ring.arena.ctypes.data - made._arena.ctypes.data for ring in made._rings]
    assert begins == [0, 2**18, 2**19, 3 * 2**18]
    assert all(len(ring.arena) == 2**18 for ring in made._rings)


@pytest.mark.parametrize(
    ("given", "rings"), [((64, 2**20, 64 * 1024, 1), 1), ((64, 2**20, 64 * 1024, 3), 3),
                         ((64, 2**20, 2**18, 4), 2), ((9, 2**20, 4096, 4), 1),
                         ((64, 2**20, 64 * 1024, None), 4), ((128, 2**24, 2**19, 64), 16)],
)  # fmt: skip
def test_never_more_than_asked_for_or_room_for(
    given: tuple[int, int, int, int | None], rings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uring, "available_cores", lambda: 4)
    engine = UringEngine(*given)
    assert engine.threads == rings
    engine.close()


def refuse_further_rings(made: UringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are asked for: the first one is busy."""

    def refuse(_: int) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(made._library, "open_ring", refuse)
    Load(monkeypatch, 1.0)


def test_a_further_ring_that_cannot_be_is_told(
    tmp_path: Path, made: UringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_further_rings(made, monkeypatch)
    told: list[str] = []
    monkeypatch.setattr(ring_count, "warn", told.append)
    bench = Bench(tmp_path / "table", 4000, 400, "direct")
    read_some(bench, made, 12)
    assert told == [
        "reading goes on with 1 ring of io_uring: a further one cannot be opened (Cannot allocate memory); "
        "threads=1 asks for no more"
    ]
    assert (made.threads, made._working) == (1, 1)
    assert (made._rings[0].depth, len(made._rings[0].arena)) == (64, 2**20)


def test_where_warnings_are_errors_reading_goes_on(
    tmp_path: Path, made: UringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning is raised once, to who asks next for something, and all else is read."""
    refuse_further_rings(made, monkeypatch)
    bench = Bench(tmp_path / "table", 4000, 400, "direct")
    raised = 0
    for _ in range(20):
        try:
            read_some(bench, made, 2)
        except FeatstoreWarning:  # which the tests have as errors
            raised += 1
    assert (raised, made.threads) == (1, 1)


def test_a_lane_that_was_refused_is_never_read(
    tmp_path: Path, made: UringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "table", 4000, 400, "direct")
    read_some(bench, made, 1)

    def refuse() -> None:
        raise MemoryError("no room for a ring")

    with monkeypatch.context() as patch:
        patch.setattr(made, "_tell", refuse)
        with pytest.raises(MemoryError):
            read_some(bench, made, 1)
    assert made._queue == []
    read_some(bench, made, 2)


def test_the_number_settles_where_cores_come_and_go() -> None:
    """Beside steps that take a core for some milliseconds and give it back, changes become rare; once the
    load stays, one window is enough again."""
    count, working, changes = RingCount(), 1, []
    for number in range(4000):  # 20 seconds of reading
        step = count.step(1.0 if number // 3 % 2 else 0.1, WINDOW_NS, working, 4)
        working += step
        if step:
            changes.append(number)
    assert len(changes) <= 12
    assert working == 1
    for _ in range(2 * PATIENCE_MAX_NS // WINDOW_NS):
        assert count.step(0.6, WINDOW_NS, working, 4) == 0
    assert count.step(1.0, WINDOW_NS, working, 4) == 1


def test_rings_come_at_once_and_go_at_once() -> None:
    count = RingCount()
    assert [count.step(0.9, WINDOW_NS, working, 4) for working in (1, 2, 3, 4)] == [1, 1, 1, 0]
    assert [count.step(0.39, WINDOW_NS, working, 4) for working in (4, 3, 2, 1)] == [-1, -1, -1, 0]
    assert [count.step(load, WINDOW_NS, 2, 4) for load in (0.4, 0.84)] == [0, 0]


def test_who_steps_back_again_and_again_waits_at_most_so_long() -> None:
    count = RingCount()
    for _ in range(40):
        count.step(0.1, WINDOW_NS, 2, 4)
    needed = 1
    while not count.step(1.0, WINDOW_NS, 1, 4):
        needed += 1
    assert needed == PATIENCE_MAX_NS // WINDOW_NS
