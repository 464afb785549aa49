"""The choice for every class under one limit: as good as any, within the limit, and by the price of a
byte."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from lists_support import generators

from featstore.compile.allotment import allot
from featstore.compile.placement import SPLIT_STEPS, Location, Placement, class_rows, disk_rows
from featstore.compile.probes import ClassCosts
from featstore.compile.search import Rates, after, smooth


def tally_of(rows: list[int], rng: np.random.Generator) -> np.ndarray:
    """Rows of classes 1, 2 ... over the split steps at random."""
    tally = np.zeros((len(rows) + 1, SPLIT_STEPS), np.int64)
    for count, number in enumerate(rows, 1):
        tally[count] = np.bincount(rng.integers(0, SPLIT_STEPS, number), minlength=SPLIT_STEPS)
    return tally


def seconds_of(placement: Placement, tally: np.ndarray, seconds: np.ndarray) -> float:
    return float((class_rows(placement, tally) * np.arange(len(tally)) * seconds).sum())


def prices(rng: np.random.Generator, size: int) -> np.ndarray:
    """Seconds of a read: packed 1, base and shared anything from a little to a lot more."""
    return np.stack([rng.uniform(0.9, 20, size + 1), np.ones(size + 1), rng.uniform(1, 20, size + 1)])


rows_by_class = st.lists(st.sampled_from([0, 1, 7, 100, 3000]), min_size=1, max_size=4)


@given(generators(), rows_by_class, st.floats(0, 1.2), st.booleans())
@settings(max_examples=50)
def test_no_choice_of_places_is_better(
    rng: np.random.Generator, rows: list[int], share: float, leave_base: bool
) -> None:
    """Whatever fits takes at least as long as the allotment, but for what a 256th of the class that is split
    can save."""
    tally, seconds = tally_of(rows, rng), prices(rng, len(rows))
    limit = int(share * sum(count * number for count, number in enumerate(rows, 1)))
    found = allot(tally, seconds, 10, limit * 10 + 9, leave_base)
    places = (
        [Location.BASE, Location.PACKED, Location.SHARED]
        if leave_base
        else [Location.PACKED, Location.SHARED]
    )
    choices = [
        Placement(len(rows), tuple(map(int, choice)))
        for choice in itertools.product(places, repeat=len(rows))
        if choice[0] != Location.SHARED
    ]
    fitting = [choice for choice in choices if disk_rows(choice, tally) <= limit]
    if found is None:
        assert not leave_base
        assert not fitting
        return
    assert disk_rows(found, tally) <= limit
    assert found.choice[0] != Location.SHARED
    best = min(seconds_of(choice, tally, seconds) for choice in fitting)
    count = found.split_count
    step = 0.0 if count == 0 else float(tally[count].max()) * count * 20
    if count == 0 and disk_rows(found, tally) < limit:
        step = max(float(t.max()) * c * 20 for c, t in enumerate(tally))
    assert seconds_of(found, tally, seconds) <= best + step + 1e-6


@given(generators(), rows_by_class)
@settings(max_examples=35)
def test_the_limit_is_used_up(rng: np.random.Generator, rows: list[int]) -> None:
    """Where every row saves by being packed, less than one split step of a class is left over."""
    tally = tally_of(rows, rng)
    seconds = np.stack([np.full(len(rows) + 1, 9.0), np.ones(len(rows) + 1), np.full(len(rows) + 1, 30.0)])
    total = sum(count * number for count, number in enumerate(rows, 1))
    for limit in (0, total // 3, total - 1, total):
        found = allot(tally, seconds, 1, max(limit, 0))
        assert found is not None
        left = limit - disk_rows(found, tally)
        assert left <= max(int(step) * count for count, steps in enumerate(tally) for step in steps)
        if limit == total:
            assert disk_rows(found, tally) == total


def test_no_disk_leaves_all_in_the_base_table() -> None:
    tally = tally_of([5, 0, 3], np.random.default_rng(0))
    assert allot(tally, prices(np.random.default_rng(0), 3), 10, 9) == Placement(3, (0,))


def test_large_classes_are_shared_and_small_ones_packed_where_sharing_costs_little() -> None:
    """The first bytes go to rows that many mini-batches share; what is left over packs where that costs the
    fewest copies."""
    tally = np.full((5, SPLIT_STEPS), 1)
    tally[0] = 0
    seconds = np.stack([np.full(5, 20.0), np.ones(5), np.full(5, 2.0)])
    rows = SPLIT_STEPS
    assert allot(tally, seconds, 1, 2 * rows) == Placement(4, (0, 0, 2))
    assert allot(tally, seconds, 1, 4 * rows) == Placement(4, (1, 2))
    assert allot(tally, seconds, 1, 5 * rows) == Placement(4, (1, 1, 2))
    half = allot(tally, seconds, 1, 3 * rows + rows // 2)
    assert half == Placement(4, (0, 2), 1, 0.5, 1)


def test_costs_of_small_classes_are_taken_together() -> None:
    costs = ClassCosts(
        np.array([0, 50.0, 3, 1, 0]), np.array([0, 100.0, 6, 2, 0]), np.array([0, 1000.0, 50, 40, 5])
    )
    rates = smooth(costs)
    np.testing.assert_allclose(rates.reads[1:], [0.05, 4 / 90, 4 / 90, 4 / 90])
    np.testing.assert_allclose(rates.pages, 2 * rates.reads)
    assert not smooth(ClassCosts.zeros(3)).reads.any()


def test_what_was_not_measured_moves_with_what_was() -> None:
    reference = Rates(np.array([0, 0.1, 0.2, 0.4]), np.array([0, 1.0, 2.0, 4.0]))
    costs = ClassCosts(np.array([0, 0, 400.0, 0]), np.array([0, 0, 1000.0, 0]), np.array([0, 0, 1000.0, 0]))
    rates = after(reference, costs)
    np.testing.assert_allclose(rates.reads[1:], [0.2, 0.4, 0.8])
    np.testing.assert_allclose(rates.pages[1:], [0.5, 1.0, 2.0])
    assert after(reference, ClassCosts.zeros(3)) is reference
