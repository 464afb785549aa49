"""One feature buffer for all processes of a host, so that the host holds one copy of the cache.

The process that makes a :class:`SharedBuffer` owns it: the reader, the slot map and the policy are its own,
as with any :class:`~featstore.tiers.buffer.FeatureBuffer`. The rows lie in anonymous shared memory
(``memfd_create``), which other processes, the workers of a data loader or the ranks of a host, map read-only.
They get it from the owner through a Unix socket (:class:`~featstore.shared.client.BufferClient`), and then
ask for ids and are told slots; rows never pass through the socket.

Why an owner, and no slot map in shared memory under a lock that processes share: a process that dies in the
middle of a change would leave it half done, and a lock taken for ever; and reads end in the process that
began them. So what a process can leave behind is a closed socket, upon which the owner releases what was held
through it (:mod:`~featstore.shared.service`). When the owner dies, its clients see the same.

**Memory.** The budget covers the reader, what is known of requests under way, slot map and rows. In system
tools the rows count as shared memory of the owner and of each client that has touched them.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_choice, as_count, check_options, options_of
from featstore.errors import ArgumentError, BudgetError, ClosedError, DeviceError, SourceError
from featstore.plan.budget import Budget, nominal_bytes
from featstore.reader.lookup import table_need
from featstore.reader.options import READING, check_reading
from featstore.reader.reader import Reader
from featstore.shared import protocol
from featstore.shared.client import BufferClient
from featstore.shared.guests import BYTES_PER_ID
from featstore.shared.service import ROOM_BATCHES, Service
from featstore.storage.relations import node_tables
from featstore.storage.store import as_store
from featstore.tiers.buffer import FeatureBuffer
from featstore.tiers.slots import layout
from featstore.tiers.slots.rows import buffer_bytes, slots_for
from featstore.tiers.tickets import BufferStats
from featstore.units import parse_bytes

if TYPE_CHECKING:
    from featstore.reader.report import ReaderStats
    from featstore.storage.store import OpenStore, Table

_REQUESTS_SHARE = 1 / 16  # of the budget, for what is known of requests
_BATCH_SHARE = 1 / 4  # of the slots, for one request
_F_SEAL_FUTURE_WRITE = 0x10  # since Linux 5.1; the fcntl module has no name for it


class SharedBuffer:
    """A feature buffer that other processes read through; see the module's text. A context manager. Its owner
    is the process that makes it; make it before the workers start.

    Args:
        store: the open store.
        memory: budget for all that is held, in all processes together, bytes or ``"2GiB"``. Results are the
            clients' own.
        policy: a name of :data:`featstore.tiers.slots.layout.POLICIES` but ``"static"`` and ``"min"``.
        table: the table's name; not needed where the store has only one of nodes.
        batch_rows: how many ids are asked for at once at most; longer reads go in pieces. By default a
            quarter of the slots, or less.
        reader: ``engine``, ``queue_depth``, ``verify`` and ``model``, as for
            :class:`featstore.reader.reader.Reader`.

    Raises BudgetError with the smallest budget that works, SourceError; what opening a reader raises.
    """

    def __init__(
        self, store: OpenStore, *, memory: int | str = "1GiB", policy: str = "lru", table: str | None = None,
        batch_rows: int | None = None, **reader: Any,
    ) -> None:  # fmt: skip
        self._table = _table_of(as_store(store), table)
        self.memory_bytes, self._pid = parse_bytes(memory, "memory"), os.getpid()
        as_choice(
            policy,
            "policy of a shared buffer",
            [name for name in layout.POLICIES if name not in ("static", "min")],
        )
        check_options(reader, (*options_of(SharedBuffer), *READING), "a shared buffer")
        check_reading(**reader)
        batch_rows = None if batch_rows is None else as_count(batch_rows, "batch_rows")
        split = _Split(self._table, layout.POLICIES[policy], reader.get("verify", True))
        self.batch_rows, self.slots, self._memory = split.of(self.memory_bytes, batch_rows)
        self._key = protocol.new_key()
        with ExitStack() as opened:
            self._reader = opened.enter_context(
                Reader(
                    store,
                    tables=[self._table.name],
                    memory=split.reader_budget(self.memory_bytes),
                    static=None,
                    **reader,
                )
            )
            file, block = _shared_memory(max(1, self.slots * self._table.row_bytes))
            opened.callback(os.close, file)
            self._buffer = opened.enter_context(
                FeatureBuffer(self._reader, self._table.name, slots=self.slots, policy=policy, block=block)
            )
            self._service = opened.enter_context(Service(self._buffer, file, self._key, self._about()))
            self._opened = opened.pop_all()

    def _about(self) -> dict[str, Any]:
        """What clients are told."""
        t = self._table
        return {
            "table": t.name, "rows": t.rows, "row_shape": list(t.row_shape), "row_bytes": t.row_bytes,
            "dtype": t.entry.dtype, "batch_rows": self.batch_rows,
        }  # fmt: skip

    def client(self) -> BufferClient:
        """A new client, to be used here, in forked children, or pickled to other processes of this host."""
        return BufferClient(self._service.address, self._key)

    # What it does.

    def stats(self) -> BufferStats:
        """What has been counted for all clients. What was asked ahead and had to be asked again counts twice.
        In the owner alone; elsewhere ask :meth:`BufferClient.stats`. Raises ClosedError."""
        self._check()
        return self._buffer.stats()

    def reader_stats(self) -> ReaderStats:
        """What the reader has read. In the owner alone. Raises ClosedError."""
        self._check()
        return self._reader.stats()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                "a shared buffer belongs to the process that made it; other processes use a client of it"
            )
        if self._service.error is not None:
            raise ClosedError(
                f"the shared buffer's thread has failed: {self._service.error!r}"
            ) from self._service.error

    def memory(self) -> dict[str, int]:
        """Bytes of the budget by what they are for."""
        return dict(self._memory)

    # Ending.

    def close(self) -> None:
        """Give everything back; clients get ClosedError. In other processes than the owner nothing happens.
        May be called more than once."""
        if os.getpid() == self._pid:
            self._opened.close()

    def __enter__(self) -> SharedBuffer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise ArgumentError("a shared buffer stays with its owner; pickle a client of it: buffer.client()")

    def __repr__(self) -> str:
        return f"<SharedBuffer of {self.slots:,} rows of {self._table.name!r}, {self.memory_bytes:,} bytes>"


def _shared_memory(size: int) -> tuple[int, NDArray[np.uint8]]:
    """A file in memory and its bytes, which only this process can write to, and which stay as many as they
    are."""
    file = -1
    try:
        file = os.memfd_create("featstore-buffer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, size)
        block = np.frombuffer(mmap.mmap(file, size), np.uint8)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _F_SEAL_FUTURE_WRITE
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        if file >= 0:
            os.close(file)
        raise DeviceError(
            error.errno or errno.EIO, "shared memory", None, f"make {size:,} bytes of"
        ) from error
    return file, block


def _table_of(store: OpenStore, name: str | None) -> Table:
    if name is None:
        nodes = node_tables(store.tables)
        if len(nodes) != 1:
            raise SourceError(
                f"the store has {len(store.tables)} tables, {len(nodes)} of them of nodes; say which: "
                f"table= one of {', '.join(map(repr, store.tables))}"
            )
        name = nodes[0]
    return store.table(name)


class _Split:
    """How a budget is split: the reader, requests, and all the rest is the buffer."""

    def __init__(self, table: Table, policy: int, verify: bool) -> None:
        self._table, self._policy = table, policy
        self._need = table_need(table, verify, by_row=False)
        self._slot_bytes = buffer_bytes(64, table.row_bytes, policy) / 64

    def reader_budget(self, memory_bytes: int) -> int:
        """The budget to give the reader, which takes the part of it that is no tier's."""
        return self._need.row_map_bytes + self._need.checksum_bytes + nominal_bytes(memory_bytes)

    def _reader_bytes(self, memory_bytes: int) -> int:
        b = Budget.split(self.reader_budget(memory_bytes), [self._need])
        return b.row_map_bytes + b.checksum_bytes + b.staging_bytes + b.scratch_bytes

    def _needed(self, memory_bytes: int, batch_rows: int) -> int:
        """Bytes without which requests of so many ids cannot be served, beside a reader as in a budget of
        ``memory_bytes``."""
        slots = min(self._table.rows, batch_rows)
        requests = ROOM_BATCHES * BYTES_PER_ID * batch_rows
        return (
            self._reader_bytes(memory_bytes)
            + requests
            + buffer_bytes(slots, self._table.row_bytes, self._policy)
        )

    def of(self, memory_bytes: int, batch_rows: int | None) -> tuple[int, int, dict[str, int]]:
        """(ids of a request, slots, bytes by use). Raises BudgetError."""
        reader = self._reader_bytes(memory_bytes)
        if batch_rows is None:
            by_requests = _REQUESTS_SHARE * memory_bytes / (ROOM_BATCHES * BYTES_PER_ID)
            by_slots = _BATCH_SHARE * (memory_bytes - reader) / self._slot_bytes
            batch_rows = max(1, min(int(by_requests), int(by_slots)))
        if self._needed(memory_bytes, batch_rows) > memory_bytes:
            needed = memory_bytes
            while self._needed(needed, batch_rows) > needed:  # more memory has a larger reader, too
                needed = self._needed(needed, batch_rows)
            raise BudgetError(needed, memory_bytes, f"serve requests of {batch_rows:,} ids")
        requests = ROOM_BATCHES * BYTES_PER_ID * batch_rows
        rest = memory_bytes - reader - requests
        row_bytes = self._table.row_bytes
        slots = min(self._table.rows, slots_for(rest, row_bytes, self._policy))
        rows, everything = slots * row_bytes, buffer_bytes(slots, row_bytes, self._policy)
        used = {"reader": reader, "requests": requests, "slot map": everything - rows, "rows": rows}
        return batch_rows, slots, used | {"unused": memory_bytes - sum(used.values())}
