"""Which host of how many a process is on, and the group of one process of each host that lines go through."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from featstore.arguments import as_number
from featstore.base.error_text import first_line
from featstore.base.modules import loaded
from featstore.base.threads import Reply, Worker
from featstore.errors import ArgumentError, PeerError, SourceError
from featstore.hosts.meeting import meet
from featstore.hosts.wire import GlooWire

#: A single send or receive may take so many time-outs: hosts that are late are found before.
WIRE_PATIENCE = 3
_MORE_PATIENCE = 1.1  # of that, for all of what hosts do to meet, and to connect once all are there
_one_at_a_time = threading.Lock()  # hosts have no numbers for their meetings


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


def open_wire(place: HostPlace, timeout_seconds: float) -> GlooWire:
    """Lines to the other hosts, whichever machine has which part. All leaders call it at the same time.
    Raises PeerError where some do not come in time, SourceError where two have the same part."""
    import torch
    import torch.distributed.distributed_c10d as c10d

    store, patience = c10d._get_default_store(), WIRE_PATIENCE * timeout_seconds
    # who waits for a name in a store keeps it from being asked meanwhile
    apart = store.clone() if hasattr(store, "clone") else store
    try:
        with _one_at_a_time:
            name, missing = _within(
                _MORE_PATIENCE * patience, lambda: meet(store, place.machine, place.hosts, patience)
            )
    except (RuntimeError, TimeoutError) as error:
        why = f" ({first_line(error)})" if str(error) else ""
        what = f"has the store by which ranks of this run meet, and it does not answer{why}"
        raise PeerError(0, 0, what) from error
    if missing:
        raise _absent(place, missing, patience)
    meeting, limit = c10d.PrefixStore(name, apart), timedelta(seconds=patience)

    # Not by new_group: a second group of the same ranks would meet under the name of the first, once that is
    # destroyed, at addresses where nobody is any more.
    def connect() -> tuple[list[Any], list[torch.Tensor]]:
        parts: list[torch.Tensor] = []
        groups: list[Any] = [
            c10d.ProcessGroupGloo(c10d.PrefixStore(way, meeting), place.machine, place.hosts, limit)
            for way in ("up", "down")
        ]
        for group in groups:
            parts = [torch.empty(1, dtype=torch.int64) for _ in range(place.hosts)]
            group.allgather([parts], [torch.tensor([place.host])]).wait()
        return groups, parts

    try:
        # gloo tries a host that died while it was meeting the others five times, each for all the patience.
        (up, down), parts = _within(_MORE_PATIENCE * patience, connect)
    except (RuntimeError, TimeoutError) as error:
        why = first_line(error) if str(error) else "it was there, and did not answer"
        others = [machine for machine in range(place.hosts) if machine != place.machine]
        raise _absent(place, others, patience, f" ({why})") from error
    machine_of = {int(part): machine for machine, part in enumerate(parts)}
    if len(machine_of) < place.hosts:
        raise SourceError(
            f"the {place.hosts} machines of this run have the parts {sorted(int(p) for p in parts)}: give "
            "each one of its own, so that all are there"
        )
    order = [machine_of[host] for host in range(place.hosts)]
    return GlooWire(up, down, order, place.leaders, patience)


def _absent(place: HostPlace, machines: list[int], seconds: float, why: str = "") -> PeerError:
    """For a machine that has not come, of these."""
    which = "" if len(machines) == 1 else "or another "
    what = f"{which}has not come within {seconds:g} seconds{why}"
    return PeerError(machines[0], place.leaders[machines[0]], what)


def _within(seconds: float, make: Callable[[], Any]) -> Any:
    """What ``make`` gives, in a thread, which is left to itself where it takes longer: then TimeoutError."""
    reply = Reply()

    def answer() -> None:
        try:
            reply.put((None, make()))
        except BaseException as error:
            reply.put((error, None))

    Worker(answer, "featstore-hosts-meeting").start()
    outcome = reply.wait(seconds)
    if outcome is None:
        raise TimeoutError
    error, made = outcome
    if error is not None:
        raise error
    return made


def as_timeout(value: Any) -> float:
    """Seconds after which a host is given up."""
    return float(as_number(value, "timeout_seconds", 0.1, 10**6))
