"""What ``repr`` says of objects that can be made again: the call that makes them.

``eval`` of it makes another, with ``featstore`` imported. What no program text stands for in short, arrays
and generators for instance, is told in angle brackets, ``<ndarray [200]>``: then ``eval`` is a SyntaxError.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

_ITEMS_MAX, _TEXT_MAX = 20, 300


def called(what: str, *given: Any, **options: Any) -> str:
    """``what(given, option=value)``."""
    words = [literal(value) for value in given]
    return f"{what}({', '.join([*words, *(f'{name}={literal(value)}' for name, value in options.items())])})"


def literal(value: Any) -> str:
    """A value as program text; in angle brackets where it has none."""
    if isinstance(value, int) and value.bit_length() >= 256:
        return "<int of very many digits>"
    if value is None or isinstance(value, bool | int | float | str | slice):
        return repr(value)
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if hasattr(value, "dtype") and (sizes := _shape(value)) is not None:
        shape = ", ".join(map(str, sizes))
        return f"<{type(value).__name__} [{shape}]>" if shape else literal(value.item())
    if hasattr(value, "_fields"):  # a tuple with names, of which nobody wrote each
        return f"<{type(value).__name__}>"
    if isinstance(value, Mapping | list | tuple) and len(value) > _ITEMS_MAX:
        return f"<{type(value).__name__} of {len(value):,}>"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{literal(key)}: {literal(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' * (len(value) == 1)})"
    text = repr(value)
    return text if text.startswith("featstore.") and len(text) < _TEXT_MAX else f"<{type(value).__name__}>"


def _shape(value: Any) -> Any:
    """The shape of what looks like an array; None where it has none to tell, as a nested tensor."""
    try:
        return value.shape
    except (AttributeError, RuntimeError):
        return None


def unusual(made: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Of all options of ``made`` those that are not as they are by default."""
    usual = inspect.signature(made).parameters
    return {name: value for name, value in options.items() if value is not usual[name].default}
