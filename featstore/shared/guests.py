"""A client of a shared buffer as its owner sees it: a connection, what it asked, what it is to be told."""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.shared.protocol import HEADER
from featstore.tiers.tickets import Ticket

BYTES_PER_ID = 48  # of a request: ids as they arrive, and what the buffer's ticket and read hold
Session = Generator[memoryview | None, None, None]


class Asked:
    """A client's request for rows of one table."""

    def __init__(self, guest: Guest, table: int, number: int, count: int) -> None:
        self.guest, self.table, self.number, self.count = guest, table, number, count
        self.ids: NDArray[np.int64] | None = None  # until they are received; its ticket has them
        self.ticket: Ticket | None = None
        self.missed = 0  # rows that had to be read when it got its slots
        self.error: BaseException | None = None

    @property
    def begun(self) -> bool:
        """Whether it has slots, or cannot have any."""
        return self.ticket is not None or self.error is not None

    def result(self) -> NDArray[np.int32]:
        """The slots of its rows. Raises TimeoutError while they are on their way; what went wrong."""
        if self.error is not None:
            raise self.error
        assert self.ticket is not None
        return self.ticket.result(0)


class Guest:
    """A client's connection. ``wants``: what is to be filled next; None while it is not listened to."""

    def __init__(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        self.socket, self._selector = connection, selector
        self.session: Session | None = None
        self.wants: memoryview | None = None
        self.outgoing: deque[memoryview] = deque()
        self.asked: dict[int, Asked] = {}
        self._events = 0  # that the selector waits for
        self.gone = False

    def listen(self) -> None:
        """Wait for what is of interest of the client."""
        events = selectors.EVENT_READ if self.wants is not None else 0
        if self.outgoing:
            events |= selectors.EVENT_WRITE
        if events and not self._events:
            self._selector.register(self.socket, events, self)
        elif events != self._events:
            if events:
                self._selector.modify(self.socket, events, self)
            else:
                self._selector.unregister(self.socket)
        self._events = events

    def ignore(self) -> None:
        """Wait for nothing of the client."""
        if self._events:
            self._selector.unregister(self.socket)

    def say(self, *parts: bytes | memoryview) -> None:
        """Tell the client something, as soon as it takes it."""
        self.outgoing.extend(memoryview(part) for part in parts if len(part))
        self.flush()

    def answer(self, kind: int, number: int = 0, array: NDArray[Any] | None = None, detail: int = 0) -> None:
        """Tell the client a header, and what comes with it: its length is the array's."""
        length = 0 if array is None else len(array)
        self.say(HEADER.pack(kind, detail, number, length))
        if array is not None and length:
            self.say(array.view(np.uint8).data)

    def flush(self) -> None:
        """Send what the client takes now."""
        try:
            while self.outgoing:
                sent = self.socket.send(self.outgoing[0])
                if sent < len(self.outgoing[0]):
                    self.outgoing[0] = self.outgoing[0][sent:]
                else:
                    self.outgoing.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self.outgoing.clear()  # it is gone, as will be seen when it is read from
        self.listen()
