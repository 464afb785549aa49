"""What stores, readers, plans and loaders show of themselves, as text and in notebooks."""

from __future__ import annotations

import json
import re
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.base.sheets import LINES_MAX, Grid, Sheet, bar, bars_of, safe, shortened
from featstore.errors import StoreExistsError
from featstore.loaders.report import LoaderReport
from featstore.reader.report import ReaderStats

BYTES_MAX, SECONDS_MAX = 30_000, 0.020
NASTY = "a<&\"'>b"


def checked(shown: Any) -> str:
    """The HTML of an object: small, quick, well-formed, and nothing that runs or is fetched."""
    times = []
    for _ in range(5):  # the machine may be busy with something else
        begin = time.perf_counter()
        html: str = shown._repr_html_()
        times.append(time.perf_counter() - begin)
    assert min(times) < SECONDS_MAX
    assert len(html.encode()) < BYTES_MAX
    assert "<script" not in html.lower()
    assert "http" not in html
    assert "prefers-color-scheme:dark" in html
    assert "currentColor" in html
    ElementTree.fromstring(re.sub(r" class=fs-l(?=>)", "", html))
    return html


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Iterator[featstore.Store]:
    """A store with a graph, in a folder whose name is no HTML."""
    random = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("shown") / NASTY
    rows, edges = random.random((500, 8), np.float32), random.integers(0, 500, (2, 3000))
    with pack(path, rows, graph=edges, arrays={"y": np.arange(500)}) as store:
        yield store


def test_a_store_and_its_tables_show_themselves(made: featstore.Store) -> None:
    for shown, parts in (
        (made, ("features", "8 float32", "500", "3,000", "y", made.uuid)),
        (made.table("features"), ("500 of 8 float32", "partitions")),
    ):
        html, text = checked(shown), str(shown)
        for part in parts:
            assert part in html
            assert part in text
        assert NASTY in text
        assert NASTY not in html
        assert "a&lt;&amp;&quot;&#x27;&gt;b" in html
        assert repr(eval(repr(shown), {"featstore": featstore})) == repr(shown)


def test_readers_plans_and_counts_show_themselves(made: featstore.Store) -> None:
    with made.reader(memory="16MiB") as reader:
        assert "no request" in str(reader)
        reader.read(np.arange(20))
        assert "staging" in checked(reader)
        assert "20 rows" in str(reader)
        assert "forecast" in checked(reader.plan(np.arange(20)))
        assert "from the static tier" in checked(reader.stats())
    assert "closed" in checked(reader)
    with made.reader(memory="16MiB", policy="lru") as tiered:
        tiered.read(np.arange(20))
        assert "buffer tier" in checked(tiered)
        assert "policies" in checked(tiered.plan(np.arange(20)))
    with made.table("features", memory="16MiB", policy="lru") as array:
        assert "500x8 float32" in checked(array)
    assert "closed" in checked(array)


def test_a_loader_and_its_report_show_themselves(made: featstore.Store, tmp_path: Path) -> None:
    options: Any = {"seeds": np.arange(60), "fanouts": (2,), "batch_size": 20, "memory": "32MiB"}
    with made.loader(mode="online", **options) as loader:
        assert sum(1 for _ in loader) == 3
        assert "online" in checked(loader)
        report = loader.report()
        for part in ("seconds by stage", "hit rate", "slowest stage"):
            assert part in checked(report)
            assert part in str(report)
        assert sum(report.latencies.values()) == report.reads > 0
        path = report.save(tmp_path / "run.json")
    assert "closed" in checked(loader)
    saved = json.loads(path.read_text())
    assert saved.pop("schema") == "featstore.loader-report/1"
    assert saved == json.loads(json.dumps(report.to_dict()))


def test_stages_stand_by_what_they_took() -> None:
    text = str(LoaderReport(2, {"plan": 0.5, "read": 1.5, "train": 0.0, "copy": 1.0}, 10, 1))
    assert text.index("1.500 s") < text.index("1.000 s") < text.index("0.500 s")
    assert "train" not in text


@pytest.mark.parametrize(
    "saved", [LoaderReport(2, {"read": 1.5}, 10, 1), ReaderStats(requests=1, rows_asked=2)]
)
def test_a_file_that_is_there_is_replaced_only_when_asked(saved: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("mine")
    with pytest.raises(StoreExistsError, match="overwrite"):
        saved.save(path)
    assert path.read_text() == "mine"
    assert saved.save(path, overwrite=True) == path
    assert json.loads(path.read_text())["schema"].startswith("featstore.")


def test_what_can_be_made_again_says_how(made: featstore.Store) -> None:
    def again(one: Any) -> Any:
        return eval(repr(one), {"featstore": featstore})

    with again(made) as store:
        assert store.uuid == made.uuid
    for table in (made.tables["features"], made.table("features/offsets")):
        assert again(table).entry == table.entry
    assert again(made.graphs["features"]).edges == 3000
    for options in (
        {"memory": "16MiB", "engine": "threads", "tables": ["features"]},
        {"memory": 1 << 24, "static": [1, 2]},
        {"memory": "16MiB", "policy": "lru"},
        {"memory": "16MiB", "tiers": [featstore.Buffer("s3-fifo", "1MiB", small=0.2), featstore.Static([3])]},
        {"memory": "16MiB", "columns": [1, 2]},
        {"memory": "16MiB", "device": "cpu", "device_memory": "1MiB"},
    ):
        with made.reader(**options) as one, again(one) as other:
            assert type(other) is type(one)
            assert repr(other) == repr(one)
            assert other.memory() == one.memory()
            assert (other.read([5, 3]) == one.read([5, 3])).all()
    for options in ({}, {"policy": "lru"}, {"columns": [1]}):
        with made.table("features", memory="16MiB", **options) as array, again(array) as other:
            assert (other[:9] == array[:9]).all()
    with made.reader(memory="16MiB") as one:
        assert (again(featstore.TableArray(one, "features"))[:9] == one.read(range(9))).all()
    how: Any = {"seeds": [1, 2, 3], "fanouts": (2,), "mode": "online", "memory": "32MiB", "halo": None}
    with made.loader(**how) as loader, again(loader) as other:
        assert [list(b.n_id) for b in other] == [list(b.n_id) for b in loader]
        assert other.memory_bytes == loader.memory_bytes


def test_what_cannot_be_made_again_is_no_program(made: featstore.Store) -> None:
    with made.loader(seeds=np.arange(40), fanouts=(2,), mode="online", memory="32MiB") as loader:
        assert "seeds=<ndarray [40]>" in repr(loader)
    with made.loader([np.arange(9)], mode="online", memory="32MiB") as loader:
        assert ".loader([<ndarray [9]>], mode='online'" in repr(loader)
    with pytest.raises(SyntaxError):
        eval(repr(loader))


def test_mappings_of_a_store_say_what_is_in_them(made: featstore.Store) -> None:
    assert repr(made.arrays) == "{'y': <int64 500>}"
    assert eval(repr(made.tables), {"featstore": featstore})["features"].rows == 500
    assert list(eval(repr(made.graphs), {"featstore": featstore})) == ["features"]
    assert "3,000, with no values" in checked(made.graphs["features"])


def test_costs_show_themselves(made: featstore.Store) -> None:
    costs = made.loader_costs(seeds=np.arange(60), fanouts=(2,), batch_size=20, memory="32MiB", seconds=0.1)
    html = checked(costs)
    for mode in ("online", "compiled", "rolling", "partitions"):
        assert f">{mode}<" in html
    assert "What each mode would cost" in html


def test_a_store_of_many_tables_with_long_names_stays_small(tmp_path: Path, pack: Any) -> None:
    one = np.zeros((1, 1), np.uint8)
    names = [f"{k:03}" + "x" * 120 for k in range(60)]
    with pack(tmp_path / "s", dict.fromkeys(names, one), arrays={f"{n}y": one for n in names}) as store:
        html = checked(store)
        assert f"and {60 - LINES_MAX} more" in html
        assert f"and {60 - LINES_MAX} more" in str(store)


def test_long_texts_lose_their_middle() -> None:
    assert shortened("a" * 50 + "b" * 50, 11) == "aaaaa…bbbbb"
    assert shortened("short") == "short"
    assert safe("\x00\ud800<") == "\ufffd\ufffd&lt;"


@pytest.mark.parametrize("share", [-1.0, 0.0, 0.5, 7.0])
def test_a_bar_stays_within_its_frame(share: float) -> None:
    widths = [float(rect.get("width", "")) for rect in ElementTree.fromstring(bar(share))]
    assert widths[0] == 100
    assert widths[1] == 100 * min(1, max(0, share))


def test_a_grid_draws_what_it_has() -> None:
    grid = Grid(("name", "n"), [["a", "1"], ["bb", "22"]], "what")
    assert grid.lines() == ["what", "name   n", "a      1", "bb    22"]
    assert grid.html().count("<tr>") == 3
    assert bars_of("", {"a": 1, "b": 3}).bars == [0.25, 0.75]
    assert bars_of("", {"a": 0}).bars == [0.0]
    assert Sheet("t", {}).text() == "t"
