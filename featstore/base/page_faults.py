"""Pages of memory that a thread had to wait for, or to look up, as the system counts them; inside kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from featstore.base.compilation import njit
from featstore.base.native import call_i32_i32_i64, function_address, libc, load_i64

GETRUSAGE = function_address(libc(), "getrusage")
_THREAD = 1  # RUSAGE_THREAD
_MINOR, _MAJOR = 64, 72  # ru_minflt, ru_majflt


@njit(nogil=True)
def page_faults(getrusage: Any, usage: Any) -> Any:
    """Of this thread so far: pages that it had to wait for (major faults), and with them those that only had
    to be looked up or made (minor faults). ``getrusage``: :data:`GETRUSAGE`; ``usage``: the address of 144
    bytes for it."""
    call_i32_i32_i64(getrusage, np.int32(_THREAD), usage)
    waited = load_i64(usage + _MAJOR)
    return waited, waited + load_i64(usage + _MINOR)
