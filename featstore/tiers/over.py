"""What tiers over another source have in common."""

from __future__ import annotations

import os

from featstore.errors import ClosedError
from featstore.storage.store import OpenStore
from featstore.tiers import RowSource


class OneProcess:
    """A tier that belongs to the process that made it."""

    name: str

    def __init__(self) -> None:
        self._closed, self._pid = False, os.getpid()

    @property
    def here(self) -> bool:
        """Whether this is the process that made it."""
        return self._pid == os.getpid()

    def check_open(self) -> None:
        """Raise ClosedError where it is closed, or belongs to another process."""
        if self._closed:
            raise ClosedError(f"the {self.name} tier is closed")
        if not self.here:
            raise ClosedError(
                f"this {self.name} tier belongs to the process that made it; make one in each process"
            )


class OverSource(OneProcess):
    """Stands over ``below``, whose store and tables it has. It belongs to the process that made it."""

    def __init__(self, below: RowSource) -> None:
        super().__init__()
        self._below = below

    @property
    def store(self) -> OpenStore:
        return self._below.store

    @property
    def tables(self) -> list[str]:
        return self._below.tables
