"""Mode partitions over stores with edge types: what is in a mega-batch, and that mini-batches are drawn from
it alone, by a plain twin; options, resuming, ranks, devices, memory, and what cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
import featstore.loaders.mega.sizes
from featstore.errors import ArgumentError, BudgetError, CorruptionError, SourceError, UnknownNameError
from featstore.loaders.mega.loader import PartitionsLoader
from featstore.loaders.mega.partition_set import PartitionSet
from featstore.loaders.mega.sets import PartitionSets
from featstore.sampling.options import SamplingOptions
from featstore.sampling.typed import TypedNeighborSampler
from featstore.storage.edge_types import EdgeType, joined_name

with warnings.catch_warnings():
    # PyG scripts some of its own classes on import, which newer PyTorch calls deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch
    import torch_geometric.data  # noqa: F401

WRITES, WROTE, CITES, IN = (
    ("author", "writes", "paper"), ("paper", "rev_writes", "author"), ("paper", "cites", "paper"),
    ("paper", "in", "venue"),
)  # fmt: skip
NODES = {"paper": 400, "author": 150, "venue": 11}
EDGES = {WRITES: 900, WROTE: 900, CITES: 2000, IN: 400}
PARTITIONS = 8
SEEDS = np.arange(1, 400, 3)
SIZE, FANOUTS = 16, (4, 3)
EDGE_TABLES = ["author__writes__paper", "paper__cites__paper"]


class World:
    """What is packed: rows of papers and authors, edges, near each other and with hubs, and values of
    them."""

    def __init__(self, seed: int, nodes: dict[str, int], edges: dict[EdgeType, int]) -> None:
        rng = np.random.default_rng(seed)
        self.nodes, self.edges, self.weights, self.times = nodes, {}, {}, {}
        for of, count in edges.items():
            source = rng.integers(0, nodes[of[0]], count)
            near = source * nodes[of[2]] // max(1, nodes[of[0]]) + rng.integers(-2, 3, count)
            source[::7] = source[::7] % 5  # hubs
            self.edges[of] = np.stack([source, np.clip(near, 0, nodes[of[2]] - 1)])
            self.weights[of] = rng.integers(0, 3, count).astype(np.float32)
            self.times[of] = rng.integers(0, 100, count)
        self.rows: dict[str, Any] = {
            "paper": rng.standard_normal((nodes["paper"], 12), np.float32),
            "author": rng.integers(0, 99, (nodes["author"], 3), dtype=np.int16),
        }
        self.edge_rows = {
            name: rng.standard_normal((len(self.edges[of][0]), 2 + number))
            for number, name in enumerate(EDGE_TABLES)
            for of in self.edges
            if joined_name(of) == name
        }
        self.years = {name: rng.integers(0, 100, nodes[name]) for name in ("paper", "author")}
        self.labels = rng.integers(0, 7, nodes["paper"])

    def pack(self, path: Path, partitions: int = PARTITIONS, hubs: float = 0.05, **more: Any) -> Any:
        tables = {**self.rows, "venue": self.nodes["venue"], **self.edge_rows}
        arrays = {"paper.y": self.labels}
        if CITES in self.weights:
            arrays["paper__cites__paper.trust"] = self.weights[CITES]
        arrays |= {f"{name}.year": one for name, one in self.years.items()}
        ordered = more.pop("ordered", {})
        given: dict[str, Any] = {
            "order": dict.fromkeys(self.nodes, "ldg") | ordered,
            "partitions": {name: partitions for name in self.nodes if name not in ordered},
            "hubs": hubs, "arrays": arrays, "edge_ids": True, "memory": "64MiB",
            "edge_weights": {of: one for of, one in self.weights.items() if of[1] != "in"},
            "edge_times": {of: one for of, one in self.times.items() if of[1] != "in"},
        }  # fmt: skip
        return featstore.pack(path, tables, graph=self.edges, **given | more)


@pytest.fixture(scope="module")
def world() -> World:
    return World(5, NODES, EDGES)


@pytest.fixture(scope="module")
def store(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[featstore.Store]:
    with world.pack(tmp_path_factory.mktemp("typed") / "store") as made:
        yield made


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of neighbours come in many blocks, cut anywhere."""
    monkeypatch.setattr(featstore.loaders.mega.sizes, "BLOCK_EDGES_MAX", 150)
    monkeypatch.setattr(featstore.loaders.mega.sizes, "BLOCK_EDGES_MIN", 150)


def options(**more: Any) -> dict[str, Any]:
    given = {
        "seeds": ("paper", SEEDS), "fanouts": FANOUTS, "batch_size": SIZE, "memory": "48MiB", "resident": 3
    }  # fmt: skip
    return given | {"mode": "partitions"} | more


def sets_of(store: featstore.Store, **more: Any) -> PartitionSets:
    given: dict[str, Any] = {"memory": "48MiB", "train": ("paper", SEEDS), "seed": 3, "resident": 3}
    return PartitionSets(store, **given | more)


def seen(batch: Any) -> Any:
    """All of a mini-batch, as what can be compared."""
    sample = batch.sample
    of_edges = [sample.row, sample.col, sample.e_id, sample.weight or {}, sample.batch or {}]
    arrays = [batch.n_id, batch.x, *of_edges]
    return [{name: np.asarray(one).tolist() for name, one in each.items()} for each in arrays] + [
        sample.num_sampled_nodes, sample.num_sampled_edges, sample.batch_size,
    ]  # fmt: skip


def check(batch: Any, world: World) -> None:
    """Rows, edges, their numbers and rows, and arrays are the source's."""
    assert set(batch.n_id) == set(world.nodes)
    assert set(batch.x) == {"paper", "author"}, "venues have no features"
    for name, rows in world.rows.items():
        assert np.asarray(batch.x[name]).dtype == rows.dtype
        np.testing.assert_array_equal(batch.x[name], rows[batch.n_id[name]])
    for of, edges in world.edges.items():
        row, col = np.asarray(batch.edge_index[of])
        found = np.stack([batch.n_id[of[0]][row], batch.n_id[of[2]][col]])
        np.testing.assert_array_equal(found, edges[:, batch.e_id[of]])
        if (name := joined_name(of)) in world.edge_rows:
            np.testing.assert_array_equal(batch.edge_attr[of], world.edge_rows[name][batch.e_id[of]])
    np.testing.assert_array_equal(batch.y["paper"], world.labels[batch.n_id["paper"]])
    assert batch.batch_size == batch.num_sampled_nodes["paper"][0]


WAYS: dict[str, dict[str, Any]] = {
    "full": {"resident": 3},
    "sliding": {"resident": 3, "replaced": 1, "engine": "threads"},
    "weighed": {"resident": 2, "weights": True},
    "without hubs": {"resident": 4, "hubs": 0, "passes": 2},
    "all": {"resident": PARTITIONS},
    "on a device": {"resident": 3, "device": ["cpu", "cpu"], "device_memory": "6KiB", "tensors": True},
    "by edge type": {"fanouts": {WRITES: (2, 1), "paper__cites__paper": (3, 0), WROTE: (0, 2), IN: (1, 1)}},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_row_edge_and_array_is_the_source_s(store: featstore.Store, world: World, way: str) -> None:
    given = options(attach="paper.y", edge_table=EDGE_TABLES, **WAYS[way])
    passes = given.get("passes", 1)
    with store.loader(**given) as loader:
        for epoch in range(2):
            count, seeds = len(loader), []
            for batch in loader:
                check(batch, world)
                seeds.append(batch.n_id["paper"][: batch.batch_size])
            np.testing.assert_array_equal(np.sort(np.concatenate(seeds)), np.repeat(SEEDS, passes))
            assert len(seeds) == count, epoch
        report = loader.report()
        assert (report.kept_share == 1.0) == (way == "all")
        if way == "on a device":
            assert set(report.devices) == {"paper", "author"}
            assert sum(one.hits for one in report.devices.values()) > 0


def here_of(mega: PartitionSet) -> dict[str, set[int]]:
    """Node ids in memory, by type."""
    return {name: set(rows.node[rows.places].tolist()) for name, rows in mega.rows.items()}


def check_mega(mega: PartitionSet, store: featstore.Store, world: World) -> None:
    """What is in memory is what belongs to the partitions and to the hubs, and all edges among it."""
    here = here_of(mega)
    for name, rows in mega.rows.items():
        table = store.tables[name]
        row_of_node, offsets = table.row_of_node(), table.partition_offsets
        of_node = np.arange(table.rows) if row_of_node is None else row_of_node
        inside = np.isin(np.searchsorted(offsets, of_node, side="right") - 1, mega.partitions)
        hubs = set(rows.node[: rows.hubs].tolist())
        assert here[name] == set(np.flatnonzero(inside).tolist()) | hubs
        if name in world.rows:
            assert rows.x is not None
            np.testing.assert_array_equal(rows.x[rows.places], world.rows[name][rows.node[rows.places]])
        else:
            assert rows.x is None
    stored = kept = 0
    for of, edges in world.edges.items():
        lists, sources, targets = mega.lists[joined_name(of)], mega.rows[of[0]], mega.rows[of[2]]
        found = np.repeat(np.arange(len(lists.indptr) - 1), np.diff(lists.indptr))
        ids = lists.edge_ids
        assert ids is not None
        np.testing.assert_array_equal(edges[0, ids], sources.node[lists.indices])
        np.testing.assert_array_equal(edges[1, ids], targets.node[found])
        both = np.isin(edges[0], list(here[of[0]])) & np.isin(edges[1], list(here[of[2]]))
        assert sorted(ids.tolist()) == np.flatnonzero(both).tolist()
        own = np.concatenate([
            targets.node[s : s + n] for s, n in zip(targets.starts, targets.lengths, strict=True)
        ])  # fmt: skip
        stored += np.isin(edges[1], own).sum()
        kept += (both & np.isin(edges[1], own)).sum()
    assert (mega.edges_stored, mega.partition_edges) == (stored, kept)


@pytest.mark.parametrize("way", ["full", "sliding", "without hubs", "all"])
def test_what_is_in_them(store: featstore.Store, world: World, way: str) -> None:
    given = {name: one for name, one in WAYS[way].items() if name != "passes"}
    with sets_of(store, **given) as sets:
        for epoch in range(2):
            seeds = []
            for step, mega in enumerate(sets):
                assert (mega.epoch, mega.step, mega.steps) == (epoch, step, len(sets))
                check_mega(mega, store, world)
                seeds.append(mega.rows["paper"].node[mega.seeds])
            np.testing.assert_array_equal(np.sort(np.concatenate(seeds)), SEEDS)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 99), papers=st.integers(6, 120), authors=st.integers(1, 60),
    edges=st.lists(st.sampled_from([0, 1, 30, 300]), min_size=4, max_size=4),
    hubs=st.sampled_from([0.0, 0.1, 1.0]), partitions=st.integers(1, 6), resident=st.integers(1, 3),
    seed_type=st.sampled_from([*NODES]),
)  # fmt: skip
def test_over_any_typed_graph(
    tmp_path_factory: pytest.TempPathFactory, seed: int, papers: int, authors: int, edges: list[int],
    hubs: float, partitions: int, resident: int, seed_type: str,
) -> None:  # fmt: skip
    """Relations without edges, partitions without nodes of a type, and one partition of all."""
    nodes = {"paper": papers, "author": authors, "venue": 3}
    world = World(seed, nodes, dict(zip(EDGES, edges, strict=True)))
    train = np.arange(0, nodes[seed_type], 2)
    with world.pack(tmp_path_factory.mktemp("any") / "s", partitions, hubs) as store:
        with sets_of(store, resident=resident, train=(seed_type, train)) as sets:
            seeds = []
            for mega in sets:
                check_mega(mega, store, world)
                seeds.append(mega.rows[seed_type].node[mega.seeds])
            np.testing.assert_array_equal(np.sort(np.concatenate(seeds)), train)
        given = options(attach="paper.y", edge_table=list(world.edge_rows), resident=resident)
        with store.loader(**given | {"seeds": ("paper", None)}) as loader:
            for batch in loader:
                check(batch, world)


SAID: dict[str, dict[str, Any]] = {
    "nothing": {},
    "with replacement": {"replace": True},
    "disjoint": {"disjoint": True},
    "induced": {"subgraph_type": "induced"},
    "weights": {"weight_attr": "weights"},
    "times of edges": {"time_attr": "times", "input_time": SEEDS % 90},
    "the last": {
        "time_attr": "times",
        "input_time": SEEDS % 90,
        "temporal_strategy": "last",
        "time_window": 50,
    },
    "times of nodes": {"time_attr": "year"},
}


def twin_options(said: dict[str, Any], mega: PartitionSet, world: World) -> SamplingOptions:
    """The same over the arrays of a mega-batch, found by the source's numbers of edges and nodes."""
    graphs = {of: mega.lists[joined_name(of)].edge_ids for of in world.edges if of != IN}
    given: dict[str, Any] = {}
    if said.get("time_attr") == "times":
        given["edge_times"] = {of: world.times[of][ids] for of, ids in graphs.items()}
    elif said.get("time_attr") == "year":
        given["node_times"] = {name: years[mega.rows[name].node] for name, years in world.years.items()}
    if "weight_attr" in said:
        given["weights"] = {of: world.weights[of][ids] for of, ids in graphs.items()}
    return SamplingOptions(
        replace=said.get("replace", False), disjoint=said.get("disjoint", False),
        subgraph=said.get("subgraph_type", "directional"), window=said.get("time_window"),
        temporal=said.get("temporal_strategy", "uniform"), **given,
    )  # fmt: skip


@pytest.mark.parametrize("what", SAID)
def test_they_are_those_of_one_plain_loop(store: featstore.Store, world: World, what: str) -> None:
    """Drawn by the sampler in memory over each mega-batch, with each option; seed 3, two epochs."""
    said = SAID[what]
    with store.loader(**options(seed=3, **said)) as loader, sets_of(store) as sets:
        drawn = (batch for _ in range(2) for batch in loader)
        for epoch in range(2):
            for mega in sets:
                graphs = {of: mega.lists[joined_name(of)] for of in world.edges}
                sampler = TypedNeighborSampler(
                    {of: (one.indptr, one.indices) for of, one in graphs.items()},
                    {name: len(rows.node) for name, rows in mega.rows.items()}, FANOUTS, 3,
                    options=twin_options(said, mega, world),
                )  # fmt: skip
                order = np.random.default_rng([3, epoch, mega.step, 0]).permutation(mega.seeds)
                for number in range(-(-len(order) // SIZE)):
                    seeds = order[number * SIZE :][:SIZE]
                    nodes = mega.rows["paper"].node[seeds]
                    times = None
                    if "input_time" in said:
                        times = said["input_time"][np.searchsorted(SEEDS, nodes)]
                    key = (mega.step << 44) + number
                    wanted = sampler.sample("paper", seeds, key, epoch=epoch, seed_times=times)
                    batch = next(drawn)
                    for name, local in wanted.node.items():
                        np.testing.assert_array_equal(batch.n_id[name], mega.rows[name].node[local])
                        if wanted.batch is not None:
                            np.testing.assert_array_equal(batch.batch[name], wanted.batch[name])
                    for of, one in graphs.items():
                        np.testing.assert_array_equal(batch.edge_index[of], [wanted.row[of], wanted.col[of]])
                        assert one.edge_ids is not None
                        np.testing.assert_array_equal(batch.e_id[of], one.edge_ids[wanted.edge_id[of]])
                    assert batch.num_sampled_edges == wanted.num_sampled_edges
        assert next(drawn, None) is None


def test_edges_and_their_reverse(world: World, tmp_path: Path) -> None:
    """Of relations that each have one that leads back."""
    edges = {of: one for of, one in world.edges.items() if of != IN}
    tables = {name: world.rows[name] for name in ("paper", "author")}
    given: dict[str, Any] = {
        "order": dict.fromkeys(tables, "ldg"), "partitions": dict.fromkeys(tables, 4), "edge_ids": True
    }  # fmt: skip
    tables[EDGE_TABLES[0]] = world.edge_rows[EDGE_TABLES[0]]
    with featstore.pack(tmp_path / "s", tables, graph=edges, memory="64MiB", **given) as store:
        reversed_edges = 0
        with store.loader(**options(subgraph_type="bidirectional", resident=2)) as loader:
            for batch in loader:
                for of, known in edges.items():
                    ids = batch.e_id[of]
                    there, (row, col) = ids >= 0, np.asarray(batch.edge_index[of])
                    found = np.stack([batch.n_id[of[0]][row], batch.n_id[of[2]][col]])
                    wanted = known[:, ids[there]]
                    same = (found[:, there] == wanted).all(axis=0)
                    if of == CITES:  # its own reverse, whose edges keep their number
                        same |= (found[::-1, there] == wanted).all(axis=0)
                    assert same.all()
                    reversed_edges += int((~there).sum())
        assert reversed_edges
        wrong = options(subgraph_type="bidirectional", resident=2, edge_table="author__writes__paper")
        with store.loader(**wrong) as loader, pytest.raises(SourceError, match="reverses of another"):
            list(loader)


def test_time_is_not_seen_ahead(store: featstore.Store, world: World) -> None:
    when = np.random.default_rng(1).integers(20, 80, len(SEEDS))
    edges = 0
    with store.loader(**options(time_attr="times", input_time=when)) as loader:
        for batch in loader:
            limit = when[np.searchsorted(SEEDS, batch.n_id["paper"][: batch.batch_size])]
            for of in (WRITES, WROTE, CITES):
                tree = batch.batch[of[2]][np.asarray(batch.edge_index[of])[1]]
                assert (world.times[of][batch.e_id[of]] <= limit[tree]).all()
                edges += len(tree)
    assert edges


def test_with_all_in_memory_nothing_is_left_out(store: featstore.Store, world: World) -> None:
    """Around the same seeds, all neighbours of two hops are those of the whole graph."""
    graphs = {of: store.graphs[joined_name(of)].csc() for of in store.edge_types}
    sampler = TypedNeighborSampler(graphs, NODES, (-1, -1), 0)
    with store.loader(**options(resident=PARTITIONS, fanouts=(-1, -1))) as loader:
        for batch in loader:
            wanted = sampler.sample("paper", batch.n_id["paper"][: batch.batch_size])
            for name, nodes in wanted.node.items():
                np.testing.assert_array_equal(np.sort(batch.n_id[name]), np.sort(nodes))
            for of, edges in world.edges.items():
                found = edges[:, np.sort(batch.e_id[of])]
                ends = np.stack([wanted.node[of[0]][wanted.row[of]], wanted.node[of[2]][wanted.col[of]]])
                order = np.lexsort
                np.testing.assert_array_equal(found[:, order(found)], ends[:, order(ends)])


def test_neighbours_are_of_the_collection_or_hubs(store: featstore.Store) -> None:
    with sets_of(store, seed=0) as sets, store.loader(**options()) as loader:
        drawn = iter(loader)
        for mega in sets:
            here = here_of(mega)
            for batch in islice(drawn, -(-len(mega.seeds) // SIZE)):
                for name, ids in batch.n_id.items():
                    assert set(ids.tolist()) <= here[name]
        assert next(drawn, None) is None


def test_weights_at_the_border(store: featstore.Store) -> None:
    """Of each target and relation their mean is 1, and a lost kind weighs more."""
    different = False
    with store.loader(**options(weights=True, resident=2, tensors=True)) as loader:
        for batch in loader:
            for of in store.edge_types:
                col, weight = batch.sample.col[of], batch.sample.weight[of]
                sums, counts = np.bincount(col, weight), np.bincount(col)
                np.testing.assert_allclose(sums, counts, rtol=1e-4)
                different |= len(np.unique(weight)) > 1
                assert torch.equal(batch.pyg()[of].edge_weight, torch.from_numpy(weight))
    assert different


@pytest.mark.parametrize("way", ["sliding", "all", "on a device"])
def test_resumed_anywhere_the_rest_is_the_same(store: featstore.Store, way: str) -> None:
    given = options(edge_table=EDGE_TABLES, **WAYS[way])
    with store.loader(**given) as loader:
        whole = [seen(batch) for _ in range(2) for batch in loader]
    for number in (2, len(whole) // 2 + 1):
        with store.loader(**given) as loader:
            going = (batch for _ in range(2) for batch in loader)
            assert [seen(batch) for batch in islice(going, number)] == whole[:number]
            state = json.loads(json.dumps(loader.state_dict()))
        with store.loader(**given) as loader:
            loader.load_state_dict(state)
            rest = [seen(batch) for batch in loader]
            assert rest == whole[number:][: len(rest)]
            assert rest
    with (
        store.loader(**given | {"seeds": ("author", None)}) as other,
        pytest.raises(ArgumentError, match="the state has a digest of seeds or links, seed, fanouts"),
    ):
        other.load_state_dict(state)


def test_ranks_have_each_seed_once_in_as_many_steps(store: featstore.Store) -> None:
    seeds, steps = [], []
    for rank in range(2):
        with store.loader(**options(rank=rank, world_size=2)) as loader:
            found = [batch.n_id["paper"][: batch.batch_size] for batch in loader]
            steps.append(len(found))
            seeds += found
            padded = loader.report().padded
    assert steps[0] == steps[1]
    assert set(np.concatenate(seeds).tolist()) == set(SEEDS.tolist())
    assert sum(map(len, seeds)) == len(SEEDS) + padded


def test_pyg_s_neighbor_loader(store: featstore.Store, world: World) -> None:
    from featstore.adapters.pyg import NeighborLoader

    found: list[Any] = []
    given: dict[str, Any] = {"memory": "48MiB", "mode": "partitions", "resident": 3, "batch_size": SIZE}
    with NeighborLoader(store, [4, 3], ("paper", SEEDS), shuffle=True, **given) as loader:
        for data in loader:
            data.validate()
            seeds = data["paper"].n_id[: data["paper"].batch_size].numpy()
            np.testing.assert_array_equal(seeds, SEEDS[data["paper"].input_id])
            for name, rows in world.rows.items():
                np.testing.assert_array_equal(data[name].x, rows[data[name].n_id])
            rows_of_edges = world.edge_rows[EDGE_TABLES[1]][data[CITES].e_id]
            np.testing.assert_array_equal(data[CITES].edge_attr, rows_of_edges)
            found.append(seeds)
    np.testing.assert_array_equal(np.sort(np.concatenate(found)), SEEDS)


def test_nodes_without_edges_have_no_rows(world: World, tmp_path: Path) -> None:
    """And are no seeds; all else is as if they were not there."""
    tables = {"paper": world.rows["paper"], "lonely": world.rows["author"]}
    given: dict[str, Any] = {"order": {"paper": "ldg"}, "partitions": {"paper": 4}, "edge_ids": True}
    made = featstore.pack(tmp_path / "s", tables, graph={CITES: world.edges[CITES]}, memory="64MiB", **given)
    with made as store:
        with store.loader(**options(resident=2)) as loader:
            for batch in loader:
                assert batch.x["lonely"].shape == (0, 3)
                assert batch.num_sampled_nodes["lonely"] == (0, 0, 0)
                assert len(batch.n_id["lonely"]) == 0
                np.testing.assert_array_equal(batch.x["paper"], world.rows["paper"][batch.n_id["paper"]])
        with pytest.raises(ArgumentError, match="no edges lead to or from"):
            store.loader(**options(seeds=("lonely", None)))


@pytest.mark.parametrize("more", [{}, {"resident": 2}, {"hubs": 4}, {"edge_table": EDGE_TABLES}])
def test_the_budget_that_the_error_names_works(store: featstore.Store, more: dict[str, Any]) -> None:
    said = SAID["times of nodes"] if not more else {}
    given = options(resident=None) | more | said
    for memory in (1, "4MiB"):
        with pytest.raises(BudgetError, match=r"two mini-batches|planning") as caught:
            store.loader(**given | {"memory": memory})
    needed = caught.value.needed_bytes
    with store.loader(**given | {"memory": needed}) as loader:
        assert sum(batch.batch_size for batch in loader) == len(SEEDS)


@pytest.mark.parametrize("fanouts", [(4, 3), (-1, -1), (1, -1)])
@pytest.mark.parametrize("what", SAID)
def test_no_mini_batch_is_larger_than_the_budget_says(
    store: featstore.Store, fanouts: tuple[int, ...], what: str
) -> None:
    given: dict[str, Any] = {"batch_size": SIZE, "memory": "1GiB", "train": ("paper", SEEDS), "resident": 3}
    given["said"] = SAID[what]
    with PartitionsLoader(store, fanouts, **given) as loader:
        nodes, edges = loader.drawn.nodes_and_edges(loader.sets.places, loader.sets.sizes.edges_max)
        for batch in loader:
            for name, ids in batch.n_id.items():
                assert len(ids) <= nodes[name]
            for of in store.edge_types:
                assert len(batch.sample.row[of]) <= edges[joined_name(of)]


def test_bad_pages_are_named_and_nothing_hangs(world: World, tmp_path: Path) -> None:
    with world.pack(tmp_path / "s") as store:
        (victim,) = store.path.glob("g*/graphs/paper__cites__paper/sources/rows/c.*")
        good, loader = victim.read_bytes(), store.loader(**options(verify=False))
        with loader:
            whole = [seen(batch) for batch in loader]
            bad = np.frombuffer(good, np.int32).copy()
            bad[len(bad) // 2] = NODES["paper"]
            victim.write_bytes(bad.tobytes())
            loader.set_epoch(0)
            found: list[Any] = []
            with pytest.raises(CorruptionError, match=str(NODES["paper"])):
                found.extend(seen(batch) for batch in loader)
            victim.write_bytes(good)
            assert found + [seen(batch) for batch in loader] == whole


def test_a_state_is_of_one_type_of_seeds(store: featstore.Store) -> None:
    """Though the others may have the same rows."""
    given: dict[str, Any] = {"memory": "48MiB", "resident": 3}
    of_row = store.tables["paper"].node_of_row()
    papers = np.arange(11) if of_row is None else of_row[:11]
    with (
        PartitionsLoader(store, FANOUTS, train=("paper", papers), **given) as one,
        PartitionsLoader(store, FANOUTS, train=("venue", None), **given) as other,
        pytest.raises(ArgumentError, match="the state has seeds = 'paper'"),
    ):
        other.load_state(one.state())


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"seeds": SEEDS}, ArgumentError, r"pair \(type, ids\)"),
        ({"seeds": ("papers", SEEDS)}, UnknownNameError, "papers"),
        ({"seeds_in_order": True}, ArgumentError, "seeds_in_order="),
        ({"hubs": 21}, SourceError, "21 hubs were asked for, but the store has the lists of 20"),
        ({"fanouts": {WRITES: (1,)}}, ArgumentError, "cites"),
        ({"edge_table": "paper"}, ArgumentError, "table of nodes"),
        ({"weight_attr": "no"}, ArgumentError, "edge_weights="),
        ({"time_attr": "times"}, ArgumentError, "input_time="),
        ({"weight_attr": "trust"}, ArgumentError, r"not arrays, as 'paper__cites__paper\.trust'"),
        ({"graph": "paper__cites__paper", "seeds": SEEDS}, ArgumentError, "samples over all"),
    ],
)
def test_what_cannot_be_is_refused(
    store: featstore.Store, more: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        store.loader(**options(**more))


def test_types_that_were_not_partitioned_together(world: World, tmp_path: Path) -> None:
    with (
        world.pack(tmp_path / "s", 4, ordered={"author": "given"}) as store,
        pytest.raises(SourceError, match="were not partitioned together: 'paper' has 4, 'author' has 1"),
    ):
        store.loader(**options())


MEASURE = """
import json, re, sys, time
from pathlib import Path
import featstore

def held(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1))

def epoch(path, memory):
    given = {"seeds": ("item", None), "fanouts": (3, 2), "batch_size": 200, "mode": "partitions"}
    with featstore.open(path) as store, store.loader(**given, memory=memory, weights=True) as loader:
        for batch in loader:
            time.sleep(0.001)  # so that there is always one made ahead
        return {"kept": loader.report().kept_share}

small, large, memory = sys.argv[1], sys.argv[2], int(sys.argv[3])
epoch(small, memory)  # what code takes is there from here on
before = held("VmRSS")
found = epoch(large, memory)
print(json.dumps(found | {"grown": held("VmHWM") - before}))
"""


def test_a_loader_stays_within_its_budget(tmp_path: Path) -> None:
    """Measured on a process of its own, as for graphs without types."""
    paths = []
    for items, width in ((500, 16), (12_000, 400)):
        rng, users = np.random.default_rng(0), items // 2
        near = np.arange(items * 6) // 6
        user = np.minimum(near // 2 // 50 * 50 + rng.integers(0, 50, len(near)), users - 1)
        likes = np.stack([user, near])
        edges = {("user", "likes", "item"): likes, ("item", "by", "user"): likes[::-1]}
        tables = {
            "item": rng.standard_normal((items, width), np.float32),
            "user": rng.standard_normal((users, width), np.float32),
        }
        given: dict[str, Any] = {
            "order": dict.fromkeys(tables, "ldg"), "partitions": dict.fromkeys(tables, items // 250 + 1)
        }  # fmt: skip
        paths.append(str(tmp_path / str(items)))
        featstore.pack(paths[-1], tables, graph=edges, edge_ids=True, memory="256MiB", **given).close()
    root, memory = str(Path(featstore.__file__).resolve().parent.parent), 32 << 20
    arguments = [sys.executable, "-c", MEASURE, *paths, str(memory)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found)
    assert found["kept"] < 0.999, "more than fits"
    assert 4 << 20 < found["grown"] < memory + (4 << 20)
