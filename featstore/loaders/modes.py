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

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from featstore.loaders.batch import Batch
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.mega.loader import MegaBatches
from featstore.loaders.prefetch import Sampler, epoch_of
from featstore.loaders.report import LoaderReport
from featstore.loaders.rolling import RollingLoader
from featstore.loaders.state import loader_state, position_of
from featstore.sampling.batches import RankedBatches
from featstore.sampling.minibatch import split
from featstore.sampling.ranked import share_of

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

    sampled: RankedBatches | None = None  # where the store samples the mini-batches for it

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def epoch(self) -> Generator[Batch]:
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
        if self.sampled is None:
            return report
        return replace(report, padded=self.sampled.padded, dropped=self.sampled.dropped)

    def close(self) -> None:
        """Give everything back."""
        self.loader.close()


class CompiledMode(Mode):
    """The recorded mini-batches of one epoch, again and again."""

    loader: CompiledLoader

    def set_epoch(self, epoch: int) -> None:
        self.loader.load_state_dict(loader_state(self.loader.compiled.pack.uuid, epoch, 0))

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

    def epoch(self) -> Generator[Batch]:
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

    def __init__(self, loader: MegaBatches, fanouts: Any, ranks: Sequence[int], **how: Any) -> None:
        """Mini-batches of these ranks in turn. ``how``: further arguments of
        :meth:`featstore.loaders.mega.batch.MegaBatch.batches`."""
        super().__init__(loader)
        self._ranks = tuple(ranks)
        self._how: dict[str, Any] = {"fanouts": fanouts, **how}
        self._share = {k: how[k] for k in ("batch_size", "world_size", "drop_last")}
        self._padded = self._dropped = 0  # seeds of this epoch that stand twice, and that are left out
        self._handed_out = 0  # since it was made

    def epoch(self) -> Generator[Batch]:
        self._padded = self._dropped = 0
        for mega in self.loader:
            share = share_of(mega.seeds, rank=0, **self._share)
            self._padded += share.padded * mega.passes
            self._dropped += share.dropped * mega.passes
            for batch in _in_turn([mega.batches(**self._how, rank=rank) for rank in self._ranks]):
                self._handed_out += 1
                yield batch
                del batch

    def report(self) -> LoaderReport:
        return replace(super().report(), batches=self._handed_out, padded=self._padded, dropped=self._dropped)


def _in_turn(ranks: Sequence[Iterator[Batch]]) -> Iterator[Batch]:
    """The next mini-batch of each, again and again; all have as many."""
    while True:
        for batches in ranks:
            batch = next(batches, None)
            if batch is None:
                return
            yield batch
            del batch
