"""Placement: kernels against plain twins, forecasts against the planner, and choices against limits and
yardsticks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lists_support import generators, lists_at_random, power_law, written
from yardsticks import (
    BruteForce,
    brute_force,
    minhash_order,
    paper_choice,
    paper_forecast,
    take_minima,
)

from featstore.compile import choose as ch
from featstore.compile import placement as pm
from featstore.compile.choose import choose_placement
from featstore.compile.groups import GroupWork, group_of, shared_order
from featstore.compile.placement import Forecast, Location, Placement, forecast, tally_classes
from featstore.compile.row_lists import RowLists
from featstore.compile.search import SHARED_WRITES
from featstore.errors import BudgetError
from featstore.layout import TableLayout
from featstore.plan.cost import DEFAULT
from featstore.plan.extents import plan_extents, plan_runs

EXTENT_BYTES = 64 * 1024
MEMORY_BYTES = 1 << 26
BASE, PACKED, SHARED = map(int, Location)


def chosen(
    misses: RowLists, table_rows: int, row_bytes: int, disk_bytes: int | None, **more: float
) -> tuple[Placement, Forecast]:
    layout = TableLayout.choose(table_rows, row_bytes)
    options = {"extent_bytes_max": EXTENT_BYTES, "memory_bytes": MEMORY_BYTES} | more
    return choose_placement(misses, table_rows, row_bytes, layout, DEFAULT, disk_bytes, **options)  # type: ignore[arg-type]


def exactly(placement: Placement, misses: RowLists, table_rows: int, row_bytes: int) -> Forecast:
    layout = TableLayout.choose(table_rows, row_bytes)
    return forecast(placement, misses, table_rows, layout, DEFAULT, extent_bytes_max=EXTENT_BYTES)


@st.composite
def placements(draw: st.DrawFn, size: int) -> Placement:
    choice = tuple(draw(st.lists(st.sampled_from([BASE, PACKED, SHARED]), min_size=1, max_size=size)))
    split = (
        draw(st.integers(0, size)),
        draw(st.integers(0, 256)) / 256,
        draw(st.sampled_from([BASE, PACKED, SHARED])),
    )
    return Placement(size, choice, *split)


def step_twin(row: int) -> int:
    return row * 0x9E3779B97F4A7C15 % 2**64 >> 56


def choice_twin(placement: Placement, row: int, count: int) -> int:
    if count == placement.split_count and step_twin(row) < placement.split_fraction * 256:
        return placement.split_choice
    return placement.choice[min(count, len(placement.choice)) - 1]


# Decisions and counts.


@given(generators(), st.integers(1, 9).flatmap(placements), st.integers(0, 100))
@settings(max_examples=35)
def test_decisions(rng: np.random.Generator, placement: Placement, n: int) -> None:
    rows, counts = rng.integers(0, 2**40, n), rng.integers(1, 13, n).astype(np.uint16)
    expected = [choice_twin(placement, row, count) for row, count in zip(rows.tolist(), counts.tolist())]
    assert placement.choices(rows, counts).tolist() == expected
    assert msgspec.json.decode(msgspec.json.encode(placement), type=Placement) == placement
    assert Placement(**asdict(placement)) == placement


@given(
    rng=generators(),
    table_rows=st.integers(1, 300),
    batches=st.integers(1, 12),
    size=st.integers(1, 12),
    data=st.data(),
)
@settings(max_examples=35)
def test_classes_are_counted(
    rng: np.random.Generator, table_rows: int, batches: int, size: int, data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """tally_classes, class_rows and disk_rows against the decision of every row of every group."""
    lists = lists_at_random(rng, table_rows, batches)
    misses = written(tmp_path_factory.mktemp("lists") / "misses", lists)
    tally = tally_classes(misses, size, table_rows)
    placement = data.draw(placements(size))
    expected, rows, disk = np.zeros_like(tally), np.zeros((3, size + 1), np.int64), 0
    for first in range(0, batches, size):
        group = lists[first : first + size]
        for row in range(table_rows):
            count = sum(row in own for own in group)
            if count:
                place = choice_twin(placement, row, count)
                expected[count, step_twin(row)] += 1
                rows[place, count] += 1
                disk += {BASE: 0, PACKED: count, SHARED: 1}[place]
    np.testing.assert_array_equal(tally, expected)
    np.testing.assert_array_equal(pm.class_rows(placement, tally), rows)
    assert pm.disk_rows(placement, tally) == disk


@given(generators(), st.integers(1, 200), st.integers(1, 6))
@settings(max_examples=25)
def test_counting_kernels(rng: np.random.Generator, table_rows: int, batches: int) -> None:
    lists = [np.flatnonzero(rng.random(table_rows) < 0.4) for _ in range(batches)]
    counts = np.zeros(table_rows, np.uint16)
    for own in lists:
        assert pm.count_list(own.astype(np.int32), counts)
    np.testing.assert_array_equal(counts, np.bincount(np.concatenate(lists), minlength=table_rows))
    expected = np.zeros((batches + 1, 256), np.int64)
    np.add.at(expected, (counts, [step_twin(row) for row in range(table_rows)]), 1)
    by_table, by_list, again = np.zeros_like(expected), np.zeros_like(expected), counts.copy()
    pm.tally_all(again, by_table)
    np.testing.assert_array_equal(by_table, expected)
    for own in lists:
        pm.tally_list(own.astype(np.int32), counts, by_list)
    np.testing.assert_array_equal(by_list[1:], expected[1:])
    assert not counts.any()
    assert not again.any()
    assert not pm.count_list(np.array([0, table_rows]), counts)


@given(generators(), st.integers(1, 300))
@settings(max_examples=25)
def test_parting_a_list(rng: np.random.Generator, table_rows: int) -> None:
    rows = np.flatnonzero(rng.random(table_rows) < 0.7)
    choices = rng.integers(0, 3, len(rows)).astype(np.uint8)
    region = rng.permutation(rows[choices == SHARED])
    words = np.zeros(table_rows, np.uint64)
    pm.publish(rows, choices, words)
    pm.publish_region(region, 1000, words)
    ids = rng.permutation(rows)[: len(rows) // 2].astype(np.int32)
    base, shared = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
    counts = pm.part_list(ids, words, base, shared)
    place = {row: 1000 + i for i, row in enumerate(region.tolist())}
    of_row = dict(zip(rows.tolist(), choices.tolist()))
    assert base[: counts[0]].tolist() == [row for row in ids.tolist() if of_row[row] == BASE]
    assert shared[: counts[1]].tolist() == [place[row] for row in ids.tolist() if of_row[row] == SHARED]
    assert counts[2] == sum(of_row[row] == PACKED for row in ids.tolist())


# Forecasts.


def forecast_twin(
    placement: Placement, lists: list[np.ndarray], misses: RowLists, layout: TableLayout
) -> Forecast:
    """Every read of every mini-batch, planned by the reader's own planner."""
    no_positions, unserved = np.empty(0, np.int32), np.empty(0, np.uint8)
    reads = pages = packed = shared = wanted = in_base = 0
    one_file = TableLayout(10**6, layout.row_bytes, 10**6)
    for first in range(0, len(lists), placement.group_size):
        last = min(first + placement.group_size, len(lists))
        group = group_of(misses, first, last, layout.rows, GroupWork(layout.rows))
        choices = placement.choices(group.rows, group.counts)
        region = shared_order(group, choices == SHARED)
        place = {row: shared + i for i, row in enumerate(region.tolist())}
        of_row = dict(zip(group.rows.tolist(), choices.tolist()))
        shared += len(region)
        for rows in lists[first:last]:
            own = {
                choice: [row for row in rows.tolist() if of_row[row] == choice]
                for choice in (BASE, PACKED, SHARED)
            }
            tables = (own[BASE], layout), ([place[row] for row in own[SHARED]], one_file)
            for places, table in tables:
                extents = plan_extents(
                    np.array(places, np.int64),
                    no_positions,
                    unserved,
                    max(1, len(places)),
                    table,
                    DEFAULT,
                    EXTENT_BYTES,
                )
                reads, pages = reads + extents.reads, pages + extents.read_pages
            run = plan_runs(np.array([[packed, packed + len(own[PACKED])]]), None, one_file, EXTENT_BYTES)
            reads, pages = reads + run.reads, pages + run.bytes_read // 4096
            packed, wanted, in_base = (
                packed + len(own[PACKED]),
                wanted + len(own[SHARED]),
                in_base + len(own[BASE]),
            )
    seconds = reads * DEFAULT.read_seconds + pages * 4096 * DEFAULT.byte_seconds
    disk_bytes = (packed + shared) * layout.row_bytes
    return Forecast(pytest.approx(seconds), packed, shared, wanted, in_base, disk_bytes, pages * 4096, reads)


@given(
    rng=generators(), table_rows=st.integers(1, 300), batches=st.integers(1, 10),
    row_bytes=st.sampled_from([1, 40, 512, 6000]), placement=st.integers(1, 10).flatmap(placements),
)  # fmt: skip
@settings(max_examples=35)
def test_forecasts_are_the_planners(
    rng: np.random.Generator, table_rows: int, batches: int, row_bytes: int, placement: Placement,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    lists = lists_at_random(rng, table_rows, batches)
    misses = written(tmp_path_factory.mktemp("lists") / "misses", lists)
    layout = TableLayout.choose(table_rows, row_bytes, chunk_bytes=1 << 16)
    found = forecast(placement, misses, table_rows, layout, DEFAULT, extent_bytes_max=EXTENT_BYTES)
    assert found == forecast_twin(placement, lists, misses, layout)


# Choices.


@given(
    rng=generators(), table_rows=st.integers(1, 400), batches=st.integers(1, 14),
    row_bytes=st.sampled_from([1, 100, 512, 5000]), share=st.floats(0, 1.1),
    exact_ids=st.sampled_from([0, 1 << 17]),
)  # fmt: skip
@settings(max_examples=35)
def test_the_limit_holds_and_counts_are_exact(
    rng: np.random.Generator, table_rows: int, batches: int, row_bytes: int, share: float, exact_ids: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    lists = lists_at_random(rng, table_rows, batches)
    misses = written(tmp_path_factory.mktemp("lists") / "misses", lists)
    limit = int(share * misses.total * row_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ch, "EXACT_IDS", exact_ids)
        placement, expected = chosen(misses, table_rows, row_bytes, limit)
    found = exactly(placement, misses, table_rows, row_bytes)
    assert found.disk_bytes <= limit
    assert placement.choice[0] != SHARED
    if exact_ids:
        assert found == expected
    for name in ("packed_rows", "shared_rows", "shared_reads_rows", "base_rows", "disk_bytes"):
        assert getattr(found, name) == getattr(expected, name)


@pytest.mark.parametrize("limit", [None, 10**9])
def test_without_a_limit_all_is_packed(tmp_path: Path, limit: int | None) -> None:
    misses = written(tmp_path / "misses", power_law(2000, 10, 300, 0.8))
    placement, expected = chosen(misses, 2000, 512, limit)
    assert placement == Placement(1, (PACKED,))
    assert expected == exactly(placement, misses, 2000, 512)
    assert expected.packed_rows == misses.total


def test_without_disk_all_stays_in_the_base_table(tmp_path: Path) -> None:
    misses = written(tmp_path / "misses", power_law(2000, 10, 300, 0.8))
    placement, expected = chosen(misses, 2000, 512, 511)
    assert (placement.choice, placement.split_count) == ((BASE,), 0)
    assert expected.base_rows == misses.total


def test_nothing_missed_needs_nothing(tmp_path: Path) -> None:
    for lists in ([], [[], []]):
        for more in ({}, {"written_byte_seconds": 1e-9}):
            found = chosen(written(tmp_path / "misses", lists), 10, 512, 0, **more)[1]
            assert found == Forecast(0, 0, 0, 0, 0, 0, 0, 0)


def test_the_same_lists_and_seed_give_the_same_placement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ch, "EXACT_IDS", 0)
    misses = written(tmp_path / "misses", power_law(3000, 16, 500, 0.8))
    found = [chosen(misses, 3000, 512, 3000 * 512, seed=seed) for seed in (1, 1, 2)]
    assert found[0] == found[1]
    assert found[2][1].disk_bytes <= 3000 * 512


def test_too_small_a_budget_names_the_smallest_that_works(tmp_path: Path) -> None:
    misses = written(tmp_path / "misses", power_law(5000, 16, 800, 0.8))
    with pytest.raises(BudgetError) as caught:
        chosen(misses, 5000, 512, 5000 * 512, memory_bytes=1000)
    needed = caught.value.needed_bytes
    with pytest.raises(BudgetError):
        chosen(misses, 5000, 512, 5000 * 512, memory_bytes=needed - 1)
    small, _ = chosen(misses, 5000, 512, 5000 * 512, memory_bytes=needed)
    large, _ = chosen(misses, 5000, 512, 5000 * 512)
    assert small.group_size < large.group_size


def test_a_row_that_is_not_there_is_refused(tmp_path: Path) -> None:
    misses = written(tmp_path / "misses", [[1, 2], [3], [1, 10]])
    with pytest.raises(ValueError, match="mini-batch 2 misses a row"):
        chosen(misses, 10, 512, 512)


# Yardsticks.

TRACES = {"power law": (0.8, 0.1), "steep": (1.2, 0.0), "uniform": (0.0, 0.0)}


@pytest.mark.parametrize(
    ("name", "row_bytes"),
    [
        pytest.param("power law", 1000, marks=pytest.mark.thorough),
        ("power law", 4096),
        ("steep", 1000),
        pytest.param("uniform", 4096, marks=pytest.mark.thorough),
    ],
)
def test_close_to_brute_force_and_never_above_the_paper(tmp_path: Path, name: str, row_bytes: int) -> None:
    exponent, dropped = TRACES[name]
    table_rows = 2000
    misses = written(tmp_path / "misses", power_law(table_rows, 24, 580, exponent, dropped=dropped))
    layout = TableLayout.choose(table_rows, row_bytes)
    options = {"extent_bytes_max": EXTENT_BYTES}
    force = BruteForce(misses, table_rows, layout, DEFAULT, group_sizes=[1, 2, 3, 4, 6, 12], **options)
    for times in (0.5, 1, 2, 3, 5):
        limit = int(times * table_rows * row_bytes)
        placement, expected = chosen(misses, table_rows, row_bytes, limit)
        assert expected.seconds <= 1.1 * force.best(limit)[1].seconds, (times, placement)
        paper = paper_choice(misses, table_rows, row_bytes, limit)
        assert expected.seconds <= exactly(paper, misses, table_rows, row_bytes).seconds * (1 + 1e-9), (
            times,
            paper,
        )
        ordered = paper_forecast(paper, misses, table_rows, layout, DEFAULT, **options)
        assert expected.seconds <= ordered.seconds * (1 + 1e-9)
        assert ordered.disk_bytes <= limit


@pytest.mark.parametrize("seed", [13, 25, 34, 1019])
def test_small_cases_are_close_to_brute_force(tmp_path: Path, seed: int) -> None:
    """Of some hundred drawn like this, the worst had been 1.11 while not every group size was looked at."""
    rng = np.random.default_rng(1000 + seed)
    table_rows, batches = int(rng.integers(100, 1500)), int(rng.choice([2, 3, 4, 6, 8, 12]))
    rows_each, exponent = int(rng.uniform(0.02, 0.4) * table_rows) + 1, float(rng.choice([0, 0.5, 0.8, 1.2]))
    row_bytes, dropped = int(rng.choice([100, 512, 1000, 4096])), float(rng.choice([0, 0.1]))
    lists = power_law(table_rows, batches, rows_each, exponent, seed=seed, dropped=dropped)
    misses, layout = written(tmp_path / "misses", lists), TableLayout.choose(table_rows, row_bytes)
    sizes = range(1, batches + 1)
    force = BruteForce(misses, table_rows, layout, DEFAULT, group_sizes=sizes, extent_bytes_max=EXTENT_BYTES)
    for share in (0.1, 0.3, 0.6, 0.9):
        limit = int(share * misses.total * row_bytes)
        placement, expected = chosen(misses, table_rows, row_bytes, limit)
        assert expected.disk_bytes <= limit
        assert expected.seconds <= 1.06 * force.best(limit)[1].seconds, (share, placement)


@pytest.mark.parametrize("row_bytes", [128, 1024])
def test_a_sampled_choice_is_as_good_as_its_forecast_says(
    tmp_path: Path, row_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a sample alone, seconds are right within a few percent, and the paper's are not less."""
    monkeypatch.setattr(ch, "EXACT_IDS", 0)
    monkeypatch.setattr("featstore.compile.survey.PROBE_IDS", 10_000)
    monkeypatch.setattr("featstore.compile.survey.DRAWN_IDS", 50_000)
    monkeypatch.setattr("featstore.compile.survey.SAMPLED_IDS", 1)
    table_rows = 40_000
    misses = written(tmp_path / "misses", power_law(table_rows, 64, 3000, 0.8))
    layout = TableLayout.choose(table_rows, row_bytes)
    for times in (1, 2, 3):
        limit = times * table_rows * row_bytes
        placement, expected = chosen(misses, table_rows, row_bytes, limit)
        found = exactly(placement, misses, table_rows, row_bytes)
        assert expected.seconds == pytest.approx(found.seconds, rel=0.1)
        paper = paper_choice(misses, table_rows, row_bytes, limit)
        ordered = paper_forecast(paper, misses, table_rows, layout, DEFAULT, extent_bytes_max=EXTENT_BYTES)
        assert found.seconds <= ordered.seconds


def test_the_paper_takes_the_smallest_group_that_fits(tmp_path: Path) -> None:
    lists = power_law(600, 20, 150, 0.8)
    misses = written(tmp_path / "misses", lists)
    distinct = [
        sum(len(np.unique(np.concatenate(lists[first : first + size]))) for first in range(0, 20, size))
        for size in range(1, 21)
    ]
    assert distinct == sorted(distinct, reverse=True)
    for limit in (distinct[3], distinct[11] + 5, distinct[19]):
        size = next(i for i, rows in enumerate(distinct, 1) if rows <= limit)
        assert paper_choice(misses, 600, 100, limit * 100 + 99) == Placement(size, (PACKED, SHARED))
    assert paper_choice(misses, 600, 100, None) == Placement(1, (PACKED,))
    for limit in (0, 7, distinct[19] // 2, distinct[19] - 1):
        placement = paper_choice(misses, 600, 100, limit * 100)
        rows = exactly(placement, misses, 600, 100)
        assert limit - max(5, limit // 50) <= rows.packed_rows + rows.shared_rows <= limit
        assert SHARED in {placement.split_choice, *placement.choice} or limit == 0


@given(generators(), st.integers(1, 100), st.integers(1, 10))
@settings(max_examples=25)
def test_minhash(
    tmp_path_factory: pytest.TempPathFactory, rng: np.random.Generator, table_rows: int, batches: int
) -> None:
    lists = lists_at_random(rng, table_rows, batches)
    minima = np.full((2, table_rows), 99)
    numbers = rng.permutation(50)[:batches], rng.permutation(50)[:batches]
    for own, first, second in zip(lists, *numbers):
        take_minima(own.astype(np.int64), int(first), int(second), minima[0], minima[1])
    for row in range(table_rows):
        members = [b for b, own in enumerate(lists) if row in own]
        assert minima[:, row].tolist() == [min([99, *(int(n[b]) for b in members)]) for n in numbers]
    misses = written(tmp_path_factory.mktemp("lists") / "misses", lists)
    group = group_of(misses, 0, batches, table_rows, GroupWork(table_rows))
    mask = rng.random(len(group.rows)) < 0.8
    region = minhash_order(misses, table_rows, 3)(group, mask)
    assert sorted(region.tolist()) == group.rows[mask].tolist()
    sets = [tuple(b for b, own in enumerate(lists) if row in own) for row in region.tolist()]
    seen = [s for i, s in enumerate(sets) if i == 0 or sets[i - 1] != s]
    firsts = [s for s in seen if len(s) == 1]
    assert len(firsts) == len(set(firsts)) or batches > 1


def test_brute_force_finds_what_a_few_rows_show(tmp_path: Path) -> None:
    """Two mini-batches that miss the same rows, room for half of the copies: all shared by both, at the price
    of packed."""
    rows = list(range(0, 400, 4))
    misses = written(tmp_path / "misses", [rows, rows])
    layout = TableLayout.choose(400, 1024)
    found, expected = brute_force(
        misses, 400, layout, DEFAULT, 100 * 1024, extent_bytes_max=EXTENT_BYTES, group_sizes=[1, 2]
    )
    assert (found.group_size, found.choice[-1]) == (2, SHARED)
    assert expected == exactly(found, misses, 400, 1024)
    assert (expected.shared_rows, expected.base_rows) == (100, 0)


@pytest.mark.parametrize(("name", "row_bytes"), [("power law", 512), ("power law", 4096), ("steep", 1000)])
@pytest.mark.parametrize("exact_ids", [0, 1 << 17])
def test_what_is_written_must_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, row_bytes: int, exact_ids: int
) -> None:
    """With a price of writing, reading and writing together are close to the least that there is."""
    monkeypatch.setattr(ch, "EXACT_IDS", exact_ids)
    table_rows, (exponent, dropped) = 700, TRACES[name]
    misses = written(tmp_path / "misses", power_law(table_rows, 10, 140, exponent, dropped=dropped))
    layout = TableLayout.choose(table_rows, row_bytes)
    force = BruteForce(
        misses, table_rows, layout, DEFAULT, group_sizes=range(1, 11), extent_bytes_max=EXTENT_BYTES
    )
    whole, places = misses.total * row_bytes, []
    for limit in (None, whole // 2):
        for price in (1e-10, 1e-9, 3e-9, 1e-8, 1e-5):
            placement, _ = chosen(misses, table_rows, row_bytes, limit, written_byte_seconds=price)
            found = exactly(placement, misses, table_rows, row_bytes)
            best = force.best(limit or whole, price)[1]
            assert found.disk_bytes <= (limit or whole)
            both, least = (
                one.seconds + (one.packed_rows + SHARED_WRITES * one.shared_rows) * row_bytes * price
                for one in (found, best)
            )
            assert both <= 1.1 * least, (limit, price, placement)
            places.append(found.disk_bytes)
    assert places[0] > 0, "what costs next to nothing is written"
    assert places[4] == places[9] == 0, "what never pays is not"
