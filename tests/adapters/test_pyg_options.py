"""PyG's options and links over a store: every row is the source's, and what comes out is what was asked."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch_geometric")

import featstore
from featstore.errors import ArgumentError, BudgetError, ClosedError, IdError, SourceError
from featstore.sampling.disk_sampler import DiskSampler
from featstore.sampling.links import Negatives

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch
    from torch_geometric.nn import SAGEConv
    from torch_geometric.sampler import NegativeSampling

    from featstore.adapters.pyg import LinkNeighborLoader, NeighborLoader

NODES, EDGES = 200, 1500


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(3)
    edges = rng.integers(0, NODES, (2, EDGES))
    made = {
        "x": rng.standard_normal((NODES, 5), np.float32), "edges": edges,
        "y": rng.integers(0, 4, NODES), "since": rng.integers(0, 50, NODES),
        "weight": (rng.random(EDGES) * (rng.random(EDGES) < 0.6)).astype(np.float32),
        "when": rng.integers(0, 50, EDGES), "kind": rng.integers(0, 3, EDGES),
        "edge_attr": rng.standard_normal((EDGES, 2), np.float32),
    }  # fmt: skip
    arrays = {name: made[name] for name in ("y", "since", "weight", "when", "kind")}
    tables = {"features": made["x"], "edge_features": made["edge_attr"]}
    path = tmp_path_factory.mktemp("options") / "s"
    with featstore.pack(
        path,
        tables,
        graph={"features": edges},
        arrays=arrays,
        order={"features": "ldg", "edge_features": "given"},
    ) as store:
        yield made | {"store": store}


def check(data: Any, world: dict[str, Any], reverse: bool = False) -> Any:
    """Rows are the source's, and edges are those that their numbers say."""
    n_id = data.n_id.numpy()
    np.testing.assert_array_equal(data.x.numpy(), world["x"][n_id])
    np.testing.assert_array_equal(data.y.numpy(), world["y"][n_id])
    e_id, ends = data.e_id.numpy(), n_id[data.edge_index.numpy()]
    np.testing.assert_array_equal(data.edge_attr.numpy(), world["edge_attr"][e_id])
    right = (world["edges"][:, e_id] == ends).all(axis=0)
    if reverse:
        right |= (world["edges"][::-1, e_id] == ends).all(axis=0)
    assert right.all()
    return n_id, e_id


@pytest.mark.parametrize("mode", ["online", "compiled"])
@pytest.mark.parametrize(
    "options",
    [
        {"replace": True},
        {"weight_attr": "weight", "disjoint": True},
        {"time_attr": "since"},
        {"time_attr": "when", "input_time": torch.arange(60) % 50, "temporal_strategy": "last"},
        {"subgraph_type": "bidirectional"},
        {"subgraph_type": "induced"},
    ],
)
def test_options_through_every_mode(world: dict[str, Any], mode: str, options: dict[str, Any]) -> None:
    seeds = np.random.default_rng(1).permutation(NODES)[:60]
    more = {} if mode == "online" else {"name": f"{mode}-{len(str(options))}"}
    with NeighborLoader(
        world["store"],
        [4, 3],
        seeds,
        batch_size=16,
        shuffle=True,
        memory="512MiB",
        mode=mode,
        **more,
        **options,
    ) as loader:
        seen = []
        for data in loader:
            n_id, e_id = check(data, world, options.get("subgraph_type") == "bidirectional")
            seen.extend(data.input_id.tolist())
            np.testing.assert_array_equal(n_id[: data.batch_size], seeds[data.input_id.numpy()])
            trees = "disjoint" in options or "time_attr" in options
            assert ("batch" in data) == trees
            assert ("num_sampled_edges" not in data) == ("subgraph_type" in options)
            if "weight_attr" in options:
                assert (world["weight"][e_id] > 0).all()
            if options.get("time_attr") == "since":
                np.testing.assert_array_equal(data.seed_time, world["since"][n_id[: data.batch_size]])
                assert (world["since"][n_id] <= data.seed_time[data.batch].numpy()).all()
            if options.get("time_attr") == "when":
                np.testing.assert_array_equal(data.seed_time, options["input_time"][data.input_id])
                last = data.seed_time[data.batch[data.edge_index[1]]].numpy()
                assert (world["when"][e_id] <= last).all()
        assert sorted(seen) == list(range(60))


@pytest.fixture(scope="module")
def dated(world: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[featstore.Store]:
    """The graph keeps the weights and times of its edges."""
    with featstore.pack(
        tmp_path_factory.mktemp("dated") / "s", world["x"], graph=world["edges"], edge_ids=True, order="ldg",
        arrays={"since": world["since"]}, edge_weights=world["weight"], edge_times=world["when"],
    ) as store:  # fmt: skip
        yield store


@pytest.fixture
def from_disk(monkeypatch: pytest.MonkeyPatch) -> list[DiskSampler]:
    """The samplers from disk that were opened."""
    opened: list[DiskSampler] = []
    begin = DiskSampler._open
    monkeypatch.setattr(DiskSampler, "_open", lambda one: (begin(one), opened.append(one)))
    return opened


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert set(one.keys()) == set(other.keys())
        for name in one.keys():  # noqa: SIM118 -- of a Data, not of a mapping
            np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(other[name]), err_msg=name)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("online", {"weight_attr": "weights", "replace": True}),
        ("compiled", {"time_attr": "times", "input_time": np.arange(60) % 50, "time_window": 20}),
        ("rolling", {"time_attr": "since", "weight_attr": "weights", "temporal_strategy": "last"}),
        ("online", {"subgraph_type": "induced"}),
        ("rolling", {"disjoint": True}),
    ],
)
def test_graphs_that_do_not_fit_are_sampled_from_disk(
    dated: featstore.Store, from_disk: list[DiskSampler], mode: str, options: dict[str, Any]
) -> None:
    """With the mini-batches that there are in memory."""
    seeds, made = np.random.default_rng(1).permutation(NODES)[:60], []
    for memory in ("512MiB", "24MiB"):
        name = {} if mode == "online" else {"name": f"{mode}-{memory}-{len(str(options))}"}
        with NeighborLoader(
            dated, [4, 3], seeds, batch_size=16, memory=memory, mode=mode, **name, **options
        ) as loader:
            made.append(sorted(loader, key=lambda data: int(data.input_id[0])))
        assert bool(from_disk) == (memory == "24MiB")
    assert_same(made[1], made[0])
    with pytest.raises(ClosedError):  # with the loader
        from_disk[-1].stats()


@pytest.mark.parametrize("options", [{}, {"time_attr": "since", "weight_attr": "weights"}])
def test_links_from_disk_are_those_in_memory(
    dated: featstore.Store, world: dict[str, Any], from_disk: list[DiskSampler], options: dict[str, Any]
) -> None:
    times = {"edge_label_time": world["when"] + 50} if options else {}
    made = []
    for memory in ("512MiB", "24MiB"):
        with LinkNeighborLoader(
            dated,
            [4, 3],
            batch_size=400,
            neg_sampling="binary",
            memory=memory,
            mode="online",
            **options,
            **times,
        ) as loader:
            made.append(list(loader))
        assert bool(from_disk) == (memory == "24MiB")
    assert_same(made[1], made[0])
    positives = [data.n_id[data.edge_label_index][:, data.edge_label > 0] for data in made[1]]
    np.testing.assert_array_equal(np.concatenate(positives, axis=1), world["edges"])
    with pytest.raises(ClosedError):
        from_disk[-1].stats()


def test_labels_that_are_true_or_false(world: dict[str, Any], dated: featstore.Store) -> None:
    """A negative's label is 0, so theirs begin with 1 where one of them is 0."""
    links = world["edges"][:, :50]
    for labels in (np.ones(50, bool), np.arange(50) % 2 == 0):
        with LinkNeighborLoader(
            dated, [3], links, edge_label=labels, neg_sampling="binary", batch_size=50, memory="64MiB"
        ) as loader:
            (batch,) = loader
        known = labels + (0 if labels.all() else 1)
        assert batch.edge_label.tolist() == [*known.tolist(), *[0] * 50]


def test_what_may_be_two_things_is_refused(world: dict[str, Any], tmp_path: Path) -> None:
    with (
        featstore.pack(
            tmp_path / "s", world["x"], graph=world["edges"], edge_weights=world["weight"],
            arrays={"weights": world["weight"]},
        ) as store,
        pytest.raises(SourceError, match="may be what the graph keeps or an array"),
    ):  # fmt: skip
        store.loader(seeds=[1], fanouts=[2], weight_attr="weights", memory="64MiB")


def test_the_stores_own_loader_has_the_same(world: dict[str, Any]) -> None:
    with world["store"].loader(
        seeds=np.arange(40), fanouts=[3], batch_size=8, memory="512MiB", mode="online", disjoint=True,
        time_attr="since", time_window=10,
    ) as loader:  # fmt: skip
        for batch in loader:
            late = world["since"][batch.n_id[: batch.batch_size]][batch.batch]
            assert (world["since"][batch.n_id] <= late).all()
            assert (world["since"][batch.n_id] >= late - 10).all()
    for options, words in (
        ({"time_window": 3}, "time_window= is of times"),
        ({"time_attr": "when"}, "needs the times of the seeds"),
        ({"temporal_strategy": "last"}, "are of times"),
    ):
        with pytest.raises(ArgumentError, match=words):
            world["store"].loader(seeds=np.arange(9), fanouts=[3], memory="512MiB", **options)
    with pytest.raises(ArgumentError, match="replace= is for the store to sample"):
        world["store"].loader([np.arange(3)], memory="64MiB", replace=True)


@pytest.mark.parametrize("mode", ["online", "compiled"])
@pytest.mark.parametrize("negatives", [None, "binary", "triplet"])
def test_links_have_what_pygs_loader_gives(world: dict[str, Any], mode: str, negatives: Any) -> None:
    given = {"binary": NegativeSampling("binary", 1.5), "triplet": {"mode": "triplet", "amount": 2}}
    more = {} if mode == "online" else {"name": f"links-{negatives}"}
    with LinkNeighborLoader(
        world["store"], [4, 2], batch_size=100, neg_sampling=given.get(negatives), shuffle=True, mode=mode,
        edge_label=None if negatives == "triplet" else "kind", memory="512MiB", **more,
    ) as loader:  # fmt: skip
        assert len(loader) == 15
        seen = []
        for data in loader:
            n_id, _ = check(data, world)
            assert "batch_size" not in data
            links = world["edges"][:, data.input_id.numpy()]
            seen.extend(data.input_id.tolist())
            if negatives == "triplet":
                np.testing.assert_array_equal(n_id[data.src_index], links[0])
                np.testing.assert_array_equal(n_id[data.dst_pos_index], links[1])
                assert data.dst_neg_index.shape == (100, 2)
                assert "edge_label_index" not in data
                continue
            np.testing.assert_array_equal(n_id[data.edge_label_index[:, :100]], links)
            label = world["kind"][data.input_id.numpy()]
            assert data.edge_label[:100].tolist() == (label + (negatives == "binary")).tolist()
            if negatives == "binary":
                assert data.edge_label_index.shape == (2, 250)
                assert not data.edge_label[100:].any()
        assert sorted(seen) == list(range(EDGES))


def test_links_with_times_see_nothing_later(world: dict[str, Any]) -> None:
    links, times = world["edges"][:, :90], torch.from_numpy(world["when"][:90] + 1)
    with LinkNeighborLoader(
        world["store"], [5, 5], torch.from_numpy(links), edge_label_time=times,
        time_attr="since", neg_sampling="binary", batch_size=32, drop_last=True, memory="512MiB",
    ) as loader:  # fmt: skip
        assert len(loader) == 2
        for data in loader:
            n_id, _ = check(data, world)
            np.testing.assert_array_equal(data.edge_label_time[:32], world["when"][data.input_id] + 1)
            late = world["since"][n_id] > data.edge_label_time[:32][data.batch].numpy()
            ends = np.unique(data.edge_label_index[:, :32])
            assert set(np.flatnonzero(late).tolist()) <= set(ends.tolist()), "what was asked itself, at most"


def test_a_model_of_links_learns(world: dict[str, Any]) -> None:
    torch.manual_seed(0)
    conv = SAGEConv(5, 16)
    optimiser = torch.optim.Adam(conv.parameters(), lr=0.02)
    losses = []
    with LinkNeighborLoader(
        world["store"], [5], batch_size=300, neg_sampling=Negatives("binary"), shuffle=True, memory="512MiB",
        transform=lambda data: data,
    ) as loader:  # fmt: skip
        for _ in range(8):
            total = 0.0
            for data in loader:
                out = conv(data.x, data.edge_index)
                score = (out[data.edge_label_index[0]] * out[data.edge_label_index[1]]).sum(dim=1)
                loss = torch.nn.functional.binary_cross_entropy_with_logits(score, data.edge_label)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                total += float(loss.detach())
            losses.append(total)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"data": 3}, ArgumentError, "data must be an open store"),
        ({"edge_label_index": np.array([[1], [NODES]])}, IdError, "target 200 is no node"),
        ({"edge_label_index": (("a", "b", "c"), None)}, SourceError, "edge type"),
        ({"num_neighbors": {("a", "b", "c"): [2]}}, SourceError, "edge type"),
        ({"edge_label": np.arange(3)}, ArgumentError, "each of 1,500 links"),
        ({"edge_label_time": np.arange(3)}, ArgumentError, "go together"),
        ({"time_attr": "since"}, ArgumentError, "go together"),
        ({"time_attr": "since", "edge_label_time": np.arange(3)}, SourceError, "times must be integers"),
        ({"neg_sampling": 3}, ArgumentError, "neg_sampling must be"),
        ({"neg_sampling": {"mod": "binary"}}, ArgumentError, "neg_sampling has amount"),
        ({"neg_sampling": "binary", "neg_sampling_ratio": 2}, ArgumentError, "one of them"),
        ({"neg_sampling": "triplet", "edge_label": "kind"}, ArgumentError, "not of triplets"),
        ({"seeds": [1]}, ArgumentError, "no option 'seeds'"),
        ({"mode": "partitions"}, ArgumentError, "partitions"),
        ({"memory": "32MiB", "weight_attr": "weight"}, BudgetError, "weight_attr='weight' is sampled from"),
        ({"memory": "16KiB"}, BudgetError, "hold all edges of graph 'features'"),
        ({"bath_size": 3}, ArgumentError, "batch_size"),
    ],
)
def test_links_that_cannot_be(
    world: dict[str, Any], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    arguments = {"data": world["store"], "num_neighbors": [2], "memory": "256MiB"} | options
    with pytest.raises(error, match=words):
        LinkNeighborLoader(**arguments)
