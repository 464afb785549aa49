"""A node as a seed several times, each at a time of its own, as in RelBench's tables of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import IdError, SourceError
from featstore.reader.graphs import read_edge_ids
from featstore.sampling import batches
from featstore.sampling.neighbors import NeighborSampler
from featstore.sampling.options import SamplingOptions

NODES, EDGES, SEEDS, BATCH, LATEST = 400, 3000, 150, 32, 100
FANOUTS = [4, 3]
CITES = ("paper", "cites", "paper")


class Made:
    """A graph with times of edges, and seeds of which most stand several times."""

    def __init__(self, path: Path) -> None:
        rng = np.random.default_rng(4)
        self.edges = rng.integers(0, NODES, (2, EDGES))
        self.times = rng.integers(0, LATEST, EDGES)
        self.rows = rng.standard_normal((NODES, 3), np.float32)
        self.seeds, self.when = rng.integers(0, 20, SEEDS), rng.integers(0, LATEST, SEEDS)
        self.path = path

    def plain(self) -> featstore.Store:
        return featstore.pack(
            self.path / "plain", self.rows, graph=self.edges, edge_times=self.times, edge_ids=True
        )

    def typed(self) -> featstore.Store:
        return featstore.pack(
            self.path / "typed", {"paper": self.rows}, graph={CITES: self.edges},
            edge_times={CITES: self.times}, edge_ids=True,
        )  # fmt: skip


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def loader_of(store: featstore.Store, made: Made, mode: str = "online", **said: Any) -> featstore.Loader:
    typed = bool(store.edge_types)
    how: dict[str, Any] = {
        "seeds": ("paper", made.seeds) if typed else made.seeds, "fanouts": FANOUTS, "batch_size": BATCH,
        "memory": "32MiB", "time_attr": "times", "input_time": made.when, "mode": mode,
    }  # fmt: skip
    if mode in ("compiled", "rolling"):
        how["disk"] = "1GiB"
    return store.loader(**how | said)


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("mode", ["online", "compiled", "rolling"])
def test_each_of_the_list_comes_once_with_nothing_later(mode: str, typed: bool, made: Made) -> None:
    """And with rows, in every epoch; and mini-batches say which of the list their seeds are."""
    with made.typed() if typed else made.plain() as store, loader_of(store, made, mode) as loader:
        for _ in range(2):
            seen: list[int] = []
            for batch in loader:
                ids, x = (batch.n_id["paper"], batch.x["paper"]) if typed else (batch.n_id, batch.x)
                np.testing.assert_array_equal(x, made.rows[ids])
                places = np.asarray(batch.input_id)
                assert len(places) == batch.batch_size
                np.testing.assert_array_equal(ids[: batch.batch_size], made.seeds[places])
                trees = batch.sample.batch["paper"] if typed else batch.sample.batch
                col = batch.sample.col[CITES] if typed else batch.sample.col
                e_id = batch.sample.e_id[CITES] if typed else batch.sample.e_id
                assert (made.times[e_id] <= made.when[places][trees[col]]).all()
                seen += places.tolist()
            assert sorted(seen) == list(range(SEEDS))


@pytest.mark.parametrize("in_memory", [True, False])
def test_mini_batches_are_the_samplers(in_memory: bool, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a sampler gives for these seeds and times: over the graph in memory, and from disk."""
    if not in_memory:
        monkeypatch.setattr(batches, "bytes_in_memory", lambda *_: 2**40)
    with made.plain() as store:
        graph = store.graphs["features"]
        options = SamplingOptions(edge_times=made.times[read_edge_ids(graph, by_node=True)])
        sampler = NeighborSampler(*graph.csc(), FANOUTS, 0, options=options)
        with loader_of(store, made, seeds_in_order=True) as loader:
            for number, batch in enumerate(loader):
                part = slice(number * BATCH, (number + 1) * BATCH)
                expected = sampler.sample(made.seeds[part], number, seed_times=made.when[part])
                np.testing.assert_array_equal(batch.n_id, expected.node)
                np.testing.assert_array_equal(batch.row, expected.row)
                np.testing.assert_array_equal(batch.input_id, np.arange(SEEDS)[part])


def test_ranks_divide_the_list(made: Made) -> None:
    with made.plain() as store:
        seen: list[int] = []
        for rank in range(2):
            with loader_of(store, made, rank=rank, world_size=2, drop_last=True) as loader:
                seen += [int(one) for batch in loader for one in batch.input_id]
    assert len(seen) == len(set(seen)) == SEEDS // (2 * BATCH) * 2 * BATCH


def test_disjoint_without_times_and_what_cannot_be(made: Made) -> None:
    with made.plain() as store:
        plain: dict[str, Any] = {"time_attr": None, "input_time": None}
        with loader_of(store, made, disjoint=True, **plain) as loader:
            seen = [int(one) for batch in loader for one in batch.input_id]
        assert sorted(seen) == list(range(SEEDS))
        with pytest.raises(IdError, match=r"stand there twice: give each once.*disjoint=True"):
            loader_of(store, made, **plain)
        with pytest.raises(SourceError, match="one for each of 150 seeds"):
            loader_of(store, made, input_time=made.when[:-1])
        with loader_of(store, made, seeds=np.unique(made.seeds), disjoint=True, **plain) as loader:
            assert all(batch.sample.input_id is None for batch in loader)
    with made.typed() as store:
        with pytest.raises(IdError, match="stand there twice"):
            loader_of(store, made, **plain)
        with pytest.raises(IdError, match="mode 'partitions' excepted"):
            loader_of(store, made, "partitions")


@pytest.mark.parametrize("typed", [False, True])
def test_pygs_loader_says_which_and_when(typed: bool, made: Made) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch_geometric")
    from featstore.adapters.pyg import NeighborLoader

    with made.typed() if typed else made.plain() as store:
        nodes: Any = torch.from_numpy(made.seeds)
        with NeighborLoader(
            store, FANOUTS, ("paper", nodes) if typed else nodes, batch_size=BATCH, shuffle=True,
            time_attr="times", input_time=torch.from_numpy(made.when), memory="32MiB",
        ) as loader:  # fmt: skip
            seen: list[int] = []
            for batch in loader:
                of = batch["paper"] if typed else batch
                assert torch.equal(of.n_id[: of.batch_size], nodes[of.input_id])
                assert of.seed_time.tolist() == made.when[of.input_id].tolist()
                seen += of.input_id.tolist()
    assert sorted(seen) == list(range(SEEDS))
