"""A workload to tune for: neighbours sampled from a stored graph, by workers if wanted, and a model that
stands in for the user's.

Mini-batches are numbered through all epochs, and each follows from its number alone
(:mod:`featstore.sampling.batches`), so that it does not matter which worker samples it. A mini-batch is a
mapping that :func:`featstore.sampling.minibatch.split` understands: ``n_id`` (node ids, seeds first), ``row``
and ``col`` (edges, as places in ``n_id``), ``nodes`` and ``edges`` (how many of them each hop has found).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import need_torch
from featstore.errors import WaitTimeoutError
from featstore.sampling.batches import GraphSampler
from featstore.sampling.recorded_epochs import RecordedEpochs
from featstore.sampling.stored import StoredSampler

_EPOCHS = 1 << 20  # an end that nobody reaches
CLASSES = 16
#: For a mini-batch from a worker: far longer than any that can be tuned for.
WORKER_SECONDS_MAX = 120.0


class EpochNumbers:
    """The numbers of an epoch's mini-batches; each iteration is the next epoch, whoever iterates."""

    def __init__(self, per_epoch: int) -> None:
        self._per_epoch, self._epoch = per_epoch, 0

    def __len__(self) -> int:
        return self._per_epoch

    def __iter__(self) -> Iterator[int]:
        begin = self._epoch * self._per_epoch
        self._epoch += 1
        return iter(range(begin, begin + self._per_epoch))


class Epochs:
    """Mini-batches that are sampled where they are iterated."""

    def __init__(self, batches: RecordedEpochs, numbers: EpochNumbers) -> None:
        self._batches, self._numbers = batches, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Any]:
        return (mini_batch(self._batches[number]) for number in self._numbers)


class WorkedEpochs:
    """Mini-batches that worker processes sample, each within ``timeout_seconds`` of being waited for."""

    def __init__(self, loader: Any, workers: int, timeout_seconds: float) -> None:
        self._loader, self._workers, self._timeout_seconds = loader, workers, timeout_seconds

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._loader
        except RuntimeError as error:  # torch has no type for it
            if not str(error).startswith("DataLoader timed out"):
                raise
            raise WaitTimeoutError(
                f"no mini-batch came from {self._workers} sampler workers within "
                f"{self._timeout_seconds:g} seconds: one of them hangs, or a mini-batch takes longer; give "
                "smaller mini-batches or fan-outs, more seconds (--seconds), or consider no workers "
                "(workers=(0,), --from-disk)"
            ) from error


def mini_batch(pair: Any) -> dict[str, Any]:
    """A recorded pair as a mapping of arrays."""
    n_id, sample = pair
    batch = sample["batch"]
    return {
        "n_id": n_id,
        "row": batch.row,
        "col": batch.col,
        "nodes": batch.num_sampled_nodes,
        "edges": batch.num_sampled_edges,
    }


def tensors_of(pair: Any) -> dict[str, Any]:
    """The same of tensors, which go from process to process through shared memory."""
    import torch

    found = mini_batch(pair)
    return found | {name: torch.from_numpy(found[name]) for name in ("n_id", "row", "col")}


def neighbour_batches(
    sampler: GraphSampler, train: NDArray[Any], batch_size: int, timeout_seconds: float = WORKER_SECONDS_MAX
) -> Callable[[int], Iterable[Any]]:
    """A function of the number of workers that makes the mini-batches of neighbour sampling. Each iteration
    over what it has made is another epoch, whoever iterates: the same mini-batches again would find all of
    their rows in the buffer.

    Workers need torch, and a graph in memory: of one on disk each of them would hold a cache of its own. One
    that hangs is a WaitTimeoutError of the iteration, after ``timeout_seconds``. Raises SourceError, IdError.
    """
    batches = RecordedEpochs(sampler, train, batch_size, _EPOCHS)
    numbers = EpochNumbers(len(batches) // _EPOCHS)

    def make(workers: int) -> Iterable[Any]:
        if workers == 0:
            return Epochs(batches, numbers)
        from torch.utils.data import DataLoader

        loader: Any = DataLoader(
            batches,  # type: ignore[arg-type]
            batch_size=None,
            sampler=numbers,
            collate_fn=tensors_of,
            num_workers=workers,
            persistent_workers=True,
            timeout=timeout_seconds,
        )
        return WorkedEpochs(loader, workers, timeout_seconds)

    return make


def can_have_workers(sampler: GraphSampler) -> bool:
    """Whether :func:`neighbour_batches` over this sampler can have workers here."""
    from importlib.util import find_spec

    return not isinstance(sampler, StoredSampler) and find_spec("torch") is not None


def stand_in(columns: int, fanouts: Sequence[int], hidden: int = 256) -> Callable[[Any], None]:
    """A training step of GraphSAGE (mean aggregation, a layer for each hop, made-up labels) on what an online
    loader hands out.

    ``columns``: numbers of a feature row. Raises MissingPackageError without torch.
    """
    need_torch("a training step to stand in for yours (say step_ms= instead)")
    import torch
    from torch import nn

    from featstore.base.tensors import as_tensor

    class Sage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [columns, *[hidden] * (len(fanouts) - 1), CLASSES]
            self.own = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
            self.other = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))

        def forward(self, h: torch.Tensor, sample: Any) -> torch.Tensor:
            row, col = torch.as_tensor(sample["row"]), torch.as_tensor(sample["col"])
            hops = len(fanouts)
            for depth in range(hops):
                # Nodes and edges come hop by hop, so what a layer needs is a beginning of both.
                targets, count = sum(sample["nodes"][: hops - depth]), sum(sample["edges"][: hops - depth])
                at = col[:count]
                total = h.new_zeros(targets, h.shape[1]).index_add(0, at, h[row[:count]])
                mean = total / torch.bincount(at, minlength=targets).clamp(min=1)[:, None]
                h = self.own[depth](h[:targets]) + self.other[depth](mean)
                h = h.relu() if depth + 1 < hops else h
            return h

    torch.manual_seed(0)
    model = Sage()
    optimiser = torch.optim.Adam(model.parameters())

    def step(batch: Any) -> None:
        rows = as_tensor(batch.x) if isinstance(batch.x, np.ndarray) else batch.x
        x = rows.reshape(len(batch.n_id), -1).float()
        labels = torch.as_tensor(batch.n_id[: batch.sample["nodes"][0]]).long() % CLASSES
        loss = nn.functional.cross_entropy(model(x, batch.sample), labels)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step
