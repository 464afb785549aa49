"""Threads that share works: each does its own, all have ended afterwards, and what one raises is raised."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featstore.order.crew import Crew, apart

LINE_BYTES = 128


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_number_does_its_share_of_every_work_in_a_thread_of_its_own(threads: int) -> None:
    done: list[tuple[int, int]] = []
    who: dict[int, set[int]] = {number: set() for number in range(threads)}
    with Crew(threads, "crew-test") as crew:
        for work in range(20):

            def share(number: int, work: int = work) -> None:
                who[number].add(threading.get_ident())
                done.append((work, number))

            crew.run(share)
            assert sorted(done) == [(w, n) for w in range(work + 1) for n in range(threads)]
    assert all(len(idents) == 1 for idents in who.values())
    assert who[0] == {threading.get_ident()}
    assert len(set.union(*who.values())) == threads
    assert not [thread for thread in threading.enumerate() if thread.name == "crew-test"]


def test_others_work_until_they_are_waited_for() -> None:
    """Beside who has them begin; what one of them raises is raised where they are waited for."""
    go, ended = threading.Event(), list[int]()

    def share(number: int) -> None:
        assert go.wait(10)
        if number == 2:
            raise ValueError("share 2")
        ended.append(number)

    with Crew(3, "crew-test") as crew:
        crew.begin(share)
        assert ended == []
        go.set()
        with pytest.raises(ValueError, match="share 2"):
            crew.wait()
        assert ended == [1]
        crew.wait()  # for nothing
        crew.begin(ended.append)
    assert sorted(ended) == [1, 1, 2], "what was begun is done"


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_what_a_share_raises_is_raised_when_all_have_ended_and_the_next_work_is_done(bad: int) -> None:
    ended: list[int] = []
    begun = threading.Barrier(3)

    def share(number: int) -> None:
        begun.wait(10)
        if number == bad:
            raise ValueError(f"share {number}")
        ended.append(number)

    with Crew(3, "crew-test") as crew:
        with pytest.raises(ValueError, match=f"share {bad}"):
            crew.run(share)
        assert sorted(ended) == [number for number in range(3) if number != bad]
        crew.run(ended.append)
    assert len(ended) == 5


@given(st.integers(1, 9), st.integers(1, 40), st.sampled_from([np.int32, np.int64, np.uint64]))
def test_rows_that_are_apart_share_no_line_of_the_caches(rows: int, columns: int, dtype: type) -> None:
    made = [apart(rows, columns, dtype) for _ in range(3)]
    assert all(one.shape == (rows, columns) and one.dtype == dtype and not one.any() for one in made)
    lines: set[int] = set()
    for row in (row for one in made for row in one):
        assert row.flags.c_contiguous
        assert row.flags.writeable
        begin = row.ctypes.data
        mine = set(range(begin // LINE_BYTES, (begin + row.nbytes - 1) // LINE_BYTES + 1))
        assert not lines & mine
        lines |= mine
