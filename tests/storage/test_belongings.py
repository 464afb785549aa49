"""What is deleted is featstore's own, and reached through no link, whatever is swapped meanwhile."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import DeviceError, FeatstoreError, FormatError, StoreExistsError, StoreLockedError
from featstore.storage import belongings
from featstore.storage.belongings import GENERATION, NOTHING, SPILL, TRACE, Belongings, Surveyed, survey
from featstore.storage.disk import Disk
from featstore.storage.locks import Lock


class Watching(Disk):
    """A disk that does not wait, and notes what it found foreign in a directory that featstore made."""

    def __init__(self) -> None:
        self.foreign: list[Path] = []
        self.removed = 0

    def fsync(self, file: Any) -> None:
        pass

    def fsync_dir(self, path: Path) -> None:
        pass

    def rmtree(self, path: Path, own: Belongings) -> Surveyed:
        found = super().rmtree(path, own)
        self.foreign += found.foreign if own is not NOTHING else []
        self.removed += found.files
        return found


def tree_of(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


def test_all_that_packing_and_compiling_make_is_their_own(tmp_path: Path) -> None:
    """Nothing stays in a spill, and nothing in a generation is taken for foreign."""
    disk, rng = Watching(), np.random.default_rng(0)
    small = rng.standard_normal((3000, 8)).astype(np.float32)
    edges = rng.integers(0, len(small), (2, 3_000_000))  # more than the budget: the graph is built on disk
    graph = {"memory": "18MiB", "graph": edges, "arrays": {"y": np.arange(9)}, "order": "degree"}
    with featstore.pack(tmp_path / "g", small, disk=disk, **graph) as store:
        assert survey(store.path / "g000001", GENERATION).foreign == []
    rows = rng.standard_normal((30_000, 64)).astype(np.float32)  # more than the budget: buckets are spilled

    def blocks() -> Iterator[np.ndarray[Any, Any]]:
        yield from np.array_split(rows, 20)

    options = {
        "memory": "6MiB",
        "order": "permutation",
        "permutation": rng.permutation(len(rows)),
        "disk": disk,
    }
    with featstore.pack(tmp_path / "s", blocks(), **options) as store:
        assert survey(store.path / "g000001", GENERATION).foreign == []
        batches = [rng.integers(0, len(rows), 400) for _ in range(12)]
        with featstore.Trace.record(batches, tmp_path / "t", disk=disk) as trace:
            for residency in ("min", "fixed"):
                for dry_run in (True, False):
                    made = featstore.compile_trace(
                        store, trace, "x", memory="64MiB", cache=100_000, device_memory=50_000,
                        residency=residency, disk="2x", overwrite=True, dry_run=dry_run, disk_door=disk,
                    )  # fmt: skip
                    if isinstance(made, featstore.Store):
                        assert survey(made.path / made.manifest.generation, GENERATION).foreign == []
                        made.close()
        assert survey(tmp_path / "t", TRACE).foreign == []
    assert disk.foreign == []
    assert disk.removed > 20
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == [
        "featstore.json",
        "g000001",
        "lock",
        "packs",
    ]


def a_generation(path: Path) -> Path:
    (path / "tables/x/rows").mkdir(parents=True)
    for name in ("zarr.json", "tables/zarr.json", "tables/x/rows/zarr.json", "tables/x/rows/c.0.0"):
        (path / name).write_bytes(b"ours")
    return path


def test_what_is_foreign_stays_where_it_is(tmp_path: Path) -> None:
    path, outside = a_generation(tmp_path / "g"), tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep/c.0").write_text("mine")
    (path / "notes.txt").write_text("mine")
    (path / "tables/x/rows/c.0.0~").write_text("mine")
    (path / "mine").mkdir()
    (path / "graphs").symlink_to(outside)
    (path / "tables/y").symlink_to(outside / "deep")
    (path / "arrays").write_text("mine")
    os.mkfifo(path / "tables/c.0")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path / "tables/x/zarr.json"))
    foreign = [
        "arrays",
        "graphs",
        "mine",
        "notes.txt",
        "tables/c.0",
        "tables/x/rows/c.0.0~",
        "tables/x/zarr.json",
        "tables/y",
    ]
    for found in (survey(path, GENERATION), Disk().rmtree(path, GENERATION), Disk().rmtree(path, GENERATION)):
        assert sorted(str(p.relative_to(path)) for p in found.foreign) == foreign
    assert tree_of(path) == sorted([*foreign, "tables", "tables/x", "tables/x/rows"])
    assert (outside / "deep/c.0").read_text() == "mine"


def test_all_that_is_ours_goes(tmp_path: Path) -> None:
    path = a_generation(tmp_path / "g")
    found = Disk().rmtree(path, GENERATION)
    assert (found.files, found.bytes, found.foreign) == (4, 16, [])
    assert not path.exists()
    assert Disk().rmtree(path, GENERATION) == Surveyed()


@pytest.mark.parametrize("where", ["tables", "tables/x"])
def test_a_directory_swapped_for_a_link_between_look_and_deed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path, victim = a_generation(tmp_path / "g"), a_generation(tmp_path / "victim")
    before, name, real = tree_of(victim), where.rpartition("/")[2], os.stat

    def swapping(given: Any, **options: Any) -> os.stat_result:
        status = real(given, **options)
        if given == name and not (path / where).is_symlink():
            (path / where).rename(tmp_path / "aside")
            (path / where).symlink_to(victim / where)
        return status

    monkeypatch.setattr(belongings.os, "stat", swapping)
    found = Disk().rmtree(path, GENERATION)
    monkeypatch.undo()
    assert found.foreign == [path / where]
    assert tree_of(victim) == before


def test_nothing_is_done_through_a_link_on_the_way(tmp_path: Path) -> None:
    inside, link = tmp_path / "real/inside", tmp_path / "link"
    inside.mkdir(parents=True)
    (inside / "file").write_text("mine")
    link.symlink_to(tmp_path / "real")
    disk, path = Disk(), link / "inside"
    deeds = [
        lambda: disk.mkdir(path / "new"), lambda: disk.mkdir(link), lambda: disk.create(path / "new"),
        lambda: disk.unlink(path / "file"), lambda: disk.rename(path / "file", path / "other"),
        lambda: disk.rename(inside / "file", path / "other"), lambda: disk.rmtree(path, GENERATION),
        lambda: disk.rmtree(link, SPILL), lambda: disk.fsync_dir(path),
        lambda: disk.write_file(path / "file", b"x"), lambda: disk.replace_file(path / "file", b"x"),
        lambda: Lock(path / "lock", "held", "wait"),
    ]  # fmt: skip
    for deed in deeds:
        with pytest.raises(FormatError, match=rf"{link} is a symbolic link"):
            deed()
    assert tree_of(tmp_path) == ["link", "real", "real/inside", "real/inside/file"]
    assert (inside / "file").read_text() == "mine"


def test_what_is_no_file_is_not_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "target").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("fifo", "link"):
        for deed in (Disk().create, lambda path: Lock(path, "held", "wait")):
            with pytest.raises(FormatError, match=name):
                deed(tmp_path / name)
    assert (tmp_path / "target").read_text() == "mine"


def test_a_lock_is_taken_from_nobody(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = Lock(path, "it is held", "do this")
    with pytest.raises(StoreLockedError, match=rf"it is held by process {os.getpid()} \(this one\); do this"):
        Lock(path, "it is held", "do this")
    first.release()
    second = Lock(path, "it is held", "do this")
    second.release(remove=True)
    second.release()
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        Lock(path, "it is held", "do this", make=False)
    with pytest.raises(DeviceError, match="nowhere"):
        Lock(tmp_path / "nowhere/lock", "it is held", "do this")


@pytest.mark.parametrize("marked", [False, True])
def test_a_file_that_is_no_lock_is_left_alone(tmp_path: Path, marked: bool) -> None:
    path = tmp_path / "lock"
    for content in (b"[[package]]\n", b"12 monkeys", b"\0" * 100, *([b"12\n"] if marked else [])):
        path.write_bytes(content)
        with pytest.raises(FormatError, match="is no lock of featstore's"):
            Lock(path, "it is held", "do this", marked=marked)
        assert path.read_bytes() == content


def test_a_lock_that_was_removed_while_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder ended between our opening the file and locking it: what we hold then is no name's file."""
    import fcntl

    from featstore.storage import locks

    path, real, turns = tmp_path / "lock", fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        real(descriptor, operation)
        if not turns:
            turns.append(1)
            path.unlink()

    monkeypatch.setattr(locks.fcntl, "flock", late)
    lock = Lock(path, "it is held", "do this")
    monkeypatch.undo()
    with pytest.raises(StoreLockedError):
        Lock(path, "it is held", "do this")
    lock.release(remove=True)


def test_packing_beside_foreign_things_touches_none(tmp_path: Path) -> None:
    """Names that look like generations, a lock of another program, a manifest that is a pipe."""
    store, rows = tmp_path / "s", np.zeros((10, 4), np.float32)
    (store / "g000001/photos").mkdir(parents=True)
    (store / "g000001/photos/one.jpg").write_text("mine")
    (store / "g000003.journal").write_text("my journal")
    (store / "g000004.spill").symlink_to(tmp_path)
    for overwrite in (False, True, True):
        featstore.pack(store, rows, overwrite=overwrite).close()
    with featstore.open(store) as opened:
        assert opened.manifest.generation == "g000007"
    assert (store / "g000001/photos/one.jpg").read_text() == "mine"
    assert (store / "g000003.journal").read_text() == "my journal"
    assert (store / "g000004.spill").is_symlink()
    for name, text in (("lock", "poetry"), ("featstore.json", "")):
        other = tmp_path / name
        other.mkdir()
        (other / name).write_text(text) if text else os.mkfifo(other / name)
        with pytest.raises(FeatstoreError, match="left alone"):
            featstore.pack(other, rows, overwrite=True)
        assert set(tree_of(other)) <= {name, "lock"}
        assert not text or (other / name).read_text() == text


@pytest.mark.parametrize("name", ["trace.log", "recording.log", "recording.json"])
def test_recording_beside_foreign_files_touches_none(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(StoreExistsError, match="left alone"):
            featstore.Trace.record([np.arange(3)], tmp_path, **options)
    assert (tmp_path / name).read_text() == "mine"
