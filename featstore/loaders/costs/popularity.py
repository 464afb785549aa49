"""How often rows are wanted, learned from a few mini-batches: a mixture of few kinds of rows, each of which a
mini-batch wants by chance.

Of k mini-batches it is counted how many rows are in 0, 1, ..., k of them. A mixture of binomials is fitted to
these counts (nonparametric maximum likelihood by EM on a grid of probabilities: Laird, JASA 1978), which says
how many rows there are of each probability, those that were not seen yet included, because the table says how
many rows there are in all. Mini-batches drawn from it stand for those of an epoch: buffers and schedules are
simulated on them, scaled down (spatial sampling as in :mod:`featstore.tiers.slots.choose`).

It takes mini-batches for independent of each other. Those of an order that keeps neighbours together share
more rows with the next one than it believes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lgamma

import numpy as np
from numpy.typing import NDArray

from featstore.base.hashing import mix64

_GRID = 96
_ROUNDS = 2000
_LEAST = 1e-13  # relative gain of likelihood by which a round is the last


@dataclass(frozen=True)
class Popularity:
    """``rows[j]`` rows of a table are in a mini-batch with ``chance[j]``, descending."""

    rows: NDArray[np.float64]
    chance: NDArray[np.float64]

    @property
    def batch_rows(self) -> float:
        """Rows of a mini-batch."""
        return float(self.rows @ self.chance)

    def hit_rate_of_most_wanted(self, slots: float) -> float:
        """Of the rows asked for, those that are among the ``slots`` most wanted ones; all, where none are."""
        if not self.batch_rows:
            return 1.0
        before = np.concatenate([[0.0], np.cumsum(self.rows)[:-1]])
        held = np.clip(slots - before, 0.0, self.rows)
        return float(held @ self.chance / self.batch_rows)

    def draw(self, batches: int, rate: float, seed: int = 0) -> tuple[list[NDArray[np.int64]], int]:
        """So many mini-batches over a table scaled down by ``rate``: the rows of each, distinct, and how many
        rows the table has."""
        random = np.random.default_rng(seed)
        counts = np.floor(self.rows * rate + random.random(len(self.rows))).astype(np.int64)
        first = np.concatenate([[0], np.cumsum(counts)])
        kinds = np.flatnonzero((counts > 0) & (self.chance > 0))
        found = []
        for _ in range(batches):
            drawn = random.binomial(counts[kinds], np.minimum(1.0, self.chance[kinds]))
            parts = [
                first[kind] + random.choice(counts[kind], count, replace=False, shuffle=False)
                for kind, count in zip(kinds.tolist(), drawn.tolist(), strict=True)
                if count
            ]
            found.append(np.concatenate(parts) if parts else np.empty(0, np.int64))
        return found, max(1, int(first[-1]))


def learn(ids: Sequence[NDArray[np.int64]], table_rows: int) -> Popularity:
    """The popularity of the rows of a table, from mini-batches' distinct ids."""
    if not table_rows or not any(map(len, ids)):
        return Popularity(np.array([float(table_rows)]), np.zeros(1))
    uses = np.unique(np.concatenate(ids), return_counts=True)[1]
    batches = len(ids)
    rows_of = np.bincount(uses, minlength=batches + 1).astype(np.float64)
    rows_of[0] = max(0, table_rows - len(uses))
    chance = np.concatenate([[0.0], np.geomspace(0.02 / (table_rows * batches) ** 0.5, 1.0, _GRID)])
    likely = _binomial(batches, chance)
    weights = np.full(len(chance), 1 / len(chance))
    before = -np.inf
    for _ in range(_ROUNDS):
        mixed = likely @ weights
        weights *= likely.T @ (rows_of / np.maximum(mixed, 1e-300)) / table_rows
        now = float(rows_of @ np.log(np.maximum(mixed, 1e-300)))
        if now - before < _LEAST * abs(now):
            break
        before = now
    rows = weights * table_rows
    scale = sum(map(len, ids)) / batches / max(1e-12, float(rows @ chance))
    order = np.argsort(-chance)
    return Popularity(rows[order], np.minimum(1.0, chance[order] * scale))


def _binomial(batches: int, chance: NDArray[np.float64]) -> NDArray[np.float64]:
    """[batches + 1, chances]: how likely a row of each chance is in so many of the mini-batches."""
    count = np.arange(batches + 1)[:, None]
    ways = [lgamma(batches + 1) - lgamma(c + 1) - lgamma(batches - c + 1) for c in range(batches + 1)]
    with np.errstate(divide="ignore", invalid="ignore"):
        yes, no = count * np.log(chance), (batches - count) * np.log1p(-chance)
    yes[np.isnan(yes)], no[np.isnan(no)] = 0.0, 0.0  # none of what is impossible
    found: NDArray[np.float64] = np.exp(np.array(ways)[:, None] + yes + no)
    return found


def thinned(ids: Sequence[NDArray[np.int64]], rate: float) -> tuple[list[NDArray[np.int64]], int]:
    """The same mini-batches over a ``rate`` of the rows, chosen by a hash and numbered anew; and how many
    these are."""
    names, flat = np.unique(np.concatenate(ids), return_inverse=True)
    kept = mix64(names.astype(np.uint64)) <= np.uint64(min(2**64 - 1, int(rate * 2.0**64)))
    number = np.cumsum(kept) - 1
    found, at = [], 0
    for one in ids:
        places = flat[at : at + len(one)]
        found.append(number[places[kept[places]]].astype(np.int64))
        at += len(one)
    return found, max(1, int(kept.sum()))
