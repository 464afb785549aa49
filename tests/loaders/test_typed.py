"""Loaders over stores with edge types: every row, edge and number of a mini-batch is the source's, in each
mode, and what cannot be is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.errors import ArgumentError, BudgetError, ClosedError, IdError, SourceError, UnknownNameError
from featstore.sampling.typed import TypedNeighborSampler, TypedSubgraph
from featstore.sampling.typed_stored import TypedStoredSampler

WRITES, CITES, IN, HAS = (
    ("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "in", "venue"),
    ("venue", "has", "paper"),
)  # fmt: skip
NODES = {"paper": 300, "author": 120, "venue": 9}
SEEDS = np.arange(5, 300, 3)
FANOUTS = (4, 3)
MEMORY = "64MiB"


class Source:
    """What is packed."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        counts = {WRITES: 700, CITES: 1500, IN: 300, HAS: 300}
        self.edges = {
            of: np.stack([rng.integers(0, NODES[of[0]], count), rng.integers(0, NODES[of[2]], count)])
            for of, count in counts.items()
        }
        self.rows = {
            "paper": rng.standard_normal((300, 24)).astype(np.float32),
            "author": rng.integers(0, 99, (120, 3), dtype=np.int16),
        }
        self.edge_rows = rng.standard_normal((700, 5)).astype(np.float64)
        self.labels = rng.integers(0, 7, 300)

    def pack(self, path: Path) -> featstore.Store:
        tables: dict[str, Any] = {**self.rows, "venue": 9, "author__writes__paper": self.edge_rows}
        arrays = {"paper.y": self.labels, "paper.train": np.isin(np.arange(300), SEEDS)}
        return featstore.pack(path, tables, graph=self.edges, arrays=arrays, edge_ids=True, memory="64MiB")


@pytest.fixture(scope="module")
def source() -> Source:
    return Source()


@pytest.fixture(scope="module")
def store(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Iterator[featstore.Store]:
    with source.pack(tmp_path_factory.mktemp("typed") / "store") as made:
        yield made


def options(**more: Any) -> dict[str, Any]:
    return {"seeds": ("paper", SEEDS), "fanouts": FANOUTS, "batch_size": 16, "memory": MEMORY} | more


def check(batch: Any, source: Source) -> None:
    """Rows and edges are the source's."""
    assert set(batch.n_id) == set(NODES)
    assert set(batch.x) == {"paper", "author"}  # venues have no features
    for name, rows in source.rows.items():
        assert np.asarray(batch.x[name]).dtype == rows.dtype
        np.testing.assert_array_equal(batch.x[name], rows[batch.n_id[name]])
    for of, edges in source.edges.items():
        row, col = np.asarray(batch.edge_index[of])
        found = np.stack([batch.n_id[of[0]][row], batch.n_id[of[2]][col]])
        np.testing.assert_array_equal(found, edges[:, batch.e_id[of]])
    np.testing.assert_array_equal(batch.edge_attr[WRITES], source.edge_rows[batch.e_id[WRITES]])
    np.testing.assert_array_equal(batch.y["paper"], source.labels[batch.n_id["paper"]])
    assert batch.batch_size == batch.num_sampled_nodes["paper"][0]


@pytest.mark.parametrize("mode", ["online", "compiled", "rolling", "partitions", "auto"])
def test_every_row_and_edge_is_the_source_s(store: featstore.Store, source: Source, mode: str) -> None:
    given = options(mode=mode, attach="paper.y", edge_table="author__writes__paper", engine="threads")
    if mode in ("compiled", "rolling"):
        given["name"] = f"typed-{mode}"
    with store.loader(**given) as loader:
        for _ in range(2):
            seeds = []
            for batch in loader:
                check(batch, source)
                seeds.append(batch.n_id["paper"][: batch.batch_size])
            np.testing.assert_array_equal(np.sort(np.concatenate(seeds)), SEEDS)


def test_mini_batches_are_the_sampler_s(store: featstore.Store) -> None:
    graphs = {of: store.graphs["__".join(of)].csc() for of in store.edge_types}
    sampler = TypedNeighborSampler(graphs, NODES, FANOUTS, 3)
    with store.loader(**options(mode="online", seed=3)) as loader:
        for batch in loader:
            seeds = batch.n_id["paper"][: batch.batch_size]
            wanted: TypedSubgraph = sampler.sample("paper", seeds, batch.index, epoch=0)
            for name, ids in wanted.node.items():
                np.testing.assert_array_equal(batch.n_id[name], ids)
            for of in store.edge_types:
                np.testing.assert_array_equal(batch.edge_index[of], [wanted.row[of], wanted.col[of]])


@pytest.mark.parametrize("mode", ["online", "compiled", "rolling"])
def test_rows_of_one_type_alone_have_its_name(store: featstore.Store, source: Source, mode: str) -> None:
    """Of mini-batches that are given, and have no node of the other type with features."""
    indptr, knows = np.arange(NODES["author"] + 1), np.arange(NODES["author"])[::-1].astype(np.int32)
    own = {"author": NODES["author"]}
    sampler = TypedNeighborSampler({("author", "knows", "author"): (indptr, knows)}, own, (1,), 0)
    batches = [sampler.sample("author", np.arange(k, k + 9), k) for k in range(4)]
    more = {} if mode == "online" else {"name": "authors"}
    with store.loader(batches, mode=mode, memory=MEMORY, **more) as loader:
        for batch, sample in zip(loader, batches, strict=True):
            assert list(batch.x) == ["author"]
            np.testing.assert_array_equal(batch.x["author"], source.rows["author"][sample.node["author"]])


@pytest.mark.parametrize(
    "seeds", ["paper.train", ("paper", "paper.train"), ("paper", np.isin(np.arange(300), SEEDS))]
)
def test_seeds_by_name_and_mask(store: featstore.Store, seeds: Any) -> None:
    with store.loader(**options(seeds=seeds, mode="online", batch_size=1000)) as loader:
        (batch,) = loader
        np.testing.assert_array_equal(np.sort(batch.n_id["paper"][: batch.batch_size]), SEEDS)


def test_seeds_of_another_type_and_all_of_them(store: featstore.Store) -> None:
    with store.loader(**options(seeds=("venue", None), mode="online")) as loader:
        (batch,) = loader
        assert batch.batch_size == 9
        assert batch.num_sampled_nodes["paper"][0] == 0


def test_fanouts_by_edge_type(store: featstore.Store) -> None:
    fanouts = {WRITES: (2, 0), "paper__cites__paper": (1, 1), IN: (0, 0), HAS: (0, 0)}
    with store.loader(**options(fanouts=fanouts, mode="online")) as loader:
        for batch in loader:
            assert len(batch.e_id[IN]) == len(batch.e_id[HAS]) == 0
            assert batch.num_sampled_edges[WRITES][1] == 0


def test_it_goes_on_where_it_was(store: featstore.Store) -> None:
    with store.loader(**options(mode="online")) as loader:
        whole = [batch.n_id for batch in loader]
    with store.loader(**options(mode="online")) as loader:
        going = iter(loader)
        for _ in range(3):
            next(going)
        state = loader.state_dict()
        going.close()
    with store.loader(**options(mode="online")) as loader:
        loader.load_state_dict(state)
        for batch, wanted in zip(loader, whole[3:], strict=True):
            for name, ids in wanted.items():
                np.testing.assert_array_equal(batch.n_id[name], ids)


def test_pyg_s_object(store: featstore.Store, source: Source) -> None:
    pytest.importorskip("torch_geometric")
    given = options(mode="online", tensors=True, attach="paper.y", edge_table="author__writes__paper")
    with store.loader(**given) as loader:
        batch = next(iter(loader))
        data = batch.pyg()
    assert data["paper"].batch_size == 16
    assert "batch_size" not in data["author"]
    assert "x" not in data["venue"]
    assert data["venue"].num_nodes == len(batch.n_id["venue"])
    assert (data["paper"].x == torch.from_numpy(source.rows["paper"])[data["paper"].n_id]).all()
    assert (data["paper"].y == torch.from_numpy(source.labels)[data["paper"].n_id]).all()
    for of in store.edge_types:
        assert torch.equal(torch.as_tensor(batch.edge_index[of]), data[of].edge_index)
        assert torch.equal(data[of].e_id, torch.from_numpy(batch.e_id[of]))
    assert torch.equal(data[WRITES].edge_attr, batch.edge_attr[WRITES])
    data.validate()


@pytest.mark.parametrize("mode", ["online", "compiled"])
def test_pyg_s_own_mini_batches(store: featstore.Store, source: Source, mode: str) -> None:
    """Given as they come from a loader of PyG's; types without features have no rows there either."""
    data = pytest.importorskip("torch_geometric.data")
    rng = np.random.default_rng(0)
    given = []
    for _ in range(3):
        one = data.HeteroData()
        for name, count in NODES.items():
            one[name].n_id = torch.from_numpy(rng.choice(count, 7, replace=False))
        one[WRITES].edge_index = torch.zeros((2, 11), dtype=torch.long)
        one[WRITES].e_id = torch.from_numpy(rng.choice(700, 11, replace=False))
        given.append(one)
    more = {"name": "of-pyg"} if mode == "compiled" else {}
    loader = store.loader(
        given, mode=mode, memory=MEMORY, edge_table="author__writes__paper", attach="paper.y", **more
    )
    with loader:
        for batch, one in zip(loader, given, strict=True):
            found = batch.pyg()
            assert "x" not in found["venue"]
            for name, rows in source.rows.items():
                np.testing.assert_array_equal(found[name].x, rows[one[name].n_id])
            np.testing.assert_array_equal(found[WRITES].edge_attr, source.edge_rows[one[WRITES].e_id])
            np.testing.assert_array_equal(found["paper"].y, source.labels[one["paper"].n_id])


@pytest.mark.parametrize("nodes", ["paper.train", ("paper", "train"), ("paper", torch.from_numpy(SEEDS))])
def test_pyg_s_neighbor_loader(store: featstore.Store, source: Source, nodes: Any) -> None:
    pytest.importorskip("torch_geometric")
    from featstore.adapters.pyg import NeighborLoader

    fanouts = {of: [4, 3] for of in store.edge_types}
    seen = []
    with NeighborLoader(store, fanouts, nodes, batch_size=16, shuffle=True, memory=MEMORY) as loader:
        for data in loader:
            seeds = data["paper"].n_id[: data["paper"].batch_size].numpy()
            masked = not isinstance(nodes, tuple) or isinstance(nodes[1], str)  # as in PyG then ids
            ids = data["paper"].input_id.numpy()
            np.testing.assert_array_equal(seeds, ids if masked else SEEDS[ids])
            seen.append(seeds)
            for name, rows in source.rows.items():
                np.testing.assert_array_equal(data[name].x, rows[data[name].n_id])
            np.testing.assert_array_equal(data["paper"].y, source.labels[data["paper"].n_id])
            np.testing.assert_array_equal(data[WRITES].edge_attr, source.edge_rows[data[WRITES].e_id])
            data.validate()
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), SEEDS)


def test_pyg_s_neighbor_loader_of_all_nodes_of_a_type(store: featstore.Store) -> None:
    pytest.importorskip("torch_geometric")
    from featstore.adapters.pyg import NeighborLoader

    with NeighborLoader(store, [2], "venue", batch_size=9, memory=MEMORY) as loader:
        (data,) = loader
    assert data["venue"].n_id.tolist() == list(range(9))


@pytest.mark.parametrize("negatives", [None, "binary", "triplet"])
@pytest.mark.parametrize("mode", ["online", "compiled"])
def test_pyg_s_link_neighbor_loader(
    store: featstore.Store, source: Source, negatives: str | None, mode: str
) -> None:
    pytest.importorskip("torch_geometric")
    from featstore.adapters.pyg import LinkNeighborLoader

    more = {"name": f"links-{negatives}"} if mode == "compiled" else {}
    loader = LinkNeighborLoader(
        store, [3, 2], WRITES, neg_sampling=negatives, batch_size=100, mode=mode, memory=MEMORY, **more
    )
    edges, seen = source.edges[WRITES], []
    with loader:
        for data in loader:
            data.validate()
            for name, rows in source.rows.items():
                np.testing.assert_array_equal(data[name].x, rows[data[name].n_id])
            np.testing.assert_array_equal(data[WRITES].edge_attr, source.edge_rows[data[WRITES].e_id])
            links, numbers = data[WRITES], data[WRITES].input_id
            seen.append(numbers.numpy())
            if negatives == "triplet":
                ends = data["author"].src_index, data["paper"].dst_pos_index
                assert data["paper"].dst_neg_index.shape == numbers.shape
            else:
                ends = links.edge_label_index[:, : len(numbers)]
                more_of = len(numbers) if negatives else 0
                assert links.edge_label_index.shape == (2, len(numbers) + more_of)
            found = data["author"].n_id[ends[0]], data["paper"].n_id[ends[1]]
            np.testing.assert_array_equal(np.stack(found), edges[:, numbers])
            assert "batch_size" not in data["author"]
            if negatives == "binary":
                assert links.edge_label.tolist() == [1.0] * len(numbers) + [0.0] * len(numbers)
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(700))


@pytest.mark.parametrize(
    ("index", "error"),
    [(None, ArgumentError), (("author", "reads", "paper"), ArgumentError), ((WRITES, [[500], [0]]), IdError)],
)
def test_links_that_cannot_be(store: featstore.Store, index: Any, error: type[Exception]) -> None:
    pytest.importorskip("torch_geometric")
    from featstore.adapters.pyg import LinkNeighborLoader

    with pytest.raises(error, match=r"edge type|no node"):
        LinkNeighborLoader(store, [3], index, memory=MEMORY)


def test_ranks_have_each_seed_once(store: featstore.Store) -> None:
    seeds = []
    for rank in range(2):
        with store.loader(**options(mode="online", rank=rank, world_size=2, drop_last=False)) as loader:
            seeds += [batch.n_id["paper"][: batch.batch_size] for batch in loader]
    assert set(np.concatenate(seeds).tolist()) == set(SEEDS.tolist())


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"seeds": SEEDS}, ArgumentError, r"pair \(type, ids\)"),
        ({"seeds": ("papers", SEEDS)}, UnknownNameError, "papers"),
        ({"seeds": "train"}, ArgumentError, r"TYPE\.NAME"),
        ({"memory": "1MiB"}, BudgetError, "sample from these graphs"),
        ({"edge_table": "paper"}, ArgumentError, "table of nodes"),
        ({"attach": "paper.nothing"}, UnknownNameError, "nothing"),
        ({"fanouts": {WRITES: (1,)}}, ArgumentError, "cites"),
        ({"fanouts": (0, 2)}, ArgumentError, "fanouts"),
    ],
)
def test_what_cannot_be_is_refused(
    store: featstore.Store, more: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        store.loader(**options(**{"mode": "online"} | more))


def test_edges_without_numbers_have_none(source: Source, tmp_path: Path) -> None:
    graph = {CITES: source.edges[CITES]}
    featstore.pack(tmp_path / "s", source.rows, graph=graph, memory="64MiB").close()
    with featstore.open(tmp_path / "s") as store, store.loader(**options(mode="online")) as loader:
        batch = next(iter(loader))
        with pytest.raises(AttributeError, match="e_id"):
            _ = batch.e_id


def test_nodes_without_features_alone_have_no_rows(source: Source, tmp_path: Path) -> None:
    graph = {CITES: source.edges[CITES]}
    packed = featstore.pack(tmp_path / "s", {"paper": 300}, graph=graph, memory="64MiB")
    with packed as store, pytest.raises(SourceError, match="no rows to load"):
        store.loader(**options())


@pytest.mark.parametrize("mode", ["online", "compiled"])
def test_one_type_with_features(source: Source, tmp_path: Path, mode: str) -> None:
    tables = {"paper": source.rows["paper"], "author": 120}
    graph = {WRITES: source.edges[WRITES], CITES: source.edges[CITES]}
    featstore.pack(tmp_path / "s", tables, graph=graph, memory="64MiB").close()
    with featstore.open(tmp_path / "s") as store, store.loader(**options(mode=mode)) as loader:
        for batch in loader:
            assert list(batch.x) == ["paper"]
            np.testing.assert_array_equal(batch.x["paper"], source.rows["paper"][batch.n_id["paper"]])
            assert set(batch.n_id) == {"paper", "author"}


@pytest.mark.parametrize("mode", ["online", "compiled"])
@pytest.mark.parametrize("kind", ["ids", "pair", "mapping", "nodes"])
def test_types_without_features_keep_their_ids_and_labels(
    source: Source, tmp_path: Path, mode: str, kind: str
) -> None:
    tables, graph = {"paper": source.rows["paper"], "author": 120}, {WRITES: source.edges[WRITES]}
    labels = np.arange(120)
    arrays = {"author.y": labels, "paper.y": source.labels}
    featstore.pack(tmp_path / "s", tables, graph=graph, arrays=arrays, memory="64MiB").close()
    ids = {"paper": np.array([7, 3]), "author": np.array([9, 8, 1])}
    made: Any = {"ids": ids, "pair": (ids, "mine"), "mapping": {"n_id": ids, "mine": 1}}.get(kind)
    with featstore.open(tmp_path / "s") as store:
        given = options(nodes=lambda _: ids) if made is None else {"batches": [made], "memory": MEMORY}
        with store.loader(mode=mode, attach=["author.y", "paper.y"], **given) as loader:
            for batch in loader:
                assert {name: found.tolist() for name, found in batch.n_id.items()} == {
                    name: one.tolist() for name, one in ids.items()
                }
                np.testing.assert_array_equal(batch.x["paper"], source.rows["paper"][ids["paper"]])
                np.testing.assert_array_equal(batch.y["author"], labels[ids["author"]])
                np.testing.assert_array_equal(batch.y["paper"], source.labels[ids["paper"]])


def test_a_state_is_of_the_same_samples_however_they_are_said(store: featstore.Store) -> None:
    with store.loader(**options(fanouts=[3, 2])) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        rest = [batch.n_id["paper"].tolist() for batch in batches]
    everywhere = {of: [3, 2] for of in store.edge_types}
    joined = {"__".join(of): (3, 2) for of in store.edge_types}
    for said in ({"fanouts": everywhere}, {"fanouts": joined}, {"seeds": "paper.train"}):
        with store.loader(**options(fanouts=[3, 2]) | said) as loader:
            loader.load_state_dict(state)
            assert [batch.n_id["paper"].tolist() for batch in loader] == rest
    for other in ({"fanouts": everywhere | {WRITES: [3, 3]}}, {"seeds": ("author", np.arange(60))}):
        with store.loader(**options(fanouts=[3, 2]) | other) as loader, pytest.raises(ArgumentError):
            loader.load_state_dict(state)


@pytest.fixture(scope="module")
def dated(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Iterator[featstore.Store]:
    """Weights and times of edges, and times of papers and authors."""
    rng = np.random.default_rng(8)
    weights = {WRITES: rng.integers(0, 2, 700).astype(np.float32)}
    times = {of: rng.integers(0, 100, edges.shape[1]) for of, edges in source.edges.items()}
    arrays = {f"{name}.year": rng.integers(0, 100, NODES[name]) for name in ("paper", "author")}
    made = featstore.pack(
        tmp_path_factory.mktemp("dated") / "store", {**source.rows, "venue": 9}, graph=source.edges,
        arrays=arrays, edge_ids=True, edge_weights=weights, edge_times=times, memory="64MiB",
    )  # fmt: skip
    with made:
        yield made


@pytest.mark.parametrize("mode", ["online", "compiled"])
def test_graphs_that_do_not_fit_are_sampled_from_disk(
    store: featstore.Store, source: Source, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the mini-batches that there are in memory."""
    given = options(mode=mode, attach="paper.y", edge_table="author__writes__paper", replace=True)
    named = {"name": "disk"} if mode == "compiled" else {}
    opened: list[TypedStoredSampler] = []
    begin = TypedStoredSampler._open
    monkeypatch.setattr(TypedStoredSampler, "_open", lambda one: (begin(one), opened.append(one)))
    with store.loader(**given | {"memory": "256MiB", "mode": "online"}) as loader:
        assert not opened
        whole = {batch.index: batch for batch in loader}
    with store.loader(**given | {"memory": "12MiB"}, **named) as loader:
        assert 1 <= len(opened) <= 2, "anew where the first mini-batch shows that rows need more"
        batches = list(loader)
    for sampler in opened:
        with pytest.raises(ClosedError):  # with the loader, at the latest
            sampler.stats()
    assert sorted(batch.index for batch in batches) == sorted(whole)
    for batch in batches:
        check(batch, source)
        for name, ids in whole[batch.index].n_id.items():
            np.testing.assert_array_equal(batch.n_id[name], ids)
        for of in store.edge_types:
            np.testing.assert_array_equal(batch.e_id[of], whole[batch.index].e_id[of])


@pytest.mark.parametrize(
    "said",
    [
        {"disjoint": True},
        {"subgraph_type": "induced"},
        {"time_attr": "year", "time_window": 40},
        {"weight_attr": "weights", "time_attr": "times", "temporal_strategy": "last",
         "input_time": np.arange(len(SEEDS)) % 90},
    ],
)  # fmt: skip
def test_options_from_disk_are_those_in_memory(dated: featstore.Store, said: dict[str, Any]) -> None:
    given = options(mode="online", edge_table=None, **said)
    with dated.loader(**given | {"memory": "256MiB"}) as loader:
        whole = {batch.index: batch for batch in loader}
    with dated.loader(**given | {"memory": "24MiB"}) as loader:
        batches = list(loader)
    assert sorted(batch.index for batch in batches) == sorted(whole)
    for batch in batches:
        other = whole[batch.index]
        for name, ids in other.n_id.items():
            np.testing.assert_array_equal(batch.n_id[name], ids)
            np.testing.assert_array_equal(batch.x[name], other.x[name]) if name in other.x else None
        for of in dated.edge_types:
            np.testing.assert_array_equal(batch.e_id[of], other.e_id[of])
            np.testing.assert_array_equal(batch.edge_index[of], other.edge_index[of])


def test_edges_are_no_later_than_their_seed(dated: featstore.Store) -> None:
    when = np.random.default_rng(1).integers(20, 80, len(SEEDS))
    times = {of: _by_number(dated, of) for of in dated.edge_types}
    given = options(time_attr="times", input_time=when, mode="online", batch_size=4)
    edges = 0
    with dated.loader(**given) as loader:
        for batch in loader:
            seeds = batch.n_id["paper"][: batch.batch_size]
            limit = when[np.searchsorted(SEEDS, seeds)]
            for of in dated.edge_types:
                _, col = batch.edge_index[of]
                tree = batch.batch[of[2]][np.asarray(col)]
                assert (times[of][batch.e_id[of]] <= limit[tree]).all()
                edges += len(col)
    assert edges


def test_seeds_are_told_apart_in_pygs_words(dated: featstore.Store) -> None:
    """Also where they stand again, with another time."""
    pytest.importorskip("torch_geometric")
    given = options(time_attr="times", input_time=np.full(8, 90), mode="online", batch_size=4)
    given["seeds"] = ("paper", np.repeat(SEEDS[:4], 2))
    with dated.loader(**given) as loader:
        found = [batch.pyg() for batch in loader]
    assert sorted(n for data in found for n in data["paper"].input_id.tolist()) == list(range(8))
    assert not any("input_id" in data["author"] for data in found)


def _by_number(store: featstore.Store, of: tuple[str, str, str]) -> Any:
    """The times that a graph keeps, by the numbers of its edges."""
    graph = store.graphs["__".join(of)]
    out = np.empty(graph.edges, np.int64)
    out[graph.edge_ids()] = graph.times()
    return out


def test_nodes_are_no_later_than_their_seed(dated: featstore.Store) -> None:
    years = {name: dated.arrays[f"{name}.year"] for name in ("paper", "author")}
    with dated.loader(**options(time_attr="year", mode="online", batch_size=4)) as loader:
        for batch in loader:
            limit = years["paper"][batch.n_id["paper"][: batch.batch_size]]
            for name, year in years.items():
                assert (year[batch.n_id[name]] <= limit[batch.batch[name]]).all()


def test_edges_without_weight_are_never_drawn(dated: featstore.Store) -> None:
    graph = dated.graphs["author__writes__paper"]
    weights = np.empty(graph.edges, np.float32)
    weights[graph.edge_ids()] = graph.weights()
    with dated.loader(**options(weight_attr="weights", mode="online")) as loader:
        for batch in loader:
            assert (weights[batch.e_id[WRITES]] == 1).all()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"weight_attr": "no"}, "edge_weights="),
        ({"time_attr": "no"}, "TYPE.no"),
        ({"time_attr": "times"}, "input_time="),
        ({"input_time": SEEDS}, "time_attr="),
        ({"mode": "partitions", "time_attr": "times"}, "input_time="),
    ],
)
def test_options_that_cannot_be(dated: featstore.Store, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        dated.loader(**options(**{"mode": "online"} | more))


@pytest.mark.parametrize("mode", ["online", "compiled", "rolling"])
def test_rows_are_of_the_type_that_was_asked_for(store: featstore.Store, source: Source, mode: str) -> None:
    """``nodes=`` beside sampling: n_id, x and what is attached are of the same, whatever was drawn."""
    for what in ("author", "paper"):

        def asked(sample: Any, what: str = what) -> Any:
            return {what: sample.node[what][:7]}

        more = {"name": f"asked-{mode}-{what}"} if mode != "online" else {}
        with store.loader(**options(mode=mode, nodes=asked, attach="paper.y", **more)) as loader:
            for batch in loader:
                assert list(batch.x) == [what]
                np.testing.assert_array_equal(batch.n_id[what], batch.sample.node[what][:7])
                np.testing.assert_array_equal(batch.x[what], source.rows[what][batch.n_id[what]])
                np.testing.assert_array_equal(batch.y["paper"], source.labels[batch.n_id["paper"]])


@pytest.mark.parametrize("mode", ["online", "compiled", "rolling"])
def test_rows_of_edges_beside_nodes_that_are_named(source: Source, tmp_path: Path, mode: str) -> None:
    tables = {"paper": source.rows["paper"], "paper__cites__paper": np.arange(1500.0)[:, None]}
    arrays = {"paper.y": source.labels}
    more = {"name": "edges"} if mode != "online" else {}
    with (
        featstore.pack(
            tmp_path / "s", tables, graph={CITES: source.edges[CITES]}, edge_ids=True, arrays=arrays
        ) as store,
        store.loader(
            **options(mode=mode, nodes=lambda sample: sample.node["paper"][::-1].copy(), attach="paper.y"),
            edge_table="paper__cites__paper", **more,
        ) as loader,
    ):  # fmt: skip
        for batch in loader:
            ids = batch.n_id["paper"]
            np.testing.assert_array_equal(ids, batch.sample.node["paper"][::-1])
            np.testing.assert_array_equal(batch.x["paper"], source.rows["paper"][ids])
            np.testing.assert_array_equal(batch.y["paper"], source.labels[ids])
            np.testing.assert_array_equal(batch.edge_attr[CITES][:, 0], batch.e_id[CITES])


def test_what_was_compiled_of_nodes_that_were_named_is_found_again(
    store: featstore.Store, source: Source
) -> None:
    """Without saying so again, with seeds and without."""
    given = options(mode="compiled", name="found-again", memory=MEMORY)
    store.loader(**given, nodes=lambda sample: {"author": sample.node["author"][:7]}).close()
    for more in (given, {"mode": "compiled", "name": "found-again", "memory": MEMORY}):
        with store.loader(**more, reuse=True, attach="paper.y") as loader:
            for batch in loader:
                assert list(batch.x) == ["author"]
                np.testing.assert_array_equal(batch.n_id["author"], batch.sample.node["author"][:7])
                np.testing.assert_array_equal(batch.x["author"], source.rows["author"][batch.n_id["author"]])
                np.testing.assert_array_equal(batch.y["paper"], source.labels[batch.n_id["paper"]])


@pytest.mark.parametrize("mode", ["online", "compiled", "rolling"])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("halves", [False, True])
def test_rows_of_edges_of_mini_batches_that_are_given(
    store: featstore.Store, source: Source, mode: str, pairs: bool, halves: bool
) -> None:
    """By edge type, in ``edge_attr`` alone; ids beside the sample or in it, edges whole or in halves."""

    def batch(number: int) -> Any:
        rng = np.random.default_rng(number)
        ids = {"paper": rng.choice(300, 9, replace=False), "author": rng.choice(120, 9, replace=False)}
        sample: dict[str, Any] = {"e_id": {WRITES: rng.choice(700, 9)}}
        ends = {WRITES: np.zeros(9, np.int64)}
        sample |= {"row": ends, "col": ends} if halves else {"edge_index": {WRITES: np.zeros((2, 9), int)}}
        return (ids, sample) if pairs else {"n_id": ids, **sample}

    batches = [batch(number) for number in range(5)]
    more = {"name": f"edges-{mode}-{pairs}-{halves}"} if mode != "online" else {}
    with store.loader(
        batches, mode=mode, edge_table="author__writes__paper", memory=MEMORY, **more
    ) as loader:
        for made, one in zip(loader, batches, strict=True):
            ids, sample = one if pairs else (one["n_id"], one)
            assert set(made.x) == set(made.n_id) == {"paper", "author"}
            for name, rows in made.x.items():
                np.testing.assert_array_equal(made.n_id[name], ids[name])
                np.testing.assert_array_equal(rows, source.rows[name][ids[name]])
            np.testing.assert_array_equal(made.edge_attr[WRITES], source.edge_rows[sample["e_id"][WRITES]])


@pytest.mark.parametrize("mode", ["online", "compiled", "rolling"])
def test_ids_without_a_type_beside_rows_of_edges(source: Source, tmp_path: Path, mode: str) -> None:
    """Of the only type of nodes."""
    tables = {"paper": source.rows["paper"], "paper__cites__paper": np.arange(1500.0)[:, None]}
    sample = {"e_id": {CITES: np.array([7, 1, 7])}, "edge_index": {CITES: np.zeros((2, 3), np.int64)}}
    batches = [(np.arange(5), sample), {"n_id": np.arange(5), **sample}]
    more = {"name": "untyped"} if mode != "online" else {}
    with (
        featstore.pack(
            tmp_path / "s", tables, graph={CITES: source.edges[CITES]}, edge_ids=True,
            arrays={"paper.y": source.labels},
        ) as store,
        store.loader(
            batches, mode=mode, edge_table="paper__cites__paper", attach="paper.y", memory=MEMORY, **more
        ) as loader,
    ):  # fmt: skip
        for batch in loader:
            assert list(batch.x) == list(batch.n_id) == ["paper"]
            np.testing.assert_array_equal(batch.n_id["paper"], np.arange(5))
            np.testing.assert_array_equal(batch.x["paper"], source.rows["paper"][:5])
            np.testing.assert_array_equal(batch.y["paper"], source.labels[:5])
            assert batch.edge_attr[CITES].tolist() == [[7.0], [1.0], [7.0]]
