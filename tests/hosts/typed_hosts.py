"""What hosts do that are processes of their own and train on a store with edge types."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from mode_hosts import join

import featstore
from featstore.errors import ArgumentError, SourceError
from featstore.sampling.options import SamplingOptions
from featstore.sampling.typed_store import TypedInMemory

WRITES, CITES, IN, HAS = (
    ("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "in", "venue"),
    ("venue", "has", "paper"),
)  # fmt: skip
NODES = {"paper": 300, "author": 130, "venue": 9}
SEEDS = np.arange(1, 300, 3)
FANOUTS = (4, 3)
GIVEN: dict[str, Any] = {"seeds": ("paper", SEEDS), "fanouts": FANOUTS, "batch_size": 20, "seed": 3}


class Source:
    """What is packed: two communities of papers, authors and venues, these without features."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        self.edges = {}
        for of, count in {WRITES: 700, CITES: 1500, IN: 300, HAS: 300}.items():
            targets = rng.integers(0, NODES[of[2]], count)
            near = (rng.random(count) + 2 * targets // NODES[of[2]]) / 2 * NODES[of[0]]
            far = rng.integers(0, NODES[of[0]], count)
            self.edges[of] = np.stack([np.where(rng.random(count) < 0.8, near, far).astype(int), targets])
        self.rows = {
            "paper": rng.standard_normal((300, 24)).astype(np.float32),
            "author": rng.integers(0, 99, (130, 3), dtype=np.int16),
        }
        self.edge_rows = rng.standard_normal((700, 5))
        self.labels = rng.integers(0, 7, 300)
        self.weights = {CITES: (rng.random(1500) * (rng.random(1500) < 0.6)).astype(np.float32)}
        self.when = rng.integers(0, 50, 300)
        self.times = {WRITES: rng.integers(0, 50, 700), CITES: rng.integers(0, 50, 1500)}

    def pack(self, path: Path) -> featstore.Store:
        tables: dict[str, Any] = {**self.rows, "venue": 9, "author__writes__paper": self.edge_rows}
        arrays = {
            "paper.y": self.labels,
            "paper.train": np.isin(np.arange(300), SEEDS),
            "paper.when": self.when,
        }
        return featstore.pack(
            path, tables, graph=self.edges, arrays=arrays, edge_ids=True, memory="64MiB", hubs=0.1,
            edge_weights=self.weights, edge_times=self.times,
        )  # fmt: skip

    def check(self, batch: Any) -> None:
        """Rows, edges, numbers of edges and arrays are the source's."""
        assert set(batch.x) == {"paper", "author"}
        for name, rows in self.rows.items():
            found = np.asarray(batch.x[name])
            assert found.dtype == rows.dtype
            assert found.tobytes() == rows[batch.n_id[name]].tobytes()
        for of, edges in self.edges.items():
            row, col = np.asarray(batch.edge_index[of])
            found = np.stack([batch.n_id[of[0]][row], batch.n_id[of[2]][col]])
            assert (found == edges[:, batch.e_id[of]]).all()
        assert (np.asarray(batch.edge_attr[WRITES]) == self.edge_rows[batch.e_id[WRITES]]).all()
        assert (batch.y["paper"] == self.labels[batch.n_id["paper"]]).all()


def same(batch: Any, wanted: Any) -> None:
    """A mini-batch is what a sampler of the whole store makes."""
    for name, ids in wanted.node.items():
        assert np.array_equal(batch.n_id[name], ids)
    for of in wanted.row:
        assert np.array_equal(batch.edge_index[of], [wanted.row[of], wanted.col[of]])
        assert np.array_equal(batch.e_id[of], wanted.e_id[of])


def be_typed_host(rank: int, hosts: int, folder: str) -> None:
    """Train in every mode, with all there is of halos and samplers; write down the seeds that came."""
    if hosts > 1:
        join(rank, hosts, folder, f"typed{hosts}")
    source, root = Source(), Path(folder)
    with (
        featstore.open(root / "s") as whole,
        featstore.open_split(root / f"parts{hosts}", memory="16MiB", timeout_seconds=60) as store,
    ):
        assert store.node_types == whole.node_types
        assert store.edge_types == whole.edge_types
        assert list(store.featureless) == ["venue"]
        own = store.owners["paper"].hosts == store.place.host
        sampler = TypedInMemory(whole, "paper", FANOUTS, 3)
        told: dict[str, Any] = {}
        for what, more in ways(hosts).items():
            given = {**GIVEN, "memory": "48MiB", "attach": "paper.y", "edge_table": "author__writes__paper"}
            with store.loader(**given | more) as loader:
                seen, steps = [], 0
                for epoch in range(2 if what in ("online", "rolling") else 1):
                    for step, batch in enumerate(loader):
                        source.check(batch)
                        seeds = batch.n_id["paper"][: batch.batch_size]
                        assert own[seeds].all()
                        same(batch, sampler.sample(seeds, step, epoch=epoch))
                        seen.extend(seeds.tolist())
                        steps += 1
                report = loader.report()
                told[what] = {"seen": seen, "steps": steps, "remote": report.remote_rows}
        others(store, whole, source)
    (root / f"told{hosts}.{rank}.json").write_text(json.dumps(told))
    if hosts > 1:
        dist.destroy_process_group()


def ways(hosts: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {mode: {"mode": mode} for mode in ("online", "compiled", "rolling")}
    if hosts == 2:
        found |= {
            "buffer": {"halo": featstore.Buffer("s3-fifo", "200KiB")},
            "massivegnn": {"halo": featstore.MassiveGNN(0.25, delta=2)},
            "ahead": {"halo": "40KiB"},
        }
    return found


def others(store: Any, whole: Any, source: Source) -> None:
    """Weights and times that graphs keep; PyG's loop; seeds of nodes without features; what is refused."""
    given = {**GIVEN, "memory": "64MiB"}
    with store.loader(**given, mode="online", weight_attr="weights", replace=True) as loader:
        weights = {CITES: whole.graphs["paper__cites__paper"].weights()}
        options = SamplingOptions(weights=weights, replace=True)
        weighted = TypedInMemory(whole, "paper", FANOUTS, 3, options=options)
        for step, batch in enumerate(loader):
            same(batch, weighted.sample(batch.n_id["paper"][: batch.batch_size], step))
    times = np.full(len(SEEDS), 25)
    with store.loader(**given, mode="online", time_attr="times", input_time=times) as loader:
        for batch in loader:
            for of, values in source.times.items():
                assert (values[batch.e_id[of]] <= 25).all()
    listed, when = np.resize(SEEDS, 170), np.arange(170) * 7 % 50  # most stand twice, at other times
    with store.loader(
        **{**given, "seeds": ("paper", listed)},
        mode="online",
        time_attr="times",
        input_time=when,
        halo="40KiB",
    ) as loader:
        seen: list[int] = []
        for batch in loader:
            np.testing.assert_array_equal(batch.n_id["paper"][: batch.batch_size], listed[batch.input_id])
            assert (batch.x["paper"] == source.rows["paper"][batch.n_id["paper"]]).all()
            for of, values in source.times.items():
                trees = batch.sample.batch[of[2]][batch.sample.col[of]]
                assert (values[batch.e_id[of]] <= when[batch.input_id][trees]).all()
            seen += batch.input_id.tolist()
        own = np.flatnonzero(store.owners["paper"].hosts[listed] == store.place.host)
        assert set(seen) == set(own.tolist())
    if store.place.hosts == 1:
        with store.loader(**{**given, "seeds": ("venue", None)}, mode="online") as loader:
            (batch,) = loader
            assert sorted(batch.n_id["venue"][: batch.batch_size]) == list(range(9))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from featstore.adapters.pyg import NeighborLoader
        with NeighborLoader(
            store, num_neighbors=list(FANOUTS), input_nodes=("paper", SEEDS), batch_size=50, memory="48MiB"
        ) as loader:
            for data in loader:
                assert (data["paper"].x.numpy() == source.rows["paper"][data["paper"].n_id]).all()
                assert (data["paper"].y.numpy() == source.labels[data["paper"].n_id]).all()
    inside_partitions(store, source, given)


def inside_partitions(store: Any, source: Source, given: dict[str, Any]) -> None:
    """In mode partitions: rows are the source's, of this host alone; every seed of this host's comes; of a
    seed come all edges of the source from nodes of this host, no other, and each once."""
    given = {**given, "mode": "partitions", "attach": "paper.y"}
    own = {name: one.hosts == store.place.host for name, one in store.owners.items()}
    into = {
        of: np.bincount(edges[1][own[of[0]][edges[0]] & own[of[2]][edges[1]]], minlength=NODES[of[2]])
        for of, edges in source.edges.items()
    }
    there = {of: Counter(map(tuple, edges.T.tolist())) for of, edges in source.edges.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*have no e_id where rows are on several hosts")
        loader = store.loader(**{**given, "fanouts": (-1, 3)})
    with loader:
        seen: list[int] = []
        for batch in loader:
            for name, rows in source.rows.items():
                assert np.asarray(batch.x[name]).tobytes() == rows[batch.n_id[name]].tobytes()
            assert (batch.y["paper"] == source.labels[batch.n_id["paper"]]).all()
            assert all(own[name][ids].all() for name, ids in batch.n_id.items())
            seeds = batch.n_id["paper"][: batch.batch_size]
            for of in source.edges:
                row, col = np.asarray(batch.edge_index[of])
                sources, targets = batch.n_id[of[0]][row], batch.n_id[of[2]][col]
                found = Counter(zip(sources.tolist(), targets.tolist(), strict=True))
                assert found <= there[of]
                if of[2] == "paper":
                    degrees = np.bincount(col, minlength=len(batch.n_id["paper"]))[: len(seeds)]
                    assert (degrees == into[of][seeds]).all(), of
            seen.extend(seeds.tolist())
        assert set(seen) == set(SEEDS[own["paper"][SEEDS]].tolist())
        kept_share = loader.report().kept_share
        assert 0 < kept_share < 1 if store.place.hosts > 1 else kept_share == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*have no e_id where rows are on several hosts")
        drawn_otherwise(store, source, {**given, "fanouts": (-1, 3)}, own)
        refused(store, given, own)


def refused(store: Any, given: dict[str, Any], own: dict[str, Any]) -> None:
    for more, words in (
        ({"weight_attr": "y"}, "the store has no array TYPE.y of edges"),
        ({"time_attr": "times"}, "needs the times of the seeds"),
        ({"edge_table": "author__writes__paper"}, "is read by e_id"),
        ({"seeds": ("paper", SEEDS[~own["paper"][SEEDS]])}, "owns none of the"),
    ):
        if store.place.hosts == 1 and "seeds" in more:
            continue
        try:
            store.loader(**given | more)
        except (ArgumentError, SourceError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"{more} was not refused")


def drawn_otherwise(store: Any, source: Source, given: dict[str, Any], own: dict[str, Any]) -> None:
    """In mode partitions too: of a seed come all edges with a weight, or of its time or before, and no
    others; nodes that are later than the seed do not."""
    seeds_of_host = set(SEEDS[own["paper"][SEEDS]].tolist())
    here = own["paper"][source.edges[CITES]].all(0)
    with store.loader(**given, weight_attr="weights") as loader:
        heavy = source.edges[CITES][:, here & (source.weights[CITES] > 0)]
        seen = all_drawn(loader, lambda _: heavy)
    assert seen == seeds_of_host
    when = 10 + SEEDS % 30
    time_of = dict(zip(SEEDS.tolist(), when.tolist(), strict=True))

    def early(seed: int) -> Any:
        return source.edges[CITES][:, here & (source.times[CITES] <= time_of[seed])]

    with store.loader(**given, time_attr="times", input_time=when) as loader:
        assert all_drawn(loader, early) == seeds_of_host
    with store.loader(**given, time_attr="when", input_time=when) as loader:
        seen = set()
        for batch in loader:
            ids = batch.n_id["paper"]
            until = np.array([time_of[seed] for seed in ids[: batch.batch_size].tolist()])
            assert (
                source.when[ids[batch.batch_size :]] <= until[batch.batch["paper"]][batch.batch_size :]
            ).all()
            seen |= set(ids[: batch.batch_size].tolist())
            assert len(ids) > batch.batch_size
        assert seen == seeds_of_host


def all_drawn(loader: Any, edges_of: Any) -> set[int]:
    """The seeds that came, of which each has come with exactly its edges of those of ``edges_of`` it."""
    seen: set[int] = set()
    for batch in loader:
        ids, (row, col) = batch.n_id["paper"], np.asarray(batch.edge_index[CITES])
        seeds = ids[: batch.batch_size].tolist()
        for place, seed in enumerate(seeds):
            edges = edges_of(seed)
            assert sorted(ids[row[col == place]]) == sorted(edges[0][edges[1] == seed]), seed
        seen |= set(seeds)
    return seen
