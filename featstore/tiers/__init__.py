"""Tiers: who already holds a row in memory?

A tier is asked for a vector of rows and serves what it holds: it copies those rows to where they are wanted and marks them
served. The reader asks its tiers in turn, from the fastest on, each for what is still missing; what none of them holds is
planned and read from disk.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Tier(Protocol):
    """Rows of one table held in memory. ``serve`` may be called from several threads at once."""

    name: str

    @property
    def memory_bytes(self) -> int:
        """All the memory it holds: rows and the structures that find them."""

    def serve(
        self, rows: NDArray[np.int64], positions: NDArray[np.int32], served: NDArray[np.uint8], out: NDArray[np.uint8]
    ) -> int:
        """Copy those of ``rows`` that this tier holds and nobody has ``served`` yet, and mark them served. Returns how many.

        rows[i] goes to row positions[i] of ``out`` (uint8, rows end to end), or to row i where ``positions`` is empty. An empty
        ``out`` asks only which rows would be served.
        """
