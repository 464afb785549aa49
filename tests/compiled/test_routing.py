"""Routing: each row of a mini-batch goes one way, and what is said of it is what was decided."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore.compile.routing import look_up_places, route_rows

BASE, PACKED = -1, -2


@given(
    seed=st.integers(0, 2**32),
    count=st.integers(0, 30),
    packed=st.booleans(),
    identity=st.booleans(),
    wide=st.booleans(),
    bits=st.integers(5, 56),
)
@settings(deadline=None, max_examples=50)
def test_rows_are_parted_as_plain_python_does(
    seed: int, count: int, packed: bool, identity: bool, wide: bool, bits: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.permutation(100)[:count].astype(np.int64 if wide else np.int32)
    place = rng.permutation(count + 3)[:count].astype(np.int32)
    moves = rng.integers(-5, 4, count).astype(np.int32)
    slots = rng.permutation(5).astype(np.int32)
    missed = int((moves < 0).sum())
    found = np.full(missed, PACKED) if packed else rng.integers(-2, 40, missed)
    at = np.arange(count) if identity else place
    hits, admits = moves >= 0, moves < -1
    wanted = [at[hits], slots[moves[hits]]]
    of_missed, rows_missed = at[moves < 0], rows[moves < 0]
    mine = found == PACKED
    wanted += [[int(r) << bits | int(p) for r, p in zip(rows_missed[mine], of_missed[mine], strict=True)]]
    wanted += [of_missed[found >= 0], found[found >= 0], of_missed[found == BASE], rows_missed[found == BASE]]
    wanted += [at[admits], slots[-2 - moves[admits]]]
    dtypes = [np.int32, np.int32, np.uint64, np.int32, np.int64, np.int32, np.int64, np.int32, np.int32]
    out = [np.empty(len(w), dtype) for w, dtype in zip(wanted, dtypes, strict=True)]
    none = np.empty(0, np.int32)
    route_rows(
        rows,
        none if identity else place,
        moves,
        none if packed else found.astype(np.int32),
        slots,
        *out,
        bits,
    )
    for own, expected in zip(out, wanted, strict=True):
        assert own.tolist() == list(expected)


@given(seed=st.integers(0, 2**32), count=st.integers(0, 30))
@settings(deadline=None)
def test_what_becomes_of_rows_is_looked_up(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    where, rows = rng.integers(-2, 9, 50).astype(np.int32), rng.permutation(50)[:count].astype(np.int32)
    found = np.empty(count, np.int32)
    assert look_up_places(rows, where, found) == ((where[rows] == PACKED).sum(), (where[rows] == BASE).sum())
    assert found.tolist() == where[rows].tolist()
