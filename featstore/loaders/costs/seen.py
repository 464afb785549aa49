"""The mini-batches of an epoch that are looked at beforehand: a few of them, within some seconds; all of them
where that is quick enough."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.sequences import known_length
from featstore.errors import ArgumentError, SourceError
from featstore.loaders.divided import drawn_here
from featstore.loaders.online.content import Content
from featstore.loaders.prefetch import Sampler, epoch_of
from featstore.loaders.whole import Whole
from featstore.sampling.minibatch import split, table_of
from featstore.trace.sample_encoder import encode

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore

LEAST_BATCHES = 16  # are looked at, where there are so many
_IDS_MAX = 4_000_000  # of all that is looked at: 32 MB


@dataclass(frozen=True)
class Looked:
    """Mini-batches that were looked at.

    ``ids``: by table, distinct node ids of each, ascending. ``asked``: by table, ids of each, those that
    stand twice counted twice. ``sample_bytes``: of each, encoded as in a trace. ``held_bytes``: the most
    that one holds beside its ids, where mini-batches are sampled here. ``epoch_batches``: in an epoch.
    ``batch_seconds``, ``batch_cpu_seconds``: of sampling one, by the clock and of this process's
    cores. ``seconds``: that looking took.
    """

    ids: dict[str, list[NDArray[np.int64]]]
    asked: dict[str, list[int]]
    sample_bytes: list[int]
    held_bytes: int
    epoch_batches: int
    batch_seconds: float
    batch_cpu_seconds: float
    seconds: float

    @property
    def batches(self) -> int:
        return len(self.sample_bytes)

    @property
    def whole(self) -> bool:
        """All of an epoch."""
        return self.batches == self.epoch_batches

    def mean_asked(self, table: str) -> float:
        """Ids of a mini-batch."""
        return statistics.fmean(self.asked[table])


def look_at_batches(
    store: OpenStore, batches: Sampler, nodes: Callable[[Any], Any] | None, whole: Whole, *,
    seconds: float, share: float, epoch_batches: int | None = None,
) -> Looked:  # fmt: skip
    """Look at mini-batches of epoch 0 for about ``seconds``, and at ``share`` of them at most, or 16. Those
    that can be asked for by number are taken from all over the epoch, of others the first.

    Raises ArgumentError where nobody knows how many an epoch has, or it has others than ``epoch_batches``,
    SourceError where there are none, and what
    sampling raises.
    """
    begin = time.perf_counter()
    epoch = epoch_of(batches, 0)
    length = known_length(epoch)
    if length is not None and epoch_batches not in (None, length):
        raise ArgumentError(
            f"epoch_batches={epoch_batches:,}: an epoch has {length:,} mini-batches; leave it out, it is for "
            "those without a length"
        )
    count = epoch_batches if length is None else length
    most = None if count is None else min(count, max(LEAST_BATCHES, int(share * count)))
    ids: dict[str, list[NDArray[np.int64]]] = {}
    asked: dict[str, list[int]] = {}
    sizes: list[int] = []
    held_most, drawn = 0, drawn_here(batches)
    times: list[tuple[float, float]] = []
    held, last, ended = 0, _clocks(), False
    recorded = iter(whole.recorded(_Chosen(epoch, most), nodes).epoch(0))
    while most is None or len(sizes) < most:
        one = next(recorded, None)
        if one is None:
            ended = True
            break
        now = _clocks()
        times.append((now[0] - last[0], now[1] - last[1]))
        held += _note(store, one, ids, asked, sizes)
        held_most = max(held_most, Content.of(*split(one), own=True).sample_bytes if drawn else 0)
        enough = time.perf_counter() - begin > seconds and len(sizes) >= 2
        if enough or held > _IDS_MAX:
            break
        last = _clocks()
    if ended or (count is not None and len(sizes) == count):
        count = len(sizes)
    if not sizes:
        raise SourceError("the mini-batches are none: there is nothing to forecast")
    if count is None:
        raise ArgumentError(
            "the mini-batches have no length, and looking at all of them takes too long: say how many an "
            "epoch has, epoch_batches="
        )
    for table, lists in ids.items():  # mini-batches without a row of it
        lists += [np.empty(0, np.int64)] * (len(sizes) - len(lists))
        asked[table] += [0] * (len(sizes) - len(asked[table]))
    each = [statistics.fmean(one) for one in zip(*(times[1:] or times), strict=True)]  # the first wakes
    return Looked(ids, asked, sizes, held_most, count, each[0], each[1], time.perf_counter() - begin)


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class _Chosen:
    """``most`` mini-batches of an epoch, from all over it where it can be asked by number; None: all, one
    after the other."""

    def __init__(self, epoch: Iterable[Any], most: int | None) -> None:
        self._epoch, self._most = epoch, most

    def __iter__(self) -> Iterator[Any]:
        epoch, most = self._epoch, self._most
        if most is None or not isinstance(epoch, Sequence):
            return iter(epoch)
        return (epoch[number * len(epoch) // most] for number in range(most))


def _note(
    store: OpenStore, one: Any, ids: dict[str, list[NDArray[np.int64]]], asked: dict[str, list[int]],
    sizes: list[int]
) -> int:  # fmt: skip
    """Note a mini-batch; returns how many ids are held for it."""
    found, sample = split(one)
    held = 0
    for node_type, given in found.items():
        table = table_of(store, node_type, "the mini-batches have")
        lists, counts = ids.setdefault(table, []), asked.setdefault(table, [])
        lists += [np.empty(0, np.int64)] * (len(sizes) - len(lists))
        counts += [0] * (len(sizes) - len(counts))
        lists.append(np.unique(np.asarray(given, np.int64)))
        counts.append(len(given))
        held += len(lists[-1])
    sizes.append(len(encode(sample)))
    return held
