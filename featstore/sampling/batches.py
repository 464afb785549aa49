"""Mini-batches sampled from a store's graph, to be recorded: by number, so that any of them can be made again
alone.

The training nodes of an epoch are put in an order that follows from (seed, epoch) alone, cut into batches,
and each batch is sampled with its number. What comes out does not depend on where the graph is: in memory
where it fits, else read from disk (:class:`~featstore.sampling.stored.StoredSampler`); in both, ``edge_id``
is the position of an edge in the stored ``GRAPH/sources``.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_count, as_fanouts, as_flag, as_integer
from featstore.base.environment import MEMORY
from featstore.base.hashing import batch_key, random_words
from featstore.base.sequences import in_turn
from featstore.base.training_nodes import checked_train
from featstore.errors import ArgumentError, BudgetError, SourceError
from featstore.reader.graphs import read_csc, read_edge_ids, read_offsets
from featstore.reader.options import as_memory
from featstore.sampling.ahead import sampled_ahead
from featstore.sampling.attributes import NamedOptions
from featstore.sampling.disk_sampler import DiskSampler
from featstore.sampling.edge_ids import wants_edge_ids
from featstore.sampling.hops import HopSampler
from featstore.sampling.neighbors import NeighborSampler, SampledSubgraph
from featstore.sampling.ranked import NO_SEED, Share, owned_share, share_of
from featstore.sampling.seed_list import SeedList
from featstore.sampling.stored import StoredSampler
from featstore.storage.relations import graph_of
from featstore.storage.store import as_store

if TYPE_CHECKING:
    from featstore.base.dtypes import Scalar
    from featstore.storage.store import OpenStore, StoredGraph

_FIXED_BYTES = 32 * 2**20  # of a reader while the graph is read


class GraphSampler(Protocol):
    """What mini-batches are made by. ``seed``, ``fanouts``, and ``sample`` as those of
    :class:`~featstore.sampling.neighbors.NeighborSampler`."""

    fanouts: Any
    seed: int

    @property
    def node_count(self) -> int: ...

    def sample(self, seeds: NDArray[Any], batch_index: int = 0, *, epoch: int = 0) -> Any: ...


class GraphInMemory(NeighborSampler):
    """A store's graph in memory; its edges have the positions that they have in the store, and their
    numbers."""

    def __init__(
        self, graph: StoredGraph, fanouts: Sequence[int], seed: int, edge_ids: bool,
        options: NamedOptions | None = None,
    ) -> None:  # fmt: skip
        ids = read_edge_ids(graph, by_node=True) if edge_ids else None
        read = None if options is None else options.read()
        super().__init__(*read_csc(graph), fanouts, seed, edge_ids=ids, options=read)
        row_of_node = graph.table.row_of_node()
        self._shift = None if row_of_node is None else read_offsets(graph)[row_of_node] - self.indptr[:-1]

    def _numbers(
        self, node: NDArray[np.int64], col: NDArray[np.int64], edge: NDArray[np.int64]
    ) -> NDArray[np.int64] | None:
        numbers = super()._numbers(node, col, edge)
        if self._shift is not None:
            np.add(edge, self._shift[node[col]], out=edge)
        return numbers


def bytes_in_memory(graph: StoredGraph, edge_ids: bool | None = None) -> int:
    """What it takes to bring a graph into memory by node id, at most."""
    ids = graph.store.table(f"{graph.name}/edge_ids").row_bytes if wants_edge_ids(graph, edge_ids) else 0
    as_given = graph.table.entry.order.row_of_node is None
    return graph_bytes(graph.table.rows, graph.edges, graph.entry.sources.row_bytes, ids, as_given=as_given)


def graph_bytes(nodes: int, edges: int, item: int, ids: int = 0, *, as_given: bool) -> int:
    """The same of a graph of such numbers: ``item`` and ``ids`` are bytes of a source and of an edge's
    number, ``as_given`` that rows lie in the order of their ids."""
    if as_given:
        return _FIXED_BYTES + 8 * nodes + (item + ids) * edges
    return _FIXED_BYTES + 48 * nodes + (16 + 3 * item + ids) * edges


def sampler_needs(
    store: OpenStore, fanouts: Sequence[int], graph: str | None, options: NamedOptions | None = None
) -> tuple[int, int]:
    """Bytes that a sampler takes with the graph in memory, and those without which there is none."""
    whole, said = bytes_in_memory(graph_of(store, graph)), None
    if options is not None:
        whole, said = whole + options.needed_bytes, options.from_disk()
        if options.of_memory:
            return whole, whole
    try:
        StoredSampler(store, fanouts, memory=1, graph=graph, options=said).close()
    except BudgetError as error:
        return whole, min(whole, error.needed_bytes)
    return whole, 0


def open_sampler(
    store: OpenStore, fanouts: Sequence[int], *, seed: int = 0, graph: str | None = None,
    memory: int | str = MEMORY, in_memory: bool | None = None, edge_ids: bool | None = None,
    options: NamedOptions | None = None, **reading: Any,
) -> GraphSampler:  # fmt: skip
    """A sampler over a graph in a store: in memory where it fits ``memory``, else from disk within it.
    ``in_memory`` decides instead. ``edge_ids``: mini-batches have the numbers of their edges, ``e_id``; by
    default where the store keeps them. ``options``: what else is said; arrays of edges among it need the
    graph in memory. ``reading``: how a sampler from disk reads.

    A :class:`~featstore.sampling.stored.StoredSampler` is to be closed. Raises BudgetError, SourceError,
    KeyError for a graph that is not there, CorruptionError, DeviceError, FormatError.
    """
    chosen, memory_bytes = graph_of(as_store(store), graph), as_memory(memory)
    numbered = wants_edge_ids(chosen, edge_ids)
    needed = bytes_in_memory(chosen, numbered) + (0 if options is None else options.needed_bytes)
    of_memory = [] if options is None else options.of_memory
    if of_memory and (in_memory is False or needed > memory_bytes):
        what = (
            f"hold the graph in memory, which {', '.join(of_memory)} is sampled from (or pack what it names "
            "with edge_weights= or edge_times=, which are read from disk)"
        )
        raise BudgetError(needed, memory_bytes, what)
    fits = needed <= memory_bytes
    if fits if in_memory is None else as_flag(in_memory, "in_memory"):
        return GraphInMemory(chosen, fanouts, seed, numbered, options)
    return StoredSampler(
        store, fanouts, memory=memory_bytes, seed=seed, graph=chosen.name, edge_ids=numbered,
        options=None if options is None else options.from_disk(), **reading,
    )  # fmt: skip


class SampledBatches(Sequence[SampledSubgraph]):
    """The mini-batches of an epoch, made when they are asked for, the same each time. Slices are lists. Who
    goes through them has those from disk asked for ahead (:mod:`featstore.sampling.ahead`).

    ``train``: int64, the training nodes in the order of this epoch. ``epoch``: by default 0, until
    :meth:`set_epoch` is called, as loaders do; one that was given stays. ``in_order``: training nodes come as
    they were given, in every epoch. A context manager that closes the sampler if it was opened for this.
    """

    def __init__(
        self, sampler: GraphSampler, train: NDArray[Any], batch_size: int, epoch: int | None = None, *,
        own: bool = False, in_order: bool = False,
    ) -> None:  # fmt: skip
        self.sampler, self.batch_size = sampler, as_count(batch_size, "batch_size")
        self._in_order = in_order
        self._nodes, self._own, self._stays = checked_train(train, sampler.node_count), own, epoch is not None
        self._begin(0 if epoch is None else as_integer(epoch, "epoch"))

    def _begin(self, epoch: int) -> None:
        self.train, self.epoch = self._ordered(epoch), epoch

    def _ordered(self, epoch: int) -> NDArray[np.int64]:
        """All training nodes, in the order of an epoch."""
        nodes = self._nodes
        return nodes if self._in_order else nodes[shuffled(len(nodes), self.sampler.seed, epoch)]

    def set_epoch(self, epoch: int) -> None:
        """From now on the mini-batches are those of this epoch, unless one was given when this was made."""
        if not self._stays and epoch != self.epoch:
            self._begin(as_integer(epoch, "epoch"))

    def __len__(self) -> int:
        return -(-len(self.train) // self.batch_size)

    def seeds(self, index: int) -> NDArray[np.int64]:
        """The training nodes of a mini-batch."""
        return self.train[index * self.batch_size : (index + 1) * self.batch_size]

    @overload
    def __getitem__(self, index: int) -> SampledSubgraph: ...
    @overload
    def __getitem__(self, index: slice) -> list[SampledSubgraph]: ...
    def __getitem__(self, index: int | slice) -> SampledSubgraph | list[SampledSubgraph]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        seeds, number = self.seeds(numbers), self._number(numbers)
        made: SampledSubgraph = self.sampler.sample(seeds, number, epoch=self.epoch)
        return made

    @property
    def drawn_by(self) -> GraphSampler:
        """What samples, under a list of seeds, too."""
        drawn_by: GraphSampler = self.sampler.sampler if isinstance(self.sampler, SeedList) else self.sampler
        return drawn_by

    def draw_by(self, sampler: GraphSampler) -> None:
        """Have another one sample."""
        if isinstance(self.sampler, SeedList):
            self.sampler.sampler = sampler
        else:
            self.sampler = sampler

    def __iter__(self) -> Iterator[SampledSubgraph]:
        drawn_by, now = self.drawn_by, copy.copy(self)  # whatever epoch is set meanwhile
        if not isinstance(drawn_by, DiskSampler) or not drawn_by.reads:
            return in_turn(now)
        asked = ((now.seeds(i), now._number(i), now.epoch) for i in range(len(now)))
        return sampled_ahead(self.sampler, asked)

    def _number(self, index: int) -> int:
        """By which the sampler knows a mini-batch."""
        return index

    def close(self) -> None:
        drawn_by = self.drawn_by
        if self._own and isinstance(drawn_by, DiskSampler):
            drawn_by.close()

    def __enter__(self) -> SampledBatches:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class RankedBatches(SampledBatches):
    """The mini-batches of some ranks of several, ``ranks`` of ``world_size``, in turn: number 0 of each, then
    number 1 of each. In every epoch each rank has its share of the same order, see
    :func:`featstore.sampling.ranked.share_of`, and its mini-batches are the same whichever others are here.
    ``padded`` seeds stand twice in this epoch, ``dropped`` ones, others in each, are left out.

    ``owner`` [nodes]: on which of ``hosts`` hosts each node is, whose ranks train on what is there: see
    :func:`featstore.sampling.ranked.owned_share`. An epoch is then divided as a whole, and not its rest."""

    of_links = False  # its mini-batches are around nodes

    def __init__(
        self, sampler: GraphSampler, train: NDArray[Any], batch_size: int, *, ranks: Sequence[int] = (0,),
        world_size: int = 1, drop_last: bool = False, own: bool = False, in_order: bool = False,
        owner: NDArray[Any] | None = None, hosts: int = 1,
    ) -> None:  # fmt: skip
        self.ranks, self.num_replicas, self._drop_last = tuple(ranks), world_size, drop_last
        self._owner, self._hosts = owner, hosts
        self.padded = self.dropped = 0
        self._begun_at = (0, 0)  # an epoch, and how many seeds of its order are over
        self._anew = False  # what an epoch was has changed
        super().__init__(sampler, train, batch_size, own=own, in_order=in_order)

    @property
    def per_step(self) -> int:
        """Seeds of all ranks together that a step goes on by."""
        return self.batch_size * self.num_replicas

    def epoch_steps(self) -> int:
        """Mini-batches of a whole epoch, as many for any rank."""
        return -(-len(self._share(self._nodes, 0).seeds) // self.batch_size)

    def _share(self, order: NDArray[Any], rank: int) -> Share:
        if self._owner is None:
            return share_of(order, self.batch_size, rank, self.num_replicas, self._drop_last)
        ranks = self.num_replicas // self._hosts
        return owned_share(order, self._owner, self.batch_size, rank, ranks, self._hosts, self._drop_last)

    def check_rest(self, over: int) -> None:
        """Raise ArgumentError where hosts have seeds of their own, and any are over."""
        if over and self._owner is not None:
            raise ArgumentError(
                "hosts train on the seeds that they own, so the rest of an epoch cannot be divided among "
                "another number of ranks: go on with as many as then, or save between epochs"
            )

    def begin_at(self, epoch: int, over: int) -> None:
        """Of this epoch's order the first ``over`` seeds are over: the others are divided. Raises
        ArgumentError, see :meth:`check_rest`."""
        self.check_rest(over)
        self._begun_at = epoch, over
        self._begin(self.epoch)

    def rest_of(self, epoch: int) -> int:
        """Mini-batches of each rank in an epoch, or in the rest of it that was begun at."""
        self.set_epoch(epoch)
        return self.steps

    def end_rest(self) -> None:
        """The next time that an epoch is set, it is whole."""
        self._begun_at, self._anew = (0, 0), True

    def set_epoch(self, epoch: int) -> None:
        if self._anew:
            self._anew = False
            self._begin(as_integer(epoch, "epoch"))
        super().set_epoch(epoch)

    def _begin(self, epoch: int) -> None:
        over = self._begun_at[1] if self._begun_at[0] == epoch else 0
        order = self._ordered(epoch)[over:]
        shares = [self._share(order, rank) for rank in self.ranks]
        self.padded, self.dropped = shares[0].padded, shares[0].dropped
        # at last, and whole: other threads look at them meanwhile. [ranks, seeds of each]
        self.train, self.epoch = np.stack([share.seeds for share in shares]), epoch

    @property
    def steps(self) -> int:
        """Mini-batches of each rank, in this epoch."""
        seeds: int = self.train.shape[1]
        return -(-seeds // self.batch_size)

    def __len__(self) -> int:
        return len(self.ranks) * self.steps

    def seeds(self, index: int) -> NDArray[np.int64]:
        rank: NDArray[np.int64] = self.train[index % len(self.ranks)]
        cut = rank[self._number(index) * self.batch_size :][: self.batch_size]
        return cut if self._owner is None else cut[cut != NO_SEED]

    def _number(self, index: int) -> int:
        return index // len(self.ranks)


def sample_batches(
    store_or_sampler: OpenStore | GraphSampler, train: NDArray[Any], fanouts: Sequence[int], batch_size: int,
    seed: int = 0, epoch: int | None = None, *, graph: str | None = None, memory: int | str = MEMORY,
    in_memory: bool | None = None,
) -> SampledBatches:  # fmt: skip
    """The mini-batches of an epoch of neighbour sampling, to be iterated as often as wanted, or asked for by
    number.

    Args:
        store_or_sampler: a store with a graph, or a sampler, whose fan-outs and seed are then to be the same
            as these.
        train: training nodes: ids without duplicates, or a mask over all nodes.
        fanouts: neighbours per node and hop; -1 takes all.
        batch_size: training nodes of a mini-batch; the last one may have fewer.
        seed, epoch: decide the order of the training nodes and which neighbours are picked. Without ``epoch``
            it is 0, and a loader that goes through them once an epoch has fresh ones in each.
        graph, memory, in_memory: as for :func:`open_sampler`, where a store is given.

    Raises SourceError, IdError, and what :func:`open_sampler` raises.
    """
    if not isinstance(store_or_sampler, HopSampler | DiskSampler):
        opened = open_sampler(
            as_store(store_or_sampler), fanouts, seed=seed, graph=graph, memory=memory, in_memory=in_memory
        )
        return SampledBatches(opened, train, batch_size, epoch, own=True)
    sampler: Any = store_or_sampler
    if as_fanouts(fanouts) != tuple(sampler.fanouts) or seed != sampler.seed:
        raise SourceError(
            f"the sampler has fan-outs {list(sampler.fanouts)} and seed {sampler.seed}, asked for are "
            f"{list(fanouts)} and {seed}: make one with these"
        )
    return SampledBatches(sampler, train, batch_size, epoch)


def shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of ``count`` that follows from seed and epoch: positions sorted by their hashes, the same
    for ever."""
    key = np.uint64(batch_key(seed, epoch, -1))  # no mini-batch has this number
    return np.argsort(random_words(key, count), kind="stable")


def fingerprint_of(
    store: OpenStore,
    graph: StoredGraph,
    sampler: GraphSampler,
    train: NDArray[Any],
    batch_size: int,
    epochs: int,
) -> dict[str, Scalar]:
    """What tells the recording of these mini-batches from any other."""
    nodes = checked_train(train, sampler.node_count)
    return {
        "sampler": "featstore neighbours",
        "store": store.uuid,
        "graph": graph.name,
        "fanouts": ",".join(map(str, sampler.fanouts)),
        "seed": sampler.seed,
        "batch_size": batch_size,
        "epochs": epochs,
        "train_nodes": len(nodes),
        "train_sha256": hashlib.sha256(nodes.astype("<i8").tobytes()).hexdigest(),
    }
