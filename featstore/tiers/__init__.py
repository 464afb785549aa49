"""Tiers: who already holds a row in memory?

A tier is asked for a vector of rows and serves what it holds: it copies those rows to where they are wanted
and marks them served. The reader asks its tiers in turn, from the fastest on, each for what is still missing;
what none of them holds is planned and read from disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from featstore.engine.request import Request
from featstore.storage.store import OpenStore


class RowSource(Protocol):
    """What gives rows of some tables of a store: a reader, or anything that stands for one."""

    @property
    def store(self) -> OpenStore:
        """The store whose rows these are."""

    @property
    def tables(self) -> list[str]:
        """Names of the tables."""

    def submit(self, ids: Mapping[str, Any], *, out: Mapping[str, Any], at: Mapping[str, Any]) -> Request:
        """Begin to put the rows of ``ids[table]`` at rows ``at[table]`` of ``out[table]``."""


class Tier(Protocol):
    """Rows of one table held in memory. ``serve`` may be called from several threads at once."""

    name: str

    @property
    def memory_bytes(self) -> int:
        """All the memory it holds: rows and the structures that find them."""

    def serve(
        self,
        rows: NDArray[np.int64],
        positions: NDArray[np.int32],
        served: NDArray[np.uint8],
        out: NDArray[np.uint8],
    ) -> int:
        """Copy those of ``rows`` that this tier holds and nobody has ``served`` yet, and mark them served.
        Returns how many.

        rows[i] goes to row positions[i] of ``out`` (uint8, rows end to end), or to row i where ``positions``
        is empty. An empty ``out`` asks only which rows would be served.
        """
