"""The client of a shared buffer: reads rows in any process of the host; see :mod:`featstore.shared.owner`.

A client is little more than an address: it can be pickled, and a forked child may go on using it. Each
process connects when it first asks for rows, and maps the owner's rows read-only.

*Asking.* A read asks for rows, waits until the owner says in which slots they lie, copies them out of the
shared mapping and says that they may go. :meth:`BufferClient.submit` asks ahead: the owner reads, but the
rows are this client's only once it wants them (:meth:`BufferRequest.result`). Until then the owner may give
their slots to others that want rows now, and the client asks again. So what a process keeps from others it
keeps for the time of a copy, and no order of waiting among processes can deadlock.

*Ending.* An exception in the middle of an exchange, an interrupt for instance, closes the connection, upon
which the owner frees what this process held; the next use connects anew.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_text, shown
from featstore.base.buffers import empty_rows
from featstore.base.ids import Ids, check_out, finished, parse_ids
from featstore.base.native import address_of
from featstore.base.rows import IN_ORDER, move_rows
from featstore.errors import ArgumentError, CancelledError, ClosedError, FeatstoreError, UnknownNameError
from featstore.shared import protocol
from featstore.shared.connection import AGAIN_SECONDS, CONNECT_SECONDS, About, BrokenOffError, Connection
from featstore.tiers.tickets import BufferStats

_NUMBERS = 2**32  # of requests; then they are used again


class BufferRequest:
    """Rows asked for ahead; made by :meth:`BufferClient.submit`. For one thread at a time."""

    def __init__(self, client: BufferClient, about: About, ids: Ids, out: Any, named: bool) -> None:
        self._client, self._about, self._ids, self._out, self._named = client, about, ids, out, named
        self._shape = (*ids.shape, *about.row_shape)
        count = len(ids.values)
        if out is None:
            self._rows = empty_rows(count, about.row_bytes)
        else:
            self._rows = check_out(out, self._shape, about.dtype)
        pieces = range(0, count, about.batch_rows)
        self._pieces = [ids.values[begin : begin + about.batch_rows] for begin in pieces]
        self._numbers = [client._new_number() for _ in self._pieces]
        self._asked = self._filled = 0  # pieces
        self._cancelled = False

    def result(self) -> Any:
        """Wait for the rows; returns them, or the ``out`` that was given. Raises what went wrong with reading
        in the owner; ClosedError; CancelledError. May be called again."""
        if self._cancelled:
            raise CancelledError("the result of a cancelled request was asked for")
        while self._filled < len(self._pieces):
            self._ask_ahead(self._filled + 1)
            self._client._fetch(self, self._filled)
            self._filled += 1
        rows = self._out
        if rows is None:
            rows = finished(self._rows, self._shape, self._about.dtype, self._ids.tensor)
        return {self._about.table: rows} if self._named else rows

    def _ask_ahead(self, piece: int) -> None:
        if self._asked <= piece < len(self._pieces):
            self._client._ask_ahead(self._numbers[piece], self._pieces[piece])
            self._asked = piece + 1

    def cancel(self) -> None:
        """The rows are not wanted any more. May be called more than once."""
        self._cancelled = True
        self._forget()

    def _forget(self) -> None:
        """Let the owner know, with what is said next, that what was asked ahead is not wanted."""
        self._client._forgotten.extend(self._numbers[self._filled : self._asked])
        self._asked = self._filled

    def __del__(self) -> None:
        if hasattr(self, "_asked"):
            self._forget()

    def __repr__(self) -> str:
        return f"<BufferRequest for {len(self._ids.values):,} rows of {self._about.table!r}>"


class BufferClient:
    """Reads rows through the buffer of another process (or of this one); made by
    :meth:`featstore.SharedBuffer.client`.

    It can be pickled and survives a fork. Threads may share a client, but then wait for each other: give each
    its own.
    """

    def __init__(self, address: str, key: bytes) -> None:
        self._address, self._key = as_text(address, "address"), key
        if not isinstance(key, bytes):
            raise ArgumentError(
                f"key must be bytes, not {shown(key)}; a client is made by SharedBuffer.client()"
            )
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._about: About | None = None
        self._count = itertools.count()
        self._forgotten: deque[int] = deque()
        self._closed = False
        protocol.register(self)

    # Reading.

    def read(self, ids: Any, *, out: Any = None) -> Any:
        """Rows of ``ids``, in the order asked; duplicates are fine.

        ``ids``: node ids, integers of any dtype and shape, NumPy, torch or a list; or ``{table: ids}``, which
        returns ``{table: rows}``. The result has the shape of the ids followed by that of a row: a NumPy
        array, or a tensor where the ids were a tensor. ``out``: a C-contiguous array or tensor to fill and
        return instead.

        Raises IdError; CorruptionError, DeviceError and what else went wrong in the owner; ClosedError where
        the owner is gone.
        """
        return self._request(ids, out, copy=False).result()

    def submit(self, ids: Any, *, out: Any = None) -> BufferRequest:
        """Ask ahead for rows of which :meth:`BufferRequest.result` waits. ``ids`` may be changed afterwards;
        ``out`` belongs to the request until its result was taken. Raises ClosedError, IdError for ids that
        are no integers."""
        request = self._request(ids, out, copy=True)
        request._ask_ahead(0)
        return request

    def _request(self, ids: Any, out: Any, *, copy: bool) -> BufferRequest:
        about = self._opened()
        named = isinstance(ids, Mapping)
        if named:
            for given in (ids, out) if isinstance(out, Mapping) else (ids,):
                if list(given) != [about.table]:
                    there = ", ".join(map(repr, given)) or "nothing"
                    raise UnknownNameError(f"this buffer holds rows of {about.table!r} alone, not of {there}")
            ids, out = ids[about.table], out[about.table] if isinstance(out, Mapping) else out
        return BufferRequest(self, about, parse_ids(ids, copy=copy), out, named)

    def stats(self) -> BufferStats:
        """What the owner's buffer has counted, for all its clients. Raises ClosedError."""
        with self._exchange() as connection:
            connection.say(protocol.STATS)
            _, _, text = connection.hear()
        return BufferStats(**json.loads(text))

    # What is known of the rows.

    @property
    def table(self) -> str:
        return self._opened().table

    @property
    def rows(self) -> int:
        return self._opened().rows

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self._opened().row_shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._opened().dtype

    # The exchange.

    def _new_number(self) -> int:
        return next(self._count) % _NUMBERS

    def _ask_ahead(self, number: int, ids: NDArray[np.int64]) -> None:
        with self._exchange() as connection:
            connection.say(protocol.AHEAD, number, ids)

    def _fetch(self, request: BufferRequest, piece: int) -> None:
        """Wait for the rows of a piece of a request, and copy them out. Raises what went wrong in the
        owner."""
        number, ids, row_bytes = request._numbers[piece], request._pieces[piece], request._about.row_bytes
        out = address_of(request._rows) + piece * request._about.batch_rows * row_bytes
        error: FeatstoreError | None = None
        with self._exchange() as connection:
            if piece < request._asked:
                connection.say(protocol.WANT, number)
            else:
                connection.say(protocol.ASK, number, ids)
            kind, slots, text = connection.hear()
            if kind == protocol.AGAIN:
                connection.say(protocol.ASK, number, ids)
                kind, slots, text = connection.hear()
            if kind == protocol.ANSWER_ERROR:
                error = protocol.decode_error(text)
            else:
                move_rows(address_of(connection.x), slots, out, IN_ORDER, row_bytes)
                connection.say(protocol.RELEASE, number)
        if error is not None:
            raise error

    @contextmanager
    def _exchange(self) -> Iterator[Connection]:
        """The connection, for this thread alone; closed where the exchange breaks off."""
        with self._lock:
            try:
                connection = self._connect()
                while self._forgotten:
                    connection.say(protocol.RELEASE, self._forgotten[0])
                    self._forgotten.popleft()
                yield connection
            except BaseException:
                self._drop()
                raise

    def _connect(self) -> Connection:
        if self._closed:
            raise ClosedError("this client of a shared buffer is closed")
        deadline = time.monotonic() + CONNECT_SECONDS
        while self._connection is None:
            with protocol.forking:
                self._connection = Connection()
            self._forgotten.clear()  # a new connection knows of no request
            try:
                self._about = self._connection.open(self._address, self._key, deadline)
            # the owner has ended, which the next try will see, or showed us out in a crowd
            except BrokenOffError:
                self._drop()
                time.sleep(AGAIN_SECONDS)
        return self._connection

    def _opened(self) -> About:
        if self._about is None or self._closed:
            with self._exchange():
                pass
        assert self._about is not None
        return self._about

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # Ending.

    def forked(self) -> None:
        """In a new child: what was connected is the parent's."""
        if self._connection is not None:
            self._connection.socket.close()  # without hanging up
            self._connection = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """Disconnect. The owner and other clients go on. May be called more than once."""
        with self._lock:
            self._closed = True
            self._drop()

    def __enter__(self) -> BufferClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_connection", None) is not None:
            self._drop()  # without the lock: nobody else knows of this client

    def __reduce__(self) -> tuple[Any, ...]:
        return BufferClient, (self._address, self._key)

    def __repr__(self) -> str:
        return (
            "<BufferClient, "
            f"{'closed' if self._closed else 'connected' if self._connection else 'not connected'}>"
        )
