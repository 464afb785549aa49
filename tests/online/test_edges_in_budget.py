"""Edges, and what else a sample holds beside ids, are in the budget of an online loader that samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import BudgetError
from featstore.loaders.online.budget import SAMPLES_EXIST, SAMPLES_UNDER_WAY
from featstore.sampling.batches import sample_batches

NODES, DEGREE, BATCH, SEEDS = 3000, 60, 40, 200
MIB = 1 << 20
PAPERS = ("paper", "cites", "paper")
WRITES = ("author", "writes", "paper")


def edges_of(seed: int, sources: int = NODES) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.integers(0, sources, NODES * DEGREE), np.repeat(np.arange(NODES), DEGREE)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("edges")


@pytest.fixture(scope="module")
def store(folder: Path) -> Iterator[Any]:
    """Rows of four bytes, and many edges."""
    rng, x = np.random.default_rng(1), np.arange(NODES, dtype=np.float32)[:, None]
    with featstore.pack(
        folder / "plain", x, graph=edges_of(0), edge_ids=True, order="ldg", partitions=4,
        edge_times=rng.integers(0, 9, NODES * DEGREE), arrays={"year": rng.integers(0, 9, NODES)},
    ) as made:  # fmt: skip
        yield made


@pytest.fixture(scope="module")
def typed(folder: Path) -> Iterator[Any]:
    rng, x = np.random.default_rng(2), np.arange(NODES, dtype=np.float32)[:, None]
    rows, authors = {"paper": x, "author": x[:1000]}, edges_of(4, 1000)
    years = {f"{name}.year": rng.integers(0, 9, len(one)) for name, one in rows.items()}
    graphs = {PAPERS: edges_of(3), WRITES: authors}
    with featstore.pack(folder / "typed", rows, graph=graphs, edge_ids=True, arrays=years) as made:
        yield made


def held_by(value: Any) -> dict[int, np.ndarray]:
    """The arrays of a sample by what they are, each once."""
    if isinstance(value, np.ndarray):
        return {id(value): value}
    if not isinstance(value, Mapping):
        value = vars(value) if hasattr(value, "__dict__") else {}
    return {key: array for part in value.values() for key, array in held_by(part).items()}


def named(train: Any, said: list[str] | None = None) -> tuple[int, Any]:
    """The memory that errors lead to, beginning with a byte, and what ``train`` gave; the errors in
    ``said``."""
    memory = 1
    for _ in range(8):
        try:
            return memory, train(memory)
        except BudgetError as error:
            assert error.given_bytes == memory < error.needed_bytes
            memory = error.needed_bytes
            if said is not None:
                said.append(str(error))
    pytest.fail("what was named is not enough")


PLENTY, LITTLE = "256MiB", "16MiB"  # a graph in memory has 32 MiB for what loads it
PLAIN = {"seeds": np.arange(SEEDS), "fanouts": (20, 10), "batch_size": BATCH}
OF_TYPES = PLAIN | {"seeds": ("paper", np.arange(SEEDS))}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "a graph in memory": ("plain", PLAIN),
    "from disk": ("plain", PLAIN | {"memory": LITTLE}),
    "times of edges, and a subgraph for each seed": (
        "plain", PLAIN | {"time_attr": "times", "input_time": np.full(SEEDS, 7)}
    ),
    "times of nodes": ("plain", PLAIN | {"time_attr": "year"}),
    "edges both ways": ("plain", PLAIN | {"subgraph_type": "bidirectional"}),
    "edges among all": ("plain", PLAIN | {"subgraph_type": "induced"}),
    "types": ("typed", OF_TYPES),
    "types, times of nodes": ("typed", OF_TYPES | {"time_attr": "year"}),
    "types, from disk": ("typed", OF_TYPES | {"memory": LITTLE}),
    "two ranks": ("plain", PLAIN | {"rank": 1, "world_size": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_what_a_sample_holds_is_counted(store: Any, typed: Any, name: str) -> None:
    of, how = WAYS[name]
    most, how = 0, {"memory": PLENTY} | how
    with {"plain": store, "typed": typed}[of].loader(mode="online", **how) as loader:
        for batch in loader:
            arrays = held_by(batch.sample)
            ids = batch.n_id.values() if isinstance(batch.n_id, dict) else [batch.n_id]
            assert all(id(one) in arrays for one in ids), "ids are the sample's own, not a copy"
            for array in arrays.values():
                whole = array.base if isinstance(array.base, np.ndarray) else array
                assert whole.nbytes <= array.nbytes + 8 * SEEDS, "it keeps no larger array alive"
            held = sum(array.nbytes for array in arrays.values()) - sum(one.nbytes for one in ids)
            edges = [one.nbytes for key in ("row", "col", "edge_id", "e_id") for one in _each(batch, key)]
            assert held >= sum(edges) > 0
            most = max(most, held)
        online = loader._mode.loader
        assert online.extraction._asked.sample_bytes == most
        shares = online.memory()
    assert shares["handed over"] >= 2 * SAMPLES_EXIST * most
    if how["memory"] == PLENTY:  # else mini-batches go through in pieces, one at a time
        assert shares[SAMPLES_UNDER_WAY] >= 3 * most


def _each(batch: Any, key: str) -> Any:
    found = getattr(batch.sample, key)
    return found.values() if isinstance(found, dict) else [found]


@pytest.mark.parametrize("typed_links", [False, True])
@pytest.mark.parametrize("negatives", [None, "binary", "triplet"])
def test_what_samples_around_links_hold_is_counted(
    store: Any, typed: Any, typed_links: bool, negatives: str | None
) -> None:
    pytest.importorskip("torch_geometric")
    from featstore.adapters.pyg_links import LinkNeighborLoader

    ends = np.random.default_rng(1).integers(0, NODES, (2, SEEDS))
    given = (PAPERS, ends) if typed_links else ends
    more = {"neg_sampling": {"mode": negatives, "amount": 2}} if negatives else {}
    with LinkNeighborLoader(
        typed if typed_links else store, [10, 5], edge_label_index=given, batch_size=BATCH, mode="online",
        memory="64MiB", **more,
    ) as loader:  # fmt: skip
        most = 0
        for batch in loader.loader:
            arrays = held_by(batch.sample)
            for name, array in arrays.items():
                whole = array.base if isinstance(array.base, np.ndarray) else array
                assert whole.nbytes <= array.nbytes + 8 * SEEDS, name
            nodes = held_by(batch.sample["n_id"])
            most = max(most, sum(one.nbytes for key, one in arrays.items() if key not in nodes))
        assert loader.loader._mode.loader.extraction._asked.sample_bytes == most > 0


@pytest.mark.parametrize("name", ["a graph in memory", "types", "edges both ways", "times of nodes"])
def test_the_memory_that_is_named_works_for_whole_epochs(store: Any, typed: Any, name: str) -> None:
    of, how = WAYS[name]
    made = {"plain": store, "typed": typed}[of]

    def train(memory: int) -> int:
        most = 0
        with made.loader(mode="online", memory=memory, **how) as loader:
            for _ in range(2):
                for batch in loader:
                    for x, ids in zip(*map(_values, (batch.x, batch.n_id)), strict=True):
                        np.testing.assert_array_equal(x[:, 0], ids)
                    arrays = [one.nbytes for one in held_by(batch.sample).values()]
                    most = max(most, sum(arrays) - sum(one.nbytes for one in _values(batch.n_id)))
        return most

    said: list[str] = []
    memory, most = named(train, said)
    assert any("of edges each, less with fewer seeds" in one for one in said)
    assert memory > 2 * SAMPLES_EXIST * most
    assert train(memory) == most, "begun anew, it is not refused"
    with pytest.raises(BudgetError):
        train(2 * SAMPLES_EXIST * most)


def _values(one: Any) -> list[Any]:
    return list(one.values()) if isinstance(one, dict) else [one]


def test_one_that_breaks_off_goes_on_with_what_was_named(store: Any) -> None:
    """The mini-batches that are passed over are counted, too."""
    how = PLAIN | {"mode": "online", "seeds_in_order": True}

    def train(memory: int) -> Any:
        with store.loader(memory=memory, **how) as loader:
            return [len(batch.sample.row) for batch in loader]

    memory, edges = named(train)
    with store.loader(memory=memory, **how) as loader:
        for _ in zip(range(3), loader, strict=False):
            pass
        state = loader.state_dict()
    with store.loader(memory=memory, **how) as loader:
        loader.load_state_dict(state)
        assert [len(batch.sample.row) for batch in loader] == edges[3:]


def test_what_is_given_is_not_counted(store: Any) -> None:
    """A list of samples is whoever's made it; a sequence that makes them when it is asked is not."""
    with sample_batches(store, np.arange(SEEDS), (20, 10), BATCH) as batches:
        for given, counted in ((list(batches), False), (batches, True)):
            with store.loader(given, mode="online", memory="64MiB") as loader:
                for _ in loader:
                    pass
                assert (loader._mode.loader.extraction._asked.sample_bytes > 0) == counted


def test_costs_name_what_the_loader_needs(store: Any) -> None:
    """About: what sampling from disk needs of a mini-batch is not looked at."""
    how = {"seeds": np.arange(SEEDS), "fanouts": (20, 10), "batch_size": BATCH}

    def train(memory: int) -> None:
        with store.loader(mode="online", memory=memory, **how) as loader:
            for _ in loader:
                pass

    costs = store.loader_costs(memory="64MiB", share=1, seconds=60, **how)
    memory, _ = named(train)
    assert 0.85 * memory < costs.modes["online"].memory_needed_bytes <= memory


PROGRAM = """
import gc, json, sys, time
import numpy as np
import featstore
from featstore.errors import BudgetError
from featstore.sampling import batches

batches._FIXED_BYTES = 0  # so that the graph is in memory however little: nothing is sampled ahead from disk

def peak():
    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM')) << 10

def through(memory, seconds=0):
    with store.loader(mode="online", memory=memory, seeds=np.arange(10 * BATCH), fanouts=(-1, -1),
                      batch_size=BATCH, **how) as loader:
        for batch in loader:
            edges = batch.edge_index
            time.sleep(seconds)  # so that all that may go ahead does
            del batch, edges
        assert memory == "200MiB" or sum(loader._mode.loader.memory().values()) <= memory

def smallest():
    memory = 1
    while True:
        try:
            through(memory)
            return memory
        except BudgetError as error:
            memory = error.needed_bytes

store, BATCH, how = featstore.open(sys.argv[1]), 1, json.loads(sys.argv[2])
through("200MiB")  # what loads code and compiles is no matter of the budget
BATCH, found = 40, {}
for name, memory in (("the least", smallest()), ("plenty", 400 << 20)):
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    through(memory, seconds=0.15)
    found[name] = peak() - before, memory
print(json.dumps(found))
"""


@pytest.mark.parametrize("how", [{}, {"device": "cpu"}], ids=["arrays", "on a device"])
def test_peak_memory_stays_within_the_budget_where_edges_are_most_of_it(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    """Some 400,000 edges a mini-batch, 13 MB, around 3,500 nodes with rows of 4 bytes."""
    if how:
        pytest.importorskip("torch")
    nodes, degree, rng = 12_000, 100, np.random.default_rng(0)
    sources = rng.integers(0, nodes, nodes * degree)
    x = np.zeros((nodes, 1), np.float32)
    graph = (np.arange(0, nodes * degree + 1, degree), sources)
    featstore.pack(tmp_path / "s", x, graph=graph, edge_ids=True).close()
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "s"), json.dumps(how)],
        capture_output=True, text=True, timeout=200, check=False,
        # what malloc keeps of what it was given back is no matter of the budget
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"},
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    for name, (peak, memory) in json.loads(out.stdout).items():
        assert peak <= memory, (name, peak / MIB, memory / MIB)
