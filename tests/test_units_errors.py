"""Sizes as people write them; errors that say what, where and what to do, and survive pickling."""

from __future__ import annotations

import errno
import inspect
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from featstore import errors
from featstore.errors import (
    BudgetError,
    CancelledError,
    ClosedError,
    CorruptionError,
    DeviceError,
    DiskFullError,
    FeatstoreError,
    FormatError,
    FormatVersionError,
    IdError,
    SourceError,
)
from featstore.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1), ("64k", 65536), ("64K", 65536), ("64KiB", 65536), ("64kb", 64000), ("1.5GiB", 3 * 2**29),
        (" 2 GB ", 2 * 10**9), ("1TiB", 2**40), ("1tb", 10**12), ("300MB", 300 * 10**6), ("12b", 12),
        ("0.5k", 512), (7, 7), (7.9, 7), (1 << 33, 1 << 33),
    ],
)  # fmt: skip
def test_parse_bytes(text: str | int | float, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "abc", "-1", "1 XB", "1..5k", "0", "0.1b", "1e9", "GiB", "1 G i B", "1,000", "0x10"]
)
def test_texts_that_are_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)


@pytest.mark.parametrize("number", [0, -1, 0.5, -3.0, float("nan"), float("inf")])
def test_numbers_that_are_no_size(number: float) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_bytes(number)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**30, "1.0 GiB"),
        (2**51, "2048.0 TiB"),
    ],
)
def test_format_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(1, 2**45))
def test_format_and_parse_agree_within_rounding(size: int) -> None:
    assert abs(parse_bytes(format_bytes(size)) - size) <= max(1, size * 0.06)


def test_every_error_is_a_featstore_error_and_exported() -> None:
    classes = [v for v in vars(errors).values() if inspect.isclass(v) and issubclass(v, Exception)]
    assert sorted(c.__name__ for c in classes) == sorted(errors.__all__)
    assert all(issubclass(c, FeatstoreError | errors.FeatstoreWarning) for c in classes)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (SourceError("x"), ValueError), (IdError("x"), IndexError), (ClosedError("x"), ValueError),
        (BudgetError(2, 1, "read"), ValueError), (DeviceError(5, "/f"), OSError),
        (DiskFullError("/f", 2, 1), OSError), (FormatVersionError("x"), FormatError),
        (CancelledError("x"), FeatstoreError),
    ],
)  # fmt: skip
def test_generic_handlers_catch_them(error: Exception, builtin: type[Exception]) -> None:
    with pytest.raises(builtin):
        raise error


def test_corruption_says_where_and_what_to_do() -> None:
    error = CorruptionError("/store/c.0", 4096, "checksum 1", "2")
    assert (error.path, error.offset, error.expected, error.actual) == ("/store/c.0", 4096, "checksum 1", "2")
    assert "/store/c.0 at byte 4096" in str(error)
    assert "featstore verify" in str(error)
    assert "at byte" not in str(CorruptionError("/f", None, "a", "b"))
    assert str(CorruptionError("/f", 1, "a", "b", "pack anew")).endswith("pack anew")


def test_device_error_says_where() -> None:
    error = DeviceError(errno.EIO, "/store/c.0", 8192)
    assert (error.errno, error.path, error.filename, error.offset) == (
        errno.EIO,
        "/store/c.0",
        "/store/c.0",
        8192,
    )
    assert "cannot read /store/c.0 at byte 8192" in str(error)
    assert "EIO" in str(error)
    assert "(9999)" in str(DeviceError(9999, "/f"))


def test_disk_full_and_budget_say_how_much() -> None:
    full = DiskFullError("/d", 5000, 10)
    assert (full.errno, full.needed_bytes, full.available_bytes) == (errno.ENOSPC, 5000, 10)
    assert "5,000 bytes needed, 10 available" in str(full)
    budget = BudgetError(2048, 1024, "read")
    assert (budget.needed_bytes, budget.given_bytes, budget.what) == (2048, 1024, "read")
    assert "smallest that works is 2,048 bytes" in str(budget)


@pytest.mark.parametrize(
    "error",
    [
        CorruptionError("/f", 4096, "a", "b"), CorruptionError("/f", None, "a", "b", "advice"),
        DeviceError(5, "/f", 3, "write"), DiskFullError("/f", 2, 1), BudgetError(2, 1, "read"), IdError("x"),
        CancelledError("y"), FormatVersionError("z"),
    ],
)  # fmt: skip
def test_errors_cross_processes(error: FeatstoreError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert {k: v for k, v in vars(back).items() if k != "_args"} == {
        k: v for k, v in vars(error).items() if k != "_args"
    }
