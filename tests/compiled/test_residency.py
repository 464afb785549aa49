"""Residency: MIN is optimal, what a schedule says is in a slot is there, in every round."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore.compiled import residency as res
from featstore.compiled.lists import RowLists, RowListsWriter
from featstore.compiled.residency import NEVER, MinCache, keep_fixed, keep_min, most_used
from featstore.disk import Disk

ROWS = 12
traces = st.lists(st.lists(st.integers(0, ROWS - 1), unique=True, max_size=6), min_size=1, max_size=9)


def written(path: Path, trace: list[list[int]]) -> RowLists:
    writer = RowListsWriter(Disk(), path, np.int32)
    for rows in trace:
        writer.append(np.array(rows, np.int64))
    return writer.finish()


def counted(trace: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    uses, first = np.zeros(ROWS, np.uint32), np.full(ROWS, NEVER, np.int32)
    for batch, rows in enumerate(trace):
        res.count_uses(np.array(rows, np.int64), batch, uses, first)
    return uses, first


def next_use_twin(trace: list[list[int]], batch: int, row: int) -> int:
    return next((b for b in range(batch + 1, len(trace)) if row in trace[b]), int(NEVER))


@given(trace=traces)
def test_counts_and_next_uses_are_those_of_plain_python(trace: list[list[int]]) -> None:
    uses, first = counted(trace)
    assert uses.tolist() == [sum(r in rows for rows in trace) for r in range(ROWS)]
    assert first.tolist() == [next_use_twin(trace, -1, r) for r in range(ROWS)]
    later = np.full(ROWS, NEVER, np.int32)
    for batch in range(len(trace) - 1, -1, -1):
        out = np.empty(len(trace[batch]), np.int32)
        res.next_uses(np.array(trace[batch], np.int64), batch, later, out)
        assert out.tolist() == [next_use_twin(trace, batch, r) for r in trace[batch]]


def misses_of_min(trace: list[list[int]], capacity: int) -> int:
    cache = MinCache(ROWS, capacity, len(trace))
    held: dict[int, int] = {}  # slot to row
    misses = 0
    for batch, rows in enumerate(trace):
        uses = np.array([next_use_twin(trace, batch, r) for r in rows], np.int32)
        hit, admit, hits = cache.step(batch, np.array(rows, np.int64), uses)
        assert hits == (hit >= 0).sum()
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
@settings(max_examples=60, deadline=None)
def test_no_content_of_memory_misses_fewer_rows_than_min(trace: list[list[int]], capacity: int) -> None:
    assert misses_of_min(trace, capacity) == fewest_misses(trace, capacity)


@given(trace=traces, capacity=st.integers(0, ROWS))
@settings(max_examples=80, deadline=None)
def test_slots_hold_what_the_schedule_says_round_after_round(
    trace: list[list[int]], capacity: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("lists")
    rows, (uses, first) = written(folder / "rows", trace), counted(trace)
    new = [RowListsWriter(Disk(), folder / name, np.int32) for name in ("next", "hits", "admits", "fixed")]
    fixed = keep_fixed(rows, uses, capacity, new[3])
    found = keep_min(rows, first, capacity, *new[:3])
    assert found.admits is not None
    assert found.missed_rows + found.hit_rows == rows.total == fixed.missed_rows + fixed.hit_rows
    slots, place = found.start.copy(), np.arange(len(found.start))
    assert (slots >= 0).all()
    for _ in range(3):
        assert slots[place].tolist() == found.start.tolist()
        for batch, wanted in enumerate(trace):
            hit, admit = found.hits[batch], found.admits[batch]
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
    for lists in (rows, found.hits, found.admits, fixed.hits):
        lists.close()


@given(trace=traces, capacity=st.integers(0, ROWS))
@settings(max_examples=60, deadline=None)
def test_the_fixed_set_is_the_best_of_its_size(
    trace: list[list[int]], capacity: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("lists")
    rows, (uses, _) = written(folder / "rows", trace), counted(trace)
    members = most_used(uses, capacity)
    assert members.tolist() == sorted(set(members.tolist()))
    assert len(members) == min(capacity, int((uses > 0).sum()))
    assert uses[members].sum() == np.sort(uses)[::-1][:capacity].sum()
    found = keep_fixed(rows, uses, capacity, RowListsWriter(Disk(), folder / "hits", np.int32))
    assert found.hit_rows == uses[members].sum()
    assert found.admits is None
    for batch, wanted in enumerate(trace):
        slots = found.hits[batch]
        assert [found.start[s] if s >= 0 else -1 for s in slots] == [r if r in members else -1 for r in wanted]
    rows.close()
    found.hits.close()
