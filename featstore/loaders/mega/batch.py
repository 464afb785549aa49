"""A mega-batch in memory, and the mini-batches drawn from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_count, as_flag
from featstore.base.buffers import empty_rows
from featstore.base.ids import finished
from featstore.base.native import address_of
from featstore.base.rows import IN_ORDER, move_rows
from featstore.errors import ArgumentError, ClosedError
from featstore.loaders.batch import Batch
from featstore.loaders.mega.induce import border_weights
from featstore.sampling.neighbors import NeighborSampler
from featstore.sampling.ranked import Share, share_of


@dataclass(frozen=True)
class LocalSample:
    """The graph of one mini-batch of ``m`` nodes and ``k`` edges, sampled inside a mega-batch.

    ``node``: int64 [m], node ids, the ``batch_size`` seeds first. ``row``, ``col``: int64 [k], positions in
    ``node`` of each edge's source and target; nodes and edges are grouped by hop, as their numbers in
    ``num_sampled_nodes`` and ``num_sampled_edges`` say. ``local``: int64 [m], local ids in the mega-batch.
    ``weight``: float32 [k] or None; with mean aggregation, multiply each message by it.
    """

    node: NDArray[np.int64]
    row: NDArray[np.int64]
    col: NDArray[np.int64]
    batch_size: int
    num_sampled_nodes: tuple[int, ...]
    num_sampled_edges: tuple[int, ...]
    local: NDArray[np.int64]
    weight: NDArray[np.float32] | None


@dataclass
class MegaBatch:
    """Partitions and hubs in memory, with the subgraph that they induce. It lives until the next one is asked
    for.

    Rows are in one buffer of ``len(x)`` places, the local ids: ``hubs`` hubs first, then a slot of
    ``slot_rows`` places for each partition. :attr:`places` are those in use; the others, without edges, may
    be loading already what comes next.

    Attributes:
        epoch, step, steps: which mega-batch of how many in the epoch.
        passes: how often :meth:`batches` goes through the seeds.
        x: [places, *row shape]; node: int64 or int32 [places], node ids.
        indptr, indices: CSC of incoming edges over local ids, int64 [places + 1] and int32 [edges].
        seeds: int64, local ids of the training nodes to be used now, ascending.
        partitions: int64 [n], the partitions in memory; starts, lengths: the local ids at which they begin,
            and their rows.
        hub_copies: int64, local ids of those hubs that are here as members of their partition.
        edges_stored: edges of the lists of these partitions, those lost at the border included.
        read_bytes, load_seconds, build_seconds: what making it took; wait_seconds: how long the training
            waited for it.
    """

    epoch: int
    step: int
    steps: int
    passes: int
    seed: int
    x: NDArray[Any]
    node: NDArray[Any]
    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    seeds: NDArray[np.int64]
    partitions: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    partition_count: int
    hubs: int
    hub_copies: NDArray[np.int64]
    slot_rows: int
    edges_stored: int
    partition_edges: int
    read_bytes: int
    load_seconds: float
    build_seconds: float
    wait_seconds: float = 0.0
    _start: tuple[int, int, int] = (0, 0, 0)  # pass and mini-batch to begin with, and the size of those seen
    _on_batch: Callable[[int, int, int], None] = field(default=lambda _pass, _batch, _size: None, repr=False)
    _alive: bool = field(default=True, repr=False)

    def begin_at(self, start: tuple[int, int, int], on_batch: Callable[[int, int, int], None]) -> None:
        """Where to begin, (pass, mini-batch, size of those before), and who is told the next such place with
        each mini-batch."""
        self._start, self._on_batch = start, on_batch

    def retire(self) -> None:
        """Its memory is another's now."""
        self._alive = False

    @property
    def places(self) -> NDArray[np.int64]:
        """int64, the local ids that hold a row, ascending; of a hub whose partition is here too, the hub's
        place has no edges."""
        runs = [
            np.arange(start, start + length) for start, length in zip(self.starts, self.lengths, strict=True)
        ]
        return np.sort(np.concatenate([np.arange(self.hubs), *runs]))

    @property
    def edges(self) -> int:
        """Edges of the induced subgraph, those of the hubs included."""
        return len(self.indices)

    @property
    def kept_share(self) -> float:
        """Of the edges into the partitions' nodes, the share whose source is in memory too."""
        return self.partition_edges / self.edges_stored if self.edges_stored else 1.0

    def batch_count(self, batch_size: int) -> int:
        """Mini-batches of all passes."""
        return self.passes * -(-len(self.seeds) // as_count(batch_size, "batch_size"))

    def batches(
        self, fanouts: Sequence[int], batch_size: int, *, weights: bool = False, tensors: bool = False,
        rank: int = 0, world_size: int = 1, drop_last: bool = False,
    ) -> Iterator[Batch]:  # fmt: skip
        """Mini-batches of ``batch_size`` seeds, in a new random order in each pass; every seed once a pass.

        ``fanouts``: neighbours per node and hop, -1 for all. ``weights``: weigh edges so that neighbours lost
        at the border do not bias a mean. ``tensors``: ``x`` as a torch tensor. ``rank``, ``world_size``:
        every rank has loaded the same mega-batch and takes its own of the mini-batches (algorithm 1 of
        HierBatching, lines 17 to 23), in as many steps as any other, see
        :func:`featstore.sampling.ranked.share_of`, as ``drop_last`` says. What is drawn depends on seed,
        epoch, step, pass and number alone; after a resume it begins with the first mini-batch that was not
        seen. Raises SourceError for bad fan-outs, ClosedError for a mega-batch that has been replaced.
        """
        batch_size, weights = as_count(batch_size, "batch_size"), as_flag(weights, "weights")
        if as_flag(tensors, "tensors"):
            import torch  # noqa: F401  (what makes rows a tensor finds it loaded)
        world_size = as_count(world_size, "world_size")
        rank = as_count(rank, "rank", 0, world_size - 1)
        share = partial(
            share_of, batch_size=batch_size, rank=rank, world_size=world_size,
            drop_last=as_flag(drop_last, "drop_last"),
        )  # fmt: skip
        sampler = NeighborSampler(self.indptr, self.indices, fanouts, self.seed)
        return self._batches(sampler, batch_size, share, weights, tensors)

    def _batches(
        self, sampler: NeighborSampler, batch_size: int, share: Callable[[Any], Share], weights: bool,
        tensors: bool,
    ) -> Iterator[Batch]:  # fmt: skip
        per_pass = -(-len(share(self.seeds).seeds) // batch_size)
        always = self._always() if weights else None
        first_pass, first_batch, size_before = self._start
        if first_batch and size_before != batch_size:
            raise ArgumentError(
                f"this pass was begun with mini-batches of {size_before}, it cannot go on with {batch_size}"
            )
        for pass_ in range(first_pass, self.passes):
            rng = np.random.default_rng([self.seed, self.epoch, self.step, pass_])
            order = share(rng.permutation(self.seeds)).seeds
            for number in range(first_batch if pass_ == first_pass else 0, per_pass):
                if not self._alive:
                    raise ClosedError("this mega-batch has been replaced by the next one")
                seeds = order[number * batch_size : (number + 1) * batch_size]
                batch = self._batch(sampler, seeds, pass_, number, always, tensors)
                self._on_batch(pass_ + (number + 1) // per_pass, (number + 1) % per_pass, batch_size)
                yield batch

    def _always(self) -> NDArray[np.bool_]:
        """bool [places]: the local ids that are hubs, which are in every mega-batch."""
        always = np.zeros(len(self.node), bool)
        always[: self.hubs] = True
        always[self.hub_copies] = True
        return always

    def _batch(
        self,
        sampler: NeighborSampler,
        seeds: NDArray[np.int64],
        pass_: int,
        number: int,
        always: NDArray[np.bool_] | None,
        tensors: bool,
    ) -> Batch:
        key = (self.step << 44) | (pass_ << 32) | number
        found = sampler.sample(seeds, key, epoch=self.epoch)
        row_bytes = self.x.dtype.itemsize * int(np.prod(self.x.shape[1:], dtype=np.int64))
        rows = empty_rows(len(found.node), row_bytes)
        move_rows(address_of(self.x), found.node, address_of(rows), IN_ORDER, row_bytes)
        weight = None
        if always is not None:
            weight = np.empty(len(found.row), np.float32)
            chance = max(1, len(self.partitions) - 1) / max(1, self.partition_count - 1)
            border_weights(
                found.row, found.col, found.node, self.hubs, self.slot_rows, always, chance, weight
            )
        sample = LocalSample(
            self.node[found.node].astype(np.int64), found.row, found.col, len(seeds),
            found.num_sampled_nodes, found.num_sampled_edges, found.node, weight,
        )  # fmt: skip
        x = finished(rows, (len(found.node), *self.x.shape[1:]), self.x.dtype, tensors)
        return Batch(number, sample.node, x, sample)
