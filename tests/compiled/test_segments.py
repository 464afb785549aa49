"""Batched packing: every segment has its rows, whatever the row size, the cut and the interruption."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.base.native import address_of
from featstore.compile import segment_plan
from featstore.compile import segments as seg
from featstore.compile.row_lists import RowLists, RowListsWriter
from featstore.compile.segment_pages import Target
from featstore.errors import BudgetError
from featstore.layout import TableLayout
from featstore.storage.disk import Disk
from featstore.storage.journal import UnfinishedPage
from featstore.storage.table_writer import TableWriter
from featstore.units import PAGE_BYTES


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
        patch.setattr(segment_plan, "SLAB_BYTES_MAX", data.draw(st.sampled_from([5000, 100_000])))
        patch.setattr(segment_plan, "BUFFER_BYTES_MIN", 8192)
        at = [0, 0]
        left: list[UnfinishedPage] = []
        for _ in range(2):
            target = target_in(tmp / "out", total, row_bytes)
            target.resume(left)
            route = segment_plan.Route(
                lists_of(tmp / "lists", lists), np.cumsum([0, *map(len, lists)])[:-1], target
            )
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
    base: featstore.Store, route: segment_plan.Route, memory: int, row_bytes: int, at: list[int],
    stop_after: int, left: list[UnfinishedPage],
) -> None:  # fmt: skip
    plan = segment_plan.plan_packing([route], base.table("x").rows, row_bytes, memory)
    saves = 0
    for earlier in plan.episodes[: at[0]]:
        for turn in range(len(earlier)):
            seg.Packing([route], earlier).resume(turn)

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


def append_plainly(
    slab: np.ndarray, rows: np.ndarray, begins: np.ndarray, ends: np.ndarray, chosen: np.ndarray,
    state: np.ndarray, memory: np.ndarray, free: np.ndarray, writes: np.ndarray, counts: np.ndarray,
    turn: int,
) -> int:  # fmt: skip
    """The twin of :func:`featstore.compile.segments.append_rows`, row by row, on arrays."""
    row_bytes, capacity = slab.shape[1], memory.shape[1]
    for t in range(turn, len(chosen)):
        own = state[:, chosen[t]]
        for row in rows[begins[t] : ends[t]]:
            if own[seg.BUFFER] != seg.NO_BUFFER and own[seg.FILL] + row_bytes > capacity:
                shared = own[seg.PAGE] * PAGE_BYTES < own[seg.BEGIN_BYTE]
                if shared or counts[seg.FREE_BUFFERS] == 0 or counts[seg.WRITES_MADE] == len(writes):
                    return t
                pages, left = divmod(int(own[seg.FILL]), PAGE_BYTES)
                writes[counts[seg.WRITES_MADE]] = own[seg.PAGE], pages, own[seg.BUFFER]
                counts += (-1, 1)
                following = free[counts[seg.FREE_BUFFERS]]
                full = memory[own[seg.BUFFER]]
                memory[following, :left] = full[pages * PAGE_BYTES : own[seg.FILL]]
                own[seg.PAGE] += pages
                own[seg.FILL], own[seg.BUFFER] = left, following
            if own[seg.BUFFER] == seg.NO_BUFFER:
                if counts[seg.FREE_BUFFERS] == 0:
                    return t
                counts[seg.FREE_BUFFERS] -= 1
                own[seg.BUFFER] = free[counts[seg.FREE_BUFFERS]]
            memory[own[seg.BUFFER], own[seg.FILL] : own[seg.FILL] + row_bytes] = slab[row]
            own[seg.FILL] += row_bytes
            begins[t] += 1
    return len(chosen)


@given(
    lists=st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=12), min_size=1, max_size=5),
    row_bytes=st.sampled_from([7, 600, 5000]),
    spare=st.integers(0, 3),
    room=st.integers(1, 3),
    begins_within=st.integers(0, 2),
    dtype=st.sampled_from([np.int32, np.int64]),
)
@settings(deadline=None)
def test_append_rows_is_its_twin(
    lists: list[list[int]], row_bytes: int, spare: int, room: int, begins_within: int, dtype: type
) -> None:
    """Wherever it stops, with whatever it has then, and when it goes on with what it lacked."""
    first, count = 100, len(lists)
    slab = np.random.default_rng(0).integers(0, 256, (61, row_bytes), np.uint8)
    rows = np.concatenate([np.array(own, np.int64) for own in lists])
    ends = np.cumsum([len(own) for own in lists])
    state = np.zeros((5, count), np.int64)
    state[seg.BUFFER] = seg.NO_BUFFER
    state[seg.BEGIN_BYTE, :begins_within] = state[seg.FILL, :begins_within] = 3
    memory = np.zeros((count + spare, 2 * PAGE_BYTES + row_bytes), np.uint8)
    both = []
    for _ in range(2):
        counts = np.array([len(memory), 0])
        own = [
            ends - [len(own) for own in lists],
            state,
            memory,
            np.arange(len(memory)),
            np.zeros((room, 3), np.int64),
        ]
        both.append([*(array.copy() for array in own), counts])
    chosen, turn, went_on = np.arange(count)[::-1].copy(), 0, 0
    ends_by_turn = ends  # lists are of turns, segments are the turns backward
    while turn < count:
        turns = []
        for plain, (begins, state, memory, free, writes, counts) in zip((True, False), both, strict=True):
            if plain:
                turns.append(
                    append_plainly(
                        slab, rows, begins, ends_by_turn, chosen, state, memory, free, writes, counts, turn
                    )
                )
                continue
            turns.append(
                seg.append_rows(
                    address_of(slab), first, row_bytes, (rows + first).astype(dtype), begins, ends_by_turn,
                    chosen, state, address_of(memory), memory.shape[1], free, writes, counts, turn,
                )
            )  # fmt: skip
        assert turns[0] == turns[1]
        for one, other in zip(*both, strict=True):
            np.testing.assert_array_equal(one, other)
        turn = turns[0]
        for _, state, _, free, writes, counts in both:  # writes are done, and first pages seen to
            for _, _, number in writes[: counts[seg.WRITES_MADE]]:
                free[counts[seg.FREE_BUFFERS]] = number
                counts += (1, 0)
            counts[seg.WRITES_MADE] = writes[:] = 0
            if turn < count:
                state[seg.BEGIN_BYTE, chosen[turn]] = 0
        went_on += 1
        assert went_on <= len(rows) + count * (room + 2)
        if turn < count and both[0][5][seg.FREE_BUFFERS] == 0:
            break  # all buffers are the segments'
    else:
        assert (both[0][0] == ends).all()


def test_too_little_memory_says_how_much_works(tmp_path: Path) -> None:
    target = target_in(tmp_path / "out", 1000, 512)
    route = segment_plan.Route(lists_of(tmp_path / "lists", [np.arange(1000)]), np.zeros(1, np.int64), target)
    for rows in (1000, 2**31, 2**40):  # each slab of a table is counted, too
        with pytest.raises(BudgetError) as error:
            segment_plan.plan_packing([route], rows, 512, 100_000)
        assert len(segment_plan.plan_packing([route], rows, 512, error.value.needed_bytes).episodes) == 1
    target.writer.close()
    route.rows.close()
