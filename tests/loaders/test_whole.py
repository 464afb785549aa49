"""What mini-batches bring beside rows of nodes; a second loader within the same memory; saved caches."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import ArgumentError, FeatstoreWarning, SourceError, StaleError
from featstore.sampling.recorded_epochs import RecordedEpochs
from featstore.trace import told_ids

NODES, EDGES = 600, 4000
RNG = np.random.default_rng(0)
FEATURES = RNG.standard_normal((NODES, 6)).astype(np.float32)
OF_EDGES = RNG.standard_normal((EDGES, 3)).astype(np.float32)
LABELS, TRAIN = RNG.integers(0, 7, NODES), np.arange(0, NODES, 3)
INDEX = RNG.integers(0, NODES, (2, EDGES))
READ_MODES = ("online", "compiled", "rolling")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("whole") / "s"
    with featstore.pack(
        path,
        {"features": FEATURES, "edge_features": OF_EDGES},
        graph={"features": INDEX},
        topology=True,
        order={"features": "ldg", "edge_features": "given"},
        partitions={"features": 4},
        arrays={"label": LABELS, "short": LABELS[:5], "train": TRAIN},
    ) as made:
        yield made


@pytest.mark.parametrize("mode", ["online", "compiled", "rolling", "partitions"])
@pytest.mark.parametrize("tensors", [False, True])
def test_labels_come_along(store: Any, mode: str, tensors: bool) -> None:
    options: dict[str, Any] = {"seeds": "train", "fanouts": (3, 2), "batch_size": 50, "graph": "features"}
    if tensors:
        torch = pytest.importorskip("torch")
        pytest.importorskip("torch_geometric")
    with store.loader(mode=mode, attach="label", memory="64MiB", tensors=tensors, **options) as loader:
        for batch in loader:
            np.testing.assert_array_equal(np.asarray(batch.label), LABELS[batch.n_id])
            assert not tensors or isinstance(batch.label, torch.Tensor)
        if tensors:
            assert torch.equal(batch.pyg().label, batch.label)


def test_a_state_is_of_the_same_seeds_however_they_are_said(store: Any) -> None:
    options: dict[str, Any] = {"fanouts": (3,), "batch_size": 50, "memory": "64MiB"}
    with store.loader(seeds="train", **options) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        rest = [batch.n_id for batch in batches]
    mask = np.zeros(NODES, bool)
    mask[TRAIN] = True
    for said in ({"seeds": TRAIN}, {"seeds": mask, "graph": "features"}, {"seeds": TRAIN.tolist()}):
        with store.loader(**options | said) as loader:
            loader.load_state_dict(state)
            for batch, expected in zip(loader, rest, strict=True):
                np.testing.assert_array_equal(batch.n_id, expected)
    with (
        store.loader(seeds=TRAIN[::-1], **options) as loader,
        pytest.raises(ArgumentError, match="other mini-batches"),
    ):
        loader.load_state_dict(state)


def test_pygs_objects_have_rows_of_any_dtype_that_torch_has(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch_geometric")
    options: dict[str, Any] = {"seeds": np.arange(40), "fanouts": (3,), "memory": "64MiB"}
    names = np.array([f"n{k}" for k in range(NODES)])
    made = {"cast": "bfloat16", "graph": INDEX, "arrays": {"name": names, "label": LABELS}}
    with featstore.pack(tmp_path / "s", FEATURES, **made) as store:
        with store.loader(**options) as loader:
            batch = next(iter(loader))
            assert batch.pyg().x.dtype == torch.bfloat16
            np.testing.assert_array_equal(batch.pyg().x.view(torch.int16), batch.x.view(np.int16))
        row, col = [0, 1, 2], [1, 2, 0]
        listed = [(np.arange(3), {"edge_index": (row, col), "batch_size": 1, "num_sampled_nodes": [1, 2],
                                  "num_sampled_edges": [3], "more": [4, 5]})]  # fmt: skip
        with store.loader(listed, memory="64MiB") as loader:
            data = next(iter(loader)).pyg()
            assert torch.equal(data.edge_index, torch.tensor([row, col]))
        with store.loader(**options, attach="name") as loader, pytest.raises(ArgumentError, match="'name'"):
            next(iter(loader)).pyg()


def test_what_cannot_be_attached(store: Any) -> None:
    batches = [(np.arange(5), {"label": 3})]
    for names, says in (
        ("nobody", "no array 'nobody'"),
        ("short", "a value for each"),
        (3, "names of arrays"),
    ):
        with pytest.raises(ArgumentError, match=says):
            store.loader(batches, attach=names, memory="64MiB")
    with (
        store.loader(batches, attach=["label"], memory="64MiB") as loader,
        pytest.raises(ArgumentError, match="have 'label' already"),
    ):
        next(iter(loader))
    with pytest.raises(featstore.errors.BudgetError, match="attached"):
        store.loader(batches, attach="label", memory=LABELS.nbytes)


def sampled(epoch: int) -> list[Any]:
    """Mini-batches of a sampler that knows the user's numbers of edges."""
    rng = np.random.default_rng(epoch)
    return [
        {"n_id": rng.integers(0, NODES, 30), "e_id": rng.integers(0, EDGES, 50 + k), "k": k} for k in range(5)
    ]


@pytest.mark.parametrize("mode", READ_MODES)
@pytest.mark.parametrize("pairs", [False, True])
def test_rows_of_edges_come_by_the_user_s_numbers(store: Any, mode: str, pairs: bool) -> None:
    def batches(epoch: int) -> list[Any]:
        return [(one.pop("n_id"), one) for one in sampled(epoch)] if pairs else sampled(epoch)

    options = {"mode": mode, "memory": "64MiB", "edge_table": "edge_features", "attach": "label"}
    with store.loader(batches, **options) as loader:
        for epoch in range(2):
            count = 0
            for batch, one in zip(loader, sampled(0 if mode == "compiled" else epoch), strict=True):
                np.testing.assert_array_equal(batch.n_id, one["n_id"])
                np.testing.assert_array_equal(batch.x, FEATURES[one["n_id"]])
                np.testing.assert_array_equal(batch.edge_attr, OF_EDGES[one["e_id"]])
                np.testing.assert_array_equal(batch.label, LABELS[one["n_id"]])
                assert batch.k == one["k"]
                count += 1
            assert count == 5


@pytest.mark.parametrize("mode", READ_MODES)
def test_pyg_s_edge_attr_is_of_its_edges(store: Any, mode: str) -> None:
    torch = pytest.importorskip("torch")
    loader_module = pytest.importorskip("torch_geometric.loader")
    from torch_geometric.data import Data

    from featstore.adapters.pyg import FeatstoreSampler

    graph = Data(edge_index=torch.from_numpy(INDEX), num_nodes=NODES)
    neighbours = loader_module.NodeLoader(
        graph, node_sampler=FeatstoreSampler.from_data(graph, (4, 3)), input_nodes=torch.from_numpy(TRAIN),
        batch_size=60,
    )  # fmt: skip
    with store.loader(neighbours, mode=mode, memory="64MiB", edge_table="edge_features") as loader:
        for batch in loader:
            data = batch.pyg()
            assert torch.equal(data.edge_attr, torch.from_numpy(OF_EDGES)[data.e_id])
            assert torch.equal(batch.edge_attr, data.edge_attr)
            assert torch.equal(data.x, torch.from_numpy(FEATURES)[data.n_id])
            ends = torch.from_numpy(INDEX)[:, data.e_id]
            assert torch.equal(data.n_id[data.edge_index], ends)


def test_rows_of_edges_that_cannot_be_told(store: Any) -> None:
    ids = [np.arange(5)]
    for options, says in (
        ({"edge_table": "features"}, "a table of nodes"),
        ({"edge_table": "nobody"}, "no table"),
    ):
        with pytest.raises(ArgumentError, match=says):
            store.loader(ids, memory="64MiB", **options)
    with (
        store.loader(ids, memory="64MiB", edge_table="edge_features") as loader,
        pytest.raises(SourceError, match="read by e_id"),
    ):
        next(iter(loader))
    with store.loader(sampled, memory="64MiB") as loader:
        batch = next(iter(loader))
        with pytest.raises(AttributeError, match="edge_table="):
            _ = batch.edge_attr


def test_rows_that_pyg_s_object_has_no_place_for(store: Any) -> None:
    """They went missing without a word."""
    torch = pytest.importorskip("torch")
    data_module = pytest.importorskip("torch_geometric.data")

    def batches(_: int) -> list[Any]:
        data = data_module.HeteroData()
        data["features"].n_id = torch.arange(4)
        return [data]

    both = {
        "memory": "64MiB",
        "nodes": lambda made: {"features": np.arange(4), "edge_features": np.arange(3)},
    }
    with store.loader(batches, **both) as loader, pytest.raises(SourceError, match="'edge_features'"):
        next(iter(loader))


def test_a_loader_to_validate_with_is_within_the_memory(store: Any) -> None:
    options: dict[str, Any] = {"fanouts": (3, 2), "batch_size": 50, "graph": "features"}
    with store.loader(seeds=TRAIN, memory="96MiB", validation_memory="32MiB", **options) as loader:
        held = np.setdiff1d(np.arange(NODES), TRAIN)
        validation = loader.validation(seeds=held, **options)
        assert validation.memory_bytes == 32 * 2**20
        for _ in range(2):
            assert sum(batch.batch_size for batch in loader) == len(TRAIN)
            assert sum(batch.batch_size for batch in validation) == len(held)
        with pytest.raises(ArgumentError, match="once"):
            loader.validation(seeds=held, **options)
    with pytest.raises(featstore.errors.ClosedError):
        next(iter(validation))
    with (
        store.loader(seeds=TRAIN, memory="64MiB", **options) as loader,
        pytest.raises(ArgumentError, match="validation_memory="),
    ):
        loader.validation(seeds=TRAIN, **options)
    with pytest.raises(ArgumentError, match="leaves nothing"):
        store.loader(seeds=TRAIN, memory="64MiB", validation_memory="64MiB", **options)


def test_a_saved_cache_is_begun_with(store: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"seeds": TRAIN, "fanouts": (3, 2), "batch_size": 50, "graph": "features"}
    with store.loader(memory="64MiB", **options) as loader:
        list(loader)
        loader.save_cache("mine")
    with store.loader(memory="64MiB", warm="mine", **options) as loader:
        list(loader)
        assert loader.report().hit_rate == 1
    with (
        store.loader(memory="64MiB", mode="rolling", **options) as loader,
        pytest.raises(ArgumentError, match="of mode 'online'"),
    ):
        loader.save_cache()
    with pytest.raises(ArgumentError, match="warm= is of mode 'online'"):
        store.loader(memory="64MiB", mode="compiled", warm="mine", **options)


def test_what_was_compiled_before_needs_no_mini_batches(store: Any) -> None:
    options: dict[str, Any] = {"seeds": TRAIN, "fanouts": (3, 2), "batch_size": 50, "graph": "features"}
    with store.loader(mode="compiled", name="kept", memory="64MiB", **options) as loader:
        expected = [batch.n_id.tolist() for batch in loader]
    with store.loader(mode="compiled", name="kept", reuse=True, memory="64MiB", attach="label") as loader:
        assert len(loader) == len(expected)
        for batch, ids in zip(loader, expected, strict=True):
            assert batch.n_id.tolist() == ids
            np.testing.assert_array_equal(batch.x, FEATURES[batch.n_id])
            np.testing.assert_array_equal(batch.label, LABELS[batch.n_id])
    with pytest.raises(featstore.errors.IncompleteStoreError, match="no compiled trace 'other'"):
        store.loader(mode="compiled", name="other", reuse=True, memory="64MiB")


def test_a_compiled_trace_opens_without_the_store_that_it_was_compiled_for(
    store: Any, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"seeds": TRAIN, "fanouts": (3, 2), "batch_size": 50, "graph": "features"}
    with store.loader(mode="compiled", name="all", memory="64MiB", **options) as loader:
        expected = [batch.n_id.tolist() for batch in loader]
    shutil.copytree(store.path / "packs" / "all", tmp_path / "all")
    with featstore.open(tmp_path / "all") as alone:
        with pickle.loads(pickle.dumps(alone)).loader(mode="compiled", memory="64MiB") as loader:
            for _ in range(2):
                for batch, ids in zip(loader, expected, strict=True):
                    assert batch.n_id.tolist() == ids
                    np.testing.assert_array_equal(batch.x, FEATURES[batch.n_id])
        for wrong in ({"name": "all"}, {"batches": [TRAIN]}):
            with pytest.raises(ArgumentError, match="is a compiled trace itself"):
                alone.loader(mode="compiled", memory="64MiB", **wrong)


@pytest.mark.parametrize("mode", READ_MODES)
def test_ids_are_those_whose_rows_were_asked_for(store: Any, mode: str) -> None:
    """``nodes=`` says others than the sampler; in every mode x, n_id and what is attached are of the same."""
    options: dict[str, Any] = {"seeds": TRAIN, "fanouts": (3, 2), "batch_size": 50, "graph": "features"}
    more = {"name": f"named-{mode}"} if mode != "online" else {}

    def last_ten(sample: Any) -> Any:
        return np.sort(sample.node)[-10:]

    with store.loader(mode=mode, nodes=last_ten, attach="label", memory="64MiB", **options, **more) as loader:
        for batch in loader:
            assert batch.n_id.tolist() == last_ten(batch.sample).tolist()
            np.testing.assert_array_equal(batch.x, FEATURES[batch.n_id])
            np.testing.assert_array_equal(batch.label, LABELS[batch.n_id])

    def both(sample: Any) -> Any:
        return {"features": sample.node[:9], "edge_features": np.arange(4)}

    more = {"name": f"both-{mode}"} if mode != "online" else {}
    with store.loader(mode=mode, nodes=both, attach="label", memory="64MiB", **options, **more) as loader:
        for batch in loader:
            np.testing.assert_array_equal(batch.x["features"], FEATURES[batch.n_id["features"]])
            np.testing.assert_array_equal(batch.x["edge_features"], OF_EDGES[:4])
            np.testing.assert_array_equal(batch.label, LABELS[batch.n_id["features"]])


@pytest.mark.parametrize("mode", READ_MODES)
def test_ids_of_a_pair_are_those_whose_rows_come(store: Any, mode: str) -> None:
    """Also where the sample beside them has nodes of its own."""
    with store.sampler((3, 2), seed=1, graph="features", memory="64MiB") as sampler:
        made = [sampler.sample(TRAIN[k : k + 20], k) for k in range(0, 60, 20)]
    batches = [(np.sort(one.node)[-7:], one) for one in made]
    more = {"name": f"pairs-{mode}"} if mode != "online" else {}
    with store.loader(batches, mode=mode, attach="label", memory="64MiB", **more) as loader:
        for batch, (ids, sample) in zip(loader, batches, strict=True):
            assert batch.n_id.tolist() == ids.tolist()
            assert batch.sample.node.tolist() == sample.node.tolist()
            np.testing.assert_array_equal(batch.x, FEATURES[ids])
            np.testing.assert_array_equal(batch.label, LABELS[ids])


@pytest.mark.parametrize("kind", ["ids", "nodes", "mapping", "named", "epochs", "own"])
def test_what_was_compiled_of_a_trace_has_the_ids_of_its_rows(store: Any, tmp_path: Path, kind: str) -> None:
    """Whatever its samples know."""
    with store.sampler((3, 2), seed=1, graph="features", memory="64MiB") as sampler:
        made = [sampler.sample(TRAIN[k : k + 20], k) for k in range(0, 60, 20)]
        ids = [np.sort(one.node)[-7:] if kind in ("nodes", "mapping") else one.node for one in made]
        batches: Any = made
        if kind == "ids":
            batches = ids
        elif kind in ("mapping", "named"):
            batches = [{"n_id": one.node, "mine": own, "k": k} for k, (one, own) in enumerate(zip(made, ids))]
        elif kind == "epochs":
            batches = RecordedEpochs(sampler, TRAIN[:60], 20, 1)
            ids = [own for own, _ in batches]
        nodes = {"nodes": lambda one: np.sort(one.node)[-7:], "mapping": lambda one: one["mine"]}.get(kind)
        featstore.Trace.record(batches, tmp_path / "t", nodes=nodes).close()
    featstore.compile_trace(store, tmp_path / "t", f"trace-{kind}", memory="64MiB").close()
    with (
        featstore.Trace(tmp_path / "t") as trace,
        store.loader(
            mode="compiled", name=f"trace-{kind}", reuse=True, memory="64MiB", attach="label"
        ) as loader,
    ):
        for number, batch in enumerate(loader):
            assert batch.n_id.tolist() == ids[number].tolist() == trace.ids(number)[""].tolist()
            assert batch.n_id.dtype == np.int64 or kind == "ids"
            np.testing.assert_array_equal(batch.x, FEATURES[batch.n_id])
            np.testing.assert_array_equal(batch.label, LABELS[batch.n_id])
            if kind in ("nodes", "epochs", "own"):
                assert type(batch.sample) is type(made[0])
                assert batch.edge_index.shape[0] == 2
            if kind in ("mapping", "named"):
                assert batch.sample["k"] == number


@pytest.mark.parametrize("mode", ["compiled", "rolling"])
def test_loaders_do_not_look_at_their_own_samples_again(
    store: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were recorded with the ids of their rows, also where rows of edges come with them."""

    def never(trace: Any) -> None:
        raise AssertionError(trace)

    monkeypatch.setattr(told_ids, "TraceWithIds", never)
    for more in ({}, {"nodes": lambda sample: sample.node[:9]}):
        with store.loader(
            mode=mode, seeds=TRAIN, fanouts=(3,), batch_size=50, graph="features", memory="64MiB", **more
        ) as loader:
            assert {batch.n_id.dtype for batch in loader} == {np.dtype(np.int64)}


def test_what_nobody_knows_the_sampling_of_is_told(store: Any, tmp_path: Path) -> None:
    with store.sampler((3, 2), seed=1, graph="features", memory="64MiB") as sampler:
        featstore.Trace.record(RecordedEpochs(sampler, TRAIN, 50, 1), tmp_path / "t").close()
    featstore.compile_trace(store, tmp_path / "t", "unsaid", memory="64MiB").close()
    options: dict[str, Any] = {"mode": "compiled", "name": "unsaid", "reuse": True, "memory": "64MiB"}
    with pytest.warns(FeatstoreWarning, match="nothing says what they were sampled from"):
        store.loader(seeds=TRAIN, fanouts=(9, 9), batch_size=50, graph="features", **options).close()


def test_another_accelerators_memory_is_not_what_reuse_takes(store: Any) -> None:
    pytest.importorskip("torch")
    options: dict[str, Any] = {"seeds": TRAIN, "fanouts": (3, 2), "batch_size": 50, "graph": "features"}
    options |= {"mode": "compiled", "memory": "64MiB", "device": "cpu"}
    store.loader(**options, name="there", device_memory="4KiB").close()
    store.loader(**options, name="not-there").close()
    for name, memory, says in (
        ("there", "1KiB", "keeps .* of rows there"), ("not-there", "4KiB", "keeps no rows there")
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=says):
            store.loader(**options, name=name, device_memory=memory, reuse=True)
    store.loader(**options, name="there", device_memory="8KiB", reuse=True).close()
    store.loader(**options, name="not-there", device_memory=0, reuse=True).close()
    store.loader(**options, name="new", device_memory=0, reuse=True).close()


def test_a_compiled_trace_that_was_made_anew_is_not_taken_for_the_one_pickled(
    store: Any, tmp_path: Path
) -> None:
    for number in range(2):
        featstore.Trace.record([np.arange(9) + number], tmp_path / "t", overwrite=True).close()
        made = featstore.compile_trace(store, tmp_path / "t", "twice", memory="64MiB", overwrite=True)
        made.close()
        if not number:
            with store.compiled("twice") as compiled:
                kept = pickle.dumps(compiled)
            pickle.loads(kept).close()
    with pytest.raises(StaleError, match="compiled anew since it was pickled"):
        pickle.loads(kept)


def test_values_are_not_taken_from_the_end(store: Any) -> None:
    """Where a mini-batch of PyG's is filled up, and nodes= says whose rows come."""
    torch = pytest.importorskip("torch")
    data_module = pytest.importorskip("torch_geometric.data")
    data = data_module.Data(n_id=torch.tensor([4, -1]), edge_index=torch.zeros(2, 2).long())
    given = {"nodes": lambda one: one.n_id.clamp(min=0), "attach": "label", "memory": "64MiB"}
    with (
        store.loader([data], mode="online", **given) as loader,
        pytest.raises(SourceError, match="an n_id of these mini-batches is -1"),
    ):
        list(loader)


@pytest.mark.parametrize("mode", READ_MODES)
@pytest.mark.parametrize("named", [False, True])
def test_values_of_nodes_are_not_taken_for_edges(store: Any, mode: str, named: bool) -> None:
    """Whether mini-batches name the table of edges themselves, or ``nodes=`` does; and where they are taken
    as they were compiled."""
    name = {"name": f"edges-{mode}-{named}"} if mode != "online" else {}
    batches: list[Any] = [np.arange(4)] if named else [{"edge_features": np.arange(4)}]
    given = {"nodes": lambda ids: {"edge_features": ids}} if named else {}
    says = "rows of 'edge_features', and what is attached has values of nodes"
    with (
        pytest.raises(ArgumentError, match=says),
        store.loader(batches, mode=mode, attach="label", memory="64MiB", **given, **name) as loader,
    ):
        list(loader)
    if mode == "compiled":
        store.loader(batches, mode=mode, memory="64MiB", **given, **name).close()
        with (
            pytest.raises(ArgumentError, match=says),
            store.loader(mode=mode, attach="label", memory="64MiB", reuse=True, **name) as loader,
        ):
            list(loader)


def test_pygs_mini_batches_have_values_of_their_own_nodes(store: Any) -> None:
    """Also where rows of edges alone are read."""
    pytest.importorskip("torch_geometric")
    import torch
    from torch_geometric.data import Data

    data = Data(n_id=torch.tensor([4, 2]), e_id=torch.tensor([3, 1]), edge_index=torch.zeros(2, 2).long())
    given = {"nodes": lambda one: {"edge_features": one.e_id}, "attach": "label", "memory": "64MiB"}
    with store.loader([data], mode="online", **given) as loader:
        (made,) = loader
        assert made.label.tolist() == LABELS[[4, 2]].tolist()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"fanouts": (5,)}, "fanouts= is for sampling"), ({"batch_size": 64}, "batch_size= is for sampling"),
        ({"nodes": len}, "nodes= is for sampling"), ({"drop_last": True}, "drop_last= is for sampling"),
        ({"residency": "fixed"}, "was compiled with residency='min', not 'fixed'"),
    ],
)  # fmt: skip
def test_what_was_compiled_is_not_made_anew(store: Any, more: dict[str, Any], says: str) -> None:
    """Options that would have no effect on it."""
    options: dict[str, Any] = {"seeds": TRAIN, "fanouts": (3, 2), "batch_size": 50, "graph": "features"}
    store.loader(mode="compiled", name="as-it-is", memory="64MiB", reuse=True, **options).close()
    with pytest.raises(ArgumentError, match=says):
        store.loader(mode="compiled", name="as-it-is", reuse=True, memory="64MiB", **more)
