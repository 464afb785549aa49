"""Train GraphSAGE with PyTorch Geometric in its usual loop: NeighborLoader with a store in place of the data.
Needs neither pyg-lib nor torch-sparse. Runs in seconds."""

import tempfile
from pathlib import Path

import torch
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import featstore
from featstore.adapters.pyg import NeighborLoader

NODES, WIDTH, CLASSES, DEGREE = 10_000, 32, 4, 8


def make_data() -> Data:
    """Neighbours are of the same class; features are noise that they average out."""
    y = torch.arange(NODES) % CLASSES
    target = torch.arange(NODES).repeat_interleave(DEGREE)
    source = torch.randint(0, NODES // CLASSES, (len(target),)) * CLASSES + y[target]
    x = torch.randn(NODES, WIDTH) + 0.3 * torch.randn(CLASSES, WIDTH)[y]
    train_mask = torch.rand(NODES) < 0.5
    return Data(x=x, y=y, train_mask=train_mask, edge_index=torch.stack([source, target]))


def main(folder: Path) -> float:
    torch.manual_seed(0)
    data = make_data()
    featstore.pack(folder / "toy.fs", data, memory="256MiB").close()  # once
    del data  # from here on x lives on disk

    with featstore.open(folder / "toy.fs") as store:
        common = {"num_neighbors": [5, 3], "batch_size": 500, "memory": "16MiB", "mode": "online"}
        loader = NeighborLoader(store, input_nodes="train_mask", shuffle=True, **common)
        model = GraphSAGE(WIDTH, hidden_channels=32, num_layers=2, out_channels=CLASSES)
        optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
        for epoch in range(2):
            total = 0.0
            for batch in loader:
                out = model(batch.x, batch.edge_index)[: batch.batch_size]
                loss = torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                total += float(loss.detach()) / len(loader)
            print(f"epoch {epoch}: loss {total:.3f}")
        loader.close()

        model.eval()
        right = tested = 0
        with (
            NeighborLoader(store, input_nodes=None, **common) as loader,
            torch.no_grad(),
        ):  # all nodes, in order
            for batch in loader:
                out = model(batch.x, batch.edge_index)[: batch.batch_size].argmax(1)
                other = ~batch.train_mask[: batch.batch_size]
                right += int((out == batch.y[: batch.batch_size])[other].sum())
                tested += int(other.sum())
    print(f"accuracy {right / tested:.3f} of {tested:,} nodes that were not trained on")
    return right / tested


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
