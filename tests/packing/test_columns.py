"""Tables with named columns: what is taken, what is refused, and rows that are placed by ids."""

from __future__ import annotations

import gzip
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

import featstore
from featstore.errors import BudgetError, SourceError
from featstore.packing.sources.columns import looks_like_id, refuse_id_values
from featstore.packing.sources.opening import open_rows

ROWS = 3000
RNG = np.random.default_rng(0)
FEATURES = RNG.standard_normal((ROWS, 3)).astype(np.float32)
IDS = RNG.permutation(ROWS)  # row i of the file is node IDS[i]
BY_NODE = np.empty_like(FEATURES)
BY_NODE[IDS] = FEATURES
KINDS = ["csv", "csv-numpy", "parquet", "arrow"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "csv-numpy":
        for module in ("pyarrow", "pyarrow.csv"):
            monkeypatch.setitem(sys.modules, module, None)
    return str(request.param)


def write(folder: Path, kind: str, columns: dict[str, Any], name: str = "x") -> Path:
    """A file of named columns; text and numbers as they are."""
    if kind.startswith("csv"):
        path = folder / f"{name}.csv"
        cells = [[str(v) for v in values] for values in columns.values()]
        lines = [",".join(columns), *(",".join(row) for row in zip(*cells))]
        path.write_text("\n".join(lines) + "\n")
        return path
    table = pa.table({key: pa.array(values) for key, values in columns.items()})
    path = folder / f"{name}.{kind}"
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=700)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
            out.write_table(table, max_chunksize=600)
    return path


def features(rows: slice = slice(None), values: NDArray[Any] = FEATURES) -> dict[str, Any]:
    return {name: values[rows, k] for k, name in enumerate("abc")}


def rows_of(source: Any) -> NDArray[Any]:
    return np.concatenate([block.copy() for block in source.blocks(0, 1000)])


def stored(path: Path, given: Any, **options: Any) -> NDArray[Any]:
    with featstore.pack(path, given, **options) as store:
        featstore.verify(path)
        with store.reader(memory="64MiB") as reader:
            return np.array(reader.read(np.arange(store.tables["features"].rows)))


@pytest.mark.parametrize(
    "name",
    [
        "id",
        "ID",
        "node_id",
        "nodeId",
        "NodeID",
        "nid",
        "paper_id",
        "index",
        "idx",
        "node",
        "user_uid",
        "",
        " ",
        "Unnamed: 0",
        "__index_level_0__",
        "vertex_index",
        "paper-id",
        "nodeid",
        "key",
    ],
)
def test_names_of_ids(name: str) -> None:
    assert looks_like_id(name)


@pytest.mark.parametrize(
    "name",
    ["a", "f0", "x_17", "humid", "acid", "grid", "valid", "year", "price", "0", "width", "body_mass_index"],
)
def test_names_of_features(name: str) -> None:
    assert not looks_like_id(name)


def test_a_column_named_as_ids_is_refused_unless_told(tmp_path: Path, kind: str) -> None:
    ids = IDS[:50] if kind.startswith("csv") else IDS[:50].astype(np.float32)
    path = write(tmp_path, kind, {"node_id": ids, **features(slice(50))})
    with pytest.raises(SourceError, match=r"'node_id' looks like the ids.*id='node_id'.*columns="):
        open_rows(path)
    assert np.array_equal(
        rows_of(open_rows(path, columns="*")), np.column_stack([IDS[:50], FEATURES[:50]]).astype("f4")
    )
    chosen = open_rows(path, columns=["c", "a"])
    assert np.array_equal(rows_of(chosen), FEATURES[:50][:, [2, 0]])
    assert chosen.chosen is not None
    assert chosen.chosen.described() == {
        "columns": "c, a", "left_out": "node_id, b", "placed_by": "the order of the file"
    }  # fmt: skip
    assert np.array_equal(rows_of(open_rows(path, id="node_id")), FEATURES[:50])
    assert np.array_equal(rows_of(open_rows(path, id=0, columns=[3])).reshape(-1), FEATURES[:50, 2])


def test_a_column_of_ids_without_a_name_of_ids_is_refused(tmp_path: Path, kind: str) -> None:
    ids = IDS[:400] if kind.startswith("csv") else IDS[:400].astype(np.float32)
    for values in (ids, ids[np.argsort(ids)][:5] * 0 + np.arange(5, dtype=ids.dtype)):
        path = write(tmp_path, kind, {"v": values, **features(slice(len(values)))})
        with pytest.raises(SourceError, match=r"'v' looks like the ids"):
            open_rows(path)
        assert rows_of(open_rows(path, columns="*")).shape == (len(values), 4)
    years = np.repeat(np.arange(200), 2).astype(ids.dtype)
    assert rows_of(open_rows(write(tmp_path, kind, {"v": years, **features(slice(400))}))).shape == (400, 4)


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        (
            np.column_stack([np.arange(100), RNG.integers(0, 2, (100, 5))]),
            0,
        ),  # ids beside words that are there or not
        (np.column_stack([RNG.integers(0, 2, (100, 5)), RNG.permutation(100) + 31_000]), 5),
        (np.column_stack([np.arange(3), [0.5, 0.25, 1.5]]), 0),
        (np.arange(400).reshape(100, 4), None),  # all columns are alike
        (RNG.integers(0, 2, (100, 5)), None),
        (RNG.standard_normal((100, 5)), None),
        (np.column_stack([[5, 9, 7], [0.5, 0.25, 1.5]]), None),  # too few rows to tell
        (np.arange(100)[:, None], None),
        (np.full((100, 2), np.nan), None),
        (np.zeros((0, 2)), None),
    ],
)
def test_ids_by_their_values(values: NDArray[Any], refused: int | None) -> None:
    names = [f"f{k}" for k in range(values.shape[1])]
    if refused is None:
        refuse_id_values(values, names, "x")
        return
    with pytest.raises(SourceError, match=f"'f{refused}' looks like the ids"):
        refuse_id_values(values, names, "x")


def test_columns_that_cannot_be_features_are_not_dropped(tmp_path: Path, kind: str) -> None:
    keys = [f"paper_{i}" for i in range(40)]
    path = write(tmp_path, kind, {"title": keys, **features(slice(40))})
    with pytest.raises(SourceError, match=r"title \((string|text)\).*columns=.*id="):
        open_rows(path)
    assert np.array_equal(rows_of(open_rows(path, columns=["a", "b", "c"])), FEATURES[:40])
    with pytest.raises(SourceError, match=r"0 to n-1.*node_keys"):
        open_rows(path, id="title")
    for options, message in (
        ({"columns": "z"}, "no column 'z'"),
        ({"id": "z"}, "no column 'z'"),
        ({"columns": ["a", "title"]}, "title"),
        ({"columns": "a", "key": "b"}, "both name columns"),
        ({"columns": []}, "no column of numbers"),
        ({"columns": 9}, "no column 9"),
    ):
        with pytest.raises(SourceError, match=message):
            open_rows(path, **options)


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    pq.write_table(pa.table([pa.array([1.0]), pa.array([2.0])], names=["a", "a"]), tmp_path / "x.parquet")
    with pytest.raises(SourceError, match="two columns are called 'a'"):
        open_rows(tmp_path / "x.parquet")
    (tmp_path / "x.csv").write_text("a,a\n1.5,2.5\n")
    assert rows_of(open_rows(tmp_path / "x.csv")).tolist() == [[1.5, 2.5]]
    with pytest.raises(SourceError, match="2 columns are called 'a'"):
        open_rows(tmp_path / "x.csv", columns="a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (",a\n0,1.5\n1,2.5\n", "'' looks like the ids"),  # the index, as pandas writes it
        ('"node_id","a"\n0,1.5\n', "'node_id' looks like the ids"),
        ("0,1,2\n0.5,1.5,2.5\n", "numbers of columns, as pandas writes them, or a row"),
        ("0,1,2\n7,1,2\n", "numbers of columns, as pandas writes them, or a row"),
        ("0\n0.5\n", "numbers of columns, as pandas writes them, or a row"),
        ("p1,0.5\np2,1.5\n", "column 0 holds text"),
        ("a,b\n1.5,2.5,3.5\n", "names 2 columns, the second has 3"),
        ("0,1.5\n1,2.5\n2,0.5\n", "'0' looks like the ids"),
        ("1.5,NA,2.5\n1.0,2.0,3.0\n", "first line has 'NA', and may be a row that lacks a number"),
        ("1,,2\n1,2,3\n", "first line has ''"),
        ("-,?,null\n1,2,3\n", "first line has '-'"),
        ("1.5,b,2.5\n1.0,2.0,3.0\n", "first line has 'b'"),
        ("1,\\N,2\n1,2,3\n", "first line has '\\\\N'"),
        (",0,1\n5,2,3\n", "first line has ''"),
        ('a\n1.5\n""\n', "not comma-separated numbers"),
        ("1.5\n\n3\n", "an empty cell in rows"),
        ("a\n1.5\n\n3\n", "an empty cell in rows"),
    ],
)
@pytest.mark.parametrize("arrow", [True, False])
def test_first_lines_of_text(
    tmp_path: Path, text: str, message: str, arrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not arrow:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(SourceError, match=re.escape(message)):
        rows_of(open_rows(tmp_path / "x.csv"))


@pytest.mark.parametrize("arrow", [True, False])
def test_lines_that_are_no_rows_of_one_column(
    tmp_path: Path, arrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of the file; and where pandas has written its index."""
    if not arrow:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "x.csv").write_text("a\n" + "1.5\n" * 3000 + "2.5\n\n\n")
    assert rows_of(open_rows(tmp_path / "x.csv")).tolist() == [[1.5]] * 3000 + [[2.5]]
    (tmp_path / "x.csv").write_text(",0,1\n0,1.5,2\n1,2.5,3\n")
    assert rows_of(open_rows(tmp_path / "x.csv", columns=[1, 2])).tolist() == [[1.5, 2], [2.5, 3]]
    (tmp_path / "x.csv").write_text(",3,7\n0,1.5,2\n1,2.5,3\n")
    assert rows_of(open_rows(tmp_path / "x.csv", columns=["3", "7"])).tolist() == [[1.5, 2], [2.5, 3]]
    with pytest.raises(SourceError, match="may be a row that lacks a number"):
        open_rows(tmp_path / "x.csv", columns=[1, 2])
    (tmp_path / "x.csv").write_text("0,NA,2.5\n1,3.5,4.5\n")
    with pytest.raises(SourceError, match="may be a row that lacks a number"):
        open_rows(tmp_path / "x.csv", id="0")
    (tmp_path / "x.csv").write_text("label,400.5,401\n0,1.5,2\n1,2.5,3\n")
    assert rows_of(open_rows(tmp_path / "x.csv", id="label")).tolist() == [[1.5, 2], [2.5, 3]]


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow"])
def test_a_column_that_is_named_twice(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"x.{kind}"
    table = pa.table({"a": [1.5, 2.5], "b": [3.5, 4.5]})
    if kind == "csv":
        path.write_text("a,b\n1.5,3.5\n2.5,4.5\n")
    elif kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    for columns in (["a", "b", "a"], ["a", 0], ["b", "b"]):
        with pytest.raises(SourceError, match="more than once"):
            open_rows(path, columns=columns)


def test_text_without_names_has_a_number_everywhere(tmp_path: Path) -> None:
    """As OGB's files are known to have none."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for text in ("1,NA,2\n1,2,3\n", "a,b,c\n1,2,3\n"):
        (folder / "node-feat.csv.gz").write_bytes(gzip.compress(text.encode()))
        with pytest.raises(SourceError, match="may be a row that lacks a number"):
            open_rows(tmp_path)


def test_a_mark_at_the_start_of_text_is_no_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.csv").write_bytes(b"\xef\xbb\xbf1.5,2.5\n3.5,4.5\n")
    assert rows_of(open_rows(tmp_path / "x.csv")).tolist() == [[1.5, 2.5], [3.5, 4.5]]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert rows_of(open_rows(tmp_path / "x.csv")).tolist() == [[1.5, 2.5], [3.5, 4.5]]


def test_columns_and_ids_are_for_tables_with_columns(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", FEATURES)
    for spec in (tmp_path / "x.npy", FEATURES, [FEATURES]):
        for options in ({"columns": "a"}, {"id": "a"}):
            with pytest.raises(SourceError, match=next(iter(options)) + "= is for"):
                open_rows(spec, **options)


@pytest.mark.parametrize("memory", ["64MiB", "small"])
@pytest.mark.parametrize("order", ["given", "permutation"])
def test_rows_are_placed_by_ids(
    tmp_path: Path, order: str, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "parquet", {"n": IDS, **features()})
    options: dict[str, Any] = {"order": order, "id": "n", "memory": memory}
    if order == "permutation":
        options["permutation"] = RNG.permutation(ROWS)
    if memory == "small":  # through spill files: the least that an error names
        monkeypatch.setattr("featstore.packing.permute.fits_in_memory", lambda job: False)
        options["memory"] = "64MiB"
    seen: list[Any] = []
    got = stored(tmp_path / "s", path, **options, progress=seen.append)
    assert np.array_equal(got, BY_NODE)
    assert {"ids", "spill" if memory == "small" else "read", "write"} <= {p.stage for p in seen}
    with featstore.open(tmp_path / "s") as store:
        source = store.manifest.provenance["sources"]["features"]
        assert (source["columns"], source["placed_by"]) == ("a, b, c", "id 'n'")
        digest = store.tables["features"].entry.statistics["rows_digest"]
    with featstore.pack(tmp_path / "t", BY_NODE) as plain:
        assert plain.tables["features"].entry.statistics["rows_digest"] == digest, (
            "rows are of the nodes they are of"
        )
    assert not list((tmp_path / "s").glob("*.spill"))


@pytest.mark.parametrize("kind", ["csv", "csv-numpy"], indirect=True)
def test_ids_of_text_whose_length_nobody_knows(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind, {"node_id": IDS, **features()})
    assert np.array_equal(stored(tmp_path / "s", path, id="node_id"), BY_NODE)
    same = write(tmp_path, kind, {"node_id": np.arange(ROWS), **features()}, "y")
    assert np.array_equal(stored(tmp_path / "t", same, id="node_id"), FEATURES)


def test_a_graph_and_arrays_speak_of_nodes(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet", {"n": IDS, **features()})
    ring = np.stack([np.arange(ROWS), (np.arange(ROWS) + 1) % ROWS])
    assert np.array_equal(
        stored(tmp_path / "s", path, id="n", graph=ring, order="ldg", partitions=4), BY_NODE
    )
    with featstore.open(tmp_path / "s") as store:
        indptr, indices = store.graphs["features"].csc()
    assert np.array_equal(indices, (np.arange(ROWS) - 1) % ROWS)
    assert np.array_equal(indptr, np.arange(ROWS + 1))


def spoiled(change: Any) -> NDArray[Any]:
    ids = IDS.astype(np.int64)
    change(ids)
    return ids


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            spoiled(lambda ids: ids.__setitem__(7, ids[1999])),
            r"that of row 7 and of row 1,999, and 1 of the ids .* missing",
        ),
        (
            spoiled(lambda ids: ids.__setitem__(7, ROWS)),
            rf"row 7 has id {ROWS}, but with 3,000 rows ids are 0 to 2,999",
        ),
        (spoiled(lambda ids: ids.__setitem__(2500, -1)), r"row 2,500 has id -1"),
        (IDS + 1, r"has id 3000"),
        (IDS * 1000, r"has id \d+, but with 3,000 rows"),
        (IDS + 0.5, r"is \d+\.5; ids are whole numbers"),
        (np.where(np.arange(ROWS) == 9, np.nan, IDS), r"row 9, column 'n', is nan"),
    ],
)
@pytest.mark.parametrize("file", ["csv", "parquet"])
def test_ids_that_would_lose_rows_are_named(tmp_path: Path, ids: Any, message: str, file: str) -> None:
    path = write(tmp_path, file, {"n": ids, **features()})
    with pytest.raises(SourceError, match=message.replace("row 9, column", "(row 9, column|number 9)")):
        featstore.pack(tmp_path / "s", path, id="n")
    assert not (tmp_path / "s" / "manifest.json").exists()
    assert not list((tmp_path / "s").glob("g*")), "nothing was achieved, so nothing stays"


def test_missing_ids_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet", {"n": [*IDS[:-1].tolist(), None], **features()})
    with pytest.raises(SourceError, match="column 'n' holds a null"):
        featstore.pack(tmp_path / "s", path, id="n")
    path = write(tmp_path, "csv", {"n": [*IDS[:-1].tolist(), ""], **features()})
    with pytest.raises(SourceError, match="empty cell"):
        featstore.pack(tmp_path / "s", path, id="n")


def test_ids_beyond_the_budget_are_an_error_that_names_one_that_works(tmp_path: Path) -> None:
    path = write(tmp_path, "csv", {"node_id": IDS, **features()})
    memory: Any = 40_000
    for _ in range(8):
        try:
            assert np.array_equal(
                stored(tmp_path / "s", path, id="node_id", memory=memory, overwrite=True), BY_NODE
            )
            break
        except BudgetError as error:
            assert error.needed_bytes > memory
            memory = error.needed_bytes
    else:
        pytest.fail("no budget that was named works")


def test_a_stopped_pack_by_ids_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "parquet", {"n": IDS, **features()})
    monkeypatch.setattr("featstore.packing.permute.fits_in_memory", lambda job: False)
    monkeypatch.setattr("featstore.packing.spill.CHECKPOINT_BYTES", 4096)
    monkeypatch.setattr("featstore.packing.spill_files.CHECKPOINT_BYTES", 4096)
    monkeypatch.setattr("featstore.packing.permute.SOURCE_BLOCK_BYTES", 4096)
    monkeypatch.setattr("featstore.packing.spill.PIECE_BYTES", 4096)
    whole = tmp_path / "whole"
    assert np.array_equal(stored(whole, path, id="n"), BY_NODE)
    for stage in ("spill", "write"):
        told = 0

        def stop(p: Any, stage: str = stage) -> None:
            nonlocal told
            told += p.stage == stage
            if told > 3:
                raise KeyboardInterrupt

        out = tmp_path / stage
        with pytest.raises(KeyboardInterrupt):
            featstore.pack(out, path, id="n", progress=stop).close()
        with pytest.raises(SourceError, match="cannot resume"):
            featstore.pack(out, path, columns=["a", "b", "c"], resume=True)
        assert np.array_equal(stored(out, path, id="n", resume=True), BY_NODE)
        files = {
            p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file() and "lock" not in p.name
        }
        assert files == {
            p.relative_to(whole): p.read_bytes()
            for p in whole.rglob("*")
            if p.is_file() and "lock" not in p.name
        }


def test_options_of_files_reach_the_reader(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"head" + FEATURES.tobytes())
    raw = {"shape": (-1, 3), "offset": 4}
    assert np.array_equal(stored(tmp_path / "a", tmp_path / "x.bin", raw_dtype="float32", **raw), FEATURES)
    assert np.array_equal(stored(tmp_path / "b", tmp_path / "x.bin", dtype="float32", **raw), FEATURES)
    half = stored(tmp_path / "c", tmp_path / "x.bin", dtype="float32", cast="float16", **raw)
    assert np.array_equal(half, FEATURES.astype(np.float16))
    np.savez(tmp_path / "x.npz", one=FEATURES, two=FEATURES + 1)
    both = {"a": tmp_path / "x.npz", "b": tmp_path / "x.npz"}
    with (
        featstore.pack(tmp_path / "d", both, key={"a": "one", "b": "two"}) as store,
        store.reader(memory="64MiB") as reader,
    ):
        assert np.array_equal(reader.read({"b": np.arange(9)})["b"], FEATURES[:9] + 1)
    np.savez(tmp_path / "g.npz", e=np.array([[0, 1], [1, 2]]), f=np.array([[0], [2]]))
    with featstore.pack(tmp_path / "e", FEATURES, graph=tmp_path / "g.npz", graph_key="f") as store:
        assert store.graphs["features"].edges == 1
    for path in (tmp_path / "x.npz", folder := tmp_path / "shards"):
        folder.mkdir(exist_ok=True)
        np.savez(folder / "1.npz", one=FEATURES)
        with pytest.raises(SourceError, match="offset= is for headless files"):
            featstore.pack(tmp_path / "f", path, key="one", offset=4)
    for options, message in (
        ({"graph_key": "f"}, "no graph"),
        ({"dtype": "float16", "cast": "float32"}, "both ask for a cast"),
        ({"shape": "wide"}, "shape is that of"),
        ({"shape": 5}, "shape is that of"),
        ({"offset": -4}, "offset is a number"),
        ({"key": {"z": "a"}}, "'z'"),
    ):
        with pytest.raises(SourceError, match=message):
            featstore.pack(tmp_path / "f", FEATURES, **options)


@pytest.mark.parametrize("rows", [49, 51])
def test_a_number_of_rows_that_is_told_is_held_against_text(tmp_path: Path, rows: int) -> None:
    path = write(tmp_path, "csv", features(slice(50)))
    assert np.array_equal(stored(tmp_path / "s", path, shape=(50, 3)), FEATURES[:50])
    with pytest.raises(SourceError, match=rf"more than the {rows} rows|50 rows, {rows} were expected"):
        featstore.pack(tmp_path / "t", path, shape=(rows, 3))


def test_ends_of_edges_are_not_guessed(tmp_path: Path) -> None:
    edges = {"edge_id": np.arange(3), "from_node": np.arange(3), "to_node": np.arange(3)[::-1].copy()}
    for kind in ("parquet", "csv"):
        path = write(tmp_path, kind, edges, "edges")
        with pytest.raises(SourceError, match="edge_id"):
            featstore.pack(tmp_path / "s", FEATURES[:3], graph=path)
    chosen = {"graph": tmp_path / "edges.parquet", "graph_key": "from_node,to_node"}
    with featstore.pack(tmp_path / "t", FEATURES[:3], **chosen) as store:  # type: ignore[arg-type]
        assert store.graphs["features"].csc()[1].tolist() == [2, 1, 0]
