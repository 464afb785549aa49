"""The loader of mega-batches: training from random collections of partitions that fit in memory.

After HierBatching (under review at ICLR 2023): an epoch visits every partition once, in random collections;
each is contiguous on disk, so that an epoch reads everything once and sequentially. The hubs, which most
lists name, stay in memory for good and make up for most of the neighbours that a collection of partitions
loses. Differences: hubs have their lists too; with fewer partitions replaced than resident a mega-batch sees
more of the graph in the same memory; edges can be weighed against the bias that is left.

While one mega-batch is trained on, a thread loads the next: features straight into their slots, lists of
neighbours in blocks, of which a kernel keeps what is in memory (:mod:`featstore.loaders.mega.induce`).
Everything is inside one budget (:mod:`featstore.loaders.mega.sizes`), but for the mini-batches that the
caller holds.
"""

from __future__ import annotations

import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_count, check_state
from featstore.base.system import submitted
from featstore.base.threads import shut_down
from featstore.errors import ArgumentError
from featstore.loaders.mega.batch import MegaBatch
from featstore.loaders.mega.loading import Loading
from featstore.loaders.mega.schedule import Schedule
from featstore.loaders.prefetch import LoaderBase
from featstore.loaders.report import LoaderReport
from featstore.loaders.state import loader_state, position_of
from featstore.reader.options import check_reading
from featstore.storage.relations import graph_of
from featstore.storage.store import as_store
from featstore.units import parse_bytes

if TYPE_CHECKING:
    from featstore.engine import EngineChoice
    from featstore.storage.store import OpenStore

PASSES_MAX = 16  # of "auto"


class MegaBatches(LoaderBase):
    """Loads the mega-batches of an epoch, one ahead; made by :meth:`featstore.Store.mega_batches`. Iterate it
    once an epoch.

    Args:
        store: the open store, packed with a graph and partitions.
        memory: budget for all that is held here, bytes or ``"2GiB"``.
        train: node ids of the training nodes, or a mask of the nodes, or the name of an array in the store
            that is one of these; all nodes by default.
        graph: name of the graph, where the store has several, or tables of several types of nodes or edges.
        hubs: how many of the stored hubs to keep in memory; by default all, up to a quarter of the budget.
        resident: partitions in a mega-batch; by default as many as fit.
        replaced: how many of them are exchanged from step to step; by default all.
        passes: how often each mega-batch is gone through, or ``"auto"``: as often as its successor takes to
            load.
        seed: of partitions, mini-batches and neighbours. Equal seeds give equal batches (but for
            ``passes="auto"``).
        engine, queue_depth, verify: as for :meth:`featstore.Store.reader`.

    Raises SourceError for a store without graph or partitions, IdError, BudgetError, and what reading raises.
    """

    def __init__(
        self, store: OpenStore, *, memory: int | str = "1GiB", train: Any = None, graph: str | None = None,
        hubs: int | None = None, resident: int | None = None, replaced: int | None = None,
        passes: int | str = 1, seed: int = 0, engine: str = "auto", queue_depth: int = 128,
        verify: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        if not isinstance(passes, str) or passes != "auto":
            passes = as_count(passes, "passes, unless 'auto',", 1, 2**31 - 1)
        resident = None if resident is None else as_count(resident, "resident")
        replaced = None if replaced is None else as_count(replaced, "replaced")
        hubs = None if hubs is None else as_count(hubs, "hubs", 0)
        self.store, self.seed, self.passes = as_store(store), as_count(seed, "seed", 0), passes
        self.memory_bytes = parse_bytes(memory, "memory")
        check_reading(engine, queue_depth, verify)
        self.graph = graph_of(store, graph)
        self.table = self.graph.table
        self._loading = Loading(
            store, self.graph, memory_bytes=self.memory_bytes, train=train, hubs=hubs, resident=resident,
            replaced=replaced, seed=self.seed, engine=engine, queue_depth=queue_depth, verify=verify,
        )  # fmt: skip
        self._sizes = self._loading.sizes
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="featstore-mega")
        self._epoch = 0
        self._position = (0, 0, 0, 0)  # step, pass, mini-batch: the next one to be handed out; their size
        self._passes_now: int | None = None  # of the step under way, after a resume
        self._only: MegaBatch | None = None
        self._handed: MegaBatch | None = None  # the last one; its buffers are reused
        self._ahead: tuple[tuple[int, int], Future[MegaBatch]] | None = None
        self._load_seconds: list[float] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by stage
        self._pass_seconds: list[float] = []

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
    def hub_rows(self) -> NDArray[Any]:
        """Rows of the hubs in memory, the most wanted first."""
        rows: NDArray[Any] = self._loading.hub_rows
        return rows

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
        return {"planned": self._sizes.memory_bytes, "unused": self.memory_bytes - self._sizes.memory_bytes}

    def stats(self) -> Any:
        """What the reader behind has counted: bytes, reads, waiting."""
        return self._loading.reader.stats()

    def report(self) -> LoaderReport:
        """What has been measured so far; ``batches`` are mega-batches here."""
        stats = self.stats()
        forecast = self._loading.reader.model.busy_seconds(stats.reads, stats.bytes_read)
        return LoaderReport(
            len(self._load_seconds), dict(self._seconds), stats.bytes_read, stats.reads,
            forecast_seconds=forecast,
        )  # fmt: skip

    def _schedule(self, epoch: int) -> Schedule:
        return Schedule(
            self._loading.partitions, self._sizes.resident, self._sizes.replaced, self.seed, epoch
        )

    # Going through it.

    def set_epoch(self, epoch: int) -> None:
        """Begin at the start of this epoch when iterated next."""
        epoch = as_count(epoch, "epoch", 0)
        self._retire()
        self._epoch, self._position, self._passes_now = epoch, (0, 0, 0, 0), None

    def state_dict(self) -> dict[str, Any]:
        """Where training stands: small, plain data. What was handed out counts as seen."""
        step, pass_, batch, batch_size = self._position
        train = zlib.crc32(self._loading.train.tobytes())
        return loader_state(self.store.uuid, self._epoch, step) | {
            "seed": self.seed,
            "resident": self._sizes.resident, "replaced": self._sizes.replaced, "hubs": len(self.hub_rows),
            "train": train, "pass": pass_, "batch": batch,
            "batch_size": batch_size, "passes": self._passes_now,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken. Raises ArgumentError, a ValueError, where it belongs to
        another store, seed or size of mega-batch."""
        now = self.state_dict()
        same = ("seed", "resident", "replaced", "hubs", "train")
        epoch, step = position_of(state, self.store.uuid)
        check_state(state, {key: now[key] for key in same}, "this loader has")
        where = ("pass", "batch", "batch_size")
        position = [step, *(as_count(state.get(key), f"{key} of the state", 0) for key in where)]
        passes = state.get("passes")
        passes = None if passes is None else as_count(passes, "passes of the state")
        if position[0] > self.steps:
            raise ArgumentError(
                f"the state points to step {position[0]} of epoch {epoch}, which does not exist"
            )
        self._retire()
        self._epoch, self._passes_now = epoch, passes
        self._position = (position[0], position[1], position[2], position[3])

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[MegaBatch]:
        """The mega-batches of the current epoch, from where training stands; then the next epoch is the
        current one."""
        self.check_open()
        epoch, schedule = self._epoch, self._schedule(self._epoch)
        for index in range(self._position[0], schedule.steps):
            self.check_open()
            self._retire()
            begun = time.perf_counter()
            mega = self._take(epoch, index)
            mega.wait_seconds = time.perf_counter() - begun
            self._seconds["wait"] += mega.wait_seconds
            self._load_ahead(schedule, index)
            self._begin(mega)
            started = time.perf_counter()
            yield mega
            trained = time.perf_counter() - started
            self._seconds["train"] += trained
            self._pass_seconds.append(trained / mega.passes)
            self._position, self._passes_now = (index + 1, 0, 0, 0), None
        self._epoch, self._position = epoch + 1, (0, 0, 0, 0)

    def _retire(self) -> None:
        """The mega-batch handed out last is no more: its buffers are needed, or training stands elsewhere."""
        if self._handed is not None:
            self._handed.retire()

    def _begin(self, mega: MegaBatch) -> None:
        """Tell a mega-batch how often it is to be gone through, from where, and whom to tell."""
        step, *start = self._position
        resumed = self._passes_now if step == mega.step else None
        mega.passes = self._choose_passes() if resumed is None else resumed
        self._passes_now = mega.passes

        def on_batch(next_pass: int, next_batch: int, batch_size: int) -> None:
            self._position = (mega.step, next_pass, next_batch, batch_size)

        first = (start[0], start[1], start[2])
        mega.begin_at(first, on_batch)
        self._position = (mega.step, *first)
        self._handed = mega

    def _choose_passes(self) -> int:
        """HierBatching's rule (appendix B): as often as loading takes longer than one pass."""
        if self.passes != "auto":
            return int(self.passes)
        if not self._pass_seconds or not self._load_seconds:
            return 1
        ratio = float(np.median(self._load_seconds[-8:]) / max(1e-9, np.median(self._pass_seconds[-8:])))
        return max(1, min(PASSES_MAX, int(ratio)))

    def _take(self, epoch: int, index: int) -> MegaBatch:
        """The mega-batch of a step: the one loaded ahead, or loaded now."""
        if self._only is not None:  # everything fits: it was loaded once and stays
            return replace(self._only, epoch=epoch, read_bytes=0, load_seconds=0.0, build_seconds=0.0)
        ahead = self._ahead
        if ahead is not None and (ahead[0] != (epoch, index) or (ahead[1].done() and ahead[1].exception())):
            self._settle(ahead[1])
            ahead = None
        mega = self._wait(self._submit(epoch, index, whole=True) if ahead is None else ahead[1])
        if mega.steps == 1:
            self._only = replace(mega)
        return mega

    def _submit(self, epoch: int, index: int, *, whole: bool) -> Future[MegaBatch]:
        schedule = self._schedule(epoch)
        future = submitted(self._pool, self._loading.load, schedule, schedule.step(index), whole)
        self._ahead = ((epoch, index), future)
        return future

    def _wait(self, future: Future[MegaBatch]) -> MegaBatch:
        mega = future.result()  # interrupted, it stays what is being loaded ahead
        self._ahead = None
        self._load_seconds.append(mega.load_seconds)
        self._seconds["load"] += mega.load_seconds
        self._seconds["build"] += mega.build_seconds
        return mega

    @staticmethod
    def _settle(future: Future[MegaBatch]) -> None:
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
