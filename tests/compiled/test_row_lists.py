"""Lists of rows in a scratch file: parts of several are those parts one by one."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore.base import files
from featstore.compile.row_lists import RowLists, RowListsWriter
from featstore.errors import CorruptionError
from featstore.storage.disk import Disk


def written(path: Path, lists: list[list[int]], dtype: type, backward: bool = False) -> RowLists:
    total = sum(map(len, lists))
    writer = RowListsWriter(Disk(), path, dtype, total + 3 if backward else None)
    for one in lists[::-1] if backward else lists:
        writer.append(np.array(one, dtype))
    return writer.finish()


@settings(max_examples=25, deadline=None)
@given(
    lists=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=20), min_size=1, max_size=8),
    dtype=st.sampled_from([np.int32, np.int64]),
    backward=st.booleans(),
    stops=st.booleans(),
    data=st.data(),
)
def test_parts_are_each_part(
    tmp_path_factory: pytest.TempPathFactory, lists: list[list[int]], dtype: type, backward: bool,
    stops: bool, data: st.DataObject,
) -> None:  # fmt: skip
    """In one step; and one by one where that was broken off at once, as by a signal."""
    found = written(tmp_path_factory.mktemp("lists") / "file", lists, dtype, backward)
    values = np.array([value for one in lists for value in one], dtype)
    begins = data.draw(st.lists(st.integers(0, len(values)), max_size=6))
    counts = [data.draw(st.integers(0, len(values) - begin)) for begin in begins]
    with pytest.MonkeyPatch.context() as patch:
        if stops:
            patch.setattr(files, "read_parts", lambda *_: 0)
        parts = found.parts(np.array(begins, np.int64), np.array(counts, np.int64))
    expected = [values[begin : begin + count] for begin, count in zip(begins, counts, strict=True)]
    assert parts.dtype == dtype
    np.testing.assert_array_equal(parts, np.concatenate([values[:0], *expected]))
    found.close()


def test_a_file_that_ends_too_early_is_named(tmp_path: Path) -> None:
    found = written(tmp_path / "file", [[1, 2, 3], [4, 5]], np.int64)
    os.truncate(tmp_path / "file", 4 * 8)
    assert found.parts(np.array([1, 0]), np.array([3, 2])).tolist() == [2, 3, 4, 1, 2]
    with pytest.raises(CorruptionError, match=r"file at byte 32: expected 8 bytes more"):
        found.parts(np.array([0, 3, 0]), np.array([2, 2, 1]))
    found.close()
