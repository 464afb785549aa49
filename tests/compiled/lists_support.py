"""Lists of missed rows to place: given ones, and generated ones whose rows' popularity follows a power
law."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from featstore.compile.row_lists import RowLists, RowListsWriter
from featstore.storage.disk import Disk

Array = np.ndarray


def written(path: Path, lists: Sequence[Array | list[int]], dtype: object = np.int32) -> RowLists:
    writer = RowListsWriter(Disk(), path, dtype)
    for values in lists:
        writer.append(np.array(values, np.int64))
    return writer.finish()


def generators() -> st.SearchStrategy[np.random.Generator]:
    return st.integers(0, 2**32 - 1).map(np.random.default_rng)


def power_law(
    table_rows: int, batches: int, rows_each: int, exponent: float, seed: int = 0, dropped: float = 0.1
) -> list[Array]:
    """For each of ``batches`` mini-batches about ``rows_each`` rows in random order, row i (of a random
    order) with a chance that falls as ``(i + 20) ** -exponent``. The most popular ones, a share ``dropped``
    of them, are in memory and never missed. Exponent 0: all rows alike."""
    rng = np.random.default_rng(seed)
    popularity = (np.arange(table_rows) + 20.0) ** -exponent
    popularity[: int(table_rows * dropped)] = 0
    low, high = 0.0, 1e12
    for _ in range(100):
        factor = (low + high) / 2
        low, high = (factor, high) if -np.expm1(-factor * popularity).sum() < rows_each else (low, factor)
    chance, order = -np.expm1(-low * popularity), rng.permutation(table_rows)
    return [rng.permutation(order[rng.random(table_rows) < chance]) for _ in range(batches)]


def lists_at_random(rng: np.random.Generator, table_rows: int, batches: int) -> list[Array]:
    """Lists of very different lengths, empty ones among them, in random order."""
    shares = rng.choice([0.0, 0.01, 0.1, 0.5, 1.0], batches)
    return [rng.permutation(np.flatnonzero(rng.random(table_rows) < share)) for share in shares]
