"""The tables of a compiled trace: their entries, the small files around them, and what writes their rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from featstore.base.dtypes import dtype_name
from featstore.layout import TableLayout
from featstore.storage.manifest import ArrayEntry, OrderEntry, TableEntry, array_chunk
from featstore.storage.table_writer import (
    WRITE_THREADS,
    Catalogue,
    TableWriter,
    write_array,
    write_rows_metadata,
    zarr_group_json,
)


def new_table(
    catalogue: Catalogue, base: str, rows: int, row_shape: tuple[int, ...], dtype: np.dtype[Any]
) -> TableEntry:
    """The entry of a table in the directory ``base`` (below the store), in the order given; all of it is
    written but rows and checksums."""
    for directory in ("rows", "page_checksums"):
        catalogue.directory(f"{base}/{directory}")
    catalogue.write(f"{base}/zarr.json", zarr_group_json())
    row_bytes = dtype.itemsize * int(np.prod(row_shape, dtype=np.int64))
    layout = TableLayout.choose(rows, row_bytes)
    offsets = write_array(catalogue, f"{base}/partition_offsets", np.array([0, rows]))
    entry = TableEntry(
        path=f"{base}/rows", rows=rows, row_shape=list(row_shape), dtype=dtype_name(dtype),
        row_bytes=row_bytes, rows_per_chunk=layout.rows_per_chunk,
        page_checksums=ArrayEntry(f"{base}/page_checksums", [layout.pages], "uint32"),
        order=OrderEntry("given", {}, offsets), statistics={},
    )  # fmt: skip
    write_rows_metadata(catalogue, entry, dtype)
    return entry


def table_writer(catalogue: Catalogue, entry: TableEntry, threads: int = WRITE_THREADS) -> TableWriter:
    """What writes the rows of a table."""
    return TableWriter(
        catalogue.disk, entry.layout, lambda chunk: chunk_path(catalogue, entry, chunk),
        catalogue.root / str(array_chunk(entry.page_checksums)), threads,
    )  # fmt: skip


def chunk_path(catalogue: Catalogue, entry: TableEntry, chunk: int) -> Path:
    """Where a chunk file of a table is."""
    return catalogue.root / entry.chunk_path(chunk)
