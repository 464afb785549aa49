"""Train PyTorch Geometric's GraphSAGE on several hosts in its usual loop: NeighborLoader with a split store
in place of the data, and DistributedDataParallel. Here two processes of one machine stand for two hosts;
runs in seconds. On real hosts start it by torchrun with the directory of the parts: train_hosts_torch.py."""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import featstore
from featstore.adapters.pyg import NeighborLoader

HOSTS, NODES, WIDTH, CLASSES, DEGREE = 2, 6_000, 32, 4, 8


def make_data() -> Data:
    """Neighbours are of the same class; features are noise that they average out."""
    y = torch.arange(NODES) % CLASSES
    target = torch.arange(NODES).repeat_interleave(DEGREE)
    source = torch.randint(0, NODES // CLASSES, (len(target),)) * CLASSES + y[target]
    x = torch.randn(NODES, WIDTH) + 0.3 * torch.randn(CLASSES, WIDTH)[y]
    train_mask = torch.rand(NODES) < 0.5
    return Data(x=x, y=y, train_mask=train_mask, edge_index=torch.stack([source, target]))


def train(parts: Path) -> None:
    """What every rank does; ``torch.distributed`` is initialised."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DistributedDataParallel(GraphSAGE(WIDTH, hidden_channels=32, num_layers=2, out_channels=CLASSES))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    # all ranks open it at the same time; a host serves the others until all have closed it
    with (
        featstore.open_split(parts, memory="32MiB", timeout_seconds=60) as store,
        NeighborLoader(
            store, num_neighbors=[5, 3], input_nodes="train_mask", batch_size=250, shuffle=True,
            memory="64MiB", halo="1MiB",
        ) as loader,
    ):  # fmt: skip
        for epoch in range(3):
            right = torch.zeros(2)
            for batch in loader:  # seeds that this host owns, as many steps on every rank
                y = batch.y[: batch.batch_size]
                out = model(batch.x, batch.edge_index)[: batch.batch_size]
                loss = torch.nn.functional.cross_entropy(out, y)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                right += torch.stack([(out.argmax(dim=1) == y).sum(), torch.tensor(len(y))])
            dist.all_reduce(right)
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: accuracy {right[0] / right[1]:.3f}")


def be_host(rank: int, folder: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all hosts are this machine
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=HOSTS)
    train(folder / "parts")
    dist.destroy_process_group()


def main(folder: Path) -> None:
    torch.manual_seed(0)
    with featstore.pack(folder / "toy.fs", make_data(), memory="256MiB") as store:
        featstore.split(store, HOSTS, folder / "parts", train="train_mask")
    torch.multiprocessing.spawn(be_host, (folder,), nprocs=HOSTS)


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun started it
        dist.init_process_group()
        train(Path(sys.argv[1]))
        dist.destroy_process_group()
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
