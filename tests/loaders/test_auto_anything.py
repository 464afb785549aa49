"""Mode auto takes whatever mini-batches there are: it is online where nobody knows what they cost."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.loaders.costs.popularity import learn
from featstore.loaders.mega import loading

ROWS = 400
X = np.arange(4 * ROWS, dtype=np.float32).reshape(ROWS, 4)
LISTS = [np.arange(k, k + 9) for k in range(0, 360, 9)]


@pytest.fixture
def store(tmp_path: Any) -> Any:
    with featstore.pack(tmp_path / "s", X) as opened:
        yield opened


def rows_are_right(loader: Any) -> None:
    for batch in loader:
        assert np.array_equal(np.asarray(batch.x), X[np.asarray(batch.n_id)])


def test_samples_that_cannot_be_stored(store: Any) -> None:
    batches = [SimpleNamespace(n_id=ids, row=ids[:2] * 0, col=ids[:2] * 0, own=object()) for ids in LISTS]
    given: dict[str, Any] = {"nodes": lambda one: one.n_id, "memory": "32MiB"}
    with store.loader(batches, disk="3x", **given) as loader:
        assert loader.mode == "online"
        assert "cannot be told" in loader.mode_because
        assert len(list(loader)) == len(LISTS)


def test_mini_batches_of_no_length_that_come_slowly(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featstore.loaders.costs.auto.LOOKED_SECONDS", 0.01)

    def slowly(epoch: int) -> Any:
        for ids in LISTS[:6]:
            time.sleep(0.02)
            yield ids

    with store.loader(slowly, repeat=True, disk="3x", memory="32MiB") as loader:
        assert loader.mode == "online"
        rows_are_right(loader)


@pytest.mark.parametrize("empty", ["without rows", "never asked for"])
def test_tables_of_which_no_row_is_wanted(tmp_path: Any, empty: str) -> None:
    other = X[: 0 if empty == "without rows" else 50]
    nothing = np.empty(0, np.int64)
    with featstore.pack(tmp_path / "t", {"a": X, "b": other}, order="given") as store:
        batches = [{"a": ids, "b": nothing} for ids in LISTS]
        with store.loader(batches, disk="3x", memory="32MiB") as loader:
            for batch in loader:
                assert np.array_equal(batch.x["a"], X[batch.n_id["a"]])
        costs = store.loader_costs(batches, disk="3x", memory="32MiB")
        assert all(np.isfinite(one.epoch_seconds) for one in costs.modes.values() if one.possible)


def test_nothing_is_wanted_of_nothing() -> None:
    none = [np.empty(0, np.int64)] * 3
    for rows in (0, 7):
        found = learn(none, rows)
        assert (found.batch_rows, found.hit_rate_of_most_wanted(3)) == (0, 1)
        assert [len(one) for one in found.draw(4, 1.0)[0]] == [0] * 4


def test_partitions_are_priced_with_maps_beside_what_reads(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader of prices has the map from ids to rows, which that of mode partitions has not; of many rows
    it is larger than what that has for reading."""
    monkeypatch.setattr(loading, "_READER_BYTES_MIN", 700 << 10)
    monkeypatch.setattr(loading, "_READER_BYTES_MAX", 700 << 10)
    rows = 400_000
    edges = np.random.default_rng(0).integers(0, rows, (2, 3 * rows))
    table = np.zeros((rows, 2), np.float32)
    train = np.arange(0, rows, 50)
    with featstore.pack(
        tmp_path / "p", table, graph=edges, order="ldg", partitions=32, arrays={"train": train}, memory="1GiB"
    ) as store:
        costs = store.loader_costs(seeds="train", fanouts=(2,), batch_size=256, memory="48MiB", disk="3x")
        assert {*costs.modes} >= {"online", "partitions"}
