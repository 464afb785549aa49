"""Packing as a user meets it: inputs, orders, casts, errors, locks, disk space, memory, equal bytes."""

from __future__ import annotations

import fcntl
import gc
import gzip
import os
import resource
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.base.dtypes import bfloat16
from featstore.errors import (
    ArgumentError,
    BudgetError,
    DiskFullError,
    FeatstoreWarning,
    IdError,
    IncompleteStoreError,
    SourceError,
    StoreExistsError,
    StoreLockedError,
)
from featstore.packing import spill_files
from featstore.packing.convert import half_range
from featstore.storage.disk import Disk

ROWS = 2_000
rng = np.random.default_rng(3)
X = rng.random((ROWS, 24)).astype(np.float32)


def ring_graph(nodes: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Four communities of nodes i mod 4, each a ring with chords; CSC of in-edges, symmetric."""
    node = np.arange(nodes)
    pairs = [((node + 4 * k) % nodes, node) for k in (1, 2, 5)]
    source = np.concatenate([a for a, _ in pairs] + [b for _, b in pairs])
    target = np.concatenate([b for _, b in pairs] + [a for a, _ in pairs])
    order = np.lexsort((source, target))
    return np.searchsorted(target[order], np.arange(nodes + 1)), source[order].astype(np.int32)


def tree(path: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes()
        for p in sorted(path.rglob("*"))
        if p.is_file() and p.name != "lock"
    }


def rows_of(store: featstore.Store, name: str = "features") -> np.ndarray:
    with store.reader(memory="8MiB", engine="threads", tables=[name], static=None) as reader:
        return reader.read(np.arange(store.tables[name].rows))


@pytest.mark.parametrize("order", ["given", "degree", "metis", "ldg", "auto", "permutation"])
def test_every_order_keeps_every_row_and_says_what_it_did(tmp_path, order):
    permutation = rng.permutation(ROWS) if order == "permutation" else None
    store = featstore.pack(
        tmp_path / "s",
        X,
        graph=ring_graph(),
        order=order,
        permutation=permutation,
        partitions=None if order in ("given", "degree", "permutation") else 4,
        memory="128MiB",
    )
    assert np.array_equal(rows_of(store), X)
    table = store.tables["features"]
    entry = table.entry.order
    assert entry.method == {"auto": "metis"}.get(order, order)
    assert entry.parameters["chosen_because"]
    offsets = table.partition_offsets
    assert offsets[0] == 0
    assert offsets[-1] == ROWS
    if order in ("metis", "ldg", "auto"):
        assert len(offsets) == 5
        assert entry.parameters["edge_cut"] < 0.5
    node_of_row = table.node_of_row()
    if order == "permutation":
        assert np.array_equal(node_of_row, permutation)
    if node_of_row is not None:
        assert np.array_equal(table.row_of_node()[node_of_row], np.arange(ROWS))
    by_degree = table.rows_by_degree()
    assert sorted(by_degree) == list(range(ROWS))
    assert store.manifest.provenance["sources"]["features"]["shape"] == [ROWS, 24]


def test_rows_by_degree_rank_rows_by_how_often_they_are_sources(tmp_path):
    indptr = np.array([0, 2, 4, 5, 6])
    indices = np.array([3, 1, 3, 1, 3, 0])  # 3 three times, 1 twice, 0 once, 2 never
    store = featstore.pack(
        tmp_path / "s", X[:4], graph=(indptr, indices), order="permutation", permutation=[2, 3, 0, 1]
    )
    rows = store.tables["features"].rows_by_degree()
    assert list(store.tables["features"].node_of_row()[rows]) == [3, 1, 0, 2]


def test_equal_input_gives_equal_bytes(tmp_path):
    made = []
    for name in "ab":
        options = {
            "graph": ring_graph(),
            "order": "ldg",
            "partitions": 4,
            "seed": 5,
            "arrays": {"y": np.arange(ROWS)},
        }
        featstore.pack(tmp_path / name, X, memory="64MiB" if name == "a" else "128MiB", **options)
        made.append(tree(tmp_path / name))
    assert made[0] == made[1]
    featstore.pack(
        tmp_path / "c",
        X,
        graph=ring_graph(),
        order="ldg",
        partitions=4,
        seed=6,
        arrays={"y": np.arange(ROWS)},
    )
    assert tree(tmp_path / "c") != made[0]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("source", [np.float32, np.float64, np.uint8, np.int64])
def test_casts_are_numpys_and_are_reported(tmp_path, name, source):
    values = np.array([[0, 1, 2, 100]] * 5).astype(source)
    if np.issubdtype(source, np.floating):
        values[1] = [np.nan, np.inf, -np.inf, 1e-30]
        values[2] = [1e30, -1e30, 65504, 1e-3]
    large = name == "float16" and np.issubdtype(source, np.floating)
    with pytest.warns(FeatstoreWarning, match="are too large") if large else nullcontext():
        store = featstore.pack(tmp_path / "s", values, dtype=name)
    target = bfloat16() if name == "bfloat16" else np.dtype(name)
    with np.errstate(all="ignore"):
        wanted = values.astype(target)
    got = rows_of(store)
    assert got.dtype == target
    assert np.array_equal(got.view(np.uint8), wanted.view(np.uint8))
    told = store.tables["features"].entry.statistics
    floating = np.issubdtype(source, np.floating)
    assert (told["nan"], told["inf"]) == ((1, 2) if floating else (0, 0))
    finite = values[np.isfinite(values.astype(np.float64))].astype(np.float64)
    assert told["minimum"] == finite.min()
    assert told["maximum"] == finite.max()
    if np.dtype(source) != target:
        assert told["overflowed"] == (2 if floating and name == "float16" else 0)
        assert told["underflowed"] == (1 if floating and name == "float16" else 0)


def test_a_cast_from_one_half_to_the_other_is_reported(tmp_path):
    values = np.array([[1, 70000.0], [3e38, 1e-30], [np.inf, 2]], np.float32).astype(bfloat16())
    with pytest.warns(FeatstoreWarning, match="are too large"):
        store = featstore.pack(tmp_path / "s", values, dtype="float16")
    told = store.tables["features"].entry.statistics
    assert (told["overflowed"], told["underflowed"], told["inf"]) == (2, 1, 1)


def test_options_may_be_numbers_of_numpy(tmp_path):
    options = {"seed": np.int64(1), "partitions": np.int32(4), "hubs": np.float32(0.5)}
    with featstore.pack(
        tmp_path / "s", X, graph=ring_graph(), order="ldg", topology=np.bool_(True), edge_ids=np.bool_(True),
        **options,
    ) as store:  # fmt: skip
        assert len(store.tables["features"].partition_offsets) == 5
        assert store.graphs["features"].has_edge_ids
    with featstore.pack(tmp_path / "t", X, graph=ring_graph(), topology=np.bool_(False)) as store:
        assert not store.graphs


def test_half_range_kernel_against_numpy():
    for dtype, infinity in ((np.dtype(np.float16), 0x7C00), (bfloat16(), 0x7F80)):
        bits = np.concatenate(
            [np.arange(65536, dtype=np.uint16), rng.integers(0, 65536, 1000).astype(np.uint16)]
        )
        out = np.zeros(4, np.int64)
        half_range(bits, infinity, out)
        values = bits.view(dtype).astype(np.float32)
        assert out[2] == np.isnan(values).sum()
        assert out[3] == np.isinf(values).sum()
        assert out[1] == infinity - 1
        assert out[0] == 1 - infinity


def test_several_tables_and_arrays(tmp_path):
    y = rng.integers(0, 9, (30, 3))
    store = featstore.pack(
        tmp_path / "s", {"paper": X, "author": y.astype(np.int16), "cites": X[:7, :1].astype(np.float64)},
        graph={"paper": ring_graph()}, order={"paper": "ldg", "author": "given"}, partitions={"paper": 4},
        arrays={"paper.y": np.arange(ROWS), "scalar": np.float32(2.5), "empty": np.empty((0, 3), np.int8)},
    )  # fmt: skip
    with store.reader(memory="8MiB", static=None) as reader:
        got = reader.read({"author": [3, 3, 1], "paper": [5], "cites": np.arange(7)})
    assert np.array_equal(got["author"], y[[3, 3, 1]])
    assert np.array_equal(got["paper"], X[[5]])
    assert np.array_equal(got["cites"], X[:7, :1].astype(np.float64))
    assert store.arrays["scalar"] == np.float32(2.5)
    assert store.arrays["scalar"].shape == ()
    assert store.arrays["empty"].shape == (0, 3)
    assert sorted(store.arrays) == ["empty", "paper.y", "scalar"]


def test_an_iterator_whose_length_nobody_knows(tmp_path):
    store = featstore.pack(tmp_path / "s", (X[at : at + 300] for at in range(0, ROWS, 300)))
    assert np.array_equal(rows_of(store), X)
    assert not list((tmp_path / "s").glob("*.spill"))


def test_pyg_objects_bring_graph_and_arrays(tmp_path):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from torch_geometric.data import Data, HeteroData
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    store = featstore.pack(
        tmp_path / "a", Data(x=torch.from_numpy(X[:4]), edge_index=edges, y=torch.arange(4)), order="degree"
    )
    assert np.array_equal(rows_of(store), X[:4])
    assert list(store.arrays["y"]) == [0, 1, 2, 3]
    hetero = HeteroData()
    hetero["paper"].x, hetero["author"].x = torch.from_numpy(X[:4]), torch.ones(3, 2, dtype=torch.bfloat16)
    hetero["author", "writes", "paper"].edge_index = torch.tensor([[0, 1], [1, 2]])
    hetero["author", "writes", "paper"].edge_attr = torch.ones(2, 5)
    with pytest.warns(
        FeatstoreWarning, match="'author__writes__paper': row e belongs to column e of edge_index"
    ):
        store = featstore.pack(tmp_path / "b", hetero, graph={})
    assert set(store.tables) == {"paper", "author", "author__writes__paper"}
    assert store.tables["author"].dtype == bfloat16()


def test_an_existing_store_is_not_touched_unless_asked(tmp_path):
    featstore.pack(tmp_path / "s", X)
    before = tree(tmp_path / "s")
    with pytest.raises(StoreExistsError, match="--overwrite"):
        featstore.pack(tmp_path / "s", X * 2)
    with pytest.raises(StoreExistsError, match="nothing to resume"):
        featstore.pack(tmp_path / "s", X, resume=True)
    assert tree(tmp_path / "s") == before
    held = featstore.open(tmp_path / "s")
    new = featstore.pack(tmp_path / "s", X * 2, overwrite=True)
    newer = featstore.pack(tmp_path / "s", X * 3, overwrite=True)
    for store, factor in ((held, 1), (newer, 3)):  # readers keep the generation they opened
        assert np.array_equal(rows_of(store), X * factor)
    new.close()
    held.close()
    gc.collect()  # the first one, which was dropped
    featstore.pack(tmp_path / "s", X * 4, overwrite=True)
    assert len(list((tmp_path / "s").glob("g*"))) <= 2  # the one and the one that `newer` holds


def test_one_writer_at_a_time(tmp_path):
    featstore.pack(tmp_path / "s", X)
    with open(tmp_path / "s" / "lock", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711\n")
        lock.flush()
        with pytest.raises(StoreLockedError, match="4711"):
            featstore.pack(tmp_path / "s", X, overwrite=True)
    featstore.pack(tmp_path / "s", X, overwrite=True)


class SmallDisk(Disk):
    """A disk with little room, that counts what is written."""

    written = 0

    def free_bytes(self, path):
        return 100_000

    def write(self, file, offset, data):
        SmallDisk.written += len(memoryview(data).cast("B"))
        super().write(file, offset, data)


def test_a_disk_too_small_is_found_before_rows_are_written(tmp_path):
    with pytest.raises(DiskFullError, match="not enough disk space") as caught:
        featstore.pack(tmp_path / "s", X, disk=SmallDisk())
    assert caught.value.needed_bytes >= X.nbytes
    assert SmallDisk.written < 10_000
    with pytest.raises(IncompleteStoreError):
        featstore.open(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []
    assert np.array_equal(rows_of(featstore.pack(tmp_path / "s", X)), X)


def test_resume_wants_the_same_pack(tmp_path, monkeypatch):
    sys.path.insert(0, str(Path(__file__).parent.parent / "crash"))
    from disks import FailingDisk, Lost

    with pytest.raises(Lost):
        featstore.pack(tmp_path / "s", X, graph=ring_graph(), disk=FailingDisk(30))
    with pytest.raises(StoreExistsError, match="--resume"):
        featstore.pack(tmp_path / "s", X, graph=ring_graph())
    for other in ({"features": X * 2}, {"features": X[:-1]}, {"features": X}):
        changed = {"graph": ring_graph(), "seed": 1} if len(other["features"]) == ROWS else {}
        with pytest.raises(SourceError, match="cannot resume"):
            featstore.pack(tmp_path / "s", other, resume=True, **changed)
    assert np.array_equal(rows_of(featstore.pack(tmp_path / "s", X, graph=ring_graph(), resume=True)), X)


def graphs_like(kind, tmp_path, reverse):
    """A ring, one way round or the other."""
    import scipy.sparse as sp
    import torch

    ends = np.stack([np.arange(ROWS), (np.arange(ROWS) + 1) % ROWS])[:: -1 if reverse else 1]
    if kind == "folder":
        (tmp_path / "raw").mkdir(exist_ok=True)
        for name, text in (("edge", "\n".join(f"{a},{b}" for a, b in ends.T)), ("num-node-list", str(ROWS))):
            with gzip.open(tmp_path / "raw" / f"{name}.csv.gz", "wt") as file:
                file.write(f"{text}\n")
        return tmp_path
    matrix = sp.coo_matrix((np.ones(ROWS), ends), (ROWS, ROWS))
    if kind == "adj_t":
        from torch_geometric.data import Data

        column = torch.from_numpy((np.arange(ROWS) + (1 if reverse else -1)) % ROWS)
        made = torch.sparse_csr_tensor(
            torch.arange(ROWS + 1), column, torch.ones(ROWS), (ROWS, ROWS), check_invariants=True
        )
        return Data(adj_t=made, num_nodes=ROWS)
    if kind == "data":
        from torch_geometric.data import Data

        return Data(edge_index=torch.from_numpy(ends.copy()), num_nodes=ROWS)
    return matrix if kind == "coo" else matrix.tocsr()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sparse CSR:UserWarning")  # torch's
@pytest.mark.parametrize("kind", ["coo", "csr", "data", "adj_t", "folder"])
def test_resume_wants_the_same_graph(tmp_path, kind):
    """However it was given: of one of the same size nothing may be taken for the other's."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "crash"))
    from disks import FailingDisk, Lost

    (tmp_path / "g").mkdir()
    with pytest.raises(Lost):
        featstore.pack(
            tmp_path / "s", X, graph=graphs_like(kind, tmp_path / "g", False), disk=FailingDisk(30)
        )
    with pytest.raises(SourceError, match="cannot resume"):
        featstore.pack(tmp_path / "s", X, graph=graphs_like(kind, tmp_path / "g", True), resume=True)


@pytest.mark.parametrize("what", ["rows", "graph", "keys", "shards"])
def test_a_file_that_changes_while_it_is_packed_is_an_error(tmp_path, what):
    if what == "shards":
        (tmp_path / "x").mkdir()
        for number, part in enumerate(np.array_split(X, 3)):
            np.save(tmp_path / "x" / f"{number}.npy", part)
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "e.npy", np.stack([np.arange(ROWS), np.arange(ROWS)]))
    (tmp_path / "k.txt").write_text("".join(f"{k}\n" for k in range(ROWS)))
    changed = {"rows": "x.npy", "graph": "e.npy", "keys": "k.txt", "shards": "x/1.npy"}[what]
    rows = tmp_path / ("x" if what == "shards" else "x.npy")
    named = "table 'features'" if what == "shards" else changed

    def progress(_):
        path = tmp_path / changed
        os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))

    given = {"node_keys": tmp_path / "k.txt"} if what == "keys" else {"graph": tmp_path / "e.npy"}
    with pytest.raises(SourceError, match=f"{named} has changed since this pack began"):
        featstore.pack(tmp_path / "s", rows, progress=progress, **given)
    with pytest.raises(IncompleteStoreError):
        featstore.open(tmp_path / "s")
    featstore.pack(tmp_path / "s", rows, overwrite=True, **given).close()


def test_a_store_beside_the_arrays_that_it_is_packed_from_is_no_change_of_theirs(tmp_path):
    zarr = pytest.importorskip("zarr")
    zarr.create_array(str(tmp_path / "g" / "x"), shape=X.shape, dtype=X.dtype)[...] = X
    with featstore.pack(tmp_path / "g" / "x" / "s", tmp_path / "g" / "x") as store:
        assert np.array_equal(rows_of(store), X)


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_files_that_were_cut_off_are_errors_of_their_own(tmp_path, name):
    (tmp_path / name).write_bytes(b"" if name == "a.npy" else b"PK\x03\x04")
    for given in (
        {"arrays": {"y": tmp_path / name}},
        {"order": "permutation", "permutation": tmp_path / name},
    ):
        with pytest.raises(SourceError, match=name):
            featstore.pack(tmp_path / "s", X, **given)


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"features": {}}, SourceError, "nothing to pack"),
        ({"features": {"a/b": X}}, ArgumentError, "name"),
        ({"features": {"zarr.json": X}}, ArgumentError, "name"),
        ({"features": X, "graph": {"b": ring_graph()}}, SourceError, "'b'"),
        ({"features": {"a": X, "b": X}, "graph": ring_graph()}, SourceError, "several tables"),
        ({"features": X, "graph": ring_graph(100)}, SourceError, "100"),
        ({"features": X, "order": "random"}, SourceError, "random"),
        ({"features": X, "order": "metis"}, SourceError, "graph"),
        (
            {"features": X, "order": "permutation", "permutation": np.zeros(ROWS, int)},
            SourceError,
            "twice|permutation",
        ),
        ({"features": X, "dtype": "int8"}, SourceError, "int8"),
        ({"features": X.astype("M8[s]"), "dtype": "float32"}, SourceError, "cast"),
        ({"features": np.array([[object()]])}, SourceError, "object"),
        ({"features": X, "memory": "12 parsecs"}, ValueError, "parsecs"),
        ({"features": X, "memory": 1000}, BudgetError, "smallest"),
        ({"features": X, "arrays": {"y": np.array(["a", None], object)}}, SourceError, "objects"),
        ({"features": X, "arrays": {"../y": np.arange(3)}}, ArgumentError, "name"),
        ({"features": "no/such/file.npy"}, SourceError, "no/such/file.npy"),
    ],
)
def test_bad_input_is_refused_and_nothing_stays(tmp_path, kwargs, error, words):
    with pytest.raises(error, match=words):
        featstore.pack(tmp_path / "s", **kwargs)
    with pytest.raises(IncompleteStoreError):
        featstore.open(tmp_path / "s")


def test_the_smallest_budget_that_an_error_names_works(tmp_path):
    big = np.arange(200_000, dtype=np.int64).reshape(-1, 4)
    permutation = rng.permutation(len(big))
    with pytest.raises(BudgetError) as caught:
        featstore.pack(tmp_path / "s", big, order="permutation", permutation=permutation, memory=400_000)
    for _ in range(4):  # the permutation's check and the spill have a need each
        try:
            store = featstore.pack(
                tmp_path / "s",
                big,
                order="permutation",
                permutation=permutation,
                memory=caught.value.needed_bytes,
                overwrite=True,
            )
            break
        except BudgetError as again:
            assert again.needed_bytes > caught.value.needed_bytes
            caught.value.needed_bytes = again.needed_bytes
    assert np.array_equal(rows_of(store), big)


def test_kernels_of_the_spill_against_numpy():
    rows, row_bytes, per_bucket = 500, 12, 64
    row_of_node = rng.permutation(rows).astype(np.int32)
    data = rng.integers(0, 256, (rows, row_bytes)).astype(np.uint8)
    buckets = -(-rows // per_bucket)
    buffers = np.zeros((buckets, per_bucket * row_bytes), np.uint8)
    addresses = np.array([b.ctypes.data for b in buffers], np.int64)
    fill, skip = np.zeros(buckets, np.int64), np.zeros(buckets, np.int64)
    skip[2] = 5
    end = spill_files.spill_rows(
        data.ctypes.data, 0, rows, 0, row_bytes, row_of_node, per_bucket, skip, fill, addresses, 10**9
    )
    assert end == rows
    for b in range(buckets):
        mine = np.flatnonzero(row_of_node // per_bucket == b)[5 if b == 2 else 0 :]
        assert np.array_equal(buffers[b, : fill[b]].reshape(-1, row_bytes), data[mine])
    wanted = np.array([np.sum(row_of_node // per_bucket == b) for b in range(buckets)]) // 2
    restart = np.zeros(1, np.int64)
    spill_files.arrivals(row_of_node, per_bucket, wanted, restart, skip)
    first = min(np.flatnonzero(row_of_node // per_bucket == b)[wanted[b]] for b in range(buckets))
    assert restart[0] == first
    assert all(skip[b] == wanted[b] - np.sum(row_of_node[:first] // per_bucket == b) for b in range(buckets))


#: Packs few rows, so that all code is there that a pack of many needs; by how much does that one grow?
PEAK = """
import gc, shutil, sys
import numpy as np
import featstore

def status(name):
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(name)) << 10

out, *packs = sys.argv[1:]
for source, memory in zip(packs[::2], packs[1::2]):
    shutil.rmtree(out, ignore_errors=True)
    permutation = np.random.default_rng(0).permutation(len(np.load(source, mmap_mode="r"))).astype(np.int32)
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before = status("VmRSS")
    featstore.pack(out, source, order="permutation", permutation=permutation, memory=memory).close()
print(status("VmHWM") - before)
"""


def test_peak_memory_stays_within_the_budget(tmp_path):
    """A permutation of 128 MiB in 32 MiB, in a process of its own."""

    def written(name: str, rows: int) -> Path:
        big = np.lib.format.open_memmap(tmp_path / name, "w+", np.float32, (rows, 128))
        for at in range(0, rows, 1 << 14):
            own = big[at : at + (1 << 14)]
            own[:] = np.arange(at, at + len(own), dtype=np.float32)[:, None]
        big.flush()
        return tmp_path / name

    source, small, spills = written("x.npy", 1 << 18), written("small.npy", 1 << 14), []
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # a compiler takes more memory than a pack: each kernel of a spill is compiled by now
        patch.setattr(
            spill_files, "spill_rows", lambda *a, whole=spill_files.spill_rows: spills.append(1) or whole(*a)
        )
        permutation = rng.permutation(1 << 14).astype(np.int32)
        featstore.pack(
            tmp_path / "warm", small, order="permutation", permutation=permutation, memory="4MiB"
        ).close()
    assert spills
    shutil.rmtree(tmp_path / "warm")
    out = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "s"), str(small), "4MiB", str(source), "32MiB"],
        check=True, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    peak = int(out.stdout) >> 20
    assert 10 < peak <= 32, f"{peak} MiB"
    with featstore.open(tmp_path / "s") as store, store.reader(memory="32MiB") as reader:
        ids = rng.integers(0, 1 << 18, 1000)
        assert np.array_equal(reader.read(ids)[:, 0], ids.astype(np.float32))
    shutil.rmtree(tmp_path / "s")
    os.unlink(source)


def test_a_file_size_limit_is_a_full_disk(tmp_path):
    """A real write that fails half way: RLIMIT_FSIZE in a process of its own."""
    program = (
        "import sys, signal, resource, numpy as np, featstore\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))\n"
        "try: featstore.pack(sys.argv[1], np.ones((100_000, 16)))\n"
        "except featstore.errors.DiskFullError as e: print('full:', e)\n"
    )
    program = "import featstore.errors\n" + program
    out = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "s")], capture_output=True, text=True, timeout=100
    )
    assert "full: a file would become larger than it may" in out.stdout, out.stderr
    with pytest.raises(IncompleteStoreError, match="resume"):
        featstore.open(tmp_path / "s")
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    store = featstore.pack(tmp_path / "s", np.ones((100_000, 16)), resume=True)
    assert rows_of(store).sum() == 1_600_000


def test_a_budget_that_was_too_small_leaves_nothing_to_resume(tmp_path):
    """With another budget it is another pack, which --resume refuses: the next try must simply work."""
    with pytest.raises(BudgetError) as caught:
        featstore.pack(tmp_path / "s", X, memory="1KiB")
    assert not (tmp_path / "s").exists()
    assert np.array_equal(rows_of(featstore.pack(tmp_path / "s", X, memory=caught.value.needed_bytes)), X)


# What would have no effect, or would be something else.

EDGES = np.random.default_rng(3).integers(0, 50, (2, 400))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partitions": 4}, "partitions=.*order is 'given'"),
        ({"partitions": 4, "graph": EDGES, "order": "degree"}, "partitions=.*order is 'degree'"),
        ({"partitions": 4, "graph": EDGES, "permutation": np.arange(50)}, "partitions=.*'permutation'"),
        ({"order": "ldg", "graph": EDGES, "permutation": np.arange(50)}, "permutation=.*order is 'ldg'"),
        (
            {
                "order": {"features": "degree"},
                "graph": {("features", "to", "features"): EDGES},
                "permutation": np.arange(50),
            },
            "permutation=.*order is 'degree'",
        ),
        ({"train": np.arange(9)}, "train=.*only order='bfs'"),
        (
            {"train": np.arange(9), "graph": EDGES, "order": "ldg", "partitions": 2},
            "train=.*only order='bfs'",
        ),
        ({"hubs": 0.2}, "hubs= is for a graph"),
        ({"hubs": 0.2, "graph": EDGES, "topology": False}, "hubs= is for a graph"),
        ({"hub_rank": "external"}, "hub_rank= is for a graph"),
        ({"hub_rank": "external", "graph": EDGES, "topology": False}, "hub_rank= is for a graph"),
    ],
)
def test_options_without_effect_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    x = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    with pytest.raises(ArgumentError, match=message):
        featstore.pack(tmp_path / "s", x, **options)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (np.arange(50) % 2, "is it a mask"),
        ((np.arange(50) % 2).astype(np.uint8), "is it a mask"),
        ([3, 4, 3], "only 2 are different"),
        ([3, 50], "node 50 is out of range"),
        ([-1], "node -1 is out of range"),
        ([], "none, so that nothing"),
        (np.zeros(50, bool), "none, so that nothing"),
        (np.ones(49, bool), r"a mask of 50 nodes; the mask given has the shape \[49\]"),
    ],
)
def test_training_nodes_that_are_none(tmp_path: Path, train: Any, message: str) -> None:
    x = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    with pytest.raises((ArgumentError, IdError), match=message):
        featstore.pack(tmp_path / "s", x, graph=EDGES, order="bfs", partitions=3, train=train)


@pytest.mark.parametrize(("given", "to"), [(1e6, "float16"), (70_000, "float16"), (1e300, "float32")])
def test_numbers_that_a_cast_makes_infinite_are_told(tmp_path: Path, given: float, to: str) -> None:
    x = np.ones((30, 3), type(given))
    x[4, 1] = x[7, 2] = given
    with pytest.warns(FeatstoreWarning, match=f"'features': 2 numbers are too large for {to}"):
        store = featstore.pack(tmp_path / "s", x, dtype=to)
    with store, store.reader(memory="64MiB") as reader:
        assert np.isinf(reader.read([4, 7])).sum() == 2, "the store is there, as it was asked for"
    x[4, 1] = x[7, 2] = 3
    featstore.pack(tmp_path / "t", x, dtype=to).close()
