"""The schedule of an epoch: which partitions are in memory when, in which slot, and which training nodes are
used then.

Partitions are shuffled, and a window slides over the shuffled row: step k has ``resident`` partitions from
place ``k * replaced`` on. With ``replaced = resident`` every step has partitions of its own, which is
HierBatching's mega-batch (Algorithm 1); with fewer, most of them stay from step to step, as in MariusGNN's
COMET (Waleffe et al., 2022): each is still loaded once an epoch, but with the same memory a step sees more of
the graph, for only ``replaced`` slots are needed to load ahead.

A slot holds one partition. What step k + 1 loads goes into slots that step k does not use, so that loading
and training overlap. A training node is used in exactly one of the steps in which its partition is in memory,
drawn by a hash.

Everything follows from (seed, epoch): a run can be repeated, and resumed at any step without having loaded
the ones before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.hashing import mix64
from featstore.errors import ArgumentError


@dataclass(frozen=True)
class Step:
    """One mega-batch: the partitions in memory, int64 [n], their slots, int64 [n], and which of them are to
    be loaded, bool [n]."""

    index: int
    partitions: NDArray[np.int64]
    slots: NDArray[np.int64]
    loaded: NDArray[np.bool_]


class Schedule:
    """The steps of one epoch; see the module's text. ``partitions``: int64, those that hold any rows."""

    def __init__(
        self, partitions: NDArray[np.int64], resident: int, replaced: int, seed: int, epoch: int
    ) -> None:
        if not 1 <= replaced <= resident:
            raise ArgumentError(
                f"of {resident} resident partitions 1 to {resident} can be replaced, not {replaced}"
            )
        self.seed, self.epoch = seed, epoch
        count = len(partitions)
        resident = min(resident, count)
        if replaced >= resident and count:  # steps of equal size: a small last one would be a poor mega-batch
            resident = replaced = -(-count // -(-count // resident))
        self.resident, self.replaced = resident, min(replaced, resident)
        self.steps = 0 if count == 0 else 1 + max(0, -(-(count - resident) // self.replaced))
        # What fits whole is loaded once and stays where it is: its order must be the same in every epoch.
        self.order = np.random.default_rng([seed, epoch if self.steps > 1 else 0]).permutation(partitions)
        self._place = np.argsort(self.order)
        self._names = self.order[self._place]

    @property
    def slots(self) -> int:
        """Slots that the schedule uses at most."""
        return self.resident if self.steps <= 1 else self.resident + self.replaced

    def step(self, index: int) -> Step:
        """Step ``index``. Slots go round: place i of the shuffled row has slot i modulo their number, and
        an epoch goes on where the one before ended, so that its first step can be loaded beside that one's
        last."""
        low = index * self.replaced
        high = min(len(self.order), low + self.resident)
        fresh = 0 if index == 0 else low - self.replaced + self.resident
        places = np.arange(low, high)
        past = self.epoch * self.steps * self.resident % max(1, self.slots)
        return Step(index, self.order[low:high], (past + places) % max(1, self.slots), places >= fresh)

    def steps_of(self, partitions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first and the last step in which each of these partitions is in memory, int64 [n] each."""
        place = self._place[np.searchsorted(self._names, partitions)]
        first = np.maximum(0, -(-(place - self.resident + 1) // self.replaced))
        return first, np.minimum(self.steps - 1, place // self.replaced)

    def used_in(self, rows: NDArray[np.int64], partition: NDArray[np.int64], index: int) -> NDArray[np.bool_]:
        """Which of the training ``rows``, int64 [n] of these partitions, step ``index`` uses."""
        used: NDArray[np.bool_] = self.used_by(rows, partition) == index
        return used

    def used_by(self, rows: NDArray[np.int64], partition: NDArray[np.int64]) -> NDArray[np.int64]:
        """The step that uses each of these training rows of these partitions, int64 [n]."""
        first, last = self.steps_of(partition)
        steps: NDArray[np.int64] = draw_steps(rows, first, last, np.uint64(self.seed), np.uint64(self.epoch))
        return steps


@njit(cache=True, nogil=True)
def draw_steps(
    rows: NDArray[np.int64],
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    seed: np.uint64,
    epoch: np.uint64,
) -> NDArray[np.int64]:
    """For each row a step from ``first`` to ``last``, by a hash of seed, epoch and row."""
    steps = np.empty(len(rows), np.int64)
    key = mix64(mix64(seed) ^ epoch)
    for i in range(len(rows)):
        width = np.uint64(last[i] - first[i] + 1)
        steps[i] = first[i] + np.int64((mix64(key ^ mix64(np.uint64(rows[i]))) >> np.uint64(20)) % width)
    return steps


def grouped(segments: list[tuple[str, int, int]], block_edges: int) -> list[list[tuple[int, int, int]]]:
    """Segments cut and put together to groups of at most ``block_edges`` edges of one table: (segment, low,
    high)."""
    groups: list[list[tuple[int, int, int]]] = []
    room, before = 0, ""
    for number, (table, low, high) in enumerate(segments):
        if table != before:
            room, before = 0, table
        while True:
            if room == 0:
                groups.append([])
                room = block_edges
            take = min(room, high - low)
            groups[-1].append((number, low, low + take))
            low, room = low + take, room - take
            if low == high:
                break
    return groups
