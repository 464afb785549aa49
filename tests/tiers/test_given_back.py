"""Readers of several tiers: ids that a caller changes meanwhile, and what is dropped without being closed."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.tiers.buffer_tier import Buffer, BufferTier

ROWS = 3000
X = np.arange(4 * ROWS, dtype=np.float32).reshape(ROWS, 4)


@pytest.fixture
def store(tmp_path: Any) -> Any:
    with featstore.pack(tmp_path / "s", X) as opened:
        yield opened


def test_ids_that_are_changed_while_they_are_read_change_nothing(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were checked: rows, and what the tiers keep, are those of the ids that were given."""
    submit, ids = BufferTier.submit, np.arange(0, 2000, 2)
    asked = ids.copy()

    def changed_before(self: BufferTier, wanted: Any, **options: Any) -> Any:
        ids[:] = ROWS + 10**9
        return submit(self, wanted, **options)

    monkeypatch.setattr(BufferTier, "submit", changed_before)
    if hasattr(BufferTier, "submit_waiting"):
        waiting = BufferTier.submit_waiting

        def changed_waiting(self: BufferTier, wanted: Any, **options: Any) -> Any:
            ids[:] = ROWS + 10**9
            return waiting(self, wanted, **options)

        monkeypatch.setattr(BufferTier, "submit_waiting", changed_waiting)
    with store.reader(memory="32MiB", tiers=[Buffer("lru", memory="256KiB")]) as reader:
        assert np.array_equal(reader.read(ids), X[asked])
        monkeypatch.undo()
        assert np.array_equal(reader.read(asked), X[asked])


def test_a_reader_that_is_dropped_gives_everything_back(store: Any) -> None:
    """Also where a thread of a tier of its holds that."""
    pytest.importorskip("torch")

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def use() -> None:
        reader = store.reader(memory="128MiB", device="cpu", device_memory="1MiB")
        assert np.array_equal(np.asarray(reader.read([5, 7])), X[[5, 7]])

    use()
    gc.collect()
    time.sleep(0.5)
    before, threads = descriptors(), threading.active_count()
    for _ in range(3):
        use()
        gc.collect()
    deadline = time.monotonic() + 20
    while (descriptors() > before or threading.active_count() > threads) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert descriptors() <= before
    assert threading.active_count() <= threads
