"""Indices as PyG gives them, and arrays as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featstore.arguments import shown
from featstore.base.ids import plain_array
from featstore.base.tensors import as_array
from featstore.errors import ArgumentError, IdError


def attribute_tensor(array: NDArray[Any] | torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory; arrays that torch cannot hold (read-only ones) are copied."""
    if isinstance(array, np.ndarray):
        array = plain_array(array, "arrays")
        array = array if array.flags.writeable else array.copy()
    try:
        tensor = torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"arrays: torch has no tensor for {shown(array)}: {error}") from None
    if tensor.ndim == 0:
        raise ArgumentError("arrays: an attribute is an array [nodes, ...], not a single number")
    return tensor


def to_shared(array: NDArray[Any]) -> torch.Tensor:
    """A copy of ``array`` in shared memory."""
    shared = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name))
    shared.share_memory_()  # type: ignore[no-untyped-call]
    shared.numpy()[...] = array
    return shared


def row_ids(index: Any, rows: int) -> NDArray[np.int64] | torch.Tensor:
    """Any index that PyG allows, as int64 ids: torch for torch, NumPy for NumPy, torch for the rest."""
    if index is None:
        return torch.arange(rows)
    if isinstance(index, slice):
        try:
            return torch.from_numpy(np.arange(*index.indices(rows)))
        except (TypeError, ValueError) as error:
            raise IdError(f"{index} is no slice of rows: {error}") from None
    if isinstance(index, int | np.integer):
        _check_range(int(index), int(index), rows)
        return torch.tensor([int(index)])
    ids: Any
    if isinstance(index, torch.Tensor):
        if index.is_nested or index.is_meta:
            raise IdError(
                "ids must be a one-dimensional integer array, not a tensor that is nested or on the "
                "meta device"
            )
        ids = _checked_mask(index, rows).nonzero().view(-1) if index.dtype == torch.bool else index
        integers = not (ids.is_floating_point() or ids.is_complex())
    else:
        ids = plain_array(index, "index")
        ids = np.flatnonzero(_checked_mask(ids, rows)) if ids.dtype == np.bool_ else ids
        integers = ids.dtype.kind in "iu"
    if ids.ndim != 1 or not integers:
        raise IdError(
            f"ids must be a one-dimensional integer array, not {ids.dtype} of shape {tuple(ids.shape)}"
        )
    if len(ids):
        _check_range(int(ids.min()), int(ids.max()), rows)
    return ids.to(torch.int64) if isinstance(ids, torch.Tensor) else ids.astype(np.int64)


def _check_range(least: int, most: int, rows: int) -> None:
    """Raise IdError for ids below 0 or beyond the rows."""
    if least < 0 or most >= rows:
        bad = least if least < 0 else most
        raise IdError(f"id {bad} is out of range: the attribute has rows 0 to {rows - 1:,}")


def _checked_mask(mask: Any, rows: int) -> Any:
    if tuple(mask.shape) != (rows,):
        raise IdError(f"a mask has a value for each of {rows:,} rows, not {tuple(mask.shape)}")
    return mask


def join(parts: list[Any]) -> Any:
    """Several id lists as one; torch where they are mixed."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(ids, np.ndarray) for ids in parts):
        return np.concatenate(parts)
    return torch.cat([torch.as_tensor(ids) for ids in parts])


def like_ids(rows: Any, ids: Any) -> Any:
    """Rows as the kind of array that their ids are."""
    return as_array(rows) if isinstance(ids, np.ndarray) and isinstance(rows, torch.Tensor) else rows


def shaped(rows: Any, index: Any) -> Any:
    """An int index drops the first dimension, as in any array."""
    return rows[0] if isinstance(index, int | np.integer) else rows
