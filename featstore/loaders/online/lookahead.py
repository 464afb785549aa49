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

from featstore.arguments import shown
from featstore.errors import ArgumentError
from featstore.hosts.ahead import Ahead
from featstore.hosts.massivegnn import halo_ids_of
from featstore.loaders.divided import GivenShare
from featstore.loaders.prefetch import Sampler, epoch_of, parts_of
from featstore.sampling.batches import RankedBatches, SampledBatches
from featstore.sampling.link_batches import LinkBatches
from featstore.sampling.minibatch import split, table_of
from featstore.storage.relations import graph_of
from featstore.storage.store import Table

if TYPE_CHECKING:
    from featstore.hosts.split_store import WholeStore


def check_known_ahead(batches: Sampler | None) -> None:
    """Raise ArgumentError where it is not known what mini-batches will want: those of the store's own
    sampling (None) are, and a list of them."""
    if batches is not None and not isinstance(batches, Sequence):
        raise ArgumentError(
            "halo= as a size is for mini-batches that are known beforehand: those that the store samples "
            "(seeds=), and a list of them; give featstore.Buffer(memory=) or featstore.MassiveGNN() for "
            "others"
        )
    if batches is None or isinstance(batches, LinkBatches | SampledBatches):
        return
    told = [part for part in parts_of(batches) if callable(getattr(part, "set_epoch", None))]
    if told:
        raise ArgumentError(
            f"halo= as a size looks at mini-batches ahead, also of the next epoch, and {shown(told[0])} has "
            "set_epoch(), which says for all of them which epoch it is: give a list that stays, or "
            "featstore.Buffer(memory=) or featstore.MassiveGNN()"
        )


def tables_looked_at(store: WholeStore, sampled: bool, of_types: bool, graph: str | None) -> list[Table]:
    """Tables whose rows are wanted by ids of nodes: of all types that the store samples, around links too,
    and that have features, of the graph that it samples from, or all, which lists of mini-batches may
    name."""
    if of_types:
        return [store.table(name) for name in store.node_types if name not in store.featureless]
    return [store.table(graph_of(store, graph).table.name)] if sampled else list(store.tables.values())


class Lookahead:
    """Tells ``ahead``, of ``memory_bytes``, what comes. ``share``: this rank's mini-batches, of which
    ``trained`` are made, with the rows of edges as well, or nothing more. ``tables``: those of the nodes that
    are sampled, or of lists. ``nodes``: finds the node ids of mini-batches that were given."""

    def __init__(
        self, store: WholeStore, share: RankedBatches | GivenShare, trained: Sampler, memory_bytes: int,
        tables: Sequence[Table], nodes: Callable[[Any], Any] | None,
    ) -> None:  # fmt: skip
        weights = [_remote_bytes(store, table) for table in tables] if len(tables) > 1 else None
        self.ahead = Ahead(tables, memory_bytes, weights)
        self._store, self._share, self._trained, self._nodes = store, share, trained, nodes
        self._next_epoch = -1  # the one that would follow
        self._begins: dict[int, int] = {}  # the first step of an epoch
        self._steps: Iterator[dict[str, NDArray[np.int64]]] = iter(())

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
                self.ahead.add(next(self._steps))
            yield batch
            step += 1
        self._next_epoch = number + 1
        self._begins.pop(number - 1, None)

    def _wanted(self, epoch: int) -> Iterator[dict[str, NDArray[np.int64]]]:
        """Nodes of other hosts that each mini-batch wants, from this epoch on."""
        share = self._share  # of which another one goes from epoch to epoch by itself
        share = share.apart() if isinstance(share, GivenShare) else copy.copy(share)
        none = np.empty(0, np.int64)
        while True:
            self._begins[epoch] = self.ahead.uses.added
            for nodes in self._nodes_of(share, epoch):
                wanted = {name: nodes.get(name, none) for name in self.ahead.tables}
                yield {n: ids[self._store.owners[n].own_and_others(ids)[1]] for n, ids in wanted.items()}
            epoch += 1

    def _nodes_of(
        self, share: RankedBatches | GivenShare, epoch: int
    ) -> Iterator[dict[str, NDArray[np.int64]]]:
        """Nodes of each mini-batch of an epoch by table, all different."""
        if isinstance(share, GivenShare):
            for batch in share.epoch(epoch):
                found = split(batch, self._nodes)[0].items()
                yield {table_of(self._store, name, "a mini-batch has"): np.unique(ids) for name, ids in found}
            return
        share.set_epoch(epoch)
        for index in range(len(share)):
            sample: Any = share[index]
            by_table = sample.node if isinstance(sample.node, dict) else {self.ahead.tables[0]: sample.node}
            if sample.batch is not None:  # a subgraph for each seed, in which nodes stand again
                by_table = {name: np.unique(ids) for name, ids in by_table.items()}
            yield by_table

    def begin(self, epoch: int, index: int) -> None:
        """The rows that are asked for from now on are of this mini-batch."""
        if epoch in self._begins:
            self.ahead.begin(self._begins[epoch] + index)


def _remote_bytes(store: WholeStore, table: Table) -> int:
    """Of rows that this host may want of others: of a table that graphs lead from, those of its halo."""
    if any(graph.source_table.name == table.name for graph in store.part.graphs.values()):
        return len(halo_ids_of(table)) * table.row_bytes
    return (table.rows - store.owners[table.name].rows) * table.row_bytes
