"""The sampler's options against a plain Python twin, their statistics, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_twin import Graph, batch_key_twin, exponential_twin, reverse_twin, sample_twin

from featstore.errors import ArgumentError, IdError, SourceError
from featstore.sampling import choosing
from featstore.sampling.neighbors import NeighborSampler, SampledSubgraph
from featstore.sampling.options import SamplingOptions

NODES = 40


def random_graph(rng: np.random.Generator, edges: int, nodes: int = NODES) -> tuple[Any, Any]:
    """A CSC multigraph with skewed degrees, loops, and nodes without neighbours."""
    target = np.sort((rng.random(edges) ** 3 * nodes).astype(np.int64))
    indptr = np.searchsorted(target, np.arange(nodes + 1)).astype(np.int64)
    return indptr, rng.integers(0, nodes, edges).astype(np.int32)


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    """A graph, options, and a mini-batch."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    edges = draw(st.integers(0, 300))
    case: dict[str, Any] = {"rng": rng, "graph": random_graph(rng, edges), "options": {}}
    options = case["options"]
    options["replace"] = draw(st.booleans())
    options["subgraph"] = draw(st.sampled_from(["directional", "bidirectional", "induced"]))
    if draw(st.booleans()):
        options["weights"] = rng.random(edges) * (rng.random(edges) < 0.7)
    timed = draw(st.sampled_from(["", "edge_times", "node_times"]))
    if timed:
        count = edges if timed == "edge_times" else NODES
        options[timed] = rng.integers(0, 20, count)
        options["temporal"] = draw(st.sampled_from(["uniform", "last"]))
        options["window"] = draw(st.sampled_from([None, 0, 5]))
        case["seed_times"] = rng.integers(-2, 22, 6)
        if timed == "node_times" and draw(st.booleans()):
            case["seed_times"] = None
    else:
        options["disjoint"] = draw(st.booleans())
    trees = bool(timed) or options.get("disjoint", False)
    case["seeds"] = rng.integers(0, NODES, 6) if trees else rng.permutation(NODES)[:6]
    case["fanouts"] = draw(st.lists(st.sampled_from([-1, 1, 2, 5, 30]), min_size=1, max_size=3))
    return case


def twin_of(case: dict[str, Any], batch_index: int, epoch: int) -> tuple[Any, list[Any]]:
    """(what the twin found, its edges)."""
    options, (indptr, indices) = SamplingOptions(**case["options"]), case["graph"]
    times = options.edge_times
    seed_times = case.get("seed_times")
    if options.node_times is not None:
        times = options.node_times[indices]
        seed_times = options.node_times[case["seeds"]] if seed_times is None else seed_times
    spans = None
    if times is not None:
        window = math.inf if options.window is None else options.window
        spans = [(last - window, last) for last in seed_times.tolist()]
    graph = Graph("", "", indptr, indices, case["fanouts"], None, options.weights, times)
    made = sample_twin(
        [""], [graph], {"": case["seeds"]}, batch_key_twin(7, epoch, batch_index), replace=options.replace,
        trees=options.has_trees, last=options.temporal == "last", induced=options.subgraph == "induced",
        spans=spans,
    )  # fmt: skip
    edges = made.edges[0]
    return made, reverse_twin(edges) if options.subgraph == "bidirectional" else edges


def sample(case: dict[str, Any], batch_index: int = 0, epoch: int = 0) -> SampledSubgraph:
    options = SamplingOptions(**case["options"])
    numbers = np.arange(len(case["graph"][1])) * 2
    sampler = NeighborSampler(*case["graph"], case["fanouts"], 7, edge_ids=numbers, options=options)
    return sampler.sample(case["seeds"], batch_index, epoch=epoch, seed_times=case.get("seed_times"))


@settings(max_examples=120)
@given(case=cases(), batch_index=st.integers(0, 9), epoch=st.integers(0, 9))
def test_every_option_equals_the_twin(case: dict[str, Any], batch_index: int, epoch: int) -> None:
    batch = sample(case, batch_index, epoch)
    made, edges = twin_of(case, batch_index, epoch)
    assert batch.node.tolist() == made.node[""]
    assert list(zip(batch.row.tolist(), batch.col.tolist(), batch.edge_id.tolist())) == edges
    assert batch.num_sampled_nodes == tuple(made.found[""])
    directional = case["options"]["subgraph"] == "directional"
    assert batch.num_sampled_edges == (tuple(made.per_hop[0]) if directional else ())
    assert batch.e_id is not None
    np.testing.assert_array_equal(batch.e_id, batch.edge_id * 2)
    if SamplingOptions(**case["options"]).has_trees:
        assert batch.batch is not None
        assert batch.batch.tolist() == made.tree[""]
    else:
        assert batch.batch is None
    assert all(part.dtype == np.int64 for part in (batch.node, batch.row, batch.col, batch.edge_id))


@settings(max_examples=35)
@given(case=cases())
def test_what_must_hold_of_any_mini_batch(case: dict[str, Any]) -> None:
    """Nothing is later than its seed; trees are apart; induced subgraphs have every edge that they may."""
    batch, options = sample(case), SamplingOptions(**case["options"])
    indptr, indices = case["graph"]
    assert ((batch.node >= 0) & (batch.node < NODES)).all()
    target = np.searchsorted(indptr, batch.edge_id, side="right") - 1
    ends = batch.node[batch.row], batch.node[batch.col]
    drawn = (ends[0] == indices[batch.edge_id]) & (ends[1] == target)
    back = (ends[1] == indices[batch.edge_id]) & (ends[0] == target)
    assert (drawn | back if options.subgraph == "bidirectional" else drawn).all()
    targets = np.repeat(np.arange(NODES), np.diff(indptr))
    allowed = np.ones(len(indices), bool)[None].repeat(len(case["seeds"]), 0)
    if options.has_trees:
        assert batch.batch is not None
        np.testing.assert_array_equal(batch.batch[batch.row], batch.batch[batch.col])
        pairs = set(zip(batch.batch.tolist(), batch.node.tolist()))
        assert len(pairs) == len(batch.node)
    if options.timed:
        assert batch.batch is not None
        times = options.edge_times if options.edge_times is not None else options.node_times[indices]
        lasts = case["seed_times"] if case["seed_times"] is not None else options.node_times[case["seeds"]]
        allowed = times[None] <= lasts[:, None]
        if options.window is not None:
            allowed &= times[None] >= lasts[:, None] - options.window
        assert allowed[batch.batch[batch.col], batch.edge_id].all()
    if options.subgraph == "induced":
        trees = np.zeros(len(batch.node), np.int64) if batch.batch is None else batch.batch
        for tree in np.unique(trees):
            nodes = set(batch.node[trees == tree].tolist())
            inside = [
                edge for edge in np.flatnonzero(allowed[tree])
                if int(indices[edge]) in nodes and int(targets[edge]) in nodes
            ]  # fmt: skip
            assert sorted(batch.edge_id[trees[batch.col] == tree].tolist()) == inside


def test_options_that_say_nothing_change_nothing() -> None:
    graph = random_graph(np.random.default_rng(1), 900, 100)
    base = NeighborSampler(*graph, [5, -1, 2], seed=3).sample(np.arange(9), 4, epoch=2)
    for options in (None, SamplingOptions(), SamplingOptions(subgraph="bidirectional")):
        batch = NeighborSampler(*graph, [5, -1, 2], seed=3, options=options).sample(np.arange(9), 4, epoch=2)
        np.testing.assert_array_equal(batch.node, base.node)
        assert batch.num_sampled_nodes == base.num_sampled_nodes


@settings(max_examples=100)
@given(word=st.integers(0, 2**64 - 1))
def test_exponential_equals_twin_and_the_logarithm(word: int) -> None:
    found = choosing.exponential(np.uint64(word))
    assert found == exponential_twin(word)
    assert found == pytest.approx(-math.log(((word >> 11) + 1) / 2**53), rel=4e-15, abs=1e-300)
    assert found >= 0


@pytest.mark.parametrize("replace", [False, True])
def test_weighted_draws_follow_the_weights(replace: bool) -> None:
    """Chi-squared over 20,000 mini-batches of fan-out 2 of 6 neighbours, with a fixed seed, against the exact
    chances of pairs."""
    weights = np.array([1.0, 2.0, 0.0, 4.0, 0.5, 8.0], np.float32)
    indptr = np.array([0, 6] + [6] * 6, np.int64)
    options = SamplingOptions(weights=weights, replace=replace)
    sampler = NeighborSampler(indptr, np.arange(1, 7, dtype=np.int32), [2], 11, options=options)
    chance = np.zeros((6, 6))
    share = weights.astype(float) / weights.sum()
    for one in range(6):
        for other in range(6):
            rest = share[other] / (1 - share[one]) * (one != other)
            chance[one, other] = share[one] * (share[other] if replace else rest)
    rounds, seen = 20_000, np.zeros((6, 6))
    for number in range(rounds):
        one, other = sampler.sample(np.zeros(1, np.int64), number).edge_id
        seen[one, other] += 1
    possible = chance > 0
    assert not seen[~possible].any()
    chi = ((seen - rounds * chance)[possible] ** 2 / (rounds * chance[possible])).sum()
    assert chi < (51.2 if replace else 43.8), "24 and 19 degrees of freedom: passed once in a thousand"


@pytest.mark.parametrize("options", [{"replace": True}, {"disjoint": True}, {"edge_times": np.arange(12)}])
def test_neighbours_are_drawn_uniformly(options: dict[str, Any]) -> None:
    indptr = np.array([0, 12] + [12] * 12, np.int64)
    sampler = NeighborSampler(
        indptr, np.arange(1, 13, dtype=np.int32), [3], 5, options=SamplingOptions(**options)
    )
    rounds, allowed = 10_000, 8 if "edge_times" in options else 12
    times = {"seed_times": np.array([7])} if "edge_times" in options else {}
    seen = np.zeros(12)
    for number in range(rounds):
        np.add.at(seen, sampler.sample(np.zeros(1, np.int64), number, **times).edge_id, 1)
    assert not seen[allowed:].any()
    expected = rounds * 3 / allowed
    spread = 1.0 if "replace" in options else (1 - 3 / allowed) * allowed / (allowed - 1)
    chi = ((seen[:allowed] - expected) ** 2 / expected).sum() / spread
    assert chi < (24.4 if allowed == 8 else 31.3), "passed once in a thousand"


def test_the_trees_of_a_mini_batch_are_independent() -> None:
    indptr = np.array([0, 12] + [12] * 12, np.int64)
    options = SamplingOptions(disjoint=True)
    sampler = NeighborSampler(indptr, np.arange(1, 13, dtype=np.int32), [4], 5, options=options)
    batch = sampler.sample(np.zeros(400, np.int64))
    picked = np.zeros((400, 12))
    picked[batch.col, batch.edge_id] = 1
    overlap = (picked[1:] * picked[:-1]).sum(axis=1).mean()
    assert abs(overlap - 4 * 4 / 12) < 0.12
    assert len(np.unique(picked, axis=0)) > 200


def test_other_dtypes_and_bounds_of_time() -> None:
    """Wide indices, float32 weights; windows that would leave 64 bits."""
    rng = np.random.default_rng(3)
    indptr, indices = random_graph(rng, 300)
    weights = rng.random(300, np.float32)
    narrow = NeighborSampler(indptr, indices, [3, 2], options=SamplingOptions(weights=weights))
    wide = NeighborSampler(indptr, indices.astype(np.int64), [3, 2], options=SamplingOptions(weights=weights))
    seeds = np.arange(8)
    np.testing.assert_array_equal(narrow.sample(seeds).edge_id, wide.sample(seeds).edge_id)
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    times = np.full(300, low)
    options = SamplingOptions(edge_times=times, window=high)
    sampler = NeighborSampler(indptr, indices, [-1], options=options)
    assert len(sampler.sample(seeds, seed_times=np.full(8, low)).row) == indptr[8]
    assert len(sampler.sample(seeds, seed_times=np.full(8, low + high)).row) == indptr[8]
    assert len(sampler.sample(seeds, seed_times=np.full(8, high)).row) == 0


EDGES = 30


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"replace": 1}, ArgumentError, "replace"),
        ({"subgraph": "induce"}, ArgumentError, "did you mean 'induced'"),
        ({"temporal": "last"}, ArgumentError, "of times"),
        ({"window": 3}, ArgumentError, "of times"),
        ({"edge_times": np.zeros(EDGES, np.int64), "window": -1}, ArgumentError, "window"),
        ({"edge_times": np.zeros(3, np.int64)}, SourceError, "edge_times must be integers.*30 edges"),
        ({"node_times": np.zeros(NODES)}, SourceError, "node_times must be integers"),
        ({"node_times": np.zeros(3, int), "edge_times": np.zeros(3, int)}, ArgumentError, "leave one out"),
        ({"weights": np.zeros(3)}, SourceError, "weights must be float32 or float64, one for each of 30"),
        ({"weights": np.full(EDGES, -1.0)}, SourceError, "not negative"),
        ({"weights": np.full(EDGES, np.nan)}, SourceError, "finite"),
        ({"weights": np.ones(EDGES, int)}, SourceError, "float32 or float64"),
        ({"weights": {"a": np.ones(EDGES)}}, ArgumentError, "weights: the graph has no 'a'"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], error: type[Exception], words: str) -> None:
    graph = random_graph(np.random.default_rng(1), EDGES)
    with pytest.raises(error, match=words):
        NeighborSampler(*graph, [2], options=SamplingOptions(**options))


def test_seeds_and_times_that_cannot_be() -> None:
    graph = random_graph(np.random.default_rng(1), EDGES)
    plain = NeighborSampler(*graph, [2])
    with pytest.raises(ArgumentError, match="seed_times= has no effect"):
        plain.sample(np.arange(2), seed_times=np.arange(2))
    with pytest.raises(ArgumentError, match="seed_times= has no effect"):
        NeighborSampler(*graph, [2], options=SamplingOptions(replace=True)).sample([1], seed_times=[2])
    with pytest.raises(IdError, match="seed 4 stands twice"):
        NeighborSampler(*graph, [2], options=SamplingOptions(replace=True)).sample([4, 4])
    timed = NeighborSampler(*graph, [2], options=SamplingOptions(edge_times=np.arange(EDGES)))
    with pytest.raises(ArgumentError, match="seed_times= is needed"):
        timed.sample([1])
    with pytest.raises(SourceError, match=r"seed_times must be integers.*2 seeds"):
        timed.sample([1, 2], seed_times=[1])
    with pytest.raises(ArgumentError, match="options must be a SamplingOptions"):
        NeighborSampler(*graph, [2], options={"replace": True})  # type: ignore[arg-type]


def test_arrays_that_contradict_themselves_stop_with_the_place() -> None:
    indptr, indices = np.array([0, 2, 1, 4, 4]), np.array([1, 2, 9, 3], np.int32)
    for options in (SamplingOptions(replace=True), SamplingOptions(subgraph="induced")):
        sampler = NeighborSampler(indptr, indices, [5], options=options)
        with pytest.raises(SourceError, match="node 1 the edges 2 to 1 of 4"):
            sampler.sample(np.array([3, 1]))
        with pytest.raises(SourceError, match=r"indices\[2\] is 9, no node of 4"):
            sampler.sample(np.array([2]))
    with pytest.raises(SourceError, match="node 1 the edges 2 to 1 of 4"):
        NeighborSampler(indptr, indices, [5], options=SamplingOptions(edge_times=np.arange(4)))
    with pytest.raises(SourceError, match=r"indices\[2\] is 9"):
        NeighborSampler(
            np.array([0, 2, 2, 4, 4]), indices, [5], options=SamplingOptions(node_times=np.arange(4))
        )
