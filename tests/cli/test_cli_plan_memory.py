"""``featstore plan-memory`` and ``completion``: sums are those of readers and samplers; shells complete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import closing, nullcontext
from pathlib import Path

import numpy as np
import pytest
from cli_support import Call, parsed

import featstore
from featstore.sampling.batches import bytes_in_memory, open_sampler
from featstore.sampling.stored import StoredSampler


@pytest.mark.parametrize("memory", ["32MiB", "1GiB"])
def test_a_store_is_planned_as_it_is_read(call: Call, store: Path, memory: str) -> None:
    plan = parsed(call("plan-memory", store, "--memory", memory, "--fanouts", "4,3", "--json"))
    assert plan["schema"] == "featstore.memory-plan/1"
    assert sum(plan["reader"].values()) <= plan["memory_bytes"]
    assert sum(plan["loader"].values()) == plan["memory_bytes"]
    with featstore.open(store) as opened:
        table = next(iter(opened.graphs.values())).table
        with opened.reader(memory=memory, tables=[table.name], static=None) as reader:
            held = reader.memory()
        for use in ("row_maps", "page_checksums", "staging"):
            assert plan["reader"][use] == held[use], use
        assert plan["reader"]["planning"] == held["scratch"]
        graph = opened.graphs[table.name]
        share = plan["memory_bytes"] // 3
        sampler = open_sampler(opened, [4, 3], memory=share, graph=graph.name)
        with closing(sampler) if isinstance(sampler, StoredSampler) else nullcontext():
            from_disk = isinstance(sampler, StoredSampler)
        assert plan["graph"] == ("from disk" if from_disk else "in memory")
        assert plan["loader"]["graph"] == (share if from_disk else bytes_in_memory(graph))
        opened.reader(memory=plan["smallest_reader_bytes"], tables=[table.name], static=None).close()
        with pytest.raises(featstore.errors.BudgetError):
            opened.reader(memory=plan["smallest_reader_bytes"] - 1, tables=[table.name], static=None)


def test_a_table_of_several_graphs_has_no_plan_of_one(call: Call, tmp_path: Path) -> None:
    edges = np.array([[0, 1, 2, 2], [2, 1, 0, 1]])
    graph = {("a", "r", "a"): edges, ("b", "s", "a"): edges, ("b", "t", "b"): edges[:, :3]}
    tables = {name: np.ones((3, 2), np.float32) for name in "abc"}
    featstore.pack(tmp_path / "s", tables, graph=graph).close()
    for table, edges_of_all in (("a", 8), ("b", 7)):
        told = call("plan-memory", tmp_path / "s", "--table", table, code=2).stderr
        assert f"2 graphs are over table '{table}'" in told
        assert f"the --edges of all, {edges_of_all}" in " ".join(told.split())
    call("plan-memory", tmp_path / "s", "--table", "c")


def test_numbers_are_planned_as_a_store_of_them(call: Call, store: Path) -> None:
    with featstore.open(store) as opened:
        graph = next(iter(opened.graphs.values()))
        table, edges = graph.table, graph.edges
        given = table.entry.order.row_of_node is None
    numbers = ["--nodes", table.rows, "--row-bytes", table.row_bytes, "--edges", edges]
    plans = [
        parsed(call("plan-memory", *words, "--memory", "32MiB", "--json"))
        for words in ([store, "--table", table.name], [*numbers, *(["--as-given"] if given else [])])
    ]
    pages = [plan["reader"].pop("page_checksums") for plan in plans]
    assert abs(pages[0] - pages[1]) <= 4096, "of files whose last page is part of one"
    for use in ("row_maps", "staging", "planning"):
        assert plans[0]["reader"][use] == pytest.approx(plans[1]["reader"][use], rel=0.01), use
    # the number of each edge, which a store may keep, is not known of numbers
    assert plans[0]["loader"]["graph"] >= plans[1]["loader"]["graph"]
    assert plans[0]["batch_nodes_most"] == plans[1]["batch_nodes_most"]


def test_a_sampler_of_many_nodes_has_more_than_a_third(call: Call) -> None:
    numbers = ["--nodes", 10**8, "--row-bytes", 8, "--edges", 10**9]
    plan = parsed(call("plan-memory", *numbers, "--memory", "3GiB", "--json"))
    assert (plan["graph"], plan["loader"]["graph"]) == ("from disk", 16 * 10**8)
    assert plan["loader"]["kept rows"] > 0


def test_what_people_read(call: Call) -> None:
    numbers = ["--nodes", 111_059_956, "--row-bytes", 512, "--edges", 1_615_685_872]
    text = call("plan-memory", *numbers, "--memory", "16GiB").stdout
    assert "A loader of 16.0 GiB, mode online" in text
    assert "The graph is read from disk" in text
    small = call("plan-memory", *numbers, "--memory", "2GiB", "--batch-size", 100_000).stdout
    assert "Too little for two mini-batches" in small
    assert "the smallest that works is" in call("plan-memory", *numbers, "--memory", "1MiB", code=1).stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give a STORE, or --nodes"),
        (["--nodes", 5], "--row-bytes"),
        (["{store}", "--edges", 7], "--edges is of numbers instead of a STORE"),
        (["--nodes", 5, "--row-bytes", 8, "--table", "x"], "--table is of a STORE"),
    ],
)
def test_wrong_usage(call: Call, store: Path, words: list[object], says: str) -> None:
    given = [str(store) if word == "{store}" else word for word in words]
    assert says in call("plan-memory", *given, code=2).stderr


# Completion.

ASKED = """
source {script}
COMP_WORDS=({words}); COMP_CWORD={at}
_featstore_completion featstore
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("words", "expected"),
    [("featstore plan", "plan-memory"), ("featstore explain --sta", "--static"), ("featstore pa", "pack")],
)
def test_bash_completes(call: Call, tmp_path: Path, words: str, expected: str) -> None:
    script, command = tmp_path / "completion", tmp_path / "featstore"
    script.write_text(call("completion", "bash").stdout)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m featstore_cli "$@"\n')
    command.chmod(0o755)
    asked = ASKED.format(script=script, words=words, at=len(words.split()) - 1)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", asked], env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=60
    )
    assert expected in done.stdout.split(), done.stderr


def test_others_are_told_in_their_own_words(call: Call) -> None:
    assert "#compdef featstore" in call("completion", "zsh").stdout
    assert "complete --no-files --command featstore" in call("completion", "fish").stdout
    assert "bash" in call("completion", "csh", code=2).stderr
