"""The static tier: its kernels against NumPy twins, and what a reader puts into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.base.bitmap import set_bits
from featstore.base.native import address_of
from featstore.errors import ArgumentError, BudgetError, IdError, SourceError
from featstore.tiers.static import StaticRows, serve_rows

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
    return np.zeros(words, np.uint64), np.zeros(words, np.int32)


@given(sets())
@settings(max_examples=50)
def test_set_bits(case: tuple[int, np.ndarray, np.random.Generator]) -> None:
    table_rows, members, _ = case
    bits, ranks = index(table_rows)
    assert set_bits(members, bits, ranks) == len(members)
    np.testing.assert_array_equal(
        np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")), members
    )
    np.testing.assert_array_equal(ranks, np.searchsorted(members, 64 * np.arange(len(ranks))))


def expected_serve(members, data, rows, positions, served, out):
    """The NumPy twin of serve_rows: (served, out) afterwards, and how many were served."""
    mine = np.isin(rows, members) & (served == 0)
    where = np.arange(len(rows)) if len(positions) == 0 else positions
    out = out.copy()
    if out.size:
        out[where[mine]] = data[np.searchsorted(members, rows[mine])]
    return np.where(mine, 1, served).astype(np.uint8), out, int(mine.sum())


@given(sets(), st.integers(0, 200), st.integers(1, 3000), st.booleans(), st.booleans())
@settings(max_examples=120)
def test_serve_rows(
    case: tuple[int, np.ndarray, np.random.Generator], count: int, row_bytes: int, in_order: bool, copy: bool
) -> None:
    table_rows, members, rng = case
    bits, ranks = index(table_rows)
    set_bits(members, bits, ranks)
    data = rng.integers(0, 256, (len(members), row_bytes), np.uint8)
    rows, served = rng.integers(0, table_rows, count), (rng.random(count) < 0.3).astype(np.uint8)
    positions = IN_ORDER if in_order else rng.permutation(count + 3)[:count].astype(np.int32)
    out = np.zeros((count + 3, row_bytes) if copy else (0, row_bytes), np.uint8)
    wanted_served, wanted_out, wanted_hits = expected_serve(members, data, rows, positions, served, out)
    hits = serve_rows(rows, positions, served, bits, ranks, address_of(data), row_bytes, address_of(out))
    assert hits == wanted_hits
    np.testing.assert_array_equal(served, wanted_served)
    np.testing.assert_array_equal(out, wanted_out)


@pytest.mark.parametrize("row_bytes", [512, 520, 32])
@pytest.mark.parametrize("offset", [0, 8])
def test_large_results_are_streamed_and_right(row_bytes: int, offset: int) -> None:
    """Past the size from which results bypass the caches, aligned or not."""
    rng = np.random.default_rng(1)
    count = 9 * 2**20 // row_bytes
    tier = StaticRows(np.arange(0, 2000, 2), 2000, row_bytes)
    tier.data[:] = rng.integers(0, 256, tier.data.shape, np.uint8)
    rows, served = rng.integers(0, 2000, count), np.zeros(count, np.uint8)
    memory = np.zeros(count * row_bytes + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    out = memory[begin : begin + count * row_bytes]
    assert tier.serve(rows, IN_ORDER, served, out) == (rows % 2 == 0).sum()
    np.testing.assert_array_equal(
        out.reshape(count, row_bytes), np.where((rows % 2 == 0)[:, None], tier.data[rows // 2], 0)
    )
    assert not memory[:begin].any()
    assert not memory[begin + out.size :].any()


@given(sets(), st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_two_tiers_serve_each_row_once(case: tuple[int, np.ndarray, np.random.Generator], seed: int) -> None:
    """The contract that makes a chain of tiers: the second serves only what the first did not."""
    table_rows, members, rng = case
    data = rng.integers(0, 256, (table_rows, 12), np.uint8)
    others = np.flatnonzero(np.random.default_rng(seed).random(table_rows) < 0.5)
    rows, out, served = rng.integers(0, table_rows, 50), np.zeros((50, 12), np.uint8), np.zeros(50, np.uint8)
    hits = []
    for held in (members, others):
        tier = StaticRows(held, table_rows, 12)
        tier.data[:] = data[held]
        hits.append(tier.serve(rows, IN_ORDER, served, out.reshape(-1)))
    first, second = np.isin(rows, members), np.isin(rows, others)
    assert hits == [first.sum(), (second & ~first).sum()]
    np.testing.assert_array_equal(served, first | second)
    np.testing.assert_array_equal(out, np.where((first | second)[:, None], data[rows], 0))


def test_members_must_be_distinct() -> None:
    with pytest.raises(ValueError, match="distinct"):
        StaticRows(np.array([1, 1]), 10, 4)


@pytest.mark.parametrize("table_rows", [1, 64, 512, 513, 100_000])
def test_memory_is_what_is_held(table_rows: int) -> None:
    tier = StaticRows(np.arange(0, table_rows, 7), table_rows, 40)
    held = sum(a.nbytes for a in (tier.data, tier._bits, tier._ranks))
    assert tier.memory_bytes == held == tier.data.nbytes + StaticRows.index_bytes(table_rows)
    assert StaticRows.index_bytes(table_rows) <= 0.19 * table_rows + 16


# In a reader.


@pytest.fixture(scope="module")
def graph_store(
    tmp_path_factory: pytest.TempPathFactory, pack: Any
) -> tuple[featstore.Store, np.ndarray, np.ndarray]:
    """A store in random order whose node v is the source of v edges; its features and edges."""
    rng = np.random.default_rng(3)
    nodes = 400
    features = rng.standard_normal((nodes, 50), np.float32)
    sources = np.repeat(np.arange(nodes), np.arange(nodes))
    edges = np.stack([sources, rng.integers(0, nodes, len(sources))])
    store = pack(
        tmp_path_factory.mktemp("graph") / "store",
        features,
        graph=edges,
        order="permutation",
        permutation=rng.permutation(nodes),
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
        assert held == hits * 200 + StaticRows.index_bytes(nodes)
        in_tier = [v for v in range(nodes) if reader.plan([v]).hits["static"]]
        assert in_tier == list(range(nodes - hits, nodes))


def test_auto_is_degree_where_there_is_a_graph_and_nothing_else(
    graph_store: Any, store: featstore.Store
) -> None:
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


def test_small_requests_from_memory_are_as_any_other(
    store: featstore.Store, features: np.ndarray, engine: str
) -> None:
    """Whatever the ids are given as, and wherever the rows go; errors and counts as well."""
    torch = pytest.importorskip("torch")
    held = np.arange(0, 1000, 2)
    with store.reader(memory="4MiB", static=held, engine=engine) as reader:
        before = reader.stats()
        asked = [
            np.array([4, 8, 8, 0]),
            np.array([[2], [998]], np.uint16),
            6,
            [10, 12],
            torch.tensor([[2, 4]]),
        ]
        for ids in asked:
            found = reader.read(ids)
            assert type(found) is (torch.Tensor if isinstance(ids, torch.Tensor) else np.ndarray)
            np.testing.assert_array_equal(np.asarray(found), features[np.asarray(ids)])
            out = np.zeros((*np.shape(ids), *features.shape[1:]), features.dtype)
            assert reader.read(ids, out=out) is out
            np.testing.assert_array_equal(out, features[np.asarray(ids)])
        stats = reader.stats().since(before)
        rows = 2 * sum(np.asarray(ids).size for ids in asked)
        assert (stats.requests, stats.rows_asked, stats.hits) == (10, rows, {"static": rows})
        assert (stats.bytes_asked, stats.reads) == (rows * features[0].nbytes, 0)
        for bad in (1000, -1):
            with pytest.raises(IdError, match=f"node id {bad} is out of range"):
                reader.read([2, bad])
        with pytest.raises(ValueError, match="out must be"):
            reader.read([2, 4], out=np.zeros((1, 3)))
        np.testing.assert_array_equal(reader.read([2, 3, 4]), features[[2, 3, 4]])
    with pytest.raises(featstore.errors.ClosedError):
        reader.read([2])


@pytest.mark.parametrize("bad", [[1000], [-1], [0.5], np.zeros(3, bool)])
def test_bad_static_ids_are_refused(store: featstore.Store, bad: Any) -> None:
    with pytest.raises(IdError):
        store.reader(static=bad)


def test_memory_for_static_rows_that_are_none_is_refused(store: featstore.Store) -> None:
    with pytest.raises(ArgumentError, match="static_memory= is for static rows, and static=None leaves none"):
        store.reader(memory="4MiB", static=None, static_memory="1MiB")
    store.reader(memory="4MiB", static=None, static_memory=0).close()


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
