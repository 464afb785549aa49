"""The sampler of graphs with types against the plain Python twin, and the layout that PyG says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_twin import Graph, batch_key_twin, reverse_twin, sample_twin

from featstore.errors import ArgumentError, IdError, SourceError
from featstore.sampling.neighbors import NeighborSampler
from featstore.sampling.options import SamplingOptions
from featstore.sampling.reverse import reverses
from featstore.sampling.typed import TypedNeighborSampler

NODES = {"paper": 30, "author": 20, "venue": 4}
RELATIONS = [
    ("author", "writes", "paper"), ("paper", "rev_writes", "author"), ("paper", "cites", "paper"),
    ("venue", "has", "paper"), ("paper", "in", "venue"),
]  # fmt: skip


def random_relation(rng: np.random.Generator, edge_type: Any, edges: int) -> tuple[Any, Any]:
    source, _, target = edge_type
    targets = np.sort((rng.random(edges) ** 2 * NODES[target]).astype(np.int64))
    indptr = np.searchsorted(targets, np.arange(NODES[target] + 1)).astype(np.int64)
    return indptr, rng.integers(0, NODES[source], edges).astype(np.int32)


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    graphs = {one: random_relation(rng, one, draw(st.integers(0, 80))) for one in RELATIONS}
    hops = draw(st.integers(1, 3))
    each = st.lists(st.sampled_from([-1, 0, 1, 3]), min_size=hops, max_size=hops)
    case: dict[str, Any] = {"graphs": graphs, "fanouts": {one: draw(each) for one in RELATIONS}}
    options: dict[str, Any] = {"replace": draw(st.booleans())}
    options["subgraph"] = draw(st.sampled_from(["directional", "bidirectional", "induced"]))
    some = [one for one in RELATIONS if draw(st.booleans())]
    if draw(st.booleans()):
        options["weights"] = {
            one: rng.random(len(graphs[one][1])) * (rng.random(len(graphs[one][1])) < 0.7) for one in some
        }
    timed = draw(st.sampled_from(["", "edge_times", "node_times"]))
    if timed == "edge_times":
        options["edge_times"] = {one: rng.integers(0, 20, len(graphs[one][1])) for one in some}
    if timed == "node_times":
        options["node_times"] = {name: rng.integers(0, 20, NODES[name]) for name in ("paper", "author")}
    if timed:
        options["temporal"] = draw(st.sampled_from(["uniform", "last"]))
        options["window"] = draw(st.sampled_from([None, 6]))
    else:
        options["disjoint"] = draw(st.booleans())
    trees = bool(timed) or options.get("disjoint", False)
    types = draw(st.lists(st.sampled_from(list(NODES)), min_size=1, max_size=2, unique=True))
    case["seeds"] = {
        name: rng.integers(0, NODES[name], 4) if trees else rng.permutation(NODES[name])[:4] for name in types
    }
    case["seed_times"] = {name: rng.integers(-1, 22, 4) for name in types} if timed else None
    return case | {"options": options}


def sampler_of(case: dict[str, Any]) -> TypedNeighborSampler:
    numbers = {one: np.arange(len(graph[1])) + 7 for one, graph in case["graphs"].items()}
    return TypedNeighborSampler(
        case["graphs"],
        NODES,
        case["fanouts"],
        5,
        options=SamplingOptions(**case["options"]),
        edge_ids=numbers,
    )


@settings(max_examples=35)
@given(case=cases(), batch_index=st.integers(0, 5), epoch=st.integers(0, 5))
def test_every_option_equals_the_twin(case: dict[str, Any], batch_index: int, epoch: int) -> None:
    batch = sampler_of(case).sample_types(
        case["seeds"], batch_index, epoch=epoch, seed_times=case["seed_times"]
    )
    options = SamplingOptions(**case["options"])
    graphs = []
    for one, (indptr, indices) in case["graphs"].items():
        times = (options.edge_times or {}).get(one)
        if options.node_times is not None and one[0] in options.node_times:
            times = options.node_times[one[0]][indices]
        weights = (options.weights or {}).get(one)
        graphs.append(
            Graph(one[0], one[2], indptr, indices, case["fanouts"][one], "__".join(one), weights, times)
        )
    spans = None
    if options.timed:
        window = math.inf if options.window is None else options.window
        lasts = np.concatenate([case["seed_times"][name] for name in case["seeds"]]).tolist()
        spans = [(last - window, last) for last in lasts]
    made = sample_twin(
        list(NODES), graphs, case["seeds"], batch_key_twin(5, epoch, batch_index), replace=options.replace,
        trees=options.has_trees, last=options.temporal == "last", induced=options.subgraph == "induced",
        spans=spans,
    )  # fmt: skip
    for name in NODES:
        assert batch.node[name].tolist() == made.node[name]
        assert batch.num_sampled_nodes[name] == tuple(made.found[name])
        if options.has_trees:
            assert batch.batch is not None
            assert batch.batch[name].tolist() == made.tree[name]
    assert options.has_trees or batch.batch is None
    back = reverses(RELATIONS) if options.subgraph == "bidirectional" else {}
    for number, one in enumerate(RELATIONS):
        edges = made.edges[number]
        if back:
            other = None if back[one] == one else made.edges[RELATIONS.index(back[one])]
            edges = reverse_twin(edges, other)
        found = list(zip(batch.row[one].tolist(), batch.col[one].tolist(), batch.edge_id[one].tolist()))
        assert found == edges
        directional = options.subgraph == "directional"
        assert batch.num_sampled_edges[one] == (tuple(made.per_hop[number]) if directional else ())
        assert batch.e_id is not None
        ids = batch.edge_id[one]
        np.testing.assert_array_equal(batch.e_id[one], np.where(ids < 0, -1, ids + 7))


def test_layout_is_that_of_pygs_sampler() -> None:
    """What PyG's documentation and the code of its compiled sampler say, on a graph small enough to see."""
    graphs = {
        ("a", "to", "p"): (np.array([0, 2, 3, 3]), np.array([4, 1, 4], np.int32)),
        ("p", "to", "p"): (np.array([0, 1, 3, 3]), np.array([2, 0, 2], np.int32)),
    }
    sampler = TypedNeighborSampler(graphs, {"p": 3, "a": 5}, [-1, -1])
    batch = sampler.sample("p", np.array([1, 0]))
    assert {name: ids.tolist() for name, ids in batch.node.items()} == {"p": [1, 0, 2], "a": [4, 1]}
    assert batch.num_sampled_nodes == {"p": (2, 1, 0), "a": (0, 2, 0)}
    first, second = graphs
    assert batch.row[first].tolist() == [0, 0, 1]
    assert batch.col[first].tolist() == [0, 1, 1]
    assert batch.row[second].tolist() == [1, 2, 2]
    assert batch.col[second].tolist() == [0, 0, 1]
    assert batch.num_sampled_edges == {first: (3, 0), second: (3, 0)}
    assert batch.e_id is None
    assert batch.batch is None


def test_draws_follow_from_the_relations_name_alone() -> None:
    rng = np.random.default_rng(3)
    graphs = {one: random_relation(rng, one, 200) for one in RELATIONS}
    seeds = np.arange(8)
    whole = TypedNeighborSampler(graphs, NODES, [2], 1).sample("paper", seeds, 3)
    for some in (RELATIONS[::-1], RELATIONS[2:4]):
        part = TypedNeighborSampler({one: graphs[one] for one in some}, NODES, [2], 1).sample(
            "paper", seeds, 3
        )
        for one in some:
            np.testing.assert_array_equal(part.edge_id[one], whole.edge_id[one])
    names = [("paper", name, "paper") for name in ("cites", "likes")]
    both = TypedNeighborSampler(dict.fromkeys(names, graphs[RELATIONS[2]]), NODES, [2], 1).sample(
        "paper", seeds, 3
    )
    assert both.edge_id[names[0]].tolist() != both.edge_id[names[1]].tolist()


def test_one_relation_is_an_untyped_graph_in_all_but_its_draws() -> None:
    rng = np.random.default_rng(4)
    graph = random_relation(rng, RELATIONS[2], 90)
    typed = TypedNeighborSampler({RELATIONS[2]: graph}, NODES, [-1, -1]).sample("paper", np.arange(5))
    plain = NeighborSampler(*graph, [-1, -1]).sample(np.arange(5))
    np.testing.assert_array_equal(typed.node["paper"], plain.node)
    np.testing.assert_array_equal(typed.edge_id[RELATIONS[2]], plain.edge_id)
    np.testing.assert_array_equal(typed.row[RELATIONS[2]], plain.row)
    assert typed.num_sampled_edges[RELATIONS[2]] == plain.num_sampled_edges


GRAPHS = {one: random_relation(np.random.default_rng(1), one, 50) for one in RELATIONS}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"graphs": {}}, ArgumentError, "at least one"),
        ({"graphs": {("a", "b"): GRAPHS[RELATIONS[0]]}}, ArgumentError, "source type, name, target type"),
        ({"graphs": {("x", "y", "paper"): GRAPHS[RELATIONS[0]]}}, ArgumentError, "'x'"),
        ({"graphs": {RELATIONS[1]: GRAPHS[RELATIONS[0]]}}, SourceError, "30 nodes, and there are 20"),
        ({"graphs": {RELATIONS[1]: 3}}, ArgumentError, "must be \\(indptr, indices\\)"),
        ({"nodes": {"paper": -1}}, ArgumentError, "each of nodes"),
        ({"fanouts": {RELATIONS[0]: [2]}}, ArgumentError, "fanouts has nothing for.*rev_writes"),
        ({"fanouts": {key: [2] for key in RELATIONS} | {RELATIONS[0]: [2, 1]}}, ArgumentError, "many hops"),
        ({"fanouts": {("a", "b", "c"): [2]}}, ArgumentError, "fanouts: the graph has no relation"),
        ({"fanouts": []}, ArgumentError, "one number per hop"),
        ({"fanouts": [-2]}, ArgumentError, "at least 1, or -1 for all neighbours"),
        ({"fanouts": [0, 2]}, ArgumentError, "at least 1, or -1 for all neighbours"),
        ({"edge_ids": {RELATIONS[0]: np.arange(3)}}, SourceError, "a number for each of 50"),
        ({"edge_ids": {"x": np.arange(3)}}, ArgumentError, "edge_ids: the graph has no 'x'"),
        ({"options": SamplingOptions(weights=np.ones(50))}, ArgumentError, "weights must be a mapping by"),
        ({"options": SamplingOptions(subgraph="bidirectional")}, SourceError, "a relation that leads back"),
    ],
)
def test_what_cannot_be(change: dict[str, Any], error: type[Exception], words: str) -> None:
    given: dict[str, Any] = {"graphs": GRAPHS, "nodes": NODES, "fanouts": [2]} | change
    if "leads back" in words:
        given["graphs"] = {RELATIONS[0]: GRAPHS[RELATIONS[0]]}
    with pytest.raises(error, match=words):
        TypedNeighborSampler(**given)


def test_seeds_that_cannot_be() -> None:
    sampler = TypedNeighborSampler(GRAPHS, NODES, [2])
    with pytest.raises(ArgumentError, match=r"no type 'papr'.*did you mean 'paper'"):
        sampler.sample("papr", [1])
    with pytest.raises(IdError, match="seed 20 is no node"):
        sampler.sample("author", [20])
    with pytest.raises(IdError, match="seed 3 stands twice"):
        sampler.sample("author", [3, 3])
    times = {"paper": np.zeros(30, int)}
    timed = TypedNeighborSampler(GRAPHS, NODES, [2], options=SamplingOptions(node_times=times))
    with pytest.raises(ArgumentError, match="seed_times= is needed: seeds of 'author'"):
        timed.sample("author", [3])
    assert len(timed.sample("paper", [3]).node["paper"])
