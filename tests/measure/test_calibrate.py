"""Calibration and bench: places, fits, and what they refuse. How fast this machine is, is no matter for a
test."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_writes import write_plainly

import featstore
from featstore.engine import ENGINES, choose
from featstore.engine.lane import Lane
from featstore.errors import CorruptionError, DiskFullError, FeatstoreWarning, SourceError
from featstore.layout import TableLayout
from featstore.measure import bench as bench_module
from featstore.measure import calibrate as calibrate_module
from featstore.measure import engine_rates as module
from featstore.measure.bench import bench
from featstore.measure.calibrate import (
    EXTENT_SIZES,
    calibrate,
    fit_model,
    keep,
    measure,
)
from featstore.measure.calibration import Sample
from featstore.measure.engine_rates import EngineRate, decide_engine
from featstore.measure.lane_bench import LaneBench, drop_cached
from featstore.measure.scratch import scratch_store
from featstore.plan.cost import DeviceModel, calibrated_engine, load_model, models_path
from featstore.store import Store

PAGE = 4096
HERE = [name for name in ENGINES if name != "uring" or choose("auto").name == "uring"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATSTORE_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(module, "busy_core_seconds", lambda: 0.0)  # whatever else runs


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ten chunk files of 33 pages, the last one not full: 100 B rows, which lie across pages."""
    real = TableLayout.choose.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        TableLayout, "choose", classmethod(lambda cls, rows, row_bytes: real(cls, rows, row_bytes, 33 * PAGE))
    )
    rows = np.random.default_rng(0).integers(0, 256, (13_000, 100), dtype=np.uint8)
    opened = featstore.pack(tmp_path / "parent" / "s", rows)
    assert opened.tables["features"].layout.chunks >= 5
    yield opened
    opened.close()


def _lanes(lane: Lane) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    page, pages, *_ = lane._alive
    return page, pages


@pytest.mark.parametrize("engine", HERE)
@pytest.mark.parametrize("extent_bytes", [PAGE, 4 * PAGE, 32 * PAGE])
def test_lane_bench_reads_distinct_places_inside_files(
    store: Store, engine: Any, extent_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = store.tables["features"]
    lanes = LaneBench(store, table, engine)
    seen: list[Lane] = []
    start = lanes._engine.start
    monkeypatch.setattr(lanes._engine, "start", lambda lane: (seen.append(lane), start(lane)))
    try:
        before = lanes._engine.counters()
        count = lanes.places(extent_bytes)
        assert count == table.layout.chunks * (table.layout.chunk_bytes // PAGE // (extent_bytes // PAGE))
        assert lanes.run(extent_bytes, count) > 0
        counted = lanes._engine.counters() - before
    finally:
        lanes.close()
    page, pages = _lanes(seen[0])
    assert (pages == extent_bytes // PAGE).all()
    assert (np.diff(page) >= extent_bytes // PAGE).all(), "ascending, and no page twice"
    per_file = table.layout.pages_per_chunk
    assert (page // per_file == (page + pages - 1) // per_file).all(), "no extent crosses into the next file"
    assert page[0] >= 0
    assert page[-1] + pages[-1] <= table.layout.pages
    assert (counted[0], counted[1]) == (count, count * extent_bytes)


def test_lane_bench_verifies(store: Store) -> None:
    path = store.path / store.tables["features"].entry.chunk_path(1)
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    lanes = LaneBench(store, store.tables["features"], "threads")
    try:
        with pytest.raises(CorruptionError) as caught:
            lanes.run(PAGE, lanes.places(PAGE))
    finally:
        lanes.close()
    assert (caught.value.path, caught.value.offset) == (str(path), PAGE)


def _sampled(read_seconds: float, byte_seconds: float) -> tuple[Sample, ...]:
    return tuple(Sample(size, 10, (read_seconds + size * byte_seconds,)) for size in EXTENT_SIZES)


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-7, 1e-2), st.floats(1e-11, 1e-7))
def test_fit_finds_the_line(read_seconds: float, byte_seconds: float) -> None:
    model = fit_model(_sampled(read_seconds, byte_seconds))
    for sample in _sampled(read_seconds, byte_seconds):
        assert model.read_seconds + sample.extent_bytes * model.byte_seconds == pytest.approx(
            sample.seconds_per_read, rel=1e-6
        )
    assert model.calibrated


def test_fit_keeps_both_numbers_positive() -> None:
    falling = tuple(Sample(size, 1, (1e-3 / size,)) for size in EXTENT_SIZES)
    steeper = tuple(Sample(size, 1, (1e-15 * size**2,)) for size in EXTENT_SIZES)
    for samples in (falling, steeper):
        model = fit_model(samples)
        assert model.read_seconds > 0
        assert model.byte_seconds > 0
        assert model.gap_pages_max >= 0
    only = fit_model((Sample(PAGE, 1, (1e-5,)),))
    assert only.read_seconds + PAGE * only.byte_seconds == pytest.approx(1e-5)


def test_samples_take_turns_and_their_median_counts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that obeys the model and is disturbed twice: the fit finds its numbers."""
    order: list[int] = []

    def run(self: LaneBench, extent_bytes: int, reads: int) -> float:
        order.append(extent_bytes)
        disturbed = 9.0 if len(order) in (21, 27) else 1.0
        return reads * (8e-6 + extent_bytes / 1.45e9) * disturbed

    def run_dense(self: LaneBench, gap_pages: int, region_pages: int) -> tuple[int, int, float]:
        reads, read_bytes = 30_000 // gap_pages, 50_000_000 + 1_000_000 * gap_pages
        penalty = 1.3 if gap_pages < 4 else 1.0  # what a device does that dislikes short gaps
        return reads, read_bytes, (reads * 8e-6 + read_bytes / 1.45e9) * penalty

    monkeypatch.setattr(LaneBench, "run", run)
    monkeypatch.setattr(LaneBench, "run_dense", run_dense)
    result = measure(store.path, "threads", seconds=0.05, data_bytes_min=1)
    seconds = {g.gap_pages: g.median_seconds for g in result.gaps}
    assert (
        result.model.gap_pages_max
        == min(gap for gap in seconds if seconds[gap] <= 1.07 * min(seconds.values()))
        >= 4
    )
    exact = fit_model(result.samples)
    assert exact.read_seconds == pytest.approx(8e-6, rel=1e-3)
    assert exact.byte_seconds == pytest.approx(1 / 1.45e9, rel=1e-3)
    assert result.model.read_seconds == pytest.approx(8e-6, rel=0.2)
    assert result.model.byte_seconds == pytest.approx(1 / 1.45e9, rel=0.2)
    assert result.model.request_seconds > 0
    assert result.error < 0.2
    assert max(s.spread for s in result.samples) == pytest.approx(8.0)
    sizes = [size for size in EXTENT_SIZES if size <= 33 * PAGE]
    assert order[-len(sizes) :] == sizes


@pytest.mark.parametrize("engine", HERE)
def test_calibrate_keeps_a_model_that_readers_take(
    store: Store, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = measure(store.path, engine, seconds=0.05, data_bytes_min=1)
    assert not result.temporary
    assert load_model(result.key).calibrated is False, "measuring keeps nothing"
    monkeypatch.setattr("featstore.measure.calibrate.DATA_BYTES_MIN", 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "which engine and how many rings", FeatstoreWarning)
        model = calibrate(store.path, engine, seconds=0.05)
    assert load_model(result.key) == model
    with store.reader(engine=engine, static=None) as reader:
        assert reader.model == model
        assert reader.plan([0]).calibrated


def test_small_stores_get_a_temporary_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # layouts as they are
    seen: list[tuple[str, int, int]] = []
    for path in (store.path, store.path.parent):
        result = measure(
            path, "threads", seconds=0.05, data_bytes_min=2 << 20, progress=lambda *a: seen.append(a)
        )
        assert result.temporary
        assert [s.extent_bytes for s in result.samples] == list(EXTENT_SIZES)
        assert [p.name for p in store.path.parent.iterdir()] == ["s"]
    assert {stage for stage, _, _ in seen} == {"write", "measure", "measure engines", "measure gaps"}
    assert all(0 <= done <= total for _, done, total in seen)


_KILLED = """
import os, signal, sys, featstore.measure.calibrate as module
def killed(stage, done, total):
    if stage == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
module.measure(sys.argv[1], "threads", seconds=0.05, data_bytes_min=4 << 20, progress=killed)
"""


@pytest.mark.parametrize("stage", ["write", "measure"])
def test_the_next_one_removes_what_a_killed_one_left_and_no_more(tmp_path: Path, stage: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path), stage], timeout=120, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".featstore-calibrate-")
    (tmp_path / ".featstore-calibrate-0123abcd").mkdir()  # killed before anything was in it
    measure(tmp_path, "threads", seconds=0.05, data_bytes_min=1 << 20)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_proven_to_be_left_stays_and_is_named(tmp_path: Path) -> None:
    place, outside = tmp_path / "place", tmp_path / "outside"
    (outside / "store").mkdir(parents=True)
    (place / ".featstore-calibrate-photos00/store").mkdir(parents=True)
    (place / ".featstore-calibrate-photos00/store/one.jpg").write_text("mine")
    (place / ".featstore-calibrate-link0000").symlink_to(outside)
    (place / ".featstore-calibrate-file0000").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.warns(FeatstoreWarning, match="delete it yourself") as seen:
        measure(place, "threads", seconds=0.05, data_bytes_min=1 << 20)
    assert sorted(tmp_path.rglob("*")) == before
    told = " ".join(str(one.message) for one in seen)
    assert all(name in told for name in ("photos00", "link0000", "file0000"))


def test_one_that_is_under_way_is_left_alone(tmp_path: Path) -> None:
    with scratch_store(tmp_path) as mine:
        mine.mkdir()
        measure(tmp_path, "threads", seconds=0.05, data_bytes_min=1 << 20)
        assert mine.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_in_the_middle_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = os.pwrite, [0]

    def full(descriptor: int, data: Any, offset: int) -> int:
        written[0] += len(data)
        if written[0] > 1 << 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, offset)

    write_plainly(monkeypatch)
    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(DiskFullError):
        measure(tmp_path, "threads", seconds=0.05, data_bytes_min=4 << 20)
    assert written[0] > 1 << 20
    assert list(tmp_path.iterdir()) == []


def test_measure_refuses(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError, match="is not there"):
        measure(tmp_path / "nowhere")
    with pytest.raises(DiskFullError, match="not enough disk space"):
        measure(tmp_path, data_bytes_min=1 << 60)
    with pytest.raises(ValueError, match="engine must be one of"):
        measure(tmp_path, "fast")
    with pytest.raises(ValueError, match="seconds must be a number of more than 0"):
        measure(tmp_path, "threads", seconds=0)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(SourceError, match="cannot be written"):
        measure(tmp_path, "threads")


def test_dropping_leaves_files_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    drop_cached(tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"abc"


@pytest.mark.parametrize("engine", HERE)
def test_bench_cases(store: Store, engine: str) -> None:
    seen: list[Any] = []
    threads = threading.active_count()
    report = bench(
        store, "features", engine=engine, seconds=0.01, memory="64MiB", progress=lambda *a: seen.append(a)
    )
    assert threading.active_count() <= threads, "readers and engines are closed"
    assert len(seen) == 4
    table = store.tables["features"]
    cases = {case.name: case for case in report.cases}
    assert (report.engine, report.rows, report.row_bytes) == (engine, table.rows, 100)
    assert report.cache_state.startswith("cold" if report.access == "direct" else report.access)
    random, half, scan, memory = (
        cases[n] for n in ("random rows", "half of the pages", "scan", "rows in memory")
    )
    assert random.rows == random.requests * 1024
    assert scan.rows == scan.requests * table.rows
    assert half.rows == half.requests * (-(-table.rows // 40) // 2)
    assert memory.reads == 0
    for case in cases.values():
        assert case.rows_per_second == pytest.approx(case.rows / case.seconds)
        assert case.row_bytes_per_second == pytest.approx(case.rows_per_second * 100)


def test_bench_reads_in_store_order(tmp_path: Path) -> None:
    """A scan asks for node ids in row order, whatever the order: no byte is read twice."""
    rows = np.random.default_rng(0).standard_normal((4096, 32)).astype(np.float32)
    permutation = np.random.default_rng(1).permutation(4096)
    model = DeviceModel(1e-5, 1e-9, 1e-4)
    with featstore.pack(tmp_path / "s", rows, order="permutation", permutation=permutation) as packed:
        run = bench_module._Bench(packed, packed.tables["features"], "threads", 0.01, 64 << 20)
        scan, half = run.scan(), run.half_of_pages()
        assert scan.read_bytes_per_second == pytest.approx(scan.row_bytes_per_second)
        assert scan.reads == scan.requests * -(
            -packed.tables["features"].data_bytes // run._budget.extent_bytes_max
        )
        with packed.reader(engine="threads", static=None, model=model) as reader:
            pages = reader.plan(run._nodes_of(np.arange(0, 4096, 64))).tables[0].pages
        assert pages == 64
        assert half.rows == half.requests * 64
    assert not models_path().exists()


def _rate(engine: Any, threads: int | None, *rates: float) -> EngineRate:
    return EngineRate(engine, threads, rates if len(rates) > 1 else rates * 5, 1e-6)


def _rings(**rates: float) -> list[EngineRate]:
    return [_rate("uring", int(name[1:]), rate) for name, rate in rates.items()]


def test_as_many_threads_as_pay() -> None:
    assert decide_engine(_rings(r1=90, r2=95, r4=400), 0).threads == 1, "two are not worth it"
    assert decide_engine(_rings(r1=90, r2=170, r4=180, r8=900), 0).threads == 2
    assert decide_engine(_rings(r1=90, r2=170, r4=300), 0).threads == 4
    assert decide_engine(_rings(r1=90), 0).threads == 1


def test_the_engine_that_pays() -> None:
    slow_disk = decide_engine([*_rings(r1=90, r2=92), _rate("threads", None, 95)], 0)
    assert (slow_disk.best.engine, slow_disk.threads, slow_disk.open_because) == ("uring", 1, "")
    fast = decide_engine([*_rings(r1=200, r2=380), _rate("threads", None, 500)], 0)
    assert (fast.best.engine, fast.threads, fast.open_because) == ("threads", None, "")
    assert decide_engine([_rate("threads", None, 5)], 9).best.engine == "threads", "there is nothing else"


def test_a_busy_machine_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    found = [*_rings(r1=90, r2=92), _rate("threads", None, 500)]
    busy = decide_engine(found, 0.8)
    assert (busy.best.engine, busy.threads) == ("uring", None)
    assert busy.open_because == "other programs had 0.8 of 2 cores meanwhile"
    assert decide_engine(found, 0.2).open_because == ""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert decide_engine(found, 1.8).open_because == "", "there were cores enough for two rings"


def test_what_does_not_repeat_decides_nothing() -> None:
    once = decide_engine([*_rings(r1=90), _rate("uring", 2, 90, 200, 90, 90, 90)], 0)
    assert (once.threads, once.open_because) == (1, ""), "one round of five"
    rings = decide_engine([*_rings(r1=90), _rate("uring", 2, 90, 200, 90, 200, 200)], 0)
    assert rings.threads is None
    assert rings.open_because == "in some rounds 2 rings were faster than 1, in some not"
    engines = decide_engine([*_rings(r1=90), _rate("threads", None, 90, 200, 90, 200, 200)], 0)
    assert (engines.best.engine, engines.threads) == ("uring", 1)
    assert engines.open_because == "in some rounds engine threads was faster than uring, in some not"


def _run_at(rates: dict[tuple[str, int], float]) -> Any:
    """``LaneBench.run`` at these rates, which no other program's load can change."""
    real = LaneBench.run

    def run(self: LaneBench, extent_bytes: int, reads: int) -> float:
        real(self, extent_bytes, reads)
        return reads / rates[self._engine.name, self.threads if self._engine.name == "uring" else 0]

    return run


def test_engines_are_measured_kept_and_used(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rings, where twice as many are faster; a reader that is told takes what it is told."""
    if "uring" not in HERE:
        pytest.skip("io_uring does not work here")
    monkeypatch.setattr(module, "available_cores", lambda: 4)
    rates = {("uring", 1): 1e5, ("uring", 2): 1e6, ("uring", 4): 1.1e6, ("threads", 0): 1.1e6}
    monkeypatch.setattr(LaneBench, "run", _run_at(rates))
    monkeypatch.setattr("featstore.measure.calibrate.DATA_BYTES_MIN", 0)
    calibrate(store.path, seconds=0.05)
    with store.reader(static=None) as reader:
        assert reader.engine.name == "uring"
        assert reader._engine is not None
        assert reader._engine.threads == 2, "four are as fast as two"
        assert "1,100,000 through uring" in reader.engine.because or reader.access != "direct"
    with store.reader(engine="uring", static=None, threads=1) as reader:
        assert reader._engine is not None
        assert reader._engine.threads == 1
    rates["threads", 0] = 4e6
    result = measure(store.path, seconds=0.05, data_bytes_min=0)
    assert (result.engine, result.model.threads) == ("threads", None)
    assert {(one.engine, one.threads) for one in result.rates} == {
        ("uring", 1), ("uring", 2), ("uring", 4), ("threads", None)
    }  # fmt: skip
    assert all(one.cpu_seconds > 0 for one in result.rates)
    if result.access != "direct":
        pytest.skip("no direct reads here")
    keep(result)
    with store.reader(static=None) as reader:
        assert reader.engine.name == "threads"
        assert reader.model.read_cpu_seconds == result.model.read_cpu_seconds
        assert "4,000,000 through threads" in reader.engine.because
    with store.reader(static=None, threads=2) as reader:
        assert reader.engine.name == "uring", "of two threads only rings keep many reads under way"


def test_what_is_left_open_is_told_and_keeps_no_engine(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    if "uring" not in HERE:
        pytest.skip("io_uring does not work here")
    monkeypatch.setattr("featstore.measure.calibrate.DATA_BYTES_MIN", 0)
    monkeypatch.setattr(module, "busy_core_seconds", iter([0.0, 1e6]).__next__)
    with pytest.warns(FeatstoreWarning, match="left open: other programs had .* Calibrate again when"):
        model = calibrate(store.path, seconds=0.05)
    assert (model.threads, model.engine) == (None, None)
    assert calibrated_engine(store.path) is None
    with store.reader(static=None) as reader:
        assert (reader.engine.name, reader.model) == ("uring", model)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no second device is known here")
def test_what_writing_costs_is_of_the_store_s_own_device(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside where the store is, and not beside a link to it."""
    asked: list[Path] = []
    monkeypatch.setattr(calibrate_module, "_write_byte_seconds", lambda beside, _: asked.append(beside))
    os.symlink(store.path, tmp_path / "link")
    measure(tmp_path / "link", HERE[0], seconds=0.05, data_bytes_min=0)
    assert asked == [store.path.parent.resolve()]
    monkeypatch.undo()
    other = Path("/dev/shm") if os.stat("/dev/shm").st_dev != os.stat(store.path).st_dev else Path("/")
    assert os.stat(other).st_dev != os.stat(store.path).st_dev
    assert calibrate_module._write_byte_seconds(other, store.path) is None
