"""The pure planner: every kernel against a NumPy twin, and what must hold of extents whatever the request."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore.base.sort import radix_sort
from featstore.layout import TableLayout
from featstore.plan.cost import DeviceModel
from featstore.plan.extents import (
    RANGE_BINS,
    Extents,
    cut_extents,
    cut_ranges,
    make_keys,
    plan_extents,
    row_histogram,
    rows_of_ids,
    select_rows,
)

PAGE = 4096
NO_MAP = np.empty(0, np.int32)
UNSERVED = np.empty(0, np.uint8)
IN_ORDER = np.empty(0, np.int32)


def seeds() -> st.SearchStrategy[np.random.Generator]:
    return st.integers(0, 2**32 - 1).map(np.random.default_rng)


def draw_map(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Identity (empty), or a permutation as int32 or int64."""
    kind = rng.integers(3)
    return NO_MAP if kind == 0 else rng.permutation(rows).astype(np.int32 if kind == 1 else np.int64)


def mapped(ids: np.ndarray, row_of_node: np.ndarray) -> np.ndarray:
    return ids if len(row_of_node) == 0 else row_of_node[ids].astype(np.int64)


# Ids to rows.


@given(seeds(), st.integers(1, 500), st.integers(0, 200))
@settings(max_examples=35)
def test_rows_of_ids(rng: np.random.Generator, rows: int, count: int) -> None:
    row_map, ids, out = draw_map(rng, rows), rng.integers(0, rows, count), np.full(count, -7)
    assert rows_of_ids(ids, row_map, rows, out) == -1
    np.testing.assert_array_equal(out, mapped(ids, row_map))


@given(seeds(), st.integers(1, 100), st.integers(1, 60))
@settings(max_examples=35)
def test_the_first_bad_id_is_named(rng: np.random.Generator, rows: int, count: int) -> None:
    row_map, ids = draw_map(rng, rows), rng.integers(0, rows, count)
    bad = np.sort(rng.integers(0, count, 3))
    ids[bad] = rng.choice([-1, rows, rows + 5, -(2**63), 2**63 - 1], 3)
    assert rows_of_ids(ids, row_map, rows, np.empty(count, np.int64)) == bad[0]
    counts = np.zeros(RANGE_BINS, np.int64)
    assert row_histogram(ids, row_map, rows, 0, counts) == bad[0]


def test_a_table_without_rows_has_no_good_id() -> None:
    assert rows_of_ids(np.array([0]), NO_MAP, 0, np.empty(1, np.int64)) == 0
    assert rows_of_ids(np.empty(0, np.int64), NO_MAP, 0, np.empty(0, np.int64)) == -1


# Cutting large requests.


@given(seeds(), st.integers(1, 3000), st.integers(0, 500), st.integers(0, 6))
@settings(max_examples=35)
def test_row_histogram(rng: np.random.Generator, rows: int, count: int, shift: int) -> None:
    row_map, ids = draw_map(rng, rows), rng.integers(0, rows, count)
    counts = np.zeros(RANGE_BINS, np.int64)
    assert row_histogram(ids, row_map, rows, shift, counts) == -1
    np.testing.assert_array_equal(counts, np.bincount(mapped(ids, row_map) >> shift, minlength=RANGE_BINS))


@given(seeds(), st.integers(1, 300), st.integers(0, 300))
@settings(max_examples=50)
def test_select_rows(rng: np.random.Generator, rows: int, count: int) -> None:
    row_map, ids = draw_map(rng, rows), rng.integers(0, rows, count)
    low, high = np.sort(rng.integers(0, rows + 1, 2))
    within = np.flatnonzero((mapped(ids, row_map) >= low) & (mapped(ids, row_map) < high))
    skip = int(rng.integers(0, len(within) + 1))
    take = int(rng.integers(0, len(within) - skip + 1))
    out, positions = np.full(take, -1), np.full(take, -1, np.int32)
    got = select_rows(ids, row_map, rows, low, high, skip, out, positions)
    assert got == take
    np.testing.assert_array_equal(positions, within[skip : skip + take])
    np.testing.assert_array_equal(out, mapped(ids, row_map)[within[skip : skip + take]])


@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_select_rows_stops_at_an_id_that_was_changed(bad: int) -> None:
    ids = np.array([1, 2, bad, 3])
    out, positions = np.full(4, -1), np.full(4, -1, np.int32)
    assert select_rows(ids, np.empty(0, np.int32), 10, 0, 10, 0, out, positions) == -1


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(0, 5), st.integers(1, 40))
@settings(max_examples=100)
def test_cut_ranges(given_counts: list[int], shift: int, count_max: int) -> None:
    counts = np.array(given_counts)
    ranges = cut_ranges(counts, shift, count_max)
    assert all(1 <= r.count <= count_max for r in ranges)
    assert sum(r.count for r in ranges) == counts.sum()
    covered = np.zeros(len(counts), np.int64)
    ends = [0]
    for r in ranges:
        assert r.low % (1 << shift) == 0
        assert r.high % (1 << shift) == 0
        bins = slice(r.low >> shift, r.high >> shift)
        if r.skip or counts[bins].sum() > count_max:  # part of one bin that is too full by itself
            assert r.high - r.low == 1 << shift or counts[bins].sum() == counts[bins].max()
            assert r.skip == covered[bins].sum()
        else:
            assert r.count == counts[bins].sum()
            assert r.low >= ends[-1]
        last = (r.high >> shift) - 1 if r.skip or counts[bins].sum() > count_max else None
        if last is None:
            covered[bins] = counts[bins]
        else:
            covered[last] += r.count
        ends.append(r.high)
    np.testing.assert_array_equal(covered, counts)


@given(seeds(), st.integers(1, 5000), st.integers(0, 2000), st.integers(1, 400))
@settings(max_examples=25)
def test_ranges_select_every_position_once(
    rng: np.random.Generator, rows: int, count: int, count_max: int
) -> None:
    row_map = draw_map(rng, rows)
    ids = np.minimum(rng.geometric(0.01, count) - 1, rows - 1)  # many duplicates of the small ones
    shift = max(0, (rows - 1).bit_length() - 12)
    counts = np.zeros(RANGE_BINS, np.int64)
    row_histogram(ids, row_map, rows, shift, counts)
    seen = np.zeros(count, np.int64)
    for r in cut_ranges(counts, shift, count_max):
        out, positions = np.full(r.count, -1), np.full(r.count, -1, np.int32)
        assert select_rows(ids, row_map, rows, r.low, r.high, r.skip, out, positions) == r.count
        np.add.at(seen, positions, 1)
        np.testing.assert_array_equal(out, mapped(ids, row_map)[positions])
        assert (np.diff(positions) > 0).all()
    assert (seen == 1).all()


# Keys and their order.


@given(seeds(), st.integers(0, 200), st.booleans(), st.booleans())
@settings(max_examples=35)
def test_make_keys(rng: np.random.Generator, count: int, with_served: bool, with_positions: bool) -> None:
    rows = rng.integers(0, 2**40, count)
    served = rng.integers(0, 2, count).astype(np.uint8) if with_served else UNSERVED
    positions = rng.permutation(1000)[:count].astype(np.int32) if with_positions else IN_ORDER
    keys = np.zeros(count, np.uint64)
    missed = np.flatnonzero(served == 0) if with_served and count else np.arange(count)
    where = positions if with_positions and count else np.arange(count)
    n = make_keys(rows, positions, served, 10, keys)
    assert n == len(missed)
    expected = (rows[missed].astype(np.uint64) << np.uint64(10)) | where[missed].astype(np.uint64)
    np.testing.assert_array_equal(keys[:n], expected)


@given(seeds(), st.integers(0, 300), st.integers(0, 20), st.integers(1, 44))
@settings(max_examples=50)
def test_radix_sort_is_stable_by_its_bits(rng: np.random.Generator, count: int, low: int, bits: int) -> None:
    keys = rng.integers(0, 2**64, count, np.uint64, endpoint=False)
    original, spare = keys.copy(), np.zeros_like(keys)
    result = spare if radix_sort(keys, spare, low, low + bits) else keys
    digits = (original >> np.uint64(low)) & np.uint64(2**bits - 1)
    np.testing.assert_array_equal(result, original[np.argsort(digits, kind="stable")])


# Extents.


def twin_extents(
    rows: list[int], row_bytes: int, pages_per_file: int, gap: int, longest: int
) -> tuple[list[tuple[int, int, int]], tuple[int, int, int]]:
    """cut_extents in plain Python: [(page, pages, first key)], (distinct rows, wanted pages, pages read)."""
    extents: list[list[int]] = []
    wanted: set[int] = set()
    for k, row in enumerate(rows):
        if k and rows[k - 1] == row:
            continue
        begin, end = row * row_bytes // PAGE, -(-(row + 1) * row_bytes // PAGE)
        wanted |= set(range(begin, end))
        if extents:
            page, pages, _ = extents[-1]
            same_file = begin // pages_per_file == page // pages_per_file
            if same_file and begin <= page + pages + gap and end - page <= longest:
                extents[-1][1] = end - page
                continue
        extents.append([begin, end - begin, k])
    read = sum(e[1] for e in extents)
    return [(e[0], e[1], e[2]) for e in extents], (len(set(rows)), len(wanted), read)


class Case:
    """A table's layout, sorted rows with duplicates, and limits."""

    def __init__(self, layout: TableLayout, rows: np.ndarray, gap: int, longest: int) -> None:
        self.layout, self.rows, self.gap, self.longest = layout, rows, gap, longest

    def __repr__(self) -> str:
        return f"Case({self.layout}, {self.rows.tolist()}, gap={self.gap}, longest={self.longest})"


@st.composite
def cases(draw: st.DrawFn, max_ids: int = 60) -> Case:
    row_bytes = draw(
        st.sampled_from([1, 4, 40, 400, 1000, 4096, 4097, 8192, 12_000, 33_660, 40_000])
        | st.integers(1, 40_000)
    )
    rows = draw(st.integers(1, 3000))
    layout = TableLayout.choose(rows, row_bytes, draw(st.sampled_from([16 * 1024, 2**20, 2**30])))
    rng = draw(seeds())
    wanted = np.sort(rng.integers(0, rows, draw(st.integers(0, max_ids))))
    span = (row_bytes - 2) // PAGE + 2
    return Case(layout, wanted, draw(st.integers(0, 6)), draw(st.integers(span, span + 40)))


def cut(case: Case, bits: int = 8) -> Extents:
    keys = (case.rows.astype(np.uint64) << np.uint64(bits)) | np.arange(len(case.rows), dtype=np.uint64)
    n = len(keys)
    page, pages, first, counts = (
        np.full(n, -1),
        np.full(n, -1, np.int32),
        np.full(n + 1, -1, np.int32),
        np.zeros(3, np.int64),
    )
    reads = cut_extents(
        keys,
        bits,
        case.layout.row_bytes,
        case.layout.pages_per_chunk,
        case.gap,
        case.longest,
        page,
        pages,
        first,
        counts,
    )
    return Extents(page[:reads], pages[:reads], first[: reads + 1], keys, bits, *counts.tolist())


@given(cases())
@settings(max_examples=50)
def test_cut_extents_matches_its_twin(case: Case) -> None:
    extents, counts = twin_extents(
        case.rows.tolist(), case.layout.row_bytes, case.layout.pages_per_chunk, case.gap, case.longest
    )
    got = cut(case)
    assert (
        list(zip(got.page.tolist(), got.pages.tolist(), got.first[: got.reads].tolist(), strict=True))
        == extents
    )
    assert (got.distinct_rows, got.wanted_pages, got.read_pages) == counts
    if extents:
        assert got.first[-1] == len(case.rows)


@given(cases(max_ids=200))
@settings(max_examples=100)
def test_every_row_lies_in_exactly_one_extent(case: Case) -> None:
    got, layout = cut(case), case.layout
    ends = got.page + got.pages
    assert (got.pages > 0).all()
    assert (got.pages <= case.longest).all()
    assert (
        got.page // layout.pages_per_chunk == (ends - 1) // layout.pages_per_chunk
    ).all()  # no extent crosses a file
    for e in range(got.reads):
        for row in case.rows[got.first[e] : got.first[e + 1]]:
            assert got.page[e] * PAGE <= row * layout.row_bytes
            assert (row + 1) * layout.row_bytes <= ends[e] * PAGE
    keys_in_extents = (
        sum(int(b - a) for a, b in zip(got.first[:-1], got.first[1:], strict=True)) if got.reads else 0
    )
    assert keys_in_extents == len(case.rows)
    for e in range(1, got.reads):  # no key's row appears in two
        assert case.rows[got.first[e]] != case.rows[got.first[e] - 1]


def cheapest(
    rows: list[int], row_bytes: int, pages_per_file: int, longest: int, read_cost: float, page_cost: float
) -> float:
    """The cheapest cut of sorted distinct rows into runs, by dynamic programming over all cuts."""
    spans = [(r * row_bytes // PAGE, -(-(r + 1) * row_bytes // PAGE)) for r in rows]
    best = [0.0] + [np.inf] * len(spans)
    for end in range(1, len(spans) + 1):
        for begin in range(end):
            page, last = spans[begin][0], spans[end - 1][1]
            single = end - begin == 1
            if not single and (
                last - page > longest or page // pages_per_file != (last - 1) // pages_per_file
            ):
                continue
            best[end] = min(best[end], best[begin] + read_cost + (last - page) * page_cost)
    return best[-1]


@given(seeds(), st.sampled_from([4, 400, 1000, 4096, 8192, 12_288]), st.integers(1, 14), st.floats(0.1, 8))
@settings(max_examples=50)
def test_bridging_gaps_is_the_cheapest_choice(
    rng: np.random.Generator, row_bytes: int, count: int, ratio: float
) -> None:
    """Under the additive model, with extents of any length."""
    layout = TableLayout.choose(2000, row_bytes, 64 * 1024)
    model = DeviceModel(read_seconds=ratio * PAGE * 1e-9, byte_seconds=1e-9, request_seconds=0.0)
    rows = np.unique(rng.integers(0, min(2000, 60 * max(1, PAGE // row_bytes)), count))
    got = cut(Case(layout, rows, model.gap_pages_max, 10**6))
    cost = model.seconds(got.reads, got.bytes_read)
    least = cheapest(
        rows.tolist(), row_bytes, layout.pages_per_chunk, 10**6, model.read_seconds, PAGE * model.byte_seconds
    )
    assert cost == pytest.approx(least, rel=1e-9)


@given(cases(max_ids=200), seeds())
@settings(max_examples=35)
def test_plan_extents(case: Case, rng: np.random.Generator) -> None:
    model = DeviceModel(read_seconds=(case.gap + 0.5) * PAGE * 1e-9, byte_seconds=1e-9, request_seconds=0.0)
    rows = rng.permutation(case.rows)
    n = len(rows)
    positions = rng.permutation(n + 50)[:n].astype(np.int32) if n % 2 else IN_ORDER
    served = rng.integers(0, 2, n).astype(np.uint8) if n % 3 else UNSERVED
    got = plan_extents(rows, positions, served, n + 50, case.layout, model, case.longest * PAGE)
    missed = np.flatnonzero(served == 0) if n % 3 else np.arange(n)
    where = (positions if n % 2 else np.arange(n))[missed]
    mask = np.uint64(2**got.position_bits - 1)
    order = np.lexsort((np.arange(len(missed)), rows[missed]))
    np.testing.assert_array_equal(
        (got.keys >> np.uint64(got.position_bits)).astype(np.int64), rows[missed][order]
    )
    np.testing.assert_array_equal((got.keys & mask).astype(np.int64), where[order])
    layout = case.layout
    extents, counts = twin_extents(
        np.sort(rows[missed]).tolist(), layout.row_bytes, layout.pages_per_chunk, case.gap, case.longest
    )
    assert list(zip(got.page.tolist(), got.pages.tolist(), strict=True)) == [e[:2] for e in extents]
    assert (got.distinct_rows, got.wanted_pages, got.read_pages) == counts
    assert got.reads == len(extents)
    assert got.bytes_read == counts[2] * PAGE


def test_the_largest_rows_and_positions_fit_a_key() -> None:
    layout = TableLayout(2**40, 4096, 2**31)
    model = DeviceModel(read_seconds=1e-6, byte_seconds=1e-9, request_seconds=0.0)
    rows, positions = np.array([2**40 - 1, 0, 2**40 - 1]), np.array([2**24 - 1, 5, 0], np.int32)
    got = plan_extents(rows, positions, UNSERVED, 2**24, layout, model, 2**19)
    assert got.page.tolist() == [0, 2**40 - 1]
    assert (got.keys & np.uint64(2**24 - 1)).tolist() == [5, 2**24 - 1, 0]


def test_nothing_missed_reads_nothing() -> None:
    layout = TableLayout(10, 400, 10)
    model = DeviceModel(read_seconds=1e-6, byte_seconds=1e-9, request_seconds=0.0)
    got = plan_extents(np.array([1, 2]), IN_ORDER, np.ones(2, np.uint8), 2, layout, model, 2**19)
    assert (got.reads, got.bytes_read, got.distinct_rows) == (0, 0, 0)


# Layout.


@given(st.integers(0, 10**6), st.integers(1, 70_000), st.sampled_from([4096, 16 * 1024, 2**20, 64 * 2**20]))
@settings(max_examples=100)
def test_layouts_are_whole_pages_and_hold_every_row_once(rows: int, row_bytes: int, chunk_bytes: int) -> None:
    layout = TableLayout.choose(rows, row_bytes, chunk_bytes)
    assert layout.chunks * layout.rows_per_chunk >= rows
    assert (layout.chunks - 1) * layout.rows_per_chunk < max(rows, 1)
    assert layout.chunks <= 512
    if layout.chunks > 1:
        assert layout.chunk_bytes % PAGE == 0
        assert layout.pages * PAGE == layout.chunks * layout.chunk_bytes
    elif layout.chunks == 1:
        assert layout.rows_per_chunk == rows
    else:
        assert layout.pages == 0


@pytest.mark.parametrize("fields", [(-1, 4, 4), (4, 0, 4), (4, 4, 0), (8, 4, 4), (10**6, 4095, 512)])
def test_impossible_layouts_are_refused(fields: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="impossible table layout"):
        TableLayout(*fields)
