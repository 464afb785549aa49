"""The PyG adapter through PyG's own loader: 0, forked and spawned workers, and the feature store's contract."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import IdError, SourceError
from featstore.sampling import NeighborSampler, fold_ids

with warnings.catch_warnings():
    # PyG scripts some of its own classes on import, which newer PyTorch calls deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch
    from torch_geometric.data import Data
    from torch_geometric.data.graph_store import EdgeAttr
    from torch_geometric.loader import NodeLoader
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
        self.tables = {name: Table(len(array), array.shape[1:], array.dtype) for name, array in arrays.items()}
        self.store = self

    def read(self, ids: dict[str, Any]) -> dict[str, Any]:
        self.requests.append({name: len(one) for name, one in ids.items()})
        return {
            name: self.arrays[name][one] if isinstance(one, np.ndarray) else torch.from_numpy(self.arrays[name])[one]
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
    sampler = FeatstoreSampler(NeighborSampler(*graph, [4, 3], seed=9))
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


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 1)])
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


@pytest.mark.parametrize(("method", "in_worker"), [(None, False), ("fork", True), ("fork", False), ("spawn", True)])
def test_rows_from_a_packed_store(
    graph: Any, features: Any, tmp_path: Any, method: str | None, in_worker: bool
) -> None:
    """The real reader under the loader, in the main process and in workers, which open their own engine."""
    packed = featstore.pack(tmp_path / "store", features, graph=graph, arrays={"labels": np.arange(NODES) % 5})
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": method, "timeout": 60} if method else {}
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


def test_a_pickled_feature_store_opens_its_reader_when_needed(graph: Any, features: Any, tmp_path: Any) -> None:
    with featstore.pack(tmp_path / "store", features, graph=graph) as store, store.reader(memory="16MiB") as reader:
        copy = pickle.loads(pickle.dumps(FeatstoreFeatures(reader)))
        assert copy._opened is None
        again = pickle.loads(pickle.dumps(copy))
        assert copy._opened is None, "a copy of a copy opens nothing either"
        assert torch.equal(again.get_tensor(None, "x", torch.tensor([3])), torch.from_numpy(features[[3]]))
        assert again._opened is not None
        again._opened.close()


def test_sampler_is_pickled_with_its_epoch_and_shares_once(graph: Any) -> None:
    sampler = FeatstoreSampler(NeighborSampler(*graph, [4, -1], seed=2), edge_permutation=torch.arange(NODES * 9))
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
    store = FeatstoreFeatures(reader, {("paper", "x"): "paper", ("paper", "again"): "paper", ("author", "x"): "author"})
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
        np.testing.assert_array_equal(np.asarray(one), (papers if attr.group_name == "paper" else authors)[attr.index])
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
        expected = table if index is None else table[np.asarray(index) if not isinstance(index, slice) else index]
        np.testing.assert_array_equal(np.asarray(got), expected)
        if not isinstance(index, np.int64):
            assert tuple(store.get_tensor_size(None, name, index)) == expected.shape
    assert torch.equal(store.get_tensor(None, name, torch.from_numpy(mask)), torch.from_numpy(table[mask]))
    assert tuple(store.get_tensor_size(None, name)) == (6, 2)
    assert torch.equal(store[None, name](), torch.from_numpy(table)), "a view of all rows"


def test_feature_store_refusals() -> None:
    table = np.zeros((6, 2), dtype=np.float32)
    reader = ArrayReader(features=table)
    with pytest.raises(SourceError, match="no table 'nodes'; it has features"):
        FeatstoreFeatures(reader, {(None, "x"): "nodes"})
    with pytest.raises(SourceError, match="as a table and as an array"):
        FeatstoreFeatures(reader, arrays={(None, "x"): table})
    store = FeatstoreFeatures(reader, arrays={(None, "y"): table})
    with pytest.raises(KeyError, match="no attribute"):
        store.get_tensor(None, "z", None)
    for index in (torch.tensor([6]), np.array([-1]), torch.tensor([[0]]), torch.tensor([0.5])):
        for name in ("x", "y"):
            with pytest.raises(IdError, match=r"out of range|one-dimensional"):
                store.get_tensor(None, name, index)
    with pytest.raises(SourceError, match="read-only"):
        store.put_tensor(torch.zeros(6, 2), None, "x", None)
    with pytest.raises(SourceError, match="read-only"):
        store.remove_tensor(None, "x", None)
    assert reader.requests == []


def test_graph_store(graph: Any) -> None:
    store = FeatstoreGraph(*graph, edge_type=("node", "to", "node"))
    (attr,) = store.get_all_edge_attrs()
    assert attr.size == (NODES, NODES)
    row, colptr = store.get_edge_index(attr)
    np.testing.assert_array_equal(row.numpy(), graph[1])
    np.testing.assert_array_equal(colptr.numpy(), graph[0])
    rows, cols, _ = store.coo()
    np.testing.assert_array_equal(rows[attr.edge_type].numpy(), graph[1])
    np.testing.assert_array_equal(cols[attr.edge_type].numpy(), np.repeat(np.arange(NODES), np.diff(graph[0])))
    with pytest.raises(KeyError, match="not found"):
        store.get_edge_index(EdgeAttr(("node", "other", "node"), "csc"))
    with pytest.raises(SourceError, match="read-only"):
        store.put_edge_index((row, colptr), attr)
    with pytest.raises(SourceError, match="read-only"):
        store.remove_edge_index(attr)
