"""Where clients of a shared buffer come in, and how long they may stand there without having proved that they
know its key.

Any process of the host can connect, and each connection takes a descriptor of the owner. So who has not
proved anything is a stranger, of whom there are :data:`STRANGERS_MAX` at most: the one that has stood there
longest goes when another comes, and each after :data:`HANDSHAKE_SECONDS`. A client proves itself as soon as
it is let in; one that was shown out by a crowd of others comes again. Where the owner is out of descriptors,
a stranger's is taken for the next; without any, those at the door wait there for a moment.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable

from featstore.shared import protocol
from featstore.shared.guests import Guest

STRANGERS_MAX = 64
HANDSHAKE_SECONDS = 10.0
_BACKLOG = 128
_SHUT_SECONDS = 0.2  # for which nobody is let in where descriptors have run out


class Door:
    """A socket that listens in Linux's abstract namespace, known to a selector, and the strangers that it has
    let in. Made while :data:`featstore.shared.protocol.forking` is held."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self.address = "\0featstore-" + protocol.new_nonce().hex()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.shut = False
        self._strangers: dict[Guest, float] = {}  # until when each may stay, the oldest first

    def open(self) -> None:
        """Let clients come."""
        self.socket.setblocking(False)
        self.socket.bind(self.address)
        self.socket.listen(_BACKLOG)
        self._selector.register(self.socket, selectors.EVENT_READ)

    def accept(self, see_off: Callable[[Guest], None]) -> socket.socket | None:
        """Who is next at the door; None where there is nobody, or no descriptor for him: then the oldest
        stranger is seen off for him."""
        try:
            return self.socket.accept()[0]
        except BlockingIOError:
            return None
        except OSError:  # this process is out of descriptors
            oldest = next(iter(self._strangers), None)
            if oldest is not None:
                see_off(oldest)
                return None
            self._selector.unregister(self.socket)
            self.shut = True
            return None

    def patience_seconds(self) -> float | None:
        """How long to wait at most for something to happen."""
        waits = [_SHUT_SECONDS] if self.shut else []
        waits += [max(0.0, until - time.monotonic()) for until in list(self._strangers.values())[:1]]
        return min(waits, default=None)

    def reopen(self) -> None:
        """Who waited at the door may try again."""
        if self.shut:
            self.shut = False
            self._selector.register(self.socket, selectors.EVENT_READ)

    # Strangers.

    def meet(self, guest: Guest) -> None:
        """One has come in who has proved nothing yet."""
        self._strangers[guest] = time.monotonic() + HANDSHAKE_SECONDS

    def know(self, guest: Guest) -> None:
        """One is no stranger any more, or is gone."""
        self._strangers.pop(guest, None)

    def overstayed(self) -> list[Guest]:
        """Who has to go: those whose time is over, and those that are too many."""
        now, surplus = time.monotonic(), len(self._strangers) - STRANGERS_MAX
        return [
            guest for n, (guest, until) in enumerate(self._strangers.items()) if n < surplus or until <= now
        ]

    def close(self) -> None:
        """May be called more than once."""
        self.socket.close()
