"""What belongs to one process: threads, locks and what is under way stay there when it forks."""

from __future__ import annotations

import os

from featstore.errors import ClosedError


class OneProcess:
    """Something that belongs to the process that made it, until it is closed. ``called``: what messages call
    it."""

    called: str

    def __init__(self) -> None:
        self._closed, self._pid = False, os.getpid()

    @property
    def here(self) -> bool:
        """Whether this is the process that made it."""
        return self._pid == os.getpid()

    def check_process(self) -> None:
        """Raise ClosedError in any other process than its own."""
        if not self.here:
            raise ClosedError(f"{self.called} belongs to the process that made it; make another one here")

    def check_open(self) -> None:
        """Raise ClosedError where it is closed, or belongs to another process."""
        self.check_process()
        if self._closed:
            raise ClosedError(f"{self.called} is closed; open or make another")
