"""Demo worker: one way to train in a process of its own, so that its peak memory is its own.

:func:`serve` reads a job, trains, and writes one JSON object a line on stdout: ``progress`` events as it
goes, ``epoch`` after each but the last, after which it stands still until it is continued, and at the end
``done`` with the results, or ``error``. What libraries print goes to stderr. The parent is
:mod:`featstore_demo.turns`.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from featstore.errors import BudgetError, FeatstoreError
from featstore_demo.bounds import advise_random, forget, join
from featstore_demo.graph import read_topology
from featstore_demo.training import ArrayLoader, TrainingPlan, accuracy, digest, train, weights_digest

__all__ = ["Job", "perform", "read_ids", "read_job", "serve", "tiny_of"]

Progress = Callable[[str, int, int], None]
Turn = Callable[[float], None]
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """What a worker is to do, all of it plain data.

    Attributes:
        way: ``"memory"``, ``"np.memmap"``, or a mode of the store's loader.
        directory: where the topology and ``features.npy`` are, and where node ids go.
        store: path of the store.
        memory_bytes: of the loader.
        engine: of the loader; None for what it takes by itself.
        evaluate: measure the test accuracy as well.
        keep_ids: write down the node ids of all mini-batches, see :func:`read_ids`.
        group: the memory cgroup to join before the first row.
        seconds_max: of np.memmap: after so many seconds it ends.
    """

    plan: TrainingPlan
    way: str
    directory: str
    store: str
    memory_bytes: int
    engine: str | None = None
    evaluate: bool = False
    keep_ids: bool = False
    group: str | None = None
    seconds_max: float = float("inf")

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
    # Who stands still would not learn that its parent is gone.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)

        def tell(**event: Any) -> None:
            print(json.dumps(event), file=channel, flush=True)

        def progress(stage: str, done: int, total: int) -> None:
            tell(event="progress", stage=stage, done=done, total=total)

        def end_turn(seconds: float) -> None:
            tell(event="epoch", seconds=seconds)
            os.kill(os.getpid(), signal.SIGSTOP)

        try:
            tell(event="done", results=perform(read_job(Path(path)), progress, end_turn))
        except FeatstoreError as error:
            tell(event="error", message=str(error))


def perform(job: Job, progress: Progress, end_turn: Turn) -> dict[str, Any]:
    """Train in the job's way; returns what was measured, as JSON types: the fields of
    :class:`featstore_demo.report.Way` that are no comparison. ``end_turn`` is called after each epoch but the
    last, with its seconds, and returns when the next may begin."""
    run = _from_array if job.way in ("memory", "np.memmap") else _from_store
    _rehearse(run, tiny_of(job))
    return run(job, _Measured(job, progress, end_turn))


def _rehearse(run: Callable[[Job, _Measured], Any], tiny: Job) -> None:
    """Once on a tiny graph: what Python, PyTorch and compiled kernels take is there before it counts. From a
    store once more in the least memory, where rows do not all fit and what places them is needed."""

    def once(memory_bytes: int) -> None:
        job = replace(tiny, memory_bytes=memory_bytes)
        run(job, _Measured(job, lambda stage, done, total: None, lambda seconds: None))

    once(tiny.memory_bytes)
    if run is not _from_store:
        return
    least = 1
    while True:
        try:
            return once(least)
        except BudgetError as error:  # of the loader, and then of what it prepares
            if error.needed_bytes <= least:
                raise
            least = error.needed_bytes


def tiny_of(job: Job) -> Job:
    """The same way on the tiny graph beside the job's own."""
    directory = Path(job.directory) / "tiny"
    plan = replace(job.plan, epochs=1)
    return Job(plan, job.way, str(directory), str(directory / "store"), job.memory_bytes, job.engine)


def _from_array(job: Job, measured: _Measured) -> dict[str, Any]:
    plan, graph = job.plan, read_topology(Path(job.directory))
    path, mapped = Path(job.directory) / "features.npy", job.way == "np.memmap"
    if mapped:
        forget(path)
    with measured.training():
        if job.group is not None:
            join(Path(job.group))
        rows = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
        if mapped:
            advise_random(rows)
        batches = ArrayLoader(plan, graph, rows, graph["train_idx"], job.seconds_max)
        measured.train(batches, graph["labels"])
    steps, per_epoch = measured.epoch_steps[-1], len(batches)
    if steps < per_epoch:  # it was ended in the middle of an epoch
        measured.epoch_seconds[-1] *= per_epoch / steps
        measured.wait_seconds[-1] *= per_epoch / steps
    results = measured.results() | {"extrapolated": len(measured.losses) < plan.epochs * per_epoch}
    if job.evaluate:
        found = ArrayLoader(plan, graph, rows, graph["test_idx"])
        results["test_accuracy"] = accuracy(measured.model, found, graph["labels"])
    return results


def _from_store(job: Job, measured: _Measured) -> dict[str, Any]:
    import featstore

    plan, graph = job.plan, read_topology(Path(job.directory), "labels", "train_idx", "test_idx")
    options: dict[str, Any] = {} if job.engine is None else {"engine": job.engine}
    options |= {"fanouts": plan.fanouts, "batch_size": plan.batch_size, "seed": plan.seed, "tensors": True}
    options |= {"memory": job.memory_bytes}
    of_mode: dict[str, Any] = {"name": "demo"} if job.way in ("compiled", "rolling") else {}
    with featstore.open(job.store) as store:
        with (
            measured.training(),
            store.loader(seeds=graph["train_idx"], mode=job.way, **options, **of_mode) as batches,
        ):
            measured.train(batches, graph["labels"])
            report = batches.report().to_dict()
        results = measured.results() | {"report": report}
        if job.evaluate:
            with store.loader(seeds=graph["test_idx"], mode="online", **options) as batches:
                results["test_accuracy"] = accuracy(measured.model, batches, graph["labels"])
    return results


class _Measured:
    """What is measured of a training run, as it goes."""

    def __init__(self, job: Job, progress: Progress, end_turn: Turn) -> None:
        self._job, self._progress, self._end_turn = job, progress, end_turn
        self.losses: list[str] = []
        self.digests: list[str] = []
        self.row_counts: list[int] = []
        self.epoch_steps: list[int] = []
        self.epoch_seconds: list[float] = []
        self.wait_seconds: list[float] = []
        self._ids = _ids_path(job).open("wb") if job.keep_ids else None

    @contextmanager
    def training(self) -> Iterator[None]:
        """All of it, from before the first row."""
        self._baseline, self._read, self._began = _status_bytes("VmRSS"), _read_bytes(), time.perf_counter()
        try:
            yield
        finally:
            if self._ids is not None:
                self._ids.close()

    def train(self, batches: Any, labels: Any) -> None:
        """Train, on what is ready by now."""
        now = time.perf_counter()
        self._prepare_seconds, self._began = now - self._began, now
        self.model = train(self._job.plan, batches, labels, self._step, self._epoch)
        read = _read_bytes()
        self._results = {
            "prepare_seconds": self._prepare_seconds,
            "read_bytes": None if read is None or self._read is None else read - self._read,
            "baseline_rss_bytes": self._baseline,
            "peak_rss_bytes": _status_bytes("VmHWM"),
            "weights": weights_digest(self.model),
        }

    def _step(self, batch: Any, loss: float) -> None:
        self.losses.append(loss.hex())
        self.digests.append(digest(batch.x.numpy()))
        self.row_counts.append(len(batch.x))
        if self._ids is not None:
            np.asarray(batch.n_id, dtype=np.int64).tofile(self._ids)
        plan = self._job.plan
        self._progress("train", 1 + len(self.epoch_steps), plan.epochs)

    def _epoch(self, waited: float) -> None:
        now, steps = time.perf_counter(), len(self.losses) - sum(self.epoch_steps)
        if steps:
            self.epoch_steps.append(steps)
            self.epoch_seconds.append(now - self._began)
            self.wait_seconds.append(waited)
            if len(self.epoch_steps) < self._job.plan.epochs:
                self._end_turn(self.epoch_seconds[-1])
        self._began = time.perf_counter()

    def results(self) -> dict[str, Any]:
        """As JSON types."""
        return self._results | {
            "losses": self.losses, "digests": self.digests, "row_counts": self.row_counts,
            "epoch_steps": self.epoch_steps, "epoch_seconds": self.epoch_seconds,
            "wait_seconds": self.wait_seconds,
        }  # fmt: skip


def read_ids(job: Job, row_counts: list[int]) -> Iterator[Any]:
    """The node ids that a worker wrote down, mini-batch by mini-batch."""
    with _ids_path(job).open("rb") as file:
        for count in row_counts:
            yield np.fromfile(file, np.int64, count)


def _ids_path(job: Job) -> Path:
    return Path(job.directory) / f"{job.way}.ids"


def _status_bytes(field: str) -> int:
    """A memory field of this process, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"/proc/self/status has no {field}"
    return 1024 * int(found.group(1))


def _read_bytes() -> int | None:
    """What this process has had read from disks, by the kernel's account; None where there is none."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return None
    found = re.search(r"^read_bytes: (\d+)$", text, re.MULTILINE)
    return None if found is None else int(found.group(1))
