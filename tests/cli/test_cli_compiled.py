"""``pack --trace``, and what ``inspect``, ``verify`` and ``gc`` make of compiled traces."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import ROWS, Call, parsed

import featstore
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.storage.generations import IN_USE
from featstore.trace.trace import Trace

BATCHES = 6


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(0)
    ids = [(random.random(300) ** 2 * ROWS).astype(np.int64) for _ in range(BATCHES)]
    path = tmp_path_factory.mktemp("trace") / "t"
    Trace.record(ids, path).close()
    return path


@pytest.fixture
def own(store: Path, tmp_path: Path) -> Path:
    """A store that a test may spoil, with nothing compiled."""
    return Path(shutil.copytree(store, tmp_path / "own"))


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory, store: Path, trace: Path) -> Path:
    path = Path(shutil.copytree(store, tmp_path_factory.mktemp("compiled") / "s"))
    with featstore.open(path) as base:
        featstore.compile_trace(base, trace, memory="16MiB", cache=20_000, disk="0.2x").close()
    return path


@pytest.fixture
def compiled(compiled_once: Path, tmp_path: Path) -> Path:
    """A store with the compiled trace ``default``, to be spoilt."""
    return Path(shutil.copytree(compiled_once, tmp_path / "compiled"))


def tree(path: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes()
        for p in sorted(path.rglob("*"))
        if p.is_file() and p.name != "lock"
    }


def chunk_of(store: Path) -> Path:
    return next(store.glob("packs/*/g*/tables/features.*/rows/c.0*"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)


def overwrite(store: Path, inputs: Path) -> None:
    featstore.pack(store, inputs / "rows.npy", overwrite=True, order="given").close()


# pack --trace


def test_pack_a_trace(call: Call, own: Path, trace: Path) -> None:
    text = call(
        "pack", own, "--trace", trace, "--memory", "16MiB", "--disk", "0.5x", "--cache", "20KiB"
    ).stdout
    for part in (
        "compiled trace 'default': 6 mini-batches",
        "features",
        "rows asked",
        "in the trace's order",
        "as forecast",
        "packed in",
    ):
        assert part in text
    assert re.search(r"0\.[1-5]\dx", text), "the size on disk, in tables"
    with featstore.open(own) as base, base.compiled() as made, CompiledLoader(made) as loader:
        assert len(list(loader)) == BATCHES


def test_pack_a_trace_json(call: Call, own: Path, trace: Path) -> None:
    options = [
        "--trace",
        trace,
        "--name",
        "mine",
        "--memory",
        "16MiB",
        "--train-memory",
        "32MiB",
        "--cache",
        "40KB",
        "--json",
        "--device-memory",
        "10KB",
        "--residency",
        "fixed",
        "--disk",
        "60KB",
        "--seed",
        "3",
    ]
    data = parsed(call("pack", own, *options))
    assert data["schema"] == "featstore.pack-trace/1"
    assert set(data) == {
        "schema",
        "store",
        "name",
        "uuid",
        "trace_uuid",
        "residency",
        "memory_bytes",
        "files",
        "segments",
        "forecast",
        "dry_run",
        "seconds",
    }
    assert (data["name"], data["residency"], data["memory_bytes"], data["dry_run"]) == (
        "mine",
        "fixed",
        32 * 2**20,
        False,
    )
    assert data["forecast"]["disk_bytes"] <= 60_000
    segments = data["segments"]["features"]
    assert (segments["resident_rows"], segments["device_rows"]) == (40_000 // 64, 10_000 // 64)
    with featstore.open(own) as base, base.compiled("mine") as made:
        limits = made.limits("features")
        assert (segments["packed"]["rows"], segments["shared"]["rows"]) == (
            limits.packed_rows,
            limits.shared_rows,
        )
    assert data["files"]["bytes"] == sum(
        len(v) for k, v in tree(own / "packs/mine").items() if k != "featstore.json"
    )


def test_a_dry_run_says_the_same_and_writes_nothing(call: Call, own: Path, trace: Path) -> None:
    before = tree(own)
    options = ["--trace", trace, "--memory", "16MiB", "--disk", "0.3x", "--cache", "20KiB"]
    text = call("pack", own, *options, "--dry-run").stdout
    assert "would be written" in text
    forecast = parsed(call("pack", own, *options, "--dry-run", "--json"))
    assert set(forecast) == {"schema", "store", "name", "dry_run", "forecast", "seconds"}
    assert forecast["dry_run"] is True
    assert tree(own) == before
    assert not (own / "packs").exists()
    made = parsed(call("pack", own, *options, "--json"))
    assert made["forecast"] == forecast["forecast"]


def test_pack_a_trace_again(call: Call, compiled: Path, trace: Path) -> None:
    options = ["pack", compiled, "--trace", trace, "--memory", "16MiB"]
    assert "--overwrite" in call(*options, code=1).stderr
    assert call(*options, "--overwrite", "-q").stdout == ""
    assert "completed" in call(*options, "--resume", code=1).stderr
    assert "nothing to resume" in call(*options, "--name", "new", "--resume", code=1).stderr
    assert sorted(p.name for p in (compiled / "packs").iterdir()) == ["default"]


def test_an_interrupted_compilation_says_how_to_go_on(
    call: Call, own: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from featstore.storage import transaction

    whole = tree(own)
    options = ["pack", own, "--trace", trace, "--memory", "16MiB", "-q"]
    own_commit = transaction.commit

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(transaction, "commit", interrupted)
    assert "run the same command again with --resume" in call(*options, code=130).stderr
    assert any((own / "packs/default").glob("g*.journal"))
    monkeypatch.setattr(transaction, "commit", own_commit)
    assert "unfinished" in call("inspect", own).stdout
    assert "--resume" in call(*options, code=1).stderr
    assert call("gc", own).stdout.startswith("left alone packs/default/g000001: an unfinished pack")
    call(*options, "--resume")
    with featstore.open(own) as base, base.compiled() as made, CompiledLoader(made) as loader:
        assert len(list(loader)) == BATCHES
    assert {k: v for k, v in tree(own).items() if not k.startswith("packs")} == whole


def test_usage_errors(call: Call, own: Path, trace: Path, inputs: Path) -> None:
    for option in (
        "--name x",
        "--disk 3x",
        "--residency min",
        "--dry-run",
        "--cache 1MiB",
        "--device-memory 1MiB",
    ):
        assert (
            "goes with --trace"
            in call("pack", own, "--features", inputs / "rows.npy", *option.split(), code=2).stderr
        )
    assert (
        "does not go with --trace"
        in call("pack", own, "--trace", trace, "--features", inputs / "rows.npy", code=2).stderr
    )
    for option in ("--no-topology", "--edge-ids", "--hubs 0.01", "--hub-rank degree"):
        said = call("pack", own, "--trace", trace, *option.split(), code=2).stderr
        assert f"{option.split()[0].replace('--no-', '--')} does not go with --trace" in said
    assert "give --features" in call("pack", own, code=2).stderr
    assert "contradict" in call("pack", own, "--trace", trace, "--resume", "--overwrite", code=2).stderr
    assert "'3y'" in call("pack", own, "--trace", trace, "--disk", "3y", code=1).stderr
    assert "--residency" in call("pack", own, "--trace", trace, "--residency", "lru", code=2).stderr


def test_errors_name_what_is_wrong(call: Call, own: Path, trace: Path, tmp_path: Path) -> None:
    assert "not a trace" in call("pack", own, "--trace", own, code=1).stderr
    assert "there is no trace" in call("pack", own, "--trace", tmp_path / "none", code=1).stderr
    assert "there is no store" in call("pack", tmp_path / "none", "--trace", trace, code=1).stderr
    stderr = call("pack", own, "--trace", trace, "--memory", "1MiB", code=1).stderr
    assert "the smallest that works is" in stderr
    assert "is unfinished" not in stderr
    Trace.record([np.array([ROWS])], tmp_path / "outside").close()
    assert (
        f"node id {ROWS}"
        in call("pack", own, "--trace", tmp_path / "outside", "--memory", "16MiB", code=1).stderr
    )
    assert "is not allowed" in call("pack", own, "--trace", trace, "--name", "a/b", code=1).stderr
    assert not (own / "packs").exists()


# inspect


def test_inspect_shows_compiled_traces(call: Call, compiled: Path) -> None:
    text = call("inspect", compiled).stdout
    for part in (
        "compiled trace 'default': 6 mini-batches",
        "memory",
        "packed",
        "shared",
        "base",
        "of table",
        "for the loader",
    ):
        assert part in text
    found = parsed(call("inspect", compiled, "--json"))["compiled"]
    assert [c["name"] for c in found] == ["default"]
    forecast = found[0]["forecast"]["tables"]["features"]
    total = (
        forecast["hit_rows"] + forecast["packed_rows"] + forecast["shared_reads_rows"] + forecast["base_rows"]
    )
    assert total == forecast["asked_rows"]
    assert "table 'records'" in call("inspect", compiled / "packs/default").stdout


def test_inspect_says_what_is_stale_or_broken(call: Call, compiled: Path, inputs: Path, trace: Path) -> None:
    overwrite(compiled, inputs)
    shutil.copytree(compiled / "packs/default", compiled / "packs/broken")
    (compiled / "packs/broken/featstore.json").write_text("{}")
    (compiled / "packs/unfinished/g000001").mkdir(parents=True)
    (compiled / "packs/train.trace").mkdir()
    call("pack", compiled, "--trace", trace, "--memory", "16MiB", "--name", "fresh", "-q")
    found = {c["name"]: c for c in parsed(call("inspect", compiled, "--json"))["compiled"]}
    assert found.keys() == {"default", "broken", "fresh", "unfinished"}
    assert "compile the trace again with --overwrite" in found["default"]["because"]
    assert "not a featstore manifest" in found["broken"]["because"]
    assert "unfinished" in found["unfinished"]["because"]
    assert "because" not in found["fresh"]
    text = call("inspect", compiled).stdout
    assert "default: " in text
    assert "compiled trace 'fresh'" in text


# verify


def test_verify_reads_compiled_traces(call: Call, compiled: Path) -> None:
    data = parsed(call("verify", compiled, "--json"))
    assert data["ok"] is True
    assert data["unlisted"] == []
    assert [(c["name"], c["ok"], c["stale"], c["because"]) for c in data["compiled"]] == [
        ("default", True, False, "")
    ]
    assert data["compiled"][0]["bytes"] == sum(
        len(v) for k, v in tree(compiled / "packs/default").items() if k != "featstore.json"
    )
    text = call("verify", compiled).stdout
    assert text.count("sound") == 2
    assert "packs/default: sound" in text
    assert call("verify", compiled, "-q").stdout == ""


def test_verify_names_pages_of_compiled_traces(call: Call, compiled: Path) -> None:
    path = chunk_of(compiled)
    flip(path)
    text = call("verify", compiled, code=3).stdout
    assert f"{path.relative_to(compiled)} " in text
    assert "page checksum" in text
    data = parsed(call("verify", compiled, "--json", code=3))
    assert (data["ok"], data["problem_count"], data["problems"]) == (False, 0, [])
    own = data["compiled"][0]
    assert (own["ok"], own["problem_count"]) == (False, 1)
    assert own["problems"][0]["path"] == str(path.relative_to(compiled / "packs/default"))
    assert "page checksum" in call("verify", compiled, "-q", code=3).stdout


def test_verify_broken_stale_and_unfinished_ones(call: Call, compiled: Path, inputs: Path) -> None:
    overwrite(compiled, inputs)
    result = call("verify", compiled)
    assert "another state of the store" in result.stdout
    assert parsed(call("verify", compiled, "--json"))["compiled"][0]["stale"] is True
    (compiled / "packs/x").mkdir()
    (compiled / "packs/x/g000001.journal").write_text("{}")
    assert "unfinished" in call("verify", compiled).stderr
    (compiled / "packs/default/featstore.json").write_text("{}")
    result = call("verify", compiled, code=3)
    assert "packs/default: " in result.stdout
    assert "not a featstore manifest" in result.stdout
    assert parsed(call("verify", compiled, "--json", code=3))["compiled"][0]["ok"] is False
    flip(compiled / next(k for k in tree(compiled) if k.startswith("g0") and "rows/c." in k))
    assert "page checksum" in call("verify", compiled, code=3).stdout


# gc


def test_gc_removes_old_generations_of_compiled_traces(call: Call, compiled: Path, trace: Path) -> None:
    with featstore.open(compiled) as base, base.compiled():  # a reader holds the old generation
        call("pack", compiled, "--trace", trace, "--memory", "16MiB", "--overwrite", "-q")
        told = f"left alone packs/default/g000001: {IN_USE}\nnothing to remove\n"
        assert call("gc", compiled).stdout == told
    assert "would remove packs/default/g000001" in call("gc", compiled, "--dry-run").stdout
    data = parsed(call("gc", compiled, "--json"))
    assert [entry["path"] for entry in data["removed"]] == ["packs/default/g000001"]
    assert data["bytes"] > 0
    assert sorted(p.name for p in (compiled / "packs/default").iterdir()) == [
        "featstore.json",
        "g000002",
        "lock",
    ]
    call("verify", compiled)


def test_gc_keeps_what_is_stale_unless_told(call: Call, compiled: Path, inputs: Path) -> None:
    with featstore.open(compiled) as base, base.compiled():
        overwrite(compiled, inputs)
        told = call("gc", compiled, "--stale").stdout.splitlines()
        assert f"left alone packs/default: {IN_USE}" in told
    text = call("gc", compiled).stdout
    assert "removed g000001" in text
    assert "--stale removes it" in text
    data = parsed(call("gc", compiled, "--json"))
    assert [entry["path"] for entry in data["stale"]] == ["packs/default"]
    assert data["removed"] == []
    assert "would remove packs/default" in call("gc", compiled, "--stale", "--dry-run").stdout
    assert (compiled / "packs/default/featstore.json").exists()
    assert "removed packs/default" in call("gc", compiled, "--stale").stdout
    assert not (compiled / "packs/default").exists()
    assert call("gc", compiled, "--stale").stdout == "nothing to remove\n"
    call("verify", compiled)


def test_gc_removes_what_killed_compilations_left(call: Call, compiled: Path) -> None:
    packs = compiled / "packs"
    for name in ("x/g000001/tables", "x/g000001.spill", "never", "y.forecast/g000001.spill", "train.trace"):
        (packs / name).mkdir(parents=True)
    (packs / "x/g000001.journal").write_text("{}")
    (packs / "train.trace/recording.log").write_bytes(b"\0" * 10)
    for name in ("x", "never", "y.forecast", "train.trace"):
        (packs / name / "lock").write_text("1\n")
    gone = [e["path"] for e in parsed(call("gc", compiled, "--json"))["removed"]]
    assert gone == ["packs/never", "packs/y.forecast"]
    assert sorted(p.name for p in packs.iterdir()) == ["default", "train.trace", "x"]
    gone = [e["path"] for e in parsed(call("gc", compiled, "--json", "--unfinished"))["removed"]]
    assert gone == [
        "packs/train.trace",
        "packs/x/g000001",
        "packs/x/g000001.journal",
        "packs/x/g000001.spill",
    ]
    assert [p.name for p in packs.iterdir()] == ["default"]
    call("verify", compiled)


def test_gc_leaves_what_is_being_written(call: Call, compiled: Path, inputs: Path) -> None:
    from featstore.storage.generations import writer_lock

    overwrite(compiled, inputs)
    with writer_lock(compiled / "packs/default"):
        told = call("gc", compiled, "--stale", "--unfinished").stdout
        assert re.search(r"left alone packs/default: .* is being written by process", told)
    assert (compiled / "packs/default/featstore.json").exists()
