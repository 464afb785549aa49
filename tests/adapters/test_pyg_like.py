"""What PyG's loaders give and ours are to give as well, found by PyG's own tests run over stores."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch_geometric")

import featstore
from featstore.errors import ArgumentError, BudgetError, FeatstoreWarning, SourceError

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch
    from torch_geometric.data import Data, HeteroData

    from featstore.adapters.pyg import LinkNeighborLoader, NeighborLoader

NODES, EDGES = 80, 400


def plain(**more: Any) -> Data:
    edges = torch.from_numpy(np.random.default_rng(5).integers(0, NODES, (2, EDGES)))
    return Data(x=torch.arange(NODES, dtype=torch.float32)[:, None], edge_index=edges, **more)


def typed() -> HeteroData:
    rng, data = np.random.default_rng(6), HeteroData()
    data["paper"].x = torch.arange(60)
    data["author"].x = torch.arange(40)
    for source, target in (("paper", "paper"), ("paper", "author"), ("author", "paper")):
        ends = [rng.integers(0, 60 if one == "paper" else 40, 200) for one in (source, target)]
        data[source, target].edge_index = torch.from_numpy(np.stack(ends))
        data[source, target].edge_weight = torch.arange(200, dtype=torch.float32)
    return data


def check_edges(found: Any, data: Any, sources: Any, targets: Any) -> None:
    """Edges are the user's, by number, with their weights."""
    assert found.e_id.numel() == found.edge_index.shape[1] > 0
    ends = torch.stack([sources[found.edge_index[0]], targets[found.edge_index[1]]])
    assert torch.equal(ends, data.edge_index[:, found.e_id])
    assert torch.equal(found.edge_weight, data.edge_weight[found.e_id])


@pytest.mark.parametrize("mode", ["online", "compiled", "rolling", "partitions"])
def test_values_of_edges(tmp_path: Path, mode: str) -> None:
    """PyG's Data answers None for an edge_weight that it does not have, and a model learns without."""
    data = plain(edge_weight=torch.rand(EDGES), weight_of_edge=torch.arange(EDGES))
    more = {"order": "ldg", "partitions": 4} if mode == "partitions" else {}
    store = featstore.pack(tmp_path / "s", data, **more)
    named: dict[str, Any] = {} if mode in ("online", "partitions") else {"name": "l", "disk": "9x"}
    named["shuffle"] = mode == "partitions"
    with NeighborLoader(store, [4, 4], batch_size=20, memory="64MiB", mode=mode, **named) as loader:
        for batch in loader:
            check_edges(batch, data, batch.n_id, batch.n_id)
            assert torch.equal(batch.weight_of_edge, batch.e_id)
            assert "train_mask" not in batch
    with LinkNeighborLoader(store, [4], batch_size=50, memory="256MiB") as links:
        for batch in links:
            check_edges(batch, data, batch.n_id, batch.n_id)
    with NeighborLoader(store, [4], attach=(), batch_size=80, memory="64MiB") as loader:
        assert "edge_weight" not in next(iter(loader))
    store.close()


def test_values_of_edges_without_numbers(tmp_path: Path) -> None:
    data = plain(edge_weight=torch.rand(EDGES))
    with pytest.warns(FeatstoreWarning, match="edge_weight"):
        store = featstore.pack(tmp_path / "s", data, edge_ids=False)
    with pytest.warns(FeatstoreWarning, match="do not have edge_weight.*edge_ids=True"):
        loader = NeighborLoader(store, [4], memory="64MiB")
    with loader:
        assert "edge_weight" not in next(iter(loader))
    with pytest.raises(SourceError, match=r"edge_weight.*edge_ids=True"):
        store.loader(seeds=np.arange(9), fanouts=(3,), attach="edge_weight", memory="64MiB")
    store.close()


def test_as_many_edges_as_nodes(tmp_path: Path) -> None:
    """PyG takes what is then called edge_... for values of edges."""
    data = Data(
        x=torch.zeros(6, 1), edge_index=torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]]),
        edge_weight=torch.arange(6.0), y=torch.arange(6),
    )  # fmt: skip
    store = featstore.pack(tmp_path / "s", data, order="permutation", permutation=[3, 1, 5, 0, 2, 4])
    with NeighborLoader(store, [1], [2, 4], batch_size=2, memory="64MiB") as loader:
        batch = next(iter(loader))
    assert torch.equal(batch.y, batch.n_id)
    assert torch.equal(batch.edge_weight, batch.e_id.float())
    store.close()


def test_seeds_of_a_mask_are_called_by_their_ids(tmp_path: Path) -> None:
    mask = torch.zeros(NODES, dtype=torch.bool)
    mask[[3, 8, 41]] = True
    store = featstore.pack(tmp_path / "s", plain(train_mask=mask))
    for given in (mask, mask.numpy(), "train_mask", (None, mask)):
        with NeighborLoader(store, [2], given, batch_size=2, memory="64MiB") as loader:
            assert [batch.input_id.tolist() for batch in loader] == [[3, 8], [41]]
    with NeighborLoader(store, [2], torch.tensor([8, 41, 3]), batch_size=2, memory="64MiB") as loader:
        assert [batch.input_id.tolist() for batch in loader] == [[0, 1], [2]]
    store.close()
    data = typed()
    data["author"].train_mask = mask[:40]
    with featstore.pack(tmp_path / "t", data) as store:
        for given in (("author", mask[:40]), ("author", "train_mask")):
            with NeighborLoader(store, [2], given, batch_size=2, memory="64MiB") as loader:
                assert [batch["author"].input_id.tolist() for batch in loader] == [[3, 8]]


def test_values_of_typed_edges(tmp_path: Path) -> None:
    data = typed()
    with featstore.pack(tmp_path / "s", data) as store:
        options: dict[str, Any] = {"batch_size": 20, "memory": "256MiB"}
        with NeighborLoader(store, [3, 3], "paper", **options) as loader:
            batch = next(iter(loader))
        for one in data.edge_types:
            check_edges(batch[one], data[one], batch[one[0]].n_id, batch[one[2]].n_id)
        fanouts = {("paper", "paper"): [2], ("paper", "author"): [0], ("author", "paper"): [0]}
        with NeighborLoader(store, fanouts, "paper", **options) as loader:
            batch = next(iter(loader))
        assert batch["author", "paper"].num_edges == 0 < batch["paper", "paper"].num_edges


def test_bidirectional_typed_edges_have_no_numbers(tmp_path: Path) -> None:
    """Of the reverse of another relation's edge PyG knows no number, and gives none of any; -1 would be the
    last edge's."""
    data = typed()
    data["author", "paper"].edge_attr = torch.arange(200)
    with featstore.pack(tmp_path / "s", data) as store:
        options: dict[str, Any] = {"batch_size": 20, "memory": "256MiB", "subgraph_type": "bidirectional"}
        with pytest.warns(FeatstoreWarning) as told:
            loader: Any = NeighborLoader(store, [3, 3], "paper", **options)
        text = " ".join(str(one.message) for one in told)
        assert "author__paper" not in text
        assert "author__to__paper.edge_weight" in text
        assert "no edge_attr of author__to__paper" in text
        with loader:
            batch = next(iter(loader))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FeatstoreWarning)
            links = LinkNeighborLoader(store, [3, 3], ("paper", "author"), **options)
        with links:
            around = next(iter(links))
        for made in (batch, around):
            for one in (("paper", "author"), ("author", "paper")):
                assert not {"e_id", "edge_attr", "edge_weight"} & set(made[one].keys())
            same = made["paper", "paper"]
            assert torch.equal(same.edge_weight, same.e_id.float())
        with store.loader(
            seeds=("paper", np.arange(20)), fanouts=(3, 3), edge_table="author__to__paper", memory="256MiB",
            subgraph_type="bidirectional",
        ) as own, pytest.raises(SourceError, match=r"no number.*leave it out"):  # fmt: skip
            next(iter(own))


def test_links_named_by_their_two_ends(tmp_path: Path) -> None:
    data = typed()
    with featstore.pack(tmp_path / "s", data, edge_ids=True) as store:
        for given in (("paper", "author"), (("paper", "author"), None), ("paper", "to", "author")):
            with LinkNeighborLoader(store, [2], given, batch_size=200, memory="256MiB") as loader:
                batch = next(iter(loader))
            found = batch["paper", "author"].edge_label_index
            ends = torch.stack([batch["paper"].n_id[found[0]], batch["author"].n_id[found[1]]])
            assert torch.equal(ends, data["paper", "author"].edge_index)
        with pytest.raises(ArgumentError, match="edge_label_index"):
            LinkNeighborLoader(store, [2], ("author", "author"), memory="256MiB")
    data["paper", "cites", "author"].edge_index = data["paper", "author"].edge_index
    with (
        featstore.pack(tmp_path / "t", data) as store,
        pytest.raises(ArgumentError, match="name all three"),
    ):
        LinkNeighborLoader(store, [2], ("paper", "author"), memory="256MiB")


def test_labels_of_edges_that_nobody_numbers(tmp_path: Path) -> None:
    """They would be other edges' labels: lists are in the store's order."""
    data = plain(time=torch.arange(NODES))
    told = {"edge_label": torch.arange(EDGES)}, {"edge_label_time": torch.full((EDGES,), 99)}
    with featstore.pack(tmp_path / "s", data, edge_ids=False) as store:
        for one in told:
            with pytest.raises(SourceError, match=r"numbers.*edge_ids=True"):
                LinkNeighborLoader(
                    store,
                    [2],
                    memory="256MiB",
                    **one,
                    **({"time_attr": "time"} if "edge_label_time" in one else {}),
                )
        with LinkNeighborLoader(store, [2], memory="256MiB", batch_size=EDGES) as loader:
            assert "input_id" not in next(iter(loader)), "a number that nobody knows"
    with featstore.pack(tmp_path / "t", data, edge_ids=True) as store:
        with LinkNeighborLoader(store, [2], memory="256MiB", batch_size=EDGES, **told[0]) as loader:
            batch = next(iter(loader))
        assert torch.equal(batch.n_id[batch.edge_label_index], data.edge_index[:, batch.edge_label])
        assert torch.equal(batch.input_id, torch.arange(EDGES))


@pytest.mark.parametrize("what", ["weight_attr", "time_attr"])
def test_typed_weights_and_times_by_pygs_names(tmp_path: Path, what: str) -> None:
    data = typed()
    for one in data.edge_types:
        data[one].edge_time = torch.arange(200) % 50
        data[one].edge_weight = (torch.arange(200) % 3 == 0).float()
    with featstore.pack(tmp_path / "s", data) as store:
        said: dict[str, Any] = {"weight_attr": "edge_weight"}
        if what == "time_attr":
            said = {"time_attr": "edge_time", "input_time": np.full(60, 20)}
        with NeighborLoader(store, [5, 5], "paper", batch_size=60, memory="256MiB", **said) as loader:
            batch = next(iter(loader))
        for one in data.edge_types:
            assert batch[one].num_edges > 0
            if what == "weight_attr":
                assert bool((batch[one].edge_weight == 1).all())
            else:
                assert int(batch[one].edge_time.max()) <= 20
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FeatstoreWarning)
        store = featstore.pack(tmp_path / "t", data, edge_ids=False)
        with store, pytest.raises(SourceError, match=r"numbers of edges.*edge_ids=True"):
            NeighborLoader(store, [5], "paper", memory="256MiB", **said)


def test_arrays_as_weights_need_the_graphs_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From disk they would not be looked at."""
    from featstore.adapters import pyg_types
    from featstore.loaders import samplers

    for module in (pyg_types, samplers):
        monkeypatch.setattr(module, "typed_bytes", lambda store: 1 << 30)
    with featstore.pack(tmp_path / "s", typed()) as store:
        words = "hold the graphs in memory, which weight_attr='edge_weight' is sampled from"
        said: dict[str, Any] = {"memory": "256MiB", "weight_attr": "edge_weight"}
        with pytest.raises(BudgetError, match=words) as of_nodes:
            NeighborLoader(store, [5, 5], "paper", batch_size=60, **said)
        with pytest.raises(BudgetError, match=words) as of_links:
            LinkNeighborLoader(store, [5], (("paper", "to", "paper"), None), **said)
    for error in (of_nodes, of_links):
        assert 1 << 30 < error.value.needed_bytes < 1.02 * (1 << 30)
