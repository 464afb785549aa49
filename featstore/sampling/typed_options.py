"""Samplers' options over a store with edge types, by names of what the store has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from featstore.arguments import as_choice, as_flag, as_text
from featstore.errors import ArgumentError, SourceError
from featstore.reader.graphs import read_edge_ids, read_times, read_weights
from featstore.sampling.attributes import SAMPLING_OPTIONS, TIMES, WEIGHTS
from featstore.sampling.options import KEPT, SUBGRAPHS, TEMPORAL, SamplingOptions
from featstore.storage.edge_types import EdgeType
from featstore.storage.relations import graph_of_array
from featstore.storage.store import OpenStore, StoredGraph


class TypedOptions:
    """What was ``said`` of :data:`~featstore.sampling.attributes.SAMPLING_OPTIONS`.

    ``weight_attr="weights"``: the weights that graphs keep; or ``NAME``: the arrays ``TYPE.NAME`` with a
    value for each edge of an edge type, by its number. Edge types without are not weighted.
    ``time_attr="times"``: the times that graphs keep of edges, of those that do; or ``NAME``: the arrays
    ``TYPE.NAME`` of the node types or of the edge types that have one. ``seeds_have_times``: whoever samples
    says them, as links do. Nothing is read before :meth:`read`. Raises ArgumentError, SourceError.

    ``plain``: those of :class:`~featstore.sampling.options.SamplingOptions` that are of no array;
    ``weighted``, ``timed``: the graphs whose weights and times are meant; ``arrays``: names of the arrays
    that have them, where graphs do not keep them; ``node_times``: names of arrays, by node type.
    """

    def __init__(self, store: OpenStore, said: Mapping[str, Any], *, seeds_have_times: bool = False) -> None:
        self._store = store
        given = dict(SAMPLING_OPTIONS) | {name: one for name, one in said.items() if one is not None}
        given = {name: one for name, one in given.items() if name in SAMPLING_OPTIONS}
        subgraph = getattr(given["subgraph_type"], "value", given["subgraph_type"])  # of an enumeration
        self.plain = {
            "replace": as_flag(given["replace"], "replace"),
            "disjoint": as_flag(given["disjoint"], "disjoint"),
            "subgraph": as_choice(subgraph, "subgraph_type", SUBGRAPHS),
            "temporal": as_choice(given["temporal_strategy"], "temporal_strategy", TEMPORAL),
            "window": given["time_window"],
        }
        graphs = self._graphs = [graph for graph in store.graphs.values() if graph.edge_type is not None]
        self.arrays: dict[str, str] = {}  # of a graph's edges, where it does not keep the values itself
        self.weighted: list[StoredGraph] = []
        if given["weight_attr"] is not None:
            name = as_text(given["weight_attr"], "weight_attr")
            kept = [graph for graph in graphs if name == WEIGHTS and graph.has_weights]
            self._one_of_these("weight_attr", name, [graph.name for graph in kept], self._named(name, graphs))
            self.weighted = kept or self._with_array(name, graphs, "weight_attr")
            if not self.weighted:
                raise ArgumentError(
                    f"weight_attr={name!r}: the store has no array TYPE.{name} of edges, and {WEIGHTS!r} are "
                    "those that graphs keep: pack them with edge_weights="
                )
        self.timed, self.node_times = self._times_of(given["time_attr"], graphs)
        self.input_time = given["input_time"]
        if given["time_attr"] is None:
            late = [name for name in ("input_time", "time_window") if given[name] is not None]
            if late or given["temporal_strategy"] != SAMPLING_OPTIONS["temporal_strategy"]:
                raise ArgumentError(
                    f"{late[0] if late else 'temporal_strategy'}= is of times: say which, time_attr="
                )
        if self.timed and self.input_time is None and not seeds_have_times:
            raise ArgumentError("time_attr= of edges needs the times of the seeds, input_time=")

    def _times_of(self, given: Any, graphs: list[StoredGraph]) -> tuple[list[StoredGraph], dict[str, str]]:
        """The graphs that have times, or the names of arrays by node type."""
        if given is None:
            return [], {}
        name, store = as_text(given, "time_attr"), self._store
        kept = [graph for graph in graphs if name == TIMES and graph.has_times]
        known = {kind: f"{kind}.{name}" for kind in store.node_types}
        found = {kind: one for kind, one in known.items() if one in store.manifest.arrays}
        of_edges = self._named(name, graphs)
        self._one_of_these("time_attr", name, [graph.name for graph in kept], found, of_edges)
        timed = kept if found or kept else self._with_array(name, graphs, "time_attr")
        if not found and not timed:
            raise ArgumentError(
                f"time_attr={name!r}: the store has no array TYPE.{name}, and {TIMES!r} are those that "
                "graphs keep: pack them with edge_times="
            )
        return timed, found

    def _named(self, name: str, graphs: list[StoredGraph]) -> dict[str, str]:
        """The arrays ``TYPE.NAME`` of edges, by graph."""
        known = {graph.name: f"{graph.name}.{name}" for graph in graphs}
        return {of: one for of, one in known.items() if one in self._store.manifest.arrays}

    @staticmethod
    def _one_of_these(what: str, name: str, kept: list[str], *arrays: Mapping[str, str]) -> None:
        """Raises ArgumentError where a name may mean several: what would be taken would hide the others."""
        kinds = [", ".join(map(repr, one.values())) for one in arrays if one]
        kinds += [f"the {name} that {', '.join(map(repr, kept))} keep{'s' * (len(kept) == 1)}"] * bool(kept)
        if len(kinds) > 1:
            raise ArgumentError(
                f"{what}={name!r} names both {' and '.join(kinds)}, and a sampler goes by one of them: pack "
                "the other under another name"
            )

    def _with_array(self, name: str, graphs: list[StoredGraph], what: str) -> list[StoredGraph]:
        """The graphs whose edges have values in an array ``TYPE.NAME``."""
        known = self._named(name, graphs)
        found = [graph for graph in graphs if graph.name in known]
        for graph in found:
            if graph_of_array(self._store, known[graph.name]) is None or not graph.has_edge_ids:
                raise SourceError(
                    f"{what}={name!r} goes by the numbers of edges: {known[graph.name]!r} must have a value "
                    f"for each of {graph.edges:,} edges, and {graph.where()} is to keep these, packed with "
                    "edge_ids=True (--edge-ids)"
                )
            self.arrays[f"{what} {graph.name}"] = known[graph.name]
        return found

    def _read(self, graph: StoredGraph, what: str) -> Any:
        """The values of a graph's edges, in the order of its CSC arrays."""
        name = self.arrays.get(f"{what} {graph.name}")
        if name is None:
            return read_weights(graph) if what == "weight_attr" else read_times(graph)
        values = self._store.arrays[name]
        if what == "weight_attr" and values.dtype not in (np.float32, np.float64):
            values = values.astype(np.float64)
        return values[read_edge_ids(graph, by_node=True)]

    @property
    def of_memory(self) -> list[str]:
        """Those that were said which lists on disk cannot be sampled with: arrays of edges by their numbers,
        of which a list would have one anywhere."""
        return sorted({f"{key.split()[0]}={name.rpartition('.')[2]!r}" for key, name in self.arrays.items()})

    @property
    def needed_bytes(self) -> int:
        """Memory for what they hold, while it is read."""
        edges = sum(20 * one.edges for one in self.weighted) + sum(36 * one.edges for one in self.timed)
        for graph in self._graphs:  # whose lists are put in the order of these
            assert graph.edge_type is not None
            edges += 36 * graph.edges if graph.edge_type[0] in self.node_times else 0
        return edges + sum(8 * self._store.tables[kind].rows for kind in self.node_times)

    def read(self) -> SamplingOptions | None:
        """The options, with arrays in the order of the graphs' CSC arrays; None where nothing was said.
        Raises CorruptionError, DeviceError, FormatError, SourceError."""
        parts: dict[str, Any] = dict(self.plain)
        weights: dict[EdgeType | None, Any] = {
            one.edge_type: self._read(one, "weight_attr") for one in self.weighted
        }
        times: dict[EdgeType | None, Any] = {
            one.edge_type: self._read(one, "time_attr") for one in self.timed
        }
        nodes = {kind: self._store.arrays[name] for kind, name in self.node_times.items()}
        parts |= {"weights": weights or None, "edge_times": times or None, "node_times": nodes or None}
        made = SamplingOptions(**parts)
        return None if made.is_plain else made

    def from_disk(self) -> SamplingOptions | None:
        """The options of a sampler from disk, where none is of memory alone; None where nothing was said.
        Raises CorruptionError, DeviceError."""
        assert not self.arrays
        nodes = {kind: self._store.arrays[name] for kind, name in self.node_times.items()}
        made = SamplingOptions(
            **self.plain, node_times=nodes or None,
            weights={one.edge_type: KEPT for one in self.weighted} or None,
            edge_times={one.edge_type: KEPT for one in self.timed} or None,
        )  # fmt: skip
        return None if made.is_plain else made
