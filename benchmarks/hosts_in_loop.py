"""Training that fetches a mini-batch's rows when the loop comes to it, as DistDGL does: of ``hosts.py``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

import featstore
from featstore.sampling.batches import RankedBatches, open_sampler

_SAMPLED_AHEAD = 4


class InLoop:
    """What stands for a loader on a host of one rank: its mini-batches, sampled ahead by a thread, whose rows
    the loop waits for, own ones and others'. Nothing is kept; the graph is beside ``memory``."""

    def __init__(self, store: featstore.SplitStore, fanouts: list[int], batch: int, memory: int) -> None:
        owners, place = store.owners["features"], store.place
        sampler = open_sampler(store, fanouts, memory="4GiB", in_memory=True)
        self._batches = RankedBatches(
            sampler, store.arrays["train"], batch, ranks=(place.host,), world_size=owners.count,
            owner=owners.hosts, hosts=owners.count,
        )  # fmt: skip
        self._store, self._labels = store, torch.from_numpy(store.arrays["label"][:])
        self._reader = store.reader(memory=memory, engine="mmap")
        self._rows = torch.empty(0, *store.table("features").row_shape)  # used again for each mini-batch
        self._seconds, self._epoch = {"sample": 0.0, "wait": 0.0, "read wait": 0.0}, 0

    def __enter__(self) -> InLoop:
        return self

    def __exit__(self, *exception: object) -> None:
        self._reader.close()

    def __iter__(self) -> Iterator[Any]:
        self._batches.set_epoch(self._epoch)
        self._epoch += 1
        count = len(self._batches)
        with ThreadPoolExecutor(1) as pool:
            waiting = deque(pool.submit(self._sample, i) for i in range(min(_SAMPLED_AHEAD, count)))
            for index in range(count):
                begin = time.perf_counter()
                sample = waiting.popleft().result()
                self._seconds["wait"] += time.perf_counter() - begin
                if index + _SAMPLED_AHEAD < count:
                    waiting.append(pool.submit(self._sample, index + _SAMPLED_AHEAD))
                begin = time.perf_counter()
                if len(sample.node) > len(self._rows):
                    self._rows = torch.empty(len(sample.node), *self._rows.shape[1:])
                x = self._reader.read(torch.from_numpy(sample.node), out=self._rows[: len(sample.node)])
                self._seconds["read wait"] += time.perf_counter() - begin
                yield SimpleNamespace(
                    x=x, row=sample.row, col=sample.col, num_sampled_nodes=sample.num_sampled_nodes,
                    num_sampled_edges=sample.num_sampled_edges, batch_size=sample.num_sampled_nodes[0],
                    label=self._labels[torch.from_numpy(sample.node)],
                )  # fmt: skip

    def _sample(self, index: int) -> Any:
        begin = time.perf_counter()
        sample = self._batches[index]
        self._seconds["sample"] += time.perf_counter() - begin
        return sample

    def report(self) -> Any:
        return SimpleNamespace(remote_rows=self._store.received()[0], seconds=dict(self._seconds))
