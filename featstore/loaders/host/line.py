"""Sockets between the ranks of a host: whole messages, between processes of one user.

A message is a tuple, and arrives whole or not at all (``SOCK_SEQPACKET``), so that threads, and finalizers in
any of them, may say something without a lock. As for forks see :mod:`featstore.shared.protocol`: a child
closes its copies, else nobody would see the end of its parent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from featstore.base.system import asking, refusal
from featstore.base.threads import Wake, Worker
from featstore.errors import ArgumentError, ClosedError, WaitTimeoutError
from featstore.shared import protocol

MEET_SECONDS = 120.0  # for which ranks wait for each other's loaders to be made
_AGAIN_SECONDS, LOOK_SECONDS = 0.02, 0.2
_MESSAGE_BYTES_MAX = 1 << 18
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)  # the other end is, or this one


class Line:
    """One end of a socket to another rank."""

    def __init__(self, made: socket.socket) -> None:
        self.socket = made
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES_MAX)
        self._unsaid: deque[bytes] = deque()
        protocol.register(self)

    @property
    def is_ours(self) -> bool:
        """Whether a process of this user is at the other end."""
        return protocol.peer_of(self.socket).user == os.getuid()

    def say(self, *message: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message. One to somebody who is gone is lost: who hears from him learns that."""
        try:
            self._say_rest()
            socket.send_fds(self.socket, [pickle.dumps(message)], descriptors)
        except OSError as error:
            if error.errno not in _GONE:
                raise refusal(error, "the ranks of this host", "speak to") from error

    def _say_rest(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self.socket.send(self._unsaid.popleft())

    def mention(self, *message: Any) -> None:
        """As :meth:`say`, without ever waiting: where that would be needed, it is said with what is said, or
        before anything is heard, next."""
        data = pickle.dumps(message)
        try:
            self.socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._unsaid.append(data)
        except OSError as error:
            if error.errno not in _GONE:
                raise

    def hear(self, timeout: float | None = None) -> tuple[tuple[Any, ...] | None, list[int]]:
        """The next message and the descriptors that came with it; None for the message where the other end is
        gone. Raises WaitTimeoutError."""
        if self.socket.fileno() < 0:
            return None, []
        with contextlib.suppress(OSError):  # what is heard may be the answer to it
            self._say_rest()
        if timeout is not None and not heard_from([self.socket], timeout):
            raise WaitTimeoutError(f"a rank of this host has said nothing for {timeout:.0f} seconds")
        for _ in range(2):  # messages may stand before the end that a reset tells of
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self.socket, _MESSAGE_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC
                )
            except ConnectionResetError:
                continue
            except OSError:
                return None, []
            return (pickle.loads(data) if data else None), descriptors
        return None, []

    def forked(self) -> None:
        self.socket.close()

    def close(self) -> None:
        """May be called more than once."""
        with contextlib.suppress(OSError):
            protocol.hang_up(self.socket)


def heard_from(sockets: Iterable[socket.socket], seconds: float | None = None) -> set[int]:
    """Those (their descriptors) that have something to be heard, or have ended; none after so long."""
    poll = select.poll()
    for one in sockets:
        poll.register(one, select.POLLIN)
    return {number for number, _ in poll.poll(None if seconds is None else 1000 * seconds)}


def _line() -> Line:
    with asking("the loader of this host", "make a socket of"):
        return Line(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))


def pair() -> tuple[Line, Line]:
    """Both ends of a line within this process. Raises DeviceError."""
    with protocol.forking, asking("the loader of this host", "make a socket of"):
        first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Line(first), Line(second)


class Meeting:
    """Where the owner waits for the other ranks of its host."""

    def __init__(self, address: str) -> None:
        with protocol.forking, asking("the loader of this host", "make a socket of"):
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            protocol.register(self)
        try:
            self.socket.bind(address)
            self.socket.listen(128)
        except OSError as error:
            self.socket.close()
            raise ArgumentError(
                f"another loader of this name is being made on this host ({error}): give shared= a name that "
                "no other run has"
            ) from error

    def lines(self, count: int, check: Callable[[bool], None]) -> Iterator[Line]:
        """Those of so many others, as they come. Raises WaitTimeoutError, ClosedError; while it waits, what
        ``check`` raises, which is told whether it has waited too long."""
        found, end = 0, time.monotonic() + MEET_SECONDS
        while found < count:
            left = end - time.monotonic()
            if not heard_from([self.socket], max(0.0, min(left, LOOK_SECONDS))):
                check(left <= 0)
                if left > 0:
                    continue
                raise WaitTimeoutError(
                    f"of {count + 1} ranks of this host {found + 1} have made their shared loader within "
                    f"{MEET_SECONDS:.0f} seconds: all have to, with the same shared="
                )
            with protocol.forking, asking("the loader of this host", "make a socket of"):
                line = Line(self.socket.accept()[0])
            if line.is_ours:
                found += 1
                yield line
            else:
                line.close()

    def forked(self) -> None:
        self.socket.close()

    def close(self) -> None:
        """Nobody else may come; the name is free. May be called more than once."""
        self.socket.close()


def line_to(address: str, check: Callable[[bool], None], opening_seconds: float = 0.0) -> Line:
    """A line to the owner at an address, who may come later than this rank, also by what it opens first.
    Raises WaitTimeoutError, ClosedError, DeviceError; while it waits, what ``check`` raises, which is told
    whether it has waited too long."""
    seconds = MEET_SECONDS + opening_seconds
    end = time.monotonic() + seconds
    while True:
        with protocol.forking:
            line = _line()
            try:
                line.socket.connect(address)
            except ConnectionRefusedError:
                line.close()
            except OSError as error:
                line.close()
                raise refusal(error, "the loader of this host", "connect to") from error
            else:
                break
        late = time.monotonic() > end
        check(late)
        if late:
            raise WaitTimeoutError(
                f"local rank 0 has not made its shared loader within {seconds:.0f} seconds: all ranks "
                "of a host have to, with the same shared="
            )
        time.sleep(_AGAIN_SECONDS)
    if not line.is_ours:
        line.close()
        raise ClosedError(
            "a process of another user listens where local rank 0 of this host should: give shared= a name "
            "that nobody else has"
        )
    return line


class Pulse:
    """Says on a line, a few times in ``timeout_seconds``, that this rank is alive, and whether it waits: then
    it is answered. In a thread, which knows nothing of whose line it is, so that it keeps nobody alive."""

    _TIMES = 5

    def __init__(self, line: Line, timeout_seconds: float) -> None:
        self._line, self._seconds = line, timeout_seconds / self._TIMES
        self.waiting = False
        self._over, self._wake = False, Wake()  # an Event's lock may be this thread's, in a finalizer
        self._worker = Worker(self._go, "featstore-host-pulse")
        self._worker.start()

    def _go(self) -> None:
        while True:
            self._wake.wait(self._seconds)
            if self._over:
                return
            self._line.mention("there", self.waiting)

    def hear(self) -> tuple[tuple[Any, ...] | None, list[int]]:
        """The next message, as :meth:`Line.hear`. Raises WaitTimeoutError where even that one is alive has
        not been said in time."""
        self.waiting = True
        try:
            try:
                return self._line.hear(self._TIMES * self._seconds)
            except WaitTimeoutError:  # this process may have stood still itself
                self._line.mention("there", True)
                return self._line.hear(self._seconds)
        finally:
            self.waiting = False

    def end(self) -> None:
        """May be called more than once."""
        self._over = True
        self._wake.set()
