"""``featstore split``, and what ``inspect`` says of what came of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from cli_support import ROWS, Call, parsed

import featstore


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    return featstore.split(store, 2, tmp_path_factory.mktemp("split") / "out")


def test_a_split_and_its_report(call: Call, store: Path, out: Path, tmp_path: Path) -> None:
    data = parsed(call("split", store, "--hosts", 2, "--out", tmp_path / "out", "--train", "y", "--json"))
    assert data["schema"] == "featstore.split/1"
    assert data["hosts"] == 2
    assert sum(part["rows"]["features"] for part in data["parts"]) == ROWS
    edges = data["graphs"]["features"]
    assert sum(part["edges"]["features"] for part in data["parts"]) == edges["edges"] - edges["remote_edges"]
    text = call("split", store, "--hosts", 2, "--out", tmp_path / "out", "--overwrite").stdout
    assert "host-1" in text
    assert "join two hosts" in text
    assert call("split", store, "--hosts", 3, "--out", tmp_path / "out", "--overwrite", "-q").stdout == ""
    assert (tmp_path / "out/host-2").is_dir()


def test_two_forms_of_training_nodes_are_refused(call: Call, store: Path, tmp_path: Path) -> None:
    """One of them would be passed over."""
    train = ("--train", "y", "--train", "features=y")
    said = call("split", store, "--hosts", 2, "--out", tmp_path / "out", *train, code=2).stderr
    assert "--train TYPE=NAME" in said
    assert not (tmp_path / "out").exists()


def test_inspect_says_of_which_split_a_store_is(call: Call, store: Path, out: Path) -> None:
    whole = parsed(call("inspect", out / "topology", "--json"))
    assert whole["family"]["host"] is None
    part = parsed(call("inspect", out / "host-1", "--json"))
    assert part["family"]["uuid"] == whole["uuid"]
    assert (part["family"]["host"], part["family"]["hosts"]) == (1, 2)
    assert parsed(call("inspect", store, "--json"))["family"] is None
    assert "host 1 of the split" in call("inspect", out / "host-1").stdout
    assert "the topology of the split" in call("inspect", out / "topology").stdout
    assert "split" not in call("inspect", store).stdout
    call("verify", out / "host-0")
    call("inspect", out / "host-0", "--orders")


def test_a_split_with_its_topology(call: Call, store: Path, out: Path, tmp_path: Path) -> None:
    said = parsed(call("split", store, "--hosts", 2, "--out", tmp_path / "o", "--split-topology", "--json"))
    assert said["split_topology"]
    with featstore.open(store) as whole:
        edges = whole.graphs["features"].edges
    assert said["graphs"]["features"]["edges"] == edges
    own = []
    for name in ("topology", "host-0", "host-1"):
        call("verify", tmp_path / "o" / name)
        split = parsed(call("inspect", tmp_path / "o" / name, "--json"))["family"]["split_graphs"]["features"]
        own.append(split["own_edges"])
        assert "is split, too" in call("inspect", tmp_path / "o" / name).stdout
    assert own[0] is None
    assert sum(own[1:]) == edges
    assert split["edge_parts"] == {}
    assert parsed(call("inspect", out / "host-0", "--json"))["family"]["split_graphs"] == {}


def test_what_whole_lists_have_of_edges_is_said(call: Call, tmp_path: Path) -> None:
    np.save(tmp_path / "edges.npy", np.random.default_rng(0).integers(0, 50, (2, 200)))
    np.save(tmp_path / "w.npy", np.ones(200, np.float32))
    np.save(tmp_path / "x.npy", np.ones((50, 2), np.float32))
    given = (
        "--features",
        tmp_path / "x.npy",
        "--graph",
        tmp_path / "edges.npy",
        "--order",
        "ldg",
        "--edge-ids",
    )
    weights = ("--edge-weights", tmp_path / "w.npy", "--hosts", 1, "--out", tmp_path / "o")
    call("split", *given, *weights, "--split-topology")
    assert ", with their edge ids, weights" in call("inspect", tmp_path / "o/host-0").stdout
    said = parsed(call("inspect", tmp_path / "o/host-0", "--json"))["family"]["split_graphs"]["features"]
    assert said["edge_parts"] == {"edge_ids": "int32", "weights": "float32"}
    said = parsed(call("inspect", tmp_path / "o/topology", "--json"))["family"]["split_graphs"]["features"]
    assert said["edge_parts"] is None


def test_features_are_split_without_a_store(call: Call, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", rows := rng.standard_normal((300, 4), np.float32))
    np.save(tmp_path / "edges.npy", rng.integers(0, 300, (2, 900)))
    np.save(tmp_path / "y.npy", np.arange(0, 300, 2))
    said = parsed(
        call(
            "split", "--features", tmp_path / "x.npy", "--graph", tmp_path / "edges.npy", "--array",
            f"y={tmp_path / 'y.npy'}", "--train", "y", "--edge-ids", "--order", "ldg", "--hosts", 2, "--out",
            tmp_path / "o", "--json",
        )
    )  # fmt: skip
    assert said["hosts"] == 2
    assert sum(part["rows"]["features"] for part in said["parts"]) == 300
    with featstore.open(tmp_path / "o/topology") as topology:
        assert topology.graphs["features"].has_edge_ids
    with featstore.open(tmp_path / "o/host-1") as part, part.reader(memory="8MiB", static=None) as reader:
        found = reader.read(np.arange(part.tables["features"].rows))
    assert {row.tobytes() for row in found} <= {row.tobytes() for row in rows}
    call(
        "split",
        tmp_path / "s",
        "--graph",
        tmp_path / "edges.npy",
        "--hosts",
        2,
        "--out",
        tmp_path / "p",
        code=2,
    )
    call("split", "--hosts", 2, "--out", tmp_path / "p", code=2)
    call("split", tmp_path / "s", "--no-edge-ids", "--hosts", 2, "--out", tmp_path / "p", code=2)


def test_features_of_edge_types_are_split_without_a_store(call: Call, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    cites = np.stack([rng.integers(0, 300, 900), rng.integers(0, 300, 900)])
    of = np.stack([np.arange(300), rng.integers(0, 40, 300)])
    given = {
        "x": rng.standard_normal((300, 4), np.float32), "cites": cites, "of": of, "y": np.arange(0, 300, 2),
        "w": rng.random(900, np.float32), "t": rng.integers(0, 9, 900),
    }  # fmt: skip
    for name, array in given.items():
        np.save(tmp_path / f"{name}.npy", array)
    paths = {name: tmp_path / f"{name}.npy" for name in given}
    words = [
        "--features", f"paper={paths['x']}", "--nodes", "field=40", "--graph",
        f"paper__cites__paper={paths['cites']}", "--graph", f"paper__of__field={paths['of']}",
        "--edge-weights", f"paper__cites__paper={paths['w']}", "--edge-times",
        f"paper__cites__paper={paths['t']}", "--array", f"paper.train={paths['y']}", "--train", "paper.train",
        "--order", "ldg", "--hosts", 2, "--out", tmp_path / "o",
    ]  # fmt: skip
    said = parsed(call("split", *words, "--json"))
    assert sum(part["rows"]["paper"] for part in said["parts"]) == 300
    assert {name: graph["edges"] for name, graph in said["graphs"].items()} == {
        "paper__cites__paper": 900, "paper__of__field": 300
    }  # fmt: skip
    with featstore.open(tmp_path / "o/topology") as topology:
        assert topology.node_types == ["paper", "field"]
        graph = topology.graphs["paper__cites__paper"]
        assert (graph.has_weights, graph.has_times) == (True, True)
    call("split", tmp_path / "s", "--nodes", "field=40", "--hosts", 2, "--out", tmp_path / "p", code=2)
    call("split", *words[:-1], tmp_path / "p", "--train", "nobody=y", code=2)


def test_a_part_is_sampled_and_compiled(call: Call, out: Path, tmp_path: Path) -> None:
    part = Path(shutil.copytree(out / "host-0", tmp_path / "part"))
    with featstore.open(part) as opened:
        np.save(tmp_path / "ids.npy", np.arange(0, opened.tables["features"].rows, 4))
    call("sample", part, "--out", tmp_path / "t", "--fanouts", "4,4", "--train", tmp_path / "ids.npy")
    call("pack", part, "--trace", tmp_path / "t", "--memory", "64MiB")
    call("verify", part)


def test_wrong_usage(call: Call, store: Path, tmp_path: Path) -> None:
    call("split", store, code=2)
    call("split", store, "--hosts", 2, "--out", tmp_path / "o", "--train", "nobody=y", code=2)
    said = call("split", store, "--hosts", 0, "--out", tmp_path / "o", code=1).stderr
    assert "hosts must be at least 1" in said
    said = call("split", store, "--hosts", 2, "--out", tmp_path / "o", "--train", "z", code=1).stderr
    assert "no array 'z'" in said
    assert not (tmp_path / "o").exists()


def test_an_interrupted_split_says_how_to_go_on(call: Call, store: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(store, tmp_path / "s"))
    chunk = next(path.glob("g*/tables/features/rows/c.0*"))
    data = chunk.read_bytes()
    chunk.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    said = call("split", path, "--hosts", 2, "--out", tmp_path / "o", code=3).stderr
    assert "the split is unfinished; run the same command again with --resume" in said
    chunk.write_bytes(data)
    call("split", path, "--hosts", 2, "--out", tmp_path / "o", "--resume")
    call("verify", tmp_path / "o/host-1")


def test_what_cannot_be_gone_on_with_is_not_said_to_be(call: Call, store: Path, tmp_path: Path) -> None:
    """A split that is whole, whatever was wrong with what is asked for; one that was replacing another."""
    out = tmp_path / "o"
    call("split", store, "--hosts", 2, "--out", out)
    for more in (["--resume"], ["--overwrite", "--train", "nobody"], []):
        said = call("split", store, "--hosts", 2, "--out", out, *more, code=1).stderr
        assert "unfinished; run" not in said
    path = Path(shutil.copytree(store, tmp_path / "s"))
    chunk = next(path.glob("g*/tables/features/rows/c.0*"))
    data = chunk.read_bytes()
    chunk.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    said = call("split", path, "--hosts", 2, "--out", out, "--overwrite", "--seed", 1, code=3).stderr
    assert "to go on from here" not in said
    chunk.write_bytes(data)
    said = call("split", path, "--hosts", 2, "--out", out, "--resume", "--seed", 1, code=1).stderr
    assert "start anew with --overwrite" in said
    call("split", path, "--hosts", 2, "--out", out, "--overwrite", "--seed", 1)
    call("verify", out / "host-1")
