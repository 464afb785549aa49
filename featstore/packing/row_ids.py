"""Ids that say whose row it is: read, held against 0 to n-1, and kept until the rows are placed.

Row i of the source belongs to node ``ids[i]``. Ids must be a permutation of 0 to n-1: then no row is lost,
and no node is without one. They are read in a pass of their own, before anything is ordered, because all else
speaks of nodes; what is kept is a file of 4 bytes a row (8 beyond 2^31 rows), made anew when a pack is
resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.dtypes import node_dtype
from featstore.errors import BudgetError, SourceError
from featstore.packing.sources.opening import FeatureSource
from featstore.storage.disk import Disk

__all__ = ["inverse", "read_ids", "write_ids"]

_SHOWN = 5


def read_ids(source: FeatureSource, memory_bytes: int, tick: Callable[[int], None]) -> NDArray[Any] | None:
    """Node ids of a source's rows, [rows]; None where row i is node i. ``tick`` is told how many came.

    A source that did not know its number of rows knows it from here on.

    Raises SourceError for ids that are no permutation of 0 to n-1, naming them, and BudgetError.
    """
    if source.rows is None:
        ids = _counted_ids(source, memory_bytes, tick)
    else:
        _check_memory(source, source.rows, 0, memory_bytes)
        ids, first = np.empty(source.rows, node_dtype(source.rows)), 0
        for run in source.ids():
            if first + len(run) > len(ids):
                break
            _check_range(run, first, len(ids), source)
            ids[first : first + len(run)] = run
            first += len(run)
            tick(len(run))
        if first != len(ids):
            raise SourceError(
                f"{source.name}: its column of ids and its {len(ids):,} rows are not equally long; the "
                "file changed or is damaged"
            )
    place = np.full(len(ids), -1, ids.dtype)
    place[ids] = np.arange(len(ids), dtype=ids.dtype)
    _check_once(ids, place, source)
    source.rows = len(ids)
    return None if bool(np.all(ids[1:] > ids[:-1])) else ids


def _counted_ids(source: FeatureSource, memory_bytes: int, tick: Callable[[int], None]) -> NDArray[Any]:
    """The ids of a source that does not know its number of rows: kept as they come until they are counted."""
    runs: list[NDArray[np.int64]] = []
    rows, fits = 0, True
    for run in source.ids():
        rows += len(run)
        tick(len(run))
        fits = fits and _needed_bytes(rows, 8) <= memory_bytes
        if fits:
            runs.append(run)
        else:
            runs.clear()  # only their number is still wanted, for the error
    _check_memory(source, rows, 8, memory_bytes)
    ids, first = np.empty(rows, node_dtype(rows)), 0
    for run in runs:
        _check_range(run, first, rows, source)
        ids[first : first + len(run)] = run
        first += len(run)
    return ids


def _needed_bytes(rows: int, more: int) -> int:
    """Memory while ids are checked: themselves and a place for each, and ``more`` bytes a row."""
    return rows * (2 * node_dtype(rows).itemsize + more)


def _check_memory(source: FeatureSource, rows: int, more: int, memory_bytes: int) -> None:
    if _needed_bytes(rows, more) > memory_bytes:
        raise BudgetError(_needed_bytes(rows, more), memory_bytes, f"hold the {rows:,} ids of {source.name}")


def _check_range(run: NDArray[np.int64], first: int, rows: int, source: FeatureSource) -> None:
    bad = np.flatnonzero((run < 0) | (run >= rows))
    if bad.size:
        at = int(bad[0])
        raise SourceError(
            f"{_where(source)}: row {first + at:,} has id {int(run[at])}, but with {rows:,} rows ids are 0 "
            f"to {rows - 1:,}, each once; number the nodes so first (keys of other kinds are not kept yet), "
            "or name the features with columns= to take the rows as they come"
        )


def _check_once(ids: NDArray[Any], place: NDArray[Any], source: FeatureSource) -> None:
    """Each id once: with as many rows as ids, one that comes twice is also one that is missing."""
    missing = np.flatnonzero(place < 0)
    if not missing.size:
        return
    # rows whose id comes again later
    earlier = np.flatnonzero(place[ids] != np.arange(len(ids), dtype=ids.dtype))
    row, again = int(earlier[0]), int(place[ids[earlier[0]]])
    names = ", ".join(f"{int(i):,}" for i in missing[:_SHOWN]) + (", ..." if missing.size > _SHOWN else "")
    raise SourceError(
        f"{_where(source)}: id {int(ids[row]):,} is that of row {row:,} and of row {again:,}, and "
        f"{missing.size:,} of the ids 0 to {len(ids) - 1:,} are missing ({names}); each must come once: no "
        "row may be lost, and no node be without one"
    )


def _where(source: FeatureSource) -> str:
    assert source.chosen is not None
    assert source.chosen.id is not None
    return f"{source.name}, id={source.chosen.names[source.chosen.id]!r}"


def write_ids(ids: NDArray[Any], disk: Disk, path: Path) -> None:
    """Keep ids in a file of their own, to be read by `numpy.fromfile`."""
    disk.write_file(path, np.ascontiguousarray(ids).view(np.uint8))


def inverse(order: NDArray[Any]) -> NDArray[Any]:
    """The inverse of a permutation, of the same dtype."""
    out = np.empty_like(order)
    out[order] = np.arange(len(order), dtype=order.dtype)
    return out
