"""The choice of a policy: small shadows of the feature buffer try all of them on a sample of the rows.

Which policy hits most depends on graph, sampler, order and size, and the differences are large; so they are
tried. A sample of the *rows*, chosen by a hash (spatial sampling, SHARDS: Waldspurger et al., FAST'15), sees
every use of the rows that are in it, so a buffer scaled down by the same factor hits about as often as the
whole one (ATC'17, by the same, for any policy). The shadows have ``SHADOW_SLOTS`` slots, whatever the size of
the buffer, and lie in the CPU's cache.

*Mini-batches stay mini-batches.* What is sampled of one is acquired at once, and released before the next;
rows in use pin slots in a shadow as in the buffer. By chance a sampled mini-batch may have a few rows more
than the shadow has slots. They are left out, and count as misses, for each policy alike.

*A window* is what is seen between two decisions, an epoch for instance, or its beginning: ``LOG_ROWS``
sampled rows, which bounds the cost. :meth:`PolicyChoice.observe` only notes them; :meth:`PolicyChoice.decide`
replays them. Shadows keep their rows from window to window. In the first window only the second half counts,
and nothing before the shadows are full, so that a cold start says nothing.

*The static set* is the rows that were used most, of all rows, not of the sample (16 bits a row; halved after
each window, so that they follow a drift), or given beforehand. A window tries the set that was chosen from
the windows before it, so a set that is out of date by then is found out. In the first window there is none;
and a set chosen by a window hits better in this very window than it will in the next. If uses came by chance
alone, they had to be judged by the uses of their row *without them* (leave one out: a row with one use less
than the set asks for counts as a miss); if they were the same each time, as they were seen. They are
something in between (a seed is one in each epoch, and a fan-out takes most of a short list): what counts is
the mean of the two.

*Hysteresis.* Another policy has to be better by ``MARGIN`` than the one in use. The sample is the same rows
in each window, so its error is the same, too, and does not make the choice go to and fro.

Not for several threads at once. Equal seeds and mini-batches give equal choices.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.hashing import batch_key, mix64
from featstore.errors import ArgumentError, BudgetError, IdError
from featstore.tiers.slots.acquisition import acquire_rows
from featstore.tiers.slots.layout import (
    EVICTIONS,
    HITS,
    MISSES,
    POLICIES,
    PRESENT,
    STATIC,
    SlotMap,
    make_slot_map,
    slot_map_bytes,
)
from featstore.tiers.slots.slots import KEEP, NO_NEXT_USE, acquire, complete, unpin
from featstore.tiers.slots.uses import count_uses, find_wanted, halve_uses, note_rows

__all__ = ["CANDIDATES", "PolicyChoice", "replay"]

#: What is tried, the cheapest first.
CANDIDATES = ("fifo", "clock", "sieve", "lru", "s3-fifo", "score", "static")
SHADOW_SLOTS = 2048
LOG_ROWS = 1 << 17
_ROWS_PER_BATCH = 4  # of the sample; bounds the number of mini-batches in the log
MARGIN = 0.01
#: Mini-batches that a buffer must have room for beside its static set: one in use, one on its way.
STATIC_SPARE = 2

_LEAST_COUNTED = 1000  # uses, below which a window says nothing
_SEARCHED = 1 << 17  # rows in which a piece of a static set is looked for


@njit(cache=True, nogil=True)
def replay(
    m: SlotMap, rows: NDArray[np.int64], offsets: NDArray[np.int64], next_use: NDArray[np.int32], evict: bool
) -> Any:
    """Pass mini-batches through a slot map, each acquired, read and released before the next. Nothing is
    read.

    ``rows``: int64 [n], those of mini-batch b are ``rows[offsets[b]:offsets[b + 1]]``. ``next_use``: int32
    [n] for MIN, else empty. ``evict``: stop after the mini-batch that evicted first. Rows at the end of a
    mini-batch that do not fit beside the others count as misses. Returns how many mini-batches were replayed.
    """
    room = np.int64(0)
    for b in range(offsets.shape[0] - 1):
        room = max(room, offsets[b + 1] - offsets[b])
    slots_out, missed, waits = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int32)
    outcome, once = np.zeros(3, np.int64), np.ones(1, np.int64)
    for b in range(offsets.shape[0] - 1):
        begin, end = offsets[b], offsets[b + 1]
        while True:
            uses = next_use[begin:end] if next_use.shape[0] > 0 else next_use
            acquire_rows(m, rows[begin:end], uses, slots_out, missed, waits, outcome)
            if outcome[0] >= 0:
                break
            end += outcome[0]
        m.counts[MISSES] += offsets[b + 1] - end
        for j in range(outcome[0]):
            waits[j] = slots_out[missed[j]]
        once[0] = 1
        unpin(m, waits[: outcome[0]], PRESENT, once)
        once[0] = 1
        unpin(m, slots_out[: end - begin], KEEP, once)
        if evict and m.counts[EVICTIONS] > 0:
            return b + 1
    return offsets.shape[0] - 1


class PolicyChoice:
    """Finds the policy of a feature buffer; see the module's text.

    Args:
        slots: of the buffer.
        row_count: rows of the table.
        seed: of the sample.
        policy: what the buffer begins with.
        static_ids: rows from the most wanted down (integers [n]), for the policy "static"; by default uses
            are counted, if memory allows.
        batch_rows: of the largest mini-batch, where it is known beforehand: beside a static set there are
            slots for two of these, else for two of the largest in the window.
        memory_bytes: limit, which only says whether uses are counted (2 bytes a row) beside about 2 MiB that
            are always needed.

    Raises BudgetError where the limit is below what is always needed, ValueError for an unknown policy.
    """

    def __init__(
        self, slots: int, row_count: int, seed: int = 0, *, policy: str = "lru", static_ids: Any = None,
        batch_rows: int = 0, memory_bytes: int | None = None,
    ) -> None:  # fmt: skip
        if policy not in CANDIDATES:
            raise ArgumentError(f"no policy {policy!r} to begin with; there are {', '.join(CANDIDATES)}")
        if slots < 1 or row_count < 1:
            raise ArgumentError(f"a buffer has at least one slot and one row, not {slots} and {row_count}")
        self.slots, self.row_count, self.policy = operator.index(slots), operator.index(row_count), policy
        self.shadow_slots = min(self.slots, SHADOW_SLOTS)
        self._rate = self.shadow_slots / self.slots
        self._threshold = _share_of_hashes(self._rate)
        self._key, self._tie_key = (np.uint64(batch_key(seed, 0, use)) for use in range(2))
        self._given = None if static_ids is None else np.array(static_ids[: self.slots], np.int64)
        self._maps = {
            name: make_slot_map(self.shadow_slots, POLICIES[name]) for name in CANDIDATES if name != "static"
        }
        self._log = np.empty(LOG_ROWS, np.int64)
        self._offsets = np.zeros(LOG_ROWS // _ROWS_PER_BATCH + 1, np.int64)
        fixed_bytes = self._fixed_bytes()
        if memory_bytes is not None and memory_bytes < fixed_bytes:
            raise BudgetError(fixed_bytes, memory_bytes, "try the policies on a sample of the rows")
        counted = static_ids is None and (memory_bytes is None or fixed_bytes + 2 * row_count <= memory_bytes)
        self._uses = np.zeros(row_count if counted else 0, np.uint16)
        #: Hit rates of the shadows in the latest window, by policy; empty where nothing can be said.
        self.hit_rates: Mapping[str, float] = {}
        self._full = False  # the shadows have been filled, and count
        self._kept = np.empty(0, np.int64)  # the static set of the last decision, what of it is in the sample
        self._kept_rows = 0  # all of it
        self._batch_rows_least = operator.index(batch_rows)
        self._at = self._batches = self._batch_rows_max = 0
        self._noting = True
        #: Whether :meth:`decide` has been asked since the last mini-batch.
        self.decided = False
        self._open_window()
        self._load_kernels()

    def _load_kernels(self) -> None:
        """Run every kernel on nothing, so that numba loads or compiles it now and not beside training."""
        none, nothing, word = np.empty(0, np.int64), self._uses[:0], self._threshold
        note_rows(none, 1, word, word, nothing, none, 0)
        replay(self._maps[CANDIDATES[0]], none, np.zeros(1, np.int64), NO_NEXT_USE, False)
        find_wanted(nothing, 0, 0, word, word, word, word)
        count_uses(nothing)
        halve_uses(nothing)
        mix64(np.empty(0, np.uint64))

    def _fixed_bytes(self) -> int:
        # one comes and goes
        maps = sum(slot_map_bytes(self.shadow_slots, POLICIES[name]) for name in CANDIDATES)
        given = 0 if self._given is None else self._given.nbytes
        kept = 2 * 8 * self.shadow_slots  # static rows in the sample, which are as many only in the mean
        return maps + kept + self._log.nbytes + self._offsets.nbytes + given

    @property
    def memory_bytes(self) -> int:
        """Memory that is held, bytes. While it decides, at most 4 MiB more."""
        return self._fixed_bytes() + self._uses.nbytes

    def observe(self, ids: NDArray[Any]) -> None:
        """Note a mini-batch, integers [n]: the rows that the buffer is asked for. Raises IdError for what is
        no row."""
        if self.decided:
            halve_uses(self._uses)
            self._open_window()
        rows = np.ascontiguousarray(ids, np.int64)
        at = self._at if self._noting else -1
        end = int(note_rows(rows, self.row_count, self._key, self._threshold, self._uses, self._log, at))
        if end < -1:
            raise IdError(f"id {rows[-2 - end]} is no row: there are rows 0 to {self.row_count - 1:,}")
        self._batch_rows_max = max(self._batch_rows_max, len(rows))
        self._noting = end >= 0
        if self._noting:
            self._at = end
            self._batches += 1
            self._offsets[self._batches] = end
            self._noting = self._batches < len(self._offsets) - 1

    def _open_window(self) -> None:
        self._at = self._batches = 0
        self._batch_rows_max = self._batch_rows_least
        self._noting, self.decided = True, False

    @property
    def full(self) -> bool:
        """The window takes no more: what follows is only counted."""
        return not self._noting

    def decide(self) -> str:
        """The policy to go on with, from what was seen since the last decision; a new window begins with the
        next mini-batch."""
        if not self.decided:
            self.decided = True
            self.hit_rates = self._try_all() if self.slots < self.row_count else {}
            if self.hit_rates:
                best = max(self.hit_rates, key=lambda name: self.hit_rates[name])  # the cheapest of equals
                if self.hit_rates[best] > self.hit_rates.get(self.policy, 0.0) + MARGIN:
                    self.policy = best
                self._kept_rows = self._static_rows()
                self._kept = self._wanted(self._kept_rows, self._threshold)
        return self.policy

    def static_ids(self) -> Iterator[NDArray[np.int64]]:
        """The rows that the policy "static" keeps, in pieces, all different. Call it after :meth:`decide`,
        before the next mini-batch."""
        count = self._static_rows()
        if self._given is not None or count == 0:
            yield self._wanted(count, _share_of_hashes(1.0))
            return
        above, share = self._asked_for(count)
        left = count - int(count_uses(self._uses)[above + 1 :].sum())  # of those with just as many uses
        for low in range(0, len(self._uses), _SEARCHED):
            uses = self._uses[low : low + _SEARCHED]
            whole = _share_of_hashes(1.0)
            found = find_wanted(uses, low, above, self._tie_key, _share_of_hashes(share), self._key, whole)
            equal = np.flatnonzero(uses[found - low] == above)
            yield np.delete(found, equal[left:])  # chance may give some more than asked for
            left -= min(left, len(equal))

    def _static_rows(self) -> int:
        """How many rows can stay for good: what is left beside the slots that mini-batches need."""
        if self._given is None and len(self._uses) == 0:
            return 0
        return max(0, self.slots - STATIC_SPARE * self._batch_rows_max)

    def _wanted(self, count: int, threshold: np.uint64) -> NDArray[np.int64]:
        """Of the ``count`` most wanted rows, or a few more or less, those in the sample of this threshold."""
        if count == 0:
            return np.empty(0, np.int64)
        if self._given is not None:
            first = self._given[:count]
            sampled: NDArray[np.int64] = first[mix64(first.astype(np.uint64) ^ self._key) <= threshold]
            return sampled
        above, share = self._asked_for(count)
        found: NDArray[np.int64] = find_wanted(
            self._uses, 0, above, self._tie_key, _share_of_hashes(share), self._key, threshold
        )
        return found

    def _asked_for(self, count: int) -> tuple[int, float]:
        """A set of so many rows has those with more uses than the first number, and this share of those with
        just as many."""
        rows_of = count_uses(self._uses)
        at_least = np.cumsum(rows_of[::-1])[::-1]
        uses = int(np.flatnonzero(at_least >= count)[-1])
        return uses, 1.0 - float(at_least[uses] - count) / max(1, int(rows_of[uses]))

    def _try_all(self) -> dict[str, float]:
        """Hit rates in this window, by policy."""
        rows, offsets = self._log, self._offsets[: self._batches + 1]
        begin = 0
        if not self._full:
            first = self._maps[CANDIDATES[0]]
            begin = filled = int(replay(first, rows, offsets, NO_NEXT_USE, True))
            self._full = bool(first.counts[EVICTIONS] > 0)
            if self._full:
                begin = max(begin, self._batches // 2)
            replay(first, rows, offsets[filled : begin + 1], NO_NEXT_USE, False)
            for m in list(self._maps.values())[1:]:
                replay(m, rows, offsets[: begin + 1], NO_NEXT_USE, False)
        counted = int(offsets[-1] - offsets[begin])
        if counted < _LEAST_COUNTED:
            return {}
        found = {}
        for name, m in self._maps.items():
            found[name] = self._replayed(m, begin)
        static = [self._replayed(m, begin) for m in self._static_maps(offsets[: begin + 1])]
        if static:
            found["static"] = sum(static) / len(static)
        return found

    def _replayed(self, m: SlotMap, begin: int) -> float:
        """The hit rate of the mini-batches from ``begin`` on."""
        offsets = self._offsets[begin : self._batches + 1]
        m.counts[[HITS, MISSES]] = 0
        replay(m, self._log, offsets, NO_NEXT_USE, False)
        return float(m.counts[HITS]) / float(offsets[-1] - offsets[0])

    def _static_maps(self, before: NDArray[np.int64]) -> Iterator[SlotMap]:
        """Shadows that hold a static set, and have seen the mini-batches ``before``: none, one, or two whose
        mean counts."""
        count = self._kept_rows or self._static_rows()
        if count == 0:
            return
        if self._kept_rows:
            sets = [self._kept]
        elif self._given is not None:
            sets = [self._wanted(count, self._threshold)]
        else:
            rows = np.unique(self._log[: self._at])
            above, share = self._asked_for(count)
            ties = mix64(rows.astype(np.uint64) ^ self._tie_key) <= _share_of_hashes(share)
            uses = self._uses[rows].astype(np.int64)
            sets = [rows[(n > above) | ((n == above) & ties)] for n in (uses, uses - 1)]
        spare = max(1, round((self.slots - count) * self._rate))
        for kept in sets:
            m = make_slot_map(len(kept) + spare, STATIC)
            hold(m, np.ascontiguousarray(kept))
            replay(m, self._log, before, NO_NEXT_USE, False)
            yield m


def _share_of_hashes(share: float) -> np.uint64:
    """The greatest hash of this share of all."""
    return np.uint64(min(2**64 - 1, int(share * 2.0**64)))


def hold(m: SlotMap, rows: NDArray[np.int64]) -> None:
    """Put rows into a slot map for good, without counting them."""
    slots, missed, waits = (np.empty(len(rows), np.int32) for _ in range(3))
    reads, _ = acquire(m, rows, slots, missed, waits)
    complete(m, slots[missed[:reads]])
    m.counts[[HITS, MISSES]] = 0
