"""Train on several hosts, each with a part of the rows on its own disk, with DistributedDataParallel. Here
two processes of one machine stand for two hosts; runs in seconds.

On real hosts: split the store once, copy ``topology`` and ``host-N`` to host N, and on each host start

    torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py DIRECTORY
"""

import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import featstore

HOSTS, NODES, WIDTH, CLASSES, BATCH = 2, 6_000, 32, 4, 250


class Sage(nn.Module):
    """One layer of GraphSAGE over what was sampled, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32)
        self.out = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, seeds: int) -> Tensor:
        source, target = edge_index
        total = torch.zeros_like(x).index_add(0, target, x[source])
        count = torch.zeros(len(x)).index_add(0, target, torch.ones(len(target))).clamp(min=1)
        return self.out(torch.relu(self.own(x) + self.others(total / count[:, None])))[:seeds]


def train(parts: Path) -> None:
    """What every rank does; ``torch.distributed`` is initialised."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(Sage())
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    # all ranks open it at the same time; a host serves the others until all have closed it
    with (
        featstore.open_split(parts, memory="32MiB", timeout_seconds=60) as store,
        store.loader(
            seeds="train", fanouts=(10,), batch_size=BATCH, memory="64MiB", attach="label", tensors=True
        ) as loader,
    ):
        for epoch in range(3):
            right = torch.zeros(2)
            for batch in loader:  # seeds that this host owns, as many steps on every rank
                y = batch.label[: batch.batch_size]
                out = model(batch.x, torch.as_tensor(batch.edge_index), batch.batch_size)
                loss = nn.functional.cross_entropy(out, y)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                right += torch.stack([(out.argmax(dim=1) == y).sum(), torch.tensor(len(y))])
            dist.all_reduce(right)
            if dist.get_rank() == 0:
                rows = loader.report().remote_rows
                print(f"epoch {epoch}: accuracy {right[0] / right[1]:.3f}, {rows:,} rows of other hosts")


def be_host(rank: int, folder: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all hosts are this machine
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=HOSTS)
    train(folder / "parts")
    dist.destroy_process_group()


def main(folder: Path) -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, NODES)
    of_class = [np.flatnonzero(labels == k) for k in range(CLASSES)]
    target = rng.integers(0, NODES, 8 * NODES)
    source = np.array([rng.choice(of_class[labels[t]]) for t in target])  # most friends are alike
    source[::10] = rng.integers(0, NODES, len(source[::10]))
    features = rng.standard_normal((NODES, WIDTH)) + 0.5 * rng.standard_normal((CLASSES, WIDTH))[labels]
    arrays = {"label": labels, "train": np.arange(0, NODES, 2)}
    with featstore.pack(
        folder / "toy.fs", features.astype(np.float32), graph=np.stack([source, target]), arrays=arrays,
        memory="256MiB",
    ) as store:  # fmt: skip
        featstore.split(store, HOSTS, folder / "parts", train="train")
    torch.multiprocessing.spawn(be_host, (folder,), nprocs=HOSTS)


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun started it
        dist.init_process_group()
        train(Path(sys.argv[1]))
        dist.destroy_process_group()
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
