"""What hosts do that have an accelerator: rows of others come over gloo and go on to the device, whatever the
group of the run is."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import featstore
from featstore.loaders.options import MODES

OPTIONS: dict[str, Any] = {
    "seeds": "train",
    "fanouts": (4, 3),
    "batch_size": 30,
    "memory": "48MiB",
    "attach": "label",
    "tensors": True,
}


def be_device_host(rank: int, hosts: int, folder: str, name: str, backend: str, device: str) -> None:
    """Train in every mode on ``device``, with gradients that go over gloo where hosts share it, else over the
    run's own group; write down the seeds and losses of each."""
    os.chdir(folder)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/{name}.meeting", rank=rank, world_size=hosts,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    gradients = dist.new_group(backend="gloo") if hosts > 1 else None  # nccl takes a device once
    features, told = np.load("features.npy"), dict[str, Any]()
    kept = {"halo": "20KiB"}, {"halo": featstore.MassiveGNN(0.25, delta=2)}, {"device_memory": "40KiB"}
    given: list[dict[str, Any]] = [{"mode": mode} for mode in MODES]
    with featstore.open_split(f"parts{hosts}", memory="16MiB", timeout_seconds=30) as store:
        for more in [*given, *({"mode": "online"} | one for one in kept)]:
            if more["mode"] == "partitions":
                more |= {"resident": 4, "hubs": 0}
            told[str(more)] = train(store, features, device, gradients, more)
    Path(f"{name}.told.{rank}").write_text(json.dumps(told))
    dist.destroy_process_group()


def train(store: Any, features: Any, device: str, gradients: Any, more: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(features.shape[1], 5).to(device), process_group=gradients
    )
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    seeds: list[int] = []
    losses: list[float] = []
    with store.loader(device=device, **OPTIONS, **more) as loader:
        for _ in range(2):
            for batch in loader:
                assert batch.x.device.type == batch.label.device.type == torch.device(device).type
                own = batch.n_id[: batch.batch_size]
                loss = torch.nn.functional.cross_entropy(
                    model(batch.x[: len(own)]), batch.label[: len(own)].long()
                )
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                assert batch.x.cpu().numpy().tobytes() == features[batch.n_id].tobytes()
                np.testing.assert_array_equal(batch.label.cpu().numpy(), batch.n_id % 5)
                np.testing.assert_array_equal(
                    batch.edge_index.cpu().numpy(), np.stack([batch.row, batch.col])
                )
                seeds.extend(own.tolist())
                losses.append(float(loss.detach()))
        remote = loader.report().remote_rows
    weights = [one.detach().cpu().tolist() for one in model.parameters()]
    return {"seeds": seeds, "losses": losses, "remote": remote, "weights": weights}
