"""Train GraphSAGE with PyTorch Geometric: its NodeLoader and SAGEConv, features in a store. Runs in
seconds."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import GraphSAGE

import featstore
from featstore.adapters.pyg import FeatstoreFeatures, FeatstoreGraph, FeatstoreSampler
from featstore.sampling.neighbors import NeighborSampler

NODES, WIDTH, CLASSES, DEGREE = 10_000, 32, 4, 8


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


def main(folder: Path) -> float:
    torch.manual_seed(0)
    indptr, indices, features, labels = make_graph(np.random.default_rng(0))
    # Once: pack. (A PyG Data object can be packed as it is: featstore.pack(path, data).)
    featstore.pack(folder / "toy.fs", features, graph=(indptr, indices), memory="256MiB").close()
    del features  # from here on they live on disk

    # A budget smaller than the features (1.2 MiB), so that there is something to read.
    with featstore.open(folder / "toy.fs") as store, store.reader(memory="1MiB") as reader:
        # PyG's "remote backend": who knows the features, who knows the graph, who samples. A store's table
        # "features" is the attribute x; small things, such as labels, are given as arrays and stay in memory.
        data = FeatstoreFeatures(reader, arrays={(None, "y"): labels}), FeatstoreGraph(indptr, indices)
        # The sampler takes the place of pyg-lib. Fan-outs go from the seeds outwards.
        sampler = FeatstoreSampler(NeighborSampler(indptr, indices, [5, 3]))
        loader = NodeLoader(
            data,
            node_sampler=sampler,
            input_nodes=torch.arange(NODES),
            batch_size=500,
            shuffle=True,
            # With num_workers > 0, workers sample and prefetch; this keeps the reading of rows in this
            # process, where one reader with one memory budget serves them all.
            filter_per_worker=False,
        )
        model = GraphSAGE(WIDTH, hidden_channels=32, num_layers=2, out_channels=CLASSES)
        optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
        for epoch in range(2):
            sampler.set_epoch(epoch)  # fresh neighbours for the same seeds
            right = 0
            for batch in loader:  # batch.x are rows of the store: one planned read for each mini-batch
                out = model(batch.x, batch.edge_index)[: batch.batch_size]  # the seeds stand first
                y = batch.y[: batch.batch_size]
                loss = torch.nn.functional.cross_entropy(out, y)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                right += int((out.argmax(dim=1) == y).sum())
            print(
                f"epoch {epoch}: loss {loss.item():.3f}, accuracy {right / NODES:.3f}, "
                f"{reader.stats().reads:,} reads so far"
            )
    return right / NODES


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
