"""Hosts that are threads of this process: what they say goes through queues, and can be held up, damaged or
cut off."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

PATIENCE_SECONDS = 60.0  # where kernels are compiled first, on cores that others use, too

Meddle = Callable[[int, int, int, np.ndarray], np.ndarray]


class Wires:
    """Wires between ``hosts``. ``meddle(source, to, number, data)`` gives what arrives in place of the
    number-th thing that one host sends another."""

    def __init__(self, hosts: int, meddle: Meddle | None = None) -> None:
        self.hosts, self.meddle = hosts, meddle
        self.dead: set[int] = set()
        self.frozen: set[int] = set()
        self.left: set[int] = set()
        self.lines: dict[tuple[int, int], queue.Queue[Any]] = {
            (a, b): queue.Queue() for a in range(hosts) for b in range(hosts)
        }
        self.sent: dict[tuple[int, int], int] = dict.fromkeys(self.lines, 0)
        self.bytes_sent = 0
        self._lock = threading.Lock()

    def wire(self, host: int) -> OneWire:
        return OneWire(self, host)

    def kill(self, host: int) -> None:
        """Its connections are closed."""
        self.dead.add(host)

    def freeze(self, host: int) -> None:
        """Nothing that it sends arrives any more."""
        self.frozen.add(host)


class OneWire:
    """That of one host."""

    def __init__(self, wires: Wires, host: int) -> None:
        self._wires, self.host, self.hosts = wires, host, wires.hosts
        self.closed: bool | None = None

    def rank_of(self, host: int) -> int:
        return 10 * host

    def _check(self, other: int) -> None:
        if self._wires.dead & {self.host, other}:
            raise ConnectionResetError("Connection reset by peer")
        if self.closed:
            raise ConnectionError("closed here")

    def send(self, to: int, data: np.ndarray) -> None:
        self._check(to)
        wires, key = self._wires, (self.host, to)
        if wires.frozen & {self.host}:
            return
        with wires._lock:
            number = wires.sent[key]
            wires.sent[key] += 1
            wires.bytes_sent += len(data)
        arrives = data.copy()
        if wires.meddle is not None:
            arrives = wires.meddle(self.host, to, number, arrives)
        wires.lines[key].put(arrives)

    def post(self, source: int, into: np.ndarray) -> Any:
        return source, into

    def take(self, posted: Any) -> None:
        source, into = posted
        for _ in range(int(PATIENCE_SECONDS / 0.02)):
            self._check(source)
            try:
                data = self._wires.lines[source, self.host].get(timeout=0.02)
            except queue.Empty:
                if source in self._wires.left:  # which comes behind what it had sent
                    raise ConnectionResetError("Connection reset by peer") from None
                continue
            if len(data) > len(into):
                raise OSError(f"{len(data)} bytes came where {len(into)} fit")
            into[: len(data)] = data
            return
        raise TimeoutError("nothing came")

    def close(self, *, abort: bool) -> None:
        self.closed = abort
        if abort:
            self._wires.left.add(self.host)
