"""The loader of mega-batches: training from random collections of partitions that fit in memory.

After HierBatching (under review at ICLR 2023): an epoch visits every partition once, in random collections; each is contiguous on disk, so
that an epoch reads everything once and sequentially. The hubs, which most lists name, stay in memory for good and make up
for most of the neighbours that a collection of partitions loses. Differences: hubs have their lists too; with fewer partitions
replaced than resident a mega-batch sees more of the graph in the same memory; edges can be weighed against the bias that is left.

While one mega-batch is trained on, a thread loads the next: features straight into their slots, lists of neighbours in blocks, of
which a kernel keeps what is in memory (:mod:`featstore.mega.induce`). Everything is inside one budget (:mod:`featstore.mega.sizes`), but
for the mini-batches that the caller holds.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.budget import Budget
from featstore.engine.base import shut_down
from featstore.errors import BudgetError, ClosedError, CorruptionError, IdError, SourceError
from featstore.ids import parse_ids
from featstore.lookup import table_need
from featstore.mega.batch import MegaBatch
from featstore.mega.induce import FILLED, TARGET, Places, count_by_partition, induce_block
from featstore.mega.schedule import Schedule, Step
from featstore.mega.sizes import Needs, Sizes, fit
from featstore.order.parts import node_dtype
from featstore.units import parse_bytes

if TYPE_CHECKING:
    from featstore.engine import EngineChoice
    from featstore.reader import Reader
    from featstore.request import Request
    from featstore.store import Store

STATE_VERSION = 1
PASSES_MAX = 16  # of "auto"
_READER_BYTES = 64 * 2**20  # nominal budget of the reader beyond what it must hold: gives it 8 MiB of staging
_FEATURE_TURNS = 4
_HUB_SHARE_MAX = 4  # hubs take no more than this part of the budget


class MegaBatches:
    """Loads the mega-batches of an epoch, one ahead; made by :meth:`featstore.Store.mega_batches`. Iterate it once an epoch.

    Args:
        store: the open store, packed with a graph and partitions.
        memory: budget for all that is held here, bytes or ``"2GiB"``.
        train: node ids of the training nodes, or the name of an array in the store; all nodes by default.
        graph: name of the graph, where the store has several.
        hubs: how many of the stored hubs to keep in memory; by default all, up to a quarter of the budget.
        resident: partitions in a mega-batch; by default as many as fit.
        replaced: how many of them are exchanged from step to step; by default all.
        passes: how often each mega-batch is gone through, or ``"auto"``: as often as its successor takes to load.
        seed: of partitions, mini-batches and neighbours. Equal seeds give equal batches (but for ``passes="auto"``).
        engine, queue_depth, verify: as for :meth:`featstore.Store.reader`.

    Raises SourceError for a store without graph or partitions, IdError, BudgetError, and what reading raises.
    """

    def __init__(
        self, store: Store, *, memory: int | str = "1GiB", train: Any = None, graph: str | None = None, hubs: int | None = None,
        resident: int | None = None, replaced: int | None = None, passes: int | str = 1, seed: int = 0, engine: str = "auto",
        queue_depth: int = 128, verify: bool = True,
    ) -> None:  # fmt: skip
        if passes != "auto" and (isinstance(passes, str) or operator.index(passes) < 1):
            raise ValueError(f"passes must be at least 1, or 'auto', not {passes!r}")
        for name, value in (("resident", resident), ("replaced", replaced), ("hubs", hubs)):
            if value is not None and operator.index(value) < (name != "hubs"):
                raise ValueError(f"{name} must be at least {int(name != 'hubs')}, not {value}")
        self.store, self.seed, self.passes = store, int(seed), passes
        self.graph = _graph_of(store, graph)
        self.table = self.graph.table
        self.memory_bytes = parse_bytes(memory)
        self._offsets = self.table.partition_offsets
        if len(self._offsets) == 2 and self.table.rows > 1:
            raise SourceError(
                f"table {self.table.name!r} is one single partition; pack it with partitions (an order such as 'metis' or 'multilevel', "
                "partitions=N) to train by mega-batches"
            )
        parts = ("offsets", "sources", "hubs") if self.graph.hubs else ("offsets", "sources")
        self._names: tuple[str, ...] = (self.table.name, *(f"{self.graph.name}/{part}" for part in parts))
        needs = [table_need(store.table(name), verify, by_row=True) for name in self._names]
        budget = Budget.split(sum(n.checksum_bytes for n in needs) + _READER_BYTES, needs)
        self._train = self._train_rows(train)
        self._node_of_row = self.table.node_of_row()
        held = budget.checksum_bytes + budget.staging_bytes + budget.scratch_bytes + self._train.nbytes
        held += 0 if self._node_of_row is None else self._node_of_row.nbytes
        count = self._hub_count(hubs, self.memory_bytes)
        self.hub_rows, self._hub_offsets = self.graph.hub_rows(count)
        self._hub_partitions = np.searchsorted(self._offsets, self.hub_rows, side="right") - 1
        self._places = Places.of(self._offsets, self.hub_rows)
        self._reader: Reader = store.reader(
            tables=self._names, memory=budget.memory_bytes, static=None, engine=engine, queue_depth=queue_depth, verify=verify,
            by_row=True,
        )  # fmt: skip
        try:
            self._sizes = self._fit(held, resident, replaced)
            self._allocate()
        except BudgetError as error:
            self._reader.close()
            if hubs is not None or count == self.graph.hubs:
                raise
            # A larger budget would hold more hubs, of which every byte takes a quarter at most: one that works whatever their number.
            without = error.needed_bytes - count * self.table.row_bytes
            needed = without * _HUB_SHARE_MAX // (_HUB_SHARE_MAX - 1) + 1
            raise BudgetError(needed, error.given_bytes, error.what) from None
        except BaseException:
            self._reader.close()
            raise
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="featstore-mega")
        self._epoch = 0
        self._position = (0, 0, 0)  # step, pass, mini-batch: the next one to be handed out
        self._passes_now: int | None = None  # of the step under way, after a resume
        self._only: MegaBatch | None = None
        self._handed: MegaBatch | None = None  # the last one; its buffers are reused
        self._ahead: tuple[tuple[int, int], Future[MegaBatch]] | None = None
        self._load_seconds: list[float] = []
        self._pass_seconds: list[float] = []
        self._closed = False

    # Making it.

    def _train_rows(self, train: Any) -> NDArray[Any]:
        """The training nodes' rows, ascending, in as few bytes as they need."""
        rows, dtype = self.table.rows, node_dtype(self.table.rows)
        if train is None:
            return np.arange(rows, dtype=dtype)
        ids = parse_ids(self.store.arrays[train] if isinstance(train, str) else train).values
        if len(ids) and (ids.min() < 0 or ids.max() >= rows):
            bad = ids[(ids < 0) | (ids >= rows)][0]
            raise IdError(f"training node {bad} is out of range: table {self.table.name!r} has {rows:,} rows")
        row_of_node = self.table.row_of_node()
        found = np.sort((ids if row_of_node is None else row_of_node[ids]).astype(dtype))
        if len(found) > 1 and (found[1:] == found[:-1]).any():
            raise IdError("a training node stands twice among those given; each is used once a pass")
        return found

    def _hub_count(self, wanted: int | None, memory_bytes: int) -> int:
        if wanted is not None:
            if wanted > self.graph.hubs:
                raise SourceError(
                    f"{wanted:,} hubs were asked for, but the store has the lists of {self.graph.hubs:,}: pack with more hubs"
                )
            return wanted
        # A hub takes its row, entries of tables, and its list, at most, in both buffers of the subgraph.
        offsets = self.graph.hub_rows()[1]
        needed = np.arange(len(offsets)) * (self.table.row_bytes + 64) + 8 * offsets
        return int(np.searchsorted(needed, memory_bytes // _HUB_SHARE_MAX, side="right")) - 1

    def _fit(self, held_bytes: int, resident: int | None, replaced: int | None) -> Sizes:
        """Choose the sizes: takes the ends of each partition's lists, and one pass over the hubs' lists."""
        bounds = self._reader.read({self._names[1]: self._offsets})[self._names[1]]
        if bounds[0] != 0 or bounds[-1] != self.graph.edges or (np.diff(bounds) < 0).any():
            raise self._bad("offsets that ascend from 0 to the number of edges", "others")
        self._bounds: NDArray[np.int64] = bounds
        counts = np.zeros(len(self._offsets), np.int64)
        places = self._places
        block = 1 << 16
        for low in range(0, int(self._hub_offsets[-1]), block):
            run = (low, min(low + block, int(self._hub_offsets[-1])))
            sources = self._reader.read_runs({self._names[3]: [run]})[self._names[3]]
            bad = count_by_partition(sources, places.hints, self._offsets, places.bits, places.ranks, counts)
            if bad >= 0:
                raise self._bad("rows of the table", str(sources[bad]))
        needs = Needs(
            self.table.rows, self.table.row_bytes, node_dtype(self.table.rows).itemsize, self.graph.entry.sources.row_bytes,
            np.diff(self._offsets), np.diff(bounds) + counts[:-1], len(self.hub_rows), int(counts[-1]), held_bytes,
        )  # fmt: skip
        return fit(needs, self.memory_bytes, resident, replaced)

    def _allocate(self) -> None:
        sizes, hubs = self._sizes, len(self.hub_rows)
        places = hubs + sizes.partition_places
        self._x = np.empty((places, *self.table.row_shape), self.table.dtype)
        self._node = np.full(places, -1, node_dtype(self.table.rows))
        buffers = 1 if sizes.slots == sizes.resident else 2
        self._graphs = [(np.zeros(places + 1, np.int64), np.empty(sizes.edges_max, np.int32)) for _ in range(buffers)]
        dtype = self.store.table(self._names[2]).dtype
        self._blocks = [np.empty(sizes.block_edges, dtype) for _ in range(2)]
        if hubs:
            self._reader.read({self.table.name: self.hub_rows}, out={self.table.name: self._x[:hubs]})
            self._node[:hubs] = self.hub_rows if self._node_of_row is None else self._node_of_row[self.hub_rows]

    def _bad(self, expected: str, actual: str) -> CorruptionError:
        path = self.store.path / self.graph.entry.offsets.path
        return CorruptionError(path, None, expected, actual, f"run `featstore verify {self.store.path}`")

    # What it is.

    @property
    def partitions(self) -> int:
        """Partitions that hold any rows."""
        return int((np.diff(self._offsets) > 0).sum())

    @property
    def resident(self) -> int:
        """Partitions in a mega-batch."""
        return self._schedule(0).resident

    @property
    def steps(self) -> int:
        """Mega-batches in an epoch."""
        return self._schedule(0).steps

    @property
    def engine(self) -> EngineChoice:
        """The engine that reads, and why this one."""
        return self._reader.engine

    @property
    def access(self) -> str:
        """How files are opened; ``access_because`` says why not directly."""
        return self._reader.access

    @property
    def access_because(self) -> str:
        return self._reader.access_because

    def memory(self) -> dict[str, int]:
        """Bytes of the budget: ``planned``, by the sum of all that is held, and ``unused``."""
        return {"planned": self._sizes.memory_bytes, "unused": self.memory_bytes - self._sizes.memory_bytes}

    def stats(self) -> Any:
        """What the reader behind has counted: bytes, reads, waiting."""
        return self._reader.stats()

    def _schedule(self, epoch: int) -> Schedule:
        some = np.flatnonzero(np.diff(self._offsets) > 0)
        return Schedule(some, self._sizes.resident, self._sizes.replaced, self.seed, epoch)

    # Going through it.

    def set_epoch(self, epoch: int) -> None:
        """Begin at the start of this epoch when iterated next."""
        self._retire()
        self._epoch, self._position, self._passes_now = operator.index(epoch), (0, 0, 0), None

    def state_dict(self) -> dict[str, Any]:
        """Where training stands: small, plain data. What was handed out counts as seen."""
        step, pass_, batch = self._position
        return {
            "version": STATE_VERSION, "store": self.store.uuid, "seed": self.seed, "resident": self._sizes.resident,
            "replaced": self._sizes.replaced, "hubs": len(self.hub_rows), "epoch": self._epoch, "step": step, "pass": pass_,
            "batch": batch, "passes": self._passes_now,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken. Raises ValueError where it belongs to another store, seed or size of mega-batch."""
        now = self.state_dict()
        for key in ("version", "store", "seed", "resident", "replaced", "hubs"):
            if state.get(key) != now[key]:
                raise ValueError(
                    f"the state has {key} = {state.get(key)!r}, this loader {now[key]!r}: nothing would be repeated"
                )
        self._retire()
        self._epoch = int(state["epoch"])
        self._position = (int(state["step"]), int(state["pass"]), int(state["batch"]))
        self._passes_now = state["passes"]

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[MegaBatch]:
        """The mega-batches of the current epoch, from where training stands; then the next epoch is the current one."""
        if self._closed:
            raise ClosedError("the loader is closed")
        epoch, schedule = self._epoch, self._schedule(self._epoch)
        for index in range(self._position[0], schedule.steps):
            if self._closed:
                raise ClosedError("the loader is closed")
            self._retire()
            begun = time.perf_counter()
            mega = self._take(epoch, index)
            mega.wait_seconds = time.perf_counter() - begun
            self._load_ahead(schedule, index)
            self._begin(mega)
            started = time.perf_counter()
            yield mega
            self._pass_seconds.append((time.perf_counter() - started) / mega.passes)
            self._position, self._passes_now = (index + 1, 0, 0), None
        self._epoch, self._position = epoch + 1, (0, 0, 0)

    def _retire(self) -> None:
        """The mega-batch handed out last is no more: its buffers are needed, or training stands elsewhere."""
        if self._handed is not None:
            self._handed._alive = False

    def _begin(self, mega: MegaBatch) -> None:
        """Tell a mega-batch how often it is to be gone through, from where, and whom to tell."""
        step, pass_, batch = self._position
        resumed = self._passes_now if step == mega.step else None
        mega.passes = self._choose_passes() if resumed is None else resumed
        mega._start = (pass_, batch)
        self._passes_now = mega.passes

        def on_batch(next_pass: int, next_batch: int) -> None:
            self._position = (mega.step, next_pass, next_batch)

        mega._on_batch = on_batch
        self._position = (mega.step, pass_, batch)
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
        future = self._pool.submit(self._load, schedule, schedule.step(index), whole)
        self._ahead = ((epoch, index), future)
        return future

    def _wait(self, future: Future[MegaBatch]) -> MegaBatch:
        mega = future.result()  # interrupted, it stays what is being loaded ahead
        self._ahead = None
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

    # Loading.

    def _load(self, schedule: Schedule, step: Step, whole: bool) -> MegaBatch:
        """Bring a step's partitions into their slots (``whole``: also those that should be there already), and build its graph."""
        begin = time.perf_counter()
        hubs, size = len(self.hub_rows), self._sizes.slot_rows
        starts = hubs + step.slots * size
        fresh = np.full(len(step.loaded), True) if whole else step.loaded
        runs = np.stack([self._offsets[step.partitions], self._offsets[step.partitions + 1]], axis=1)
        features = _Features(self._reader, self.table.name, self._x, runs[fresh], starts[fresh])
        try:
            features.submit(1 / _FEATURE_TURNS)  # the device is busy while the offsets are on their way
            self._name_rows(runs[fresh], starts[fresh])
            built = time.perf_counter()
            indptr, indices, own_edges, read_edges = self._build(schedule, step, runs, starts, features)
            built = time.perf_counter() - built
        finally:
            features.settle()
        features.result()
        mega = MegaBatch(
            schedule.epoch, step.index, schedule.steps, 1, self.seed, self._x, self._node, indptr, indices,
            self._seeds(schedule, step, starts), step.partitions, starts, runs[:, 1] - runs[:, 0], self.partitions,
            hubs, self._hub_copies(step, starts), size, int(self._degrees(step)), own_edges,
            int((runs[fresh, 1] - runs[fresh, 0]).sum()) * self.table.row_bytes + read_edges, time.perf_counter() - begin, built,
        )  # fmt: skip
        self._load_seconds.append(mega.load_seconds)
        return mega

    def _hub_copies(self, step: Step, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Local ids of the hubs that come with a partition of this step."""
        here = np.isin(self._hub_partitions, step.partitions)
        base = self._places.local_base(step.partitions, starts)
        copies: NDArray[np.int64] = base[self._hub_partitions[here]] + self.hub_rows[here]
        return copies

    def _degrees(self, step: Step) -> Any:
        return (self._bounds[step.partitions + 1] - self._bounds[step.partitions]).sum()

    def _name_rows(self, runs: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        for (low, high), start in zip(runs.tolist(), starts.tolist(), strict=True):
            slot = self._node[start : start + self._sizes.slot_rows]
            slot[: high - low] = np.arange(low, high) if self._node_of_row is None else self._node_of_row[low:high]
            slot[high - low :] = -1

    def _seeds(self, schedule: Schedule, step: Step, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Local ids of the training nodes of this step."""
        found = []
        for partition, start in zip(step.partitions.tolist(), starts.tolist(), strict=True):
            low, high = np.searchsorted(self._train, self._offsets[partition : partition + 2])
            rows = self._train[low:high].astype(np.int64)
            used = schedule.used_in(rows, np.full(len(rows), partition), step.index)
            found.append(rows[used] - self._offsets[partition] + start)
        return np.sort(np.concatenate(found)) if found else np.empty(0, np.int64)

    def _build(
        self, schedule: Schedule, step: Step, runs: NDArray[np.int64], starts: NDArray[np.int64], features: _Features
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], int, int]:
        """(indptr, indices, edges into the partitions' nodes, bytes read) of the subgraph of a step."""
        places, hubs = self._places, len(self.hub_rows)
        indptr, indices = self._graphs[(schedule.epoch * schedule.steps + step.index) % len(self._graphs)]
        base = places.local_base(step.partitions, starts)
        state = np.zeros(2, np.int64)
        by_slot = np.argsort(starts)
        offsets = self._reader.read_runs({self._names[1]: np.stack([runs[:, 0], runs[:, 1] + 1], axis=1)[by_slot]})[
            self._names[1]
        ]
        regions: list[tuple[NDArray[np.int64], NDArray[np.bool_], int]] = []
        segments = []
        if hubs:
            away = ~np.isin(self._hub_partitions, step.partitions)  # the others' lists come with their partition
            regions.append((self._hub_offsets, away, 0))
            segments.append((self._names[3], 0, int(self._hub_offsets[-1])))
        at = 0
        for (low, high), start in zip(runs[by_slot].tolist(), starts[by_slot].tolist(), strict=True):
            lists = offsets[at : at + high - low + 1]
            at += high - low + 1
            regions.append((lists, np.full(high - low, True), start))
            segments.append((self._names[2], int(lists[0]), int(lists[-1])))
        bounds = self._bounds[step.partitions[by_slot]], self._bounds[step.partitions[by_slot] + 1]
        own = regions[1:] if hubs else regions
        if any(o[0] != a or o[-1] != b or (np.diff(o) < 0).any() for (o, _, _), a, b in zip(own, *bounds, strict=True)):
            raise self._bad("offsets that ascend", "others")
        filled_to, hub_edges, before = 0, 0, -1
        blocks = self._list_blocks(segments, features)
        for region, first, block in blocks:
            lists, wanted, start = regions[region]
            if region != before:  # places without rows have empty lists
                indptr[filled_to + 1 : start + 1] = state[FILLED]
                before = region
            ends = indptr[start + 1 : start + len(lists)]
            bad = induce_block(
                lists, block, first, places.hints, self._offsets, base, places.bits, places.ranks, places.hub_local, wanted, state,
                ends, indices,
            )  # fmt: skip
            if bad >= 0:
                actual = str(block[bad])
                blocks.close()  # the block read ahead has arrived before its buffer is used again
                raise self._bad("rows of the table", actual)
            if state[TARGET] == len(ends):
                state[TARGET], filled_to = 0, start + len(ends)
                hub_edges = int(state[FILLED]) if hubs and region == 0 else hub_edges
        indptr[filled_to + 1 :] = state[FILLED]
        read = offsets.nbytes + sum((high - low) for _, low, high in segments) * self._blocks[0].itemsize
        return indptr, indices[: state[FILLED]], int(state[FILLED]) - hub_edges, read

    def _list_blocks(
        self, segments: list[tuple[str, int, int]], features: _Features
    ) -> Generator[tuple[int, int, NDArray[Any]], None, None]:
        """(segment, first edge, block of sources): every segment in one or more blocks. Blocks share two buffers; one is read
        while the other is looked at, and after each a share of the features is asked for, so that neither waits for all of
        the other."""
        groups = _grouped(segments, self._sizes.block_edges)
        ahead = self._read_group(segments, groups[0], 0) if groups else None
        try:
            for number, group in enumerate(groups):
                features.submit((number + 1) / len(groups))
                request, ahead = ahead, None
                if number + 1 < len(groups):
                    ahead = self._read_group(segments, groups[number + 1], number + 1)
                assert request is not None
                request.result()
                buffer, at = self._blocks[number % 2], 0
                for segment, low, high in group:
                    yield segment, low, buffer[at : at + high - low]
                    at += high - low
        finally:
            if ahead is not None:
                ahead.exception()

    def _read_group(self, segments: list[tuple[str, int, int]], group: list[tuple[int, int, int]], number: int) -> Any:
        table = segments[group[0][0]][0]
        runs = np.array([(low, high) for _, low, high in group])
        out = self._blocks[number % 2][: int((runs[:, 1] - runs[:, 0]).sum())]
        return self._reader.submit_runs({table: runs}, out={table: out})

    def close(self) -> None:
        """Let loads under way end and give everything back. May be called more than once."""
        self._closed = True
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._settle(ahead[1])
        shut_down(self._pool)
        self._reader.close()

    def __enter__(self) -> MegaBatches:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Features:
    """The rows of partitions on their way into their slots, asked for in turns, in the order in which they lie on disk."""

    def __init__(
        self, reader: Reader, table: str, x: NDArray[Any], runs: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> None:
        sort = np.argsort(runs[:, 0])
        self._reader, self._table, self._x, self._runs, self._starts = reader, table, x, runs[sort], starts[sort]
        self._asked = 0
        self._requests: list[Request] = []

    def submit(self, share: float) -> None:
        """Ask for more, so that this share of all has been asked for."""
        end = min(len(self._runs), int(np.ceil(share * len(self._runs))))
        if end > self._asked:
            wanted = slice(self._asked, end)
            out, at = {self._table: self._x}, {self._table: self._starts[wanted]}
            self._requests.append(self._reader.submit_runs({self._table: self._runs[wanted]}, out=out, at=at))
            self._asked = end

    def settle(self) -> None:
        """Wait until nothing writes into the slots any more."""
        for request in self._requests:
            request.exception()

    def result(self) -> None:
        """Wait for all that was asked for, and for what was not yet. Raises what went wrong."""
        self.submit(1.0)
        for request in self._requests:
            request.result()


def _graph_of(store: Store, name: str | None) -> Any:
    if not store.graphs:
        raise SourceError(
            f"the store at {store.path} holds no graph: pack it with one (featstore pack --graph ... --topology)"
        )
    if name is None and len(store.graphs) > 1:
        raise SourceError(f"the store has several graphs; say which: {', '.join(map(repr, store.graphs))}")
    name = next(iter(store.graphs)) if name is None else name
    if name not in store.graphs:
        raise KeyError(f"the store has no graph {name!r}; it has {', '.join(map(repr, store.graphs))}")
    return store.graphs[name]


def _grouped(segments: list[tuple[str, int, int]], block_edges: int) -> list[list[tuple[int, int, int]]]:
    """Segments cut and put together to groups of at most ``block_edges`` edges of one table: (segment, low, high)."""
    groups: list[list[tuple[int, int, int]]] = []
    room, before = 0, ""
    for number, (table, low, high) in enumerate(segments):
        if table != before:
            room, before = 0, table
        while True:
            if room == 0:
                groups.append([])
                room = block_edges
            take = min(room, high - low)
            groups[-1].append((number, low, low + take))
            low, room = low + take, room - take
            if low == high:
                break
    return groups
