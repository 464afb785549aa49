"""Arrays as torch tensors, and on devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featstore.base.dtypes import dtype_from_name, is_bfloat16
from featstore.errors import ArgumentError


def as_tensor(
    rows: NDArray[Any], instead: str = "ask for arrays with tensors=False and no device"
) -> torch.Tensor:
    """A tensor on the same memory. Raises ArgumentError for a dtype that torch does not know; ``instead``
    says what to do."""
    if is_bfloat16(rows.dtype):
        return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(rows)
    except TypeError:
        raise ArgumentError(f"torch has no dtype for {rows.dtype}; {instead}") from None


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor as an array, of ml_dtypes' bfloat16 where it is of that; on the same memory, where that is the
    host's."""
    here = tensor.detach().cpu()
    if here.dtype == torch.bfloat16:
        return here.view(torch.int16).numpy().view(dtype_from_name("bfloat16"))
    return here.numpy()


def has_tensor(dtype: np.dtype[Any]) -> bool:
    """Whether torch has tensors of a dtype."""
    try:
        as_tensor(np.empty(0, dtype))
    except ArgumentError:
        return False
    return True


def to_device(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """On the device; from pinned memory and without waiting where it is an accelerator."""
    target = torch.device(device)
    if target.type == "cpu":
        return tensor
    return tensor.pin_memory().to(target, non_blocking=True)
