"""``featstore sample``, and what ``inspect`` and ``verify`` say of traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import ROWS, Call, parsed

import featstore
from featstore.errors import IncompleteStoreError
from featstore.sampling import batches as sampling
from featstore.trace.trace import Trace


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.npy"
    np.save(path, np.arange(0, ROWS, 5))
    return path


OPTIONS = ["--fanouts", "4,3", "--batch-size", 100]


def test_sample(call: Call, store: Path, train: Path, tmp_path: Path) -> None:
    out = tmp_path / "t"
    result = call("sample", store, "--out", out, *OPTIONS, "--train", train, "--epochs", 2, "--seed", 7)
    assert result.stderr == ""
    for part in (str(out), "12, ", "node ids", "fanouts", "4,3", "sampled in", "seed"):
        assert part in result.stdout
    with featstore.open(store) as opened, Trace(out) as trace:
        assert len(trace) == 12
        wanted = [
            batch
            for epoch in range(2)
            for batch in sampling.sample_batches(opened, np.load(train), [4, 3], 100, seed=7, epoch=epoch)
        ]
        sample: Any
        for number, (ids, sample) in enumerate(trace):
            assert np.array_equal(ids[""], wanted[number].node)
            assert np.array_equal(sample["batch"].edge_id, wanted[number].edge_id)
            assert (sample["batch_size"], sample["epoch"]) == (100, number // 6)
        assert trace.fingerprint["store"] == opened.uuid
        assert trace.drop == ()
    assert call("sample", store, "--out", tmp_path / "q", *OPTIONS, "--train", train, "-q").stdout == ""


def test_sample_json_and_where_the_graph_is(call: Call, store: Path, train: Path, tmp_path: Path) -> None:
    logs = []
    for where, in_memory in (("--in-memory", True), ("--from-disk", False)):
        out = tmp_path / where
        data = parsed(
            call(
                "sample", store, "--out", out, *OPTIONS, "--train", train, where, "--memory", "4MiB", "--json"
            )
        )
        assert data["schema"] == "featstore.sample/1"
        assert set(data) == {
            "schema",
            "trace",
            "complete",
            "uuid",
            "batches",
            "node_types",
            "sample_bytes",
            "bytes",
            "drop",
            "fingerprint",
            "in_memory",
            "seconds",
        }
        assert data["in_memory"] is in_memory
        assert (data["complete"], data["batches"]) == (True, 6)
        ids = data["node_types"][""]
        assert ids["ids_per_batch"]["min"] <= ids["ids_per_batch"]["median"] <= ids["ids_per_batch"]["max"]
        assert ids["ids"] > 600
        assert data["bytes"] == (out / "trace.log").stat().st_size > data["sample_bytes"] > 0
        logs.append((out / "trace.log").read_bytes())
    assert logs[0] == logs[1]


def test_training_nodes_from_the_store(
    call: Call, tmp_path: Path, inputs: Path, rows: Any, train: Path
) -> None:
    mask = np.zeros(ROWS, bool)
    mask[::5] = True
    featstore.pack(
        tmp_path / "s", rows, graph=inputs / "edges.npy", arrays={"mask": mask, "y": np.arange(ROWS) % 2}
    ).close()
    one = parsed(
        call("sample", tmp_path / "s", "--out", tmp_path / "a", *OPTIONS, "--train", "mask", "--json")
    )
    other = parsed(
        call("sample", tmp_path / "s", "--out", tmp_path / "b", *OPTIONS, "--train", train, "--json")
    )
    assert one["uuid"] == other["uuid"]
    text = call("sample", tmp_path / "s", "--out", tmp_path / "c", *OPTIONS, "--train", "y", code=1).stderr
    assert "only 2 are different" in text
    text = call("sample", tmp_path / "s", "--out", tmp_path / "c", *OPTIONS, "--train", "none", code=2).stderr
    assert "has no array 'none'" in text
    assert "mask, y" in text


def test_interrupted_and_resumed(
    call: Call, store: Path, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    out, arguments = tmp_path / "t", ["sample", store, "--out", tmp_path / "t", *OPTIONS, "--train", train]
    call(*arguments[:3], tmp_path / "whole", *arguments[4:])
    sample = sampling.SampledBatches.__getitem__

    def fails(self: Any, index: Any) -> Any:
        if index == 4:
            raise KeyboardInterrupt
        return sample(self, index)

    monkeypatch.setattr(sampling.SampledBatches, "__getitem__", fails)
    result = call(*arguments, code=130)
    assert "interrupted; run the same command again with --resume" in result.stderr
    monkeypatch.undo()
    assert "unfinished recording" in call(*arguments, code=1).stderr
    assert "--resume" in call(*arguments, code=1).stderr
    far = parsed(call("inspect", out, "--json"))
    assert far["complete"] is False
    assert far["uuid"] is None
    assert far["batches"] == 4
    assert "unfinished" in call("inspect", out).stdout
    assert "go on with resume" in call("verify", out, code=1).stderr
    text = call(*arguments, "--resume", "--seed", 1, code=1).stderr
    assert "seed = 0" in text
    assert call(*arguments, "--resume", "-q").stderr == ""
    assert (out / "trace.log").read_bytes() == (tmp_path / "whole" / "trace.log").read_bytes()
    assert "was completed" in call(*arguments, "--resume", code=1).stderr
    assert "already holds a trace" in call(*arguments, code=1).stderr
    call(*arguments, "--overwrite", "--seed", 3)
    assert (out / "trace.log").read_bytes() != (tmp_path / "whole" / "trace.log").read_bytes()


def test_usage(call: Call, store: Path, two_tables: Path, train: Path, tmp_path: Path) -> None:
    start = ["sample", store, "--out", tmp_path / "t"]
    for options, text in (
        (["--train", train], "--fanouts"),
        (["--fanouts", "4"], "--train"),
        (["--fanouts", "4,x", "--train", train], "write for example 10,5"),
        (["--fanouts", "-2", "--train", train], "-1 for all"),
        (["--fanouts", "4", "--train", train, "--graph", "g"], "no graph 'g'"),
        (["--fanouts", "4", "--train", train, "--resume", "--overwrite"], "contradict"),
    ):
        assert text in call(*start, *options, code=2).stderr
    assert (
        "holds no graph"
        in call(
            "sample", two_tables, "--out", tmp_path / "t", "--fanouts", "4", "--train", train, code=1
        ).stderr
    )
    text = call(*start, "--fanouts", "4", "--train", train, "--from-disk", "--memory", "1k", code=1).stderr
    assert "the smallest that works" in text
    assert not (tmp_path / "t").exists()


def test_inspect_and_verify_a_trace(call: Call, store: Path, train: Path, tmp_path: Path) -> None:
    out = tmp_path / "t"
    made = parsed(call("sample", store, "--out", out, *OPTIONS, "--train", train, "--json"))
    data = parsed(call("inspect", out, "--json"))
    assert data == {k: v for k, v in made.items() if k not in ("in_memory", "seconds")} | {
        "schema": "featstore.inspect-trace/1"
    }
    for part in (made["uuid"], "node ids", "fanouts", "train_nodes"):
        assert part in call("inspect", out).stdout
    for option in ("--partitions", "--orders"):
        assert f"{option} is of a store" in call("inspect", out, option, code=2).stderr
    report = parsed(call("verify", out, "--json"))
    assert report["schema"] == "featstore.verify-trace/1"
    assert (report["ok"], report["batches"], report["uuid"], report["access"]) == (
        True,
        6,
        made["uuid"],
        "direct",
    )
    assert "sound (6 mini-batches" in call("verify", out, "--buffered").stdout
    assert call("verify", out, "-q").stdout == ""
    log = out / "trace.log"
    raw = bytearray(log.read_bytes())
    raw[len(raw) // 2] ^= 4
    log.write_bytes(raw)
    report = parsed(call("verify", out, "--json", code=3))
    assert [p["batch"] is not None for p in report["problems"]] == [True]
    assert "mini-batch" in call("verify", out, code=3).stdout
    log.write_bytes(raw[:-64])
    assert "1 problems" in call("verify", out, code=3).stdout
    assert "corrupt data" in call("inspect", out, code=3).stderr
    log.unlink()
    assert "there is no store" in call("inspect", tmp_path / "none", code=1).stderr
    with pytest.raises(IncompleteStoreError):
        Trace(out)
