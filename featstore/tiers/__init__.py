"""Tiers: who already holds a row in memory?

A tier answers for a vector of rows which of them it holds, and where. The reader asks its tiers from the fastest on; what
none of them holds is planned and read from disk.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Tier(Protocol):
    """Rows held in memory. ``find`` and ``take`` may be called from several threads at once."""

    name: str

    @property
    def memory_bytes(self) -> int:
        """All the memory it holds: rows and the structures that find them."""

    def find(self, rows: NDArray[np.int64], slots: NDArray[np.int32]) -> int:
        """slots[i] = where rows[i] lies in this tier, or -1. Returns the number of hits."""

    def take(self, slots: NDArray[np.int32], positions: NDArray[np.int32], out: NDArray[Any]) -> None:
        """Copy the row at each non-negative slots[i] to row positions[i] of ``out`` (uint8, rows end to end), or to row i
        where ``positions`` is empty."""
