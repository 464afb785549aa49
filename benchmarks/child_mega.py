"""Training in a process of its own, for a memory cgroup: by mega-batches from a store, or over np.memmap.
Given and prints JSON.

All modes import the same; ``bare`` does nothing else, and what it holds is what Python and its imports take.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from graphs import GraphFiles
from sage import Sage
from system import cpu_seconds, gather_until, process_io, status_bytes
from torch import Tensor, nn

import featstore
from featstore.loaders.mega.loader import PartitionsLoader
from featstore.sampling.neighbors import NeighborSampler

FANOUTS = (10, 5)
BATCH = 1024
HIDDEN = 64


def mean_of_messages(h: Tensor, row: Tensor, col: Tensor, targets: int) -> Tensor:
    """float32 [targets, columns of h]: for each target the mean of its neighbours' rows of ``h``."""
    total = torch.zeros(targets, h.shape[1]).index_add_(0, col, h[row])
    return total / torch.bincount(col, minlength=targets).clamp(min=1)[:, None]


class Training:
    """The model and its clock: seconds in the model, seconds in whatever gives it mini-batches."""

    def __init__(self, columns: int, labels: Any) -> None:
        torch.manual_seed(0)
        self.model = Sage(columns, HIDDEN, mean_of_messages)
        self.optimiser = torch.optim.Adam(self.model.parameters(), lr=0.003)
        self.labels = labels
        self.model_seconds = 0.0
        self.right = self.seen = self.batches = 0

    def step(
        self, node: Any, x: Any, row: Any, col: Any, nodes: tuple[int, ...], edges: tuple[int, ...]
    ) -> None:
        begin = time.perf_counter()
        y = torch.from_numpy(self.labels[node[: nodes[0]]].astype(np.int64))
        out = self.model(torch.from_numpy(x), torch.from_numpy(row), torch.from_numpy(col), nodes, edges)
        self.optimiser.zero_grad()
        nn.functional.cross_entropy(out, y).backward()
        self.optimiser.step()
        self.right += int((out.argmax(1) == y).sum())
        self.seen += len(y)
        self.batches += 1
        self.model_seconds += time.perf_counter() - begin


def by_mega_batches(given: dict[str, Any], training: Training) -> dict[str, Any]:
    """An epoch from the store."""
    train = np.load(given["train"])
    options = {name: given[name] for name in ("resident", "replaced", "hubs")}
    with (
        featstore.open(given["store"]) as store,
        PartitionsLoader(
            store, FANOUTS, batch_size=BATCH, memory=given["memory_bytes"], train=train, **options
        ) as loader,
    ):
        del train
        opened = time.perf_counter()
        for b in loader:
            training.step(b.n_id, b.x, b.row, b.col, b.num_sampled_nodes, b.num_sampled_edges)
            del b
        seconds, report, sets = time.perf_counter() - opened, loader.report(), loader.sets
        return {f"{stage}_seconds": spent for stage, spent in report.seconds.items()} | {
            "seconds": seconds, "steps": sets.steps, "resident": sets.resident, "partitions": sets.partitions,
            "hubs": len(sets.hub_rows["features"]), "kept_share": report.kept_share,
            "read_bytes": loader.loaded_bytes, "planned_bytes": loader.memory()["planned"],
        }  # fmt: skip


def over_memmap(given: dict[str, Any], training: Training) -> dict[str, Any]:
    """Some mini-batches over memory maps of the same graph and features."""
    files = GraphFiles(Path(given["folder"]), given["nodes"], given["columns"])
    x, indptr, indices = (files.load(name, mapped=True) for name in ("features", "indptr", "indices"))
    if given["mode"] == "advised":
        for array in (x, indptr, indices):
            array._mmap.madvise(mmap.MADV_RANDOM)
    sampler = NeighborSampler(indptr, indices, FANOUTS, 0)
    order = np.random.default_rng(0).permutation(files.load("train"))

    def batches() -> Iterator[Any]:
        for number in range(given["batches"]):
            yield sampler.sample(order[number * BATCH : (number + 1) * BATCH], number)

    few = sampler.sample(order[-2:], 10**6)  # loads the kernels
    del few
    begin = time.perf_counter()
    end, rest = begin + given["seconds_max"], 0.0
    for b in batches():
        rows, share = gather_until(x, b.node, end)
        if share < 1:
            rest = share
            break
        training.step(b.node, rows, b.row, b.col, b.num_sampled_nodes, b.num_sampled_edges)
        if time.perf_counter() > end:
            break
    return {"seconds": time.perf_counter() - begin, "batches": training.batches + rest}


def main() -> None:
    """Do what the argument says."""
    given = json.loads(sys.argv[1])
    torch.set_num_threads(2)
    result: dict[str, Any] = {}
    if given["mode"] != "bare":
        training = Training(given["columns"], np.load(given["labels"]))
        io, cpu = process_io(), cpu_seconds()
        run = by_mega_batches if given["mode"] == "mega" else over_memmap
        result = run(given, training)
        result = {"batches": training.batches} | result
        result |= {
            "model_seconds": training.model_seconds,
            "accuracy": training.right / max(1, training.seen),
            "device_read_bytes": process_io()["read_bytes"] - io["read_bytes"],
            "cpu_seconds": cpu_seconds() - cpu,
        }  # fmt: skip
    else:
        model = Training(4, np.zeros(1, np.uint8))  # what the first step loads belongs to the imports
        node, edge = np.arange(2), np.zeros(1, np.int64)
        model.step(np.zeros(2, np.int64), np.zeros((2, 4), np.float32), edge, edge, (1, 1, 0), (1, 0))
        del node
    print(json.dumps(result | {"peak_bytes": status_bytes("VmHWM")}))


if __name__ == "__main__":
    main()
