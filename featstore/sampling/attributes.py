"""Samplers' options by names of what a store has, as PyG's loaders take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_choice, as_flag, as_text, known_name
from featstore.base.ids import plain_array
from featstore.errors import ArgumentError, SourceError
from featstore.reader.graphs import read_edge_ids, read_times, read_weights
from featstore.sampling.options import KEPT, SUBGRAPHS, TEMPORAL, SamplingOptions, checked_times
from featstore.storage.relations import graph_of
from featstore.storage.store import OpenStore, StoredGraph

#: What the weights and the times are called that graphs keep.
WEIGHTS, TIMES = "weights", "times"
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


def plainly(said: Mapping[str, Any]) -> dict[str, Any]:
    """Those of them, as values and not as members of enumerations."""
    return {name: getattr(said[name], "value", said[name]) for name in said_otherwise(said)}


#: Those of samplers: links and loaders say the times of seeds, samplers when they are asked.
SAMPLER_OPTIONS = tuple(name for name in SAMPLING_OPTIONS if name != "input_time")


def sampler_options(store: OpenStore, given: dict[str, Any]) -> dict[str, Any]:
    """Options of a sampler from disk, of whose ``options`` these have the place that were ``given`` by names,
    of :data:`SAMPLER_OPTIONS`. Raises ArgumentError, UnknownNameError, SourceError, CorruptionError,
    DeviceError."""
    said = {name: given[name] for name in SAMPLER_OPTIONS if name in given}
    if not said:
        return given
    found = NamedOptions(store, graph_of(store, given.get("graph")), said, seeds_have_times=True)
    if found.of_memory:
        raise ArgumentError(
            f"{', '.join(found.of_memory)}: a sampler from disk goes by weights and times that the graph "
            "keeps: pack it with edge_weights= or edge_times=; store.loader holds the graph in memory for "
            "arrays"
        )
    return {name: one for name, one in given.items() if name not in said} | {"options": found.from_disk()}


class NamedOptions:
    """What was ``said`` of :data:`SAMPLING_OPTIONS`, for a graph of a store. Nothing is read before
    :meth:`read`.

    ``weight_attr="weights"``, ``time_attr="times"``: those that the graph keeps, where it does; else the name
    of an array, of edges by their numbers, or of nodes. ``seeds_have_times``: whoever samples says them, as
    links do. Raises ArgumentError, UnknownNameError, SourceError.
    """

    def __init__(
        self, store: OpenStore, graph: StoredGraph, said: Mapping[str, Any], *,
        seeds_have_times: bool = False,
    ) -> None:  # fmt: skip
        self._store, self._graph = store, graph
        given = dict(SAMPLING_OPTIONS) | {name: one for name, one in said.items() if one is not None}
        self.said = said_otherwise(said)
        subgraph = getattr(given["subgraph_type"], "value", given["subgraph_type"])  # of an enumeration
        #: Those of :class:`~featstore.sampling.options.SamplingOptions` that are of no array.
        self.plain = {
            "replace": as_flag(given["replace"], "replace"),
            "disjoint": as_flag(given["disjoint"], "disjoint"),
            "subgraph": as_choice(subgraph, "subgraph_type", SUBGRAPHS),
            "temporal": as_choice(given["temporal_strategy"], "temporal_strategy", TEMPORAL),
            "window": given["time_window"],
        }
        self._weights = _Attribute.of(store, graph, "weight_attr", given, graph.has_weights)
        self._times = _Attribute.of(store, graph, "time_attr", given, graph.has_times)
        self.input_time = given["input_time"]
        if self._times is None and (self.input_time is not None or self.plain["temporal"] != "uniform"):
            raise ArgumentError("input_time= and temporal_strategy= are of times: say which, time_attr=")
        of_edges = self._times is not None and not self._times.of_nodes
        if of_edges and not seeds_have_times and self.input_time is None:
            raise ArgumentError("time_attr= of edges needs the times of the seeds, input_time=")
        if self._times is None and self.plain["window"] is not None:
            raise ArgumentError("time_window= is of times: say which, time_attr=")

    @property
    def is_plain(self) -> bool:
        """Whether nothing is said that changes what is drawn."""
        same = self._weights is None and self._times is None
        return same and SamplingOptions(**self.plain).is_plain

    @property
    def weighted(self) -> list[StoredGraph]:
        """The graph, where the weights are those that it keeps."""
        return [self._graph] if self._weights is not None and self._weights.kept else []

    @property
    def timed(self) -> list[StoredGraph]:
        """The same of times."""
        return [self._graph] if self._times is not None and self._times.kept else []

    @property
    def node_times(self) -> dict[str, str]:
        """The name of the array of the times of nodes, by their table."""
        times = self._times
        return {self._graph.table.name: times.name} if times is not None and times.of_nodes else {}

    @property
    def arrays(self) -> list[str]:
        """Names of arrays with a value for each edge."""
        both = (self._weights, self._times)
        return [one.name for one in both if one is not None and not (one.kept or one.of_nodes)]

    @property
    def of_memory(self) -> list[str]:
        """Those that were said which lists on disk cannot be sampled with: arrays of edges by their numbers,
        of which a list would have one anywhere."""
        return [
            f"{one.what}={one.name!r}" for one in (self._weights, self._times)
            if one is not None and not (one.kept or one.of_nodes)
        ]  # fmt: skip

    @property
    def needed_bytes(self) -> int:
        """Memory for what they hold, while it is read."""
        edges = self._graph.edges
        return (0 if self._weights is None else 20 * edges) + (0 if self._times is None else 36 * edges)

    def read(self) -> SamplingOptions:
        """The options, with arrays in the order of the graph's CSC arrays. Raises CorruptionError,
        DeviceError, FormatError, SourceError."""
        parts, ids, graph = dict(self.plain), None, self._graph
        if any(one is not None and not (one.kept or one.of_nodes) for one in (self._weights, self._times)):
            ids = read_edge_ids(graph, by_node=True)
        if self._weights is not None:
            parts["weights"] = read_weights(graph) if self._weights.kept else self._floats()[ids]
        if self._times is not None and self._times.of_nodes:
            parts["node_times"] = self._store.arrays[self._times.name]
        elif self._times is not None:
            times = self._times
            parts["edge_times"] = read_times(graph) if times.kept else self._store.arrays[times.name][ids]
        return SamplingOptions(**parts)

    def from_disk(self) -> SamplingOptions:
        """The options of a sampler from disk, where none is of memory alone. Raises CorruptionError,
        DeviceError."""
        parts = dict(self.plain)
        if self._weights is not None:
            parts["weights"] = KEPT
        if self._times is not None:
            of_nodes = self._times.of_nodes
            parts["node_times" if of_nodes else "edge_times"] = (
                self._store.arrays[self._times.name] if of_nodes else KEPT
            )
        return SamplingOptions(**parts)

    def _floats(self) -> NDArray[Any]:
        assert self._weights is not None
        values = self._store.arrays[self._weights.name]
        return values if values.dtype in (np.float32, np.float64) else values.astype(np.float64)


@dataclass(frozen=True)
class _Attribute:
    """What ``what`` names, which the graph keeps, or an array ``of_nodes`` or of edges."""

    graph: StoredGraph
    what: str
    name: str
    rows: int
    kept: bool
    of_nodes: bool

    @classmethod
    def of(
        cls, store: OpenStore, graph: StoredGraph, what: str, given: Mapping[str, Any], there: bool
    ) -> _Attribute | None:
        """None where nothing is said. ``there``: the graph keeps some."""
        if given[what] is None:
            return None
        name, own = as_text(given[what], what), {"weight_attr": WEIGHTS, "time_attr": TIMES}[what]
        arrays, nodes = store.manifest.arrays, graph.table.rows
        if name == own and there:
            if name in arrays:
                raise SourceError(
                    f"{what}={name!r} may be what the graph keeps or an array: pack the array under another "
                    "name"
                )
            return cls(graph, what, name, graph.edges, True, False)
        known_name(name, arrays, f"{what}: the store has no array")
        shape = arrays[name].shape
        rows = shape[0] if len(shape) == 1 else -1
        if what == "time_attr" and rows == nodes == graph.edges:
            raise SourceError(
                f"time_attr={name!r} may be of nodes or of edges, of which the graph has as many"
            )
        found = cls(graph, what, name, rows, False, what == "time_attr" and rows == nodes)
        if found.of_nodes:
            return found
        if rows != graph.edges:
            raise found.wrong_size()
        if not graph.has_edge_ids:
            raise SourceError(
                f"{what}={name!r} goes by the numbers of edges, which the graph does not keep: pack it with "
                "edge_ids=True (--edge-ids)"
            )
        return found

    def wrong_size(self) -> SourceError:
        """It has another number of values than there are edges, or nodes."""
        graph = self.graph
        nodes = f" and {graph.table.rows:,} nodes" if self.what == "time_attr" else ""
        return SourceError(
            f"{self.what}={self.name!r} has {self.rows:,} values; the graph has {graph.edges:,} edges{nodes}"
        )


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
