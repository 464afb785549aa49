"""Mini-batches around links for ranks that share a loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from featstore.loaders.shares import MemoryShares
from featstore.sampling.link_batches import LinkBatches


class LinksOfRanks(NamedTuple):
    """Mini-batches that local rank 0 makes for all ranks of its host. ``alike``: options that all of these
    are to have said alike. ``make``: called there alone, with the memory that is left, the ranks, and how
    many there are of all hosts, makes them and says how they share that memory."""

    alike: Mapping[str, Any]
    make: Callable[[int, Sequence[int], int], tuple[LinkBatches, MemoryShares]]
