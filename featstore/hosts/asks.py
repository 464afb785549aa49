"""What one host asks of another: a piece of a request, which fits a message. Rows, here; neighbours in
:mod:`featstore.hosts.questions`."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import aligned_buffer
from featstore.base.rows import move_rows
from featstore.engine.request import Request
from featstore.hosts.messages import HEADER_BYTES, Kind, message, padded


class AskPart(NamedTuple):
    """Rows of one table: ``ids`` int64 [n], node ids of one owner; row i goes to row ``at[i]`` (int32) of
    what lies at ``address``; ``held`` keeps that alive."""

    table: int
    ids: NDArray[np.int64]
    address: int
    at: NDArray[np.int32]
    row_bytes: int
    held: Any

    @property
    def body_bytes(self) -> int:
        """Of the answer, what is of this table."""
        return padded(len(self.ids) * self.row_bytes)


class Ask(ABC):
    """What is asked of one host, for a request. It ends once: with what was asked for, with an error, or by
    being cancelled, after which nothing is written to where it was to go."""

    kind: ClassVar[Kind]

    def __init__(self, request: Request) -> None:
        self._request = request
        self._lock = threading.Lock()
        self._over = False
        self.sent_at = 0.0  # monotonic seconds
        request.open_piece(self)

    @property
    def over(self) -> bool:
        """Whether it is not wanted any more."""
        return self._over

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows, or lists, that are asked for."""

    def take_along(self, other: Ask, body_bytes: int, ids_max: int) -> bool:
        """Whether another one, which waits for the same host, goes in the same message."""
        return False

    def apart(self) -> list[Ask]:
        """All that have gone in the same message, if there are several: each goes by itself from now on."""
        return []

    @abstractmethod
    def message(self) -> NDArray[np.uint8]:
        """What is sent, but for the header."""

    @abstractmethod
    def wrong(self, body: NDArray[np.uint8]) -> str:
        """Why this is no answer to what was asked; empty where it is one."""

    @abstractmethod
    def _put(self, body: NDArray[np.uint8]) -> None:
        """Put what has come where it goes."""

    def fill(self, body: NDArray[np.uint8]) -> None:
        """Take an answer."""
        failed = None
        with self._lock:
            if self._over:
                return
            self._over = True
            try:
                self._put(body)
            except Exception as error:  # there is no memory for it: whoever waits is told
                failed = error
        self._request.close_piece(self, failed)

    def end(self, error: BaseException | None) -> None:
        """There will be no answer."""
        with self._lock:
            if self._over:
                return
            self._over = True
        self._request.close_piece(self, error)

    def cancel(self) -> None:
        self.end(None)  # the request knows that it was cancelled


class RowsAsk(Ask):
    """Rows of one host, at most one part of each table. Others that wait for the same host may go in its
    message."""

    kind = Kind.ASK

    def __init__(self, request: Request, parts: Sequence[AskPart], tables: int) -> None:
        self.parts, self._tables = sorted(parts, key=lambda part: part.table), tables
        self._others: list[RowsAsk] = []  # in the message
        self._alone = False
        self._rows, self._bytes = sum(len(p.ids) for p in parts), sum(p.body_bytes for p in parts)  # of all
        self._begins: list[int] = []  # of each part's rows in the answer, once the message is made
        self._answer_bytes = 0
        super().__init__(request)

    @property
    def rows(self) -> int:
        return self._rows

    def take_along(self, other: Ask, body_bytes: int, ids_max: int) -> bool:
        """Whether another one goes in this one's message, and an answer has so many bytes and rows."""
        if not isinstance(other, RowsAsk) or self._alone or other._alone:
            return False
        rows, byte_count = self._rows + other._rows, self._bytes + other._bytes
        if rows > ids_max or byte_count > body_bytes:
            return False
        self._others.append(other)
        self._rows, self._bytes = rows, byte_count
        return True

    def apart(self) -> list[Ask]:
        if not self._others:
            return []
        asks, self._others = [self, *self._others], []
        self._rows -= sum(ask._rows for ask in asks[1:])
        self._bytes -= sum(ask._bytes for ask in asks[1:])
        for ask in asks:
            ask._alone, ask._begins = True, []
        return [*asks]

    def message(self) -> NDArray[np.uint8]:
        """The number of ids of each table, and the ids."""
        raw = message(8 * (self._tables + self.rows))
        numbers = raw[HEADER_BYTES:].view(np.int64)
        end, begin = self._tables, 0
        parts = sorted(
            ((p, ask) for ask in (self, *self._others) for p in ask.parts), key=lambda one: one[0].table
        )
        for table, of_table in groupby(parts, key=lambda one: one[0].table):
            for part, ask in of_table:
                numbers[table] += len(part.ids)
                numbers[end : end + len(part.ids)] = part.ids
                end += len(part.ids)
                ask._begins.append(begin)
                begin += len(part.ids) * part.row_bytes
            begin = padded(begin)
        self._answer_bytes = begin
        return raw

    def wrong(self, body: NDArray[np.uint8]) -> str:
        if len(body) == self._answer_bytes:
            return ""
        return f"has answered {len(body):,} bytes where {self._answer_bytes:,} were asked for"

    def fill(self, body: NDArray[np.uint8]) -> None:
        for ask in (self, *self._others):
            super(RowsAsk, ask).fill(body)

    def end(self, error: BaseException | None) -> None:
        for ask in (self, *self._others):
            super(RowsAsk, ask).end(error)

    def cancel(self) -> None:
        super().end(None)  # those that go with it are wanted

    def _put(self, body: NDArray[np.uint8]) -> None:
        for part, begin in zip(self.parts, self._begins, strict=True):
            if len(part.ids):
                first = int(body.ctypes.data) + begin
                move_rows(first, np.empty(0, np.int32), part.address, part.at, part.row_bytes)


class AnswerPlace:
    """Where a host makes an answer: its rows, and the ids asked for as those of its own store."""

    def __init__(self, body_bytes: int, ids: int) -> None:
        self.message: NDArray[np.uint8] = aligned_buffer(HEADER_BYTES + body_bytes)
        self.body = self.message[HEADER_BYTES:]
        self.ids = np.empty(ids, np.int64)
