"""Feature buffers as a tier: rows that were asked for lately stay, as a cache policy decides.

A request takes slots of a :class:`~featstore.tiers.buffer.FeatureBuffer` for its rows, waits for those that
are read into them, and copies all of them out. Where all are there already that is done by whoever asks;
otherwise by one of a few threads. A request of more rows than there are slots is served in pieces.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_choice
from featstore.base.system import submitted
from featstore.base.threads import shut_down
from featstore.engine.request import Request
from featstore.errors import BudgetError, ClosedError
from featstore.storage.store import OpenStore, Table
from featstore.tiers import RowSource, Tier
from featstore.tiers.buffer import FeatureBuffer
from featstore.tiers.slots import layout
from featstore.tiers.slots.rows import buffer_bytes, slots_for
from featstore.tiers.static_tier import new_rows
from featstore.tiers.tickets import Ticket
from featstore.units import parse_bytes

#: Policies that need neither a trace nor to be told what to keep.
POLICIES = tuple(name for name in layout.POLICIES if name not in ("min", "static"))
_THREADS = 8  # requests that wait for rows at once
_PIECE_IDS_MIN, _PIECE_IDS_MAX = 256, 1 << 16
_TICKET_BYTES = 40  # of an id that is under way: ids, slots, what was missed
_TICKETS_SHARE = 16  # of the memory, at most, is for these


class Buffer:
    """Rows that were asked for lately.

    ``policy``: one of :data:`POLICIES`. ``memory``: bytes or a size; a share of what is left over by default.
    ``options``: of the policy, see :func:`featstore.tiers.slots.layout.make_slot_map`.
    """

    def __init__(self, policy: str = "s3-fifo", memory: int | str | None = None, **options: Any) -> None:
        self.policy = as_choice(policy, "policy", POLICIES)
        self.memory, self.options = memory, options

    def host_bytes(self, tables: Sequence[Table]) -> int | None:
        return None if self.memory is None else parse_bytes(self.memory, "memory of Buffer")

    def over(self, below: RowSource, memory_bytes: int) -> Tier:
        return BufferTier(below, memory_bytes, self.policy, **self.options)

    def __repr__(self) -> str:
        return f"Buffer({self.policy!r}, memory={self.memory!r}, **{self.options!r})"


class _Job:
    """A piece of a request: rows that are in slots at once."""

    def __init__(
        self, request: Request, buffer: FeatureBuffer, ids: NDArray[np.int64], out: Any, at: Any
    ) -> None:
        self._request, self._buffer = request, buffer
        self._ids, self._out, self._at = ids, out, at
        self._ticket: Ticket | None = None
        self._cancelled = False

    def begin(self) -> bool:
        """Take slots; whether all rows are there."""
        self._ticket = self._buffer.begin(self._ids)
        return self._ticket.done()

    def hand_over(self) -> None:
        if self._ticket is not None:
            self._ticket.hand_over()

    def run(self) -> None:
        """Wait for the rows, and copy them out."""
        error: BaseException | None = None
        try:
            if not self._cancelled:
                ticket = self._ticket = self._ticket or self._buffer.begin(self._ids)
                if self._cancelled:
                    ticket.cancel()
                self._buffer.gather(ticket, self._out, at=self._at)
        except BaseException as failure:
            error = failure
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        if self._ticket is not None:
            self._ticket.release()
        self._request.close_piece(self, error)

    def cancel(self) -> None:
        self._cancelled = True
        ticket = self._ticket
        if ticket is not None:
            ticket.cancel()


class BufferTier:
    """A buffer for each table over ``below``, in so much memory, which they share by the tables' sizes. It
    belongs to one process.

    Raises BudgetError.
    """

    name = "buffer"

    def __init__(self, below: RowSource, memory_bytes: int, policy: str = "s3-fifo", **options: Any) -> None:
        self._below, self.policy = below, policy
        self._buffers: dict[str, FeatureBuffer] = {}
        tickets = memory_bytes // _TICKETS_SHARE
        ids = tickets // (_THREADS * _TICKET_BYTES)
        self._piece_ids = max(_PIECE_IDS_MIN, min(_PIECE_IDS_MAX, ids))
        self._ticket_bytes = self._piece_ids * _THREADS * _TICKET_BYTES
        slots = self._slots(memory_bytes - self._ticket_bytes, memory_bytes)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="featstore-buffer-tier")
        self._under_way = threading.BoundedSemaphore(2 * _THREADS)
        self._pid = os.getpid()
        self._closed = False
        try:
            for name, count in slots.items():
                self._buffers[name] = FeatureBuffer(below, name, slots=count, policy=policy, **options)
        except BaseException:
            self.close()
            raise

    def _slots(self, rest_bytes: int, memory_bytes: int) -> dict[str, int]:
        """Slots by table; what a table that fits whole leaves over is for the others."""
        number = layout.POLICIES[self.policy]
        tables = {name: self._below.store.table(name) for name in self._below.tables}
        least = sum(buffer_bytes(1, t.row_bytes, number) for t in tables.values())
        if rest_bytes < least:
            needed = least + self._ticket_bytes
            raise BudgetError(needed, memory_bytes, "make a buffer of one row of each table")
        slots = {}
        names = sorted(tables, key=lambda name: tables[name].data_bytes)
        for at, name in enumerate(names):
            table, later = tables[name], names[at + 1 :]
            total = sum(max(1, tables[n].data_bytes) for n in names[at:])
            share = rest_bytes * max(1, table.data_bytes) // total
            kept = sum(buffer_bytes(1, tables[n].row_bytes, number) for n in later)
            share = min(max(share, buffer_bytes(1, table.row_bytes, number)), rest_bytes - kept)
            slots[name] = max(1, min(table.rows, slots_for(share, table.row_bytes, number)))
            rest_bytes -= buffer_bytes(slots[name], table.row_bytes, number)
        return slots

    @property
    def store(self) -> OpenStore:
        return self._below.store

    @property
    def tables(self) -> list[str]:
        return self._below.tables

    @property
    def memory_bytes(self) -> int:
        return self._ticket_bytes + sum(buffer.memory_bytes for buffer in self._buffers.values())

    def submit(
        self, ids: Mapping[str, Any], *, out: Mapping[str, Any] | None, at: Mapping[str, Any] | None = None
    ) -> Request:
        self._check_open()
        filled = new_rows(self, ids) if out is None else dict(out)
        request, limit = Request(lambda: filled), self._under_way
        limit.acquire()
        request.add_done_callback(lambda _: limit.release())
        request.begin()
        jobs = []
        for name, wanted in ids.items():
            for part in self._parts(name, len(wanted)):
                rows, to = (filled[name][part], None) if at is None else (filled[name], at[name][part])
                jobs.append(_Job(request, self._buffers[name], wanted[part], rows, to))
        for job in jobs:
            request.open_piece(job)
        if len(jobs) == 1:
            self._alone(jobs[0])
        else:
            for job in jobs:
                self._hand_over(job)
        request.close_piece(None, None)
        return request

    def _alone(self, job: _Job) -> None:
        """Take slots at once, and where all rows are there, copy them out here."""
        try:
            ready = job.begin()
        except BaseException as error:
            job.end(error)
            return
        if ready:
            job.run()
        else:
            self._hand_over(job)

    def _hand_over(self, job: _Job) -> None:
        job.hand_over()
        try:
            submitted(self._pool, job.run)
        except RuntimeError:  # the pool takes nothing any more
            job.end(ClosedError("the buffer is closed"))
        except BaseException as error:
            job.end(error)

    def _parts(self, name: str, count: int) -> list[slice]:
        """A request's ids in pieces whose rows can be in slots at once."""
        step = max(1, min(self._piece_ids, self._buffers[name].slots))
        return [slice(low, min(low + step, count)) for low in range(0, count, step)]

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the buffer is closed")
        if self._pid != os.getpid():
            raise ClosedError("this buffer belongs to the process that made it; make one in each process")

    def holds(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self._buffers[table].holds(ids)

    def hits(self) -> int:
        return sum(buffer.stats().hits for buffer in self._buffers.values())

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        self._closed = True
        shut_down(self._pool)
        for buffer in self._buffers.values():
            buffer.close()

    def __repr__(self) -> str:
        return f"<BufferTier of {self.tables}, {self.policy}, {self.memory_bytes:,} bytes>"
