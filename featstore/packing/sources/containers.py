"""Row sources in the containers of other libraries: safetensors and HDF5.

A safetensors file is a length, a header of JSON, and tensors one after the other (its format is documented by
Hugging Face); they are read as any headless file. HDF5 is read through h5py, slice by slice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from featstore.errors import SourceError
from featstore.packing.sources.arrays import SlicedRows
from featstore.packing.sources.base import (
    file_fingerprint,
    import_extra,
    named_dtype,
    open_binary,
    stat_of,
)
from featstore.packing.sources.columns import check_beside
from featstore.packing.sources.files import FileRows

__all__ = ["Hdf5Rows", "hdf5_rows", "safetensors_rows"]

_HEADER_BYTES_MAX = 100_000_000
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4",
    "U64": "<u8", "I64": "<i8", "F16": "<f2", "BF16": "bfloat16", "F32": "<f4", "F64": "<f8", "C64": "<c8",
}  # fmt: skip


def chosen_key(shapes: dict[str, tuple[int, ...]], key: str | None, name: str, what: str) -> str:
    """Which of several arrays is the table: the one asked for, or the only one of two axes or more. Raises
    SourceError; warns of what is beside one that nobody asked for."""
    if key is None:
        tables = [one for one, shape in shapes.items() if len(shape) >= 2] or list(shapes)
        if len(tables) != 1:
            raise SourceError(
                f"{name}: {len(tables)} {what} could be the table; give key=, one of: "
                f"{', '.join(sorted(shapes))}"
            )
        key = tables[0]
        check_beside(shapes, key, name)
    if key not in shapes:
        raise SourceError(f"{name}: holds no {key!r}; it has: {', '.join(sorted(shapes))}")
    return key


def safetensors_rows(path: Path, key: str | None = None, name: str | None = None) -> FileRows:
    """Rows of a tensor in a ``.safetensors`` file. Raises SourceError."""
    tensors, data = _safetensors_header(path)
    shapes = {one: tuple(tensor["shape"]) for one, tensor in tensors.items()}
    key = chosen_key(shapes, key, str(path), "tensors")
    label, tensor = name or f"{path}[{key}]", tensors[key]
    if tensor["dtype"] not in _DTYPES:
        raise SourceError(
            f"{label}: values of {tensor['dtype']} have no dtype of NumPy's; convert them first"
        )
    begin, end = tensor["data_offsets"]
    rows = FileRows(
        path, shapes[key], named_dtype(_DTYPES[tensor["dtype"]], label), offset=data + begin,
        kind="safetensors", name=label,
    )  # fmt: skip
    if (rows.rows or 0) * rows.row_bytes != end - begin or data + end > stat_of(path).st_size:
        raise SourceError(
            f"{label}: shape {shapes[key]} of {tensor['dtype']} and bytes {begin:,} to {end:,} do not fit "
            "together, or the file is cut off"
        )
    return rows


def _safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """(tensors by name, byte at which their data begin)."""
    with open_binary(path) as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(min(length, _HEADER_BYTES_MAX))
    try:
        header = json.loads(text) if len(text) == length else None
        tensors = {name: one for name, one in dict(header or ()).items() if name != "__metadata__"}
        for one in tensors.values():
            numbers = [*one["shape"], *one["data_offsets"]]
            named = isinstance(one["dtype"], str)
            if (
                not named
                or any(type(n) is not int or n < 0 for n in numbers)
                or len(one["data_offsets"]) != 2
            ):
                raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError):
        tensors = {}
    if not tensors:
        raise SourceError(f"{path}: no safetensors file, or one without tensors; copy or write it again")
    return tensors, 8 + length


class Hdf5Rows(SlicedRows):
    """Rows of a data set of an HDF5 file, which stays open."""

    def __init__(self, path: Path, file: Any, key: str, name: str) -> None:
        super().__init__(file[key], name=name)
        self._file, self._mark = file, file_fingerprint("hdf5", path, key=key)

    def fingerprint(self) -> dict[str, str | int]:
        """The file's path, size and time of change, and the data set."""
        return self._mark


def hdf5_rows(path: Path, key: str | None = None, name: str | None = None) -> Hdf5Rows:
    """Rows of a data set of an HDF5 file; ``key`` is its path in the file. Raises SourceError that lists
    them."""
    h5py = import_extra("h5py", "hdf5", str(path))
    open_binary(path).close()
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise SourceError(f"{path}: cannot be opened as HDF5 ({error}); copy or write it again") from error
    shapes: dict[str, tuple[int, ...]] = {}

    def see(where: str, thing: Any) -> None:
        if getattr(thing, "shape", None) is not None and hasattr(thing, "dtype"):
            shapes[where] = tuple(thing.shape)

    file.visititems(see)
    key = chosen_key(shapes, None if key is None else key.strip("/"), str(path), "data sets")
    return Hdf5Rows(path, file, key, name or f"{path}[{key}]")
