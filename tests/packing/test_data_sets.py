"""Folders that are whole data sets: packed, they are what PyG data of the same content are; anything that is
not understood is an error or a warning that names it."""

from __future__ import annotations

import gzip
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import FeatstoreWarning, MissingPackageError, SourceError

yaml = pytest.importorskip("yaml")

RNG = np.random.default_rng(5)
NODES = {"paper": 60, "author": 40, "place": 7}
EDGES = {
    ("author", "writes", "paper"): np.stack([RNG.integers(0, 40, 200), RNG.integers(0, 60, 200)]),
    ("paper", "cites", "paper"): RNG.integers(0, 60, (2, 90)),
    ("author", "at", "place"): np.array([[1, 39], [6, 2]]),
}
X = {"paper": RNG.random((60, 3)).astype(np.float32), "author": RNG.random((40, 2))}
YEARS, CITED = np.arange(60) + 1990, RNG.random((90, 4)).astype(np.float32)
SEEDS, LABELS = np.array([3, 1, 59]), np.array([0, 2, 1])


def kept(folder: Path, name: str, values: Any, form: str = "numpy") -> dict[str, Any]:
    """A file of a data set, and what metadata.yaml says of it."""
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    if form == "csv":
        np.savetxt(path, values.T, fmt="%d", delimiter=",")
    elif form == "torch":
        torch = pytest.importorskip("torch")
        torch.save(torch.from_numpy(values), path)
    else:
        with path.open("wb") as file:
            np.save(file, values)
    return {"format": form, "path": name}


def written(folder: Path, metadata: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metadata.yaml").write_text(metadata if isinstance(metadata, str) else yaml.safe_dump(metadata))
    return folder


def typed(folder: Path) -> dict[str, Any]:
    """The metadata.yaml of a typed data set, whose files are written."""
    forms = ["csv", "numpy", "numpy"]
    edges = [
        {"type": ":".join(kind)} | kept(folder, f"edges/{kind[1]}.{form}".replace("numpy", "npy"), both, form)
        for (kind, both), form in zip(EDGES.items(), forms, strict=True)
    ]
    seeds = {"name": "seeds"} | kept(folder, "set/seeds.npy", SEEDS) | {"in_memory": True}
    labels = {"name": "labels"} | kept(folder, "set/labels.pt", LABELS, "torch")
    cites = {"domain": "edge", "type": "paper:cites:paper", "name": "feat"}
    paper = {"domain": "node", "type": "paper"}
    return {
        "graph": {
            "nodes": [{"type": kind, "num": number} for kind, number in NODES.items()],
            "edges": edges,
            "feature_data": [
                {"domain": "edge", "type": "author:at:place", "name": "since"}
                | kept(folder, "since.npy", np.array([7, 8]))
            ],
        },
        "feature_data": [
            paper | {"name": "year", "in_memory": False} | kept(folder, "year.npy", YEARS),
            paper | {"name": "feat"} | kept(folder, "x.npy", X["paper"]),
            paper | {"type": "author", "name": "h"} | kept(folder, "h.pt", X["author"], "torch"),
            cites | kept(folder, "cites.npy", CITED),
        ],
        "tasks": [
            {
                "train_set": [{"type": "paper", "data": [seeds, labels]}],
                "test_set": [{"type": "author:writes:paper", "data": [seeds]}],
            }
        ],
    }


def plain(folder: Path) -> dict[str, Any]:
    """Of one without types."""
    two = kept(folder, "edges.npy", np.array([[0, 1], [2, 3]]))
    return {
        "graph": {"nodes": [{"num": 60}], "edges": [two]},
        "feature_data": [
            {"domain": "node", "name": "any"} | kept(folder, "x.npy", X["paper"]),
            {"domain": "edge", "name": "weight"} | kept(folder, "w.npy", np.array([[0.5], [2.0]])),
        ],
        "tasks": [
            {"name": name, "validation_set": [{"data": [{"name": "seeds"} | kept(folder, "s.npy", SEEDS)]}]}
            for name in ("nodes", "links")
        ],
    }


def edges_of(store: featstore.Store, name: str) -> np.ndarray[Any, Any]:
    """[2, edges] in the user's order, by the edges' numbers."""
    graph = store.graphs[name]
    indptr, indices = graph.csc()
    both = np.stack([indices, np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))])
    return both[:, np.argsort(graph.edge_ids())]


def rows_of(store: featstore.Store, table: str) -> Any:
    with store.reader(memory="16MiB", tables=[table]) as reader:
        return reader.read(np.arange(store.tables[table].rows))


def check_typed(store: featstore.Store) -> None:
    assert set(store.node_types) == set(NODES)
    assert set(store.edge_types) == set(EDGES)
    assert list(store.manifest.featureless) == ["place"]
    for kind, both in EDGES.items():
        assert edges_of(store, "__".join(kind)).tolist() == both.tolist()
    for name, x in X.items():
        assert rows_of(store, name).tolist() == x.tolist()
    assert rows_of(store, "paper__cites__paper").tolist() == CITED.tolist()


@pytest.mark.parametrize("as_file", [False, True])
def test_typed(tmp_path: Path, as_file: bool) -> None:
    folder = written(tmp_path / "data", typed(tmp_path / "data"))
    store = featstore.pack(tmp_path / "s", folder / "metadata.yaml" if as_file else folder, memory="64MiB")
    check_typed(store)
    arrays = {name: np.asarray(value).tolist() for name, value in store.arrays.items()}
    assert arrays == {
        "paper.year": YEARS.tolist(), "author__at__place.since": [7, 8], "train.paper.seeds": SEEDS.tolist(),
        "train.paper.labels": LABELS.tolist(), "test.author__writes__paper.seeds": SEEDS.tolist(),
    }  # fmt: skip
    store.close()


def test_without_types(tmp_path: Path) -> None:
    folder = written(tmp_path / "data", plain(tmp_path / "data"))
    store = featstore.pack(tmp_path / "s", folder, memory="64MiB", order="given")
    assert set(store.tables) == {"features", "edge_features"}
    assert edges_of(store, "features").tolist() == [[0, 1], [2, 3]]
    assert rows_of(store, "edge_features").tolist() == [[0.5], [2.0]]
    assert set(store.arrays) == {"nodes.validation.seeds", "links.validation.seeds"}
    store.close()


def test_what_is_no_array_is_told(tmp_path: Path) -> None:
    metadata = plain(tmp_path / "data") | {"dataset_name": "little"}
    metadata["tasks"] = [{"name": "nodes", "num_classes": 3}]
    folder = written(tmp_path / "data", metadata)
    with pytest.warns(FeatstoreWarning) as told:
        featstore.pack(tmp_path / "s", folder, memory="64MiB").close()
    text = str(told[0].message)
    for lost in ("dataset_name ('little')", "tasks[0].name ('nodes')", "tasks[0].num_classes (3)"):
        assert lost in text


def test_a_graph_in_place_of_its_own(tmp_path: Path) -> None:
    folder = written(tmp_path / "data", plain(tmp_path / "data"))
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        store = featstore.pack(tmp_path / "s", folder, graph={}, memory="64MiB")
    assert not store.graphs
    store.close()


def test_from_the_command_line(tmp_path: Path) -> None:
    from click.testing import CliRunner
    from featstore_cli.main import cli

    folder = written(tmp_path / "data", typed(tmp_path / "data"))
    said = ["--cast", "author=float32", "--cast", "paper=float16"]
    said += [text for kind in NODES for text in ("--order", f"{kind}=multilevel")]
    given = CliRunner().invoke(cli, ["pack", str(tmp_path / "s"), "--features", str(folder), *said])
    assert given.exit_code == 0, given.output
    with featstore.open(tmp_path / "s") as store:
        assert rows_of(store, "author").dtype == np.float32
        assert set(store.edge_types) == set(EDGES)
    for wrong, message in (
        (["--nodes", "place=7"], "--nodes is given"),
        (["--cast", "float16"], "say for each"),
    ):
        args = ["pack", str(tmp_path / "t"), "--features", str(folder), *said, *wrong]
        given = CliRunner().invoke(cli, args)
        assert given.exit_code == 2
        assert message in given.output


def at(metadata: Any, *steps: Any) -> Any:
    for step in steps:
        metadata = metadata[step]
    return metadata


@pytest.mark.parametrize(
    ("steps", "change", "message"),
    [
        ((), {"graph_topology": {"type": "x"}}, "GraphBolt has preprocessed it"),
        ((), {"more": []}, "the file has a field 'more'"),
        ((), {"graph": None}, "graph should be a mapping"),
        (("graph",), {"seed": 1}, "graph has a field 'seed'"),
        (("graph", "nodes", 0), {"num": -1}, "should be a number of nodes"),
        (("graph", "nodes", 0), {"num": 61}, r"x\.npy has 60 rows, and there are 61 nodes"),
        (("graph", "edges", 1), {"type": "author:writes:paper"}, "stand there once each"),
        (("graph", "nodes", 0), {"type": None}, "type None, where all or none"),
        (("graph", "edges", 0), {"format": "parquet"}, "is of csv or numpy"),
        (("graph", "edges", 1), {"path": "x.npy"}, r"\[60, \.\.\.\], and edges are \[2, edges\]"),
        (("graph", "edges", 0), {"type": "author:writes:book"}, "joins nodes of author and book"),
        (("graph", "edges", 0), {"type": "author:writes"}, "type 'author:writes'"),
        (("feature_data", 1), {"name": "x"}, "none is called feat"),
        (("feature_data", 1), {"name": "year"}, "'year' of 'paper' stands twice"),
        (("feature_data", 0), {"domain": "graph"}, "domain 'graph', type 'paper'"),
        (("feature_data", 0), {"scale": 2}, r"feature_data\[0\] has a field 'scale'"),
        (("feature_data", 0), {"path": "nowhere.npy"}, "cannot read array 'paper.year'"),
        (("feature_data", 3), {"path": "year.npy"}, "paper__cites__paper"),
        (("tasks", 0, "train_set", 0), {"type": "book"}, "has no type 'book'"),
        (("tasks", 0, "train_set", 0, "data", 1), {"name": "seeds"}, "two arrays 'train.paper.seeds'"),
        (("tasks", 0, "train_set", 0, "data", 1), {"name": None}, "data without a name"),
        (("tasks", 0), {"train_sets": []}, "has a field 'train_sets'"),
    ],
)  # fmt: skip
def test_anything_else_is_an_error(
    tmp_path: Path, steps: tuple[Any, ...], change: dict[str, Any], message: str
) -> None:
    metadata = typed(tmp_path / "data")
    at(metadata, *steps).update(change)
    with pytest.raises(SourceError, match=message):
        featstore.pack(tmp_path / "s", written(tmp_path / "data", metadata), memory="64MiB")


def test_it_stands_alone(tmp_path: Path) -> None:
    folder = written(tmp_path / "data", plain(tmp_path / "data"))
    with pytest.raises(SourceError, match="give it alone, without a name"):
        featstore.pack(tmp_path / "s", {"paper": folder})


def test_no_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "data", "graph: [")
    with pytest.raises(SourceError, match="cannot be read as YAML"):
        featstore.pack(tmp_path / "s", folder)
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(MissingPackageError, match=r"featstore\[yaml\]"):
        featstore.pack(tmp_path / "s", folder)


# OGB.


def gz(folder: Path, name: str, lines: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    rows = (
        lines
        if isinstance(lines, list)
        else [",".join(map(str, row)) for row in np.atleast_2d(lines).tolist()]
    )
    path.write_bytes(gzip.compress(("\n".join(rows) + "\n").encode()))


def ogb(folder: Path) -> Path:
    """A data set as OGB unpacks it."""
    raw = folder / "raw"
    gz(raw, "num-node-dict.csv.gz", [",".join(NODES), ",".join(map(str, NODES.values()))])
    gz(raw, "triplet-list.csv.gz", [",".join(kind) for kind in EDGES])
    gz(raw, "nodetype-has-feat.csv.gz", ["paper,author,place", "True,True,False"])
    gz(raw, "nodetype-has-label.csv.gz", ["paper,author,place", "True,False,False"])
    for kind, both in EDGES.items():
        at_kind = "relations/" + "___".join(kind)
        gz(raw, f"{at_kind}/edge.csv.gz", both.T)
        gz(raw, f"{at_kind}/num-edge-list.csv.gz", [str(both.shape[1])])
        gz(raw, f"{at_kind}/edge_reltype.csv.gz", np.ones((both.shape[1], 1), int))
    for kind, x in X.items():
        gz(raw, f"node-feat/{kind}/node-feat.csv.gz", x)
    gz(raw, "node-feat/paper/node_year.csv.gz", YEARS[:, None])
    gz(raw, "node-label/paper/node-label.csv.gz", [f"{n}.5" for n in range(60)])
    split = folder / "split" / "time"
    gz(split, "nodetype-has-split.csv.gz", ["paper,author,place", "True,False,False"])
    for name, ids in (("train", SEEDS), ("valid", LABELS), ("test", LABELS)):
        gz(split, f"paper/{name}.csv.gz", ids[:, None])
    return folder


@pytest.mark.parametrize("last", ["18446744073709551615", "nan"])
def test_ogb_numbers_that_float64_rounds_are_refused(tmp_path: Path, last: str) -> None:
    folder = ogb(tmp_path / "data")
    values = [str(2**53 + 1), *map(str, range(58)), last]
    gz(folder / "raw", "node-feat/paper/paper_hash.csv.gz", values)
    with pytest.raises(SourceError, match="a whole number that float64 rounds"):
        featstore.pack(tmp_path / "s", folder, memory="64MiB", order="given", raw_dtype="float64")


def test_ogb_with_types(tmp_path: Path) -> None:
    folder = ogb(tmp_path / "data")
    store = featstore.pack(
        tmp_path / "s", folder, memory="64MiB", edge_ids=True, order="given", raw_dtype="float64"
    )
    assert set(store.edge_types) == set(EDGES)
    assert list(store.manifest.featureless) == ["place"]
    for kind, both in EDGES.items():
        assert edges_of(store, "__".join(kind)).tolist() == both.tolist()
        assert store.arrays[f"{'__'.join(kind)}.edge_reltype"].shape == (both.shape[1], 1)
    for name, x in X.items():
        assert rows_of(store, name).tolist() == x.tolist()
    assert store.arrays["paper.node_year"].tolist() == YEARS[:, None].tolist()
    assert store.arrays["paper.node-label"].tolist() == [[n + 0.5] for n in range(60)]
    assert store.arrays["paper.time.train"].tolist() == SEEDS.tolist()
    assert len(store.arrays) == 8
    store.close()


def test_the_raw_folder_and_what_is_beside(tmp_path: Path) -> None:
    folder = ogb(tmp_path / "data")
    (folder / "mapping").mkdir()
    with pytest.warns(FeatstoreWarning, match="not stored of .*data: mapping"):
        featstore.pack(tmp_path / "s", folder, memory="64MiB", order="given").close()
    store = featstore.pack(tmp_path / "t", folder / "raw", memory="64MiB", order="given")
    assert len(store.arrays) == 5
    store.close()


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("raw/num-node-dict.csv.gz", ["paper,author,place", "60,40,7", "1,1,1"], "a pack takes one graph"),
        ("raw/num-node-dict.csv.gz", ["paper,author,place", "61,40,7"], "60 rows"),
        ("raw/triplet-list.csv.gz", ["author,writes,book"], "not .'author', 'writes', 'book'"),
        (
            "raw/triplet-list.csv.gz",
            ["author,knows,author"],
            "author___knows___author/edge.csv.gz is missing",
        ),
        ("raw/triplet-list.csv.gz", ["author,writes,paper"], "is no file of an OGB data set"),
        (
            "raw/nodetype-has-feat.csv.gz",
            ["paper,author,place", "True,True,True"],
            "says author, paper, place",
        ),
        ("raw/nodetype-has-label.csv.gz", ["paper,author,place", "False,False,False"], "says none"),
        ("raw/node-feat/paper/node_year.csv.gz", ["1990"], "has 1 rows"),
        ("raw/node-feat/book/node-feat.csv.gz", ["1990"], "is no file of an OGB data set"),
        ("raw/relations/author___at___place/edge-feat.csv.gz", ["1", "2"], "is no file of an OGB data set"),
        ("raw/more.csv.gz", ["1"], "is no file of an OGB data set"),
        ("split/time/paper/train.csv.gz", ["60"], "should be ids of 'paper'"),
        ("split/time/paper/dev.csv.gz", ["1"], "is no split"),
        ("split/time/author/train.csv.gz", ["1"], "says paper, and there are files of author, paper"),
    ],
)
def test_another_ogb_folder_is_an_error(tmp_path: Path, name: str, lines: list[str], message: str) -> None:
    folder = ogb(tmp_path / "data")
    gz(folder, name, lines)
    with pytest.raises(SourceError, match=message):
        featstore.pack(tmp_path / "s", folder, memory="64MiB", order="given")
