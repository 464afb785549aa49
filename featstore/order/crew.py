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
        self._busy = 0
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

    def begin(self, work: _Share) -> None:
        """Have the others do ``work`` with each number from 1, until :meth:`wait`."""
        for works in self._works:
            works.put(work)
            self._busy += 1

    def wait(self) -> None:
        """Wait for the others. What one of them raised is raised."""
        error: BaseException | None = None
        while self._busy:
            error = self._done.get() or error
            self._busy -= 1
        if error is not None:
            raise error

    def run(self, work: _Share) -> None:
        """Have ``work`` done with each number from 0. What one of them raises is raised when all have
        ended."""
        self.begin(work)
        try:
            work(0)
        finally:
            self.wait()

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
