"""The pages that commands write, in a headless browser where there is one: names are texts, nothing runs, and
no request leaves the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import seen
from cli_support import Call
from featstore_cli.demo_page import page
from featstore_demo.report import WAYS, DemoReport, Way

import featstore

#: What would change the page's title, or ask for a file, were it anything but text.
SCRIPT = "<script>document.title='ran'</script>"
IMAGE = "<img src='http://127.0.0.1:9/asked' onerror=document.title='ran'>"
NASTY = f"{SCRIPT}{IMAGE}&amp;\"'"

pytestmark = pytest.mark.timeout(150)


def looked_at(page: Path, folder: Path) -> str:
    """The elements of a page that keeps to itself, whatever its names are."""
    elements, asked = seen(page, folder)
    assert not {url for url in asked if "127.0.0.1" in url}
    assert "<script" not in elements
    assert "<img" not in elements
    assert "<title>ran" not in elements
    assert elements.count("<svg") == page.read_text().count("<svg") > 0
    return elements


def test_a_page_that_asks_is_found_out(tmp_path: Path) -> None:
    """Else the other tests could not fail."""
    page = tmp_path / "page.html"
    page.write_text(f"<title>a</title>{IMAGE}{'words ' * 3000}")
    elements, asked = seen(page, tmp_path)
    assert "http://127.0.0.1:9/asked" in asked
    assert "<title>ran" in elements


def test_a_store_of_hostile_names(call: Call, tmp_path: Path) -> None:
    folder = tmp_path / "<b><img src=q onerror=document.title='ran'>&\""
    folder.mkdir()
    random = np.random.default_rng(0)
    rows, edges = random.random((500, 4), np.float32), random.integers(0, 500, (2, 3000))
    # Tables and graphs cannot have such names; folders can.
    featstore.pack(folder / "s", rows, graph=edges, order="ldg", partitions=8).close()
    report = tmp_path / "report.html"
    call("inspect", folder / "s", "--html", report)
    elements = looked_at(report, tmp_path)
    assert elements.count("<section>") == 10
    assert "&lt;b&gt;&lt;img src=q onerror=document.title='ran'&gt;&amp;\"/s" in elements


def test_the_page_of_a_demo(tmp_path: Path) -> None:
    counted: Any = {"losses": ["a"], "digests": ["b"], "row_counts": [1], "epoch_steps": [1]}
    ways = tuple(
        Way(
            name, epoch_seconds=[1.0 + k], wait_seconds=[0.5], prepare_seconds=0.1, read_bytes=k << 20,
            baseline_rss_bytes=0, peak_rss_bytes=1 << 20, weights="w", steps_compared=1, test_accuracy=0.5,
            first_difference=None, rows_identical=True, weights_identical=True, note=NASTY, **counted,
        )
        for k, name in enumerate(WAYS)
    )  # fmt: skip
    report = DemoReport(
        graph=NASTY, node_count=1, edge_count=1, class_count=1, row_bytes=1, table_bytes=1, memory_bytes=1,
        epochs=1, batch_size=1, fanouts=(1,), hidden=1, seed=0, generate_seconds=0.0, pack_seconds=0.0,
        store_bytes=1, store_path=NASTY, test_count=1, test_total=1, seconds=1.0, ways=ways,
    )  # fmt: skip
    path = tmp_path / "demo.html"
    path.write_text(page(report))
    elements = looked_at(path, tmp_path)
    assert elements.count("&lt;script&gt;document.title='ran'") >= 1 + len(WAYS)
