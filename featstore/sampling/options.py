"""What may be said to the samplers beside fan-outs: with or without replacement, weights, time, one subgraph
a seed, and which edges come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_choice, as_flag, as_integer, shown
from featstore.base.ids import plain_array
from featstore.errors import ArgumentError, SourceError

SUBGRAPHS = ("directional", "bidirectional", "induced")
TEMPORAL = ("uniform", "last")


class _Kept:
    """See :data:`KEPT`."""

    def __repr__(self) -> str:
        return "KEPT"

    def __reduce__(self) -> str:
        return "KEPT"


#: Weights or times of edges that stay on disk: those that a store's graph keeps, of samplers from disk.
KEPT = _Kept()


@dataclass(frozen=True, eq=False)
class SamplingOptions:
    """Options of a neighbour sampler. Names and meanings are PyG's (``NeighborLoader``) where it has them.

    Attributes:
        replace: neighbours are drawn with replacement: ``fanout`` draws of each node that has any. A fan-out
            of -1 takes all of them once, in either case.
        weights: float32 or float64 [edges], in the order of ``indices``, finite, not negative (of several
            relations a mapping by edge type; the others are unweighted). A neighbour is drawn with a chance
            that is proportional to its edge's weight; without replacement, of those that are left. An edge of
            weight 0 is never drawn, with a fan-out of -1 neither. Of samplers from disk :data:`KEPT`.
        node_times: int64 [nodes], times of nodes: each seed's subgraph has neighbours that are not later than
            the seed (a mapping by type where there are several; types without are never too late).
        edge_times: int64 [edges], in the order of ``indices`` (or a mapping by edge type): each seed's
            subgraph has edges that are not later than the seed. Not beside ``node_times``.
        window: what is more than so much earlier than the seed is left out, too. In the times' unit.
        temporal: ``"uniform"``: neighbours are drawn from all that time allows. ``"last"``: from the last
            ``fanout`` of them, which without replacement is these.
        disjoint: each seed has a subgraph of its own, and ``batch`` says of each node whose it is. Always
            where there are times.
        subgraph: ``"directional"``: the edges that were drawn. ``"bidirectional"``: these and their reverse,
            each pair of nodes once, by target, then source. ``"induced"``: all edges of the graph among the
            nodes that were found (of one seed's subgraph, where these are disjoint; that time allows), by
            target, in the order of the lists.
    """

    replace: bool = False
    disjoint: bool = False
    subgraph: str = "directional"
    weights: Any = None
    node_times: Any = None
    edge_times: Any = None
    temporal: str = "uniform"
    window: int | None = None

    def __post_init__(self) -> None:
        as_flag(self.replace, "replace")
        as_flag(self.disjoint, "disjoint")
        as_choice(self.subgraph, "subgraph", SUBGRAPHS)
        as_choice(self.temporal, "temporal", TEMPORAL)
        if self.window is not None:
            as_integer(self.window, "window", 0, 2**63 - 1)
        if self.node_times is not None and self.edge_times is not None:
            raise ArgumentError("node_times= and edge_times=: a sampler goes by one of them; leave one out")
        if not self.timed and (self.temporal != "uniform" or self.window is not None):
            raise ArgumentError("temporal= and window= are of times: give node_times= or edge_times=, too")

    @property
    def timed(self) -> bool:
        """Whether there are times."""
        return self.node_times is not None or self.edge_times is not None

    @property
    def has_trees(self) -> bool:
        """Whether each seed has a subgraph of its own."""
        return self.disjoint or self.timed

    @property
    def is_plain(self) -> bool:
        """Whether nothing is said that changes what is drawn."""
        weighted = self.weights is not None
        return not (self.replace or self.has_trees or weighted or self.subgraph != "directional")


def by_key(given: Any, known: list[Any], name: str) -> dict[Any, Any]:
    """What was given for each of ``known`` (types, or edge types): a mapping, or of a single one the thing
    itself. Raises ArgumentError for one that is not known."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        for key in given:
            if key not in known:
                raise ArgumentError(f"{name}: the graph has no {key!r}; it has {', '.join(map(repr, known))}")
        return {key: one for key, one in given.items() if one is not None}
    if len(known) > 1:
        raise ArgumentError(
            f"{name} must be a mapping by {', '.join(map(repr, known))}, not {shown(given)}: there are "
            "several"
        )
    return {known[0]: given}


def kept(given: Any, known: list[Any], name: str) -> set[Any]:
    """Those of ``known`` whose weights or times are what the store keeps. Raises ArgumentError for others."""
    found = by_key(given, known, name)
    for key, one in found.items():
        if one is not KEPT:
            raise ArgumentError(
                f"{name}: from disk they are those that the graph keeps, KEPT, not {shown(one)}"
                + (f" of {key!r}" if len(known) > 1 else "")
            )
    return set(found)


def checked_weights(given: Any, edges: int, name: str) -> NDArray[Any]:
    """float32 or float64 [edges]. Raises SourceError for weights that no chance could be proportional to."""
    weights = plain_array(given, name)
    if weights.shape != (edges,) or weights.dtype not in (np.float32, np.float64):
        raise SourceError(
            f"{name} must be float32 or float64, one for each of {edges:,} edges, not {weights.dtype} of "
            f"shape {weights.shape}"
        )
    if edges and not (np.isfinite(weights.sum(dtype=np.float64)) and weights.min() >= 0):
        raise SourceError(f"{name} must be finite, with a finite sum, and not negative")
    return np.ascontiguousarray(weights)


def checked_times(given: Any, count: int, name: str, of: str) -> NDArray[np.int64]:
    """int64 [count]. Raises SourceError."""
    times = plain_array(given, name)
    if times.shape != (count,) or times.dtype.kind not in "iu" or times.dtype == np.uint64:
        raise SourceError(
            f"{name} must be integers of up to 64 bits with a sign, one for each of {count:,} {of}, not "
            f"{times.dtype} of shape {times.shape}"
        )
    return np.ascontiguousarray(times, dtype=np.int64)
