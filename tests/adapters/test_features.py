"""Tables in place of other frameworks' features: each asked as its framework asks.

None of these frameworks can be installed beside this project's torch, so what they ask is written down here,
after their sources: GraphBolt dgl/graphbolt/feature_store.py, feature_fetcher.py and
impl/basic_feature_store.py of dmlc/dgl at 3d16000; graphlearn-for-pytorch data/feature.py and
distributed/dist_feature.py at 26fe3d4; GiGL gigl/types/graph.py and distributed/dist_dataset.py at fee4ba5;
cuGraph-PyG sampler/sampler_utils.py and data/graph_store.py of rapidsai/cugraph-gnn at 17a426d, over the PyG
that is installed.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import ArgumentError, IdError, MissingPackageError, NotInMemoryError, SourceError

PackSmall = Callable[..., featstore.Store]

torch = pytest.importorskip("torch")

NODES, EDGES = 90, 40
X = np.random.default_rng(0).standard_normal((NODES, 4)).astype(np.float32)
CUBES = np.arange(NODES * 6, dtype=np.int16).reshape(NODES, 2, 3)
EDGE_X = np.arange(EDGES * 2, dtype=np.float64).reshape(EDGES, 2)
MODULES = ("graphbolt", "graphlearn", "gigl")


class Feature:
    """GraphBolt's base class: every method that a subclass does not have is not implemented."""

    def metadata(self) -> dict[str, Any]:
        return {}


class BasicFeatureStore:
    """GraphBolt's: features by key."""

    def __init__(self, features: dict[Any, Any]) -> None:
        self._features = features

    def __getitem__(self, key: Any) -> Any:
        return self._features[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._features


class HeldFeature:
    """graphlearn-for-pytorch's: without a tensor its constructor holds what it was given, and no more."""

    def __init__(
        self, feature_tensor: Any, id2index: Any = None, split_ratio: float = 0.0,
        device_group_list: Any = None, device: Any = None, with_gpu: bool = True, dtype: Any = None,
    ) -> None:  # fmt: skip
        assert feature_tensor is None
        assert not with_gpu
        self.feature_tensor, self.id2index, self.with_gpu, self.dtype = None, id2index, with_gpu, dtype


@dataclass
class FeatureInfo:
    """GiGL's."""

    dim: int
    dtype: Any


@pytest.fixture(scope="module")
def frameworks() -> Iterator[Any]:
    """The adapters, over modules with the names of the frameworks'."""
    names = ("dgl", "dgl.graphbolt", "graphlearn_torch", "graphlearn_torch.data")
    made = {name: ModuleType(name) for name in (*names, "gigl", "gigl.types", "gigl.types.graph")}
    made["dgl"].graphbolt = made["dgl.graphbolt"]  # type: ignore[attr-defined]
    made["dgl.graphbolt"].Feature = Feature  # type: ignore[attr-defined]
    made["dgl.graphbolt"].BasicFeatureStore = BasicFeatureStore  # type: ignore[attr-defined]
    made["graphlearn_torch.data"].Feature = HeldFeature  # type: ignore[attr-defined]
    made["gigl.types.graph"].FeatureInfo = FeatureInfo  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        for name, module in made.items():
            patch.setitem(sys.modules, name, module)
        for name in MODULES:
            patch.delitem(sys.modules, f"featstore.adapters.{name}", raising=False)
        yield {name: importlib.import_module(f"featstore.adapters.{name}") for name in MODULES}
        for name in MODULES:
            patch.delitem(sys.modules, f"featstore.adapters.{name}", raising=False)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, pack: PackSmall) -> Iterator[featstore.Store]:
    path = tmp_path_factory.mktemp("features") / "store"
    with pack(path, {"x": X, "cubes": CUBES, "links": EDGE_X}) as made:
        yield made


@pytest.fixture(scope="module")
def arrays(store: featstore.Store) -> Iterator[dict[str, featstore.TableArray]]:
    with store.reader(memory="4MiB") as reader:
        yield {name: featstore.TableArray(reader, name) for name in store.tables}


@pytest.mark.parametrize("name", MODULES)
def test_without_its_framework_an_adapter_says_what_it_needs(name: str, monkeypatch: Any) -> None:
    for missing in ("dgl", "graphlearn_torch", "gigl"):
        monkeypatch.setitem(sys.modules, missing, None)
    for module in MODULES:
        monkeypatch.delitem(sys.modules, f"featstore.adapters.{module}", raising=False)
    with pytest.raises(MissingPackageError, match="needs"):
        importlib.import_module(f"featstore.adapters.{name}")


# GraphBolt.


def fetch(store: Any, key: Any, ids: Any) -> Any:
    """What ``FeatureFetcher`` does with a key, stage by stage."""
    feature = store[key]
    stages = feature.read_async_num_stages(ids.device)
    handle = feature.read_async(ids)
    for _ in range(stages):
        value = next(handle)
    return value.wait()


def test_graphbolt_fetches_rows(frameworks: Any, arrays: Any) -> None:
    tables = {("node", None, "feat"): arrays["x"], ("node", None, "cubes"): arrays["cubes"]}
    features = frameworks["graphbolt"].feature_store(tables | {("edge", "a:to:b", "feat"): arrays["links"]})
    assert isinstance(features, BasicFeatureStore)
    assert ("node", None, "feat") in features
    for key, rows, ids in [
        (("node", None, "feat"), X, torch.tensor([5, 5, 0], dtype=torch.int32)),
        (("node", None, "cubes"), CUBES, torch.tensor([89, 1])),
        (("edge", "a:to:b", "feat"), EDGE_X, torch.tensor([], dtype=torch.int64)),
    ]:
        feature, expected = features[key], torch.from_numpy(rows)[ids.long()]
        assert isinstance(feature, Feature)
        assert torch.equal(feature.read(ids), expected)
        assert torch.equal(fetch(features, key, ids), expected)
        assert torch.equal(feature.read(), torch.from_numpy(rows))
        assert (feature.size(), feature.count()) == (torch.Size(rows.shape[1:]), len(rows))
        assert feature.metadata() == {}
        with pytest.raises(SourceError, match="read-only"):
            feature.update(expected, ids)


def test_graphbolt_reads_several_mini_batches_at_once(frameworks: Any, arrays: Any) -> None:
    feature = frameworks["graphbolt"].GraphBoltFeature(arrays["x"], {"kind": "text"})
    waiting = [next(feature.read_async(torch.arange(low, low + 10))) for low in range(0, 90, 10)]
    assert torch.equal(torch.cat([rows.wait() for rows in waiting]), torch.from_numpy(X))
    assert feature.metadata() == {"kind": "text"}
    assert not feature.is_pinned()
    for move in (lambda: feature.to("cuda"), feature.pin_memory_):
        with pytest.raises(SourceError, match="cannot be moved"):
            move()


def test_graphbolt_is_refused_what_cannot_be(frameworks: Any, arrays: Any, tmp_path: Path, pack: Any) -> None:
    graphbolt = frameworks["graphbolt"]
    feature = graphbolt.GraphBoltFeature(arrays["x"])
    with pytest.raises(IdError):
        feature.read(torch.tensor([NODES]))
    with pytest.raises(IdError):
        fetch({0: feature}, 0, torch.tensor([-1]))
    for read in (feature.read, lambda ids: next(feature.read_async(ids))):
        with pytest.raises(ArgumentError, match="tensor"):
            read([1])
    with pytest.raises(ArgumentError, match="array"):
        graphbolt.GraphBoltFeature(X)
    with pytest.raises(ArgumentError, match="a key is"):
        graphbolt.feature_store({"feat": arrays["x"]})
    large = pack(tmp_path / "large", np.ones((4000, 50), np.float32))
    with large, large.table("features", memory="700KiB") as array, pytest.raises(NotInMemoryError):
        graphbolt.GraphBoltFeature(array).read()


# graphlearn-for-pytorch and GiGL.


class Offset:
    """The ``id2index`` of a range partition book."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def __getitem__(self, ids: Any) -> Any:
        return ids - self.offset


def test_graphlearn_looks_rows_up(frameworks: Any, arrays: Any) -> None:
    feature = frameworks["graphlearn"].GraphLearnFeature(arrays["x"])
    assert isinstance(feature, HeldFeature)
    feature.lazy_init_with_ipc_handle()
    ids = torch.tensor([3, 80, 3])
    for found in (feature[ids], feature.cpu_get(ids)):
        assert torch.equal(found, torch.from_numpy(X)[ids])
    assert (feature.shape, feature.size(0), feature.size(-1)) == (torch.Size([NODES, 4]), NODES, 4)
    assert feature.dtype == torch.float32
    with pytest.raises(IdError):
        feature[torch.tensor([-1])]
    with pytest.raises(ArgumentError, match="tensor"):
        feature[[1]]
    with pytest.raises(ArgumentError, match="dim"):
        feature.size(2)


@pytest.mark.parametrize("id2index", [Offset(100), torch.arange(-100, NODES)], ids=["range", "tensor"])
def test_graphlearn_looks_rows_of_a_partition_up(frameworks: Any, arrays: Any, id2index: Any) -> None:
    feature = frameworks["graphlearn"].GraphLearnFeature(arrays["x"], id2index)
    ids = torch.tensor([103, 189])
    assert torch.equal(feature[ids], torch.from_numpy(X)[ids - 100])
    for wrong in (99, -1):  # of another partition, and what a tensor counts from its end
        with pytest.raises(IdError):
            feature[torch.tensor([wrong])]


def test_graphlearn_hands_it_to_other_processes(frameworks: Any, arrays: Any) -> None:
    feature = frameworks["graphlearn"].GraphLearnFeature(arrays["x"], torch.arange(NODES))
    for other in (
        pickle.loads(ForkingPickler.dumps(feature)),
        type(feature).from_ipc_handle(feature.share_ipc()),
    ):
        assert torch.equal(other[torch.tensor([7])], torch.from_numpy(X[7:8]))
        if other.array is not feature.array:
            other.array.source.close()


def test_gigl_takes_them(frameworks: Any, arrays: Any) -> None:
    gigl, ids = frameworks["gigl"], torch.tensor([105])
    one = gigl.node_features(arrays["x"], Offset(100))
    assert set(one) == {"node_feature_partition", "node_feature_info"}
    assert one["node_feature_info"] == FeatureInfo(4, torch.float32)
    assert torch.equal(one["node_feature_partition"][ids], torch.from_numpy(X[5:6]))
    relation = ("a", "to", "b")
    several = gigl.edge_features({relation: arrays["links"]}, {relation: Offset(100)})
    assert several["edge_feature_info"] == {relation: FeatureInfo(2, torch.float64)}
    assert torch.equal(several["edge_feature_partition"][relation][ids], torch.from_numpy(EDGE_X[5:6]))
    with pytest.raises(ArgumentError, match="one axis"):
        gigl.node_features(arrays["cubes"])
    for wrong in (Offset(1), {"other": Offset(1)}):
        with pytest.raises(ArgumentError, match="id2index"):
            gigl.node_features({"a": arrays["x"]}, wrong)


# cuGraph-PyG, over PyG.


def filtered(features: Any, node: Any, edge: Any) -> dict[str, Any]:
    """What ``filter_cugraph_pyg_store`` asks for a mini-batch of a graph of one type."""
    asked = features.get_all_tensor_attrs()
    for attr in asked:
        attr.index = edge if isinstance(attr.group_name, tuple) else node
    return {
        attr.attr_name: found for attr, found in zip(asked, features.multi_get_tensor(asked), strict=True)
    }


def test_cugraph_asks_for_nodes_and_edges(store: featstore.Store) -> None:
    pytest.importorskip("torch_geometric")
    from featstore.adapters.cugraph import CuGraphFeatures

    relation = ("paper", "cites", "paper")
    tables = {("paper", "x"): "x", ("paper", "cubes"): "cubes", (relation, "edge_attr"): "links"}
    time = np.arange(EDGES)
    with store.reader(memory="4MiB") as reader:
        features = CuGraphFeatures(reader, tables, arrays={(relation, "time"): time})
        node, edge = torch.tensor([3, 0, 70]), torch.tensor([39, 39, 2])
        found = filtered(features, node, edge)
        assert torch.equal(found["x"], torch.from_numpy(X)[node])
        assert torch.equal(found["cubes"], torch.from_numpy(CUBES)[node])
        assert torch.equal(found["edge_attr"], torch.from_numpy(EDGE_X)[edge])
        assert torch.equal(found["time"], edge)
        assert torch.equal(features[relation, "time"][torch.arange(5)], torch.arange(5))  # as temporal graphs
        assert torch.equal(features["paper", "x", None][node], torch.from_numpy(X)[node])
        both = CuGraphFeatures(reader, {("paper", "x"): "x", ("author", "x"): "cubes"})
        with pytest.raises(SourceError, match="'paper' and of 'author'"):
            filtered(both, node, edge)


def test_cugraph_has_rows_where_ids_are() -> None:
    pytest.importorskip("torch_geometric")
    from featstore.adapters.cugraph import beside

    meta = torch.zeros(2, dtype=torch.int64, device="meta")
    assert beside(torch.ones(2, 3), meta).device.type == "meta"
    assert isinstance(beside(np.ones(2), np.ones(2, np.int64)), np.ndarray)
