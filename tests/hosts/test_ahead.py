"""Rows of other hosts that are wanted soonest stay: what is known of steps to come against plain loops, what
is asked of other hosts against MIN, and that every row is the source's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import featstore
from featstore.errors import BudgetError
from featstore.hosts.ahead import Ahead, AheadTier
from featstore.hosts.next_uses import STEPS_MAX, USES_MAX, NextUses
from featstore.hosts.owners import Owners
from featstore.loaders.divided import GivenShare
from featstore.loaders.online.lookahead import Lookahead
from featstore.testing import ArraySource, check_source
from featstore.tiers.slots.layout import MIN, NEVER
from featstore.tiers.slots.policies_min import count_by_use
from featstore.tiers.slots.rows import buffer_bytes

NODES = 3000
Steps = list[NDArray[np.int64]]


def steps_like(rng: np.random.Generator, count: int, most: int = 60, least: int = 0) -> Steps:
    """Some nodes are wanted far more often than others."""
    weights = 1 / np.arange(1, NODES + 1)
    return [
        rng.choice(NODES, rng.integers(least, most), replace=False, p=weights / weights.sum())
        for _ in range(count)
    ]


def look_ahead(uses: NextUses, steps: Steps, step: int) -> None:
    while uses.added < step + uses.wanted_ahead:
        uses.add(steps[uses.added] if uses.added < len(steps) else np.empty(0, np.int64))


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 150), entries=st.sampled_from([900, 2500, 40000]))
def test_the_next_use_is_that_of_a_plain_loop(seed: int, count: int, entries: int) -> None:
    """Of all rows of a step, as far as steps have been looked at; of others there is none."""
    steps = steps_like(np.random.default_rng(seed), count, 41, 37)
    sets = [set(one.tolist()) for one in steps]
    uses = NextUses(36 * entries)
    assert uses.wanted_ahead == 2 * STEPS_MAX
    for step, wanted in enumerate(steps):
        look_ahead(uses, steps, step)
        uses.begin(step)
        block = uses.wanted_ahead // 2
        first = step // block * block
        known = sets[step + 1 : first + 2 * block]
        expected = [
            next((step + 1 + k - first for k, later in enumerate(known) if node in later), NEVER)
            for node in wanted.tolist()
        ]
        np.testing.assert_array_equal(uses.of(wanted), expected)
        others = np.setdiff1d(np.arange(NODES), wanted)[:50]
        assert (uses.of(others) == NEVER).all()
    assert 8 <= block <= STEPS_MAX
    if entries == 40000:
        assert block == STEPS_MAX


def steps_by_use(blocks: Any) -> dict[int, list[int]]:
    return {
        block.use + k: block.ids[low:high].tolist()
        for block in blocks
        for k, (low, high) in enumerate(pairwise(block.offsets.tolist()))
    }


@given(seed=st.integers(0, 2**32 - 1), entries=st.sampled_from([700, 9000]))
def test_at_the_begin_of_a_block_all_steps_that_are_known_are_told(seed: int, entries: int) -> None:
    """Each by its number from there on, with its ids, ascending; and all ids where there is memory."""
    steps = steps_like(np.random.default_rng(seed), 60, 41, 1)
    uses, begun = NextUses(36 * entries), 0
    told: list[dict[int, list[int]]] = []
    for step in range(len(steps)):
        look_ahead(uses, steps, step)
        uses.begin(step, lambda _, blocks: told.append(steps_by_use(blocks)))
        if len(told) > begun:
            begun, ahead = len(told), uses.wanted_ahead
            expected = [sorted(one.tolist()) for one in steps[step : step + ahead]]
            expected += [[]] * (ahead - len(expected))
            assert list(told[-1]) == list(range(ahead))
            for use, ids in told[-1].items():  # of what there is no memory for nothing
                assert ids == expected[use] or (entries == 700 and {*ids} < {*expected[use]})
    assert begun == -(-len(steps) // (uses.wanted_ahead // 2))


@given(seed=st.integers(0, 2**32 - 1), slots=st.integers(1, 200), late=st.booleans())
def test_of_rows_that_wait_it_is_known_when_they_are_wanted(
    source: ArraySource, seed: int, slots: int, late: bool
) -> None:
    """At the begin of a block of each row in a slot, by a plain loop; and at any time how many slots have
    which next use, also where rows are asked for twice before they have come."""
    steps = steps_like(np.random.default_rng(seed), 60, 41, 1)
    uses = NextUses(36 * 9000)
    tier = AheadTier(source, uses, {"a": buffer_bytes(slots, 2048, MIN, USES_MAX)}, {"a": 0})
    rows, count = tier._kept["a"].rows, np.zeros(USES_MAX + 1, np.int64)
    with closing(tier):
        for step, wanted in enumerate(steps):
            look_ahead(uses, steps, step)
            shift = tier._shift
            uses.begin(step, tier.note_uses)
            if tier._shift > shift:
                known = [set(one.tolist()) for one in steps[step : step + uses.wanted_ahead]]
                for held in rows._map.slots:
                    first = next((k for k, one in enumerate(known) if int(held["row"]) in one), NEVER)
                    assert held["row"] < 0 or held["stamp"] == first
            asked = [tier.submit({"a": wanted}, out=None) for _ in range(1 + late)]
            for one in asked:
                np.testing.assert_array_equal(one.result()["a"], source._arrays["a"][wanted])
                count_by_use(rows._map, count)
                np.testing.assert_array_equal(rows._idle, count)


def test_larger_mini_batches_later_are_looked_at_as_far_as_there_is_memory() -> None:
    """What is said of a row is always true, and nothing is said of what there is no memory for."""
    rng = np.random.default_rng(0)
    steps = steps_like(rng, 30, 20) + steps_like(rng, 60, 800)
    uses, known = NextUses(36 * 400), 0
    for step, wanted in enumerate(steps):
        look_ahead(uses, steps, step)
        uses.begin(step)
        first = step // (uses.wanted_ahead // 2) * (uses.wanted_ahead // 2)
        for node, use in zip(wanted, uses.of(wanted), strict=True):
            known += use != NEVER
            assert use == NEVER or node in steps[first + use]
    assert known > 100
    with pytest.raises(BudgetError, match="look ahead"):
        NextUses(100)


def test_steps_that_nobody_went_to_are_let_go() -> None:
    """As where an epoch is gone on with in its middle."""
    steps = steps_like(np.random.default_rng(1), 400)
    uses = NextUses(36 * 2000)
    for step in range(301):
        look_ahead(uses, steps, step)
    told: list[int] = []
    uses.begin(300, lambda shift, first: told.append(shift))
    assert told == [USES_MAX]
    block = uses.wanted_ahead // 2
    first = 300 // block * block
    found = uses.of(steps[300])
    assert (found != NEVER).any()
    for node, use in zip(steps[300], found, strict=True):
        assert use == NEVER or node in steps[first + use]
    uses.begin(3)  # long over
    assert (uses.of(steps[3]) == NEVER).all()
    uses.restart()
    look_ahead(uses, steps, 0)
    uses.begin(0)
    assert (uses.of(steps[0]) != NEVER).any()


def test_of_a_block_that_begins_before_it_is_whole_nothing_is_known() -> None:
    """Nor later, when it is: what is said is true, or nothing."""
    steps = steps_like(np.random.default_rng(2), 60, 60, 40)
    uses = NextUses(36 * 1000)
    while not uses.added or uses.wanted_ahead == 2 * STEPS_MAX:
        uses.add(steps[uses.added])
    block = uses.wanted_ahead // 2
    uses.begin(0)
    assert (uses.of(steps[0]) == NEVER).sum() < len(steps[0])
    uses.begin(block)
    while uses.added < 3 * block:
        uses.add(steps[uses.added])
    for step in range(block, 2 * block):
        uses.begin(step)
        assert (uses.of(steps[step]) == NEVER).all()
    uses.begin(2 * block)
    assert (uses.of(steps[2 * block]) != NEVER).any()


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
        slots = tier._kept["a"].rows.slots
        assert 150 < slots < 500
        for step, wanted in enumerate(steps):
            look_ahead(ahead.uses, steps, step)
            ahead.begin(step)
            got = tier.submit({"a": wanted}, out=None).result()["a"]
            np.testing.assert_array_equal(got, source._arrays["a"][wanted])
        asked, source.asked = source.asked, 0
        assert asked + tier.hits() == sum(map(len, steps))
        assert tier.memory_bytes <= 900_000 * 5 // 6
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
        slots = {name: kept.rows.slots for name, kept in tier._kept.items()}
        assert 150 < slots["a"] < 500
        assert 5 < slots["b"] < 30
        for step, wanted in enumerate(steps):
            while ahead.uses.added < step + ahead.uses.wanted_ahead:
                number, none = ahead.uses.added, np.empty(0, np.int64)
                ahead.add(steps[number] if number < len(steps) else {"a": none, "b": none})
            ahead.begin(step)
            for name in ("a", "b"):
                before = source.asked
                got = tier.submit({name: wanted[name]}, out=None).result()[name]
                asked[name] += source.asked - before
                np.testing.assert_array_equal(got, source._arrays[name][wanted[name]])
        assert tier.memory_bytes <= 900_000 * 5 // 6
        assert tier.holds("b", np.arange(70)).sum() <= slots["b"]
        check_source(tier, source._arrays, requests=5)
    for name in ("a", "b"):
        assert asked[name] < 1.05 * least_asked([one[name] for one in steps], slots[name])


@pytest.mark.parametrize("memory", [150_000, 1_500_000])
def test_every_row_is_the_sources(source: ArraySource, memory: int) -> None:
    """Whatever is said of steps, in time or not."""
    rng = np.random.default_rng(3)
    ahead = Ahead([source.store.table("a")], memory)
    with closing(ahead.over(source, memory)) as tier:
        for step, wanted in enumerate(steps_like(rng, 130, 300)):
            ahead.uses.add(wanted)
            if step > 20:
                ahead.begin(step - int(rng.integers(0, 20)))
                tier.submit({"a": wanted}, out=None).result()
            if step % 10 == 0:
                check_source(tier, source._arrays, seed=step, requests=5)
        assert tier.holds("a", np.arange(NODES)).any()
        assert not tier.holds("b", np.arange(70)).any()


@given(seed=st.integers(0, 2**32 - 1), slots=st.integers(1, 70), sets=st.integers(1, 5))
def test_few_mini_batches_again_and_again(source: ArraySource, seed: int, slots: int, sets: int) -> None:
    """As of short epochs: many rows are wanted next in the same step, and more than there are slots."""
    rng = np.random.default_rng(seed)
    common = rng.permutation(NODES)[:300]
    some = [rng.permutation(common)[: rng.integers(0, 300)] for _ in range(sets)]
    steps = [some[k] for k in rng.integers(0, sets, 60)]
    uses = NextUses(36 * 8 * 300)
    tier = AheadTier(source, uses, {"a": buffer_bytes(slots, 2048, MIN, USES_MAX)}, {"a": 0})
    assert tier._kept["a"].rows.slots == slots
    with closing(tier):
        for step, wanted in enumerate(steps):
            look_ahead(uses, steps, step)
            uses.begin(step, tier.note_uses)
            got = tier.submit({"a": wanted}, out=None).result()["a"]
            np.testing.assert_array_equal(got, source._arrays["a"][wanted])


def test_a_request_that_fails_leaves_nothing_wrong(source: ArraySource) -> None:
    steps = [np.arange(40, dtype=np.int64)] * 40
    ahead = Ahead([source.store.table("a")], 200_000)
    with closing(ahead.over(source, 200_000)) as tier:
        look_ahead(ahead.uses, steps, 0)
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
            wanted = np.array(sorted(others[now]))
            for node, use in zip(wanted, looking.ahead.uses.of(wanted), strict=True):
                # all twelve steps are of the first block
                following = [step for step in range(now + 1, 12) if node in others[step]]
                if following:
                    assert use == following[0]
                    known += 1
    assert known > 100
