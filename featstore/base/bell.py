"""What tells that something has changed, but for what whoever is told has changed itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Bell:
    """Calls ``heard`` whenever it is rung, but by the thread that is within :meth:`silent`: one at a time,
    which looks for itself afterwards at what it has done."""

    def __init__(self, heard: Callable[[], None]) -> None:
        self._heard, self._silent = heard, 0

    def ring(self) -> None:
        if threading.get_ident() != self._silent:
            self._heard()

    @contextmanager
    def silent(self) -> Iterator[None]:
        self._silent = threading.get_ident()
        try:
            yield
        finally:
            self._silent = 0
