"""What goes into a store comes out of it: a NumPy model against pack and read, for any dtype, shape, order
and engine."""

from __future__ import annotations

import errno
import gc
import os
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.engine import ENGINES
from featstore.errors import BudgetError, DiskFullError
from featstore.storage.disk import Disk

DTYPES = [
    "bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "longdouble",
    ml_dtypes.bfloat16, "c8", "c16", "clongdouble", "M8[ns]", "M8[D]", "m8[s]", "S1", "S7", "U3", "V1", "V5",
    ">f4", ">i8", [("a", "<f4"), ("b", "<u2", (3,))], [("x", "S3"), ("y", ">M8[s]")],
]  # fmt: skip


def random_rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Random bits, among them NaN of every kind; only booleans are kept to 0 and 1."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    bits = rng.integers(0, 256, count, np.uint8)
    return (bits & 1 if dtype == np.bool_ else bits).view(dtype).reshape(shape)


def bytes_of(array: np.ndarray) -> bytes:
    """The array's bytes, little-endian: equal for equal NaNs too."""
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).tobytes()


def check(store: featstore.Store, data: np.ndarray, rng: np.random.Generator) -> None:
    """Read some requests with each engine."""
    rows = len(data)
    table = store.tables["features"]
    assert (table.rows, table.row_shape, table.dtype) == (rows, data.shape[1:], data.dtype.newbyteorder("<"))
    requests = [np.empty(0, np.int64), np.arange(rows)]
    if rows:
        requests += [
            rng.integers(0, rows, 30),
            np.array([rows - 1, 0, rows - 1]),
            rng.permutation(rows)[:40].astype(np.uint32),
        ]
    with pytest.raises(BudgetError) as caught:
        store.reader(memory=1)
    for engine in ENGINES:
        static = rng.integers(0, rows, 5) if rows and rng.integers(2) else None
        with store.reader(memory=caught.value.needed_bytes + 500_000, engine=engine, static=static) as reader:
            for ids in requests:
                got = reader.read(ids)
                assert got.dtype == table.dtype
                assert got.shape == (len(ids), *data.shape[1:])
                assert bytes_of(got) == bytes_of(data[ids])
            with pytest.raises(IndexError):
                reader.read([rows])


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, np.random.Generator]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    row_bytes_max = draw(st.sampled_from([1, 40, 400, 4096, 9000, 40_000]))
    row_shape = draw(st.sampled_from([(), (1,), None, (2, 1, 2), (1, 3)]))
    if row_shape is None:
        row_shape = (max(1, int(rng.integers(0, row_bytes_max + 1)) // dtype.itemsize),)
    row_bytes = max(1, int(np.prod(row_shape, dtype=np.int64))) * dtype.itemsize
    rows = draw(st.sampled_from([0, 1, 2]) | st.integers(0, min(4000, 200_000 // row_bytes + 2)))
    return random_rows(rng, (rows, *row_shape), dtype), rng


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return lambda: tmp_path_factory.mktemp("roundtrip") / "store"


@given(tables(), st.booleans())
@settings(max_examples=45)
def test_any_table(
    folder: Any, pack: Any, small_chunks: None, case: tuple[np.ndarray, np.random.Generator], permuted: bool
) -> None:
    data, rng = case
    options = (
        {"order": "permutation", "permutation": rng.permutation(len(data))}
        if permuted
        else {"order": "given"}
    )
    path = folder()
    with pack(path, data, **options) as store:
        check(store, data, rng)
    shutil.rmtree(path)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 300])
def test_every_dtype(tmp_path: Path, pack: Any, small_chunks: None, dtype: Any, rows: int) -> None:
    rng = np.random.default_rng(rows)
    data = random_rows(rng, (rows, 11), np.dtype(dtype))
    with pack(tmp_path / "store", data, order="permutation", permutation=rng.permutation(rows)) as store:
        check(store, data, rng)


@given(st.sampled_from([40, 400, 4096, 12_345]), st.integers(0, 2**32 - 1))
@settings(max_examples=6)
def test_through_the_spill(folder: Any, pack: Any, small_chunks: None, row_bytes: int, seed: int) -> None:
    """With hardly more memory than a permutation in two passes needs: each refusal names a larger budget,
    until one works."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (6_000_000 // row_bytes, row_bytes), np.uint8)
    permutation, memory, stages, path = rng.permutation(len(data)), 1, set[str](), folder()
    for _ in range(12):
        try:
            with pack(path, data, memory=memory, order="permutation", permutation=permutation, overwrite=True,
                      progress=lambda p: stages.add(p.stage)) as store:  # fmt: skip
                check(store, data, rng)
            break
        except BudgetError as error:
            memory, before = error.needed_bytes, memory
            if memory <= before:
                pytest.fail(f"{before} bytes were refused, and {memory} asked for")
    assert stages == {"order", "spill", "write"}
    shutil.rmtree(path)


@pytest.mark.parametrize(("row_bytes", "rows"), [(4096, 300), (40_000, 60), (50_001, 60)])
def test_rows_longer_than_what_a_spill_gathers(
    tmp_path: Path, pack: Any, monkeypatch: pytest.MonkeyPatch, row_bytes: int, rows: int
) -> None:
    """As rows beyond 4 MiB are, or fewer bytes where there are many buckets."""
    monkeypatch.setattr("featstore.packing.permute.fits_in_memory", lambda job: False)
    monkeypatch.setattr("featstore.packing.spill_files.FLUSH_BYTES_MAX", 4096)
    monkeypatch.setattr("featstore.packing.spill_files.FLUSH_BYTES_MIN", 4096)
    rng = np.random.default_rng(row_bytes)
    data = rng.integers(0, 256, (rows, row_bytes), np.uint8)
    for memory in (int(1.4 * data.nbytes) + (1 << 20), "64MiB"):  # several buckets, or one
        with pack(tmp_path / "store", data, memory=memory, order="permutation",
                  permutation=rng.permutation(rows), overwrite=True) as store:  # fmt: skip
            check(store, data, rng)


def test_a_spill_that_cannot_begin_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(Disk):
        def truncate(self, file: Any, size: int) -> None:
            if file.path.name.endswith(".2"):
                raise DiskFullError(file.path, size, 0, errno.ENOSPC)
            super().truncate(file, size)

    monkeypatch.setattr("featstore.packing.permute.fits_in_memory", lambda job: False)
    data = np.random.default_rng(0).integers(0, 256, (100_000, 400), np.uint8)
    how: dict[str, Any] = {"order": "permutation", "permutation": np.arange(100_000)[::-1].copy()}
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(DiskFullError):
        featstore.pack(tmp_path / "s", data, memory="12MiB", disk=Full(), **how)
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_rows_of_forty_kilobytes_in_many_files(tmp_path: Path, pack: Any, small_chunks: None) -> None:
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (2100, 40_000), np.uint8)
    with pack(tmp_path / "store", data) as store:
        assert store.tables["features"].layout.chunks > 30
        check(store, data, rng)


def test_equal_packs_are_equal_to_the_byte(tmp_path: Path, pack: Any, small_chunks: None) -> None:
    data = np.random.default_rng(0).standard_normal((500, 33))
    stores = [
        pack(tmp_path / name, data, order="permutation", permutation=np.arange(500)[::-1]) for name in "ab"
    ]
    files = [
        {p.relative_to(s.path): p.read_bytes() for p in s.path.rglob("*") if p.is_file() and p.name != "lock"}
        for s in stores
    ]
    assert files[0] == files[1]
    assert stores[0].uuid == stores[1].uuid
