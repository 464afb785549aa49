"""Scrubbing a table: its pages, its maps, its rows from end to end, and the metadata of its arrays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from featstore.base.checks import find_fall
from featstore.base.checksum import crc_pages
from featstore.base.dtypes import dtype_from_name, zarr_storage
from featstore.base.files import RegularFile
from featstore.base.hashing import mix64
from featstore.base.native import address_of
from featstore.scrub.blocks import Blocks
from featstore.scrub.numbers import Numbers
from featstore.scrub.report import Findings
from featstore.storage.manifest import ArrayEntry, FileEntry, TableEntry, array_chunk
from featstore.storage.rows_digest import add, digest_rows
from featstore.units import PAGE_BYTES

_METADATA_BYTES_MAX = 1 << 20


def margin_for(row_bytes: int) -> int:
    """Bytes before a block in which a row has room that ends in it, so that rows lie in one piece."""
    return -(-row_bytes // PAGE_BYTES) * PAGE_BYTES


def scrub_metadata(
    findings: Findings, entries: Mapping[str, FileEntry], folder: str, shape: list[int], chunks: list[int],
    dtype: str,
) -> None:  # fmt: skip
    """``zarr.json`` of an array, in chunks of this shape, against the manifest."""
    path = f"{folder}/zarr.json"
    if path not in entries:
        findings.problem("metadata", path, "zarr metadata, listed in the manifest", "none")
    if not findings.intact(path):
        return
    stored, extra = zarr_storage(dtype_from_name(dtype))
    wanted = {
        "zarr_format": 3, "node_type": "array", "shape": [*shape, *extra], "data_type": stored,
        "chunk_grid": {
            "name": "regular", "configuration": {"chunk_shape": [max(1, n) for n in [*chunks, *extra]]}
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
    }  # fmt: skip
    try:
        with RegularFile(findings.store / path) as file:
            text = file.read_at(0, min(file.size_bytes, _METADATA_BYTES_MAX))
        found = json.loads(text.tobytes())
        codecs = [(c["name"], c.get("configuration", {}).get("endian", "little")) for c in found["codecs"]]
        for key, value in wanted.items():
            if found.get(key) != value:
                findings.problem("metadata", path, f"{key} = {json.dumps(value)}", json.dumps(found.get(key)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        findings.problem("metadata", path, "zarr v3 array metadata", f"something else ({error!r})")
        return
    if codecs != [("bytes", "little")]:
        findings.problem(
            "metadata", path, "the codec bytes alone, little-endian", json.dumps(found["codecs"])
        )


def scrub_table(
    findings: Findings, blocks: Blocks, entries: Mapping[str, FileEntry], table: TableEntry
) -> None:
    """Report what is wrong with a table."""
    _TableScrub(findings, blocks, entries, table).run()


class _TableScrub:
    """The checks of one table."""

    def __init__(
        self, findings: Findings, blocks: Blocks, entries: Mapping[str, FileEntry], table: TableEntry
    ) -> None:
        self._findings = findings
        self._blocks = blocks
        self._entries = entries
        self._table = table
        self._sums = Numbers(findings.store, table.page_checksums)

    def run(self) -> None:
        table, order, findings = self._table, self._table.order, self._findings
        shape, chunk_shape = [table.rows, *table.row_shape], [table.rows_per_chunk, *table.row_shape]
        scrub_metadata(findings, self._entries, table.path, shape, chunk_shape, table.dtype)
        maps = [
            entry
            for entry in (order.node_of_row, order.row_of_node, order.rows_by_degree)
            if entry is not None
        ]
        for entry in (table.page_checksums, order.partition_offsets, *maps):
            scrub_metadata(findings, self._entries, entry.path, entry.shape, entry.shape, entry.dtype)
        before = findings.problem_count
        self._maps()
        chunks = {table.chunk_path(chunk): chunk for chunk in range(table.layout.chunks)}
        total = sum(self._chunk(chunk) for path, chunk in chunks.items() if path in findings.readable)
        recorded, actual = table.statistics.get("rows_digest"), f"{total % 2**64:016x}"
        # With a bad page or map the digest is wrong for a known reason; it is there for what nothing else
        # sees.
        blameless = (
            findings.problem_count == before
            and chunks.keys() <= findings.readable
            and all(map(findings.sound, maps))
        )
        if blameless and recorded is not None and recorded != actual:
            findings.problem("rows digest", table.path, recorded, actual)

    def _maps(self) -> None:
        order, rows, problem = self._table.order, self._table.rows, self._findings.problem
        if self._findings.sound(order.partition_offsets):
            self._partitions(order.partition_offsets, rows)
        if (order.row_of_node is None) != (order.node_of_row is None):
            problem("map", self._table.path, "both row_of_node and node_of_row, or neither", "one of them")
        row_of, node_of, degrees = order.row_of_node, order.node_of_row, order.rows_by_degree
        by_row = self._map_digest(row_of, rows, lambda nodes, rows: _sum(mix64(nodes) + rows))
        by_node = self._map_digest(node_of, rows, lambda rows, nodes: _sum(mix64(nodes) + rows))
        if node_of is not None and by_row is not None and by_node is not None and by_row != by_node:
            problem("map", str(array_chunk(node_of)), "the inverse of row_of_node", "something else")
        # All values against 0, 1, 2 ... as a set: the difference is zero for a permutation.
        if degrees is not None and self._map_digest(degrees, rows, lambda i, v: _sum(v) - _sum(i)):
            problem("map", str(array_chunk(degrees)), f"a permutation of 0 to {rows - 1:,}", "something else")

    def _partitions(self, entry: ArrayEntry, rows: int) -> None:
        last, ascend = 0, True
        for first, offsets in Numbers(self._findings.store, entry).pieces():
            ascend &= last <= int(offsets[0]) and find_fall(offsets) < 0 and (first > 0 or offsets[0] == 0)
            last = int(offsets[-1])
        if not ascend or last != rows:
            expected = f"offsets that ascend from 0 to {rows:,}"
            self._findings.problem("map", str(array_chunk(entry)), expected, "others")

    def _map_digest(self, entry: ArrayEntry | None, rows: int, digest: Callable[..., int]) -> int | None:
        """Sum of ``digest(index, values)`` modulo 2**64; None where the map is absent or damaged. Checks the
        range."""
        if entry is None or not self._findings.sound(entry):
            return None
        total, path = 0, str(array_chunk(entry))
        for first, values in Numbers(self._findings.store, entry).pieces():
            for at in np.flatnonzero((values < 0) | (values >= rows))[:1]:
                place = (first + int(at)) * values.itemsize
                self._findings.problem("map", path, f"values from 0 to {rows - 1:,}", values[at], place)
            index = np.arange(first, first + len(values), dtype=np.uint64)
            total = add(total, digest(index, values.astype(np.uint64)))
        return total

    def _chunk(self, chunk: int) -> int:
        """One chunk file against its checksums and its digest; returns the digest of its rows."""
        findings, layout, path = self._findings, self._table.layout, self._table.chunk_path(chunk)
        sums, first_page = array_chunk(self._table.page_checksums), chunk * layout.pages_per_chunk
        known = sums in findings.readable
        digest, by_checksums = hashlib.sha256(), hashlib.sha256()
        for _, stored in self._sums.pieces(first_page, first_page + layout.pages_per_chunk * known):
            by_checksums.update(stored.tobytes())
        trusted = by_checksums.hexdigest() == self._entries[path].digest
        rows = _Rows(findings, self._table, chunk, self._blocks.margin)
        for offset, buffer, bad in self._blocks.of(path):
            block = buffer[self._blocks.margin :]
            actual = crc_pages(block)
            digest.update(actual.tobytes())
            if known:
                at = first_page + offset // PAGE_BYTES
                stored = self._sums.read(at, len(actual))
                findings.pages += len(stored)
                for k in map(int, np.flatnonzero(stored != actual[: len(stored)])):
                    data, kept, place = f"{actual[k]:08x}", f"{stored[k]:08x}", offset + k * PAGE_BYTES
                    if trusted and place not in bad:
                        findings.problem("page checksum", path, kept, data, place)
                    elif place not in bad:
                        findings.problem("stored checksum", str(sums), data, kept, 4 * (at + k))
            rows.take(buffer)
            end = max(0, layout.data_bytes - chunk * layout.chunk_bytes - offset)
            if block[end:].any():
                findings.problem("padding", path, "zero bytes after the last row", "others", offset + end)
        if findings.intact(path) and digest.hexdigest() != self._entries[path].digest:
            findings.problem("file digest", path, self._entries[path].digest, digest.hexdigest())
        return rows.digest


class _Rows:
    """The rows of one chunk, cut out of its blocks, and their digest."""

    def __init__(self, findings: Findings, table: TableEntry, chunk: int, margin: int) -> None:
        self.digest = 0
        nodes = table.order.node_of_row
        self._nodes = None if nodes is None else Numbers(findings.store, nodes)
        self._known = nodes is None or findings.sound(nodes)  # without node ids there is no digest
        self._margin = margin
        self._row_bytes = table.row_bytes
        self._row = chunk * table.rows_per_chunk
        self._end = min(self._row + table.rows_per_chunk, table.rows)
        self._rest = np.empty(0, np.uint8)

    def take(self, buffer: NDArray[np.uint8]) -> None:
        """The next block; the begun row before it goes into the margin."""
        begin = self._margin - len(self._rest)
        buffer[begin : self._margin] = self._rest
        data = buffer[begin:]
        count = min(len(data) // self._row_bytes, self._end - self._row)
        if not self._known:
            return
        for first in range(0, count, Numbers.PIECE):
            piece, row = min(Numbers.PIECE, count - first), self._row + first
            nodes = np.empty(0, np.int64) if self._nodes is None else self._nodes.read(row, piece)
            if self._nodes is not None and len(nodes) < piece:
                return
            address = address_of(data) + first * self._row_bytes
            self.digest = add(self.digest, int(digest_rows(address, self._row_bytes, nodes, row, piece)))
        self._row += count
        self._rest = data[count * self._row_bytes :].copy() if self._row < self._end else data[:0]


def _sum(values: NDArray[np.uint64]) -> int:
    """Sum of the values' hashes, modulo 2**64: equal for equal sets, whatever their order."""
    return int(mix64(values).sum(dtype=np.uint64))


def scrub_featureless(findings: Findings, table: TableEntry) -> None:
    """Report where a table of nodes without features is not all zero."""
    numbers = Numbers(findings.store, table)
    for first, values in numbers.pieces() if all(map(findings.intact, numbers.paths)) else ():
        for at in np.flatnonzero(values)[:1].tolist():
            path, offset = numbers.place(first + at)
            findings.problem("rows", path, "zero, as of nodes without features", int(values[at]), offset)
            return
