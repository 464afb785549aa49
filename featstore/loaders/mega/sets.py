"""The mega-batches of an epoch: random collections of partitions that fit in memory, loaded one ahead.

After HierBatching (under review at ICLR 2023): an epoch visits every partition once, in random collections;
each is contiguous on disk, so that an epoch reads everything once and sequentially. The hubs, which most
lists name, stay in memory for good and make up for most of the neighbours that a collection of partitions
loses. Differences: hubs have their lists too; with fewer partitions replaced than resident a mega-batch sees
more of the graph in the same memory; edges can be weighed against the bias that is left.

While one mega-batch is used, a thread loads the next: features straight into their slots, lists of neighbours
in blocks, of which a kernel keeps what is in memory (:mod:`featstore.loaders.mega.induce`). Everything is
inside one budget (:mod:`featstore.loaders.mega.sizes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_count
from featstore.base.environment import MEMORY
from featstore.base.system import submitted
from featstore.base.threads import shut_down, thread_pool
from featstore.errors import ArgumentError
from featstore.loaders.mega.largest import LargestDrawn
from featstore.loaders.mega.loading import Loading
from featstore.loaders.mega.options import DrawnWith
from featstore.loaders.mega.partition_set import PartitionSet
from featstore.loaders.mega.parts import Parts
from featstore.loaders.mega.resident import ResidentTier
from featstore.loaders.mega.schedule import Schedule
from featstore.loaders.prefetch import LoaderBase
from featstore.reader.options import as_memory, check_reading
from featstore.storage.store import as_store

if TYPE_CHECKING:
    from featstore.engine import EngineChoice
    from featstore.storage.store import OpenStore, Table


class PartitionSets(LoaderBase):
    """Loads the mega-batches of an epoch, one ahead. Iterate it once an epoch; what it gives lives until the
    next one is asked for.

    Args:
        store: the open store, packed with a graph and partitions.
        memory: budget for all that is held here, bytes or ``"2GiB"``.
        train: node ids of the training nodes, or a mask of the nodes, or the name of an array in the store
            that is one of these; all nodes by default. Of a store with types, what
            :meth:`featstore.sampling.typed_store.TypedSeeds.of` takes.
        graph: name of the graph, where the store has several, or tables of several types of nodes or edges.
            Of a store with types the graphs of all are meant, unless one is named.
        hubs: how many of the stored hubs to keep in memory, of each type of nodes (or all that it has, where
            others have more); by default all, up to a quarter of the budget.
        resident: partitions in a mega-batch; by default as many as fit.
        replaced: how many of them are exchanged from step to step; by default all.
        seed: of partitions, and of what is drawn from them.
        drawn: mini-batches that are drawn from these, and whose memory is of this budget, too.
        node_ids: by table [rows], by what other ids its nodes are called in mini-batches; ``train`` is of the
            store's.
        drawn_with: how they are drawn beside fan-outs.
        engine, queue_depth, threads, verify: as for :meth:`featstore.Store.reader`.

    Raises SourceError for a store without graph or partitions, IdError, BudgetError, and what reading raises.
    """

    def __init__(
        self, store: OpenStore, *, memory: int | str = MEMORY, train: Any = None, graph: str | None = None,
        hubs: int | None = None, resident: int | None = None, replaced: int | None = None, seed: int = 0,
        drawn: LargestDrawn | None = None, engine: str = "auto", queue_depth: int = 128, verify: bool = True,
        threads: int | None = None, node_ids: Mapping[str, NDArray[Any]] | None = None,
        drawn_with: DrawnWith | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        resident = None if resident is None else as_count(resident, "resident")
        replaced = None if replaced is None else as_count(replaced, "replaced")
        if resident is not None and replaced is not None and replaced > resident:
            raise ArgumentError(f"replaced={replaced}: of resident={resident} partitions so many at most")
        hubs = None if hubs is None else as_count(hubs, "hubs", 0)
        self.store, self.seed = as_store(store), as_count(seed, "seed", 0)
        self.memory_bytes = as_memory(memory)
        check_reading(engine, queue_depth, verify, threads=threads)
        self.parts = Parts(store, graph)
        self._loading = Loading(
            store, self.parts, memory_bytes=self.memory_bytes, train=train, hubs=hubs, resident=resident,
            replaced=replaced, seed=self.seed, drawn=drawn, node_ids=node_ids, drawn_with=drawn_with,
            engine=engine, queue_depth=queue_depth, verify=verify, threads=threads,
        )  # fmt: skip
        self.sizes = self._loading.sizes
        self._pool = thread_pool(1, "featstore-mega")
        self._epoch = 0
        self._only: PartitionSet | None = None
        self._ahead: tuple[tuple[int, int], Future[PartitionSet]] | None = None

    # What it is.

    @property
    def partitions(self) -> int:
        """Partitions that hold any rows."""
        return len(self._loading.partitions)

    @property
    def resident(self) -> int:
        """Partitions in a mega-batch."""
        return self._schedule(0).resident

    @property
    def steps(self) -> int:
        """Mega-batches in an epoch."""
        return self._schedule(0).steps

    @property
    def places(self) -> dict[str, int]:
        """Rows of each table that a mega-batch has at most, those of hubs included."""
        sizes = self.sizes
        return {n: len(hubs) + sizes.resident * sizes.slot_rows[n] for n, hubs in self.hub_rows.items()}

    @property
    def hub_rows(self) -> dict[str, NDArray[Any]]:
        """Rows of each table's hubs in memory, the most wanted first."""
        return {name: one.hub_rows for name, one in self._loading.rows.items()}

    @property
    def train(self) -> NDArray[Any]:
        """Rows of the training nodes, ascending."""
        return self._loading.train.rows

    @property
    def loaded(self) -> dict[str, Table]:
        """The tables of nodes with features."""
        return {name: one.table for name, one in self._loading.rows.items() if one.has_features}

    @property
    def engine(self) -> EngineChoice:
        """The engine that reads, and why this one."""
        return self._loading.reader.engine

    @property
    def access(self) -> str:
        """How files are opened; ``access_because`` says why not directly."""
        return self._loading.reader.access

    @property
    def access_because(self) -> str:
        return self._loading.reader.access_because

    def memory(self) -> dict[str, int]:
        """Bytes of the budget: ``planned``, by the sum of all that is held, and ``unused``."""
        return {"planned": self.sizes.memory_bytes, "unused": self.memory_bytes - self.sizes.memory_bytes}

    def stats(self) -> Any:
        """What the reader behind has counted: bytes, reads, waiting."""
        return self._loading.reader.stats()

    def forecast_seconds(self) -> float:
        """Of what has been read, by the device model."""
        stats = self.stats()
        return self._loading.reader.model.busy_seconds(stats.reads, stats.bytes_read)

    def as_tier(self) -> ResidentTier:
        """A tier of the rows of mega-batches, which is to be told of each, over the disk."""
        hubs = self.hub_rows
        return ResidentTier(self._loading.reader, [(table, hubs[n]) for n, table in self.loaded.items()])

    def _schedule(self, epoch: int) -> Schedule:
        return Schedule(self._loading.partitions, self.sizes.resident, self.sizes.replaced, self.seed, epoch)

    def seed_counts(self, epoch: int) -> NDArray[np.int64]:
        """How many training nodes each mega-batch of an epoch uses, int64 [steps]."""
        return self._loading.train.seed_counts(self._schedule(epoch))

    # Going through it.

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[PartitionSet]:
        """The mega-batches of the current epoch; then the next epoch is the current one."""
        for index in range(self.steps):
            self.check_open()
            yield self.take(self._epoch, index)
        self._epoch += 1

    def ask(self, epoch: int, index: int) -> Future[PartitionSet]:
        """Have the mega-batch of a step loaded, if it is not yet; nobody uses those before any more but the
        last one taken."""
        if self._only is not None:  # everything fits: it was loaded once and stays
            there: Future[PartitionSet] = Future()
            there.set_result(
                replace(self._only, epoch=epoch, read_bytes=0, load_seconds=0.0, build_seconds=0.0)
            )
            return there
        ahead = self._ahead
        if ahead is not None and (ahead[0] != (epoch, index) or (ahead[1].done() and ahead[1].exception())):
            self._settle(ahead[1])
            ahead = None
        return self._submit(epoch, index, whole=True) if ahead is None else ahead[1]

    def take(self, epoch: int, index: int) -> PartitionSet:
        """The mega-batch of a step, waited for. What comes next is loaded beside it, where the one before it
        was, from which nobody gathers rows any more."""
        mega = self.ask(epoch, index).result()  # interrupted, it stays what is being loaded ahead
        self._ahead = None
        if mega.steps == 1:
            self._only = mega
        self._load_ahead(self._schedule(epoch), index)
        return mega

    def _submit(self, epoch: int, index: int, *, whole: bool) -> Future[PartitionSet]:
        schedule = self._schedule(epoch)
        future = submitted(self._pool, self._loading.load, schedule, schedule.step(index), whole)
        self._ahead = ((epoch, index), future)
        return future

    @staticmethod
    def _settle(future: Future[PartitionSet]) -> None:
        """Let a load end that nobody wants any more: it writes into the buffers."""
        if not future.cancel():
            future.exception()

    def _load_ahead(self, schedule: Schedule, index: int) -> None:
        """Load what comes next beside the mega-batch just taken, if it is sure to have other slots."""
        if index + 1 < schedule.steps:
            self._submit(schedule.epoch, index + 1, whole=False)
        elif schedule.steps > 1 and schedule.replaced == schedule.resident:
            self._submit(schedule.epoch + 1, 0, whole=True)

    def close(self) -> None:
        """Let loads under way end and give everything back. May be called more than once."""
        self._closed = True
        ahead, self._ahead = self._ahead, None
        if self.here:  # in a forked child there is nothing under way
            if ahead is not None:
                self._settle(ahead[1])
            shut_down(self._pool)
        self._loading.reader.close()
