"""Threads that do their shares of one work after another, which takes them some microseconds to begin."""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from featstore.base.threads import Worker

_APART_BYTES = 128  # lines of the caches are fetched by two
_Share = Callable[[int], None]


class Crew:
    """``threads``, of which the caller is one; a context manager, which ends the others.

    Raises DeviceError where there can be no more threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._works: list[queue.SimpleQueue[_Share | None]] = []
        self._helpers: list[Worker] = []
        try:
            for number in range(1, threads):
                works: queue.SimpleQueue[_Share | None] = queue.SimpleQueue()
                helper = Worker(partial(self._help, works, number), name)
                self._works.append(works)
                self._helpers.append(helper)
                helper.start()
        except BaseException:
            self._end()
            raise

    def _help(self, works: queue.SimpleQueue[_Share | None], number: int) -> None:
        while (work := works.get()) is not None:
            try:
                work(number)
                self._done.put(None)
            except BaseException as error:
                self._done.put(error)

    def run(self, work: _Share, threads: int | None = None) -> None:
        """Have ``work`` done with each number from 0, by so many threads; by default all. What one of them
        raises is raised when all have ended."""
        works = self._works if threads is None else self._works[: threads - 1]
        for one in works:
            one.put(work)
        error: BaseException | None = None
        try:
            work(0)
        finally:
            for _ in works:
                error = self._done.get() or error
        if error is not None:
            raise error

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for works in self._works:
            works.put(None)
        for helper in self._helpers:
            helper.end()


def apart(rows: int, columns: int, dtype: DTypeLike) -> NDArray[Any]:
    """Zeros [rows, columns] of which no row shares a line of the caches with another one, or with anything
    else: cores that write to one line by turns wait for each other."""
    gap = _APART_BYTES // np.dtype(dtype).itemsize
    width = columns + gap
    return np.zeros(gap + rows * width, dtype)[gap:].reshape(rows, width)[:, :columns]
