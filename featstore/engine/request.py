"""A request under way: what :meth:`featstore.reader.reader.Reader.submit` returns."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from featstore.arguments import as_number
from featstore.errors import CancelledError, ClosedError, WaitTimeoutError

if TYPE_CHECKING:
    from featstore.engine.lane import Lane


class Request:
    """Rows on their way. ``result()`` waits for them; ``done()``, ``cancel()`` and ``await request`` are what
    they are for :class:`concurrent.futures.Future`.

    Until it is done, a request's ``out`` belongs to it. After ``cancel()`` the request is done when its reads
    under way have ended; ``out`` then holds some rows and not others.

    A request belongs to the process that made it: in a forked child, one that was not done before the fork
    has failed with ClosedError.
    """

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._future: Future[Any] = Future()
        # only close_piece ends it: reads under way still write into the rows
        self._future.set_running_or_notify_cancel()
        self._pid = os.getpid()
        self._finish = finish  # makes the result of the filled arrays
        self._lock = threading.Lock()
        # whether planning has begun, after which only the request's own pieces may end it
        self._begun = False
        self._open = 1  # pieces under way, and one for the planning
        self._lanes: set[Lane] = set()
        self._error: BaseException | None = None
        self._cancelled = False

    def result(self, timeout: float | None = None) -> Any:
        """The rows. Raises what went wrong; WaitTimeoutError, a TimeoutError, after ``timeout`` seconds;
        CancelledError after a cancel; ClosedError for rows that were on their way when this process was
        forked."""
        future = self._here()
        return future.result() if timeout is None else self._within(timeout, future.result)

    def done(self) -> bool:
        """Whether the rows are there, or the request has failed or been cancelled."""
        return self._here().done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What went wrong, or None; waits like :meth:`result`."""
        future = self._here()
        return future.exception() if timeout is None else self._within(timeout, future.exception)

    def _within(self, timeout: float, wait: Callable[[float], Any]) -> Any:
        seconds = min(as_number(timeout, "timeout"), threading.TIMEOUT_MAX)
        try:
            return wait(seconds)
        except TimeoutError:
            if self._future.done():
                return wait(0)  # it came at the last moment, or this is how it ended
            raise WaitTimeoutError(
                f"the rows have not come within {seconds:g} seconds; ask again, or cancel"
            ) from None

    def cancel(self) -> bool:
        """Start no more reads for this request. Returns False if it was done already."""
        if self._here().done():
            return False
        with self._lock:
            if self._future.done():
                return False
            self._cancelled = True
            for lane in self._lanes:
                lane.cancel()
        return True

    def cancelled(self) -> bool:
        """Whether the request ended by being cancelled."""
        future = self._here()
        return future.done() and isinstance(future.exception(), CancelledError)

    def _here(self) -> Future[Any]:
        """The future, as this process has it. After a fork nobody here will end it, and a thread of the
        parent may have held its lock."""
        if self._pid == os.getpid():
            return self._future
        inherited, own = self._future, Future[Any]()
        if inherited._state != "FINISHED":  # which is set last
            own.set_exception(
                ClosedError(
                    "this request was made before a fork, by the parent process; make it in this process"
                )
            )
        elif inherited._exception is not None:
            own.set_exception(inherited._exception)
        else:
            own.set_result(inherited._result)
        self._future, self._lock, self._pid = own, threading.Lock(), os.getpid()
        return own

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from asyncio.wrap_future(self._here()).__await__())
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
        """The caller is leaving with an exception: cancel, and come back only when nothing writes into
        ``out`` any more."""
        if self._here().done():
            return
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
