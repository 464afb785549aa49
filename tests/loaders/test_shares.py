"""How a loader's memory is shared between its sampler and its rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from featstore.errors import BudgetError
from featstore.loaders.shares import MemoryShares

BYTES = st.integers(1, 1 << 40)
SHARES = st.builds(
    MemoryShares, memory_bytes=BYTES, graph_bytes=BYTES, least_bytes=st.one_of(st.just(0), BYTES),
    rows_wanted_bytes=st.one_of(st.just(0), BYTES),
)  # fmt: skip


@given(SHARES)
def test_a_sampler_has_a_third_and_two_where_it_cannot_do_with_one(shares: MemoryShares) -> None:
    memory, has = shares.memory_bytes, shares.sampler_bytes
    assert 1 <= has <= max(1, 2 * memory // 3)
    if shares.least_bytes <= memory // 3:
        assert has <= max(1, memory // 3)
    assert has >= min(shares.least_bytes, 2 * memory // 3)
    if not shares.rows_wanted_bytes:
        assert has >= memory // 3, "neighbours save more than rows do"
    assert shares.rows_bytes == max(1, memory - min(has, shares.graph_bytes))


@given(SHARES, BYTES)
def test_the_memory_named_for_a_sampler_is_enough_and_no_more(shares: MemoryShares, needed: int) -> None:
    named = shares.memory_for_sampler(needed)
    assert replace(shares, memory_bytes=named).sampler_bytes >= needed
    assert named == 1 or replace(shares, memory_bytes=named - 1).sampler_bytes < max(needed, 2)


@given(SHARES, BYTES)
def test_the_memory_named_for_rows_is_enough_and_hardly_more(shares: MemoryShares, needed: int) -> None:
    named = shares.memory_for_rows(needed)
    assert replace(shares, memory_bytes=named).rows_bytes >= needed
    less = replace(shares, memory_bytes=max(1, named - 3))
    if not shares.rows_wanted_bytes and not shares.least_bytes:
        assert less.rows_bytes < needed or named <= 4


@given(SHARES, BYTES)
def test_an_error_of_a_share_is_told_of_all(shares: MemoryShares, needed: int) -> None:
    for given_bytes, named in (
        (shares.rows_bytes, shares.memory_for_rows(needed)),
        (shares.sampler_bytes, shares.memory_for_sampler(needed)),
    ):
        with pytest.raises(BudgetError) as raised, shares.told_of_all():
            raise BudgetError(needed, given_bytes, "hold it")
        if shares.rows_bytes != shares.sampler_bytes:
            assert (raised.value.needed_bytes, raised.value.given_bytes) == (named, shares.memory_bytes)
