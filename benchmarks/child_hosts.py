"""One host of ``hosts.py``, in a process of its own: trains, and says what it took. Not to be run by
itself."""

from __future__ import annotations

import json
import os
import queue
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import ROOT  # noqa: F401  (makes featstore importable)
from sage import Sage

import featstore
import featstore.hosts.split_store
from featstore.hosts.places import HostPlace, open_wire
from featstore.hosts.wire import GlooWire


class SlowWire:
    """A wire whose messages take ``latency`` seconds more, and share ``bytes_per_second`` out of this
    host."""

    def __init__(self, wire: GlooWire, latency: float, bytes_per_second: float) -> None:
        self._wire, self._latency, self._rate = wire, latency, bytes_per_second
        self.host, self.hosts = wire.host, wire.hosts
        self.rank_of, self.post, self.take, self.close = wire.rank_of, wire.post, wire.take, wire.close
        self._lock, self._free_at = threading.Lock(), 0.0
        self._queues: dict[int, queue.SimpleQueue[Any]] = {}

    def send(self, to: int, data: np.ndarray) -> None:
        with self._lock:
            begin = max(time.monotonic(), self._free_at)
            self._free_at = begin + len(data) / self._rate
            due = self._free_at + self._latency
            if to not in self._queues:
                self._queues[to] = queue.SimpleQueue()
                threading.Thread(target=self._deliver, args=(to,), daemon=True).start()
        self._queues[to].put((due, data.copy()))
        time.sleep(max(0.0, due - self._latency - time.monotonic()))  # as a card that is busy

    def _deliver(self, to: int) -> None:
        while True:
            due, data = self._queues[to].get()
            time.sleep(max(0.0, due - time.monotonic()))
            self._wire.send(to, data)


def mean(h: torch.Tensor, row: torch.Tensor, col: torch.Tensor, targets: int) -> torch.Tensor:
    total = torch.zeros(targets, h.shape[1]).index_add_(0, col, h[row])
    return total / torch.bincount(col, minlength=targets).clamp(min=1)[:, None]


def exchange(store: featstore.SplitStore, rows: int, rounds: int) -> list[dict[str, float]]:
    """Of as many rows from the other of two hosts, both at once, and of the same bytes by a bare collective
    of their own process group, in turns: seconds, and those of this host's core. The same of what the rows
    take beside the network: they are gathered there, and put in their places here."""
    group = dist.new_group(backend="gloo")
    table = store.table("features")
    others = np.flatnonzero(store.owners["features"].hosts != store.place.host)
    sent = torch.zeros(rows * table.row_bytes // 4)
    come = torch.zeros_like(sent)
    split = [0, len(sent)] if store.place.host == 0 else [len(sent), 0]
    rng = np.random.default_rng(store.place.host)
    held = torch.ones(len(store.owners["features"].hosts) - len(others), *table.row_shape)
    message, told = torch.ones(rows, *table.row_shape), []
    with store.reader(memory="64MiB", engine="mmap") as reader:
        for _ in range(rounds):
            ids, places = rng.choice(others, rows, replace=False), torch.as_tensor(rng.permutation(rows))
            asked, seconds = torch.as_tensor(rng.choice(len(held), rows, replace=False)), {}

            def bare() -> None:
                dist.all_to_all_single(come, sent, split, split, group=group)

            def gather(asked: torch.Tensor = asked) -> None:
                torch.index_select(held, 0, asked, out=message)

            def put(places: torch.Tensor = places) -> None:
                torch.empty_like(message).index_copy_(0, places, message)

            def ours(ids: np.ndarray = ids) -> None:
                reader.read(ids)

            for name, step in {"ours": ours, "bare": bare, "gather": gather, "put": put}.items():
                dist.barrier(group)
                begin, cpu = time.perf_counter(), time.process_time()
                step()
                seconds[name] = time.perf_counter() - begin
                seconds[f"{name}, cpu"] = time.process_time() - cpu
            told.append(seconds)
    return told


def main(said: dict[str, Any]) -> dict[str, Any]:
    slow = said["slow"]
    if slow is not None:

        def slowed(place: HostPlace, timeout: float) -> SlowWire:
            return SlowWire(open_wire(place, timeout), *slow)

        featstore.hosts.split_store.open_wire = slowed  # type: ignore[assignment]
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{said['meeting']}", rank=said["rank"], world_size=said["hosts"]
    )
    if said.get("exchange"):
        with featstore.open_split(
            said["parts"], memory=said["serving"], timeout_seconds=120, engine="mmap"
        ) as store:
            told = exchange(store, said["exchange"], said["rounds"])
        dist.destroy_process_group()
        return {"exchange": told}
    begin = time.perf_counter()
    halo = said["halo"]
    if isinstance(halo, dict):
        halo = featstore.MassiveGNN(**halo)
    torch.manual_seed(0)
    with (
        featstore.open_split(
            said["parts"], memory=said["serving"], timeout_seconds=120, engine="mmap"
        ) as store,
        store.loader(
            seeds="train", fanouts=said["fanouts"], batch_size=said["batch"], memory=said["memory"],
            halo=halo, policy="fifo", attach="label", tensors=True, seed=0, engine="mmap",
        ) as loader,
    ):  # fmt: skip
        model = Sage(store.table("features").row_shape[0], 64, mean)
        model = torch.nn.parallel.DistributedDataParallel(model) if said["hosts"] > 1 else model
        optimiser = torch.optim.Adam(model.parameters(), lr=0.003)
        epochs, waits, rows, lost = [], [], [], 0.0
        setup = 0.0
        for _ in range(said["epochs"]):
            before, started = loader.report(), time.perf_counter()
            for batch in loader:
                setup = setup or time.perf_counter() - begin
                out = model(
                    batch.x, torch.as_tensor(batch.row).long(), torch.as_tensor(batch.col).long(),
                    batch.num_sampled_nodes, batch.num_sampled_edges,
                )  # fmt: skip
                loss = torch.nn.functional.cross_entropy(out, batch.label[: batch.batch_size].long())
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                lost = float(loss.detach())
            after = loader.report()
            epochs.append(time.perf_counter() - started)
            waits.append(after.seconds.get("wait", 0.0) - before.seconds.get("wait", 0.0))
            rows.append(after.remote_rows - before.remote_rows)
        stages = dict(loader.report().seconds)
    dist.destroy_process_group()
    return {
        "epochs": epochs, "waits": waits, "rows": rows, "loss": lost, "setup": setup, "stages": stages,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    told = main(asked)
    Path(asked["told"]).write_text(json.dumps(told))
