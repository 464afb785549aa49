"""Records: what is written is read, and a record that points outside anything is refused."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore.compiled.records import Limits, TableRecord, check_record, decode_record, encode_record
from featstore.errors import CorruptionError

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
    admitted = rng.permutation(host)[: draw(st.integers(0, host))].astype(np.int32)
    where = rng.permutation(host + device).astype(np.int32)
    small = {"dtype": np.int32}
    return TableRecord(
        host + device, host, int(rng.integers(0, LIMITS.packed_rows - len(packed) + 1)),
        hit, rng.integers(0, LIMITS.slots, len(hit), **small), packed, shared, rng.integers(0, LIMITS.shared_rows, len(shared)),
        base, rng.integers(0, LIMITS.base_rows, len(base)), copy, rng.choice(originals, len(copy)) if len(copy) else copy, admitted,
        rng.integers(0, LIMITS.slots, len(admitted), **small), where[host:] if device else where[:0],
        rng.integers(0, LIMITS.device_slots, device, **small), where[:host] if device else where[:0],
    )  # fmt: skip


def same(a: TableRecord, b: TableRecord) -> bool:
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))


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
        f.name for f in fields(part) if isinstance(getattr(part, f.name), np.ndarray) and len(getattr(part, f.name))
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


def test_places_filled_twice_or_never_are_refused() -> None:
    none = np.empty(0, np.int32)
    twice = TableRecord(2, 2, 0, np.array([0, 0], np.int32), np.array([1, 2], np.int32), none)
    never = TableRecord(2, 2, 0, np.array([0], np.int32), np.array([1], np.int32), none)
    for record in (twice, never):
        with pytest.raises(CorruptionError, match="each of 2 rows once"):
            check_record(record, LIMITS, PATH)
