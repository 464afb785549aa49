"""The manifest at the border: whatever it says, opening ends in a typed error or in a store that can be
read."""

from __future__ import annotations

import copy
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.errors import (
    CorruptionError,
    FeatstoreError,
    FormatError,
    FormatVersionError,
    IncompleteStoreError,
)
from featstore.storage.manifest import MANIFEST_NAME, encode_manifest, sealed, uuid_of
from featstore.storage.manifest_reading import read_manifest


def load(store: Path) -> dict[str, Any]:
    return json.loads((store / MANIFEST_NAME).read_bytes())


def save(store: Path, document: Any, *, seal: bool = True) -> None:
    """Write a manifest; with ``seal`` as its writer would have, with the uuid of its content."""
    if seal and isinstance(document, dict) and "uuid" in document:
        document = document | {"uuid": ""}
        with suppress(msgspec.DecodeError):  # NaN and Infinity, which Python writes: that is not JSON
            document["uuid"] = uuid_of(json.dumps(document).encode(), "")
    (store / MANIFEST_NAME).write_text(json.dumps(document))


def open_changed(store: Path, **changes: Any) -> featstore.Store:
    save(store, load(store) | changes)
    return featstore.open(store)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places in a document, as key paths."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [at, *(p for key in keys for p in places(value[key], (*at, key)))]


def change(document: Any, at: tuple[Any, ...], how: str, value: Any) -> Any:
    """A copy with one place dropped, replaced, or in an object put under another name."""
    if not at:
        return value
    made = copy.deepcopy(document)
    inner = made
    for key in at[:-1]:
        inner = inner[key]
    if how == "replace":
        inner[at[-1]] = value
    else:
        old = inner.pop(at[-1])
        if how == "rename" and isinstance(inner, dict):
            inner[str(value)] = old
    return made


def test_what_is_written_is_read(packed: Path) -> None:
    manifest, text = read_manifest(packed)
    assert encode_manifest(manifest) == text
    assert sealed(manifest) == manifest
    save(packed / "..", load(packed))  # sealing by another JSON writer gives the same
    assert load(packed / "..")["uuid"] != ""


# Versions and features.


@pytest.mark.parametrize("version", [2, 99, 2**70])
def test_newer_versions_ask_for_a_newer_featstore(own: Path, version: int) -> None:
    with pytest.raises(
        FormatVersionError,
        match=f"format version {version}; this featstore reads up to 1: install a newer one",
    ):
        open_changed(own, version=version)


def test_a_newer_version_may_look_different_altogether(own: Path) -> None:
    save(own, {"format": "featstore", "version": 2, "layout": "of the future"})
    with pytest.raises(FormatVersionError):
        featstore.open(own)


@pytest.mark.parametrize("version", [0, -1, 1.0, "1", None, True, []])
def test_unusable_versions(own: Path, version: Any) -> None:
    with pytest.raises(FormatError):
        open_changed(own, version=version)


def test_an_unknown_reader_feature_refuses(own: Path) -> None:
    with pytest.raises(
        FormatVersionError, match=r"reader features this featstore lacks: holograms, zstd; install a newer"
    ):
        open_changed(own, reader_features=["zstd", "holograms"])


def test_an_unknown_writer_feature_is_read_only(own: Path, features: np.ndarray, pack: Any) -> None:
    with open_changed(own, writer_features=["log"]) as store:
        assert "log" in store.manifest.read_only_because
        with store.reader(memory="4MiB") as reader:
            np.testing.assert_array_equal(reader.read([5]), features[[5]])
    with pytest.raises(FeatstoreError, match=r"writer features this version does not know: log"):
        pack(own, features, overwrite=True)
    with featstore.open(own) as store:
        assert store.manifest.writer_features == ["log"]


def test_known_stores_may_be_written(store: featstore.Store) -> None:
    assert store.manifest.read_only_because == ""


# Contents.


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "not JSON"), (b"{", "not JSON"), (b"\xff\xfe", "not JSON"), (b"[]", "not a featstore manifest"),
        (b"null", "not a featstore"), (b"{}", "not a featstore manifest"),
        (b'{"format": "zarr"}', "not a featstore manifest"), (b"[" * 200_000, "not JSON"),
        (b'{"a":' * 200_000, "not JSON"), (b'{"format": "featstore", "version": 1, "version": 1}', "twice"),
        (b"\0" * 100, "not JSON"), (b'{"format": "featstore", "version": 1}', "malformed"), (b"NaN", "not"),
        (b'{"version": ' + b"9" * 10_000 + b"}", "featstore"),
    ],
    ids=lambda value: repr(value[:20]),
)  # fmt: skip
def test_texts_that_are_no_manifest(own: Path, text: bytes, why: str) -> None:
    (own / MANIFEST_NAME).write_bytes(text)
    with pytest.raises(FormatError, match=why) as caught:
        featstore.open(own)
    assert MANIFEST_NAME in str(caught.value)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", '"\\ud800"', "1" * 5000])
def test_numbers_and_texts_that_only_some_parsers_take(own: Path, number: str) -> None:
    text = (own / MANIFEST_NAME).read_text().replace('"seed": 0', f'"seed": {number}')
    assert number in text
    (own / MANIFEST_NAME).write_text(text)
    with pytest.raises(FormatError, match=MANIFEST_NAME):
        featstore.open(own)


@pytest.mark.parametrize(
    "where",
    [
        (),
        ("tables", "features"),
        ("tables", "features", "order"),
        ("files", 0),
        ("tables", "features", "page_checksums"),
    ],
)
def test_unknown_fields_are_refused(own: Path, where: tuple[Any, ...]) -> None:
    document = load(own)
    inner = document
    for key in where:
        inner = inner[key]
    inner["surprise"] = 1
    save(own, document)
    with pytest.raises(FormatError, match="surprise"):
        featstore.open(own)


OUTSIDE = [
    "../x",
    "/etc/passwd",
    "g000001/../../x",
    "g000002/x",
    "g000001",
    "",
    "g000001//x",
    "g000001/./x",
    "g000001/..",
    "g000001/a\\b",
    "g000001/x/",
    "g000001/\0",
    "g000001/" + "x" * 300,
    "~/x",
    "file:///x",
    "g000001/é",
]


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize(
    "where",
    [("files", 3, "path"), ("tables", "features", "path"), ("tables", "features", "page_checksums", "path"),
              ("tables", "features", "order", "row_of_node", "path")]
)  # fmt: skip
def test_no_path_leaves_the_generation(own: Path, where: tuple[Any, ...], path: str) -> None:
    save(own, change(load(own), where, "replace", path))
    with pytest.raises(FormatError, match="path"):
        featstore.open(own)


@pytest.mark.parametrize(
    "generation", ["..", ".", "", "g1", "g000001/..", "/", "store", "g000001\n", "G000001"]
)
def test_a_generation_is_a_name(own: Path, generation: str) -> None:
    with pytest.raises(FormatError, match="generation"):
        open_changed(own, generation=generation)


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "-x", "a/b", "a\0", "é", "a" * 129, "a b", "zarr.json"]
)
def test_table_and_array_names_are_names(own: Path, name: str) -> None:
    document = load(own)
    for kind, entry in (
        ("tables", document["tables"]["features"]),
        ("arrays", document["tables"]["features"]["page_checksums"]),
    ):
        save(own, document | {kind: {name: entry}})
        with pytest.raises(FormatError, match="name"):
            featstore.open(own)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("rows",), 1001), (("rows",), 0), (("rows",), -1), (("rows",), 2**62), (("rows",), 2**80),
        (("row_shape",), [101]), (("row_shape",), [0]), (("row_shape",), [-100]), (("row_shape",), []),
        (("row_shape",), [100, 1] * 40), (("row_shape",), [2**70]), (("row_bytes",), 401),
        (("row_bytes",), 0), (("row_bytes",), -400), (("rows_per_chunk",), 0), (("rows_per_chunk",), 1),
        (("rows_per_chunk",), 10**18), (("rows_per_chunk",), 512), (("dtype",), "float64"),
        (("dtype",), "object"), (("dtype",), 'numpy:"|O"'), (("dtype",), ""),
        (("page_checksums", "shape"), [7]), (("page_checksums", "shape"), [2**62]),
        (("page_checksums", "shape"), []), (("page_checksums", "dtype"), "int32"),
        (("order", "row_of_node", "shape"), [999]), (("order", "row_of_node", "dtype"), "float32"),
        (("order", "row_of_node", "dtype"), "int64"), (("order", "partition_offsets", "shape"), [1]),
        (("order", "partition_offsets", "shape"), [2, 1]), (("order", "node_of_row", "shape"), [[1000]]),
        (("order", "partition_offsets"), None),
    ],
)  # fmt: skip
def test_tables_that_contradict_themselves(own: Path, where: tuple[Any, ...], value: Any) -> None:
    save(own, change(load(own), ("tables", "features", *where), "replace", value))
    with pytest.raises(FormatError):
        featstore.open(own)


def test_files_listed_twice_or_with_impossible_sizes(own: Path) -> None:
    document = load(own)
    for files, why in (
        ([*document["files"], document["files"][0]], "listed twice"),
        ([document["files"][0] | {"bytes": -1}, *document["files"][1:]], "impossible size"),
        ([document["files"][0] | {"digest": "00"}, *document["files"][1:]], "impossible size or digest"),
        ([], "not listed|files are listed"),
    ):
        save(own, document | {"files": files})
        with pytest.raises(FormatError, match=why):
            featstore.open(own)


@pytest.mark.parametrize("grow", [1, 2**70])
def test_files_of_another_size_than_listed(own: Path, grow: int) -> None:
    document = load(own)
    extra = next(k for k, f in enumerate(document["files"]) if f["path"].endswith("tables/zarr.json"))
    document["files"][extra]["bytes"] += grow
    save(own, document)
    with pytest.raises(CorruptionError, match=r"zarr\.json: expected a file of"):
        featstore.open(own)


def test_a_listed_file_below_a_file(own: Path) -> None:
    document = load(own)
    below = {"path": document["files"][0]["path"] + "/more", "bytes": 1, "digest": "0" * 64}
    save(own, document | {"files": [*document["files"], below]})
    with pytest.raises(FeatstoreError, match="more"):
        featstore.open(own)


def test_paths_too_long_for_the_system(own: Path) -> None:
    document = load(own)
    deep = {"path": "g000001/" + "/".join(["x" * 200] * 40), "bytes": 1, "digest": "0" * 64}
    save(own, document | {"files": [*document["files"], deep]})
    with pytest.raises(FeatstoreError, match="xxx"):
        featstore.open(own)


@pytest.mark.parametrize("name", ["row_of_node", "node_of_row"])
def test_a_table_has_both_maps_or_none(own: Path, name: str) -> None:
    save(own, change(load(own), ("tables", "features", "order", name), "drop", None))
    with pytest.raises(FormatError, match="but not the other"):
        featstore.open(own)


# Graphs.


@pytest.fixture(scope="module")
def with_graph(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Path:
    path = tmp_path_factory.mktemp("graph") / "store"
    edges = np.random.default_rng(0).integers(0, 50, (2, 400))
    pack(path, np.zeros((50, 3), np.float32), graph=edges, order="degree", hubs=0.1).close()
    return path


@pytest.fixture
def own_graph(with_graph: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(with_graph, tmp_path / "own"))


def test_graphs_come_with_their_reader_feature(own_graph: Path) -> None:
    document = load(own_graph)
    assert document["reader_features"] == ["graphs"]
    with pytest.raises(FormatError, match="the reader feature 'graphs' is not named"):
        open_changed(own_graph, reader_features=[])
    open_changed(own_graph, reader_features=["graphs"]).close()
    del document["graphs"]
    save(own_graph, document)
    with featstore.open(own_graph) as store:  # the feature alone is harmless
        assert store.graphs == {}


def test_a_store_without_graphs_says_nothing_of_them(packed: Path) -> None:
    assert "graphs" not in load(packed)
    assert load(packed)["reader_features"] == []


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("table",), "other"), (("table",), None), (("edges",), 399), (("edges",), -1), (("edges",), 2**62),
        (("edges",), None), (("offsets", "rows"), 50), (("offsets", "rows"), 52),
        (("offsets", "dtype"), "int32"), (("offsets", "row_shape"), [1]), (("offsets", "rows_per_chunk"), 7),
        (("offsets", "page_checksums", "shape"), [9]), (("offsets", "path"), "../offsets"),
        (("sources", "dtype"), "uint32"), (("sources", "dtype"), "float32"), (("sources", "dtype"), "int64"),
        (("sources", "rows"), 401), (("sources", "row_bytes"), 8), (("sources", "row_shape"), [2]),
        (("hubs", "rows", "shape"), [51]), (("hubs", "rows", "shape"), [4]),
        (("hubs", "rows", "shape"), [5, 1]), (("hubs", "rows", "shape"), []),
        (("hubs", "rows", "dtype"), "uint8"), (("hubs", "offsets", "shape"), [5]),
        (("hubs", "offsets", "dtype"), "int32"), (("hubs", "sources", "dtype"), "int16"),
        (("hubs", "sources", "rows"), 2**41), (("hubs", "method"), 7), (("hubs", "sources"), None),
        (("hubs",), []), (("surprise",), 1),
    ],
)  # fmt: skip
def test_graphs_that_contradict_themselves(own_graph: Path, where: tuple[Any, ...], value: Any) -> None:
    save(own_graph, change(load(own_graph), ("graphs", "features", *where), "replace", value))
    with pytest.raises(FormatError):
        featstore.open(own_graph)


def test_the_tables_of_a_graph_are_not_permuted(own_graph: Path) -> None:
    document = load(own_graph)
    maps = {name: document["tables"]["features"]["order"][name] for name in ("row_of_node", "node_of_row")}
    for part, length in (("sources", 400), ("offsets", 51)):
        longer = {name: entry | {"shape": [length]} for name, entry in maps.items()}
        changed = copy.deepcopy(document)
        changed["graphs"]["features"][part]["order"] |= longer
        for entry in changed["files"]:
            if "_node/" in entry["path"] or "_row/" in entry["path"]:
                entry["bytes"] = 4 * length if entry["path"].endswith("c.0") else entry["bytes"]
        changed["tables"] = {"features": copy.deepcopy(document["tables"]["features"])}
        for name in maps:
            del changed["tables"]["features"]["order"][name]
        save(own_graph, changed)
        with pytest.raises(FormatError, match="permuted, which they must not be"):
            featstore.open(own_graph)


@pytest.mark.parametrize("name", ["", "..", "a/b", "zarr.json", "a" * 129])
def test_graph_names_are_names(own_graph: Path, name: str) -> None:
    document = load(own_graph)
    save(own_graph, document | {"graphs": {name: document["graphs"]["features"]}})
    with pytest.raises(FormatError, match="name"):
        featstore.open(own_graph)


@given(st.data(), st.sampled_from(["replace", "drop", "rename"]), st.deferred(lambda: VALUES))
@settings(max_examples=25)
def test_a_sealed_graph_that_says_anything(
    with_graph: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, how: str, value: Any
) -> None:
    """A stranger's graph: a typed error, or a graph; never a crash, never another kind of exception."""
    import shutil

    path = Path(shutil.copytree(with_graph, tmp_path_factory.mktemp("stranger") / "store"))
    document = load(path)
    at = data.draw(st.sampled_from([p for p in places(document) if p[:1] == ("graphs",)]))
    save(path, change(document, at, how, value))
    try:
        with featstore.open(path) as store:
            for graph in store.graphs.values():
                indptr, indices = graph.csc()
                assert len(indices) == indptr[-1] == graph.edges
                graph.hub_rows()
        featstore.verify(path)
    except FeatstoreError:
        pass
    shutil.rmtree(path)


# Generic mutation.

VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.integers(0, 100), max_size=3)
    | st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 2**100, -(2**63), 1000, 400, 4096, 16_384])
    | st.sampled_from(
        ["../x", "float32", "int32", "uint8", "g000001", "features", "0" * 64, 'numpy:"<M8[s]"']
    )
    | st.just({})
    | st.just([1000])
    | st.just({"path": "g000001/x", "shape": [0], "dtype": "int32"})
)


@pytest.fixture(scope="module")
def spoiled(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A copy of the packed store whose manifest is changed again and again, and its right manifest."""
    import shutil

    path = Path(shutil.copytree(packed, tmp_path_factory.mktemp("spoiled") / "store"))
    return path, load(path)


def read_all(path: Path) -> dict[str, np.ndarray]:
    """All rows of all tables and the small arrays, as a curious user would read them."""
    out = {}
    with featstore.open(path) as store:
        for name, array in store.arrays.items():
            out["array " + name] = array
        for table in store.tables.values():
            table.partition_offsets, table.node_of_row(), table.rows_by_degree(3)
        with store.reader(memory="16MiB", engine="threads") as reader:
            for name, table in store.tables.items():
                out[name] = reader.read({name: np.arange(min(table.rows, 5000))})[name]
    return out


@given(st.data(), st.sampled_from(["replace", "drop", "rename"]), VALUES, st.integers(1, 2))
@settings(max_examples=50)
def test_a_sealed_manifest_that_says_anything(
    spoiled: tuple[Path, dict[str, Any]],
    features: np.ndarray,
    data: st.DataObject,
    how: str,
    value: Any,
    times: int,
) -> None:
    """A stranger's manifest: a typed error, or rows; never a crash, never another kind of exception."""
    path, document = spoiled
    changed = document
    for _ in range(times):
        known = [
            p
            for p in places(changed)
            if "files" not in p or p == ("files",) or p[-2] in (0, 7) or p[-1] in (0, 7)
        ]
        at = data.draw(st.sampled_from(known))
        changed = change(changed, at, how, value)
        if not isinstance(changed, dict):
            break
    save(path, changed)
    try:
        got = read_all(path)
    except FeatstoreError:
        return
    same_order = (
        isinstance(changed, dict)
        and changed["tables"].get("features", {}).get("order") == document["tables"]["features"]["order"]
    )
    if same_order and "features" in got:
        assert got["features"].tobytes() == features.tobytes()


@given(st.data(), st.sampled_from(["replace", "drop", "rename"]), VALUES)
@settings(max_examples=35)
def test_an_accident_in_the_manifest_is_found(
    spoiled: tuple[Path, dict[str, Any]], data: st.DataObject, how: str, value: Any
) -> None:
    """Any change that did not go through a writer."""
    path, document = spoiled
    changed = change(document, data.draw(st.sampled_from(places(document))), how, value)
    if json.dumps(changed) == json.dumps(document):
        return
    save(path, changed, seal=False)
    with pytest.raises(FeatstoreError):
        featstore.open(path)


@given(st.data())
@settings(max_examples=35)
def test_flipped_bytes_in_the_manifest(
    spoiled: tuple[Path, dict[str, Any]], packed: Path, data: st.DataObject
) -> None:
    path, _ = spoiled
    text = bytearray((packed / MANIFEST_NAME).read_bytes())
    text[data.draw(st.integers(0, len(text) - 1))] ^= data.draw(st.integers(1, 255))
    (path / MANIFEST_NAME).write_bytes(text)
    try:
        store = featstore.open(path)
    except FeatstoreError:
        return
    with store:  # the byte was white space
        assert store.manifest == read_manifest(packed)[0]


# What is not there.


def test_places_without_a_store(tmp_path: Path, own: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    for path, why in (
        (tmp_path / "none", "no store at"), (tmp_path / "file", "is a file"),
        (tmp_path / "empty", "is not a featstore store"), (tmp_path / "file" / "below", "file"),
    ):  # fmt: skip
        with pytest.raises(IncompleteStoreError, match=why):
            featstore.open(path)
    (tmp_path / "parts").mkdir()
    own.rename(tmp_path / "parts" / "topology")
    with pytest.raises(IncompleteStoreError, match="holds the parts of a split store"):
        featstore.open(tmp_path / "parts")
    (tmp_path / "parts" / "topology").rename(own)
    (own / MANIFEST_NAME).unlink()
    with pytest.raises(IncompleteStoreError, match="--resume"):
        featstore.open(own)


def test_a_manifest_that_is_no_file(own: Path) -> None:
    (own / MANIFEST_NAME).unlink()
    (own / MANIFEST_NAME).mkdir()
    with pytest.raises(FeatstoreError, match=MANIFEST_NAME):
        featstore.open(own)
    (own / MANIFEST_NAME).rmdir()
    os.mkfifo(own / MANIFEST_NAME)
    with pytest.raises(FeatstoreError, match=MANIFEST_NAME):
        featstore.open(own)
