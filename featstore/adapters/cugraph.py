"""cuGraph-PyG adapter: a store in place of cuGraph-PyG's feature store.

Loaders of cuGraph-PyG take a pair of feature store and graph store. The graph stays in their own
``GraphStore``; as feature store they take any of PyG's, and ask it for rows by the ids of a sample, which are
on the device. :class:`CuGraphFeatures` is the one of :mod:`featstore.adapters.pyg`, with two things that
these loaders want: rows on the device of their ids, and rows of edges, of groups that are tuples, by ids of
edges, also in graphs of one type.
"""

from __future__ import annotations

from typing import Any

import torch

from featstore.adapters.pyg import FeatstoreFeatures
from featstore.errors import SourceError

__all__ = ["CuGraphFeatures"]


class CuGraphFeatures(FeatstoreFeatures):
    """Rows of a store, and small arrays in memory, as the feature store of cuGraph-PyG's loaders. Read-only.

    Its parameters are those of :class:`featstore.adapters.pyg.FeatstoreFeatures`. A group is the name of a
    type of nodes, or ``(source, relation, target)`` for rows of edges, by the numbers that the graph store
    was given its edges in: ``{("paper", "x"): "features", (("paper", "cites", "paper"), "edge_attr"):
    "edge_features"}``. No two groups may have attributes of one name in a graph of one type, whose
    mini-batches have one place for both: SourceError.
    """

    def _multi_get_tensor(self, attrs: list[Any]) -> list[Any]:
        _check_names(attrs)
        rows = super()._multi_get_tensor(attrs)
        return [beside(found, attr.index) for found, attr in zip(rows, attrs, strict=True)]


def _check_names(attrs: list[Any]) -> None:
    """Raise SourceError where ids of nodes, or those of edges, are asked of two groups at once: only a graph
    of one type is gone through so, and the rows of one would take the place of the other's."""
    groups: dict[tuple[str, int], Any] = {}
    for attr in attrs:
        if isinstance(attr.index, torch.Tensor):
            other = groups.setdefault((attr.attr_name, id(attr.index)), attr.group_name)
            if other != attr.group_name:
                raise SourceError(
                    f"attribute {attr.attr_name!r} is of {other!r} and of {attr.group_name!r}, and the "
                    "same ids were asked of both: say with tables= which is of this graph"
                )


def beside(rows: Any, index: Any) -> Any:
    """Rows where their ids are."""
    if isinstance(index, torch.Tensor) and isinstance(rows, torch.Tensor):
        return rows.to(index.device)
    return rows
