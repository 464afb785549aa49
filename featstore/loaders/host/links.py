"""Mini-batches around links, made by whoever samples for the ranks of a host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from featstore.loaders.samplers import rows_first
from featstore.loaders.shares import MemoryShares
from featstore.sampling.link_batches import LinkBatches
from featstore.storage.store import Table


class LinksOfRanks(NamedTuple):
    """``alike``: options that all ranks, and hosts, are to have said alike. ``made``: what opens a sampler
    within so much memory and has the mini-batches of some ranks, of so many; and the shares of memory.
    ``tables``: of their nodes."""

    alike: dict[str, Any]
    made: Callable[[int, tuple[Sequence[int], int]], tuple[LinkBatches, MemoryShares]]
    tables: Mapping[str, Table]

    def make(
        self, memory_bytes: int, here: Sequence[int], world_size: int
    ) -> tuple[LinkBatches, MemoryShares]:
        """The mini-batches of the ranks ``here``, of ``world_size``, and how they share that memory: where
        ranks share a loader, for local rank 0 alone. Raises BudgetError, and what sampling raises."""
        batches, shares = self.made(memory_bytes, (here, world_size))
        try:
            batches.alike = self.alike
            return batches, rows_first(batches, self.tables, shares)
        except BaseException:
            batches.close()
            raise
