"""Names in packs/: checked before anything is touched, held by one at a time; and what gc makes of what
others have left there."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled_support import QuickDisk
from plain_writes import write_plainly

import featstore
from featstore.errors import ArgumentError, FormatError, SourceError, StoreExistsError, StoreLockedError
from featstore.loaders import rolling as rolling_module
from featstore.loaders.rolling import RollingLoader
from featstore.scrub.collection import Collection
from featstore.storage.generations import IN_USE
from featstore.storage.packs import preparing
from featstore.tiers import saved

ROWS = 200
FEATURES = np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolling_module, "Disk", QuickDisk)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[featstore.Store]:
    with featstore.pack(tmp_path / "s", FEATURES, disk=QuickDisk()) as made:
        yield made


def episode(number: int) -> list[np.ndarray[Any, Any]]:
    return [np.random.default_rng([number, k]).integers(0, ROWS, 30) for k in range(3)]


def rolling(store: featstore.Store, name: str = "train", **options: Any) -> RollingLoader:
    return RollingLoader(store, episode, name=name, memory="64MiB", disk_door=QuickDisk(), **options)


def compiled(store: featstore.Store, name: str) -> None:
    with featstore.Trace.record(
        episode(0), store.path.parent / "t", overwrite=True, disk=QuickDisk()
    ) as trace:
        made = featstore.compile_trace(
            store, trace, name, memory="64MiB", disk_door=QuickDisk(), overwrite=True
        )
        assert isinstance(made, featstore.Store)
        made.close()


def tree(path: Path) -> dict[str, bytes | str | None]:
    return {
        str(p.relative_to(path)): os.readlink(p)
        if p.is_symlink()
        else p.read_bytes()
        if p.is_file()
        else None
        for p in path.rglob("*")
        if p.name != "lock"
    }


def collected(store: featstore.Store, **options: Any) -> Collection:
    return Collection(store.path, disk=QuickDisk(), **options)


BAD_NAMES = [
    "",
    ".",
    "..",
    "../w",
    "a/b",
    "a\0b",
    "-x",
    ".x",
    "x\n",
    "ü",
    "x" * 129,
    "x.trace",
    "x.rolling",
    "x.forecast",
    "x.preparing",
]


@pytest.mark.parametrize("mode", ["rolling", "compiled"])
def test_a_name_is_looked_at_before_anything_is_touched(
    tmp_path: Path, store: featstore.Store, mode: str
) -> None:
    victims = ["w", "w-0", "w-1", "w-0.trace", "w.trace"]
    for victim in victims:
        (tmp_path / victim).mkdir()
        (tmp_path / victim / "mine").write_text("mine")
    before = tree(tmp_path)
    for name in [*BAD_NAMES, str(tmp_path / "w"), "../../w", None, 7, b"w"]:
        if name is not None:  # which is as good as not given
            with pytest.raises(ArgumentError, match="not allowed"):
                store.loader(episode, mode=mode, memory="64MiB", name=name)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="not allowed"):
            featstore.compile_trace(store, tmp_path / "no trace", name)  # type: ignore[arg-type]
    for name in ["", ".", "../c", "a/b", str(tmp_path / "w"), "x\n", None]:
        with pytest.raises(SourceError, match="not allowed"):
            saved.save(store, name, {})  # type: ignore[arg-type]
    assert tree(tmp_path) == before


def test_two_loaders_of_one_name(store: featstore.Store) -> None:
    with rolling(store) as first:
        walk = iter(first)
        next(walk)
        with pytest.raises(
            StoreLockedError, match=rf"'train' .* in use by process {os.getpid()} .*name= of its own"
        ):
            rolling(store)
        with pytest.raises(StoreLockedError, match="name= of its own"):
            store.loader(episode, mode="rolling", memory="64MiB", name="train")
        with rolling(store, "other") as second:
            for mine, theirs in zip(islice(walk, 7), islice(second, 1, 8), strict=True):
                assert mine.x.tobytes() == theirs.x.tobytes()
    with rolling(store) as again:
        next(iter(again))


OTHER = """
import sys
from pathlib import Path
from featstore.storage.packs import rolling
from featstore.errors import StoreLockedError
try:
    rolling(Path(sys.argv[1]), "train")
except StoreLockedError as error:
    print(error)
"""


def test_the_other_process_is_told_who_has_the_name(store: featstore.Store) -> None:
    with rolling(store) as first:
        next(iter(first))
        first._episodes[1].result()
        before = tree(store.path)
        packs = str(store.path / "packs")
        other = subprocess.run(
            [sys.executable, "-c", OTHER, packs], capture_output=True, text=True, timeout=60, check=True
        )
        assert f"in use by process {os.getpid()};" in other.stdout
        assert tree(store.path) == before


def test_one_prepares_a_name_at_a_time(store: featstore.Store) -> None:
    seen: list[str] = []

    class Sampler:
        def __iter__(self) -> Iterator[Any]:
            with pytest.raises(StoreLockedError, match=r"'train' .* being prepared by process .*reuse=True"):
                store.loader(episode(0), mode="compiled", memory="64MiB", name="train")
            seen.append("told")
            return iter(episode(0))

    with store.loader(Sampler(), mode="compiled", memory="64MiB", name="train") as loader:
        assert len(list(loader)) == 3
    assert seen == ["told"]
    assert sorted(p.name for p in (store.path / "packs").iterdir()) == ["train"]


def test_a_loader_takes_nobody_elses_compiled_trace(store: featstore.Store) -> None:
    compiled(store, "train-0")
    before = tree(store.path)
    with pytest.raises(StoreExistsError, match="another name"):
        rolling(store)
    assert tree(store.path) == before
    with rolling(store, "other") as loader:
        next(iter(loader))
        with pytest.raises(StoreExistsError, match="belongs to the loader"):
            compiled(store, "other-0")
        next(iter(loader))


def killed(store: featstore.Store, name: str = "train") -> None:
    """What a loader leaves that is killed when its first episode trains, and the second is ready."""
    with rolling(store, name) as loader:
        next(iter(loader))
        loader._episodes[1].result()
        loader._traces[2].result()
        shutil.copytree(store.path / "packs", store.path.parent / "left")
    shutil.copytree(store.path.parent / "left", store.path / "packs", dirs_exist_ok=True)
    shutil.rmtree(store.path.parent / "left")


def test_gc_removes_the_episodes_of_a_killed_run_and_of_no_other(store: featstore.Store) -> None:
    compiled(store, "mine-0")
    killed(store)
    (store.path / "packs/train-0.trace").mkdir(exist_ok=True)
    with rolling(store, "alive") as alive:
        walk = iter(alive)
        next(walk)
        alive._episodes[1].result()
        alive._traces[2].result()
        planned = collected(store, dry_run=True)
        assert (store.path / "packs/train-0/featstore.json").exists()
        done = collected(store)
        gone = {"packs/train-0", "packs/train-1", "packs/train-0.trace", "packs/train.rolling"}
        assert set(done.removed) == set(planned.removed) == gone
        assert done.removed["packs/train-0"] > 1000
        held = {"packs/alive.rolling", "packs/alive-0", "packs/alive-1", "packs/alive-0.trace"}
        assert set(done.held) == held
        assert f"process {os.getpid()}" in done.held["packs/alive-0"]
        assert done.unproven == {}
        assert len(list(islice(walk, 8))) == 8
    assert sorted(p.name for p in (store.path / "packs").iterdir()) == ["mine-0"]
    assert set(collected(store).removed) == set()


def test_looking_at_what_gc_would_remove_changes_nothing(store: featstore.Store) -> None:
    compiled(store, "mine")
    killed(store)
    packs = store.path / "packs"
    preparing(packs, "other").release()
    featstore.Trace.record(episode(0), packs / "other.trace", disk=QuickDisk()).close()
    for lock in [*store.path.glob("**/lock"), packs / "train.rolling", packs / "other.preparing"]:
        lock.write_text("featstore 999999\n")  # of a process that is gone
        lock.chmod(0o444)
    (packs / "mine/lock").unlink()
    before = tree(store.path)
    planned = collected(store, unfinished=True, stale=True, dry_run=True)
    assert {"packs/train-0", "packs/train.rolling", "packs/other.preparing"} <= set(planned.removed)
    assert tree(store.path) == before


def test_gc_makes_room_on_a_full_disk(store: featstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(store)

    def full(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_plainly(monkeypatch)
    monkeypatch.setattr("os.pwrite", full)
    assert {"packs/train-0", "packs/train-1", "packs/train.rolling"} <= set(collected(store).removed)
    assert list((store.path / "packs").iterdir()) == []


def test_a_loader_of_the_name_removes_what_a_killed_one_left(store: featstore.Store) -> None:
    killed(store)
    with rolling(store) as loader:
        assert not (store.path / "packs/train-1").exists()
        next(iter(loader))
    assert list((store.path / "packs").iterdir()) == []


def test_gc_removes_what_a_killed_preparation_left_and_of_no_other(store: featstore.Store) -> None:
    packs = store.path / "packs"
    packs.mkdir()
    lock = preparing(packs, "train")
    featstore.Trace.record(episode(0), packs / "train.trace", disk=QuickDisk()).close()
    done = collected(store, unfinished=True)  # while the trace is being compiled, nobody writes it
    assert (done.removed, set(done.held)) == ({}, {"packs/train.preparing", "packs/train.trace"})
    lock.release()
    assert set(collected(store, unfinished=True, dry_run=True).removed) == {
        "packs/train.preparing",
        "packs/train.trace",
    }
    assert set(collected(store).removed) == {"packs/train.preparing"}
    assert set(collected(store, unfinished=True).removed) == {"packs/train.trace"}
    assert list(packs.iterdir()) == []


def foreign_things(place: Path, outside: Path) -> None:
    """Directories and files as people have them, and links."""
    (place / "photos/2024").mkdir(parents=True)
    (place / "photos/2024/one.jpg").write_text("mine")
    (place / "photos/lock").write_text("mine")
    (place / "empty").mkdir()
    (place / "notes.txt").write_text("mine")
    (place / "link").symlink_to(outside)
    (place / "old.forecast").mkdir()
    (place / "my.trace").mkdir()
    (place / "my.trace/trace.log").write_text("mine")
    (place / "x.rolling").write_text("mine")
    (place / "x-0").mkdir()
    (place / "x-0/mine").write_text("mine")


def test_gc_leaves_what_is_not_proven_and_names_it(tmp_path: Path, store: featstore.Store) -> None:
    outside = tmp_path / "outside"
    (outside / "g000009").mkdir(parents=True)
    compiled(store, "ours")
    foreign_things(store.path / "packs", outside)
    shutil.copytree(store.path, tmp_path / "other")
    shutil.move(tmp_path / "other", store.path / "packs/other")  # a store, but no compiled trace
    (store.path / "g000007").symlink_to(outside)
    (store.path / "g000008.journal").mkdir()
    (store.path / "caches").mkdir()
    (store.path / "caches/notes").write_text("mine")
    before = tree(tmp_path)
    for options in ({}, {"unfinished": True, "stale": True}, {"dry_run": True}):
        done = collected(store, **options)
        assert done.removed == {}
        assert set(done.unproven) == {
            *(
                "packs/" + n
                for n in (
                    "photos",
                    "empty",
                    "notes.txt",
                    "link",
                    "old.forecast",
                    "my.trace",
                    "x.rolling",
                    "x-0",
                    "other",
                )
            ),
            "g000007",
            "g000008.journal",
            "caches/notes",
        }
        assert all(done.unproven.values())
    assert tree(tmp_path) == before


def test_gc_leaves_what_is_foreign_within_ours(store: featstore.Store) -> None:
    killed(store)
    mine = [
        store.path / "packs/train-0" / name
        for name in ("notes.txt", "g000001/notes.txt", "g000001/tables/notes.txt")
    ]
    for path in mine:
        path.write_text("mine")
    ours = sum(p.stat().st_size for p in (store.path / "packs/train-0").rglob("*") if p.is_file())
    done = collected(store)
    assert {str(path.relative_to(store.path)) for path in mine} <= set(done.unproven)
    assert done.removed["packs/train-0"] == ours - len(mine) * len("mine")
    assert [p.read_text() for p in mine] == ["mine"] * 3
    assert not (store.path / "packs/train-0/featstore.json").exists()
    assert not (store.path / "packs/train-1").exists()
    compiled(store, "train-0")  # nothing of a loader any more: the name is free
    assert [p.read_text() for p in mine] == ["mine"] * 3


def test_gc_leaves_episodes_that_somebody_reads(store: featstore.Store) -> None:
    killed(store)
    with store.compiled("train-0"):
        for dry_run in (True, False):
            done = Collection(store.path, dry_run=dry_run)
            assert done.held["packs/train-0"] == IN_USE
            assert "packs/train-0" not in done.removed
    assert "packs/train-0" in collected(store).removed
    assert not (store.path / "packs/train-0").exists()


@pytest.mark.parametrize("name", ["packs", "caches"])
def test_nothing_is_followed(tmp_path: Path, store: featstore.Store, name: str) -> None:
    compiled(store, "ours")
    saved.save(store, "c", {})
    (store.path / "caches/c.cache.0123456789abcdef.tmp").write_text("")
    shutil.move(store.path / name, tmp_path / "elsewhere")
    (store.path / name).symlink_to(tmp_path / "elsewhere")
    for other in ("never", "y.forecast"):
        (tmp_path / "elsewhere" / other).mkdir()
        (tmp_path / "elsewhere" / other / "lock").write_text("1\n")
    (tmp_path / "elsewhere/mine").mkdir()
    before = tree(tmp_path / "elsewhere")
    done = collected(store, unfinished=True, stale=True)
    assert "link" in done.unproven[name]
    with pytest.raises(FormatError, match=rf"{name} is a symbolic link"):
        saved.save(store, "d", {}) if name == "caches" else compiled(store, "new")
    if name == "packs":
        for mode in ("rolling", "compiled"):
            with pytest.raises(FormatError, match="is a symbolic link"):
                store.loader(episode, mode=mode, memory="64MiB")
    assert tree(tmp_path / "elsewhere") == before


def test_two_save_a_cache_of_one_name_at_once(store: featstore.Store) -> None:
    """Neither writes into the other's file; the last one's stands whole."""
    both = threading.Barrier(2)

    class Meeting(QuickDisk):
        def write_file(self, path: Path, data: Any) -> None:
            raise AssertionError("a cache is replaced, not written in place")

        def rename(self, source: Path, target: Path) -> None:
            both.wait(20)
            super().rename(source, target)

    errors: list[BaseException] = []

    def save(count: int) -> None:
        try:
            saved.save(store, "c", {"features": lambda: iter([np.arange(count)])}, disk=Meeting())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(count,)) for count in (10, 150)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    with saved.SavedCache(store, "c") as cache:
        assert cache.counts["features"] in (10, 150)
    assert [p.name for p in (store.path / "caches").iterdir()] == ["c.cache"]


def test_gc_removes_what_a_killed_saving_left_and_no_other(store: featstore.Store) -> None:
    saved.save(store, "c", {})
    left = store.path / "caches/c.cache.0123456789abcdef.tmp"
    left.write_text("")
    found: list[Collection] = []

    class Collecting(QuickDisk):
        def rename(self, source: Path, target: Path) -> None:
            found.append(collected(store))
            super().rename(source, target)

    saved.save(store, "d", {}, disk=Collecting())
    assert set(found[0].removed) == {f"caches/{left.name}"}
    assert sorted(p.name for p in (store.path / "caches").iterdir()) == ["c.cache", "d.cache"]


def test_what_rolling_loaders_prove_by_is_durable_and_an_empty_file_proves_nothing(
    store: featstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock whose mark was lost with the power, or that anybody made: gc leaves what is beside it alone."""
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: (synced.append(os.fstat(descriptor).st_ino), fsync(descriptor))
    )
    with rolling(store, "proof"):
        assert (store.path / "packs" / "proof.rolling").stat().st_ino in synced
        assert (store.path / "packs").stat().st_ino in synced
    monkeypatch.undo()
    episode = [np.arange(k, k + 5) for k in range(0, 50, 5)]
    with store.loader(episode, mode="compiled", memory="64MiB", name="other") as loader:
        list(loader)
    packs = store.path / "packs"
    shutil.copytree(packs / "other", packs / "mine-0")
    (packs / "mine.rolling").touch()
    done = Collection(store.path)
    assert (packs / "mine-0" / "featstore.json").is_file()
    assert "it is empty" in done.unproven["packs/mine.rolling"]
