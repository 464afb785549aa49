"""Mode partitions over several hosts: each trains on the partitions that it owns, in as many steps as any
other.

A host's part has its own rows, in the partitions of the store that was split, and the lists among them. So
mini-batches are drawn from it alone, by the ids of the whole graph, and neighbours on other hosts are left
out, as those outside of a mega-batch are.

How many steps an epoch takes depends on what fits in each host's memory. Hosts tell each other, an epoch
ahead, and all have as many as the one with the most: the others begin their epoch again, so that some seeds
stand twice. With ``drop_last`` all have as many as the one with the fewest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from featstore.arguments import as_count, as_mapping
from featstore.base.training_nodes import checked_train
from featstore.base.warning import warn
from featstore.errors import ArgumentError, SourceError
from featstore.hosts.split_store import WholeStore
from featstore.loaders.mega.loader import PartitionsLoader
from featstore.loaders.mega.options import DrawnWith
from featstore.loaders.mega.parts import Parts
from featstore.loaders.modes import PartitionsMode
from featstore.loaders.over_hosts import tell_uneven
from featstore.loaders.report import LoaderReport
from featstore.loaders.said import told
from featstore.sampling.typed_store import TypedSeeds
from featstore.storage.store import StoredGraph

_MADE = "made"  # in a state: steps of the epoch


def owned_partitions(
    store: WholeStore, fanouts: Any, *, train: Any, graph: str | None, ranks: Sequence[int], seed: int,
    batch_size: int, drop_last: bool, said: Mapping[str, Any], passes: int = 1, **options: Any,
) -> OwnedPartitionsMode:  # fmt: skip
    """The mode, for these ranks of this host (by their numbers in the run). ``train``: node ids of the whole
    graph, a mask of all its nodes, or the name of an array; with types as :class:`TypedSeeds` takes them.
    ``said``: samplers' options, of the whole store and all seeds. Raises ArgumentError where this host owns
    none of the seeds, and what :class:`featstore.loaders.mega.loader.PartitionsLoader` raises."""
    parts, place = Parts(store.part, graph), store.place
    if parts.typed:
        seeds = TypedSeeds.of(store, train)
        table, nodes = seeds.node_type, seeds.ids
    else:
        table = parts.seed_table(None)
        whole = store.arrays[train] if isinstance(train, str) else train
        nodes = checked_train(whole, len(store.owners[table].hosts))
    owners = store.owners[table]
    own = nodes[owners.mine(nodes)]
    tell_uneven(owners.hosts[nodes], place.hosts, place.ranks, batch_size, drop_last)
    if not len(own):
        raise ArgumentError(
            f"host {place.host} owns none of the {len(nodes):,} seeds: split the store with train=, which "
            "spreads them evenly over the hosts"
        )
    for one in parts.graphs:
        _check_edges(store, store.graphs[one], options.get("edge_table", ()))
    digest, local = hashlib.sha256(nodes.tobytes()).hexdigest(), owners.local(own)
    alike = {
        "mode": "partitions", "seeds": digest, "fanouts": parts.fanouts(fanouts), "graph": [*parts.graphs],
        "type": table, "seed": seed, "batch_size": batch_size, "drop_last": drop_last, "passes": passes,
        "said": sorted((name, told(one)) for name, one in said.items()),
    }  # fmt: skip
    # First what may fail here alone, and be tried again: hosts count the loaders that they agree on.
    loader = PartitionsLoader(
        store.part, fanouts, train=(table, local) if parts.typed else local, graph=graph, seed=seed,
        node_ids={name: store.owners[name].nodes() for name in parts.tables},
        ranks=[rank % place.ranks for rank in ranks], world_size=place.ranks, batch_size=batch_size,
        drop_last=drop_last, passes=passes,
        said=DrawnWith(parts, said, whole=store, seeds=nodes), **options,
    )  # fmt: skip
    try:
        return OwnedPartitionsMode(loader, store, store.agree(alike), drop_last)
    except BaseException:
        loader.close()
        raise


def _check_edges(store: WholeStore, of: StoredGraph, edge_table: Sequence[str]) -> None:
    """A part's lists have no numbers of edges: raise SourceError where rows of edges are wanted by these,
    warn where mini-batches of other modes would have them."""
    if store.part.graphs[of.name].has_edge_ids:
        return
    if edge_table:
        raise SourceError(
            f"edge_table={edge_table[0]!r} is read by e_id, which mini-batches of mode 'partitions' have not "
            "where rows are on several hosts: take another mode, or leave it out"
        )
    if getattr(of, "has_edge_ids", False):
        warn(
            f"mini-batches of mode 'partitions' have no e_id where rows are on several hosts, though graph "
            f"{of.name!r} has the numbers of its edges: take another mode where you want them"
        )


class OwnedPartitionsMode(PartitionsMode):
    """Mini-batches sampled inside random collections of this host's partitions. ``number``: of the loader, on
    all hosts."""

    def __init__(self, loader: PartitionsLoader, store: WholeStore, number: int, drop_last: bool) -> None:
        super().__init__(loader)
        self._store, self._number, self._drop_last = store, number, drop_last
        self._epoch = self._made = 0  # mini-batches of the epoch that were handed out, of all ranks here
        self._told = False  # that it is closed
        self._uneven = (0, 0)  # seeds that stand twice, and that are left out, of the epoch begun last
        self._say(0)
        self.say = partial(store.say_position, number)

    def _say(self, epoch: int) -> None:
        if self._store.loaders_of_hosts is not None:
            steps = len(self.loader.seeds_of_batches(epoch)[0])
            self._store.loaders_of_hosts.say_steps(self._number, epoch, steps)

    def length(self) -> int:
        self._say(self._epoch)
        own = [len(self.loader.seeds_of_batches(self._epoch)[0])]
        steps = own
        if self._store.loaders_of_hosts is not None:
            steps = self._store.loaders_of_hosts.steps_of_all(
                self._number, self._epoch, self.loader.is_closed
            )
        found = min(steps) if self._drop_last else max(steps)
        if not found:
            raise ArgumentError(
                f"drop_last= leaves no mini-batch of epoch {self._epoch} on host {int(np.argmin(steps))}: "
                "give fewer seeds a batch, or more memory, so that more partitions are together"
            )
        return found

    def _going(self) -> Generator[Any]:
        epoch, ranks, steps = self._epoch, len(self.loader.ranks), self.length()
        self._say(epoch + 1)
        seeds, padded, dropped = self.loader.seeds_of_batches(epoch)
        again, left = np.resize(seeds, max(steps, len(seeds)))[len(seeds) :], seeds[steps:]
        self._uneven = padded + ranks * int(again.sum()), dropped + ranks * int(left.sum())
        while self._made < steps * ranks:
            if self._made and self._made % (len(seeds) * ranks) == 0:
                self.loader.set_epoch(epoch)  # again
            with closing(iter(self.loader)) as batches:  # type: ignore[type-var]
                for batch in batches:
                    self._made += 1
                    yield batch
                    del batch
                    if self._made == steps * ranks:
                        break
        self.set_epoch(epoch + 1)

    def close(self) -> None:
        super().close()
        if self._store.loaders_of_hosts is not None and not self._told:
            self._told = True
            self._store.loaders_of_hosts.say_closed(self._number)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._epoch, self._made = epoch, 0
        self._say(epoch)

    def state(self) -> dict[str, Any]:
        state = super().state()
        made = -(-self._made // len(self.loader.ranks))  # of each rank: the same in all
        return state | {"at": {**state["at"], _MADE: made}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        place = dict(as_mapping(state.get("at"), "'at' of the state", "names to values"))
        made = as_count(place.pop(_MADE, None), f"{_MADE} of the state", 0)
        super().load_state({**state, "at": place})
        self._epoch, self._made = state["epoch"], made * len(self.loader.ranks)
        self._say(self._epoch)

    def report(self) -> LoaderReport:
        """Seeds that stand twice, or are left out, are this host's."""
        report, family = super().report(), self._store.part.manifest.family
        graphs, host = self.loader.sets.parts.graphs, self._store.place.host
        assert family is not None
        here = sum(graph.edges for graph in graphs.values())
        remote = sum(family.remote_edges[name][host] for name in graphs)
        stored = report.edges_stored * (here + remote) // here if here else remote
        padded, dropped = self._uneven
        return replace(report, padded=padded, dropped=dropped, edges_stored=stored)
