"""What ``compiled.py`` measures on: a generated graph, its store, recorded traces, what is compiled of them,
and MIN in plain NumPy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from graphs import GraphFiles, generate
from harness import Sample, note
from numpy.typing import NDArray
from peers import fio
from system import cpu_seconds, drop_caches, process_io
from tables import remove

import featstore
from featstore.compile.build import CompileForecast, packs_directory
from featstore.compile.decide import OURS, Policy
from featstore.errors import BudgetError
from featstore.front.compiling import compile_trace
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.compiled.trace import CompiledTrace
from featstore.sampling.batches import SampledBatches
from featstore.sampling.neighbors import NeighborSampler, SampledSubgraph
from featstore.units import PAGE_BYTES

COLUMNS = 128
EDGES_A_NODE = 15
FANOUTS = (12, 5)
TRAIN_SHARE, QUICK_TRAIN_SHARE = 0.2, 0.03
#: Nodes of the graph for each seed of a mini-batch: at 2 M nodes 1,024 seeds, which touch 3 % of it, and 128,
#: which touch 0.4 %: two mini-batches and what a step needs have to fit 5 % of the features.
WIDE, NARROW = 2048, 16384
TABLE = "features"
TRAIN_MEMORY = 2**30  # of a loader whose cache is given by itself
COMPILE_MEMORY = 2**30


def pairs(batches: Sequence[SampledSubgraph]) -> Iterator[tuple[NDArray[np.int64], dict[str, Any]]]:
    """Mini-batches to record: node ids, and of the sample what a model needs."""
    for number in range(len(batches)):
        b = batches[number]
        yield b.node, {
            "seeds": b.node[: b.num_sampled_nodes[0]].astype(np.int32), "row": b.row.astype(np.int32),
            "col": b.col.astype(np.int32), "nodes": list(b.num_sampled_nodes),
            "edges": list(b.num_sampled_edges),
        }  # fmt: skip


@dataclass
class Data:
    """The graph, the store and the traces in a workspace; each is made when it is first asked for."""

    workspace: Path
    nodes: int
    quick: bool

    @cached_property
    def files(self) -> GraphFiles:
        share = QUICK_TRAIN_SHARE if self.quick else TRAIN_SHARE
        folder = self.workspace / f"compiled-graph-{self.nodes}-{share}"
        return generate(folder, self.nodes, self.nodes * EDGES_A_NODE, COLUMNS, share)

    @property
    def row_bytes(self) -> int:
        return 4 * COLUMNS

    @property
    def table_bytes(self) -> int:
        return self.nodes * self.row_bytes

    @cached_property
    def store(self) -> featstore.Store:
        path = self.workspace / f"compiled-{self.nodes}.store"
        if not (path / "featstore.json").exists():
            note("packing the base store")
            graph = self.files.load("indptr", mapped=True), self.files.load("indices", mapped=True)
            featstore.pack(path, self.files.path("features"), graph=graph, order="ldg", memory="1GiB").close()
        return featstore.open(path)

    def sampler(self) -> NeighborSampler:
        return NeighborSampler(self.files.load("indptr"), self.files.load("indices"), FANOUTS, 0)

    def batches(
        self, nodes_a_seed: int, epoch: int = 0, sampler: NeighborSampler | None = None
    ) -> SampledBatches:
        """The mini-batches of an epoch."""
        size = max(2, self.nodes // nodes_a_seed)
        return SampledBatches(sampler or self.sampler(), self.files.load("train"), size, epoch)

    def trace(self, nodes_a_seed: int) -> featstore.Trace:
        """The recorded mini-batches of an epoch."""
        path = self.workspace / f"compiled-{self.nodes}-{nodes_a_seed}.trace"
        if not path.exists():
            self.record(nodes_a_seed, path)
        return featstore.Trace(path)

    def record(self, nodes_a_seed: int, path: Path) -> float:
        """Sample and record an epoch; returns the seconds that took."""
        batches = self.batches(nodes_a_seed)
        begin = time.perf_counter()
        featstore.Trace.record(pairs(batches), path, overwrite=path.exists()).close()
        return time.perf_counter() - begin

    # Compiled traces.

    def compile(self, trace: featstore.Trace, name: str, **options: Any) -> Built:
        """Compile a trace anew; where the memory given is too little, with the least that works."""
        remove(packs_directory(self.store) / name)
        memory = options.pop("memory", COMPILE_MEMORY)
        while True:
            begin = time.perf_counter()
            try:
                made = compile_trace(self.store, trace, name, memory=memory, **options)
            except BudgetError as error:
                if error.needed_bytes <= memory:
                    raise
                memory = error.needed_bytes
                continue
            assert isinstance(made, featstore.Store)
            made.close()
            seconds = time.perf_counter() - begin
            note(f"compiled {name} in {seconds:.1f} s")
            return Built(CompiledTrace(self.store, name), seconds, memory)

    def forecast(self, trace: featstore.Trace, **options: Any) -> dict[str, Any]:
        """What compiling a trace would give its table."""
        found = compile_trace(
            self.store, trace, "forecast", dry_run=True, **({"memory": COMPILE_MEMORY} | options)
        )
        assert isinstance(found, CompileForecast)
        remove(packs_directory(self.store) / "forecast")
        return found.tables[TABLE] | {"record_bytes": found.record_bytes}

    def base_files(self) -> list[Path]:
        return files_of(self.store, TABLE)

    def other(self) -> Sample:
        """Another file, read by fio between two passes: the second would find the first one's in a cache of
        the host."""
        return fio_read([self.files.path("features")])

    def close(self) -> None:
        if "store" in self.__dict__:
            self.store.close()


@dataclass(frozen=True)
class Built:
    """A compiled trace, the seconds that took and the memory it was given."""

    compiled: CompiledTrace
    seconds: float
    memory_bytes: int

    @property
    def forecast(self) -> dict[str, Any]:
        found: dict[str, Any] = self.compiled.entry.forecast["tables"][TABLE]
        return found

    @property
    def forecast_seconds(self) -> float:
        return float(self.compiled.entry.forecast["seconds"])

    def files(self) -> list[Path]:
        """All files that an epoch reads of it."""
        return [path for name in self.compiled.pack.tables for path in files_of(self.compiled.pack, name)]

    def row_files(self) -> list[Path]:
        return files_of(self.compiled.pack, f"{TABLE}.packed")

    def record_pages_bytes(self) -> int:
        """Bytes of the pages that an epoch's records lie on, each read for itself."""
        offsets = self.compiled.offsets()
        return int((-(-offsets[1:] // PAGE_BYTES) - offsets[:-1] // PAGE_BYTES).sum()) * PAGE_BYTES

    def remove(self) -> None:
        path = self.compiled.pack.path
        self.compiled.close()
        remove(path)


def files_of(store: featstore.Store, name: str) -> list[Path]:
    table = store.tables[name]
    return (
        [store.path / table.entry.chunk_path(chunk) for chunk in range(table.layout.chunks)]
        if table.rows
        else []
    )


def fio_read(paths: list[Path]) -> Sample:
    """One sequential pass of fio over the files; MB/s."""
    found = fio.sequential_read(paths)
    return Sample(found.bytes / 1e6, found.seconds, found.cpu_seconds)


def load_epoch(loader: CompiledLoader, cold: list[Path], batches: int | None = None) -> Sample:
    """A round of a loader that nobody trains on, its bytes counted by the kernel; or so many of its
    mini-batches after the first one."""
    drop_caches(cold)
    io, cpu, begin = process_io()["read_bytes"], cpu_seconds(), time.perf_counter()
    for index, batch in enumerate(loader):
        del batch
        if batches is not None and index == 0:
            io, cpu, begin = process_io()["read_bytes"], cpu_seconds(), time.perf_counter()
        if index == batches:
            break
    seconds = time.perf_counter() - begin
    read = process_io()["read_bytes"] - io
    return Sample(read / 1e6, seconds, cpu_seconds() - cpu, {"read_bytes": read})


def check_epoch(
    loader: CompiledLoader,
    trace: featstore.Trace,
    files: GraphFiles,
    batches: int | None = None,
    rows: int = 50,
) -> None:
    """Go through a round, or its beginning, and compare some rows of every mini-batch with the source. Raises
    AssertionError."""
    truth = files.load("features", mapped=True)
    for index, batch in enumerate(loader):
        ids = next(iter(trace.ids(index).values()))
        if len(batch.x) != len(ids):
            raise AssertionError(f"mini-batch {index} has {len(batch.x)} rows for {len(ids)} nodes")
        chosen = np.linspace(0, len(ids) - 1, rows).astype(np.int64)
        if not np.array_equal(np.asarray(batch.x)[chosen], truth[ids[chosen]]):
            raise AssertionError(f"mini-batch {index} has wrong rows")
        del batch
        if index == batches:
            break
    truth._mmap.close()  # type: ignore[attr-defined]


# The paper's design.


class PaperPolicy:
    """DiskGNN's placement and its order of shared rows, as a policy of the compiler. Of one table."""

    def __init__(self) -> None:
        self._order: Callable[..., Any] | None = None
        self.policy = Policy("DiskGNN", self._choose, lambda group, mask: self._order(group, mask))  # type: ignore[misc]

    def _choose(
        self, misses: Any, table_rows: int, *given: Any, extent_bytes_max: int, memory_bytes: int,
        seed: int = 0, **_: Any
    ) -> Any:  # fmt: skip
        import yardsticks

        base_layout, model, disk_bytes = given[-3:]
        placement = yardsticks.paper_choice(misses, table_rows, base_layout.row_bytes, disk_bytes)
        self._order = yardsticks.minhash_order(misses, table_rows, seed)
        return placement, yardsticks.paper_forecast(
            placement, misses, table_rows, base_layout, model, extent_bytes_max=extent_bytes_max, seed=seed
        )


class Timed:
    """A policy whose choice is timed: ``seconds``."""

    def __init__(self, policy: Policy = OURS) -> None:
        self.seconds = 0.0
        self._choose = policy.choose
        self.policy = Policy(policy.name, self._timed, policy.order)

    def _timed(self, *arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self._choose(*arguments, **options)
        finally:
            self.seconds += time.perf_counter() - begin


# The lower bound, once more.


def missed_by_min(
    batches: list[NDArray[np.int64]], table_rows: int, capacity_rows: int
) -> list[NDArray[np.int64]]:
    """The rows that each mini-batch misses under Belady's MIN, in the second round over them: plain NumPy,
    apart from the library.

    After each mini-batch those rows stay, of what was in memory and what it brought, whose next use is
    nearest.
    """
    count, next_of = len(batches), [np.empty(0, np.int64)] * len(batches)
    ahead = np.zeros(table_rows, np.int64)
    for turn in (1, 0):  # backward, twice: the use after the last one is in the next round
        for number in range(count - 1, -1, -1):
            next_of[number] = ahead[batches[number]]
            ahead[batches[number]] = number + turn * count
    due, held, there = np.zeros(table_rows, np.int64), np.empty(0, np.int64), np.zeros(table_rows, bool)
    missed = []
    for turn in (0, 1):
        for number, rows in enumerate(batches):
            new = rows[~there[rows]]
            if turn:
                missed.append(new)
            due[rows] = next_of[number] + turn * count
            there[new] = True
            held = np.concatenate([held, new])
            if len(held) > capacity_rows:
                order = (
                    np.argpartition(due[held], capacity_rows - 1) if capacity_rows else np.arange(len(held))
                )
                there[held[order[capacity_rows:]]] = False
                held = held[order[:capacity_rows]]
    return missed
