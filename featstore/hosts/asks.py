"""Rows that one host asks of another: a piece of a request, which fits a message."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import aligned_buffer
from featstore.base.rows import move_rows
from featstore.engine.request import Request
from featstore.hosts.messages import HEADER_BYTES, message, padded


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


class Ask:
    """Rows that are asked of one host, for a request: at most one part of each table. It ends once: with the
    rows, with an error, or by being cancelled, after which nothing is written to where they were to go."""

    def __init__(self, request: Request, parts: Sequence[AskPart], tables: int) -> None:
        self._request, self.parts = request, parts
        self._lock = threading.Lock()
        self._over = False
        self._tables = tables
        self.sent_at = 0.0  # monotonic seconds
        request.open_piece(self)

    @property
    def over(self) -> bool:
        """Whether the rows are not wanted any more."""
        return self._over

    @property
    def body_bytes(self) -> int:
        """Of the answer."""
        return sum(part.body_bytes for part in self.parts)

    @property
    def rows(self) -> int:
        return sum(len(part.ids) for part in self.parts)

    def message(self) -> NDArray[np.uint8]:
        """What is sent, but for the header: the number of ids of each table, and the ids."""
        raw = message(8 * (self._tables + self.rows))
        numbers = raw[HEADER_BYTES:].view(np.int64)
        end = self._tables
        for part in sorted(self.parts, key=lambda part: part.table):
            numbers[part.table] = len(part.ids)
            numbers[end : end + len(part.ids)] = part.ids
            end += len(part.ids)
        return raw

    def fill(self, body: NDArray[np.uint8]) -> None:
        """Put the rows where they go."""
        with self._lock:
            if self._over:
                return
            self._over = True
            begin = int(body.ctypes.data)
            for part in sorted(self.parts, key=lambda part: part.table):
                if len(part.ids):
                    move_rows(begin, np.empty(0, np.int32), part.address, part.at, part.row_bytes)
                begin += part.body_bytes
        self._request.close_piece(self, None)

    def end(self, error: BaseException | None) -> None:
        """There will be no rows."""
        with self._lock:
            if self._over:
                return
            self._over = True
        self._request.close_piece(self, error)

    def cancel(self) -> None:
        self.end(None)  # the request knows that it was cancelled


class AnswerPlace:
    """Where a host makes an answer: its rows, and the ids asked for as those of its own store."""

    def __init__(self, body_bytes: int, ids: int) -> None:
        self.message: NDArray[np.uint8] = aligned_buffer(HEADER_BYTES + body_bytes)
        self.body = self.message[HEADER_BYTES:]
        self.ids = np.empty(ids, np.int64)
