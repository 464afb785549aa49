"""Mini-batches around links: the subgraph around both ends of some edges, with labels and negatives.

What comes out has PyG's names and layout (``LinkNeighborLoader``). Negatives are drawn from all nodes of the
type at that end, so that a few of them may be edges after all, as PyG's are; they are counted like all that
samplers draw. Where nodes have times, a negative is no later than its positive's time, and each that is not
is
as likely: no tries that may end without one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_choice, as_integer, as_number, shown
from featstore.base.hashing import batch_key, draw_below, random_words, relation_key
from featstore.base.ids import as_integers, plain_array
from featstore.errors import ArgumentError, IdError, SourceError
from featstore.sampling.neighbors import SampledSubgraph
from featstore.sampling.options import SamplingOptions, by_key, checked_times
from featstore.sampling.typed import TypedSubgraph
from featstore.storage.edge_types import EdgeType

_NODES_MAX = 2**32 - 1


class AroundNodes(Protocol):
    """What samples around nodes: in memory, from disk, or over the lists of several hosts. ``node_count``:
    of those that may be seeds."""

    seed: int
    options: SamplingOptions

    @property
    def node_count(self) -> int: ...

    def sample(
        self, seeds: NDArray[Any], batch_index: int = 0, *, epoch: int = 0, seed_times: Any = None
    ) -> Any: ...


@runtime_checkable
class AroundTypes(Protocol):
    """The same over edge types, around seeds of several types. ``nodes``: of each type."""

    seed: int
    options: SamplingOptions
    nodes: Mapping[str, int]

    def sample_types(
        self, seeds: Mapping[str, NDArray[Any]], batch_index: int = 0, *, epoch: int = 0,
        seed_times: Any = None,
    ) -> Any: ...  # fmt: skip


@dataclass(frozen=True, eq=False)
class Negatives:
    """Negatives of a mini-batch of links, as PyG's ``NegativeSampling``.

    Attributes:
        mode: ``"binary"``: pairs of nodes drawn anew, beside the positives. ``"triplet"``: for each positive
            other targets.
        amount: negatives for each positive; with ``"binary"`` it may be a fraction, and a mini-batch has
            them rounded up.
        src_weight, dst_weight: float [nodes], which nodes are drawn how often at either end; all as often by
            default.
    """

    mode: str = "binary"
    amount: float = 1
    src_weight: Any = None
    dst_weight: Any = None

    def __post_init__(self) -> None:
        as_choice(self.mode, "mode", ("binary", "triplet"))
        as_number(self.amount, "amount", above=True)
        if self.mode == "triplet" and self.amount != math.ceil(self.amount):
            raise ArgumentError(f"amount must be a whole number of mode 'triplet', not {self.amount}")
        if self.mode == "triplet" and self.src_weight is not None:
            raise ArgumentError(
                "src_weight= has no effect in mode 'triplet', whose sources are the positives'"
            )


@dataclass(frozen=True)
class LinkSubgraph:
    """A mini-batch of ``b`` links with ``n`` negatives. ``subgraph``: what is around their ends.

    ``input_id``: int64 [b], the links' numbers. Without negatives or with binary ones: ``edge_label_index``
    int64 [2, b + n], places of sources and targets in the subgraph's nodes (of their types), positives first;
    ``edge_label`` [b + n] (1.0 and 0.0 where no labels were given, None where neither labels nor negatives
    were); ``edge_label_time`` int64 [b + n]. With triplets: ``src_index`` and ``dst_pos_index`` int64 [b],
    ``dst_neg_index`` int64 [b, amount] ([b] where that is 1), and ``seed_time`` int64 [b]. Times are None
    where there are none. Where each end has a subgraph of its own, ``batch`` is the number of the positive.
    """

    subgraph: SampledSubgraph | TypedSubgraph
    batch: Any
    input_id: NDArray[np.int64]
    edge_label_index: NDArray[np.int64] | None = None
    edge_label: NDArray[Any] | None = None
    edge_label_time: NDArray[np.int64] | None = None
    src_index: NDArray[np.int64] | None = None
    dst_pos_index: NDArray[np.int64] | None = None
    dst_neg_index: NDArray[np.int64] | None = None
    seed_time: NDArray[np.int64] | None = None


class LinkSampler:
    """Samples around links, by a sampler of a graph in memory, on disk, or on several hosts.

    ``link_type``: the relation that links are of, where the graph has types: it need not be one that is
    sampled. ``negatives``: None for none. Raises ArgumentError, SourceError.
    """

    def __init__(
        self, sampler: AroundNodes | AroundTypes, *, link_type: EdgeType | None = None,
        negatives: Negatives | None = None,
    ) -> None:  # fmt: skip
        typed = isinstance(sampler, AroundTypes)
        if not typed and not all(hasattr(sampler, name) for name in ("sample", "node_count", "options")):
            raise ArgumentError(f"sampler must be one of neighbours, not {shown(sampler)}")
        if typed != (link_type is not None):
            raise ArgumentError(
                "link_type= is of graphs with types, and needed there: (source, name, target)"
            )
        if negatives is not None and not isinstance(negatives, Negatives):
            raise ArgumentError(f"negatives must be Negatives, not {shown(negatives)}")
        self.sampler, self.link_type, self.negatives = sampler, link_type, negatives
        self._types = ("", "") if link_type is None else _ends(sampler, link_type)
        counts = sampler.nodes if isinstance(sampler, AroundTypes) else {"": sampler.node_count}
        node_times = by_key(sampler.options.node_times, list(counts), "node_times")
        self._counts = [counts[name] for name in self._types]
        self._draws: dict[str, _Draw] = {}
        if negatives is not None:
            times = [node_times.get(name) for name in self._types]
            self._draws["dst"] = _Draw(self._counts[1], times[1], negatives.dst_weight, "dst")
            if negatives.mode == "binary":
                like = self._draws["dst"] if self._types[0] == self._types[1] else None
                self._draws["src"] = _Draw(self._counts[0], times[0], negatives.src_weight, "src", like)

    def sample(
        self, links: Any, batch_index: int = 0, *, epoch: int = 0, labels: Any = None, times: Any = None,
        input_id: Any = None,
    ) -> LinkSubgraph:  # fmt: skip
        """The mini-batch around ``links``: integers [2, b], sources above targets.

        ``labels`` [b]: kept as ``edge_label``; with binary negatives, whose label is 0, they are to be 1 and
        more, and with triplets there are none. ``times``: int64 [b], of the links, where the sampler has
        times. ``input_id``: int64 [b], by default 0 to b - 1. Raises IdError, ArgumentError, SourceError, and
        what the sampler raises.
        """
        ends = self.checked(links)
        count = ends.shape[1]
        self.check_said(labels, times, count)
        positive = None if times is None else checked_times(times, count, "times", "links")
        key = batch_key(self.sampler.seed, as_integer(epoch, "epoch"), as_integer(batch_index, "batch_index"))
        negatives = self.negatives
        mode = "" if negatives is None else negatives.mode
        added = 0 if negatives is None else math.ceil(count * negatives.amount)
        src, dst = ends
        if mode:
            dst = np.concatenate([dst, self._drawn("dst", key, added, count, positive)])
        if mode == "binary":
            src = np.concatenate([src, self._drawn("src", key, added, count, positive)])
        seed_times = None if positive is None else [np.resize(positive, len(one)) for one in (src, dst)]
        subgraph, places = self._around([src, dst], seed_times, batch_index, epoch)
        numbers = (
            np.arange(count) if input_id is None else checked_times(input_id, count, "input_id", "links")
        )
        whole: dict[str, Any] = {"subgraph": subgraph, "input_id": numbers}
        whole["batch"] = _of_positives(subgraph.batch, len(src), count)
        if mode == "triplet":
            others = places[1][count:]
            # of subgraphs that are disjoint, negative k is of positive k % b, else of k // amount, as in PyG
            shaped = others.reshape(-1, count).T if self._disjoint else others.reshape(count, -1)
            shaped = shaped[:, 0] if shaped.shape[1] == 1 else np.ascontiguousarray(shaped)
            return LinkSubgraph(
                **whole, src_index=places[0].copy(), dst_pos_index=places[1][:count].copy(),
                dst_neg_index=shaped, seed_time=positive,
            )  # fmt: skip
        return LinkSubgraph(
            **whole, edge_label_index=np.stack(places), edge_label=_labels(labels, count, added, mode),
            edge_label_time=None if seed_times is None else seed_times[0],
        )  # fmt: skip

    def _drawn(self, end: str, key: int, *what: Any) -> NDArray[np.int64]:
        return self._draws[end].draw(relation_key(key, end), *what)

    @property
    def _disjoint(self) -> bool:
        return self.sampler.options.has_trees

    def most_seeds(self, links: int) -> dict[str, int]:
        """Of a mini-batch of so many links: how many nodes of each type it begins with, at most."""
        added = 0 if self.negatives is None else math.ceil(links * self.negatives.amount)
        binary = self.negatives is not None and self.negatives.mode == "binary"
        found: dict[str, int] = {}
        ends = zip(self._types, self._counts, (links + added * binary, links + added), strict=True)
        for name, nodes, count in ends:
            found[name] = found.get(name, 0) + count
            found[name] = found[name] if self._disjoint else min(found[name], nodes)
        return found

    def check_said(self, labels: Any, times: Any, count: int) -> None:
        """Raise ArgumentError, SourceError for labels and times that are not for ``count`` links of this."""
        if self.sampler.options.timed != (times is not None):
            raise ArgumentError("times= of the links are for a sampler with times, and needed there")
        if times is not None:
            checked_times(times, count, "times", "links")
        mode = "" if self.negatives is None else self.negatives.mode
        if mode == "triplet" and labels is not None:
            raise ArgumentError("labels= are not of triplets, whose negatives are told by dst_neg_index")
        _labels(labels, count, 0, mode)

    def checked(self, links: Any) -> NDArray[np.int64]:
        """Links, int64 [2, b]. Raises IdError."""
        given = as_integers(links, "links must be integers [2, b]")
        if given.ndim != 2 or len(given) != 2 or not given.shape[1]:
            raise IdError(f"links must be integers [2, b], at least one link, not {list(given.shape)}")
        for end, row, count in zip(("source", "target"), given, self._counts):
            bad = row[(row < 0) | (row >= count)]
            if len(bad):
                raise IdError(f"links: {end} {bad[0]} is no node: there are {count:,}")
        return given.astype(np.int64)

    def _around(
        self, ends: list[NDArray[np.int64]], times: list[NDArray[np.int64]] | None, batch_index: int,
        epoch: int,
    ) -> tuple[SampledSubgraph | TypedSubgraph, list[NDArray[np.int64]]]:  # fmt: skip
        """The subgraph around sources and targets, and the places of both in its nodes."""
        one_type = self._types[0] == self._types[1]
        groups = [np.concatenate(ends)] if one_type else ends
        grouped = None if times is None else [np.concatenate(times)] if one_type else times
        places = [np.arange(len(group)) for group in groups]
        if not self._disjoint:
            both = [np.unique(group, return_inverse=True) for group in groups]
            groups, places = [one for one, _ in both], [place for _, place in both]
        if one_type:
            places = np.split(places[0], [len(ends[0])])
        if not isinstance(self.sampler, AroundTypes):
            when = None if grouped is None else grouped[0]
            return self.sampler.sample(groups[0], batch_index, epoch=epoch, seed_times=when), places
        return self.sampler.sample_types(
            dict(zip(self._types, groups)), batch_index, epoch=epoch,
            seed_times=None if grouped is None else dict(zip(self._types, grouped)),
        ), places  # fmt: skip


class _Draw:
    """Draws nodes of one end; ``like``: of the other one, where its nodes are the same."""

    def __init__(self, count: int, times: Any, weight: Any, end: str, like: _Draw | None = None) -> None:
        if count > _NODES_MAX:
            raise SourceError(f"negatives are drawn of up to {_NODES_MAX:,} nodes, and there are {count:,}")
        self._count, self._end = count, end
        self._order: NDArray[np.int64] | None = None
        self._times: NDArray[np.int64] | None = None
        self._sums: NDArray[np.float64] | None = None
        if like is not None:
            self._order, self._times = like._order, like._times
        elif times is not None:
            known = checked_times(times, count, "node_times", "nodes")
            self._order = np.argsort(known, kind="stable")
            self._times = known[self._order]
        if weight is not None:
            weights = plain_array(weight, f"{end}_weight")
            if weights.shape != (count,) or weights.dtype.kind not in "fiu":
                raise ArgumentError(f"{end}_weight must be a number for each of {count:,} nodes")
            weights = weights.astype(np.float64)
            if not (np.isfinite(weights.sum()) and weights.min() >= 0 and weights.sum() > 0):
                raise ArgumentError(f"{end}_weight must be finite, not negative, and not all 0")
            self._sums = np.zeros(count + 1)
            np.cumsum(weights if self._order is None else weights[self._order], out=self._sums[1:])

    def draw(
        self, key: int, added: int, positives: int, times: NDArray[np.int64] | None
    ) -> NDArray[np.int64]:
        """int64 [added]: nodes, number k for positive k % positives, no later than that. Raises SourceError
        where there is none."""
        words = random_words(np.uint64(key), added)
        allowed = np.full(added, self._count)
        if self._times is not None and times is not None:
            allowed = np.searchsorted(self._times, np.resize(times, added), side="right")
        totals = allowed if self._sums is None else self._sums[allowed]
        none = np.flatnonzero(totals == 0)
        if len(none):
            raise SourceError(
                f"link {none[0] % positives} of the mini-batch has no node that is early enough to be a "
                f"negative at its {self._end} end: leave out the earliest links, or draw no negatives"
            )
        if self._sums is None:
            picks: NDArray[np.int64] = draw_below(words, allowed.astype(np.uint64)).astype(np.int64)
        else:
            limits = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53 * totals
            picks = np.searchsorted(self._sums[1:], limits, side="right")
        return picks if self._order is None else self._order[picks]


def _ends(sampler: Any, link_type: Any) -> tuple[str, str]:
    """The types at both ends of links."""
    known = sampler.nodes
    if not (
        isinstance(link_type, tuple) and len(link_type) == 3 and {link_type[0], link_type[2]} <= set(known)
    ):
        raise ArgumentError(
            f"link_type must be (source type, name, target type) of the types {', '.join(map(repr, known))}, "
            f"not {link_type!r}"
        )
    return link_type[0], link_type[2]


def _of_positives(batch: Any, sources: int, count: int) -> Any:
    """The number of the positive whose end's subgraph each node is in. Seeds are ``sources``, then as many
    targets, or a multiple of them: number k of either is of positive k % ``count``."""
    if isinstance(batch, dict):
        return {name: one % sources % count for name, one in batch.items()}
    return None if batch is None else batch % sources % count


def _labels(given: Any, count: int, added: int, mode: str) -> NDArray[Any] | None:
    if given is None:
        return None if not mode else np.repeat(np.array([1, 0], np.float32), [count, added])
    labels = plain_array(given, "labels")
    if labels.shape[:1] != (count,):
        raise ArgumentError(f"labels must have a value for each of {count:,} links, not {list(labels.shape)}")
    if not mode:
        return labels
    if labels.dtype.kind not in "fiu" or not (labels > 0).all():
        raise ArgumentError("labels are to be 1 and more with binary negatives, whose label is 0: add 1")
    return np.concatenate([labels, np.zeros((added, *labels.shape[1:]), labels.dtype)])
