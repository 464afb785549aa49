"""Copies of other hosts' rows on this host's own disk: of the halo, those that its lists name most often."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.bitmap import set_bits, slot_of
from featstore.base.checks import check_distinct
from featstore.base.compilation import njit
from featstore.engine.request import Request
from featstore.errors import SourceError
from featstore.hosts.divided import Divided, submit_divided
from featstore.tiers import RowSource
from featstore.tiers.over import OverSource
from featstore.tiers.static_tier import new_rows


@njit(cache=True, nogil=True)
def rows_of_copies(
    ids: NDArray[np.int64], bits: Any, ranks: Any, row_of_rank: Any, out: NDArray[np.int64]
) -> None:
    """The row of each node among the copies, -1 where there is none."""
    for i in range(ids.shape[0]):
        rank = slot_of(ids[i], bits, ranks)
        out[i] = row_of_rank[rank] if rank >= 0 else -1


COPIES_MAX = 2**31 - 1  # their ranks and rows are int32


class DiskCopies:
    """Which row of the table ``name`` of a part has which node: ``nodes`` [rows], distinct, of a table of
    ``total`` rows. Raises FormatError; SourceError for more than COPIES_MAX."""

    def __init__(self, nodes: NDArray[Any], total: int, name: str) -> None:
        if len(nodes) > COPIES_MAX:
            raise SourceError(
                f"table {name!r} would have {len(nodes):,} rows of other rows' copies, at most "
                f"{COPIES_MAX:,} can be: split the store by more hosts"
            )
        check_distinct(nodes, total, f"the nodes of table {name!r}")
        self.name, self.rows = name, len(nodes)
        self._bits = np.zeros(-(-total // 64), np.uint64)
        self._ranks = np.zeros(len(self._bits), np.int32)
        order = np.argsort(nodes, kind="stable")
        self._row_of_rank = order.astype(np.int32)
        del order
        set_bits(nodes.astype(np.int64), self._bits, self._ranks)
        self.find(np.empty(0, np.int64))  # so that the kernel is there

    @staticmethod
    def bytes_for(total: int, rows: int) -> int:
        """Memory of so many copies."""
        return -(-total // 64) * 12 + 4 * rows

    @staticmethod
    def opening_bytes(rows: int) -> int:
        """What else is held while they are put in order: ids, their places, and room to sort these."""
        return 24 * rows

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [n], the row of each node, -1 where there is none."""
        found = np.empty(len(ids), np.int64)
        rows_of_copies(ids, self._bits, self._ranks, self._row_of_rank, found)
        return found


class CopiesTier(OverSource):
    """Rows of other hosts that are on this one's disk, over the lines to them. ``local``: reads the tables of
    ``copies``; it is not closed."""

    name = "copies"

    def __init__(self, below: RowSource, copies: Mapping[str, DiskCopies], local: RowSource) -> None:
        super().__init__(below)
        self._copies, self._local, self._hits = copies, local, 0
        self._counting = threading.Lock()
        self.memory_bytes = 0

    def submit(
        self, ids: Mapping[str, Any], *, out: Mapping[str, Any] | None, at: Mapping[str, Any] | None = None
    ) -> Request:
        self.check_open()
        filled = new_rows(self, ids) if out is None else dict(out)
        here, there = {}, {}
        for name, wanted in ids.items():
            copies = self._copies.get(name)
            rows = np.full(len(wanted), -1, np.int64) if copies is None else copies.find(wanted)
            mine, rest = (np.flatnonzero(which).astype(np.int32) for which in (rows >= 0, rows < 0))
            here[name] = Divided(name if copies is None else copies.name, rows[mine], mine)
            there[name] = Divided(name, wanted[rest], rest)
        with self._counting:
            self._hits += sum(len(share.ids) for share in here.values())
        return submit_divided([(self._below, there), (self._local, here)], filled, at)

    def holds(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        if table not in self._copies:
            return np.zeros(len(ids), bool)
        return np.asarray(self._copies[table].find(ids) >= 0)

    def hits(self) -> int:
        return self._hits

    def close(self) -> None:
        self._closed = True

    def __repr__(self) -> str:
        return f"<CopiesTier of {self.tables}>"
