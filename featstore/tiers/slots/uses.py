"""Counts of uses of rows, 16 bits each, and the rows that were used most."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.hashing import mix64

_COUNT_MAX = 2**16 - 1


@njit(cache=True, nogil=True)
def note_rows(
    ids: NDArray[np.int64], row_count: int, key: Any, threshold: Any, uses: NDArray[np.uint16],
    log: NDArray[np.int64], at: Any
) -> Any:  # fmt: skip
    """Count the uses of a mini-batch's rows, and write those of the sample into ``log`` from ``at`` on.

    ``uses``: uint16 [row_count], or empty. A row is in the sample where its hash is at most ``threshold``
    (uint64). Returns where the log ends now; -1 where it is too small; or -2 - position of the first id that
    is no row, and then nothing was counted.
    """
    for i in range(ids.shape[0]):
        if ids[i] < 0 or ids[i] >= row_count:
            return -2 - i
    if uses.shape[0] > 0:
        for i in range(ids.shape[0]):
            uses[ids[i]] += np.uint16(uses[ids[i]] < _COUNT_MAX)
    i = 0
    while i < ids.shape[0]:
        if at < 0 or at == log.shape[0]:
            return -1
        fit = min(ids.shape[0], i + log.shape[0] - at)
        for j in range(i, fit):  # without branches, which could not be foreseen
            log[at] = ids[j]
            at += np.int64(mix64(np.uint64(ids[j]) ^ key) <= threshold)
        i = fit
    return at


@njit(cache=True, nogil=True)
def count_uses(uses: NDArray[np.uint16]) -> NDArray[np.int64]:
    """How many rows have each number of uses, int64 [2**16]."""
    found = np.zeros(_COUNT_MAX + 1, np.int64)
    for row in range(uses.shape[0]):
        found[uses[row]] += 1
    return found


@njit(cache=True, nogil=True)
def halve_uses(uses: NDArray[np.uint16]) -> None:
    for row in range(uses.shape[0]):
        uses[row] >>= 1


@njit(cache=True, nogil=True)
def find_wanted(
    uses: NDArray[np.uint16], first: int, above: int, tie_key: Any, ties: Any, key: Any, threshold: Any
) -> NDArray[np.int64]:
    """Rows with more than ``above`` uses; of those with just as many (but not none), where the hash under
    ``tie_key`` is at most ``ties``.

    ``first``: the row of ``uses[0]``. Only rows whose hash under ``key`` is at most ``threshold`` (uint64, as
    keys and ``ties``). Returns int64, ascending.
    """
    found = np.empty(1024, np.int64)
    count = 0
    for at in range(uses.shape[0]):
        row = first + at
        if uses[at] > above or (uses[at] == above and above > 0 and mix64(np.uint64(row) ^ tie_key) <= ties):
            if mix64(np.uint64(row) ^ key) > threshold:
                continue
            if count == found.shape[0]:
                more = np.empty(2 * count, np.int64)
                more[:count] = found
                found = more
            found[count] = row
            count += 1
    return found[:count].copy()
