"""Runs of rows read whole: every byte that is wanted, once, through each engine; and the plan behind it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import Gate
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
import featstore.layout.table
from featstore.engine import deliver
from featstore.errors import CancelledError, ClosedError, CorruptionError, FormatError, IdError
from featstore.layout import TableLayout
from featstore.plan.extents import plan_runs
from featstore.reader.reader import Reader
from featstore.units import PAGE_BYTES

MEMORY = "4MiB"
ROWS = 1000  # of 400 B, in four chunk files of 256 rows, the last one filled up

Runs = list[tuple[int, int]]


@pytest.fixture
def reader(store: featstore.Store, engine: str) -> Iterator[Reader]:
    with store.reader(memory=MEMORY, engine=engine, static=None) as made:
        yield made


@pytest.fixture(scope="session")
def on_disk(packed: Path, features: np.ndarray) -> np.ndarray:
    """The rows as they stand on disk."""
    with featstore.open(packed) as opened:
        return features[opened.tables["features"].node_of_row()]


def wanted(rows: np.ndarray, runs: Any) -> np.ndarray:
    """The twin: slices, one after the other."""
    return np.concatenate([rows[:0], *(rows[low:high] for low, high in runs)])


def runs_of(rows: int) -> st.SearchStrategy[Runs]:
    row = st.integers(0, rows)
    run = st.tuples(row, row).map(lambda pair: (min(pair), max(pair)))
    short = st.tuples(st.integers(0, rows - 1), st.integers(0, 3)).map(
        lambda r: (r[0], min(rows, r[0] + r[1]))
    )
    return st.lists(run | short, max_size=12)


@pytest.mark.parametrize("verify", [True, False])
def test_long_runs_go_past_the_caches_to_wherever_rows_are_wanted(
    tmp_path: Path, engine: str, verify: bool
) -> None:
    """Spans that are long enough for it, from any byte of a page to any byte of memory; nothing beside."""
    rows = np.random.default_rng(0).integers(0, 256, (40_000, 33), np.uint8)
    featstore.pack(tmp_path / "s", rows, order="given").close()
    options: dict[str, Any] = {"memory": "128MiB", "static": None, "engine": engine, "verify": verify}
    with featstore.open(tmp_path / "s") as store, store.reader(**options) as reader:
        for shift, low, high in ((0, 0, 40_000), (1, 1, 39_999), (17, 124, 20_001), (31, 30_000, 33_000)):
            count = high - low
            assert count * 33 > deliver._STREAMED_MIN
            memory = np.full(shift + count * 33 + 64, 7, np.uint8)
            out = memory[shift : shift + count * 33].reshape(count, 33)
            reader.read_runs({"features": [(low, high)]}, out={"features": out})
            np.testing.assert_array_equal(out, rows[low:high])
            assert (memory[:shift] == 7).all()
            assert (memory[shift + count * 33 :] == 7).all()
        assert reader.stats().bytes_read / reader.stats().reads > deliver._STREAMED_MIN


@pytest.mark.parametrize(
    "runs",
    [
        [(0, 1000)],
        [],
        [(5, 5)],
        [(0, 0), (1000, 1000)],
        [(999, 1000)],
        [(990, 1000)],
        [(0, 1)],
        [(255, 257)],
        [(200, 800)],
        [(0, 10), (10, 20), (20, 30)],
        [(20, 30), (10, 20), (0, 10)],
        [(0, 300), (100, 600), (0, 300)],
        [(3, 3), (4, 9), (9, 9), (9, 12)],
        [(k, k + 1) for k in range(0, 1000, 7)],
        [(0, 256), (256, 512)],
        [(256, 512), (0, 256)],
    ],
    ids=str,
)
def test_runs(reader: Reader, on_disk: np.ndarray, runs: Runs) -> None:
    found = reader.read_runs(runs)
    assert found.dtype == on_disk.dtype
    np.testing.assert_array_equal(found, wanted(on_disk, runs))
    np.testing.assert_array_equal(reader.submit_runs(np.array(runs, np.int32)).result(20), found)


@settings(max_examples=25)
@given(runs=runs_of(ROWS))
def test_random_runs(reader: Reader, on_disk: np.ndarray, runs: Runs) -> None:
    np.testing.assert_array_equal(reader.read_runs(runs), wanted(on_disk, runs))


@settings(max_examples=20)
@given(runs=runs_of(ROWS), data=st.data())
def test_runs_go_to_their_places(
    reader: Reader, on_disk: np.ndarray, runs: Runs, data: st.DataObject
) -> None:
    """Into an out that has room between them, in any order; what is between stays as it was."""
    order = data.draw(st.permutations(range(len(runs))))
    at, end = [0] * len(runs), 0
    for k in order:
        at[k] = end + data.draw(st.integers(0, 3))
        end = at[k] + runs[k][1] - runs[k][0]
    out = np.full((end + 2, 100), -1, np.float32)
    expected = out.copy()
    for (low, high), place in zip(runs, at, strict=True):
        expected[place : place + high - low] = on_disk[low:high]
    assert reader.read_runs(runs, out=out, at=at) is out
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("at", [[-1], [1], [2**63 - 1], [2**62], [0, 0], [0.0], [], [[0]]], ids=str)
def test_places_outside_of_out(reader: Reader, at: Any) -> None:
    out = np.full((10, 100), -1, np.float32)
    with pytest.raises(IdError):
        reader.read_runs([(5, 15)], out=out, at=at)
    assert (out == -1).all()
    with pytest.raises(ValueError, match="out"):
        reader.read_runs([(5, 15)], at=[0])


def test_out_is_filled_and_returned(reader: Reader, on_disk: np.ndarray) -> None:
    out = np.zeros((60, 100), np.float32)
    assert reader.read_runs([(0, 50), (900, 910)], out=out) is out
    np.testing.assert_array_equal(out, wanted(on_disk, [(0, 50), (900, 910)]))
    named = reader.read_runs({"features": [(7, 67)]}, out={"features": out})
    assert named["features"] is out
    np.testing.assert_array_equal(out, on_disk[7:67])
    for bad in (
        np.zeros((59, 100), np.float32),
        np.zeros((60, 100)),
        np.zeros((60, 200), np.float32)[:, ::2],
        [0.0],
    ):
        with pytest.raises(ValueError, match="out must be a C-contiguous"):
            reader.read_runs([(0, 60)], out=bad)


@pytest.mark.parametrize(
    "runs",
    [
        [(-1, 3)],
        [(0, 1001)],
        [(5, 4)],
        [(0, 3), (1000, 1001)],
        [0, 5],
        [[0, 5, 6]],
        [(0.0, 1.0)],
        [("0", "5")],
        [[True, True]],
        np.array([[2**63, 2**63 + 5]], np.uint64),
        np.array([[0, 2**64 - 1]], np.uint64),
        7,
        [[-(2**63), 5]],
    ],
    ids=str,
)
def test_what_is_no_run(reader: Reader, runs: Any) -> None:
    for read in (reader.read_runs, reader.submit_runs):
        with pytest.raises(IdError, match="run"):
            read(runs)
    assert len(reader.read_runs([(1, 3)])) == 2


def test_runs_may_be_changed_afterwards(store: featstore.Store, on_disk: np.ndarray) -> None:
    """What is submitted is what is read, into a result of that size, even if it is planned later."""
    with store.reader(memory=MEMORY, static=None) as reader:
        gate = Gate(reader)
        before = [reader.submit_runs([(0, 1)]) for _ in range(4)]  # these keep the planner busy
        runs = np.array([[10, 20], [300, 310]])
        request = reader.submit_runs(runs)
        runs[:] = [[0, 1000], [0, 1000]]
        gate.open()
        np.testing.assert_array_equal(request.result(20), wanted(on_disk, [(10, 20), (300, 310)]))
        for one in before:
            np.testing.assert_array_equal(one.result(20), on_disk[:1])


def test_tables_by_name(tmp_path: Path, pack: Any, engine: str) -> None:
    tables = {"a": np.arange(3000, dtype=np.int32).reshape(-1, 3), "b": np.arange(500, dtype=np.uint8)}
    pack(tmp_path / "s", tables, order="given").close()
    with (
        featstore.open(tmp_path / "s") as store,
        store.reader(memory="16MiB", engine=engine, static=None) as reader,
    ):
        found = reader.read_runs({"a": [(3, 900)], "b": [(0, 500), (1, 2)]})
        np.testing.assert_array_equal(found["a"], tables["a"][3:900])
        np.testing.assert_array_equal(found["b"], wanted(tables["b"], [(0, 500), (1, 2)]))
        out = {"b": np.zeros(20, np.uint8)}
        found = reader.read_runs({"a": [], "b": [(20, 40)]}, out=out)
        assert found["b"] is out["b"]
        assert found["a"].shape == (0, 3)
        np.testing.assert_array_equal(out["b"], tables["b"][20:40])
        with pytest.raises(IdError, match="2 tables; say which"):
            reader.read_runs([(0, 1)])
        with pytest.raises(KeyError, match="no table 'c'"):
            reader.read_runs({"c": [(0, 1)]})


@pytest.mark.parametrize("row_bytes", [1, 3, 4096, 5000, 12_288])
def test_rows_of_any_size(tmp_path: Path, pack: Any, engine: str, small_chunks: None, row_bytes: int) -> None:
    rows = max(7, 60_000 // row_bytes)
    table = (np.arange(rows * row_bytes) % 251).astype(np.uint8).reshape(rows, row_bytes)
    pack(tmp_path / "s", table).close()
    with (
        featstore.open(tmp_path / "s") as store,
        store.reader(memory="8MiB", engine=engine, static=None) as reader,
    ):
        rng = np.random.default_rng(row_bytes)
        for runs in (
            [(0, rows)],
            [(rows - 1, rows)],
            np.sort(rng.integers(0, rows + 1, (9, 2)), axis=1).tolist(),
        ):
            np.testing.assert_array_equal(reader.read_runs(runs), wanted(table, runs))


def test_a_table_without_rows(tmp_path: Path, pack: Any, engine: str) -> None:
    pack(tmp_path / "s", np.zeros((0, 3), np.float32)).close()
    with featstore.open(tmp_path / "s") as store, store.reader(memory=MEMORY, engine=engine) as reader:
        assert reader.read_runs([(0, 0)]).shape == (0, 3)
        with pytest.raises(IdError):
            reader.read_runs([(0, 1)])


def test_graphs_are_read_by_runs(tmp_path: Path, pack: Any, engine: str, small_chunks: None) -> None:
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 500, (2, 20_000))
    order = {"order": "permutation", "permutation": rng.permutation(500)}
    pack(tmp_path / "s", np.zeros((500, 2), np.float32), graph=edges, hubs=0.1, **order).close()
    with featstore.open(tmp_path / "s") as store:
        graph = store.graphs["features"]
        indptr, indices = graph.csc()
        np.testing.assert_array_equal(indices, edges[0][np.lexsort((edges[0], edges[1]))])
        np.testing.assert_array_equal(indptr, np.cumsum([0, *np.bincount(edges[1], minlength=500)]))
        offsets, node_of_row = graph.offsets(), graph.table.node_of_row()
        assert store.table("features/sources").layout.chunks > 3
        tables = ["features/sources", "features/offsets"]
        with store.reader(tables=tables, memory="8MiB", engine=engine, static=None) as reader:
            for low, high in ((0, 1), (100, 333), (499, 500)):
                asked = {
                    "features/sources": [(offsets[low], offsets[high])],
                    "features/offsets": [(low, high + 1)],
                }
                found = reader.read_runs(asked)
                np.testing.assert_array_equal(found["features/offsets"], offsets[low : high + 1])
                lists = [indices[indptr[v] : indptr[v + 1]] for v in node_of_row[low:high]]
                np.testing.assert_array_equal(node_of_row[found["features/sources"]], np.concatenate(lists))


# Damage.


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("chunk", "page"), [(0, 0), (1, 3), (2, 24)])
def test_a_corrupt_page_is_named(own: Path, on_disk: np.ndarray, engine: str, chunk: int, page: int) -> None:
    path = own / f"g000001/tables/features/rows/c.{chunk}.0"
    flip(path, page * PAGE_BYTES + 17)
    low = (256 * 400 * chunk + PAGE_BYTES * page) // 400  # rows that touch the page
    high = -(-(256 * 400 * chunk + PAGE_BYTES * (page + 1)) // 400)
    with featstore.open(own) as store, store.reader(memory=MEMORY, engine=engine, static=None) as reader:
        for runs in (
            [(0, 1000)],
            [(low, low + 1)] if page else [(low + 1, low + 2)],
            [(0, 0), (low, high)],
            [(5, 6), (high - 2, high)],
        ):
            with pytest.raises(CorruptionError) as caught:
                reader.read_runs(runs)
            assert (caught.value.path, caught.value.offset) == (str(path), page * PAGE_BYTES)
        good = [(0, low), (high, 1000)]  # its neighbours are right, even where they are read along with it
        np.testing.assert_array_equal(reader.read_runs(good), wanted(on_disk, good))
    with (
        featstore.open(own) as store,
        store.reader(memory=MEMORY, engine=engine, static=None, verify=False) as reader,
    ):
        assert (reader.read_runs([(0, 1000)]) != on_disk).sum() == 1


def test_a_page_that_is_read_along_is_not_verified(own: Path, on_disk: np.ndarray, engine: str) -> None:
    """The padding of the last file belongs to no run."""
    path = own / "g000001/tables/features/rows/c.3.0"
    flip(path, path.stat().st_size - 1)
    with featstore.open(own) as store, store.reader(memory=MEMORY, engine=engine, static=None) as reader:
        np.testing.assert_array_equal(reader.read_runs([(0, 1000)]), on_disk)


# a mapping of a file that shrinks cannot be read at all
@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_a_file_that_was_cut(own: Path, engine: str) -> None:
    with featstore.open(own) as store, store.reader(memory=MEMORY, engine=engine, static=None) as reader:
        path = own / "g000001/tables/features/rows/c.1.0"
        with open(path, "r+b") as file:
            file.truncate(8 * PAGE_BYTES)
        with pytest.raises(CorruptionError) as caught:
            reader.read_runs([(256, 512)])
        assert caught.value.path == str(path)


# Requests under way.


def test_cancel(store: featstore.Store, on_disk: np.ndarray, engine: str) -> None:
    with store.reader(memory=MEMORY, engine=engine, static=None) as reader:
        gate = Gate(reader)
        kept, dropped = reader.submit_runs([(0, 1000)]), reader.submit_runs([(0, 1000), (3, 5)])
        assert gate.arrived.acquire(timeout=10)
        assert gate.arrived.acquire(timeout=10)
        assert dropped.cancel()
        assert not dropped.done()
        gate.open()
        np.testing.assert_array_equal(kept.result(20), on_disk)
        assert isinstance(dropped.exception(20), CancelledError)
        assert dropped.cancelled()
        assert not kept.cancel()
        np.testing.assert_array_equal(reader.read_runs([(1, 2)]), on_disk[1:2])


def test_cancel_before_it_is_planned(store: featstore.Store, on_disk: np.ndarray) -> None:
    with store.reader(memory=MEMORY, static=None) as reader:
        gate = Gate(reader)
        requests = [reader.submit_runs([(k, k + 1)]) for k in range(8)]
        for request in requests[2:]:
            request.cancel()
        gate.open()
        for k, request in enumerate(requests):
            if k < 2:
                np.testing.assert_array_equal(request.result(20), on_disk[k : k + 1])
            else:
                assert isinstance(request.exception(20), CancelledError)


def test_runs_and_rows_from_several_threads(
    reader: Reader, on_disk: np.ndarray, features: np.ndarray
) -> None:
    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(10):
            runs = np.sort(rng.integers(0, 1001, (5, 2)), axis=1)
            ids = rng.integers(0, 1000, 200)
            both = reader.submit_runs(runs), reader.submit(ids)
            np.testing.assert_array_equal(both[0].result(20), wanted(on_disk, runs))
            np.testing.assert_array_equal(both[1].result(20), features[ids])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))


def test_what_is_counted(store: featstore.Store) -> None:
    with store.reader(memory=MEMORY, static=None) as reader:
        reader.read_runs([(0, 1000), (10, 20)])
        stats = reader.stats()
        assert (stats.requests, stats.rows_asked) == (1, 1010)
        layout = store.tables["features"].layout
        pages = -(-ROWS * 400 // PAGE_BYTES)
        ten = (20 * 400 - 1) // PAGE_BYTES - 10 * 400 // PAGE_BYTES + 1
        assert stats.bytes_read == (pages + ten) * PAGE_BYTES
        assert stats.reads >= layout.chunks + 1


def test_after_close(store: featstore.Store, engine: str) -> None:
    reader = store.reader(memory=MEMORY, engine=engine)
    done = reader.submit_runs([(0, 1000)])
    reader.close()
    assert len(done.result(10)) == 1000
    for read in (reader.read_runs, reader.submit_runs):
        with pytest.raises(ClosedError):
            read([(0, 1)])


def test_close_while_runs_are_read(store: featstore.Store, on_disk: np.ndarray, engine: str) -> None:
    reader = store.reader(memory=MEMORY, engine=engine)
    gate = Gate(reader)
    request = reader.submit_runs([(0, 1000)])
    assert gate.arrived.acquire(timeout=10)
    closing = threading.Thread(target=reader.close)
    closing.start()
    gate.open()
    closing.join(20)
    assert not closing.is_alive()
    np.testing.assert_array_equal(request.result(10), on_disk)


# The plan.


@st.composite
def layouts(draw: st.DrawFn) -> TableLayout:
    row_bytes = draw(st.sampled_from([1, 4, 7, 100, 400, 512, 4096, 4100, 9000]))
    rows = draw(st.integers(1, max(2, 200_000 // row_bytes)))
    return TableLayout.choose(rows, row_bytes, draw(st.sampled_from([4096, 16_384, 2**20])))


@settings(max_examples=50)
@given(layout=layouts(), limit=st.sampled_from([4096, 5000, 8192, 20_480, 2**20]), data=st.data())
def test_plans_read_every_wanted_byte_once(layout: TableLayout, limit: int, data: st.DataObject) -> None:
    runs = np.array(data.draw(runs_of(layout.rows)), np.int64).reshape(-1, 2)
    lengths = runs[:, 1] - runs[:, 0]
    places = np.cumsum(lengths) - lengths
    if spread := data.draw(st.booleans()):
        places += 3 * np.arange(len(runs))
    plan = plan_runs(runs, places if spread else None, layout, limit)
    size = layout.row_bytes
    wanted_bytes = np.full(int((places + lengths).max(initial=0)) * size, -1)
    for (low, high), place in zip(runs.tolist(), places.tolist(), strict=True):
        wanted_bytes[place * size : (place + high - low) * size] = np.arange(low * size, high * size)
    got = np.full(len(wanted_bytes), -1)
    per_file = layout.pages_per_chunk
    for (begin, end, to), page, pages in zip(
        plan.spans.tolist(), plan.page.tolist(), plan.pages.tolist(), strict=True
    ):
        assert begin < end
        assert (got[to : to + end - begin] == -1).all(), "no byte twice"
        got[to : to + end - begin] = np.arange(begin, end)
        assert (page, page + pages) == (begin // PAGE_BYTES, -(-end // PAGE_BYTES)), (
            "the pages of the span, no others"
        )
        assert page // per_file == (page + pages - 1) // per_file, "no read crosses the end of a file"
        assert pages * PAGE_BYTES <= max(limit, PAGE_BYTES)
    np.testing.assert_array_equal(got, wanted_bytes)
    assert plan.reads == len(plan.page)
    assert plan.bytes_read == int(plan.pages.sum()) * PAGE_BYTES


@settings(max_examples=35)
@given(layout=layouts(), limit=st.sampled_from([4096, 8192, 20_480, 2**20]), data=st.data())
def test_plans_do_not_read_in_small_pieces(layout: TableLayout, limit: int, data: st.DataObject) -> None:
    """The twin of one run: cut at the ends of files, and within a file at multiples of the longest read."""
    low = data.draw(st.integers(0, layout.rows - 1))
    high = data.draw(st.integers(low + 1, layout.rows))
    begin, end = low * layout.row_bytes, high * layout.row_bytes
    file_bytes = layout.pages_per_chunk * PAGE_BYTES
    cuts = [b for b in range(0, end, PAGE_BYTES) if b > begin and (b % file_bytes % limit == 0)]
    one = plan_runs(np.array([[low, high]]), None, layout, limit)
    assert one.spans[:, 0].tolist() == [begin, *cuts]
    assert one.spans[:, 1].tolist() == [*cuts, end]
    middle = (low + high) // 2  # two runs that follow each other are one
    two = plan_runs(np.array([[low, middle], [middle, middle], [middle, high]]), None, layout, limit)
    np.testing.assert_array_equal(two.spans, one.spans)
    apart = plan_runs(np.array([[low, middle], [middle, high]]), np.array([0, layout.rows]), layout, limit)
    assert apart.reads >= one.reads


def test_no_runs_plan_nothing() -> None:
    layout = TableLayout.choose(100, 40)
    for runs in (np.empty((0, 2), np.int64), np.array([[7, 7], [100, 100]])):
        plan = plan_runs(runs, None, layout, 4096)
        assert (plan.reads, plan.bytes_read) == (0, 0)


def test_tables_of_graphs_that_are_not_there(store: featstore.Store) -> None:
    with pytest.raises(KeyError, match="no table 'features/sources'"):
        store.reader(tables=["features/sources"])


def test_damaged_offsets_of_a_graph_are_found(tmp_path: Path, pack: Any) -> None:
    path = tmp_path / "s"
    pack(path, np.zeros((50, 2), np.float32), graph=np.zeros((2, 9), np.int64), order="given").close()
    copied = Path(shutil.copytree(path, tmp_path / "t"))
    flip(copied / "g000001/graphs/features/offsets/rows/c.0", 8)
    with featstore.open(copied) as store, pytest.raises((CorruptionError, FormatError), match="offsets"):
        store.graphs["features"].offsets()
