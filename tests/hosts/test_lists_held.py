"""What is held of lists is taken from there, and the rest is told by its position."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from featstore.hosts import lists


@given(
    seed=st.integers(0, 2**32), count=st.integers(0, 70), held=st.integers(0, 40), at_once=st.integers(1, 80),
    wide=st.booleans(),
)  # fmt: skip
def test_what_is_held_is_taken_and_the_rest_is_told(
    seed: int, count: int, held: int, at_once: int, wide: bool
) -> None:
    rng = np.random.default_rng(seed)
    first = rng.integers(0, 2**31 - 1, held).astype(np.int32)
    positions, into = rng.integers(0, 40, count), np.full(count, -1, np.int64 if wide else np.int32)
    before = lists._TAKEN_AT_ONCE
    lists._TAKEN_AT_ONCE = at_once
    try:
        missed = lists._take(first, positions, into)
    finally:
        lists._TAKEN_AT_ONCE = before
    assert missed.dtype == np.int32
    assert missed.tolist() == [i for i in range(count) if positions[i] >= held]
    for i in set(range(count)) - set(missed.tolist()):
        assert into[i] == first[positions[i]]
