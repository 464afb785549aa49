"""Demo training: a three-layer GraphSAGE that does not know where its feature rows come from.

The same function trains from a store and from memory; only the ``rows`` object differs. Everything that could
make two runs differ is fixed: seeds of the weights, of the shuffle and of the sampler, two threads,
deterministic algorithms. So the loss of each step must be the same **bits** in both runs. A loss can hide a
flipped low bit in one of a million values, in rounding; the digest that is kept of each request's rows
(SHA-256 over the CRC-32C of its pages) cannot.

While mini-batch i trains, mini-batch i + 1 is sampled and its rows are on their way: ``submit`` first, then
compute, then ``result``. The time spent in ``result`` is what the store could not hide.

:func:`train_mega` trains the same model by mega-batches. It sees other mini-batches and, at the borders of
partitions, fewer neighbours: its losses are its own. Both are measured by :func:`evaluate`, with neighbours
sampled from the whole graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from featstore.loaders.report import LoaderReport

__all__ = [
    "MegaOutcome",
    "MemoryRows",
    "Outcome",
    "Rows",
    "StoreRows",
    "TrainingPlan",
    "evaluate",
    "mlp_accuracy",
    "train",
    "train_mega",
]

_THREADS = 2
_EVALUATION_EPOCH = 1 << 20


@dataclass(frozen=True)
class TrainingPlan:
    """What is trained: the same in all runs that are compared."""

    epochs: int
    batch_size: int
    fanouts: tuple[int, ...]
    hidden: int
    seed: int
    class_count: int
    feature_count: int
    val_count: int
    test_count: int
    learning_rate: float = 0.005


@dataclass
class Outcome:
    """What a run measured. ``losses``: float.hex of each step's loss. ``digests``: of the rows of each
    request, in order, those of the evaluation at the end. ``rows``: rows delivered in all. Times in
    seconds."""

    losses: list[str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    epoch_seconds: list[float] = field(default_factory=list)
    wait_seconds: list[float] = field(default_factory=list)
    rows: int = 0
    val_accuracy: float = 0.0
    test_accuracy: float = 0.0
    evaluation_seconds: float = 0.0


@dataclass
class MegaOutcome(Outcome):
    """What a run by mega-batches measured besides; one number an epoch.

    ``load_seconds``: bringing mega-batches into memory, beside the training; ``build_seconds``: of it, the
    subgraph; ``draw_seconds``: sampling mini-batches and gathering their rows, beside the training, too.
    ``wait_seconds``: what of all that the training waited for. ``read_bytes``: rows and lists of neighbours.
    ``kept_shares``: of all neighbours of the nodes in memory, the share that was in memory, too.
    """

    load_seconds: list[float] = field(default_factory=list)
    build_seconds: list[float] = field(default_factory=list)
    draw_seconds: list[float] = field(default_factory=list)
    read_bytes: list[int] = field(default_factory=list)
    kept_shares: list[float] = field(default_factory=list)

    def note_epoch(self, before: LoaderReport, after: LoaderReport) -> None:
        """What the loader reported before and after an epoch."""

        def seconds(*stages: str) -> float:
            return sum(after.seconds.get(name, 0.0) - before.seconds.get(name, 0.0) for name in stages)

        self.wait_seconds.append(seconds("wait"))
        self.load_seconds.append(seconds("load"))
        self.build_seconds.append(seconds("build"))
        self.draw_seconds.append(seconds("sample", "gather", "hand over"))
        stored = after.edges_stored - before.edges_stored
        self.kept_shares.append((after.edges_kept - before.edges_kept) / max(1, stored))


class Rows(Protocol):
    """Where feature rows come from."""

    def submit(self, ids: Any) -> Any:
        """Ask for the rows of ``ids`` (torch int64[k]); returns a ticket at once."""

    def result(self, ticket: Any) -> Any:
        """Wait for a ticket's rows: torch float32[k, d], in the order asked."""


class MemoryRows:
    """Rows of an array in memory, float32 [n, d]."""

    def __init__(self, features: NDArray[np.float32]) -> None:
        import torch

        self._features = torch.from_numpy(features)

    def submit(self, ids: Any) -> Any:
        """Nothing to wait for: the ticket is the rows."""
        return self._features.index_select(0, ids)

    def result(self, ticket: Any) -> Any:
        """The rows."""
        return ticket


class StoreRows:
    """Rows of a store's reader."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def submit(self, ids: Any) -> Any:
        """Hand the request to the reader, which reads while the caller computes."""
        return self._reader.submit(ids)

    def result(self, ticket: Any) -> Any:
        """Wait for the reader."""
        return ticket.result()


def train(
    plan: TrainingPlan,
    topology: dict[str, NDArray[Any]],
    rows: Rows,
    progress: Callable[[str, int, int], None],
) -> Outcome:
    """Train ``plan.epochs`` epochs, then measure accuracy on the first nodes of the validation and test
    split.

    ``topology``: ``indptr``, ``indices``, ``labels``, ``train_idx``, ``val_idx``, ``test_idx``. ``progress``
    is called with (stage, steps done, steps in all). Raises what ``rows`` raises.
    """
    import torch

    _fix_everything(plan.seed)
    model = _sage(plan)
    optimiser = torch.optim.Adam(model.parameters(), lr=plan.learning_rate)
    labels = torch.from_numpy(topology["labels"])
    loader = _loader(plan, topology, topology["train_idx"], shuffle=True)
    outcome = Outcome()
    steps = plan.epochs * len(loader)
    for epoch in range(plan.epochs):
        loader.node_sampler.set_epoch(epoch)
        began, waited = time.perf_counter(), 0.0
        for batch, x, wait in _with_rows(loader, rows):
            optimiser.zero_grad()
            logits = model(x, batch)
            loss = torch.nn.functional.cross_entropy(logits, labels[batch.n_id[: batch.batch_size]])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            outcome.losses.append(float(loss.item()).hex())
            _note_rows(outcome, x)
            waited += wait
            progress("train", len(outcome.losses), steps)
        outcome.epoch_seconds.append(time.perf_counter() - began)
        outcome.wait_seconds.append(waited)
    evaluate(model, plan, topology, rows, outcome, progress)
    return outcome


def evaluate(
    model: Any, plan: TrainingPlan, topology: dict[str, NDArray[Any]], rows: Rows, outcome: Outcome,
    progress: Callable[[str, int, int], None],
) -> None:  # fmt: skip
    """Measure a model's accuracies into ``outcome``, with neighbours sampled from the whole graph."""
    import torch

    labels = torch.from_numpy(topology["labels"])
    began = time.perf_counter()
    for split, count in (("val", plan.val_count), ("test", plan.test_count)):
        # A split may be sorted (by year, by class): a part of it must be drawn, not cut off.
        drawn = np.random.default_rng(plan.seed).permutation(topology[f"{split}_idx"])[:count]
        loader = _loader(plan, topology, drawn, shuffle=False)
        loader.node_sampler.set_epoch(_EVALUATION_EPOCH)
        setattr(outcome, f"{split}_accuracy", _accuracy(model, loader, rows, labels, outcome))
        progress(f"evaluate {split}", 1, 1)
    outcome.evaluation_seconds = time.perf_counter() - began


def train_mega(
    plan: TrainingPlan, labels: NDArray[Any], loader: Any, progress: Callable[[str, int, int], None]
) -> tuple[Any, MegaOutcome]:
    """Train ``plan.epochs`` epochs on what ``loader`` draws from mega-batches; returns the model and what was
    measured so far.

    The model, its first weights and the optimiser are those of :func:`train`.
    """
    import torch

    _fix_everything(plan.seed)
    model = _sage(plan)
    optimiser = torch.optim.Adam(model.parameters(), lr=plan.learning_rate)
    target = torch.from_numpy(labels)
    outcome, steps = MegaOutcome(), loader.sets.steps
    for epoch in range(plan.epochs):
        began, before, loaded_bytes = time.perf_counter(), loader.report(), loader.loaded_bytes
        for batch in loader:
            data = batch.pyg()
            optimiser.zero_grad()
            logits = model(data.x, data)
            loss = torch.nn.functional.cross_entropy(logits, target[data.n_id[: data.batch_size]])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            outcome.losses.append(float(loss.item()).hex())
            outcome.rows += len(data.x)
            # How many mini-batches mega-batches have is seen as they come.
            progress("train", epoch * steps + loader.state_dict()["next"], plan.epochs * steps)
        progress("train", (epoch + 1) * steps, plan.epochs * steps)
        outcome.epoch_seconds.append(time.perf_counter() - began)
        outcome.note_epoch(before, loader.report())
        outcome.read_bytes.append(loader.loaded_bytes - loaded_bytes)
    return model, outcome


def mlp_accuracy(
    plan: TrainingPlan, topology: dict[str, NDArray[Any]], features: NDArray[np.float32]
) -> float:
    """Test accuracy of a two-layer perceptron that sees a node's own row alone, after as many epochs at
    least.

    Where the labels need the neighbours it stays far below GraphSAGE. From memory: it takes every training
    row at once.
    """
    import torch

    _fix_everything(plan.seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(plan.feature_count, plan.hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(plan.hidden, plan.class_count),
    )
    optimiser = torch.optim.Adam(model.parameters(), lr=plan.learning_rate, weight_decay=1e-4)
    table, labels = torch.from_numpy(features), torch.from_numpy(topology["labels"])
    train_ids = torch.from_numpy(topology["train_idx"])
    for _ in range(max(4, plan.epochs)):
        for ids in torch.split(train_ids[torch.randperm(len(train_ids))], 256):
            optimiser.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(table[ids]), labels[ids])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    drawn = np.random.default_rng(plan.seed).permutation(topology["test_idx"])[: plan.test_count]
    ids = torch.from_numpy(drawn)
    with torch.no_grad():
        found = torch.cat([model(table[part]).argmax(1) for part in torch.split(ids, 1024)])
    right = int((found == labels[ids]).sum())
    return right / max(1, len(ids))


def _fix_everything(seed: int) -> None:
    import torch

    torch.set_num_threads(_THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)


def _sage(plan: TrainingPlan) -> Any:
    """Three SAGEConv layers (mean); each computes only what the layers above it need."""
    import torch
    from torch_geometric.nn import SAGEConv

    class GraphSage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [plan.feature_count] + [plan.hidden] * (len(plan.fanouts) - 1) + [plan.class_count]
            self.layers = torch.nn.ModuleList(SAGEConv(*pair, aggr="mean") for pair in pairwise(widths))

        def forward(self, x: torch.Tensor, batch: Any) -> torch.Tensor:
            hops = len(plan.fanouts)
            for depth, layer in enumerate(self.layers):
                # Nodes and edges are grouped by hop, so what this layer needs is a beginning of both.
                targets = sum(batch.num_sampled_nodes[: hops - depth])
                edges = batch.edge_index[:, : sum(batch.num_sampled_edges[: hops - depth])]
                x = layer((x, x[:targets]), edges)
                if depth + 1 < hops:
                    x = x.relu()
            return x

    return GraphSage()


def _loader(plan: TrainingPlan, topology: dict[str, NDArray[Any]], seeds: NDArray[Any], shuffle: bool) -> Any:
    """PyG's NodeLoader over featstore's sampler; it delivers topology, the rows are asked for by id."""
    import torch
    from torch_geometric.loader import NodeLoader

    from featstore.adapters.pyg import FeatstoreFeatures, FeatstoreGraph, FeatstoreSampler
    from featstore.sampling.neighbors import NeighborSampler

    indptr, indices = topology["indptr"], topology["indices"]
    return NodeLoader(
        (FeatstoreFeatures(None), FeatstoreGraph(indptr, indices)),
        FeatstoreSampler(NeighborSampler(indptr, indices, plan.fanouts, plan.seed)),
        input_nodes=torch.from_numpy(seeds),
        batch_size=plan.batch_size,
        shuffle=shuffle,
        generator=torch.Generator().manual_seed(plan.seed),
    )


def _with_rows(loader: Any, rows: Rows) -> Iterator[tuple[Any, Any, float]]:
    """(mini-batch, rows, seconds waited): the next mini-batch's rows are asked for before this one is handed
    out."""
    batches = iter(loader)
    batch = next(batches, None)
    ticket = None if batch is None else rows.submit(batch.n_id)
    while batch is not None:
        began = time.perf_counter()
        x = rows.result(ticket)
        wait = time.perf_counter() - began
        following = next(batches, None)
        ticket = None if following is None else rows.submit(following.n_id)
        yield batch, x, wait
        batch = following
        del x


def _note_rows(outcome: Outcome, x: Any) -> None:
    from featstore.base.checksum import crc_pages, digest_of_checksums

    outcome.rows += len(x)
    data = x.numpy().reshape(-1).view(np.uint8)
    outcome.digests.append(digest_of_checksums(crc_pages(data))[:16])


def _accuracy(model: Any, loader: Any, rows: Rows, labels: Any, outcome: Outcome) -> float:
    import torch

    right = total = 0
    with torch.no_grad():
        for batch, x, _ in _with_rows(loader, rows):
            found = model(x, batch).argmax(1)
            right += int((found == labels[batch.n_id[: batch.batch_size]]).sum())
            total += batch.batch_size
            _note_rows(outcome, x)
    return right / max(1, total)
