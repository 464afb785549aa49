"""The PyG adapter through PyG's own loader: 0, forked and spawned workers, and the feature store's
contract."""

from __future__ import annotations

import pickle
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.base.hashing import fold_ids
from featstore.errors import ArgumentError, FeatstoreError, IdError, SourceError
from featstore.loaders.online.loader import OnlineLoader
from featstore.sampling.batches import open_sampler
from featstore.sampling.neighbors import NeighborSampler
from featstore.sampling.options import SamplingOptions
from featstore.storage.edge_types import node_tables

with warnings.catch_warnings():
    # PyG scripts some of its own classes on import, which newer PyTorch calls deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch
    from torch_geometric.data import Data, HeteroData
    from torch_geometric.data.graph_store import EdgeAttr
    from torch_geometric.loader import LinkLoader, NodeLoader
    from torch_geometric.sampler import NodeSamplerInput

    from featstore.adapters.pyg import FeatstoreFeatures, FeatstoreGraph, FeatstoreSampler, RowAttr

NODES = 400


@dataclass(frozen=True)
class Table:
    rows: int
    row_shape: tuple[int, ...]
    dtype: Any


class ArrayReader:
    """What the adapter asks of a reader, over arrays; counts its requests."""

    def __init__(self, **arrays: Any) -> None:
        self.arrays = arrays
        self.requests: list[dict[str, int]] = []
        self.tables = {
            name: Table(len(array), array.shape[1:], array.dtype) for name, array in arrays.items()
        }
        self.store, self.node_types, self.featureless = self, node_tables(self.tables), list[str]()

    def read(self, ids: dict[str, Any]) -> dict[str, Any]:
        self.requests.append({name: len(one) for name, one in ids.items()})
        return {
            name: self.arrays[name][one]
            if isinstance(one, np.ndarray)
            else torch.from_numpy(self.arrays[name])[one]
            for name, one in ids.items()
        }


@pytest.fixture
def graph() -> tuple[Any, Any]:
    rng = np.random.default_rng(5)
    target = np.sort((rng.random(NODES * 9) ** 2 * NODES).astype(np.int64))
    indptr = np.searchsorted(target, np.arange(NODES + 1)).astype(np.int64)
    return indptr, rng.integers(0, NODES, NODES * 9).astype(np.int32)


@pytest.fixture
def features() -> Any:
    return np.random.default_rng(6).standard_normal((NODES, 7)).astype(np.float32)


def loader_over(graph: tuple[Any, Any], store: Any, **options: Any) -> Any:
    numbers = torch.arange(len(graph[1]))  # edges are in the order of these arrays
    sampler = FeatstoreSampler(NeighborSampler(*graph, [4, 3], seed=9), edge_permutation=numbers)
    data = (store, FeatstoreGraph(*graph))
    return NodeLoader(data, sampler, input_nodes=torch.arange(0, NODES, 3), batch_size=32, **options)


def test_loader_delivers_rows_labels_and_edges(graph: Any, features: Any) -> None:
    reader = ArrayReader(features=features)
    labels = np.arange(NODES) % 5
    labels.flags.writeable = False
    batches = list(loader_over(graph, FeatstoreFeatures(reader, arrays={(None, "y"): labels})))
    assert len(batches) == len(reader.requests) == 5
    for batch in batches:
        node = batch.n_id.numpy()
        np.testing.assert_array_equal(batch.x.numpy(), features[node])
        np.testing.assert_array_equal(batch.y.numpy(), labels[node])
        row, col = batch.edge_index.numpy()
        np.testing.assert_array_equal(node[row], graph[1][batch.e_id.numpy()])
        assert batch.num_nodes == len(node) == sum(batch.num_sampled_nodes)
        assert batch.batch_size == len(batch.input_id)
        np.testing.assert_array_equal(node[: batch.batch_size], batch.input_id.numpy() * 3)
        seeds = node[: batch.batch_size]
        alone = NeighborSampler(*graph, [4, 3], seed=9).sample(seeds, int(fold_ids(seeds)))
        np.testing.assert_array_equal(alone.node, node)
        np.testing.assert_array_equal(alone.col, col)


@pytest.mark.parametrize(
    ("method", "workers"), [("fork", 2), pytest.param("spawn", 1, marks=pytest.mark.thorough)]
)
def test_workers_sample_the_same(graph: Any, features: Any, method: str, workers: int) -> None:
    expected = list(loader_over(graph, FeatstoreFeatures(ArrayReader(features=features))))
    loader = loader_over(
        graph, FeatstoreFeatures(ArrayReader(features=features)), filter_per_worker=False,
        num_workers=workers, multiprocessing_context=method, persistent_workers=True, timeout=60,
    )  # fmt: skip
    for epoch in range(2):
        loader.node_sampler.set_epoch(epoch)
        batches = list(loader)
        assert len(batches) == len(expected)
        same = [torch.equal(one.n_id, two.n_id) for one, two in zip(batches, expected)]
        # Workers that persist see the new epoch: same seeds, other neighbours.
        assert all(same) if epoch == 0 else not any(same)
        for batch in batches:
            np.testing.assert_array_equal(batch.x.numpy(), features[batch.n_id.numpy()])
    assert len(loader.data[0]._reader.requests) == 2 * len(expected), "rows are read in the main process"


@pytest.mark.parametrize(
    ("method", "in_worker"), [(None, False), ("fork", True), ("fork", False), ("spawn", True)]
)
def test_rows_from_a_packed_store(
    graph: Any, features: Any, tmp_path: Any, method: str | None, in_worker: bool
) -> None:
    """The real reader under the loader, in the main process and in workers, which open their own engine."""
    packed = featstore.pack(
        tmp_path / "store", features, graph=graph, arrays={"labels": np.arange(NODES) % 5}
    )
    options: dict[str, Any] = (
        {"num_workers": 1, "multiprocessing_context": method, "timeout": 60} if method else {}
    )
    with packed as store, store.reader(memory="16MiB", static=np.arange(50)) as reader:
        source = FeatstoreFeatures(reader, arrays={(None, "y"): store.arrays["labels"]})
        batches = list(loader_over(graph, source, filter_per_worker=in_worker, **options))
        assert len(batches) == 5
        for batch in batches:
            np.testing.assert_array_equal(batch.x.numpy(), features[batch.n_id.numpy()])
            np.testing.assert_array_equal(batch.y.numpy(), batch.n_id.numpy() % 5)
        np.testing.assert_array_equal(source.get_tensor(None, "x", np.array([7, 0])), features[[7, 0]])
        here = reader.stats().rows_asked
    assert here == 2 + (0 if in_worker else sum(len(batch.n_id) for batch in batches))


def test_a_pickled_feature_store_opens_its_reader_when_needed(
    graph: Any, features: Any, tmp_path: Any
) -> None:
    with (
        featstore.pack(tmp_path / "store", features, graph=graph) as store,
        store.reader(memory="16MiB") as reader,
    ):
        copy = pickle.loads(pickle.dumps(FeatstoreFeatures(reader)))
        assert copy._opened is None
        again = pickle.loads(pickle.dumps(copy))
        assert copy._opened is None, "a copy of a copy opens nothing either"
        assert torch.equal(again.get_tensor(None, "x", torch.tensor([3])), torch.from_numpy(features[[3]]))
        assert again._opened is not None
        again._opened.close()


def test_a_sampler_keeps_its_options_wherever_it_is_sent(graph: Any) -> None:
    weights = np.zeros(NODES * 9, np.float32)
    weights[::3] = 1
    for options in (SamplingOptions(weights=weights), SamplingOptions(disjoint=True, replace=True)):
        sampler = FeatstoreSampler(NeighborSampler(*graph, [4, 4], seed=2, options=options))
        asked = NodeSamplerInput(input_id=None, node=torch.tensor([3, 1, 9]))
        before = sampler.sample_from_nodes(asked)
        assert (before.batch is not None) == options.disjoint
        for one in (pickle.loads(pickle.dumps(sampler)), sampler):
            after = one.sample_from_nodes(asked)
            assert torch.equal(after.node, before.node)
            assert torch.equal(after.col, before.col)
            assert options.disjoint == (after.batch is not None and torch.equal(after.batch, before.batch))
    batch = next(iter(NodeLoader(Data(edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=NODES),
        sampler, input_nodes=torch.arange(8), batch_size=8)))  # fmt: skip
    assert torch.equal(batch.batch[:8], torch.arange(8))


def test_sampler_is_pickled_with_its_epoch_and_shares_once(graph: Any) -> None:
    sampler = FeatstoreSampler(
        NeighborSampler(*graph, [4, -1], seed=2), edge_permutation=torch.arange(NODES * 9)
    )
    asked = NodeSamplerInput(input_id=None, node=torch.tensor([3, 1, 9], dtype=torch.int32))
    sampler.set_epoch(3)
    before = sampler.sample_from_nodes(asked)
    copy = pickle.loads(pickle.dumps(sampler))
    shared = sampler._shared
    assert torch.equal(copy.sample_from_nodes(asked).node, before.node)
    assert torch.equal(sampler.sample_from_nodes(asked).edge, before.edge)
    pickle.dumps(sampler)
    assert sampler._shared is shared
    assert torch.equal(copy.edge_permutation, torch.arange(NODES * 9))


def test_plain_data_with_edge_permutation(graph: Any, features: Any) -> None:
    indptr, indices = graph
    target = np.repeat(np.arange(NODES), np.diff(indptr))
    shuffle = np.random.default_rng(1).permutation(len(indices))
    edge_index = torch.from_numpy(np.stack([indices[shuffle], target[shuffle]]).astype(np.int64))
    weights = torch.arange(len(indices))
    data = Data(x=torch.from_numpy(features), edge_index=edge_index, edge_weight=weights)
    # Where each CSC edge stands in the shuffled COO.
    permutation = torch.from_numpy(np.argsort(shuffle))
    sampler = FeatstoreSampler(NeighborSampler(indptr, indices, [3]), edge_permutation=permutation)
    batch = next(iter(NodeLoader(data, sampler, input_nodes=torch.arange(50), batch_size=50)))
    assert torch.equal(edge_index[:, batch.e_id], batch.n_id[batch.edge_index])
    assert torch.equal(batch.edge_weight, batch.e_id)


def test_sampler_refuses_what_it_does_not_do(graph: Any) -> None:
    sampler = FeatstoreSampler(NeighborSampler(*graph, [4]))
    with pytest.raises(SourceError, match="homogeneous graphs without time stamps"):
        sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([1]), input_type="paper"))
    with pytest.raises(SourceError, match="homogeneous graphs without time stamps"):
        sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([1]), time=torch.tensor([1])))
    with pytest.raises(IdError, match="no node"):
        sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([NODES])))
    with pytest.raises(SourceError, match="not LinkLoader"):
        sampler.sample_from_edges(None)


def test_one_request_for_all_attributes() -> None:
    papers = np.arange(60, dtype=np.float32).reshape(20, 3)
    authors = np.arange(20, dtype=np.int64).reshape(10, 2)
    reader = ArrayReader(paper=papers, author=authors)
    store = FeatstoreFeatures(
        reader, {("paper", "x"): "paper", ("paper", "again"): "paper", ("author", "x"): "author"}
    )
    ids, others = torch.tensor([5, 0, 5]), np.array([9, 1])
    attrs = [
        RowAttr("paper", "x", ids),
        RowAttr("author", "x", others),
        RowAttr("paper", "again", ids),
        RowAttr("paper", "x", np.array([7, 7])),
    ]
    rows = store.multi_get_tensor(attrs)
    assert reader.requests == [{"paper": 5, "author": 2}]
    assert [type(one) for one in rows] == [torch.Tensor, np.ndarray, torch.Tensor, np.ndarray]
    for attr, one in zip(attrs, rows):
        np.testing.assert_array_equal(
            np.asarray(one), (papers if attr.group_name == "paper" else authors)[attr.index]
        )
    joined = store.multi_get_tensor([RowAttr("author", "x", others), RowAttr("author", "x", others[::-1])])
    np.testing.assert_array_equal(np.concatenate(joined), authors[[9, 1, 1, 9]])


def test_attributes_are_new_each_time_and_named_by_default() -> None:
    reader = ArrayReader(features=np.zeros((4, 2)), author=np.zeros((3, 2)))
    store = FeatstoreFeatures(reader, arrays={(None, "y"): torch.zeros(4)})
    first = store.get_all_tensor_attrs()
    first[0].index = torch.tensor([1])
    names = [(attr.group_name, attr.attr_name, attr.is_set("index")) for attr in store.get_all_tensor_attrs()]
    assert names == [(None, "x", False), ("author", "x", False), (None, "y", False)]


@pytest.mark.parametrize("name", ["x", "y"])
def test_indices_that_pyg_allows(name: str) -> None:
    table = np.arange(12, dtype=np.float32).reshape(6, 2)
    store = FeatstoreFeatures(ArrayReader(features=table), arrays={(None, "y"): table})
    mask = np.array([True, False, True, False, False, True])
    for index in (None, slice(1, 5, 2), 3, np.int64(2), torch.tensor([5, 5]), np.array([0, 3]), mask, [1, 2]):
        got = store.get_tensor(None, name, index)
        expected = (
            table if index is None else table[np.asarray(index) if not isinstance(index, slice) else index]
        )
        np.testing.assert_array_equal(np.asarray(got), expected)
        assert tuple(store.get_tensor_size(None, name, index)) == expected.shape
    assert torch.equal(store.get_tensor(None, name, torch.from_numpy(mask)), torch.from_numpy(table[mask]))
    assert tuple(store.get_tensor_size(None, name)) == (6, 2)
    for wrong in (mask[:5], np.ones((6, 2), bool)):
        for index in (wrong, torch.from_numpy(wrong)):
            with pytest.raises(IdError, match="a mask has a value for each of 6 rows"):
                store.get_tensor(None, name, index)
    assert torch.equal(store[None, name](), torch.from_numpy(table)), "a view of all rows"


def test_feature_store_refusals() -> None:
    table = np.zeros((6, 2), dtype=np.float32)
    reader = ArrayReader(features=table)
    with pytest.raises(SourceError, match="no table 'nodes'; it has 'features'"):
        FeatstoreFeatures(reader, {(None, "x"): "nodes"})
    with pytest.raises(SourceError, match="as a table and as an array"):
        FeatstoreFeatures(reader, arrays={(None, "x"): table})
    store = FeatstoreFeatures(reader, arrays={(None, "y"): table})
    with pytest.raises(KeyError, match="no attribute"):
        store.get_tensor(None, "z", None)
    for index in (torch.tensor([6]), np.array([-1]), torch.tensor([[0]]), torch.tensor([0.5]), -1, 6):
        for name in ("x", "y"):
            with pytest.raises(IdError, match=r"out of range|one-dimensional"):
                store.get_tensor(None, name, index)
    with pytest.raises(SourceError, match="read-only"):
        store.put_tensor(torch.zeros(6, 2), None, "x", None)
    with pytest.raises(SourceError, match="read-only"):
        store.remove_tensor(None, "x", None)
    assert reader.requests == []


def test_types_without_features_and_copies_have_none(tmp_path: Path) -> None:
    edges = {("author", "writes", "paper"): np.array([[0, 1, 2], [1, 2, 3]])}
    tables = {"paper": np.ones((5, 2), np.float32), "author": 7}
    with (
        featstore.pack(tmp_path / "s", tables, graph=edges) as store,
        store.reader(memory="16MiB") as reader,
    ):
        attrs = FeatstoreFeatures(reader).get_all_tensor_attrs()
        assert [(one.group_name, one.attr_name) for one in attrs] == [("paper", "x")]
        with (
            featstore.SharedBuffer(store, memory="16MiB") as buffer,
            buffer.client() as client,
        ):
            attrs = FeatstoreFeatures(client).get_all_tensor_attrs()
            assert [(one.group_name, one.attr_name) for one in attrs] == [("paper", "x")]
        assert FeatstoreFeatures(reader).get_tensor("paper", "x", slice(3, 1)).shape == (0, 2)


def test_a_graph_between_two_types_knows_how_many_nodes_each_has(graph: Any) -> None:
    between = ("author", "writes", "paper")
    (attr,) = FeatstoreGraph(*graph, edge_type=between).get_all_edge_attrs()
    assert attr.size == (None, NODES)
    (attr,) = FeatstoreGraph(*graph, edge_type=between, source_nodes=NODES + 3).get_all_edge_attrs()
    assert attr.size == (NODES + 3, NODES)
    with pytest.raises(ArgumentError, match="source_nodes=3: the edges join nodes of one type"):
        FeatstoreGraph(*graph, source_nodes=3)


def test_graph_store(graph: Any) -> None:
    store = FeatstoreGraph(*graph, edge_type=("node", "to", "node"))
    (attr,) = store.get_all_edge_attrs()
    assert attr.size == (NODES, NODES)
    row, colptr = store.get_edge_index(attr)
    np.testing.assert_array_equal(row.numpy(), graph[1])
    np.testing.assert_array_equal(colptr.numpy(), graph[0])
    rows, cols, _ = store.coo()
    np.testing.assert_array_equal(rows[attr.edge_type].numpy(), graph[1])
    np.testing.assert_array_equal(
        cols[attr.edge_type].numpy(), np.repeat(np.arange(NODES), np.diff(graph[0]))
    )
    with pytest.raises(KeyError, match="not found"):
        store.get_edge_index(EdgeAttr(("node", "other", "node"), "csc"))
    with pytest.raises(SourceError, match="read-only"):
        store.put_edge_index((row, colptr), attr)
    with pytest.raises(SourceError, match="read-only"):
        store.remove_edge_index(attr)


# Edges: their numbers, their data, and mini-batches that have none.


class EdgeData:
    """A graph as a user has it: edges in no order, and what is known of each."""

    def __init__(self) -> None:
        rng = np.random.default_rng(11)
        pairs = np.stack([rng.integers(0, NODES, NODES * 6), rng.integers(0, NODES, NODES * 6)])
        self.edges = torch.from_numpy(rng.permutation(np.unique(pairs, axis=1), axis=1))
        self.count = self.edges.shape[1]
        self.values = self.edges[0] * NODES + self.edges[1]  # says which edge it is

    def data(self, **more: Any) -> Data:
        return Data(edge_index=self.edges, num_nodes=NODES, **more)

    def csc(self) -> tuple[Any, Any, Any]:
        """(indptr, indices, the column in ``edges`` of each)"""
        order = np.argsort(self.edges[1].numpy(), kind="stable")
        indptr = np.searchsorted(self.edges[1].numpy()[order], np.arange(NODES + 1)).astype(np.int64)
        return indptr, self.edges[0].numpy()[order], order

    def wrong(self, batch: Any, name: str) -> int:
        """How many values of a mini-batch are of other edges."""
        source, target = batch.n_id[batch.edge_index]
        return int((batch[name].reshape(len(source), -1)[:, 0] != source * NODES + target).sum())


@pytest.fixture(scope="module")
def edge_data() -> EdgeData:
    return EdgeData()


@pytest.fixture(scope="module")
def graph_store(edge_data: EdgeData, tmp_path_factory: pytest.TempPathFactory) -> Any:
    features = np.random.default_rng(6).standard_normal((NODES, 7)).astype(np.float32)
    path = tmp_path_factory.mktemp("graph") / "store"
    edges = edge_data.edges.numpy()
    with featstore.pack(path, features, graph=edges, topology=True, order="ldg", partitions=4) as store:
        yield store


def loader_of(data: Any, sampler: FeatstoreSampler, **options: Any) -> Any:
    return NodeLoader(data, sampler, input_nodes=torch.arange(0, NODES, 9), batch_size=16, **options)


@pytest.fixture(scope="module")
def by_place(graph_store: Any) -> Any:
    """Samplers by where the graph is."""
    in_memory = NeighborSampler(*next(iter(graph_store.graphs.values())).csc(), [4, 3])
    with graph_store.sampler([4, 3], memory="16MiB") as stored:
        yield {"in memory": FeatstoreSampler(in_memory), "stored": FeatstoreSampler(stored)}


@pytest.mark.parametrize("workers", [0, 1])
def test_refusal_comes_out_of_workers(edge_data: EdgeData, workers: int) -> None:
    data = edge_data.data(edge_attr=edge_data.values)
    for in_worker in (False, True):
        loader = loader_of(
            data, FeatstoreSampler(NeighborSampler(*edge_data.csc()[:2], [4, 3])), num_workers=workers,
            filter_per_worker=in_worker, multiprocessing_context="fork" if workers else None,
            timeout=60 if workers else 0,
        )  # fmt: skip
        with pytest.raises(SourceError, match="data of edges"):
            next(iter(loader))


@pytest.mark.parametrize("which", ["in memory", "stored"])
@pytest.mark.parametrize("name", ["edge_attr", "edge_weight", "edge_time", "colour"])
def test_data_of_edges_never_comes_by_other_numbers(
    edge_data: EdgeData, by_place: Any, which: str, name: str
) -> None:
    sampler = by_place[which]
    data = edge_data.data(**{name: edge_data.values[:, None] if name == "edge_attr" else edge_data.values})
    for in_worker in (False, True):
        with pytest.raises(SourceError, match=r"from_data.*edge_permutation=.*edge_ids=True"):
            next(iter(loader_of(data, sampler, filter_per_worker=in_worker)))
    plain = next(iter(loader_of(edge_data.data(y=torch.arange(NODES)), sampler)))
    source, target = plain.n_id[plain.edge_index]
    assert np.isin((source * NODES + target).numpy(), edge_data.values.numpy()).all(), "edges are edges"
    assert torch.equal(plain.y, plain.n_id)
    assert "e_id" not in plain, "a number of another order looks like the user's"


def test_data_of_edges_without_edge_index(edge_data: EdgeData, by_place: Any) -> None:
    data = Data(num_nodes=NODES, edge_attr=edge_data.values[:, None])
    with pytest.raises(SourceError, match="data of edges"):
        next(iter(loader_of(data, by_place["stored"])))


@pytest.mark.parametrize("how", ["from_data", "edge_permutation", "same order"])
def test_data_of_edges_is_right_where_numbers_are_the_users(edge_data: EdgeData, how: str) -> None:
    indptr, indices, order = edge_data.csc()
    values, data = edge_data.values, edge_data.data()
    if how == "from_data":
        sampler = FeatstoreSampler.from_data(data, [4, -1], seed=3)
    elif how == "edge_permutation":
        sampler = FeatstoreSampler(
            NeighborSampler(indptr, indices, [4, -1]), edge_permutation=torch.from_numpy(order)
        )
    else:
        values = values[order]
        data = Data(edge_index=edge_data.edges[:, order], num_nodes=NODES)
        numbers = torch.arange(edge_data.count)
        sampler = FeatstoreSampler(NeighborSampler(indptr, indices, [4, -1]), edge_permutation=numbers)
    data.edge_attr, data.edge_weight, data.edge_time = values[:, None], values.double(), values.numpy()
    seen = 0
    for batch in loader_of(data, sampler):
        assert [edge_data.wrong(batch, name) for name in ("edge_attr", "edge_weight", "edge_time")] == [
            0,
            0,
            0,
        ]
        assert torch.equal(values[batch.e_id], batch.edge_attr[:, 0])
        seen += len(batch.e_id)
    assert seen > edge_data.count / 4


def test_what_no_sampler_is_made_from(edge_data: EdgeData, graph_store: Any) -> None:
    with pytest.raises(SourceError, match="this Data has none"):
        FeatstoreSampler.from_data(Data(num_nodes=4), [2])
    with pytest.raises(SourceError, match="this HeteroData has none"):
        FeatstoreSampler.from_data(HeteroData(), [2])
    with pytest.raises(SourceError, match="nodes -1 to 5, and num_nodes is 6"):
        FeatstoreSampler.from_data(Data(edge_index=torch.tensor([[0, 5], [-1, 0]]), num_nodes=6), [2])
    in_memory = open_sampler(graph_store, [2], in_memory=True)
    with graph_store.sampler([2], memory="16MiB") as stored:
        for sampler in (in_memory, stored):
            with pytest.raises(SourceError, match="order of its own"):
                FeatstoreSampler(sampler, edge_permutation=torch.arange(edge_data.count))
    own = NeighborSampler(*edge_data.csc()[:2], [2])
    for bad in (
        torch.arange(3),
        torch.arange(edge_data.count).float(),
        -torch.ones(edge_data.count).long(),
        [0],
    ):
        with pytest.raises(SourceError, match="edge_permutation must be an int64 tensor"):
            FeatstoreSampler(own, edge_permutation=bad)


def test_features_of_edges_are_not_asked_for_by_nodes(edge_data: EdgeData) -> None:
    nodes, edges = np.zeros((NODES, 2), np.float32), np.ones((edge_data.count, 2), np.float32)
    reader = ArrayReader(features=nodes, edge_features=edges)
    names = [(attr.group_name, attr.attr_name) for attr in FeatstoreFeatures(reader).get_all_tensor_attrs()]
    assert names == [(None, "x")], "an edge table is no attribute of nodes"
    indptr, indices, _ = edge_data.csc()
    sampler = FeatstoreSampler(NeighborSampler(indptr, indices, [2]))
    for batch in loader_of((FeatstoreFeatures(reader), FeatstoreGraph(indptr, indices)), sampler):
        assert not batch.x.any()
        assert "e_id" not in batch
    with pytest.raises(SourceError, match="'z' is of edges"):
        FeatstoreFeatures(reader, {(None, "z"): "edge_features"})
    with pytest.raises(SourceError, match="'edge_attr' is of edges"):
        FeatstoreFeatures(reader, arrays={(None, "edge_attr"): edges})
    with pytest.raises(SourceError, match=r"has 3 rows, .* has 400: both are of the same nodes"):
        FeatstoreFeatures(reader, arrays={(None, "y"): torch.zeros(3)})


def test_rows_of_another_type_are_not_asked_for_by_these_nodes(edge_data: EdgeData) -> None:
    reader = ArrayReader(features=np.zeros((NODES, 2)), author=np.ones((NODES, 2)))
    indptr, indices, _ = edge_data.csc()
    sampler = FeatstoreSampler(NeighborSampler(indptr, indices, [2]))
    with pytest.raises(SourceError, match=r"of \['author'\] were asked for by the same ids"):
        next(iter(loader_of((FeatstoreFeatures(reader), FeatstoreGraph(indptr, indices)), sampler)))
    named = FeatstoreFeatures(ArrayReader(paper=np.zeros((NODES, 2)), author=np.ones((NODES, 2))))
    with pytest.raises(SourceError, match=r"rows of \['author', 'paper'\] were asked for by the same ids"):
        next(iter(loader_of((named, FeatstoreGraph(indptr, indices)), sampler)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool])
def test_nodes_that_are_no_whole_numbers_are_refused(dtype: torch.dtype) -> None:
    data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]).to(dtype), num_nodes=3)
    with pytest.raises(SourceError, match="nodes are whole numbers"):
        FeatstoreSampler.from_data(data, [2])


def test_a_mini_batch_without_its_edges_is_refused(graph_store: Any, by_place: Any, tmp_path: Any) -> None:
    sampler = by_place["stored"]
    bare = loader_of(Data(num_nodes=NODES), sampler)
    with (
        OnlineLoader(graph_store, bare, memory="32MiB") as loader,
        pytest.raises(SourceError, match="has no edge_index"),
    ):
        next(iter(loader))
    with pytest.raises(SourceError, match="has no edge_index"):
        featstore.Trace.record(bare, tmp_path / "t")
    data = Data(num_nodes=NODES, edge_index=torch.empty((2, 0), dtype=torch.long))  # as the message says
    with OnlineLoader(graph_store, loader_of(data, sampler), memory="32MiB") as loader:
        assert next(iter(loader)).edge_index.shape[1] > 100


@pytest.mark.parametrize("options", [{}, {"filter_per_worker": True}])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_leaves_out_edges_is_refused(
    edge_data: EdgeData, by_place: Any, options: dict[str, Any], workers: int
) -> None:
    options = options | {"num_workers": workers, "timeout": 60 * workers}
    for bare in (Data(num_nodes=NODES), Data(x=torch.zeros(NODES, 2), y=torch.arange(NODES))):
        with pytest.raises(SourceError, match="has no edge_index"):
            next(iter(loader_of(bare, by_place["stored"], **options)))
    seen: list[Any] = []
    hook = {"transform_sampler_output": lambda out: seen.append((out.batch, out.row.numel())) or out}
    with pytest.raises(SourceError, match="has no edge_index"):  # to look at it is not to take it
        next(iter(loader_of(bare, by_place["stored"], **hook, **options)))
    edges = edge_data.data()
    empty = Data(edge_index=torch.empty((2, 0), dtype=torch.long), num_nodes=NODES)
    for data in (edges, empty):
        batch = next(iter(loader_of(data, by_place["stored"], **options)))
        assert type(batch.edge_index) is torch.Tensor
        source, target = batch.n_id[batch.edge_index]
        assert np.isin((source * NODES + target).numpy(), edge_data.values.numpy()).all()
        assert len(source) > 100


def test_a_sampled_mini_batch_is_pygs(edge_data: EdgeData) -> None:
    sampler = FeatstoreSampler.from_data(edge_data.data(), [4, 2])
    inputs = NodeSamplerInput(input_id=torch.arange(9), node=torch.arange(9))
    out = sampler.sample_from_nodes(inputs)
    both = out.to_bidirectional(keep_orig_edges=True)
    assert len(both.orig_row) == len(out.row)
    assert len(both.row) > len(out.row)
    again = pickle.loads(pickle.dumps(out))
    for name in ("node", "row", "col", "edge"):
        one = getattr(again, name)
        assert torch.equal(one, getattr(out, name))
        assert type(one + 0) is type(one[:1]) is type(one.to("cpu")) is torch.Tensor
    assert again.num_sampled_edges == out.num_sampled_edges
    assert again.orig_row is again.orig_col is None
    assert f"num_sampled_nodes={out.num_sampled_nodes}" in repr(again)


def test_rows_by_a_samplers_own_edge_numbers_are_refused(edge_data: EdgeData, tmp_path: Any) -> None:
    features, values = np.zeros((NODES, 2), np.float32), edge_data.values.numpy()[:, None]
    indptr, indices, order = edge_data.csc()
    sampler = NeighborSampler(indptr, indices, [4])
    batches = [sampler.sample(np.arange(5))]
    with featstore.pack(tmp_path / "s", {"features": features, "edge_features": values}) as store:
        both = {"memory": "64MiB", "nodes": lambda b: {"features": b.node, "edge_features": b.edge_id}}
        with (
            OnlineLoader(store, batches, **both) as loader,
            pytest.raises(SourceError, match="by edge_id"),
        ):
            next(iter(loader))
        both["nodes"] = lambda b: {"features": b.node, "edge_features": order[b.edge_id]}
        with OnlineLoader(store, batches, **both) as loader:
            (got,) = loader
        batch = batches[0]
        expected = batch.node[batch.row] * NODES + batch.node[batch.col]
        np.testing.assert_array_equal(got.x["edge_features"][:, 0], expected)


def test_loaders_of_links_and_of_types_are_refused(edge_data: EdgeData) -> None:
    sampler = FeatstoreSampler.from_data(edge_data.data(), [2])
    links = LinkLoader(
        edge_data.data(edge_attr=edge_data.values), sampler, edge_label_index=edge_data.edges[:, :9]
    )
    with pytest.raises(SourceError, match="use NodeLoader, not LinkLoader"):
        next(iter(links))
    typed = HeteroData()
    typed["paper"].num_nodes = NODES
    typed["paper", "to", "paper"].edge_index = edge_data.edges
    typed["paper", "to", "paper"].edge_attr = edge_data.values
    with pytest.raises(SourceError, match="typed graphs come later"):
        next(iter(NodeLoader(typed, sampler, input_nodes=("paper", torch.arange(9)))))


def test_a_reader_of_some_tables_or_columns_has_those_alone(tmp_path: Path) -> None:
    rows = np.arange(36, dtype=np.float32).reshape(9, 4)
    with featstore.pack(tmp_path / "s", {"a": rows, "b": rows + 1}) as store:
        with store.reader(memory="32MiB", tables=["b"]) as reader:
            features = FeatstoreFeatures(reader)
            assert [(one.group_name, one.attr_name) for one in features.get_all_tensor_attrs()] == [
                ("b", "x")
            ]
            with pytest.raises(FeatstoreError):
                FeatstoreFeatures(reader, {("a", "x"): "a"})
        with store.reader(memory="32MiB", tables=["a"], columns=[2, 0]) as reader:
            features = FeatstoreFeatures(reader)
            assert tuple(features.get_tensor_size("a", "x")) == (9, 2)
            got = features.get_tensor("a", "x", np.array([5, 1]))
            np.testing.assert_array_equal(got, rows[[5, 1]][:, [2, 0]])


@pytest.mark.parametrize(
    "index",
    [
        slice("a", "b"), slice(0, 3, 0), [[1], [2, 3]], object(), "abc", np.array([0.5]),
        torch.empty(3, device="meta", dtype=torch.int64), torch.empty(3, device="meta", dtype=torch.bool),
        np.array([-1]), [2**40], [2**70], np.ma.array([1], mask=[True]),
    ],
    ids=lambda index: re.sub(" at 0x.*", "", repr(index)),
)  # fmt: skip
def test_an_index_of_a_tensor_that_is_none_is_refused(tmp_path: Path, index: Any) -> None:
    with (
        featstore.pack(tmp_path / "s", np.zeros((9, 4), np.float32)) as store,
        store.reader(memory="32MiB") as reader,
    ):
        features = FeatstoreFeatures(reader)
        with pytest.raises(FeatstoreError):
            features.get_tensor(group_name=None, attr_name="x", index=index)
