"""Residency: MIN is optimal, what a schedule says is in a slot is there, in every round."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore.compile import residency as res
from featstore.compile.residency import NO_NEXT_BATCH, MinCache, Residency, keep_fixed, keep_min, most_used
from featstore.compile.row_lists import RowLists, RowListsWriter
from featstore.storage.disk import Disk

ROWS = 12
traces = st.lists(st.lists(st.integers(0, ROWS - 1), unique=True, max_size=6), min_size=1, max_size=9)


def written(path: Path, trace: list[list[int]]) -> RowLists:
    writer = RowListsWriter(Disk(), path, np.int32)
    for rows in trace:
        writer.append(np.array(rows, np.int64))
    return writer.finish()


def next_use_twin(trace: list[list[int]], batch: int, row: int) -> int:
    return next((b for b in range(batch + 1, len(trace)) if row in trace[b]), int(NO_NEXT_BATCH))


def first_uses(trace: list[list[int]]) -> np.ndarray:
    return np.array([next_use_twin(trace, -1, r) for r in range(ROWS)], np.int32)


def uses_of(trace: list[list[int]]) -> np.ndarray:
    return np.array([sum(r in rows for rows in trace) for r in range(ROWS)], np.uint32)


def kept_min(folder: Path, trace: list[list[int]], capacity: int) -> Residency:
    rows = written(folder / "rows", trace)
    ahead = written(
        folder / "next", [[next_use_twin(trace, b, r) for r in own] for b, own in enumerate(trace)]
    )
    moves, misses = (RowListsWriter(Disk(), folder / name, np.int32) for name in ("moves", "misses"))
    found = keep_min(rows, ahead, first_uses(trace), capacity, moves, misses)
    rows.close()
    ahead.close()
    return found


def parted(moves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slots of hits, or -1, and slots of admissions, or -1."""
    return np.where(moves >= 0, moves, -1), np.where(moves < -1, -2 - moves, -1)


@given(trace=traces)
def test_uses_wrap_around(trace: list[list[int]]) -> None:
    first = first_uses(trace)
    for batch, rows in enumerate(trace):
        ahead = np.array([next_use_twin(trace, batch, r) for r in rows], np.int32)
        res.wrap_uses(np.array(rows, np.int32), ahead, first, len(trace))
        assert ahead.tolist() == [next_use_twin(trace + trace, batch, r) for r in rows]


def misses_of_min(trace: list[list[int]], capacity: int) -> int:
    cache = MinCache(ROWS, capacity, len(trace))
    held: dict[int, int] = {}  # slot to row
    misses = 0
    for batch, rows in enumerate(trace):
        uses = np.array([next_use_twin(trace, batch, r) for r in rows], np.int32)
        moves, hits, admitted = cache.step(batch, np.array(rows, np.int64), uses)
        hit, admit = parted(moves)
        assert (hits, admitted) == ((hit >= 0).sum(), (admit >= 0).sum())
        assert all(held[s] == r for s, r in zip(hit.tolist(), rows, strict=True) if s >= 0)
        assert not (set(hit[hit >= 0]) - set(range(capacity)))
        assert not ((hit >= 0) & (admit >= 0)).any()
        held |= {s: r for s, r in zip(admit.tolist(), rows, strict=True) if s >= 0}
        assert (cache.row_of_slot >= 0).sum() <= capacity
        misses += len(rows) - hits
    return misses


def fewest_misses(trace: list[list[int]], capacity: int) -> int:
    """By trying every content of memory after every mini-batch."""
    states = {frozenset[int](): 0}
    for rows in trace:
        after: dict[frozenset[int], int] = {}
        for held, cost in states.items():
            cost += len(set(rows) - held)
            can = held | set(rows)
            for kept in itertools.combinations(sorted(can), min(capacity, len(can))):
                after[frozenset(kept)] = min(cost, after.get(frozenset(kept), cost))
        states = after
    return min(states.values())


@given(
    trace=st.lists(st.lists(st.integers(0, 5), unique=True, max_size=3), min_size=1, max_size=6),
    capacity=st.integers(0, 4),
)
@settings(max_examples=35, deadline=None)
def test_no_content_of_memory_misses_fewer_rows_than_min(trace: list[list[int]], capacity: int) -> None:
    assert misses_of_min(trace, capacity) == fewest_misses(trace, capacity)


@given(trace=traces, capacity=st.integers(0, ROWS))
@settings(max_examples=50, deadline=None)
def test_slots_hold_what_the_schedule_says_round_after_round(
    trace: list[list[int]], capacity: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("lists")
    found = kept_min(folder, trace, capacity)
    assert found.missed_rows + found.hit_rows == sum(map(len, trace))
    slots, place = found.start.copy(), np.arange(len(found.start))
    assert (slots >= 0).all()
    for _ in range(3):
        assert slots[place].tolist() == found.start.tolist()
        for batch, wanted in enumerate(trace):
            hit, admit = parted(found.moves[batch])
            assert found.misses[batch].tolist() == [
                r for r, slot in zip(wanted, hit.tolist(), strict=True) if slot < 0
            ]
            assert found.admitted[batch] == (admit >= 0).sum()
            for row, slot in zip(wanted, hit.tolist(), strict=True):
                assert slot < 0 or slots[place[slot]] == row
            for row, slot in zip(wanted, admit.tolist(), strict=True):
                if slot >= 0:
                    slots[place[slot]] = row
        turn = found.turn.copy()
        free = sorted(set(range(len(turn))) - set(turn[turn >= 0].tolist()))
        lost = np.flatnonzero(turn < 0)
        assert len(lost) == found.restored_rows
        turn[lost] = free[: len(lost)]
        place = place[turn]
        slots[place[lost]] = found.start[lost]
    for lists in (found.moves, found.misses):
        lists.close()


@given(
    early=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=6), late=st.integers(0, ROWS - 1),
    capacity=st.integers(1, 6), capacities=st.integers(0, 4),
)  # fmt: skip
@settings(max_examples=35, deadline=None)
def test_all_slots_are_taken_where_a_trace_ends_with_few_rows(
    early: list[int], late: int, capacity: int, capacities: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A first round that is shorter than the trace has all of the rows that there are slots for."""
    trace = [[row] for row in early] + [[late]] * 20
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(res, "ROUND_CAPACITIES", capacities)
        found = kept_min(tmp_path_factory.mktemp("lists"), trace, capacity)
    assert len(found.start) == min(capacity, len({*early, late}))
    assert (found.start >= 0).all()
    found.moves.close()
    found.misses.close()


@given(trace=traces, capacity=st.integers(0, ROWS), capacities=st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_a_shorter_first_round_misses_about_as_little(
    trace: list[list[int]], capacity: int, capacities: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever is in memory before the first mini-batch: the rows that a round misses and brings back are at
    most what is in memory more than after a whole first round."""
    folders = [tmp_path_factory.mktemp("lists") for _ in range(2)]
    whole = kept_min(folders[0], trace, capacity)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(res, "ROUND_CAPACITIES", capacities)
        found = kept_min(folders[1], trace, capacity)
    assert found.missed_rows + found.restored_rows <= whole.missed_rows + 2 * capacity
    for one in (whole, found):
        one.moves.close()
        one.misses.close()


@given(trace=traces, capacity=st.integers(0, ROWS))
@settings(max_examples=35, deadline=None)
def test_the_fixed_set_is_the_best_of_its_size(
    trace: list[list[int]], capacity: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("lists")
    rows, uses = written(folder / "rows", trace), uses_of(trace)
    members = most_used(uses, capacity)
    assert members.tolist() == sorted(set(members.tolist()))
    assert len(members) == min(capacity, int((uses > 0).sum()))
    assert uses[members].sum() == np.sort(uses)[::-1][:capacity].sum()
    moves, misses = (RowListsWriter(Disk(), folder / name, np.int32) for name in ("moves", "misses"))
    found = keep_fixed(rows, uses, capacity, moves, misses)
    assert found.hit_rows == uses[members].sum()
    assert not found.admitted.any()
    for batch, wanted in enumerate(trace):
        slots = found.moves[batch]
        assert found.misses[batch].tolist() == [r for r in wanted if r not in members]
        assert [found.start[s] if s >= 0 else -1 for s in slots] == [
            r if r in members else -1 for r in wanted
        ]
    rows.close()
    found.moves.close()
    found.misses.close()
