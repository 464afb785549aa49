"""What samplers can be told, where topology is split, too: mini-batches are those of the whole topology, with
the same options, edge by edge, with the numbers of these; and what owners cannot draw by is refused.

Hosts are threads, as in ``test_split_topology.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_split_topology import each, graph_of, hosts, split

import featstore
from featstore.errors import ArgumentError, BudgetError, FormatError, PeerError, SourceError
from featstore.hosts.lists import OwnLists
from featstore.hosts.questions import ListsAnswer, OfNodes, Question
from featstore.hosts.sampler import HostsSampler
from featstore.hosts.typed_sampler import TypedHostsSampler
from featstore.sampling.options import KEPT, SamplingOptions
from featstore.sampling.stored import StoredSampler
from featstore.sampling.typed_stored import TypedStoredSampler

WRITES, CITES, IN = ("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "in", "venue")
NODES = {"paper": 120, "author": 60, "venue": 9}


def values(rng: np.random.Generator, edges: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights, some of them zero, and times, many of them alike."""
    weights = rng.random(edges).astype(np.float32) * (rng.random(edges) < 0.8)
    return weights, rng.integers(-20, 20, edges)


def packed(place: Path, pack: Any, nodes: int, seed: int, **more: Any) -> featstore.Store:
    rng = np.random.default_rng(seed)
    graph = graph_of(nodes, 6, seed)
    weights, times = values(rng, len(graph[1]))
    given: dict[str, Any] = {
        "graph": graph, "edge_ids": True, "edge_weights": weights, "edge_times": times, "order": "ldg",
        "partitions": 8, "arrays": {"train": np.arange(0, nodes, 2)},
    }  # fmt: skip
    features = rng.standard_normal((nodes, 3), np.float32)
    made: featstore.Store = pack(place, features, **given | more)
    return made


def packed_types(place: Path, pack: Any, seed: int) -> featstore.Store:
    """Of two relations there are weights and times, of one neither; edges of two have numbers."""
    rng = np.random.default_rng(seed)
    edges = {
        of: np.stack([rng.integers(0, NODES[end], count) for end in (of[0], of[2])])
        for of, count in {WRITES: 400, CITES: 700, IN: 150}.items()
    }
    known = {of: values(rng, edges[of].shape[1]) for of in (WRITES, IN)}
    made: featstore.Store = pack(
        place, {name: rng.random((rows, 2), np.float32) for name, rows in NODES.items()}, graph=edges,
        edge_ids=True, edge_weights={of: one[0] for of, one in known.items()},
        edge_times={of: one[1] for of, one in known.items()}, order="given",
    )  # fmt: skip
    return made


def same(one: Any, two: Any) -> None:
    for name in ("node", "row", "col", "edge_id", "e_id", "batch"):
        mine, its = getattr(one, name), getattr(two, name)
        if isinstance(mine, dict):
            assert mine.keys() == its.keys(), name
            for of in mine:
                np.testing.assert_array_equal(mine[of], its[of], f"{name} {of}")
        else:
            np.testing.assert_array_equal(mine, its, name)
    assert one.num_sampled_nodes == two.num_sampled_nodes
    assert one.num_sampled_edges == two.num_sampled_edges


@st.composite
def options(draw: Any, weighted: Any = KEPT, timed: Any = KEPT) -> SamplingOptions:
    said: dict[str, Any] = {
        "replace": draw(st.booleans()), "disjoint": draw(st.booleans()),
        "subgraph": draw(st.sampled_from(["directional", "directional", "bidirectional"])),
        "weights": draw(st.sampled_from([None, weighted])),
    }  # fmt: skip
    if draw(st.booleans()):
        said |= {
            "edge_times": timed, "temporal": draw(st.sampled_from(["uniform", "last"])),
            "window": draw(st.sampled_from([None, 0, 15])),
        }  # fmt: skip
    return SamplingOptions(**said)


def times_of(said: SamplingOptions, seeds: np.ndarray) -> dict[str, Any]:
    return {"seed_times": (seeds * 7) % 30 - 10} if said.timed else {}


FANOUT = st.sampled_from([1, 3, -1])
MANY = settings(max_examples=12)


@MANY
@given(
    seed=st.integers(0, 2**20), count=st.integers(1, 3), said=options(), numbered=st.booleans(),
    body_bytes=st.sampled_from([512, 1 << 16]), nodes=st.integers(20, 120), held=st.booleans(),
    fanouts=st.lists(FANOUT, min_size=1, max_size=2), at_once=st.sampled_from([3, 1 << 13]),
)  # fmt: skip
def test_mini_batches_are_those_of_the_whole_topology(
    tmp_path_factory: pytest.TempPathFactory, pack: Any, seed: int, count: int, said: SamplingOptions,
    numbered: bool, body_bytes: int, nodes: int, held: bool, fanouts: list[int], at_once: int,
) -> None:  # fmt: skip
    """Whatever fits a message, from memory or from disk, for however many nodes at once."""
    place = tmp_path_factory.mktemp("any")
    with packed(place / "s", pack, nodes, seed) as store:
        split(store, count, place / "parts")
        for name in ("topology", *(f"host-{host}" for host in range(count))):
            assert featstore.verify(place / "parts" / name).ok
        asked: dict[str, Any] = {"seed": seed, "options": said, "edge_ids": numbered}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("featstore.hosts.lists._DRAW_EDGES", at_once)
            if not held:
                patch.setattr(OwnLists, "fill", lambda *_: 0)
            with (
                hosts(place / "parts", count, body_bytes=body_bytes) as (stores, _),
                StoredSampler(store, fanouts, memory="16MiB", **asked) as whole,
            ):

                def check(here: featstore.SplitStore) -> int:
                    rng = np.random.default_rng([seed, here.place.host])
                    with HostsSampler(here, fanouts, memory="8MiB", **asked) as sampler:
                        for index in range(3):
                            seeds = rng.permutation(nodes)[: 1 + 6 * index]
                            times = times_of(said, seeds)
                            mine = sampler.sample(seeds, index, epoch=2, **times)
                            same(mine, whole.sample(seeds, index, epoch=2, **times))
                            assert (mine.e_id is not None) == numbered
                    return 1

                assert each(stores, check) == [1] * count


@MANY
@given(
    seed=st.integers(0, 2**20), count=st.integers(1, 2), body_bytes=st.sampled_from([512, 1 << 16]),
    said=options({WRITES: KEPT, IN: KEPT}, {IN: KEPT}), fanouts=st.lists(FANOUT, min_size=1, max_size=2),
)  # fmt: skip
def test_so_are_those_over_edge_types(
    tmp_path_factory: pytest.TempPathFactory, pack: Any, seed: int, count: int, body_bytes: int,
    said: SamplingOptions, fanouts: list[int],
) -> None:  # fmt: skip
    if said.subgraph == "bidirectional":  # relations have none that lead back
        said = SamplingOptions(replace=said.replace, weights=said.weights, disjoint=True)
    place = tmp_path_factory.mktemp("any")
    with packed_types(place / "s", pack, seed) as store:
        split(store, count, place / "parts")
        asked: dict[str, Any] = {"seed": seed, "options": said}
        with (
            hosts(place / "parts", count, body_bytes=body_bytes) as (stores, _),
            TypedStoredSampler(store, "paper", fanouts, memory="32MiB", **asked) as whole,
        ):

            def check(here: featstore.SplitStore) -> int:
                with TypedHostsSampler(here, "paper", fanouts, memory="16MiB", **asked) as sampler:
                    seeds = np.arange(here.place.host, 120, 5)
                    times = times_of(said, seeds)
                    same(sampler.sample(seeds, 1, **times), whole.sample(seeds, 1, **times))
                return 1

            assert each(stores, check) == [1] * count


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Path:
    made = tmp_path_factory.mktemp("options-over-hosts")
    features = {
        "features": np.random.default_rng(1).random((200, 3), np.float32),
        "edge_features": np.arange(2 * len(graph_of(200, 6, 3)[1]), dtype=np.int16).reshape(-1, 2),
    }
    rng = np.random.default_rng(3)
    graph = graph_of(200, 6, 3)
    weights, times = values(rng, len(graph[1]))
    arrays = {"train": np.arange(0, 200, 2), "born": np.arange(200), "of_edges": np.arange(len(graph[1]))}
    known: dict[str, Any] = {"edge_ids": True, "edge_weights": weights, "edge_times": times, "arrays": arrays}
    with pack(made / "s", features, graph={"features": graph}, order="ldg", partitions=8, **known) as store:
        split(store, 2, made / "parts", train="train")
        split(store, 2, made / "whole", train="train", split_topology=False)
    return made


LOADED = [
    {"replace": True},
    {"weight_attr": "weights", "disjoint": True},
    {"weight_attr": "weights", "subgraph_type": "bidirectional"},
    {"time_attr": "times", "temporal_strategy": "last", "input_time": np.arange(0, 200, 2) % 30 - 15},
]


@pytest.mark.parametrize("said", LOADED, ids=lambda one: "-".join(one))
def test_loaders_give_what_they_give_over_the_whole_topology(folder: Path, said: dict[str, Any]) -> None:
    """With rows of edges, by the edges' numbers, too."""

    def epoch(here: featstore.SplitStore) -> list[Any]:
        options: dict[str, Any] = {"memory": "24MiB", "edge_table": "edge_features", **said}
        options |= {"rank": here.place.host, "world_size": 2}
        with here.loader(seeds="train", fanouts=(3, 2), batch_size=16, **options) as loader:
            return [
                {
                    name: np.array(getattr(batch, name))
                    for name in ("n_id", "e_id", "x", "edge_attr", "edge_index")
                }
                for batch in loader
            ]

    found = {}
    for name in ("whole", "parts"):
        with hosts(folder / name, 2, memory="24MiB") as (stores, _):
            found[name] = each(stores, epoch)
    for whole, mine in zip(found["whole"], found["parts"], strict=True):
        assert not isinstance(mine, Exception), mine
        assert len(whole) == len(mine) > 2
        for one, two in zip(whole, mine, strict=True):
            for name in one:
                np.testing.assert_array_equal(one[name], two[name], name)
            np.testing.assert_array_equal(one["edge_attr"][:, 1], 2 * one["e_id"] + 1)


def test_what_owners_cannot_draw_by_is_refused(folder: Path) -> None:
    given: dict[str, Any] = {"seeds": "train", "fanouts": (2,), "memory": "24MiB", "rank": 0, "world_size": 2}
    with hosts(folder / "parts", 2) as (stores, _):
        for said, why in (
            ({"subgraph_type": "induced"}, "'induced' looks at whole lists"),
            ({"time_attr": "born"}, "times of nodes are those of neighbours, whom others own"),
            ({"weight_attr": "of_edges"}, "weight_attr='of_edges': where topology is split, owners draw by"),
        ):
            with pytest.raises(SourceError, match=why):
                stores[0].loader(**given, **said)
        with pytest.raises(ArgumentError, match="those that the graph keeps, KEPT, not"):
            HostsSampler(stores[0], (2,), memory="8MiB", options=SamplingOptions(weights=np.ones(9)))
        with (
            stores[0].sampler((2,), time_attr="times") as sampler,
            pytest.raises(ArgumentError, match="seed_times= is needed"),
        ):
            sampler.sample(np.arange(5))


def test_a_graph_without_them_says_so(tmp_path: Path, pack: Any) -> None:
    bare = {"edge_ids": None, "edge_weights": None, "edge_times": None}
    with packed(tmp_path / "s", pack, 60, 1, **bare) as store:
        split(store, 2, tmp_path / "parts")
    with hosts(tmp_path / "parts", 2) as (stores, _):
        for name, what in (("weights", "weights"), ("edge_times", "times")):
            said = SamplingOptions(**{name: KEPT})
            with pytest.raises(SourceError, match=f"has no {what}: pack it with edge_{what}="):
                HostsSampler(stores[0], (2,), memory="8MiB", options=said)
        with pytest.raises(SourceError, match="does not keep the numbers of its edges"):
            stores[0].sampler((2,), edge_ids=True)
        with stores[0].sampler((2,)) as sampler:
            assert sampler.sample(np.arange(5)).e_id is None


def test_a_question_that_does_not_fit_what_there_is_is_refused(tmp_path: Path, pack: Any) -> None:
    """Of whoever has another version of the lists: the error is the asker's."""
    with packed(tmp_path / "s", pack, 60, 1, edge_weights=None) as store:
        split(store, 2, tmp_path / "parts")
    with hosts(tmp_path / "parts", 2) as (stores, _):
        lists = stores[0].lists()[0]
        own = np.flatnonzero(stores[0].owners["features"].hosts == 0)[:3]
        from featstore.hosts.asks import AnswerPlace
        from featstore.hosts.questions import Draw

        question = Question(0, 2, np.uint64(1), 0, 6, Draw.WEIGHTS, OfNodes(own), 4)
        with pytest.raises(ArgumentError, match="keeps no WEIGHTS of its edges"):
            lists.serve(question.numbers(), AnswerPlace(4096, 512))
        with pytest.raises(ArgumentError, match="more than had been agreed"):
            lists.serve(question._replace(draw=Draw(0)).numbers(), AnswerPlace(64, 512))
        with pytest.raises(ArgumentError, match="of a graph that there is not"):
            lists.serve(question._replace(graph=1).numbers(), AnswerPlace(4096, 512))


def test_a_number_that_no_edge_has_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = OwnLists._read

    def wrong(lists: OwnLists, positions: Any, answer: ListsAnswer) -> Any:
        request = read(lists, positions, answer)
        request.result()
        answer.numbers[-1:] = 10**6
        return request

    monkeypatch.setattr(OwnLists, "_read", wrong)
    with (
        hosts(folder / "parts", 2) as (stores, _),
        stores[0].sampler((3,)) as sampler,
        pytest.raises(FormatError, match="an edge id of graph"),
    ):
        sampler.sample(np.arange(50))


def test_counts_that_cannot_be_are_refused(folder: Path) -> None:
    """An owner who says less of the first nodes than of those after them, or more than it sends."""
    from featstore.hosts import messages as ms

    for position, count in ((0, -1), (1, 10**6), (2, -2)):  # of fan-out -1; of 1: more than was asked for

        def lie(
            source: int, to: int, number: int, data: np.ndarray, position: int = position, count: int = count
        ) -> np.ndarray:
            if (source, to) == (1, 0) and int(data[8:16].view(np.int64)[0]) == ms.Kind.ROWS:
                body = data[ms.HEADER_BYTES :].copy()
                body[8 * position : 8 * position + 8].view(np.int64)[0] = count
                raw = ms.message(len(body))
                raw[ms.HEADER_BYTES :] = body
                ms.seal(raw, ms.Kind.ROWS, int(data[16:24].view(np.int64)[0]))
                return raw
            return data

        with (
            hosts(folder / "parts", 2, meddle=lie, timeout=0.5) as (stores, _),
            stores[0].sampler((-1,), disjoint=True) as sampler,
            pytest.raises(PeerError, match="that are not the neighbours of"),
        ):
            sampler.sample(np.arange(50))


@pytest.mark.parametrize("fanout", [1, -1])
def test_more_neighbours_than_were_asked_for_are_refused(folder: Path, fanout: int) -> None:
    """And a node that has others when the rest of its neighbours comes."""

    def drawn(lists: OwnLists, question: Question, rows: Any, head: Any, positions: Any, places: Any) -> int:
        filled = draw(lists, question, rows, head, positions, places)
        if fanout < 0 and question.skip and filled == len(positions):  # and there is more of it
            head.lengths[0] += 1
        if fanout > 0:
            head.lengths[head.lengths == 1] = 2
        return filled

    draw = OwnLists._draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OwnLists, "_draw", drawn)
        patch.setattr("featstore.hosts.neighbours.IDS_MAX", 16)
        error = "that are not the neighbours of" if fanout > 0 else "neighbours of graph 'features', and then"
        with (
            hosts(folder / "parts", 2, timeout=0.5, body_bytes=128) as (stores, _),
            stores[0].sampler((fanout,), disjoint=True) as sampler,
            pytest.raises((PeerError, FormatError), match=error),
        ):
            sampler.sample(np.arange(200))


@pytest.mark.parametrize("count", [1, 2])
def test_the_longest_list_has_to_fit_the_memory(tmp_path: Path, pack: Any, count: int) -> None:
    """A node with all edges, which are looked at for each draw by weights; whoever draws otherwise needs no
    memory for that. What the error says is enough; where another host has too little, it says so."""
    edges = 300_000
    indptr = np.concatenate([[0], np.full(50, edges)]).astype(np.int64)
    graph = indptr, np.random.default_rng(1).integers(0, 50, edges).astype(np.int32)
    weights = np.random.default_rng(2).random(edges)
    with packed(
        tmp_path / "s", pack, 50, 1, graph=graph, edge_ids=None, edge_weights=weights, edge_times=None
    ) as store:
        split(store, count, tmp_path / "parts")
        found = []
        for said in ({}, {"weight_attr": "weights"}):
            with store.sampler((5,), memory="64MiB", **said) as sampler:
                found.append(sampler.sample(np.arange(3)))
    with hosts(tmp_path / "parts", count, memory="36MiB") as (stores, _):
        owner = stores[0].owners["features"].hosts[0]  # of the node with all edges
        for one in stores:
            with one.sampler((5,)) as sampler:
                same(sampler.sample(np.arange(3)), found[0])
        with pytest.raises(BudgetError, match=r"longest list of a node of graph .* \(memory= of") as small:
            stores[owner].sampler((5,), weight_attr="weights")
        if count > 1:
            with (
                stores[1 - owner].sampler((5,), weight_attr="weights") as sampler,
                pytest.raises(BudgetError, match="longest list of a node") as there,
            ):
                sampler.sample(np.arange(3))
            assert there.value.needed_bytes == small.value.needed_bytes
    with hosts(tmp_path / "parts", count, memory=str(small.value.needed_bytes)) as (stores, _):
        for one in stores:
            with one.sampler((5,), weight_attr="weights") as sampler:
                same(sampler.sample(np.arange(3)), found[1])
            assert sum(one.memory().values()) <= small.value.needed_bytes
