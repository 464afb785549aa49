"""Graphs in the store: what is written is the graph, in the order of the rows, whatever the order, the memory
and the hubs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
import featstore.layout.table
from featstore.errors import BudgetError, DeviceError, DiskFullError, FormatError, SourceError
from featstore.packing import topology
from featstore.packing.graphs import by_row
from featstore.packing.graphs.build import BLOCK_EDGE_BYTES, SORTED_EDGES_MIN
from featstore.packing.graphs.csc import NO_IDS, CscGraph
from featstore.sampling.neighbors import NeighborSampler
from featstore.storage.disk import Disk, File
from featstore.storage.table_writer import Catalogue


class QuickDisk(Disk):
    """The real disk without durability."""

    def fsync(self, file: File) -> None:
        pass

    def fsync_dir(self, path: Path) -> None:
        pass


@dataclass(frozen=True)
class Edges:
    """A graph to pack: ``sources`` and ``targets`` by node id."""

    nodes: int
    sources: np.ndarray
    targets: np.ndarray

    @property
    def index(self) -> np.ndarray:
        return np.stack([self.sources, self.targets])

    @property
    def csc(self) -> tuple[np.ndarray, np.ndarray]:
        """(indptr, indices) with ascending lists."""
        order = np.lexsort((self.sources, self.targets))
        indptr = np.concatenate([[0], np.cumsum(np.bincount(self.targets, minlength=self.nodes))])
        return indptr.astype(np.int64), self.sources[order]

    def lists(self, node_of_row: np.ndarray) -> list[np.ndarray]:
        """The lists of all rows, as rows."""
        indptr, indices = self.csc
        row_of_node = np.argsort(node_of_row)
        return [row_of_node[indices[indptr[v] : indptr[v + 1]]] for v in node_of_row]


@st.composite
def graphs(draw: st.DrawFn) -> Edges:
    """Small graphs: of one node, without edges, with isolated nodes, self-loops, edges that occur often,
    stars."""
    nodes = draw(st.integers(1, 60))
    used = draw(st.integers(1, nodes))  # the others are isolated
    count = draw(st.sampled_from([0, 1, 5, 40, 300]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    power = draw(st.sampled_from([1.0, 4.0]))
    sources = (rng.random(count) ** power * used).astype(np.int64)
    targets = (rng.random(count) ** draw(st.sampled_from([1.0, 4.0])) * used).astype(np.int64)
    return Edges(nodes, sources, targets)


def features(nodes: int) -> np.ndarray:
    return np.arange(nodes, dtype=np.float32).reshape(-1, 1)


def identity_or(values: Any, nodes: int) -> np.ndarray:
    return np.arange(nodes) if values is None else np.asarray(values)


def hubs_by_rank(edges: Edges, graph: Any, rank: str, count: int) -> np.ndarray:
    """The twin: rows by falling count, ties by row (external) or as the table ranks them (degree)."""
    table = graph.table
    if rank == "degree":
        return np.asarray(table.rows_by_degree())[:count]
    row_of_node = identity_or(table.row_of_node(), edges.nodes)
    sources, targets = row_of_node[edges.sources], row_of_node[edges.targets]
    part = np.searchsorted(table.partition_offsets, np.arange(edges.nodes), side="right")
    counts = np.bincount(sources[part[sources] != part[targets]], minlength=edges.nodes)
    return np.argsort(-counts, kind="stable")[:count]


def check(store: featstore.Store, edges: Edges, *, hubs: float, rank: str) -> None:
    """All that is stored of a graph against the graph."""
    graph = store.graphs["features"]
    node_of_row = identity_or(graph.table.node_of_row(), edges.nodes)
    lists = edges.lists(node_of_row)
    offsets = graph.offsets()
    assert offsets.tolist() == np.cumsum([0, *map(len, lists)]).tolist()
    indptr, indices = graph.csc()
    assert indptr.tolist() == edges.csc[0].tolist()
    assert indices.tolist() == edges.csc[1].tolist()
    count = int(np.ceil(hubs * edges.nodes))
    rows, ends = graph.hub_rows()
    assert graph.hubs == len(rows) == count
    assert (graph.entry.hubs is None) == (count == 0)
    tables = [f"features/{part}" for part in (["sources", "hubs"] if count else ["sources"])]
    with store.reader(tables=tables, static=None, memory="8MiB", engine="threads") as reader:
        sources = reader.read_runs({"features/sources": [[0, graph.edges]]})["features/sources"]
        assert sources.dtype == np.int32
        assert sources.tolist() == [s for one in lists for s in one.tolist()]
        if not count:
            return
        assert rows.tolist() == hubs_by_rank(edges, graph, rank, count).tolist()
        copy = reader.read_runs({"features/hubs": [[0, int(ends[-1])]]})["features/hubs"]
        for h, row in enumerate(rows.tolist()):
            assert copy[ends[h] : ends[h + 1]].tolist() == lists[row].tolist()
    few, few_ends = graph.hub_rows(1)
    assert (few.tolist(), few_ends.tolist()) == (rows[:1].tolist(), ends[:2].tolist())


def check_ids(store: featstore.Store, edges: Edges) -> None:
    """Edge ids beside the lists, and beside the hubs' lists: of equal sources in their order."""
    graph = store.graphs["features"]
    node_of_row = identity_or(graph.table.node_of_row(), edges.nodes)
    wanted = [np.flatnonzero(edges.targets == v) for v in node_of_row]
    wanted = [ids[np.argsort(edges.sources[ids], kind="stable")] for ids in wanted]
    rows, ends = graph.hub_rows()
    tables = ["features/edge_ids"] + ["features/hub_edge_ids"] * (graph.entry.hubs is not None)
    with store.reader(tables=tables, static=None, memory="8MiB", engine="threads") as reader:
        found = reader.read_runs({tables[0]: [[0, graph.edges]]})[tables[0]]
        assert found.dtype == np.int32
        assert found.tolist() == [e for one in wanted for e in one.tolist()]
        if len(tables) > 1:
            found = reader.read_runs({tables[1]: [[0, int(ends[-1])]]})[tables[1]]
            assert found.tolist() == [e for row in rows for e in wanted[row].tolist()]


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of several chunk files, and blocks of a few edges."""
    monkeypatch.setattr(featstore.layout.table, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(topology, "_BLOCK_EDGES", 64)
    monkeypatch.setattr(topology, "_BLOCK_EDGES_MIN", 1)


def smallest(edges: Edges, ids: bool = False) -> int:
    """The memory in which a graph just goes into row order on disk."""
    most = int(np.bincount(edges.targets, minlength=1).max())
    return 8 * (edges.nodes + 1) + BLOCK_EDGE_BYTES * SORTED_EDGES_MIN + (8 if ids else 4) * most + 8


@pytest.mark.usefixtures("tiny_chunks")
@settings(max_examples=15)
@given(
    edges=graphs(), order=st.sampled_from(["given", "permutation", "ldg", "degree"]),
    hubs=st.sampled_from([0.0, 0.07, 1.0]), rank=st.sampled_from(["degree", "external"]),
    way=st.sampled_from(["by row", "built", "on disk"]), cores=st.integers(1, 4), seed=st.integers(0, 99),
    ids=st.booleans(),
)  # fmt: skip
def test_what_is_stored_is_the_graph(
    tmp_path_factory: pytest.TempPathFactory,
    edges: Edges,
    order: str,
    hubs: float,
    rank: str,
    way: str,
    cores: int,
    seed: int,
    ids: bool,
) -> None:
    permutation = np.random.default_rng(seed).permutation(edges.nodes) if order == "permutation" else None
    ways: list[bool] = []
    build = topology.build_csc

    def squeezed(stream: Any, nodes: int, memory: int, scratch: Path, numbers: Any, others: Any) -> Any:
        assert (numbers is not None) == ids
        memory = smallest(edges, ids) if way == "on disk" else memory
        made = build(stream, nodes, memory, scratch, numbers, others)
        ways.append(isinstance(made[1], np.memmap))
        return made

    path = tmp_path_factory.mktemp("topology") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "build_csc", squeezed)
        patch.setattr(topology, "available_cores", lambda: cores)
        if way != "by row":
            patch.setattr(topology, "lists_bytes", lambda graph, ids: 2**60)
        store = featstore.pack(
            path, features(edges.nodes), graph=edges.index, order=order, permutation=permutation,
            partitions=3 if order == "ldg" and edges.nodes >= 3 else None, hubs=hubs, hub_rank=rank,
            edge_ids=ids, disk=QuickDisk(),
        )  # fmt: skip
    with store:
        assert not ways or way != "by row" or cores == 1
        if ways and way == "on disk" and edges.nodes > 1 and len(edges.sources) > edges.nodes:
            assert ways == [True], "it went by way of the disk"
        check(store, edges, hubs=hubs, rank=rank)
        assert store.manifest.reader_features == (["graphs", "edge_ids"] if ids else ["graphs"])
        if ids:
            check_ids(store, edges)
    assert featstore.verify(path).ok
    assert not list(path.glob("*.spill"))


def star(nodes: int = 500, edges: int = 6_000) -> Edges:
    rng = np.random.default_rng(5)
    return Edges(
        nodes,
        (rng.random(edges) ** 3 * nodes).astype(np.int64),
        (rng.random(edges) ** 3 * nodes).astype(np.int64),
    )


def tree(path: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes()
        for p in sorted(path.rglob("*"))
        if p.is_file() and p.name != "lock"
    }


@pytest.mark.usefixtures("tiny_chunks")
@pytest.mark.parametrize("rank", ["degree", "external"])
def test_equal_packs_are_equal_to_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    """Twice the same, with another memory, and by way of the disk."""
    edges = star()
    options: dict[str, Any] = {
        "graph": edges.index,
        "order": "ldg",
        "partitions": 4,
        "hubs": 0.1,
        "hub_rank": rank,
        "edge_ids": rank == "external",
        "disk": QuickDisk(),
    }
    for name, memory in (("a", "1GiB"), ("b", "1GiB"), ("c", "40MiB")):
        featstore.pack(tmp_path / name, features(edges.nodes), memory=memory, **options).close()
    build = topology.build_csc
    monkeypatch.setattr(topology, "lists_bytes", lambda graph, ids: 2**60)
    monkeypatch.setattr(
        topology,
        "build_csc",
        lambda stream, nodes, _, scratch, ids, others: build(
            stream, nodes, smallest(edges, ids is not None), scratch, ids
        ),
    )
    monkeypatch.setattr(topology, "_BLOCK_EDGES", 1000)
    featstore.pack(tmp_path / "d", features(edges.nodes), **options).close()
    first = tree(tmp_path / "a")
    assert len([p for p in first if "graphs/features/sources/rows/c." in p]) > 2
    for name in "bcd":
        assert tree(tmp_path / name) == first


def test_lists_of_a_csc_as_given_keep_their_order(tmp_path: Path) -> None:
    indptr, indices = np.array([0, 3, 3, 5]), np.array([2, 0, 1, 1, 0])
    with featstore.pack(
        tmp_path / "given", features(3), graph=(indptr, indices), order="given", hubs=1
    ) as store:
        assert store.graphs["features"].csc()[1].tolist() == [2, 0, 1, 1, 0]
    with featstore.pack(
        tmp_path / "sorted",
        features(3),
        graph=(indptr, indices),
        order="permutation",
        permutation=[2, 0, 1],
        hubs=1,
    ) as store:
        assert store.graphs["features"].csc()[0].tolist() == indptr.tolist()
        assert store.graphs["features"].csc()[1].tolist() == [0, 1, 2, 0, 1]
    for name in ("given", "sorted"):
        assert featstore.verify(tmp_path / name).ok


def test_tables_with_and_without_graphs(tmp_path: Path) -> None:
    edges = star(40, 200)
    tables = {"user": features(40), "item": features(7), "plain": features(3)}
    graph = {"user": edges.index, "item": np.array([[0, 6, 6], [3, 3, 0]])}
    with featstore.pack(
        tmp_path / "s", tables, graph=graph, order={"user": "degree", "item": "given"}
    ) as store:
        assert set(store.graphs) == {"user", "item"}
        assert store.graphs["item"].csc()[0].tolist() == [0, 1, 1, 1, 3, 3, 3, 3]
        assert store.graphs["item"].csc()[1].tolist() == [6, 0, 6]
        assert store.graphs["user"].csc()[1].tolist() == edges.csc[1].tolist()
        told = str(store.graphs["user"])
        assert all(part in told for part in ("40 nodes of user", "200, with no values", "hubs   1"))
        assert set(store.tables) == set(tables), "the tables of graphs are no tables of features"
        with store.reader(memory="16MiB") as reader:
            assert set(reader.read({"plain": [2], "user": [1]})) == {"plain", "user"}
        assert store.table("item/sources").rows == 3
        with pytest.raises(KeyError, match="no table 'item/other'; it has 'user'"):
            store.table("item/other")
    assert featstore.verify(tmp_path / "s").ok


def test_stores_without_topology_are_as_before(tmp_path: Path) -> None:
    edges = star(40, 200)
    for name, options in (("off", {"graph": edges.index, "topology": False}), ("none", {})):
        with featstore.pack(tmp_path / name, features(40), order="given", **options) as store:
            assert store.graphs == {}
            assert store.manifest.reader_features == []
            assert '"graphs"' not in (tmp_path / name / "featstore.json").read_text()
        assert not list((tmp_path / name).rglob("graphs"))


@pytest.mark.parametrize(
    "options", [{"hubs": -0.1}, {"hubs": 1.1}, {"hubs": float("nan")}, {"hub_rank": "pagerank"}]
)
def test_options_that_cannot_be(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(
        SourceError, match=r"hubs must be a number of at least 0|hub_rank must be one of 'degree'"
    ):
        featstore.pack(tmp_path / "s", features(4), **options)
    assert not (tmp_path / "s").exists()


def test_int64_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 2^31 nodes, sources are int64; here by way of the function that says so."""
    for module in (topology, by_row):
        monkeypatch.setattr(module, "node_dtype", lambda nodes: np.dtype(np.int64))
    edges = star(40, 200)
    with featstore.pack(tmp_path / "s", features(40), graph=edges.index, order="degree", hubs=0.1) as store:
        assert store.table("features/sources").dtype == np.int64
        assert store.graphs["features"].csc()[1].tolist() == edges.csc[1].tolist()
        assert store.graphs["features"].hub_rows()[0].dtype == np.int64
        seeds = np.arange(0, 40, 3)
        expected = NeighborSampler(*store.graphs["features"].csc(), (3, 2), 0).sample(seeds)
        with store.sampler((3, 2), memory="8MiB") as sampler:
            assert sampler.sample(seeds).node.tolist() == expected.node.tolist()
            assert sampler.stats().hit_rate == 1.0
    assert featstore.verify(tmp_path / "s").ok


# Kernels.


@settings(max_examples=30)
@given(
    edges=graphs(), seed=st.integers(0, 99), dtype=st.sampled_from([np.int32, np.int64]), cut=st.floats(0, 1)
)
def test_take_lists_is_its_twin(edges: Edges, seed: int, dtype: type, cut: float) -> None:
    """Lists in any order, in two runs of rows."""
    rng = np.random.default_rng(seed)
    node_of_row = rng.permutation(edges.nodes).astype(np.int32)
    row_of_node = np.argsort(node_of_row).astype(np.int32)
    expected = edges.lists(node_of_row)
    indptr, indices = edges.csc
    for low, high in pairwise(indptr):
        rng.shuffle(indices[low:high])
    offsets = np.cumsum([0, *map(len, expected)])
    out = np.full(len(indices), -1, dtype)
    bounds = [0, int(cut * edges.nodes), edges.nodes]
    ids = rng.permutation(len(indices)).astype(dtype)
    places = [np.arange(indptr[v], indptr[v + 1]) for v in node_of_row]
    for kept in (None, ids, NO_IDS):  # no ids, such, or places
        out_ids = NO_IDS if kept is None else np.full(len(indices), -1, dtype)
        lists = (indptr, indices.astype(dtype), ids if kept is None else kept)
        arguments = (*lists, node_of_row, row_of_node, edges.nodes, offsets)
        for first, last in pairwise(bounds):
            assert by_row.take_lists(*arguments, first, last, out, out_ids)
        assert out.tolist() == [row for one in expected for row in one.tolist()]
        if kept is not None:
            own = kept if len(kept) else np.arange(len(indices))
            twin = [own[at[np.lexsort((own[at], indices[at]))]] for at in places]
            # of a list that ascends already, ids stay as they stand
            twin = [
                own[at] if (np.diff(indices[at]) >= 0).all() else ids
                for ids, at in zip(twin, places, strict=True)
            ]
            assert out_ids.tolist() == [e for one in twin for e in one.tolist()]
    if len(indices):
        lists[1][rng.integers(len(indices))] = rng.choice([-1, edges.nodes])
        assert not by_row.take_lists(*arguments, 0, edges.nodes, out, out_ids)


@settings(max_examples=30)
@given(edges=graphs(), parts=st.integers(1, 6), block=st.integers(1, 50), seed=st.integers(0, 99))
def test_count_external_is_its_twin(edges: Edges, parts: int, block: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(0, edges.nodes + 1, parts - 1))
    partition_offsets = np.concatenate([[0], cuts, [edges.nodes]]).astype(np.int64)  # some of them empty
    offsets, sources = edges.csc
    sources = sources.astype(np.int32)
    part = np.searchsorted(partition_offsets, np.arange(edges.nodes), side="right")
    target = np.repeat(np.arange(edges.nodes), np.diff(offsets))
    wanted = np.bincount(sources[part[sources] != part[target]], minlength=edges.nodes)
    counts = np.zeros(edges.nodes, np.uint32)
    row = partition = 0
    for first in range(0, len(sources), block):
        piece = sources[first : first + block]
        row, partition = topology.count_external(
            offsets, piece, first, row, partition, partition_offsets, counts
        )
        assert (row, part[row]) == (target[first + len(piece) - 1], partition + 1)
    assert counts.tolist() == wanted.tolist()


def test_counts_of_sources_stop_where_they_end() -> None:
    counts = np.full(2, 2**32 - 2, np.uint32)
    offsets, block, parts = np.array([0, 0, 3]), np.zeros(3, np.int32), np.array([0, 1, 2])
    topology.count_external(offsets, block, 0, 0, 0, parts, counts)
    assert counts.tolist() == [2**32 - 1, 2**32 - 2]


def test_more_nodes_than_can_be_ranked_are_refused_before_they_are_counted() -> None:
    many = SimpleNamespace(graph=SimpleNamespace(nodes=2**32))
    with pytest.raises(SourceError, match="without a graph"):
        topology._rank_external(many, None)  # type: ignore[arg-type]


# Trouble.


class StoppingDisk(QuickDisk):
    """Fails at the N-th write below ``graphs/``."""

    def __init__(self, at: int) -> None:
        self.left = at

    def write(self, file: File, offset: int, data: Any) -> None:
        if "graphs" in file.path.parts:
            self.left -= 1
            if self.left < 0:
                raise DeviceError(5, file.path, offset, "write")
        super().write(file, offset, data)


@pytest.mark.usefixtures("tiny_chunks")
@pytest.mark.parametrize("order", ["permutation", "ldg"])
def test_a_pack_that_stopped_in_its_graph_goes_on(tmp_path: Path, order: str) -> None:
    edges = star(200, 4000)
    permutation = np.random.default_rng(0).permutation(200) if order == "permutation" else None
    options: dict[str, Any] = {
        "graph": edges.index,
        "order": order,
        "permutation": permutation,
        "hubs": 0.2,
        "hub_rank": "external",
        "edge_ids": True,
    }
    whole = tmp_path / "whole"
    featstore.pack(whole, features(200), disk=QuickDisk(), **options).close()
    wanted, at, stopped = tree(whole), 0, 0
    while True:
        path = tmp_path / f"s{at}"
        try:
            featstore.pack(path, features(200), disk=StoppingDisk(at), **options).close()
        except DeviceError:
            stopped += 1
        else:
            break
        assert not (path / "featstore.json").exists()
        featstore.pack(path, features(200), disk=QuickDisk(), resume=True, **options).close()
        assert tree(path) == wanted
        at += 3
    assert tree(path) == wanted
    assert stopped >= 8
    assert any("hub_edge_ids/rows" in path for path in wanted)


def test_resuming_with_another_topology_is_refused(tmp_path: Path) -> None:
    edges = star(50, 300)
    with pytest.raises(DeviceError):
        featstore.pack(tmp_path / "s", features(50), graph=edges.index, order="degree", disk=StoppingDisk(3))
    others: tuple[dict[str, Any], ...] = (
        {"hubs": 0.5}, {"hub_rank": "external"}, {"topology": False}, {"edge_ids": True},
    )  # fmt: skip
    for other in others:
        said = "edge_ids" if "edge_ids" in other else "topology"
        with pytest.raises(SourceError, match=f"cannot resume: the unfinished pack had {said}"):
            featstore.pack(
                tmp_path / "s", features(50), graph=edges.index, order="degree", resume=True, **other
            )
    featstore.pack(tmp_path / "s", features(50), graph=edges.index, order="degree", resume=True).close()
    assert featstore.verify(tmp_path / "s").ok


def test_the_budget_named_works(tmp_path: Path) -> None:
    """A node with most of all edges: its list has to be held to be sorted."""
    nodes, count = 1000, 2_500_000
    index = np.arange(count)
    edges = Edges(nodes, index % nodes, np.where(index % 50 == 0, index % 997, 0))
    indptr, indices = edges.csc
    options: dict[str, Any] = {
        "graph": (indptr, indices.astype(np.int32)),
        "order": "permutation",
        "hubs": 0.001,
        "disk": QuickDisk(),
    }
    options["permutation"] = np.arange(nodes)[::-1].copy()
    for name, memory in (("a", 38 << 20), ("b", 40 << 20)):
        with pytest.raises(BudgetError, match="order of the rows") as caught:
            featstore.pack(tmp_path / name, features(nodes), memory=memory, **options)
        assert memory < caught.value.needed_bytes < 44 << 20
        assert not list((tmp_path / name).glob("g*")), "nothing that another budget could resume"
    with featstore.pack(
        tmp_path / "c", features(nodes), memory=caught.value.needed_bytes, **options
    ) as store:
        assert store.graphs["features"].csc()[1].tolist() == indices.tolist()


def test_a_full_disk_is_said_before_the_first_byte(tmp_path: Path) -> None:
    class FullDisk(QuickDisk):
        def free_bytes(self, path: Path) -> int:
            return 4000 if path.suffix == ".spill" else super().free_bytes(path)

    edges = star(50, 3000)
    with pytest.raises(DiskFullError):
        featstore.pack(tmp_path / "s", features(50), graph=edges.index, order="degree", disk=FullDisk())


@pytest.fixture
def misled(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Packs of this test write other numbers in place of those that ``misled`` names: checksums fit, what
    they say does not."""
    wrong: dict[str, Any] = {}
    write = topology.write_vector

    def write_wrong(catalogue: Catalogue, base: str, blocks: Any, rows: int, dtype: Any) -> Any:
        part = base.rpartition("/")[2]
        if part in wrong:
            whole = np.concatenate([np.asarray(b) for b in blocks]).copy()
            whole[wrong[part][0]] = wrong[part][1]
            blocks = [whole]
        return write(catalogue, base, blocks, rows, dtype)

    monkeypatch.setattr(topology, "write_vector", write_wrong)
    return wrong


@pytest.mark.parametrize(
    ("part", "place", "value", "message"),
    [("offsets", 0, 1, "do not run from 0 to 200"), ("offsets", 40, 201, "do not run from 0 to 200"),
     ("offsets", 7, 10**6, "do not run from 0 to 200"), ("sources", 3, -1, "outside"),
     ("sources", 3, 40, "outside")],
)  # fmt: skip
@pytest.mark.parametrize("order", ["given", "degree"])
def test_a_graph_that_says_the_impossible_is_refused(
    tmp_path: Path, misled: dict[str, Any], order: str, part: str, place: int, value: int, message: str
) -> None:
    edges = star(40, 200)
    misled[part] = place, value
    store = featstore.pack(tmp_path / "s", features(40), graph=edges.index, order=order)
    with store, pytest.raises(FormatError, match=message):
        store.graphs["features"].csc()
    assert "graph" in {p.what for p in featstore.verify(tmp_path / "s").problems}


def test_hubs_that_are_no_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = topology.write_array

    def write_wrong(catalogue: Catalogue, path: str, values: Any) -> Any:
        return write(catalogue, path, values + (100 if path.endswith("hub_rows") else 0))

    monkeypatch.setattr(topology, "write_array", write_wrong)
    store = featstore.pack(tmp_path / "s", features(40), graph=star(40, 200).index, order="given", hubs=0.2)
    with store, pytest.raises(FormatError, match=r"a hub of .* points outside the 40 rows"):
        store.graphs["features"].hub_rows()


def test_graphs_are_given_as_they_are_held(tmp_path: Path) -> None:
    """A graph that was opened before, mapped from a file that packing must leave alone."""
    edges = star(60, 500)
    indptr, indices = edges.csc
    file = tmp_path / "indices.bin"
    indices.astype(np.int32).tofile(file)
    mapped = np.memmap(file, np.int32, mode="r", shape=(500,))
    graph = CscGraph(indptr, mapped, {"kind": "test"})
    for order in ("given", "degree"):
        with featstore.pack(tmp_path / order, features(60), graph=graph, order=order, hubs=0.1) as store:
            assert store.graphs["features"].csc()[1].tolist() == edges.csc[1].tolist()
    assert file.stat().st_size == 2000
