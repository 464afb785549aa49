"""Rows of other hosts that are wanted most, found by sampling beforehand: what a host keeps of them.

Mini-batches of the first epoch are sampled, as many as :data:`STEPS` spread over it, and none of their rows
is read; the rows of other hosts that most of them want are kept for good. How often a row is wanted hardly
changes from epoch to epoch where seeds and neighbours are drawn at random, so there is nothing to tune and
nothing is fetched to replace what was kept (pre-sampling, after GNNLab: Yang et al., EuroSys'22).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from featstore.errors import BudgetError
from featstore.tiers.members import members_bytes
from featstore.tiers.static_tier import Static

if TYPE_CHECKING:
    from featstore.hosts.split_store import WholeStore
    from featstore.sampling.batches import RankedBatches

STEPS = 200  # mini-batches that are looked at
_COUNT_MAX = np.iinfo(np.uint8).max


def presampled_halo(store: WholeStore, table: str, batches: RankedBatches, memory_bytes: int) -> Static:
    """The rows of other hosts that are wanted most, as many as ``memory_bytes`` holds: a tier over these
    hosts. Takes a byte a node while it counts. Raises BudgetError for memory that holds none."""
    rows = store.table(table)
    owners = store.owners[table]
    if members_bytes({table: np.zeros(1, np.int64)}, {table: rows}) > memory_bytes:
        needed = members_bytes({table: np.zeros(1, np.int64)}, {table: rows})
        raise BudgetError(needed, memory_bytes, "keep a row of other hosts (halo=)")
    counts = np.zeros(rows.rows, np.uint8)
    for index in np.unique(np.linspace(0, len(batches) - 1, min(STEPS, len(batches))).astype(int)):
        nodes = batches[int(index)].node
        other = nodes[~owners.mine(nodes)]
        counts[other] += counts[other] < _COUNT_MAX
    wanted = np.flatnonzero(counts)
    ranked = wanted[np.argsort(-counts[wanted].astype(np.int64), kind="stable")]
    return Static({table: np.sort(ranked[: _that_fit(table, ranked, store, memory_bytes)])}, memory_bytes)


def _that_fit(table: str, ranked: NDArray[np.int64], store: WholeStore, memory_bytes: int) -> int:
    """How many of these rows the memory holds."""
    low, high = 0, len(ranked)
    while low < high:
        middle = (low + high + 1) // 2
        if members_bytes({table: ranked[:middle]}, {table: store.table(table)}) <= memory_bytes:
            low = middle
        else:
            high = middle - 1
    return low
