"""A compiled trace as users know it."""

from __future__ import annotations

from typing import Any

from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.compiled.trace import CompiledTrace
from featstore.loaders.ranks import warn_of_ranks


class Compiled(CompiledTrace):
    """A compiled trace of a store; made by :meth:`featstore.Store.compiled`. A context manager."""

    def loader(self, **options: Any) -> CompiledLoader:
        """A loader of its mini-batches; the options are those of
        :class:`featstore.loaders.compiled.loader.CompiledLoader`."""
        if options.get("order") is None:
            warn_of_ranks("a loader of a compiled trace")
        return CompiledLoader(self, **options)
