"""A gate before an engine, for tests that look at requests under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from featstore.reader.reader import Reader


class Gate:
    """Holds an engine's lanes back until it is opened, so that a test can look at requests under way."""

    def __init__(self, reader: Reader) -> None:
        engine = reader._engine
        assert engine is not None
        self._start: Callable[[Any], None] = engine.start
        self._held: list[Any] = []
        self._open = False
        self._lock = threading.Lock()
        self.arrived = threading.Semaphore(0)
        engine.start = self.start  # type: ignore[method-assign]

    def start(self, lane: Any) -> None:
        with self._lock:
            if not self._open:
                self._held.append(lane)
                self.arrived.release()
                return
        self._start(lane)

    def open(self) -> None:
        with self._lock:
            self._open = True
        for lane in self._held:
            self._start(lane)
