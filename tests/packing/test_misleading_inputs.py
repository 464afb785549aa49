"""Inputs that could be taken for something else: each is read as it is meant, or refused."""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import BudgetError, FeatstoreWarning, SourceError
from featstore.packing.graphs.opening import open_graph
from featstore.packing.sources.opening import open_rows

sys.path.insert(0, str(Path(__file__).parent.parent / "crash"))
from disks import FailingDisk, Lost

X = np.arange(60, dtype=np.float32).reshape(20, 3)
ENDS = np.array([[0, 1, 2, 7], [5, 6, 0, 3]])


def ends_of(graph: Any) -> list[tuple[int, int]]:
    targets = np.repeat(np.arange(len(graph.indptr) - 1), np.diff(graph.indptr))
    return sorted(zip(graph.indices.tolist(), targets.tolist(), strict=True))


# Cells between quotes.


@pytest.mark.parametrize("between", [",", ";", "\t"])
@pytest.mark.parametrize("cell", ['"[3, 12; 34\t5]"', '"a ""b"", 9, 9"', '""', '"x"y'])
def test_a_cell_between_quotes_is_one(tmp_path: Path, between: str, cell: str) -> None:
    lines = [["genres", "source", "target", "z"], [cell, "6", "7", cell], [cell, " 1", "2 ", "8"]]
    path = tmp_path / "edges.tsv" if between == "\t" else tmp_path / "edges.csv"
    path.write_text("\n".join(between.join(line) for line in lines))
    with pytest.warns(FeatstoreWarning, match="not stored: genres, z"):
        graph = open_graph(path, nodes=8)
    assert ends_of(graph) == [(1, 2), (6, 7)]
    # names of columns, too
    lines[0][0] = f'"a{between}b"'
    path.write_text("\n".join(between.join(line) for line in lines))
    with pytest.warns(FeatstoreWarning, match="not stored"):
        assert ends_of(open_graph(path, nodes=8)) == [(1, 2), (6, 7)]


def test_quotes_after_blanks_and_other_separators_in_them(tmp_path: Path) -> None:
    path = tmp_path / "edges.csv"
    path.write_text('title, "year, month", source, target, weight\na, "2020, 5", 1, 2, 7\n')
    with pytest.warns(FeatstoreWarning, match="not stored"):
        assert ends_of(open_graph(path, nodes=8)) == [(1, 2)]
    path.write_text('"a;b",source,target\nx;y,1,2\n')
    with pytest.warns(FeatstoreWarning, match="not stored: a;b"):
        assert ends_of(open_graph(path, nodes=8)) == [(1, 2)]
    path.write_text("paper,paper\n1,2\n")
    assert ends_of(open_graph(path, nodes=8)) == [(1, 2)]
    path.write_text("src,src,dst\n1,2,3\n")
    with pytest.raises(SourceError, match="two columns are called 'src'"):
        open_graph(path, nodes=8)


@pytest.mark.parametrize("cell", ['"hello', 'a "b" c', '"b', '"b" c', '"x"y'])
def test_quotes_that_mean_nothing_between_tabs(tmp_path: Path, cell: str) -> None:
    """As databases write them: a cell ends with the tab, whatever its quotes."""
    path = tmp_path / "edges.tsv"
    path.write_text(f"1\t2\t{cell}\n6\t7\t{cell}\n")
    with pytest.warns(FeatstoreWarning, match="not stored"):
        assert ends_of(open_graph(path, nodes=8)) == [(1, 2), (6, 7)]
    path.write_text(f"title\tsource\ttarget\tz\n{cell}\t1\t2\t{cell}\nb\t6\t7\t8\n")
    with pytest.warns(FeatstoreWarning, match="not stored: title, z"):
        assert ends_of(open_graph(path, nodes=8)) == [(1, 2), (6, 7)]


def test_what_quotes_leave_open_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "edges.csv"
    path.write_text('genres,source,target\n0,1,2\n"3, 4,5\n",6,7\n')
    with (
        pytest.warns(FeatstoreWarning, match="genres"),
        pytest.raises(
            SourceError, match=re.escape("line 3 ('\"3, 4,5') has no integers in columns 2 and 3, or a quote")
        ),
    ):
        open_graph(path, nodes=8)
    path.write_text('"my source" source target\n0 1 2\n')
    with pytest.raises(SourceError, match="blanks between quotes"):
        open_graph(path, nodes=8)
    path.write_text('"source" "target"\n1 2\n')
    assert ends_of(open_graph(path, nodes=8)) == [(1, 2)]


# Several files.


def test_a_shard_that_would_stand_twice_is_refused(tmp_path: Path) -> None:
    (folder := tmp_path / "x").mkdir()
    for number, part in enumerate(np.split(X, 2)):
        np.save(folder / f"x{number}.npy", part)
    with pytest.raises(SourceError, match=r"both the folder .*x.* and files in it"):
        open_rows(folder / "**")
    with pytest.raises(SourceError, match="both the folder"):
        open_rows(tmp_path / "**")
    assert open_rows(folder / "**" / "*.npy").rows == len(X)
    os.symlink("x1.npy", folder / "x2.npy")
    for spec in (folder, folder / "*.npy"):
        with pytest.raises(SourceError, match=r"x1\.npy and x2\.npy are the same file"):
            open_rows(spec)
    assert open_rows([folder / "x1.npy", folder / "x2.npy"]).rows == len(X), "as it was said"


def test_shards_of_columns_are_held_one_after_the_other(tmp_path: Path) -> None:
    big = np.asfortranarray(np.random.default_rng(0).random((200_000, 4)))
    for number in range(3):
        np.savez_compressed(tmp_path / f"{number}.npz", x=big + number)
    rows = open_rows(tmp_path / "*.npz")
    assert big.nbytes < rows.held_bytes < 2 * big.nbytes
    found = np.concatenate([block.copy() for block in rows.blocks(150_000, 7000)])
    assert np.array_equal(found, np.concatenate([big, big + 1, big + 2])[150_000:])


# Masks, and byte orders.


def test_masks_of_edges_and_keys_are_not_dropped(tmp_path: Path) -> None:
    masked = np.ma.array(ENDS, mask=ENDS == 7)
    for graph in (masked, (masked[0], ENDS[1]), (np.array([0, 1]), masked[0])):
        with pytest.raises(SourceError, match="masked array with 1 masked values, and edges have no masks"):
            featstore.pack(tmp_path / "s", X, graph=graph, overwrite=True)
    with featstore.pack(tmp_path / "s", X, graph=np.ma.array(ENDS), overwrite=True) as store:
        assert store.graphs["features"].edges == 4
    keys = np.ma.array(np.arange(20) + 100, mask=np.arange(20) == 3)
    with pytest.raises(SourceError, match="masked array with 1 masked values, and each node has a key"):
        featstore.pack(tmp_path / "s", X, node_keys=keys, overwrite=True)


@pytest.mark.parametrize("order", "<>")
def test_keys_and_ends_beyond_int64_are_refused_in_any_byte_order(tmp_path: Path, order: str) -> None:
    keys = np.arange(20, dtype=f"{order}u8")
    keys[4] = 2**63 + 5
    with pytest.raises(SourceError, match=f"key {2**63 + 5} in row 4 does not fit int64"):
        featstore.pack(tmp_path / "s", X, node_keys=keys)
    with pytest.raises(SourceError, match=f"{2**63 + 5}, which does not fit int64"):
        featstore.pack(tmp_path / "s", X, graph=np.stack([keys, keys]), overwrite=True)


# Names that stand twice, and batches without rows.


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("ends", ["numbers", "text"])
def test_ends_of_edges_that_are_called_alike(tmp_path: Path, suffix: str, ends: str) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = [ENDS[0], ENDS[0] + 1, ENDS[1]]
    if ends == "text":
        columns = [column.astype(str) for column in columns]
    table = pa.table([pa.array(column) for column in columns], names=["src", "src", "dst"])
    path = tmp_path / f"edges.{suffix}"
    if suffix == "parquet":
        parquet.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)
    keys = {"node_keys": [str(k) for k in range(20)]} if ends == "text" else {}
    with pytest.raises(SourceError, match="two columns are called 'src'"):
        featstore.pack(tmp_path / "s", X, graph=path, **keys)


@pytest.mark.parametrize("kind", ["columns", "lists"])
def test_a_batch_without_rows_says_nothing_of_those_after_it(tmp_path: Path, kind: str) -> None:
    pa = pytest.importorskip("pyarrow")
    many = np.tile(X, (50, 1)).astype(np.float64)
    if kind == "columns":
        table = pa.table({name: many[:, k] for k, name in enumerate("abc")})
    else:
        table = pa.table({"x": pa.array(list(many), pa.list_(pa.float64()))})
    path = tmp_path / "x.arrow"
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table.slice(0, 0))
        file.write_batch(pa.RecordBatch.from_arrays(
            [pa.array([], field.type) for field in table.schema], schema=table.schema))  # fmt: skip
        file.write_table(table.slice(0, 1))
        file.write_table(table.slice(1))
    rows = open_rows(path)
    assert rows.held_bytes
    assert np.array_equal(np.concatenate([block.copy() for block in rows.blocks(0, 77)]), many)
    if kind == "columns":  # a column of ids is seen in the batches that have rows
        ids = pa.table({"a": np.arange(1000, dtype=np.float64), "b": many[:, 1]})
        with pa.ipc.new_file(str(path), ids.schema) as file:
            file.write_table(ids.slice(0, 1))
            file.write_table(ids.slice(1))
        with pytest.raises(SourceError, match="'a'"):
            open_rows(path)


def test_a_shard_without_rows_is_one(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    whole = pa.table({name: X[:, k] for k, name in enumerate("abc")})
    for number, part in enumerate([whole.slice(0, 0), whole]):
        with pa.ipc.new_file(str(tmp_path / f"{number}.arrow"), whole.schema) as file:
            for batch in part.to_batches() or [
                pa.RecordBatch.from_arrays(
                    [pa.array([], one.type) for one in whole.schema], schema=whole.schema
                )
            ]:
                file.write_batch(batch)
    rows = open_rows(tmp_path / "*.arrow")
    assert np.array_equal(np.concatenate([block.copy() for block in rows.blocks(0, 9)]), X)


# What a budget is said to need.


def until_it_is_enough(pack: Callable[[int], Any], memory: int) -> list[int]:
    """The budgets that errors named, until one was enough."""
    named = [memory]
    for _ in range(5):
        try:
            pack(named[-1])
            return named
        except BudgetError as error:
            assert error.given_bytes == named[-1]
            assert error.needed_bytes > named[-1], "what was named is not enough"
            named.append(error.needed_bytes)
    raise AssertionError(named)


@pytest.mark.parametrize("what", ["graph", "types", "values", "keys"])
def test_the_budget_that_is_named_while_a_graph_is_opened_is_enough(tmp_path: Path, what: str) -> None:
    nodes, rng = 300_000, np.random.default_rng(0)
    table, ends = np.zeros((nodes, 1), np.int8), rng.integers(0, nodes, (2, 1000))

    def pack(memory: int) -> None:
        given: dict[str, Any] = {"graph": ends}
        tables: Any = table
        if what == "types":
            tables, given = {"a": table, "b": table}, {"graph": {("a", "to", "b"): ends}}
        if what == "values":
            given |= {"edge_weights": rng.random(1000), "order": "degree"}
        if what == "keys":
            keys = np.arange(nodes) * 7
            given = {"node_keys": keys, "graph": keys[ends]}
        featstore.pack(tmp_path / "s", tables, memory=memory, overwrite=True, **given).close()

    named = until_it_is_enough(pack, 1 << 20)
    assert len(named) > 1
    assert named[-1] < 64 << 20


# Inputs that change.


def test_chunks_of_any_names_are_looked_at(tmp_path: Path) -> None:
    """As featstore writes them, and zarr with that separator."""
    zarr = pytest.importorskip("zarr")
    named = {"name": "default", "separator": "."}

    made = zarr.create_array(
        str(tmp_path / "x"), shape=X.shape, dtype=X.dtype, chunks=(7, 3), chunk_key_encoding=named
    )
    made[...] = X
    described = (tmp_path / "x" / "zarr.json").stat().st_mtime_ns
    assert (tmp_path / "x" / "c.1.0").is_file()
    with pytest.raises(Lost):
        featstore.pack(tmp_path / "s", tmp_path / "x", disk=FailingDisk(20))
    zarr.open_array(str(tmp_path / "x"), mode="r+")[...] = X + 1
    assert (tmp_path / "x" / "zarr.json").stat().st_mtime_ns == described
    with pytest.raises(SourceError, match="cannot resume"):
        featstore.pack(tmp_path / "s", tmp_path / "x", resume=True)


def test_an_archive_of_zarr_is_not_gone_on_with_as_another(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")

    def array(more: float) -> Any:
        (tmp_path / "x.zip").unlink(missing_ok=True)
        with zarr.storage.ZipStore(tmp_path / "x.zip", mode="w") as store:
            zarr.create_array(store, shape=X.shape, dtype=X.dtype, chunks=(20, 3))[...] = X + more
        return zarr.open_array(zarr.storage.ZipStore(tmp_path / "x.zip", mode="r"), mode="r")

    with pytest.raises(Lost):
        featstore.pack(tmp_path / "s", array(0), disk=FailingDisk(20))
    with pytest.raises(SourceError, match="cannot resume"):
        featstore.pack(tmp_path / "s", array(1), resume=True)


def test_a_zarr_array_in_memory_is_not_gone_on_with_as_another(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")

    def array(more: float) -> Any:
        made = zarr.create_array(zarr.storage.MemoryStore(), shape=X.shape, dtype=X.dtype, chunks=(7, 3))
        made[...] = X + more
        return made

    with pytest.raises(Lost):
        featstore.pack(tmp_path / "s", array(0), disk=FailingDisk(20))
    with pytest.raises(SourceError, match="cannot resume"):
        featstore.pack(tmp_path / "s", array(1), resume=True)
    featstore.pack(tmp_path / "s", array(0), resume=True).close()  # equal, in another place in memory


@pytest.mark.parametrize("kind", ["pandas", "arrow"])
@pytest.mark.parametrize("other", ["row", "key"])
def test_a_frame_is_not_gone_on_with_as_another(tmp_path: Path, kind: str, other: str) -> None:
    pa, pandas = pytest.importorskip("pyarrow"), pytest.importorskip("pandas")

    def frame(changed: bool) -> Any:
        columns = {"id": 1000 + np.arange(200), "a": np.zeros(200, np.float32), "b": np.ones(200, np.float32)}
        columns["id" if other == "key" else "a"][199] += 5000 * changed
        return pandas.DataFrame(columns) if kind == "pandas" else pa.table(columns)

    named: dict[str, Any] = {"id": "id", "node_keys": "id"}
    with pytest.raises(Lost):
        featstore.pack(tmp_path / "s", frame(False), disk=FailingDisk(30), **named)
    with pytest.raises(SourceError, match="cannot resume"):
        featstore.pack(tmp_path / "s", frame(True), resume=True, **named)
    featstore.pack(tmp_path / "s", frame(False), resume=True, **named).close()


@pytest.mark.parametrize("what", ["path", "array", "weights"])
def test_a_folder_that_changes_while_it_is_packed_is_an_error(tmp_path: Path, what: str) -> None:
    zarr = pytest.importorskip("zarr")
    made = zarr.create_array(str(tmp_path / "x"), shape=X.shape, dtype=X.dtype, chunks=(7, 3))
    made[...] = X
    (weights := tmp_path / "w").mkdir()
    for number in range(2):
        np.save(weights / f"{number}.npy", np.ones(2, np.float32))
    changed = weights / "1.npy" if what == "weights" else tmp_path / "x" / "c" / "1" / "0"
    rows = {"path": tmp_path / "x", "array": made, "weights": X}[what]

    def progress(_: Any) -> None:
        os.utime(changed, ns=(1, changed.stat().st_mtime_ns + 1))

    given: dict[str, Any] = {"graph": ENDS, "edge_weights": weights}
    named = "weights of graph" if what == "weights" else "table"
    with pytest.raises(SourceError, match=f"{named} 'features' has changed since this pack began"):
        featstore.pack(tmp_path / "s", rows, progress=progress, **given)
    featstore.pack(tmp_path / "s", rows, overwrite=True, **given).close()


# What is malformed.


def test_weights_whose_sum_is_beyond_float64_are_refused(tmp_path: Path) -> None:
    """In memory they are; from disk each draw with replacement was the list's last edge."""
    weights = np.array([1.0, 1e308, 1e308, 2.0])
    with pytest.raises(SourceError, match="the sum of all weights is beyond float64"):
        featstore.pack(tmp_path / "s", X, graph=ENDS, edge_weights=weights)
    featstore.pack(tmp_path / "s", X, graph=ENDS, edge_weights=weights / 1e308, overwrite=True).close()


@pytest.mark.parametrize("dtype", [None, ["F32"]])
def test_a_tensor_without_a_dtype_is_no_tensor(tmp_path: Path, dtype: Any) -> None:
    one: dict[str, Any] = {"shape": [2, 2], "data_offsets": [0, 16]} | (
        {} if dtype is None else {"dtype": dtype}
    )
    text = json.dumps({"x": one}).encode()
    (path := tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    with pytest.raises(SourceError, match="no safetensors file"):
        open_rows(path)


def test_columns_of_edges_may_be_called_by_numbers(tmp_path: Path) -> None:
    keys = np.arange(20) * 3
    edges = {"features": {0: keys[ENDS[0]], 1: keys[ENDS[1]]}}
    with featstore.pack(tmp_path / "s", X, node_keys=keys, graph=edges) as store:
        indptr, indices = store.graphs["features"].csc()
        targets = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        assert sorted(zip(indices.tolist(), targets.tolist(), strict=True)) == sorted(
            map(tuple, ENDS.T.tolist())
        )
