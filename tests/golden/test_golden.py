"""The golden stores of format v1, read by everything that claims to read them, and made anew to the byte."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.engine import ENGINES, choose
from featstore.reader.graphs import read_whole

V1 = Path(__file__).resolve().parents[2] / "formats" / "v1"
GOLDEN = V1 / "golden"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"golden_{name}", V1 / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


make_golden = _load("make_golden")
independent = _load("reader")
SCHEMA = json.loads((V1 / "manifest.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
STORES = sorted(make_golden.STORES)


def little(array: np.ndarray) -> np.ndarray:
    """A formula's array as the format keeps it; bfloat16 as its bits."""
    out = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).reshape(array.shape)
    return out.view(np.uint16) if array.dtype.name == "bfloat16" else out


def opaque(array: np.ndarray, entry: Any) -> np.ndarray:
    """An array as zarr shows it: that of a ``numpy:`` dtype with one more axis, its bytes."""
    if not entry.dtype.startswith("numpy:"):
        return array
    return array.reshape(-1).view(np.uint8).reshape([*array.shape, array.dtype.itemsize])


def same(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()


def manifest_of(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GOLDEN / name / "featstore.json").read_text())
    return loaded


def identity_or(values: np.ndarray | None, rows: int) -> np.ndarray:
    return np.arange(rows) if values is None else values


def edges_of(name: str, graph: Any) -> tuple[np.ndarray, np.ndarray]:
    """(offsets, numbers of the edges) of a golden graph in row order: lists ascend by time, then by node
    id."""
    options = make_golden.STORES[name]().options
    sources, targets = options["graph"][graph.name]
    times = options.get("edge_times", {}).get(graph.name, np.zeros(len(sources)))
    nodes = identity_or(graph.table.node_of_row(), graph.table.rows)
    lists = [np.flatnonzero(targets == v) for v in nodes]
    lists = [edges[np.lexsort((sources[edges], times[edges]))] for edges in lists]
    offsets = np.concatenate([[0], np.cumsum([len(x) for x in lists])]).astype(np.int64)
    return offsets, np.concatenate([*lists, []]).astype(np.int32)


def lists_of(name: str, graph: Any) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and sources of a golden graph in row order, from its edges."""
    offsets, edges = edges_of(name, graph)
    row_of_node = np.argsort(identity_or(graph.source_table.node_of_row(), graph.source_table.rows))
    sources = make_golden.STORES[name]().options["graph"][graph.name][0]
    return offsets, row_of_node[sources[edges]].astype(np.int32)


def file_bytes(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_golden_directories_are_those_that_are_made() -> None:
    assert sorted(p.name for p in GOLDEN.iterdir()) == sorted([*STORES, *make_golden.FAMILIES])
    assert sum(p.stat().st_size for p in GOLDEN.rglob("*") if p.is_file()) < 1_300_000


@pytest.mark.parametrize("name", STORES)
def test_made_anew_to_the_byte(name: str, tmp_path: Path) -> None:
    made = file_bytes(make_golden.make(name, tmp_path))
    kept = file_bytes(GOLDEN / name)
    assert made.keys() == kept.keys()
    for path in kept:
        assert made[path] == kept[path], path


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", STORES)
def test_featstore(name: str, engine: str) -> None:
    golden = make_golden.STORES[name]()
    with featstore.open(GOLDEN / name) as store:
        assert set(store.tables) == set(golden.tables)
        assert set(store.arrays) == set(golden.arrays)
        for key, wanted in golden.arrays.items():
            same(store.arrays[key], little(wanted))
        try:
            choose(engine)
        except OSError:  # no io_uring here: then asking for it says so, and the others read
            with pytest.raises(OSError, match=r"io_uring|liburing"):
                store.reader(engine=engine)
            return
        with store.reader(engine=engine, static=None, memory="64MiB") as reader:
            for key, wanted in golden.tables.items():
                ids = np.arange(len(wanted))[::-1].copy()
                found = reader.read({key: ids})[key]
                same(little(np.asarray(found)), little(wanted)[::-1].copy())


@pytest.mark.parametrize("engine", ENGINES)
def test_featstore_reads_graphs(engine: str) -> None:
    with featstore.open(GOLDEN / "graph") as store:
        assert set(store.graphs) == {"user", "tag", "alone"}
        tables = [f"{name}/{part}" for name in store.graphs for part in ("offsets", "sources", "hubs")]
        try:
            reader = store.reader(tables=tables, engine=engine, static=None, memory="64MiB")
        except OSError:
            assert engine == "uring", "only io_uring may be missing"
            return
        with reader:
            for name, graph in store.graphs.items():
                offsets, sources = lists_of("graph", graph)
                same(reader.read_runs({f"{name}/offsets": [[0, len(offsets)]]})[f"{name}/offsets"], offsets)
                same(reader.read_runs({f"{name}/sources": [[0, graph.edges]]})[f"{name}/sources"], sources)
                rows, ends = graph.hub_rows()
                copy = reader.read_runs({f"{name}/hubs": [[0, int(ends[-1])]]})[f"{name}/hubs"]
                lists = [sources[offsets[r] : offsets[r + 1]] for r in rows]
                same(copy, np.concatenate(lists))
                assert ends.tolist() == np.cumsum([0, *map(len, lists)]).tolist()


def test_edge_ids_name_the_edges() -> None:
    sources, targets = make_golden.edges().options["graph"]["paper"]
    for opened in (independent.Store(GOLDEN / "edges"), featstore.open(GOLDEN / "edges")):
        if isinstance(opened, independent.Store):
            (offsets, found), ids = opened.graphs["paper"], opened.edge_ids["paper"]
        else:
            table = opened.graphs["paper"].table
            ids = read_whole(opened.graphs["paper"], "edge_ids")
            node_of_row = table.node_of_row()
    target_row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    same(node_of_row[found], sources[ids].astype(np.int32))
    same(node_of_row[target_row], targets[ids].astype(np.int32))
    twice = np.flatnonzero((np.diff(found) == 0) & (np.diff(target_row) == 0))
    assert len(twice) > 10, "an edge occurs twice"
    assert (ids[twice] < ids[twice + 1]).all(), "then in the order of ids"


def test_edges_with_types_weights_and_times() -> None:
    options, plain = make_golden.typed().options, independent.Store(GOLDEN / "typed")
    assert plain.featureless == ["author"]
    with featstore.open(GOLDEN / "typed") as store:
        assert store.manifest.reader_features == ["graphs", "edge_ids", "relations", "edge_values"]
        assert store.edge_types == list(plain.edge_types.values())
        assert store.edge_types == [("author", "writes", "paper"), ("paper", "cites", "paper")]
        for name, graph in store.graphs.items():
            offsets, edges = edges_of("typed", graph)
            assert plain.graphs[name][0].tolist() == offsets.tolist()
            same(plain.edge_ids[name], edges)
            same(plain.times[name], options["edge_times"][name][edges])
            assert graph.hubs == 12
            if name in options["edge_weights"]:
                same(plain.weights[name], options["edge_weights"][name][edges])
            else:
                assert plain.weights[name] is None
            same(read_whole(graph, "times"), plain.times[name])
    assert featstore.verify(GOLDEN / "typed").ok


def test_keys_name_the_nodes() -> None:
    wanted = {n: np.asarray(k).tolist() for n, k in make_golden.keys().options["node_keys"].items()}
    assert independent.Store(GOLDEN / "keys").keys == wanted
    with featstore.open(GOLDEN / "keys") as store:
        for name, keys in wanted.items():
            with store.ids(name) as ids:
                assert ids.keys(np.arange(len(keys))).tolist() == keys
                assert ids.lookup(keys[::-1]).tolist() == list(range(len(keys)))[::-1]
        assert store.table("paper/keys/values").layout.chunks == 2
        assert store.table("paper/keys/starts").rows > 2


def test_graph_store_is_awkward() -> None:
    """What the store is for: a partition without rows, one without edges, several chunks, hubs, a graph of no
    edges."""
    with featstore.open(GOLDEN / "graph") as store:
        user, alone = store.graphs["user"], store.graphs["alone"]
        parts, offsets = user.table.partition_offsets, user.offsets()
        assert parts.tolist() == [0, 60, 60, 131, 1009]
        assert offsets[60] == offsets[131]
        assert 0 < offsets[60] < user.edges == offsets[-1]
        assert store.table("user/sources").layout.chunks == 2
        assert store.table("user/sources").rows % store.table("user/sources").layout.rows_per_chunk
        assert user.hubs == 51
        assert user.entry.hubs.method == "external"
        assert (alone.edges, alone.hubs, store.tables["alone"].rows) == (0, 1, 3)
        sources, targets = make_golden.graph_edges()["user"]
        assert (sources == targets).any()
        pairs = {(s, t) for s, t in zip(sources.tolist(), targets.tolist(), strict=True)}
        assert len(pairs) < len(sources), "an edge occurs twice"


@pytest.mark.parametrize("name", STORES)
def test_independent_reader(name: str) -> None:
    golden, store = make_golden.STORES[name](), independent.Store(GOLDEN / name)
    assert store.tables.keys() == golden.tables.keys()
    assert store.arrays.keys() == golden.arrays.keys()
    for key, wanted in golden.tables.items():
        same(store.tables[key], little(wanted))
    for key, wanted in golden.arrays.items():
        same(store.arrays[key], little(wanted))
    graphs = golden.options.get("graph", {}) if golden.options.get("topology", True) else {}
    assert store.graphs.keys() == graphs.keys()
    for key, (offsets, sources) in store.graphs.items():
        with featstore.open(GOLDEN / name) as opened:
            wanted_offsets, wanted_sources = lists_of(name, opened.graphs[key])
        same(offsets, wanted_offsets)
        same(sources, wanted_sources)


def _in_row_order(name: str) -> list[tuple[str, np.ndarray]]:
    """(directory of a zarr array, what it should hold) of all tables and arrays of a golden store."""
    golden, out = make_golden.STORES[name](), []
    with featstore.open(GOLDEN / name) as store:
        for key, table in store.tables.items():
            rows, node_of_row = little(golden.tables[key]), table.node_of_row()
            rows = rows if node_of_row is None else rows[node_of_row]
            out.append((table.entry.path, opaque(rows, table.entry)))
            out.append((table.entry.order.partition_offsets.path, table.partition_offsets))
        for key, entry in store.manifest.arrays.items():
            out.append((entry.path, opaque(little(golden.arrays[key]), entry)))
        for key, graph in store.graphs.items():
            offsets, sources = lists_of(name, graph)
            rows, ends = graph.hub_rows()
            hubs = np.concatenate([sources[offsets[r] : offsets[r + 1]] for r in rows])
            out += [(graph.entry.offsets.path, offsets), (graph.entry.sources.path, sources)]
            assert graph.entry.hubs is not None
            out += [(graph.entry.hubs.sources.path, hubs), (graph.entry.hubs.offsets.path, ends)]
            if graph.has_edge_ids:
                out.append((graph.entry.edge_ids.path, independent.Store(GOLDEN / name).edge_ids[key]))
    return out


@pytest.mark.parametrize("name", STORES)
def test_zarr_python(name: str) -> None:
    for path, wanted in _in_row_order(name):
        array = zarr.open_array(str(GOLDEN / name / path), mode="r")
        same(np.asarray(array[...]), wanted)
    group = zarr.open_group(str(GOLDEN / name / "g000001"), mode="r")
    assert set(group["tables"].group_keys()) == set(make_golden.STORES[name]().tables)
    with featstore.open(GOLDEN / name) as store:
        assert set(group["graphs"].group_keys() if "graphs" in group else ()) == set(store.graphs)


@pytest.mark.parametrize("name", STORES)
def test_tensorstore(name: str) -> None:
    for path, wanted in _in_row_order(name):
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(GOLDEN / name / path) + "/"}}
        array = tensorstore.open(spec, open=True, read=True).result()
        same(np.asarray(array.read().result()), wanted)


@pytest.mark.parametrize("name", STORES)
def test_verify(name: str) -> None:
    report = featstore.verify(GOLDEN / name)
    assert report.ok, report
    assert report.unlisted == ()
    assert report.files == len(manifest_of(name)["files"])


def test_order_store_is_permuted() -> None:
    with featstore.open(GOLDEN / "order") as store:
        paper, author = store.tables["paper"], store.tables["author"]
        assert paper.layout.chunks == 5
        assert paper.rows % paper.layout.rows_per_chunk
        assert paper.partition_offsets.tolist() == [0, 150, 150, 400, 600]
        assert paper.node_of_row()[:3].tolist() == [3, 10, 17]
        assert sorted(paper.rows_by_degree()) == list(range(600))
        assert author.node_of_row()[:3].tolist() == [5, 82, 9]
        assert author.rows_by_degree() is None


def test_white_space_of_the_manifest_is_free(tmp_path: Path) -> None:
    for name in STORES:
        store = shutil.copytree(GOLDEN / name, tmp_path / name)
        (store / "featstore.json").write_text(
            json.dumps(manifest_of(name), indent="\t", separators=(" ,", " : "))
        )
        assert featstore.verify(store).ok
        assert independent.Store(store).manifest["uuid"] == featstore.open(GOLDEN / name).uuid


def test_independent_reader_at_the_prompt(tmp_path: Path) -> None:
    command = [sys.executable, str(V1 / "reader.py")]
    done = subprocess.run([*command, str(GOLDEN / "order")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "table paper: [600, 32] float16" in done.stdout
    copied = shutil.copytree(GOLDEN / "order", tmp_path / "order")
    chunk = copied / "g000001/tables/paper/rows/c.4.0"
    data = bytearray(chunk.read_bytes())
    data[100] ^= 4
    chunk.write_bytes(data)
    done = subprocess.run([*command, str(copied)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "c.4.0 is corrupt" in done.stderr


def test_independent_reader_uses_nothing_of_featstore() -> None:
    imported = set(re.findall(r"^(?:import|from) (\w+)", (V1 / "reader.py").read_text(), re.M))
    assert imported - set(sys.stdlib_module_names) == {"numpy"}


def _reseal(store: Path, path: str, data: bytes) -> None:
    """Replace a file of a copied store so that every checksum fits: only what the bytes mean is wrong."""
    from featstore.base.checksum import crc_pages, digest_of_checksums
    from featstore.storage.manifest import uuid_of

    manifest = json.loads((store / "featstore.json").read_text())

    def put(path: str, data: bytes) -> None:
        (store / path).write_bytes(data)
        entry = next(f for f in manifest["files"] if f["path"] == path)
        entry["digest"] = digest_of_checksums(crc_pages(np.frombuffer(data, np.uint8)))

    put(path, data)
    folder, _, chunk = path.rpartition("/")
    if folder.endswith("/rows"):
        sums_path = f"{folder.removesuffix('/rows')}/page_checksums/c.0"
        sums = np.frombuffer((store / sums_path).read_bytes(), "<u4").copy()
        own = crc_pages(np.frombuffer(data, np.uint8))
        first = int(chunk.split(".")[1]) * len(own)
        sums[first : first + len(own)] = own
        put(sums_path, sums.tobytes())
    text = json.dumps(manifest).encode()
    uuid = uuid_of(text, manifest["uuid"])
    (store / "featstore.json").write_bytes(text.replace(manifest["uuid"].encode(), uuid.encode(), 1))


_USER, _PAPER = "g000001/graphs/user", "g000001/graphs/paper"
_WRITES = "g000001/graphs/author__writes__paper"


@pytest.mark.parametrize(
    ("path", "place", "value"),
    [
        (f"{_USER}/sources/rows/c.1", 7, 1009),
        (f"{_USER}/sources/rows/c.0", 0, -1),
        (f"{_USER}/offsets/rows/c.0", 0, 1),
        (f"{_USER}/offsets/rows/c.0", 30, 10**6),
        (f"{_USER}/hub_rows/c.0", 3, 1009),
        (f"{_USER}/hub_rows/c.0", 3, None),
        (f"{_USER}/hub_offsets/c.0", 51, 0),
        (f"{_USER}/hubs/rows/c.0", 5, None),
        (f"{_PAPER}/edge_ids/rows/c.0", 7, 1200),
        (f"{_PAPER}/edge_ids/rows/c.0", 7, -1),
        (f"{_PAPER}/edge_ids/rows/c.0", 7, None),
        (f"{_PAPER}/hub_edge_ids/rows/c.0", 5, None),
        (f"{_WRITES}/sources/rows/c.0", 5, 150),
        (f"{_WRITES}/weights/rows/c.0", 5, -1),
        (f"{_WRITES}/weights/rows/c.0", 5, np.inf),
        (f"{_WRITES}/weights/rows/c.0", 899, np.nan),
        (f"{_WRITES}/times/rows/c.0", 1, -100),
        (f"{_WRITES}/hub_weights/rows/c.0", 5, 77),
        (f"{_WRITES}/hub_times/rows/c.0", 0, -99),
        ("g000001/tables/author/rows/c.0", 149, 1),
    ],
)
def test_a_graph_that_breaks_a_promise(tmp_path: Path, path: str, place: int, value: float | None) -> None:
    """Every checksum fits; what the numbers say does not. ``value`` None: that of the element before."""
    name = "edges" if "/paper/" in path else "typed" if "author" in path else "graph"
    store = shutil.copytree(GOLDEN / name, tmp_path / name)
    parts = {"offsets": "<i8", "times": "<i8", "weights": "<f4", "author/rows": "u1"}
    dtype = next((dtype for part, dtype in parts.items() if part in path), "<i4")
    data = np.frombuffer((store / path).read_bytes(), dtype).copy()
    data[place] = data[place - 1] if value is None else value
    _reseal(store, path, data.tobytes())
    with pytest.raises(independent.Refused, match=r"hub|graph|without features"):
        independent.Store(store)
    assert {p.what for p in featstore.verify(store).problems} & {"graph", "rows"}


# Files from one byte to several pages, of every kind; in each, any bit.
_FILES = [
    (s, path)
    for s in ("order", "graph")
    for path in ["featstore.json"] + [f["path"] for f in manifest_of(s)["files"]]
]


@settings(max_examples=25, deadline=None)
@given(file=st.sampled_from(_FILES), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_independent_reader_refuses_any_flipped_bit(
    tmp_path_factory: pytest.TempPathFactory, file: tuple[str, str], where: float, bit: int
) -> None:
    name, path = file
    store = shutil.copytree(GOLDEN / name, tmp_path_factory.mktemp("flip") / name)
    data = bytearray((store / path).read_bytes())
    data[int(where * len(data))] ^= 1 << bit
    (store / path).write_bytes(data)
    with pytest.raises((ValueError, KeyError, TypeError)):
        independent.Store(store)
    shutil.rmtree(store)


@pytest.mark.parametrize("name", STORES)
def test_schema_accepts_real_manifests(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    VALIDATOR.validate(manifest_of(name))


def _paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every object of a JSON value, by its path; those that may hold anything are left out."""
    if isinstance(value, list):
        return [p for i, item in enumerate(value) for p in _paths(item, (*at, i))]
    if not isinstance(value, dict):
        return []
    free = {"provenance", "parameters", "statistics"}
    return [at] + [p for key, item in value.items() if key not in free for p in _paths(item, (*at, key))]


def _inner(value: Any, at: tuple[Any, ...]) -> Any:
    for step in at:
        value = value[step]
    return value


_OBJECTS = [("order", p) for p in _paths(manifest_of("order")) if not (p and p[0] == "files" and p[1] > 0)]
_OBJECTS += [
    ("typed", ("graphs", "author__writes__paper", *p)) for p in ((), ("weights",), ("times",), ("hubs",))
]
_OBJECTS += [("graph", p) for p in _paths(manifest_of("graph")) if p[:2] in (("graphs",), ("graphs", "user"))]


@pytest.mark.parametrize(("name", "at"), _OBJECTS, ids=str)
def test_schema_and_featstore_refuse_unknown_and_missing_fields(
    name: str, at: tuple[Any, ...], tmp_path: Path
) -> None:
    def refused(manifest: dict[str, Any]) -> None:
        assert not VALIDATOR.is_valid(manifest)
        (tmp_path / "featstore.json").write_text(json.dumps(manifest))
        with pytest.raises((featstore.errors.FormatError, featstore.errors.IncompleteStoreError)):
            featstore.open(tmp_path)

    original = manifest_of(name)
    named = at in (("tables",), ("arrays",), ("graphs",))
    more = copy.deepcopy(original)
    _inner(more, at)["bad name" if named else "surplus"] = {}
    refused(more)
    optional = {"row_of_node", "node_of_row", "rows_by_degree", "graphs", "hubs"}
    optional |= {"edge_ids", "weights", "times"}  # all but of hubs alone, see below
    for key in [] if named else sorted(_inner(original, at).keys() - optional):
        less = copy.deepcopy(original)
        del _inner(less, at)[key]
        refused(less)


_TABLE = ("tables", "paper")
_MUTATIONS = [
    (("version",), 2), (("version",), "1"), (("format",), "zarr"), (("reader_features",), ["holes"]),
    (("uuid",), 5), (("generation",), "../g1"), (("generation",), "g1"),
    (("files", 0, "path"), "/etc/passwd"), (("files", 0, "path"), "g000001/../../x"),
    (("files", 0, "path"), "g000001"), (("files", 0, "bytes"), -1), (("files", 0, "bytes"), 1.5),
    (("files", 0, "digest"), "00"), ((*_TABLE, "rows"), -1), ((*_TABLE, "rows"), 2**41),
    ((*_TABLE, "row_bytes"), 0), ((*_TABLE, "row_bytes"), 2**27), ((*_TABLE, "row_shape"), [0]),
    ((*_TABLE, "rows_per_chunk"), 0), ((*_TABLE, "dtype"), "float8"), ((*_TABLE, "dtype"), "object"),
    ((*_TABLE, "page_checksums", "dtype"), "int32"), ((*_TABLE, "page_checksums", "shape"), [11, 1]),
    ((*_TABLE, "order", "partition_offsets", "shape"), [1]),
    ((*_TABLE, "order", "row_of_node", "dtype"), "uint32"), ((*_TABLE, "order", "method"), None),
    ((*_TABLE, "statistics", "minimum"), [0]), (("provenance",), []),
]  # fmt: skip


_GRAPH = ("graphs", "user")
_MAP = {"path": "g000001/tables/user/row_of_node", "shape": [1009], "dtype": "int32"}
_GRAPH_MUTATIONS = [
    (("reader_features",), []), (("reader_features",), ["graphs", "holes"]), (("graphs",), None),
    (("graphs",), []), ((*_GRAPH, "table"), 3), ((*_GRAPH, "edges"), -1), ((*_GRAPH, "edges"), 1.5),
    ((*_GRAPH, "edges"), None), ((*_GRAPH, "hubs"), []), ((*_GRAPH, "offsets", "dtype"), "int32"),
    ((*_GRAPH, "sources", "dtype"), "uint32"), ((*_GRAPH, "offsets", "rows"), 0),
    ((*_GRAPH, "sources", "row_shape"), [1]), ((*_GRAPH, "hubs", "sources", "dtype"), "float32"),
    ((*_GRAPH, "hubs", "method"), 1), ((*_GRAPH, "hubs", "rows", "dtype"), "int16"),
    ((*_GRAPH, "hubs", "rows", "shape"), [51, 1]), ((*_GRAPH, "hubs", "offsets", "shape"), [0]),
    ((*_GRAPH, "hubs", "offsets", "dtype"), "int32"), ((*_GRAPH, "offsets", "order", "row_of_node"), _MAP),
]  # fmt: skip
_TYPED = ("graphs", "author__writes__paper")
_FEATURES = ["graphs", "edge_ids", "relations", "edge_values"]
_TYPED_MUTATIONS = [
    ((*_TYPED, "relation"), 3), ((*_TYPED, "relation"), ""), ((*_TYPED, "source_table"), None),
    ((*_TYPED, "weights", "dtype"), "int32"), ((*_TYPED, "times", "dtype"), "int32"),
    ((*_TYPED, "times", "row_shape"), [1]), (("featureless",), "author"), (("featureless",), ["author"] * 2),
    (("featureless",), ["no name"]), (("reader_features",), _FEATURES[:2]),
]  # fmt: skip
_WRONG = [("order", *m) for m in _MUTATIONS] + [("graph", *m) for m in _GRAPH_MUTATIONS]
_WRONG += [("typed", *m) for m in _TYPED_MUTATIONS]


@pytest.mark.parametrize(
    ("at", "value"),
    [
        ((*_TYPED, "relation"), "reads"), ((*_TYPED, "source_table"), "paper"),
        ((*_TYPED, "source_table"), "nobody"), (("featureless",), ["paper"]), (("featureless",), ["nobody"]),
        (("reader_features",), ["graphs", "edge_ids", "edge_values"]),
        (("reader_features",), ["graphs", "edge_ids", "relations"]),
        ((*_TYPED, "hubs", "weights"), None), ((*_TYPED, "hubs", "times"), None),
        ((*_TYPED, "weights"), None), ((*_TYPED, "relation"), None),
    ],
)  # fmt: skip
def test_a_typed_manifest_that_contradicts_itself(at: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    """What a schema cannot say; ``value`` None: without the field."""
    shutil.copytree(GOLDEN / "typed", tmp_path / "s")
    manifest = manifest_of("typed")
    if value is None:
        del _inner(manifest, at[:-1])[at[-1]]
    else:
        _inner(manifest, at[:-1])[at[-1]] = value
    from featstore.storage.manifest import uuid_of

    text = json.dumps(manifest)
    text = text.replace(manifest["uuid"], uuid_of(text.encode(), manifest["uuid"]), 1)
    (tmp_path / "s" / "featstore.json").write_text(text)
    with pytest.raises(featstore.errors.FormatError):
        featstore.open(tmp_path / "s")
    with pytest.raises((ValueError, KeyError)):
        independent.Store(tmp_path / "s")


@pytest.mark.parametrize(("name", "at", "value"), _WRONG, ids=lambda v: str(v)[:60])
def test_schema_and_featstore_refuse_wrong_values(
    name: str, at: tuple[Any, ...], value: Any, tmp_path: Path
) -> None:
    manifest = manifest_of(name)
    _inner(manifest, at[:-1])[at[-1]] = value
    assert not VALIDATOR.is_valid(manifest)
    (tmp_path / "featstore.json").write_text(json.dumps(manifest))
    with pytest.raises(featstore.errors.FormatError):
        featstore.open(tmp_path)
