"""The static tier: its kernels against NumPy twins, and what a reader puts into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.errors import BudgetError, IdError, SourceError
from featstore.native import address_of
from featstore.tiers.static import StaticTier, find_slots, set_bits, take_rows

IN_ORDER = np.empty(0, np.int32)


@st.composite
def sets(draw: st.DrawFn) -> tuple[int, np.ndarray, np.random.Generator]:
    """(rows of the table, ascending distinct members, a generator)"""
    table_rows = draw(st.sampled_from([1, 63, 64, 65, 511, 512, 513, 1024]) | st.integers(1, 3000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(0, table_rows))
    return table_rows, np.sort(rng.permutation(table_rows)[:count]).astype(np.int64), rng


def index(table_rows: int) -> tuple[np.ndarray, np.ndarray]:
    words = -(-table_rows // 64)
    return np.zeros(words, np.uint64), np.zeros(-(-words // 8), np.int32)


@given(sets())
@settings(max_examples=80)
def test_set_bits(case: tuple[int, np.ndarray, np.random.Generator]) -> None:
    table_rows, members, _ = case
    bits, ranks = index(table_rows)
    assert set_bits(members, bits, ranks) == len(members)
    np.testing.assert_array_equal(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")), members)
    np.testing.assert_array_equal(ranks, np.searchsorted(members, 512 * np.arange(len(ranks))))


@given(sets(), st.integers(0, 200))
@settings(max_examples=80)
def test_find_slots(case: tuple[int, np.ndarray, np.random.Generator], count: int) -> None:
    table_rows, members, rng = case
    bits, ranks = index(table_rows)
    set_bits(members, bits, ranks)
    rows, slots = rng.integers(0, table_rows, count), np.full(count, 99, np.int32)
    hits = find_slots(rows, bits, ranks, slots)
    inside = np.isin(rows, members)
    np.testing.assert_array_equal(slots, np.where(inside, np.searchsorted(members, rows), -1))
    assert hits == inside.sum()


@given(st.integers(0, 2**32 - 1), st.integers(1, 3000), st.integers(0, 60), st.booleans())
@settings(max_examples=60)
def test_take_rows(seed: int, row_bytes: int, count: int, in_order: bool) -> None:
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (5, row_bytes), np.uint8)
    slots = rng.integers(-1, 5, count).astype(np.int32)
    positions = IN_ORDER if in_order else rng.permutation(count + 3)[:count].astype(np.int32)
    out = np.zeros((count + 3, row_bytes), np.uint8)
    expected = out.copy()
    where = np.arange(count) if in_order else positions
    expected[where[slots >= 0]] = data[slots[slots >= 0]]
    take_rows(slots, positions, address_of(data), row_bytes, address_of(out))
    np.testing.assert_array_equal(out, expected)


def test_members_must_be_distinct() -> None:
    with pytest.raises(ValueError, match="distinct"):
        StaticTier(np.array([1, 1]), 10, 4)


@pytest.mark.parametrize("table_rows", [1, 64, 512, 513, 100_000])
def test_memory_is_what_is_held(table_rows: int) -> None:
    tier = StaticTier(np.arange(0, table_rows, 7), table_rows, 40)
    held = sum(a.nbytes for a in (tier.data, tier._bits, tier._ranks))
    assert tier.memory_bytes == held == tier.data.nbytes + StaticTier.index_bytes(table_rows)
    assert StaticTier.index_bytes(table_rows) <= 0.16 * table_rows + 16


# In a reader.


@pytest.fixture(scope="module")
def graph_store(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> tuple[featstore.Store, np.ndarray, np.ndarray]:
    """A store in random order whose node v is the source of v edges; its features and edges."""
    rng = np.random.default_rng(3)
    nodes = 400
    features = rng.standard_normal((nodes, 50), np.float32)
    sources = np.repeat(np.arange(nodes), np.arange(nodes))
    edges = np.stack([sources, rng.integers(0, nodes, len(sources))])
    store = pack(
        tmp_path_factory.mktemp("graph") / "store", features, graph=edges, order="permutation", permutation=rng.permutation(nodes)
    )
    return store, features, edges


def test_degree_keeps_the_rows_of_the_highest_degree(graph_store: Any, engine: str) -> None:
    store, features, _ = graph_store
    nodes = len(features)
    budget = 622_592 + 250 * 200  # room for some of the 400 rows
    with store.reader(memory=budget + 10_000, static="degree", engine=engine) as reader:
        held = reader.memory()["tiers"]
        before = reader.stats()
        np.testing.assert_array_equal(reader.read(np.arange(nodes)), features)
        hits = reader.stats().since(before).hits["static"]
        assert 0 < hits < nodes
        assert held == hits * 200 + StaticTier.index_bytes(nodes)
        in_tier = [v for v in range(nodes) if reader.plan([v]).hits["static"]]
        assert in_tier == list(range(nodes - hits, nodes))


def test_auto_is_degree_where_there_is_a_graph_and_nothing_else(graph_store: Any, store: featstore.Store) -> None:
    with graph_store[0].reader(memory="4MiB") as reader:
        assert reader.plan(np.arange(400)).hits == {"static": 400}
        assert reader.plan(np.arange(400)).reads == 0
    with store.reader(memory="4MiB") as reader:
        assert reader.memory()["tiers"] == 0
        assert reader.plan([1]).hits == {}
    with pytest.raises(SourceError, match="packed without a graph"):
        store.reader(static="degree")
    with pytest.raises(ValueError, match="static must be"):
        store.reader(static="hot")


@pytest.mark.parametrize("ids", [[5, 5, 7, 999, 0], np.array([], np.int64), np.arange(1000), 3])
def test_given_ids_are_held(store: featstore.Store, features: np.ndarray, engine: str, ids: Any) -> None:
    with store.reader(memory="4MiB", static=ids, engine=engine) as reader:
        wanted = np.array([7, 1, 999, 0, 5, 5, 3])
        inside = int(np.isin(wanted, ids).sum())
        assert reader.plan(wanted).hits.get("static", 0) == inside
        before = reader.stats()
        np.testing.assert_array_equal(reader.read(wanted), features[wanted])
        assert sum(reader.stats().since(before).hits.values()) == inside
        memory = reader.memory()
        assert sum(memory.values()) == 4 * 2**20
        assert min(memory.values()) >= 0


@pytest.mark.parametrize("bad", [[1000], [-1], [0.5], np.zeros(3, bool)])
def test_bad_static_ids_are_refused(store: featstore.Store, bad: Any) -> None:
    with pytest.raises(IdError):
        store.reader(static=bad)


@given(st.integers(1, 1000), st.integers(0, 200_000))
@settings(max_examples=15)
def test_too_many_rows_name_the_smallest_budget_that_works(graph_store: Any, count: int, extra: int) -> None:
    store, features, _ = graph_store
    ids = np.arange(min(count, len(features)))
    with pytest.raises(BudgetError) as caught:
        store.reader(memory=1, static=ids)
    base = caught.value.needed_bytes
    try:
        store.reader(memory=base + extra, static=ids).close()
        return
    except BudgetError as error:
        what, needed = error.what, error.needed_bytes
    assert what == "hold the static rows asked for"
    with pytest.raises(BudgetError):
        store.reader(memory=needed - 1, static=ids)
    with store.reader(memory=needed, static=ids) as reader:
        assert sum(reader.memory().values()) == needed
        assert min(reader.memory().values()) >= 0
        assert reader.plan(ids).reads == 0


def test_large_static_sets_name_the_smallest_budget_that_works(tmp_path: Path, pack: Any) -> None:
    features = np.zeros((3000, 4000), np.uint8)
    with pack(tmp_path / "s", features) as store:
        with pytest.raises(BudgetError) as caught:
            store.reader(memory="1MiB", static=np.arange(3000))
        needed = caught.value.needed_bytes
        with store.reader(memory=needed, static=np.arange(3000)) as reader:
            assert reader.plan(np.arange(3000)).reads == 0
            assert min(reader.memory().values()) >= 0
        with pytest.raises(BudgetError):
            store.reader(memory=needed - 1, static=np.arange(3000))
