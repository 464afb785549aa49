"""Transfers to a device, with an accelerator in its place whose copies are made late: what is copied from
must not be used for other rows before, and what is held for copies is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from featstore.base.buffers import Outputs, aligned_buffer  # noqa: E402
from featstore.base.transfers import Copies, Transfer  # noqa: E402

ROWS, WIDTH = 8, 5


class LateCopies(Copies):
    """Copies when it is waited for, and no sooner. ``pinned_bytes``: of all memory that was asked for."""

    def __init__(self) -> None:
        self.pinned_bytes = self.copied = 0

    def pinned(self, byte_count: int) -> NDArray[np.uint8]:
        self.pinned_bytes += byte_count
        return aligned_buffer(byte_count)

    def within(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def copy(self, tensors: Sequence[Any]) -> tuple[list[Any], Any]:
        made = [torch.empty_like(one) for one in tensors]
        return made, _Late(self, list(zip(made, tensors, strict=True)))


class _Late:
    def __init__(self, copies: LateCopies, pairs: list[tuple[Any, Any]]) -> None:
        self._copies, self._pairs = copies, pairs

    def synchronize(self) -> None:
        for target, source in self._pairs:
            target.copy_(source)
            self._copies.copied += 1
        self._pairs = []


@given(batches=st.integers(1, 12), tables=st.integers(1, 3))
def test_memory_is_used_again_when_it_was_copied(batches: int, tables: int) -> None:
    late = LateCopies()
    transfer = Transfer("cpu", late)
    outputs = Outputs(tables * ROWS * WIDTH * 4, 2, transfer.memory)
    found, expected = [], []
    for number in range(batches):
        raw = outputs.take(tables * ROWS * WIDTH * 4)
        rows = raw.view(np.float32).reshape(tables, ROWS, WIDTH)
        rows[:] = number + np.arange(tables)[:, None, None] / 10
        expected.append(rows.copy())
        found.append(transfer({str(n): torch.from_numpy(rows[n]) for n in range(tables)}))
        del raw, rows
    transfer.close()
    transfer.close()
    assert late.copied == batches * tables
    assert late.pinned_bytes <= 2 * tables * ROWS * WIDTH * 4, "one is copied, one is filled"
    for batch, wanted in zip(found, expected, strict=True):
        assert all((batch[str(n)].numpy() == wanted[n]).all() for n in range(tables))


def test_rows_that_are_there_stay() -> None:
    rows = {"a": torch.ones(3, 2)}
    there = Transfer("cpu")(rows)
    assert there["a"] is rows["a"]
    late = LateCopies()
    meta = torch.empty(2, device="meta")
    made = Transfer("cpu", late)({"there": meta, "here": rows["a"]})
    assert made["there"] is meta
    assert made["here"] is not rows["a"]
