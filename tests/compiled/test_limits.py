"""What is packed into keys and 32-bit numbers fits, or is refused before any work, in tables and mini-batches
of any size.

Tables of 2**40 rows are described, never made; arrays of 2**31 elements are one element, broadcast.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from compiled_support import QuickDisk

import featstore
from featstore.base.sort import radix_sort
from featstore.compile import limits
from featstore.compile.budget import LoaderBudget
from featstore.compile.limits import RECORD_PLACES_MAX, SLOTS_MAX, TRACE_BATCHES_MAX, check_sizes
from featstore.compile.routing import route_rows
from featstore.compile.segments import bounds_dtype
from featstore.compile.write_table import _Buckets, bucket_rows
from featstore.errors import ArgumentError, IdError, SourceError
from featstore.layout import TableLayout
from featstore.loaders.mega.sizes import ListNeeds, Needs, RowNeeds, fit
from featstore.order.permutation import check_rankable, ranked_by_count
from featstore.plan.extents import key_bits, plan_extents
from featstore.storage.manifest import ROWS_MAX
from featstore.tiers.slots import slots
from featstore.tiers.slots.layout import BUFFER_ROWS_MAX, POLICIES, RECORD, slot_map_bytes
from featstore.tiers.slots.rows import slots_for
from featstore.tiers.static import StaticRows, check_members

WIDE = np.array(
    [2**40 - 1, 3, 2**32 + 3, 2**32, 2**33 + 3, 0, 2**39]
)  # rows that are equal in their lower 32 bits, some


def broadcast(count: int, dtype: Any) -> np.ndarray[Any, Any]:
    """So many elements that take no memory."""
    return np.broadcast_to(np.zeros(1, dtype), (count,))


def test_keys_have_room_for_row_and_place() -> None:
    for rows, places in ((1, 1), (2**32, 2**32), (2**40, 2**24), (2**33, 2**31), (2**33 + 1, 2**30)):
        bits = key_bits(rows, places, "x")
        key = (rows - 1) << bits | (places - 1)
        assert key < 2**64
        assert (key >> bits, key & ((1 << bits) - 1)) == (rows - 1, places - 1)
    for rows, places in ((2**32 + 1, 2**32), (2**40, 2**24 + 1), (2**33 + 1, 2**31)):
        with pytest.raises(
            SourceError, match=r"cannot sort: these may be .* at most with a table of .* rows"
        ):
            key_bits(rows, places, "sort: these")


def test_rows_beyond_32_bits_keep_their_places() -> None:
    """As :meth:`featstore.compile.routing.Routes._record` does it."""
    count = len(WIDE)
    bits = key_bits(ROWS_MAX, count, "x")
    keys, none = np.empty(count, np.uint64), np.empty(0, np.int32)
    outs: list[Any] = [none, none, keys, none, none.astype(np.int64), none, none.astype(np.int64), none, none]
    route_rows(WIDE, none, np.full(count, -1, np.int32), none, none, *outs, bits)
    spare = np.empty_like(keys)
    if radix_sort(keys, spare, bits, bits + 40):
        keys = spare
    assert (keys >> np.uint64(bits)).tolist() == sorted(WIDE)
    assert WIDE[(keys & np.uint64((1 << bits) - 1)).astype(np.int32)].tolist() == sorted(WIDE)


def test_shared_rows_beyond_32_bits_go_to_their_places(tmp_path: Path) -> None:
    shared: Any = SimpleNamespace(total=len(WIDE), part=lambda low, high: WIDE[low:high])
    buckets = _Buckets(shared, ROWS_MAX, 4, 2**20, QuickDisk(), tmp_path / "b")
    for first, ranks in buckets.ranks():
        bucket = WIDE[first : first + buckets.rows_each]
        assert bucket[ranks].tolist() == sorted(bucket)
    for rows in (1000, 2**32, 2**33, ROWS_MAX):
        each = bucket_rows(rows, 4, 2**50)
        assert each <= 2**32
        key_bits(rows, each, "x")


def test_what_cannot_be_compiled() -> None:
    many = np.array([5, RECORD_PLACES_MAX], np.int64)
    check_sizes({"t": 2**33}, {"t": many}, 2)
    check_sizes({"t": ROWS_MAX}, {"t": np.array([2**24])}, 2**24)
    with pytest.raises(SourceError, match=r"2,147,483,648 rows of table 't', at most 2,147,483,647"):
        check_sizes({"t": 2**33}, {"t": many + 1}, 2)
    with pytest.raises(
        SourceError, match=r"table 't': their ids may be 16,777,216 at most .* of 1,099,511,627,776 rows"
    ):
        check_sizes({"t": ROWS_MAX}, {"t": np.array([2**24 + 1])}, 1)
    with pytest.raises(SourceError, match=r"its mini-batches may be 16,777,216 at most"):
        check_sizes({"t": ROWS_MAX}, {"t": np.array([1])}, 2**24 + 1)
    check_sizes({"t": 100}, {"t": np.array([1])}, TRACE_BATCHES_MAX)
    with pytest.raises(SourceError, match=r"1,073,741,824 mini-batches cannot be compiled"):
        check_sizes({"t": 100}, {"t": np.array([1])}, TRACE_BATCHES_MAX + 1)


@pytest.mark.parametrize(
    ("name", "message"), [("RECORD_PLACES_MAX", "4 rows of table"), ("TRACE_BATCHES_MAX", "trace of 4")]
)
def test_it_is_said_before_any_work(
    tmp_path: Path, pack: Any, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.setattr(limits, name, 3)
    with pack(tmp_path / "s", np.zeros((50, 3), np.float32)) as store:
        with (
            featstore.Trace.record([np.arange(4)] * 4, tmp_path / "t") as trace,
            pytest.raises(SourceError, match=message),
        ):
            featstore.compile_trace(store, trace, memory="64MiB")
        assert not (store.path / "packs").exists()


def test_slots_are_numbered_by_32_bits() -> None:
    class OneBatch(list[int]):
        counts, sample_sizes = {"": np.array([100])}, (0,)

    trace: Any = OneBatch([0])
    tables: Any = {"": SimpleNamespace(rows=2**34, row_bytes=4, data_bytes=2**36)}
    budget = LoaderBudget.split(2**45, None, 2**45, None, trace, tables)
    assert budget.slots == budget.device_slots == {"": SLOTS_MAX}
    assert np.iinfo(np.int32).min == -2 - SLOTS_MAX
    with pytest.raises(SourceError, match=r"at most 2,147,483,647, not 2,147,483,648"):
        StaticRows(broadcast(2**31, np.int64), 2**33, 4)
    check_members(2**31 - 1)
    m: Any = None
    with pytest.raises(IdError, match="2,147,483,648 rows of a table"):
        slots.acquire(m, broadcast(2**31, np.int64), *[broadcast(1, np.int32)] * 3)


def test_places_in_the_logs_of_a_buffer() -> None:
    """Two queues of twice as many places as slots, which are counted in 31 bits."""
    assert np.iinfo(RECORD["place"]).max >= 4 * BUFFER_ROWS_MAX - 1
    assert slot_map_bytes(BUFFER_ROWS_MAX, POLICIES["s3-fifo"]) > 60 * BUFFER_ROWS_MAX
    with pytest.raises(ArgumentError, match="from 1 to 536,870,912 slots"):
        slot_map_bytes(BUFFER_ROWS_MAX + 1, POLICIES["s3-fifo"])
    assert slots_for(1 << 60, 8, POLICIES["lru"]) == BUFFER_ROWS_MAX


def test_bounds_of_long_lists_are_wide() -> None:
    assert bounds_dtype(2**31 - 1) == np.int32
    assert bounds_dtype(2**31) == np.int64


def test_reads_into_a_destination_of_any_size() -> None:
    layout = TableLayout(ROWS_MAX, 4, 2**20)
    model: Any = None
    rows, none = np.array([2**39]), np.empty(0, np.int32)
    with pytest.raises(SourceError, match=r"rows of the destination may be 16,777,216 at most"):
        plan_extents(rows, none, np.empty(0, np.uint8), 2**24 + 1, layout, model, 2**20)


def test_ranks_by_degree() -> None:
    check_rankable(2**32 - 1)
    with pytest.raises(SourceError, match=r"fewer than 2\*\*32"):
        check_rankable(2**32)
    with pytest.raises(SourceError, match=r"fewer than 2\*\*32"):
        ranked_by_count(broadcast(2**32, np.uint32))


def needs(*partitions: int) -> Needs:
    rows = np.array(partitions, np.int64)
    of_rows = RowNeeds(int(rows.sum()), 4, 8, rows, 0)
    return Needs({"node": of_rows}, {"edges": ListNeeds("node", 8, 0, rows, 0)}, "node", 0)


def test_mega_batches_number_their_places_by_32_bits() -> None:
    most = 2**31 - 1
    one = fit(needs(most), 2**40, None, None)
    assert one.slots * one.slot_rows["node"] == most
    with pytest.raises(
        SourceError, match=r"numbers its rows with 32 bits.* 2,147,483,648 places.* more partitions"
    ):
        fit(needs(most + 1), 2**40, None, None)
    four = fit(needs(*[2**29] * 4, 1), 2**45, None, None)
    assert (four.resident, four.slots * four.slot_rows["node"]) == (1, 2**30), (
        "what fits the memory, but not the numbers, is not taken"
    )
    with pytest.raises(SourceError, match="ask for fewer partitions"):
        fit(needs(*[2**29] * 4, 1), 2**45, 4, None)
