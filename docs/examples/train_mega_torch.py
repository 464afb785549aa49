"""Train GraphSAGE with plain PyTorch by mega-batches: weights against the border, and resuming. Runs in
seconds."""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

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


class SageLayer(nn.Module):
    """h'[v] = W h[v] + U mean(weight h[u] of the sampled neighbours u). Edges go from ``row`` (the neighbour)
    to ``col``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own, self.neighbours = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, h: Tensor, row: Tensor, col: Tensor, weight: Tensor) -> Tensor:
        total = torch.zeros_like(h).index_add_(0, col, weight[:, None] * h[row])
        return self.own(h) + self.neighbours(
            total / torch.bincount(col, minlength=len(h)).clamp(min=1)[:, None]
        )


def main(folder: Path) -> float:
    torch.manual_seed(0)
    indptr, indices, features, labels = make_graph(np.random.default_rng(0))
    arrays = {"labels": labels, "train": np.arange(NODES)}
    options = {"order": "ldg", "partitions": 100, "hubs": 0.01, "memory": "256MiB"}
    featstore.pack(folder / "toy.fs", features, graph=(indptr, indices), arrays=arrays, **options).close()
    del features, indptr, indices  # from here on features and graph live on disk

    layers = nn.ModuleList([SageLayer(WIDTH, 32), SageLayer(32, CLASSES)])
    optimiser = torch.optim.Adam(layers.parameters(), lr=0.01)
    # With replaced=5 of 25, five new partitions come with each mega-batch and twenty stay.
    loading = {"mode": "partitions", "memory": "64MiB", "resident": 25, "replaced": 5}
    loading |= {"seeds": "train", "fanouts": [5, 3], "batch_size": 500, "weights": True, "tensors": True}
    with featstore.open(folder / "toy.fs") as store:
        target, state, read_bytes = torch.from_numpy(store.arrays["labels"]), None, 0
        for epoch in range(2):
            # As if the program had been stopped between the epochs, or after any mini-batch.
            with store.loader(**loading) as loader:
                if state is not None:
                    loader.load_state_dict(json.loads(state))
                right = 0
                for batch in loader:
                    # A neighbour in another partition is here only now and then, so it counts for more when
                    # it is.
                    edges = (
                        torch.from_numpy(batch.row),
                        torch.from_numpy(batch.col),
                        torch.from_numpy(batch.weight),
                    )
                    h = layers[1](layers[0](batch.x, *edges).relu(), *edges)[: batch.batch_size]
                    y = target[batch.n_id[: batch.batch_size]]  # the seeds stand first
                    loss = nn.functional.cross_entropy(h, y)
                    loss.backward()
                    optimiser.step()
                    optimiser.zero_grad()
                    right += int((h.argmax(dim=1) == y).sum())
                state, report = json.dumps(loader.state_dict()), loader.report()
            read_bytes += report.bytes_read
            print(
                f"epoch {epoch}: loss {loss.item():.3f}, accuracy {right / NODES:.3f}, {read_bytes:,} "
                f"bytes read so far, {report.kept_share:.0%} of the neighbours in memory"
            )
    return right / NODES


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
