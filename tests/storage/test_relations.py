"""Which table and which graph is meant where nobody says so, and what happens where that is not certain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import FeatstoreError, IdError, SourceError
from featstore.loaders.mega.sets import PartitionSets
from featstore.loaders.online.loader import OnlineLoader
from featstore.sampling.batches import sample_batches
from featstore.sampling.minibatch import table_of
from featstore.storage.relations import graph_of, is_edge_table, node_tables

NODES, EDGES = 300, 2000
SMALL = "8MiB"


def rows(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 3)).astype(np.float32)


def edges_of() -> np.ndarray:
    return np.random.default_rng(2).integers(0, NODES, (2, EDGES))


def packed(pack: Any, path: Path, **tables: int) -> featstore.Store:
    """A store of tables with so many rows each; the first has a graph."""
    first = next(iter(tables))
    features = {name: rows(count, seed) for seed, (name, count) in enumerate(tables.items())}
    store: featstore.Store = pack(path, features, graph={first: edges_of()}, topology=True)
    return store


def test_edge_tables_are_known_by_the_names_that_packing_gives() -> None:
    assert node_tables(["features", "edge_features"]) == ["features"]
    assert node_tables(["paper", "author", "paper__cites__paper", "author__writes__book"]) == [
        "paper",
        "author",
    ]
    assert node_tables(["my__own__name"]) == ["my__own__name"], "no other table is its end"
    assert not is_edge_table("features", ["features"])
    assert node_tables(["edge_features"]) == []


def test_ids_without_a_type_are_of_the_nodes(tmp_path: Path, pack: Any) -> None:
    x = rows(NODES, 0)
    with packed(pack, tmp_path / "s", features=NODES, edge_features=EDGES) as store:
        batches = [np.arange(5, 40), np.arange(35)]
        for mode in ("online", "compiled"):
            with store.loader(batches, mode=mode, memory="64MiB") as loader:
                for batch, ids in zip(loader, batches, strict=True):
                    np.testing.assert_array_equal(batch.x, x[ids])
        with store.sampler([3], memory=SMALL) as sampler:
            assert sampler.graph.name == "features"
        with featstore.SharedBuffer(store, memory="16MiB") as shared, shared.client() as client:
            np.testing.assert_array_equal(client.read([7]), x[[7]])
        assert len(featstore.PartitionOrder(store, np.arange(50), batch_size=10)) == 50


def test_a_pyg_data_with_features_of_edges(tmp_path: Path, pack: Any) -> None:
    pytest.importorskip("torch_geometric")
    import torch
    from torch_geometric.data import Data

    x, edges = rows(NODES, 0), torch.from_numpy(edges_of())
    data = Data(x=torch.from_numpy(x), edge_index=edges, edge_attr=torch.from_numpy(rows(EDGES, 1)))
    with pack(tmp_path / "s", data, topology=True) as store:
        assert set(store.tables) == {"features", "edge_features"}
        with store.sampler([3, 2], memory=SMALL) as sampler:
            batches = [sampler.sample(np.arange(low, low + 20), low) for low in range(0, NODES, 20)]
        with OnlineLoader(store, batches, memory="64MiB") as loader:
            for batch, sampled in zip(loader, batches, strict=True):
                np.testing.assert_array_equal(batch.x, x[sampled.node])


def test_ids_without_a_type_are_of_no_table_that_is_not_certain(tmp_path: Path, pack: Any) -> None:
    with packed(pack, tmp_path / "s", paper=NODES, author=70) as store:
        with pytest.raises(
            SourceError, match=r"several tables of nodes: 'paper', 'author'; say which with nodes="
        ):
            table_of(store, "", "the mini-batches have")
        assert table_of(store, "author", "") == "author"
        with pytest.raises(SourceError, match="'book'; the store's tables are 'paper', 'author'"):
            table_of(store, "book", "the mini-batches have node type")
        with pytest.raises(SourceError, match="2 tables of nodes"):
            featstore.PartitionOrder(store, np.arange(50), batch_size=10)
        with featstore.SharedBuffer(store, memory="16MiB") as shared, shared.client() as client:
            assert client.tables == ["paper", "author"]
            with pytest.raises(IdError, match="2 tables; say which"):
                client.read([7])
    edges = pack(tmp_path / "edges", {"edge_features": rows(EDGES, 0)})
    with edges as store:
        with pytest.raises(SourceError, match="tables of edges alone"):
            table_of(store, "", "the mini-batches have")
        with pytest.raises(SourceError, match="tables of edges alone"):
            featstore.SharedBuffer(store, memory="16MiB")


@pytest.mark.parametrize("others", [{"author": 70}, {"paper__cites__paper": EDGES}])
def test_one_relation_of_several_is_not_sampled_unasked(
    tmp_path: Path, pack: Any, others: dict[str, int]
) -> None:
    with packed(pack, tmp_path / "s", paper=NODES, **others) as store:
        asks: list[Any] = [
            lambda **graph: store.sampler([3], memory=SMALL, **graph).close(),
            lambda **graph: PartitionSets(store, memory="64MiB", **graph).close(),
            lambda **graph: sample_batches(store, np.arange(9), [2], 3, **graph).close(),
        ]
        for ask in asks:
            with pytest.raises(SourceError, match="one relation of several: pass graph='paper'"):
                ask()
            ask(graph="paper")
        with pytest.raises(SourceError, match="one relation of several"):
            featstore.ProximityOrder(store, np.arange(50), batch_size=10)
        assert len(featstore.ProximityOrder(store.graphs["paper"], np.arange(50), batch_size=10)) == 50
        assert graph_of(store, "paper").name == "paper"


def test_one_relation_of_a_hetero_data_is_not_sampled_unasked(tmp_path: Path, pack: Any) -> None:
    pytest.importorskip("torch_geometric")
    import torch
    from torch_geometric.data import HeteroData

    data = HeteroData()
    data["paper"].x, data["author"].x = torch.from_numpy(rows(NODES, 0)), torch.from_numpy(rows(70, 1))
    data["paper", "cites", "paper"].edge_index = torch.from_numpy(edges_of())
    packed = pack(tmp_path / "s", data, topology=True)
    asked = "one relation of several: pass graph='paper__cites__paper'"
    with packed as store, pytest.raises(SourceError, match=asked):
        store.sampler([3], memory=SMALL)


def test_a_table_is_no_array(tmp_path: Path, pack: Any) -> None:
    with pack(tmp_path / "s", rows(NODES, 0)) as store:
        table = store.tables["features"]
        assert len(table) == NODES
        assert table
        uses: list[Any] = [
            np.asarray, np.array, list, iter, lambda t: t[3], lambda t: t[:5], lambda t: t[np.arange(3)],
            lambda t: np.asarray(t, np.float64), lambda t: np.stack([t]), lambda t: np.mean(t),
        ]  # fmt: skip
        for use in uses:
            with pytest.raises(
                TypeError, match=r"'features' is on disk .*reader\.read\(\{'features': ids\}\)"
            ) as error:
                use(table)
            assert isinstance(error.value, FeatstoreError)
        with pytest.raises(FeatstoreError, match=r"is on disk and no array .*store\.reader"):
            np.asarray(store)
        with (
            store.reader(memory=SMALL) as reader,
            pytest.raises(FeatstoreError, match=r"reader\.read\(ids\)"),
        ):
            np.asarray(reader)
