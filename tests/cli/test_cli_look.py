"""``inspect``, ``verify``, ``explain`` and ``gc``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from cli_support import COLUMNS, ROWS, STORE_KEYS, Call, parsed

import featstore
from featstore.engine import choose
from featstore.plan.cost import DeviceModel, device_key, models_path, save_model
from featstore.storage.generations import IN_USE


@pytest.fixture
def copy(store: Path, tmp_path: Path) -> Path:
    """A store that a test may spoil."""
    return Path(shutil.copytree(store, tmp_path / "copy"))


def chunk_of(store: Path) -> Path:
    return next(store.glob("g*/tables/features/rows/c.0*"))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# inspect


def test_inspect(call: Call, store: Path) -> None:
    text = call("inspect", store).stdout
    for part in (
        "graph 'features'",
        "12,000 edges between 3,000 rows of table 'features', int32",
        "30 by degree",
        "stored twice",
        "table 'features'",
        "3,000 rows of 16 float32",
        "ldg, because it was asked for",
        "edge cut",
        "4: smallest",
        "CRC-32C",
        "0 NaN",
        "reading here",
        "access",
        "default numbers",
        "writer",
        "source of features",
        "rows.npy",
        "y",
    ):
        assert part in text
    assert "first row" not in text
    assert "first row" in call("inspect", store, "--partitions").stdout


def test_inspect_json(call: Call, store: Path) -> None:
    data = parsed(call("inspect", store, "--json", "--partitions"))
    assert data["schema"] == "featstore.inspect/1"
    assert set(data) == STORE_KEYS | {"reading", "compiled"}
    assert data["files"]["bytes"] == sum(p.stat().st_size for p in store.glob("g*/**/*") if p.is_file())
    assert data["arrays"] == {"y": {"shape": [ROWS], "dtype": "int64"}}
    table = data["tables"]["features"]
    assert table["partitions"]["count"] == 4
    assert table["partitions"]["offsets"][-1] == ROWS
    assert table["partitions"]["bytes"]["max"] == table["partitions"]["rows"]["max"] * 4 * COLUMNS
    assert 0 < table["order"]["edge_cut"] < 1
    assert table["order"]["because"] == "it was asked for"
    assert table["order"]["parameters"]["parts"] == 4
    assert table["order"]["degrees_known"] is True
    assert (table["statistics"]["nan"], table["statistics"]["inf"]) == (0, 0)
    graph = data["graphs"]["features"]
    assert set(graph) == {
        "table", "nodes", "edges", "dtype", "bytes", "edge_cut", "hubs", "edge_ids", "edge_type",
        "source_nodes", "weights", "times",
    }  # fmt: skip
    assert graph["edge_ids"] is None
    assert (graph["table"], graph["nodes"], graph["edges"], graph["dtype"]) == (
        "features",
        ROWS,
        4 * ROWS,
        "int32",
    )
    assert graph["edge_cut"] == table["order"]["edge_cut"]
    hubs = graph["hubs"]
    with featstore.open(store) as opened:
        copied = int(opened.graphs["features"].hub_rows()[1][-1])
    assert hubs == {
        "method": "degree",
        "count": 30,
        "edges": copied,
        "edge_share": copied / (4 * ROWS),
        "bytes": 4 * copied,
    }
    assert graph["bytes"] == 8 * (ROWS + 1) + 4 * 4 * ROWS + hubs["bytes"]
    reading = data["reading"]
    assert set(reading) == {
        "engine",
        "engine_because",
        "memory_bytes",
        "memory_because",
        "access",
        "access_because",
        "model",
    }
    assert reading["engine"] == choose("auto").name
    assert reading["model"]["calibrated"] is False


def test_inspect_shows_the_calibrated_model(call: Call, store: Path) -> None:
    for access in ("direct", "buffered"):
        save_model(device_key(store, choose("auto").name, access), DeviceModel(1e-5, 1e-9, 1e-4))
    assert parsed(call("inspect", store, "--json"))["reading"]["model"]["calibrated"] is True
    assert "10.0 µs a read + 1.00 GB/s (calibrated)" in call("inspect", store).stdout
    models_path().write_text("{")
    assert "remove it and run `featstore calibrate`" in call("inspect", store, code=1).stderr
    for name in ("explain", "bench"):
        assert "remove it and run `featstore calibrate`" in call(name, store, code=1).stderr


@pytest.mark.parametrize("name", ["inspect", "verify", "explain", "bench", "gc"])
def test_what_is_no_store(call: Call, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for path, text in (("folder", "not a featstore store"), ("file", "is a file"), ("nowhere", "there")):
        result = call(name, tmp_path / path, code=1)
        assert result.stderr.startswith("featstore: error: ")
        assert text in result.stderr
    assert list((tmp_path / "folder").iterdir()) == [], "looking leaves nothing behind"
    assert "Missing argument" in call(name, code=2).stderr


def test_inspect_a_store_without_graphs(call: Call, two_tables: Path) -> None:
    assert parsed(call("inspect", two_tables, "--json"))["graphs"] == {}
    assert "graph '" not in call("inspect", two_tables).stdout


def test_a_graph_without_edges_or_hubs(call: Call, tmp_path: Path) -> None:
    none = np.zeros((2, 0), np.int64)
    featstore.pack(tmp_path / "s", np.zeros((5, 4), np.float32), graph=none, order="given", hubs=0).close()
    graph = parsed(call("inspect", tmp_path / "s", "--json"))["graphs"]["features"]
    assert (graph["edges"], graph["hubs"], graph["edge_cut"]) == (0, None, None)
    text = call("inspect", tmp_path / "s").stdout
    assert "0 edges between 5 rows" in text
    assert "hubs" not in text
    featstore.pack(tmp_path / "t", np.zeros((5, 4), np.float32), graph=none, order="given").close()
    assert parsed(call("inspect", tmp_path / "t", "--json"))["graphs"]["features"]["hubs"]["edge_share"] == 0
    call("verify", tmp_path / "t")


def test_an_empty_table(call: Call, tmp_path: Path) -> None:
    featstore.pack(tmp_path / "s", np.zeros((0, 4), np.float32)).close()
    assert "0 rows of 4 float32" in call("inspect", tmp_path / "s").stdout
    call("verify", tmp_path / "s")
    assert "no rows to read" in call("bench", tmp_path / "s", code=1).stderr
    assert "has 0 rows, fewer than" in call("explain", tmp_path / "s", code=2).stderr


def test_inspect_scores_orders(call: Call, store: Path) -> None:
    text = call("inspect", store, "--orders").stdout
    for part in ("as stored", "multilevel", "bfs", "edge cut", "2 hops"):
        assert part in text
    found = parsed(call("inspect", store, "--orders", "--json"))["orders"]
    assert [o["method"] for o in found] == ["as stored", "metis", "multilevel", "ldg", "bfs"]
    assert all(0 <= o["scores"]["edge_cut"] <= 1 for o in found if o["scores"])
    assert call("inspect", store, "--train", "y", code=2).stderr
    assert "no array" in call("inspect", store, "--orders", "--train", "nothing", code=2).stderr


# verify


def test_verify_a_sound_store(call: Call, store: Path) -> None:
    assert "sound" in call("verify", store).stdout
    assert call("verify", store, "-q").stdout == ""
    data = parsed(call("verify", store, "--json", "--buffered"))
    assert data["schema"] == "featstore.verify/1"
    assert {
        "path",
        "uuid",
        "generation",
        "ok",
        "files",
        "bytes",
        "pages",
        "problems",
        "problem_count",
        "access",
        "seconds",
    } <= set(data)
    assert (data["ok"], data["problems"], data["access"]) == (True, [], "buffered")


def test_verify_names_file_and_page(call: Call, copy: Path) -> None:
    flip(chunk_of(copy), 2 * 4096 + 7)
    result = call("verify", copy, code=3)
    line = next(line for line in result.stdout.splitlines() if "page checksum" in line)
    assert line.split()[0] == str(chunk_of(copy).relative_to(copy))
    assert line.split()[1] == "2"
    problem = parsed(call("verify", copy, "--json", code=3))["problems"][0]
    assert set(problem) == {"path", "page", "offset", "expected", "actual", "what"}
    assert (problem["path"], problem["page"], problem["offset"]) == (
        str(chunk_of(copy).relative_to(copy)),
        2,
        8192,
    )
    assert "page checksum" in call("verify", copy, "-q", code=3).stdout
    result = call("explain", copy, "--random", ROWS, "--static", "none", "--run", code=3)
    assert "featstore: error: corrupt data in" in result.stderr


def test_names_that_are_no_text_are_shown(call: Call, copy: Path) -> None:
    """A foreign file may have any name: it is shown with backslashes, and no error of output."""
    generation = next(p for p in copy.iterdir() if p.is_dir() and p.name.startswith("g0"))
    (generation / os.fsdecode(b"\xff\xfe")).write_bytes(b"")
    assert "\\udcff\\udcfe" in call("verify", copy).stdout


def test_verify_names_pages_of_graphs(call: Call, copy: Path) -> None:
    path = next(copy.glob("g*/graphs/features/sources/rows/c.0*"))
    flip(path, 4096 + 7)
    problem = parsed(call("verify", copy, "--json", code=3))["problems"][0]
    assert (problem["path"], problem["page"], problem["what"]) == (
        str(path.relative_to(copy)),
        1,
        "page checksum",
    )


def test_verify_a_missing_file_and_a_broken_manifest(call: Call, copy: Path) -> None:
    chunk_of(copy).unlink()
    assert "missing file" in call("verify", copy, code=3).stdout
    assert "no file" in call("inspect", copy, code=3).stderr
    manifest = copy / "featstore.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 99'))
    assert "install a newer one" in call("verify", copy, code=1).stderr
    manifest.write_text("{}")
    assert "not a featstore manifest" in call("verify", copy, code=3).stderr


# explain


@pytest.mark.parametrize("ids", ["ids.npy", "ids.txt"])
def test_explain_files_of_ids(call: Call, store: Path, inputs: Path, ids: str) -> None:
    data = parsed(call("explain", store, "--ids", inputs / ids, "--static", "none", "--json"))
    assert data["schema"] == "featstore.explain/1"
    assert set(data) == {"schema", "store", "plan", "memory", "engine", "engine_because", "access", "run"}
    assert data["run"] is None
    plan = data["plan"]["tables"][0]
    assert plan["ids"] == {"ids.npy": 100, "ids.txt": 3}[ids]
    assert plan["rows_missed"] == plan["ids"]


def test_explain_and_run(call: Call, store: Path) -> None:
    text = call("explain", store, "--random", 50, "--static", "none", "--run").stdout
    for part in ("table 'features': 50 ids", "no tier", "forecast", "measured", "rows", "waiting"):
        assert part in text
    data = parsed(
        call(
            "explain",
            store,
            "--random",
            50,
            "--seed",
            1,
            "--static",
            "none",
            "--run",
            "--engine",
            "threads",
            "--json",
        )
    )
    run = data["run"]
    assert set(run) == {
        "seconds",
        "forecast_seconds",
        "forecast_ratio",
        "rows_per_second",
        "bytes_read_per_second",
        "access",
        "stats",
    }
    assert run["stats"]["reads"] == data["plan"]["tables"][0]["reads"] > 0
    assert run["stats"]["rows_asked"] == 50
    assert data["engine"] == "threads"


def test_explain_tiers_and_budgets(call: Call, store: Path) -> None:
    data = parsed(call("explain", store, "--json"))
    assert data["plan"]["tables"][0]["hits"] == {"static": 1024}
    assert "the smallest that works is" in call("explain", store, "--memory", "10k", code=1).stderr
    assert "cannot read '-1' as a size" in call("explain", store, "--memory", "-1", code=2).stderr


def test_explain_means_one_thing_by_amplification(call: Call, store: Path) -> None:
    options = ("--random", 2000, "--static", "none", "--run")
    data = parsed(call("explain", store, *options, "--json"))
    plan, run = data["plan"]["tables"][0], data["run"]["stats"]
    # the file's last page is not whole
    assert plan["amplification"] == pytest.approx(run["amplification"], rel=0.01)
    text = call("explain", store, *options).stdout
    assert text.count("amplification 1.50") == 2


def test_explain_several_tables(call: Call, two_tables: Path) -> None:
    assert "say which with --table: 'paper', 'author'" in call("explain", two_tables, code=2).stderr
    assert (
        "the store has no table 'venue'; it has 'paper', 'author'"
        in call("explain", two_tables, "--table", "venue", code=2).stderr
    )
    assert "table 'author': 10 ids" in call("explain", two_tables, "--table", "author", "--random", 10).stdout
    assert (
        "static='degree' needs degrees"
        in call("explain", two_tables, "--table", "paper", "--static", "degree", code=1).stderr
    )


def test_explain_mistakes(call: Call, store: Path, inputs: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "float.npy", np.zeros(3))
    np.save(tmp_path / "high.npy", np.array([ROWS]))
    (tmp_path / "no.npy").write_bytes(b"nothing")
    (tmp_path / "word.txt").write_text("1 two")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    for name, text in (("float.npy", "node ids are integers"), ("high.npy", "node id 3000 is out of range"),
                       ("no.npy", "cannot read node ids"), ("word.txt", "one id a line"),
                       ("binary.txt", "cannot read node ids")):  # fmt: skip
        assert text in call("explain", store, "--ids", tmp_path / name, code=1).stderr
    assert "does not exist" in call("explain", store, "--ids", tmp_path / "nowhere.npy", code=2).stderr
    assert "contradict" in call("explain", store, "--ids", inputs / "ids.npy", "--random", 3, code=2).stderr
    assert "fewer than 4,000" in call("explain", store, "--random", 4000, code=2).stderr
    assert "-5 is not in the range" in call("explain", store, "--random", -5, code=2).stderr
    assert "'disk' is not one of" in call("explain", store, "--engine", "disk", code=2).stderr


# gc


def test_gc(call: Call, copy: Path, inputs: Path) -> None:
    assert call("gc", copy).stdout == "nothing to remove\n"
    with featstore.open(copy):
        # an open reader holds the old generation
        featstore.pack(copy, inputs / "rows.npy", overwrite=True).close()
        assert call("gc", copy).stdout == f"left alone g000001: {IN_USE}\nnothing to remove\n"
        assert parsed(call("gc", copy, "--json"))["held"] == [{"path": "g000001", "why": IN_USE}]
    data = parsed(call("gc", copy, "--dry-run", "--json"))
    assert set(data) == {"schema", "store", "dry_run", "removed", "bytes", "stale", "held", "unproven"}
    assert data["schema"] == "featstore.gc/1"
    assert [entry["path"] for entry in data["removed"]] == ["g000001"]
    assert data["bytes"] == sum(p.stat().st_size for p in (copy / "g000001").rglob("*") if p.is_file())
    assert "would remove g000001" in call("gc", copy, "--dry-run").stdout
    assert (copy / "g000001").exists()
    assert "removed g000001" in call("gc", copy).stdout
    assert not (copy / "g000001").exists()
    call("verify", copy)


def test_gc_unfinished(call: Call, copy: Path) -> None:
    (copy / "g000007").mkdir()
    (copy / "g000007.journal").write_text("{}")
    told = call("gc", copy).stdout
    assert told.startswith("left alone g000007: an unfinished pack")
    assert told.endswith("\nnothing to remove\n")
    assert call("gc", copy, "--unfinished", "-q").stdout == ""
    assert not (copy / "g000007").exists()
    assert not (copy / "g000007.journal").exists()


def test_gc_while_a_pack_writes(call: Call, copy: Path) -> None:
    from featstore.storage.generations import writer_lock

    with writer_lock(copy):
        assert "is being written by process" in call("gc", copy, code=1).stderr


def test_a_graph_that_knows_its_edges(call: Call, tmp_path: Path) -> None:
    """By request, and by itself where there is a table of edges."""
    edges = np.random.default_rng(0).integers(0, 9, (2, 40))
    for name, values in {"x": np.ones((9, 2)), "e": np.ones((40, 1)), "edges": edges}.items():
        np.save(tmp_path / f"{name}.npy", values)
    rows, graph = f"features={tmp_path / 'x.npy'}", f"features={tmp_path / 'edges.npy'}"
    of_edges = ["--features", f"edge_features={tmp_path / 'e.npy'}"]
    for number, (more, kept) in enumerate(
        [([], None), (["--edge-ids"], "int32"), (of_edges, "int32"), ([*of_edges, "--no-edge-ids"], None)]
    ):
        path = tmp_path / f"s{number}"
        made = parsed(call("pack", path, "--features", rows, "--graph", graph, *more, "--json"))
        found = made["graphs"]["features"]
        assert found["edge_ids"] == kept
        assert found["bytes"] == 8 * 10 + (8 if kept else 4) * (40 + found["hubs"]["edges"])
        assert ("edge ids" in call("inspect", path).stdout) == (kept is not None)
