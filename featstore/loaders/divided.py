"""A user's mini-batches divided among the ranks of a training run."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from featstore.arguments import as_batches
from featstore.base.sequences import each_of, known_length
from featstore.base.state import ends_before
from featstore.errors import ArgumentError
from featstore.loaders.options import SAMPLING, Given
from featstore.loaders.prefetch import Sampler, check_repeatable, epoch_of
from featstore.sampling.batches import SampledBatches
from featstore.sampling.link_batches import LinkBatches
from featstore.sampling.ranked import share_of


def drawn_here(batches: Any) -> bool:
    """Whether these mini-batches are made by a sampler of ours when they are asked for: nobody else has what
    they hold."""
    return isinstance(batches, LinkBatches | SampledBatches)


def check_given(given: Given, batches: Sampler | None) -> None:
    """Raise ArgumentError where a loader takes other mini-batches than these, or, where ranks share those
    around links that are not made yet (None), other options."""
    for name in SAMPLING if batches is None else (*SAMPLING, "shared"):
        if given.get(name, False) is not False:
            raise ArgumentError(f"{name}= is for the store to sample: give batches or seeds, not both")
    if given.mode == "partitions":
        raise ArgumentError(
            "mode='partitions' samples inside the partitions that are in memory: give seeds= and fanouts= "
            "instead of batches"
        )
    if batches is not None:
        as_batches(batches, "batches")
        check_repeatable(batches)


class GivenShare:
    """Of the mini-batches of each epoch every ``world_size``-th, from ``rank`` on, in as many steps as any
    other rank has.

    Where they do not divide evenly, the first ones stand twice; with ``drop_last`` the last ones are left
    out. ``padded`` and ``dropped`` say how many, of the epoch that was gone through last. Of a sequence only
    a rank's own are asked for; of anything else each rank goes through all of them, and passes over the
    others. ``divided``: they are this one's of so many ranks already. Raises ArgumentError where nothing is
    left.
    """

    def __init__(
        self, batches: Sampler, rank: int = 0, world_size: int = 1, drop_last: bool = False,
        divided: int = 0,
    ) -> None:  # fmt: skip
        self._batches, self._rank, self.num_replicas, self._drop_last = batches, rank, world_size, drop_last
        if isinstance(batches, LinkBatches):
            self._drop_last = drop_last or batches.drops_last
        self._divided = divided
        length = known_length(batches) if self._drop_last and world_size > 1 else None
        if length and not self._steps(length):
            raise ArgumentError(
                f"drop_last= leaves no mini-batch: there are {length:,}, fewer than the {world_size:,} ranks"
            )
        self.padded = self.dropped = 0
        self._begun_at = (0, 0)  # an epoch, and how many mini-batches of it are over

    @property
    def per_step(self) -> int:
        """Mini-batches of all ranks together that a step goes on by."""
        return self._divided or self.num_replicas

    def check_rest(self, over: int) -> None:
        """Raise ArgumentError where mini-batches divide themselves, and any of all ranks' are over."""
        if over and self._divided:
            raise ArgumentError(
                "the state is of mini-batches that were divided among ranks, and these divide themselves: "
                "which are over is not known. Give what was given then, or begin the next epoch, set_epoch()"
            )

    def check_within(self, last: int) -> None:
        """Raise ArgumentError where there is no mini-batch of that number, which a state has seen."""
        length = None if self._divided else known_length(self._batches)  # of all ranks together
        if length is not None and last >= length:
            raise ends_before(last + 1, length)

    def begin_at(self, epoch: int, over: int) -> None:
        """Of this epoch the first ``over`` mini-batches are over: the others are divided. Raises
        ArgumentError, see :meth:`check_rest`."""
        self.check_rest(over)
        self._begun_at = epoch, over

    def rest_of(self, epoch: int) -> int | None:
        """Mini-batches of each rank in an epoch, or in the rest of it that was begun at; None where that is
        not known."""
        length = known_length(self._batches)
        over = self._begun_at[1] if self._begun_at[0] == epoch else 0
        return None if length is None else self._steps(max(0, length - over))

    def _steps(self, count: int) -> int:
        rounds, left = divmod(count, self.num_replicas)
        return rounds + bool(left and not self._drop_last)

    def end_rest(self) -> None:
        """The next time, that epoch is whole."""
        self._begun_at = 0, 0

    @property
    def steps(self) -> int:
        """Mini-batches of each rank whose mini-batches these are, in this epoch."""
        here = len(self._batches.ranks) if isinstance(self._batches, LinkBatches) else 1
        return self.epoch_steps() // here

    @property
    def of_links(self) -> bool:
        """Whether mini-batches are the store's own, around links."""
        return isinstance(self._batches, LinkBatches)

    @property
    def drawn_here(self) -> bool:
        """Whether mini-batches are drawn when they are asked for, around links or nodes."""
        return drawn_here(self._batches)

    @property
    def alike(self) -> dict[str, Any]:
        """What all hosts are to say of these mini-batches; nothing of a user's own."""
        return self._batches.alike if isinstance(self._batches, LinkBatches) else {}

    def apart(self) -> GivenShare:
        """The same, of which other epochs can be gone through meanwhile."""
        made = copy.copy(self)
        if drawn_here(self._batches):
            made._batches = copy.copy(self._batches)
        return made

    def epoch(self, number: int) -> Iterable[Any]:
        """This rank's mini-batches of an epoch."""
        batches = epoch_of(self._batches, number)
        over = self._begun_at[1] if self._begun_at[0] == number else 0
        if isinstance(batches, LinkBatches) and self.num_replicas == 1:  # which hosts have divided
            self.padded, self.dropped = batches.padded, batches.dropped
        if self.num_replicas == 1 and not over:
            return each_of(batches)
        if isinstance(batches, Sequence):
            order = np.arange(over, len(batches))
            mine, self.padded, self.dropped = share_of(
                order, 1, self._rank, self.num_replicas, self._drop_last
            )
            if isinstance(batches, LinkBatches):
                self.dropped = batches.dropped + self.dropped * batches.batch_size
                again = np.resize(order, len(order) + self.padded)[len(order) :]
                left = batches.total - again * batches.batch_size
                self.padded = int(np.minimum(batches.batch_size, left).sum())
            return (batches[int(index)] for index in mine)
        return self._passing_over(batches, over)

    def _passing_over(self, batches: Iterable[Any], over: int) -> Iterator[Any]:
        """Every rank's mini-batches come by; a whole round of them has one for each."""
        first: list[Any] = []  # for what is left over at the end
        mine, count = None, 0
        for index, batch in enumerate(batches):
            if index < over:
                continue
            place = count % self.num_replicas
            if len(first) < self.num_replicas - 1 and not self._drop_last:
                first.append(copy.deepcopy(batch))  # a sampler may use its memory again
            if place == self._rank and not self._drop_last:
                yield batch
            elif place == self._rank:  # it is dropped where its round does not come to its end
                mine = batch if place == self.num_replicas - 1 else copy.deepcopy(batch)
            count += 1
            if self._drop_last and place == self.num_replicas - 1:
                yield mine
        left = count % self.num_replicas
        self.padded, self.dropped = 0, left if self._drop_last else 0
        if left and not self._drop_last:
            self.padded = self.num_replicas - left
            if self._rank >= left:
                yield first[(self._rank - left) % len(first)]

    def epoch_steps(self) -> int:
        """Mini-batches of a whole epoch, as many for any rank. Raises ArgumentError where that is not
        known."""
        length = known_length(self._batches)
        if length is None:
            raise ArgumentError("the mini-batches have no length")
        return self._steps(length)
