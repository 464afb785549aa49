"""The same training loop under every mode of the one loader. Runs in seconds."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import featstore

NODES, DEGREE, WIDTH, CLASSES = 10_000, 10, 32, 4


def make_graph(rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """Edges [2, e], features and labels; most neighbours are of a node's own class."""
    labels = np.sort(rng.integers(0, CLASSES, NODES))
    near = (np.arange(NODES)[:, None] + rng.integers(-50, 50, (NODES, DEGREE))) % NODES
    edges = np.stack([near.ravel(), np.repeat(np.arange(NODES), DEGREE)])
    centres = rng.standard_normal((CLASSES, WIDTH))
    features = (centres[labels] + 2 * rng.standard_normal((NODES, WIDTH))).astype(np.float32)
    return edges, features, labels


class Sage(nn.Module):
    """Two layers of GraphSAGE with mean aggregation, without any library of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, CLASSES)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        row, col = edge_index
        for number, layer in enumerate(self.layers):
            total = torch.zeros_like(x).index_add_(0, col, x[row])
            mean = total / torch.bincount(col, minlength=len(x)).clamp(min=1)[:, None]
            x = layer(torch.cat([x, mean], dim=1))
            x = torch.relu(x) if number == 0 else x
        return x


def train(store: featstore.Store, mode: str) -> tuple[float, int]:
    """Accuracy in the last epoch, and bytes read from disk."""
    torch.manual_seed(0)
    model = Sage()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    labels = torch.from_numpy(store.arrays["labels"])
    with store.loader(
        seeds=np.arange(NODES),
        fanouts=(5, 3),
        batch_size=500,
        memory="32MiB",
        tensors=True,
        mode=mode,
    ) as loader:
        for _ in range(2):
            right = 0
            for batch in loader:
                out = model(batch.x, batch.edge_index)[: batch.batch_size]  # the seeds stand first
                y = labels[batch.n_id[: batch.batch_size]]
                loss = nn.functional.cross_entropy(out, y)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                right += int((out.argmax(dim=1) == y).sum())
        return right / NODES, loader.report().bytes_read


def main(folder: Path) -> None:
    edges, features, labels = make_graph(np.random.default_rng(0))
    arrays = {"labels": labels}
    options: dict[str, Any] = {"order": "ldg", "partitions": 100, "memory": "256MiB"}
    with featstore.pack(folder / "toy.fs", features, graph=edges, arrays=arrays, **options) as store:
        for mode in ("online", "compiled", "rolling", "partitions"):
            accuracy, read = train(store, mode)
            print(f"{mode}: accuracy {accuracy:.3f}, {read:,} bytes read")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
