"""``featstore.split``."""

from __future__ import annotations

from featstore.packing.split.split import split_store as split

__all__ = ["split"]
