"""The front door of a store that is split by hosts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from featstore.arguments import check_options, options_of
from featstore.base.environment import MEMORY
from featstore.errors import ArgumentError
from featstore.hosts.split_store import WholeStore
from featstore.reader.options import READING
from featstore.store import Store, Table

if TYPE_CHECKING:
    from featstore.hosts.sampler import HostsSampler
    from featstore.reader.table_array import TableArray
    from featstore.reader.tiered import TieredReader
    from featstore.sampling.stored import StoredSampler
    from featstore.tiers import TierSpec

__all__ = ["SplitStore", "open_split"]


class SplitStore(WholeStore, Store):
    """A store that is split by hosts, open on one of them; see :func:`open_split`. ``part`` is this host's
    own part. What other hosts own comes through :meth:`loader` and :meth:`reader`, under the node ids of the
    whole graph; :meth:`sampler` and ``arrays`` are those of the whole graph."""

    def table(  # type: ignore[override]
        self, name: str, *, memory: int | str | None = None, **options: Any
    ) -> Table | TableArray:
        """As :meth:`featstore.Store.table`; with ``memory`` rows of all hosts."""
        if memory is None and not options:
            return WholeStore.table(self, name)
        return self._table_array(WholeStore.table(self, name), memory, options)

    def __repr__(self) -> str:
        return f"<SplitStore {str(self.path)!r}>"  # all hosts open it, together: no call alone does

    def reader(  # type: ignore[override]
        self, *, tiers: Sequence[TierSpec] = (), memory: int | str = MEMORY, **options: Any
    ) -> TieredReader:
        """A reader of the rows of all hosts. What it does not find in ``tiers`` it reads from this host's
        disk, or asks of the host that has it, point to point: no other process has to do anything at the
        same time.

        ``tiers``: what keeps rows in memory, the fastest first (:class:`featstore.Device`,
        :class:`featstore.Buffer`), and last :class:`featstore.Hosts`, where that is not as by default.
        ``memory``: of all of this. ``options``: ``tables``, and of the reader of this host's disk ``engine``,
        ``queue_depth``, ``threads``, ``verify``, which a ``Hosts`` that is given has itself.
        """
        from featstore.hosts.tier import Hosts
        from featstore.reader.tiered import TieredReader

        self.check_open()
        check_options(options, ("tables", *READING), "a reader of a split store")
        own = {name: options.pop(name) for name in READING if name in options}
        if not isinstance(tiers, Sequence) or not tiers or not isinstance(tiers[-1], Hosts):
            tiers = [*tiers, Hosts(**own)]
        elif own:
            raise ArgumentError(f"{next(iter(own))}= is said twice: give it to the Hosts in tiers= alone")
        return TieredReader(self, tiers, memory=memory, **options)

    def sampler(self, fanouts: Sequence[int], **options: Any) -> StoredSampler | HostsSampler:  # type: ignore[override]
        """A neighbour sampler over a graph of all hosts. Where topology is split, too, it asks other hosts
        for neighbours, and its options are those of :class:`featstore.hosts.sampler.HostsSampler`, by the
        names of :meth:`featstore.Store.sampler`; else the whole graph is on this host's disk, and they are
        as of that."""
        from featstore.hosts.sampler import HostsSampler
        from featstore.sampling.attributes import SAMPLER_OPTIONS, sampler_options

        if not self.splits_topology:
            return super().sampler(fanouts, **options)
        self.check_open()
        own = [name for name in options_of(HostsSampler) if name != "options"]
        check_options(options, (*own, *SAMPLER_OPTIONS), "a sampler of a split store")
        return HostsSampler(self, fanouts, **{"memory": "256MiB", **sampler_options(self, options)})

    def loader_costs(self, *arguments: Any, **options: Any) -> Any:
        raise ArgumentError(
            "loader_costs is of a store on one disk: what rows of other hosts take, nobody has measured; try "
            "the modes that you think of, mode="
        )


def open_split(
    path: str | os.PathLike[str], *, memory: int | str = "256MiB", timeout_seconds: float = 300,
    topology: str | os.PathLike[str] | None = None, **reader: Any,
) -> SplitStore:  # fmt: skip
    """Open a store that :func:`featstore.split` made, on one of its hosts.

    On more than one, ``torch.distributed`` must be initialised, as it is under ``torchrun`` on as many hosts
    as the store was split for; all ranks open it at the same time. Closing it waits until all hosts have
    closed it.

    Args:
        path: what ``split`` made, of which this host's part is taken; or that part, with ``topology`` beside
            it.
        memory: budget, of a process, for what knows the owners of nodes (1.03 bytes a node, and where
            topology is whole and rows have an order of their own 4 more while it is opened), for lines to
            other hosts, and for serving them: rows of high degree are kept in what is left, and where
            topology is split, too, this host's lists take what they need, and up to half of what is left
            beside that. Loaders have their own.
        timeout_seconds: a host that is not heard of, or does not answer, for so long is given up: PeerError
            on all others, as is a rank of a host whose ranks share a loader. Until all hosts have opened the
            store it is three times as long, as they may come one after the other; one that cannot open it
            tells the others, which takes it five seconds at most.
        topology: the directory of the topology, where it is elsewhere.
        reader: of the reader that serves, ``engine``, ``queue_depth``, ``threads``, ``verify`` and ``model``,
            see :class:`featstore.Reader`.

    Raises ArgumentError; SourceError for parts of different splits; PeerError; BudgetError; what
    :class:`featstore.Store` raises.
    """
    return SplitStore(path, memory=memory, timeout_seconds=timeout_seconds, topology=topology, **reader)
