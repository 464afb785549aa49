"""Packs, compilations and recordings that were stopped, and device models, as strangers might have left them:
an error that says what is wrong. What the fuzzer (tests/fuzz) has found."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.base.checksum import crc_pages, digest_of_checksums
from featstore.compile.segment_pages import Target
from featstore.errors import CorruptionError, FeatstoreError, FormatError
from featstore.layout import TableLayout
from featstore.plan.cost import load_models, models_path
from featstore.storage.disk import Disk
from featstore.storage.table_writer import TableWriter
from featstore.trace.log_file import load_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
sys.path.insert(0, str(Path(__file__).parents[1]))
import corpus
from processes import in_child

WAYS = ("graph", "spill", "buckets")
NO_TEXT = b'{"\xff": 1}'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    corpus.make(folder)
    return folder


@pytest.fixture
def stopped(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a pack that was stopped."""

    def copy(way: str) -> Path:
        return Path(shutil.copytree(made / way, tmp_path / way))

    return copy


def change(path: Path, work: Callable[[dict[str, Any]], None]) -> None:
    """Change what the journal of a pack says of its table."""
    journal = path / "g000001.journal"
    state = json.loads(journal.read_text())
    work(state["tables"]["features"])
    journal.write_text(json.dumps(state))


def refused(path: Path, text: str) -> None:
    """Going on with a pack is refused, and does not end the process."""

    def go_on() -> bool:
        with pytest.raises(FeatstoreError, match=text):
            corpus.do_pack(path, path.name, 0, corpus.QuickDisk(), resume=True)
        return True

    assert in_child(go_on) == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [2**31 - 1, -(2**31), 5])
@pytest.mark.parametrize("which", ["row_of_node", "node_of_row"])
def test_an_order_that_is_none(stopped: Callable[[str], Path], way: str, value: int, which: str) -> None:
    path = stopped(way)

    def spoil(table: dict[str, Any]) -> None:
        name = table["order"][which]["path"] + "/c.0"
        values = np.frombuffer((path / name).read_bytes(), np.int32).copy()
        values[7] = value if value != values[7] else 6
        (path / name).write_bytes(values.tobytes())
        entry = next(file for file in table["order_files"] if file["path"] == name)
        entry["digest"] = digest_of_checksums(crc_pages(values.view(np.uint8)))

    change(path, spoil)
    refused(path, "cannot resume from .*journal: .*(points outside the 130 rows|do not belong together)")


def test_an_order_whose_files_are_not_listed(stopped: Callable[[str], Path]) -> None:
    path = stopped("spill")
    change(path, lambda table: table["order_files"].clear())
    refused(path, "cannot resume from .* needs the file .* which is not listed; start anew with --overwrite")


def test_a_graph_without_rows_by_degree(stopped: Callable[[str], Path]) -> None:
    path = stopped("graph")
    change(path, lambda table: table.update(graph=None) or table["order"].update(rows_by_degree=None))
    refused(path, "its rows by degree are not listed")


def test_a_graph_that_is_none(stopped: Callable[[str], Path]) -> None:
    path = stopped("graph")
    change(path, lambda table: table["graph"].update(edges=5))
    refused(path, "cannot resume from .*sources should be 5 numbers")
    assert not (path / "featstore.json").exists()


@pytest.mark.parametrize(
    "report", [{"minimum": "x", "maximum": 1.0}, {"minimum": 1.0}, {"nan": None}, {"convert": 1}]
)
def test_a_report_that_is_none(stopped: Callable[[str], Path], report: dict[str, Any]) -> None:
    path = stopped("given")
    change(path, lambda table: table.update(report=report))
    refused(path, "cannot resume from .*no counts of a table's values")


@pytest.mark.parametrize(
    "progress",
    [{"written_bytes": 2**40}, {"written_bytes": 100}, {"rows_counted": 131}, {"spill_bytes": [2**40] * 7}],
)
def test_more_progress_than_there_can_be(stopped: Callable[[str], Path], progress: dict[str, Any]) -> None:
    path = stopped("buckets" if "spill_bytes" in progress else "given")
    change(path, lambda table: table.update(progress))
    refused(path, "what it says of them is impossible")


@pytest.mark.parametrize("way", ["given", "spill"])
def test_what_is_called_done_and_is_not(stopped: Callable[[str], Path], way: str) -> None:
    path = stopped(way)
    change(path, lambda table: table.update(done=True))
    refused(path, "expected a file of .* bytes, found .*; start anew with --overwrite")


@pytest.mark.parametrize("count", ["written_bytes", "buckets_written", "rows_counted", "slab", "episode"])
def test_less_progress_than_none(stopped: Callable[[str], Path], count: str) -> None:
    path = stopped("given")
    change(path, lambda table: table.update({count: -4096}))
    refused(path, "cannot resume from .*Expected `int` >= 0")


def test_what_is_no_text(
    stopped: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stopped("given")
    (path / "g000001.journal").write_bytes(NO_TEXT)
    refused(path, "cannot resume from .*journal: .*(?i:utf-8)")
    (tmp_path / "recording.json").write_bytes(NO_TEXT)
    with pytest.raises(FormatError, match=r"cannot read .*recording.json: .*(?i:utf-8)"):
        load_checkpoint(tmp_path)
    monkeypatch.setenv("FEATSTORE_CACHE", str(tmp_path))
    models_path().write_bytes(NO_TEXT)
    with pytest.raises(FormatError, match=r"devices.json is not a list of device models .*(?i:utf-8)"):
        load_models()


def test_a_gap_that_no_device_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATSTORE_CACHE", str(tmp_path))
    model = {"read_seconds": 1e-5, "byte_seconds": 1e-9, "request_seconds": 0, "gap_pages": 2**62}
    models_path().write_text(json.dumps({"0:1/uring/direct": model}))
    with pytest.raises(FormatError, match="impossible device model"):
        load_models()


def test_a_page_of_two_buckets_that_was_changed(stopped: Callable[[str], Path]) -> None:
    """What the one that is done left in it is read back, and would get a new checksum."""
    path = stopped("buckets")
    table = json.loads((path / "g000001.journal").read_text())["tables"]["features"]
    assert table["buckets_written"] > 0
    assert table["carry_checksum"] != 0
    wanted, found, zeros = table["carry_checksum"], set[tuple[Path, int]](), np.zeros(4096, np.uint8)
    for chunk in sorted((path / "g000001/tables/features/rows").glob("c.*")):
        raw = np.fromfile(chunk, np.uint8)
        for at in range(0, len(raw), 4096):
            page = raw[at : at + 4096]
            for size in range(1, len(page)):
                if int(crc_pages(np.concatenate([page[:size], zeros[size:]]))[0]) == wanted:
                    found.add((chunk, at))
    shutil.copytree(path, path.with_name("earlier"))
    ((chunk, at),) = found
    flip(chunk, at)
    refused(path, "of what was written of the 4 KiB page.*--overwrite")

    def forget(table: dict[str, Any]) -> None:  # a version before did not say it
        del table["carry_checksum"]

    change(path.with_name("earlier"), forget)
    path.rename(path.with_name("gone"))
    path.with_name("earlier").rename(path)
    corpus.do_pack(path, path.name, 0, corpus.QuickDisk(), resume=True)


def test_spilled_rows_that_were_changed(tmp_path: Path) -> None:
    layout = TableLayout.choose(100, 100)
    writer = TableWriter(Disk(), layout, lambda chunk: tmp_path / f"c{chunk}", tmp_path / "checksums")
    target = Target(writer, layout, lambda chunk: tmp_path / f"c{chunk}")
    pages = np.zeros(12288, np.uint8)
    pages[:10_000] = np.random.default_rng(1).integers(0, 256, 10_000)
    writer.write(0, pages, lambda: None)
    writer.finish()
    writer.close()
    assert np.array_equal(target.rows_written(45, 55), pages[4500:10_000])
    raw = bytearray((tmp_path / "c0").read_bytes())
    raw[5000] ^= 1
    (tmp_path / "c0").write_bytes(raw)
    assert np.array_equal(target.rows_written(0, 10), pages[:1000])
    with pytest.raises(CorruptionError, match=r"byte 4,?096"):
        target.rows_written(45, 55)


# Pages that a checkpoint of a compilation left unfinished.


def go_on_compiling(made: Path, base: Path) -> None:
    with featstore.open(base) as store, featstore.Trace(made / corpus.TRACE) as trace:
        corpus.do_compile(store, trace, corpus.HALF, corpus.QuickDisk(), resume=True)


def unfinished_pages(base: Path) -> list[tuple[Path, int, list[int]]]:
    """(file below the store, byte, runs of bytes that were written) of each page that the journal calls
    unfinished."""
    root = Path("packs") / corpus.HALF
    table = json.loads((base / root / "g000001.journal").read_text())["tables"]["features"]
    return [
        (root / f"g000001/tables/features.{part}/rows/c.0.0", number * 4096, runs)
        for part, pages in zip(("packed", "resident"), table["unfinished"], strict=True)
        for number, runs, _ in pages
    ]


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


def test_unfinished_pages_that_were_changed(made: Path, tmp_path: Path) -> None:
    found = unfinished_pages(made / corpus.BASE)
    assert len({path for path, _, _ in found}) == 2, "of both tables that are written"
    for number, (path, at, runs) in enumerate(found):
        for place in (runs[0], runs[-1] - 1):
            base = shutil.copytree(made / corpus.BASE, tmp_path / f"{number}.{place}")
            flip(base / path, at + place)
            with pytest.raises(
                CorruptionError, match=r"checksum .* of what was written .*--overwrite"
            ) as refusal:
                go_on_compiling(made, base)
            assert refusal.value.offset == at
    # What the process wrote there after its last checkpoint is none of its promises.
    base = shutil.copytree(made / corpus.BASE, tmp_path / "later")
    holes = [(path, at + runs[1]) for path, at, runs in found if runs[1] < 4096]
    assert holes
    for path, at in holes:
        flip(base / path, at)
    go_on_compiling(made, base)
    assert featstore.verify(base / "packs" / corpus.HALF).ok
    base = shutil.copytree(made / corpus.BASE, tmp_path / "undisturbed")
    go_on_compiling(made, base)
    for path in {path for path, _, _ in found}:
        assert (base / path).read_bytes() == (tmp_path / "later" / path).read_bytes()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ([[[0, [0, 5000], 1]]], "<= 4096"),
        ([[[-1, [0, 1], 1]]], ">= 0"),
        ([[[0, [0, 960], 1]]], "checksum 00000001 of what was written"),
        ([[[0, [960, 0], 2**40]]], "--overwrite"),
        ([[[0, [0], 1]]], "--overwrite"),
    ],
)
def test_a_journal_whose_unfinished_pages_are_none(
    made: Path, tmp_path: Path, wrong: list[Any], text: str
) -> None:
    base = shutil.copytree(made / corpus.BASE, tmp_path / "base")
    journal = base / "packs" / corpus.HALF / "g000001.journal"
    state = json.loads(journal.read_text())
    state["tables"]["features"]["unfinished"] = wrong
    journal.write_text(json.dumps(state))
    with pytest.raises((FormatError, CorruptionError), match=text):
        go_on_compiling(made, base)


@pytest.mark.parametrize(
    ("change_table", "text"),
    [
        ({"slab": 2**40}, "at most .* slabs .*--overwrite"),
        ({"episode": 2**40}, "at most .* slabs .*--overwrite"),
        ({"done": True}, "no unfinished pages of a table that is done"),
    ],
)
def test_a_journal_that_says_more_than_was_done(
    made: Path, tmp_path: Path, change_table: dict[str, Any], text: str
) -> None:
    base = shutil.copytree(made / corpus.BASE, tmp_path / "base")
    change_compiling(base, lambda table: table.update(change_table))
    with pytest.raises(CorruptionError, match=text):
        go_on_compiling(made, base)


def test_a_journal_that_says_another_slab(made: Path, tmp_path: Path) -> None:
    """More than was done would leave rows out, which nobody had written; fewer contradicts the pages."""
    before: list[int] = []
    change_compiling(made / corpus.BASE, lambda table: before.append(table["slab"]))
    for slab in (before[0] - 1, before[0] + 1):
        base = shutil.copytree(made / corpus.BASE, tmp_path / f"{slab}")
        change_compiling(base, lambda table: table.update(slab=slab))  # noqa: B023
        with pytest.raises(CorruptionError, match="--overwrite"):
            go_on_compiling(made, base)


def change_compiling(base: Path, how: Callable[[dict[str, Any]], object]) -> None:
    """Change what the journal of the stopped compilation says of its table."""
    journal = base / "packs" / corpus.HALF / "g000001.journal"
    state = json.loads(journal.read_text())
    before = json.dumps(state)
    how(state["tables"]["features"])
    if json.dumps(state) != before:
        journal.write_text(json.dumps(state))
