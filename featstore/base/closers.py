"""What is to be closed, one after the other, and gone on with where an interrupt has broken it off."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Closers:
    """Calls that close what was opened, the last of them first.

    An error of one is raised when the others have been made. One that an interrupt has broken off is made
    again by the next :meth:`close`: each has to stand that. Of threads that close at once the second waits.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []
        self._lock = threading.RLock()  # an interrupt's handler may close what its own thread is closing

    def callback(self, call: Callable[[], object]) -> None:
        """Have ``call()`` made before those that are there."""
        self._calls.append(call)

    def close(self) -> None:
        """Make all calls that are left."""
        error: Exception | None = None
        with self._lock:
            while self._calls:
                call = self._calls[-1]
                try:
                    call()
                except Exception as failure:
                    error = error or failure
                if call in self._calls:
                    self._calls.remove(call)
        if error is not None:
            raise error
