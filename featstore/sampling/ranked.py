"""The ranks of a training run: each has its share of an order of seeds, as many as any other."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Share(NamedTuple):
    """``seeds`` of one rank; of all ranks together ``padded`` stand twice, ``dropped`` are left out."""

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
