"""Telling people that kernels are about to be compiled. numba keeps them on disk, so this happens once an installation."""

from __future__ import annotations

import os
import sys
from typing import Any

_announced = False


def announce_compilation() -> None:
    """Say on stderr, once a process, when the kernels are not on disk yet: compiling them takes some seconds."""
    global _announced
    from featstore.plan import cut_extents

    if _announced or _compiled(cut_extents):
        return
    _announced = True
    print(
        "featstore: compiling its kernels for this processor; this happens once and takes some seconds", file=sys.stderr
    )


def _compiled(kernel: Any) -> bool:
    """Whether numba has a compiled form of a kernel in memory or on disk."""
    folder = kernel._cache.cache_path
    prefix = f"{kernel.py_func.__module__.rpartition('.')[2]}.{kernel.__name__}-"
    return bool(kernel.signatures) or (
        os.path.isdir(folder) and any(name.startswith(prefix) for name in os.listdir(folder))
    )
