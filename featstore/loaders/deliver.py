"""Rows as torch tensors, on a device and in PyG's objects; imported where they are wanted."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featstore.layout.records import TableRecord


def merged(host: torch.Tensor, resident: torch.Tensor, record: TableRecord) -> torch.Tensor:
    """The rows of a mini-batch, of which ``host`` passed through memory and the others are ``resident`` on
    the device."""
    out = torch.empty((record.count, *host.shape[1:]), dtype=host.dtype, device=host.device)

    def index(places: NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(places.astype(np.int64)).to(host.device)

    out[index(record.host_place)] = host
    out[index(record.device_place)] = resident[index(record.device_slot)]
    return out


def fill_pyg(sample: Any, x: dict[str, Any], device: Any) -> Any:
    """A PyG ``Data`` or ``HeteroData`` with the rows of its nodes as ``x``."""
    if hasattr(sample, "node_types"):
        for name, rows in x.items():
            sample[name].x = rows
    else:
        sample.x = next(iter(x.values()))
    return sample if device is None else sample.to(device, non_blocking=True)
