"""Rows of a part straight from the features that it is made of, without a store of all rows before."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.errors import SourceError
from featstore.packing.permute import RowMaps
from featstore.packing.row_ids import inverse
from featstore.packing.sources.base import FeatureSource, bytes_of, dtype_text

_LOOKED_AT_ROWS = 64


class NodesOfSource(FeatureSource):
    """The rows of some nodes of a source, int64 [rows], ascending: it is passed over, and the others are left
    out."""

    def __init__(self, source: FeatureSource, nodes: NDArray[Any]) -> None:
        super().__init__(
            source.name, len(nodes), source.row_shape, source.dtype, held_bytes=source.held_bytes
        )
        self._source, self._nodes = source, nodes

    def _blocks(self, start: int, block_rows: int) -> Iterator[NDArray[Any]]:
        if start == len(self._nodes):
            return
        low = int(self._nodes[start])
        for block in self._source.blocks(low, block_rows):
            end = int(np.searchsorted(self._nodes, low + len(block)))
            if end > start:
                yield block[self._nodes[start:end] - low]
            start, low = end, low + len(block)
            if start == len(self._nodes):
                return
        raise SourceError(
            f"{self.name}: ended after {low:,} rows; it changed during the split or was not copied whole"
        )

    def fingerprint(self) -> dict[str, str | int]:
        return self._source.fingerprint()


class OneByteRows(FeatureSource):
    """In place of a table's rows, where only their order is wanted."""

    def __init__(self, source: FeatureSource) -> None:
        assert source.rows is not None
        super().__init__(source.name, source.rows, (), np.dtype(np.uint8))

    def _blocks(self, start: int, block_rows: int) -> Iterator[NDArray[Any]]:
        assert self.rows is not None
        for low in range(start, self.rows, block_rows):
            yield self._empty(min(block_rows, self.rows - low))

    def fingerprint(self) -> dict[str, str | int]:
        return {"kind": "one byte a row"}


def in_order_of(place: NDArray[np.int64]) -> RowMaps:
    """Row i of a source goes to row ``place[i]``; rows are known by their own numbers."""
    return RowMaps(place, inverse(place), place, None)


def looked_at(source: FeatureSource) -> dict[str, Any]:
    """What tells a source from most others, wherever it lies: for the provenance of what is made of it."""
    first = np.ascontiguousarray(source.sample(_LOOKED_AT_ROWS))
    return {
        "rows": source.rows, "row_shape": list(source.row_shape), "dtype": dtype_text(source.dtype),
        "first_rows_crc32": zlib.crc32(bytes_of(first).tobytes()),
    }  # fmt: skip
