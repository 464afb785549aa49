"""Orders of training nodes as samplers: another order in each epoch, repeatable, resumable, and as shuffled
as the labels ask.

A feature buffer earns a row's read back when the row is wanted again before its slot is needed. In a random
order of the training nodes that is chance; the orders here let neighbouring mini-batches share rows. Both
consist of several **sequences** in which neighbours follow each other and from which a mini-batch takes its
nodes in turn: the more, the better the order is shuffled, and the fewer, the more rows are shared. The number
comes from a test on the labels (:mod:`featstore.sampling.shuffling`).

- :class:`featstore.sampling.proximity.ProximityOrder`: sequences as breadth-first searches meet the training
  nodes;
- :class:`PartitionOrder`: each sequence a row of partitions. The training nodes of a partition, whose rows
  lie side by side on disk, follow each other, shuffled; as many partitions as there are sequences are under
  way at a time.

**Beside the training.** While an epoch's order is gone through, a thread draws that of the next epoch; two
exist then, of 8 bytes a training node each.

**Repeatable.** Orders follow from (seed, epoch) by hashes, as neighbours do in
:mod:`featstore.sampling.neighbors`. So nothing but the epoch and a position has to be kept to go on in the
middle of an epoch.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_count, as_integer
from featstore.base.hashing import batch_key, random_words
from featstore.base.ids import as_integers
from featstore.base.state import position_of, state_of
from featstore.base.threads import Worker
from featstore.base.training_nodes import checked_train
from featstore.errors import ArgumentError, SourceError
from featstore.sampling.shuffling import LabelTest, ShufflingSearch, search_sequences
from featstore.storage.store import OpenStore, Table

__all__ = ["PartitionOrder", "TrainingOrder"]

#: Sequences where there are no labels to ask, or the size of a mini-batch if that is smaller.
DEFAULT_SEQUENCES = 128

_BLOCK = 1 << 14
#: Numbers that no mini-batch has, so that each use of random words has a key of its own.
ROOTS, SHIFTS, PARTITIONS, INSIDE = range(-5, -1)


class _Ahead:
    """The order of an epoch that comes later, drawn in a thread of its own."""

    def __init__(self, draw: Callable[[int], NDArray[np.int64]], epoch: int) -> None:
        self.epoch, self._draw = epoch, draw
        self._drawn: NDArray[np.int64] | None = None
        self._worker = Worker(self._run, "featstore-order")
        self._worker.start()

    def _run(self) -> None:
        with suppress(Exception):  # whoever wants the order draws it again, and gets the error
            self._drawn = self._draw(self.epoch)

    def take(self) -> NDArray[np.int64] | None:
        """The order, when it is there; None where there is none, as in a forked child."""
        self._worker.end()
        return self._drawn


class TrainingOrder(ABC):
    """An order of training nodes, another in each epoch: a sampler for PyTorch's and PyG's loaders.

    Iterating gives positions in ``train`` (Python ints), each once; then the next epoch is the current one.
    Give it as ``sampler=`` to ``torch.utils.data.DataLoader`` over the training nodes, or to PyG's
    ``NeighborLoader`` whose ``input_nodes`` are the training nodes. ``train``: int64 [n], node ids as they
    were given (those of a mask ascend).

    ``sequences`` is the number of sequences in use, ``search`` how it was found (None unless from labels).
    Several trainers take the mini-batches in turn: each makes the same order, and trainer r of M takes
    mini-batches r, r + M, and so on.

    Not for several threads at once. It can be pickled.
    """

    def __init__(
        self,
        train: NDArray[np.int64],
        node_count: int,
        batch_size: int,
        labels: Any,
        seed: int,
        trainers: int,
    ) -> None:
        self.batch_size, trainers = (
            as_count(batch_size, "batch_size"),
            as_count(trainers, "trainers", 1, 2**31 - 1),
        )
        self.train, self.node_count, self.seed = train, node_count, as_integer(seed, "seed")
        self._labels = (
            None if labels is None else LabelTest(labels, train, self.batch_size, node_count, trainers)
        )
        self.search: ShufflingSearch | None = None
        self.sequences = 1
        self._epoch = 0
        self._start = 0  # where the next iteration begins
        self._position = 0  # how many the latest iteration has handed out
        self._iteration = 0
        self._drawn: tuple[int, NDArray[np.int64]] | None = None
        self._ahead: _Ahead | None = None  # of the epoch after the one that is gone through

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_ahead": None}

    @abstractmethod
    def _draw(self, epoch: int) -> NDArray[np.int64]:
        """The order of an epoch, int64 [n] positions."""

    @abstractmethod
    def _trials(self) -> Callable[[int], NDArray[np.int64]]:
        """What makes the first epoch's order with so many sequences."""

    def _identity(self) -> dict[str, Any]:
        """What must be equal for an order to be repeated: plain data."""
        train = zlib.crc32(self.train.tobytes())
        return {"seed": self.seed, "train": train, "sequences": self.sequences}

    def _choose(self, sequences: int | str) -> int:
        """The number of sequences."""
        limit = min(self.batch_size, len(self.train))
        if isinstance(sequences, str) and sequences == "auto":
            if self._labels is None:
                return min(DEFAULT_SEQUENCES, limit)
            self.search = search_sequences(self._labels, self._trials(), limit, self.seed)
            return self.search.sequences
        return as_count(
            sequences, f"sequences, unless 'auto', of {len(self.train):,} training nodes,", 1, len(self.train)
        )

    def shuffling_error(self) -> float:
        """The shuffling error of the current epoch's order; see :mod:`featstore.sampling.shuffling`. Needs
        labels."""
        if self._labels is None:
            raise SourceError("the shuffling error is measured on labels: pass labels=")
        return self._labels.error(self.positions())

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._epoch

    def positions(self) -> NDArray[np.int64]:
        """The current epoch's order, int64 [n]: positions in ``train``. Not to be written to."""
        if self._drawn is None or self._drawn[0] != self._epoch:
            self._drawn = None  # let go before the next one is made
            ahead, self._ahead = self._ahead, None
            order = ahead.take() if ahead is not None and ahead.epoch == self._epoch else None
            if order is None:
                order = self._draw(self._epoch)
            order.flags.writeable = False
            self._drawn = (self._epoch, order)
        return self._drawn[1]

    def nodes(self) -> NDArray[np.int64]:
        """The current epoch's order, int64 [n]: node ids."""
        return self.train[self.positions()]

    def __len__(self) -> int:
        """Training nodes in an epoch, also in one that was resumed."""
        return len(self.train)

    def __iter__(self) -> Iterator[int]:
        """Positions of the current epoch, from its start, or from where a state that was just loaded
        stands."""
        order, start = self.positions(), self._start
        self._iteration += 1
        self._start, self._position = 0, start
        return self._go(order, start, self._epoch, self._iteration)

    def _go(self, order: NDArray[np.int64], start: int, epoch: int, iteration: int) -> Iterator[int]:
        if self._ahead is None and self._iteration == iteration:
            self._ahead = _Ahead(self._draw, epoch + 1)
        for begin in range(start, len(order), _BLOCK):
            for place, position in enumerate(order[begin : begin + _BLOCK].tolist(), begin + 1):
                if self._iteration == iteration:
                    self._position = place
                yield position
        if self._iteration == iteration:
            self.set_epoch(epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Make this the current epoch; the next iteration begins at its start. If it is the current one
        already, nothing changes, so that a loop that calls it in each epoch can be resumed."""
        epoch = as_count(epoch, "epoch", 0)
        if epoch != self._epoch:
            self._epoch, self._start, self._position = epoch, 0, 0
            self._iteration += 1

    def state_dict(self, *, epoch: int | None = None, position: int | None = None) -> dict[str, Any]:
        """Where training stands: small, plain data; ``next`` is a position. What was handed out counts as
        trained on.

        A loader with workers asks for nodes ahead of training. Then say what has been trained on: ``epoch``,
        and ``position``, the number of its training nodes (mini-batches done times their size).
        """
        if (epoch is None) != (position is None):
            raise SourceError("give both epoch= and position=, or neither")
        if epoch is None or position is None:
            epoch, done = self._epoch, self._position
        else:
            last = -(-len(self.train) // self.batch_size) * self.batch_size  # the last one may be smaller
            epoch = as_count(epoch, "epoch", 0)
            done = min(as_count(position, "position", 0, last), len(self.train))
        if done == len(self.train):  # all of it is over
            epoch, done = epoch + 1, 0
        return state_of(self._identity(), epoch, done)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin where a state was taken when iterated next. Raises SourceError where it belongs to another
        order."""
        epoch, position, _ = position_of(state, self._identity(), most=len(self.train))
        if position == len(self.train):
            epoch, position = epoch + 1, 0
        self.set_epoch(epoch)
        self._start = self._position = position
        self._iteration += 1

    def _key(self, what: int, epoch: int) -> np.uint64:
        return np.uint64(batch_key(self.seed, epoch, what))


class PartitionOrder(TrainingOrder):
    """Training nodes partition by partition: partitions in random order, shuffled inside, anew in each epoch.

    Args:
        partitions: a table of a store, or a store with one table of nodes, packed in an order with
            partitions; or the partition of each node, integers [nodes].
        train: node ids of the training nodes, or a mask of the nodes.
        sequences: partitions under way at a time. 1: strictly partition by partition. ``"auto"``, ``labels``,
            ``batch_size``, ``seed``, ``trainers``: as for
            :class:`featstore.sampling.proximity.ProximityOrder`.

    ``partitions`` is the number of those that hold training nodes. Raises SourceError and IdError, and what
    reading raises.
    """

    def __init__(
        self, partitions: Any, train: Any, *, sequences: int | str = "auto", labels: Any = None,
        batch_size: int, seed: int = 0, trainers: int = 1,
    ) -> None:  # fmt: skip
        if isinstance(partitions, OpenStore):
            table = _only_table(partitions)
        else:
            table = partitions
        if isinstance(table, Table):
            nodes = checked_train(train, table.rows)
            rows = table.row_of_node()
            parts = np.searchsorted(
                table.partition_offsets, nodes if rows is None else rows[nodes], side="right"
            )
        else:
            what = "partitions must be a store, a table, or an integer for each node"
            table = as_integers(table, what, ArgumentError)
            if table.ndim != 1:
                raise ArgumentError(f"{what}, not {table.dtype} {list(table.shape)}")
            nodes = checked_train(train, len(table))
            parts = table[nodes]
        super().__init__(
            nodes, table.rows if isinstance(table, Table) else len(table), batch_size, labels, seed, trainers
        )
        names, part = np.unique(parts, return_inverse=True)
        self.partitions, self._part = len(names), part.astype(np.int64)
        self.sequences = self._choose(sequences)

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        return self._order_of(self.sequences, epoch)

    def _trials(self) -> Callable[[int], NDArray[np.int64]]:
        return lambda sequences: self._order_of(sequences, 0)

    def _order_of(self, sequences: int, epoch: int) -> NDArray[np.int64]:
        """All partitions in a row, cut into sequences of equal length, which take turns."""
        words = random_words(self._key(PARTITIONS, epoch), self.partitions)
        turn = np.empty(self.partitions, np.int64)
        turn[np.argsort(words, kind="stable")] = np.arange(self.partitions)
        row = np.lexsort((random_words(self._key(INSIDE, epoch), len(self.train)), turn[self._part]))
        order = np.empty_like(row)
        begin = 0
        for number, length in enumerate(lengths_of(len(row), sequences)):
            order[number::sequences] = row[begin : begin + length]
            begin += length
        return order

    def _identity(self) -> dict[str, Any]:
        own = {"order": "partitions", "partitions": zlib.crc32(self._part.tobytes())}
        return own | super()._identity()


def _only_table(store: OpenStore) -> Table:
    """The only table of nodes. Raises SourceError where there are more, or none."""
    nodes = store.node_types
    if len(nodes) != 1:
        known = ", ".join(map(repr, store.tables))
        raise SourceError(
            f"the store has {len(nodes)} tables of nodes (its tables are {known}): pass one of them"
        )
    return store.tables[nodes[0]]


def lengths_of(count: int, sequences: int) -> list[int]:
    """Lengths of the sequences that take turns in an order of ``count`` nodes."""
    return [len(range(number, count, sequences)) for number in range(sequences)]
