"""The scrub: whatever is changed in a store is found and named; what is sound is called sound."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.errors import FormatError, FormatVersionError, IncompleteStoreError
from featstore.layout import TableLayout
from featstore.scrub.numbers import Numbers

# By the public name: a test that imports the module of the same name would hide the function.
verify = featstore.verify
module = sys.modules["featstore.scrub.store"]

ROWS = 900


def _pack(path: Path) -> None:
    """Two tables, one permuted with degrees and in chunks of two pages; arrays."""
    choose = TableLayout.choose
    with pytest.MonkeyPatch.context() as patch:
        small = staticmethod(lambda rows, row_bytes: choose(rows, row_bytes, chunk_bytes=8192))
        patch.setattr(TableLayout, "choose", small)
        index = np.arange(ROWS)
        features = {
            "nodes": (np.arange(ROWS * 16) % 1009).astype(np.float32).reshape(ROWS, 16),
            "odd": (np.arange(300 * 7) % 251).astype(np.uint8).reshape(300, 7),
        }
        featstore.pack(
            path, features, graph={"nodes": np.stack([index * 7 % ROWS, index * index % ROWS])},
            order={"nodes": "permutation"}, permutation={"nodes": (index * 7 + 3) % ROWS},
            arrays={"y": index % 5},
        ).close()  # fmt: skip


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "store"
    _pack(path)
    return path


@pytest.fixture
def store(clean: Path, tmp_path: Path) -> Path:
    return shutil.copytree(clean, tmp_path / "store")


def manifest_of(store: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((store / "featstore.json").read_text())
    return loaded


def rewrite(store: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and give it the uuid that goes with it."""
    manifest = manifest_of(store)
    change(manifest)
    text = json.dumps(manifest).encode()
    uuid = module.uuid_of(text, manifest["uuid"])
    (store / "featstore.json").write_bytes(text.replace(manifest["uuid"].encode(), uuid.encode(), 1))


def replace_file(store: Path, path: str, data: bytes) -> None:
    """Change a file and its digest, so that only what the bytes mean is wrong."""
    from featstore.base.checksum import crc_pages, digest_of_checksums

    (store / path).write_bytes(data)
    digest = digest_of_checksums(crc_pages(np.frombuffer(data, np.uint8)))

    def change(manifest: dict[str, Any]) -> None:
        for entry in manifest["files"]:
            if entry["path"] == path:
                entry.update(digest=digest, bytes=len(data))

    rewrite(store, change)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def found(report: Any) -> list[tuple[str, str]]:
    return [(p.what, p.path) for p in report.problems]


CHUNK = "g000001/tables/nodes/rows/c.2.0"
SUMS = "g000001/tables/nodes/page_checksums/c.0"


@pytest.mark.parametrize("access", ["direct", "buffered"])
def test_clean_store(clean: Path, access: str) -> None:
    seen: list[Any] = []
    report = verify(clean, progress=seen.append, access=access)
    assert report.ok
    assert report.problems == ()
    assert report.unlisted == ()
    files = manifest_of(clean)["files"]
    assert report.files == len(files)
    assert report.bytes == sum(f["bytes"] for f in files)
    assert report.pages == sum(-(-f["bytes"] // 4096) for f in files if "/rows/c." in f["path"])
    assert seen[-1].done_bytes == seen[-1].total_bytes == report.bytes
    assert [p.done_bytes for p in seen] == sorted(p.done_bytes for p in seen)
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True
    assert "sound" in str(report)


def test_store_without_rows_or_with_one_row(tmp_path: Path) -> None:
    featstore.pack(tmp_path / "s", {"none": np.zeros((0, 3)), "one": np.ones((1, 5000))}).close()
    assert verify(tmp_path / "s").ok


def test_rows_larger_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 5000 B and of 17 B through blocks of one page: each is put together from several."""
    values = (np.arange(40 * 5000) % 253).astype(np.uint8)
    tables = {"wide": values.reshape(40, 5000), "odd": values[: 17 * 3000].reshape(3000, 17)}
    order = {name: np.arange(len(rows))[::-1].copy() for name, rows in tables.items()}
    featstore.pack(tmp_path / "s", tables, permutation=order).close()
    monkeypatch.setattr("featstore.scrub.blocks.BLOCK_BYTES", 4096)
    monkeypatch.setattr(Numbers, "PIECE", 100)
    assert verify(tmp_path / "s").ok


@settings(max_examples=30)
@given(data=st.data())
def test_any_flipped_bit_is_found(
    clean: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    store = shutil.copytree(clean, folder / "store")
    files = sorted(str(p.relative_to(store)) for p in store.rglob("*") if p.is_file() and p.name != "lock")
    path = data.draw(st.sampled_from(files))
    offset = data.draw(st.integers(0, (store / path).stat().st_size - 1))
    flip(store / path, offset, data.draw(st.integers(0, 7)))
    try:
        report = verify(store)
    except FormatError:
        assert path == "featstore.json"
    else:
        assert not report.ok
        assert path in {p.path for p in report.problems}
        if "/rows/c." in path:
            assert [p.page for p in report.problems if p.what == "page checksum"] == [offset // 4096]
    finally:
        shutil.rmtree(folder)


def test_all_bad_pages_are_listed_and_told_from_bad_checksums(store: Path) -> None:
    flip(store / CHUNK, 5)
    flip(store / CHUNK, 4096 + 5)
    flip(store / "g000001/tables/nodes/rows/c.0.0", 8191)
    report = verify(store)
    pages = [(p.path[-5:], p.page, p.offset) for p in report.problems]
    assert pages == [("c.0.0", 1, 4096), ("c.2.0", 0, 0), ("c.2.0", 1, 4096)]
    assert {p.what for p in report.problems} == {"page checksum"}
    assert report.problem_count == 3

    shutil.copy(store / SUMS, store / "kept")
    pages_per_chunk = (store / CHUNK).stat().st_size // 4096
    flip(store / SUMS, 4 * 2 * pages_per_chunk)  # of page 0 of chunk 2
    report = verify(store)
    assert ("file digest", SUMS) in found(report)
    assert ("file digest", CHUNK) in found(report)  # which pages of it are bad cannot be said any more
    assert ("stored checksum", SUMS) in found(report)
    assert report.unlisted == ("kept",)


def test_a_bad_checksum_of_a_good_page(store: Path) -> None:
    flip(store / SUMS, 4 * 3 + 1)
    report = verify(store)
    assert sorted(found(report)) == [("file digest", SUMS), ("stored checksum", SUMS)]
    stored = next(p for p in report.problems if p.what == "stored checksum")
    assert stored.offset == 12
    assert int(stored.expected, 16) ^ int(stored.actual, 16) == 1 << 8


@pytest.mark.parametrize(
    "path", [CHUNK, SUMS, "g000001/arrays/y/c.0", "g000001/tables/nodes/row_of_node/c.0"]
)
def test_missing_truncated_and_grown_files(store: Path, path: str) -> None:
    with open(store / path, "ab") as file:
        file.write(b"x")
    assert ("file size", path) in found(verify(store))
    os.truncate(store / path, 7)
    with pytest.raises(featstore.errors.CorruptionError):
        featstore.open(store)
    assert ("file size", path) in found(verify(store))
    (store / path).unlink()
    flip(store / "g000001/tables/odd/rows/c.0.0", 9)
    report = verify(store)
    assert set(found(report)) == {("missing file", path), ("page checksum", "g000001/tables/odd/rows/c.0.0")}


def test_a_generation_that_is_gone(store: Path) -> None:
    shutil.rmtree(store / "g000001")
    report = verify(store)
    assert report.problem_count == len(manifest_of(store)["files"])
    assert {p.what for p in report.problems} == {"missing file"}
    assert (report.files, report.bytes) == (0, 0)


def test_links_pipes_and_directories_are_not_read(store: Path, clean: Path) -> None:
    (store / CHUNK).unlink()
    (store / CHUNK).symlink_to(clean / CHUNK)
    (store / "g000001/arrays/y/c.0").unlink()
    os.mkfifo(store / "g000001/arrays/y/c.0")
    (store / SUMS).unlink()
    (store / SUMS).mkdir()
    assert {("file kind", p) for p in (CHUNK, SUMS, "g000001/arrays/y/c.0")} == set(found(verify(store)))


def test_a_directory_that_is_a_link(store: Path, clean: Path) -> None:
    shutil.rmtree(store / "g000001/tables/odd")
    (store / "g000001/tables/odd").symlink_to(clean / "g000001/tables/odd")
    report = verify(store)
    assert not report.ok
    assert all(p.what == "file kind" and p.path.startswith("g000001/tables/odd/") for p in report.problems)
    assert report.unlisted == ("g000001/tables/odd",)


def test_foreign_files_are_named_and_no_problem(store: Path) -> None:
    (store / "notes.txt").write_text("mine")
    (store / "g000001/tables/odd/rows/c.9.0").write_bytes(b"stray")
    for known in ("featstore.json.tmp", "g000002.journal", "lock"):
        (store / known).write_text("")
    report = verify(store)
    assert report.ok
    assert report.unlisted == ("g000001/tables/odd/rows/c.9.0", "notes.txt")
    assert report.unlisted_count == 2
    assert "notes" in str(report) or "c.9.0" in str(report)


def test_problems_are_capped_in_the_list_and_all_counted(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("featstore.scrub.report.PROBLEMS_MAX", 2)
    for chunk in range(5):
        path = store / f"g000001/tables/nodes/rows/c.{chunk}.0"
        for at in range(0, path.stat().st_size, 4096):
            flip(path, at)
    report = verify(store)
    named = [problem.path for problem in report.problems]
    assert len(named) < report.problem_count
    assert {f"g000001/tables/nodes/rows/c.{chunk}.0" for chunk in range(5)} == set(named)


def test_maps_that_are_no_permutations(store: Path) -> None:
    for name in ("node_of_row", "rows_by_degree"):
        values = np.fromfile(store / f"g000001/tables/nodes/{name}/c.0", "<i4")
        values[0] = values[1]
        replace_file(store, f"g000001/tables/nodes/{name}/c.0", values.tobytes())
    report = verify(store)
    assert set(found(report)) == {
        ("map", f"g000001/tables/nodes/{n}/c.0") for n in ("node_of_row", "rows_by_degree")
    }


def test_two_permutations_that_are_not_inverse(store: Path) -> None:
    path = "g000001/tables/nodes/node_of_row/c.0"
    values = np.fromfile(store / path, "<i4")
    values[[3, 4]] = values[[4, 3]]
    replace_file(store, path, values.tobytes())
    assert found(verify(store)) == [("map", path)]


def test_map_values_out_of_range_name_the_place(store: Path) -> None:
    path = "g000001/tables/nodes/row_of_node/c.0"
    values = np.fromfile(store / path, "<i4")
    values[5] = ROWS
    replace_file(store, path, values.tobytes())
    first = verify(store).problems[0]
    assert (first.path, first.offset, first.actual) == (path, 20, str(ROWS))


@pytest.mark.parametrize("offsets", [[0, 899], [1, 900], [900, 900], [0, 901]])
def test_partition_offsets(store: Path, offsets: list[int]) -> None:
    path = "g000001/tables/nodes/partition_offsets/c.0"
    replace_file(store, path, np.array(offsets, "<i8").tobytes())
    assert found(verify(store)) == [("map", path)]


def test_rows_exchanged_by_the_writer(store: Path) -> None:
    """Every checksum fits, but two rows stand in each other's place: only the digest from end to end sees
    it."""
    from featstore.base.checksum import crc_pages

    path = "g000001/tables/odd/rows/c.0.0"
    data = bytearray((store / path).read_bytes())
    data[0:7], data[7:14] = data[7:14], data[0:7]
    replace_file(store, path, bytes(data))
    sums = crc_pages(np.frombuffer(bytes(data), np.uint8)).tobytes()
    replace_file(store, "g000001/tables/odd/page_checksums/c.0", sums)
    assert found(verify(store)) == [("rows digest", "g000001/tables/odd/rows")]


def test_padding_that_is_not_zero(store: Path) -> None:
    from featstore.base.checksum import crc_pages

    chunks = sorted(
        (store / "g000001/tables/nodes/rows").glob("c.*"), key=lambda p: int(p.name.split(".")[1])
    )
    data = bytearray(chunks[-1].read_bytes())
    assert ROWS * 64 % len(data)
    data[-1] = 1
    replace_file(store, str(chunks[-1].relative_to(store)), bytes(data))
    sums = np.fromfile(store / SUMS, "<u4")
    own = crc_pages(np.frombuffer(bytes(data), np.uint8))
    sums[-len(own) :] = own
    replace_file(store, SUMS, sums.tobytes())
    assert found(verify(store)) == [("padding", str(chunks[-1].relative_to(store)))]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shape", [900, 15]),
        ("data_type", "int32"),
        ("codecs", [{"name": "bytes"}, {"name": "gzip"}]),
        ("codecs", 3),
        ("codecs", [{"name": "bytes", "configuration": {"endian": "big"}}]),
        ("chunk_key_encoding", {"name": "v2"}),
        ("zarr_format", 2),
    ],
)
def test_zarr_metadata_that_contradicts_the_manifest(store: Path, key: str, value: Any) -> None:
    path = "g000001/tables/nodes/rows/zarr.json"
    metadata = json.loads((store / path).read_text()) | {key: value}
    replace_file(store, path, json.dumps(metadata).encode())
    assert found(verify(store)) == [("metadata", path)]


def test_zarr_metadata_that_is_not_listed(store: Path) -> None:
    path = "g000001/arrays/y/zarr.json"
    rewrite(store, lambda m: m.update(files=[f for f in m["files"] if f["path"] != path]))
    assert found(verify(store)) == [("metadata", path)]


def test_a_manifest_that_was_edited(store: Path) -> None:
    manifest = manifest_of(store)
    manifest["tables"]["nodes"]["statistics"]["maximum"] = 1e9
    (store / "featstore.json").write_text(json.dumps(manifest, indent=1))
    assert found(verify(store)) == [("manifest uuid", "featstore.json")]


# Graphs: that of `nodes` has 900 edges and 9 hubs.

GRAPH = "g000001/graphs/nodes"


def replace_numbers(store: Path, path: str, change: Callable[[Any], None]) -> None:
    """Change the numbers of a file of a graph; every checksum fits afterwards, and no digest of the rows is
    there to tell."""
    from featstore.base.checksum import crc_pages

    numbers = np.fromfile(store / path, "<i8" if "offsets" in path else "<i4")
    change(numbers)
    replace_file(store, path, numbers.tobytes())
    part, _, chunk = path.removeprefix(GRAPH + "/").partition("/rows/c.")
    if not chunk:
        return
    path = f"{GRAPH}/{part}/page_checksums/c.0"
    sums = np.fromfile(store / path, "<u4")
    own = crc_pages(np.frombuffer(numbers.tobytes(), np.uint8))
    sums[int(chunk) * len(own) : (int(chunk) + 1) * len(own)] = own
    replace_file(store, path, sums.tobytes())

    def forget(manifest: dict[str, Any]) -> None:
        graph = manifest["graphs"]["nodes"]
        (graph["hubs"]["sources"] if part == "hubs" else graph[part])["statistics"].pop("rows_digest")

    rewrite(store, forget)


def put(place: int, value: int) -> Callable[[Any], None]:
    return lambda numbers: numbers.__setitem__(place, value)


def swap(a: int, b: int) -> Callable[[Any], None]:
    def exchange(numbers: Any) -> None:
        assert numbers[a] != numbers[b]
        numbers[[a, b]] = numbers[[b, a]]

    return exchange


@pytest.fixture(params=["pieces as they are", "tiny pieces"])
def _pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = sys.modules[module.scrub_graph.__module__]
    if request.param == "tiny pieces":
        monkeypatch.setattr(Numbers, "PIECE", 7)
        for name, value in (("_WINDOW", 2), ("_MARKS", 100)):
            monkeypatch.setattr(graphs, name, value)


@pytest.mark.usefixtures("_pieces")
def test_a_sound_graph(clean: Path) -> None:
    with featstore.open(clean) as opened:
        graph = opened.graphs["nodes"]
        assert (graph.edges, graph.hubs) == (ROWS, 9)
    assert verify(clean).ok


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize(
    ("path", "change", "offset"),
    [
        ("offsets/rows/c.0", put(0, 1), 0),
        ("offsets/rows/c.0", put(5, 10**9), 48),
        ("offsets/rows/c.0", put(0, -1), 0),
        ("offsets/rows/c.0", put(ROWS, ROWS + 1), 8 * ROWS),
        ("sources/rows/c.0", put(3, ROWS), 12),
        ("sources/rows/c.0", put(3, -1), 12),
        ("hub_rows/c.0", put(8, ROWS), 32),
        ("hub_offsets/c.0", put(9, 0), 72),
        ("hub_offsets/c.0", put(0, 1), 0),
        ("hubs/rows/c.0", put(2, ROWS), 8),
    ],
)
def test_graphs_whose_numbers_are_impossible(
    store: Path, path: str, change: Callable[[Any], None], offset: int
) -> None:
    replace_numbers(store, f"{GRAPH}/{path}", change)
    first = verify(store).problems[0]
    assert (first.what, first.path, first.offset) == ("graph", f"{GRAPH}/{path}", offset), first


@pytest.mark.usefixtures("_pieces")
def test_a_hub_that_is_named_twice(store: Path) -> None:
    path = f"{GRAPH}/hub_rows/c.0"
    replace_numbers(store, path, lambda rows: rows.__setitem__(8, rows[1]))
    report = verify(store)
    assert found(report) == [("graph", path)]
    assert (report.problems[0].offset, report.problems[0].expected) == (32, "distinct hubs")


@pytest.mark.usefixtures("_pieces")
def test_hub_lists_that_are_not_the_lists_they_copy(store: Path) -> None:
    path = f"{GRAPH}/hubs/rows/c.0"
    with featstore.open(store) as opened:
        _, ends = opened.graphs["nodes"].hub_rows()
        long = int(np.flatnonzero(np.diff(ends) >= 2)[0])
        begin = int(ends[long])
    clean_copy = np.fromfile(store / path, "<i4")
    replace_numbers(
        store, path, swap(begin, begin + 1) if clean_copy[begin] != clean_copy[begin + 1] else put(begin, 1)
    )
    report = verify(store)
    assert found(report) == [("graph", path)]
    assert f"in hub {long} the list of row" in report.problems[0].expected
    assert report.problems[0].offset == 4 * begin


@pytest.mark.usefixtures("_pieces")
def test_hubs_in_each_others_place(store: Path) -> None:
    """The lists stay where they are, and the rows that they belong to are exchanged."""
    with featstore.open(store) as opened:
        rows, ends = opened.graphs["nodes"].hub_rows()
    sizes = np.diff(ends)
    other = int(np.flatnonzero(sizes != sizes[0])[0])
    replace_numbers(store, f"{GRAPH}/hub_rows/c.0", swap(0, other))
    report = verify(store)
    assert {what for what, _ in found(report)} == {"graph"}
    assert f"the list of row {rows[other]}" in report.problems[0].expected


@pytest.mark.parametrize("part", ["offsets", "sources", "hubs"])
def test_flipped_bytes_of_a_graph_are_named_by_page(store: Path, part: str) -> None:
    path = f"{GRAPH}/{part}/rows/c.0"
    flip(store / path, 9)
    report = verify(store)
    assert [(p.what, p.path, p.page) for p in report.problems] == [("page checksum", path, 0)]


def test_rows_digest_of_a_graphs_table(store: Path) -> None:
    rewrite(store, lambda m: m["graphs"]["nodes"]["sources"]["statistics"].update(rows_digest="0" * 16))
    assert found(verify(store)) == [("rows digest", f"{GRAPH}/sources/rows")]


@pytest.mark.parametrize(
    "path", ["hub_rows", "hub_offsets", "offsets/rows", "sources/page_checksums", "hubs/partition_offsets"]
)
def test_zarr_metadata_of_a_graph(store: Path, path: str) -> None:
    path = f"{GRAPH}/{path}/zarr.json"
    metadata = json.loads((store / path).read_text()) | {"data_type": "float32"}
    replace_file(store, path, json.dumps(metadata).encode())
    assert found(verify(store)) == [("metadata", path)]


@settings(max_examples=25)
@given(data=st.data())
def test_numbers_are_taken_as_numpy_takes_them(clean: Path, data: st.DataObject) -> None:
    with featstore.open(clean) as opened:
        entry = opened.manifest.all_tables[data.draw(st.sampled_from(["nodes/offsets", "nodes/sources"]))]
    numbers = Numbers(clean, entry)
    whole = np.concatenate([np.fromfile(clean / path, numbers.dtype) for path in numbers.paths])[: entry.rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Numbers, "PIECE", data.draw(st.integers(1, 400)))
        wanted = np.array(sorted(data.draw(st.sets(st.integers(0, entry.rows - 1), max_size=50))), np.int64)
        assert numbers.take(wanted).tolist() == whole[wanted].tolist()
        assert np.concatenate([values for _, values in numbers.pieces()]).tolist() == whole.tolist()
        first = data.draw(st.integers(0, entry.rows))
        assert numbers.read(first, 300).tolist() == whole[first : first + 300].tolist()


def test_unreadable_pages_are_listed_and_the_rest_is_read(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device with a bad sector: page 1 of a chunk cannot be read, whatever the size of the read that covers
    it."""
    flip(store / CHUNK, 1)
    bad = os.stat(store / CHUNK).st_ino
    real = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        if os.fstat(descriptor).st_ino == bad and offset < 8192 and offset + len(buffers[0]) > 4096:
            raise OSError(errno.EIO, "bad sector")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    report = verify(store)
    expected = [("unreadable page", CHUNK, 1), ("page checksum", CHUNK, 0)]
    assert [(p.what, p.path, p.page) for p in report.problems] == expected


def test_file_systems_without_direct_io(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    report = verify(store)
    assert report.ok
    assert report.access == "buffered"


def test_manifests_that_cannot_be_read_raise_as_open_does(store: Path, tmp_path: Path) -> None:
    with pytest.raises(IncompleteStoreError):
        verify(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(IncompleteStoreError):
        verify(tmp_path / "empty")
    text = (store / "featstore.json").read_text()
    (store / "featstore.json").write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(FormatVersionError):
        verify(store)
    (store / "featstore.json").write_text(text[:-5])
    with pytest.raises(FormatError):
        verify(store)
    with pytest.raises(ValueError, match="access"):
        verify(store, access="mapped")


def test_the_generation_is_held_meanwhile(store: Path) -> None:
    import fcntl

    held: list[bool] = []

    def look(_: Any) -> None:
        descriptor = os.open(store / "g000001", os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.append(False)
        except BlockingIOError:
            held.append(True)
        finally:
            os.close(descriptor)

    verify(store, progress=look)
    assert held
    assert all(held)
