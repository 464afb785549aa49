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
