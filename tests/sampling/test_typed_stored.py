"""Sampling over edge types from disk: the mini-batches are those in memory, within the memory given."""

from __future__ import annotations

import pickle
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import in_child

import featstore
from featstore.errors import (
    BudgetError,
    ClosedError,
    CorruptionError,
    IdError,
    SourceError,
    UnknownNameError,
)
from featstore.sampling.options import SamplingOptions
from featstore.sampling.typed import TypedSubgraph
from featstore.sampling.typed_store import TypedInMemory
from featstore.sampling.typed_stored import TypedStoredSampler

WRITES, CITES, WRITTEN, IN = (
    ("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "rev_writes", "author"),
    ("paper", "in", "venue"),
)  # fmt: skip
NODES = {"paper": 3000, "author": 900, "venue": 7}
EDGES = {WRITES: 30_000, CITES: 60_000, WRITTEN: 20_000, IN: 3000}
FANOUTS = {WRITES: (4, 3, 2), CITES: (5, -1, 2), WRITTEN: (3, 0, 4), IN: (-1, 2, 0)}


def random_edges(rng: np.random.Generator, of: Any, nodes: dict[str, int], count: int) -> Any:
    """Sources are wanted unevenly, so that there are hubs."""
    sources = (nodes[of[0]] * rng.random(count) ** 2).astype(np.int64)
    return np.stack([sources, rng.integers(0, nodes[of[2]], count)])


def packed(path: Path, nodes: dict[str, int], edges: dict[Any, int], seed: int, **more: Any) -> Any:
    rng = np.random.default_rng(seed)
    graph = {of: random_edges(rng, of, nodes, count) for of, count in edges.items()}
    tables = {name: rng.random((count, 3), np.float32) for name, count in nodes.items()}
    return featstore.pack(path, tables, graph=graph, memory="64MiB", **more)


@pytest.fixture(scope="module", params=["given", "permuted"])
def typed(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp(request.param) / "store"
    more = {"order": "ldg", "partitions": 5} if request.param == "permuted" else {}
    with packed(path, NODES, EDGES, 1, edge_ids=True, **more) as store:
        assert (store.tables["paper"].maps() is not None) == (request.param == "permuted")
        yield store


def least(store: featstore.Store, node_type: str = "paper", **options: Any) -> int:
    with pytest.raises(BudgetError, match="sample from these graphs") as error:
        TypedStoredSampler(store, node_type, FANOUTS, memory=1, **options)
    return error.value.needed_bytes


def assert_equal(ours: TypedSubgraph, theirs: TypedSubgraph) -> None:
    """Edge by edge, in order, with all that there is."""
    for name in ("node", "row", "col", "edge_id", "e_id"):
        one, other = getattr(ours, name) or {}, getattr(theirs, name) or {}
        assert list(one) == list(other), name
        for key, ids in other.items():
            assert one[key].dtype == np.int64
            np.testing.assert_array_equal(one[key], ids, err_msg=f"{name} {key}")
    assert ours.num_sampled_nodes == theirs.num_sampled_nodes
    assert ours.num_sampled_edges == theirs.num_sampled_edges
    assert ours.batch is theirs.batch is None


@st.composite
def graphs(draw: Any) -> dict[str, Any]:
    nodes = {name: draw(st.integers(1, 60)) for name in ("a", "b", "c")}
    names = st.sampled_from(sorted(nodes))
    triples = st.tuples(names, st.sampled_from(["r", "rev_r", "s"]), names)
    of = draw(st.lists(triples, min_size=1, max_size=4, unique=True))
    edges = {one: draw(st.sampled_from([1, 40, 400])) for one in of}
    used = {name for one in of for name in (one[0], one[2])}
    hops = draw(st.integers(1, 3))
    fanout = st.lists(st.sampled_from([-1, 0, 1, 2, 5]), min_size=hops, max_size=hops)
    return {
        "nodes": {name: count for name, count in nodes.items() if name in used}, "edges": edges,
        "fanouts": {one: draw(fanout) for one in of}, "node_type": draw(st.sampled_from(sorted(used))),
        "replace": draw(st.booleans()), "edge_ids": draw(st.booleans()), "seed": draw(st.integers(0, 99)),
        "order": draw(st.sampled_from([{}, {"order": "ldg", "partitions": 2}])),
    }  # fmt: skip


@settings(max_examples=7)
@given(case=graphs(), batch_index=st.integers(0, 5), epoch=st.integers(0, 5), room=st.sampled_from([0, 300]))
def test_random_graphs(
    case: dict[str, Any], batch_index: int, epoch: int, room: int, engine: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """``room``: what stays of the cache."""
    path = tmp_path_factory.mktemp("random") / "store"
    options, node_type = SamplingOptions(replace=case["replace"]), case["node_type"]
    kept = {"edge_ids": case["edge_ids"]}
    arguments: Any = (node_type, case["fanouts"], case["seed"])
    with packed(path, case["nodes"], case["edges"], case["seed"], **kept, **case["order"]) as store:
        memory = TypedInMemory(store, *arguments, options=options)
        seeds = np.random.default_rng(1).permutation(case["nodes"][node_type])[:9]
        with TypedStoredSampler(
            store, *arguments[:2], memory="16MiB", seed=case["seed"], options=options, engine=engine
        ) as sampler:
            sampler._held.cut(room)
            ours = sampler.sample(seeds, batch_index, epoch=epoch)
        assert_equal(ours, memory.sample(seeds, batch_index, epoch=epoch))
        assert (ours.e_id is not None) == case["edge_ids"]


@pytest.mark.parametrize("share", [0.0, 0.15, 1.0])
@pytest.mark.parametrize("replace", [False, True])
def test_equals_the_sampler_in_memory(typed: Any, engine: str, replace: bool, share: float) -> None:
    """With no cache, with a part of the lists in it, and with all."""
    options = SamplingOptions(replace=replace)
    memory = TypedInMemory(typed, "paper", FANOUTS, 7, options=options)
    budget = least(typed) + int(share * 3 * 2**20)
    arguments: Any = {"memory": budget, "seed": 7, "options": options, "engine": engine}
    with TypedStoredSampler(typed, "paper", FANOUTS, **arguments) as sampler:
        assert sampler.engine == engine
        assert sampler.reads == (share < 1)
        for number in range(3):
            seeds = np.random.default_rng(number).permutation(NODES["paper"])[:50]
            ours = sampler.sample(seeds, number, epoch=1)
            assert_equal(ours, memory.sample(seeds, number, epoch=1))
        stats, held = sampler.stats(), sampler.memory()
    assert stats.batches == 3
    assert (stats.bytes_read > 0) == (share < 1)
    assert sum(held.values()) == budget
    assert held["unused"] >= 0


@pytest.mark.parametrize(
    "order",
    [{}, {one: dict.fromkeys(("paper", "author"), of) for one, of in (("order", "ldg"), ("partitions", 5))}],
)
def test_edges_and_their_reverse(tmp_path: Path, order: dict[str, Any]) -> None:
    options, fanouts = SamplingOptions(subgraph="bidirectional"), [4, 3]
    edges = {WRITES: 9000, CITES: 9000, WRITTEN: 8000}
    with packed(tmp_path / "s", NODES, edges, 2, edge_ids=True, **order) as store:
        memory = TypedInMemory(store, "author", fanouts, options=options)
        with TypedStoredSampler(store, "author", fanouts, memory="16MiB", options=options) as sampler:
            sampler._held.cut(0)
            assert_equal(sampler.sample(np.arange(40)), memory.sample(np.arange(40)))


def test_edges_are_the_stored_ones(typed: Any) -> None:
    """``edge_id`` is where an edge stands in the store, ``e_id`` which of the packed edges it is."""
    rng = np.random.default_rng(1)
    given_edges = {of: random_edges(rng, of, NODES, count) for of, count in EDGES.items()}
    with TypedStoredSampler(typed, "paper", FANOUTS, memory=least(typed)) as sampler:
        batch = sampler.sample(np.arange(60))
    assert batch.e_id is not None
    for of, edges in given_edges.items():
        found = np.stack([batch.node[of[0]][batch.row[of]], batch.node[of[2]][batch.col[of]]])
        np.testing.assert_array_equal(found, edges[:, batch.e_id[of]])
        graph = typed.graphs["__".join(of)]
        with typed.reader(tables=[f"{graph.name}/edge_ids"], memory="16MiB") as reader:
            ids = reader.read(batch.edge_id[of])
        np.testing.assert_array_equal(ids, batch.e_id[of])


def test_small_relations_are_held_first(typed: Any) -> None:
    with TypedStoredSampler(typed, "paper", FANOUTS, memory=least(typed) + 150_000) as sampler:
        held = {one.graph.edge_type: len(one.cache.first) for one in sampler._lists}
        assert (held[IN], held[WRITTEN]) == (EDGES[IN], EDGES[WRITTEN])
        assert held[CITES] == 0
        sampler._held.cut(EDGES[IN] * 4 + 400)
        assert [len(one.cache.first) for one in sampler._lists if one.graph.edge_type in (IN, WRITTEN)] == [
            100, EDGES[IN]
        ]  # fmt: skip


@pytest.mark.parametrize("extra_bytes", [0, 2**20])
def test_memory_stays_within_the_budget(tmp_path: Path, extra_bytes: int) -> None:
    nodes = {"paper": 100_000, "author": 60_000, "venue": 50}
    edges = {WRITES: 200_000, CITES: 400_000, WRITTEN: 200_000, IN: 100_000}
    rng = np.random.default_rng(0)
    seeds = [rng.permutation(nodes["paper"])[:count] for count in (100, 600, 900)]
    with packed(tmp_path / "s", nodes, edges, 3, edge_ids=True, order="ldg", partitions=4) as store:
        with TypedStoredSampler(store, "paper", [4, 4], memory="64MiB") as sampler:
            sampler.sample(seeds[0])  # loads what is loaded once
        with pytest.raises(BudgetError) as error:
            TypedStoredSampler(store, "paper", [4, 4], memory=1)
        memory_bytes, results_bytes = error.value.needed_bytes + extra_bytes, 0
        in_lists = sum(8 * one.edges for one in store.graphs.values())
        tracemalloc.start()
        try:
            with TypedStoredSampler(store, "paper", [4, 4], memory=memory_bytes) as sampler:
                for one in seeds:
                    batch = sampler.sample(one)
                    parts: Any = (batch.node, batch.row, batch.col, batch.edge_id, batch.e_id)
                    size = sum(array.nbytes for part in parts for array in part.values())
                    results_bytes = max(results_bytes, size)
                cached = sampler.memory()["neighbour_cache"]
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert (cached > 0) == (extra_bytes > 0)
        assert cached < in_lists / 4
        # The last mini-batch is still there while the next is made.
        assert peak_bytes <= memory_bytes + 2 * results_bytes


def test_more_than_there_is_memory_for(typed: Any) -> None:
    with TypedStoredSampler(typed, "paper", [-1, -1, -1], memory=least(typed)) as sampler:
        with pytest.raises(BudgetError, match="pass fewer seeds") as error:
            sampler.sample(np.arange(3000))
        assert len(sampler.sample(np.arange(2)).node["paper"]) > 2  # smaller ones still are
    fits = error.value.needed_bytes + 2**21
    with TypedStoredSampler(typed, "paper", [-1, -1], memory=fits) as sampler:
        sampler.sample(np.arange(3000))


def test_threads_share_it(typed: Any) -> None:
    memory = TypedInMemory(typed, "paper", FANOUTS)
    seeds = [np.random.default_rng(n).permutation(3000)[: 10 + 40 * n] for n in range(8)]
    with TypedStoredSampler(typed, "paper", FANOUTS, memory=least(typed) + 2**19) as sampler:
        with ThreadPoolExecutor(4) as pool:
            batches = list(pool.map(lambda n: sampler.sample(seeds[n], n), range(8)))
        assert sampler.stats().batches == 8
    for number, batch in enumerate(batches):
        assert_equal(batch, memory.sample(seeds[number], number))


def test_pickles_and_forks(typed: Any, engine: str) -> None:
    said: Any = {"memory": least(typed), "seed": 3, "options": SamplingOptions(replace=True)}
    with TypedStoredSampler(typed, "author", FANOUTS, engine=engine, **said) as sampler:
        expected = sampler.sample(np.arange(30))

        def child() -> bool:
            assert_equal(sampler.sample(np.arange(30)), expected)
            return sampler.stats().batches == 1

        with sampler._under_way.lock:  # as if another thread were sampling
            assert in_child(child) == 0
        with pickle.loads(pickle.dumps(sampler)) as again:
            assert_equal(again.sample(np.arange(30)), expected)
            assert again.engine == engine
    sampler.close()
    for use in (lambda: sampler.sample(np.arange(3)), sampler.stats, sampler.memory):
        with pytest.raises(ClosedError, match="the sampler is closed"):
            use()


def test_a_damaged_page_is_an_error(tmp_path: Path, engine: str) -> None:
    with packed(tmp_path / "s", NODES, EDGES, 1) as store:
        table = store.table("paper__cites__paper/sources")
        path = store.path / table.entry.chunk_path(0)
        with path.open("r+b") as file:
            file.seek(5000)
            file.write(b"\xff")
        with (
            TypedStoredSampler(store, "paper", [-1], memory=least(store), engine=engine) as sampler,
            pytest.raises(CorruptionError, match="paper__cites__paper/sources"),
        ):
            sampler.sample(np.arange(3000))


def test_what_cannot_be(typed: Any, store: featstore.Store) -> None:
    with pytest.raises(SourceError, match="no graph with edge types"):
        TypedStoredSampler(store, "features", [2], memory="16MiB")
    with pytest.raises(UnknownNameError, match="no type of nodes"):
        TypedStoredSampler(typed, "papers", [2], memory="16MiB")
    with pytest.raises(UnknownNameError, match="no relation"):
        TypedStoredSampler(typed, "paper", {"paper__cite__paper": [2]}, memory="16MiB")
    with TypedStoredSampler(typed, "paper", [2], memory="16MiB") as sampler:
        with pytest.raises(IdError, match="seed 5 stands twice"):
            sampler.sample(np.array([4, 5, 5]))
        with pytest.raises(IdError, match="3000"):
            sampler.sample(np.array([3000]))
