"""Messages between hosts: in order between any two, by a process group of ``torch.distributed``."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

_TAG, _NO_TAG = 0, 1  # of all messages, and of none
_AT_ONCE = timedelta(milliseconds=1)


class Wire(Protocol):
    """Connects hosts. Between any two of them, messages come in the order in which they were sent. One thread
    sends to a host, and one receives from it."""

    host: int
    hosts: int

    def rank_of(self, host: int) -> int:
        """The rank of a host's process in the run, for messages."""

    def send(self, to: int, data: NDArray[np.uint8]) -> None:
        """Send a message; it may be changed when this returns. Raises an Exception where the other is
        gone."""

    def post(self, source: int, into: NDArray[np.uint8]) -> Any:
        """The next message goes into this memory, and is not longer."""

    def take(self, posted: Any) -> None:
        """Wait for a message that was posted. Raises an Exception where the other is gone."""

    def close(self, *, abort: bool) -> None:
        """Give the connections back; with ``abort`` threads may be in the middle of sending and receiving,
        here and there: they have an Exception."""


class GlooWire:
    """Over two groups of ``gloo`` with the same members, a process of each host: one for messages to hosts
    of higher numbers, one for those to lower ones. Nothing else may use them.

    While a connection of gloo is written to by a thread, its own thread cannot read from it, and asks again
    and again whether it can: in one group, two hosts that send to each other would take turns, and a core.

    ``order``: the members of the groups, by host. ``ranks``: of the members in the run. ``timeout_seconds``:
    of a single send or receive.
    """

    def __init__(
        self, up: Any, down: Any, order: list[int], ranks: list[int], timeout_seconds: float
    ) -> None:
        self._up, self._down, self._order, self._ranks = up, down, order, ranks
        self.host, self.hosts = order.index(int(up.rank())), len(order)
        self._timeout = timedelta(seconds=timeout_seconds)

    def rank_of(self, host: int) -> int:
        return self._ranks[self._order[host]]

    def send(self, to: int, data: NDArray[np.uint8]) -> None:
        group = self._up if to > self.host else self._down
        group.send([_tensor(data)], self._order[to], _TAG).wait(self._timeout)

    def post(self, source: int, into: NDArray[np.uint8]) -> Any:
        group = self._down if source > self.host else self._up
        return group.recv([_tensor(into)], self._order[source], _TAG)

    def take(self, posted: Any) -> None:
        posted.wait(self._timeout)

    def close(self, *, abort: bool) -> None:
        if abort:
            # A wait that is over closes all connections of a group, and wakes up all who wait for them;
            # its abort() does nothing.
            nothing = np.empty(1, np.uint8)
            for group in (self._up, self._down):
                with suppress(RuntimeError):
                    group.recv([_tensor(nothing)], self._order[self.host - 1], _NO_TAG).wait(_AT_ONCE)
        else:
            self._up = self._down = None  # which closes their connections


def _tensor(data: NDArray[np.uint8]) -> Any:
    from featstore.base.tensors import as_tensor

    return as_tensor(data)
