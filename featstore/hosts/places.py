"""Which host of how many a process is on, and where its part is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from featstore.arguments import as_number, as_path
from featstore.base.modules import loaded
from featstore.base.system import is_directory, is_there
from featstore.errors import ArgumentError, SourceError
from featstore.storage.manifest import MANIFEST_NAME, TOPOLOGY

#: A single send or receive may take so many time-outs: hosts that are late are found before.
WIRE_PATIENCE = 3


class HostPlace(NamedTuple):
    """``local_rank`` of the ``ranks`` of a machine that is number ``machine`` of the run, of ``hosts``; it
    has the part ``host``. What stands for several hosts is as many machines here."""

    host: int
    hosts: int
    local_rank: int
    ranks: int
    machine: int

    @property
    def leaders(self) -> list[int]:
        """In the run, the rank of the first process of each machine."""
        return [machine * self.ranks for machine in range(self.hosts)]

    def share(self, rank: int) -> int:
        """The number of a rank of this machine among all, where those of part 0 come first."""
        return self.host * self.ranks + rank % self.ranks

    @property
    def leads(self) -> bool:
        """Whether this process has the lines of its host."""
        return self.local_rank == 0


def place_among(hosts: int) -> HostPlace:
    """This process's place in a run on so many hosts, with the part of its own number, as
    ``torch.distributed`` says: ranks are numbered host after host, and each host has as many, as
    ``torchrun`` and Slurm do it. A machine may stand for several hosts. Raises ArgumentError."""
    dist = loaded("torch.distributed", "get_rank")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        raise ArgumentError(
            f"rows of a store that is split by {hosts} hosts come over torch.distributed: start a process on "
            "each with torchrun, and call torch.distributed.init_process_group() before"
        )
    rank, world = int(dist.get_rank()), int(dist.get_world_size())
    if world % hosts:
        raise ArgumentError(
            f"{world} ranks cannot be spread evenly over the {hosts} hosts of the split: start {hosts}, or "
            "a multiple of it, as many on each host"
        )
    ranks = world // hosts
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    if said.isdecimal() and int(said) % ranks:
        raise ArgumentError(
            f"the split is for {hosts} hosts, so of {world} ranks {ranks} are on each, but "
            f"LOCAL_WORLD_SIZE is {said}: start as many on each host, or a multiple of it on a machine that "
            "stands for several"
        )
    return HostPlace(rank // ranks, hosts, rank % ranks, ranks, rank // ranks)


def topology_of(given: Path, said: Any) -> Path:
    """Where the topology is of a split store, or of one part of it, that is ``given``. Raises SourceError."""
    above = given if is_directory(given / TOPOLOGY) else given.parent
    whole = above / TOPOLOGY if said is None else Path(os.path.abspath(as_path(said, "topology")))
    if not is_directory(whole):
        raise SourceError(
            f"{given} has no {TOPOLOGY} in it or beside it: give the directory that featstore.split made, or "
            f"the host's part of it with a copy of {TOPOLOGY} beside it, or say where that is, topology="
        )
    return whole


def part_of(given: Path, machine: int) -> Path:
    """The part of this machine: what is ``given``, or what is there, or where there are several, that of its
    number. Raises SourceError."""
    if not is_directory(given / TOPOLOGY):
        return given
    there = sorted(one for one in given.glob("host-*") if is_there(one / MANIFEST_NAME))
    own = given / f"host-{machine}"
    if len(there) == 1:
        return there[0]
    if own not in there:
        raise SourceError(
            f"{given} has {', '.join(one.name for one in there) or 'no host-N'}, and this is machine "
            f"{machine} of the run: copy its part there, or give the directory of one part"
        )
    return own


def as_timeout(value: Any) -> float:
    """Seconds after which a host is given up."""
    return float(as_number(value, "timeout_seconds", 0.1, 10**6))
