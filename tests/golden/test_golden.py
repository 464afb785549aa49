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
from featstore.engine import choose

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


def file_bytes(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_golden_directories_are_those_that_are_made() -> None:
    assert sorted(p.name for p in GOLDEN.iterdir()) == STORES
    assert sum(p.stat().st_size for p in GOLDEN.rglob("*") if p.is_file()) < 400_000


@pytest.mark.parametrize("name", STORES)
def test_made_anew_to_the_byte(name: str, tmp_path: Path) -> None:
    made = file_bytes(make_golden.make(name, tmp_path))
    kept = file_bytes(GOLDEN / name)
    assert made.keys() == kept.keys()
    for path in kept:
        assert made[path] == kept[path], path


@pytest.mark.parametrize("engine", ["uring", "threads", "mmap"])
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


@pytest.mark.parametrize("name", STORES)
def test_independent_reader(name: str) -> None:
    golden, store = make_golden.STORES[name](), independent.Store(GOLDEN / name)
    assert store.tables.keys() == golden.tables.keys()
    assert store.arrays.keys() == golden.arrays.keys()
    for key, wanted in golden.tables.items():
        same(store.tables[key], little(wanted))
    for key, wanted in golden.arrays.items():
        same(store.arrays[key], little(wanted))


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
    return out


@pytest.mark.parametrize("name", STORES)
def test_zarr_python(name: str) -> None:
    for path, wanted in _in_row_order(name):
        array = zarr.open_array(str(GOLDEN / name / path), mode="r")
        same(np.asarray(array[...]), wanted)
    group = zarr.open_group(str(GOLDEN / name / "g000001"), mode="r")
    assert set(group["tables"].group_keys()) == set(make_golden.STORES[name]().tables)


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
        (store / "featstore.json").write_text(json.dumps(manifest_of(name), indent="\t", separators=(" ,", " : ")))
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


# Files from one byte to several pages, of every kind; in each, any bit.
_FILES = [f["path"] for f in manifest_of("order")["files"]] + ["featstore.json"]


@settings(max_examples=25, deadline=None)
@given(path=st.sampled_from(_FILES), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_independent_reader_refuses_any_flipped_bit(
    tmp_path_factory: pytest.TempPathFactory, path: str, where: float, bit: int
) -> None:
    store = shutil.copytree(GOLDEN / "order", tmp_path_factory.mktemp("flip") / "order")
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


@pytest.mark.parametrize("at", [p for p in _paths(manifest_of("order")) if not (p and p[0] == "files" and p[1] > 0)])
def test_schema_and_featstore_refuse_unknown_and_missing_fields(at: tuple[Any, ...], tmp_path: Path) -> None:
    def refused(manifest: dict[str, Any]) -> None:
        assert not VALIDATOR.is_valid(manifest)
        (tmp_path / "featstore.json").write_text(json.dumps(manifest))
        with pytest.raises((featstore.errors.FormatError, featstore.errors.IncompleteStoreError)):
            featstore.open(tmp_path)

    original = manifest_of("order")
    named = at in (("tables",), ("arrays",))
    more = copy.deepcopy(original)
    _inner(more, at)["bad name" if named else "surplus"] = {}
    refused(more)
    optional = {"row_of_node", "node_of_row", "rows_by_degree"}
    for key in [] if named else sorted(_inner(original, at).keys() - optional):
        less = copy.deepcopy(original)
        del _inner(less, at)[key]
        refused(less)


_TABLE = ("tables", "paper")
_MUTATIONS = [
    (("version",), 2), (("version",), "1"), (("format",), "zarr"), (("reader_features",), ["holes"]), (("uuid",), 5),
    (("generation",), "../g1"), (("generation",), "g1"), (("files", 0, "path"), "/etc/passwd"),
    (("files", 0, "path"), "g000001/../../x"), (("files", 0, "path"), "g000001"), (("files", 0, "bytes"), -1),
    (("files", 0, "bytes"), 1.5), (("files", 0, "digest"), "00"), ((*_TABLE, "rows"), -1), ((*_TABLE, "rows"), 2**41),
    ((*_TABLE, "row_bytes"), 0), ((*_TABLE, "row_bytes"), 2**27), ((*_TABLE, "row_shape"), [0]),
    ((*_TABLE, "rows_per_chunk"), 0), ((*_TABLE, "dtype"), "float8"), ((*_TABLE, "dtype"), "object"),
    ((*_TABLE, "page_checksums", "dtype"), "int32"), ((*_TABLE, "page_checksums", "shape"), [11, 1]),
    ((*_TABLE, "order", "partition_offsets", "shape"), [1]), ((*_TABLE, "order", "row_of_node", "dtype"), "uint32"),
    ((*_TABLE, "order", "method"), None), ((*_TABLE, "statistics", "minimum"), [0]), (("provenance",), []),
]  # fmt: skip


@pytest.mark.parametrize(("at", "value"), _MUTATIONS, ids=lambda v: str(v)[:60])
def test_schema_and_featstore_refuse_wrong_values(at: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    manifest = manifest_of("order")
    _inner(manifest, at[:-1])[at[-1]] = value
    assert not VALIDATOR.is_valid(manifest)
    (tmp_path / "featstore.json").write_text(json.dumps(manifest))
    with pytest.raises(featstore.errors.FormatError):
        featstore.open(tmp_path)
