"""``featstore tune``, as briefly as it can be."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import ROWS, Call, parsed

import featstore
from featstore.loaders.options import LoaderOptions
from featstore.tune import timetable

OPTIONS = ["--fanouts", "4,3", "--batch-size", 100, "--memory", "16MiB", "--seconds", 1, "--cores", 2]


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.npy"
    np.save(path, np.arange(0, ROWS, 2))
    return path


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy, nothing is left out either."""
    monkeypatch.setattr(timetable, "LEAST_SECONDS", 60.0)


@pytest.mark.usefixtures("unhurried")
def test_tune(call: Call, store: Path, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    before = sorted(store.parent.rglob("*"))
    data = parsed(call("tune", store, *OPTIONS, "--train", train, "--step-ms", "30", "--json"))
    assert sorted(store.parent.rglob("*")) == before, "something was left beside the store, or in it"
    left = (path.name for path in (tmp_path / "scratch").iterdir())
    assert not [name for name in left if not name.startswith("pymp-")]  # of workers that ended late
    assert data["schema"] == "featstore.tune/1"
    assert {
        "store",
        "table",
        "choice",
        "loader_options",
        "cores",
        "stages",
        "slowest",
        "seconds",
        "seconds_before",
        "epoch_batches",
        "epoch_seconds",
        "tried",
        "hit_rate",
        "filling",
        "curve",
        "memory",
        "policy",
        "left_out",
        "profile",
    } <= set(data)
    sampled = set(data["profile"]["sample"])  # on a loaded machine there may be no time for all
    assert {"0"} <= sampled <= {"0", "1", "2"}
    assert sampled == {"0", "1", "2"} or any("sampl" in one for one in data["left_out"])
    assert {row["engine"] for row in data["profile"]["read"]} >= {"threads"}
    assert data["epoch_batches"] == ROWS // 2 // 100
    assert data["slowest"] == "train"
    assert data["seconds"] >= 0.03
    assert data["loader_options"]["memory"] == 16 << 20
    assert set(data["loader_options"]) <= set(LoaderOptions.__annotations__), "what a loader may be told"
    assert featstore.open(store).uuid, "the store is as it was"


@pytest.mark.usefixtures("unhurried")
def test_tune_text(call: Call, store: Path, train: Path) -> None:
    result = call("tune", store, *OPTIONS, "--train", train, "--hidden", 8, "--trials", 1)
    for part in (
        "sample",
        "read",
        "extract",
        "train",
        "tried out",
        "hit rate",
        "choice",
        "num_workers=",
        'store.loader(batches, mode="online", memory=',
    ):
        assert part in result.stdout
    assert "has no workers" not in result.stderr


def test_what_there_was_no_time_for_is_named(call: Call, store: Path, train: Path) -> None:
    result = call("tune", store, *OPTIONS, "--train", train, "--step-ms", "400", "--trials", 4)
    assert "too few for" in result.stderr
    assert "trying out" in result.stderr


def test_tune_from_disk(call: Call, store: Path, train: Path) -> None:
    result = call(
        "tune",
        store,
        *OPTIONS,
        "--train",
        train,
        "--step-ms",
        0,
        "--trials",
        0,
        "--from-disk",
        "--graph-memory",
        "32MiB",
    )
    assert "has no workers" in result.stderr
    assert "tried out" not in result.stdout
    assert "0 sampler workers" in result.stdout


def test_all_nodes_are_trained_on(call: Call, store: Path) -> None:
    data = parsed(call("tune", store, *OPTIONS, "--step-ms", 0, "--trials", 0, "--cores", 1, "--json"))
    assert data["epoch_batches"] == ROWS // 100
    assert data["cores"] == 1


def test_rows_of_other_nodes_are_not_read_by_these_ids(call: Call, tmp_path: Path) -> None:
    tables = {"features": np.zeros((50, 1)), "edge_features": np.zeros((200, 1))}
    edges = np.random.default_rng(0).integers(0, 50, (2, 200))
    featstore.pack(tmp_path / "s", tables, graph={"features": edges}).close()
    given: list[Any] = ["tune", tmp_path / "s", "--fanouts", "3", "--batch-size", 5, "--step-ms", 0]
    given += ["--trials", 0, "--seconds", 1]
    text = call(*given, "--table", "edge_features", code=2).stderr
    assert "table 'edge_features' (200 rows) is not of the 50 nodes" in text
    assert parsed(call(*given, "--memory", "16MiB", "--json"))["table"] == "features"


def test_usage(call: Call, store: Path, two_tables: Path, train: Path, tmp_path: Path) -> None:
    for options, text in (
        (["--train", train], "--fanouts"),
        (["--fanouts", "4,x"], "write for example 10,5"),
        (["--fanouts", "4", "--step-ms", "-1"], "is not in the range"),
        (["--fanouts", "4", "--cores", "0"], "is not in the range"),
        (["--fanouts", "4", "--seconds", "0.1"], "is not in the range"),
        (["--fanouts", "4", "--hidden", "8", "--step-ms", "1"], "--hidden is of the GraphSAGE"),
        (["--fanouts", "4", "--train", "none"], "has no array 'none'"),
        (["--fanouts", "4", "--table", "none"], "has no table 'none'"),
        (["--fanouts", "4", "--graph", "none"], "no graph 'none'"),
    ):
        assert text in call("tune", store, *options, code=2).stderr
    assert "holds no graph" in call("tune", two_tables, "--fanouts", "4", code=1).stderr
    assert "holds no graph" in call("tune", two_tables, "--fanouts", "4", "--table", "paper", code=1).stderr
    assert "there is no store" in call("tune", tmp_path / "none", "--fanouts", "4", code=1).stderr
    text = call("tune", store, *OPTIONS, "--train", train, "--step-ms", 0, "--memory", "1MiB", code=1).stderr
    assert "the smallest that works" in text
    assert "not 'best'" in call("tune", store, *OPTIONS, "--step-ms", 0, "--policy", "best", code=1).stderr
