"""Row dtypes: what the manifest calls them, and what zarr arrays store them as.

The manifest uses zarr's own names for the types that every zarr v3 implementation has (``"float32"``,
``"uint8"``, ...), and ``"bfloat16"``. Any other NumPy dtype (dates, strings, structures, long doubles) is
``"numpy:"`` followed by its NumPy descriptor as JSON; to a reader without NumPy such rows are opaque bytes of
a known size. In the zarr array bfloat16 appears as uint16 and those others as uint8 with one more axis, the
bytes of an element. Everything on disk is little-endian.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from featstore.errors import FormatError, SourceError

_CORE = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
_PREFIX = "numpy:"


def bfloat16() -> np.dtype[Any]:
    """The bfloat16 dtype (from ml_dtypes)."""
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    return dtype.name == "bfloat16"


CONVERT_ADDED = (
    "convert it, for example with .astype(numpy.float16), or give its bytes with .view(numpy.uint8)"
)


def added_type(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """The type in ``dtype`` that a package added to NumPy (float8, int4 ..., but for plain bfloat16): it
    would come back as bytes without a meaning. None where there is none."""
    if dtype.names is None:
        return dtype.base if dtype.base.isbuiltin == 2 and not is_bfloat16(dtype) else None
    fields = (dtype[name].base for name in dtype.names)
    return next((field for field in fields if field.isbuiltin == 2 or added_type(field) is not None), None)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The manifest's name for a dtype. Raises SourceError for dtypes that hold Python objects or have no
    size."""
    dtype = dtype.newbyteorder("<")
    if dtype.hasobject:
        raise SourceError(
            f"dtype {dtype} holds Python objects; convert the column to numbers or fixed-size bytes first"
        )
    if dtype.itemsize == 0:
        raise SourceError(f"dtype {dtype} has no size")
    if is_bfloat16(dtype):
        return "bfloat16"
    if (added := added_type(dtype)) is not None:
        raise SourceError(f"dtype {added} is not NumPy's own and has no name in a store; {CONVERT_ADDED}")
    if dtype.names is None and dtype.name in _CORE:
        return dtype.name
    if dtype.subdtype is not None:
        raise SourceError(f"dtype {dtype} is an array type; make it part of the row's shape")
    try:
        descriptor = np.lib.format.dtype_to_descr(dtype)
    except ValueError as error:
        raise SourceError(f"dtype {dtype} cannot be described: {error}") from None
    return _PREFIX + json.dumps(descriptor, separators=(",", ":"))


def _tuples(descriptor: Any) -> Any:
    """JSON has no tuples; NumPy's descriptors of structures are lists of tuples whose last item may be a
    shape."""
    if isinstance(descriptor, str):
        return descriptor
    fields = []
    for field in descriptor:
        name = tuple(field[0]) if isinstance(field[0], list) else field[0]
        rest = [_tuples(field[1])] + [tuple(shape) for shape in field[2:]]
        fields.append((name, *rest))
    return fields


def dtype_from_name(name: str) -> np.dtype[Any]:
    """The dtype of a manifest's name, little-endian. Raises FormatError for names that are not of this
    format."""
    if name == "bfloat16":
        return bfloat16()
    if name in _CORE:
        return np.dtype(name).newbyteorder("<")
    if name.startswith(_PREFIX):
        try:
            dtype = np.lib.format.descr_to_dtype(_tuples(json.loads(name[len(_PREFIX) :])))
        except Exception as error:
            raise FormatError(f"cannot read the dtype {name!r}: {error}") from None
        if not dtype.hasobject and dtype.itemsize > 0 and dtype == dtype.newbyteorder("<"):
            return dtype
    raise FormatError(f"unknown dtype {name!r}")


def zarr_storage(dtype: np.dtype[Any]) -> tuple[str, tuple[int, ...]]:
    """zarr's data type for a dtype, and the axes it adds to the array's shape."""
    name = dtype_name(dtype)
    if name == "bfloat16":
        return "uint16", ()
    if name in _CORE:
        return name, ()
    return "uint8", (dtype.itemsize,)


Scalar = str | int | float | bool | None


INT32_MAX = 2**31 - 1


def node_dtype(rows: int) -> np.dtype[Any]:
    """The dtype of node ids: int32 while they fit, then int64."""
    return np.dtype(np.int32 if rows <= INT32_MAX else np.int64)


def host_dtype(hosts: int) -> np.dtype[Any]:
    """The dtype of the numbers of so many hosts: uint8 while they fit, then uint16."""
    return np.dtype(np.uint8 if hosts <= 256 else np.uint16)
