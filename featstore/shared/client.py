"""The client of a shared buffer: reads rows in any process of the host; see :mod:`featstore.shared.owner`.

A client is little more than an address: it can be pickled, and a forked child may go on using it. Each
process connects when it first asks for rows, and maps the owner's rows read-only.

*Asking.* A read asks for rows of a table, waits until the owner says in which slots they lie, copies them out
of the shared mapping and says that they may go; one of several tables, or of more rows than are asked for at
once, does so piece after piece. :meth:`BufferClient.submit` asks ahead: the owner reads, but the
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

from featstore.arguments import as_text, known_name, shown
from featstore.base.buffers import empty_rows
from featstore.base.ids import check_out, finished, parse_ids, parse_row_places, rows_of, unshared
from featstore.base.native import address_of
from featstore.base.passed_errors import decode_error
from featstore.base.rows import IN_ORDER, move_rows
from featstore.errors import ArgumentError, CancelledError, ClosedError
from featstore.reader.requests import ByTable
from featstore.shared import protocol
from featstore.shared.about import About, SharedTable
from featstore.shared.connection import AGAIN_SECONDS, CONNECT_SECONDS, BrokenOffError, Connection
from featstore.tiers.tickets import BufferStats

_NUMBERS = 2**32  # of requests; then they are used again
NO_TABLE = "this shared buffer has no table"


class _Piece:
    """Ids of one table that are asked for at once, and where their rows go."""

    def __init__(
        self, number: int, table: SharedTable, ids: NDArray[np.int64], out: int, places: NDArray[np.int32]
    ) -> None:
        self.number, self.table, self.ids, self.out, self.places = number, table, ids, out, places


class BufferRequest:
    """Rows asked for ahead; made by :meth:`BufferClient.submit`. For one thread at a time. ``hits``: how many
    of the rows that came were there when this request got them."""

    def __init__(self, client: BufferClient, about: About, asked: ByTable, ids: Any, out: Any) -> None:
        self._client, self._about, self._by_table = client, about, asked
        self._named = isinstance(ids, Mapping)
        self._given = None if out is None else asked.out
        self._rows: dict[str, NDArray[np.uint8]] = {}
        self._pieces: list[_Piece] = []
        places_of: dict[str, NDArray[np.int32]] = {}
        for name, parsed in asked.ids.items():
            table, count = about.tables[name], len(parsed.values)
            places = IN_ORDER
            if name in asked.at:
                given = asked.out[name]
                places = parse_row_places(asked.at[name], count, rows_of(given))
                rows = check_out(given, (rows_of(given), *table.row_shape), table.dtype)
            elif name in asked.out:
                rows = check_out(asked.out[name], (*parsed.shape, *table.row_shape), table.dtype)
            else:
                rows = empty_rows(count, table.row_bytes)
            self._rows[name], places_of[name] = rows, places
        for name, parsed in asked.ids.items():
            table, places, begin = about.tables[name], places_of[name], address_of(self._rows[name])
            parsed = unshared(parsed, self._rows.values()) if asked.out else parsed
            for low in range(0, len(parsed.values), table.piece_rows):
                part = slice(low, low + table.piece_rows)
                to = (begin, places[part]) if name in asked.at else (begin + low * table.row_bytes, IN_ORDER)
                self._pieces.append(_Piece(client._new_number(), table, parsed.values[part], *to))
        self._asked = self._filled = self.hits = 0  # pieces; rows
        self._cancelled = False

    def result(self) -> Any:
        """Wait for the rows; returns them, or the ``out`` that was given. Raises what went wrong with reading
        in the owner; ClosedError; CancelledError. May be called again."""
        while self._filled < len(self._pieces):
            self._check_wanted()
            self._ask_ahead(self._filled + 1)
            self.hits += self._client._fetch(self._pieces[self._filled], self._filled < self._asked)
            self._filled += 1
        self._check_wanted()
        made = self._given or {name: self._finished(name) for name in self._rows}
        return made if self._named else next(iter(made.values()))

    def _check_wanted(self) -> None:
        if self._cancelled:
            raise CancelledError("the result of a cancelled request was asked for")

    def _finished(self, name: str) -> Any:
        table, parsed = self._about.tables[name], self._by_table.ids[name]
        return finished(self._rows[name], (*parsed.shape, *table.row_shape), table.dtype, parsed.tensor)

    def _ask_ahead(self, piece: int) -> None:
        if self._asked <= piece < len(self._pieces):
            self._client._ask_ahead(self._pieces[piece])
            self._asked = piece + 1

    def cancel(self) -> None:
        """The rows are not wanted any more. May be called more than once, and in the middle of
        :meth:`result`."""
        self._cancelled = True
        self._forget()

    def _forget(self) -> None:
        """Let the owner know, with what is said next, that what was asked ahead is not wanted."""
        self._client._forgotten.extend(piece.number for piece in self._pieces[self._filled : self._asked])
        self._asked = self._filled

    def __del__(self) -> None:
        if hasattr(self, "_cancelled"):
            self._forget()

    def __repr__(self) -> str:
        rows = ", ".join(
            f"{len(parsed.values):,} rows of {name!r}" for name, parsed in self._by_table.ids.items()
        )
        return f"<BufferRequest for {rows}>"


class BufferClient:
    """Reads rows through the buffer of another process (or of this one); made by
    :meth:`featstore.SharedBuffer.client`.

    It can be pickled and survives a fork. Threads may share a client, but then wait for each other: give each
    its own. What interrupts a read in its own thread, a signal's handler, may close the client, which happens
    when its owner has answered, but not read through it.
    """

    def __init__(self, address: str, key: bytes) -> None:
        self._address, self._key = as_text(address, "address"), key
        if not isinstance(key, bytes):
            raise ArgumentError(
                f"key must be bytes, not {shown(key)}; a client is made by SharedBuffer.client()"
            )
        self._lock, self._exchanging = threading.RLock(), False
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
        returns ``{table: rows}`` and is needed where the buffer has several tables. The result has the shape
        of the ids followed by that of a row: a NumPy array, or a tensor where the ids were a tensor. ``out``:
        a C-contiguous array or tensor to fill and return instead (or a mapping of them).

        Raises IdError; CorruptionError, DeviceError and what else went wrong in the owner; ClosedError where
        the owner is gone.
        """
        return self.prepare(ids, out=out).result()

    def submit(self, ids: Any, *, out: Any = None, at: Any = None) -> BufferRequest:
        """Ask ahead for rows of which :meth:`BufferRequest.result` waits. ``ids`` may be changed afterwards;
        ``out`` belongs to the request until its result was taken. With ``at``, integers as many as ids (or a
        mapping of such), row i goes to ``out[at[i]]``, and ``out`` may be longer. For futures that end by
        themselves see :class:`featstore.Shared`. Raises ClosedError, ArgumentError, IdError for ids that are
        no integers."""
        request = self.prepare(ids, out=out, at=at, copy=True)
        request._ask_ahead(0)
        return request

    def prepare(self, ids: Any, *, out: Any = None, at: Any = None, copy: bool = False) -> BufferRequest:
        """As :meth:`submit`, but nothing is asked before the result is; ``ids`` are not changed before that,
        unless there is a ``copy`` of them."""
        about = self.about()
        asked = ByTable.parse(about.tables, ids, out, at, copy=copy, who="this shared buffer")
        return BufferRequest(self, about, asked, ids, out)

    def holds(self, table: str, ids: Any) -> NDArray[np.bool_]:
        """bool [n], which of these rows (node ids [n]) are in the buffer now. Raises ClosedError, IdError,
        UnknownNameError."""
        one, wanted = self.table(table), parse_ids(ids).values
        held = np.empty(len(wanted), np.bool_)
        for low in range(0, len(wanted), one.piece_rows):
            part = slice(low, low + one.piece_rows)
            with self._exchange() as connection:
                connection.say(protocol.HOLDS, self._new_number(), wanted[part], table=one.number)
                answer = connection.hear()
            if answer.kind == protocol.ANSWER_ERROR:
                raise decode_error(answer.body)
            held[part] = np.frombuffer(answer.body, np.bool_)
        return held

    def stats(self, table: str | None = None) -> BufferStats:
        """What the owner has counted for all its clients, of one table or of all. Raises ClosedError,
        UnknownNameError."""
        only = None if table is None else self.table(table).number
        with self._exchange() as connection:
            connection.say(protocol.STATS)
            answer = connection.hear()
        counted = [BufferStats(**one) for one in json.loads(answer.body)]
        return BufferStats.sum(counted) if only is None else counted[only]

    # What is known of the rows.

    @property
    def tables(self) -> list[str]:
        """Names of the tables. Raises ClosedError."""
        return list(self.about().tables)

    def table(self, name: str) -> SharedTable:
        """What is known of a table: its ``rows``, ``row_shape``, ``dtype`` and ``row_bytes``. Raises
        ClosedError, UnknownNameError."""
        known = self.about().tables
        return known[known_name(name, known, NO_TABLE)]

    def about(self) -> About:
        """What the owner has said of its buffer: the store, and the tables. Raises ClosedError."""
        if self._about is None or self._closed:
            with self._exchange():
                pass
        assert self._about is not None
        return self._about

    # The exchange.

    def _new_number(self) -> int:
        return next(self._count) % _NUMBERS

    def _ask_ahead(self, piece: _Piece) -> None:
        with self._exchange() as connection:
            connection.say(protocol.AHEAD, piece.number, piece.ids, table=piece.table.number)

    def _fetch(self, piece: _Piece, was_asked: bool) -> int:
        """Wait for the rows of a piece of a request, and copy them out; how many of them were there. Raises
        what went wrong in the owner."""
        table = piece.table
        with self._exchange() as connection:
            if was_asked:
                connection.say(protocol.WANT, piece.number)
            else:
                connection.say(protocol.ASK, piece.number, piece.ids, table=table.number)
            answer = connection.hear()
            if answer.kind == protocol.AGAIN:
                connection.say(protocol.ASK, piece.number, piece.ids, table=table.number)
                answer = connection.hear()
            if answer.kind != protocol.ANSWER_ERROR:
                slots = address_of(connection.x) + table.offset
                move_rows(slots, answer.slots, piece.out, piece.places, table.row_bytes)
                connection.say(protocol.RELEASE, piece.number)
        if answer.kind == protocol.ANSWER_ERROR:
            raise decode_error(answer.body)
        return len(piece.ids) - answer.detail

    @contextmanager
    def _exchange(self) -> Iterator[Connection]:
        """The connection, for this thread alone; closed where the exchange breaks off."""
        with self._lock:
            if self._exchanging:
                raise ArgumentError(
                    "this client of a shared buffer is asking for rows, and what interrupts that, in a "
                    "signal's handler, can't ask through it, too; take another of the owner's clients"
                )
            self._exchanging = True
            try:
                connection = self._connect()
                while self._forgotten:
                    connection.say(protocol.RELEASE, self._forgotten[0])
                    self._forgotten.popleft()
                yield connection
            except BaseException:
                self._drop()
                raise
            finally:
                self._exchanging = False
                if self._closed:  # meanwhile
                    self._drop()

    def _connect(self) -> Connection:
        self._check_open()
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

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this client of a shared buffer is closed; take another from its owner")

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
        self._lock, self._exchanging = threading.RLock(), False

    def close(self) -> None:
        """Disconnect. The owner and other clients go on. May be called more than once, and by a signal's
        handler."""
        self._closed = True
        with self._lock:
            if not self._exchanging:  # else what this interrupts disconnects as it ends
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
