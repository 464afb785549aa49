"""How far a pack is: named stages, each with a total of its own where one is known beforehand.

A table's rows pass once, or twice where they go through spill files. Each pass is a stage whose total is the
size of the table, so that what is shown is never more than there is and ends at all of it. Stages in which no
bytes can be counted beforehand (a graph is read, an order is sought) are announced when they begin.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["PackStages", "Progress"]


@dataclass(frozen=True)
class Progress:
    """How far a stage of a table is: ``done_bytes`` of ``total_bytes``, which is None where it is not known.

    ``stage``: ``ids``, ``keys`` and ``count`` (ids, keys, or rows whose number is unknown, are read);
    ``graph``, ``order`` and ``topology`` (no bytes are counted); ``read`` (rows, to their places in memory)
    or ``spill`` (to files, by where they belong), and ``write``.
    """

    stage: str
    table: str
    done_bytes: int
    total_bytes: int | None


class PackStages:
    """Tells a listener of one stage after the other. Safe from any thread."""

    def __init__(self, listener: Callable[[Progress], None] | None) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._now = Progress("", "", 0, None)

    def begin(self, stage: str, table: str, total_bytes: int | None = None, done_bytes: int = 0) -> None:
        """A stage begins, with what of it an interrupted pack had done already."""
        with self._lock:
            self._tell(Progress(stage, table, done_bytes, total_bytes))

    def add(self, count_bytes: int) -> None:
        """So many bytes more of the stage are done."""
        with self._lock:
            now = self._now
            done = now.done_bytes + count_bytes
            if now.total_bytes is not None:
                done = min(done, now.total_bytes)  # the last page is written whole
            self._tell(Progress(now.stage, now.table, done, now.total_bytes))

    def _tell(self, now: Progress) -> None:
        self._now = now
        if self._listener is not None:
            self._listener(now)
