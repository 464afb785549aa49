"""What PyG's loaders over a store are asked by name: one thing is meant, or it is an error that says what to do."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch_geometric")

import featstore
from featstore.errors import ArgumentError

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch
    from torch_geometric.data import HeteroData

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
