"""What a loader tells while it runs: the line, counters, OpenMetrics text, the log, the profiler's spans."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import ArgumentError
from featstore.loaders.report import LoaderReport
from featstore.loaders.watch import Watch

HOW: dict[str, Any] = {
    "seeds": np.arange(200), "fanouts": (2,), "batch_size": 50, "memory": "32MiB", "mode": "online",
    "engine": "threads",
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("watched") / "s"
    edges = np.random.default_rng(0).integers(0, 200, (2, 900))
    featstore.pack(out, np.ones((200, 8), np.float32), graph=edges, topology=True).close()
    return out


def test_a_loader_tells_how_it_goes(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with featstore.open(path) as store, store.loader(**HOW, progress=True) as loader:
        for _ in range(2):
            assert sum(1 for _ in loader) == 4
    told = capfd.readouterr().err.splitlines()
    lines = [line for line in told if ": 4/4 mini-batches, " in line]
    assert len(lines) == 2, "no terminal: a line at the end of each epoch"
    for epoch, line in enumerate(lines):
        assert line.startswith(f"epoch {epoch}: 4/4 mini-batches, ")
        assert re.search(r"\d/s, .*/s from disk, hits \d+%, waited [\d.]+ s, slowest: ", line)


def test_it_is_silent_unless_asked(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with featstore.open(path) as store, store.loader(**HOW) as loader:
        assert sum(1 for _ in loader) == 4
    assert capfd.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("mode", ["compiled", "rolling"])
def test_preparing_is_told_on_a_terminal(path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with featstore.open(path) as store, store.loader(**HOW | {"mode": mode}, progress=True) as loader:
        assert sum(1 for _ in loader) == 4
    told = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "\rrecord: 1 mini-batches" in told or "\rrecord: 1 of 4 mini-batches" in told
    assert "epoch 0: 4/4 mini-batches" in told


@pytest.mark.parametrize("notebook", [False, True])
def test_long_works_tell_how_far_they_are(
    path: Path, tmp_path: Path, notebook: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook the line is written over, as on a terminal; elsewhere what is short has its end alone."""
    if notebook:
        monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    works: dict[str, Callable[[], Any]] = {
        "pack": lambda: featstore.pack(tmp_path / "p", np.ones((9, 2), np.float32), progress=True).close(),
        "verify": lambda: featstore.verify(path, progress=True),
        "export": lambda: featstore.export(path, "features", tmp_path / "x.npy", progress=True),
        "split": lambda: featstore.split(path, 1, tmp_path / "f", progress=True),
        "record": lambda: featstore.Trace.record([np.arange(9)], tmp_path / "t", progress=True).close(),
        "compile": lambda: featstore.compile_trace(
            tmp_path / "p", tmp_path / "t", memory="32MiB", progress=True
        ).close(),
    }  # fmt: skip
    for name, work in works.items():
        out = io.StringIO()
        monkeypatch.setattr(sys, "stderr", out)
        work()
        (*before, last) = out.getvalue().rstrip("\n").split("\r" if notebook else "\n")
        assert re.fullmatch(rf"{name}: done in [\d.]+ s *", last), name
        assert len(before) > 1 if notebook else not before, name


def test_a_work_that_fails_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(featstore.errors.IncompleteStoreError):
        featstore.verify(tmp_path, progress=True)
    assert capfd.readouterr().err.startswith("verify: stopped in ")
    with pytest.raises(featstore.errors.IncompleteStoreError):
        featstore.verify(tmp_path, progress=False)
    assert capfd.readouterr().err == ""


def test_a_terminals_line_is_written_over() -> None:
    out = Terminal()
    watch, report = Watch(out), LoaderReport(1, {"read": 1.5, "wait": 0.5}, 10, 1)
    watch.begin(report)
    watch.tell(report, 0, 100_000, None)
    watch.tell(report, 0, 2, 7, end=True)
    first, second = out.getvalue().split("\r")[1:]
    assert "\n" not in first
    assert second.endswith("\n")
    assert len(second.rstrip("\n")) >= len(first), "nothing of the longer line is left"
    assert "slowest: read (read 1.5 s)" in second


def test_counters_are_the_reports(path: Path) -> None:
    with featstore.open(path) as store, store.loader(**HOW) as loader:
        assert sum(1 for _ in loader) == 4
        report = loader.report()
    flat = report.counters()
    assert flat["batches"] == 4
    assert flat["bytes_read"] == report.bytes_read
    assert flat["seconds/wait"] == report.seconds["wait"]
    assert flat["hit_rate"] == report.hit_rate
    (name,) = report.buffers
    assert flat[f"buffers/{name}/hits"] == report.buffers[name].hits
    assert all(isinstance(value, int | float) for value in flat.values())


SAMPLE = re.compile(r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*)\} (\S+)')


def scraped(text: str) -> tuple[dict[str, str], dict[str, float]]:
    """The kinds of families by name, and samples, of OpenMetrics text that keeps its rules: families stand
    together behind their kind, counters end in _total, no sample stands twice, and buckets only grow."""
    lines = text.splitlines()
    assert text.endswith("\n")
    assert lines.pop() == "# EOF"
    kinds: dict[str, str] = {}
    found: dict[str, float] = {}
    edges: list[tuple[float, float]] = []
    family = ""
    for line in lines:
        if line.startswith("# TYPE "):
            _, _, family, kind = line.split(" ")
            assert family not in kinds
            kinds[family] = kind
        elif line.startswith("# UNIT "):
            assert line == f"# UNIT {family} {family.rsplit('_', 1)[1]}"
        else:
            sample = SAMPLE.fullmatch(line)
            assert sample, line
            suffix = {"counter": "_total", "gauge": "", "histogram": "_bucket"}[kinds[family]]
            assert sample[1] == family + suffix
            key = line.rpartition(" ")[0]
            assert key not in found
            found[key] = float(sample[3])
            if kinds[family] == "histogram":
                edges.append((float(re.findall(r'le="([^"]+)"', sample[2])[0]), found[key]))
    assert edges == sorted(edges)
    assert all(one[1] <= other[1] for one, other in pairwise(edges))
    assert edges[-1][0] == float("inf")
    return kinds, found


def test_openmetrics_text_says_the_same() -> None:
    report = LoaderReport(
        3, {"read wait": 0.25, 'a "b"\\c\n': 1.0}, 4096, 1, latencies={2.048: 5, 2.0**25 * 1.024: 2}
    )
    kinds, found = scraped(report.openmetrics(rank="0"))
    assert found['featstore_loader_batches_total{rank="0"}'] == 3
    assert found['featstore_loader_seconds_total{rank="0",stage="read wait"}'] == 0.25
    assert found['featstore_loader_seconds_total{rank="0",stage="a \\"b\\"\\\\c\\n"}'] == 1.0
    assert LoaderReport(3, {}, 0, 0).openmetrics().splitlines()[1] == "featstore_loader_batches_total{} 3"
    assert found['featstore_loader_kept_share{rank="0"}'] == 1.0
    buckets = {name: value for name, value in found.items() if "_bucket" in name}
    assert len(found) - len(buckets) == len(report.counters()) - len(report.latencies)
    name = "featstore_loader_read_latency_seconds"
    assert kinds[name] == "histogram"
    assert buckets[f'{name}_bucket{{rank="0",le="1.024e-06"}}'] == 0
    assert buckets[f'{name}_bucket{{rank="0",le="2.048e-06"}}'] == 5
    assert [value for sample, value in buckets.items() if "Inf" not in sample][-1] == 5, "34 s or longer"
    assert buckets[f'{name}_bucket{{rank="0",le="+Inf"}}'] == 7


@pytest.mark.parametrize("mode", ["online", "compiled", "rolling", "partitions"])
def test_every_modes_report_is_openmetrics(path: Path, mode: str) -> None:
    with featstore.open(path) as store, store.loader(**HOW | {"mode": mode}) as loader:
        assert sum(1 for _ in loader) == 4
        report = loader.report()
    text = report.openmetrics(rank="0")
    _, found = scraped(text)
    assert found['featstore_loader_batches_total{rank="0"}'] == 4
    assert found['featstore_loader_bytes_read_total{rank="0"}'] == report.bytes_read
    assert found['featstore_loader_read_latency_seconds_bucket{rank="0",le="+Inf"}'] == report.reads > 0


def test_prometheus_reads_it(path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    with featstore.open(path) as store, store.loader(**HOW) as loader:
        assert sum(1 for _ in loader) == 4
        text = loader.report().openmetrics(rank="0")
    families = {family.name: family.type for family in parser.text_string_to_metric_families(text)}
    assert families == scraped(text)[0]


@pytest.mark.parametrize("labels", [{"stage": "x"}, {"le": "x"}, {"a-b": "x"}, {"rank": 0}])
def test_labels_that_cannot_be_are_refused(labels: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="label"):
        LoaderReport(0, {}, 0, 0).openmetrics(**labels)


def log(path: Path, level: str) -> subprocess.CompletedProcess[str]:
    program = (
        "import sys, numpy, featstore\n"
        "with featstore.open(sys.argv[1]) as store:\n"
        "    with store.loader(seeds=numpy.arange(50), fanouts=(2,), mode='online') as loader:\n"
        "        list(loader)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=120,
        env={**os.environ, "FEATSTORE_LOG": level},
    )  # fmt: skip


def test_the_log_says_what_was_decided(path: Path) -> None:
    told = log(path, "info")
    assert told.returncode == 0, told.stderr
    assert re.search(r"featstore\[\d+\] INFO: .*: mode online, because asked for", told.stderr)
    assert re.search(r"INFO: engine (uring|threads)", told.stderr)
    assert " DEBUG: " not in told.stderr
    each = log(path, "debug").stderr
    reads = re.findall(r"DEBUG: .*features.*: (\d+) reads of (\d+) pages in [\d.]+ ms$", each, re.MULTILINE)
    assert sum(int(count) for count, _ in reads) > 0
    wrong = log(path, "loud")
    assert wrong.returncode == 1
    assert "FEATSTORE_LOG=loud: it is one of debug, info, warning, error" in wrong.stderr


def test_the_profiler_sees_what_the_loop_waits_for(path: Path) -> None:
    torch = pytest.importorskip("torch")
    with featstore.open(path) as store, store.loader(**HOW) as loader, torch.profiler.profile() as seen:
        assert sum(1 for _ in loader) == 4
    (span,) = (one for one in seen.key_averages() if one.key == "featstore: wait for a mini-batch")
    assert span.count == 5, "each mini-batch, and the end"


def test_mini_batches_whose_number_nobody_knows_are_told_of(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A DataLoader over data of unknown length has a len() that raises TypeError."""
    torch = pytest.importorskip("torch")

    class Unknown(torch.utils.data.IterableDataset):  # type: ignore[misc,name-defined]
        def __iter__(self) -> Any:
            return iter([np.arange(k, k + 4) for k in range(5)])

    batches = torch.utils.data.DataLoader(Unknown(), batch_size=None)
    with featstore.open(path) as store, store.loader(batches, progress=True, memory="32MiB") as loader:
        assert sum(1 for _ in loader) == 5
        with pytest.raises(ArgumentError, match="no length"):
            len(loader)
    assert "epoch 0" in capfd.readouterr().err
