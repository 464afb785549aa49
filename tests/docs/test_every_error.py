"""Each error of the tree is raised through the public door, and says what is wrong, where, and what to do."""

from __future__ import annotations

import fcntl
import inspect
import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import Gate

import featstore
from featstore import errors
from featstore.engine import liburing
from featstore.storage.disk import Disk

NODES = 400
ROWS = np.random.default_rng(0).standard_normal((NODES, 8), np.float32)
EDGES = np.random.default_rng(1).integers(0, NODES, (2, 2000))


class SmallDisk(Disk):
    """A disk with little room."""

    def free_bytes(self, path: Path) -> int:
        return 1000


class World:
    """A folder to spoil, with a store in it."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, pack: Callable[..., featstore.Store]) -> None:
        self.folder, self.patch, self.pack = folder, patch, pack
        self.path = folder / "papers.fs"
        pack(self.path, ROWS, graph=EDGES).close()

    def change(self, **fields: Any) -> None:
        """Write other values into the manifest."""
        path = self.path / "featstore.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def argument(world: World) -> None:
    with featstore.open(world.path) as store:
        store.reader(memroy="1MiB")


def budget(world: World) -> None:
    with featstore.open(world.path) as store:
        store.reader(memory="64KiB")


def cancelled(world: World) -> None:
    with featstore.open(world.path) as store, store.reader(memory="4MiB", static=None) as reader:
        gate = Gate(reader)
        request = reader.submit(np.arange(10))
        gate.arrived.acquire(timeout=10)
        request.cancel()
        gate.open()
        request.result(10)


def closed(world: World) -> None:
    with featstore.open(world.path) as store:
        reader = store.reader(memory="4MiB")
    reader.close()
    reader.read([1])


def corruption(world: World) -> None:
    chunk = world.path / "g000001/tables/features/rows/c.0.0"
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)
    with featstore.open(world.path) as store, store.reader(memory="4MiB", static=None) as reader:
        reader.read(np.arange(NODES))


def device(world: World) -> None:
    (world.folder / "file").write_text("")
    featstore.pack(world.folder / "file" / "other.fs", ROWS)


def disk_full(world: World) -> None:
    featstore.pack(world.folder / "other.fs", ROWS, disk=SmallDisk())


def engine(world: World) -> None:
    def refuse(self: object, entries: int) -> None:
        raise OSError(1, "io_uring_setup: Operation not permitted")

    world.patch.setattr(liburing._Library, "open_ring", refuse)
    with featstore.open(world.path) as store:
        store.reader(memory="4MiB", engine="uring")


def base(world: World) -> None:
    world.change(writer_features=["log"])
    featstore.pack(world.path, ROWS, overwrite=True)


def warning(world: World) -> None:
    edges = world.folder / "edges.csv"
    edges.write_text("source,target,weight\n" + "".join(f"{a},{b},1\n" for a, b in EDGES.T[:50]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.FeatstoreWarning)
        world.pack(world.folder / "other.fs", ROWS, graph=edges)


def malformed(world: World) -> None:
    world.change(tables=7)
    featstore.open(world.path)


def version(world: World) -> None:
    world.change(version=99)
    featstore.open(world.path)


def ids(world: World) -> None:
    with featstore.open(world.path) as store, store.reader(memory="4MiB") as reader:
        reader.read([3, NODES])


def incomplete(world: World) -> None:
    featstore.open(world.folder / "nowhere.fs")


def missing(world: World) -> None:
    world.patch.setitem(sys.modules, "zarr", None)
    with featstore.open(world.path) as store:
        store.zarr("features")


def not_in_memory(world: World) -> None:
    with featstore.open(world.path) as store:
        np.asarray(store.table("features"))


def peer(world: World) -> None:
    """Two hosts, of which one ends: as threads, see ``tests/hosts/wires.py``."""
    world.patch.syspath_prepend(str(Path(__file__).parents[1] / "hosts"))
    import test_split_topology as split

    with featstore.open(world.path) as store:
        for hosts in (1, 2):
            split.split(store, hosts, world.folder / f"parts{hosts}")
    with featstore.open_split(world.folder / "parts1", memory="12MiB") as alone:
        ask(alone)  # compile, outside of any time-out
    with split.hosts(world.folder / "parts2", 2, timeout=0.5) as (stores, wires):
        wires.kill(1)
        raise split.each(stores[:1], ask)[0]


def ask(store: Any) -> None:
    with store.sampler([2], memory="8MiB") as sampler:
        sampler.sample(np.arange(NODES), 0)


def source(world: World) -> None:
    featstore.pack(world.folder / "other.fs", ROWS, graph=np.array([[0, 1], [1, 2]]))


def compiled(world: World, **options: Any) -> None:
    with featstore.open(world.path) as store:
        batches = [np.arange(20)]
        store.loader(batches, mode="compiled", name="mine", memory="16MiB", **options).close()


def stale(world: World) -> None:
    compiled(world)
    world.pack(world.path, ROWS + 1, graph=EDGES, overwrite=True).close()
    with featstore.open(world.path) as store:
        store.compiled("mine").close()


def exists(world: World) -> None:
    featstore.pack(world.path, ROWS)


def locked(world: World) -> None:
    with open(world.path / "lock", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        featstore.pack(world.path, ROWS, overwrite=True)


def unknown(world: World) -> None:
    with featstore.open(world.path) as store:
        store.table("feature")


def late(world: World) -> None:
    with featstore.open(world.path) as store, store.reader(memory="4MiB", static=None) as reader:
        gate = Gate(reader)
        request = reader.submit(np.arange(10))
        try:
            request.result(0.01)
        finally:
            gate.open()


#: How each is had; and of its message what is the matter, where, and what to do.
CASES: dict[str, tuple[Callable[[World], None], str, str, str]] = {
    "ArgumentError": (argument, "no option", "memroy", "did you mean 'memory'"),
    "BudgetError": (budget, "too small", "65,536 bytes", "smallest that works is"),
    "CancelledError": (cancelled, "cancelled", "request", "submit it again"),
    "ClosedError": (closed, "closed", "reader", "make another"),
    "CorruptionError": (corruption, "corrupt data", "papers.fs/.* at byte 0", "featstore verify"),
    "DeviceError": (device, "cannot create directory .*Not a directory", "file/other.fs", "check the path"),
    "DiskFullError": (disk_full, "not enough disk space", "other.fs", "free some space"),
    "EngineError": (engine, "cannot be used: .*not permitted", "'uring'", "ask for 'threads'"),
    "FeatstoreError": (base, "cannot be written.* log", "papers.fs", "newer featstore|another path"),
    "FeatstoreWarning": (warning, "weight", "edges.csv", "edge_weights="),
    "FormatError": (malformed, "malformed", "papers.fs/featstore.json", "restore it|pack"),
    "FormatVersionError": (version, "format version 99", "papers.fs/featstore.json", "install a newer"),
    "IdError": (ids, "node id 400 is out of range", "table 'features'", r"ids 0 to 399"),
    "IncompleteStoreError": (incomplete, "there is no store", "nowhere.fs", "check the path"),
    "MissingPackageError": (missing, "needs zarr", r"zarr\(\)", "pip install 'featstore"),
    "NotInMemoryError": (not_in_memory, "on disk.* and no array", "table 'features'", "store.reader"),
    "PeerError": (peer, "was not heard of|is gone|closed", "host 1", "start all ranks again"),
    "SourceError": (source, r"two edges of shape \[2, 2\]", "edge_index", "give them as"),
    "StaleError": (stale, "was compiled for the store", "papers.fs/packs/mine", "compile the trace again"),
    "StoreExistsError": (exists, "already holds a store", "papers.fs", "another path, or replace"),
    "StoreLockedError": (locked, "being written by process", "papers.fs", "wait for it"),
    "UnknownNameError": (unknown, "no table", "'feature'", "did you mean 'features'"),
    "WaitTimeoutError": (late, "not come within", "rows", "ask again, or cancel"),
}


def test_every_error_has_its_case() -> None:
    tree = {errors.FeatstoreError, errors.FeatstoreWarning}
    while grown := {below for one in tree for below in one.__subclasses__()} - tree:
        tree |= grown
    public = {one.__name__ for one in tree if one.__module__ == "featstore.errors"}
    assert public == set(CASES) == set(errors.__all__)
    assert all(inspect.isclass(getattr(errors, name)) for name in CASES)


@pytest.mark.parametrize("name", CASES)
def test_it_says_what_and_where_and_what_to_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[..., featstore.Store]
) -> None:
    raised, *said = CASES[name]
    with pytest.raises(getattr(errors, name)) as caught:
        raised(World(tmp_path, monkeypatch, pack))
    assert type(caught.value) is getattr(errors, name)
    message = str(caught.value)
    print(name, "|", message.replace(str(tmp_path) + os.sep, ""))
    assert all(re.search(part, message, re.IGNORECASE) for part in said), message
