"""Train on the ranks of one host with DistributedDataParallel, all reading through one buffer that rank 0
owns. Runs in seconds."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import featstore
from featstore.shared.client import BufferClient

RANKS, NODES, WIDTH, CLASSES, BATCH = 2, 10_000, 32, 4, 250


def one_buffer(opened: ExitStack, path: Path) -> BufferClient:
    """This rank's client of the buffer of its host. On several hosts: local rank 0 owns, and ``group`` is the
    ranks of a host."""
    box: list[BufferClient | None] = [None]
    if dist.get_rank() == 0:  # reader, cache and policy are in this process alone: one copy for all ranks
        store = opened.enter_context(featstore.open(path))
        box = [opened.enter_context(featstore.SharedBuffer(store, memory="8MiB")).client()]
    dist.broadcast_object_list(box, src=0, group=None)  # a client is little more than an address
    return opened.enter_context(box[0])


def batches(client: BufferClient, nodes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each mini-batch's nodes and rows. While one is computed on, the next one's rows are on their way."""
    ready = None
    for batch in nodes.split(BATCH):
        request = client.submit(batch)
        if ready is not None:
            yield ready[0], ready[1].result()
        ready = batch, request
    yield ready[0], ready[1].result()


def be_rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    )
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    with ExitStack() as opened:
        client = one_buffer(opened, folder / "toy.fs")
        for epoch in range(2):
            right = torch.zeros(1)
            # the same in all ranks
            nodes = torch.randperm(NODES, generator=torch.Generator().manual_seed(epoch))
            for batch, x in batches(client, nodes[rank::RANKS]):
                out, y = model(x), batch % CLASSES
                loss = nn.functional.cross_entropy(out, y)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                right += (out.argmax(dim=1) == y).sum()
            # and no rank goes on, nor does the owner close its buffer, before all have read
            dist.all_reduce(right)
            if rank == 0:
                read = client.stats().misses
                print(
                    f"epoch {epoch}: accuracy {right.item() / NODES:.3f}, {read:,} rows read from disk so far"
                )
    dist.destroy_process_group()


def main(folder: Path) -> None:
    labels = np.arange(NODES) % CLASSES
    rng = np.random.default_rng(0)
    features = rng.standard_normal((NODES, WIDTH), np.float32) + rng.standard_normal((CLASSES, WIDTH))[labels]
    featstore.pack(folder / "toy.fs", features.astype(np.float32), memory="256MiB").close()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host
    torch.multiprocessing.spawn(be_rank, (folder,), nprocs=RANKS)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
