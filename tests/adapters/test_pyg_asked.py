"""What PyG's loaders over a store are asked by name: one thing is meant, or it is an error."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch_geometric")

import featstore
from featstore.errors import ArgumentError, BudgetError, SourceError

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch
    from torch_geometric.data import Data, HeteroData
    from torch_geometric.sampler import NumNeighbors

    from featstore.adapters.pyg import LinkNeighborLoader, NeighborLoader

CITES = ("p", "c", "p")


def timed(path: Path, **more: Any) -> featstore.Store:
    """Three nodes and three edges; both have a ``time``."""
    data = HeteroData()
    data["p"].x = torch.randn(3, 1)
    data["p"].time = torch.zeros(3, dtype=torch.int64)
    data[CITES].edge_index = torch.tensor([[1, 2, 0], [0, 0, 1]])
    data[CITES].time = torch.tensor([5, 99, 5])
    return featstore.pack(path, data, **more)


@pytest.mark.parametrize("mode", ["online", "partitions"])
def test_times_of_nodes_and_of_edges(tmp_path: Path, mode: str) -> None:
    """The later edge 99 came along where the times of nodes were taken without a word."""
    more = {"order": {"p": "ldg"}, "partitions": {"p": 2}} if mode == "partitions" else {}
    said = {"mode": mode, "shuffle": True} if mode == "partitions" else {}
    with (
        timed(tmp_path / "s", **more) as store,
        pytest.raises(ArgumentError, match=r"both 'p\.time' and 'p__c__p\.time'.*another name"),
    ):
        NeighborLoader(store, [-1], ("p", [0]), time_attr="time", input_time=torch.tensor([10]), **said)


def test_times_of_nodes_and_of_edges_around_links(tmp_path: Path) -> None:
    with timed(tmp_path / "s") as store, pytest.raises(ArgumentError, match=r"both 'p\.time' and"):
        LinkNeighborLoader(
            store, [-1], CITES, edge_label=torch.ones(3), edge_label_time=torch.tensor([5, 99, 5]),
            time_attr="time",
        )  # fmt: skip


@pytest.mark.parametrize("of", ["p", "p__c__p"])
@pytest.mark.parametrize("what", ["weight", "time"])
def test_kept_values_beside_arrays_of_their_name(tmp_path: Path, what: str, of: str) -> None:
    """Arrays of nodes are no weights of edges; all others may be meant."""
    values = np.array([1, 0, 1])
    kept: dict[str, Any] = {f"edge_{what}s": {CITES: values.astype(np.float32 if what == "weight" else int)}}
    said: dict[str, Any] = {f"{what}_attr": f"{what}s"}
    if what == "time":
        said["input_time"] = [5]
    with featstore.pack(
        tmp_path / "s", {"p": np.ones((3, 1))}, graph={CITES: np.array([[1, 2, 0], [0, 0, 1]])},
        arrays={f"{of}.{what}s": values}, edge_ids=True, **kept,
    ) as store:  # fmt: skip
        asked: dict[str, Any] = {"seeds": ("p", [0]), "fanouts": [-1], "batch_size": 1, "memory": "256MiB"}
        if (what, of) == ("weight", "p"):
            with store.loader(**asked, **said) as loader:
                assert next(iter(loader)).sample.e_id[CITES].tolist() == [0]
        else:
            with pytest.raises(ArgumentError, match=rf"'{of}\.{what}s' and the {what}s that 'p__c__p' keeps"):
                store.loader(**asked, **said)


@pytest.fixture(scope="module")
def cited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[featstore.Store]:
    """Thirty nodes, 300 edges, rows and weights of these."""
    data = HeteroData()
    data["p"].x = torch.randn(30, 2)
    data[CITES].edge_index = torch.randint(0, 30, (2, 300))
    data[CITES].edge_attr = torch.randn(300, 2)
    data[CITES].edge_weight = torch.rand(300)
    path = tmp_path_factory.mktemp("cited") / "s"
    with featstore.pack(path, data, order="ldg", partitions=3) as store:  # of nodes, not of rows of edges
        yield store


def test_an_order_that_is_given_once_is_of_nodes(cited: featstore.Store, tmp_path: Path) -> None:
    assert cited.tables["p"].entry.order.method == "ldg"
    assert cited.tables["p__c__p"].entry.order.method == "given"
    edges = torch.randint(0, 30, (2, 300))
    data = Data(x=torch.randn(30, 2), edge_index=edges, edge_attr=torch.randn(300, 2))
    with featstore.pack(tmp_path / "s", data, order="bfs", train=np.arange(9)) as store:
        assert [one.entry.order.method for one in store.tables.values()] == ["bfs", "given"]


def test_little_edges_need_little_memory(cited: featstore.Store) -> None:
    """Holding 300 edges was said to need 100 MB."""
    said: dict[str, Any] = {"weight_attr": "edge_weight"}
    with pytest.raises(BudgetError) as caught:
        NeighborLoader(cited, [2], ("p", None), memory="2MiB", **said)
    for memory in ("64MiB", caught.value.needed_bytes):
        with NeighborLoader(cited, [2], ("p", None), memory=memory, batch_size=30, **said) as loader:
            (batch,) = loader
            weights = cited.arrays["p__c__p.edge_weight"][batch[CITES].e_id.numpy()]
            np.testing.assert_array_equal(batch[CITES].edge_weight.numpy(), weights)
    with LinkNeighborLoader(cited, [2], CITES, memory="64MiB", **said) as around:
        assert len(around.dataset) == 300


def test_partitions_shuffle(cited: featstore.Store) -> None:
    with pytest.raises(ArgumentError, match="say shuffle=True"):
        NeighborLoader(cited, [2], ("p", None), mode="partitions", memory="64MiB")


def test_a_loader_is_of_one_process_and_makes_its_batches(cited: featstore.Store) -> None:
    with (
        NeighborLoader(cited, NumNeighbors([2]), ("p", [4, 7]), batch_size=2, memory="64MiB") as nodes,
        LinkNeighborLoader(cited, NumNeighbors({CITES: [2]}), CITES, batch_size=7, memory="64MiB") as links,
    ):
        for loader, count, size in ((nodes, 2, 2), (links, 300, 7)):
            assert (len(loader.dataset), loader.batch_size, loader.num_workers) == (count, size, 0)
            with pytest.raises(SourceError, match="make one with these seeds"):
                loader([0])
        for one in (nodes, links, nodes.loader):
            with pytest.raises(ArgumentError, match=r"pickle the store.*in each process"):
                pickle.dumps(one)


@pytest.mark.parametrize("named", [("p", "x", "p"), ("p", "q"), (("p", "x", "p"), np.zeros((2, 1), int))])
def test_links_of_a_type_that_is_not_there(cited: featstore.Store, named: Any) -> None:
    with pytest.raises(ArgumentError, match=r"no edge type \('p', '(x', 'p|q)'\); it has \('p', 'c', 'p'\)"):
        LinkNeighborLoader(cited, [2], named, memory="64MiB")
