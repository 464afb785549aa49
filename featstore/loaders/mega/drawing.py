"""Mini-batches drawn from a mega-batch: sampled in its subgraph, their rows gathered from its buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import Outputs
from featstore.base.checks import check_range
from featstore.base.native import address_of
from featstore.base.rows import IN_ORDER, move_rows
from featstore.loaders.mega.induce import border_weights
from featstore.loaders.mega.options import DrawnWith
from featstore.loaders.mega.partition_set import PartitionSet
from featstore.loaders.mega.parts import Parts
from featstore.sampling.neighbors import NeighborSampler
from featstore.sampling.ranked import Share, share_of
from featstore.sampling.typed import TypedNeighborSampler

Local = Mapping[str, NDArray[np.int64]]


@dataclass(frozen=True)
class LocalSample:
    """The graph of one mini-batch, sampled inside a mega-batch. Of a store with types each array is a
    dictionary of them, by type of nodes or of edges; without, there are ``m`` nodes and ``k`` edges:

    ``node``: int64 [m], node ids, the ``batch_size`` seeds first. ``row``, ``col``: int64 [k], positions in
    ``node`` of each edge's source and target; nodes and edges are grouped by hop, as their numbers in
    ``num_sampled_nodes`` and ``num_sampled_edges`` say. ``local``: int64 [m], local ids in the mega-batch, by
    table in either case. ``weight``: float32 [k] or None; with mean aggregation, multiply each message by it.
    ``e_id``: int64 [k], the user's numbers of the edges, or None. ``batch``: int64 [m], the number of the
    seed whose subgraph each node is in, or None where there is one of all.
    """

    node: Any
    row: Any
    col: Any
    batch_size: int
    num_sampled_nodes: Any
    num_sampled_edges: Any
    local: Local
    weight: Any
    e_id: Any = None
    batch: Any = None

    def e_id_of(self, edge_type: Any) -> NDArray[np.int64] | None:
        """The numbers of the edges of a type, or where there are none, of all; None where they have none."""
        return self.e_id.get(edge_type) if isinstance(self.e_id, Mapping) else self.e_id


@dataclass(frozen=True)
class DrawOptions:
    """How mini-batches are drawn: neighbours per node and hop of each graph, seeds of each, whether edges are
    weighed against the neighbours lost at the border, and which rank of how many this is."""

    fanouts: Mapping[str, tuple[int, ...]]
    batch_size: int
    weights: bool = False
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False

    def share(self, order: NDArray[np.int64]) -> Share:
        """This rank's of an order of seeds."""
        return share_of(order, self.batch_size, self.rank, self.world_size, self.drop_last)


class Sampling:
    """Samples in the subgraphs of one mega-batch, for all ranks; ``seeds``: the table of the seeds."""

    def __init__(
        self, mega: PartitionSet, parts: Parts, seeds: str, options: DrawOptions, drawn_with: DrawnWith
    ) -> None:
        self.mega, self._parts, self._seeds, self._weights = mega, parts, seeds, options.weights
        self._seed_times, said, fanouts = drawn_with.seed_times, drawn_with.over(mega), options.fanouts
        self._bidirectional = said is not None and said.subgraph == "bidirectional"
        self._types: dict[str, Any] = {name: graph.edge_type for name, graph in parts.graphs.items()}
        self._sampler: NeighborSampler | TypedNeighborSampler
        if parts.typed:
            kept = {self._types[name]: one.edge_ids for name, one in mega.lists.items()}
            self._sampler = TypedNeighborSampler(
                {self._types[name]: (one.indptr, one.indices) for name, one in mega.lists.items()},
                {name: len(one.node) for name, one in mega.rows.items()},
                {self._types[name]: hops for name, hops in fanouts.items()}, mega.seed,
                options=said,
                edge_ids={of: ids for of, ids in kept.items() if ids is not None},
            )  # fmt: skip
        else:
            ((name, lists),) = mega.lists.items()
            self._sampler = NeighborSampler(
                lists.indptr, lists.indices, fanouts[name], mega.seed, edge_ids=lists.edge_ids, options=said
            )

    def sample(self, seeds: NDArray[np.int64], key: int) -> LocalSample:
        """The mini-batch around local ids of seeds."""
        found: Any
        rows, epoch, times = self.mega.rows, self.mega.epoch, self._seed_times
        of_seeds = None if times is None else times.of(rows[self._seeds].node[seeds].astype(np.int64))
        if isinstance(self._sampler, TypedNeighborSampler):
            found = self._sampler.sample(self._seeds, seeds, key, epoch=epoch, seed_times=of_seeds)
            self._check_numbers(found.e_id or {})
            none: NDArray[np.int64] = np.empty(0, np.int64)
            node = {name: one.node[found.node[name]].astype(np.int64) for name, one in rows.items()}
            others, batch = dict.fromkeys(self._parts.others, none), found.batch
            hops = (0,) * len(next(iter(found.num_sampled_nodes.values())))
            return LocalSample(
                node | others, found.row, found.col, len(seeds),
                found.num_sampled_nodes | dict.fromkeys(others, hops), found.num_sampled_edges, found.node,
                self._weights_of(found.row, found.col, found.node), found.e_id,
                None if batch is None else batch | others,
            )  # fmt: skip
        ((table, here),), (graph,) = rows.items(), self._types
        found, of = self._sampler.sample(seeds, key, epoch=epoch, seed_times=of_seeds), self._types[graph]
        local = {table: found.node}
        self._check_numbers({of: found.e_id})
        weight = self._weights_of({of: found.row}, {of: found.col}, local)
        return LocalSample(
            here.node[found.node].astype(np.int64), found.row, found.col, len(seeds),
            found.num_sampled_nodes, found.num_sampled_edges, local, None if weight is None else weight[of],
            found.e_id, found.batch,
        )  # fmt: skip

    def _check_numbers(self, e_id: Mapping[Any, NDArray[np.int64] | None]) -> None:
        """Raise FormatError for a number that no edge has; -1 is of an edge that its reverse brought."""
        for name, graph in self._parts.graphs.items():
            ids = e_id.get(self._types[name])
            if ids is not None:
                known = ids[ids != -1] if self._bidirectional else ids
                check_range(known, graph.edges, f"an edge id of {graph.where()}")

    def _weights_of(self, row: Any, col: Any, local: Local) -> dict[Any, NDArray[np.float32]] | None:
        """Weights of edges, by type."""
        if not self._weights:
            return None
        mega, weights = self.mega, {}
        chance = max(1, len(mega.partitions) - 1) / max(1, mega.partition_count - 1)
        for name, graph in self._parts.graphs.items():
            of, source, target = self._types[name], graph.source_table.name, graph.table.name
            weights[of] = np.empty(len(row[of]), np.float32)
            border_weights(
                row[of], col[of], local[source], local[target], mega.rows[source].slots,
                mega.rows[target].slots, self._always[source], chance, weights[of],
            )  # fmt: skip
        return weights

    @cached_property
    def _always(self) -> dict[str, NDArray[np.bool_]]:
        return {name: one.always() for name, one in self.mega.rows.items()}


class Drawing:
    """Draws the mini-batches of one mega-batch. Every seed once a pass, in a new random order; what is drawn
    depends on seed, epoch, step, pass and number alone.

    Every rank has loaded the same mega-batch and takes its own of the mini-batches (algorithm 1 of
    HierBatching, lines 17 to 23), in as many steps as any other. ``outputs``: by table, where rows go.
    """

    def __init__(self, sampling: Sampling, options: DrawOptions, outputs: Mapping[str, Outputs]) -> None:
        self.mega, self.options, self._outputs, self._sampling = sampling.mega, options, outputs, sampling
        self.share = options.share(self.mega.seeds)

    @property
    def per_pass(self) -> int:
        """Mini-batches of a pass."""
        return -(-len(self.share.seeds) // self.options.batch_size)

    def order(self, pass_: int) -> NDArray[np.int64]:
        """This rank's seeds of a pass, in the order of their mini-batches, int64 local ids."""
        rng = np.random.default_rng([self.mega.seed, self.mega.epoch, self.mega.step, pass_])
        return self.options.share(rng.permutation(self.mega.seeds)).seeds

    def sample(self, order: NDArray[np.int64], pass_: int, number: int) -> LocalSample:
        """Sample a mini-batch."""
        size = self.options.batch_size
        seeds = order[number * size : (number + 1) * size]
        return self._sampling.sample(seeds, (self.mega.step << 44) | (pass_ << 32) | number)

    def gather(self, sample: LocalSample) -> dict[str, NDArray[Any]]:
        """The rows of its nodes, [m, *row shape] by table, copied."""
        gathered = {}
        for name, outputs in self._outputs.items():
            x, local = self.mega.rows[name].x, sample.local[name]
            assert x is not None
            row_bytes = x.dtype.itemsize * int(np.prod(x.shape[1:], dtype=np.int64))
            rows = outputs.take(len(local) * row_bytes)
            move_rows(address_of(x), local, address_of(rows), IN_ORDER, row_bytes)
            gathered[name] = rows.view(x.dtype).reshape(len(local), *x.shape[1:])
        return gathered
