"""Whether the ranks beside this one, on its machine, are there, while it waits for them.

Each has a socket from when it opens a store that is split, whose name is made up and stands in the store of
``torch.distributed``. Nothing is said on it, and nobody accepts: who is connected to it sees it end when its
process does, however that comes about. Whose process it is, Linux tells at either end, and of a process
whether it is stopped.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from featstore.base.process import is_stopped
from featstore.base.system import asking
from featstore.hosts.opening import default_store, has_begun, within
from featstore.hosts.places import HostPlace
from featstore.shared import protocol

_AT = "featstore/hosts/process"
_LOOK_SECONDS = 0.1  # from one look at the others to the next
_AWAY_SECONDS = 2.0  # without a look, after which what was seen before says nothing
_STORE_SECONDS = 1.0  # for the store of torch.distributed to answer


class _Ends:
    """The sockets of this process: its own, by which others see it end, and those to others, by their
    names."""

    def __init__(self) -> None:
        self.own: socket.socket | None = None
        self.name = ""
        self.to: dict[str, socket.socket] = {}
        protocol.register(self)

    def forked(self) -> None:
        for one in (self.own, *self.to.values()):
            if one is not None:
                one.close()
        self.own, self.to = None, {}

    def announced(self) -> str:
        """The name of this process's own."""
        with protocol.forking:
            if self.own is None:
                name = secrets.token_hex(16)
                with asking("the ranks of this host", "make a socket of"):
                    own = _socket()
                    own.bind(_address(name))
                    own.listen(1024)
                self.own, self.name = own, name
        return self.name

    def connected(self, name: str) -> bool:
        """Whether there is a line to the process of that name; False where nobody is there."""
        with protocol.forking:
            if name not in self.to:
                one = _socket()
                try:
                    one.connect(_address(name))
                except OSError:
                    one.close()
                    return False
                self.to[name] = one
        return True

    def ended(self, name: str) -> bool:
        """Whether a process has ended to which there is a line."""
        poll = select.poll()
        poll.register(self.to[name], select.POLLIN)
        return bool(poll.poll(0))

    def stopped(self, name: str) -> bool:
        """Whether a process stands still, as SIGSTOP has it; False where there is no line to it, or this one
        cannot see it, in another namespace."""
        return name in self.to and is_stopped(protocol.peer_of(self.to[name]).process)


_ends = _Ends()


class Beside:
    """The ``others`` of this machine, by their ranks in the run. ``timeout_seconds``: one that stands still
    for so long is given up; and one that is not to be found where it has said that it is has ended, which
    may have been begun again."""

    def __init__(self, store: Any, rank: int, others: Iterable[int], timeout_seconds: float) -> None:
        self._store, self._timeout_seconds = store, timeout_seconds
        # torchrun begins the workers of a machine again with the same store
        self._at = f"{_AT}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
        self._names = dict.fromkeys(others, "")
        self._missed: dict[int, float] = {}  # since when
        self._stopped: dict[int, float] = {}  # the same
        self._looked = 0.0
        name = _ends.announced()
        with suppress(RuntimeError, TimeoutError):  # who cannot ask where this one is waits longer
            within(_STORE_SECONDS, lambda: store.set(f"{self._at}/{rank}", name))

    @classmethod
    def of(cls, place: HostPlace, timeout_seconds: float) -> Beside | None:
        """Of a process at its place; None where there is nobody beside it."""
        if place.hosts == 1 or place.ranks == 1 or not has_begun():
            return None
        first = place.leaders[place.machine]
        others = [first + one for one in range(place.ranks) if one != place.local_rank]
        return cls(default_store(), first + place.local_rank, others, timeout_seconds)

    def gone(self, now: bool = False) -> tuple[int, str] | None:
        """A rank that has ended or stands still for too long, and which it is; None where all that have come
        are there. Looks a few times a second. ``now``: one that stands still, or is not to be found, has done
        so for too long."""
        away = time.monotonic() - self._looked
        if away < _LOOK_SECONDS and not now:
            return None
        if away > _AWAY_SECONDS:  # it stood still itself, perhaps with all others
            self._stopped.clear()
        try:
            for rank in self._names:
                if self._has_ended(rank, time.monotonic()) or (now and rank in self._missed):
                    return rank, "has died"
                seconds = self._stands_still(rank, time.monotonic())
                if seconds is not None and (now or seconds > self._timeout_seconds):
                    return rank, f"has been stopped (SIGSTOP) for {seconds:.0f} seconds or more"
        finally:
            self._looked = time.monotonic()
        return None

    def _stands_still(self, rank: int, now: float) -> float | None:
        """For how many seconds, as far as that was seen; None: it does not."""
        if not _ends.stopped(self._names[rank]):
            self._stopped.pop(rank, None)
            return None
        return now - self._stopped.setdefault(rank, now)

    def _has_ended(self, rank: int, now: float) -> bool:
        if not self._names[rank] or rank in self._missed:
            self._names[rank] = self._name_of(rank)
        name = self._names[rank]
        if not name:
            return False
        if not _ends.connected(name):
            return now - self._missed.setdefault(rank, now) > self._timeout_seconds
        self._missed.pop(rank, None)
        return _ends.ended(name)

    def _name_of(self, rank: int) -> str:
        """Where a rank says that it is; what was known where that cannot be asked."""

        def asked() -> str:
            key = f"{self._at}/{rank}"
            return str(self._store.get(key).decode()) if self._store.check([key]) else ""

        with suppress(RuntimeError, TimeoutError):
            return str(within(_STORE_SECONDS, asked))
        return self._names[rank]


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _address(name: str) -> str:
    return f"\0featstore-beside-{name}"
