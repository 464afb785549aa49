"""Numbers in text: what a table's dtype has no room for is an error that names the column, and a cast finds
what the text says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import SourceError
from featstore.packing.sources.opening import open_rows


def text(path: Path, number: Any) -> Path:
    """A file of columns ``size`` and ``b`` whose third row has ``number``."""
    path.write_text(f"size,b\n1,1\n1,1\n{number},1\n")
    return path


@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        (2**24 + 1, None),
        (-(2**31) + 1, None),
        (2**53 + 1, None),
        ("1e39", None),
        ("1e39", "float32"),
        ("7e4", "float16"),
        ("1e39", "bfloat16"),
        (300, "uint8"),
        (-1, "uint8"),
        (2**31, "int32"),
        (-1, "uint64"),
        (2, "bool"),
    ],
)
def test_numbers_that_a_dtype_has_no_room_for(tmp_path: Path, number: Any, dtype: Any) -> None:
    path = text(tmp_path / "x.csv", number)
    with pytest.raises(SourceError, match=r"row 2, column 'size'.*raw_dtype="):
        list(open_rows(path, dtype=dtype, columns="*").blocks())


@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        (2**24, None),
        (2**25, None),
        ("0.1", None),
        ("123456789.25", None),
        ("nan", None),
        ("-inf", None),
        (2**24 + 1, "float32"),
        (2**24 + 1, "float64"),
        (2**62 + 1, "int64"),
        (255, "uint8"),
        (1, "bool"),
        ("inf", "float16"),
    ],
)
def test_numbers_that_it_has_room_for(tmp_path: Path, number: Any, dtype: Any) -> None:
    path = text(tmp_path / "x.csv", number)
    wanted = (
        np.array([number])
        .astype(np.float64 if isinstance(number, str) else np.int64)
        .astype(dtype or "float32")
    )
    rows = np.concatenate([block.copy() for block in open_rows(path, dtype=dtype, columns="*").blocks()])
    assert np.array_equal(rows[2:, 0], wanted, equal_nan=wanted.dtype.kind == "f")


@pytest.mark.parametrize("how", [{"cast": "float64"}, {"dtype": "float64"}, {"raw_dtype": "float64"}])
def test_a_cast_finds_what_the_text_says(tmp_path: Path, how: dict[str, Any]) -> None:
    path = text(tmp_path / "x.csv", "0.1")
    with featstore.pack(tmp_path / "s", path, **how) as store, store.reader(memory="16MiB") as reader:
        assert reader.read([2]).tolist() == [[0.1, 1.0]]
