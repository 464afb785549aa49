"""Weights and times of edges: from the order in which the user has them into that of the lists.

Values come as a source of rows, one for each edge by its number. They are looked at before an order is made,
which may take long, and then passed over: as many as the memory has room for are held; for these the numbers
of the stored edges are gone through in order, and the values that are there are put in their places. So
values that fit take one pass more, and others as many as there are memories full of them, each of them
sequential. What comes out stands in scratch files.

Where edges have times, lists are then sorted by them, run by run of whole lists: stably, so that edges of one
time stay as they stood.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.files import map_values
from featstore.errors import BudgetError, SourceError
from featstore.packing.graphs.build import ScratchFile
from featstore.packing.graphs.csc import AsGiven, numbers_between, release_pages
from featstore.packing.sources.base import FeatureSource, FileReader

_BLOCK_EDGES = 1 << 18
_BLOCK_EDGES_MIN = 1 << 10
_SHARE = 8  # of the memory is for a block
_PLACING_BYTES = 48  # of an edge of a block: its number, whether it is here, its value
SORTING_BYTES = 64  # of an edge of a run: its list, its time, the order, and all that is moved


@dataclass(frozen=True)
class EdgeValues:
    """One number for each edge, by the user's number of the edge: ``part`` says what, ``"weights"`` (finite,
    not negative, float32 or float64) or ``"times"`` (whole numbers, as int64)."""

    part: str
    source: FeatureSource

    def __post_init__(self) -> None:
        source, dtype = self.source, self.source.dtype
        if source.row_shape not in ((), (1,)):
            raise SourceError(
                f"{self._name}: one number for each edge is needed, not rows of shape {source.row_shape}"
            )
        if source.chosen is not None and source.chosen.id is not None:
            raise SourceError(f"{self._name}: values of edges stand in the order of the edges, without ids")
        if self.part == "weights" and dtype not in (np.float32, np.float64):
            raise SourceError(f"{self._name}: weights are float32 or float64, not {dtype}: convert them")
        if self.part == "times" and (dtype.kind not in "iu" or not np.can_cast(dtype, np.int64)):
            raise SourceError(
                f"{self._name}: times are whole numbers that fit int64, not {dtype}: convert them, in a unit "
                "of your own (of datetime64, .astype('int64'))"
            )

    @property
    def _name(self) -> str:
        return f"edge_{self.part}: {self.source.name}"

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of what is stored."""
        return self.source.dtype if self.part == "weights" else np.dtype(np.int64)

    def check_edges(self, edges: int) -> None:
        """Raise SourceError where there is another number of values, as far as that is known."""
        if self.source.rows not in (None, edges):
            raise self._other(self.source.rows or 0, edges)

    def _other(self, values: int, edges: int) -> SourceError:
        return SourceError(
            f"{self._name}: {values:,} values for a graph of {edges:,} edges; give one for each"
        )

    def check(self, edges: int) -> None:
        """Raise SourceError where it is not one value for each edge, or not one that may be. What can be read
        once is looked at when it is."""
        self.check_edges(edges)
        if self.source.replayable:
            for _ in self._blocks(edges):
                pass

    def _blocks(self, edges: int) -> Iterator[NDArray[Any]]:
        """The values in order, lent, and checked."""
        done, total = 0, 0.0
        for lent in self.source.blocks(0, _BLOCK_EDGES):
            block = lent.reshape(-1)
            if self.part == "weights":
                for at in np.flatnonzero(~(np.isfinite(block) & (block >= 0)))[:1].tolist():
                    raise SourceError(
                        f"{self._name}: the weight of edge {done + at:,} is {block[at]}; weights are finite "
                        "and not negative"
                    )
                with np.errstate(over="ignore"):
                    total += float(block.sum(dtype=np.float64))
                if not np.isfinite(total):
                    raise SourceError(
                        f"{self._name}: the sum of all weights is beyond float64, and each has a chance "
                        "in proportion to it; divide all by the largest"
                    )
            done += len(block)
            if done > edges:
                raise self._other(self.source.rows or done, edges)
            yield block
        if done != edges:
            raise self._other(done, edges)

    def chunks(self, edges: int, most: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """(number of the first edge, values) in order, at most so many at once; checked. The array is used
        again."""
        chunk, fill, first = np.empty(min(most, edges), self.dtype), 0, 0
        for block in self._blocks(edges):
            while len(block):
                take = block[: len(chunk) - fill]
                chunk[fill : fill + len(take)] = take
                fill, block = fill + len(take), block[len(take) :]
                if fill == len(chunk):
                    yield first, chunk
                    first, fill = first + fill, 0
        if fill:
            yield first, chunk[:fill]

    def in_order(
        self, edge_ids: NDArray[Any] | AsGiven, edges: int, memory_bytes: int, scratch_dir: Path
    ) -> NDArray[Any]:
        """The values of the edges of these numbers, in their order: [edges], a mapped scratch file. Raises
        SourceError, BudgetError, DiskFullError, DeviceError."""
        self.check_edges(edges)
        memory = memory_bytes - self.source.held_bytes
        least = _BLOCK_EDGES_MIN * (_PLACING_BYTES + self.dtype.itemsize)
        if memory < least:
            raise BudgetError(least + self.source.held_bytes, memory_bytes, f"place the {self.part} of edges")
        block = max(_BLOCK_EDGES_MIN, min(_BLOCK_EDGES, memory // (_SHARE * _PLACING_BYTES)))
        room = (memory - block * _PLACING_BYTES) // self.dtype.itemsize
        with ScratchFile(scratch_dir, "graph-values-", keep=True) as out:
            for first, chunk in self.chunks(edges, max(1, room)):
                if isinstance(edge_ids, AsGiven):
                    out.write(chunk, first * self.dtype.itemsize)
                else:
                    _place(out, edge_ids, first, chunk, block)
        return map_values(out.path, self.dtype, edges) if edges else np.empty(0, self.dtype)


def _place(out: ScratchFile, edge_ids: NDArray[Any], first: int, chunk: NDArray[Any], block: int) -> None:
    """Write the values of edges ``first`` and so on to the places where these numbers stand."""
    with FileReader(out.path) as before:
        for low in range(0, len(edge_ids), block):
            numbers = np.asarray(edge_ids[low : low + block])
            values = np.zeros(len(numbers), chunk.dtype)
            if first:
                before.read_into(values, low * chunk.itemsize)
            here = np.flatnonzero((numbers >= first) & (numbers < first + len(chunk)))
            values[here] = chunk[numbers[here] - first]
            out.write(values, low * chunk.itemsize)
            release_pages(edge_ids, low, low + len(numbers))


def by_time(
    offsets: NDArray[np.int64], times: NDArray[np.int64], others: Mapping[str, NDArray[Any] | AsGiven],
    memory_bytes: int, scratch_dir: Path,
) -> dict[str, NDArray[Any]]:  # fmt: skip
    """Each list in ascending time: ``times``, and ``others`` [edges] by name, in mapped scratch files. Raises
    BudgetError where the longest list has no room, DiskFullError, DeviceError."""
    edges, nodes = len(times), len(offsets) - 1
    block = max(_BLOCK_EDGES_MIN, min(_BLOCK_EDGES, memory_bytes // SORTING_BYTES))
    arrays: dict[str, Any] = {**others, "times": times}
    dtypes = {n: np.dtype(np.int64) if isinstance(a, AsGiven) else a.dtype for n, a in arrays.items()}
    with ExitStack() as stack:
        out = {n: stack.enter_context(ScratchFile(scratch_dir, "graph-values-", keep=True)) for n in arrays}
        node = 0
        while node < nodes:
            limit = int(offsets[node]) + block
            ahead = offsets[node + 1 : node + 1 + block]
            end = node + max(1, int(np.searchsorted(ahead, limit, side="right")))
            low, high = int(offsets[node]), int(offsets[end])
            if (high - low) * SORTING_BYTES > memory_bytes:
                needed = (high - low) * SORTING_BYTES
                raise BudgetError(needed, memory_bytes, "sort the in-edges of one node by time")
            which = np.repeat(np.arange(end - node), np.diff(offsets[node : end + 1]))
            order = np.lexsort((times[low:high], which))
            for name, array in arrays.items():
                if isinstance(array, AsGiven):
                    out[name].write(numbers_between(low, high)[order])
                else:
                    out[name].write(np.asarray(array[low:high])[order])
                    release_pages(array, low, high)
            node = end
    return {
        n: map_values(file.path, dtypes[n], edges) if edges else np.empty(0, dtypes[n])
        for n, file in out.items()
    }
