"""Nodes that are known by keys: numbered, kept, found again, and at the ends of edges."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.base.keys import KeyBlock, as_keys
from featstore.errors import BudgetError, FormatError, IdError, SourceError, UnknownNameError
from featstore.packing.keys.index import SORT_KEY_BYTES, index_keys
from featstore.packing.keys.numbering import number_rows
from featstore.packing.keys.sources import KeySource
from featstore.packing.keys.spool import KeySpool
from featstore.packing.keys.tables import TABLE_KEY_BYTES
from featstore.packing.keys.translate import Ends, edges_in_ids
from featstore.storage.disk import Disk

NODES = 700
RNG = np.random.default_rng(3)
X = RNG.standard_normal((NODES, 3)).astype(np.float32)
TEXT = [f"é/{n * n % 1009}-{n}" for n in range(NODES)]
SPARSE = RNG.permutation(NODES).astype(np.int64) * 10**15 - 10**17
KEYS: dict[str, Any] = {"utf8": np.array(TEXT, object), "int64": SPARSE}
ENDS = RNG.integers(0, NODES, (2, 3000))


def packed(path: Path, features: Any = X, **options: Any) -> featstore.Store:
    store = featstore.pack(path, features, memory="64MiB", **options)
    assert featstore.verify(path).ok
    return store


def edges_of(store: featstore.Store) -> set[tuple[int, int, int]]:
    """(edge id, source, target) of every stored edge."""
    graph = store.graphs["features"]
    indptr, indices = graph.csc()
    targets = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    return set(zip(graph.edge_ids().tolist(), indices.tolist(), targets.tolist(), strict=True))


def given_edges(ends: Any = ENDS) -> set[tuple[int, int, int]]:
    return {(k, int(a), int(b)) for k, (a, b) in enumerate(ends.T)}


@pytest.mark.parametrize("kind", KEYS)
def test_keys_are_kept_and_found(tmp_path: Path, kind: str) -> None:
    keys = KEYS[kind]
    with packed(tmp_path / "s", node_keys=keys, graph=keys[ENDS], order="ldg", edge_ids=True) as store:
        assert store.manifest.reader_features == ["graphs", "edge_ids", "keys"]
        assert edges_of(store) == given_edges()
        with store.reader(memory="64MiB") as reader, store.ids("features") as ids:
            assert len(ids) == NODES
            assert ids.kind == kind
            order = RNG.permutation(NODES)
            assert (ids.lookup(keys[order]) == order).all()
            assert ids.keys(order).tolist() == keys[order].tolist()
            assert ids.keys(np.array([[5, 5], [0, 1]])).tolist() == keys[np.array([[5, 5], [0, 1]])].tolist()
            assert np.array_equal(reader.read(ids.lookup(keys[order])), X[order])
            assert ids.lookup(keys[:0].tolist()).shape == ids.keys([]).shape == (0,)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_against_a_dictionary(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
    one = data.draw(st.sampled_from([texts, st.integers(-(2**63), 2**63 - 1), st.integers(0, 40)]))
    keys = data.draw(st.lists(one, min_size=1, max_size=30, unique=True))
    asked = data.draw(st.lists(one | st.sampled_from(keys), max_size=30))
    known = {key: node for node, key in enumerate(keys)}
    path = tmp_path_factory.mktemp("store")
    with (
        packed(path / "s", X[: len(keys)], node_keys=keys) as store,
        store.ids("features", memory="8MiB") as ids,
    ):
        assert ids.lookup(asked, missing=-1).tolist() == [known.get(key, -1) for key in asked]
        unknown = [key for key in asked if key not in known]
        if unknown:
            with pytest.raises(UnknownNameError, match="are of no node") as error:
                ids.lookup(asked)
            assert repr(unknown[0]) in str(error.value)


def test_what_a_look_up_refuses(tmp_path: Path) -> None:
    with packed(tmp_path / "s", {"a": X, "b": X}, node_keys={"a": TEXT}) as store:
        ids = store.ids("a")
        with pytest.raises(SourceError, match="no keys: pack it with node_keys="):
            store.ids("b")
        with pytest.raises(UnknownNameError, match="no table 'c'"):
            store.ids("c")
        with pytest.raises(SourceError, match="7 is not '7'"):
            ids.lookup([7])
        with pytest.raises(IdError, match=r"ids\[1\] is 700"):
            ids.keys([0, NODES])
        with pytest.raises(BudgetError):
            store.ids("a", memory="64KiB")
        with pytest.raises(KeyError, match="2 of 3 keys"):
            ids.lookup(["x", TEXT[0], "y"])
        again = __import__("pickle").loads(__import__("pickle").dumps(ids))
        assert again.lookup([TEXT[3]]).tolist() == [3]
        ids.close()
        with pytest.raises(featstore.errors.ClosedError):
            ids.lookup([TEXT[0]])


@pytest.mark.parametrize("keys", [[*TEXT[:-1], TEXT[3]], np.append(SPARSE[:-1], SPARSE[3])])
def test_a_key_twice_is_an_error_that_names_both_rows(tmp_path: Path, keys: Any) -> None:
    with pytest.raises(SourceError, match=rf"key .*{keys[3]}.* is that of row 3 and of row {NODES - 1}"):
        featstore.pack(tmp_path / "s", X, node_keys=keys)
    assert not (tmp_path / "s" / "featstore.json").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"node_keys": TEXT[:-1]}, "700 rows, and .* 699 keys"),
        ({"node_keys": "id"}, "say its name, not None"),
        ({"node_keys": "no/such.npy"}, "no such file"),
        ({"node_keys": {"nobody": TEXT}}, "not packed"),
        ({"node_keys": TEXT, "graph": np.array([["a", "b", "c"]] * 2)}, "no key of 'features': 'a'"),
        ({"node_keys": TEXT, "graph": ENDS}, "its ends are whole numbers, and the keys"),
        ({"node_keys": SPARSE, "graph": np.array(TEXT, object)[ENDS]}, "object"),
        ({"node_keys": SPARSE, "graph": ENDS + 3}, "no key of 'features'"),
        ({"graph": np.array(TEXT, object)[ENDS]}, "integers"),
    ],
)  # fmt: skip
def test_what_a_pack_refuses(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(SourceError, match=says):
        featstore.pack(tmp_path / "s", X, **options)


def node_file(folder: Path, ending: str, keys: Any) -> Path:
    """Features a, b, c and keys as columns of a file."""
    path = folder / f"x{ending}"
    cells = np.asarray(keys).tolist()
    if ending == ".csv":
        quoted = [f'"{cell}"' if k % 2 else cell for k, cell in enumerate(cells)]
        lines = ["name,a,b,c", *(f"{q},{','.join(map(repr, row))}" for q, row in zip(quoted, X.tolist()))]
        path.write_text("\r\n".join(lines) + "\n")
        return path
    table = pa.table({"name": pa.array(cells), **{n: pa.array(X[:, k]) for k, n in enumerate("abc")}})
    if ending == ".parquet":
        pq.write_table(table, path, row_group_size=200)
    elif ending == ".arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
            out.write_table(table, max_chunksize=150)
    else:
        record = np.zeros(NODES, [("name", f"U{max(map(len, map(str, cells)))}"), ("x", "<f4", (3,))])
        record["name"], record["x"] = cells, X
        np.save(path, record)
    return path


@pytest.mark.parametrize("ending", [".csv", ".parquet", ".arrow", ".npy"])
def test_a_column_of_keys(tmp_path: Path, ending: str) -> None:
    path = node_file(tmp_path, ending, TEXT)
    more = {"columns": "x"} if ending == ".npy" else {}
    with pytest.raises(SourceError, match="node_keys='id'"):
        featstore.pack(tmp_path / "s", path, id="name", **more)
    with packed(tmp_path / "s", path, id="name", node_keys="id", **more) as store:
        with store.reader(memory="64MiB") as reader, store.ids("features") as ids:
            assert (ids.lookup(TEXT) == np.arange(NODES)).all()
            assert np.array_equal(reader.read(np.arange(NODES)), X)
        source = store.manifest.provenance["sources"]["features"]
        assert source["placed_by"] == "the order of the file, keys 'name'"


@pytest.mark.parametrize("ending", [".npy", ".txt", ".txt.gz", ".parquet", ".arrow"])
def test_a_file_of_keys(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"k{ending}"
    lines = "\n".join(TEXT).encode()
    if ending == ".npy":
        np.save(path, np.array(TEXT))
    elif ending.startswith(".txt"):
        path.write_bytes(gzip.compress(lines) if ending.endswith("gz") else lines)
    elif ending == ".parquet":
        pq.write_table(pa.table({"k": TEXT}), path, row_group_size=100)
    else:
        with (
            pa.OSFile(str(path), "wb") as file,
            pa.ipc.new_file(file, pa.schema([("k", pa.string())])) as out,
        ):
            out.write_table(pa.table({"k": TEXT}), max_chunksize=90)
    with packed(tmp_path / "s", node_keys=path) as store, store.ids("features") as ids:
        assert ids.keys(np.arange(NODES)).tolist() == TEXT


def edge_file(folder: Path, ending: str, keys: Any) -> Any:
    sources, targets = (np.asarray(keys)[end].tolist() for end in ENDS)
    path = folder / f"e{ending}"
    if ending in (".csv", ".tsv", ".csv.gz"):
        mark = "\t" if ending == ".tsv" else ","
        text = f"to{mark}from\n" + "\n".join(f"{b}{mark}{a}" for a, b in zip(sources, targets)) + "\n"
        path.write_bytes(gzip.compress(text.encode()) if ending.endswith("gz") else text.encode())
        return path
    if ending == ".npy":
        kind = np.int64 if isinstance(sources[0], int) else str
        np.save(path, np.array([sources, targets], kind))
        return path
    if ending == "mapping":
        return {"features": {"source": sources, "target": np.array(targets, object)}}
    table = pa.table({"dst": pa.array(targets), "src": pa.array(sources)})
    if ending == ".parquet":
        pq.write_table(table, path, row_group_size=700)
        return path
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table, max_chunksize=600)
    return path


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".tsv", ".parquet", ".arrow", "mapping", ".npy"])
def test_edges_in_keys(tmp_path: Path, ending: str) -> None:
    spec = edge_file(tmp_path, ending, KEYS["utf8"])
    with packed(tmp_path / "s", node_keys=TEXT, graph=spec, edge_ids=True) as store:
        assert edges_of(store) == given_edges()


@pytest.mark.parametrize("ending", [".csv", ".parquet", "mapping", ".npy"])
def test_edges_in_numbers_that_are_keys(tmp_path: Path, ending: str) -> None:
    spec = edge_file(tmp_path, ending, SPARSE)
    with packed(tmp_path / "s", node_keys=SPARSE, graph=spec, edge_ids=True) as store:
        assert edges_of(store) == given_edges()


def test_matrices_speak_of_places(tmp_path: Path) -> None:
    indptr = np.array([0, 2, 2, 3], np.int64)
    options = {"node_keys": ["a", "b", "c"], "graph": (indptr, np.array([2, 1, 0]))}
    with packed(tmp_path / "s", X[:3], **options) as store:
        assert store.graphs["features"].csc()[1].tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\nx,y\n", "which of the columns a, b"),
        ("source,target\nx\n", "line 2 .'x'. has no key in column 2"),
        ("source,target\nx,\n", "line 2 .* has no key in column 2"),
        ('source,target\nx,"y\n', "a quote that does not end"),
        ("source,target\nx,\xff\n".encode("latin-1"), "no UTF-8"),
    ],
)
def test_text_that_has_no_keys(tmp_path: Path, text: str | bytes, says: str) -> None:
    path = tmp_path / "e.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SourceError, match=says):
        featstore.pack(tmp_path / "s", X[:2], node_keys=["x", "y"], graph=path)


# Out of core: few bytes of memory, many ranges of hashes.


def spooled(folder: Path, keys: Any, name: str = "t") -> KeySpool:
    source = KeySource("keys", lambda: iter([as_keys(keys, "keys")]), {})
    return number_rows(source, Disk(), folder, name, lambda _: None)


@pytest.mark.parametrize("kind", KEYS)
def test_the_index_is_the_same_whatever_the_memory(tmp_path: Path, kind: str) -> None:
    hashes = as_keys(KEYS[kind], "keys").hashes()
    order = np.lexsort([np.arange(NODES), hashes])
    for memory in (1 << 20, 200 * SORT_KEY_BYTES, 12 * SORT_KEY_BYTES):
        spool = spooled(tmp_path, KEYS[kind])
        index = index_keys(spool, memory)
        assert index.hashes.read(0, NODES).tolist() == hashes[order].tolist()
        assert index.ids.read(0, NODES).tolist() == order.tolist()
        bits = (len(index.starts) - 1).bit_length() - 1
        upper = (hashes[order] >> np.uint64(64 - bits)).astype(np.int64)
        assert index.starts.tolist() == np.searchsorted(upper, np.arange(2**bits + 1)).tolist()
        index.close()
        spool.close()
    assert not list(tmp_path.iterdir())


class Edges:
    name = "edges"

    def __init__(self, keys: Any) -> None:
        self._both = as_keys(keys[ENDS[0]], "a"), as_keys(keys[ENDS[1]], "b")

    def blocks(self, count: int) -> Any:
        for low in range(0, ENDS.shape[1], 500):
            yield tuple(block.part(low, low + 500) for block in self._both)

    def where(self, edge: int) -> str:
        return f"edge {edge}"


@pytest.mark.parametrize("kind", KEYS)
def test_edges_are_the_same_whatever_the_memory(tmp_path: Path, kind: str) -> None:
    spool = spooled(tmp_path, KEYS[kind])
    for memory in (1 << 24, 100 * TABLE_KEY_BYTES, 30 * TABLE_KEY_BYTES):
        edges = edges_in_ids(Edges(KEYS[kind]), Ends(spool, spool), memory, tmp_path, "graph")
        pairs = list(edges.blocks(700))
        assert np.concatenate([np.stack(pair) for pair in pairs], axis=1).tolist() == ENDS.tolist()
        edges.close()
    other = spooled(tmp_path, KEYS[kind][::-1].copy(), "u")
    edges = edges_in_ids(Edges(KEYS[kind]), Ends(spool, other), 1 << 24, tmp_path, "graph")
    found = np.concatenate([np.stack(pair) for pair in edges.blocks(700)], axis=1)
    assert found.tolist() == [ENDS[0].tolist(), (NODES - 1 - ENDS[1]).tolist()]


def test_equal_hashes_are_not_equal_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key has one of two hashes: the index, the tables of edges and looking up compare keys."""
    whole = KeyBlock.hashes

    def coarse(block: KeyBlock) -> Any:
        return whole(block) & np.uint64(1 << 63)

    monkeypatch.setattr(KeyBlock, "hashes", coarse)
    keys = KEYS["utf8"][:40]
    store = featstore.pack(tmp_path / "s", X[:40], node_keys=keys, graph=keys[ENDS % 40], edge_ids=True)
    assert edges_of(store) == given_edges(ENDS % 40)
    with store.ids("features") as ids:
        assert ids.lookup([*keys, "no"], missing=-1).tolist() == [*range(40), -1]
    assert featstore.verify(tmp_path / "s").ok


@pytest.mark.parametrize("kind", KEYS)
def test_verify_finds_what_is_wrong_with_keys(tmp_path: Path, kind: str) -> None:
    """Parts of other keys in the place of the right ones, every page as it was written."""
    from featstore.scrub.keys import scrub_keys
    from featstore.scrub.report import Findings

    keys = KEYS[kind]
    others = {"shifted": np.roll(keys, 1), "other": keys.copy()}
    others["other"][5] = "another" if kind == "utf8" else 12345
    right = packed(tmp_path / "right", node_keys=keys).manifest.keys["features"]
    assert right.parts.keys() >= {"values", "hashes", "ids", "starts"}
    for name, wrong in others.items():
        packed(tmp_path / name, node_keys=wrong)
        for part in right.parts:
            if part == "starts" or (part == "offsets" and name == "other"):
                continue
            mixed = tmp_path / f"{name}-{part}"
            __import__("shutil").copytree(tmp_path / "right", mixed)
            entry = right.parts[part]
            for chunk in range(entry.layout.chunks):
                there = (tmp_path / name / entry.chunk_path(chunk)).read_bytes()
                here = mixed / entry.chunk_path(chunk)
                if len(there) == len(here.read_bytes()):
                    here.write_bytes(there)
            findings = Findings(mixed)
            findings.readable.update(
                p for t in right.parts.values() for p in map(t.chunk_path, range(t.layout.chunks))
            )
            scrub_keys(findings, right)
            same = all(
                (mixed / entry.chunk_path(k)).read_bytes()
                == (tmp_path / "right" / entry.chunk_path(k)).read_bytes()
                for k in range(entry.layout.chunks)
            )
            assert bool(findings.problems) != same, (name, part)


def test_a_manifest_with_bad_keys_is_refused(tmp_path: Path) -> None:
    import msgspec

    from featstore.storage.manifest_checks import check_manifest

    manifest = packed(tmp_path / "s", node_keys=TEXT).manifest
    keys = manifest.keys["features"]
    replace = msgspec.structs.replace
    for wrong, says in [
        (replace(manifest, reader_features=[]), "feature 'keys' is not named"),
        (replace(manifest, keys={"nobody": keys}), "does not exist"),
        (replace(manifest, keys={"features": replace(keys, kind="int64")}), "strings, and they alone"),
        (replace(manifest, keys={"features": replace(keys, starts=keys.hashes)}), "starts"),
        (replace(manifest, keys={"features": replace(keys, ids=keys.hashes)}), "keys/ids"),
    ]:
        with pytest.raises(FormatError, match=says):
            check_manifest(wrong)


def test_a_pack_goes_on(tmp_path: Path) -> None:
    """Killed while the keys are written: the store is that of a pack that was not."""

    class Killed(Disk):
        def write_file(self, path: Path, data: Any) -> None:
            if "keys" in path.parts and "hashes" in path.parts:
                raise KeyboardInterrupt
            super().write_file(path, data)

    options: dict[str, Any] = {"node_keys": TEXT, "graph": KEYS["utf8"][ENDS], "order": "ldg"}
    with pytest.raises(KeyboardInterrupt):
        featstore.pack(tmp_path / "s", X, disk=Killed(), **options)
    with pytest.raises(SourceError, match="node_keys"):
        featstore.pack(tmp_path / "s", X, resume=True, **options | {"node_keys": TEXT[::-1]})
    resumed = featstore.pack(tmp_path / "s", X, resume=True, **options)
    assert resumed.uuid == packed(tmp_path / "t", **options).uuid
    assert featstore.verify(tmp_path / "s").unlisted == ()


@pytest.mark.parametrize("kind", KEYS)
def test_keys_are_exported_beside_ids(tmp_path: Path, kind: str) -> None:
    keys, ids = KEYS[kind], RNG.permutation(NODES)[:300]
    with packed(tmp_path / "s", node_keys=keys) as store:
        table = pq.read_table(
            featstore.export(store, "features", tmp_path / "x.parquet", ids=ids, memory="24MiB")
        )
        assert table.column_names == ["id", "key", "features"]
        assert table["id"].to_pylist() == ids.tolist()
        assert table["key"].to_pylist() == keys[ids].tolist()
        assert np.array_equal(np.stack(table["features"].to_numpy()), X[ids])
        assert np.array_equal(np.load(featstore.export(store, "features", tmp_path / "x.npy")), X)


def test_a_split_says_where_the_keys_are(tmp_path: Path) -> None:
    packed(tmp_path / "s", node_keys=TEXT).close()
    with pytest.warns(featstore.errors.FeatstoreWarning, match="keys of 'features' are not in the stores"):
        featstore.split(tmp_path / "s", 2, tmp_path / "parts", memory="64MiB")
