"""Edges of files in columns: Arrow as Parquet, columns that are times, shards, texts without keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from featstore_cli.main import cli

import featstore
from featstore.errors import FeatstoreWarning, SourceError
from featstore.reader.graphs import read_csc, read_times

RNG = np.random.default_rng(3)
ENDS = RNG.integers(0, 20, (2, 150))
YEARS = RNG.integers(1990, 2020, 150)
X = RNG.standard_normal((20, 2))
CITES = ("p", "cites", "p")


def written(path: Path, **more: Any) -> Path:
    """Edges in small record batches."""
    table = pa.table({"source": ENDS[0], "target": ENDS[1], **more})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=40)
    elif path.suffix == ".feather":
        feather.write_feather(table, path, chunksize=40)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=40)
    return path


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("suffix", [".arrow", ".feather", ".parquet"])
def test_arrow_files(tmp_path: Path, suffix: str, typed: bool) -> None:
    path = written(tmp_path / f"edges{suffix}", year=YEARS)
    tables, graph = ({"p": X}, {CITES: path}) if typed else ({"features": X}, path)
    with pytest.warns(FeatstoreWarning, match=rf"not stored: year.*edges{suffix}:year'"):
        store = featstore.pack(tmp_path / "s", tables, graph=graph, edge_times=f"{path}:year")
    with store:
        (found,) = store.graphs.values()
        indptr, sources = read_csc(found)
        order = np.lexsort((YEARS, ENDS[1]))
        np.testing.assert_array_equal(read_times(found), YEARS[order])
        np.testing.assert_array_equal(np.diff(indptr), np.bincount(ENDS[1], minlength=20))
        got = sorted(zip(np.repeat(np.arange(20), np.diff(indptr)), YEARS[order], sources, strict=True))
        assert got == sorted(zip(ENDS[1], YEARS, ENDS[0], strict=True))


def test_a_column_by_the_command(tmp_path: Path) -> None:
    path = written(tmp_path / "edges.parquet", year=YEARS)
    np.save(tmp_path / "x.npy", X)
    asked = ["pack", tmp_path / "s", "--features", tmp_path / "x.npy", "--graph", path, "--edge-times"]
    with pytest.warns(FeatstoreWarning, match="not stored: year"):
        done = CliRunner().invoke(cli, [*map(str, asked), f"{path}:year"])
    assert done.exit_code == 0, done.output
    with featstore.open(tmp_path / "s") as store:
        assert sorted(read_times(store.graphs["features"])) == sorted(YEARS)
    done = CliRunner().invoke(cli, [*map(str, asked), f"{path}:month", "--overwrite"])
    assert done.exit_code == 1
    assert "month" in done.output


def test_a_null_among_edges(tmp_path: Path) -> None:
    with pa.ipc.new_file(tmp_path / "e.arrow", pa.schema({"src": pa.int64(), "dst": pa.int64()})) as file:
        file.write_table(pa.table({"src": pa.array([1, None]), "dst": [0, 1]}))
    with pytest.raises(SourceError, match="a null among edges 0 to 1"):
        featstore.pack(tmp_path / "s", X, graph=tmp_path / "e.arrow")


def test_shards_of_edges(tmp_path: Path) -> None:
    folder = tmp_path / "edges"
    folder.mkdir()
    paths = [written(folder / f"{number}.parquet") for number in (1, 2)]
    for given in (folder, folder / "*.parquet", paths):
        with pytest.raises(SourceError, match=r"edges are in 2 files.*1\.parquet first.*into one Parquet"):
            featstore.pack(tmp_path / "s", {"p": X}, graph={CITES: given})


def test_ends_that_are_texts_without_keys(tmp_path: Path) -> None:
    ends = np.array([["a", "b"], ["b", "a"]])
    asked: dict[str, Any] = {"features": {"p": X, "q": X[:2]}, "graph": {("p", "r", "q"): ends[:, [0, 1, 0]]}}
    with pytest.raises(SourceError, match=r"say node_keys=\{TYPE: \.\.\.\}"):
        featstore.pack(tmp_path / "s", **asked)
    with pytest.raises(SourceError, match=r"say node_keys=\{'p': \.\.\.\}"):
        featstore.pack(tmp_path / "s", **asked, node_keys={"q": ["a", "b"]})


def test_as_many_nodes_as_keys(tmp_path: Path) -> None:
    edges = {"source": ["a", "c"], "target": ["b", "b"]}
    graph: Any = {("author", "knows", "author"): edges}
    (tmp_path / "keys.txt").write_text("a\nb\nc\n")
    for number, keys in enumerate((["a", "b", "c"], tmp_path / "keys.txt")):
        with featstore.pack(
            tmp_path / f"s{number}", {"author": None, "p": X}, graph=graph, node_keys={"author": keys}
        ) as store:
            assert store.tables["author"].rows == 3
            assert store.ids("author").lookup(["c"]).tolist() == [2]
    with pytest.raises(SourceError, match=r"'author' is None: .*node_keys=\{'author': \.\.\.\}"):
        featstore.pack(tmp_path / "t", {"author": None, "p": X}, graph=graph)
