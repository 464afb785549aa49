"""For those who write tiers of their own: what a source of rows must do, as checks, and a double to stand
over.

A tier of one's own is a class with the methods of :class:`featstore.tiers.Tier`, and one with those of
:class:`featstore.tiers.TierSpec` that makes it; :func:`check_tier` tries both. Everything here raises
AssertionError, and works under any test runner.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.dtypes import dtype_from_name
from featstore.base.ids import is_tensor
from featstore.engine.request import Request
from featstore.errors import BudgetError, CancelledError
from featstore.storage.store import OpenStore, Table
from featstore.tiers import RowSource, Tier, TierSpec, source_tables

WAIT_SECONDS = 60.0  # in which any request must have ended


class ArraySource:
    """Rows from arrays, by table: stands for the disk. ``asked`` counts the rows asked for; while ``error``
    is set, requests fail with it; while ``held`` is, none ends before :meth:`let_go`."""

    def __init__(self, store: OpenStore, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.store, self.tables, self._arrays = store, list(arrays), arrays
        self.asked, self.held = 0, False
        self.error: BaseException | None = None
        self._open: deque[tuple[Request, Any, Any, Any]] = deque()
        self._lock = threading.Lock()

    def submit(
        self, ids: Mapping[str, Any], *, out: Mapping[str, Any] | None, at: Mapping[str, Any] | None = None
    ) -> Request:
        with self._lock:
            self.asked += sum(map(len, ids.values()))
        empty = {name: np.empty((len(one), *self._arrays[name].shape[1:]), self._arrays[name].dtype)
                 for name, one in ids.items()}  # fmt: skip
        filled = empty if out is None else out
        request = Request(lambda: filled)
        request.begin()
        self._open.append((request, ids, filled, at))
        if not self.held:
            self.let_go()
        return request

    def let_go(self, most: int | None = None) -> None:
        """End what is under way, the oldest first; at most so many requests."""
        for _ in itertools.count() if most is None else range(most):
            try:
                request, ids, filled, at = self._open.popleft()
            except IndexError:
                return
            if self.error is None and not request.stopped():
                for name, one in ids.items():
                    filled[name][slice(len(one)) if at is None else at[name]] = self._arrays[name][one]
            request.close_piece(None, self.error)

    def close(self) -> None:
        self.let_go()


def check_source(
    source: RowSource,
    arrays: Mapping[str, NDArray[Any]],
    *,
    seed: int = 0,
    requests: int = 20,
    threads: int = 3,
    ids_max: int = 500,
) -> None:
    """Ask a source for rows of ``arrays`` by table, of which it must give the same bytes: several tables at
    once, duplicates, no ids at all, with and without ``out`` and ``at``, from several threads, with some
    requests cancelled."""
    with ThreadPoolExecutor(threads) as pool:
        work = [
            pool.submit(_ask, source, arrays, np.random.default_rng([seed, n]), requests, ids_max)
            for n in range(threads)
        ]
        for one in work:
            one.result(WAIT_SECONDS * requests)


def _ask(
    source: RowSource,
    arrays: Mapping[str, NDArray[Any]],
    rng: np.random.Generator,
    requests: int,
    ids_max: int,
) -> None:
    waiting = []
    for _ in range(requests):
        names = list(rng.permutation(list(arrays))[: rng.integers(1, len(arrays) + 1)])
        ids, out, at = {}, {}, {}
        for name in names:
            array = arrays[name]
            ids[name] = rng.integers(0, len(array), rng.integers(0, ids_max)) if len(array) else _none()
            room = len(ids[name]) + int(rng.integers(0, 9))
            out[name] = np.full((room, *array.shape[1:]), 1).astype(array.dtype)
            at[name] = rng.permutation(room)[: len(ids[name])].astype(np.int32)
        kind = rng.integers(3)
        if kind == 0:
            request = source.submit(ids, out=None)
        elif kind == 1:
            out = {name: rows[: len(ids[name])] for name, rows in out.items()}
            request = source.submit(ids, out=out)
        else:
            request = source.submit(ids, out=out, at=at)
        cancelled = rng.random() < 0.2 and request.cancel()
        waiting.append((request, ids, out if kind else None, at if kind == 2 else None, cancelled))
        if rng.random() < 0.3:
            _check_all(waiting, arrays)
    _check_all(waiting, arrays)


def _none() -> NDArray[np.int64]:
    return np.empty(0, np.int64)


def _check_all(waiting: list[Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Each request ends, as it should."""
    _, late = wait([one[0] for one in waiting], timeout=WAIT_SECONDS)
    assert not late, f"{len(late)} requests have not ended within {WAIT_SECONDS:g} s"
    for request, ids, out, at, cancelled in waiting:
        if cancelled and isinstance(request.exception(), CancelledError):
            continue  # some rows may have arrived and others not
        given = request.result()
        for name, one in ids.items():
            rows = given[name] if out is None else out[name]
            wanted = arrays[name][one]
            assert _bytes(rows, None if at is None else at[name]) == wanted.tobytes(), (
                f"wrong rows of table {name!r}"
            )
    waiting.clear()


def _bytes(rows: Any, at: NDArray[np.int32] | None) -> bytes:
    """Rows of an array or tensor, those at given places where there are some, as bytes."""
    if is_tensor(rows):
        import torch

        if rows.numel() == 0:
            return b""
        rows = rows.cpu().contiguous().reshape(len(rows), -1).view(torch.uint8).numpy()
    return bytes((rows if at is None else rows[at]).tobytes())


def check_tier(
    spec: TierSpec, store: OpenStore, arrays: Mapping[str, NDArray[Any]], memory_bytes: int, *, seed: int = 0
) -> None:
    """Try a tier over an :class:`ArraySource`: right rows, honest counts, no more memory than given, errors
    from below handed up and forgotten; and that it works in the least memory that it says it needs."""
    below = ArraySource(store, arrays)
    tables = source_tables(below)
    wanted = spec.host_bytes(tables)
    given = memory_bytes if wanted is None else wanted
    assert given <= memory_bytes, f"it wants {given:,} bytes of {memory_bytes:,}"
    least = _least_bytes(spec, tables)
    assert least <= given, f"it needs {least:,} bytes, more than the {given:,} that it is to have"
    _check_least(spec, below, arrays, least, seed)
    tier = spec.over(below, given)
    try:
        _check_facts(tier, arrays, memory_bytes)
        check_source(tier, arrays, seed=seed)
        for name, rows in arrays.items():
            _check_counts(tier, below, name, np.arange(min(5, len(rows))))
        _check_errors(tier, below, arrays, max(arrays, key=lambda n: len(arrays[n])))
    finally:
        tier.close()
        tier.close()


def _least_bytes(spec: TierSpec, tables: Sequence[Table]) -> int:
    assert callable(getattr(spec, "least_bytes", None)), "it has no method least_bytes(tables)"
    least = spec.least_bytes(tables)
    assert isinstance(least, int), f"least_bytes must give an int, not {least!r}"
    assert least >= 0, f"least_bytes must give 0 or more, not {least}"
    return least


def _check_least(
    spec: TierSpec, below: ArraySource, arrays: Mapping[str, NDArray[Any]], least: int, seed: int
) -> None:
    """The tier works in the memory that it says is the least."""
    tier, refusal = None, None
    try:
        tier = spec.over(below, least)
    except BudgetError as error:
        refusal = error
    assert tier is not None, f"it cannot be made in the {least:,} bytes of its least_bytes: {refusal}"
    try:
        _check_facts(tier, arrays, least)
        check_source(tier, arrays, seed=seed, requests=4, ids_max=40)
    finally:
        tier.close()


def _check_facts(tier: Tier, arrays: Mapping[str, NDArray[Any]], memory_bytes: int) -> None:
    assert isinstance(tier.name, str), f"its name must be a text, not {tier.name!r}"
    assert tier.name, "its name is empty: plans and statistics could not speak of it"
    assert list(tier.tables) == list(arrays)
    assert tier.memory_bytes <= memory_bytes, f"it holds {tier.memory_bytes:,} bytes of {memory_bytes:,}"


def _check_counts(tier: Tier, below: ArraySource, name: str, ids: NDArray[np.int64]) -> None:
    """What it says it holds of a table it does not ask for below, and it counts what it gave."""
    for some in (ids[:0], ids):
        asked, hits = below.asked, tier.hits()
        held = tier.holds(name, some)
        assert held.dtype == bool, f"what it holds of table {name!r} must be bool, not {held.dtype}"
        assert held.shape == some.shape, f"what it holds of table {name!r} has the shape {held.shape}"
        tier.submit({name: some}, out=None).result(WAIT_SECONDS)
        missed = below.asked - asked
        assert missed <= int((~held).sum()), f"it asked below for rows of {name!r} that it said it holds"
        assert tier.hits() - hits == len(some) - missed, f"hits and misses of table {name!r} do not add up"


def _check_errors(tier: RowSource, below: ArraySource, arrays: Mapping[str, NDArray[Any]], name: str) -> None:
    below.error = OSError(5, "the device fails")
    everything: Sequence[int] = range(len(arrays[name]))
    asked = below.asked
    error = tier.submit({name: np.array(everything)}, out=None).exception(WAIT_SECONDS)
    if below.asked > asked:
        assert error is below.error, f"an error from below came up as {error!r}"
    below.error = None
    check_source(tier, arrays, requests=5)


def arrays_of(store: OpenStore) -> dict[str, NDArray[Any]]:
    """All rows of a store by table, in the order of node ids: what its sources must give. For small
    stores."""
    from featstore.reader.reader import Reader

    with Reader(store, static=None) as reader:
        made = {}
        for name in reader.tables:
            table = store.table(name)
            rows = reader.read({name: np.arange(table.rows)})[name]
            made[name] = rows.view(dtype_from_name(table.entry.dtype))
        return made
