"""What goes in and comes out of a read: node ids of any integer type, NumPy or torch, and rows of the same kind.

torch is never imported here: a tensor can only have come from a program that imported it.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.dtypes import is_bfloat16
from featstore.errors import IdError
from featstore.native import libc
from featstore.units import PAGE_BYTES

_MADV_POPULATE_WRITE = 23
_POPULATE_BYTES_MIN = 4 * 2**20
ALIGNMENT = 64  # what DLPack consumers want for a zero-copy hand-over


def is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


@dataclass(frozen=True)
class Ids:
    """Node ids: ``values`` int64, flat; ``shape`` as they were given; whether rows go back as a tensor."""

    values: NDArray[np.int64]
    shape: tuple[int, ...]
    tensor: bool


def parse_ids(ids: Any, *, copy: bool = False) -> Ids:
    """Ids from an array, tensor, list or number of any integer dtype and shape.

    ``copy`` makes the result independent of what the caller does with ``ids`` afterwards. Raises IdError for anything that
    is not an integer.
    """
    tensor = is_tensor(ids)
    try:
        given = np.asarray(ids.detach().cpu().numpy() if tensor else ids)
    except (TypeError, ValueError) as error:  # a ragged list; a tensor of a dtype NumPy lacks
        raise IdError(f"node ids must be integers in an array, tensor or list: {error}") from None
    if given.size == 0 and given.dtype.kind == "f":  # an empty list or tensor
        given = given.astype(np.int64)
    if given.dtype.kind not in "iu":
        raise IdError(
            f"node ids must be integers, not {given.dtype}"
            + (" (a mask? use numpy.flatnonzero)" if given.dtype == bool else "")
        )
    if given.dtype == np.uint64 and given.size and given.max() > np.iinfo(np.int64).max:
        raise IdError(f"node id {given.max()} is out of range")
    values = np.ascontiguousarray(given, dtype=np.int64).reshape(-1)
    if (copy and np.may_share_memory(values, given)) or not values.flags.writeable:
        values = values.copy()  # read-only arrays would have kernels of their own compiled
    return Ids(values, given.shape, tensor)


def parse_runs(runs: Any, rows: int, table: str) -> NDArray[np.int64]:
    """Runs of rows as int64 [n, 2]. Raises IdError for anything that is no run of a table of so many rows."""
    try:
        given = np.asarray(runs)
    except ValueError as error:  # a ragged list
        raise IdError(f"runs must be integers [n, 2], the first row and the end of each: {error}") from None
    if given.size == 0:
        return np.empty((0, 2), np.int64)
    if given.dtype.kind not in "iu" or given.ndim != 2 or given.shape[1] != 2:
        raise IdError(
            f"runs must be integers [n, 2], the first row and the end of each, not {given.dtype} {given.shape}"
        )
    bad = np.flatnonzero((given[:, 0] < 0) | (given[:, 1] < given[:, 0]) | (given[:, 1] > rows))
    if len(bad):
        low, high = given[bad[0]].tolist()
        raise IdError(f"rows {low} to {high} are no run of table {table!r}, which has {rows:,} rows")
    return np.array(given, np.int64, order="C")  # a copy: the reads are planned later, in another thread


def parse_places(at: Any, runs: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """Where each run begins in a destination of so many rows, int64 [n]. Raises IdError for a place outside it."""
    given = np.asarray(at)
    if given.shape != (len(runs),) or (given.dtype.kind not in "iu" and given.size):
        raise IdError(f"at must be integers, one for each of the {len(runs)} runs, not {given.dtype} {given.shape}")
    places = given.astype(np.int64)
    bad = np.flatnonzero((places < 0) | (places > rows - (runs[:, 1] - runs[:, 0])))  # no sum that could overflow
    if len(bad):
        raise IdError(
            f"run {bad[0]} would go to row {places[bad[0]]} of an out of {rows:,} rows, which has no room for it"
        )
    return places


def parse_row_places(at: Any, count: int, rows: int) -> NDArray[np.int32]:
    """Where each of ``count`` rows goes in a destination of so many rows, int32 [count]. Raises IdError for a place outside it."""
    given = np.asarray(at)
    if given.shape != (count,) or (given.dtype.kind not in "iu" and given.size):
        raise IdError(f"at must be integers, one for each of the {count} ids, not {given.dtype} {given.shape}")
    if count and (given.min() < 0 or given.max() >= rows):
        raise IdError(f"at must be from 0 to {rows - 1}, the rows of out, but goes from {given.min()} to {given.max()}")
    if rows > np.iinfo(np.int32).max:
        raise IdError(f"at serves an out of up to {np.iinfo(np.int32).max:,} rows, not {rows:,}")
    return given.astype(np.int32, copy=False)


def empty_rows(count: int, row_bytes: int) -> NDArray[np.uint8]:
    """Uninitialised memory for rows, uint8 [count * row_bytes], aligned to 64 bytes."""
    raw = np.empty(count * row_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count * row_bytes]


def populate(rows: NDArray[np.uint8]) -> None:
    """Have the system provide the memory of a large fresh result now, in the caller's thread, which has nothing else to do.

    Otherwise the engine's thread takes a page fault for every page it copies into. The content is not touched. This is advice:
    a kernel that does not know it (before Linux 5.14) provides the memory later, as ever.
    """
    if rows.nbytes < _POPULATE_BYTES_MIN:
        return
    begin = -(-rows.ctypes.data // PAGE_BYTES) * PAGE_BYTES
    end = (rows.ctypes.data + rows.nbytes) // PAGE_BYTES * PAGE_BYTES
    madvise = libc().madvise
    for at in range(begin, end, _POPULATE_BYTES_MIN):  # in steps, so that an interrupt comes through
        madvise(ctypes.c_void_p(at), ctypes.c_size_t(min(_POPULATE_BYTES_MIN, end - at)), _MADV_POPULATE_WRITE)


def check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[np.uint8]:
    """The bytes of a caller's ``out``. Raises ValueError where rows of this shape and dtype cannot be put there."""
    if is_tensor(out):
        name = str(out.dtype).removeprefix("torch.")
        if out.device.type == "cpu" and out.is_contiguous() and tuple(out.shape) == shape and name == dtype.name:
            flat: NDArray[np.uint8] = out.detach().reshape(-1).view(sys.modules["torch"].uint8).numpy()
            return flat
        found = f"{list(out.shape)} of {name} on {out.device}, contiguous: {out.is_contiguous()}"
    elif isinstance(out, np.ndarray):
        flags = out.flags
        if out.shape == shape and out.dtype == dtype and flags.c_contiguous and flags.writeable:
            return np.asarray(out).reshape(-1).view(np.uint8)  # a matrix would stay two-dimensional
        found = f"{list(out.shape)} of {out.dtype}, C-contiguous: {flags.c_contiguous}, writable: {flags.writeable}"
    else:
        found = f"a {type(out).__name__}"
    raise ValueError(
        f"out must be a C-contiguous, writable NumPy array or a torch tensor in host memory, {list(shape)} of {dtype}; it is {found}"
    )


def finished(rows: NDArray[np.uint8], shape: tuple[int, ...], dtype: np.dtype[Any], tensor: bool) -> Any:
    """Rows as what the caller gets: an array, or where ids were a tensor, a tensor on the same memory."""
    if not tensor:
        return rows.view(dtype).reshape(shape)
    torch = sys.modules["torch"]
    if is_bfloat16(dtype):
        return torch.from_numpy(rows.view(np.int16).reshape(shape)).view(torch.bfloat16)
    try:
        return torch.from_numpy(rows.view(dtype).reshape(shape))
    except TypeError:
        raise TypeError(f"torch has no dtype for {dtype}; ask with NumPy ids") from None
