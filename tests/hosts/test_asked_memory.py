"""What rows that are asked of other hosts take beside themselves is what a loader counts for them."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
from test_split_topology import hosts

import featstore
from featstore.loaders.online.budget import _ASKED_BYTES_PER_ID

NODES, ASKED, SECONDS = 200_000, 80_000, 60.0


def test_rows_of_others_take_what_is_counted(tmp_path: Path, pack: Any) -> None:
    x = np.arange(2 * NODES, dtype=np.float32).reshape(NODES, 2)
    graph = np.random.default_rng(0).integers(0, NODES, (2, NODES))
    pack(tmp_path / "s", {"n": x}, graph={"n": graph}).close()
    featstore.split(tmp_path / "s", 2, tmp_path / "parts")
    out, places = np.empty((ASKED, 2), np.float32), np.arange(ASKED, dtype=np.int32)
    with hosts(tmp_path / "parts", 2, memory="96MiB") as (stores, _):
        source: Any = stores[0].source(["n"], memory="32MiB", static=None, static_memory=0)
        others = np.flatnonzero(~stores[0].owners["n"].mine(np.arange(NODES)))[:ASKED]
        assert len(others) == ASKED

        def ask(count: int) -> None:
            at = {"n": places[:count]}
            source.submit({"n": others[:count]}, out={"n": out}, at=at).result(SECONDS)

        ask(1000)  # so that kernels and threads are there
        tracemalloc.start()
        try:
            ask(ASKED)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        source.close()
    assert np.array_equal(out, x[others])
    assert ASKED * 8 < peak <= _ASKED_BYTES_PER_ID * ASKED
