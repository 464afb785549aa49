"""Rows of all hosts, as a source: its own from this host's reader, others' by the exchange.

Other hosts are served through the same reader, so a row that several want is read from the disk once where
the reader has tiers over it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import ALIGNMENT
from featstore.base.dtypes import dtype_from_name
from featstore.base.ids import check_out, rows_of
from featstore.base.native import address_of
from featstore.engine.request import Request, in_pieces
from featstore.errors import ArgumentError, BudgetError, IdError
from featstore.hosts.asks import AnswerPlace, AskPart, RowsAsk
from featstore.hosts.copies import CopiesTier, DiskCopies
from featstore.hosts.divided import Divided, submit_divided
from featstore.hosts.exchange import IDS_MAX, Exchange
from featstore.hosts.kept_halo import KeptHalo
from featstore.hosts.messages import padded
from featstore.hosts.owners import Owners
from featstore.reader.reader import Reader
from featstore.reader.report import ReaderStats
from featstore.storage.store import OpenStore
from featstore.tiers import RowSource
from featstore.tiers.over import OwnedTier
from featstore.tiers.static_tier import new_rows

_NONE = np.empty(0, np.int32)


class PeersSource(OwnedTier):
    """Rows that other hosts own: a :class:`featstore.tiers.RowSource` under node ids of the whole graph, over
    the lines to them. Raises IdError for ids of this host.

    ``store``: knows the tables as wholes. ``tables``: those that are asked for, of all that have ``owners``.
    It does not close the exchange.
    """

    name = "peers"

    def __init__(
        self, store: OpenStore, owners: Mapping[str, Owners], exchange: Exchange | None,
        tables: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.store, self.tables = store, list(owners if tables is None else tables)
        self._owners, self._exchange = owners, exchange
        self.rows = self.row_bytes = 0  # asked for so far
        self._counting = threading.Lock()
        self._under_way: set[Request] = set()

    def submit(
        self, ids: Mapping[str, Any], *, out: Mapping[str, Any] | None, at: Mapping[str, Any] | None = None
    ) -> Request:
        self.check_open()
        filled = new_rows(self, ids) if out is None else dict(out)
        split = {name: self._owners[name].split(wanted) for name, wanted in ids.items()}
        for name, by_host in split.items():
            own = by_host[self._owners[name].host]
            if len(own):
                raise IdError(f"node {ids[name][own[0]]} of table {name!r} is this host's own, no peer's")

        def ask(request: Request) -> None:
            for host in self._exchange.lines if self._exchange is not None else ():
                self._ask(host, request, ids, split, filled, at)

        made = in_pieces(filled, ask)
        self._under_way.add(made)
        made.add_done_callback(self._under_way.discard)  # type: ignore[arg-type]
        return made

    def _ask(
        self, host: int, request: Request, ids: Mapping[str, Any], split: Mapping[str, Any],
        out: Mapping[str, Any], at: Mapping[str, Any] | None,
    ) -> None:  # fmt: skip
        """Ask one host for its rows, of all tables in one message where they fit."""
        exchange = self._exchange
        assert exchange is not None
        parts: list[AskPart] = []
        room, count = exchange.body_bytes, exchange.ids_max
        for number, name in enumerate(self._owners):
            positions = split[name][host] if name in split else _NONE
            table = self.store.table(name)
            while len(positions):
                rows = min(len(positions), count, room // ALIGNMENT * ALIGNMENT // table.row_bytes)
                if rows <= 0 or any(part.table == number for part in parts):
                    exchange.ask(host, RowsAsk(request, parts, len(self._owners)))
                    parts, room, count = [], exchange.body_bytes, exchange.ids_max
                    continue
                now, positions = positions[:rows], positions[rows:]
                shape = (rows_of(out[name]), *table.row_shape)
                raw = check_out(out[name], shape, dtype_from_name(table.entry.dtype))
                places = now if at is None else np.ascontiguousarray(at[name][now], np.int32)
                parts.append(AskPart(number, ids[name][now], address_of(raw), places, table.row_bytes, raw))
                room, count = room - parts[-1].body_bytes, count - rows
                with self._counting:
                    self.rows, self.row_bytes = self.rows + rows, self.row_bytes + rows * table.row_bytes
        if parts:
            exchange.ask(host, RowsAsk(request, parts, len(self._owners)))

    def close(self) -> None:
        self._closed = True
        if self.here:
            wait(list(self._under_way))  # after this, nothing is written to anybody's memory

    def __repr__(self) -> str:
        return f"<PeersSource of {self.tables}>"


class HostsSource(OwnedTier):
    """The rows of all hosts: a :class:`featstore.tiers.RowSource` under node ids of the whole graph.

    ``store``: knows the tables as wholes. ``local``: gives this host's rows, under its own store's ids.
    ``remote``: gives others', under node ids. Neither is closed. ``tables``: those that are asked for, of all
    that have ``owners``.
    """

    name = "hosts"

    def __init__(
        self, store: OpenStore, owners: Mapping[str, Owners], local: RowSource, remote: RowSource,
        tables: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.store, self.tables = store, list(owners if tables is None else tables)
        self._owners, self._local, self._remote = owners, local, remote
        self.memory_bytes, self._own_rows = 0, 0
        self._counting = threading.Lock()

    def submit(
        self, ids: Mapping[str, Any], *, out: Mapping[str, Any] | None, at: Mapping[str, Any] | None = None
    ) -> Request:
        self.check_open()
        filled = new_rows(self, ids) if out is None else dict(out)
        own, other = {}, {}
        for name, wanted in ids.items():
            owners = self._owners[name]
            mine, rest = owners.own_and_others(wanted)
            own[name] = Divided(name, owners.local(wanted[mine]), mine)
            other[name] = Divided(name, wanted[rest], rest)
        # others' first, which take longer
        request = submit_divided([(self._remote, other), (self._local, own)], filled, at)
        with self._counting:
            self._own_rows += sum(len(share.ids) for share in own.values())
        return request

    def holds(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Rows that are this host's own."""
        self.check_open()
        return self._owners[table].mine(ids)

    def hits(self) -> int:
        return self._own_rows

    def close(self) -> None:
        self._closed = True

    def __repr__(self) -> str:
        return f"<HostsSource of {self.tables}>"


class HostsRows(HostsSource):
    """Rows of all hosts for one loader or reader, which has a reader of its own for this host's. ``halo``:
    what is kept of the others', which outlives this."""

    def __init__(
        self, store: OpenStore, owners: Mapping[str, Owners], copies: Mapping[str, DiskCopies],
        reader: Reader, exchange: Exchange | None, halo: KeptHalo | None = None,
    ) -> None:  # fmt: skip
        asked = [name for name in reader.tables if name in owners]  # which a halo is of
        self._peers = PeersSource(store, owners, exchange, asked)
        below: RowSource = CopiesTier(self._peers, copies, reader) if copies else self._peers
        super().__init__(store, owners, reader, below if halo is None else halo.over(below), asked)
        self._reader, self.memory_bytes = reader, reader.budget.memory_bytes

    @property
    def remote_rows(self) -> int:
        """Rows asked of other hosts so far."""
        return self._peers.rows

    @property
    def remote_bytes(self) -> int:
        """Bytes of these rows."""
        return self._peers.row_bytes

    def stats(self) -> ReaderStats:
        """Of this host's own reader."""
        return self._reader.stats()

    def close(self) -> None:
        super().close()
        self._peers.close()
        self._reader.close()


class Serving:
    """Reads rows for other hosts, into the places of their lines."""

    def __init__(self, store: OpenStore, owners: Mapping[str, Owners], local: RowSource) -> None:
        self._store, self._owners, self._local = store, owners, local

    def __call__(self, ids: Sequence[NDArray[np.int64]], place: AnswerPlace) -> tuple[Request, int]:
        wanted, out, begin, first = {}, {}, 0, 0
        for (name, owners), asked in zip(self._owners.items(), ids, strict=True):
            table = self._store.table(name)
            byte_count = len(asked) * table.row_bytes
            if begin + padded(byte_count) > len(place.body) or first + len(asked) > len(place.ids):
                raise ArgumentError(f"{len(asked):,} rows of table {name!r} are more than had been agreed")
            if len(asked):
                wanted[name] = owners.local(asked, place.ids[first : first + len(asked)])
                rows = place.body[begin : begin + byte_count].view(dtype_from_name(table.entry.dtype))
                out[name] = rows.reshape(len(asked), *table.row_shape)
                place.body[begin + byte_count : begin + padded(byte_count)] = 0
            begin, first = begin + padded(byte_count), first + len(asked)
        return self._local.submit(wanted, out=out), begin


def body_bytes_for(store: OpenStore, tables: Sequence[str], memory_bytes: int, hosts: int) -> int:
    """Bytes of an answer that lines to all hosts have memory for, a row of any table at least. Raises
    BudgetError."""
    least = padded(max((store.table(name).row_bytes for name in tables), default=1))
    for body_bytes in (8 << 20, 4 << 20, 2 << 20, 1 << 20, 1 << 19, 1 << 18, 1 << 17, 1 << 16, least):
        ids = ids_max_for(body_bytes)
        if body_bytes >= least and Exchange.held_bytes(hosts, body_bytes, ids, len(tables)) <= memory_bytes:
            return body_bytes
    raise BudgetError(
        Exchange.held_bytes(hosts, least, ids_max_for(least), len(tables)), memory_bytes,
        f"have lines to {hosts - 1} other hosts",
    )  # fmt: skip


def ids_max_for(body_bytes: int) -> int:
    """Ids of an ask whose answer has so many bytes at most."""
    return max(1, min(IDS_MAX, body_bytes // 8))
