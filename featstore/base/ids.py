"""What goes in and comes out of a read: node ids of any integer type, NumPy or torch, and rows of the same
kind.

torch is never imported here: a tensor can only have come from a program that imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.base.error_text import first_line
from featstore.base.modules import loaded
from featstore.errors import ArgumentError, IdError, SourceError

_INT64 = np.dtype(np.int64)


def is_tensor(value: Any) -> bool:
    torch = loaded("torch", "Tensor")
    return torch is not None and isinstance(value, torch.Tensor)


def _not_ids(ids: Any, given: NDArray[Any]) -> str:
    """What was given instead of ids, and what may have been meant."""
    if isinstance(ids, np.ma.MaskedArray):
        return "a masked array, whose mask would be lost (take ids.compressed())"
    if given.dtype == bool:
        return "bool (a mask? use numpy.flatnonzero)"
    if given.dtype == object:
        from featstore.arguments import shown

        return f"{shown(ids)} (of up to 64 bits, and nothing else)"
    return str(given.dtype)


def as_integers(values: Any, what: str, error: type[Exception] = IdError) -> NDArray[Any]:
    """Integers as an array of any shape, an empty one of any dtype. Raises ``error`` for anything else;
    ``what`` begins its message."""
    try:
        given = np.asarray(values.detach().cpu().numpy() if is_tensor(values) else values)
    except (TypeError, ValueError, RuntimeError) as found:  # a ragged list; a tensor that NumPy cannot have
        raise error(f"{what}: {first_line(found)}") from None
    if (given.dtype.kind not in "iu" and given.size) or isinstance(values, np.ma.MaskedArray):
        raise error(f"{what}, not {_not_ids(values, given)}")
    return given


def unmasked(array: NDArray[Any], name: str, instead: str) -> NDArray[Any]:
    """The array, of which no value is masked. Raises SourceError, which says what to give ``instead``."""
    if not isinstance(array, np.ma.MaskedArray):
        return array
    if np.ma.is_masked(array):
        count = int(np.ma.getmaskarray(array).sum())
        raise SourceError(f"{name}: a masked array with {count:,} masked values, and {instead}")
    return np.ma.getdata(array)  # type: ignore[no-any-return,no-untyped-call]


def plain_array(value: Any, name: str) -> NDArray[Any]:
    """What was given as an array. Raises ArgumentError for what NumPy cannot make one of."""
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentError(f"{name} is a masked array, whose mask would be lost: fill it first (filled)")
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a ragged list, a tensor that NumPy cannot have
        raise ArgumentError(f"{name} cannot be used as an array: {error}") from None


def rows_of(out: Any) -> int:
    """How many rows a caller's ``out`` has; 0 for what is no array, which :func:`check_out` refuses."""
    known = isinstance(out, np.ndarray) or (is_tensor(out) and not out.is_nested)
    return int(out.shape[0]) if known and out.ndim else 0


class Ids(NamedTuple):
    """Node ids: ``values`` int64, flat; ``shape`` as they were given; whether rows go back as a tensor."""

    values: NDArray[np.int64]
    shape: tuple[int, ...]
    tensor: bool


def parse_ids(ids: Any, *, copy: bool = False) -> Ids:
    """Ids from an array, tensor, list or number of any integer dtype and shape.

    ``copy`` makes the result independent of what the caller does with ``ids`` afterwards. Raises IdError for
    anything that is not an integer.
    """
    if type(ids) is np.ndarray and not copy and ids.dtype == _INT64 and ids.flags.carray:
        return Ids(ids if ids.ndim == 1 else ids.reshape(-1), ids.shape, False)  # as most are
    tensor = is_tensor(ids)
    try:
        given = np.asarray(ids.detach().cpu().numpy() if tensor else ids)
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:  # a ragged list; a tensor of a dtype, layout or device that NumPy lacks
        raise IdError(f"node ids must be integers in an array, tensor or list: {first_line(error)}") from None
    if given.size == 0 and given.dtype.kind == "f":  # an empty list or tensor
        given = given.astype(np.int64)
    if given.dtype.kind not in "iu" or (type(ids) is not np.ndarray and isinstance(ids, np.ma.MaskedArray)):
        raise IdError(f"node ids must be integers, not {_not_ids(ids, given)}")
    if given.dtype == np.uint64 and given.size and given.max() > np.iinfo(np.int64).max:
        raise IdError(f"node id {given.max()} is out of range")
    values = np.ascontiguousarray(given, dtype=np.int64).reshape(-1)
    if (copy and np.may_share_memory(values, given)) or not values.flags.writeable:
        values = values.copy()  # read-only arrays would have kernels of their own compiled
    return Ids(values, given.shape, tensor)


def parse_runs(runs: Any, rows: int, table: str) -> NDArray[np.int64]:
    """Runs of rows as int64 [n, 2]. Raises IdError for anything that is no run of a table of so many rows."""
    given = as_integers(runs, "runs must be integers [n, 2], the first row and the end of each")
    if given.size == 0:
        return np.empty((0, 2), np.int64)
    if given.ndim != 2 or given.shape[1] != 2:
        raise IdError(
            f"runs must be integers [n, 2], the first row and the end of each, not {given.dtype} "
            f"{given.shape}"
        )
    bad = np.flatnonzero((given[:, 0] < 0) | (given[:, 1] < given[:, 0]) | (given[:, 1] > rows))
    if len(bad):
        low, high = given[bad[0]].tolist()
        raise IdError(f"rows {low} to {high} are no run of table {table!r}, which has {rows:,} rows")
    return np.array(given, np.int64, order="C")  # a copy: the reads are planned later, in another thread


def parse_places(at: Any, runs: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """Where each run begins in a destination of so many rows, int64 [n]. Raises IdError for a place outside
    it."""
    given = as_integers(at, f"at must be integers, one for each of the {len(runs)} runs")
    if given.shape != (len(runs),):
        raise IdError(
            f"at must be integers, one for each of the {len(runs)} runs, not {given.dtype} {given.shape}"
        )
    if given.dtype == np.uint64 and given.size and given.max() > np.iinfo(np.int64).max:
        raise IdError(f"at: there is no row {given.max()}")
    places = given.astype(np.int64)
    # no sum that could overflow
    bad = np.flatnonzero((places < 0) | (places > rows - (runs[:, 1] - runs[:, 0])))
    if len(bad):
        raise IdError(
            f"run {bad[0]} would go to row {places[bad[0]]} of an out of {rows:,} rows, which has no "
            "room for it"
        )
    return places


def parse_row_places(at: Any, count: int, rows: int) -> NDArray[np.int32]:
    """Where each of ``count`` rows goes in a destination of so many rows, int32 [count]. Raises IdError for a
    place outside it."""
    given = as_integers(at, f"at must be integers, one for each of the {count} ids")
    if given.shape != (count,):
        raise IdError(
            f"at must be integers, one for each of the {count} ids, not {given.dtype} {given.shape}"
        )
    if count and (given.min() < 0 or given.max() >= rows):
        raise IdError(
            f"at must be from 0 to {rows - 1}, the rows of out, but goes from {given.min()} to {given.max()}"
        )
    if rows > np.iinfo(np.int32).max:
        raise IdError(f"at serves an out of up to {np.iinfo(np.int32).max:,} rows, not {rows:,}")
    return np.array(given, np.int32)  # a copy, as of ids: the reads are planned later, in another thread


def check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[np.uint8]:
    """The bytes of a caller's ``out``. Raises ArgumentError, a ValueError, where rows of this shape and dtype
    cannot be put there."""
    if type(out) is np.ndarray and out.shape == shape and out.dtype == dtype and out.flags.carray:
        return out.reshape(-1).view(np.uint8)  # as most are
    if is_tensor(out):
        name = str(out.dtype).removeprefix("torch.")
        if out.is_nested or str(out.layout) != "torch.strided" or out.is_conj() or out.is_neg():
            found = f"a {'nested' if out.is_nested else 'sparse, conjugated or negated'} tensor"
        elif (
            out.device.type == "cpu"
            and out.is_contiguous()
            and tuple(out.shape) == shape
            and name == dtype.name
        ):
            flat: NDArray[np.uint8] = out.detach().reshape(-1).view(sys.modules["torch"].uint8).numpy()
            return flat
        else:
            found = f"{list(out.shape)} of {name} on {out.device}, contiguous: {out.is_contiguous()}"
    elif isinstance(out, np.ndarray) and not isinstance(out, np.ma.MaskedArray):
        flags = out.flags
        if out.shape == shape and out.dtype == dtype and flags.c_contiguous and flags.writeable:
            return np.asarray(out).reshape(-1).view(np.uint8)  # a matrix would stay two-dimensional
        found = (
            f"{list(out.shape)} of {out.dtype}, C-contiguous: {flags.c_contiguous}, writable: "
            f"{flags.writeable}"
        )
    else:
        found = f"a {type(out).__name__}"
    raise ArgumentError(
        "out must be a C-contiguous, writable NumPy array or a torch tensor in host memory, "
        f"{list(shape)} of {dtype}; it is {found}"
    )


def flat_out(
    out: Any, ids: Ids, at: Any, row_shape: tuple[int, ...], dtype: np.dtype[Any], device: Any
) -> Any:
    """A caller's ``out`` for these ids as rows: an array, or a tensor on ``device``, whose dtype is not
    looked at. With ``at`` it has as many rows as it has. Raises as :func:`check_out`."""
    if is_tensor(out) and out.device.type != "cpu" and out.device == device:
        shape = (*(ids.shape if at is None else out.shape[:1]), *row_shape)
        if tuple(out.shape) == shape:
            return out
        raise ArgumentError(f"out must be {list(shape)} for these ids; it is {list(out.shape)} on {device}")
    count = len(ids.values) if at is None else rows_of(out)
    shape = (*ids.shape, *row_shape) if at is None else (count, *row_shape)
    return check_out(out, shape, dtype).view(dtype).reshape(count, *row_shape)


def unshared(ids: Ids, outs: Iterable[Any]) -> Ids:
    """The same ids, which rows that are put into any of a caller's ``outs`` (arrays where in host memory) do
    not change."""
    shared = any(isinstance(out, np.ndarray) and np.may_share_memory(ids.values, out) for out in outs)
    return ids._replace(values=ids.values.copy()) if shared else ids


def finished(rows: NDArray[np.uint8], shape: tuple[int, ...], dtype: np.dtype[Any], tensor: bool) -> Any:
    """Rows as what the caller gets: an array, or where ids were a tensor, a tensor on the same memory."""
    if not tensor:
        return rows.view(dtype).reshape(shape)
    from featstore.base.tensors import as_tensor

    return as_tensor(rows.view(dtype).reshape(shape), "ask with NumPy ids")
