"""The kernel that moves rows, against NumPy's indexing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore.base.native import address_of
from featstore.base.rows import IN_ORDER, move_rows

ROWS = 50


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@given(row_bytes=st.integers(1, 3000), count=st.integers(0, ROWS), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_moving_rows_is_indexing(dtype: Any, row_bytes: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 256, (ROWS, row_bytes)).astype(np.uint8)
    some, others = rng.integers(0, ROWS, count).astype(dtype), rng.permutation(ROWS)[:count].astype(dtype)
    for source_rows, target_rows in ((some, IN_ORDER), (IN_ORDER, others), (some, others)):
        out = np.full((ROWS + 1, row_bytes), 77, np.uint8)
        expected = out.copy()
        taken = table[:count] if source_rows is IN_ORDER else table[source_rows]
        expected[np.arange(count) if target_rows is IN_ORDER else target_rows] = taken
        move_rows(address_of(table), source_rows, address_of(out), target_rows, row_bytes)
        np.testing.assert_array_equal(out, expected)


def test_rows_move_one_after_the_other() -> None:
    table = np.arange(4, dtype=np.int64)
    place = address_of(table)
    move_rows(place, np.array([0, 1, 2], np.int32), place, np.array([1, 2, 3], np.int32), 8)
    assert table.tolist() == [0, 0, 0, 0]  # each reads what the one before it has written


def test_rows_without_bytes_and_no_rows_touch_nothing() -> None:
    move_rows(0, np.zeros(3, np.int32), 0, IN_ORDER, 0)
    move_rows(0, IN_ORDER, 0, IN_ORDER, 4096)
