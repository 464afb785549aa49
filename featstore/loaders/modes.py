"""The ways to train, each giving the mini-batches of one epoch after the other: what differs is which rows
are wanted when.

- ``online``: as they come, through a buffer (:mod:`featstore.loaders.online.loader`);
- ``compiled``: those of epoch 0 again and again, their rows laid out for them
  (:mod:`featstore.loaders.compiled.loader`);
- ``rolling``: fresh ones every epoch, laid out while the epoch before trains
  (:mod:`featstore.loaders.rolling`);
- ``partitions``: sampled inside partitions that are in memory (:mod:`featstore.loaders.mega.loader`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from featstore.errors import ArgumentError
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.mega.loader import MegaBatches
from featstore.loaders.report import LoaderReport
from featstore.loaders.rolling import RollingLoader
from featstore.loaders.state import loader_state, position_of
from featstore.sampling.ranked import share_of


class Mode:
    """A way to train, over the loader that does it. This is ``online``; the others differ in what they
    override."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def epoch(self) -> Iterator[Any]:
        """The mini-batches of the epoch where training stands, or what is left of it."""
        yield from self.loader

    def set_epoch(self, epoch: int) -> None:
        """Stand at the begin of this epoch."""
        self.loader.set_epoch(epoch)

    def go_on(self, epoch: int, share: Any, over: int) -> tuple[int, int]:
        """Stand in this epoch where another number of ranks has had the first ``over`` of the seeds (or
        mini-batches) that ``share`` divides. Returns mini-batches of this rank that are over, and how much of
        the epoch was over before its first. Raises ArgumentError where that cannot be."""
        self.set_epoch(epoch)
        share.begin_at(epoch, over)
        return 0, over

    def length(self, share: Any) -> int:
        """Mini-batches of an epoch, this rank's. Raises ArgumentError where that is not known."""
        steps: int = share.steps()
        return steps

    def state(self) -> dict[str, Any]:
        """Where training stands."""
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Stand there."""
        self.loader.load_state_dict(state)

    def report(self) -> LoaderReport:
        """What has been measured."""
        report: LoaderReport = self.loader.report()
        return report

    def close(self) -> None:
        """Give everything back."""
        self.loader.close()


class CompiledMode(Mode):
    """The recorded mini-batches of one epoch, again and again."""

    loader: CompiledLoader

    def set_epoch(self, epoch: int) -> None:
        self.loader.load_state_dict(loader_state(self.loader.compiled.pack.uuid, epoch, 0))

    def length(self, share: Any) -> int:
        return len(self.loader)

    def go_on(self, epoch: int, share: Any, over: int) -> tuple[int, int]:
        """Its mini-batches are laid out: so many of all ranks' must be over that each has had whole ones."""
        steps, left = divmod(over, share.per_step)
        if left:
            raise ArgumentError(
                f"the state stands after {over:,} of an epoch's seeds or mini-batches, which are no whole "
                f"steps of {share.per_step:,} of these ranks, and what is compiled cannot be divided anew: "
                f"begin the next epoch, set_epoch({epoch + 1}), or go on with as many ranks as before"
            )
        self.loader.load_state_dict(loader_state(self.loader.compiled.pack.uuid, epoch, steps))
        return steps, 0

    def state(self) -> dict[str, Any]:
        """That of the recorded trace, whose mini-batches are the same however they are laid out."""
        return super().state() | {"store": self.loader.compiled.entry.trace_uuid}

    def load_state(self, state: Mapping[str, Any]) -> None:
        compiled = self.loader.compiled
        epoch, after = position_of(state, compiled.entry.trace_uuid, len(compiled))
        self.loader.load_state_dict(loader_state(compiled.pack.uuid, epoch, after))

    def close(self) -> None:
        super().close()
        self.loader.compiled.close()


class RollingMode(Mode):
    """Fresh mini-batches every epoch, prepared beside the training on those before."""

    loader: RollingLoader

    def epoch(self) -> Iterator[Any]:
        for batch in super().epoch():  # which has no end
            last = self.loader.state_dict()["next"] == 0
            yield batch
            del batch
            if last:
                return

    def set_epoch(self, epoch: int) -> None:
        self.loader.seek(epoch)

    def go_on(self, epoch: int, share: Any, over: int) -> tuple[int, int]:
        self.loader.seek(epoch, anew=True)
        share.begin_at(epoch, over)
        return 0, over

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.loader.seek(*position_of(state, self.loader.state_dict()["store"]))


class PartitionsMode(Mode):
    """Mini-batches sampled inside random collections of partitions."""

    loader: MegaBatches

    def __init__(self, loader: MegaBatches, fanouts: Any, **how: Any) -> None:
        """``how``: further arguments of :meth:`featstore.loaders.mega.batch.MegaBatch.batches`."""
        super().__init__(loader)
        self._how: dict[str, Any] = {"fanouts": fanouts, **how}
        self._share = {k: how[k] for k in ("batch_size", "rank", "world_size", "drop_last")}
        self._padded = self._dropped = 0  # seeds of this epoch that stand twice, and that are left out
        self._handed_out = 0  # since it was made

    def epoch(self) -> Iterator[Any]:
        self._padded = self._dropped = 0
        for mega in self.loader:
            share = share_of(mega.seeds, **self._share)
            self._padded += share.padded * mega.passes
            self._dropped += share.dropped * mega.passes
            for batch in mega.batches(**self._how):
                self._handed_out += 1
                yield batch
                del batch

    def length(self, share: Any) -> int:
        raise ArgumentError("how many mini-batches an epoch of mode 'partitions' has depends on its draw")

    def go_on(self, epoch: int, share: Any, over: int) -> tuple[int, int]:
        raise ArgumentError(
            "mode 'partitions' goes on in the middle of an epoch with as many ranks as before alone: begin "
            f"the next one, set_epoch({epoch + 1})"
        )

    def report(self) -> LoaderReport:
        return replace(super().report(), batches=self._handed_out, padded=self._padded, dropped=self._dropped)
