"""``calibrate``, ``bench`` and ``demo``, as briefly as they can be."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cli_support import ROWS, Call, parsed

import featstore
import featstore.measure.calibrate
from featstore.plan.cost import load_models, models_path


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary stores of 4 MiB instead of 512."""
    real = featstore.measure.calibrate.measure
    monkeypatch.setattr(
        featstore.measure.calibrate, "measure", lambda *a, **k: real(*a, **k, data_bytes_min=4 << 20)
    )


@pytest.mark.usefixtures("little")
def test_calibrate(call: Call, store: Path) -> None:
    data = parsed(call("calibrate", store, "--engine", "threads", "--seconds", "0.1", "--json"))
    assert data["schema"] == "featstore.calibrate/2"
    assert set(data) == {"schema", "saved", "calibrations"}
    assert data["saved"] == str(models_path())
    result = data["calibrations"][0]
    assert set(result) == {
        "key",
        "engine",
        "access",
        "access_because",
        "model",
        "gap_pages_max",
        "rates",
        "open_because",
        "error",
        "temporary",
        "seconds",
        "gaps",
        "samples",
    }
    assert result["temporary"] is True
    assert [s["extent_bytes"] for s in result["samples"]] == [4096, 16384, 65536, 262144, 524288]
    assert list(load_models()) == [result["key"]]
    assert load_models()[result["key"]].read_seconds == result["model"]["read_seconds"] > 0
    assert sorted(p.name for p in store.parent.iterdir()) == ["s"], "the temporary store is gone"


@pytest.mark.usefixtures("little")
def test_calibrate_all_of_a_directory(call: Call, tmp_path: Path) -> None:
    text = call("calibrate", tmp_path, "--engine", "all", "--seconds", "0.1", "--dry-run").stdout
    for part in ("threads", "mmap", "read size", "512.0 KiB", "a request", "read through gaps"):
        assert part in text
    assert not models_path().exists()
    assert call("calibrate", tmp_path, "--engine", "mmap", "--seconds", "0.1", "-q").stdout == ""
    assert models_path().exists()


@pytest.mark.usefixtures("little")
def test_measuring_leaves_nothing_behind(
    call: Call, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for calibrate's file, where it is asked for: not beside the store, not in the temporary
    directory."""

    def around() -> dict[str, int]:
        found = {str(p): p.lstat().st_mtime_ns for p in tmp_path.rglob("*") if not p.is_dir()}
        return found | {str(p): 0 for p in tmp_path.rglob("*") if p.is_dir()}

    for name in ("tmp", "home", "cache"):
        (tmp_path / name).mkdir()
    for name, where in (("TMPDIR", "tmp"), ("HOME", "home"), ("FEATSTORE_CACHE", "cache")):
        monkeypatch.setenv(name, str(tmp_path / where))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    copy = shutil.copytree(store, tmp_path / "s")
    (tmp_path / "cache/notes").write_text("mine")
    before = around()
    call("calibrate", copy, "--engine", "threads", "--seconds", "0.1", "--dry-run")
    call("bench", copy, "--seconds", "0.02", "--engine", "threads")
    assert around() == before
    call("calibrate", copy, "--engine", "threads", "--seconds", "0.1")
    assert set(around()) - set(before) == {str(models_path())}


def test_calibrate_mistakes(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is not there" in call("calibrate", tmp_path / "nowhere", code=1).stderr
    assert "is a file" in call("calibrate", tmp_path / "file", code=1).stderr
    assert "-1.0 is not in the range" in call("calibrate", tmp_path, "--seconds", -1, code=2).stderr
    assert "is not one of" in call("calibrate", tmp_path, "--engine", "fast", code=2).stderr


@pytest.mark.parametrize("engine", ["auto", "mmap"])
def test_bench(call: Call, store: Path, engine: str) -> None:
    result = call("bench", store, "--seconds", "0.02", "--engine", engine, "--json")
    data = parsed(result)
    assert data["schema"] == "featstore.bench/1"
    assert {
        "store",
        "table",
        "engine",
        "engine_because",
        "access",
        "cache_state",
        "queue_depth",
        "verified",
        "calibrated",
        "cases",
    } <= set(data)
    cases = {case["name"]: case for case in data["cases"]}
    assert list(cases) == ["random rows", "half of the pages", "scan", "rows in memory"]
    for name, case in cases.items():
        assert case["requests"] >= 2
        assert case["rows_per_second"] > 0
        assert (case["reads"] == 0) is (name == "rows in memory")
    assert cases["scan"]["rows"] == cases["scan"]["requests"] * ROWS
    assert cases["random rows"]["limit_ratio"] > 0
    assert cases["rows in memory"]["limit"] == "NumPy's take"


def test_bench_text(call: Call, two_tables: Path, tmp_path: Path) -> None:
    result = call("bench", two_tables, "--table", "author", "--seconds", "0.02")
    for part in ("random rows", "half of the pages", "scan", "rows in memory", "cache state", "rows/s"):
        assert part in result.stdout
    assert "never calibrated" in result.stderr
    assert "say which with --table" in call("bench", two_tables, code=2).stderr
    assert "no table 'x'" in call("bench", two_tables, "--table", "x", code=2).stderr
    assert (
        "is not in the range"
        in call("bench", two_tables, "--table", "author", "--seconds", "-1", code=2).stderr
    )


@pytest.mark.parametrize(
    ("shape", "dtype"), [((5000, 3), np.uint8), ((40, 9000), np.float32), ((7, 300000), np.float32)]
)
def test_bench_any_row_size(call: Call, tmp_path: Path, shape: tuple[int, int], dtype: Any) -> None:
    featstore.pack(tmp_path / "s", np.ones(shape, dtype)).close()
    data = parsed(call("bench", tmp_path / "s", "--seconds", "0.01", "--json"))
    assert all(case["rows_per_second"] > 0 for case in data["cases"])


# demo: the run itself is tested in tests/test_demo.py


def test_demo(call: Call, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import featstore_demo

    asked: list[dict[str, Any]] = []
    report = SimpleNamespace(good=True, to_json=lambda: {"schema": "featstore.demo/2", "steps": 1})

    def run(**options: Any) -> Any:
        asked.append(options)
        return report

    monkeypatch.setattr(featstore_demo, "run", run)
    monkeypatch.setattr(
        featstore_demo, "render", lambda given: "the report" if given is report else "another"
    )
    data = parsed(
        call(
            "demo",
            "--memory",
            "5MiB",
            "--data",
            inputs / "rows.npz",
            "--epochs",
            2,
            "--engine",
            "threads",
            "--mode",
            "rolling",
            "--mode",
            "np.memmap",
            "--json",
        )
    )
    assert data == {"schema": "featstore.demo/2", "steps": 1}
    options = {
        k: asked[0][k]
        for k in ("ways", "memory", "data", "epochs", "engine", "workdir", "batch_size", "seed")
    }
    assert options == {
        "ways": ("rolling", "np.memmap"),
        "memory": 5 << 20,
        "data": str(inputs / "rows.npz"),
        "epochs": 2,
        "engine": "threads",
        "workdir": None,
        "batch_size": None,
        "seed": 0,
    }
    assert call("demo").stdout == "the report\n"
    assert call("demo", "-q").stdout == ""
    assert (asked[1]["engine"], asked[1]["ways"], asked[1]["memory"]) == (None, (), 96 << 20)
    assert asked[1]["data"] is None
    report.good = False
    call("demo", "--json", code=1)
    assert call("demo", "-q", code=1).stdout == "the report\n"
    assert "does not exist" in call("demo", "--data", tmp_path / "nowhere.npz", code=2).stderr
    assert "is not in the range" in call("demo", "--epochs", 0, code=2).stderr
    assert "is not one of" in call("demo", "--mode", "mega", code=2).stderr
