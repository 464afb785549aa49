"""A shared buffer as the last tier of a reader: rows come from the owner's buffers, and the owner reads what
these lack.

A request is served by one of a few threads, each with a client of its own, so that requests end by
themselves, and one that waits for the disk keeps none back whose rows are there; who waits for it anyhow
serves it himself. Pieces of a request are wanted, copied out and given back one after the other, as with any
client: no order of requests, in however many processes, can deadlock.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import shown
from featstore.base.system import CALLER, Turn, handed
from featstore.base.threads import Permits, shut_down, thread_pool
from featstore.engine.request import Request
from featstore.errors import ArgumentError, BudgetError, CancelledError, ClosedError
from featstore.shared.client import BufferClient, BufferRequest
from featstore.storage.store import OpenStore, Table
from featstore.tiers import RowSource, Tier
from featstore.tiers.over import OwnedTier
from featstore.tiers.static_tier import new_rows

_THREADS = 4  # requests that wait for rows at once
_ID_BYTES = 12  # of an id that is under way: the owner's answer, and its place


class Shared:
    """Rows of a shared buffer: the last tier, for its owner reads the disk, and no reader is opened here.

    ``client``: of a :class:`featstore.SharedBuffer` of the same store; the tier makes clients of its own from
    it. When pickled, a reader with this tier is made anew in the other process; a forked child makes one from
    the client. Raises ArgumentError.
    """

    def __init__(self, client: BufferClient) -> None:
        if not isinstance(client, BufferClient):
            raise ArgumentError(
                f"client must be a client of a shared buffer (SharedBuffer.client()), not {shown(client)}"
            )
        self.client = client

    def tables_of(self, store: OpenStore) -> list[str]:
        """Names of the tables that the buffer has. Raises ArgumentError where it is of another store,
        ClosedError where its owner is gone."""
        about = self.client.about()
        if about.uuid != store.uuid:
            raise ArgumentError(
                f"the shared buffer has rows of the store {about.path} ({about.uuid}), this reader is of "
                f"{store.path} ({store.uuid}): take a client of a buffer of the same store"
            )
        return list(about.tables)

    def host_bytes(self, tables: Sequence[Table]) -> int:
        pieces = [self.client.table(table.name).piece_rows for table in tables]
        return _THREADS * _ID_BYTES * max(pieces, default=0)

    def least_bytes(self, tables: Sequence[Table]) -> int:
        return self.host_bytes(tables)

    def over(self, below: RowSource, memory_bytes: int) -> Tier:
        raise ArgumentError(
            "Shared stands over nothing: the owner of the shared buffer reads the disk, and what lies below "
            "would never be asked; make it the last of tiers="
        )

    def as_source(self, store: OpenStore, tables: Sequence[str], memory_bytes: int) -> SharedTier:
        """The tier, for these tables of a store."""
        self.tables_of(store)
        needed = self.host_bytes([store.table(name) for name in tables])
        if memory_bytes < needed:
            raise BudgetError(needed, memory_bytes, "ask a shared buffer for rows")
        return SharedTier(self.client, store, tables, needed)

    def __repr__(self) -> str:
        return f"Shared({self.client!r})"


class _Job:
    """A request that is served by a client."""

    def __init__(self, request: Request, ids: Any, out: Any, at: Any) -> None:
        self.request, self.ids, self.out, self.at = request, ids, out, at
        self._asked: BufferRequest | None = None
        self._cancelled = False

    def fill(self, client: BufferClient) -> int:
        """Wait for the rows; how many were there."""
        asked = self._asked = client.prepare(self.ids, out=self.out, at=self.at)
        if self._cancelled:
            raise CancelledError("the request was cancelled; submit it again where its rows are wanted")
        asked.result()
        return asked.hits

    def cancel(self) -> None:
        self._cancelled = True
        asked = self._asked
        if asked is not None:
            asked.cancel()


class SharedTier(OwnedTier):
    """Rows of these tables of a shared buffer, through clients that are made from one. It belongs to one
    process. Raises ClosedError where the buffer's owner is gone."""

    name = "shared"

    def __init__(
        self, client: BufferClient, store: OpenStore, tables: Sequence[str], memory_bytes: int
    ) -> None:
        super().__init__()
        self.store, self.tables = store, list(tables)
        self.memory_bytes, self._hits, self._counting = memory_bytes, 0, threading.Lock()
        self._first = copy.copy(client)  # which connects anew: the user's may be closed, or busy
        self._first.about()
        self._idle = deque([copy.copy(client)])
        self._pool = thread_pool(_THREADS, "featstore-shared-tier")
        self._under_way = Permits(2 * _THREADS)
        self._serving = Permits(_THREADS)

    def submit(
        self, ids: Mapping[str, Any], *, out: Mapping[str, Any] | None, at: Mapping[str, Any] | None = None
    ) -> Request:
        limit = self._under_way
        limit.acquire()
        request, job = self._begin(ids, out, at, limit.release)

        turn = Turn()

        def refused(error: BaseException) -> None:
            closed = type(error) is RuntimeError  # the pool takes nothing any more
            request.close_piece(job, ClosedError("the shared tier is closed") if closed else error)

        try:
            handed(self._pool, partial(self._serve, job), refused, turn)
        except BaseException as error:
            interrupt = error
            request.abandon(lambda: refused(interrupt) if turn.is_of(CALLER) else None)
            raise
        return request

    def submit_waiting(
        self, ids: Mapping[str, Any], *, out: Mapping[str, Any] | None, at: Mapping[str, Any] | None = None
    ) -> Request:
        """As :meth:`submit`, for who has nothing else to do meanwhile: the request is done."""
        request, job = self._begin(ids, out, at, lambda: None)
        self._serve(job)
        return request

    def _begin(
        self, ids: Mapping[str, Any], out: Mapping[str, Any] | None, at: Mapping[str, Any] | None,
        on_end: Callable[[], object],
    ) -> tuple[Request, _Job]:  # fmt: skip
        try:
            self.check_open()
            filled = new_rows(self, ids) if out is None else dict(out)
            to = filled if at is not None else {name: filled[name][: len(one)] for name, one in ids.items()}
            request = Request(lambda: filled)
        except BaseException:
            on_end()
            raise
        request.add_done_callback(lambda _: on_end())
        request.begin()
        job = _Job(request, ids, to, at)
        request.open_piece(job)
        request.close_piece(None, None)
        return request, job

    def _serve(self, job: _Job) -> None:
        """Fill a request, through a client that nobody else uses."""
        error: BaseException | None = None
        try:
            with self._serving:
                self._fill(job)
        except BaseException as failure:
            error = failure
        job.request.close_piece(job, error)

    def _fill(self, job: _Job) -> None:
        try:
            client = self._idle.pop()
        except IndexError:
            client = copy.copy(self._first)
        try:
            hits = job.fill(client)
        finally:
            if self._closed:
                client.close()
            else:
                self._idle.append(client)
        with self._counting:
            self._hits += hits

    def holds(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Rows that are in the owner's buffer now."""
        self.check_open()
        return self._first.holds(table, ids)

    def hits(self) -> int:
        return self._hits

    def close(self) -> None:
        if not self.here:
            return
        self._closed = True
        shut_down(self._pool)
        taken = 0
        try:
            while taken < _THREADS:  # who reads in a thread of his own comes to an end
                self._serving.acquire()
                taken += 1
        finally:  # who was interrupted may close again
            self._serving.release(taken)
        for client in (self._first, *self._idle):
            client.close()

    def __repr__(self) -> str:
        return f"<SharedTier of {self.tables}, {self.memory_bytes:,} bytes>"
