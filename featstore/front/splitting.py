"""``featstore.split`` and ``featstore.split_features``."""

from __future__ import annotations

from featstore.packing.split.features import split_features
from featstore.packing.split.split import split_store as split

__all__ = ["split", "split_features"]
