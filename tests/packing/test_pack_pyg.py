"""PyG objects: what is stored, what is refused, what is warned of. Nothing vanishes in silence."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.errors import FeatstoreWarning, SourceError

with warnings.catch_warnings():
    # PyG's own import uses what torch deprecates; not ours to mend.
    warnings.simplefilter("ignore")
    from torch_geometric.data import Data, HeteroData

EDGES = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])


def hetero(*more: tuple[str, str, str]) -> HeteroData:
    data = HeteroData()
    data["paper"].x = torch.arange(8.0).reshape(4, 2)
    data["author"].x = torch.ones(3, 5)
    for kind in more:
        data[kind].edge_index = EDGES[:, : 2 + len(kind[1]) % 3]
    return data


CITES, WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")
LIKES, KNOWS = ("paper", "likes", "paper"), ("author", "knows", "author")


@pytest.mark.parametrize("relations", [(CITES, WRITES), (WRITES,), (CITES,), (CITES, WRITES, LIKES, KNOWS)])
def test_relations_are_not_lost(tmp_path: Path, relations: Any) -> None:
    data = hetero(*relations)
    with featstore.pack(tmp_path / "s", data) as store:
        assert store.edge_types == list(relations)
        for kind in relations:
            assert store.graphs["__".join(kind)].edges == data[kind].edge_index.shape[1]
    with featstore.pack(tmp_path / "t", data, graph={}) as store:
        assert set(store.tables) == {"paper", "author"}
        assert not store.graphs


def test_nodes_without_features_or_number_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"nodes of 'venue', which are not packed"):
        featstore.pack(tmp_path / "s", hetero(("venue", "near", "venue")))
    assert not (tmp_path / "s").exists()


def test_relations_that_are_named_are_kept(tmp_path: Path) -> None:
    data = hetero(CITES, WRITES, LIKES, KNOWS)
    chosen = {"paper": data["paper", "likes", "paper"], "author": data["author", "knows", "author"]}
    with featstore.pack(tmp_path / "s", data, graph=chosen) as store:
        assert {name: g.edges for name, g in store.graphs.items()} == {
            name: relation.edge_index.shape[1] for name, relation in chosen.items()
        }
    for graph, message in (
        ({"paper": data["author", "writes", "paper"]}, "joins nodes of 'author' and 'paper'"),
        ({"author": data["paper", "likes", "paper"]}, "the graph of a table 'author'"),
        ({"venue": data["paper", "likes", "paper"]}, "'venue'"),
        (data["paper", "likes", "paper"], "several tables"),
    ):
        with pytest.raises(SourceError, match=message):
            featstore.pack(tmp_path / "t", data, graph=graph)


def test_one_relation_of_each_table_with_itself_is_all_there_is(tmp_path: Path) -> None:
    with featstore.pack(tmp_path / "s", hetero(CITES, KNOWS)) as store:
        assert set(store.graphs) == {"paper__cites__paper", "author__knows__author"}
    with featstore.pack(tmp_path / "t", hetero()) as store:
        assert not store.graphs


def test_a_relation_is_a_graph_of_other_features(tmp_path: Path) -> None:
    data = hetero(CITES)
    with featstore.pack(tmp_path / "s", data["paper"].x, graph=data["paper", "cites", "paper"]) as store:
        assert store.graphs["features"].edges == data["paper", "cites", "paper"].edge_index.shape[1]


def test_all_tensors_of_nodes_are_stored_without_a_word(tmp_path: Path) -> None:
    more = {"y": torch.arange(3), "pos": torch.ones(3, 2), "train_mask": torch.tensor([True, False, True])}
    with featstore.pack(
        tmp_path / "s", Data(x=torch.ones(3, 2), edge_index=EDGES, num_nodes=3, **more)
    ) as store:
        assert set(store.arrays) == set(more)
        for name, value in more.items():
            assert np.array_equal(store.arrays[name], value.numpy())
        assert store.graphs["features"].edges == 4


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"edge_attr": torch.ones(4, 2)}, "'edge_features'"),
        ({"edge_weight": torch.ones(4)}, "'edge_weight'"),
        ({"edge_time": torch.ones(4), "edge_attr": torch.ones(4, 1)}, "'edge_time', 'edge_features'"),
    ],
)
def test_rows_of_edges_are_stored_with_the_edges_numbers(tmp_path: Path, more: Any, named: str) -> None:
    data = Data(x=torch.ones(3, 2), edge_index=EDGES, **more)
    with featstore.pack(tmp_path / "s", data) as store:
        stored = {*store.tables, *store.arrays}
        assert stored == {"features"} | {"edge_features" if name == "edge_attr" else name for name in more}
        assert store.graphs["features"].has_edge_ids
    ways: tuple[dict[str, Any], ...] = (
        {"edge_ids": False}, {"topology": False}, {"graph": {}}, {"graph": {"features": EDGES.flip(0)}},
    )  # fmt: skip
    for number, without in enumerate(ways):
        with pytest.warns(
            FeatstoreWarning, match=f"{named}: row e belongs to column e of edge_index as it was given"
        ):
            featstore.pack(tmp_path / f"s{number}", data, **without).close()


def test_numbers_of_a_relation_are_those_of_its_rows(tmp_path: Path) -> None:
    data = HeteroData()
    data["a"].x = torch.ones(3, 2)
    for name in ("r", "s"):
        data["a", name, "a"].edge_index = EDGES
        data["a", name, "a"].edge_attr = torch.ones(4, 1)
    with pytest.warns(FeatstoreWarning, match=r"^'a__s__a': row e belongs"):
        store = featstore.pack(tmp_path / "s", data, graph={"a": data["a", "r", "a"]})
    with store:
        assert store.graphs["a"].has_edge_ids


def test_rows_of_edges_are_as_many_as_the_edges(tmp_path: Path) -> None:
    tables = {"features": np.ones((3, 2), np.float32), "edge_features": np.ones((5, 1), np.float32)}
    blocks = tables | {"edge_features": iter([tables["edge_features"]])}
    for features in (tables, blocks):
        with pytest.raises(
            SourceError, match=r"'edge_features' has 5 rows, and the graph 4 edges.*edge_ids=F"
        ):
            featstore.pack(tmp_path / "s", features, graph={"features": EDGES}, overwrite=True)
    with featstore.pack(
        tmp_path / "t", tables, graph={"features": EDGES}, edge_ids=False, overwrite=True
    ) as store:
        assert not store.graphs["features"].has_edge_ids
        assert store.manifest.reader_features == ["graphs"]


def test_what_is_not_stored_is_named(tmp_path: Path) -> None:
    data = Data(x=torch.ones(3, 2), edge_index=EDGES, title="cora", words=["a", "b"], y=torch.arange(3))
    with pytest.warns(
        FeatstoreWarning, match=r"not stored of the PyG data: title \(str\), words \(list\).*arrays="
    ):
        featstore.pack(tmp_path / "s", data).close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        matrix = torch.sparse_csr_tensor(
            torch.tensor([0, 1, 3, 4]), torch.tensor([2, 0, 2, 1]), torch.ones(4) * 2, (3, 3)
        )
    with pytest.raises(SourceError, match=r"adj_t's values, which are of edges: give"):
        featstore.pack(tmp_path / "u", Data(x=torch.ones(3, 2), adj_t=matrix))
    with pytest.warns(FeatstoreWarning, match=r"adj_t \(edge_index is stored\)"):
        featstore.pack(tmp_path / "t", Data(x=torch.ones(3, 2), adj_t=matrix, edge_index=EDGES)).close()


def test_arrays_of_neither_nodes_nor_edges_are_named(tmp_path: Path) -> None:
    data = Data(x=torch.ones(3, 2), edge_index=EDGES, y=torch.ones(3), score=torch.ones(7), w=torch.ones(4))
    with (
        pytest.warns(FeatstoreWarning, match="^'score': stored, but not in mini-batches"),
        featstore.pack(tmp_path / "s", data) as store,
    ):
        assert store.arrays["score"].shape == (7,)


def test_a_graph_without_a_table_of_nodes_is_not_lost(tmp_path: Path) -> None:
    data = Data(edge_attr=torch.ones(4, 2), edge_index=EDGES)
    with pytest.raises(SourceError, match=r"no x.*graph=\{\}"):
        featstore.pack(tmp_path / "s", data)
    with pytest.warns(FeatstoreWarning, match="edge_features"):
        featstore.pack(tmp_path / "s", data, graph={}).close()


def test_a_given_graph_replaces_that_of_the_data(tmp_path: Path) -> None:
    data = Data(x=torch.ones(3, 2), edge_index=EDGES)
    with featstore.pack(tmp_path / "s", data, graph=EDGES[:, :1]) as store:
        assert store.graphs["features"].edges == 1
    with featstore.pack(tmp_path / "t", data, graph={}) as store:
        assert not store.graphs


def test_two_edges_are_sources_then_targets(tmp_path: Path) -> None:
    data = Data(x=torch.zeros(3, 1), edge_index=torch.tensor([[0, 1], [2, 2]]))
    hetero = HeteroData()
    hetero["a"].x, hetero["a", "to", "a"].edge_index = data.x, data.edge_index
    relation = hetero["a", "to", "a"]
    arrays = {"features": np.zeros((3, 1))}
    ways: list[tuple[Any, Any]] = [
        (data, None), (hetero, None), ({"a": arrays["features"]}, {"a": relation}), (arrays["features"], data)
    ]  # fmt: skip
    for number, (features, graph) in enumerate(ways):
        with featstore.pack(tmp_path / f"s{number}", features, graph=graph, topology=True) as store:
            (stored,) = store.graphs.values()
            assert [part.tolist() for part in stored.csc()] == [[0, 0, 0, 2], [0, 1]]


def test_names_of_nodes_on_edges_are_kept(tmp_path: Path) -> None:
    """And those of edges on nodes, and either of nothing."""
    from featstore.adapters.pyg import NeighborLoader

    data = hetero(CITES)
    count = data[CITES].edge_index.shape[1]
    data[CITES].x = torch.arange(2.0 * count).reshape(count, 2)
    data["paper"].edge_attr = torch.arange(4.0)
    data.x = torch.arange(5.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with featstore.pack(tmp_path / "s", data) as store:
            for name, of in (
                ("paper__cites__paper.x", data[CITES].x),
                ("paper.edge_attr", data["paper"].edge_attr),
                ("x", data.x),
            ):
                np.testing.assert_array_equal(store.arrays[name], of.numpy())
            with NeighborLoader(store, [2], "paper", memory="32MiB") as loader:  # which has no place for them
                data = next(iter(loader))
    assert "x" not in data[CITES]
