"""The memory of a loader whose store samples: a share for the sampler, the rest for the rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from featstore.errors import BudgetError

#: A sampler has one part in so many of the memory, at most: a neighbour in memory saves more than a row does.
SAMPLER_SHARE = 3


@dataclass(frozen=True)
class MemoryShares:
    """``memory_bytes`` of sampler and rows; a sampler takes ``graph_bytes`` if that is less than its share, 0
    where there is none. ``beside_bytes``: what else the loader's memory holds, arrays for instance."""

    memory_bytes: int
    graph_bytes: int = 0
    beside_bytes: int = 0

    @property
    def sampler_bytes(self) -> int:
        """What a sampler may take."""
        return max(1, self.memory_bytes // SAMPLER_SHARE)

    @property
    def rows_bytes(self) -> int:
        """What is left for the rows."""
        return self.memory_bytes - min(self.graph_bytes, self.memory_bytes // SAMPLER_SHARE)

    @contextmanager
    def told_of_all(self) -> Iterator[None]:
        """A BudgetError of a share becomes one of all the memory; others, of a device's say, stay."""
        try:
            yield
        except BudgetError as error:
            needed = self._of_all(error)
            if needed is None:
                raise
            beside = self.beside_bytes
            raise BudgetError(needed + beside, self.memory_bytes + beside, error.what) from None

    def _of_all(self, error: BudgetError) -> int | None:
        """What is needed of ``memory_bytes``, given what one share needs; None where the error is of none."""
        if self.graph_bytes == 0:
            return error.needed_bytes if error.given_bytes == self.memory_bytes else None
        if error.given_bytes == self.sampler_bytes:  # first: of a memory of one byte, both are that
            return SAMPLER_SHARE * error.needed_bytes
        if error.given_bytes == self.rows_bytes:
            share = -(-error.needed_bytes // (SAMPLER_SHARE - 1))
            return error.needed_bytes + min(self.graph_bytes, share)
        return None
