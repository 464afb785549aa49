"""The split of a memory budget: its parts sum to it, and the smallest that an error names works."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore.errors import BudgetError
from featstore.plan.budget import PIECES_IN_FLIGHT, Budget, TableNeed
from featstore.plan.extents import PLANNING_BYTES_PER_ID, READING_BYTES_PER_ID
from featstore.units import EXTENT_BYTES_MAX

PAGE = 4096

needs = st.builds(
    TableNeed,
    st.integers(0, 2**34),
    st.integers(0, 2**34),
    st.integers(1, 2**17) | st.integers(1, 64 * 2**20),
)


def smallest(tables: list[TableNeed]) -> int:
    with pytest.raises(BudgetError) as caught:
        Budget.split(1, tables)
    return caught.value.needed_bytes


def check(budget: Budget, tables: list[TableNeed]) -> None:
    fixed = budget.row_map_bytes + budget.checksum_bytes
    assert fixed == sum(t.row_map_bytes + t.checksum_bytes for t in tables)
    assert fixed + budget.staging_bytes + budget.scratch_bytes + budget.tier_bytes == budget.memory_bytes
    assert budget.tier_bytes >= 0
    assert budget.extent_bytes_max % PAGE == 0
    assert budget.staging_bytes % PAGE == 0
    spans = [t.row_span_bytes for t in tables] or [PAGE]
    assert budget.extent_bytes_max >= max(spans)
    assert budget.extent_bytes_max <= max(EXTENT_BYTES_MAX, *spans)
    assert budget.staging_bytes >= 4 * budget.extent_bytes_max
    assert budget.piece_ids_max >= 1024
    per_id = PLANNING_BYTES_PER_ID + (PIECES_IN_FLIGHT - 1) * READING_BYTES_PER_ID
    assert budget.scratch_bytes == budget.piece_ids_max * per_id


@given(st.lists(needs, max_size=4), st.integers(0, 2**40) | st.integers(0, 2**21))
@settings(max_examples=400)
def test_every_split_sums_to_the_budget(tables: list[TableNeed], extra: int) -> None:
    check(Budget.split(smallest(tables) + extra, tables), tables)


@given(st.lists(needs, max_size=4))
@settings(max_examples=100)
def test_the_smallest_works_and_one_less_does_not(tables: list[TableNeed]) -> None:
    least = smallest(tables)
    assert Budget.split(least, tables).memory_bytes == least
    with pytest.raises(BudgetError) as caught:
        Budget.split(least - 1, tables)
    assert (caught.value.needed_bytes, caught.value.given_bytes) == (least, least - 1)


@given(st.lists(needs, min_size=1, max_size=3), st.integers(0, 2**32), st.integers(0, 2**32))
@settings(max_examples=100)
def test_more_memory_never_leaves_less_for_any_part(tables: list[TableNeed], a: int, b: int) -> None:
    least = smallest(tables)
    small, large = (Budget.split(least + extra, tables) for extra in sorted((a, b)))
    assert small.staging_bytes <= large.staging_bytes
    assert small.extent_bytes_max <= large.extent_bytes_max
    assert small.piece_ids_max <= large.piece_ids_max


@pytest.mark.parametrize(
    ("row_bytes", "pages"), [(1, 1), (2, 2), (4096, 2), (4097, 2), (4098, 3), (8192, 3), (33_660, 10)]
)
def test_pages_that_one_row_can_touch(row_bytes: int, pages: int) -> None:
    worst = max(-(-(at + row_bytes) // PAGE) - at // PAGE for at in range(PAGE))
    assert worst == pages
    assert TableNeed(0, 0, row_bytes).row_span_bytes == pages * PAGE
