"""Mini-batches whose number nobody knows are gone through all the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import featstore


class Unknown:
    """As PyG's ``DynamicBatchSampler`` without ``num_steps``, and others that are not finished."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __len__(self) -> int:
        raise self._error

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter([np.arange(10), np.arange(5, 40)])


@pytest.mark.parametrize("error", [ValueError("unknown"), TypeError("unknown"), NotImplementedError()])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_length_that_is_none(tmp_path: Any, pack: Any, error: Exception, ranks: int) -> None:
    rows = np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)
    with pack(tmp_path / "s", rows) as store:
        found = []
        for rank in range(ranks):
            with store.loader(Unknown(error), rank=rank, world_size=ranks, memory="16MiB") as loader:
                found.append([np.asarray(batch.x) for batch in loader])
    assert [len(one) for one in found] == [2] if ranks == 1 else [1, 1]
    np.testing.assert_array_equal(found[0][0], rows[:10])
    np.testing.assert_array_equal(found[-1][-1], rows[5:40])


def test_who_is_not_asked_is_not_asked(tmp_path: Any, pack: Any) -> None:
    """Where the length does not matter, nobody wants it: a DataLoader over data of unknown length would warn
    of each mini-batch beyond what it said."""

    class Asked(Unknown):
        def __len__(self) -> int:
            raise AssertionError("nobody needs it")

    rows = np.arange(150, dtype=np.float32).reshape(50, 3)
    with pack(tmp_path / "s", rows) as store, store.loader(Asked(ValueError()), memory="16MiB") as loader:
        assert sum(1 for _ in loader) == 2


def test_names_of_arrays_may_come_one_by_one(tmp_path: Any, pack: Any) -> None:
    """A generator of them attaches what it names."""
    pytest.importorskip("torch_geometric")
    from featstore.adapters.pyg import NeighborLoader

    edges = np.random.default_rng(1).integers(0, 50, (2, 300))
    rows = np.arange(150, dtype=np.float32).reshape(50, 3)
    with pack(tmp_path / "s", rows, graph=edges, arrays={"y": np.arange(50)}) as store:
        names = (name for name in ["y"])
        with NeighborLoader(store, [4], input_nodes=np.arange(20), batch_size=5, attach=names) as loader:
            for batch in loader:
                np.testing.assert_array_equal(batch.y, batch.n_id)


def test_pyg_that_is_not_there_is_named(tmp_path: Any, pack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    edges = np.random.default_rng(1).integers(0, 50, (2, 300))
    with (
        pack(tmp_path / "s", np.ones((50, 3)), graph=edges) as store,
        store.loader(seeds=np.arange(9), fanouts=(3,), memory="32MiB") as loader,
    ):
        batch = next(iter(loader))
    monkeypatch.setitem(sys.modules, "torch_geometric", None)
    with pytest.raises(featstore.errors.MissingPackageError, match=r"featstore\[pyg\]"):
        batch.pyg()
