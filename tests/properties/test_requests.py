"""Any request against a NumPy model: sizes from none to far beyond a piece, every id type, in every way of
asking."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.engine import ENGINES
from featstore.errors import FeatstoreError, IdError
from featstore.reader.reader import Reader

INT_TYPES = [
    "i1",
    "i2",
    "i4",
    "i8",
    "u1",
    "u2",
    "u4",
    "u8",
    ">i4",
    "list",
    "i8 readonly",
    "i4 strided",
    "torch i8",
    "torch i4",
    "torch u1",
]


@pytest.fixture(scope="module", params=ENGINES)
def readers(request: pytest.FixtureRequest, packed: Any) -> Iterator[list[Reader]]:
    """Readers with pieces of 1,024 ids: without a tier, and with one that is given."""
    store = featstore.open(packed)
    static = np.arange(0, 1000, 3)
    made = [
        store.reader(memory=m, static=s, engine=request.param)
        for m, s in (("640KiB", None), ("900KiB", static))
    ]
    assert [reader.budget.piece_ids_max for reader in made] == [1024, 1024]
    yield made
    for reader in made:
        reader.close()


def as_given(ids: np.ndarray, kind: str) -> Any:
    if kind == "list":
        return ids.tolist()
    if kind.startswith("torch"):
        return torch.from_numpy(np.asarray(ids.astype(kind[6:])))
    if kind == "i4 strided":
        return np.repeat(ids.astype("i4"), 2, axis=-1)[..., ::2] if ids.ndim else ids.astype("i4")
    made = np.asarray(ids.astype(kind.split()[0]))
    made.flags.writeable = "readonly" not in kind
    return made


@st.composite
def requests(draw: st.DrawFn) -> np.ndarray:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = draw(st.sampled_from([(), (0,), (1,), (5,), (300,), (2, 0), (3, 4, 2), (5000,), (40_000,)]))
    kind = draw(st.sampled_from(["uniform", "skewed", "run", "one"]))
    if kind == "uniform":
        return rng.integers(0, 1000, shape)
    if kind == "skewed":
        return np.minimum(rng.geometric(0.02, shape), 999).astype(np.int64)
    if kind == "run":
        return ((np.arange(int(np.prod(shape, dtype=int))) + rng.integers(1000)) % 1000).reshape(shape)
    return np.full(shape, rng.integers(1000))


@given(requests(), st.sampled_from(INT_TYPES), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=35)
def test_any_request(
    readers: list[Reader],
    features: np.ndarray,
    ids: np.ndarray,
    kind: str,
    static: bool,
    asynchronous: bool,
    with_out: bool,
) -> None:
    if kind in ("i1", "u1", "torch u1"):
        ids = ids % 128
    reader = readers[static]
    asked = as_given(ids, kind)
    expected = features[ids]
    out = None
    if with_out:
        out = torch.zeros(expected.shape) if kind.startswith("torch") else np.zeros_like(expected)
    got = reader.submit(asked, out=out).result(20) if asynchronous else reader.read(asked, out=out)
    assert isinstance(got, torch.Tensor) == kind.startswith("torch")
    assert out is None or got is out
    np.testing.assert_array_equal(np.asarray(got), expected, strict=True)
    plan = reader.plan(asked)
    assert plan.bytes_asked == expected.nbytes
    assert sum(plan.hits.values()) == (int((ids % 3 == 0).sum()) if static else 0)


@given(
    st.lists(st.integers(-(2**70), 2**70) | st.integers(-2, 1002), max_size=6)
    | st.lists(st.floats() | st.booleans() | st.none() | st.text(max_size=2)),
    st.booleans(),
)
@settings(max_examples=50)
def test_any_list_is_read_or_refused(
    readers: list[Reader], features: np.ndarray, ids: list[Any], asynchronous: bool
) -> None:
    fine = all(type(i) is int and 0 <= i < 1000 for i in ids)
    try:
        got = readers[0].submit(ids).result(20) if asynchronous else readers[0].read(ids)
    except IdError:
        assert not fine
        return
    assert fine
    np.testing.assert_array_equal(got, features[np.asarray(ids, np.int64)])


@given(st.lists(st.tuples(requests(), st.booleans()), max_size=12), st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_many_in_flight_some_cancelled(
    readers: list[Reader], features: np.ndarray, asked: list[tuple[np.ndarray, bool]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    under_way = [(ids, cancel, readers[rng.integers(2)].submit(ids)) for ids, cancel in asked]
    for _, cancel, request in under_way:
        if cancel:
            request.cancel()
    for ids, cancel, request in under_way:
        try:
            got = request.result(20)
        except FeatstoreError:
            assert cancel
            assert request.cancelled()
        else:
            np.testing.assert_array_equal(got, features[ids])
