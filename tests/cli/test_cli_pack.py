"""``featstore pack``: what it packs, what it says, and what it says of mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import COLUMNS, ROWS, STORE_KEYS, Call, parsed
from click import Context
from click.testing import CliRunner
from featstore_cli.main import cli
from featstore_cli.options import SHAPE

import featstore
from featstore.errors import FeatstoreWarning
from featstore.storage.disk import Disk


def _read(path: Path, table: str = "features") -> Any:
    with featstore.open(path) as store, store.reader(static=None, tables=[table]) as reader:
        return reader.read(np.arange(store.tables[table].rows))


def test_pack_says_what_was_packed(call: Call, inputs: Path, tmp_path: Path, rows: Any) -> None:
    out = tmp_path / "new" / "s"
    result = call(
        "pack",
        out,
        "--features",
        inputs / "rows.npy",
        "--graph",
        inputs / "edges.npy",
        "--array",
        f"y={inputs / 'labels.npy'}",
        "--order",
        "ldg",
        "--partitions",
        4,
    )
    for text in (
        "3,000 rows of 16 float32, 64 B each",
        "ldg, because it was asked for",
        "of the edges join two partitions",
        "0 NaN",
        "range",
        "4: smallest",
        "packed in",
        "B/s",
    ):
        assert text in result.stdout
    assert result.stderr == "", "no progress where stderr is no terminal"
    np.testing.assert_array_equal(_read(out), rows)
    with featstore.open(out) as store:
        np.testing.assert_array_equal(store.arrays["y"], np.arange(ROWS))


def test_pack_json(call: Call, inputs: Path, tmp_path: Path) -> None:
    options = ["--features", f"paper={inputs / 'rows.npz'}", "--key", "paper=x", "--cast", "float16"]
    data = parsed(call("pack", tmp_path / "s", *options, "--json"))
    assert data["schema"] == "featstore.pack/1"
    assert set(data) == STORE_KEYS | {"seconds", "bytes_per_second"}
    table = data["tables"]["paper"]
    assert set(table) == {
        "rows",
        "row_shape",
        "dtype",
        "row_bytes",
        "bytes",
        "chunks",
        "checksums",
        "order",
        "partitions",
        "statistics",
        "featureless",
    }
    assert (table["rows"], table["row_shape"], table["dtype"], table["row_bytes"]) == (
        ROWS,
        [COLUMNS],
        "float16",
        2 * COLUMNS,
    )
    assert table["order"]["method"] == "given"
    assert table["statistics"]["cast_from"] == "float32"


def test_pack_topology(call: Call, inputs: Path, tmp_path: Path) -> None:
    base = [
        "--features",
        inputs / "rows.npy",
        "--graph",
        inputs / "edges.npy",
        "--order",
        "ldg",
        "--partitions",
        4,
    ]
    text = call("pack", tmp_path / "a", *base).stdout
    assert "12,000 edges between 3,000 rows" in text
    assert "30 by degree" in text
    hubs = parsed(call("pack", tmp_path / "b", *base, "--hubs", 0.1, "--hub-rank", "external", "--json"))[
        "graphs"
    ]["features"]["hubs"]
    assert (hubs["count"], hubs["method"]) == (300, "external")
    assert 0.05 < hubs["edge_share"] < 0.5
    assert (
        parsed(call("pack", tmp_path / "c", *base, "--hubs", 0, "--topology", "--json"))["graphs"][
            "features"
        ]["hubs"]
        is None
    )
    data = parsed(call("pack", tmp_path / "d", *base, "--no-topology", "--json"))
    assert data["graphs"] == {}
    assert data["tables"]["features"]["order"]["degrees_known"] is True
    with featstore.open(tmp_path / "d") as store:
        assert store.manifest.reader_features == []
    edges = np.load(inputs / "edges.npy")
    with featstore.open(tmp_path / "b") as store:
        indptr, indices = store.graphs["features"].csc()
    assert indptr.tolist() == np.cumsum([0, *np.bincount(edges[1], minlength=ROWS)]).tolist()
    assert indices.tolist() == edges[0][np.lexsort((edges[0], edges[1]))].tolist()


def test_pack_topology_mistakes(call: Call, inputs: Path, tmp_path: Path) -> None:
    base = ["pack", tmp_path / "s", "--features", inputs / "rows.npy"]
    assert "--hubs" in call(*base, "--hubs", 1.5, code=2).stderr
    assert "--hubs" in call(*base, "--hubs", "many", code=2).stderr
    assert "--hub-rank" in call(*base, "--hub-rank", "pagerank", code=2).stderr
    assert not (tmp_path / "s").exists()


def test_defaults_are_those_of_the_function() -> None:
    from featstore.packing.topology import HUB_RANKS, HUB_SHARE

    options = {option.name: option for option in cli.get_command(Context(cli), "pack").params}
    assert options["hubs"].default == HUB_SHARE
    assert tuple(options["hub_rank"].type.choices) == HUB_RANKS
    assert options["topology"].default is True


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        (["--raw-dtype", "float32", "--shape", f"-1,{COLUMNS}"], np.float32),
        (["--dtype", "float32", "--shape", f"{ROWS}x{COLUMNS}"], np.float32),
        (["--dtype", "float32", "--shape", f"(-1, {COLUMNS})", "--cast", "float16"], np.float16),
        (["--raw-dtype", "float32", "--shape", f"-1,{COLUMNS}", "--dtype", "float64"], np.float64),
        (["--dtype", "float32", "--shape", f"-1,{COLUMNS}", "--offset", 4 * COLUMNS], np.float32),
    ],
)
def test_headless_files(
    call: Call, inputs: Path, tmp_path: Path, rows: Any, options: list[Any], dtype: Any
) -> None:
    call("pack", tmp_path / "s", "--features", inputs / "rows.bin", *options, "-q")
    got = _read(tmp_path / "s")
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, rows[1 if "--offset" in options else 0 :].astype(dtype))


def test_dtype_casts_what_names_its_own(call: Call, inputs: Path, tmp_path: Path, rows: Any) -> None:
    result = call("pack", tmp_path / "s", "--features", inputs / "rows.npy", "--dtype", "float16")
    np.testing.assert_array_equal(_read(tmp_path / "s"), rows.astype(np.float16))
    assert "cast" in result.stdout
    assert "from float32: 0 values overflowed" in result.stdout


def test_overflow_is_remarked(call: Call, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.full((4, 2), 1e9, np.float32))
    with pytest.warns(FeatstoreWarning, match="8 numbers are too large for float16"):
        call("pack", tmp_path / "s", "--features", tmp_path / "x.npy", "--dtype", "float16")


def test_several_tables_with_options_of_their_own(
    call: Call, inputs: Path, tmp_path: Path, rows: Any
) -> None:
    call(
        "pack",
        tmp_path / "s",
        "--features",
        f"paper={inputs / 'rows.npy'}",
        "--features",
        f"author={inputs / 'rows.npz'}",
        "--key",
        "author=x",
        "--graph",
        f"paper={inputs / 'edges.npz'}",
        "--graph-key",
        "paper=e",
        "--order",
        "paper=degree",
        "--permutation",
        f"author={inputs / 'permutation.npy'}",
        "--order",
        "author=permutation",
        "--cast",
        "paper=float64",
    )
    with featstore.open(tmp_path / "s") as store:
        assert {n: t.entry.order.method for n, t in store.tables.items()} == {
            "paper": "degree",
            "author": "permutation",
        }
        assert {n: t.entry.dtype for n, t in store.tables.items()} == {
            "paper": "float64",
            "author": "float32",
        }
        np.testing.assert_array_equal(
            store.tables["author"].node_of_row(), np.load(inputs / "permutation.npy")
        )
    np.testing.assert_array_equal(_read(tmp_path / "s", "author"), rows)


def test_arrays_from_archives(call: Call, inputs: Path, tmp_path: Path, rows: Any) -> None:
    arrays = ["--array", f"a={inputs / 'rows.npz'}:y", "--array", f"e={inputs / 'edges.npz'}"]
    call("pack", tmp_path / "s", "--features", inputs / "rows.npy", *arrays)
    with featstore.open(tmp_path / "s") as store:
        np.testing.assert_array_equal(store.arrays["a"], rows[:, 0])
        assert store.arrays["e"].shape == (2, 4 * ROWS)


def test_a_path_with_an_equals_sign(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("a=b.npy", np.zeros((3, 2)))
    call("pack", "s", "--features", "a=b.npy")
    call("pack", "t", "--features", "x=a=b.npy")
    with featstore.open("s") as first, featstore.open("t") as second:
        assert (list(first.tables), list(second.tables)) == (["features"], ["x"])


USAGE = [
    ([], "give --features to pack a store"),
    (["--features", "{rows}", "--order", "best"], "'best' is no order; choose one of auto"),
    (["--features", "{rows}", "--order", "permutation"], "needs --permutation FILE.npy"),
    (["--features", "{rows}", "--partitions", "-3"], "'-3' is not a whole number of at least 1"),
    (["--features", "{rows}", "--partitions", "many"], "'many' is not a whole number"),
    (["--features", "{rows}", "--memory", "-5"], "cannot read '-5' as a size"),
    (["--features", "{rows}", "--memory", "lots"], "cannot read 'lots' as a size; write for example 512MiB"),
    (["--features", "{rows}", "--seed", "-1"], "-1 is not in the range"),
    (["--features", "{rows}", "--dtype", "int8"], "cannot cast to 'int8'; choose one of float16"),
    (["--features", "{rows}", "--cast", "float16", "--dtype", "float64"], "both ask for a cast"),
    (["--features", "{bin}", "--dtype", "float32", "--shape", "wide"], "'wide' is not a shape"),
    (["--features", "{bin}", "--dtype", "float32", "--shape", "10,-1"], "the shape 10,-1 is impossible"),
    (["--features", "{bin}", "--dtype", "float32", "--shape", "0,4"], "the shape 0,4 is impossible"),
    (
        ["--features", "{bin}", "--dtype", "float32", "--shape", "-1,16", "--offset", "-4"],
        "'-4' is not a whole number",
    ),
    (["--features", "{rows}", "--features", "{bin}"], "given twice without a table's name"),
    (["--features", "a={rows}", "--features", "{bin}"], "several tables need names"),
    (["--features", "a={rows}", "--features", "a={bin}"], "given twice for table 'a'"),
    (["--features", "a="], "nothing follows the ="),
    (["--features", "{rows}", "--graph", "paper=x.npy"], "no table is called 'paper'; there is 'features'"),
    (
        ["--features", "a={rows}", "--features", "b={rows}", "--graph", "{edges}"],
        "say whose --graph it is: --graph a=...",
    ),
    (["--features", "{rows}", "--graph-key", "e"], "table 'features' has no --graph"),
    (
        ["--features", "p={rows}", "--graph", "{edges}", "--graph", "p__to__p={edges}"],
        "edges.npy does not say between which nodes, and --graph p__to__p=... does",
    ),
    (
        [
            "--features",
            "{rows}",
            "--graph",
            "{edges}",
            "--edge-weights",
            "{labels}",
            "--edge-weights",
            "features={labels}",
        ],
        "--edge-weights is given once for all, and for one",
    ),
    (["--features", "{rows}", "--array", "{labels}"], "has no name; write for example --array y=labels.npy"),
    (["--features", "{rows}", "--resume", "--overwrite"], "contradict each other"),
    (["--features", "{rows}", "--colour"], "No such option"),
]


@pytest.mark.parametrize(("options", "message"), USAGE)
def test_usage_errors(call: Call, inputs: Path, tmp_path: Path, options: list[str], message: str) -> None:
    names = {"rows": "rows.npy", "bin": "rows.bin", "edges": "edges.npy", "labels": "labels.npy"}
    filled = [option.format(**{k: inputs / v for k, v in names.items()}) for option in options]
    result = call("pack", tmp_path / "s", *filled, code=2)
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""
    assert not (tmp_path / "s").exists()


FAILURES = [
    (["--features", "{nowhere}/x.npy"], "x.npy"),
    (["--features", "{folder}"], "a folder of shards has files of one kind"),
    (["--features", "{bin}"], "give --dtype and --shape"),
    (["--features", "{bin}", "--dtype", "float32", "--shape", "-1,7"], "no whole number of rows"),
    (["--features", "{bin}", "--dtype", "floaty", "--shape", "-1,16"], "floaty"),
    (["--features", "{npz}", "--key", "z"], "z"),
    (["--features", "{rows}", "--key", "z"], "holds one array"),
    (["--features", "{rows}", "--graph", "{nowhere}/e.npy"], "e.npy"),
    (["--features", "{rows}", "--order", "metis"], "needs a graph"),
    (["--features", "{rows}", "--memory", "1k"], "too small"),
    (["--features", "{rows}", "--array", "y={nowhere}/y.npy"], "cannot read array 'y'"),
    (["--features", "{rows}", "--array", "y={npz}"], "holds x, y; name one"),
    (["--features", "{rows}", "--array", "y={npz}:q"], "holds x, y; name one"),
    (["--features", "{rows}", "--resume"], "nothing to resume"),
    (["--features", "../x={rows}"], "../x="),
]


@pytest.mark.parametrize(("options", "message"), FAILURES)
def test_failures(call: Call, inputs: Path, tmp_path: Path, options: list[str], message: str) -> None:
    names = {"rows": "rows.npy", "bin": "rows.bin", "npz": "rows.npz", "folder": ".", "nowhere": "nowhere"}
    filled = [option.format(**{k: inputs / v for k, v in names.items()}) for option in options]
    result = call("pack", tmp_path / "s", *filled, code=1)
    assert result.stderr.startswith("featstore: error: ")
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_files_given_as_arguments_are_told_their_option(
    call: Call, inputs: Path, tmp_path: Path, order: tuple[int, int]
) -> None:
    rows, out = inputs / "rows.npy", tmp_path / "s"
    result = call("pack", *((rows, out)[place] for place in order), code=2)
    assert f"featstore pack {out} --features {rows}" in " ".join(result.stderr.split())
    assert not out.exists()


def test_what_is_there_already(call: Call, inputs: Path, store: Path, tmp_path: Path) -> None:
    assert "already holds a store" in call("pack", store, "--features", inputs / "rows.npy", code=1).stderr
    file = tmp_path / "file"
    file.write_text("")
    assert "is a file" in call("pack", file, "--features", inputs / "rows.npy", code=1).stderr
    call("pack", tmp_path / "s", "--features", inputs / "rows.npy")
    call("pack", tmp_path / "s", "--features", inputs / "rows.npy", "--overwrite")
    with featstore.open(tmp_path / "s") as again:
        assert again.manifest.generation == "g000002"


@pytest.mark.parametrize(
    ("failure", "code"), [(KeyboardInterrupt(), 130), (OSError(28, "No space left on device"), 1)]
)
def test_interrupted_then_resumed(
    call: Call,
    inputs: Path,
    tmp_path: Path,
    rows: Any,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    code: int,
) -> None:
    arguments = ["pack", tmp_path / "s", "--features", inputs / "rows.npy"]

    def stop(self: Disk, path: Path, data: bytes) -> None:
        if path.name == "featstore.json":
            raise failure
        replace_file(self, path, data)

    replace_file = Disk.replace_file
    with monkeypatch.context() as patched:
        patched.setattr(Disk, "replace_file", stop)
        result = CliRunner().invoke(cli, [str(a) for a in arguments])
    assert result.exit_code == code
    assert "with --resume to go on from here" in result.stderr
    assert "unfinished pack" in call("inspect", tmp_path / "s", code=1).stderr
    assert "--resume" in call(*arguments, code=1).stderr
    call(*arguments, "--resume")
    np.testing.assert_array_equal(_read(tmp_path / "s"), rows)


def test_shapes() -> None:
    assert SHAPE.parse("-1,128") == SHAPE.parse(" (-1, 128) ") == SHAPE.parse("-1x128") == (-1, 128)
    assert SHAPE.parse("7") == SHAPE.parse("(7,)") == (7,)
    for text in ("", "a", "1,,2", "1.5,2"):
        with pytest.raises(ValueError, match="is not a shape"):
            SHAPE.parse(text)


def test_the_function_has_the_options_of_the_command() -> None:
    """One name, one meaning: what the command has for packing, ``featstore.pack`` has, and the other way
    round."""
    import inspect

    from featstore_cli.compiled import trace_options

    def alone() -> None:
        pass

    of_traces = {option.name for option in trace_options(alone).__click_params__}  # type: ignore[attr-defined]
    command = (
        {p.name for p in cli.get_command(Context(cli), "pack").params}
        - of_traces
        - {"as_json", "quiet", "debug", "nodes"}  # numbers of nodes are among the features
    )
    function = set(inspect.signature(featstore.pack).parameters) - {"progress", "disk"}
    assert {"array" if name == "arrays" else name for name in function} == command
    documented = inspect.getdoc(featstore.pack) or ""
    for name in inspect.signature(featstore.pack).parameters:
        assert f"\n    {name}: " in documented, f"{name} is documented"


def test_columns_and_ids(call: Call, tmp_path: Path) -> None:
    features = np.random.default_rng(0).standard_normal((50, 2)).astype(np.float32)
    ids = np.random.default_rng(1).permutation(50)
    lines = [f"{i},{a},{b},{a}" for i, (a, b) in zip(ids, features)]
    (tmp_path / "x.csv").write_text("\n".join(["node_id,a,b,c", *lines]) + "\n")
    base = ["--features", tmp_path / "x.csv"]
    refused = call("pack", tmp_path / "s", *base, code=1).stderr
    assert "'node_id' looks like the ids of the rows" in refused
    assert "id=" in refused
    assert not (tmp_path / "s").exists()
    text = call("pack", tmp_path / "s", *base, "--id", "node_id", "--columns", "a,b").stdout
    for words in ("columns", "a, b", "left out", "node ids", "by id 'node_id'"):
        assert words in text
    assert "by id 'node_id'" in call("inspect", tmp_path / "s").stdout
    np.testing.assert_array_equal(_read(tmp_path / "s")[ids], features)
    text = call("pack", tmp_path / "t", *base, "--columns", "features=b").stdout
    assert "by the order of the file" in text
    np.testing.assert_array_equal(_read(tmp_path / "t")[:, 0], features[:, 1])
    assert _read(tmp_path / "t").shape == (50, 1)
    call("pack", tmp_path / "u", *base, "--columns", "*", "-q")
    assert _read(tmp_path / "u").shape == (50, 4)
    assert "'z'" in call("pack", tmp_path / "v", *base, "--id", "z", code=1).stderr


def test_a_graph_by_key_and_shapes_that_are_held_against_files(
    call: Call, inputs: Path, tmp_path: Path
) -> None:
    call(
        "pack",
        tmp_path / "s",
        "--features",
        inputs / "rows.npy",
        "--graph",
        inputs / "edges.npz",
        "--graph-key",
        "e",
    )
    with featstore.open(tmp_path / "s") as store:
        assert store.graphs["features"].edges == 4 * ROWS
    call("pack", tmp_path / "t", "--features", inputs / "rows.npy", "--shape", f"-1,{COLUMNS}", "-q")
    wrong = call(
        "pack", tmp_path / "u", "--features", inputs / "rows.npy", "--shape", f"-1,{COLUMNS + 1}", code=1
    )
    assert "has shape" in wrong.stderr


def test_progress_shows_no_bytes_where_none_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import sys

    from click import Command
    from featstore_cli.output import progress

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def drawn(*steps: tuple[str, float, float | None]) -> str:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "150")
        with Context(Command("pack")), progress("starting") as tell:
            for step in steps:
                tell(*step)
        return terminal.getvalue()

    waiting = drawn(("features: order", 0, None))
    assert "features: order" in waiting
    assert "bytes" not in waiting
    assert "/?" not in waiting
    assert "/1.0 MiB" in drawn(("features: order", 0, None), ("features: write", 2**19, 2**20))


def test_a_typed_graph_is_packed(call: Call, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "paper.npy", rng.random((30, 4)))
    for name, sources in (("writes", 9), ("cites", 30)):
        np.save(tmp_path / f"{name}.npy", np.stack([rng.integers(0, sources, 80), rng.integers(0, 30, 80)]))
    np.save(tmp_path / "years.npy", rng.integers(1990, 2020, 80))
    np.save(tmp_path / "weights.npy", rng.random(80))
    given = [
        "--features", f"paper={tmp_path / 'paper.npy'}", "--nodes", "author=9",
        "--graph", f"author__writes__paper={tmp_path / 'writes.npy'}",
        "--graph", f"paper__cites__paper={tmp_path / 'cites.npy'}",
    ]  # fmt: skip
    more = [
        "--edge-times", f"paper__cites__paper={tmp_path / 'years.npy'}",
        "--edge-weights", f"author__writes__paper={tmp_path / 'weights.npy'}", "--edge-ids",
    ]  # fmt: skip
    result = call("pack", tmp_path / "s", *given, *more, "--order", "ldg", "--partitions", 2)
    for text in (
        "80 edges of type 'writes' from 9 rows of table 'author' to 30 of 'paper'",
        "each list ascends by them",
        "nodes by number and order alone",
    ):
        assert text in result.stdout
    graph = parsed(call("inspect", tmp_path / "s", "--json"))["graphs"]["author__writes__paper"]
    assert graph["edge_type"] == ["author", "writes", "paper"]
    assert (graph["source_nodes"], graph["weights"], graph["times"]) == (9, "float64", None)
    with featstore.open(tmp_path / "s") as store:
        assert store.manifest.featureless == ["author"]
        assert store.graphs["paper__cites__paper"].times().max() < 2020
        assert len(store.tables["author"].partition_offsets) == 3
    np.save(tmp_path / "t.npy", np.arange(0, 9, 2))
    trained = ("--array", f"t={tmp_path / 't.npy'}", "--order", "bfs", "--train", "author=t")
    call("pack", tmp_path / "trained", *given, *trained)
    with featstore.open(tmp_path / "trained") as store:
        assert store.manifest.tables["author"].order.parameters["train_nodes"] == 5
    for wrong, message in (
        (["--nodes", "author"], "such as author=5000"),
        (["--nodes", "paper=3"], "'paper' has --features, too"),
        (["--graph", f"author__reads__book={tmp_path / 'writes.npy'}"], "it is no edge type A__RELATION__B"),
        (["--edge-times", f"author__reads__paper={tmp_path / 'years.npy'}"], "no table is called"),
    ):
        assert message in call("pack", tmp_path / "t", *given, *wrong, code=2).stderr
