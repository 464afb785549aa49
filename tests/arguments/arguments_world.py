"""One small world for all cases: stores, readers, loaders and traces, each made when it is first asked
for."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from arguments_wrong import torch

import featstore
from featstore.adapters.pyg import FeatstoreFeatures, FeatstoreGraph, FeatstoreSampler
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.compiled.trace import CompiledTrace
from featstore.loaders.online.loader import OnlineLoader
from featstore.loaders.rolling import RollingLoader
from featstore.reader.keys import NodeKeys
from featstore.reader.reader import Reader
from featstore.sampling.neighbors import NeighborSampler
from featstore.sampling.stored import StoredSampler
from featstore.shared.client import BufferClient
from featstore.storage.disk import Disk, File
from featstore.tiers.buffer import FeatureBuffer
from featstore.tiers.device import DeviceBuffer, DeviceTicket

NODES, WIDTH = 400, 8


class QuickDisk(Disk):
    def fsync(self, file: File) -> None:
        pass

    def fsync_dir(self, path: Path) -> None:
        pass


class World:
    """All that the calls need."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._opened = ExitStack()
        rng = np.random.default_rng(0)
        self.rows = rng.standard_normal((NODES, WIDTH), np.float32)
        self.degrees = rng.integers(1, 6, NODES)
        self.indptr = np.concatenate([[0], np.cumsum(self.degrees)]).astype(np.int64)
        self.indices = rng.integers(0, NODES, int(self.indptr[-1]))
        self.labels = rng.integers(0, 4, NODES)
        self.staging = np.zeros(1 << 16, np.uint8)
        self.batches = [np.arange(first, first + 20) for first in range(0, 100, 20)]
        self._fresh = 0

    def open(self, thing: Any) -> Any:
        return self._opened.enter_context(thing)

    def close(self) -> None:
        self._opened.close()

    def fresh(self) -> Path:
        """A path that is not there."""
        self._fresh += 1
        (self.root / "fresh").mkdir(exist_ok=True)
        return self.root / "fresh" / str(self._fresh)

    @cached_property
    def path(self) -> Path:
        featstore.pack(
            self.root / "store", self.rows, graph=(self.indptr, self.indices), arrays={"labels": self.labels},
            order="ldg", partitions=4, hubs=0.1, disk=QuickDisk(),
        ).close()  # fmt: skip
        return self.root / "store"

    @cached_property
    def parts(self) -> Path:
        featstore.split(self.path, 1, self.root / "parts", memory="64MiB", disk=QuickDisk())
        return self.root / "parts"

    @cached_property
    def store(self) -> featstore.Store:
        return self.open(featstore.open(self.path))

    @cached_property
    def keyed(self) -> featstore.Store:
        """A small store whose nodes have keys."""
        keys = [f"n{node}" for node in range(50)]
        return self.open(
            featstore.pack(self.root / "keyed", self.rows[:50], node_keys=keys, disk=QuickDisk())
        )

    @cached_property
    def node_keys(self) -> NodeKeys:
        keys = self.open(self.keyed.ids("features"))
        keys.lookup(["n1"])  # so that its files are open
        return keys

    @cached_property
    def reader(self) -> Reader:
        return self.open(self.store.reader(engine="threads", memory="64MiB"))

    @cached_property
    def tiered(self) -> featstore.TieredReader:
        return self.open(self.store.reader(policy="lru", engine="threads", memory="64MiB"))

    @cached_property
    def sampler(self) -> StoredSampler:
        return self.open(self.store.sampler([2], memory="64MiB", engine="threads"))

    @cached_property
    def neighbours(self) -> NeighborSampler:
        return NeighborSampler(self.indptr, self.indices, [2])

    @cached_property
    def trace(self) -> featstore.Trace:
        return self.open(featstore.Trace.record(self.batches, self.root / "trace", disk=QuickDisk()))

    @cached_property
    def compiled(self) -> CompiledTrace:
        featstore.compile_trace(
            self.store, self.trace, memory="64MiB", residency="fixed", disk_door=QuickDisk()
        )
        return self.open(self.store.compiled())

    @cached_property
    def compiled_loader(self) -> CompiledLoader:
        return self.open(CompiledLoader(self.compiled, engine="threads"))

    @cached_property
    def rolling(self) -> RollingLoader:
        return self.open(RollingLoader(self.store, lambda number: self.batches, memory="64MiB"))

    @cached_property
    def online(self) -> OnlineLoader:
        return self.open(OnlineLoader(self.store, self.batches, memory="64MiB", engine="threads"))

    @cached_property
    def loader(self) -> featstore.Loader:
        return self.open(featstore.Loader(self.store, self.batches, memory="64MiB", engine="threads"))

    @cached_property
    def validated(self) -> featstore.Loader:
        """A loader with memory set aside for another."""
        return self.open(
            self.store.loader(self.batches, memory="64MiB", validation_memory="32MiB", engine="threads")
        )

    @cached_property
    def buffer(self) -> featstore.SharedBuffer:
        return self.open(featstore.SharedBuffer(self.store, memory="64MiB", engine="threads"))

    @cached_property
    def client(self) -> BufferClient:
        client = self.open(self.buffer.client())
        client.read([0])  # so that it is connected
        return client

    @cached_property
    def features(self) -> FeatureBuffer:
        return self.open(FeatureBuffer(self.reader, slots=50))

    @cached_property
    def by_next_use(self) -> FeatureBuffer:
        return self.open(FeatureBuffer(self.reader, slots=50, policy="min", batches=3))

    @cached_property
    def on_device(self) -> DeviceBuffer:
        return DeviceBuffer(self.features, ["cpu"], slots=20, policy="lru")

    def device_ticket(self, ids: list[int]) -> DeviceTicket:
        """A ticket that is done."""
        ticket = self.on_device.begin(ids)
        assert ticket is not None
        for fill in ticket._fills:
            if fill.host is not None:
                fill.host.result()
        return ticket

    @cached_property
    def by_partition(self) -> featstore.PartitionOrder:
        return featstore.PartitionOrder(self.store, np.arange(100), batch_size=10)

    @cached_property
    def by_proximity(self) -> featstore.ProximityOrder:
        return featstore.ProximityOrder((self.indptr, self.indices), np.arange(100), batch_size=10)

    @cached_property
    def pyg_sampler(self) -> FeatstoreSampler:
        return FeatstoreSampler(self.neighbours)

    @cached_property
    def pyg_features(self) -> FeatstoreFeatures:
        return FeatstoreFeatures(self.reader, arrays={(None, "y"): torch.from_numpy(self.labels)})

    @cached_property
    def pyg_graph(self) -> FeatstoreGraph:
        return FeatstoreGraph(self.indptr, self.indices)

    def out(self, *shape: int) -> np.ndarray[Any, Any]:
        return np.zeros((*shape, WIDTH), np.float32)
