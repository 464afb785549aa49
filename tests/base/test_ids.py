"""What goes in and comes out: ids of any integer type, results of the same kind, and clear refusals."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from featstore.base.buffers import empty_rows
from featstore.base.ids import check_out, finished, is_tensor, parse_ids
from featstore.errors import IdError
from featstore.sampling.minibatch import split

INTEGERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i4", ">u8"]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_integer_dtype(dtype: str) -> None:
    ids = parse_ids(np.array([[3, 1], [1, 0]], dtype))
    assert ids.values.dtype == np.int64
    assert ids.values.tolist() == [3, 1, 1, 0]
    assert (ids.shape, ids.tensor) == ((2, 2), False)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32]
)
def test_every_integer_tensor(dtype: torch.dtype) -> None:
    ids = parse_ids(torch.tensor([3, 1], dtype=dtype))
    assert (ids.values.tolist(), ids.shape, ids.tensor) == ([3, 1], (2,), True)


@pytest.mark.parametrize(
    ("given", "values", "shape"),
    [
        ([], [], (0,)), ([[]], [], (1, 0)), ((2, 1), [2, 1], (2,)), (5, [5], ()), (np.int32(5), [5], ()),
        (range(3), [0, 1, 2], (3,)), ([[1, 2], [3, 4]], [1, 2, 3, 4], (2, 2)),
        (np.empty((0, 3), np.int64), [], (0, 3)), (np.arange(6)[::2], [0, 2, 4], (3,)),
        (np.arange(6).reshape(2, 3).T, [0, 3, 1, 4, 2, 5], (3, 2)),
        (np.broadcast_to(np.int64(7), (3,)), [7, 7, 7], (3,)), (np.uint64(2**63 - 1), [2**63 - 1], ()),
    ],
)  # fmt: skip
def test_shapes_and_containers(given: Any, values: list[int], shape: tuple[int, ...]) -> None:
    ids = parse_ids(given)
    assert (ids.values.tolist(), ids.shape) == (values, shape)
    assert ids.values.flags.c_contiguous


@pytest.mark.parametrize(
    "bad",
    [
        1.0, [1.5], np.array([1.0]), [True], np.array([True, False]), "1", ["1"], None, [None],
        np.array([1], object), [2**70], [-(2**70)], np.array([2**63], np.uint64), [2**64 - 1],
        np.array(["2020"], "M8[Y]"), 1j, [[1], [2, 3]], {1, 2}, object(), b"1", torch.tensor([1.0]),
        torch.tensor([True]), torch.tensor([1.0], dtype=torch.bfloat16),
        torch.tensor([1.0], requires_grad=True),
    ],
    ids=lambda bad: re.sub(" at 0x.*", "", str(bad)),
)  # fmt: skip
def test_what_is_no_id_is_refused(bad: Any) -> None:
    with pytest.raises(IdError, match="node id"):
        parse_ids(bad)


def test_a_mask_gets_advice() -> None:
    with pytest.raises(IdError, match="flatnonzero"):
        parse_ids(np.zeros(3, bool))


def test_copies_are_independent() -> None:
    for given in (np.arange(3), torch.arange(3)):
        kept = parse_ids(given, copy=True)
        given[:] = 9
        assert kept.values.tolist() == [0, 1, 2]


def test_rows_are_aligned_and_writable() -> None:
    for count, row_bytes in ((0, 4), (1, 1), (3, 33_660), (1000, 7)):
        rows = empty_rows(count, row_bytes)
        assert rows.nbytes == count * row_bytes
        assert rows.flags.writeable
        assert count == 0 or rows.ctypes.data % 64 == 0


@pytest.mark.parametrize("dtype", ["f4", "bool", "M8[s]", "S8", "V8", "c8", ml_dtypes.bfloat16])
def test_out_arrays_are_used_as_they_are(dtype: Any) -> None:
    out = np.zeros((2, 3), dtype)
    flat = check_out(out, (2, 3), np.dtype(dtype))
    assert flat.dtype == np.uint8
    assert np.shares_memory(flat, out)
    assert flat.size == out.nbytes


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bool, torch.bfloat16, torch.complex64, torch.uint16, torch.int64]
)
def test_out_tensors_are_used_as_they_are(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    out = torch.zeros((2, 3), dtype=dtype)
    flat = check_out(out, (2, 3), np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name))
    flat[:] = 1
    assert out.view(torch.uint8).eq(1).all()


def readonly() -> np.ndarray:
    out = np.zeros((2, 3), np.float32)
    out.flags.writeable = False
    return out


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((3, 2), "f4"), np.zeros((2, 3), "f8"), np.zeros((2, 3), ">f4"), np.zeros((3, 2), "f4").T,
        np.zeros((2, 6), "f4")[:, ::2], readonly(), [[0.0] * 3] * 2, None,
        torch.zeros((2, 3), dtype=torch.float64), torch.zeros((3, 2)).T, torch.zeros((2, 4)),
        torch.zeros((2, 3), device="meta"), memoryview(b"x" * 24),
    ],
    ids=lambda value: f"{type(value).__name__}",
)  # fmt: skip
def test_an_unusable_out_is_refused(out: Any) -> None:
    with pytest.raises(ValueError, match=r"out must be .*\[2, 3\] of float32"):
        check_out(out, (2, 3), np.dtype("f4"))


def test_results_are_views_and_tensors_share_memory() -> None:
    rows = empty_rows(2, 8)
    rows[:] = 0
    array = finished(rows, (2, 2), np.dtype("f4"), False)
    tensor = finished(rows, (2, 2), np.dtype("f4"), True)
    assert np.shares_memory(array, rows)
    array[0, 1] = 3
    assert tensor[0, 1] == 3
    half = finished(rows, (2, 4), np.dtype(ml_dtypes.bfloat16), True)
    assert half.dtype == torch.bfloat16
    assert half.shape == (2, 4)
    assert finished(empty_rows(0, 8), (0, 2), np.dtype("f4"), True).shape == (0, 2)


@pytest.mark.parametrize("dtype", ["M8[s]", "S8", "longdouble"])
def test_dtypes_that_torch_lacks_are_named(dtype: str) -> None:
    with pytest.raises(TypeError, match="torch has no dtype for"):
        finished(np.zeros(16, np.uint8), (16 // np.dtype(dtype).itemsize,), np.dtype(dtype), True)


def test_populate_leaves_the_content_alone() -> None:
    from featstore.base.buffers import populate

    for size in (0, 100, 9 * 2**20 + 77):
        rows = empty_rows(1, size)
        rows[:] = 7
        populate(rows)
        assert (rows == 7).all()


def test_torch_that_another_thread_is_loading_has_made_nothing_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "torch_geometric.data"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert not is_tensor(np.arange(3))
    assert parse_ids(np.arange(3)).values.tolist() == [0, 1, 2]
    assert [ids.tolist() for ids in split({"n_id": np.arange(3)})[0].values()] == [[0, 1, 2]]
