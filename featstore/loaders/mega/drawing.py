"""Mini-batches drawn from a mega-batch: sampled in its subgraph, their rows gathered from its buffer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import Outputs
from featstore.base.native import address_of
from featstore.base.rows import IN_ORDER, move_rows
from featstore.loaders.mega.induce import border_weights
from featstore.loaders.mega.partition_set import PartitionSet
from featstore.sampling.neighbors import NeighborSampler
from featstore.sampling.ranked import Share, share_of


@dataclass(frozen=True)
class LocalSample:
    """The graph of one mini-batch of ``m`` nodes and ``k`` edges, sampled inside a mega-batch.

    ``node``: int64 [m], node ids, the ``batch_size`` seeds first. ``row``, ``col``: int64 [k], positions in
    ``node`` of each edge's source and target; nodes and edges are grouped by hop, as their numbers in
    ``num_sampled_nodes`` and ``num_sampled_edges`` say. ``local``: int64 [m], local ids in the mega-batch.
    ``weight``: float32 [k] or None; with mean aggregation, multiply each message by it. ``e_id``: int64 [k],
    the user's numbers of the edges, or None.
    """

    node: NDArray[np.int64]
    row: NDArray[np.int64]
    col: NDArray[np.int64]
    batch_size: int
    num_sampled_nodes: tuple[int, ...]
    num_sampled_edges: tuple[int, ...]
    local: NDArray[np.int64]
    weight: NDArray[np.float32] | None
    e_id: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class DrawOptions:
    """How mini-batches are drawn: neighbours per node and hop, seeds of each, whether edges are weighed
    against the neighbours lost at the border, and which rank of how many this is."""

    fanouts: tuple[int, ...]
    batch_size: int
    weights: bool = False
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False

    def share(self, order: NDArray[np.int64]) -> Share:
        """This rank's of an order of seeds."""
        return share_of(order, self.batch_size, self.rank, self.world_size, self.drop_last)


class Drawing:
    """Draws the mini-batches of one mega-batch. Every seed once a pass, in a new random order; what is drawn
    depends on seed, epoch, step, pass and number alone.

    Every rank has loaded the same mega-batch and takes its own of the mini-batches (algorithm 1 of
    HierBatching, lines 17 to 23), in as many steps as any other.
    """

    def __init__(self, mega: PartitionSet, options: DrawOptions, outputs: Outputs) -> None:
        self.mega, self.options, self._outputs = mega, options, outputs
        self._sampler = NeighborSampler(
            mega.indptr, mega.indices, options.fanouts, mega.seed, edge_ids=mega.edge_ids
        )
        self.share = options.share(mega.seeds)

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
        mega, size = self.mega, self.options.batch_size
        seeds = order[number * size : (number + 1) * size]
        key = (mega.step << 44) | (pass_ << 32) | number
        found = self._sampler.sample(seeds, key, epoch=mega.epoch)
        weight = None
        if self.options.weights:
            weight = np.empty(len(found.row), np.float32)
            chance = max(1, len(mega.partitions) - 1) / max(1, mega.partition_count - 1)
            border_weights(
                found.row, found.col, found.node, mega.hubs, mega.slot_rows, self._always, chance, weight
            )
        return LocalSample(
            mega.node[found.node].astype(np.int64), found.row, found.col, len(seeds),
            found.num_sampled_nodes, found.num_sampled_edges, found.node, weight, found.e_id,
        )  # fmt: skip

    @cached_property
    def _always(self) -> NDArray[np.bool_]:
        return self.mega.always()

    def gather(self, sample: LocalSample) -> NDArray[Any]:
        """The rows of its nodes, [m, *row shape], copied."""
        x = self.mega.x
        row_bytes = x.dtype.itemsize * int(np.prod(x.shape[1:], dtype=np.int64))
        rows = self._outputs.take(len(sample.local) * row_bytes)
        move_rows(address_of(x), sample.local, address_of(rows), IN_ORDER, row_bytes)
        gathered: NDArray[Any] = rows.view(x.dtype).reshape(len(sample.local), *x.shape[1:])
        return gathered
