"""Claims on the slots of a feature buffer: who gets them, who waits, and how reads into them end.

*No deadlock.* A ticket gets all its slots or none, so nobody waits while he holds a part of what he wants. A
mini-batch that fits the buffer but not beside those in use waits for releases, as long as there is somebody
to wait for: a read under way that frees slots when it ends, or a ticket whose owner (the thread that began
it) is alive and not itself waiting in ``begin``. Where all others who hold slots wait, the last who would
join them gets a BudgetError instead, and so does a single thread that holds everything itself. A ticket that
is passed on to another thread for release belongs to nobody (:meth:`Ticket.hand_over`), and is waited for.

*No lost read.* Slots are changed under one lock, which is held for the time of a kernel. Reads end in threads
of the engine, which must not wait: they only put the ended read on a list and wake up who waits; the next who
holds the lock enters it in the slot map. When a read fails or is cancelled, the tickets that wait for its
rows read them themselves.

*No torn step.* Slots are taken and reads begun by one thread of the buffer's own, which no signal interrupts;
what was done is noted by the kernels themselves. Whoever is interrupted gives back what was taken for him. A
ticket that is forgotten is released when it is collected.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_number, shown
from featstore.base.ids import parse_ids
from featstore.base.threads import Runner, Wake
from featstore.errors import (
    ArgumentError,
    BudgetError,
    CancelledError,
    ClosedError,
    IdError,
    WaitTimeoutError,
)
from featstore.storage.store import Table
from featstore.tiers import RowSource
from featstore.tiers.slots import layout
from featstore.tiers.slots import slots as sl
from featstore.tiers.slots.contents import joined
from featstore.tiers.slots.rows import buffer_bytes, parse_uses
from featstore.tiers.tickets import Claim, Read, Ticket

_PATIENCE_SECONDS = 1.0  # who waits looks this often whether those he waits for are alive
_FEW = 512  # slots that are ended together where memory is short


def check_reader(reader: Any) -> None:
    """Raise ArgumentError for what gives no rows."""
    if any(not hasattr(reader, one) for one in ("store", "tables", "submit")):
        raise ArgumentError(f"reader must be a store's reader, not {shown(reader)}")


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + as_number(timeout, "timeout")


class Claims:
    """Slots of one table's rows, and the tickets that hold them; what :class:`FeatureBuffer` begins with."""

    slots: int
    x: NDArray[Any]
    policy: int
    _map: layout.SlotMap
    _map_memory: NDArray[np.uint8]
    _rows: Table
    _table: str
    _reader: RowSource
    _batches: int

    def _start_claims(self) -> None:
        self._lock = threading.Lock()  # of the slot map
        self._wakes: set[Wake] = set()  # of those who wait
        #: Called when a read has ended or slots were given back; must not wait.
        self.on_change: Callable[[], None] | None = None
        self._ended: deque[Read] = deque()
        self._forgotten: deque[Claim] = deque()
        self._reading: set[Read] = set()
        self._claims: set[Claim] = set()  # those that hold pins
        self._waiting: set[threading.Thread] = set()
        self._closed, self._pid = False, os.getpid()
        self._kept: set[Claim] = set()  # of rows kept for good
        self._runner = Runner("featstore-buffer")

    @property
    def memory_bytes(self) -> int:
        """Memory of rows and slot map."""
        return self.slots * self._rows.row_bytes + len(self._map_memory)

    def _kept_ids(self) -> NDArray[np.int64]:
        return joined(self.kept_pieces())

    def kept_pieces(self) -> Iterator[NDArray[np.int64]]:
        """The ids of the rows kept for good, int64, in pieces."""
        for claim in self._kept:
            yield self._map.slots["row"][claim.slots]

    @property
    def slots_unkept(self) -> int:
        """Slots that are not taken by rows kept for good."""
        return self.slots - sum(len(claim.slots) for claim in self._kept)

    # Beginning.

    def begin(
        self, ids: Any, next_use: Any = None, *, timeout: float | None = None, reader: RowSource | None = None
    ) -> Ticket:  # fmt: skip
        """Claim slots for a mini-batch and start to read what is missing.

        Args:
            ids: node ids, integers of any dtype and shape; duplicates are fine, and read once.
            next_use: for ``"min"``: for each id the mini-batch that uses it next, or ``NEVER``.
            timeout: seconds to wait for slots that others hold, for ever by default.
            reader: asked for what is missing, by default the buffer's own.

        Raises IdError; BudgetError where the buffer is too small for this mini-batch, or for all those that
        wait for each other; TimeoutError; what the reader's ``submit`` raises.
        """
        self._check_open()
        parsed = parse_ids(ids, copy=True)
        self.check_ids(parsed.values)
        ticket = Ticket(self, parsed, self._parse_uses(next_use))
        if reader is not None:
            check_reader(reader)
        deadline = _deadline(timeout)
        me, reads = threading.current_thread(), self._reader if reader is None else reader
        try:
            with self._awaited() as wake:
                while not self._run(self._take, ticket, reads):
                    self._wait(wake, deadline, "slots that other tickets hold")
            return ticket
        except BaseException:
            ticket.given_up = True
            self.release(ticket)
            raise
        finally:
            with self._lock:
                self._waiting.discard(me)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the feature buffer is closed")
        self._check_process()

    def _check_process(self) -> None:
        """Raise ClosedError in a forked child: the thread and who held the lock stayed in the parent."""
        if self._pid != os.getpid():
            raise ClosedError(
                "this feature buffer belongs to the process that made it; make one in each process"
            )

    def check_ids(self, ids: NDArray[np.int64]) -> None:
        """Raise IdError for ids that the table has not."""
        if len(ids) == 0:
            return
        for bad in (ids.min(), ids.max()):
            if not 0 <= bad < self._rows.rows:
                raise IdError(
                    f"node id {bad} is out of range: table {self._table!r} has {self._rows.rows:,} rows"
                )

    def _parse_uses(self, next_use: Any) -> NDArray[np.int32]:
        return sl.NO_NEXT_USE if next_use is None else parse_uses(next_use, self._batches)

    def _run(self, step: Callable[..., bool], *arguments: Any) -> bool:
        """Take a step in the buffer's own thread, where no signal interrupts it."""
        if self._closed:
            raise ClosedError("the feature buffer is closed")
        return bool(self._runner.run(partial(step, *arguments)))

    def _take(self, ticket: Ticket, reader: RowSource) -> bool:
        """Take slots and start the read; False where it has to wait. Runs in the buffer's thread."""
        claim, short = ticket.claim, 1
        with self._lock:
            self._check_open()
            self._enter_ended()
            while short > 0 and not ticket.given_up:
                short = -sl.acquire(
                    self._map,
                    ticket.ids,
                    claim.slots,
                    ticket.missed,
                    ticket.waits,
                    ticket.next_use,
                    claim.outcome,
                )[0]
                if short > 0 and not self._enter_ended():
                    self._check_wait(ticket, short)
                    if claim.owner is not None:
                        self._waiting.add(claim.owner)
                    return False
            if short > 0:  # given up before: what has been claimed meanwhile is released like any other
                return False
            self._claims.add(claim)
            if claim.owner is not None:
                self._waiting.discard(claim.owner)
            ticket.waits = ticket.waits[: claim.outcome[1]]
            read = self._new_read(ticket, -short)
        self._submit(read, reader)
        return True

    def _check_wait(self, ticket: Ticket, short: int) -> None:
        """Raise BudgetError where waiting for slots would not help. With the lock."""
        ids = np.unique(ticket.ids)
        if len(ids) > self.slots_unkept:
            needed = (
                self.slots - self.slots_unkept + len(np.setdiff1d(ids, self._kept_ids(), assume_unique=True))
            )
            if needed > self.slots:
                self._raise_budget(needed, f"hold the {len(ids):,} rows of a mini-batch")
        if self._reading or any(self._ends(claim, ticket.claim.owner) for claim in self._claims):
            return
        self._raise_budget(
            self.slots + short,
            "hold one more mini-batch beside those that are in use, none of which can be released "
            "before (release a ticket first, or hand it over to the thread that will)",
        )

    def _ends(self, claim: Claim, me: threading.Thread | None) -> bool:
        """Whether another's pins can be expected to be released while this thread waits."""
        if claim in self._kept:
            return False
        who = claim.owner
        return (
            claim.forgotten or who is None or (who is not me and who not in self._waiting and who.is_alive())
        )

    def _raise_budget(self, slots: int, what: str) -> None:
        row_bytes = self._rows.row_bytes
        raise BudgetError(buffer_bytes(slots, row_bytes, self.policy, self._batches), self.memory_bytes, what)

    def _new_read(self, ticket: Ticket, count: int) -> Read:
        """What a ticket has to read: its first ``count`` missed positions. With the lock. Where there is no
        memory for it, the slots are of reads that have failed."""
        positions = ticket.missed[:count]
        try:
            read = Read(ticket.ids[positions], ticket.slots[positions])
        except BaseException as error:
            ticket.failed = error.with_traceback(None)  # which would keep the ticket
            for low in range(0, count, _FEW):
                few = ticket.slots[positions[low : low + _FEW]]
                sl.unpin(self._map, few, layout.FAILED, np.ones(1, np.int64))
            self._notify()
            raise
        if count:
            ticket.reads.append(read)
            self._reading.add(read)
        return read

    def _submit(self, read: Read, reader: RowSource) -> None:
        """Start a read, without the lock: ``submit`` may wait for other reads to end."""
        if len(read.slots) == 0:
            return
        try:
            table = self._table
            request = reader.submit({table: read.ids}, out={table: self.x}, at={table: read.slots})
        except BaseException as error:
            self._end(read, error)
            raise
        read.request = request
        request.add_done_callback(lambda done: self._end(read, done.exception()))

    def _end(self, read: Read, error: BaseException | None) -> None:
        """A read has ended. Called by the engine's threads."""
        read.error = error
        self._ended.append(read)
        self._notify()

    # Waiting.

    def _notify(self) -> None:
        for wake in self._wakes.copy():
            wake.set()
        if self.on_change is not None:
            self.on_change()

    @contextmanager
    def _awaited(self) -> Iterator[Wake]:
        """What wakes up this thread when something has happened from now on."""
        wake = Wake()
        self._wakes.add(wake)
        try:
            yield wake
        finally:
            self._wakes.discard(wake)

    def _wait(self, wake: Wake, deadline: float | None, what: str) -> None:
        """Wait until something has happened, or for some time."""
        patience = (
            _PATIENCE_SECONDS if deadline is None else min(_PATIENCE_SECONDS, deadline - time.monotonic())
        )
        if patience <= 0:
            raise WaitTimeoutError(f"still waiting for {what}")
        wake.wait(patience)

    def _enter_ended(self) -> bool:
        """Enter in the slot map which reads have ended, and release forgotten tickets; whether there were
        any. With the lock.

        What is entered is taken from its list last, and entered once: an interrupt loses nothing."""
        found = False
        while self._ended:
            read, found = self._ended[0], True
            sl.unpin(
                self._map, read.slots, layout.PRESENT if read.error is None else layout.FAILED, read.once
            )
            self._reading.discard(read)
            read.request = None
            self._ended.popleft()
        while self._forgotten:
            self._unclaim(self._forgotten[0])
            self._forgotten.popleft()
            found = True
        return found

    def _unclaim(self, claim: Claim) -> None:
        sl.release(self._map, claim.slots, claim.outcome)
        self._claims.discard(claim)

    def forget(self, claim: Claim) -> None:
        """Whoever holds the lock next releases the claim: taking the lock here could be for the second time
        in this thread."""
        self._forgotten.append(claim)

    def wait_for(self, ticket: Ticket, timeout: float | None) -> NDArray[np.int32]:
        deadline = _deadline(timeout)
        with self._awaited() as wake:
            while not self.arrived(ticket):
                self._wait(wake, deadline, "rows to be read")
        return ticket.slots

    def arrived(self, ticket: Ticket) -> bool:
        """Whether all rows of a ticket are there. Raises what :meth:`Ticket.result` raises."""
        self._check_process()
        while True:
            with self._lock:
                self._enter_ended()
                if not ticket.claim.held:
                    raise CancelledError("the ticket was released before its rows were there")
                if ticket.failed is not None:
                    raise ticket.failed.with_traceback(None)
                for read in ticket.reads:
                    if not read.once[0] and read.error is not None:
                        raise read.error
                own = all(not read.once[0] for read in ticket.reads)
                waits = len(ticket.waits)
            if not waits:
                return own
            self._check_open()
            if self._run(self._look_again, ticket):
                return False

    def _look_again(self, ticket: Ticket) -> bool:
        """Whether a ticket still waits for others' reads; reads what they failed to. Runs in the buffer's
        thread."""
        with self._lock:
            self._enter_ended()
            if not ticket.claim.held:
                return False
            still, reads = sl.look_again(self._map, ticket.slots, ticket.waits, ticket.missed)
            ticket.waits = ticket.waits[:still]
            read = self._new_read(ticket, reads)
        self._submit(read, self._reader)
        return bool(still > 0)

    def _check_own(self, ticket: Ticket) -> None:
        """Raise ArgumentError for a ticket of another buffer: its slots hold other rows here."""
        if not isinstance(ticket, Ticket) or ticket.holder is not self:
            of = "of another buffer" if isinstance(ticket, Ticket) else f"but {shown(ticket)}"
            raise ArgumentError(f"ticket must be one that this buffer's begin() gave, not one {of}")

    def release(self, ticket: Ticket) -> None:
        self._check_own(ticket)
        if self._pid != os.getpid():
            return  # the slots are the parent's, and so is the ticket
        with self._lock:
            self._unclaim(ticket.claim)
        self._notify()
