"""What a user does with a store that may come from a stranger.

Each use ends in right rows or in one of featstore's errors; what is asserted here holds for whatever a store
says.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import corpus
import numpy as np
from numpy.typing import NDArray

import featstore
from featstore.errors import FeatstoreError

Random = np.random.Generator
MEMORY = "6MiB"


class Wrong(AssertionError):
    """What came out is not what is in the store."""


def hold(condition: Any, what: str) -> None:
    if not condition:
        raise Wrong(what)


class Truth:
    """The rows of the corpus by node id, and by their content the node ids."""

    def __init__(self, seed: int) -> None:
        self.rows = corpus.rows_of(seed)
        self.known = {row.tobytes() for row in self.rows}

    def check(self, ids: NDArray[Any], got: NDArray[Any], pristine: bool) -> None:
        """Where nothing about the rows was changed they are the right ones; else each is one of the table,
        none for two nodes."""
        if pristine:
            hold(np.array_equal(got, self.rows[ids]), "rows are not those of their nodes")
        elif got.shape == (corpus.ROWS, corpus.WIDTH):
            found = {row.tobytes() for row in got}
            if found <= self.known:
                hold(len(found) == len(got), "two nodes have one row")


def look(path: Path, truth: Truth, rng: Random, pristine: bool) -> None:
    with featstore.open(path) as store:
        repr(store)
        for table in store.tables.values():
            hold(np.all(np.diff(table.partition_offsets.astype(object)) >= 0), "partition offsets fall")
            for values in (
                table.row_of_node(),
                table.node_of_row(),
                table.rows_by_degree(),
                table.rows_by_degree(5),
            ):
                hold(values is None or len(np.unique(values)) == len(values), "a map has a row twice")
            table.maps()
        for name in store.arrays:
            store.arrays[name].sum()
        for graph in store.graphs.values():
            graph.hub_rows(3), graph.hub_rows()


def read(path: Path, truth: Truth, rng: Random, pristine: bool) -> None:
    with featstore.open(path) as store:
        engine = str(rng.choice(["uring", "threads", "mmap"]))
        static: Any = [None, "auto", rng.integers(0, corpus.ROWS, 20)][rng.integers(3)]
        names = list(store.tables) if rng.random() < 0.8 else None
        if isinstance(static, np.ndarray) and (names is None or len(names) != 1):
            static = None
        with store.reader(
            memory=MEMORY, engine=engine, static=static, tables=names, verify=bool(rng.random() < 0.8)
        ) as reader:
            for name, table in store.tables.items():
                ids = np.arange(min(table.rows, 2 * corpus.ROWS))
                got = reader.read({name: ids})[name]
                if name == "features":
                    truth.check(ids, got, pristine)
                some = rng.integers(0, max(1, len(ids)), 7) if len(ids) else ids
                hold(
                    reader.read({name: some})[name].tobytes() == got[some].tobytes(),
                    "a row is another the second time",
                )
                reader.plan({name: some})
                reader.read_runs({name: [(0, len(ids) // 2)]})


def sample(path: Path, truth: Truth, rng: Random, pristine: bool) -> None:
    from featstore.sampling.neighbors import NeighborSampler

    with featstore.open(path) as store:
        graph = next(iter(store.graphs.values()), None)
        if graph is None:
            return
        indptr, indices = graph.csc()
        nodes = graph.table.rows
        hold(
            len(indptr) == nodes + 1 and indptr[0] == 0 and indptr[-1] == len(indices) == graph.edges,
            "the CSC is none",
        )
        hold(
            (np.sort(indptr) == indptr).all()
            and (len(indices) == 0 or 0 <= indices.min() <= indices.max() < nodes),
            "the CSC is none",
        )
        seeds = rng.permutation(nodes)[:20]
        fanouts = [int(rng.choice([-1, 1, 5])), 3]
        with store.sampler(fanouts, memory=int(rng.choice([3, 8])) * 2**20) as sampler:
            batch = sampler.sample(seeds, 1)
            hold(len(np.unique(batch.node)) == len(batch.node), "a node twice in a mini-batch")
            hold(
                np.isin(batch.node, np.arange(nodes)).all() and (batch.edge_id < graph.edges).all(),
                "no node, no edge",
            )
            same = NeighborSampler(indptr, indices, fanouts).sample(seeds, 1)
            if pristine:
                hold(
                    np.array_equal(batch.node, same.node) and np.array_equal(batch.row, same.row),
                    "not the neighbours of the CSC",
                )


def mega(path: Path, truth: Truth, rng: Random, pristine: bool) -> None:
    with featstore.open(path) as store:
        train: Any = "train" if rng.random() < 0.5 and "train" in store.arrays else None
        with store.mega_batches(memory="40MiB", train=train, resident=2) as batches:
            for batch in batches:
                indptr, indices = batch.indptr, batch.indices
                hold(
                    indptr[0] == 0 and indptr[-1] == len(indices) and (np.sort(indptr) == indptr).all(),
                    "the subgraph is none",
                )
                hold(
                    len(indices) == 0 or 0 <= indices.min() <= indices.max() < len(batch.node),
                    "an edge from nowhere",
                )
                there = batch.places[batch.node[batch.places] >= 0]
                if pristine:
                    hold(
                        np.array_equal(batch.x[there], truth.rows[batch.node[there]]),
                        "rows are not those of their nodes",
                    )
                break


def orders(path: Path, truth: Truth, rng: Random, pristine: bool) -> None:
    with featstore.open(path) as store:
        labels = store.arrays["labels"] if "labels" in store.arrays and rng.random() < 0.4 else None
        train = store.arrays["train"] if "train" in store.arrays and rng.random() < 0.8 else np.arange(40)
        kind = featstore.ProximityOrder if rng.random() < 0.7 else featstore.PartitionOrder
        made = kind(store, train, labels=labels, batch_size=16, sequences="auto" if labels is not None else 5)
        positions = list(made)
        hold(sorted(positions) == list(range(len(made.train))), "a training node is left out, or comes twice")


def verify(path: Path, truth: Truth, rng: Random, pristine: bool) -> None:
    featstore.verify(path, access="buffered")


def inspect(path: Path, truth: Truth, rng: Random, pristine: bool) -> None:
    from featstore_cli.inspect import command

    with redirect_stdout(io.StringIO()):
        command.main(
            [str(path), *["--partitions"][: rng.integers(2)], *["--json"][: rng.integers(2)]],
            standalone_mode=False,
        )


def train_compiled(path: Path, truth: Truth, rng: Random, pristine: bool) -> None:
    """``path``: the compiled trace."""
    with featstore.open(path.parents[1]) as base, base.compiled(path.name) as compiled:
        order = (
            rng.permutation(len(compiled))
            if compiled.entry.residency == "fixed" and rng.random() < 0.3
            else None
        )
        with compiled.loader(memory=None if rng.random() < 0.5 else "24MiB", order=order) as loader:
            state = None
            for number, batch in enumerate(loader):
                if number == 3:
                    state = loader.state_dict()
                hold(
                    len(batch.x) == 0 or pristine is False or {r.tobytes() for r in batch.x} <= truth.known,
                    "rows of nowhere",
                )
            sum(len(batch.x) for batch in loader)
            if state is not None and rng.random() < 0.3:
                loader.load_state_dict(state)
                sum(len(batch.x) for batch in loader)


def follow_trace(path: Path, truth: Truth, rng: Random, pristine: bool) -> None:
    with featstore.Trace(path) as trace:
        total = 0
        for number in range(len(trace)):
            for name, ids in trace.ids(number).items():
                total += len(ids)
                hold(len(ids) == trace.counts[name][number], "another number of ids than was said")
                hold(
                    len(ids) == 0 or 0 <= ids.min() <= ids.max() <= trace.id_max[name],
                    "ids beyond the largest",
                )
            trace.batch(number)
        hold(total == sum(int(c.sum()) for c in trace.counts.values()), "another number of ids than was said")
        featstore.verify(trace.path)


def compile_trace(path: Path, truth: Truth, rng: Random, pristine: bool) -> None:
    store = path.parent / corpus.STORE
    options: dict[str, Any] = {
        "residency": str(rng.choice(["min", "fixed"])),
        "dry_run": bool(rng.random() < 0.5),
    }
    made = featstore.compile_trace(
        store, path, "again", memory="16MiB", overwrite=True, disk_door=corpus.QuickDisk(), **options
    )
    if isinstance(made, featstore.Store):
        made.close()


def warm(path: Path, truth: Truth, rng: Random, pristine: bool) -> None:
    batches = [rng.permutation(corpus.ROWS)[:30] for _ in range(2)]
    with featstore.open(path) as store:
        policy = str(rng.choice(["auto", "lru", "s3-fifo", "fifo", "static"]))
        with featstore.OnlineLoader(
            store, batches, memory=int(rng.choice([8, 12])) * 2**20, policy=policy, warm="warm"
        ) as loader:
            for ids, batch in zip(batches, loader, strict=True):
                truth.check(ids, np.asarray(batch.x), pristine)


Use = Callable[[Path, Truth, Random, bool], None]
OF_STORES: tuple[Use, ...] = (look, read, read, sample, mega, orders, verify, inspect)
OF_PACKS: tuple[Use, ...] = (train_compiled, train_compiled, look, verify, inspect)
OF_TRACES: tuple[Use, ...] = (follow_trace, follow_trace, compile_trace, inspect)
OF_CACHES: tuple[Use, ...] = (warm,)

#: Errors that a stranger's file may end in; a mini-batch that needs more memory than the budget is one of
#: them.
FINE = (FeatstoreError,)
