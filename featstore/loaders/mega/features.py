"""The rows of a mega-batch's partitions on their way from disk into their slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from featstore.engine.request import Request
    from featstore.reader.reader import Reader


class SlotRows(NamedTuple):
    """Rows of one table: ``runs`` int64 [n, 2], from and to, of which each goes into ``x`` from its place in
    ``starts`` on, int64 [n]."""

    table: str
    x: NDArray[Any]
    runs: NDArray[np.int64]
    starts: NDArray[np.int64]

    def on_disk(self) -> SlotRows:
        """The same, those that are not empty, in the order in which they lie on disk."""
        some = np.flatnonzero(self.runs[:, 0] < self.runs[:, 1])
        sort = some[np.argsort(self.runs[some, 0])]
        return self._replace(runs=self.runs[sort], starts=self.starts[sort])


class Features:
    """The rows of partitions on their way into their slots, asked for in turns, each table in the order in
    which it lies on disk."""

    def __init__(self, reader: Reader, parts: Sequence[SlotRows]) -> None:
        self._reader, self._parts = reader, [part.on_disk() for part in parts]
        self._asked = [0] * len(parts)
        self._requests: list[Request] = []

    def submit(self, share: float) -> None:
        """Ask for more, so that this share of all has been asked for."""
        for number, (table, x, runs, starts) in enumerate(self._parts):
            asked, end = self._asked[number], min(len(runs), int(np.ceil(share * len(runs))))
            if end > asked:
                some, at = {table: runs[asked:end]}, {table: starts[asked:end]}
                self._requests.append(self._reader.submit_runs(some, out={table: x}, at=at))
                self._asked[number] = end

    def settle(self) -> None:
        """Wait until nothing writes into the slots any more."""
        for request in self._requests:
            request.exception()

    def result(self) -> None:
        """Wait for all that was asked for, and for what was not yet. Raises what went wrong."""
        self.submit(1.0)
        for request in self._requests:
            request.result()
