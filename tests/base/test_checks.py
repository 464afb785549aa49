"""Numbers from files: what is accepted is exactly what their twins in NumPy and Python accept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featstore.base import checks, memory
from featstore.base.memory import group_limits, memory_bytes
from featstore.errors import BudgetError, FormatError

NUMBERS = st.lists(st.integers(-2, 12) | st.sampled_from([2**31 - 1, -(2**31)]), max_size=12)
LARGE = [0, 1, 5, 2**62, 2**63 - 1, -1, -(2**62), -(2**63)]


def accepted(check: Callable[..., None], *arguments: Any) -> bool:
    try:
        check(*arguments, "the numbers")
    except FormatError as error:
        assert "the numbers" in str(error)
        assert "featstore verify" in str(error)
        return False
    return True


@given(
    st.lists(st.sampled_from(LARGE), min_size=1, max_size=6), st.sampled_from(LARGE), st.sampled_from(LARGE)
)
def test_offsets_that_wrap_around_are_no_offsets(given_: list[int], begin: int, end: int) -> None:
    for offsets in (given_, sorted(given_), [begin, *given_, end]):
        right = offsets[0] == begin and offsets[-1] == end and offsets == sorted(offsets)
        assert accepted(checks.check_offsets, np.array(offsets, np.int64), begin, end) == right


@given(NUMBERS, st.integers(0, 12), st.sampled_from([np.int32, np.int64]))
def test_ranges_and_distinct_numbers(values: list[int], end: int, dtype: type) -> None:
    inside = all(0 <= value < end for value in values)
    array = np.array(values, dtype)
    assert accepted(checks.check_range, array, end) == inside
    assert accepted(checks.check_distinct, array, end) == (inside and len(set(values)) == len(values))


@given(st.permutations(range(300)), st.integers(0, 299), st.integers(0, 299))
def test_windows_of_marks_meet(values: list[int], at: int, other: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checks, "MARKS_BYTES", 8)
        array = np.array(values)
        assert accepted(checks.check_distinct, array, 300)
        array[at] = values[other]
        assert accepted(checks.check_distinct, array, 300) == (at == other)


@given(st.permutations(range(9)), st.lists(st.integers(-1, 9), min_size=9, max_size=9))
def test_maps_are_each_others_inverse(there: list[int], back: list[int]) -> None:
    right = np.argsort(there)
    assert accepted(checks.check_inverse, np.array(there), right.astype(np.int32))
    both = [0 <= b < 9 for b in back]
    assert accepted(checks.check_inverse, np.array(there), np.array(back)) == (
        all(both) and back == right.tolist()
    )
    assert not accepted(checks.check_inverse, np.zeros(9, np.int64), right)


def test_no_more_than_the_machine_has() -> None:
    memory.check_machine(2**20, "load it")
    with pytest.raises(
        BudgetError, match="too small to load it: the smallest that works is 1,125,899,906,842,624"
    ):
        memory.check_machine(2**50, "load it")


def test_no_more_than_a_control_group_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_bytes", lambda: 2**21)
    memory.check_machine(2**21, "load it")
    with pytest.raises(BudgetError, match="the smallest that works is 2,097,153"):
        memory.check_machine(2**21 + 1, "load it")


@pytest.mark.parametrize(
    ("groups", "files", "limits"),
    [
        ("0::/job/task\n", {"job/task/memory.max": "max\n", "job/memory.max": "4096\n"}, [4096]),
        ("0::/\n", {"memory.max": "8192\n"}, [8192]),
        ("0::/../../pod\n", {"memory.max": "512\n"}, [512]),
        ("5:cpu:/x\n4:memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "77\n"}, [77]),
        ("4:memory:/docker/0a\n", {"memory/memory.limit_in_bytes": "99\n"}, [99]),
        ("0::/job\n", {"job/memory.max": "many\n"}, []),
        ("", {}, []),
    ],
)
def test_limits_of_control_groups(
    tmp_path: Path, groups: str, files: dict[str, str], limits: list[int]
) -> None:
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / "mounted" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mounted" / name).write_text(text)
    assert group_limits(tmp_path / "groups", tmp_path / "mounted") == limits
    assert group_limits(tmp_path / "none", tmp_path / "none") == []


def test_the_memory_of_this_process_is_that_of_the_machine_or_less() -> None:
    assert 2**20 < memory_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
