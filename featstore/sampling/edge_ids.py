"""The numbers that the user knows the edges of a mini-batch by, of a graph in a store that keeps them.

They stand in a table of their own beside the lists, ``GRAPH/edge_ids``, and are found by the positions of the
edges there. Those of the first edges are held in memory, as far as there is room; the others are read, all of
a mini-batch in one request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_flag
from featstore.base.checks import check_range
from featstore.errors import SourceError
from featstore.reader.reader import Reader
from featstore.sampling.pages import Missing

if TYPE_CHECKING:
    from featstore.storage.store import StoredGraph

_STEP_EDGES = 2**24  # whose reads are planned at once
#: Of an edge while its number is found: whether it is in memory, what stands there, its key, what was read.
FINDING_BYTES = 40


def wants_edge_ids(graph: StoredGraph, asked: bool | None) -> bool:
    """Whether mini-batches have them: as ``asked``, by default where the store has them. Raises
    ArgumentError, and SourceError where they are asked for and not kept."""
    if asked is not None:
        as_flag(asked, "edge_ids")
    if asked and not graph.has_edge_ids:
        raise SourceError(
            f"{graph.where()} does not keep the numbers of its edges: pack it with edge_ids=True (--edge-ids)"
        )
    return graph.has_edge_ids if asked is None else asked


class StoredEdgeIds:
    """The numbers of a graph's edges, those of the first edges in memory. It is filled once and can only
    become smaller."""

    def __init__(self, graph: StoredGraph) -> None:
        self.table = f"{graph.name}/edge_ids"
        self._edges, self._where = graph.edges, graph.where()
        self._first = np.empty(0, graph.store.table(self.table).dtype)

    @property
    def memory_bytes(self) -> int:
        """What is held."""
        return self._first.nbytes

    @property
    def whole(self) -> bool:
        """Whether the numbers of all edges are held."""
        return len(self._first) == self._edges

    def fill(self, reader: Reader, room_bytes: int) -> None:
        """Take what fits into ``room_bytes``. Raises CorruptionError, DeviceError."""
        count = min(self._edges, max(0, room_bytes) // self._first.itemsize)
        first = np.empty(count, self._first.dtype)
        for low in range(0, count, _STEP_EDGES):
            high = min(low + _STEP_EDGES, count)
            reader.read_runs({self.table: [(low, high)]}, out={self.table: first[low:high]})
        self._first = first

    def cut(self, room_bytes: int) -> None:
        """Keep what fits into ``room_bytes``."""
        count = max(0, room_bytes) // self._first.itemsize
        if count < len(self._first):
            self._first.resize(count, refcheck=False)

    def of(self, reader: Reader, edges: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64: the numbers of the edges at these positions. Raises CorruptionError, DeviceError,
        FormatError for a number that none has."""
        if len(edges) == 0:
            return np.empty(0, np.int64)
        held = edges < len(self._first)
        ids = np.empty(len(edges), np.int64)
        ids[held] = self._first[edges[held]]
        if not held.all():
            ids[~held] = -1
            missing = Missing(ids, edges, len(edges) - int(held.sum()), self._edges, self._first.dtype)
            missing.read(reader, self.table)
        check_range(ids, self._edges, f"an edge id of {self._where}")
        return ids
