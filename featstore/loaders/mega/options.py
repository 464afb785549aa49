"""Samplers' options in mega-batches: what of weights and times is loaded, and what is made of it there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.errors import ArgumentError, SourceError
from featstore.loaders.mega.partition_set import PartitionSet
from featstore.sampling.attributes import NamedOptions, TimesOfSeeds
from featstore.sampling.options import SamplingOptions
from featstore.sampling.typed_options import TypedOptions

if TYPE_CHECKING:
    from featstore.loaders.mega.parts import Parts
    from featstore.storage.store import OpenStore

_TIME_BYTES = 16  # of a place: its node's time, and to find it
_SEED_BYTES = 16  # of a seed whose time was given
_ORDER_BYTES = 44  # of an edge, while lists are put in the order of the times of nodes
_ASCENDING_BYTES = 10  # of an edge, while it is seen that lists ascend in time


class DrawnWith:
    """What was ``said`` of :data:`~featstore.sampling.attributes.SAMPLING_OPTIONS`, over all edge types as
    :class:`~featstore.sampling.typed_options.TypedOptions` has it, without types as
    :class:`~featstore.sampling.attributes.NamedOptions`. ``train``: the seeds, as :meth:`Parts.as_seeds`
    gives them, whose times may be given. ``whole``: of parts of one host the store that was split, which has
    the arrays, and ``seeds``, int64 [s], the ids that all seeds have there: mini-batches are of such. Raises
    ArgumentError, SourceError.
    """

    def __init__(
        self, parts: Parts, said: Mapping[str, Any] | None = None, train: Any = None, *,
        whole: OpenStore | None = None, seeds: NDArray[np.int64] | None = None,
    ) -> None:  # fmt: skip
        self._parts = parts
        self._plain: dict[str, Any] = {}
        self._weighted: set[str] = set()
        self._timed: set[str] = set()
        self._node_times: dict[str, NDArray[Any]] = {}
        self.seed_times: TimesOfSeeds | None = None
        if not said:
            return
        store = parts.store if whole is None else whole
        options: TypedOptions | NamedOptions
        if parts.typed:
            options = TypedOptions(store, said)
            arrays = list(options.arrays.values())
        else:
            (name,) = parts.graphs
            options = NamedOptions(store, store.graphs[name], said)
            arrays = options.arrays
        if arrays:
            names = ", ".join(map(repr, arrays))
            raise ArgumentError(
                "in mode 'partitions' weights and times of edges are those that graphs keep, not arrays, as "
                f"{names}: pack them with edge_weights= or edge_times=, or take mode='online'"
            )
        self._plain = options.plain
        self._weighted = {graph.name for graph in options.weighted}
        self._timed = {graph.name for graph in options.timed}
        self._check_kept()
        for name, array in options.node_times.items():
            if name in parts.tables:
                self._node_times[name] = store.arrays[array].astype(np.int64, copy=False)
        if options.input_time is not None:
            ids = parts.seed_ids(train) if seeds is None else seeds
            ids = np.arange(parts.tables[parts.seed_table(train)].rows) if ids is None else ids
            self.seed_times, self._seeds = TimesOfSeeds(ids, options.input_time), len(ids)

    def _check_kept(self) -> None:
        """Raise SourceError where a part has not what the topology has."""
        for what, names in (("weights", self._weighted), ("times", self._timed)):
            for graph in (self._parts.graphs[name] for name in sorted(names)):
                if not (graph.has_weights if what == "weights" else graph.has_times):
                    raise SourceError(
                        f"{graph.where()} has no {what} of its edges, and the topology has: parts that "
                        "featstore split earlier have none; split the store again"
                    )

    @property
    def _has_times(self) -> bool:
        return bool(self._timed or self._node_times)

    @property
    def drawn(self) -> dict[str, Any]:
        """What the size of mini-batches follows from, as
        :class:`~featstore.loaders.mega.largest.LargestDrawn` has it."""
        subgraph = self._plain.get("subgraph", "directional")
        trees = self._has_times or self._plain.get("disjoint", False)
        replace = self._plain.get("replace", False)
        plain = not (trees or replace or self._weighted or subgraph != "directional")
        return {"plain": plain, "replace": replace, "trees": trees, "subgraph": subgraph}

    @property
    def held_bytes(self) -> int:
        """Memory of times that are held for good."""
        seeds = 0 if self.seed_times is None else _SEED_BYTES * self._seeds
        return seeds + sum(times.nbytes for times in self._node_times.values())

    def place_bytes(self, table: str) -> int:
        """Of each place of a mega-batch, of the time of its node."""
        return _TIME_BYTES if table in self._node_times else 0

    def order_bytes(self, graph: str) -> int:
        """Of each edge, while its list is put in the order of time."""
        if self._parts.graphs[graph].source_table.name in self._node_times:
            return _ORDER_BYTES
        return _ASCENDING_BYTES if graph in self._timed else 0

    def values(self, graph: str) -> tuple[str, ...]:
        """What is loaded of each edge of a graph beside its source."""
        there = {
            "edge_ids": self._parts.graphs[graph].has_edge_ids, "weights": graph in self._weighted,
            "times": graph in self._timed,
        }  # fmt: skip
        return tuple(part for part, wanted in there.items() if wanted)

    def over(self, mega: PartitionSet) -> SamplingOptions | None:
        """The options over a mega-batch, whose nodes are local ids; None where nothing was said."""
        if not self._plain:
            return None
        times: dict[str, Any] = {}
        for name, known in self._node_times.items():
            node = mega.rows[name].node
            times[name] = np.zeros(len(node), np.int64)
            np.take(known, node, out=times[name], mode="clip")  # places without a node have any time
        weights, of_edges = (
            self._by_type(mega, part, graphs)
            for part, graphs in (("weights", self._weighted), ("times", self._timed))
        )
        return SamplingOptions(
            **self._plain, weights=self._given(weights), node_times=self._given(times),
            edge_times=self._given(of_edges),
        )  # fmt: skip

    def _given(self, by_type: dict[Any, Any]) -> Any:
        """As samplers take it: without types the array alone."""
        return (by_type if self._parts.typed else next(iter(by_type.values()))) if by_type else None

    def _by_type(self, mega: PartitionSet, part: str, graphs: set[str]) -> dict[Any, Any]:
        return {self._parts.graphs[name].edge_type: mega.lists[name].values[part] for name in sorted(graphs)}
