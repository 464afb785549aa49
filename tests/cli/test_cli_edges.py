"""The command at its edges: names of any kind, options of wrong forms, stores that are not whole, and pages
that cannot be written."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import Call, parsed

import featstore
from featstore.errors import ArgumentError, SourceError
from featstore.storage.generations import writer_lock

ROOT = Path(__file__).resolve().parents[2]
X = np.arange(4096, dtype=np.float32).reshape(1024, 4)


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    """A store with one compiled trace."""
    with featstore.pack(tmp_path / "s", X) as store:
        trace = featstore.Trace.record([np.arange(k, k + 9) for k in range(0, 90, 9)], tmp_path / "t")
        featstore.compile_trace(store, trace, "mine", memory="16MiB")
    return tmp_path / "s"


def spoil(path: Path, at: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def chunk_of(store: Path) -> Path:
    return max((p for p in (store).glob("g*/**/c*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_what_cannot_be_looked_at_hides_nothing_of_the_store(call: Call, compiled: Path) -> None:
    """Neither a manifest of a newer version, nor one that cannot be read, nor a folder."""
    manifest = compiled / "packs" / "mine" / "featstore.json"
    whole = manifest.read_text()
    assert '"version": 1' in whole
    manifest.write_text(whole.replace('"version": 1', '"version": 99', 1))
    data = parsed(call("verify", compiled, "--json", code=1))
    assert [one["ok"] for one in data["compiled"]] == [False]
    assert data["problem_count"] == 0
    spoil(chunk_of(compiled))
    data = parsed(call("verify", compiled, "--json", code=3))
    assert data["problems"][0]["path"] == str(chunk_of(compiled).relative_to(compiled))
    assert not data["compiled"][0]["ok"]


def test_what_a_killed_loader_left_is_no_fault_of_the_store(call: Call, compiled: Path) -> None:
    """Of an episode of fresh mini-batches, whose removal it did not end; an empty lock goes with `gc`."""
    packs = compiled / "packs"
    (packs / "mine").rename(packs / "run-0")
    (packs / "run-0" / "featstore.json").unlink()
    assert "run-0" in call("verify", compiled, code=3).stdout
    (packs / "run.rolling").touch()
    told = call("verify", compiled)
    assert "run-0 is left from a loader of fresh mini-batches" in told.stderr
    assert "it is empty, so what lies beside it" in call("gc", compiled).stdout
    assert (packs / "run.rolling").exists()
    shutil.rmtree(packs / "run-0")
    call("gc", compiled)
    assert not (packs / "run.rolling").exists()


def test_a_trace_that_has_lost_its_manifest_is_told(call: Call, compiled: Path) -> None:
    (compiled / "packs" / "mine" / "featstore.json").unlink()
    assert "packs/mine" in call("verify", compiled, code=3).stdout
    with writer_lock(compiled / "packs" / "mine"):  # who makes it, or removes it
        told = call("verify", compiled)
    assert "is not verified" in told.stderr
    shutil.rmtree(compiled / "packs" / "mine")
    (compiled / "packs" / "notes").mkdir()
    (compiled / "packs" / "readme.txt").write_text("mine")
    call("verify", compiled)


def test_each_damaged_file_is_named_however_many_pages_of_others_are(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("featstore.scrub.report.PROBLEMS_MAX", 2)
    featstore.pack(tmp_path / "s", {"a": X, "b": X[:100]}).close()
    data = featstore.open(tmp_path / "s")
    files = {name: data.path / data.tables[name].entry.chunk_path(0) for name in ("a", "b")}
    data.close()
    for at in range(0, 4 * 4096, 4096):
        spoil(files["a"], at)
    spoil(files["b"])
    report = featstore.verify(tmp_path / "s")
    named = [problem.path for problem in report.problems]
    assert report.problem_count > 3
    assert {str(path.relative_to(tmp_path / "s")) for path in files.values()} <= set(named)
    shown = call("verify", tmp_path / "s", code=3).stdout
    assert f"and {report.problem_count - len(named):,} problems more" in shown


def test_what_is_cut_of_several_graphs_is_said_of_none_alone(call: Call, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    edges = {
        ("a", "to", "b"): rng.integers(0, 900, (2, 3000)),
        ("a", "on", "a"): rng.integers(0, 900, (2, 3000)),
    }
    featstore.pack(tmp_path / "s", {"a": X, "b": X}, graph=edges, order="ldg", partitions=4).close()
    data = parsed(call("inspect", tmp_path / "s", "--json"))
    assert {graph["edge_cut"] for graph in data["graphs"].values()} == {None}
    featstore.pack(tmp_path / "two", {"a": X, "b": X}, graph={("a", "to", "b"): edges["a", "to", "b"]},
                   order="ldg", partitions=4).close()  # fmt: skip
    data = parsed(call("inspect", tmp_path / "two", "--json"))
    assert [0 < graph["edge_cut"] < 1 for graph in data["graphs"].values()] == [True]
    featstore.pack(tmp_path / "one", X, graph=edges["a", "to", "b"], order="ldg", partitions=4).close()
    data = parsed(call("inspect", tmp_path / "one", "--json"))
    assert 0 < data["graphs"]["features"]["edge_cut"] < 1


def test_a_name_that_is_no_text_is_refused_in_words(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    path = os.fsencode(tmp_path) + b"/caf\xe9.npy"
    os.rename(tmp_path / "x.npy", path)
    for spec in (os.fsdecode(path), Path(os.fsdecode(path))):
        with pytest.raises(SourceError, match="this path is no UTF-8"):
            featstore.pack(tmp_path / "s", spec)


@pytest.mark.parametrize("to", ["x.zarr", "x.parquet"])
def test_numbers_that_others_have_no_type_for_are_not_exported(tmp_path: Path, to: str) -> None:
    if np.dtype(np.longdouble).itemsize == 8:
        pytest.skip("long doubles are doubles here")
    pytest.importorskip("zarr" if to == "x.zarr" else "pyarrow")
    dates = X[:, 0].astype("M8[s]")
    with featstore.pack(tmp_path / "s", {"long": X.astype(np.longdouble), "dates": dates}) as store:
        for table in ("long", "dates"):
            with pytest.raises(ArgumentError, match=r"no type for .*: export to \.npy"):
                featstore.export(store, table, tmp_path / to)
            featstore.export(store, table, tmp_path / f"{table}.npy")
    assert np.array_equal(np.load(tmp_path / "dates.npy"), dates)


def test_fields_that_no_npy_of_version_2_has(tmp_path: Path) -> None:
    rows = np.zeros(9, [("年", "<i4")])
    featstore.pack(tmp_path / "s", rows, columns="*").close()
    with pytest.raises(ArgumentError, match="names of fields of table 'features'"):
        featstore.export(tmp_path / "s", "features", tmp_path / "x.npy")
    assert not (tmp_path / "x.npy").exists()


def test_nodes_without_features_are_not_exported(tmp_path: Path) -> None:
    edges = {("paper", "by", "author"): np.array([[0, 1, 5], [2, 3, 4]])}
    featstore.pack(tmp_path / "s", {"paper": X, "author": 9}, graph=edges).close()
    with pytest.raises(ArgumentError, match="'author' are nodes without features"):
        featstore.export(tmp_path / "s", "author", tmp_path / "x.npy")


def test_a_page_that_cannot_be_written_is_told_before_the_work(
    call: Call, store: Path, tmp_path: Path
) -> None:
    for command in (("inspect", store), ("demo",)):
        told = call(*command, "--html", tmp_path / "out" / "page.html", code=1)
        assert "is no directory: make it so first" in told.stderr


@pytest.mark.parametrize("engine", ["mmap", "threads"])
def test_inspect_says_how_a_reader_of_an_engine_reads(
    call: Call, store: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setenv("FEATSTORE_ENGINE", engine)
    told = parsed(call("inspect", store, "--json"))["reading"]
    assert told["engine"] == engine
    assert (told["access"] == "mapped") == (engine == "mmap")
    if engine == "mmap":
        assert told["model"]["gap_pages_max"] == 0


@pytest.mark.parametrize(
    "wrong",
    [("--partitions", "author=ten"), ("--shape", "author=x"), ("--offset", "author=-1")],
)
def test_numbers_of_nodes_without_features_are_looked_at_too(
    call: Call, tmp_path: Path, wrong: tuple[str, str]
) -> None:
    np.save(tmp_path / "p.npy", X)
    np.save(tmp_path / "w.npy", np.array([[0, 1, 5], [2, 3, 4]]))
    given = ["--features", f"paper={tmp_path / 'p.npy'}", "--nodes", "author=50"]
    given += ["--graph", f"author__writes__paper={tmp_path / 'w.npy'}", *wrong]
    assert wrong[0] in call("pack", tmp_path / "s", *given, code=2).stderr


def test_a_store_with_any_array_can_be_printed(tmp_path: Path) -> None:
    meta: Any = np.zeros(5, [("first name", "<i4")])
    with featstore.pack(tmp_path / "s", X, arrays={"meta": meta}) as store:
        assert "first name" in str(store)
        assert "first name" in store._repr_html_()


def test_the_reader_of_the_format_passes_over_a_stale_trace(compiled: Path, tmp_path: Path) -> None:
    def read(path: Path) -> str:
        words = [sys.executable, str(ROOT / "formats" / "v1" / "reader.py"), str(path)]
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=100).stdout

    assert "compiled trace mine: 10 mini-batches" in read(compiled)
    shutil.copytree(compiled / "packs", tmp_path / "packs")
    featstore.pack(compiled, X + 1, overwrite=True).close()
    shutil.copytree(tmp_path / "packs", compiled / "packs", dirs_exist_ok=True)
    assert "compiled trace mine: of another state of the store" in read(compiled)
    assert stat.S_ISDIR((compiled / "packs" / "mine").stat().st_mode)
