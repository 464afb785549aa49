"""How those who wait are told how far something is."""

from __future__ import annotations

from collections.abc import Callable

#: Told the stage, and how many of how many steps are done.
OnStep = Callable[[str, int, int], None]
