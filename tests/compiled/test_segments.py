"""Batched packing: every segment has its rows, whatever the row size, the cut and the interruption."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.base.buffers import aligned_buffer
from featstore.base.native import address_of
from featstore.compile import segments as seg
from featstore.compile.row_lists import RowLists, RowListsWriter
from featstore.compile.segment_pages import Target
from featstore.errors import BudgetError
from featstore.layout import TableLayout
from featstore.storage.disk import Disk
from featstore.storage.journal import UnfinishedPage
from featstore.storage.table_writer import TableWriter


class Stopped(Exception):
    pass


def lists_of(path: Path, lists: list[np.ndarray]) -> RowLists:
    writer = RowListsWriter(Disk(), path, np.int64)
    for values in lists:
        writer.append(values)
    return writer.finish()


def target_in(folder: Path, rows: int, row_bytes: int) -> Target:
    folder.mkdir(exist_ok=True)
    layout = TableLayout.choose(rows, row_bytes, chunk_bytes=16 * 4096)
    return Target(
        TableWriter(Disk(), layout, lambda c: folder / f"c{c}", folder / "sums"),
        layout,
        lambda c: folder / f"c{c}",
    )


@pytest.mark.parametrize("row_bytes", [1, 40, 512, 4096, 6000])
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_every_segment_has_its_rows_also_after_interruptions(
    row_bytes: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp = tmp_path_factory.mktemp("segments")
    table_rows = data.draw(st.integers(1, 4000 if row_bytes < 100 else 400))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    source = rng.integers(0, 256, (table_rows, row_bytes), np.uint8)
    shares = data.draw(st.lists(st.sampled_from([0.0, 0.02, 0.3, 1.0]), min_size=1, max_size=9))
    lists = [np.flatnonzero(rng.random(table_rows) < share) for share in shares]
    total = sum(map(len, lists))
    memory = data.draw(st.sampled_from([1 << 20, 4 << 20]))
    stop_after = data.draw(st.integers(0, 6))
    with featstore.pack(tmp / "base.fs", {"x": source}) as base, pytest.MonkeyPatch.context() as patch:
        patch.setattr(seg, "SEGMENTS_CHECKPOINT_BYTES", data.draw(st.sampled_from([1, 3000, 10**9])))
        patch.setattr(seg, "SLAB_BYTES_MAX", data.draw(st.sampled_from([5000, 100_000])))
        patch.setattr(seg, "BUFFER_BYTES_MIN", 8192)
        at = [0, 0]
        left: list[UnfinishedPage] = []
        for _ in range(2):
            target = target_in(tmp / "out", total, row_bytes)
            target.resume(left)
            route = seg.Route(lists_of(tmp / "lists", lists), np.cumsum([0, *map(len, lists)])[:-1], target)
            try:
                run(base, route, memory, row_bytes, at, stop_after, left)
                stopped = False
            except Stopped:
                stopped, stop_after = True, 10**9
            finally:
                target.writer.close()
                route.rows.close()
            if not stopped:
                break
        found = np.empty((0, row_bytes), np.uint8)
        if total:
            target = target_in(tmp / "out", total, row_bytes)
            found = target.rows_written(0, total).reshape(total, row_bytes)
            target.writer.close()
        np.testing.assert_array_equal(found, np.concatenate([source[rows] for rows in lists]))


def run(
    base: featstore.Store, route: seg.Route, memory: int, row_bytes: int, at: list[int], stop_after: int,
    left: list[UnfinishedPage],
) -> None:  # fmt: skip
    plan = seg.plan_packing([route], row_bytes, memory)
    saves = 0
    for earlier in plan.episodes[: at[0]]:
        for r, i in earlier:
            seg.segment_of([route], r, i).resume(int(route.rows.lengths()[i]), lambda: aligned_buffer(4096))

    def save(slab: int) -> None:
        nonlocal saves
        at[1] = slab
        left[:] = msgspec.json.decode(msgspec.json.encode(route.target.unfinished), type=list[UnfinishedPage])
        saves += 1
        if saves > stop_after:
            raise Stopped

    with base.reader(memory="8MiB", static=None, by_row=True) as reader:
        for episode in range(at[0], len(plan.episodes)):
            seg.pack_episode(reader, "x", [route], plan, episode, at[1], save, lambda stage, count: None)
            at[0], at[1] = episode + 1, 0
    route.target.writer.checkpoint()


@given(
    lists=st.lists(st.lists(st.integers(0, 60), max_size=12), min_size=1, max_size=5),
    capacity=st.integers(0, 100),
    dtype=st.sampled_from([np.int32, np.int64]),
)
@settings(deadline=None)
def test_append_rows_is_the_numpy_copy(lists: list[list[int]], capacity: int, dtype: type) -> None:
    """Buffers that are full are emptied, as often as it takes: what came out of each is its list's rows."""
    row_bytes, first = 7, 100
    slab = np.random.default_rng(0).integers(0, 256, (61, row_bytes), np.uint8)
    rows = np.concatenate([np.array(own, dtype) for own in lists]).astype(dtype) + dtype(first)
    ends = np.cumsum([len(own) for own in lists])
    begins, capacity = ends - [len(own) for own in lists], capacity + row_bytes
    buffers = [np.zeros(capacity, np.uint8) for _ in lists]
    addresses, fills = np.array([address_of(b) for b in buffers]), np.zeros(len(lists), np.int64)
    out, turn = [b"" for _ in lists], 0
    while turn < len(lists):
        turn = seg.append_rows(
            address_of(slab), first, row_bytes, rows, begins, ends, addresses, fills, capacity, turn
        )
        assert (fills <= capacity).all()
        if turn < len(lists):
            assert fills[turn] + row_bytes > capacity
            assert begins[turn] < ends[turn]
            out[turn] += buffers[turn][: fills[turn]].tobytes()
            fills[turn] = 0
    for own, buffer, fill, found in zip(lists, buffers, fills, out, strict=True):
        assert found + buffer[:fill].tobytes() == slab[np.array(own, np.int64)].tobytes()


def test_too_little_memory_says_how_much_works(tmp_path: Path) -> None:
    target = target_in(tmp_path / "out", 1000, 512)
    route = seg.Route(lists_of(tmp_path / "lists", [np.arange(1000)]), np.zeros(1, np.int64), target)
    with pytest.raises(BudgetError) as error:
        seg.plan_packing([route], 512, 100_000)
    assert len(seg.plan_packing([route], 512, error.value.needed_bytes).episodes) == 1
    target.writer.close()
    route.rows.close()
