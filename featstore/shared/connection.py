"""A client's connection to the owner of a shared buffer: a socket, proofs on both sides, and the owner's
rows, mapped read-only.

The owner answers at once, so who waits for :data:`CONNECT_SECONDS` waits for one that is stopped, has no
descriptors left, or is besieged by others, and is told so. A connection that breaks off before it is made is
made again by the client.
"""

from __future__ import annotations

import errno
import mmap
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.base.system import refusal
from featstore.errors import ClosedError, DeviceError
from featstore.shared import protocol
from featstore.shared.about import About
from featstore.shared.protocol import HEADER

CONNECT_SECONDS = 30.0
AGAIN_SECONDS = 0.01  # before a connection that could not be made is tried again


class Answer(NamedTuple):
    """What the owner says: slots, or a text, or bytes."""

    kind: int
    detail: int
    slots: NDArray[np.int32]
    body: bytes


class Connection:
    """A socket to the owner, and the owner's rows. Not for several threads at once."""

    def __init__(self) -> None:
        try:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise refusal(error, "the shared buffer", "connect to") from error
        self.x = np.empty(0, np.uint8)
        self._deadline: float | None = None

    def open(self, address: str, key: bytes, deadline: float) -> About:
        """Connect, prove, be proved to, before ``deadline`` of the monotonic clock. Raises ClosedError;
        BrokenOffError where the connection ended before that."""
        self._deadline = deadline
        self._connect(address)
        about = self._shake_hands(key)
        self._deadline = None
        self.socket.settimeout(None)
        return about

    def _connect(self, address: str) -> None:
        while True:
            try:
                self._patience()
                return self.socket.connect(address)
            except BlockingIOError:  # many wait at the door
                time.sleep(AGAIN_SECONDS)
            except TimeoutError:
                raise _no_answer() from None
            except OSError as error:
                raise _closed() from error

    def _patience(self) -> None:
        """Wait for the owner no longer than until the deadline, while there is one."""
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self.socket.settimeout(left)

    def _shake_hands(self, key: bytes) -> About:
        nonce = self._receive(protocol.NONCE_BYTES)
        mine = protocol.new_nonce()
        self._send(protocol.proof(key, b"client", nonce) + mine)
        kind, length = self._receive_welcome()
        if kind != protocol.WELCOME:
            raise ClosedError(
                "the owner of the shared buffer does not let this client in: its key is another one"
            )
        if not protocol.proves(self._receive(protocol.PROOF_BYTES), key, b"owner", mine):
            raise ClosedError(
                "who listens at the shared buffer's address is not its owner: it does not know the key"
            )
        if len(self.x) == 0:  # the system leaves out the descriptor that a process has no room for
            raise DeviceError(errno.EMFILE, "the shared buffer", None, "open")
        return About.parse(self._receive(length))

    def _receive_welcome(self) -> tuple[int, int]:
        """The header that ends the handshake, and with it the rows. Returns its kind and length."""
        with self._gone():
            self._patience()
            self.socket.recv(1, socket.MSG_PEEK)  # wait here: no fork may be kept waiting
        with protocol.forking:
            with self._gone():
                header, descriptors, _, _ = socket.recv_fds(
                    self.socket, HEADER.size, 1, socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL
                )
            self._map(descriptors)
        if len(header) < HEADER.size:
            raise self._ended()
        kind, _, _, length = HEADER.unpack(header)
        return kind, length

    def _map(self, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            try:
                shared = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
                self.x = np.frombuffer(shared, np.uint8)
            except OSError as error:
                raise refusal(error, "the shared buffer", "map") from error
            finally:
                os.close(descriptor)

    # Messages.

    def say(
        self, kind: int, number: int = 0, ids: NDArray[np.int64] | None = None, *, table: int = 0
    ) -> None:
        count = 0 if ids is None else len(ids)
        self._send(HEADER.pack(kind, table, number, count))
        if ids is not None and count:
            self._send(ids.view(np.uint8).data)

    def hear(self) -> Answer:
        """The next answer."""
        kind, detail, _, length = HEADER.unpack(self._receive(HEADER.size))
        slots = np.empty(length if kind == protocol.ANSWER_SLOTS else 0, np.int32)
        if kind == protocol.ANSWER_SLOTS:
            self._fill(slots.view(np.uint8).data)
            return Answer(kind, detail, slots, b"")
        return Answer(kind, detail, slots, self._receive(length))

    def _send(self, data: bytes | memoryview) -> None:
        with self._gone():
            self._patience()
            self.socket.sendall(data)

    def _receive(self, count: int) -> bytes:
        got = bytearray(count)
        self._fill(memoryview(got))
        return bytes(got)

    def _fill(self, into: memoryview) -> None:
        while len(into):
            with self._gone():
                self._patience()
                count = self.socket.recv_into(into)
            if count == 0:
                raise self._ended()
            into = into[count:]

    @contextmanager
    def _gone(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._ended(error) from error

    def _ended(self, error: OSError | None = None) -> Exception:
        """What to raise where the other side is gone, or does not answer."""
        if self._deadline is None:
            return _closed()
        return _no_answer() if isinstance(error, TimeoutError) else BrokenOffError()

    def close(self) -> None:
        protocol.hang_up(self.socket)
        self.x = np.empty(0, np.uint8)


def _closed() -> ClosedError:
    return ClosedError(
        "the shared buffer is gone: the process that owns it has closed it or has died; make another "
        "one, and new clients"
    )


def _no_answer() -> ClosedError:
    return ClosedError(
        f"the owner of the shared buffer has not answered for {CONNECT_SECONDS:.0f} seconds: see "
        "whether it is stopped, busy, or out of descriptors (ulimit -n), or whether another process "
        "besieges it with connections; then ask again"
    )


class BrokenOffError(Exception):
    """The connection ended before it was made."""
