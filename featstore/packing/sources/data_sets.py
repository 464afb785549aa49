"""Folders that are whole data sets, with tables, edges and arrays of their own: which there are."""

from __future__ import annotations

import os
from typing import Any

from featstore.packing.sources.graphbolt import graphbolt_inputs, is_graphbolt
from featstore.packing.sources.ogb import is_typed_ogb, typed_ogb_inputs
from featstore.packing.sources.whole import WholeData

__all__ = ["data_set_inputs", "is_data_set"]


def is_data_set(spec: Any) -> bool:
    """Whether something is the path of a data set that brings its own tables and edges."""
    return is_graphbolt(spec) or is_typed_ogb(spec)


def data_set_inputs(spec: str | os.PathLike[str], graph_given: bool) -> WholeData:
    """What is taken of a data set; without its edges where graphs were given. Raises SourceError."""
    return (graphbolt_inputs if is_graphbolt(spec) else typed_ogb_inputs)(spec, graph_given)
