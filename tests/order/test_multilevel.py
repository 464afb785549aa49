"""The multilevel partitioner: clusters, contraction and merging against plain twins, then the whole."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from order_support import Csc, Draws, csc, cut_into, graphs, ranges

from featstore.errors import BudgetError, SourceError
from featstore.order import coarsen, edge_cut, ldg_partition, metis_partition, multilevel, pairs, propagate
from featstore.order.multilevel import multilevel_memory_bytes, multilevel_partition

PLENTY = 1 << 30


def both_ways(nodes: int, sources: np.ndarray, targets: np.ndarray) -> Csc:
    return csc(nodes, np.concatenate([sources, targets]), np.concatenate([targets, sources]))


def mesh(side: int) -> Csc:
    """A square mesh whose nodes are numbered at random."""
    ids = np.random.default_rng(0).permutation(side * side).reshape(side, side)
    sources = np.concatenate([ids[:, :-1].ravel(), ids[:-1].ravel()])
    return both_ways(side * side, sources, np.concatenate([ids[:, 1:].ravel(), ids[1:].ravel()]))


def planted(nodes: int, size: int, degree: int, inside: float) -> Csc:
    rng = np.random.default_rng(1)
    sources = rng.integers(0, nodes, nodes * degree // 2)
    near = sources // size * size + rng.integers(0, size, sources.size)
    targets = np.where(rng.random(sources.size) < inside, near, rng.integers(0, nodes, sources.size))
    shuffled = rng.permutation(nodes)
    return both_ways(nodes, shuffled[sources], shuffled[targets])


def neighbours(graph: Csc, node: int) -> list[int]:
    return graph.indices[graph.indptr[node] : graph.indptr[node + 1]].tolist()  # type: ignore[no-any-return]


def capacity(nodes: int, parts: int, slack: float) -> int:
    return max(-(-nodes // parts), int((1 + slack) * nodes / parts))


# --- label propagation
# ------------------------------------------------------------------------------------------------


def twin_pass(
    graph: Csc, label: list[int], sizes: list[int], limit: int, heat: float, seed: int, number: int,
    bins: bool, chunk: int | None,
) -> int:  # fmt: skip
    """A pass of label propagation as the module describes it, in plain Python, chunk after chunk."""
    draws, open_bins, moved = Draws(seed, propagate.FIRST_RANDOM + number), {}, 0
    chunk = chunk or max(1, len(label))
    for batch in ranges(0, len(label), 16 * chunk):
        ends, wishes = list(label), {}
        for nodes in ranges(batch.start, batch.stop, chunk):
            draws.chunk(nodes.start // chunk)
            seen, now = list(label), list(sizes)
            for node in nodes:
                counts = Counter(seen[source] for source in neighbours(graph, node) if source != node)
                old = new = seen[node]
                now[old] -= 1
                best, top, favourite = 0.0, 0, -1
                found = False
                for name, count in counts.items():
                    if count > top:
                        favourite, top = name, count
                    score = count + (heat * draws.unit() if heat else 0) + (1e-3 if name == old else 0)
                    if score > best and now[name] < limit:
                        best, new, found = score, name, True
                if not found and bins and now[old] == 0:
                    wishes[node] = favourite
                now[new] += 1
                ends[node] = seen[node] = new
        for node in batch:
            old, new = label[node], ends[node]
            sizes[old] -= 1
            if new != old and sizes[new] >= limit:
                new = old
            if node in wishes and new == old and sizes[old] == 0:
                other = open_bins.get(wishes[node])
                if other is not None and other != old and 0 < sizes[other] < limit:
                    new = other
                else:
                    open_bins[wishes[node]] = old
            sizes[new] += 1
            label[node] = new
            moved += new != old
    return moved


@settings(max_examples=25, deadline=None)
@given(
    graphs(60, 200),
    st.integers(1, 12),
    st.integers(0, 2**40),
    st.sampled_from([0.0, 0.5]),
    st.integers(1, 50),
    st.sampled_from([None, 1, 3]),
    st.integers(1, 3),
)
def test_label_propagation_is_its_twin(
    graph: Csc, limit: int, seed: int, heat: float, block_edges: int, chunk: int | None, threads: int
) -> None:
    nodes = graph.indptr.size - 1
    label, sizes = np.arange(nodes, dtype=np.int32), np.ones(nodes, np.int32)
    twin_label, twin_sizes = list(range(nodes)), [1] * nodes
    for number in range(3):
        with cut_into(chunk):
            moved = propagate.propagate(
                graph, graph.indptr, label, sizes, limit=limit, heat=heat, seed=seed, number=number,
                bins=number == 2, block_edges=block_edges, threads=threads,
            )  # fmt: skip
        twin = (limit, heat, seed, number, number == 2, chunk)
        assert moved == twin_pass(graph, twin_label, twin_sizes, *twin)
        assert label.tolist() == twin_label
        assert sizes.tolist() == twin_sizes == np.bincount(label, minlength=nodes).tolist()
        assert sizes.max(initial=0) <= limit


def test_of_a_hub_only_so_many_labels_count() -> None:
    """It has four times as many labels around it as are counted, which must neither overflow nor hang."""
    leaves = 1 << 17
    hub = csc(leaves + 1, np.arange(1, leaves + 1), np.zeros(leaves, np.int64))
    label, sizes = np.arange(leaves + 1, dtype=np.int32), np.ones(leaves + 1, np.int32)
    propagate.propagate(
        hub, hub.indptr, label, sizes, limit=5, heat=0.0, seed=0, number=0, bins=False, block_edges=1000
    )
    assert label[0] == 1
    assert label[1:].tolist() == list(range(1, leaves + 1))


def test_leaves_of_a_full_hub_share_labels_and_so_do_isolated_nodes() -> None:
    star = both_ways(201, np.zeros(100, np.int64), np.arange(1, 101))
    label, sizes = np.arange(201, dtype=np.int32), np.ones(201, np.int32)
    for number in range(2):
        propagate.propagate(
            star,
            star.indptr,
            label,
            sizes,
            limit=10,
            heat=0.0,
            seed=0,
            number=number,
            bins=number == 1,
            block_edges=7,
        )
    assert sizes.max() == 10
    assert np.unique(label[:101]).size <= 12
    assert np.unique(label[101:]).size == 10


# --- contraction
# ------------------------------------------------------------------------------------------------------


def coarse_weights(graph: coarsen.CoarseGraph) -> dict[tuple[int, int], int]:
    found = {}
    for v in range(graph.vertex_weights.size):
        for i in range(graph.xadj[v], graph.xadj[v + 1]):
            assert (v, int(graph.adjacency[i])) not in found
            found[v, int(graph.adjacency[i])] = int(graph.edge_weights[i])
    return found


def true_weights(graph: Csc, label: np.ndarray) -> dict[tuple[int, int], int]:
    weights: Counter[tuple[int, int]] = Counter()
    for node in range(label.size):
        for source in neighbours(graph, node):
            a, b = int(label[node]), int(label[source])
            if a != b:
                weights[a, b] += 1
                weights[b, a] += 1
    return dict(weights)


@settings(max_examples=50, deadline=None)
@given(graphs(60, 200), st.integers(1, 20), st.integers(1, 60), st.integers(0, 100))
def test_the_coarse_graph_is_that_of_a_plain_count(
    graph: Csc, vertices: int, block_edges: int, seed: int
) -> None:
    label = np.random.default_rng(seed).integers(0, vertices, graph.indptr.size - 1).astype(np.int32)
    coarse = coarsen.contract(graph, graph.indptr, label, vertices, pairs_max=1000, block_edges=block_edges)
    assert coarse.dropped == 0
    assert coarse.vertex_weights.tolist() == np.bincount(label, minlength=vertices).tolist()
    assert coarse_weights(coarse) == true_weights(graph, label)
    few = coarsen.contract(graph, graph.indptr, label, vertices, pairs_max=5, block_edges=block_edges)
    kept, true = coarse_weights(few), true_weights(graph, label)
    assert len(kept) <= 10
    assert all(kept[pair] == kept[pair[::-1]] <= true[pair] for pair in kept)
    assert sum(kept.values()) + 2 * few.dropped == sum(true.values())


def test_a_growing_table_loses_nothing_and_a_full_one_keeps_what_is_heavy() -> None:
    rng = np.random.default_rng(0)
    vertices = 3000
    noise = rng.integers(0, vertices, (2, 20_000))
    ring = np.arange(vertices)
    sources = np.concatenate([noise[0], *[ring] * 8])
    targets = np.concatenate([noise[1], *[(ring + 1) % vertices] * 8])
    order = rng.permutation(sources.size)
    # Edges in the order of a shuffled node each, so that a pair's come scattered.
    label = rng.integers(0, vertices, 40_000).astype(np.int32)
    members = [np.flatnonzero(label == v) for v in range(vertices)]
    pick = rng.random((2, sources.size))
    ends = [
        np.array([members[v][int(u * members[v].size)] for v, u in zip(side[order].tolist(), draws.tolist())])
        for side, draws in zip((sources, targets), pick)
    ]
    graph = csc(40_000, *ends)
    whole = coarsen.contract(graph, graph.indptr, label, vertices, pairs_max=1 << 20, block_edges=1000)
    assert coarse_weights(whole) == true_weights(graph, label)
    few = coarsen.contract(graph, graph.indptr, label, vertices, pairs_max=8000, block_edges=1000)
    assert few.dropped > 0
    kept = coarse_weights(few)
    assert len(kept) <= 16_000
    assert sum((v, (v + 1) % vertices) in kept for v in range(vertices)) > 0.95 * vertices
    again = coarsen.contract(graph, graph.indptr, label, vertices, pairs_max=8000, block_edges=77)
    assert kept == coarse_weights(again)


@pytest.mark.parametrize("pairs_max", [1 << 20, 40_000])
def test_several_tables_count_as_one_does_whatever_the_threads(pairs_max: int) -> None:
    rng = np.random.default_rng(3)
    graph = csc(3000, *rng.integers(0, 3000, (2, 120_000)))
    label = rng.permutation(3000).astype(np.int32)

    def count(threads: int, block_edges: int) -> coarsen.CoarseGraph:
        return coarsen.contract(
            graph, graph.indptr, label, 3000, pairs_max=pairs_max, block_edges=block_edges, threads=threads
        )

    assert pairs.pair_table_count(pairs_max) == pairs.PAIR_TABLES
    one = count(1, 1 << 20)
    true, kept = true_weights(graph, label), coarse_weights(one)
    assert (one.dropped > 0) == (pairs_max == 40_000)
    assert len(kept) <= 2 * pairs_max
    assert sum(kept.values()) + 2 * one.dropped == sum(true.values())
    assert one.dropped or kept == true
    for threads, block_edges in ((2, 1 << 20), (3, 999), (20, 5000)):
        other = count(threads, block_edges)
        for name in ("xadj", "adjacency", "edge_weights", "vertex_weights"):
            np.testing.assert_array_equal(getattr(other, name), getattr(one, name))
        assert other.dropped == one.dropped


@pytest.mark.parametrize("threads", [1, 3])
def test_a_bad_edge_is_found_by_every_thread(threads: int) -> None:
    rng = np.random.default_rng(4)
    graph = csc(500, *rng.integers(0, 500, (2, 9000)))
    graph.indices[4321] = 500
    with pytest.raises(SourceError, match=r"indices\[4321\] is 500"):
        coarsen.contract(
            graph, graph.indptr, np.arange(500, dtype=np.int32), 500, pairs_max=1 << 20, block_edges=700,
            threads=threads,
        )  # fmt: skip
    with pytest.raises(SourceError, match=r"indices\[4321\] is 500"), cut_into(50):
        ldg_partition(graph, 4, seed=0, block_edges=700, threads=threads)


def test_pairs_heavier_than_any_that_are_told_apart_still_make_room() -> None:
    """All weights are beyond the histogram."""
    heavy = coarsen.HISTOGRAM_SIZE + 5
    pairs = [(2 * i, 2 * i + 1) for i in range(12)]
    sources = np.repeat([a for a, _ in pairs], heavy)
    graph = csc(24, sources, sources + 1)
    label = np.arange(24, dtype=np.int32)
    coarse = coarsen.contract(graph, graph.indptr, label, 24, pairs_max=4, block_edges=100)
    assert len(coarse_weights(coarse)) <= 8
    assert coarse.dropped > 0


@settings(max_examples=35, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(0, 10))
def test_clusters_are_numbered_and_packed_no_further_than_need_be(
    wanted_sizes: list[int], spare: int
) -> None:
    label = np.repeat(np.arange(len(wanted_sizes)), wanted_sizes).astype(np.int32)
    nodes, limit = label.size, 6
    sizes = np.zeros(max(nodes, len(wanted_sizes)), np.int32)
    sizes[: len(wanted_sizes)] = wanted_sizes
    before, clusters = label.copy(), sum(size > 0 for size in wanted_sizes)
    least = coarsen.vertices_max(nodes, limit)
    count = coarsen.number_clusters(label, sizes, limit, least + spare)
    assert count <= least + spare
    assert sorted(set(label.tolist())) == list(range(count))
    assert np.bincount(label, minlength=1).max(initial=0) <= limit
    assert len(set(zip(before.tolist(), label.tolist()))) == clusters
    if clusters <= least + spare:
        assert count == clusters


@settings(max_examples=25, deadline=None)
@given(graphs(60, 200), st.integers(1, 8))
def test_a_merging_pass_is_its_twin(graph: Csc, limit: int) -> None:
    nodes = graph.indptr.size - 1
    label = np.arange(nodes, dtype=np.int32)
    coarse = coarsen.contract(graph, graph.indptr, label, nodes, pairs_max=1000, block_edges=10)
    sizes = np.ones(nodes, np.int32)
    twin_label, twin_sizes = list(range(nodes)), [1] * nodes
    for _ in range(2):
        coarsen.merge_pass(
            coarse.xadj, coarse.adjacency, coarse.edge_weights, coarse.vertex_weights, label, sizes,
            np.zeros(nodes, np.int64), np.empty(nodes, np.int32), limit,
        )  # fmt: skip
        for v in range(nodes):
            counts: Counter[int] = Counter()
            for i in range(coarse.xadj[v], coarse.xadj[v + 1]):
                counts[twin_label[coarse.adjacency[i]]] += int(coarse.edge_weights[i])
            old = best = twin_label[v]
            most = counts.get(old, 0)
            for name, count in counts.items():
                if count > most and name != old and twin_sizes[name] < limit:
                    best, most = name, count
            twin_sizes[old] -= 1
            twin_sizes[best] += 1
            twin_label[v] = best
        assert label.tolist() == twin_label
        assert sizes.tolist() == twin_sizes


@settings(max_examples=25, deadline=None)
@given(graphs(60, 200), st.integers(1, 12), st.integers(0, 100))
def test_merged_vertices_have_the_graph_of_a_count_of_their_nodes(graph: Csc, merged: int, seed: int) -> None:
    nodes = graph.indptr.size - 1
    of_node, merged_of = (
        np.arange(nodes, dtype=np.int32),
        np.random.default_rng(seed).integers(0, merged, nodes),
    )
    coarse = coarsen.contract(graph, graph.indptr, of_node, nodes, pairs_max=1000, block_edges=10)
    few = coarsen.contract_vertices(coarse, merged_of.astype(np.int32), merged)
    assert coarse_weights(few) == true_weights(graph, merged_of.astype(np.int32))
    assert few.vertex_weights.tolist() == np.bincount(merged_of, minlength=merged).tolist()
    assert few.xadj[0] == 0
    assert few.xadj[-1] == few.adjacency.size == few.edge_weights.size
    assert few.dropped == coarse.dropped


# --- the whole
# --------------------------------------------------------------------------------------------------------


@settings(max_examples=35, deadline=None)
@given(
    graphs(60, 200),
    st.integers(1, 70),
    st.integers(0, 2**31 - 1),
    st.sampled_from([0.0, 0.05, 1.0]),
    st.integers(1, 50),
)
def test_every_node_has_a_part_and_no_part_too_many(
    graph: Csc, parts: int, seed: int, slack: float, block_edges: int
) -> None:
    nodes = graph.indptr.size - 1
    part = multilevel_partition(
        graph, parts, seed=seed, memory_bytes=PLENTY, slack=slack, block_edges=block_edges
    )
    assert part.dtype == np.int32
    assert part.shape == (nodes,)
    sizes = np.bincount(part, minlength=parts)
    assert sizes.size == parts
    assert sizes.max() <= capacity(nodes, parts, slack)
    again = multilevel_partition(graph, parts, seed=seed, memory_bytes=PLENTY, slack=slack, block_edges=1000)
    assert part.tolist() == again.tolist()


def test_another_seed_gives_other_parts() -> None:
    graph = planted(2000, 50, 8, 0.8)
    parts = [multilevel_partition(graph, 8, seed=seed, memory_bytes=PLENTY) for seed in (1, 2)]
    assert (parts[0] != parts[1]).any()


def test_a_mesh_is_cut_as_metis_cuts_it_even_in_little_memory() -> None:
    """Means of six seeds: single ones differ by five percent, those of three by two."""
    graph, seeds = mesh(200), range(6)
    metis = np.mean([edge_cut(graph, metis_partition(graph, 32, seed)) for seed in seeds])
    ldg = edge_cut(graph, ldg_partition(graph, 32, seed=0))
    least = multilevel_memory_bytes(40_000, 32, 1 << 12)
    roomy, tight = (
        np.mean([edge_cut(graph, multilevel_partition(graph, 32, seed=seed, **how)) for seed in seeds])
        for how in ({"memory_bytes": PLENTY}, {"memory_bytes": least, "block_edges": 1 << 12})
    )
    assert roomy < 1.2 * metis < 0.5 * ldg
    assert tight < 1.25 * metis


@pytest.mark.parametrize(("size", "inside"), [(100, 0.8), (500, 0.7)])
def test_communities_are_cut_no_worse_than_by_metis_or_ldg(size: int, inside: float) -> None:
    graph = planted(20_000, size, 14, inside)
    cut = edge_cut(graph, multilevel_partition(graph, 32, seed=0, memory_bytes=PLENTY))
    assert cut < 1.03 * edge_cut(graph, metis_partition(graph, 32, 0))
    assert cut < 1.03 * edge_cut(graph, ldg_partition(graph, 32, seed=0))


def test_many_small_components_need_no_metis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a cluster, so no edges are left to cut."""
    monkeypatch.setattr(
        multilevel, "cut_adjacency", lambda *args, **kwargs: pytest.fail("METIS without edges")
    )
    node = np.arange(0, 4000, 2)
    graph = both_ways(4000, node, node + 1)
    part = multilevel_partition(graph, 8, seed=0, memory_bytes=PLENTY)
    assert edge_cut(graph, part) == 0
    assert np.bincount(part, minlength=8).max() <= capacity(4000, 8, 0.05)


def test_without_edges_or_with_a_part_a_node_parts_are_ranges() -> None:
    bare = csc(10, [], [])
    assert multilevel_partition(bare, 3, seed=0, memory_bytes=PLENTY).tolist() == [
        0,
        0,
        0,
        0,
        1,
        1,
        1,
        2,
        2,
        2,
    ]
    graph = csc(4, [0, 1], [1, 0])
    assert multilevel_partition(graph, 9, seed=0, memory_bytes=PLENTY).tolist() == [0, 2, 4, 6]
    assert multilevel_partition(graph, 1, seed=0, memory_bytes=PLENTY).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("parts", [1, 2, 9])
@pytest.mark.parametrize("bad", [-1, 50])
def test_a_bad_edge_is_named(parts: int, bad: int) -> None:
    indptr = np.arange(51, dtype=np.int64)
    indices = np.zeros(50, np.int32)
    indices[7] = bad
    with pytest.raises(SourceError, match=rf"indices\[7\] is {bad}"):
        multilevel_partition(Csc(indptr, indices), parts, seed=0, memory_bytes=PLENTY)
    with pytest.raises(SourceError, match=rf"indices\[7\] is {bad}"):
        multilevel_partition(Csc(indptr, indices), 100, seed=0, memory_bytes=PLENTY)


@pytest.mark.parametrize(
    "bad",
    [{"parts": 0}, {"parts": 2**31}, {"seed": -1}, {"seed": 2**31}, {"slack": -0.1}, {"block_edges": 0}],
)
def test_arguments_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(SourceError, match=next(iter(bad))):
        multilevel_partition(
            planted(200, 20, 4, 0.8), **{"parts": 2, "seed": 0, "memory_bytes": PLENTY, **bad}
        )


def test_without_pymetis_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multilevel, "metis_installed", lambda: False)
    with pytest.raises(SourceError, match=r"pip install 'featstore\[metis\]'"):
        multilevel_partition(csc(2, [0], [1]), 2, seed=0, memory_bytes=PLENTY)


def test_too_little_memory_says_the_least_that_works_and_the_least_works() -> None:
    graph = planted(20_000, 100, 10, 0.5)
    with pytest.raises(BudgetError) as caught:
        multilevel_partition(graph, 64, seed=0, memory_bytes=1000, block_edges=4096)
    least = caught.value.needed_bytes
    assert least == multilevel_memory_bytes(20_000, 64, 4096)
    with pytest.raises(BudgetError):
        multilevel_partition(graph, 64, seed=0, memory_bytes=least - 1, block_edges=4096)
    part = multilevel_partition(graph, 64, seed=0, memory_bytes=least, block_edges=4096)
    assert np.bincount(part, minlength=64).max() <= capacity(20_000, 64, 0.05)


@pytest.mark.parametrize("graph", [mesh(150), planted(20_000, 100, 12, 0.5)], ids=["mesh", "communities"])
def test_python_allocates_no_more_than_planned_and_metis_no_more_than_forecast(
    graph: Csc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """METIS allocates out of sight of tracemalloc, so its forecast is taken off the bound; it has a test of
    its own."""
    nodes = graph.indptr.size - 1
    least = multilevel_memory_bytes(nodes, 16, 4096)
    multilevel_partition(graph, 16, seed=0, memory_bytes=least, block_edges=4096)
    forecasts = []

    def counted(xadj: Any, adjacency: Any, *args: Any, **kwargs: Any) -> Any:
        held = tracemalloc.get_traced_memory()[0]
        forecasts.append(held + multilevel.metis_memory_bytes(xadj.size - 1, adjacency.size, symmetric=True))
        return cut(xadj, adjacency, *args, **kwargs)

    cut = multilevel.cut_adjacency
    monkeypatch.setattr(multilevel, "cut_adjacency", counted)
    tracemalloc.start()
    multilevel_partition(graph, 16, seed=0, memory_bytes=least, block_edges=4096)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 8 * nodes < peak_bytes <= least
    assert 0 < max(forecasts) <= least


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 2000), st.integers(1, 10**6))
def test_the_plan_never_exceeds_the_memory(nodes: int, parts: int, block_edges: int) -> None:
    least = multilevel_memory_bytes(nodes, parts, block_edges)
    for memory_bytes in (least, 2 * least):
        wanted = multilevel._vertices_within(nodes, parts, memory_bytes, block_edges)
        assert coarsen.vertices_max(nodes, multilevel.cluster_limit(nodes, parts)) <= wanted <= nodes
        assert multilevel._coarse_bytes(nodes, wanted, 3 * wanted, block_edges) <= memory_bytes
        assert multilevel._merge_bytes(nodes, wanted, 3 * wanted, block_edges) <= memory_bytes
