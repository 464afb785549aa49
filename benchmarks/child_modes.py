"""What ``modes.py`` runs in a process of its own: epochs of GraphSAGE in one way. Given and prints JSON.

``bare``: nothing but imports, kernels and a step of a tiny model, which is what all others begin with, too.
``memory``: a plain loop that samples, gathers and trains by turns, everything in memory. ``memmap``,
``advised``: the same loop over memory maps of the same files, as much of an epoch as ``seconds_max`` allows.
``step``: what steps on the largest mini-batches take beyond their rows. All others: a mode of
``store.loader``; first an epoch that does not count, in which caches fill and what is to be prepared is, then
one that nobody trains on, then those that are trained on.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compiled_model import Training
from graphs import GraphFiles
from system import cpu_seconds, gather_until, go_through, process_io, status_bytes

import featstore
from featstore.loaders.options import MODES
from featstore.sampling.neighbors import NeighborSampler

TINY_NODES, TINY_MEMORY = 512, "48MiB"
SAMPLER_BYTES = 8 << 20  # of the budget, where the store's sampler is given its mini-batches' seeds
STEPS = 3


def sample_of(batch: Any) -> dict[str, Any]:
    """What the model needs of a mini-batch, of the sampler's or of a loader's."""
    nodes = batch.node if hasattr(batch, "node") else batch.n_id
    return {
        "seeds": nodes[: batch.num_sampled_nodes[0]].astype(np.int32), "row": batch.row.astype(np.int32),
        "col": batch.col.astype(np.int32), "nodes": list(batch.num_sampled_nodes),
        "edges": list(batch.num_sampled_edges),
    }  # fmt: skip


def load_kernels(folder: Path, columns: int) -> None:
    """Every mode over a tiny store, so that machine code and libraries are in memory."""
    rng = np.random.default_rng(0)
    rows = np.zeros((TINY_NODES, columns), np.float32)
    edges = rng.integers(0, TINY_NODES, (2, 8 * TINY_NODES))
    training = Training(columns, np.zeros(TINY_NODES, np.uint8))
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name) / "store"
        options: dict[str, Any] = {"graph": edges, "order": "ldg", "partitions": 8, "memory": "96MiB"}
        with featstore.pack(path, rows, **options) as store:
            for mode in MODES:
                seeds: dict[str, Any] = {"seeds": np.arange(0, TINY_NODES, 8), "fanouts": (2, 2)}
                with store.loader(**seeds, batch_size=16, mode=mode, memory=TINY_MEMORY) as loader:
                    for batch in loader:
                        training.step(np.asarray(batch.x), sample_of(batch))
                        del batch


def reset_peak() -> None:
    """Let the peak of this process's memory begin anew."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


class Plain:
    """The plain loop: sample, gather, train, by turns, over arrays or memory maps of them."""

    def __init__(self, given: dict[str, Any]) -> None:
        files = GraphFiles(Path(given["folder"]), given["nodes"], given["columns"])
        mapped = given["mode"] in ("memmap", "advised")
        self.x, indptr, indices = (files.load(name, mapped) for name in ("features", "indptr", "indices"))
        if given["mode"] == "advised":
            for array in (self.x, indptr, indices):
                array._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
        self._sampler = NeighborSampler(indptr, indices, given["fanouts"], 0)
        self._train, self._size = files.load("train"), given["batch_size"]

    def samples(self, epoch: int) -> Iterator[Any]:
        order = np.random.default_rng(epoch).permutation(self._train)
        for number, begin in enumerate(range(0, len(order), self._size)):
            yield self._sampler.sample(order[begin : begin + self._size], number, epoch=epoch)

    def epoch(self, epoch: int, seconds_max: float) -> Generator[tuple[Any, dict[str, Any]], None, float]:
        """Returns the share of a last mini-batch that there was no time for all of."""
        end = time.perf_counter() + seconds_max
        for sample in self.samples(epoch):
            rows, share = gather_until(self.x, sample.node, end)
            if share < 1:
                return share
            yield rows, sample_of(sample)
        return 0.0


def epoch_of(batches: Iterator[Any], seconds_max: float, training: Training | None) -> dict[str, Any]:
    """An epoch, or as much of it as the time allows, with the time of the cores and of the model."""
    cpu, model = cpu_seconds(), training.seconds if training else 0.0
    found = go_through(batches, seconds_max, training.step if training else lambda x, sample: None)
    return found | {
        "cpu_seconds": cpu_seconds() - cpu, "model_seconds": training.seconds - model if training else 0.0
    }  # fmt: skip


def plain(given: dict[str, Any], training: Training) -> dict[str, Any]:
    loop = Plain(given)
    epochs = range(1 + given["epochs"] if given["mode"] == "memory" else 1)
    found = [
        epoch_of(loop.epoch(epoch, given["seconds_max"]), given["seconds_max"], training) for epoch in epochs
    ]
    return {"epochs": found[1:] or found}


def of_partitions(store: featstore.Store, train: Any, given: dict[str, Any]) -> Any:
    """Mini-batches whose seeds come partition by partition, a callable by epoch."""
    order = featstore.PartitionOrder(store, train, batch_size=given["batch_size"])
    sampler = store.sampler(given["fanouts"], memory=SAMPLER_BYTES)

    def epoch(number: int) -> Iterator[Any]:
        order.set_epoch(number)
        seeds = train[np.fromiter(order, np.int64, len(train))]  # the order gives places in train
        for index, begin in enumerate(range(0, len(seeds), given["batch_size"])):
            yield sampler.sample(seeds[begin : begin + given["batch_size"]], index, epoch=number)

    return epoch


def stage_seconds(before: Any, after: Any, epochs: int) -> dict[str, float]:
    """Of an epoch, by stage, between two reports of a loader."""
    return {stage: (s - before.seconds.get(stage, 0.0)) / epochs for stage, s in after.seconds.items()}


def by_loader(given: dict[str, Any], training: Training) -> dict[str, Any]:
    """Epochs of one mode. ``order`` is "random" or "partition"."""
    train = np.load(given["train"])
    options: dict[str, Any] = given["options"] | {"mode": given["mode"], "tensors": False}
    begin = time.perf_counter()
    with featstore.open(given["store"]) as store:
        if given["order"] == "partition":
            memory = given["memory_bytes"] - SAMPLER_BYTES
            made = store.loader(of_partitions(store, train, given), memory=memory, **options)
        else:
            seeds = {"seeds": train, "fanouts": given["fanouts"], "batch_size": given["batch_size"]}
            made = store.loader(**seeds, memory=given["memory_bytes"], **options)
        with made as loader:
            opened = time.perf_counter() - begin

            def epoch() -> Iterator[tuple[Any, dict[str, Any]]]:
                for batch in loader:
                    yield batch.x, sample_of(batch)

            first = epoch_of(epoch(), 1e9, None)
            before = loader.report()
            alone = epoch_of(epoch(), 1e9, None)
            between = loader.report()
            trained = [epoch_of(epoch(), 1e9, training) for _ in range(given["epochs"])]
            after = loader.report()
            stages = stage_seconds(between, after, max(1, given["epochs"]))
            return {
                "open_seconds": opened, "first": first, "alone": alone, "epochs": trained,
                "bytes_read": between.bytes_read - before.bytes_read, "stages": stages,
                "alone_stages": stage_seconds(before, between, 1),
                "report": after.to_dict(),
            }  # fmt: skip


def steps(given: dict[str, Any], training: Training) -> dict[str, Any]:
    """What steps on the largest mini-batches of an epoch take, beyond their rows and samples."""
    loop = Plain(given | {"mode": "memmap"})
    largest = sorted(loop.samples(1), key=lambda one: len(one.node))[-STEPS:]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what sampling has taken is not there for a step
    made = [(np.ones((len(one.node), given["columns"]), np.float32), sample_of(one)) for one in largest]
    before = status_bytes("VmRSS")
    reset_peak()
    for x, sample in made:
        training.step(x, sample)
    return {"step_bytes": status_bytes("VmHWM") - before, "batch_bytes": made[-1][0].nbytes}


def main() -> None:
    """Do what the argument says."""
    given = json.loads(sys.argv[1])
    torch.set_num_threads(given["threads"])
    load_kernels(Path(given["workspace"]), given["columns"])
    training = Training(given["columns"], np.load(given["labels"]))
    reset_peak()
    base, io = status_bytes("VmRSS"), process_io()
    result: dict[str, Any] = {}
    if given["mode"] == "step":
        result = steps(given, training)
    elif given["mode"] != "bare":
        result = (by_loader if given["mode"] in MODES else plain)(given, training)
        if training.losses:
            result["loss"] = float(np.mean(training.losses[-20:]))
    result |= {"device_read_bytes": process_io()["read_bytes"] - io["read_bytes"]}
    print(json.dumps(result | {"base_bytes": base, "peak_bytes": status_bytes("VmHWM")}))


if __name__ == "__main__":
    main()
