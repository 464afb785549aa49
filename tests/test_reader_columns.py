"""Some columns of rows: what comes is the rows' own columns, in every way of asking."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.errors import ArgumentError, ClosedError, IdError, NotInMemoryError, UnknownNameError

PackSmall = Callable[..., featstore.Store]

ROWS, WIDTH = 60, 7
MEMORY = "4MiB"
RECORD = np.dtype([("a", "<i2"), ("b", "<f8", (2,)), ("c", "<f4")])
TABLES: dict[str, np.ndarray] = {
    "wide": np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32),
    "half": (np.arange(ROWS * 3).reshape(ROWS, 3) % 50).astype(ml_dtypes.bfloat16),
    "records": np.array([(n % 7, (n, n / 2), -n) for n in range(ROWS)], RECORD),
    "numbers": np.arange(ROWS) / 3,
}
NAMED = {"wide": [5, 0, 5], "half": slice(1, None), "records": ["c", "a"]}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, pack: PackSmall) -> Iterator[featstore.Store]:
    with pack(tmp_path_factory.mktemp("columns") / "store", TABLES) as made:
        yield made


def expected(name: str, ids: Any) -> Any:
    rows = TABLES[name][ids]
    if name == "records":
        return np.array([(c, a) for a, _, c in rows], [("c", "<f4"), ("a", "<i2")])
    return rows if name == "numbers" else rows[..., NAMED[name]]


@pytest.mark.parametrize("options", [{}, {"policy": "lru"}], ids=["reader", "tiers"])
def test_columns_come_of_every_table(store: featstore.Store, options: dict[str, Any]) -> None:
    ids = np.array([3, 59, 3])
    with store.reader(columns=NAMED, memory=MEMORY, **options) as reader:
        found = reader.read(dict.fromkeys(TABLES, ids))
        later = reader.submit(dict.fromkeys(TABLES, ids)).result(20)
        for name in TABLES:
            wanted = expected(name, ids)
            table = reader.table(name)
            assert (table.row_shape, table.dtype, table.rows) == (wanted.shape[1:], wanted.dtype, ROWS)
            assert table.row_bytes * len(ids) == wanted.nbytes
            out = np.empty(wanted.shape, wanted.dtype)
            filled = reader.read({name: ids}, out={name: out})[name]
            again = np.empty(wanted.shape, wanted.dtype)
            reader.submit({name: ids}, out={name: again}).result(20)
            assert filled is out
            for rows in (found[name], later[name], out, again):
                assert rows.dtype == wanted.dtype
                assert rows.shape == wanted.shape
                assert rows.tobytes() == wanted.tobytes()
        tensors = reader.read({"wide": torch.from_numpy(ids), "half": torch.from_numpy(ids)})
        assert torch.equal(tensors["wide"], torch.from_numpy(expected("wide", ids)))
        assert torch.equal(
            tensors["half"].float(), torch.from_numpy(expected("half", ids).astype(np.float32))
        )
        out_tensor = torch.empty(3, 3)
        reader.read({"wide": torch.from_numpy(ids)}, out={"wide": out_tensor})
        assert torch.equal(out_tensor, tensors["wide"])
        assert reader.plan({"wide": ids}).tables[0].ids == 3
        assert reader.stats().bytes_asked >= 3 * WIDTH * 4
        assert sum(reader.memory().values()) == 4 * 2**20
    with pytest.raises(ClosedError):
        reader.read({"wide": ids})


COLUMNS = st.one_of(
    st.lists(st.integers(0, WIDTH - 1), min_size=1, max_size=9),
    st.builds(slice, st.none() | st.integers(-9, -4), st.none() | st.integers(4, 9)),
)


@given(columns=COLUMNS, ids=st.lists(st.integers(0, ROWS - 1), max_size=5), nested=st.booleans())
def test_columns_are_those_of_numpy(store: Any, reader: Any, columns: Any, ids: Any, nested: bool) -> None:
    wanted = np.array(ids, np.int64).reshape((1, -1) if nested else -1)
    found = type(reader)(reader._reader, columns).read(wanted)
    np.testing.assert_array_equal(found, TABLES["wide"][wanted][..., columns])
    assert found.ctypes.data % 64 == 0 or not found.size


@pytest.fixture(scope="module")
def reader(store: featstore.Store) -> Iterator[Any]:
    with store.reader(tables="wide", columns=[0], memory=MEMORY) as made:
        yield made


def test_a_table_with_columns_is_an_array(store: featstore.Store) -> None:
    with store.table("wide", memory=MEMORY, columns=[6, 1]) as array:
        assert array.shape == (ROWS, 2)
        np.testing.assert_array_equal(array[-3:], TABLES["wide"][-3:, [6, 1]])
        np.testing.assert_array_equal(array[4], TABLES["wide"][4, [6, 1]])
        np.testing.assert_array_equal(np.asarray(array), TABLES["wide"][:, [6, 1]])
        with pickle.loads(pickle.dumps(array)) as other:
            np.testing.assert_array_equal(other[[2]], TABLES["wide"][[2]][:, [6, 1]])


@pytest.mark.parametrize(
    ("table", "columns", "error", "says"),
    [
        ("wide", [WIDTH], ArgumentError, "at most 6"), ("wide", [-1], ArgumentError, "negative"),
        ("wide", [], ArgumentError, "no column"), ("wide", slice(7, None), ArgumentError, "no column"),
        ("wide", slice(None, None, 0), ArgumentError, "step"), ("wide", ["a"], ArgumentError, "whole number"),
        ("wide", "ab", ArgumentError, "list"), ("wide", {"no": [1]}, UnknownNameError, "'no'"),
        ("numbers", [0], ArgumentError, "one axis"), ("records", [0], UnknownNameError, "no field"),
        ("records", ["a", "a"], ArgumentError, "each once"), ("records", [], ArgumentError, "at least one"),
        ("records", ["d"], UnknownNameError, "no field 'd'"),
    ],
)  # fmt: skip
def test_wrong_columns_are_refused(store: Any, table: str, columns: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        store.reader(tables=table, columns=columns, memory=MEMORY)


def test_what_else_is_refused(store: featstore.Store, reader: Any) -> None:
    with pytest.raises(IdError, match="say which"):
        store.reader(columns=[0], memory=MEMORY)
    with pytest.raises(IdError):
        reader.read([ROWS])
    with pytest.raises(ArgumentError, match="out must be"):
        reader.read([1], out=np.empty((1, WIDTH), np.float32))
    with pytest.raises(ArgumentError, match="for every table"):
        reader.read({"wide": [1]}, out={})
    with pytest.raises(UnknownNameError):
        reader.table("no")
    with pytest.raises(NotInMemoryError):
        np.asarray(reader)
