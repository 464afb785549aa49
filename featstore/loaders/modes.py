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

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from featstore.arguments import as_count
from featstore.loaders.batch import Batch
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.mega.loader import MegaBatches
from featstore.loaders.online.loader import OnlineLoader
from featstore.loaders.prefetch import Sampler, epoch_of
from featstore.loaders.report import LoaderReport
from featstore.loaders.rolling import RollingLoader
from featstore.loaders.state import loader_state, position_of
from featstore.sampling.minibatch import split
from featstore.sampling.ranked import share_of

MODES = ("online", "compiled", "rolling", "partitions")
_IDS = "featstore.n_id"  # under which a recorded mini-batch keeps ids that its sample does not have


class Mode(Protocol):
    """A way to train."""

    def epoch(self) -> Iterator[Batch]:
        """The mini-batches of the epoch where training stands, or what is left of it; where one was broken
        off, those of the next."""

    def set_epoch(self, epoch: int) -> None:
        """Stand at the begin of this epoch."""

    def state(self) -> dict[str, Any]:
        """Where training stands."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Stand there."""

    def report(self) -> LoaderReport:
        """What has been measured."""

    def close(self) -> None:
        """Give everything back."""


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


def as_batch(index: int, made: Any) -> Batch:
    """What a loader of any mode has made, as a :class:`Batch`: PyG's objects bring their rows along."""
    if isinstance(made, Batch):
        made.index = index
        if isinstance(made.sample, Mapping) and _IDS in made.sample:
            made.n_id, made.sample = made.sample[_IDS], made.sample["sample"]
        return made
    if hasattr(made, "node_types"):
        kinds = [t for t in made.node_types if "n_id" in made[t]]
        return Batch(index, {t: made[t].n_id for t in kinds}, {t: made[t].x for t in kinds}, made)
    return Batch(index, made.n_id, made.x, made)


class OnlineMode:
    """Mini-batches as they come."""

    def __init__(self, loader: OnlineLoader) -> None:
        self.loader = loader

    def epoch(self) -> Iterator[Batch]:
        for made in self.loader:
            yield as_batch(self.loader.state_dict()["next"] - 1, made)
            del made

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)

    def state(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state)

    def report(self) -> LoaderReport:
        return self.loader.report()

    def close(self) -> None:
        self.loader.close()


class CompiledMode:
    """The recorded mini-batches of one epoch, again and again."""

    def __init__(self, loader: CompiledLoader) -> None:
        self.loader = loader

    def epoch(self) -> Iterator[Batch]:
        for made in self.loader:
            yield as_batch(self.loader.state_dict()["next"] - 1, made)
            del made

    def set_epoch(self, epoch: int) -> None:
        self.loader.load_state_dict(loader_state(self.loader.compiled.pack.uuid, epoch, 0))

    def state(self) -> dict[str, Any]:
        """That of the recorded trace, whose mini-batches are the same however they are laid out."""
        return self.loader.state_dict() | {"store": self.loader.compiled.entry.trace_uuid}

    def load_state(self, state: Mapping[str, Any]) -> None:
        compiled = self.loader.compiled
        epoch, after = position_of(state, compiled.entry.trace_uuid, len(compiled))
        self.loader.load_state_dict(loader_state(compiled.pack.uuid, epoch, after))

    def report(self) -> LoaderReport:
        return self.loader.report()

    def close(self) -> None:
        self.loader.close()
        self.loader.compiled.close()


class RollingMode:
    """Fresh mini-batches every epoch, prepared beside the training on those before."""

    def __init__(self, loader: RollingLoader) -> None:
        self.loader = loader
        self._begun = False

    def epoch(self) -> Iterator[Batch]:
        if self._begun:
            self.loader.next_episode()
        self._begun = True
        index = self.loader.state_dict()["next"]
        for made in self.loader:
            batch = as_batch(index, made)
            del made
            index += 1
            last = self.loader.state_dict()["next"] == 0
            self._begun = not last
            yield batch
            del batch
            if last:
                return

    def set_epoch(self, epoch: int) -> None:
        self.load_state(self.loader.state_dict() | {"epoch": epoch, "next": 0})

    def state(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state)
        self._begun = False

    def report(self) -> LoaderReport:
        return self.loader.report()

    def close(self) -> None:
        self.loader.close()


class PartitionsMode:
    """Mini-batches sampled inside random collections of partitions."""

    def __init__(self, loader: MegaBatches, fanouts: Any, **how: Any) -> None:
        """``how``: further arguments of :meth:`featstore.loaders.mega.batch.MegaBatch.batches`."""
        self.loader = loader
        self._how: dict[str, Any] = {"fanouts": fanouts, **how}
        self._share = {k: how[k] for k in ("batch_size", "rank", "world_size", "drop_last")}
        self._uneven = [0, 0]  # seeds of this epoch that stand twice, and that are left out
        self._next, self._epoch, self._begun = 0, 0, False
        self._handed_out = 0  # since it was made

    def epoch(self) -> Iterator[Batch]:
        if self._begun:
            self.set_epoch(self._epoch + 1)
        self._begun = True
        self._uneven = [0, 0]
        for mega in self.loader:
            share = share_of(mega.seeds, **self._share)
            self._uneven[0] += share.padded * mega.passes
            self._uneven[1] += share.dropped * mega.passes
            for made in mega.batches(**self._how):
                self._next += 1
                self._handed_out += 1
                yield as_batch(self._next - 1, made)
                del made
        self._epoch, self._next, self._begun = self._epoch + 1, 0, False

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)
        self._epoch, self._next, self._begun = epoch, 0, False

    def state(self) -> dict[str, Any]:
        return self.loader.state_dict() | {"batches": self._next}

    def load_state(self, state: Mapping[str, Any]) -> None:
        after = as_count(state.get("batches"), "batches of the state", 0)
        self.loader.load_state_dict(dict(state))
        self._epoch, self._next, self._begun = int(state["epoch"]), after, False

    def report(self) -> LoaderReport:
        padded, dropped = self._uneven
        return replace(self.loader.report(), batches=self._handed_out, padded=padded, dropped=dropped)

    def close(self) -> None:
        self.loader.close()
