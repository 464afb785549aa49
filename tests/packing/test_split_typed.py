"""Splits of stores with edge types, weights and times: what is in which store of the family, who owns what,
and what is refused."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_split import graph_of, halo, rows_of, tree

import featstore
from featstore.errors import ArgumentError, BudgetError, FeatstoreWarning
from featstore.packing.split import union
from featstore.storage.disk import Disk

sys.path.append(str(Path(__file__).parents[1] / "crash"))
from disks import FailingDisk, Lost

V1 = Path(__file__).parents[2] / "formats/v1"
WRITES, CITES, HAS = ("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "in", "venue")
NODES = {"paper": 900, "author": 400, "venue": 12}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disk, "fsync", lambda *_: None)
    monkeypatch.setattr(Disk, "fsync_dir", lambda *_: None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four communities of papers and authors, and venues without features; each with what edges may have."""
    rng, path = np.random.default_rng(2), tmp_path_factory.mktemp("typed") / "s"
    edges: dict[Any, np.ndarray] = {}
    for of, count in ((WRITES, 3000), (CITES, 6000), (HAS, 900)):
        targets = rng.integers(0, NODES[of[2]], count)
        near = targets * 4 // NODES[of[2]] * (NODES[of[0]] // 4) + rng.integers(0, NODES[of[0]] // 4, count)
        far = rng.integers(0, NODES[of[0]], count)
        edges[of] = np.stack([np.where(rng.random(count) < 0.9, near, far), targets])
    tables: dict[str, Any] = {
        "paper": rng.standard_normal((900, 5), np.float32), "author": rng.integers(0, 99, (400, 2), np.int16),
        "venue": 12, "author__writes__paper": np.arange(3000.0),
    }  # fmt: skip
    featstore.pack(
        path, tables, graph=edges, hubs=0.1, edge_ids=True, memory="256MiB",
        edge_weights={CITES: rng.random(6000)}, edge_times={WRITES: rng.integers(0, 9, 3000)},
        arrays={"paper.train": np.arange(0, 900, 3), "y": np.arange(7)},
    ).close()  # fmt: skip
    return path


def hosts_of(out: Path) -> dict[str, np.ndarray]:
    with featstore.open(out / "topology") as topology:
        return {name: rows_of(topology, name) for name in topology.tables}


def check_topology(store: featstore.Store, topology: featstore.Store) -> None:
    """All graphs as they are, with all that there is of their edges."""
    assert topology.edge_types == store.edge_types
    for name, graph in store.graphs.items():
        other = topology.graphs[name]
        assert (other.edge_type, other.hubs) == (graph.edge_type, graph.hubs)
        for one, two in zip(graph.csc(), other.csc(), strict=True):
            assert np.array_equal(one, two)
    for name, entry in store.manifest.all_tables.items():
        if "/" in name:
            assert topology.manifest.all_tables[name].statistics == entry.statistics, name
    for name in store.arrays:
        assert np.array_equal(topology.arrays[name], store.arrays[name])


def check_part(store: featstore.Store, part: featstore.Store, host: int, owner: dict[str, Any]) -> None:
    """A host's rows, its lists among them by local ids, and whom they name besides."""
    family = part.manifest.family
    assert family is not None
    assert part.edge_types == store.edge_types
    assert part.manifest.featureless == store.manifest.featureless
    for name in store.tables:
        assert rows_of(part, name).tobytes() == rows_of(store, name)[owner[name] == host].tobytes()
    for name, graph in store.graphs.items():
        assert not part.graphs[name].has_edge_ids
        sources_owned, own = owner[graph.source_table.name] == host, owner[graph.table.name] == host
        indptr, indices = graph.csc()
        rank, lists = np.cumsum(sources_owned) - 1, []
        for node in np.flatnonzero(own):
            sources = indices[indptr[node] : indptr[node + 1]]
            lists.append(rank[sources[sources_owned[sources]]].tolist())
        found_ptr, found = part.graphs[name].csc()
        assert [found[a:b].tolist() for a, b in pairwise(found_ptr)] == lists
        named = indices[np.repeat(own, np.diff(indptr))]
        ids, uses = np.unique(named[~sources_owned[named]], return_counts=True)
        assert np.array_equal(part.arrays[f"{name}.halo_ids"], ids)
        assert np.array_equal(part.arrays[f"{name}.halo_uses"], uses)
        assert family.remote_edges[name][host] == uses.sum()


def independent() -> Any:
    spec = importlib.util.spec_from_file_location("split_reader", V1 / "reader.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_typed_store_is_split_whole(made: Path, tmp_path: Path) -> None:
    """Every member is what it should be, and whole to verify and to the reader that knows the specification
    alone; types are even, and few edges cut; scratch files and resuming change no byte."""
    out, reader = tmp_path / "out", independent()
    with featstore.open(made) as store:
        featstore.split(store, 3, out, train="paper.train", halo_disk="1x")
        owner = hosts_of(out)
        with featstore.open(out / "topology") as topology:
            check_topology(store, topology)
        for host in range(3):
            with featstore.open(out / f"host-{host}") as part:
                check_part(store, part, host, owner)
                assert set(part.tables) - set(store.tables) == {"paper.halo", "author.halo"}
                assert set(part.node_types) == set(store.node_types)
                for name in ("paper", "author"):
                    nodes = part.arrays[f"{name}.halo_nodes"]
                    assert len(nodes)
                    assert rows_of(part, f"{name}.halo").tobytes() == rows_of(store, name)[nodes].tobytes()
        for member in ("topology", "host-0", "host-1", "host-2"):
            assert featstore.verify(out / member).ok
            found = reader.Store(out / member)
            assert found.edge_types.keys() == store.graphs.keys()
        counts = {name: np.bincount(owner[name], minlength=3) for name in store.tables}
        for name in ("paper", "author"):
            assert counts[name].max() <= 1.05 * NODES[name] / 3
        assert counts["venue"].max() <= 5
        assert np.bincount(owner["paper"][::3], minlength=3).max() <= 1.05 * 100
        family = topology.manifest.family
        assert family is not None
        assert sum(map(sum, family.remote_edges.values())) < 0.5 * 9900  # by chance two thirds

        again: dict[str, Any] = {"train": "paper.train", "halo_disk": "1x", "memory": "128MiB"}
        with pytest.raises(Lost):
            featstore.split(store, 3, tmp_path / "again", disk=FailingDisk(90), **again)
        assert not (tmp_path / "again/topology/featstore.json").exists()
        with pytest.MonkeyPatch.context() as patch:
            build, little = union.build_csc, 2**20
            patch.setattr(union, "build_csc", lambda stream, nodes, _, at: build(stream, nodes, little, at))
            featstore.split(store, 3, tmp_path / "again", resume=True, **again)
    assert tree(out) == tree(tmp_path / "again")


@pytest.mark.parametrize("limit", [600, 2000, 6000, 10**6, "0.3x"])
def test_copies_of_all_types_have_one_limit(made: Path, tmp_path: Path, limit: Any) -> None:
    """Each type has as much of it as of what its lists name, those that are named most often first."""
    featstore.split(made, 3, tmp_path / "out", halo_disk=limit)
    for host in range(3):
        with featstore.open(tmp_path / f"out/host-{host}") as part:
            tables = {name: part.tables[name] for name in ("paper", "author")}
            own = sum(table.rows * table.row_bytes for table in tables.values())
            most = int(0.3 * own) if limit == "0.3x" else limit
            named, kept = {}, {}
            for name, table in tables.items():
                ids = [part.arrays[f"{g}.halo_ids"] for g, one in part.graphs.items()
                       if one.source_table.name == name]  # fmt: skip
                named[name] = len(np.unique(np.concatenate(ids))) * table.row_bytes
                kept[name] = part.tables[f"{name}.halo"].rows * table.row_bytes
            total = sum(named.values())
            assert sum(kept.values()) <= most
            for name, table in tables.items():
                fair = min(named[name], most * named[name] / total)
                assert fair - table.row_bytes < kept[name] <= fair


@pytest.mark.parametrize("hosts", [2, 5])
def test_partitions_of_types_belong_together_in_parts(tmp_path: Path, hosts: int) -> None:
    """Also those in which a type has no node: partition p of each is of the same collection, as in the store,
    and mode partitions trains on parts."""
    rng, count = np.random.default_rng(4), {"paper": 2000, "venue": 30}
    venues = np.arange(2000) * 30 // 2000
    edges = {
        ("paper", "in", "venue"): np.stack([np.arange(2000), venues]),
        ("venue", "has", "paper"): np.stack([venues, np.arange(2000)]),
        ("paper", "cites", "paper"): np.stack([rng.integers(0, 2000, 5000)] * 2) // [[1], [3]],
    }
    tables = {name: np.arange(rows, dtype=np.float32)[:, None] for name, rows in count.items()}
    with featstore.pack(
        tmp_path / "s", tables, graph=edges, order="multilevel", partitions=64, memory="256MiB"
    ) as store:
        featstore.split(store, hosts, tmp_path / "out")
        offsets = {name: store.tables[name].partition_offsets for name in count}
        owner = hosts_of(tmp_path / "out")
        owner = {name: owner[name][store.tables[name].node_of_row()] for name in count}
        for host in range(hosts):
            with featstore.open(tmp_path / f"out/host-{host}") as part:
                mine = {name: offsets_of_host(offsets[name], owner[name] == host) for name in count}
                kept = (np.diff(mine["paper"]) > 0) | (np.diff(mine["venue"]) > 0)
                for name in count:
                    found = part.tables[name].partition_offsets
                    assert np.diff(found).tolist() == np.diff(mine[name])[kept].tolist()
                rows = part.tables["paper"].rows
                said: dict[str, Any] = {"mode": "partitions", "fanouts": (3, 2), "memory": "48MiB"}
                with part.loader(seeds=("paper", np.arange(rows)), batch_size=64, **said) as loader:
                    seen = np.concatenate([batch.n_id["paper"][: batch.batch_size] for batch in loader])
                assert sorted(seen.tolist()) == list(range(rows))


def offsets_of_host(offsets: np.ndarray, own_rows: np.ndarray) -> np.ndarray:
    """Where a store's partitions begin among the rows of a host."""
    return np.append(0, np.cumsum(own_rows))[offsets]


def test_a_budget_that_is_too_small_names_one_that_is_not(made: Path, tmp_path: Path) -> None:
    memory = 2**23
    for _ in range(10):
        try:
            begun = (tmp_path / "out/topology/featstore.json").exists()
            featstore.split(made, 2, tmp_path / "out", memory=memory, resume=begun)
        except BudgetError as error:
            assert error.given_bytes == memory < error.needed_bytes
            memory = error.needed_bytes
        else:
            break
    assert featstore.verify(tmp_path / "out/host-1").ok


def test_weights_and_times_of_an_untyped_graph_are_in_the_topology(tmp_path: Path) -> None:
    indptr, indices = graph_of(200, 5, 1)
    edges = np.stack([indices, np.repeat(np.arange(200), np.diff(indptr))])
    rng = np.random.default_rng(0)
    values = {"edge_weights": rng.random(edges.shape[1]), "edge_times": rng.integers(0, 9, edges.shape[1])}
    options: dict[str, Any] = {"order": "ldg", "partitions": 20, "hubs": 0.1, **values}
    rows = np.arange(400.0).reshape(200, 2)
    with (
        warnings.catch_warnings(),
        featstore.pack(tmp_path / "s", rows, graph=edges, **options) as store,
    ):
        warnings.simplefilter("ignore", FeatstoreWarning)  # a graph of no communities
        featstore.split(store, 2, tmp_path / "out")
        (name,), (graph,) = store.graphs, store.graphs.values()
        owner = hosts_of(tmp_path / "out")["features"]
        with featstore.open(tmp_path / "out/topology") as topology:
            check_topology(store, topology)
            other = topology.graphs[name]
            assert np.array_equal(other.weights(), graph.weights())
            assert np.array_equal(other.times(), graph.times())
        for host in range(2):
            assert featstore.verify(tmp_path / f"out/host-{host}").ok
            with featstore.open(tmp_path / f"out/host-{host}") as part:
                assert part.graphs[name].edges > 100
                assert all(f"{name}/{one}" in part.manifest.all_tables for one in ("weights", "times"))
                ids, _ = halo(*graph.csc(), owner == host)
                assert np.array_equal(part.arrays[f"{name}.halo_ids"], ids)


def test_what_is_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="train must say whose nodes they are"):
        featstore.split(made, 2, tmp_path / "out", train=[1, 2])
    with pytest.raises(ArgumentError, match="at most the 900 rows"):
        featstore.split(made, 901, tmp_path / "out")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("*/*"))
