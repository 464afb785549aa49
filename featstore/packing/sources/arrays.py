"""Row sources in objects of other libraries that behave as arrays: HDF5 data sets, tensors, buffers.

What has a ``shape`` and gives rows for ``[a:b]`` is read slice by slice and never whole, so it may be larger
than memory: data sets of h5py and zarr, arrays of TensorStore, JAX, Dask and netCDF. What only has
``__array__``, ``__dlpack__`` or a buffer is taken whole. Nothing is imported for it. What has named columns
is no array: which of them are features only the user knows.
"""

from __future__ import annotations

import array as buffers
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.ids import unmasked
from featstore.errors import SourceError
from featstore.packing.sources.base import FeatureSource, dtype_text, native_dtype, sample_crc32, to_native

__all__ = ["SlicedRows", "array_of", "dense_tensor", "is_sliced", "tensor_to_numpy"]

# What an object of another library may raise when it is asked for rows that it cannot give.
REFUSALS = (
    TypeError,
    ValueError,
    LookupError,
    RuntimeError,
    NotImplementedError,
    AttributeError,
    BufferError,
    OSError,
)
FRAME_PROTOCOLS = ("iloc", "__dataframe__", "__arrow_c_stream__", "__arrow_c_array__")


def is_sliced(thing: Any) -> bool:
    """Whether something has a shape and is indexed: an array, whatever library it is of."""
    return hasattr(thing, "shape") and hasattr(thing, "__getitem__")


def array_of(thing: Any, name: str) -> NDArray[Any] | None:
    """Anything that is an array, as NumPy's; None for what is none.

    Raises SourceError for a masked array with masked values, a table with named columns, and an array that
    cannot be brought to the CPU.
    """
    if isinstance(thing, np.ndarray):
        return unmasked(thing, name, "a table has no masks; give array.filled(value), for example with NaN")
    if hasattr(thing, "untyped_storage"):
        return tensor_to_numpy(thing, name)
    if _is_plain_series(thing):
        return np.asarray(thing)
    if any(hasattr(thing, protocol) for protocol in FRAME_PROTOCOLS):
        raise SourceError(
            f"{name}: a {type(thing).__name__} has named columns or an index, which may be ids, and a table "
            "keeps neither; give the values of those that are features (.to_numpy()), or write it to "
            "Parquet and say columns= and id="
        )
    try:
        if hasattr(thing, "__array__") or isinstance(thing, (memoryview, buffers.array)):
            return np.asarray(thing)
        if hasattr(thing, "__dlpack__"):
            return np.from_dlpack(thing)
    except REFUSALS as error:
        raise SourceError(
            f"{name}: the {type(thing).__name__} cannot be read as a NumPy array ({error}); bring it to the "
            "CPU and convert it first"
        ) from error
    return None


def is_count(index: Any) -> bool:
    """Whether an index of pandas says no more than the places: 0, 1, 2, ..."""
    return (getattr(index, "start", None), getattr(index, "step", None)) == (0, 1)


def _is_plain_series(thing: Any) -> bool:
    """Whether something is one column whose index says no more than the places."""
    one = hasattr(thing, "iloc") and getattr(thing, "ndim", 0) == 1
    return one and is_count(getattr(thing, "index", None))


def dense_tensor(tensor: Any, name: str) -> Any:
    """The tensor itself. Raises SourceError when it is sparse, nested, quantised or without values
    (``meta``)."""
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else str(tensor.layout)
        raise SourceError(
            f"{name}: a sparse, nested, quantised or meta tensor ({kind}, {tensor.dtype}) has no rows to "
            "read; give tensor.to_dense(), tensor.dequantize() or a SciPy matrix"
        )
    return tensor


def tensor_to_numpy(tensor: Any, name: str) -> NDArray[Any]:
    """A torch tensor on the CPU as a NumPy array that shares its memory (bfloat16 as ml_dtypes has it)."""
    from featstore.base.tensors import as_array

    tensor = dense_tensor(tensor, name).detach().cpu().resolve_conj().resolve_neg()
    try:
        return as_array(tensor)
    except TypeError as error:
        raise SourceError(
            f"{name}: NumPy knows no {tensor.dtype}; convert it, for example with .to(torch.float16)"
        ) from error


class SlicedRows(FeatureSource):
    """Rows of an array of another library, read by slices ``[a:b]`` along its first axis.

    Where it says how it is cut into chunks, slices are bands of whole chunks, so that each chunk is decoded
    once.
    """

    def __init__(self, array: Any, *, name: str = "<array>", held_bytes: int | None = None) -> None:
        try:
            shape = tuple(int(extent) for extent in array.shape)
        except (TypeError, ValueError) as error:
            raise SourceError(
                f"{name}: its shape {array.shape!r} is no tuple of numbers; all rows of a table have "
                "one shape"
            ) from error
        if not shape:
            raise SourceError(f"{name}: a single value (0-d) is no table; give an array of rows")
        self.name = name
        self._array = array
        chunks = getattr(array, "chunks", None)
        chunked = (
            isinstance(chunks, tuple) and bool(chunks) and all(isinstance(extent, int) for extent in chunks)
        )
        self._chunk_rows = max(1, chunks[0]) if isinstance(chunks, tuple) and chunked else 1
        probe = self._slice(0, min(1, shape[0]), shape[1:], None)
        row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * probe.dtype.itemsize
        held = self._chunk_rows * row_bytes if held_bytes is None else held_bytes
        super().__init__(name, shape[0], shape[1:], probe.dtype, held_bytes=held)

    def fingerprint(self) -> dict[str, str | int]:
        """Type, shape, dtype and a CRC of some rows."""
        shape = ",".join(map(str, self._array.shape))
        return {
            "kind": f"{type(self._array).__module__}.{type(self._array).__qualname__}",
            "shape": shape,
            "dtype": dtype_text(self.dtype),
            "sample_crc32": sample_crc32(_Slices(self)),  # type: ignore[arg-type]
        }

    def _slice(
        self, first: int, end: int, row_shape: tuple[int, ...], dtype: np.dtype[Any] | None
    ) -> NDArray[Any]:
        """Rows ``first`` to ``end``; what comes must be what the array said it is."""
        where = f"{self.name}: rows {first:,} to {end:,}"
        try:
            block = array_of(self._array[first:end], where)
        except SourceError:
            raise
        except REFUSALS as error:
            raise SourceError(
                f"{where} cannot be decoded ({type(error).__name__}: {error}); an array is read by slices "
                "[a:b] along its first axis"
            ) from error
        if block is None or block.shape != (end - first, *row_shape):
            got = f"a {type(self._array).__name__}" if block is None else f"shape {block.shape}"
            raise SourceError(
                f"{where} should have shape {(end - first, *row_shape)}, but a slice gives {got}"
            )
        if dtype is not None and native_dtype(block.dtype, self.name) != dtype:
            raise SourceError(
                f"{where} have dtype {block.dtype}, the rows before {dtype}; a table has one dtype"
            )
        return block

    def _blocks(self, start: int, block_rows: int) -> Iterator[NDArray[Any]]:
        assert self.rows is not None
        band_rows = self._chunk_rows * max(1, block_rows // self._chunk_rows)
        for first in range(start - start % self._chunk_rows, self.rows, band_rows):
            band = self._slice(first, min(first + band_rows, self.rows), self.row_shape, self.dtype)
            band = to_native(band, self.dtype, owned=False)
            for low in range(max(0, start - first), band.shape[0], block_rows):
                yield band[low : low + block_rows]


class _Slices:
    """A source's array as one whose slices are NumPy's and were looked at."""

    def __init__(self, source: SlicedRows) -> None:
        self.shape = (source.rows,)
        self._source = source

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        return self._source._slice(rows.start, rows.stop, self._source.row_shape, self._source.dtype)
