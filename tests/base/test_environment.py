"""Variables of the environment: those that are read are those that are told, and no other is passed over."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from featstore_cli.main import cli

import featstore
from featstore.base.environment import VARIABLES
from featstore.errors import ArgumentError, BudgetError, EngineError

ROOT = Path(__file__).parents[2]


def test_the_page_tells_those_that_are_read() -> None:
    read = set()
    for folder in ("featstore", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            read |= set(re.findall(r'"(FEATSTORE_[A-Z_]+[A-Z])"', path.read_text()))
    told = re.findall(
        r"^\| `(FEATSTORE_[A-Z_]+)` \|", (ROOT / "docs" / "how-to.md").read_text(), re.MULTILINE
    )
    assert read == set(told) == set(VARIABLES)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("FEATSTORE_LOGS", "has FEATSTORE_LOGS, which featstore does not read: is FEATSTORE_LOG meant?"),
        ("FEATSTORE_7", "there are FEATSTORE_CACHE, FEATSTORE_ENGINE, FEATSTORE_LOG, FEATSTORE_MEMORY"),
        ("FEATSTORE_LOG", ""),
        ("FEATSTORELESS", ""),
    ],
)
def test_an_unknown_one_is_a_warning(name: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import featstore.base.logs"], env=os.environ | {name: "info"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0
    assert says in done.stderr
    assert ("does not read" in done.stderr) == bool(says)


MIB = 2**20


@pytest.fixture
def graph(tmp_path: Path) -> featstore.Store:
    edges = np.array([[0, 1, 2, 3], [1, 2, 3, 0]])
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    return featstore.pack(tmp_path / "graph.fs", rows, graph=edges)


def test_memory_and_engine_are_as_said(graph: featstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATSTORE_MEMORY", "48MiB")
    monkeypatch.setenv("FEATSTORE_ENGINE", "threads")
    batches = [np.array([0, 1]), np.array([2])]
    with (
        graph.reader() as reader, graph.reader(policy="lru") as tiered,
        graph.table("features", verify=True) as array, graph.sampler([2]) as sampler,
        graph.loader(batches, mode="online") as loader,
    ):  # fmt: skip
        assert reader.budget.memory_bytes == tiered.memory_bytes == loader.memory_bytes == 48 * MIB
        assert sampler._memory_bytes == 48 * MIB
        assert (reader.engine.name, reader.engine.because) == ("threads", "FEATSTORE_ENGINE says so")
        assert sampler.engine == array.source.engine.name == "threads"
        assert (array[[3]] == [[6, 7]]).all()
        assert len(list(loader)) == 2


def test_what_is_given_wins(graph: featstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATSTORE_MEMORY", "1")  # too little for anything
    monkeypatch.setenv("FEATSTORE_ENGINE", "mmap")
    with graph.reader(memory="1GiB", engine="threads") as reader:  # though that is the default, too
        assert reader.budget.memory_bytes == 1024 * MIB
        assert reader.engine.name == "threads"
    with pytest.raises(BudgetError):
        graph.reader()
    assert isinstance(graph.table("features"), featstore.Table)  # what is known of it, not an array


@pytest.mark.parametrize(("name", "said"), [("FEATSTORE_MEMORY", "much"), ("FEATSTORE_ENGINE", "uringg")])
def test_a_wrong_one_is_named(
    graph: featstore.Store, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.setenv(name, said)
    more = {"memory": "48MiB"} if name == "FEATSTORE_ENGINE" else {}
    for make in (
        lambda: graph.reader(**more), lambda: graph.reader(policy="lru", **more),
        lambda: graph.sampler([2], **more), lambda: graph.loader([np.array([0])], **more),
        lambda: graph.table("features", verify=True, **more),
        lambda: graph.loader(seeds=np.array([0]), fanouts=[2], mode="partitions", **more),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=name):
            make()


def test_an_engine_that_cannot_work_here_is_an_error(
    graph: featstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise OSError(1, "not permitted")

    monkeypatch.setattr("featstore.engine.liburing.probe", refused)
    monkeypatch.setenv("FEATSTORE_ENGINE", "uring")
    with pytest.raises(EngineError, match=r"'uring' \(FEATSTORE_ENGINE says so\) cannot be used"):
        graph.reader()


def test_a_process_of_its_own_has_them_and_inspect_tells_them(graph: featstore.Store) -> None:
    program = "import sys; from featstore_cli.main import main; sys.argv[0] = 'featstore'; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "inspect", str(graph.path), "--json"], capture_output=True, text=True,
        env=os.environ | {"FEATSTORE_MEMORY": "48MiB", "FEATSTORE_ENGINE": "mmap"}, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reading = json.loads(done.stdout)["reading"]
    assert (reading["memory_bytes"], reading["engine"]) == (48 * MIB, "mmap")
    assert reading["memory_because"] == "FEATSTORE_MEMORY says so"
    assert reading["engine_because"] == "FEATSTORE_ENGINE says so"


def test_options_of_the_command(graph: featstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = ["explain", str(graph.path), "--table", "features", "--random", "2", "--json"]
    monkeypatch.setenv("FEATSTORE_MEMORY", "48MiB")
    monkeypatch.setenv("FEATSTORE_ENGINE", "mmap")
    found = json.loads(CliRunner().invoke(cli, ask).stdout)
    assert found["engine"] == "mmap"
    said = CliRunner().invoke(cli, [*ask, "--memory", "48MiB", "--engine", "threads"]).stdout
    assert json.loads(said)["memory"] == found["memory"]
    assert json.loads(said)["engine"] == "threads"
    monkeypatch.setenv("FEATSTORE_MEMORY", "much")
    wrong = CliRunner().invoke(cli, ask)
    assert wrong.exit_code != 0
    assert "FEATSTORE_MEMORY: cannot read 'much'" in wrong.stderr
