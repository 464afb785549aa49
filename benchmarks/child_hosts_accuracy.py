"""One host of ``hosts_accuracy.py``, in a process of its own: trains once for each seed. Not to be run by
itself."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import ROOT  # noqa: F401  (makes featstore importable)
from mega_accuracy import of_rows, train
from mega_models import Net, WholeGraph
from mega_plans import Data, Plan
from torch.nn.utils import parameters_to_vector

import featstore


class Evaluation:
    """The classes of all nodes, which the first host finds, and tells the others; they wait meanwhile."""

    def __init__(self, kind: str, data: Data, fanout: int) -> None:
        first = dist.get_rank() == 0
        self._whole = WholeGraph(kind, data.indptr, data.indices, fanout) if first else None

    def classes(self, net: Net, x: torch.Tensor) -> torch.Tensor:
        """int64 [nodes]. Raises RuntimeError where this host's model is not the first one's, to the last
        bit."""
        mine = parameters_to_vector(net.parameters()).detach()
        first = mine.clone()
        dist.broadcast(first, 0)
        if not torch.equal(mine, first):
            raise RuntimeError("the hosts' models are not the same")
        found = torch.empty(len(x), dtype=torch.int64) if self._whole is None else self._whole.classes(net, x)
        dist.broadcast(found, 0)
        return found


class Epochs:
    """(1 pass over the training nodes, this host's mini-batches), again and again; ``rows`` is how many rows
    these had so far."""

    def __init__(self, loader: Any, data: Data) -> None:
        self._loader, self._data = loader, data
        self.rows = 0

    def __iter__(self) -> Iterator[tuple[int, Iterator[Any]]]:
        for epoch in itertools.count():
            yield 1, self._batches(epoch)

    def _batches(self, epoch: int) -> Iterator[Any]:
        """Raises RuntimeError after one in which all hosts together have trained on other nodes than all
        training nodes."""
        trained = torch.zeros(len(self._data.labels), dtype=torch.uint8)
        for batch in self._loader:
            self.rows += len(batch.n_id)
            if batch.batch_size > 1:  # of one, no step is made
                trained[torch.from_numpy(batch.n_id[: batch.batch_size])] = 1
            yield of_rows(batch.sample, batch.x)
        dist.all_reduce(trained, dist.ReduceOp.MAX)
        if not np.array_equal(np.flatnonzero(trained.numpy()), np.sort(self._data.train)):
            raise RuntimeError(f"epoch {epoch} has not every training node")


def run(store: Any, said: dict[str, Any], plan: Plan, data: Data, whole: Any, seed: int) -> dict[str, Any]:
    """One training run; rows are of all hosts."""
    with store.loader(
        seeds="train", fanouts=plan.fanouts, batch_size=plan.batch_size // said["hosts"], seed=seed,
        memory=said["memory"], mode="online", tensors=True, engine="mmap",
    ) as loader:  # fmt: skip
        epochs = Epochs(loader, data)
        result = train(said["kind"], plan, data, iter(epochs), whole, seed, said["hosts"])
        rows = torch.tensor([epochs.rows, loader.report().remote_rows])
    dist.all_reduce(rows)
    of_epoch, remote = (rows / plan.rounds).round().int().tolist()
    return result | {"rows_an_epoch": of_epoch, "remote_rows_an_epoch": remote}


def open_store(said: dict[str, Any]) -> Any:
    """The whole store of one host; of several, this one's part."""
    if said["hosts"] == 1:
        return featstore.open(said["parts"])
    return featstore.open_split(said["parts"], memory="64MiB", timeout_seconds=120, engine="mmap")


def main(said: dict[str, Any]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{said['meeting']}", rank=said["rank"], world_size=said["hosts"]
    )
    data, plan = Data(**np.load(said["data"])), Plan(**said["plan"])
    whole = Evaluation(said["kind"], data, plan.fanouts[0])
    with open_store(said) as store:
        runs = [run(store, said, plan, data, whole, seed) for seed in said["seeds"]]
    dist.destroy_process_group()
    return runs


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    told = main(asked)
    Path(asked["told"]).write_text(json.dumps(told))
