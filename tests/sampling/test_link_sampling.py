"""Mini-batches around links: held against PyG's own way to their names and layout, and against what was
asked."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore.errors import ArgumentError, IdError, SourceError
from featstore.sampling.links import LinkSampler, LinkSubgraph, Negatives
from featstore.sampling.neighbors import NeighborSampler
from featstore.sampling.options import SamplingOptions
from featstore.sampling.typed import TypedNeighborSampler

COUNTS = {"user": 25, "item": 40}
BUYS, REV, LINK = ("user", "buys", "item"), ("item", "rev_buys", "user"), ("user", "likes", "item")


def relation(rng: np.random.Generator, targets: int, sources: int, edges: int = 150) -> tuple[Any, Any]:
    col = np.sort(rng.integers(0, targets, edges))
    indptr = np.searchsorted(col, np.arange(targets + 1)).astype(np.int64)
    return indptr, rng.integers(0, sources, edges).astype(np.int32)


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    typed = draw(st.booleans())
    options: dict[str, Any] = {}
    kind = draw(st.sampled_from(["plain", "disjoint", "timed"]))
    if kind == "disjoint":
        options["disjoint"] = True
    if kind == "timed":
        times = {name: np.append(0, rng.integers(0, 30, count - 1)) for name, count in COUNTS.items()}
        options["node_times"] = times if typed else times["item"]
    given = SamplingOptions(**options)
    if typed:
        graphs = {BUYS: relation(rng, 40, 25), REV: relation(rng, 25, 40)}
        sampler: Any = TypedNeighborSampler(graphs, COUNTS, [2, 2], 3, options=given)
    else:
        sampler = NeighborSampler(*relation(rng, 40, 40), [2, 2], 3, options=given)
    mode = draw(st.sampled_from([None, "binary", "triplet"]))
    amount = draw(st.sampled_from([1, 2] if mode == "triplet" else [1, 2, 0.5, 1.5]))
    links = np.stack([rng.integers(0, 25, 7), rng.integers(0, 40, 7)])
    return {
        "typed": typed, "sampler": sampler, "links": links,
        "negatives": None if mode is None else Negatives(mode, amount),
        "times": rng.integers(0, 30, 7) if kind == "timed" else None,
        "labels": rng.integers(1, 4, 7) if mode != "triplet" and draw(st.booleans()) else None,
    }  # fmt: skip


def sampled(case: dict[str, Any], batch_index: int = 0) -> LinkSubgraph:
    link_type = LINK if case["typed"] else None
    sampler = LinkSampler(case["sampler"], link_type=link_type, negatives=case["negatives"])
    return sampler.sample(
        case["links"], batch_index, labels=case["labels"], times=case["times"], input_id=np.arange(7) + 100
    )


def by_end(found: Any, case: dict[str, Any]) -> list[Any]:
    """What is by type, of sources and of targets."""
    return [found["user"], found["item"]] if case["typed"] else [found, found]


@settings(max_examples=35)
@given(case=cases(), batch_index=st.integers(0, 9))
def test_both_ends_are_what_was_asked(case: dict[str, Any], batch_index: int) -> None:
    found = sampled(case, batch_index)
    nodes = by_end(found.subgraph.node, case)
    assert found.input_id.tolist() == list(range(100, 107))
    negatives = case["negatives"]
    added = 0 if negatives is None else math.ceil(7 * negatives.amount)
    if negatives is not None and negatives.mode == "triplet":
        assert found.src_index is not None
        assert found.dst_pos_index is not None
        assert found.dst_neg_index is not None
        np.testing.assert_array_equal(nodes[0][found.src_index], case["links"][0])
        np.testing.assert_array_equal(nodes[1][found.dst_pos_index], case["links"][1])
        assert found.dst_neg_index.shape == ((7,) if added == 7 else (7, added // 7))
        drawn = [nodes[1][found.dst_neg_index].reshape(7, -1)]
        assert found.edge_label_index is None
        assert found.edge_label is None
        positives = np.arange(7)[:, None].repeat(drawn[0].shape[1], 1)
    else:
        assert found.edge_label_index is not None
        assert found.edge_label_index.shape == (2, 7 + added)
        ends = [one[places] for one, places in zip(nodes, found.edge_label_index)]
        np.testing.assert_array_equal(np.stack(ends)[:, :7], case["links"])
        drawn, positives = [one[7:] for one in ends], np.arange(added) % 7
        if case["labels"] is not None or added:
            assert found.edge_label is not None
            first = np.ones(7) if case["labels"] is None else case["labels"]
            assert found.edge_label.tolist() == [*first, *[0] * added]
        else:
            assert found.edge_label is None
        assert found.src_index is None
    if case["times"] is not None:
        times = by_end(case["sampler"].options.node_times, case)
        for nodes_drawn, known in zip(drawn, times[-len(drawn) :]):
            assert (known[nodes_drawn] <= case["times"][positives]).all(), "a negative is later than its link"
        count = [7 if negatives is not None and negatives.mode == "triplet" else 7 + added, 7 + added]
        seeds = count if case["typed"] else [sum(count)] * 2
        for batch, one, known, first in zip(by_end(found.batch, case), nodes, times, seeds):
            assert (known[one] <= case["times"][batch])[first:].all(), "a neighbour is later than its link"
    if case["sampler"].options.has_trees:
        for batch in by_end(found.batch, case):
            assert ((batch >= 0) & (batch < 7)).all()
    else:
        assert found.batch is None


@settings(max_examples=25)
@given(case=cases())
def test_layout_is_that_of_pygs_edge_sample(case: dict[str, Any]) -> None:
    """PyG's own code around its sampler, with our sampler and our negatives in place of its."""
    pytest.importorskip("torch_geometric")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import torch
        from torch_geometric.sampler import (
            EdgeSamplerInput,
            HeteroSamplerOutput,
            NegativeSampling,
            SamplerOutput,
        )
        from torch_geometric.sampler.neighbor_sampler import edge_sample

    ours, negatives, sampler = sampled(case), case["negatives"], case["sampler"]
    nodes = by_end(ours.subgraph.node, case)
    queue: list[Any] = []
    theirs = None
    if negatives is not None:
        theirs = NegativeSampling(negatives.mode, negatives.amount)
        if negatives.mode == "binary":
            assert ours.edge_label_index is not None
            queue += [one[places[7:]] for one, places in zip(nodes, ours.edge_label_index)]
        else:
            assert ours.dst_neg_index is not None
            places = ours.dst_neg_index.reshape(7, -1)
            queue.append(nodes[1][(places.T if sampler.options.has_trees else places).reshape(-1)])
        theirs.sample = lambda count, endpoint, num_nodes=None: torch.from_numpy(queue.pop(0))

    def sample_fn(seeds: Any, times: Any) -> Any:
        if not case["typed"]:
            found = sampler.sample(seeds.numpy(), 0, seed_times=None if times is None else times.numpy())
            batch = None if found.batch is None else torch.from_numpy(found.batch)
            return SamplerOutput(
                *(torch.from_numpy(one) for one in (found.node, found.row, found.col)), None, batch
            )
        seeds = {name: one.numpy() for name, one in seeds.items()}
        when = None if times is None else {name: one.numpy() for name, one in times.items()}
        found = sampler.sample_types(seeds, 0, seed_times=when)
        batch = None if found.batch is None else {k: torch.from_numpy(v) for k, v in found.batch.items()}
        return HeteroSamplerOutput(
            {k: torch.from_numpy(v) for k, v in found.node.items()}, found.row, found.col, None, batch
        )

    def tensor(array: Any) -> Any:
        return None if array is None else torch.from_numpy(np.asarray(array))

    inputs = EdgeSamplerInput(
        tensor(np.arange(7) + 100), *map(tensor, case["links"]), tensor(case["labels"]),
        tensor(case["times"]), LINK if case["typed"] else None,
    )  # fmt: skip
    counts = COUNTS if case["typed"] else 40
    out = edge_sample(inputs, sample_fn, counts, sampler.options.has_trees, None, theirs)
    wanted = ["input_id", "edge_label_index", "edge_label", "edge_label_time"]
    if negatives is not None and negatives.mode == "triplet":
        wanted = ["input_id", "src_index", "dst_pos_index", "dst_neg_index", "seed_time"]
    for name, value in zip(wanted, out.metadata, strict=True):
        mine = getattr(ours, name)
        assert (mine is None) == (value is None), name
        if value is not None:
            assert mine.tolist() == value.tolist(), name
            assert mine.dtype == value.numpy().dtype, name
    for batch, theirs_of, one in zip(
        *(by_end(x, case) if x is not None else [None, None] for x in (ours.batch, out.batch, out.node)),
    ):
        # of negatives that are no multiple of the positives, PyG numbers targets by others' positives
        alike = negatives is None or np.ceil(7 * negatives.amount) % 7 == 0
        assert batch is None or not alike or batch.tolist() == theirs_of.tolist()
        assert one is not None
    for one, other in zip(nodes, by_end(out.node, case)):
        assert one.tolist() == other.tolist()


def test_negatives_follow_weights_and_nothing_else() -> None:
    rng = np.random.default_rng(1)
    graph = relation(rng, 8, 8, 20)
    weight = np.array([0.0, 1, 2, 0, 4, 1, 0, 8])
    sampler = LinkSampler(NeighborSampler(*graph, [1]), negatives=Negatives("triplet", 10, dst_weight=weight))
    links = np.stack([rng.integers(0, 8, 800), rng.integers(0, 8, 800)])
    found = sampler.sample(links, 3)
    assert found.dst_neg_index is not None
    drawn = np.bincount(found.subgraph.node[found.dst_neg_index].reshape(-1), minlength=8)
    expected = 8000 * weight / weight.sum()
    some = expected > 0
    assert not drawn[~some].any()
    assert ((drawn - expected)[some] ** 2 / expected[some]).sum() < 18.5, "4 degrees of freedom, 1 in 1000"
    again = sampler.sample(links, 3)
    np.testing.assert_array_equal(again.dst_neg_index, found.dst_neg_index)
    other = sampler.sample(links, 4).dst_neg_index
    assert not np.array_equal(other, found.dst_neg_index)
    uniform = LinkSampler(NeighborSampler(*graph, [1]), negatives=Negatives("binary", 10)).sample(links)
    assert uniform.edge_label_index is not None
    for places in uniform.edge_label_index[:, 800:]:
        counts = np.bincount(uniform.subgraph.node[places], minlength=8)
        assert ((counts - 1000.0) ** 2 / 1000).sum() < 24.4, "7 degrees of freedom, 1 in 1000"


def test_links_that_cannot_be() -> None:
    graph = relation(np.random.default_rng(1), 8, 8, 20)
    plain = NeighborSampler(*graph, [1])
    typed = TypedNeighborSampler({("a", "b", "a"): graph}, {"a": 8}, [1])
    timed = NeighborSampler(*graph, [1], options=SamplingOptions(node_times=np.arange(8) + 5))
    binary = Negatives()
    for make, error, words in (
        (lambda: LinkSampler(3), ArgumentError, "sampler must be"),
        (lambda: LinkSampler(plain, link_type=("a", "b", "a")), ArgumentError, "link_type= is of graphs"),
        (lambda: LinkSampler(typed), ArgumentError, "needed there"),
        (lambda: LinkSampler(typed, link_type=("a", "b", "c")), ArgumentError, "of the types 'a'"),
        (lambda: LinkSampler(plain, negatives="binary"), ArgumentError, "negatives must be"),
        (lambda: Negatives("triplets"), ArgumentError, "mode must be one of"),
        (lambda: Negatives("triplet", 1.5), ArgumentError, "whole number"),
        (lambda: Negatives(amount=0), ArgumentError, "amount"),
        (lambda: Negatives("triplet", src_weight=np.ones(8)), ArgumentError, "no effect"),
        (
            lambda: LinkSampler(plain, negatives=Negatives(dst_weight=np.ones(3))), ArgumentError,
            "dst_weight must be a number for each of 8",
        ),
        (lambda: LinkSampler(plain, negatives=Negatives(src_weight=np.zeros(8))), ArgumentError, "all 0"),
        (lambda: LinkSampler(plain).sample([1, 2]), IdError, r"\[2, b\]"),
        (lambda: LinkSampler(plain).sample([[1], [8]]), IdError, "target 8 is no node: there are 8"),
        (lambda: LinkSampler(plain).sample([[1], [2]], times=[3]), ArgumentError, "times= of the links"),
        (lambda: LinkSampler(timed).sample([[1], [2]]), ArgumentError, "times= of the links"),
        (
            lambda: LinkSampler(plain, negatives=binary).sample([[1], [2]], labels=[0]), ArgumentError,
            "labels are to be 1 and more",
        ),
        (lambda: LinkSampler(plain).sample([[1], [2]], labels=[1, 2]), ArgumentError, "each of 1 links"),
        (
            lambda: LinkSampler(plain, negatives=Negatives("triplet")).sample([[1], [2]], labels=[1]),
            ArgumentError, "not of triplets",
        ),
        (
            lambda: LinkSampler(timed, negatives=binary).sample([[1, 2], [1, 2]], times=[9, 4]), SourceError,
            "link 1 of the mini-batch has no node that is early enough",
        ),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            make()  # type: ignore[no-untyped-call]
