"""What hosts hold is within the memory that they were given: peak memory of processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import featstore

NODES, COLUMNS = 40_000, 512  # 80 MB

PROGRAM = """
import gc, json, os, sys
from datetime import timedelta
import numpy as np
import torch.distributed as dist
import featstore

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
dist.init_process_group("gloo", timeout=timedelta(seconds=60))

def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) << 10

def train(store_memory, memory, halo, epochs):
    with (
        featstore.open_split("parts", memory=store_memory, timeout_seconds=30) as store,
        store.loader(seeds="train", fanouts=(5, 4), batch_size=100, memory=memory, halo=halo) as loader,
    ):
        for epoch in range(epochs):
            for batch in loader:
                assert (batch.x[:, 0] == batch.n_id).all()
                del batch
        rows = loader.report().remote_rows
        assert store.splits_topology
        assert store.received_lists()[0] > 1000
        assert sum(store.memory().values()) <= store_memory
    return rows

train(12 << 20, 28 << 20, 1 << 20, 1)  # what loads code and compiles is no matter of the budget
gc.collect()
open("/proc/self/clear_refs", "w").write("5")
before = peak()
rows = train(24 << 20, 48 << 20, 8 << 20, 2)
found = {"share": (peak() - before) / (72 << 20), "rows": rows}
json.dump(found, open(f"found{dist.get_rank()}.json", "w"))
dist.destroy_process_group()
"""


def test_two_hosts_stay_within_what_they_were_given(tmp_path: Path, pack: Any) -> None:
    rng = np.random.default_rng(0)
    rows = np.repeat(np.arange(NODES, dtype=np.float32)[:, None], COLUMNS, 1)
    graph = rng.integers(0, NODES, (2, 8 * NODES))
    arrays = {"train": np.arange(0, NODES, 32)}
    pack(tmp_path / "s", rows, graph=graph, arrays=arrays, order="ldg", partitions=16).close()
    featstore.split(tmp_path / "s", 2, tmp_path / "parts", train="train", split_topology=True)
    (tmp_path / "script.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:6000]
    for rank in range(2):
        found = json.loads((tmp_path / f"found{rank}.json").read_text())
        assert found["rows"] > 1000
        assert 0.3 < found["share"] <= 1.0, found
