"""Rows that devices ask of the source below them, and the host memory in which these land."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import empty_rows
from featstore.base.dtypes import dtype_from_name
from featstore.engine.request import Request, answered
from featstore.errors import IdError
from featstore.tiers import RowSource


class Landed:
    """Rows that were asked of the source below, and the memory in which they land."""

    def __init__(self, request: Request, ids: NDArray[np.int64], rows: NDArray[Any]) -> None:
        self.request, self.ids, self.rows = request, ids, rows

    def done(self) -> bool:
        return self.request.done()

    def cancel(self) -> None:
        self.request.cancel()

    def release(self) -> None:
        """Nothing is held but memory, which goes when the read has ended."""


class LandingTable:
    """One table of the source below, as a :class:`~featstore.tiers.device.Host`. ``landed`` is called when
    rows are there, or will not come; it must not wait."""

    slots_unkept = 2**31 - 1

    def __init__(self, below: RowSource, name: str, landed: Callable[[], None]) -> None:
        self._source, self._table, self._landed = below, below.store.table(name), landed
        self.dtype = dtype_from_name(self._table.entry.dtype)
        self.row_shape, self.row_bytes = self._table.row_shape, self._table.row_bytes

    def check_ids(self, ids: NDArray[np.int64]) -> None:
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._table.rows:
            raise IdError(
                f"a node id is out of range: table {self._table.name!r} has {self._table.rows:,} rows"
            )

    def begin(self, ids: NDArray[np.int64]) -> Landed:
        raw = empty_rows(len(ids), self.row_bytes)
        rows = raw.view(self.dtype).reshape(len(ids), *self.row_shape)
        name = self._table.name
        if not len(ids):  # which waits for nobody
            return Landed(answered(rows), ids, rows)
        landed, request = self._landed, self._source.submit({name: ids}, out={name: rows})
        request.add_done_callback(lambda _: landed())
        return Landed(request, ids, rows)

    def gather(self, ticket: Landed, out: NDArray[Any]) -> None:
        ticket.request.result()
        out[...] = ticket.rows

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        yield
