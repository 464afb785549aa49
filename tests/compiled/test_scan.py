"""From ids to rows: lists forward and backward, distinct rows, and when each is used next."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore.compile.residency import NO_NEXT_BATCH
from featstore.compile.row_lists import RowListsWriter
from featstore.compile.scan import distinct_rows, last_rows
from featstore.storage.disk import Disk

ROWS = 12
batches = st.lists(st.lists(st.integers(0, ROWS - 1), max_size=9), min_size=1, max_size=7)


def distinct(ids: list[int], row_of: np.ndarray) -> list[int]:
    return list(dict.fromkeys(row_of[ids].tolist()))


@given(
    trace=batches, mapped=st.booleans(), counted=st.booleans(), wide=st.booleans(), seed=st.integers(0, 99)
)
@settings(deadline=None)
def test_rows_and_uses_are_those_of_plain_python(
    trace: list[list[int]], mapped: bool, counted: bool, wide: bool, seed: int
) -> None:
    row_of = np.random.default_rng(seed).permutation(ROWS) if mapped else np.arange(ROWS)
    own = [distinct(ids, row_of) for ids in trace]
    later, uses = np.full(ROWS, NO_NEXT_BATCH, np.int32), np.zeros(ROWS if counted else 0, np.uint32)
    table = row_of.astype(np.int32)[: ROWS if mapped else 0]
    for batch in range(len(trace) - 1, -1, -1):
        ids = np.array(trace[batch], np.int64 if wide else np.int32)
        rows, ahead = np.empty(len(ids), np.int64 if wide else np.int32), np.empty(len(ids), np.int32)
        count, bad = last_rows(ids, table, ROWS, batch, later, uses, rows, ahead)
        assert bad == -1
        assert rows[:count].tolist() == own[batch]
        wanted = [
            next((b for b in range(batch + 1, len(trace)) if r in own[b]), int(NO_NEXT_BATCH))
            for r in own[batch]
        ]
        assert ahead[:count].tolist() == wanted
    assert later.tolist() == [
        next((b for b in range(len(trace)) if r in own[b]), int(NO_NEXT_BATCH)) for r in range(ROWS)
    ]
    assert uses.tolist() == [sum(r in rows for rows in own) for r in range(ROWS)][: len(uses)]


@pytest.mark.parametrize("bad", [-1, ROWS, 2**40])
def test_ids_that_are_not_there_are_found(bad: int) -> None:
    ids = np.array([3, 5, bad, -7])
    later, rows, ahead = np.full(ROWS, NO_NEXT_BATCH, np.int32), np.empty(4, np.int32), np.empty(4, np.int32)
    none = np.empty(0, np.int32)
    assert last_rows(ids, none, ROWS, 0, later, np.empty(0, np.uint32), rows, ahead) == (-1, 2)
    assert (later == NO_NEXT_BATCH).all(), "nothing was noted"


@given(ids=st.lists(st.integers(0, ROWS - 1), max_size=20), seed=st.integers(0, 99))
@settings(deadline=None)
def test_places_and_copies(ids: list[int], seed: int) -> None:
    row_of = np.random.default_rng(seed).permutation(ROWS).astype(np.int32)
    given_ids, n = np.array(ids, np.int64), len(ids)
    rows, parts = np.empty(n, np.int64), [np.empty(n, np.int32) for _ in range(3)]
    seen = np.full(ROWS, -1, np.int32)
    count, copies = distinct_rows(given_ids, row_of, ROWS, seen, rows, *parts)
    assert (seen == -1).all()
    assert rows[:count].tolist() == distinct(ids, row_of)
    x = np.full(n, -1)
    x[parts[2][:count]] = rows[:count]
    x[parts[0][:copies]] = x[parts[1][:copies]]
    assert x.tolist() == row_of[given_ids].tolist()


@given(
    lists=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=30), max_size=12), backward=st.booleans(),
    spare=st.integers(0, 40)
)  # fmt: skip
@settings(deadline=None, max_examples=50)
def test_lists_come_back_whichever_came_first(
    lists: list[list[int]], backward: bool, spare: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path: Path = tmp_path_factory.mktemp("lists") / "lists"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("featstore.compile.row_lists._HOLD_BYTES", 100)
        total = sum(map(len, lists))
        writer = RowListsWriter(Disk(), path, np.int32, total + spare if backward else None)
        for values in lists[::-1] if backward else lists:
            writer.append(np.array(values, np.int64))
        found = writer.finish()
    assert found.total == total
    assert [found[i].tolist() for i in range(len(found))] == lists
    assert found.lengths().tolist() == [len(one) for one in lists]
    flat = [value for one in lists for value in one]
    assert found.part(total // 3, total).tolist() == flat[total // 3 :]
    found.close()
