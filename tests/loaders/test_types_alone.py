"""Stores with edge types whose mini-batches know none, or whose types have dots in their names: what is of a
type is found, and what cannot be is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import ArgumentError, FeatstoreWarning

NODES = 60
ROWS = np.random.default_rng(0).standard_normal((NODES, 3)).astype(np.float32)
LABELS = np.arange(NODES) % 7
EDGES = np.random.default_rng(1).integers(0, NODES, (2, 300))
MODES = ("online", "compiled", "rolling")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[featstore.Store]:
    with featstore.pack(
        tmp_path_factory.mktemp("alone") / "s", {"paper": ROWS}, graph={("paper", "cites", "paper"): EDGES},
        arrays={"paper.y": LABELS},
    ) as made:  # fmt: skip
        yield made


def check(loader: Any, typed: bool = False) -> int:
    count = 0
    for batch in loader:
        x, y, n_id = batch.x, batch.y, batch.n_id
        if typed:  # as it was asked for
            assert list(x) == list(y) == list(n_id) == ["paper"]
            x, y, n_id = x["paper"], y["paper"], n_id["paper"]
        np.testing.assert_array_equal(np.asarray(x), ROWS[n_id])
        np.testing.assert_array_equal(np.asarray(y), LABELS[n_id])
        count += len(n_id)
    return count


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tensors", [False, True])
def test_ids_without_a_type_and_of_one_type(store: featstore.Store, mode: str, tensors: bool) -> None:
    for number, batches in enumerate(([np.arange(9)] * 3, [{"paper": np.arange(9)}] * 3)):
        more = {"name": f"ids-{mode}-{number}-{tensors}"} if mode != "online" else {}
        with store.loader(
            batches, mode=mode, attach="paper.y", tensors=tensors, memory="32MiB", **more
        ) as loader:
            assert check(loader, typed=number == 1) == 27


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_that_is_named(store: featstore.Store, mode: str) -> None:
    """Its mini-batches are those of a graph without types."""
    more = {"name": f"graph-{mode}"} if mode != "online" else {}
    with store.loader(
        seeds=np.arange(NODES), fanouts=(3,), graph="paper__cites__paper", mode=mode, attach="paper.y",
        batch_size=20, memory="32MiB", **more,
    ) as loader:  # fmt: skip
        assert check(loader) >= NODES


def test_pygs_loader_of_a_graph_that_is_named(store: featstore.Store) -> None:
    pytest.importorskip("torch_geometric")
    from featstore.adapters.pyg import NeighborLoader

    with NeighborLoader(
        store, [3], np.arange(NODES), graph="paper__cites__paper", attach="paper.y", memory="32MiB"
    ) as loader:
        for data in loader:
            np.testing.assert_array_equal(data.x.numpy(), ROWS[data.n_id.numpy()])
            np.testing.assert_array_equal(data.y.numpy(), LABELS[data.n_id.numpy()])


def test_a_type_that_is_named_of_several(tmp_path: Path) -> None:
    tables = {"paper": ROWS, "author": ROWS[:9]}
    graph = {("paper", "cites", "paper"): EDGES, ("author", "writes", "paper"): EDGES % 9}
    with featstore.pack(tmp_path / "s", tables, graph=graph, arrays={"paper.y": LABELS}) as store:
        given = {"nodes": lambda ids: {"paper": ids}, "memory": "32MiB"}
        with store.loader([np.arange(9)], mode="online", attach="paper.y", **given) as loader:
            (batch,) = loader
            np.testing.assert_array_equal(batch.x["paper"], ROWS[:9])
            np.testing.assert_array_equal(batch.y["paper"], LABELS[:9])


@pytest.fixture(scope="module")
def dotted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[featstore.Store]:
    edges = {("bio.gene", "film.genre", "bio"): np.stack([np.arange(9), np.arange(9)])}
    arrays = {"bio.gene.y": LABELS, "bio.y": LABELS[:9] + 1, "bio.gene.train": np.arange(5, 20)}
    arrays["bio.gene__film.genre__bio.w"] = np.arange(9) / 2
    with featstore.pack(
        tmp_path_factory.mktemp("dotted") / "s", {"bio.gene": ROWS, "bio": ROWS[:9]}, graph=edges,
        arrays=arrays, edge_ids=True,
    ) as made:  # fmt: skip
        yield made


def test_types_with_dots_have_their_arrays(dotted: featstore.Store) -> None:
    names = ["bio.gene.y", "bio.y", "bio.gene__film.genre__bio.w"]
    of = ("bio.gene", "film.genre", "bio")
    with dotted.loader(
        seeds=("bio", None), fanouts=(3,), mode="online", attach=names, memory="32MiB"
    ) as loader:
        for batch in loader:
            assert set(batch.y) == {"bio.gene", "bio"}
            np.testing.assert_array_equal(batch.y["bio.gene"], LABELS[batch.n_id["bio.gene"]])
            np.testing.assert_array_equal(batch.y["bio"], LABELS[batch.n_id["bio"]] + 1)
            np.testing.assert_array_equal(batch.w[of], batch.e_id[of] / 2)
    with dotted.loader(seeds="bio.gene.train", fanouts=(3,), mode="online", memory="32MiB") as loader:
        seeds = [one for batch in loader for one in batch.n_id["bio.gene"][: batch.batch_size].tolist()]
    assert sorted(seeds) == list(range(5, 20))


def test_pygs_loader_has_arrays_of_types_with_dots(dotted: featstore.Store) -> None:
    pytest.importorskip("torch_geometric")
    from featstore.adapters.pyg import NeighborLoader

    with NeighborLoader(dotted, [3], ("bio.gene", "train"), memory="32MiB") as loader:
        for data in loader:
            found = data["bio.gene"]
            np.testing.assert_array_equal(found.y.numpy(), LABELS[found.n_id.numpy()])
            np.testing.assert_array_equal(found.n_id[: found.batch_size].numpy(), found.input_id.numpy() + 5)


def test_what_names_two_arrays_is_of_the_type(tmp_path: Path) -> None:
    """``train`` is a mask, and ``paper.train`` ids, which are meant."""
    pytest.importorskip("torch_geometric")
    from featstore.adapters.pyg import NeighborLoader

    arrays = {"train": np.arange(NODES) < 4, "paper.train": np.arange(30, 40)}
    with featstore.pack(
        tmp_path / "s", {"paper": ROWS}, graph={("paper", "cites", "paper"): EDGES}, arrays=arrays
    ) as store:
        with NeighborLoader(store, [3], ("paper", "train"), batch_size=10, memory="32MiB") as loader:
            (data,) = loader
            assert data["paper"].input_id.tolist() == list(range(10))
        with pytest.raises(ArgumentError, match="is a pair"):
            NeighborLoader(store, [3], (1, 2, 3))


def test_arrays_that_are_named_do_not_replace_what_mini_batches_have(tmp_path: Path) -> None:
    pytest.importorskip("torch_geometric")
    from featstore.adapters.pyg import NeighborLoader

    arrays = {f"paper.{name}": LABELS for name in ("input_id", "num_nodes", "y")}
    with featstore.pack(
        tmp_path / "s", {"paper": ROWS}, graph={("paper", "cites", "paper"): EDGES}, arrays=arrays
    ) as store:
        for name in ("paper.input_id", "paper.num_nodes"):
            with pytest.raises(ArgumentError, match=f"'{name}' means something else"):
                NeighborLoader(store, [3], "paper", memory="32MiB", attach=["paper.y", name])
        with NeighborLoader(store, [3], "paper", memory="32MiB", attach="paper.y") as loader:
            data = next(iter(loader))
        np.testing.assert_array_equal(data["paper"].y.numpy(), LABELS[data["paper"].n_id.numpy()])


def test_text_is_left_out_of_pygs_mini_batches(tmp_path: Path) -> None:
    """torch has none: a warning says so, of stores with and without types; arrays have it."""
    pytest.importorskip("torch_geometric")
    from featstore.adapters.pyg import NeighborLoader

    text = np.array([f"node {k}" for k in range(NODES)])
    said = "mini-batches do not have .*names: torch has no tensors of their dtype"
    with featstore.pack(tmp_path / "s", ROWS, graph=EDGES, arrays={"names": text, "y": LABELS}) as store:
        with pytest.warns(FeatstoreWarning, match=said):
            loader = NeighborLoader(store, [3], memory="32MiB")
        with loader:
            for data in loader:
                assert "names" not in data
                np.testing.assert_array_equal(data.y.numpy(), LABELS[data.n_id.numpy()])
        with store.loader(seeds=[1, 2], fanouts=(3,), attach="names", memory="32MiB") as plain:
            (batch,) = plain
            assert batch.names.tolist() == text[batch.n_id].tolist()
    arrays = {"paper.names": text, "paper.y": LABELS}
    with featstore.pack(
        tmp_path / "t", {"paper": ROWS}, graph={("paper", "cites", "paper"): EDGES}, arrays=arrays
    ) as store:
        with pytest.warns(FeatstoreWarning, match=said):
            loader = NeighborLoader(store, [3], "paper", memory="32MiB")
        with loader:
            for data in loader:
                assert "names" not in data["paper"]


def test_a_trace_that_is_opened_alone_has_ids_of_those_with_rows(tmp_path: Path) -> None:
    """Not those of a type without features, of whose nodes there are more."""
    edges = {("author", "writes", "paper"): np.stack([np.arange(300) % 200, np.arange(300) % NODES])}
    with featstore.pack(tmp_path / "s", {"paper": ROWS, "author": 200}, graph=edges) as store:
        given: dict[str, Any] = {"seeds": ("paper", None), "fanouts": (5,), "batch_size": 10}
        with store.loader(mode="compiled", name="a", residency="fixed", memory="32MiB", **given) as loader:
            wanted = [(batch.n_id["paper"], batch.x["paper"]) for batch in loader]
    with (
        featstore.open(tmp_path / "s" / "packs" / "a") as trace,
        trace.loader(mode="compiled", memory="32MiB") as loader,
    ):
        for batch, (ids, rows) in zip(loader, wanted, strict=True):
            np.testing.assert_array_equal(batch.n_id, ids)
            np.testing.assert_array_equal(batch.x, rows)
            np.testing.assert_array_equal(batch.x, ROWS[ids])
