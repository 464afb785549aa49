"""Rows of a part straight from the features that it is made of, without a store of all rows before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.native import address_of
from featstore.errors import SourceError
from featstore.packing.permute import RowMaps
from featstore.packing.row_ids import inverse
from featstore.packing.sources.base import FeatureSource
from featstore.storage.rows_digest import checksum_rows

_READ_BYTES = 4 << 20


class NodesOfSource(FeatureSource):
    """The rows of some nodes of a source, int64 [rows], ascending: it is passed over, and the others are left
    out. ``checksums`` uint32 [rows]: the CRC-32C of each as it was when the order was made, where that is
    known."""

    def __init__(
        self, source: FeatureSource, nodes: NDArray[Any], checksums: NDArray[np.uint32] | None
    ) -> None:
        super().__init__(
            source.name, len(nodes), source.row_shape, source.dtype, held_bytes=source.held_bytes
        )
        self._source, self._nodes, self._checksums = source, nodes, checksums

    def _blocks(self, start: int, block_rows: int) -> Iterator[NDArray[Any]]:
        if start == len(self._nodes):
            return
        low = int(self._nodes[start])
        for block in self._source.blocks(low, block_rows):
            end = int(np.searchsorted(self._nodes, low + len(block)))
            if end > start:
                # as bytes: of records that are taken by numbers, what lies between their fields is left out
                raw = np.ascontiguousarray(block).reshape(-1).view(np.uint8).reshape(-1, self.row_bytes)
                some = raw[self._nodes[start:end] - low]
                self._check(some, start)
                yield some.reshape(-1).view(self.dtype).reshape(end - start, *self.row_shape)
            start, low = end, low + len(block)
            if start == len(self._nodes):
                return
        raise SourceError(
            f"{self.name}: ended after {low:,} rows; it changed during the split or was not copied whole"
        )

    def _check(self, rows: NDArray[np.uint8], start: int) -> None:
        """Raise SourceError for a row, [n, row_bytes], that is another than when the order was made."""
        if self._checksums is None:
            return
        found = np.empty(len(rows), np.uint32)
        checksum_rows(address_of(rows), self.row_bytes, found)
        wrong = np.flatnonzero(found != self._checksums[start : start + len(rows)])
        if len(wrong):
            raise SourceError(
                f"{self.name}: the row of node {self._nodes[start + wrong[0]]:,} is not what it was when the "
                "split was begun: parts of other features are another split; start anew with --overwrite"
            )

    def fingerprint(self) -> dict[str, str | int]:
        return self._source.fingerprint()


class RowChecksums(FeatureSource):
    """In place of a table's rows, where only their order is wanted, the CRC-32C of each, uint32: what is made
    of other rows is something else."""

    def __init__(self, source: FeatureSource) -> None:
        held_bytes = source.held_bytes + _READ_BYTES + source.row_bytes
        super().__init__(source.name, source.rows, (), np.dtype(np.uint32), held_bytes=held_bytes)
        self._source = source

    def _blocks(self, start: int, block_rows: int) -> Iterator[NDArray[Any]]:
        row_bytes = self._source.row_bytes
        for rows in self._source.blocks(start, max(1, min(block_rows, _READ_BYTES // row_bytes))):
            block = np.ascontiguousarray(rows)
            checksums = self._empty(len(block))
            checksum_rows(address_of(block), row_bytes, checksums)
            yield checksums

    def fingerprint(self) -> dict[str, str | int]:
        return self._source.fingerprint()


def in_order_of(place: NDArray[np.int64]) -> RowMaps:
    """Row i of a source goes to row ``place[i]``; rows are known by their own numbers."""
    return RowMaps(place, inverse(place), place, None)
