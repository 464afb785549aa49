"""What is asked for at once goes on as one request: rows of all tables of a mini-batch, of which each has a
buffer that asks for its own. So another host is asked in one message, and a tier below has one request for a
mini-batch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from featstore.engine.request import Request
from featstore.errors import CancelledError
from featstore.tiers import RowSource
from featstore.tiers.over import OverSource

_Piece = TypeVar("_Piece")


class _Asked(NamedTuple):
    """Of one who asks."""

    request: Request
    ids: Mapping[str, Any]
    out: Mapping[str, Any]
    at: Mapping[str, Any] | None


class _Share:
    """A part of the request ``below``. ``left`` [1]: of how many it is still wanted."""

    def __init__(self, below: Request, left: list[int], lock: threading.Lock) -> None:
        self._below: Request | None = below
        self._left, self._lock, self._wanted = left, lock, True

    def cancel(self) -> None:
        """The last one who does not want it any more stops it."""
        with self._lock:
            self._left[0] -= self._wanted
            self._wanted = False
            below = None if self._left[0] else self._below
        if below is not None:
            below.cancel()

    def over(self) -> None:
        """It is done: nothing that it has keeps it from being freed."""
        self._below = None


class Bundle(OverSource):
    """Gives the rows of ``below``. What is asked for within :meth:`together`, of one table after the other,
    is one request there. It belongs to one process."""

    name = "bundle"

    def __init__(self, below: RowSource) -> None:
        super().__init__(below)
        self._lock = threading.Lock()
        self._held: list[_Asked] | None = None  # within together()

    def submit(
        self, ids: Mapping[str, Any], *, out: Mapping[str, Any] | None, at: Mapping[str, Any] | None = None
    ) -> Request:
        self.check_open()
        with self._lock:
            held = self._held
            new = held is not None and not any(one.ids.keys() & ids.keys() for one in held)
            if held is not None and new and out is not None:
                request = Request(lambda: out)
                held.append(_Asked(request, ids, out, at))
                return request
        return self._below.submit(ids, out=out, at=at)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is asked for in here with ``out`` is asked of ``below`` at the end, and cancelled
        where this ends with an error: nobody may wait for it in here. One thread at a time. Raises what
        ``below`` raises, with which all that was asked for then fails."""
        with self._lock:
            self._held = []
        try:
            yield
        except BaseException:
            for one in self._taken():
                one.request.answer(CancelledError("what it was asked for together with has failed"))
            raise
        self._pass_on(self._taken())

    def _taken(self) -> list[_Asked]:
        with self._lock:
            held, self._held = self._held or [], None
        return held

    def _pass_on(self, held: list[_Asked]) -> None:
        below, shares = None, list[tuple[Request, _Share]]()
        try:
            wanted = [one for one in held if one.request.begin()]  # and was not given up
            wanted = [one for one in wanted if not _cancelled(one.request)]
            if not wanted:
                return
            below = self._below.submit(
                {name: ids for one in wanted for name, ids in one.ids.items()},
                out={name: rows for one in wanted for name, rows in one.out.items()},
                at=_places(wanted),
            )
            left = [len(wanted)]
            for one in wanted:
                shares.append((one.request, _Share(below, left, self._lock)))
                one.request.open_piece(shares[-1][1])
                below.add_done_callback(partial(_ended, *shares[-1]))
                one.request.close_piece(None, None)
        except BaseException as error:
            if below is not None:
                below.abandon()
            for request, share in shares:
                request.close_piece(share, error)
            for one in held:
                one.request.close_piece(None, error)
            raise

    def close(self) -> None:
        self._closed = True

    def __repr__(self) -> str:
        return f"<Bundle over {self._below!r}>"


def _places(wanted: Sequence[_Asked]) -> dict[str, Any] | None:
    """Where rows go; None where all go where their ids are."""
    if all(one.at is None for one in wanted):
        return None
    places: dict[str, Any] = {}
    for one in wanted:
        own = {name: np.arange(len(ids), dtype=np.int32) for name, ids in one.ids.items()}
        places |= own if one.at is None else one.at
    return places


def in_turns(of_tables: Mapping[str, Sequence[_Piece]]) -> Iterator[list[_Piece]]:
    """Pieces of tables: the first of each, the second of each, and so on."""
    for number in range(max(map(len, of_tables.values()), default=0)):
        yield [pieces[number] for pieces in of_tables.values() if number < len(pieces)]


def _cancelled(request: Request) -> bool:
    """Whether a request was cancelled, which ends it."""
    if request.stopped():
        request.close_piece(None, None)
        return True
    return False


def _ended(request: Request, share: _Share, below: Any) -> None:
    share.over()
    request.close_piece(share, below.exception())
