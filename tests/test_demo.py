"""The demo: its made-up graph, its training, and the whole thing on a tiny graph, where all losses must be
the same bits; and by mega-batches, where accuracies must agree."""

from __future__ import annotations

import io
import json
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from featstore_demo import graph as demo_graph
from featstore_demo import runner
from featstore_demo.graph import GraphRecipe, generate, load, load_dense, read_topology, write_topology
from featstore_demo.mega import _partitions, run_mega
from featstore_demo.mega_report import TOLERANCE, MegaReport, render_mega
from featstore_demo.report import DemoReport, render
from featstore_demo.runner import run
from featstore_demo.training import MemoryRows, Outcome, TrainingPlan, mlp_accuracy, train
from featstore_demo.worker import Job, read_job
from rich.console import Console

import featstore
from featstore.errors import BudgetError, FeatstoreError, SourceError

with warnings.catch_warnings():
    # PyG scripts some of its own classes on import, which newer PyTorch calls deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch
    import torch_geometric.loader
    import torch_geometric.nn  # noqa: F401

TINY = GraphRecipe(
    node_count=3000, edge_count=30_000, feature_count=64, class_count=4, signal=0.2, train_share=0.2
)


def tiny_plan(graph: Any, **changes: Any) -> TrainingPlan:
    plan = TrainingPlan(
        epochs=2, batch_size=64, fanouts=(5, 4, 3), hidden=16, seed=0, class_count=graph.class_count,
        feature_count=graph.feature_count, val_count=100, test_count=400,
    )  # fmt: skip
    return replace(plan, **changes)


def no_progress(stage: str, done: int, total: int) -> None:
    assert 0 <= done <= total
    assert stage


@pytest.fixture(autouse=True)
def _restore_torch() -> Any:
    """Training fixes threads and algorithms for its process; here other tests follow."""
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
    split = np.concatenate([graph.train_idx, graph.val_idx, graph.test_idx])
    np.testing.assert_array_equal(np.sort(split), np.arange(3000))
    assert (len(graph.train_idx), len(graph.val_idx)) == (600, 150)
    for key, array in topology.items():
        np.testing.assert_array_equal(array, getattr(graph, key))


def test_generated_rows_are_deterministic_and_weak(
    graph: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = generate(tmp_path, TINY)
    assert again.features.read_bytes() == graph.features.read_bytes()
    np.testing.assert_array_equal(again.indices, graph.indices)
    rows = load_dense(graph.features)
    assert rows.shape == (3000, 64)
    assert rows.dtype == np.float32
    assert abs(rows.std() - 1) < 0.05
    centres = np.stack([rows[graph.labels == label].mean(axis=0) for label in range(4)])
    assert 0.15 < centres.std() < 0.25, "the mean of many rows shows the class's centre"
    other = generate(tmp_path, replace(TINY, seed=1))
    assert other.features.read_bytes() != graph.features.read_bytes()
    # Many blocks: none repeats another's noise.
    monkeypatch.setattr(demo_graph, "_BLOCK_BYTES", 64 * 4 * 100)
    rows = load_dense(generate(tmp_path, replace(TINY, signal=0.0)).features)
    assert len(np.unique(rows[:, 0])) > 2990


def test_load_dense_and_sparse_npz(graph: Any, tmp_path: Path) -> None:
    import scipy.sparse as scipy_sparse

    labels = graph.labels.astype(np.int16)
    labels[graph.train_idx[0]] = -1
    common = {key: getattr(graph, key) for key in ("indptr", "indices", "train_idx", "val_idx", "test_idx")}
    rows = (np.random.default_rng(1).random((3000, 9)) < 0.3) * np.arange(9, dtype=np.uint8)
    sparse = scipy_sparse.csr_matrix(rows)
    np.savez(tmp_path / "dense.npz", features=rows, labels=labels, **common)
    np.savez_compressed(
        tmp_path / "sparse.npz", labels=labels, feat_data=sparse.data, feat_indices=sparse.indices,
        feat_indptr=sparse.indptr, feat_shape=np.array(sparse.shape), **common,
    )  # fmt: skip
    for name in ("dense", "sparse"):
        loaded = load(tmp_path / f"{name}.npz")
        assert (loaded.name, loaded.feature_count, loaded.row_bytes) == (name, 9, 36)
        assert len(loaded.train_idx) == 599, "a node without a label is not trained on"
        dense = load_dense(loaded.features)
        assert dense.dtype == np.float32
        np.testing.assert_array_equal(dense, rows)


def test_load_refuses(graph: Any, tmp_path: Path) -> None:
    path = tmp_path / "graph.npz"
    with pytest.raises(SourceError, match=r"cannot read .*graph\.npz"):
        load(path)
    path.write_bytes(b"not a zip")
    with pytest.raises(SourceError, match="cannot read"):
        load(path)
    np.savez(path, indptr=graph.indptr, indices=graph.indices)
    with pytest.raises(SourceError, match=r"has no labels, train_idx, val_idx, test_idx, features"):
        load(path)
    arrays = {
        key: getattr(graph, key)
        for key in ("indptr", "indices", "labels", "train_idx", "val_idx", "test_idx")
    }
    np.savez(path, features=np.zeros((7, 2)), **arrays)
    with pytest.raises(SourceError, match="3,000 nodes, but 7 rows"):
        load(path)


class LateRows:
    """Rows that come late and out of a copy, as a reader's do; wrong ones from request ``wrong_from`` on."""

    def __init__(self, features: Any, wrong_from: int = 1 << 30, flip: int = 0) -> None:
        self.features, self.wrong_from, self.flip = features, wrong_from, flip
        self.asked: list[Any] = []
        self.open_tickets = 0

    def submit(self, ids: Any) -> int:
        self.asked.append(ids.clone())
        self.open_tickets += 1
        assert self.open_tickets <= 2
        return len(self.asked) - 1

    def result(self, ticket: int) -> Any:
        self.open_tickets -= 1
        rows = self.features[self.asked[ticket].numpy()].copy()
        if ticket >= self.wrong_from:
            rows.view(np.uint32)[0, 0] ^= self.flip
        return torch.from_numpy(rows)


def test_training_is_the_same_bits_from_any_source(graph: Any, topology: Any) -> None:
    features, plan = load_dense(graph.features), tiny_plan(graph)
    memory = train(plan, topology, MemoryRows(features), no_progress)
    late = LateRows(features)
    other = train(plan, topology, late, no_progress)
    assert memory.losses == other.losses
    assert memory.digests == other.digests
    assert len(memory.digests) == len(late.asked)
    assert len(memory.losses) == 2 * 10
    assert (memory.val_accuracy, memory.test_accuracy) == (other.val_accuracy, other.test_accuracy)
    assert memory.rows == other.rows == sum(map(len, late.asked))
    assert len(other.epoch_seconds) == len(other.wait_seconds) == 2
    assert late.open_tickets == 0
    wrong = train(plan, topology, LateRows(features, wrong_from=3, flip=1 << 23), no_progress)
    assert (wrong.losses[:3], wrong.digests[:3]) == (memory.losses[:3], memory.digests[:3])
    assert wrong.losses[3] != memory.losses[3], "one value of twice the size shows in the loss"
    slightly = train(plan, topology, LateRows(features, wrong_from=3, flip=1), no_progress)
    assert all(one != two for one, two in zip(slightly.digests[3:], memory.digests[3:])), (
        "the last bit shows here"
    )
    reseeded = train(replace(plan, seed=1), topology, MemoryRows(features), no_progress)
    assert reseeded.losses != memory.losses


def test_labels_need_the_neighbours(graph: Any, topology: Any) -> None:
    features = load_dense(graph.features)
    plan = tiny_plan(graph, epochs=6)
    sage: Outcome = train(plan, topology, MemoryRows(features), no_progress)
    own = mlp_accuracy(plan, topology, features)
    assert sage.test_accuracy > 0.8
    assert sage.test_accuracy > own + 0.15


def test_the_whole_demo(tmp_path: Path) -> None:
    stages: list[str] = []

    def note(stage: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        stages.append(stage)

    report = run(
        recipe=TINY, memory="16MiB", workdir=tmp_path, epochs=2, batch_size=64, hidden=16, progress=note
    )
    assert report.identical, (report.first_difference, report.rows_identical)
    assert report.steps == len(report.store.losses) == 2 * 10
    assert report.store.io["rows_asked"] == report.store.rows == report.memory.rows
    assert report.store.io["bytes_asked"] == report.store.rows * 256
    assert report.memory.io == {}
    assert report.table_bytes == 3000 * 256
    assert report.test_count == report.test_total == 2250
    assert report.memory.test_accuracy > report.mlp_test_accuracy
    assert 0 < report.store.baseline_rss_bytes <= report.store.peak_rss_bytes
    # The store is kept where a directory was named, and nothing else is.
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    with featstore.open(tmp_path / "store") as store:
        np.testing.assert_array_equal(store.arrays["labels"], generate(tmp_path, TINY).labels)
    wanted = [
        "generate",
        "pack",
        "store: train",
        "store: evaluate test",
        "memory: train",
        "memory: evaluate test",
    ]
    assert [stage for stage in dict.fromkeys(stages) if stage in wanted] == wanted
    saved = json.loads(json.dumps(report.to_json()))
    assert saved["schema"] == "featstore.demo/1"
    assert saved["identical"] is True
    assert saved["store"]["losses"] == list(report.store.losses)
    text = shown(report)
    assert "All 20 losses and all" in text
    assert "bit-identical" in text
    assert f"{report.store.test_accuracy:.4f}" in text
    differing_reports_say_so(report)


def differing_reports_say_so(report: DemoReport) -> None:
    losses = list(report.memory.losses)
    losses[7] = float.fromhex(losses[7]).__add__(1e-9).hex()
    other = replace(report, memory=replace(report.memory, losses=tuple(losses)))
    assert (other.first_difference, other.losses_identical, other.identical) == (7, False, False)
    assert "THE RUNS DIFFER from step 7 on" in shown(other)
    shorter = replace(report, memory=replace(report.memory, losses=report.memory.losses[:-1]))
    assert shorter.first_difference == 19
    rows = replace(report, store=replace(report.store, digests=("0" * 16, *report.store.digests[1:])))
    assert (rows.losses_identical, rows.rows_identical, rows.identical) == (True, False, False)
    assert "in the rows delivered" in shown(rows)
    better = replace(report, store=replace(report.store, test_accuracy=2.0))
    assert "in their accuracies" in shown(better)
    assert not better.identical


def test_the_demo_by_mega_batches(tmp_path: Path) -> None:
    stages: list[str] = []

    def note(stage: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        stages.append(stage)

    options: dict[str, Any] = {"epochs": 3, "batch_size": 64, "hidden": 16, "progress": note}
    report = run_mega(recipe=TINY, memory="32MiB", workdir=tmp_path, resident=8, **options)
    mega, io_ = report.mega, report.mega.io
    assert report.agrees, (report.memory.test_accuracy, mega.test_accuracy)
    assert report.memory.test_accuracy > report.mlp_test_accuracy
    assert report.table_bytes == 3000 * 256
    assert (io_["partitions"], io_["resident"], io_["mega_batches"], io_["hubs"]) == (16, 8, 2, 150)
    assert len(mega.losses) >= report.epochs * 10
    assert 0 < min(mega.kept_shares) <= max(mega.kept_shares) < 1
    assert all(report.table_bytes < read < 3 * report.table_bytes for read in mega.read_bytes)
    for name in (
        "epoch_seconds",
        "load_seconds",
        "build_seconds",
        "wait_seconds",
        "draw_seconds",
        "train_seconds",
    ):
        values = getattr(mega, name)
        assert len(values) == 3
        assert min(values) > 0, name
    assert all(build < load for build, load in zip(mega.build_seconds, mega.load_seconds))
    assert 0 < mega.baseline_rss_bytes <= mega.peak_rss_bytes
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    wanted = [
        "generate",
        "pack",
        "mega: train",
        "mega: evaluate test",
        "memory: train",
        "memory: evaluate test",
    ]
    assert [stage for stage in dict.fromkeys(stages) if stage in wanted] == wanted
    saved = json.loads(json.dumps(report.to_json()))
    assert saved["schema"] == "featstore.demo-mega/1"
    assert (saved["agrees"], saved["tolerance"]) == (True, TOLERANCE)
    assert saved["mega"]["train_seconds"] == list(mega.train_seconds)
    text = shown(report, render_mega)
    assert "2 an epoch, each of 8 of 16 partitions" in text
    assert "within 5 points, as it should be" in text
    assert "Losses are not compared" in text
    assert f"{mega.test_accuracy:.4f}" in text
    worse = replace(report, mega=replace(mega, test_accuracy=report.memory.test_accuracy - TOLERANCE - 0.01))
    assert not worse.agrees
    assert "6.0 POINTS BELOW TRAINING IN MEMORY, more than 5" in shown(worse, render_mega)
    assert "points above training in memory" in shown(
        replace(report, mega=replace(mega, test_accuracy=2.0)), render_mega
    )


def test_the_command_in_mode_mega(monkeypatch: pytest.MonkeyPatch) -> None:
    import featstore_demo
    from click.testing import CliRunner
    from featstore_cli.main import cli

    asked: list[dict[str, Any]] = []
    report = SimpleNamespace(agrees=True, to_json=lambda: {"schema": "featstore.demo-mega/1", "epochs": 1})

    def run_fake(**options: Any) -> Any:
        asked.append(options)
        return report

    monkeypatch.setattr(featstore_demo, "run_mega", run_fake)
    monkeypatch.setattr(
        featstore_demo, "render_mega", lambda given: "the report" if given is report else "another"
    )

    def call(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(cli, ["demo", "--mode", "mega", *arguments])
        return result.exit_code, result.stdout

    code, out = call("--memory", "80MiB", "--seed", "3", "--json")
    assert (code, json.loads(out)) == (0, {"schema": "featstore.demo-mega/1", "epochs": 1})
    assert (asked[0]["memory"], asked[0]["seed"], asked[0]["engine"]) == (80 << 20, 3, None)
    assert call() == (0, "the report\n")
    assert "memory" not in asked[1], "the mode's own default"
    assert call("-q") == (0, "")
    report.agrees = False
    assert call("-q") == (1, "the report\n")
    assert call("--mode", "other")[0] == 2


def test_mega_demo_refusals(graph: Any, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="too small"):
        run_mega(recipe=TINY, memory="4KiB")
    with pytest.raises(SourceError, match="does not exist"):
        run_mega(workdir=tmp_path / "nowhere")
    assert [_partitions(graph, memory) for memory in (1 << 10, 1 << 23, 1 << 40)] == [60, 46, 16]
    assert _partitions(replace(graph, indptr=np.zeros(6, np.int64)), 1 << 20) == 5


def shown(report: DemoReport | MegaReport, how: Any = render) -> str:
    console = Console(width=140, file=io.StringIO())
    console.print(how(report))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_npz_rows_become_float32_in_the_store(graph: Any, tmp_path: Path) -> None:
    rows = (np.random.default_rng(1).random((3000, 9)) < 0.3) * np.arange(9, dtype=np.uint8)
    common = {
        key: getattr(graph, key)
        for key in ("indptr", "indices", "labels", "train_idx", "val_idx", "test_idx")
    }
    np.savez(tmp_path / "graph.npz", features=rows, **common)
    assert runner._pack(load(tmp_path / "graph.npz"), tmp_path / "store", no_progress) > 0
    with featstore.open(tmp_path / "store") as store, store.reader(memory="16MiB") as reader:
        assert store.tables["features"].dtype == np.float32
        np.testing.assert_array_equal(reader.read(np.arange(3000)), rows)


@pytest.mark.parametrize(
    ("row_values", "given", "expected"),
    [
        (64, {}, (5, 256, (5, 4, 3))),
        (1000, {}, (2, 64, (5, 3, 2))),
        (8415, {}, (2, 32, (4, 3, 2))),
        (64, {"epochs": 1, "batch_size": 7, "fanouts": [2, -1]}, (1, 7, (2, -1))),
    ],
)
def test_training_is_sized_by_the_rows(
    graph: Any, row_values: int, given: dict[str, Any], expected: Any
) -> None:
    options: dict[str, Any] = {"epochs": None, "batch_size": None, "fanouts": None} | given
    big = replace(graph, feature_count=row_values, train_idx=np.arange(8000))
    plan = runner._training_plan(big, **options, hidden=4, seed=0, evaluated_max=(4000, 8000))
    assert (plan.epochs, plan.batch_size, plan.fanouts) == expected
    assert 250 <= plan.test_count <= 2250


def test_demo_refusals(graph: Any, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="too small"):
        run(recipe=TINY, memory="4KiB")
    with pytest.raises(SourceError, match="does not exist"):
        run(workdir=tmp_path / "nowhere")
    with pytest.raises(SourceError, match="at least one epoch"):
        run(recipe=TINY, epochs=0)
    with pytest.raises(ValueError, match="as a size"):
        run(memory="much")
    unlabelled = replace(graph, val_idx=graph.val_idx[:0])
    with pytest.raises(SourceError, match="each need a labelled node"):
        runner._training_plan(unlabelled, None, None, None, 4, 0, (10, 10))


def test_a_failing_worker_is_reported(graph: Any, tmp_path: Path) -> None:
    job = Job(tiny_plan(graph), str(tmp_path / "nowhere"), str(graph.features), None, 1 << 24, None)
    with pytest.raises(
        FeatstoreError, match=r"(?s)training process \(memory\) ended with 1:.*nowhere/indptr\.npy"
    ):
        runner._in_own_process(job, tmp_path, "memory", no_progress)
    job.write(tmp_path / "job.json")
    assert read_job(tmp_path / "job.json") == job
