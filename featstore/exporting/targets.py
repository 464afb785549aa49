"""The files that rows are exported to. Each kind takes blocks of rows, in order, and is there whole or not at
all."""

from __future__ import annotations

import io
import secrets
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_choice, need_package
from featstore.base.dtypes import is_bfloat16
from featstore.base.folders import is_taken
from featstore.base.keys import KeyKind
from featstore.base.system import refusal
from featstore.errors import ArgumentError, FeatstoreError, StoreExistsError
from featstore.storage.disk import Disk
from featstore.storage.whole_files import check_free, replace_free

#: Bytes of a chunk of a zarr array, and of rows of a group of Parquet, about.
_CHUNK_BYTES, _GROUP_BYTES = 8 << 20, 64 << 20
#: Node ids of the rows, int64 [n], their keys where these are exported, and the rows.
RowBlocks = Generator[tuple[NDArray[np.int64], NDArray[Any] | None, NDArray[Any]], None, None]


@dataclass(frozen=True)
class Exported:
    """What is exported: ``rows`` rows of ``row_shape`` and ``dtype`` of the table ``name``; ``keys``: the
    kind of the nodes' keys, where they are exported."""

    name: str
    rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    keys: KeyKind | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.row_shape)

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize


def target_of(path: Path) -> Callable[[Path, Exported, RowBlocks, bool], None]:
    """What writes a file of this name. Raises ArgumentError."""
    kind = as_choice(path.suffix, "the ending of the file to export to", KINDS)
    return KINDS[kind]


def _to_npy(path: Path, exported: Exported, blocks: RowBlocks, overwrite: bool) -> None:
    if is_bfloat16(exported.dtype):
        raise _no_type(path, exported, ".npy files")
    check_free(path, overwrite)
    header = io.BytesIO()
    described = {
        "descr": np.lib.format.dtype_to_descr(exported.dtype), "fortran_order": False, "shape": exported.shape
    }  # fmt: skip
    try:
        np.lib.format.write_array_header_2_0(header, described)
    except UnicodeEncodeError:  # names of fields, which version 2 has in Latin-1
        raise ArgumentError(
            f"{path}: names of fields of table {exported.name!r} have characters that .npy files of version "
            "2 cannot have: read them with store.table(...), and write them by numpy.save"
        ) from None

    def pieces() -> Iterator[bytes | NDArray[np.uint8]]:
        yield header.getvalue()
        for _, _, rows in blocks:
            yield np.ascontiguousarray(rows).reshape(-1).view(np.uint8)

    replace_free(path, pieces(), overwrite)


def _to_zarr(path: Path, exported: Exported, blocks: RowBlocks, overwrite: bool) -> None:
    _check_number(path, exported, "biufc", "zarr arrays that all implementations read")
    zarr = need_package("zarr", "zarr", f"{path}: writing this")
    if is_taken(path):  # a directory may hold what is not ours to remove
        raise StoreExistsError(f"{path} is there already: move it away, or export to another name")
    first = next(blocks, None)  # all blocks have as many rows, but the last
    together = 1 if first is None else len(first[2])
    least = max(1, -(-together * exported.row_bytes // _CHUNK_BYTES))  # chunks of a block
    chunks = next((count for count in range(least, 2 * least) if together % count == 0), least)
    each = max(1, together // chunks)
    with _beside(path, overwrite=False) as made:
        array = zarr.create_array(  # chunks of zeros, too: one that is lost would look the same
            store=str(made), shape=exported.shape, dtype=exported.dtype, chunks=(each, *exported.row_shape),
            config={"write_empty_chunks": True},
        )  # fmt: skip
        array.attrs["featstore"] = {"table": exported.name}
        at, all_blocks = 0, iter(()) if first is None else chain([first], blocks)
        del first
        for _, _, rows in all_blocks:
            array[at : at + len(rows)] = rows
            at += len(rows)


def _to_parquet(path: Path, exported: Exported, blocks: RowBlocks, overwrite: bool) -> None:
    _check_number(path, exported, "biuf", "Parquet")
    if len(exported.row_shape) > 1:
        raise ArgumentError(
            f"{path}: rows of table {exported.name!r} have {len(exported.row_shape)} axes, a column of "
            "Parquet has one: export to .npy or .zarr"
        )
    arrow, parquet = (
        need_package(name, "arrow", f"{path}: writing this") for name in ("pyarrow", "pyarrow.parquet")
    )
    check_free(path, overwrite)
    item = arrow.from_numpy_dtype(exported.dtype)
    column = arrow.list_(item, exported.row_shape[0]) if exported.row_shape else item
    fields = [("id", arrow.int64())]
    if exported.keys is not None:
        fields.append(("key", arrow.string() if exported.keys == "utf8" else arrow.int64()))
    if exported.name in dict(fields):
        raise ArgumentError(
            f"{path}: table {exported.name!r} would have the name of another column; export to .npy or .zarr"
        )
    schema = arrow.schema([*fields, (exported.name, column)])
    group = max(1, _GROUP_BYTES // (exported.row_bytes + 8))
    with _beside(path, overwrite) as made, parquet.ParquetWriter(made, schema) as writer:
        for ids, keys, rows in blocks:
            values = arrow.array(np.ascontiguousarray(rows).reshape(-1))
            if exported.row_shape:
                values = arrow.FixedSizeListArray.from_arrays(values, exported.row_shape[0])
            named = [] if keys is None else [arrow.array(keys, schema.field("key").type)]
            written = arrow.table([arrow.array(ids), *named, values], schema=schema)
            writer.write_table(written, row_group_size=group)


_WIDEST = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}  # bytes of a number that files of others have
KINDS: dict[str, Callable[[Path, Exported, RowBlocks, bool], None]] = {
    ".npy": _to_npy, ".zarr": _to_zarr, ".parquet": _to_parquet,
}  # fmt: skip


def _check_number(path: Path, exported: Exported, kinds: str, what: str) -> None:
    """Raise ArgumentError for rows that are no numbers of these kinds, or of sizes that NumPy alone has."""
    dtype = exported.dtype
    if dtype.kind not in kinds or is_bfloat16(dtype) or dtype.itemsize > _WIDEST[dtype.kind]:
        raise _no_type(path, exported, what)


def _no_type(path: Path, exported: Exported, what: str) -> ArgumentError:
    instead = "export as another, dtype='float32' for instance"
    if not is_bfloat16(exported.dtype):  # which no number's dtype holds
        instead = "export to .npy"
    return ArgumentError(f"{path}: {what} have no type for {exported.dtype}: {instead}")


@contextmanager
def _beside(path: Path, overwrite: bool) -> Iterator[Path]:
    """A name beside ``path``, which becomes ``path`` when all has been written to it, unless something has
    come there meanwhile; what fails leaves nothing."""
    made, disk = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp"), Disk()
    try:
        yield made
        _settle(made, disk)
        check_free(path, overwrite)
        disk.rename(made, path)
        disk.fsync_dir(path.parent)
    except BaseException as error:
        if made.is_dir():
            shutil.rmtree(made, ignore_errors=True)
        else:
            with suppress(FeatstoreError):
                disk.unlink(made)
        if type(error) is OSError:  # of a package that writes by itself
            raise refusal(error, path, "write") from error
        raise


def _settle(path: Path, disk: Disk) -> None:
    """Make bytes durable, of a file or of all below a directory."""
    if path.is_dir():
        for one in path.iterdir():
            _settle(one, disk)
        disk.fsync_dir(path)
        return
    file = disk.create(path, keep=True)
    try:
        disk.fsync(file)
    finally:
        disk.close(file)
