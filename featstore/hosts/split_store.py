"""A store that is split by hosts, seen as a whole from one of them."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featstore.arguments import Named, as_path, check_options
from featstore.errors import ArgumentError, BudgetError, ClosedError, FeatstoreWarning, PeerError, SourceError
from featstore.hosts.beside import Beside
from featstore.hosts.copies import DiskCopies
from featstore.hosts.exchange import IDS_MAX, Exchange
from featstore.hosts.lists import ListsOfHost, graphs_of
from featstore.hosts.loaders import LoadersOfHosts
from featstore.hosts.messages import Kind
from featstore.hosts.opening import Opening
from featstore.hosts.owners import Owners, read_hosts
from featstore.hosts.places import HostPlace, as_timeout, part_of, place_among, topology_of
from featstore.hosts.source import HostsRows, Serving, body_bytes_for, ids_max_for
from featstore.hosts.whole_tables import SplitGraph, WholeTable
from featstore.plan.budget import own_bytes
from featstore.reader.lookup import table_need
from featstore.reader.options import READING, check_reading
from featstore.reader.reader import Reader
from featstore.storage.manifest import HALO, HALO_NODES
from featstore.storage.store import OpenStore, Table
from featstore.units import parse_bytes

if TYPE_CHECKING:
    from featstore.hosts.kept_halo import KeptHalo
    from featstore.storage.manifest import FamilyEntry

_LINES_SHARE = 4  # of the memory, at most, is for lines


class WholeStore(OpenStore):
    """The topology of a split store, whose tables are those of all hosts. Ids are node ids of the whole
    graph, on every host. ``part``: this host's own store, whose ids are its own.

    See :func:`featstore.open_split` for the arguments. It belongs to the process that opened it.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, memory: int | str = "256MiB", timeout_seconds: float = 300,
        topology: str | os.PathLike[str] | None = None, **reader: Any,
    ) -> None:  # fmt: skip
        self._lock: int | None = None  # for who is refused
        with Opening() as joining:
            self._open_here(joining, path, memory, timeout_seconds, topology, reader)

    def _open_here(
        self, joining: Opening, path: Any, memory: int | str, timeout_seconds: float, topology: Any,
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        check_options(options, READING, "open_split")
        check_reading(**options)
        given = Path(os.path.abspath(as_path(path, "path")))
        self.timeout_seconds = as_timeout(timeout_seconds)
        memory_bytes = parse_bytes(memory, "memory")
        super().__init__(topology_of(given, topology))
        self._exchange: Exchange | None = None
        self._owners: dict[str, Owners] | None = None
        self._lists: ListsOfHost | None = None
        self._pid = os.getpid()
        try:
            self._join(joining, given, memory_bytes, options)
        except BaseException:
            if self._lists is not None:
                self._lists.close()
            if hasattr(self, "part"):
                self.part.close()
            super().close()
            raise

    def _join(self, joining: Opening, given: Path, memory_bytes: int, options: dict[str, Any]) -> None:
        family = self.manifest.family
        if family is None or family.host is not None:
            raise SourceError(f"{self.path} is not the topology of a split store: featstore.split makes one")
        self.place = joining.place = self._place(family.hosts)
        self.beside = Beside.of(self.place, self.timeout_seconds)
        self.part = OpenStore(part_of(given, self.place.machine))
        self._check_part(family)
        joining.part = self.place.host
        self.featureless = self.part.featureless  # the topology's rows are owners
        names = [name for name in self.part.tables if name in self.manifest.tables]
        self.tables = Named(
            "the store has no table",
            {n: self._whole_table(n, ordered=not family.split_graphs) for n in names},
        )
        own = self.part.manifest.family
        if family.split_graphs and own is not None:
            split = {name: SplitGraph(self, name, one) for name, one in own.split_graphs.items()}
            self.graphs = Named("the store has no graph", split)
        self._open_rows(joining, names, memory_bytes, options)

    def table(self, name: str) -> Table:
        graph = self.graphs.get(str(name).rpartition("/")[0])
        if isinstance(graph, SplitGraph):
            raise SourceError(
                f"no host has all lists of graph {graph.name!r}, which is split, too: sample with "
                "store.loader or store.sampler; this host's lists among its own nodes are those of store.part"
            )
        return super().table(name)

    def _whole_table(self, name: str, *, ordered: bool) -> WholeTable:
        return WholeTable(self, name, self.part.table(name), self._copies_of(name), ordered=ordered)

    def _copies_of(self, name: str) -> Table | None:
        family = self.part.manifest.family
        known = family is not None and f"{name}.{HALO}" in family.copies  # the user may have called one so
        return self.part.tables.get(f"{name}.{HALO}") if known else None

    @staticmethod
    def _place(hosts: int) -> HostPlace:
        return HostPlace(0, 1, 0, 1, 0) if hosts == 1 else place_among(hosts)

    def _check_part(self, family: FamilyEntry) -> None:
        mine = self.part.manifest.family
        if mine is None or mine.host is None:
            raise SourceError(f"{self.part.path} is no host's part of a split store")
        if mine.uuid != self.uuid:
            raise SourceError(
                f"{self.part.path} is of the split {mine.uuid}, but {self.path} of {self.uuid}: copy both "
                "from the same split"
            )
        self.place = HostPlace(mine.host, *self.place[1:])

    def _open_rows(
        self, joining: Opening, names: list[str], memory_bytes: int, options: dict[str, Any]
    ) -> None:
        place, tables = self.place, [self.table(name) for name in names]
        held = sum(Owners.bytes_for(table.rows, place.hosts) for table in tables)
        of_copies = [(t.rows, c.rows) for t in tables if (c := self._copies_of(t.name)) is not None]
        held += sum(DiskCopies.bytes_for(*rows) for rows in of_copies)
        with OpenStore(self.path) as topology:  # of which one table after the other is read
            reading = [own_bytes(1, [table_need(topology.tables[name], True)]) for name in names]
        opening = max([0, *reading, *(DiskCopies.opening_bytes(rows) for _, rows in of_copies)])
        needs = [table_need(self.part.table(name), options.get("verify", True)) for name in names]
        lists_least, lines_bytes = self._lists_least(options), 0
        beside = held + own_bytes(1, needs) + lists_least
        if place.leads and place.hosts > 1:
            body_bytes, ids_max = self._lines(names, memory_bytes, held, beside, opening)
            lines_bytes = Exchange.held_bytes(place.hosts, body_bytes, ids_max, len(names))
        needed = beside + lines_bytes
        if memory_bytes < max(needed, held + opening):
            needed = max(needed, held + opening)
            raise BudgetError(needed, memory_bytes, "know the owners of all nodes, and serve other hosts")
        self._opening_bytes = memory_bytes - held
        if place.leads:
            if place.hosts > 1:
                joining.come(place, self.timeout_seconds)  # before what takes long
            self._know()
        left, most = memory_bytes - needed, Exchange.held_bytes(place.hosts, 8 << 20, IDS_MAX, len(names))
        lists_bytes = self._open_lists(lists_least, memory_bytes, left - most + lines_bytes, left, options)
        rows_bytes = memory_bytes - held - lines_bytes - lists_bytes
        self._memory = {"owners": held, "lines": lines_bytes, "lists": lists_bytes, "reader": rows_bytes}
        if not place.leads or place.hosts == 1:
            return
        options = {"static": "auto"} | options
        self._serving = Reader(self.part, tables=names, memory=self._memory["reader"], **options)
        timeout = self.timeout_seconds
        about = {"family": self.uuid, "hosts": place.hosts, "tables": names, "timeout_seconds": timeout}
        try:
            wire = joining.open_wire()
            try:
                exchange = Exchange(
                    wire, about, tables=len(names), body_bytes=body_bytes, ids_max=ids_max,
                    timeout_seconds=timeout,
                )  # fmt: skip
                lists = None if self._lists is None else self._lists.serve
                exchange.start(Serving(self, self.owners, self._serving), lists)
            except BaseException:
                wire.close(abort=True)
                raise
        except BaseException:
            self._serving.close()
            raise
        self._exchange = exchange

    def _know(self) -> None:
        """Read who owns which node, and which have copies here. On others than local rank 0 that waits until
        it is first asked for."""
        tables, place = list(self.tables.values()), self.place
        known = dict[str, Owners]()
        for t in tables:
            hosts = read_hosts(self.path, t.name, self._opening_bytes)
            known[t.name] = Owners(t.name, hosts, place.host, place.hosts)
        for name, owners in known.items():
            if owners.rows != self.part.table(name).rows:
                raise SourceError(
                    f"table {name!r} of {self.part.path} has {self.part.table(name).rows:,} rows, and its "
                    f"host owns {owners.rows:,} nodes: copy both from the same split"
                )
        self.copies = {
            t.name: DiskCopies(self.part.arrays[f"{t.name}.{HALO_NODES}"], t.rows, f"{t.name}.{HALO}")
            for t in tables
            if self._copies_of(t.name) is not None
        }
        self._owners = known

    @property
    def owners(self) -> dict[str, Owners]:
        """Who owns the nodes of each table."""
        if self._owners is None:
            self.check_open()
            self._know()
        return self._owners or {}

    def _lists_least(self, options: Mapping[str, Any]) -> int:
        """What this host's lists take at least, where topology is split, too."""
        if not (self.place.leads and graphs_of(self.part)):
            return 0
        return ListsOfHost.least_bytes(self.part, verify=options.get("verify", True))

    def _open_lists(self, least: int, given: int, sure: int, left: int, options: Mapping[str, Any]) -> int:
        """Open this host's lists, within half of what is ``left`` beside the ``least``; what they have.
        ``given``: the memory, of which ``sure`` is left where lines take all that they may."""
        if not least:
            return 0
        reading = {name: value for name, value in options.items() if name in READING}

        def of_all(needed: int) -> int:
            return given - sure + 2 * (needed - least)

        try:
            self._lists = ListsOfHost(self.part, self.owners, least + left // 2, **reading)
        except BudgetError as error:
            raise BudgetError(of_all(error.needed_bytes), given, error.what) from None
        self._lists.say_too_long(of_all, given)
        return self._lists.memory_bytes

    def _lines(
        self, names: Sequence[str], memory_bytes: int, held: int, beside: int, opening: int
    ) -> tuple[int, int]:
        """Bytes of an answer, and ids of an ask, in a share of what is left beside what is ``held`` for good,
        and all that is ``beside`` lines. Raises BudgetError."""
        share = max(0, min((memory_bytes - held) // _LINES_SHARE, memory_bytes - beside))
        try:
            body_bytes = body_bytes_for(self, names, share, self.place.hosts)
        except BudgetError as error:
            least = error.needed_bytes
            needed = max(held + _LINES_SHARE * least, beside + least, held + opening)
            raise BudgetError(needed, memory_bytes, error.what) from None
        return body_bytes, ids_max_for(body_bytes)

    @property
    def on_disk(self) -> OpenStore:
        return self.part

    # Rows.

    def give_up(self, error: PeerError) -> None:
        """Tell other hosts of a rank of this one that is gone."""
        if self._exchange is not None:
            self._exchange.fail(error)

    def check_peers(self) -> None:
        """Raise PeerError where a host is gone, for who asks for nothing."""
        if self._exchange is not None and self._exchange.error is not None:
            raise self._exchange.error

    def check_loaders(self) -> None:
        """The same, for the loop; warn where another host's goes through other steps."""
        self.check_peers()
        if self._exchange is not None:
            self._exchange.loaders.check()

    def source(self, tables: Sequence[str], *, halo: KeptHalo | None = None, **options: Any) -> HostsRows:
        """Rows of all hosts, this host's through a reader with these ``options`` of its own, others' through
        what is kept of them, if there is a ``halo``."""
        self._check_leads()
        copies = {name: self.copies[name] for name in tables if name in self.copies}
        here = [*tables, *(f"{name}.{HALO}" for name in copies)]
        reader = Reader(self.part, tables=here, **options)
        try:
            return HostsRows(self, self.owners, copies, reader, self._exchange, halo)
        except BaseException:
            reader.close()
            raise

    def _check_leads(self) -> None:
        self.check_open()
        if self._exchange is not None:
            self._exchange.check_process()
        if not self.place.leads:
            raise ArgumentError(
                f"the lines to other hosts are those of local rank 0, and this is local rank "
                f"{self.place.local_rank}: read through a loader that the ranks of a host share, shared=True"
            )

    # Neighbours, where topology is split, too.

    @property
    def splits_topology(self) -> bool:
        """Whether each host has the lists of its own nodes alone."""
        return any(isinstance(graph, SplitGraph) for graph in self.graphs.values())

    def lists(self) -> tuple[ListsOfHost, Exchange | None]:
        """This host's lists, and the lines to those who have the others."""
        self._check_leads()
        assert self._lists is not None
        return self._lists, self._exchange

    def received_lists(self) -> tuple[int, int]:
        """Nodes whose neighbours have come from other hosts, and their bytes."""
        return (0, 0) if self._exchange is None else self._exchange.counted(Kind.PICK)

    def agree(self, options: Mapping[str, Any]) -> int:
        """Have all hosts make their next loader of these options, and return its number; PeerError on all
        where they do not."""
        if self._exchange is None:
            return 0
        text = repr(sorted((name, repr(value)) for name, value in options.items()))
        return self._exchange.loaders.agree(
            int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        )

    def say_position(self, loader: int, epoch: int, step: int, handed: int) -> None:
        """Tell all hosts from where on this one goes through an epoch of the loader of that number, which has
        handed out so many mini-batches before; where it is otherwise there, :meth:`check_loaders` warns."""
        if self._exchange is not None:
            self._exchange.loaders.say_position(loader, epoch, step, handed)

    @property
    def loaders_of_hosts(self) -> LoadersOfHosts | None:
        """What hosts tell each other of their loaders; None of one host."""
        return None if self._exchange is None else self._exchange.loaders

    def received(self) -> tuple[int, int]:
        """Rows that have come from other hosts, and their bytes."""
        return (0, 0) if self._exchange is None else self._exchange.counted()

    def memory(self) -> dict[str, int]:
        """Bytes of the budget by what they are for."""
        return dict(self._memory)

    # Ending.

    def close(self, because: str = "") -> None:
        """Serve other hosts until they have ended, too, and let all go. ``because``: at once, and tell them
        why, from local rank 0; on another one that is a warning."""
        if because and hasattr(self, "place") and not self.place.leads:
            warnings.warn(
                f"close({because!r}): local rank 0 has the lines to other hosts, and tells them where it "
                "closes the store so",
                FeatstoreWarning,
                stacklevel=2,
            )
        self._end(because)

    def _end(self, because: str | BaseException) -> None:
        if getattr(self, "_pid", None) == os.getpid():
            try:
                if self._exchange is not None:
                    self._exchange.close(because)
            finally:
                if self._exchange is not None:
                    self._serving.close()
                if self._lists is not None:
                    self._lists.close()
                if hasattr(self, "part"):
                    self.part.close()
                super().close()
            return
        super().close()

    def __exit__(self, *exception: object) -> None:
        self._end(exception[1] if isinstance(exception[1], BaseException) else "")

    def __del__(self) -> None:
        if getattr(self, "_lock", None) is not None:
            super().close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise ClosedError(
            "a split store belongs to the process that opened it, which has the lines to other hosts: it "
            "cannot be pickled"
        )


def reader_of(
    store: OpenStore, *, tables: Sequence[str], halo: KeptHalo | None = None, **options: Any
) -> Reader | HostsRows:
    """What reads rows of a store: a reader of its disk, and where it is split by hosts, of all of theirs,
    with a ``halo`` if there is one."""
    if isinstance(store, WholeStore):
        return store.source(tables, halo=halo, **options)
    return Reader(store, tables=list(tables), **options)
