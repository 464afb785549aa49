"""PyG's ``LinkNeighborLoader`` over a store: the same call with a store in place of the data, and neither
pyg-lib nor torch-sparse. The rows are read by :meth:`featstore.Store.loader`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import numpy as np

from featstore.adapters.links_over_hosts import check_links_of_hosts, links_of_hosts
from featstore.adapters.pyg_loader import attached, edge_table_of, no_call, refuse, warn_of
from featstore.adapters.pyg_types import (
    canonical,
    check_links_numbered,
    link_sampler,
    numbered,
    put_links,
    typed_attached,
    typed_link_batches,
    typed_links,
    unwrapped,
    without_numbers,
)
from featstore.arguments import as_count, as_fanouts, as_flag, as_function, as_integer, shown
from featstore.base.environment import MEMORY
from featstore.base.ids import plain_array
from featstore.base.process import OneProcess
from featstore.base.threads import close_apart
from featstore.errors import ArgumentError, MissingPackageError, SourceError
from featstore.hosts.sampler import HostsSampler
from featstore.hosts.split_store import WholeStore
from featstore.loaders.host.links import LinksOfRanks
from featstore.loaders.host.place import on_host
from featstore.loaders.loader import Loader
from featstore.loaders.report import LoaderReport
from featstore.loaders.said import told
from featstore.loaders.samplers import sampler_over_hosts
from featstore.loaders.shares import MemoryShares
from featstore.reader.options import SAMPLERS_READING, as_memory
from featstore.sampling.attributes import SAMPLING_OPTIONS, NamedOptions, plainly
from featstore.sampling.batches import bytes_in_memory, open_sampler
from featstore.sampling.link_batches import LinkBatches
from featstore.sampling.links import LinkSampler, Negatives
from featstore.storage.edge_types import EdgeType, joined_name
from featstore.storage.relations import graph_of
from featstore.storage.store import OpenStore, StoredGraph

try:
    import torch
    from torch_geometric.data import Data
    from torch_geometric.sampler import NegativeSampling
except ImportError as error:
    raise MissingPackageError(f"the PyG adapter needs {error.name}: pip install 'featstore[pyg]'") from error

#: What :meth:`featstore.Store.loader` is given by this.
_OWN = ("seeds", "fanouts", "seeds_in_order", "nodes", "edge_table", "tensors", "input_time")


class LinkNeighborLoader:
    """Mini-batches as PyG's ``torch_geometric.loader.LinkNeighborLoader`` gives them, from a store.

    Each is a ``Data`` as of :class:`~featstore.adapters.pyg_loader.NeighborLoader`, with ``input_id`` int64
    [b] (the links' numbers; not of all edges of a graph that does not keep these) and ``edge_label_index``,
    ``edge_label`` and ``edge_label_time``, or of triplets ``src_index``, ``dst_pos_index``, ``dst_neg_index``
    and ``seed_time``, in the layout of PyG's (:class:`featstore.sampling.links.LinkSubgraph`). Negatives may
    be edges, as PyG's may.

    Of a store that is split by hosts all give the same links, and each trains on its share of them, all on as
    many: those whose target it owns, or whose source, as far as that is even. Ranks of a host have one loader
    between them there, with ``shared=True``.

    Of a store with edge types each is a ``HeteroData``, with what is of the links at their edge type, and the
    indices of triplets at the types of their ends.

    Args:
        data: an open store with one table of nodes and a graph, or with edge types. Graphs are held in memory
            where they fit a third of ``memory``, else read from disk; all edges as links take 48 bytes each.
        num_neighbors: neighbours per node and hop, -1 for all; with edge types also a mapping of these.
        edge_label_index: links, integers [2, l] (tensor, array), the name of an array in the store, or None
            for all edges of the graph: in the order of their numbers where it keeps these; where it does not,
            labels and times of them are refused. With edge types one of these, for all its edges, or a pair
            of it and links, or the name of such an array; its two types of nodes alone where no other joins
            them.
        edge_label: labels [l], or the name of an array. With binary negatives, labels that begin with 0 are
            one more in mini-batches, where 0 is a negative's.
        edge_label_time: int64 [l], times of the links; needs ``time_attr``.
        neg_sampling: PyG's ``NegativeSampling``, a mapping of its arguments, ``"binary"`` or ``"triplet"``,
            or a :class:`featstore.sampling.links.Negatives`; ``neg_sampling_ratio`` is short for binary ones.
        replace, disjoint, subgraph_type, weight_attr, time_attr, temporal_strategy: as of
            :class:`~featstore.adapters.pyg_loader.NeighborLoader`.
        transform, batch_size, shuffle, drop_last, attach, memory: as of that, too.
        options: further ones of :meth:`featstore.Store.loader` for mini-batches that are given (``mode=``,
            ``rank=`` ...), ``shared=``, ``seed=`` and ``graph=``; and those of PyG's and torch's loaders.

    Each iteration is an epoch. It holds threads and memory until :meth:`close`, or until it is collected; a
    context manager. Raises ArgumentError, SourceError, IdError, BudgetError; what
    :meth:`featstore.Store.loader` raises.
    """

    loader: Loader
    #: As of PyG's loaders: threads of the store's own sample and read.
    num_workers = 0
    __reduce__ = OneProcess.__reduce__
    called = "the loader"

    def __init__(
        self, data: OpenStore, num_neighbors: Sequence[int], edge_label_index: Any = None,
        edge_label: Any = None, edge_label_time: Any = None, *, neg_sampling: Any = None,
        neg_sampling_ratio: float | None = None, transform: Callable[[Data], Any] | None = None,
        batch_size: int = 1, shuffle: bool | None = False, drop_last: bool | None = False,
        attach: str | Sequence[str] | None = None, memory: int | str = MEMORY, **options: Any,
    ) -> None:  # fmt: skip
        if not isinstance(data, OpenStore):
            raise ArgumentError(f"data must be an open store, featstore.open(path), not {shown(data)}")
        if isinstance(data, WholeStore):
            check_links_of_hosts(data, edge_label_index, options)
        self._transform = None if transform is None else as_function(transform, "transform")
        for name in _OWN:
            if name in options:
                raise ArgumentError(f"LinkNeighborLoader has no option {name!r}")
        if (edge_label_time is None) != (options.get("time_attr") is None):
            raise ArgumentError("edge_label_time= and time_attr= go together: give both")
        refuse(options)
        warn_of(options)
        num_neighbors, self.batch_size = unwrapped(num_neighbors, data.edge_types), batch_size
        negatives, memory_bytes = negatives_of(neg_sampling, neg_sampling_ratio), as_memory(memory)
        labels = _labels(_array(data, edge_label, "edge_label"), negatives)
        times = _array(data, edge_label_time, "edge_label_time")
        said = {name: options.pop(name) for name in SAMPLING_OPTIONS if name in options}
        seed, graph = as_integer(options.pop("seed", 0), "seed"), options.pop("graph", None)
        given: dict[str, Any] = {
            "batch_size": as_count(batch_size, "batch_size"), "labels": labels, "times": times,
            "shuffle": as_flag(shuffle or False, "shuffle"),
            "drop_last": as_flag(drop_last or False, "drop_last"),
        }  # fmt: skip
        self._type: EdgeType | None = None  # of the links, where there are several
        self._unnumbered: list[EdgeType] = []  # edge types whose edges have no numbers
        edges: Any
        made: Callable[..., tuple[LinkBatches, MemoryShares]]
        if data.edge_types and graph is None:
            self._type, ends = typed_links(data, edge_label_index)
            of = data.graphs[joined_name(self._type)]
            made = partial(typed_link_batches, data, self._type, ends, canonical(num_neighbors), said)
            unnumbered = self._unnumbered = without_numbers(data, said.get("subgraph_type"))
            names, edges = typed_attached(data, attach, unnumbered), numbered(data, unnumbered)
            tables = {name: data.tables[name] for name in data.node_types}
        else:
            of, ends = graph_of(data, graph), _array(data, edge_label_index, "edge_label_index")
            made = partial(_batches_of, data, of, ends, num_neighbors, said)
            names = attached(data, of.table.rows, attach, options)
            edges = edge_table_of(data, of.name, options.get("mode"))
            tables = {of.table.name: data.tables[of.table.name]}
        place = data.place if isinstance(data, WholeStore) else None
        if isinstance(data, WholeStore) and data.place.ranks == 1:
            on_host(options.pop("shared", False), options, data)
        shared = options.get("shared", False) is not False or (place is not None and place.ranks > 1)
        asked = {"num_neighbors": canonical(num_neighbors), "seed": seed, "graph": of.name} | plainly(said)
        alike = _alike(self._type, ends, negatives, given, asked)
        given["reading"] = {name: options[name] for name in SAMPLERS_READING if name in options}
        links = LinksOfRanks(alike, partial(made, seed=seed, negatives=negatives, **given), tables)
        to_read: LinkBatches | LinksOfRanks = links
        if shared:
            self._shares = MemoryShares(memory_bytes)
        else:
            hosts = 1 if place is None else place.hosts
            self._batches, self._shares = to_read, _ = links.make(memory_bytes, (0,), hosts)
        with self._shares.told_of_all():
            self.loader = Loader(
                data, to_read, attach=names, memory=self._shares.rows_bytes, tensors=True, edge_table=edges,
                **options,
            )  # fmt: skip
        self._count = of.edges if ends is None else int(np.shape(ends)[1])

    @property
    def dataset(self) -> Sequence[int]:
        """The numbers of all links, as of PyG's loaders."""
        return range(self._count)

    def __call__(self, index: Any) -> NoReturn:
        raise no_call(index)

    def __len__(self) -> int:
        """Mini-batches of an epoch, this rank's."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        with self._shares.told_of_all():
            for batch in self.loader:
                made = batch.pyg()
                if self._type is None:
                    del made.batch_size  # PyG's mini-batches of links have none
                else:
                    for kind in {self._type[0], self._type[2]}:
                        made[kind].pop("batch_size", None)
                    put_links(made, batch, self._type)
                    for edge_type in self._unnumbered:
                        made[edge_type].pop("e_id", None)
                del batch
                yield made if self._transform is None else self._transform(made)
                del made

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch."""
        self.loader.set_epoch(epoch)

    def report(self) -> LoaderReport:
        """What has been read, and how long it took."""
        return self.loader.report()

    def close(self) -> None:
        """Give everything back. May be called more than once."""
        if hasattr(self, "loader"):
            self.loader.close()
        if hasattr(self, "_batches"):
            self._batches.close()

    def __enter__(self) -> LinkNeighborLoader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        close_apart(self.close)

    def __repr__(self) -> str:
        return f"LinkNeighborLoader({self.loader!r})"


def _alike(
    link_type: EdgeType | None, ends: Any, negatives: Negatives | None, given: Mapping[str, Any],
    asked: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """What was said of mini-batches of links, by option: by all hosts and ranks alike."""
    if isinstance(ends, list):
        with suppress(ValueError):  # they are looked at where they are taken
            ends = np.asarray(ends)
    found: dict[str, Any] = {"edge_label_index": (link_type, told(ends))}
    found |= {"edge_label": told(given["labels"]), "edge_label_time": told(given["times"])}
    if negatives is not None:
        weights = {
            n: plain_array(one, n)
            for n, one in vars(negatives).items()
            if n.endswith("_weight") and one is not None
        }
        found |= {"neg_sampling": told({**vars(negatives), "amount": float(negatives.amount), **weights})}
    found |= {name: given[name] for name in ("batch_size", "shuffle", "drop_last")}
    return found | {name: told(one) for name, one in asked.items()}


def _batches_of(
    data: OpenStore, graph: StoredGraph, ends: Any, fanouts: Any, said: dict[str, Any], memory_bytes: int,
    ranks: tuple[Sequence[int], int], *, seed: int, negatives: Negatives | None, reading: Mapping[str, Any],
    **given: Any,
) -> tuple[LinkBatches, MemoryShares]:  # fmt: skip
    """Mini-batches of a graph without types around links ``ends``, None for all edges, of ``ranks``, those
    here and how many there are; and the shares of memory."""
    if isinstance(fanouts, Mapping):
        raise SourceError("num_neighbors by edge type is of a store with edge types; this has none")
    named = NamedOptions(data, graph, said, seeds_have_times=True)
    numbers = as_fanouts(fanouts)

    def sampler_of(memory: int, in_memory: bool) -> Any:
        return open_sampler(
            data, numbers, seed=seed, graph=graph.name, memory=memory, in_memory=in_memory, options=named,
            **reading,
        )  # fmt: skip

    known = check_links_numbered(graph, ends, given)
    if isinstance(data, WholeStore) and data.splits_topology:
        sampler, shares = sampler_over_hosts(
            named, MemoryShares(memory_bytes),
            lambda **asked: HostsSampler(data, numbers, seed=seed, graph=graph.name, **asked),
        )  # fmt: skip
    else:
        needed = bytes_in_memory(graph) + named.needed_bytes
        sampler, ends, shares = link_sampler(
            graph, ends, memory_bytes, needed,
            lambda: sampler_of(needed, True), lambda memory: sampler_of(memory, False),
        )  # fmt: skip
    around = LinkSampler(sampler, negatives=negatives)
    own = links_of_hosts(data, (graph.table.name, graph.table.name), around, ends, *ranks)
    return LinkBatches(around, ends, numbered=known, **given, **own), shares


def negatives_of(given: Any, ratio: Any = None) -> Negatives | None:
    """Negatives as PyG takes them. Raises ArgumentError."""
    if ratio is not None and ratio != 0:
        if given is not None:
            raise ArgumentError("neg_sampling_ratio= is short for neg_sampling=: give one of them")
        return Negatives("binary", ratio)
    if given is None or isinstance(given, Negatives):
        return given
    if isinstance(given, str):
        return Negatives(given)
    if isinstance(given, Mapping):
        known = {"mode", "amount", "src_weight", "dst_weight"}
        if not set(given) <= known:
            raise ArgumentError(f"neg_sampling has {', '.join(sorted(known))}, and not {sorted(given)}")
        return Negatives(**given)
    if not isinstance(given, NegativeSampling):
        raise ArgumentError(f"neg_sampling must be PyG's NegativeSampling, not {shown(given)}")
    return Negatives(given.mode.value, given.amount, given.src_weight, given.dst_weight)


def _array(store: OpenStore, given: Any, name: str) -> Any:
    """An array as it was given, as a tensor, or by its name in the store."""
    if isinstance(given, tuple):
        raise SourceError(f"{name} of an edge type is of a store with edge types; this has none")
    found = store.arrays[given] if isinstance(given, str) else given
    return found.cpu().numpy() if isinstance(found, torch.Tensor) else found


def _labels(given: Any, negatives: Negatives | None) -> Any:
    """Labels that leave 0 to the negatives, where these have labels."""
    if given is None or negatives is None or negatives.mode != "binary":
        return given
    labels = plain_array(given, "edge_label")
    labels = labels.astype(np.int64) if labels.dtype == np.bool_ else labels
    return labels + 1 if labels.size and labels.min() == 0 else labels
