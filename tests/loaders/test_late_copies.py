"""Mini-batches for a device come through memory that is used again: with an accelerator in its place that
copies as late as it may, every row is still the source's, in every mode."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from featstore.base import transfers  # noqa: E402
from featstore.base.buffers import aligned_buffer  # noqa: E402
from featstore.loaders.batch import Batch, device_tensors  # noqa: E402
from featstore.loaders.options import MODES  # noqa: E402

NODES, WIDTH = 2500, 6
FEATURES = np.random.default_rng(0).standard_normal((NODES, WIDTH)).astype(np.float32)
TRAIN = np.arange(0, NODES, 4)


class Late(transfers.Copies):
    """Its copies are made when they are waited for."""

    def __init__(self) -> None:
        self.copied = self.waited = 0

    def pinned(self, byte_count: int) -> Any:
        return aligned_buffer(byte_count)

    def within(self) -> Any:
        return nullcontext()

    def now(self) -> Any:
        return threading.current_thread()

    def after(self, done: Any) -> None:
        assert done is not threading.current_thread(), "the loop's stream waits for that of the loader"
        self.waited += 1

    def keep(self, made: Any) -> None:
        assert not list(made), "of tensors in host memory"

    def copy(self, tensors: Any) -> Any:
        made = [torch.full_like(one, -1) for one in tensors]
        late = self

        class Done:
            def synchronize(self) -> None:
                for target, source in zip(made, tensors, strict=True):
                    target.copy_(source)
                late.copied += 1

        return made, Done()


def test_all_that_is_on_a_device_is_found() -> None:
    """In a mini-batch of ours, in what is handed over beside it, and in an object of PyG's."""
    there = [torch.empty(n, device="meta") for n in range(5)]
    batch = Batch(0, np.arange(3), {"a": there[0], "b": there[1]}, {"row": np.arange(2)})
    batch.edge_attr, batch._edges = [there[2]], {("a", "to", "b"): there[3]}
    found = list(device_tensors((batch, {"place": 4, "other": (there[4], torch.ones(2), None)})))
    assert {id(one) for one in found} == {id(one) for one in there}
    data = pytest.importorskip("torch_geometric.data").HeteroData()
    data["a"].x, data["a"].n_id, data["a", "to", "b"].edge_index = there[0], torch.ones(1), there[1]
    assert {id(one) for one in device_tensors(data)} == {id(one) for one in there[:2]}


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_there_before_their_memory_is_used_again(
    tmp_path: Path, pack: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, real = Late(), transfers.Transfer
    monkeypatch.setattr(transfers, "Transfer", lambda device: real(device, late))
    edges = np.random.default_rng(1).integers(0, NODES, (2, 20_000))
    with pack(tmp_path / "s", FEATURES, graph=edges, order="ldg", partitions=10) as store:
        how: dict[str, Any] = {"seeds": TRAIN, "fanouts": (4, 3), "batch_size": 50, "memory": "64MiB"}
        how |= {"resident": 4} if mode == "partitions" else {}
        with store.loader(mode=mode, device="cpu", **how) as loader:
            batches = [batch for _ in range(2) for batch in loader]
        assert late.waited == len(batches)
        assert late.copied == len(batches) >= 2 * len(TRAIN) // 50
        for batch in batches:
            np.testing.assert_array_equal(np.asarray(batch.x), FEATURES[batch.n_id])
