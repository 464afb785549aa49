"""Groups: every kernel against a plain twin, and the order of a region."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lists_support import generators, lists_at_random, written

from featstore.base.native import address_of
from featstore.compile import groups as gr
from featstore.compile.groups import GROUP_SIZE_MAX, GroupWork, group_of, shared_order

sizes = st.sampled_from([1, 2, 3, 7, 8, 20, 63, 64, 200, GROUP_SIZE_MAX])


def word_twin(members: list[int], bits: int) -> int:
    """Members from the top down as long as they fit into 54 bits, and their number."""
    word = len(members)
    for k, member in enumerate(members[: 54 // bits]):
        word |= member << (64 - bits * (k + 1))
    return word


def key_twin(members: list[int], bits: int) -> tuple[int, ...]:
    """What a region is ordered by: the first member, how many (up to 4), the others that a word has room
    for."""
    return (members[0], min(len(members), 4), *members[1 : 54 // bits])


def some_members(rng: np.random.Generator, size: int) -> list[int]:
    count = int(rng.integers(1, min(size, 12) + 1))
    return sorted((rng.choice(size, count, replace=False) + 1).tolist())


@given(generators(), st.integers(1, 60), sizes)
@settings(max_examples=35)
def test_words_of_lists(rng: np.random.Generator, table_rows: int, size: int) -> None:
    bits = size.bit_length()
    batches = min(size, 30)
    lists = lists_at_random(rng, table_rows, batches)
    numbers = np.sort(rng.choice(size, batches, replace=False)) + 1
    words, touched, known = np.zeros(table_rows, np.uint64), np.empty(table_rows + 1, np.uint64), 0
    for member, rows in zip(numbers.tolist(), lists, strict=True):
        known = gr.add_list(rows.astype(np.int32), member, bits, words, address_of(words), touched, known)
    members = {
        row: [int(n) for n, rows in zip(numbers, lists, strict=True) if row in rows]
        for row in range(table_rows)
    }
    for row in range(table_rows):
        assert int(words[row]) == word_twin(members[row], bits)
    assert sorted(touched[:known].tolist()) == [row for row in range(table_rows) if members[row]]
    found = np.empty(known + 1, np.uint64)
    assert gr.find_rows(words, found) == known
    assert found[:known].tolist() == sorted(touched[:known].tolist())


@pytest.mark.parametrize("row", [-1, 10, 2**40])
def test_a_list_with_a_row_that_is_not_there_is_refused(row: int) -> None:
    words, touched = np.zeros(10, np.uint64), np.empty(11, np.uint64)
    assert gr.add_list(np.array([3, row]), 1, 1, words, address_of(words), touched, 0) == -1


@given(generators(), sizes)
@settings(max_examples=100)
def test_keys_order_as_lists_do(rng: np.random.Generator, size: int) -> None:
    bits = size.bit_length()
    lists = [some_members(rng, size) for _ in range(40)]
    keys = [int(gr.key_of(np.uint64(word_twin(members, bits)), bits)) for members in lists]
    twins = [key_twin(members, bits) for members in lists]
    assert np.argsort(keys, kind="stable").tolist() == sorted(range(40), key=lambda i: twins[i])
    for i in range(39):
        assert (keys[i] == keys[i + 1]) == (twins[i] == twins[i + 1])


@given(generators(), st.integers(1, 300), sizes)
@settings(max_examples=25)
def test_taking_rows_leaves_zeros(rng: np.random.Generator, table_rows: int, size: int) -> None:
    bits = size.bit_length()
    rows = np.flatnonzero(rng.random(table_rows) < 0.5)
    members = [some_members(rng, size) for _ in rows]
    words = np.zeros(table_rows, np.uint64)
    words[rows] = [word_twin(m, bits) for m in members]
    keys, counts = np.empty(len(rows), np.uint64), np.empty(len(rows), np.uint16)
    gr.take_rows(rows.astype(np.uint64), bits, words, keys, counts)
    assert not words.any()
    assert counts.tolist() == [len(m) for m in members]
    assert keys.tolist() == [int(gr.key_of(np.uint64(word_twin(m, bits)), bits)) for m in members]


@given(generators(), st.integers(0, 2000), st.sampled_from([0, 3, 8, 20, 62, 64]))
@settings(max_examples=35)
def test_sorting_a_block(rng: np.random.Generator, n: int, varied_bits: int) -> None:
    low, high = sorted(rng.integers(0, n + 1, 2).tolist())
    top_bit = int(rng.integers(varied_bits, 65))
    drawn = (
        rng.integers(0, 2**64, n, np.uint64) >> np.uint64(64 - varied_bits)
        if varied_bits
        else np.zeros(n, np.uint64)
    )
    keys = drawn << np.uint64(rng.integers(0, top_bit - varied_bits + 1)) if varied_bits else drawn
    rows = rng.integers(0, 2**60, n)
    expected_keys, expected_rows = keys.copy(), rows.copy()
    order = low + np.argsort(keys[low:high], kind="stable")
    expected_keys[low:high], expected_rows[low:high] = keys[order], rows[order]
    spare = np.empty(high - low, np.uint64), np.empty(high - low, np.int64)
    gr.sort_block(keys, rows, low, high, top_bit, *spare)
    np.testing.assert_array_equal(keys, expected_keys)
    np.testing.assert_array_equal(rows, expected_rows)


@given(generators(), st.integers(0, 500), sizes)
@settings(max_examples=25)
def test_blocks(rng: np.random.Generator, n: int, size: int) -> None:
    bits = size.bit_length()
    keys = np.array(
        [gr.key_of(np.uint64(word_twin(some_members(rng, size), bits)), bits) for _ in range(n)], np.uint64
    )
    mask = rng.random(n) < rng.choice([0.0, 0.3, 1.0])
    places = np.empty(int(mask.sum()), np.int64)
    starts = gr.scatter_blocks(keys, mask, bits, places)
    first = (keys >> np.uint64(64 - bits)).astype(np.int64)
    chosen = np.flatnonzero(mask)
    np.testing.assert_array_equal(places, chosen[np.argsort(first[chosen], kind="stable")])
    np.testing.assert_array_equal(starts, np.searchsorted(np.sort(first[chosen]), np.arange((1 << bits) + 1)))
    largest = int(np.diff(starts).max())
    for apart in (False, True):
        key_mask, sorted_places = gr.key_mask(size, apart), places.copy()
        spare = np.empty(largest, np.uint64), np.empty(largest, np.uint64), np.empty(largest, np.int64)
        gr.sort_blocks(starts, bits, 10 * np.arange(n), keys, key_mask, sorted_places, *spare)
        np.testing.assert_array_equal(
            sorted_places, 10 * chosen[np.argsort(keys[chosen] & key_mask, kind="stable")]
        )


@given(
    rng=generators(),
    table_rows=st.integers(1, 400),
    batches=st.integers(1, 25),
    dtype=st.sampled_from([np.int32, np.int64]),
    apart=st.booleans(),
)
@settings(max_examples=35)
def test_a_group_and_its_region(
    rng: np.random.Generator, table_rows: int, batches: int, dtype: type, apart: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    lists = lists_at_random(rng, table_rows, batches)
    misses = written(tmp_path_factory.mktemp("lists") / "misses", lists, dtype)
    work = GroupWork(table_rows)
    first, last = sorted(rng.choice(batches + 1, 2, replace=False).tolist())
    group = group_of(misses, first, last, table_rows, work)
    assert not work.words.any()
    bits = (last - first).bit_length()
    members = [[b - first + 1 for b in range(first, last) if row in lists[b]] for row in range(table_rows)]
    assert group.rows.tolist() == [row for row in range(table_rows) if members[row]]
    assert group.counts.tolist() == [len(members[row]) for row in group.rows]
    mask = rng.random(len(group.rows)) < rng.choice([0.2, 1.0])

    def order_twin(row: int) -> tuple[int, ...]:
        first, count, *others = key_twin(members[row], bits)
        return (first, count if apart else 0, *others, *[0] * (64 - len(others)), row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gr, "counts_apart", lambda size, rows, reads: apart)
        assert shared_order(group, mask).tolist() == sorted(group.rows[mask].tolist(), key=order_twin)
    again = group_of(misses, first, last, table_rows, work)
    np.testing.assert_array_equal(again.keys, group.keys)


def test_dense_and_sparse_groups_agree(tmp_path: Path) -> None:
    """Rows are found by sorting or by looking at every word, whichever is quicker; the group is the same."""
    rows = np.random.default_rng(0).permutation(500)[:100]
    misses = written(tmp_path / "misses", [rows, rows[:30]])
    dense, sparse = (
        group_of(misses, 0, 2, table_rows, GroupWork(table_rows)) for table_rows in (500, 100_000)
    )
    for name in ("rows", "counts", "keys"):
        np.testing.assert_array_equal(getattr(dense, name), getattr(sparse, name))


def test_a_mini_batch_reads_what_it_alone_misses_as_one_run(tmp_path: Path) -> None:
    lists = [np.flatnonzero(np.random.default_rng(b).random(3000) < 0.05) for b in range(10)]
    group = group_of(written(tmp_path / "misses", lists), 0, 10, 3000, GroupWork(3000))
    region = shared_order(group, np.ones(len(group.rows), bool))
    place = np.empty(3000, np.int64)
    place[region] = np.arange(len(region))
    alone = group.rows[group.counts == 1]
    for rows in lists:
        own = np.sort(place[np.intersect1d(rows, alone)])
        assert len(own) > 0
        assert own[-1] - own[0] == len(own) - 1


def test_counts_are_kept_apart_where_pairs_have_rows_and_few_miss_each() -> None:
    assert gr.counts_apart(60, 8 * 60**2, 9 * 8 * 60**2)
    assert not gr.counts_apart(60, 8 * 60**2 - 1, 3 * 8 * 60**2)
    assert not gr.counts_apart(60, 8 * 60**2, 10 * 8 * 60**2)


def test_bad_groups_are_refused(tmp_path: Path) -> None:
    misses = written(tmp_path / "misses", [[1, 2], [2, 9]])
    with pytest.raises(ValueError, match="1 to 1023"):
        group_of(misses, 1, 1, 10, GroupWork(10))
    with pytest.raises(ValueError, match="mini-batch 1 misses a row"):
        group_of(misses, 0, 2, 9, GroupWork(9))
