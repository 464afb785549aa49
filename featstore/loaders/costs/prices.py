"""What reads cost on this store now, by the clock and of the cores.

A device model says how the device reads other files at another time, in which the cache of a host may have
had them, or others read, too. So three patterns are read of the store's own files, as loaders read them,
several requests under way: rows of mini-batches that were looked at, as close together as they lie; some of
them from all over; and long runs. Each is the price of a read of its length, and what lies between is what
reads of other lengths take: where a device binds that is a price for a read and one for a byte, where cores
do it need not be. They take turns, and medians count. A request of one row gives what a request asks of the
cores, however little it reads.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, repeat
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.loaders.online.extraction import EXTRACTED

if TYPE_CHECKING:
    from featstore.engine.request import Request
    from featstore.reader.reader import Reader
    from featstore.storage.store import Table

_ROUNDS = 5
_SETTLING_SECONDS, _SETTLING_SECONDS_MAX = 0.2, 0.6
_SETTLED_PASSES = 2  # one after the other, of which none is much faster than any before
_FASTER = 0.95
_SPARSE = 8  # of so many rows, one
_PATTERN_BYTES = 8 << 20  # of rows asked for in a round, at least,
_ROUND_SECONDS = 0.06  # and as many as can be read in this time
_RUNS = 8
_REQUESTS = 50


_Submit = Callable[[NDArray[np.uint8]], "Request"]


class Curve(NamedTuple):
    """What a read takes by its length: ``lengths`` in bytes, ascending, of which ``seconds``, not falling,
    were measured. Between two of them what lies between; of longer ones a byte takes as much as of the
    longest; shorter ones go on as between the first two, but take no less for a byte than the first."""

    lengths: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Curve:
        """Of (bytes, seconds) of a read, in any order."""
        known = dict(sorted(point for point in points if point[0] > 0)) or {1.0: 0.0}
        seconds = np.maximum.accumulate(list(known.values()))
        return cls(tuple(known), tuple(seconds.tolist()))

    def of(self, reads: float, bytes_read: float) -> float:
        """Seconds of so many reads of so many bytes altogether; no reads: of any number of the longest."""
        lengths, seconds = self.lengths, self.seconds
        if bytes_read >= reads * lengths[-1]:
            return bytes_read * seconds[-1] / lengths[-1]
        each = bytes_read / reads
        if each >= lengths[0]:
            return reads * float(np.interp(each, lengths, seconds))
        slope = (seconds[1] - seconds[0]) / (lengths[1] - lengths[0]) if len(lengths) > 1 else np.inf
        return reads * max(seconds[0] - slope * (lengths[0] - each), seconds[0] * each / lengths[0])


class Prices(NamedTuple):
    """What reads take: by the clock, of reads at depth; of the cores (planning, waiting for completions,
    checksums and copying rows included); and what a request that reads little takes of the cores, seconds."""

    clock: Curve
    cores: Curve
    request_cpu_seconds: float

    def busy(self, reads: float, bytes_read: float) -> float:
        """Seconds of the device."""
        return self.clock.of(reads, bytes_read)

    def cpu(self, reads: float, bytes_read: float) -> float:
        """Seconds of the cores."""
        return self.cores.of(reads, bytes_read)


class Pattern(NamedTuple):
    """Requests that were read: how many reads and bytes that were, seconds by the clock and of the cores, and
    how many requests."""

    reads: float
    bytes_read: float
    seconds: float
    cpu_seconds: float
    requests: int = 0


def measured(reader: Reader, table: Table, ids: Sequence[NDArray[np.int64]]) -> Prices:
    """Prices on this table, of which mini-batches want these ids."""
    ids = [one for one in ids if one.size]
    dense, sparse = _parts_of(table, ids)
    longest = max((one.size for one in dense + sparse), default=1)
    most = min(max(1, _PATTERN_BYTES // max(1, table.row_bytes * longest)), len(ids))
    random = np.random.default_rng(0)
    length = min(table.rows // _RUNS, _PATTERN_BYTES // _RUNS // table.row_bytes) + 1

    def rows_of(some: Sequence[NDArray[np.int64]], number: int) -> Pattern:
        wanted = (some[(number * most + k) % len(some)] for k in count())
        asked = ((len(one) * table.row_bytes, _ask(reader.submit, table, one)) for one in wanted)
        return _read(reader, longest * table.row_bytes, asked, most, _ROUND_SECONDS)

    def run() -> tuple[int, _Submit]:
        low = int(random.integers(0, max(1, table.rows - length)))
        end = min(low + length, table.rows)
        return (end - low) * table.row_bytes, _ask(reader.submit_runs, table, np.array([[low, end]]))

    def runs_of(_: int) -> Pattern:
        return _read(reader, length * table.row_bytes, (run() for _ in count()), _RUNS, _ROUND_SECONDS)

    ways = partial(rows_of, dense), partial(rows_of, sparse), runs_of
    _settle(ways[0])
    rounds = [[way(number) for way in ways] for number in range(_ROUNDS)]
    one = (table.row_bytes, _ask(reader.submit, table, ids[0][:1]))
    few = _read(reader, table.row_bytes, repeat(one), _REQUESTS, 0.0)
    request = few.cpu_seconds / _REQUESTS
    of_rows, of_sparse, of_runs = (_median(way) for way in zip(*rounds, strict=True))
    return prices([of_rows, of_sparse, without_requests(of_runs, request)], request)


def without_requests(pattern: Pattern, request_cpu_seconds: float) -> Pattern:
    """Runs were asked for one by one, whose readers ask for many at once."""
    asking = min(pattern.requests * request_cpu_seconds, pattern.cpu_seconds / 2)
    return pattern._replace(cpu_seconds=pattern.cpu_seconds - asking)


def _parts_of(
    table: Table, ids: Sequence[NDArray[np.int64]]
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
    """Of each mini-batch as many ids as several may have memory for at once: those whose rows lie together,
    each time elsewhere, whose reads are as long as all of them have them; and some from all over, as where
    the most of them are in memory."""
    row_of_node = table.row_of_node()
    dense, sparse = [], []
    for number, one in enumerate(ids):
        order = np.argsort(one if row_of_node is None else row_of_node[one], kind="stable")
        cut = -(-one.size * table.row_bytes * EXTRACTED // _PATTERN_BYTES)
        low, high = (one.size * part // cut for part in (number % cut, number % cut + 1))
        dense.append(one[order[low : max(high, 1)]])
        sparse.append(one[order[:: max(cut, _SPARSE)]])
    return [part for part in dense if part.size], sparse


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


def prices(patterns: Sequence[Pattern], request_cpu_seconds: float) -> Prices:
    """Of the reads of several patterns."""
    reads = [max(1.0, one.reads) for one in patterns]
    pairs = list(zip(patterns, reads, strict=True))
    clock = Curve.through([(one.bytes_read / n, one.seconds / n) for one, n in pairs])
    cores = Curve.through([(one.bytes_read / n, one.cpu_seconds / n) for one, n in pairs])
    return Prices(clock, cores, request_cpu_seconds)


def _median(rounds: Sequence[Pattern]) -> Pattern:
    """Of a round with the median time for a byte, as for the cores."""
    by_clock = sorted(rounds, key=lambda one: one.seconds / max(1.0, one.bytes_read))[len(rounds) // 2]
    of_cores = statistics.median(one.cpu_seconds / max(1.0, one.bytes_read) for one in rounds)
    return by_clock._replace(cpu_seconds=of_cores * by_clock.bytes_read)


def _ask(submit: Callable[..., Request], table: Table, wanted: NDArray[np.int64]) -> _Submit:
    """What submits this request, given memory for its rows."""
    return lambda raw: submit(
        {table.name: wanted}, out={table.name: raw.view(table.dtype).reshape(-1, *table.row_shape)}
    )


def _read(
    reader: Reader, bytes_max: int, asked: Iterator[tuple[int, _Submit]], least: int, seconds: float
) -> Pattern:
    """Submit requests of so many bytes each, a few under way at once: ``least`` of them, and until so much
    time has passed. What is short alone would say what beginning and ending take, in which no engine finds
    that it could use more of the cores."""
    memory = [np.ones(bytes_max, np.uint8) for _ in range(EXTRACTED)]
    before, begin, cpu = reader.stats(), time.perf_counter(), time.process_time()
    under_way: deque[Request] = deque()
    requests = 0
    for number, (byte_count, submit) in enumerate(asked):
        if number >= least and time.perf_counter() - begin >= seconds:
            break
        if len(under_way) == EXTRACTED:
            under_way.popleft().result()
        under_way.append(submit(memory[number % EXTRACTED][:byte_count]))
        requests += 1
    for request in under_way:
        request.result()
    wall, cpu, after = time.perf_counter() - begin, time.process_time() - cpu, reader.stats()
    reads, bytes_read = after.reads - before.reads, after.bytes_read - before.bytes_read
    return Pattern(reads, bytes_read, wall, cpu, requests)
