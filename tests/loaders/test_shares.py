"""Shares of a loader's memory: what is named as the smallest is, and a sampler has what it needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from featstore.errors import BudgetError
from featstore.loaders.shares import ROWS_BYTES_MIN, SAMPLER_SHARE, MemoryShares

MIB = 1 << 20
MOST = 20 * MIB
sizes = st.integers(0, MOST)


@st.composite
def shares(draw: st.DrawFn) -> MemoryShares:
    graph = draw(st.integers(1, MOST))
    return MemoryShares(draw(st.integers(1, 2 * MOST)), graph, 0, draw(st.integers(1, graph)), draw(sizes))


@given(shares())
@settings(max_examples=100)
def test_a_sampler_has_what_it_needs_and_no_more_than_a_third_otherwise(one: MemoryShares) -> None:
    assert 1 <= one.sampler_bytes <= one.memory_bytes
    assert one.sampler_bytes >= min(one.least_bytes, one.memory_bytes - ROWS_BYTES_MIN)
    assert one.sampler_bytes <= max(1, one.least_bytes, one.memory_bytes // SAMPLER_SHARE)
    if one.sampler_bytes > max(1, one.least_bytes):
        assert one.memory_bytes - one.sampler_bytes >= one.rows_wanted_bytes, "rows come first"
    assert one.rows_bytes == max(1, one.memory_bytes - min(one.graph_bytes, one.sampler_bytes))


@given(shares(), st.integers(1, MOST))
@settings(max_examples=100)
def test_the_smallest_memory_that_leaves_so_much_for_the_rows(one: MemoryShares, needed: int) -> None:
    named = one.memory_for_rows(needed)
    assert replace(one, memory_bytes=named).rows_bytes >= needed
    less = replace(one, memory_bytes=named - 2)  # what is rounded up may be one byte
    assert needed == 1 or less.rows_bytes < needed


@given(shares(), st.integers(1, MOST))
@settings(max_examples=100)
def test_the_smallest_memory_of_which_a_sampler_may_take_so_much(one: MemoryShares, needed: int) -> None:
    named = one.memory_for_sampler(needed)
    assert replace(one, memory_bytes=named).sampler_bytes >= needed
    assume(needed > 1)
    assert replace(one, memory_bytes=named - 1).sampler_bytes < needed


@pytest.mark.parametrize("of_sampler", [True, False])
def test_an_error_of_a_share_is_of_all_the_memory(of_sampler: bool) -> None:
    one = MemoryShares(20 * MIB, 12 * MIB, 50, 8 * MIB, 0)
    assert (one.sampler_bytes, one.rows_bytes) == (8 * MIB, 12 * MIB)
    share, needed = (8 * MIB, 9 * MIB) if of_sampler else (12 * MIB, 14 * MIB)
    with pytest.raises(BudgetError) as caught, one.told_of_all():
        raise BudgetError(needed, share, "do it")
    named = 27 * MIB if of_sampler else 22 * MIB
    assert (caught.value.needed_bytes, caught.value.given_bytes) == (named + 50, 20 * MIB + 50)
