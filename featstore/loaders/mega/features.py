"""The rows of a mega-batch's partitions on their way from disk into their slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from featstore.engine.request import Request
    from featstore.reader.reader import Reader


class Features:
    """The rows of partitions on their way into their slots, asked for in turns, in the order in which they
    lie on disk."""

    def __init__(
        self, reader: Reader, table: str, x: NDArray[Any], runs: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> None:
        sort = np.argsort(runs[:, 0])
        self._reader, self._table, self._x, self._runs, self._starts = (
            reader,
            table,
            x,
            runs[sort],
            starts[sort],
        )
        self._asked = 0
        self._requests: list[Request] = []

    def submit(self, share: float) -> None:
        """Ask for more, so that this share of all has been asked for."""
        end = min(len(self._runs), int(np.ceil(share * len(self._runs))))
        if end > self._asked:
            wanted = slice(self._asked, end)
            out, at = {self._table: self._x}, {self._table: self._starts[wanted]}
            self._requests.append(self._reader.submit_runs({self._table: self._runs[wanted]}, out=out, at=at))
            self._asked = end

    def settle(self) -> None:
        """Wait until nothing writes into the slots any more."""
        for request in self._requests:
            request.exception()

    def result(self) -> None:
        """Wait for all that was asked for, and for what was not yet. Raises what went wrong."""
        self.submit(1.0)
        for request in self._requests:
            request.result()
