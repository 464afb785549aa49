"""The user's numbers of the edges of mini-batches, and the rows of these: each edge's own, however it
came."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.errors import ArgumentError, SourceError
from featstore.sampling.batches import open_sampler
from featstore.sampling.neighbors import NeighborSampler

READ_MODES = ("online", "compiled", "rolling")


def of_edge(numbers: np.ndarray) -> np.ndarray:
    """The row of an edge."""
    return np.stack([numbers, numbers * 7 % 11], axis=1).astype(np.float32)


def multigraph(nodes: int, edges: int, seed: int) -> np.ndarray:
    """Skewed, with edges that occur often, and loops."""
    rng = np.random.default_rng(seed)
    return (rng.random((2, edges)) ** 2 * nodes).astype(np.int64)


def packed(path: Path, index: np.ndarray, nodes: int, order: str, **options: Any) -> featstore.Store:
    edges = index.shape[1]
    if order == "ldg":
        options["partitions"] = {"features": 4}
    if order == "permutation":
        options["permutation"] = {"features": np.random.default_rng(1).permutation(nodes)}
    return featstore.pack(
        path,
        {"features": np.arange(nodes, dtype=np.float32)[:, None], "edge_features": of_edge(np.arange(edges))},
        graph={"features": index}, order={"features": order, "edge_features": "given"}, memory="64MiB",
        **options,
    )  # fmt: skip


def check(batch: Any, index: np.ndarray, rows: bool = True) -> None:
    """Each edge of the mini-batch is the user's edge of its number, and has its row."""
    nodes = np.asarray(batch.node if hasattr(batch, "node") else batch.n_id)
    e_id = np.asarray(batch.e_id)
    assert e_id.dtype == np.int64
    assert len(np.unique(e_id)) == len(e_id), "no edge is sampled twice"
    np.testing.assert_array_equal(index[0, e_id], nodes[np.asarray(batch.row)])
    np.testing.assert_array_equal(index[1, e_id], nodes[np.asarray(batch.col)])
    if rows:
        np.testing.assert_array_equal(np.asarray(batch.edge_attr), of_edge(e_id))


EDGES = st.integers(0, 900).filter(lambda n: n != 2)  # [2, 2] may be meant either way


@settings(max_examples=12, deadline=None)
@given(
    nodes=st.integers(4, 200), edges=EDGES, seed=st.integers(0, 99),
    order=st.sampled_from(["given", "permutation", "ldg"]),
    fanouts=st.sampled_from([(3,), (2, -1), (-1, 3, 2)]),
)  # fmt: skip
def test_samplers_name_the_edges(
    tmp_path_factory: pytest.TempPathFactory, nodes: int, edges: int, seed: int, order: str, fanouts: Any
) -> None:
    index = multigraph(nodes, edges, seed)
    seeds = np.random.default_rng(seed).permutation(nodes)[:20]
    with packed(tmp_path_factory.mktemp("e") / "s", index, nodes, order, hubs=0.1) as store:
        graph = store.graphs["features"]
        ids = graph.edge_ids()
        np.testing.assert_array_equal(index[0, ids], graph.csc()[1])
        whole = NeighborSampler(*graph.csc(), fanouts, 5, edge_ids=ids).sample(seeds, 2)
        check(whole, index, rows=False)
        with (
            open_sampler(store, fanouts, seed=5, in_memory=False, memory="16MiB") as stored,
            store.sampler(fanouts, memory="16MiB", seed=5, edge_ids=False) as without,
        ):
            ways = [
                open_sampler(store, fanouts, seed=5, in_memory=True),
                stored,
                pickle.loads(pickle.dumps(stored)),
            ]
            for sampler in ways:
                found = sampler.sample(seeds, 2)
                np.testing.assert_array_equal(found.e_id, whole.e_id)
                np.testing.assert_array_equal(found.row, whole.row)
            ways[-1].close()
            plain = without.sample(seeds, 2)
            assert plain.e_id is None
            np.testing.assert_array_equal(plain.node, whole.node)


def test_numbers_that_are_not_in_memory_are_read(tmp_path: Path) -> None:
    """As small as a sampler may be, and when a large mini-batch takes the room of what was held."""
    index = multigraph(3000, 400_000, 0)
    with packed(tmp_path / "s", index, 3000, "ldg") as store:
        with pytest.raises(featstore.errors.BudgetError) as needs:
            store.sampler((4, 3), memory=1)
        seeds = np.arange(0, 3000, 150)
        whole = open_sampler(store, (4, 3), in_memory=True).sample(seeds)
        for memory in (needs.value.needed_bytes, needs.value.needed_bytes + 700_000, "64MiB"):
            with store.sampler((4, 3), memory=memory) as sampler:
                held = sampler.memory()["edge_ids"]
                assert (held == 4 * 400_000) == (memory == "64MiB")
                for batch in (
                    sampler.sample(seeds),
                    sampler.sample(np.arange(1500), 1),
                    sampler.sample(seeds),
                ):
                    check(batch, index, rows=False)
                np.testing.assert_array_equal(batch.e_id, whole.e_id)
                assert sampler.memory()["edge_ids"] <= held
                assert sampler.memory()["unused"] >= 0
                assert (sampler.stats().bytes_read == 0) == (memory == "64MiB")


def test_a_damaged_number_is_an_error(tmp_path: Path) -> None:
    index = multigraph(300, 5000, 0)
    with packed(tmp_path / "s", index, 300, "given") as store:
        path = store.path / store.graphs["features"].entry.edge_ids.chunk_path(0)
        data = bytearray(path.read_bytes())
        data[100] ^= 4
        path.write_bytes(data)
        with pytest.raises(featstore.errors.CorruptionError, match="edge_ids"):
            store.sampler((-1,), memory="16MiB")
        with pytest.raises(featstore.errors.CorruptionError, match="edge_ids"):
            open_sampler(store, (-1,), in_memory=True)
        store.sampler((-1,), memory="16MiB", edge_ids=False).close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    index = multigraph(500, 4000, 3)
    with packed(tmp_path_factory.mktemp("w") / "s", index, 500, "ldg") as store:
        yield store, index


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("mode", [*READ_MODES, "partitions"])
def test_edge_attr_is_of_its_edges(world: Any, mode: str, shared: bool) -> None:
    store, index = world
    options: dict[str, Any] = {"seeds": np.arange(0, 500, 3), "fanouts": (3, 2), "batch_size": 40}
    with store.loader(
        mode=mode, memory="64MiB", edge_table="edge_features", shared=shared, **options
    ) as loader:
        for _ in range(2):
            count = 0
            for batch in loader:
                check(batch, index)
                np.testing.assert_array_equal(batch.x[:, 0], batch.n_id)
                count += 1
            assert count >= 5


def sets_of(store: featstore.Store, **options: Any) -> Any:
    from featstore.loaders.mega.sets import PartitionSets

    return PartitionSets(store, memory="64MiB", **options)


@settings(max_examples=8, deadline=None)
@given(
    nodes=st.integers(8, 120), edges=EDGES, seed=st.integers(0, 99),
    hubs=st.sampled_from([0.0, 0.2]), resident=st.integers(1, 3),
)  # fmt: skip
def test_partitions_induce_the_users_edges(
    tmp_path_factory: pytest.TempPathFactory, nodes: int, edges: int, seed: int, hubs: float, resident: int
) -> None:
    """Of each mega-batch all edges whose ends are there, each with its number; small blocks of lists."""
    from featstore.loaders.mega import sizes

    index = multigraph(nodes, edges, seed)
    with (
        pytest.MonkeyPatch.context() as patch,
        packed(tmp_path_factory.mktemp("p") / "s", index, nodes, "ldg", hubs=hubs) as store,
    ):
        patch.setattr(sizes, "BLOCK_EDGES_MAX", 64)
        patch.setattr(sizes, "BLOCK_EDGES_MIN", 32)
        with sets_of(store, resident=resident) as sets:
            for mega in sets:
                rows, lists = next(iter(mega.rows.values())), next(iter(mega.lists.values()))
                here = set(rows.node[rows.places].tolist())
                targets = np.repeat(np.arange(len(lists.indptr) - 1), np.diff(lists.indptr))
                ids = lists.edge_ids
                np.testing.assert_array_equal(index[0, ids], rows.node[lists.indices])
                np.testing.assert_array_equal(index[1, ids], rows.node[targets])
                wanted = [e for e in range(edges) if {*index[:, e].tolist()} <= here]
                assert sorted(ids.tolist()) == wanted


def test_rows_of_edges_in_partitions_are_within_the_memory(world: Any) -> None:
    store, index = world
    options: dict[str, Any] = {
        "mode": "partitions", "seeds": np.arange(90), "fanouts": (3,), "edge_table": "edge_features",
        "tensors": True, "device": "cpu",
    }  # fmt: skip
    pytest.importorskip("torch_geometric")
    with pytest.raises(featstore.errors.BudgetError) as needs:
        store.loader(memory="1MiB", **options)
    for more in ({}, {"device_memory": "64KiB", "memory": "64MiB"}):
        with store.loader(**{"memory": needs.value.needed_bytes} | options | more) as loader:
            for batch in loader:
                check(batch, index)
                np.testing.assert_array_equal(batch.pyg().edge_attr, of_edge(batch.pyg().e_id.numpy()))


def test_rows_of_edges_are_counted_beforehand(world: Any) -> None:
    """By a forecast, and by the choice of a mode that follows from one."""
    store, _ = world
    options: dict[str, Any] = {"seeds": np.arange(90), "fanouts": (3,), "batch_size": 10, "disk": "64MiB"}
    costs = {
        name: store.loader_costs(**options, memory="64MiB", share=1, seconds=60, edge_table=name)
        for name in (None, "edge_features")
    }
    bare, whole = costs[None].modes, costs["edge_features"].modes
    assert whole["rolling"].bytes_written > bare["rolling"].bytes_written > 0
    assert "rows of edges" in whole["partitions"].reason
    with store.loader(**options, memory="64MiB", edge_table="edge_features") as loader:
        assert loader.costs.modes["rolling"].bytes_written == whole["rolling"].bytes_written
        assert loader.mode == costs["edge_features"].mode
    how: dict[str, Any] = {"mode": "compiled", "name": "counted", "memory": "64MiB"}
    taken = []
    for name in (None, "edge_features"):
        with store.loader(**options, **how, edge_table=name):
            there = (store.path / "packs" / "counted").rglob("rows/c.*")
            taken.append(sum(path.stat().st_size for path in there))
    assert taken[1] > taken[0]
    more = whole["compiled"].disk_bytes - bare["compiled"].disk_bytes
    assert more == pytest.approx(taken[1] - taken[0], rel=0.2)


def test_numbers_come_without_rows(world: Any) -> None:
    store, index = world
    with store.loader(seeds=np.arange(50), fanouts=(4,), memory="64MiB") as loader:
        for batch in loader:
            check(batch, index, rows=False)


def test_edges_that_number_no_rows_are_refused(tmp_path: Path) -> None:
    index = multigraph(50, 200, 1)
    options: dict[str, Any] = {
        "seeds": np.arange(5),
        "fanouts": (2,),
        "memory": "64MiB",
        "edge_table": "edge_features",
    }
    with (
        packed(tmp_path / "s", index, 50, "given", edge_ids=False) as store,
        pytest.raises(SourceError, match=r"edge_table='edge_features' is read by e_id.*edge_ids=True"),
    ):
        store.loader(**options)
    with pytest.raises(SourceError, match="does not keep the numbers"):
        featstore.open(tmp_path / "s").sampler((2,), memory="16MiB", edge_ids=True)
    tables = {"features": np.zeros((50, 1)), "features__of__features": np.zeros((200, 1))}
    options["edge_table"] = "features__of__features"
    with (
        featstore.pack(tmp_path / "t", tables, graph={"features": index[:, 1:]}) as store,
        pytest.raises(SourceError, match="has 199 edges, and the table 200 rows"),
    ):
        store.loader(**options, graph="features")


def test_pyg(world: Any) -> None:
    """Our loader, and PyG's over our sampler, also as it comes to a spawned worker."""
    torch = pytest.importorskip("torch")
    loaders = pytest.importorskip("torch_geometric.loader")
    from torch_geometric.data import Data
    from torch_geometric.sampler import NodeSamplerInput

    from featstore.adapters.pyg import FeatstoreSampler, NeighborLoader

    store, index = world
    with_rows = of_edge(np.arange(4000))
    for mode in (*READ_MODES, "partitions"):
        with NeighborLoader(
            store, [3, 2], input_nodes=torch.arange(90), batch_size=40, memory="64MiB", mode=mode,
            shuffle=mode == "partitions",
        ) as loader:  # fmt: skip
            for data in loader:
                np.testing.assert_array_equal(data.edge_attr, with_rows[data.e_id])
                np.testing.assert_array_equal(data.n_id[data.edge_index], index[:, data.e_id])
    graph = Data(edge_index=torch.from_numpy(index), num_nodes=500, edge_attr=torch.from_numpy(with_rows))
    for in_memory in (True, False):
        sampler = FeatstoreSampler(open_sampler(store, (3, 2), in_memory=in_memory, memory="16MiB"))
        for data in loaders.NodeLoader(
            graph, node_sampler=sampler, input_nodes=torch.arange(90), batch_size=40
        ):
            np.testing.assert_array_equal(data.edge_attr, with_rows[data.e_id])
            np.testing.assert_array_equal(data.n_id[data.edge_index], index[:, data.e_id])
    sampler = FeatstoreSampler(open_sampler(store, (3, 2), in_memory=True))
    spawned = object.__new__(FeatstoreSampler)  # as it comes to a worker
    spawned.__setstate__(sampler.__getstate__())
    seeds = NodeSamplerInput(None, torch.arange(40))
    assert torch.equal(spawned.sample_from_nodes(seeds).edge, sampler.sample_from_nodes(seeds).edge)


def test_what_was_compiled_without_rows_of_edges_is_not_taken_for_one_with_them(tmp_path: Path) -> None:
    rows, edges = np.ones((90, 2), np.float32), np.random.default_rng(0).integers(0, 90, (2, 400))
    tables = {"features": rows, "edge_features": np.ones((400, 1), np.float32)}
    given: Any = {"seeds": np.arange(90), "fanouts": (2,), "memory": "64MiB", "mode": "compiled"}
    with featstore.pack(tmp_path / "s", tables, graph={"features": edges}) as store:
        store.loader(**given, name="without").close()
        with pytest.raises(ArgumentError, match=r"has no rows of edge_table='edge_features'.*compile anew"):
            store.loader(**given, name="without", reuse=True, edge_table="edge_features")
        store.loader(**given, name="with", edge_table="edge_features").close()
        with pytest.raises(ArgumentError, match="has rows of edge_table='edge_features': say so again"):
            store.loader(**given, name="with", reuse=True)
        with store.loader(**given, name="with", reuse=True, edge_table="edge_features") as loader:
            assert all(batch.edge_attr.shape == (len(batch.e_id), 1) for batch in loader)
