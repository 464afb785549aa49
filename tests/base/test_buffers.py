"""Memory that is used again, and given back where less of it will do."""

from __future__ import annotations

import numpy as np

from featstore.base.buffers import Outputs
from featstore.units import PAGE_BYTES


def test_memory_that_was_not_asked_for_is_given_back() -> None:
    outputs = Outputs(64 * PAGE_BYTES, 2)
    whole = outputs.take(64 * PAGE_BYTES)
    part = outputs.take(10 * PAGE_BYTES + 5)
    rest = part.base
    assert isinstance(rest, np.ndarray)
    whole[:], rest[:] = 1, 2
    outputs.shrink()
    assert (whole == 1).all()
    assert (part == 2).all()
    assert (rest[11 * PAGE_BYTES :] == 0).all(), "what the system has taken back reads as zeros"


def test_memory_is_used_again() -> None:
    outputs = Outputs(PAGE_BYTES, 2)
    first = outputs.take(100)
    address = first.ctypes.data
    del first
    assert outputs.take(PAGE_BYTES).ctypes.data == address
