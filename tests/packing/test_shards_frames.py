"""Rows from shards, frames, safetensors and HDF5: equal to NumPy's, and what is refused."""

from __future__ import annotations

import json
import sys
import types
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import featstore
from featstore.errors import FeatstoreWarning, SourceError
from featstore.packing.sources.frames import is_frame
from featstore.packing.sources.opening import open_rows

ROWS = 230
RNG = np.random.default_rng(5)
X = RNG.standard_normal((ROWS, 3)).astype(np.float32)
NAMES = ["a", "b", "c"]


def check(spec: Any, wanted: NDArray[Any] = X, **options: Any) -> Any:
    """A source against the array that it holds, from any row on, in blocks of any size."""
    source = open_rows(spec, **options)
    assert (source.rows, source.row_shape, source.dtype) == (len(wanted), wanted.shape[1:], wanted.dtype)
    for start, block in ((0, 64), (0, 1000), (1, 7), (len(wanted) // 2, 50), (len(wanted), 3)):
        blocks = [part.copy() for part in source.blocks(start, block)]
        assert all(0 < len(part) <= block for part in blocks)
        assert np.concatenate([wanted[:0], *blocks]).tobytes() == wanted[start:].tobytes()
    assert source.fingerprint() == open_rows(spec, **options).fingerprint()
    return source


def write(path: Path, rows: NDArray[Any]) -> Path:
    """Rows in a file of the kind that its name says."""
    if path.suffix == ".npy":
        np.save(path, rows)
    elif path.suffix == ".csv":
        path.write_text("\n".join(["a,b,c", *(",".join(map(repr, row)) for row in rows.tolist())]) + "\n")
    elif path.suffix == ".safetensors":
        safetensors(path, {"x": rows})
    elif path.suffix == ".bin":
        path.write_bytes(rows.tobytes())
    else:
        pq.write_table(pa.table({n: rows[:, k] for k, n in enumerate(NAMES)}), path)
    return path


def shards(folder: Path, suffix: str, cuts: Any = (0, 100, 100, 170, ROWS), name: str = "x-{}") -> list[Path]:
    folder.mkdir()
    bounds = list(pairwise(cuts))
    if suffix in (".parquet", ".csv", ".safetensors"):  # of these a file without rows says nothing of them
        bounds = [(a, b) for a, b in bounds if a < b]
    return [write(folder / (name.format(8 + k) + suffix), X[a:b]) for k, (a, b) in enumerate(bounds)]


@pytest.mark.parametrize("suffix", [".npy", ".parquet", ".safetensors"])
def test_shards_are_one_table(tmp_path: Path, suffix: str) -> None:
    """Files 8, 9, 10, 11: by number and not by letter."""
    paths = shards(tmp_path / "d", suffix)
    (tmp_path / "d" / "_SUCCESS").write_text("")
    (tmp_path / "d" / ".part.crc").write_text("")
    for spec in (paths, tuple(map(str, paths)), tmp_path / "d", str(tmp_path / "d" / f"x-*{suffix}")):
        check(spec)
    with featstore.pack(tmp_path / "s", tmp_path / "d", memory="64MiB") as store, store.reader() as reader:
        assert np.array_equal(reader.read(np.arange(ROWS)), X)
    assert open_rows(paths).fingerprint() != open_rows(paths[1:]).fingerprint()


def test_shards_of_text_and_of_bytes(tmp_path: Path) -> None:
    source = open_rows(shards(tmp_path / "d", ".csv"))
    assert source.rows is None
    for start in (0, 90, 100, 101, ROWS):
        found = [block.copy() for block in source.blocks(start, 40)]
        assert np.array_equal(np.concatenate([X[:0], *found]), X[start:])
    check(shards(tmp_path / "e", ".bin"), shape=(-1, 3), dtype="float32")
    with featstore.pack(
        tmp_path / "s", tmp_path / "e", shape=(-1, 3), dtype="float32", memory="64MiB"
    ) as store, store.reader() as reader:  # fmt: skip
        assert np.array_equal(reader.read(np.arange(ROWS)), X)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, ROWS), max_size=12), st.data())
def test_any_cut(tmp_path_factory: pytest.TempPathFactory, cuts: list[int], data: st.DataObject) -> None:
    bounds = [0, *sorted(cuts), ROWS]
    paths = shards(tmp_path_factory.mktemp("x") / "d", ".npy", bounds)
    source = open_rows(paths[0].parent if data.draw(st.booleans()) else paths)
    start, block = data.draw(st.integers(0, ROWS)), data.draw(st.integers(1, 90))
    found = [part.copy() for part in source.blocks(start, block)]
    assert np.array_equal(np.concatenate([X[:0], *found]), X[start:])


def test_shards_have_ids_and_keys(tmp_path: Path) -> None:
    order = RNG.permutation(ROWS)
    paths = []
    for number, part in enumerate(np.array_split(np.arange(ROWS), 3)):
        table = pa.table(
            {"n": order[part], "k": [f"k{n}" for n in part], **{n: X[part, j] for j, n in enumerate(NAMES)}}
        )
        pq.write_table(table, tmp_path / f"{number}.parquet")
        paths.append(tmp_path / f"{number}.parquet")
    by_node = np.empty_like(X)
    by_node[order] = X
    store = featstore.pack(tmp_path / "s", paths, id="n", columns=NAMES, memory="64MiB")
    with store.reader() as reader:
        assert np.array_equal(reader.read(np.arange(ROWS)), by_node)
    with (
        featstore.pack(tmp_path / "t", paths, id="k", node_keys="id", columns=NAMES, memory="64MiB") as store,
        store.ids("features") as ids,
    ):
        assert ids.keys([0, ROWS - 1]).tolist() == ["k0", f"k{ROWS - 1}"]


def test_shards_that_are_no_table(tmp_path: Path) -> None:
    paths = shards(tmp_path / "d", ".npy")
    with pytest.raises(SourceError, match="no file has such a name"):
        open_rows(str(tmp_path / "d" / "y*.npy"))
    np.save(tmp_path / "d" / "x-010.npy", X)
    with pytest.raises(SourceError, match=r"x-010\.npy and x-10\.npy|x-10\.npy and x-010\.npy"):
        open_rows(tmp_path / "d")
    (tmp_path / "d" / "x-010.npy").unlink()
    for wrong in (X.astype(np.float64), X[:, :2], X.reshape(-1, 3, 1)):
        np.save(paths[2], wrong)
        with pytest.raises(SourceError, match=r"shard .*x-10\.npy.*all shards of a table agree"):
            open_rows(tmp_path / "d")
    paths[2].write_bytes(b"\x93NUMPY nonsense")
    with pytest.raises(SourceError, match=r"x-10\.npy"):
        open_rows(paths)
    paths[2].unlink()
    (tmp_path / "d" / "notes.txt").write_text("of whom")
    with pytest.raises(SourceError, match="a folder of shards has files of one kind"):
        open_rows(tmp_path / "d")
    with pytest.raises(SourceError, match="no such file"):
        open_rows([paths[0], tmp_path / "nobody.npy"])
    pq.write_table(pa.table({"b": X[:, 0], "a": X[:, 1], "c": X[:, 2]}), tmp_path / "2.parquet")
    write(tmp_path / "1.parquet", X)
    with pytest.raises(SourceError, match=r"columns of shard .*2\.parquet are not those"):
        open_rows([tmp_path / "1.parquet", tmp_path / "2.parquet"])


# Frames.


class Frame:
    """What a frame of polars gives: its columns, as Arrow."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.columns = table.column_names

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.table.__arrow_c_stream__(requested_schema)


class RangeIndex(NamedTuple):
    """As of pandas, which has a name, too."""

    start: int
    stop: int
    step: int
    name: None = None


class Sliced(Frame):
    """One of pandas: read by slices; ``rows_given`` are those of each conversion."""

    def __init__(self, table: pa.Table, given: list[int] | None = None) -> None:
        super().__init__(table)
        self.rows_given = [] if given is None else given

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def iloc(self) -> Any:
        frame = self

        class By:
            def __getitem__(self, rows: slice) -> Sliced:
                part = frame.table.slice(rows.start or 0, (rows.stop or 0) - (rows.start or 0))
                return Sliced(part, frame.rows_given)

        return By()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        self.rows_given.append(self.table.num_rows)
        return super().__arrow_c_stream__(requested_schema)


def table(**more: Any) -> pa.Table:
    return pa.table({**more, **{n: X[:, k] for k, n in enumerate(NAMES)}})


def made_frames(given: pa.Table) -> list[Any]:
    chunked = pa.concat_tables([given.slice(0, 90), given.slice(90)])
    return [given, chunked, Frame(chunked), Sliced(given), given.combine_chunks().to_batches()[0]]


@pytest.mark.parametrize("kind", range(5))
def test_frames_are_tables_of_columns(tmp_path: Path, kind: int) -> None:
    frame = made_frames(table())[kind]
    assert is_frame(frame)
    check(frame)
    check(frame, X[:, [2, 0]].copy(), columns=["c", "a"])
    order = RNG.permutation(ROWS)
    numbered = made_frames(table(node_id=order))[kind]
    with pytest.raises(SourceError, match="looks like the ids"):
        open_rows(numbered)
    by_node = np.empty_like(X)
    by_node[order] = X
    with (
        featstore.pack(tmp_path / "s", numbered, id="node_id", memory="64MiB") as store,
        store.reader() as reader,
    ):
        assert np.array_equal(reader.read(np.arange(ROWS)), by_node)


def test_a_frame_of_pandas_is_never_converted_whole() -> None:
    big = pa.table({"a": np.zeros(400_000), "b": np.ones(400_000)})
    frame = Sliced(big)
    assert sum(len(block) for block in open_rows(frame).blocks(0, 10_000)) == 400_000
    assert max(frame.rows_given) < 100_000


@pytest.mark.parametrize(
    "index", [RangeIndex(ROWS, 0, -1), RangeIndex(0, 2 * ROWS, 2), RangeIndex(5, 5 + ROWS, 1)]
)
def test_an_index_of_pandas_that_is_no_count_is_ids(index: Any) -> None:
    """Of such an index, as of rows that were reversed or picked, Arrow's table knows nothing."""
    frame = Sliced(table())
    frame.index = index  # type: ignore[attr-defined]
    with pytest.raises(SourceError, match="it is the frame's index"):
        open_rows(frame)
    check(frame, columns=list(NAMES))
    frame.index = RangeIndex(0, ROWS, 1)  # type: ignore[attr-defined]
    check(frame)


def test_lists_in_a_frame_are_rows() -> None:
    values = pa.FixedSizeListArray.from_arrays(pa.array(X.reshape(-1)), 3)
    check(pa.table({"x": values, "y": X[:, 0]}), columns="x")


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_frames_of_packages(package: str) -> None:
    """Where they are installed; `Frame` and `Sliced` stand in for them otherwise."""
    library = pytest.importorskip(package)
    frame = library.DataFrame({n: X[:, k] for k, n in enumerate(NAMES)})
    check(frame)
    if package == "pandas":
        with pytest.raises(SourceError, match="looks like the ids"):
            open_rows(frame.set_index("a"))


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (table(title=["t"] * ROWS), "title .string."),
        (pa.table({"a": pa.array([1.0, None])}), "holds a null"),
        (pa.table({"a": [1.0], "b": [1]}), "cannot stand side by side"),
        (pa.table({"a": pa.array([], pa.float32())}), "no rows"),
    ],
)
def test_frames_that_are_no_table(frame: Any, says: str) -> None:
    with pytest.raises(SourceError, match=says):
        [*open_rows(frame).blocks()]


@pytest.mark.parametrize("keyed", [False, True])
def test_a_frame_of_edges(tmp_path: Path, keyed: bool) -> None:
    ends = RNG.integers(0, ROWS, (2, 900))
    names = np.array([f"k{n}" for n in range(ROWS)], object)
    given = names[ends] if keyed else ends
    frame = Frame(pa.table({"to": given[1].tolist(), "from": given[0].tolist()}))
    options = {"node_keys": names.tolist()} if keyed else {}
    with featstore.pack(tmp_path / "s", X, graph=frame, edge_ids=True, order="given", **options) as store:
        indptr, indices = store.graphs["features"].csc()
        ids = store.graphs["features"].edge_ids()
        assert np.array_equal(indices, ends[0][ids])
        assert np.array_equal(np.repeat(np.arange(ROWS), np.diff(indptr)), ends[1][ids])


# Containers.


def safetensors(path: Path, tensors: dict[str, NDArray[Any]], **header: Any) -> Path:
    """A file as its documentation says; the package is not needed for it."""
    names = {
        "float32": "F32",
        "float64": "F64",
        "int64": "I64",
        "bfloat16": "BF16",
        "bool": "BOOL",
        "int16": "I16",
    }
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, values in tensors.items():
        offsets = [at, at + values.nbytes]
        described[name] = {
            "dtype": names[values.dtype.name],
            "shape": list(values.shape),
            "data_offsets": offsets,
        }
        at += values.nbytes
    text = json.dumps(described | header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(v.tobytes() for v in tensors.values()))
    return path


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.int16, np.bool_, ml_dtypes.bfloat16])
def test_safetensors(tmp_path: Path, dtype: Any) -> None:
    wanted, labels = (X * 9).astype(dtype), np.arange(ROWS)
    path = safetensors(tmp_path / "x.safetensors", {"y": labels, "emb": wanted})
    check(path, wanted, key="emb")
    check(path, labels, key="y")
    with pytest.warns(FeatstoreWarning, match="'emb' is packed, and not 'y'"):
        open_rows(path)


def test_safetensors_that_are_none(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "x.safetensors", {"a": X, "b": X})
    with pytest.raises(SourceError, match="2 tensors could be the table"):
        open_rows(path)
    with pytest.raises(SourceError, match="holds no 'c'; it has: a, b"):
        open_rows(path, key="c")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(SourceError, match="cut off"):
        open_rows(path, key="b")
    for wrong in (
        b"", whole[:30], (2**40).to_bytes(8, "little") + b"{}", b"\2\0\0\0\0\0\0\0[]", b"\2\0\0\0\0\0\0\0{}"
    ):  # fmt: skip
        path.write_bytes(wrong)
        with pytest.raises(SourceError, match="no safetensors file"):
            open_rows(path)
    for entry, says in [
        ({"dtype": "F8_E4M3", "shape": [3], "data_offsets": [0, 3]}, "no dtype of NumPy's"),
        ({"dtype": "F32", "shape": [5, 3], "data_offsets": [0, 3]}, "do not fit together"),
        ({"dtype": "F32", "shape": [-5, 3], "data_offsets": [0, 3]}, "no safetensors file"),
        ({"dtype": "F32", "shape": [1, 3], "data_offsets": [0]}, "no safetensors file"),
        ({"dtype": "F32"}, "no safetensors file"),
        (3, "no safetensors file"),
    ]:
        with pytest.raises(SourceError, match=says):
            open_rows(safetensors(path, {"a": X}, bad=entry), key="bad")


@pytest.fixture
def hdf5(monkeypatch: pytest.MonkeyPatch) -> dict[str, NDArray[Any]]:
    """Data sets by name, as h5py gives them, where it is not installed."""
    sets: dict[str, NDArray[Any]] = {}

    class File(dict[str, Any]):
        def __init__(self, path: Path, mode: str) -> None:
            assert mode == "r"
            if path.read_bytes() != b"hdf5":
                raise OSError("file signature not found")
            super().__init__(sets)

        def visititems(self, see: Any) -> None:
            for name, values in self.items():
                see(name, values)

    module = types.ModuleType("h5py")
    module.File = File  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "h5py", module)
    return sets


def test_hdf5(tmp_path: Path, hdf5: dict[str, NDArray[Any]]) -> None:
    path = tmp_path / "x.h5"
    path.write_bytes(b"hdf5")
    hdf5["group/x"], hdf5["y"] = X, np.arange(ROWS)
    check(path, key="/group/x")
    check(path, np.arange(ROWS), key="y")
    with pytest.warns(FeatstoreWarning, match="'group/x' is packed, and not 'y'"):
        check(path)
    with pytest.raises(SourceError, match="holds no 'z'; it has: group/x, y"):
        open_rows(path, key="z")
    path.write_bytes(b"other")
    with pytest.raises(SourceError, match="cannot be opened as HDF5"):
        open_rows(path)


def test_hdf5_without_h5py_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.h5").write_bytes(b"hdf5")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(SourceError, match=r"needs h5py; install it with: pip install 'featstore\[hdf5\]'"):
        open_rows(tmp_path / "x.h5")


def test_hdf5_of_h5py(tmp_path: Path) -> None:
    """Where it is installed; the module of the test before stands in for it otherwise."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file.create_dataset("g/x", data=X, chunks=(50, 3), compression="gzip")
    check(tmp_path / "x.hdf5")


@pytest.mark.parametrize("kind", ["parquet", "arrow", "table"])
def test_rows_that_pandas_had_in_another_order_are_no_nodes(tmp_path: Path, kind: str) -> None:
    """Of a range, it writes where it begins and its steps, and no column."""

    def given(start: int, stop: int, step: int) -> Any:
        index = {"kind": "range", "name": None, "start": start, "stop": stop, "step": step}
        about = {"index_columns": [index], "column_indexes": [], "columns": [], "pandas_version": "2.0.0"}
        found = table().replace_schema_metadata({b"pandas": json.dumps(about).encode()})
        path = tmp_path / f"x.{kind}"
        if kind == "table":
            return found
        if kind == "parquet":
            pq.write_table(found, path)
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, found.schema) as writer:
                writer.write_table(found)
        return path

    for start, stop, step in ((ROWS - 1, -1, -1), (0, 2 * ROWS, 2)):
        with pytest.raises(SourceError, match=f"in steps of {step}"):
            open_rows(given(start, stop, step))
        check(given(start, stop, step), columns=list(NAMES))
    check(given(0, ROWS, 1))
