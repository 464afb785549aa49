"""Typed graphs: what is stored of them is what was given, whatever the order, the memory and the form."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import featstore
from featstore.errors import ArgumentError, BudgetError, FeatstoreWarning, SourceError
from featstore.packing import typed
from featstore.packing.graphs import values as edge_values
from featstore.packing.graphs.csc import AS_GIVEN
from featstore.packing.graphs.values import EdgeValues, by_time
from featstore.packing.sources.memory import ArrayRows, IteratorRows
from featstore.storage.disk import Disk, File
from featstore.storage.edge_types import joined_name, split_joined

Relation = tuple[str, str, str]


class QuickDisk(Disk):
    """The real disk without durability."""

    def fsync(self, file: File) -> None:
        pass

    def fsync_dir(self, path: Path) -> None:
        pass


@dataclass
class Typed:
    """A typed graph to pack: nodes by type, those without features, edges ``[2, edges]`` by edge type, and
    weights and times of some."""

    nodes: dict[str, int]
    bare: set[str]
    edges: dict[Relation, np.ndarray]
    weights: dict[Relation, np.ndarray] = field(default_factory=dict)
    times: dict[Relation, np.ndarray] = field(default_factory=dict)

    def features(self) -> dict[str, Any]:
        return {t: n if t in self.bare else rows(n, k) for k, (t, n) in enumerate(self.nodes.items())}

    def lists(self, kind: Relation) -> tuple[np.ndarray, np.ndarray]:
        """(indptr, numbers of the edges): ascending by time, source, number."""
        sources, targets = self.edges[kind]
        times = self.times.get(kind, np.zeros(len(sources), np.int64))
        order = np.lexsort((np.arange(len(sources)), sources, times, targets))
        counts = np.bincount(targets, minlength=self.nodes[kind[2]])
        return np.concatenate([[0], np.cumsum(counts)]), order


def rows(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 1 + seed % 3)).astype(np.float32)


TYPES = ("a", "b", "c__d")


@st.composite
def typed_graphs(draw: st.DrawFn) -> Typed:
    """Graphs of one to three types: bipartite and self relations, empty ones, edges that occur twice, equal
    times, types without features or without nodes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    names = TYPES[: draw(st.integers(1, 3))]
    nodes = {t: draw(st.sampled_from([1, 2, 7, 90])) for t in names}
    kinds = draw(
        st.lists(
            st.tuples(st.sampled_from(names), st.sampled_from(["r", "s", "to_x"]), st.sampled_from(names)),
            min_size=1, max_size=4, unique=True,
        )
    )  # fmt: skip
    ends = {end for kind in kinds for end in (kind[0], kind[2])}
    graph = Typed(nodes, {t for t in ends if draw(st.booleans())}, {})
    for kind in kinds:
        count = draw(st.sampled_from([0, 1, 3, 200]))
        graph.edges[kind] = np.stack(
            [rng.integers(0, nodes[kind[0]], count), rng.integers(0, nodes[kind[2]], count)]
        )
        if draw(st.booleans()):
            dtype = draw(st.sampled_from([np.float32, np.float64]))
            graph.weights[kind] = rng.random(count).astype(dtype)
        if draw(st.booleans()):
            graph.times[kind] = rng.integers(-3, 4, count)
    return graph


def check(store: featstore.Store, graph: Typed, *, edge_ids: bool) -> None:
    assert sorted(store.edge_types) == sorted(graph.edges)
    assert set(store.node_types) == set(graph.nodes)
    assert set(store.manifest.featureless) == graph.bare
    for kind, edges in graph.edges.items():
        stored = store.graphs[joined_name(kind)]
        assert (stored.edge_type, stored.source_table.name, stored.table.name) == (kind, kind[0], kind[2])
        indptr, order = graph.lists(kind)
        assert [part.tolist() for part in stored.csc()] == [indptr.tolist(), edges[0][order].tolist()]
        if edge_ids:
            assert stored.edge_ids().tolist() == order.tolist()
        for has, read, values in (
            (stored.has_weights, stored.weights, graph.weights),
            (stored.has_times, stored.times, graph.times),
        ):
            assert has == (kind in values)
            if has:
                found = read()
                assert found.dtype == values[kind].dtype
                assert found.tolist() == values[kind][order].tolist()
            else:
                with pytest.raises(SourceError, match="pack it with edge_"):
                    read()
    given = {name: rows for name, rows in graph.features().items() if name not in graph.bare}
    with store.reader(static=None, memory="16MiB", engine="threads") as reader:
        found = reader.read({name: np.arange(len(rows)) for name, rows in given.items()})
        assert all(np.array_equal(found[name], rows) for name, rows in given.items())


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    graph=typed_graphs(), order=st.sampled_from(["given", "degree", "ldg", "metis", "multilevel", "auto"]),
    ids=st.booleans(), small=st.booleans(), parts=st.integers(1, 5),
)  # fmt: skip
def test_what_is_stored_is_what_was_given(
    tmp_path_factory: pytest.TempPathFactory, graph: Typed, order: str, ids: bool, small: bool, parts: int
) -> None:
    path = tmp_path_factory.mktemp("typed") / "s"
    ends = {end for kind in graph.edges for end in (kind[0], kind[2])}
    partitioned = order in ("ldg", "metis", "multilevel", "auto")
    with pytest.MonkeyPatch.context() as patch:
        if small:  # blocks of a few edges, and everything by way of scratch files
            patch.setattr(typed, "_HELD_SHARE", 2**40)
            patch.setattr(edge_values, "_BLOCK_EDGES", 7)
            patch.setattr(edge_values, "_BLOCK_EDGES_MIN", 1)
        store = featstore.pack(
            path, graph.features(), graph=graph.edges, order=dict.fromkeys(ends, order), edge_ids=ids,
            edge_weights=graph.weights or None,
            edge_times={joined_name(k): v for k, v in graph.times.items()},
            partitions=dict.fromkeys(ends, parts) if partitioned else None, hubs=0.2, memory="256MiB",
            disk=QuickDisk(),
        )  # fmt: skip
    with store:
        check(store, graph, edge_ids=ids)
        report = featstore.verify(path)
        assert report.ok, report.problems
        if partitioned:
            assert len({len(store.tables[t].partition_offsets) for t in ends}) == 1
        wanted = ["graphs"] + ["edge_ids"] * ids + ["relations"]
        assert store.manifest.reader_features == wanted + ["edge_values"] * bool(graph.weights or graph.times)


WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")


def example(papers: int = 300, authors: int = 120, seed: int = 0) -> Typed:
    """Papers with features, authors without; both relations with weights, one with times."""
    rng = np.random.default_rng(seed)
    writes = np.stack([rng.integers(0, authors, 900), rng.integers(0, papers, 900)])
    cites = np.stack([rng.integers(0, papers, 700), rng.integers(0, papers // 2, 700)])
    weights = {WRITES: rng.random(900).astype(np.float32), CITES: rng.random(700)}
    times = {CITES: rng.integers(0, 50, 700)}
    nodes = {"paper": papers, "author": authors}
    return Typed(nodes, {"author"}, {WRITES: writes, CITES: cites}, weights, times)


def packed(path: Path, graph: Typed, **options: Any) -> featstore.Store:
    given = {"edge_weights": graph.weights, "edge_times": graph.times, "edge_ids": True, **options}
    return featstore.pack(path, graph.features(), graph=graph.edges, disk=QuickDisk(), **given)


def tree(path: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != "lock"
    }


def test_equal_packs_are_equal_whatever_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = example()
    options: dict[str, Any] = {"order": "ldg", "partitions": 4}
    packed(tmp_path / "a", graph, **options).close()
    packed(tmp_path / "b", graph, **options).close()
    monkeypatch.setattr(typed, "_HELD_SHARE", 2**40)
    monkeypatch.setattr(edge_values, "_BLOCK_EDGES", 50)
    monkeypatch.setattr(edge_values, "_BLOCK_EDGES_MIN", 1)
    packed(tmp_path / "c", graph, **options).close()
    first = tree(tmp_path / "a")
    assert tree(tmp_path / "b") == first == tree(tmp_path / "c")


def test_partitions_of_all_types_belong_together(tmp_path: Path) -> None:
    """Three groups of nodes of either type, with edges inside of each alone."""
    rng = np.random.default_rng(1)
    group = {"paper": np.arange(600) % 3, "author": np.arange(300) % 3}
    edges = [
        [rng.choice(np.flatnonzero(group[name] == g), 4000) for name in ("author", "paper")] for g in range(3)
    ]
    graph = Typed({"paper": 600, "author": 300}, set(), {WRITES: np.hstack([np.stack(one) for one in edges])})
    with packed(
        tmp_path / "s", graph, order="metis", partitions=3, edge_weights=None, edge_times=None
    ) as store:
        found = []
        for name, groups in group.items():
            table = store.tables[name]
            part = np.searchsorted(table.partition_offsets, table.row_of_node(), side="right") - 1
            found.append([set(groups[part == p]) for p in range(3)])
            assert table.entry.order.parameters["types"] == "paper, author"
            assert 1 <= float(table.entry.order.parameters["balance"]) < 2
        assert found[0] == found[1]
        assert sorted(map(sorted, found[0])) == [[0], [1], [2]]


@pytest.mark.parametrize("order", ["ldg", "multilevel", "metis", "bfs"])
def test_partitions_are_even_in_every_type(order: str, tmp_path: Path) -> None:
    """All authors write papers of one group in four, and stand beside these where nobody looks at types: but
    the memory of a mega-batch is that of the largest partitions of each type."""
    rng = np.random.default_rng(2)
    papers, authors, parts = 2000, 400, 4
    cites = np.stack([rng.integers(0, papers, 20_000)] * 2)
    cites[1] = (cites[0] + parts * rng.integers(0, papers // parts, 20_000)) % papers  # within its group
    writes = np.stack([rng.integers(0, authors, 3000), parts * rng.integers(0, papers // parts, 3000)])
    graph = Typed({"paper": papers, "author": authors}, set(), {CITES: cites, WRITES: writes})
    how: dict[str, Any] = {"partitions": parts, "edge_weights": None, "edge_times": None}
    with packed(tmp_path / "even", graph, order=order, **how) as store:
        for table in store.tables.values():
            sizes = np.diff(table.partition_offsets)
            assert sizes.sum() == table.rows
            assert sizes.max() <= 1.2 * table.rows / parts
            assert table.entry.order.parameters["balance"] == round(sizes.max() * parts / table.rows, 3)
        assert float(store.tables["paper"].entry.order.parameters["edge_cut"]) < 0.35


def test_degrees_are_over_all_relations(tmp_path: Path) -> None:
    graph = example()
    with packed(tmp_path / "s", graph, order="given", hubs=0.1) as store:
        for name, sources in (("paper", graph.edges[CITES][0]), ("author", graph.edges[WRITES][0])):
            counts = np.bincount(sources, minlength=graph.nodes[name])
            expected = np.argsort(-counts, kind="stable")
            assert store.tables[name].rows_by_degree().tolist() == expected.tolist()
        for name in ("author__writes__paper", "paper__cites__paper"):
            assert (
                store.graphs[name].hub_rows()[0].tolist() == store.tables["paper"].rows_by_degree(30).tolist()
            )


def forms(edges: np.ndarray, sources: int, targets: int, folder: Path) -> dict[str, Any]:
    """The same edges in every form that a graph comes in."""
    sp = pytest.importorskip("scipy.sparse")
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    np.save(folder / "e.npy", edges)
    np.savez(folder / "e.npz", edge_index=edges)
    np.savetxt(folder / "e.csv", edges.T, "%d", ",", header="source,target", comments="")
    pq.write_table(pa.table({"src": edges[0], "dst": edges[1]}), folder / "e.parquet")
    matrix = sp.coo_matrix((np.ones(edges.shape[1]), edges), (sources, targets))
    for layout in ("csc", "csr", "coo"):
        sp.save_npz(folder / f"{layout}.npz", matrix.asformat(layout))
    csc, csr = matrix.tocsc(), matrix.tocsr()
    np.savez(folder / "adj.npz", adj_indptr=csr.indptr, adj_indices=csr.indices)
    np.savez(folder / "lists.npz", indptr=csc.indptr, indices=csc.indices)
    files = ["e.npy", "e.npz", "e.csv", "e.parquet", "csc.npz", "csr.npz", "coo.npz", "adj.npz", "lists.npz"]
    return {
        "array": edges, "interleaved": np.ascontiguousarray(edges.T), "csc": (csc.indptr, csc.indices),
        "matrix": matrix, "csr matrix": csr, **{name: folder / name for name in files},
    }  # fmt: skip


def test_edges_of_a_type_come_in_every_form(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    pairs = np.unique(rng.integers(0, [5, 9], (30, 2)), axis=0)  # a matrix has an edge once
    edges = pairs[rng.permutation(len(pairs))].T
    nodes = {"a": 5, "b": 9}
    expected = Typed(nodes, set(nodes), {("a", "r", "b"): edges}).lists(("a", "r", "b"))
    for number, (form, spec) in enumerate(forms(edges, 5, 9, tmp_path).items()):
        graph = {("a", "r", "b") if number % 2 else "a__r__b": spec}
        with featstore.pack(tmp_path / f"s{number}", nodes, graph=graph, disk=QuickDisk()) as store:
            indptr, indices = store.graphs["a__r__b"].csc()
            assert [indptr.tolist(), indices.tolist()] == [
                expected[0].tolist(),
                edges[0][expected[1]].tolist(),
            ], form


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graph": {("a", "r", "x"): np.zeros((2, 1), int)}}, "nodes of 'x', which are not packed"),
        ({"graph": {("a", "b"): np.zeros((2, 1), int)}}, "an edge type is"),
        ({"graph": {"a__r__x": np.zeros((2, 1), int)}}, "a table 'a__r__x' that is not packed"),
        ({"graph": {("a", "r", "b"): np.array([[5], [0]])}}, "0 to 3 of sources and 0 to 2 of targets"),
        ({"graph": {("a", "r", "b"): np.array([[0], [3]])}}, "0 to 3 of sources and 0 to 2 of targets"),
        ({"graph": {"a": np.zeros((2, 1), int), ("a", "r", "b"): np.zeros((2, 1), int)}}, "have no edge"),
        ({"edge_weights": np.ones(3, np.float32)}, "several graphs; say whose edge_weights"),
        ({"edge_weights": {("a", "x", "b"): np.ones(2)}}, "a graph .* that is not packed"),
        ({"edge_weights": {"a__r__b": np.ones(5)}}, "5 values for a graph of 3 edges"),
        ({"edge_weights": {"a__r__b": iter([np.ones((1, 1))])}}, "1 values for a graph of 3 edges"),
        ({"edge_weights": {"a__r__b": np.array([1, np.nan, 2])}}, "weight of edge 1 is nan"),
        ({"edge_weights": {"a__r__b": np.array([-1.0, 0, 0])}}, "weight of edge 0 is -1"),
        ({"edge_weights": {"a__r__b": np.array([1, 2, 3])}}, "weights are float32 or float64, not int64"),
        ({"edge_times": {"a__r__b": np.array([1.0, 2, 3])}}, "times are whole numbers"),
        ({"edge_times": {"a__r__b": np.array([1, 2, 3], np.uint64)}}, "whole numbers that fit int64"),
        ({"edge_times": {"a__r__b": np.ones((3, 2), int)}}, "one number for each edge"),
        ({"hub_rank": "external"}, "hub_rank='external' is of a graph over one table"),
        ({"topology": False}, "'b' have no features, and topology=False"),
        ({"order": {"a": "ldg", "b": "metis"}}, "order= differs among 'a', 'b'"),
        ({"order": "ldg", "partitions": {"a": 2, "b": 3}}, "partitions= differs"),
        ({"features": {"a": np.ones((4, 1)), "b": -3}}, "number of nodes of 'b'"),
        ({"features": {"a": np.ones((4, 1)), "b": 3, "c": 3}}, "no edge type has such nodes"),
        ({"cast": {"b": "float16"}}, "cast is given for table 'b', whose nodes have no features"),
        ({"features": {"a": np.ones((4, 1)), "b": 3, "a__z__b": np.ones((2, 1))}}, "has rows of edges"),
        ({"features": {"a": np.ones((4, 1)), "b": 3, "a__r__b": np.ones((2, 1))}}, "2 rows, and the g"),
    ],
)  # fmt: skip
def test_what_is_no_typed_graph_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    edges = np.array([[0, 1, 2], [2, 0, 1]])
    given: dict[str, Any] = {
        "features": {"a": np.ones((4, 1), np.float32), "b": 3},
        "graph": {("a", "r", "b"): edges, ("b", "s", "a"): edges}, **options,
    }  # fmt: skip
    with pytest.raises((SourceError, ArgumentError), match=message):
        featstore.pack(tmp_path / "s", given.pop("features"), **given)
    assert not (tmp_path / "s" / "featstore.json").exists()


def test_a_joined_name_may_be_of_two_edge_types() -> None:
    assert split_joined("a__r__b", ["a", "b"]) == [("a", "r", "b")]
    assert split_joined("a__b__c__a", ["a", "a__b", "c__a"]) == [
        ("a", "b__c", "a"),
        ("a", "b", "c__a"),
        ("a__b", "c", "a"),
    ]
    assert split_joined("a__b", ["a", "b"]) == []
    assert split_joined("a____b", ["a", "b"]) == []


def test_rows_of_edges_are_a_table_of_the_types_name(tmp_path: Path) -> None:
    graph = example()
    features = graph.features() | {"author__writes__paper": rows(900, 1)}
    with featstore.pack(tmp_path / "s", features, graph=graph.edges) as store:
        assert store.node_types == ["paper", "author"]
        assert all(g.has_edge_ids for g in store.graphs.values())
        check(store, Typed(graph.nodes, graph.bare, graph.edges), edge_ids=True)


def test_weights_and_times_of_a_graph_without_types(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    edges, weights, times = rng.integers(0, 40, (2, 300)), rng.random(300), rng.integers(0, 9, 300)
    np.save(tmp_path / "w.npy", weights)
    with featstore.pack(
        tmp_path / "s", np.ones((40, 2)), graph=edges, edge_weights=tmp_path / "w.npy", edge_times=times,
        order="ldg", partitions=3,
    ) as store:  # fmt: skip
        graph = store.graphs["features"]
        order = np.lexsort((np.arange(300), edges[0], times, edges[1]))
        assert graph.edge_type is None
        assert graph.csc()[1].tolist() == edges[0][order].tolist()
        assert (graph.weights().tolist(), graph.times().tolist()) == (
            weights[order].tolist(),
            times[order].tolist(),
        )
        assert store.manifest.reader_features == ["graphs", "edge_values"]
    assert featstore.verify(tmp_path / "s").ok


# What does not fit, and what is interrupted.


@settings(max_examples=30)
@given(edges=st.integers(0, 60), room=st.integers(1, 70), seed=st.integers(0, 99), given_order=st.booleans())
def test_values_come_in_the_order_of_edges_within_any_memory(
    tmp_path_factory: pytest.TempPathFactory, edges: int, room: int, seed: int, given_order: bool
) -> None:
    rng, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("values")
    values, ids = rng.random(edges), rng.permutation(edges).astype(np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edge_values, "_BLOCK_EDGES_MIN", 1)
        source = EdgeValues("weights", ArrayRows(values))
        found = source.in_order(AS_GIVEN if given_order else ids, edges, 56 + 8 * room, folder)
        assert found.tolist() == (values if given_order else values[ids]).tolist()
        ends = np.sort(rng.integers(0, edges + 1, 5))
        offsets = np.concatenate([[0], ends, [edges]])
        times = rng.integers(0, 4, edges)
        sorted_by = np.lexsort((times, np.repeat(np.arange(6), np.diff(offsets))))
        longest = int(np.diff(offsets).max(initial=1))
        moved = by_time(offsets, times, {"a": values, "n": AS_GIVEN}, max(64 * longest, 64 * room), folder)
        assert moved["times"].tolist() == times[sorted_by].tolist()
        assert moved["a"].tolist() == values[sorted_by].tolist()
        assert moved["n"].tolist() == sorted_by.tolist()
        if longest > 1:
            with pytest.raises(BudgetError, match="sort the in-edges of one node by time"):
                by_time(offsets, times, {}, 64, folder)


def test_values_of_another_number_are_refused() -> None:
    for blocks in ([np.ones((3, 1))], [np.ones((2, 1)), np.ones((3, 1))]):
        source = EdgeValues("weights", IteratorRows(iter(blocks)))
        with pytest.raises(SourceError, match="values for a graph of 4 edges"):
            list(source.chunks(4, 10))


class Stop(Exception):
    """The end of a pack that is killed."""


class Dying(QuickDisk):
    """A disk that fails at its n-th write of a file."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def replace_file(self, path: Path, data: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise Stop
        super().replace_file(path, data)


def test_a_pack_that_was_stopped_goes_on(tmp_path: Path) -> None:
    graph = example()
    options: dict[str, Any] = {"order": "ldg", "partitions": 4}
    given = {"edge_weights": graph.weights, "edge_times": graph.times, "edge_ids": True, **options}
    packed(tmp_path / "whole", graph, **options).close()
    expected = tree(tmp_path / "whole")
    resumed = 0
    for number in range(2, 9):
        out = tmp_path / f"s{number}"
        try:
            featstore.pack(out, graph.features(), graph=graph.edges, disk=Dying(number), **given).close()
        except Stop:
            if not out.exists() or not list(out.glob("g*.journal")):
                continue
            other = given | {"edge_times": {CITES: graph.times[CITES] + 1}}
            with pytest.raises(SourceError, match="cannot resume: the unfinished pack had values"):
                featstore.pack(out, graph.features(), graph=graph.edges, resume=True, **other)
            featstore.pack(out, graph.features(), graph=graph.edges, resume=True, **given).close()
            resumed += 1
        assert tree(out) == expected
    assert resumed >= 3


# PyG.


def hetero() -> Any:
    pytest.importorskip("torch_geometric")
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch_geometric.data import HeteroData
    graph, data = example(), HeteroData()
    data["paper"].x, data["paper"].y = torch.from_numpy(rows(300, 0)), torch.arange(300)
    data["author"].num_nodes = 120
    for kind, edges in graph.edges.items():
        data[kind].edge_index = torch.from_numpy(edges)
        data[kind].weight = torch.from_numpy(graph.weights[kind])
    data[CITES].time = torch.from_numpy(graph.times[CITES])
    data[WRITES].edge_attr = torch.ones(900, 3)
    return graph, data


def test_a_hetero_data_is_stored_whole(tmp_path: Path) -> None:
    graph, data = hetero()
    with featstore.pack(tmp_path / "s", data, edge_weights="weight", edge_times="time") as store:
        check(store, graph, edge_ids=True)
        assert set(store.tables) == {"paper", "author", "author__writes__paper"}
        assert set(store.arrays) == {"paper.y"}
    with featstore.pack(tmp_path / "t", data) as store:
        check(store, Typed(graph.nodes, graph.bare, graph.edges), edge_ids=True)
        assert set(store.arrays) == {
            "paper.y", "author__writes__paper.weight", "paper__cites__paper.weight",
            "paper__cites__paper.time",
        }  # fmt: skip
    with featstore.pack(tmp_path / "u", data, graph={CITES: data[CITES], WRITES: data[WRITES]}) as store:
        check(store, Typed(graph.nodes, graph.bare, graph.edges), edge_ids=True)


def test_what_a_store_cannot_have_of_a_hetero_data_is_an_error(tmp_path: Path) -> None:
    _, data = hetero()
    with pytest.raises(SourceError, match=r"no edges of the PyG data .* attribute 'wait'"):
        featstore.pack(tmp_path / "s", data, edge_weights="wait")
    with pytest.raises(SourceError, match=r"relation .*'cites'.* is given for the edge type"):
        featstore.pack(tmp_path / "s", data, graph={WRITES: data[CITES]})
    with pytest.warns(FeatstoreWarning) as told:
        featstore.pack(tmp_path / "u", data, graph={}).close()
    assert any("types of nodes 'author', which have no x" in str(one.message) for one in told)
    del data["author"].num_nodes
    with pytest.raises(SourceError, match=r"no x of the nodes 'author'.*num_nodes"):
        featstore.pack(tmp_path / "s", data)
    data["author"].num_nodes = 120
    data["paper"].names = ["a", "b"]
    with pytest.raises(SourceError, match=r"cannot be stored of the HeteroData: paper.names \(list\)"):
        featstore.pack(tmp_path / "s", data)


# What does not carry types yet says so.


def test_what_does_not_take_types_says_so(tmp_path: Path) -> None:
    graph = example()
    with packed(tmp_path / "s", graph) as store:
        with pytest.raises(SourceError, match="joins nodes of 'author' to nodes of 'paper'"):
            store.sampler([2], memory="8MiB", graph="author__writes__paper")
        with pytest.raises(SourceError, match="2 graphs"):
            store.sampler([2], memory="8MiB")


_MEASURED = """
import sys, gc, numpy as np, featstore
from pathlib import Path
out, edges, rng = Path(sys.argv[1]), 1_000_000, np.random.default_rng(0)
papers, authors = 80_000, 50_000
def status(what):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what)) << 10
def pack(name, nodes, memory, files):
    kinds = ("author", "writes", "paper"), ("paper", "cites", "paper")
    featstore.pack(
        out / name, dict(zip(("paper", "author"), nodes)), graph=dict(zip(kinds, files[:2])), order="ldg",
        partitions=8, edge_weights={kinds[0]: files[2]}, edge_times=dict.fromkeys(kinds, files[3]),
        edge_ids=True, memory=memory,
    ).close()
few = rng.integers(0, 50, (2, 200))
pack("few", (50, 50), "64MiB", [few, few, np.ones(200), np.arange(200)])  # all is loaded that is needed
files = [out / f"{n}.npy" for n in "abcd"]
for file, sources in zip(files, (authors, papers)):
    np.save(file, np.stack([(rng.random(edges) ** 2 * sources).astype(int), rng.integers(0, papers, edges)]))
np.save(files[2], rng.random(edges))
np.save(files[3], rng.integers(0, 10**9, edges))
gc.collect()
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
pack("s", (papers, authors), "32MiB", files)
print(status("VmHWM") - before)
"""


def test_a_typed_graph_larger_than_the_memory(tmp_path: Path) -> None:
    """56 MB of edges, weights and times, and 16 MB of their common graph, in 32 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, tmp_path], capture_output=True, text=True, timeout=110, check=True
    )
    assert int(done.stdout) < (32 + 8) << 20
    assert featstore.verify(tmp_path / "s").ok
    with featstore.open(tmp_path / "s") as store:
        graph = store.graphs["author__writes__paper"]
        sources, targets = np.load(tmp_path / "a.npy")
        (indptr, indices), edges = graph.csc(), graph.edge_ids()
        assert np.array_equal(np.repeat(np.arange(len(indptr) - 1), np.diff(indptr)), targets[edges])
        assert np.array_equal(indices, sources[edges])
        assert np.array_equal(graph.weights(), np.load(tmp_path / "c.npy")[edges])
        assert np.array_equal(graph.times(), np.load(tmp_path / "d.npy")[edges])
