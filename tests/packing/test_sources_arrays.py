"""Arrays of any library keep their shape, and an item that may be a row or a block is asked about."""

from __future__ import annotations

import array as buffers
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, SequentialSampler

import featstore
from featstore.errors import FeatstoreWarning, SourceError
from featstore.packing.sources.opening import open_rows

MODEL = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)


class DataSet:
    """As h5py's: a shape, slices, rows when iterated over; nothing that makes it whole."""

    def __init__(self, values: NDArray[Any], chunks: tuple[int, ...] | None = None) -> None:
        self.values, self.chunks = values, chunks
        self.asked: list[tuple[int, int]] = []

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        self.asked.append((rows.start, rows.stop))
        return self.values[rows].copy()


class OnlyArray:
    """Nothing but ``__array__``."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return MODEL


class OnlyDlpack:
    """Nothing but DLPack."""

    def __dlpack__(self, **more: Any) -> Any:
        return MODEL.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def rows_of(spec: Any, block_rows: int = 7, start: int = 0, **options: Any) -> NDArray[Any]:
    source = open_rows(spec, **options)
    blocks = [block.copy() for block in source.blocks(start, block_rows)]
    assert all(1 <= len(block) <= block_rows for block in blocks)
    return np.concatenate(blocks)


@pytest.mark.parametrize("chunks", [None, (50, 8), (7, 3), (1000, 8)])
def test_a_data_set_is_an_array_and_is_never_read_whole(chunks: Any) -> None:
    given = DataSet(MODEL, chunks)
    source = open_rows(given)
    assert (source.rows, source.row_shape, source.dtype) == (300, (8,), np.float32)
    assert np.array_equal(rows_of(given), MODEL)
    assert np.array_equal(rows_of(given, 64, 131), MODEL[131:])
    if chunks is None:
        assert max(stop - start for start, stop in given.asked) <= 64
    elif chunks[0] == 50:
        given.asked.clear()
        rows_of(given, 120)
        assert [asked for asked in given.asked if asked[1] - asked[0] > 1] == [
            (0, 100),
            (100, 200),
            (200, 300),
        ]


def test_a_data_set_of_other_shapes_and_byte_orders() -> None:
    for values in (np.arange(40), MODEL.reshape(-1, 2, 2, 2), MODEL.astype(">f8"), MODEL[:0]):
        source = open_rows(DataSet(values))
        assert (source.rows, source.row_shape) == (values.shape[0], values.shape[1:])
        assert source.dtype == values.dtype.newbyteorder("<")
        if len(values):
            assert np.array_equal(rows_of(DataSet(values)), values)
    assert open_rows(DataSet(MODEL)).fingerprint() != open_rows(DataSet(MODEL + 1)).fingerprint()
    assert open_rows(DataSet(MODEL)).fingerprint() == open_rows(DataSet(MODEL.copy())).fingerprint()


@pytest.mark.parametrize("given", [OnlyArray(), OnlyDlpack()])
def test_what_has_an_array_is_one(given: Any) -> None:
    assert np.array_equal(rows_of(given), MODEL)
    assert np.array_equal(rows_of([given, given]), np.concatenate([MODEL, MODEL]))


def test_buffers_are_arrays() -> None:
    assert np.array_equal(rows_of(buffers.array("f", [1, 2, 3])), np.array([1, 2, 3], np.float32))
    assert np.array_equal(rows_of(memoryview(MODEL)), MODEL)


def test_arrays_that_lie_are_found_out() -> None:
    class Short(DataSet):
        def __getitem__(self, rows: slice) -> NDArray[Any]:
            return self.values[rows][: max(1, (rows.stop - rows.start) // 2)]

    class Other(DataSet):
        def __getitem__(self, rows: slice) -> NDArray[Any]:
            return self.values[rows].astype(np.float64 if rows.start else np.float32)

    class ByName(DataSet):
        def __getitem__(self, rows: Any) -> NDArray[Any]:
            raise KeyError(rows)

    with pytest.raises(SourceError, match=r"rows 0 to 7 should have shape \(7, 8\)"):
        rows_of(Short(MODEL))
    with pytest.raises(SourceError, match="dtype float64, the rows before float32"):
        rows_of(Other(MODEL))
    with pytest.raises(SourceError, match="cannot be decoded"):
        open_rows(ByName(MODEL))
    with pytest.raises(SourceError, match="0-d"):
        open_rows(DataSet(np.array(3.0)))
    with pytest.raises(SourceError, match="0-d"):
        open_rows(np.float32(3))


ROWS = [np.arange(8, dtype=np.float32) + i for i in range(100)]


@pytest.mark.parametrize("given", [list(ROWS), tuple(ROWS), [torch.from_numpy(row) for row in ROWS]])
def test_one_dimension_is_asked_about(given: Any) -> None:
    for spec in (given, iter(given), (row for row in given)):
        with pytest.raises(SourceError, match=r"one row of 8.*shape=\(-1, 8\).*shape=\(-1,\)"):
            open_rows(spec)
    for spec in (given, iter(given)):
        assert np.array_equal(rows_of(spec, shape=(-1, 8)), np.stack(ROWS))
    assert np.array_equal(rows_of(given, shape=(-1,)), np.concatenate(ROWS))
    assert np.array_equal(rows_of(given, 64, 37, shape=(100, 8)), np.stack(ROWS)[37:])


def test_a_shape_tells_rows_from_blocks_and_counts_them() -> None:
    mixed = [MODEL[0], MODEL[1:9], MODEL[9:9], MODEL[9], MODEL[10], MODEL[11:]]
    assert np.array_equal(rows_of(mixed, 4, shape=(-1, 8)), MODEL)
    assert np.array_equal(rows_of(mixed, 1000, shape=(300, 8)), MODEL)
    square = MODEL.reshape(-1, 2, 4)
    assert np.array_equal(rows_of(list(square), shape=(-1, 2, 4)), square)
    assert np.array_equal(rows_of(list(square)), square.reshape(-1, 4)), (
        "without a shape, two dimensions are a block"
    )
    assert np.array_equal(rows_of([np.float64(3), np.float64(4)], shape=(-1,)), np.array([3.0, 4.0]))
    for rows, message in ((99, "beyond rows=99"), (101, "ended after 100 rows, 101")):
        with pytest.raises(SourceError, match=message):
            rows_of(list(ROWS), shape=(rows, 8))
    for given, message in (
        ([np.zeros(7)], r"shape \(7,\), not|has rows of shape|item 0 has shape \(7,\)|not \(-1, 8\)"),
        ([np.zeros(8), np.zeros(7)], "block 1|item 1"),
        ([np.zeros((2, 2, 8))], r"item 0 has shape \(2, 2, 8\)"),
    ):
        with pytest.raises(SourceError, match=message):
            rows_of(given, shape=(-1, 8))


@pytest.mark.parametrize(
    "given",
    [
        [1.0, 2.0],
        [[1.0, 2.0], [3.0, 4.0]],
        [np.float32(1)],
        {1, 2},
        {"a": 1}.keys(),
        [(np.zeros(2),)],
        ["ab", 1],
        b"ab",
    ],
)
def test_what_is_no_array_is_refused(given: Any) -> None:
    with pytest.raises(SourceError, match=r"not an array of rows|cannot read rows"):
        open_rows(given)


def test_ragged_rows_are_named() -> None:
    with pytest.raises(SourceError, match="block 1"):
        rows_of([np.zeros((2, 8)), np.zeros((2, 7))])
    with pytest.raises(SourceError):
        open_rows(np.array([np.zeros(2), np.zeros(3)], object))


def test_masks_are_not_dropped() -> None:
    masked = np.ma.masked_array(MODEL, mask=MODEL > 2)
    for given in (masked, [masked], DataSet(masked)):
        with pytest.raises(SourceError, match="masked"):
            rows_of(given, 1000)
    assert np.array_equal(rows_of(np.ma.masked_array(MODEL)), MODEL)


def test_tables_with_named_columns_are_no_arrays() -> None:
    class Frame(DataSet):
        iloc = None
        __array__ = OnlyArray.__array__

    for given in (Frame(MODEL), [Frame(MODEL)]):
        with pytest.raises(SourceError, match=r"named columns.*to_numpy"):
            open_rows(given)
    arrow = pytest.importorskip("pyarrow")
    with pytest.raises(SourceError, match=r"named columns"):
        open_rows(arrow.array([1.0, 2.0]))


def test_a_column_whose_index_says_nothing_is_an_array() -> None:
    class Series(OnlyArray):
        iloc, ndim, shape, index = None, 1, (4,), range(4)

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
            return np.arange(4)

    assert np.array_equal(rows_of(Series()), np.arange(4))
    Series.index = range(1, 5)
    with pytest.raises(SourceError, match="index, which may be ids"):
        open_rows(Series())


def test_tensors_without_values_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    for tensor in (nested, torch.zeros((4, 2), device="meta")):
        with pytest.raises(SourceError, match="no rows to read"):
            open_rows(tensor)


def test_pack_takes_a_data_set_and_rows_one_by_one(tmp_path: Path) -> None:
    for name, features, shape in (
        ("a", DataSet(MODEL), None),
        ("b", iter(MODEL), (-1, 8)),
        ("c", list(MODEL), (300, 8)),
    ):
        with (
            featstore.pack(tmp_path / name, features, shape=shape) as store,
            store.reader(memory="16MiB") as reader,
        ):
            assert store.tables["features"].row_shape == (8,)
            assert np.array_equal(reader.read(np.arange(300)), MODEL)
    with pytest.raises(SourceError, match="one dimension"):
        featstore.pack(tmp_path / "d", (row for row in MODEL))
    assert not (tmp_path / "d").exists()


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 10

    def __getitem__(self, at: int) -> NDArray[Any]:
        return np.full(2, at, np.float32)


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(np.zeros((10, 2), np.float32))


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (Rows, {"shuffle": True}),
        (Rows, {"drop_last": True}),
        (Rows, {"sampler": [3, 3, 1]}),
        (Stream, {"drop_last": True}),
        (Stream, {"num_workers": 2}),
        (Rows, {"batch_size": 1, "batch_sampler": [[3, 1], [0, 2]]}),
        (
            Rows,
            {"batch_size": 1, "batch_sampler": BatchSampler(SequentialSampler(range(10)), 4, drop_last=True)},
        ),
        (Rows, {"num_workers": 2, "in_order": False}),
    ],
)
def test_loaders_that_do_not_give_all_in_order_are_refused(data: Any, options: dict[str, Any]) -> None:
    with pytest.raises(SourceError, match=r"row i would not be item i: make it with shuffle=False"):
        open_rows(torch.utils.data.DataLoader(data(), **{"batch_size": 4} | options))
    source = open_rows(torch.utils.data.DataLoader(Rows(), batch_size=4))
    assert np.concatenate([block.copy() for block in source.blocks()])[:, 0].tolist() == list(range(10))


@pytest.mark.parametrize("kind", ["npz", "zarr", "pt"])
def test_ids_beside_the_rows_of_a_file_are_not_left_out_unasked(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"x.{kind}"

    def write(**arrays: NDArray[Any]) -> None:
        if kind == "npz":
            np.savez(path, **arrays)  # type: ignore[arg-type]
        elif kind == "pt":
            torch.save({name: torch.tensor(array) for name, array in arrays.items()}, path)
        else:
            group = zarr.open_group(path, mode="w")
            for name, array in arrays.items():
                group[name] = array

    rows = np.arange(12.0).reshape(4, 3)
    write(x=rows, node_id=np.array([3, 1, 0, 2]))
    with pytest.raises(SourceError, match=r"'node_id' looks like the ids of the rows of 'x'.*key='x'"):
        open_rows(path)
    told = np.concatenate([block.copy() for block in open_rows(path, key="x").blocks()])
    write(x=rows, y=np.zeros(4), node_id=np.zeros(1))
    with pytest.warns(FeatstoreWarning, match="'x' is packed, and not 'node_id', 'y' beside it"):
        alone = np.concatenate([block.copy() for block in open_rows(path).blocks()])
    assert np.array_equal(told, rows)
    assert np.array_equal(alone, rows)


def test_what_cannot_be_read_beside_the_only_table_is_no_less_there(tmp_path: Path) -> None:
    path, rows = tmp_path / "x.npz", np.arange(12.0).reshape(4, 3)
    ids = np.array(["3", "1", "0", "2"], object)
    np.savez(path, x=rows, node_id=ids)
    with pytest.raises(SourceError, match="'node_id' looks like the ids of the rows of 'x'"):
        open_rows(path)
    np.savez(path, x=rows, about=np.array({"a": 1}, object))
    with pytest.warns(FeatstoreWarning, match="'x' is packed, and not 'about' beside it"):
        open_rows(path)
    np.savez(path, x=rows.astype(object), y=np.zeros(4))
    with pytest.raises(SourceError, match=r"x.*object"):
        open_rows(path)
    sparse = {
        "attr_data": np.ones(2),
        "attr_indices": np.array([0, 1]),
        "attr_indptr": np.array([0, 1, 2, 2, 2]),
    }
    sparse["attr_shape"] = np.array([4, 3])
    np.savez(path, **sparse, node_id=np.array([3, 1, 0, 2]))
    with pytest.raises(SourceError, match="'node_id' looks like the ids of the rows of 'attr'"):
        open_rows(path)
    np.savez(path, **sparse, labels=np.zeros(4))
    with pytest.warns(FeatstoreWarning, match="'attr' is packed, and not 'labels' beside it"):
        open_rows(path)


def test_what_is_no_tensor_beside_the_only_one_is_no_less_there(tmp_path: Path) -> None:
    path, rows = tmp_path / "x.pt", torch.arange(12.0).reshape(4, 3)
    torch.save({"x": rows, "node_id": [3, 1, 0, 2]}, path)
    with pytest.raises(SourceError, match="'node_id' looks like the ids of the rows of 'x'"):
        open_rows(path)
    torch.save({"feat": {"paper": rows, "author": rows}, "label": torch.zeros(4)}, path)
    with pytest.raises(SourceError, match="'label' is the only tensor, of one axis, and 'feat' beside it"):
        open_rows(path)
    torch.save({"x": rows, "epoch": 3}, path)
    with pytest.warns(FeatstoreWarning, match="'x' is packed, and not 'epoch' beside it"):
        open_rows(path)
