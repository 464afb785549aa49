"""What reads cost on this store now, by the clock and of the cores.

A device model says how the device reads other files at another time, in which the cache of a host may have
had them, or others read, too. So two patterns are read of the store's own files, as loaders read them: rows
of mini-batches that were looked at, several requests under way, and long runs. The runs give the price of a
byte; what the rows take beyond that is the price of a read. They take turns, and medians count. A request of
one row gives what a request asks of the cores, however little it reads.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.loaders.online.extraction import EXTRACTED

if TYPE_CHECKING:
    from featstore.engine.request import Request
    from featstore.reader.reader import Reader
    from featstore.storage.store import Table

_ROUNDS = 5
_SETTLING_SECONDS, _SETTLING_SECONDS_MAX = 0.1, 0.6
_SETTLED_PASSES = 4  # one after the other, of which none is much faster than any before
_FASTER = 0.95
_PATTERN_BYTES = 8 << 20  # of rows asked for in a round
_RUNS = 8
_REQUESTS = 50


class Prices(NamedTuple):
    """Seconds of a read and of a byte: by the clock, of reads at depth, and of the cores (planning, waiting
    for completions, checksums and copying rows included); of a request that reads little, of the cores."""

    read_seconds: float
    byte_seconds: float
    read_cpu_seconds: float
    byte_cpu_seconds: float
    request_cpu_seconds: float

    def busy(self, reads: float, bytes_read: float) -> float:
        """Seconds of the device."""
        return reads * self.read_seconds + bytes_read * self.byte_seconds

    def cpu(self, reads: float, bytes_read: float) -> float:
        """Seconds of the cores."""
        return reads * self.read_cpu_seconds + bytes_read * self.byte_cpu_seconds


class Pattern(NamedTuple):
    """Requests that were read: how many reads and bytes that were, and seconds by the clock and of the
    cores."""

    reads: float
    bytes_read: float
    seconds: float
    cpu_seconds: float


def measured(reader: Reader, table: Table, ids: Sequence[NDArray[np.int64]]) -> Prices:
    """Prices on this table, of which mini-batches want these ids."""
    ids = [one[:: -(-one.size * table.row_bytes * EXTRACTED // _PATTERN_BYTES)] for one in ids if one.size]
    most = max(1, _PATTERN_BYTES // max(1, table.row_bytes * max((one.size for one in ids), default=1)))
    random = np.random.default_rng(0)
    length = min(table.rows // _RUNS, _PATTERN_BYTES // _RUNS // table.row_bytes) + 1
    rows: list[Pattern] = []
    runs: list[Pattern] = []

    def rows_of(number: int) -> Pattern:
        some = [ids[(number * most + k) % len(ids)] for k in range(min(most, len(ids)))]
        return _read(reader, table, [len(one) for one in some], _of(some, reader.submit, table))

    _settle(rows_of)
    for number in range(_ROUNDS):
        rows.append(rows_of(number))
        low = random.integers(0, max(1, table.rows - length), _RUNS)
        each = [np.array([[begin, min(begin + length, table.rows)]]) for begin in low]
        counts = [int(one[0, 1] - one[0, 0]) for one in each]
        runs.append(_read(reader, table, counts, _of(each, reader.submit_runs, table)))
    few = _read(reader, table, [1] * _REQUESTS, _of([ids[0][:1]] * _REQUESTS, reader.submit, table))
    return prices(_median(rows), _median(runs), few.cpu_seconds / _REQUESTS)


def _settle(read: Callable[[int], Pattern]) -> None:
    """Read until it gets no faster: the engine has to find how many rings a fast device keeps busy."""
    begin, number, since, best = time.perf_counter(), 0, 0, float("inf")
    while (spent := time.perf_counter() - begin) < _SETTLING_SECONDS_MAX:
        if spent >= _SETTLING_SECONDS and since >= _SETTLED_PASSES:
            return
        pattern = read(number)
        price = pattern.seconds / max(1.0, pattern.bytes_read)
        since = 0 if price < _FASTER * best else since + 1
        best, number = min(best, price), number + 1


def prices(rows: Pattern, runs: Pattern, request_cpu_seconds: float) -> Prices:
    """Of a byte from runs, of a read from what rows take beyond their bytes."""
    byte, byte_cpu = (one / max(1.0, runs.bytes_read) for one in (runs.seconds, runs.cpu_seconds))
    beyond = max(0.0, rows.seconds - rows.bytes_read * byte)
    beyond_cpu = max(0.0, rows.cpu_seconds - rows.bytes_read * byte_cpu)
    reads = max(1.0, rows.reads)
    return Prices(beyond / reads, byte, beyond_cpu / reads, byte_cpu, request_cpu_seconds)


def _median(rounds: Sequence[Pattern]) -> Pattern:
    """Of a round with the median time for a byte, as for the cores."""
    by_clock = sorted(rounds, key=lambda one: one.seconds / max(1.0, one.bytes_read))[len(rounds) // 2]
    of_cores = statistics.median(one.cpu_seconds / max(1.0, one.bytes_read) for one in rounds)
    return by_clock._replace(cpu_seconds=of_cores * by_clock.bytes_read)


def _of(
    each: Sequence[NDArray[np.int64]], submit: Callable[..., Request], table: Table
) -> Sequence[Callable[[NDArray[np.uint8]], Request]]:
    """What submits each of these requests, given memory for its rows."""

    def one(wanted: NDArray[np.int64]) -> Callable[[NDArray[np.uint8]], Request]:
        return lambda raw: submit(
            {table.name: wanted}, out={table.name: raw.view(table.dtype).reshape(-1, *table.row_shape)}
        )

    return [one(wanted) for wanted in each]


def _read(
    reader: Reader, table: Table, counts: Sequence[int],
    requests: Sequence[Callable[[NDArray[np.uint8]], Request]],
) -> Pattern:  # fmt: skip
    """Submit requests of so many rows each, a few under way at once."""
    memory = [np.ones(max(counts) * table.row_bytes, np.uint8) for _ in range(EXTRACTED)]
    before, wall, cpu = reader.stats(), time.perf_counter(), time.process_time()
    under_way: deque[Request] = deque()
    for number, (count, submit) in enumerate(zip(counts, requests, strict=True)):
        if len(under_way) == EXTRACTED:
            under_way.popleft().result()
        under_way.append(submit(memory[number % EXTRACTED][: count * table.row_bytes]))
    for request in under_way:
        request.result()
    wall, cpu, after = time.perf_counter() - wall, time.process_time() - cpu, reader.stats()
    return Pattern(after.reads - before.reads, after.bytes_read - before.bytes_read, wall, cpu)
