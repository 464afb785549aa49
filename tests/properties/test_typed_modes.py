"""Typed graphs at random, through every mode and every loader with any option: rows, edges and their rows are
the source's, and no edge is later than the seed in whose tree it is."""

from __future__ import annotations

import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch_geometric")

import featstore

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch

    from featstore.adapters.pyg import LinkNeighborLoader, NeighborLoader

WRITES, CITES, REV = ("a", "writes", "p"), ("p", "cites", "p"), ("p", "rev", "a")
LATEST = 50


class World:
    """Rows, edges, times and rows of edges; ``p`` is what is trained on."""

    def __init__(self, seed: int, nodes: dict[str, int], edges: int) -> None:
        rng = np.random.default_rng(seed)
        self.nodes = nodes
        self.x = {kind: rng.standard_normal((count, 3)).astype(np.float32) for kind, count in nodes.items()}
        self.edges = {
            of: np.stack([rng.integers(0, nodes[of[0]], edges), rng.integers(0, nodes[of[2]], edges)])
            for of in (WRITES, CITES, REV)
        }
        self.times = {of: rng.integers(0, LATEST, edges) for of in self.edges}
        self.weights = {of: rng.integers(0, 3, edges).astype(np.float32) for of in self.edges}
        self.rows = rng.standard_normal((edges, 2)).astype(np.float32)  # of CITES
        self.y = rng.integers(0, 9, nodes["p"])

    def pack(self, path: Path) -> featstore.Store:
        return featstore.pack(
            path, self.x | {"p__cites__p": self.rows}, graph=self.edges, edge_ids=True, memory="64MiB",
            edge_times=self.times, edge_weights=self.weights, arrays={"p.y": self.y}, order="ldg",
            partitions=3,
        )  # fmt: skip

    def check(self, batch: Any, edge_times: bool, seed_times: Any) -> int:
        """Every row and edge of a mini-batch; how many edges there are."""
        count = 0
        for kind in self.nodes:
            np.testing.assert_array_equal(batch.x[kind], self.x[kind][batch.n_id[kind]])
        np.testing.assert_array_equal(batch.y["p"], self.y[batch.n_id["p"]])
        np.testing.assert_array_equal(batch.edge_attr[CITES], self.rows[batch.sample_e_id[CITES]])
        for of, edges in self.edges.items():
            e_id, row, col = batch.sample_e_id[of], batch.row[of], batch.col[of]
            ends = np.stack([batch.n_id[of[0]][row], batch.n_id[of[2]][col]])
            np.testing.assert_array_equal(ends, edges[:, e_id])
            if edge_times:
                tree = batch.batch[of[2]][col]
                np.testing.assert_array_equal(batch.batch[of[0]][row], tree)
                assert (self.times[of][e_id] <= seed_times[tree]).all()
            count += len(e_id)
        return count


class Seen:
    """One mini-batch of any loader under one face, as arrays."""

    def __init__(self, made: Any) -> None:
        pyg = hasattr(made, "node_types")

        def of(name: str, kinds: Any) -> Any:
            found = {k: made[k].get(name) for k in kinds} if pyg else getattr(made, name, None)
            return {k: np.asarray(one) for k, one in (found or {}).items() if one is not None}

        kinds, types = ("a", "p"), (WRITES, CITES, REV)
        self.n_id, self.x, self.y, self.batch = (of(name, kinds) for name in ("n_id", "x", "y", "batch"))
        self.sample_e_id, self.edge_attr = of("e_id", types), of("edge_attr", types)
        if pyg:
            index = of("edge_index", types)
            self.row, self.col = ({k: one[side] for k, one in index.items()} for side in (0, 1))
        else:
            self.row, self.col = of("row", types), of("col", types)


OPTIONS = [
    {}, {"replace": True}, {"disjoint": True}, {"weight_attr": "weights"}, {"time_attr": "times"},
    {"time_attr": "times", "temporal_strategy": "last"}, {"subgraph_type": "induced"},
]  # fmt: skip


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 9), nodes=st.integers(9, 60), edges=st.integers(3, 400),
    mode=st.sampled_from(["online", "compiled", "rolling", "partitions"]),
    how=st.sampled_from(["store", "nodes", "links"]), said=st.sampled_from(OPTIONS),
    fanouts=st.sampled_from([[-1], [2, 3], [3, -1]]),
)  # fmt: skip
def test_every_way_gives_the_sources(
    seed: int, nodes: int, edges: int, mode: str, how: str, said: dict[str, Any], fanouts: list[int]
) -> None:
    world = World(seed, {"a": nodes // 2, "p": nodes}, edges)
    timed, memory = "time_attr" in said, "256MiB"
    seeds = np.random.default_rng(seed).permutation(nodes)[:8]
    times = (seeds * 7) % LATEST
    with TemporaryDirectory() as folder, world.pack(Path(folder) / "s") as store:
        more: dict[str, Any] = {"memory": memory, "mode": mode, **said}
        if how == "links":
            more["mode"] = "online" if mode == "partitions" else mode  # which samples around nodes alone
            when = world.times[CITES][: min(9, edges)]
            links = (CITES, torch.from_numpy(world.edges[CITES][:, : len(when)]))
            label: dict[str, Any] = {"edge_label": np.ones(len(when))}
            label |= {"edge_label_time": torch.from_numpy(when)} if timed else {}
            made: Any = LinkNeighborLoader(store, fanouts, links, batch_size=4, **label, **more)
        elif how == "nodes":
            more |= {"input_time": torch.from_numpy(times)} if timed else {}
            made = NeighborLoader(store, fanouts, ("p", seeds), batch_size=3, shuffle=True, **more)
        else:
            more |= {"input_time": times} if timed else {}
            made = store.loader(
                seeds=("p", seeds), fanouts=fanouts, batch_size=3, attach="p.y", edge_table="p__cites__p",
                **more,
            )  # fmt: skip
        with made as loader:
            for batch in loader:
                one = Seen(batch)
                if how == "links":
                    of_trees = when[np.asarray(batch[CITES].input_id)]
                    of_trees = np.concatenate([of_trees] * 2)
                elif timed:
                    known = dict(zip(seeds.tolist(), times.tolist(), strict=True))
                    of_trees = np.array([known[one] for one in one.n_id["p"][:3].tolist() if one in known])
                else:
                    of_trees = None
                world.check(one, timed, of_trees)
