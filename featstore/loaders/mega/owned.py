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
from typing import Any

import numpy as np

from featstore.arguments import as_count, as_fanouts, as_mapping
from featstore.base.training_nodes import checked_train
from featstore.base.warning import warn
from featstore.errors import ArgumentError, SourceError
from featstore.hosts.split_store import WholeStore
from featstore.loaders.mega.loader import PartitionsLoader
from featstore.loaders.modes import PartitionsMode
from featstore.loaders.report import LoaderReport
from featstore.storage.relations import graph_of
from featstore.storage.store import StoredGraph

_MADE = "made"  # in a state: steps of the epoch


def owned_partitions(
    store: WholeStore, fanouts: Any, *, train: Any, graph: str | None, ranks: Sequence[int], seed: int,
    batch_size: int, drop_last: bool, passes: int = 1, **options: Any,
) -> OwnedPartitionsMode:  # fmt: skip
    """The mode, for these ranks of this host (by their numbers in the run). ``train``: node ids of the whole
    graph, a mask of all its nodes, or the name of an array. Raises ArgumentError where this host owns none of
    them, and what :class:`featstore.loaders.mega.loader.PartitionsLoader` raises."""
    if store.edge_types:
        raise ArgumentError(
            "mode='partitions' draws from the part of one host, and over hosts not from graphs with edge "
            "types: take mode online, compiled or rolling"
        )
    fanouts, of = as_fanouts(fanouts), graph_of(store, graph)
    place, owners = store.place, store.owners[of.table.name]
    nodes = checked_train(store.arrays[train] if isinstance(train, str) else train, len(owners.hosts))
    own = nodes[owners.mine(nodes)]
    if not len(own):
        raise ArgumentError(
            f"host {place.host} owns none of the {len(nodes):,} seeds: split the store with train=, which "
            "spreads them evenly over the hosts"
        )
    _check_edges(store, of, options.get("edge_table", ()))
    digest = hashlib.sha256(nodes.tobytes()).hexdigest()
    alike = {
        "mode": "partitions", "seeds": digest, "fanouts": fanouts, "graph": of.name, "seed": seed,
        "batch_size": batch_size, "drop_last": drop_last, "passes": passes,
    }  # fmt: skip
    # First what may fail here alone, and be tried again: hosts count the loaders that they agree on.
    loader = PartitionsLoader(
        store.part, fanouts, train=owners.local(own), node_ids=owners.nodes(), graph=of.name, seed=seed,
        ranks=[rank % place.ranks for rank in ranks], world_size=place.ranks, batch_size=batch_size,
        drop_last=drop_last, passes=passes, **options,
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
        self._uneven = (0, 0)  # seeds that stand twice, and that are left out, of the epoch begun last
        self._say(0)

    def _say(self, epoch: int) -> None:
        self._store.say_steps(self._number, epoch, len(self.loader.seeds_of_batches(epoch)[0]))

    def length(self) -> int:
        self._say(self._epoch)
        own = [len(self.loader.seeds_of_batches(self._epoch)[0])]
        steps = self._store.steps_of_all(self._number, self._epoch) or own
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
        (graph,) = self.loader.sets.parts.graphs.values()
        assert family is not None
        remote = family.remote_edges[graph.name][self._store.place.host]
        stored = report.edges_stored * (graph.edges + remote) // max(1, graph.edges)
        padded, dropped = self._uneven
        return replace(report, padded=padded, dropped=dropped, edges_stored=stored)
