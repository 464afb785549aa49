"""GraphBolt adapter: a table as a ``dgl.graphbolt.Feature``, and several as the feature store of its loaders.

``fetch_feature`` of a GraphBolt pipeline asks a feature for rows by ``read_async``, or where its overlapping
is turned off by ``read``. The one is a request of ours: reading begins with the generator's only stage, and
``wait`` of what that gives waits for the rows. So several mini-batches may be under way, as many as the
pipeline has stages. Ids on an accelerator are copied to the host, and rows back to the device of the ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from featstore.arguments import as_mapping, shown
from featstore.base.tensors import as_tensor
from featstore.errors import ArgumentError, MissingPackageError, SourceError
from featstore.reader.table_array import TableArray, as_table_array

try:
    import torch
    from dgl import graphbolt
except ImportError as error:
    raise MissingPackageError(
        f"the GraphBolt adapter needs {error.name}: install torch, and DGL 2.x, whose part GraphBolt is"
    ) from error

__all__ = ["GraphBoltFeature", "feature_store"]


class GraphBoltFeature(graphbolt.Feature):  # type: ignore[misc]
    """Rows of a table as a GraphBolt feature. Read-only.

    ``array``: the table, ``store.table(name, memory=...)``, or ``featstore.TableArray(reader, name)`` where
    several share a reader. ``metadata``: what :meth:`metadata` gives.

    Rows are tensors on the device of the ids. Reading raises what the array raises.
    """

    def __init__(self, array: TableArray, metadata: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._array = as_table_array(array, "array")
        self._metadata = {} if metadata is None else dict(as_mapping(metadata, "metadata", "names to values"))

    def read(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of ``ids``; None for all rows, where they take no more than the memory of the reader. Raises
        NotInMemoryError where they take more."""
        if ids is None:
            return as_tensor(self._array.whole())
        rows: torch.Tensor = self._array[_tensor(ids)]
        return rows.to(ids.device)

    def read_async(self, ids: torch.Tensor) -> Iterator[_Rows]:
        """As GraphBolt asks: of the one thing that this yields, ``wait()`` gives the rows."""
        yield _Rows(self._array, _tensor(ids))

    def read_async_num_stages(self, ids_device: torch.device) -> int:
        """How often :meth:`read_async` yields: once, for ids on any device."""
        return 1

    def size(self) -> torch.Size:
        """The shape of a row."""
        return torch.Size(self._array.shape[1:])

    def count(self) -> int:
        """Number of rows."""
        return len(self._array)

    def update(self, value: torch.Tensor, ids: torch.Tensor | None = None) -> None:
        """Refused: a store is read-only."""
        raise SourceError("cannot update a feature: a store is read-only; pack a new one with featstore.pack")

    def metadata(self) -> dict[str, Any]:
        """What was given."""
        return self._metadata

    def to(self, device: Any) -> GraphBoltFeature:
        """Refused: the rows are on disk, and come to the device of the ids."""
        raise SourceError(
            f"a feature on disk cannot be moved to {shown(device)}: ask with ids there, and rows come there; "
            "to keep rows on a device, read through store.table(name, device=..., device_memory=...)"
        )

    def pin_memory_(self) -> GraphBoltFeature:
        """Refused, as :meth:`to`."""
        return self.to("pinned")

    def is_pinned(self) -> bool:
        """False: the rows are on disk."""
        return False

    def __repr__(self) -> str:
        return f"<GraphBoltFeature of {self._array!r}>"


class _Rows:
    """Rows on their way; ``wait`` gives them."""

    def __init__(self, array: TableArray, ids: torch.Tensor) -> None:
        self._name, self._device = array.name, ids.device
        self._request = array.source.submit({array.name: ids})

    def wait(self) -> torch.Tensor:
        rows: torch.Tensor = self._request.result()[self._name]
        return rows.to(self._device)


def feature_store(features: Mapping[tuple[str, str | None, str], TableArray]) -> Any:
    """A ``graphbolt.BasicFeatureStore`` of tables, ``{(domain, type, name): array}``, such as ``{("node",
    None, "feat"): store.table("features", memory="2GiB")}``; in heterogeneous graphs the type is that of
    nodes, or of edges as ``"paper:cites:paper"``."""
    made = {}
    for key, array in as_mapping(features, "features", "(domain, type, name) to tables").items():
        if not isinstance(key, tuple) or len(key) != 3 or key[0] not in ("node", "edge", "graph"):
            raise ArgumentError(
                f"features: a key is ('node', 'edge' or 'graph', type or None, name), not {key!r}"
            )
        made[key] = GraphBoltFeature(array)
    return graphbolt.BasicFeatureStore(made)


def _tensor(ids: Any) -> torch.Tensor:
    if not isinstance(ids, torch.Tensor):
        raise ArgumentError(f"ids must be a tensor, not {shown(ids)}")
    return ids
