"""One host of ``hosts.py``, in a process of its own: trains, and says what it took. Not to be run by
itself."""

from __future__ import annotations

import json
import os
import queue
import resource
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import ROOT  # noqa: F401  (makes featstore importable)
from hosts_in_loop import InLoop
from sage import Sage

import featstore
from featstore.hosts import messages as ms
from featstore.hosts.asks import RowsAsk
from featstore.hosts.opening import Opening
from featstore.hosts.source import PeersSource, Serving
from featstore.hosts.wire import GlooWire


class SlowWire:
    """A wire whose messages take ``latency`` seconds more, and share ``bytes_per_second`` out of this
    host."""

    def __init__(self, wire: GlooWire, latency: float, bytes_per_second: float) -> None:
        self._wire, self._latency, self._rate = wire, latency, bytes_per_second
        self.host, self.hosts = wire.host, wire.hosts
        self.bounded = bytes_per_second < float("inf")
        self.rank_of, self.post, self.take, self.close = wire.rank_of, wire.post, wire.take, wire.close
        self._lock, self._free_at = threading.Lock(), 0.0
        self.sent_bytes = 0
        self._queues: dict[int, queue.SimpleQueue[Any]] = {}

    def send(self, to: int, data: np.ndarray) -> None:
        with self._lock:
            begin = max(time.monotonic(), self._free_at)
            self._free_at = begin + len(data) / self._rate
            self.sent_bytes += len(data)
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


_SERVE = "serve: rows are found, checked and gathered"
#: What one exchange of rows goes through, and the function whose time it is.
STAGES = {
    "ask: rows are found by host, and ids written": (PeersSource, "submit"),
    _SERVE: (Serving, "__call__"),
    "seal: a CRC-32C of what is sent": (ms, "seal"),
    "send: until gloo has taken it": (GlooWire, "send"),
    "check: the CRC-32C of what has come": (ms, "body_of"),
    "put: rows to their places": (RowsAsk, "_put"),
}


@contextmanager
def clocks() -> Iterator[dict[str, float]]:
    """Seconds that each of :data:`STAGES` takes meanwhile."""
    spent = dict.fromkeys(STAGES, 0.0)
    before = [(owner, name, getattr(owner, name)) for owner, name in STAGES.values()]

    def timed(stage: str, function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                spent[stage] += time.perf_counter() - begin

        def served(*arguments: Any) -> Any:
            begin = time.perf_counter()
            request, body_bytes = function(*arguments)

            def over(_: Any) -> None:
                spent[stage] += time.perf_counter() - begin

            request.add_done_callback(over)
            return request, body_bytes

        return served if stage == _SERVE else call

    for stage, (owner, name, function) in zip(STAGES, before, strict=True):
        setattr(owner, name, timed(stage, function))
    try:
        yield spent
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def exchange(store: featstore.SplitStore, rows: int, rounds: int) -> dict[str, Any]:
    """Of as many rows from the other of two hosts, both at once, and of the same bytes by a bare collective
    of their own process group, in turns: seconds, and those of this host's core. The same of what the rows
    take beside the network: they are gathered there, and put in their places here. Neither has to make memory
    for what comes. ``stages``: seconds of ours, of further rounds, as clocks take some."""
    group = dist.new_group(backend="gloo")
    table = store.table("features")
    others = np.flatnonzero(store.owners["features"].hosts != store.place.host)
    sent = torch.zeros(rows * table.row_bytes // 4)
    come = torch.zeros_like(sent)
    split = [0, len(sent)] if store.place.host == 0 else [len(sent), 0]
    rng = np.random.default_rng(store.place.host)
    held = torch.ones(len(store.owners["features"].hosts) - len(others), *table.row_shape)
    message, told = torch.ones(rows, *table.row_shape), []
    placed, taken = torch.ones_like(message), np.ones((rows, *table.row_shape), np.float32)
    stages: dict[str, list[float]] = {name: [] for name in STAGES}
    with store.reader(memory="64MiB", engine="mmap") as reader:
        for _ in range(rounds):
            ids, places = rng.choice(others, rows, replace=False), torch.as_tensor(rng.permutation(rows))
            asked, seconds = torch.as_tensor(rng.choice(len(held), rows, replace=False)), {}

            def bare() -> None:
                dist.all_to_all_single(come, sent, split, split, group=group)

            def gather(asked: torch.Tensor = asked) -> None:
                torch.index_select(held, 0, asked, out=message)

            def put(places: torch.Tensor = places) -> None:
                placed.index_copy_(0, places, message)

            def ours(ids: np.ndarray = ids) -> None:
                reader.read(ids, out=taken)

            for name, step in {"ours": ours, "bare": bare, "gather": gather, "put": put}.items():
                dist.barrier(group)
                begin, cpu = time.perf_counter(), time.process_time()
                step()
                seconds[name] = time.perf_counter() - begin
                seconds[f"{name}, cpu"] = time.process_time() - cpu
            told.append(seconds)
        for _ in range(rounds):
            dist.barrier(group)
            with clocks() as spent:
                reader.read(rng.choice(others, rows, replace=False), out=taken)
                dist.barrier(group)  # the other has all that it asked for
            for name, one in spent.items():
                stages[name].append(one)
    return {"exchange": told, "stages": {name: statistics.median(some) for name, some in stages.items()}}


def sent_bytes(wires: list[SlowWire], interface: str) -> int:
    """What has left this host so far: messages alone where the sender is slow, else all that the interface
    counts, gradients and headers too; 0 over loopback."""
    if wires and wires[0].bounded:
        return wires[0].sent_bytes
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface != "lo":
            return int(counts.split()[8])
    return 0


def model_seconds(model: torch.nn.Module, kept: list[Any], group: Any) -> float:
    """Of a step: the model, its optimiser and the exchange of its gradients, on mini-batches that are there
    already, on all hosts at once, which share the machine's cores as they do in training."""
    optimiser = torch.optim.Adam(model.parameters(), lr=0.003)
    spent = []
    for turn in range(3):
        for batch in kept:
            dist.barrier(group)
            begin = time.perf_counter()
            learn(model, optimiser, *batch)
            if turn:
                spent.append(time.perf_counter() - begin)
    return statistics.median(spent)


def learn(
    model: torch.nn.Module, optimiser: torch.optim.Optimizer, x: Any, row: Any, col: Any, nodes: Any,
    edges: Any, label: Any,
) -> float:  # fmt: skip
    """A step of training; its loss."""
    out = model(x, row, col, nodes, edges)
    loss = torch.nn.functional.cross_entropy(out, label)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    return float(loss.detach())


def parts_of(batch: Any) -> tuple[Any, ...]:
    row, col = torch.as_tensor(batch.row).long(), torch.as_tensor(batch.col).long()
    label = batch.label[: batch.batch_size].long()
    return batch.x, row, col, batch.num_sampled_nodes, batch.num_sampled_edges, label


def main(said: dict[str, Any]) -> dict[str, Any]:
    slow, wires = said["slow"], list[SlowWire]()
    if slow is not None and slow != [0.0, float("inf")]:
        open_wire = Opening.open_wire

        def slowed(opening: Opening) -> SlowWire:
            wires.append(SlowWire(open_wire(opening), *slow))
            return wires[0]

        Opening.open_wire = slowed  # type: ignore[assignment, method-assign]
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{said['meeting']}", rank=said["rank"],
        world_size=said["hosts"] * said["ranks"],
    )  # fmt: skip
    if said.get("exchange"):
        with featstore.open_split(
            said["parts"], memory=said["serving"], timeout_seconds=120, engine="mmap"
        ) as store:
            told = exchange(store, said["exchange"], said["rounds"])
        dist.destroy_process_group()
        return told
    told = train(said, wires)
    dist.destroy_process_group()
    return told


def train(said: dict[str, Any], wires: list[SlowWire]) -> dict[str, Any]:
    """Epochs of GraphSAGE; of each what it took, by stage."""
    begin = time.perf_counter()
    halo = said["halo"]
    if isinstance(halo, dict):
        halo = featstore.MassiveGNN(**halo)
    torch.manual_seed(0)
    host, kept, losses, setup = said["rank"] // said["ranks"], list[Any](), list[str](), 0.0
    shared: dict[str, Any] = {"shared": f"{said['meeting']}-{host}"} if said["ranks"] > 1 else {}
    quiet = dist.new_group(backend="gloo")
    with (
        featstore.open_split(
            said["parts"], memory=said["serving"], timeout_seconds=120, engine="mmap"
        ) as store,
        InLoop(store, said["fanouts"], said["batch"], said["memory"])
        if said["in_loop"]
        else store.loader(
            seeds="train", fanouts=said["fanouts"], batch_size=said["batch"], memory=said["memory"],
            halo=halo, policy="fifo", attach="label", tensors=True, seed=0, engine="mmap", **shared,
        ) as loader,
    ):  # fmt: skip
        model = torch.nn.parallel.DistributedDataParallel(
            Sage(store.table("features").row_shape[0], 64, mean)
        )
        optimiser = torch.optim.Adam(model.parameters(), lr=0.003)
        epochs = []
        for _ in range(said["epochs"]):
            before, started, cpu = loader.report(), time.perf_counter(), time.process_time()
            sent, steps = sent_bytes(wires, os.environ["GLOO_SOCKET_IFNAME"]), 0
            for batch in loader:
                setup = setup or time.perf_counter() - begin
                parts = parts_of(batch)
                losses.append(learn(model, optimiser, *parts).hex())
                if len(kept) < 4:
                    kept.append(tuple(one.clone() if torch.is_tensor(one) else one for one in parts))
                steps += 1
                del batch, parts
            after = loader.report()
            epochs.append({
                "seconds": time.perf_counter() - started,
                "cpu": time.process_time() - cpu,
                "sent_bytes": sent_bytes(wires, os.environ["GLOO_SOCKET_IFNAME"]) - sent,
                "rows": after.remote_rows - before.remote_rows,
                "steps": steps,
                "stages": {
                    name: spent - before.seconds.get(name, 0.0) for name, spent in after.seconds.items()
                },
            })  # fmt: skip
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        model_alone = model_seconds(model, kept, quiet)
    return {
        "epochs": epochs, "losses": losses, "setup": setup, "peak_bytes": peak, "model": model_alone,
    }  # fmt: skip


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    told = main(asked)
    Path(asked["told"]).write_text(json.dumps(told))
