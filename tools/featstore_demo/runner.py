"""Demo runner: graph, pack, every way to train, report.

1. A graph is made up (:func:`featstore_demo.graph.generate`) or loaded from an .npz file.
2. It is packed into a store.
3. A worker process for each way trains the same model by the same loop: by the modes of the store's loader
   within the given memory, and with all rows in memory, an epoch each in turn; then by np.memmap within the
   same memory.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from featstore.errors import ArgumentError, SourceError, StoreExistsError
from featstore.units import format_bytes, parse_bytes
from featstore_demo.bounds import memory_group
from featstore_demo.graph import DemoGraph, GraphRecipe, generate, load, write_topology
from featstore_demo.report import WAYS, DemoReport, Way, held_against
from featstore_demo.training import TrainingPlan, digest
from featstore_demo.turns import Trainer
from featstore_demo.worker import Job, Progress, read_ids, tiny_of

__all__ = ["run"]

# Rows that are read for each seed cost memory and time by their bytes: (largest row, seeds, fan-outs).
_SHAPES = ((2 << 10, 128, (5, 3, 2)), (8 << 10, 64, (5, 3, 2)), (None, 32, (4, 3, 2)))
_PACK_MEMORY = "512MiB"
_STEPS_WANTED = 400
_EVALUATION_BYTES = 1 << 30
_TESTED_MAX = 4000
#: np.memmap is given so many seconds to train; what a whole epoch would take is extrapolated then.
_MEMMAP_SECONDS = 6.0
#: Partitions are so small that about this many would fill the memory (of which half is for those that are
#: loading). Most partitions are of few classes: it takes many for a mega-batch to have its share of each,
#: without which training suffers.
_PARTITIONS_PER_MEMORY = 512
_PARTITIONS_MIN = 16
_PARTITION_NODES_MIN = 50
#: The made-up graph is random within its classes, so that no order keeps most neighbours together; hubs make
#: up for it.
_HUB_SHARE = 0.05


def run(
    *,
    ways: Sequence[str] = (),
    memory: str | int = "96MiB",
    data: str | os.PathLike[str] | None = None,
    workdir: str | os.PathLike[str] | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    fanouts: Sequence[int] | None = None,
    hidden: int = 64,
    seed: int = 0,
    engine: str | None = None,
    recipe: GraphRecipe | None = None,
    memmap_seconds: float = _MEMMAP_SECONDS,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> DemoReport:
    """Pack a graph, train a model on it in several ways with the same seeds, and compare.

    Args:
        ways: of :data:`featstore_demo.report.WAYS`; all where none is named. Memory, which the others are
            held against, always is among them.
        memory: of the loader in each mode, and of np.memmap, bytes or a size.
        data: an .npz file (:func:`featstore_demo.graph.load` names the keys), else a graph is made up by
            ``recipe``.
        workdir: an existing directory in which the store is kept as ``store``, which must not be there yet;
            else all goes to a temporary one, which is removed.
        epochs, batch_size, fanouts: (one number a layer) follow from the graph and its row size where not
            given.
        engine: name of the I/O engine, else the loaders pick.
        memmap_seconds: np.memmap ends after so many seconds of training.
        progress: ``progress(stage, done, total)`` is called as things go on.
        say: is told a sentence of each step when it begins or is done.

    Raises ArgumentError for a way that there is not, SourceError for a graph that cannot be used,
    StoreExistsError, ImportError where PyTorch is missing, FeatstoreError if a way fails (too little memory,
    for example).
    """
    from featstore.arguments import need_torch

    need_torch("the demo")
    for way in ways:
        if way not in WAYS:
            raise ArgumentError(f"the demo knows {', '.join(WAYS)}, not {way!r}")
    memory_bytes = parse_bytes(memory)
    tell = progress if progress is not None else _no_progress
    speak = say if say is not None else _unheard
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="featstore-demo-", dir=_parent(workdir)) as folder:
        scratch = Path(folder)
        store_path = scratch / "store" if workdir is None else Path(workdir) / "store"
        if os.path.lexists(store_path):
            raise StoreExistsError(
                f"{store_path} exists, and the demo would write its own store there: move it away, or give "
                "another directory"
            )
        recipe = recipe or GraphRecipe(seed=seed)
        speak(f"making up a graph of {recipe.node_count:,} nodes" if data is None else f"reading {data}")
        graph, generate_seconds = _graph(data, recipe, scratch, tell)
        plan = _training_plan(graph, epochs, batch_size, fanouts, hidden, seed)
        test_total, graph = len(graph.test_idx), _tested(graph, plan)
        write_topology(graph, scratch)
        table_bytes = graph.row_bytes * graph.node_count
        speak(f"packing its rows, {format_bytes(table_bytes)}")
        pack_seconds = _pack(graph, store_path, _partitions(graph, memory_bytes), seed, tell)
        job = Job(plan, "memory", str(scratch), str(store_path), memory_bytes, engine)
        _make_tiny(job)
        trained = _Ways(job, graph, tell, speak).train(ways or WAYS, memmap_seconds)
        return DemoReport(
            graph=graph.name,
            node_count=graph.node_count,
            edge_count=len(graph.indices),
            class_count=graph.class_count,
            row_bytes=graph.row_bytes,
            table_bytes=table_bytes,
            memory_bytes=memory_bytes,
            epochs=plan.epochs,
            batch_size=plan.batch_size,
            fanouts=plan.fanouts,
            hidden=hidden,
            seed=seed,
            generate_seconds=generate_seconds,
            pack_seconds=pack_seconds,
            store_bytes=sum(path.stat().st_size for path in store_path.rglob("*") if path.is_file()),
            store_path=None if workdir is None else str(store_path),
            test_count=len(graph.test_idx),
            test_total=test_total,
            seconds=time.perf_counter() - began,
            ways=trained,
        )


def _no_progress(stage: str, done: int, total: int) -> None:
    """Nobody watches."""


def _unheard(sentence: str) -> None:
    """Nobody listens."""


def _parent(workdir: str | os.PathLike[str] | None) -> str | None:
    if workdir is None:
        return None
    if not Path(workdir).is_dir():
        raise SourceError(f"the working directory {os.fspath(workdir)} does not exist; create it first")
    return os.fspath(workdir)


def _graph(
    data: str | os.PathLike[str] | None, recipe: GraphRecipe, scratch: Path, tell: Progress
) -> tuple[DemoGraph, float]:
    """The graph, and the seconds that making it up took (0 if it was loaded)."""
    if data is not None:
        return load(Path(data), scratch), 0.0
    tell("generate", 0, 1)
    began = time.perf_counter()
    graph = generate(scratch, recipe)
    tell("generate", 1, 1)
    return graph, time.perf_counter() - began


def _training_plan(
    graph: DemoGraph,
    epochs: int | None,
    batch_size: int | None,
    fanouts: Sequence[int] | None,
    hidden: int,
    seed: int,
) -> TrainingPlan:
    """What is trained, sized by the rows: about the same number of steps, and of bytes per step, for any
    graph."""
    shape = next(shape for shape in _SHAPES if shape[0] is None or graph.row_bytes <= shape[0])
    batch_size = shape[1] if batch_size is None else batch_size
    fanouts = shape[2] if fanouts is None else tuple(fanouts)
    if batch_size < 1 or not fanouts or (epochs is not None and epochs < 1):
        raise SourceError("the demo needs at least one epoch, one seed a mini-batch and one fan-out")
    if not (len(graph.train_idx) and len(graph.test_idx)):
        raise SourceError(f"{graph.name}: the training and the test split each need a labelled node")
    if epochs is None:
        steps = -(-len(graph.train_idx) // batch_size)
        epochs = min(10, max(2, round(_STEPS_WANTED / steps)))
    return TrainingPlan(epochs, batch_size, fanouts, hidden, seed, graph.class_count, graph.feature_count)


def _tested(graph: DemoGraph, plan: TrainingPlan) -> DemoGraph:
    """The graph with only so many test nodes as are tested. A split may be sorted (by year, by class): they
    are drawn, not cut off."""
    rows_per_seed = 1
    for fanout in reversed(plan.fanouts):
        rows_per_seed = 1 + (fanout if fanout > 0 else 10) * rows_per_seed
    count = min(_TESTED_MAX, max(256, _EVALUATION_BYTES // (rows_per_seed * graph.row_bytes)))
    drawn = np.random.default_rng(plan.seed).permutation(graph.test_idx)[:count]
    return replace(graph, test_idx=drawn)


def _partitions(graph: DemoGraph, memory_bytes: int) -> int:
    wanted = _PARTITIONS_PER_MEMORY * graph.row_bytes * graph.node_count // memory_bytes
    return max(min(_PARTITIONS_MIN, graph.node_count), min(wanted, graph.node_count // _PARTITION_NODES_MIN))


def _pack(graph: DemoGraph, path: Path, partitions: int, seed: int, tell: Progress) -> float:
    """Pack rows and topology; returns the seconds."""
    import featstore

    def progress(step: Any) -> None:
        counted = step.total_bytes is not None  # an order is sought without
        tell("pack", step.done_bytes if counted else 0, step.total_bytes or 0)

    began = time.perf_counter()
    featstore.pack(
        path, graph.features, graph=(graph.indptr, graph.indices), topology=True, partitions=partitions,
        hubs=_HUB_SHARE, seed=seed, memory=_PACK_MEMORY, progress=progress,
    ).close()  # fmt: skip
    return time.perf_counter() - began


def _make_tiny(job: Job) -> None:
    """The tiny graph on which workers begin."""
    tiny = tiny_of(job)
    directory = Path(tiny.directory)
    directory.mkdir()
    recipe = GraphRecipe(600, 6000, job.plan.feature_count, job.plan.class_count, train_share=0.2)
    graph = generate(directory, recipe)
    write_topology(graph, directory)
    _pack(graph, Path(tiny.store), _PARTITIONS_MIN, 0, _no_progress)


@dataclass(frozen=True)
class _Ways:
    """Trains in every way. ``job``: that of training in memory."""

    job: Job
    graph: DemoGraph
    tell: Progress
    say: Callable[[str], None]

    def train(self, wanted: Sequence[str], memmap_seconds: float) -> tuple[Way, ...]:
        """The ways wanted, and memory, in the order of :data:`WAYS`."""
        # Modes first: what they refuse, too little memory, is known soon.
        ways = [way for way in (*WAYS[2:], "memory") if way in wanted or way == "memory"]
        jobs = []
        for way in ways:
            evaluate = way in ("memory", "compiled", "partitions")  # the others train memory's model
            jobs.append(replace(self.job, way=way, evaluate=evaluate, keep_ids=way == "partitions"))
        found = dict(zip(ways, self._in_turns(jobs)))
        memory = found["memory"]
        if "np.memmap" in wanted:
            found["np.memmap"] = self._memmap(memory, memmap_seconds)
        rows = np.load(self.graph.features, mmap_mode="r", allow_pickle=False)
        return tuple(
            held_against(memory, found[way], way, self._drawn(found[way], rows, way))
            for way in WAYS
            if way in found
        )

    def _memmap(self, memory: dict[str, Any], seconds: float) -> dict[str, Any]:
        """np.memmap, in a memory cgroup where there can be one: for rows it has the same memory as the modes,
        and for training what that took in memory."""
        taken = memory["peak_rss_bytes"] - memory["baseline_rss_bytes"]
        training = max(0, taken - self.graph.row_bytes * self.graph.node_count)
        with ExitStack() as stack:
            group, why = stack.enter_context(memory_group(self.job.memory_bytes + training))
            job = replace(
                self.job, way="np.memmap", group=None if group is None else str(group), seconds_max=seconds
            )
            (results,) = self._in_turns([job])
        note = "page cache and training within the same memory, by a cgroup"
        if group is None:
            note = f"THE PAGE CACHE WAS NOT BOUNDED: {why}"
        if results["extrapolated"]:
            steps = f"{len(results['losses']):,} of {len(memory['losses']):,}"
            note += f"; ended after {steps} mini-batches ({seconds:g} s), the rest extrapolated"
        return results | {"note": note, "bounded": group is not None}

    def _drawn(self, results: dict[str, Any], rows: Any, way: str) -> list[str] | None:
        """Of mini-batches that memory does not have, the digests of the source's rows."""
        if way != "partitions":
            return None
        ids = read_ids(replace(self.job, way=way), results["row_counts"])
        return [digest(rows[nodes].view(np.ndarray)) for nodes in ids]

    def _in_turns(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """What the processes of these jobs found, which have trained an epoch each in turn."""
        with ExitStack() as stack:
            trainers = [stack.enter_context(Trainer(job, self.tell)) for job in jobs]
            going = trainers
            for epoch in range(self.job.plan.epochs):
                going = [one for one in going if self._turn(one, epoch)]
            return [one.results for one in trainers]

    def _turn(self, trainer: Trainer, epoch: int) -> bool:
        """Whether there is another."""
        seconds, way = trainer.turn(), trainer.job.way
        if seconds is None:
            found = trainer.results
            usual, wait = (median(found[n][1:] or found[n]) for n in ("epoch_seconds", "wait_seconds"))
            about = "about " if found.get("extrapolated") else ""
            self.say(f"{way}: {about}{usual:.2f} s an epoch, of which {wait:.2f} s waiting")
        elif epoch == 0 and way != "np.memmap":  # which may have ended in the middle of it
            self.say(f"{way}: epoch 0 in {seconds:.2f} s")
        return seconds is not None
