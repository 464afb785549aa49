"""Train GraphSAGE with plain PyTorch and a store: sample, prefetch the next batch's rows, compute. Runs in
seconds."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import featstore
from featstore.sampling.neighbors import NeighborSampler, SampledSubgraph

NODES, WIDTH, CLASSES, DEGREE, BATCH, FANOUTS = 10_000, 32, 4, 8, 500, (5, 3)


def make_graph(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """CSC arrays indptr and indices (sources of the edges into each node), features, labels: noise that
    neighbours average out."""
    labels = np.arange(NODES) % CLASSES
    indices = (rng.integers(0, NODES // CLASSES, (NODES, DEGREE)) * CLASSES + labels[:, None]).ravel()
    features = (
        rng.standard_normal((NODES, WIDTH), np.float32)
        + 0.3 * rng.standard_normal((CLASSES, WIDTH), np.float32)[labels]
    )
    return np.arange(0, NODES * DEGREE + 1, DEGREE), indices, features, labels


class SageLayer(nn.Module):
    """h'[v] = W h[v] + U mean(h[u] of the sampled neighbours u). Edges go from ``row`` (the neighbour) to
    ``col``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own, self.neighbours = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
        mean = (
            torch.zeros_like(h).index_add_(0, col, h[row])
            / torch.bincount(col, minlength=len(h)).clamp(min=1)[:, None]
        )
        return self.own(h) + self.neighbours(mean)


def batches(
    reader: featstore.Reader, sampler: NeighborSampler, nodes: np.ndarray, epoch: int
) -> Iterator[tuple[SampledSubgraph, Tensor]]:
    """Each mini-batch with its rows. While one is computed on, the next one's rows are on their way."""
    ready = None
    for number, seeds in enumerate(np.array_split(nodes, max(1, len(nodes) // BATCH))):
        batch = sampler.sample(
            seeds, number, epoch=epoch
        )  # depends on seed, epoch and number alone: runs can be repeated
        request = reader.submit(torch.from_numpy(batch.node))  # returns at once; tensor ids give a tensor
        if ready is not None:
            yield ready[0], ready[1].result()  # waits for what is not there yet
        ready = batch, request
    yield ready[0], ready[1].result()


def main(folder: Path) -> float:
    torch.manual_seed(0)
    indptr, indices, features, labels = make_graph(np.random.default_rng(0))
    # Once: pack. The graph decides the order on disk and which nodes a static cache should take.
    featstore.pack(
        folder / "toy.fs", features, graph=(indptr, indices), arrays={"labels": labels}, memory="256MiB"
    ).close()
    del features  # from here on they live on disk

    layers = nn.ModuleList([SageLayer(WIDTH, 32), SageLayer(32, CLASSES)])
    optimiser = torch.optim.Adam(layers.parameters(), lr=0.01)
    # A budget smaller than the features (1.2 MiB), so that there is something to read.
    with featstore.open(folder / "toy.fs") as store, store.reader(memory="1MiB") as reader:
        target, sampler = torch.from_numpy(store.arrays["labels"]), NeighborSampler(indptr, indices, FANOUTS)
        for epoch in range(2):
            right = 0
            for batch, h in batches(reader, sampler, torch.randperm(NODES).numpy(), epoch):
                row, col = torch.from_numpy(batch.row), torch.from_numpy(batch.col)
                h = layers[1](layers[0](h, row, col).relu(), row, col)
                seeds = batch.node[: batch.num_sampled_nodes[0]]  # they stand first in batch.node
                h, y = h[: len(seeds)], target[seeds]
                loss = nn.functional.cross_entropy(h, y)
                loss.backward()
                optimiser.step()
                optimiser.zero_grad()
                right += int((h.argmax(dim=1) == y).sum())
            print(
                f"epoch {epoch}: loss {loss.item():.3f}, accuracy {right / NODES:.3f}, "
                f"{reader.stats().reads:,} reads so far"
            )
    return right / NODES


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
