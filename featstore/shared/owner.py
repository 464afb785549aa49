"""Feature buffers for all processes of a host, so that the host holds one copy of the cache.

The process that makes a :class:`SharedBuffer` owns it: the reader and, for each table, the slot map and the
policy are its own, as with any :class:`~featstore.tiers.buffer.FeatureBuffer`. The rows of all tables lie in
anonymous shared memory (``memfd_create``), which other processes, the workers of a data loader or the ranks
of a host, map read-only. They get it from the owner through a Unix socket
(:class:`~featstore.shared.client.BufferClient`), and then ask for ids and are told slots; rows never pass
through the socket.

Why an owner, and no slot map in shared memory under a lock that processes share: a process that dies in the
middle of a change would leave it half done, and a lock taken for ever; and reads end in the process that
began them. So what a process can leave behind is a closed socket, upon which the owner releases what was held
through it (:mod:`~featstore.shared.service`). When the owner dies, its clients see the same.

**Memory.** The budget covers the reader, what is known of requests under way, slot maps and rows; the tables
share it by their sizes (:mod:`~featstore.shared.split`). In system tools the rows count as shared memory of
the owner and of each client that has touched them.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import (
    as_choice,
    as_count,
    as_table_names,
    check_options,
    known_name,
    options_of,
)
from featstore.base.threads import close_later
from featstore.errors import ArgumentError, ClosedError, DeviceError, SourceError
from featstore.reader.options import READING, check_reading
from featstore.reader.reader import Reader
from featstore.shared import protocol
from featstore.shared.about import About
from featstore.shared.client import NO_TABLE, BufferClient
from featstore.shared.service import Service
from featstore.shared.split import Split
from featstore.storage.store import as_store
from featstore.tiers.buffer import FeatureBuffer
from featstore.tiers.slots import layout
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
        tables: a table's name, or a list of names; all tables of nodes by default.
        batch_rows: how many ids of a table are asked for at once at most; longer reads go in pieces. By
            default a quarter of the table's slots, or less.
        reader: ``engine``, ``queue_depth``, ``verify`` and ``model``, as for
            :class:`featstore.reader.reader.Reader`.

    ``slots`` and ``batch_rows`` are by table. Raises BudgetError with the smallest budget that works,
    SourceError; what opening a reader raises.
    """

    def __init__(
        self, store: OpenStore, *, memory: int | str = "1GiB", policy: str = "lru",
        tables: str | Sequence[str] | None = None, batch_rows: int | None = None, **reader: Any,
    ) -> None:  # fmt: skip
        self._tables = _tables_of(as_store(store), tables)
        self.memory_bytes, self._pid = parse_bytes(memory, "memory"), os.getpid()
        as_choice(
            policy,
            "policy of a shared buffer",
            [name for name in layout.POLICIES if name not in ("static", "min")],
        )
        check_options(reader, (*options_of(SharedBuffer), *READING), "a shared buffer")
        check_reading(**reader)
        batch_rows = None if batch_rows is None else as_count(batch_rows, "batch_rows")
        split = Split.of(
            self._tables, self.memory_bytes, layout.POLICIES[policy], batch_rows, reader.get("verify", True)
        )
        self.slots, self.batch_rows, self._memory = split.slots, split.batch_rows, split.memory
        self._key = protocol.new_key()
        with ExitStack() as opened:
            self._reader = opened.enter_context(
                Reader(
                    store,
                    tables=self.tables,
                    memory=split.reader_bytes,
                    static=None,
                    static_memory=0,
                    **reader,
                )
            )
            file, block = _shared_memory(split.size)
            opened.callback(os.close, file)
            self._buffers = {
                name: opened.enter_context(
                    FeatureBuffer(
                        self._reader, name, slots=count, policy=policy, block=block[split.offsets[name] :]
                    )
                )
                for name, count in self.slots.items()
            }
            buffers = [self._buffers[name] for name in self.tables]
            about = About.of(store, self._tables, split.batch_rows, split.offsets)
            self._service = opened.enter_context(Service(buffers, file, self._key, about))
            self._opened = opened.pop_all()
        weakref.finalize(self, _close_dropped, self._opened, self._pid).atexit = False

    @property
    def tables(self) -> list[str]:
        """Names of the tables."""
        return [table.name for table in self._tables]

    def client(self) -> BufferClient:
        """A new client, to be used here, in forked children, or pickled to other processes of this host."""
        return BufferClient(self._service.address, self._key)

    # What it does.

    def stats(self, table: str | None = None) -> BufferStats:
        """What has been counted for all clients, of one table or of all. What was asked ahead and had to be
        asked again counts twice. In the owner alone; elsewhere ask :meth:`BufferClient.stats`. Raises
        ClosedError, UnknownNameError."""
        self._check()
        names = self.tables if table is None else [known_name(table, self.tables, NO_TABLE)]
        return BufferStats.sum(self._buffers[name].stats() for name in names)

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
        slots = ", ".join(f"{count:,} rows of {name!r}" for name, count in self.slots.items())
        return f"<SharedBuffer of {slots}, {self.memory_bytes:,} bytes>"


def _close_dropped(opened: ExitStack, process: int) -> None:
    if process == os.getpid():
        close_later(opened.close)


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


def _tables_of(store: OpenStore, names: Any) -> list[Table]:
    """The tables named, or all of nodes."""
    if names is not None:
        return [store.table(name) for name in as_table_names(names, "tables")]
    nodes = store.node_types
    if not nodes:
        raise SourceError(
            f"the store {store.path} has tables of edges alone; say which are meant: tables= one or several "
            f"of {', '.join(map(repr, store.tables))}"
        )
    return [store.table(name) for name in nodes]
