"""Mega-batches of real stores: what is in them, that they can be repeated and resumed, and what goes
wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from gates import Gate

import featstore
import featstore.loaders.mega.loader
import featstore.loaders.mega.sizes
from featstore.errors import ArgumentError, BudgetError, ClosedError, CorruptionError, IdError, SourceError
from featstore.loaders.batch import Batch
from featstore.loaders.mega.drawing import Drawing
from featstore.loaders.mega.largest import DrawnEdges, LargestDrawn
from featstore.loaders.mega.loader import PartitionsLoader
from featstore.loaders.mega.loading import Loading
from featstore.loaders.mega.partition_set import PartitionSet
from featstore.loaders.mega.sets import PartitionSets
from featstore.sampling.neighbors import NeighborSampler

NODES, PARTITIONS, WIDTH = 3000, 24, 33
#: Arguments of several ways to go through an epoch, by name.
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
FANOUTS, SIZE = [4, 3], 90
OF_SETS: dict[str, Any] = {"memory": "64MiB", "train": TRAIN, "seed": 3}
DRAWN: dict[str, Any] = {"fanouts": FANOUTS, "batch_size": SIZE, "weights": True}


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
def open_(path: Path) -> Iterator[Callable[..., PartitionsLoader]]:
    """Opens loaders of the store; all are closed afterwards."""
    opened: list[PartitionsLoader] = []
    with featstore.open(path) as store:

        def make(**options: Any) -> PartitionsLoader:
            opened.append(PartitionsLoader(store, **DRAWN | OF_SETS | options))
            return opened[-1]

        yield make
        for loader in opened:
            loader.close()


@pytest.fixture
def open_sets(path: Path) -> Iterator[Callable[..., PartitionSets]]:
    """Opens mega-batches of the store, from which nothing is drawn; all are closed afterwards."""
    opened: list[PartitionSets] = []
    with featstore.open(path) as store:

        def make(**options: Any) -> PartitionSets:
            opened.append(PartitionSets(store, **OF_SETS | options))
            return opened[-1]

        yield make
        for sets in opened:
            sets.close()


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
        None if batch.sample.weight is None else batch.sample.weight.tolist(),
    ]  # type: ignore[return-value]


def batches(loader: PartitionsLoader, epochs: int = 1) -> Iterator[Seen]:
    for _ in range(epochs):
        for batch in loader:
            yield drawn(batch)


def made_in_turns(sets: PartitionSets, epochs: int, passes: int = 1) -> Iterator[Seen]:
    """The twin of what is drawn: sampled and gathered by one plain loop, unweighted."""
    for epoch in range(epochs):
        for mega in sets:
            here, lists = mega.rows["features"], mega.lists["features"]
            sampler = NeighborSampler(lists.indptr, lists.indices, FANOUTS, seed=3)
            for pass_ in range(passes):
                order = np.random.default_rng([3, epoch, mega.step, pass_]).permutation(mega.seeds)
                for number in range(-(-len(order) // SIZE)):
                    key = (mega.step << 44) + (pass_ << 32) + number
                    found = sampler.sample(order[number * SIZE :][:SIZE], key, epoch=epoch)
                    assert here.x is not None
                    ids, rows = here.node[found.node], here.x[found.node]
                    size = len(order[number * SIZE :][:SIZE])
                    yield (ids.tolist(), found.row.tolist(), found.col.tolist(), size, rows.tobytes())


def check_mega(mega: PartitionSet, partition_of: Any) -> None:
    """Features, ids and subgraph against what was packed."""
    rows, lists = mega.rows["features"], mega.lists["features"]
    places = rows.places
    assert rows.x is not None
    np.testing.assert_array_equal(rows.x[places], FEATURES[rows.node[places]])
    own = places[places >= rows.hubs]
    inside = np.flatnonzero(np.isin(partition_of, mega.partitions))
    np.testing.assert_array_equal(np.sort(rows.node[own]), inside)
    # A hub that is here with its partition is found there; its own place is then nobody's neighbour.
    local = np.full(NODES, -1)
    local[rows.node[: rows.hubs]] = np.arange(rows.hubs)
    local[rows.node[own]] = own
    hub_nodes = rows.node[: rows.hubs]
    np.testing.assert_array_equal(np.sort(rows.node[rows.hub_copies]), np.intersect1d(hub_nodes, inside))
    here = np.flatnonzero(local >= 0)
    count = len(lists.indptr) - 1
    found = sp.csc_matrix((np.ones(mega.edges), lists.indices, lists.indptr), (count, count))
    assert (found[local[here]][:, local[here]] != GRAPH[here][:, here]).nnz == 0
    assert mega.edges == GRAPH[here][:, here].nnz
    stored = GRAPH[:, inside].nnz
    assert mega.edges_stored == stored
    assert mega.kept_share == pytest.approx(GRAPH[here][:, inside].nnz / stored)


def largest(batch_size: int, fanouts: list[int]) -> LargestDrawn:
    """Of the store's one graph."""
    edges = {"features": DrawnEdges("features", "features", tuple(fanouts))}
    return LargestDrawn(batch_size, "features", edges)


def nodes_and_edges(drawn: LargestDrawn, places: int, edges: int) -> tuple[int, int]:
    nodes, of_graph = drawn.nodes_and_edges({"features": places}, {"features": edges})
    return nodes["features"], of_graph["features"]


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
def test_what_is_in_them(
    open_: Callable[..., PartitionsLoader], open_sets: Callable[..., PartitionSets], way: str, kind: str
) -> None:
    of_sets = dict(WAYS[way])
    passes = of_sets.pop("passes", 1)
    loader, drawing = open_sets(engine=kind, **of_sets), open_(engine=kind, **WAYS[way])
    table = loader.store.tables["features"]
    row_of_node = table.row_of_node()
    assert row_of_node is not None
    partition_of = np.searchsorted(table.partition_offsets, row_of_node, side="right") - 1
    for epoch in range(2):
        seen: list[Any] = []
        loaded = 0
        drawn = iter(drawing)
        for step, mega in enumerate(loader):
            assert (mega.epoch, mega.step, mega.steps) == (epoch, step, len(loader))
            check_mega(mega, partition_of)
            rows = mega.rows["features"]
            here = set(rows.node[rows.places].tolist())
            for number, batch in enumerate(islice(drawn, passes * -(-len(mega.seeds) // SIZE))):
                if number % 3 == 0:
                    check_batch(batch, FANOUTS, here)
                seen.append(batch.node[: batch.batch_size])
            loaded += mega.read_bytes
        assert next(drawn, None) is None
        np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.repeat(np.sort(TRAIN), passes))
        if WAYS[way].get("replaced") is None and (way != "all" or epoch == 0):
            assert loaded > FEATURES.nbytes
        if way == "all" and epoch == 1:
            assert loaded == 0, "what fits is read once"
    assert loader.steps == (
        1 if way == "all" else 10 if way == "sliding" else -(-PARTITIONS // loader.resident)
    )


@ways
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 2)])
def test_their_number_is_known_beforehand(
    open_: Callable[..., PartitionsLoader], way: str, ranks: tuple[int, ...], drop_last: bool
) -> None:
    """In every epoch, and nothing is loaded for it."""
    loader = open_(**WAYS[way], ranks=ranks, world_size=3, drop_last=drop_last)
    before = loader.sets.stats().bytes_read
    expected = len(loader)
    assert loader.sets.stats().bytes_read == before
    for _ in range(2):
        assert len(list(loader)) == expected
        expected = len(loader)


@ways
def test_they_are_those_of_one_plain_loop(
    open_: Callable[..., PartitionsLoader], open_sets: Callable[..., PartitionSets], way: str
) -> None:
    """Bit for bit, also while the loop is slow, and the thread beside it as far ahead as it may be."""
    of_sets = dict(WAYS[way])
    passes = of_sets.pop("passes", 1)
    found = []
    loader = open_(weights=False, **WAYS[way])
    for number, batch in enumerate(chain(loader, loader)):
        if number % 5 == 0:
            time.sleep(0.005)
        found.append((*drawn(batch)[:4], batch.x.tobytes()))
        assert batch.sample.weight is None
        del batch
    assert found == list(made_in_turns(open_sets(**of_sets), 2, passes))


def seeds_of(sets: PartitionSets) -> list[Any]:
    """Node ids of the seeds of each mega-batch."""
    return [mega.rows["features"].node[mega.seeds] for mega in sets]


def test_all_nodes_are_trained_on_by_default(open_sets: Callable[..., PartitionSets]) -> None:
    loader = open_sets(resident=8, train=None)
    seeds = np.concatenate(seeds_of(loader))
    np.testing.assert_array_equal(np.sort(seeds), np.arange(NODES))
    named = open_sets(resident=8, train="train")
    np.testing.assert_array_equal(np.sort(np.concatenate(seeds_of(named))), np.sort(TRAIN))


def test_training_nodes_may_be_a_mask(open_sets: Callable[..., PartitionSets]) -> None:
    mask = np.zeros(NODES, bool)
    mask[TRAIN] = True
    for given in (mask, torch.from_numpy(mask), "train_mask"):
        seeds = np.concatenate(seeds_of(open_sets(resident=8, train=given)))
        np.testing.assert_array_equal(np.sort(seeds), np.sort(TRAIN))


@pytest.mark.parametrize("how", [{"tensors": True}, {"device": "cpu"}, {"device": "cpu", "tensors": True}])
def test_tensors_and_pyg(open_: Callable[..., PartitionsLoader], how: dict[str, Any]) -> None:
    one, other = next(iter(open_(resident=8))), next(iter(open_(resident=8, **how)))
    assert isinstance(one.x, np.ndarray)
    assert isinstance(other.x, torch.Tensor)
    assert isinstance(other.edge_index, torch.Tensor)
    assert other.x.device == other.edge_index.device == torch.device("cpu")
    np.testing.assert_array_equal(one.x, other.x.numpy())
    data = other.pyg()
    assert data.batch_size == 90
    assert data.num_sampled_nodes == list(one.num_sampled_nodes)
    np.testing.assert_array_equal(data.edge_index.numpy(), np.stack([one.row, one.col]))
    np.testing.assert_array_equal(data.n_id.numpy(), one.node)
    np.testing.assert_array_equal(data.edge_weight.numpy(), one.weight)


@ways
def test_equal_seeds_give_equal_batches(open_: Callable[..., PartitionsLoader], way: str) -> None:
    loader = open_(**WAYS[way])
    first, second = list(batches(loader)), list(batches(loader))
    assert first + second == list(batches(open_(**WAYS[way], engine="threads"), epochs=2))
    assert [b[0] for b in first] != [b[0] for b in second], "epochs differ"
    assert first != list(batches(open_(**WAYS[way] | {"seed": 4})))
    assert [b[5] for b in first] != [b[5] for b in batches(open_(**WAYS[way], weights=False))]
    later = open_(**WAYS[way])
    later.set_epoch(1)
    assert list(batches(later)) == second


@ways
def test_resumed_anywhere_the_rest_is_the_same(open_: Callable[..., PartitionsLoader], way: str) -> None:
    options = WAYS[way]
    whole = list(batches(open_(**options), epochs=2))
    stopped = open_(**options)
    for number, (_, state) in enumerate(
        [(b, json.dumps(stopped.state())) for b in batches(stopped, epochs=2)]
    ):
        if number % max(1, len(whole) // 6) and number + 1 < len(whole) // 2:
            continue
        if number > len(whole) // 2 + 3:  # some in the second epoch
            break
        resumed = open_(**options)
        resumed.load_state(json.loads(state))
        rest = batches(resumed, epochs=2 - resumed.state()["epoch"])
        for wanted in whole[number + 1 : number + 1 + 9]:
            assert next(rest) == wanted, (number, state)
        resumed.close()


RESUME = """
import json, sys
import featstore, featstore.loaders.mega.sizes
from featstore.loaders.mega.largest import DrawnEdges, LargestDrawn
from featstore.loaders.mega.loader import PartitionsLoader
featstore.loaders.mega.sizes.BLOCK_EDGES_MAX = featstore.loaders.mega.sizes.BLOCK_EDGES_MIN = 700
options = {"memory": "64MiB", "train": "train", "seed": 3, **json.loads(sys.argv[2])}
loader = PartitionsLoader(featstore.open(sys.argv[1]), [4, 3], batch_size=90, **options)
loader.load_state(json.loads(sys.argv[3]))
print(json.dumps([b.node.tolist() for b in loader]))
next(iter(loader))  # neither closed nor through: the process must end all the same
"""


def test_resumed_in_another_process(open_: Callable[..., PartitionsLoader], path: Path) -> None:
    options = {"resident": 6, "replaced": 2, "passes": 2}
    loader, seen, state = open_(**options), [], {}
    for number, batch in enumerate(batches(loader)):
        if number == 11:
            state = loader.state()
        seen.append(batch[0])
    arguments = [sys.executable, "-c", RESUME, str(path), json.dumps(options), json.dumps(state)]
    root = str(Path(featstore.__file__).parent.parent)
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == seen[12:]


def test_going_on_after_a_break(open_: Callable[..., PartitionsLoader]) -> None:
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
    open_: Callable[..., PartitionsLoader], tmp_path: Path, pack: Callable[..., featstore.Store]
) -> None:
    state = open_(resident=6).state()
    assert json.loads(json.dumps(state)) == state
    for key, options in {
        "seed": {"seed": 4},
        "resident": {"resident": 5},
        "replaced": {"replaced": 2},
        "hubs": {"hubs": 3},
    }.items():
        with pytest.raises(ValueError, match=f"the state has {key} ="):
            open_(**{"resident": 6} | options).load_state(state)
    with pytest.raises(ValueError, match="version = 99"):
        open_(resident=6).load_state(state | {"version": 99})
    graph = (GRAPH.indptr.astype(np.int64), GRAPH.indices)
    with (
        pack(
            tmp_path / "other", FEATURES + 1, graph=graph, order="ldg", partitions=PARTITIONS, hubs=0.02
        ) as store,
        PartitionsLoader(store, FANOUTS, resident=6, seed=3) as other,
        pytest.raises(ValueError, match="the state has store ="),
    ):
        other.load_state(state)


def test_a_second_iteration_ends_the_first(open_: Callable[..., PartitionsLoader]) -> None:
    """Nothing is drawn from a mega-batch that the second has replaced; the second goes on where the first
    was."""
    whole = list(batches(open_(resident=6)))
    loader = open_(resident=6)
    first = batches(loader)
    assert [next(first) for _ in range(3)] == whole[:3]
    second = batches(loader)
    assert next(second) == whole[3]
    with pytest.raises(ClosedError, match="another iteration of this loader has begun"):
        next(first)
    assert list(second) == whole[4:]


def passes_of_first(loader: PartitionsLoader) -> int:
    """How often the first mega-batch of epoch 0 is gone through."""
    loader.set_epoch(0)
    next(iter(loader))
    passes = loader.state()["at"]["passes"]
    assert isinstance(passes, int)
    return passes


def test_passes_by_the_clock(
    open_: Callable[..., PartitionsLoader], open_sets: Callable[..., PartitionSets]
) -> None:
    loader, sets = open_(resident=6, passes="auto"), open_sets(resident=6)
    first = next(iter(sets))
    count = -(-len(first.seeds) // SIZE)
    assert passes_of_first(loader) == 1, "nothing is known yet"
    # A pass takes a second of the loop's.
    loader._load_seconds, loader.report_stages.step_seconds = [3.5, 3.5, 100.0], [1.0 / count]
    assert passes_of_first(loader) == 3
    loader._load_seconds, loader.report_stages.step_seconds = [3.5, 3.5, 100.0], [1.0 / count]
    loader.set_epoch(0)
    under_way, states = iter(loader), []
    for _ in range(3 * count):
        next(under_way)
        states.append(loader.state())
    assert [(s["next"], *map(s["at"].get, ("pass", "batch", "passes"))) for s in states] == [
        (0, (n + 1) // count, (n + 1) % count, 3) for n in range(3 * count)
    ]
    resumed = open_(resident=6, passes="auto")
    resumed.load_state(states[0])
    next(iter(resumed))
    assert resumed.state()["at"]["passes"] == 3, "what was chosen holds after a resume"
    loader.report_stages.step_seconds = [1e-9]
    assert passes_of_first(loader) == featstore.loaders.mega.loader.PASSES_MAX


def test_a_pass_takes_the_seconds_of_the_loop(
    open_: Callable[..., PartitionsLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those of the sampler, however slow it is, nor those of waiting for it."""
    sample = Drawing.sample

    def slow(*given: Any) -> Any:
        time.sleep(0.05)
        return sample(*given)

    monkeypatch.setattr(Drawing, "sample", slow)
    loader = open_(resident=6, passes="auto")
    for _ in islice(loader, 6):
        time.sleep(0.002)
    steps = loader.report_stages.step_seconds
    assert len(steps) == 5, "the last one was broken off"
    assert 0.002 <= np.median(steps) < 0.04
    assert loader.report().seconds["sample"] > 5 * 0.05


# What goes wrong.


def test_by_the_clock_their_number_is_not_known(open_: Callable[..., PartitionsLoader]) -> None:
    with pytest.raises(ArgumentError, match="known afterwards"):
        len(open_(passes="auto"))


def test_closed_while_loading(open_: Callable[..., PartitionsLoader]) -> None:
    for options in ({"resident": 6}, {"resident": PARTITIONS}):
        loader = open_(**options)
        iterator = iter(loader)
        next(iterator)
        loader.close()
        loader.close()
        with pytest.raises(ClosedError):
            next(iterator)
        with pytest.raises(ClosedError, match="closed"):
            next(iter(loader))


def test_stores_that_cannot_be_trained_from(tmp_path: Path, pack: Callable[..., featstore.Store]) -> None:
    graph = (GRAPH.indptr.astype(np.int64), GRAPH.indices)
    with (
        pack(tmp_path / "bare", FEATURES, order="given") as store,
        pytest.raises(SourceError, match="holds no graph"),
    ):
        PartitionSets(store)
    with (
        pack(tmp_path / "lost", FEATURES, graph=graph, topology=False) as store,
        pytest.raises(SourceError, match="no graph"),
    ):
        PartitionSets(store)
    with pack(tmp_path / "one", FEATURES, graph=graph, order="given") as store:
        assert len(store.tables["features"].partition_offsets) == 2
        with pytest.raises(SourceError, match="one single partition"):
            PartitionSets(store, memory="1MiB")
        with PartitionSets(store, memory="64MiB") as loader:  # all of it at once
            assert (loader.steps, loader.resident) == (1, 1)
        with pytest.raises(KeyError, match="no graph 'other'"):
            PartitionSets(store, graph="other")
    with pytest.raises(ClosedError):
        PartitionSets(store)


def test_options_that_cannot_be(open_: Callable[..., PartitionsLoader]) -> None:
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
        open_(batch_size=0)
    with pytest.raises(ArgumentError, match="fanouts"):
        open_(fanouts=[0])
    with pytest.raises(ArgumentError, match="replaced=9: of resident=4 partitions"):
        open_(resident=4, replaced=9)
    with pytest.raises(SourceError, match="tensors=False"):
        open_(tensors=False, device="cpu")
    with pytest.raises(ArgumentError, match="device='meta' cannot be used here"):
        open_(device="meta")


@pytest.mark.parametrize(
    "options",
    [{}, {"resident": 9}, {"hubs": 0}, {"hubs": 60}, {"hubs": 9, "resident": 9}, {"hubs": 9, "replaced": 1}],
)
@pytest.mark.parametrize("fanouts", [[4, 3], [-1, -1], None])
def test_the_budget_that_the_error_names_works(
    open_: Callable[..., PartitionsLoader],
    open_sets: Callable[..., PartitionSets],
    options: dict[str, Any],
    fanouts: list[int] | None,
) -> None:
    def opened(**more: Any) -> PartitionSets:
        return open_sets(**more) if fanouts is None else open_(fanouts=fanouts, **more).sets

    for memory in (1, "1MiB", "4MiB"):
        with pytest.raises(BudgetError, match="too small") as caught:
            opened(memory=memory, **options)
        needed = caught.value.needed_bytes
        loader = opened(memory=needed, **options)
        held = loader.memory()
        assert held["planned"] + held["unused"] == needed
        assert held["unused"] >= 0
        if "hubs" in options:  # otherwise a smaller budget would hold fewer hubs, and may do
            with pytest.raises(BudgetError):
                opened(memory=needed - 1, **options)
    assert sum(len(mega.seeds) for mega in loader) == len(TRAIN)


def test_lists_of_what_is_no_row_are_found_without_checksums(path: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(path, tmp_path / "own"))
    (victim,) = own.glob("g*/graphs/features/sources/rows/c.*")
    good = victim.read_bytes()
    with (
        featstore.open(own) as store,
        PartitionsLoader(store, **DRAWN, **OF_SETS, resident=6, verify=False) as loader,
    ):
        whole = list(batches(loader))
        bad = np.frombuffer(good, np.int32).copy()
        bad[store.graphs["features"].edges // 2] = NODES
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

    def go_through(loader: PartitionsLoader) -> None:
        for _ in range(PARTITIONS):
            list(batches(loader))

    with featstore.open(own) as store:
        with pytest.raises(CorruptionError, match=victim.name):  # noqa: SIM117  (opening may find it, too)
            with PartitionsLoader(store, **DRAWN, **OF_SETS, resident=6) as loader:
                go_through(loader)
        if table == "tables/features":
            with PartitionsLoader(store, **DRAWN, **OF_SETS, resident=6, hubs=0) as loader:
                for _ in range(2):  # the error stays, and the loader can be asked again
                    with pytest.raises(CorruptionError, match=victim.name):
                        go_through(loader)
            with PartitionsLoader(store, **DRAWN, **OF_SETS, resident=6, hubs=0, verify=False) as loader:
                go_through(loader)


# Beside the training.


def test_it_is_made_ahead_in_a_thread_of_its_own(
    open_: Callable[..., PartitionsLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One mini-batch ahead of the one that the loop works on, across the ends of mega-batches, too."""
    drawn_by: list[Any] = []
    sample = Drawing.sample

    def noted(*given: Any) -> Any:
        drawn_by.append(threading.current_thread())
        return sample(*given)

    monkeypatch.setattr(Drawing, "sample", noted)
    loader = open_(resident=6)
    for number, _ in enumerate(loader):
        end = time.monotonic() + 0.02
        while time.monotonic() < end and len(drawn_by) < number + 3:
            time.sleep(0.001)
        assert len(drawn_by) <= number + 2
        if number == 0:
            assert len(drawn_by) == 2, "the next is made while this one is worked on"
    assert len(set(drawn_by)) == 1
    assert threading.current_thread() not in drawn_by


def test_an_error_of_sampling_is_raised_in_the_loop(
    open_: Callable[..., PartitionsLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the mini-batches before it; asked again, the loader goes on with the one that failed."""
    whole = list(batches(open_(resident=6)))
    loader, sample, turns = open_(resident=6), Drawing.sample, count()

    def failing(*given: Any) -> Any:
        if next(turns) == 7:
            raise SourceError("planted")
        return sample(*given)

    monkeypatch.setattr(Drawing, "sample", failing)
    seen: list[Seen] = []
    with pytest.raises(SourceError, match="planted"):
        seen.extend(batches(loader))
    assert seen == whole[:7]
    assert list(batches(loader)) == whole[7:]


def test_an_error_of_loading_is_raised_in_the_loop(
    open_: Callable[..., PartitionsLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = list(batches(open_(resident=6)))
    loader, load = open_(resident=6), Loading.load

    def failing(self: Any, schedule: Any, step: Any, whole: bool) -> Any:
        if step.index == 2:
            raise SourceError("planted")
        return load(self, schedule, step, whole)

    monkeypatch.setattr(Loading, "load", failing)
    seen: list[Seen] = []
    with pytest.raises(SourceError, match="planted"):
        seen.extend(batches(loader))
    assert seen == whole[: len(seen)]
    assert 0 < len(seen) < len(whole), "the mini-batches of two mega-batches"
    monkeypatch.undo()
    assert seen + list(batches(loader)) == whole


def slowly(made: Iterator[Batch]) -> Iterator[Batch]:
    """As a loop that trains for 20 ms a mini-batch."""
    for batch in made:
        time.sleep(0.02)
        yield batch


@pytest.mark.parametrize("after", [0, 1, 12])
def test_closed_in_the_middle(
    open_: Callable[..., PartitionsLoader], path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from another thread, while the loop waits for a mega-batch that does not come: nothing hangs, no
    thread is left."""
    before = set(threading.enumerate())
    loader = open_(resident=6)
    gate = Gate(loader.sets._loading.reader)
    if after:
        gate.open()
    under_way = iter(loader)
    assert len(list(islice(under_way, after))) == after
    closing = threading.Thread(target=lambda: (time.sleep(0.05), gate.open(), loader.close()))
    closing.start()
    with pytest.raises(ClosedError, match="closed"):
        list(slowly(under_way))
    closing.join()
    assert {t for t in threading.enumerate() if "featstore" in t.name} <= before


def test_another_epoch_is_set_while_one_is_under_way(open_: Callable[..., PartitionsLoader]) -> None:
    loader = open_(resident=6)
    first = batches(loader)
    next(first)
    loader.set_epoch(2)
    with pytest.raises(ClosedError, match="an epoch has been set"):
        next(first)
    later = open_(resident=6)
    later.set_epoch(2)
    assert list(batches(loader)) == list(batches(later))


INTERRUPTED = """
import json, random, signal, sys, threading, time
import numpy as np, featstore
from featstore.loaders.mega.largest import DrawnEdges, LargestDrawn
from featstore.loaders.mega.loader import PartitionsLoader
features = np.load(sys.argv[2])
loader = PartitionsLoader(
    featstore.open(sys.argv[1]), [4, 3], batch_size=20, train="train", seed=3, resident=6, memory="64MiB"
)
expected = [batch.n_id.tolist() for batch in loader]
stop, begin, interrupted, seen = False, threading.Event(), 0, {}
def bother():
    begin.wait()
    while not stop:
        time.sleep(random.uniform(0.001, 0.02))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
thread = threading.Thread(target=bother, daemon=True)
thread.start()
def epoch():
    for batch in loader:
        state = loader.state()
        assert np.array_equal(batch.x, features[batch.n_id])
        seen[state["epoch"], state["next"], state["at"]["pass"], state["at"]["batch"]] = batch.n_id.tolist()
end = time.monotonic() + 4
def rounds():
    global interrupted, stop
    begin.set()
    while time.monotonic() < end:
        try:
            loader.set_epoch(0)
            epoch()
        except KeyboardInterrupt:
            interrupted += 1
    stop = True
    while thread.is_alive():
        time.sleep(0.01)
done = False
while not done:
    try:
        try:
            rounds()
            done = True
        except KeyboardInterrupt:
            pass
    except KeyboardInterrupt:  # while one was handled
        pass
loader.set_epoch(0)
assert [batch.n_id.tolist() for batch in loader] == expected
assert all(one in expected for one in seen.values())
loader.close()
left = [t for t in threading.enumerate() if "featstore" in t.name and "closer" not in t.name]
# (one that was interrupted in Thread.start may end before it began, and is listed for good: Python 3.11)
left = [t.name for t in left if t.is_alive()]
assert not left, left
print("interrupted" if interrupted else "never", flush=True)
"""


def test_interrupts_leave_the_loader_whole(path: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", FEATURES)
    arguments = [sys.executable, "-c", INTERRUPTED, str(path), str(tmp_path / "x.npy")]
    root = str(Path(featstore.__file__).parent.parent)
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=90, cwd=root, check=False)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr[-2000:]


@pytest.mark.parametrize("fanouts", [[4, 3], [-1], [1, -1], [20, 20, 20]])
def test_no_mini_batch_is_larger_than_the_budget_says(
    open_: Callable[..., PartitionsLoader], fanouts: list[int]
) -> None:
    loader = open_(resident=6, fanouts=fanouts, passes=2)
    places, most = loader.sets.places["features"], loader.sets.sizes.edges_max["features"]
    nodes, edges = nodes_and_edges(largest(SIZE, fanouts), places, most)
    sizes = [(len(batch.n_id), len(batch.row)) for batch in loader]
    assert max(n for n, _ in sizes) <= nodes <= places
    assert max(k for _, k in sizes) <= edges
    assert nodes_and_edges(largest(4, [3, -1]), 100, 30) == (46, 42), "4 seeds, 12 edges, then all 30"
    assert nodes_and_edges(largest(4, [3, -1]), 10, 30) == (10, 42)


def test_the_budget_has_room_for_two_mini_batches(
    open_: Callable[..., PartitionsLoader], open_sets: Callable[..., PartitionSets]
) -> None:
    drawn_, alone = open_(resident=6), open_sets(resident=6)
    places, most = drawn_.sets.places["features"], drawn_.sets.sizes.edges_max["features"]
    nodes, _ = nodes_and_edges(largest(SIZE, FANOUTS), places, most)
    more = drawn_.memory()["planned"] - alone.memory()["planned"]
    assert more > 2 * nodes * 4 * WIDTH
    assert drawn_.memory()["unused"] == drawn_.sets.memory_bytes - drawn_.memory()["planned"]
