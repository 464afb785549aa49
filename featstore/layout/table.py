"""The base table's layout: rows one after the other, cut into chunk files of whole pages.

A table of R rows of ``row_bytes`` each is a zarr v3 array whose chunks are runs of ``rows_per_chunk`` rows. A
table of several chunks has ``rows_per_chunk * row_bytes`` a multiple of 4 KiB, so that all chunk files laid
end to end are one address space in which row r starts at byte ``r * row_bytes`` and page p at ``p * 4096``:
planning needs a multiplication and a shift, and only opening a read needs to know where files end. No row
lies in two files. A table of one chunk has exactly its rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from featstore.errors import ArgumentError
from featstore.units import PAGE_BYTES

#: Chunk files aim at this size ...
CHUNK_BYTES = 64 * 2**20
#: ... unless a table would then have more files than this (each is held open by a reader).
CHUNKS_MAX = 512


@dataclass(frozen=True)
class TableLayout:
    """Where the rows of one table lie. All fields count rows, bytes or pages as named."""

    rows: int
    row_bytes: int
    rows_per_chunk: int

    def __post_init__(self) -> None:
        if self.rows < 0 or self.row_bytes < 1 or self.rows_per_chunk < 1:
            raise ArgumentError(f"impossible table layout: {self}")
        if self.chunks > 1 and self.rows_per_chunk * self.row_bytes % PAGE_BYTES:
            raise ArgumentError(
                f"impossible table layout: {self.chunks} chunks of {self.rows_per_chunk} rows of "
                f"{self.row_bytes} bytes are not whole pages of {PAGE_BYTES} bytes"
            )

    @classmethod
    def choose(cls, rows: int, row_bytes: int, chunk_bytes: int | None = None) -> TableLayout:
        """The layout a pack uses: chunks of about ``chunk_bytes`` (CHUNK_BYTES), the last one as full as the
        others allow."""
        chunk_bytes = CHUNK_BYTES if chunk_bytes is None else chunk_bytes
        step = PAGE_BYTES // math.gcd(row_bytes, PAGE_BYTES)  # rows in the smallest run of whole pages
        wanted = max(1, min(CHUNKS_MAX, round(rows * row_bytes / chunk_bytes)))
        per_chunk = -(-math.ceil(rows / wanted) // step) * step
        if rows <= per_chunk:
            return cls(rows, row_bytes, max(rows, 1))
        return cls(rows, row_bytes, per_chunk)

    @property
    def chunks(self) -> int:
        return -(-self.rows // self.rows_per_chunk)

    @property
    def chunk_bytes(self) -> int:
        """Size of every chunk file; the last one is filled up with zero bytes."""
        return self.rows_per_chunk * self.row_bytes

    @property
    def data_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def pages_per_chunk(self) -> int:
        return -(-self.chunk_bytes // PAGE_BYTES)

    @property
    def pages(self) -> int:
        """Pages of all chunk files together: the number of page checksums."""
        return self.chunks * self.pages_per_chunk
