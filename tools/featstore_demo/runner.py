"""Demo runner: graph, pack, two training runs, report.

1. A graph is made up (:func:`featstore_demo.graph.generate`) or loaded from an .npz file.
2. Its rows are packed into a store.
3. A worker process trains from the store, under the given memory budget.
4. A second worker trains from memory: only here does the whole table stand in memory.

:mod:`featstore_demo.mega` does 2 and 3 in another way. What both need is a :class:`Comparison`, made by
:func:`prepared`.

Each worker is a process of its own, so that its peak memory can be told; see :mod:`featstore_demo.worker`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from featstore.errors import FeatstoreError, MissingPackageError, SourceError, StoreExistsError
from featstore.units import parse_bytes
from featstore_demo.graph import DemoGraph, GraphRecipe, generate, load, write_topology
from featstore_demo.report import DemoReport, RunReport
from featstore_demo.training import TrainingPlan
from featstore_demo.worker import Job, Progress

__all__ = ["Comparison", "prepared", "run"]

# Rows that are read for each seed cost memory and time by their bytes: (largest row, seeds, fan-outs).
_SHAPES = ((2 << 10, 256, (5, 4, 3)), (8 << 10, 64, (5, 3, 2)), (None, 32, (4, 3, 2)))
# The worker imports from where its parent does: an installed package, or a checkout.
_START_WORKER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from featstore_demo.worker import serve; serve(sys.argv[1])"
)
_PACK_MEMORY = "512MiB"
_STEPS_WANTED = 150
_EVALUATION_BYTES = 2 << 30
_EVALUATED_MAX = (4000, 8000)  # nodes of the validation and of the test split


def run(*, memory: str | int = "32MiB", **options: Any) -> DemoReport:
    """Pack a graph's features, train from the store and from memory with the same seeds, and compare.

    ``memory``: the reader's budget (bytes, or text such as ``"120MiB"``). The options are those of
    :func:`prepared`.

    Raises SourceError for a graph that cannot be used, StoreExistsError, BudgetError for too small a
    budget, ImportError where PyTorch or PyG is missing, FeatstoreError if a training process fails.
    """
    with prepared(memory, _EVALUATED_MAX, **options) as demo:
        pack_seconds = demo.pack()
        _probe(demo)
        from_store, from_memory = demo.train("store")
        return DemoReport(store=RunReport.of(from_store), **demo.facts(pack_seconds, from_memory))


@dataclass(frozen=True)
class Comparison:
    """What a demo of either mode works on, and the steps that both take. ``began``: by
    :func:`time.perf_counter`."""

    graph: DemoGraph
    generate_seconds: float
    plan: TrainingPlan
    memory_bytes: int
    engine: str | None
    scratch: Path
    store_path: Path
    tell: Progress
    began: float

    def budget(self) -> dict[str, Any]:
        """The options that a reader and a loader of mega-batches share."""
        return {"memory": self.memory_bytes} | ({} if self.engine is None else {"engine": self.engine})

    def pack(self, **more: Any) -> float:
        """Pack the graph; returns the seconds. ``more``: options of :func:`featstore.pack`."""
        return _pack(self.graph, self.store_path, self.tell, **more)

    def train(self, name: str, mega: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the workers found that trained from the store, which goes by ``name``, and from memory.
        ``mega``: see Job."""
        features, store = str(self.graph.features.absolute()), str(self.store_path)
        job = Job(self.plan, str(self.scratch), features, store, self.memory_bytes, self.engine, mega)
        from_store = _in_own_process(job, self.scratch, name, self.tell)
        return from_store, _in_own_process(
            replace(job, store=None, mega=None), self.scratch, "memory", self.tell
        )

    def facts(self, pack_seconds: float, from_memory: dict[str, Any]) -> dict[str, Any]:
        """The fields of :class:`featstore_demo.report.Facts`, at the end of the demo."""
        graph, plan = self.graph, self.plan
        return {
            "graph": graph.name,
            "node_count": graph.node_count,
            "edge_count": len(graph.indices),
            "class_count": graph.class_count,
            "row_bytes": graph.row_bytes,
            "table_bytes": graph.row_bytes * graph.node_count,
            "memory_bytes": self.memory_bytes,
            "epochs": plan.epochs,
            "batch_size": plan.batch_size,
            "fanouts": plan.fanouts,
            "hidden": plan.hidden,
            "seed": plan.seed,
            "generate_seconds": self.generate_seconds,
            "pack_seconds": pack_seconds,
            "store_bytes": sum(path.stat().st_size for path in self.store_path.rglob("*") if path.is_file()),
            "store_path": None if self.store_path.parent == self.scratch else str(self.store_path),
            "memory": RunReport.of(from_memory),
            "mlp_test_accuracy": from_memory["mlp_test_accuracy"],
            "val_count": plan.val_count,
            "val_total": len(graph.val_idx),
            "test_count": plan.test_count,
            "test_total": len(graph.test_idx),
            "seconds": time.perf_counter() - self.began,
        }


@contextmanager
def prepared(
    memory: str | int,
    evaluated_max: tuple[int, int],
    *,
    data: str | os.PathLike[str] | None = None,
    workdir: str | os.PathLike[str] | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    fanouts: Sequence[int] | None = None,
    hidden: int = 64,
    seed: int = 0,
    engine: str | None = None,
    recipe: GraphRecipe | None = None,
    progress: Progress | None = None,
) -> Iterator[Comparison]:
    """Everything before the packing.

    ``evaluated_max``: at most so many nodes of the validation and of the test split are evaluated. ``data``:
    an .npz file (:func:`featstore_demo.graph.load` names the keys), else a graph is made up by ``recipe``.
    ``workdir``: an existing directory in which the store is kept as ``store``, which must not be there yet;
    else all goes to a temporary one, which is removed. ``epochs``, ``batch_size`` and ``fanouts`` (one number
    a layer) follow from the graph and its row size where not given. ``engine``: name of the I/O engine, else
    the reader picks. ``progress(stage, done, total)`` is called as things go on.
    """
    _need_packages()
    memory_bytes = parse_bytes(memory)
    tell = progress if progress is not None else _no_progress
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="featstore-demo-", dir=_parent(workdir)) as folder:
        scratch = Path(folder)
        store_path = scratch / "store" if workdir is None else Path(workdir) / "store"
        if os.path.lexists(store_path):
            raise StoreExistsError(
                f"{store_path} exists, and the demo would write its own store there: move it away, or give "
                "another directory"
            )
        graph, generate_seconds = _prepare(data, recipe, seed, scratch, tell)
        plan = _training_plan(graph, epochs, batch_size, fanouts, hidden, seed, evaluated_max)
        yield Comparison(
            graph, generate_seconds, plan, memory_bytes, engine, scratch, store_path, tell, began
        )


def _no_progress(stage: str, done: int, total: int) -> None:
    """Nobody watches."""


def _need_packages() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("torch", "torch_geometric") if find_spec(name) is None]
    if missing:
        raise MissingPackageError(f"the demo needs {' and '.join(missing)}: pip install 'featstore[demo]'")


def _parent(workdir: str | os.PathLike[str] | None) -> str | None:
    if workdir is None:
        return None
    if not Path(workdir).is_dir():
        raise SourceError(f"the working directory {os.fspath(workdir)} does not exist; create it first")
    return os.fspath(workdir)


def _prepare(
    data: str | os.PathLike[str] | None, recipe: GraphRecipe | None, seed: int, scratch: Path, tell: Progress
) -> tuple[DemoGraph, float]:
    """The graph, and the seconds that making it up took (0 if it was loaded)."""
    if data is not None:
        graph, seconds = load(Path(data)), 0.0
    else:
        tell("generate", 0, 1)
        began = time.perf_counter()
        graph = generate(scratch, recipe if recipe is not None else GraphRecipe(seed=seed))
        seconds = time.perf_counter() - began
        tell("generate", 1, 1)
    write_topology(graph, scratch)
    return graph, seconds


def _training_plan(
    graph: DemoGraph,
    epochs: int | None,
    batch_size: int | None,
    fanouts: Sequence[int] | None,
    hidden: int,
    seed: int,
    evaluated_max: tuple[int, int],
) -> TrainingPlan:
    """What is trained, sized by the rows: about the same number of steps, and of bytes per step, for any
    graph."""
    shape = next(shape for shape in _SHAPES if shape[0] is None or graph.row_bytes <= shape[0])
    batch_size = shape[1] if batch_size is None else batch_size
    fanouts = shape[2] if fanouts is None else tuple(fanouts)
    if batch_size < 1 or not fanouts or (epochs is not None and epochs < 1):
        raise SourceError("the demo needs at least one epoch, one seed a mini-batch and one fan-out")
    if not (len(graph.train_idx) and len(graph.val_idx) and len(graph.test_idx)):
        raise SourceError(f"{graph.name}: the training, validation and test split each need a labelled node")
    if epochs is None:
        steps = -(-len(graph.train_idx) // batch_size)
        epochs = min(10, max(2, round(_STEPS_WANTED / steps)))
    rows_per_seed = 1
    for fanout in reversed(fanouts):
        rows_per_seed = 1 + (fanout if fanout > 0 else 10) * rows_per_seed
    nodes = max(256, _EVALUATION_BYTES // (rows_per_seed * graph.row_bytes))
    return TrainingPlan(
        epochs=epochs,
        batch_size=batch_size,
        fanouts=fanouts,
        hidden=hidden,
        seed=seed,
        class_count=graph.class_count,
        feature_count=graph.feature_count,
        val_count=min(len(graph.val_idx), nodes // 3, evaluated_max[0]),
        test_count=min(len(graph.test_idx), nodes, evaluated_max[1]),
    )


def _pack(graph: DemoGraph, path: Path, tell: Progress, **more: Any) -> float:
    """Pack the rows and labels as float32; returns the seconds. ``more``: options of
    :func:`featstore.pack`."""
    import numpy as np

    import featstore

    def progress(step: Any) -> None:
        counted = step.total_bytes is not None  # an order is sought without
        tell("pack", step.done_bytes if counted else 0, step.total_bytes or 0)

    began = time.perf_counter()
    arrays = {"labels": graph.labels, "train_idx": graph.train_idx}
    options: dict[str, Any] = {
        "arrays": arrays,
        "memory": _PACK_MEMORY,
        "progress": progress,
    } | more
    if graph.features.suffix == ".npy":
        packed = featstore.pack(path, graph.features, graph=(graph.indptr, graph.indices), **options)
    else:
        with np.load(graph.features) as archive:
            # else the only SciPy matrix in it
            options |= {"key": "features"} if "features" in archive else {}
        packed = featstore.pack(path, graph.features, graph=graph.features, dtype="float32", **options)
    packed.close()
    return time.perf_counter() - began


def _probe(demo: Comparison) -> None:
    """Open a reader here first: a budget or engine that cannot be is an error of its own kind, before any
    worker starts."""
    import featstore

    with featstore.open(demo.store_path) as store, store.reader(static="degree", **demo.budget()) as reader:
        reader.read(demo.graph.train_idx[:8])


def _in_own_process(job: Job, scratch: Path, name: str, tell: Progress) -> dict[str, Any]:
    """Run a worker, pass its progress on, and return its results."""
    path = scratch / f"{name}.json"
    job.write(path)
    search = json.dumps([os.path.abspath(part) for part in sys.path])
    results = None
    # PyG writes modules into the directory for temporary files, and leaves them there.
    environment = os.environ | {"TMPDIR": str(scratch)}
    with (scratch / f"{name}.stderr").open("w+") as errors:
        command = [sys.executable, "-P", "-c", _START_WORKER, str(path), search]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            try:
                for text in process.stdout:
                    event = json.loads(text)
                    if event["event"] == "done":
                        results = event["results"]
                    else:
                        tell(f"{name}: {event['stage']}", event["done"], event["total"])
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0 or results is None:
            errors.seek(0)
            tail = "".join(errors.readlines()[-15:]).strip()
            raise FeatstoreError(f"the training process ({name}) ended with {process.returncode}:\n{tail}")
    return dict(results)
