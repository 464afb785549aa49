"""An open store: what it shows, what it holds, and how long it takes to open."""

from __future__ import annotations

import gc
import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import (
    CorruptionError,
    FeatstoreError,
    IncompleteStoreError,
    SourceError,
    StoreExistsError,
    UnknownNameError,
)
from featstore.storage import store as store_module


def test_tables_and_their_maps(store: featstore.Store, features: np.ndarray) -> None:
    table = store.tables["features"]
    assert (table.name, table.rows, table.row_shape, table.dtype, table.row_bytes) == (
        "features",
        1000,
        (100,),
        np.float32,
        400,
    )
    assert table.data_bytes == features.nbytes
    row_of_node, node_of_row = table.row_of_node(), table.node_of_row()
    np.testing.assert_array_equal(node_of_row, np.random.default_rng(1).permutation(1000))
    np.testing.assert_array_equal(row_of_node[node_of_row], np.arange(1000))
    assert table.partition_offsets.tolist() == [0, 1000]
    assert table.rows_by_degree() is None
    assert table.entry.order.method == "permutation"
    assert "1,000 of 100 float32" in str(table)
    assert "features" in str(store)


def test_a_table_in_the_order_given_has_no_maps(tmp_path: Path, pack: Any) -> None:
    with pack(tmp_path / "s", np.zeros((5, 2))) as store:
        table = store.tables["features"]
        assert table.row_of_node() is None
        assert table.node_of_row() is None


def test_chunk_files_are_raw_rows(store: featstore.Store, features: np.ndarray) -> None:
    table = store.tables["features"]
    layout = table.layout
    assert layout.chunks == 4
    raw = b"".join((store.path / table.entry.chunk_path(k)).read_bytes() for k in range(layout.chunks))
    assert raw[: table.data_bytes] == features[table.node_of_row()].tobytes()
    assert not any(raw[table.data_bytes :])


def test_small_arrays(tmp_path: Path, pack: Any) -> None:
    arrays = {
        "y": np.arange(7, dtype=">i4"), "scalar": np.float64(2.5), "none": np.empty((0, 3), np.int8),
        "names": np.array(["a", "bc"]), "grid": np.arange(24.0).reshape(2, 3, 4),
        "mask": np.array([True, False]), "large": np.arange(2_000_000),
    }  # fmt: skip
    with pack(tmp_path / "s", np.zeros((7, 2)), arrays=arrays) as store:
        assert sorted(store.arrays) == sorted(arrays)
        assert len(store.arrays) == 7
        for name, expected in arrays.items():
            got = store.arrays[name]
            assert got.shape == np.shape(expected)
            assert got.dtype == np.asarray(expected).dtype.newbyteorder("<")
            np.testing.assert_array_equal(got, expected)
        with pytest.raises(KeyError):
            store.arrays["nothing"]
    with pytest.raises(SourceError, match="Python objects"):
        pack(tmp_path / "t", np.zeros((7, 2)), arrays={"bad": np.array([object()])})


def test_opening_reads_no_rows_and_holds_one_descriptor(store: featstore.Store) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    again = featstore.open(store.path)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    again.close()
    again.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_paths_may_be_text_and_relative(store: featstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(store.path.parent)
    with featstore.open(store.path.name) as opened:
        monkeypatch.chdir("/")
        assert opened.path == store.path
        with opened.reader(memory="4MiB") as reader:
            assert reader.read([1]).shape == (1, 100)


def test_a_store_may_be_moved_and_reached_through_a_link(
    own: Path, tmp_path: Path, features: np.ndarray
) -> None:
    moved = own.rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to(moved)
    with featstore.open(tmp_path / "link") as store, store.reader(memory="4MiB") as reader:
        np.testing.assert_array_equal(reader.read([9]), features[[9]])


def test_an_open_store_keeps_its_generation(own: Path, features: np.ndarray, pack: Any) -> None:
    """A new pack over an open store: who has it open reads on, who opens it anew sees the new one."""
    with featstore.open(own) as old:
        with pytest.raises(StoreExistsError):
            pack(own, features)
        with (
            pack(own, features + 1, overwrite=True) as new,
            old.reader(memory="4MiB") as reader,
            new.reader(memory="4MiB") as other,
        ):
            assert new.manifest.generation == "g000002"
            np.testing.assert_array_equal(reader.read([3]), features[[3]])
            np.testing.assert_array_equal(other.read([3]), features[[3]] + 1)
        state = old.__reduce__()
        copy = state[0](*state[1])
        with copy.reader(memory="4MiB") as reader:
            np.testing.assert_array_equal(reader.read([3]), features[[3]])
        copy.close()
    pack(own, features, overwrite=True).close()
    with pytest.raises(IncompleteStoreError, match=r"g000001 .* has been removed; open the store anew"):
        state[0](*state[1])


def test_many_threads_open_and_close(packed: Path) -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                with featstore.open(packed) as store:
                    assert store.tables["features"].row_of_node() is not None
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not failed


# Spoiled files.


def chunk(store: Path, number: int) -> Path:
    return store / f"g000001/tables/features/rows/c.{number}.0"


def test_missing_cut_and_grown_files(own: Path) -> None:
    path = chunk(own, 3)
    text = path.read_bytes()
    for spoil, found in (
        (path.unlink, "no file"), (lambda: path.write_bytes(text[:-1]), "102,399 bytes"),
        (lambda: path.write_bytes(text + b"x"), "102,401 bytes"), (lambda: path.write_bytes(b""), "0 bytes"),
    ):  # fmt: skip
        spoil()
        with pytest.raises(CorruptionError, match="restore the file from a copy or pack again") as caught:
            featstore.open(own)
        assert (caught.value.path, caught.value.actual) == (str(path), found)


@pytest.mark.parametrize("to", ["elsewhere", "nowhere", "itself"])
def test_links_in_place_of_files(own: Path, tmp_path: Path, to: str) -> None:
    path = chunk(own, 0)
    other = tmp_path / "elsewhere"
    path.rename(other)
    path.symlink_to({"elsewhere": other, "nowhere": tmp_path / "nowhere", "itself": path}[to])
    with pytest.raises(CorruptionError, match="regular file") as caught:
        featstore.open(own)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("folder", ["g000001", "g000001/tables", "g000001/tables/features/rows"])
def test_links_in_place_of_directories(own: Path, tmp_path: Path, folder: str) -> None:
    (own / folder).rename(tmp_path / "elsewhere")
    (own / folder).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(featstore.errors.FeatstoreError, match=r"symbolic link|something else"):
        featstore.open(own)


def test_directories_and_pipes_in_place_of_files(own: Path) -> None:
    path = chunk(own, 1)
    path.unlink()
    path.mkdir()
    with pytest.raises(CorruptionError, match="regular file"):
        featstore.open(own)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(CorruptionError, match="regular file"):
        featstore.open(own)


@pytest.mark.parametrize("array", ["row_of_node", "page_checksums"])
@pytest.mark.parametrize("at", [0, 100, -1])
def test_flipped_bytes_in_what_readers_need(own: Path, array: str, at: int) -> None:
    path = own / f"g000001/tables/features/{array}/c.0"
    text = bytearray(path.read_bytes())
    text[at] ^= 1
    path.write_bytes(text)
    with featstore.open(own) as store:
        with pytest.raises(CorruptionError, match="digest") as caught:
            store.reader(memory="4MiB")
        assert caught.value.path == str(path)
        if array == "page_checksums":
            store.reader(memory="4MiB", verify=False).close()


def test_flipped_bytes_in_other_arrays(own: Path) -> None:
    for name in ("node_of_row", "partition_offsets"):
        path = own / f"g000001/tables/features/{name}/c.0"
        text = bytearray(path.read_bytes())
        text[0] ^= 1
        path.write_bytes(text)
    with featstore.open(own) as store:
        table = store.tables["features"]
        for call in (table.node_of_row, lambda: table.partition_offsets):
            with pytest.raises(CorruptionError, match="digest"):
                call()
        store.reader(memory="4MiB").close()  # needs neither


def test_maps_that_point_outside(own: Path) -> None:
    """A stranger's map, with a digest that fits."""
    from featstore.base.checksum import crc_pages, digest_of_checksums
    from featstore.errors import FormatError
    from featstore.storage.manifest import MANIFEST_NAME, uuid_of

    relative = "g000001/tables/features/row_of_node/c.0"
    rows = np.fromfile(own / relative, "<i4")
    document = json.loads((own / MANIFEST_NAME).read_bytes())
    entry = next(f for f in document["files"] if f["path"] == relative)
    for bad in (-1, 1000, 2**31 - 1):
        rows[17] = bad
        rows.tofile(own / relative)
        entry["digest"] = digest_of_checksums(crc_pages(rows.view(np.uint8)))
        document["uuid"] = ""
        document["uuid"] = uuid_of(json.dumps(document).encode(), "")
        (own / MANIFEST_NAME).write_text(json.dumps(document))
        with featstore.open(own) as store, pytest.raises(FormatError, match="points outside the 1,000 rows"):
            store.reader(memory="4MiB")


def test_a_missing_generation(own: Path) -> None:
    (own / "g000001").rename(own / "g000007")
    with pytest.raises(CorruptionError, match="generation's directory"):
        featstore.open(own)


FEW = np.zeros((10, 4), np.float32)


def broken() -> Iterator[np.ndarray[Any, Any]]:
    yield FEW
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "attempt",
    [
        lambda out: featstore.pack(out, FEW, memory="1KiB"),
        lambda out: featstore.pack(out, FEW, resume=True),
        lambda out: featstore.pack(out, broken()),
        lambda out: featstore.pack(out, FEW, graph=np.array([[0, 1, 2], [1, 99, 0]])),
        lambda out: featstore.Trace.record([], out),
        lambda out: featstore.Trace.record([object()], out),
        lambda out: featstore.Trace.record([FEW], out, resume=True),
    ],
)
@pytest.mark.parametrize("there", ["nothing", "a folder", "a foreign file"])
def test_what_was_made_for_nothing_is_removed(
    tmp_path: Path, attempt: Callable[[Path], Any], there: str
) -> None:
    out = tmp_path / "deep" / "s"
    if there != "nothing":
        out.mkdir(parents=True)
    if there == "a foreign file":
        (out / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((FeatstoreError, KeyboardInterrupt)):
        attempt(out)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_trace_is_recorded_where_its_parents_are_not(tmp_path: Path) -> None:
    with featstore.Trace.record([np.arange(3)], tmp_path / "deep" / "t") as trace:
        assert len(trace) == 1
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FeatstoreError, match="is a file; give the path of a directory"):
        featstore.Trace.record([np.arange(3)], tmp_path / "file")


@pytest.mark.parametrize("verify", [True, False])
def test_a_store_that_another_has_replaced_is_not_taken_for_it(tmp_path: Path, verify: bool) -> None:
    """Generations of both have the same number, and their files the same sizes."""
    path = tmp_path / "s"
    with featstore.pack(path, np.zeros((50, 3))) as store:
        kept = pickle.dumps(store)
        with store.reader(verify=verify) as reader:
            shutil.rmtree(path)
            with featstore.pack(path, np.ones((50, 3))) as other:
                assert other.manifest.generation == store.manifest.generation
                with pytest.raises(IncompleteStoreError, match="packed anew, since it was opened"):
                    store.reader(verify=verify)
                with pytest.raises(IncompleteStoreError, match="open the store anew"):
                    pickle.loads(kept)
                assert (other.reader().read([3]) == 1).all()
            assert (reader.read([3]) == 0).all(), "it has its files"


def test_one_that_is_packed_anew_alike_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with featstore.pack(path, np.zeros((50, 3))) as store:
        kept = pickle.dumps(store)
    shutil.rmtree(path)
    featstore.pack(path, np.zeros((50, 3))).close()
    with pickle.loads(kept) as again, again.reader() as reader:
        assert (reader.read([3]) == 0).all()


def test_what_is_left_of_a_generation_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a foreign file, while a new one is there."""
    path = tmp_path / "s"
    featstore.pack(path, np.zeros((50, 3))).close()
    (path / "g000001" / "note").write_text("of mine")
    read, turns = store_module.read_manifest, []

    def overtaken(store: Path) -> Any:
        found = read(store)
        if not turns:
            turns.append(1)
            featstore.pack(path, np.ones((50, 3)), overwrite=True).close()
        return found

    monkeypatch.setattr(store_module, "read_manifest", overtaken)
    with featstore.open(path) as store, store.reader() as reader:
        assert (path / "g000001" / "note").exists()
        assert store.manifest.generation == "g000002"
        assert (reader.read([3]) == 1).all()


def test_names_that_are_not_there(packed: Path) -> None:
    with featstore.open(packed) as store:
        for what, mapping in (("table", store.tables), ("graph", store.graphs), ("array", store.arrays)):
            for wrong in ("featurez", "", 3, ("a", "b"), None):
                with pytest.raises(UnknownNameError, match=f"the store has no {what} .*; it has ") as unknown:
                    mapping[wrong]  # type: ignore[index]
                assert isinstance(unknown.value, KeyError)
                assert wrong not in mapping
                assert mapping.get(wrong) is None  # type: ignore[call-overload]
        with pytest.raises(
            UnknownNameError, match=r"'featurez'; it has 'features'.*; did you mean 'features'"
        ):
            store.tables["featurez"]
        assert list(store.tables) == list(dict(store.tables))
        again = pickle.loads(pickle.dumps(store.tables))
        with pytest.raises(UnknownNameError, match="the store has no table 'z'"):
            again["z"]
        assert again["features"].rows == store.tables["features"].rows
