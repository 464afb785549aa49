"""The feeder: requests on their way from planning to the engine.

One thread of its own plans every request and starts its lanes, a bounded number of pieces at once. So no
signal interrupts a request half-way, with reads under way that nobody waits for: whoever is interrupted
abandons the request, which ends when its reads have.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from featstore.base.logs import LOG
from featstore.base.system import no_thread
from featstore.base.threads import Permits, SafeCondition, shut_down, thread_pool
from featstore.engine.base import Engine
from featstore.engine.lane import Lane
from featstore.engine.request import Request
from featstore.errors import ClosedError
from featstore.plan.budget import PIECES_IN_FLIGHT
from featstore.reader.report import Counts

#: Plans a piece: makes its lane with the callback it is given, or None where nothing is to be read.
MakeLane = Callable[[Callable[[Lane], None]], Lane | None]


class Feeder:
    """Feeds one engine; see the module's text. ``path`` is for messages."""

    def __init__(self, engine: Engine, counts: Counts, path: Path) -> None:
        self._engine = engine
        self._counts = counts
        self._path = path
        self._planner = thread_pool(1, "featstore-plan")
        self._pieces = Permits(PIECES_IN_FLIGHT)
        self._idle = SafeCondition()
        self._open_requests = 0
        self._closed = False

    def feed(self, request: Request, pieces: Iterable[MakeLane]) -> None:
        """Have a request's pieces planned and started, soon. Raises ClosedError; DeviceError where no thread
        can be started."""
        try:
            self._planner.submit(self._feed, request, pieces)
        except RuntimeError as error:
            if self._closed:
                raise ClosedError("the reader is closed; make another with store.reader()") from None
            raise no_thread(error) from error

    def _feed(self, request: Request, pieces: Iterable[MakeLane]) -> None:
        if not request.begin():
            return
        with self._idle:
            self._open_requests += 1
        request.add_done_callback(self._end)
        self._counts.add(requests=1)
        error: BaseException | None = None
        try:
            for make_lane in pieces:
                if not self._start(request, make_lane):
                    break
        except BaseException as failure:
            error = failure
        request.close_piece(None, error)

    def _end(self, _: Future[Any]) -> None:
        with self._idle:
            self._open_requests -= 1
            self._idle.notify_all()

    def _start(self, request: Request, make_lane: MakeLane) -> bool:
        """Plan and start a piece, as soon as there is room for it; False where the request has stopped."""
        pieces = self._pieces
        pieces.acquire()
        lane, begin = None, time.perf_counter()

        def on_done(lane: Lane) -> None:
            pieces.release()
            if LOG.isEnabledFor(logging.DEBUG):
                _tell(lane, time.perf_counter() - begin)
            request.close_piece(lane, lane.error())

        try:
            if request.stopped():
                return False
            lane = make_lane(on_done)
        finally:
            if lane is None:
                pieces.release()
        if lane is not None:
            request.open_piece(lane)
            try:
                self._engine.start(lane)
            except BaseException as failure:
                pieces.release()
                request.close_piece(lane, failure)
                return False
        return True

    def close(self) -> None:
        """Take no more requests, and wait for those under way. May be called more than once."""
        self._closed = True
        shut_down(self._planner)
        with self._idle:
            while self._open_requests:
                self._idle.wait()


def _tell(lane: Lane, seconds: float) -> None:
    """Say of a piece of a request what was read, and how long planning and reading took."""
    where = lane.files.paths[0].parent if lane.files.paths else "an empty table"
    error = lane.error()
    ended = "" if error is None else f", and ended with {type(error).__name__}"
    LOG.debug("%s: %d reads of %d pages in %.2f ms%s", where, lane.extents, lane.pages, 1000 * seconds, ended)
