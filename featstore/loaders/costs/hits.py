"""Which share of the rows asked for is in memory: of a buffer by each policy, and of a schedule by next
use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featstore.compile.residency import NO_NEXT_BATCH, MinCache
from featstore.loaders.costs.popularity import Popularity, learn, thinned
from featstore.tiers.slots.choose import STATIC_SPARE, replay
from featstore.tiers.slots.layout import HITS, MISSES, POLICIES, make_slot_map
from featstore.tiers.slots.slots import NO_NEXT_USE

_SLOTS = 4096  # of what is simulated, about
_BATCH_ROWS = 48  # of a mini-batch in it, at least
_DRAWN_MAX = 3_000_000  # rows that are drawn for it
_EPOCHS = 3  # of which the last counts: by then a buffer knows what is wanted often


@dataclass(frozen=True)
class Uses:
    """How the rows of a table are used: as they were seen in a whole epoch, or as a popularity says.

    ``batches``: of an epoch. ``popularity``: None where the epoch was seen whole.
    """

    ids: Sequence[NDArray[np.int64]]
    batches: int
    popularity: Popularity | None

    @classmethod
    def of(cls, ids: Sequence[NDArray[np.int64]], batches: int, table_rows: int) -> Uses:
        """From mini-batches' distinct ids."""
        return cls(ids, batches, None if len(ids) == batches else learn(ids, table_rows))

    @property
    def batch_rows(self) -> float:
        return sum(map(len, self.ids)) / len(self.ids)

    def drawn(self, slots: int, epochs: int) -> tuple[list[NDArray[np.int64]], int, float]:
        """So many epochs scaled down for a buffer of ``slots``: (mini-batches, rows of the table, rate)."""
        rate = min(1.0, max(_SLOTS / max(1, slots), _BATCH_ROWS / max(1.0, self.batch_rows)))
        total = self.batch_rows * self.batches * epochs
        rate = min(rate, _DRAWN_MAX / max(1.0, total))
        if self.popularity is None:
            found, rows = thinned(self.ids, rate)
            return found * epochs, rows, rate
        return *self.popularity.draw(self.batches * epochs, rate), rate

    def buffer_hit_rate(self, slots: int, policies: Sequence[str]) -> float:
        """Of the third epoch, by the best of these policies (``"static"`` knows the uses)."""
        trace, _, rate = self.drawn(slots, _EPOCHS)
        found = [self._replayed(trace, max(1, round(slots * rate)), p) for p in policies if p != "static"]
        if "static" in policies:
            found.append(self._most_wanted(slots - STATIC_SPARE * int(max(map(len, self.ids)))))
        return max(found)

    def _replayed(self, trace: list[NDArray[np.int64]], slots: int, policy: str) -> float:
        m = make_slot_map(max(1, min(slots, sum(map(len, trace)))), POLICIES[policy])  # more stay empty
        last = len(trace) // _EPOCHS
        for part in (trace[:-last], trace[-last:]):
            m.counts[[HITS, MISSES]] = 0
            offsets = np.concatenate([[0], np.cumsum([len(one) for one in part])])
            replay(m, np.concatenate(part), offsets.astype(np.int64), NO_NEXT_USE, False)
        return float(m.counts[HITS] / max(1, m.counts[HITS] + m.counts[MISSES]))

    def _most_wanted(self, slots: int) -> float:
        if slots <= 0:
            return 0.0
        if self.popularity is not None:
            return self.popularity.hit_rate_of_most_wanted(slots)
        uses = np.sort(np.unique(np.concatenate(self.ids), return_counts=True)[1])[::-1]
        return float(uses[:slots].sum() / max(1, uses.sum()))

    def scheduled(self, slots: int) -> tuple[float, float]:
        """Of a schedule by next use, for an epoch that is gone through again and again: the hit rate, and
        the share of the slots whose rows are brought back before the next round."""
        trace, rows, rate = self.drawn(slots, 1)
        batches = len(trace)
        ahead = np.full(rows, NO_NEXT_BATCH, np.int32)
        next_use: list[NDArray[np.int32]] = [np.empty(0, np.int32)] * batches
        for index in range(batches - 1, -1, -1):
            next_use[index] = ahead[trace[index]]
            ahead[trace[index]] = index  # at the end: the first use of each row
        for index, one in enumerate(next_use):
            again = one == NO_NEXT_BATCH
            one[again] = ahead[trace[index]][again] + batches
        cache = MinCache(rows, min(rows, round(slots * rate)), 2 * batches)
        hits, start = 0, np.empty(0, np.int64)
        for turn in range(2):
            found = [cache.step(index, trace[index], next_use[index])[1] for index in range(batches)]
            hits = sum(found)
            if not turn:
                cache.turn(batches)
                start = cache.row_of_slot[cache.row_of_slot >= 0]
        restored = float((cache.slot_of_row[start] < 0).mean()) if len(start) else 0.0
        return hits / max(1, sum(map(len, trace))), restored
