"""Structured arrays: records as they stand, fields as columns, and fields that look like ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import featstore
from featstore.errors import SourceError
from featstore.packing.sources.opening import open_rows

ROWS = 400
RNG = np.random.default_rng(0)
IDS = RNG.permutation(ROWS)
FEATURES = RNG.standard_normal((ROWS, 8)).astype(np.float32)


def records(**fields: Any) -> NDArray[Any]:
    out = np.zeros(
        len(next(iter(fields.values()))),
        [(name, values.dtype, values.shape[1:]) for name, values in fields.items()],
    )
    for name, values in fields.items():
        out[name] = values
    return out


def in_memory(array: NDArray[Any], folder: Path) -> Any:
    return array


def other_order(array: NDArray[Any], folder: Path) -> Any:
    return array.astype(array.dtype.newbyteorder(">"))


def npy(array: NDArray[Any], folder: Path) -> Any:
    np.save(folder / "x.npy", array)
    return folder / "x.npy"


def mapped(array: NDArray[Any], folder: Path) -> Any:
    return np.load(npy(array, folder), mmap_mode="r")


def npz(array: NDArray[Any], folder: Path) -> Any:
    np.savez_compressed(folder / "x.npz", x=array)
    return folder / "x.npz"


def blocks(array: NDArray[Any], folder: Path) -> Any:
    return np.array_split(array, 7)


class Sliced:
    """An array as those of h5py: a shape, and rows for ``[a:b]``."""

    def __init__(self, array: NDArray[Any], folder: Path) -> None:
        self.shape = array.shape
        self._array = array

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        return self._array[rows]


Form = Callable[[NDArray[Any], Path], Any]


@pytest.fixture(params=[in_memory, other_order, npy, mapped, npz, blocks, Sliced])
def form(request: pytest.FixtureRequest) -> Form:
    found: Form = request.param
    return found


def options(given: Any) -> dict[str, Any]:
    return {"shape": (-1,)} if isinstance(given, list) else {}


def stored(path: Path, given: Any, **asked: Any) -> NDArray[Any]:
    with featstore.pack(path, given, **options(given), **asked) as store:
        featstore.verify(path)
        with store.reader(memory="64MiB") as reader:
            return np.array(reader.read(np.arange(store.tables["features"].rows)))


def test_a_field_named_as_ids_is_refused_unless_told(tmp_path: Path, form: Form) -> None:
    array = records(node_id=IDS, x=FEATURES)
    given = form(array, tmp_path)
    with pytest.raises(SourceError, match=r"'node_id' looks like the ids.*id='node_id'.*columns="):
        featstore.pack(tmp_path / "refused", given, **options(given))
    placed = np.empty_like(FEATURES)
    placed[IDS] = FEATURES
    assert np.array_equal(stored(tmp_path / "placed", given, id="node_id"), placed)
    assert np.array_equal(stored(tmp_path / "named", given, columns=["x"]), FEATURES)
    assert np.array_equal(stored(tmp_path / "whole", given, columns="*"), array)


def test_a_field_of_ids_without_a_name_of_ids_is_refused(tmp_path: Path, form: Form) -> None:
    for values in (IDS, np.arange(ROWS)):
        for beside in (FEATURES, FEATURES[:, 0]):
            given = form(records(v=values, x=beside), tmp_path)
            with pytest.raises(SourceError, match="'v' looks like the ids"):
                open_rows(given, **options(given))


def test_ids_of_a_one_shot_iterator(tmp_path: Path) -> None:
    array = records(v=IDS, x=FEATURES[:, 0])
    given = iter(np.array_split(array, 7))
    with pytest.raises(SourceError, match="'v' looks like the ids"):
        open_rows(given, shape=(-1,))
    with pytest.raises(SourceError, match="pass of its own"):
        open_rows(iter([array]), shape=(-1,), id="v")
    years = records(year=np.repeat(np.arange(ROWS // 2), 2), x=FEATURES[:, 0])
    with featstore.pack(tmp_path / "s", iter(np.array_split(years, 7)), shape=(-1,)) as store:
        assert store.tables["features"].rows == ROWS  # what was looked at is there
        with store.reader(memory="64MiB") as reader:
            assert np.array_equal(reader.read(np.arange(ROWS)), years)


def test_fields_side_by_side(tmp_path: Path, form: Form) -> None:
    array = records(node_id=IDS, a=FEATURES[:, 0], b=FEATURES[:, 1], year=IDS // 2)
    given = form(array, tmp_path)
    assert np.array_equal(stored(tmp_path / "two", given, columns=["b", "a"]), FEATURES[:, [1, 0]])
    placed = np.empty((ROWS, 2), np.float32)
    placed[IDS] = FEATURES[:, :2]
    assert np.array_equal(
        stored(tmp_path / "placed", given, columns=["a", "b"], id="node_id", memory="16MiB"), placed
    )
    with pytest.raises(SourceError, match=r"cannot stand side by side.*float32, int64"):
        open_rows(given, id="node_id", **options(given))
    with pytest.raises(SourceError, match="no column 'z'; the columns are: node_id, a, b, year"):
        open_rows(given, columns=["z"], **options(given))
    named = open_rows(given, columns=["a"], **options(given))
    other = open_rows(given, columns=["b"], **options(given))
    assert named.fingerprint() == open_rows(given, columns=["a"], **options(given)).fingerprint()
    assert named.fingerprint() != other.fingerprint()


def test_fields_that_are_refused(tmp_path: Path) -> None:
    text = records(key=np.array(["a", "b", "c"]), x=np.arange(3.0))
    with pytest.raises(SourceError, match="'key' looks like the ids"):
        open_rows(text)
    with pytest.raises(SourceError, match="ids must be whole numbers"):
        open_rows(text, id="key")
    inside = np.zeros(3, [("meta", [("id", "<i8"), ("w", "<f4")]), ("x", "<f4")])
    with pytest.raises(SourceError, match=r"'meta\.id' looks like the ids"):
        open_rows(inside)
    with pytest.raises(SourceError, match="no column of numbers"):
        open_rows(inside, columns=["meta"])
    fields = records(a=FEATURES, b=FEATURES)
    with pytest.raises(SourceError, match="a column of lists is a table of its own"):
        open_rows(fields, columns=["a", "b"])
    with pytest.raises(SourceError, match=r"records of shape \(2,\)"):
        open_rows(np.zeros((3, 2), text.dtype), columns=["x"])
    twice = records(id=np.zeros(3, int), x=np.arange(3.0))
    with pytest.raises(SourceError, match="must come once"):
        featstore.pack(tmp_path / "s", twice, id="id")
    for one in (np.zeros((3, 1), twice.dtype), np.zeros(0, twice.dtype), np.zeros(1, twice.dtype)):
        with pytest.raises(SourceError, match="'id' looks like the ids"):
            open_rows(one)


@pytest.mark.parametrize(
    "array",
    [
        records(re=FEATURES[:, 0], im=FEATURES[:, 1]),
        records(a=IDS, b=IDS),  # all fields are alike
        records(ids=FEATURES),  # many values are no id
        records(when=np.arange(ROWS).astype("M8[s]"), x=FEATURES),
        np.zeros((ROWS, 5), [("id", "<i8"), ("w", "<f4")]),  # lists of neighbours with weights
        np.zeros(0, [("a", "<i8"), ("w", "<f4")]),
    ],
)
def test_records_without_ids_are_stored_as_they_stand(tmp_path: Path, array: NDArray[Any]) -> None:
    got = stored(tmp_path / "s", array)
    assert got.dtype == array.dtype
    assert np.array_equal(got, array)
