"""The numbers that partitioners draw: xorshift generators, seeded so that equal seeds draw the same whatever
the block size and the number of threads, on any machine."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.hashing import mix64


@njit(cache=True, nogil=True)
def next_random(random: Any) -> Any:
    """One step of xorshift64 (Marsaglia 2003) on ``random`` uint64 [1]."""
    s = random[0]
    s ^= s << np.uint64(13)
    s ^= s >> np.uint64(7)
    s ^= s << np.uint64(17)
    random[0] = s
    return s


def random_of_pass(seed: int, number: int) -> NDArray[np.uint64]:
    """The generator's state, uint64 [1], never zero, at the start of a pass."""
    return np.random.SeedSequence([seed, number]).generate_state(1, np.uint64) | np.uint64(1)


@njit(cache=True, nogil=True)
def seed_of_chunk(seed: Any, chunk: int) -> Any:
    """The state of a chunk's generator: that of the pass for the first, never zero."""
    if chunk == 0:
        return seed
    return mix64(seed + np.uint64(chunk)) | np.uint64(1)
