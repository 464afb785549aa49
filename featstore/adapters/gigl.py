"""GiGL adapter: tables in place of the features that a GiGL ``DistDataset`` holds in memory.

GiGL's data set takes features of graphlearn-for-pytorch, and beside them what is known without looking at
them: how wide rows are, and of which dtype. Both are arguments of its constructor, and made here:
``DistDataset(..., **node_features(array))``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from featstore.adapters.graphlearn import GraphLearnFeature, torch_dtype
from featstore.errors import ArgumentError, MissingPackageError
from featstore.reader.table_array import TableArray

try:
    from gigl.types.graph import FeatureInfo
except ImportError as error:
    raise MissingPackageError(
        f"the GiGL adapter needs {error.name}: install GiGL as its documentation says"
    ) from error

__all__ = ["edge_features", "node_features"]


def node_features(arrays: TableArray | Mapping[Any, TableArray], id2index: Any = None) -> dict[str, Any]:
    """The arguments ``node_feature_partition`` and ``node_feature_info`` of ``gigl.distributed.DistDataset``.

    ``arrays``: a table whose rows have one axis; in heterogeneous graphs ``{node type: table}``.
    ``id2index``: where tables have the rows of this machine's partition alone, what brings ids of the whole
    graph to theirs, as ``id2index`` of a partition book of graphlearn-for-pytorch; or ``{node type: that}``.
    Raises ArgumentError.
    """
    return _arguments("node", arrays, id2index)


def edge_features(arrays: TableArray | Mapping[Any, TableArray], id2index: Any = None) -> dict[str, Any]:
    """The arguments ``edge_feature_partition`` and ``edge_feature_info``; as :func:`node_features`, by types
    of edges."""
    return _arguments("edge", arrays, id2index)


def _arguments(of: str, arrays: Any, id2index: Any) -> dict[str, Any]:
    if not isinstance(arrays, Mapping):
        feature, info = _one(arrays, id2index)
        return {f"{of}_feature_partition": feature, f"{of}_feature_info": info}
    maps = {} if id2index is None else id2index
    if not isinstance(maps, Mapping) or set(maps) - set(arrays):
        raise ArgumentError("id2index must be a mapping of types among those of the tables")
    made = {kind: _one(array, maps.get(kind)) for kind, array in arrays.items()}
    return {
        f"{of}_feature_partition": {kind: feature for kind, (feature, _) in made.items()},
        f"{of}_feature_info": {kind: info for kind, (_, info) in made.items()},
    }


def _one(array: TableArray, id2index: Any) -> tuple[GraphLearnFeature, Any]:
    feature = GraphLearnFeature(array, id2index)
    if array.ndim != 2:
        raise ArgumentError(
            f"GiGL knows rows with one axis; those of table {array.name!r} have {array.ndim - 1}"
        )
    return feature, FeatureInfo(dim=array.shape[1], dtype=torch_dtype(array))
