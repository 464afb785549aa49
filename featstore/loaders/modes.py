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

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_count, as_flag, check_state
from featstore.errors import ArgumentError
from featstore.loaders.batch import Batch
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.compiled.trace import CompiledTrace
from featstore.loaders.mega.loader import MegaBatches
from featstore.loaders.prefetch import Sampler, epoch_of
from featstore.loaders.report import LoaderReport
from featstore.loaders.rolling import RollingLoader
from featstore.loaders.state import loader_state, position_of
from featstore.loaders.train import compiled_once
from featstore.sampling.minibatch import split
from featstore.sampling.ranked import share_of
from featstore.storage.store import OpenStore

MODES = ("online", "compiled", "rolling", "partitions")
_IDS = "featstore.n_id"  # under which a recorded mini-batch keeps ids that its sample does not have


class Recorded:
    """Mini-batches that are recorded so that what a training loop gets knows their node ids."""

    def __init__(self, batches: Sampler, nodes: Callable[[Any], Any] | None) -> None:
        self.sampler, self._nodes = batches, nodes

    def epoch(self, number: int) -> Iterable[Any]:
        return _Epoch(self.sampler, self._nodes, number)


class _Epoch:
    """The mini-batches of one epoch, as pairs of ids and sample."""

    def __init__(self, batches: Sampler, nodes: Callable[[Any], Any] | None, number: int) -> None:
        self._batches, self._nodes, self._number = batches, nodes, number

    def __iter__(self) -> Iterator[Any]:
        for one in epoch_of(self._batches, self._number):
            ids, sample = split(one, self._nodes)
            known = sample if _knows_ids(sample) else {_IDS: _plain(ids), "sample": sample}
            yield ids, known


def _knows_ids(sample: Any) -> bool:
    if isinstance(sample, Mapping):
        return False
    pyg = type(sample).__module__.startswith("torch_geometric.")
    return pyg or getattr(sample, "node", None) is not None


def _plain(ids: Mapping[str, Any]) -> Any:
    return ids[""] if list(ids) == [""] else dict(ids)


def as_batch(made: Any) -> Batch:
    """What a loader of any mode has made, as a :class:`Batch`: PyG's objects bring their rows along."""
    if isinstance(made, Batch):
        if isinstance(made.sample, Mapping) and _IDS in made.sample:
            made.n_id, made.sample = made.sample[_IDS], made.sample["sample"]
        return made
    if hasattr(made, "node_types"):
        kinds = [t for t in made.node_types if "n_id" in made[t]]
        return Batch(0, {t: made[t].n_id for t in kinds}, {t: made[t].x for t in kinds}, made)
    return Batch(0, made.n_id, made.x, made)


class Mode:
    """A way to train, over the loader that does it. This is ``online``; the others differ in what they
    override."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def epoch(self) -> Iterator[Batch]:
        """The mini-batches of the epoch where training stands, or what is left of it."""
        for made in self.loader:
            yield as_batch(made)
            del made

    def set_epoch(self, epoch: int) -> None:
        """Stand at the begin of this epoch."""
        self.loader.set_epoch(epoch)

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


def compiled_mode(
    store: OpenStore, batches: Recorded, name: str, *, reuse: bool = False, recorded_epochs: int = 1,
    shuffle: bool = False, seed: int = 0, memory: int, loader: dict[str, Any], **options: Any,
) -> CompiledMode:  # fmt: skip
    """Record and compile mini-batches under ``name``, or take what is there, as :class:`Loader` describes.
    ``loader``, ``options``: of the loader, and of compiling."""
    reuse, shuffle = as_flag(reuse, "reuse"), as_flag(shuffle, "shuffle")
    epochs = as_count(recorded_epochs, "recorded_epochs")
    if shuffle:
        _check_shuffled(options.get("residency", "min"))
    compiled_once(store, batches.epoch, name, epochs=epochs, reuse=reuse, memory=memory, **options)
    compiled = CompiledTrace(store, name)
    try:
        found = len(compiled.epochs()) - 1
        if found != epochs:
            raise ArgumentError(
                f"reuse= finds {found} recorded epochs under the name {name!r}, not recorded_epochs={epochs}"
            )
        if shuffle:
            _check_shuffled(compiled.entry.residency)
        return CompiledMode(compiled, seed if shuffle else None, memory=memory, **loader)
    except BaseException:
        compiled.close()
        raise


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

    def epoch(self) -> Iterator[Batch]:
        length = self._length(self._epoch)
        if self._broken:
            self._seek(self._epoch, self._after)
        if self._walk is None and self._after < length:
            self._walk = iter(self.loader)
        walk = self._walk
        try:
            while self._after < length:
                assert walk is not None
                batch = as_batch(next(walk))
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
        self._walk = None  # the loader tells it why it has ended
        round_, number = divmod(epoch, self._recorded)
        at = int(self._begins[number]) + after
        self.loader.load_state_dict(loader_state(self.loader.compiled.pack.uuid, round_, at))
        self._epoch, self._after, self._broken = epoch, after, False

    def set_epoch(self, epoch: int) -> None:
        self._seek(epoch, 0)

    def state(self) -> dict[str, Any]:
        """That of the recorded trace, whose mini-batches are the same however they are laid out."""
        made = loader_state(self.loader.compiled.entry.trace_uuid, self._epoch, self._after)
        return made | {"shuffle": "none" if self._shuffle is None else str(self._shuffle)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        compiled, shuffle = self.loader.compiled, "none" if self._shuffle is None else str(self._shuffle)
        epoch, after = position_of(state, compiled.entry.trace_uuid)
        position_of(state, compiled.entry.trace_uuid, self._length(epoch))
        check_state(state, {"shuffle": shuffle}, "this loader has")
        self._seek(epoch, after)

    def report(self) -> LoaderReport:
        return replace(super().report(), recorded_epochs=self._recorded)

    def close(self) -> None:
        super().close()
        self.loader.compiled.close()


class RollingMode(Mode):
    """Fresh mini-batches every epoch, prepared beside the training on those before."""

    loader: RollingLoader

    def epoch(self) -> Iterator[Batch]:
        for batch in super().epoch():  # which has no end
            last = self.loader.state_dict()["next"] == 0
            yield batch
            del batch
            if last:
                return

    def set_epoch(self, epoch: int) -> None:
        self.loader.seek(epoch)

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

    def epoch(self) -> Iterator[Batch]:
        self._padded = self._dropped = 0
        for mega in self.loader:
            share = share_of(mega.seeds, **self._share)
            self._padded += share.padded * mega.passes
            self._dropped += share.dropped * mega.passes
            for batch in mega.batches(**self._how):
                self._handed_out += 1
                yield batch
                del batch

    def report(self) -> LoaderReport:
        return replace(super().report(), batches=self._handed_out, padded=self._padded, dropped=self._dropped)
