"""Samplers from disk with options: the mini-batches are those in memory, within the memory given."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import in_child

import featstore
from featstore.errors import ArgumentError, BudgetError, IdError, SourceError
from featstore.reader.graphs import read_whole
from featstore.sampling import list_draws, under_way
from featstore.sampling.attributes import NamedOptions
from featstore.sampling.batches import GraphInMemory
from featstore.sampling.links import LinkSampler, Negatives
from featstore.sampling.options import KEPT, SamplingOptions
from featstore.sampling.stored import StoredSampler
from featstore.sampling.typed_options import TypedOptions
from featstore.sampling.typed_store import TypedInMemory
from featstore.sampling.typed_stored import TypedStoredSampler

NODES, EDGES = 2500, 30_000
WRITES, CITES, IN = ("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "in", "venue")
REV = ("paper", "rev_writes", "author")
TYPES = {"paper": 1500, "author": 400, "venue": 5}
RELATIONS = {WRITES: 9000, CITES: 15_000, REV: 6000, IN: 1500}
LATEST = 100
HUB_TIMES = np.array([LATEST // 2])


def edges_of(rng: np.random.Generator, sources: int, targets: int, count: int) -> Any:
    """Both ends are wanted unevenly, so that some lists take several pages."""
    ends = [(n * rng.random(count) ** power).astype(np.int64) for n, power in ((sources, 2), (targets, 3))]
    return np.stack(ends)


def orders(request: Any) -> dict[str, Any]:
    return {"order": "ldg", "partitions": 5} if request.param == "permuted" else {}


@pytest.fixture(scope="module", params=["given", "permuted"])
def plain(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[featstore.Store]:
    rng = np.random.default_rng(4)
    path = tmp_path_factory.mktemp(request.param) / "store"
    weights = (rng.random(EDGES) * (rng.random(EDGES) < 0.8)).astype(np.float32)
    arrays = {"since": rng.integers(0, LATEST, NODES).astype(np.int32), "by_number": weights}
    with featstore.pack(
        path, rng.random((NODES, 3), np.float32), graph=edges_of(rng, NODES, NODES, EDGES), memory="64MiB",
        arrays=arrays, edge_ids=True, edge_weights=weights, edge_times=rng.integers(0, LATEST, EDGES),
        **orders(request),
    ) as store:  # fmt: skip
        yield store


@pytest.fixture(scope="module", params=["given", "permuted"])
def typed(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[featstore.Store]:
    """Weights of one relation; times of two; times of two types of nodes."""
    rng = np.random.default_rng(5)
    path = tmp_path_factory.mktemp(request.param) / "store"
    with featstore.pack(
        path, {name: rng.random((count, 3), np.float32) for name, count in TYPES.items()},
        graph={of: edges_of(rng, TYPES[of[0]], TYPES[of[2]], count) for of, count in RELATIONS.items()},
        arrays={f"{name}.year": rng.integers(0, LATEST, TYPES[name]) for name in ("paper", "author")},
        edge_ids=True, edge_weights={CITES: rng.random(RELATIONS[CITES]).astype(np.float32)},
        edge_times={of: rng.integers(0, LATEST, RELATIONS[of]) for of in (WRITES, CITES)}, memory="64MiB",
        **orders(request),
    ) as store:  # fmt: skip
        yield store


@st.composite
def options(draw: Any, of_nodes: str, subgraphs: tuple[str, ...]) -> dict[str, Any]:
    """By the names that loaders know; ``of_nodes``: what their times are called."""
    said: dict[str, Any] = {
        "replace": draw(st.booleans()), "disjoint": draw(st.booleans()),
        "subgraph_type": draw(st.sampled_from(subgraphs)),
        "weight_attr": draw(st.sampled_from([None, "weights"])),
        "time_attr": draw(st.sampled_from([None, "times", of_nodes])),
    }  # fmt: skip
    if said["time_attr"] is not None:
        said["temporal_strategy"] = draw(st.sampled_from(["uniform", "last"]))
        said["time_window"] = draw(st.sampled_from([None, 30]))
    return said


def assert_equal(ours: Any, theirs: Any) -> None:
    """Edge by edge, in order, with all that there is."""
    for name in ("node", "row", "col", "edge_id", "e_id", "batch"):
        one, other = getattr(ours, name), getattr(theirs, name)
        assert type(one) is type(other), name
        assert not isinstance(other, dict) or list(one) == list(other), name
        for key, ids in (other if isinstance(other, dict) else {None: other}).items():
            np.testing.assert_array_equal(one if key is None else one[key], ids, err_msg=f"{name} {key}")
    assert ours.num_sampled_nodes == theirs.num_sampled_nodes
    assert ours.num_sampled_edges == theirs.num_sampled_edges


def times_of(said: dict[str, Any], seeds: Any) -> Any:
    return None if said["time_attr"] is None else (seeds * 7 + 3) % LATEST


def seeds_of(number: int, count: int, nodes: int) -> Any:
    return np.random.default_rng(number).permutation(nodes)[:count]


fanouts = st.lists(st.sampled_from([-1, 1, 3, 8]), min_size=1, max_size=2)
SHARES = st.sampled_from([0, 60_000, 2**40])  # bytes that stay of what is held


@settings(max_examples=6, deadline=None)
@given(
    said=options("since", ("directional", "bidirectional", "induced")), fanouts=fanouts, held=SHARES,
    batch=st.integers(0, 9),
)  # fmt: skip
def test_a_graph(
    plain: featstore.Store, engine: str, said: dict[str, Any], fanouts: list[int], held: int, batch: int
) -> None:
    graph, seeds = plain.graphs["features"], seeds_of(batch, 30, NODES)
    named = NamedOptions(plain, graph, said, seeds_have_times=True)
    memory = GraphInMemory(graph, fanouts, 5, True, named)
    times = times_of(said, seeds)
    theirs = memory.sample(seeds, batch, epoch=1, seed_times=times)
    with plain.sampler(fanouts, memory="48MiB", seed=5, engine=engine, **said) as sampler:
        sampler._held.cut(held)
        ours = sampler.sample(seeds, batch, epoch=1, seed_times=times)
        assert (sampler.stats().bytes_read > 0) == (held < 2**40)
    assert_equal(ours, theirs)
    assert len(ours.row) > 0
    if said["time_attr"] == "since" and said["subgraph_type"] != "bidirectional":
        assert ours.batch is not None
        assert (plain.arrays["since"][ours.node[ours.row]] <= times[ours.batch[ours.col]]).all()


@pytest.mark.parametrize("said", [{}, {"weight_attr": "weights"}, {"time_attr": "times"}])
def test_what_is_held_may_be_cut_for_any_scratch(
    plain: featstore.Store, said: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is alone takes the room of what is held: also of lists that are being looked at."""
    said = {"subgraph_type": "induced", "time_attr": None} | said
    try_reserve, calls, cuts = under_way.UnderWayNow.try_reserve, 0, 0

    def cutting(self: Any, one: Any, scratch_bytes: int) -> bool:
        nonlocal calls, cuts
        calls += 1
        if calls % 3 == 0 and len(self._all) == 1 and self._held.memory_bytes:
            self._held.cut(self._held.memory_bytes * 3 // 4)
            cuts += 1
        return try_reserve(self, one, scratch_bytes)

    monkeypatch.setattr(under_way.UnderWayNow, "try_reserve", cutting)
    named = NamedOptions(plain, plain.graphs["features"], said, seeds_have_times=True)
    memory, seeds = GraphInMemory(plain.graphs["features"], [8], 5, True, named), seeds_of(1, 200, NODES)
    times = times_of(said, seeds)
    theirs = memory.sample(seeds, 0, seed_times=times)
    for share in (1, 2, 3):
        with plain.sampler([8], memory=f"{16 * share}MiB", seed=5, **said) as sampler:
            assert_equal(sampler.sample(seeds, 0, seed_times=times), theirs)
    assert cuts > 2


@settings(max_examples=6, deadline=None)
@given(
    said=options("year", ("directional", "induced")), held=SHARES, batch=st.integers(0, 9),
    fanouts=st.fixed_dictionaries({of: st.tuples(*[st.sampled_from([-1, 0, 2, 5])] * 2) for of in RELATIONS}),
    kind=st.sampled_from(["paper", "author"]),
)  # fmt: skip
def test_edge_types(
    typed: featstore.Store, engine: str, said: dict[str, Any], fanouts: Any, held: int, batch: int, kind: str
) -> None:
    named, seeds = TypedOptions(typed, said, seeds_have_times=True), seeds_of(batch, 25, TYPES[kind])
    memory = TypedInMemory(typed, kind, fanouts, 5, options=named.read())
    times = times_of(said, seeds)
    given_times = None if times is None else {kind: times}
    theirs = memory.sample_types({kind: seeds}, batch, epoch=1, seed_times=given_times)
    with TypedStoredSampler(
        typed, kind, fanouts, memory="16MiB", seed=5, options=named.from_disk(), engine=engine
    ) as sampler:
        sampler._held.cut(held)
        ours = sampler.sample(seeds, batch, epoch=1, seed_times=times)
    assert_equal(ours, theirs)
    if said["time_attr"] == "times" and said["subgraph_type"] == "directional":
        assert ours.batch is not None
        for of in (WRITES, CITES):
            when = read_whole(typed.graphs["__".join(of)], "times")[ours.edge_id[of]]
            assert (when <= times[ours.batch[of[2]][ours.col[of]]]).all()


def test_edges_both_ways_by_type(typed: featstore.Store, tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    graph = {of: edges_of(rng, TYPES[of[0]], TYPES[of[2]], 3000) for of in (WRITES, CITES, REV)}
    tables = {name: rng.random((TYPES[name], 2), np.float32) for name in ("paper", "author")}
    said = SamplingOptions(subgraph="bidirectional", disjoint=True, weights={CITES: KEPT})
    weights = rng.random(3000).astype(np.float32)
    with featstore.pack(
        tmp_path / "s", tables, graph=graph, edge_ids=True, edge_weights={CITES: weights}, memory="64MiB"
    ) as store:
        read = TypedOptions(
            store, {"subgraph_type": "bidirectional", "disjoint": True, "weight_attr": "weights"}
        ).read()
        memory = TypedInMemory(store, "author", [4, 3], options=read)
        with TypedStoredSampler(store, "author", [4, 3], memory="16MiB", options=said) as sampler:
            sampler._held.cut(0)
            assert_equal(sampler.sample(np.arange(40)), memory.sample(np.arange(40)))


@pytest.mark.parametrize("mode", ["binary", "triplet"])
def test_links(plain: featstore.Store, typed: featstore.Store, mode: str) -> None:
    rng = np.random.default_rng(2)
    negatives, times = Negatives(mode, 2), rng.integers(50, LATEST, 20)
    links = np.stack([rng.integers(0, TYPES["author"], 20), rng.integers(0, TYPES["paper"], 20)])
    said = {"time_attr": "year", "weight_attr": "weights"}
    named = TypedOptions(typed, said, seeds_have_times=True)
    whole: Any = TypedInMemory(typed, "author", [3, 2], options=named.read())
    arguments: Any = {"link_type": WRITES, "negatives": negatives}
    with TypedStoredSampler(typed, "author", [3, 2], memory="16MiB", options=named.from_disk()) as sampler:
        sampler._held.cut(0)
        made = [LinkSampler(one, **arguments).sample(links, 3, times=times) for one in (sampler, whole)]
    assert_equal(made[0].subgraph, made[1].subgraph)
    of_graph = NamedOptions(plain, plain.graphs["features"], said | {"time_attr": "since"})
    whole = GraphInMemory(plain.graphs["features"], [3, 2], 0, True, of_graph)
    with plain.sampler([3, 2], memory="16MiB", **said | {"time_attr": "since"}) as one_type:
        one_type._held.cut(0)
        made = [
            LinkSampler(one, negatives=negatives).sample(links, 3, times=times) for one in (one_type, whole)
        ]
    assert_equal(made[0].subgraph, made[1].subgraph)
    for name in ("edge_label_index", "src_index", "dst_neg_index", "batch"):
        np.testing.assert_array_equal(getattr(made[0], name), getattr(made[1], name))


def test_samplers_by_time_pickle_and_fork(plain: featstore.Store) -> None:
    seeds = seeds_of(1, 40, NODES)
    times = (seeds * 3) % LATEST
    said = SamplingOptions(weights=KEPT, edge_times=KEPT, temporal="last")
    with StoredSampler(plain, [4, 4], memory="8MiB", options=said) as sampler:
        expected = sampler.sample(seeds, seed_times=times)

        def child() -> bool:
            assert_equal(sampler.sample(seeds, seed_times=times), expected)
            return True

        assert in_child(child) == 0
        with pickle.loads(pickle.dumps(sampler)) as again:
            assert_equal(again.sample(seeds, seed_times=times), expected)
        with pytest.raises(ArgumentError, match="seed_times= is needed"):
            sampler.sample(seeds)
    with plain.sampler([4], memory="8MiB", weight_attr="weights") as weighted:
        with pytest.raises(ArgumentError, match="no effect"):
            weighted.sample([1, 2], seed_times=np.array([1, 2]))
        with pytest.raises(IdError, match="seed 5 stands twice"):
            weighted.sample([4, 5, 5])
    with (
        plain.sampler([4], memory="8MiB", subgraph_type="induced") as induced,
        pytest.raises(IdError, match="seed 5 stands twice"),
    ):
        induced.sample([4, 5, 5])


@pytest.fixture(scope="module")
def with_a_hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of which one list alone is larger than what a sampler's memory leaves."""
    nodes, edges, hub, path = 60_000, 400_000, 600_000, tmp_path_factory.mktemp("hub") / "s"
    rng = np.random.default_rng(1)
    made = np.concatenate([rng.integers(0, nodes, (2, edges)), np.zeros((2, hub), np.int64)], axis=1)
    made[0, edges:] = rng.integers(0, nodes, hub)
    weights = rng.random(edges + hub).astype(np.float32)
    when = rng.integers(0, LATEST, edges + hub)
    featstore.pack(
        path, rng.random((nodes, 1), np.float32), graph=made, edge_weights=weights, edge_times=when,
        arrays={"since": rng.integers(0, LATEST, nodes)}, memory="128MiB",
    ).close()  # fmt: skip
    return path


@pytest.mark.parametrize(
    "said",
    [
        {"weight_attr": "weights", "replace": True},
        {"time_attr": "times", "weight_attr": "weights"},
        {"time_attr": "since"},
        {"subgraph_type": "induced"},
    ],
)
def test_memory_stays_within_the_budget(with_a_hub: Path, said: dict[str, Any]) -> None:
    """One list alone is larger than what is free; smaller ones are looked at some at a time."""
    with featstore.open(with_a_hub) as store:
        times = None if said.get("time_attr") != "times" else np.full(300, LATEST // 2)
        seeds = np.arange(1, 301)
        named = NamedOptions(store, store.graphs["features"], said, seeds_have_times=True)
        expected = GraphInMemory(store.graphs["features"], [4, 4], 0, False, named)
        with store.sampler([4, 4], memory="64MiB", **said) as sampler:  # loads what is loaded once
            with pytest.raises(BudgetError, match="sample from this graph") as least:
                store.sampler([4, 4], memory=1, **said)
            hubs_too = sampler.sample(np.arange(300), seed_times=times)
        assert_equal(hubs_too, expected.sample(np.arange(300), seed_times=times))
        alone = GraphInMemory(store.graphs["features"], [4], 0, False, named)
        expected_hub = alone.sample([0], seed_times=HUB_TIMES if times is not None else None)
        del alone, expected
        memory_bytes = least.value.needed_bytes + 2**20
        tracemalloc.start()
        try:
            with store.sampler([4], memory=memory_bytes, **said) as sampler:
                sampler._held.cut(0)
                batch = sampler.sample(seeds, seed_times=times)
                with pytest.raises(
                    BudgetError, match=r"with its longest list whole|sample hop 1|have all edges"
                ):
                    sampler.sample([0], seed_times=None if times is None else times[:1])
                assert len(sampler.sample(seeds, seed_times=times).node) == len(batch.node)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        kept_bytes = 2 * sum(one.nbytes for one in (batch.node, batch.row, batch.col, batch.edge_id))
        assert peak_bytes <= memory_bytes + kept_bytes
        assert_equal(hub_alone(store, memory_bytes, said), expected_hub)


def hub_alone(store: featstore.Store, memory_bytes: int, said: dict[str, Any]) -> Any:
    """With what the errors say."""
    for _ in range(4):
        try:
            with store.sampler([4], memory=memory_bytes, **said) as sampler:
                return sampler.sample([0], seed_times=HUB_TIMES if said.get("time_attr") == "times" else None)
        except BudgetError as error:
            assert error.needed_bytes > memory_bytes
            memory_bytes = error.needed_bytes
    pytest.fail("it never fits")


def test_values_are_held_where_there_is_room(plain: featstore.Store) -> None:
    with plain.sampler([5], memory="16MiB", weight_attr="weights", time_attr="since") as sampler:
        held = sampler.memory()
        assert held["edge_values"] == 4 * EDGES
        assert held["node_times"] in (8 * NODES, 16 * NODES)
        assert sum(held.values()) == 16 * 2**20
        sampler.sample(np.arange(50))
        assert sampler.stats().bytes_read == 0
        assert sampler.stats().hit_rate == 1.0


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"weight_attr": "by_number"}, "weight_attr='by_number': a sampler from disk goes by weights"),
        ({"input_time": [1]}, "no option 'input_time'"),
        ({"weight_attr": "since"}, "2,500 values; the graph has 30,000 edges"),
    ],
)
def test_what_cannot_be(plain: featstore.Store, said: dict[str, Any], words: str) -> None:
    with pytest.raises((ArgumentError, SourceError), match=words):
        plain.sampler([2], memory="16MiB", **said)


def test_arrays_in_memory_are_not_of_samplers_from_disk(
    typed: featstore.Store, store: featstore.Store
) -> None:
    for said, words in (
        (
            {"weights": {CITES: np.ones(15_000)}},
            "weights: from disk they are those that the graph keeps",
        ),
        ({"edge_times": {CITES: np.zeros(15_000, int)}}, "edge_times: from disk"),
    ):
        with pytest.raises(ArgumentError, match=words):
            TypedStoredSampler(typed, "paper", [2], memory="16MiB", options=SamplingOptions(**said))
    with pytest.raises(SourceError, match="has no weights: pack it with edge_weights="):
        TypedStoredSampler(typed, "paper", [2], memory="16MiB", options=SamplingOptions(weights={IN: KEPT}))


# Kernels.


@settings(max_examples=25, deadline=None)
@given(
    degrees=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    shift=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_lists_lie_whole_on_their_pages(degrees: list[int], shift: int, seed: int) -> None:
    ends = np.concatenate([[0], np.cumsum(degrees)])
    some = np.sort(np.random.default_rng(seed).integers(0, len(degrees), 8))
    lows, highs, begins = ends[some], ends[some + 1], np.empty(8, np.int64)
    pages = np.empty(500, np.int64)
    count = list_draws.list_pages(lows, highs, shift, pages, begins)
    values = np.concatenate([np.arange(page << shift, (page + 1) << shift) for page in pages[:count]] or [[]])
    wanted = {place >> shift for low, high in zip(lows, highs) for place in range(low, high)}
    assert pages[:count].tolist() == sorted(wanted)
    for low, high, begin in zip(lows, highs, begins):
        assert values[begin : begin + high - low].tolist() == list(range(low, high))


def test_values_that_are_wrong_are_found() -> None:
    """No checksum tells them: a store may come from a stranger."""
    none, sources = np.empty(0, np.int64), np.array([0, 2, 1], np.int32)
    times = np.array([9, 5, 5, 4], np.int64)
    assert list_draws.list_times(times, 1, 2, sources[:0], 0, none)[2:] == (-1, 0)
    assert list_draws.list_times(times, 1, 3, sources[:0], 0, none)[2:] == (2, list_draws.BAD_TIME)
    own, order, wrong, _ = list_draws.list_times(none, 0, 3, sources, 0, np.array([7, 8, 3]))
    assert (own.tolist(), order.tolist(), wrong) == ([7, 3, 8], [1, 0, 2], -1)
    assert list_draws.list_times(none, 0, 3, sources, 0, np.array([7, 8]))[2:] == (1, list_draws.BAD_SOURCE)
    for bad in (-1.0, np.nan, np.inf):
        assert list_draws.bad_weight(np.array([1, 0, bad], np.float32)) == 2
    assert list_draws.bad_weight(np.array([1, 0], np.float32)) == -1


@pytest.mark.parametrize("said", [{"weight_attr": "weights"}, {"time_attr": "since"}])
def test_a_hop_reads_each_page_once(plain: featstore.Store, engine: str, said: dict[str, Any]) -> None:
    """However many lists lie on it, and however often they are asked: where all fits at once, or in many
    pieces, but for the pages where these end."""
    tables = ["features/sources"] + ["features/weights"] * ("weight_attr" in said)
    pages_bytes = 4096 * sum(plain.table(name).layout.pages for name in tables)
    for disjoint, memory in ((False, "48MiB"), (True, "48MiB"), (True, "12MiB")):
        given: Any = {"memory": memory, "engine": engine, "edge_ids": False, "disjoint": disjoint, **said}
        with plain.sampler([2, -1], **given) as sampler:
            sampler._held.cut(0)
            for times in range(1, 3):
                batch = sampler.sample(seeds_of(times, 600, NODES))
                assert len(batch.num_sampled_nodes) == 3
                assert pages_bytes / 2 < sampler.stats().bytes_read <= times * 2.5 * pages_bytes
            assert sampler.stats().edges_cached == 0
