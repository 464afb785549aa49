"""The engine's contract: the same tests for io_uring, threads and mmap."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore.base.checksum import crc_pages
from featstore.base.files import direct_refusal, open_regular
from featstore.engine import ENGINES, make, ring_count, uring
from featstore.engine import counters as C
from featstore.engine.base import Engine
from featstore.engine.files import TableFiles
from featstore.engine.lane import Lane
from featstore.errors import CancelledError, ClosedError, CorruptionError, DeviceError
from featstore.layout import TableLayout
from featstore.plan.cost import DeviceModel
from featstore.plan.extents import plan_extents

PAGE = 4096
NONE = np.empty(0, np.int32)
#: Reads of single pages, reads of whole files, and something between.
RANDOM, SCAN, MIXED = (DeviceModel(pages * PAGE * 1e-9, 1e-9, 0.0) for pages in (0.0, 1e6, 3.0))


_benches: list[Bench] = []


@pytest.fixture(autouse=True)
def _closing() -> Iterator[None]:
    """Close the files of all tables that a test has made."""
    yield
    while _benches:
        _benches.pop().files.close()


class Bench:
    """A table in chunk files, and lanes over it."""

    def __init__(
        self, folder: Path, rows: int, row_bytes: int, access: str, *, verify: bool = True, seed: int = 0
    ) -> None:
        folder.mkdir()
        self.layout = TableLayout.choose(rows, row_bytes, 64 * 1024)
        padded = np.zeros(self.layout.chunks * self.layout.chunk_bytes, np.uint8)
        self.rows = np.random.default_rng(seed).integers(0, 256, (rows, row_bytes), np.uint8)
        padded[: rows * row_bytes] = self.rows.reshape(-1)
        self.paths = [folder / f"c.{k}" for k in range(self.layout.chunks)]
        for path, part in zip(self.paths, padded.reshape(self.layout.chunks, -1), strict=True):
            part.tofile(path)
        checksums = np.concatenate([crc_pages(part) for part in padded.reshape(self.layout.chunks, -1)])
        self.files = TableFiles(self.paths, self.layout, checksums if verify else None, access)  # type: ignore[arg-type]
        _benches.append(self)

    def lane(
        self, rows: Sequence[int] | np.ndarray, model: DeviceModel = RANDOM,
        extent_bytes_max: int = 512 * 1024, then: Callable[[Lane], None] | None = None,
    ) -> Running:  # fmt: skip
        rows = np.asarray(rows, np.int64)
        extents = plan_extents(
            rows, NONE, NONE.astype(np.uint8), max(1, len(rows)), self.layout, model, extent_bytes_max
        )
        return Running(self, rows, extents, then)


class Running:
    """A lane with its destination; ``wait`` gives its error."""

    def __init__(
        self, bench: Bench, rows: np.ndarray, extents: object, then: Callable[[Lane], None] | None
    ) -> None:
        self.bench, self.asked, self.extents = bench, rows, extents
        self.out = np.zeros(len(rows) * bench.layout.row_bytes, np.uint8)
        self.done = threading.Event()
        self.calls = 0

        def on_done(lane: Lane) -> None:
            self.calls += 1
            if then is not None:
                then(lane)
            self.done.set()

        e = extents
        self.lane = Lane(bench.files, e.page, e.pages, e.first, e.keys, e.position_bits, self.out, on_done)

    def wait(self) -> Exception | None:
        assert self.done.wait(20), "the lane never ended"
        assert self.calls == 1
        return self.lane.error()

    def check(self) -> None:
        assert self.wait() is None
        np.testing.assert_array_equal(
            self.out.reshape(len(self.asked), self.bench.layout.row_bytes), self.bench.rows[self.asked]
        )


def access_of(engine: str) -> str:
    return "mapped" if engine == "mmap" else "direct"


@pytest.fixture(params=[*ENGINES, "uring 2", "uring 4"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each engine, and with several rings, that all share small lanes, too, and whose number changes after
    every lane."""
    monkeypatch.setattr(ring_count, "RING_EXTENTS_MIN", 2)
    name: str = request.param
    if " " in name:
        monkeypatch.setattr(uring, "WINDOW_NS", 1)
        always = lambda self, load, over, working, most: 1 if working < most else -(working > 1)  # noqa: E731
        monkeypatch.setattr(ring_count.RingCount, "step", always)
    return name


def made_of(engine: str, queue_depth: int, staging_bytes: int, extent_bytes_max: int) -> Engine:
    name, _, rings = engine.partition(" ")
    made = make(name, queue_depth, staging_bytes, extent_bytes_max, int(rings) if rings else None)  # type: ignore[arg-type]
    return made


@pytest.fixture
def made(engine: str) -> Iterator[Engine]:
    engine_ = made_of(engine, 32, 4 * 2**20, 512 * 1024)
    yield engine_
    engine_.close()


@pytest.fixture
def reads_files(engine: str) -> str:
    """The engines that read through descriptors."""
    if engine == "mmap":
        return "threads"
    return engine


@pytest.fixture
def bench(tmp_path: Path, engine: str) -> Bench:
    return Bench(tmp_path / "table", 1000, 400, access_of(engine))


# Right rows.


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("rows", "row_bytes"),
    [(50_000, 1), (3, 1), (1000, 400), (200, 4096), (100, 5000), (23, 33_660), (7, 40_000)],
)
def test_rows_of_any_size(tmp_path: Path, made: Engine, rows: int, row_bytes: int, verify: bool) -> None:
    bench = Bench(tmp_path / "table", rows, row_bytes, made.access, verify=verify)
    rng = np.random.default_rng(rows)
    for model in (RANDOM, MIXED, SCAN):
        lane = bench.lane(rng.integers(0, rows, 150), model)
        made.start(lane.lane)
        lane.check()


def test_the_last_page_of_a_file_may_be_partial(tmp_path: Path, made: Engine) -> None:
    for rows in (1, 10, 11, 41):  # 400 to 16,400 bytes
        bench = Bench(tmp_path / str(rows), rows, 400, made.access, seed=rows)
        assert bench.layout.chunk_bytes % PAGE
        for model in (RANDOM, SCAN):
            lane = bench.lane([rows - 1, 0], model)
            made.start(lane.lane)
            lane.check()


def test_a_lane_without_extents_ends(bench: Bench, made: Engine) -> None:
    lane = bench.lane([])
    made.start(lane.lane)
    assert lane.wait() is None


def test_extents_up_to_the_longest_and_not_beyond(tmp_path: Path, engine: str) -> None:
    bench = Bench(tmp_path / "table", 1000, 400, access_of(engine))
    made = made_of(engine, 4, 8 * PAGE, 2 * PAGE)
    try:
        lane = bench.lane(np.arange(1000), SCAN, 2 * PAGE)
        assert lane.extents.pages.max() == 2
        made.start(lane.lane)
        lane.check()
        long = bench.lane(np.arange(1000), SCAN, 3 * PAGE)
        with pytest.raises(ValueError, match="extent of 3 pages does not fit"):
            made.start(long.lane)
        again = bench.lane([1, 2, 3], RANDOM, 2 * PAGE)
        made.start(again.lane)
        again.check()
    finally:
        made.close()


@pytest.mark.parametrize(
    ("depth", "staging_pages", "extent_pages"),
    [(1, 4, 1), (1, 8, 2), (2, 9, 2), (300, 40, 10), (7, 41, 10), (64, 12, 3)],
)
def test_any_depth_and_staging(
    tmp_path: Path, engine: str, depth: int, staging_pages: int, extent_pages: int
) -> None:
    bench = Bench(tmp_path / "table", 1000, 400 if extent_pages > 1 else 4096, access_of(engine))
    made = made_of(engine, depth, staging_pages * PAGE, extent_pages * PAGE)
    rng = np.random.default_rng(0)
    try:
        lanes = [
            bench.lane(rng.integers(0, 1000, 200), model, extent_pages * PAGE)
            for model in (RANDOM, MIXED, SCAN, RANDOM)
        ]
        for lane in lanes:
            made.start(lane.lane)
        for lane in lanes:
            lane.check()
    finally:
        made.close()


def test_many_lanes_of_several_tables_from_several_threads(tmp_path: Path, made: Engine) -> None:
    shapes = [(2000, 40), (1000, 400), (60, 9000), (300, 4096)]
    benches = [
        Bench(tmp_path / str(k), rows, row_bytes, made.access, seed=k)
        for k, (rows, row_bytes) in enumerate(shapes)
    ]
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            lanes = []
            for _ in range(12):
                bench = benches[rng.integers(len(benches))]
                lanes.append(
                    bench.lane(
                        rng.integers(0, len(bench.rows), rng.integers(0, 60)),
                        (RANDOM, MIXED, SCAN)[rng.integers(3)],
                    )
                )
                made.start(lanes[-1].lane)
            for lane in lanes:
                lane.check()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failed


def test_lanes_may_be_started_from_a_callback(bench: Bench, made: Engine) -> None:
    second = bench.lane([4, 5, 6])
    first = bench.lane([1, 2, 3], then=lambda _: made.start(second.lane))
    made.start(first.lane)
    first.check()
    second.check()


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_random_lanes(engine: str, tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    rng = np.random.default_rng(seed)
    row_bytes = int(rng.choice([1, 3, 100, 4095, 4096, 4097, 12_345]))
    bench = Bench(
        tmp_path_factory.mktemp("lanes") / "t",
        int(rng.integers(1, 60_000 // row_bytes + 30)),
        row_bytes,
        access_of(engine),
    )
    span = -(-(row_bytes - 1) // PAGE) + 1
    extent = int(rng.integers(span, span + 8))
    made = made_of(
        engine, int(rng.integers(1, 40)), int(rng.integers(4 * extent, 4 * extent + 60)) * PAGE, extent * PAGE
    )
    try:
        lanes = [
            bench.lane(rng.integers(0, len(bench.rows), 80), (RANDOM, MIXED, SCAN)[k % 3], extent * PAGE)
            for k in range(4)
        ]
        for lane in lanes:
            made.start(lane.lane)
        for lane in lanes:
            lane.check()
    finally:
        made.close()


# Counters.


def test_counters(bench: Bench, made: Engine) -> None:
    before = made.counters().copy()
    assert before.sum() == 0
    lanes = [bench.lane(np.arange(0, 1000, 7), model) for model in (RANDOM, SCAN)]
    for lane in lanes:
        made.start(lane.lane)
        lane.check()
    got = made.counters()
    reads = sum(lane.extents.reads for lane in lanes)
    assert got[C.READS] == reads
    assert got[C.LATENCY : C.LATENCY + C.LATENCY_BUCKETS].sum() == reads
    assert got[C.BYTES_READ] == sum(lane.extents.bytes_read for lane in lanes)
    assert got[C.SHORT_READS] == 0
    assert got[C.NS_VERIFY] > 0
    assert got[C.NS_COPY] > 0


# Errors.


def test_a_flipped_byte_is_found_and_only_where_it_is(bench: Bench, made: Engine) -> None:
    page = 2 * bench.layout.pages_per_chunk + 3  # in the third file
    with open(bench.paths[2], "r+b") as file:
        file.seek(3 * PAGE + 100)
        byte = file.read(1)[0]
        file.seek(3 * PAGE + 100)
        file.write(bytes([byte ^ 4]))
        os.fsync(file.fileno())
    begins, ends = np.arange(1000) * 400 // PAGE, (np.arange(1000) * 400 + 399) // PAGE
    touched = np.flatnonzero((begins <= page) & (page <= ends))
    for row in (touched[0], touched[len(touched) // 2], touched[-1]):
        lane = bench.lane([5, row, 900])
        made.start(lane.lane)
        error = lane.wait()
        assert isinstance(error, CorruptionError)
        assert (error.path, error.offset) == (str(bench.paths[2]), 3 * PAGE)
    others = bench.lane(np.setdiff1d(np.arange(1000), touched))
    made.start(others.lane)
    others.check()
    # the page is read, but no wanted row is on it
    bridged = bench.lane([touched[0] - 1, touched[-1] + 1], SCAN)
    assert bridged.extents.reads == 1
    made.start(bridged.lane)
    bridged.check()


@pytest.mark.parametrize("row_bytes", [512, 4096, 6000])
def test_a_bad_page_is_found_wherever_it_stands_among_others(
    tmp_path: Path, made: Engine, row_bytes: int
) -> None:
    """Isolated rows, of more extents than are taken together: the first, the last, and those at the seams."""
    bench = Bench(tmp_path / "table", 300 * PAGE // row_bytes, row_bytes, made.access)
    apart = -(-2 * PAGE // row_bytes)
    rows = np.random.default_rng(3).permutation(np.arange(0, len(bench.rows), apart))
    first = np.unique(rows * row_bytes // PAGE)
    for page in first[[0, 1, 7, 8, 9, 31, 32, 33, 63, 64, -2, -1]].tolist():
        file, offset = page // bench.layout.pages_per_chunk, page % bench.layout.pages_per_chunk * PAGE
        data = np.memmap(bench.paths[file], np.uint8, "r+")
        data[offset] ^= 128
        data.flush()
        lane = bench.lane(rows)
        made.start(lane.lane)
        error = lane.wait()
        assert isinstance(error, CorruptionError)
        assert (error.path, error.offset) == (str(bench.paths[file]), offset)
        data[offset] ^= 128
        data.flush()
    lane = bench.lane(rows)
    made.start(lane.lane)
    lane.check()


def test_without_checksums_a_flipped_byte_is_delivered(tmp_path: Path, made: Engine) -> None:
    bench = Bench(tmp_path / "table", 100, 400, made.access, verify=False)
    with open(bench.paths[0], "r+b") as file:
        file.write(bytes([bench.rows[0, 0] ^ 1]))
        os.fsync(file.fileno())
    lane = bench.lane([0])
    made.start(lane.lane)
    assert lane.wait() is None
    assert lane.out[0] == bench.rows[0, 0] ^ 1


@pytest.mark.parametrize("left", [0, 100, 3 * PAGE, 3 * PAGE + 17])
def test_a_file_cut_after_it_was_opened(bench: Bench, made: Engine, left: int) -> None:
    os.truncate(bench.paths[1], left)
    per_file = bench.layout.rows_per_chunk
    for model in (RANDOM, SCAN):
        lane = bench.lane(np.arange(per_file, 2 * per_file), model)
        made.start(lane.lane)
        error = lane.wait()
        assert isinstance(error, CorruptionError)
        assert error.path == str(bench.paths[1])
        assert "found" in str(error)
    if made.name != "mmap":  # which looks at the sizes of all files
        other = bench.lane(np.arange(per_file))
        made.start(other.lane)
        other.check()


def test_bad_descriptors_name_the_file_and_the_offset(tmp_path: Path, reads_files: str) -> None:
    bench = Bench(tmp_path / "table", 1000, 400, "direct")
    made = made_of(reads_files, 16, 2**20, 64 * 1024)
    write_only = os.open(bench.paths[0], os.O_WRONLY)
    kept = int(bench.files.handles[1])
    row = bench.layout.rows_per_chunk + 40  # in the second file, on its fourth page
    try:
        for bad in (write_only, 1_000_000, -1):
            bench.files.handles[1] = bad
            lane = bench.lane([row])
            made.start(lane.lane)
            error = lane.wait()
            assert isinstance(error, DeviceError)
            assert (error.errno, error.path, error.offset) == (
                9,
                str(bench.paths[1]),
                40 * 400 // PAGE * PAGE,
            )
            good = bench.lane([0, 1, 2])
            made.start(good.lane)
            good.check()
        bench.files.handles[1] = kept
        lane = bench.lane([row])
        made.start(lane.lane)
        lane.check()
    finally:
        os.close(write_only)
        made.close()


def test_one_bad_lane_does_not_spoil_the_others(tmp_path: Path, made: Engine) -> None:
    good, bad = (Bench(tmp_path / name, 1000, 400, made.access) for name in ("good", "bad"))
    with open(bad.paths[0], "r+b") as file:
        file.write(b"not what was written")
        os.fsync(file.fileno())
    lanes = [(good if k % 2 else bad).lane(np.arange(1000), MIXED) for k in range(20)]
    for lane in lanes:
        made.start(lane.lane)
    for k, lane in enumerate(lanes):
        if k % 2:
            lane.check()
        else:
            assert isinstance(lane.wait(), CorruptionError)


# Cancelling and closing.


def test_a_lane_cancelled_before_it_starts(bench: Bench, made: Engine) -> None:
    lane = bench.lane(np.arange(1000))
    lane.lane.cancel()
    made.start(lane.lane)
    assert isinstance(lane.wait(), CancelledError)
    assert not lane.out.any()


def test_lanes_cancelled_while_they_run(tmp_path: Path, made: Engine) -> None:
    bench = Bench(tmp_path / "table", 2000, 4096, made.access)
    for _ in range(3):
        lanes = [bench.lane(np.random.default_rng(k).permutation(2000)) for k in range(4)]
        for lane in lanes:
            made.start(lane.lane)
        for lane in lanes[::2]:
            lane.lane.cancel()
        for k, lane in enumerate(lanes):
            if k % 2:
                lane.check()
            else:
                error = lane.wait()
                assert error is None or isinstance(error, CancelledError)
                if error is None:
                    lane.check()


def test_close_waits_for_lanes_and_may_be_repeated(bench: Bench, engine: str) -> None:
    made = made_of(engine, 4, 4 * 64 * 1024, 64 * 1024)
    lanes = [bench.lane(np.arange(1000), RANDOM, 64 * 1024) for _ in range(20)]
    for lane in lanes:
        made.start(lane.lane)
    made.close()
    assert all(lane.done.is_set() for lane in lanes)
    for lane in lanes:
        lane.check()
    made.close()
    with pytest.raises(ClosedError, match="engine is closed"):
        made.start(bench.lane([1]).lane)


def test_engines_leave_no_threads_and_no_descriptors(bench: Bench, engine: str) -> None:
    def state() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    gc.collect()
    before = state()
    for _ in range(3):
        made = made_of(engine, 8, 2**20, 64 * 1024)
        lane = bench.lane(np.arange(100))
        made.start(lane.lane)
        lane.check()
        made.close()
    assert state() == before


# Opening files.


def test_opening_checks_kind_and_size(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 10)
    os.close(open_regular(path, 10))
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for name, found in (
        ("none", "no file"),
        ("link", "a symbolic link"),
        ("folder", "not a regular file"),
        ("fifo", "not a regular file"),
    ):
        with pytest.raises(CorruptionError, match=found) as caught:
            open_regular(tmp_path / name, 10)
        assert caught.value.path == str(tmp_path / name)
    with pytest.raises(CorruptionError, match="a file of 11 bytes, found 10 bytes"):
        open_regular(path, 11)
    with pytest.raises(CorruptionError, match="no file"):
        open_regular(path / "below", 1)


def test_tables_close_what_they_opened_when_a_file_is_bad(bench: Bench) -> None:
    gc.collect()
    count = len(os.listdir("/proc/self/fd"))
    bench.paths[-1].unlink()
    with pytest.raises(CorruptionError):
        TableFiles(bench.paths, bench.layout, None, "direct")
    assert len(os.listdir("/proc/self/fd")) == count
    with pytest.raises(ValueError, match="paths for a table"):
        TableFiles(bench.paths[:-1], bench.layout, None, "direct")


def test_where_direct_reads_are_refused_the_reason_is_kept(
    monkeypatch: pytest.MonkeyPatch, bench: Bench, made: Engine
) -> None:
    if made.access == "direct":
        assert direct_refusal(bench.paths[0], bench.layout.chunk_bytes) is None
        assert (bench.files.access, bench.files.buffered_because) == ("direct", "")
    monkeypatch.setattr("featstore.engine.files.direct_refusal", lambda path, size: "it is Tuesday")
    files = TableFiles(bench.paths, bench.layout, bench.files.checksums, made.access)
    assert files.access == ("mapped" if made.access == "mapped" else "buffered")
    assert files.buffered_because == ("" if made.access == "mapped" else "it is Tuesday")
    bench.files.close()
    bench.files = files
    lane = bench.lane(np.arange(1000), MIXED)
    made.start(lane.lane)
    lane.check()


def test_refusals_of_direct_io_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * PAGE)
    real_open, real_read = os.open, os.preadv

    def refuse_open(p, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(p, flags, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse_open)
        assert direct_refusal(path, PAGE) == "the file system refuses O_DIRECT"
    for number, expected in ((22, "refuses direct reads of 4 KiB"), (5, None)):

        def refuse_read(*arguments, number=number):
            raise OSError(number, "no")

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", refuse_read)
            if expected:
                assert expected in str(direct_refusal(path, PAGE))
            else:
                with pytest.raises(DeviceError, match="EIO"):
                    direct_refusal(path, PAGE)
    assert os.preadv is real_read
