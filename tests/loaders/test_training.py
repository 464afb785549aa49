"""A training loop that does not change: losses as with rows in memory, workers or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.sampling.neighbors import NeighborSampler

torch = pytest.importorskip("torch")

NODES, WIDTH, CLASSES = 500, 12, 4
RNG = np.random.default_rng(0)
FEATURES = RNG.standard_normal((NODES, WIDTH)).astype(np.float32)
LABELS, TRAIN = RNG.integers(0, CLASSES, NODES), np.arange(0, NODES, 3)
INDEX = RNG.integers(0, NODES, (2, 3000))
SAMPLED: dict[str, Any] = {"seeds": TRAIN, "fanouts": (4, 3), "batch_size": 40, "seed": 5}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with featstore.pack(
        tmp_path_factory.mktemp("training") / "s", FEATURES, graph=INDEX, topology=True, order="ldg",
        partitions=5, arrays={"label": LABELS},
    ) as made:  # fmt: skip
        yield made


class Mean(torch.nn.Module):
    """One layer of GraphSAGE with mean aggregation, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.own, self.others = torch.nn.Linear(WIDTH, 8), torch.nn.Linear(WIDTH, 8)
        self.out = torch.nn.Linear(8, CLASSES)

    def forward(self, x: Any, row: Any, col: Any) -> Any:
        total = torch.zeros_like(x).index_add_(0, col, x[row])
        count = torch.zeros(len(x)).index_add_(0, col, torch.ones(len(col))).clamp(min=1)
        return self.out(torch.relu(self.own(x) + self.others(total / count[:, None])))


def train(batches: Callable[[int], Any], epochs: int) -> list[float]:
    """The loss of every step."""
    model = Mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for epoch in range(epochs):
        for x, row, col, label, size in batches(epoch):
            loss = torch.nn.functional.cross_entropy(model(x, row, col)[:size], label[:size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


def in_memory(store: Any, repeated: bool, world_size: int) -> Callable[[int], Iterator[Any]]:
    """The same mini-batches, with rows of an array."""
    from featstore.sampling.batches import RankedBatches, open_sampler

    sampled = RankedBatches(
        open_sampler(store, SAMPLED["fanouts"], seed=SAMPLED["seed"]), TRAIN, SAMPLED["batch_size"],
        ranks=[world_size - 1], world_size=world_size,
    )  # fmt: skip

    def batches(epoch: int) -> Iterator[Any]:
        sampled.set_epoch(0 if repeated else epoch)
        for index in range(len(sampled)):
            one = sampled[index]
            yield (
                torch.from_numpy(FEATURES[one.node]), torch.from_numpy(one.row), torch.from_numpy(one.col),
                torch.from_numpy(LABELS[one.node]), one.num_sampled_nodes[0],
            )  # fmt: skip

    return batches


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("mode", ["online", "compiled", "rolling"])
def test_losses_are_bit_for_bit_those_of_memory(store: Any, mode: str, world_size: int) -> None:
    options = SAMPLED | {"rank": world_size - 1, "world_size": world_size, "memory": "64MiB"}
    with store.loader(mode=mode, tensors=True, attach="label", **options) as loader:

        def batches(_: int) -> Iterator[Any]:
            for batch in loader:
                row, col = batch.edge_index
                yield batch.x, row, col, batch.label, batch.batch_size

        found = train(batches, 3)
    expected = train(in_memory(store, mode == "compiled", world_size), 3)
    assert len(found) == 3 * len(loader)
    assert found == expected


@pytest.mark.parametrize(
    ("mode", "context"),
    [
        ("online", "fork"),
        ("rolling", "fork"),
        ("compiled", "fork"),
        pytest.param("online", "spawn", marks=pytest.mark.thorough),
    ],
)
def test_mini_batches_of_workers(
    store: Any, mode: str, context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of no workers, in the same order; and the workers end well."""
    workers_of, start = [], BaseProcess.start
    monkeypatch.setattr(BaseProcess, "start", lambda self: (workers_of.append(self), start(self))[1])
    loader_module = pytest.importorskip("torch_geometric.loader")
    from torch_geometric.data import Data

    from featstore.adapters.pyg import FeatstoreSampler

    graph = Data(edge_index=torch.from_numpy(INDEX), num_nodes=NODES)

    def sampled(workers: int) -> Any:
        sampler = FeatstoreSampler(NeighborSampler(*store.graphs["features"].csc(), (4, 3), 5))
        how = {"num_workers": workers, "multiprocessing_context": context} if workers else {}
        return loader_module.NodeLoader(
            graph, node_sampler=sampler, input_nodes=torch.from_numpy(TRAIN), batch_size=60, **how
        )

    found = []
    for workers in (0, 2):
        with store.loader(sampled(workers), mode=mode, memory="64MiB", name=None) as loader:
            epochs = []
            for _ in range(1 if context == "spawn" else 2):
                for batch in loader:
                    assert torch.equal(batch.x, torch.from_numpy(FEATURES)[batch.n_id])
                    epochs.append((batch.n_id.tolist(), batch.edge_index.tolist()))
            found.append(epochs)
    assert found[0] == found[1]
    assert len(workers_of) >= 2
    for worker in workers_of:
        worker.join(20)
        assert worker.exitcode == 0
