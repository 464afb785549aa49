"""Row sources: each kind gives back a NumPy model's rows, at any block size and start, and refuses what it
must."""

from __future__ import annotations

import gzip
import sys
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import scipy.sparse as sp
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import featstore
from featstore.errors import DeviceError, FeatstoreWarning, IdError, SourceError
from featstore.packing.sources.base import FileReader
from featstore.packing.sources.opening import (
    FeatureSource,
    IteratorRows,
    open_rows,
    pyg_arrays,
    pyg_graphs,
    pyg_tables,
)

with warnings.catch_warnings():
    # PyG's own import uses what torch deprecates; not ours to mend.
    warnings.simplefilter("ignore")
    from torch_geometric.data import Data, HeteroData

DTYPES = [
    "?",
    "u1",
    "<i2",
    ">i4",
    "<f2",
    ">f4",
    "<f8",
    "<c8",
    ">c16",
    "g",
    "<M8[ns]",
    ">m8[s]",
    "S3",
    "<U2",
    ">U2",
    "V5",
]
DTYPES += [[("a", ">f4"), ("b", "<i2")], np.dtype([("a", ">i2"), ("b", ">f8")], align=True)]


def rows_of(source: FeatureSource, start: int = 0, block_rows: int = 7) -> NDArray[Any]:
    """All rows from ``start`` on; holds the contract of `blocks` on the way."""
    parts = []
    for block in source.blocks(start, block_rows):
        assert 1 <= block.shape[0] <= block_rows
        assert block.shape[1:] == source.row_shape
        assert block.dtype == source.dtype
        assert block.flags.c_contiguous
        assert block.dtype.isnative
        parts.append(block.copy())
    return np.concatenate(parts) if parts else np.zeros((0, *source.row_shape), source.dtype)


def assert_same(got: NDArray[Any], model: NDArray[Any]) -> None:
    assert got.shape == model.shape
    if model.dtype.names:
        for field in model.dtype.names:
            np.testing.assert_array_equal(got[field], model[field])
    else:
        np.testing.assert_array_equal(got, model)


def check(source: FeatureSource, model: NDArray[Any]) -> None:
    assert source.rows in (None, model.shape[0])
    for block_rows in (1, 3, model.shape[0], 4 * model.shape[0]):
        for start in {0, 1, min(4, model.shape[0]), model.shape[0] - 1, model.shape[0]}:
            assert_same(rows_of(source, start, block_rows), model[start:])
    with pytest.raises(SourceError, match=r"cannot start|ended after|were expected"):
        rows_of(source, model.shape[0] + 1)
    assert source.fingerprint() == source.fingerprint()
    assert all(isinstance(value, str | int) for value in source.fingerprint().values())


def values(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> NDArray[Any]:
    kind = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    if kind.names:
        out = np.zeros(shape, kind)
        for field in kind.names:
            out[field] = rng.integers(0, 1000, shape)
        return out
    if kind.kind == "V":
        return rng.integers(0, 255, (*shape, kind.itemsize), dtype=np.uint8).view(kind)[..., 0]
    return rng.integers(0, 90, shape).astype(kind)


@settings(max_examples=35, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    fortran=st.booleans(),
    start=st.integers(0, 9),
    block_rows=st.integers(1, 11),
    container=st.sampled_from(["npy", "npz", "compressed", "memory", "memmap"]),
    seed=st.integers(0, 99),
)
def test_npy_and_npz_of_every_dtype_and_order(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: Any,
    shape: list[int],
    fortran: bool,
    start: int,
    block_rows: int,
    container: str,
    seed: int,
) -> None:
    model = values(tuple(shape), dtype, seed)
    model = np.asfortranarray(model) if fortran else model
    path = tmp_path_factory.mktemp("npy") / ("x.npz" if container in ("npz", "compressed") else "x.npy")
    spec: Any = path
    if container == "npz":
        np.savez(path, x=model)
    elif container == "compressed":
        np.savez_compressed(path, x=model)
    else:
        np.save(path, model)
    if container == "memory":
        spec = model
    elif container == "memmap":
        spec = np.lib.format.open_memmap(path, mode="r")
    source = open_rows(spec, key="x") if container in ("npz", "compressed") else open_rows(spec)
    start = min(start, shape[0])
    assert_same(rows_of(source, start, block_rows), model[start:])
    assert source.dtype == model.dtype.newbyteorder("<")
    assert source.row_shape == model.shape[1:]


def test_fortran_order_in_many_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featstore.packing.sources.files.READ_PIECE_BYTES", 64)
    model = np.asfortranarray(values((50, 3, 5), ">f4"))
    np.save(tmp_path / "x.npy", model)
    check(open_rows(tmp_path / "x.npy"), model)


def test_big_endian_structures_in_many_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featstore.packing.sources.base.READ_PIECE_BYTES", 64)
    model = values((50, 2), [("a", ">f4"), ("b", ">i2")])
    np.save(tmp_path / "x.npy", model)
    check(open_rows(tmp_path / "x.npy"), model)


def test_reader_gives_back_cache_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featstore.packing.sources.base.DROP_STEP_BYTES", 64)
    monkeypatch.setattr("featstore.packing.sources.base.DROP_RUN_BYTES", 32)
    (tmp_path / "x").write_bytes(bytes(range(200)))
    given: list[tuple[int, int]] = []
    with FileReader(tmp_path / "x") as reader:
        monkeypatch.setattr(FileReader, "_advise", lambda self, at, size, advice: given.append((at, size)))
        buffer = np.zeros(40, np.uint8)
        for at in (0, 40, 120, 160):
            reader.read_into(buffer, at)
            assert buffer.tolist() == list(range(at, at + 40))
    assert given == [(0, 80), (120, 80)]


def test_empty_table_and_one_column(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((0, 4), np.float32))
    assert rows_of(open_rows(tmp_path / "x.npy")).shape == (0, 4)
    check(open_rows(np.arange(9)), np.arange(9))


@pytest.mark.parametrize(
    "bad", [np.zeros((4, 0)), np.array(3.0), np.array([[None, 1]]), np.array([["a"]], dtype="O")]
)
def test_unusable_arrays(tmp_path: Path, bad: NDArray[Any]) -> None:
    with pytest.raises(SourceError):
        open_rows(bad)
    np.save(tmp_path / "x.npy", bad)
    with pytest.raises(SourceError, match=r"x\.npy"):
        open_rows(tmp_path / "x.npy")


def test_object_dtype_is_refused_by_its_reason(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[None]]))
    with pytest.raises(SourceError, match=r"Python objects.*pickle"):
        open_rows(tmp_path / "x.npy")
    np.savez(tmp_path / "x.npz", x=np.array([[None]]))
    with pytest.raises(SourceError, match=r"Python objects.*pickle"):
        open_rows(tmp_path / "x.npz")


def test_truncated_npy_says_sizes(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((100, 4), np.float32))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(SourceError, match=r"truncated.*1,728 bytes.*1,727"):
        open_rows(path)
    path.write_bytes(whole)
    source = open_rows(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(SourceError, match=r"truncated.*ends at byte 1,727"):
        rows_of(source)
    for size in (0, 3, 7, 9, 60):
        path.write_bytes(whole[:size])
        with pytest.raises(SourceError):
            open_rows(path)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4'}",
        "[1]",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 3)}",
        "(((",
        "os.system('x')",
        "{'descr': 'zz', 'fortran_order': False, 'shape': (1, 3)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': 3}",
    ],
)
def test_malformed_npy_header(tmp_path: Path, header: str) -> None:
    text = header.encode()
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    with pytest.raises(SourceError, match="malformed"):
        open_rows(tmp_path / "x.npy")


def test_npy_header_versions(tmp_path: Path) -> None:
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array(file, np.ones((3, 2)), version=(2, 0))
    check(open_rows(tmp_path / "x.npy"), np.ones((3, 2)))
    model = values((3, 2), [("größe", "<f4")])
    with (tmp_path / "y.npy").open("wb") as file:
        np.lib.format.write_array(file, model, version=(3, 0))
    check(open_rows(tmp_path / "y.npy"), model)
    (tmp_path / "z.npy").write_bytes(b"\x93NUMPY\x09\x00" + bytes(100))
    with pytest.raises(SourceError, match=r"version 9\.0"):
        open_rows(tmp_path / "z.npy")
    (tmp_path / "z.npy").write_bytes(b"\x93NUMPY\x02\x00" + b"\xff\xff\xff\x7f")
    with pytest.raises(SourceError, match="limit"):
        open_rows(tmp_path / "z.npy")


def test_raw_binary(tmp_path: Path) -> None:
    model = values((20, 3), ">f4")
    (tmp_path / "x.bin").write_bytes(b"head" + model.tobytes())
    check(open_rows(tmp_path / "x.bin", dtype=">f4", shape=(20, 3), offset=4), model)
    check(open_rows(tmp_path / "x.bin", dtype=">f4", shape=(-1, 3), offset=4), model)
    half = values((20, 3), "f4").astype(ml_dtypes.bfloat16)
    (tmp_path / "y.bin").write_bytes(half.tobytes())
    source = open_rows(tmp_path / "y.bin", dtype="bfloat16", shape=(-1, 3))
    assert source.dtype == ml_dtypes.bfloat16
    check(source, half)
    (tmp_path / "y.npy").write_bytes(half.tobytes())
    with pytest.raises(SourceError, match="can only be raw binary, which does not say what it"):
        open_rows(tmp_path / "y.npy")
    check(open_rows(tmp_path / "y.npy", dtype="bfloat16", shape=(20, 3)), half)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "f4"},
        {"shape": (4, 4)},
        {"dtype": "f4", "shape": (5, 4)},
        {"dtype": "f4", "shape": (-1, 7)},
        {"offset": 4},
        {"dtype": "f4", "shape": (4, 4), "offset": 1},
        {"dtype": "f4", "shape": (-1, 4), "offset": -16},
        {"key": "x"},
        {"dtype": "O", "shape": (4, 4)},
        {"dtype": "nonsense", "shape": (4, 4)},
        {"dtype": "f4", "shape": (4, -1)},
        {"dtype": "f4", "shape": ()},
        {"dtype": "f4", "shape": (4, 0)},
        {"dtype": "f4", "shape": (-1, 4), "offset": 999},
    ],
)
def test_raw_binary_that_does_not_fit(tmp_path: Path, options: dict[str, Any]) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(64))
    with pytest.raises(SourceError, match=r"x\.bin"):
        open_rows(tmp_path / "x.bin", **options)


def test_dtype_and_shape_must_agree_with_the_file(tmp_path: Path) -> None:
    half = values((6, 2), "f4").astype(ml_dtypes.bfloat16)
    np.save(tmp_path / "x.npy", half)
    check(open_rows(tmp_path / "x.npy", dtype="bfloat16", shape=(-1, 2)), half)
    for options in ({"dtype": "f4"}, {"shape": (6, 3)}, {"shape": (6,)}, {"rows": 7}):
        with pytest.raises(SourceError):
            open_rows(tmp_path / "x.npy", **options)  # type: ignore[arg-type]
        with pytest.raises(SourceError):
            open_rows(np.zeros((6, 2)), **options)  # type: ignore[arg-type]


def test_missing_and_unreadable_paths(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        open_rows(tmp_path / "absent.npy")
    with pytest.raises(SourceError, match="neither a zarr"):
        open_rows(tmp_path)
    with pytest.raises(DeviceError):
        FileReader(tmp_path).read_into(np.zeros(4, np.uint8), 0)


def test_npz_keys(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    table, other = values((9, 3), "f4"), values((9, 4), "u1")
    np.savez(path, table=table, label=np.arange(9))
    with pytest.warns(
        FeatstoreWarning, match=r"'table' is packed, and not 'label' beside it: say key='table'"
    ):
        check(open_rows(path), table)
    check(open_rows(path, key="table"), table)
    check(open_rows(path, key="label"), np.arange(9))
    np.savez(path, table=table, other=other)
    with pytest.raises(SourceError, match=r"table.*other"):
        open_rows(path)
    with pytest.raises(SourceError, match=r"no array 'absent'.*other.*table"):
        open_rows(path, key="absent")
    np.savez(path, one=np.zeros(3), two=np.zeros(3))
    with pytest.raises(SourceError, match=r"one .*two "):
        open_rows(path)
    with pytest.raises(SourceError):
        open_rows(path, key=["one", "two"])


def test_damaged_npz(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, x=np.arange(4000.0).reshape(-1, 4))
    whole = bytearray(path.read_bytes())
    whole[5000] ^= 1
    path.write_bytes(whole)
    with pytest.raises(SourceError, match="CRC"):
        rows_of(open_rows(path))
    path.write_bytes(whole[:500])
    with pytest.raises(SourceError, match=r"not a.*\.npz"):
        open_rows(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", bytes(whole[whole.index(b"\x93NUMPY") :][:600]))
    with pytest.raises(SourceError, match="truncated"):
        open_rows(path)


def sparse(dtype: str, rows: int = 40, columns: int = 17) -> Any:
    rng = np.random.default_rng(1)
    where = rng.random((rows, columns)) < 0.2
    where[5:9] = False
    return sp.csr_matrix(np.where(where, rng.integers(1, 9, (rows, columns)), 0).astype(dtype))


@pytest.mark.parametrize("dtype", ["?", "u1", "i8", "f4", "c16"])
@pytest.mark.parametrize("compressed", [True, False])
def test_sparse_matrices_become_dense(
    tmp_path: Path, dtype: str, compressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("featstore.packing.sources.npz.SPARSE_CHUNK", 8)
    monkeypatch.setattr("featstore.packing.sources.memory.CHUNK", 8)
    matrix = sparse(dtype)
    check(open_rows(matrix), matrix.toarray())
    check(open_rows(matrix.tocsc()), matrix.toarray())
    sp.save_npz(tmp_path / "x.npz", matrix, compressed=compressed)
    check(open_rows(tmp_path / "x.npz"), matrix.toarray())
    flat = {
        "feat_data": matrix.data,
        "feat_indices": matrix.indices,
        "feat_indptr": matrix.indptr,
        "feat_shape": matrix.shape,
    }
    (np.savez_compressed if compressed else np.savez)(
        tmp_path / "y.npz", indptr=np.arange(3), indices=np.arange(2), **flat
    )
    with pytest.warns(FeatstoreWarning, match="'feat' is packed, and not 'indices', 'indptr' beside it"):
        check(open_rows(tmp_path / "y.npz"), matrix.toarray())
    check(open_rows(tmp_path / "y.npz", key="feat"), matrix.toarray())


def test_sparse_duplicates_are_summed() -> None:
    matrix = sp.csr_matrix(
        (np.array([1.0, 2.0, 4.0]), np.array([1, 1, 0]), np.array([0, 2, 3])), shape=(2, 2)
    )
    check(open_rows(matrix), matrix.toarray())


def test_damaged_sparse_matrices(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    good = {
        "data": np.ones(3),
        "indices": np.array([0, 1, 0]),
        "indptr": np.array([0, 1, 3]),
        "shape": np.array([2, 2]),
    }
    broken: list[tuple[str, Any, str]] = [
        ("indices", np.array([0, 5, 0]), "column 5 in row 1"),
        ("indices", np.array([0, -1, 0]), "column -1"),
        ("indptr", np.array([0, 4, 3]), "do not ascend"),
        ("indptr", np.array([0, 2, 1]), "do not ascend"),
        ("indptr", np.array([0, -(2**63), 3]), "do not ascend"),
        ("indptr", np.array([0, 1, -(2**63)]), "do not ascend"),
        ("indptr", np.array([1, 2, 3]), "index pointer 1"),
        ("indptr", np.array([0, 3]), "index pointers"),
        ("indices", np.array([0, 1]), "column indices"),
        ("shape", np.array([2]), "two sizes"),
        ("shape", np.array([2, 0]), "column"),
        ("data", np.array(["a", "b", "c"]), "numbers"),
    ]
    for key, value, message in broken:
        np.savez(path, **{**good, key: value})
        with pytest.raises(SourceError, match=message):
            rows_of(open_rows(path))
    sp.save_npz(path, sparse("f4").tocsc())
    with pytest.raises(SourceError, match=r"'csc' layout.*tocsr"):
        open_rows(path)


@pytest.mark.parametrize("version", [2, 3])
def test_zarr(tmp_path: Path, version: Any) -> None:
    model = values((23, 5), "f4")
    array = zarr.create_array(
        tmp_path / "x", shape=model.shape, chunks=(4, 2), dtype="f4", zarr_format=version
    )
    array[:] = model
    check(open_rows(tmp_path / "x"), model)
    check(open_rows(array), model)
    group = zarr.open_group(tmp_path / "g", mode="w", zarr_format=version)
    for name in ("a", "b"):
        group.create_array(name, shape=model.shape, chunks=(23, 5), dtype="f4")[:] = model
    check(open_rows(tmp_path / "g", key="b"), model)
    with pytest.raises(SourceError, match="a, b"):
        open_rows(tmp_path / "g")
    with pytest.raises(SourceError, match="no array 'c'"):
        open_rows(tmp_path / "g", key="c")
    with pytest.raises(SourceError, match="array itself"):
        open_rows(tmp_path / "x", key="c")


def write_table(path: Path, table: Any) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=6)
    elif path.suffix == ".feather":
        feather.write_feather(table, path, chunksize=6, compression="lz4")
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
            out.write_table(table, max_chunksize=6)


@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".arrow"])
def test_columnar_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    model = values((20, 3), "f4")
    flat = pa.array(model.reshape(-1))
    fixed = pa.FixedSizeListArray.from_arrays(flat, 3)
    loose = pa.ListArray.from_arrays(pa.array(np.arange(0, 61, 3, dtype=np.int32)), flat)
    ids = pa.array(np.arange(20))
    write_table(path, pa.table({"id": ids, "x": fixed}))
    check(open_rows(path, columns="x"), model)
    check(open_rows(path, key="x"), model)
    check(open_rows(path, columns="id"), np.arange(20))
    write_table(path, pa.table({"x": fixed, "y": loose}))
    check(open_rows(path, key="y"), model)
    with pytest.raises(SourceError, match="x, y"):
        open_rows(path)
    with pytest.raises(SourceError, match="no column"):
        open_rows(path, key="z")
    nested = pa.FixedSizeListArray.from_arrays(
        pa.FixedSizeListArray.from_arrays(pa.array(np.arange(80)), 2), 2
    )
    write_table(path, pa.table({"n": nested}))
    check(open_rows(path), np.arange(80).reshape(20, 2, 2))
    write_table(
        path, pa.table({c: pa.array(model[:, i]) for i, c in enumerate("abc")} | {"s": pa.array(["t"] * 20)})
    )
    check(open_rows(path, columns=["a", "b", "c"]), model)
    check(open_rows(path, columns=["c", "a"]), model[:, [2, 0]])
    check(open_rows(path, columns=[2, 0]), model[:, [2, 0]])
    write_table(path, pa.table({"a": ids, "b": pa.array(model[:, 0])}))
    with pytest.raises(SourceError, match="float, int64"):
        open_rows(path)
    write_table(path, pa.table({"s": pa.array(["t"] * 20)}))
    with pytest.raises(SourceError, match=r"s \(string\)"):
        open_rows(path)


@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".arrow"])
def test_columnar_files_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    pieces: list[tuple[list[Any], str]] = [
        ([1.0] * 8 + [None], "null"),
        ([[1.0, 2.0]] * 8 + [None], "null"),
        ([[1.0, 2.0]] * 8 + [[1.0, None]], "null"),
        ([[1.0, 2.0]] * 8 + [[1.0]], "row 8, has 1 values, row 0 has 2"),
    ]
    for rows, message in pieces:
        write_table(path, pa.table({"x": pa.array(rows)}))
        with pytest.raises(SourceError, match=message):
            rows_of(open_rows(path), 0, 4)
    write_table(path, pa.table({"x": pa.array([], pa.float32())}))
    with pytest.raises(SourceError, match="no rows"):
        open_rows(path)
    path.write_bytes(b"ARROW1 and nothing else at all")
    with pytest.raises(SourceError, match="not a readable"):
        open_rows(path)


def test_torch_files_and_tensors(tmp_path: Path) -> None:
    tensor = torch.arange(60.0).reshape(20, 3)
    model = tensor.numpy()
    path = tmp_path / "x.pt"
    torch.save(tensor, path)
    check(open_rows(path), model)
    torch.save({"x": tensor.to(torch.bfloat16), "y": tensor[:, 0], "z": tensor.T}, path)
    source = open_rows(path, key="x")
    assert source.dtype == ml_dtypes.bfloat16
    check(source, model.astype(ml_dtypes.bfloat16))
    check(open_rows(path, key="z"), model.T)
    check(open_rows(tensor.T), model.T)
    check(open_rows(tensor.clone().requires_grad_()), model)
    check(open_rows(tensor.to(torch.complex64).conj()), model.astype(np.complex64))
    for key, message in ((None, "x, y, z"), ("w", "no tensor 'w'")):
        with pytest.raises(SourceError, match=message):
            open_rows(path, key=key)
    big = torch.arange(300_000.0).reshape(-1, 3)
    torch.save(big, path)
    assert_same(rows_of(open_rows(path), 5, 10_000), big.numpy()[5:])
    with pytest.raises(SourceError, match="leave key out"):
        open_rows(path, key="x")


def test_torch_files_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    for thing, message in (
        (Data(x=torch.ones(2, 2)), "more than plain"),
        ([1], "a list"),
        ({"a": 1}, "0 tensors"),
    ):
        torch.save(thing, path)
        with pytest.raises(SourceError, match=message):
            open_rows(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(SourceError, match="more than plain"):
        open_rows(path)
    for tensor in (torch.ones(2, 2).to_sparse(), torch.tensor(1.0), torch.ones(2, 2).to(torch.float8_e4m3fn)):
        with pytest.raises(SourceError):
            open_rows(tensor)


def write_gz(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.write(text)


def without_arrow(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pyarrow", "pyarrow.csv", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize("arrow", [True, False])
def test_ogb_folder(tmp_path: Path, arrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not arrow:
        without_arrow(monkeypatch)
    exact = np.random.default_rng(0).standard_normal((50, 4))
    write_gz(
        tmp_path / "raw/node-feat.csv.gz", "".join(",".join(map(repr, row)) + "\n" for row in exact.tolist())
    )
    check(open_rows(tmp_path), exact.astype(np.float32))
    assert open_rows(tmp_path).rows is None
    check(open_rows(tmp_path / "raw", dtype="float64"), exact)
    write_gz(tmp_path / "raw/num-node-list.csv.gz", "50\n")
    assert open_rows(tmp_path).rows == 50
    check(open_rows(tmp_path), exact.astype(np.float32))
    for what in ({"key": "x"}, {"offset": 8}):
        with pytest.raises(SourceError, match="by table"):
            open_rows(tmp_path, **what)
    for count, message in ((49, "more than the 49"), (51, "50 rows, 51 were expected")):
        write_gz(tmp_path / "raw/num-node-list.csv.gz", f"{count}\n")
        with pytest.raises(SourceError, match=message):
            rows_of(open_rows(tmp_path))


@pytest.mark.parametrize("arrow", [True, False])
def test_csv_text(tmp_path: Path, arrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not arrow:
        without_arrow(monkeypatch)
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,nan\n9007199254740993,4\n")
    assert_same(
        rows_of(open_rows(path, dtype="float32")), np.array([[1, np.nan], [9007199254740993, 4]], np.float32)
    )
    path.write_text("1,2\n9007199254740993,4\n")
    check(open_rows(path, dtype="int64"), np.array([[1, 2], [9007199254740993, 4]]))
    for text in ("1,2\n3\n", "1,2\n3,4,5\n", "1,2\n3,\n", "1,2\nx,4\n", "x,y\nx,y\n", ""):
        path.write_text(text)
        with pytest.raises(SourceError, match=r"x\.csv"):
            rows_of(open_rows(path))
    path.write_text("1,2\n")
    with pytest.raises(SourceError, match="numbers"):
        open_rows(path, dtype="S3")
    write_gz(tmp_path / "y.csv.gz", "1,2\n" * 5000)
    whole = (tmp_path / "y.csv.gz").read_bytes()
    (tmp_path / "y.csv.gz").write_bytes(whole[:-12])
    with pytest.raises(SourceError, match=r"y\.csv\.gz"):
        rows_of(open_rows(tmp_path / "y.csv.gz"), 0, 1000)


def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path / "x.parquet", pa.table({"x": [1.0]}))
    without_arrow(monkeypatch)
    with pytest.raises(SourceError, match=r"pip install 'featstore\[arrow\]'"):
        open_rows(tmp_path / "x.parquet")


def test_iterators() -> None:
    model = values((30, 3), ">f4")
    parts = [model[:4], model[4:4], np.asfortranarray(model[4:21]), torch.tensor(model[21:].astype("<f4"))]
    check(open_rows(parts, rows=30), model)
    check(open_rows(parts), model)
    source = open_rows((part for part in parts), rows=30)
    assert not source.replayable
    assert source.held_bytes == 4 * 12
    assert_same(rows_of(source, 2, 5), model[2:])
    with pytest.raises(SourceError, match="one-shot"):
        source.blocks(0, 5)


class GoesOn:
    """Goes on with a generator, whoever begins to go through it."""

    def __init__(self, parts: Any) -> None:
        self._parts = iter(parts)

    def __iter__(self) -> Any:
        yield from self._parts


class Stored(GoesOn):
    def __iter__(self) -> Any:
        return self._parts


class Raising(Sequence):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        if index == 1:
            raise IdError("not this one")
        return np.zeros((2, 2), np.float32)


@pytest.mark.parametrize("kind", [GoesOn, Stored])
def test_what_stands_around_a_generator_is_gone_through_once_and_whole(kind: Any, tmp_path: Path) -> None:
    model = values((30, 3), "<f4")
    parts = [model[:4], model[4:21], model[21:]]
    source = open_rows(kind(parts))
    assert_same(source.sample(2), model[:2])
    assert_same(rows_of(source), model)
    with pytest.raises(SourceError, match="does not begin it anew"):
        rows_of(source)
    with featstore.pack(tmp_path / "s", kind(parts)) as store, store.reader(memory="8MiB") as reader:
        assert_same(reader.read(np.arange(30)), model)


def test_a_generator_may_use_its_memory_again() -> None:
    model = values((30, 3), "<f4")

    def blocks() -> Any:
        held = np.empty((3, 3), np.float32)
        for low in range(0, 30, 3):
            held[...] = model[low : low + 3]
            yield held

    source = open_rows(blocks())
    assert_same(source.sample(7), model[:7])
    assert_same(rows_of(source), model)


def test_what_lies_between_fields_makes_no_other_block() -> None:
    whole = np.zeros(30, [("x", "f4"), ("noise", "i8"), ("y", "f4")])
    whole["x"], whole["y"], whole["noise"] = np.arange(30) / 7, np.arange(30) % 4 / 3, np.arange(30) * 2**40
    source = open_rows((whole[["x", "y"]][low : low + 3] for low in range(0, 30, 3)), shape=(-1,))
    found = rows_of(source)
    assert found.tobytes() == np.stack([whole["x"], whole["y"]], axis=1).tobytes()


def test_a_pass_that_gives_fewer_rows_is_told() -> None:
    class Shrinks:
        parts = 3

        def __iter__(self) -> Any:
            self.parts -= 1
            return iter([np.zeros((2, 2), np.float32)] * (self.parts + 1))

    source = open_rows(Shrinks())
    assert len(rows_of(source)) == 6
    with pytest.raises(SourceError, match="4 rows come, and 6 came before"):
        rows_of(source)


def test_an_error_of_a_sequence_is_not_its_end() -> None:
    with pytest.raises(IdError, match="not this one"):
        rows_of(open_rows(Raising()))


def test_iterators_refused() -> None:
    block = np.zeros((3, 2), np.float32)
    for bad, message in (
        (np.zeros((3, 3), np.float32), "block 2 has rows of shape"),
        (np.zeros((3, 2)), "block 2.*float64"),
        ([1, 2], "block 2 is a list"),
        (np.float32(1), "block 2 is a float32"),
    ):
        with pytest.raises(SourceError, match=message):
            rows_of(IteratorRows(iter([block, block, bad])))
    with pytest.raises(SourceError, match="no block"):
        IteratorRows([])
    with pytest.raises(SourceError, match="Python objects"):
        IteratorRows([np.array([[None]])])
    with pytest.raises(SourceError, match="block 1 ends at row 6, beyond rows=5"):
        rows_of(IteratorRows([block, block], rows=5))
    with pytest.raises(SourceError, match="ended after 6 rows, 7"):
        rows_of(IteratorRows([block, block], rows=7))
    with pytest.raises(SourceError, match="cannot read rows from a int"):
        open_rows(5)


def test_memmaps_are_read_by_their_files(tmp_path: Path) -> None:
    model = values((40, 3), "<i4")
    np.save(tmp_path / "x.npy", model)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    part = open_rows(mapped[7:30])
    assert part.fingerprint()["kind"] == "memmap"
    check(part, model[7:30])
    for view, expected in ((mapped[::2], model[::2]), (mapped + 1, model + 1), (mapped[:, 1:], model[:, 1:])):
        check(open_rows(view), expected)
    private = np.load(tmp_path / "x.npy", mmap_mode="c")
    private[3] = 77
    check(open_rows(private), np.asarray(private))
    (tmp_path / "y.bin").write_bytes(bytes(5000) + model.tobytes())
    shifted = np.memmap(tmp_path / "y.bin", dtype="<i4", mode="r", offset=5000, shape=(40, 3))
    assert open_rows(shifted).fingerprint()["offset"] == 5000
    check(open_rows(shifted), model)


def test_blocks_of_arrays_are_views_and_fingerprints_tell_apart(tmp_path: Path) -> None:
    model = values((40, 3), "<i4")
    assert np.shares_memory(next(open_rows(model).blocks(0, 8)), model)
    other = model.copy()
    other[-1] += 1
    assert open_rows(model).fingerprint() != open_rows(other).fingerprint()
    assert open_rows(torch.tensor(model)).fingerprint() != open_rows(torch.tensor(other)).fingerprint()
    with pytest.raises(ValueError, match="block_rows"):
        open_rows(model).blocks(0, 0)
    np.save(tmp_path / "x.npy", model)
    print_of = open_rows(tmp_path / "x.npy").fingerprint()
    assert print_of["path"] == str((tmp_path / "x.npy").absolute())
    assert print_of["size_bytes"] == (tmp_path / "x.npy").stat().st_size


def test_pyg_data() -> None:
    edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])
    data = Data(
        x=torch.ones(4, 2, dtype=torch.bfloat16),
        edge_index=edge_index,
        edge_attr=torch.ones(4, 1),
        y=torch.arange(4),
    )
    tables = pyg_tables(data)
    assert {name: (t.shape, str(t.dtype)) for name, t in tables.items()} == {
        "features": ((4, 2), "bfloat16"),
        "edge_features": ((4, 1), "float32"),
    }
    assert list(pyg_arrays(data)) == ["y"]
    graph = pyg_graphs(data)["features"]
    assert graph.nodes == 4
    assert graph.indptr.tolist() == [0, 1, 3, 4, 4]
    assert graph.indices.tolist() == [2, 0, 2, 1]
    with pytest.raises(SourceError, match="neither x"):
        pyg_tables(Data(y=torch.ones(3)))
    with pytest.raises(SourceError, match="no PyG"):
        pyg_tables({"x": 1})


def test_pyg_hetero_data() -> None:
    data = HeteroData()
    data["paper"].x = torch.ones(3, 2)
    data["paper"].y = torch.arange(3)
    data["author"].x = torch.ones(2, 5)
    data["paper", "cites", "paper"].edge_index = torch.tensor([[0, 1], [1, 2]])
    data["paper", "like", "paper"].edge_index = torch.tensor([[2], [1]])
    data["author", "writes", "paper"].edge_index = torch.tensor([[0], [1]])
    data["author", "writes", "paper"].edge_attr = torch.ones(1, 4)
    data["author", "writes", "paper"].time = torch.ones(1)
    tables = pyg_tables(data)
    assert {name: t.shape for name, t in tables.items()} == {
        "paper": (3, 2),
        "author": (2, 5),
        "author__writes__paper": (1, 4),
    }
    assert set(pyg_arrays(data)) == {"paper.y", "author__writes__paper.time"}
    graphs = pyg_graphs(data)
    assert set(graphs) == {"paper__cites__paper", "paper__like__paper", "author__writes__paper"}
    assert graphs["paper__cites__paper"].indptr.tolist() == [0, 0, 1, 2]
    assert graphs["paper__cites__paper"].indices.tolist() == [0, 1]
    writes = graphs["author__writes__paper"]
    assert (writes.nodes, writes.source_nodes, writes.indptr.tolist()) == (3, 2, [0, 0, 1, 1])


def test_pyg_transposed_adjacency() -> None:
    crow, columns = torch.tensor([0, 1, 3, 4]), torch.tensor([2, 0, 2, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once in a process that CSR is young
        adjacency = torch.sparse_csr_tensor(crow, columns, torch.ones(4), size=(3, 3), check_invariants=True)
    graph = pyg_graphs(Data(x=torch.ones(3, 1), adj_t=adjacency))["features"]
    assert graph.indptr.tolist() == crow.tolist()
    assert graph.indices.tolist() == columns.tolist()
