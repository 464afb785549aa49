"""graphlearn-for-pytorch adapter: a table in place of a ``graphlearn_torch.data.Feature``.

Its data sets and loaders, and those of GiGL that stand on them, index a feature by a tensor of ids, ask it
for ``cpu_get``, ``shape`` and ``size``, and hand it to other processes. There a reader of its own is opened,
where the original would be mapped from shared memory.
"""

from __future__ import annotations

from typing import Any

from featstore.arguments import as_integer, shown
from featstore.errors import ArgumentError, IdError, MissingPackageError
from featstore.reader.table_array import TableArray, as_table_array

try:
    import torch
    from graphlearn_torch.data import Feature
except ImportError as error:
    raise MissingPackageError(
        f"the adapter for graphlearn-for-pytorch needs {error.name}: install torch, and "
        "graphlearn-for-pytorch as its documentation says"
    ) from error

__all__ = ["GraphLearnFeature", "torch_dtype"]


class GraphLearnFeature(Feature):  # type: ignore[misc]
    """Rows of a table as a graphlearn-for-pytorch feature, in host memory, as with ``with_gpu=False``.

    ``array``: the table, ``store.table(name, memory=...)``, or ``featstore.TableArray(reader, name)`` where
    several share a reader. ``id2index``: from the ids that are asked for to those of the table, indexed by a
    tensor: a tensor, or the ``id2index`` of a range partition book, where the table has the rows of one
    partition alone; None where they are the same.

    Reading raises what the array raises; IdError for ids that ``id2index`` does not bring into the table.
    """

    def __init__(self, array: TableArray, id2index: Any = None) -> None:
        self.array = as_table_array(array, "array")
        super().__init__(None, id2index, with_gpu=False, dtype=torch_dtype(array))

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.cpu_get(ids)

    def cpu_get(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of ``ids``, a tensor in host memory."""
        if not isinstance(ids, torch.Tensor):
            raise ArgumentError(f"ids must be a tensor, not {shown(ids)}")
        ids = ids.to("cpu")
        if self.id2index is not None and bool((ids < 0).any()):  # which count from the end there
            raise IdError(f"id {int(ids.min())} is negative, and of no row")
        rows: torch.Tensor = self.array[ids if self.id2index is None else self.id2index[ids]]
        return rows.to("cpu")  # of a reader with a tier on a device

    @property
    def shape(self) -> torch.Size:
        """Rows, then the shape of a row."""
        return torch.Size(self.array.shape)

    def size(self, dim: int) -> int:
        """How long an axis is."""
        axis = as_integer(dim, "dim", -self.array.ndim, self.array.ndim - 1)
        return self.array.shape[axis]

    def lazy_init_with_ipc_handle(self) -> None:
        """Nothing: it is ready wherever it is."""

    def share_ipc(self) -> tuple[Any, ...]:
        """What :meth:`from_ipc_handle` makes it of in another process; no rows."""
        return self.array, self.id2index

    @classmethod
    def from_ipc_handle(cls, ipc_handle: tuple[Any, ...]) -> GraphLearnFeature:
        """The feature of a handle."""
        return cls(*ipc_handle)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.share_ipc()


def torch_dtype(array: TableArray) -> torch.dtype:
    """The dtype of its rows in torch. Raises ArgumentError where torch has none."""
    dtype = getattr(torch, array.dtype.name, None)
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"torch has no dtype for {array.dtype}, of which table {array.name!r} is")
    return dtype
