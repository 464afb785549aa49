"""Demo training: a three-layer GraphSAGE, and the one loop that trains it, whatever hands out mini-batches.

:func:`train` does not know the way: a loader of a store in any mode, or :class:`ArrayLoader`, which samples
and gathers from an array by itself. Everything that could make two ways differ is fixed: seeds of weights and
sampler, two threads, deterministic algorithms. So where two ways have the same mini-batches, the loss of each
step must be the same **bits**. A loss can hide a flipped low bit in one of a million values, in rounding; the
digest that is kept of each mini-batch's rows (SHA-256 over the CRC-32C of its pages) cannot.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.checksum import crc_pages, digest_of_checksums

if TYPE_CHECKING:
    from featstore.loaders.batch import Batch

__all__ = ["ArrayLoader", "TrainingPlan", "accuracy", "digest", "train", "weights_digest"]

_THREADS = 2


@dataclass(frozen=True)
class TrainingPlan:
    """What is trained: the same in all ways that are compared."""

    epochs: int
    batch_size: int
    fanouts: tuple[int, ...]
    hidden: int
    seed: int
    class_count: int
    feature_count: int
    learning_rate: float = 0.005


class ArrayLoader:
    """Mini-batches with rows of an array, one epoch each time it is gone through: sampled and gathered in the
    loop's own thread, as one does without a store. ``rows``: [n, d], in memory or a memory map. After
    ``seconds_max`` it hands out nothing more; one mini-batch it always does."""

    def __init__(
        self, plan: TrainingPlan, topology: dict[str, NDArray[Any]], rows: NDArray[np.float32],
        seeds: NDArray[Any], seconds_max: float = float("inf"),
    ) -> None:  # fmt: skip
        from featstore.sampling.batches import SampledBatches
        from featstore.sampling.neighbors import NeighborSampler

        sampler = NeighborSampler(topology["indptr"], topology["indices"], plan.fanouts, plan.seed)
        self._batches, self._rows = SampledBatches(sampler, seeds, plan.batch_size), rows
        self._epoch, self._given, self._until = 0, 0, time.perf_counter() + seconds_max

    def __len__(self) -> int:
        """Mini-batches of an epoch."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        import torch

        from featstore.loaders.batch import Batch

        self._batches.set_epoch(self._epoch)
        self._epoch += 1
        for index, sample in enumerate(self._batches):
            if self._given and time.perf_counter() > self._until:
                return
            self._given += 1
            yield Batch(index, sample.node, torch.from_numpy(np.asarray(self._rows[sample.node])), sample)


def train(
    plan: TrainingPlan, batches: Iterable[Any], labels: NDArray[np.int64],
    note_step: Callable[[Any, float], None], note_epoch: Callable[[float], None],
) -> Any:  # fmt: skip
    """Train ``plan.epochs`` epochs; returns the model. ``note_step`` is called with each mini-batch and its
    loss, ``note_epoch`` after each epoch with the seconds for which the loop had no mini-batch."""
    import torch

    torch.set_num_threads(_THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(plan.seed)
    model, wanted = _sage(plan), torch.from_numpy(labels)
    optimiser = torch.optim.Adam(model.parameters(), lr=plan.learning_rate)
    for _ in range(plan.epochs):
        source, waited = iter(batches), 0.0
        while True:
            asked = time.perf_counter()
            batch = next(source, None)
            waited += time.perf_counter() - asked
            if batch is None:
                break
            optimiser.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch), wanted[batch.n_id[: batch.batch_size]])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            note_step(batch, float(loss.detach()))
        note_epoch(waited)
    return model


def accuracy(model: Any, batches: Iterable[Any], labels: NDArray[np.int64]) -> float:
    """The share of the seeds of these mini-batches whose label the model finds."""
    import torch

    right = total = 0
    with torch.no_grad():
        for batch in batches:
            found = model(batch).argmax(1).numpy()
            right += int((found == labels[np.asarray(batch.n_id[: batch.batch_size])]).sum())
            total += len(found)
    return right / max(1, total)


def digest(rows: NDArray[np.float32]) -> str:
    """Of rows [k, d]: equal for equal bytes."""
    return digest_of_checksums(crc_pages(rows.reshape(-1).view(np.uint8)))[:16]


def weights_digest(model: Any) -> str:
    """Of all parameters of a model: equal for equal bits."""
    found = hashlib.sha256()
    for value in model.state_dict().values():
        found.update(value.numpy().tobytes())
    return found.hexdigest()[:16]


def _sage(plan: TrainingPlan) -> Any:
    """A layer for each hop (mean of the neighbours); each computes only what the layers above it need."""
    import torch
    from torch import nn

    class GraphSage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [plan.feature_count, *[plan.hidden] * (len(plan.fanouts) - 1), plan.class_count]
            self.own = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
            self.others = nn.ModuleList(nn.Linear(*pair, bias=False) for pair in pairwise(widths))

        def forward(self, batch: Any) -> Any:
            x, hops = batch.x, len(plan.fanouts)
            nodes, edges, (row, col) = batch.num_sampled_nodes, batch.num_sampled_edges, batch.edge_index
            for depth, (own, others) in enumerate(zip(self.own, self.others)):
                # Nodes and edges are grouped by hop, so what this layer needs is a beginning of both.
                targets, count = int(sum(nodes[: hops - depth])), int(sum(edges[: hops - depth]))
                to, of = col[:count], others(x)[row[:count]]
                total = torch.zeros(targets, of.shape[1]).index_add_(0, to, of)
                x = own(x[:targets]) + total / torch.bincount(to, minlength=targets).clamp(min=1)[:, None]
                if depth + 1 < hops:
                    x = x.relu()
            return x

    return GraphSage()
