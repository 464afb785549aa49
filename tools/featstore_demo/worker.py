"""Demo worker: one training run in a process of its own, so that its peak memory is its own.

:func:`serve` reads a job, trains, and writes one JSON object a line on stdout: ``progress`` events as it
goes, and ``done`` with the results at the end. What libraries print goes to stderr. The parent is
:mod:`featstore_demo.runner`.

``baseline_rss_bytes`` is what the process held before it touched the first feature row (Python, PyTorch, PyG,
the topology), ``peak_rss_bytes`` the most it ever held (``VmHWM`` of the Linux kernel). A run by mega-batches
loads the topology only after the training, to evaluate: there ``peak_rss_bytes`` is that of the training,
graph included.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from featstore_demo.graph import load_dense, read_topology
from featstore_demo.training import (
    MemoryRows,
    Outcome,
    StoreRows,
    TrainingPlan,
    evaluate,
    mlp_accuracy,
    train,
    train_mega,
)

__all__ = ["Job", "perform", "read_job", "serve"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Job:
    """What a worker is to do. ``store``: path of the store, or None to train from memory; ``features``: the
    rows' file. ``mega``: train by mega-batches, with these options of the loader; None for mini-batches of
    the whole graph."""

    plan: TrainingPlan
    directory: str
    features: str
    store: str | None
    memory_bytes: int
    engine: str | None
    mega: dict[str, Any] | None = None

    def write(self, path: Path) -> None:
        """Save for :func:`read_job`."""
        path.write_text(json.dumps(asdict(self)))


def read_job(path: Path) -> Job:
    """The job that :meth:`Job.write` saved."""
    fields = json.loads(path.read_text())
    plan = fields["plan"]
    return Job(**fields | {"plan": TrainingPlan(**plan | {"fanouts": tuple(plan["fanouts"])})})


def serve(path: str) -> None:
    """Perform the job saved at ``path`` and tell the parent on stdout."""
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)

        def tell(event: dict[str, Any]) -> None:
            print(json.dumps(event), file=channel, flush=True)

        def progress(stage: str, done: int, total: int) -> None:
            tell({"event": "progress", "stage": stage, "done": done, "total": total})

        tell({"event": "done", "results": perform(read_job(Path(path)), progress)})


def perform(job: Job, progress: Progress) -> dict[str, Any]:
    """Run a job; returns the results as JSON types."""
    if job.store is not None and job.mega is not None:
        return _by_mega_batches(job, job.store, job.mega, progress)
    topology = read_topology(Path(job.directory))
    _warm_up(job, topology)
    baseline = _status_bytes("VmRSS")
    if job.store is None:
        results = _from_memory(job, topology, progress)
    else:
        results = _from_store(job, job.store, topology, progress)
    return results | {"baseline_rss_bytes": baseline}


def _warm_up(job: Job, topology: dict[str, Any]) -> None:
    """Load what both runs need, so that the baseline holds it."""
    import torch_geometric.loader
    import torch_geometric.nn  # noqa: F401

    from featstore.sampling.neighbors import NeighborSampler

    NeighborSampler(topology["indptr"], topology["indices"], job.plan.fanouts).sample(
        topology["train_idx"][:2]
    )


def _from_store(job: Job, path: str, topology: dict[str, Any], progress: Progress) -> dict[str, Any]:
    import featstore

    options: dict[str, Any] = {} if job.engine is None else {"engine": job.engine}
    with (
        featstore.open(path) as store,
        store.reader(memory=job.memory_bytes, static="degree", **options) as reader,
    ):
        labels = store.arrays["labels"]
        began = time.perf_counter()
        outcome = train(job.plan, topology | {"labels": labels}, StoreRows(reader), progress)
        seconds = time.perf_counter() - began
        about = {"access_because": reader.access_because, "memory": reader.memory()}
        io = reader.stats().to_dict() | about
    return _results(outcome, seconds) | {"io": io, "load_seconds": 0.0}


def _by_mega_batches(job: Job, path: str, mega: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Rows, graph and training nodes come from the store; only the evaluation takes the topology into
    memory."""
    import torch_geometric.loader
    import torch_geometric.nn  # noqa: F401

    import featstore
    from featstore.loaders.mega.loader import PartitionsLoader

    engine: dict[str, Any] = {} if job.engine is None else {"engine": job.engine}
    options: dict[str, Any] = (
        {
            "memory": job.memory_bytes, "seed": job.plan.seed, "train": "train_idx", "tensors": True,
            "batch_size": job.plan.batch_size,
        } | engine | mega
    )  # fmt: skip
    with featstore.open(path) as store:
        labels = store.arrays["labels"]
        baseline = _status_bytes("VmRSS")
        began = time.perf_counter()
        with PartitionsLoader(store, job.plan.fanouts, **options) as loader:
            model, outcome = train_mega(job.plan, labels, loader, progress)
            sets = loader.sets
            io = sets.stats().to_dict() | {
                "access_because": sets.access_because, "memory": sets.memory(),
                "partitions": sets.partitions, "resident": sets.resident, "mega_batches": sets.steps,
                "hubs": len(sets.hub_rows),
            }  # fmt: skip
        results = {"seconds": time.perf_counter() - began, "peak_rss_bytes": _status_bytes("VmHWM")}
        topology = read_topology(Path(job.directory)) | {"labels": labels}
        with store.reader(memory=job.memory_bytes, static="degree", **engine) as reader:
            evaluate(model, job.plan, topology, StoreRows(reader), outcome, progress)
    return asdict(outcome) | results | {"io": io, "baseline_rss_bytes": baseline}


def _from_memory(job: Job, topology: dict[str, Any], progress: Progress) -> dict[str, Any]:
    began = time.perf_counter()
    features = load_dense(Path(job.features))
    load_seconds = time.perf_counter() - began
    outcome = train(job.plan, topology, MemoryRows(features), progress)
    results = _results(outcome, time.perf_counter() - began - load_seconds)
    began = time.perf_counter()
    mlp = mlp_accuracy(job.plan, topology, features)
    mlp_seconds = time.perf_counter() - began
    return results | {
        "io": {},
        "load_seconds": load_seconds,
        "mlp_test_accuracy": mlp,
        "mlp_seconds": mlp_seconds,
    }


def _results(outcome: Outcome, seconds: float) -> dict[str, Any]:
    return asdict(outcome) | {"seconds": seconds, "peak_rss_bytes": _status_bytes("VmHWM")}


def _status_bytes(field: str) -> int:
    """A memory field of this process, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"/proc/self/status has no {field}"
    return 1024 * int(found.group(1))
