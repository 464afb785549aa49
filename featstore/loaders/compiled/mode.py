"""Mode compiled: the mini-batches of the first epochs again and again, their rows laid out for them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_count, as_flag, as_mapping
from featstore.base.state import position_of, state_of
from featstore.base.warning import warn
from featstore.compile.options import size_or_nothing
from featstore.errors import ArgumentError, ClosedError
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.compiled.trace import CompiledTrace
from featstore.loaders.divided import GivenShare
from featstore.loaders.modes import Mode
from featstore.loaders.prefetch import Sampler
from featstore.loaders.report import LoaderReport
from featstore.loaders.train import compiled_once
from featstore.storage.store import OpenStore
from featstore.units import format_bytes


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
    was_there = True
    if batches is not None and name is not None:
        epochs = epochs or 1
        said = {"sampled_by": sampled_by, "memory": memory, **options}
        was_there = compiled_once(store, batches, name, epochs=epochs, reuse=reuse, **said)
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
        if was_there and options.get("device_memory") is not None:
            _check_device_rows(compiled, size_or_nothing(options["device_memory"], "device_memory"), name)
        return CompiledMode(compiled, seed if shuffle else None, memory=memory, **loader)
    except BaseException:
        compiled.close()
        raise


def _check_device_rows(compiled: CompiledTrace, given_bytes: int, name: str | None) -> None:
    """Raise ArgumentError where a trace was compiled for another accelerator than has so much memory."""
    tables = [compiled.pack.tables[one.device] for one in compiled.entry.tables.values()]
    found = sum(table.data_bytes for table in tables)
    if not min(1, given_bytes) <= found <= given_bytes:
        keeps = f"keeps {format_bytes(found)} of rows there" if found else "keeps no rows there"
        raise ArgumentError(
            f"device_memory= is {format_bytes(given_bytes)}, and what reuse= finds under the name {name!r} "
            f"{keeps}: leave device_memory= out to take it so, or give another name=, or leave out reuse="
        )


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
    if sampled_by and not compiled.sampled_by:
        warn(
            f"reuse= finds mini-batches under the name {name!r} that were compiled from a trace, and nothing "
            "says what they were sampled from, so that seeds=, fanouts= and other options of sampling are "
            "not compared with that: leave these out, and they are taken as they are"
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
                if self._walk is not walk:  # and the place is another one
                    raise ClosedError(
                        "another iteration of this loader has begun, or its epoch or state was set"
                    )
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

    def go_on(self, epoch: int, over: int, was: Mapping[str, Any] | None = None) -> tuple[int, int]:
        """Its mini-batches are laid out: so many of all ranks' must be over that each has had whole ones, and
        these the first of the same order."""
        of = {} if was is None else as_mapping(was.get("of"), "'of' of the state", "names to values")
        if isinstance(self.share, GivenShare) and not self.share.of_links:
            self.share.check_rest(over)
        steps, left = divmod(over, max(1, self.per_step))
        because = ""
        if was is not None and was.get("next") and not (over and self.per_step):
            because = "how many are over in a step of all ranks together is not known on both sides"
        elif left:
            because = (
                f"{over:,} of the epoch's seeds or mini-batches are no whole steps of {self.per_step:,} of "
                "these ranks"
            )
        elif over and not {of.get("shuffle"), self._identity["shuffle"]} <= {None, "none"}:
            because = "with shuffle=True mini-batches of other ranks or sizes are in another order"
        elif over and "epochs" not in of:
            because = "it does not say how many epochs were recorded, as those of before"
        elif over and epoch % as_count(of["epochs"], "epochs of the state") != epoch % self._recorded:
            because = f"epoch {epoch} repeats another of the recorded epochs than there"
        if because:
            raise ArgumentError(
                f"the state stands in the middle of an epoch, and {because}; what is compiled cannot be "
                f"divided anew: begin the next epoch, set_epoch({epoch + 1}), or go on with what there was"
            )
        self._seek(epoch, min(steps, self._length(epoch)))
        return steps, 0

    def state(self) -> dict[str, Any]:
        return state_of(self._identity, self._epoch, self._after)

    def load_state(self, state: Mapping[str, Any]) -> None:
        epoch, after, _ = position_of(self._told(state), self._identity)
        self._seek(epoch, as_count(after, "next of the state", 0, self._length(epoch)))

    def _told(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A state from when they did not say how many epochs were recorded, which the trace tells."""
        of = state.get("of") if isinstance(state, Mapping) else None
        return {**state, "of": {"epochs": self._recorded, **of}} if isinstance(of, Mapping) else state

    @property
    def _identity(self) -> dict[str, Any]:
        """The recorded trace, whose mini-batches are the same however they are laid out, and their order."""
        trace = self.loader.compiled.entry.trace_uuid
        shuffle = "none" if self._shuffle is None else str(self._shuffle)
        return {"trace": trace, "shuffle": shuffle, "epochs": self._recorded}

    def report(self) -> LoaderReport:
        return replace(super().report(), recorded_epochs=self._recorded)

    def close(self) -> None:
        super().close()
        self.loader.compiled.close()
