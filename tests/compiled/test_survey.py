"""The survey: every kernel against a plain twin; what it says of all lists is exact where it holds all of
them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lists_support import generators, lists_at_random, power_law, written

from featstore.compile import probes as pr
from featstore.compile import survey as sv
from featstore.compile.survey import PAIRS_MAX, Survey
from featstore.layout import TableLayout
from featstore.plan.cost import DEFAULT
from featstore.plan.extents import plan_extents

PAGE = 4096
WORD = 2**64


def bits_of(rows: np.ndarray, table_rows: int) -> np.ndarray:
    bitmap = np.zeros(-(-table_rows // 64), np.uint64)
    for row in rows.tolist():
        bitmap[row // 64] |= np.uint64(1 << row % 64)
    return bitmap


def members_of(lists: list[np.ndarray], rows: np.ndarray) -> list[list[int]]:
    return [[b for b, own in enumerate(lists) if row in own] for row in rows.tolist()]


def flat(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    starts = np.concatenate([[0], np.cumsum([len(own) for own in lists])]).astype(np.int64)
    return starts, np.array([m for own in lists for m in own], np.int32)


def counted_twin(lists: list[list[int]], size: int) -> np.ndarray:
    counts = np.zeros(size + 1, np.int64)
    for members in lists:
        np.add.at(counts, np.bincount(np.array(members, int) // size), 1)
    counts[0] = 0
    return counts


# Sampling.


def mixed_twin(word: int) -> int:
    word %= WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


@given(st.integers(1, 300), st.integers(0, 2**62), st.floats(0, 1))
@settings(max_examples=35)
def test_drawn_rows(table_rows: int, salt: int, share: float) -> None:
    below = int(share * 2**32)
    bitmap = np.zeros(-(-table_rows // 64), np.uint64)
    sv.draw_rows(table_rows, salt, below, bitmap)
    rows = [row for row in range(table_rows) if mixed_twin(row + salt) >> 32 < below]
    np.testing.assert_array_equal(bitmap, bits_of(np.array(rows, int), table_rows))


def test_all_rows_are_drawn_or_about_the_share() -> None:
    bitmap = np.zeros(10_000 // 64 + 1, np.uint64)
    sv.draw_rows(10_000, 5, 2**30, bitmap)
    assert abs(int(np.unpackbits(bitmap.view(np.uint8)).sum()) - 2500) < 200
    sv.draw_rows(10_000, 5, 2**32, bitmap)
    assert int(np.unpackbits(bitmap.view(np.uint8)).sum()) == 10_000


@given(generators(), st.integers(1, 300))
@settings(max_examples=35)
def test_pairs_of_marked_rows(rng: np.random.Generator, table_rows: int) -> None:
    marked, ids = (
        rng.permutation(table_rows)[: table_rows // 3],
        rng.permutation(table_rows)[: table_rows // 2],
    )
    bitmap = np.zeros(-(-table_rows // 64), np.uint64)
    assert sv.mark_rows(marked.astype(np.int32), table_rows, bitmap)
    np.testing.assert_array_equal(bitmap, bits_of(marked, table_rows))
    pairs = np.full(len(ids) + 3, 7, np.uint64)
    known = sv.collect_pairs(ids.astype(np.int32), 5, 4, table_rows, bitmap, pairs, 2)
    assert pairs[:2].tolist() == [7, 7]
    assert pairs[2:known].tolist() == [row << 4 | 5 for row in ids.tolist() if row in marked]


@pytest.mark.parametrize("row", [-1, 10, 2**40])
def test_rows_that_are_not_there_are_refused(row: int) -> None:
    bitmap, ids = np.zeros(1, np.uint64), np.array([3, row])
    assert not sv.mark_rows(ids, 10, bitmap)
    assert sv.collect_pairs(ids, 0, 1, 10, bitmap, np.empty(3, np.uint64), 0) == -1


@given(generators(), st.integers(1, 200), st.integers(1, 20))
@settings(max_examples=35)
def test_lists_by_row(rng: np.random.Generator, table_rows: int, batches: int) -> None:
    lists = lists_at_random(rng, table_rows, batches)
    expected_rows = np.unique(np.concatenate(lists)).astype(int)
    expected = members_of(lists, expected_rows)
    pairs = np.array(sorted(row << 5 | b for b, own in enumerate(lists) for row in own.tolist()), np.uint64)
    rows, starts = np.empty(len(pairs), np.int64), np.empty(len(pairs) + 1, np.int64)
    members = np.empty(len(pairs), np.int32)
    found = sv.index_pairs(pairs, 5, rows, starts, members)
    np.testing.assert_array_equal(rows[:found], expected_rows)
    starts = starts[: found + 1]
    for place in range(found):
        assert members[starts[place] : starts[place + 1]].tolist() == expected[place]

    probes = rng.permutation(batches)[: rng.integers(1, batches + 1)]
    probe_of = np.full(batches, -1, np.int16)
    probe_of[probes] = np.arange(len(probes))
    ends = np.concatenate([[0], np.cumsum([len(lists[p]) for p in probes])]).astype(np.int64)
    places = np.empty(ends[-1], np.int64)
    sv.find_probes(starts, members, probe_of, ends[:-1].copy(), places)
    for k, probe in enumerate(probes):
        assert expected_rows[places[ends[k] : ends[k + 1]]].tolist() == sorted(lists[probe].tolist())

    chosen = np.flatnonzero(rng.random(found) < 0.5)
    part = pr.Lists(rows[:found], starts, members).at(chosen)
    assert [part.members[a:b].tolist() for a, b in zip(part.starts[:-1], part.starts[1:])] == [
        expected[i] for i in chosen
    ]

    for size in (1, 3, batches):
        counts = np.zeros(size + 1, np.int64)
        sv.count_groups(starts, members, np.arange(batches, dtype=np.int32) // size, counts)
        np.testing.assert_array_equal(counts, counted_twin(expected, size))


@given(generators(), st.integers(1, 300), st.integers(1, 15))
@settings(max_examples=30)
def test_a_small_survey_counts_exactly(
    tmp_path_factory: pytest.TempPathFactory, rng: np.random.Generator, table_rows: int, batches: int
) -> None:
    lists = [*lists_at_random(rng, table_rows, batches), np.array([0])]
    survey = Survey(written(tmp_path_factory.mktemp("lists") / "misses", lists), table_rows, 3, PAIRS_MAX)
    members = members_of(lists, np.unique(np.concatenate(lists)))
    for size in (1, 2, batches + 1):
        np.testing.assert_allclose(survey.counts(size), counted_twin(members, size))


def test_a_large_survey_counts_within_a_few_percent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sv, "DRAWN_IDS", 20_000)
    monkeypatch.setattr(sv, "PROBE_IDS", 4500)
    monkeypatch.setattr(sv, "SAMPLED_IDS", 1)
    lists = power_law(20_000, 64, 2000, 0.8)
    survey = Survey(written(tmp_path / "misses", lists), 20_000, 0, PAIRS_MAX)
    members = members_of_all(lists, 20_000)
    for size in (4, 16, 64):
        expected = counted_twin(members, size)
        assert abs(survey.counts(size).sum() / expected.sum() - 1) < 0.05
    looks = survey.look(16)
    assert len(looks) == 2
    assert [look.last - look.first for look in looks] == [16, 16]
    for look in looks:
        group = [set(lists[b].tolist()) for b in range(look.first, look.last)]
        assert look.counts.tolist() == [sum(row in own for own in group) for row in look.rows.tolist()]


def members_of_all(lists: list[np.ndarray], table_rows: int) -> list[list[int]]:
    members: list[list[int]] = [[] for _ in range(table_rows)]
    for b, own in enumerate(lists):
        for row in own.tolist():
            members[row].append(b)
    return [own for own in members if own]


def test_lists_of_few_rows_that_all_miss_keep_a_window(tmp_path: Path) -> None:
    """What probes bring is bounded by fewer mini-batches around them where they have all rows in common."""
    lists = [np.arange(100)] * 40
    survey = Survey(written(tmp_path / "misses", lists), 100, 0, 2 * 1000)
    assert survey.size_max == 10
    np.testing.assert_allclose(survey.counts(10)[10], 4 * 100)


def test_probes_spread_and_stand_for_all_blocks() -> None:
    offsets = np.arange(0, 4001, 10)
    for count in (1, 2, 3, 7):
        probes = sv.spread(offsets, 0, 400, count)
        assert len(probes) == count
        assert probes[0] == 0
        assert np.isclose(sum(sv._weight(k, count) for k in range(count)), count)
    assert sv.spread(np.array([0, 0, 5, 5, 9]), 0, 4, 9) == [1, 3]
    assert sv.spread(np.array([0, 0, 5, 5, 9]), 0, 4, 2) == [1]


# Probes.


@given(generators(), st.integers(1, 200), st.integers(1, 30))
@settings(max_examples=35)
def test_what_a_probe_sees(rng: np.random.Generator, table_rows: int, batches: int) -> None:
    lists = lists_at_random(rng, table_rows, batches)
    probe = int(rng.integers(batches))
    rows = np.sort(lists[probe])
    members = members_of(lists, rows)
    first, last = int(rng.integers(0, probe + 1)), int(rng.integers(probe + 1, batches + 1))
    look = pr.look_at(pr.Lists(rows, *flat(members)), probe, first, last, 1.0)
    for k, own in enumerate(members):
        inside = [m for m in own if first <= m < last]
        assert look.counts[k] == len(inside)
        if inside[0] != probe or len(inside) == 1:
            assert look.keys[k] == 0
            continue
        bits = (last - first).bit_length()
        word = len(inside)
        for j, member in enumerate(inside[: 54 // bits]):
            word |= (member - first + 1) << (64 - bits * (j + 1))
        assert look.keys[k] == pr.key_of(np.uint64(word), bits)
        begin = look.begins[k]
        assert look.block[begin : begin + len(inside)].tolist() == [m - first for m in inside]


@given(generators(), st.integers(0, 300), st.sampled_from([1, 40, 512, 4096, 6000]))
@settings(max_examples=35)
def test_reads_are_those_of_the_planner(rng: np.random.Generator, n: int, row_bytes: int) -> None:
    rows = np.sort(rng.choice(3000, n, replace=False))
    classes = rng.integers(1, 5, n)
    layout = TableLayout.choose(3000, row_bytes, chunk_bytes=1 << 16)
    keys = rows.astype(np.uint64) << np.uint64(16) | classes.astype(np.uint64)
    reads, pages, counts = np.zeros(5), np.zeros(5), np.zeros(5)
    pr.plan_reads(keys, row_bytes, layout.pages_per_chunk, DEFAULT.gap_pages_max, 8, 0, reads, pages, counts)
    nothing = np.empty(0, np.int32)
    extents = plan_extents(rows, nothing, np.empty(0, np.uint8), n, layout, DEFAULT, 8 * PAGE)
    assert counts.tolist() == np.bincount(classes, minlength=5).tolist()
    assert np.isclose(reads.sum(), extents.reads)
    assert np.isclose(pages.sum(), extents.read_pages)
    for e in range(extents.reads):  # shared equally by the rows of each read
        share = np.bincount(classes[extents.first[e] : extents.first[e + 1]], minlength=5)
        reads -= share / share.sum()
        pages -= share / share.sum() * extents.pages[e]
    np.testing.assert_allclose(reads, 0, atol=1e-9)
    np.testing.assert_allclose(pages, 0, atol=1e-9)


def test_a_region_that_goes_on_joins_its_last_read_and_its_first() -> None:
    keys = np.array([1, 2, 97, 99], np.uint64) << np.uint64(16) | np.uint64(1)
    for region_pages, reads, pages in ((0, 2, 5), (100, 1, 6), (103, 1, 9), (106, 2, 5)):
        sums = np.zeros((3, 2))
        pr.plan_reads(keys, PAGE, 1 << 40, 4, 128, region_pages, *sums)
        assert sums[:, 1].tolist() == [reads, pages, 4]


@given(generators(), st.integers(2, 12))
@settings(max_examples=30)
def test_a_block_is_read_by_all(rng: np.random.Generator, size: int) -> None:
    """plan_block plans for each member of the group what it reads of the block's rows, in their order."""
    lists = [np.flatnonzero(rng.random(200) < 0.3) for _ in range(size)]
    rows = lists[0]
    look = pr.look_at(pr.Lists(rows, *flat(members_of(lists, rows))), 0, 0, size, 1.0)
    places = rng.permutation(np.flatnonzero(look.keys))
    costs, expected = np.zeros((3, size + 1)), np.zeros((3, size + 1))
    pr.plan_block(places, look.counts, look.begins, look.block, size, 1000, 1, 16, *costs)
    for own in lists:
        kept = [k for k, place in enumerate(places) if rows[place] in own]
        keys = np.array(kept, np.uint64) << np.uint64(16) | look.counts[places[kept]].astype(np.uint64)
        pr.plan_reads(keys, 1000, 1 << 40, 1, 16, len(places) * 1000 // PAGE, *expected)
    np.testing.assert_allclose(costs, expected)


def test_a_large_block_is_planned_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = power_law(60_000, 16, 8000, 0.0)
    rows = np.sort(lists[0])
    members: list[list[int]] = [[] for _ in range(60_000)]
    for b, own in enumerate(lists):
        for row in own.tolist():
            members[row].append(b)
    looks = [pr.look_at(pr.Lists(rows, *flat([members[row] for row in rows])), 0, 0, 16, 2.0)]
    masks, totals = [looks[0].counts >= 2], []
    for block_rows in (10_000, 4000):
        monkeypatch.setattr(pr, "BLOCK_ROWS", block_rows)
        monkeypatch.setattr(pr, "PIECE_ROWS", 400)
        costs = pr.shared_costs(looks, masks, False, 512, DEFAULT, 1 << 18)
        totals.append([costs.reads.sum() / costs.rows.sum(), costs.pages.sum() / costs.rows.sum()])
    np.testing.assert_allclose(totals[1], totals[0], rtol=0.15)
