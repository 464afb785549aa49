"""``featstore.compile_trace``."""

from __future__ import annotations

from featstore.compile.build import compile_trace as compile_closed
from featstore.front.opening import opening

__all__ = ["compile_trace"]

compile_trace = opening(compile_closed)
