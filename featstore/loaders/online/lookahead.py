"""Mini-batches of a host are sampled ahead, beside those that train, for which rows of other hosts they want
(:mod:`featstore.hosts.ahead`); nothing of them is kept but these ids.

One mini-batch ahead is sampled for each that is sampled to train, so it costs the sampler's time twice. The
steps go on from epoch to epoch. An epoch that does not follow on the one before begins anew.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.hosts.ahead import Ahead
from featstore.loaders.prefetch import Sampler, epoch_of

if TYPE_CHECKING:
    from featstore.hosts.owners import Owners
    from featstore.sampling.batches import RankedBatches


class Lookahead:
    """Tells ``ahead`` what comes. ``sampled``: the store's mini-batches, of which ``trained`` are made, with
    the rows of edges as well, or nothing more. ``owners``: of the nodes."""

    def __init__(self, ahead: Ahead, sampled: RankedBatches, trained: Sampler, owners: Owners) -> None:
        self._ahead, self._trained, self._owners = ahead, trained, owners
        self._sampled = copy.copy(sampled)  # which goes from epoch to epoch by itself
        self._next_epoch = -1  # the one that would follow
        self._begins: dict[int, int] = {}  # the first step of an epoch
        self._steps: Iterator[NDArray[np.int64]] = iter(())

    def epoch(self, number: int) -> Iterator[Any]:
        """The mini-batches to train on, each after those ahead of it have been looked at."""
        uses = self._ahead.uses
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
        while True:
            self._begins[epoch] = self._ahead.uses.added
            self._sampled.set_epoch(epoch)
            for index in range(len(self._sampled)):
                nodes = self._sampled[index].node
                yield nodes[self._owners.own_and_others(nodes)[1]]
            epoch += 1

    def begin(self, epoch: int, index: int) -> None:
        """The rows that are asked for from now on are of this mini-batch."""
        if epoch in self._begins:
            self._ahead.begin(self._begins[epoch] + index)
