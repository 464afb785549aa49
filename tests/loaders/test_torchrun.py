"""One loop on the ranks of ``torchrun``: gradients are averaged at every step, which would hang if ranks had
unequal numbers of them. With loaders of their own, and with one that the ranks of the host share."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import featstore
from featstore.loaders.options import MODES

RANKS, NODES, BATCH = 2, 900, 40
TRAIN = np.arange(0, NODES, 4)  # 225: not a multiple of whole mini-batches of all ranks
SCRIPT = """
import itertools
import sys
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

import featstore

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
features = np.load("features.npy")
store = featstore.open("s")
for shared, mode in itertools.product(["shared", "alone"], sys.argv[1:]):
    with store.loader(
        seeds=np.arange(0, 900, 4), fanouts=(3, 2), batch_size=40, memory="64MiB", mode=mode,
        shared=shared == "shared", tensors=True,
    ) as loader:
        assert (type(loader._mode).__name__ == "HostMode") == (shared == "shared")
        for epoch in range(2):
            steps, seeds = 0, torch.zeros(900)
            for batch in loader:
                assert (batch.x.numpy() == features[batch.n_id]).all()
                seeds[torch.from_numpy(batch.n_id[: batch.batch_size])] += 1
                dist.all_reduce(torch.ones(1))  # as DistributedDataParallel does at every step
                steps += 1
            dist.all_reduce(seeds)
            if dist.get_rank() == 0:
                counts = steps, int(seeds.sum()), int((seeds > 0).sum()), loader.report().padded
                print(shared, mode, epoch, *counts, flush=True)
dist.destroy_process_group()
"""


def test_every_mode_divides_its_epochs(tmp_path: Path, pack: Any) -> None:
    """One run for all: each starts a process a rank, which imports torch."""
    features = np.random.default_rng(0).standard_normal((NODES, 5)).astype(np.float32)
    np.save(tmp_path / "features.npy", features)
    edges = np.random.default_rng(1).integers(0, NODES, (2, 6000))
    pack(tmp_path / "s", features, graph=edges, order="ldg", partitions=6).close()
    (tmp_path / "train.py").write_text(SCRIPT)
    root = Path(featstore.__file__).resolve().parent.parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    done = subprocess.run(
        [*command, "train.py", *MODES], cwd=tmp_path, capture_output=True, text=True, timeout=200,
        env=os.environ | {
            "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "this process is one of" not in done.stderr, "they are divided: there is nothing to warn of"
    lines = re.findall(r"(shared|alone) (\w+) (\d) (\d+) (\d+) (\d+) (\d+)\n", done.stdout)
    expected = [(shared, mode, epoch) for shared in ("shared", "alone") for mode in MODES for epoch in "01"]
    assert [tuple(line[:3]) for line in lines] == expected
    for _, mode, _, *counts in lines:
        steps, seen, different, padded = map(int, counts)
        assert different == len(TRAIN), lines
        assert seen == len(TRAIN) + padded, lines
        assert padded < RANKS * (6 if mode == "partitions" else 1), lines
        assert steps >= len(TRAIN) // (BATCH * RANKS), lines
