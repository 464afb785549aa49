"""Train PyTorch Geometric's GraphSAGE by mega-batches: partitions are read whole, nothing is looked up. Runs
in seconds."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch_geometric.nn import GraphSAGE

import featstore

NODES, WIDTH, CLASSES, DEGREE, CLUSTER = 20_000, 32, 4, 8, 100


def make_graph(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """CSC arrays indptr and indices, features, labels: clusters of a class each; noise that neighbours
    average out."""
    labels = rng.integers(0, CLASSES, NODES // CLUSTER).repeat(CLUSTER)
    node = np.arange(NODES).repeat(DEGREE)
    indices = node // CLUSTER * CLUSTER + rng.integers(0, CLUSTER, len(node))
    indices[::8] = rng.integers(0, NODES, len(node) // 8)  # an eighth of the edges leads anywhere
    features = (
        rng.standard_normal((NODES, WIDTH), np.float32)
        + 0.3 * rng.standard_normal((CLASSES, WIDTH), np.float32)[labels]
    )
    return np.arange(0, NODES * DEGREE + 1, DEGREE), indices, features, labels


def main(folder: Path) -> float:
    torch.manual_seed(0)
    indptr, indices, features, labels = make_graph(np.random.default_rng(0))
    # Once: pack. The order puts neighbours into one partition, each of which lies on disk in one piece; the
    # graph is stored along, and the neighbours of the hubs, the nodes that most lists name, a second time
    # side by side.
    featstore.pack(
        folder / "toy.fs",
        features,
        graph=(indptr, indices),
        order="ldg",
        partitions=100,
        hubs=0.01,
        memory="256MiB",
    ).close()
    del features, indptr, indices  # from here on features and graph live on disk

    target = torch.from_numpy(labels)
    with (
        featstore.open(folder / "toy.fs") as store,
        # The budget says how many partitions are in memory at once; here they are few enough to be told.
        store.loader(
            mode="partitions", memory="64MiB", resident=25, seeds=np.arange(NODES), fanouts=[5, 3],
            batch_size=500, tensors=True,
        ) as loader,
    ):  # fmt: skip
        model = GraphSAGE(WIDTH, hidden_channels=32, num_layers=2, out_channels=CLASSES)
        optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
        for epoch in range(2):
            right = 0
            # From 4 collections of random partitions an epoch; while one is trained on, the next is loaded.
            for batch in loader:
                data = batch.pyg()  # x, edge_index, n_id, batch_size ...
                out = model(data.x, data.edge_index)[: data.batch_size]  # the seeds stand first
                y = target[data.n_id[: data.batch_size]]
                loss = torch.nn.functional.cross_entropy(out, y)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                right += int((out.argmax(dim=1) == y).sum())
            report = loader.report()
            print(
                f"epoch {epoch}: loss {loss.item():.3f}, accuracy {right / NODES:.3f}, {report.bytes_read:,} "
                f"bytes read so far, {report.kept_share:.0%} of the neighbours in memory"
            )
    return right / NODES


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
