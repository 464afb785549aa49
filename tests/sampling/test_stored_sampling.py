"""The sampler over a stored graph: the very mini-batches of the sampler in memory, within its budget, or an
error."""

from __future__ import annotations

import os
import pickle
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import in_child
from test_sampling import floyd_twin, mix_twin, random_graph

import featstore
from featstore.errors import BudgetError, ClosedError, CorruptionError, FormatError, IdError, SourceError
from featstore.sampling import picking
from featstore.sampling.neighbors import NeighborSampler, SampledSubgraph
from featstore.sampling.stored import StoredSampler

NODES, EDGES = 3000, 60_000
FANOUTS = [6, -1, 3]
MEMORY = "8MiB"


def order_options(order: str, nodes: int) -> dict[str, Any]:
    """What ``featstore.pack`` is told for an order."""
    if order == "permutation":
        return {"order": order, "permutation": np.random.default_rng(5).permutation(nodes)}
    return {"order": order} if order == "given" else {"order": order, "partitions": 8}


def packed_graph(
    pack: Any, path: Path, graph: tuple[Any, Any], order: str = "given", hubs: float = 0.0
) -> featstore.Store:
    nodes = len(graph[0]) - 1
    options = order_options(order, nodes)
    store: featstore.Store = pack(path, np.zeros((nodes, 1), np.float32), graph=graph, hubs=hubs, **options)
    return store


@pytest.fixture(scope="module")
def by_order(pack: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One graph in several orders, with hubs and without. Not to be written to."""
    graph, folder = random_graph(NODES, EDGES, 1), tmp_path_factory.mktemp("graphs")
    kinds = [(order, hubs) for order in ("given", "permutation", "ldg") for hubs in (0.0, 0.05)]
    made = {
        (order, hubs): packed_graph(pack, folder / f"{order}{hubs}", graph, order, hubs)
        for order, hubs in kinds
    }
    yield made
    for store in made.values():
        store.close()


@pytest.fixture
def hubs_store(by_order: Any) -> featstore.Store:
    """The graph in the order of a permutation, with hubs. Not to be written to."""
    opened: featstore.Store = by_order["permutation", 0.05]
    return opened


def in_memory(store: featstore.Store, fanouts: Any = FANOUTS, seed: int = 0) -> NeighborSampler:
    return NeighborSampler(*store.graphs["features"].csc(), fanouts, seed)


def seeds_of(number: int, count: int = 50, nodes: int = NODES) -> Any:
    return np.random.default_rng(number).permutation(nodes)[:count]


def least(store: featstore.Store, share: float = 0.0) -> int:
    """The smallest memory of a sampler, and so much of what all neighbours take."""
    with pytest.raises(BudgetError, match="sample from this graph") as raised:
        store.sampler(FANOUTS, memory=1)
    return raised.value.needed_bytes + int(share * 4 * store.graphs["features"].edges)


def assert_equal(ours: SampledSubgraph, theirs: SampledSubgraph) -> None:
    """Equal but for ``edge_id``, which counts in another order."""
    for name in ("node", "row", "col"):
        assert getattr(ours, name).dtype == np.int64
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    assert ours.num_sampled_nodes == theirs.num_sampled_nodes
    assert ours.num_sampled_edges == theirs.num_sampled_edges


def assert_edges_are_stored_ones(store: featstore.Store, batch: SampledSubgraph) -> None:
    """``edge_id`` leads to the neighbour in ``GRAPH/sources``, in the list of the node that asked."""
    graph = store.graphs["features"]
    with store.reader(tables="features/sources", memory=MEMORY) as reader:
        sources = reader.read(batch.edge_id)
    targets = np.searchsorted(graph.offsets(), batch.edge_id, side="right") - 1
    node_of_row = graph.table.node_of_row()
    if node_of_row is not None:
        sources, targets = node_of_row[sources], node_of_row[targets]
    np.testing.assert_array_equal(sources, batch.node[batch.row])
    np.testing.assert_array_equal(targets, batch.node[batch.col])
    assert len(np.unique(batch.edge_id)) == len(batch.edge_id)


# The same mini-batches.


@settings(max_examples=25)
@given(
    nodes=st.integers(1, 200),
    edges_per_node=st.integers(1, 12),
    order=st.sampled_from(["given", "permutation"]),
    hubs=st.sampled_from([0.0, 0.1, 1.0]),
    fanouts=st.lists(st.sampled_from([-1, 1, 2, 5, 40]), min_size=1, max_size=3),
    seed=st.integers(-(2**70), 2**70),
    batch_index=st.integers(0, 2**40),
    epoch=st.integers(0, 1000),
)
def test_equals_the_sampler_in_memory(
    pack: Any, tmp_path_factory: pytest.TempPathFactory, nodes: int, edges_per_node: int, order: str,
    hubs: float, fanouts: list[int], seed: int, batch_index: int, epoch: int,
) -> None:  # fmt: skip
    graph = random_graph(nodes, nodes * edges_per_node, seed % 2**32)
    seeds = seeds_of(epoch, 1 + batch_index % 40, nodes)
    with (
        packed_graph(pack, tmp_path_factory.mktemp("any") / "s", graph, order, hubs) as store,
        store.sampler(fanouts, memory=MEMORY, seed=seed, engine="threads") as sampler,
    ):
        batch = sampler.sample(seeds, batch_index, epoch=epoch)
        assert_equal(batch, in_memory(store, fanouts, seed).sample(seeds, batch_index, epoch=epoch))
        if order == "given":  # then the stored positions are those of the arrays
            again = NeighborSampler(*graph, fanouts, seed).sample(seeds, batch_index, epoch=epoch)
            np.testing.assert_array_equal(batch.edge_id, again.edge_id)
        assert_edges_are_stored_ones(store, batch)


@pytest.mark.parametrize("order", ["given", "permutation", "ldg"])
@pytest.mark.parametrize("hubs", [0.0, 0.05])
def test_every_order_and_engine(by_order: Any, engine: str, order: str, hubs: float) -> None:
    store = by_order[order, hubs]
    memory = in_memory(store)
    for share in (0.0, 0.5, 1.0):  # of the neighbours, in memory
        with store.sampler(FANOUTS, memory=least(store, share), engine=engine) as sampler:
            assert sampler.engine == engine
            for number in range(3):
                assert_equal(
                    sampler.sample(seeds_of(number), number, epoch=7),
                    memory.sample(seeds_of(number), number, epoch=7),
                )
            assert (sampler.stats().edges_cached > 0) == (share > 0)


def test_small_seeds_and_many(hubs_store: featstore.Store) -> None:
    memory = in_memory(hubs_store)
    with hubs_store.sampler(FANOUTS, memory=MEMORY) as sampler:
        empty = sampler.sample(np.empty(0, np.int64))
        assert (len(empty.node), len(empty.row), empty.num_sampled_nodes) == (0, 0, (0, 0, 0, 0))
        for seeds in (np.array([4], np.uint8), np.arange(NODES, dtype=np.int32)[::-1]):
            assert_equal(sampler.sample(seeds), memory.sample(seeds))


def test_each_neighbour_is_picked_about_equally_often(pack: Any, tmp_path: Path) -> None:
    degree, fanout, rounds = 12, 4, 3000
    indptr = np.array([0, degree] + [degree] * degree, dtype=np.int64)
    graph = indptr, np.arange(1, degree + 1, dtype=np.int32)
    picked = np.zeros(degree + 1)
    with (
        packed_graph(pack, tmp_path / "s", graph, "permutation", 1.0) as store,
        store.sampler([fanout], memory=MEMORY, seed=11) as sampler,
    ):
        for index in range(rounds):
            batch = sampler.sample([0], index)
            assert len(batch.node) == 1 + fanout
            picked[batch.node[1:]] += 1
    expected = rounds * fanout / degree
    assert picked[0] == 0
    assert (np.abs(picked[1:] - expected) < 5 * np.sqrt(expected)).all()


# Kernels.


@settings(max_examples=25)
@given(
    nodes=st.integers(1, 60),
    fanout=st.sampled_from([-1, 1, 3, 30]),
    seed=st.integers(0, 2**32),
    hubs=st.integers(0, 20),
    first=st.integers(0, 300),
)
def test_pick_hop_equals_twin(nodes: int, fanout: int, seed: int, hubs: int, first: int) -> None:
    rng = np.random.default_rng(seed)
    offsets, sources = random_graph(nodes, nodes * 6, seed)
    node_of_row = np.empty(0, np.int32) if seed % 2 else rng.permutation(nodes).astype(np.int32)
    rows = rng.permutation(nodes).astype(np.int64)
    begin = nodes // 3
    cached = rng.permutation(nodes)[:hubs]
    order = np.argsort(cached)
    ends = np.concatenate([[0], np.cumsum(np.diff(offsets)[cached])])
    lists = np.concatenate([sources[:0], *(sources[offsets[r] : offsets[r + 1]] for r in cached)])
    words = -(-nodes // 64) if len(cached) else 0
    bits, ranks = np.zeros(words, np.uint64), np.zeros(words, np.int32)
    for row in cached:
        bits[row >> 6] |= np.uint64(1) << np.uint64(row & 63)
    ranks[:] = np.concatenate([[0], np.cumsum([int(word).bit_count() for word in bits])])[:words]
    expected: list[tuple[int, int, int]] = []
    for position in range(begin, nodes):
        row = int(rows[position])
        low, degree = int(offsets[row]), int(offsets[row + 1] - offsets[row])
        node = row if len(node_of_row) == 0 else int(node_of_row[row])
        picks = (
            floyd_twin(mix_twin(seed ^ mix_twin(node)), degree, fanout)
            if 0 < fanout < degree
            else range(degree)
        )
        for place in (low + p for p in picks):  # what is of the first ones shows as such
            held = int(sources[place]) + nodes if place < first else -1
            expected.append((int(sources[place]) if row in cached else held, position, place))
    size, degree_max = picking.hop_size(offsets, len(sources), rows, begin, nodes, fanout)
    assert size == len(expected)
    out = [np.empty(size, np.int64) for _ in range(3)]
    misses = picking.pick_hop(
        offsets, node_of_row, rows, begin, nodes, fanout, False, np.uint64(seed), bits, ranks,
        ends[:-1][order], lists, sources[:first] + nodes, picking.empty_picks(fanout, degree_max), *out,
    )  # fmt: skip
    np.testing.assert_array_equal(np.stack(out, axis=1), np.array(expected, np.int64).reshape(-1, 3))
    assert misses == sum(neighbour < 0 for neighbour, _, _ in expected)


@settings(max_examples=25)
@given(known=st.integers(0, 20), neighbours=st.lists(st.integers(-1, 40), max_size=60))
def test_enter_hop_equals_twin(known: int, neighbours: list[int]) -> None:
    rows = np.concatenate([np.arange(known), np.full(60, -1)]).astype(np.int64)
    slots = np.full(256, -1, np.int32)
    assert picking.fill_table(slots, rows, known) == -1
    row = np.array(neighbours, np.int64)
    found = picking.enter_hop(slots, rows, known, row, 40)
    places = {r: r for r in range(known)}
    for place, neighbour in enumerate(neighbours):
        if not 0 <= neighbour < 40:
            assert found == -1 - place
            assert row[place] == neighbour
            return
        assert row[place] == places.setdefault(neighbour, len(places))
    assert found == len(places)
    assert rows[:found].tolist() == list(places)


# The cache, and what is read.


def test_where_there_is_room_all_neighbours_are_held(hubs_store: featstore.Store) -> None:
    with hubs_store.sampler(FANOUTS, memory=MEMORY) as sampler:
        assert_equal(sampler.sample(seeds_of(1)), in_memory(hubs_store).sample(seeds_of(1)))
        stats = sampler.stats()
        assert (stats.reads, stats.bytes_read, stats.hit_rate) == (0, 0, 1.0)
        assert stats.to_dict()["hit_rate"] == 1.0
        assert sampler.memory()["neighbour_cache"] == 4 * hubs_store.graphs["features"].edges


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 0.8])
def test_the_cache_holds_the_lists_of_the_hubs_and_the_first_edges(
    pack: Any, tmp_path: Path, share: float
) -> None:
    """In what there is room for: hubs first."""
    hubs_store = packed_graph(pack, tmp_path / "s", random_graph(NODES, 600_000, 3), "permutation", 0.05)
    graph = hubs_store.graphs["features"]
    hubs, node_of_row = graph.hub_rows()[0], graph.table.node_of_row()
    assert node_of_row is not None
    memory = least(hubs_store, share)
    with hubs_store.sampler(FANOUTS, memory=memory) as sampler:
        first, held_hubs = len(sampler._cache.first), sampler._cache.index.rows
        np.testing.assert_array_equal(held_hubs, hubs[: len(held_hubs)])
        held = sampler.memory()
        assert sum(held.values()) == memory
        assert all(value >= 0 for value in held.values())
        lists = 4 * (sampler._offsets[held_hubs + 1] - sampler._offsets[held_hubs]).sum()
        assert held["neighbour_cache"] >= lists + 4 * first
        assert (len(held_hubs) == len(hubs)) >= (first > 0)
        assert first > 0 or share < 0.6
        batch = sampler.sample(seeds_of(1))
        assert_equal(batch, in_memory(hubs_store).sample(seeds_of(1)))
        if sampler.memory() == held:  # it was not cut for the mini-batch
            asked = np.isin(batch.node[batch.col], node_of_row[held_hubs]) | (batch.edge_id < first)
            stats = sampler.stats()
            assert (stats.batches, stats.edges_asked, stats.edges_cached) == (1, len(batch.row), asked.sum())
            assert 0 <= stats.hit_rate < 1
            assert stats.reads > 0
            assert stats.bytes_read >= stats.reads * 4096


def test_what_only_hubs_ask_is_not_read(pack: Any, tmp_path: Path) -> None:
    graph = random_graph(500, 5000, 3)
    with (
        packed_graph(pack, tmp_path / "s", graph, "permutation", 1.0) as store,
        store.sampler(FANOUTS, memory=MEMORY) as sampler,
    ):
        assert_equal(sampler.sample(seeds_of(0, 50, 500)), in_memory(store).sample(seeds_of(0, 50, 500)))
        stats = sampler.stats()
        assert (stats.reads, stats.bytes_read, stats.hit_rate) == (0, 0, 1.0)


def test_of_a_hub_only_the_pages_of_the_picks_are_read(pack: Any, tmp_path: Path) -> None:
    nodes, degree = 1000, 1_000_000
    indptr = np.concatenate([[0], np.full(nodes, degree)]).astype(np.int64)
    graph = indptr, np.random.default_rng(2).integers(0, nodes, degree).astype(np.int32)
    with (
        packed_graph(pack, tmp_path / "s", graph) as store,
        store.sampler([10], memory=least(store)) as sampler,
    ):
        assert_equal(sampler.sample([0], 3), in_memory(store, [10]).sample([0], 3))
        assert 0 < sampler.stats().reads <= 10
        assert sampler.stats().bytes_read <= 10 * 8 * 4096


def test_the_cache_makes_room_for_large_mini_batches(pack: Any, tmp_path: Path) -> None:
    nodes = 100_000
    graph = random_graph(nodes, 1_500_000, 3)
    with packed_graph(pack, tmp_path / "s", graph, "permutation", 1.0) as store:
        memory = in_memory(store, [5, 5])
        with store.sampler([5, 5], memory="9MiB") as sampler:
            held = [sampler.memory()["neighbour_cache"]]
            for number, count in enumerate((20, 4000, 8000, 20)):
                seeds = seeds_of(number, count, nodes)
                before = sampler.stats()
                assert_equal(sampler.sample(seeds), memory.sample(seeds))
                cached = sampler.stats().edges_cached - before.edges_cached
                held.append(sampler.memory()["neighbour_cache"])
                assert (cached > 0) == (held[-1] > 0)
            assert held[0] == held[1] > held[2] > held[3] == held[4] > 0
            with pytest.raises(BudgetError, match="sample hop 2") as raised:
                sampler.sample(seeds_of(5, 30_000, nodes))
            assert sampler.sample(seeds_of(0, 20, nodes)).num_sampled_nodes[0] == 20
    with (
        featstore.open(tmp_path / "s") as store,
        store.sampler([5, 5], memory=raised.value.needed_bytes) as sampler,
    ):
        assert_equal(sampler.sample(seeds_of(5, 30_000, nodes)), memory.sample(seeds_of(5, 30_000, nodes)))
        assert sampler.memory()["neighbour_cache"] < held[0]


# Memory.


def test_the_smallest_budget_works_and_none_smaller(hubs_store: featstore.Store) -> None:
    with pytest.raises(BudgetError, match="sample from this graph") as raised:
        hubs_store.sampler(FANOUTS, memory=1)
    with pytest.raises(BudgetError):
        hubs_store.sampler(FANOUTS, memory=raised.value.needed_bytes - 4096)
    with hubs_store.sampler(FANOUTS, memory=raised.value.needed_bytes) as sampler:
        assert_equal(sampler.sample(seeds_of(1)), in_memory(hubs_store).sample(seeds_of(1)))
        assert sum(sampler.memory().values()) == raised.value.needed_bytes


@pytest.mark.parametrize("order", ["given", "permutation"])
@pytest.mark.parametrize("extra_bytes", [0, 6 * 2**20])
def test_memory_stays_within_the_budget(pack: Any, tmp_path: Path, order: str, extra_bytes: int) -> None:
    nodes = 300_000
    with packed_graph(pack, tmp_path / "s", random_graph(nodes, 2_000_000, 4), order, 0.3) as store:
        with store.sampler([4, 4], memory="64MiB") as sampler:  # loads what is loaded once
            sampler.sample(seeds_of(0, 10, nodes))
        with pytest.raises(BudgetError) as raised:
            store.sampler([4, 4], memory=1)
        memory_bytes = raised.value.needed_bytes + extra_bytes
        results_bytes = 0
        seeds = [seeds_of(number, count, nodes).copy() for number, count in enumerate((100, 1000, 1500))]
        tracemalloc.start()
        try:
            with store.sampler([4, 4], memory=memory_bytes) as sampler:
                for one in seeds:
                    batch = sampler.sample(one)
                    size = sum(array.nbytes for array in (batch.node, batch.row, batch.col, batch.edge_id))
                    results_bytes = max(results_bytes, size)
                assert (sampler.memory()["neighbour_cache"] > 0) == (extra_bytes > 0)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        # The last mini-batch is still there while the next is made.
        assert peak_bytes <= memory_bytes + 2 * results_bytes


# Damage.


def overwrite(store: featstore.Store, table: str, at: int, data: bytes) -> None:
    with (store.path / store.table(table).entry.chunk_path(0)).open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_a_corrupted_page_is_an_error(pack: Any, tmp_path: Path, engine: str) -> None:
    with packed_graph(pack, tmp_path / "s", random_graph(300, 150_000, 3)) as store:
        overwrite(store, "features/sources", 5000, b"\xff")
        with pytest.raises(CorruptionError, match="at byte 4096"):  # where all neighbours are held
            store.sampler([-1], memory=MEMORY, engine=engine)
        with store.sampler([-1], memory=least(store), engine=engine) as sampler:
            with pytest.raises(CorruptionError, match="at byte 4096") as raised:
                sampler.sample(np.arange(10))
            assert raised.value.offset == 4096
            with pytest.raises(CorruptionError):  # and it goes on telling so
                sampler.sample(np.arange(10))


def test_a_corrupted_hub_or_offset_is_an_error(pack: Any, tmp_path: Path) -> None:
    for table in ("offsets", "hubs"):
        with packed_graph(pack, tmp_path / table, random_graph(300, 150_000, 3), hubs=0.2) as store:
            overwrite(store, f"features/{table}", 100, b"\xff\xff")
            with pytest.raises(CorruptionError, match=f"{table}.* at byte 0"):
                store.sampler([-1], memory=least(store, 0.5))


def test_graphs_that_contradict_themselves_are_errors(pack: Any, tmp_path: Path) -> None:
    """What no checksum tells: the sampler never looks outside what it holds."""
    indptr, indices = random_graph(300, 6000, 3)
    for number, (table, at, value, message) in enumerate(
        (
            ("sources", 4 * 70, 300, "edge 70 comes from row 300 of 300"),
            ("sources", 4 * 70, -1, "edge 70 comes from row -1 of 300"),
            ("offsets", 8 * 7, 6001, "do not run from 0 to 6,000: number 8 falls from 6,001"),
            ("offsets", 0, 1, "do not run from 0 to 6,000"),
            ("offsets", 8 * 300, 1, "do not run from 0 to 6,000"),
        )
    ):
        with packed_graph(pack, tmp_path / str(number), (indptr, indices)) as store:
            overwrite(
                store,
                f"features/{table}",
                at,
                np.array([value], "<i4" if table == "sources" else "<i8").tobytes(),
            )

            def use(memory: int, store: featstore.Store = store) -> None:
                with store.sampler([-1], memory=memory, verify=False) as sampler:
                    sampler.sample(np.arange(300))

            for memory in [least(store, share) for share in (0.0, 1.0)]:
                with pytest.raises(FormatError, match=message):
                    use(memory)


def test_hubs_that_contradict_the_offsets_are_an_error(pack: Any, tmp_path: Path) -> None:
    indptr, indices = random_graph(300, 150_000, 3)
    with packed_graph(pack, tmp_path / "s", (indptr, indices), hubs=0.2) as store:
        hub = int(store.graphs["features"].hub_rows()[0][0])
        overwrite(store, "features/offsets", 8 * hub + 8, (indptr[hub + 1] - 1).astype("<i8").tobytes())
        with pytest.raises(FormatError, match="lists of another length"):
            store.sampler([-1], memory=least(store, 0.5), verify=False)


# What is asked wrongly.


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        ([0, NODES], "seed 3000 is no node"),
        ([-1], "seed -1 is no node"),
        ([5, 7, 5], "seed 5 stands twice"),
        ([0.0], "integer array"),
    ],
)
def test_bad_seeds(hubs_store: featstore.Store, seeds: Any, message: str) -> None:
    with hubs_store.sampler([3], memory=MEMORY) as sampler:
        with pytest.raises(IdError, match=message):
            sampler.sample(np.array(seeds))
        assert len(sampler.sample([5, 7]).node) > 2


def test_bad_options(hubs_store: featstore.Store, store: featstore.Store) -> None:
    with pytest.raises(SourceError, match="at least 1"):
        hubs_store.sampler([3, 0], memory=MEMORY)
    with pytest.raises(KeyError, match="no graph 'other'"):
        hubs_store.sampler([3], memory=MEMORY, graph="other")
    with pytest.raises(SourceError, match="holds no graph"):
        store.sampler([3], memory=MEMORY)
    with hubs_store.sampler([3], memory=MEMORY, graph="features") as sampler:
        assert "fanouts [3]" in repr(sampler)
        assert sampler.node_count == NODES


# Threads, processes, the end.


def test_threads_share_a_sampler(hubs_store: featstore.Store) -> None:
    memory = in_memory(hubs_store)
    with hubs_store.sampler(FANOUTS, memory=MEMORY) as sampler, ThreadPoolExecutor(4) as pool:
        batches = list(pool.map(lambda number: sampler.sample(seeds_of(number), number), range(24)))
        assert sampler.stats().batches == 24
        assert sampler.stats().edges_asked == sum(len(batch.row) for batch in batches)
    for number, batch in enumerate(batches):
        assert_equal(batch, memory.sample(seeds_of(number), number))


def test_pickles(hubs_store: featstore.Store) -> None:
    expected = in_memory(hubs_store, seed=9).sample(seeds_of(1), 4)
    with (
        hubs_store.sampler(FANOUTS, memory=MEMORY, seed=9, engine="threads") as sampler,
        pickle.loads(pickle.dumps(sampler)) as copy,
    ):
        assert copy.engine == "threads"
        assert copy.memory() == sampler.memory()
        assert_equal(copy.sample(seeds_of(1), 4), expected)


def test_a_forked_child_samples_and_so_does_its_parent(hubs_store: featstore.Store, engine: str) -> None:
    expected = in_memory(hubs_store).sample(seeds_of(1))
    with hubs_store.sampler(FANOUTS, memory=MEMORY, engine=engine) as sampler:
        sampler.sample(seeds_of(0))

        def child() -> bool:
            assert_equal(sampler.sample(seeds_of(1)), expected)
            fresh = sampler.stats().batches == 1
            sampler.close()
            return fresh

        with sampler._under_way.lock:  # as if another thread were sampling
            assert in_child(child) == 0
        assert_equal(sampler.sample(seeds_of(1)), expected)
        assert sampler.stats().batches == 2


def test_close(hubs_store: featstore.Store) -> None:
    sampler = hubs_store.sampler(FANOUTS, memory=MEMORY)
    descriptors = len(os.listdir("/proc/self/fd"))
    sampler.close()
    sampler.close()
    assert len(os.listdir("/proc/self/fd")) < descriptors
    for use in (lambda: sampler.sample(seeds_of(0)), sampler.stats, sampler.memory):
        with pytest.raises(ClosedError, match="the sampler is closed"):
            use()
    assert in_child(lambda: sampler.close() is None) == 0


def test_close_waits_for_the_mini_batch_under_way(hubs_store: featstore.Store) -> None:
    sampler: StoredSampler = hubs_store.sampler(FANOUTS, memory=least(hubs_store))
    expected = in_memory(hubs_store).sample(seeds_of(1))
    reading, go = threading.Event(), threading.Event()
    read = sampler._lists[0].read

    def slow(*arguments: Any, last: bool) -> None:
        reading.set()
        assert go.wait(10)
        read(*arguments, last=last)

    sampler._lists[0].read = slow  # type: ignore[method-assign]
    with ThreadPoolExecutor(3) as pool:
        batch = pool.submit(sampler.sample, seeds_of(1))
        assert reading.wait(10)
        closing = pool.submit(sampler.close)
        assert not closing.done()
        go.set()
        assert_equal(batch.result(10), expected)
        closing.result(10)
