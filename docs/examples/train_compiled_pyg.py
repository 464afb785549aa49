"""Train GraphSAGE with PyG on a compiled trace: sample first, lay out the rows for these mini-batches, then
train. Runs in seconds."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import GraphSAGE

import featstore
from featstore.adapters.pyg import FeatstoreSampler
from featstore.sampling.neighbors import NeighborSampler

NODES, WIDTH, CLASSES, DEGREE = 10_000, 32, 4, 8


def make_graph(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """CSC arrays indptr and indices (sources of the edges into each node), features, labels: noise that
    neighbours average out."""
    labels = np.arange(NODES) % CLASSES
    indices = (rng.integers(0, NODES // CLASSES, (NODES, DEGREE)) * CLASSES + labels[:, None]).ravel()
    noise = rng.standard_normal((NODES, WIDTH), np.float32)
    features = noise + 0.3 * rng.standard_normal((CLASSES, WIDTH), np.float32)[labels]
    return np.arange(0, NODES * DEGREE + 1, DEGREE), indices, features, labels


def main(folder: Path) -> float:
    torch.manual_seed(0)
    indptr, indices, features, labels = make_graph(np.random.default_rng(0))
    store = featstore.pack(folder / "toy.fs", features, graph=(indptr, indices), memory="256MiB")
    del features  # from here on they live on disk

    # Any loader of mini-batches will do, as long as it fetches no features: this one knows labels, and
    # samples.
    targets = np.repeat(np.arange(NODES), DEGREE)
    data = Data(
        edge_index=torch.from_numpy(np.stack([indices, targets])), y=torch.from_numpy(labels), num_nodes=NODES
    )
    sampler = FeatstoreSampler(NeighborSampler(indptr, indices, [5, 3]))

    def mini_batches(epoch: int) -> NodeLoader:
        torch.manual_seed(epoch)
        sampler.set_epoch(epoch)  # fresh neighbours for the same seeds
        return NodeLoader(
            data, node_sampler=sampler, input_nodes=torch.arange(NODES), batch_size=500, shuffle=True
        )

    model = GraphSAGE(WIDTH, hidden_channels=32, num_layers=2, out_channels=CLASSES)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    # The mini-batches of one epoch are sampled, compiled and packed; each epoch goes through them in that
    # order. With mode="rolling" each has fresh ones, packed while the one before trains.
    with store.loader(mini_batches, mode="compiled", memory="7MiB") as loader:
        for _ in range(2):
            right = 0
            for batch in loader:  # x: the rows of its nodes; everything else is PyG's own Data's
                out = model(batch.x, batch.edge_index)[: batch.batch_size]
                y = batch.y[: batch.batch_size]
                loss = torch.nn.functional.cross_entropy(out, y)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                right += int((out.argmax(dim=1) == y).sum())
        accuracy = right / NODES
        report = loader.report()
    store.close()
    print(f"second epoch: accuracy {accuracy:.3f}")
    print(f"rows from memory {report.row_bytes['hit']:,} bytes, packed {report.row_bytes['packed']:,} bytes")
    return accuracy


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
