"""Rows of edges stay beside the nodes that their edges lead to."""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_split import planted, rows_of

import featstore
from featstore.errors import BudgetError, FeatstoreWarning, SourceError, StoreExistsError
from featstore.storage.disk import Disk

NODES, HOSTS = 2000, 3
RNG = np.random.default_rng(4)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disk, "fsync", lambda *_: None)
    monkeypatch.setattr(Disk, "fsync_dir", lambda *_: None)


def planted_edges() -> np.ndarray:
    """Edges of five communities, in no order, from source to target."""
    indptr, indices = planted(5, NODES // 5, 6)
    edges = np.stack([indices, np.repeat(np.arange(NODES), np.diff(indptr))])
    return np.ascontiguousarray(edges[:, RNG.permutation(edges.shape[1])])


EDGES = planted_edges()


def pack(path: Path, typed: bool, order: str = "given", **options: Any) -> Path:
    count = EDGES.shape[1]
    rows = np.arange(2 * count, dtype=np.float32).reshape(count, 2)
    name = "a__r__a" if typed else "edge_features"
    node = "a" if typed else "features"
    tables: dict[str, Any] = {node: np.arange(4 * NODES, dtype=np.float32).reshape(NODES, 4), name: rows}
    if order == "permutation":
        options |= {"permutation": {name: RNG.permutation(count)}, "order": {name: "permutation"}}
    graph = {("a", "r", "a"): EDGES} if typed else {node: EDGES}
    featstore.pack(path, tables, graph=graph, partitions={node: 64}, **options).close()
    return path


def owners(out: Path) -> dict[str, np.ndarray]:
    with featstore.open(out / "topology") as topology:
        return {name: rows_of(topology, name) for name in topology.tables}


@pytest.mark.parametrize("split_topology", [False, True])
@pytest.mark.parametrize("order", ["given", "permutation"])
@pytest.mark.parametrize("typed", [False, True])
def test_each_is_where_its_target_is(tmp_path: Path, typed: bool, order: str, split_topology: bool) -> None:
    """Whatever order their table is in; rows of both tables are even, and the parts have these rows."""
    path = pack(tmp_path / "s", typed, order)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FeatstoreWarning)
        featstore.split(path, HOSTS, tmp_path / "out", split_topology=split_topology)
    found = owners(tmp_path / "out")
    nodes, edges = found["a" if typed else "features"], found["a__r__a" if typed else "edge_features"]
    assert np.array_equal(edges, nodes[EDGES[1]])
    assert np.bincount(edges, minlength=HOSTS).max() <= 1.05 * len(edges) / HOSTS
    assert np.bincount(nodes, minlength=HOSTS).max() <= 1.05 * NODES / HOSTS
    for host in range(HOSTS):
        with featstore.open(tmp_path / "out" / f"host-{host}") as part:
            name = "a__r__a" if typed else "edge_features"
            assert rows_of(part, name)[:, 0].tolist() == (2 * np.flatnonzero(edges == host)).tolist()
        assert featstore.verify(tmp_path / "out" / f"host-{host}").ok


def test_straight_from_features_it_is_the_same(tmp_path: Path) -> None:
    path = pack(tmp_path / "s", False)
    featstore.split(path, HOSTS, tmp_path / "out")
    with featstore.open(path) as store:
        tables = {name: rows_of(store, name) for name in store.tables}
    featstore.split_features(
        tables, HOSTS, tmp_path / "straight", graph={"features": EDGES}, partitions={"features": 64}
    )
    for name, owner in owners(tmp_path / "out").items():
        assert np.array_equal(owners(tmp_path / "straight")[name], owner), name


@pytest.mark.parametrize("options", [{"edge_ids": False}, {"topology": False}])
def test_without_numbers_of_edges_they_are_dealt_out(tmp_path: Path, options: dict[str, Any]) -> None:
    """Nobody knows then which row is of which edge."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FeatstoreWarning)  # that no stored graph numbers the rows
        path = pack(tmp_path / "s", False, **options)
        featstore.split(path, HOSTS, tmp_path / "out")
    edges, count = owners(tmp_path / "out")["edge_features"], EDGES.shape[1]
    bounds = [count * host // HOSTS for host in range(1, HOSTS)]
    assert np.array_equal(edges, np.searchsorted(bounds, np.arange(count), side="right"))


def test_a_host_with_too_many_is_told(tmp_path: Path) -> None:
    """A node to which most edges lead is on one host, and with it their rows."""
    edges = np.stack([np.arange(NODES), np.zeros(NODES, np.int64)])
    rows = {"features": np.ones((NODES, 2), np.float32), "edge_features": np.ones((NODES, 2), np.float32)}
    featstore.pack(tmp_path / "s", rows, graph={"features": edges}, order={"features": "given"}).close()
    with pytest.warns(FeatstoreWarning, match=r"'edge_features': host \d has 2,000 rows, 2\.00 times"):
        featstore.split(tmp_path / "s", 2, tmp_path / "out")
    assert len(set(owners(tmp_path / "out")["edge_features"].tolist())) == 1


def test_memory_and_resuming(tmp_path: Path) -> None:
    """The result does not depend on the memory, too little of it is a BudgetError that names enough."""
    path = pack(tmp_path / "s", True)
    memory = 1 << 20
    for _ in range(30):
        try:
            featstore.split(path, 2, tmp_path / "least", memory=memory)
        except BudgetError as error:
            assert error.needed_bytes > memory
            memory = error.needed_bytes
        else:
            break
    else:
        raise AssertionError("no memory that an error named was enough")
    featstore.split(path, 2, tmp_path / "most", memory="1GiB")
    for name, owner in owners(tmp_path / "least").items():
        assert np.array_equal(owners(tmp_path / "most")[name], owner)


@pytest.mark.parametrize("at", ["topology: edge_features", "host-1: features"])
def test_what_an_earlier_version_began_is_not_gone_on_with(
    tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dealt rows of edges out otherwise, and its parts would have them twice, or not at all."""
    path, out = pack(tmp_path / "s", False), tmp_path / "out"

    def stop(progress: Any) -> None:
        if at in (progress.table, progress.stage):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for module in ("plan", "split"):
            patch.setattr(f"featstore.packing.split.{module}.graph_of_rows", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            featstore.split(path, 2, out, progress=stop)
    with pytest.raises((SourceError, StoreExistsError), match="--overwrite"):
        featstore.split(path, 2, out, resume=True)
    featstore.split(path, 2, out, overwrite=True)
    assert np.array_equal(owners(out)["edge_features"], owners(out)["features"][EDGES[1]])


def test_what_cannot_be_even_leaves_all_else_as_it_was(tmp_path: Path) -> None:
    """A node to which a third of the edges lead: rows and training nodes are as even as without rows of
    edges, in the store's own partitions, and the warning is of the rows of edges alone."""
    hub = np.stack([RNG.integers(0, NODES, EDGES.shape[1] // 2), np.zeros(EDGES.shape[1] // 2, np.int64)])
    edges = np.concatenate([EDGES, hub], axis=1)
    tables = {"features": np.ones((NODES, 2), np.float32), "edge_features": np.ones((edges.shape[1], 1))}
    options: dict[str, Any] = {"graph": {"features": edges}, "partitions": {"features": 64}}
    featstore.pack(tmp_path / "s", tables, **options).close()
    train = np.arange(0, NODES, 3)
    with pytest.warns(FeatstoreWarning) as told:
        featstore.split(tmp_path / "s", 4, tmp_path / "out", train=train)
    assert [
        ("'edge_features'" in str(one.message), "its disk needs so much more" in str(one.message))
        for one in told
    ] == [(True, True)]
    found = owners(tmp_path / "out")
    assert np.bincount(found["features"], minlength=4).max() <= 1.05 * NODES / 4
    assert np.bincount(found["features"][train], minlength=4).max() <= 1.05 * len(train) / 4
    assert np.array_equal(found["edge_features"], found["features"][edges[1]])
    with featstore.open(tmp_path / "s") as store:  # whole partitions went to a host
        table = store.table("features")
        nodes, offsets = table.node_of_row(), table.partition_offsets
        rows = found["features"] if nodes is None else found["features"][nodes]
        assert all(len(set(rows[a:b].tolist())) <= 1 for a, b in pairwise(offsets))
