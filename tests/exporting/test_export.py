"""Exported files hold the rows of the source, in the user's order, or are not there at all."""

from __future__ import annotations

import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.errors import (
    ArgumentError,
    BudgetError,
    CorruptionError,
    IdError,
    StoreExistsError,
    UnknownNameError,
)

ROWS = 500
RNG = np.random.default_rng(0)
TABLES = {
    "x": RNG.standard_normal((ROWS, 9)).astype(np.float32),
    "half": RNG.standard_normal((ROWS, 3)).astype(ml_dtypes.bfloat16),
    "label": RNG.integers(-9, 9, ROWS).astype(np.int16),
    "image": RNG.integers(0, 255, (ROWS, 2, 5)).astype(np.uint8),
    "record": np.array([(k % 7, k / 2) for k in range(ROWS)], [("a", "<i4"), ("b", "<f8")]),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows lie in another order than their ids."""
    path = tmp_path_factory.mktemp("export") / "s"
    graph = np.stack([RNG.integers(0, ROWS, 3000), RNG.integers(0, ROWS, 3000)])
    graphs = dict.fromkeys(TABLES, graph)
    featstore.pack(path, TABLES, graph=graphs, order="ldg", partitions=8).close()
    return path


def read_back(path: Path, name: str) -> Any:
    """What other programs read: ids (None where the file has none) and rows."""
    if path.suffix == ".npy":
        return None, np.load(path)
    if path.suffix == ".zarr":
        import zarr

        return None, zarr.open_array(str(path), mode="r")[...]
    import pyarrow.parquet as parquet

    table = parquet.read_table(path)
    column = table[name].combine_chunks()
    rows = column.flatten().to_numpy() if hasattr(column.type, "list_size") else column.to_numpy()
    return table["id"].to_numpy(), rows.reshape(table.num_rows, -1)


@pytest.mark.parametrize("kind", ["npy", "zarr", "parquet"])
@pytest.mark.parametrize("name", ["x", "label"])
def test_all_rows_in_the_order_of_their_ids(store: Path, tmp_path: Path, name: str, kind: str) -> None:
    told: list[tuple[str, int, int]] = []
    path = featstore.export(
        store, name, tmp_path / f"out.{kind}", memory="4MiB", progress=lambda *now: told.append(now)
    )
    ids, rows = read_back(path, name)
    np.testing.assert_array_equal(rows.reshape(TABLES[name].shape), TABLES[name])
    assert rows.dtype == TABLES[name].dtype
    assert ids is None or (ids == np.arange(ROWS)).all()
    assert told[-1] == ("export", ROWS, ROWS)
    assert os.listdir(tmp_path) == [path.name]


@given(
    data=st.data(), name=st.sampled_from(["x", "image", "record", "label"]),
    ids=st.none() | st.lists(st.integers(0, ROWS - 1), max_size=40),
)  # fmt: skip
def test_any_rows_and_columns(
    tmp_path_factory: pytest.TempPathFactory, store: Path, data: Any, name: str, ids: Any
) -> None:
    """Ids in any order and more than once; of rows with an axis any columns."""
    columns = None
    if name == "x":
        columns = data.draw(st.none() | st.lists(st.integers(0, 8), min_size=1) | st.just(slice(2, 7)))
    wanted = TABLES[name] if ids is None else TABLES[name][np.asarray(ids, np.int64)]
    wanted = wanted if columns is None else wanted[:, columns]
    given_ids = None if ids is None else np.asarray(ids, np.int32)
    path = featstore.export(
        store, name, tmp_path_factory.mktemp("any") / "o.npy", ids=given_ids, columns=columns,
        memory=data.draw(st.sampled_from(["4MiB", "64MiB"])), engine="mmap",
    )  # fmt: skip
    found = np.load(path)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


def test_bfloat16_only_as_a_type_that_others_have(store: Path, tmp_path: Path) -> None:
    for kind in ("npy", "zarr", "parquet"):
        with pytest.raises(ArgumentError, match=r"no type for bfloat16.*dtype=.float32."):
            featstore.export(store, "half", tmp_path / f"o.{kind}")
    with pytest.raises(ArgumentError, match="does not hold every value of bfloat16"):
        featstore.export(store, "half", tmp_path / "o.npy", dtype="float16")
    path = featstore.export(store, "half", tmp_path / "o.npy", dtype="float32")
    np.testing.assert_array_equal(np.load(path), TABLES["half"].astype(np.float32))


def test_wrong_calls_say_what_to_do_and_leave_nothing(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.npy"
    for error, words, call in (
        (ArgumentError, r"'\.npy', '\.zarr', '\.parquet', not '\.csv'", {"to": tmp_path / "o.csv"}),
        (UnknownNameError, "no table 'y'", {"table": "y"}),
        (IdError, r"ids\[1\] is 500, and the table has 500 rows", {"ids": [3, 500]}),
        (IdError, r"ids\[0\] is -1", {"ids": [-1]}),
        (IdError, "node ids must be integers", {"ids": [0.5]}),
        (IdError, "ids must have one axis", {"ids": [[1]]}),
        (ArgumentError, "a number of columns must be .*8", {"columns": [9]}),
        (ArgumentError, "a step of 0", {"columns": slice(0, 3, 0)}),
        (ArgumentError, "leaves no column of 9", {"columns": slice(9, None)}),
        (ArgumentError, "rows with one axis, and these have 2", {"table": "image", "columns": [0]}),
        (ArgumentError, "have 2 axes", {"table": "image", "to": tmp_path / "o.parquet"}),
        (ArgumentError, "export has no option 'queue_dept'", {"queue_dept": 3}),
        (ArgumentError, "dtype must be one of NumPy's", {"dtype": "float33"}),
        (ArgumentError, "does not hold every value", {"dtype": str}),
        (ArgumentError, "does not hold every value", {"dtype": object}),
        (ArgumentError, "does not hold every value", {"dtype": "m8"}),
        (BudgetError, "too small", {"memory": "1KiB"}),
    ):
        with pytest.raises(error, match=words):
            featstore.export(**{"store": store, "table": "x", "to": out} | call)  # type: ignore[arg-type]
        assert os.listdir(tmp_path) == []


def test_what_is_there_stays(store: Path, tmp_path: Path) -> None:
    for name in ("o.npy", "o.parquet", "o.zarr"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(StoreExistsError, match="is there already"):
            featstore.export(store, "x", tmp_path / name)
        assert (tmp_path / name).read_text() == "mine"
    featstore.export(store, "x", tmp_path / "o.npy", overwrite=True)
    np.testing.assert_array_equal(np.load(tmp_path / "o.npy"), TABLES["x"])
    (tmp_path / "d.npy").mkdir()
    with pytest.raises(StoreExistsError, match="move it away, for it is no file"):
        featstore.export(store, "x", tmp_path / "d.npy", overwrite=True)


@pytest.mark.parametrize("kind", ["npy", "zarr", "parquet"])
def test_a_corrupt_page_leaves_no_file(
    store: Path, tmp_path: Path, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bad = Path(shutil.copytree(store, tmp_path_factory.mktemp("bad") / "s"))
    with featstore.open(bad) as opened:
        chunk = bad / opened.tables["x"].entry.chunk_path(0)
    data = bytearray(chunk.read_bytes())
    data[5000] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(CorruptionError):
        featstore.export(bad, "x", tmp_path / f"o.{kind}")
    assert os.listdir(tmp_path) == []


def test_chunks_of_zarr_are_within_the_memory(tmp_path: Path) -> None:
    import zarr

    rows = np.random.default_rng(0).random((40_000, 64), np.float32)
    with featstore.pack(tmp_path / "s", rows) as made:
        small = featstore.export(made, "features", tmp_path / "small.zarr", memory="2MiB")
        large = featstore.export(made, "features", tmp_path / "large.zarr")
    sizes = []
    for path in (small, large):
        array = zarr.open_array(path, mode="r")
        np.testing.assert_array_equal(array[...], rows)
        sizes.append(int(np.prod(array.chunks)) * 4)
    assert sizes[0] < 2**20 < sizes[1] <= 8 << 20


def test_the_zarr_array_has_rows_in_the_order_on_disk(store: Path) -> None:
    with featstore.open(store) as opened:
        array, node_of_row = opened.zarr("x"), opened.tables["x"].node_of_row()
        assert (array.shape, array.dtype) == ((ROWS, 9), np.float32)
        assert node_of_row is not None
        np.testing.assert_array_equal(array[...], TABLES["x"][node_of_row])
        with pytest.raises(UnknownNameError, match="no table 'z'"):
            opened.zarr("z")


@pytest.mark.parametrize(
    ("stored", "wanted", "exact"),
    [
        ("int64", "float64", False), ("uint64", "float64", False), ("int64", "complex128", False),
        ("int32", "float64", True), ("uint32", "float64", True), ("int16", "float32", True),
    ],
)  # fmt: skip
def test_whole_numbers_are_not_rounded(tmp_path: Path, stored: str, wanted: str, exact: bool) -> None:
    """NumPy takes int64 to float64 for safe."""
    rows = np.array([[np.iinfo(stored).max], [1]], stored)
    featstore.pack(tmp_path / "s", rows).close()
    if exact:
        featstore.export(tmp_path / "s", "features", tmp_path / "o.npy", dtype=wanted)
        assert np.load(tmp_path / "o.npy").astype(stored).tolist() == rows.tolist()
    else:
        with pytest.raises(ArgumentError, match="does not hold every value"):
            featstore.export(tmp_path / "s", "features", tmp_path / "o.npy", dtype=wanted)


@pytest.mark.parametrize("name", ["o.npy", "o.parquet"])
def test_the_memory_that_is_said_to_be_needed_works(tmp_path: Path, name: str) -> None:
    """Where the reader has a share of it, and the reader of keys another."""
    rows = np.arange(40_000.0).reshape(20, 2000)
    keys = [f"node-{k}" for k in range(20)]
    featstore.pack(tmp_path / "s", rows, node_keys=keys).close()
    given, tries = 1 << 10, 0
    while True:
        try:
            featstore.export(tmp_path / "s", "features", tmp_path / name, memory=given)
            break
        except BudgetError as error:
            assert error.given_bytes == given
            assert error.needed_bytes > given
            given, tries = error.needed_bytes, tries + 1
    assert tries == 1
    with featstore.open(tmp_path / "s") as store:
        given, tries = 1 << 10, 0
        while True:
            try:
                with store.ids("features", memory=given) as ids:
                    assert ids.lookup(keys[3:5]).tolist() == [3, 4]
                break
            except BudgetError as error:
                assert error.given_bytes == given
                given, tries = error.needed_bytes, tries + 1
    assert tries == 1


@pytest.mark.parametrize("kind", ["npy", "zarr", "parquet"])
def test_links_on_the_way_are_followed(store: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "real")
    path = featstore.export(store, "x", tmp_path / "data" / f"o.{kind}")
    np.testing.assert_array_equal(read_back(path, "x")[1], TABLES["x"])
    assert os.listdir(tmp_path / "real") == [f"o.{kind}"]


@pytest.mark.parametrize("kind", ["npy", "zarr", "parquet"])
def test_what_comes_meanwhile_stays(store: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"o.{kind}"

    def another_writes(*_: Any) -> None:
        path.write_text("mine")

    with pytest.raises(StoreExistsError, match="is there already"):
        featstore.export(store, "x", path, progress=another_writes)
    assert path.read_text() == "mine"
    assert os.listdir(tmp_path) == [path.name]


def test_zeros_are_written_with_their_sign(tmp_path: Path) -> None:
    zeros = np.full((300, 4), complex(-0.0, -0.0), np.complex64)
    featstore.pack(tmp_path / "s", zeros).close()
    path = featstore.export(tmp_path / "s", "features", tmp_path / "o.zarr")
    assert np.signbit(read_back(path, "features")[1].view(np.float32)).all()
    assert [p.name for p in (path / "c").iterdir()]


def test_blocks_are_within_the_memory(tmp_path: Path) -> None:
    """Those that are cut, and those of nodes with long keys."""
    rows = np.ones((40_000, 128), np.float32)
    featstore.pack(tmp_path / "s", rows).close()
    keys = [f"{k:010000}" for k in range(4000)]
    featstore.pack(tmp_path / "k", rows[:4000, :1], node_keys=keys).close()
    del rows, keys
    for name, to, memory_bytes, more in (
        ("s", "o.npy", 16 << 20, {"columns": slice(0, 127)}),
        ("s", "p.npy", 16 << 20, {"dtype": "float64"}),
        ("k", "o.parquet", 24 << 20, {}),
    ):
        featstore.export(tmp_path / name, "features", tmp_path / f"0{to}", ids=[1], memory="24MiB", **more)  # type: ignore[arg-type]
        tracemalloc.start()
        try:
            featstore.export(tmp_path / name, "features", tmp_path / to, memory=memory_bytes, **more)  # type: ignore[arg-type]
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak_bytes < memory_bytes * 0.8, (name, to)


def test_a_reader_is_closed_whatever_happens(store: Path, tmp_path: Path) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    featstore.export(store, "x", tmp_path / "o.zarr", ids=[1])  # zarr has a loop of its own from then on
    shutil.rmtree(tmp_path / "o.zarr")
    before = len(os.listdir("/proc/self/fd"))
    for kind in ("npy", "zarr", "parquet"):
        with pytest.raises(KeyboardInterrupt) as kept:  # and with it the frames
            featstore.export(store, "x", tmp_path / f"o.{kind}", progress=stop)
        assert len(os.listdir("/proc/self/fd")) <= before, kept
    assert os.listdir(tmp_path) == []
