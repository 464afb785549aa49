"""Sampler: which neighbours does a mini-batch look at?

Multi-hop uniform neighbour sampling without replacement, as in GraphSAGE (Hamilton et al., NeurIPS 2017),
over a graph in memory in CSC form: the sources of the edges into node ``v`` are
``indices[indptr[v]:indptr[v + 1]]``. What comes out is what PyG's ``NeighborLoader(replace=False)`` gives:
hop ``h`` looks only at the nodes that hop ``h - 1`` found first, edges point from the neighbour (``row``) to
the node that asked (``col``), a node stands once in ``node``, the seeds stand first, and nodes and edges come
grouped by hop. PyG's own sampler needs a compiled extension (pyg-lib or torch-sparse) that has no wheel on
PyPI; this one needs numba alone.

**Randomness is counted, not drawn.** There is no generator with a state. The key of a node is a hash (the
finaliser of SplitMix64: Steele, Lea, Flood, OOPSLA 2014) of seed, epoch, batch index, hop and node id, and
the j-th random number of that node is a hash of the key and j. A mini-batch thus depends on those alone: not
on the worker that made it, nor on what was sampled before. Of ``degree`` neighbours ``fanout`` are picked by
Floyd's algorithm (CACM 30(9), 1987), which draws exactly ``fanout`` numbers. A number below n is the upper
half of a 64 x 64 bit product, so the bias is under n / 2**64.

**Options.** With replacement, by weights, within time, with one subgraph a seed, other edges than those that
were drawn: :class:`featstore.sampling.options.SamplingOptions`. They go by :mod:`featstore.sampling.growing`,
as graphs of several types do (:mod:`featstore.sampling.typed`).

**Memory** follows the mini-batch, not the graph: each hop first counts its edges, which bounds the new nodes,
and then sizes its arrays and the hash table (open addressing, at most half full) that turns node ids into
local ids.

**Trust.** The arrays may be a memory map of a file from a stranger. A pass over all of it would cost more
than an epoch, so the kernels check each offset and each id as they meet it and stop with its position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_fanouts, as_integer, shown
from featstore.base.hashing import batch_key
from featstore.base.ids import as_integers, plain_array
from featstore.errors import ArgumentError, IdError, SourceError
from featstore.sampling.growing import Growing, Grown, bad_offsets, grow_over
from featstore.sampling.hops import Hops, HopSampler
from featstore.sampling.options import SamplingOptions
from featstore.sampling.picking import sample_hop, seed_table
from featstore.sampling.reverse import with_reverse

_ONLY = ("", "", "")  # the relation of a graph without types


@dataclass(frozen=True)
class SampledSubgraph:
    """What a sampler gives for one mini-batch: ``m`` nodes and ``k`` edges, without rows.

    ``node``: int64[m], node ids, seeds first, no duplicates. ``row``, ``col``: int64[k], positions in
    ``node`` of each edge's source (the neighbour) and target (the node that asked). ``edge_id``: int64[k],
    position of the edge in the sampler's ``indices``, no number of the user's. ``num_sampled_nodes``: new
    nodes per hop, the seeds as hop 0 (length hops + 1). ``num_sampled_edges``: edges per hop. ``e_id``:
    int64[k], the user's numbers of the edges, where the sampler knows them. ``batch``: int64[m], the number
    of the seed whose subgraph each node is in, where seeds have subgraphs of their own. Of bidirectional and
    induced subgraphs ``num_sampled_edges`` is empty: their edges are of no hop. ``input_id``: int64[b], of
    seeds of a list in which nodes may stand several times, their numbers in it.
    """

    node: NDArray[np.int64]
    row: NDArray[np.int64]
    col: NDArray[np.int64]
    edge_id: NDArray[np.int64]
    num_sampled_nodes: tuple[int, ...]
    num_sampled_edges: tuple[int, ...]
    e_id: NDArray[np.int64] | None = None
    batch: NDArray[np.int64] | None = None
    input_id: NDArray[np.int64] | None = None


class NeighborSampler(HopSampler):
    """Neighbour sampler over a CSC graph in memory (or a memory map of one): uniform and without replacement,
    unless options say otherwise.

    ``indptr``: int64[n + 1]. ``indices``: int32 or int64 [e], the sources of the edges into each node.
    ``fanouts``: neighbours per node and hop, from the seeds outwards; -1 takes all. ``seed``: any integer.
    ``edge_ids``: int32 or int64 [e], the user's number of each edge, for mini-batches that have ``e_id``.
    ``options``: a :class:`~featstore.sampling.options.SamplingOptions`. Arrays are used as they are, not
    copied; lists that do not ascend in time take 8 bytes an edge, for an order in which they do.

    Raises SourceError if the graph, the fan-outs or the options cannot be used. Safe to use from several
    threads: nothing is written.
    """

    def __init__(
        self, indptr: NDArray[Any], indices: NDArray[Any], fanouts: Sequence[int], seed: int = 0, *,
        edge_ids: NDArray[Any] | None = None, options: SamplingOptions | None = None,
    ) -> None:  # fmt: skip
        self.indptr, self.indices = graph_arrays(indptr, indices)
        self.edge_ids = None if edge_ids is None else edge_numbers(edge_ids, len(self.indices))
        self.fanouts = as_fanouts(fanouts)
        self.seed = as_integer(seed, "seed")
        self.options = as_options(options)
        self._growing: Growing | None = None
        if not self.options.is_plain:
            graphs = {_ONLY: (self.indptr, self.indices)}
            by_type, by_relation = {"": self.node_count}, {_ONLY: self.fanouts}
            self._growing = grow_over(by_type, graphs, by_relation, self.options, named=False)

    @property
    def node_count(self) -> int:
        """Number of nodes of the graph."""
        return len(self.indptr) - 1

    def sample(
        self, seeds: NDArray[Any], batch_index: int = 0, *, epoch: int = 0,
        seed_times: NDArray[Any] | None = None,
    ) -> SampledSubgraph:  # fmt: skip
        """The mini-batch around ``seeds`` (any integer dtype [b], no duplicates, unless each has a subgraph
        of its own).

        ``seed_times``: int64 [b], what neighbours may not be later than; where nodes have times, by default
        the seeds' own. The result depends on the graph, the fan-outs, the options, ``seed``, ``epoch``,
        ``batch_index``, ``seeds`` and their times alone. Raises IdError for seeds that are no nodes or stand
        twice, ArgumentError for times that are missing, SourceError where the graph's arrays contradict
        themselves.
        """
        seeds = checked_seeds(seeds, self.node_count)
        key = batch_key(self.seed, as_integer(epoch, "epoch"), as_integer(batch_index, "batch_index"))
        if self._growing is not None or seed_times is not None:
            return self._grown(seeds, key, seed_times)
        hops = Hops(seeds, seed_table(seeds, seeds, np.dtype(np.int64)))
        self._go(hops, self.indptr, len(self.indices), key)
        count = sum(hops.counts)
        node = hops.nodes if len(hops.nodes) == count else hops.nodes[:count].copy()
        joined = hops.joined()
        return SampledSubgraph(
            node=node, **joined, e_id=self._numbers(node, joined["col"], joined["edge_id"])
        )

    def _grown(self, seeds: NDArray[np.int64], key: int, seed_times: NDArray[Any] | None) -> SampledSubgraph:
        """A mini-batch with options."""
        if self._growing is None:
            raise ArgumentError("seed_times= has no effect without node_times= or edge_times=")
        times = None if seed_times is None else {"": seed_times}
        found = self._growing.sample({"": seeds}, key, times)
        return subgraph_of_one(found, "", self.options.subgraph, node=found.node(""), numbers=self._numbers)

    def _numbers(
        self, node: NDArray[np.int64], col: NDArray[np.int64], edge: NDArray[np.int64]
    ) -> NDArray[np.int64] | None:
        """The user's numbers of a mini-batch's edges, at these positions of ``indices``."""
        return None if self.edge_ids is None else self.edge_ids[edge].astype(np.int64, copy=False)

    def _fill(
        self, hops: Hops, begin: int, end: int, fanout: int, key: np.uint64, picks: NDArray[np.int64],
        row: NDArray[np.int64], col: NDArray[np.int64], edge: NDArray[np.int64],
    ) -> int:  # fmt: skip
        count = int(
            sample_hop(
                self.indptr, self.indices, self.node_count, hops.nodes, begin, end, fanout, key, hops.slots,
                hops.nodes, end, picks, row, col, edge,
            )
        )  # fmt: skip
        if count < 0:
            bad = -count - 1
            raise SourceError(
                f"indices[{bad}] is {self.indices[bad]}, no node of a graph of {self.node_count:,}; "
                "build the CSC arrays again"
            )
        return count

    def _reserve_hop(self, hops: Hops, hop: int, nodes_max: int, edges: int, picks: int) -> None:
        """Memory follows the mini-batch, without a bound."""

    def _bad_offsets(self, node: int) -> SourceError:
        return bad_offsets(self.indptr, self.indices, node)


def subgraph_of_one(
    found: Grown, name: str, subgraph: str, *, node: NDArray[np.int64],
    numbers: Callable[..., NDArray[np.int64] | None],
) -> SampledSubgraph:  # fmt: skip
    """What was found over one relation as a mini-batch of the kind ``subgraph``. ``name``: the type of its
    nodes, ``node``: their ids; ``numbers``: of the nodes, the edges' targets and positions, the user's
    numbers of the edges, where they are known."""
    edge_counts = tuple(len(part[2]) for part in found.parts[0])
    row, col, edge = found.edges(0)
    e_id = numbers(node, col, edge)
    if subgraph == "bidirectional":
        row, col, edge, e_id = with_reverse(row, col, edge, e_id)
    per_hop = edge_counts if subgraph == "directional" else ()
    return SampledSubgraph(node, row, col, edge, tuple(found.hops[name]), per_hop, e_id, found.batch(name))


def as_options(options: Any) -> SamplingOptions:
    """Options as they were given; those of nothing said for None. Raises ArgumentError."""
    if options is not None and not isinstance(options, SamplingOptions):
        raise ArgumentError(f"options must be a SamplingOptions, not {shown(options)}")
    return SamplingOptions() if options is None else options


def graph_arrays(indptr: Any, indices: Any) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """CSC arrays, checked as far as can be without going through them. Raises SourceError."""
    offsets = _graph_array("indptr", indptr, (np.int64,))
    sources = _graph_array("indices", indices, (np.int32, np.int64))
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(sources):
        raise SourceError(
            f"indptr must hold n + 1 offsets, the first 0, the last the number of edges ({len(sources):,}); "
            "pass the CSC arrays of the incoming edges"
        )
    return offsets, sources


def edge_numbers(edge_ids: Any, edges: int) -> NDArray[Any]:
    """int32 or int64 [edges], the user's numbers of edges. Raises SourceError."""
    numbers = _graph_array("edge_ids", edge_ids, (np.int32, np.int64))
    if len(numbers) != edges:
        raise SourceError(f"edge_ids must have a number for each of {edges:,} edges, not {len(numbers):,}")
    return numbers


def _graph_array(name: str, array: NDArray[Any], dtypes: tuple[type, ...]) -> NDArray[Any]:
    """``array`` as a plain contiguous ndarray (a memory map stays a view of its file), or SourceError."""
    plain = plain_array(array, name)
    if plain.ndim != 1 or plain.dtype not in [np.dtype(dtype) for dtype in dtypes]:
        names = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise SourceError(
            f"{name} must be a one-dimensional {names} array, not {plain.dtype} of shape {plain.shape}"
        )
    return np.ascontiguousarray(plain)


def checked_seeds(seeds: NDArray[Any], node_count: int) -> NDArray[np.int64]:
    """A copy of ``seeds`` as int64 [b]. Raises IdError for seeds that are no nodes of a graph of
    ``node_count``."""
    given = as_integers(seeds, "seeds must be a one-dimensional integer array")
    if given.ndim != 1:
        raise IdError(
            f"seeds must be a one-dimensional integer array, not {given.dtype} of shape {given.shape}"
        )
    if len(given) and (int(given.min()) < 0 or int(given.max()) >= node_count):
        bad = given[(given < 0) | (given >= node_count)][0]
        raise IdError(f"seed {bad} is no node: the graph has nodes 0 to {node_count - 1:,}")
    return given.astype(np.int64)
