"""Rows as torch tensors, on a device and in PyG's objects; imported where they are wanted."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featstore.errors import SourceError
from featstore.layout.records import TableRecord
from featstore.storage.relations import is_edge_table


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
    """A PyG ``Data`` or ``HeteroData`` with the rows of its nodes as ``x``, and those of its edges, where
    there are some, as ``edge_attr``. Raises SourceError for rows of anything else."""
    typed = hasattr(sample, "node_types")
    for number, (name, rows) in enumerate(x.items()):
        relation = tuple(name.split("__"))
        if name in sample.node_types if typed else number == 0:
            (sample[name] if typed else sample).x = rows
        elif is_edge_table(name, x) and (not typed or relation in sample.edge_types):
            (sample[relation] if typed else sample).edge_attr = rows
        else:
            raise SourceError(
                f"rows of table {name!r} were asked for, and PyG's {type(sample).__name__} has no nodes or "
                "edges of that name to put them to: ask for pairs of ids and sample instead (nodes=)"
            )
    return sample if device is None else sample.to(device, non_blocking=True)
