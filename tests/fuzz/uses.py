"""What a user does with a store that may come from a stranger.

Each use ends in right rows or in one of featstore's errors; what is asserted here holds for whatever a store
says. What only reads the mutant's manifest once (most uses) shares one open store, :attr:`Target.store`.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import corpus
import inline
import numpy as np
from files import mutate_state
from numpy.typing import NDArray

import featstore
from featstore.compile.build import compile_trace as compile_to_path
from featstore.errors import FeatstoreError
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.mega.loader import PartitionsLoader
from featstore.loaders.mega.sets import PartitionSets
from featstore.loaders.online.loader import OnlineLoader
from featstore.plan.cost import DEFAULT, load_models, save_model
from featstore.trace.log_file import LOG_NAME, how_far

Random = np.random.Generator
MEMORY = "6MiB"


class Wrong(AssertionError):
    """What came out is not what is in the store."""


def hold(condition: Any, what: str) -> None:
    if not condition:
        raise Wrong(what)


class Target:
    """A mutant, or what it belongs to: its path; ``pristine``, whether rows and what finds them are as they
    were; ``base``, the store of the corpus where it is another one, open."""

    def __init__(self, path: Path, seed: int, *, base: Any = None, pristine: bool = True) -> None:
        self.path, self.seed, self.pristine, self.base = path, seed, pristine, base
        self.refused = False  # by whoever opened it
        self._store: Any = None
        self.rows = corpus.rows_of(seed)
        self._known = {row.tobytes() for row in self.rows}

    @property
    def store(self) -> Any:
        """The mutant, open."""
        if self._store is None:
            try:
                self._store = featstore.open(self.path)
            except FeatstoreError:
                self.refused = True
                raise
        return self._store

    def close(self) -> None:
        store, self._store, self.refused = self._store, None, False
        if store is not None:
            store.close()

    def check(self, ids: NDArray[Any], got: NDArray[Any]) -> None:
        """Where nothing about the rows was changed they are the right ones; else each is one of the table,
        none for two nodes."""
        if self.pristine:
            hold(np.array_equal(got, self.rows[ids]), "rows are not those of their nodes")
        elif got.shape == (corpus.ROWS, corpus.WIDTH):
            found = {row.tobytes() for row in got}
            if found <= self._known:
                hold(len(found) == len(got), "two nodes have one row")

    def come_from_it(self, rows: Any) -> bool:
        """Whether all are rows of the table, where nothing about them was changed. ``rows``: what a loader
        gives, an array or a tensor, or several by name."""
        parts = rows.values() if isinstance(rows, dict) else (rows,)
        return not self.pristine or all(
            self._known.issuperset(row.tobytes() for row in np.asarray(part)) for part in parts
        )


def look(target: Target, rng: Random) -> None:
    store = target.store
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


def read(target: Target, rng: Random) -> None:
    store = target.store
    engine = "uring" if inline.threads else str(rng.choice(["threads", "mmap"]))
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
                target.check(ids, got)
            some = rng.integers(0, max(1, len(ids)), 7) if len(ids) else ids
            hold(
                reader.read({name: some})[name].tobytes() == got[some].tobytes(),
                "a row is another the second time",
            )
            reader.plan({name: some})
            reader.read_runs({name: [(0, len(ids) // 2)]})


def sample(target: Target, rng: Random) -> None:
    from featstore.sampling.neighbors import NeighborSampler

    store = target.store
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
        if target.pristine:
            hold(
                np.array_equal(batch.node, same.node) and np.array_equal(batch.row, same.row),
                "not the neighbours of the CSC",
            )


def mega(target: Target, rng: Random) -> None:
    store = target.store
    train: Any = "train" if rng.random() < 0.5 and "train" in store.arrays else None
    with PartitionSets(store, memory="40MiB", train=train, resident=2) as batches:
        for batch in batches:
            (rows,), (lists,) = batch.rows.values(), batch.lists.values()
            indptr, indices = lists.indptr, lists.indices
            hold(
                indptr[0] == 0 and indptr[-1] == len(indices) and (np.sort(indptr) == indptr).all(),
                "the subgraph is none",
            )
            hold(
                len(indices) == 0 or 0 <= indices.min() <= indices.max() < len(rows.node),
                "an edge from nowhere",
            )
            there = rows.places[rows.node[rows.places] >= 0]
            if target.pristine:
                hold(
                    rows.x is not None and np.array_equal(rows.x[there], target.rows[rows.node[there]]),
                    "rows are not those of their nodes",
                )
            break


def orders(target: Target, rng: Random) -> None:
    store = target.store
    labels = store.arrays["labels"] if "labels" in store.arrays and rng.random() < 0.4 else None
    train = store.arrays["train"] if "train" in store.arrays and rng.random() < 0.8 else np.arange(40)
    kind = featstore.ProximityOrder if rng.random() < 0.7 else featstore.PartitionOrder
    made = kind(store, train, labels=labels, batch_size=16, sequences="auto" if labels is not None else 5)
    positions = list(made)
    hold(sorted(positions) == list(range(len(made.train))), "a training node is left out, or comes twice")


def verify(target: Target, rng: Random) -> None:
    featstore.verify(target.path, access="buffered")


def inspect(target: Target, rng: Random) -> None:
    _inspect(target, [*["--partitions"][: rng.integers(2)], *["--json"][: rng.random() < 0.9]])


def inspect_plainly(target: Target, rng: Random) -> None:
    _inspect(target, ["--json"][: rng.random() < 0.9])


def _inspect(target: Target, options: list[str]) -> None:
    from featstore_cli.inspect import command

    with redirect_stdout(io.StringIO()):
        command.main([str(target.path), *options], standalone_mode=False)


# Compiled traces, traces, saved caches.


def train_compiled(target: Target, rng: Random) -> None:
    """``target``: the compiled trace."""
    with target.base.compiled(target.path.name) as compiled:
        fixed = compiled.entry.residency == "fixed"
        order = rng.permutation(len(compiled)) if fixed and rng.random() < 0.3 else None
        device = "cpu" if fixed or rng.random() < 0.1 else None
        with CompiledLoader(
            compiled, memory=None if rng.random() < 0.5 else "24MiB", order=order, device=device
        ) as loader:
            state = None
            for number, batch in enumerate(loader):
                if number == 3:
                    state = loader.state()
                hold(target.come_from_it(batch.x), "rows of nowhere")
            if rng.random() < 0.3:
                if state is not None and rng.random() < 0.5:
                    loader.load_state(state)
                sum(len(batch.x) for batch in loader)


def follow_trace(target: Target, rng: Random) -> None:
    with featstore.Trace(target.path) as trace:
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


def compile_trace(target: Target, rng: Random) -> None:
    compile_to_path(
        target.base, target.path, "again", memory="16MiB", overwrite=True, disk_door=corpus.QuickDisk(),
        residency=str(rng.choice(["min", "fixed"])), dry_run=bool(rng.random() < 0.7),
    )  # fmt: skip


def warm(target: Target, rng: Random) -> None:
    batches = [rng.permutation(corpus.ROWS)[:30] for _ in range(2)]
    policy = str(rng.choice(["auto", "lru", "s3-fifo", "fifo", "static"]))
    options: dict[str, Any] = {"memory": int(rng.choice([8, 12])) * 2**20, "policy": policy, "warm": "warm"}
    if rng.random() < 0.2:
        options |= {"device": "cpu", "device_memory": 40 * corpus.WIDTH * 4}
    with OnlineLoader(target.base, batches, **options) as loader:
        for ids, batch in zip(batches, loader, strict=True):
            target.check(ids, np.asarray(batch.x))


# Measured device models.


def plan(target: Target, rng: Random) -> None:
    with target.base.reader(memory=MEMORY) as reader:
        ids = rng.permutation(corpus.ROWS)[:40]
        reader.plan(ids)
        target.check(ids, reader.read(ids))


def plan_trace(target: Target, rng: Random) -> None:
    trace = target.path.parent / corpus.TRACE
    compile_to_path(target.base, trace, "again", memory="16MiB", dry_run=True, disk_door=corpus.QuickDisk())


def keep_model(target: Target, rng: Random) -> None:
    load_models()
    save_model("another/uring/direct", DEFAULT)


# States of loaders, as they come back from checkpoints.


def resume_compiled(target: Target, rng: Random) -> None:
    name = corpus.PACKS[rng.integers(2)]
    with target.base.compiled(name) as compiled, CompiledLoader(compiled, device="cpu") as loader:
        loader.load_state(mutate_state(loader.state() | {"next": 3}, rng))
        for batch in loader:
            hold(target.come_from_it(batch.x), "rows of nowhere")


def resume_online(target: Target, rng: Random) -> None:
    batches = [rng.permutation(corpus.ROWS)[:30] for _ in range(3)]
    with OnlineLoader(target.base, batches, memory="8MiB") as loader:
        loader.load_state(mutate_state(loader.state() | {"next": 1}, rng))
        _some(loader)


def resume_mega(target: Target, rng: Random) -> None:
    with PartitionsLoader(target.base, [3], batch_size=20, memory="40MiB", resident=2) as loader:
        loader.load_state(mutate_state(loader.state() | {"next": 1}, rng))
        for batch in itertools.islice(loader, 4):
            hold(target.come_from_it(batch.x), "rows of nowhere")


def resume_order(target: Target, rng: Random) -> None:
    made = featstore.ProximityOrder(target.base, target.base.arrays["train"], batch_size=16, sequences=3)
    made.load_state_dict(mutate_state(made.state_dict() | {"next": 20}, rng))
    hold(set(made) <= set(range(len(made.train))), "a training node that is none")


def _some(items: Any) -> None:
    for _ in itertools.islice(items, 4):
        pass


# What was stopped, and is gone on with.


def resume_pack(target: Target, rng: Random) -> None:
    corpus.do_pack(target.path, target.path.name, target.seed, corpus.QuickDisk(), resume=True)
    with featstore.open(target.path) as store, store.reader(memory=MEMORY) as reader:
        reader.read(np.arange(corpus.ROWS))
    look(target, rng)
    sample(target, rng)


def resume_compiling(target: Target, rng: Random) -> None:
    with featstore.Trace(target.base.path.parent / corpus.TRACE) as trace:
        corpus.do_compile(target.base, trace, corpus.HALF, corpus.QuickDisk(), resume=True)
    train_compiled(target, rng)


def resume_recording(target: Target, rng: Random) -> None:
    corpus.do_record(target.path, target.seed, corpus.batches_of(target.seed), resume=True).close()
    follow_trace(target, rng)


def unfinished(target: Target, rng: Random) -> None:
    """Look at what was stopped, without going on."""
    if (target.path / LOG_NAME).exists():
        how_far(target.path)
    inspect_plainly(target, rng)


def sweep(target: Target, rng: Random) -> None:
    """Remove what was stopped."""
    from featstore_cli.gc import command

    with redirect_stdout(io.StringIO()):
        command.main([str(target.path), *["--unfinished"][: rng.integers(2)]], standalone_mode=False)


Use = Callable[[Target, Random], None]

#: By kind of mutant: what is done with it, and how often.
OF: dict[str, dict[Use, float]] = {
    "store": {look: 0.9, read: 0.6, sample: 0.6, mega: 0.5, orders: 0.6, verify: 0.12, inspect: 0.12},
    "pack": {train_compiled: 0.8, look: 0.8, verify: 0.12, inspect: 0.12},
    "trace": {follow_trace: 1, compile_trace: 0.5, inspect_plainly: 0.2},
    "cache": {warm: 1},
    "models": {plan: 1, plan_trace: 0.3, keep_model: 1},
    "state": {resume_compiled: 0.3, resume_online: 1, resume_mega: 0.5, resume_order: 1},
    "unfinished": {resume_pack: 1, unfinished: 0.2, verify: 0.1, sweep: 0.1},
    "half": {resume_compiling: 1, unfinished: 0.2, sweep: 0.1},
    "recording": {resume_recording: 1, unfinished: 0.5},
}
#: By kind of file: uses that do not look at it, and are left out where nothing else was changed.
NOT_OF: dict[str, frozenset[Use]] = {
    "array": frozenset({read, sample}),
    "graph": frozenset({read}),
    "metadata": frozenset({look, read, sample, mega, orders, train_compiled}),
    "checksums": frozenset({orders}),
    "records": frozenset({look}),
}


def concerned(kind: str, files: list[str]) -> dict[Use, float]:
    """What is done with a mutant of a kind in which these kinds of files were changed, and how often."""
    idle = frozenset.intersection(*(NOT_OF.get(file, frozenset()) for file in files))
    return {use: share for use, share in OF[kind].items() if use not in idle}


#: Uses that look at the mutant through the one open store.
OF_OPEN = frozenset({look, read, sample, mega, orders})
NAMES = sorted({use.__name__ for uses in OF.values() for use in uses})

#: What a use may end in; a mini-batch that needs more memory than the budget is one of them.
FINE = (FeatstoreError,)
