"""Records: what is written is read, and a record that points outside anything is refused."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from featstore.base.native import address_of
from featstore.compile.record_table import byte_crcs, digest_bytes, write_records
from featstore.errors import CorruptionError
from featstore.layout.records import (
    Lengths,
    Limits,
    TableRecord,
    bad_record,
    decode_record,
    encode_record,
    record_offsets,
)
from featstore.loaders.compiled.checks import check_record
from featstore.storage.disk import Disk
from featstore.storage.rows_digest import digest_rows
from featstore.storage.table_writer import Catalogue

LIMITS = Limits(packed_rows=40, shared_rows=30, base_rows=50, slots=9, device_slots=5)
PATH = Path("records")


@st.composite
def records(draw: st.DrawFn) -> TableRecord:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = [draw(st.integers(0, 6)) for _ in range(5)]
    host, device = sum(sizes), draw(st.integers(0, 4))
    hit, packed, shared, base, copy = np.split(rng.permutation(host).astype(np.int32), np.cumsum(sizes)[:-1])
    if len(copy) and host == len(copy):
        copy, hit = copy[:0], copy
    originals = np.concatenate([hit, packed, shared, base])
    read = np.concatenate([packed, shared, base])
    origins = rng.permutation(read)[: draw(st.integers(0, min(len(read), LIMITS.slots)))]
    copied_from = rng.choice(originals, len(copy)) if len(copy) else copy
    copy_of = dict(zip(copied_from.tolist(), copy.tolist(), strict=True))  # a row to keep may be a copy of it
    admitted = np.array([copy_of.get(o, o) if rng.random() < 0.5 else o for o in origins.tolist()], np.int32)
    where = rng.permutation(host + device).astype(np.int32)
    small = {"dtype": np.int32}
    return TableRecord(
        host + device, host, int(rng.integers(0, LIMITS.packed_rows - len(packed) + 1)), hit,
        rng.integers(0, LIMITS.slots, len(hit), **small), packed, shared,
        rng.integers(0, LIMITS.shared_rows, len(shared)), base, rng.integers(0, LIMITS.base_rows, len(base)),
        copy, copied_from, admitted,
        rng.permutation(LIMITS.slots)[: len(admitted)].astype(np.int32),
        where[host:] if device else where[:0], rng.integers(0, LIMITS.device_slots, device, **small),
        where[:host] if device else where[:0],
    )  # fmt: skip


def same(a: TableRecord, b: TableRecord) -> bool:
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))


def check_plainly(record: TableRecord, limits: Limits, path: Path) -> None:
    """What :func:`check_record` does, in NumPy."""
    r = record
    if not 0 <= r.host_count <= r.count:
        raise bad_record(path, f"{r.host_count} of {r.count} rows through host memory")
    for values, limit in (
        (r.hit_slot, limits.slots), (r.admit_slot, limits.slots), (r.shared_row, limits.shared_rows),
        (r.base_row, limits.base_rows), (r.admit_place, r.host_count), (r.copy_from, r.host_count),
        (r.device_slot, limits.device_slots),
    ):  # fmt: skip
        if len(values) and (values.min() < 0 or values.max() >= limit):
            raise bad_record(path, f"an index of {values.min()} to {values.max()} into {limit}")
    for one, other in (
        (r.hit_place, r.hit_slot), (r.shared_place, r.shared_row), (r.base_place, r.base_row),
        (r.copy_place, r.copy_from), (r.admit_place, r.admit_slot), (r.device_place, r.device_slot),
    ):  # fmt: skip
        if len(one) != len(other):
            raise bad_record(path, f"{len(one)} places for {len(other)} rows")
    admitted = np.sort(r.admit_slot)
    if (admitted[1:] == admitted[:-1]).any():
        raise bad_record(path, "a slot that takes two rows")
    if not 0 <= r.packed_first <= limits.packed_rows - len(r.packed_place):
        raise bad_record(path, f"a run from row {r.packed_first} on of {limits.packed_rows} packed rows")
    check_once([r.hit_place, r.packed_place, r.shared_place, r.base_place, r.copy_place], r.host_count, path)
    if len(r.copy_place):
        copied = np.zeros(r.host_count, np.uint8)
        copied[r.copy_place] = 1
        if copied[r.copy_from].any():
            raise bad_record(path, "a copy of a copy")
    if len(r.admit_place):
        brought = r.brought_place(r.admit_place)
        kept = np.zeros(r.host_count, np.uint8)
        kept[r.hit_place] = 1
        if kept[brought].any():
            raise bad_record(path, "a row to keep that was in memory already")
        kept[brought] = 1
        if int(kept.sum()) != len(r.hit_place) + len(brought):
            raise bad_record(path, "a row to keep in two slots")
    if r.host_count < r.count or len(r.host_place):
        check_once([r.device_place, r.host_place], r.count, path)


def check_once(parts: list[NDArray[np.int32]], count: int, path: Path) -> None:
    places = np.concatenate(parts)
    if len(places) == count and (count == 0 or (places.min() >= 0 and places.max() < count)):
        seen = np.zeros(count, np.uint8)
        seen[places] = 1
        if seen.all():
            return
    raise bad_record(path, f"{len(places)} places that are not each of {count} rows once")


def refused(check: Any, record: TableRecord) -> bool:
    try:
        check(record, LIMITS, PATH)
    except CorruptionError:
        return True
    return False


@given(part=records(), data=st.data())
@settings(deadline=None, max_examples=500)
def test_records_are_looked_at_as_in_numpy(part: TableRecord, data: st.DataObject) -> None:
    """Damaged in up to two places: an index, or what says how many."""
    assert not refused(check_record, part)
    assert not refused(check_plainly, part)
    names = [f.name for f in fields(part) if f.name not in ("count", "host_count", "packed_first")]
    for _ in range(data.draw(st.integers(1, 2))):
        name = data.draw(st.sampled_from([*names, "count", "host_count", "packed_first"]))
        if name in names:
            values = getattr(part, name).copy()
            if data.draw(st.booleans()) or not len(values):
                values = values[: data.draw(st.integers(0, len(values)))]
            else:
                at = data.draw(st.integers(0, len(values) - 1))
                values[at] = data.draw(st.integers(-1, 60))
            part = replace(part, **{name: values})
        else:
            part = replace(part, **{name: getattr(part, name) + data.draw(st.sampled_from([-1, 1, 40]))})
    assert refused(check_record, part) == refused(check_plainly, part)


@given(parts=st.lists(records(), max_size=3), sample=st.binary(max_size=200))
@settings(deadline=None)
def test_a_record_comes_back_as_it_was_written(parts: list[TableRecord], sample: bytes) -> None:
    data = encode_record(parts, np.frombuffer(sample, np.uint8))
    assert len(data) % 64 == 0
    found, rest = decode_record(data, len(parts), PATH)
    assert rest.tobytes() == sample
    assert len(found) == len(parts)
    for one, other in zip(found, parts, strict=True):
        assert same(one, other)
        check_record(one, LIMITS, PATH)


@given(part=records(), data=st.data())
@settings(deadline=None)
def test_an_index_outside_what_it_points_into_is_refused(part: TableRecord, data: st.DataObject) -> None:
    arrays = [
        f.name
        for f in fields(part)
        if isinstance(getattr(part, f.name), np.ndarray) and len(getattr(part, f.name))
    ]
    if not arrays:
        return
    name = data.draw(st.sampled_from(arrays))
    values = getattr(part, name).copy()
    values[data.draw(st.integers(0, len(values) - 1))] = data.draw(st.sampled_from([-1, 60, 10**6]))
    with pytest.raises(CorruptionError):
        check_record(replace(part, **{name: values}), LIMITS, PATH)


@given(part=records(), data=st.data())
@settings(deadline=None, max_examples=300)
def test_a_damaged_record_is_an_error_or_points_inside(part: TableRecord, data: st.DataObject) -> None:
    bytes_ = encode_record([part], np.arange(9, dtype=np.uint8)).copy()
    at = data.draw(st.integers(0, len(bytes_) - 1))
    bytes_[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.sampled_from([0, 0, 64, 8]))
    try:
        (found,), _ = decode_record(bytes_[: len(bytes_) - cut], 1, PATH)
        check_record(found, LIMITS, PATH)
    except CorruptionError:
        return
    places = [found.hit_place, found.packed_place, found.shared_place, found.base_place, found.copy_place]
    assert sorted(np.concatenate(places).tolist()) == list(range(found.host_count))
    assert all((found.hit_slot < LIMITS.slots) & (found.hit_slot >= 0))
    assert all((found.base_row < LIMITS.base_rows) & (found.base_row >= 0))


def test_rows_to_keep_that_are_there_or_twice_are_refused() -> None:
    """Places 0 and 1 are hits, 2 and 3 are read, 4 is a copy of 2, 5 a copy of 1."""
    place = lambda *values: np.array(values, np.int32)  # noqa: E731
    good = TableRecord(
        6, 6, 0, place(0, 1), place(3, 4), place(2, 3), copy_place=place(4, 5), copy_from=place(2, 1),
        admit_place=place(3, 4), admit_slot=place(0, 1),
    )  # fmt: skip
    check_record(good, LIMITS, PATH)
    assert good.brought_place(good.admit_place).tolist() == [3, 2]
    for wrong, says in (
        (place(3, 0), "in memory already"), (place(5, 3), "in memory already"), (place(3, 3), "two slots"),
        (place(2, 4), "two slots"),
    ):  # fmt: skip
        with pytest.raises(CorruptionError, match=says):
            check_record(replace(good, admit_place=wrong), LIMITS, PATH)


def test_places_filled_twice_or_never_are_refused() -> None:
    none = np.empty(0, np.int32)
    twice = TableRecord(2, 2, 0, np.array([0, 0], np.int32), np.array([1, 2], np.int32), none)
    never = TableRecord(2, 2, 0, np.array([0], np.int32), np.array([1], np.int32), none)
    for record in (twice, never):
        with pytest.raises(CorruptionError, match="each of 2 rows once"):
            check_record(record, LIMITS, PATH)


def test_a_slot_that_takes_two_rows_is_refused() -> None:
    def admitting(slots: list[int]) -> TableRecord:
        two, shared = np.array([0, 1], np.int32), np.array([1, 2], np.int64)
        none = np.empty(0, np.int32)
        return TableRecord(
            2, 2, 0, none, none, none, two, shared, admit_place=two, admit_slot=np.array(slots, np.int32)
        )

    check_record(admitting([8, 3]), LIMITS, PATH)
    with pytest.raises(CorruptionError, match="a slot that takes two rows"):
        check_record(admitting([3, 3]), LIMITS, PATH)


@given(
    batches=st.lists(st.lists(records(), min_size=2, max_size=2), min_size=1, max_size=4),
    sizes=st.lists(st.integers(0, 200), min_size=4),
)
@settings(deadline=None, max_examples=50)
def test_how_long_records_are_is_known_beforehand(batches: list[list[TableRecord]], sizes: list[int]) -> None:
    samples = np.array(sizes[: len(batches)], np.int64)

    def counted(table: int, name: str) -> np.ndarray:
        return np.array([len(getattr(parts[table], name)) for parts in batches])

    lengths = [
        Lengths(
            hit=counted(t, "hit_slot"), packed=counted(t, "packed_place"), shared=counted(t, "shared_row"),
            base=counted(t, "base_row"), copy=counted(t, "copy_from"), admit=counted(t, "admit_slot"),
            device=counted(t, "device_slot"), host=counted(t, "host_place"),
        )
        for t in range(2)
    ]  # fmt: skip
    written = [
        encode_record(parts, np.zeros(size, np.uint8)) for parts, size in zip(batches, samples, strict=False)
    ]
    assert record_offsets(lengths, samples).tolist() == [0, *np.cumsum([len(record) for record in written])]


@given(data=st.binary(max_size=500), first=st.one_of(st.integers(0, 1000), st.integers(2**32 - 100, 2**33)))
@settings(deadline=None)
def test_the_digest_of_bytes_is_that_of_rows(data: bytes, first: int) -> None:
    values = np.frombuffer(data, np.uint8)
    none = np.empty(0, np.int64)
    assert digest_bytes(values, first, byte_crcs()) == digest_rows(
        address_of(values), 1, none, first, len(values)
    )


def test_records_of_other_lengths_than_announced_are_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="record 1 has 64 bytes, 128 were announced"):
        write_records(
            Catalogue(Disk(), tmp_path), "t", iter([np.zeros(64, np.uint8)] * 2), np.array([0, 64, 192])
        )
