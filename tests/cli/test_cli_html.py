"""``inspect --html``: one page, offline, whose sections are there or say why not."""

from __future__ import annotations

import re
import shutil
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import Call
from featstore_cli.charts import curves, heat, stacks
from featstore_cli.graph_facts import look_at_graph

import featstore
from featstore.errors import BudgetError

SECTIONS = (
    "What to do", "The store", "Memory of a reader by use, over budgets", "Worth of a static tier",
    "Sizes of partitions", "Edges between partitions", "Degrees and hubs",
    "Forecast of rates over sizes of requests", "Compiled traces: where rows come from", "The run",
)  # fmt: skip
NASTY = "a<&\"'>b"


def silent(stage: str, done: float, total: float | None) -> None:
    pass


def sections(path: Path) -> dict[str, str]:
    """The sections of a page by title; what each page must be is checked."""
    text = path.read_text()
    assert "<script" not in text.lower()
    assert "http" not in text
    assert " src=" not in text
    assert " href=" not in text
    assert "prefers-color-scheme:dark" in text
    drawn = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    for svg in drawn:
        ElementTree.fromstring(svg)
    assert drawn
    assert len(text) < 1_000_000
    found = dict(re.findall(r"<section><h2>(.*?)</h2>(.*?)</section>", text, re.DOTALL))
    assert tuple(found) == SECTIONS
    return found


@pytest.fixture(scope="session")
def report(store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that were saved, of a loader and of a reader."""
    folder = tmp_path_factory.mktemp("runs")
    with featstore.open(store) as opened:
        with opened.reader(memory="16MiB", static=None) as reader:
            reader.read(np.arange(100))
            stats = reader.stats().save(folder / "stats.json")
        options: Any = {"seeds": np.arange(50), "fanouts": (2,), "batch_size": 25, "memory": "32MiB"}
        with opened.loader(mode="online", **options) as loader:
            assert sum(1 for _ in loader) == 2
            run = loader.report().save(folder / "run.json")
    return {"stats": stats, "run": run}


def test_a_page_of_a_store_with_a_graph(
    call: Call, store: Path, report: dict[str, Path], tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    begin = time.perf_counter()
    result = call("inspect", store, "--html", page, "--stats", report["run"])
    assert time.perf_counter() - begin < 30
    assert not result.stdout
    assert "wrote" in result.stderr
    found = sections(page)
    for title in SECTIONS:
        assert ("Not shown" in found[title]) == title.startswith("Compiled"), title
    assert "calibrate" in found["What to do"]
    for title in (*SECTIONS[2:8],):
        assert 'class="chart"' in found[title], title
    for part in ("seconds by stage", "reads by latency", "hit rate"):
        assert part in found["The run"]
    before = page.read_bytes()
    for option in ("--partitions", "--orders"):
        said = call("inspect", store, "--html", page, "--overwrite", option, code=2).stderr
        assert f"{option} is not on the page" in said
    assert "overwrite" in call("inspect", store, "--html", page, code=1).stderr
    assert page.read_bytes() == before
    call("inspect", store, "--html", page, "--overwrite", "--stats", report["stats"], "--memory", "40MiB")
    found = sections(page)
    assert "the smallest that works" in found["Degrees and hubs"]
    assert "What a reader has counted" in found["The run"]
    assert "more --memory" in found["What to do"]


def test_the_knee_is_where_the_curve_is_furthest_above_the_straight_line(
    call: Call, store: Path, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    call("inspect", store, "--html", page)
    said = re.search(r"The first ([\d,]+) nodes", sections(page)["Worth of a static tier"])
    assert said is not None
    with featstore.open(store) as opened:
        covered = look_at_graph(next(iter(opened.graphs.values())), 1 << 30, silent).covered()
    above = covered - np.arange(1, len(covered) + 1) / len(covered)
    assert above[int(said[1].replace(",", "")) - 1] == pytest.approx(above.max(), abs=1e-12)


def test_what_is_not_there_is_said(call: Call, two_tables: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(two_tables, tmp_path / NASTY))
    page = tmp_path / "report.html"
    call("inspect", moved, "--html", page)
    found = sections(page)
    for title in ("Worth of a static tier", "Edges between partitions", "Degrees and hubs"):
        assert "the store has no graph" in found[title]
    assert "there is one partition" in found["Sizes of partitions"]
    assert "no compiled trace" in found["Compiled traces: where rows come from"]
    assert "save" in found["The run"]
    assert 'class="chart"' in found["Forecast of rates over sizes of requests"]
    text = page.read_text()
    assert NASTY not in text
    assert "a&lt;&amp;&quot;&#x27;&gt;b" in text


def test_compiled_traces_by_source_of_rows(call: Call, store: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(store, tmp_path / "copy"))
    trace = tmp_path / "t.trace"
    call("sample", copy, "--out", trace, "--fanouts", "2", "--batch-size", 500, "--train", "y")
    call("pack", copy, "--trace", trace, "--memory", "32MiB", "--disk", "2x")
    page = tmp_path / "report.html"
    call("inspect", copy, "--html", page)
    found = sections(page)["Compiled traces: where rows come from"]
    assert "default: features" in found
    assert "packed" in found


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "no run"), ("[]", "no run"), ('{"schema": "x/1"}', "its schema is"),
     ('{"schema": "featstore.loader-report/1", "batches": "many"}', "no run")],
)  # fmt: skip
def test_what_is_no_run_is_refused(call: Call, store: Path, tmp_path: Path, text: str, says: str) -> None:
    run, page = tmp_path / "run.json", tmp_path / "report.html"
    run.write_text(text)
    assert says in call("inspect", store, "--html", page, "--stats", run, code=2).stderr
    assert not page.exists()
    assert "go with --html" in call("inspect", store, "--stats", run, code=2).stderr


@pytest.mark.parametrize("typed", [False, True])
def test_what_is_told_of_a_graph_is_what_its_edges_are(tmp_path: Path, typed: bool) -> None:
    random = np.random.default_rng(3)
    edges = np.stack([random.integers(0, 50 if typed else 300, 2000), random.integers(0, 300, 2000)])
    x = random.random((300, 4), np.float32)
    if typed:
        made = featstore.pack(tmp_path / "s", {"p": x, "a": 50}, graph={("a", "writes", "p"): edges})
    else:
        made = featstore.pack(tmp_path / "s", x, graph=edges, order="ldg", partitions=40)
    with made as store:
        graph = next(iter(store.graphs.values()))
        found = look_at_graph(graph, 1 << 30, silent)
        indptr, indices = graph.csc()
        targets = np.repeat(np.arange(300), np.diff(indptr))
        into = np.bincount(targets, minlength=300)
        out = np.bincount(indices, minlength=50 if typed else 300)
        degrees = np.concatenate([out, into]) if typed else out + into
        assert np.array_equal(found.degrees, np.sort(degrees)[::-1])
        assert found.covered()[-1] == pytest.approx(1)
        for table, node, degree in found.hubs:
            assert (into if table != "a" else out)[node] + (0 if typed else out[node]) == degree
        parts = []
        for table, nodes in ((graph.source_table, indices), (graph.table, targets)):
            row_of_node = table.row_of_node()
            rows = nodes if row_of_node is None else row_of_node[nodes]
            parts.append(np.searchsorted(table.partition_offsets, rows, "right") - 1)
        assert found.between.sum() == pytest.approx(1)
        if typed:
            assert found.cut is None
        else:
            assert found.cut == pytest.approx((parts[0] != parts[1]).mean())
            assert found.between.shape == (32, 32)
            assert found.between[3, 5] == pytest.approx(
                ((parts[0] * 32 // 40 == 3) & (parts[1] * 32 // 40 == 5)).mean()
            )
        with pytest.raises(BudgetError):
            look_at_graph(graph, 1 << 20, silent)


def test_squares_are_numbered_by_the_first_of_their_group() -> None:
    """As groups are made: partition i is in group i * groups // partitions."""
    partitions, groups = 40, 32
    first = [next(i for i in range(partitions) if i * groups // partitions == k) for k in range(groups)]
    drawn = heat([[1.0] * groups] * groups, "edges", "sources", "targets", (partitions, partitions))
    texts = [text.text for text in ElementTree.fromstring(f"<p>{drawn}</p>").iter("text")]
    numbers = [str(first[k]) for k in (0, 8, 16, 23, 31)]
    assert texts[:10] == numbers + numbers
    assert texts[10:] == ["targets", "sources"]


def test_charts_are_xml_whatever_the_names() -> None:
    for drawn in (
        curves({NASTY: [(1, 5)]}, NASTY, NASTY, log_x=True, log_y=True),
        curves({NASTY: [(1, 0), (3, 0)], "b": [(2, 2)]}, "x", "y"),
        stacks({NASTY: (0, 0)}, (NASTY, "b"), NASTY, str),
        heat([[0.0]], NASTY, NASTY, NASTY, (1, 1)),
    ):
        ElementTree.fromstring(f"<p>{drawn}</p>")
