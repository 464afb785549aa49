"""The ways to train, each giving the mini-batches of one epoch after the other: what differs is which rows
are wanted when.

- ``online``: as they come, through a buffer (:mod:`featstore.loaders.online.loader`);
- ``compiled``: those of the first epochs again and again, their rows laid out for them
  (:mod:`featstore.loaders.compiled.loader`);
- ``rolling``: fresh ones every epoch, laid out while the epoch before trains
  (:mod:`featstore.loaders.rolling`);
- ``partitions``: sampled inside partitions that are in memory (:mod:`featstore.loaders.mega.loader`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from featstore.errors import ArgumentError
from featstore.loaders.batch import Batch
from featstore.loaders.divided import GivenShare
from featstore.loaders.mega.loader import PartitionsLoader
from featstore.loaders.report import LoaderReport
from featstore.loaders.rolling import RollingLoader
from featstore.loaders.whole import as_batch
from featstore.sampling.batches import RankedBatches


class Mode:
    """A way to train, over the loader that does it. This is ``online``; the others differ in what they
    override."""

    #: Called before each mini-batch, and raises where none must come any more: another host is gone.
    check: Callable[[], None] | None = None
    #: Told of the epoch and the step of the first mini-batch of an iteration, and how many were handed out
    #: before it: it is to be so on all hosts.
    say: Callable[[int, int, int], None] | None = None
    _untold: tuple[int, int, int] | None = None  # of an iteration that has begun
    _handed, ahead = 0, False  # of a step that failed this rank has had its mini-batch, others have not
    loader: Any = None  # none where another process has it
    #: What makes this rank's mini-batches, and divides them; None where the mode does by itself.
    share: RankedBatches | GivenShare | None = None
    #: Makes what :meth:`epoch` gives whole.
    whole: Callable[[Any], Batch] = staticmethod(as_batch)
    #: Tells a BudgetError of a share of the memory as one of all of it.
    told_of_all: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def begin(self, epoch: int, step: int, *, handed: int | None = None) -> None:
        """An iteration begins there. ``handed``: mini-batches that the loop has had, where this is ahead of
        it."""
        self._untold = epoch, step, self._handed if handed is None else handed

    def epoch(self) -> Generator[Any]:
        """The mini-batches of the epoch where training stands, or what is left of it."""
        with closing(self._going()) as batches:
            for batch in batches:
                if self._untold is not None and self.say is not None:
                    self.say(*self._untold)
                self._untold = None
                if self.check is not None:
                    self.check()
                self._handed += 1
                yield batch
                del batch

    def _going(self) -> Generator[Any]:
        yield from self.loader

    def number(self, handed: int) -> int:
        """Of the mini-batch that came last, in its epoch, of which so many were handed out before it."""
        return self.loader.number if getattr(self.loader, "overtake", False) else handed

    def set_epoch(self, epoch: int) -> None:
        """Stand at the begin of this epoch."""
        self.loader.set_epoch(epoch)

    @property
    def per_step(self) -> int:
        """Seeds, or mini-batches that were given, of all ranks together that a step goes on by."""
        return 0 if self.share is None else self.share.per_step

    def check_within(self, last: int) -> None:
        """Raise ArgumentError where a mini-batch of that number, of all ranks, is known not to be there."""
        if isinstance(self.share, GivenShare):  # seeds are the same as those of the state
            self.share.check_within(last)

    def go_on(self, epoch: int, over: int, was: Mapping[str, Any] | None = None) -> tuple[int, int]:
        """Stand in this epoch where another number of ranks has had the first ``over`` of the seeds (or
        mini-batches) that are divided; ``was``: the mode's own state of one of them. Returns mini-batches of
        this rank that are over, and how much of the epoch was over before its first. Raises ArgumentError
        where that cannot be."""
        assert self.share is not None
        self.share.check_rest(over)
        self.set_epoch(epoch)
        self.share.begin_at(epoch, over)
        return 0, over

    def end_rest(self) -> None:
        """The rest of an epoch that was gone on with is over: that epoch is whole again."""
        if self.share is not None:
            self.share.end_rest()

    def save_cache(self, name: str) -> None:
        """Save which rows are in the buffers. Raises ArgumentError where that cannot be."""
        self.loader.save_cache(name)

    def length(self) -> int:
        """Mini-batches of an epoch, this rank's. Raises ArgumentError where that is not known."""
        assert self.share is not None
        return self.share.epoch_steps()

    def state(self) -> dict[str, Any]:
        """Where training stands."""
        state: dict[str, Any] = self.loader.state()
        return state

    def at(self, state: Mapping[str, Any], epoch: int, after: int) -> dict[str, Any]:
        """The same where the loop has had so many mini-batches of this epoch: one that was made may not have
        come to it."""
        return dict(state) | {"epoch": epoch, "next": after}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Stand there."""
        self.loader.load_state(state)

    def report(self) -> LoaderReport:
        """What has been measured."""
        report: LoaderReport = self.loader.report()
        if self.share is None:
            return report
        return replace(report, padded=self.share.padded, dropped=self.share.dropped)

    def close(self) -> None:
        """Give everything back."""
        self.loader.close()


@contextmanager
def closed_unless_done(mode: Mode) -> Iterator[None]:
    """Close a mode where what follows fails."""
    try:
        yield
    except BaseException:
        mode.close()
        raise


class RollingMode(Mode):
    """Fresh mini-batches every epoch, prepared beside the training on those before."""

    loader: RollingLoader
    _anew = False  # an episode that is there is the rest of its epoch
    _empty = False  # of the epoch that is gone on with nothing is left

    def _going(self) -> Generator[Any]:
        if self._empty:
            self._empty = False
            return
        yield from self.loader.episode()

    def set_epoch(self, epoch: int) -> None:
        self.loader.seek(epoch, anew=self._anew)
        self._anew = self._empty = False

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        epoch, after, share = state["epoch"], state["next"], self.share
        if self._anew:
            self.loader.seek(epoch, after, anew=True)
        self._anew = self._empty = False
        if isinstance(share, RankedBatches):
            steps = share.steps if share.epoch == epoch else share.epoch_steps()
            if after == steps * len(share.ranks):  # without preparing an episode of which nothing is left
                self.loader.seek(epoch + 1)
                self._empty = True

    def end_rest(self) -> None:
        super().end_rest()
        self._anew = True

    def go_on(self, epoch: int, over: int, was: Mapping[str, Any] | None = None) -> tuple[int, int]:
        assert self.share is not None
        self.share.check_rest(over)
        self.loader.seek(epoch, anew=True)
        self.share.begin_at(epoch, over)
        self._empty = self.share.rest_of(epoch) == 0
        if self._empty:  # which cannot be recorded
            self.end_rest()
            self.loader.seek(epoch + 1)
        return 0, over


class PartitionsMode(Mode):
    """Mini-batches sampled inside random collections of partitions."""

    loader: PartitionsLoader

    def _going(self) -> Generator[Any]:
        if self.loader.passes != "auto" and not len(self.loader):
            raise ArgumentError(
                "drop_last= leaves no mini-batch of this epoch: give fewer seeds a batch, or more memory, so "
                "that more partitions are together"
            )
        yield from super()._going()

    def length(self) -> int:
        return len(self.loader)

    def at(self, state: Mapping[str, Any], epoch: int, after: int) -> dict[str, Any]:
        return dict(state)  # which goes by mega-batches

    def go_on(self, epoch: int, over: int, was: Mapping[str, Any] | None = None) -> tuple[int, int]:
        raise ArgumentError(
            "mode 'partitions' goes on in the middle of an epoch with as many ranks as before alone: begin "
            f"the next one, set_epoch({epoch + 1})"
        )
