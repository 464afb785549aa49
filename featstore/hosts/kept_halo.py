"""What a loader keeps of other hosts' rows. Its readers come and go, as its memory is divided anew; the rows
that are kept, and what their policy knows, stay. Which rows they are can be written down, and read again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from featstore.base.system import is_there
from featstore.engine.request import Request
from featstore.hosts.ahead import Ahead
from featstore.storage.store import OpenStore
from featstore.tiers import RowSource, Tier, TierSpec, saved
from featstore.tiers.over import OverSource


class Restored(Protocol):
    """A tier whose rows can be named, and had again."""

    def held(self, table: str) -> Iterator[NDArray[np.int64]]:
        """Node ids of the rows of a table, in pieces, the least wanted first; the same until it is asked for
        others."""

    def load(self, cache: saved.SavedCache, table: str) -> None:
        """Have the rows that were saved, as many as fit, the last ones first."""


class Below(OverSource):
    """Rows of other hosts by a source that another one may take the place of, between requests."""

    name = "peers"

    def take_from(self, below: RowSource) -> None:
        """From now on."""
        self._below = below

    def submit(
        self, ids: Mapping[str, Any], *, out: Mapping[str, Any] | None, at: Mapping[str, Any] | None = None
    ) -> Request:
        self.check_open()
        return self._below.submit(ids, out=out, at=at)

    def close(self) -> None:
        self._closed = True


class KeptHalo:
    """A tier as ``spec`` wants it, over one source of other hosts' rows after the other."""

    def __init__(self, spec: TierSpec, store: OpenStore) -> None:
        self._spec, self._store = spec, store
        self._looks_ahead = isinstance(spec, Ahead)  # and knows what comes: nothing is saved of it
        self._tier: Tier | None = None
        self._below: Below | None = None
        self._tables: list[str] = []

    def over(self, below: RowSource) -> Tier:
        """The tier, now over this source: a new one where it has other tables, unless it knows what comes of
        all. Raises BudgetError."""
        alike = self._looks_ahead or set(self._tables) == set(below.tables)
        if self._tier is not None and self._below is not None and alike:
            self._below.take_from(below)
            return self._tier
        self.close()
        memory_bytes = self._spec.host_bytes(list(self._store.tables.values()))
        self._below, self._tables = Below(below), list(below.tables)
        self._tier = self._spec.over(self._below, memory_bytes or 0)
        return self._tier

    @property
    def _restored(self) -> Restored | None:
        tier: Any = self._tier
        return tier if hasattr(tier, "held") else None

    def check_name(self, name: str) -> None:
        """Raise SourceError for a name under which nothing can be saved."""
        if not self._looks_ahead:
            saved.cache_path(self._store, _named(name))

    def check(self, name: str) -> None:
        """Raise SourceError where what was saved is damaged."""
        if not self._looks_ahead and is_there(saved.cache_path(self._store, _named(name))):
            saved.SavedCache(self._store, _named(name)).close()

    def save(self, name: str) -> None:
        """Write down which rows are there; of one that looks ahead nothing, as it knows what comes."""
        tier = self._restored
        if tier is not None:
            pieces = {table: partial(tier.held, table) for table in self._tables}
            saved.save(self._store, _named(name), pieces)

    def load(self, name: str) -> None:
        """Have the rows that were saved, where any were."""
        tier = self._restored
        if tier is not None and is_there(saved.cache_path(self._store, _named(name))):
            with saved.SavedCache(self._store, _named(name)) as cache:
                for table in self._tables:
                    if cache.counts.get(table):
                        tier.load(cache, table)

    def close(self) -> None:
        """May be called more than once."""
        if self._tier is not None:
            self._tier.close()
        self._tier = self._below = None


def _named(name: str) -> str:
    return f"{name}.halo"
