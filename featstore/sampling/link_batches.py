"""The mini-batches of links of an epoch, as loaders take them: by number, the same each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_count, as_flag, as_integer
from featstore.sampling.batches import shuffled
from featstore.sampling.disk_sampler import DiskSampler
from featstore.sampling.links import LinkSampler, LinkSubgraph
from featstore.sampling.minibatch import OF_LINKS

_OF_NODES = ("row", "col", "edge_id", "e_id", "num_sampled_nodes", "num_sampled_edges")


class LinkBatches(Sequence[dict[str, Any]]):
    """Mini-batches of ``links``, integers [2, l], with ``labels`` and ``times`` [l] where there are any: each
    a mapping with ``n_id`` and all else that a :class:`~featstore.sampling.links.LinkSubgraph` and what is
    around it have, by their names.

    ``shuffle``: in another order every epoch, by the sampler's seed. ``drop_last``: without what is left over
    after whole mini-batches. ``numbered``: whether the user knows links by their places in ``links``; else
    mini-batches have no ``input_id``. Raises IdError, ArgumentError, SourceError.
    """

    def __init__(
        self, sampler: LinkSampler, links: NDArray[Any], batch_size: int, *, labels: Any = None,
        times: Any = None, shuffle: bool = False, drop_last: bool = False, numbered: bool = True,
    ) -> None:  # fmt: skip
        self.sampler, self.batch_size = sampler, as_count(batch_size, "batch_size")
        self._links = sampler.checked(links)
        count = self._links.shape[1]
        self._labels = None if labels is None else np.asarray(labels)
        self._times = None if times is None else np.asarray(times)
        sampler.check_said(self._labels, self._times, count)
        self._shuffle, self._drop_last = as_flag(shuffle, "shuffle"), as_flag(drop_last, "drop_last")
        self._numbered = as_flag(numbered, "numbered")
        self.epoch = 0
        self._order = self._ordered()

    def _ordered(self) -> NDArray[np.int64]:
        count = self._links.shape[1]
        return shuffled(count, self.sampler.sampler.seed, self.epoch) if self._shuffle else np.arange(count)

    def set_epoch(self, epoch: int) -> None:
        """From now on the mini-batches are those of this epoch."""
        self.epoch = as_integer(epoch, "epoch")
        self._order = self._ordered()

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

    def __len__(self) -> int:
        count: int = self._links.shape[1]
        return count // self.batch_size if self._drop_last else -(-count // self.batch_size)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        some = self._order[numbers * self.batch_size :][: self.batch_size]
        labels, times = (None if one is None else one[some] for one in (self._labels, self._times))
        found = as_mapping_of(
            self.sampler.sample(
                self._links[:, some], numbers, epoch=self.epoch, labels=labels, times=times, input_id=some
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
