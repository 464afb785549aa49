"""The schedule of an epoch: everything once, nothing loaded over what is in use, everything by seed and
epoch."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore.loaders.mega.schedule import Schedule, Step, draw_steps

WORD = 2**64


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of a Schedule; partitions have gaps where some hold no rows."""
    count = draw(st.integers(1, 40))
    partitions = np.flatnonzero(np.random.default_rng(draw(st.integers(0, 99))).random(2 * count + 2) < 0.6)
    resident = draw(st.integers(1, 45))
    replaced = draw(st.one_of(st.just(resident), st.integers(1, resident)))
    return {
        "partitions": partitions,
        "resident": resident,
        "replaced": replaced,
        "seed": draw(st.integers(0, 2**63)),
        "epoch": draw(st.integers(0, 1000)),
    }


def steps_of(schedule: Schedule) -> list[Step]:
    return [schedule.step(index) for index in range(schedule.steps)]


@given(schedules())
@settings(max_examples=50)
def test_every_partition_is_loaded_once_an_epoch(options: dict[str, Any]) -> None:
    schedule = Schedule(**options)
    steps = steps_of(schedule)
    loaded = [step.partitions[step.loaded] for step in steps]
    np.testing.assert_array_equal(np.sort(np.concatenate([[], *loaded])), options["partitions"])
    assert schedule.resident <= min(options["resident"], max(1, len(options["partitions"])))
    assert schedule.replaced <= options["replaced"]
    assert schedule.steps >= -(-len(options["partitions"]) // options["resident"])
    for step in steps:
        assert 1 <= len(step.partitions) <= schedule.resident
        assert (
            len(step.partitions) == len(step.slots) == len(step.loaded) == len(set(step.partitions.tolist()))
        )
    for step in steps[:-1]:
        assert len(step.partitions) == schedule.resident
    if options["replaced"] == options["resident"] and steps:
        assert len(steps) == -(-len(options["partitions"]) // options["resident"]), "as few steps as can be"
        sizes = [len(step.partitions) for step in steps]
        assert all(step.loaded.all() for step in steps)
        assert sizes[0] - sizes[-1] < len(sizes), "a last step not much smaller than the others"


@given(schedules())
@settings(max_examples=50)
def test_nothing_is_loaded_into_a_slot_in_use(options: dict[str, Any]) -> None:
    schedule = Schedule(**options)
    steps = steps_of(schedule)
    slots_max = options["resident"] + options["replaced"]
    for step in steps:
        assert len(set(step.slots.tolist())) == len(step.slots)
        assert step.slots.min() >= 0
        assert step.slots.max() < schedule.slots <= slots_max
    for before, after in pairwise(steps):
        assert not set(after.slots[after.loaded].tolist()) & set(before.slots.tolist())
        was = dict(zip(before.partitions.tolist(), before.slots.tolist()))
        for partition, slot in zip(
            after.partitions[~after.loaded].tolist(), after.slots[~after.loaded].tolist()
        ):
            assert was[partition] == slot, "what stays stays where it is"
    if schedule.steps > 1 and schedule.replaced == schedule.resident:
        first = Schedule(**options | {"epoch": options["epoch"] + 1}).step(0)
        assert not set(first.slots.tolist()) & set(steps[-1].slots.tolist()), (
            "the next epoch's first step, too"
        )


@given(schedules())
@settings(max_examples=100)
def test_every_training_row_is_used_once_while_it_is_there(options: dict[str, Any]) -> None:
    schedule = Schedule(**options)
    partitions = options["partitions"]
    if len(partitions) == 0:
        assert schedule.steps == 0
        return
    rows = np.random.default_rng(1).choice(10**9, 200, replace=False)
    partition = np.random.default_rng(2).choice(partitions, 200)
    times = np.zeros(200, int)
    for step in steps_of(schedule):
        used = schedule.used_in(rows, partition, step.index)
        assert np.isin(partition[used], step.partitions).all()
        times += used
    assert (times == 1).all()
    first, last = schedule.steps_of(partition)
    for one, begin, end in zip(partition.tolist(), first.tolist(), last.tolist()):
        there = [step.index for step in steps_of(schedule) if one in step.partitions]
        assert there == list(range(begin, end + 1))


def mixed(word: int) -> int:
    word %= WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


@given(st.integers(0, WORD - 1), st.integers(0, WORD - 1), st.integers(0, 99))
@settings(max_examples=25)
def test_draw_steps_is_its_twin(seed: int, epoch: int, data: int) -> None:
    rng = np.random.default_rng(data)
    rows = rng.integers(0, 2**62, 50)
    first = rng.integers(0, 100, 50)
    last = first + rng.integers(0, 20, 50)
    key = mixed(mixed(seed) ^ epoch)
    wanted = [
        low + (mixed(key ^ mixed(row)) >> 20) % (high - low + 1)
        for row, low, high in zip(rows.tolist(), first.tolist(), last.tolist())
    ]
    assert draw_steps(rows, first, last, np.uint64(seed), np.uint64(epoch)).tolist() == wanted


def test_steps_of_a_row_are_drawn_evenly() -> None:
    rows = np.arange(20_000)
    drawn = draw_steps(rows, np.zeros(20_000, np.int64), np.full(20_000, 3), np.uint64(5), np.uint64(0))
    counts = np.bincount(drawn, minlength=4)
    assert abs(counts - 5000).max() < 300  # five standard deviations


def test_equal_seeds_give_equal_schedules_and_others_do_not() -> None:
    options: dict[str, Any] = {"partitions": np.arange(40), "resident": 8, "replaced": 3}
    orders = {
        (seed, epoch): Schedule(**options, seed=seed, epoch=epoch).order.tolist()
        for seed in range(3)
        for epoch in range(3)
    }
    assert len({tuple(order) for order in orders.values()}) == 9
    for (seed, epoch), order in orders.items():
        again = Schedule(**options, seed=seed, epoch=epoch)
        assert again.order.tolist() == order
        for one, other in zip(steps_of(again), steps_of(Schedule(**options, seed=seed, epoch=epoch))):
            assert one.slots.tolist() == other.slots.tolist()
            assert one.loaded.tolist() == other.loaded.tolist()


def test_one_step_stands_the_same_in_every_epoch() -> None:
    """What fits is loaded once and stays: a run resumed in a later epoch must find it in the same slots."""
    steps = [Schedule(np.arange(7), 9, 9, 3, epoch).step(0) for epoch in range(4)]
    assert len({tuple(zip(step.partitions.tolist(), step.slots.tolist())) for step in steps}) == 1


def test_collections_are_random() -> None:
    """Any two partitions meet in some epochs and not in others."""
    together = np.zeros((12, 12), int)
    for epoch in range(200):
        schedule = Schedule(np.arange(12), 4, 4, 0, epoch)
        for step in steps_of(schedule):
            together[np.ix_(step.partitions, step.partitions)] += 1
    np.fill_diagonal(together, 55)
    assert together.min() > 25  # 200 * 3 / 11 = 55 expected
    assert together.max() < 90


@pytest.mark.parametrize(("resident", "replaced"), [(4, 0), (4, 5), (0, 0)])
def test_impossible_replacement(resident: int, replaced: int) -> None:
    with pytest.raises(ValueError, match="can be replaced"):
        Schedule(np.arange(9), resident, replaced, 0, 0)


@pytest.mark.parametrize(("size", "share"), [(10, 0.006), (20, 0.024)])
def test_a_buffer_below_partitions_would_hit_little(size: int, share: float) -> None:
    """The figures of decision 0025: of 100 partitions, each loaded once an epoch, an LRU buffer of so many
    has this share of the loads."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = loads = 0
    for epoch in range(200):
        for step in steps_of(Schedule(np.arange(100), 1, 1, 0, epoch)):
            (partition,) = step.partitions.tolist()
            hits, loads = hits + (epoch > 0 and partition in kept), loads + (epoch > 0)
            kept.pop(partition, None)
            kept[partition] = None
            if len(kept) > size:
                kept.popitem(last=False)
    assert hits / loads == pytest.approx(share, abs=0.0006)
