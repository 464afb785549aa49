"""What one host asks of another: a piece of a request, which fits a message. Rows, here; neighbours in
:mod:`featstore.hosts.questions`."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
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
    """Rows of one host, at most one part of each table."""

    kind = Kind.ASK

    def __init__(self, request: Request, parts: Sequence[AskPart], tables: int) -> None:
        super().__init__(request)
        self.parts, self._tables = parts, tables

    @property
    def body_bytes(self) -> int:
        """Of the answer."""
        return sum(part.body_bytes for part in self.parts)

    @property
    def rows(self) -> int:
        return sum(len(part.ids) for part in self.parts)

    def message(self) -> NDArray[np.uint8]:
        """The number of ids of each table, and the ids."""
        raw = message(8 * (self._tables + self.rows))
        numbers = raw[HEADER_BYTES:].view(np.int64)
        end = self._tables
        for part in sorted(self.parts, key=lambda part: part.table):
            numbers[part.table] = len(part.ids)
            numbers[end : end + len(part.ids)] = part.ids
            end += len(part.ids)
        return raw

    def wrong(self, body: NDArray[np.uint8]) -> str:
        if len(body) == self.body_bytes:
            return ""
        return f"has answered {len(body):,} bytes where {self.body_bytes:,} were asked for"

    def _put(self, body: NDArray[np.uint8]) -> None:
        begin = int(body.ctypes.data)
        for part in sorted(self.parts, key=lambda part: part.table):
            if len(part.ids):
                move_rows(begin, np.empty(0, np.int32), part.address, part.at, part.row_bytes)
            begin += part.body_bytes


class AnswerPlace:
    """Where a host makes an answer: its rows, and the ids asked for as those of its own store."""

    def __init__(self, body_bytes: int, ids: int) -> None:
        self.message: NDArray[np.uint8] = aligned_buffer(HEADER_BYTES + body_bytes)
        self.body = self.message[HEADER_BYTES:]
        self.ids = np.empty(ids, np.int64)
