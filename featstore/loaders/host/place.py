"""Which ranks are of this host, and under which name they find each other.

``torchrun`` says both in the environment. The name is one in Linux's abstract namespace of sockets: it
leaves no file, and is free again when its owner ends.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from featstore.arguments import as_text
from featstore.base.warning import warn
from featstore.errors import ArgumentError, ClosedError, PeerError, WaitTimeoutError
from featstore.hosts.beside import Beside
from featstore.hosts.places import HostPlace
from featstore.hosts.split_store import WholeStore
from featstore.loaders.host.line import LOOK_SECONDS, MEET_SECONDS, Line
from featstore.loaders.said import told

_GRACE_SECONDS = 1.0  # in which local rank 0 sees the same
#: What tells one run of ``torchrun`` from another on the same host.
_RUN = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_RANK")


class Place(NamedTuple):
    """``local_rank`` of the ``ranks`` of this host, and the ``name`` under which they meet. Of several hosts
    which one it is, after how many seconds in which a rank says nothing it is given up, who knows whether
    those beside this one are there before they have met, and what tells other hosts of one that is gone."""

    local_rank: int
    ranks: int
    name: str
    host: HostPlace | None = None
    timeout_seconds: float | None = None
    beside: Beside | None = None
    give_up: Callable[[PeerError], None] | None = None

    @property
    def address(self) -> str:
        """Of the owner's socket."""
        named = hashlib.sha256(f"{os.getuid()} {self.name}".encode()).hexdigest()
        return f"\0featstore-host-{named[:32]}"

    def silent(self, local_rank: int) -> PeerError:
        """What is raised where a rank of this host, which is one of several, says nothing."""
        return self._peer(local_rank, f"has said nothing for {self.timeout_seconds:g} seconds")

    def dead(self, local_rank: int, said: str) -> PeerError | ClosedError:
        """What is raised where a rank of this host has ended without a word; ``said`` where no other hosts
        wait for its rows."""
        return ClosedError(said) if self.host is None else self._peer(local_rank, "has died")

    def check_beside(self, now: bool = False) -> None:
        """Raise PeerError where a rank of this host, which is one of several, has ended before they met, or
        stands still for too long; ``now``: at all."""
        gone = None if self.beside is None else self.beside.gone(now)
        if gone is not None and self.host is not None:
            if self.local_rank:  # else local rank 0, which tells other hosts, may see this one's end first
                time.sleep(_GRACE_SECONDS)
            raise PeerError(self.host.host, *gone)

    def hear(self, line: Line, seconds: float) -> tuple[tuple[Any, ...] | None, list[int]]:
        """As :meth:`Line.hear`; looks meanwhile whether those beside this one are there."""
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            try:
                return line.hear(max(0.0, min(left, LOOK_SECONDS)))
            except WaitTimeoutError:
                self.check_beside(left <= 0)
                if left <= 0:
                    raise WaitTimeoutError(
                        f"a rank of this host has said nothing for {seconds:.0f} seconds"
                    ) from None

    def _peer(self, local_rank: int, what: str) -> PeerError:
        assert self.host is not None
        return PeerError(self.host.host, self.host.leaders[self.host.machine] + local_rank, what)


def place_of(
    shared: bool | str, rank: int, world_size: int, own: Mapping[str, Any]
) -> Place | None:  # fmt: skip
    """The place of a rank among those of its host, as ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` say, else all
    ranks are of this host; None for one that has a loader of its own. ``own``: options of its mode. Raises
    ArgumentError where ranks have no name in common, or what the environment says cannot be."""
    if shared is False:
        return None
    for name in ("device", "device_memory"):
        if name in own:
            raise ArgumentError(
                f"{name}= is of one process, and shared= hands out mini-batches in host memory: move them in "
                "the loop, x.to(device)"
            )
    if own.get("overtake"):
        raise ArgumentError(
            "overtake=True hands out whichever mini-batch is ready, and ranks that share a loader have "
            "theirs in their order: leave one of overtake= and shared= out"
        )
    if shared is not True:
        as_text(shared, "shared, unless True or False,")
    said = [os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    local, ranks = (int(one) if one.isdecimal() else -1 for one in said)
    if local < 0 or ranks < 0:
        local, ranks = rank, world_size
    if not 0 <= local < ranks <= world_size:
        raise ArgumentError(
            f"LOCAL_RANK={said[0]} and LOCAL_WORLD_SIZE={said[1]} of the environment do not fit rank {rank} "
            f"of {world_size}, whose loader is to be shared: leave shared= out, or rank= and world_size="
        )
    if ranks == 1:
        return None
    if shared is not True:
        return Place(local, ranks, shared)
    if not all(os.environ.get(name) for name in _RUN[:2]):
        raise ArgumentError(
            "shared=True finds the ranks of this host as torchrun tells of them (MASTER_ADDR, MASTER_PORT); "
            "started otherwise, give them a name in common that no other run has: shared='my-run'"
        )
    return Place(local, ranks, " ".join(os.environ.get(name, "") for name in _RUN))


def fingerprint(options: Mapping[str, Any]) -> dict[str, str]:
    """What tells options of one rank from those of another, by name."""
    return {name: hashlib.sha256(_bytes_of(value)).hexdigest()[:16] for name, value in options.items()}


def _bytes_of(value: Any) -> bytes:
    return getattr(value, "__qualname__", "").encode() if callable(value) else told(value).encode()


def check_same(mine: Mapping[str, str], theirs: Mapping[str, str], local_rank: int) -> None:
    """Raise ArgumentError where another rank's options are not those of the owner."""
    other = sorted(name for name in {*mine, *theirs} if theirs.get(name) != mine.get(name))
    if other:
        raise ArgumentError(
            f"ranks that share a loader have the same options: {', '.join(f'{name}=' for name in other)} of "
            f"local rank {local_rank} differ from those of local rank 0"
        )


def introduced(
    lines: list[Line], rank: int, options: Mapping[str, str], place: Place
) -> tuple[tuple[int, ...], list[Line]]:
    """The ranks of this host and the lines to them, in their order, as they say on these: for local rank 0,
    which is ``rank`` of all. Raises ArgumentError where they do not belong together, WaitTimeoutError,
    ClosedError."""
    found: dict[int, tuple[int, Line]] = {}
    for line in lines:
        message, _ = place.hear(line, MEET_SECONDS)
        if message is None:
            raise ClosedError("a rank of this host has ended while the shared loader was made")
        _, local, its_rank, theirs = message
        check_same(options, theirs, local)
        found[local] = its_rank, line
    if sorted(found) != list(range(1, place.ranks)):
        raise ArgumentError(
            f"the ranks of this host call themselves local ranks {sorted([0, *found])}: they have to be "
            f"0 to {place.ranks - 1}, each once"
        )
    in_order = [found[local] for local in sorted(found)]
    return (rank, *(one for one, _ in in_order)), [line for _, line in in_order]


def on_host(shared: bool | str, own: Mapping[str, Any], store: WholeStore) -> Place | None:
    """A rank's place among those of its host, of a store that is split by hosts; the rest as for
    :func:`place_of`. Raises ArgumentError."""
    host = store.place
    if host.ranks == 1:
        said = os.environ.get("LOCAL_WORLD_SIZE", "")
        if shared is not False and said.isdecimal() and int(said) > 1:
            warn(
                f"shared=True: this machine has {said} ranks, and each is a host of the split store with a "
                "part and a loader of its own: nothing is shared, and each takes memory= for itself"
            )
        return None
    place = place_of(shared, host.share(host.local_rank), host.hosts * host.ranks, own)
    if place is None:
        raise ArgumentError(
            f"each host has {host.ranks} ranks, and local rank 0 has the lines to other hosts: give "
            "shared=True, and the ranks of a host share a loader"
        )
    name = f"{place.name} host {host.host} of {host.hosts}"
    return Place(host.local_rank, host.ranks, name, host, store.timeout_seconds, store.beside, store.give_up)
