"""The time, for kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from featstore.base.compilation import njit
from featstore.base.native import call_i32_i32_i64, function_address, libc, load_i64

CLOCK_GETTIME = function_address(libc(), "clock_gettime")
_CLOCK_MONOTONIC = 1


@njit(nogil=True)
def now_ns(clock: Any, scratch: Any) -> Any:
    """Monotonic time; ``clock`` is clock_gettime's address, ``scratch`` that of 16 free bytes."""
    call_i32_i32_i64(clock, np.int32(_CLOCK_MONOTONIC), scratch)
    return load_i64(scratch) * 1_000_000_000 + load_i64(scratch + 8)
