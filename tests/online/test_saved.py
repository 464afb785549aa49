"""Saved caches: what a slot map holds comes out in the order in which it would leave, what was written down
is read again, whatever else is in the file is refused, and neither takes memory by the slots."""

from __future__ import annotations

import errno
import sys
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.errors import DiskFullError, FeatstoreError, SourceError
from featstore.loaders.online import extraction
from featstore.loaders.online.loader import OnlineLoader
from featstore.storage.disk import Disk
from featstore.tiers import saved
from featstore.tiers.buffer import FeatureBuffer
from featstore.tiers.slots import contents, layout
from featstore.tiers.slots import slots as sl

sys.path.insert(0, str(Path(__file__).parents[1] / "crash"))
from disks import FailingDisk, Lost, RecordingDisk, crash_states, materialise

MIB = 2**20
BATCHES = 30


# What is there, and in which order.


def in_order(m: layout.SlotMap) -> list[int]:
    """The rows that are there, sorted all at once; with LRU those in use, which have no place, at the end."""
    records, policy = m.slots, int(m.counts[layout.POLICY])
    order = np.arange(len(records))
    if policy in (layout.FIFO, layout.CLOCK, layout.SCORE):
        order = np.roll(order, -int(m.counts[layout.HAND]))
    elif policy == layout.LRU:
        place = np.where(records["pins"] > 0, 2**31 - 1, records["place"])
        order = np.argsort(place, kind="stable")
    elif policy == layout.S3FIFO:
        order = np.argsort(records["place"], kind="stable")
    elif policy == layout.SIEVE:
        order = np.lexsort((records["place"], records["place"] < m.counts[layout.CURSOR]))
    records = records[order]
    rows: list[int] = records["row"][(records["status"] == layout.PRESENT) & (records["row"] >= 0)].tolist()
    return rows


@pytest.mark.parametrize("name", sorted(layout.POLICIES))
@settings(max_examples=35)
@given(slots=st.integers(1, 40), piece=st.integers(1, 9), seed=st.integers(0, 10**6), held=st.integers(0, 2))
def test_rows_come_in_the_order_in_which_they_leave(
    name: str, slots: int, piece: int, seed: int, held: int
) -> None:
    rng, rows = np.random.default_rng(seed), 2 * slots + 3
    m = layout.make_slot_map(slots, layout.POLICIES[name], batches=BATCHES if name == "min" else 0)
    under_way: list[np.ndarray] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(contents, "PIECE", piece)
        for batch in range(BATCHES):
            ids = (rng.random(rng.integers(0, slots // 2 + 2)) ** 2 * rows).astype(np.int64)
            uses = (
                rng.integers(batch, BATCHES, len(ids)).astype(np.int32) if name == "min" else sl.NO_NEXT_USE
            )
            found, missed, waits = (np.empty(len(ids), np.int32) for _ in range(3))
            reads, _ = sl.acquire(m, ids, found, missed, waits, uses)
            if reads >= 0:
                (sl.complete if rng.random() < 0.9 else sl.abandon)(m, found[missed[:reads]])
                under_way.append(found)
            while len(under_way) > held:
                sl.release(m, under_way.pop(0))
            pieces = list(contents.present_ids(m))
            assert all(0 < len(one) <= piece and one.dtype == np.int64 for one in pieces)
            present = contents.joined(iter(pieces)).tolist()
            assert present == in_order(m)
            assert np.flatnonzero(contents.are_present(m, np.arange(rows))).tolist() == sorted(present)


def test_rows_kept_for_good_are_left_out(tmp_path: Path) -> None:
    x = np.arange(400, dtype=np.int64).reshape(200, 2)
    with featstore.pack(tmp_path / "s", x) as store, store.reader() as reader:
        kept = np.array([7, 3, 150])
        with FeatureBuffer(reader, slots=20, policy="lru", static=kept) as buffer:
            buffer.load(np.arange(10))
            assert sorted(buffer.cached_ids().tolist()) == sorted(set(range(10)) - set(kept.tolist()))


# The file.


def store_of(path: Path, tables: dict[str, int], uuid: str = "our-uuid") -> Any:
    """What a saved cache wants to know of a store: rows by table."""
    path.mkdir(exist_ok=True)
    return SimpleNamespace(
        path=path,
        on_disk=SimpleNamespace(path=path),
        uuid=uuid,
        tables={name: SimpleNamespace(rows=rows) for name, rows in tables.items()},
    )


def cut(ids: np.ndarray, at: list[int]) -> Callable[[], Iterator[np.ndarray]]:
    return partial(iter, np.split(ids, sorted(at)))


def loaded(store: Any, name: str = "c") -> dict[str, list[int]]:
    with saved.SavedCache(store, name) as cache:
        found = {table: contents.joined(cache.ids(table)).tolist() for table in cache.counts}
        assert {table: len(ids) for table, ids in found.items()} == cache.counts
        return found


@settings(max_examples=35)
@given(
    tables=st.dictionaries(st.text(max_size=5), st.lists(st.integers(0, 2**62 - 1), max_size=30), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=4), piece=st.integers(1, 9),
)  # fmt: skip
def test_what_is_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, tables: dict[str, list[int]], cuts: list[int], piece: int
) -> None:
    store = store_of(tmp_path_factory.mktemp("saved"), dict.fromkeys([*tables, "another"], 2**62))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saved, "_PIECE", piece)
        ids = {table: np.array(one, np.int64) for table, one in tables.items()}
        path = saved.save(store, "c", {table: cut(one, cuts) for table, one in ids.items()})
        assert [entry.name for entry in path.parent.iterdir()] == ["c.cache"]
        assert list(loaded(store).items()) == list(tables.items())
        with saved.SavedCache(store, "c") as cache:
            for table, one in tables.items():
                assert [len(p) for p in cache.ids(table)] == [
                    len(one[n : n + piece]) for n in range(0, len(one), piece)
                ]
            if "another" not in tables:
                assert list(cache.ids("another")) == []


def test_the_format_is_what_it_is_said_to_be(tmp_path: Path) -> None:
    store = store_of(tmp_path / "s", {"a": 10, "b": 5})
    path = saved.save(store, "c", {"b": cut(np.array([4, 0]), [1]), "a": cut(np.array([9]), [])})
    header = {"format": "featstore-cache-2", "store": "our-uuid", "tables": {"b": 2, "a": 1}}
    assert path.read_bytes() == encoded(header, [4, 0, 9])


def encoded(header: Any, ids: Any = (), *, trailing: bytes = b"") -> bytes:
    """A file with this header and these ids; its checksum is right."""
    raw = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
    data = len(raw).to_bytes(4, "little") + raw + np.array(ids, "<i8").tobytes() + trailing
    return data + zlib.crc32(data).to_bytes(4, "little")


def sealed(data: bytes) -> bytes:
    return data + zlib.crc32(data).to_bytes(4, "little")


GOOD: dict[str, Any] = {"format": "featstore-cache-2", "store": "our-uuid", "tables": {"a": 2, "b": 1}}
TWICE = (
    b"\x84"
    + msgspec.msgpack.encode(GOOD)[1:]
    + msgspec.msgpack.encode("store")
    + msgspec.msgpack.encode("our-uuid")
)
ODD = {
    "nothing": b"",
    "four bytes": sealed(b""),
    "eight bytes": sealed(bytes(4)),
    "no header": encoded(b"", [1, 2, 3]),
    "a header beyond the end": sealed(b"\xff\xff\x00\x00abc"),
    "a huge header": sealed(b"\xff\xff\xff\xff" + bytes(100)),
    "no MessagePack": encoded(b"\xc1\xc1", [1, 2, 3]),
    "half a header": encoded(msgspec.msgpack.encode(GOOD)[:-2], [1, 2, 3]),
    "a header and more": encoded(msgspec.msgpack.encode(GOOD) + b"\x00", [1, 2, 3]),
    "a key twice": encoded(TWICE, [1, 2, 3]),
    "bad text": encoded(msgspec.msgpack.encode(GOOD).replace(b"our-uuid", b"our\xff\xfe-id"), [1, 2, 3]),
    "a list": encoded([1, 2], [1, 2, 3]),
    "no keys": encoded({}, [1, 2, 3]),
    "one key more": encoded(GOOD | {"more": 1}, [1, 2, 3]),
    "another format": encoded(GOOD | {"format": "featstore-cache-3"}, [1, 2, 3]),
    "format is a number": encoded(GOOD | {"format": 2}, [1, 2, 3]),
    "another store": encoded(GOOD | {"store": "theirs"}, [1, 2, 3]),
    "no store": encoded(GOOD | {"store": None}, [1, 2, 3]),
    "tables is a list": encoded(GOOD | {"tables": ["a"]}, [1, 2, 3]),
    "a table has no count": encoded(GOOD | {"tables": {"a": b"123"}}, [1, 2, 3]),
    "a count is a fraction": encoded(GOOD | {"tables": {"a": 2.0, "b": 1}}, [1, 2, 3]),
    "a count is true": encoded(GOOD | {"tables": {"a": 2, "b": True}}, [1, 2, 3]),
    "a count is negative": encoded(GOOD | {"tables": {"a": -1, "b": 4}}, [1, 2, 3]),
    "a count is huge": encoded(GOOD | {"tables": {"a": 2**64 - 1, "b": 1}}, [1, 2, 3]),
    "more ids than rows": encoded(GOOD | {"tables": {"a": 0, "b": 6}}, [1] * 6),
    "an unknown table": encoded(GOOD | {"tables": {"a": 2, "c": 1}}, [1, 2, 3]),
    "a policy that is none": encoded(GOOD | {"policies": {"a": "best"}}, [1, 2, 3]),
    "a policy of no table": encoded(GOOD | {"policies": {"c": "lru"}}, [1, 2, 3]),
    "a table with a number for a name": encoded(GOOD | {"tables": {1: 2, "b": 1}}, [1, 2, 3]),
    "too few ids": encoded(GOOD, [1, 2]),
    "too many ids": encoded(GOOD, [1, 2, 3, 4]),
    "some bytes more": encoded(GOOD, [1, 2, 3], trailing=b"abc"),
    "an id beyond the rows": encoded(GOOD, [1, 2, 5]),
    "a negative id": encoded(GOOD, [1, -1, 3]),
    "the first format": sealed(
        msgspec.msgpack.encode({"format": "featstore-cache-1", "store": "our-uuid", "tables": {}})
    ),
}


@pytest.mark.parametrize("what", list(ODD))
def test_odd_content_is_refused(tmp_path: Path, what: str) -> None:
    store = store_of(tmp_path / "s", {"a": 10, "b": 5})
    path = saved.save(store, "c", {})
    path.write_bytes(ODD[what])
    with pytest.raises(SourceError, match="save it again") as caught:
        saved.SavedCache(store, "c")
    assert str(path) in str(caught.value)
    path.write_bytes(encoded(GOOD, [1, 2, 3]))
    assert loaded(store) == {"a": [1, 2], "b": [3]}


@settings(max_examples=300)
@given(data=st.data())
def test_any_change_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    store = store_of(tmp_path_factory.getbasetemp() / "changed", {"a": 10, "b": 5})
    good = encoded(GOOD, [1, 2, 3])
    at = data.draw(st.integers(0, len(good) - 1))
    change = data.draw(st.sampled_from(["cut", "other", "right checksum"]))
    if change == "cut":
        raw = good[:at]
    else:
        raw = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
        raw = sealed(raw[:-4]) if change == "right checksum" else raw
    path = saved.save(store, "c", {})
    path.write_bytes(raw)
    try:
        found = loaded(store)
    except SourceError as error:
        assert "save it again" in str(error)
        assert str(path) in str(error)
    else:  # a change of ids, made on purpose
        assert change == "right checksum"
        assert {table: len(ids) for table, ids in found.items()} == {"a": 2, "b": 1}
        assert all(0 <= i < store.tables[table].rows for table, ids in found.items() for i in ids)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    store = store_of(tmp_path / "s", {"a": 10})
    (saved.cache_path(store, "c")).mkdir(parents=True)
    with pytest.raises(SourceError, match="no file"):
        saved.SavedCache(store, "c")
    with pytest.raises(SourceError, match=r"c\.cache is no file"):
        saved.save(store, "c", {})
    with pytest.raises(SourceError, match="not there"):
        saved.SavedCache(store, "d")
    with pytest.raises(SourceError, match="name"):
        saved.save(store, "../c", {})


def test_a_loader_refuses_odd_content_at_once_and_when_it_loads(tmp_path: Path) -> None:
    x = np.arange(400, dtype=np.int64).reshape(200, 2)
    batches = [np.arange(20)]
    with featstore.pack(tmp_path / "s", x) as store:
        path = saved.save(store, "c", {"features": cut(np.arange(50), [])})
        good = path.read_bytes()
        with OnlineLoader(store, batches, memory="8MiB", warm="c") as loader:
            path.write_bytes(good[:-9])  # after the loader was made
            with pytest.raises(SourceError, match="save it again"):
                list(loader)
        with pytest.raises(SourceError, match="save it again"):
            OnlineLoader(store, batches, memory="8MiB", warm="c")


# A save that does not come to its end.


def three_tables(first: int) -> dict[str, Callable[[], Iterator[np.ndarray]]]:
    return {name: cut(np.arange(first, first + 300), [100, 101]) for name in "abc"}


@pytest.mark.parametrize("code", [None, errno.ENOSPC, errno.EIO])
def test_a_save_that_fails_leaves_the_old_cache(tmp_path: Path, code: int | None) -> None:
    store = store_of(tmp_path / "s", dict.fromkeys("abc", 1000))
    path = saved.save(store, "c", three_tables(0))
    old = loaded(store)
    failed = 0
    while True:
        try:
            saved.save(store, "c", three_tables(500), disk=FailingDisk(failed, code))
        except (Lost, FeatstoreError) as error:
            assert code != errno.ENOSPC or isinstance(error, DiskFullError)
            assert code is None or [entry.name for entry in path.parent.iterdir()] == ["c.cache"]
        else:
            break
        assert loaded(store) in (old, {name: list(range(500, 800)) for name in "abc"})
        path = saved.save(store, "c", three_tables(0))
        failed += 1
    assert failed > 10
    assert loaded(store) == {name: list(range(500, 800)) for name in "abc"}


def test_a_save_that_fails_holds_nothing_of_its_source(tmp_path: Path) -> None:
    """Whoever keeps the error keeps no lock of a buffer."""
    store, lock = store_of(tmp_path / "s", {"a": 100}), threading.Lock()

    def held() -> Iterator[Any]:
        with lock:
            yield from (np.arange(low, low + 10) for low in range(0, 50, 10))

    class Full(Disk):
        def write(self, file: Any, offset: int, data: Any) -> None:
            if offset > 100:
                raise DiskFullError(file.path, 0, 0, errno.ENOSPC)
            super().write(file, offset, data)

    with pytest.raises(DiskFullError) as error:
        saved.save(store, "c", {"a": held}, disk=Full())
    assert error.value.__traceback__ is not None
    assert not lock.locked()


def test_a_source_that_fails_or_changes_leaves_the_old_cache(tmp_path: Path) -> None:
    store = store_of(tmp_path / "s", {"a": 100})
    path = saved.save(store, "c", {"a": cut(np.arange(9), [])})
    lengths = iter([5, 6])
    with pytest.raises(SourceError, match="changed"):
        saved.save(store, "c", {"a": lambda: iter([np.arange(next(lengths))])})
    assert loaded(store) == {"a": list(range(9))}
    assert [entry.name for entry in path.parent.iterdir()] == ["c.cache"]


def test_after_a_crash_there_is_a_whole_cache_or_none(tmp_path: Path) -> None:
    root = tmp_path / "s"
    store = store_of(root, dict.fromkeys("abc", 1000))
    disk = RecordingDisk(root)
    saved.save(store, "c", three_tables(0), disk=disk)
    first = len(disk.ops)
    saved.save(store, "c", three_tables(500), disk=disk)
    good = [{name: list(range(n, n + 300)) for name in "abc"} for n in (0, 500)]
    found = 0
    for number, (label, ops) in enumerate(crash_states(disk.ops)):
        left = store_of(tmp_path / str(number), dict.fromkeys("abc", 1000))
        # A new file that is lost has the name that the old one once had, and is not to be taken for it.
        if not any(op is disk.ops[first] for op in ops):
            ops = [op for op in ops if op.kind != "write" or not any(op is one for one in disk.ops[first:])]
        materialise(ops, left.path)
        done = int(label.split(":")[0])
        if saved.cache_path(left, "c").exists():
            assert loaded(left) in good[done == len(disk.ops) :], label
            found += 1
        else:
            assert done < first, label
    assert found > 20


# Memory.


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Bytes that have been there at once since this began, beyond those from before."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", sorted(set(layout.POLICIES) - {"min"}))
def test_going_through_a_slot_map_takes_memory_of_a_piece(name: str) -> None:
    slots = 500_000
    m = layout.make_slot_map(slots, layout.POLICIES[name])
    for low in range(0, slots, 100_000):
        found, missed, waits = (np.empty(100_000, np.int32) for _ in range(3))
        sl.acquire(m, np.arange(low, low + 100_000), found, missed, waits)
        sl.complete(m, found)
        sl.release(m, found)
    with traced() as peak:
        assert sum(len(ids) for ids in contents.present_ids(m)) == slots
        assert peak() < 4 * MIB


@pytest.mark.parametrize("devices", [0, 2])
def test_saving_and_loading_take_memory_of_a_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    if devices:
        pytest.importorskip("torch")
    rows = 400_000
    rng = np.random.default_rng(0)
    batches = [np.sort(rng.permutation(rows)[:5000]) for _ in range(4)]
    options: dict[str, Any] = {"memory": "96MiB", "policy": "s3-fifo"}
    if devices:
        options |= {"device": ["cpu"] * devices, "device_memory": 8 * 60_000}
    peaks = {}

    def measured(name: str, step: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            with traced() as peak:
                step(*arguments)
                peaks[name] = peak()

        return run

    monkeypatch.setattr(extraction.Extraction, "save", measured("save", extraction.Extraction.save))
    monkeypatch.setattr(extraction.Extraction, "_load", measured("load", extraction.Extraction._load))
    with featstore.pack(tmp_path / "s", np.arange(rows)) as store:
        everything = np.arange(rows)
        saved.save(store, "all", {"features": partial(np.array_split, everything, 20)})  # type: ignore[arg-type]
        del everything
        with traced() as peak:
            saved.SavedCache(store, "all").close()
            assert peak() < 1 * MIB
        with OnlineLoader(store, batches, warm="all", **options) as loader:
            for batch in loader:
                np.testing.assert_array_equal(np.asarray(batch.x), batch.n_id)
            assert loader.report().buffers["features"].misses == 0
            loader.save_cache("again")
        with saved.SavedCache(store, "again") as cache:
            assert np.unique(contents.joined(cache.ids("features"))).tolist() == list(range(rows))
    assert sorted(peaks) == ["load", "save"]
    assert all(peak < 4 * rows + 4 * MIB for peak in peaks.values()), peaks
