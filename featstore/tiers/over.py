"""What tiers over another source have in common."""

from __future__ import annotations

from featstore.base.process import OneProcess
from featstore.storage.store import OpenStore
from featstore.tiers import RowSource


class OwnedTier(OneProcess):
    """A tier that belongs to the process that made it."""

    name: str

    @property
    def called(self) -> str:  # type: ignore[override]
        return f"the {self.name} tier"


class OverSource(OwnedTier):
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
