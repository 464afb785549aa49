"""The mini-batches of links of an epoch, as loaders take them: by number, the same each time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_count, as_flag, as_integer
from featstore.base.ids import plain_array
from featstore.base.sequences import in_turn
from featstore.errors import ArgumentError
from featstore.sampling.batches import shuffled
from featstore.sampling.disk_sampler import DiskSampler
from featstore.sampling.links import LinkSampler, LinkSubgraph
from featstore.sampling.minibatch import OF_LINKS
from featstore.sampling.ranked import NO_SEED, owned_share, share_of

_OF_NODES = ("row", "col", "edge_id", "e_id", "num_sampled_nodes", "num_sampled_edges")


class LinkBatches(Sequence[dict[str, Any]]):
    """Mini-batches of ``links``, integers [2, l], with ``labels`` and ``times`` [l] where there are any: each
    a mapping with ``n_id`` and all else that a :class:`~featstore.sampling.links.LinkSubgraph` and what is
    around it have, by their names.

    ``shuffle``: in another order every epoch, by the sampler's seed. ``drop_last``: without what is left over
    after whole mini-batches of all ranks. ``numbered``: whether the user knows links by their places in
    ``links``; else mini-batches have no ``input_id``. These are the mini-batches of ``ranks`` of
    ``world_size``, in turn: number 0 of each, then number 1 of each; each has every ``world_size``-th
    mini-batch, ``padded`` of which stand twice in an epoch. ``owner`` [l]: on which of ``hosts`` hosts each
    link is, whose ranks train on what is there (:func:`featstore.sampling.ranked.owned_share`), and
    ``padded`` links of all ranks stand twice. ``dropped`` links are left out. Raises IdError, ArgumentError,
    SourceError.
    """

    def __init__(
        self, sampler: LinkSampler, links: NDArray[Any], batch_size: int, *, labels: Any = None,
        times: Any = None, shuffle: bool = False, drop_last: bool = False, numbered: bool = True,
        owner: NDArray[Any] | None = None, hosts: int = 1, ranks: Sequence[int] = (0,), world_size: int = 1,
    ) -> None:  # fmt: skip
        self.sampler, self.batch_size = sampler, as_count(batch_size, "batch_size")
        self._links = sampler.checked(links)
        count = self._links.shape[1]
        self._labels = None if labels is None else plain_array(labels, "labels")
        self._times = None if times is None else plain_array(times, "times")
        sampler.check_said(self._labels, self._times, count)
        self._shuffle, self.drops_last = as_flag(shuffle, "shuffle"), as_flag(drop_last, "drop_last")
        self._numbered = as_flag(numbered, "numbered")
        self._owner, self._hosts, self.ranks, self.num_replicas = owner, hosts, tuple(ranks), world_size
        self.padded = self.dropped = 0
        self.alike: dict[str, Any] = {}  # what all hosts are to say of them
        self.epoch = 0
        self._order, self._numbers = self._ordered()
        if not len(self) and (count or world_size > 1):
            each = f"{hosts} hosts" if world_size == hosts else f"{world_size} ranks"
            of = f" for each of {each}" if world_size > 1 else ""
            raise ArgumentError(
                f"drop_last= leaves no mini-batch of {self.batch_size:,} links{of}: give fewer a batch"
            )

    def _ordered(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Links of this epoch, [1, links], or, where hosts own them, [ranks, links of each]; and the numbers
        by which the sampler knows the mini-batches, [ranks, steps]."""
        count, size, world = self.total, self.batch_size, self.num_replicas
        order = shuffled(count, self.sampler.sampler.seed, self.epoch) if self._shuffle else np.arange(count)
        if self._owner is None:
            self.dropped = count % size if self.drops_last else 0
            whole = np.arange(-(-(count - self.dropped) // size))
            shares = [share_of(whole, 1, rank, world, self.drops_last) for rank in self.ranks]
            again = np.resize(whole, len(whole) + shares[0].padded)[len(whole) :]
            self.padded = int(np.minimum(size, count - self.dropped - again * size).sum())
            self.dropped += shares[0].dropped * size
            return order[None], np.stack([share.seeds for share in shares])
        each, drop = world // self._hosts, self.drops_last
        shares = [owned_share(order, self._owner, size, r, each, self._hosts, drop) for r in self.ranks]
        self.padded, self.dropped = shares[0].padded, shares[0].dropped
        made = np.stack([share.seeds for share in shares])
        return made, np.arange(-(-made.shape[1] // size)) * world + np.array(self.ranks)[:, None]

    @property
    def most_seeds(self) -> dict[str, int]:
        """How many nodes of each type a mini-batch begins with, at most."""
        return self.sampler.most_seeds(min(self.batch_size, self._order.shape[1]))

    def set_epoch(self, epoch: int) -> None:
        """From now on the mini-batches are those of this epoch."""
        self.epoch = as_integer(epoch, "epoch")
        self._order, self._numbers = self._ordered()

    @property
    def drawn_by(self) -> Any:
        """What samples around the links."""
        return self.sampler.sampler

    def draw_by(self, sampler: Any) -> None:
        """Have another one of the same graph sample."""
        self.sampler.sampler = sampler

    def close(self) -> None:
        """Give back what a sampler from disk holds. May be called more than once."""
        if isinstance(self.drawn_by, DiskSampler):
            self.drawn_by.close()

    @property
    def total(self) -> int:
        """How many links there are."""
        return int(self._links.shape[1])

    @property
    def steps(self) -> int:
        """Mini-batches of each rank, in this epoch."""
        steps: int = self._numbers.shape[1]
        return steps

    def __len__(self) -> int:
        return len(self.ranks) * self.steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return in_turn(self)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        step, rank = divmod(numbers, len(self.ranks))
        number = int(self._numbers[rank, step])
        row, at = (0, number) if self._owner is None else (rank, step)
        some = self._order[row, at * self.batch_size :][: self.batch_size]
        some = some if self._owner is None else some[some != NO_SEED]
        labels, times = (None if one is None else one[some] for one in (self._labels, self._times))
        found = as_mapping_of(
            self.sampler.sample(
                self._links[:, some], number, epoch=self.epoch, labels=labels, times=times, input_id=some
            )
        )
        if not self._numbered:
            del found["input_id"]
        return found


def as_mapping_of(found: LinkSubgraph) -> dict[str, Any]:
    """A mini-batch of links as one mapping, without what it does not have."""
    around = found.subgraph
    parts = {"n_id": around.node, "batch": found.batch}
    parts |= {name: getattr(around, name) for name in _OF_NODES}
    parts |= {name: getattr(found, name) for name in OF_LINKS}
    return {name: one for name, one in parts.items() if one is not None}
