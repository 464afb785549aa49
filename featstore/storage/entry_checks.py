"""What must be so of single entries of a manifest: paths, files, arrays, tables, orders."""

from __future__ import annotations

import math
import re

from featstore.base.dtypes import dtype_from_name
from featstore.errors import FormatError
from featstore.storage.manifest import (
    AXES_MAX,
    PARTITIONS_OF_FEW_ROWS,
    ROW_BYTES_MAX,
    ROWS_MAX,
    ArrayEntry,
    FileEntry,
    Manifest,
    OrderEntry,
    TableEntry,
    array_bytes,
    array_chunk,
)

ELEMENTS_MAX = 2**48
TABLE_BYTES_MAX = 2**62
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}")
_PATH = re.compile(rf"{_PART.pattern}(?:/{_PART.pattern})+")
#: Of numbers of rows and edges.
ROW_DTYPES = ("int32", "int64")


def check_numbers(
    name: str, table: TableEntry, rows: int, dtypes: tuple[str, ...], manifest: Manifest,
    files: dict[str, FileEntry],
) -> None:  # fmt: skip
    """A table of plain numbers, of which a graph or keys consist."""
    check_table(name, table, manifest.generation, files)
    if table.row_shape or table.dtype not in dtypes or table.rows != rows:
        raise FormatError(
            f"{name} should be {rows} numbers of type {' or '.join(dtypes)}, not "
            f"{table.rows} x {table.row_shape} {table.dtype}"
        )
    if table.order.row_of_node is not None:
        raise FormatError(f"{name} are permuted, which they must not be")


def check_path(path: str, generation: str) -> None:
    if not path.startswith(f"{generation}/") or not _PATH.fullmatch(path):
        raise FormatError(f"path {path!r} does not stay inside the generation {generation!r}")


def _need_file(files: dict[str, FileEntry], path: str, size: int, what: str) -> None:
    entry = files.get(path)
    if entry is None:
        raise FormatError(f"{what} needs the file {path!r}, which is not listed")
    if entry.bytes != size:
        raise FormatError(f"{what} needs {size:,} bytes in {path!r}, but {entry.bytes:,} are listed")


def check_array(what: str, array: ArrayEntry, generation: str, files: dict[str, FileEntry]) -> None:
    check_path(array.path, generation)
    if (
        len(array.shape) > AXES_MAX
        or any(not 0 <= n <= ELEMENTS_MAX for n in array.shape)
        or math.prod(n for n in array.shape if n) > ELEMENTS_MAX
    ):
        raise FormatError(f"{what} has the impossible shape {array.shape}")
    chunk = array_chunk(array)
    if chunk is not None:
        _need_file(files, chunk, array_bytes(array), what)


def check_table(name: str, table: TableEntry, generation: str, files: dict[str, FileEntry]) -> None:
    what = f"table {name!r}"
    check_path(table.path, generation)
    item_bytes = dtype_from_name(table.dtype).itemsize
    if (
        not 0 <= table.rows <= ROWS_MAX
        or len(table.row_shape) > AXES_MAX
        or any(not 1 <= n <= ROW_BYTES_MAX for n in table.row_shape)
    ):
        raise FormatError(f"{what} has the impossible shape [{table.rows}, {table.row_shape}]")
    if (
        table.row_bytes != math.prod(table.row_shape) * item_bytes
        or not 1 <= table.row_bytes <= ROW_BYTES_MAX
    ):
        raise FormatError(
            f"{what} says {table.row_bytes} bytes a row, its shape {table.row_shape} of {table.dtype} "
            "says otherwise"
        )
    if table.rows * table.row_bytes >= TABLE_BYTES_MAX:
        raise FormatError(
            f"{what} has {table.rows} rows of {table.row_bytes} bytes, more than the format allows"
        )
    try:
        layout = table.layout
    except ValueError as error:
        raise FormatError(f"{what}: {error}") from None
    if layout.chunks > len(files):
        raise FormatError(f"{what} has {layout.chunks} chunks, but only {len(files)} files are listed in all")
    for chunk in range(layout.chunks):
        _need_file(files, table.chunk_path(chunk), layout.chunk_bytes, what)
    check_vector(f"{what}'s page checksums", table.page_checksums, "uint32", layout.pages, generation, files)
    check_order(what, table.order, table.rows, generation, files)


def check_order(
    what: str, order: OrderEntry, rows: int, generation: str, files: dict[str, FileEntry]
) -> None:
    """Raise FormatError unless an order's arrays are listed, and have the shapes of one for ``rows`` rows."""
    if (order.row_of_node is None) != (order.node_of_row is None):
        raise FormatError(f"{what} has one of the maps row_of_node and node_of_row, but not the other")
    for label, entry in (
        ("row_of_node", order.row_of_node),
        ("node_of_row", order.node_of_row),
        ("rows_by_degree", order.rows_by_degree),
    ):
        if entry is not None:
            check_vector(f"{what}'s {label}", entry, ROW_DTYPES, rows, generation, files)
    offsets = order.partition_offsets
    if len(offsets.shape) != 1 or not 2 <= offsets.shape[0] <= max(rows, PARTITIONS_OF_FEW_ROWS) + 1:
        raise FormatError(f"{what}'s partition offsets have the impossible shape {offsets.shape}")
    check_vector(f"{what}'s partition offsets", offsets, "int64", offsets.shape[0], generation, files)


def check_vector(
    what: str,
    entry: ArrayEntry,
    dtypes: str | tuple[str, ...],
    length: int,
    generation: str,
    files: dict[str, FileEntry],
) -> None:
    allowed = (dtypes,) if isinstance(dtypes, str) else dtypes
    if entry.shape != [length] or entry.dtype not in allowed:
        raise FormatError(
            f"{what}: expected {length} numbers of type {' or '.join(allowed)}, found {entry.shape} of "
            f"{entry.dtype}"
        )
    check_array(what, entry, generation, files)
