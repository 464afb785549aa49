"""``featstore.pack``."""

from __future__ import annotations

from featstore.front.opening import opening
from featstore.packing.packing import pack as pack_closed

__all__ = ["pack"]

pack = opening(pack_closed)
