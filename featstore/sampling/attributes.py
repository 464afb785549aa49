"""Samplers' options by names of what a store has, as PyG's loaders take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_choice, as_flag, as_text, known_name
from featstore.base.ids import plain_array
from featstore.errors import ArgumentError, SourceError
from featstore.reader.graphs import read_edge_ids
from featstore.sampling.options import SUBGRAPHS, TEMPORAL, SamplingOptions, checked_times
from featstore.storage.store import OpenStore, StoredGraph

#: Options of loaders, by PyG's names, and what they are where nothing is said.
SAMPLING_OPTIONS: Mapping[str, Any] = {
    "replace": False, "disjoint": False, "subgraph_type": "directional", "weight_attr": None,
    "time_attr": None, "temporal_strategy": "uniform", "time_window": None, "input_time": None,
}  # fmt: skip


def said_otherwise(said: Mapping[str, Any]) -> list[str]:
    """Names of those of :data:`SAMPLING_OPTIONS` that are said, and not as they are where nothing is."""
    plain = {name: getattr(one, "value", one) for name, one in said.items() if name in SAMPLING_OPTIONS}
    return [
        name for name, one in plain.items()
        if one is not None and not (isinstance(one, bool | str) and one == SAMPLING_OPTIONS[name])
    ]  # fmt: skip


class NamedOptions:
    """What was ``said`` of :data:`SAMPLING_OPTIONS`, for a graph of a store. Nothing is read before
    :meth:`read`. ``seeds_have_times``: whoever samples says them, as links do. Raises ArgumentError,
    UnknownNameError, SourceError."""

    def __init__(
        self, store: OpenStore, graph: StoredGraph, said: Mapping[str, Any], *,
        seeds_have_times: bool = False,
    ) -> None:  # fmt: skip
        self._store, self._graph = store, graph
        given = dict(SAMPLING_OPTIONS) | {name: one for name, one in said.items() if one is not None}
        self.said = said_otherwise(said)
        subgraph = getattr(given["subgraph_type"], "value", given["subgraph_type"])  # of an enumeration
        self._plain = {
            "replace": as_flag(given["replace"], "replace"),
            "disjoint": as_flag(given["disjoint"], "disjoint"),
            "subgraph": as_choice(subgraph, "subgraph_type", SUBGRAPHS),
            "temporal": as_choice(given["temporal_strategy"], "temporal_strategy", TEMPORAL),
            "window": given["time_window"],
        }
        self._weights = None if given["weight_attr"] is None else self._array("weight_attr", given)
        self._times = None if given["time_attr"] is None else self._array("time_attr", given)
        self.input_time = given["input_time"]
        nodes = graph.table.rows
        self._timed_nodes = self._times is not None and self._rows(self._times) == nodes
        for what, name in (("weight_attr", self._weights), ("time_attr", self._times)):
            if name is None or (what == "time_attr" and self._timed_nodes):
                if what == "time_attr" and name is not None and nodes == graph.edges:
                    raise SourceError(
                        f"time_attr={name!r} may be of nodes or of edges, of which the graph has as many"
                    )
                continue
            if self._rows(name) != graph.edges:
                raise SourceError(
                    f"{what}={name!r} has {self._rows(name):,} values; the graph has {graph.edges:,} edges"
                    + (f" and {nodes:,} nodes" if what == "time_attr" else "")
                )
            if not graph.has_edge_ids:
                raise SourceError(
                    f"{what}={name!r} goes by the numbers of edges, which the graph does not keep: pack it "
                    "with edge_ids=True (--edge-ids)"
                )
        if self._times is None and (self.input_time is not None or self._plain["temporal"] != "uniform"):
            raise ArgumentError("input_time= and temporal_strategy= are of times: say which, time_attr=")
        if (
            self._times is not None
            and not (self._timed_nodes or seeds_have_times)
            and self.input_time is None
        ):
            raise ArgumentError("time_attr= of edges needs the times of the seeds, input_time=")
        if self._times is None and self._plain["window"] is not None:
            raise ArgumentError("time_window= is of times: say which, time_attr=")

    @property
    def is_plain(self) -> bool:
        """Whether nothing is said that changes what is drawn."""
        same = self._weights is None and self._times is None
        return same and SamplingOptions(**self._plain).is_plain

    @property
    def needed_bytes(self) -> int:
        """Memory for what they hold, while it is read."""
        edges = self._graph.edges
        return (0 if self._weights is None else 20 * edges) + (0 if self._times is None else 36 * edges)

    def read(self) -> SamplingOptions:
        """The options, with arrays in the order of the graph's CSC arrays. Raises CorruptionError,
        DeviceError, SourceError."""
        parts = dict(self._plain)
        ids = None
        if self._weights is not None or (self._times is not None and not self._timed_nodes):
            ids = read_edge_ids(self._graph, by_node=True)
        if self._weights is not None:
            values = self._store.arrays[self._weights]
            floats = values if values.dtype in (np.float32, np.float64) else values.astype(np.float64)
            parts["weights"] = floats[ids]
        if self._times is not None:
            times = self._store.arrays[self._times]
            parts["node_times" if self._timed_nodes else "edge_times"] = times if ids is None else times[ids]
            if self._timed_nodes:
                parts["node_times"] = times
        return SamplingOptions(**parts)

    def _array(self, what: str, given: Mapping[str, Any]) -> str:
        name = as_text(given[what], what)
        known_name(name, self._store.manifest.arrays, f"{what}: the store has no array")
        return name

    def _rows(self, name: str) -> int:
        shape = self._store.manifest.arrays[name].shape
        return shape[0] if len(shape) == 1 else -1


class TimesOfSeeds:
    """The times of some seeds, by their ids. ``seeds``: different ids, int64 [s]; ``times``: int64 [s]."""

    def __init__(self, seeds: NDArray[np.int64], times: Any) -> None:
        known = checked_times(plain_array(times, "input_time"), len(seeds), "input_time", "seeds")
        order = np.argsort(seeds)
        self._seeds, self._times = seeds[order], known[order]

    def of(self, seeds: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64: the times of these."""
        places = np.minimum(np.searchsorted(self._seeds, seeds), len(self._seeds) - 1)
        if not np.array_equal(self._seeds[places], seeds):
            raise ArgumentError("input_time= has no time for a seed of this mini-batch")
        return self._times[places]
