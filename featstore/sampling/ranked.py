"""The ranks of a training run: each has its share of an order of seeds, as many as any other."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.errors import ArgumentError

NO_SEED = -1  # no seed: that would stand in its mini-batch already


class Share(NamedTuple):
    """``seeds`` of one rank, :data:`NO_SEED` where there is none; of all ranks together ``padded`` stand
    twice, ``dropped`` are left out."""

    seeds: NDArray[Any]
    padded: int
    dropped: int


def share_of(
    order: NDArray[Any], batch_size: int, rank: int, world_size: int, drop_last: bool = False
) -> Share:
    """Every ``world_size``-th of ``order``, from ``rank`` on.

    Where they do not divide evenly, the first ones stand twice, ``world_size - 1`` of them at most, as with
    torch's ``DistributedSampler``; with ``drop_last`` what is left over after whole mini-batches of all ranks
    is left out. So every rank has as many seeds, and as many mini-batches.
    """
    if drop_last:
        dropped = len(order) % (batch_size * world_size)
        return Share(order[: len(order) - dropped][rank::world_size], 0, dropped)
    padded = -len(order) % world_size
    if padded:
        order = np.resize(order, len(order) + padded)
    return Share(order[rank::world_size], padded, 0)


def owned_share(
    order: NDArray[Any], owner: NDArray[Any], batch_size: int, rank: int, ranks: int, hosts: int,
    drop_last: bool = False,
) -> Share:  # fmt: skip
    """Of ``order`` what the rank's host owns, every ``ranks``-th of it; ``owner`` [nodes] says which host
    owns a node, and each of ``hosts`` hosts has ``ranks`` ranks, one after the other.

    Every rank has as many mini-batches as one of the host that owns most: of other hosts some seeds stand
    twice, never within a mini-batch, which has fewer seeds instead; with ``drop_last`` as many whole
    mini-batches as one of the host that owns fewest. Raises ArgumentError for a host that owns none.
    """
    of = owner[order]
    counts = np.bincount(of, minlength=hosts)
    if not counts.all():
        raise ArgumentError(
            f"host {int(np.argmin(counts))} owns none of the {len(order):,} seeds: split the store with "
            "train=, which spreads them evenly over the hosts"
        )
    host, local = divmod(rank, ranks)
    own = order[of == host]
    if drop_last:
        each = int(counts.min()) // (ranks * batch_size) * batch_size
        return Share(own[: each * ranks][local::ranks], 0, len(order) - each * ranks * hosts)
    each = -(-int(counts.max()) // ranks)
    left_out = ranks * sum(_places_again(int(count), each, batch_size, ranks) for count in counts)
    seeds, period = np.resize(own, each * ranks)[local::ranks], _period(len(own), ranks)
    if period < min(batch_size, each):
        seeds = np.where(np.arange(each) % batch_size < period, seeds.astype(np.int64), NO_SEED)
    return Share(seeds, each * ranks * hosts - len(order) - left_out, 0)


def _period(count: int, ranks: int) -> int:
    """After how many of its seeds a rank begins again, where a host of so many goes through ``count``."""
    return count // math.gcd(count, ranks)


def _places_again(count: int, each: int, batch_size: int, ranks: int) -> int:
    """How many of the ``each`` places of such a rank repeat what stands earlier in their mini-batch."""
    period, (whole, rest) = _period(count, ranks), divmod(each, batch_size)
    return whole * max(0, batch_size - period) + max(0, rest - period)
