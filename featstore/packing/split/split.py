"""A store split by hosts, for training on several of them.

First the hosts of all rows are found, and the topology is written, which says them; then one part after the
other. Each is a store of its own, committed by its own rename, so that an interrupted split leaves whole
stores and one that nobody can open. A part names the topology's uuid, which is derived from all that is in
it: parts of two splits are never taken for one.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from featstore.arguments import as_callback, as_count, as_flag, as_path
from featstore.base.folders import real_path
from featstore.base.progress import watched
from featstore.base.warning import warn
from featstore.errors import ArgumentError, BudgetError, StoreExistsError
from featstore.packing.memory import with_slack, without_slack
from featstore.packing.progress import PackStages, Progress
from featstore.packing.sources.base import FeatureSource
from featstore.packing.split.checks import Joined, check_store, checked
from featstore.packing.split.directory import (
    Standing,
    check_finished,
    check_place,
    check_standing,
    member_name,
    others,
    remove_others,
    replacing,
    standing,
)
from featstore.packing.split.members import write_part, write_topology_store
from featstore.packing.split.plan import SplitPlan
from featstore.storage.disk import Disk
from featstore.storage.generations import writing
from featstore.storage.journal import TableProgress
from featstore.storage.manifest import (
    HOSTS_MAX,
    TOPOLOGY,
    FamilyEntry,
)
from featstore.storage.relations import graph_of_rows
from featstore.storage.store import OpenStore, Table, as_store
from featstore.storage.transaction import Transaction, write_generation
from featstore.units import multiple_bytes, parse_bytes

__all__ = ["split_store"]

_DISK_SLACK_BYTES = 1 << 20


@watched
def split_store(
    store: OpenStore | str | os.PathLike[str],
    hosts: int,
    out: str | os.PathLike[str],
    *,
    train: Any = None,
    seed: int = 0,
    halo_disk: int | str | None = None,
    split_topology: bool = False,
    memory: int | str = "1GiB",
    resume: bool = False,
    overwrite: bool = False,
    progress: bool | Callable[[Progress], None] | None = None,
    disk: Disk | None = None,
) -> Path:
    """Split a store by hosts into the directory ``out``, and return its path. ``featstore split`` has the
    same options.

    ``out/topology`` is a store with a table for each of the store's, of the same name and order, whose rows
    are the number of the host that owns the node (uint8, uint16 above 256 hosts), all graphs as they are, and
    all small arrays: each host takes a copy. ``out/host-0`` and so on are stores with the rows of one host
    each, as they are and in their order, and the lists among them. A node's id in a part is its rank among
    the nodes of that host. The arrays ``GRAPH.halo_ids`` (ids of the store that was split, int32 or int64,
    ascending) and ``GRAPH.halo_uses`` (uint32) say which nodes of other hosts the lists of this one name, and
    how often. The numbers of edges are in the topology alone, parts have weights and times of the edges among
    their rows. The manifests' ``family`` says what belongs together. Small arrays are never split.

    Hosts have rows, and training nodes, within 5 % of the mean, and few edges lead from one to another: whole
    partitions of the store go to a host, or finer ones where it has few. Tables that edge types join are
    dealt out together, and each is even. Rows of edges (a table ``edge_features``, or one of an edge type) go
    where the node is that the edge leads to, where the store keeps edges' numbers, and are even as far as
    those are. Another
    table without a graph is dealt out in equal runs of ids. Compiled traces of the store are not taken along.

    Args:
        store: the store to split, open or its path. It is only read.
        hosts: how many parts, 1 to 65,536, no more than a table with a graph has nodes.
        out: the directory; made if it does not exist.
        train: training nodes to deal out evenly: node ids, each once, a mask, or the name of an array of the
            store; a mapping of table names to such where there are several tables with a graph, of which the
            name of an array ``TABLE.NAME`` says one where there are edge types.
        seed: of the partitioners, below 2**31. Equal stores, options and seed give equal bytes, whatever the
            memory and the cores.
        halo_disk: limit on copies of other hosts' rows in each part, bytes, a size, or a multiple of the
            part's own rows, ``"2x"``: of the halo, those that the lists name most often. The limit is of all
            types of nodes together: each has as much of it as of what the lists name. Copies are a table
            ``TABLE.halo``, and the array ``TABLE.halo_nodes`` has their node ids. None by default.
        split_topology: each part has the lists of its own nodes, whole, with the numbers, weights and times
            of their edges, and the topology none, but for each node the number of its host: nothing else
            grows with all nodes on every host. Neighbours of other hosts' nodes are then asked of these, see
            :func:`featstore.open_split`. By default the topology has all graphs as they are.
        memory: budget for all that the split holds beyond the bare process, in bytes or as ``"512MiB"``: some
            40 bytes a node of the largest table, or of all that edge types join (8 more for each table of
            edges that leads to it, and 8), features never whole. A BudgetError names what the step that
            failed needs; a later one may need more, and ``resume`` goes on with any memory.
        resume: go on with an unfinished split in ``out``, of the same store and options, but not with one
            that was replacing another; parts that are finished are left as they are.
        overwrite: replace the split in ``out``, one store after the other.
        progress: called now and then with a :class:`featstore.packing.progress.Progress`, from any thread;
            True for a line on standard error, see :func:`featstore.pack`.
        disk: what performs all writes; for tests.

    Raises ArgumentError, SourceError, IdError, UnknownNameError, BudgetError, DiskFullError, DeviceError,
    StoreExistsError, StoreLockedError, IncompleteStoreError, CorruptionError. Warns, as FeatstoreWarning,
    where rows or training nodes could not be dealt out evenly, and of keys of nodes, which stay in the store.
    """
    asked = SplitRequest(
        hosts, out, train, seed, halo_disk, split_topology, memory, resume, overwrite,
        as_callback(progress, "progress"), disk,
    )  # fmt: skip
    with ExitStack() as opened:
        if not isinstance(store, OpenStore):
            store = opened.enter_context(OpenStore(as_path(store, "store")))
        check_place(asked.place, real_path(as_store(store).path))
        disk = asked.disk or Disk()
        with asked.writing(), replacing(asked.place, disk, resume=asked.resume, overwrite=asked.overwrite):
            if not asked.run(as_store(store)):
                raise StoreExistsError(
                    f"there is nothing to resume in {asked.place}: its split was completed"
                )
    return Path(out)


@dataclass
class SplitRequest:
    """What is asked of a split, as :func:`split_store` takes it, looked at. ``sources``: where rows come
    from, if not from the store; ``beside``: what else parts are made by."""

    hosts: int
    out: str | os.PathLike[str]
    train: Any
    seed: int
    halo_disk: int | str | None
    split_topology: bool
    memory: int | str
    resume: bool
    overwrite: bool
    progress: Callable[[Progress], None] | None
    disk: Disk | None
    sources: Mapping[str, FeatureSource] | None = None
    beside: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hosts = as_count(self.hosts, "hosts", 1, HOSTS_MAX)
        self.seed = as_count(self.seed, "seed", 0, 2**31 - 1)
        self.budget = parse_bytes(self.memory, "memory")
        self.resume, self.overwrite = as_flag(self.resume, "resume"), as_flag(self.overwrite, "overwrite")
        self.split_topology = as_flag(self.split_topology, "split_topology")
        if self.resume and self.overwrite:
            raise ArgumentError("resume= goes on with a split and overwrite= replaces it: give one of them")
        self.place = real_path(as_path(self.out, "out"))
        if self.halo_disk is not None:
            multiple_bytes(self.halo_disk, 0, "halo_disk")

    def writing(self) -> AbstractContextManager[None]:
        """Be the only one who writes what is asked for."""
        return writing(self.place, self.disk or Disk())

    def run(self, base: OpenStore) -> bool:
        """Split a store, within :meth:`writing`. Whether anything was left to write."""
        check_store(base, copies=self.halo_disk is not None, split_topology=self.split_topology)
        train = checked(self, Joined.of(base))
        plan = SplitPlan(
            base, self.hosts, train, self.seed, without_slack(self.budget),
            PackStages(self.progress), halo_disk=self.halo_disk, split_topology=self.split_topology,
            sources=self.sources,
        )  # fmt: skip
        found = standing(self.place)
        check_standing(self.place, found, resume=self.resume, overwrite=self.overwrite)
        try:
            written = _Split(plan, self, found).run()
        except BudgetError as error:
            raise BudgetError(with_slack(error.needed_bytes), self.budget, error.what) from None
        for text in plan.warnings:
            warn(text)
        if base.manifest.keys:
            warn(
                f"the keys of {', '.join(map(repr, base.manifest.keys))} are not in the stores of the split, "
                f"which have the same node ids: keep {base.path}, and look keys up there"
            )
        return written


class _Split:
    """One run of a split."""

    def __init__(self, plan: SplitPlan, asked: SplitRequest, found: dict[str, Standing]) -> None:
        self._plan, self._out, self._found, self._disk = plan, asked.place, found, asked.disk or Disk()
        self._resume, self._overwrite = asked.resume, asked.overwrite
        self._written = False
        trained = {
            name: [int(np.count_nonzero(mask)), zlib.crc32(np.packbits(mask).tobytes())]
            for name, mask in plan.train.items()
        }
        self._asked: dict[str, Any] = {"seed": plan.seed, "train": trained}
        if plan.halo_disk is not None:
            self._asked["halo_disk"] = plan.halo_disk
        if plan.split_topology:
            self._asked["split_topology"] = True
        if any(graph.has_weights or graph.has_times for graph in plan.store.graphs.values()):
            self._asked["values"] = True  # in parts, too
        if any(graph_of_rows(plan.store, name) for name in plan.store.tables):
            self._asked["edges"] = "beside their targets"
        if plan.store.edge_types:
            self._asked["types"] = "of partitions together, and of one limit of copies"
        self._asked |= asked.beside

    def run(self) -> bool:
        """Write what is not there; whether there was any of it."""
        if self._resume:
            self._check_others()
        topology = self._topology()
        for host in range(self._plan.hosts):
            self._part(host, topology)
        if self._overwrite:
            remove_others(self._out, self._found, self._plan.hosts, self._disk)
        return self._written

    def _check_others(self) -> None:
        """Raise StoreExistsError where what is there is not of one split, that can be gone on with."""
        for name in self._found:
            if name != TOPOLOGY and int(name.partition("-")[2]) >= self._plan.hosts:
                raise StoreExistsError(
                    f"{self._out} holds {name!r}, so its split was not of {self._plan.hosts} hosts: give "
                    "the same number, or start anew with --overwrite"
                )
        for name in others(self._found):
            raise StoreExistsError(
                f"{self._out / name} is of another split than the topology beside it, or that is not "
                "finished: where a split was stopped while it replaced another, start anew with --overwrite"
            )

    def _finished(self, name: str) -> FamilyEntry | None:
        """The family of a store that is to be left as it is."""
        there = self._found.get(name)
        return there.family if there is not None and self._resume and not there.unfinished else None

    def _topology(self) -> str:
        """The uuid of the topology, which is written unless it is there."""
        plan, path = self._plan, self._out / TOPOLOGY
        finished = self._finished(TOPOLOGY)
        wanted = FamilyEntry(plan.hosts, plan.store.uuid, {}, {})
        if finished is not None:
            check_finished(path, finished, wanted, None, self._asked)
        else:
            fingerprint = {"base": plan.store.uuid, "hosts": plan.hosts, **self._asked}
            rows = sum(table.rows for table in plan.store.tables.values())
            needed = 2 * rows if plan.split_topology else 16 * rows + self._graph_bytes
            self._write(TOPOLOGY, fingerprint, needed, self._write_topology)
        with OpenStore(path) as topology:
            if finished is not None:
                plan.read_hosts(topology)
            return topology.uuid

    def _write_topology(self, transaction: Transaction) -> None:
        self._plan.assign(transaction.generation.spill)
        write_topology_store(self._plan, transaction, self._provenance())

    def _part(self, host: int, topology: str) -> None:
        """Write a part unless it is there."""
        plan, name = self._plan, member_name(host)
        finished = self._finished(name)
        wanted = FamilyEntry(plan.hosts, plan.store.uuid, {}, {}, topology, host)
        if finished is not None:
            check_finished(self._out / name, finished, wanted, topology)
            return
        tables = plan.store.tables.values()
        needed = sum(self._rows_bytes(table, host) for table in tables)
        named = {graph.source_table.name for graph in plan.store.graphs.values()} - {*plan.store.featureless}
        needed += sum(plan.copies_bytes(host, {name: self._halo_max(name, host) for name in named}).values())
        copies = 2 if plan.split_topology else 1  # of lists: among its rows, and whole
        needed += copies * self._graph_bytes // plan.hosts
        fingerprint = {"topology": topology, "host": host}
        self._write(
            name, fingerprint, needed,
            lambda transaction: write_part(plan, transaction, host, topology, self._provenance()),
        )  # fmt: skip

    def _halo_max(self, name: str, host: int) -> int:
        """Nodes of a table that a host's lists may name of others, at most."""
        plan = self._plan
        of = [graph.name for graph in plan.store.graphs.values() if graph.source_table.name == name]
        edges = sum(plan.remote_edges[one][host] for one in of)
        return min(edges, plan.store.tables[name].rows - plan.rows_of(name, host))

    def _rows_bytes(self, table: Table, host: int) -> int:
        """Disk for a host's rows of a table, and for a while as much again where they go through a spill."""
        row_bytes, rows = self._plan.row_bytes(table), self._plan.rows_of(table.name, host)
        spills = self._plan.sources is not None and 2 * rows * row_bytes > self._plan.memory_bytes
        return rows * (row_bytes * (2 if spills else 1) + row_bytes // 1024 + 16)

    @property
    def _graph_bytes(self) -> int:
        """Of all graphs as they are."""
        return sum(f.bytes for f in self._plan.store.manifest.files if "/graphs/" in f.path)

    def _provenance(self) -> dict[str, Any]:
        return {"split": self._asked}

    def _write(
        self, name: str, fingerprint: dict[str, Any], needed_bytes: int, write: Callable[[Transaction], None]
    ) -> None:
        path, there = self._out / name, self._found.get(name)
        resume = self._resume and there is not None and there.unfinished
        with (
            writing(path, self._disk),
            write_generation(
                path, self._disk, resume=resume, overwrite=self._overwrite or self._resume, worth=_worth
            ) as transaction,
        ):
            transaction.start(fingerprint)
            made = transaction.generation
            there_bytes = transaction.bytes_there(made.directory, made.spill) if resume else 0
            transaction.check_space(max(0, needed_bytes - there_bytes) + _DISK_SLACK_BYTES)
            write(transaction)
        self._written = True


def _worth(progress: TableProgress, error: BaseException) -> bool:
    """What took time stays for ``--resume``."""
    return bool(progress.spill_bytes or progress.written_bytes or progress.done)
