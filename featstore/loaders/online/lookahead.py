"""Mini-batches of a host are sampled ahead, beside those that train, for which rows of other hosts they want
(:mod:`featstore.hosts.ahead`). A list of mini-batches is looked at in the same way.

Mini-batches of the store's own are kept until their turn as far as there is memory for them; those for which
there is none are sampled again then. The steps go on from epoch to epoch. An epoch that does not follow on
the one before begins anew. A mini-batch that cannot be sampled fails at its turn, and nothing beyond it is
looked at in that epoch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import shown
from featstore.errors import ArgumentError
from featstore.hosts.ahead import Ahead
from featstore.hosts.halo import halo_count_of
from featstore.loaders.divided import GivenShare
from featstore.loaders.online.content import sampled_arrays
from featstore.loaders.prefetch import Sampler, epoch_of, parts_of
from featstore.sampling.batches import RankedBatches, SampledBatches
from featstore.sampling.disk_sampler import DiskSampler
from featstore.sampling.link_batches import LinkBatches
from featstore.sampling.minibatch import split, table_of
from featstore.storage.relations import graph_of
from featstore.storage.store import Table
from featstore.units import parse_bytes

if TYPE_CHECKING:
    from featstore.hosts.split_store import WholeStore


_OBJECT_BYTES = 4096  # of a mini-batch, beside its arrays


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


def tables_looked_at(
    store: WholeStore, share: RankedBatches | GivenShare | None, of_types: bool, graph: str | None
) -> list[Table]:
    """Tables whose rows are wanted by ids of nodes: of the graph that the store samples from, or of all types
    that have features: those that it samples, around links too, and that lists of mini-batches may name."""
    if isinstance(share, RankedBatches) and not of_types:
        return [store.table(graph_of(store, graph).table.name)]
    return [store.table(name) for name in store.node_types if name not in store.featureless]


class Lookahead:
    """Tells ``ahead``, of so much ``memory``, what comes. ``share``: this rank's mini-batches. ``tables``:
    those of the nodes that are sampled, or of lists. ``nodes``: finds the node ids of mini-batches that were
    given. ``kept_bytes``: memory for mini-batches that were sampled ahead; :meth:`sampled` gives them.

    ``trained``: what is made of these, with the rows of edges as well, or nothing more: it is set before
    :meth:`epoch` is gone through."""

    def __init__(
        self, store: WholeStore, share: RankedBatches | GivenShare | None, memory: int | str,
        tables: Sequence[Table], nodes: Callable[[Any], Any] | None, kept_bytes: int = 0,
    ) -> None:  # fmt: skip
        assert share is not None
        weights = [_remote_bytes(store, table, share) for table in tables] if len(tables) > 1 else None
        self.ahead = Ahead(tables, parse_bytes(memory, "halo"), weights)
        self._store, self._share, self._nodes = store, share, nodes
        self.trained: Sampler | None = None
        #: Whether the mini-batches that come are not wanted any more.
        self.unwanted: Callable[[], bool] = lambda: False
        self._next_epoch = -1  # the one that would follow
        self._begins: dict[int, int] = {}  # the first step of an epoch
        self._steps: Iterator[dict[str, NDArray[np.int64]]] = iter(())
        self._kept: dict[int, tuple[Any, int]] = {}  # mini-batches by step, and their bytes
        self._room, self._step = kept_bytes, 0  # the step that was made last
        self._stopped = False  # by a mini-batch that could not be sampled

    def epoch(self, number: int) -> Iterator[Any]:
        """The mini-batches to train on, each after those ahead of it have been looked at."""
        coming = self.ahead.coming
        if number != self._next_epoch or self._stopped:
            coming.restart()
            self._stopped = False
            self._begins, self._steps, self._step = {}, self._wanted(number), 0
            for step in list(self._kept):
                self._taken(step)
        self._next_epoch = -1
        assert self.trained is not None
        step = self._begins.get(number, coming.added)
        for batch in epoch_of(self.trained, number):
            self._step = step
            while coming.wants(step) and not self.unwanted():
                if (wanted := self._look()) is None:
                    break
                self.ahead.add(wanted)
            yield batch
            step += 1
        self._next_epoch = number + 1
        self._begins.pop(number - 1, None)

    def _look(self) -> dict[str, NDArray[np.int64]] | None:
        """What the next step wants; None where there is none, or where it failed."""
        try:
            return next(self._steps, None)
        except Exception:
            self._stopped = True  # and so are the steps
            return None

    def sampled(self, number: int) -> Iterable[Any]:
        """This rank's mini-batches of an epoch, those sampled ahead that were kept, and others anew."""
        share = self._share
        if isinstance(share, GivenShare):
            return share.epoch(number)
        share.set_epoch(number)
        return self._one_by_one(share, number) if self._keeps or self._kept else share

    def _one_by_one(self, share: RankedBatches, number: int) -> Iterator[Any]:
        for index in range(len(share)):
            made = self._taken(self._begins.get(number, 0) + index)
            yield share[index] if made is None else made

    @property
    def _keeps(self) -> bool:
        """Whether mini-batches are kept: those from disk are sampled several at a time, in order."""
        drawn_by = self._share.drawn_by if isinstance(self._share, RankedBatches) else None
        from_disk = isinstance(drawn_by, DiskSampler) and drawn_by.reads
        return drawn_by is not None and not from_disk and self._room > 0

    def _keep(self, step: int, sample: Any) -> None:
        byte_count = sum(array.nbytes for array in sampled_arrays(sample)) + _OBJECT_BYTES
        if byte_count <= self._room and step > self._step:
            self._kept[step] = sample, byte_count
            self._room -= byte_count

    def _taken(self, step: int) -> Any:
        sample, byte_count = self._kept.pop(step, (None, 0))
        self._room += byte_count
        return sample

    def _wanted(self, epoch: int) -> Iterator[dict[str, NDArray[np.int64]]]:
        """Nodes of other hosts that each mini-batch wants, from this epoch on."""
        share = self._share  # of which another one goes from epoch to epoch by itself
        share = share.apart() if isinstance(share, GivenShare) else copy.copy(share)
        none = np.empty(0, np.int64)
        while True:
            self._begins[epoch] = self.ahead.coming.added
            before = self.ahead.coming.added
            for nodes in self._nodes_of(share, epoch):
                wanted = {name: nodes.get(name, none) for name in self.ahead.tables}
                yield {n: ids[self._store.owners[n].own_and_others(ids)[1]] for n, ids in wanted.items()}
            if self.ahead.coming.added == before:
                return  # there are none, nor will be
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
            if self._keeps:
                self._keep(self.ahead.coming.added, sample)
            by_table = sample.node if isinstance(sample.node, dict) else {self.ahead.tables[0]: sample.node}
            if sample.batch is not None:  # a subgraph for each seed, in which nodes stand again
                by_table = {name: np.unique(ids) for name, ids in by_table.items()}
            yield by_table

    def begin(self, epoch: int, index: int) -> None:
        """The rows that are asked for from now on are of this mini-batch."""
        if epoch in self._begins:
            self.ahead.begin(self._begins[epoch] + index)


def _remote_bytes(store: WholeStore, table: Table, share: RankedBatches | GivenShare) -> int:
    """Of rows that this host may want of others: of a table that graphs lead from, those of its halo. Of any
    other none where the store samples, around nodes of this host."""
    if any(graph.source_table.name == table.name for graph in store.part.graphs.values()):
        return halo_count_of(table) * table.row_bytes
    if isinstance(share, RankedBatches):
        return 0
    return (table.rows - store.owners[table.name].rows) * table.row_bytes
