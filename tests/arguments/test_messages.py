"""What errors of arguments say and are: the nearest name, the built-in that fits, and never the built-in's
own way of printing."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.arguments import as_count, as_flag, as_number, shown
from featstore.engine.request import Request
from featstore.errors import (
    ArgumentError,
    EngineError,
    FeatstoreError,
    MissingPackageError,
    UnknownNameError,
    WaitTimeoutError,
)


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda s: s.reader(memroy="1GiB"), "'memory'"),
        (lambda s: s.reader(engine="thread"), "'threads'"),
        (lambda s: s.sampler([2], memory="1GiB", sed=3), "'seed'"),
        (lambda s: s.loader(replacd=3), "'replaced'"),
        (lambda s: s.table("feature"), "'features'"),
        (lambda s: s.loader([np.arange(3)], queuedepth=3), "'queue_depth'"),
        (lambda s: s.loader([np.arange(3)], policy="s3fifo"), "'s3-fifo'"),
        (lambda s: s.loader([np.arange(3)], device_memroy=3), "'device_memory'"),
        (lambda s: featstore.SharedBuffer(s, verfy=True), "'verify'"),
    ],
)
def test_the_nearest_name_is_said(store: featstore.Store, call: Callable[[Any], Any], meant: str) -> None:
    with pytest.raises(ArgumentError, match=f"did you mean {meant}"):
        call(store)


def test_what_takes_no_options_says_so() -> None:
    with pytest.raises(ArgumentError, match=r"has no option 'capacity'; it takes none$"):
        featstore.Buffer("auto", capacity=3)


@pytest.mark.parametrize(
    ("error", "builtins"),
    [
        (ArgumentError("x"), (ValueError, TypeError)), (UnknownNameError("x"), (KeyError, ValueError)),
        (EngineError("x"), (OSError,)), (MissingPackageError("x"), (ImportError,)),
        (WaitTimeoutError("x"), (TimeoutError,)),
    ],
)  # fmt: skip
def test_they_are_the_built_in_that_fits(
    error: FeatstoreError, builtins: tuple[type[Exception], ...]
) -> None:
    assert isinstance(error, builtins[0])
    assert isinstance(error, builtins)
    assert str(error) == "x"
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == "x"


def test_a_result_that_does_not_come_in_time() -> None:
    request = Request(lambda: None)
    for wait in (request.result, request.exception):
        with pytest.raises(WaitTimeoutError, match=r"within 0\.01 seconds"):
            wait(0.01)
    request.abandon()


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), np.array(3)])
def test_integers_of_any_type_are_counts(value: Any) -> None:
    found = as_count(value, "n")
    assert (type(found), found) == (int, 3)


@pytest.mark.parametrize("value", [2, 2.5, np.float32(2.5), np.int64(2)])
def test_numbers_of_any_type(value: Any) -> None:
    assert as_number(value, "seconds") == value


@pytest.mark.parametrize("value", [True, np.True_])
def test_flags(value: Any) -> None:
    assert as_flag(value, "verify") is True


def test_values_are_shown_in_a_few_words() -> None:
    for value in (10**6000, "x" * 10_000, b"y" * 10_000, np.zeros(10**6), list(range(10**6)), {"a": 1}):
        assert len(shown(value)) < 100
