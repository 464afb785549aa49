"""A request under way: what :meth:`featstore.reader.Reader.submit` returns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from featstore.errors import CancelledError

if TYPE_CHECKING:
    from featstore.engine.lane import Lane


class Request:
    """Rows on their way. ``result()`` waits for them; ``done()``, ``cancel()`` and ``await request`` are what they are
    for :class:`concurrent.futures.Future`.

    Until it is done, a request's ``out`` belongs to it. After ``cancel()`` the request is done when its reads under way
    have ended; ``out`` then holds some rows and not others.
    """

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._future: Future[Any] = Future()
        self._future.set_running_or_notify_cancel()  # only close_piece ends it: reads under way still write into the rows
        self._finish = finish  # makes the result of the filled arrays
        self._lock = threading.Lock()
        self._begun = False  # whether planning has begun, after which only the request's own pieces may end it
        self._open = 1  # pieces under way, and one for the planning
        self._lanes: set[Lane] = set()
        self._error: BaseException | None = None
        self._cancelled = False

    def result(self, timeout: float | None = None) -> Any:
        """The rows. Raises what went wrong; TimeoutError after ``timeout`` seconds; CancelledError after a cancel."""
        return self._future.result(timeout)

    def done(self) -> bool:
        """Whether the rows are there, or the request has failed or been cancelled."""
        return self._future.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What went wrong, or None; waits like :meth:`result`."""
        return self._future.exception(timeout)

    def cancel(self) -> bool:
        """Start no more reads for this request. Returns False if it was done already."""
        with self._lock:
            if self._future.done():
                return False
            self._cancelled = True
            for lane in self._lanes:
                lane.cancel()
        return True

    def cancelled(self) -> bool:
        """Whether the request ended by being cancelled."""
        return self._future.done() and isinstance(self._future.exception(), CancelledError)

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from asyncio.wrap_future(self._future).__await__())
        except asyncio.CancelledError:  # a timeout, or a cancelled task
            self.cancel()
            raise

    # What the reader calls.

    def begin(self) -> bool:
        """Planning begins; False where the request was abandoned before."""
        with self._lock:
            if self._future.done():
                return False
            self._begun = True
            return True

    def abandon(self) -> None:
        """The caller is leaving with an exception: cancel, and come back only when nothing writes into ``out`` any more."""
        with self._lock:
            if not self._begun and not self._future.done():
                self._future.set_exception(CancelledError("the request was abandoned"))
        self.cancel()
        while not self._future.done():
            try:
                self._future.exception()
            except KeyboardInterrupt:
                continue  # the first interrupt is on its way to the caller

    def stopped(self) -> bool:
        """Whether planning should go no further."""
        with self._lock:
            return self._cancelled or self._error is not None

    def open_piece(self, lane: Lane) -> None:
        with self._lock:
            self._open += 1
            self._lanes.add(lane)
            if self._cancelled:
                lane.cancel()

    def close_piece(self, lane: Lane | None, error: BaseException | None) -> None:
        """A piece, or with ``lane`` None the planning, has ended; the last one completes the request."""
        with self._lock:
            self._open -= 1
            if lane is not None:
                self._lanes.discard(lane)
            if error is not None and self._error is None:
                self._error = error
            if self._open:
                return
        if self._error is None and self._cancelled:
            self._error = CancelledError("the request was cancelled")
        if self._error is not None:
            self._future.set_exception(self._error)
            return
        try:
            self._future.set_result(self._finish())
        except Exception as failure:
            self._future.set_exception(failure)
