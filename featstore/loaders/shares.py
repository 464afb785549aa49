"""The memory of a loader whose store samples: a share for the sampler, the rest for the rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from featstore.errors import BudgetError

_SAMPLER_SHARE = 4  # of the memory, at most, is for a sampler


@dataclass(frozen=True)
class MemoryShares:
    """``memory_bytes`` of all; a sampler takes ``graph_bytes`` if that is less than its share, 0 where there
    is none."""

    memory_bytes: int
    graph_bytes: int = 0

    @property
    def sampler_bytes(self) -> int:
        """What a sampler may take."""
        return max(1, self.memory_bytes // _SAMPLER_SHARE)

    @property
    def rows_bytes(self) -> int:
        """What is left for the rows."""
        return self.memory_bytes - min(self.graph_bytes, self.memory_bytes // _SAMPLER_SHARE)

    @contextmanager
    def told_of_all(self) -> Iterator[None]:
        """A BudgetError of a share becomes one of all the memory; others, of a device's say, stay."""
        try:
            yield
        except BudgetError as error:
            if self.graph_bytes == 0:
                raise
            if error.given_bytes == self.rows_bytes:
                share = -(-error.needed_bytes // (_SAMPLER_SHARE - 1))
                needed = error.needed_bytes + min(self.graph_bytes, share)
            elif error.given_bytes == self.sampler_bytes:
                needed = _SAMPLER_SHARE * error.needed_bytes
            else:
                raise
            raise BudgetError(needed, self.memory_bytes, error.what) from None
