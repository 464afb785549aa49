"""Mega-batches of real stores: what is in them, that they can be repeated and resumed, and what goes
wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import featstore
import featstore.loaders.mega.loader
import featstore.loaders.mega.sizes
from featstore.errors import ArgumentError, BudgetError, ClosedError, CorruptionError, IdError, SourceError
from featstore.loaders.batch import Batch
from featstore.loaders.mega.batch import MegaBatch
from featstore.loaders.mega.loader import MegaBatches

NODES, PARTITIONS, WIDTH = 3000, 24, 33
#: Arguments of several ways to go through an epoch: (name, options, mega-batches).
WAYS = {
    "full": {"resident": 6},
    "sliding": {"resident": 6, "replaced": 2},
    "without hubs": {"resident": 5, "hubs": 0},
    "twice": {"resident": 7, "passes": 2},
    "one by one": {"resident": 1},
    "all": {"resident": PARTITIONS},
}

ways = pytest.mark.parametrize("way", WAYS)


def make_graph() -> Any:
    """CSC [sources, targets] of clusters, hubs, loops, and nodes without any edge."""
    rng = np.random.default_rng(0)
    near = np.arange(NODES).repeat(4)
    source = np.concatenate(
        [near // 60 * 60 + rng.integers(0, 60, len(near)), rng.integers(0, 40, 3000) * 71]
    )
    target = np.concatenate([near, rng.integers(0, NODES, 3000)])
    source, target = np.concatenate([source, target]), np.concatenate([target, source])
    kept = (source % 50 != 7) & (target % 50 != 7)
    found = sp.csc_matrix((np.ones(kept.sum()), (source[kept], target[kept])), (NODES, NODES))
    found.sum_duplicates()
    found.data[:] = 1
    found.sort_indices()
    return found


GRAPH = make_graph()
FEATURES = np.random.default_rng(2).standard_normal((NODES, WIDTH), np.float32)
TRAIN = np.random.default_rng(1).permutation(NODES)[:1100]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, pack: Callable[..., featstore.Store]) -> Path:
    """A store to read from. Not to be written to."""
    made = tmp_path_factory.mktemp("mega") / "store"
    graph = (GRAPH.indptr.astype(np.int64), GRAPH.indices.astype(np.int32))
    options: dict[str, Any] = {
        "graph": graph,
        "order": "ldg",
        "partitions": PARTITIONS,
        "hubs": 0.02,
        "memory": "128MiB",
    }
    arrays = {"train": TRAIN, "train_mask": np.isin(np.arange(NODES), TRAIN)}
    pack(made, FEATURES, arrays=arrays, **options).close()
    return made


@pytest.fixture
def open_(path: Path) -> Iterator[Callable[..., MegaBatches]]:
    """Opens loaders of the store; all are closed afterwards."""
    opened: list[MegaBatches] = []
    with featstore.open(path) as store:

        def make(**options: Any) -> MegaBatches:
            opened.append(MegaBatches(store, **{"memory": "64MiB", "train": TRAIN, "seed": 3} | options))
            return opened[-1]

        yield make
        for loader in opened:
            loader.close()


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of neighbours come in many blocks, cut anywhere."""
    monkeypatch.setattr(featstore.loaders.mega.sizes, "BLOCK_EDGES_MAX", 700)
    monkeypatch.setattr(featstore.loaders.mega.sizes, "BLOCK_EDGES_MIN", 700)


with warnings.catch_warnings():
    # PyG scripts some of its own classes on import, which newer PyTorch calls deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch
    import torch_geometric.data  # noqa: F401

Seen = tuple[Any, ...]


def drawn(batch: Batch) -> Seen:
    """All of a mini-batch, as what can be compared and written as JSON."""
    return [
        batch.node.tolist(),
        batch.row.tolist(),
        batch.col.tolist(),
        batch.batch_size,
        float(batch.x.sum()),
        None if batch.weight is None else batch.weight.tolist(),
    ]  # type: ignore[return-value]


def batches(loader: MegaBatches, epochs: int = 1, size: int = 90) -> Iterator[Seen]:
    for _ in range(epochs):
        for mega in loader:
            for batch in mega.batches([4, 3], size, weights=True):
                yield drawn(batch)


def check_mega(mega: MegaBatch, partition_of: Any) -> None:
    """Features, ids and subgraph against what was packed."""
    places = mega.places
    np.testing.assert_array_equal(mega.x[places], FEATURES[mega.node[places]])
    own = places[places >= mega.hubs]
    inside = np.flatnonzero(np.isin(partition_of, mega.partitions))
    np.testing.assert_array_equal(np.sort(mega.node[own]), inside)
    # A hub that is here with its partition is found there; its own place is then nobody's neighbour.
    local = np.full(NODES, -1)
    local[mega.node[: mega.hubs]] = np.arange(mega.hubs)
    local[mega.node[own]] = own
    hub_nodes = mega.node[: mega.hubs]
    np.testing.assert_array_equal(np.sort(mega.node[mega.hub_copies]), np.intersect1d(hub_nodes, inside))
    here = np.flatnonzero(local >= 0)
    count = len(mega.indptr) - 1
    found = sp.csc_matrix((np.ones(mega.edges), mega.indices, mega.indptr), (count, count))
    assert (found[local[here]][:, local[here]] != GRAPH[here][:, here]).nnz == 0
    assert mega.edges == GRAPH[here][:, here].nnz
    stored = GRAPH[:, inside].nnz
    assert mega.edges_stored == stored
    assert mega.kept_share == pytest.approx(GRAPH[here][:, inside].nnz / stored)


def check_batch(batch: Batch, fanouts: list[int], here: set[int]) -> None:
    nodes = batch.node
    assert len(set(nodes.tolist())) == len(nodes)
    assert set(nodes.tolist()) <= here
    np.testing.assert_array_equal(batch.x, FEATURES[nodes])
    assert np.asarray(GRAPH[nodes[batch.row], nodes[batch.col]]).all(), "every edge is one of the graph"
    assert len(set(zip(batch.row.tolist(), batch.col.tolist()))) == len(batch.row)
    assert sum(batch.num_sampled_nodes) == len(nodes)
    assert batch.num_sampled_nodes[0] == batch.batch_size
    assert sum(batch.num_sampled_edges) == len(batch.row)
    lists = sorted(here)
    degrees = np.asarray(GRAPH[lists].sum(axis=0)).ravel()[nodes]
    begin = edges = 0
    for hop, fanout in enumerate(fanouts):
        end = begin + batch.num_sampled_nodes[hop]
        of_hop = batch.col[edges : edges + batch.num_sampled_edges[hop]]
        wanted = np.minimum(degrees[begin:end], fanout)
        np.testing.assert_array_equal(np.bincount(of_hop, minlength=end)[begin:end], wanted)
        begin, edges = end, edges + batch.num_sampled_edges[hop]
    assert batch.weight is not None
    sums = np.bincount(batch.col, batch.weight)
    np.testing.assert_allclose(sums, np.bincount(batch.col), rtol=1e-4)


@ways
@pytest.mark.parametrize("kind", ["uring", "threads"])
def test_what_is_in_them(open_: Callable[..., MegaBatches], way: str, kind: str) -> None:
    loader = open_(engine=kind, **WAYS[way])
    row_of_node = loader.table.row_of_node()
    assert row_of_node is not None
    partition_of = np.searchsorted(loader.table.partition_offsets, row_of_node, side="right") - 1
    for epoch in range(2):
        seen: list[Any] = []
        loaded = 0
        for step, mega in enumerate(loader):
            assert (mega.epoch, mega.step, mega.steps) == (epoch, step, len(loader))
            check_mega(mega, partition_of)
            here = set(mega.node[mega.places].tolist())
            for number, batch in enumerate(mega.batches([4, 3], 90, weights=True)):
                if number % 3 == 0:
                    check_batch(batch, [4, 3], here)
                seen.append(batch.node[: batch.batch_size])
            assert number + 1 == mega.batch_count(90)
            loaded += mega.read_bytes
        np.testing.assert_array_equal(
            np.sort(np.concatenate(seen)), np.repeat(np.sort(TRAIN), WAYS[way].get("passes", 1))
        )
        if WAYS[way].get("replaced") is None and (way != "all" or epoch == 0):
            assert loaded > FEATURES.nbytes
        if way == "all" and epoch == 1:
            assert loaded == 0, "what fits is read once"
    assert loader.steps == (
        1 if way == "all" else 10 if way == "sliding" else -(-PARTITIONS // loader.resident)
    )


def test_all_nodes_are_trained_on_by_default(open_: Callable[..., MegaBatches]) -> None:
    loader = open_(resident=8, train=None)
    seeds = np.concatenate([mega.node[mega.seeds] for mega in loader])
    np.testing.assert_array_equal(np.sort(seeds), np.arange(NODES))
    named = open_(resident=8, train="train")
    np.testing.assert_array_equal(np.sort(np.concatenate([m.node[m.seeds] for m in named])), np.sort(TRAIN))


def test_training_nodes_may_be_a_mask(open_: Callable[..., MegaBatches]) -> None:
    mask = np.zeros(NODES, bool)
    mask[TRAIN] = True
    for given in (mask, torch.from_numpy(mask), "train_mask"):
        seeds = np.concatenate([mega.node[mega.seeds] for mega in open_(resident=8, train=given)])
        np.testing.assert_array_equal(np.sort(seeds), np.sort(TRAIN))


def test_tensors_and_pyg(open_: Callable[..., MegaBatches]) -> None:
    mega = next(iter(open_(resident=8)))
    one, other = (next(mega.batches([4, 3], 90, weights=True, tensors=tensors)) for tensors in (False, True))
    assert isinstance(other.x, torch.Tensor)
    np.testing.assert_array_equal(one.x, other.x.numpy())
    data = other.pyg()
    assert data.batch_size == 90
    assert data.num_sampled_nodes == list(one.num_sampled_nodes)
    np.testing.assert_array_equal(data.edge_index.numpy(), np.stack([one.row, one.col]))
    np.testing.assert_array_equal(data.n_id.numpy(), one.node)
    np.testing.assert_array_equal(data.edge_weight.numpy(), one.weight)


@ways
def test_equal_seeds_give_equal_batches(open_: Callable[..., MegaBatches], way: str) -> None:
    loader = open_(**WAYS[way])
    first, second = list(batches(loader)), list(batches(loader))
    assert first + second == list(batches(open_(**WAYS[way], engine="threads"), epochs=2))
    assert [b[0] for b in first] != [b[0] for b in second], "epochs differ"
    assert first != list(batches(open_(**WAYS[way] | {"seed": 4})))
    later = open_(**WAYS[way])
    later.set_epoch(1)
    assert list(batches(later)) == second


@ways
def test_resumed_anywhere_the_rest_is_the_same(open_: Callable[..., MegaBatches], way: str) -> None:
    options = WAYS[way]
    whole = list(batches(open_(**options), epochs=2))
    stopped = open_(**options)
    for number, (_, state) in enumerate(
        [(b, json.dumps(stopped.state_dict())) for b in batches(stopped, epochs=2)]
    ):
        if number % max(1, len(whole) // 6) and number + 1 < len(whole) // 2:
            continue
        if number > len(whole) * 2 // 3:
            break
        resumed = open_(**options)
        resumed.load_state_dict(json.loads(state))
        rest = batches(resumed, epochs=2 - resumed.state_dict()["epoch"])
        for wanted in whole[number + 1 : number + 1 + 9]:
            assert next(rest) == wanted, (number, state)
        resumed.close()


RESUME = """
import json, sys
import featstore, featstore.loaders.mega.sizes
from featstore.loaders.mega.loader import MegaBatches
featstore.loaders.mega.sizes.BLOCK_EDGES_MAX = featstore.loaders.mega.sizes.BLOCK_EDGES_MIN = 700
options = {"memory": "64MiB", "train": "train", "seed": 3, **json.loads(sys.argv[2])}
loader = MegaBatches(featstore.open(sys.argv[1]), **options)
loader.load_state_dict(json.loads(sys.argv[3]))
print(json.dumps([b.node.tolist() for mega in loader for b in mega.batches([4, 3], 90)]))
next(iter(loader))  # neither closed nor through: the process must end all the same
"""


def test_resumed_in_another_process(open_: Callable[..., MegaBatches], path: Path) -> None:
    options = {"resident": 6, "replaced": 2, "passes": 2}
    loader, seen, state = open_(**options), [], {}
    for number, batch in enumerate(batches(loader)):
        if number == 11:
            state = loader.state_dict()
        seen.append(batch[0])
    arguments = [sys.executable, "-c", RESUME, str(path), json.dumps(options), json.dumps(state)]
    root = str(Path(featstore.__file__).parent.parent)
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == seen[12:]


def test_going_on_after_a_break(open_: Callable[..., MegaBatches]) -> None:
    for options in ({"resident": 6}, {"resident": 6, "replaced": 2, "passes": 2}, {"resident": PARTITIONS}):
        whole = list(batches(open_(**options)))
        loader, seen = open_(**options), []
        while len(seen) < len(whole):
            for number, batch in enumerate(batches(loader)):
                seen.append(batch)
                if number == 2:
                    break
        assert seen == whole


def test_a_state_of_something_else_is_refused(
    open_: Callable[..., MegaBatches], tmp_path: Path, pack: Callable[..., featstore.Store]
) -> None:
    state = open_(resident=6).state_dict()
    assert json.loads(json.dumps(state)) == state
    for key, options in {
        "seed": {"seed": 4},
        "resident": {"resident": 5},
        "replaced": {"replaced": 2},
        "hubs": {"hubs": 3},
    }.items():
        with pytest.raises(ValueError, match=f"the state has {key} ="):
            open_(**{"resident": 6} | options).load_state_dict(state)
    with pytest.raises(ValueError, match="version = 99"):
        open_(resident=6).load_state_dict(state | {"version": 99})
    graph = (GRAPH.indptr.astype(np.int64), GRAPH.indices)
    with (
        pack(
            tmp_path / "other", FEATURES + 1, graph=graph, order="ldg", partitions=PARTITIONS, hubs=0.02
        ) as store,
        MegaBatches(store, resident=6, seed=3) as other,
        pytest.raises(ValueError, match="the state has store ="),
    ):
        other.load_state_dict(state)


def test_a_replaced_mega_batch_is_not_used(open_: Callable[..., MegaBatches]) -> None:
    loader = open_(resident=6)
    iterator = iter(loader)
    first = next(iterator)
    drawing = first.batches([4], 10)
    next(drawing)
    second = next(iterator)
    with pytest.raises(ClosedError, match="replaced by the next"):
        next(drawing)
    next(second.batches([4], 10))
    third = next(iter(loader))  # a second iterator, beside the first
    with pytest.raises(ClosedError, match="replaced by the next"):
        next(second.batches([4], 10))
    next(third.batches([4], 10))


def test_passes_by_the_clock(open_: Callable[..., MegaBatches]) -> None:
    loader = open_(resident=6, passes="auto")
    assert next(iter(loader)).passes == 1, "nothing is known yet"
    loader._load_seconds, loader._pass_seconds = [3.5, 3.5, 100.0], [1.0]
    loader.set_epoch(0)
    mega = next(iter(loader))
    assert mega.passes == 3
    assert len(list(mega.batches([4], 90))) == 3 * -(-len(mega.seeds) // 90)
    state = loader.state_dict()
    assert state["passes"] == 3
    resumed = open_(resident=6, passes="auto")
    resumed.load_state_dict(state)
    assert next(iter(resumed)).passes == 3, "what was chosen holds after a resume"
    loader._pass_seconds = [1e-9]
    loader.set_epoch(0)
    assert next(iter(loader)).passes == featstore.loaders.mega.loader.PASSES_MAX


# What goes wrong.


def test_closed_while_loading(open_: Callable[..., MegaBatches]) -> None:
    for options in ({"resident": 6}, {"resident": PARTITIONS}):
        loader = open_(**options)
        iterator = iter(loader)
        next(iterator)
        loader.close()
        loader.close()
        with pytest.raises(StopIteration if loader.steps == 1 else ClosedError):
            next(iterator)
        with pytest.raises(ClosedError, match="closed"):
            next(iter(loader))


def test_stores_that_cannot_be_trained_from(tmp_path: Path, pack: Callable[..., featstore.Store]) -> None:
    graph = (GRAPH.indptr.astype(np.int64), GRAPH.indices)
    with (
        pack(tmp_path / "bare", FEATURES, order="given") as store,
        pytest.raises(SourceError, match="holds no graph"),
    ):
        MegaBatches(store)
    with (
        pack(tmp_path / "lost", FEATURES, graph=graph, topology=False) as store,
        pytest.raises(SourceError, match="no graph"),
    ):
        MegaBatches(store)
    with pack(tmp_path / "one", FEATURES, graph=graph, order="given") as store:
        assert len(store.tables["features"].partition_offsets) == 2
        with pytest.raises(SourceError, match="one single partition"):
            MegaBatches(store, memory="1MiB")
        with MegaBatches(store, memory="64MiB") as loader:  # all of it at once
            assert (loader.steps, loader.resident) == (1, 1)
        with pytest.raises(KeyError, match="no graph 'other'"):
            MegaBatches(store, graph="other")
    with pytest.raises(ClosedError):
        MegaBatches(store)


def test_options_that_cannot_be(open_: Callable[..., MegaBatches]) -> None:
    for train, what in (
        ([0, NODES], f"node {NODES} is out of range"),
        ([-1], "-1 is out of range"),
        ([5, 6, 5], "twice"),
        (np.arange(NODES) % 2, "is it a mask"),
        ([], "none, so that nothing would be trained on"),
        (np.zeros(NODES, bool), "none, so that nothing would be trained on"),
        (np.ones(NODES - 1, bool), rf"a mask of {NODES:,} nodes; .* \[{NODES - 1}\]"),
        ([0.5], "integers"),
    ):
        with pytest.raises((IdError, ArgumentError), match=what):
            open_(train=train)
    with pytest.raises(KeyError):
        open_(train="nowhere")
    for options in (
        {"passes": 0},
        {"passes": "often"},
        {"resident": 0},
        {"replaced": 0},
        {"hubs": -1},
        {"memory": "much"},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(options))}.* must|as a size"):
            open_(**options)
    with pytest.raises(SourceError, match="61 hubs were asked for, but the store has the lists of 60"):
        open_(hubs=61)
    with pytest.raises(ValueError, match="batch_size"):
        next(next(iter(open_())).batches([2], 0))
    with pytest.raises(SourceError, match="fanouts"):
        next(next(iter(open_())).batches([0], 9))


@pytest.mark.parametrize(
    "options",
    [{}, {"resident": 9}, {"hubs": 0}, {"hubs": 60}, {"hubs": 9, "resident": 9}, {"hubs": 9, "replaced": 1}],
)
def test_the_budget_that_the_error_names_works(
    open_: Callable[..., MegaBatches], options: dict[str, Any]
) -> None:
    for memory in (1, "1MiB", "4MiB"):
        with pytest.raises(BudgetError, match="too small") as caught:
            open_(memory=memory, **options)
        needed = caught.value.needed_bytes
        loader = open_(memory=needed, **options)
        held = loader.memory()
        assert held["planned"] + held["unused"] == needed
        assert held["unused"] >= 0
        if "hubs" in options:  # otherwise a smaller budget would hold fewer hubs, and may do
            with pytest.raises(BudgetError):
                open_(memory=needed - 1, **options)
    assert sum(len(mega.seeds) for mega in loader) == len(TRAIN)


def test_lists_of_what_is_no_row_are_found_without_checksums(path: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(path, tmp_path / "own"))
    (victim,) = own.glob("g*/graphs/features/sources/rows/c.*")
    good = victim.read_bytes()
    with (
        featstore.open(own) as store,
        MegaBatches(store, memory="64MiB", train=TRAIN, resident=6, verify=False) as loader,
    ):
        whole = list(batches(loader))
        bad = np.frombuffer(good, np.int32).copy()
        bad[loader.graph.edges // 2] = NODES
        victim.write_bytes(bad.tobytes())
        loader.set_epoch(0)
        seen: list[Seen] = []
        with pytest.raises(CorruptionError, match=str(NODES)):
            seen.extend(batches(loader))
        victim.write_bytes(good)
        assert seen + list(batches(loader)) == whole, "made whole again, it goes on"


@pytest.mark.parametrize(
    "table", ["tables/features", "graphs/features/sources", "graphs/features/offsets", "graphs/features/hubs"]
)
def test_bad_pages_are_named_and_nothing_hangs(path: Path, tmp_path: Path, table: str) -> None:
    own = Path(shutil.copytree(path, tmp_path / "own"))
    victim = max(own.glob(f"g*/{table}/rows/c.*"), key=lambda file: file.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(bytes(data))

    def go_through(loader: MegaBatches) -> None:
        for _ in range(PARTITIONS):
            list(batches(loader))

    with featstore.open(own) as store:
        with pytest.raises(CorruptionError, match=victim.name):  # noqa: SIM117  (opening may find it, too)
            with MegaBatches(store, memory="64MiB", train=TRAIN, resident=6) as loader:
                go_through(loader)
        if table == "tables/features":
            with MegaBatches(store, memory="64MiB", train=TRAIN, resident=6, hubs=0) as loader:
                for _ in range(2):  # the error stays, and the loader can be asked again
                    with pytest.raises(CorruptionError, match=victim.name):
                        go_through(loader)
            with MegaBatches(store, memory="64MiB", train=TRAIN, resident=6, hubs=0, verify=False) as loader:
                go_through(loader)
