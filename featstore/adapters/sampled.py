"""A mini-batch as a sampler hands it to PyG's loaders, which notices where its edges are left out.

``NodeLoader`` gives a mini-batch an ``edge_index`` only where the loader's own ``Data`` has one (or an
``adj_t``). Of a ``Data`` without, as one has whose graph is in a store, nodes come out and no edges, and not
a word of it. A sampler sees neither that ``Data`` nor the mini-batch. But a loader that makes an
``edge_index`` computes with ``row``, and looks at ``orig_row`` only after that; so ``row`` remembers whether
it was computed with, and ``orig_row`` raises where it was not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch_geometric.sampler import SamplerOutput

from featstore.errors import SourceError

__all__ = ["SampledNodes"]


class _Watched(torch.Tensor):
    """A tensor that knows whether something was computed with it. What is computed is a plain tensor."""

    taken: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Watched:
        watched = tensor.as_subclass(cls)
        watched.taken = False
        return watched

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, function: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found: list[_Watched] = []
            result = function(*_plain(args, found), **_plain(kwargs or {}, found))
        if isinstance(result, torch.Tensor | np.ndarray | list):
            for watched in found:
                watched.taken = True
        return result


def _plain(thing: Any, found: list[_Watched]) -> Any:
    """Watched tensors in arguments of a function as plain ones, and which they were."""
    if isinstance(thing, _Watched):
        found.append(thing)
        return thing.as_subclass(torch.Tensor)
    if type(thing) in (list, tuple):
        return type(thing)(_plain(one, found) for one in thing)
    if type(thing) is dict:
        return {key: _plain(one, found) for key, one in thing.items()}
    return thing


class SampledNodes(SamplerOutput):  # type: ignore[misc]
    """PyG's ``SamplerOutput`` of a homogeneous graph, whose loader gets a SourceError if it leaves out the
    edges."""

    row: torch.Tensor

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.row = _Watched.of(self.row)

    @property
    def orig_row(self) -> torch.Tensor | None:
        """As PyG's: rows before ``to_bidirectional``, which nobody asks of these samples."""
        if isinstance(self.row, _Watched) and not self.row.taken:
            raise SourceError(
                "the loader's Data has no edge_index, so that PyG gives mini-batches of nodes and leaves "
                "out the edges that were sampled: give the Data an edge_index, which may be empty, "
                "torch.empty((2, 0), dtype=torch.long)"
            )
        return self._orig_row

    @orig_row.setter
    def orig_row(self, value: torch.Tensor | None) -> None:
        self._orig_row = value

    def __getstate__(self) -> dict[str, Any]:
        """From a worker to the process that makes the mini-batch, ``row`` goes as any tensor."""
        return self.__dict__ | {"row": _plain(self.row, [])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.row = _Watched.of(self.row)
