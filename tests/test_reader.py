"""The reader: what it accepts and returns, what it says of itself, what memory it takes, how it opens
files."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import featstore
from featstore.engine import ENGINES
from featstore.errors import BudgetError, ClosedError, DeviceError, IdError
from featstore.plan.cost import DeviceModel
from featstore.reader import lookup as lookup_module
from featstore.reader.reader import Reader

MEMORY = "4MiB"


@pytest.fixture
def reader(store: featstore.Store, engine: str) -> Any:
    with store.reader(memory=MEMORY, engine=engine) as made:
        yield made


# What goes in and comes out.


@pytest.mark.parametrize(
    "ids",
    [
        [],
        [[]],
        7,
        [7],
        [7, 7, 7],
        [999, 0, 500, 0],
        np.arange(1000),
        np.arange(1000)[::-3],
        np.arange(24).reshape(2, 3, 4),
        range(5, 9),
    ],
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
    with pytest.raises(
        IdError, match=r"node id 1000 is out of range: table 'features' has 1,000 rows \(ids 0 to 999\)"
    ):
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
        assert torch.equal(
            mixed["author"].view(torch.int16), torch.from_numpy(data["author"][[2, 3]].view(np.int16))
        )
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


@pytest.mark.parametrize(
    "options", [{"queue_depth": 0}, {"engine": "aio"}, {"memory": "lots"}, {"memory": 0}, {"static": "warm"}]
)
def test_bad_options(store: featstore.Store, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        store.reader(**options)


# Plans and statistics.


def test_a_plan_says_what_a_read_then_does(store: featstore.Store, engine: str) -> None:
    model = DeviceModel(2 * 4096e-9, 1e-9, 1e-4)
    with store.reader(memory=MEMORY, engine=engine, model=model, static=np.arange(50)) as reader:
        for ids in (
            np.arange(1000),
            np.array([1, 1, 700]),
            np.arange(0, 1000, 90),
            np.arange(50),
            np.repeat(np.arange(1000), 60),
        ):
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


@pytest.mark.parametrize("static", [None, np.arange(900)])
def test_a_plan_and_what_was_read_mean_the_same_by_amplification(store: featstore.Store, static: Any) -> None:
    """Bytes read over bytes asked for, before and after, whatever tiers hold and however often an id is asked
    for."""
    with store.reader(memory=MEMORY, static=static) as reader:
        for ids in (np.arange(1000), np.arange(850, 1000).repeat(3), np.array([990]), np.arange(10)):
            plan, before = reader.plan(ids), reader.stats()
            reader.read(ids)
            stats = reader.stats().since(before)
            assert plan.tables[0].amplification == pytest.approx(stats.amplification)
            assert stats.amplification == pytest.approx(stats.bytes_read / (400 * len(ids)))
        plan = reader.plan([950, 950, 899, 0])
        text = str(plan)
        assert f"amplification {plan.bytes_read / 1600:.2f}: bytes read for each byte asked for, " in text
        assert (
            "50% of them from tiers and 25% asked for again" if static is not None else "25% asked for again"
        ) in text


def test_large_requests_read_each_page_once(store: featstore.Store) -> None:
    """Cut by ranges of rows, a request of many pieces reads hardly more than the table."""
    with store.reader(memory="700KiB") as reader:
        assert reader.budget.piece_ids_max == 1024
        ids = np.random.default_rng(0).permutation(np.repeat(np.arange(1000), 12))
        plan = reader.plan(ids)
        assert plan.bytes_read < 1.5 * 400_000
        assert plan.reads < 200


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
def test_too_small_a_budget_names_the_smallest_that_works(
    store: featstore.Store, features: np.ndarray, verify: bool, engine: str
) -> None:
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


# Access.


def test_a_file_system_without_direct_reads_is_said(
    monkeypatch: pytest.MonkeyPatch, store: featstore.Store, features: np.ndarray
) -> None:
    monkeypatch.setattr(
        "featstore.engine.files.direct_refusal", lambda path, size: "the file system refuses O_DIRECT"
    )
    for engine in ENGINES:
        with store.reader(memory=MEMORY, engine=engine) as reader:
            if engine == "mmap":
                assert (reader.access, reader.access_because) == ("mapped", "")
            else:
                assert (reader.access, reader.access_because) == (
                    "buffered",
                    "the file system refuses O_DIRECT",
                )
                assert reader.stats().access == "buffered"
            np.testing.assert_array_equal(reader.read(np.arange(1000)), features)


def test_a_store_in_memory(features: np.ndarray, tmp_path: Path, engine: str, pack: Any) -> None:
    shm = Path("/dev/shm")
    folder = (
        shm if shm.is_dir() and os.access(shm, os.W_OK) else tmp_path
    ) / f"featstore-test-{os.getpid()}-{engine}"
    try:
        with pack(folder, features) as store, store.reader(memory=MEMORY, engine=engine) as reader:
            assert reader.access in ("direct", "buffered", "mapped")
            assert bool(reader.access_because) == (reader.access == "buffered")
            np.testing.assert_array_equal(reader.read([999, 3]), features[[999, 3]])
    finally:
        import shutil

        shutil.rmtree(folder)


def test_the_engine_says_why(
    monkeypatch: pytest.MonkeyPatch, store: featstore.Store, features: np.ndarray
) -> None:
    def refuse() -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr("featstore.engine.liburing.probe", refuse)
    with store.reader(memory=MEMORY) as reader:
        assert reader.engine.name == "threads"
        assert "Operation not permitted" in reader.engine.because
        np.testing.assert_array_equal(reader.read([4]), features[[4]])
    with pytest.raises(OSError, match="not permitted"):
        store.reader(memory=MEMORY, engine="uring")


def test_large_lookups_use_helper_threads(
    monkeypatch: pytest.MonkeyPatch, store: featstore.Store, features: np.ndarray, engine: str
) -> None:
    monkeypatch.setattr(lookup_module, "_ALONE_BYTES", 1)
    monkeypatch.setattr(lookup_module, "_SHARE_BYTES", 1)
    with store.reader(memory=MEMORY, engine=engine, static=np.arange(0, 1000, 3)) as reader:
        for ids in (np.arange(1000), np.array([1]), np.repeat(np.arange(1000), 40)):
            np.testing.assert_array_equal(reader.read(ids), features[ids])
        for at in (0, 499, 999):
            bad = np.arange(1000)
            bad[at] = 1000
            with pytest.raises(IdError, match="node id 1000 "):
                reader.read(bad)


def test_a_small_request_is_answered_from_the_tier_and_counted(
    store: featstore.Store, features: np.ndarray, engine: str
) -> None:
    """All in the tier: no page is read. Some: those are read, and nothing is counted twice."""
    with store.reader(memory=MEMORY, engine=engine, static=np.arange(0, 1000, 2)) as reader:
        before = reader.stats()
        ids = np.array([998, 0, 2, 2, 500])
        np.testing.assert_array_equal(reader.read(ids), features[ids])
        after = reader.stats()
        assert after.reads == before.reads
        assert after.hits == {"static": 5}
        assert (after.requests, after.rows_asked) == (1, 5)
        mixed = np.array([998, 1, 2])
        np.testing.assert_array_equal(reader.read(mixed), features[mixed])
        after = reader.stats()
        assert after.reads == before.reads + 1
        assert after.hits == {"static": 7}
        assert (after.requests, after.rows_asked) == (2, 8)


def test_a_helper_that_wakes_late_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_module, "_ALONE_BYTES", 1)
    monkeypatch.setattr(lookup_module, "_SHARE_BYTES", 1)
    wake = threading.Event()
    helpers = ThreadPoolExecutor(1)
    helpers.submit(wake.wait)
    seen: list[tuple[int, int]] = []
    lookup_module._in_parallel(lambda a, b: seen.append((a, b)), 100, 1, helpers)
    wake.set()
    helpers.shutdown(wait=True)
    assert sorted(i for a, b in seen for i in range(a, b)) == list(range(100))


def test_interrupts_while_helpers_are_waited_for_hang_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come out when no helper writes any more, whether they come before a lock is taken or after."""
    monkeypatch.setattr(lookup_module, "_ALONE_BYTES", 1)
    monkeypatch.setattr(lookup_module, "_SHARE_BYTES", 1)
    helpers, seen = ThreadPoolExecutor(1), list[int]()
    real = threading.RLock

    class Interrupted:
        """A lock that is taken, or not yet, when the interrupt comes."""

        left = 2

        def __init__(self) -> None:
            self.lock = real()

        def acquire(self, blocking: bool = True) -> bool:
            if blocking and Interrupted.left:
                Interrupted.left -= 1
                if Interrupted.left:
                    self.lock.acquire()
                raise KeyboardInterrupt
            return self.lock.acquire(blocking)

        def release(self) -> None:
            self.lock.release()

        def __enter__(self) -> bool:  # as the pool's own, which are none of those
            return self.lock.__enter__()

        def __exit__(self, *error: Any) -> None:
            self.lock.__exit__(*error)

    def work(begin: int, end: int) -> None:
        time.sleep(0.001)
        seen.extend(range(begin, end))

    with monkeypatch.context() as patch:
        patch.setattr(lookup_module.threading, "RLock", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            lookup_module._in_parallel(work, 100, 1, helpers)
    count = len(seen)
    assert count
    time.sleep(0.05)
    assert len(seen) == count, "a helper still writes"
    helpers.shutdown(wait=True)


def test_a_matrix_as_out_is_filled(store: featstore.Store, features: np.ndarray) -> None:
    """np.matrix stays two-dimensional whatever it is reshaped to."""
    out = np.zeros((5, features.shape[1]), features.dtype).view(np.matrix)
    with store.reader(memory=MEMORY) as reader:
        reader.read(np.arange(5), out=out)
    np.testing.assert_array_equal(np.asarray(out), features[:5])


def test_odd_options_are_refused(store: featstore.Store) -> None:
    for depth in (0, -1, 5000):
        with pytest.raises(ValueError, match="queue_depth"):
            store.reader(memory=MEMORY, queue_depth=depth)
    with pytest.raises(TypeError):
        store.reader(memory=MEMORY, queue_depth=64.0)
    with store.reader(memory=MEMORY, tables="features") as reader:
        assert reader.read(np.array([], np.float32)).shape[0] == 0
    other = featstore.open(store.path)
    other.close()
    with pytest.raises(ClosedError, match="closed"):
        other.reader(memory=MEMORY)


def test_an_engine_that_cannot_run_tells_whoever_waits(
    monkeypatch: pytest.MonkeyPatch, store: featstore.Store, engine: str
) -> None:
    """The reading thread itself fails (a kernel that cannot be loaded, say): an error, not a hang."""
    from featstore.engine import pool, uring

    def broken(*arguments: object) -> int:
        raise RuntimeError("cannot load")

    with store.reader(memory=MEMORY, engine=engine) as reader:
        monkeypatch.setattr(uring, "drive", broken)
        monkeypatch.setattr(pool, "_work", broken)
        monkeypatch.setattr(pool, "_take_mapped", broken)
        for _ in range(2):
            with pytest.raises((DeviceError, ClosedError, RuntimeError)):
                reader.read([1, 2, 3])
