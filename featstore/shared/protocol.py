"""What the owner of a shared buffer and its clients say to each other, and what holds of their sockets when a
process forks.

*Messages.* A header of 20 bytes (kind, detail, number of the request, length) and then, for some, raw arrays:
ids as int64, slots as int32, whether rows are held as bool. The detail of a request is the number of its
table; of an answer with slots, how many rows had to be read for it. Nothing is pickled; errors travel as
:mod:`featstore.base.passed_errors` has them.

*Who may speak.* The socket has a random name in Linux's abstract namespace, which any process of the host can
connect to. So both sides first prove that they know the buffer's key: each answers the other's random nonce
with an HMAC, and the key itself is never sent. Who has the key is trusted.

*Fork.* A child inherits the descriptors of its parent. Were they left open, the end of the parent would not
be seen at the other side. So sockets are made under a lock that a fork waits for, and the child closes its
copies before it does anything else.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
import weakref
from typing import NamedTuple, Protocol

HEADER = struct.Struct("<BxxxIIQ")

# From clients: a request of ids whose rows are wanted now, or later; the rows of an earlier request are
# wanted now; a request is over; what has been counted? Which of these rows are there?
ASK, AHEAD, WANT, RELEASE, STATS, HOLDS = range(1, 7)
# From the owner: the handshake's end; rows are in these slots; the request is not known (any more), send it
# again; an error; what has been counted; which rows are there.
WELCOME, REFUSED, ANSWER_SLOTS, AGAIN, ANSWER_ERROR, ANSWER_STATS, ANSWER_HELD = range(16, 23)

NONCE_BYTES = PROOF_BYTES = 32
ANSWER_BYTES = PROOF_BYTES + NONCE_BYTES

_PEER = struct.Struct("3i")


def new_key() -> bytes:
    return secrets.token_bytes(32)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(key: bytes, side: bytes, nonce: bytes) -> bytes:
    """What only who knows the key can answer to a nonce; ``side`` keeps an answer from being used by the
    other side."""
    return hmac.digest(key, side + nonce, "sha256")


def proves(answer: bytes, key: bytes, side: bytes, nonce: bytes) -> bool:
    return hmac.compare_digest(answer, proof(key, side, nonce))


# Sockets and forks.


class Peer(NamedTuple):
    """Who is at the other end of a socket: a process (0 where this one cannot see it), and whose it is."""

    process: int
    user: int
    group: int


def peer_of(connection: socket.socket) -> Peer:
    """As the system tells it."""
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return Peer(*_PEER.unpack(said))


def hang_up(connection: socket.socket) -> None:
    """Close a connection for all who have a copy of it."""
    with contextlib.suppress(OSError):  # the other side has hung up before
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class Endpoint(Protocol):
    """What holds sockets."""

    def forked(self) -> None:
        """Close the copies of this process, which is a new child, and say nothing to the other side."""


#: Held while a descriptor is made and put where :meth:`Endpoint.forked` finds it.
forking = threading.RLock()
_endpoints: weakref.WeakSet[Endpoint] = weakref.WeakSet()


def register(endpoint: Endpoint) -> None:
    with forking:
        _endpoints.add(endpoint)


def _forked() -> None:
    try:
        for endpoint in list(_endpoints):
            endpoint.forked()
    finally:
        forking.release()


os.register_at_fork(before=forking.acquire, after_in_parent=forking.release, after_in_child=_forked)
