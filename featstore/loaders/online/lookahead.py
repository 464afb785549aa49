"""Mini-batches of a host are sampled ahead, beside those that train, for which rows of other hosts they want
(:mod:`featstore.hosts.ahead`); nothing of them is kept but these ids. A list of mini-batches is looked at in
the same way.

One mini-batch ahead is sampled for each that is sampled to train, so it costs the sampler's time twice. The
steps go on from epoch to epoch. An epoch that does not follow on the one before begins anew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.errors import ArgumentError
from featstore.hosts.ahead import Ahead
from featstore.loaders.divided import GivenShare
from featstore.loaders.prefetch import Sampler, epoch_of
from featstore.sampling.batches import RankedBatches
from featstore.sampling.minibatch import split
from featstore.storage.relations import graph_of

if TYPE_CHECKING:
    from featstore.hosts.split_store import WholeStore

_INSTEAD = "give featstore.Buffer(memory=) or featstore.MassiveGNN()"


def check_known_ahead(store: WholeStore, batches: Sampler | None, of_types: bool) -> None:
    """Raise ArgumentError where it is not known what mini-batches will want: those of the store's own
    sampling (None) are, and a list of them, over one table."""
    if batches is not None and not isinstance(batches, Sequence):
        raise ArgumentError(
            "halo= as a size is for mini-batches that are known beforehand: those that the store samples "
            f"(seeds=), and a list of them; {_INSTEAD} for others"
        )
    if of_types or (batches is not None and len(store.tables) > 1):
        raise ArgumentError(
            f"halo= as a size looks ahead for one type of nodes, not for several: {_INSTEAD}, which keep "
            "rows of each"
        )


class Lookahead:
    """Tells ``ahead``, of ``memory_bytes``, what comes. ``share``: this rank's mini-batches, of which
    ``trained`` are made, with the rows of edges as well, or nothing more. ``graph``: which the store samples
    from. ``nodes``: finds the node ids of mini-batches that were given."""

    def __init__(
        self, store: WholeStore, share: RankedBatches | GivenShare, trained: Sampler, memory_bytes: int,
        graph: str | None, nodes: Callable[[Any], Any] | None,
    ) -> None:  # fmt: skip
        given = isinstance(share, GivenShare)
        table = next(iter(store.tables.values())) if given else graph_of(store, graph).table
        self.ahead = Ahead(store.table(table.name), memory_bytes)
        self._share, self._trained, self._nodes = share, trained, nodes
        self._owners = store.owners[table.name]
        self._next_epoch = -1  # the one that would follow
        self._begins: dict[int, int] = {}  # the first step of an epoch
        self._steps: Iterator[NDArray[np.int64]] = iter(())

    def epoch(self, number: int) -> Iterator[Any]:
        """The mini-batches to train on, each after those ahead of it have been looked at."""
        uses = self.ahead.uses
        if number != self._next_epoch:
            uses.restart()
            self._begins, self._steps = {}, self._wanted(number)
        self._next_epoch = -1
        step = self._begins.get(number, 0)
        for batch in epoch_of(self._trained, number):
            while uses.added < step + uses.wanted_ahead:
                uses.add(next(self._steps))
            yield batch
            step += 1
        self._next_epoch = number + 1
        self._begins.pop(number - 1, None)

    def _wanted(self, epoch: int) -> Iterator[NDArray[np.int64]]:
        """Nodes of other hosts that each mini-batch wants, from this epoch on."""
        share = copy.copy(self._share)  # which goes from epoch to epoch by itself
        while True:
            self._begins[epoch] = self.ahead.uses.added
            for nodes in self._nodes_of(share, epoch):
                yield nodes[self._owners.own_and_others(nodes)[1]]
            epoch += 1

    def _nodes_of(self, share: RankedBatches | GivenShare, epoch: int) -> Iterator[NDArray[np.int64]]:
        """Nodes of each mini-batch of an epoch, all different."""
        if isinstance(share, GivenShare):
            for batch in share.epoch(epoch):
                yield from (np.unique(ids) for ids in split(batch, self._nodes)[0].values())
            return
        share.set_epoch(epoch)
        for index in range(len(share)):
            yield share[index].node

    def begin(self, epoch: int, index: int) -> None:
        """The rows that are asked for from now on are of this mini-batch."""
        if epoch in self._begins:
            self.ahead.begin(self._begins[epoch] + index)
