"""The smallest memory of each way to train: what a BudgetError names works, and a good deal less does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import BudgetError

ROWS, BATCH, ROW_BYTES = 6000, 2000, 4096


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    x = np.zeros((ROWS, ROW_BYTES // 4), np.float32)
    x[:, 0] = np.arange(ROWS)
    x[:, -1] = -x[:, 0]
    sources = np.random.default_rng(0).integers(0, ROWS, ROWS * 4)
    graph = (np.arange(0, ROWS * 4 + 1, 4), sources)
    path = tmp_path_factory.mktemp("smallest") / "s"
    with featstore.pack(path, x, graph=graph, order="ldg", partitions=16) as made:
        yield made


def given(epoch: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(epoch)
    for _ in range(4):
        yield rng.permutation(ROWS)[:BATCH]


SEEDS = {"seeds": np.arange(ROWS), "fanouts": (2,), "batch_size": 1000}
WAYS: dict[str, dict[str, Any]] = {
    "online": {"batches": given, "mode": "online"},
    "compiled": {"batches": given, "mode": "compiled", "name": "c"},
    "rolling": {"batches": given, "mode": "rolling", "name": "r"},
    "partitions": {"mode": "partitions", "hubs": 0, **SEEDS},
    "online, sampled": {"mode": "online", **SEEDS},
    "compiled, sampled": {"mode": "compiled", "name": "s", **SEEDS},
    "rolling, sampled": {"mode": "rolling", "name": "rs", **SEEDS},
    "online, the second of two ranks": {"mode": "online", **SEEDS, "rank": 1, "world_size": 2},
    "online, on a device": {"batches": given, "mode": "online", "device": "cpu"},
}


def largest(store: Any, memory: int, way: dict[str, Any]) -> int:
    """Go through an epoch, and a bit; bytes of the largest mini-batch."""
    found, steps = 0, 0
    with store.loader(memory=memory, **way) as loader:
        for _ in range(2):
            for batch in loader:
                ids, x = np.asarray(batch.n_id), np.asarray(batch.x)
                np.testing.assert_array_equal(x[:, 0], ids)
                np.testing.assert_array_equal(x[:, -1], -ids.astype(np.float32))
                found, steps = max(found, x.nbytes), steps + 1
    assert steps >= 6
    return found


def memory_named(train: Callable[[int], Any]) -> tuple[int, int, Any]:
    """The memory that errors lead to, beginning with a byte; how many errors; and what ``train`` gave."""
    memory = 1
    for named in range(6):
        try:
            return memory, named, train(memory)
        except BudgetError as error:
            assert error.given_bytes == memory < error.needed_bytes, "it is of all the memory"
            memory = error.needed_bytes
    pytest.fail("what was named is not enough")


@pytest.mark.parametrize("name", WAYS)
def test_the_memory_that_is_named_works_and_much_less_does_not(store: Any, name: str) -> None:
    way = WAYS[name]
    if "device" in way:
        pytest.importorskip("torch")
    memory, named, rows_bytes = memory_named(lambda memory: largest(store, memory, way))
    # Mini-batches that are given are of one size: the first error knows. Those that are sampled grow.
    assert named == 1 or (named == 2 and ("sampled" in name or "ranks" in name))
    with pytest.raises(BudgetError):
        largest(store, int(0.95 * memory), way)
    if "partitions" not in name:  # beside mini-batches what does not depend on them: the reader 3.6 MiB,
        beside = 5 + 4 * ("rolling" in name) + 4 * (named == 2)  # preparing 4.3, the sampler 2.7
        assert memory < 2.1 * rows_bytes + beside * 2**20


LARGE = {"compiled": {"disk": "1GiB"}, "compiled, rows left in the store": {"disk": "9MiB"}, "rolling": {}}


@pytest.mark.parametrize("name", LARGE)
def test_what_reads_rows_of_a_mebibyte_is_counted_in_too(pack: Any, tmp_path: Path, name: str) -> None:
    """A reader of such rows needs more than the share that it has of other budgets."""
    random = np.random.default_rng(0)
    x = random.standard_normal((40, 2**18)).astype(np.float32)
    batches = [random.permutation(40)[:5] for _ in range(8)]
    how = {"mode": name.split(",")[0], "name": "large", **LARGE[name]}
    with pack(tmp_path / "s", x) as store:

        def train(memory: int) -> None:
            with store.loader(batches, memory=memory, **how) as loader:
                for batch, ids in zip(loader, batches, strict=False):
                    np.testing.assert_array_equal(batch.x, x[ids])

        memory, named, _ = memory_named(train)
    assert named <= 2, "to hold mini-batches, to decide and pack"
    assert memory < 60 * 2**20


MANY = 600_000  # nodes: offsets and maps of 16 bytes each, 9.2 MiB, are most of the memory


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path, sources = tmp_path_factory.mktemp("many") / "s", np.random.default_rng(0).integers(0, MANY, MANY)
    x = np.arange(2 * MANY, dtype=np.float32).reshape(MANY, 2)
    graph = (np.arange(MANY + 1), sources)
    with featstore.pack(path, x, graph=graph, order="ldg", partitions=16) as made:
        yield made


@pytest.mark.parametrize(
    ("mode", "batch_size", "beside"),
    # compiling takes 24 bytes a row; of 40,000 seeds scratch, rows and 80,000 edges are far more than of 50
    [("online", 50, 10), ("online", 40_000, 55), ("compiled", 50, 22), ("rolling", 50, 26)],
)
def test_a_sampler_of_many_nodes_has_more_than_a_third(
    many: Any, mode: str, batch_size: int, beside: int
) -> None:
    """It was refused below three times of what it needs."""
    seeds = np.arange(3 * batch_size)
    how: dict[str, Any] = {"seeds": seeds, "fanouts": (2, 2), "batch_size": batch_size, "mode": mode}
    how |= {} if mode == "online" else {"name": mode}

    def train(memory: int) -> None:
        with many.loader(memory=memory, **how) as loader:
            for batch in loader:
                np.testing.assert_array_equal(batch.x[:, 0], 2 * np.asarray(batch.n_id, np.float32))

    memory, named, _ = memory_named(train)
    assert named <= 4
    assert 16 * MANY < memory < 16 * MANY + beside * 2**20
    with pytest.raises(BudgetError):
        many.loader(memory=16 * MANY, **how).close()


@pytest.fixture(scope="module")
def many_of_types(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Papers that cite others, and few authors of papers."""
    path, random = tmp_path_factory.mktemp("types") / "s", np.random.default_rng(0)
    authors = 1000
    x = {
        "paper": np.arange(2 * MANY, dtype=np.float32).reshape(MANY, 2),
        "author": np.arange(2 * authors, dtype=np.float32).reshape(authors, 2),
    }
    graphs = {
        ("paper", "cites", "paper"): (np.arange(MANY + 1), random.integers(0, MANY, MANY)),
        ("author", "writes", "paper"): (np.arange(MANY + 1), random.integers(0, authors, MANY)),
    }
    with featstore.pack(path, x, graph=graphs, order="ldg", partitions=16) as made:
        yield made


@pytest.mark.parametrize(("batch_size", "beside"), [(50, 12), (40_000, 70)])
def test_a_sampler_of_many_nodes_of_types_too(many_of_types: Any, batch_size: int, beside: int) -> None:
    seeds = ("paper", np.arange(3 * batch_size))
    how: dict[str, Any] = {"seeds": seeds, "fanouts": (2, 2), "batch_size": batch_size, "mode": "online"}

    def train(memory: int) -> None:
        with many_of_types.loader(memory=memory, **how) as loader:
            for batch in loader:
                for kind in ("paper", "author"):
                    ids = np.asarray(batch.n_id[kind], np.float32)
                    np.testing.assert_array_equal(batch.x[kind][:, 0], 2 * ids)

    memory, named, _ = memory_named(train)
    assert named <= 4
    assert 24 * MANY < memory < 24 * MANY + beside * 2**20, "offsets of two relations and maps of papers"
    with pytest.raises(BudgetError):
        many_of_types.loader(memory=24 * MANY, **how).close()


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize(("batch_size", "beside"), [(50, 12), (20_000, 70)])
def test_and_a_sampler_around_links(
    many: Any, many_of_types: Any, typed: bool, batch_size: int, beside: int
) -> None:
    """It was refused below three times of what it needs, and errors of its epochs named its share."""
    pytest.importorskip("torch_geometric")
    from featstore.adapters.pyg_links import LinkNeighborLoader

    ends = np.random.default_rng(1).integers(0, MANY, (2, 3 * batch_size))
    store, held = (many_of_types, 24 * MANY) if typed else (many, 16 * MANY)
    links = (("paper", "cites", "paper"), ends) if typed else ends
    options = {"edge_label_index": links, "batch_size": batch_size, "mode": "online"}

    def train(memory: int) -> None:
        with LinkNeighborLoader(store, [2, 2], memory=memory, **options) as loader:
            for batch in loader:
                of = batch["paper"] if typed else batch
                np.testing.assert_array_equal(of.x[:, 0].numpy(), 2 * of.n_id.numpy().astype(np.float32))

    memory, named, _ = memory_named(train)
    assert named <= 4
    assert held < memory < held + beside * 2**20
    with pytest.raises(BudgetError):
        LinkNeighborLoader(store, [2, 2], memory=held, **options).close()
