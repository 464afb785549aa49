"""The lists of a stored graph, of one host: the edges among its own rows, and how often its lists name rows
of others. Lists are passed over in blocks of edges, in their order on disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.errors import FormatError

#: Edges read at once, and how long a stretch of other hosts' lists may be that is read through.
PASS_EDGES = 1 << 19
GAP_EDGES = 1 << 14


@njit(cache=True, nogil=True)
def count_remote(
    offsets: NDArray[np.int64], block: NDArray[Any], first_edge: int, row: int, host_of_row: NDArray[Any],
    host_of_source: NDArray[Any], remote: NDArray[np.int64],
) -> tuple[int, int]:  # fmt: skip
    """Add to ``remote`` int64 [hosts] the block's edges that go to a host's rows from another host's; (row of
    the last edge, first position of no row, or -1). ``row``: that of the last edge before;
    ``host_of_source``: of the rows that sources are."""
    for i in range(block.size):
        while offsets[row + 1] <= first_edge + i:
            row += 1
        source = block[i]
        if source < 0 or source >= host_of_source.size:
            return row, i
        if host_of_source[source] != host_of_row[row]:
            remote[host_of_row[row]] += 1
    return row, -1


@njit(cache=True, nogil=True)
def keep_local(
    offsets: NDArray[np.int64], block: NDArray[Any], first_edge: int, at: int, host_of_list: NDArray[Any],
    place: NDArray[Any], host: int, host_of_source: NDArray[Any], local_row: NDArray[Any], out: NDArray[Any],
    degrees: NDArray[np.int64], uses: NDArray[np.uint32],
) -> tuple[int, int, int]:  # fmt: skip
    """Of lists ``offsets[l]`` to ``offsets[l + 1]``, those of ``host``, and of these the block's edges whose
    sources are the host's: their local rows go to ``out``, one after the other; ``degrees`` of the list's
    ``place`` counts them, and ``uses`` uint32 [rows], or [0], each other source (it stops at 2**32 - 1).
    ``host_of_source``, ``local_row`` [rows]: of the rows that sources are.

    Returns (edges kept, list of the last edge, first position of no row, or -1).
    """
    kept = 0
    most = np.uint32(0xFFFFFFFF)
    for i in range(block.size):
        while offsets[at + 1] <= first_edge + i:
            at += 1
        if host_of_list[at] != host:
            continue
        source = block[i]
        if source < 0 or source >= host_of_source.size:
            return kept, at, i
        if host_of_source[source] == host:
            out[kept] = local_row[source]
            degrees[place[at]] += 1
            kept += 1
        elif uses.size > 0 and uses[source] != most:
            uses[source] += np.uint32(1)
    return kept, at, -1


@njit(cache=True, nogil=True)
def keep_values(
    offsets: NDArray[np.int64], block: NDArray[Any], values: NDArray[Any], first_edge: int, at: int,
    host_of_list: NDArray[Any], host: int, host_of_source: NDArray[Any], out: NDArray[Any],
) -> tuple[int, int]:  # fmt: skip
    """The ``values`` of the edges that :func:`keep_local` keeps of a block that it has passed over, into
    ``out``; (how many, list of the last edge)."""
    kept = 0
    for i in range(block.size):
        while offsets[at + 1] <= first_edge + i:
            at += 1
        if host_of_list[at] == host and host_of_source[block[i]] == host:
            out[kept] = values[i]
            kept += 1
    return kept, at


def need_row(bad: int, first_edge: int, where: str) -> None:
    """Raise FormatError where a block has a source that is no row."""
    if bad >= 0:
        raise FormatError(
            f"number {first_edge + bad:,} of the sources of {where} is no row of its table: run `featstore "
            "verify` on the store, and restore it from a copy or pack it again"
        )


def stretches(offsets: NDArray[np.int64], lists: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """(first list, end) of the stretches to read for some ``lists``, ascending, through gaps of a few
    edges."""
    if len(lists) == 0:
        return
    begins = offsets[lists]
    breaks = np.flatnonzero(begins[1:] - offsets[lists[:-1] + 1] > GAP_EDGES)
    for first, last in zip([0, *(breaks + 1)], [*breaks, len(lists) - 1], strict=True):
        yield int(lists[first]), int(lists[last]) + 1


def local_lists(
    read: Any, offsets: NDArray[np.int64], lists: NDArray[np.int64], host_of_list: NDArray[Any],
    place: NDArray[Any], host: int, host_of_source: NDArray[Any], local_row: NDArray[Any],
    degrees: NDArray[np.int64], uses: NDArray[np.uint32], where: str,
) -> Iterator[NDArray[Any]]:  # fmt: skip
    """Blocks of the sources of a host's ``lists``, as local rows, each only lent; ``degrees`` and ``uses``
    are counted on the way, as :func:`keep_local` does. ``read(low, high)`` gives sources as stored."""
    out = np.empty(PASS_EDGES, local_row.dtype)
    for first, end in stretches(offsets, lists):
        at = first
        for low in range(int(offsets[first]), int(offsets[end]), PASS_EDGES):
            block = read(low, min(low + PASS_EDGES, int(offsets[end])))
            kept, at, bad = keep_local(
                offsets, block, low, at, host_of_list, place, host, host_of_source, local_row, out, degrees,
                uses,
            )  # fmt: skip
            need_row(bad, low, where)
            yield out[:kept]


def local_values(
    read: Any, read_values: Any, dtype: np.dtype[Any], offsets: NDArray[np.int64], lists: NDArray[np.int64],
    host_of_list: NDArray[Any], host: int, host_of_source: NDArray[Any],
) -> Iterator[NDArray[Any]]:  # fmt: skip
    """Blocks of what stands beside the sources that :func:`local_lists` gives, each only lent;
    ``read_values`` gives it of all edges."""
    out = np.empty(PASS_EDGES, dtype)
    for first, end in stretches(offsets, lists):
        at = first
        for low in range(int(offsets[first]), int(offsets[end]), PASS_EDGES):
            run = low, min(low + PASS_EDGES, int(offsets[end]))
            kept, at = keep_values(
                offsets, read(*run), read_values(*run), low, at, host_of_list, host, host_of_source, out
            )
            yield out[:kept]
