"""The first values of a table that has one for each edge, in memory: as many as there is room for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from featstore.reader.reader import Reader

if TYPE_CHECKING:
    from featstore.storage.store import StoredGraph

_STEP_EDGES = 2**24  # whose reads are planned at once


class FirstValues:
    """Of ``GRAPH/part``: ``first`` [held], those of the first edges. It is filled once and can only become
    smaller."""

    def __init__(self, graph: StoredGraph, part: str) -> None:
        self.table = f"{graph.name}/{part}"
        self._edges, self._where = graph.edges, graph.where()
        self.first = np.empty(0, graph.store.table(self.table).dtype)

    @property
    def memory_bytes(self) -> int:
        """What is held."""
        return self.first.nbytes

    @property
    def whole(self) -> bool:
        """Whether the values of all edges are held."""
        return len(self.first) == self._edges

    def fill(self, reader: Reader, room_bytes: int) -> None:
        """Take what fits into ``room_bytes``. Raises CorruptionError, DeviceError."""
        count = min(self._edges, max(0, room_bytes) // self.first.itemsize)
        first = np.empty(count, self.first.dtype)
        for low in range(0, count, _STEP_EDGES):
            high = min(low + _STEP_EDGES, count)
            reader.read_runs({self.table: [(low, high)]}, out={self.table: first[low:high]})
        self.first = first

    def cut(self, room_bytes: int) -> None:
        """Keep what fits into ``room_bytes``."""
        count = max(0, room_bytes) // self.first.itemsize
        if count < len(self.first):
            self.first.resize(count, refcheck=False)
