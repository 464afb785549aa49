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

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_count, as_flag
from featstore.base.state import position_of, state_of
from featstore.errors import ArgumentError
from featstore.loaders.batch import Batch
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.compiled.trace import CompiledTrace
from featstore.loaders.divided import GivenShare
from featstore.loaders.mega.loader import PartitionsLoader
from featstore.loaders.prefetch import Sampler
from featstore.loaders.report import LoaderReport
from featstore.loaders.rolling import RollingLoader
from featstore.loaders.train import compiled_once
from featstore.loaders.whole import as_batch
from featstore.sampling.batches import RankedBatches
from featstore.storage.store import OpenStore


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

    def go_on(self, epoch: int, over: int) -> tuple[int, int]:
        """Stand in this epoch where another number of ranks has had the first ``over`` of the seeds (or
        mini-batches) that are divided. Returns mini-batches of this rank that are over, and how much of
        the epoch was over before its first. Raises ArgumentError where that cannot be."""
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


def compiled_mode(
    store: OpenStore, batches: Sampler | None, name: str | None, *, reuse: bool = False,
    recorded_epochs: int | None = None, shuffle: bool = False, seed: int = 0, memory: int,
    sampled_by: str | None = None, loader: dict[str, Any], **options: Any,
) -> CompiledMode:  # fmt: skip
    """Record and compile mini-batches under ``name``, or take what is there, as
    :class:`~featstore.loaders.options.LoaderOptions` describes. ``batches``: None where it is to be there;
    ``name``: None where the store is the compiled trace itself. ``loader``, ``options``: of the loader, and
    of compiling."""
    reuse, shuffle = as_flag(reuse, "reuse"), as_flag(shuffle, "shuffle")
    epochs = None if recorded_epochs is None else as_count(recorded_epochs, "recorded_epochs")
    if shuffle:
        _check_shuffled(options.get("residency", "min"))
    if batches is not None and name is not None:
        epochs = epochs or 1
        said = {"sampled_by": sampled_by, "memory": memory, **options}
        compiled_once(store, batches, name, epochs=epochs, reuse=reuse, **said)
    compiled = CompiledTrace(store, name)
    try:
        found = len(compiled.epochs()) - 1
        if epochs not in (None, found):
            raise ArgumentError(
                f"reuse= finds {found} recorded epochs under the name {name!r}, not recorded_epochs={epochs}"
            )
        if shuffle:
            _check_shuffled(compiled.entry.residency)
        asked = options.get("residency", compiled.entry.residency)
        if asked != compiled.entry.residency:
            what = f"was compiled with residency={compiled.entry.residency!r}, not {asked!r}"
            if name is None:
                raise ArgumentError(f"{store.path} {what}: leave it out")
            raise ArgumentError(
                f"what reuse= finds under the name {name!r} {what}: give another name=, or leave out reuse="
            )
        return CompiledMode(compiled, seed if shuffle else None, memory=memory, **loader)
    except BaseException:
        compiled.close()
        raise


@contextmanager
def closed_unless_done(mode: Mode) -> Iterator[None]:
    """Close a mode where what follows fails."""
    try:
        yield
    except BaseException:
        mode.close()
        raise


def check_reused(
    compiled: CompiledTrace, name: str | None, steps: int | None, sampled_by: Sequence[str]
) -> None:
    """Raise ArgumentError where epochs are not of so many mini-batches, or of others than those that one of
    ``sampled_by`` tells, where that is known."""
    lengths = np.diff(compiled.epochs())
    if steps is not None and (lengths != steps).any():
        raise ArgumentError(
            f"reuse= finds epochs of {lengths.max():,} mini-batches under the name {name!r}, and those asked "
            f"for have {steps:,}: it is of other seeds, mini-batches or ranks. Give another name=, or leave "
            "out reuse="
        )
    if sampled_by and compiled.sampled_by not in ("", *sampled_by):
        raise ArgumentError(
            f"reuse= finds mini-batches under the name {name!r} that were sampled otherwise: of other seeds "
            "or links, fanouts, batch_size, graph, options or ranks. Give another name=, or leave out reuse="
        )


def _check_shuffled(residency: str) -> None:
    """Raise ArgumentError where another order would ask for rows that are not there."""
    if residency != "fixed":
        raise ArgumentError(
            "shuffle=True needs residency='fixed': with 'min' rows stay in memory by next use, which holds "
            "for the order in which mini-batches were recorded"
        )


class CompiledMode(Mode):
    """The recorded mini-batches of some epochs, again and again: a round of the loader is all of them, and
    the reading of one epoch goes on into the next.

    Args:
        compiled: the compiled trace; closed with this.
        shuffle: the seed of an order of its own for every epoch; None for the order in which they were
            recorded.
        options: of the loader.
    """

    loader: CompiledLoader

    def __init__(self, compiled: CompiledTrace, shuffle: int | None, **options: Any) -> None:
        self._begins, self._shuffle = compiled.epochs(), shuffle
        order = None if shuffle is None else self._shuffled
        super().__init__(CompiledLoader(compiled, order=order, **options))
        self._epoch = self._after = 0  # mini-batches of the epoch handed out
        self._walk: Iterator[Any] | None = None  # a round under way
        self._broken = False  # it did not come to its end, and nobody has said since where to go on

    @property
    def _recorded(self) -> int:
        """How many epochs."""
        return len(self._begins) - 1

    def _shuffled(self, round_: int) -> NDArray[np.int64]:
        """The order of a round: of each of its epochs the recorded mini-batches, by seed and epoch."""
        first = round_ * self._recorded
        parts = [
            low + np.random.default_rng([(self._shuffle or 0) % 2**64, first + k]).permutation(high - low)
            for k, (low, high) in enumerate(pairwise(self._begins.tolist()))
        ]
        return np.concatenate(parts)

    def _going(self) -> Generator[Any]:
        length = self._length(self._epoch)
        if self._broken:
            self._seek(self._epoch, self._after)
        if self._walk is None and self._after < length:
            self._walk = iter(self.loader)
        walk = self._walk
        try:
            while self._after < length:
                assert walk is not None
                batch = next(walk)
                self._after += 1
                yield batch
                del batch
        except BaseException:
            if self._walk is walk:  # else another iteration has begun, or the next one's place was said
                self._break_off()
            raise
        self._epoch, self._after = self._epoch + 1, 0
        if self._epoch % self._recorded == 0 and walk is not None:
            next(walk, None)  # comes to its end, after which the next round can begin
            self._walk = None

    def _length(self, epoch: int) -> int:
        """Mini-batches of an epoch."""
        low, high = self._begins[epoch % self._recorded :][:2].tolist()
        return int(high - low)

    def _break_off(self) -> None:
        """End a round under way."""
        walk, self._walk, self._broken = self._walk, None, True
        if isinstance(walk, Generator):
            walk.close()

    def _seek(self, epoch: int, after: int) -> None:
        self._walk, self._broken = None, True  # the loader tells it why it has ended
        round_, number = divmod(epoch, self._recorded)
        at = int(self._begins[number]) + after
        self.loader.load_state(state_of(self.loader.identity, round_, at))
        self._epoch, self._after, self._broken = epoch, after, False

    def set_epoch(self, epoch: int) -> None:
        self._seek(epoch, 0)

    def length(self) -> int:
        """Of the epoch where training stands."""
        return self._length(self._epoch)

    def go_on(self, epoch: int, over: int) -> tuple[int, int]:
        """Its mini-batches are laid out: so many of all ranks' must be over that each has had whole ones."""
        steps, left = divmod(over, max(1, self.per_step))
        if left:
            raise ArgumentError(
                f"the state stands after {over:,} of an epoch's seeds or mini-batches, which are no whole "
                f"steps of {self.per_step:,} of these ranks, and what is compiled cannot be divided anew: "
                f"begin the next epoch, set_epoch({epoch + 1}), or go on with as many ranks as before"
            )
        self._seek(epoch, min(steps, self._length(epoch)))
        return steps, 0

    def state(self) -> dict[str, Any]:
        return state_of(self._identity, self._epoch, self._after)

    def load_state(self, state: Mapping[str, Any]) -> None:
        epoch, after, _ = position_of(state, self._identity)
        self._seek(epoch, as_count(after, "next of the state", 0, self._length(epoch)))

    @property
    def _identity(self) -> dict[str, str]:
        """The recorded trace, whose mini-batches are the same however they are laid out, and their order."""
        trace = self.loader.compiled.entry.trace_uuid
        return {"trace": trace, "shuffle": "none" if self._shuffle is None else str(self._shuffle)}

    def report(self) -> LoaderReport:
        return replace(super().report(), recorded_epochs=self._recorded)

    def close(self) -> None:
        super().close()
        self.loader.compiled.close()


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

    def go_on(self, epoch: int, over: int) -> tuple[int, int]:
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

    def go_on(self, epoch: int, over: int) -> tuple[int, int]:
        raise ArgumentError(
            "mode 'partitions' goes on in the middle of an epoch with as many ranks as before alone: begin "
            f"the next one, set_epoch({epoch + 1})"
        )
