"""Warnings, at the line of the user's program that called featstore."""

from __future__ import annotations

import sys
import warnings

from featstore.errors import FeatstoreWarning


def warn(text: str) -> None:
    """Warn, as FeatstoreWarning: ``text`` says of what, and what to do."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("featstore."):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, FeatstoreWarning, stacklevel=level)
