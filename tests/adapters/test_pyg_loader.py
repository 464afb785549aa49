"""PyG's ``NeighborLoader`` over a store: what PyG's loader gives, in the same call."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch_geometric")

import featstore
from featstore.errors import (
    ArgumentError,
    FeatstoreWarning,
    IdError,
    SourceError,
    UnknownNameError,
)
from featstore.sampling.batches import open_sampler

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch
    from torch_geometric.data import Data
    from torch_geometric.loader import NodeLoader
    from torch_geometric.nn import SAGEConv

    from featstore.adapters.pyg import FeatstoreFeatures, FeatstoreSampler, NeighborLoader

NODES = 300


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(3)
    edges = rng.integers(0, NODES, (2, 6 * NODES))
    made = {
        "x": rng.standard_normal((NODES, 9), np.float32), "y": rng.integers(0, 4, NODES),
        "train_mask": rng.random(NODES) < 0.4, "some": rng.permutation(NODES)[:50],
        "edges": set(zip(*edges.tolist(), strict=True)),
    }  # fmt: skip
    arrays = {name: made[name] for name in ("y", "train_mask", "some")}
    path = tmp_path_factory.mktemp("loader") / "s"
    with featstore.pack(path, made["x"], graph=edges, arrays=arrays, order="ldg", partitions=8) as store:
        yield made | {"store": store}


def check(data: Any, world: dict[str, Any]) -> None:
    """All of a mini-batch is the source's."""
    n_id = data.n_id.numpy()
    assert len(np.unique(n_id)) == len(n_id) == data.num_nodes
    np.testing.assert_array_equal(data.x.numpy(), world["x"][n_id])
    np.testing.assert_array_equal(data.y.numpy(), world["y"][n_id])
    np.testing.assert_array_equal(data.train_mask.numpy(), world["train_mask"][n_id])
    row, col = n_id[data.edge_index.numpy()]
    assert set(zip(row.tolist(), col.tolist(), strict=True)) <= world["edges"]
    assert sum(data.num_sampled_nodes) == len(n_id)
    assert sum(data.num_sampled_edges) == data.edge_index.shape[1]


@pytest.mark.parametrize(
    ("nodes", "seeds"),
    [
        (None, lambda w: np.arange(NODES)),
        ("train_mask", lambda w: np.flatnonzero(w["train_mask"])),
        ("some", lambda w: w["some"]),
        (torch.tensor([7, 3, 250]), lambda w: [7, 3, 250]),
        ((None, [5, 4]), lambda w: [5, 4]),
        (torch.arange(NODES) % 7 == 0, lambda w: np.arange(0, NODES, 7)),
    ],
)
def test_mini_batches_come_in_the_order_of_the_nodes(world: dict[str, Any], nodes: Any, seeds: Any) -> None:
    expected = np.asarray(seeds(world))
    with NeighborLoader(world["store"], [4, -1], nodes, batch_size=16, memory="64MiB") as loader:
        assert len(loader) == -(-len(expected) // 16)
        for _ in range(2):
            seen, places = [], []
            for data in loader:
                check(data, world)
                seen.extend(data.n_id[: data.batch_size].tolist())
                places.extend(data.input_id.tolist())
            assert seen == expected.tolist()
            given = world[nodes] if isinstance(nodes, str) else nodes
            masked = getattr(given, "dtype", None) in (torch.bool, np.dtype(bool))  # as in PyG then ids
            assert places == (expected.tolist() if masked else list(range(len(expected))))


def test_shuffled_mini_batches_differ_from_epoch_to_epoch(world: dict[str, Any]) -> None:
    with NeighborLoader(
        world["store"], [3], "some", batch_size=20, shuffle=True, drop_last=True, seed=5, memory="64MiB"
    ) as loader:
        assert len(loader) == 2
        orders = []
        for _ in range(2):
            order = []
            for data in loader:
                assert data.batch_size == 20
                np.testing.assert_array_equal(world["some"][data.input_id.numpy()], data.n_id[:20].numpy())
                order.extend(data.input_id.tolist())
            orders.append(order)
        assert orders[0] != orders[1]
        loader.set_epoch(0)
        assert [i for data in loader for i in data.input_id.tolist()] == orders[0]
        assert loader.report().batches >= 6


def test_it_has_what_pygs_own_loader_gives(world: dict[str, Any]) -> None:
    """Beside ``e_id``, and the same dtypes: held against PyG's NodeLoader over featstore's sampler."""
    store = world["store"]
    sampler = open_sampler(store, [4, 3])
    with store.reader(memory="32MiB") as reader:
        features = FeatstoreFeatures(reader, arrays={(None, "y"): world["y"]})
        graph = Data(num_nodes=NODES, edge_index=torch.zeros(2, 0, dtype=torch.long))
        theirs = next(
            iter(NodeLoader((features, graph), FeatstoreSampler(sampler), torch.arange(8), batch_size=8))
        )
    with NeighborLoader(store, [4, 3], torch.arange(8), batch_size=8, attach="y", memory="64MiB") as loader:
        ours = next(iter(loader))
    wanted = set(theirs.keys()) - {"e_id", "num_nodes"}
    assert wanted <= set(ours.keys()), wanted - set(ours.keys())
    for name in wanted:
        one, other = ours[name], theirs[name]
        assert type(one) is type(other), name
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype, name


def test_the_loop_of_a_user(world: dict[str, Any]) -> None:
    """A model learns; ``transform`` is called with each mini-batch."""
    torch.manual_seed(0)
    conv, out = SAGEConv(9, 16), SAGEConv(16, 4)
    optimiser = torch.optim.Adam([*conv.parameters(), *out.parameters()], lr=0.02)
    calls: list[int] = []

    def scaled(data: Any) -> Any:
        calls.append(data.batch_size)
        data.x = data.x * 2
        return data

    loader = NeighborLoader(
        world["store"], num_neighbors=[10, 5], input_nodes="train_mask", batch_size=32, shuffle=True,
        transform=scaled, memory="64MiB",
    )  # fmt: skip
    losses = []
    for _ in range(12):
        total = 0.0
        for data in loader:
            np.testing.assert_array_equal(data.x.numpy(), 2 * world["x"][data.n_id.numpy()])
            logits = out(conv(data.x, data.edge_index).relu(), data.edge_index)[: data.batch_size]
            loss = torch.nn.functional.cross_entropy(logits, data.y[: data.batch_size])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += float(loss.detach())
        losses.append(total)
    assert losses[-1] < 0.9 * losses[0]
    assert sum(calls) == 12 * int(world["train_mask"].sum())
    loader.close()
    loader.close()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), fanout=st.integers(-1, 5), batch=st.integers(1, 40), shuffle=st.booleans())
def test_every_mini_batch_is_the_sources(
    world: dict[str, Any], seed: int, fanout: int, batch: int, shuffle: bool
) -> None:
    fanout = fanout or 1
    nodes = np.random.default_rng(seed).permutation(NODES)[:70]
    with NeighborLoader(
        world["store"], [fanout, 2], nodes, batch_size=batch, shuffle=shuffle, seed=seed, memory="64MiB",
        mode="online",
    ) as loader:  # fmt: skip
        seen = []
        for data in loader:
            check(data, world)
            seen.extend(data.n_id[: data.batch_size].tolist())
    assert sorted(seen) == sorted(nodes.tolist())
    assert shuffle or seen == nodes.tolist()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"replace": 1}, ArgumentError, "replace must be True or False"),
        ({"subgraph_type": "induce"}, ArgumentError, "did you mean 'induced'"),
        ({"weight_attr": "w"}, UnknownNameError, "weight_attr: the store has no array 'w'"),
        ({"weight_attr": "y"}, SourceError, "'y' has 300 values; the graph has 1,800 edges"),
        ({"time_attr": "some"}, SourceError, "50 values; the graph has 1,800 edges and 300 nodes"),
        ({"input_time": torch.arange(3)}, ArgumentError, "time_attr="),
        ({"time_attr": "y", "input_time": torch.arange(3)}, SourceError, "input_time must be integers.*300"),
        ({"neighbor_sampler": 3}, SourceError, "neighbor_sampler"),
        ({"num_neighbors": {("a", "b", "c"): [2]}}, SourceError, "edge type"),
        ({"input_nodes": ("paper", None)}, SourceError, "'paper'"),
        ({"input_nodes": torch.ones(5, dtype=torch.bool)}, ArgumentError, "each of 300 nodes"),
        ({"input_nodes": [0.5]}, ArgumentError, "node ids or a mask"),
        ({"input_nodes": np.ma.array([1, 2], mask=[True, False])}, ArgumentError, "mask would be lost"),
        ({"input_nodes": [NODES]}, IdError, "out of range"),
        ({"input_nodes": "tran_mask"}, UnknownNameError, "train_mask"),
        ({"batch_sise": 4}, ArgumentError, "batch_size"),
        ({"generator": 3}, SourceError, "generator= is of torch"),
        ({"seeds": [1]}, ArgumentError, "no option 'seeds'"),
        ({"mode": "compiled", "reuse": True}, ArgumentError, "no option 'reuse'"),
        ({"input_time": np.arange(3)}, ArgumentError, "time_attr="),
        ({"attach": "num_nodes"}, ArgumentError, "'num_nodes' means something else"),
        ({"shuffle": "yes"}, ArgumentError, "shuffle"),
        ({"attach": "some"}, ArgumentError, "each of 300 nodes"),
    ],
)
def test_what_it_cannot_do_is_an_error(
    world: dict[str, Any], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    arguments = {"num_neighbors": [2], "memory": "128MiB"} | options
    with pytest.raises(error, match=words):
        NeighborLoader(world["store"], **arguments)


def test_what_has_no_effect_is_told(world: dict[str, Any], tmp_path: Any, pack: Any) -> None:
    with pytest.warns(FeatstoreWarning, match=re.escape("num_workers, pin_memory: no effect")):
        NeighborLoader(world["store"], [2], num_workers=4, pin_memory=True, memory="64MiB").close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NeighborLoader(
            world["store"], [2], num_workers=0, replace=False, subgraph_type="directional", memory="64MiB",
            collate_fn=None, generator=None, worker_init_fn=None, shuffle=None, drop_last=None,
        ).close()  # fmt: skip
    edges = np.array([[0, 1, 2], [1, 2, 0]])
    tables = {"features": np.zeros((3, 2)), "edge_features": np.zeros((3, 1))}
    with (
        pack(tmp_path / "e", tables, graph={"features": edges}, edge_ids=False) as store,
        pytest.warns(FeatstoreWarning, match="no edge_attr: table 'edge_features'"),
    ):
        NeighborLoader(store, [2], memory="64MiB").close()
    ring = np.array([np.arange(9), (np.arange(9) + 1) % 9])
    arrays = {name: np.arange(9) for name in ("num_nodes", "edge_weight", "batch", "e_id", "x", "y", "row")}
    with pack(tmp_path / "n", np.zeros((9, 2)), graph=ring, arrays=arrays) as store:
        with pytest.warns(FeatstoreWarning) as told:
            loader = NeighborLoader(store, [2], batch_size=4, memory="64MiB")
        text = " ".join(str(one.message) for one in told)
        assert "do not have num_nodes, batch, e_id, x, row:" in text
        assert "do not have edge_weight: values of edges" in text
        for data in loader:
            assert data.num_nodes == len(data.n_id)
            np.testing.assert_array_equal(data.y, data.n_id)
            assert "edge_weight" not in data
        loader.close()
    with pytest.raises(ArgumentError, match="data must be an open store"):
        NeighborLoader(Data(), [2])
