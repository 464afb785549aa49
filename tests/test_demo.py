"""The demo: its made-up graph, its training, and every way on a tiny graph: the same bits where mini-batches
are the same, and an error where a row is another."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner
from featstore_cli.demo_page import page
from featstore_cli.main import cli
from featstore_demo import bounds, runner, training, turns, worker
from featstore_demo import graph as demo_graph
from featstore_demo.graph import GraphRecipe, generate, load, read_topology, write_topology
from featstore_demo.report import COLUMNS, MEANINGS, TOLERANCE, WAYS, DemoReport, Way, held_against, render
from featstore_demo.runner import run
from featstore_demo.training import ArrayLoader, TrainingPlan, accuracy, digest, train
from featstore_demo.worker import Job, read_job
from rich.console import Console

import featstore
from featstore.base.sheets import safe
from featstore.errors import ArgumentError, BudgetError, FeatstoreError, SourceError, StoreExistsError

torch = pytest.importorskip("torch")

NASTY = "<script>alert(1)</script>&'\""

TINY = GraphRecipe(
    node_count=3000, edge_count=30_000, feature_count=64, class_count=4, signal=0.2, train_share=0.2
)
SMALL: dict[str, Any] = {"memory": "32MiB", "epochs": 2, "batch_size": 64, "fanouts": (5, 4, 3), "hidden": 16}


def no_progress(stage: str, done: int, total: int) -> None:
    assert 0 <= done <= total
    assert stage


@pytest.fixture(autouse=True)
def _restore_torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Training fixes threads and algorithms for its process; here other tests follow. One thread: several
    wait for each other for long where cores are busy."""
    monkeypatch.setattr(training, "_THREADS", 1)
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return generate(tmp_path_factory.mktemp("graph"), TINY)


@pytest.fixture(scope="module")
def topology(graph: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("topology")
    write_topology(graph, directory)
    return read_topology(directory)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that train in this process, in no memory cgroup."""

    class Here:
        def __init__(self, job: Job, tell: Any) -> None:
            self.job, self._tell = job, tell

        def turn(self) -> None:
            path, tell = Path(self.job.directory) / "job.json", self._tell
            self.job.write(path)
            found = worker.perform(
                read_job(path), lambda stage, *of: tell(f"{self.job.way}: {stage}", *of), lambda seconds: None
            )
            self.results = json.loads(json.dumps(found))

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    @contextmanager
    def no_group(limit_bytes: int) -> Iterator[Any]:
        assert limit_bytes >= 32 << 20
        yield None, "a test"

    monkeypatch.setattr(runner, "Trainer", Here)
    monkeypatch.setattr(runner, "memory_group", no_group)


def test_generated_graph_is_what_it_says(graph: Any, topology: Any) -> None:
    source, target = graph.indices, np.repeat(np.arange(3000), np.diff(graph.indptr))
    keys = np.sort(source.astype(np.int64) * 3000 + target)
    assert len(np.unique(keys)) == len(keys), "no edge twice"
    np.testing.assert_array_equal(keys, np.sort(target * 3000 + source.astype(np.int64)), "symmetric")
    assert (source != target).all()
    assert 24_000 < len(source) <= 30_000
    # 0.8 + 0.2 / 4 of the edges join two nodes of a class.
    assert 0.8 < (graph.labels[source] == graph.labels[target]).mean() < 0.9
    degrees = np.sort(np.diff(graph.indptr))[::-1]
    assert degrees[:300].sum() > 0.35 * degrees.sum(), "a tenth of the nodes has a good part of the edges"
    split = np.concatenate([graph.train_idx, graph.test_idx])
    np.testing.assert_array_equal(np.sort(split), np.arange(3000))
    assert len(graph.train_idx) == 600
    for key, array in topology.items():
        np.testing.assert_array_equal(array, getattr(graph, key))


def test_generated_rows_are_deterministic_and_weak(
    graph: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = generate(tmp_path, TINY)
    assert again.features.read_bytes() == graph.features.read_bytes()
    np.testing.assert_array_equal(again.indices, graph.indices)
    rows = np.load(graph.features)
    assert rows.shape == (3000, 64)
    assert rows.dtype == np.float32
    assert abs(rows.std() - 1) < 0.05
    centres = np.stack([rows[graph.labels == label].mean(axis=0) for label in range(4)])
    assert 0.15 < centres.std() < 0.25, "the mean of many rows shows the class's centre"
    other = generate(tmp_path, replace(TINY, seed=1))
    assert other.features.read_bytes() != graph.features.read_bytes()
    # Many blocks: none repeats another's noise.
    monkeypatch.setattr(demo_graph, "_BLOCK_BYTES", 64 * 4 * 100)
    rows = np.load(generate(tmp_path, replace(TINY, signal=0.0)).features)
    assert len(np.unique(rows[:, 0])) > 2990


def test_load_dense_and_sparse_npz(graph: Any, tmp_path: Path) -> None:
    import scipy.sparse as scipy_sparse

    labels = graph.labels.astype(np.int16)
    labels[graph.train_idx[0]] = -1
    common = {key: getattr(graph, key) for key in ("indptr", "indices", "train_idx", "test_idx")}
    begin, end = graph.indptr[5:7]
    common["indices"] = graph.indices.copy()
    common["indices"][begin:end] = graph.indices[begin:end][::-1]
    rows = (np.random.default_rng(1).random((3000, 9)) < 0.3) * np.arange(9, dtype=np.uint8)
    sparse = scipy_sparse.csr_matrix(rows)
    np.savez(tmp_path / "dense.npz", features=rows, labels=labels, **common)
    np.savez_compressed(
        tmp_path / "sparse.npz", labels=labels, feat_data=sparse.data, feat_indices=sparse.indices,
        feat_indptr=sparse.indptr, feat_shape=np.array(sparse.shape), **common,
    )  # fmt: skip
    for name in ("dense", "sparse"):
        loaded = load(tmp_path / f"{name}.npz", tmp_path)
        assert (loaded.name, loaded.feature_count, loaded.row_bytes) == (name, 9, 36)
        assert len(loaded.train_idx) == 599, "a node without a label is not trained on"
        np.testing.assert_array_equal(loaded.indices, graph.indices, "in ascending order")
        dense = np.load(loaded.features)
        assert dense.dtype == np.float32
        np.testing.assert_array_equal(dense, rows)


def test_load_refuses(graph: Any, tmp_path: Path) -> None:
    path = tmp_path / "graph.npz"
    with pytest.raises(SourceError, match=r"cannot read .*graph\.npz"):
        load(path, tmp_path)
    path.write_bytes(b"not a zip")
    with pytest.raises(SourceError, match="cannot read"):
        load(path, tmp_path)
    np.savez(path, indptr=graph.indptr, indices=graph.indices)
    with pytest.raises(SourceError, match=r"has no labels, train_idx, test_idx, features"):
        load(path, tmp_path)
    arrays = {key: getattr(graph, key) for key in ("indptr", "indices", "labels", "train_idx", "test_idx")}
    np.savez(path, features=np.zeros((3000, 2)), **arrays | {"indptr": graph.indptr[::-1]})
    with pytest.raises(SourceError, match="cannot read"):
        load(path, tmp_path)
    np.savez(path, features=np.zeros((7, 2)), **arrays)
    with pytest.raises(SourceError, match="3,000 nodes, but 7 rows"):
        load(path, tmp_path)


class Wrong:
    """An array of rows whose row 7 is another in its last bit."""

    def __init__(self, rows: Any, flip: int) -> None:
        self.rows = rows.copy()
        self.rows.view(np.uint32)[7, 0] ^= flip

    def __getitem__(self, ids: Any) -> Any:
        return self.rows[ids]


def test_training_shows_each_bit(graph: Any, topology: Any) -> None:
    plan = TrainingPlan(2, 64, (5, 4, 3), 16, 0, 4, 64)
    rows, seeds = np.load(graph.features), np.append(7, graph.train_idx[graph.train_idx != 7])
    waits: list[float] = []

    def trained(rows: Any, plan: TrainingPlan = plan) -> tuple[list[float], list[str], Any]:
        losses: list[float] = []
        digests: list[str] = []

        def note(batch: Any, loss: float) -> None:
            losses.append(loss)
            digests.append(digest(batch.x.numpy()))

        model = train(plan, ArrayLoader(plan, topology, rows, seeds), topology["labels"], note, waits.append)
        return losses, digests, model

    memory, again = trained(rows), trained(rows)
    assert memory[:2] == again[:2]
    assert len(memory[0]) == 2 * -(-len(seeds) // 64)
    assert len(waits) == 2 * 2
    assert min(waits) > 0
    assert trained(Wrong(rows, 1))[1] != memory[1], "the last bit shows in the digests"
    assert trained(Wrong(rows, 1 << 23))[0] != memory[0], "a value of twice the size shows in the losses"
    assert trained(rows, replace(plan, seed=1))[0] != memory[0]
    tested = ArrayLoader(plan, topology, rows, graph.test_idx)
    learned = trained(rows, replace(plan, epochs=6))[2]
    assert accuracy(learned, tested, topology["labels"]) > 0.8


def test_an_array_loader_ends_in_time(graph: Any, topology: Any) -> None:
    plan = TrainingPlan(2, 64, (2,), 16, 0, 4, 64)
    loader = ArrayLoader(plan, topology, np.load(graph.features), graph.train_idx, seconds_max=0)
    assert [len(list(loader)) for _ in range(3)] == [1, 0, 0]
    assert len(loader) == 10


@pytest.mark.usefixtures("here")
def test_all_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stages: list[str] = []
    said: list[str] = []

    def note(stage: str, done: int, total: int) -> None:
        no_progress(stage, done, total)
        stages.append(stage)

    report = run(recipe=TINY, progress=note, say=said.append, **SMALL)
    ways = {way.way: way for way in report.ways}
    assert tuple(ways) == WAYS
    assert report.good, [(way.way, report.wrong(way)) for way in report.ways]
    memory = ways["memory"]
    assert len(memory.losses) == 2 * 10
    assert memory.test_accuracy is not None
    for name in ("np.memmap", "online", "rolling"):
        assert (ways[name].losses, ways[name].digests) == (memory.losses, memory.digests), name
        assert ways[name].weights_identical is True
        assert ways[name].test_accuracy is None
    compiled, partitions = ways["compiled"], ways["partitions"]
    assert compiled.losses[:10] == memory.losses[:10]
    assert compiled.digests == [*memory.digests[:10], *memory.digests[:10]]
    assert compiled.losses[10:] != memory.losses[10:], "of other mini-batches"
    assert (compiled.steps_compared, partitions.steps_compared) == (10, 0)
    assert set(partitions.digests).isdisjoint(memory.digests)
    assert all(way.epoch_steps[0] > 0 and len(way.epoch_seconds) == 2 for way in report.ways)
    assert (report.table_bytes, report.test_count, report.test_total) == (3000 * 256, 2400, 2400)
    assert list(tmp_path.iterdir()) == [], "nothing is kept that nobody asked for"
    assert {"generate", "pack", *(f"{way}: train" for way in WAYS)} <= set(stages)
    assert set(json.loads(json.dumps(report.to_json()))["ways"]) == set(WAYS)
    assert said[0] == "making up a graph of 3,000 nodes"
    assert {line.split(":")[0] for line in said[2:]} == set(WAYS)
    for way in report.ways:
        assert 0 <= way.usual_wait_seconds <= way.usual_epoch_seconds == way.epoch_seconds[1]
    assert report.times_memory(memory) == 1
    text = shown(report)
    assert text.count("█") > 50
    assert all(text.count(f"\n{way} ") == 2 for way in WAYS), "in the table and in the picture"
    the_page_says_the_same(report)
    assert "np.memmap: THE PAGE CACHE WAS NOT BOUNDED: a test" in text
    assert text.count(f"= {memory.test_accuracy:.1%}") == 3
    assert " others " in text
    assert "the same bits." in text
    differences_are_told(report)


def the_page_says_the_same(report: DemoReport) -> None:
    text = page(replace(report, graph=NASTY))
    assert NASTY not in text
    assert safe(NASTY) in text
    for word in ("<script", "http", " src=", " href="):
        assert word not in text.lower()
    assert all(text.count(f"<td class=fs-l>{way}</td>") == 1 for way in WAYS)
    assert all(name in (*COLUMNS, "~") and safe(meaning) in text for name, meaning in MEANINGS.items())
    (drawn,) = re.findall(r'<svg class="chart".*?</svg>', text, re.DOTALL)
    ElementTree.fromstring(drawn)
    assert drawn.count("<rect") == 6 * (2 + 1) + sum(
        report.read_bytes(way) is not None for way in report.ways
    )
    unknown = replace(report, ways=tuple(replace(way, read_bytes=None) for way in report.ways))
    assert page(unknown).count(">not known<") == len(WAYS)
    slow = replace(report.ways[1], epoch_seconds=[1e6, 1e6])
    ways = report.ways[0], slow, *report.ways[2:]
    assert 'd="M' in page(replace(report, ways=ways)), "what is cut is drawn as cut"
    assert "//" in shown(replace(report, ways=ways))


def differences_are_told(report: DemoReport) -> None:
    def changed(name: str, **changes: Any) -> DemoReport:
        return replace(report, ways=tuple(replace(w, **changes) if w.way == name else w for w in report.ways))

    text = shown(changed("rolling", first_difference=7))
    assert "ROLLING: other losses than from memory, from step 7 on, a bug. Please report" in text
    assert " NOT 7 " in text
    assert "PARTITIONS: rows that are not" in shown(changed("partitions", rows_identical=False))
    assert "ONLINE: other weights at the end" in shown(changed("online", weights_identical=False))
    best = report.ways[0].test_accuracy
    assert best is not None
    assert changed("partitions", test_accuracy=best - TOLERANCE + 0.01).good
    assert not changed("partitions", test_accuracy=best - TOLERANCE - 0.01).good


def measured(losses: str, **more: Any) -> dict[str, Any]:
    """What a worker might send of two epochs of 2 mini-batches."""
    return {
        "losses": list(losses), "digests": list(losses.upper()), "row_counts": [1] * len(losses),
        "epoch_steps": [2, 2], "epoch_seconds": [1.0, 1.0], "wait_seconds": [0.5, 0.5],
        "prepare_seconds": 0.0, "read_bytes": None,
        "baseline_rss_bytes": 1, "peak_rss_bytes": 2, "weights": "w",
    } | more  # fmt: skip


@pytest.mark.parametrize(
    ("way", "results", "expected"),
    [
        ("online", measured("abcd"), (4, None, True, True)),
        ("online", measured("abxd"), (4, 2, False, True)),
        ("rolling", measured("abc"), (4, 3, False, True)),
        ("online", measured("abcd", weights="v"), (4, None, True, False)),
        ("online", measured("abcd", digests=["A", "B", "C", "X"]), (4, None, False, True)),
        ("np.memmap", measured("abc", extrapolated=True), (3, None, True, None)),
        ("np.memmap", measured("abc"), (4, 3, False, True)),
        ("np.memmap", measured("axc", extrapolated=True), (3, 1, False, None)),
        ("compiled", measured("abyz", digests=["A", "B", "A", "B"]), (2, None, True, None)),
        ("compiled", measured("axyz", digests=["A", "B", "A", "B"]), (2, 1, True, None)),
        ("compiled", measured("abcd"), (2, None, False, None)),
        ("partitions", measured("vwxyz"), (0, None, True, None)),
        ("partitions", measured("vwxy"), (0, None, False, None)),
    ],
)
def test_held_against_memory(way: str, results: dict[str, Any], expected: Any) -> None:
    drawn = list("VWXYZ") if way == "partitions" else None
    found = held_against(measured("abcd"), results, way, drawn)
    assert isinstance(found, Way)
    same = found.steps_compared, found.first_difference, found.rows_identical, found.weights_identical
    assert same == expected


@pytest.mark.usefixtures("here")
def test_a_wrong_row_fails_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its last bit: after the packing one value of the source changes, so that the store gives another."""
    write_npz(tmp_path / "graph.npz", tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    real = runner._pack

    def pack(graph: Any, *arguments: Any) -> float:
        seconds = real(graph, *arguments)
        if graph.name == "graph":
            rows = np.load(graph.features, mmap_mode="r+")
            rows.view(np.uint32)[graph.train_idx[0], 3] ^= 1
            rows.flush()
        return seconds

    arguments = ["demo", "--data", str(tmp_path / "graph.npz"), "--epochs", "4", "--memory", "32MiB", "-q"]
    arguments += ["--batch-size", "64"]
    modes = [part for way in ("online", "partitions") for part in ("--mode", way)]
    assert CliRunner().invoke(cli, [*arguments, *modes]).output == "", "all is well"
    monkeypatch.setattr(runner, "_pack", pack)
    result = CliRunner().invoke(cli, [*arguments, *modes])
    assert result.exit_code == 1
    # Whether so little shows in a loss depends on rounding.
    assert "ONLINE: " in result.output
    assert "PARTITIONS: rows that are not those of the source" in " ".join(result.output.split())


@pytest.mark.usefixtures("here")
def test_memmap_that_is_ended_is_extrapolated() -> None:
    report = run(recipe=TINY, ways=["np.memmap"], memmap_seconds=0, **SMALL)
    memory, mapped = report.ways
    assert (memory.way, mapped.way, report.good) == ("memory", "np.memmap", True)
    assert (list(mapped.losses), mapped.extrapolated, mapped.bounded) == ([memory.losses[0]], True, False)
    assert (mapped.steps_compared, mapped.weights_identical) == (1, None)
    text = shown(report)
    assert "ended after 1 of 20 mini-batches (0 s), the rest extrapolated" in text
    assert " first 1 " in text
    assert f"~{mapped.epoch_seconds[0]:.2f} s" in text


def test_a_memory_group_bounds_the_page_cache(tmp_path: Path) -> None:
    path, limit = tmp_path / "file", 16 << 20
    path.write_bytes(bytes(64 << 20))
    bounds.forget(path)
    code = (
        "import sys, numpy as np; from pathlib import Path; from featstore_demo.bounds import join; "
        "join(Path(sys.argv[1])); print(int(np.memmap(sys.argv[2], np.uint8, 'r').sum()))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with bounds.memory_group(limit) as (group, why):
        if group is None:
            assert why
            pytest.skip(why)
        command = [sys.executable, "-c", code, str(group), str(path)]
        subprocess.run(command, check=True, env=environment, timeout=100)
        names = ("memory.max_usage_in_bytes", "memory.peak")
        found = [(group / name).read_text() for name in names if (group / name).exists()]
        assert all(1 << 20 < int(one) <= limit for one in found)
    assert not group.exists()


def test_no_memory_group_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "_ROOT", tmp_path / "none")
    with bounds.memory_group(1 << 30) as (group, why):
        assert group is None
        assert "No such file or directory" in why


#: A worker of two epochs, which counts all the while.
COUNTS = """
import json, os, signal, sys, threading, time
way = json.load(open(sys.argv[1]))["way"]
count = 0
def counting():
    global count
    while True:
        count += 1
        time.sleep(0.001)
threading.Thread(target=counting, daemon=True).start()
print(json.dumps({"event": "progress", "stage": "train", "done": 1, "total": 2}), flush=True)
print(json.dumps({"event": "epoch", "seconds": 1.5}), flush=True)
before = count
os.kill(os.getpid(), signal.SIGSTOP)
if way == "dies":
    sys.exit("for a reason")
found = {"count": count - before, "pid": os.getpid()}
good, bad = {"event": "done", "results": found}, {"event": "error", "message": "no"}
print(json.dumps(good if way == "good" else bad))
"""


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a trainer of :data:`COUNTS`."""
    monkeypatch.setattr(turns, "_START_WORKER", COUNTS)
    told: list[tuple[str, int, int]] = []
    plan = TrainingPlan(2, 1, (1,), 1, 0, 1, 1)

    def made(way: str) -> turns.Trainer:
        return turns.Trainer(
            Job(plan, way, str(tmp_path), str(tmp_path), 1), lambda *event: told.append(event)
        )

    return made


def test_who_has_no_turn_stands_still(counts: Any) -> None:
    with counts("good") as one:
        assert one.turn() == 1.5
        time.sleep(0.3)
        assert one.turn() is None
        assert one.results["count"] < 200, "it would have counted further meanwhile"
    assert not Path(f"/proc/{one.results['pid']}").exists()


def test_a_trainer_that_fails_is_an_error(counts: Any) -> None:
    for way, what in (("bad", "bad: no .--memory"), ("dies", r"\(dies\) ended with 1:\nfor a reason")):
        with counts(way) as one:
            one.turn()
            with pytest.raises(FeatstoreError, match=what):
                one.turn()
    with counts("good") as one:
        one.turn()
    assert one._process.poll() == -9, "one that is left in the middle is ended"


def test_who_stands_still_ends_with_its_parent(graph: Any, tmp_path: Path) -> None:
    """Also where that cannot end it."""
    write_topology(graph, tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        child = Path("/proc", parent.stdout.readline().strip())
        assert child.name.isdigit()
        assert child.exists()
        parent.kill()
    end = time.monotonic() + 10
    while child.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


PARENT = """
import sys, time
from featstore_demo import turns
from featstore_demo.training import TrainingPlan
from featstore_demo.turns import Trainer
from featstore_demo.worker import Job
turns._START_WORKER = turns._START_WORKER.replace("import serve;", (
    "import serve; import featstore_demo.worker as w; w.perform = lambda job, tell, end: end(1.0) or {};"
))
job = Job(TrainingPlan(2, 1, (1,), 1, 0, 1, 1), "memory", sys.argv[1], sys.argv[1], 1)
trainer = Trainer(job, print)
trainer.turn()
print(trainer._process.pid, flush=True)
time.sleep(60)
"""


def write_npz(path: Path, scratch: Path) -> None:
    made = generate(scratch, TINY)
    write_topology(made, scratch)
    np.savez(path, features=np.load(made.features), **read_topology(scratch))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_command_has_the_ways_asked_for(tmp_path: Path) -> None:
    """As a user runs it, workers and all; those of all ways are in :func:`test_all_ways`. Beside the store
    that it is asked for, it leaves nothing."""
    write_npz(tmp_path / "graph.npz", tmp_path)
    asked = tmp_path / "asked"
    command = [
        sys.executable, "-m", "featstore_cli", "demo", "--data", str(tmp_path / "graph.npz"), "--json",
        "--memory", "32MiB", "--epochs", "2", "--mode", "np.memmap", "--mode", "rolling",
        "--workdir", str(asked),
    ]  # fmt: skip
    for folder in (asked, tmp_path / "tmp", tmp_path / "cache"):
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
        (folder / "featstore-demo-mine").mkdir()
    torchs, made = tmp_path / "torch", asked / "store"  # the first is a cache that torch makes by itself

    def there() -> list[Path]:
        return sorted(p for p in tmp_path.rglob("*") if not {torchs, made} & {p, *p.parents})

    before = there()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": str(torchs), "FEATSTORE_CACHE": str(tmp_path / "cache"),
    }  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=390, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["schema"], found["good"]) == ("featstore.demo/2", True)
    assert tuple(found["ways"]) == ("memory", "np.memmap", "rolling")
    for way in found["ways"].values():
        assert 0 < way["baseline_rss_bytes"] <= way["peak_rss_bytes"]
        assert way["later_epoch_seconds"] is None or way["later_epoch_seconds"] > 0
    mapped = found["ways"]["np.memmap"]
    with bounds.memory_group(1 << 30) as (group, _):
        possible = group is not None
    assert mapped["bounded"] is possible
    assert mapped["note"].startswith("page cache and" if possible else "THE PAGE CACHE WAS NOT BOUNDED")
    assert there() == before, "nothing stays"
    with featstore.open(made) as store:
        assert store.tables["features"].rows == 3000


def shown(report: DemoReport) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(render(report))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


@pytest.mark.parametrize(
    ("row_values", "given", "expected"),
    [
        (64, {}, (6, 128, (5, 3, 2))),
        (1000, {}, (3, 64, (5, 3, 2))),
        (8415, {}, (2, 32, (4, 3, 2))),
        (64, {"epochs": 1, "batch_size": 7, "fanouts": [2, -1]}, (1, 7, (2, -1))),
    ],
)
def test_training_is_sized_by_the_rows(
    graph: Any, row_values: int, given: dict[str, Any], expected: Any
) -> None:
    options: dict[str, Any] = {"epochs": None, "batch_size": None, "fanouts": None} | given
    big = replace(graph, feature_count=row_values, train_idx=np.arange(8000), test_idx=np.arange(9000))
    plan = runner._training_plan(big, **options, hidden=4, seed=0)
    assert (plan.epochs, plan.batch_size, plan.fanouts) == expected
    tested = runner._tested(big, plan).test_idx
    assert 256 <= len(tested) <= 4000
    assert len(np.unique(tested)) == len(tested)


def test_partitions_follow_memory(graph: Any) -> None:
    assert [runner._partitions(graph, memory) for memory in (1 << 10, 1 << 23, 1 << 40)] == [60, 46, 16]
    assert runner._partitions(replace(graph, indptr=np.zeros(6, np.int64)), 1 << 20) == 5


def test_demo_refusals(graph: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"the demo knows memory, np\.memmap, .*, not 'mega'"):
        run(ways=["mega"])
    with pytest.raises(SourceError, match="does not exist"):
        run(workdir=tmp_path / "nowhere")
    with pytest.raises(SourceError, match="at least one epoch"):
        run(recipe=TINY, epochs=0)
    with pytest.raises(ValueError, match="as a size"):
        run(memory="much")
    unlabelled = replace(graph, test_idx=graph.test_idx[:0])
    with pytest.raises(SourceError, match="each need a labelled node"):
        runner._training_plan(unlabelled, None, None, None, 4, 0)
    (tmp_path / "store").mkdir()
    with pytest.raises(StoreExistsError, match="would write its own store"):
        run(workdir=tmp_path)


@pytest.mark.slow
def test_a_worker_says_what_it_needs() -> None:
    """Too little memory is known by the first of the ways, in a process of its own."""
    with pytest.raises(FeatstoreError, match=r"online: .*(?s:.*)gives all ways more"):
        run(recipe=TINY, memory="64KiB")


@pytest.mark.parametrize("way", ["rolling", "memory"])
def test_what_places_rows_is_rehearsed_in_the_least_memory(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the loader says what it needs, then what it prepares."""
    ran: list[tuple[str, int]] = []

    def needy(job: Job, measured: object) -> dict[str, Any]:
        ran.append((Path(job.directory).name, job.memory_bytes))
        for needed in (10, 25):
            if job.memory_bytes < needed:
                raise BudgetError(needed, job.memory_bytes, "do it")
        return {}

    for name in ("_from_store", "_from_array"):
        monkeypatch.setattr(worker, name, needy if (name == "_from_array") == (way == "memory") else None)
    job = Job(
        TrainingPlan(2, 64, (2,), 16, 0, 4, 64), way, str(tmp_path / "all"), str(tmp_path / "store"), 100
    )
    worker.perform(job, lambda stage, done, total: None, lambda seconds: None)
    least = [("tiny", 1), ("tiny", 10), ("tiny", 25)] if way == "rolling" else []
    assert ran == [("tiny", 100), *least, ("all", 100)]


def test_a_need_that_does_not_grow_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(job: Job, measured: object) -> dict[str, Any]:
        if job.memory_bytes < 100:
            raise BudgetError(10, job.memory_bytes, "do it")
        return {}

    monkeypatch.setattr(worker, "_from_store", never)
    job = Job(TrainingPlan(2, 64, (2,), 16, 0, 4, 64), "rolling", str(tmp_path), str(tmp_path / "store"), 100)
    with pytest.raises(BudgetError):
        worker.perform(job, lambda stage, done, total: None, lambda seconds: None)
