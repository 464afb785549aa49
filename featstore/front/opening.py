"""Functions of lower layers that write a store and return its path, as ones that open it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar, overload

from featstore.store import Store

P = ParamSpec("P")
R = TypeVar("R")


@overload
def opening(make: Callable[P, Path]) -> Callable[P, Store]: ...
@overload
def opening(make: Callable[P, Path | R]) -> Callable[P, Store | R]: ...
def opening(make: Callable[P, Path | R]) -> Callable[P, Store | R]:
    """``make``, but with the store open where it returns a path. What else it returns stays."""

    @functools.wraps(make)
    def opened(*args: P.args, **options: P.kwargs) -> Store | R:
        found = make(*args, **options)
        return Store(found) if isinstance(found, Path) else found

    return opened
