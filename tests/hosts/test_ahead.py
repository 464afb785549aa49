"""Rows of other hosts that are wanted soonest stay: what is known of steps to come against plain loops, what
is asked of other hosts against MIN, and that every row is the source's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import featstore
from featstore.base.native import address_of
from featstore.errors import BudgetError
from featstore.hosts import window
from featstore.hosts.ahead import Ahead, AheadTier, Upcoming
from featstore.hosts.owners import Owners
from featstore.loaders.divided import GivenShare
from featstore.loaders.online import lookahead
from featstore.loaders.online.lookahead import Lookahead
from featstore.sampling.batches import RankedBatches
from featstore.testing import ArraySource, check_source

NODES, NEVER = 3000, int(window.NO_USE)
Steps = list[NDArray[np.int64]]


def steps_like(rng: np.random.Generator, count: int, most: int = 60, least: int = 0) -> Steps:
    """Some nodes are wanted far more often than others."""
    weights = 1 / np.arange(1, NODES + 1)
    return [
        rng.choice(NODES, rng.integers(least, most), replace=False, p=weights / weights.sum())
        for _ in range(count)
    ]


def look_ahead(coming: Upcoming, steps: Steps, step: int) -> None:
    while coming.wants(step):
        coming.add(steps[coming.added] if coming.added < len(steps) else np.empty(0, np.int64))


def held_by(coming: Upcoming) -> dict[int, tuple[int, int]]:
    """Of each row that a slot has, the slot, and when it is wanted next; and that all of the map agrees."""
    w, found = coming._window, dict[int, tuple[int, int]]()
    start, size = int(w.counts[window.START] - w.counts[window._BASE]), len(w.rows)
    alive = {(start + k) % size for k in range(int(w.counts[window._TAKEN]))}
    for slot in np.flatnonzero(w.uses[:-1] >= 0).tolist():
        owner = int(w.owners[slot])
        if owner >= 0:
            assert owner in alive
            assert w.slots[owner] == slot
            row = int(w.rows[owner])
        else:
            assert w.entries[-2 - owner]["slot"] == slot
            assert w.uses[slot] == NEVER
            row = int(w.entries[-2 - owner]["row"])
        assert row not in found
        found[row] = slot, int(w.uses[slot])
    assert len([place for place in alive if w.slots[place] >= 0]) <= len(found)
    now = int(w.counts[window.NOW])
    begin = 0
    for table, (end, free, _) in enumerate(w.tables.tolist()):
        uses = w.uses[begin:end][w.uses[begin:end] >= 0]
        assert len(uses) + free == end - begin
        counted = np.zeros(window.STEPS_MAX + 1, np.int64)
        for use in uses.tolist():
            assert use >= now
            counted[window.STEPS_MAX if use == NEVER else use % window.STEPS_MAX] += 1
        np.testing.assert_array_equal(w.held[table], counted)
        begin = end
    used = w.entries[w.entries["last"] != -2]
    assert len(used) == w.counts[window._USED] == len({int(row) for row in used["row"]})
    return found


class Plain:
    """What :class:`Upcoming` does for one table, where there is memory for all that is looked at."""

    def __init__(self, slots: int) -> None:
        self.slots, self.steps, self.now = slots, list[set[int]](), -1
        self.held: set[int] = set()

    def use(self, row: int) -> int:
        known = range(self.now + 1, len(self.steps))
        return next((step for step in known if row in self.steps[step]), NEVER)

    def served(self) -> set[int]:
        """Of the rows that are there, those of the present step, and those that no step to come wants."""
        return {row for row in self.held if row in self.steps[self.now] or self.use(row) == NEVER}


@given(
    seed=st.integers(0, 2**32 - 1), slots=st.integers(1, 120), late=st.booleans(), any_order=st.booleans(),
    first=st.sampled_from([0, 2**33]), counted=st.booleans(),
)  # fmt: skip
def test_those_rows_stay_that_are_wanted_soonest(
    seed: int, slots: int, late: bool, any_order: bool, first: int, counted: bool
) -> None:
    """By a plain model, in every step: of what was there and what has come, as many as there are slots, and
    none that is wanted later than one that went. Rows are what they are; and what comes late, or is asked for
    in another order than it was added, or twice, does no harm. So many places have been given out that they
    are counted anew."""
    rng = np.random.default_rng(seed)
    steps = [one + first for one in steps_like(rng, 40, 41, 0)]
    coming, plain = Upcoming(6000, [slots], [first, first + NODES]), Plain(slots)
    if counted:
        coming._window.counts[[window.START, window._BASE]] = window._LAST_MAX - 500
    rows, out = np.zeros((slots, 8), np.uint8), np.zeros(41, np.int64)
    waiting: list[tuple[Any, NDArray[np.int64]]] = []
    for step, ids in enumerate(steps):
        look_ahead(coming, steps, step)
        plain.steps = [set(one.tolist()) for one in steps[: coming.added]]
        coming.begin(step)
        plain.now = step
        asked = rng.permutation(ids) if any_order else ids
        to = rng.permutation(len(asked)).astype(np.int32)
        out[:] = -1
        missed = coming.serve(0, asked - first, address_of(rows), 8, address_of(out), to)
        assert {int(id_) + first for id_ in missed.ids} == set(asked.tolist()) - plain.held
        here = np.isin(asked, missed.ids + first, invert=True)
        np.testing.assert_array_equal(out[to[here]], asked[here])
        np.testing.assert_array_equal(to[~here], missed.places)
        out[missed.places] = missed.ids + first
        waiting.append((missed, out.copy()))
        if late and step % 3:
            continue
        for one, come in waiting + waiting[:1]:  # the first one twice
            coming.keep(0, one, address_of(come), 8, address_of(rows))
        waiting.clear()
        before, plain.held = plain.held, set(held_by(coming))
        assert len(plain.held) <= slots
        come = (missed.ids + first).tolist()
        if not late:
            assert plain.held <= before | set(come)
            if len(before | set(come)) > slots:
                assert len(plain.held) == slots
            gone = (before | set(come)) - plain.held
            assert not gone or max(map(plain.use, plain.held)) <= min(map(plain.use, gone))
        for row, (_, use) in held_by(coming).items():
            assert use == plain.use(row)
        there, served = np.arange(first, first + NODES), np.array(list(plain.served()), np.int64)
        np.testing.assert_array_equal(coming.holds(0, there - first), np.isin(there, served))
    if counted:
        assert coming._window.counts[window.START] < window._LAST_MAX // 2 or sum(map(len, steps)) <= 500
    coming.restart()
    assert set(held_by(coming)) == plain.held
    assert window.room(coming._window) == 6000
    assert {use for _, use in held_by(coming).values()} <= {NEVER}


def test_as_many_steps_are_known_as_there_is_memory_for_and_not_more() -> None:
    """A few more with each one that begins, until the window is full; and its memory comes back."""
    steps = steps_like(np.random.default_rng(1), 700, 41, 40)
    large, small = Upcoming(128 * 40, [30], [0, NODES]), Upcoming(450, [30], [0, NODES])
    for step in range(500):
        for coming in (large, small):
            look_ahead(coming, steps, step)
            coming.begin(step)
        assert large.added == min(17 * (step + 1), step + window.STEPS_MAX - 1 + (step == 0))
        assert small.added - step <= 12
        held_by(large)
        held_by(small)
    assert small.added >= 500 + 8
    for coming in (large, small):
        w = coming._window
        live = len(np.unique(np.concatenate(steps[500 - 1 : coming.added])))
        assert w.counts[window._USED] <= live + 30


def test_larger_mini_batches_later_are_looked_at_as_far_as_there_is_memory() -> None:
    """What is said of a row is always true, and nothing is said of what there is no memory for."""
    rng = np.random.default_rng(0)
    steps = steps_like(rng, 30, 20) + steps_like(rng, 60, 800) + steps_like(rng, 60, 30)
    coming, known = Upcoming(400, [50], [0, NODES]), 0
    rows, out = np.zeros((50, 8), np.uint8), np.zeros(800, np.int64)
    for step, ids in enumerate(steps):
        look_ahead(coming, steps, step)
        coming.begin(step)
        missed = coming.serve(
            0, ids, address_of(rows), 8, address_of(out), np.arange(len(ids), dtype=np.int32)
        )
        out[missed.places] = missed.ids
        np.testing.assert_array_equal(out[: len(ids)], ids)
        coming.keep(0, missed, address_of(out), 8, address_of(rows))
        for row, (_, use) in held_by(coming).items():
            assert use == NEVER or row in steps[use]
            known += use != NEVER
    assert known > 1000


def test_steps_that_nobody_went_to_are_let_go() -> None:
    """As where an epoch is gone on with in its middle; and a step that is long over tells nothing."""
    steps = steps_like(np.random.default_rng(1), 400)
    coming = Upcoming(20_000, [40], [0, NODES])
    for step in range(301):
        look_ahead(coming, steps, step)
    coming.begin(300)
    look_ahead(coming, steps, 300)
    out = np.zeros(60, np.int64)
    rows = np.zeros((40, 8), np.uint8)
    to = np.arange(len(steps[300]), dtype=np.int32)
    missed = coming.serve(0, steps[300], address_of(rows), 8, address_of(out), to)
    assert len(missed.ids) == len(steps[300])
    coming.begin(301)
    look_ahead(coming, steps, 301)
    to = np.arange(len(steps[301]), dtype=np.int32)
    missed = coming.serve(0, steps[301], address_of(rows), 8, address_of(out), to)
    out[missed.places] = missed.ids
    coming.keep(0, missed, address_of(out), 8, address_of(rows))
    held = held_by(coming)
    assert len(held) > 5
    for row, (_, use) in held.items():
        assert use == NEVER or (use > 301 and row in steps[use])
    coming.begin(3)  # long over
    assert held_by(coming) == held
    coming.begin(10**6)  # and far beyond all that is known
    assert {use for _, use in held_by(coming).values()} == {NEVER}
    assert window.room(coming._window) == 20_000


def test_what_comes_after_steps_were_forgotten_does_not_stay() -> None:
    """Its next uses were those of other steps."""
    steps = [np.arange(20)] * 10
    coming = Upcoming(2000, [40], [0, NODES])
    rows, out = np.zeros((40, 8), np.uint8), np.zeros(20, np.int64)
    look_ahead(coming, steps, 0)
    coming.begin(0)
    missed = coming.serve(0, steps[0], address_of(rows), 8, address_of(out), np.arange(20, dtype=np.int32))
    coming.restart()
    look_ahead(coming, steps, 0)
    coming.keep(0, missed, address_of(out), 8, address_of(rows))
    assert not held_by(coming)


def test_rows_of_a_step_are_all_different() -> None:
    """One that is named twice is looked at once."""
    steps = [np.array([5, 7, 5, 9, 9]), np.array([9, 5, 5]), np.array([7, 7])]
    coming = Upcoming(2000, [40], [0, NODES])
    rows, out = np.zeros((40, 8), np.uint8), np.zeros(20, np.int64)
    for step, ids in enumerate(steps):
        look_ahead(coming, steps, step)
        coming.begin(step)
        to = np.arange(len(ids), dtype=np.int32)
        missed = coming.serve(0, ids, address_of(rows), 8, address_of(out), to)
        out[missed.places] = missed.ids
        np.testing.assert_array_equal(out[: len(ids)], ids)
        coming.keep(0, missed, address_of(out), 8, address_of(rows))
        assert set(held_by(coming)) == {5, 7, 9}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[featstore.Store]:
    rng = np.random.default_rng(5)
    path = tmp_path_factory.mktemp("ahead")
    rows = {"a": rng.standard_normal((NODES, 512)).astype(np.float32), "b": rng.integers(0, 9, (70, 3))}
    with featstore.pack(path / "s", rows) as made:
        yield made


@pytest.fixture
def source(store: featstore.Store) -> ArraySource:
    with store.reader(memory="32MiB") as reader:
        rows = {n: reader.read({n: np.arange(store.table(n).rows)})[n] for n in ("a", "b")}
    return ArraySource(store, rows)


def least_asked(steps: Steps, slots: int) -> int:
    """What MIN asks for, that knows everything."""
    later_sets = [set(one.tolist()) for one in steps]
    kept: set[int] = set()
    asked = 0
    for step, wanted in enumerate(steps):
        now = set(wanted.tolist())
        asked += len(now - kept)
        due = {}
        for node in now | kept:
            later = (k for k in range(step + 1, len(steps)) if node in later_sets[k])
            due[node] = next(later, NEVER)
        ranked = sorted((one for one in due if due[one] != NEVER), key=lambda node: (due[node], node))
        kept = set(ranked[:slots])
    return asked


def test_hardly_more_is_asked_for_than_by_min(source: ArraySource) -> None:
    """And far less than by a buffer of as many slots that does not look ahead."""
    steps = steps_like(np.random.default_rng(2), 80, 200)
    ahead = Ahead([source.store.table("a")], 900_000)
    with closing(ahead.over(source, 900_000)) as tier:
        (slots,) = ahead.coming.slots
        assert 150 < slots < 500
        for step, wanted in enumerate(steps):
            look_ahead(ahead.coming, steps, step)
            ahead.begin(step)
            got = tier.submit({"a": wanted}, out=None).result()["a"]
            np.testing.assert_array_equal(got, source._arrays["a"][wanted])
        asked, source.asked = source.asked, 0
        assert asked + tier.hits() == sum(map(len, steps))
        assert 800_000 < tier.memory_bytes <= 900_000
    with closing(featstore.Buffer("s3-fifo", 900_000).over(source, 900_000)) as other:
        for wanted in steps:
            other.submit({"a": wanted}, out=None).result()
    assert asked < 1.05 * least_asked(steps, slots)
    assert asked < 0.85 * source.asked


def test_of_several_tables_each_has_its_share(source: ArraySource) -> None:
    """Memory is divided by weights; what is asked of each table is hardly more than by MIN in as many slots;
    and the same numbers of rows of different tables are not taken for one another."""
    rng, tables = np.random.default_rng(4), [source.store.table(name) for name in ("a", "b")]
    steps = [
        {"a": one, "b": rng.choice(70, 30, replace=False, p=np.arange(1, 71) / 2485)}
        for one in steps_like(rng, 80, 200)
    ]
    ahead = Ahead(tables, 900_000, [899, 1])
    asked = {"a": 0, "b": 0}
    with closing(ahead.over(source, 900_000)) as tier:
        slots = dict(zip(("a", "b"), ahead.coming.slots, strict=True))
        assert 150 < slots["a"] < 500
        assert 5 < slots["b"] < 30
        for step, wanted in enumerate(steps):
            while ahead.coming.wants(step):
                number, none = ahead.coming.added, np.empty(0, np.int64)
                ahead.add(steps[number] if number < len(steps) else {"a": none, "b": none})
            ahead.begin(step)
            for name in ("a", "b"):
                before = source.asked
                got = tier.submit({name: wanted[name]}, out=None).result()[name]
                asked[name] += source.asked - before
                np.testing.assert_array_equal(got, source._arrays[name][wanted[name]])
        assert 800_000 < tier.memory_bytes <= 900_000
        assert tier.holds("b", np.arange(70)).sum() <= slots["b"]
        check_source(tier, source._arrays, requests=5)
    for name in ("a", "b"):
        assert asked[name] < 1.05 * least_asked([one[name] for one in steps], slots[name])


def test_ids_of_other_dtypes_are_those_rows(source: ArraySource) -> None:
    """As lists of mini-batches have them: numbers of rows of several tables do not fit their dtypes."""
    tables = [source.store.table(name) for name in ("a", "b")]
    ahead = Ahead(tables, 900_000)
    with closing(ahead.over(source, 900_000)) as tier:
        for dtype in (np.uint8, np.int32, np.uint64):
            ahead.coming.restart()
            step = {"a": np.arange(40, 60).astype(dtype), "b": np.arange(50).astype(dtype)}
            for _ in range(3):
                ahead.add(step)
            for number in range(2):
                ahead.begin(number)
                for name, ids in step.items():
                    tier.submit({name: ids.astype(np.int64)}, out=None).result()
            assert tier.holds("a", np.arange(40, 60)).all()
            assert tier.holds("b", np.arange(50)).all()


def test_memory_is_divided_among_tables_that_are_looked_at(store: featstore.Store) -> None:
    """Not among those of edges, or of nodes that samples around this host's own nodes cannot reach at
    others."""
    split: Any = SimpleNamespace(
        tables={"a": store.table("a"), "b": store.table("b")}, table=store.table,
        owners={"a": SimpleNamespace(rows=1000), "b": SimpleNamespace(rows=20)},
        node_types=["a"], featureless=set(), part=SimpleNamespace(graphs={}),
    )  # fmt: skip
    assert [table.name for table in lookahead.tables_looked_at(split, GivenShare([]), False, None)] == ["a"]
    assert lookahead._remote_bytes(split, store.table("a"), GivenShare([])) == 2000 * 2048
    sampled = object.__new__(RankedBatches)
    assert lookahead._remote_bytes(split, store.table("a"), sampled) == 0


@pytest.mark.parametrize("memory", [150_000, 1_500_000])
def test_every_row_is_the_sources(source: ArraySource, memory: int) -> None:
    """Whatever is said of steps, in time or not."""
    rng = np.random.default_rng(3)
    ahead = Ahead([source.store.table("a")], memory)
    with closing(ahead.over(source, memory)) as tier:
        for step, wanted in enumerate(steps_like(rng, 130, 300)):
            ahead.coming.add(wanted)
            if step > 20:
                ahead.begin(step - int(rng.integers(0, 20)))
                tier.submit({"a": wanted}, out=None).result()
            if step % 10 == 0:
                check_source(tier, source._arrays, seed=step, requests=5)
                held_by(ahead.coming)
        assert tier.holds("a", np.arange(NODES)).any()
        assert not tier.holds("b", np.arange(70)).any()


@given(seed=st.integers(0, 2**32 - 1), slots=st.integers(1, 70), sets=st.integers(1, 5))
def test_few_mini_batches_again_and_again(source: ArraySource, seed: int, slots: int, sets: int) -> None:
    """As of short epochs: many rows are wanted next in the same step, and more than there are slots."""
    rng = np.random.default_rng(seed)
    common = rng.permutation(NODES)[:300]
    some = [rng.permutation(common)[: rng.integers(0, 300)] for _ in range(sets)]
    steps = [some[k] for k in rng.integers(0, sets, 60)]
    coming = Upcoming(36 * 300, [slots], [0, NODES])
    with closing(AheadTier(source, coming, {"a": np.empty(slots * 2048, np.uint8)})) as tier:
        for step, wanted in enumerate(steps):
            look_ahead(coming, steps, step)
            coming.begin(step)
            got = tier.submit({"a": wanted}, out=None).result()["a"]
            np.testing.assert_array_equal(got, source._arrays["a"][wanted])


def test_rows_that_begin_to_be_wanted_stay_until_they_are_asked_for(source: ArraySource) -> None:
    """Those of the mini-batch before may come later than that a step begins."""
    steps = [np.arange(10), np.arange(10, 20), np.arange(10), np.arange(10, 20), np.arange(10)]
    coming = Upcoming(400, [10], [0, NODES])
    rows, out, to = np.zeros((10, 8), np.uint8), np.zeros(10, np.int64), np.arange(10, dtype=np.int32)
    look_ahead(coming, steps, 0)
    coming.begin(0)
    first = coming.serve(0, steps[0], address_of(rows), 8, address_of(out), to)
    out[:] = steps[0]
    coming.keep(0, first, address_of(out), 8, address_of(rows))
    coming.begin(1)
    second = coming.serve(0, steps[1], address_of(rows), 8, address_of(out), to)
    coming.begin(2)
    out[:] = steps[1]
    coming.keep(0, second, address_of(out), 8, address_of(rows))
    assert set(held_by(coming)) == set(range(10))
    third = coming.serve(0, steps[2], address_of(rows), 8, address_of(out), to)
    assert not len(third.ids)
    np.testing.assert_array_equal(out, steps[2])


def test_small_windows_look_ahead_in_every_epoch(store: featstore.Store) -> None:
    """Where one step takes all of the memory, the steps of the next epoch are known by their numbers."""
    hosts = (np.arange(NODES) % 2).astype(np.uint8)
    split: Any = SimpleNamespace(
        tables={"a": store.table("a")}, table=store.table, owners={"a": Owners("a", hosts, 0, 2)},
        node_types=["a"], featureless=set(),
    )  # fmt: skip
    steps = [np.arange(first, first + 400) for first in (0, 300, 600)]
    share = GivenShare(steps)
    looking = Lookahead(split, share, 200_000, [store.table("a")], None)
    looking.trained = looking.sampled
    assert len(looking.ahead.coming._window.rows) < 600
    for epoch in range(3):
        for index, _ in enumerate(looking.epoch(epoch)):
            looking.begin(epoch, index)
            assert looking.ahead.coming._window.counts[window.NOW] == 3 * epoch + index


def test_looking_ahead_goes_on_after_a_large_mini_batch() -> None:
    rng = np.random.default_rng(0)
    steps = [*steps_like(rng, 10, 31, 30), np.arange(1500), *steps_like(rng, 80, 31, 30)]
    coming = Upcoming(1000, [50], [0, NODES])
    for step in range(60):
        look_ahead(coming, steps, step)
        coming.begin(step)
    assert coming.added > 70


def test_a_request_that_fails_leaves_nothing_wrong(source: ArraySource) -> None:
    steps = [np.arange(40, dtype=np.int64)] * 40
    ahead = Ahead([source.store.table("a")], 200_000)
    with closing(ahead.over(source, 200_000)) as tier:
        look_ahead(ahead.coming, steps, 0)
        ahead.begin(0)
        source.error = OSError("a host is gone")
        with pytest.raises(OSError, match="a host is gone"):
            tier.submit({"a": steps[0]}, out=None).result()
        source.error = None
        for _ in range(2):
            got = tier.submit({"a": steps[0]}, out=None).result()["a"]
            np.testing.assert_array_equal(got, source._arrays["a"][steps[0]])
        assert tier.hits() > 30


def test_too_little_memory_says_how_much_is_needed(source: ArraySource) -> None:
    table = source.store.table("a")
    with pytest.raises(BudgetError, match="keep rows of other hosts") as caught:
        Ahead([table], 1000)
    needed = caught.value.needed_bytes
    with pytest.raises(BudgetError):
        Ahead([table], needed - 1)
    with pytest.raises(BudgetError) as caught:
        Ahead([table, source.store.table("b")], needed)
    assert caught.value.needed_bytes > needed
    with closing(Ahead([table], needed).over(source, needed)) as tier:
        assert isinstance(tier, AheadTier)
        with pytest.raises(BudgetError, match="keep rows of other hosts"):
            Ahead([table], needed).over(source, needed - 1)
        check_source(tier, source._arrays, requests=3)


def test_a_list_of_mini_batches_is_looked_ahead_at(store: featstore.Store) -> None:
    """Of other hosts' rows, from epoch to epoch, when each is wanted next, ids that come twice included."""
    steps = steps_like(np.random.default_rng(2), 6, 60, 30)
    hosts = (np.arange(NODES) % 2).astype(np.uint8)
    split: Any = SimpleNamespace(
        tables={"a": store.table("a")},
        table=store.table,
        owners={"a": Owners("a", hosts, 0, 2)},
        node_types=["a"],
    )
    twice = [np.concatenate([step, step[:5]]) for step in steps]
    share = GivenShare(twice)
    looking = Lookahead(split, share, 4 << 20, [store.table("a")], None)
    looking.trained = looking.sampled
    others = [{node for node in step.tolist() if node % 2} for step in steps] * 2
    known = 0
    for epoch in range(2):
        for index, _ in enumerate(looking.epoch(epoch)):
            looking.begin(epoch, index)
            now = 6 * epoch + index
            wanted, coming = np.array(sorted(others[now])), looking.ahead.coming
            places = np.arange(len(wanted), dtype=np.int32)
            missed = coming.serve(0, wanted, 0, 2048, 0, places)  # of which nothing is there
            assert coming.added >= 12
            w = coming._window
            for node, number in zip(missed.ids, missed.known, strict=True):
                following = [step for step in range(now + 1, min(12, coming.added)) if node in others[step]]
                place = w.flights[number % len(w.flights), 0]
                assert w.rows[place] == node
                if following:
                    assert now + w.later[place] == following[0]
                    known += 1
    assert known > 100
