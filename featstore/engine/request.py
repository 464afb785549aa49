"""A request under way: what :meth:`featstore.reader.reader.Reader.submit` returns."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Protocol

from featstore.arguments import as_number
from featstore.base.threads import SafeCondition
from featstore.errors import CancelledError, ClosedError, WaitTimeoutError


def _pass(request: Request, to: Future[Any]) -> None:
    """Hand over how a request ended."""
    if not to.set_running_or_notify_cancel():
        return
    error = request.exception()
    if error is None:
        to.set_result(request.result())
    else:
        to.set_exception(error)


class UnderWay(Protocol):
    """What a request has under way: a lane, or what a tier asked of another."""

    def cancel(self) -> object:
        """Start no more reads."""


class Request(Future[Any]):
    """Rows on their way: a :class:`concurrent.futures.Future`, which :func:`concurrent.futures.wait` and
    :func:`asyncio.wrap_future` take, and which can be awaited.

    Until it is done, a request's ``out`` belongs to it. After ``cancel()`` the request is done when its reads
    under way have ended; ``out`` then holds some rows and not others.

    A request belongs to the process that made it: in a forked child, one that was not done before the fork
    has failed with ClosedError.
    """

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._pid = os.getpid()
        super().__init__()
        self._own_condition: threading.Condition = SafeCondition()
        # only close_piece ends it: reads under way still write into the rows
        self.set_running_or_notify_cancel()
        self._finish = finish  # makes the result of the filled arrays
        self._lock = threading.Lock()
        # whether planning has begun, after which only the request's own pieces may end it
        self._begun = False
        self._pieces: set[UnderWay | None] = {None}  # under way; None is the planning
        self._error: BaseException | None = None
        self._cancelled = False

    def result(self, timeout: float | None = None) -> Any:
        """The rows. Raises what went wrong; WaitTimeoutError, a TimeoutError, after ``timeout`` seconds;
        CancelledError after a cancel; ClosedError for rows that were on their way when this process was
        forked."""
        return super().result() if timeout is None else self._within(timeout, super().result)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What went wrong, or None; waits like :meth:`result`."""
        return super().exception() if timeout is None else self._within(timeout, super().exception)

    def _within(self, timeout: float, wait: Callable[[float], Any]) -> Any:
        seconds = min(as_number(timeout, "timeout"), threading.TIMEOUT_MAX)
        try:
            return wait(seconds)
        except TimeoutError:
            if self.done():
                return wait(0)  # it came at the last moment, or this is how it ended
            raise WaitTimeoutError(
                f"the rows have not come within {seconds:g} seconds; ask again, or cancel"
            ) from None

    def cancel(self) -> bool:
        """Start no more reads for this request. Returns False if it was done already."""
        if self.done():
            return False
        with self._lock:
            if self.done():
                return False
            self._cancelled = True
            pieces = list(self._pieces)
        for piece in pieces:
            if piece is not None:
                piece.cancel()
        return True

    def cancelled(self) -> bool:
        """Whether the request ended by being cancelled."""
        return self.done() and isinstance(super().exception(), CancelledError)

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        """All that a Future does, and all who wait for it, take this lock first."""
        if self._pid != os.getpid():
            self._after_fork()
        return self._own_condition

    @_condition.setter
    def _condition(self, condition: threading.Condition) -> None:
        self._own_condition = condition

    def _after_fork(self) -> None:
        """Nobody in this process will end it, and a thread of the parent may have held its locks."""
        self._own_condition, self._lock = SafeCondition(), threading.Lock()
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []
        if self._state != "FINISHED":  # which is set last
            self._exception = ClosedError(
                "this request was made before a fork, by the parent process; make it in this process"
            )
            self._state = "FINISHED"
        self._pid = os.getpid()

    def __await__(self) -> Generator[Any, None, Any]:
        passed: Future[Any] = Future()  # for asyncio would take our CancelledError for its own
        self.add_done_callback(lambda _: _pass(self, passed))
        try:
            return (yield from asyncio.wrap_future(passed).__await__())
        except asyncio.CancelledError:  # a timeout, or a cancelled task
            self.cancel()
            raise

    # What the reader calls.

    def begin(self) -> bool:
        """Planning begins; False where the request was abandoned before."""
        with self._lock:
            if self.done():
                return False
            self._begun = True
            return True

    def answer(self, error: BaseException | None) -> None:
        """It is done, or has failed, before anything was under way."""
        self.begin()
        self.close_piece(None, error)

    def abandon(self, give_up: Callable[[], None] = lambda: None) -> None:
        """The caller is leaving with an exception: cancel, and come back only when nothing writes into
        ``out`` any more. ``give_up`` ends what nobody else would; interrupted, it is called again."""
        while True:
            try:
                if self.done():
                    return
                give_up()
                with self._lock:
                    if not self._begun and not self.done():
                        self.set_exception(CancelledError("the request was abandoned"))
                self.cancel()
                super().exception()
            except KeyboardInterrupt:
                continue  # the first interrupt is on its way to the caller

    def stopped(self) -> bool:
        """Whether planning should go no further."""
        with self._lock:
            return self._cancelled or self._error is not None

    def open_piece(self, piece: UnderWay) -> None:
        with self._lock:
            self._pieces.add(piece)
            cancelled = self._cancelled
        if cancelled:
            piece.cancel()

    def close_piece(self, piece: UnderWay | None, error: BaseException | None) -> None:
        """A piece, or with None the planning, has ended; the last one completes the request. Of one that has
        ended already, or was never begun, nothing follows, but an end that an interrupt broke off."""
        with self._lock:
            if piece in self._pieces:
                self._pieces.remove(piece)
                if error is not None and self._error is None:
                    self._error = error
            if self._pieces or self.done():
                return
        if self._error is None and self._cancelled:
            self._error = CancelledError(
                "the request was cancelled; submit it again where its rows are wanted"
            )
        with suppress(InvalidStateError):  # who was interrupted here comes again
            if self._error is not None:
                self.set_exception(self._error)
                return
            try:
                made = self._finish()
            except Exception as failure:
                self.set_exception(failure)
            else:
                self.set_result(made)


def answered(result: Any) -> Request:
    """A request that is done."""
    request = Request(lambda: result)
    request.answer(None)
    return request


def in_pieces(
    result: Any, open_pieces: Callable[[Request], None],
    give_up: Callable[[BaseException], None] = lambda error: None,
) -> Request:  # fmt: skip
    """A request that is done when all pieces are that ``open_pieces`` opens. What that raises is raised when
    those that were opened have been abandoned: nothing may write into rows that the caller has back.
    ``give_up`` ends those that nobody has begun, and may be called more than once."""
    request = Request(lambda: result)
    request.begin()
    try:
        open_pieces(request)
        request.close_piece(None, None)
    except BaseException as error:
        failure = error

        def end() -> None:
            give_up(failure)
            request.close_piece(None, failure)

        request.abandon(end)
        raise
    return request


def chained(below: Request, finish: Callable[[], Any]) -> Request:
    """A request that is done when another is, or fails as it does; with a result of its own."""
    try:
        request = Request(finish)
        request.begin()
        request.open_piece(below)
        below.add_done_callback(lambda done: request.close_piece(done, done.exception()))
        request.close_piece(None, None)
    except BaseException:
        below.abandon()
        raise
    return request
